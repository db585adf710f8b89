"""Exported policies, each opened as its format's users open it: actions, carry = act(arrays by name, carry)."""

import json
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np

Act = Callable[..., tuple[list[np.ndarray], Any]]  # an array of actions for all agents, or one for each agent


def load_agent(folder: Path) -> Any:
    """The module that agent.py in a folder is, compiled from its text."""
    module = types.ModuleType("exported")
    module.__file__ = str(folder / "agent.py")
    text = (folder / "agent.py").read_text()
    assert "import jax" not in text and "jaxrl." not in text
    exec(compile(text, module.__file__, "exec"), vars(module))
    return module


def open_numpy(folder: Path) -> Act:
    module = load_agent(folder)
    settings = module.POLICY.settings
    has_memory = "memory" in settings
    names = ["observation"]
    if settings["actions"] != "box" and settings["masking"] != "none":
        names += ["action_mask", "mask_state"]
    if has_memory:
        names.append("first")

    def act(arrays: Mapping[str, np.ndarray], carry: Any = None) -> tuple[list[np.ndarray], Any]:
        given = {name: arrays[name] for name in names if name in arrays}
        action, carry = module.act(**given, carry=carry) if has_memory else (module.act(**given), None)
        return action if isinstance(action, list) else [action], carry

    return act


def open_stablehlo(folder: Path) -> Act:
    manifest = json.loads((folder / "policy.json").read_text())
    exported = jax.export.deserialize(bytearray((folder / "policy.stablehlo").read_bytes()))
    assert set(exported.platforms) == {"cpu", "cuda"}

    def act(arrays: Mapping[str, np.ndarray], carry: Any = None) -> tuple[list[np.ndarray], Any]:
        inputs = [arrays[row["name"]] for row in manifest["inputs"]]
        if not manifest["carry"]:
            return [np.asarray(x) for x in jax.tree.leaves(exported.call(*inputs))], None
        zeros = tuple(jnp.zeros((len(inputs[0]), *row["shape"][1:]), row["dtype"]) for row in manifest["carry"])
        action, carry = exported.call(*inputs, carry or zeros)
        return [np.asarray(action)], carry

    return act


def open_onnx(folder: Path) -> Act:
    import onnxruntime

    manifest = json.loads((folder / "policy.json").read_text())
    session = onnxruntime.InferenceSession(str(folder / "policy.onnx"), providers=["CPUExecutionProvider"])
    outputs = len(manifest["action"])

    def act(arrays: Mapping[str, np.ndarray], carry: Any = None) -> tuple[list[np.ndarray], Any]:
        inputs = {row["name"]: arrays[row["name"]] for row in manifest["inputs"]}
        rows = len(arrays["observation"])
        zeros = [np.zeros((rows, *row["shape"][1:]), row["dtype"]) for row in manifest["carry"]]
        names = [row["name"] for row in manifest["carry"]]
        results = session.run(None, inputs | dict(zip(names, carry or zeros, strict=True)))
        return results[:outputs], results[outputs:]

    return act


OPENERS = {"numpy": open_numpy, "stablehlo": open_stablehlo, "onnx": open_onnx}
PACKAGES = {"numpy": (), "stablehlo": ("flatbuffers",), "onnx": ("onnx", "onnxruntime")}
