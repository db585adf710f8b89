"""python -m bench.env_throughput --env coverage --q 57 --num_envs 1,64,1024,4096: throughput of environments.

Three stages, each containing the one before: rules (state, rewards, metrics), observation (all that a step returns, and
the critic's input), policy (a scripted policy acts). JAX on one device or several and the baseline, which runs one copy
at a time (in NumPy with as many BLAS threads as are fastest, one or all cores; or in the real simulator where there is
one), take turns in one run. --vary NAME=A,B
measures several values of one environment setting side by side, such as --vary map_backend=dense,windows.
"""

import argparse
import dataclasses
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from bench import baselines
from bench.harness import measure, rates, rollout_timing, threads
from bench.harness.timing import Sampler, Timing, measure_interleaved
from envs_jax import base as environments
from envs_jax.base import closest, short_repr
from envs_jax.batch import BatchedEnvironment, batched
from jaxrl.cli.entry import exit_on_error
from jaxrl.cli.flags import add_environment
from jaxrl.cli.values import add_int
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
    variants: Mapping[str, dict[str, Any]]  # {label: environment settings}; label "" if there is only one
    policy: str  # scripted policy of both sides
    num_envs: Sequence[int]  # sizes
    at_once: int = 0  # environments that a device steps at a time, 0 = as training would
    limit: int = 0  # bytes that may be used, 0 = what is free
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
    settings = next(iter(request.variants.values()))
    try:
        return entry.baseline(settings, request.policy, 0)
    except ValueError as error:
        defaults: Any = environments.make(request.env)  # a dataclass
        if settings != dataclasses.asdict(defaults):
            raise UsageError(f"{error}, or give --no_baseline") from None
        notes.append(f"no baseline for the default settings ({error}): only JAX is measured")
        return None


def run(request: Request, machine_rates: rates.Rates | None, say: measure.Say) -> dict[str, Any]:
    """Measure; the entries "env", "policy", "rows", "baseline", "baseline_threads" and "notes" of a result."""
    present = jax.local_device_count()
    if request.devices > present:
        raise UsageError(f"--devices {request.devices}: this machine has {present}, choose at most that many")
    request = dataclasses.replace(request, devices=request.devices or present)
    limit = request.limit or memory_plan.free_memory(jax.local_devices()[0], request.devices)
    groups, notes = _groups(request, limit)
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
    baseline: dict[str, Timing] = {}
    for (together, devices), members in groups.items():
        measured = _group(request, members, together, devices, sampler, machine_rates, say)
        rows += measured[0]
        baseline = measured[1] or baseline
    order = list(request.variants)
    rows.sort(key=lambda row: (order.index(row["variant"]), row["num_envs"]))
    named = {name.removeprefix("baseline "): measure.rate(timing, 1) for name, timing in baseline.items()}
    return {
        "env": request.env,
        "variants": dict(request.variants),
        "policy": request.policy,
        "limit_bytes": limit,
        "rows": rows,
        "baseline": named or None,
        "baseline_name": played.name if played else None,
        "baseline_threads": thread_count,
        "notes": notes,
    }


@dataclasses.dataclass(frozen=True)
class Member:
    """One variant in a group of measurements."""

    label: str  # the variant's
    env: BatchedEnvironment  # the batched environment
    env_bytes: rollout_timing.Bytes  # bytes of one copy
    num_envs: list[int]  # the sizes that this measurement covers
    chosen: dict[str, Any]  # settings that training changes for this device, such as the map backend


