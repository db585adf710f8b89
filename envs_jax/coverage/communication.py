"""The channel: which messages arrive, and when. A message is a position and the measurement taken there.

After every measurement each agent sends a message to each other agent: an attempt. It is eligible if the receiver is
at most the communication range away then, in three dimensions. An eligible message is dropped with probability
`failure_rate`, independently per ordered pair and step, but never between agents in the same place. All others arrive
`delay` steps later: after that measurement the receiver fuses them, in the order of their senders. A message is never
relayed nor repeated. What is under way when a mission ends is discarded.

`draw_received` is the whole rule of a channel without delay. `exchange` is that of a `Channel`, which delays messages,
draws its failure rate and its delay for each mission, or counts. Readings are a hash of key, step, agent and cell (see
`sensor`), so that a message under way is its sender's position: a mission keeps the last few positions of all.

Draws of the channel come from keys that nothing else uses (`_LINKS`, `_CONDITIONS`): a mission has the same terrain,
start and readings under every channel, and at a higher failure rate loses what it lost at a lower one, and more.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from envs_jax.base import Array, pytree
from envs_jax.coverage import teams, world
from envs_jax.coverage.joining import Numbers
from envs_jax.coverage.teams import Team
from envs_jax.coverage.world import SPACING

RANGES = (0.0, 15.0, 25.0, 100.0)  # metres; drawn from when the range is not fixed
POSITION_BYTES = 12  # three numbers in a message; its footprint takes one bit per cell
_LINKS, _CONDITIONS = 3, 4  # indices of these keys of a mission; 0 to 2 draw its start


def draw_range(key: Array) -> Array:
    """float32[], m: the range of a mission where it is random, one of RANGES."""
    return jnp.asarray(RANGES, jnp.float32)[jax.random.randint(key, (), 0, len(RANGES), jnp.int32)]


def draw_received(
    key: Array, index: Array, positions: Array, comm_range: Array, failure_rate: Array | float, team: Any = ()
) -> Array:
    """bool[A, A]: [i, j] = agent i receives the message that agent j sends after measurement `index`.

    Args:
        key: key[], of the mission.
        index: int32[].
        positions: int32[A, 3], lattice positions of that measurement.
        comm_range: float32[], m.
        failure_rate: probability that a message within range is lost, independent per ordered pair.
        team: `Team`, others neither send nor receive; () = all are present.
    """
    delivered = draw_delivered(key, index, positions.shape[0], failure_rate, team)
    received = find_received(positions, comm_range, delivered)
    return received & teams.pairs(team.present) if team else received


def find_received(positions: Array, comm_range: Array, delivered: Array | bool = True) -> Array:
    """bool[A, A]: the messages `delivered` bool[A, A] whose senders are at most the range away, in three dimensions.

    Agents in the same place always hear each other.
    """
    steps = positions[:, None, :] - positions[None, :, :]
    squared = jnp.sum(steps * steps, axis=-1, dtype=jnp.int32).astype(jnp.float32) * SPACING**2
    return (squared == 0.0) | ((squared <= comm_range * comm_range) & delivered)


def draw_delivered(
    key: Array, index: Array, num_agents: int, failure_rate: Array | float, team: Any = ()
) -> Array | bool:
    """bool[A, A]: messages that are not lost; True without failures. Arguments as of `draw_received`."""
    if isinstance(failure_rate, float) and failure_rate == 0.0:
        return True
    key = jax.random.fold_in(jax.random.fold_in(key, _LINKS), index)
    draws = jax.random.uniform(key, (num_agents, num_agents), jnp.float32)
    if team:  # pairs are numbered as in an array of the team's size
        numbers = jnp.arange(num_agents, dtype=jnp.int32)
        places = jnp.minimum(numbers[:, None] * team.size + numbers[None], num_agents**2 - 1)
        draws = draws.reshape(-1)[places]
    return draws >= failure_rate


# A channel with delay, drawn conditions or counts


@dataclasses.dataclass(frozen=True)
class ChannelConfig:
    """Static settings of a channel that is more than `draw_received`."""

    failure_rates: tuple[float, ...]  # that missions may have
    delays: tuple[int, ...]  # steps; likewise
    steps: int  # T of a mission
    cells_per_footprint: int  # cells along a footprint edge at the lowest altitude

    @property
    def max_delay(self) -> int:
        """D, steps."""
        return max(self.delays)


@pytree
class Counts:
    """Counts of the messages of a mission so far: int32[] each; `load` is float32[], bytes."""

    attempts: Array
    eligible: Array
    dropped: Array
    delivered: Array
    agent_steps: Array  # steps of all agents together
    load: Array  # bytes of all attempts: POSITION_BYTES, and one bit per cell of the footprint


@pytree
class Channel:
    """The channel of one mission."""

    failure_rate: Array  # float32[], of this mission
    delay: Array  # int32[], of this mission, steps
    history: Array  # int32[D, A, 3], lattice positions of the last D measurements, the latest first
    senders: Any  # bool[D, A], who was present then; () where all are
    latest: Array  # int32[A, A], [i, j] = when the newest message of j that i received was sent; -1: never
    counts: Counts  # in this mission


def begin(
    config: ChannelConfig, numbers: Numbers, key: Array, positions: Array, share: Array | None, team: Any = ()
) -> Channel:
    """Return the channel of the mission of a key, before its first measurement at positions int32[A, 3].

    Its failure rate and its delay, at most `config.max_delay`, are drawn from those of `numbers`. `share` float32[]
    multiplies both, and the delay is then rounded; None leaves them as they are. `team` as of `draw_received`.
    """
    rate_key, delay_key = jax.random.split(jax.random.fold_in(key, _CONDITIONS))
    failure_rate = numbers.failure_rates.draw(rate_key)
    delay = numbers.delays.draw(delay_key)
    if share is not None:
        failure_rate = failure_rate * share
        delay = jnp.floor(delay.astype(jnp.float32) * share + 0.5).astype(jnp.int32)
    agents = positions.shape[0]
    zero = jnp.int32(0)
    return Channel(
        failure_rate=failure_rate,
        delay=delay,
        history=jnp.broadcast_to(positions, (config.max_delay, *positions.shape)),
        senders=jnp.broadcast_to(team.present, (config.max_delay, agents)) if team else (),
        latest=jnp.full((agents, agents), -1, jnp.int32),
        counts=Counts(zero, zero, zero, zero, zero, jnp.float32(0.0)),
    )


def exchange(
    config: ChannelConfig,
    channel: Channel,
    key: Array,
    index: Array,
    positions: Array,
    comm_range: Array,
    team: Any = (),
) -> tuple[Array, Array, Array, Channel]:
    """Send the messages of measurement `index`, then receive what arrives.

    Arguments as of `draw_received`.

    Returns:
        received bool[A, A], [i, j] = a message of j arrives at i; int32[A, 3] and int32[], where and when the messages
        that arrive were sent; the channel afterwards.
    """
    agents = positions.shape[0]
    lossless = max(config.failure_rates) == 0.0
    failure_rate = 0.0 if lossless else channel.failure_rate
    history = jnp.concatenate([positions[None], channel.history])
    sent_index = index - channel.delay
    sent_positions = history[channel.delay]
    arrives = sent_index >= 0
    sent_index = jnp.maximum(sent_index, 0)
    present = team.present if team else jnp.ones((agents,), jnp.bool_)
    senders: Any = ()
    sent_team: Any = ()
    if team:
        senders = jnp.concatenate([present[None], channel.senders])
        sent_team = Team(team.size, senders[channel.delay])
        senders = senders[: config.max_delay]
    received = draw_received(key, sent_index, sent_positions, comm_range, failure_rate, sent_team) & arrives
    received &= present[:, None]

    others = ~np.eye(agents, dtype=bool)
    pairs = teams.pairs(present) & others
    eligible = find_received(positions, comm_range) & pairs
    passing = draw_received(key, index, positions, comm_range, failure_rate, team)
    message_bytes = jnp.where(present, _message_bytes(config, positions), 0.0)
    receivers = jnp.sum(present, dtype=jnp.int32) - 1
    acting = index < config.steps  # nobody acts on what the mission's end shows

    def count(total: Array, events: Array) -> Array:
        return total + jnp.where(acting, jnp.sum(events, dtype=jnp.int32), 0)

    counts = channel.counts
    counts = Counts(
        attempts=count(counts.attempts, pairs),
        eligible=count(counts.eligible, eligible),
        dropped=count(counts.dropped, eligible & ~passing),
        delivered=count(counts.delivered, received & others),
        agent_steps=count(counts.agent_steps, present),
        load=counts.load + jnp.where(acting, jnp.sum(message_bytes) * receivers.astype(jnp.float32), 0.0),
    )
    channel = dataclasses.replace(
        channel,
        history=history[: config.max_delay],
        senders=senders,
        latest=jnp.where(received & others, sent_index, channel.latest),
        counts=counts,
    )
    return received, sent_positions, sent_index, channel


def _message_bytes(config: ChannelConfig, positions: Array) -> Array:
    """float32[A]: size of the message of each agent."""
    n = world.map_side(config.cells_per_footprint)
    box = world.clip_footprint(world.footprint(positions, config.cells_per_footprint), n)
    cells = (box.bottom - box.top) * (box.right - box.left)
    return (POSITION_BYTES + (cells + 7) // 8).astype(jnp.float32)


METRICS = {
    "attempts": "messages attempted",
    "eligible": "messages within range",
    "dropped": "messages dropped",
    "delivered": "messages delivered",
    "discarded": "messages discarded at the end",
    "delivery_ratio": "share of messages within range delivered",
    "age_mean": "mean age of messages, steps",
    "age_max": "largest age of a message, steps",
    "heard": "agents heard per agent and step",
    "load": "load of the channel, bytes",
}
"""Labels of the metrics of a mission."""


def metrics(config: ChannelConfig, channel: Channel, index: Array) -> dict[str, Array]:
    """Return METRICS float32[] of a mission up to measurement `index` int32[].

    Steps count in which agents act, T of them. All messages of a mission have the same age, its delay. Where no
    message was within range all were delivered; other values of nothing are 0.
    """
    counts = channel.counts
    under_way = counts.eligible - counts.dropped - counts.delivered
    age = jnp.where(counts.delivered > 0, channel.delay, 0)
    values = {
        "attempts": counts.attempts,
        "eligible": counts.eligible,
        "dropped": counts.dropped,
        "delivered": counts.delivered,
        "discarded": jnp.where(index >= config.steps, under_way, 0),
        "delivery_ratio": jnp.where(counts.eligible > 0, _ratio(counts.delivered, counts.eligible), 1),
        "age_mean": age,
        "age_max": age,
        "heard": _ratio(counts.delivered, counts.agent_steps),
        "load": counts.load,
    }
    return {name: value.astype(jnp.float32) for name, value in values.items()}


def _ratio(part: Array, whole: Array) -> Array:
    return part.astype(jnp.float32) / jnp.maximum(whole, 1).astype(jnp.float32)


def links(received: Array, age: Array) -> Array:
    """int32[A, A]: `TimeStep.links`, the `age` int32[] in steps of the messages `received` bool[A, A], else -1."""
    others = ~np.eye(received.shape[0], dtype=bool)
    return jnp.where(received & others, age, jnp.int32(-1))


def ages(config: ChannelConfig, channel: Channel, index: Array) -> Array:
    """float32[A, A]: age of the newest message that i has of j after measurement `index` int32[], in missions.

    0 for i = j, 1 if there is none.
    """
    age = jnp.minimum((index - channel.latest).astype(jnp.float32) / config.steps, 1.0)
    age = jnp.where(channel.latest < 0, jnp.float32(1.0), age)
    return jnp.where(np.eye(age.shape[0], dtype=bool), jnp.float32(0.0), age)
