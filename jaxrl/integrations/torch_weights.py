"""Weights of the published snakes trainer (jidiai/Competition_3v3snakes) for `--init_from actor.pth[,critic.pth]`.

The files are state dicts saved by `torch.save` (PyTorch 1.6 or newer): a zip archive of a pickle and of raw
numbers. The pickle is read by an unpickler that accepts float32 tensors only, so that no file can run code;
PyTorch is not needed.
"""

import io
import math
import pickle
import pickletools
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import jax
import numpy as np

from envs_jax.base import Array, short_repr
from jaxrl.algos.base import Algorithm
from jaxrl.algos.ddpg import Ddpg
from jaxrl.common.errors import UsageError, UserError

SUFFIX = ".pth"
_MAX_REASON = 200  # characters
_LAYERS = {"prev_dense.0": "fc1", "post_dense.0": "fc2", "post_dense.2": "out"}
_LSTM = {"weight_ih": "input_kernel", "bias_ih": "input_bias", "weight_hh": "state_kernel", "bias_hh": "state_bias"}


class _Reader(pickle.Unpickler):
    """Unpickles dictionaries of contiguous float32 tensors, whose data are separate files of the archive."""

    def __init__(self, archive: zipfile.ZipFile) -> None:
        name = next((name for name in archive.namelist() if name.endswith("/data.pkl")), "")
        text = archive.read(name)
        for code, argument, _ in pickletools.genops(text):  # one opcode can make Python allocate gigabytes
            if "PUT" in code.name and int(argument or 0) > len(text):
                raise pickle.UnpicklingError("it numbers more objects than it holds")
        super().__init__(io.BytesIO(text))
        self._archive = archive
        self._folder = name.removesuffix("data.pkl")

    def find_class(self, module: str, name: str) -> Any:
        known = {
            "collections.OrderedDict": OrderedDict,
            "torch._utils._rebuild_tensor_v2": _tensor,
            "torch.FloatStorage": "float32",
        }
        if f"{module}.{name}" not in known:
            raise pickle.UnpicklingError(f"it holds {module}.{name}, only tensors of float32 are read")
        return known[f"{module}.{name}"]

    def persistent_load(self, pid: Any) -> np.ndarray:
        _, _, name, _, _ = pid
        return np.frombuffer(self._archive.read(f"{self._folder}data/{name}"), "<f4")


def _tensor(numbers: np.ndarray, start: int, shape: tuple[int, ...], strides: tuple[int, ...], *rest: Any) -> Any:
    if strides != tuple(math.prod(shape[k + 1 :]) for k in range(len(shape))):
        raise ValueError("a tensor is not contiguous")
    return numbers[start : start + math.prod(shape)].reshape(shape)


def read(path: Path) -> dict[str, np.ndarray]:
    """Return the tensors of a state dict, float32, by name.

    Raises UserError: no such file, or not such a state dict.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            tensors = _Reader(archive).load()
        if not isinstance(tensors, dict) or not all(
            isinstance(name, str) and isinstance(x, np.ndarray) for name, x in tensors.items()
        ):
            raise ValueError("it is not a dictionary of tensors by name")
    except OSError as error:
        raise UserError(f"cannot read {path} ({error.strerror}): name a file of weights") from None
    except Exception as error:  # a damaged pickle can raise anything
        reason = str(error)[:_MAX_REASON]
        raise UserError(
            f"{path} is not a state dict that torch.save of PyTorch 1.6 or newer wrote ({reason}): save it again there"
        ) from None
    return dict(tensors)


def team_net(tensors: dict[str, np.ndarray]) -> Any:
    """Convert tensors, with matrices (out, in), to parameters of a `networks.TeamNet`, with matrices (in, out).

    Raises ValueError: other names than the published networks have.
    """
    names = {f"{theirs}.{kind}": f"{ours}_{ending}" for theirs, ours in _LAYERS.items()
             for kind, ending in (("weight", "kernel"), ("bias", "bias"))}  # fmt: skip
    lstm = {f"comm_net.lstm.{theirs}_l0{suffix}": f"{direction}_{ours}" for theirs, ours in _LSTM.items()
            for suffix, direction in (("", "there"), ("_reverse", "back"))}  # fmt: skip
    expected = names | (lstm if any("lstm" in name for name in tensors) else {})
    for name in sorted(tensors.keys() ^ expected.keys()):
        problem = "has" if name in tensors else "lacks"
        raise ValueError(f"it {problem} {short_repr(name)}, unlike the networks of the published snakes trainer")
    params: dict[str, Any] = {ours: tensors[theirs].T for theirs, ours in names.items()}
    if len(expected) > len(names):
        params["lstm"] = {ours: tensors[theirs].T for theirs, ours in lstm.items()}
    return {"params": params}


def _describe_network(params: Any) -> str:
    """Describe the shapes of a network in words; critics have a leading axis."""
    layers = params["params"]
    if any(layers[name].ndim < 2 for name in ("fc1_kernel", "out_kernel")):
        return "vectors instead of matrices"
    first = layers["fc1_kernel"]
    inputs, units = first.shape[-2:]
    hidden = sum(name.startswith("fc") and name.endswith("kernel") for name in layers)
    extras = ("an LSTM, " if "lstm" in layers else "") + ("layer norm, " if "norm1_scale" in layers else "")
    several = f"{len(first)} times " if first.ndim == 3 and len(first) > 1 else ""
    outputs = layers["out_kernel"].shape[-1]
    return f"{several}{inputs} inputs, {hidden} layers of {units} units, {extras}{outputs} outputs"


def load(source: str, algo: Algorithm, key: Array) -> Any:
    """Return the `inputs` of `Ddpg.init`: the networks of "actor.pth" or "actor.pth,critic.pth".

    Without a second file the critic is initialised from `key`.

    Raises UserError: a file cannot be read, or its network does not match the run.
    """
    files = [Path(name.strip()) for name in source.split(",") if name.strip()]
    if len(files) > 2:
        raise UsageError(f"--init_from {source} names {len(files)} files: give actor{SUFFIX} or actor{SUFFIX},critic"
                         f"{SUFFIX}")  # fmt: skip
    if not isinstance(algo, Ddpg):
        raise UsageError(f"{source} holds weights of the published snakes trainer: use them with ddpg or bicnet")

    def fresh(key: Array) -> Any:
        return algo.weights(algo.init(key, None))

    expected = jax.eval_shape(fresh, key)
    weights = {}
    for role, path in zip(("actor", "critic"), files, strict=False):
        try:
            network = team_net(read(path))
        except ValueError as error:
            raise UsageError(f"{path} does not match: {error}") from None
        if role == "critic":
            network = jax.tree.map(lambda x: x[None], network)
        if jax.tree.map(np.shape, network) != jax.tree.map(np.shape, expected[role]):
            raise UsageError(
                f"{path} holds {_describe_network(network)}, the {role} of this run has "
                f"{_describe_network(expected[role])}: give the settings that the weights were trained with, such as "
                "--config ddpg_competition or bicnet"
            )
        weights[role] = network
    if algo.first_layer != "linear" or algo.scale_observation:
        raise UsageError(
            f"the networks of {source} have no ReLU after the first layer and use unscaled observations: give "
            "--first_layer linear --scale_observation false"
        )
    if "critic" not in weights:
        weights["critic"] = jax.jit(lambda key: fresh(key)["critic"])(key)
    return weights
