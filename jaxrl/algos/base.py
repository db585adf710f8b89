"""What an algorithm is: phases, state, progress counters, and the protocol that the one training loop calls.

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

from envs_jax.base import Array, EnvSpec, TimeStep, check_settings, pytree, setting, shown
from envs_jax.progress import Progress, add, count, start, total
from jaxrl.nn import optimizers
from jaxrl.runtime.data_parallel import DataParallel

__all__ = [
    "RATE",
    "UNIT",
    "AlgoState",
    "Algorithm",
    "Mode",
    "Phase",
    "Progress",
    "Source",
    "Trajectory",
    "add",
    "count",
    "setting",
    "start",
    "total",
]

UNIT = (0, 1)  # bounds of discounts, shares and probabilities
RATE = (1e-12, 10)  # bounds of learning rates (Adam)

# How a policy acts: as training does; without exploration; as best it can; the same with its task code set to zero.
Mode = Literal["explore", "sample", "greedy", "zero_code"]


@dataclasses.dataclass(frozen=True)
class Phase:
    """A stretch of training with one compiled block; most algorithms have one.

    Attributes:
        name: shown to the user and stored in checkpoints.
        steps: T, environment steps of every copy per iteration; 0 where the phase only learns.
        updates: gradient updates per call of `learn`.
        iterations: how many iterations the phase lasts, None for "until the run's total is reached".
        restart: every iteration begins with fresh episodes, so that no environment state outlives it.
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
        split: one row per logical shard (first axis): replay, data sets; () by default.
    """

    replicated: Any
    split: Any


@pytree
class Trajectory:
    """What one iteration collected, leaves [T, B, ...].

    Row t holds the time step that was seen, the action that answered it and what acting left in `extras`. The
    reward of that action stands in the time step of row t + 1 (for the last row in `last_timestep`). Where
    `timestep.done`, the action was ignored and the next row starts a new episode.
    """

    timestep: TimeStep
    action: Array
    extras: Any


def read_adopted(text: str, names: Iterable[str]) -> dict[str, Any]:
    """What an `adopt` wrote as JSON: a mapping of some of these names. Raises ValueError for anything else."""
    try:
        found = json.loads(text)
    except json.JSONDecodeError:
        found = None
    if not isinstance(found, dict) or not found.keys() <= set(names):
        raise ValueError("adopted is written by the run itself: leave it out, it follows from the runs that are named")
    return found


@dataclasses.dataclass(frozen=True)
class Source:
    """Another run that a setting names.

    Attributes:
        run: what the user called it.
        algo: its algorithm, with its settings and its environment's spec.
        settings: the algorithm's settings, by name.
    """

    run: str
    algo: "Algorithm"
    settings: dict[str, Any]

    def check(self, spec: EnvSpec) -> None:
        """Raises ValueError unless the run's policy could act in an environment."""
        own = self.algo.spec
        if own.name != spec.name:
            raise ValueError(
                f"{self.run} was trained on '{own.name}', not on '{spec.name}': take runs of one environment"
            )
        for what, size, wanted in (
            ("observations", own.observation.shape, spec.observation.shape),
            ("actions", own.action.shape, spec.action.shape),
        ):
            if size != wanted:
                raise ValueError(f"{self.run} has {what} of shape {size}, here they are {wanted}: take another run")
        for name, value in spec.compatible_settings.items():
            trained = own.compatible_settings[name]
            if trained != value:
                raise ValueError(f"{self.run} was trained with {name} {trained}, here it is {value}: make it the same")


@dataclasses.dataclass(frozen=True, eq=False)
class Custom:
    """Networks and optimizers of the user's own, by what they learn, such as "actor"; see `Algorithm.parts`.

    Attributes:
        networks: {part: flax module, or a function of the number of outputs that returns one}.
        optimizers: {part: optax chain with a learning rate of its own; that of the settings has no say then}.
    """

    networks: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    optimizers: Mapping[str, optax.GradientTransformation] = dataclasses.field(default_factory=dict)


