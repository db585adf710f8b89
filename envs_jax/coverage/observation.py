"""Observations of agents and critic: stacks of 11 x 11 maps, channel last, all values in [0, 1].

Actor (7 channels): 0 share of the budget left, 1 agent id (i + 1) / A, 2 positions around the agent, 3 weighted
entropy of the local belief, 4 weighted entropy of the last measurement, 5 probability of the local belief, 6 footprints
of the agents heard.
Where ages are shown, the actor has a further channel for each agent: the age of the last message of it, in missions.
Critic: the actor's, then 7 positions, 8 weighted entropy and 9 probability of the team's belief, 10 footprints, 11
actions of the others. Channel 2 is centred on the agent; resized maps are not, and cell d of them spans [4.545 d,
4.545 (d + 1)) m while lattice index d is the point 5 d m (kept from the original).
"""

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np

from envs_jax.base import Array, TimeStep
from envs_jax.coverage import world
from envs_jax.coverage.belief import KNOWN, Weights, clip_probability, entropy
from envs_jax.coverage.maps.types import MapConfig, Measurements
from envs_jax.coverage.sensor import ERROR
from envs_jax.coverage.world import LATTICE, LEVELS
from envs_jax.stages import materialize

ACTOR_CHANNELS = 7
TEAM_CHANNELS = 4
CRITIC_CHANNELS = 12

_ROWS = np.arange(LATTICE, dtype=np.int32)[:, None]
_COLUMNS = np.arange(LATTICE, dtype=np.int32)[None, :]


def _weighted_entropy(p: Array, weights: Weights) -> Array:
    """float32[..., 11, 11]: w(p) H(p)."""

    @materialize
    def weighted(p: Array) -> Array:
        return weights.pick(p > jnp.float32(KNOWN), p < jnp.float32(1.0 - KNOWN)) * entropy(p)

    return weighted(p.reshape(-1)).reshape(p.shape)


def _is_at(position: Array) -> Array:
    """bool[11, 11]: the cell of a lattice position int32[3]."""
    return (position[0] == _ROWS) & (position[1] == _COLUMNS)


