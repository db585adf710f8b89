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
        name, env = type(self.algo).__name__, type(self.env).__name__
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
            observation: [A, ...] or [B, A, ...] as `env.spec.observation` says; or a whole TimeStep, batched or not,
                which holds masks and everything else.
            action_mask: [A, n] or [B, A, n] of bool or of integers 0 and 1, the allowed actions; needed where the
                environment has masks, unless the policy ignores them (`Algorithm.respects_masks`).
            carry: what the last call returned; None at the first step.
            key: with a key (or keys key[B]) actions are sampled; without one the policy is greedy.
            first: bool[] or bool[B], episodes that begin with this step: a recurrent policy resets its carry.

        Returns:
            actions [A, ...] or [B, A, ...], and the carry.

        Raises:
            ValueError: the process was forked after JAX ran; shapes do not fit; observations are NaN (outside of
                tracing); `key` is no JAX key, or JAX is told to draw other numbers; the carry is not what the last
                call returned; masks or `first` are passed together with a TimeStep, which has its own; or the mask is
                missing, holds other numbers, closes all actions of an agent, is ignored by the policy, is unknown to
                the environment, or can only be part of a TimeStep.
        """
        self._check_process()
        timestep, single = self._timestep(observation, action_mask, first)
        size = len(timestep.terminated)
        if not size:
            return self._act_on_nothing(timestep)
        if carry is None:
            carry = self.algo.init_carry(self.params, timestep, jnp.arange(size, dtype=jnp.int32))
        else:
            self._check_carry(carry, size)
        if key is None:
            keys, mode = jax.random.split(jax.random.key(0), size), "greedy"
        else:
            check_key(key)
            if key.shape not in ((), (size,)):
                raise ValueError(f"key must be one key, or {size} for as many observations, not of shape {key.shape}")
            keys, mode = key if key.ndim else jax.random.split(key, size), "sample"
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
        """Return ShapeDtypeStructs of a batch of one."""
        env = batched(self.env)
        context = jax.eval_shape(env.context, jax.eval_shape(start))
        return jax.eval_shape(env.reset, jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 1)), context)[1]

    @functools.cached_property
    def _blank_carry(self) -> Any:
        return jax.eval_shape(self.algo.init_carry, self.params, self._blank, jax.ShapeDtypeStruct((1,), jnp.int32))

    def _check_carry(self, carry: Any, size: int) -> None:
        """Raise ValueError for a carry of another structure, or of another batch."""
        blank = self._blank_carry
        structures: list[Any] = [jax.tree.structure(carry), jax.tree.structure(blank)]
        shapes = [(size, *x.shape[1:]) for x in jax.tree.leaves(blank)]
        if structures[0] != structures[1] or [jnp.shape(x) for x in jax.tree.leaves(carry)] != shapes:
            raise ValueError(
                f"carry must be what the last call returned for {size} observations, and None at the first step, not "
                f"{short_repr(carry)}"
            )

    def _timestep(self, observation: Any, mask: Array | None, first: Any) -> tuple[TimeStep, bool]:
        """Return a time step [B] from the caller's arrays, and whether they are of a single environment."""
        timestep = observation if isinstance(observation, TimeStep) else None
        observations = observation if timestep is None else timestep.observation
        try:
            arrays = [jnp.asarray(x) for x in jax.tree.leaves(observations)]
        except TypeError as error:
            raise ValueError(f"observations of '{self.env.spec.name}' are arrays of numbers: {error}") from None
        shapes = [x.shape[1:] for x in jax.tree.leaves(self._blank.observation)]
        single = [x.shape for x in arrays] == shapes
        if not single and [x.shape[1:] for x in arrays] != shapes:
            raise ValueError(
                f"observations of '{self.env.spec.name}' have the shapes {shapes} (agents first), with or without a "
                f"batch axis before them, not {[x.shape for x in arrays]}"
            )
        if any(_is_nan(x) for x in arrays):
            raise ValueError(f"observations of '{self.env.spec.name}' hold NaN: find out which step made them")
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
        structure = jax.tree.structure(self._blank.observation)
        return dataclasses.replace(
            blank,
            observation=jax.tree.unflatten(structure, [x[None] if single else x for x in arrays]),
            action_mask=mask[None] if single and mask is not None else mask,
            first=jnp.broadcast_to(jnp.asarray(first, bool), (size,)),
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


def _is_nan(x: Array) -> bool:
    """Return whether an array is known to hold a NaN."""
    known = not isinstance(x, jax.core.Tracer) and jnp.issubdtype(x.dtype, jnp.inexact)
    return known and bool(np.isnan(np.asarray(x)).any())
