"""Teams with discrete actions: their networks, and sampling the agents' actions in sequence.

Layout letters: B environments, A agents, n actions of an agent.
"""

from typing import Any

import jax
import jax.numpy as jnp

from envs_jax.base import Array, EnvSpec, TimeStep
from jaxrl.common.types import Key
from jaxrl.nn import distributions, networks


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