def neighbours(positions: Array, received: Array, sent: Array | None = None) -> Array:
    """Channel 2, float32[A, 11, 11]: the area (1 inside, 0 outside) around each agent and who was heard there.

    Cell (a, b) is the lattice point (a - 5, b - 5) steps away from the agent. An agent shows as (g_z + 1) / 4; one in
    the same column as the observer hides the observer's own mark. `sent` int32[A, 3] are the positions in messages,
    None where they are the present ones.
    """
    senders = positions if sent is None else sent
    agents = positions.shape[0]
    centre = LATTICE // 2
    height = (positions[:, 2] + 1).astype(jnp.float32) / (LEVELS + 1)
    sent_height = height if sent is None else (senders[:, 2] + 1).astype(jnp.float32) / (LEVELS + 1)
    # row [A, 11, 1] and column [A, 1, 11] of the lattice point of each cell
    row = positions[:, 0, None, None] + (_ROWS - centre)[None]
    column = positions[:, 1, None, None] + (_COLUMNS - centre)[None]
    inside = (row >= 0) & (row < LATTICE) & (column >= 0) & (column < LATTICE)
    is_centre = (np.arange(LATTICE**2) == LATTICE**2 // 2).reshape(1, LATTICE, LATTICE)
    plane = jnp.where(is_centre, height[:, None, None], inside.astype(jnp.float32))
    for j in range(agents):
        heard = received[:, j] & (np.arange(agents) != j)
        is_heard = (row == senders[j, 0]) & (column == senders[j, 1]) & heard[:, None, None]
        plane = jnp.where(is_heard, sent_height[j], plane)
    return plane


def footprints(
    positions: Array, received: Array, sent: Array | None = None, present: Array | None = None, *,
    cells_per_footprint: int,
) -> tuple[Array, Array]:  # fmt: skip
    """Channel 6, float32[A, 11, 11], and channel 10, float32[11, 11].

    Channel 6: own footprint 1, else the footprint of any other agent heard 0, else 0.5. Channel 10: any footprint 1,
    else 0.5. Both are area-resized. The borders of all footprints cut the map into (2 A + 1)^2 rectangles of one value
    each, so resizing needs only their overlap with the 11 x 11 blocks. `sent` as of `neighbours`; footprints in
    messages are then further ones. Agents that are not `present` bool[A] have no footprint now; None: all are.
    """
    agents = positions.shape[0]
    n = world.map_side(cells_per_footprint)
    first_sent = 0 if sent is None else agents
    all_positions = positions if sent is None else jnp.concatenate([positions, sent])
    box = world.clip_footprint(world.footprint(all_positions, cells_per_footprint), n)
    row_share, row_holds = _strips(box.top, box.bottom, n)
    column_share, column_holds = _strips(box.left, box.right, n)
    heard = received & ~np.eye(agents, dtype=bool)

    @materialize
    def paint(row_holds: Array, column_holds: Array, heard: Array) -> Array:  # [A + 1, S, S]
        inside = row_holds[:, :, None] & column_holds[:, None, :]
        in_own = inside if sent is None else inside[:agents]
        others = jnp.zeros_like(in_own)
        anyone = jnp.zeros_like(inside[:1])
        for j in range(agents):
            others |= heard[:, j, None, None] & inside[first_sent + j][None]
            anyone |= inside[j][None] if present is None else inside[j][None] & present[j]
        one = jnp.float32(1)
        half = jnp.float32(0.5)
        zero = jnp.float32(0)
        views = jnp.where(in_own, one, jnp.where(others, zero, half))
        return jnp.concatenate([views, jnp.where(anyone, one, half)])

    @materialize
    def shrink(values: Array, share: Array) -> Array:  # [M, S, K] with [S, 11] to [M, K, 11]
        return functools.reduce(jnp.add, (values[:, s, :, None] * share[None, s, None] for s in range(share.shape[0])))

    # rounding may lead out of the interval
    resized = jnp.clip(shrink(shrink(paint(row_holds, column_holds, heard), row_share), column_share), 0.0, 1.0)
    return resized[:agents], resized[agents]


def _strips(low: Array, high: Array, n: int) -> tuple[Array, Array]:
    """The S = 2 M + 1 strips between the borders of the intervals [low, high), int32[M], in no particular order.

    Returns:
        float32[S, 11], share of each of the 11 blocks of the axis that a strip fills, and bool[M, S], which intervals
        hold it.
    """
    start = jnp.concatenate([jnp.zeros_like(low[:1]), low, high])
    index = np.arange(start.shape[0])
    stop = jnp.full_like(start, n)
    for k in index:  # a strip ends at the next border; of equal borders all but the last start an empty one
        next_border = (start[k] > start) | ((start[k] == start) & (index < k))
        stop = jnp.where(next_border, jnp.minimum(stop, start[k]), stop)
    holds = (start[None] >= low[:, None]) & (start[None] < high[:, None])
    return world.interval_share(start, stop, n), holds


def team_positions(positions: Array, present: Array | None = None) -> Array:
    """Channel 7, float32[11, 11]: (g_z + 1) / 3 where an agent is (the last one counts), else 0.

    Agents that are not `present` bool[A] do not show; None: all are.
    """
    height = (positions[:, 2] + 1).astype(jnp.float32) / LEVELS
    plane = jnp.zeros((LATTICE, LATTICE), jnp.float32)
    for j in range(positions.shape[0]):
        here = _is_at(positions[j])
        plane = jnp.where(here if present is None else here & present[j], height[j], plane)
    return plane


def observe(
    t: Array,
    measurements: Measurements,
    probability: Array,
    measured: Array,
    total: int,
    config: MapConfig,
    ages: Array | None = None,
    team: Any = (),
) -> tuple[Array, Array]:
    """Observations float32[A, 11, 11, 7] and the team's channels 7 to 10, float32[11, 11, 4].

    Args:
        t: int32[], time.
        measurements: positions of agents, and who heard whom.
        probability: float32[A + 1, 11, 11], resized local beliefs and the team's.
        measured: float32[A, 11, 11], see `UpdateStats.measured`.
        total: budget B.
        config: resolution, and importance of cells.
        ages: float32[A, A], see `communication.ages`, for A further channels of observations; None: there are none.
        team: `Team`, what others observe is 0; () = all are present.
    """
    positions = measurements.positions
    received = measurements.received
    agents = config.num_agents
    weights = config.weights
    budget_left = jnp.maximum((total - t).astype(jnp.float32) / total, 0.0)
    agent_id = jnp.arange(1, agents + 1, dtype=jnp.float32) / (team.size.astype(jnp.float32) if team else agents)
    present = team.present if team else None
    error = jnp.take(jnp.asarray(ERROR, jnp.float32), positions[:, 2], mode="clip")
    sent = measurements.sent.positions if measurements.sent else None
    paint = functools.partial(footprints, cells_per_footprint=config.cells_per_footprint)
    agent_footprints, any_footprint = materialize(paint)(positions, received, sent, present)
    uncertainty = _weighted_entropy(probability, weights)
    p = clip_probability(probability)
    observation = jnp.stack(
        [
            jnp.full((agents, LATTICE, LATTICE), budget_left),
            jnp.broadcast_to(agent_id[:, None, None], (agents, LATTICE, LATTICE)),
            materialize(neighbours)(positions, received, sent),
            uncertainty[:agents],
            _weighted_entropy(0.5 + (0.5 - error)[:, None, None] * measured, weights),
            p[:agents],
            agent_footprints,
            *(() if ages is None else jnp.broadcast_to(ages.T[..., None, None], (agents, agents, LATTICE, LATTICE))),
        ],
        axis=-1,
    )
    if present is not None:
        observation = jnp.where(present[:, None, None, None], observation, jnp.float32(0.0))
    team_map = (uncertainty[agents], p[agents], any_footprint)
    return observation, jnp.stack([materialize(team_positions)(positions, present), *team_map], axis=-1)


def critic_input(timestep: TimeStep, action: Array, num_actions: int) -> Array:
    """[A, 11, 11, 12], dtype of the observation: the critic's view of every agent, given the actions int32[A].

    Channel 11 shows (a_j + 1) / n at the position of every OTHER agent j (the last one counts), 0 elsewhere.
    """
    observation = timestep.observation
    team = timestep.global_state["maps"]
    positions = timestep.global_state["positions"]
    agents = positions.shape[0]
    present = timestep.present
    values = (action + 1).astype(jnp.float32) / num_actions
    others = jnp.zeros((agents, LATTICE, LATTICE), jnp.float32)
    for j in range(agents):
        here = _is_at(positions[j])[None] & (np.arange(agents) != j)[:, None, None]
        here = here if isinstance(present, tuple) else here & present[j]
        others = jnp.where(here, values[j], others)
    team = jnp.broadcast_to(team.astype(observation.dtype)[None], (agents, *team.shape))
    return jnp.concatenate([observation, team, others[..., None].astype(observation.dtype)], axis=-1)
