"""The CPU backend for large maps: it updates footprints only.

The order of work, for one copy after the other (`_update_copy`):

    1. `_look`: every agent reads the cells of its footprint; the team's map there is kept as it was;
    2. `_enter_own`: every agent enters its readings into its own map;
    3. `_clip` and `_enter`: sender by sender, readings are entered into the maps of those who heard it, and the team's;
    4. `_account`: the sums over the team's map change by the cells of the footprints, each counted once.

Where messages are delayed, step 3 enters readings into the team's map only; those that arrive are then read again, by a
second plan, and entered into the maps of those who heard them.

Agents, senders and receivers are rolled loops, so that a branch is really a branch: the window of an altitude has a
static size, and a message that was not received costs nothing. What depends only on positions and messages is computed
before, for all copies at once, and packed in few arrays (`window_plan`): on CPUs a small kernel costs as much as
thousands of cells, and the loops would start one for every number that they read. Maps are changed in place. Resized
maps and sums are running values: a resized map changes by A_rows (p' - p) A_columns^T over a window.

A fused message clips the whole receiving map. Only the last updates can have left cells beyond the clip, so a flag per
map says whether a clip is due; resized probabilities are stored separately for the clipped map and for what lies beyond
the clip (`types.ClipOverflow`), so that a clip need not compute probabilities again.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from envs_jax.base import Array, pytree
from envs_jax.coverage import sensor, world
from envs_jax.coverage import terrain as ground
from envs_jax.coverage.belief import P_MIN, probability, read_word
from envs_jax.coverage.maps.fixed_point import carry, count_flags, pack_flags, to_fixed_point, totals
from envs_jax.coverage.maps.types import ClipOverflow, MapConfig, Maps, Measurements, Sums, UpdateStats
from envs_jax.coverage.maps.window_plan import (
    Agent,
    Plan,
    agent_of,
    at,
    block_shares,
    cut,
    cut_block,
    footprint_shares,
    make_plan,
    marks_of,
    paste,
    put_block,
    window_side,
)
from envs_jax.coverage.world import LATTICE
from envs_jax.stages import materialize, when

_EXACT = jax.lax.Precision.HIGHEST


def update(config: MapConfig, maps: Maps, measurements: Measurements) -> tuple[Maps, UpdateStats]:
    """Update the maps of one copy; under vmap every branch is taken: use `update_batch` instead."""
    batch = jax.tree.map(lambda leaf: leaf[None], (maps, measurements))
    return jax.tree.map(lambda leaf: leaf[0], update_batch(config, *batch))


@pytree
class _Work:
    """State of the loops. M = B (A + 1) maps, copy after copy; W is the side of the largest window."""

    beliefs: Array  # dtype[M, n, n]
    clipped: Array  # float32[M, 11, 11], resized probabilities of the clipped maps
    overflow: ClipOverflow  # see `types.ClipOverflow`, leaves [M, ...]
    sums: Array  # int32[B, 10], `UpdateStats.before` and the leaves of `types.Sums`
    measured: Array  # float32[B, A, 11, 11], see `types.UpdateStats`
    change: Array  # dtype[A, W, W], readings of each agent of this copy as summands, 0 outside the footprint
    old: Array  # dtype[A, W, W], the team's map before the update, in the same windows


def update_batch(config: MapConfig, maps: Maps, measurements: Measurements) -> tuple[Maps, UpdateStats]:
    """`update` of [B] copies, one after the other."""
    agents = config.num_agents
    n = config.n
    copies = maps.beliefs.shape[0]
    count = copies * (agents + 1)
    side = window_side(config, world.LEVELS - 1)
    overflow = jax.tree.map(lambda leaf: leaf.reshape(count, *leaf.shape[2:]), maps.overflow)
    sums = maps.sums
    work = _Work(
        beliefs=maps.beliefs.reshape(count, n, n),
        clipped=maps.probability.reshape(count, LATTICE, LATTICE) - overflow.probability,
        overflow=overflow,
        sums=jnp.concatenate([sums.weighted, sums.weighted, sums.interest, sums.counts], axis=1),
        measured=jnp.zeros((copies, agents, LATTICE, LATTICE), jnp.float32),
        change=jnp.zeros((agents, side, side), maps.beliefs.dtype),
        old=jnp.zeros((agents, side, side), maps.beliefs.dtype),
    )
    make = materialize(functools.partial(make_plan, config))
    delayed: Any = ()
    if measurements.sent:
        delayed = measurements.messages, make(measurements.messages)
        measurements = dataclasses.replace(measurements, received=jnp.zeros_like(measurements.received), sent=())
    update = functools.partial(_update_copy, config, measurements, make(measurements), delayed)
    work = jax.lax.fori_loop(jnp.int32(0), jnp.int32(copies), update, work)
    before, weighted, interest, counts = jnp.split(work.sums, (2, 4, 6), axis=1)
    maps = Maps(
        beliefs=work.beliefs.reshape(maps.beliefs.shape),
        probability=(work.clipped + work.overflow.probability).reshape(maps.probability.shape),
        sums=Sums(carry(weighted), carry(interest), counts),
        overflow=jax.tree.map(lambda leaf, like: leaf.reshape(like.shape), work.overflow, maps.overflow),
    )
    return maps, UpdateStats(measured=work.measured, before=carry(before))


# The order of work


def _update_copy(
    config: MapConfig, measurements: Measurements, plan: Plan, delayed: Any, b: Array, work: _Work
) -> _Work:
    """Update copy b in the order above; `delayed` is () or the measurements of messages that arrive, and their plan."""
    agents = config.num_agents

    def by_level(
        step: Callable[..., _Work], work: _Work, measurements: Measurements = measurements, plan: Plan = plan
    ) -> _Work:
        """Every agent's step: a loop for each altitude, whose windows have a size of their own."""
        for level in range(world.LEVELS):

            def turn(i: Array, work: _Work, level: int = level) -> _Work:
                return step(config, level, measurements, plan, b, agent_of(plan, b, at(plan.by_level, b, i)), work)

            work = jax.lax.fori_loop(at(plan.starts, b, level), at(plan.starts, b, level + 1), turn, work)
        return work

    def send(sender: Array, work: _Work, plan: Plan = plan, to_team: bool = True) -> _Work:
        count = at(plan.heard, b, sender)
        targets = at(plan.targets, b, sender)
        count = count if to_team else count - 1
        sender_level = agent_of(plan, b, sender).level
        for level in range(world.LEVELS):

            def turn(i: Array, work: _Work, level: int = level) -> _Work:
                target = at(targets, i)
                return _enter(config, level, agent_of(plan, b, sender), target, _clip(config, target, work))

            work = jax.lax.fori_loop(0, jnp.where(sender_level == level, count, 0), turn, work)
        return work

    work = by_level(_look, work)  # apart from the next step: a loop that cuts two windows to change one copies the maps
    work = by_level(_enter_own, work)
    work = jax.lax.fori_loop(jnp.int32(0), jnp.int32(agents), send, work)
    if delayed:
        work = by_level(_read, work, *delayed)
        arrive = functools.partial(send, plan=delayed[1], to_team=False)
        work = jax.lax.fori_loop(jnp.int32(0), jnp.int32(agents), arrive, work)
    return by_level(_account, work)  # last, or maps would be copied for it before messages arrive


