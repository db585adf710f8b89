"""python -m jaxrl.export RUN --format FORMAT --out DIR: write the policy of a run as files for other programs.

safetensors: policy.safetensors holds the parameters by name. stablehlo: policy.stablehlo is the greedy policy as a
function for JAX, without jaxrl. onnx: policy.onnx is the same function for ONNX runtimes. Both come with policy.json,
which says how the function is called. numpy: agent.py and weights.npz are the same function in Python, with only NumPy.

jidi: submission.py and weights.npz play the snakes games of the Jidi platform, 3v3 and 1v1, on either side, with only
NumPy. Actions are sampled from the policy, without exploration; with --greedy they are its best actions, with --search
those that rollouts of eight moves and the policy rate best.

run: a run directory with the weights only, to share. It can be named wherever a run can, but for --resume.
"""

from collections.abc import Sequence
from pathlib import Path

from jaxrl.cli.entry import exit_on_error
from jaxrl.cli.flags import Parser
from jaxrl.cli.values import add_checkpoint, add_choice, find_checkpoint
from jaxrl.common.errors import UsageError
from jaxrl.common.files import expand_home
from jaxrl.common.jax_flags import check_transfers
from jaxrl.integrations.export.formats import FORMATS, RUN, export
from jaxrl.runtime.load import load_policy, write_small_run


@exit_on_error
def main(argv: Sequence[str]) -> int:
    """Run the command and return its exit code."""
    parser = Parser(prog="python -m jaxrl.export", description=__doc__)
    parser.add_argument("run", metavar="RUN", help="directory of a run")
    add_choice(parser, "--format", FORMATS, "format of the files")
    parser.add_argument("--out", metavar="DIR", help="directory to write to; it is made if it does not exist")
    parser.add_argument(
        "--greedy", action="store_true", help="jidi: play the best action, as the other formats do, instead of sampling"
    )
    parser.add_argument(
        "--search", action="store_true", help="jidi: choose moves by rollouts; a plan for a team takes about 20 ms"
    )
    add_checkpoint(parser)
    flags = parser.parse_args(list(argv))
    check_transfers()
    if flags.format is None:
        formats = ["jidi, which --search is for"] if flags.search else FORMATS
        raise UsageError(f"say what to write: --format {' or '.join(formats)}")
    if flags.out is None:
        raise UsageError("say where to write: --out DIR")
    if flags.format == RUN:
        if flags.greedy or flags.search:
            flag = "--greedy" if flags.greedy else "--search"
            raise UsageError(f"{flag} has no effect on --format run, which keeps the whole policy: leave it out")
        paths = write_small_run(flags.run, Path(expand_home(flags.out)), not flags.last, find_checkpoint(flags))
        print(f"wrote {flags.out} ({sum(path.stat().st_size for path in paths) / 2**10:,.0f} KiB)")
        return 0
    policy = load_policy(flags.run, not flags.last, checkpoint=find_checkpoint(flags))
    for path in export(policy, flags.format, flags.out, greedy=flags.greedy, search=flags.search):
        print(f"wrote {path} ({path.stat().st_size / 2**10:,.0f} KiB)")
    actions = "best actions" if flags.greedy else "actions chosen by rollouts" if flags.search else "drawn actions"
    kind = {"safetensors": "parameters", "jidi": actions}.get(flags.format, "best actions")
    print(f"the policy of {flags.run}, checkpoint {policy.step:,}, {kind}")
    return 0
