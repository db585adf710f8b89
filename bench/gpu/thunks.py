"""Run-time operations of XLA's executable for a GPU, parsed from the text that `--xla_dump_to` writes.

The host executes a list of operations ("thunks"): it launches a kernel, calls a library, starts a command buffer
(a CUDA graph, whose nodes then run without the host), or runs a loop or a branch.
"""

import dataclasses
import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from jaxrl.common.errors import UserError

_LINE = re.compile(r"^( *)(\d+): (k\w+)")
_LABEL = re.compile(r"^( *)(\w+):$")
_BLOCKS = ("kSequential", "kCommandBuffer", "kWhile", "kConditional")
_WAITING = re.compile(r"^k\w+(Done|WaitsFor\w*)$")  # marks of order, no-ops on the GPU


class Loop(NamedTuple):
    """A loop of a program.

    Attributes:
        path: names and repetitions of the loops around it and its own, "?" where unknown before run time.
        host_operations: of the host, per iteration; 0 inside a command buffer.
        nodes: on the GPU, per iteration.
    """

    path: str
    host_operations: int
    nodes: int


@dataclasses.dataclass
class Thunk:
    """An operation of the host.

    Attributes:
        kind: XLA's name, such as kCommandBuffer.
        name: of its HLO instruction.
        parts: operations inside, {"condition", "body" or the name of a branch, "" for a command buffer's: them}.
        trips: of a loop, None where unknown before run time.
    """

    kind: str
    name: str
    parts: dict[str, list["Thunk"]]
    trips: int | None = None

    def host_operations(self) -> int:
        """Count the operations of the host; a loop of unknown length counts once, of branches the longest."""
        if self.kind == "kCommandBuffer":
            return 1
        inside = {label: sum(thunk.host_operations() for thunk in part) for label, part in self.parts.items()}
        if self.kind == "kWhile":
            if self.trips is not None:
                return self.trips * inside.get("body", 0)
            return 1 + inside.get("condition", 0) + inside.get("body", 0)  # the host reads the condition
        if self.kind == "kConditional":
            return 1 + max(inside.values(), default=0)
        if self.parts or self.kind in _BLOCKS:
            return sum(inside.values())
        return 0 if _WAITING.match(self.kind) else 1

    def nodes(self) -> int:
        """Count the kernels, copies and library calls on the GPU, in graphs or not."""
        return sum(times for times, _ in self.leaves())

    def leaves(self, times: int = 1) -> Iterator[tuple[int, "Thunk"]]:
        """Return the GPU's operations and counts; a loop of unknown length counts once, of branches the longest."""
        if self.kind == "kConditional":
            branches = [[leaf for thunk in part for leaf in thunk.leaves(times)] for part in self.parts.values()]
            yield from max(branches, key=lambda leaves: sum(number for number, _ in leaves), default=[])
        elif self.kind == "kWhile":
            known = self.trips is not None  # then the host counts, and the condition is never computed
            for thunk in [*self.parts.get("body", []), *([] if known else self.parts.get("condition", []))]:
                yield from thunk.leaves(times * (self.trips if self.trips is not None else 1))
        elif self.parts:
            for part in self.parts.values():
                for thunk in part:
                    yield from thunk.leaves(times)
        elif not _WAITING.match(self.kind) and self.kind not in _BLOCKS:
            yield times, self

    def loops(self, path: tuple[str, ...] = (), in_graph: bool = False) -> Iterator[Loop]:
        """Return all loops inside."""
        in_graph = in_graph or self.kind == "kCommandBuffer"
        for thunk in itertools.chain.from_iterable(self.parts.values()):
            inner = path
            if thunk.kind == "kWhile":
                inner = (*path, f"{thunk.name} x {'?' if thunk.trips is None else thunk.trips}")
                body = Thunk("kSequential", thunk.name, {"": thunk.parts.get("body", [])})
                yield Loop(" / ".join(inner), 0 if in_graph else body.host_operations(), body.nodes())
            yield from thunk.loops(inner, in_graph)


def read(folder: Path, hlo: str) -> Thunk:
    """Read the newest program whose dump lies in a folder.

    Args:
        folder: XLA's dump folder.
        hlo: text of the compiled program, with the trip counts of its loops.

    Raises:
        UserError: there is no dump of a program for GPUs.
    """
    written = sorted(folder.glob("*.thunk_metadata.txt"), key=lambda path: path.stat().st_mtime_ns)
    if not written:
        raise UserError(f"{folder} holds no list of thunks: this version of XLA writes none, or under another name")
    stem = str(written[-1]).removesuffix("thunk_metadata.txt")
    lists = [Path(f"{stem}thunk_sequence{suffix}.txt") for suffix in ("_after_thunk_passes", "")]
    # the first one exists only where a pass has changed something
    final = next((path for path in lists if path.exists()), None)
    if final is None:
        raise UserError(f"{folder} holds no {lists[1].name}: this version of XLA writes it under another name")
    return parse(final.read_text(), _names(written[-1].read_text()), trip_counts(hlo))


def parse(text: str, names: dict[int, str], trips: dict[str, int]) -> Thunk:
    """Parse the list of operations as one tree; `names` by number, `trips` by name."""
    root = Thunk("kSequential", "", {"": []})
    stack: list[tuple[int, Thunk, str]] = [(-1, root, "")]
    for line in text.splitlines():
        label, found = _LABEL.match(line), _LINE.match(line)
        if label and label[2] == "condition":  # printed without indentation, after its loop
            stack[-1] = (*stack[-1][:2], "condition")
        elif label:
            while stack[-1][0] >= len(label[1]):
                stack.pop()
            stack[-1] = (*stack[-1][:2], label[2])
        elif found:
            while stack[-1][0] >= len(found[1]):
                stack.pop()
            around = stack[-1][1]
            name = around.name if around.kind == "kAsyncStart" else names.get(int(found[2]), "")
            thunk = Thunk(found[3], name, {}, trips.get(name) if found[3] == "kWhile" else None)
            around.parts.setdefault(stack[-1][2], []).append(thunk)
            stack.append((len(found[1]), thunk, ""))
    return root


def _names(metadata: str) -> dict[int, str]:
    """{number of a thunk: name of its HLO instruction}."""
    return {
        int(number[1]) if (number := re.search(r"thunk_id: (\d+)", entry)) else 0: name[1]
        for entry in metadata.split("thunk_metadata {")
        if (name := re.search(r'profile_annotation: "([^"]*)"', entry))
    }


def trip_counts(hlo: str) -> dict[str, int]:
    """{name of a loop: trip count}, for loops where the compiler knows it."""
    found = re.finditer(r'^ *(?:ROOT )?%?([\w.\-]+) = .* while\(.*known_trip_count":\{"n":"(\d+)"', hlo, re.MULTILINE)
    return {match[1]: int(match[2]) for match in found}
