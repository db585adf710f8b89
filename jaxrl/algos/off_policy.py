"""Settings, phases, losses and sizes that algorithms with a replay buffer, an actor and critics share."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import optax

from envs_jax.base import Array, Box, TimeStep
from envs_jax.progress import Progress, add, total
from jaxrl.algos.base import RATE, UNIT, Algorithm, AlgoState, Phase, Trajectory, setting
from jaxrl.algos.replay_learner import ReplayLearner
from jaxrl.common.shapes import Float32, UInt8, assert_equal_shape, assert_shape
from jaxrl.common.types import Key, Params
from jaxrl.nn import networks, optimizers
from jaxrl.nn.packed import Packed
from jaxrl.rl import replay

MOST_UPDATES = 100_000  # per iteration; metrics appear only at its end

# Layout letters besides T, B, A, S: N samples, C critics, n steps of a return, m samples of one logical shard.


def squared_errors(
    values: Float32[Array, "C N A"], target: Float32[Array, "N A"], weight: Float32[Array, "N"]
) -> Float32[Array, "N A"]:
    """(y - Q)^2 summed over critics, whose mean is the critics' loss (arXiv 1509.02971, algorithm 1)."""
    assert_shape(values, (None, *target.shape))
    assert_shape(weight, target.shape[:-1])
    return jnp.sum(weight[None, :, None] * jnp.square(target[None] - values), axis=0)


