"""Base of algorithms with a replay buffer; a subclass defines the rows of the replay and one update of parameters."""

import dataclasses
import functools
import math
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import optax

from envs_jax.base import Array, Box, TimeStep
from envs_jax.progress import Progress, total
from jaxrl.algos.base import RATE, UNIT, Algorithm, AlgoState, Phase, Trajectory, setting
from jaxrl.common.shapes import Float32, assert_equal_shape, assert_shape
from jaxrl.common.types import Key, Params
from jaxrl.nn import optimizers
from jaxrl.rl import replay
from jaxrl.rl.replay import Priorities, Replay

MOST_UPDATES = 100_000  # per iteration; metrics appear only at its end

# Layout letters besides T, B, A, S: N samples, C critics, n action dims, m samples of one logical shard.


def squared_errors(
    values: Float32[Array, "C N A"], target: Float32[Array, "N A"], weight: Float32[Array, "N"]
) -> Float32[Array, "N A"]:
    """(y - Q)^2 summed over critics, whose mean is the critics' loss (arXiv 1509.02971, algorithm 1)."""
    assert_shape(values, (None, *target.shape))
    assert_shape(weight, target.shape[:-1])
    return jnp.sum(weight[None, :, None] * jnp.square(target[None] - values), axis=0)


def means(**arrays: Float32[Array, "N A"]) -> dict[str, Float32[Array, ""]]:
    """Return the means of several metrics in one pass, without gradients."""
    stacked = jax.lax.stop_gradient(jnp.stack(list(arrays.values())))
    return dict(zip(arrays, stacked.mean((1, 2)), strict=True))


def smallest(values: Float32[Array, "C *batch"]) -> Float32[Array, "*batch"]:
    """Return the minimum over critics; its gradient goes to the first minimal critic.

    The gradient of `values.min(0)` compares values with the minimum and divides by the number of matches: zero by zero
    where the compiler recomputes the values for that comparison with different rounding.
    """
    index = jax.lax.stop_gradient(values).argmin(0)
    critic = jax.lax.broadcasted_iota(index.dtype, values.shape, 0)
    return jnp.sum(jnp.where(critic == index[None], values, 0), axis=0)


