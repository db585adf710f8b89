"""Agents that run without jaxrl: a Python file that needs only NumPy, and its weights in weights.npz.

export/agent.py acts as a policy does, jidi/submission.py plays snakes on the Jidi platform. The modules of this package
that they import are copied into them.
"""

import io
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from envs_jax.base import Box, Discrete, independent_mask
from envs_jax.coverage import Coverage
from envs_jax.coverage.actions import MOVES
from envs_jax.coverage.egocentric import actions_in_frames
from envs_jax.coverage.world import LATTICE, LEVELS
from envs_jax.snakes import Snakes
from envs_jax.snakes.obs_heading import ACTIONS
from jaxrl.algos.base import Algorithm
from jaxrl.algos.coma import Coma
from jaxrl.algos.ddpg import Ddpg
from jaxrl.algos.ppo import INPUT_LIMIT, Ppo
from jaxrl.algos.sac import Sac
from jaxrl.algos.student import Student
from jaxrl.common.errors import UsageError
from jaxrl.common.types import Params
from jaxrl.integrations.export.units import ActionUnits, describe_bounds, describe_environment
from jaxrl.nn.networks import MLP, ConvStack, GaussianOutputs, TeamNet
from jaxrl.nn.recurrent import Recurrent
from jaxrl.runtime.observations import describe_leaves
from jaxrl.runtime.policy import Policy

_FOLDER = Path(__file__).parent
AGENT = _FOLDER / "export/agent.py"
SUBMISSION = _FOLDER / "jidi/submission.py"
KNOWN: tuple[type[Algorithm], ...] = (Coma, Ddpg, Ppo, Sac, Student)  # whose `act` agent.py repeats
BOARDS = ((10, 20, 6, 5, 2), (6, 8, 2, 5, 2))  # Jidi's games: rows, columns, snakes, beans, teams
_SLACK = 10.0  # widths of a box by which an agent's observations may leave it: beyond, they have other units
_BODY = "# Everything below is copied into exported agents.\n"


def agent_settings(policy: Policy) -> dict[str, Any]:
    """Return the settings of `agent.Policy`.

    Raises UsageError: agent.py does not act as this algorithm does, or does not have its network.
    """
    algo = policy.algo
    spec = policy.algo.spec
    acting = next(cls for cls in type(algo).__mro__ if "act" in vars(cls))
    if acting not in KNOWN:
        raise UsageError(
            f"the numpy format is for coma, ddpg, bicnet, sac, ppo and student, not for {type(algo).__name__.lower()}: "
            "choose --format stablehlo or onnx"
        )
    if getattr(algo, "passes_messages", False) or getattr(algo, "types", None):
        raise UsageError(
            "the numpy format needs one network for all agents and no messages between them: choose --format stablehlo "
            "or onnx, or a run with message_passing none and share_parameters true"
        )
    if spec.action_order:
        raise UsageError(
            "the numpy format cannot put outputs in the order that the observation gives (action_order): choose "
            "--format stablehlo or onnx, or train on another observation"
        )
    settings = network_settings(algo, "numpy")
    (leaf,) = describe_leaves(spec)
    settings |= {
        "agents": spec.num_agents,
        "observation_shape": spec.observation.shape,
        "input_limit": INPUT_LIMIT,
        "limits": [np.asarray(limit).tolist() for limit in leaf.find_limits(_SLACK)],
        "whole": leaf.is_whole,
    }
    if getattr(algo, "egocentric", False):
        if not isinstance(policy.env, Coverage) or not isinstance(spec.action, Discrete):
            raise UsageError(
                f"the numpy format makes egocentric views only of coverage, not of '{spec.name}': choose --format "
                "stablehlo or onnx, or train with --egocentric false"
            )
        settings["frames"] = actions_in_frames(spec.action.n).tolist()
    settings["environment"] = describe_environment(policy.env)
    if not isinstance(spec.action, Discrete):
        box = spec.action
        return settings | {
            "actions": "box",
            "numbers": math.prod(box.shape),
            "bounds": tuple(describe_bounds(policy.env)["action"].values()),  # for all numbers, or for each
            "squash": "clip" if isinstance(algo, Ppo) else "tanh",
            "action_shape": box.shape,
            "action_dtype": jnp.dtype(box.dtype).name,
        }
    rule = "each" if spec.next_mask is independent_mask else "sequential"
    masking = rule if algo.respects_masks and policy._blank.action_mask is not None else "none"
    if spec.absent_agents and masking == "sequential":
        raise UsageError(
            "the numpy format cannot tell which agents are absent, and their actions would close actions of others: "
            "choose --format stablehlo or onnx, or a run without absent agents (of coverage: team_sizes, loss_rate)"
        )
    settings |= {"actions": "discrete", "masking": masking}
    if masking == "sequential" and isinstance(policy.env, Coverage):
        settings["moves"] = MOVES[spec.action.n].tolist()
        settings["highest"] = (LATTICE - 1, LATTICE - 1, LEVELS - 1)
    return settings


