"""Task codes from the last steps: a transformer over a window of a trajectory, its losses, running windows.

It is trained without action labels: to reconstruct masked tokens (as BERT does, Devlin et al. 2019, arXiv 1810.04805),
and to give two masked views of one window codes that are closer than those of windows of other tasks (InfoNCE, van den
Oord et al. 2018, arXiv 1807.03748). Sizes and training are taken from the published collective-learning pipeline
(argator18/A-transformer-based-collective-learning-framework-for-scalable-knowledge-accumulation-and-transfer).

Layout letters: T steps of a window, s state dims, a action dims, c code dims, N windows.
"""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from envs_jax.base import Array, pytree
from jaxrl.common.types import Key
from jaxrl.nn.networks import torch_uniform
from jaxrl.rl.replay import rows_at

MIN_WEIGHT = 1e-6  # all samples together; below it there are none
# Probability that a token is masked; shares of the masked tokens that become random numbers, and that do not change.
MASK_RATE = 0.15
RANDOM_SHARE = 0.1
UNCHANGED_SHARE = 0.1


@pytree
class Window:
    """The last T steps, or a scalar per token; any leading axes."""

    state: Array  # float32[..., T, s], oldest first; the last one is the current state
    action: Array  # float32[..., T - 1, a], taken in all states but the last
    reward: Array  # float32[..., T - 1, 1], of these actions


# Losses


def weighted_mean(values: Array, weight: Array, device_mean: Callable[[Array], Array]) -> Array:
    """Return the sum of weighted values over the sum of weights, float32[]; 0 where all weights are 0.

    Its mean over devices is the mean over all devices' samples, see `DataParallel.device_mean`.
    """
    return jnp.sum(weight * values) / jnp.maximum(device_mean(weight.sum()), MIN_WEIGHT)


def reconstruction_loss(
    predicted: Window, target: Window, masked: Window, device_mean: Callable[[Array], Array] = lambda x: x
) -> Array:
    """Sum over states, actions and rewards of the mean squared error of all masked tokens, float32[].

    predicted, target: leaves [N, tokens, numbers]; masked: leaves bool[N, tokens]; device_mean: see `weighted_mean`.
    """

    def error(predicted: Array, target: Array, masked: Array) -> Array:
        return weighted_mean(jnp.square(predicted - target).mean(-1), masked.astype(jnp.float32), device_mean)

    return jnp.sum(jnp.stack(jax.tree.leaves(jax.tree.map(error, predicted, target, masked))))


@pytree
class CodeBatch:
    """Codes of N windows: code float32[N, c], task int32[N], weight float32[N] (0 for an invalid window, else 1)."""

    code: Array
    task: Array
    weight: Array


def _unit(code: Array) -> Array:
    return code * jax.lax.rsqrt(jnp.sum(code**2, -1, keepdims=True) + 1e-12)


def contrastive_loss(
    first: CodeBatch,
    second: CodeBatch,
    begin: Array | int = 0,
    temperature: float = 0.15,
    device_mean: Callable[[Array], Array] = lambda x: x,
) -> Array:
    """Cross entropy of matching each first view with its second view, among windows of other tasks, float32[].

    `first` has one view of n windows, `second` another view of N windows, those of `first` from `begin` on; windows of
    the same task are not negatives. Codes need not be normalised; device_mean: see `weighted_mean`. This is equation 4
    of van den Oord et al. 2018, arXiv 1807.03748, with the other view of the same window as the positive.
    """
    logits = _unit(first.code) @ _unit(second.code).T / temperature
    first_index, second_index = (jnp.arange(len(part.task), dtype=jnp.int32) for part in (first, second))
    same_window = begin + first_index[:, None] == second_index[None]
    no_negative = (first.task[:, None] == second.task[None, :]) | (second.weight[None, :] == 0)
    positive = jnp.sum(jnp.where(same_window, logits, 0.0), axis=-1)
    errors = jax.nn.logsumexp(jnp.where(no_negative & ~same_window, -jnp.inf, logits), axis=-1) - positive
    return weighted_mean(errors, first.weight, device_mean)