@dataclasses.dataclass(frozen=True)
class OffPolicy(Algorithm):
    """An algorithm that learns from a replay, with an actor and critics with slowly updated target networks."""

    update_interval: int = setting(
        1, "steps of every environment between calls to learn, which makes its updates in a row", between=(1, 100_000)
    )
    updates_per_step: float = setting(
        1.0, "gradient updates per step of the batch of environments", between=(1e-6, 1e5)
    )
    batch_size: int = setting(
        64, "transitions per update, drawn with replacement; each holds all agents", between=(1, 2**24)
    )
    buffer_size: int = setting(
        100_000, "capacity of the replay buffer in environment steps, all environments together", between=(1, 1e12)
    )
    buffer_gb: float = setting(
        0.0, "size of the replay buffer in GB over all devices, instead of buffer_size; 0 = not used", between=(0, 1e6)
    )
    replay_dtype: Literal["auto", "float16", "float32"] = setting(
        "auto", "dtype of replayed float observations; auto = float16 where they lie in [0, 1], else unchanged"
    )
    learning_starts: int = setting(0, "transitions stored before the first update; 0 = batch_size", between=(0, 1e12))
    prioritized: bool = setting(
        False, "sample by the last TD error (arXiv 1511.05952), in each logical shard, instead of uniformly"
    )
    priority_alpha: float = setting(0.6, "exponent of the priorities", between=(0, 10))
    priority_beta: float = setting(
        0.4, "initial exponent of the importance weights; 1 at the end of the run", between=UNIT
    )
    n_step: int = setting(1, "n of the n-step returns (arXiv 1804.08617)", between=(1, 1000))
    gamma: float = setting(0.99, "discount", between=UNIT)
    tau: float = setting(0.005, "rate of the soft update of the target networks", between=UNIT)
    actor_lr: float = setting(3e-4, "learning rate of the actor (Adam)", between=RATE)
    critic_lr: float = setting(3e-4, "learning rate of the critic (Adam)", between=RATE)
    final_lr_fraction: float = setting(
        1.0, "learning rates fall linearly to this fraction of their initial value at the end of the run", between=UNIT
    )
    adam_epsilon: float = setting(1e-8, "Adam's epsilon", between=(1e-30, 1))
    max_grad_norm: float = setting(
        0.0, "clip gradients of each network to this global norm; 0 = never", between=(0, 1e9)
    )
    num_critics: int = setting(
        2, "number of critics; targets use the smallest value (arXiv 1802.09477)", between=(1, 100)
    )
    scale_observation: bool = setting(False, "divide observations by their largest possible absolute value")
    hidden_size: int = setting(256, "units of each hidden layer", between=(1, 2**16))
    depth: int = setting(2, "hidden layers", between=(1, 100))

    compatible_settings: ClassVar[tuple[str, ...]] = ("scale_observation",)
    parts: ClassVar[tuple[str, ...]] = ("actor", "critic")
    metric_names: ClassVar[tuple[str, ...]] = ()  # metrics of every update
    network_names: ClassVar[tuple[str, ...]] = ("actor", "critic", "target_critic")  # among the parameters

    def __post_init__(self) -> None:
        spec, name = self.spec, type(self).__name__.lower()
        if not isinstance(spec.observation, Box):
            raise ValueError(
                f"{name} needs one array per agent as observation, '{spec.name}' has several: concatenate them"
            )
        if self.scale_observation and not 0 < self._largest < math.inf:
            raise ValueError(
                f"scale_observation needs observations with bounds, '{spec.name}' has none: give "
                "--scale_observation false"
            )
        super().__post_init__()
        if self.updates < 1:
            raise ValueError(
                f"update_interval {self.update_interval} x updates_per_step {self.updates_per_step} is less than one "
                "update: raise one of them"
            )
        if self.updates > MOST_UPDATES:
            raise ValueError(
                f"update_interval {self.update_interval} x updates_per_step {self.updates_per_step:g} makes more than "
                f"{MOST_UPDATES:,} updates in a row: lower one of them"
            )
        if self.batch_size % self.layout.shards:
            raise ValueError(
                f"{self.layout.shards} logical shards do not divide batch_size {self.batch_size}: choose a multiple of "
                "them, or fewer --logical_shards"
            )
        if self.rows < self.update_interval + self.n_step:
            raise ValueError(
                f"the replay holds {self.rows - self.n_step} steps of each environment, fewer than update_interval "
                f"{self.update_interval}: raise buffer_size or buffer_gb, or lower num_envs"
            )
        if self.rows * self.layout.num_envs // self.layout.shards >= replay.MOST_ROWS:
            most = (replay.MOST_ROWS - 1) * self.layout.shards
            raise ValueError(
                f"the replay would hold {self.rows * self.layout.num_envs:,} steps, and {most:,} are the most: lower "
                f"{self.storage_setting}"
            )
        if self._fill_steps > (self.rows - self.n_step) * self.layout.num_envs:
            name = "learning_starts" if self.learning_starts else "batch_size"
            held = (self.rows - self.n_step) * self.layout.num_envs
            raise ValueError(
                f"{name} {self._fill_steps:,} exceeds the {held:,} steps that the replay holds: lower it, or raise "
                f"{self.storage_setting}"
            )

    @classmethod
    def batch(cls, spec: Any, settings: dict[str, Any], num_envs: int) -> int:
        return int(settings.get("batch_size", cls.batch_size))

    @property
    def updates(self) -> int:
        """Return the updates per call of `learn`."""
        return round(self.update_interval * self.updates_per_step)

    @property
    def _fill_steps(self) -> int:
        return self.learning_starts or self.batch_size

    @property
    def _fill_calls(self) -> int:
        """Return the calls of `learn` before an update can sample a batch."""
        per_call = self.update_interval * self.layout.num_envs
        return max(-(-self._fill_steps // per_call), -(-self.n_step // self.update_interval))

    @property
    def phases(self) -> tuple[Phase, ...]:
        """Collect until the replay holds a batch, then collect and learn."""
        train = Phase("train", self.update_interval, self.updates)
        calls = self._fill_calls
        return (Phase("fill", self.update_interval, 0, iterations=calls - 1), train) if calls > 1 else (train,)

    # Replay contents

    @property
    def _actions(self) -> int:
        """Return the number of action inputs or outputs per agent."""
        raise NotImplementedError("an off-policy algorithm needs `_actions`")

    @property
    def _observation(self) -> Box:
        assert isinstance(self.spec.observation, Box)
        return self.spec.observation

    @property
    def _observation_spec(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Return the shapes of `Replay.observation` of a row, by the names that `_observations` returns."""
        dtype = replay.storage_dtype(self._observation, self.replay_dtype)
        return {"observation": jax.ShapeDtypeStruct((self.spec.num_agents, *self._observation.shape), dtype)}

    def _observations(self, timestep: TimeStep) -> dict[str, Array]:
        """Return the entries of `_observation_spec` for time steps with any leading axes."""
        return {"observation": timestep.observation}

    @property
    def _action_spec(self) -> Any:
        """Return the shapes of a row's action part (`Replay.action`)."""
        raise NotImplementedError("an off-policy algorithm needs `_action_spec`")

    def _stored_actions(self, trajectory: Trajectory) -> Any:
        """Return the action part [T, B, ...] of a trajectory."""
        return trajectory.action

    def _noise(self, key: Key, number: int) -> Array | None:
        """Return the random numbers for an update of `number` samples, [number, ...]; None if it needs none."""
        del key, number
        return None

    def _prepared(self, batch: dict[str, Any], env_steps: Array) -> dict[str, Any]:
        """Prepare a sampled batch for `update`; `env_steps` float32[], steps of all environments so far."""
        del env_steps
        return batch

    # Sizes

    @property
    def _row_bytes(self) -> int:
        return replay.row_bytes(self._observation_spec, self._action_spec, self.spec.num_agents, self.prioritized)

    @property
    def rows(self) -> int:
        """Return the replay rows of each environment."""
        if self.buffer_gb:
            return int(self.buffer_gb * 1e9) // (self._row_bytes * self.layout.num_envs)
        return replay.rows_for(self.buffer_size, self.layout.num_envs, self.n_step)

    @property
    def storage_setting(self) -> str:
        return "buffer_gb" if self.buffer_gb else "buffer_size"

    def largest_chunk(self) -> int:
        return self.batch_size // self.layout.shards

    @property
    def _layers(self) -> int:
        """Return the number of hidden layers, or the equivalent number by activation size."""
        return self.depth

    def sample_bytes(self) -> int:
        """Return the bytes of actor and critic activations, for all agents of a stored step, and their gradients."""
        units = math.prod(self._observation.shape) + self._actions + self._layers * self.hidden_size
        return 4 * 2 * self.spec.num_agents * units * (1 + self.num_critics)

    def data_bytes(self) -> int:
        """Return the bytes of the batch that an update samples."""
        observation = math.prod(self._observation.shape) * 4
        row = self.spec.num_agents * (2 * observation + 8 * self.n_step + 32 * self._actions)
        return self.batch_size // self.layout.devices * row

    def summary(self) -> list[str]:
        envs, rows, horizon = self.layout.num_envs, self.rows, self.spec.horizon
        ratio = self.updates * self.batch_size / (self.update_interval * envs)
        return [
            f"The replay holds {(rows - self.n_step) * envs:,} environment steps in "
            f"{rows * envs * self._row_bytes / 1e6:,.3g} MB; every {self.update_interval} steps of {envs} environments "
            f"bring {self.updates} updates of {self.batch_size} stored steps: each step is replayed {ratio:.3g} times.",
            *([f"warning: n_step {self.n_step} exceeds the {horizon} steps of an episode"] * (self.n_step > horizon)),
        ]

    # Networks

    @property
    def _largest(self) -> float:
        return float(max(abs(self._observation.low), abs(self._observation.high)))

    def _flat(self, observation: Array) -> Array:
        """Flatten observations [N, A, ...] to float32[N, A, D]."""
        flat = observation.reshape(*observation.shape[:2], -1).astype(jnp.float32)
        return flat / self._largest if self.scale_observation else flat

    def optimizer(self, name: str) -> optax.GradientTransformation:
        """Return the optimizer of "actor" or "critic", whose parameters are one vector [P]."""
        del name
        return optimizers.adam(self.adam_epsilon, self.max_grad_norm)

    def optimizer_of(self, part: str) -> optax.GradientTransformation:
        found, tree = super().optimizer_of(part), self._shapes.get(part)
        return found if part not in self.custom.optimizers or tree is None else optimizers.of_tree(found, tree)

    @property
    def actor_net(self) -> Any:
        """Return the actor: observations [N, A, ...] -> float32[N, A, ...]."""
        raise NotImplementedError("an off-policy algorithm needs `actor_net`")

    @property
    def critic_net(self) -> Any:
        """Return the critic: inputs [N, A, ...] -> float32[N, A, 1], or [N, A, n] with a value per action."""
        raise NotImplementedError("an off-policy algorithm needs `critic_net`")

    @property
    def _critics_see_actions(self) -> bool:
        """Return whether critics take actions as input, rather than return a value per action."""
        return True

    def _networks(self, key: Key) -> dict[str, Params]:
        """Return fresh "actor" and "critic", the leaves of critics [C, ...]."""
        key_actor, key_critic = jax.random.split(key)
        actor_inputs = math.prod(self._observation.shape)
        critic_inputs = actor_inputs + self._actions * self._critics_see_actions
        observation, both = (jnp.zeros((1, self.spec.num_agents, size)) for size in (actor_inputs, critic_inputs))
        critic = jax.vmap(lambda k: self.critic_net.init(k, both))(jax.random.split(key_critic, self.num_critics))
        return {"actor": self.actor_net.init(key_actor, observation), "critic": critic}

    @functools.cached_property
    def _shapes(self) -> dict[str, Any]:
        """Return ShapeDtypeStructs of the networks among the parameters."""
        shapes = jax.eval_shape(self._networks, jax.random.key(0))
        return {name: shapes[name.removeprefix("target_")] for name in self.network_names}

    def pack(self, params: Any) -> Any:
        """Ravel every network into one vector [P], so that an optimizer step is a few operations."""
        return dataclasses.replace(params, **{name: optimizers.ravel(getattr(params, name)) for name in self._shapes})

    def unpack(self, params: Any) -> Any:
        """Invert `pack`."""
        return dataclasses.replace(params, **{name: self.tree(name, getattr(params, name)) for name in self._shapes})

    def tree(self, name: str, vector: Array) -> Params:
        """Unravel a packed network."""
        return optimizers.unravel(vector, self._shapes[name])

    def values(self, critic: Params, observation: Array, vector: Array | None = None) -> Array:
        """Q(o, x) float32[C, N, A] of action vectors [N, A, n]; without vectors Q(o, .) float32[C, N, A, n]."""
        inputs = self._flat(observation)
        if vector is not None:
            inputs = jnp.concatenate([inputs, vector], axis=-1)
        if self.num_critics == 1:
            out = self.critic_net.apply(jax.tree.map(lambda leaf: leaf[0], critic), inputs)[None]
        else:
            out = jax.vmap(lambda params: self.critic_net.apply(params, inputs))(critic)
        return out[..., 0] if vector is not None else out

    def _target(self, params: Any, sample: dict[str, Array]) -> Array:
        """Return the critics' targets for a sample, float32[N, A]; see `_returns`."""
        raise NotImplementedError("an off-policy algorithm needs _target(params, sample)")

    def _taken_values(self, critic: Params, sample: dict[str, Array]) -> Array:
        """Return the critics' values of the stored actions, float32[C, N, A]."""
        raise NotImplementedError("an off-policy algorithm needs _taken_values(critic, sample)")

    # Learning

    def _empty_replay(self) -> Replay:
        shards, envs = self.layout.local_shards, self.layout.num_envs // self.layout.shards
        sizes = (self.spec.num_agents, shards, self.rows, envs)
        return replay.create(self._observation_spec, self._action_spec, *sizes, self.prioritized)

    def learn(
        self,
        state: AlgoState,
        trajectory: Trajectory | None,
        last_timestep: TimeStep | None,
        key: Key,
        progress: Progress,
        phase: Phase,
    ) -> tuple[AlgoState, dict[str, Array]]:
        """Store the trajectory, then run the updates of the phase."""
        ring = state.sharded
        if trajectory is not None and last_timestep is not None:
            ring = self._store(ring, trajectory, last_timestep)
        if phase.updates == 0:
            return AlgoState(state.replicated, ring), {}
        layout = self.layout
        beta = layout.deterministic(lambda p: self.priority_beta + (1 - self.priority_beta) * p.fraction)(progress)
        rates = jnp.float32(1)
        if self.final_lr_fraction < 1:
            rates = layout.deterministic(lambda p: 1 - (1 - self.final_lr_fraction) * p.fraction)(progress)
        env_steps = total(progress.env_steps) + jnp.float32(phase.steps * layout.num_envs)
        keys = jax.vmap(lambda number: jax.random.split(jax.random.fold_in(key, number)))(jnp.arange(phase.updates))
        # where priorities do not change with every update, all batches are sampled at once: fewer, larger operations
        chosen = () if self.prioritized else jax.vmap(lambda pair: self._sample_index(ring, pair[0], beta))(keys)

        def update(carry: tuple[Any, Any], row: tuple[Array, Any, Array]) -> Any:
            (params, priorities), ((key_choice, key_noise), chosen, number) = carry, row
            latest = dataclasses.replace(ring, priorities=priorities)
            index, weight = chosen or self._sample_index(latest, key_choice, beta)
            batch = self._gather(ring, index) | {"weight": weight}
            noise = jax.vmap(lambda k: self._noise(k, index.shape[1]))(layout.shard_keys(key_noise))
            if noise is not None:
                batch["noise"] = noise
            params, metrics, error = self.update(params, self._prepared(batch, env_steps), number, rates)
            if self.prioritized:

                def mark(priorities: Priorities, index: Array, error: Array, weight: Array) -> Priorities:
                    return replay.set_priorities(priorities, index, error, weight, self.priority_alpha)

                rows = (priorities, index, error, batch["weight"])
                priorities = layout.map_shards(lambda rows: jax.vmap(mark)(*rows), rows, axis=0)
            return (params, priorities), jnp.stack([metrics[name] for name in self.metric_names])  # one write

        rows = (keys, chosen, self._numbers(progress, phase))
        (params, priorities), table = jax.lax.scan(update, (self.pack(state.replicated), ring.priorities), rows)
        metrics = {name: table[:, k] for k, name in enumerate(self.metric_names)}
        return AlgoState(self.unpack(params), dataclasses.replace(ring, priorities=priorities)), metrics

    def _numbers(self, progress: Progress, phase: Phase) -> Array:
        """Return the update numbers used by schedules, uint32[updates], from 1, modulo 2^32.

        All updates of a phase without steps have number 0, at which every schedule is due.
        """
        if phase.steps == 0:
            return jnp.zeros(phase.updates, jnp.uint32)
        return progress.updates[1] + jnp.arange(1, phase.updates + 1, dtype=jnp.uint32)

    def _store(self, ring: Replay, trajectory: Trajectory, last: TimeStep) -> Replay:
        """Write rows [T + 1, B, ...]: the trajectory's, and the next time step, which has no action yet."""
        step = trajectory.timestep
        join = lambda rows, last: jnp.concatenate([rows, last[None].astype(rows.dtype)])  # noqa: E731
        rows = {name: x.astype(self._observation_spec[name].dtype) for name, x in self._observations(step).items()}
        seen = jax.tree.map(join, rows, self._observations(last))
        end = replay.ends(join(step.terminated, last.terminated), join(step.truncated, last.truncated))
        return replay.write(ring, seen, self._stored_actions(trajectory), join(step.reward, last.reward), end)

    def _sample_index(self, ring: Replay, key: Key, beta: Array) -> tuple[Array, Array]:
        """Sample window starts in this device's shards, int32[S, m], with weights float32[S, m]."""
        number, n = self.batch_size // self.layout.shards, self.n_step
        keys = self.layout.shard_keys(key)
        if self.prioritized:

            def choose(key: Key, priorities: Priorities, head: Array, filled: Array) -> tuple[Array, Array]:
                return replay.sample_prioritized(key, priorities.priority, head, filled, number, n, beta)

            rows = (keys, ring.priorities, ring.head, ring.filled)
            return self.layout.map_shards(lambda rows: jax.vmap(choose)(*rows), rows, axis=0)
        uniform = lambda key, end, head, filled: replay.sample_uniform(key, end, head, filled, number, n)  # noqa: E731
        return jax.vmap(uniform)(keys, ring.end, ring.head, ring.filled)

    def _gather(self, ring: Replay, index: Array) -> dict[str, Array]:
        """Return the batch that starts at int32[S, m], leaves [S, m, ...], without its weights."""
        sample = jax.vmap(lambda shard, index: replay.gather(shard, index, self.n_step))(ring, index)
        batch = {"action": sample.action, "reward": sample.reward, "end": sample.end, **sample.observation}
        return batch | {f"next_{name}": value for name, value in sample.next_observation.items()}

    def update(
        self, params: Any, batch: dict[str, Array], number: Array | None = None, rates: Array | float = 1.0
    ) -> tuple[Any, dict[str, Array], Array | None]:
        """Run one update on a batch with leaves [S, m, ...] (`_gather`, "weight", and "noise" if used).

        Args:
            params: `AlgoState.replicated`, packed.
            batch: of this device.
            number: uint32[], see `_numbers`.
            rates: float32[], factor of the learning rates.

        Returns:
            parameters, packed; metrics float32[] by `metric_names`; error float32[S, m] of the critic before its step,
            for priorities, or None.
        """
        raise NotImplementedError("an off-policy algorithm needs update(params, batch, number)")

    def _critic_step(
        self, params: Any, batch: dict[str, Array], rates: Array | float
    ) -> tuple[Any, dict[str, Array], Array | None]:
        """Take one step on the critics and on their targets, `critic` and `target_critic` of the packed `params`.

        Returns:
            {"critic", "target_critic", "critic_optimizer"}; metrics float32[]; error as in `update`.
        """
        layout, trees = self.layout, self.unpack(params)
        batch = batch | {"target": layout.apply(lambda sample: self._target(trees, sample), batch)}
        error = layout.apply(lambda sample: self._error(trees, sample), batch) if self.prioritized else None

        def of_critic(critic: Array, sample: dict[str, Array]) -> tuple[Array, dict[str, Array]]:
            values = self._taken_values(self.tree("critic", critic), sample)
            errors = squared_errors(values, sample["target"], sample["weight"])
            return errors.mean(), means(critic_loss=errors, q_mean=values.mean(0), target_mean=sample["target"])

        gradient, (_, metrics) = layout.gradient(of_critic, params.critic, batch)
        critic, target, optimizer, norm = layout.deterministic(functools.partial(self._step, "critic"))(
            gradient, params.critic, params.target_critic, params.critic_optimizer, jnp.float32(self.critic_lr) * rates
        )
        metrics["critic_grad_norm"] = norm
        return {"critic": critic, "target_critic": target, "critic_optimizer": optimizer}, metrics, error

    def _step(
        self, name: str, gradient: Array, params: Array, target: Array | None, state: Any, rate: Array | float
    ) -> tuple[Array, Array | None, Any, Array]:
        """Take one step [P] on a network and its target, if any: parameters, target, optimizer state, gradient norm."""
        params, state = optimizers.apply_gradients(
            self.optimizer_of(name), gradient, params, state, self.learning_rate_of(name, rate)
        )
        if target is not None:
            target = (1 - self.tau) * target + self.tau * params
        return params, target, state, optimizers.norm(gradient)

    def _returns(self, sample: dict[str, Array], value: Array) -> Array:
        """R + gamma^k V after each window, float32[N, A], for V float32[N, A]."""
        window = jax.vmap(lambda reward, end: replay.n_step_return(reward, end, self.gamma))
        returns, discount = window(sample["reward"], sample["end"])
        assert_equal_shape([returns, value])
        return returns + discount[:, None] * value

    def _error(self, params: Any, sample: dict[str, Array]) -> Array:
        """Return the mean absolute TD error over critics, float32[N]."""
        return jnp.abs(sample["target"][None] - self._taken_values(params.critic, sample)).mean((0, 2))