def _add_resized(config: MapConfig, level: int, resized: Array, target: Array, agent: Agent, cells: Array) -> Array:
    """Return resized maps float32[M, 11, 11] after the cells of the agent's window in map `target` grew.

    `cells` float32[side * side] is by how much; `level` is the altitude index of the agent.
    """
    shares = jnp.asarray(block_shares(config.cells_per_footprint, level)[1])
    grown = _resize(shares, agent, cells)
    corner = (target, agent.block_row, agent.block_column)
    present = cut_block(resized, corner, (1, *grown.shape))
    return put_block(resized, present + grown[None], corner)


def _resize(shares: Array, agent: Agent, cells: Array) -> Array:
    """float32[d, d]: sums of cells [side * side] by their shares [11, d, side] in rows and in columns."""
    side = shares.shape[-1]
    rows = jnp.dot(at(shares, agent.row), cells.reshape(side, side), precision=_EXACT)
    return jnp.einsum("dc,ec->de", rows, at(shares, agent.column), precision=_EXACT)


# Operations on cells [side * side]


def _overflow(config: MapConfig, stored: Array) -> Array:
    """float32: probability of cells minus the probability of the clipped cells."""
    storage = config.storage
    value = storage.value(stored)
    doubt = probability(storage.log_odds(-jnp.abs(value)))
    overflow = jnp.where(jnp.abs(value) > storage.limit, jnp.float32(P_MIN) - doubt, jnp.float32(0.0))
    return jnp.where(value > 0, overflow, -overflow)


