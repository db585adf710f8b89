"""A policy as files for the Jidi platform: what can be exported, and submission.py with its weights."""

import io
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np

from envs_jax.snakes import Snakes
from jaxrl.algos.base import Algorithm
from jaxrl.algos.ddpg import Ddpg
from jaxrl.common.errors import UsageError, UserError
from jaxrl.common.files import write_atomically

AGENT = Path(__file__).with_name("submission.py")
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
