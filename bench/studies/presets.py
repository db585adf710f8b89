"""python -m bench.studies.presets --preset coma_quick --preset "ppo --env coverage": presets at equal missions.

Trains each preset for several seeds in a process of its own, one after another on one device, and evaluates them and
the scripted policies on the same held-out episodes: the interval of learned ones is over seeds, that of the others over
episodes. CPU seconds are of the whole training process, with imports, compiling and the selection episodes.
"""

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.harness import measure
from bench.harness.training import train
from bench.studies.learning import of_selection
from jaxrl.cli.entry import exit_on_error
from jaxrl.cli.flags import parse
from jaxrl.cli.process import enable_compilation_cache
from jaxrl.common.errors import UsageError, UserError
from jaxrl.evaluation import policies, reports
from jaxrl.report.writer import read_metrics

KIND = "presets"
PRESETS = ("coma_quick", "ppo_coverage", "ppo_coverage --critic local")


def of_preset(preset: str, seeds: int, folder: Path, episodes: int) -> dict[str, Any]:
    """Train and evaluate one preset."""
    one_core = {"JAX_NUM_CPU_DEVICES": "1"}
    run, spent = train(shlex.split(preset), folder, one_core, num_seeds=seeds, seed=1, devices=1, max_seconds=0)
    subject = policies.load_run(run)
    report = reports.evaluate(subject, [name for name in subject.policies if name != "sampled"], episodes)
    score = report["score"]
    keys = ("mean", "ci95", "low", "high")
    last = {
        name: {key: row[score][key][-1] for key in keys if key in row[score]}
        for name, row in report["policies"].items()
    }
    curves = [of_selection(read_metrics(path), f"eval/{score}") for path in sorted(run.glob("seed_*"))]
    settings = {name: value for name, value in report["settings"].items() if name != "runs"}
    return {"preset": preset, "policies": last, "selection": curves, "settings": settings} | spent


@exit_on_error
def main(argv: Sequence[str]) -> int:
    """Entry point; returns the exit code."""
    assert __doc__ is not None
    parser = measure.parser(f"python -m bench.studies.{KIND}", __doc__)
    parser.add_argument("--preset", action="append", metavar="'PRESET FLAGS'", help=f"default: {', '.join(PRESETS)}")
    parser.add_argument("--seeds", default="3", metavar="N", help="seeds (default: 3)")
    parser.add_argument("--episodes", default="200", metavar="N", help="held-out episodes (default: 200)")
    parser.add_argument("--runs", default="runs/presets", metavar="DIR", help="new folder for the runs")
    parser.add_argument("--out", metavar="FILE", help="JSON file to write (default: a new one under bench/results/)")
    parsed = parser.parse_args(list(argv))
    presets = parsed.preset or list(PRESETS)
    for preset in presets:
        try:
            words = shlex.split(preset)
        except ValueError as error:
            raise UsageError(f"--preset {preset!r}: {error}: close the quotation mark") from None
        parse(["--config", *words], parser.prog)  # refuses unknown ones
    seeds = measure.parse_int(parsed.seeds, "--seeds", 2, 1000)
    episodes = measure.parse_int(parsed.episodes, "--episodes", 1, 100_000)
    path, folder = measure.output(parsed.out, KIND), Path(parsed.runs).absolute()
    if folder.exists():
        raise UserError(f"--runs {parsed.runs} exists: name a new folder")
    result = measure.header(f"studies.{KIND}", argv, quick=False)
    result |= {"seeds": seeds, "episodes": episodes, "rows": []}
    enable_compilation_cache()
    for number, preset in enumerate(presets):
        row = of_preset(preset, seeds, folder / f"{number}", episodes)
        result["rows"].append(row)
        learned = row["policies"]["learned"]
        measure.say(f"{preset}: {learned['mean']:.3f} +- {learned['ci95']:.3f}, {row['cpu_seconds']:.0f} s of CPU")
        measure.write(result, path)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
