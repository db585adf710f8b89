"""Settings, phases, networks and sizes that algorithms with a replay buffer, an actor and critics share."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from envs_jax.base import Array, Box, Discrete, TimeStep, independent_mask
from envs_jax.progress import Progress, add, total
from jaxrl.algos.base import RATE, UNIT, Algorithm, AlgoState, Learner, Phase, Trajectory, append_last, setting
from jaxrl.common.shapes import Float32
from jaxrl.common.types import Key, Params
from jaxrl.nn import optimizers
from jaxrl.nn.networks import Network
from jaxrl.rl import replay
from jaxrl.rl.replay import Replay, n_step_return

MAX_UPDATES = 100_000  # per iteration; metrics appear only at its end
RATIO_TOLERANCE = 0.1  # relative error of environment steps per update where their ratio is not whole

# Layout letters besides T, B, A, S: N samples, C critics, n steps of a return, m samples of one logical shard.


def compute_means(**arrays: Float32[Array, "N A"]) -> dict[str, Float32[Array, ""]]:
    """Return the means of several metrics in one pass, without gradients."""
    stacked = jax.lax.stop_gradient(jnp.stack(list(arrays.values())))
    return dict(zip(arrays, stacked.mean((1, 2)), strict=True))


def reorder(values: Array, order: Array, inverse: bool = False) -> Array:
    """Put values [..., N, A, n] of the actions 0 .. n - 1 into the order [N, A, n], or back (`inverse`)."""
    position = jax.nn.one_hot(order.astype(jnp.int32), order.shape[-1], dtype=values.dtype)  # [N, A, position, action]
    position = jnp.expand_dims(position, range(values.ndim - order.ndim))
    return jnp.sum(position * (values[..., None] if inverse else values[..., None, :]), axis=-2 if inverse else -1)


def when_due(period: int, update_index: Array, update: Callable[[], Any], unchanged: Any) -> Any:
    """Return `update()` if `update_index` is a multiple of the period, else `unchanged`."""
    return update() if period == 1 else jax.lax.cond(update_index % period == 0, update, lambda: unchanged)


@dataclasses.dataclass(frozen=True)
class OffPolicy(Algorithm):
    """Base of algorithms with a replay buffer, critics, and an actor or none.

    An algorithm defines `networks`, what is stored (`action_shapes`, `stored_action`), `init` and `act`; then
    `compute_target`, `critic_values` and `update_actor`, or an `update` of its own.
    """

    env_steps_per_update: float = setting(
        64.0,
        "environment steps, all environments together, for each gradient update, whatever num_envs is; with more "
        "environments more updates follow each of their steps",
        between=(1e-5, 1e9),
    )
    update_interval: int = setting(
        1,
        "steps of every environment between calls to learn, which makes all updates that are due; raised until at "
        "least one is due",
        between=(1, 100_000),
    )
    batch_size: int = setting(
        64, "transitions per update, sampled with replacement; each holds all agents", between=(1, 2**24)
    )
    buffer_size: int = setting(
        100_000, "capacity of the replay buffer in environment steps, all environments together", between=(1, 1e12)
    )
    learning_starts: int = setting(0, "transitions to store before the first update; 0 = batch_size", between=(0, 1e12))
    random_steps: int = setting(
        0,
        "environment steps (all environments together) with random actions at the start; then come all updates that "
        "are due for them",
        between=(0, 2**24 - 1),
    )
    n_step: int = setting(1, "steps of the n-step returns (arXiv 1804.08617)", between=(1, 1000))
    gamma: float = setting(0.99, "discount factor per step", between=UNIT)
    tau: float = setting(0.005, "share by which an update moves target networks to the trained ones", between=UNIT)
    actor_lr: float = setting(3e-4, "learning rate of the actor (Adam)", between=RATE)
    critic_lr: float = setting(3e-4, "learning rate of the critic (Adam)", between=RATE)
    final_lr_fraction: float = setting(
        1.0, "learning rates fall linearly to this fraction of their initial value at the end of the run", between=UNIT
    )
    max_grad_norm: float = setting(
        0.0, "clip gradients of each network to this global norm; 0 = never", between=(0, 1e9)
    )
    num_critics: int = setting(
        2, "number of critics; targets use the smallest value (arXiv 1802.09477)", between=(1, 100)
    )
    actor_update_period: int = setting(1, "critic updates per update of the actor", between=(1, 1e9))
    target_update_period: int = setting(1, "critic updates per update of the target networks", between=(1, 1e9))
    scale_observation: bool = setting(False, "divide observations by their largest possible absolute value")
    hidden_size: int = setting(256, "units of each hidden layer of actor and critics", between=(1, 2**16))
    depth: int = setting(2, "number of hidden layers of actor and critics", between=(1, 100))

    compatible_settings: ClassVar[tuple[str, ...]] = ("scale_observation",)
    parts: ClassVar[tuple[str, ...]] = ("actor", "critic")
    sweepable: ClassVar[tuple[str, ...]] = ("gamma", "tau", "actor_lr", "critic_lr", "final_lr_fraction")
    storage_setting: ClassVar[str] = "buffer_size"

    def __post_init__(self) -> None:
        spec = self.spec
        name = type(self).__name__.lower()
        if not isinstance(spec.observation, Box):
            raise ValueError(
                f"{name} needs one array per agent as observation, '{spec.name}' has several: concatenate them"
            )
        if self.scale_observation and not 0 < self._largest < math.inf:
            raise ValueError(
                f"scale_observation needs observations with bounds, '{spec.name}' has none: give "
                "--scale_observation false"
            )
        if self.respects_masks and spec.next_mask is not independent_mask:
            way_out = ", or give --masking false, which plays closed actions, too" if hasattr(self, "masking") else ""
            raise ValueError(
                f"the action masks of '{spec.name}' depend on other agents' actions, which {name} cannot use: use coma "
                f"or ppo{way_out}"
            )
        super().__post_init__()
        if self.updates > MAX_UPDATES:
            raise ValueError(
                f"{self.steps_per_call * self.layout.num_envs:,} environment steps with env_steps_per_update "
                f"{self.env_steps_per_update:g} make more than {MAX_UPDATES:,} updates in a row: raise "
                "env_steps_per_update, or lower update_interval or num_envs"
            )
        if self.batch_size % self.layout.shards:
            raise ValueError(
                f"batch_size {self.batch_size} is not a multiple of the {self.layout.shards} logical shards: change "
                "it, or lower --logical_shards"
            )
        rows = self.replay_rows
        envs = self.layout.num_envs
        first_batch = self.learning_starts or self.batch_size
        if rows < self.steps_per_call + self.n_step:
            raise ValueError(
                f"the replay holds {rows - self.n_step} steps of each environment, but {self.steps_per_call} are made "
                "between two calls to learn: raise buffer_size, or lower update_interval or env_steps_per_update"
            )
        if rows * envs // self.layout.shards >= replay.MAX_ROWS:
            max_rows = (replay.MAX_ROWS - 1) * self.layout.shards
            raise ValueError(f"the replay would hold {rows * envs:,} steps, more than {max_rows:,}: lower buffer_size")
        capacity = (rows - self.n_step) * envs
        if first_batch > capacity:
            name = "learning_starts" if self.learning_starts else "batch_size"
            raise ValueError(
                f"{name} {first_batch:,} exceeds the {capacity:,} steps that the replay holds: lower it, or raise "
                "buffer_size"
            )

    # Phases

    @functools.cached_property
    def steps_per_call(self) -> int:
        """Steps of every environment between calls of `learn`.

        They are at least `update_interval`, and as few as give a whole number of updates whose ratio to environment
        steps is within a tenth of `env_steps_per_update`.
        """
        one_update = round(self.env_steps_per_update / self.layout.num_envs)
        for steps in itertools.count(max(self.update_interval, one_update)):
            due = steps * self.layout.num_envs / self.env_steps_per_update
            if abs(round(due) - due) <= RATIO_TOLERANCE * due:
                return steps
        raise AssertionError

    @property
    def updates(self) -> int:
        return round(self.steps_per_call * self.layout.num_envs / self.env_steps_per_update)

    @property
    def first_calls(self) -> int:
        """Calls of `learn` that follow random actions, or until the first batch is stored."""
        fill = self.learning_starts or self.batch_size
        per_call = self.steps_per_call * self.layout.num_envs
        return max(-(-max(fill, self.random_steps) // per_call), -(-self.n_step // self.steps_per_call))

    @property
    def one_program(self) -> bool:
        """See `Algorithm`; a subclass with phases or a `learn` of its own says so itself."""
        return type(self).phases is OffPolicy.phases and type(self).learn is OffPolicy.learn

    @property
    def first_env_steps(self) -> int:
        return self.first_calls * self.steps_per_call * self.layout.num_envs

    @property
    def phases(self) -> tuple[Phase, ...]:
        """Random steps and then the updates due for them, or steps to store a batch; then training."""
        calls = self.first_calls
        train = Phase("train", self.steps_per_call, self.updates)
        if self.random_steps:
            random = Phase("random", self.steps_per_call, 0, iterations=calls)
            return (random, Phase("burst", 0, self.updates, iterations=calls), train)
        return (Phase("fill", self.steps_per_call, 0, iterations=calls - 1), train) if calls > 1 else (train,)

    def acts_randomly(self, progress: Progress) -> Array | None:
        """Return whether actions are random at this step, bool[]; None if they never are."""
        if not self.random_steps:
            return None
        return total(progress.env_steps) < self.first_env_steps

    def update_indices(self, progress: Progress, updates: int) -> Array:
        """Return the indices of the next updates in the run, uint32[updates], from 1, modulo 2^32."""
        return progress.updates[1] + jnp.arange(1, updates + 1, dtype=jnp.uint32)

    # Learning

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
        params, buffer = state.replicated, state.sharded
        if trajectory is not None and last_timestep is not None:
            buffer = self.store(buffer, trajectory, last_timestep)
            env_steps = add(progress.env_steps, phase.steps * self.layout.num_envs)
            progress = dataclasses.replace(progress, env_steps=env_steps)
        if phase.updates == 0:
            return AlgoState(params, buffer), {}
        update_indices = self.update_indices(progress, phase.updates)
        keys = jax.vmap(lambda n: jax.random.split(jax.random.fold_in(key, n)))(
            jnp.arange(len(update_indices), dtype=jnp.uint32)
        )
        # all batches are sampled at once: fewer, larger operations
        indices = jax.vmap(lambda pair: self.sample(buffer, pair[0]))(keys)

        def run_update(params: Any, row: tuple[Array, Any, Array]) -> tuple[Any, Array]:
            (_, key_noise), (index, weight), update_index = row
            batch = self.gather(buffer, index) | {"weight": weight}
            noise = jax.vmap(lambda k: self.noise(k, index.shape[1]))(self.layout.shard_keys(key_noise))
            if noise is not None:
                batch["noise"] = noise
            params, metrics = self.update(params, batch, update_index, progress)
            names[:] = metrics
            # they leave the loop as one array: a GPU needs a kernel for each array of a turn
            return params, jnp.stack([metrics[name] for name in names])

        names: list[str] = []  # of the metrics, known once an update is traced
        params, rows = jax.lax.scan(run_update, params, (keys, indices, update_indices))
        return AlgoState(params, buffer), {name: rows[:, k] for k, name in enumerate(names)}

    def update(
        self, params: Any, batch: dict[str, Any], update_index: Array, progress: Progress
    ) -> tuple[Any, dict[str, Array]]:
        """Run one update on a batch with leaves [S, m, ...]; return parameters and metrics float32[] by name.

        By default the critics take a step, then the actor where it is due, with the new critics; last the parts with a
        copy `target_PART` in `params` move it. Between updates of the actor its metrics are repeated (`params.shown`).
        """
        critic, metrics = self.update_critic(params, batch, progress)
        params = dataclasses.replace(params, critic=critic)
        if "actor" in self.parts:
            changing = [part for part in self.parts if part != "critic"]
            unchanged = {name: getattr(params, name) for name in (*changing, "shown")}
            update_actor = functools.partial(self.update_actor, params, batch, progress)
            params = dataclasses.replace(
                params, **when_due(self.actor_update_period, update_index, update_actor, unchanged)
            )
            metrics |= params.shown
        rate = self.target_rate(update_index)
        targets = {
            f"target_{part}": optimizers.move(getattr(params, part).params, getattr(params, f"target_{part}"), rate)
            for part in self.parts
            if hasattr(params, f"target_{part}")
        }
        return dataclasses.replace(params, **targets), metrics

    def update_critic(self, params: Any, batch: dict[str, Any], progress: Progress) -> tuple[Learner, dict[str, Array]]:
        """Take a step of the critics on mean w sum_c (Q_c - y)^2; return them and metrics float32[] by name."""

        def critic_loss(critic: Params, sample: dict[str, Any]) -> tuple[Array, dict[str, Array]]:
            target = self.compute_target(params, sample)  # by `params`, not by the `critic` that is differentiated
            values = self.critic_values(critic, sample)
            errors = jnp.sum(sample["weight"][None, :, None] * jnp.square(target[None] - values), axis=0)
            return errors.mean(), compute_means(critic_loss=errors, q_mean=values.mean(0), target_mean=target)

        gradient, (_, metrics) = self.layout.gradient(critic_loss, params.critic.params, batch)
        critic, norm = self.step("critic", params.critic, gradient, progress)
        return critic, metrics | {"critic_grad_norm": norm}

    def compute_target(self, params: Any, sample: dict[str, Any]) -> Array:
        """Targets y of the critics, float32[N, A], for samples with leaves [N, ...]; see `n_step_target`."""
        raise NotImplementedError("an off-policy algorithm needs compute_target(params, sample)")

    def critic_values(self, critic: Params, sample: dict[str, Any]) -> Array:
        """Values Q(o, x) of the stored actions by each critic, float32[C, N, A]."""
        raise NotImplementedError("an off-policy algorithm needs critic_values(critic, sample)")

    def update_actor(self, params: Any, batch: dict[str, Any], progress: Progress) -> dict[str, Any]:
        """Return the new values of all parts but the critic, and the metrics `shown`, {name: float32[]}."""
        raise NotImplementedError("an off-policy algorithm needs update_actor(params, batch, progress)")

    def n_step_target(self, sample: dict[str, Any], next_value: Array) -> Array:
        """Return R + gamma^k V, float32[N, A], for values V float32[N, A] of "next_observation".

        R sums the discounted rewards of k = `n_step` steps, fewer at an episode's end; the second term is 0 where the
        episode terminated.
        """
        window_return = functools.partial(n_step_return, gamma=self.gamma)
        rewards, discount = jax.vmap(window_return)(sample["reward"], sample["end"])
        return rewards + discount[:, None] * next_value

    def target_rate(self, update_index: Array) -> Array | float:
        """The share by which targets move at this update: tau where it is due, else 0."""
        period = self.target_update_period
        return self.tau if period == 1 else jnp.where(update_index % period == 0, self.tau, 0.0)

    # What is stored

    @property
    def observation_shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes of the stored parts of one environment's time step: "observation" [A, ...], and "mask" bool[A, n].

        Masks are stored where the algorithm heeds them (`respects_masks`).
        """
        agents = self.spec.num_agents
        shapes = {"observation": jax.ShapeDtypeStruct((agents, *self.box.shape), replay.storage_dtype(self.box))}
        if self.respects_masks:
            shapes["mask"] = jax.ShapeDtypeStruct((agents, self.action_size), jnp.bool_)
        return shapes

    def stored_observation(self, timestep: TimeStep) -> dict[str, Array]:
        """Return the parts of time steps that are stored, see `observation_shapes`; any leading axes."""
        rows = {"observation": timestep.observation}
        if self.respects_masks:
            mask = timestep.action_mask
            rows["mask"] = jnp.ones((*timestep.reward.shape, self.action_size), bool) if mask is None else mask
        return rows

    @property
    def action_shapes(self) -> Any:
        """Shapes of the stored parts of one environment's action, a pytree."""
        raise NotImplementedError("an off-policy algorithm needs `action_shapes`")

    def stored_action(self, trajectory: Trajectory) -> Any:
        """Return the parts of a trajectory's actions that are stored, leaves [T, B, ...]."""
        raise NotImplementedError("an off-policy algorithm needs stored_action(trajectory)")

    def noise(self, key: Key, count: int) -> Array | None:
        """Return the random numbers [count, ...] of an update, its batch's "noise"; None if it needs none."""
        del key, count
        return None

    @property
    def replay_rows(self) -> int:
        """Rows of each environment, R, so that `buffer_size` windows can be sampled."""
        return -(-self.buffer_size // self.layout.num_envs) + self.n_step

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of one environment."""
        return replay.row_bytes(self.observation_shapes, self.action_shapes, self.spec.num_agents)

    def init_replay(self) -> Replay:
        """Return this device's part of an empty replay."""
        layout = self.layout
        return replay.create(
            self.observation_shapes,
            self.action_shapes,
            self.spec.num_agents,
            layout.local_shards,
            self.replay_rows,
            layout.num_envs // layout.shards,
        )

    def store(self, buffer: Replay, trajectory: Trajectory, last: TimeStep) -> Replay:
        """Write T + 1 rows of each environment: the trajectory, and the next time step, which has no action yet."""
        step = trajectory.timestep
        rows = self.stored_observation(step)
        last_row = self.stored_observation(last)
        observations = {
            name: append_last(rows[name].astype(shape.dtype), last_row[name])
            for name, shape in self.observation_shapes.items()
        }
        end = replay.ends(append_last(step.terminated, last.terminated), append_last(step.truncated, last.truncated))
        reward = append_last(step.reward, last.reward)
        return replay.write(buffer, observations, self.stored_action(trajectory), reward, end)

    def sample(self, buffer: Replay, key: Key) -> tuple[Array, Array]:
        """Sample first rows of windows in this device's shards, int32[S, m], with weights float32[S, m]."""
        count = self.batch_size // self.layout.shards
        sample = functools.partial(replay.sample_uniform, count=count, n_step=self.n_step)
        return jax.vmap(sample)(self.layout.shard_keys(key), buffer.end, buffer.head, buffer.filled)

    def gather(self, buffer: Replay, index: Array) -> dict[str, Any]:
        """Return the batch that starts at int32[S, m], leaves [S, m, ...], without weights and noise."""
        sample = jax.vmap(lambda shard, index: replay.gather(shard, index, self.n_step))(buffer, index)
        batch = {"action": sample.action, "reward": sample.reward, "end": sample.end, **sample.observation}
        return batch | {f"next_{name}": value for name, value in sample.next_observation.items()}

    # Networks

    @property
    def box(self) -> Box:
        """The space of an agent's observations."""
        assert isinstance(self.spec.observation, Box)
        return self.spec.observation

    @property
    def action_size(self) -> int:
        """Numbers of an agent's continuous action, or its number of discrete actions, n."""
        action = self.spec.action
        return action.n if isinstance(action, Discrete) else math.prod(action.shape)

    def actor_network(self, module: Callable[[str, int], Any], outputs: int) -> Network:
        """Return the actor, [N, A, D] -> float32[N, A, outputs]; see `critic_network`."""
        return self.make_network(
            "actor", outputs, functools.partial(module, "actor"), (1, self.spec.num_agents, self._inputs), leading=2
        )

    def critic_network(self, module: Callable[[str, int], Any], outputs: int = 1, action_inputs: int = 0) -> Network:
        """Return the critics, [N, A, D + action_inputs] -> float32[C, N, A, outputs].

        Args:
            module: (part, outputs) -> the standard flax module.
            outputs: numbers for each agent.
            action_inputs: numbers of an agent's action that follow its observation.
        """
        shape = (1, self.spec.num_agents, self._inputs + action_inputs)
        network = self.make_network("critic", outputs, functools.partial(module, "critic"), shape, leading=2)
        return dataclasses.replace(network, members=self.num_critics)

    @property
    def _inputs(self) -> int:
        """Numbers of an agent's observation that networks get, D."""
        return math.prod(self.box.shape) - self._ordered

    def outputs(self, part: str, params: Params, observation: Array, action: Array | None = None) -> Array:
        """Return a network's outputs for observations [N, A, ...], which are flattened, and scaled if asked for.

        The actor's are float32[N, A, outputs]; the critics' Q(o, .) float32[C, N, A, n], or for action vectors
        [N, A, n] Q(o, x) float32[C, N, A].
        """
        inputs = observation.reshape(*observation.shape[:2], -1).astype(jnp.float32)
        order = inputs[..., : self._ordered]
        inputs = inputs[..., self._ordered :]
        if self.scale_observation:
            inputs = inputs / self._largest
        if action is not None:
            action = reorder(action, order) if self._ordered else action
            return self.networks[part].apply(params, jnp.concatenate([inputs, action], axis=-1))[..., 0]
        outputs = self.networks[part].apply(params, inputs)
        return reorder(outputs, order, inverse=True) if self._ordered else outputs

    @property
    def _ordered(self) -> int:
        """Number of an observation's values that give the order of its actions, see `EnvSpec.action_order`."""
        return self.spec.action.n if self.spec.action_order and isinstance(self.spec.action, Discrete) else 0

    @property
    def _largest(self) -> float:
        return float(max(abs(self.box.lowest), abs(self.box.highest)))

    # Sizes

    @classmethod
    def batch(cls, spec: Any, settings: dict[str, Any], num_envs: int) -> int:
        return int(settings.get("batch_size", cls.batch_size))

    @property
    def gradient_samples(self) -> int:
        return self.batch_size // self.layout.shards

    def summary(self) -> list[str]:
        envs = self.layout.num_envs
        rows = self.replay_rows
        megabytes = rows * envs * self.row_bytes / 1e6
        ratio = self.updates * self.batch_size / (self.steps_per_call * envs)
        return [
            f"The replay holds {(rows - self.n_step) * envs:,} environment steps in {megabytes:,.3g} MB; every "
            f"{self.steps_per_call * envs:,} environment steps bring updates from {self.updates} x {self.batch_size:,} "
            f"stored steps: each step is replayed {ratio:.3g} times.",
        ]

    def warnings(self, total_env_steps: int) -> list[str]:
        horizon = self.spec.horizon
        return [f"n_step {self.n_step} exceeds the {horizon} steps of an episode"] if self.n_step > horizon else []
