"""COMA: one shared actor, one centralised critic with a value per own action, counterfactual advantages.

Foerster et al. 2018, "Counterfactual Multi-Agent Policy Gradients" (arXiv 1705.08926), in the form that Westheider,
Rückin and Popović 2023 (arXiv 2303.01150) use for multi-UAV mapping. Defaults are sound; settings that say
"original" reproduce what the public dmar-bonn/ipp-marl computes. Losses stand on top, the algorithm below.
"""

import dataclasses
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

from envs_jax.base import Array, Box, Discrete, EnvSpec, TimeStep, pytree
from jaxrl.algos.base import (
    RATE,
    UNIT,
    Algorithm,
    AlgoState,
    Mode,
    Phase,
    Progress,
    Trajectory,
    setting,
    successors,
    total,
)
from jaxrl.nn import distributions, networks, optimizers
from jaxrl.nn.precision import stored_dtype
from jaxrl.rl import returns


def critic_loss(values: Array, action: Array, target: Array, weight: Array) -> Array:
    """Mean over samples of (Q(s)[a] - y)^2; values [N, n], action int32[N], target and weight float32[N]."""
    return jnp.mean(weight * jnp.square(distributions.choose(values, action) - target))


def counterfactual_baseline(values: Array, policy: Array) -> Array:
    """Baseline sum_a pi(a) Q(a) (arXiv 1705.08926, equation 4); values, policy [N, n]. The advantage is Q(a) - b."""
    return jnp.sum(policy * values, axis=-1)


def policy_gradient_loss(
    log_prob: Array, behaviour_log_prob: Array, advantage: Array, weight: Array, clip_ratio: float
) -> Array:
    """- mean of A log pi(a), or with `clip_ratio` > 0 the clipped surrogate (arXiv 1707.06347, equation 7).

    All arguments float32[N]; the ratio is taken to the policy that chose the action.
    """
    if clip_ratio == 0:
        return -jnp.mean(weight * advantage * log_prob)
    ratio = jnp.exp(log_prob - behaviour_log_prob)
    clipped = jnp.clip(ratio, 1 - clip_ratio, 1 + clip_ratio)
    return -jnp.mean(weight * jnp.minimum(ratio * advantage, clipped * advantage))


def divergence(log_prob: Array, behaviour_log_prob: Array, weight: Array) -> Array:
    """How far the policy has moved from the one that chose the actions: mean of r - 1 - log r, at least 0, in nats.

    With r = pi(a) / behaviour(a), all arguments float32[N], its expectation is KL(behaviour || pi).
    """
    log_ratio = log_prob - behaviour_log_prob
    return jnp.mean(weight * (jnp.expm1(log_ratio) - log_ratio))


def original_actor_loss(
    logits: Array, epsilon: Array, mask: Array, values: Array, action: Array, weight: Array
) -> tuple[Array, Array]:
    """The original's loss and advantage: unmasked log-probability, weight (allowed actions) / n.

    logits, mask, values [N, n]; action int32[N]; weight float32[N].
    """
    mixed, mask = distributions.epsilon_mix(logits, epsilon), mask.astype(jnp.float32)
    allowed = mixed * mask
    policy = jnp.maximum(allowed / jnp.maximum(allowed.sum(-1, keepdims=True), 1e-5), 1e-5)
    advantage = distributions.choose(values, action) - jnp.sum(policy * values * mask, axis=-1)
    advantage = jax.lax.stop_gradient(advantage)
    log_prob = jnp.log(distributions.choose(mixed, action))
    return -jnp.mean(weight * advantage * log_prob * mask.mean(-1)), advantage


@pytree
class ComaParameters:
    """Parameters and optimisers, the same on every device."""

    actor: Any
    critic: Any
    target: Any
    actor_optimiser: Any
    critic_optimiser: Any
    first_target: Any


