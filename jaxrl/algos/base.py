"""The algorithm interface: phases, state, progress counters, and the protocol that the training loop calls.

Layout letters: T time, B batch of environments, A agents, S logical shards. Everything here runs inside the
compiled block, once per device, on that device's environments; sums over devices go through `DataParallel`.
"""

import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import optax

from envs_jax.base import Array, EnvSpec, TimeStep, check_settings, pytree, setting, short_repr
from envs_jax.progress import Progress
from jaxrl.common.types import Key, Params, PolicyParams
from jaxrl.nn import optimizers
from jaxrl.runtime.data_parallel import DataParallel

__all__ = [
    "RATE",
    "STANDARD",
    "UNIT",
    "AlgoState",
    "Algorithm",
    "Custom",
    "Mode",
    "Phase",
    "Progress",
    "Trajectory",
    "UpstreamRun",
    "next_timesteps",
    "read_resolved",
    "setting",
]

UNIT = (0, 1)  # bounds of discounts, shares and probabilities
RATE = (1e-12, 10)  # bounds of learning rates (Adam)

# Action selection: exploring as in training; greedy; sampled; greedy with the task code set to zero.
Mode = Literal["explore", "sample", "greedy", "zero_code"]


@dataclasses.dataclass(frozen=True)
class Phase:
    """A part of training with one compiled block; most algorithms have one.

    Attributes:
        name: shown to the user and stored in checkpoints.
        steps: T, environment steps of every copy per iteration; 0 where the phase only learns.
        updates: gradient updates per call of `learn`.
        iterations: how many iterations the phase lasts, None for "until the run's total is reached".
        restart: every iteration begins with fresh episodes; no environment state is kept between iterations.
    """

    name: str
    steps: int
    updates: int
    iterations: int | None = None
    restart: bool = False


@pytree
class AlgoState:
    """State of an algorithm.

    Attributes:
        replicated: the same on every device: parameters, targets, optimizers, statistics.
        sharded: one row per logical shard (first axis): replay, data sets; () by default.
    """

    replicated: Any
    sharded: Any


@pytree
class Trajectory:
    """The data of one iteration, leaves [T, B, ...].

    Row t holds the time step observed, the action taken on it and the `extras` of acting. The reward of that
    action is in the time step of row t + 1 (for the last row in `last_timestep`). Where
    `timestep.done`, the action was ignored and the next row starts a new episode.
    """

    timestep: TimeStep
    action: Array
    extras: Any


def read_resolved(text: str, names: Iterable[str]) -> dict[str, Any]:
    """Parse the JSON object that `resolve_inputs` wrote, with these names only. Raises ValueError for anything else."""
    try:
        found = json.loads(text)
    except json.JSONDecodeError:
        found = None
    if not isinstance(found, dict) or not found.keys() <= set(names):
        raise ValueError("resolved_inputs is filled in by the run itself: remove it")
    return found


@dataclasses.dataclass(frozen=True)
class UpstreamRun:
    """A run that a setting refers to.

    Attributes:
        run: the name that the user gave.
        algo: its algorithm, with its settings and its environment's spec.
        settings: the algorithm's settings, by name.
    """

    run: str
    algo: "Algorithm"
    settings: dict[str, Any]

    def check(self, spec: EnvSpec) -> None:
        """Raise ValueError unless the run's policy could act in the environment."""
        own = self.algo.spec
        if own.name != spec.name:
            raise ValueError(
                f"{self.run} was trained on '{own.name}', not on '{spec.name}': use runs of one environment"
            )
        for what, size, wanted in (
            ("observations", own.observation.shape, spec.observation.shape),
            ("actions", own.action.shape, spec.action.shape),
        ):
            if size != wanted:
                raise ValueError(f"{self.run} has {what} of shape {size}, here they have {wanted}: use another run")
        for name, value in spec.compatible_settings.items():
            trained = own.compatible_settings[name]
            if trained != value:
                raise ValueError(
                    f"{self.run} was trained with {name} {trained}, here it is {value}: use the same value"
                )


