"""Replay: a ring buffer of time steps in each logical shard, with one copy of every observation.

A row holds a time step (observation, and the reward and end that came with it) and the action taken on it. By
next-step auto-reset the next row holds the result of that action, so that no observation is stored twice. The newest
row has no action yet: the next `write` completes it. Actions in rows that end an episode are ignored. These rows are
never sampled, and neither are the newest n rows, whose n-step windows are incomplete.

Letters: S logical shards, R rows, E environments of one shard, A agents, m samples, n steps of a return. Storage is
[S, R, E, ...]. `write` works on all shards of a device. The functions below it work on ONE shard, and callers vmap
them: samples never leave their shard, and do not depend on the number of devices.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp

from envs_jax.base import Array, Box, pytree
from envs_jax.stages import materialize
from jaxrl.common.shapes import Float32, UInt8, assert_equal_shape, assert_rank, assert_shape
from jaxrl.common.types import Key
from jaxrl.nn.precision import stored_dtype

CONTINUES, TERMINATED, TRUNCATED = 0, 1, 2
MAX_ROWS = 2**31  # in a logical shard, limited by int32 indices
TRIES = 4  # draws per sample; the first valid window start is taken


@pytree
class Replay:
    """The ring buffer; every leaf has the logical shard as its first axis.

    Attributes:
        observation: pytree [S, R, E, ...], observations and other inputs of acting.
        action: pytree [S, R, E, ...], actions and other outputs of acting; undefined in the newest row.
        reward: float32[S, R, E, A], reward received with the row's observation.
        end: uint8[S, R, E], CONTINUES, TERMINATED or TRUNCATED at the row.
        head: int32[S], the newest row.
        filled: int32[S], rows with an action, at most R - 1.
    """

    observation: Any
    action: Any
    reward: Array
    end: Array
    head: Array
    filled: Array


@pytree
class Sample:
    """m windows of at most n steps.

    Attributes:
        observation: pytree [m, ...] of the first row, see `Replay`.
        action: pytree [m, ...] of the first row, see `Replay`.
        reward: float32[m, n, A], rewards after the first row; undefined after an end.
        end: uint8[m, n], ends after the first row; undefined after an end.
        next_observation: pytree [m, ...] of the row n steps later, or of the episode's last row if that is earlier.
    """

    observation: Any
    action: Any
    reward: Array
    end: Array
    next_observation: Any


# Sizes


def storage_dtype(box: Box) -> Any:
    """Return the smallest dtype that holds the values of a box.

    Integers are exact: the smallest type with the box's bounds. Floats are float16 where they lie in [0, 1], which
    rounds to a relative 5e-4.
    """
    if jnp.issubdtype(box.dtype, jnp.floating):
        return stored_dtype(box, jnp.dtype("float16"))
    if not jnp.issubdtype(box.dtype, jnp.integer) or not math.isfinite(box.highest - box.lowest):
        return box.dtype
    kinds = (jnp.int8, jnp.uint8, jnp.int16, jnp.uint16)
    fits = (kind for kind in kinds if jnp.iinfo(kind).min <= box.lowest and box.highest <= jnp.iinfo(kind).max)
    return jnp.dtype(next(fits, box.dtype))


def row_bytes(observation: Any, action: Any, agents: int) -> int:
    """Return the bytes of one row of one environment, from ShapeDtypeStructs without storage axes."""
    leaves = jax.tree.leaves((observation, action))
    stored = sum(math.prod(leaf.shape) * jnp.dtype(leaf.dtype).itemsize for leaf in leaves)
    return stored + 4 * agents + 1


def create(observation: Any, action: Any, agents: int, shards: int, rows: int, envs: int) -> Replay:
    """Return an empty replay; observation and action as in `row_bytes`. Raises ValueError for too many rows."""
    if rows * envs >= MAX_ROWS:
        raise ValueError(f"a replay of {rows * envs:,} rows per logical shard is too large: keep it below 2^31")

    def zeros(tree: Any) -> Any:
        return jax.tree.map(lambda x: jnp.zeros((shards, rows, envs, *x.shape), x.dtype), tree)

    return Replay(
        observation=zeros(observation),
        action=zeros(action),
        reward=jnp.zeros((shards, rows, envs, agents), jnp.float32),
        end=jnp.zeros((shards, rows, envs), jnp.uint8),
        head=jnp.zeros(shards, jnp.int32),
        filled=jnp.zeros(shards, jnp.int32),
    )


def ends(terminated: Array, truncated: Array) -> Array:
    """Encode ends as in `Replay.end`, uint8[...]."""
    assert_equal_shape([terminated, truncated])
    return jnp.where(terminated, TERMINATED, jnp.where(truncated, TRUNCATED, CONTINUES)).astype(jnp.uint8)


# All shards of a device


def write(replay: Replay, observation: Any, action: Any, reward: Array, end: Array) -> Replay:
    """Append T rows with actions and the next one without; row 0 replaces the newest row, which had no action.

    Args:
        replay: donated by the caller, so that only the new rows are touched.
        observation: leaves [T + 1, B, ...], B environments of this device.
        action: leaves [T, B, ...].
        reward: float32[T + 1, B, A].
        end: uint8[T + 1, B].
    """
    (shards, size, envs), steps = replay.end.shape, end.shape[0] - 1
    if steps >= size:
        raise ValueError(f"{steps} steps do not fit into a replay of {size} rows: enlarge it, or write more often")
    slots = (replay.head[0] + jnp.arange(steps + 1, dtype=jnp.int32)) % size  # all heads are equal

    def place(buffer: Array, rows: Array) -> Array:
        rows = rows.reshape(rows.shape[0], shards, envs, *rows.shape[2:]).swapaxes(0, 1).astype(buffer.dtype)
        assert_shape(rows, (shards, None, envs, *buffer.shape[3:]))
        return buffer.at[:, slots[: rows.shape[1]]].set(rows, unique_indices=True)

    return Replay(
        observation=jax.tree.map(place, replay.observation, observation),
        action=jax.tree.map(place, replay.action, action),
        reward=place(replay.reward, reward),
        end=place(replay.end, end),
        head=(replay.head + steps) % size,
        filled=jnp.minimum(replay.filled + steps, size - 1),
    )


# One shard


def rows_at(leaf: Array, index: Array) -> Array:
    """Return the rows [..., *rest] of ONE shard's leaf [R, E, *rest] at index int32[...] into R times E."""
    return jnp.take(leaf.reshape(-1, *leaf.shape[2:]), index, axis=0, mode="clip")


