"""A trained policy for the user's own loops: observations in, actions out."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from envs_jax.base import Array, Discrete, Environment, TimeStep, independent_mask, short_repr
from envs_jax.batch import batched
from envs_jax.forks import check_process
from envs_jax.progress import final_progress, start
from jaxrl.algos.base import Algorithm, Custom, Mode
from jaxrl.common.types import check_key
from jaxrl.runtime.config import Config
from jaxrl.runtime.observations import Leaf, describe_leaves, list_arrays

_STATIC = {"static": True}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Policy:
    """A policy with its parameters. A pytree: its leaves are `params`; all else is static.

    Attributes:
        env: the environment that it was trained in.
        algo: the algorithm that trained it.
        params: pytree of arrays needed for acting.
        step: number of the checkpoint it was read from, None if there is none.
        config: of the run, None where there is none.
    """

    env: Environment = dataclasses.field(metadata=_STATIC)
    algo: Algorithm = dataclasses.field(metadata=_STATIC)
    params: Any
    step: int | None = dataclasses.field(default=None, metadata=_STATIC)
    config: Config | None = dataclasses.field(default=None, metadata=_STATIC)

    def __post_init__(self) -> None:
        self._check_process()  # for the sake of processes that are forked from this one

    def __repr__(self) -> str:
        name = type(self.algo).__name__
        env = type(self.env).__name__
        return f"Policy({name} in {env}{'' if self.step is None else f', checkpoint {self.step}'})"

    def _check_process(self) -> None:
        check_process("a policy", "multiprocessing.get_context('spawn').Pool(...)")

    def __call__(
        self,
        observation: Any,
        *,
        action_mask: Array | None = None,
        carry: Any = None,
        key: Array | None = None,
        first: Array | bool = False,
    ) -> tuple[Array, Any]:
        """Return actions and the carry for the next step.

        Args:
            observation: [A, ...] or [B, A, ...] as `env.spec.observation` says, arrays or nested lists; or a whole
                TimeStep, batched or not, which holds masks and everything else.
            action_mask: [A, n] or [B, A, n] of bool or of integers 0 and 1, the allowed actions; needed where the
                environment has masks, unless the policy ignores them (`Algorithm.respects_masks`).
            carry: what the last call returned; None at the first step.
            key: with a key (or keys key[B]) actions are sampled; without one the policy is greedy.
            first: bool[] or bool[B], episodes that begin with this step: a recurrent policy resets its carry.

        Returns:
            actions [A, ...] or [B, A, ...] as `env.spec.action` says: numbers in the units of the environment. Where
            that is one integer for several of another package, `env.to_package_action` makes these of it.
            And the carry.

        Raises:
            ValueError: the process was forked after JAX ran; shapes do not fit; observations are no real numbers or
                (outside of tracing) not finite or, but for those of a TimeStep, far out of their box; `key` is no JAX
                key, or JAX is told to draw other numbers; the carry is not what the last call returned, or not finite;
                `first` holds other numbers than 0 and 1; masks or `first` are passed together with a TimeStep, which
                has its own; or the mask is missing, holds other numbers, closes all actions of an agent, is ignored by
                the policy, is unknown to the environment, or can only be part of a TimeStep.
        """
        self._check_process()
        timestep, single = self._timestep(observation, action_mask, first)
        size = len(timestep.terminated)
        if not size:
            return self._act_on_nothing(timestep)
        if carry is None:
            carry = self.algo.init_carry(self.params, timestep, jnp.arange(size, dtype=jnp.int32))
        else:
            self._check_carry(carry, size, timestep.first)
        if key is None:
            keys = jax.random.split(jax.random.key(0), size)
            mode = "greedy"
        else:
            check_key(key)
            if key.shape not in ((), (size,)):
                raise ValueError(
                    f"key must be one key, or {size} keys, one for each observation, not of shape {key.shape}"
                )
            keys = key if key.ndim else jax.random.split(key, size)
            mode = "sample"
        action, carry = _act(self.algo, self.params, carry, timestep, keys, mode)
        if action_mask is not None:
            self._check_open(action, timestep.action_mask)
        return (action[0] if single else action), carry

    def _act_on_nothing(self, timestep: TimeStep) -> tuple[Array, Any]:
        """Return the actions and the carry of an empty batch, on which some networks fail."""

        def act(timestep: TimeStep) -> tuple[Array, Any]:
            carry = self.algo.init_carry(self.params, timestep, jnp.zeros(1, jnp.int32))
            return _act(self.algo, self.params, carry, timestep, jax.random.split(jax.random.key(0), 1), "greedy")

        one = jax.tree.map(lambda x: jax.ShapeDtypeStruct((1, *x.shape[1:]), x.dtype), timestep)
        return jax.tree.map(lambda x: jnp.zeros((0, *x.shape[1:]), x.dtype), jax.eval_shape(act, one))

    def __getstate__(self) -> dict[str, Any]:
        """Return what is pickled: NumPy arrays, which can be read without JAX, and no optimizers."""
        state = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        state["params"] = jax.tree.map(np.asarray, self.params)
        if self.algo.custom.optimizers:
            state["algo"] = dataclasses.replace(self.algo, custom=Custom(self.algo.custom.networks))
        return state

    @functools.cached_property
    def _blank(self) -> TimeStep:
        """ShapeDtypeStructs of a batch of one."""
        env = batched(self.env)
        context = jax.eval_shape(env.context, jax.eval_shape(start))
        return jax.eval_shape(env.reset, jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 1)), context)[1]

    @functools.cached_property
    def _leaves(self) -> list[Leaf]:
        return describe_leaves(self.env.spec)

    @functools.cached_property
    def _blank_carry(self) -> Any:
        return jax.eval_shape(self.algo.init_carry, self.params, self._blank, jax.ShapeDtypeStruct((1,), jnp.int32))

    def _check_carry(self, carry: Any, size: int, first: Array) -> None:
        """Raise ValueError for a carry of another structure, batch or kind of numbers, or not finite where used."""
        blank = self._blank_carry
        structures: list[Any] = [jax.tree.structure(carry), jax.tree.structure(blank)]
        leaves = jax.tree.leaves(carry)
        blanks = jax.tree.leaves(blank)
        shapes = [(size, *x.shape[1:]) for x in blanks]
        if (
            structures[0] != structures[1]
            or [jnp.shape(x) for x in leaves] != shapes
            or not all(map(_are_of_one_kind, leaves, blanks))
        ):
            raise ValueError(
                f"carry must be what the last call returned for {size} observations, and None at the first step, not "
                f"{short_repr(carry)}"
            )
        if isinstance(first, jax.core.Tracer) or np.asarray(first).all():
            return
        if not all(_are_finite(x, ~np.asarray(first)) for x in leaves):
            raise ValueError(
                "carry holds NaN or infinity: give what the last call returned, or None, or first=True where an "
                "episode begins"
            )

    def _timestep(self, observation: Any, mask: Array | None, first: Any) -> tuple[TimeStep, bool]:
        """Return a time step [B] from the caller's arrays, and whether they are of a single environment."""
        timestep = observation if isinstance(observation, TimeStep) else None
        observations = observation if timestep is None else timestep.observation
        leaves = list_arrays(observations, self.env.spec) if timestep is None else jax.tree.leaves(observations)
        boxes = self._leaves if len(leaves) == len(self._leaves) else [self._leaves[0]] * len(leaves)
        arrays = [box.take(x) for box, x in zip(boxes, leaves, strict=True)]
        shapes = [x.shape[1:] for x in jax.tree.leaves(self._blank.observation)]
        single = [x.shape for x in arrays] == shapes
        if not single and [x.shape[1:] for x in arrays] != shapes:
            raise ValueError(
                f"observations of '{self.env.spec.name}' have the shapes {shapes} (agents first), with or without a "
                f"batch axis before them, not {short_repr([x.shape for x in arrays])}"
            )
        for box, array in zip(boxes, arrays, strict=True):
            box.check(array, in_box=timestep is None)  # `check_env` has checked those of the environment
        batch = () if single else (len(arrays[0]),)
        if timestep is not None:
            if mask is not None or first is not False:
                raise ValueError("a time step has its own masks and `first`: leave action_mask and first out")
            if self.algo.respects_masks:
                timestep = dataclasses.replace(timestep, action_mask=self._mask(timestep.action_mask, batch))
            return (jax.tree.map(lambda x: x[None], timestep) if single else timestep), single
        if self.algo.respects_masks and self.env.spec.next_mask is not independent_mask:
            raise ValueError(
                f"the action masks of '{self.env.spec.name}' depend on other agents' actions: pass the whole "
                "time step instead of the observation"
            )
        spec = self.env.spec
        if (spec.links or spec.absent_agents) and getattr(self.algo, "passes_messages", False):
            raise ValueError(
                f"agents of '{spec.name}' send each other messages, and this policy needs to know who hears whom: pass "
                "the whole time step instead of the observation"
            )
        if mask is not None and self._blank.action_mask is None:
            raise ValueError(f"'{self.env.spec.name}' with these settings has no action masks: leave action_mask out")
        if mask is not None and not self.algo.respects_masks:
            raise ValueError(
                f"this policy of {type(self.algo).__name__.lower()} ignores action masks, as in its training (masking "
                "false): leave action_mask out, or train one with masking true"
            )
        mask = self._mask(mask, batch)
        size = 1 if single else len(arrays[0])
        blank = jax.tree.map(lambda x: jnp.zeros((size, *x.shape[1:]), x.dtype), self._blank)
        arrays = [box.cast(x) for box, x in zip(boxes, arrays, strict=True)]
        structure = jax.tree.structure(self._blank.observation)
        return dataclasses.replace(
            blank,
            observation=jax.tree.unflatten(structure, [x[None] if single else x for x in arrays]),
            action_mask=mask[None] if single and mask is not None else mask,
            first=jnp.broadcast_to(_flags(first, size), (size,)),
        ), single

    def _mask(self, values: Any, batch: tuple[int, ...]) -> Array | None:
        """Return the caller's mask as bool[*batch, A, n], None where none is needed. Raises ValueError."""
        spec = self.env.spec
        if not isinstance(spec.action, Discrete):
            return None
        shape = (*batch, spec.num_agents, spec.action.n)
        if values is None:
            if self._blank.action_mask is None or not self.algo.respects_masks:
                return None
            raise ValueError(
                f"'{spec.name}' closes actions, the policy needs to know which: give action_mask, bool{list(shape)}, "
                "true where an action is open (`timestep.action_mask`), or pass the whole time step"
            )
        mask = values if isinstance(values, jax.Array) else np.asarray(values)
        if mask.dtype != np.bool_ and not np.issubdtype(mask.dtype, np.integer):
            raise ValueError(f"action_mask must be of bool or of integers 0 and 1 (open), not of {mask.dtype}")
        if mask.shape != shape:
            raise ValueError(f"action_mask must have the shape {shape}, as the observation has, not {mask.shape}")
        if not isinstance(mask, jax.core.Tracer):  # values are known
            numbers = np.asarray(mask)
            if not np.isin(numbers, (0, 1)).all():
                raise ValueError("action_mask must hold 1 where an action is open and 0 elsewhere, not other numbers")
            if not numbers.any(-1).all():
                raise ValueError("action_mask closes every action of an agent: leave at least one open")
        return jnp.asarray(mask).astype(jnp.bool_)

    def _check_open(self, action: Array, mask: Array) -> None:
        """Raise ValueError for an action that the caller's mask closes, because a user's algorithm may ignore masks."""
        if isinstance(action, jax.core.Tracer):
            return
        if not np.take_along_axis(np.asarray(mask), np.asarray(action)[..., None], -1).all():
            raise ValueError(
                f"{type(self.algo).__name__} chose an action that action_mask closes: its `act` must choose among the "
                "actions that are open, or its `respects_masks` be False"
            )


