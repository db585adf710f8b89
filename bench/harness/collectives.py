"""Collectives of a compiled program: what devices exchange, the bytes, and how often."""

import math
import re
from collections.abc import Iterator
from typing import NamedTuple

_NAMES = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute|collective-broadcast"
_COLLECTIVE = re.compile(rf"= (.*?) ({_NAMES})(?:-done)?\(")  # the type of a start lists the operands, too
_HEAD = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{\s*$")
_CALLEES = re.compile(r"(?:body|condition|to_apply|calls|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"(?:branch_computations|called_computations)=\{([^}]*)\}")
_TRIPS = re.compile(r'known_trip_count":\s*\{"n":"(\d+)"')
_ARRAY = re.compile(r"(\w+)\[([\d,]*)\]")
_BITS = re.compile(r"\d+")


class Collective(NamedTuple):
    """One kind of exchange."""

    kind: str  # such as "all-reduce"
    bytes: int  # of its result, on one device
    times: int  # that it runs in one call of the program; loops of unknown length count once


def list_collectives(text: str) -> list[Collective]:
    """Return the collectives of a program from its HLO text, equal ones together, the most bytes first."""
    lines, entry = _split(text)
    counts: dict[tuple[str, int], int] = {}
    for kind, size, times in _walk(lines, entry, 1):
        counts[kind, size] = counts.get((kind, size), 0) + times
    found = [Collective(kind, size, times) for (kind, size), times in counts.items()]
    return sorted(found, key=lambda each: each.bytes * each.times, reverse=True)


def _split(text: str) -> tuple[dict[str, list[str]], str]:
    """Return the lines of each computation by its name, and the name of the one that runs first."""
    lines: dict[str, list[str]] = {}
    entry = name = ""
    for line in text.splitlines():
        if head := _HEAD.match(line):
            name = head[2]
            lines[name] = []
            entry = name if head[1] else entry
        elif name:
            lines[name].append(line)
    return lines, entry


def _walk(lines: dict[str, list[str]], name: str, times: int) -> Iterator[tuple[str, int, int]]:
    """Yield kind, bytes and number of runs of the collectives in a computation that itself runs `times` times."""
    for line in lines.get(name, ()):
        if found := _COLLECTIVE.search(line):
            yield found[2], _count_bytes(found[1]), times
            continue  # `to_apply` is only the sum
        trips = _TRIPS.search(line)
        inner = times * int(trips[1]) if trips else times
        callees = _CALLEES.findall(line)
        for group in _BRANCHES.findall(line):
            callees += [part.strip().lstrip("%") for part in group.split(",")]
        for callee in callees:
            yield from _walk(lines, callee, inner)


def _count_bytes(shapes: str) -> int:
    """Return the bytes of all arrays in the text of a type, such as (f32[3,4], pred[])."""
    total = 0
    for kind, sizes in _ARRAY.findall(shapes):
        bits = _BITS.search(kind)
        width = int(bits[0]) // 8 if bits else 1  # pred
        total += width * math.prod(int(size) for size in sizes.split(",") if size)
    return total