def agent_files(policy: Policy) -> dict[str, bytes]:
    """Return the content of agent.py and weights.npz. Raises UsageError as `agent_settings` does."""
    settings = agent_settings(policy)
    params = policy.params
    moments = {}
    tables = ActionUnits.from_env(policy.env).tables
    settings["tables"] = len(tables)
    if isinstance(policy.algo, Student | Ppo):
        params = params["actor"]
    if isinstance(policy.algo, Ppo) and (statistics := policy.params["statistics"].get("actor")):
        moments = {"input": {"mean": statistics.mean, "deviation": statistics.deviation}}
    tables_by_name = {f"actions{agent}": table for agent, table in enumerate(tables)}
    return _files(AGENT, settings, {"params": _network_params(params["params"]) | moments}, tables_by_name)


def _network_params(actor: Params) -> dict[str, Any]:
    """Return the parameters of a network, of which `Recurrent` and `GaussianOutputs` are a part, by plain names."""
    actor = dict(actor.get("means", actor))
    if "memory1_input_kernel" not in actor:
        return actor
    encoder = actor.pop("encoder", {})
    last = actor.pop("head")
    last_layer = last.get("means", last)["head"]
    return {**encoder, **actor, "head": {**encoder.get("head", {}), **last_layer}}


def jidi_settings(env: Any, algo: Algorithm, greedy: bool, search: bool) -> dict[str, Any]:
    """Return the settings that submission.py needs besides the weights.

    Raises UsageError: the platform, or its agent, could not play the policy.
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
    if greedy and search:
        raise UsageError("greedy has no effect on an agent with search, which draws nothing: leave it out")
    return network_settings(algo, "jidi") | {
        "snakes": env.snakes,
        "beans": env.beans,
        "max_steps": env.max_steps,
        "observation": env.observation,
        "ordered": ACTIONS if spec.action_order else 0,  # values before those that the network sees
        "masking": algo.respects_masks and env.masks,
        "careful_masks": env.careful_masks,
        "greedy": greedy,
        "search": search,
    }


def jidi_files(env: Any, algo: Algorithm, params: Params, greedy: bool, search: bool) -> dict[str, bytes]:
    """Return the content of submission.py and weights.npz. Raises UsageError as `jidi_settings` does."""
    return _files(SUBMISSION, jidi_settings(env, algo, greedy, search), params, {})


def source(agent: Path) -> bytes:
    """Return the source of an agent with the content of modules of this package in place of their imports."""

    def read_body(match: re.Match[str]) -> str:
        module = _FOLDER / f"{match[1].replace('.', '/')}.py"
        _, _, body = module.read_text().partition(_BODY)
        return f"\n\n{body.strip()}\n\n"

    return re.sub(r"^from jaxrl\.integrations\.([\w.]+) import .*\n", read_body, agent.read_text(), flags=re.M).encode()


def network_settings(algo: Algorithm, format_name: str) -> dict[str, Any]:
    """Return the settings of `numpy_networks.network` for the actor of an algorithm.

    Raises UsageError: the actor is a network that `numpy_networks` does not have.
    """
    module = algo.networks["actor"].module
    box = algo.spec.observation
    module = module.means if isinstance(module, GaussianOutputs) else module  # deviations do not change greedy actions
    memory = {}
    if isinstance(module, Recurrent):
        memory = {"memory": module.memory, "memory_size": module.size, "memory_layers": module.layers}
        module = module.encoder
    kinds: dict[type, str] = {TeamNet: "team", MLP: "mlp", ConvStack: "conv"}
    if type(module) not in kinds or not isinstance(box, Box):
        raise UsageError(
            f"the {format_name} format is for the library's own networks, not for {type(module).__name__}: choose "
            "--format stablehlo"
        )
    scaled = getattr(algo, "scale_observation", False)
    settings = {"kind": kinds[type(module)], "scale": max(abs(box.lowest), abs(box.highest)) if scaled else 1.0}
    settings |= {"axes": len(box.shape), "inputs": math.prod(box.shape), "depth": module.depth}
    names = {TeamNet: ("rectify_first", "layer_norm", "communication"), ConvStack: ("stride",)}.get(type(module), ())
    return settings | memory | {name: getattr(module, name) for name in names}


def _files(
    agent: Path, settings: Mapping[str, Any], params: Params, tables: Mapping[str, np.ndarray]
) -> dict[str, bytes]:
    """Return an agent, and weights.npz: "settings" as JSON, the actor's parameters as flax has them, and `tables`."""
    arrays = {
        "_".join(str(entry.key) for entry in path): np.asarray(leaf, np.float32)
        for path, leaf in jax.tree_util.tree_leaves_with_path(params["params"])
    }
    arrays |= tables
    buffer = io.BytesIO()
    np.savez(buffer, settings=np.array(json.dumps(settings)), **arrays)  # type: ignore[arg-type]
    return {agent.name: source(agent), "weights.npz": buffer.getvalue()}
