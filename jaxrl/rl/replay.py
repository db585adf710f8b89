"""Replay: a ring of time steps in each logical shard, one copy of every observation, sampled where it lies.

A row holds what an environment showed (observation, and the reward and end that came with it) and what answered it.
By next-step auto-reset the row behind holds what the answer led to, so that no observation is stored twice. The newest
row has been seen but not answered yet: the next `write` completes it. Rows that end an episode have ignored answers
and are never drawn; neither are the newest n rows, whose n-step windows are not complete.

Letters: S logical shards, R rows, E environments of one shard, A agents, m samples drawn, n steps of a return. Storage
is [S, R, E, ...]. `write` works on all shards of a device; the functions below it on ONE shard, callers vmap: no sample
ever leaves its shard, and what is drawn does not depend on the number of devices.
"""

import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from envs_jax.base import Array, Box, pytree
from jaxrl.nn.precision import stored_dtype

Floats = Literal["auto", "float16", "float32"]
GOES_ON, TERMINATED, TRUNCATED = 0, 1, 2
MOST_ROWS = 2**31  # of a logical shard, which int32 numbers
TRIES = 4  # draws per sample, of which the first that may start a window is taken


@pytree
class Replay:
    """Storage; every leaf has the logical shard as its first axis.

    Attributes:
        seen: pytree [S, R, E, ...], what acting was based on.
        answer: pytree [S, R, E, ...], what acting left; meaningless in the newest row.
        reward: float32[S, R, E, A], reward that came with the row.
        end: uint8[S, R, E], GOES_ON, TERMINATED or TRUNCATED with the row.
        marks: Marks, or () where sampling is uniform.
        head: int32[S], the newest row.
        filled: int32[S], answered rows, at most R - 1.
    """

    seen: Any
    answer: Any
    reward: Array
    end: Array
    marks: Any
    head: Array
    filled: Array


@pytree
class Marks:
    """Priorities, already raised to alpha.

    Attributes:
        priority: float32[S, R, E], 0 where a window cannot start.
        largest: float32[S], the largest so far: that of new rows.
    """

    priority: Array
    largest: Array


@pytree
class Sample:
    """m windows of at most n steps.

    Attributes:
        seen: pytree [m, ...] of the first row.
        answer: pytree [m, ...] of the first row.
        reward: float32[m, n, A], rewards after the first row; meaningless behind an end.
        end: uint8[m, n], ends after the first row; meaningless behind an end.
        next_seen: pytree [m, ...] of the row n steps later, or where the episode ended before.
    """

    seen: Any
    answer: Any
    reward: Array
    end: Array
    next_seen: Any


# Sizes


def storage_dtype(box: Box, floats: Floats = "auto") -> Any:
    """The smallest dtype that holds the values of a box.

    Integers are exact: the smallest type with the box's bounds. Floats are float16 where they lie in [0, 1] ("auto"),
    or what is asked for; float16 rounds to a relative 5e-4.
    """
    if jnp.issubdtype(box.dtype, jnp.floating):
        return stored_dtype(box, jnp.dtype("float16")) if floats == "auto" else jnp.dtype(floats)
    if not jnp.issubdtype(box.dtype, jnp.integer) or not math.isfinite(box.low) or not math.isfinite(box.high):
        return box.dtype
    kinds = (jnp.int8, jnp.uint8, jnp.int16, jnp.uint16)
    fits = (kind for kind in kinds if jnp.iinfo(kind).min <= box.low and box.high <= jnp.iinfo(kind).max)
    return jnp.dtype(next(fits, box.dtype))


def row_bytes(seen: Any, answer: Any, agents: int, prioritised: bool = False) -> int:
    """Bytes of one row of one environment; `seen` and `answer` are ShapeDtypeStructs without the storage axes."""
    leaves = jax.tree.leaves((seen, answer))
    stored = sum(math.prod(leaf.shape) * jnp.dtype(leaf.dtype).itemsize for leaf in leaves)
    return stored + 4 * agents + 1 + 4 * prioritised


