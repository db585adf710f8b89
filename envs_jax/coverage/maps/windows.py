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
from envs_jax.coverage.belief import P_MIN, PREDICTED, probability
from envs_jax.coverage.maps.fixed_point import carry, count_flags, fixed, pack_flags, total
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
    sums: Sums  # see `types.Sums`, leaves [B, ...]
    before: Array  # int32[B, 2], see `types.Report`
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
    work = _Work(
        beliefs=maps.beliefs.reshape(count, n, n),
        clipped=maps.probability.reshape(count, LATTICE, LATTICE) - excess.probability,
        excess=excess,
        sums=maps.sums,
        before=maps.sums.weighted,
        measured=jnp.zeros((copies, agents, LATTICE, LATTICE), jnp.float32),
        change=jnp.zeros((agents, side, side), maps.beliefs.dtype),
        old=jnp.zeros((agents, side, side), maps.beliefs.dtype),
    )
    plan = stage(functools.partial(_plan, mapper))(survey)
    work = jax.lax.fori_loop(0, copies, lambda b, work: _update_copy(mapper, survey, plan, b, work), work)
    maps = Maps(
        beliefs=work.beliefs.reshape(maps.beliefs.shape),
        probability=(work.clipped + work.excess.probability).reshape(maps.probability.shape),
        sums=Sums(carry(work.sums.weighted), carry(work.sums.interest), work.sums.counts),
        excess=jax.tree.map(lambda leaf, like: leaf.reshape(like.shape), work.excess, maps.excess),
    )
    return maps, Report(measured=work.measured, before=carry(work.before))


# The order of work


@pytree
class _Plan:
    """Windows and updates of all copies [B, ...]; int32 unless noted."""

    level: Array  # [B, A], altitude index
    place: Array  # [B, A, 2], horizontal lattice index
    box: world.Box  # [B, A], clipped footprint
    top: Array  # [B, A], first row of the window, a square inside the map that holds the clipped footprint
    left: Array  # [B, A], its first column
    valid: Array  # bool[B, E], which of the entries of `_entries` happen


def _side(mapper: Mapper, level: int) -> int:
    return 2 * world.radius(mapper.q, level)


def _entries(agents: int) -> tuple[np.ndarray, np.ndarray]:
    """Receivers and senders int32[A + A (A - 1)]: own measurements, then messages, senders in increasing order."""
    pairs = [(i, i) for i in range(agents)]
    pairs += [(i, j) for j in range(agents) for i in range(agents) if i != j]
    receivers, senders = np.array(pairs, np.int32).T
    return receivers, senders


def _plan(mapper: Mapper, survey: Measurements) -> _Plan:
    n = mapper.n
    full = world.footprint(survey.positions, mapper.q)
    box = world.clip_footprint(full, n)
    last = n - (full.bottom - full.top)
    receivers, senders = _entries(mapper.num_agents)
    return _Plan(
        level=survey.positions[..., 2],
        place=survey.positions[..., :2],
        box=box,
        top=jnp.clip(box.top, 0, last),
        left=jnp.clip(box.left, 0, last),
        valid=survey.received[:, receivers, senders] | (receivers == senders)[None],
    )


def when(condition: Array, function: Callable[[Array, Any], Any], operand: Any) -> Any:
    """function(zero, operand) if condition, else operand: a branch that changes big arrays in place (`cond` copies).

    It is a loop of one iteration or none. A compiler may hoist loop invariants and compute them in any case. `zero` is
    int32 0, which a compiler cannot know: what is computed from an index that `zero` was added to stays inside.
    """
    return jax.lax.fori_loop(0, condition.astype(jnp.int32), function, operand)


