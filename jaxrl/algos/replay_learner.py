"""Learning from a replay buffer: store what is played, sample batches, run updates on them in one scan."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from envs_jax.base import Array, TimeStep
from jaxrl.algos.base import Trajectory, appended
from jaxrl.common.types import Key
from jaxrl.rl import replay
from jaxrl.rl.data_parallel import DataParallel
from jaxrl.rl.replay import Replay

# (parameters, batch with leaves [S local, m, ...], update number uint32[]) -> parameters, metrics float32[] by name
Update = Callable[[Any, dict[str, Any], Array], tuple[Any, dict[str, Array]]]


class Entry(NamedTuple):
    """A part of what is stored of a step.

    Attributes:
        shape: ShapeDtypeStruct of one environment, or a pytree of them.
        of: what it is read from, with any leading axes -> its values.
    """

    shape: Any
    of: Callable[[Any], Any]


@dataclasses.dataclass(frozen=True)
class ReplayLearner:
    """A replay buffer and its use.

    Layout letters: T time, B environments, A agents, S logical shards, m samples of one shard.

    Attributes:
        layout: of the environments.
        num_agents: A.
        observation: {name: Entry} of time steps, agents first.
        action: Entry of trajectories, the action part.
        rows: R of each environment.
        batch_size: transitions per update, of all shards.
        n_step: n of the returns.
        noise: (key, m) -> random numbers [m, ...] of an update, its batch's "noise"; or None.
        windows: entries of the action part that batches hold for all n steps, [S, m, n, ...].
    """

    layout: DataParallel
    num_agents: int
    observation: dict[str, Entry]
    action: Entry
    rows: int
    batch_size: int
    n_step: int
    noise: Callable[[Key, int], Array | None]
    windows: tuple[str, ...] = ()

    @property
    def row_bytes(self) -> int:
        """Return the bytes of one row of one environment."""
        return replay.row_bytes(self._observation_shapes, self.action.shape, self.num_agents)

    @property
    def _observation_shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        return {name: entry.shape for name, entry in self.observation.items()}

    def init(self) -> Replay:
        """Return this device's part of an empty replay."""
        shards, envs = self.layout.local_shards, self.layout.num_envs // self.layout.shards
        return replay.create(self._observation_shapes, self.action.shape, self.num_agents, shards, self.rows, envs)

    def store(self, ring: Replay, trajectory: Trajectory, last: TimeStep) -> Replay:
        """Write rows [T + 1, B, ...]: the trajectory's, and the next time step, which has no action yet.

        Args:
            ring: donated by the caller.
            trajectory, last: of an iteration.
        """
        step = trajectory.timestep
        observations = {
            name: appended(entry.of(step).astype(entry.shape.dtype), entry.of(last))
            for name, entry in self.observation.items()
        }
        end = replay.ends(appended(step.terminated, last.terminated), appended(step.truncated, last.truncated))
        return replay.write(ring, observations, self.action.of(trajectory), appended(step.reward, last.reward), end)

    def run(self, update: Update, params: Any, ring: Replay, key: Key, numbers: Array) -> tuple[Any, dict[str, Array]]:
        """Run one update for each number uint32[updates]; return parameters and metrics float32[updates]."""
        keys = jax.vmap(lambda n: jax.random.split(jax.random.fold_in(key, n)))(
            jnp.arange(len(numbers), dtype=jnp.uint32)
        )
        # all batches are sampled at once: fewer, larger operations
        indices = jax.vmap(lambda pair: self.sample(ring, pair[0]))(keys)

        def run_update(params: Any, row: tuple[Array, Any, Array]) -> tuple[Any, dict[str, Array]]:
            (_, key_noise), (index, weight), number = row
            batch = self.gather(ring, index) | {"weight": weight}
            noise = jax.vmap(lambda k: self.noise(k, index.shape[1]))(self.layout.shard_keys(key_noise))
            if noise is not None:
                batch["noise"] = noise
            return update(params, batch, number)

        params, metrics = jax.lax.scan(run_update, params, (keys, indices, numbers))
        return params, metrics

    def sample(self, ring: Replay, key: Key) -> tuple[Array, Array]:
        """Sample first rows of windows in this device's shards, int32[S, m], with weights float32[S, m]."""
        number, n = self.batch_size // self.layout.shards, self.n_step
        uniform = lambda key, end, head, filled: replay.sample_uniform(key, end, head, filled, number, n)  # noqa: E731
        return jax.vmap(uniform)(self.layout.shard_keys(key), ring.end, ring.head, ring.filled)

    def gather(self, ring: Replay, index: Array) -> dict[str, Any]:
        """Return the batch that starts at int32[S, m], leaves [S, m, ...], without weights and noise."""
        sample = jax.vmap(lambda shard, index: replay.gather(shard, index, self.n_step))(ring, index)
        batch = {"action": sample.action, "reward": sample.reward, "end": sample.end, **sample.observation}
        batch |= {f"next_{name}": value for name, value in sample.next_observation.items()}
        window = jax.vmap(lambda rows, index: replay.gather_window(rows, index, self.n_step))
        return batch | {name: window(ring.action[name], index) for name in self.windows}
