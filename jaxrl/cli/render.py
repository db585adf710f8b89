"""python -m jaxrl.render RUN --out mission.html: draw a held-out episode as a page, an animation or a picture.

The suffix of --out decides: .html plays in any browser without a network, .gif is an animation, .png one picture of
the whole episode. Episode N is episode N of `jaxrl.evaluate` with the same seed. Without RUN a scripted policy plays:
python -m jaxrl.render --policy ig --q 7 --out mission.html. If the run was evaluated before, the page also shows the
mean curves of other policies.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from envs_jax.base import closest, short_repr
from jaxrl.cli.entry import exit_on_error
from jaxrl.cli.policies import parse
from jaxrl.cli.process import speed_up_start
from jaxrl.cli.values import add_int, add_seed
from jaxrl.common.errors import UsageError, UserError
from jaxrl.common.files import is_file, output, write_output
from jaxrl.evaluation import policies, records
from jaxrl.evaluation.policies import display_name, policy_key
from jaxrl.evaluation.reports import FILE


def _flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--out", metavar="FILE", help=f"file to write; it ends in {', '.join(records.SUFFIXES)}")
    add("--policy", metavar="NAME", help="policy that acts: greedy (default with a run), sampled or a baseline")
    add_int(parser, "--episode", 0, 2**31 - 1, 0, "number of the held-out episode, from 0 on (default: 0)")
    add_seed(parser, "the held-out episodes")


def _out(text: str | None) -> Path:
    if text is None:
        raise UsageError("say what to write: --out mission.html (or .gif, .png)")
    suffix = Path(text).suffix
    if suffix.lower() not in records.SUFFIXES:
        known = closest(suffix.lower(), records.SUFFIXES)
        raise UsageError(f"--out {text}: cannot write {short_repr(suffix)} files; {known}")
    return output(text, "--out")


@exit_on_error
def main(argv: Sequence[str]) -> int:
    """Run the command and return its exit code."""
    began = time.monotonic()
    speed_up_start()
    flags, read = parse(argv, "python -m jaxrl.render", __doc__, _flags)
    path = _out(flags.out)
    policy_set = policies.with_opponents(read())
    name = policy_key(flags.policy or "greedy") if flags.policy or policy_set.run else None
    if name is None:
        raise UsageError(f"without a run, --policy says who acts: choose from {', '.join(policy_set.policies)}")
    policy_set.check_policies([name])
    viewer = records.require_viewer(policy_set)
    references: tuple[records.References, records.FinalMeans] = ({}, {})
    if policy_set.run and is_file(policy_set.run / FILE):
        try:
            references = records.read_evaluation(policy_set.run / FILE, policy_set, name)
        except UserError as error:
            print(f"note: drawn without the curves of other policies, {error}", file=sys.stderr)
    record = records.record(policy_set, name, flags.episode, flags.seed, *references)
    content = records.draw(viewer, record, path.suffix.lower())
    write_output(path, content, "--out")
    score = policy_set.env.spec.score
    words, _, unit = policy_set.env.spec.label(score).partition(", ")
    score_text = f"{words} {float(record.curves[score][-1]):.3f} {unit}".rstrip()
    print(f"{display_name(name)}, episode {flags.episode}: {record.steps} steps, {score_text} at the end")
    print(f"wrote {path} ({len(content) / 2**20:.2f} MiB) in {time.monotonic() - began:.0f} s")
    return 0