def neighbour_accuracy(
    known: CodeBatch, query: CodeBatch, device_mean: Callable[[Array], Array] = lambda x: x
) -> Array:
    """Return the share of query codes whose nearest known code (by cosine) has the same task, float32[].

    Codes with weight 0 are ignored; device_mean: see `weighted_mean`.
    """
    unit_known, unit_query = _unit(known.code), _unit(query.code)
    nearest = jnp.argmax(jnp.where(known.weight > 0, unit_query @ unit_known.T, -jnp.inf), axis=-1)
    correct = (known.task[nearest] == query.task).astype(jnp.float32)
    return weighted_mean(correct, query.weight, device_mean)


def mask_tokens(key: Key, window: Window) -> tuple[Window, Window]:
    """Return a view of ONE window with some tokens masked, and which ones (leaves bool[tokens]).

    If no token of a kind is drawn, its last one is masked. Masked tokens become uniform numbers in [0, 1), stay as they
    are, or become zeros.
    """
    leaves, structure = jax.tree.flatten(window)
    widths = [2 + rows.shape[1] for rows in leaves]  # random numbers per token: mask, kind of mask, replacement
    sizes = [len(rows) * width for rows, width in zip(leaves, widths, strict=True)]
    draws = jax.lax.split(jax.random.uniform(key, (sum(sizes),), jnp.float32), sizes)  # one large draw is faster

    def hide(rows: Array, draw: Array) -> tuple[Array, Array]:
        hit = draw[:, 0] < MASK_RATE
        kind = draw[:, 1:2]
        numbers = draw[:, 2:]
        hit = hit.at[-1].set(hit[-1] | ~jnp.any(hit))
        new = jnp.where(kind < RANDOM_SHARE, numbers, jnp.where(kind < RANDOM_SHARE + UNCHANGED_SHARE, rows, 0.0))
        return jnp.where(hit[:, None], new, rows), hit

    pairs = [hide(rows, draw.reshape(len(rows), -1)) for rows, draw in zip(leaves, draws, strict=True)]
    view, hits = (jax.tree.unflatten(structure, parts) for parts in zip(*pairs, strict=True))
    return view, hits


# Running windows


def first_window(state: Array, actions: int, steps: int) -> Window:
    """Return the window at an episode's first state float32[B, s]: that state throughout, zero actions and rewards."""
    past = (len(state), steps - 1)
    return Window(
        state=jnp.repeat(state[:, None], steps, axis=1),
        action=jnp.zeros((*past, actions), jnp.float32),
        reward=jnp.zeros((*past, 1), jnp.float32),
    )


def next_window(window: Window, state: Array, action: Array, reward: Array, first: Array) -> Window:
    """Return the window [B, ...] one step later, with the current state float32[B, s].

    The action float32[B, a] was taken in the previous state, the reward float32[B] is its; where `first` bool[B] an
    episode starts with the state.
    """

    def push(rows: Array, row: Array) -> Array:
        return jnp.concatenate([rows[:, 1:], row[:, None]], axis=1)

    fresh = first_window(state, action.shape[-1], window.state.shape[1])
    later = Window(push(window.state, state), push(window.action, action), push(window.reward, reward[:, None]))
    return jax.tree.map(lambda new, old: jnp.where(first[:, None, None], new, old), fresh, later)


def stored_windows(state: Array, action: Array, reward: Array, step: Array, index: Array, steps: int) -> Window:
    """Return the windows [m, ...] that end at rows of a dataset, equal to those of `next_window` during the rollout.

    Args:
        state: float32[R, E, s], consecutive rows of E environments.
        action: float32[R, E, a], taken in each state.
        reward: float32[R, E], received with each state, for the action of the previous row.
        step: int32[R, E], steps of the episode before each row, all of which are stored.
        index: int32[m] into rows times environments.
        steps: T.
    """
    envs = step.shape[1]
    back = jnp.arange(steps - 1, -1, -1, dtype=jnp.int32)[None]  # steps from a token to the current one
    steps_before = rows_at(step, index)[:, None]
    window_index = index[:, None] - envs * jnp.minimum(back, steps_before)
    past = (back <= steps_before)[:, :-1, None]
    return Window(
        state=rows_at(state, window_index),
        action=jnp.where(past, rows_at(action, window_index[:, :-1]), 0.0),
        reward=jnp.where(past, rows_at(reward, window_index[:, :-1] + envs)[..., None], 0.0),
    )


# The network


