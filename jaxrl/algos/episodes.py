"""Learning from whole episodes: how many a training step needs, and epochs over shuffled minibatches of them.

Layout letters: T time, B environments, A agents, S logical shards, m samples of a minibatch in one shard.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from envs_jax.base import Array, Discrete, EnvSpec
from envs_jax.progress import Progress
from jaxrl.algos.base import Learner, MemoryNeeds, Trajectory
from jaxrl.algos.team import TeamNetworks
from jaxrl.common.types import Key, Params
from jaxrl.nn.networks import activation_bytes
from jaxrl.runtime.data_parallel import DataParallel


def episodes_for(transitions: int, spec: EnvSpec) -> int:
    """Return the number of whole episodes with at least this many agent transitions (agents x steps each)."""
    return max(1, -(-transitions // (spec.num_agents * spec.horizon)))


# What minibatches of critic and actor have of the data.
CRITIC_DATA = ("critic_input", "action", "target", "weight")
ACTOR_DATA = ("observation", "action", "mask", "log_prob", "weight", "target")


# learner, minibatch, counters -> learner, metrics by name
Update = Callable[[Learner, dict[str, Array], Progress], tuple[Learner, dict[str, Array]]]


@dataclasses.dataclass(frozen=True)
class Minibatches:
    """The minibatches of a training step, and epochs over them.

    Attributes:
        spec, layout: of the environments, one episode of each.
        batch_transitions: agent transitions requested per training step.
        number: minibatches per epoch.
    """

    spec: EnvSpec
    layout: DataParallel
    batch_transitions: int
    number: int

    @property
    def samples(self) -> int:
        """Return the agent transitions of one logical shard."""
        return self.layout.num_envs // self.layout.shards * self.spec.horizon * self.spec.num_agents

    @property
    def size(self) -> int:
        """Return m; the remainder is dropped after shuffling.

        Rounding `batch_transitions` up to whole episodes leaves a remainder too; it grows with num_envs.
        """
        collected = episodes_for(self.batch_transitions, self.spec) * self.spec.horizon * self.spec.num_agents
        return self.samples * self.batch_transitions // collected // self.number

    def flatten(self, x: Array) -> Array:
        """[T, B local, A, ...] -> [S local, samples, ...]."""
        return self.layout.split(jnp.swapaxes(x, 0, 1)).reshape(self.layout.local_shards, -1, *x.shape[3:])

    def flat(self, **rows: Array) -> dict[str, Array]:
        """Return `flatten` of all of them."""
        return {name: self.flatten(x) for name, x in rows.items()}

    def unflatten(self, x: Array) -> Array:
        """Invert `flatten`."""
        sizes = self.layout.local_envs, self.spec.horizon, self.spec.num_agents
        return jnp.swapaxes(x.reshape(*sizes, *x.shape[2:]), 0, 1)

    def shuffled(self, key: Key) -> Array:
        """Return shuffled sample indices of every minibatch, int32[number, S local, m]."""
        order = jax.vmap(lambda k: jax.random.permutation(k, self.samples))(self.layout.shard_keys(key))
        return order[:, : self.size * self.number].reshape(-1, self.number, self.size).swapaxes(0, 1)

    def run(
        self,
        params: Any,
        data: dict[str, Array],
        key: Key,
        progress: Progress,
        begin: Callable[[Any], Any],
        critic_update: Update,
        values: Callable[[Params, Array], Array],
        actor_update: Update,
        epochs: int,
        actor_epochs: int,
    ) -> tuple[Any, dict[str, Array]]:
        """Run epochs: each trains the critic on all minibatches of one shuffle, then the actor on the same ones.

        Args:
            params: with Learners `critic` and `actor`.
            data: leaves [S local, samples, ...].
            key: of all shuffles.
            progress: counters.
            begin: parameters -> parameters, before each epoch.
            critic_update, actor_update: of one minibatch, with leaves [S local, m, ...].
            values: parameters of the critic, critic inputs -> their values, which the actor's minibatches also have.
            epochs: how many.
            actor_epochs: how many of them, the last ones, also train the actor; 0 = all.

        Returns:
            parameters, metrics float32[updates].
        """

        def epoch(params: Any, number: Array, train_actor: bool) -> tuple[Any, dict[str, Array]]:
            minibatches, params = self.shuffled(jax.random.fold_in(key, number)), begin(params)

            def critic_step(critic: Any, indices: Array) -> tuple[Any, Any]:
                batch = pick(data, indices, *CRITIC_DATA)
                critic, metrics = critic_update(critic, batch, progress)
                of_batch = lambda sample: values(critic.params, sample["critic_input"])  # noqa: E731
                return critic, (metrics, self.layout.apply(of_batch, batch) if train_actor else ())

            def actor_step(actor: Any, row: tuple[Array, Array]) -> tuple[Any, dict[str, Array]]:
                batch = pick(data, row[0], *ACTOR_DATA) | {"values": row[1]}
                return actor_update(actor, batch, progress)

            critic, (metrics, of_critic) = jax.lax.scan(critic_step, params.critic, minibatches)
            params = dataclasses.replace(params, critic=critic)
            if not train_actor:
                return params, metrics
            actor, of_actor = jax.lax.scan(actor_step, params.actor, (minibatches, of_critic))
            return dataclasses.replace(params, actor=actor), metrics | of_actor

        metrics: dict[str, list[Array]] = {}
        first = epochs - (actor_epochs or epochs)
        for numbers, train_actor in ((range(first), False), (range(first, epochs), True)):
            if numbers:
                of_numbers = functools.partial(epoch, train_actor=train_actor)
                params, found = jax.lax.scan(of_numbers, params, jnp.array(numbers))
                for name, value in found.items():
                    metrics.setdefault(name, []).append(value.reshape(-1))
        return params, {name: jnp.concatenate(parts) for name, parts in metrics.items()}

    def check(self, epochs: int, actor_epochs: int) -> None:
        """Raise ValueError where a minibatch would be empty, and for more epochs of the actor than there are."""
        if actor_epochs > epochs:
            raise ValueError(f"actor_epochs {actor_epochs} exceeds num_epochs {epochs}: lower it")
        if self.size < 1:
            raise ValueError(
                f"num_minibatches {self.number} exceeds the {self.samples} samples of a logical shard: lower it or "
                "raise num_envs"
            )

    def weights(self, trajectory: Trajectory) -> Array:
        """Return the weight float32[T, B, A] of each transition: 0 after an episode's end, with a mean of 1."""
        valid = jnp.broadcast_to(~trajectory.timestep.done[..., None], trajectory.action.shape).astype(jnp.float32)
        share = self.layout.sample_mean(self.flatten(valid))
        return valid / jnp.maximum(share, 1e-8)

    def deviation(self, values: Array, weight: Array) -> Array:
        """Return the standard deviation of values [S local, m] over the whole minibatch, for each of them."""
        mean = self.layout.sample_mean(weight * values)
        variance = self.layout.sample_mean(weight * jnp.square(values - mean))
        return jnp.full_like(values, jnp.maximum(jnp.sqrt(variance), 1e-6))

    def memory(self, nets: TeamNetworks) -> MemoryNeeds:
        """Count the critic inputs of all transitions, the shuffled copy of one minibatch, and a critic's gradient.

        (Activations, gradients and the patches of convolutions that are matrix products.)
        """
        samples, actions, shape = self.samples * self.layout.local_shards, self.spec.action, nets.critic.inputs[0][1:]
        assert isinstance(actions, Discrete)
        row = math.prod(shape) * 2 + 16 * actions.n
        return MemoryNeeds(
            largest_chunk=self.size,
            sample_bytes=activation_bytes(nets.standard(1, shape), shape),
            data_bytes=samples * row + samples // self.number * row,
        )

    def summary(self, passes: int) -> list[str]:
        """Return sentences for the user about sizes."""
        spec, episodes, usual = self.spec, self.layout.num_envs, episodes_for(self.batch_transitions, self.spec)
        lines = [
            f"A training step collects {episodes} episodes ({episodes * spec.horizon * spec.num_agents:,} agent "
            f"transitions) and trains for {passes} epochs of {self.number} minibatches of "
            f"{self.size * self.layout.shards:,} samples."
        ]
        if episodes != usual:
            lines.append(
                f"num_envs {episodes}, where batch_transitions {self.batch_transitions} asks for {usual} episodes per "
                f"training step: "
                f"minibatches have {episodes / usual:.3g} times as many samples, and the same number of episodes gives "
                f"{usual / episodes:.3g} times as many updates; more minibatches, higher learning rates and shorter "
                "schedules compensate."
            )
        return lines


def pick(data: dict[str, Array], indices: Array, *names: str) -> dict[str, Array]:
    """Select the samples int32[S, m] of data [S, samples, ...], by name."""
    take = jax.vmap(lambda rows, i: jnp.take(rows, i, axis=0, mode="clip"))
    return {name: take(data[name], indices) for name in names}
