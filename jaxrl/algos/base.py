"""The algorithm interface: phases, state, progress counters, and the protocol that the training loop calls.

Layout letters: T time, B batch of environments, A agents, S logical shards. Everything here runs inside the
compiled block, once per device, on that device's environments; sums over devices go through `DataParallel`.
"""

import copy
import dataclasses
import functools
import inspect
import itertools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from envs_jax.base import Array, Discrete, EnvSpec, TimeStep, pytree
from envs_jax.progress import Progress
from envs_jax.settings import check_settings, short_repr, take_exactly
from envs_jax.settings import setting as setting  # for users
from jaxrl.common.types import Key, Params, PolicyParams
from jaxrl.nn import optimizers
from jaxrl.nn.networks import Network
from jaxrl.rl.data_parallel import DataParallel

if TYPE_CHECKING:  # slow to import, and the settings of an algorithm do without
    import optax

UNIT = (0, 1)  # bounds of discounts, shares and probabilities
RATE = (1e-12, 10)  # bounds of learning rates (Adam)

# Action selection: "explore" as in training; in evaluation "greedy", "sample", or others of `Algorithm.modes`.
Mode: TypeAlias = str


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


@dataclasses.dataclass(frozen=True)
class Stage:
    """Equal steps within `learn`, such as the minibatches of an epoch; the trainer may run a few of them at a time.

    Attributes:
        name: what a step does, for the user, such as "critic".
        epoch: the epoch that it belongs to.
        steps: the number of steps.
    """

    name: str
    epoch: int
    steps: int


@pytree
class Learning:
    """What `learn` works on between two of its steps, see `Algorithm.learn_stages`.

    Attributes:
        data: what the steps only read; one row per logical shard (first axis).
        sharded: what they change, with one row per logical shard.
        replicated: what they change and what is the same on every device.
    """

    data: Any
    sharded: Any
    replicated: Any


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
class Learner:
    """Learned parameters and the state of their optimizer; see `Algorithm.step`.

    Attributes:
        params: a network's parameters, as flax has them, or any pytree.
        opt_state: the state of the optax chain.
    """

    params: Any
    opt_state: Any


@pytree
class Trajectory:
    """The data of one iteration, leaves [T, B, ...].

    Row t holds the time step observed, the action taken on it and the `extras` of acting. The reward of that
    action is in the time step of row t + 1 (for the last row in `last_timestep`). Where
    `timestep.done`, the action was ignored and the next row starts a new episode. `carry` is the policy's before row 0,
    leaves [1, B, ...], where the algorithm has `stores_carry`.
    """

    timestep: TimeStep
    action: Array
    extras: Any
    carry: Any = ()


