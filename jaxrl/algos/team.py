"""Teams with discrete actions: their networks, and sampling the agents' actions in sequence.

Layout letters: B environments, A agents, N samples, n actions of an agent.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from envs_jax.base import Array, Discrete, EnvSpec, TimeStep
from envs_jax.critic_input import with_critic_input
from jaxrl.algos.base import Trajectory
from jaxrl.common.types import Key, Params, PolicyParams
from jaxrl.nn import distributions, networks
from jaxrl.nn.precision import stored_dtype
from jaxrl.rl.data_parallel import DataParallel


def check_spec(spec: EnvSpec, egocentric: bool) -> EnvSpec:
    """Return the spec with a centralised observation, the default one where it names none.

    Raises:
        ValueError: actions are continuous, half of the centralised observation is missing, or `egocentric` views are
            asked for and the environment has none.
    """
    if not isinstance(spec.action, Discrete):
        raise ValueError(f"coma needs discrete actions, '{spec.name}' has continuous ones: use ppo, sac or ddpg")
    if egocentric and (spec.egocentric is None or spec.critic_input is None):
        missing = "critic_input" if spec.egocentric else "egocentric views"
        raise ValueError(f"'{spec.name}' has no {missing}: use --egocentric false")
    spec = with_critic_input(spec)
    if spec.critic_input is None or spec.critic_input_spec is None:
        raise ValueError(f"coma needs a centralised observation, but '{spec.name}' defines no critic_input")
    return spec


def network(
    outputs: int, shape: tuple[int, ...], hidden_size: int, depth: int, initializer: Any, stride: int,
    convolution: Any, dtype: Any,
) -> Any:  # fmt: skip
    """Return a network for vectors or images; `convolution` "auto" selects by backend and hidden_size."""
    if len(shape) not in (1, 3):
        raise ValueError(f"coma needs vectors or images (H, W, C) as observations, not arrays of shape {shape}")
    if len(shape) == 1:
        return networks.MLP(outputs, hidden_size, depth, initializer, dtype)
    smallest = networks.smallest_side(stride)
    if stride > 1 and min(shape[:2]) < smallest:
        raise ValueError(
            f"stride {stride} needs images of at least {smallest} x {smallest} pixels, not {shape[0]} x {shape[1]}: "
            "choose --stride 1"
        )
    if convolution == "auto":
        methods = networks.convolution_methods(hidden_size, jax.default_backend())
    else:
        methods = (convolution,) * 3
    return networks.ConvStack(outputs, hidden_size, depth, initializer, methods, dtype, stride)


@dataclasses.dataclass(frozen=True, eq=False)
class TeamNetworks:
    """One actor for all agents, and a centralised critic with a value for each action of an agent.

    Attributes:
        spec: of the environment.
        actor: observations [N, ...] -> logits float32[N, n].
        critic: critic inputs [N, ...] -> values float32[N, n], or [N, 1 + n] if dueling.
        dueling: values are a state's value plus mean-free action values (arXiv 1511.06581, equation 9).
        egocentric: networks see views as the agent does, see `EnvSpec.egocentric`; `logits` and `values` do this.
        standard: (outputs, shape of an input) -> the flax module of both, unless the user gives another one.
    """

    spec: EnvSpec
    actor: networks.Network
    critic: networks.Network
    dueling: bool
    egocentric: bool
    standard: Callable[[int, tuple[int, ...]], Any]

    @classmethod
    def make(
        cls, spec: EnvSpec, make_network: Callable[..., networks.Network], dueling: bool, egocentric: bool, *sizes: Any
    ) -> "TeamNetworks":
        """Return networks made by `make_network` of an algorithm; `sizes` are the last arguments of `network`."""
        actions = spec.action
        assert isinstance(actions, Discrete)

        def standard(outputs: int, shape: tuple[int, ...]) -> Any:
            return network(outputs, shape, *sizes)

        def make_part(part: str, outputs: int, box: Any) -> networks.Network:
            shape = box.shape
            if egocentric:
                assert spec.egocentric is not None
                shape = jax.eval_shape(spec.egocentric, jax.ShapeDtypeStruct(box.shape, box.dtype))[0].shape
            return make_network(part, outputs, lambda outputs: standard(outputs, shape), (1, *shape))

        critic = make_part("critic", actions.n + dueling, spec.critic_input_spec)
        return cls(spec, make_part("actor", actions.n, spec.observation), critic, dueling, egocentric, standard)

    def critic_inputs(self, trajectory: Trajectory) -> Array:
        """Return the critic inputs [T, B, A, ...] of a trajectory, in the dtype of its stored observations."""
        assert self.spec.critic_input is not None
        inputs = jax.vmap(jax.vmap(self.spec.critic_input))(trajectory.timestep, trajectory.action)
        return inputs.astype(stored_dtype(self.spec.critic_input_spec, trajectory.timestep.observation.dtype))

    def _outputs(self, net: networks.Network, params: Params, views: Array) -> Array:
        """Return outputs float32[N, k + n] of views [N, ...]; the last n belong to the n actions."""
        if not self.egocentric:
            return net.apply(params, views)
        assert self.spec.egocentric is not None
        turned_views, action_order = jax.vmap(self.spec.egocentric)(views)
        out, n = net.apply(params, turned_views), action_order.shape[1]
        # a product, because the gradient of a gather is a slow scatter
        chosen = jax.nn.one_hot(action_order, n, dtype=out.dtype)
        return jnp.concatenate([out[:, :-n], jnp.sum(chosen * out[:, None, -n:], axis=-1)], axis=1)

    def logits(self, actor: Params, observation: Array) -> Array:
        """Return logits float32[N, n] of observations [N, ...]."""
        return self._outputs(self.actor, actor, observation)

    def values(self, critic: Params, critic_input: Array) -> Array:
        """Return Q(s, .) float32[N, n] of critic inputs [N, ...]."""
        out = self._outputs(self.critic, critic, critic_input)
        if not self.dueling:
            return out
        advantages = out[:, 1:]
        return out[:, :1] + advantages - advantages.mean(-1, keepdims=True)

    def act(
        self, policy_params: PolicyParams, timestep: TimeStep, keys: Key, epsilon: Array | float, greedy: bool = False
    ) -> tuple[Array, dict[str, Array]]:
        """Compute the logits of all agents [B, A, ...] at once, then select actions as in `sample_sequentially`."""
        batch_shape = timestep.observation.shape[:2]
        flat = timestep.observation.reshape(-1, *timestep.observation.shape[2:])
        logits = self.logits(policy_params, flat).reshape(*batch_shape, -1)
        action_probs = distributions.epsilon_mix(logits, epsilon)
        return sample_sequentially(self.spec, timestep, action_probs, keys, logits if greedy else None)

    def last_value(
        self, act: Callable[[TimeStep, Key], Array], critic: Params, last: TimeStep, key: Key, layout: DataParallel
    ) -> Array:
        """Return the value float32[B, A] of actions in the time step after a trajectory.

        act: (time steps [B, ...], keys [B]) -> actions [B, A].
        """

        def compute_values(rows: tuple[TimeStep, Array]) -> Array:
            action = act(*rows)
            assert self.spec.critic_input is not None
            inputs = jax.vmap(self.spec.critic_input)(rows[0], action)
            values = self.values(critic, inputs.reshape(-1, *inputs.shape[2:]))
            return distributions.select_action_value(values, action.reshape(-1)).reshape(action.shape)

        keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, layout.env_indices())
        value = layout.apply(compute_values, layout.split((last, keys)), per_row=self.spec.num_agents)
        return value.reshape(-1, self.spec.num_agents)


def sample_sequentially(
    spec: EnvSpec, timestep: TimeStep, action_probs: Array, keys: Key, scores: Array | None = None
) -> tuple[Array, dict[str, Array]]:
    """Select the actions of a team one agent after another, so that a mask may depend on earlier actions.

    Args:
        spec: of the environment.
        timestep: leaves [B, ...].
        action_probs: float32[B, A, n] before masks.
        keys: key[B].
        scores: float32[B, A, n]: take the allowed action with the largest score; None: sample by `action_probs`. Logits
            are good scores: they differ even where probabilities are 0, because a closed action has nearly all.

    Returns:
        action int32[B, A]; "mask" bool[B, A, n] and the masked policy's "log_prob" float32[B, A].
    """
    action_mask = timestep.action_mask
    if action_mask is None:
        action_mask = jnp.ones(action_probs.shape, bool)

    def select_actions(
        mask_state: Any, open_: Array, action_probs: Array, key: Key, scores: Array | None
    ) -> tuple[Array, Any]:
        agents = spec.num_agents
        chosen, masks, log_probs = jnp.zeros(agents, jnp.int32), [], []
        for agent in range(agents):
            mask = spec.next_mask(mask_state, open_, chosen, agent)
            masked = distributions.apply_action_mask(action_probs[agent], mask)
            if scores is None:
                action = distributions.sample(jax.random.fold_in(key, agent), masked)
            else:
                action = jnp.argmax(distributions.mask_logits(scores[agent], mask)).astype(jnp.int32)
            chosen = chosen.at[agent].set(action)
            masks.append(mask)
            log_probs.append(jnp.log(jnp.maximum(distributions.select_action_value(masked, action), 1e-8)))
        return chosen, {"mask": jnp.stack(masks), "log_prob": jnp.stack(log_probs)}

    return jax.vmap(select_actions)(timestep.mask_state, action_mask, action_probs, keys, scores)
