"""The replay against a plain Python list, with ends, wrap-around and n-step windows."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envs_jax import Box
from jaxrl.rl import replay as replays
from jaxrl.rl.replay import CONTINUES, TERMINATED, TRUNCATED, Replay

SHARDS, ENVS, AGENTS = 2, 3, 2
OBSERVATION = {"id": jax.ShapeDtypeStruct((), jnp.int32), "board": jax.ShapeDtypeStruct((AGENTS, 4), jnp.int8)}
ANSWER = jax.ShapeDtypeStruct((AGENTS,), jnp.uint8)


class Stream:
    """Environments that show a number of their own at every step and end at random (or by `lengths`)."""

    def __init__(self, seed: int, end_chance: float, num_envs: int = SHARDS * ENVS) -> None:
        self.random, self.end_chance, self.num_envs = np.random.default_rng(seed), end_chance, num_envs
        self.count, self.rows = 0, []  # one dict of arrays [B, ...] per step
        self._see()

    def _see(self) -> None:
        size = self.num_envs
        end = self.random.choice(
            [CONTINUES, TERMINATED, TRUNCATED], size, p=[1 - self.end_chance, self.end_chance / 2, self.end_chance / 2]
        )
        reward = self.random.normal(size=(size, AGENTS)).astype(np.float32)
        if self.rows:
            end[self.rows[-1]["end"] != CONTINUES] = CONTINUES  # a first row, with reward 0
            reward[self.rows[-1]["end"] != CONTINUES] = 0.0
        ids = self.count * size + np.arange(size)
        board = ids[:, None, None] % 7 + np.arange(AGENTS * 4).reshape(1, AGENTS, 4)
        self.rows.append({"id": ids, "board": board, "reward": reward, "end": end})
        self.count += 1

    def steps(self, count: int) -> tuple[Any, ...]:
        """What `write` takes for so many more steps."""
        for _ in range(count):
            self.rows[-1]["answer"] = self.random.integers(0, 200, (self.num_envs, AGENTS))
            self._see()

        def stack(name: Any, rows: Any) -> Any:
            return np.stack([row[name] for row in rows])

        new = self.rows[-count - 1 :]
        observation = {"id": stack("id", new).astype(np.int32), "board": stack("board", new)}
        answer = stack("answer", new[:-1])
        return observation, answer, stack("reward", new), stack("end", new).astype(np.uint8)

    def windows(self, size: int, n: int) -> dict[int, dict[str, Any]]:
        """By the number seen first: every window that a list of the newest `size` rows allows, the last unanswered."""
        windows_by_number = {}
        newest = self.rows[-size:]
        for env in range(self.num_envs):
            for first in range(len(newest) - n):
                if newest[first]["end"][env] != CONTINUES:
                    continue
                later = []
                for row in newest[first + 1 : first + 1 + n]:
                    later.append(row)
                    if row["end"][env] != CONTINUES:
                        break
                windows_by_number[int(newest[first]["id"][env])] = {
                    "answer": newest[first]["answer"][env],
                    "board": newest[first]["board"][env],
                    "rewards": [row["reward"][env] for row in later],
                    "next": int(later[-1]["id"][env]),
                    "end": later[-1]["end"][env],
                }
        return windows_by_number


@functools.partial(jax.jit, static_argnums=0)
def empty(rows: int) -> Replay:
    return replays.create(OBSERVATION, ANSWER, AGENTS, SHARDS, rows, ENVS)


write = jax.jit(replays.write, donate_argnums=0)


@functools.partial(jax.jit, static_argnames=("count", "n"))
def draw(replay: Replay, key: Any, count: int, n: int) -> Any:
    keys = jax.random.split(key, SHARDS)
    index, weight = jax.vmap(lambda key, end, head, filled: replays.sample_uniform(key, end, head, filled, count, n))(
        keys, replay.end, replay.head, replay.filled
    )
    sample = jax.vmap(lambda shard, index: replays.gather(shard, index, n))(replay, index)
    returns = jax.vmap(jax.vmap(lambda r, e: replays.n_step_return(r, e, 0.9)))(sample.reward, sample.end)
    return sample, weight, returns


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 10_000),
    end_chance=st.sampled_from([0.0, 0.1, 0.4]),
    rows=st.sampled_from([6, 9]),
    steps=st.sampled_from([1, 5]),
    writes=st.integers(1, 9),
    n=st.sampled_from([1, 3]),
)
def test_samples_are_those_of_a_python_list(
    seed: int, end_chance: float, rows: int, steps: int, writes: int, n: int
) -> None:
    stream, replay = Stream(seed, end_chance), empty(rows)
    for _ in range(writes):
        replay = write(replay, *stream.steps(steps))
    allowed = stream.windows(rows, n)
    sample, weight, (returns, discount) = jax.tree.map(np.asarray, draw(replay, jax.random.key(seed), 256, n))
    drawn = set()
    for shard, m in np.argwhere(weight == 1):
        first = int(sample.observation["id"][shard, m])
        window = allowed[first]
        drawn.add(first)
        assert first % (SHARDS * ENVS) // ENVS == shard  # no sample leaves its shard
        assert (sample.action[shard, m] == window["answer"]).all()
        assert (sample.observation["board"][shard, m] == window["board"]).all()
        assert sample.next_observation["id"][shard, m] == window["next"]
        by_hand = sum(0.9**k * reward for k, reward in enumerate(window["rewards"]))
        assert (np.abs(returns[shard, m] - by_hand) <= 1e-6 + 1e-5 * np.abs(by_hand)).all()
        behind = 0.0 if window["end"] == TERMINATED else 0.9 ** len(window["rewards"])
        assert abs(discount[shard, m] - behind) <= 1e-6 * behind
    assert set(np.unique(weight)) <= {0.0, 1.0}
    if not allowed:
        assert not weight.any()
    elif len(allowed) == (min(steps * writes, rows - 1) - n + 1) * SHARDS * ENVS:  # no row ends an episode
        assert weight.all()
    assert drawn == set(allowed)  # 256 draws of at most 24 windows in each shard miss one with a chance of 2e-4


def test_all_windows_are_drawn_equally_often() -> None:
    stream, replay = Stream(3, 0.2), empty(8)
    replay = write(replay, *stream.steps(6))
    replay = write(replay, *stream.steps(5))
    sample, weight, _ = jax.tree.map(np.asarray, draw(replay, jax.random.key(0), 60_000, 2))
    allowed = stream.windows(8, 2)
    assert np.asarray(weight).mean() > 0.99
    for shard in range(SHARDS):
        ids = sample.observation["id"][shard][weight[shard] == 1]
        mine = [i for i in allowed if i % (SHARDS * ENVS) // ENVS == shard]
        share = np.array([(ids == i).mean() for i in mine])
        error = np.sqrt(1 / len(mine) / len(ids))
        assert np.abs(share - 1 / len(mine)).max() < 4.5 * error


def test_n_step_returns_by_hand() -> None:
    reward = np.float32([[1.0, 10.0], [2.0, 20.0], [4.0, 40.0]])
    cases = {
        (CONTINUES, CONTINUES, CONTINUES): (1 + 1 + 1, 0.125),
        (CONTINUES, CONTINUES, TERMINATED): (3, 0.0),
        (CONTINUES, CONTINUES, TRUNCATED): (3, 0.125),
        (CONTINUES, TRUNCATED, TERMINATED): (2, 0.25),
        (TERMINATED, CONTINUES, CONTINUES): (1, 0.0),
        (TRUNCATED, CONTINUES, TERMINATED): (1, 0.5),
    }
    return_to = jax.jit(lambda end: replays.n_step_return(reward, end, 0.5))
    for end, (expected, discount) in cases.items():
        total, behind = return_to(np.array(end, np.uint8))
        np.testing.assert_allclose(total, [expected, 10 * expected])
        assert float(behind) == discount


# Storage


def test_rows_lie_where_a_list_has_them_and_are_written_in_place() -> None:
    stream, replay = Stream(0, 0.2), empty(7)
    for steps in (1, 3, 6, 2):
        before, old = replay.observation["board"].unsafe_buffer_pointer(), replay
        replay = write(replay, *stream.steps(steps))
        assert old.observation["board"].is_deleted() and replay.observation["board"].unsafe_buffer_pointer() == before
    assert int(replay.head[0]) == 12 % 7 and int(replay.filled[0]) == 6
    for age, row in enumerate(reversed(stream.rows[-7:])):
        slot = (12 - age) % 7
        ids = np.asarray(replay.observation["id"][:, slot]).reshape(-1)
        np.testing.assert_array_equal(ids, row["id"])
        np.testing.assert_array_equal(replay.end[:, slot].reshape(-1), row["end"])
    assert replay.observation["board"].dtype == jnp.int8 and replay.action.dtype == jnp.uint8


def test_too_many_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="5 steps do not fit into a replay of 5 rows"):
        replays.write(empty(5), *Stream(0, 0.0).steps(5))
    with pytest.raises(ValueError, match="too large"):
        jax.eval_shape(lambda: replays.create(OBSERVATION, ANSWER, 1, 1, 2**20, 2**11))


@pytest.mark.parametrize(
    ("box", "expected"),
    [
        (Box((2,), jnp.int32, 0, 19), jnp.int8),
        (Box((2,), jnp.int32, 0, 200), jnp.uint8),
        (Box((2,), jnp.int32, -1, 200), jnp.int16),
        (Box((2,), jnp.int32, -1, 2**20), jnp.int32),
        (Box((2,), jnp.int16), jnp.int16),
        (Box((2,), jnp.float32, 0.0, 1.0), jnp.float16),
        (Box((2,), jnp.float32, -1.0, 1.0), jnp.float32),
    ],
)
def test_storage_is_the_smallest_that_holds_the_values(box: Box, expected: Any) -> None:
    assert replays.storage_dtype(box) == expected