# The steps of an update


def _read_changes(
    config: MapConfig, level: int, measurements: Measurements, plan: Plan, b: Array, agent: Agent
) -> Array:
    """dtype[side * side]: the readings of a footprint as summands, 0 outside it."""
    side = window_side(config, level)
    agents = config.num_agents
    free, occupied = (jnp.asarray(gain) for gain in config.storage.gains[:, level])

    @materialize
    def changes(measurements: Measurements, rows: Array, columns: Array, agent: Agent) -> Array:
        """Return readings [side, side] as summands, 0 outside the footprint."""
        marks = rows & columns
        cells = jnp.arange(side, dtype=jnp.int32)
        rows, columns = agent.top + cells[:, None], agent.left + cells[None, :]
        truth = ground.truth_from_marks(measurements.terrain, marks >> agents, rows, columns)
        height = jnp.int32(level)
        read = sensor.reads_occupied(
            measurements.source, measurements.terrain, agent.number, height, rows, columns, config.n, truth
        )
        inside = (marks >> agent.number) & 1 == 1
        return jnp.where(inside, jnp.where(read, occupied, free), jnp.zeros_like(free))

    copy_measurements = jax.tree.map(lambda leaf: at(leaf, b), measurements)
    return changes(copy_measurements, *marks_of(plan, b, agent, side), agent).reshape(-1)


def _read(
    config: MapConfig, level: int, measurements: Measurements, plan: Plan, b: Array, agent: Agent, work: _Work
) -> _Work:
    """Read the cells of a footprint again, when its message arrives; store the readings."""
    change = _read_changes(config, level, measurements, plan, b, agent)
    return dataclasses.replace(work, change=paste(work.change, agent.number, 0, 0, window_side(config, level), change))


def _look(
    config: MapConfig, level: int, measurements: Measurements, plan: Plan, b: Array, agent: Agent, work: _Work
) -> _Work:
    """Read the cells of a footprint; store the readings, and the team's map there before the update."""
    side = window_side(config, level)
    agents = config.num_agents
    team = b * (agents + 1) + agents
    free, occupied = (jnp.asarray(gain) for gain in config.storage.gains[:, level])

    @materialize
    def signs(change: Array) -> Array:
        """+1 for class 1, -1 for class 0, 0 outside the footprint."""
        return (change == occupied).astype(jnp.float32) - (change == free).astype(jnp.float32)

    change = _read_changes(config, level, measurements, plan, b, agent)
    measured = _resize(jnp.asarray(footprint_shares(config.cells_per_footprint, level)), agent, signs(change))
    return dataclasses.replace(
        work,
        change=paste(work.change, agent.number, 0, 0, side, change),
        old=paste(work.old, agent.number, 0, 0, side, cut(work.beliefs, team, agent.top, agent.left, side)),
        measured=put_block(work.measured, measured[None, None], (b, agent.number, jnp.int32(0), jnp.int32(0))),
    )


def _clip(config: MapConfig, target: Array, work: _Work) -> _Work:
    """Clip the whole of one map where cells may lie beyond the clip."""

    def turn(zero: Array, work: _Work) -> _Work:
        index = target + zero
        n = config.n
        overflow = work.overflow
        corner = (index, jnp.int32(0), jnp.int32(0))
        cells = cut_block(work.beliefs, corner, (1, n, n))
        cells = jnp.where(cells != config.storage.unseen, config.storage.clip(cells), cells)
        overflow = ClipOverflow(
            cells=put_block(overflow.cells, jnp.zeros((1,), jnp.bool_), (index,)),
            probability=put_block(overflow.probability, jnp.zeros((1, LATTICE, LATTICE), jnp.float32), corner),
        )
        return dataclasses.replace(work, beliefs=put_block(work.beliefs, cells, corner), overflow=overflow)

    return when(at(work.overflow.cells, target), turn, work)


def _enter_own(
    config: MapConfig, level: int, measurements: Measurements, plan: Plan, b: Array, agent: Agent, work: _Work
) -> _Work:
    return _enter(config, level, agent, b * (config.num_agents + 1) + agent.number, work)


