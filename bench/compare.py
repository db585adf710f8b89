"""python -m bench.compare: environment and training against a baseline and PyTorch, in the cases of an entry.

Runs what bench.env_throughput and bench.train_throughput do, case after case (for coverage: q = 57 and q = 7, for
snakes: random opponents and level 2, for reach: the original's batch and the recommended one), and writes one JSON
file and a table. PyTorch is skipped, with a message, where it is not installed or has no learner for the
settings.
"""

import argparse
import importlib.util
import sys
from collections.abc import Sequence
from typing import Any

from bench import baselines, env_throughput, train_throughput
from bench.harness import measure, rates, tables
from envs_jax import base as environments
from envs_jax.base import closest, short_repr
from jaxrl.cli import flags as command_line
from jaxrl.cli.entry import exit_on_error
from jaxrl.common.errors import UsageError
from jaxrl.runtime import config as configuration

KIND = "compare"
SIZES = "1,64,1024,4096"


def _flags(parser: argparse.ArgumentParser) -> None:
    names = ", ".join(baselines.ENTRIES)
    parser.add_argument(
        "--env", default=env_throughput.DEFAULT_ENV, metavar="NAME", help=f"compare this environment, one of: {names}"
    )
    parser.add_argument("--config", metavar="FILE", help="train by this preset (default: the one of the "
                        "environment's entry, else the algorithm's)")  # fmt: skip
    measure.add_devices(parser)
    parser.add_argument("--seconds", default="10", metavar="X", help="see bench.train_throughput (default: 10)")
    measure.add_common(parser, SIZES)


def requests(
    parsed: argparse.Namespace, name: str, case: dict[str, Any], torch: bool
) -> tuple[env_throughput.Request, train_throughput.Request]:
    """Return the requests of both benchmarks for one case. Raises UsageError."""
    entry = baselines.find(parsed.env)
    if entry is None:
        raise UsageError(f"nothing to compare {short_repr(parsed.env)} with: {closest(parsed.env, baselines.ENTRIES)}")
    preset = parsed.config or entry.presets.get(name, entry.preset)
    flags = ["--algo", entry.algo, "--env", parsed.env, *(["--config", preset] if preset else [])]
    parsed_config = command_line.parse(flags, "python -m bench.compare").config
    assert parsed_config is not None
    config = configuration.apply_changes(parsed_config, {"devices": parsed.devices, **case})
    num_envs = measure.sizes(parsed, SIZES)
    rounds = measure.rounds(parsed)
    rollout = env_throughput.Request(
        env=parsed.env,
        variants={"": config.env_settings},
        policy=entry.policy,
        num_envs=num_envs,
        rounds=rounds,
        min_seconds=1e-6 if parsed.quick else 0.2,
        devices=parsed.devices,
    )
    seconds = measure.positive(parsed.seconds, "--seconds")
    return rollout, train_throughput.Request(config, num_envs, seconds, rounds, torch=torch)


def run(parsed: argparse.Namespace, cases: dict[str, dict[str, Any]], argv: Sequence[str]) -> dict[str, Any]:
    """Measure all cases. Raises UserError."""
    result = measure.header(KIND, argv, parsed.quick)
    torch = importlib.util.find_spec("torch") is not None
    if not torch:
        result["notes"].append("PyTorch is not installed (pip install -e '.[torch]'): no PyTorch learner")
    requests_by_case = {name: requests(parsed, name, case, torch) for name, case in cases.items()}
    for note in result["notes"]:
        measure.say(note)
    measure.say("measuring the machine")
    first = next(iter(requests_by_case.values()))[1]
    machine_rates = rates.measure(train_throughput.network_width(first.config), quick=parsed.quick, rounds=first.rounds)
    result["rates"] = machine_rates.plain()
    result["cases"] = {}
    measured: list[env_throughput.Request] = []
    for name, (rollout, training) in requests_by_case.items():
        parts: dict[str, dict[str, Any]] = {}
        if rollout not in measured:
            measure.say(f"--- {name}: environment")
            measured.append(rollout)
            parts["environment"] = {"kind": env_throughput.KIND} | env_throughput.run(
                rollout, machine_rates, measure.say
            )
        measure.say(f"--- {name}: training")
        parts["training"] = {"kind": train_throughput.KIND} | train_throughput.run(training, machine_rates, measure.say)
        result["cases"][name] = parts
        result["notes"] += [f"{name}: {note}" for part in parts.values() for note in part["notes"]]
    return result


@exit_on_error
def main(argv: Sequence[str]) -> int:
    """Entry point; returns the exit code."""
    assert __doc__ is not None
    parser = measure.parser("python -m bench.compare", __doc__)
    _flags(parser)
    parsed = parser.parse_args(list(argv))
    if parsed.env not in baselines.ENTRIES:
        is_registered = parsed.env in environments.registered()
        advice = "it has no entry in bench.baselines" if is_registered else closest(parsed.env, baselines.ENTRIES)
        raise UsageError(f"nothing to compare {short_repr(parsed.env)} with: {advice}")
    entry = baselines.find(parsed.env)
    assert entry is not None
    cases = {name: dict(case) for name, case in entry.cases.items()}
    if parsed.quick:
        cases = dict([list(cases.items())[-1]])
    path = measure.output(parsed.out, KIND)
    with measure.fresh_compiles():
        result = run(parsed, cases, argv)
    measure.write(result, path)
    tables.show(result, path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
