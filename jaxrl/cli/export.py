"""python -m jaxrl.export RUN --format jidi --out DIR: the policy of a run as files that play without jaxrl.

jidi: submission.py and weights.npz for the snakes games of the Jidi platform, 3v3 and 1v1, in either side, with NumPy
alone. It draws from the policy, without exploration, or with --greedy plays its best action.
"""

from collections.abc import Sequence
from pathlib import Path

from jaxrl.cli.entry import exit_on_error
from jaxrl.cli.flags import Parser
from jaxrl.cli.values import add_choice
from jaxrl.common.errors import UsageError
from jaxrl.integrations.jidi.export import jidi_settings, write_jidi
from jaxrl.runtime.load import load_policy

FORMATS = ("jidi",)


@exit_on_error
def main(argv: Sequence[str]) -> int:
    """Run the command and return its exit code."""
    parser = Parser(prog="python -m jaxrl.export", description=__doc__)
    parser.add_argument("run", metavar="RUN", help="directory of a run")
    add_choice(parser, "--format", FORMATS, "what to write")
    parser.add_argument("--out", metavar="DIR", help="directory to write to; it is made if it is not there")
    parser.add_argument("--greedy", action="store_true", help="play the best action instead of drawing one")
    parser.add_argument("--last", action="store_true", help="the run's newest checkpoint instead of its best")
    flags = parser.parse_args(list(argv))
    if flags.format is None:
        raise UsageError(f"say what to write: --format {' or '.join(FORMATS)}")
    if flags.out is None:
        raise UsageError("say where to write: --out DIR")
    loaded = load_policy(flags.run, best=not flags.last)
    settings = jidi_settings(loaded.env, loaded.algo, flags.greedy)
    for path in write_jidi(Path(flags.out), settings, loaded.params):
        print(f"wrote {path} ({path.stat().st_size / 2**10:,.0f} KiB)")
    print(f"the policy of {flags.run}, checkpoint {loaded.step:,}, {'its best actions' if flags.greedy else 'drawn'}")
    return 0
