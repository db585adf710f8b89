"""Teams with discrete actions: networks for their observations, and sampling the agents' actions in sequence."""

from typing import Any

import jax
import jax.numpy as jnp

from envs_jax.base import Array, EnvSpec, TimeStep
from jaxrl.common.types import Key
from jaxrl.nn import distributions, networks


def network(
    outputs: int, shape: tuple[int, ...], hidden_size: int, depth: int, initializer: Any, convolution: Any, dtype: Any
) -> Any:
    """Return a network for vectors or images; `convolution` "auto" selects by backend and hidden_size."""
    if len(shape) not in (1, 3):
        raise ValueError(f"coma needs vectors or images (H, W, C) as observations, not arrays of shape {shape}")
    if len(shape) == 1:
        return networks.MLP(outputs, hidden_size, depth, initializer, dtype)
    if convolution == "auto":
        methods = networks.convolution_methods(hidden_size, jax.default_backend())
    else:
        methods = (convolution,) * 3
    return networks.ConvStack(outputs, hidden_size, depth, initializer, methods, dtype)


def sample_sequentially(
    spec: EnvSpec, timestep: TimeStep, action_probs: Array, keys: Key, greedy: bool
) -> tuple[Array, dict[str, Array]]:
    """Select the actions of a team one agent after another, so that a mask may depend on earlier actions.

    Args:
        spec: of the environment.
        timestep: leaves [B, ...].
        action_probs: float32[B, A, n] before masks.
        keys: key[B].
        greedy: take the most probable allowed action instead of sampling.

    Returns:
        action int32[B, A]; "mask" bool[B, A, n] and the masked policy's "log_prob" float32[B, A].
    """
    action_mask = timestep.action_mask
    if action_mask is None:
        action_mask = jnp.ones(action_probs.shape, bool)

    def one(mask_state: Any, open_: Array, action_probs: Array, key: Key) -> tuple[Array, Any]:
        agents = spec.num_agents
        chosen, masks, log_probs = jnp.zeros(agents, jnp.int32), [], []
        for agent in range(agents):
            mask = spec.next_mask(mask_state, open_, chosen, agent)
            masked = distributions.apply_action_mask(action_probs[agent], mask)
            if greedy:
                action = jnp.argmax(jnp.where(mask, action_probs[agent], -1.0)).astype(jnp.int32)
            else:
                action = distributions.sample(jax.random.fold_in(key, agent), masked)
            chosen = chosen.at[agent].set(action)
            masks.append(mask)
            log_probs.append(jnp.log(jnp.maximum(distributions.select_action_value(masked, action), 1e-8)))
        return chosen, {"mask": jnp.stack(masks), "log_prob": jnp.stack(log_probs)}

    return jax.vmap(one)(timestep.mask_state, action_mask, action_probs, keys)
