"""Units of work of `bench.gpu`, in order of importance, each with its own time limit."""

import dataclasses
import importlib
from collections.abc import Callable
from typing import Any

Result = dict[str, Any]
LEAST = 20.0  # minimum seconds left of a call for a unit to begin


@dataclasses.dataclass(frozen=True)
class Unit:
    """One job with a result of its own.

    Attributes:
        part: that it belongs to.
        name: of its result.
        seconds: limit, compiling included; counted anew once it reports that its programs run.
        where: "module:function", called as function(quick=bool, folder=Path), whose result has "rows":
            [[what, figure, unit], ...] for the table, and entries of its own.
    """

    part: str
    name: str
    seconds: float
    where: str

    def load(self) -> Callable[..., Result]:
        """Import the function."""
        module, _, function = self.where.partition(":")
        found: Callable[..., Result] = getattr(importlib.import_module(module), function)
        return found


# If it fails, the others run without graphs.
GRAPHS = ("correct", "correct_graphs", 240, "bench.gpu.correct:graphs_agree")
UNITS = tuple(
    Unit(*row)
    for row in (
        ("device", "device_rates", 60, "bench.gpu.device:rates_of_device"),
        ("device", "device_launches", 30, "bench.gpu.device:launches"),
        GRAPHS,
        ("correct", "correct_coverage", 120, "bench.gpu.correct:coverage"),
        ("correct", "correct_snakes", 120, "bench.gpu.correct:snakes"),
        ("correct", "correct_reach", 120, "bench.gpu.correct:reach"),
        ("correct", "correct_learner", 120, "bench.gpu.correct:learner"),
        ("correct", "correct_maps", 90, "bench.gpu.correct:maps_agree"),
        ("correct", "correct_resume", 180, "bench.gpu.correct:resume_is_exact"),
        ("correct", "correct_donation", 60, "bench.gpu.correct:state_is_donated"),
        ("job", "job_coma_4096", 240, "bench.gpu.job:coma_4096"),
        ("job", "job_coma_16384", 240, "bench.gpu.job:coma_16384"),
        ("job", "job_coma_4096_busy", 120, "bench.gpu.job:busy_4096"),
        ("job", "job_coma_16384_busy", 120, "bench.gpu.job:busy_16384"),
        ("score", "score_coma", 450, "bench.gpu.score:coma"),
        ("score", "score_ddpg", 360, "bench.gpu.score:ddpg"),
        ("score", "score_sac", 270, "bench.gpu.score:sac"),
        ("environments", "environments_coverage", 240, "bench.gpu.environments:coverage"),
        ("environments", "environments_snakes", 240, "bench.gpu.environments:snakes"),
        ("environments", "environments_reach", 240, "bench.gpu.environments:reach"),
    )
)
PARTS = tuple(dict.fromkeys(unit.part for unit in UNITS))