@functools.partial(jax.jit, static_argnames=("algo", "mode"))
def _act(algo: Algorithm, params: Any, carry: Any, timestep: TimeStep, keys: Array, mode: Mode) -> tuple[Array, Any]:
    return algo.act(params, carry, timestep, keys, final_progress(), mode)[:2]


def _flags(first: Any, size: int) -> Array:
    """Return `first` as bool[], or bool[size]. Raises ValueError."""
    flags = first if isinstance(first, jax.Array) else np.asarray(first)
    is_known = not isinstance(flags, jax.core.Tracer)
    if (
        flags.shape not in ((), (size,))
        or flags.dtype.kind not in "biu"
        or (is_known and not np.isin(np.asarray(flags), (0, 1)).all())
    ):
        raise ValueError(
            f"first must be True, False or bool[{size}], one for each observation, not {short_repr(first)}"
        )
    return jnp.asarray(flags, bool)


def _are_of_one_kind(x: Any, other: Any) -> bool:
    """Return whether two arrays are both of floats, both of integers, or of equal dtypes."""
    kinds = (jnp.floating, jnp.integer)
    return bool(x.dtype == other.dtype) or any(
        jnp.issubdtype(x.dtype, kind) and jnp.issubdtype(other.dtype, kind) for kind in kinds
    )


def _are_finite(x: Array, rows: np.ndarray) -> bool:
    """Return whether the numbers of an array in these rows are finite, as far as they are known."""
    is_known = not isinstance(x, jax.core.Tracer) and jnp.issubdtype(x.dtype, jnp.floating)
    return not is_known or bool(np.isfinite(np.asarray(x)[rows]).all())