def _enter(config: MapConfig, level: int, agent: Agent, target: Array, work: _Work) -> _Work:
    side = window_side(config, level)
    storage = config.storage
    gains = storage.gains[:, level]
    old = cut(work.beliefs, target, agent.top, agent.left, side)
    change = cut(work.change, agent.number, 0, 0, side)

    @materialize
    def fuse(old: Array, change: Array) -> Array:
        return jnp.where(change != 0, storage.fuse(storage.value(old), change), old)

    @materialize
    def largest(new: Array) -> Array:
        return jnp.max(jnp.abs(storage.value(new)).reshape(side, side), axis=0)

    new = fuse(old, change)
    any_overflow = jnp.max(largest(new)) > jnp.asarray(storage.limit)

    def add_overflow(zero: Array, overflow: ClipOverflow) -> ClipOverflow:
        overflow_change = materialize(
            lambda zero, old, new: _overflow(config, new + zero) - _overflow(config, old + zero)
        )
        grown = overflow_change(zero.astype(new.dtype), old, new)
        resized = _add_resized(config, level, overflow.probability, target, agent, grown)
        return ClipOverflow(put_block(overflow.cells, jnp.ones((1,), jnp.bool_), (target,)), resized)

    growth = materialize(lambda old, change: storage.growth(old, change, gains))(old, change)
    return dataclasses.replace(
        work,
        beliefs=paste(work.beliefs, target, agent.top, agent.left, side, new),
        clipped=_add_resized(config, level, work.clipped, target, agent, growth),
        overflow=when(at(work.overflow.cells, target) | any_overflow, add_overflow, work.overflow),
    )


def _account(
    config: MapConfig, level: int, measurements: Measurements, plan: Plan, b: Array, agent: Agent, work: _Work
) -> _Work:
    """Update the team's sums for the cells of a footprint that no earlier agent's holds."""
    weights = config.weights.relative
    agents = config.num_agents
    side = window_side(config, level)
    team = b * (agents + 1) + agents

    @materialize
    def kinds(terrain: ground.Terrain, rows: Array, columns: Array, agent: Agent) -> Array:
        """int32[side, side]: 0 for cells that do not count, 1 and 2 for cells of class 0 and 1."""
        marks = rows & columns
        cells = jnp.arange(side, dtype=jnp.int32)
        truth = ground.truth_from_marks(
            terrain, marks >> agents, agent.top + cells[:, None], agent.left + cells[None, :]
        )
        counts = marks & ((2 << agent.number) - 1) == 1 << agent.number
        return jnp.where(counts, 1 + truth.astype(jnp.int32), 0)

    def weighted(word: Array, word_entropy: Array) -> Array:
        """int32: weighted entropy in fixed point, weights of the first, entropy of the second word."""
        _, flags = read_word(word)
        return to_fixed_point(weights.pick(flags["above"], flags["below"]) * read_word(word_entropy)[0])

    @materialize
    def interest(kind: Array, old: Array, new: Array) -> Array:
        """int32: change of the entropy of class-1 cells."""
        return jnp.where(kind == 2, to_fixed_point(read_word(new)[0]) - to_fixed_point(read_word(old)[0]), jnp.int32(0))

    @materialize
    def flags(kind: Array, old: Array, new: Array) -> Array:
        """Count 2 where a flag becomes true, 1 where it stays, 0 where it becomes false: no byte is negative."""
        were, are = read_word(old)[1], read_word(new)[1]
        changes = [1 + are[name].astype(jnp.int32) - were[name].astype(jnp.int32) for name in ("predicted", "seen")]
        return pack_flags(*(f for change in changes for f in (change, jnp.where(kind == 2, change, 1))))

    terrain = jax.tree.map(lambda leaf: at(leaf, b), measurements.terrain)
    kind = kinds(terrain, *marks_of(plan, b, agent, side), agent).reshape(-1)
    old = cut(work.old, agent.number, 0, 0, side)
    new = cut(work.beliefs, team, agent.top, agent.left, side)
    old = materialize(config.storage.word)(old)
    # cells that do not count are taken as unchanged
    new = materialize(lambda kind, old, new: jnp.where(kind > 0, new, old))(
        kind, old, materialize(config.storage.word)(new)
    )
    before = materialize(lambda old, new: weighted(new, old) - weighted(old, old))(old, new)
    after = materialize(lambda old, new: weighted(new, new) - weighted(old, old))(old, new)
    sums = totals([before, after, interest(kind, old, new)]).reshape(6)
    changes = jnp.concatenate([sums, count_flags(flags(kind, old, new)) - side * side])
    place = (b, jnp.int32(0))
    sums = cut_block(work.sums, place, (1, len(changes))) + changes[None]
    return dataclasses.replace(work, sums=put_block(work.sums, sums, place))
