"""Training of the collective's networks one after another, with validation on held-out rows."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from envs_jax.base import Array
from jaxrl.algos.base import Learner
from jaxrl.algos.collective import dataset
from jaxrl.algos.collective.losses import Means
from jaxrl.algos.collective.networks import Networks
from jaxrl.common.types import Key, Params
from jaxrl.rl.data_parallel import DataParallel
from jaxrl.rl.replay import Replay


@dataclasses.dataclass(frozen=True)
class Stage:
    """Training of one network.

    Attributes:
        name: of its phase: "transformer", "actor" or "critic".
        network: "encoder", "actor" or "critic", among `CollectiveParameters.learners`.
        loss: (its parameters, samples) -> loss, means.
        phases: those in which it is trained.
        updates: total over these phases.
        batch_size: samples per update.
        step: (learner, gradient) -> learner, gradient norm; see `Algorithm.step`.
        check: (its parameters, held-out samples) -> loss, means; None: only the loss is computed.
    """

    name: str
    network: str
    loss: Callable[[Any, Any], tuple[Array, Means]]
    phases: tuple[str, ...]
    updates: int
    batch_size: int
    step: Callable[[Learner, Params], tuple[Learner, Array]]
    check: Callable[[Any, Any], tuple[Array, Means]] | None = None

    def train(
        self, layout: DataParallel, learner: Learner, batch: Callable[[Array], Any], keys: Key
    ) -> tuple[Learner, Means]:
        """Take one optimizer step per key; return the learner and metrics float32[updates].

        batch: key -> samples [S local, m, ...].
        """

        def update(learner: Learner, key: Key) -> tuple[Learner, Means]:
            gradient, (value, means) = layout.gradient(self.loss, learner.params, batch(key))
            learner, norm = self.step(learner, gradient)
            return learner, {f"{self.network}_loss": value, f"{self.network}_grad_norm": norm, **means}

        return jax.lax.scan(update, learner, keys)


def fit(
    stage: Stage,
    layout: DataParallel,
    networks: Networks,
    learner: Learner,
    buffer: Replay,
    coded: Array,
    key: Key,
    updates: int,
) -> tuple[Learner, Means]:
    """Update actor or critics on labelled steps with a code; also return their error on held-out ones.

    coded: bool[1, R, 1], rows with a code.
    """
    usable, held_out = dataset.usable(buffer) & coded, buffer.action["held_out"]

    def batch(key: Key, counts: Array) -> dict[str, Array]:
        index, weight = dataset.draw(key, counts, stage.batch_size, layout)
        return dataset.samples(buffer, index, networks.states) | {"weight": weight}

    key_held_out, key = jax.random.split(key)
    training = dataset.count_up(usable & ~held_out)
    learner, metrics = stage.train(layout, learner, lambda key: batch(key, training), jax.random.split(key, updates))
    held_out_batch = batch(key_held_out, dataset.count_up(usable & held_out))
    _, (value, _) = layout.gradient(stage.loss, learner.params, held_out_batch)
    share = jnp.maximum(layout.sample_mean(held_out_batch["weight"]), 1e-6)  # 0 while nothing is held out yet
    return learner, metrics | {f"{stage.network}_held_out_loss": value / share}


def fit_encoder(
    stage: Stage,
    layout: DataParallel,
    networks: Networks,
    learner: Learner,
    buffer: Replay,
    key: Key,
    updates: int,
) -> tuple[Learner, Means]:
    """Update the transformer on full windows of training episodes; also return the stage's `check` of held-out ones."""
    assert stage.check is not None
    steps = networks.encoder.steps
    full, held_out = dataset.usable(buffer) & (buffer.action["step"] >= steps - 1), buffer.action["held_out"]
    training, checking = dataset.count_up(full & ~held_out), dataset.count_up(full & held_out)
    # InfoNCE compares the windows of a batch: all of them
    layout = dataclasses.replace(layout, learn_chunk=0)

    def batch(key: Key, counts: Array) -> dict[str, Any]:
        key_rows, key_noise = jax.random.split(key)
        index, weight = dataset.draw(key_rows, counts, stage.batch_size, layout)
        keys = jax.vmap(lambda k: jax.random.split(k, index.shape[1]))(layout.shard_keys(key_noise))
        window = dataset.windows(buffer, index, networks.states, steps)
        return {"window": window, "task": dataset.at(buffer.observation["task"], index), "key": keys, "weight": weight}

    key_known, key_held_out, key = jax.random.split(key, 3)
    learner, metrics = stage.train(layout, learner, lambda key: batch(key, training), jax.random.split(key, updates))
    known, queries = batch(key_known, training), batch(key_held_out, checking)
    known = {"known": known["window"], "known_task": known["task"], "known_weight": known["weight"]}
    _, (_, means) = layout.gradient(stage.check, learner.params, queries | known)
    return learner, metrics | {f"held_out_{name}": value for name, value in means.items()}
