"""Agents that run without jaxrl: a Python file that needs only NumPy, and its weights in weights.npz."""

import io
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from envs_jax.base import Box
from jaxrl.algos.base import Algorithm
from jaxrl.common.errors import UsageError, UserError
from jaxrl.common.files import write_atomically
from jaxrl.common.types import Params
from jaxrl.nn.networks import MLP, ConvStack, GaussianOutputs, TeamNet

NETWORKS = Path(__file__).with_name("numpy_networks.py")
WEIGHTS = "weights.npz"
_BODY = "# Everything below is copied into exported agents.\n"


def source(agent: Path) -> bytes:
    """Return the source of an agent with the content of numpy_networks.py in place of its import."""
    _, _, body = NETWORKS.read_text().partition(_BODY)
    text, count = re.subn(
        r"^from jaxrl\.integrations\.numpy_networks import .*\n",
        lambda _: body.strip() + "\n",
        agent.read_text(),
        flags=re.M,
    )
    assert count == 1
    return text.encode()


def network_settings(algo: Algorithm, format_name: str) -> dict[str, Any]:
    """Return the settings of `numpy_networks.network` for the actor of an algorithm.

    Raises:
        UsageError: the actor is a network that `numpy_networks` does not have.
    """
    module, box = algo.networks["actor"].module, algo.spec.observation
    module = module.means if isinstance(module, GaussianOutputs) else module  # deviations do not change greedy actions
    kinds: dict[type, str] = {TeamNet: "team", MLP: "mlp", ConvStack: "conv"}
    if type(module) not in kinds or not isinstance(box, Box):
        raise UsageError(
            f"the {format_name} format is for the library's own networks, not for {type(module).__name__}: choose "
            "--format stablehlo"
        )
    if algo.spec.action_order:
        raise UsageError(
            f"the {format_name} format cannot put outputs in the order that the observation gives (action_order): "
            "choose --format stablehlo or onnx, or train on another observation"
        )
    scaled = getattr(algo, "scale_observation", False)
    settings = {"kind": kinds[type(module)], "scale": max(abs(box.lowest), abs(box.highest)) if scaled else 1.0}
    settings |= {"axes": len(box.shape), "inputs": math.prod(box.shape), "depth": module.depth}
    names = {TeamNet: ("rectify_first", "layer_norm", "communication"), ConvStack: ("stride",)}.get(type(module), ())
    return settings | {name: getattr(module, name) for name in names}


def weights_file(settings: Mapping[str, Any], params: Params) -> bytes:
    """Return the content of weights.npz: "settings" as JSON, and the actor's parameters as flax has them."""
    arrays = {
        "_".join(str(entry.key) for entry in path): np.asarray(leaf, np.float32)
        for path, leaf in jax.tree_util.tree_leaves_with_path(params["params"])
    }
    buffer = io.BytesIO()
    np.savez(buffer, settings=np.array(json.dumps(settings)), **arrays)  # type: ignore[arg-type]
    return buffer.getvalue()


def write_files(out: Path, files: Mapping[str, bytes]) -> list[Path]:
    """Write files by name into the directory `out`, which is made if absent; return their paths.

    Raises:
        UserError: they cannot be written.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            write_atomically(out / name, content)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"cannot write to {out} ({reason}): choose another --out") from None
    return [out / name for name in files]
