"""Meta-World, the simulator that `envs_jax.reach` reimplements, with its contacts, on the host (extra `real`).

`Arm` is one arm in any of its tasks. `RealReach` uses several in place of `Reach`'s own arm; `Reach` still draws puck
and goal and defines tasks, reward and success. Or it runs one of Meta-World's own tasks, with its reward, success and
scripted policy. Observations are Meta-World's.

Source: the public repository Farama-Foundation/Metaworld, version 3.1.1, MIT licence.
"""

import dataclasses
import functools
import pickle
import warnings
from collections.abc import Sequence
from importlib import metadata
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from envs_jax.base import Array, EnvSpec, TimeStep, closest
from envs_jax.batch import BatchState, batch_first, batch_last
from envs_jax.reach import goals, tasks
from envs_jax.reach.dynamics import Pose
from envs_jax.reach.env import Reach, ReachBatch
from envs_jax.reach.observation import FRAME

REACH = "reach-v3"
_GOAL = 36  # index of the goal in an observation


def packages() -> Any:
    """Return the packages metaworld and mujoco. Raises ValueError where they are not installed."""
    try:
        import metaworld
        import metaworld.policies
        import mujoco
    except ImportError as error:
        raise ValueError(
            f"Meta-World is not installed ({error}): install the extra 'real', pip install -e '.[real]'"
        ) from None
    return metaworld, mujoco


def version() -> str:
    """Return the version of the installed package."""
    return metadata.version("metaworld")


def check_task(name: str) -> None:
    """Raise ValueError unless Meta-World is installed and has such a task."""
    known = packages()[0].ALL_V3_ENVIRONMENTS
    if name not in known:
        raise ValueError(f"Meta-World has no task '{name}': {closest(name, (*known, *tasks.TASKS))}")


def pool(task: str, seed: int) -> np.ndarray:
    """float64[50, n]: Meta-World's own draws of what a task leaves open. Raises ValueError."""
    check_task(task)
    drawn = packages()[0].MT1(task, seed=seed).train_tasks
    return np.array([pickle.loads(one.data)["rand_vec"] for one in drawn])


