"""Tables of `python -m bench.peers`: `rows` makes Markdown from a result."""

import statistics
from collections.abc import Iterator
from typing import Any

from bench.peers import installs
from bench.peers.environments import ALONE
from jaxrl.report.console import format_si


def rows(data: dict[str, Any]) -> str:
    """Return the table of a result as Markdown, with the machine and the versions below it.

    A dash marks an environment that only runs one copy at a time.
    """
    make = {"environments": _environments, "learners": _learners}[data["work"]]
    head, *lines = make(data["rows"])
    body = [f"| {' | '.join(line)} |" for line in lines]
    return "\n".join([f"| {' | '.join(head)} |", f"|{'---|' * len(head)}", *body, "", *_remarks(data)])


def _remarks(data: dict[str, Any]) -> Iterator[str]:
    """Yield the machine, then versions and remark of each library that has rows."""
    machine = data["machine"]
    dash = f" (-: {ALONE})" if any(row.get("skipped") == ALONE for row in data["rows"]) else ""
    yield f"One core, {machine['processor']}, {machine['started'][:10]}{dash}:"
    yield ""
    for peer in dict.fromkeys(row["peer"] for row in data["rows"]):
        library = installs.PEERS[peer]
        installed = data["peers"][peer].get("packages", {})
        names = [
            name
            for name in installed
            if any(word.startswith(f"{name.replace('_', '-')}==") for word in library.packages)
        ]
        versions = [f"{name} {installed[name]}" for name in names]
        yield f"- {peer}: {', '.join([*versions, library.note] if library.note else versions)}"


def _environments(rows: list[dict[str, Any]]) -> Iterator[list[str]]:
    """Yield environment steps per CPU second by number of copies; then the best case's other figures."""
    sizes = sorted({row["num_envs"] for row in rows})
    heads = ["agent steps/s", "bytes per copy", "compile, s"]
    yield ["library", "environment", *(f"{size:,}" for size in sizes), *heads]
    for peer, name in dict.fromkeys((row["peer"], row["environment"]) for row in rows):
        by_size = {row["num_envs"]: row for row in rows if (row["peer"], row["environment"]) == (peer, name)}
        measured = [row for row in by_size.values() if "rate" in row]
        if not measured:
            yield [peer, name, by_size[min(by_size)]["skipped"], *[""] * (len(sizes) + len(heads) - 1)]
            continue
        best = max(measured, key=lambda row: row["rate"])
        compiled = [row["compile_seconds"] for row in measured if "compile_seconds" in row]
        yield [
            peer,
            name,
            *(_cell(by_size.get(size, {})) for size in sizes),
            format_si(best["rate"] * best["agents"]),
            f"{best['bytes_per_copy']:,.0f}" if "bytes_per_copy" in best else "",
            f"{statistics.median(compiled):.0f}" if compiled else "",
        ]


def _cell(row: dict[str, Any]) -> str:
    return format_si(row["rate"]) if "rate" in row else row.get("skipped", "").replace(ALONE, "-")


def _learners(rows: list[dict[str, Any]]) -> Iterator[list[str]]:
    """Yield medians over seeds, and the range of the seconds to the score."""
    yield [
        "algorithm", "library", "updates per CPU second", "CPU seconds to the score (from, to)", "of it compiling",
        "environment steps to it", "seeds that reach it",
    ]  # fmt: skip
    for algo, peer in sorted(dict.fromkeys((row["algo"], row["peer"]) for row in rows)):
        seeds = [row for row in rows if (row["algo"], row["peer"]) == (algo, peer)]
        runs = [row for row in seeds if "scores" in row]
        if not runs:
            yield [algo, peer, seeds[0]["skipped"], "", "", "", ""]
            continue
        speeds = [row["updates_per_second"] for row in runs if row["updates_per_second"]]
        reached = [row for row in runs if row["cpu_to_score"] is not None]
        seconds = sorted(row["cpu_to_score"] for row in reached)
        steps = [row["env_steps_to_score"] for row in reached]
        yield [
            algo,
            peer,
            f"{statistics.median(speeds):,.0f}" if speeds else "",
            f"{statistics.median(seconds):.0f} ({seconds[0]:.0f}, {seconds[-1]:.0f})" if seconds else "",
            f"{statistics.median(row['compile_seconds'] for row in runs):.0f}",
            f"{statistics.median(steps):,.0f}" if steps else "",
            f"{len(reached)} of {len(runs)}",
        ]  # fmt: skip
