"""python -m jaxrl.render RUN --out mission.html: one held-out episode as a page, an animation or a picture.

The suffix of --out decides: .html plays in any browser without a network, .gif is an animation, .png one picture of
the whole episode. Episode N is episode N of `jaxrl.evaluate` with the same seed. Without RUN, a scripted policy:
python -m jaxrl.render --policy ig --q 7 --out mission.html. If the run was evaluated before, the mean curves of other
policies are drawn beside the episode's.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from envs_jax.base import closest, short_repr
from jaxrl.cli.entry import exit_on_error
from jaxrl.cli.policies import parse
from jaxrl.cli.values import parse_int
from jaxrl.common.errors import UsageError, UserError
from jaxrl.common.files import output, write_atomically
from jaxrl.evaluation import records
from jaxrl.evaluation.records import SUFFIXES
from jaxrl.evaluation.reports import FILE
from jaxrl.report.cache import enable_compilation_cache


def _flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", metavar="FILE", help=f"what to write; it ends in {', '.join(SUFFIXES)}")
    parser.add_argument("--policy", metavar="NAME",
                        help="who flies: learned (default with a run), sampled or a baseline")  # fmt: skip
    parser.add_argument("--episode", default="0", metavar="N", help="number of the held-out episode (default: 0)")
    parser.add_argument("--seed", default="0", metavar="N", help="of the held-out set (default: 0)")
    parser.add_argument("--evaluation", metavar="FILE",
                        help=f"take the mean curves of other policies from here (default: RUN/{FILE})")  # fmt: skip
    parser.add_argument("--frames-per-second", metavar="X",
                        help="of an animation (default: what suits the environment)")  # fmt: skip


def _rate(text: str | None) -> float | None:
    if text is None:
        return None
    try:
        rate = float(text)
    except ValueError:
        raise UsageError(f"--frames-per-second must be a number, not {short_repr(text)}") from None
    if not 0.1 <= rate <= 50:
        raise UsageError(f"--frames-per-second must lie between 0.1 and 50, not {short_repr(rate)}")
    return rate


def _out(text: str | None) -> Path:
    if text is None:
        raise UsageError("say what to write: --out mission.html (or .gif, .png)")
    suffix = Path(text).suffix
    if suffix.lower() not in SUFFIXES:
        raise UsageError(f"--out {text}: cannot write {short_repr(suffix)} files; {closest(suffix.lower(), SUFFIXES)}")
    return output(text, "--out")


@exit_on_error
def main(argv: Sequence[str]) -> int:
    """Run the command and return its exit code."""
    began = time.monotonic()
    enable_compilation_cache()
    flags, read = parse(argv, "python -m jaxrl.render", __doc__, _flags)
    episode = parse_int(flags.episode, "--episode", 0, 2**31 - 1)
    seed = parse_int(flags.seed, "--seed", 0, 2**32 - 1)
    rate = _rate(flags.frames_per_second)
    path = _out(flags.out)
    subject = records.with_opponents(read())
    name = flags.policy or ("learned" if subject.run else None)
    if name is None:
        raise UsageError(f"without a run, --policy says who flies: choose from {', '.join(subject.policies)}")
    subject.check_policy(name)
    viewer = records.viewer_of(subject)
    given = None if flags.evaluation is None else Path(flags.evaluation)
    beside = records.read_evaluation(given, subject, name, lambda line: print(f"note: {line}", file=sys.stderr))
    shown = records.record(subject, name, episode, seed, *beside)
    content = records.draw(viewer, shown, path.suffix.lower(), rate or viewer.rate)
    try:
        write_atomically(path, content)
    except OSError as error:
        raise UserError(f"cannot write {path} ({error.strerror}): choose another --out") from None
    score = subject.env.spec.score
    words, _, unit = subject.env.spec.label(score).partition(", ")
    told = f"{words} {float(shown.curves[score][-1]):.3f} {unit}".rstrip()
    print(f"{name}, episode {episode}: {shown.steps} steps, {told} at the end")
    print(f"wrote {path} ({len(content) / 2**20:.2f} MiB) in {time.monotonic() - began:.0f} s")
    return 0
