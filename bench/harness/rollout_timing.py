"""Environment throughput in three cumulative stages, for the benchmarks.

    rules        state, rewards, ends and metrics; actions come from a tape, and observations are not read, so
                 that the compiler removes code that only observations need (but not the state's own arrays for them)
    observation  all that a step returns, and the critic's centralised observation where the environment has one
    policy       a scripted policy observes and acts

Whole episodes are rolled out on one device or several, since early and late steps of an episode may differ in cost.
Resets are timed separately. The tape is recorded with the same policy from the same start: all stages play the same
episodes.
"""

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from bench.harness.timing import Sampler
from envs_jax.base import Array, TimeStep
from envs_jax.batch import BatchedEnvironment
from envs_jax.progress import start
from jaxrl.rl.data_parallel import AXIS, SPLIT, compiler_options, largest_divisor, make_mesh, on_mesh, shardings
from jaxrl.runtime import memory_plan
from jaxrl.runtime.rollouts import make_step_keys, scripted_policy
from jaxrl.runtime.trainer import make_env_keys

STAGES = ("rules", "observation", "policy")
COPIES = 3  # the state before, after, and the compiler's temporaries


@dataclasses.dataclass(frozen=True)
class Bytes:
    """Sizes of ONE environment in bytes."""

    state: int  # read and written by a step
    timestep: int  # returned by a step


def sizes(env: BatchedEnvironment) -> Bytes:
    """Return the sizes of one environment, from shapes."""
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 1))
    state, timestep = jax.eval_shape(lambda keys: env.reset(keys, env.context(start())), keys)
    return Bytes(memory_plan.size(state), memory_plan.size(timestep))


def together(env_bytes: Bytes, num_envs: int, limit: int, cut: bool) -> int:
    """Return how many of `num_envs` environments to step at a time: as many as in training, within `limit` bytes.

    Args:
        env_bytes: sizes of one environment.
        num_envs: total number of environments.
        limit: bytes that may be used.
        cut: whether they may be rolled out in parts, which needs episodes of one length.

    Returns:
        a divisor of num_envs, or 0 if none fits.
    """
    each = COPIES * (env_bytes.state + env_bytes.timestep)
    if not cut:
        return num_envs if num_envs * each <= limit else 0
    comfortable = int(memory_plan.SHARE * limit) // each
    if jax.default_backend() == "cpu":
        comfortable = min(comfortable, memory_plan.CPU_ROLLOUT)
    return largest_divisor(num_envs, comfortable) if each <= limit else 0


