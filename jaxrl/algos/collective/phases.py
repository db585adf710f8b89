"""The phases of a collective, and how many rows its dataset needs for them."""

import dataclasses

from jaxrl.algos.base import Phase

WINDOWS_PER_CALL = 2048  # windows per call of `learn` in the phase "codes"


@dataclasses.dataclass(frozen=True)
class CollectivePhases:
    """Random steps, updates, the learner's steps, the workers'; then transformer, codes, actor and critics.

    Attributes:
        num_envs: B, environments.
        horizon: steps of an episode.
        workers: K; each has a task.
        interval: steps of every environment between calls of `learn`.
        steps: {"random", "learner", "worker"}: environment steps per task in which these act.
        updates: {"burst", "transformer", "actor", "critic"}: updates of phases that only learn.
        env_steps_per_update: environment steps for each actor update while the learner acts.
        updates_per_call: updates per iteration of phases that only learn.
        labelled_rows: rows of each environment for episodes of expert datasets.
    """

    num_envs: int
    horizon: int
    workers: int
    interval: int
    steps: dict[str, int]
    updates: dict[str, int]
    env_steps_per_update: float
    updates_per_call: int
    labelled_rows: int

    def calls(self, name: str) -> int:
        """Return the calls of `learn` in which each environment makes its share of steps, at least one episode."""
        each = -(-self.steps[name] * self.workers // self.num_envs)
        return -(-max(each, self.horizon + 1) // self.interval) if each else 0

    @property
    def phases(self) -> tuple[Phase, ...]:
        """Return the phases in order."""

        def collect(name: str, updates: int = 0) -> Phase:
            return Phase(name, self.interval, updates, iterations=self.calls(name))

        def study(name: str, needed: bool = True) -> Phase:
            calls = -(-self.updates[name] // self.updates_per_call) if needed else 0
            return Phase(name, 0, self.updates_per_call, iterations=calls)

        phases = (
            collect("random"),
            study("burst", needed=self.calls("learner") > 0),
            collect("learner", max(1, round(self.interval * self.num_envs / self.env_steps_per_update))),
            collect("worker"),
            study("transformer"),
            Phase("codes", 0, 0, iterations=-(-self.rows // self.coded_rows)),
            study("actor"),
            study("critic"),
        )
        return tuple(phase for phase in phases if phase.iterations)

    @property
    def until(self) -> tuple[int, int]:
        """Return the batch steps at which random actions end, and at which the learner's steps end."""
        random, learner = self.calls("random"), self.calls("learner")
        return random * self.interval, (random + learner) * self.interval

    @property
    def rows(self) -> int:
        """Return R: rows of expert datasets, all collected rows, and one for the last observation."""
        return self.labelled_rows + self.until[1] + self.calls("worker") * self.interval + 1

    @property
    def coded_rows(self) -> int:
        """Return the number of rows that one call of `learn` encodes."""
        return min(self.rows, max(1, WINDOWS_PER_CALL // self.num_envs))
