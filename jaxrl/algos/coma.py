"""COMA: one shared actor, a centralised critic with a Q-value for each action of an agent, counterfactual advantages.

Foerster et al. 2018, "Counterfactual Multi-Agent Policy Gradients" (arXiv 1705.08926), in the form that Westheider,
Rückin and Popović 2023 (arXiv 2303.01150) use for multi-UAV mapping. `coma_original` computes what their repository
does. A training step rolls out `horizon` steps in every environment, one episode where all have that length, and then
learns in this order:

1. The target critic Q' gives the targets of all transitions, y_t = r_t + d_t ((1 - l) Q'(s', a') + l y_{t+1}), where
   d_t = gamma (1 - terminated) and l = lambda (1 - done): `compute_targets`. Agents that leave: `lambda_targets`.
2. Every `target_update_period` training steps Q' becomes a copy of Q: `begin_learning`. With `tau` it moves towards Q
   by this share instead, before the first minibatch of each epoch: `learn_step`.
3. Each epoch first takes a step of the critic on every minibatch, with the loss mean w (Q(s, a) - y)^2:
   `update_critic`. After its step the critic's values Q(s, .) of the minibatch are stored.
4. Each of the last `actor_epochs` epochs then takes a step of the actor on every minibatch, with these values: the
   advantage is A = Q(s, a) - sum_b pi(b) Q(s, b), and the loss is -mean w A log pi(a): `update_actor`. The recommended
   settings take y in place of Q(s, a) in A (`advantage: return`), clip ratios and add an entropy bonus.

The policy pi is mixed with uniform exploration and then masked. The weight w is 0 after an episode's end, and 1 on
average. With `memory` the actor is recurrent, as in Foerster et al.; the critic, which sees the state, is not. With
`message_passing` the actor also hears other agents; without `share_parameters` each type of agent has networks of its
own: see `team` and `segments`. The file goes on in this order: settings, targets and losses, the training step, acting,
networks, sizes.

From Westheider et al., not in Foerster et al.: several epochs over minibatches of transitions, shuffled over whole
episodes, in which critic and actor take turns, and an actor's gradient without importance ratio (unless `clip_ratio`
is set); Adam; networks without memory; means, not sums, over agents and steps. New here: the policy that is trained is
the one that acts, after exploration and mask (theirs is before the mask); all episodes of a training step act with the
same epsilon, also the action after the last step in the targets; transitions are shuffled within each logical shard;
`clip_ratio` holds in every epoch; truncated episodes bootstrap.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import optax

from envs_jax.base import Array, Discrete, EnvSpec, TimeStep, pytree
from envs_jax.critic_input import with_critic_input
from envs_jax.progress import Progress, total
from jaxrl.algos import base, on_policy
from jaxrl.algos.base import RATE, UNIT, AlgoState, Learner, Learning, Mode, Phase, Stage, Trajectory, setting
from jaxrl.algos.egocentric import reorder, turn
from jaxrl.algos.on_policy import Minibatches, lambda_targets, pick
from jaxrl.algos.segments import Segments
from jaxrl.algos.team import Situation, TeamAlgorithm
from jaxrl.common.types import Key, Params, PolicyParams
from jaxrl.nn.distributions import apply_action_mask, entropy, epsilon_mix, mask_logits, select_action_value
from jaxrl.nn.networks import Network
from jaxrl.nn.precision import stored_dtype
from jaxrl.nn.recurrent import Carry
from jaxrl.rl.data_parallel import jit_inline
from jaxrl.rl.policy_gradient import divergence, policy_gradient_loss, policy_metrics

Arrays = dict[str, Array]
STAGES = ("critic", "actor")  # of an epoch, in order
BATCH_KEYS = ("observation", "critic_input", "action", "mask", "log_prob", "weight", "target", "situation")


@pytree
class ComaParameters:
    """Parameters and optimizers, the same on every device.

    Attributes:
        actor, critic: Learners.
        target: parameters of the target critic.
    """

    actor: Learner
    critic: Learner
    target: Params


@dataclasses.dataclass(frozen=True)
class Coma(TeamAlgorithm):
    """Counterfactual multi-agent policy gradients on whole episodes."""

    parts: ClassVar[tuple[str, ...]] = ("actor", "critic")
    weighs_agents: ClassVar[bool] = True
    acting_settings: ClassVar[dict[str, Any]] = {"minibatch_size": 10**9, "scale_advantage": False}
    compatible_settings: ClassVar[tuple[str, ...]] = ("egocentric", *TeamAlgorithm.compatible_settings)
    sweepable: ClassVar[tuple[str, ...]] = (
        "gamma", "td_lambda", "actor_lr", "critic_lr", "final_lr_fraction", "eps_max", "eps_min", "entropy_weight",
        "entropy_final",
    )  # fmt: skip

    minibatch_size: int = setting(
        640, "agent transitions per minibatch; each epoch has as many minibatches as the episodes fill, and drops the "
        "rest", between=(1, 1e9),
    )  # fmt: skip
    num_epochs: int = setting(5, "epochs (passes over the data) per training step", between=(1, 10_000))
    actor_epochs: int = setting(0, "number of last epochs that also train the actor; 0 = all", between=(0, 10_000))
    gamma: float = setting(0.99, "discount factor per step", between=UNIT)
    td_lambda: float = setting(0.8, "lambda of the TD(lambda) targets; 1 = returns, 0 = one step", between=UNIT)
    actor_lr: float = setting(1e-5, "learning rate of the actor (Adam)", between=RATE)
    critic_lr: float = setting(1e-4, "learning rate of the critic (Adam)", between=RATE)
    max_grad_norm: float = setting(0.0, "clip gradients to this global norm; 0 = never", between=(0, 1e9))
    final_lr_fraction: float = setting(1.0, "learning rates fall linearly to this fraction at the end", between=UNIT)
    target_update_period: int = setting(10, "training steps between copies to the target network", between=(1, 1e9))
    tau: float = setting(0.0, "share by which the target network moves to Q in each epoch; 0 = copies", between=UNIT)
    eps_max: float = setting(0.5, "share of uniform exploration at the start, before masking", between=UNIT)
    eps_min: float = setting(0.02, "share of uniform exploration after eps_anneal episodes", between=UNIT)
    eps_anneal: int = setting(10_000, "episodes over which exploration falls linearly", between=(1, 1e12))
    dueling: bool = setting(False, "critic = value of the state + mean-free action values (arXiv 1511.06581)")
    clip_ratio: float = setting(0.0, "clip importance ratios to 1 +/- this (PPO); 0 = no ratio", between=(0, 1e6))
    target_kl: float = setting(
        0.0, "skip actor updates on minibatches whose KL divergence from the acting policy exceeds 1.5 times this "
        "(nats), where implementations of PPO stop; 0 = never", between=(0, 1e6),
    )  # fmt: skip
    entropy_weight: float = setting(
        0.0, "weight of the entropy bonus of the masked policy without exploration (arXiv 1602.01783)", between=(0, 1e6)
    )
    entropy_final: float = setting(
        0.0, "weight of the entropy bonus after entropy_anneal or entropy_anneal_fraction", between=(0, 1e6)
    )
    entropy_anneal: int = setting(0, "episodes over which the bonus changes linearly; 0 = constant", between=(0, 1e12))
    entropy_anneal_fraction: float = setting(
        0.0, "share of the run over which the bonus changes linearly (or entropy_anneal); 0 = not used", between=UNIT
    )
    critic_warmup: int = setting(0, "episodes at the start that train only the critic", between=(0, 1e12))
    advantage: Literal["critic", "return"] = setting(
        "critic", "critic: Q(a) - baseline (COMA); return: TD(lambda) target - baseline (arXiv 1506.02438)"
    )
    scale_advantage: bool = setting(False, "divide advantages by their standard deviation over the minibatch")
    egocentric: bool = setting(
        False, "show networks the view from the agent, in which symmetric situations look alike; for environments that "
        "define it, such as coverage",
    )  # fmt: skip
    hidden_size: int = setting(256, "channels of the convolutions and units of the dense layers", between=(1, 2**14))
    depth: int = setting(1, "number of hidden dense layers; images pass convolutions first", between=(0, 100))
    initializer: Literal["torch", "he"] = setting("torch", "torch: PyTorch's default; he: He normal, small last layer")

    def __post_init__(self) -> None:
        spec = self.spec
        if not isinstance(spec.action, Discrete):
            raise ValueError(f"coma needs discrete actions, '{spec.name}' has continuous ones: use ppo, sac or ddpg")
        if self.egocentric and (spec.egocentric is None or spec.critic_input is None):
            missing = "critic_input" if spec.egocentric else "egocentric views"
            raise ValueError(f"'{spec.name}' has no {missing}: use --egocentric false")
        object.__setattr__(self, "spec", with_critic_input(spec))
        if self.spec.critic_input is None or self.spec.critic_input_spec is None:
            raise ValueError(f"coma needs a centralised observation, but '{spec.name}' defines no critic_input")
        super().__post_init__()
        if self.eps_min > self.eps_max:
            raise ValueError(
                f"eps_min {self.eps_min:g} exceeds eps_max {self.eps_max:g}, and exploration falls from eps_max to "
                "eps_min: lower eps_min or raise eps_max"
            )
        if self.entropy_anneal and self.entropy_anneal_fraction:
            raise ValueError(
                f"entropy_anneal {self.entropy_anneal} and entropy_anneal_fraction {self.entropy_anneal_fraction:g} "
                "exclude each other: set one of them to 0 (--entropy_anneal_fraction 0 where the preset has it)"
            )
        row = self.row_samples(self.spec.horizon)
        if self.minibatch_size < row:
            raise ValueError(
                f"minibatch_size {self.minibatch_size} is less than {row} transitions kept together: use {row} or more"
            )
        if self.scale_advantage and self.gradient_samples * self.layout.shards < 2:
            raise ValueError(
                "a minibatch holds one sample, whose advantage has no deviation for scale_advantage: raise "
                "minibatch_size or num_envs, or give --scale_advantage false"
            )
        if self.actor_epochs > self.num_epochs:
            raise ValueError(f"actor_epochs {self.actor_epochs} exceeds num_epochs {self.num_epochs}: lower it")

    @classmethod
    def batch(cls, spec: EnvSpec, settings: dict[str, Any], num_envs: int) -> int:
        """Return num_envs or, where minibatches hold whole episodes, the episodes of one."""
        if not cls.keeps_rollouts(spec, settings):
            return num_envs
        return max(int(settings.get("minibatch_size", cls.minibatch_size)) // (spec.horizon * spec.num_agents), 1)

    # Targets, losses and updates

    def compute_targets(self, trajectory: Trajectory, last: TimeStep, value: Array, last_value: Array) -> Array:
        """Return y [T, B, A] of the target critic's values: of the actions taken, and of the next action."""
        return lambda_targets(trajectory, last, value, last_value, self.gamma, self.td_lambda)

    def update_critic(self, critic: Learner, batch: Arrays, progress: Progress) -> tuple[Learner, Arrays]:
        """Take a gradient step on the critic's loss, the mean of w (Q(s, a) - y)^2."""

        def loss(critic: Params, sample: Arrays) -> tuple[Array, Any]:
            sample = self.flatten_rows(sample)
            value = select_action_value(self.values(critic, sample["critic_input"]), sample["action"])
            return jnp.mean(sample["weight"] * jnp.square(value - sample["target"])), ()

        gradient, (critic_loss, _) = self.layout.gradient(loss, critic.params, batch, self.batches.row_samples)
        critic, norm = self.step("critic", critic, gradient, progress)
        return critic, {"critic_loss": critic_loss, "critic_grad_norm": norm}

    def compute_advantages(self, sample: Arrays, action_probs: Array) -> Array:
        """Return Q of the action taken, or its TD(lambda) target, minus the counterfactual baseline (equation 4)."""
        uses_return = self.advantage == "return"
        value = sample["target"] if uses_return else select_action_value(sample["values"], sample["action"])
        return value - jnp.sum(action_probs * sample["values"], axis=-1)

    def policy_loss(self, logits: Array, epsilon: Array, sample: Arrays) -> tuple[Array, Arrays]:
        """Return - mean w A log pi(a) (equation 5), clipped with `clip_ratio`, and metrics, for logits [N, n]."""
        action, weight = sample["action"], sample["weight"]
        action_probs = apply_action_mask(epsilon_mix(logits, epsilon), sample["mask"])  # exploration, then the mask
        advantage = self.compute_advantages(sample, jax.lax.stop_gradient(action_probs))
        scaled = advantage / sample["scale"] if self.scale_advantage else advantage
        log_prob = jnp.log(jnp.maximum(select_action_value(action_probs, action), 1e-8))
        loss = policy_gradient_loss(log_prob, sample["log_prob"], scaled, weight, self.clip_ratio)
        kl = {"kl": divergence(log_prob, sample["log_prob"], weight)}
        return loss, policy_metrics(advantage, log_prob, weight) | kl

    def update_actor(self, actor: Learner, batch: Arrays, progress: Progress) -> tuple[Learner, Arrays]:
        """Take a gradient step on the policy loss minus the entropy bonus.

        The actor stays as it is while `critic_warmup` lasts, and on minibatches whose divergence exceeds `target_kl`.
        """
        epsilon = self.epsilon(progress)

        def advantages(sample: Arrays) -> Array:
            shape = sample["action"].shape
            logits, sample = self.apply_actor(actor.params, sample)
            mixed = epsilon_mix(logits, epsilon)
            return self.compute_advantages(sample, apply_action_mask(mixed, sample["mask"])).reshape(shape)

        if self.scale_advantage:
            values = self.layout.apply(advantages, batch, self.batches.row_samples)
            batch = batch | {"scale": self.batches.deviation(values, batch["weight"])}

        def loss(actor: Params, sample: Arrays) -> tuple[Array, Arrays]:
            logits, sample = self.apply_actor(actor, sample)
            actor_loss, metrics = self.policy_loss(logits, epsilon, sample)
            unmixed = jax.nn.softmax(mask_logits(logits, sample["mask"]))
            mean_entropy = jnp.mean(sample["weight"] * entropy(unmixed))
            if base.is_used(self.entropy_weight) or base.is_used(self.entropy_final):
                actor_loss = actor_loss - self.entropy_bonus(progress) * mean_entropy
            return actor_loss, metrics | {"policy_entropy": mean_entropy}

        gradient, (actor_loss, metrics) = self.layout.gradient(loss, actor.params, batch, self.batches.row_samples)
        active = total(progress.episodes) >= self.critic_warmup if self.critic_warmup else jnp.bool_(True)
        if self.target_kl:  # of the policy before this step
            active &= metrics["kl"] <= 1.5 * self.target_kl
            metrics["actor_moved"] = active.astype(jnp.float32)
        actor, norm = self.step("actor", actor, gradient, progress, active)
        return actor, {"actor_loss": actor_loss, "actor_grad_norm": norm, **metrics}

    @functools.cached_property
    def jitted_updates(self) -> dict[str, Callable[..., Any]]:
        """Return the updates by stage, each traced once for the shapes of its metrics and for its call."""
        return {"critic": jit_inline(self.update_critic), "actor": jit_inline(self.update_actor)}

    # A training step

    @property
    def phases(self) -> tuple[Phase, ...]:
        """Return one phase: roll out whole episodes, then learn from them and discard them."""
        return (Phase("train", self.spec.horizon, self.num_epochs * self.batches.per_epoch, restart=True),)

    @property
    def first_actor_epoch(self) -> int:
        return self.num_epochs - (self.actor_epochs or self.num_epochs)

    @property
    def learn_stages(self) -> tuple[Stage, ...]:
        """Return the stages: in each epoch all minibatches train the critic; in the last epochs then also the actor."""
        names = [("critic",) if epoch < self.first_actor_epoch else STAGES for epoch in range(self.num_epochs)]
        return tuple(Stage(name, epoch, self.batches.per_epoch) for epoch, stage in enumerate(names) for name in stage)

    def begin_learning(
        self, state: AlgoState, trajectory: Trajectory, last_timestep: TimeStep, key: Key, progress: Progress
    ) -> Learning:
        """Compute the targets of all transitions, copy the critic if it is time, and shuffle for each epoch."""
        params, (key_last, key_shuffle) = state.replicated, jax.random.split(key)
        data = self.compute_transitions(params, trajectory, last_timestep, key_last, progress)
        if self.tau == 0:  # the copy of the critic, from before this step's epochs, serves the next step's targets
            target = optax.periodic_update(
                params.critic.params, params.target, progress.learn_calls[1], self.target_update_period
            )
            params = dataclasses.replace(params, target=target)
        target_mean = self.layout.sample_mean(data["weight"] * data["target"])
        keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(
            key_shuffle, jnp.arange(self.num_epochs, dtype=jnp.uint32)
        )
        data["order"] = order = self.batches.shuffle(keys)
        assert isinstance(self.spec.action, Discrete)
        row = *data["action"].shape[2:], self.spec.action.n
        values = jnp.zeros((*order.shape[:1], *order.shape[2:], *row), jnp.float32)
        names = tuple(name for name in BATCH_KEYS if name in data)
        batch = jax.eval_shape(lambda: pick(data, order[:, 0, 0], *names))
        values_of_batch = {"values": jax.eval_shape(lambda: values[:, 0])}
        inputs = {"critic": (params.critic, batch), "actor": (params.actor, batch | values_of_batch)}
        epochs = {"critic": self.num_epochs, "actor": self.num_epochs - self.first_actor_epoch}
        metrics = {
            stage: self.batches.empty_metrics(update, *inputs[stage], progress, epochs=epochs[stage])
            for stage, update in self.jitted_updates.items()
        }
        return Learning(data, values, (params, metrics, target_mean))

    def learn_step(self, learning: Learning, stage: str, epoch: Array, index: Array, progress: Progress) -> Learning:
        """Train the critic or the actor on minibatch `index`.

        The actor gets the values that the critic had for a minibatch just after its own step on it. With `tau` the
        target critic moves towards the critic once per epoch, before the first minibatch.
        """
        data, values, (params, metrics, target_mean) = learning.data, learning.sharded, learning.replicated
        batch = pick(data, data["order"][:, epoch, index], *(name for name in BATCH_KEYS if name in data))
        if stage == "actor":
            batch |= {"values": values[:, index]}
        if stage == "critic" and self.tau:
            rate = jnp.where(index == 0, self.tau, 0.0)
            target = optax.incremental_update(params.critic.params, params.target, rate)
            params = dataclasses.replace(params, target=target)
        learner, update_metrics = self.jitted_updates[stage](getattr(params, stage), batch, progress)
        if stage == "critic":

            def compute_values(sample: Arrays) -> Array:
                rows = self.values(learner.params, self.flatten_rows(sample)["critic_input"])
                return rows.reshape(*sample["action"].shape, -1)

            values = values.at[:, index].set(self.layout.apply(compute_values, batch, self.batches.row_samples))
        row = (epoch - (self.first_actor_epoch if stage == "actor" else 0)) * self.batches.per_epoch + index
        stage_metrics = {name: rows.at[row].set(update_metrics[name]) for name, rows in metrics[stage].items()}
        params = dataclasses.replace(params, **{stage: learner})
        return Learning(data, values, (params, metrics | {stage: stage_metrics}, target_mean))

    def end_learning(self, learning: Learning) -> tuple[AlgoState, Arrays]:
        params, metrics, target_mean = learning.replicated
        return AlgoState(params, ()), metrics["critic"] | metrics["actor"] | {"target_mean": target_mean}

    def compute_transitions(
        self, params: ComaParameters, trajectory: Trajectory, last: TimeStep, key: Key, progress: Progress
    ) -> Arrays:
        """Return all transitions of all agents as leaves [S local, samples, ...], with "target" and "weight"."""
        layout, batches = self.layout, self.batches
        transitions = batches.flatten_all(critic_input=self.critic_inputs(trajectory), action=trajectory.action)

        def compute_value(rows: Arrays) -> Array:
            sample = self.flatten_rows(rows)
            value = select_action_value(self.values(params.target, sample["critic_input"]), sample["action"])
            return value.reshape(rows["action"].shape)

        def compute_last_value(rows: tuple[Carry, TimeStep, Array]) -> Array:
            """Return the value [B, A] of the actions that the policy would take after the trajectory."""
            action = self.act(params.actor.params, *rows, progress, "explore")[0]
            assert self.spec.critic_input is not None
            inputs = jax.vmap(self.spec.critic_input)(rows[1], action)
            values = self.values(params.target, inputs.reshape(-1, *inputs.shape[2:]))
            return select_action_value(values, action.reshape(-1)).reshape(action.shape)

        situation, carry = self.situation(trajectory.timestep), self.team_carry("actor")
        observation, rows = trajectory.timestep.observation, transitions
        if isinstance(batches, Segments):
            rows = {name: batches.cut(x) for name, x in transitions.items()}
        value = layout.apply(compute_value, rows, batches.row_samples).reshape(layout.local_shards, -1)
        if isinstance(batches, Segments) and self.recurrent:
            unroll = functools.partial(self.team_logits, params.actor.params)
            _, carry = batches.unroll(unroll, observation, situation, carry)
        keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, layout.env_indices())
        ends = carry, *layout.split((last, keys))
        last_value = layout.apply(compute_last_value, ends, per_row=self.spec.num_agents)
        last_value = last_value.reshape(-1, self.spec.num_agents)
        target = self.compute_targets(trajectory, last, batches.unflatten(value), last_value)
        weight = batches.sample_weights(trajectory)
        transitions |= batches.flatten_all(observation=observation, **trajectory.extras, target=target, weight=weight)
        if isinstance(batches, Segments):
            return batches.cut_samples(transitions, trajectory, situation)
        return transitions

    def critic_inputs(self, trajectory: Trajectory) -> Array:
        """Return the critic inputs [T, B, A, ...] of a trajectory, in the dtype of its stored observations."""
        assert self.spec.critic_input is not None
        inputs = jax.vmap(jax.vmap(self.spec.critic_input))(trajectory.timestep, trajectory.action)
        return inputs.astype(stored_dtype(self.spec.critic_input_spec, trajectory.timestep.observation.dtype))

    # Acting

    def epsilon(self, progress: Progress) -> Array:
        """Return epsilon float32[] of a training step, at its last episode (the first one of the run is number 1)."""
        episode = total(progress.episodes) + self.layout.num_envs
        return self.eps_max - (self.eps_max - self.eps_min) * jnp.minimum(episode / self.eps_anneal, 1.0)

    def entropy_bonus(self, progress: Progress) -> Array:
        share: Array | float = 0.0
        if self.entropy_anneal_fraction:
            share = jnp.minimum(progress.fraction / self.entropy_anneal_fraction, 1.0)
        elif self.entropy_anneal:
            share = jnp.minimum(total(progress.episodes) / self.entropy_anneal, 1.0)
        return jnp.float32(self.entropy_weight + (self.entropy_final - self.entropy_weight) * share)

    def schedules(self, progress: Progress) -> dict[str, Array]:
        return {"epsilon": self.epsilon(progress)}

    def act(
        self, policy_params: PolicyParams, carry: Any, timestep: TimeStep, keys: Key, progress: Progress, mode: Mode
    ) -> tuple[Array, Any, Any]:
        """Compute the logits of all agents at once, then select their actions one after another."""
        epsilon = self.epsilon(progress) if mode == "explore" else 0.0
        batch_shape = timestep.observation.shape[:2]
        if self.learns_by_team:
            situation = self.situation(jax.tree.map(lambda x: x[:, None], timestep))
            logits, carry = self.team_logits(policy_params, timestep.observation[:, None], situation, carry)
            logits = logits[:, 0]
        else:
            flat = timestep.observation.reshape(-1, *timestep.observation.shape[2:])
            logits = self.logits(policy_params, flat).reshape(*batch_shape, -1)
        action_probs = epsilon_mix(logits, epsilon)
        scores = logits if mode == "greedy" else None
        action, extras = on_policy.sample_sequentially(self.spec, timestep, action_probs, keys, scores)
        return action, carry, extras

    # Networks

    @functools.cached_property
    def networks(self) -> dict[str, Network]:
        """Return the actor, with a logit for each action, and the critic, with a value for each, 1 + n if dueling."""

        def make(part: str, outputs: int, box: Any) -> Network:
            shape = box.shape
            if self.egocentric:
                assert self.spec.egocentric is not None
                shape = jax.eval_shape(self.spec.egocentric, jax.ShapeDtypeStruct(box.shape, box.dtype))[0].shape
            return self.make_team_network(part, outputs, shape, shape)

        assert isinstance(self.spec.action, Discrete)
        critic = make("critic", self.spec.action.n + self.dueling, self.spec.critic_input_spec)
        return {"actor": make("actor", self.spec.action.n, self.spec.observation), "critic": critic}

    def logits(self, actor: Params, observation: Array) -> Array:
        """Return logits float32[N, n] of observations [N, ...]."""
        return self._outputs("actor", actor, observation)

    def team_logits(self, actor: Params, observation: Array, situation: Situation, carry: Carry) -> tuple[Array, Carry]:
        """Return logits float32[N, T, A, n] of observations [N, T, A, ...], and the next carry; see `run_network`."""
        lead = observation.shape[:3]
        views, action_order = turn(self.spec, self.egocentric, observation.reshape(-1, *observation.shape[3:]))
        out, carry = self.run_network("actor", actor, views.reshape(*lead, *views.shape[1:]), situation, carry)
        return reorder(out.reshape(-1, out.shape[-1]), action_order).reshape(out.shape), carry

    def apply_actor(self, actor: Params, sample: dict[str, Any]) -> tuple[Array, Arrays]:
        """Return logits [N, n] and samples [N, ...], also of rows of `segments`."""
        if not self.learns_by_team:
            return self.logits(actor, sample["observation"]), sample
        carry = self.zero_carry("actor", len(sample["action"]), self.spec.num_agents)  # rows begin with episodes
        logits, _ = self.team_logits(actor, sample["observation"], sample["situation"], carry)
        return logits.reshape(-1, logits.shape[-1]), self.flatten_rows(sample)

    def values(self, critic: Params, critic_input: Array) -> Array:
        """Return Q(s, .) float32[N, n] of critic inputs [N, ...]; with `dueling` as in arXiv 1511.06581, equation 9."""
        out = self._outputs("critic", critic, critic_input)
        if not self.dueling:
            return out
        advantages = out[:, 1:]
        return out[:, :1] + advantages - advantages.mean(-1, keepdims=True)

    def _outputs(self, part: str, params: Params, views: Array) -> Array:
        """Return outputs float32[N, k + n] of views [N, ...]; the last n belong to the n actions."""
        views, action_order = turn(self.spec, self.egocentric, views)
        if self.types is None:
            return reorder(self.networks[part].apply(params, views), action_order)
        teams = views.reshape(-1, self.spec.num_agents, *views.shape[1:])
        return reorder(self.apply_by_agent(part, params, teams).reshape(len(views), -1), action_order)

    # State and sizes

    def init(self, key: Key, inputs: Any) -> AlgoState:
        """Return fresh networks, or those of `inputs` ({"actor", "critic"}) with fresh optimizers."""
        actor, critic = (self.learner(*fresh) for fresh in self.fresh_networks(key, inputs).items())
        return AlgoState(ComaParameters(actor, critic, target=jax.tree.map(jnp.copy, critic.params)), ())

    @property
    def batches(self) -> Minibatches:
        """Return the minibatches of a training step, a single one if they have fewer samples than `minibatch_size`."""
        agents, horizon, row = self.spec.num_agents, self.spec.horizon, self.row_samples(self.spec.horizon)
        rows = self.layout.num_envs // self.layout.shards * horizon * agents // row
        size = min(max(self.minibatch_size // row // self.layout.shards, 1), rows)
        return (Segments if self.learns_by_team else Minibatches)(self.layout, agents, rows, rows // size, size, row)

    @property
    def gradient_samples(self) -> int:
        return self.batches.size * self.batches.row_samples

    def summary(self) -> list[str]:
        batches, shards, epochs = self.batches, self.layout.shards, self.num_epochs
        transitions = batches.samples * batches.row_samples * shards
        minibatches = f"{batches.per_epoch} minibatches" if batches.per_epoch > 1 else "one minibatch"
        return [
            f"A training step collects {self.layout.num_envs:,} episodes ({transitions:,} agent "
            f"transitions) and trains for {epochs} {'epochs' if epochs > 1 else 'epoch'} of {minibatches} of "
            f"{self.gradient_samples * shards:,} samples."
        ]

    def warnings(self, total_env_steps: int) -> list[str]:
        episodes = total_env_steps // self.spec.horizon
        lines = super().warnings(total_env_steps)
        if self.critic_warmup >= episodes:
            lines.append(
                f"critic_warmup {self.critic_warmup:,} leaves the actor untrained in a run of {episodes:,} episodes: "
                "lower it, or train longer"
            )
        is_annealed = self.entropy_anneal or self.entropy_anneal_fraction
        if self.entropy_final not in (0, self.entropy_weight) and not is_annealed:
            lines.append(
                f"entropy_final {self.entropy_final:g} has no effect without a schedule: set --entropy_anneal or "
                "--entropy_anneal_fraction"
            )
        return lines
