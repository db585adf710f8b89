"""Scripted policies on the oracle: random, greedy information gain, lawn-mower.

They follow the baselines of the public code of Westheider et al. (arXiv 2303.01150, `dmar-bonn/ipp-marl`), whose
quirks the docstrings name, so that its scores can be reproduced.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from bench.reference.coverage.oracle import (
    MOVES,
    P_MAX,
    P_MIN,
    Mission,
    Settings,
    bayes,
    boundary_mask,
    collision_mask,
    entropy,
    footprint,
)

Policy = Callable[[Mission], np.ndarray]  # mission -> actions [N]; the mission is not changed


def random_policy(mission: Mission) -> np.ndarray:
    """[N] int: uniform over the boundary mask. Collisions are ignored."""
    masks = [boundary_mask(position, mission.settings.num_actions) for position in mission.positions]
    return np.array([mission.rng.choice(np.flatnonzero(mask)) for mask in masks])


# ---------------------------------------------------------------- greedy information gain


def gain_weight(p: np.ndarray, class_weights: tuple[float, float] = (0.0, 1.0)) -> np.ndarray:
    """Weight of a cell in the expected gain: as in the reward, but for undecided cells their probability."""
    return np.where(p > 0.501, class_weights[1], np.where(p < 0.499, class_weights[0], p))


def information_gain(belief: np.ndarray, position: np.ndarray, settings: Settings) -> float:
    """Expected reduction of weighted entropy, per thousand cells, by one measurement from a position [3].

    Over the clipped footprint, with p the clipped belief [n, n] and p1, p0 its posteriors after an occupied and a free
    reading: sum of p (H(p) - H(p1)) w(p1) + (1 - p) (H(p) - H(p0)) w(p0).
    """
    r0, r1, c0, c1 = footprint(position, settings.q)
    altitude = int(position[2])
    p = np.clip(belief[r0:r1, c0:c1], P_MIN, P_MAX)
    before = entropy(p)
    gain = 0.0
    for reading, probability in ((True, p), (False, 1.0 - p)):
        after = bayes(p, reading, altitude, settings.prior)
        weight = gain_weight(after, settings.class_weights)
        gain += float((probability * (before - entropy(after)) * weight).sum())
    return gain / 1000.0


def greedy_masks(mission: Mission) -> np.ndarray:
    """[N, A] bool: masks that avoid the *present* positions of lower-numbered agents; never empty."""
    masks = []
    for i, position in enumerate(mission.positions):
        boundary = boundary_mask(position, mission.settings.num_actions)
        mask = collision_mask(boundary, position, mission.positions[:i])
        masks.append(mask if mask.any() else boundary)
    return np.array(masks)


def raw_gains(mission: Mission, masks: np.ndarray) -> np.ndarray:
    """[N, A] float64: information gain of each allowed action on the agent's own fused belief; 0 where masked."""
    gains = np.zeros(masks.shape)
    for i, a in np.argwhere(masks):
        target = mission.positions[i] + MOVES[masks.shape[1]][a]
        gains[i, a] = information_gain(mission.local_beliefs[i], target, mission.settings)
    return gains


def normalise(gains: np.ndarray) -> np.ndarray:
    """[N, A]: each agent's gains divided by their sum (left alone if that is 0)."""
    total = gains.sum(axis=1, keepdims=True)
    return gains / np.where(total == 0.0, 1.0, total)


def discount(scores: np.ndarray, masks: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """[N, A]: scores lowered where another agent may go to the same place.

    Agents and actions in order; where allowed action b of another agent j leads to the place of (i, a), the score of
    (i, a) becomes what it was before, times 1 - the present score of (j, b). Only the last such pair counts, and later
    agents read scores that are already lowered: the outcome depends on the order of the agents.

    Args:
        scores: [N, A] normalised gains.
        masks: [N, A] bool.
        targets: [N, A, 3] place that each action leads to.
    """
    scores = scores.copy()
    for i, a in np.ndindex(*scores.shape):
        pairs = np.argwhere(masks & (targets == targets[i, a]).all(-1))
        contested = [(j, b) for j, b in pairs if j != i]
        if contested:
            scores[i, a] *= 1.0 - scores[contested[-1]]
    return scores


def ig_policy(mission: Mission, communication: bool = True) -> np.ndarray:
    """[N] int: the action of greatest information gain, the first one if several; see `discount`."""
    masks = greedy_masks(mission)
    scores = normalise(raw_gains(mission, masks))
    if communication:
        scores = discount(scores, masks, mission.positions[:, None, :] + MOVES[masks.shape[1]])
    return np.where(masks, scores, -np.inf).argmax(axis=1)


# ---------------------------------------------------------------- lawn-mower


def lawnmower_path(index: int, altitude: int) -> np.ndarray:
    """[15, 3] int metres: one of four fixed paths, each two passes of 30 m, 10 m apart.

    Paths 0 and 1 run along x at y = 10, 20 and y = 30, 40; paths 2 and 3 do the same with x and y exchanged.
    """
    there = np.arange(10, 41, 5)
    along = np.concatenate([there, [40], there[::-1]])
    lane = 10 + 20 * (index % 2)
    across = np.concatenate([np.full(7, lane), [lane + 5], np.full(7, lane + 10)])
    sides = (along, across) if index < 2 else (across, along)
    return np.stack([*sides, np.full(15, altitude)], axis=1)


class Lawnmower:
    """N agents on the four paths, taken in turn, at one altitude. At the end of a path the agent returns along it."""

    def __init__(self, num_agents: int, altitude: int = 5):
        self.paths = np.stack([lawnmower_path(i % 4, altitude) for i in range(num_agents)])

    @property
    def start(self) -> np.ndarray:
        """[N, 3] first pose of every agent."""
        return self.paths[:, 0]

    def pose(self, k: int) -> np.ndarray:
        """[N, 3] pose of measurement k."""
        last = self.paths.shape[1] - 1
        k %= 2 * last
        return self.paths[:, min(k, 2 * last - k)]

    def __call__(self, mission: Mission) -> np.ndarray:
        """[N] int: the moves towards the next pose."""
        moves = MOVES[mission.settings.num_actions]
        displacement = self.pose(mission.t + 1) - mission.positions
        return (moves[None] == displacement[:, None]).all(-1).argmax(axis=1)


# ---------------------------------------------------------------- missions


def make_policy(name: str, settings: Settings, **options: Any) -> Policy:
    """Make the policy "random", "ig" (option communication) or "lawnmower" (option altitude)."""
    if name == "random":
        return random_policy
    if name == "ig":
        return lambda mission: ig_policy(mission, **options)
    if name == "lawnmower":
        return Lawnmower(settings.num_agents, **options)
    raise ValueError(f"unknown policy {name!r}; use random, ig or lawnmower.")