def _update_copy(mapper: Mapper, survey: Measurements, plan: _Plan, b: Array, work: _Work) -> _Work:
    agents = mapper.num_agents
    first = b * (agents + 1)  # its first map
    team = first + agents
    receivers, senders = (jnp.asarray(order) for order in _entries(agents))

    def at_its_level(step: Callable[..., _Work], sender: Array, work: _Work) -> _Work:
        for level in range(world.LEVELS):
            step_here = functools.partial(step, mapper, level)
            turn = lambda zero, work, step=step_here: step(survey, plan, b + zero, sender + zero, work)  # noqa: E731
            work = when(plan.level[b, sender] == level, turn, work)
        return work

    def clip(target: Array, condition: Array | bool, work: _Work) -> _Work:
        """Clip the whole of one map where cells may lie beyond the clip."""

        def turn(zero: Array, work: _Work) -> _Work:
            here, n = target + zero, mapper.n
            cells = jax.lax.dynamic_slice(work.beliefs, (here, 0, 0), (1, n, n))
            cells = jnp.where(cells != mapper.storage.unseen, mapper.storage.clip(cells), cells)
            excess = Excess(work.excess.cells.at[here].set(False), work.excess.probability.at[here].set(0.0))
            beliefs = jax.lax.dynamic_update_slice(work.beliefs, cells, (here, 0, 0))
            return dataclasses.replace(work, beliefs=beliefs, excess=excess)

        return when(work.excess.cells[target] & condition, turn, work)

    def enter(k: Array, work: _Work) -> _Work:
        def turn(zero: Array, work: _Work) -> _Work:
            target, sender = first + receivers[k + zero], senders[k + zero]
            work = clip(target, k >= agents, work)
            return at_its_level(functools.partial(_enter, target=target), sender, work)

        return when(plan.valid[b, k], turn, work)

    def enter_team(sender: Array, work: _Work) -> _Work:
        return at_its_level(functools.partial(_enter, target=team, team=True), sender, clip(team, True, work))

    work = jax.lax.fori_loop(0, agents, functools.partial(at_its_level, _look), work)
    work = jax.lax.fori_loop(0, len(receivers), enter, work)
    work = jax.lax.fori_loop(0, agents, enter_team, work)
    return jax.lax.fori_loop(0, agents, functools.partial(at_its_level, _account), work)


# Windows


def _coordinates(top: Array, left: Array, side: int) -> tuple[Array, Array]:
    """Rows int32[side, 1] and columns int32[1, side] of a window."""
    cells = jnp.arange(side, dtype=jnp.int32)
    return top + cells[:, None], left + cells[None, :]


def _cut(maps: Array, index: Array, top: Array | int, left: Array | int, side: int) -> Array:
    """dtype[side * side]: the cells of a window of one of the maps [M, k, k]."""
    slice_ = stage(lambda maps, *corner: jax.lax.dynamic_slice(maps, corner, (1, side, side)))
    return slice_(maps, index, jnp.int32(top), jnp.int32(left)).reshape(-1)


def _paste(maps: Array, index: Array, top: Array | int, left: Array | int, side: int, cells: Array) -> Array:
    """Return the maps with the cells of a window of one of them replaced."""
    return jax.lax.dynamic_update_slice(maps, cells.reshape(1, side, side), (index, jnp.int32(top), jnp.int32(left)))


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


def _add_resized(mapper: Mapper, level: int, resized: Array, target: Array, place: Array, cells: Array) -> Array:
    """Return resized maps float32[M, 11, 11] after the cells of a window of map `target` grew by `cells`.

    Args:
        mapper: the geometry.
        level: altitude index of the agent whose window it is.
        resized: float32[M, 11, 11].
        target: int32[], number of the map.
        place: int32[2], horizontal lattice index of the agent.
        cells: float32[side * side].
    """
    first, shares = (jnp.asarray(table) for table in _shares(mapper.q, level))
    side = _side(mapper, level)
    rows = jnp.dot(shares[place[0]], cells.reshape(side, side), precision=_EXACT)
    grown = jnp.einsum("dc,ec->de", rows, shares[place[1]], precision=_EXACT)
    corner = (target, first[place[0]], first[place[1]])
    present = jax.lax.dynamic_slice(resized, corner, (1, *grown.shape))
    return jax.lax.dynamic_update_slice(resized, present + grown[None], corner)