@dataclasses.dataclass(frozen=True, eq=False)
class Custom:
    """User-defined networks and optimizers by part, such as "actor"; see `Algorithm.parts`.

    Attributes:
        networks: {part: flax module, or a function of the number of outputs that returns one}.
        optimizers: {part: optax chain that includes its learning rate; the one in the settings is then ignored}.
    """

    networks: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    optimizers: Mapping[str, optax.GradientTransformation] = dataclasses.field(default_factory=dict)


STANDARD = Custom()


@dataclasses.dataclass(frozen=True)
class Algorithm:
    """Base class of algorithms. Subclass it as a frozen dataclass; further fields are settings.

    Declare settings with `setting(default, "one line", between=(low, high))`: each becomes a command-line flag.
    `__post_init__` raises ValueError on impossible settings, in one sentence that says how to fix them.
    """

    spec: EnvSpec
    layout: DataParallel
    custom: Custom = STANDARD

    # Parts for which the user may supply a network or an optimizer.
    parts: ClassVar[tuple[str, ...]] = ()
    # Settings that must be equal, besides shapes, for weights to be compatible.
    compatible_settings: ClassVar[tuple[str, ...]] = ()
    recurrent: ClassVar[bool] = False  # acting needs a carry (see `init_carry`)
    modes: ClassVar[tuple[Mode, ...]] = ("greedy", "sample")  # available in evaluation
    # Settings (str) that name runs, comma-separated, or expert datasets; see `resolve_inputs` and `to_dataset`.
    sources: ClassVar[tuple[str, ...]] = ()
    recordings: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        check_settings(self)
        for what, given in (("networks", self.custom.networks), ("optimizers", self.custom.optimizers)):
            for name in given:
                if name not in self.parts:
                    known = f"choose from: {', '.join(self.parts)}" if self.parts else "this algorithm takes none"
                    raise ValueError(f"{what} has the unknown part {short_repr(name)}: {known}")

    @classmethod
    def default_num_envs(cls, spec: EnvSpec, settings: dict[str, Any]) -> int:
        """Return the number of environments if the user gives none."""
        del spec, settings
        return 64

    @classmethod
    def batch(cls, spec: EnvSpec, settings: dict[str, Any], num_envs: int) -> int:
        """Return the minibatch size, which the number of logical shards must divide, as it must `num_envs`."""
        del spec, settings
        return num_envs

    @classmethod
    def resolve_inputs(
        cls,
        spec: EnvSpec,
        settings: dict[str, Any],
        sources: dict[str, tuple[UpstreamRun, ...]],
        recordings: dict[str, dict[str, Any]],
    ) -> dict[str, Any]:
        """Return a new run's settings, with what it takes from the runs and datasets that they name.

        The command reads the files and calls this once. `weights` of each run's state, {setting: one per run, in the
        order of the returned setting}, and `to_dataset` of the datasets become the `inputs` of `init`.

        Args:
            spec: of the environment.
            settings: of the new run's algorithm.
            sources: the runs of each setting, in the user's order, none where the setting is empty.
            recordings: {setting: all its expert datasets concatenated, {name: array}}, without empty settings.

        Raises:
            ValueError: the runs are not compatible.
        """
        del spec, sources, recordings
        return settings

    def to_dataset(self, recording: dict[str, Any]) -> Any:
        """Return the arrays that `init` receives for a dataset, given as in `resolve_inputs`."""
        raise NotImplementedError("an algorithm with `recordings` needs to_dataset(recording)")

    def optimizer(self, name: str) -> optax.GradientTransformation:
        """Return the gradient transformation of the parameters `name`, such as "actor"; to override.

        Give it a learning rate of 1, as in `optax.sgd(1.0)`: updates are multiplied by the rate of the settings.
        """
        del name
        return optimizers.adam()

    def make_network(self, part: str, outputs: int, standard: Callable[[int], Any]) -> Any:
        """Return the flax module of a part: the user's, or `standard(outputs)`."""
        given = self.custom.networks.get(part, standard)
        return given(outputs) if isinstance(given, type) or not hasattr(given, "apply") else given

    def optimizer_of(self, part: str) -> optax.GradientTransformation:
        """Return the user's optimizer of a part, which includes its learning rate, or `optimizer(part)`."""
        given = self.custom.optimizers.get(part)
        return self.optimizer(part) if given is None else given

    def learning_rate_of(self, part: str, rate: Array | float) -> Array | float:
        """Return the learning rate of a part, 1 where the user's optimizer has its own."""
        return 1.0 if part in self.custom.optimizers else rate

    @property
    def phases(self) -> tuple[Phase, ...]:
        """Return the phases in order."""
        raise NotImplementedError("an algorithm needs a `phases` property")

    def summary(self) -> list[str]:
        """Return sentences for the user about batch sizes and updates, printed before training."""
        return []

    def largest_chunk(self) -> int:
        """Return the samples of one gradient on one logical shard; 0: `layout.learn_chunk` cannot split gradients."""
        return 0

    @property
    def storage_setting(self) -> str | None:
        """Return the setting that controls storage besides the trajectory, for advice; None if nothing is stored."""
        return None

    def sample_bytes(self) -> int:
        """Return the bytes needed per sample while a gradient is computed, for the memory plan."""
        return 0

    def data_bytes(self) -> int:
        """Return the bytes on one device that `learn` needs besides the trajectory, for the memory plan."""
        return 0

    def weights(self, state: AlgoState) -> Params:
        """Return the part of the state that `--init_from` transfers: the `inputs` of `init`."""
        return self.policy(state)

    def init(self, key: Key, inputs: Any) -> AlgoState:
        """Return a fresh state; `inputs` are pytrees from other runs, read by the command, None by default."""
        raise NotImplementedError("an algorithm needs init(key, inputs)")

    def policy(self, state: AlgoState) -> PolicyParams:
        """Return the pytree that acting, evaluation and export need."""
        raise NotImplementedError("an algorithm needs policy(state)")

    def init_carry(self, policy: PolicyParams, timestep: TimeStep, indices: Array) -> Any:
        """Return the policy's carry per environment (leaves [B, ...]), () by default; it is reset where `first`.

        `indices` int32[B] number the run's environments from 0 to num_envs - 1.
        """
        del policy, timestep, indices
        return ()

    def act(
        self, policy: PolicyParams, carry: Any, timestep: TimeStep, keys: Key, progress: Progress, mode: Mode
    ) -> tuple[Array, Any, Any]:
        """Return the actions of a batch.

        Args:
            policy: from `policy`.
            carry: from `init_carry` or the last `act`.
            timestep: leaves [B, ...].
            keys: key[B], one per environment.
            progress: counters, for exploration schedules.
            mode: "explore" in training; one of `modes` in evaluation ("greedy" takes the mode of the policy, "sample"
                samples from it, "zero_code" takes the mode with the task code set to zero).

        Returns:
            action [B, A, ...], carry, extras (pytree [B, ...], stored in the trajectory).
        """
        raise NotImplementedError("an algorithm needs act(policy, carry, timestep, keys, progress, mode)")

    def learn(
        self,
        state: AlgoState,
        trajectory: Trajectory | None,
        last_timestep: TimeStep | None,
        key: Key,
        progress: Progress,
        phase: Phase,
    ) -> tuple[AlgoState, dict[str, Array]]:
        """Update on the collected trajectory (None where `phase.steps` is 0).

        `key` is the same on every device; `layout.shard_keys(key)` gives one per logical shard.

        Returns:
            the new state and metrics, each float32[] or float32[updates]; all equal on every device.
        """
        raise NotImplementedError("an algorithm needs learn(...)")


def next_timesteps(trajectory: Trajectory, last_timestep: TimeStep) -> TimeStep:
    """Return the time steps [T, B, ...] that follow each row."""
    return jax.tree.map(
        lambda rows, last: jnp.concatenate([rows[1:], last[None].astype(rows.dtype)]),
        trajectory.timestep,
        last_timestep,
    )
