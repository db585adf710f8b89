"""The reference engine: whole maps, plain array code, everything computed anew at every update."""

import jax
import jax.numpy as jnp

from envs_jax.base import Array
from envs_jax.coverage import sensor, world
from envs_jax.coverage import terrain as ground
from envs_jax.coverage.belief import PREDICTED, entropy_of_log_odds, probability
from envs_jax.coverage.maps import Mapper, Maps, Report, Sums, Survey, fixed, total


def update(mapper: Mapper, maps: Maps, survey: Survey) -> tuple[Maps, Report]:
    """See `maps`. Leaves of one copy, without batch axis."""
    storage = mapper.storage
    beliefs = _fuse(mapper, maps.beliefs, survey)
    sums, before = _team_sums(mapper, maps.beliefs[-1], beliefs[-1], survey)
    resized = world.resize(beliefs, lambda stored: probability(storage.log_odds(stored)))
    excess = jnp.ones_like(maps.excess)  # never looked at here; "may" is always true
    report = Report(measured=measured(mapper, survey), before=before)
    return Maps(beliefs, resized, sums, excess), report


def update_batch(mapper: Mapper, maps: Maps, survey: Survey) -> tuple[Maps, Report]:
    """`update` of [B] copies at once."""
    return jax.vmap(lambda maps, survey: update(mapper, maps, survey))(maps, survey)


def _changes(mapper: Mapper, survey: Survey) -> tuple[list[Array], list[Array]]:
    """For each agent bool[n, n], its clipped footprint, and dtype[n, n], what its readings would add there."""
    n, storage = mapper.n, mapper.storage
    rows = jnp.arange(n, dtype=jnp.int32)[:, None]
    columns = jnp.arange(n, dtype=jnp.int32)[None, :]
    inside, change = [], []
    for agent in range(mapper.num_agents):
        position = survey.positions[agent]
        box = world.clip_footprint(world.footprint(position, mapper.q), n)
        read = sensor.occupied(survey.source, survey.terrain, agent, position[2], rows, columns, n)
        gains = jnp.take(jnp.asarray(storage.gains), position[2], axis=1, mode="clip")
        inside.append(box.holds(rows, columns))
        change.append(jnp.where(read, gains[1], gains[0]))
    return inside, change


def _fuse(mapper: Mapper, beliefs: Array, survey: Survey) -> Array:
    """New beliefs dtype[A + 1, n, n]."""
    storage, agents = mapper.storage, mapper.num_agents
    inside, change = _changes(mapper, survey)
    fused = []
    for receiver in range(agents + 1):
        old = beliefs[receiver]
        value, touched = storage.value(old), jnp.zeros_like(old, jnp.bool_)
        if receiver < agents:
            touched = inside[receiver]
            value = jnp.where(touched, storage.clip(value) + change[receiver], value)
        for sender in range(agents):
            if sender == receiver:
                continue
            heard = jnp.bool_(True) if receiver == agents else survey.received[receiver, sender]
            added = jnp.where(inside[sender], change[sender], jnp.zeros_like(change[sender]))
            value = jnp.where(heard, storage.clip(value) + added, value)
            touched |= heard & inside[sender]
        fused.append(jnp.where(touched | (old != storage.unseen), value, old))
    return jnp.stack(fused)


def _team_sums(mapper: Mapper, old: Array, new: Array, survey: Survey) -> tuple[Sums, Array]:
    """Sums over the team map after an update from `old` to `new`, and `Report.before`."""
    storage, n = mapper.storage, mapper.n
    interest = ground.whole(survey.terrain, n)
    weight = storage.weight(new, mapper.weights.relative)
    entropy_old = entropy_of_log_odds(storage.log_odds(old))
    entropy_new = entropy_of_log_odds(storage.log_odds(new))
    predicted = storage.above(new, PREDICTED)
    seen = new != storage.unseen
    counts = [jnp.sum(cells, dtype=jnp.int32) for cells in (predicted, predicted & interest, seen, seen & interest)]
    sums = Sums(
        weighted=total(fixed(weight * entropy_new, n)),
        interest=total(jnp.where(interest, fixed(entropy_new, n), jnp.int32(0))),
        counts=jnp.stack(counts),
    )
    return sums, total(fixed(weight * entropy_old, n))


def measured(mapper: Mapper, survey: Survey) -> Array:
    """float32[A, 11, 11]: see `Report.measured`."""
    agents = jnp.arange(mapper.num_agents, dtype=jnp.int32)

    def at(level: int) -> Array:  # supposing that all agents are there
        return jax.vmap(lambda agent: _measured_at(mapper, survey, agent, level))(agents)

    result = at(0)
    for level in range(1, world.LEVELS):
        result = jnp.where((survey.positions[:, 2] == level)[:, None, None], at(level), result)
    return result


def _measured_at(mapper: Mapper, survey: Survey, agent: Array, level: int) -> Array:
    """float32[11, 11]: resized signed readings of `agent`, supposing that it is at altitude index `level`."""
    n, side = mapper.n, 2 * world.radius(mapper.q, level)
    position = survey.positions[agent].at[2].set(level)
    box = world.footprint(position, mapper.q)
    rows = (box.top + jnp.arange(side, dtype=jnp.int32))[:, None]
    columns = (box.left + jnp.arange(side, dtype=jnp.int32))[None, :]
    read = sensor.occupied(survey.source, survey.terrain, agent, jnp.int32(level), rows, columns, n)
    inside = world.clip_footprint(box, n).holds(rows, columns)
    sign = jnp.where(inside, jnp.where(read, jnp.float32(1.0), jnp.float32(-1.0)), jnp.float32(0.0))
    return world.resize(sign)