def rows_for(transitions: int, num_envs: int, n_step: int = 1) -> int:
    """R such that a full ring holds `transitions` rows that may start a window (less those that end an episode)."""
    return -(-transitions // num_envs) + n_step


def create(seen: Any, answer: Any, agents: int, shards: int, rows: int, envs: int, prioritised: bool = False) -> Replay:
    """An empty replay; `seen` and `answer` as in `row_bytes`. Raises ValueError where rows cannot be numbered."""
    if rows * envs >= MOST_ROWS:
        raise ValueError(f"a replay of {rows * envs:,} rows per logical shard is too large: keep it below 2^31")
    zeros = lambda tree: jax.tree.map(lambda x: jnp.zeros((shards, rows, envs, *x.shape), x.dtype), tree)  # noqa: E731
    return Replay(
        seen=zeros(seen),
        answer=zeros(answer),
        reward=jnp.zeros((shards, rows, envs, agents)),
        end=jnp.zeros((shards, rows, envs), jnp.uint8),
        marks=Marks(jnp.zeros((shards, rows, envs)), jnp.ones(shards)) if prioritised else (),
        head=jnp.zeros(shards, jnp.int32),
        filled=jnp.zeros(shards, jnp.int32),
    )


def ends(terminated: Array, truncated: Array) -> Array:
    """uint8[...] as stored in `Replay.end`."""
    return jnp.where(terminated, TERMINATED, jnp.where(truncated, TRUNCATED, GOES_ON)).astype(jnp.uint8)


# All shards of a device


def write(replay: Replay, seen: Any, answer: Any, reward: Array, end: Array) -> Replay:
    """Append T answered rows and the one behind them; row 0 is the newest row of the last call, now answered.

    Args:
        replay: donated by the caller, so that only the new rows are touched.
        seen: leaves [T + 1, B, ...], B environments of this device.
        answer: leaves [T, B, ...].
        reward: float32[T + 1, B, A].
        end: uint8[T + 1, B].
    """
    (shards, size, envs), steps = replay.end.shape, end.shape[0] - 1
    if steps >= size:
        raise ValueError(f"{steps} steps do not fit into a replay of {size} rows: enlarge it, or write more often")
    slots = (replay.head[0] + jnp.arange(steps + 1)) % size  # all heads are equal

    def place(ring: Array, rows: Array) -> Array:
        rows = rows.reshape(rows.shape[0], shards, envs, *rows.shape[2:]).swapaxes(0, 1).astype(ring.dtype)
        return ring.at[:, slots[: rows.shape[1]]].set(rows, unique_indices=True)

    marks = replay.marks
    if marks:
        new = jnp.repeat(marks.largest, envs)[None] * (end == GOES_ON).astype(jnp.float32)
        marks = Marks(place(marks.priority, new.at[-1].set(0.0)), marks.largest)
    return Replay(
        seen=jax.tree.map(place, replay.seen, seen),
        answer=jax.tree.map(place, replay.answer, answer),
        reward=place(replay.reward, reward),
        end=place(replay.end, end),
        marks=marks,
        head=(replay.head + steps) % size,
        filled=jnp.minimum(replay.filled + steps, size - 1),
    )


# One shard


def choose(key: Array, end: Array, head: Array, filled: Array, number: int, n_step: int) -> tuple[Array, Array]:
    """First rows of windows, uniformly and with replacement.

    Rows that end an episode are drawn again, at most `TRIES` times; a sample that met only such rows has weight 0.

    Args:
        key: key[].
        end: uint8[R, E].
        head: int32[].
        filled: int32[].
        number: m.
        n_step: n.

    Returns:
        index int32[m] into rows times environments; weight float32[m], 1 or 0.
    """
    size, envs = end.shape
    draw = jax.random.randint(key, (TRIES, number), 0, jnp.maximum(filled - n_step + 1, 1) * envs)
    index = (head - n_step - draw // envs) % size * envs + draw % envs
    valid = (jnp.take(end.reshape(-1), index, mode="clip") == GOES_ON) & (filled >= n_step)
    chosen = index[-1]
    for attempt in reversed(range(TRIES - 1)):
        chosen = jnp.where(valid[attempt], index[attempt], chosen)
    return chosen, jnp.any(valid, axis=0).astype(jnp.float32)


def choose_by_priority(
    key: Array, priority: Array, head: Array, filled: Array, number: int, n_step: int, beta: Array
) -> tuple[Array, Array]:
    """First rows of windows in proportion to priority, one from each of m equal shares of the mass.

    Args:
        key: key[].
        priority: float32[R, E].
        head: int32[].
        filled: int32[].
        number: m.
        n_step: n.
        beta: float32[], how far weights correct for unequal chances; 1 = fully.

    Returns:
        index int32[m]; weight float32[m], (N P(i))^-beta over the largest of these m samples, 0 if nothing fits.

    References:
        Schaul et al. 2016, arXiv 1511.05952, section 3.3 (proportional variant), section 3.4 (weights).
    """
    size, envs = priority.shape
    key_row, key_env = jax.random.split(key)
    age = (head - jnp.arange(size)) % size
    complete = (age >= n_step) & (age <= filled)
    mass = jnp.where(complete, priority.sum(1), 0.0)
    sums = jnp.cumsum(mass)
    share = (jnp.arange(number, dtype=jnp.float32) + jax.random.uniform(key_row, (number,))) / number
    row = jnp.minimum(jnp.searchsorted(sums, share * sums[-1], side="right"), size - 1).astype(jnp.int32)
    within = jnp.cumsum(jnp.take(priority, row, axis=0, mode="clip"), axis=1)  # [m, E]
    point = jax.random.uniform(key_env, (number, 1)) * within[:, -1:]
    env = jnp.minimum(jnp.sum(within <= point, axis=1, dtype=jnp.int32), envs - 1)
    index = row * envs + env
    chance = jnp.take(priority.reshape(-1), index, mode="clip") / jnp.maximum(sums[-1], 1e-30)
    valid = (chance > 0) & jnp.take(complete, row, mode="clip")
    starts = jnp.sum(jnp.where(complete[:, None], priority, 0.0) > 0).astype(jnp.float32)
    weight = jnp.where(valid, (starts * jnp.maximum(chance, 1e-30)) ** -beta, 0.0)
    return index, weight / jnp.maximum(weight.max(), 1e-30)


def gather(replay: Replay, index: Array, n_step: int) -> Sample:
    """The windows of ONE shard (leaves [R, E, ...]) that start at index int32[m]."""
    size, envs = replay.end.shape
    row, env = index // envs, index % envs

    def at(ring: Array, index: Array) -> Array:
        return jnp.take(ring.reshape(size * envs, *ring.shape[2:]), index, axis=0, mode="clip")

    later = (row[:, None] + jnp.arange(1, n_step + 1)[None]) % size * envs + env[:, None]
    end = at(replay.end, later)
    last = (row + jnp.sum(_going(end), axis=1, dtype=jnp.int32)) % size * envs + env
    both = jax.tree.map(lambda ring: at(ring, jnp.concatenate([index, last])), replay.seen)  # one read of each leaf
    return Sample(
        seen=jax.tree.map(lambda rows: rows[: len(index)], both),
        answer=jax.tree.map(lambda ring: at(ring, index), replay.answer),
        reward=at(replay.reward, later),
        end=end,
        next_seen=jax.tree.map(lambda rows: rows[len(index) :], both),
    )


def from_row(rows: Array, index: Array, steps: int) -> Array:
    """[m, steps, ...]: the next rows of ONE shard's leaf [R, E, ...] from index int32[m] on, that one included."""
    size, envs = rows.shape[:2]
    places = (index[:, None] // envs + jnp.arange(steps)[None]) % size * envs + index[:, None] % envs
    return jnp.take(rows.reshape(size * envs, *rows.shape[2:]), places, axis=0, mode="clip")


def set_priorities(marks: Marks, index: Array, error: Array, weight: Array, alpha: float) -> Marks:
    """Priorities of ONE shard after an update: (|error| + 1e-6)^alpha where weight > 0.

    Of samples drawn twice the larger error counts, so that the result does not depend on the order of writing.
    """
    flat, used = marks.priority.reshape(-1), weight > 0
    new = jnp.where(used, (jnp.abs(error) + 1e-6) ** alpha, 0.0)
    index = jnp.where(used, index, flat.shape[0])  # out of range: dropped
    flat = flat.at[index].set(0.0, mode="drop").at[index].max(new, mode="drop")
    return Marks(flat.reshape(marks.priority.shape), jnp.maximum(marks.largest, new.max()))


# One window


def _going(end: Array) -> Array:
    """bool[..., n]: no end before this step of the window, so that its reward belongs to it."""
    before = jnp.concatenate([jnp.zeros_like(end[..., :1]), end[..., :-1]], axis=-1)
    return jnp.cumsum(before, axis=-1, dtype=jnp.int32) == 0


def n_step_return(reward_t: Array, end_t: Array, gamma: float) -> tuple[Array, Array]:
    """Sum of discounted rewards up to n steps or the episode's end, and what the value behind them counts.

    Args:
        reward_t: float32[n, A].
        end_t: uint8[n].
        gamma: discount.

    Returns:
        return float32[A]; discount float32[], gamma^k after k steps, 0 where the episode terminated.

    References:
        Sutton and Barto, Reinforcement Learning, 2nd edition, equation 7.1, cut at the end of an episode.
    """
    going = _going(end_t)
    powers = jnp.asarray(np.float32(gamma) ** np.arange(len(end_t), dtype=np.float32))
    terminated = jnp.any(going & (end_t == TERMINATED))
    discount = jnp.prod(jnp.where(going, jnp.float32(gamma), 1.0)) * (1.0 - terminated.astype(jnp.float32))
    return jnp.sum(jnp.where(going, powers, 0.0)[:, None] * reward_t, axis=0), discount
