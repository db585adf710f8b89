"""A policy as files for the Jidi platform: what can be exported, and submission.py with its weights."""

from pathlib import Path
from typing import Any

from envs_jax.snakes import Snakes
from jaxrl.algos.base import Algorithm
from jaxrl.algos.ddpg import Ddpg
from jaxrl.common.errors import UsageError
from jaxrl.integrations.standalone import WEIGHTS, network_settings, source, weights_file, write_files

AGENT = Path(__file__).with_name("submission.py")
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
    masking = algo.heeds_masks and env.masks
    if env.careful_masks and masking:
        raise UsageError("the agent of the jidi format has no careful masks: train with careful_masks 0")
    return network_settings(algo, "jidi") | {
        "snakes": env.snakes,
        "beans": env.beans,
        "observation": env.observation,
        "masking": masking,
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
    return write_files(out, {AGENT.name: source(AGENT), WEIGHTS: weights_file(settings, params)})