def _groups(request: Request, limit: int) -> tuple[dict[tuple[int, int], list[Member]], list[str]]:
    """Group measurements by environments per step, {(together, devices): members}; return also notes.

    Sizes that are stepped in parts run the program of a part: it is measured once.
    """
    groups: dict[tuple[int, int], list[Member]] = {}
    notes: list[str] = []
    for label, settings in request.variants.items():
        with usage_errors():
            requested: Any = environments.make(request.env, **settings)
        chosen = _choose_for_device(requested)
        env = batched(dataclasses.replace(requested, **chosen))
        if request.policy not in scripted_names(env):
            raise UsageError(
                f"unknown policy {short_repr(request.policy)}: {closest(request.policy, scripted_names(env))}"
            )
        env_bytes = rollout_timing.sizes(env)
        for num_envs in request.num_envs:
            devices = largest_divisor(num_envs, request.devices)
            together = devices * _together(request, env, env_bytes, num_envs // devices, limit)
            if not together:
                notes.append(f"skipped {_label(label, num_envs)}: {_too_large(env_bytes, num_envs // devices, limit)}")
                continue
            if together < num_envs:
                notes.append(f"{_label(label, num_envs)}: stepped {together} at a time, episode after episode")
            members = groups.setdefault((together, devices), [])
            same = next((member for member in members if member.label == label), None)
            if same is None:
                members.append(Member(label, env, env_bytes, [num_envs], chosen))
            else:
                same.num_envs.append(num_envs)
    return groups, notes


def _choose_for_device(env: Any) -> dict[str, Any]:
    """Return the settings that `Environment.for_this_device` changes, which training takes, too."""
    taken = env.for_this_device()
    names = [field.name for field in dataclasses.fields(env) if field.init]
    return {name: getattr(taken, name) for name in names if getattr(taken, name) != getattr(env, name)}


def _together(
    request: Request, env: BatchedEnvironment, env_bytes: rollout_timing.Bytes, num_envs: int, limit: int
) -> int:
    """Return how many of a device's `num_envs` environments are stepped at a time, 0 if none."""
    cut = env.spec.fixed_horizon
    if not request.at_once:
        return rollout_timing.together(env_bytes, num_envs, limit, cut)
    together = min(request.at_once, num_envs)
    if num_envs % together:
        raise UsageError(f"--at_once {together} does not divide --num_envs {num_envs}: choose a divisor")
    if together < num_envs and not cut:
        raise UsageError(f"episodes of '{request.env}' differ in length: --at_once cannot cut {num_envs} environments")
    return rollout_timing.together(env_bytes, together, limit, cut=False)


def _too_large(env_bytes: rollout_timing.Bytes, num_envs: int, limit: int) -> str:
    needed = num_envs * rollout_timing.COPIES * (env_bytes.state + env_bytes.timestep)
    return f"stepping them together needs {gibibytes(needed)}, and {gibibytes(limit)} may be used"


def _label(label: str, num_envs: int) -> str:
    return f"{num_envs:,} environments" + (f" ({label})" if label else "")


def _group(
    request: Request,
    members: Sequence[Member],
    together: int,
    devices: int,
    baseline: Sampler | None,
    machine_rates: rates.Rates | None,
    say: measure.Say,
) -> tuple[list[dict[str, Any]], dict[str, Timing]]:
    """Return rows of all variants with `together` environments at a time, the baseline measured in turns."""
    say(f"measuring {_label('', together)} at a time: compiling")
    timers = {
        member.label: rollout_timing.EnvTimer(member.env, together, request.policy, devices=devices)
        for member in members
    }
    seconds = max(sum(timer.compile_seconds.values()) for timer in timers.values())
    say(f"measuring {_label('', together)} at a time: compiled in {seconds:.1f} s, stepping")
    samplers = [s for label, timer in timers.items() for s in timer.samplers(f"{label} ", request.min_seconds)]
    timings = measure_interleaved([*([baseline] if baseline else []), *samplers], request.rounds)
    rows = []
    for member in members:
        stage_timings = {stage: timings[f"{member.label} {stage}"] for stage in (*rollout_timing.STAGES, "reset")}
        for num_envs in member.num_envs:
            rows.append(_row(timers[member.label], member, num_envs, devices, stage_timings, timings, machine_rates))
    return rows, {name: timing for name, timing in timings.items() if name.startswith("baseline ")}


def _row(
    timer: rollout_timing.EnvTimer,
    member: Member,
    num_envs: int,
    devices: int,
    stage_timings: Mapping[str, Timing],
    timings: Mapping[str, Timing],
    machine_rates: rates.Rates | None,
) -> dict[str, Any]:
    together = timer.num_envs
    env_bytes = member.env_bytes
    spec = member.env.spec
    stages: dict[str, Any] = {}
    for stage in rollout_timing.STAGES:
        entry = measure.rate(stage_timings[stage], together)
        entry["compile_seconds"] = timer.compile_seconds[stage]
        entry["temporary_bytes_per_env"] = timer.temporary[stage]
        entry["needed_bytes_per_step"] = env_bytes.bytes_needed(stage)
        if machine_rates is not None:
            entry["roofline"] = measure.fraction(
                entry["rate"] / devices, env_bytes.bytes_needed(stage), machine_rates.copy
            )
        if f"baseline {stage}" in timings:
            entry["times_baseline"] = entry["rate"] * timings[f"baseline {stage}"].median
        stages[stage] = entry
    return {
        "variant": member.label,
        "chosen_for_device": member.chosen,
        "num_envs": num_envs,
        "together": together,
        "devices": devices,
        "agents": spec.num_agents,
        "steps": spec.horizon,
        "state_bytes_per_env": env_bytes.state,
        "reset": measure.rate(stage_timings["reset"], together),
        "with_starts": _include_starts(stage_timings, together, spec.horizon),
        "compile_seconds": sum(timer.compile_seconds.values()),
        "stages": stages,
    }


def _include_starts(timings: Mapping[str, Timing], together: int, horizon: int) -> dict[str, float]:
    """Return steps per second of each stage where every episode also takes its start."""
    start = timings["reset"].median
    return {stage: together * horizon / (horizon * timings[stage].median + start) for stage in rollout_timing.STAGES}


def describe(row: Mapping[str, Any]) -> str:
    """Return a line of text: steps per second of each stage, and how many times as many as the baseline's."""
    cells = []
    for stage, entry in row["stages"].items():
        times = f" ({entry['times_baseline']:.3g} times the baseline)" if "times_baseline" in entry else ""
        cells.append(f"{stage} {format_si(entry['rate'])} steps/s{times}")
    return f"{_label(row['variant'], row['num_envs'])}: {', '.join(cells)}"


# Command line


def variants(settings: dict[str, Any], vary: str | None) -> dict[str, dict[str, Any]]:
    """Parse --vary NAME=A,B into {label: settings}; values take the type of the setting. Raises UsageError."""
    if vary is None:
        return {"": settings}
    name, _, values = vary.partition("=")
    if not values:
        raise UsageError(f"--vary must be NAME=A,B (one setting and its values), not {short_repr(vary)}")
    if name not in settings:
        raise UsageError(f"--vary: there is no environment setting {short_repr(name)}: {closest(name, settings)}")
    kind = type(settings[name])
    if kind not in (int, float, str):
        raise UsageError(f"--vary {name}: only settings that are one number or word can be varied")
    try:
        return {f"{name} {word}": settings | {name: kind(word)} for word in values.split(",")}
    except ValueError:
        raise UsageError(f"--vary {name}: {short_repr(values)} must be of type {kind.__name__}") from None


def _flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--env", default=DEFAULT_ENV, metavar="NAME", help=f"measure this environment (default: {DEFAULT_ENV})"
    )
    parser.add_argument(
        "--policy", metavar="NAME", help="act by this scripted policy in the third stage (default: random)"
    )
    parser.add_argument("--vary", metavar="NAME=A,B", help="measure several values of one environment setting")
    add_int(parser, "--at_once", 0, measure.MOST, 0, "step N environments per device at once (default: as many as "
            "training would; on a CPU 64, where episodes have one length)")  # fmt: skip
    parser.add_argument("--memory_gb", default="0", metavar="X", help="use up to X GiB (default: what is free)")
    parser.add_argument("--no_baseline", action="store_true", help="measure only JAX")
    measure.add_devices(parser)
    measure.add_common(parser, SIZES)


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, Request]:
    """Parse the command line. Raises UsageError."""
    assert __doc__ is not None
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--env", default=DEFAULT_ENV)
    env = first.parse_known_args(list(argv))[0].env
    parser = measure.parser("python -m bench.env_throughput", __doc__)
    _flags(parser)
    settings_of = add_environment(parser, env)
    parsed = parser.parse_args(list(argv))
    entry = baselines.find(env)
    request = Request(
        env=env,
        variants=variants(settings_of(vars(parsed)), parsed.vary),
        policy=parsed.policy or (entry.policy if entry else "random"),
        num_envs=measure.sizes(parsed, SIZES),
        at_once=parsed.at_once,
        limit=measure.gibibytes_of(parsed.memory_gb),
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
    path = measure.output(parsed.out, KIND)
    with measure.fresh_compiles():
        result = measure.header(KIND, argv, parsed.quick)
        for note in result["notes"]:
            measure.say(note)
        measure.say("measuring the machine")
        machine_rates = rates.measure(width=16, quick=parsed.quick, rounds=request.rounds)
        measured = run(request, machine_rates, measure.say)
    result |= {"rates": machine_rates.plain(), **measured, "notes": [*result["notes"], *measured["notes"]]}
    measure.write(result, path)
    for row in result["rows"]:
        print(describe(row))
    print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
