"""Losses of the collective's networks, and the accuracy with which codes identify tasks.

Layout letters: N and M samples, n action dims, c code dims, C critics.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from envs_jax.base import Array
from jaxrl.algos.collective import transformer
from jaxrl.algos.collective.networks import Networks
from jaxrl.algos.collective.transformer import CodeBatch, Window
from jaxrl.common.shapes import Float32, assert_equal_shape, assert_rank, assert_shape
from jaxrl.common.types import Key, Params
from jaxrl.rl.data_parallel import DataParallel

Means = dict[str, Array]


def distillation_loss(
    mean: Float32[Array, "N n"],
    log_std: Float32[Array, "N n"],
    mu: Float32[Array, "N n"],
    expert_log_std: Float32[Array, "N n"],
    weight: Float32[Array, "N"],
) -> Float32[Array, ""]:
    """Return the distance of a squashed Gaussian from an expert's, mean over samples and action dims.

    (tanh(mean) - mu)^2 + 0.2 (log_std - expert_log_std)^2 * 2 / max(2, -expert_log_std): errors in log_std count less
    where the expert is nearly deterministic.

    mean, log_std: before squashing; mu: the expert's squashed mean.
    """
    assert_equal_shape([mean, log_std, mu, expert_log_std])
    assert_shape(weight, mean.shape[:-1])
    spread = 2.0 / jnp.maximum(2.0, -expert_log_std)
    error = jnp.square(jnp.tanh(mean) - mu) + 0.2 * spread * jnp.square(log_std - expert_log_std)
    return jnp.mean(weight[:, None] * error)


def actor_loss(networks: Networks, actor: Params, sample: dict[str, Array]) -> tuple[Array, Means]:
    """Return `distillation_loss` of labelled steps; sample: {"code", "state", "mu", "log_std", "weight"} [N, ...]."""
    mean, log_std = networks.gaussian(actor, sample["code"], sample["state"])
    return distillation_loss(mean, log_std, sample["mu"], sample["log_std"], sample["weight"]), {}


def critic_loss(networks: Networks, critic: Params, sample: dict[str, Array]) -> tuple[Array, Means]:
    """Return the sum over critics of the mean squared error of labelled steps.

    sample: {"code", "state", "action", "value", "weight"} [N, ...].
    """
    values = networks.values(critic, sample["code"], sample["state"], sample["action"])
    return jnp.sum(jnp.mean(sample["weight"][None] * jnp.square(values - sample["value"][None]), axis=1)), {}


@dataclasses.dataclass(frozen=True)
class EncoderLoss:
    """Reconstruction of two masked views of each window, plus InfoNCE between their codes.

    Attributes:
        networks: with the encoder.
        layout: gathers the views of all devices, and makes means over the samples of all of them.
        contrast_weight: weight of InfoNCE relative to the reconstruction.
        temperature: of InfoNCE.
    """

    networks: Networks
    layout: DataParallel
    contrast_weight: float
    temperature: float

    def __call__(self, encoder: Params, sample: dict[str, Any], training: bool = True) -> tuple[Array, Means]:
        """Return the loss of {"window", "task", "key", "weight"} [N, ...]; weight 0 marks an invalid window."""
        net = self.networks.encoder
        dropping = training and net.dropout > 0

        def view(key: Key, window: Window) -> tuple[Array, Window, Window]:
            key_mask, key_dropout = jax.random.split(key)
            hidden, masked = transformer.mask_tokens(key_mask, window)
            out: Any = net.apply(encoder, hidden, dropping, rngs={"dropout": key_dropout} if dropping else None)
            return *out, masked

        def masked_view(view_index: Array) -> tuple[Array, Array]:
            keys = jax.vmap(lambda key: jax.random.fold_in(key, view_index))(sample["key"])
            code, predicted, masked = jax.vmap(view)(keys, sample["window"])
            masked = jax.tree.map(lambda hit: hit & (sample["weight"] > 0)[:, None], masked)
            return code, transformer.reconstruction_loss(predicted, sample["window"], masked, self.layout.device_mean)

        codes, errors = jax.vmap(masked_view)(jnp.arange(2, dtype=jnp.int32))
        error = errors.sum()
        views = [CodeBatch(code, sample["task"], sample["weight"]) for code in codes]
        others = self.layout.all_gather(views[1])
        contrast = transformer.contrastive_loss(views[0], *others, self.temperature, self.layout.device_mean)
        return error + self.contrast_weight * contrast, {"reconstruction": error, "contrast": contrast}

    def check(self, encoder: Params, sample: dict[str, Any]) -> tuple[Array, Means]:
        """Return the loss without dropout, and the share of windows whose nearest neighbour has the same task.

        sample: as above, of held-out windows, and {"known", "known_task", "known_weight"}, as many of the others.
        """
        loss, means = self(encoder, sample, training=False)
        windows = jax.tree.map(lambda *x: jnp.concatenate(x), sample["known"], sample["window"])
        known, query = jnp.split(self.networks.codes(encoder, windows), 2)
        known_codes, _ = self.layout.all_gather(CodeBatch(known, sample["known_task"], sample["known_weight"]))
        query_codes = CodeBatch(query, sample["task"], sample["weight"])
        accuracy = neighbour_accuracy(known_codes, query_codes, self.layout.device_mean)
        return loss, means | {"code_accuracy": accuracy}


def neighbour_accuracy(
    known: CodeBatch, query: CodeBatch, device_mean: Callable[[Array], Array] = lambda x: x
) -> Float32[Array, ""]:
    """Return the share of query codes whose nearest known code (by cosine) has the same task.

    Codes with weight 0 are ignored; device_mean: see `transformer.weighted_mean`.
    """
    assert_rank([known.code, query.code], 2)
    unit_known, unit_query = (
        code * jax.lax.rsqrt(jnp.sum(code**2, -1, keepdims=True) + 1e-12) for code in (known.code, query.code)
    )
    nearest = jnp.argmax(jnp.where(known.weight > 0, unit_query @ unit_known.T, -jnp.inf), axis=-1)
    correct = (known.task[nearest] == query.task).astype(jnp.float32)
    return transformer.weighted_mean(correct, query.weight, device_mean)
