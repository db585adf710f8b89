"""A policy exported by jaxrl: `act(observation)` returns its greedy actions.

It needs only Python 3.7 and NumPy; weights and settings are in weights.npz next to this file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

import numpy as np

from jaxrl.integrations.numpy_networks import network  # copied in its place by the export


class Policy:
    """The content of the weights file: `settings`, and the arrays of the network by name in `weights`."""

    def __init__(self, path: str) -> None:
        with np.load(path, allow_pickle=False) as file:
            self.weights = {name: file[name] for name in file.files if name != "settings"}
            self.settings: dict[str, Any] = json.loads(str(file["settings"]))

    def act(
        self,
        observation: Any,
        action_mask: Any = None,
        mask_state: Any = None,
        next_mask: Callable[[Any, np.ndarray, np.ndarray, int], np.ndarray] | None = None,
        carry: dict[str, np.ndarray] | None = None,
        first: Any = False,
    ) -> Any:
        """Return the greedy actions int32[..., A], or float[..., A, *action] of continuous ones.

        They are in the environment's own units, as its step takes them: within its bounds, and several integers as an
        array int32[..., A, *action]; a list with an array for each agent where these have other shapes. A policy with a
        memory returns them and the carry for its next call.

        Args:
            observation: [A, ...] or [B, A, ...].
            action_mask: [..., A, n] of bool or of integers 0 and 1, the allowed actions; only for policies that heed
                masks, which need it.
            mask_state: coverage: int[..., A, 3], the agents' places on the lattice before the actions.
            next_mask: where masks depend on the actions of earlier agents, and the environment is not coverage:
                (mask_state, action_mask[A, n], chosen int[A], agent) -> bool[n], as `EnvSpec.next_mask`.
            carry: of a policy with a memory, what the last call returned; None where all episodes begin.
            first: bool or bool[B], episodes that begin with this observation.

        Raises ValueError: shapes that do not fit; observations that are no finite real numbers or far out of those of
        training; no mask where one is needed, one of other numbers or without an allowed action, one that the policy
        ignores, or no rule for masks that depend on other agents' actions; a carry of other environments, not finite,
        or for a policy without a memory; `first` of other numbers than 0 and 1.
        """
        settings = self.settings
        observation = np.asarray(observation)
        expected_shape = (settings["agents"], *settings["observation_shape"])
        single = observation.shape == expected_shape
        if observation.shape[-len(expected_shape) :] != expected_shape or observation.ndim > len(expected_shape) + 1:
            raise ValueError(f"observations need the shape {expected_shape}, with or without a batch axis before it")
        self._check(observation)
        views = self._normalize(observation[None] if single else observation)
        carry = self._reset(carry, first, views.shape[:2])
        if "frames" in settings:
            views, action_indices = egocentric_views(np.asarray(views, np.float32), np.array(settings["frames"]))
            outputs = np.take_along_axis(network(self.weights, settings, views, carry), action_indices, -1)
        else:
            outputs = network(self.weights, settings, views, carry)
        mask = self._mask(action_mask, outputs, single)
        if settings["actions"] == "box":
            mean = outputs[..., : settings["numbers"]]
            actions = self._rescale(np.tanh(mean) if settings["squash"] == "tanh" else np.clip(mean, -1, 1))
        elif settings["masking"] == "sequential":
            actions = self._in_turn(outputs, mask, mask_state, next_mask, single)
        else:
            actions = np.argmax(np.where(mask, outputs, -np.inf), -1).astype(np.int32)
        chosen = self._to_package(actions)
        if single:
            chosen = [one[0] for one in chosen] if isinstance(chosen, list) else chosen[0]
        return (chosen, carry) if "memory" in settings else chosen

    def _check(self, observation: np.ndarray) -> None:
        """Raise ValueError for observations that cannot be meant."""
        if observation.dtype.kind not in "biuf":
            raise ValueError(f"observations must be arrays of real numbers, not of {observation.dtype}")
        low, high = (np.asarray(limit) for limit in self.settings["limits"])
        outside = ~((observation >= low) & (observation <= high))  # also true for NaN
        if outside.any():
            low, high = (np.broadcast_to(limit, observation.shape)[outside][0] for limit in (low, high))
            raise ValueError(
                f"observations hold {observation[outside][0]:g}: give finite numbers in the units of training, from "
                f"{low:g} to {high:g}"
            )
        if self.settings["whole"] and (observation != np.floor(observation)).any():
            raise ValueError("observations must be whole numbers, in the units of training: do not scale them")

    def _reset(self, carry: Any, first: Any, batch: tuple[int, ...]) -> dict[str, np.ndarray]:
        """Return the carry [B, A, units], 0 where an episode begins, {} without a memory. Raises ValueError."""
        settings = self.settings
        if "memory" not in settings:
            if carry is not None or first is not False:
                raise ValueError("the policy has no memory: leave carry and first out")
            return {}
        flags = np.asarray(first)
        if flags.shape not in ((), batch[:1]) or flags.dtype.kind not in "biu" or not np.isin(flags, (0, 1)).all():
            raise ValueError(f"first must be True, False or bool[{batch[0]}], one for each observation")
        begins = np.broadcast_to(flags != 0, batch[:1])[:, None, None]
        names = ("hidden", "cell") if settings["memory"] == "lstm" else ("hidden",)
        zeros = np.zeros((*batch, settings["memory_size"]), np.float32)
        blank = {f"{name}{layer + 1}": zeros for layer in range(settings["memory_layers"]) for name in names}
        if carry is None:
            return blank
        if not isinstance(carry, dict) or set(carry) != set(blank):
            raise ValueError(f"carry must be what the last call returned, with {', '.join(blank)}, or None")
        if any(np.shape(state) != zeros.shape for state in carry.values()):
            raise ValueError("carry and observations have different numbers of environments: begin with carry=None")
        carry = {name: np.where(begins, zeros, carry[name]) for name in blank}
        if not all(np.isfinite(state).all() for state in carry.values()):
            raise ValueError(
                "carry holds NaN or infinity: give what the last call returned, or None where episodes begin"
            )
        return carry

    def _mask(self, action_mask: Any, outputs: np.ndarray, single: bool) -> np.ndarray:
        """Return the open actions bool[B, A, n]. Raises ValueError as `act` does."""
        if self.settings["actions"] == "box" or self.settings["masking"] == "none":
            if action_mask is not None:
                raise ValueError("the policy was trained without action masks: leave action_mask out")
            return np.ones(outputs.shape, bool)
        shape = outputs.shape[1:] if single else outputs.shape
        if action_mask is None:
            raise ValueError(f"the policy needs action_mask, bool{list(shape)}, true where an action is open")
        mask = np.asarray(action_mask)
        if mask.dtype.kind not in "biu":
            raise ValueError(f"action_mask must be of bool or of integers 0 and 1 (open), not of {mask.dtype}")
        if mask.shape != shape:
            raise ValueError(f"action_mask must have the shape {shape}, as the observation has, not {mask.shape}")
        if not np.isin(mask, (0, 1)).all():
            raise ValueError("action_mask must hold 1 where an action is open and 0 elsewhere, not other numbers")
        if not mask.any(-1).all():
            raise ValueError("action_mask closes every action of an agent: leave at least one open")
        return mask.reshape(outputs.shape) != 0

    def _normalize(self, x: np.ndarray) -> np.ndarray:
        """Normalise observations [..., *observation] as in training, by mean and deviation of each number."""
        if "input_mean" not in self.weights:
            return x
        limit = self.settings["input_limit"]
        x = np.asarray(x, np.float32) - self.weights["input_mean"]
        return np.clip(x / self.weights["input_deviation"], -limit, limit)

    def _rescale(self, action: np.ndarray) -> np.ndarray:
        """Rescale actions [B, A, n] in [-1, 1] to the environment's box."""
        settings, (low, high) = self.settings, self.settings["bounds"]
        if (low, high) != (-1, 1):
            low, high = np.reshape(low, -1), np.reshape(high, -1)  # one number for all, or one for each
            half, low, high = (np.asarray(x, np.float32) for x in ((high - low) / 2, low, high))
            action = np.clip(low + half * (action + np.float32(1)), low, high)
        return action.reshape(*action.shape[:2], *settings["action_shape"]).astype(settings["action_dtype"])

    def _to_package(self, actions: Any) -> Any:
        """Return actions [B, A, ...] as the environment's package numbers them."""
        tables = [self.weights[f"actions{agent}"] for agent in range(self.settings["tables"])]
        if not tables:
            return actions
        if len(tables) == 1:
            return tables[0][actions]
        chosen = [table[actions[:, agent]] for agent, table in enumerate(tables)]
        return np.stack(chosen, 1) if len({one.shape for one in chosen}) == 1 else chosen

    def _in_turn(self, outputs: np.ndarray, mask: np.ndarray, states: Any, rule: Any, single: bool) -> np.ndarray:
        """Choose one agent after another, int32[B, A]; masks depend on the actions chosen before."""
        moves = self.settings.get("moves")
        if rule is None and moves is None:
            raise ValueError("masks depend on other agents' actions: pass next_mask")
        if rule is None and states is None:
            raise ValueError("masks depend on other agents' actions: pass mask_state, the places of the agents")
        states = [states] if single else [None] * len(outputs) if states is None else states
        moves = np.array(moves)
        highest = np.array(self.settings.get("highest"))
        chosen = np.zeros(outputs.shape[:2], np.int32)
        for row, agent in np.ndindex(*chosen.shape):
            if rule is None:
                allowed = coverage_mask(moves, highest, np.asarray(states[row]), mask[row], chosen[row], agent)
            else:
                allowed = rule(states[row], mask[row], chosen[row], agent)
            if not np.any(allowed):
                raise ValueError(f"next_mask closes every action of agent {agent}: leave at least one open")
            chosen[row, agent] = np.argmax(np.where(allowed, outputs[row, agent], -np.inf))
        return chosen


