"""Checks that step the environment: types, repetition, masks, values, episodes, single copy against batch."""

import collections
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from envs_jax.base import Array, Box, Discrete, Environment, EnvSpec, TimeStep
from envs_jax.batch import BatchedEnvironment, BatchState
from envs_jax.progress import start as progress_at_start
from envs_jax.testing.spec import ContractError
from envs_jax.testing.trees import WEAK, difference, is_box, named_leaves, program_text, structure, to_host, type_name

MOST_STEPS = 2000  # default limit


# Compiling takes longer than playing here, so optimisation is off. At level 0 jax 0.12 rounds once for
# a product and a sum in vectors and twice in single numbers: a single copy and a batch would differ.
_LEVEL = 0 if jax.__version_info__ < (0, 12) else 1
_jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": _LEVEL})


def _has_cuts(timestep: TimeStep) -> bool:
    return bool(jax.tree.leaves(timestep.cut))


class Check:
    """Checks of one environment. Programs are compiled once, on demand, since compiling dominates the cost."""

    def __init__(
        self,
        env: Environment,
        spec: EnvSpec,
        batch: BatchedEnvironment,
        tolerance: float,
        copies: int,
        weak: bool = False,
    ):
        self.env, self.spec, self.batch, self.tolerance, self.copies = env, spec, batch, tolerance, copies
        self.weak = weak  # weakly typed values are as good as others
        dtype = jax.dtypes.canonicalize_dtype(spec.action.dtype)
        self.action = jax.ShapeDtypeStruct((spec.num_agents, *spec.action.shape), dtype)
        self.traces: collections.Counter[str] = collections.Counter()

        def count_traces(name: str) -> Any:
            def call(*arguments: Any) -> Any:
                self.traces[name] += 1
                return getattr(env, name)(*arguments)

            return _jit(call)

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
        start = self.context_types()
        return _jit(self.env.context)(progress_at_start()) if jax.tree.leaves(start) else start

    def _trace(self, what: str, function: Callable[[], Any]) -> Any:
        try:
            return function()
        except (jax.errors.JAXTypeError, jax.errors.JAXIndexError, jax.errors.UnexpectedTracerError) as error:
            reason = str(error).strip().split("\n")[0].rstrip(".:")
            self.fail(
                f"{what} cannot be compiled ({type(error).__name__}: {reason}): replace Python's if, while, int() and "
                "NumPy on its arguments by jnp.where, jax.lax.cond and jnp",
                error,
            )

    def _same_types(self, what: str, one: Any, other_name: str, other: Any) -> None:
        """Check that `one` and `other` have the same structure, shapes and dtypes."""
        this_structure, other_structure = structure(one), structure(other)
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
                    "reset and step do not work without a context: use the context of the start of training for None",
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
        spec, agents = self.spec, self.spec.num_agents
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
        flag, number = Box((), jnp.bool_), Box(())
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

    def repeatable(self, key: Array, context: Any) -> None:
        """Check that equal arguments give equal results, also when traced again."""
        state, _ = self.reset.trace(key, context).out_info
        arguments = {"reset": (key, context), "step": (state, self.action, context)}
        again = {name: jax.jit(lambda *x, name=name: getattr(self.env, name)(*x)) for name in arguments}
        programs = ((getattr(self, n).trace(*x), again[n].trace(*x)) for n, x in arguments.items())
        if all(program_text(one) == program_text(other) for one, other in programs):
            return  # equal programs depend on nothing but the key and the action

        def both(key: Array) -> Any:
            state, first = self.env.reset(key, context)
            action, _ = self._choose(first, jax.random.fold_in(key, 1))
            after, second = self.env.step(state, action, context)
            return {"state after reset": state, "time step after reset": first, "state": after, "time step": second}

        different = difference(_jit(lambda key: both(key))(key), _jit(lambda key: both(key))(key), 0.0)
        if different:
            self.fail(
                f"the same key and action give different results in {different}: draw random numbers by jax.random "
                "from the key given to reset only, never from NumPy, Python or a global"
            )

    # Actions

    def _open(self, timestep: TimeStep) -> Array:
        shape = (self.spec.num_agents, self.spec.action.n)  # type: ignore[union-attr]
        return jnp.ones(shape, bool) if timestep.action_mask is None else timestep.action_mask

    def _choose(self, timestep: TimeStep, key: Array) -> tuple[Array, dict[str, Array]]:
        """Draw actions [A, ...] of one copy, agent after agent; return them with what `_check_masks` judges."""
        spec, agents = self.spec, self.spec.num_agents
        if isinstance(spec.action, Box):
            low, high = (bound.astype(np.float32) for bound in np.clip(spec.action.bounds, -1e3, 1e3))
            uniform = jax.random.uniform(key, (agents, *spec.action.shape), jnp.float32)
            return (low[None] + (high - low)[None] * uniform).astype(spec.action.dtype), {}
        n, open_ = spec.action.n, self._open(timestep)
        uniform = jax.random.uniform(key, (agents, n + agents), jnp.float32)  # one draw for all, to compile once
        index = jnp.arange(agents, dtype=jnp.int32)

        def choose_one(chosen: Array, agent: Array) -> tuple[Array, dict[str, Array]]:
            noise, garbage = uniform[agent, :n], (uniform[agent, n:] * n).astype(jnp.int32)
            mask = spec.next_mask(timestep.mask_state, open_, chosen, agent)
            ahead = jnp.where(index < agent, chosen, garbage)
            reads_ahead = jnp.any(mask != spec.next_mask(timestep.mask_state, open_, ahead, agent))
            action = jnp.argmax(jnp.where(mask, noise, -1.0)).astype(jnp.int32)
            choice = {"open": open_[agent], "mask": mask, "reads_ahead": reads_ahead, "closed": ~mask[action]}
            return jnp.where(index == agent, action, chosen), choice

        return jax.lax.scan(choose_one, jnp.zeros(agents, jnp.int32), index)

    def _check_masks(self, choices: dict[str, Any], when: str) -> None:
        """Check the masks [B, A, ...] from `_choose`."""
        self._refuse(
            (~choices["open"].any(-1), f"action_mask closes every action of agent <1> {when} (copy <0>): leave at "
             "least one action open in every time step, the last one included"),
            (~choices["mask"].any(-1), f"next_mask closes every action of agent <1> {when} (copy <0>): leave at least "
             "one action open, for example fall back to action_mask"),
            (choices["mask"] & ~choices["open"], f"next_mask opens action <2> of agent <1> that action_mask closes "
             f"{when} (copy <0>): combine it with action_mask by &"),
            (choices["reads_ahead"], f"next_mask of agent <1> depends on actions of itself or later agents {when} "
             "(copy <0>): use chosen[j] only for j < agent"),
            (choices["closed"], f"sampling agent after agent picks an action that next_mask closes {when}"),
        )  # fmt: skip

    def _critic(self, timestep: TimeStep, action: Array, key: Array) -> tuple[Array, Array]:
        """Return critic_input of one copy, and which agents' rows depend on their own action."""
        critic_input = self.spec.critic_input
        assert critic_input is not None
        rows = critic_input(timestep, action)
        if isinstance(self.spec.action, Discrete):
            other = (action + 1) % jnp.int32(self.spec.action.n)
        else:
            other, _ = self._choose(timestep, key)

        def depends(agent: Array) -> Array:
            is_agent = agents == agent
            changed = jnp.where(is_agent.reshape(-1, *(1,) * (action.ndim - 1)), other, action)
            return jnp.any(critic_input(timestep, changed)[agent] != rows[agent])

        agents = jnp.arange(self.spec.num_agents, dtype=jnp.int32)
        return rows, jax.vmap(depends)(agents)

    # Values

    def _check_floats(self, leaves: Any, bad: Callable[[Any], Any], what: str, when: str) -> None:
        """Check that `bad` holds for no float of (name, array) pairs."""
        for name, leaf in leaves:
            if jnp.issubdtype(leaf.dtype, jnp.floating) and np.any(bad(leaf.astype(np.float32))):
                self.fail(f"{name} {what} {when}: look for 0 / 0, log(0) or an overflow")

    def _check_bounds(self, field: str, boxes: Any, values: Any, when: str) -> None:
        for box, (path, leaf) in zip(jax.tree.leaves(boxes, is_leaf=is_box), named_leaves(values), strict=True):
            if leaf.dtype == jnp.bool_:
                continue
            low, high = box.bounds
            values = np.asarray(leaf).astype(np.float64).reshape(-1, *box.shape)
            slack = 1e-6 * np.maximum(1.0, np.where(np.isfinite(bound := np.maximum(abs(low), abs(high))), bound, 1.0))
            if (outside := (values < low - slack) | (values > high + slack)).any():
                _, *index = (int(i) for i in np.argwhere(outside)[0])
                place = ""
                if low.max() > low.min() or high.max() > high.min():  # bounds of each number
                    place, values = str(index), values[:, *index]
                least, most = low[tuple(index)], high[tuple(index)]
                self.fail(
                    f"{field}{path}{place} has values from {values.min():.6g} to {values.max():.6g} {when}, outside "
                    f"its Box of {least:.6g} to {most:.6g}: widen the Box or clip"
                )

    def _check_values(self, timestep: TimeStep, when: str) -> None:
        spec = self.spec
        leaves = ((path[1:], leaf) for path, leaf in named_leaves(timestep))
        self._check_floats(leaves, lambda x: ~np.isfinite(x), "is not finite", when)
        self._check_bounds("observation", spec.observation, timestep.observation, when)
        if spec.global_state is not None:
            self._check_bounds("global_state", spec.global_state, timestep.global_state, when)
        task = timestep.task if spec.num_tasks > 1 else np.int32(0)
        links = timestep.links if spec.links else np.full((1, 1, 1), -1)
        absent = ~timestep.present[..., None] if spec.absent_agents else np.bool_(False)
        cut_and_present = timestep.cut & timestep.present if _has_cuts(timestep) else np.bool_(False)
        for name in filter(spec.is_share, spec.metrics):
            values = timestep.metrics[name]
            declared = "reduced by 'any'" if spec.metrics[name] == "any" else "one of spec.shares"
            if (wrong := ~np.isin(values, (0.0, 1.0))).any():
                self.fail(f"metric '{name}' is {declared} but is {values[wrong][0]:.6g} {when}: make it 0 or 1")
        self._refuse(
            ((task < 0) | (task >= spec.num_tasks), f"task lies outside 0 to {spec.num_tasks - 1} {when}: set "
             "spec.num_tasks, or number from 0"),
            ((links < -1) | (links > spec.max_link_age), "links[<1>, <2>] (receiver, sender) lies outside -1 to "
             f"{spec.max_link_age} {when} (copy <0>): raise spec.max_link_age, or write -1 where no message arrives"),
            (links.diagonal(0, 1, 2) >= 0, f"links say that agent <1> hears itself {when} (copy <0>): write -1 on the "
             "diagonal"),
            ((links >= 0) & absent, f"links say that agent <1>, which is absent, hears agent <2> {when} (copy <0>): "
             "write -1 in its row"),
            (cut_and_present, f"agent <1> is cut and present {when} (copy <0>): an agent that is cut acts no more, "
             "leave it out of present"),
            (timestep.terminated & timestep.truncated, f"terminated and truncated are both true {when}: let truncated "
             "be limit & ~terminated"),
        )  # fmt: skip

    def _check_critic(self, rows: Any, depends: Any, when: str) -> None:
        """Check `critic_input` [B, A, ...], and that no agent's row depends on its own action, bool[B, A]."""
        self._check_floats([("critic_input", rows)], lambda x: ~np.isfinite(x), "is not finite", when)
        self._check_bounds("critic_input", self.spec.critic_input_spec, rows, when)
        self._refuse(
            (depends, f"critic_input of agent <1> depends on that agent's own action {when}: leave it out, the critic "
             "has one output for each own action"),
        )  # fmt: skip

    # Play

    def play(self, key: Array, context: Any, steps: int) -> tuple[Array, BatchState, TimeStep]:
        """Play a batch, and one of its copies by itself, through an episode and its restart; return keys and reset."""

        def row(tree: Any, index: Array) -> Any:
            return jax.tree.map(lambda x: x[index], tree)

        def start(key: Array) -> Any:
            keys = jax.random.split(key, self.copies)
            state, timestep = self.batch.reset(keys, context)
            return keys, state, timestep, jax.random.fold_in(keys[0], 0), row((state.env, timestep), jnp.int32(0))

        def advance(keys: Array, state: BatchState, timestep: TimeStep, step_index: Array, same_action: Array) -> Any:
            """Step all copies (`same_action`: with the first's action); return also the inputs of a single copy."""
            index = (step_index - 1) % self.copies
            step_keys = jax.vmap(jax.random.fold_in, in_axes=(0, None))(keys, step_index)
            action, choices = jax.vmap(self._choose)(timestep, step_keys)
            action = jnp.where(same_action, action[:1], action)
            critic = jax.vmap(self._critic)(timestep, action, step_keys) if self.spec.critic_input is not None else ()
            new_state, new_timestep = self.batch.step(state, timestep, action, context)
            root, episode = row((new_state.key, new_state.episode), index)
            single_inputs = jax.random.fold_in(root, episode), *row((state.env, action), index)
            return new_state, new_timestep, choices, critic, single_inputs, row((new_state.env, new_timestep), index)

        self.advance = _jit(advance)
        keys, state, timestep, reset_key, in_batch = _jit(start)(key)
        begin = keys, state, timestep
        host = to_host(timestep)
        self._check_first(host, "after reset")
        self._compare_single(in_batch, self.reset(reset_key, context), "after reset")
        age = np.zeros(self.copies, int)
        for step_index in range(1, steps + 1):
            when, ended = f"at step {step_index}", host.done
            state, timestep, choices, critic, single_inputs, in_batch = self.advance(
                keys, state, timestep, np.int32(step_index), np.bool_(False)
            )
            if choices:
                self._check_masks(to_host(choices), when)
            if critic:
                rows, depends = to_host(critic)
                self._check_critic(rows, depends, when)
            before, host, age = host, to_host(timestep), np.where(ended, 0, age + 1)
            self._check_values(host, when)
            self._check_course(host, before, age, when)
            self._check_floats(named_leaves(to_host(state.env)), np.isnan, "of the state is NaN", when)
            reset_key, single_state, single_action = single_inputs
            restarted = ended[(step_index - 1) % self.copies]
            pair = self.reset(reset_key, context) if restarted else self.step(single_state, single_action, context)
            self._compare_single(in_batch, pair, when)
        for name, count in self.traces.items():
            if count > 1:
                self.fail(
                    f"{name} is traced {count} times for arguments of the same types: give all fields fixed dtypes, "
                    "and read no global state"
                )
        return begin

    def _check_first(self, timestep: TimeStep, when: str) -> None:
        self._check_values(timestep, when)
        self._refuse(
            (~timestep.first, f"first is false {when}: reset must return first = True"),
            (timestep.done, f"the episode has ended {when} already: start where at least one step can be made"),
            (timestep.reward != 0, f"the reward is not 0 {when}: no action has been taken yet"),
            (
                _has_cuts(timestep) and timestep.cut,
                f"agent <1> is cut {when} (copy <0>): an episode begins without cuts",
            ),
        )
        self._check_link_ages(timestep, 0, when)

    def _check_course(self, timestep: TimeStep, before: TimeStep, age: Any, when: str) -> None:
        """Check `first`, cuts and episode lengths; `before`: one step before; `age` int[B], steps since a reset."""
        first, done, ended, horizon = timestep.first, timestep.done, before.done, self.spec.horizon
        self._refuse(
            (first & ~ended, f"first is true {when}, which is not the first of its episode: step must return first = "
             "False"),
        )  # fmt: skip
        if ended.any():
            rows = np.flatnonzero(ended)
            self._check_first(jax.tree.map(lambda x: x[rows], timestep), f"{when} (the restart)")
        if _has_cuts(timestep):
            self._refuse(
                (timestep.cut & ~before.present & ~ended[:, None], f"agent <1> is cut {when} (copy <0>), but was not "
                 "present before: cut only those that acted last"),
            )  # fmt: skip
        self._check_link_ages(timestep, age[:, None, None], when)
        self._refuse(
            (self.spec.fixed_horizon & done & (age < horizon), f"an episode ends after {age.max()} steps, but "
             f"fixed_horizon says that all have {horizon}: set fixed_horizon=False, or idle until the horizon"),
            (~done & (age >= horizon), f"an episode goes on after {horizon} steps, spec.horizon: count steps in the "
             "state and set truncated (or terminated) at the horizon"),
        )  # fmt: skip

    def _check_link_ages(self, timestep: TimeStep, age: Any, when: str) -> None:
        """Check that messages are from this episode, which began `age` steps ago."""
        if self.spec.links:
            self._refuse(
                (timestep.links > age, f"links say that agent <1> hears a message of agent <2> {when} (copy <0>) from "
                 "before the episode: write -1 until one of this episode arrives"),
            )  # fmt: skip

    def _compare_single(self, in_batch: Any, single: Any, when: str) -> None:
        """Compare one copy [no batch axis] from the batch with the same copy played by itself."""
        if structure(in_batch) != structure(single):
            self.fail("batched() has another state than the environment: use the same pytree, each leaf [B, ...]")
        a, b = ({"state": state, "time step": timestep} for state, timestep in (in_batch, single))
        different = difference(a, b, self.tolerance)
        if different:
            self.fail(
                f"a copy in a batch and the same copy by itself differ {when} in {different}: a copy must depend only "
                "on its key and its actions, and sums must not depend on the batch"
            )

    def baselines(self, keys: Array, state: BatchState, timestep: TimeStep) -> None:
        """Check that scripted policies give actions in the time step [B] of a reset."""
        spec = self.spec
        policies = {n: jax.vmap(functools.partial(policy, self.env)) for n, policy in self.env.baselines.items()}
        for name, policy in policies.items():
            act = functools.partial(jax.eval_shape, policy, state.env, timestep, keys)
            action = self._trace(f"baseline '{name}'", act)
            self._expect(f"baseline '{name}' returns", action, (self.copies, *self.action.shape), self.action.dtype)
        together = _jit(lambda *arguments: {name: act(*arguments) for name, act in policies.items()})  # one program
        box = Box((), low=0, high=spec.action.n - 1) if isinstance(spec.action, Discrete) else spec.action
        for name, action in together(state.env, timestep, keys).items():
            self._check_bounds(f"baseline '{name}'", box, action, "after reset")

    def randomness(self, keys: Array, state: BatchState, timestep: TimeStep) -> None:
        """Check that copies with different keys differ somewhere under the same actions from the reset on."""
        for step_index in range(1, min(self.spec.horizon, MOST_STEPS) + 2):
            if not all(np.all(leaf == leaf[:1]) for _, leaf in named_leaves(to_host(timestep))):
                return
            state, timestep, *_ = self.advance(keys, state, timestep, np.int32(step_index), np.bool_(True))
        self.fail(
            "copies with different keys never differ: draw from the key given to reset, or call check_env(..., "
            "random=False) if nothing is random here"
        )
