"""Settings and phases of a collective, and the sizes of its data set."""

import dataclasses
import math
from typing import Any, ClassVar

import jax

from envs_jax.base import Box, EnvSpec
from jaxrl.algos.base import RATE, UNIT, Phase, setting
from jaxrl.algos.collective import dataset
from jaxrl.algos.collective.workers import RESOLVED, resolve_workers
from jaxrl.algos.multi_stage import MultiStage, Recordings, Sources, read_resolved
from jaxrl.rl import replay

WINDOWS_PER_CALL = 2048  # windows that a call of `learn` encodes in the phase "codes"
# {phase: the network that it trains}
TRAINED = {"burst": "actor", "learner": "actor", "transformer": "encoder", "actor": "actor", "critic": "critic"}


@dataclasses.dataclass(frozen=True)
class CollectivePhases(MultiStage):
    """Settings, phases and sizes of a collective."""

    workers: str = setting("", "runs of sac, one per task, separated by commas")
    expert_datasets: str = setting(
        "",
        "expert dataset files (see jaxrl/integrations/expert_dataset.py), separated by commas; with workers or without",
    )
    resolved_inputs: str = setting("", "data of workers and expert datasets, as JSON; filled in by the run", flag=False)
    state_entries: tuple[int, ...] = setting((), "indices of the observation that form the state; empty = all")
    random_steps: int = setting(8000, "steps per task with random actions (at least one episode)", between=(1, 1e9))
    learner_steps: int = setting(
        32_000, "then steps per task of the learner (at least one episode; 0 = none)", between=(0, 1e9)
    )
    worker_steps: int = setting(
        20_000, "then steps per task of the workers (at least one episode; 0 = none)", between=(0, 1e9)
    )
    update_interval: int = setting(8, "steps of every environment between calls to learn", between=(1, 100_000))
    initial_updates: int = setting(8000, "actor updates after the random steps", between=(0, 1e9))
    env_steps_per_update: float = setting(
        64.0, "steps of all environments together for each actor update while the learner acts", between=(1e-5, 1e9)
    )
    transformer_updates: int = setting(9000, "transformer updates, after all data are collected", between=(1, 1e9))
    transformer_batch: int = setting(128, "windows per transformer update", between=(1, 2**24))
    transformer_lr: float = setting(2e-4, "learning rate of the transformer (Adam)", between=RATE)
    context_length: int = setting(20, "steps in the transformer's window", between=(2, 10_000))
    code_size: int = setting(6, "size of the task code (published: 6)", between=(1, 2**14))
    embedding_size: int = setting(32, "size of the transformer's tokens (published: 32)", between=(1, 2**14))
    feedforward_size: int = setting(
        128, "units of the transformer's feed-forward layers (published: 128)", between=(1, 2**16)
    )
    num_heads: int = setting(8, "attention heads of the transformer", between=(1, 2**10))
    num_layers: int = setting(3, "encoder layers of the transformer", between=(1, 100))
    dropout: float = setting(0.1, "dropout rate of the transformer", between=(0, 0.99))
    contrast_weight: float = setting(0.25, "weight of InfoNCE; the reconstruction has weight 1", between=(0, 1e6))
    temperature: float = setting(0.15, "temperature of InfoNCE", between=(1e-6, 1e6))
    actor_updates: int = setting(50_000, "actor updates with the trained transformer's codes", between=(1, 1e9))
    critic_updates: int = setting(10_000, "critic updates; 0 = none", between=(0, 1e9))
    batch_size: int = setting(256, "steps per update of the actor or the critics", between=(1, 2**24))
    actor_lr: float = setting(2e-4, "learning rate of the actor (Adam)", between=RATE)
    critic_lr: float = setting(2e-4, "learning rate of the critics (Adam)", between=RATE)
    final_lr_fraction: float = setting(1.0, "learning rates fall linearly to this fraction at the end", between=UNIT)
    hidden_size: int = setting(300, "units of each hidden layer of actor and critics", between=(1, 2**16))
    depth: int = setting(2, "hidden layers of actor and critics", between=(1, 100))
    num_critics: int = setting(2, "number of critics", between=(1, 100))
    updates_per_call: int = setting(50, "updates per iteration in phases that only learn", between=(1, 100_000))

    sources: ClassVar[tuple[str, ...]] = ("workers",)
    recordings: ClassVar[tuple[str, ...]] = ("expert_datasets",)

    def __post_init__(self) -> None:
        spec = self.spec
        action = self.spec.action
        vectors = all(isinstance(box, Box) and len(box.shape) == 1 for box in (spec.observation, action))
        if spec.num_agents != 1 or not vectors:
            raise ValueError(
                f"collective needs one agent with vectors as observations and actions, unlike '{spec.name}': choose "
                "reach, or another environment that has them"
            )
        if not isinstance(action, Box) or (action.low, action.high) != (-1.0, 1.0):
            raise ValueError(
                f"collective needs actions in [-1, 1], but in '{spec.name}' they are {action}: scale them in the "
                "environment"
            )
        super().__post_init__()
        _ = self._resolved
        size = math.prod(spec.observation.shape)
        if not all(0 <= entry < size for entry in self.state_entries):
            raise ValueError(f"state_entries must lie between 0 and {size - 1}, as observations have {size} numbers")
        if len(set(self.state_entries)) < len(self.state_entries):
            raise ValueError(f"state_entries {self.state_entries} names an entry twice: name each one once")
        if self.embedding_size % self.num_heads:
            raise ValueError(
                f"num_heads {self.num_heads} does not divide embedding_size {self.embedding_size}: change one of them"
            )
        if not 2 <= self.context_length <= spec.horizon:
            raise ValueError(
                f"context_length must lie between 2 and the {spec.horizon} steps of an episode, not "
                f"{self.context_length}"
            )
        if self.batch_size % self.layout.shards or self.transformer_batch % self.layout.shards:
            raise ValueError(
                f"batch_size {self.batch_size} and transformer_batch {self.transformer_batch} must be multiples of the "
                f"{self.layout.shards} logical shards: change them, or lower --logical_shards"
            )

    @classmethod
    def batch(cls, spec: EnvSpec, settings: dict[str, Any], num_envs: int) -> int:
        return math.gcd(*(int(settings.get(name, getattr(cls, name))) for name in ("batch_size", "transformer_batch")))

    @classmethod
    def resolve_inputs(
        cls, spec: EnvSpec, settings: dict[str, Any], sources: Sources, recordings: Recordings
    ) -> dict[str, Any]:
        return resolve_workers(spec, settings, sources["workers"], recordings.get("expert_datasets"))

    @property
    def _resolved(self) -> dict[str, Any]:
        """Parse `resolved_inputs`; if it is empty, assume a default worker per task."""
        default = dict(zip(RESOLVED, (list(self.spec.task_names), {}, [0, 0]), strict=True))
        return default | read_resolved(self.resolved_inputs or "{}", RESOLVED)

    @property
    def tasks(self) -> tuple[str, ...]:
        """Names of all tasks: first the workers' tasks, then tasks only in expert datasets."""
        return tuple(self._resolved["tasks"])

    @property
    def recurrent(self) -> bool:
        return True

    # Phases

    @property
    def phases(self) -> tuple[Phase, ...]:
        """Random steps, updates, the learner's steps, the workers'; then transformer, codes, actor, critics."""
        interval = self.update_interval
        learner_calls = self.calls(self.learner_steps)

        def study(name: str, updates: int) -> Phase:
            return Phase(name, 0, self.updates_per_call, iterations=-(-updates // self.updates_per_call))

        learner_updates = max(1, round(interval * self.layout.num_envs / self.env_steps_per_update))
        phases = (
            Phase("random", interval, 0, iterations=self.calls(self.random_steps)),
            study("burst", self.initial_updates if learner_calls else 0),
            Phase("learner", interval, learner_updates, iterations=learner_calls),
            Phase("worker", interval, 0, iterations=self.calls(self.worker_steps)),
            study("transformer", self.transformer_updates),
            Phase("codes", 0, 0, iterations=-(-self.rows // self.coded_rows)),
            study("actor", self.actor_updates),
            study("critic", self.critic_updates),
        )
        return tuple(phase for phase in phases if phase.iterations)

    @property
    def num_workers(self) -> int:
        """Number of workers, K: one for each task where neither they nor expert datasets are named."""
        unnamed = 0 if self.expert_datasets else self.spec.num_tasks
        return len(self.workers.split(",")) if self.workers else unnamed

    def calls(self, steps: int) -> int:
        """Return the calls of `learn` in which all environments make `steps` per task, each at least an episode."""
        each = -(-steps * self.num_workers // self.layout.num_envs)
        return -(-max(each, self.spec.horizon + 1) // self.update_interval) if each else 0

    @property
    def until(self) -> tuple[int, int]:
        """Batch steps at which random actions end, and at which the learner's steps end."""
        random = self.calls(self.random_steps)
        learner = self.calls(self.learner_steps)
        return random * self.update_interval, (random + learner) * self.update_interval

    @property
    def labelled_rows(self) -> int:
        """Rows of each environment for episodes of expert datasets, in the worst split."""
        rows, longest = self._resolved["expert_datasets"]
        return int(-(-rows // self.layout.num_envs) + longest)

    @property
    def rows(self) -> int:
        """Rows of each environment, R: of expert datasets, all collected ones, and one for the last observation."""
        return self.labelled_rows + self.until[1] + self.calls(self.worker_steps) * self.update_interval + 1

    @property
    def coded_rows(self) -> int:
        """Rows of each environment that one call of `learn` encodes."""
        return min(self.rows, max(1, WINDOWS_PER_CALL // self.layout.num_envs))

    def count_updates(self, network: str) -> int:
        phases = (phase for phase in self.phases if TRAINED.get(phase.name) == network)
        return sum(phase.updates * (phase.iterations or 0) for phase in phases)

    def summary(self) -> list[str]:
        steps = (self.rows - 1) * self.layout.num_envs
        names = ", ".join(self.tasks)
        phases = ", ".join(
            f"{phase.name} {phase.iterations * (phase.steps * self.layout.num_envs or phase.updates):,}"
            + (" steps" if phase.steps else " updates")
            for phase in self.phases
            if phase.iterations and (phase.steps or phase.updates)
        )
        size = steps * replay.row_bytes(*self._row_shapes, 1) / 1e6
        return [f"Room for {steps:,} labelled steps of {names} in {size:,.3g} MB; phases: {phases}."]

    def warnings(self, total_env_steps: int) -> list[str]:
        lines = super().warnings(total_env_steps)
        if self.transformer_batch == 1 and self.contrast_weight:
            lines.append("transformer_batch 1 leaves InfoNCE no other window to compare with: raise it")
        return lines

    @property
    def _row_shapes(self) -> tuple[dict[str, jax.ShapeDtypeStruct], dict[str, jax.ShapeDtypeStruct]]:
        return dataset.row_shapes(math.prod(self.spec.observation.shape), self._actions, self.code_size)

    @property
    def _actions(self) -> int:
        return math.prod(self.spec.action.shape)
