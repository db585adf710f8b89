"""Losses of the collective's networks, and how well its codes tell tasks apart.

Layout letters: N and M samples, n numbers of an action, c of a code, C critics.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from envs_jax.base import Array
from jaxrl.algos.collective import transformer
from jaxrl.algos.collective.networks import Networks
from jaxrl.algos.collective.transformer import Views, Window

Means = dict[str, Array]


def distillation_loss(mean: Array, log_std: Array, mu: Array, expert_log_std: Array, weight: Array) -> Array:
    """How far a squashed Gaussian is from an expert's, mean over samples and numbers of an action, float32[].

    (tanh(mean) - mu)^2 + 0.2 (log_std - expert_log_std)^2 * 2 / max(2, -expert_log_std): deviations of experts that
    hardly deviate count less.

    mean, log_std: float32[N, n] before squashing; mu: float32[N, n], the expert's squashed mean; weight: float32[N].
    """
    spread = 2.0 / jnp.maximum(2.0, -expert_log_std)
    error = jnp.square(jnp.tanh(mean) - mu) + 0.2 * spread * jnp.square(log_std - expert_log_std)
    return jnp.mean(weight[:, None] * error)


def value_loss(values: Array, label: Array, weight: Array) -> Array:
    """Sum over critics of the mean squared error, float32[]; values float32[C, N], label and weight float32[N]."""
    return jnp.sum(jnp.mean(weight[None] * jnp.square(values - label[None]), axis=1))


def actor_loss(networks: Networks, actor: Any, sample: dict[str, Array]) -> tuple[Array, Means]:
    """`distillation_loss` of labelled steps; sample: {"code", "state", "mu", "log_std", "weight"} [N, ...]."""
    mean, log_std = networks.gaussian(actor, sample["code"], sample["state"])
    return distillation_loss(mean, log_std, sample["mu"], sample["log_std"], sample["weight"]), {}


def critic_loss(networks: Networks, critic: Any, sample: dict[str, Array]) -> tuple[Array, Means]:
    """`value_loss` of labelled steps; sample: {"code", "state", "action", "value", "weight"} [N, ...]."""
    values = networks.values(critic, sample["code"], sample["state"], sample["action"])
    return value_loss(values, sample["value"], sample["weight"]), {}


@dataclasses.dataclass(frozen=True)
class EncoderLoss:
    """Reconstruction of two masked views of each window, and InfoNCE between their codes.

    Attributes:
        networks: whose encoder it is.
        together: views of all devices, and where these ones begin among them, see `DataParallel.together`.
        contrast_weight: of InfoNCE beside the reconstruction.
        temperature: of InfoNCE.
    """

    networks: Networks
    all_gather: Callable[[Views], tuple[Views, Array | int]]
    contrast_weight: float
    temperature: float

    def __call__(self, encoder: Any, sample: dict[str, Any], training: bool = True) -> tuple[Array, Means]:
        """Of sample {"window", "task", "key", "weight"} [N, ...]; a weight of 0 stands for no window at all."""
        net = self.networks.encoder
        dropping = training and net.dropout > 0

        def view(key: Array, window: Window) -> tuple[Array, Window, Window]:
            key_mask, key_dropout = jax.random.split(key)
            hidden, masked = transformer.mask_tokens(key_mask, window)
            out: Any = net.apply(encoder, hidden, dropping, rngs={"dropout": key_dropout} if dropping else None)
            return *out, masked

        def masked_view(number: Array) -> tuple[Array, Array]:
            keys = jax.vmap(lambda key: jax.random.fold_in(key, number))(sample["key"])
            code, predicted, masked = jax.vmap(view)(keys, sample["window"])
            masked = jax.tree.map(lambda hit: hit & (sample["weight"] > 0)[:, None], masked)
            return code, transformer.reconstruction_loss(predicted, sample["window"], masked)

        codes, errors = jax.vmap(masked_view)(jnp.arange(2))
        error = errors.sum()
        views = [Views(code, sample["task"], sample["weight"]) for code in codes]
        contrast = transformer.contrastive_loss(views[0], *self.all_gather(views[1]), self.temperature)
        return error + self.contrast_weight * contrast, {"reconstruction": error, "contrast": contrast}

    def check(self, encoder: Any, sample: dict[str, Any]) -> tuple[Array, Means]:
        """The same without dropout, and how often a window's nearest neighbour is of its task.

        sample: as above, of held-out windows, and {"known", "known_task", "known_weight"}, as many of the others.
        """
        loss, means = self(encoder, sample, training=False)
        windows = jax.tree.map(lambda *x: jnp.concatenate(x), sample["known"], sample["window"])
        known, asked = jnp.split(self.networks.codes(encoder, windows), 2)
        accuracy = neighbour_accuracy(
            known, sample["known_task"], asked, sample["task"], sample["known_weight"], sample["weight"]
        )
        return loss, means | {"code_accuracy": accuracy}


def neighbour_accuracy(
    known: Array, known_task: Array, asked: Array, task: Array, known_weight: Array, weight: Array
) -> Array:
    """Share of codes float32[N, c] whose nearest known code float32[M, c] (by cosine) is of their task int32[N].

    Codes with a weight of 0 stand for nothing.
    """
    known, asked = (code * jax.lax.rsqrt(jnp.sum(code**2, -1, keepdims=True) + 1e-12) for code in (known, asked))
    nearest = jnp.argmax(jnp.where(known_weight > 0, asked @ known.T, -jnp.inf), axis=-1)
    correct = (known_task[nearest] == task).astype(jnp.float32)
    return jnp.sum(weight * correct) / jnp.maximum(weight.sum(), 1.0)
