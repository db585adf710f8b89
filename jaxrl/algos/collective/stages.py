"""Training of the collective's networks one after another, with validation on held-out rows."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from envs_jax.base import Array
from jaxrl.algos.collective import dataset
from jaxrl.algos.collective.losses import Means
from jaxrl.algos.collective.networks import Networks
from jaxrl.algos.collective.state import CollectiveParameters
from jaxrl.common.types import Key
from jaxrl.nn import optimizers
from jaxrl.rl.replay import Replay
from jaxrl.runtime.data_parallel import DataParallel


@dataclasses.dataclass(frozen=True)
class Stage:
    """Training settings of one network.

    Attributes:
        name: of its phase: "transformer", "actor" or "critic".
        network: "encoder", "actor" or "critic", as in `CollectiveParameters`.
        loss: (its parameters, samples) -> loss, means.
        phases: those in which it is trained.
        updates: total over these phases.
        learning_rate: initial.
        batch_size: samples per update.
        optimizer: with a learning rate of 1; its steps decay over `updates`.
    """

    name: str
    network: str
    loss: Callable[[Any, Any], tuple[Array, Means]]
    phases: tuple[str, ...]
    updates: int
    learning_rate: float
    batch_size: int
    optimizer: optax.GradientTransformation

    def train(
        self, layout: DataParallel, params: CollectiveParameters, batch: Callable[[Array], Any], keys: Key
    ) -> tuple[CollectiveParameters, Means]:
        """Take one optimizer step per key, on the network as a vector; return parameters and metrics float32[updates].

        batch: key -> samples [S local, m, ...].
        """
        network, opt_state = params.learner(self.network)

        def of_vector(vector: Array, sample: Any) -> tuple[Array, Means]:
            return self.loss(optimizers.unravel(vector, network), sample)

        def step(gradient: Array, vector: Array, opt_state: Any) -> Any:
            rate = jnp.float32(self.learning_rate)
            new = optimizers.apply_gradients(self.optimizer, gradient, vector, opt_state, rate)
            return *new, optimizers.norm(gradient)

        def update(carry: Any, key: Key) -> Any:
            vector, opt_state = carry
            gradient, (value, means) = layout.gradient(of_vector, vector, batch(key))
            vector, opt_state, norm = layout.deterministic(step)(gradient, vector, opt_state)
            return (vector, opt_state), {f"{self.network}_loss": value, f"{self.network}_grad_norm": norm, **means}

        carry = optimizers.ravel(network), opt_state
        (vector, opt_state), metrics = jax.lax.scan(update, carry, keys)
        return params.with_learner(self.network, optimizers.unravel(vector, network), opt_state), metrics


def with_linear_decay(
    optimizer: optax.GradientTransformation, final: float, updates: int
) -> optax.GradientTransformation:
    """Return an optimizer whose step size decays linearly to the fraction `final` over `updates` updates."""
    fall = optax.linear_schedule(1.0, final, max(updates, 1))
    return optax.chain(optimizer, optax.scale_by_schedule(fall))


def fit(
    stage: Stage,
    layout: DataParallel,
    networks: Networks,
    params: CollectiveParameters,
    ring: Replay,
    coded: Array,
    key: Key,
    updates: int,
) -> tuple[CollectiveParameters, Means]:
    """Update actor or critics on labelled steps with a code; also return their error on held-out ones.

    coded: bool[1, R, 1], rows with a code.
    """
    usable, held_out = dataset.usable(ring) & coded, ring.action["held_out"]

    def batch(key: Key, counts: Array) -> dict[str, Array]:
        index, weight = dataset.draw(key, counts, stage.batch_size, layout)
        return dataset.samples(ring, index, networks.states) | {"weight": weight}

    key_held_out, key = jax.random.split(key)
    training = dataset.count_up(usable & ~held_out)
    params, metrics = stage.train(layout, params, lambda key: batch(key, training), jax.random.split(key, updates))
    checked = batch(key_held_out, dataset.count_up(usable & held_out))
    _, (value, _) = layout.gradient(stage.loss, params.learner(stage.network)[0], checked)
    share = jnp.maximum(layout.sample_mean(checked["weight"]), 1e-6)  # 0 while nothing is held out yet
    return params, metrics | {f"{stage.network}_held_out_loss": value / share}


def fit_encoder(
    stage: Stage,
    layout: DataParallel,
    networks: Networks,
    params: CollectiveParameters,
    ring: Replay,
    check: Callable[[Any, Any], tuple[Array, Means]],
    key: Key,
    updates: int,
) -> tuple[CollectiveParameters, Means]:
    """Update the transformer on full windows of training episodes; also return `check` of held-out ones."""
    steps = networks.encoder.steps
    full, held_out = dataset.usable(ring) & (ring.action["step"] >= steps - 1), ring.action["held_out"]
    training, checking = dataset.count_up(full & ~held_out), dataset.count_up(full & held_out)
    # InfoNCE compares the windows of a batch: all of them (in exact mode those of a logical shard)
    layout = dataclasses.replace(layout, learn_chunk=0)

    def batch(key: Key, counts: Array) -> dict[str, Any]:
        key_rows, key_noise = jax.random.split(key)
        index, weight = dataset.draw(key_rows, counts, stage.batch_size, layout)
        keys = jax.vmap(lambda k: jax.random.split(k, index.shape[1]))(layout.shard_keys(key_noise))
        window = dataset.windows(ring, index, networks.states, steps)
        return {"window": window, "task": dataset.tasks_at(ring, index), "key": keys, "weight": weight}

    key_known, key_held_out, key = jax.random.split(key, 3)
    params, metrics = stage.train(layout, params, lambda key: batch(key, training), jax.random.split(key, updates))
    known, asked = batch(key_known, training), batch(key_held_out, checking)
    known = {"known": known["window"], "known_task": known["task"], "known_weight": known["weight"]}
    _, (_, means) = layout.gradient(check, params.encoder, asked | known)
    return params, metrics | {f"held_out_{name}": value for name, value in means.items()}
