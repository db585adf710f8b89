"""The position of a run, and the iterations left."""

import dataclasses
from typing import Self

import numpy as np

from jaxrl.algos.base import Phase
from jaxrl.runtime.train_state import TrainState


@dataclasses.dataclass(frozen=True)
class Position:
    """The position of a run as the host knows it, without waiting for the device."""

    phase: int = 0
    iteration: int = 0  # in the phase
    iterations: int = 0  # in all phases
    env_steps: int = 0
    updates: int = 0

    @classmethod
    def of(cls, state: TrainState) -> Self:
        """Return the position of a state; waits for the device."""
        pair = lambda counter: (int(counter[0]) << 32) + int(counter[1])  # noqa: E731
        first = lambda x: np.asarray(x).reshape(-1)[0]  # noqa: E731  of several seeds
        phase, iteration, iterations = (int(first(x)) for x in (state.phase, state.iteration, state.iterations))
        counters = (state.progress.env_steps, state.progress.updates)
        env_steps, updates = (pair(np.asarray(x).reshape(-1, 2)[0]) for x in counters)
        return cls(phase, iteration, iterations, env_steps, updates)

    def after(self, phase: Phase, num_envs: int, number: int = 1) -> "Position":
        """Return the position after so many more iterations of the phase."""
        return Position(
            self.phase,
            self.iteration + number,
            self.iterations + number,
            self.env_steps + number * phase.steps * num_envs,
            self.updates + number * phase.updates,
        )

    def axis(self, phases: tuple[Phase, ...]) -> int:
        """Return the step on a chart's axis; an iteration of a phase without environment steps counts as one."""
        own = 0 if phases[self.phase].steps else self.iteration
        return self.env_steps + own + sum(phase.iterations or 0 for phase in phases[: self.phase] if not phase.steps)

    def remaining(self, phases: tuple[Phase, ...], num_envs: int, total_env_steps: int) -> list[int]:
        """Return the iterations left of each phase, none with environment steps once the total is reached."""
        left, missing = [0] * self.phase, total_env_steps - self.env_steps
        for index, phase in enumerate(phases[self.phase :]):
            limits = []
            if phase.iterations is not None:
                limits.append(phase.iterations - (0 if index else self.iteration))
            if phase.steps:
                limits.append(-(-missing // (phase.steps * num_envs)))
            left.append(max(min(limits), 0))
            missing -= left[-1] * phase.steps * num_envs
        return left