class Arm:
    """One arm in one of Meta-World's tasks.

    Args:
        task: such as "reach-v3".
        watch: check for contacts of the arm in every physics step, see `touched`; slower.

    Raises ValueError: Meta-World is not installed, or has no such task.
    """

    def __init__(self, task: str, watch: bool = False) -> None:
        check_task(task)
        self._metaworld, self._mujoco = packages()
        self._name = task
        self._env = self._metaworld.ALL_V3_ENVIRONMENTS[task]()
        self._policy = self._metaworld.policies.ENV_POLICY_MAP[task]()
        self.observation = np.zeros(0)
        self.touched = False
        if watch:
            self._watch()

    def _watch(self) -> None:
        model = self._env.model
        above = model.body_parentid
        arm = {int(model.jnt_bodyid[0])}
        for body in range(1, model.nbody):  # parents come before their children
            if int(above[body]) in arm:
                arm.add(body)
        is_arm = np.isin(model.geom_bodyid, list(arm))

        def simulate(control: Any, frames: int) -> None:
            """Simulate as Gymnasium does, but check the contacts of every physics step."""
            data = self._env.data
            data.ctrl[:] = control
            for _ in range(frames):
                self._mujoco.mj_step(model, data)
                pairs = data.contact.geom[: data.ncon]
                self.touched |= bool(is_arm[pairs].any())
            self._mujoco.mj_rnePostConstraint(model, data)

        self._env._step_mujoco_simulation = simulate

    @property
    def tool(self) -> np.ndarray:
        """float64[3], the tool centre, m."""
        return self._env.tcp_center.copy()

    @property
    def scripted(self) -> np.ndarray:
        """float32[4] in [-1, 1], the action of Meta-World's own policy for the task."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it warns of actions that are clipped
            action = self._policy.get_action(self.observation)
        return np.clip(action, -1, 1).astype(np.float32)

    def reset(self, vector: np.ndarray) -> np.ndarray:
        """Start with a row of `pool` (reach: puck and goal); return the observation float64[39]."""
        setting = {"rand_vec": vector, "env_cls": type(self._env), "partially_observable": False}
        self._env.set_task(self._metaworld.Task(self._name, pickle.dumps(setting)))
        self.observation = self._env.reset()[0]
        return self.observation

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool]:
        """Step one control period with an action float32[4]; return observation, Meta-World's own reward and success.

        Sets `touched`, whether the arm touched anything in it.
        """
        self.touched = False
        self.observation, reward, _, _, info = self._env.step(action)
        return self.observation, float(reward), bool(info["success"])


@dataclasses.dataclass(frozen=True)
class RealReach(ReachBatch):
    """[B] arms of Meta-World in the place of `Reach`'s. Methods run on the host and cannot be compiled.

    Attributes:
        env: Reach, for draws, tasks, reward, success, horizon, and whether the goal is shown.
        arms: B of them.
        vectors: None: the tasks of `env`. Else the draws [n, ...] of a Meta-World task, whose reward and success count.
    """

    arms: Sequence[Arm] = ()
    vectors: np.ndarray | None = None

    @classmethod
    def make(cls, env: Reach, task: str | None, arms: int) -> "RealReach":
        """Make `arms` arms in a task of Meta-World; with None in the tasks of `env`.

        Raises ValueError: Meta-World is not installed, has no such task, or cannot do what `env` asks for.
        """
        if env.weld != "v3":
            raise ValueError(
                f"Meta-World turns the hand like weld v3, but the environment has weld {env.weld}: choose weld v3"
            )
        vectors = None if task is None else goals.pool(env.pool_seed) if task == REACH else pool(task, env.pool_seed)
        real = cls(env, [Arm(task or REACH) for _ in range(arms)], vectors)
        (expected_size,), (size,) = env.spec.observation.shape, real.arms[0].reset(real._vector(0)).shape
        if expected_size != size:
            raise ValueError(
                f"observations of Meta-World's {task or REACH} have {size} numbers, but the policy takes "
                f"{expected_size}: choose another task"
            )
        return real

    @property
    def spec(self) -> EnvSpec:
        spec = self.env.spec
        if self.vectors is None:
            return spec
        metrics = {name: spec.metrics[name] for name in ("success", "success_at_end")}
        return dataclasses.replace(spec, metrics=metrics)

    def scripted(self) -> np.ndarray:
        """float32[B, 1, 4], the actions of Meta-World's own policy for its task."""
        return np.stack([arm.scripted for arm in self.arms])[:, None]

    def in_order(self, keys: Array, indices: Array) -> tuple[BatchState, TimeStep]:
        """Start episodes in order, see `ReachBatch.in_order`; a task of Meta-World takes its draws in turn."""
        state, _ = _in_order(ReachBatch(self.env), keys, indices)
        arms = zip(self.arms, np.asarray(indices), strict=True)
        return self._show_all(state, 0, [(arm.reset(self._vector(k)), 0.0, False) for arm, k in arms])

    def _vector(self, index: int) -> np.ndarray:
        """float64[n], the draw of an episode of the list."""
        if self.vectors is None:
            env = self.env
            if env.goals == "uniform":
                return np.asarray(_list_entry(env.goals, env.pool_seed, index // len(env.tasks)), np.float64)
            return goals.pool(env.pool_seed)[index // len(env.tasks) % goals.POOL]
        return self.vectors[index % len(self.vectors)]

    def step_without_reset(self, state: BatchState, action: Array, context: Any = ()) -> tuple[BatchState, TimeStep]:
        """Step every arm one control period with actions float32[B, 1, 4]."""
        arms = zip(self.arms, np.asarray(action, np.float32), strict=True)
        return self._show_all(state, 1, [arm.step(one[0]) for arm, one in arms])

    def _show_all(
        self, state: BatchState, steps: int, arm_steps: Sequence[tuple[Any, ...]]
    ) -> tuple[BatchState, TimeStep]:
        """Return the state after `steps` more steps, with what `Arm.step` of all arms returned, and its time step."""
        observations, rewards, successes = (np.stack(values) for values in zip(*arm_steps, strict=True))
        observation = observations.astype(np.float32)
        tools = np.stack([arm.tool for arm in self.arms]).astype(np.float32)
        env, timestep = _show(self.env, state.env, steps, observation, tools)
        state = dataclasses.replace(state, env=env)
        if self.vectors is None:
            return state, timestep
        if self.env.partially_observable:
            observation[:, _GOAL:] = 0
        success = successes.astype(np.float32)
        task_fields = {
            "observation": observation[:, None],
            "reward": rewards.astype(np.float32)[:, None],
            "metrics": {"success": success, "success_at_end": success},
        }
        return state, dataclasses.replace(timestep, **jax.tree.map(jnp.asarray, task_fields))


_list_entry = jax.jit(goals.list_entry, static_argnums=(0, 1))
_in_order = jax.jit(ReachBatch.in_order, static_argnums=0)


@functools.partial(jax.jit, static_argnums=0)
def _show(env: Reach, state: Any, steps: Array, observation: Array, tool: Array) -> tuple[Any, TimeStep]:
    """Return a state [B, ...] after `steps` more steps, with the frame of observations [B, 39], and its time step."""
    state = dataclasses.replace(state, t=state.t + steps, frame=observation[:, :FRAME])
    pose = Pose(hand=observation[:, :3].T, tool=tool.T, opening=observation[:, 3])
    return state, batch_first(env.show(batch_last(state), observation[:, FRAME : 2 * FRAME].T, pose))
