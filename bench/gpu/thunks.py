"""Operations of XLA's executable for a GPU when it is called, read from the text that `--xla_dump_to` writes of it.

The host works through a list of operations ("thunks"): it launches a kernel, calls a library, starts a command buffer
(a CUDA graph, whose nodes then run without the host), or walks through a loop or a branch.
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
_WAITING = re.compile(r"^k\w+(Done|WaitsFor\w*)$")  # marks of order, which do nothing on the GPU


class Loop(NamedTuple):
    """A loop of a program.

    Attributes:
        path: names and repetitions of the loops around it and its own, "?" where only the running program knows.
        host_operations: of the host, each time around; 0 inside a command buffer.
        nodes: on the GPU, each time around.
    """

    path: str
    host_operations: int
    nodes: int


@dataclasses.dataclass
class Thunk:
    """An operation of the host.

    Attributes:
        kind: as XLA calls it, such as kCommandBuffer.
        name: of the HLO instruction that it was made of.
        parts: operations inside, {"condition", "body" or the name of a branch, "" for a command buffer's: them}.
        trips: of a loop, None where only the running program knows.
    """

    kind: str
    name: str
    parts: dict[str, list["Thunk"]]
    trips: int | None = None

    def host_operations(self) -> int:
        """Operations that the host does for it; a loop of unknown length is walked once, branches at their worst."""
        if self.kind == "kCommandBuffer":
            return 1
        inside = {label: sum(thunk.host_operations() for thunk in part) for label, part in self.parts.items()}
        if self.kind == "kWhile":
            if self.trips is not None:
                return self.trips * inside.get("body", 0)
            return 1 + inside.get("condition", 0) + inside.get("body", 0)  # it reads what the condition says
        if self.kind == "kConditional":
            return 1 + max(inside.values(), default=0)
        if self.parts or self.kind in _BLOCKS:
            return sum(inside.values())
        return 0 if _WAITING.match(self.kind) else 1

    def nodes(self) -> int:
        """How many kernels, copies and library calls the GPU runs for it, in graphs or not."""
        return sum(times for times, _ in self.leaves())

    def leaves(self, times: int = 1) -> Iterator[tuple[int, "Thunk"]]:
        """Operations of the GPU, and how often each runs; a loop of unknown length once, of branches the longest."""
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
        """All loops inside."""
        in_graph = in_graph or self.kind == "kCommandBuffer"
        for thunk in itertools.chain.from_iterable(self.parts.values()):
            inner = path
            if thunk.kind == "kWhile":
                inner = (*path, f"{thunk.name} x {'?' if thunk.trips is None else thunk.trips}")
                body = Thunk("kSequential", thunk.name, {"": thunk.parts.get("body", [])})
                yield Loop(" / ".join(inner), 0 if in_graph else body.host_operations(), body.nodes())
            yield from thunk.loops(inner, in_graph)


def read(folder: Path, hlo: str) -> Thunk:
    """The newest program whose dump lies in a folder.

    Args:
        folder: that XLA wrote to.
        hlo: text of the compiled program, which knows how long its loops are.

    Raises:
        UserError: there is no dump of a program for GPUs.
    """
    written = sorted(folder.glob("*.thunk_metadata.txt"), key=lambda path: path.stat().st_mtime_ns)
    if not written:
        raise UserError(f"{folder} holds no list of thunks: this version of XLA writes none, or under another name")
    stem = str(written[-1]).removesuffix("thunk_metadata.txt")
    lists = [Path(f"{stem}thunk_sequence{suffix}.txt") for suffix in ("_after_thunk_passes", "")]
    # the first one only where a pass has changed something
    final = next((path for path in lists if path.exists()), None)
    if final is None:
        raise UserError(f"{folder} holds no {lists[1].name}: this version of XLA writes it under another name")
    return parse(final.read_text(), _names(written[-1].read_text()), trip_counts(hlo))


def parse(text: str, names: dict[int, str], trips: dict[str, int]) -> Thunk:
    """The list of operations as one tree; `names` by number, `trips` by name."""
    root = Thunk("kSequential", "", {"": []})
    stack: list[tuple[int, Thunk, str]] = [(-1, root, "")]
    for line in text.splitlines():
        label, found = _LABEL.match(line), _LINE.match(line)
        if label and label[2] == "condition":  # printed without its indentation, behind its loop
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
    """{name of a loop: how often it runs}, for loops of which the compiler knows."""
    found = re.finditer(r'^ *(?:ROOT )?%?([\w.\-]+) = .* while\(.*known_trip_count":\{"n":"(\d+)"', hlo, re.MULTILINE)
    return {match[1]: int(match[2]) for match in found}
