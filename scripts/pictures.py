"""python -m scripts.pictures: draw the pictures of the documentation, with the policies that ship with the package.

With --check nothing is written: it names the pictures that the present program draws otherwise, with exit code 1 if
there are any. Pictures are compared by their decoded pixels, coarsely: fonts and rounding differ between machines.
"""

import io
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageSequence

from bench.claims import result
from bench.claims.claim import Claim, read_claims
from jaxrl.cli.entry import exit_on_error
from jaxrl.cli.flags import Parser
from jaxrl.cli.process import speed_up_start
from jaxrl.common.files import write_atomically
from jaxrl.evaluation import policies, records, reports

DOCS = Path(__file__).resolve().parents[1] / "docs"
GREEDY, SAMPLED = (policies.policy_key(name) for name in ("greedy", "sampled"))
# {pretrained policy: how it acts in its held-out episode 0, policies whose mean curves are shown, files}
PICTURES = {
    "coverage": (GREEDY, ("random", "ig", GREEDY), ("mission.png", "mission.gif")),
    "snakes": (SAMPLED, (), ("snakes.png",)),  # as the rules of these games ask
    "reach": (GREEDY, (), ("reach.png",)),
}
EPISODES = 20  # of mean curves
# Curves of training: {file: {label: claim}}, whose metrics are the same
LEARNING = {"learning_coverage.png": {"bad channels, 2 or 4 UAVs": "coverage_robust"}}
# Pictures of matplotlib 3.8 and 3.11 pass, a single UAV in another colour does not.
BLOCK = 32  # pixels along an edge of the squares whose mean colours are compared
TOLERANCE = 16  # difference of a mean colour, of 255, that two machines may show
SHARE = 0.001  # of the squares may differ by more


def draw_pictures() -> Iterator[tuple[str, bytes]]:
    """Yield the name and the content of each picture."""
    for name, (acting, others, files) in PICTURES.items():
        policy_set = policies.with_opponents(policies.load_run(f"pretrained:{name}"))
        record = records.record(policy_set, acting, 0, 0, mean_curves(policy_set, others))
        for file in files:
            yield file, records.draw(records.require_viewer(policy_set), record, Path(file).suffix)
    claims = read_claims()
    for file, names in LEARNING.items():
        yield file, draw_learning({label: claims[name] for label, name in names.items()})


def draw_learning(claims: Mapping[str, Claim]) -> bytes:
    """Draw the metric of selection episodes by environment steps: a line for each seed, a colour for each claim."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure: Any = Figure(figsize=(7.0, 3.6), dpi=120, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    axes = figure.subplots()
    for number, (label, claim) in enumerate(claims.items()):
        measured = result.read(claim)
        for place, row in enumerate(measured["rows"] if measured else ()):
            steps, values = zip(*row["curve"], strict=True)
            axes.plot(steps, values, color=f"C{number}", label="" if place else label)
        axes.set(xlabel="environment steps", ylabel=claim.curve)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    canvas.print_png(buffer := io.BytesIO())
    return buffer.getvalue()


def mean_curves(policy_set: policies.PolicySet, names: Sequence[str]) -> records.References:
    """Return the mean curves of policies over a few held-out episodes."""
    if not names:
        return {}
    report = reports.evaluate(policy_set, names, EPISODES)
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(report, file)
        file.flush()
        return records.read_evaluation(Path(file.name), policy_set, GREEDY)[0]


def compare(stored: bytes, drawn: bytes) -> str:
    """Return what differs between two pictures or animations in words, "" if nothing does."""
    before = [frame.convert("RGB") for frame in ImageSequence.Iterator(Image.open(io.BytesIO(stored)))]
    after = [frame.convert("RGB") for frame in ImageSequence.Iterator(Image.open(io.BytesIO(drawn)))]
    if len(before) != len(after):
        return f"{len(before)} frames instead of {len(after)}"
    if before[0].size != after[0].size:
        return f"{before[0].size} pixels instead of {after[0].size}"
    share = max(count_different(*pair) for pair in zip(before, after, strict=True))
    return f"{share:.1%} of it differs" if share > SHARE else ""


def count_different(before: Any, after: Any) -> float:
    """Return the share of squares of two pictures of one size whose mean colours differ."""
    squares = [np.asarray(picture.reduce(BLOCK), np.int16) for picture in (before, after)]
    return float(np.mean(np.abs(squares[0] - squares[1]).max(axis=-1) > TOLERANCE))


@exit_on_error
def main(argv: Sequence[str]) -> int:
    """Run the command and return its exit code."""
    parser = Parser(prog="python -m scripts.pictures", description=__doc__)
    parser.add_argument(
        "--check", action="store_true", help="write nothing, and name the pictures that are not up to date"
    )
    check = parser.parse_args(list(argv)).check
    speed_up_start()
    stale = []
    for file, content in draw_pictures():
        path = DOCS / file
        difference = compare(path.read_bytes(), content) if path.exists() else "missing"
        if difference:
            stale.append(f"docs/{file} ({difference})")
        if difference and not check:
            write_atomically(path, content)
    if check and stale:
        print(f"not up to date: {', '.join(stale)}; python -m scripts.pictures draws them", file=sys.stderr)
        return 1
    print(f"drawn: {', '.join(stale) or 'nothing, all pictures are up to date'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
