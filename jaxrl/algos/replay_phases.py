"""When an algorithm with a replay buffer acts at random, stores steps, and updates."""

import dataclasses

import jax.numpy as jnp

from envs_jax.base import Array
from envs_jax.progress import Progress, total
from jaxrl.algos.base import Phase


@dataclasses.dataclass(frozen=True)
class ReplayPhases:
    """Steps that fill the replay, perhaps random ones and the updates due after them; then steps and updates.

    Attributes:
        num_envs: environments.
        interval: steps of every environment between calls of `learn`.
        updates: per call of `learn`.
        fill_steps: environment steps that must be stored before a batch can be sampled.
        n_step: of the returns.
        random_steps: environment steps with random actions; 0 = none.
        steps_before: environment steps of phases before these.
    """

    num_envs: int
    interval: int
    updates: int
    fill_steps: int
    n_step: int
    random_steps: int
    steps_before: int = 0

    @property
    def calls(self) -> int:
        """Return the calls of `learn` in the random phase, which lasts at least until a batch can be sampled."""
        per_call = self.interval * self.num_envs
        fill = max(-(-self.fill_steps // per_call), -(-self.n_step // self.interval))
        return max(-(-self.random_steps // per_call), fill) if self.random_steps else fill

    @property
    def phases(self) -> tuple[Phase, ...]:
        """Return random steps and the updates due after them, or steps to fill a batch; then steps and updates."""
        calls, train = self.calls, Phase("train", self.interval, self.updates)
        if self.random_steps:
            random = Phase("random", self.interval, 0, iterations=calls)
            return (random, Phase("burst", 0, self.updates, iterations=calls), train)
        return (Phase("fill", self.interval, 0, iterations=calls - 1), train) if calls > 1 else (train,)

    def acts_randomly(self, progress: Progress) -> Array | None:
        """Return whether actions are random at this step, bool[]; None if they never are."""
        if not self.random_steps:
            return None
        return total(progress.env_steps) < self.steps_before + self.calls * self.interval * self.num_envs

    def update_numbers(self, progress: Progress, phase: Phase) -> Array:
        """Return the update numbers used by schedules, uint32[updates], from 1, modulo 2^32.

        All updates of a phase without steps have number 0, at which every schedule is due.
        """
        if phase.steps == 0:
            return jnp.zeros(phase.updates, jnp.uint32)
        return progress.updates[1] + jnp.arange(1, phase.updates + 1, dtype=jnp.uint32)
