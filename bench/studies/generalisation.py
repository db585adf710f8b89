"""python -m bench.studies.generalisation RUN RUN RUN: runs of coverage in missions that they were not trained on.

Runs of several seeds meet other team sizes, communication ranges, rates of lost messages, terrains and resolutions,
one setting at a time; the other settings are those of training, but for teams, which start anywhere: the corners have
places for four. Greedy information gain (`ig`) and random flight are rolled out in the same held-out missions.
"""

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from bench.harness import measure
from envs_jax.coverage.types import TERRAINS
from jaxrl.cli.entry import exit_on_error
from jaxrl.common.errors import UsageError
from jaxrl.evaluation import policies
from jaxrl.evaluation.reports import rollout
from jaxrl.evaluation.statistics import Estimate, interval
from jaxrl.report.cache import enable_compilation_cache

KIND = "generalisation"
BASELINES = ("ig", "random")
CHANGES: dict[str, tuple[Any, ...]] = {
    "start": ("corners", "uniform"),
    "num_agents": (2, 4, 8),
    "communication_range": (0.0, 15.0, 25.0, 100.0),
    "failure_rate": (0.0, 0.1, 0.3, 0.5),
    "terrain": TERRAINS,
    "q": (7, 57),
}


def scores(
    subjects: Sequence[policies.EvalPolicy], changes: dict[str, Any], episodes: int
) -> dict[str, list[float] | Estimate]:
    """Return the final entropy: "learned" the mean of every run, of each baseline the interval over missions."""
    adapted = [subject.with_env_settings(changes) for subject in subjects]

    def final(subject: policies.EvalPolicy, names: Sequence[str]) -> dict[str, np.ndarray]:
        return {name: curves["entropy"][-1] for name, curves in rollout(subject, names, episodes, seed=0)}

    first = final(adapted[0], ("learned", *BASELINES))
    others = [final(subject, ("learned",))["learned"] for subject in adapted[1:]]
    learned = [float(values.mean()) for values in (first["learned"], *others)]
    return {"learned": learned} | {name: interval(first[name]) for name in BASELINES}


@exit_on_error
def main(argv: Sequence[str]) -> int:
    """Entry point; returns the exit code."""
    assert __doc__ is not None
    parser = measure.parser(f"python -m bench.studies.{KIND}", __doc__)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run of coverage; several: seeds of one configuration")
    parser.add_argument("--episodes", default="200", metavar="N", help="held-out missions (default: 200)")
    parser.add_argument("--settings", default=",".join(CHANGES), metavar="A,B", help="what to change (default: all)")
    parser.add_argument("--out", metavar="FILE", help="JSON file to write (default: a new one under bench/results/)")
    parsed = parser.parse_args(list(argv))
    enable_compilation_cache()
    episodes = measure.parse_int(parsed.episodes, "--episodes", 1, 100_000)
    names = parsed.settings.split(",")
    for name in names:
        if name not in CHANGES:
            raise UsageError(f"--settings: choose from {', '.join(CHANGES)}, not '{name}'")
    subjects = [policies.load_run(run) for run in parsed.runs]
    for subject in subjects:
        if subject.name != "coverage":
            raise UsageError(f"{subject.run_name} is a run of {subject.name}: name runs of coverage")
    path = measure.output(parsed.out, KIND)
    trained = subjects[0].settings
    result = measure.header(f"studies.{KIND}", argv, quick=False)
    result |= {"trained": trained, "runs": [subject.run_name for subject in subjects], "episodes": episodes, "rows": []}
    for name in names:
        for value in CHANGES[name]:
            row = {"setting": name, "value": value, "trained": trained[name] == value and name != "num_agents"}
            anywhere = {"start": "uniform"} if name == "num_agents" else {}
            row["entropy"] = scores(subjects, {name: value} | anywhere, episodes)
            result["rows"].append(row)
            learned = ", ".join(f"{score:.3f}" for score in row["entropy"]["learned"])
            measure.say(f"{name} {value}: {learned}")
            measure.write(result, path)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
