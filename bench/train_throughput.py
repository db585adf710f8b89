"""python -m bench.train_throughput --algo coma --num_envs 1,64,1024: throughput of training.

Environment steps and updates per second of whole training iterations, compiling not included. All flags of training are
also accepted, such as --q 7 --hidden_size 64 or --config coma_quick."""

import argparse
import sys
import time
from collections.abc import Sequence
from typing import Any

from bench.harness import measure
from bench.harness.timing import measure_interleaved, stopwatch
from bench.harness.training import compile_block, iterations, measured_phase
from jaxrl.cli import flags as command_line
from jaxrl.cli.entry import exit_on_error
from jaxrl.common.errors import UsageError, UserError
from jaxrl.report.console import format_si
from jaxrl.runtime import memory_plan
from jaxrl.runtime.build import build_run
from jaxrl.runtime.config import Config

KIND = "train_throughput"
SIZES = "1,64,1024"
UNNAMED_LENGTH = 10**6  # environment steps of a run whose length nobody named: a few of its iterations are timed


def run(config: Config, num_envs: Sequence[int], rounds: int, say: measure.Say) -> dict[str, Any]:
    """Measure; the entries "algo", "env", "settings", "rows" and "notes" of a result.

    Raises UserError: no size can be measured.
    """
    rows: list[dict[str, Any]] = []
    notes: list[str] = []
    error: UserError | None = None
    for size in num_envs:
        say(f"{size:,} environments: compiling an iteration")
        try:
            rows.append(measure_size(config.with_run(num_envs=size), rounds))
        except UserError as refused:
            error = refused
            notes.append(f"skipped {size:,} environments: {refused}")
            say(notes[-1])
    if not rows and error is not None:
        raise error
    settings = {**config.env_settings, **config.algo_settings}
    return {"algo": config.algo, "env": config.env, "settings": settings, "rows": rows, "notes": notes}


def measure_size(config: Config, rounds: int) -> dict[str, Any]:
    """Return the row of one number of environments. Raises UserError: they do not fit."""
    built = build_run(config)
    began = time.perf_counter()
    block = compile_block(built)
    compile_seconds = time.perf_counter() - began
    needed = memory_plan.compiled_bytes(block)
    memory_plan.check_fits(needed, built.limit, built.trainer.shapes(), built.config, built.algo)
    timing = measure_interleaved([stopwatch("iteration", iterations(built, block), 0.1)], rounds)["iteration"]
    phase = measured_phase(built.algo)
    layout = built.trainer.layout
    return {
        "num_envs": layout.num_envs,
        "devices": layout.devices,
        "iteration": timing.plain(),
        "env_steps_per_second": phase.steps * layout.num_envs / timing.median,
        "updates_per_second": phase.updates / timing.median,
        "compile_seconds": compile_seconds,
        "bytes_per_device": needed,
    }


# Command line


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, Config]:
    """Parse the command line. Raises UsageError."""
    assert __doc__ is not None
    bench_parser = command_line.Parser(prog="python -m bench.train_throughput", add_help=False)
    measure.add_common(bench_parser, SIZES)
    parsed, others = bench_parser.parse_known_args(list(argv))
    if any(word in ("-h", "--help") for word in others):
        print(bench_parser.format_help(), __doc__.partition("\n\n")[2], sep="\n")
    request = command_line.parse(others, "python -m bench.train_throughput", __doc__)
    if request.resume is not None:
        raise UsageError("the benchmark starts no run and resumes none: give --algo or --config")
    config = request.config
    if not config.run.total_env_steps and not config.run.total_episodes:
        config = config.with_run(total_env_steps=UNNAMED_LENGTH)
    return parsed, config


@exit_on_error
def main(argv: Sequence[str]) -> int:
    """Entry point; returns the exit code."""
    parsed, config = parse(argv)
    path = measure.output(parsed.out, KIND)
    with measure.fresh_compiles():
        result = measure.header(KIND, argv, parsed.quick)
        for note in result["notes"]:
            measure.say(note)
        measured = run(config, measure.sizes(parsed, SIZES), measure.rounds(parsed), measure.say)
    measure.write(result | measured | {"notes": [*result["notes"], *measured["notes"]]}, path)
    for row in measured["rows"]:
        print(
            f"{row['num_envs']:,} environments: {format_si(row['env_steps_per_second'])} environment steps/s, "
            f"{format_si(row['updates_per_second'])} updates/s, compiled in {row['compile_seconds']:.0f} s"
        )
    print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