def sample_uniform(key: Key, end: Array, head: Array, filled: Array, count: int, n_step: int) -> tuple[Array, Array]:
    """Sample first rows of windows of `n_step` steps, uniformly and with replacement, from end uint8[R, E].

    Rows that end an episode are drawn again, at most `TRIES` times; if all draws fail the sample has weight 0. Return
    the index int32[m] into rows times environments, and the weight float32[m], 1 or 0, for m = `count`.
    """
    assert_rank([end, head, filled], [2, 0, 0])

    @materialize  # an index is read for every number of a row
    def sample(key: Key, end: Array, head: Array, filled: Array) -> tuple[Array, Array]:
        size, envs = end.shape
        draw = jax.random.randint(key, (TRIES, count), 0, jnp.maximum(filled - n_step + 1, 1) * envs, jnp.int32)
        index = (head - n_step - draw // envs) % size * envs + draw % envs
        valid = (jnp.take(end.reshape(-1), index, mode="clip") == CONTINUES) & (filled >= n_step)
        chosen = index[-1]
        for attempt in reversed(range(TRIES - 1)):
            chosen = jnp.where(valid[attempt], index[attempt], chosen)
        return chosen, jnp.any(valid, axis=0).astype(jnp.float32)

    return sample(key, end, head, filled)


def gather(replay: Replay, index: Array, n_step: int) -> Sample:
    """Return the windows of ONE shard (leaves [R, E, ...]) that start at index int32[m]."""
    assert_rank([index, replay.end], [1, 2])
    size, envs = replay.end.shape

    def after(index: Array, steps: Array) -> Array:
        return (index // envs + steps) % size * envs + index % envs

    @materialize
    def find_later(index: Array) -> Array:
        return after(index[:, None], jnp.arange(1, n_step + 1, dtype=jnp.int32)[None])

    @materialize
    def find_last(index: Array, end: Array) -> Array:
        return after(index, jnp.sum(_going(end), axis=1, dtype=jnp.int32))

    later = find_later(index)
    end = rows_at(replay.end, later)
    first_and_last = jnp.concatenate([index, find_last(index, end)])  # one read of each leaf
    observation = jax.tree.map(lambda buffer: rows_at(buffer, first_and_last), replay.observation)
    return Sample(
        observation=jax.tree.map(lambda rows: rows[: len(index)], observation),
        action=jax.tree.map(lambda buffer: rows_at(buffer, index), replay.action),
        reward=rows_at(replay.reward, later),
        end=end,
        next_observation=jax.tree.map(lambda rows: rows[len(index) :], observation),
    )


def gather_window(rows: Array, index: Array, steps: int) -> Array:
    """Return [m, steps, ...]: the next rows of ONE shard's leaf [R, E, ...], from index int32[m] inclusive."""
    assert_rank(index, 1)
    size, envs = rows.shape[:2]
    row, env = index[:, None] // envs, index[:, None] % envs
    return rows_at(rows, (row + jnp.arange(steps, dtype=jnp.int32)[None]) % size * envs + env)


# One window


def _going(end: Array) -> Array:
    """Return whether a window has no end before each step, bool[..., n]: its reward is then part of the return."""
    before = jnp.concatenate([jnp.zeros_like(end[..., :1]), end[..., :-1]], axis=-1)
    return jnp.cumsum(before, axis=-1, dtype=jnp.int32) == 0


def n_step_return(
    reward_t: Float32[Array, "n A"], end_t: UInt8[Array, "n"], gamma: Array | float
) -> tuple[Float32[Array, "A"], Float32[Array, ""]]:
    """Return the sum of discounted rewards up to n steps or the episode's end, and the discount of the value after it.

    Rewards are those after the first row; the discount is gamma^k after k steps, 0 where the episode terminated
    (Sutton and Barto, Reinforcement Learning, 2nd edition, equation 7.1, cut at the end of an episode).
    """
    assert_shape(reward_t, (*end_t.shape, None))
    going = _going(end_t)
    powers = jnp.float32(gamma) ** jnp.arange(len(end_t), dtype=jnp.float32)
    terminated = jnp.any(going & (end_t == TERMINATED))
    discount = jnp.prod(jnp.where(going, jnp.float32(gamma), 1.0)) * (1.0 - terminated.astype(jnp.float32))
    return jnp.sum(jnp.where(going, powers, 0.0)[:, None] * reward_t, axis=0), discount
