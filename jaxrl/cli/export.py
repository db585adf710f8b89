"""python -m jaxrl.export RUN --format jidi --out DIR: the policy of a run as files that play without jaxrl.

jidi: submission.py and weights.npz for the snakes games of the Jidi platform, 3v3 and 1v1, in either side, with NumPy
alone. It draws from the policy, without exploration, or with --greedy plays its best action.
"""

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from envs_jax.base import closest, short_repr
from envs_jax.snakes import Snakes
from jaxrl.algos.base import Algorithm
from jaxrl.algos.ddpg import Ddpg
from jaxrl.cli.entry import exit_on_error
from jaxrl.cli.flags import Parser
from jaxrl.common.errors import UsageError, UserError
from jaxrl.common.files import write_atomically
from jaxrl.runtime.load import load_policy

FORMATS = ("jidi",)
AGENT = Path(__file__).parents[1] / "integrations" / "jidi" / "submission.py"
WEIGHTS = "weights.npz"
BOARDS = ((10, 20, 6, 5, 2), (6, 8, 2, 5, 2))  # the platform's games: rows, columns, snakes, beans, teams


def jidi_settings(env: Any, algo: Algorithm, greedy: bool) -> dict[str, Any]:
    """Return the settings that submission.py needs besides the weights.

    Raises:
        UsageError: the platform, or its agent, could not play the policy.
    """
    spec = algo.spec
    if not isinstance(env, Snakes):
        raise UsageError(f"the jidi format is for snakes, the run was trained on '{spec.name}': export a run of snakes")
    if not isinstance(algo, Ddpg):
        raise UsageError(
            f"the jidi format is for policies of ddpg and bicnet, not of {type(algo).__name__}: export one of these"
        )
    if (env.height, env.width, env.snakes, env.beans, env.teams) not in BOARDS:
        raise UsageError(
            f"the jidi platform plays 3 against 3 on 10 x 20 and 1 against 1 on 6 x 8 cells with 5 beans; the run has "
            f"{env.snakes} snakes in {env.teams} team{'s' * (env.teams > 1)}, {env.height} x {env.width} cells and "
            f"beans {env.beans}: train on snakes_3v3 or snakes_1v1"
        )
    if env.outside:
        raise UsageError("the run's policy plays both teams (opponent outside), an exported one plays one: train "
                         "against an opponent")  # fmt: skip
    box = env.spec.observation
    return {
        "snakes": env.snakes,
        "beans": env.beans,
        "observation": env.observation,
        "inputs": box.shape[0],
        "scale": max(abs(box.low), abs(box.high)) if algo.scale_observation else 1.0,
        "depth": algo.depth,
        "rectify_first": algo.first_layer == "relu",
        "layer_norm": algo.layer_norm,
        "communication": algo.network == "bicnet",
        "masking": algo.masking,
        "greedy": greedy,
    }


def write_jidi(out: Path, settings: dict[str, Any], params: Any) -> list[Path]:
    """Write submission.py and weights.npz into the directory `out`, created if absent; return their paths.

    Args:
        out: files of these names in it are replaced.
        settings: of `jidi_settings`.
        params: of the actor, `Ddpg.policy`.

    Raises:
        UserError: they cannot be written.
    """
    arrays = {
        "_".join(str(entry.key) for entry in path): np.asarray(leaf, np.float32)
        for path, leaf in jax.tree_util.tree_leaves_with_path(params["params"])
    }
    buffer = io.BytesIO()
    np.savez(buffer, settings=np.array(json.dumps(settings)), **arrays)  # type: ignore[arg-type]
    files = {out / AGENT.name: AGENT.read_bytes(), out / WEIGHTS: buffer.getvalue()}
    try:
        out.mkdir(parents=True, exist_ok=True)
        for path, content in files.items():
            write_atomically(path, content)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"cannot write to {out} ({reason}): choose another --out") from None
    return list(files)


@exit_on_error
def main(argv: Sequence[str]) -> int:
    """Run the command and return its exit code."""
    parser = Parser(prog="python -m jaxrl.export", description=__doc__)
    parser.add_argument("run", metavar="RUN", help="directory of a run")
    parser.add_argument("--format", metavar="NAME", help=f"what to write: {', '.join(FORMATS)}")
    parser.add_argument("--out", metavar="DIR", help="directory to write to; it is made if it is not there")
    parser.add_argument("--greedy", action="store_true", help="play the best action instead of drawing one")
    parser.add_argument("--last", action="store_true", help="the run's newest checkpoint instead of its best")
    flags = parser.parse_args(list(argv))
    if flags.format not in FORMATS:
        named = f"unknown format {short_repr(flags.format)}: {closest(flags.format, FORMATS)}" if flags.format else None
        raise UsageError(named or f"say what to write: --format {' or '.join(FORMATS)}")
    if flags.out is None:
        raise UsageError("say where to write: --out DIR")
    loaded = load_policy(flags.run, best=not flags.last)
    settings = jidi_settings(loaded.env, loaded.algo, flags.greedy)
    for path in write_jidi(Path(flags.out), settings, loaded.params):
        print(f"wrote {path} ({path.stat().st_size / 2**10:,.0f} KiB)")
    print(f"the policy of {flags.run}, checkpoint {loaded.step:,}, {'its best actions' if flags.greedy else 'drawn'}")
    return 0
