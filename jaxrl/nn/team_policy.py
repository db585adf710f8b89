"""The networks of a team: `TeamNetwork` applies them, with egocentric views, memory, messages or parameters by type.

Layout letters: N rows, T steps of a row, A agents of a row (1 where agents do not depend on each other), J agents that
send, F features, D steps that a message takes at most.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from envs_jax.base import Array, EnvSpec, TimeStep, pytree
from jaxrl.common.types import Params
from jaxrl.nn import networks
from jaxrl.nn.egocentric import Turn, reorder, turn_views
from jaxrl.nn.networks import MLP, ConvStack, Network
from jaxrl.nn.recurrent import Carry, Recurrent, zero_carry
from jaxrl.nn.teams import Communicating, deliver, map_agents

MESSAGES = "messages"  # the entry of a carry with those of the last D steps


@pytree
class Situation:
    """Inputs of a team's networks besides its observations; each is () where no network needs it."""

    first: Any  # bool[N, T], an episode begins; for carries
    ages: Any  # int32[N, T, A, J], see `message_ages`; for messages


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What standard networks are made of, from the settings of the same names."""

    hidden_size: int
    depth: int
    initializer: Any
    stride: int
    convolution: Any
    dtype: Any

    def make_network(self, outputs: int, shape: tuple[int, ...]) -> MLP | ConvStack:
        """Return a network for vectors or images of a shape; `convolution` "auto" selects by backend and hidden_size.

        Raises ValueError: there is no network for this shape.
        """
        if len(shape) not in (1, 3):
            raise ValueError(
                f"networks need vectors or images (H, W, C) as observations, not arrays of shape {shape}: reshape them "
                "in the environment"
            )
        if len(shape) == 1:
            return MLP(outputs, self.hidden_size, self.depth, self.initializer, self.dtype)
        smallest = 5 + (4 - 1) * self.stride  # leaves a pixel for the last convolution
        if self.stride > 1 and min(shape[:2]) < smallest:
            raise ValueError(
                f"stride {self.stride} needs images of at least {smallest} x {smallest} pixels, not {shape[0]} x "
                f"{shape[1]}: choose --stride 1"
            )
        if self.convolution == "auto":
            methods = networks.convolution_methods(self.hidden_size, jax.default_backend())
        else:
            methods = (self.convolution,) * 3
        sizes = outputs, self.hidden_size, self.depth, self.initializer
        return ConvStack(*sizes, methods, self.dtype, self.stride)


@dataclasses.dataclass(frozen=True, eq=False)
class TeamNetwork(Network):
    """A network that every agent of a team has, with parameters of its own or shared."""

    types: tuple[int, ...] | None = None  # which parameters each agent has, of leaves [members, ...]; None: all share
    turn: Turn | None = None  # see `egocentric`
    message_delay: int = 0  # D

    def apply_team(
        self, params: Params, views: Array, situation: Situation, carry: Carry | tuple[()]
    ) -> tuple[Array, Any]:
        """Return outputs float32[N, T, A, n] for views [N, T, A, ...], and the next carry.

        `carry` has leaves [N, A, ...]; a network without one returns it as it is.
        """
        lead = views.shape[:3]
        turned, action_indices = turn_views(self.turn, views.reshape(-1, *views.shape[3:]))
        outputs, carry = self._run(params, turned.reshape(*lead, *turned.shape[1:]), situation, carry)
        return reorder(outputs.reshape(-1, outputs.shape[-1]), action_indices).reshape(outputs.shape), carry

    def zero_carry(self, *batch: int) -> Any:
        """Return the carry at the start of an episode, leaves float32[*batch, ...], () for a network without one."""
        carry: Any = ()
        if memory := self._memory:
            carry = zero_carry(memory.memory, memory.size, memory.layers, batch)
        if not self._delays_messages:
            return carry
        sent = jnp.zeros((*batch, self.message_delay, self.module.encoder.hidden_size), jnp.float32)
        return (carry or {}) | {MESSAGES: sent}

    @property
    def _memory(self) -> Recurrent | None:
        module = self.module.core if isinstance(self.module, Communicating) else self.module
        return module if isinstance(module, Recurrent) else None

    @property
    def _delays_messages(self) -> bool:
        return isinstance(self.module, Communicating) and self.message_delay > 0

    def _run(self, params: Params, views: Array, situation: Situation, carry: Any) -> tuple[Array, Any]:
        """Return outputs of views as the network sees them, and the next carry."""
        if isinstance(self.module, Communicating):
            return self._exchange_messages(params, views, situation, carry)
        if isinstance(self.module, Recurrent):
            inputs: Any = (_by_agent(views), self._first_by_agent(views, situation), dict(carry) or None)
            outputs, carry = map_agents(lambda params, x: self.module.apply(params, *x), params, self.types, inputs)
            return _by_agent(outputs), carry
        rows = views.reshape(-1, *views.shape[2:])
        outputs = map_agents(self.module.apply, params, self.types, rows)
        return outputs.reshape(*views.shape[:3], -1), carry

    def _first_by_agent(self, views: Array, situation: Situation) -> Array | None:
        """Return where an episode begins for each agent, bool[N, A, T]; None without a memory."""
        if self._memory is None:
            return None
        return jnp.broadcast_to(situation.first[:, None], (views.shape[0], views.shape[2], views.shape[1]))

    def _exchange_messages(self, params: Params, views: Array, situation: Situation, carry: Any) -> tuple[Array, Any]:
        """Encode the views, deliver the messages that arrive, and decide."""
        rows, steps, agents = views.shape[:3]
        delay = self.message_delay

        def encode(params: Params, x: Array) -> Any:
            return self.module.apply(params, x, method="encode")

        def decide(params: Params, inputs: Any) -> Any:
            return self.module.apply(params, *inputs, method="decide")

        embedding = map_agents(encode, params, self.types, views.reshape(-1, *views.shape[2:]))
        embedding = embedding.reshape(rows, steps, agents, -1)
        sent = embedding.astype(jnp.float32)
        elapsed = jnp.zeros((rows, steps), jnp.int32)
        if delay:
            sent = jnp.concatenate([_by_agent(carry[MESSAGES]), sent], axis=1)
            begin = _episode_starts(situation.first, delay)
            elapsed = jnp.arange(steps, dtype=jnp.int32)[None] - begin
        messages = deliver(sent, situation.ages, elapsed)
        memory = {name: leaf for name, leaf in dict(carry).items() if name != MESSAGES} or None
        received = (_by_agent(x) for x in (embedding, messages, situation.ages >= 0))
        inputs = *received, self._first_by_agent(views, situation), memory
        outputs, next_carry = map_agents(decide, params, self.types, inputs)
        if delay:
            times = jnp.arange(steps - delay, steps, dtype=jnp.int32)
            this_episode = (times[None] >= begin[:, -1:])[..., None, None]
            next_carry |= {MESSAGES: _by_agent(jnp.where(this_episode, sent[:, steps:], 0.0))}
        return _by_agent(outputs), next_carry or carry


def _episode_starts(first: Array, delay: int) -> Array:
    """Return when the episode of each step began, int32[N, T], for first bool[N, T]; -delay - 1: before step 0."""
    begin = jnp.where(first, jnp.arange(first.shape[1], dtype=jnp.int32)[None], jnp.int32(-delay - 1))
    return begin if first.shape[1] == 1 else jax.lax.cummax(begin, axis=1)


def _by_agent(x: Array) -> Array:
    """[N, T, A, ...] -> [N, A, T, ...], or back."""
    return jnp.swapaxes(x, 1, 2)


def message_ages(spec: EnvSpec, timestep: TimeStep) -> Array:
    """Return `TimeStep.links` int32[..., A, A], never of an agent to itself, of time steps [...].

    Where the environment does not say who hears whom, all agents that are present hear each other at once.
    """
    shape = *timestep.first.shape, spec.num_agents, spec.num_agents
    ages = timestep.links if spec.links else jnp.zeros(shape, jnp.int32)
    silent = jnp.broadcast_to(np.eye(spec.num_agents, dtype=bool), shape)
    if spec.absent_agents and not spec.links:
        silent |= ~timestep.present[..., None, :]
    return jnp.where(silent, jnp.int32(-1), ages)
