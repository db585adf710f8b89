"""What the loops of `windows` follow: who is where, who hears whom, and how windows are cut out of maps."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from envs_jax.base import Array, pytree
from envs_jax.coverage import terrain as ground
from envs_jax.coverage import world
from envs_jax.coverage.maps.types import MapConfig, Measurements
from envs_jax.coverage.world import LATTICE
from envs_jax.stages import materialize


@pytree
class Plan:
    """Order of work of the loops: int32."""

    agents: Array  # [B, A, 8], see `Agent`
    by_level: Array  # [B, A], the agents in order of their altitudes
    starts: Array  # [B, LEVELS + 1], where each altitude begins in this order
    targets: Array  # [B, A, A], maps that every agent's message is entered into, the team's last
    heard: Array  # [B, A], how many they are
    rows: Array  # [B, n], marks: bit j is set in the footprint of agent j, the bits from A on are `terrain.axis_marks`
    columns: Array  # [B, n]


@pytree
class Agent:
    """One agent: int32[]."""

    number: Array
    level: Array  # altitude index
    row: Array  # horizontal lattice index
    column: Array
    top: Array  # first row of the window, a square inside the map that holds the clipped footprint
    left: Array  # its first column
    block_row: Array  # first block that the window touches, see `block_shares`
    block_column: Array


def window_side(config: MapConfig, level: int) -> int:
    """Side of the window of an agent at altitude index `level` in cells."""
    return 2 * world.radius(config.cells_per_footprint, level)


def make_plan(config: MapConfig, measurements: Measurements) -> Plan:
    """Plan of the update of [B] copies."""
    n, agents, (copies, *_) = config.n, config.num_agents, measurements.positions.shape
    row, column, level = (measurements.positions[..., axis] for axis in range(3))
    full = world.footprint(measurements.positions, config.cells_per_footprint)
    box = world.clip_footprint(full, n)
    if not isinstance(measurements.present, tuple):  # the absent measure nothing
        box = jax.tree.map(lambda bound: jnp.where(measurements.present, bound, 0), box)
    last = n - (full.bottom - full.top)
    levels = range(world.LEVELS)
    blocks = jnp.asarray(np.stack([block_shares(config.cells_per_footprint, level)[0] for level in levels]))
    number = jnp.broadcast_to(jnp.arange(agents, dtype=jnp.int32), level.shape)
    agent = Agent(
        number=number,
        level=level,
        row=row,
        column=column,
        top=jnp.clip(box.top, 0, last),
        left=jnp.clip(box.left, 0, last),
        block_row=blocks[level, row],
        block_column=blocks[level, column],
    )
    order = jnp.argsort(level, axis=1, stable=True).astype(jnp.int32)
    starts = jnp.sum(level[:, None, :] < jnp.arange(world.LEVELS + 1, dtype=jnp.int32)[None, :, None], axis=2)

    hears = jnp.swapaxes(measurements.received, 1, 2) & ~jnp.eye(agents, dtype=jnp.bool_)[None]  # [B, sender, receiver]
    everyone = isinstance(measurements.present, tuple)
    team = jnp.ones((copies, agents, 1), jnp.bool_) if everyone else measurements.present[..., None]
    hears = jnp.concatenate([hears, team], axis=2)
    targets = jnp.argsort(~hears, axis=2, stable=True)[..., :agents]
    first = (agents + 1) * jnp.arange(copies, dtype=jnp.int32)[:, None, None]

    lines = jnp.arange(n, dtype=jnp.int32)[None, None]
    bits = 1 << jnp.arange(agents, dtype=jnp.int32)[None, :, None]

    def marks(low: Array, high: Array, ground_marks: Array) -> Array:
        inside = (lines >= low[..., None]) & (lines < high[..., None])
        return jnp.sum(jnp.where(inside, bits, 0), axis=1, dtype=jnp.int32) | (ground_marks << agents)

    ground_rows, ground_columns = jax.vmap(functools.partial(ground.axis_marks, n=n))(measurements.terrain)
    return Plan(
        agents=jnp.stack(jax.tree.leaves(agent), axis=-1),
        by_level=order,
        starts=starts.astype(jnp.int32),
        targets=targets.astype(jnp.int32) + first,
        heard=jnp.sum(hears, axis=2, dtype=jnp.int32),
        rows=marks(box.top, box.bottom, ground_rows),
        columns=marks(box.left, box.right, ground_columns),
    )


# Windows of maps

# `dynamic_slice` and its inverse: indices lie in the arrays and need not be checked for negative numbers
cut_block = functools.partial(jax.lax.dynamic_slice, allow_negative_indices=False)
put_block = functools.partial(jax.lax.dynamic_update_slice, allow_negative_indices=False)


def at(leaf: Array, *index: Array | int) -> Array:
    """`leaf[*index]`."""
    rest = leaf.shape[len(index) :]
    corner = [jnp.int32(i) for i in (*index, *(0 for _ in rest))]
    return cut_block(leaf, corner, (*(1 for _ in index), *rest)).reshape(rest)


def agent_of(plan: Plan, b: Array, index: Array) -> Agent:
    """Agent `index` of copy b."""
    return Agent(*at(plan.agents, b, index))


def marks_of(plan: Plan, b: Array, agent: Agent, side: int) -> tuple[Array, Array]:
    """Marks of `Plan` of the rows int32[side, 1] and columns int32[1, side] of a window."""
    rows = cut_block(plan.rows, (b, agent.top), (1, side))
    columns = cut_block(plan.columns, (b, agent.left), (1, side))
    return rows.reshape(side, 1), columns


def cut(maps: Array, index: Array, top: Array | int, left: Array | int, side: int) -> Array:
    """dtype[side * side]: the cells of a window of one of the maps [M, k, k]."""
    slice_ = materialize(lambda maps, *corner: cut_block(maps, corner, (1, side, side)))
    return slice_(maps, index, jnp.int32(top), jnp.int32(left)).reshape(-1)


def paste(maps: Array, index: Array, top: Array | int, left: Array | int, side: int, cells: Array) -> Array:
    """Return the maps with the cells of a window of one of them replaced."""
    return put_block(maps, cells.reshape(1, side, side), (index, jnp.int32(top), jnp.int32(left)))


# Shares of blocks


@functools.cache
def block_shares(cells_per_footprint: int, level: int) -> tuple[np.ndarray, np.ndarray]:
    """Overlap of windows at altitude index `level` with the 11 blocks of an axis, by lattice index g of the agent.

    Returns:
        int32[11], first block that a window touches, and float32[11, blocks, side], the share of each of the blocks
        from that on which each of its rows (or columns) fills.
    """
    n = world.map_side(cells_per_footprint)
    side = 2 * world.radius(cells_per_footprint, level)
    blocks = min(LATTICE, LATTICE * side // n + 2)  # more a window cannot touch
    low = np.clip(world.centres(cells_per_footprint) - side // 2, 0, n - side)
    first = np.minimum(LATTICE * low // n, LATTICE - blocks).astype(np.int32)
    matrix = world.area_matrix(n)
    shares = [matrix[d : d + blocks, c : c + side] for d, c in zip(first, low, strict=True)]
    return first, np.stack(shares).astype(np.float32)


@functools.cache
def footprint_shares(cells_per_footprint: int, level: int) -> np.ndarray:
    """float32[11, 11, side]: `world.area_matrix` of the unclipped footprint, by lattice index of the agent.

    Its columns are shifted to the rows (or columns) of the window; those outside the map are left out.
    """
    n = world.map_side(cells_per_footprint)
    half = world.radius(cells_per_footprint, level)
    matrix = world.area_matrix(2 * half)
    shares = np.zeros((LATTICE, LATTICE, 2 * half), np.float32)
    for g, centre in enumerate(world.centres(cells_per_footprint)):
        low = np.clip(centre - half, 0, n - 2 * half)
        inside = np.arange(2 * half) + low - (centre - half)
        in_footprint = (inside >= 0) & (inside < 2 * half)
        shares[g][:, in_footprint] = matrix[:, inside[in_footprint]]
    return shares
