"""python -m bench.studies.ablation FILE.yaml: what each option of a preset contributes, over several seeds.

The file names a preset, how long each run trains, what is evaluated, and variants: a name and the flags that differ.
Every variant is trained with every seed, a few at a time, and evaluated on held-out episodes. The result is written
after each run; started again, it continues with the missing runs.
"""

import concurrent.futures
import json
import os
import shlex
import statistics
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.harness import measure
from jaxrl.cli.entry import exit_on_error
from jaxrl.cli.values import parse_int
from jaxrl.common.errors import UsageError, UserError
from jaxrl.common.files import write_atomically
from jaxrl.common.yaml_files import read_mapping

KIND = "ablation"
ENTRIES = {"preset", "train", "evaluate", "show", "variants"}
ROOT = Path(__file__).resolve().parents[2]


def read_plan(path: Path) -> dict[str, Any]:
    """Read a plan: "preset", flags "train" and "evaluate", "show" {column: [match, metric]}, "variants".

    Raises:
        UsageError: it cannot be read, or is no plan.
    """
    asked = read_mapping(path, "plan")
    if set(asked) != ENTRIES:
        raise UsageError(f"{path} must have the entries {', '.join(sorted(ENTRIES))} and no others")
    flags = [asked["preset"], asked["train"], asked["evaluate"]]
    if isinstance(asked["variants"], dict):
        flags += asked["variants"].values()
    if not (isinstance(asked["variants"], dict) and all(isinstance(text, str) for text in flags)):
        raise UsageError(f"{path}: preset, train, evaluate and every variant must be text (flags), variants a mapping")
    try:
        for text in flags:
            shlex.split(text)
    except ValueError as error:
        raise UsageError(f"{path}: flags cannot be split into words ({error}): close the quote") from None
    shown = asked["show"].values() if isinstance(asked["show"], dict) else [None]
    if not all(isinstance(column, list) and len(column) == 2 for column in shown):
        raise UsageError(f"{path}: 'show' must map each column to [match or policy, metric]")
    return asked


def trial(asked: dict[str, Any], flags: str, seed: int, runs: Path) -> dict[str, Any]:
    """Train and evaluate one variant with one seed: its run, steps, updates and scores.

    Raises:
        UserError: a process failed.
    """

    def call(module: str, words: list[str]) -> str:
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        command = [sys.executable, "-m", module, *words]
        environment = os.environ | {"PYTHONPATH": path}
        # In a session of its own: Ctrl-C would end a training cleanly, which would then count as complete.
        done = subprocess.run(command, capture_output=True, text=True, env=environment, start_new_session=True)
        if done.returncode:
            raise UserError(f"{' '.join(command[1:])} failed: {(done.stderr.strip() or done.stdout).splitlines()[-1]}")
        return done.stdout

    words = [*shlex.split(asked["train"]), *shlex.split(flags), "--seed", str(seed), "--runs", str(runs)]
    said = call("jaxrl.train", ["--config", asked["preset"], *words])
    run = Path(next(line for line in said.splitlines() if line.startswith("run directory: ")).partition(": ")[2])
    scores = run / "ablation.json"
    call("jaxrl.evaluate", [str(run), *shlex.split(asked["evaluate"]), "--json", str(scores)])
    rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    last = [row for row in rows if "episodes" in row][-1]  # a line of the last evaluation may follow
    evaluation = json.loads(scores.read_text())
    return {
        "env_steps": last["env_steps"],
        "updates": last["updates"],
        "scores": {
            column: _find(evaluation, match, metric)["mean"] for column, (match, metric) in asked["show"].items()
        },
    }


def _find(evaluation: dict[str, Any], match: str, metric: str) -> Any:
    """Return the figures of a metric against a player, or of a policy where there are no matches.

    Raises:
        UserError: the evaluation does not have them.
    """
    found = {f"{entry['first']} against {entry['second']}": entry for entry in evaluation.get("matches") or ()}
    found = found or evaluation["policies"]
    if match not in found or metric not in found[match]:
        raise UserError(f"the evaluation has no {metric} of '{match}', only {', '.join(found)}")
    values = found[match][metric]
    return {part: value[-1] if isinstance(value, list) else value for part, value in values.items()}


