"""An environment that cannot be solved without a memory."""

import dataclasses

import jax
import jax.numpy as jnp

from envs_jax import Box, Discrete, Environment, EnvSpec, TimeStep, pytree, restart, setting, transition
from envs_jax.base import Array


@pytree
class RecallState:
    """cue int32[A], t int32[]."""

    cue: Array
    t: Array


@dataclasses.dataclass(frozen=True)
class Recall(Environment):
    """Each agent sees a cue of its own at the first step and must repeat it `delay` steps later, when asked.

    The reward is 1 for the right answer, of `cues` ones; in between all observations are equal, whatever the cue.
    """

    num_agents: int = setting(2, "agents")
    cues: int = setting(4, "cues")
    delay: int = setting(6, "steps between the cue and the question")

    @property
    def spec(self) -> EnvSpec:
        observation = Box((self.cues + 1,), low=0.0, high=1.0)
        return EnvSpec(
            "recall", self.num_agents, observation, Discrete(self.cues), self.delay + 1, fixed_horizon=True,
            metrics={"recalled": "sum"},
        )  # fmt: skip

    def _observe(self, state: RecallState) -> Array:
        cue = jax.nn.one_hot(state.cue, self.cues) * (state.t == 0).astype(jnp.float32)
        asked = jnp.full((self.num_agents, 1), state.t == self.delay, jnp.float32)
        return jnp.concatenate([cue, asked], axis=-1)

    def reset(self, key: Array, context: None = None) -> tuple[RecallState, TimeStep]:
        state = RecallState(jax.random.randint(key, (self.num_agents,), 0, self.cues, jnp.int32), jnp.int32(0))
        return state, restart(self._observe(state), metrics={"recalled": jnp.float32(0)})

    def step(self, state: RecallState, action: Array, context: None = None) -> tuple[RecallState, TimeStep]:
        right = ((action == state.cue) & (state.t == self.delay)).astype(jnp.float32)
        state = dataclasses.replace(state, t=state.t + jnp.int32(1))
        over = state.t > self.delay
        return state, transition(right, self._observe(state), terminated=over, metrics={"recalled": right.mean()})
