"""Reach as an environment: settings, the order of a step, observation and reward."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from envs_jax.base import Array, Box, EnvSpec, TimeStep, with_default
from envs_jax.batch import BatchedEnvironment, BatchLast, BatchState, batch_first, constant, for_keys
from envs_jax.reach import baselines, constants, dynamics, goals, observation, reward, tasks
from envs_jax.reach.types import PARTS, TARGET_UNIT, ReachConfig, State
from envs_jax.stages import runs_triton

_SCALE = 0.01  # m the target moves per unit of action


def _units(metres: Any) -> np.ndarray:
    """Convert lengths in m to int32[...] in TARGET_UNIT."""
    return np.round(np.asarray(metres, np.float64) / TARGET_UNIT).astype(np.int32)


def _move_target(target: Array, part: Array, action: Array) -> tuple[Array, Array]:
    """Return the next `State.mocap_target` and its part, int32[3, ...], for an action float32[3, ...] in [-1, 1].

    Meta-World adds 0.01 * action, rounded to float32, in float64. In whole numbers the sum has no rounding error, on
    any device and however the compiler orders or fuses operations. The part of a unit keeps every bit of actions
    above 0.0062; smaller ones are rounded by 4e-12 m at most, 500 of them by 2e-9 m.
    """
    moved = jnp.round(action * jnp.float32(_SCALE / TARGET_UNIT * PARTS)).astype(jnp.int32)  # below 2^31
    part = part + moved % PARTS  # 0 to PARTS - 1 for both signs
    target = target + moved // PARTS + part // PARTS
    part = part % PARTS
    low, high = (constant(_units(constants.data()[f"mocap_{end}"]), target.shape[1:]) for end in ("low", "high"))
    inside = (target >= low) & (target < high)  # at a bound there is no part
    return jnp.clip(target, low, high), jnp.where(inside, part, 0)


def _move_arm(q: Array, v: Array, *arrays: Array) -> tuple[Array, Array, dynamics.Pose]:
    """`dynamics.control_step` and the pose after it; one kernel where the device runs it."""
    if runs_triton():
        from envs_jax.reach import kernel  # its import takes a while

        return kernel.control_step(q, v, *arrays)
    q, v = dynamics.control_step(q, v, *arrays)
    return q, v, dynamics.pose(q)


@dataclasses.dataclass(frozen=True)
class Reach(ReachConfig):
    """A Sawyer arm brings its tool centre to a point; the package names the source, `ReachConfig` the settings."""

    name = "reach"
    version = 1
    baselines = baselines.BASELINES

    @functools.cached_property
    def spec(self) -> EnvSpec:
        return EnvSpec(
            name=self.name,
            num_agents=1,
            observation=Box((observation.SIZE,)),
            action=Box((4,), jnp.float32, low=-1.0, high=1.0),
            horizon=self.horizon,
            fixed_horizon=True,
            metrics={"success": "any", "success_at_end": "last", "distance": "last"},
            shares=("success_at_end",),
            labels={"success_at_end": "success at the end", "distance": "distance of the tool centre, m"},
            score="success",
            tie_breakers=("success_at_end", "return"),
            num_tasks=len(self.tasks),
            task_names=tuple(task.name for task in self.tasks),
            compatible_settings={
                "weld": self.weld,
                "reward": "v2" if self.reward == "sparse" else self.reward,  # its policies may guide sparse ones
                "partially_observable": self.partially_observable,
            },
        )

    # Environment: one arm, or many in the last axis

    def reset(self, key: Array, context: Any = None) -> tuple[State, TimeStep]:
        return self.begin(*for_keys(self._draw, key))

    def step(self, state: State, action: Array, context: Any = None) -> tuple[State, TimeStep]:
        return self.advance(state, action)

    def batched(self) -> BatchedEnvironment:
        return ReachBatch(self)

    def viewer(self) -> Any:
        from envs_jax.reach.viewer import ReachViewer

        return ReachViewer()

    # Parts, for one arm or many in the last axis

    def _draw(self, key: Array) -> tuple[Array, Array, Array]:
        """Draw puck and goal float32[3], and the index of the task, int32[]."""
        key_goal, key_task = jax.random.split(key)
        drawn = goals.fresh(key_goal) if self.goals == "uniform" else goals.from_pool(key, self.pool_seed)
        return drawn[:3], drawn[3:], jax.random.randint(key_task, (), 0, len(self.tasks), jnp.int32)

    def begin(self, puck: Array, goal: Array, task: Array) -> tuple[State, TimeStep]:
        """Start an episode with puck and goal float32[3, ...] and a task int32[...]."""
        start = constants.reset(self.weld)
        batch = puck.shape[1:]

        def broadcast(values: Any, dtype: Any = jnp.float32) -> Array:
            return jnp.broadcast_to(constant(values, batch, dtype), (len(values), *batch))

        def select_task(values: Any) -> Array:
            return jnp.moveaxis(jnp.asarray(values, jnp.float32)[task], -1, 0)

        anchor = select_task([[float(one.anchor == "puck")] for one in self.tasks]) > 0
        tool_goal = select_task([one.scale for one in self.tasks]) * jnp.where(anchor, puck, goal)
        t = jnp.zeros(batch, jnp.int32)
        q = broadcast(start.q)
        pose = dynamics.pose(q)
        state = State(
            t=t,
            task=task,
            puck=puck,
            goal=goal,
            tool_goal=tool_goal + select_task([one.offset for one in self.tasks]),
            required_opening=select_task([one.required_opening for one in self.tasks]),
            mocap_target=broadcast(_units(start.target), jnp.int32),
            mocap_target_part=jnp.zeros_like(puck, jnp.int32),
            q=q,
            v=broadcast(start.v),
            frame=observation.frame(pose, puck, t, start),
        )
        return state, self.show(state, state.frame, pose)

    def advance(self, state: State, action: Array) -> tuple[State, TimeStep]:
        """Step one control period with actions float32[1, 4, ...]."""
        command = jnp.clip(action[0], -1.0, 1.0)
        target, part = _move_target(state.mocap_target, state.mocap_target_part, command[:3])
        place = target.astype(jnp.float32) * jnp.float32(TARGET_UNIT)
        torque_scale = jnp.float32(constants.torque_scale(self.weld))
        q, v, pose = _move_arm(state.q, state.v, place, command[3], torque_scale)
        t = state.t + 1
        frame = observation.frame(pose, state.puck, t, constants.reset(self.weld))
        after = dataclasses.replace(state, t=t, mocap_target=target, mocap_target_part=part, q=q, v=v, frame=frame)
        return after, self.show(after, state.frame, pose)

    def show(self, state: State, before: Array, pose: dynamics.Pose) -> TimeStep:
        """Return the time step of a state, given the arm's pose and the previous frame float32[18, ...]."""
        start = state.t == 0
        distance = reward.distance(pose.tool, state.tool_goal)
        grip_error = reward.outside(pose.opening, state.required_opening)
        success = ((distance <= self.success_radius) & (grip_error <= 0.0) & ~start).astype(jnp.float32)
        if self.reward == "sparse":
            paid = success
        else:
            start_state = constants.reset(self.weld)
            paid = reward.compute_reward(self.reward, distance, state.tool_goal, start_state, self.success_radius)
            paid = paid * reward.tail(grip_error / reward.MARGIN)
        goal = jnp.zeros_like(state.goal) if self.partially_observable else state.goal
        return TimeStep(
            observation=observation.observe(state.frame, before, goal)[None],
            reward=jnp.where(start, 0.0, paid)[None],
            terminated=jnp.zeros_like(start),
            truncated=state.t >= self.horizon,
            first=start,
            metrics={"success": success, "success_at_end": success, "distance": distance},
            task=state.task if len(self.tasks) > 1 else (),
        )


