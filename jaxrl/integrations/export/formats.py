"""`export`: a policy as files, in one of several formats."""

import dataclasses
import importlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.export
import numpy as np

from envs_jax.base import closest, short_repr
from jaxrl.common.errors import UsageError, UserError
from jaxrl.common.files import expand_home, write_atomically
from jaxrl.common.version import __version__
from jaxrl.integrations.export.greedy import PLATFORMS, Greedy, make_greedy
from jaxrl.integrations.export.units import describe_bounds, describe_environment
from jaxrl.integrations.standalone import agent_files, jidi_files
from jaxrl.runtime.load import load_policy, write_small_run
from jaxrl.runtime.policy import Policy

MANIFEST = "policy.json"
RUN = "run"
ABOUT = {  # what inputs and outputs are, by the first word of their names
    "observation": "observations of the agents",
    "reward": "rewards of the agents for their last action, 0 at the first step",
    "terminated": "the episode ended here for good",
    "truncated": "the episode was cut here",
    "first": "an episode begins with this step",
    "action_mask": "actions open to each agent before the others of this step are known",
    "mask_state": "what the masks depend on besides the other agents' actions (coverage: places on the lattice)",
    "task": "number of the task",
    "present": "agents that act in this step",
    "links": "age in steps of the message of agent j that reaches agent i now, -1 without one; [i, j]",
    "carry": "what the last call returned; anything where an episode begins, such as zeros",
    "action": "best actions of the agents, in the environment's own units, as its step takes them",
}


def export(
    policy: Policy | str | Path, format: str, path: str | Path, *, greedy: bool = False, search: bool = False
) -> list[Path]:
    """Write a policy as files of a format.

    Args:
        policy: a policy, or the directory of a run.
        format: safetensors (parameters), stablehlo or onnx (the greedy policy as a function), numpy (the same as a
            Python file), jidi (an agent for the Jidi platform), run (a run directory with only the weights).
        path: directory to write to, made if absent; files of the same names in it are replaced.
        greedy: for jidi, whose agent samples its actions without greedy and search; the other formats act greedily.
        search: for jidi, whose agent then chooses moves by rollouts.

    Returns:
        the files' paths.

    Raises:
        UserError: a sentence: no such format, one that does not fit the policy or whose package is absent, or a path
            that cannot be written.
    """
    if not isinstance(format, str) or format not in FORMATS:
        raise UsageError(f"unknown format {short_repr(format)}: {closest(str(format), FORMATS)}")
    if not isinstance(path, str | Path):
        raise UsageError(f"name the directory to write to, such as 'exported', not {short_repr(path)}")
    out = Path(expand_home(path))
    if format == RUN:
        if isinstance(policy, Policy):
            raise UsageError("the format run needs the directory of a run: pass it instead of the policy")
        return write_small_run(policy, out)
    policy = policy if isinstance(policy, Policy) else load_policy(policy)
    is_jidi = format == "jidi"
    if search and not is_jidi:
        raise UsageError(f"search is for agents of the jidi format, not for {format}: leave it out")
    files = jidi_files(policy.env, policy.algo, policy.params, greedy, search) if is_jidi else WRITERS[format](policy)
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            write_atomically(out / name, content)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"cannot write to {out} ({reason}): choose another --out") from None
    return [out / name for name in files]


def describe_policy(policy: Policy) -> dict[str, Any]:
    """Describe a policy for JSON: algorithm, environment, versions, checkpoint, settings."""
    config = policy.config
    return {
        "algorithm": config.algo if config else type(policy.algo).__name__.lower(),
        "environment": policy.env.spec.name,
        "environment_version": policy.env.version,
        "jaxrl_version": __version__,
        "checkpoint": policy.step,
        "settings": config.plain() if config else {},
    }


def _safetensors(policy: Policy) -> dict[str, bytes]:
    library = _package("safetensors.numpy", "safetensors")
    described = describe_policy(policy) | {"bounds": describe_bounds(policy.env)} | describe_environment(policy.env)
    metadata = {name: x if isinstance(x, str) else json.dumps(x) for name, x in described.items()}
    arrays = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(policy.params):
        name = jax.tree_util.keystr(path, simple=True, separator=".")  # such as params.head.fc1_kernel
        arrays[name] = np.ascontiguousarray(leaf).reshape(leaf.shape)
    return {"policy.safetensors": library.save(arrays, metadata=metadata)}


def _stablehlo(policy: Policy) -> dict[str, bytes]:
    _package("flatbuffers", "flatbuffers")  # with which jax.export makes its files
    greedy = make_greedy(policy)
    (batch,) = jax.export.symbolic_shape("batch")
    exported = jax.export.export(jax.jit(greedy.function), platforms=PLATFORMS)(*greedy.structs(batch))
    names = ", ".join([x.name for x in greedy.inputs] + ["carry"] * bool(greedy.carry))
    call = f"jax.export.deserialize(bytes).call({names}) -> {', '.join(x.name for x in greedy.actions)}"
    if greedy.carry:
        call += ", carry; a carry is the tuple of the arrays that 'carry' lists"
    manifest = _manifest(policy, greedy, call, {"platforms": PLATFORMS, "jax_version": jax.__version__})
    return {"policy.stablehlo": bytes(exported.serialize()), MANIFEST: manifest}


def _onnx(policy: Policy) -> dict[str, bytes]:
    _package("onnx", "onnx")
    from jaxrl.integrations.export.onnx_graph import OPSET, to_onnx

    if getattr(policy.algo, "convolution", None) in ("auto", "dense", "patches"):
        settings: Any = {"convolution": "conv"}  # ONNX's own operator, instead of matrix products that suit XLA
        policy = dataclasses.replace(policy, algo=dataclasses.replace(policy.algo, **settings))
    greedy = make_greedy(policy)
    call = "inputs by name; outputs are the action" + "s of each agent" * (len(greedy.actions) > 1)
    if greedy.carry:
        call += ", then the next carry, in the order of the carry's inputs"
    return {"policy.onnx": to_onnx(greedy), MANIFEST: _manifest(policy, greedy, call, {"opset": OPSET})}


def _manifest(policy: Policy, greedy: Greedy, call: str, more: Mapping[str, Any]) -> bytes:
    """Return the JSON file that belongs to a function: how to call it, its arrays, and what is known of the policy."""

    def rows(arguments: Any) -> list[dict[str, Any]]:
        return [
            {"name": x.name, "shape": ["batch", *x.shape], "dtype": x.dtype}
            | ({"about": ABOUT[word]} if (word := x.name.partition(".")[0]) in ABOUT else {})
            for x in arguments
        ]

    bounds = describe_bounds(policy.env)
    inputs, actions = ([row | bounds.get(row["name"], {}) for row in rows(x)] for x in (greedy.inputs, greedy.actions))
    parts = {"call": call, "inputs": inputs, "carry": rows(greedy.carry), "action": actions}
    parts |= describe_environment(policy.env)
    return (json.dumps(parts | dict(more) | describe_policy(policy), indent=1) + "\n").encode()


def _package(module: str, name: str) -> Any:
    """Import an optional package. Raises UsageError that names the extra."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError:
        raise UsageError(f"this format needs the package {name}: install it with pip install -e '.[export]'") from None


WRITERS: dict[str, Callable[[Policy], dict[str, bytes]]] = {
    "safetensors": _safetensors,
    "stablehlo": _stablehlo,
    "onnx": _onnx,
    "numpy": agent_files,
}
FORMATS = (*WRITERS, "jidi", RUN)
