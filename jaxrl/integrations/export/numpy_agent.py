"""A policy as agent.py and weights.npz, which need only NumPy: the settings of `agent.Policy`."""

import math
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from envs_jax.base import Discrete, independent_mask
from envs_jax.coverage import Coverage
from envs_jax.coverage.actions import MOVES
from envs_jax.coverage.egocentric import actions_in_frames
from envs_jax.coverage.world import LATTICE, LEVELS
from jaxrl.algos.base import Algorithm
from jaxrl.algos.coma import Coma
from jaxrl.algos.ddpg import Ddpg
from jaxrl.algos.ppo import INPUT_LIMIT, Ppo
from jaxrl.algos.sac import Sac
from jaxrl.algos.student import Student
from jaxrl.common.errors import UsageError
from jaxrl.integrations.standalone import WEIGHTS, network_settings, source, weights_file
from jaxrl.runtime.policy import Policy

AGENT = Path(__file__).with_name("agent.py")
KNOWN: tuple[type[Algorithm], ...] = (Coma, Ddpg, Ppo, Sac, Student)  # whose `act` agent.py repeats


def agent_settings(policy: Policy) -> dict[str, Any]:
    """Return the settings of `agent.Policy`.

    Raises:
        UsageError: agent.py does not act as this algorithm does, or does not have its network.
    """
    algo, spec = policy.algo, policy.algo.spec
    acting = next(cls for cls in type(algo).__mro__ if "act" in vars(cls))
    if acting not in KNOWN:
        raise UsageError(
            f"the numpy format is for coma, ddpg, bicnet, sac, ppo and student, not for {type(algo).__name__.lower()}: "
            "choose --format stablehlo or onnx"
        )
    settings = network_settings(algo, "numpy") | {
        "agents": spec.num_agents,
        "observation_shape": spec.observation.shape,
        "input_limit": INPUT_LIMIT,
    }
    if getattr(algo, "egocentric", False):
        if not isinstance(policy.env, Coverage) or not isinstance(spec.action, Discrete):
            raise UsageError(
                "the numpy format makes egocentric views of coverage, not of other environments: choose --format "
                "stablehlo or onnx, or train with --egocentric false"
            )
        settings["frames"] = actions_in_frames(spec.action.n).tolist()
    if not isinstance(spec.action, Discrete):
        box = spec.action
        return settings | {
            "actions": "box",
            "numbers": math.prod(box.shape),
            "bounds": (np.asarray(box.low).tolist(), np.asarray(box.high).tolist()),  # of all numbers, or of each
            "squash": "clip" if isinstance(algo, Ppo) else "tanh",
            "action_shape": box.shape,
            "action_dtype": jnp.dtype(box.dtype).name,
        }
    rule = "each" if spec.next_mask is independent_mask else "sequential"
    masking = rule if algo.heeds_masks and policy._blank.action_mask is not None else "none"
    settings |= {"actions": "discrete", "masking": masking}
    if masking == "sequential" and isinstance(policy.env, Coverage):
        settings["moves"] = MOVES[spec.action.n].tolist()
        settings["highest"] = (LATTICE - 1, LATTICE - 1, LEVELS - 1)
    return settings


def agent_files(policy: Policy) -> dict[str, bytes]:
    """Return the content of agent.py and weights.npz. Raises UsageError as `agent_settings` does."""
    settings, params = agent_settings(policy), policy.params
    if isinstance(policy.algo, Student | Ppo):
        params = params["actor"]
    if isinstance(policy.algo, Ppo):
        actor, statistics = params["params"], policy.params["statistics"].get("actor")
        moments = {"input": {"mean": statistics.mean, "deviation": statistics.deviation}} if statistics else {}
        params = {"params": dict(actor.get("means", actor)) | moments}  # "means" of `GaussianOutputs`
    return {AGENT.name: source(AGENT), WEIGHTS: weights_file(settings, params)}