def table(result: dict[str, Any]) -> str:
    """Return Markdown: mean over seeds, and the range, of every variant."""
    columns = list(result["plan"]["show"])
    lines = [f"| variant | {' | '.join(columns)} | environment steps |", "|" + "---|" * (len(columns) + 2)]
    for name, entry in result["variants"].items():
        trials = list(entry["seeds"].values())
        if not trials:
            continue
        cells = []
        for column in columns:
            values = [one["scores"][column] for one in trials]
            cells.append(f"{statistics.mean(values):.3g} ({min(values):.3g} to {max(values):.3g})")
        steps = statistics.mean(one["env_steps"] for one in trials)
        lines.append(f"| {name} | {' | '.join(cells)} | {steps:,.0f} |")
    return "\n".join(lines) + "\n"


def former(path: Path, asked: dict[str, Any]) -> dict[str, Any]:
    """{variant: {"flags", "seeds": {seed: trial}}}, with the results of an earlier call for the same flags.

    Raises:
        UserError: the file is of another benchmark or plan.
    """
    kept: dict[str, Any] = {}
    if path.exists():
        earlier = measure.read(path)
        plan = earlier.get("plan") if isinstance(earlier.get("variants"), dict) else None
        former_plan = plan if isinstance(plan, dict) and earlier["kind"] == KIND else {}
        if any(former_plan.get(name) != asked[name] for name in ENTRIES - {"variants"}):
            raise UsageError(f"{path} holds results of something else: choose another --out, or move it away")
        kept = earlier["variants"]
    found = {}
    for name, flags in asked["variants"].items():
        same = name in kept and kept[name]["flags"] == flags
        found[name] = {"flags": flags, "seeds": kept[name]["seeds"] if same else {}}
    return found


@exit_on_error
def main(argv: Sequence[str]) -> int:
    """Entry point; returns the exit code."""
    assert __doc__ is not None
    flags = measure.parser("python -m bench.studies.ablation", __doc__)
    flags.add_argument("plan", metavar="FILE", help="plan of the study")
    flags.add_argument("--seeds", default="1,2,3", metavar="N,M,...", help="(default: 1,2,3)")
    flags.add_argument("--jobs", default="2", metavar="N", help="runs at a time (default: 2)")
    flags.add_argument("--runs", default="runs", metavar="DIR", help="folder of the runs (default: runs)")
    flags.add_argument("--out", metavar="FILE", help="JSON file to write or continue; a table goes next to it")
    flags.add_argument("--note", default="", help="a sentence kept with the figures, such as what else was running")
    parsed = flags.parse_args(list(argv))
    asked = read_plan(Path(parsed.plan))
    seeds = measure.parse_list(parsed.seeds, "--seeds", 0, 2**31)
    jobs = parse_int(parsed.jobs, "--jobs", 1, 64)
    path = measure.output(parsed.out, KIND)
    result = measure.header(KIND, argv, False, "studies.ablation") | {"plan": asked, "note": parsed.note, "jobs": jobs}
    result["notes"] = []  # speed is not measured
    result["variants"] = former(path, asked)
    lock = threading.Lock()

    def work(seed: int, name: str) -> None:
        entry = result["variants"][name]
        found = trial(asked, entry["flags"], seed, Path(parsed.runs))
        with lock:
            entry["seeds"][str(seed)] = found
            measure.write(result, path)
            write_atomically(path.with_suffix(".md"), table(result))
            measure.say(f"{name}, seed {seed}: {found['scores']}")

    missing = [(s, n) for s in seeds for n, entry in result["variants"].items() if str(s) not in entry["seeds"]]
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        try:
            for future in [pool.submit(work, *one) for one in missing]:
                future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)  # current runs finish and are kept
            raise
    print(table(result), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