@dataclasses.dataclass(frozen=True)
class ReachFamily(Reach):
    """All tasks of the family, drawn for each episode."""

    task: str = with_default(Reach, "task", tasks.ALL)

    name = "reach_family"


@dataclasses.dataclass(frozen=True)
class ReachBatch(BatchLast):
    """[B] arms; goals may come in the order of a list."""

    env: Reach

    def _start(self, keys: Array, episode: Array, context: Any) -> tuple[BatchState, TimeStep]:
        if self.env.goals != "order":
            return super()._start(keys, episode, context)
        length = goals.POOL * len(self.env.tasks)
        first = jax.vmap(lambda key: jax.random.randint(key, (), 0, length, jnp.int32))(keys)
        state, timestep = self.in_order(keys, first + (episode % jnp.uint32(length)).astype(jnp.int32))
        return dataclasses.replace(state, episode=episode), timestep

    def in_order(self, keys: Array, indices: Array) -> tuple[BatchState, TimeStep]:
        """Start episodes int32[B] of an endless list, see `goals.list_entry`, each pair for all tasks; keys key[B]."""
        env = self.env
        count = len(self.env.tasks)
        pairs = jax.vmap(lambda index: goals.list_entry(env.goals, env.pool_seed, index))(indices // count).T
        state, timestep = env.begin(pairs[:3], pairs[3:], indices % count)
        return BatchState(env=batch_first(state), key=keys, episode=indices.astype(jnp.uint32)), batch_first(timestep)