def bootstrap(
    reward: Float32[Array, "N n A"], end: UInt8[Array, "N n"], value: Float32[Array, "N A"], gamma: Array | float
) -> Float32[Array, "N A"]:
    """R + gamma^k V for the k <= n rewards R of each window and the value V after it; see `replay.n_step_return`."""
    returns, discount = jax.vmap(lambda reward, end: replay.n_step_return(reward, end, gamma))(reward, end)
    assert_equal_shape([returns, value])
    return returns + discount[:, None] * value


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
    """Base of algorithms with a replay buffer, an actor and critics.

    An algorithm defines its networks' sizes, what is stored, `init`, `act` and `update`.
    """

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
    random_steps: int = setting(
        0,
        "environment steps (all environments together) with random actions; then all updates due for them, each "
        "of which also updates the actor and the target networks",
        between=(0, 2**24 - 1),
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
    actor_update_period: int = setting(1, "critic updates per update of the actor", between=(1, 1e9))
    target_update_period: int = setting(1, "critic updates per update of the target networks", between=(1, 1e9))
    scale_observation: bool = setting(False, "divide observations by their largest possible absolute value")
    hidden_size: int = setting(256, "units of each hidden layer", between=(1, 2**16))
    depth: int = setting(2, "hidden layers", between=(1, 100))

    compatible_settings: ClassVar[tuple[str, ...]] = ("scale_observation",)
    parts: ClassVar[tuple[str, ...]] = ("actor", "critic")
    traced: ClassVar[tuple[str, ...]] = ("gamma", "tau", "actor_lr", "critic_lr", "final_lr_fraction")

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
        updates = f"update_interval {self.update_interval} x updates_per_step {self.updates_per_step:g}"
        if self.updates < 1:
            raise ValueError(f"{updates} is less than one update: raise one of them")
        if self.updates > MOST_UPDATES:
            raise ValueError(f"{updates} makes more than {MOST_UPDATES:,} updates in a row: lower one of them")
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
        held = (self.rows - self.n_step) * self.layout.num_envs
        if self._fill_steps > held:
            name = "learning_starts" if self.learning_starts else "batch_size"
            raise ValueError(
                f"{name} {self._fill_steps:,} exceeds the {held:,} steps that the replay holds: lower it, or raise "
                f"{self.storage_setting}"
            )

    # Phases

    @property
    def updates(self) -> int:
        """Return the updates per call of `learn`."""
        return round(self.update_interval * self.updates_per_step)

    @property
    def _fill_steps(self) -> int:
        return self.learning_starts or self.batch_size

    @property
    def random_calls(self) -> int:
        """Return the calls of `learn` in the random phase, which lasts at least until a batch can be sampled."""
        per_call = self.update_interval * self.layout.num_envs
        fill = max(-(-self._fill_steps // per_call), -(-self.n_step // self.update_interval))
        return max(-(-self.random_steps // per_call), fill) if self.random_steps else fill

    @property
    def phases(self) -> tuple[Phase, ...]:
        """Return random steps and the updates due after them, or steps to fill a batch; then steps and updates."""
        calls, train = self.random_calls, Phase("train", self.update_interval, self.updates)
        if self.random_steps:
            random = Phase("random", self.update_interval, 0, iterations=calls)
            return (random, Phase("burst", 0, self.updates, iterations=calls), train)
        return (Phase("fill", self.update_interval, 0, iterations=calls - 1), train) if calls > 1 else (train,)

    def random_phase(self, progress: Progress) -> Array | None:
        """Return whether actions are random at this step, bool[]; None if they never are."""
        if not self.random_steps:
            return None
        steps = self.random_calls * self.update_interval * self.layout.num_envs
        return total(progress.env_steps) < self.steps_before + steps

    @property
    def steps_before(self) -> int:
        """Return the environment steps of phases before these."""
        return 0

    def update_numbers(self, progress: Progress, phase: Phase) -> Array:
        """Return the update numbers used by schedules, uint32[updates], from 1, modulo 2^32.

        All updates of a phase without steps have number 0, at which every schedule is due.
        """
        if phase.steps == 0:
            return jnp.zeros(phase.updates, jnp.uint32)
        return progress.updates[1] + jnp.arange(1, phase.updates + 1, dtype=jnp.uint32)

    # Learning

    def optimizer(self, part: str) -> optax.GradientTransformation:
        """Return Adam, with clipping where `max_grad_norm` asks for it."""
        del part
        return optimizers.adam(self.adam_epsilon, self.max_grad_norm)

    def learning_rate(self, part: str, progress: Progress) -> Array:
        """Return the rate of a part's setting, which falls linearly over the run."""
        fraction = 1 - (1 - self.final_lr_fraction) * progress.fraction
        return jnp.float32(getattr(self, f"{part}_lr")) * fraction

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
        params, ring = state.replicated, state.sharded
        if trajectory is not None and last_timestep is not None:
            ring = self.replay.store(ring, trajectory, last_timestep, self.observed, self.stored_action(trajectory))
        if phase.updates == 0:
            return AlgoState(params, ring), {}
        # counters include the steps just stored
        progress = dataclasses.replace(progress, env_steps=add(progress.env_steps, phase.steps * self.layout.num_envs))
        update = functools.partial(self.update, progress=progress)
        params, metrics = self.replay.run(update, params, ring, key, self.update_numbers(progress, phase))
        return AlgoState(params, ring), metrics

    def update(
        self, params: Any, batch: dict[str, Any], number: Array, progress: Progress
    ) -> tuple[Any, dict[str, Array]]:
        """Run one update on a batch with leaves [S, m, ...]; return parameters and metrics float32[] by name."""
        raise NotImplementedError("an off-policy algorithm needs update(params, batch, number, progress)")

    def when_due(self, period: int, number: Array, update: Callable[[], Any], kept: Any) -> Any:
        """Return `update()` where the update number is a multiple of the period, else `kept`."""
        return update() if period == 1 else jax.lax.cond(number % period == 0, update, lambda: kept)

    def target_rate(self, number: Array) -> Array | float:
        """Return tau where the targets' update is due, else 0."""
        if self.target_update_period == 1:
            return self.tau
        return jnp.where(number % self.target_update_period == 0, self.tau, 0.0)

    # What is stored

    @property
    def box(self) -> Box:
        """Return the box of observations."""
        assert isinstance(self.spec.observation, Box)
        return self.spec.observation

    @property
    def observation_rows(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Return the shapes of what `observed` returns, for one time step."""
        dtype = replay.storage_dtype(self.box, self.replay_dtype)
        return {"observation": jax.ShapeDtypeStruct((self.spec.num_agents, *self.box.shape), dtype)}

    def observed(self, timestep: TimeStep) -> dict[str, Array]:
        """Return what is stored of time steps with any leading axes."""
        return {"observation": timestep.observation}

    @property
    def action_rows(self) -> Any:
        """Return the shapes of what `stored_action` returns, for one step."""
        raise NotImplementedError("an off-policy algorithm needs `action_rows`")

    def stored_action(self, trajectory: Trajectory) -> Any:
        """Return the action part [T, B, ...] of a trajectory."""
        return trajectory.action

    @property
    def noise(self) -> Callable[[Key, int], Array | None]:
        """Return a function (key, m) -> the random numbers [m, ...] of an update, or None if it needs none."""
        return lambda key, m: None

    @property
    def replay(self) -> ReplayLearner:
        """Return the replay buffer and its use."""
        return ReplayLearner(
            self.layout, self.spec.num_agents, self.observation_rows, self.action_rows, self.rows, self.batch_size,
            self.n_step, self.noise,
        )  # fmt: skip

    # Networks

    @property
    def _largest(self) -> float:
        return float(max(abs(self.box.low), abs(self.box.high)))

    def flat(self, observation: Array) -> Array:
        """Flatten observations [N, A, ...] to float32[N, A, D], scaled if the settings ask for it."""
        flat = observation.reshape(*observation.shape[:2], -1).astype(jnp.float32)
        return flat / self._largest if self.scale_observation else flat

    @property
    def action_size(self) -> int:
        """Return n, the numbers of an agent's action, or its actions to choose from."""
        raise NotImplementedError("an off-policy algorithm needs `action_size`")

    @property
    def actor_outputs(self) -> int:
        """Return the outputs of the actor per agent."""
        return self.action_size

    @property
    def critic_sizes(self) -> tuple[int, int]:
        """Return the action inputs of critics per agent, and their outputs."""
        return self.action_size, 1

    def team_net(self, part: str, outputs: int) -> Any:
        """Return the standard flax module of a part."""
        del part
        return networks.TeamNet(outputs, self.hidden_size, self.depth, dtype=self.layout.compute_dtype)

    @functools.cached_property
    def networks(self) -> dict[str, Packed]:
        """Return the actor, [N, A, D] -> float32[N, A, outputs], and the critics, -> float32[C, N, A, outputs]."""
        agents, size, (inputs, outputs) = self.spec.num_agents, math.prod(self.box.shape), self.critic_sizes
        team = lambda part: functools.partial(self.team_net, part)  # noqa: E731
        actor = self.make_network("actor", self.actor_outputs, team("actor"), (1, agents, size), leading=2)
        critic = self.make_network("critic", outputs, team("critic"), (1, agents, size + inputs), leading=2)
        return {"actor": actor, "critic": dataclasses.replace(critic, members=self.num_critics)}

    def values(self, critic: Params, observation: Array, action: Array | None = None) -> Array:
        """Q(o, x) float32[C, N, A] of action vectors [N, A, n]; without vectors Q(o, .) float32[C, N, A, n]."""
        inputs = self.flat(observation)
        if action is None:
            return self.networks["critic"].apply(critic, inputs)
        return self.networks["critic"].apply(critic, jnp.concatenate([inputs, action], axis=-1))[..., 0]

    # Sizes

    @property
    def _row_bytes(self) -> int:
        return replay.row_bytes(self.observation_rows, self.action_rows, self.spec.num_agents)

    @property
    def rows(self) -> int:
        """Return the replay rows of each environment."""
        if self.buffer_gb:
            return int(self.buffer_gb * 1e9) // (self._row_bytes * self.layout.num_envs)
        return replay.rows_for(self.buffer_size, self.layout.num_envs, self.n_step)

    @property
    def storage_setting(self) -> str:
        return "buffer_gb" if self.buffer_gb else "buffer_size"

    @classmethod
    def batch(cls, spec: Any, settings: dict[str, Any], num_envs: int) -> int:
        return int(settings.get("batch_size", cls.batch_size))

    def largest_chunk(self) -> int:
        return self.batch_size // self.layout.shards

    def sample_bytes(self) -> int:
        """Return the bytes of actor and critic activations, for all agents of a stored step, and their gradients."""
        units = math.prod(self.box.shape) + self.action_size + self.depth * self.hidden_size
        return 4 * 2 * self.spec.num_agents * units * (1 + self.num_critics)

    def data_bytes(self) -> int:
        """Return the bytes of the batch that an update samples."""
        observation = math.prod(self.box.shape) * 4
        row = self.spec.num_agents * (2 * observation + 8 * self.n_step + 32 * self.action_size)
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
