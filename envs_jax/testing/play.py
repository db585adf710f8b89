"""Checks that step the environment: repetition, masks, values, episodes, single copy against batch."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from envs_jax.base import Array, Box, Discrete, TimeStep
from envs_jax.batch import BatchedEnvironment, BatchState
from envs_jax.testing.trees import difference, is_box, named_leaves, program_text, structure, to_host
from envs_jax.testing.types import TypeCheck, jit

MOST_STEPS = 2000  # default limit


def _has_cuts(timestep: TimeStep) -> bool:
    return bool(jax.tree.leaves(timestep.cut))


class Check(TypeCheck):
    """All checks of one environment."""

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

        different = difference(jit(lambda key: both(key))(key), jit(lambda key: both(key))(key), 0.0)
        if different:
            self.fail(
                f"the same key and action give different results in {different}: draw random numbers by jax.random "
                "from the key given to reset only, never from NumPy, Python or a global"
            )

    # Actions

    def _choose(self, timestep: TimeStep, key: Array) -> tuple[Array, dict[str, Array]]:
        """Draw actions [A, ...] of one copy, agent after agent; return them with what `_check_masks` judges."""
        spec = self.spec
        agents = self.spec.num_agents
        if isinstance(spec.action, Box):
            low, high = (bound.astype(np.float32) for bound in np.clip(spec.action.bounds, -1e3, 1e3))
            uniform = jax.random.uniform(key, (agents, *spec.action.shape), jnp.float32)
            return (low[None] + (high - low)[None] * uniform).astype(spec.action.dtype), {}
        n = spec.action.n
        open_ = self._open(timestep)
        uniform = jax.random.uniform(key, (agents, n + agents), jnp.float32)  # one draw for all, to compile once
        index = jnp.arange(agents, dtype=jnp.int32)

        def choose_one(chosen: Array, agent: Array) -> tuple[Array, dict[str, Array]]:
            noise = uniform[agent, :n]
            garbage = (uniform[agent, n:] * n).astype(jnp.int32)
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
            (~choices["open"].any(-1), f"action_mask closes every action of agent <1> {when} (environment <0>): "
             "leave at least one action open in every time step, the last one included"),
            (~choices["mask"].any(-1), f"next_mask closes every action of agent <1> {when} (environment <0>): leave "
             "at least one action open, for example fall back to action_mask"),
            (choices["mask"] & ~choices["open"], f"next_mask opens action <2> of agent <1> that action_mask closes "
             f"{when} (environment <0>): combine it with action_mask by &"),
            (choices["reads_ahead"], f"next_mask of agent <1> depends on actions of itself or later agents {when} "
             "(environment <0>): use chosen[j] only for j < agent"),
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
                    place = str(index)
                    values = values[:, *index]
                least = low[tuple(index)]
                most = high[tuple(index)]
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
             f"{spec.max_link_age} {when} (environment <0>): raise spec.max_link_age, or write -1 where no message "
             "arrives"),
            (links.diagonal(0, 1, 2) >= 0, f"links say that agent <1> hears itself {when} (environment <0>): write "
             "-1 on the diagonal"),
            ((links >= 0) & absent, f"links say that agent <1>, which is absent, hears agent <2> {when} (environment "
             "<0>): write -1 in its row"),
            (cut_and_present, f"agent <1> is cut and present {when} (environment <0>): an agent that is cut acts no "
             "more, leave it out of present"),
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

        def row(tree: Any, index: Array | int) -> Any:
            return jax.tree.map(lambda x: x[index], tree)

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

        @jit
        def draw_keys(key: Array) -> tuple[Array, Array]:
            """Return the root of each copy, and the key of the first one's first episode."""
            keys = jax.random.split(key, self.copies)
            return keys, jax.random.fold_in(keys[0], 0)

        self.advance = jit(advance)
        keys, reset_key = draw_keys(key)
        single = self.reset(reset_key, context)
        state, timestep = self._start(keys, context, single)
        begin = keys, state, timestep
        host = to_host(timestep)
        self._check_first(host, "after reset")
        self._compare_single(row(to_host((state.env, timestep)), 0), single, "after reset")
        age = np.zeros(self.copies, int)
        for step_index in range(1, steps + 1):
            when = f"at step {step_index}"
            ended = host.done
            state, timestep, choices, critic, single_inputs, in_batch = self.advance(
                keys, state, timestep, np.int32(step_index), np.bool_(False)
            )
            if choices:
                self._check_masks(to_host(choices), when)
            if critic:
                rows, depends = to_host(critic)
                self._check_critic(rows, depends, when)
            before = host
            host = to_host(timestep)
            age = np.where(ended, 0, age + 1)
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

    def _start(self, keys: Array, context: Any, single: Any) -> tuple[BatchState, TimeStep]:
        """Start all copies; `single` is the state and time step of one copy that starts by itself.

        A batch that inherits `reset` and `step` does the same in both: then the program of a step starts copies of the
        single one anew, as if their episodes had ended, and no program is compiled for the reset.
        """
        cls = type(self.batch)
        inherits = cls.reset is BatchedEnvironment.reset and cls.step is BatchedEnvironment.step
        if not inherits or structure(jax.eval_shape(self.batch.reset, keys, context)[0].env) != structure(single[0]):
            return jit(self.batch.reset)(keys, context)

        @jit
        def ended(keys: Array, single: Any) -> Any:
            """Return the state and time step [B] after which episode 0 follows."""
            env, timestep = jax.tree.map(lambda x: jnp.broadcast_to(x, (self.copies, *x.shape)), single)
            before = BatchState(env=env, key=keys, episode=jnp.full(keys.shape, -1, jnp.int32).astype(jnp.uint32))
            return before, dataclasses.replace(timestep, terminated=jnp.ones_like(timestep.terminated))

        state, timestep, *_ = self.advance(keys, *ended(keys, single), np.int32(0), np.bool_(False))
        return state, timestep

    def _check_first(self, timestep: TimeStep, when: str) -> None:
        self._check_values(timestep, when)
        self._refuse(
            (~timestep.first, f"first is false {when}: reset must return first = True"),
            (timestep.done, f"the episode has ended {when} already: start where at least one step can be made"),
            (timestep.reward != 0, f"the reward is not 0 {when}: no action has been taken yet"),
            (
                _has_cuts(timestep) and timestep.cut,
                f"agent <1> is cut {when} (environment <0>): an episode begins without cuts",
            ),
        )
        self._check_link_ages(timestep, 0, when)

    def _check_course(self, timestep: TimeStep, before: TimeStep, age: Any, when: str) -> None:
        """Check `first`, cuts and episode lengths; `before`: one step before; `age` int[B], steps since a reset."""
        first = timestep.first
        done = timestep.done
        ended = before.done
        horizon = self.spec.horizon
        self._refuse(
            (first & ~ended, f"first is true {when}, which is not the first of its episode: step must return first = "
             "False"),
        )  # fmt: skip
        if ended.any():
            rows = np.flatnonzero(ended)
            self._check_first(jax.tree.map(lambda x: x[rows], timestep), f"{when} (the restart)")
        if _has_cuts(timestep):
            self._refuse(
                (timestep.cut & ~before.present & ~ended[:, None], f"agent <1> is cut {when} (environment <0>), but "
                 "was not present before: cut only those that acted last"),
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
                (timestep.links > age, f"links say that agent <1> hears a message of agent <2> {when} (environment "
                 "<0>) from before the episode: write -1 until one of this episode arrives"),
            )  # fmt: skip

    def _compare_single(self, in_batch: Any, single: Any, when: str) -> None:
        """Compare one copy [no batch axis] from the batch with the same copy played by itself."""
        if structure(in_batch) != structure(single):
            self.fail("batched() has another state than the environment: use the same pytree, each leaf [B, ...]")
        a, b = ({"state": state, "time step": timestep} for state, timestep in (in_batch, single))
        different = difference(a, b, self.tolerance)
        if different:
            self.fail(
                f"an environment gives other values in a batch than by itself {when} in {different}: it must depend "
                "only on its key and its actions, and sums must not depend on the batch"
            )

    def baselines(self, keys: Array, state: BatchState, timestep: TimeStep) -> None:
        """Check that scripted policies give actions in the time step [B] of a reset."""
        spec = self.spec
        policies = {n: jax.vmap(functools.partial(policy, self.env)) for n, policy in self.env.baselines.items()}
        for name, policy in policies.items():
            act = functools.partial(jax.eval_shape, policy, state.env, timestep, keys)
            action = self._trace(f"baseline '{name}'", act)
            self._expect(f"baseline '{name}' returns", action, (self.copies, *self.action.shape), self.action.dtype)
        together = jit(lambda *arguments: {name: act(*arguments) for name, act in policies.items()})  # one program
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
            "environments with different keys never differ: draw from the key given to reset, or call check_env(..., "
            "random=False) if nothing is random here"
        )
