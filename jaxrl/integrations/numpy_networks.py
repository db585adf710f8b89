"""The networks of `jaxrl.nn.networks` in NumPy, for agents that run without JAX; see `standalone`.

Weights are arrays float32 by the names of the flax parameters, joined by "_". Needs Python 3.7 and NumPy 1.20.
"""

from __future__ import annotations

from typing import Any

import numpy as np

# Everything below is copied into exported agents.


def network(weights: dict[str, np.ndarray], settings: dict[str, Any], x: np.ndarray, carry: Any = None) -> np.ndarray:
    """Return the outputs float32[..., A, n] of a team's observations [..., A, *observation].

    Args:
        weights: by name.
        settings: "kind" (team, mlp or conv), "scale", "axes" (of an observation), "depth", for images
            "stride", for a team "rectify_first", "layer_norm", "communication", and with a memory "memory" (gru or
            lstm) and "memory_layers".
        x: numbers.
        carry: {"hidden1", ...}, float32[..., A, units] of the memory, whose entries are replaced by the next ones.
    """
    x = np.asarray(x, np.float32)
    lead = x.shape[: x.ndim - settings["axes"]]
    if settings["kind"] == "team":
        return _team(weights, settings, x.reshape(*lead, -1) / np.float32(settings["scale"]))
    if settings["kind"] == "conv":
        x = _convolutions(weights, x.reshape(-1, *x.shape[len(lead) :]), settings["stride"])
    x = x.reshape(int(np.prod(lead)), -1)
    for layer in range(settings["depth"]):
        x = np.maximum(_dense(weights, x, f"head_fc{layer + 1}"), 0)
    if "memory" in settings:
        x = _remember(weights, settings, x.reshape(*lead, -1), carry).reshape(len(x), -1)
    return _dense(weights, x, "head_out").reshape(*lead, -1)


def _remember(weights: dict[str, np.ndarray], settings: dict[str, Any], x: np.ndarray, carry: Any) -> np.ndarray:
    """Return the last layer's hidden state [..., units] after a step of the memory of `Recurrent`."""
    for layer in range(1, settings["memory_layers"] + 1):
        hidden = carry[f"hidden{layer}"]
        from_input = _dense(weights, x, f"memory{layer}_input")
        from_state = _dense(weights, hidden, f"memory{layer}_state")
        if settings["memory"] == "gru":
            (reset, update, new), (reset_, update_, new_) = (np.split(y, 3, axis=-1) for y in (from_input, from_state))
            update = _sigmoid(update + update_)
            x = (1 - update) * np.tanh(new + _sigmoid(reset + reset_) * new_) + update * hidden
        else:
            enter, keep, new, show = np.split(from_input + from_state, 4, axis=-1)
            cell = _sigmoid(keep) * carry[f"cell{layer}"] + _sigmoid(enter) * np.tanh(new)
            x, carry[f"cell{layer}"] = _sigmoid(show) * np.tanh(cell), cell
        carry[f"hidden{layer}"] = x
    return x


def _team(weights: dict[str, np.ndarray], settings: dict[str, Any], x: np.ndarray) -> np.ndarray:
    """`TeamNet`."""
    for layer in range(settings["depth"]):
        x = _dense(weights, x, f"fc{layer + 1}")
        if layer or settings["rectify_first"]:
            x = np.maximum(_norm(weights, x, layer + 1) if settings["layer_norm"] else x, 0)
        if layer == 0 and settings["communication"]:
            forward, backward = _lstm(weights, x, "there"), _lstm(weights, x[..., ::-1, :], "back")
            x = np.concatenate([forward, backward[..., ::-1, :]], axis=-1)
    return _dense(weights, x, "out")


def _dense(weights: dict[str, np.ndarray], x: np.ndarray, name: str) -> np.ndarray:
    return x @ weights[f"{name}_kernel"] + weights[f"{name}_bias"]


def _norm(weights: dict[str, np.ndarray], x: np.ndarray, layer: int) -> np.ndarray:
    centred = x - x.mean(-1, keepdims=True)
    normal = centred / np.sqrt(np.square(centred).mean(-1, keepdims=True) + np.float32(1e-6))
    return normal * weights[f"norm{layer}_scale"] + weights[f"norm{layer}_bias"]


def _lstm(weights: dict[str, np.ndarray], x: np.ndarray, direction: str) -> np.ndarray:
    """[..., A, F] -> [..., A, units]: one LSTM over the agents in the order of the rows."""
    state = cell = np.zeros((*x.shape[:-2], len(weights[f"lstm_{direction}_state_kernel"])), np.float32)
    states = []
    gate_inputs = _dense(weights, x, f"lstm_{direction}_input")
    for agent in range(x.shape[-2]):
        gates = gate_inputs[..., agent, :] + _dense(weights, state, f"lstm_{direction}_state")
        enter, keep, new, show = np.split(gates, 4, axis=-1)
        cell = _sigmoid(keep) * cell + _sigmoid(enter) * np.tanh(new)
        state = _sigmoid(show) * np.tanh(cell)
        states.append(state)
    return np.stack(states, axis=-2)


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return np.float32(0.5) * (np.tanh(x * np.float32(0.5)) + np.float32(1))  # the sigmoid, without overflow


def _convolutions(weights: dict[str, np.ndarray], x: np.ndarray, stride: int) -> np.ndarray:
    """Return the convolutions of `ConvStack` of images [N, H, W, C], each with ReLU."""
    for layer in (1, 2, 3):
        kernel = weights[f"conv{layer}_kernel"]
        height, width, channels, features = kernel.shape
        patches = np.lib.stride_tricks.sliding_window_view(x, (height, width), (1, 2))  # [N, H', W', C, h, w]
        if layer == 1:
            patches = patches[:, ::stride, ::stride]
        rows = patches.transpose(0, 1, 2, 4, 5, 3).reshape(-1, height * width * channels)
        x = (rows @ kernel.reshape(-1, features)).reshape(*patches.shape[:3], features)
        x = np.maximum(x + weights[f"conv{layer}_bias"], 0)
    return x
