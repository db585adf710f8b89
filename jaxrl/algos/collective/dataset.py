"""An expert dataset (`integrations.expert_dataset`) on the accelerator: a `Replay` that is filled once and then read.

`Replay.observation` holds "observation" [D] and "task"; `Replay.action` holds "action", the labels "mu", "log_std" and
"value", "code", "step" (of the episode) and "held_out". Reward and end of a step are stored in the next row.

Letters: S logical shards, R rows, E environments of one shard, B all environments, m rows drawn in each shard, K tasks,
D observation dims, s state dims, n action dims, c code dims.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from envs_jax.base import Array
from jaxrl.algos.collective import transformer
from jaxrl.algos.collective.transformer import Window
from jaxrl.common.types import Key
from jaxrl.rl import replay
from jaxrl.rl.data_parallel import DataParallel
from jaxrl.rl.replay import Replay

HELD_OUT = 5  # one in this many episodes is held out for validation


def row_shapes(
    observation: int, action: int, code: int
) -> tuple[dict[str, jax.ShapeDtypeStruct], dict[str, jax.ShapeDtypeStruct]]:
    """Return the shapes of a row of `Replay.observation` and of `Replay.action` (action, labels, code)."""

    def floats(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    whole = jax.ShapeDtypeStruct((), jnp.int32)
    action_row = dict.fromkeys(("action", "mu", "log_std"), floats(action)) | {"code": floats(code), "value": floats()}
    action_row |= {"step": whole, "held_out": jax.ShapeDtypeStruct((), jnp.bool_)}
    return {"observation": floats(observation), "task": whole}, action_row


def count_lengths(step: np.ndarray) -> np.ndarray:
    """Return the length of each episode, int[episodes], from the steps [N] of whole episodes."""
    return np.diff(np.flatnonzero(np.append(step, 0) == 0))


def to_dataset(
    recording: dict[str, Any], tasks: tuple[str, ...], rows: int, layout: DataParallel
) -> dict[str, np.ndarray]:
    """Deal the episodes of a dataset out to environments, one logical shard after another: arrays [rows + 1, B, ...].

    Each episode ends with the row of its last observation. Rows without an episode count as ends.
    """
    envs = layout.num_envs
    filled = np.zeros(layout.num_envs, int)
    turns = np.arange(envs).reshape(layout.shards, -1).T.ravel()  # first environments of all shards come first
    task_indices = np.array([tasks.index(name) for name in recording["task_names"]])[recording["task"]]
    names = ("observation", "action", "mu", "log_std", "value", "step")
    arrays = {name: np.zeros((rows + 1, envs, *recording[name].shape[1:]), recording[name].dtype) for name in names}
    arrays |= {name: np.zeros((rows + 1, envs), bool) for name in ("held_out", "terminated")}
    arrays |= {"task": np.zeros((rows + 1, envs), np.int32), "reward": np.zeros((rows + 1, envs), np.float32)}
    arrays["truncated"] = np.ones((rows + 1, envs), bool)
    counts = dict.fromkeys(range(len(tasks)), 0)
    begin = 0
    for length in count_lengths(recording["step"]):
        source = slice(begin, begin + length)
        env = int(turns[np.argmin(filled[turns])])
        task = int(task_indices[begin])
        place = slice(filled[env], filled[env] + length)
        end = filled[env] + length
        for name in names:
            arrays[name][place, env] = recording[name][source]
        arrays["observation"][end, env] = recording["next_observation"][begin + length - 1]
        arrays["reward"][place.start + 1 : end + 1, env] = recording["reward"][source]
        arrays["task"][place.start : end + 1, env] = task
        arrays["held_out"][place, env] = counts[task] % HELD_OUT == 0
        arrays["truncated"][place, env] = False
        arrays["terminated"][end, env] = recording["terminated"][begin + length - 1]
        counts[task], filled[env], begin = counts[task] + 1, end + 1, begin + length
    return arrays


def fill(buffer: Replay, arranged: dict[str, Array], layout: DataParallel) -> Replay:
    """Write the arrays of `to_dataset`, this device's part, into an empty dataset."""
    local = {name: jnp.take(rows, layout.env_indices(), axis=1) for name, rows in arranged.items()}
    action = {name: local[name][:-1] for name in ("action", "mu", "log_std", "value", "step", "held_out")}
    action["code"] = jnp.zeros((*action["step"].shape, buffer.action["code"].shape[-1]), jnp.float32)
    end = replay.ends(local["terminated"], local["truncated"])
    observation = {name: local[name] for name in buffer.observation}
    return replay.write(buffer, observation, action, local["reward"][..., None], end)


