"""python -m jaxrl.evaluate RUN: held-out episodes, the learned policy beside every baseline.

All policies start from the same states, drawn with random numbers that training never uses, and are compared after
equal numbers of time steps. Prints a table and writes every metric as a curve over the episode to a JSON file.
Without RUN, scripted policies alone: python -m jaxrl.evaluate --policy ig --env coverage --q 7. The environment's
settings are flags; they may differ from those of the run as far as its networks fit.

Where two teams play, policies meet every scripted player of the other team, in both seats, and the ends of the games
count. python -m jaxrl.evaluate RUN --against RUN2 --out league.json lets runs and scripted players all meet each other
and rates them.

python -m jaxrl.evaluate RUN --simulator metaworld plays a run of reach in real Meta-World; --simulator jax plays the
same episodes here.
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.text import Text

from envs_jax.base import EnvSpec, shown
from jaxrl.cli.entry import exit_on_error
from jaxrl.common.errors import UsageError, UserError
from jaxrl.common.files import output, write_atomically
from jaxrl.evaluation import league
from jaxrl.evaluation.policies import LEARNED, Subject, load, parse
from jaxrl.evaluation.rollouts import by_task, held_out_key, interval
from jaxrl.integrations import metaworld
from jaxrl.report import tables
from jaxrl.report.cache import enable_compilation_cache
from jaxrl.runtime import run_directory
from jaxrl.runtime.config import read_run

FILE = "evaluation.json"  # in the run's directory
REAL_FILE = "evaluation_{simulator}.json"
FORMAT = 1
_EPISODES = 200
_MOST_EPISODES = 1_000_000
_UNBOUNDED = 10_000  # columns of what is no terminal


# Numbers


def fly(
    subject: Subject, names: Sequence[str], episodes: int, seed: int, devices: int = 1, chunk: int = 0
) -> Iterator[tuple[str, dict[str, np.ndarray]]]:
    """Policy after policy, curves {metric: float32[T + 1, episodes]} on held-out episodes 0 .. episodes - 1 of a seed.

    Where there are several tasks, the score stands there for each of them, too, see `evaluation.by_task`.

    Args:
        subject: environment and policies.
        names: some of `subject.policies`.
        episodes: how many.
        seed: of the held-out set.
        devices, chunk: see `Subject.evaluator`.
    """
    compiled = subject.evaluator(names, episodes, devices, chunk).compiled()
    for index, name in enumerate(names):
        curves = compiled(subject.parameters(index), held_out_key(seed, "evaluation"), subject.context)
        flown = {metric: np.asarray(curve)[:, :episodes] for metric, curve in curves.items()}
        yield name, by_task(subject.env.spec, flown)


def marks(steps: int) -> list[int]:
    """The steps that end a third, two thirds and all of an episode."""
    return sorted({max(1, round(steps * share / 3)) for share in (1, 2, 3)})


def summarise(curve: np.ndarray) -> dict[str, list[float | None]]:
    """{"mean", "std", "ci95"} over episodes at every step, of float[T + 1, N]; see `interval`."""
    rows = [interval(np.asarray(row, np.float64)) for row in curve]
    return {name: [_rounded(row[name]) for row in rows] for name in ("mean", "std", "ci95")}


def _rounded(number: float) -> float | None:
    """Seven significant digits, or None for what JSON cannot write."""
    return float(f"{number:.7g}") if math.isfinite(number) else None


def evaluate(
    subject: Subject,
    names: Sequence[str],
    episodes: int = 200,
    seed: int = 0,
    at: Sequence[int] = (),
    devices: int = 1,
    chunk: int = 0,
    say: Callable[[str], None] = lambda sentence: None,
    world: metaworld.World | None = None,
) -> dict[str, Any]:
    """Fly all policies; the content of evaluation.json.

    Args:
        subject: environment and policies.
        names: policies, of `subject.policies`.
        episodes, seed, devices, chunk: see `fly`.
        at: steps that the table shows, by default those of `marks`.
        say: gets one sentence per policy.
        world: where they are played, episode after episode of its list; by default the environment, held out.
    """
    spec = subject.env.spec
    flown = fly(subject, names, episodes, seed, devices, chunk)
    if world is not None:
        flown = metaworld.fly(subject, world, names, episodes, seed)
    at = list(at) or marks(spec.horizon)
    policies: dict[str, Any] = {}
    began = time.monotonic()
    for name, curves in flown:
        seconds = time.monotonic() - began
        say(f"{name}: {episodes:,} episodes in {seconds:.1f} s" + ("" if policies else ", compiling included"))
        policies[name] = {metric: summarise(curves[metric]) for metric in _order(subject, curves)}
        began = time.monotonic()
    return {
        **_head(subject, episodes, seed),
        **({} if world is None else {"simulator": world.description, "stream": world.stream}),
        "at": at,
        "moments": [subject.env.env.moment(step) for step in at],
        "policies": policies,
        "comparison": compare(policies, spec.score, spec.score_mode),
    }


def _head(subject: Subject, episodes: int, seed: int) -> dict[str, Any]:
    """What every report says of where its numbers come from."""
    return {
        "format": FORMAT,
        "run": subject.run_name,
        "algo": subject.config.algo if subject.config else None,
        "checkpoint": subject.step,
        "env": subject.name,
        "env_version": subject.env.env.version,
        "env_settings": subject.settings,
        "settings": subject.config.flat() if subject.config else None,
        "versions": run_directory.versions(),
        "seed": seed,
        "stream": "evaluation",
        "episodes": episodes,
        "score": subject.env.spec.score,
        "score_mode": subject.env.spec.score_mode,
        "labels": labels(subject.env.spec),
        "steps": subject.env.spec.horizon,
    }


def labels(spec: EnvSpec) -> dict[str, str]:
    """What a reader calls the metrics, {metric: "words, unit"}."""
    return {name: spec.label(name) for name in dict.fromkeys([spec.score, *spec.metrics, "return", "length"])}


def compete(
    subject: Subject,
    names: Sequence[str],
    games: int,
    seed: int = 0,
    devices: int = 1,
    chunk: int = 0,
    say: Callable[[str], None] = lambda sentence: None,
) -> dict[str, Any]:
    """All policies against every scripted player of the other team; the content of evaluation.json.

    Args:
        subject: environment and policies.
        names: policies, of `subject.policies`.
        games: of each match.
        seed, devices, chunk, say: see `evaluate`.
    """
    contest, spec = subject.env.env.contest, subject.env.spec
    assert contest is not None
    matches = [(name, rival) for name in names for rival in contest.rivals]
    played = league.play(subject, matches, {}, games, seed, devices, chunk)
    metrics = dict.fromkeys((spec.score, *spec.metrics, "return"))
    return {
        **_head(subject, games, seed),
        "set": {name: subject.settings[name] for name in contest.settings},
        "policies": {},  # curves over the episode, of which there are none
        "matches": league.results(played, list(metrics), say),
    }


def compete_in_league(
    wanted: league.League,
    games: int,
    seed: int = 0,
    devices: int = 1,
    chunk: int = 0,
    say: Callable[[str], None] = lambda sentence: None,
) -> dict[str, Any]:
    """All players of a league against each other; the content of the file of `--against`."""
    spec = next(iter(wanted.runs.values())).env.spec
    metrics = dict.fromkeys((spec.score, *spec.metrics))  # no returns, which differ with what a run was paid for
    matches = league.results(wanted.play(games, seed, devices, chunk), list(metrics), say)
    return {
        "format": FORMAT,
        "runs": {name: _head(run, games, seed) for name, run in wanted.runs.items()},
        "games": games,
        "score": spec.score,
        "labels": labels(spec),
        "anchor": wanted.anchor,
        "ratings": wanted.ratings(matches, games),
        "matches": matches,
    }


def _order(subject: Subject, curves: dict[str, Any]) -> list[str]:
    """Metrics, the score first, then that of each task; the length only where episodes differ in it."""
    spec = subject.env.spec
    of_tasks = [name for name in curves if name.startswith(f"{spec.score}/")]
    names = dict.fromkeys([spec.score, *of_tasks, *spec.metrics, "return", "length"])
    return [name for name in names if name in curves and not (name == "length" and spec.fixed_horizon)]


def compare(policies: dict[str, Any], score: str, mode: str) -> dict[str, Any] | None:
    """How the learned policy stands at the end of the episode; None where it or "random" is missing.

    Returns:
        policy: which one is compared; better: whether its mean score is better than random's; disjoint: whether the
        95 % intervals do not overlap; way: {scripted policy: share of the way from random to it that the learned
        policy goes, None where random is as good}; near: the scripted policies whose intervals overlap with the
        learned policy's; best: the scripted policy with the best score.
    """
    own = next((name for name in LEARNED if name in policies), None)
    if own is None or "random" not in policies:
        return None
    mean, half = ({name: result[score][key][-1] for name, result in policies.items()}
                  for key in ("mean", "ci95"))  # fmt: skip
    if any(value is None for value in (*mean.values(), *half.values())):
        return None
    sign = -1.0 if mode == "min" else 1.0
    gain = {name: sign * (value - mean["random"]) for name, value in mean.items()}
    others = [name for name in policies if name not in (*LEARNED, "random")]
    return {
        "policy": own,
        "better": gain[own] > 0,
        "disjoint": abs(gain[own]) > half[own] + half["random"],
        "way": {name: _rounded(gain[own] / gain[name]) if gain[name] > 0 else None for name in others},
        "near": [name for name in others if abs(gain[own] - gain[name]) <= half[own] + half[name]],
        "best": max(others, key=lambda name: gain[name]) if others else None,
    }


# Words


def table(report: dict[str, Any], width: int) -> list[Text]:
    """Lines of one block per metric, one row per policy, one column per moment."""
    steps, at, policies = report["steps"], report["at"], report["policies"]
    titles, rows = [], []
    for step, moment in zip(at, report["moments"], strict=True):
        words = f"step {step} of {steps}"
        titles.append(words if moment == f"step {step}" else f"{words}\n({moment})")
    for metric in next(iter(policies.values())):
        curves = {name: result[metric] for name, result in policies.items()}
        digits = _decimals([curve["mean"][step] for curve in curves.values() for step in at])
        rows.append(tables.Row(label(report, metric)))
        for name, curve in curves.items():
            cells = [_cell(curve["mean"][step], curve["ci95"][step], curve["std"][step], digits) for step in at]
            rows.append(tables.Row(name, cells, "bold cyan" if name == next(iter(LEARNED)) else ""))
    return tables.lines("policy", titles, rows, width)


def label(report: dict[str, Any], metric: str, unit: bool = True) -> str:
    """What a report calls a metric, with or without its unit."""
    name, _, task = metric.partition("/")
    words, comma, of = report.get("labels", {}).get(name, name).partition(", ")
    return words + (f" ({task})" if task else "") + (comma + of if unit else "")


def _decimals(means: list[float | None]) -> int:
    """Digits behind the point that show three significant ones of the largest mean."""
    largest = max((abs(mean) for mean in means if mean is not None), default=0.0)
    return min(max(2 - math.floor(math.log10(largest * 0.9999)), 0), 8) if largest else 3


def _cell(mean: float | None, half: float | None, deviation: float | None, digits: int) -> str:
    if mean is None or half is None or deviation is None:
        return "not finite"
    return f"{mean:.{digits}f} ±{half:.{digits}f} ({deviation:.{digits}f})"


def conclusion(report: dict[str, Any]) -> list[str]:
    """Sentences about the learned policy, or none."""
    found = report["comparison"]
    if found is None:
        return []
    score, own = report["score"], found["policy"]
    called = label(report, score, unit=False)
    final = {name: result[score] for name, result in report["policies"].items()}
    digits = _decimals([curve["mean"][-1] for curve in final.values()])
    words = {name: f"{name} {curve['mean'][-1]:.{digits}f} ±{curve['ci95'][-1]:.{digits}f}"
             for name, curve in final.items()}  # fmt: skip
    good = "small" if report["score_mode"] == "min" else "large"
    if found["disjoint"]:
        verdict = f"do not overlap: {own} is {'better' if found['better'] else 'worse'}"
    else:
        verdict = "overlap: only more episodes, or more training, could tell them apart"
    lines = [f"At the end, {called} ({good} is good): {words[own]}, {words['random']}. Their 95 % intervals {verdict}."]
    ways: list[str] = []
    beyond: list[str] = []
    near: list[str] = []
    for name, way in found["way"].items():
        number = words[name].removeprefix(f"{name} ") + (", the best scripted policy" if name == found["best"] else "")
        if way is None or way > 1:
            (near if name in found["near"] else beyond).append(f"{name} ({number})")
        else:
            ways.append(f"{100 * way:.0f} % of the way from random to {name} ({number})")
    if ways:
        lines.append(f"{own} goes {'; '.join(ways)}.")
    if near:
        lines.append(f"{own} cannot be told from {', '.join(near)}: the intervals overlap.")
    if beyond and found["better"]:
        lines.append(f"{own} is better than {', '.join(beyond)}.")
    return lines


def show(report: dict[str, Any], title: str) -> None:
    """Print table and conclusion to stdout: in colour for a terminal, aligned text otherwise."""
    where = f" in {report['simulator']}" if "simulator" in report else ""
    which = f"episodes, goals of the {report['stream']}" if where else "held-out episodes"
    _print(
        f"{title}{where}: {report['episodes']:,} {which}, seed {report['seed']}",
        "mean ± half of its 95 % interval (standard deviation over episodes), after equal numbers of time steps",
        lambda width: [table(report, width)],
        conclusion(report),
    )


def show_matches(report: dict[str, Any], title: str, headline: str) -> None:
    """The same for the matches of policies; the last words are about the one named `headline`."""
    matches = report["matches"]
    _print(
        f"{title}: {report['episodes']:,} held-out games of each pair, seed {report['seed']}",
        f"mean ± standard error; {', '.join(f'{name} {value}' for name, value in report['set'].items())}",
        lambda width: [league.match_table(matches, report["labels"], width)],
        league.verdicts(
            matches, headline, report["score"], report["score_mode"], label(report, report["score"], False)
        ),
    )


def show_league(report: dict[str, Any]) -> None:
    """The same for a league."""
    _print(
        f"League of {len(report['ratings'])} players, {report['games']:,} games of each pair",
        f"Elo with draws as half a point, {report['anchor']} fixed; below mean ± standard error, seen by the first",
        lambda width: league.league_tables(
            report["ratings"], report["matches"], report["score"], report["labels"], width
        ),
        [],
    )


def _print(heading: str, legend: str, shown: Callable[[int], list[list[Text]]], lines: list[str]) -> None:
    console = Console(highlight=False)
    if not console.is_terminal:
        print(heading, legend, *lines_of(shown(_UNBOUNDED)), *([""] if lines else []), *lines, sep="\n")
        return
    console.print(Text(heading, "bold"))
    console.print(Text(legend, "dim"))
    for row in lines_of(shown(console.width)):
        console.print(row, soft_wrap=True)
    for line in lines:
        console.print(Text(line))


def lines_of(blocks: list[list[Text]]) -> list[Text]:
    """Lines of tables, with an empty one before each."""
    return [line for block in blocks for line in (Text(), *block)]


# The verb


def _flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--episodes", metavar="N", help="held-out episodes per policy, or games per pair of players "
                        f"(default: {_EPISODES}, or what the environment asks for)")  # fmt: skip
    parser.add_argument("--policy", metavar="A,B,...", help="which policies: learned (best action), sampled (drawn, "
                        "not the best action), zero_code (collective: without its task code) or baselines; by default "
                        "all, or some baselines where teams compete; with --against: which scripted players take part"
                        )  # fmt: skip
    parser.add_argument("--against", metavar="RUN2", action="append", default=[],
                        help="a league of RUN, this run (repeat it for more) and the scripted players")  # fmt: skip
    parser.add_argument("--seed", default="0", metavar="N", help="of the held-out set (default: 0)")
    parser.add_argument("--at", metavar="K,L,...", help="steps to show; by default a third, two thirds and all")
    parser.add_argument(
        "--json",
        "--out",
        metavar="FILE",
        help=f"where to write the numbers (default: RUN/{FILE} for all policies "
        f"in the run's own environment, RUN/{REAL_FILE.format(simulator='NAME')} in a simulator, else nowhere)",
    )
    parser.add_argument("--devices", metavar="N", help="local devices to use (default: all)")
    parser.add_argument("--chunk", default="0", metavar="N",
                        help="most episodes flown at a time on a device; 0 = by their size (default: 0)")  # fmt: skip
    metaworld.add_flag(parser)


def whole(text: str, flag: str, low: int, high: int) -> int:
    """A whole number from the command line. Raises UsageError."""
    try:
        number = int(text)
    except ValueError:
        raise UsageError(f"{flag} must be a whole number, not {shown(text)}") from None
    if not low <= number <= high:
        bounds = f"lie between {low} and {high:,}" if low < high else f"be {low} here"
        raise UsageError(f"{flag} must {bounds}, not {shown(number)}")
    return number


def several(text: str) -> list[str]:
    """Words with commas between, each once."""
    return list(dict.fromkeys(text.replace(",", " ").split()))


def _own_file(wanted: Subject, names: Sequence[str], usual: Sequence[str]) -> Path | None:
    """Where a run keeps its evaluation: of the usual policies, in its own environment; None for anything else."""
    if wanted.run is None or wanted.config is None:
        return None
    contest = wanted.env.env.contest
    own = {**wanted.config.env_settings, **(contest.settings if contest else {})}
    return wanted.run / FILE if wanted.settings == own and set(names) == set(usual) else None


@exit_on_error
def main(argv: Sequence[str]) -> int:
    """Entry point; returns the exit code."""
    assert __doc__ is not None
    enable_compilation_cache()
    flags, read = parse(argv, "python -m jaxrl.evaluate", __doc__, _flags)
    episodes = 0 if flags.episodes is None else whole(flags.episodes, "--episodes", 1, _MOST_EPISODES)
    seed = whole(flags.seed, "--seed", 0, 2**32 - 1)
    chunk = whole(flags.chunk, "--chunk", 0, _MOST_EPISODES)
    present = jax.local_device_count()
    devices = present if flags.devices is None else whole(flags.devices, "--devices", 1, present)
    say = lambda line: print(line, file=sys.stderr)  # noqa: E731
    task = metaworld.own_task(flags)
    wanted = read() if task is None else read("task")
    if flags.against:
        if flags.simulator:
            raise UsageError("--against lets teams play, which no simulator has: leave --simulator out")
        return _league(wanted, flags, episodes, seed, devices, chunk, say)
    if flags.simulator:
        metaworld.reach_of(wanted)
        if flags.devices is not None:
            raise UsageError("--simulator plays on the first device, step by step: leave --devices out")
    wanted = _set_for_contest(wanted)
    contest = wanted.env.env.contest
    if contest and not contest.rivals:
        players = " ".join(f"--{name} {value}" for name, value in contest.settings.items())
        raise UsageError(f"nobody is there to play the other team: choose scripted players, such as {players}")
    usual = [*league.ranked(wanted), *contest.beside] if contest and wanted.run else list(wanted.policies)
    names = usual if flags.policy is None else several(flags.policy)
    if not names:
        raise UsageError(f"--policy names no policy: choose from {', '.join(wanted.policies)}")
    for name in names:
        wanted.check_policy(name)
    if contest and flags.at is not None:
        raise UsageError(f"--at shows steps of an episode; in '{wanted.name}' the end of games counts: leave it out")
    at = sorted(whole(word, "--at", 0, wanted.env.spec.horizon) for word in several(flags.at or ""))
    path = _own_file(wanted, names, usual)
    if flags.simulator and path:
        path = None if task else path.with_name(REAL_FILE.format(simulator=flags.simulator))
    if flags.json or path is not None:
        path = output(flags.json or str(path), "--json")
    world = None
    if flags.simulator:
        episodes = episodes or metaworld.EPISODES
        usual_lanes = metaworld.ARMS if flags.simulator == "metaworld" else episodes
        world = metaworld.world_of(flags.simulator, wanted, task, min(chunk or usual_lanes, episodes))
    if contest:
        report = compete(wanted, names, episodes or contest.games, seed, devices, chunk, say)
        show_matches(report, wanted.description, names[0])
    else:
        report = evaluate(wanted, names, episodes or _EPISODES, seed, at, devices, chunk, say, world)
        show(report, wanted.description)
    _write(path, report)
    return 0


def _set_for_contest(wanted: Subject) -> Subject:
    """With the settings that its environment's contest is played with, but for those that the user gave."""
    contest = wanted.env.env.contest
    settings = contest.settings if contest else {}
    return wanted.moved({name: value for name, value in settings.items() if name not in wanted.given})


def _league(
    wanted: Subject, flags: Any, episodes: int, seed: int, devices: int, chunk: int, say: Callable[[str], None]
) -> int:
    """The rest of `main` with --against."""
    if wanted.run is None:
        raise UsageError("--against plays a run against others: name the run first")
    if flags.at is not None:
        raise UsageError("--at shows steps of an episode, --against the end of games: leave one of them out")
    players = None if flags.policy is None else several(flags.policy)
    others = [
        load(run, config.env, config.env_settings, not flags.last) for run, config in map(read_run, flags.against)
    ]
    found = league.league([wanted, *others], players)
    path = output(flags.json, "--json") if flags.json else None
    report = compete_in_league(found, episodes or found.contest.games, seed, devices, chunk, say)
    show_league(report)
    _write(path, report)
    return 0


def _write(path: Path | None, report: dict[str, Any]) -> None:
    """Raises UserError."""
    if path is None:
        return
    try:
        write_atomically(path, json.dumps(report, indent=1, allow_nan=False) + "\n")
    except OSError as error:
        raise UserError(f"cannot write {path} ({error.strerror}): choose another file with --json") from None
    print(f"wrote {path}")


if __name__ == "__main__":
    sys.exit(main())