STANDARD = Custom()


@dataclasses.dataclass(frozen=True)
class Algorithm:
    """Base class of algorithms. Subclass it as a frozen dataclass; further fields are settings.

    Declare settings with `setting(default, "one line", between=(low, high))`: each becomes a command-line flag.
    `__post_init__` raises ValueError, in one sentence that says how to mend it, on impossible settings.
    """

    spec: EnvSpec
    layout: DataParallel
    custom: Custom = STANDARD

    def __post_init__(self) -> None:
        check_settings(self)
        for what, given in (("networks", self.custom.networks), ("optimizers", self.custom.optimizers)):
            for name in given:
                if name not in self.parts:
                    known = f"choose from: {', '.join(self.parts)}" if self.parts else "this algorithm takes none"
                    raise ValueError(f"{what} names {shown(name)}: {known}")

    parts: ClassVar[tuple[str, ...]] = ()  # what the user may give a network or an optimizer for
    meaning: ClassVar[tuple[str, ...]] = ()  # settings that weights of fitting shapes must have been made with too
    recurrent: ClassVar[bool] = False  # whether acting needs what `init_carry` and earlier steps left
    modes: ClassVar[tuple[Mode, ...]] = ("greedy", "sample")  # in which evaluation may let it act
    sources: ClassVar[tuple[str, ...]] = ()  # settings (str) that name runs, with commas between, see `adopt`
    recordings: ClassVar[tuple[str, ...]] = ()  # settings (str) that name labelled sets, see `adopt` and `arrange`

    @classmethod
    def default_num_envs(cls, spec: EnvSpec, settings: dict[str, Any]) -> int:
        """Environments where the user names no number."""
        del spec, settings
        return 64

    @classmethod
    def batch(cls, spec: EnvSpec, settings: dict[str, Any], num_envs: int) -> int:
        """What the number of logical shards must divide, besides `num_envs`: the minibatch size."""
        del spec, settings
        return num_envs

    @classmethod
    def adopt(
        cls,
        spec: EnvSpec,
        settings: dict[str, Any],
        sources: dict[str, tuple[Source, ...]],
        recordings: dict[str, dict[str, Any]],
    ) -> dict[str, Any]:
        """What runs and recordings that settings name change in the settings of a new run, which then needs no look at
        them.

        The verb reads them and calls this once; what `weights` makes of each run's state, {setting: one for each run in
        the order of the setting that is returned}, and what `arrange` makes of the recordings that there are become the
        `inputs` of `init`.

        Args:
            spec: of the environment.
            settings: of the new run's algorithm.
            sources: the runs of each setting, in the user's order, none where it is empty.
            recordings: {setting: all its labelled sets as one, {name: array}}, without those that are empty.

        Raises:
            ValueError: a sentence, where the runs do not fit.
        """
        del spec, sources, recordings
        return settings

    def arrange(self, recording: dict[str, Any]) -> Any:
        """Arrays that `init` gets of a recording as of `adopt`."""
        raise NotImplementedError("an algorithm with `recordings` needs arrange(recording)")

    def optimizer(self, name: str) -> optax.GradientTransformation:
        """Return what turns gradients of the parameters `name`, such as "actor", into steps; to override.

        Give it a learning rate of 1, as in `optax.sgd(1.0)`: updates are multiplied by the rate of the settings.
        """
        del name
        return optimizers.adam()

    def make_network(self, part: str, outputs: int, standard: Callable[[int], Any]) -> Any:
        """Return the flax module of a part: the user's, or what `standard(outputs)` returns."""
        given = self.custom.networks.get(part, standard)
        return given(outputs) if isinstance(given, type) or not hasattr(given, "apply") else given

    def optimizer_of(self, part: str, packed: Any = None) -> optax.GradientTransformation:
        """Return the user's optimizer of a part, or `optimizer(part)`; `packed` is what `optimizers.ravel` took."""
        given = self.custom.optimizers.get(part)
        if given is None:
            return self.optimizer(part)
        return given if packed is None else optimizers.of_tree(given, packed)

    def rate_of(self, part: str, rate: Array | float) -> Array | float:
        """Return the learning rate of a part, 1 where the user's optimizer has its own."""
        return 1.0 if part in self.custom.optimizers else rate

    @property
    def phases(self) -> tuple[Phase, ...]:
        """In the order in which they run."""
        raise NotImplementedError("an algorithm needs a `phases` property")

    def summary(self) -> list[str]:
        """Sentences for the user about batch sizes and updates, printed before training."""
        return []

    def largest_chunk(self) -> int:
        """Samples of one gradient on one logical shard; 0: gradients cannot be cut by `layout.learn_chunk`."""
        return 0

    @property
    def store_setting(self) -> str | None:
        """The setting that says how much is stored beside the trajectory, for advice; None if nothing is."""
        return None

    def sample_bytes(self) -> int:
        """Bytes in flight per sample while a gradient is computed, for the memory plan."""
        return 0

    def data_bytes(self) -> int:
        """Bytes on one device that `learn` keeps beside the trajectory, for the memory plan."""
        return 0

    def weights(self, state: AlgoState) -> Any:
        """The part of the state that `--init_from` carries over: what `init` takes as `inputs`."""
        return self.policy(state)

    def init(self, key: Array, inputs: Any) -> AlgoState:
        """Fresh state; `inputs` are pytrees of other runs, read by the verb, None by default."""
        raise NotImplementedError("an algorithm needs init(key, inputs)")

    def policy(self, state: AlgoState) -> Any:
        """The pytree that acting, evaluation and export need."""
        raise NotImplementedError("an algorithm needs policy(state)")

    def init_carry(self, policy: Any, timestep: TimeStep, indices: Array) -> Any:
        """Memory of the policy per environment (leaves [B, ...]), () by default; refill it where `first`.

        `indices` int32[B] tells the run's environments from each other, from 0 to num_envs - 1.
        """
        del policy, timestep, indices
        return ()

    def act(
        self, policy: Any, actor: Any, timestep: TimeStep, keys: Array, progress: Progress, mode: Mode
    ) -> tuple[Array, Any, Any]:
        """Actions of a batch.

        Args:
            policy: what `policy` returned.
            actor: what `init_carry` or the last `act` returned.
            timestep: leaves [B, ...].
            keys: key[B], one per environment.
            progress: counters, for exploration schedules.
            mode: "explore" in training; one of `modes` in evaluation ("greedy" the mode of the policy, "sample" a draw
                from it, "zero_code" the mode where zeros take the place of a task code).

        Returns:
            action [B, A, ...], actor memory, extras (pytree [B, ...], stored in the trajectory).
        """
        raise NotImplementedError("an algorithm needs act(policy, actor, timestep, keys, progress, mode)")

    def learn(
        self,
        state: AlgoState,
        trajectory: Trajectory | None,
        last_timestep: TimeStep | None,
        key: Array,
        progress: Progress,
        phase: Phase,
    ) -> tuple[AlgoState, dict[str, Array]]:
        """Improve on what was collected (None where `phase.steps` is 0).

        `key` is the same on every device; `layout.shard_keys(key)` gives one per logical shard.

        Returns:
            the new state and metrics, each float32[] or float32[updates]; all equal on every device.
        """
        raise NotImplementedError("an algorithm needs learn(...)")


def successors(trajectory: Trajectory, last_timestep: TimeStep) -> TimeStep:
    """The time steps [T, B, ...] that follow each row."""
    return jax.tree.map(
        lambda rows, last: jnp.concatenate([rows[1:], last[None].astype(rows.dtype)]),
        trajectory.timestep,
        last_timestep,
    )