class EnvTimer:
    """Compiled programs for one number of environments.

    Args:
        env: the batched environment.
        num_envs: stepped at a time.
        policy: name of a scripted policy.
        stages: which of STAGES.
        seed: of the episodes.
        devices: that share the environments evenly.
    """

    def __init__(
        self,
        env: BatchedEnvironment,
        num_envs: int,
        policy: str = "random",
        stages: Sequence[str] = STAGES,
        seed: int = 0,
        devices: int = 1,
    ) -> None:
        self.env = env
        self.num_envs = num_envs
        self.stages = tuple(stages)
        self.steps = env.spec.horizon
        self.compile_seconds: dict[str, float] = {}  # {program: seconds}, "reset" and the stages
        self.temporary: dict[str, float] = {}  # {stage: bytes per environment} of the program's temporaries
        self._context = env.context(start())
        self._act = scripted_policy(env, policy)
        mesh = make_mesh(devices)
        taped = PartitionSpec(None, AXIS)
        indices = jnp.arange(num_envs, dtype=jnp.int32)
        keys = make_env_keys(jax.random.key(seed), indices)
        self._keys = jax.device_put(keys, shardings(mesh, SPLIT))
        reset = jax.jit(on_mesh(lambda keys: env.reset(keys, self._context), mesh, (SPLIT,), SPLIT))
        self._reset = self._compile("reset", reset, self._keys)
        state, timestep = self._reset(self._keys)
        record = jax.jit(on_mesh(self._record, mesh, (SPLIT, SPLIT, SPLIT), taped))
        self._tape = record(state, timestep, self._keys)
        self._programs: dict[str, Any] = {}
        for stage in self.stages:
            function = on_mesh(self._stage(stage), mesh, (SPLIT, SPLIT, taped, SPLIT), SPLIT)
            program = jax.jit(function, donate_argnums=0, compiler_options=compiler_options())
            self._programs[stage] = self._compile(stage, program, state, timestep, self._tape, self._keys)
            usage = self._programs[stage].memory_analysis()
            self.temporary[stage] = usage.temp_size_in_bytes * devices / num_envs if usage else 0.0

    def samplers(self, prefix: str = "", min_seconds: float = 0.1) -> list[Sampler]:
        """Return samplers: seconds of ONE step of all environments, "<prefix><stage>", and "<prefix>reset"."""
        return [self._sampler(prefix, stage, min_seconds) for stage in self.stages]

    def _sampler(self, prefix: str, stage: str, min_seconds: float) -> Sampler:
        def sample() -> dict[str, float]:
            stepping = 0.0
            episodes = 0
            resetting = 0.0
            while stepping < min_seconds:
                resetting -= time.perf_counter()
                state, timestep = jax.block_until_ready(self._reset(self._keys))
                now = time.perf_counter()
                resetting += now
                jax.block_until_ready(self._programs[stage](state, timestep, self._tape, self._keys))
                stepping += time.perf_counter() - now
                episodes += 1
            seconds = {f"{prefix}{stage}": stepping / (episodes * self.steps)}
            return seconds | ({f"{prefix}reset": resetting / episodes} if stage == self.stages[0] else {})

        return sample

    def _compile(self, name: str, function: Any, *arguments: Any) -> Any:
        began = time.perf_counter()
        compiled = function.lower(*arguments).compile()
        self.compile_seconds[name] = time.perf_counter() - began
        return compiled

    def _step(self, state: Any, timestep: TimeStep, action: Array) -> Any:
        if self.env.spec.fixed_horizon:  # the episode does not end before the rollout
            return self.env.step_without_reset(state, action, self._context)
        return self.env.step(state, timestep, action, self._context)

    def _choose(self, state: Any, timestep: TimeStep, keys: Array, t: Array) -> Array:
        return self._act((), (), state, timestep, make_step_keys(keys, t))[0].astype(self.env.spec.action.dtype)

    def _record(self, state: Any, timestep: TimeStep, keys: Array) -> Array:
        """Return the policy's actions [T, B, A, ...]."""

        def one_step(carry: Any, t: Array) -> tuple[Any, Array]:
            state, timestep = carry
            action = self._choose(state, timestep, keys, t)
            return self._step(state, timestep, action), action

        return jax.lax.scan(one_step, (state, timestep), jnp.arange(self.steps, dtype=jnp.uint32))[1]

    def _stage(self, stage: str) -> Callable[..., Any]:
        spec = self.env.spec

        def view(timestep: TimeStep, action: Array) -> Any:
            return () if spec.critic_input is None else jax.vmap(spec.critic_input)(timestep, action)

        def rollout(state: Any, timestep: TimeStep, tape: Array, keys: Array) -> Any:
            def one_step(carry: Any, row: tuple[Array, Array]) -> tuple[Any, None]:
                state, timestep, _ = carry
                action = self._choose(state, timestep, keys, row[0]) if stage == "policy" else row[1]
                view_output = view(timestep, action) if stage != "rules" else ()
                state, timestep = self._step(state, timestep, action)
                return (state, _drop_views(timestep) if stage == "rules" else timestep, view_output), None

            first = view(timestep, tape[0]) if stage != "rules" else ()
            carry = (state, _drop_views(timestep) if stage == "rules" else timestep, first)
            times = jnp.arange(self.steps, dtype=jnp.uint32)
            return jax.lax.scan(one_step, carry, (times, tape))[0]

        return rollout


def _drop_views(timestep: TimeStep) -> TimeStep:
    return dataclasses.replace(timestep, observation=(), action_mask=None, mask_state=(), global_state=())
