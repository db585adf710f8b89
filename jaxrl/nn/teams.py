"""Networks of the agents of a team: attention over the messages of others, and parameters for each type of agent.

Layout letters: N teams, T steps, A agents, J agents that send, F features.
"""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from envs_jax.base import Array
from jaxrl.common.types import Params
from jaxrl.nn.networks import Initialisation, linear
from jaxrl.nn.recurrent import Carry, Recurrent

UNHEARD = -1e30  # a score


class Attention(nn.Module):
    """One agent's attention over the messages that it hears (Vaswani et al. 2017, arXiv 1706.03762, equation 1).

    With its embedding e and messages m_j, heads of F / heads features, and weights a_j = softmax_j(q(e) k(m_j) / sqrt(F
    / heads)) over the agents that it hears, the result is relu(e + o(sum_j a_j v(m_j))); q, k, v and o are linear. The
    sum is 0 where it hears nobody. The order of the agents has no effect.
    """

    heads: int
    initializer: Initialisation = "orthogonal"
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, embedding: Array, messages: Array, heard: Array) -> Array:
        """Return float32[N, F] of an embedding [N, F], messages [N, J, F] and heard bool[N, J]."""
        features = embedding.shape[-1]

        def project(name: str, x: Array) -> Array:  # [N, ..., F] -> float32[N, ..., heads, F / heads]
            rows = linear(self, name, x.astype(self.dtype), features, self.initializer)
            return rows.reshape(*x.shape[:-1], self.heads, features // self.heads)

        query, key, value = project("query", embedding), project("key", messages), project("value", messages)
        scores = jnp.sum(query[:, None] * key, axis=-1) * jnp.float32((features // self.heads) ** -0.5)
        scores = jnp.where(heard[..., None], scores, UNHEARD)
        largest = jax.lax.stop_gradient(jnp.max(scores, axis=1, keepdims=True))
        shares = jnp.where(heard[..., None], jnp.exp(scores - largest), 0.0)
        shares = shares / jnp.maximum(jnp.sum(shares, axis=1, keepdims=True), 1e-8)
        sum_ = jnp.sum(shares[..., None] * value, axis=1).reshape(-1, features)
        # small at the start, so that learning begins as without messages
        received = linear(self, "out", sum_.astype(self.dtype), features, self.initializer, last=True)
        return nn.relu(embedding.astype(jnp.float32) + received)


class Communicating(nn.Module):
    """One agent that sends its embedding to others, and then attends to theirs: one exchange per step."""

    encoder: nn.Module  # [N, ...] -> [N, F], the message
    core: nn.Module  # [N, F] -> float32[N, outputs], or a `Recurrent` without an encoder
    # heads, layers: of the attention; each layer refines the agent's embedding with the same messages
    heads: int
    layers: int
    initializer: Initialisation = "orthogonal"
    dtype: Any = jnp.float32

    def setup(self) -> None:
        self.attention = [Attention(self.heads, self.initializer, self.dtype) for _ in range(self.layers)]

    def __call__(self, x: Array) -> tuple[Array, Carry]:
        """Return `decide` of inputs [N, T, ...] where nobody is heard, which makes all parameters."""
        embedding = self.encode(x.reshape(-1, *x.shape[2:])).reshape(*x.shape[:2], -1)
        return self.decide(embedding, embedding[:, :, None], jnp.zeros((*x.shape[:2], 1), bool))

    def encode(self, x: Array) -> Array:
        """Return messages [N, F] of inputs [N, ...]."""
        return self.encoder(x)

    def decide(
        self, embedding: Array, messages: Array, heard: Array, first: Array | None = None, carry: Carry | None = None
    ) -> tuple[Array, Carry]:
        """Return outputs float32[N, T, outputs] of an agent, and its next carry.

        Args:
            embedding: its own, [N, T, F].
            messages: of all agents, [N, T, J, F].
            heard: bool[N, T, J], the messages that reach it.
            first, carry: of its memory, see `Recurrent`.
        """
        lead = embedding.shape[:2]
        rows, messages, heard = (x.reshape(-1, *x.shape[2:]) for x in (embedding, messages, heard))
        for layer in self.attention:
            rows = layer(rows, messages, heard)
        if isinstance(self.core, Recurrent):
            return self.core(rows.reshape(*lead, -1), first, carry)
        return self.core(rows).reshape(*lead, -1), {}


def map_agents(
    function: Callable[[Params, Any], Any], params: Params, types: tuple[int, ...] | None, inputs: Any
) -> Any:
    """Return function(params, leaves [N, ...]) of each agent, leaves [N, A, ...], for inputs with leaves [N, A, ...].

    `types` says which parameters each agent has, of leaves [G, ...]; None: all have the same, without that axis.
    """
    if types is not None:
        by_agent = jax.tree.map(lambda leaf: leaf[np.array(types)], params)
        return jax.vmap(function, in_axes=(0, 1), out_axes=1)(by_agent, inputs)
    lead = jax.tree.leaves(inputs)[0].shape[:2]
    outputs = function(params, jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), inputs))
    return jax.tree.map(lambda x: x.reshape(*lead, *x.shape[1:]), outputs)


def deliver(sent: Array, ages: Array, elapsed: Array) -> Array:
    """Return the messages [N, T, A, J, F] that reach each agent; what is there where none does has no meaning.

    Args:
        sent: [N, D + T, J, F], messages of D steps before the first one, and of the T steps.
        ages: int32[N, T, A, J], how many steps ago, at most D; -1: nothing arrives.
        elapsed: int32[N, T], steps of the episode before this one; nothing arrives from another episode.
    """
    steps = ages.shape[1]
    longest = sent.shape[1] - steps

    def sent_before(age: int) -> Array:
        return sent[:, longest - age : longest - age + steps, None]

    if not longest:
        return jnp.broadcast_to(sent_before(0), (*ages.shape, sent.shape[-1]))
    messages = jnp.zeros((*ages.shape, sent.shape[-1]), sent.dtype)
    for age in range(longest + 1):
        arrives = (ages == age) & (elapsed >= age)[..., None, None]
        messages = jnp.where(arrives[..., None], sent_before(age), messages)
    return messages
