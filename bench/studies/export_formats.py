"""python -m bench.studies.export_formats: size and time of the formats of `jaxrl.export`, for policies of presets.

Fresh networks of the presets' sizes act greedily on first time steps of their environments, one and 64 at a time;
samples are taken in turns. "policy" is `jaxrl.Policy` itself. Writes a JSON file and a table beside it.
"""

import json
import sys
import tempfile
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.export
import numpy as np
import onnxruntime

from bench.harness import measure
from bench.harness.timing import measure_interleaved, stopwatch
from envs_jax.base import TimeStep
from jaxrl.cli.entry import exit_on_error
from jaxrl.cli.flags import parse
from jaxrl.evaluation.policy import Policy
from jaxrl.integrations.export.formats import FORMATS, export
from jaxrl.runtime.build import unchecked_run

KIND = "export_formats"
PRESETS = ("coma", "sac", "ddpg")
BATCHES = (1, 64)
JIDI = ("ddpg",)
SLOW = "times are too long, and differ by factors between samples"  # where rates are too low


def policy_of(preset: str, quick: bool) -> Policy:
    """Return a fresh policy of a preset."""
    words = ["--config", preset, "--devices", "1", *(["--hidden_size", "8"] if quick else [])]
    setup = unchecked_run(parse(words, f"python -m bench.studies.{KIND}").config)
    params = jax.jit(lambda key: setup.algo.policy(setup.algo.init(key, None)))(jax.random.key(0))
    return Policy(setup.env.env, setup.algo, params, config=setup.config)


def first_steps(policy: Policy, batch: int) -> TimeStep:
    """Return first time steps [batch, ...] of the policy's environment."""
    return jax.jit(jax.vmap(lambda key: policy.env.reset(key)[1]))(jax.random.split(jax.random.key(1), batch))


def callers(policy: Policy, timestep: TimeStep, folder: Path) -> dict[str, Callable[[], Any]]:
    """Return a call of each format on a time step, from the files in subfolders."""
    leaves = jax.tree_util.tree_leaves_with_path(timestep)
    arrays = {jax.tree_util.keystr(path, simple=True, separator="."): np.asarray(leaf) for path, leaf in leaves}
    names = [row["name"] for row in json.loads((folder / "stablehlo" / "policy.json").read_text())["inputs"]]
    given = {name: arrays[name] for name in names}
    function = jax.jit(jax.export.deserialize(bytearray((folder / "stablehlo/policy.stablehlo").read_bytes())).call)
    session = onnxruntime.InferenceSession(str(folder / "onnx" / "policy.onnx"), providers=["CPUExecutionProvider"])
    agent = types.ModuleType("agent")
    agent.__file__ = str(folder / "numpy" / "agent.py")
    exec(compile(Path(agent.__file__).read_text(), agent.__file__, "exec"), vars(agent))
    found = {
        "policy": lambda: policy(timestep)[0],
        "stablehlo": lambda: function(*given.values()),
        "onnx": lambda: session.run(None, given)[0],
        "numpy": lambda: agent.act(**given),
    }
    wanted = np.asarray(found["policy"]())
    for name, call in found.items():
        np.testing.assert_allclose(np.asarray(call()), wanted, rtol=1e-3, atol=1e-3, err_msg=name)
    return found


def run(preset: str, rounds: int, least: float, quick: bool) -> dict[str, Any]:
    """Measure a preset: "bytes" of each format's files, and "seconds" per call by format and batch size."""
    policy = policy_of(preset, quick)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        formats = [form for form in FORMATS if form != "jidi" or preset in JIDI]
        sizes = {form: sum(x.stat().st_size for x in export(policy, form, folder / form)) for form in formats}
        samplers = []
        for batch in BATCHES:
            calls = callers(policy, first_steps(policy, batch), folder)
            samplers += [stopwatch(f"{form} {batch}", call, least) for form, call in calls.items()]
        timings = measure_interleaved(samplers, rounds)
    parameters = sum(x.size for x in jax.tree.leaves(policy.params))
    seconds = {name: timing.plain() for name, timing in timings.items()}
    return {"preset": preset, "parameters": parameters, "bytes": sizes, "seconds": seconds}


def table(result: dict[str, Any]) -> str:
    """Return the table of a result in Markdown."""
    machine = result["machine"]
    versions = ", ".join(f"{name} {result['versions'][name]}" for name in result["versions"])
    lines = [
        f"`{result['command']}`  ",
        f"{machine['processor']}, {machine['cores']} cores, {machine['device']}, {versions}, {machine['started']}, "
        f"load {machine['load']:.1f}; medians of {result['rounds']} samples  ",
        "",
        "| policy | parameters | format | KiB on disk | µs per call, batch 1 | µs per call, batch 64 |",
        "|---|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        for form in ("policy", *row["bytes"]):
            times = [row["seconds"].get(f"{form} {batch}") for batch in BATCHES]
            shown = " | ".join(f"{1e6 * time['median']:,.0f}" if time else "" for time in times)
            size = f"{row['bytes'][form] / 2**10:,.0f}" if form in row["bytes"] else ""
            lines.append(f"| {row['preset']} | {row['parameters']:,} | {form} | {size} | {shown} |")
    return "\n".join([*lines, "", *(f"- {note}" for note in result["notes"])]).rstrip() + "\n"


@exit_on_error
def main(argv: Sequence[str]) -> int:
    """Entry point; returns the exit code."""
    assert __doc__ is not None
    parser = measure.parser(f"python -m bench.studies.{KIND}", __doc__)
    parser.add_argument("--rounds", default="7", metavar="N", help="samples of everything, in turns (default: 7)")
    parser.add_argument("--out", metavar="FILE", help="JSON file to write (default: a new one under bench/results/)")
    parser.add_argument("--quick", action="store_true", help="a rehearsal in seconds: the figures mean nothing")
    flags = parser.parse_args(list(argv))
    path = measure.output(flags.out, KIND)
    result = measure.header(f"studies.{KIND}", argv, flags.quick) | {"kind": KIND}
    result["notes"] = [note.replace("all figures will be too low", SLOW) for note in result["notes"]]
    rounds = 1 if flags.quick else measure.rounds(flags.rounds)
    least = 1e-6 if flags.quick else 0.1
    versions = {"jax": jax.__version__, "numpy": np.__version__, "onnxruntime": onnxruntime.__version__}
    rows = [run(preset, rounds, least, flags.quick) for preset in PRESETS]
    result |= {"rounds": rounds, "versions": versions, "rows": rows}
    measure.write(result, path)
    path.with_suffix(".md").write_text(table(result))
    print(table(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
