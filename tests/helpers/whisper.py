"""An environment that a team solves only if its agents send each other what they see."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from envs_jax import Box, Discrete, Environment, EnvSpec, TimeStep, pytree, restart, setting, transition
from envs_jax.base import Array


@pytree
class WhisperState:
    """cue int32[A] of this step, t int32[], key key[]."""

    cue: Array
    t: Array
    key: Array


@dataclasses.dataclass(frozen=True)
class Whisper(Environment):
    """Each agent sees the cue that the next one has to repeat: at once, or `delay` steps after it was shown.

    Cues are drawn anew at each step. Agents hear each other after `delay` steps, all of them or, with `deaf`, all but
    the first one.
    """

    num_agents: int = setting(3, "agents")
    cues: int = setting(3, "cues")
    delay: int = setting(0, "steps that a message takes")
    deaf: bool = setting(False, "the first agent hears nobody")
    horizon: int = setting(6, "steps of an episode")

    @property
    def spec(self) -> EnvSpec:
        return EnvSpec(
            "whisper", self.num_agents, Box((self.cues + self.num_agents,), low=0.0, high=1.0), Discrete(self.cues),
            self.horizon, fixed_horizon=True, metrics={"repeated": "sum"}, links=True, max_link_age=self.delay,
        )  # fmt: skip

    def _cues(self, key: Array, t: Array) -> Array:
        return jax.random.randint(jax.random.fold_in(key, t), (self.num_agents,), 0, self.cues, jnp.int32)

    def _observe(self, state: WhisperState) -> tuple[Array, Array]:
        seen = jax.nn.one_hot(jnp.roll(state.cue, -1), self.cues, dtype=jnp.float32)
        hears = ~np.eye(self.num_agents, dtype=bool)
        hears[0] &= not self.deaf
        links = jnp.where(hears & (state.t >= self.delay), jnp.int32(self.delay), jnp.int32(-1))
        return jnp.concatenate([seen, jnp.eye(self.num_agents, dtype=jnp.float32)], axis=-1), links

    def reset(self, key: Array, context: None = None) -> tuple[WhisperState, TimeStep]:
        state = WhisperState(self._cues(key, jnp.int32(0)), jnp.int32(0), key)
        observation, links = self._observe(state)
        return state, restart(observation, links=links, metrics={"repeated": jnp.float32(0)})

    def step(self, state: WhisperState, action: Array, context: None = None) -> tuple[WhisperState, TimeStep]:
        expected = self._cues(state.key, jnp.maximum(state.t - self.delay, 0))
        right = ((action == expected) & (state.t >= self.delay)).astype(jnp.float32)
        t = state.t + jnp.int32(1)
        state = WhisperState(self._cues(state.key, t), t, state.key)
        observation, links = self._observe(state)
        over = state.t >= self.horizon
        return state, transition(right, observation, terminated=over, links=links, metrics={"repeated": right.mean()})