@dataclasses.dataclass(frozen=True, eq=False)
class Custom:
    """User-defined networks and optimizers by part, such as "actor"; see `Algorithm.parts`.

    Attributes:
        networks: {part: flax module, or a function of the number of outputs that returns one}.
        optimizers: {part: optax chain that includes its learning rate; the one in the settings is then ignored}.
    """

    networks: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    optimizers: "Mapping[str, optax.GradientTransformation]" = dataclasses.field(default_factory=dict)


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
    # Inherited settings that cannot be changed, and their values.
    fixed_settings: ClassVar[Mapping[str, Any]] = {}
    # Values of the settings that may not suit an environment in which the policy only acts, such as a batch size.
    acting_settings: ClassVar[Mapping[str, Any]] = {}
    # Settings that a sweep may vary: arrays float32[] while training, never numbers to branch on in Python.
    sweepable: ClassVar[tuple[str, ...]] = ()
    # The setting that controls the storage in `AlgoState.sharded`, for advice where it does not fit; "" without any.
    storage_setting: ClassVar[str] = ""
    stores_carry: ClassVar[bool] = False  # `learn` reads `Trajectory.carry`
    weighs_agents: ClassVar[bool] = False  # learning gives no weight to agents that are not `TimeStep.present`
    modes: ClassVar[tuple[Mode, ...]] = ("greedy", "sample")  # available in evaluation

    def __post_init__(self) -> None:
        take_exactly(self)
        check_settings(self)
        only_acts = all(getattr(self, name) == value for name, value in self.acting_settings.items())
        for name, value in self.fixed_settings.items():
            if (given := getattr(self, name)) != value and not (only_acts and name in self.acting_settings):
                raise ValueError(f"{name} is always {value} in {type(self).__name__}, not {given}: give {value}")
        if self.spec.absent_agents and not self.weighs_agents:
            raise ValueError(
                f"{type(self).__name__.lower()} cannot train with absent agents, which '{self.spec.name}' may have: "
                "use coma or ppo, or a team that is always complete (teams of pettingzoo: --complete_team true)"
            )
        for kind, by_part in (("networks", self.custom.networks), ("optimizers", self.custom.optimizers)):
            for name in by_part:
                if name not in self.parts:
                    choices = f"choose from: {', '.join(self.parts)}" if self.parts else "this algorithm takes none"
                    raise ValueError(f"{kind} has the unknown part {short_repr(name)}: {choices}")

    def with_sweep_values(self, settings: Mapping[str, Array]) -> Self:
        """Return the algorithm with swept settings float32[] by name; their values are not checked."""
        return self._with_values(settings)

    def with_chunks(self, learn: int, forward: int) -> Self:
        """Return the algorithm with these chunks of its `layout`, in samples."""
        return self._with_values({"layout": dataclasses.replace(self.layout, learn_chunk=learn, forward_chunk=forward)})

    def _with_values(self, values: Mapping[str, Any]) -> Self:
        """Return a copy with these fields, which are not checked."""
        if not values:
            return self
        algo = copy.copy(self)
        for name in list(vars(algo)):  # what was computed from the former values
            if isinstance(getattr(type(algo), name, None), functools.cached_property):
                del vars(algo)[name]
        vars(algo).update(values)
        return algo

    @classmethod
    def default_num_envs(cls, spec: EnvSpec, settings: dict[str, Any]) -> int:
        """Return the number of environments that is used unless the user sets it."""
        del spec, settings
        return 64

    @classmethod
    def batch(cls, spec: EnvSpec, settings: dict[str, Any], num_envs: int) -> int:
        """Return the minibatch size. The number of logical shards must divide it, and `num_envs`."""
        del spec, settings
        return num_envs

    # Learned parts

    def make_network(
        self, part: str, outputs: int, standard: Callable[[int], Any], *inputs: tuple[int, ...], leading: int = 1
    ) -> Network:
        """Return the network of a part: the user's flax module, or `standard(outputs)`.

        Args:
            part: such as "actor".
            outputs: how many numbers the network returns for each sample.
            standard: outputs -> the flax module that is used if the user gives none.
            inputs: shapes of a call's arguments, with a batch axis.
            leading: axes of the inputs that the outputs have too.

        Raises:
            ValueError: a user-defined network returns something else.
        """
        module_or_factory = self.custom.networks.get(part, standard)
        is_module = hasattr(module_or_factory, "apply") and not isinstance(module_or_factory, type)
        network = Network(module_or_factory if is_module else module_or_factory(outputs), inputs)
        if part in self.custom.networks:
            _check_network(part, network, (*inputs[0][:leading], outputs))
        return network

    @property
    def respects_masks(self) -> bool:
        """Whether `act` takes only actions that `TimeStep.action_mask` allows; override it if not."""
        return isinstance(self.spec.action, Discrete)

    @property
    def recurrent(self) -> bool:
        """Whether acting needs a carry, see `init_carry`."""
        return False

    @property
    def networks(self) -> dict[str, Network]:
        """Networks by part, such as "actor"."""
        return {}

    def fresh_networks(self, key: Key, inputs: Any) -> dict[str, Params]:
        """Return the networks' parameters by part, those in `inputs` if there are any."""
        if inputs is not None:
            return {name: inputs[name] for name in self.networks}
        keys = jax.random.split(key, len(self.networks))
        return {name: network.init(k) for (name, network), k in zip(self.networks.items(), keys, strict=True)}

    def optimizer(self, part: str) -> "optax.GradientTransformation":
        """Return the gradient transformation of a part, such as "actor"; to override.

        The default is Adam, with clipping where a setting `max_grad_norm` asks for it. Give it a learning rate of 1, as
        in `optax.sgd(1.0)`: `step` multiplies its updates by `learning_rate`. (A chain that the user passes as
        `optimizers=` includes its learning rate instead.)
        """
        del part
        return optimizers.adam(max_grad_norm=getattr(self, "max_grad_norm", 0.0))

    def learning_rate(self, part: str, progress: Progress) -> Array | float:
        """Return the learning rate of a part, float32[]; to override.

        The default is the part's setting, such as `actor_lr`, which falls linearly over the run to the share that a
        setting `final_lr_fraction` gives.
        """
        if not hasattr(self, f"{part}_lr"):
            raise NotImplementedError(
                f"an algorithm that calls step('{part}', ...) needs learning_rate(part, progress)"
            )
        fraction = 1 - (1 - getattr(self, "final_lr_fraction", 1.0)) * progress.fraction
        return jnp.float32(getattr(self, f"{part}_lr")) * fraction

    def learner(self, part: str, params: Params) -> Learner:
        """Return parameters with a fresh optimizer state."""
        return Learner(params, self.chain(part).init(params))

    def step(
        self, part: str, learner: Learner, gradient: Params, progress: Progress, active: Array | None = None
    ) -> tuple[Learner, Array]:
        """Take an optimizer step, none where `active` bool[] is False. Return the gradient's norm float32[] too."""
        rate = 1.0 if part in self.custom.optimizers else self.learning_rate(part, progress)
        with jax.numpy_dtype_promotion("standard"):  # optax mixes Python floats with int32 counters
            change, opt_state = self.chain(part).update(gradient, learner.opt_state, learner.params)
        new = Learner(jax.tree.map(lambda p, d: p + rate * d, learner.params, change), opt_state)
        if active is not None:
            new = jax.tree.map(lambda new, old: jnp.where(active, new, old), new, learner)
        return new, optimizers.norm(gradient)

    def chain(self, part: str) -> "optax.GradientTransformation":
        """Return the user's optimizer of a part, or else the one of `optimizer`."""
        return self.custom.optimizers.get(part) or self.optimizer(part)

    @property
    def one_program(self) -> bool:
        """Whether one program can run all phases, each of which is the last one or a half of it.

        Such a half has only its steps or only its updates. `learn` must give the same in two calls: with the trajectory
        and no updates; then without a trajectory, with a progress that counts the steps.
        """
        return False

    @property
    def phases(self) -> tuple[Phase, ...]:
        """Phases of training, in order."""
        raise NotImplementedError("an algorithm needs a `phases` property")

    def schedules(self, progress: Progress) -> dict[str, Array]:
        """Return what depends only on progress, such as an exploration rate, for the metrics: float32[] by name."""
        del progress
        return {}

    def summary(self) -> list[str]:
        """Return sentences for the user about batch sizes and updates, printed before training."""
        return []

    def warnings(self, total_env_steps: int) -> list[str]:
        """Return sentences about settings that have no effect, or a bad one, in a run of this length."""
        return []

    @property
    def gradient_samples(self) -> int:
        """Samples of a gradient on one logical shard, 0 where `layout.learn_chunk` must not split them."""
        return 0

    def weights(self, state: AlgoState) -> Params:
        """Return what `--init_from` passes to `init`: by default the networks, or the policy where there are none."""
        return {name: getattr(state.replicated, name).params for name in self.networks} or self.policy(state)

    def init(self, key: Key, inputs: Any) -> AlgoState:
        """Return a fresh state; `inputs` are pytrees from other runs, read by the command, None by default."""
        raise NotImplementedError("an algorithm needs init(key, inputs)")

    def policy(self, state: AlgoState) -> PolicyParams:
        """Return the pytree that acting, evaluation and export need, by default the network "actor"."""
        if "actor" not in self.networks:
            raise NotImplementedError("an algorithm needs policy(state)")
        return state.replicated.actor.params

    def init_carry(self, policy_params: PolicyParams, timestep: TimeStep, indices: Array) -> Any:
        """Return the policy's carry per environment (leaves [B, ...]), () by default; `act` resets it where `first`.

        `indices` int32[B] number the run's environments from 0 to num_envs - 1. `act` may be called once on the empty
        time step before the first one, which is what `timestep` may be.
        """
        del policy_params, timestep, indices
        return ()

    def act(
        self, policy_params: PolicyParams, carry: Any, timestep: TimeStep, keys: Key, progress: Progress, mode: Mode
    ) -> tuple[Array, Any, Any]:
        """Return the actions of a batch.

        Args:
            policy_params: from `policy`.
            carry: from `init_carry` or the last `act`.
            timestep: leaves [B, ...].
            keys: key[B], one per environment.
            progress: counters, for exploration schedules.
            mode: "explore" in training; one of `modes` in evaluation ("greedy" takes the mode of the policy, "sample"
                samples from it).

        Returns:
            action [B, A, ...], carry, extras (pytree [B, ...], stored in the trajectory).
        """
        raise NotImplementedError("an algorithm needs act(policy_params, carry, timestep, keys, progress, mode)")

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

        `key` is the same on every device, and `layout.shard_keys(key)` gives one per logical shard. By default the
        stages of `learn_stages` run.

        Returns:
            the new state and metrics, each float32[] or float32[updates]; all equal on every device.
        """
        if not self.learn_stages:
            raise NotImplementedError("an algorithm needs learn(...), or learn_stages")
        assert trajectory is not None and last_timestep is not None
        learning = self.begin_learning(state, trajectory, last_timestep, key, progress)
        epochs = [tuple(stages) for _, stages in itertools.groupby(self.learn_stages, lambda stage: stage.epoch)]
        for _, group in itertools.groupby(epochs, lambda stages: [(stage.name, stage.steps) for stage in stages]):
            same = list(group)  # epochs of the same stages run in one loop

            def run_epoch(epoch: Array, learning: Learning, stages: Any = same[0]) -> Learning:
                for stage in stages:
                    stop = jnp.int32(stage.steps)
                    learning = self.run_steps(learning, stage.name, epoch, jnp.int32(0), stop, progress)
                return learning

            begin = same[0][0].epoch
            end = same[-1][0].epoch + 1
            learning = jax.lax.fori_loop(np.int32(begin), np.int32(end), run_epoch, learning)
        return self.end_learning(learning)

    # Learning in steps, for algorithms whose `learn` may take long

    @property
    def learn_stages(self) -> tuple[Stage, ...]:
        """Stages of `learn` in order; () where the algorithm defines `learn` itself."""
        return ()

    def begin_learning(
        self, state: AlgoState, trajectory: Trajectory, last_timestep: TimeStep, key: Key, progress: Progress
    ) -> Learning:
        """Return what the steps work on, from the arguments of `learn`."""
        raise NotImplementedError("an algorithm with stages needs begin_learning(...)")

    def learn_step(self, learning: Learning, stage: str, epoch: Array, index: Array, progress: Progress) -> Learning:
        """Run step `index` int32[] of a stage in epoch int32[]; `learning.data` is not changed."""
        raise NotImplementedError("an algorithm with stages needs learn_step(...)")

    def end_learning(self, learning: Learning) -> tuple[AlgoState, dict[str, Array]]:
        """Return the new state and metrics, as `learn` does."""
        raise NotImplementedError("an algorithm with stages needs end_learning(...)")

    def run_steps(
        self, learning: Learning, stage: str, epoch: Array, start: Array, stop: Array, progress: Progress
    ) -> Learning:
        """Run the steps `start` to `stop` - 1 of a stage."""

        def step(index: Array, changing: tuple[Any, Any]) -> tuple[Any, Any]:
            after = self.learn_step(Learning(learning.data, *changing), stage, epoch, index, progress)
            return after.sharded, after.replicated

        changing = jax.lax.fori_loop(start, stop, step, (learning.sharded, learning.replicated))
        return Learning(learning.data, *changing)


def is_used(value: Array | float) -> bool:
    """Return False for a setting that is the number 0, whose term is then left out of the program."""
    return isinstance(value, Array) or value != 0


def append_last(rows: Array, last: Array) -> Array:
    """Append a last row [...] of any dtype to rows [T, ...]; the result [T + 1, ...] has the dtype of the rows."""
    return jnp.concatenate([rows, last[None].astype(rows.dtype)])


def next_timesteps(trajectory: Trajectory, last_timestep: TimeStep) -> TimeStep:
    """Return the time steps [T, B, ...] that follow each row."""
    return jax.tree.map(lambda rows, last: append_last(rows[1:], last), trajectory.timestep, last_timestep)


def _check_network(part: str, network: Network, expected_shape: tuple[int, ...]) -> None:
    """Raise ValueError unless a user-defined network is a flax module that returns float32 of the expected shape."""
    module = network.module
    num_inputs = len(network.inputs)
    if not hasattr(module, "init"):
        raise ValueError(f"networks: '{part}' must be a flax.linen module, not {type(module).__name__}")
    try:
        inspect.signature(module.__call__).bind(*[None] * num_inputs)
    except TypeError as error:
        raise ValueError(
            f"networks: '{part}' is called with {num_inputs} array{'s' if num_inputs > 1 else ''} and no carry, which "
            f"{type(module).__name__} does not take ({error}): recurrent networks need an algorithm of your own, with "
            "init_carry"
        ) from None
    output = jax.eval_shape(
        lambda key: network.apply(network.init(key), *(jnp.zeros(shape, jnp.float32) for shape in network.inputs)),
        jax.random.key(0),
    )
    if not isinstance(output, jax.ShapeDtypeStruct) or (output.shape, output.dtype) != (expected_shape, jnp.float32):
        shape = getattr(output, "shape", None)
        description = f"{output.dtype}{list(output.shape)}" if shape else type(output).__name__
        raise ValueError(
            f"networks: '{part}' must return float32{list(expected_shape)} for inputs {list(network.inputs[0])}, not "
            f"{description}"
        )