@dataclasses.dataclass(frozen=True)
class Coma(Algorithm):
    """Counterfactual multi-agent policy gradients on whole episodes."""

    transitions: int = setting(
        3000,
        "agent transitions per training step; sets num_envs, unless given: whole missions, of which a surplus "
        "over the transitions is dropped from each pass",
        between=(1, 1e9),
    )
    minibatches: int = setting(5, "minibatches per pass over the data", between=(1, 1e6))
    data_passes: int = setting(5, "passes over the data per training step", between=(1, 10_000))
    actor_passes: int = setting(
        0, "how many of the passes also train the actor (the last ones); 0 = all", between=(0, 10_000)
    )
    gamma: float = setting(0.99, "discount", between=UNIT)
    td_lambda: float = setting(0.8, "lambda of the TD(lambda) targets", between=UNIT)
    actor_lr: float = setting(1e-5, "learning rate of the actor (Adam)", between=RATE)
    critic_lr: float = setting(1e-4, "learning rate of the critic (Adam)", between=RATE)
    adam_epsilon: float = setting(1e-8, "Adam's epsilon", between=(1e-30, 1))
    max_grad_norm: float = setting(0.0, "clip gradients to this global norm; 0 = never", between=(0, 1e9))
    lr_final: float = setting(
        1.0, "learning rates fall linearly to this share of themselves at the run's total", between=UNIT
    )
    copy_rate: int = setting(10, "copy the critic to the target every so many training steps", between=(1, 1e9))
    tau: float = setting(0.0, "soft target copy per pass, instead of copy_rate; 0 = hard copies", between=UNIT)
    eps_max: float = setting(0.5, "exploration at the first mission (mixed with uniform)", between=UNIT)
    eps_min: float = setting(0.02, "exploration after eps_anneal missions", between=UNIT)
    eps_anneal: int = setting(10_000, "missions over which exploration falls", between=(1, 1e12))
    actor_loss: Literal["masked", "original"] = setting(
        "masked", "masked: gradient of the policy that was sampled; original: unmasked, weighted by open actions"
    )
    td_target: Literal["td_lambda", "original"] = setting(
        "td_lambda", "td_lambda: TD(lambda) with the refreshed target; original: the sums of dmar-bonn/ipp-marl"
    )
    dueling: bool = setting(False, "critic = value + mean-free action values (arXiv 1511.06581)")
    clip_ratio: float = setting(
        0.0, "clip the importance ratio (PPO, arXiv 1707.06347); 0 = no ratio", between=(0, 1e6)
    )
    target_kl: float = setting(
        0.0,
        "a minibatch that finds the policy further than 1.5 times this (KL, nats) from the one that acted leaves the "
        "actor alone, where implementations of PPO stop; 0 = none does",
        between=(0, 1e6),
    )
    entropy_weight: float = setting(
        0.0, "entropy bonus of the unmixed masked policy (arXiv 1602.01783)", between=(0, 1e6)
    )
    entropy_final: float = setting(0.0, "entropy bonus after entropy_anneal missions", between=(0, 1e6))
    entropy_anneal: int = setting(
        0, "missions over which the entropy bonus falls; 0 = it stays at entropy_weight", between=(0, 1e12)
    )
    critic_warmup: int = setting(0, "training steps at the start that train the critic only", between=(0, 1e9))
    advantage: Literal["critic", "return"] = setting(
        "critic", "critic: Q(a) - baseline (COMA); return: TD(lambda) target - baseline (arXiv 1506.02438)"
    )
    scale_advantage: bool = setting(False, "divide advantages by their standard deviation over the minibatch")
    width: int = setting(256, "channels of the convolutions and units of the dense layers", between=(1, 2**14))
    depth: int = setting(
        1, "hidden dense layers behind the convolutions (or of the whole net for vectors)", between=(0, 100)
    )
    initialiser: Literal["torch", "he"] = setting("torch", "torch: PyTorch's default; he: He normal, small last layer")
    convolution: Literal["auto", "conv", "dense", "patches"] = setting(
        "auto", "how convolutions are computed: the back end's own, or as matrix products (CPU)"
    )

    def __post_init__(self) -> None:
        if not isinstance(self.spec.action, Discrete):
            raise ValueError(f"coma needs discrete actions, '{self.spec.name}' has continuous ones: use another algo")
        if self.spec.critic_input is None or self.spec.critic_input_spec is None:
            raise ValueError(f"coma needs a centralised view, but '{self.spec.name}' defines no critic_input")
        super().__post_init__()
        if self.actor_passes > self.data_passes:
            raise ValueError(f"actor_passes {self.actor_passes} exceeds data_passes {self.data_passes}: lower it")
        if self.actor_loss == "original" and self.clip_ratio:
            raise ValueError("clip_ratio has no meaning with actor_loss 'original': leave one of them out")
        if self.actor_loss == "original" and self.target_kl:
            raise ValueError("target_kl has no meaning with actor_loss 'original': leave one of them out")
        if self.actor_loss == "original" and (self.advantage != "critic" or self.scale_advantage):
            raise ValueError(
                "actor_loss 'original' has the critic's advantage, unscaled: leave out advantage and scale_advantage"
            )
        if self.td_target == "original" and self.layout.shards > 1:
            raise ValueError(
                "td_target 'original' looks at all missions of a training step at once: use --logical_shards 1"
            )
        if self.td_target == "original" and not self.spec.fixed_horizon:
            raise ValueError("td_target 'original' needs an environment whose episodes all have the same length")
        if self.minibatch < 1:
            raise ValueError(
                f"minibatches {self.minibatches} exceeds the {self._samples_per_shard} samples of a logical shard: "
                "lower it or raise num_envs"
            )

    @classmethod
    def default_num_envs(cls, spec: EnvSpec, settings: dict[str, Any]) -> int:
        """Whole missions: transitions / (agents x steps), rounded up."""
        transitions = settings.get("transitions", cls.transitions)
        return max(1, -(-transitions // (spec.num_agents * spec.horizon)))

    @classmethod
    def batch(cls, spec: EnvSpec, settings: dict[str, Any], num_envs: int) -> int:
        """Any number of shards, but for the original's targets, which need all missions in one row."""
        return 1 if settings.get("td_target") == "original" else num_envs

    @property
    def phases(self) -> tuple[Phase, ...]:
        """One phase: fly whole missions, then learn from them and drop them."""
        updates = self.data_passes * self.minibatches
        return (Phase("train", self.spec.horizon, updates, restart=True),)

    @property
    def _actions(self) -> int:
        assert isinstance(self.spec.action, Discrete)
        return self.spec.action.n

    @property
    def _critic_box(self) -> Box:
        assert self.spec.critic_input_spec is not None
        return self.spec.critic_input_spec

    def _critic_input(self, timestep: TimeStep, action: Array) -> Array:
        """The environment's centralised view of one copy, [A, ...]."""
        assert self.spec.critic_input is not None
        return self.spec.critic_input(timestep, action)

    @property
    def _samples_per_shard(self) -> int:
        return self.layout.num_envs // self.layout.shards * self.spec.horizon * self.spec.num_agents

    @property
    def minibatch(self) -> int:
        """Samples of a minibatch on one logical shard; a surplus is dropped after shuffling.

        Rounding `transitions` up to whole missions makes such a surplus too; it grows with num_envs.
        """
        flown = self._usual_missions * self.spec.horizon * self.spec.num_agents
        return self._samples_per_shard * self.transitions // flown // self.minibatches

    @property
    def _usual_missions(self) -> int:
        return self.default_num_envs(self.spec, {"transitions": self.transitions})

    def largest_chunk(self) -> int:
        return self.minibatch

    def sample_bytes(self) -> int:
        """Activations, their gradients and the patches of matrix-product convolutions, of one sample."""
        box = self._critic_box
        return networks.activation_bytes(self._network(1, box.shape), box.shape)

    def data_bytes(self) -> int:
        """Critic inputs of all transitions, and the shuffled copy of one minibatch."""
        samples = self._samples_per_shard * self.layout.local_shards
        row = math.prod(self._critic_box.shape) * 2 + 16 * self._actions
        return samples * row + samples // self.minibatches * row

    def summary(self) -> list[str]:
        spec, batch = self.spec, self.minibatch * self.layout.shards
        missions, usual = self.layout.num_envs, self._usual_missions
        lines = [
            f"A training step flies {missions} missions ({missions * spec.horizon * spec.num_agents:,} agent "
            f"transitions) and makes {self.data_passes} passes of {self.minibatches} minibatches of {batch:,} samples."
        ]
        if missions != usual:
            lines.append(
                f"num_envs {missions}, where transitions {self.transitions} asks for {usual} missions a training step: "
                f"minibatches have {missions / usual:.3g} times as many samples, and an equal number of missions makes "
                f"{usual / missions:.3g} times as many updates; more minibatches, higher learning rates and shorter "
                "schedules compensate."
            )
        return lines

    # Networks

    def _network(self, outputs: int, shape: tuple[int, ...]) -> Any:
        if len(shape) not in (1, 3):
            raise ValueError(f"coma takes vectors or images (H, W, C) as observations, not arrays of shape {shape}")
        dtype = self.layout.compute_dtype
        if len(shape) == 1:
            return networks.MLP(outputs, self.width, self.depth, self.initialiser, dtype)
        if self.convolution == "auto":
            methods = networks.convolution_methods(self.width, jax.default_backend())
        else:
            methods = (self.convolution,) * 3
        return networks.ConvStack(outputs, self.width, self.depth, self.initialiser, methods, dtype)

    @property
    def actor_net(self) -> Any:
        """Observation [N, ...] -> logits float32[N, n]."""
        return self._network(self._actions, self.spec.observation.shape)

    @property
    def critic_net(self) -> Any:
        """Critic input [N, ...] -> float32[N, n], or [N, n + 1] if dueling."""
        outputs = self._actions + self.dueling
        return self._network(outputs, self._critic_box.shape)

    def values(self, critic: Any, critic_input: Array) -> Array:
        """Q(s, .) float32[N, n] of critic inputs [N, ...]."""
        out = self.critic_net.apply(critic, critic_input)
        if not self.dueling:
            return out
        advantages = out[:, 1:]
        return out[:, :1] + advantages - advantages.mean(-1, keepdims=True)

    def optimiser(self, name: str) -> optax.GradientTransformation:
        """Of "actor" and "critic"."""
        del name
        return optimizers.adam(self.adam_epsilon, self.max_grad_norm)

    # Protocol

    def init(self, key: Array, inputs: Any) -> AlgoState:
        """Fresh networks, or those of `inputs` ({"actor", "critic"}) with fresh optimisers."""
        key_actor, key_critic = jax.random.split(key)
        observation = jnp.zeros((1, *self.spec.observation.shape))
        critic_input = jnp.zeros((1, *self._critic_box.shape))
        actor = self.actor_net.init(key_actor, observation)
        critic = self.critic_net.init(key_critic, critic_input)
        if inputs is not None:
            actor, critic = inputs["actor"], inputs["critic"]
        return AlgoState(
            replicated=ComaParameters(
                actor=actor,
                critic=critic,
                target=jax.tree.map(jnp.copy, critic),
                actor_optimiser=self.optimiser("actor").init(actor),
                critic_optimiser=self.optimiser("critic").init(critic),
                first_target=jax.tree.map(jnp.copy, critic) if self.td_target == "original" else (),
            ),
            split=(),
        )

    def weights(self, state: AlgoState) -> Any:
        """What `init(inputs=...)` takes."""
        return {"actor": state.replicated.actor, "critic": state.replicated.critic}

    def policy(self, state: AlgoState) -> Any:
        """The actor's parameters."""
        return state.replicated.actor

    def epsilon(self, progress: Progress) -> Array:
        """Exploration of the training step: that of its last mission, counted from 1."""
        mission = total(progress.episodes) + self.layout.num_envs
        return self.eps_max - (self.eps_max - self.eps_min) * jnp.minimum(mission / self.eps_anneal, 1.0)

    def entropy_bonus(self, progress: Progress) -> Array:
        """Weight of the entropy bonus at the missions flown so far."""
        share = jnp.minimum(total(progress.episodes) / self.entropy_anneal, 1.0) if self.entropy_anneal else 0.0
        return jnp.float32(self.entropy_weight + (self.entropy_final - self.entropy_weight) * share)

    def act(
        self, policy: Any, actor: Any, timestep: TimeStep, keys: Array, progress: Progress, mode: Mode
    ) -> tuple[Array, Any, Any]:
        """Logits of all agents at once, then agent after agent masks and samples (or takes the best)."""
        agents, actions = self.spec.num_agents, self._actions
        batch = keys.shape[0]
        flat = timestep.observation.reshape(batch * agents, *timestep.observation.shape[2:])
        logits = self.actor_net.apply(policy, flat).reshape(batch, agents, actions)
        mixed = distributions.epsilon_mix(logits, self.epsilon(progress) if mode == "explore" else 0.0)
        action_mask = timestep.action_mask
        if action_mask is None:
            action_mask = jnp.ones((batch, agents, actions), bool)

        def one(mask_state: Any, open_: Array, mixed: Array, key: Array) -> tuple[Array, Any]:
            chosen, masks, log_probs = jnp.zeros(agents, jnp.int32), [], []
            for agent in range(agents):
                mask = self.spec.next_mask(mask_state, open_, chosen, agent)
                policy = distributions.renormalise(mixed[agent], mask)
                if mode != "best":
                    action = distributions.sample(jax.random.fold_in(key, agent), policy)
                else:
                    action = jnp.argmax(jnp.where(mask, mixed[agent], -1.0)).astype(jnp.int32)
                chosen = chosen.at[agent].set(action)
                masks.append(mask)
                log_probs.append(jnp.log(jnp.maximum(distributions.choose(policy, action), 1e-8)))
            return chosen, {"mask": jnp.stack(masks), "log_prob": jnp.stack(log_probs)}

        action, extras = jax.vmap(one)(timestep.mask_state, action_mask, mixed, keys)
        return action, actor, extras

    def learn(
        self,
        state: AlgoState,
        trajectory: Trajectory | None,
        last_timestep: TimeStep | None,
        key: Array,
        progress: Progress,
        phase: Phase,
    ) -> tuple[AlgoState, dict[str, Array]]:
        """One training step: targets once, then passes of minibatches, critic first and actor after it."""
        assert trajectory is not None and last_timestep is not None
        params = state.replicated
        key_last, key_shuffle = jax.random.split(key)
        data = self._data(params, trajectory, last_timestep, key_last, progress)
        training_step = progress.learn_calls[1]
        if self.tau == 0:
            copy = training_step % self.copy_rate == 0
            target = jax.tree.map(lambda new, old: jnp.where(copy, new, old), params.critic, params.target)
            params = dataclasses.replace(params, target=target)
        actor_passes = self.actor_passes or self.data_passes
        metrics: list[dict[str, Array]] = []
        for first, count_, train_actor in (
            (0, self.data_passes - actor_passes, False),
            (self.data_passes - actor_passes, actor_passes, True),
        ):
            if count_:

                def one_pass(params: ComaParameters, index: Array, train_actor: bool = train_actor) -> Any:
                    return self._pass(params, data, jax.random.fold_in(key_shuffle, index), progress, train_actor)

                params, values = jax.lax.scan(one_pass, params, first + jnp.arange(count_))
                metrics.append({name: value.reshape(-1) for name, value in values.items()})
        merged = {name: jnp.concatenate([part[name] for part in metrics if name in part]) for name in metrics[-1]}
        merged["epsilon"] = self.layout.alone(self.epsilon)(progress)
        merged["target_mean"] = self.layout.average(data["target"])
        return AlgoState(params, state.split), merged

    # Pieces of a training step

    def _data(
        self, params: ComaParameters, trajectory: Trajectory, last: TimeStep, key: Array, progress: Progress
    ) -> dict[str, Array]:
        """All transitions of all agents as leaves [S local, samples, ...], targets included."""
        layout = self.layout
        over_batch = jax.vmap(jax.vmap(self._critic_input))
        seen = (trajectory.timestep, trajectory.action)
        critic_input = layout.over_envs(lambda rows: over_batch(*rows), seen, axis=1)
        critic_input = critic_input.astype(stored_dtype(self._critic_box, trajectory.timestep.observation.dtype))

        def flatten(x: Array) -> Array:
            """[T, B local, A, ...] -> [S local, B / S x T x A, ...]."""
            return layout.split(jnp.swapaxes(x, 0, 1)).reshape(layout.local_shards, -1, *x.shape[3:])

        def unflatten(x: Array) -> Array:
            """The inverse of `flatten`."""
            steps, envs, agents = trajectory.action.shape[:3]
            return jnp.swapaxes(x.reshape(envs, steps, agents, *x.shape[2:]), 0, 1)

        flat = {"critic_input": flatten(critic_input), "action": flatten(trajectory.action)}
        network = params.first_target if self.td_target == "original" else params.target

        def taken(sample: dict[str, Array]) -> Array:
            return distributions.choose(self.values(network, sample["critic_input"]), sample["action"])

        value = unflatten(layout.apply(taken, flat))
        target = self._targets(trajectory, last, value, self._last_value(params, network, last, key, progress))
        valid = jnp.broadcast_to(~trajectory.timestep.done[..., None], trajectory.action.shape).astype(jnp.float32)
        share = layout.average(layout.split(jnp.swapaxes(valid, 0, 1)).reshape(layout.local_shards, -1))
        flat["observation"] = flatten(trajectory.timestep.observation)
        flat["mask"], flat["log_prob"] = flatten(trajectory.extras["mask"]), flatten(trajectory.extras["log_prob"])
        flat["target"], flat["weight"] = flatten(target), flatten(valid / jnp.maximum(share, 1e-8))
        return flat

    def _last_value(
        self, params: ComaParameters, network: Any, last: TimeStep, key: Array, progress: Progress
    ) -> Array:
        """Target value float32[B, A] of an action drawn in the time step behind the trajectory."""
        keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, self.layout.env_indices())

        def of_rows(rows: tuple[TimeStep, Array]) -> Array:
            timestep, keys = rows
            action, _, _ = self.act(params.actor, (), timestep, keys, progress, "explore")
            critic_input = jax.vmap(self._critic_input)(timestep, action)
            values = self.values(network, critic_input.reshape(-1, *critic_input.shape[2:]))
            return distributions.choose(values, action.reshape(-1)).reshape(action.shape)

        value = self.layout.apply(of_rows, self.layout.split((last, keys)), per_row=self.spec.num_agents)
        return value.reshape(-1, self.spec.num_agents)

    def _targets(self, trajectory: Trajectory, last: TimeStep, value: Array, last_value: Array) -> Array:
        """Targets float32[T, B, A] from target values of the taken actions [T, B, A]."""
        following = successors(trajectory, last)
        next_value = jnp.concatenate([value[1:], last_value[None]])
        over_batch = lambda function: jax.vmap(jax.vmap(function, 1, 1), 1, 1)  # noqa: E731

        def of_envs(rows: tuple[TimeStep, Array, Array]) -> Array:
            following, value, next_value = rows
            over_agents = lambda x: jnp.broadcast_to(x[..., None], value.shape)  # noqa: E731
            if self.td_target == "original":
                return self._original_targets(following, value)
            discount = self.gamma * over_agents(1.0 - following.terminated.astype(jnp.float32))
            lambda_t = self.td_lambda * over_agents(1.0 - following.done.astype(jnp.float32))
            return over_batch(returns.lambda_returns)(following.reward, discount, next_value, lambda_t)

        return self.layout.over_envs(of_envs, (following, value, next_value), axis=1)

    def _original_targets(self, following: TimeStep, value: Array) -> Array:
        """Each agent's missions in one row, mission after mission."""
        steps, envs, agents = value.shape

        def row(x: Array) -> Array:  # [T, B, ...] -> [B x T, ...]
            return jnp.swapaxes(x, 0, 1).reshape(envs * steps, *x.shape[2:])

        def of_agent(reward: Array, value: Array) -> Array:
            done = row(following.done)
            return returns.ipp_marl_targets(reward, done, value, self.gamma, self.td_lambda, steps)[0]

        targets = jax.vmap(of_agent, in_axes=1, out_axes=1)(row(following.reward), row(value))
        return jnp.swapaxes(targets.reshape(envs, steps, agents), 0, 1)

    def _pass(
        self, params: ComaParameters, data: dict[str, Array], key: Array, progress: Progress, train_actor: bool
    ) -> tuple[ComaParameters, dict[str, Array]]:
        """Critic over all minibatches of one shuffle, then the actor over the same minibatches."""
        samples, size = self._samples_per_shard, self.minibatch
        order = jax.vmap(lambda k: jax.random.permutation(k, samples))(self.layout.shard_keys(key))
        order = order[:, : size * self.minibatches].reshape(-1, self.minibatches, size).swapaxes(0, 1)
        if self.tau:
            blend = lambda old, new: (1 - self.tau) * old + self.tau * new  # noqa: E731
            blended = self.layout.alone(lambda old, new: jax.tree.map(blend, old, new))(params.target, params.critic)
            params = dataclasses.replace(params, target=blended)

        def pick(indices: Array, *names: str) -> dict[str, Array]:
            take = jax.vmap(lambda rows, i: jnp.take(rows, i, axis=0, mode="clip"))
            return {name: take(data[name], indices) for name in names}

        def critic_step(params: ComaParameters, indices: Array) -> tuple[ComaParameters, Any]:
            batch = pick(indices, "critic_input", "action", "target", "weight")
            params, loss, norm = self._critic_update(params, batch, progress)
            metrics = {"critic_loss": loss, "critic_grad_norm": norm}
            if not train_actor:
                return params, (metrics, ())
            values = self.layout.apply(lambda s: self.values(params.critic, s["critic_input"]), batch)
            return params, (metrics, values)

        def actor_step(params: ComaParameters, row: tuple[Array, Array]) -> tuple[ComaParameters, Any]:
            indices, values = row
            names = ("observation", "action", "mask", "log_prob", "weight", "target")
            batch = pick(indices, *names) | {"values": values}
            return self._actor_update(params, batch, progress)

        params, (metrics, values) = jax.lax.scan(critic_step, params, order)
        if train_actor:
            params, actor_metrics = jax.lax.scan(actor_step, params, (order, values))
            metrics = metrics | actor_metrics
        return params, metrics

    def _critic_update(
        self, params: ComaParameters, batch: dict[str, Array], progress: Progress
    ) -> tuple[ComaParameters, Array, Array]:
        def loss(critic: Any, sample: dict[str, Array]) -> tuple[Array, Any]:
            values = self.values(critic, sample["critic_input"])
            return critic_loss(values, sample["action"], sample["target"], sample["weight"]), ()

        gradient, (value, _) = self.layout.gradient(loss, params.critic, batch)
        critic, optimiser, norm = self._apply(
            "critic", gradient, params.critic, params.critic_optimiser, jnp.bool_(True), progress
        )
        return dataclasses.replace(params, critic=critic, critic_optimiser=optimiser), value, norm

    def _actor_update(
        self, params: ComaParameters, batch: dict[str, Array], progress: Progress
    ) -> tuple[ComaParameters, dict[str, Array]]:
        epsilon, bonus = self.layout.alone(lambda p: (self.epsilon(p), self.entropy_bonus(p)))(progress)
        if self.scale_advantage:
            batch = batch | {"scale": self._advantage_scale(params, batch, epsilon)}

        def loss(actor: Any, sample: dict[str, Array]) -> tuple[Array, dict[str, Array]]:
            logits = self.actor_net.apply(actor, sample["observation"])
            mask, action, weight = sample["mask"], sample["action"], sample["weight"]
            if self.actor_loss == "original":
                value, advantage = original_actor_loss(logits, epsilon, mask, sample["values"], action, weight)
                log_prob = jnp.log(distributions.choose(distributions.epsilon_mix(logits, epsilon), action))
            else:
                policy = distributions.renormalise(distributions.epsilon_mix(logits, epsilon), mask)
                advantage = self._advantage(sample, jax.lax.stop_gradient(policy))
                scaled = advantage / sample["scale"] if self.scale_advantage else advantage
                log_prob = jnp.log(jnp.maximum(distributions.choose(policy, action), 1e-8))
                value = policy_gradient_loss(log_prob, sample["log_prob"], scaled, weight, self.clip_ratio)
            unmixed = jax.nn.softmax(jnp.where(mask, logits, -jnp.inf))
            entropy = jnp.mean(weight * distributions.entropy(unmixed))
            if self.entropy_weight or self.entropy_final:
                value = value - bonus * entropy
            means = {
                "policy_entropy": entropy,
                "advantage": jnp.mean(weight * advantage),
                "advantage_square": jnp.mean(weight * jnp.square(advantage)),
                "log_prob": jnp.mean(weight * log_prob),
            }
            if self.actor_loss != "original":  # whose log-probability is not that of the policy that was sampled
                means["kl"] = divergence(log_prob, sample["log_prob"], weight)
            return value, means

        gradient, (value, means) = self.layout.gradient(loss, params.actor, batch)
        active = total(progress.learn_calls) >= self.critic_warmup
        if self.target_kl:
            active &= means["kl"] <= 1.5 * self.target_kl
            means["actor_moved"] = active.astype(jnp.float32)
        actor, optimiser, norm = self._apply("actor", gradient, params.actor, params.actor_optimiser, active, progress)
        metrics = {"actor_loss": value, "actor_grad_norm": norm, **means}
        return dataclasses.replace(params, actor=actor, actor_optimiser=optimiser), metrics

    def _advantage(self, sample: dict[str, Array], policy: Array) -> Array:
        """What the taken action is worth, by the critic or by what followed, less the counterfactual baseline."""
        worth = sample["target"]
        if self.advantage == "critic":
            worth = distributions.choose(sample["values"], sample["action"])
        return worth - counterfactual_baseline(sample["values"], policy)

    def _advantage_scale(self, params: ComaParameters, batch: dict[str, Array], epsilon: Array) -> Array:
        """Standard deviation of the advantages over the whole minibatch, float32[S local, samples]."""

        def advantages(sample: dict[str, Array]) -> Array:
            logits = self.actor_net.apply(params.actor, sample["observation"])
            policy = distributions.renormalise(distributions.epsilon_mix(logits, epsilon), sample["mask"])
            return self._advantage(sample, policy)

        advantage = self.layout.apply(advantages, batch)
        mean = self.layout.average(batch["weight"] * advantage)
        variance = self.layout.average(batch["weight"] * jnp.square(advantage - mean))
        return jnp.full_like(advantage, jnp.maximum(jnp.sqrt(variance), 1e-6))

    def _apply(
        self, name: str, gradient: Any, params: Any, state: Any, active: Array, progress: Progress
    ) -> tuple[Any, Any, Array]:
        """One step at the rate of `progress` and the gradient's norm; nothing moves where not `active`."""
        rate = getattr(self, f"{name}_lr")

        def step(gradient: Any, params: Any, state: Any) -> tuple[Any, Any, Array]:
            decayed = rate * (1.0 - (1.0 - self.lr_final) * progress.fraction)
            new = optimizers.descend(self.optimiser(name), gradient, params, state, decayed)
            kept = jax.tree.map(lambda new, old: jnp.where(active, new, old), new, (params, state))
            return *kept, optimizers.norm(gradient)

        return self.layout.alone(step)(gradient, params, state)
