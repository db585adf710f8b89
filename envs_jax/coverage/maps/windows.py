"""The CPU backend for large maps: it updates footprints only.

Copies, senders and receivers are rolled loops, so that a branch is really a branch: the window of an altitude has a
static size, and a message that was not received costs nothing. Maps are changed in place. Resized maps and sums are
running values: a resized map changes by A_rows (p' - p) A_columns^T over a window, the sums of the team's map
by the cells of the footprints, each counted once.

Fusing clips the whole receiving map. Only the last updates can have left cells beyond the clip, so a flag per map tells
whether a clip is due; resized probabilities are stored separately for the clipped map and for what lies beyond the
clip (`types.Excess`), so that clipping need not compute probabilities again.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from envs_jax.base import Array, pytree
from envs_jax.coverage import sensor, world
from envs_jax.coverage import terrain as ground
from envs_jax.coverage.belief import P_MIN, probability, read_word
from envs_jax.coverage.maps.fixed_point import carry, count_flags, fixed, pack_flags, totals
from envs_jax.coverage.maps.types import Excess, Mapper, Maps, Measurements, Report, Sums
from envs_jax.coverage.world import LATTICE
from envs_jax.stages import stage

_EXACT = jax.lax.Precision.HIGHEST


def update(mapper: Mapper, maps: Maps, survey: Measurements) -> tuple[Maps, Report]:
    """Update the maps of one copy; under vmap every branch is taken: use `update_batch` instead."""
    batch = jax.tree.map(lambda leaf: leaf[None], (maps, survey))
    return jax.tree.map(lambda leaf: leaf[0], update_batch(mapper, *batch))


@pytree
class _Work:
    """State of the loops. M = B (A + 1) maps, those of one copy in a row; W is the side of the largest window."""

    beliefs: Array  # dtype[M, n, n]
    clipped: Array  # float32[M, 11, 11], resized probabilities of the clipped maps
    excess: Excess  # see `types.Excess`, leaves [M, ...]
    sums: Array  # int32[B, 10], `Report.before` and the leaves of `types.Sums`
    measured: Array  # float32[B, A, 11, 11], see `types.Report`
    change: Array  # dtype[A, W, W], readings of each agent of this copy as summands, 0 outside the footprint
    old: Array  # dtype[A, W, W], the team's map before the update, in the same windows


def update_batch(mapper: Mapper, maps: Maps, survey: Measurements) -> tuple[Maps, Report]:
    """`update` of [B] copies, one after the other."""
    agents, n = mapper.num_agents, mapper.n
    copies = maps.beliefs.shape[0]
    count = copies * (agents + 1)
    side = _side(mapper, world.LEVELS - 1)
    excess = jax.tree.map(lambda leaf: leaf.reshape(count, *leaf.shape[2:]), maps.excess)
    sums = maps.sums
    work = _Work(
        beliefs=maps.beliefs.reshape(count, n, n),
        clipped=maps.probability.reshape(count, LATTICE, LATTICE) - excess.probability,
        excess=excess,
        sums=jnp.concatenate([sums.weighted, sums.weighted, sums.interest, sums.counts], axis=1),
        measured=jnp.zeros((copies, agents, LATTICE, LATTICE), jnp.float32),
        change=jnp.zeros((agents, side, side), maps.beliefs.dtype),
        old=jnp.zeros((agents, side, side), maps.beliefs.dtype),
    )
    plan = stage(functools.partial(_plan, mapper))(survey)
    work = jax.lax.fori_loop(0, copies, lambda b, work: _update_copy(mapper, survey, plan, b, work), work)
    before, weighted, interest, counts = jnp.split(work.sums, (2, 4, 6), axis=1)
    maps = Maps(
        beliefs=work.beliefs.reshape(maps.beliefs.shape),
        probability=(work.clipped + work.excess.probability).reshape(maps.probability.shape),
        sums=Sums(carry(weighted), carry(interest), counts),
        excess=jax.tree.map(lambda leaf, like: leaf.reshape(like.shape), work.excess, maps.excess),
    )
    return maps, Report(measured=work.measured, before=carry(before))


# The order of work


@pytree
class _Plan:
    """What the loops follow: int32."""

    agents: Array  # [B, A, 8], see `_Agent`
    by_level: Array  # [B, A], the agents in order of their altitudes
    starts: Array  # [B, LEVELS + 1], where each altitude begins in this order
    targets: Array  # [B, A, A], maps that every agent's message is entered into, the team's last
    heard: Array  # [B, A], how many they are
    rows: Array  # [B, n], marks: bit j is set in the footprint of agent j, the bits from A on are `terrain.axis_marks`
    columns: Array  # [B, n]


@pytree
class _Agent:
    """One agent: int32[]."""

    number: Array
    level: Array  # altitude index
    row: Array  # horizontal lattice index
    column: Array
    top: Array  # first row of the window, a square inside the map that holds the clipped footprint
    left: Array  # its first column
    block_row: Array  # first block that the window touches, see `_shares`
    block_column: Array


def _side(mapper: Mapper, level: int) -> int:
    return 2 * world.radius(mapper.q, level)


def _plan(mapper: Mapper, survey: Measurements) -> _Plan:
    n, agents, (copies, *_) = mapper.n, mapper.num_agents, survey.positions.shape
    row, column, level = (survey.positions[..., axis] for axis in range(3))
    full = world.footprint(survey.positions, mapper.q)
    box = world.clip_footprint(full, n)
    last = n - (full.bottom - full.top)
    blocks = jnp.asarray(np.stack([_shares(mapper.q, level)[0] for level in range(world.LEVELS)]))
    number = jnp.broadcast_to(jnp.arange(agents, dtype=jnp.int32), level.shape)
    agent = _Agent(
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

    hears = jnp.swapaxes(survey.received, 1, 2) & ~jnp.eye(agents, dtype=jnp.bool_)[None]  # [B, sender, receiver]
    hears = jnp.concatenate([hears, jnp.ones((copies, agents, 1), jnp.bool_)], axis=2)
    targets = jnp.argsort(~hears, axis=2, stable=True)[..., :agents]
    first = (agents + 1) * jnp.arange(copies, dtype=jnp.int32)[:, None, None]

    lines = jnp.arange(n, dtype=jnp.int32)[None, None]
    bits = 1 << jnp.arange(agents, dtype=jnp.int32)[None, :, None]

    def marks(low: Array, high: Array, ground_marks: Array) -> Array:
        inside = (lines >= low[..., None]) & (lines < high[..., None])
        return jnp.sum(jnp.where(inside, bits, 0), axis=1) | (ground_marks << agents)

    ground_rows, ground_columns = jax.vmap(functools.partial(ground.axis_marks, n=n))(survey.terrain)
    return _Plan(
        agents=jnp.stack(jax.tree.leaves(agent), axis=-1),
        by_level=order,
        starts=starts.astype(jnp.int32),
        targets=targets.astype(jnp.int32) + first,
        heard=jnp.sum(hears, axis=2, dtype=jnp.int32),
        rows=marks(box.top, box.bottom, ground_rows),
        columns=marks(box.left, box.right, ground_columns),
    )


# indices are inside the arrays and need not be checked for negative numbers
_slice = functools.partial(jax.lax.dynamic_slice, allow_negative_indices=False)
_replace = functools.partial(jax.lax.dynamic_update_slice, allow_negative_indices=False)


def _at(leaf: Array, *index: Array | int) -> Array:
    """`leaf[*index]`."""
    rest = leaf.shape[len(index) :]
    corner = [jnp.int32(i) for i in (*index, *(0 for _ in rest))]
    return _slice(leaf, corner, (*(1 for _ in index), *rest)).reshape(rest)


def _agent(plan: _Plan, b: Array, number: Array) -> _Agent:
    return _Agent(*_at(plan.agents, b, number))


def when(condition: Array, function: Callable[[Array, Any], Any], operand: Any) -> Any:
    """function(zero, operand) if condition, else operand: a branch that changes big arrays in place (`cond` copies).

    It is a loop of one iteration or none. A compiler may hoist loop invariants and compute them in any case. `zero` is
    int32 0, which a compiler cannot know: what is computed from an index that `zero` was added to stays inside.
    """
    return jax.lax.fori_loop(0, condition.astype(jnp.int32), function, operand)


def _update_copy(mapper: Mapper, survey: Measurements, plan: _Plan, b: Array, work: _Work) -> _Work:
    """Every agent looks and enters what it sees; then messages are entered, senders in order; then sums are made."""
    agents = mapper.num_agents

    def by_level(step: Callable[..., _Work], work: _Work) -> _Work:
        """Every agent's step: a loop for each altitude, whose windows have a size of their own."""
        for level in range(world.LEVELS):

            def turn(i: Array, work: _Work, level: int = level) -> _Work:
                return step(mapper, level, survey, plan, b, _agent(plan, b, _at(plan.by_level, b, i)), work)

            work = jax.lax.fori_loop(_at(plan.starts, b, level), _at(plan.starts, b, level + 1), turn, work)
        return work

    def send(number: Array, work: _Work) -> _Work:
        count, targets = _at(plan.heard, b, number), _at(plan.targets, b, number)
        own_level = _agent(plan, b, number).level
        for level in range(world.LEVELS):

            def turn(i: Array, work: _Work, level: int = level) -> _Work:
                target = _at(targets, i)
                return _enter(mapper, level, _agent(plan, b, number), target, _clip(mapper, target, work))

            work = jax.lax.fori_loop(0, jnp.where(own_level == level, count, 0), turn, work)
        return work

    work = by_level(_look, work)  # apart from the next step: a loop that cuts two windows to change one copies the maps
    work = by_level(_enter_own, work)
    work = jax.lax.fori_loop(0, agents, send, work)
    return by_level(_account, work)


