"""Scripted policies, after the public repository dmar-bonn/ipp-marl: policy(env, state, timestep, key) -> int32[A].

random          uniform over the moves that stay inside the area
ig              greedy expected information gain of the next measurement, all agents at once; contested cells are
                discounted; the collision mask uses the present positions of lower-numbered agents (as in the original)
ig_sequential   the same gain, agents acting in turn: each respects the moves already chosen and counts
                no cell that an earlier one is going to measure
lawnmower       fixed sweeps at 10 m (`lawnmower_5`, `lawnmower_15`: at 5 m and 15 m), agents assigned to four paths in
                turn; an agent that is not on its path flies to the path's start first (with `start` "paths_10",
                "paths_5", "paths_15" the missions begin there)
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from envs_jax.base import Array, TimeStep
from envs_jax.coverage import actions, belief, world
from envs_jax.coverage.sensor import EVIDENCE
from envs_jax.coverage.starts import PATHS
from envs_jax.coverage.types import CoverageConfig, State

_GAIN_UNIT = 1000.0


def random(env: CoverageConfig, state: State, timestep: TimeStep, key: Array) -> Array:
    """Draw uniformly from the boundary mask, regardless of the other agents."""
    logits = jnp.where(timestep.action_mask, jnp.float32(0), jnp.float32(-jnp.inf))
    return jax.random.categorical(key, logits, axis=-1).astype(jnp.int32)


# Information gain


def expected_gain(env: CoverageConfig, log_odds: Array, level: Array) -> Array:
    """Weighted entropy that one more reading of a cell is expected to take away, per cell.

    p (H(p) - H(p1)) w'(p1) + (1 - p) (H(p) - H(p0)) w'(p0), where p1 and p0 are p after a reading "class 1" and "class
    0", and w' is the weight of the reward, except that unknown cells weigh as much as their probability.
    Log-odds are float32[...]; `level` int32[] is the altitude index of the measurement.
    """
    weights = env.weights
    value = jnp.clip(log_odds, -belief.CLIP, belief.CLIP)
    p = belief.probability(value)
    evidence = jnp.take(jnp.asarray(EVIDENCE, jnp.float32), level, mode="clip")
    uncertainty = belief.entropy_of_log_odds(value)

    def outcome(updated: Array) -> Array:
        after = belief.probability(updated)
        above = after > belief.KNOWN
        below = after < 1.0 - belief.KNOWN
        weight = jnp.where(above | below, weights.pick(above, below), after)
        return weight * (uncertainty - belief.entropy_of_log_odds(updated))

    start = belief.logit(env.prior)
    return p * outcome(value + evidence - start) + (1.0 - p) * outcome(value - evidence - start)


def _gains(env: CoverageConfig, stored: Array, targets: Array, claimed: world.Box | None = None) -> Array:
    """float32[M]: expected gain of a measurement from each of the lattice positions `targets` int32[M, 3].

    `stored` dtype[n, n] is the belief; cells in the boxes [K] `claimed` do not count.
    """
    n = env.n
    side = 2 * world.radius(env.q, world.LEVELS - 1)

    def gain(target: Array) -> Array:
        box = world.clip_footprint(world.footprint(target, env.q), n)
        top, left = jnp.clip(box.top, 0, n - side), jnp.clip(box.left, 0, n - side)
        window = jax.lax.dynamic_slice(stored, (top, left), (side, side))
        rows = (top + jnp.arange(side, dtype=jnp.int32))[:, None]
        columns = (left + jnp.arange(side, dtype=jnp.int32))[None, :]
        counts = box.holds(rows, columns)
        if claimed is not None:
            cuts = jax.tree.map(lambda bound: bound[:, None, None], claimed)
            counts &= ~jnp.any(cuts.holds(rows[None], columns[None]), axis=0)
        cells = jnp.where(counts, expected_gain(env, env.storage.log_odds(window), target[2]), 0.0)
        return jnp.sum(jnp.sum(cells, axis=0)) / _GAIN_UNIT

    return jax.vmap(gain)(targets)


def _targets(env: CoverageConfig, positions: Array) -> Array:
    """int32[A, n, 3]: where each action leads (masked ones may lead outside)."""
    return positions[:, None, :] + actions.MOVES[env.num_actions][None]


def ig_scores(env: CoverageConfig, state: State, timestep: TimeStep, communication: bool) -> tuple[Array, Array]:
    """Gains and scores float32[A, n] of all actions; the scores are normalised, and discounted if `communication`.

    For agents i and actions a in order, score(i, a) is multiplied by 1 - score(j, b) for the last open action b of
    another agent j that leads to the same place, using the scores computed so far.
    """
    positions = state.positions
    n = env.num_actions
    agents = env.num_agents
    moved = jnp.tri(agents, k=-1, dtype=jnp.bool_)
    moved = moved & timestep.present[None] if env.has_teams else moved
    mask = jax.vmap(lambda position, earlier, open_: actions.collision_mask(position, positions, earlier, open_, n))(
        positions, moved, timestep.action_mask
    )
    mask = mask & timestep.present[:, None] if env.has_teams else mask  # the absent want no cell
    targets = _targets(env, positions)
    gains = jax.vmap(functools.partial(_gains, env))(state.maps.beliefs[:agents], targets)
    gains = jnp.where(mask, gains, 0.0)
    sums = jnp.sum(gains, axis=-1, keepdims=True)
    scores = gains / jnp.where(sums == 0.0, 1.0, sums)
    if not communication:
        return gains, scores
    same = jnp.all(targets[:, :, None, None] == targets[None, None], axis=-1)
    other = ~np.eye(agents, dtype=bool)[:, None, :, None]
    clash = (same & other & mask[None, None]).reshape(agents * n, agents * n)

    def discount(place: Array, flat: Array) -> Array:
        last = agents * n - 1 - jnp.argmax(clash[place][::-1])
        factor = jnp.where(jnp.any(clash[place]), 1.0 - flat[last], 1.0)
        return flat.at[place].multiply(factor)

    return gains, jax.lax.fori_loop(0, agents * n, discount, scores.reshape(-1)).reshape(agents, n)


def ig(env: CoverageConfig, state: State, timestep: TimeStep, key: Array) -> Array:
    """Greedy information gain. Scores are shared unless the communication range is 0."""
    silent = not env.random_range and env.communication_range == 0.0
    scores = ig_scores(env, state, timestep, not silent)[1]
    inside = jnp.where(timestep.action_mask, scores, -1.0)  # scores are all 0 where no gain is left
    return jnp.argmax(inside, axis=-1).astype(jnp.int32)


def ig_sequential(env: CoverageConfig, state: State, timestep: TimeStep, key: Array) -> Array:
    """Greedy information gain, one agent after the other."""
    positions = state.positions
    agents = env.num_agents
    targets = _targets(env, positions)

    def choose(i: Array, chosen: Array) -> Array:
        present = timestep.present if env.has_teams else None
        mask = actions.next_mask(positions, timestep.action_mask, chosen, i, env.num_actions, present)
        box = world.clip_footprint(world.footprint(actions.move(positions, chosen, env.num_actions), env.q), env.n)
        earlier = jnp.arange(agents) < i
        earlier = earlier if present is None else earlier & present
        claimed = world.Box(box.top, jnp.where(earlier, box.bottom, box.top), box.left, box.right)
        gains = _gains(env, state.maps.beliefs[i], targets[i], claimed)
        return chosen.at[i].set(jnp.argmax(jnp.where(mask, gains, -jnp.inf)).astype(jnp.int32))

    return jax.lax.fori_loop(0, agents, choose, jnp.zeros((agents,), jnp.int32))


# Lawn-mower


def lawnmower(env: CoverageConfig, state: State, timestep: TimeStep, key: Array, level: int = 1) -> Array:
    """Sweep along the fixed paths at altitude index `level` (with 4 actions: at the altitude of the start)."""
    agents = env.num_agents
    moves = actions.MOVES[env.num_actions]
    path = jnp.asarray(PATHS[np.arange(agents) % len(PATHS)])
    height = jnp.full((agents,), level, jnp.int32) if np.any(moves[:, 2]) else state.positions[:, 2]
    at = jnp.all(path == state.positions[:, None, :2], axis=-1) & (state.positions[:, 2] == height)[:, None]
    following = (jnp.argmax(at, axis=-1) + 1) % path.shape[1]  # the first pose follows the last
    target = jnp.where(jnp.any(at, axis=-1), following, 0)
    goal = jnp.take_along_axis(path, target[:, None, None], axis=1)[:, 0]
    direction = jnp.sign(jnp.concatenate([goal, height[:, None]], axis=-1) - state.positions)
    # one axis at a time: first the altitude, then x, then y
    climb = direction[:, 2] != 0
    along = ~climb & (direction[:, 0] != 0)
    step = direction * jnp.stack([along, ~climb & ~along, climb], axis=-1).astype(jnp.int32)
    return jnp.argmax(jnp.all(step[:, None] == moves[None], axis=-1), axis=-1).astype(jnp.int32)


BASELINES: dict[str, Callable[..., Array]] = {
    "random": random,
    "ig": ig,
    "ig_sequential": ig_sequential,
    "lawnmower": lawnmower,
    "lawnmower_5": functools.partial(lawnmower, level=0),
    "lawnmower_15": functools.partial(lawnmower, level=2),
}
