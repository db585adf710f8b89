"""python -m bench.env_throughput --env coverage --q 57 --num_envs 1,64,1024,4096: throughput of environments.

Three stages, each containing the one before: rules (state, rewards, metrics), observation (all that a step returns, and
the critic's input), policy (a scripted policy acts). JAX on one device or several and the baseline, which runs one copy
at a time (in NumPy with as many BLAS threads as are fastest, one or all cores; or in the real simulator where there is
one), take turns in one run.
"""

import argparse
import dataclasses
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from bench import baselines
from bench.harness import measure, rollout_timing, threads
from bench.harness.timing import Sampler, Timing, measure_interleaved
from envs_jax import base as environments
from envs_jax.base import closest, short_repr
from envs_jax.batch import BatchedEnvironment, batched
from jaxrl.cli.entry import exit_on_error
from jaxrl.cli.flags import add_environment
from jaxrl.cli.process import divide_cores
from jaxrl.common.errors import UsageError, usage_errors
from jaxrl.report.console import format_si, gibibytes
from jaxrl.rl.data_parallel import largest_divisor
from jaxrl.runtime import memory_plan
from jaxrl.runtime.rollouts import scripted_names

KIND = "env_throughput"
DEFAULT_ENV = "coverage"
SIZES = "1,64,1024,4096"


@dataclasses.dataclass(frozen=True)
class Request:
    """Parameters of a measurement."""

    env: str  # registered name
    settings: Mapping[str, Any]  # of the environment
    policy: str  # scripted policy of both sides
    num_envs: Sequence[int]  # sizes
    rounds: int = 5  # samples of everything
    min_seconds: float = 0.2  # minimum seconds per sample
    baseline: bool = True  # whether to measure the baseline too
    # devices that share the environments, or fewer where they do not divide them; 0 = all of this machine
    devices: int = 1


def baseline_sampler(baseline: baselines.Baseline, min_seconds: float) -> Sampler:
    """Sample seconds per step of whole episodes of the baseline: the three stages, and "baseline reset"."""

    def time_call(function: Callable[..., Any], *arguments: Any) -> tuple[float, Any]:
        began = time.perf_counter()
        result = function(*arguments)
        return time.perf_counter() - began, result

    def sample() -> dict[str, float]:
        act = observe = step = measured = resetting = 0.0
        episodes = steps = 0
        while act + observe + step + measured < min_seconds:
            resetting += time_call(baseline.reset)[0]
            episodes = episodes + 1
            over = False
            while not over:
                seconds, action = time_call(baseline.act)
                act += seconds
                observe += time_call(baseline.observe, action)[0]
                seconds, over = time_call(baseline.step, action)
                step += seconds
                measured += time_call(baseline.measure)[0]
                steps += 1
        return {
            "baseline without metrics": step / steps,
            "baseline rules": (step + measured) / steps,
            "baseline observation": (step + measured + observe) / steps,
            "baseline policy": (step + measured + observe + act) / steps,
            "baseline reset": resetting / episodes,
        }

    return sample


def baseline_threads(sampler: Sampler, rounds: int) -> tuple[int | None, str]:
    """Set NumPy's threads to those that are best for the baseline; return their number, None if unknown, and a note."""
    set_threads = threads.blas_setter()
    choices = (1, threads.cores())
    if set_threads is None:
        return None, "the baseline's BLAS threads cannot be set here: they are as the environment variables say"
    thread_count = threads.choose_threads(lambda: sampler()["baseline policy"], set_threads, choices, min(rounds, 3))
    return thread_count, threads.note(thread_count, choices, "BLAS")


def find_baseline(request: Request, notes: list[str]) -> baselines.Baseline | None:
    """Return what JAX is compared with, None where there is nothing; `notes` then gets the reason.

    Raises UsageError: the baseline lacks settings that were asked for.
    """
    if not request.baseline:
        return None
    entry = baselines.find(request.env)
    if entry is None:
        notes.append(f"'{request.env}' has no baseline (see bench.baselines): only JAX is measured")
        return None
    try:
        return entry.baseline(dict(request.settings), request.policy, 0)
    except ValueError as error:
        defaults: Any = environments.make(request.env)  # a dataclass
        if request.settings != dataclasses.asdict(defaults):
            raise UsageError(f"{error}, or give --no_baseline") from None
        notes.append(f"no baseline for the default settings ({error}): only JAX is measured")
        return None


def run(request: Request, say: measure.Say) -> dict[str, Any]:
    """Measure; the entries "env", "settings", "policy", "rows", "baseline" and its facts, and "notes" of a result."""
    present = jax.local_device_count()
    if request.devices > present:
        raise UsageError(f"--devices {request.devices}: this machine has {present}, choose at most that many")
    request = dataclasses.replace(request, devices=request.devices or present)
    env = make_env(request)
    notes: list[str] = []
    groups = group_sizes(request, env, notes)
    sampler = None
    thread_count = None
    played = find_baseline(request, notes)
    if played is not None:
        sampler = baseline_sampler(played, request.min_seconds)
        thread_count, remark = baseline_threads(sampler, request.rounds)
        notes += [*played.notes, remark]
    for note in notes:
        say(note)
    rows: list[dict[str, Any]] = []
    baseline: dict[str, Any] = {}
    for (together, devices), sizes in groups.items():
        say(f"measuring {together:,} environments at a time")
        timer = rollout_timing.EnvTimer(env, together, request.policy, devices=devices)
        samplers = timer.samplers("", request.min_seconds)
        timings = measure_interleaved([*([sampler] if sampler else []), *samplers], request.rounds)
        rows += [_make_row(timer, size, devices, timings) for size in sizes]
        names = [name for name in timings if name.startswith("baseline ")]
        baseline |= {name.removeprefix("baseline "): measure.rate(timings[name], 1) for name in names}
    rows.sort(key=lambda row: row["num_envs"])
    return {
        "env": request.env,
        "settings": dict(request.settings),
        "policy": request.policy,
        "rows": rows,
        "baseline": baseline or None,
        "baseline_name": played.name if played else None,
        "baseline_threads": thread_count,
        "notes": notes,
    }


