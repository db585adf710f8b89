"""COMA: one shared actor, a centralised critic with a Q-value for each action of an agent, counterfactual advantages.

Foerster et al. 2018, "Counterfactual Multi-Agent Policy Gradients" (arXiv 1705.08926), in the form that Westheider,
Rückin and Popović 2023 (arXiv 2303.01150) use for multi-UAV mapping. `coma_original` computes what their repository
does. A training step rolls out `horizon` steps in every environment, one episode if all episodes have that length, and
then learns in this order:

1. The target critic Q' gives the targets of all transitions, y_t = r_t + d_t ((1 - l_t) Q'(s_{t+1}, a_{t+1}) + l_t
   y_{t+1}): `prepare`. d_t is gamma, or 0 where the episode terminated; l_t is lambda, or 0 where it ended, so that
   truncated episodes bootstrap from their last state. Agents that leave: `lambda_targets`.
2. Every `target_update_period` training steps Q' becomes a copy of Q: `prepare`. With `tau` > 0, Q' instead moves by
   this share towards Q at the start of each epoch, after the targets of this training step: `move_targets`.
3. Each epoch first takes a step of the critic on every minibatch, with the loss mean w (Q(s, a) - y)^2: `critic_loss`.
   After its step the critic's values Q(s, .) of the minibatch are stored: `evaluate_minibatch`.
4. Each epoch (or each of the last `actor_epochs`) then takes a step of the actor on every minibatch, with these values:
   the advantage is A = Q(s, a) - sum_b pi(b) Q(s, b), and the loss is -mean w A log pi(a): `actor_loss`. The preset
   `coma` clips ratios, adds an entropy bonus, and takes y in place of Q(s, a) in A (`advantage: return`); the values
   of the baseline then come from the critic before it learns these y: `prepare`.

The policy is pi = mask ((1 - epsilon) softmax(logits) + epsilon / n), renormalised. The weight w is 0 where an episode
has ended, as the action on its last observation is ignored, and for absent agents; elsewhere it is constant, and its
mean over a rollout is 1. With `memory` the actor is recurrent, as in Foerster et al.; the critic, which sees the state,
is not. With `message_passing` the actor also hears other agents; without `share_parameters` each type of agent has
networks of its own. `on_policy` has the epochs and minibatches, `team_policy` the networks. Minibatches have rows of L
steps of K agents, both 1 unless networks need whole teams or whole episodes: see `minibatches`. This file goes on in
this order: settings, targets, losses, acting, networks, sizes.

From Westheider et al., not in Foerster et al.: several epochs over minibatches of transitions, shuffled over whole
episodes, in which critic and actor take turns, and an actor's gradient without importance ratio (unless `clip_ratio` is
set); Adam; networks without memory; means, not sums, over agents and steps. New here: the policy that is trained is the
one that acts, after exploration and mask (theirs takes log pi before the mask); all episodes of a training step have
one epsilon, with which also the action after the last step is drawn; transitions are shuffled within each logical
shard; `clip_ratio` holds in every epoch; truncated episodes bootstrap.

Layout letters: T steps, B environments, A agents, N rows, L steps and K agents of a row, n actions.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp

from envs_jax.base import Array, Discrete, EnvSpec, TimeStep, pytree
from envs_jax.critic_input import with_critic_input
from envs_jax.progress import Progress, total
from jaxrl.algos.base import RATE, UNIT, AlgoState, Learner, Mode, Trajectory, is_used, setting
from jaxrl.algos.on_policy import Arrays, OnPolicy, Prepared, check_egocentric
from jaxrl.algos.targets import lambda_targets
from jaxrl.algos.team_actions import sample_sequentially
from jaxrl.common.types import Key, Params, PolicyParams
from jaxrl.nn import optimizers
from jaxrl.nn.distributions import apply_action_mask, entropy, epsilon_mix, mask_logits, select_action_value
from jaxrl.nn.precision import stored_dtype
from jaxrl.nn.team_policy import Situation, TeamNetwork
from jaxrl.rl.policy_gradient import divergence, policy_gradient_loss, policy_metrics

_DROPPED = 0.1  # share of transitions that no minibatch takes, above which a run warns


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
class Coma(OnPolicy):
    """Counterfactual multi-agent policy gradients on whole episodes."""

    updates: ClassVar[Mapping[str, tuple[str, ...]]] = {"critic": ("critic",), "actor": ("actor",)}
    acting_settings: ClassVar[dict[str, Any]] = {"minibatch_size": 10**9, "normalize_advantage": False}  # for any spec
    sweepable: ClassVar[tuple[str, ...]] = (
        "gamma", "td_lambda", "actor_lr", "critic_lr", "final_lr_fraction", "eps_max", "eps_min", "entropy_weight",
        "entropy_final",
    )  # fmt: skip

    minibatch_size: int = setting(
        640, "agent transitions per minibatch; each epoch has as many minibatches as the episodes fill, and drops the "
        "rest", between=(1, 1e9),
    )  # fmt: skip
    num_epochs: int = setting(5, "epochs (passes over the data) per training step", between=(1, 10_000))
    actor_epochs: int = setting(0, "train the actor in this many last epochs only; 0 = in all", between=(0, 10_000))
    gamma: float = setting(0.99, "discount factor per step", between=UNIT)
    td_lambda: float = setting(0.8, "lambda of the TD(lambda) targets; 1 = returns, 0 = one step", between=UNIT)
    actor_lr: float = setting(1e-5, "learning rate of the actor (Adam)", between=RATE)
    critic_lr: float = setting(1e-4, "learning rate of the critic (Adam)", between=RATE)
    max_grad_norm: float = setting(0.0, "clip gradients to this global norm; 0 = never", between=(0, 1e9))
    final_lr_fraction: float = setting(1.0, "learning rates fall linearly to this fraction at the end", between=UNIT)
    target_update_period: int = setting(10, "training steps between copies to the target network", between=(1, 1e9))
    tau: float = setting(0.0, "share by which the target network moves to Q in each epoch; 0 = copies", between=UNIT)
    eps_max: float = setting(0.5, "share of uniform exploration at the start, before masking", between=UNIT)
    eps_min: float = setting(0.02, "share of uniform exploration after eps_anneal", between=UNIT)
    eps_anneal: float = setting(
        0.1333, "share of the run over which exploration falls linearly; above 1, it does not reach eps_min",
        between=(1e-9, 100),
    )  # fmt: skip
    dueling: bool = setting(False, "critic = value of the state + mean-free action values (arXiv 1511.06581)")
    clip_ratio: float = setting(0.0, "clip importance ratios to 1 +/- this (PPO); 0 = no ratio", between=(0, 1e6))
    target_kl: float = setting(
        0.0, "skip actor updates on minibatches whose KL divergence from the acting policy exceeds 1.5 times this "
        "(nats), where implementations of PPO stop; 0 = never", between=(0, 1e6),
    )  # fmt: skip
    entropy_weight: float = setting(
        0.0, "weight of the entropy bonus of the masked policy without exploration (arXiv 1602.01783)", between=(0, 1e6)
    )
    entropy_final: float = setting(0.0, "weight of the entropy bonus after entropy_anneal", between=(0, 1e6))
    entropy_anneal: float = setting(
        0.0, "share of the run over which the bonus changes linearly; 0 = constant", between=(0, 100)
    )
    critic_warmup: int = setting(0, "episodes at the start that train only the critic", between=(0, 1e12))
    advantage: Literal["critic", "return"] = setting(
        "critic",
        "critic: Q(a) - baseline (COMA); return: TD(lambda) target - baseline before this training step "
        "(arXiv 1506.02438)",
    )
    normalize_advantage: bool = setting(False, "divide advantages by their standard deviation over the minibatch")
    hidden_size: int = setting(256, "channels of the convolutions and units of the dense layers", between=(1, 2**14))
    depth: int = setting(1, "number of hidden dense layers; images pass convolutions first", between=(0, 100))
    initializer: Literal["torch", "he"] = setting("torch", "torch: PyTorch's default; he: He normal, small last layer")

    def __post_init__(self) -> None:
        spec = self.spec
        if not isinstance(spec.action, Discrete):
            raise ValueError(f"coma needs discrete actions, '{spec.name}' has continuous ones: use ppo, sac or ddpg")
        if self.egocentric:
            check_egocentric(spec, central=True)
        object.__setattr__(self, "spec", with_critic_input(spec))  # a default one, where the environment has none
        if self.spec.critic_input is None or self.spec.critic_input_spec is None:
            raise ValueError(
                f"coma needs a centralised observation, but '{spec.name}' defines no critic_input: define it, or use "
                "ppo"
            )
        super().__post_init__()
        if self.eps_min > self.eps_max:
            raise ValueError(
                f"eps_min {self.eps_min:g} exceeds eps_max {self.eps_max:g}, and exploration falls from eps_max to "
                "eps_min: lower eps_min or raise eps_max"
            )
        row = self.batches.row_samples
        if self.minibatch_size < row:
            raise ValueError(
                f"minibatch_size {self.minibatch_size} is less than the {row} transitions that stay together: use "
                f"{row} or more"
            )
        if self.normalize_advantage and self.gradient_samples * self.layout.shards < 2:
            raise ValueError(
                "a minibatch holds only one sample, so normalize_advantage has no deviation to divide by: raise "
                "minibatch_size or num_envs, or give --normalize_advantage false"
            )
        if self.actor_epochs > self.num_epochs:
            raise ValueError(f"actor_epochs {self.actor_epochs} exceeds num_epochs {self.num_epochs}: lower it")

    @classmethod
    def batch(cls, spec: EnvSpec, settings: dict[str, Any], num_envs: int) -> int:
        """Return num_envs or, where minibatches hold whole episodes, the episodes of one."""
        if not cls.keeps_rollouts(spec, settings):
            return num_envs
        return max(int(settings.get("minibatch_size", cls.minibatch_size)) // (spec.horizon * spec.num_agents), 1)

    # Targets

    def prepare(
        self, state: AlgoState, trajectory: Trajectory, last: TimeStep, key: Key, progress: Progress
    ) -> Prepared:
        """Return all transitions with their targets, and the baseline's values where they are of the critic before.

        The parameters have the target critic of the next training step.
        """
        params = state.replicated
        rows = self.cut_rollout(trajectory)
        rows["critic_input"] = self.batches.cut(self.critic_inputs(trajectory))
        if self.advantage == "return":  # before the critic learns these returns: a baseline must not know them
            rows["values"] = self.evaluate_critic(params, rows)
        value, last_value = self.compute_values(params, rows, last, key, progress)
        target = self.compute_targets(trajectory, last, value, last_value)
        rows["target"] = self.batches.cut(target)
        metrics = {"target_mean": self.layout.sample_mean(rows["weight"] * rows["target"])}
        if self.tau == 0:  # after this step's targets and before its epochs: a new copy serves the next step's targets
            step = progress.learn_calls[1]  # this training step, counted from 0, modulo 2^32
            copied = optimizers.copy_periodically(params.critic.params, params.target, step, self.target_update_period)
            params = dataclasses.replace(params, target=copied)
        return Prepared(params, rows, metrics)

    def compute_targets(self, trajectory: Trajectory, last: TimeStep, value: Array, last_value: Array) -> Array:
        """Return y [T, B, A] from Q' of the actions taken, `value`, and of the next ones, `last_value` [B, A]."""
        return lambda_targets(trajectory, last, value, last_value, self.gamma, self.td_lambda)

    def compute_values(
        self, params: ComaParameters, rows: Arrays, last: TimeStep, key: Key, progress: Progress
    ) -> tuple[Array, Array]:
        """Return Q'(s, a) of the actions taken, [T, B, A], and of those the policy would take next, [B, A]."""
        layout = self.layout
        target = self.target_critic(params)

        def compute_value(taken: Arrays) -> Array:
            return select_action_value(self.values(target, taken["critic_input"]), taken["action"])

        def compute_last_value(ends: tuple[Any, TimeStep, Array]) -> Array:
            carry, timestep, keys = ends
            action, _, _ = self.act(params.actor.params, carry, timestep, keys, progress, "explore")
            assert self.spec.critic_input is not None
            inputs = jax.vmap(self.spec.critic_input)(timestep, action)
            return select_action_value(self.values(target, inputs[:, None])[:, 0], action)

        taken = {name: rows[name] for name in ("critic_input", "action")}
        value = self.batches.join(layout.apply(compute_value, taken, self.batches.row_samples))
        carry = self.find_last_carry(params.actor.params, rows)
        key_act = jax.random.fold_in(key, 0)  # the shuffles have 1
        keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key_act, layout.env_indices())
        ends = carry, *layout.split((last, keys))
        last_value = layout.apply(compute_last_value, ends, per_row=self.spec.num_agents)
        return value, last_value.reshape(-1, self.spec.num_agents)

    def target_critic(self, params: ComaParameters) -> Params:
        """Return Q'."""
        return params.target

    def move_targets(self, params: ComaParameters, stage: str, index: Array) -> ComaParameters:
        """With `tau`, move the target critic towards the critic before the first minibatch of each epoch."""
        if stage != "critic" or not self.tau:
            return params
        rate = jnp.where(index == 0, self.tau, 0.0)  # a move by 0 changes nothing
        return dataclasses.replace(params, target=optimizers.move(params.critic.params, params.target, rate))

    def shuffle_keys(self, key: Key) -> Key:
        return super().shuffle_keys(jax.random.fold_in(key, 1))  # `compute_values` acts with 0

    # Losses

    def critic_loss(
        self, critic: Params, params: ComaParameters, minibatch: Arrays, progress: Progress
    ) -> tuple[Array, Arrays]:
        """Return the mean of w (Q(s, a) - y)^2."""
        del params, progress
        value = select_action_value(self.values(critic, minibatch["critic_input"]), minibatch["action"])
        return jnp.mean(minibatch["weight"] * jnp.square(value - minibatch["target"])), {}

    def evaluate_minibatch(self, params: ComaParameters, stage: str, minibatch: Arrays) -> Arrays:
        """Return Q(s, .) of a minibatch just after the critic's step on it, unless advantages are of returns."""
        if stage != "critic" or self.advantage == "return":
            return {}
        return {"values": self.evaluate_critic(params, minibatch)}

    def evaluate_critic(self, params: ComaParameters, rows: Arrays) -> Array:
        """Return Q(s, .) [S local, R, L, K, n] of rows."""
        critic = functools.partial(self.values, params.critic.params)
        return self.layout.apply(critic, rows["critic_input"], self.batches.row_samples)

    def compute_advantages(self, minibatch: Arrays, action_probs: Array) -> Array:
        """Return Q of the action taken, or its TD(lambda) target, minus the counterfactual baseline (equation 4)."""
        values = minibatch["values"]
        taken = minibatch["target"] if self.advantage == "return" else select_action_value(values, minibatch["action"])
        return taken - jnp.sum(action_probs * values, axis=-1)

    def extend_minibatch(self, params: ComaParameters, stage: str, minibatch: Arrays, progress: Progress) -> Arrays:
        """With `normalize_advantage`, add the standard deviation of the advantages over the minibatch."""
        if stage != "actor" or not self.normalize_advantage:
            return minibatch

        def find_advantages(rows: Arrays) -> Array:
            logits = self.logits(params.actor.params, rows)
            return self.compute_advantages(rows, self.action_probs(logits, self.epsilon(progress), rows))

        advantages = self.layout.apply(find_advantages, minibatch, self.batches.row_samples)
        return minibatch | {"deviation": self.batches.deviation(advantages, minibatch["weight"])}

    def action_probs(self, logits: Array, epsilon: Array, minibatch: Arrays) -> Array:
        """Return pi float32[N, L, K, n] of the actions: exploration first, then the mask."""
        return apply_action_mask(epsilon_mix(logits, epsilon), minibatch["mask"])

    def policy_loss(self, logits: Array, epsilon: Array, minibatch: Arrays) -> tuple[Array, Arrays]:
        """Return -mean w A log pi(a) (equation 5), or PPO's surrogate with `clip_ratio`, and metrics."""
        weight = minibatch["weight"]
        old_log_prob = minibatch["log_prob"]
        action_probs = self.action_probs(logits, epsilon, minibatch)
        advantage = self.compute_advantages(minibatch, jax.lax.stop_gradient(action_probs))
        scaled = advantage / minibatch["deviation"] if self.normalize_advantage else advantage
        chosen_prob = select_action_value(action_probs, minibatch["action"])
        log_prob = jnp.log(jnp.maximum(chosen_prob, 1e-8))  # finite where it has vanished
        loss = policy_gradient_loss(log_prob, old_log_prob, scaled, weight, self.clip_ratio)
        metrics = policy_metrics(advantage, log_prob, weight)
        return loss, metrics | {"kl": divergence(log_prob, old_log_prob, weight)}

    def actor_loss(
        self, actor: Params, params: ComaParameters, minibatch: Arrays, progress: Progress
    ) -> tuple[Array, Arrays]:
        """Return the policy loss minus the entropy bonus, and metrics."""
        del params
        logits = self.logits(actor, minibatch)
        loss, metrics = self.policy_loss(logits, self.epsilon(progress), minibatch)
        unmixed = jax.nn.softmax(mask_logits(logits, minibatch["mask"]))
        mean_entropy = jnp.mean(minibatch["weight"] * entropy(unmixed))
        if is_used(self.entropy_weight) or is_used(self.entropy_final):
            loss = loss - self.entropy_bonus(progress) * mean_entropy
        return loss, metrics | {"policy_entropy": mean_entropy}

    def decide_step(self, stage: str, metrics: Arrays, progress: Progress) -> tuple[Array | None, Arrays]:
        """Leave the actor as it is during `critic_warmup`, and where the KL before the step exceeds 1.5 `target_kl`."""
        if stage != "actor":
            return None, metrics
        active = total(progress.episodes) >= self.critic_warmup if self.critic_warmup else jnp.bool_(True)
        if not self.target_kl:
            return active, metrics
        active &= metrics["kl"] <= 1.5 * self.target_kl
        return active, metrics | {"actor_moved": active.astype(jnp.float32)}

    def first_epoch(self, stage: str) -> int:
        """Return 0, or for the actor the first of the last `actor_epochs` epochs."""
        if stage != "actor":
            return 0
        return self.num_epochs - (self.actor_epochs or self.num_epochs)

    # Schedules and acting

    def epsilon(self, progress: Progress) -> Array:
        """Return epsilon float32[] of a training step, as it is at the end of its last episode."""
        env_steps_after = total(progress.env_steps) + self.layout.num_envs * self.steps
        share = env_steps_after / (self.eps_anneal * progress.total_env_steps)
        return self.eps_max - (self.eps_max - self.eps_min) * jnp.minimum(share, 1.0)

    def entropy_bonus(self, progress: Progress) -> Array:
        share: Array | float = 0.0
        if self.entropy_anneal:
            share = jnp.minimum(progress.fraction / self.entropy_anneal, 1.0)
        return jnp.float32(self.entropy_weight + (self.entropy_final - self.entropy_weight) * share)

    def schedules(self, progress: Progress) -> dict[str, Array]:
        return {"epsilon": self.epsilon(progress)}

    def act(
        self, policy_params: PolicyParams, carry: Any, timestep: TimeStep, keys: Key, progress: Progress, mode: Mode
    ) -> tuple[Array, Any, Any]:
        """Compute the logits of all agents at once, then select their actions one after another."""
        logits, carry = self.run_actor(policy_params, timestep.observation, timestep, carry)
        action_probs = epsilon_mix(logits, self.epsilon(progress) if mode == "explore" else 0.0)
        scores = logits if mode == "greedy" else None
        action, extras = sample_sequentially(self.spec, timestep, action_probs, keys, scores)
        return action, carry, extras

    # Networks and their inputs

    @functools.cached_property
    def networks(self) -> dict[str, TeamNetwork]:  # type: ignore[override]
        """The actor, with a logit for each action, and the critic, with a value for each, after V(s) with `dueling`."""
        assert isinstance(self.spec.action, Discrete)
        assert self.spec.critic_input_spec is not None
        actions = self.spec.action.n
        return {
            "actor": self.make_team_network("actor", actions, self.spec.observation.shape),
            "critic": self.make_team_network("critic", actions + self.dueling, self.spec.critic_input_spec.shape),
        }

    def logits(self, actor: Params, rows: Arrays) -> Array:
        """Return logits float32[N, L, K, n] of rows, which begin with episodes."""
        carry = self.networks["actor"].zero_carry(len(rows["action"]), self.spec.num_agents)
        return self.networks["actor"].apply_team(actor, rows["observation"], rows["situation"], carry)[0]

    def values(self, critic: Params, critic_input: Array) -> Array:
        """Return Q(s, .) float32[N, L, K, n] of inputs [N, L, K, ...]; with `dueling` as in arXiv 1511.06581, eq. 9."""
        out, _ = self.networks["critic"].apply_team(critic, critic_input, Situation((), ()), ())
        if not self.dueling:
            return out
        advantages = out[..., 1:]
        return out[..., :1] + advantages - advantages.mean(-1, keepdims=True)

    def critic_inputs(self, trajectory: Trajectory) -> Array:
        """Return the critic inputs [T, B, A, ...] of a trajectory, in its observations' dtype if it is a real one."""
        assert self.spec.critic_input is not None
        inputs = jax.vmap(jax.vmap(self.spec.critic_input))(trajectory.timestep, trajectory.action)
        stored = trajectory.timestep.observation.dtype
        small = stored if jnp.issubdtype(stored, jnp.floating) else inputs.dtype
        return inputs.astype(stored_dtype(self.spec.critic_input_spec, small))

    # State and sizes

    def init(self, key: Key, inputs: Any) -> AlgoState:
        """Return fresh networks, or those of `inputs` ({"actor", "critic"}) with fresh optimizers."""
        actor, critic = (self.learner(*fresh) for fresh in self.fresh_networks(key, inputs).items())
        return AlgoState(ComaParameters(actor, critic, target=jax.tree.map(jnp.copy, critic.params)), ())

    @property
    def steps(self) -> int:
        return self.spec.horizon

    @property
    def restarts(self) -> bool:
        return True

    def split_rows(self, rows: int, row_samples: int) -> tuple[int, int]:
        """Return the minibatches of an epoch and their rows, a single one if all have fewer than `minibatch_size`."""
        size = min(max(self.minibatch_size // row_samples // self.layout.shards, 1), rows)
        return rows // size, size

    def summary(self) -> list[str]:
        batches = self.batches
        epochs = self.num_epochs
        transitions = batches.rows_per_shard * batches.row_samples * self.layout.shards
        minibatches = f"{batches.per_epoch} minibatches" if batches.per_epoch > 1 else "one minibatch"
        rollouts = "episodes" if self.spec.fixed_horizon else f"rollouts of {self.spec.horizon:,} steps"
        return [
            f"A training step collects {self.layout.num_envs:,} {rollouts} ({transitions:,} agent "
            f"transitions) and trains for {epochs} {'epochs' if epochs > 1 else 'epoch'} of {minibatches} of "
            f"{self.gradient_samples * self.layout.shards:,} samples."
        ]

    def warnings(self, total_env_steps: int) -> list[str]:
        batches = self.batches
        lines = super().warnings(total_env_steps)
        dropped = 1 - batches.per_epoch * batches.size / batches.rows_per_shard
        if dropped > _DROPPED:
            fitting = batches.rows_per_shard // (batches.per_epoch + 1) * batches.row_samples * self.layout.shards
            lines.append(
                f"each epoch drops {dropped:.0%} of its transitions, which do not fill a minibatch: use "
                f"--minibatch_size {fitting}"
            )
        episodes = total_env_steps // self.spec.horizon
        ends_early = not (self.spec.fixed_horizon or self.spec.full_length)  # then a run has more episodes
        if self.critic_warmup >= episodes and not ends_early:
            lines.append(
                f"critic_warmup {self.critic_warmup:,} leaves the actor untrained in a run of {episodes:,} episodes: "
                "lower it, or train longer"
            )
        if self.entropy_final not in (0, self.entropy_weight) and not self.entropy_anneal:
            lines.append(f"entropy_final {self.entropy_final:g} has no effect without a schedule: set --entropy_anneal")
        return lines