# Operations on cells [side * side]


def _growth(mapper: Mapper, old: Array, new: Array) -> Array:
    """float32: change of the probability of clipped cells."""
    storage = mapper.storage

    def p(stored: Array) -> Array:
        return probability(storage.log_odds(storage.clip(storage.value(stored))))

    return stage(lambda old, new: p(new) - p(old))(old, new)


def _beyond(mapper: Mapper, stored: Array) -> Array:
    """float32: probability of cells less that of the clipped cells."""
    storage = mapper.storage
    value = storage.value(stored)
    doubt = probability(storage.log_odds(-jnp.abs(value)))
    beyond = jnp.where(jnp.abs(value) > storage.limit, jnp.float32(P_MIN) - doubt, jnp.float32(0.0))
    return jnp.where(value > 0, beyond, -beyond)


# The steps of an update: (mapper, level, survey, plan, b, sender, work) -> work


def _look(mapper: Mapper, level: int, survey: Measurements, plan: _Plan, b: Array, sender: Array, work: _Work) -> _Work:
    """Read the cells of a footprint; store the readings, and the team's map there before the update."""
    side, team = _side(mapper, level), b * (mapper.num_agents + 1) + mapper.num_agents
    top, left, place = plan.top[b, sender], plan.left[b, sender], plan.place[b, sender]
    free, occupied = (jnp.asarray(gain) for gain in mapper.storage.gains[:, level])

    @stage
    def changes(survey: Measurements, box: world.Box, sender: Array, top: Array, left: Array) -> Array:
        """Return readings [side, side] as summands, 0 outside the footprint."""
        rows, columns = _coordinates(top, left, side)
        height = jnp.int32(level)
        read = sensor.occupied(survey.source, survey.terrain, sender, height, rows, columns, mapper.n)
        return jnp.where(box.holds(rows, columns), jnp.where(read, occupied, free), jnp.zeros_like(free))

    @stage
    def signs(change: Array) -> Array:
        """+1 for class 1, -1 for class 0, 0 outside the footprint."""
        return (change == occupied).astype(jnp.float32) - (change == free).astype(jnp.float32)

    survey = jax.tree.map(lambda leaf: leaf[b], survey)
    box = jax.tree.map(lambda leaf: leaf[b, sender], plan.box)
    change = changes(survey, box, sender, top, left).reshape(-1)
    shares = jnp.asarray(_footprint_shares(mapper.q, level))
    rows = jnp.dot(shares[place[0]], signs(change).reshape(side, side), precision=_EXACT)
    measured = jnp.einsum("dc,ec->de", rows, shares[place[1]], precision=_EXACT)
    return dataclasses.replace(
        work,
        change=_paste(work.change, sender, 0, 0, side, change),
        old=_paste(work.old, sender, 0, 0, side, _cut(work.beliefs, team, top, left, side)),
        measured=jax.lax.dynamic_update_slice(work.measured, measured[None, None], (b, sender, 0, 0)),
    )


def _enter(
    mapper: Mapper,
    level: int,
    survey: Measurements,
    plan: _Plan,
    b: Array,
    sender: Array,
    work: _Work,
    target: Array,
    team: bool = False,
) -> _Work:
    """Enter the measurement of `sender` into a map, clipped before if it is a message or the map the team's.

    `_account` updates the resized probabilities of the team's map.
    """
    side, storage = _side(mapper, level), mapper.storage
    top, left, place = plan.top[b, sender], plan.left[b, sender], plan.place[b, sender]
    old, change = _cut(work.beliefs, target, top, left, side), _cut(work.change, sender, 0, 0, side)

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
        resized = _add_resized(mapper, level, excess.probability, target, place, grown)
        return Excess(excess.cells.at[target].set(True), resized)

    work = dataclasses.replace(
        work,
        beliefs=_paste(work.beliefs, target, top, left, side, new),
        excess=when(work.excess.cells[target] | any_beyond, exceed, work.excess),
    )
    if team:
        return work
    clipped = _add_resized(mapper, level, work.clipped, target, place, _growth(mapper, old, new))
    return dataclasses.replace(work, clipped=clipped)