# Windows


def _cut(maps: Array, index: Array, top: Array | int, left: Array | int, side: int) -> Array:
    """dtype[side * side]: the cells of a window of one of the maps [M, k, k]."""
    slice_ = stage(lambda maps, *corner: _slice(maps, corner, (1, side, side)))
    return slice_(maps, index, jnp.int32(top), jnp.int32(left)).reshape(-1)


def _paste(maps: Array, index: Array, top: Array | int, left: Array | int, side: int, cells: Array) -> Array:
    """Return the maps with the cells of a window of one of them replaced."""
    return _replace(maps, cells.reshape(1, side, side), (index, jnp.int32(top), jnp.int32(left)))


def _marks(plan: _Plan, b: Array, agent: _Agent, side: int) -> tuple[Array, Array]:
    """Marks of `_Plan` of the rows int32[side, 1] and columns int32[1, side] of a window."""
    rows = _slice(plan.rows, (b, agent.top), (1, side))
    columns = _slice(plan.columns, (b, agent.left), (1, side))
    return rows.reshape(side, 1), columns


@functools.cache
def _shares(q: int, level: int) -> tuple[np.ndarray, np.ndarray]:
    """Overlap of windows at altitude index `level` with the 11 blocks of an axis, by lattice index g of the agent.

    Returns:
        int32[11], first block that a window touches, and float32[11, blocks, side], the share of each of the blocks
        from that on which each of its rows (or columns) fills.
    """
    n = world.map_side(q)
    side = 2 * world.radius(q, level)
    blocks = min(LATTICE, LATTICE * side // n + 2)  # more a window cannot touch
    low = np.clip(world.centres(q) - side // 2, 0, n - side)
    first = np.minimum(LATTICE * low // n, LATTICE - blocks).astype(np.int32)
    matrix = world.area_matrix(n)
    shares = [matrix[d : d + blocks, c : c + side] for d, c in zip(first, low, strict=True)]
    return first, np.stack(shares).astype(np.float32)


@functools.cache
def _footprint_shares(q: int, level: int) -> np.ndarray:
    """float32[11, 11, side]: `world.area_matrix` of the unclipped footprint, by lattice index of the agent.

    Its columns are shifted to the rows (or columns) of the window; those outside the map are left out.
    """
    n, half = world.map_side(q), world.radius(q, level)
    matrix = world.area_matrix(2 * half)
    shares = np.zeros((LATTICE, LATTICE, 2 * half), np.float32)
    for g, centre in enumerate(world.centres(q)):
        low = np.clip(centre - half, 0, n - 2 * half)
        inside = np.arange(2 * half) + low - (centre - half)
        kept = (inside >= 0) & (inside < 2 * half)
        shares[g][:, kept] = matrix[:, inside[kept]]
    return shares


def _add_resized(mapper: Mapper, level: int, resized: Array, target: Array, agent: _Agent, cells: Array) -> Array:
    """Return resized maps float32[M, 11, 11] after the cells of a window of map `target` grew by `cells`.

    Args:
        mapper: the geometry.
        level: altitude index of the agent whose window it is.
        resized: float32[M, 11, 11].
        target: int32[], number of the map.
        agent: the agent.
        cells: float32[side * side].
    """
    shares = jnp.asarray(_shares(mapper.q, level)[1])
    grown = _resized(shares, agent, cells)
    corner = (target, agent.block_row, agent.block_column)
    present = _slice(resized, corner, (1, *grown.shape))
    return _replace(resized, present + grown[None], corner)


def _resized(shares: Array, agent: _Agent, cells: Array) -> Array:
    """float32[d, d]: sums of cells [side * side] by their shares [11, d, side] in rows and in columns."""
    side = shares.shape[-1]
    rows = jnp.dot(_at(shares, agent.row), cells.reshape(side, side), precision=_EXACT)
    return jnp.einsum("dc,ec->de", rows, _at(shares, agent.column), precision=_EXACT)


# Operations on cells [side * side]


def _beyond(mapper: Mapper, stored: Array) -> Array:
    """float32: probability of cells less that of the clipped cells."""
    storage = mapper.storage
    value = storage.value(stored)
    doubt = probability(storage.log_odds(-jnp.abs(value)))
    beyond = jnp.where(jnp.abs(value) > storage.limit, jnp.float32(P_MIN) - doubt, jnp.float32(0.0))
    return jnp.where(value > 0, beyond, -beyond)


# The steps of an update


def _look(mapper: Mapper, level: int, survey: Measurements, plan: _Plan, b: Array, agent: _Agent, work: _Work) -> _Work:
    """Read the cells of a footprint; store the readings, and the team's map there before the update."""
    side, agents = _side(mapper, level), mapper.num_agents
    team = b * (agents + 1) + agents
    free, occupied = (jnp.asarray(gain) for gain in mapper.storage.gains[:, level])

    @stage
    def changes(survey: Measurements, rows: Array, columns: Array, agent: _Agent) -> Array:
        """Return readings [side, side] as summands, 0 outside the footprint."""
        marks, cells = rows & columns, jnp.arange(side, dtype=jnp.int32)
        rows, columns = agent.top + cells[:, None], agent.left + cells[None, :]
        truth = ground.marked(survey.terrain, marks >> agents, rows, columns)
        height = jnp.int32(level)
        read = sensor.occupied(survey.source, survey.terrain, agent.number, height, rows, columns, mapper.n, truth)
        inside = (marks >> agent.number) & 1 == 1
        return jnp.where(inside, jnp.where(read, occupied, free), jnp.zeros_like(free))

    @stage
    def signs(change: Array) -> Array:
        """+1 for class 1, -1 for class 0, 0 outside the footprint."""
        return (change == occupied).astype(jnp.float32) - (change == free).astype(jnp.float32)

    here = jax.tree.map(lambda leaf: _at(leaf, b), survey)
    change = changes(here, *_marks(plan, b, agent, side), agent).reshape(-1)
    measured = _resized(jnp.asarray(_footprint_shares(mapper.q, level)), agent, signs(change))
    return dataclasses.replace(
        work,
        change=_paste(work.change, agent.number, 0, 0, side, change),
        old=_paste(work.old, agent.number, 0, 0, side, _cut(work.beliefs, team, agent.top, agent.left, side)),
        measured=_replace(work.measured, measured[None, None], (b, agent.number, jnp.int32(0), jnp.int32(0))),
    )


def _clip(mapper: Mapper, target: Array, work: _Work) -> _Work:
    """Clip the whole of one map where cells may lie beyond the clip."""

    def turn(zero: Array, work: _Work) -> _Work:
        here, n, excess = target + zero, mapper.n, work.excess
        corner = (here, jnp.int32(0), jnp.int32(0))
        cells = _slice(work.beliefs, corner, (1, n, n))
        cells = jnp.where(cells != mapper.storage.unseen, mapper.storage.clip(cells), cells)
        excess = Excess(
            cells=_replace(excess.cells, jnp.zeros((1,), jnp.bool_), (here,)),
            probability=_replace(excess.probability, jnp.zeros((1, LATTICE, LATTICE), jnp.float32), corner),
        )
        return dataclasses.replace(work, beliefs=_replace(work.beliefs, cells, corner), excess=excess)

    return when(_at(work.excess.cells, target), turn, work)


def _enter_own(
    mapper: Mapper, level: int, survey: Measurements, plan: _Plan, b: Array, agent: _Agent, work: _Work
) -> _Work:
    """Enter the measurement of an agent into its own map."""
    return _enter(mapper, level, agent, b * (mapper.num_agents + 1) + agent.number, work)


def _enter(mapper: Mapper, level: int, agent: _Agent, target: Array, work: _Work) -> _Work:
    """Enter the measurement of `agent` into a map."""
    side, storage = _side(mapper, level), mapper.storage
    gains = storage.gains[:, level]
    old = _cut(work.beliefs, target, agent.top, agent.left, side)
    change = _cut(work.change, agent.number, 0, 0, side)

    @stage
    def fused(old: Array, change: Array) -> Array:
        return jnp.where(change != 0, storage.fuse(storage.value(old), change), old)

    @stage
    def largest(new: Array) -> Array:
        return jnp.max(jnp.abs(storage.value(new)).reshape(side, side), axis=0)

    new = fused(old, change)
    any_beyond = jnp.max(largest(new)) > jnp.asarray(storage.limit)

    def exceed(zero: Array, excess: Excess) -> Excess:
        beyond = stage(lambda zero, old, new: _beyond(mapper, new + zero) - _beyond(mapper, old + zero))
        grown = beyond(zero.astype(new.dtype), old, new)
        resized = _add_resized(mapper, level, excess.probability, target, agent, grown)
        return Excess(_replace(excess.cells, jnp.ones((1,), jnp.bool_), (target,)), resized)

    growth = stage(lambda old, change: storage.growth(old, change, gains))(old, change)
    return dataclasses.replace(
        work,
        beliefs=_paste(work.beliefs, target, agent.top, agent.left, side, new),
        clipped=_add_resized(mapper, level, work.clipped, target, agent, growth),
        excess=when(_at(work.excess.cells, target) | any_beyond, exceed, work.excess),
    )


def _account(
    mapper: Mapper, level: int, survey: Measurements, plan: _Plan, b: Array, agent: _Agent, work: _Work
) -> _Work:
    """Update the team's sums for the cells of a footprint that no earlier agent's holds."""
    weights, agents = mapper.weights.relative, mapper.num_agents
    side, team = _side(mapper, level), b * (agents + 1) + agents

    @stage
    def kinds(terrain: ground.Terrain, rows: Array, columns: Array, agent: _Agent) -> Array:
        """int32[side, side]: 0 for cells that do not count, 1 and 2 for cells of class 0 and 1."""
        marks, cells = rows & columns, jnp.arange(side, dtype=jnp.int32)
        truth = ground.marked(terrain, marks >> agents, agent.top + cells[:, None], agent.left + cells[None, :])
        counts = marks & ((2 << agent.number) - 1) == 1 << agent.number
        return jnp.where(counts, 1 + truth.astype(jnp.int32), 0)

    def weighted(word: Array, word_entropy: Array) -> Array:
        """int32: weighted entropy in fixed point, weights of the first, entropy of the second word."""
        _, flags = read_word(word)
        return fixed(weights.pick(flags["above"], flags["below"]) * read_word(word_entropy)[0])

    @stage
    def interest(kind: Array, old: Array, new: Array) -> Array:
        """int32: change of the entropy of class-1 cells."""
        return jnp.where(kind == 2, fixed(read_word(new)[0]) - fixed(read_word(old)[0]), jnp.int32(0))

    @stage
    def flags(kind: Array, old: Array, new: Array) -> Array:
        """Count 2 where a flag becomes true, 1 where it stays, 0 where it becomes false: no byte is negative."""
        (_, old), (_, new) = read_word(old), read_word(new)
        changes = [1 + new[name].astype(jnp.int32) - old[name].astype(jnp.int32) for name in ("predicted", "seen")]
        return pack_flags(*(f for change in changes for f in (change, jnp.where(kind == 2, change, 1))))

    terrain = jax.tree.map(lambda leaf: _at(leaf, b), survey.terrain)
    kind = kinds(terrain, *_marks(plan, b, agent, side), agent).reshape(-1)
    old = _cut(work.old, agent.number, 0, 0, side)
    new = _cut(work.beliefs, team, agent.top, agent.left, side)
    old = stage(mapper.storage.word)(old)
    # cells that do not count are taken as unchanged
    new = stage(lambda kind, old, new: jnp.where(kind > 0, new, old))(kind, old, stage(mapper.storage.word)(new))
    before = stage(lambda old, new: weighted(new, old) - weighted(old, old))(old, new)
    after = stage(lambda old, new: weighted(new, new) - weighted(old, old))(old, new)
    sums = totals([before, after, interest(kind, old, new)]).reshape(6)
    changes = jnp.concatenate([sums, count_flags(flags(kind, old, new)) - side * side])
    place = (b, jnp.int32(0))
    sums = _slice(work.sums, place, (1, len(changes))) + changes[None]
    return dataclasses.replace(work, sums=_replace(work.sums, sums, place))