def find_usable(buffer: Replay) -> Array:
    """Return which rows do not end an episode and have their successor stored, bool[S, R, E]."""
    rows = buffer.end.shape[1]
    age = (buffer.head[:, None] - jnp.arange(rows, dtype=jnp.int32)[None]) % rows
    complete = (age >= 1) & (age <= buffer.filled[:, None])
    return complete[:, :, None] & (buffer.end == replay.CONTINUES)


def count_up(selected: Array) -> Array:
    """Return the cumulative number of selected rows, int32[S, R E], of bool[S, R, E]."""
    return jnp.cumsum(selected.reshape(len(selected), -1), axis=1, dtype=jnp.int32)


def draw(key: Key, counts: Array, batch_size: int, layout: DataParallel) -> tuple[Array, Array]:
    """Sample rows uniformly in each shard by counts (`count_up`) int32[S, R E]: index int32[S, m], weight [S, m].

    The weight is 0 where there is nothing to draw.
    """
    per_shard = batch_size // layout.shards

    def draw_in_shard(key: Key, counts: Array) -> tuple[Array, Array]:
        drawn = jax.random.randint(key, (per_shard,), 0, jnp.maximum(counts[-1], 1), jnp.int32)
        index = jnp.searchsorted(counts, drawn, side="right").astype(jnp.int32)
        return jnp.minimum(index, len(counts) - 1), jnp.full(per_shard, counts[-1] > 0, jnp.float32)

    return jax.vmap(draw_in_shard)(layout.shard_keys(key), counts)


def gather_windows(buffer: Replay, index: Array, states: Callable[[Array], Array], steps: int) -> Window:
    """Return the windows [S, m, ...] of `steps` steps ending at rows int32[S, m]; `states` [..., D] -> [..., s]."""

    def gather_shard(buffer: Replay, index: Array) -> Window:
        state = states(buffer.observation["observation"])
        stored = buffer.action
        return transformer.stored_windows(state, stored["action"], buffer.reward[..., 0], stored["step"], index, steps)

    return jax.vmap(gather_shard)(buffer, index)


def encode(
    buffer: Replay,
    rows: Array,
    codes: Callable[[Window], Array],
    states: Callable[[Array], Array],
    steps: int,
    layout: DataParallel,
) -> Replay:
    """Store the codes [m, c] of the windows [m, ...] that end at consecutive rows, int32[rows]."""
    shards, _, envs = buffer.end.shape

    def encode_row(row: Array) -> Array:
        index = jnp.broadcast_to(row * envs + jnp.arange(envs, dtype=jnp.int32)[None], (shards, envs))
        return layout.apply(codes, gather_windows(buffer, index, states, steps))

    new_codes = jax.lax.map(encode_row, rows).swapaxes(0, 1)
    stored = jax.lax.dynamic_update_slice_in_dim(buffer.action["code"], new_codes, rows[0], axis=1)
    return dataclasses.replace(buffer, action=buffer.action | {"code": stored})


def gather_samples(buffer: Replay, index: Array, states: Callable[[Array], Array]) -> dict[str, Array]:
    """Return labelled steps, leaves [S, m, ...], at rows int32[S, m]; `states` [..., D] -> [..., s]."""
    labels = {name: take_rows(buffer.action[name], index) for name in ("action", "mu", "log_std", "code", "value")}
    return labels | {"state": states(take_rows(buffer.observation["observation"], index))}


def take_rows(leaf: Array, index: Array) -> Array:
    """Return the rows [S, m, ...] of a leaf [S, R, E, ...] at index int32[S, m] into R E."""
    return jax.vmap(replay.rows_at)(leaf, index)