def _account(
    mapper: Mapper, level: int, survey: Measurements, plan: _Plan, b: Array, sender: Array, work: _Work
) -> _Work:
    """Update the team's running values for the cells of a footprint that no earlier one holds."""
    storage, weights = mapper.storage, mapper.weights.relative
    side, team = _side(mapper, level), b * (mapper.num_agents + 1) + mapper.num_agents
    top, left = plan.top[b, sender], plan.left[b, sender]

    @stage
    def kinds(terrain: ground.Terrain, boxes: world.Box, sender: Array, top: Array, left: Array) -> Array:
        """int16[side, side]: 0 for cells that do not count, 1 and 2 for cells of class 0 and 1."""
        rows, columns = _coordinates(top, left, side)
        counts = jax.tree.map(lambda leaf: leaf[sender], boxes).holds(rows, columns)
        for j in range(mapper.num_agents - 1):
            counts &= ~(jax.tree.map(lambda leaf, j=j: leaf[j], boxes).holds(rows, columns) & (j < sender))
        kind = jnp.where(ground.truth(terrain, rows, columns), jnp.int16(2), jnp.int16(1))
        return jnp.where(counts, kind, jnp.int16(0))

    @stage
    def difference(stored_a: Array, entropy_a: Array, stored_b: Array, entropy_b: Array) -> Array:
        """int32: change of the weighted entropy from b to a."""
        a, b = storage.weight(stored_a, weights) * entropy_a, storage.weight(stored_b, weights) * entropy_b
        return fixed(a) - fixed(b)

    @stage
    def interest(kind: Array, old: Array, new: Array) -> Array:
        """int32: change of the entropy of class-1 cells."""
        return jnp.where(kind == 2, fixed(new) - fixed(old), jnp.int32(0))

    @stage
    def flags(kind: Array, old: Array, new: Array) -> Array:
        """Count 2 where a flag becomes true, 1 where it stays, 0 where it becomes false: no byte is negative."""

        def rise(old: Array, new: Array) -> tuple[Array, Array]:
            change = 1 + new.astype(jnp.int32) - old.astype(jnp.int32)
            return change, jnp.where(kind == 2, change, 1)

        predicted = rise(storage.above(old, PREDICTED), storage.above(new, PREDICTED))
        return pack_flags(*predicted, *rise(old != storage.unseen, new != storage.unseen))

    terrain, boxes = jax.tree.map(lambda leaf: leaf[b], (survey.terrain, plan.box))
    kind = kinds(terrain, boxes, sender, top, left).reshape(-1)
    old = _cut(work.old, sender, 0, 0, side)
    # cells that do not count are taken as unchanged
    new = stage(lambda kind, old, new: jnp.where(kind > 0, new, old))(
        kind, old, _cut(work.beliefs, team, top, left, side)
    )
    entropy_old, entropy_new = stage(storage.entropy)(old), stage(storage.entropy)(new)
    changes = Sums(
        weighted=total(difference(new, entropy_new, old, entropy_old)),
        interest=total(interest(kind, entropy_old, entropy_new)),
        counts=count_flags(flags(kind, old, new)) - side * side,
    )
    return dataclasses.replace(
        work,
        sums=jax.tree.map(lambda leaf, change: leaf.at[b].add(change), work.sums, changes),
        before=work.before.at[b].add(total(difference(new, entropy_old, old, entropy_old))),
        clipped=_add_resized(mapper, level, work.clipped, team, plan.place[b, sender], _growth(mapper, old, new)),
    )
