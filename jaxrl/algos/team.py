"""Policies of PPO and COMA with more than a network: a memory, messages to others, parameters by type.

Layout letters: N teams, T steps, A agents, J agents that send, F features, D steps that a message takes at most, B
environments.
"""

import dataclasses
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np

from envs_jax.base import Array, EnvSpec, TimeStep, pytree
from jaxrl.algos import on_policy
from jaxrl.algos.base import Algorithm, setting
from jaxrl.common.types import Params, PolicyParams
from jaxrl.nn.networks import MLP, GaussianOutputs, Network
from jaxrl.nn.recurrent import Carry, Recurrent, zero_carry
from jaxrl.nn.teams import Communicating, deliver, map_agents

MESSAGES = "messages"  # of the last D steps, in a carry
NOT_SAMPLES = ("situation", "carry", "critic_carry")  # of rows
FEATURES = {  # {setting that turns a feature on: (its value while off, settings that need the feature)}
    "memory": ("none", ("memory_size", "memory_layers")),
    "message_passing": ("none", ("message_heads", "message_layers")),
    "risk_level": (1.0, ("risk_quantiles",)),
}


@pytree
class Situation:
    """Inputs of a team's networks besides its observations."""

    first: Array  # bool[N, T], an episode begins
    ages: Any  # int32[N, T, A, J], see `message_ages`; () without messages


