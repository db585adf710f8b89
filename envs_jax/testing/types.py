"""The check of types: what `reset`, `step`, `context` and the functions of the spec take and return."""

import collections
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from envs_jax.base import Array, Box, Discrete, Environment, EnvSpec, TimeStep
from envs_jax.batch import BatchedEnvironment
from envs_jax.places import find_place
from envs_jax.progress import start as progress_at_start
from envs_jax.testing.spec import ContractError
from envs_jax.testing.trees import WEAK, is_box, named_leaves, structure, type_name

# Compiling takes longer than playing here, so optimisation is off. At level 0 jax 0.12 rounds once for
# a product and a sum in vectors and twice in single numbers: a single copy and a batch would differ.
_LEVEL = 0 if jax.__version_info__ < (0, 12) else 1
jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": _LEVEL})


class TypeCheck:
    """Types of one environment. Programs are compiled once, on demand, since compiling dominates the cost."""

    def __init__(
        self,
        env: Environment,
        spec: EnvSpec,
        batch: BatchedEnvironment,
        tolerance: float,
        copies: int,
        weak: bool = False,
    ):
        self.env = env
        self.spec = spec
        self.batch = batch
        self.tolerance = tolerance
        self.copies = copies
        self.weak = weak  # weakly typed values are as good as others
        dtype = jax.dtypes.canonicalize_dtype(spec.action.dtype)
        self.action = jax.ShapeDtypeStruct((spec.num_agents, *spec.action.shape), dtype)
        self.traces: collections.Counter[str] = collections.Counter()

        def count_traces(name: str) -> Any:
            def call(*arguments: Any) -> Any:
                self.traces[name] += 1
                return getattr(env, name)(*arguments)

            return jit(call)

        self.reset, self.step = count_traces("reset"), count_traces("step")

    def fail(self, sentence: str, cause: BaseException | None = None) -> NoReturn:
        raise ContractError(f"{self.spec.name}: {sentence}") from cause

    def _refuse(self, *rules: tuple[Any, str]) -> None:
        """Fail with the sentence of the first rule that is broken anywhere; <0>, <1>, ... in it are its place."""
        for broken, sentence in rules:
            if np.any(broken):
                for axis, index in enumerate(np.argwhere(broken)[0]):
                    sentence = sentence.replace(f"<{axis}>", str(index))
                self.fail(sentence)

    def context_types(self) -> Any:
        """Return the types of the context, checked to be the same in a second call."""
        progress = jax.eval_shape(progress_at_start)
        start, again = (
            self._trace("context", lambda: jax.eval_shape(lambda p: self.env.context(p), progress)) for _ in range(2)
        )
        self._same_types("context of a second call", again, "the first call's", start)
        return start

    def context(self) -> Any:
        """Return the context at the start of training."""
        start = jax.eval_shape(self.env.context, jax.eval_shape(progress_at_start))
        return jit(self.env.context)(progress_at_start()) if jax.tree.leaves(start) else start

    def _trace(self, what: str, function: Callable[[], Any]) -> Any:
        try:
            return function()
        except (jax.errors.JAXTypeError, jax.errors.JAXIndexError, jax.errors.UnexpectedTracerError) as error:
            reason = str(error).strip().split("\n")[0].rstrip(".:")
            place = f"{where}: " if (where := find_place(error)) else ""
            self.fail(
                f"{what} cannot be compiled ({place}{type(error).__name__}: {reason}): replace Python's if, while, "
                "int() and NumPy on its arguments by jnp.where, jax.lax.cond and jnp",
                error,
            )

    def _same_types(self, what: str, one: Any, other_name: str, other: Any) -> None:
        """Check that `one` and `other` have the same structure, shapes and dtypes."""
        this_structure = structure(one)
        other_structure = structure(other)
        if this_structure != other_structure:
            self.fail(
                f"the {what} has another structure than {other_name} ({this_structure} and {other_structure}): return "
                "the same pytree everywhere, so that jax.lax.scan can carry it"
            )
        for (path, a), b in zip(named_leaves(one), jax.tree.leaves(other), strict=True):
            names = type_name(a), type_name(b)
            if len({name.removesuffix(WEAK) if self.weak else name for name in names}) > 1:
                self.fail(
                    f"{path or 'it'} of the {what} is {names[0]}, but {other_name} {names[1]}: make them "
                    "equal, for example by .astype or jnp.int32(0) instead of 0, so that jax.lax.scan can carry them"
                )

    def _expect(self, what: str, value: Any, shape: tuple[int, ...], dtype: Any) -> None:
        expected = type_name(jax.ShapeDtypeStruct(shape, jax.dtypes.canonicalize_dtype(dtype)))
        if type_name(value).removesuffix(WEAK) != expected:
            self.fail(f"{what} {type_name(value)}, expected {expected}: reshape or cast it")

    def types(self, key: Array, context: Any) -> None:
        spec = self.spec
        for name, arguments in (("reset", ("key",)), ("step", ("state", "action"))):
            try:
                signature = inspect.signature(getattr(self.env, name))
                signature.bind(*arguments)
                signature.bind(*arguments, "context")
            except TypeError:
                names = ", ".join(arguments)
                self.fail(
                    f"{name} must take ({names}) and ({names}, context): define {name}(self, {names}, context=None)"
                )
        state, first = self._check_returned("reset", key, context)
        next_state, timestep = self._check_returned("step", state, self.action, context)
        self._same_types("state that step returns", next_state, "after reset", state)
        self._same_types("time step that step returns", timestep, "after reset", first)
        if jax.tree.leaves(context):  # a schedule that reset and step read
            try:
                jax.eval_shape(lambda *x: (self.env.reset(x[0]), self.env.step(*x[1:])), key, state, self.action)
            except (TypeError, ValueError, AttributeError, KeyError) as error:
                self.fail(
                    "reset and step fail where context is None: treat None as the context at the start of training",
                    error,
                )
        if isinstance(spec.action, Discrete):
            agent = jax.ShapeDtypeStruct((), jnp.int32)
            mask = self._trace(
                "next_mask",
                lambda: jax.eval_shape(
                    lambda step, *x: spec.next_mask(step.mask_state, self._open(step), *x), first, self.action, agent
                ),
            )
            self._expect("next_mask returns", mask, (spec.action.n,), jnp.bool_)
        if (critic := spec.critic_input) and (box := spec.critic_input_spec):
            rows = self._trace("critic_input", lambda: jax.eval_shape(critic, first, self.action))
            self._expect("critic_input returns", rows, (spec.num_agents, *box.shape), box.dtype)
        if (turn := spec.egocentric) and isinstance(spec.action, Discrete):
            for box in (box for box in (spec.observation, spec.critic_input_spec) if isinstance(box, Box)):
                turn_it = functools.partial(jax.eval_shape, turn, jax.ShapeDtypeStruct(box.shape, box.dtype))
                pair = self._trace("egocentric", turn_it)
                if not (isinstance(pair, tuple) and len(pair) == 2):
                    self.fail(f"egocentric returns {type(pair).__name__}: it must return the pair (view, actions)")
                self._expect("egocentric returns as actions", pair[1], (spec.action.n,), jnp.int32)

    def _check_returned(self, what: str, *arguments: Any) -> tuple[Any, TimeStep]:
        """Return the types of what reset or step returns, checked against the spec."""
        spec = self.spec
        agents = self.spec.num_agents
        pair = self._trace(what, lambda: getattr(self, what).trace(*arguments).out_info)
        if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[1], TimeStep)):
            self.fail(f"{what} returns {type(pair).__name__}: it must return the pair (state, TimeStep)")
        timestep = pair[1]
        names = timestep.metrics if isinstance(timestep.metrics, Mapping) else ()
        self._refuse(
            (
                spec.global_state is None and bool(jax.tree.leaves(timestep.global_state)),
                f"{what} returns a global_state that spec does not describe: add spec.global_state, or return ()",
            ),
            (
                isinstance(spec.action, Box) and timestep.action_mask is not None,
                f"{what} returns an action_mask for continuous actions: return None",
            ),
            (
                not spec.absent_agents and bool(jax.tree.leaves(timestep.cut)),
                f"{what} returns cut, but spec.absent_agents is false: set it, or leave cut out",
            ),
            (
                spec.num_tasks == 1 and bool(jax.tree.leaves(timestep.task)),
                f"{what} returns a task, but spec.num_tasks is 1: set it, or leave task out",
            ),
            (
                set(names) != set(spec.metrics),
                f"{what} returns the metrics {sorted(names)}, spec.metrics names {sorted(spec.metrics)}: return a dict "
                "with exactly these names",
            ),
        )
        flag = Box((), jnp.bool_)
        number = Box(())
        expected: dict[str, tuple[Any, tuple[int, ...]]] = {
            "observation": (spec.observation, (agents,)),
            "global_state": (() if spec.global_state is None else spec.global_state, ()),
            "reward": (number, (agents,)),
            **dict.fromkeys(("terminated", "truncated", "first"), (flag, ())),
            "task": (Box((), jnp.int32) if spec.num_tasks > 1 else (), ()),
            "present": (flag if spec.absent_agents else (), (agents,)),
            "cut": (flag if jax.tree.leaves(timestep.cut) else (), (agents,)),
            "links": (Box((), jnp.int32) if spec.links else (), (agents, agents)),
            "metrics": (dict.fromkeys(spec.metrics, number), ()),
        }
        if isinstance(spec.action, Discrete) and timestep.action_mask is not None:
            expected["action_mask"] = Box((spec.action.n,), jnp.bool_), (agents,)
        for field, (boxes, lead) in expected.items():
            values = getattr(timestep, field)
            if structure(boxes) != structure(values):
                self.fail(
                    f"{what} returns {field} of structure {structure(values)}, spec describes {structure(boxes)}: make "
                    "them the same pytree"
                )
            for box, (path, value) in zip(jax.tree.leaves(boxes, is_leaf=is_box), named_leaves(values), strict=True):
                self._expect(f"{what} returns {field}{path} as", value, (*lead, *box.shape), box.dtype)
        return pair

    def _open(self, timestep: TimeStep) -> Array:
        shape = (self.spec.num_agents, self.spec.action.n)  # type: ignore[union-attr]
        return jnp.ones(shape, bool) if timestep.action_mask is None else timestep.action_mask