class TrajectoryTransformer(nn.Module):
    """ONE window -> its task code float32[c] and reconstructed tokens: post-norm encoder layers without a mask.

    Every kind of token has its own linear map and layer norm; a learned vector per time step is added to all three
    kinds. A learned token without a time step becomes the code. (Without a mask and with times added, the
    order of tokens does not matter: the kinds are concatenated.)
    """

    states: int
    actions: int
    code: int = 6
    steps: int = 20
    embedding_size: int = 32
    feedforward_size: int = 128
    num_heads: int = 8
    num_layers: int = 3
    dropout: float = 0.1
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, window: Window, training: bool = False) -> tuple[Array, Window]:
        """Apply the network; `training` turns dropout on, with the stream "dropout"."""
        times = self.param("times", nn.initializers.zeros, (self.steps, self.embedding_size), jnp.float32)

        def tokens(name: str, rows: Array) -> Array:
            embedded = _Linear(self.embedding_size, self.dtype, name=f"{name}_in")(rows)
            return _norm(f"{name}_norm")(embedded) + times[: len(rows)]

        kinds = [(name, tokens(name, getattr(window, name))) for name in ("state", "action", "reward")]
        drop = nn.Dropout(self.dropout, deterministic=not training)
        first = self.param("code_token", nn.initializers.constant(-2.0), (1, self.embedding_size), jnp.float32)
        x = jnp.concatenate([drop(jnp.concatenate([rows for _, rows in kinds])), first])
        sizes = self.embedding_size, self.feedforward_size, self.num_heads
        for layer in range(self.num_layers):
            x = _EncoderLayer(*sizes, self.dropout, self.dtype, name=f"layer{layer + 1}")(x, training)
        outputs = []
        begin = 0
        for (name, rows), size in zip(kinds, (self.states, self.actions, 1), strict=True):
            outputs.append(_Linear(size, self.dtype, name=f"{name}_out")(x[begin : begin + len(rows)]))
            begin += len(rows)
        code = _Linear(self.code, self.dtype, name="code_out")(x[-1])
        return code, Window(*outputs)


class _EncoderLayer(nn.Module):
    """Attention, then dense layers, each added to its input and normalised (Vaswani et al. 2017, arXiv 1706.03762)."""

    embedding_size: int
    feedforward_size: int
    num_heads: int
    dropout: float
    dtype: Any

    @nn.compact
    def __call__(self, x: Array, training: bool) -> Array:
        """float32[tokens, width] -> float32[tokens, width]."""
        drop = nn.Dropout(self.dropout, deterministic=not training)
        x = _norm("attention_norm")(x + drop(self._attention(x, drop)))
        inner = drop(nn.relu(_Linear(self.feedforward_size, self.dtype, name="fc1")(x)))
        return _norm("dense_norm")(x + drop(_Linear(self.embedding_size, self.dtype, name="fc2")(inner)))

    def _attention(self, x: Array, drop: Any) -> Array:
        heads = (len(x), self.num_heads, self.embedding_size // self.num_heads)
        xavier = nn.initializers.xavier_uniform()
        torch = torch_uniform(self.embedding_size)
        mixed = nn.Dense(3 * self.embedding_size, dtype=self.dtype, kernel_init=xavier, name="qkv")(x)
        query, key, value = (part.reshape(heads) for part in jnp.split(mixed, 3, axis=-1))
        scores = jnp.einsum("ihd,jhd->hij", query, key).astype(jnp.float32) / heads[-1] ** 0.5
        shares = drop(nn.softmax(scores)).astype(self.dtype)
        seen = jnp.einsum("hij,jhd->ihd", shares, value).reshape(x.shape)
        out = nn.Dense(self.embedding_size, dtype=self.dtype, kernel_init=torch, name="out")(seen)
        return out.astype(jnp.float32)


class _Linear(nn.Module):
    """A dense layer in the compute dtype with PyTorch's initialisation and float32 outputs."""

    outputs: int
    dtype: Any

    @nn.compact
    def __call__(self, x: Array) -> Array:
        init = torch_uniform(x.shape[-1])
        dense = nn.Dense(self.outputs, dtype=self.dtype, kernel_init=init, bias_init=init, name="dense")
        return dense(x).astype(jnp.float32)


def _norm(name: str) -> nn.Module:
    return nn.LayerNorm(epsilon=1e-5, dtype=jnp.float32, name=name)