def make_env(request: Request) -> BatchedEnvironment:
    """Return the environment as training would take it on this device. Raises UsageError."""
    with usage_errors():
        env = batched(environments.make(request.env, **request.settings).for_this_device())
    if request.policy not in scripted_names(env):
        raise UsageError(f"unknown policy {short_repr(request.policy)}: {closest(request.policy, scripted_names(env))}")
    return env


def group_sizes(request: Request, env: BatchedEnvironment, notes: list[str]) -> dict[tuple[int, int], list[int]]:
    """Return the sizes by (environments stepped at a time, devices); `notes` get what is left out or cut.

    Sizes that are stepped in parts run the program of a part: it is measured once.
    """
    limit = memory_plan.free_memory(jax.local_devices()[0], request.devices)
    env_bytes = rollout_timing.sizes(env)
    groups: dict[tuple[int, int], list[int]] = {}
    for num_envs in request.num_envs:
        devices = largest_divisor(num_envs, request.devices)
        each = num_envs // devices
        together = devices * rollout_timing.together(env_bytes, each, limit, env.spec.fixed_horizon)
        if not together:
            needed = gibibytes(each * rollout_timing.COPIES * (env_bytes.state + env_bytes.timestep))
            notes.append(
                f"skipped {num_envs:,} environments: stepping them together needs {needed}, and {gibibytes(limit)} may "
                "be used"
            )
            continue
        if together < num_envs:
            notes.append(f"{num_envs:,} environments: stepped {together} at a time, episode after episode")
        groups.setdefault((together, devices), []).append(num_envs)
    return groups


def _make_row(
    timer: rollout_timing.EnvTimer, num_envs: int, devices: int, timings: Mapping[str, Timing]
) -> dict[str, Any]:
    stages: dict[str, Any] = {}
    for stage in rollout_timing.STAGES:
        entry = measure.rate(timings[stage], timer.num_envs)
        entry["compile_seconds"] = timer.compile_seconds[stage]
        entry["temporary_bytes_per_env"] = timer.temporary[stage]
        if f"baseline {stage}" in timings:
            entry["times_baseline"] = entry["rate"] * timings[f"baseline {stage}"].median
        stages[stage] = entry
    return {
        "num_envs": num_envs,
        "together": timer.num_envs,
        "devices": devices,
        "agents": timer.env.spec.num_agents,
        "steps": timer.env.spec.horizon,
        "state_bytes_per_env": rollout_timing.sizes(timer.env).state,
        "reset": measure.rate(timings["reset"], timer.num_envs),
        "compile_seconds": sum(timer.compile_seconds.values()),
        "stages": stages,
    }


def describe(row: Mapping[str, Any]) -> str:
    """Return a line of text: steps per second of each stage, and how many times as many as the baseline's."""
    cells = []
    for stage, entry in row["stages"].items():
        times = f" ({entry['times_baseline']:.3g} times the baseline)" if "times_baseline" in entry else ""
        cells.append(f"{stage} {format_si(entry['rate'])} steps/s{times}")
    return f"{row['num_envs']:,} environments: {', '.join(cells)}"


# Command line


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, Request]:
    """Parse the command line. Raises UsageError."""
    assert __doc__ is not None
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--env", default=DEFAULT_ENV)
    env = first.parse_known_args(list(argv))[0].env
    parser = measure.parser("python -m bench.env_throughput", __doc__)
    add = parser.add_argument
    add("--env", default=DEFAULT_ENV, metavar="NAME", help=f"measure this environment (default: {DEFAULT_ENV})")
    add("--policy", metavar="NAME", help="act by this scripted policy in the third stage (default: random)")
    add("--no_baseline", action="store_true", help="measure only JAX")
    measure.add_devices(parser)
    measure.add_common(parser, SIZES)
    settings_of = add_environment(parser, env)
    parsed = parser.parse_args(list(argv))
    entry = baselines.find(env)
    request = Request(
        env=env,
        settings=settings_of(vars(parsed)),
        policy=parsed.policy or (entry.policy if entry else "random"),
        num_envs=measure.sizes(parsed, SIZES),
        rounds=measure.rounds(parsed),
        min_seconds=1e-6 if parsed.quick else 0.2,
        baseline=not parsed.no_baseline,
        devices=parsed.devices,
    )
    return parsed, request


@exit_on_error
def main(argv: Sequence[str]) -> int:
    """Entry point; returns the exit code."""
    parsed, request = parse(argv)
    if request.devices > 1:
        divide_cores(request.devices)
    path = measure.output(parsed.out, KIND)
    with measure.fresh_compiles():
        result = measure.header(KIND, argv, parsed.quick)
        for note in result["notes"]:
            measure.say(note)
        measured = run(request, measure.say)
    measure.write(result | measured | {"notes": [*result["notes"], *measured["notes"]]}, path)
    for row in measured["rows"]:
        print(describe(row))
    print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