@dataclasses.dataclass(frozen=True)
class TeamAlgorithm(Algorithm):
    """Base class of algorithms with these settings."""

    hidden_size: int = setting(128, "channels of the convolutions and units of the dense layers", between=(1, 2**14))
    depth: int = setting(2, "number of hidden dense layers; images pass convolutions first", between=(0, 100))
    initializer: Any = "orthogonal"
    stride: int = setting(
        1, "stride of the first convolution, pixels; 2 takes a fifth of the arithmetic", between=(1, 100)
    )
    convolution: Literal["auto", "conv", "dense", "patches"] = setting(
        "auto", "how convolutions are computed; auto = the fastest way on the backend"
    )
    memory: Literal["none", "gru", "lstm"] = setting(
        "none", "gru, lstm: actors, and critics of ppo, remember earlier steps of the episode; learning goes back to "
        "the start of the rollout, and minibatches hold whole rollouts of environments"
    )  # fmt: skip
    memory_size: int = setting(128, "units of each layer of the memory", between=(1, 2**14))
    memory_layers: int = setting(1, "layers of the memory", between=(1, 100))
    message_passing: Literal["none", "attention"] = setting(
        "none", "attention: each step, an agent's actor attends to what the agents that it hears send"
    )
    message_heads: int = setting(4, "heads of the attention", between=(1, 1000))
    message_layers: int = setting(2, "layers of the attention, of one exchange", between=(1, 100))
    share_parameters: bool = setting(True, "one network for all agents; false: one for each agent, or type of agent")

    compatible_settings: ClassVar[tuple[str, ...]] = ("memory", "message_passing", "message_heads", "share_parameters")
    memory_parts: ClassVar[tuple[str, ...]] = ("actor",)  # that have the memory, if there is one

    def __post_init__(self) -> None:
        super().__post_init__()
        for part in self.custom.networks:
            if self.has_layers(part):
                kind = "memory" if self.has_memory else "message_passing"
                raise ValueError(f"{part} of your own has no {kind}: use {kind} none, or leave it out of networks")
        if not self.passes_messages:
            return
        if self.spec.num_agents == 1:
            raise ValueError(
                f"message_passing is for teams, and '{self.spec.name}' has one agent: use --message_passing none"
            )
        if self.hidden_size % self.message_heads:
            raise ValueError(
                f"message_heads {self.message_heads} does not divide hidden_size {self.hidden_size}, the numbers of a "
                "message: change one of them"
            )
        if not self.depth:
            raise ValueError("messages are what the last hidden layer computes: use --depth 1 or more")

    def warnings(self, total_env_steps: int) -> list[str]:
        del total_env_steps
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        return [
            f"{name} {getattr(self, name)} has no effect without {feature}: set --{feature} too"
            for feature, (off, names) in FEATURES.items()
            if getattr(self, feature, None) == off
            for name in names
            if getattr(self, name) != defaults[name]
        ]

    @classmethod
    def keeps_rollouts(cls, spec: EnvSpec, settings: dict[str, Any]) -> bool:
        """Return whether minibatches hold whole rollouts, see `recurrent`."""
        delayed = settings.get("message_passing", "none") != "none" and spec.max_link_age > 0
        return settings.get("memory", "none") != "none" or delayed

    @property
    def has_memory(self) -> bool:
        return self.memory != "none"

    @property
    def passes_messages(self) -> bool:
        return self.message_passing != "none"

    def has_layers(self, part: str) -> bool:
        """Return whether a part's network has more than the standard one, in `make_team_network`."""
        return (self.has_memory and part in self.memory_parts) or (self.passes_messages and part == "actor")

    @property
    def recurrent(self) -> bool:
        """Return whether acting needs a carry: a memory, or messages that are under way."""
        return self.has_memory or self.message_delay > 0

    @property
    def message_delay(self) -> int:
        return self.spec.max_link_age if self.passes_messages else 0

    @property
    def types(self) -> tuple[int, ...] | None:
        """Return which parameters each agent has, None where all share them."""
        if self.share_parameters or self.spec.num_agents == 1:
            return None
        return self.spec.agent_types or tuple(range(self.spec.num_agents))

    @property
    def learns_by_team(self) -> bool:
        """Return whether minibatches keep the agents of a team together, see `segments`."""
        return self.recurrent or self.passes_messages or self.types is not None

    def situation(self, timestep: TimeStep) -> Situation:
        """Return the situation of time steps [N, T, ...]."""
        return Situation(timestep.first, message_ages(self.spec, timestep) if self.passes_messages else ())

    def zero_carry(self, part: str, *batch: int) -> Any:
        """Return the empty carry of a network, leaves float32[*batch, ...], () without one."""
        carry = zero_carry(self.memory, self.memory_size, self.memory_layers, batch)
        if part == "critic" or not self.message_delay:
            return carry
        sent = jnp.zeros((*batch, self.message_delay, self.hidden_size), jnp.float32)
        return (carry or {}) | {MESSAGES: sent}

    def team_carry(self, part: str) -> Any:
        """Return the empty carry of a network for all environments, leaves [S local, B / S, A, ...]."""
        teams = self.layout.local_shards, self.layout.num_envs // self.layout.shards, self.spec.num_agents
        return self.zero_carry(part, *teams)

    def init_carry(self, policy_params: PolicyParams, timestep: TimeStep, indices: Array) -> Any:
        """Return the actor's empty carry, leaves float32[B, A, ...]."""
        return self.zero_carry("actor", *timestep.observation.shape[:2])

    def make_team_network(
        self, part: str, outputs: int, shape: tuple[int, ...], kind: tuple[int, ...], deviation: float | None = None
    ) -> Network:
        """Return the network of a part for inputs of a shape, with all that the settings ask for.

        `kind` is the shape by which layers are chosen; with an initial `deviation` half of the outputs are deviations.
        """
        dtype = self.layout.compute_dtype
        sizes = self.hidden_size, self.depth, self.initializer, self.stride, self.convolution, dtype

        numbers = outputs if deviation is None else outputs // 2

        def finish(module: Any) -> Any:
            return module if deviation is None else GaussianOutputs(module, numbers, deviation)

        if not self.has_layers(part):
            inputs = (1, *shape)
            network = self.make_network(
                part, outputs, lambda _: finish(on_policy.make_network(numbers, kind, *sizes)), inputs
            )
        else:
            encoder = on_policy.make_network(0, kind, *sizes)
            head = finish(MLP(numbers, self.hidden_size, 0, self.initializer, dtype))
            layers = self.memory, self.memory_size, self.memory_layers, self.initializer, dtype
            module: Any = Recurrent(encoder, head, *layers)
            if part == "actor" and self.passes_messages:
                core = Recurrent(None, head, *layers) if self.has_memory else head
                heads = self.message_heads, self.message_layers
                module = Communicating(encoder, core, *heads, self.initializer, dtype)
            network = Network(module, ((1, 1, *shape),))
        return network if self.types is None else dataclasses.replace(network, members=max(self.types) + 1)

    def row_samples(self, steps: int) -> int:
        """Return the number of samples of a minibatch row, from rollouts of `steps` steps, see `segments`."""
        if not self.learns_by_team:
            return 1
        return (steps if self.recurrent else 1) * self.spec.num_agents

    def flatten_rows(self, rows: dict[str, Any]) -> dict[str, Array]:
        """Return rows [N, L, A, ...] of `segments` as samples [N L A, ...], and samples as they are."""
        if not self.learns_by_team:
            return rows
        return {name: x.reshape(-1, *x.shape[3:]) for name, x in rows.items() if name not in NOT_SAMPLES}

    def apply_by_agent(self, part: str, params: Params, views: Array) -> Array:
        """Return outputs float32[N, A, n] of a network without further layers for inputs [N, A, ...]."""
        outputs: Array = map_agents(self.networks[part].module.apply, params, self.types, views)
        return outputs

    def run_network(
        self, part: str, params: Params, views: Array, situation: Situation, carry: Carry
    ) -> tuple[Array, Carry]:
        """Return outputs float32[N, T, A, n] of a network for inputs [N, T, A, ...], and its next carry.

        The inputs are what the network takes, and `carry` has leaves [N, A, ...].
        """
        lead, module, types = views.shape[:3], self.networks[part].module, self.types
        rows = views.reshape(-1, *views.shape[2:])
        if not isinstance(module, Recurrent | Communicating):
            return self.apply_by_agent(part, params, rows).reshape(*lead, -1), carry
        first = jnp.broadcast_to(situation.first[:, None], (lead[0], lead[2], lead[1]))
        memory = {name: leaf for name, leaf in dict(carry).items() if name != MESSAGES} or None
        if isinstance(module, Recurrent):
            inputs: Any = (_by_agent(views), first, memory)
            outputs, carry = map_agents(lambda params, x: module.apply(params, *x), params, types, inputs)
            return _by_agent(outputs), carry

        def encode(params: Params, x: Array) -> Any:
            return module.apply(params, x, method="encode")

        def decide(params: Params, inputs: Any) -> Any:
            return module.apply(params, *inputs, method="decide")

        embedding = map_agents(encode, params, types, rows).reshape(*lead, -1)
        sent = embedding.astype(jnp.float32)
        if self.message_delay:
            sent = jnp.concatenate([_by_agent(carry[MESSAGES]), sent], axis=1)
        begin = _last_first(situation.first, self.message_delay)
        messages = deliver(sent, situation.ages, jnp.arange(lead[1], dtype=jnp.int32)[None] - begin)
        inputs = *(_by_agent(x) for x in (embedding, messages, situation.ages >= 0)), first, memory
        outputs, memory = map_agents(decide, params, types, inputs)
        if self.message_delay:
            times = jnp.arange(lead[1] - self.message_delay, lead[1], dtype=jnp.int32)
            this_episode = (times[None] >= begin[:, -1:])[..., None, None]
            memory |= {MESSAGES: _by_agent(jnp.where(this_episode, sent[:, lead[1] :], 0.0))}
        return _by_agent(outputs), memory if self.recurrent else carry


def _last_first(first: Array, delay: int) -> Array:
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
