"""The reference backend: whole maps, plain array code, everything recomputed at every update.

Cells are elementwise work and are kept in one flat axis of n * n cells wherever rows and columns do not matter, so that
loops fill whole vector registers. On CPUs the work is cut into stages (see `stages`), and copies are processed in
chunks whose temporary maps fit into the cache; accelerators get one program for all copies.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from envs_jax.base import Array
from envs_jax.coverage import sensor, world
from envs_jax.coverage import terrain as ground
from envs_jax.coverage.belief import PREDICTED, probability
from envs_jax.coverage.maps.fixed_point import count_flags, largest_divisor, pack_flags, to_fixed_point, total
from envs_jax.coverage.maps.types import MapConfig, Maps, Measurements, Sums, UpdateStats
from envs_jax.stages import materialize, on_cpu

_CHUNK_BYTES = 2**22  # float32 maps on CPUs


def update(config: MapConfig, maps: Maps, measurements: Measurements) -> tuple[Maps, UpdateStats]:
    """Update the maps of one copy, leaves without batch axis; see the package."""
    storage = config.storage
    n = config.n
    cells = maps.beliefs.reshape(config.num_agents + 1, n * n)
    # new maps are stored before they are read: their readers would otherwise update them again, each for itself
    beliefs = jax.lax.optimization_barrier(_fuse(config, cells, measurements))
    sums, before = _team_sums(config, cells[-1], beliefs[-1], measurements)
    beliefs = beliefs.reshape(maps.beliefs.shape)
    resized = world.resize(beliefs, lambda stored: probability(storage.log_odds(stored)))
    stats = UpdateStats(measured=resize_readings(config, measurements), before=before)
    return Maps(beliefs, resized, sums, maps.overflow), stats


def update_batch(config: MapConfig, maps: Maps, measurements: Measurements) -> tuple[Maps, UpdateStats]:
    """`update` of [B] copies."""
    copies = maps.beliefs.shape[0]
    chunk = largest_divisor(copies, _CHUNK_BYTES // (4 * (config.num_agents + 1) * config.n**2))
    if not on_cpu() or copies == chunk:
        return jax.vmap(functools.partial(update, config))(maps, measurements)
    update_one = materialize(functools.partial(update, config))
    return jax.lax.map(lambda pair: update_one(*pair), (maps, measurements), batch_size=chunk)


def _changes(config: MapConfig, measurements: Measurements) -> Array:
    """dtype[A + 1, n, n]: the sum of each agent's readings for a map, 0 outside its clipped footprint and only there.

    The last row, the team's, is 0.
    """
    n = config.n
    agents = config.num_agents
    rows = jnp.arange(n, dtype=jnp.int32)[:, None]
    columns = jnp.arange(n, dtype=jnp.int32)[None, :]

    def change(agent: Array) -> Array:
        position = jnp.take(measurements.positions, agent, axis=0, mode="clip")
        box = world.clip_footprint(world.footprint(position, config.cells_per_footprint), n)
        read = sensor.reads_occupied(measurements.source, measurements.terrain, agent, position[2], rows, columns, n)
        gains = jnp.take(jnp.asarray(config.storage.gains), position[2], axis=1, mode="clip")
        gain = jnp.where(read, gains[1], gains[0])
        measures = agent < agents
        if not isinstance(measurements.present, tuple):
            measures &= jnp.take(measurements.present, agent, mode="clip")
        return jnp.where(box.holds(rows, columns) & measures, gain, jnp.zeros_like(gain))

    return jax.vmap(change)(jnp.arange(agents + 1, dtype=jnp.int32))


def _fuse(config: MapConfig, cells: Array, measurements: Measurements) -> Array:
    """Return new beliefs dtype[A + 1, n * n] from the old ones."""
    storage = config.storage
    agents = config.num_agents
    heard = measurements.received & ~jnp.eye(agents, dtype=jnp.bool_)
    everyone = isinstance(measurements.present, tuple)
    team = jnp.ones((1, agents), jnp.bool_) if everyone else measurements.present[None]
    heard = jnp.concatenate([heard, team])
    bound = jnp.where(heard, storage.limit, storage.unbounded)  # without a message nothing is clipped

    @materialize
    def apply(old: Array, change: Array, sent: Any, heard: Array, bound: Array) -> Array:
        value = storage.value(old)
        value = jnp.where(change != 0, storage.fuse(value, change), value)
        touched = change != 0
        for sender in range(agents):
            message = change[sender][None]
            if measurements.sent:  # agents fuse the message that arrives, the team's map what is measured now
                message = jnp.where(np.arange(agents + 1)[:, None] < agents, sent[sender][None], message)
            gain = jnp.where(heard[:, sender, None], message, jnp.zeros_like(change[:1]))
            value = storage.fuse(value, gain, bound[:, sender, None])
            touched |= gain != 0
        return jnp.where(touched | (old != storage.unseen), value, old)

    compute_changes = materialize(functools.partial(_changes, config))
    changes = compute_changes(dataclasses.replace(measurements, sent=()))
    sent: Any = ()
    if measurements.sent:
        sent = compute_changes(measurements.messages).reshape(cells.shape)
    return apply(cells, changes.reshape(cells.shape), sent, heard, bound)


def _team_sums(config: MapConfig, old: Array, new: Array, measurements: Measurements) -> tuple[Sums, Array]:
    """Sums over the team map [n * n] after an update from `old` to `new`, and `UpdateStats.before`."""
    storage = config.storage
    n = config.n

    @materialize
    def weighted(new: Array, entropy: Array) -> Array:
        return to_fixed_point(storage.weight(new, config.weights.relative) * entropy)

    @materialize
    def within(interest: Array, entropy: Array) -> Array:
        return to_fixed_point(jnp.where(interest, entropy, jnp.float32(0.0)))

    @materialize
    def flags(new: Array, interest: Array) -> Array:
        predicted = storage.above(new, PREDICTED)
        seen = new != storage.unseen
        return pack_flags(predicted, predicted & interest, seen, seen & interest)

    interest = materialize(lambda terrain: ground.whole(terrain, n))(measurements.terrain).reshape(n * n)
    entropy_old = materialize(storage.entropy)(old)
    entropy_new = materialize(storage.entropy)(new)
    sums = Sums(
        weighted=total(weighted(new, entropy_new)),
        interest=total(within(interest, entropy_new)),
        counts=count_flags(flags(new, interest)),
    )
    return sums, total(weighted(new, entropy_old))


def resize_readings(config: MapConfig, measurements: Measurements) -> Array:
    """float32[A, 11, 11]: see `UpdateStats.measured`."""
    result = jnp.zeros((config.num_agents, world.LATTICE, world.LATTICE), jnp.float32)
    for level in range(world.LEVELS):  # supposing that all agents are there
        side = 2 * world.radius(config.cells_per_footprint, level)
        signs = functools.partial(_signs, config, level)
        if on_cpu():
            all_rows = jnp.arange(side, dtype=jnp.int32)
            resized = world.resize(materialize(functools.partial(signs, all_rows))(measurements))
        else:
            resized = world.resize_rows(functools.partial(signs, measurements=measurements), side)
        result = jnp.where((measurements.positions[:, 2] == level)[:, None, None], resized, result)
    return result


def _signs(config: MapConfig, level: int, chosen: Array, measurements: Measurements) -> Array:
    """float32[A, R, k]: signed readings in the rows `chosen` int32[R] of all footprints, as if all were at `level`."""
    n = config.n
    side = 2 * world.radius(config.cells_per_footprint, level)

    def read_signs(agent: Array) -> Array:
        position = measurements.positions[agent].at[2].set(level)
        box = world.footprint(position, config.cells_per_footprint)
        rows = box.top + jnp.repeat(chosen, side)
        columns = box.left + jnp.tile(jnp.arange(side, dtype=jnp.int32), len(chosen))
        height = jnp.int32(level)
        read = sensor.reads_occupied(measurements.source, measurements.terrain, agent, height, rows, columns, n)
        inside = world.clip_footprint(box, n).holds(rows, columns)
        if not isinstance(measurements.present, tuple):
            inside &= measurements.present[agent]
        return jnp.where(inside, jnp.where(read, jnp.float32(1.0), jnp.float32(-1.0)), jnp.float32(0.0))

    readings = jax.vmap(read_signs)(jnp.arange(config.num_agents, dtype=jnp.int32))
    return readings.reshape(-1, len(chosen), side)