def egocentric_views(views: np.ndarray, frames: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return observations of coverage as their agents see them, and which output belongs to each action.

    Each view is mirrored and turned until its agent has x <= y <= 5; then maps are added that are centred on it.

    Args:
        views: [..., 11, 11, 7].
        frames: int[8, n], what each action is in the frame 4 (x mirrored) + 2 (y mirrored) + (then axes exchanged).

    Returns:
        [..., 11, 11, 10], and int[..., n].
    """
    flat = views.reshape(-1, *views.shape[-3:])
    turned = []
    action_indices = []
    for view in flat:
        inside = view[:, :, 2] > 0  # the part of the surroundings that lies in the area
        left, right = inside[:5, 5].sum(), inside[6:, 5].sum()
        below, above = inside[5, :5].sum(), inside[5, 6:].sum()
        x, y = min(left, right), min(below, above)
        action_indices.append(frames[4 * (left > right) + 2 * (below > above) + (x > y)])
        view = view[::-1] if left > right else view
        view = view[:, ::-1] if below > above else view
        view = view.swapaxes(0, 1) if x > y else view
        wide = np.pad(view[:, :, [3, 5, 6]], ((5, 0), (5, 0), (0, 0)))
        low, high = min(x, y), max(x, y)
        turned.append(np.concatenate([view, wide[low : low + 11, high : high + 11]], axis=2))
    shape = (*views.shape[:-3], *turned[0].shape)
    return np.stack(turned).reshape(shape), np.stack(action_indices).reshape(*views.shape[:-3], frames.shape[1])


def coverage_mask(
    moves: np.ndarray, highest: np.ndarray, places: np.ndarray, boundary: np.ndarray, chosen: np.ndarray, agent: int
) -> np.ndarray:
    """Return the moves bool[n] open to an agent of coverage once earlier agents have chosen.

    Args:
        moves: int[n, 3], lattice steps by action.
        highest: int[3], largest place on the lattice.
        places: int[A, 3], before the moves.
        boundary: bool[A, n], moves that stay inside the area.
        chosen: int[A], the actions; only those of agents 0 .. agent - 1 are read.
        agent: whose moves are returned.
    """
    mask = boundary[agent].copy()
    lateral = np.any(moves[:, :2] != 0, -1)
    for other in range(agent):
        offset = np.clip(places[other] + moves[chosen[other]], 0, highest) - places[agent]
        towards = np.all(moves[:, :2] == offset[:2], -1)
        if len(moves) == 27:
            closed = lateral & towards & (abs(offset[2]) <= 1)
            closed |= ~lateral & (moves[:, 2] != 0) & (not offset[:2].any() and abs(offset[2]) == 1)
        else:  # whatever the altitude; the last of six moves stays open
            closed = towards & (len(moves) != 6 or mask.sum() > 1)
        mask &= ~closed
    return mask if mask.any() else boundary[agent]


POLICY = Policy(os.path.join(os.path.dirname(os.path.abspath(__file__)), "weights.npz"))
act = POLICY.act
