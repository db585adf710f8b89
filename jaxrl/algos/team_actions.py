"""Actions of a team, selected one agent after another, so that a mask may depend on earlier actions.

Layout letters: B environments, A agents, n actions of an agent.
"""

from typing import Any

import jax
import jax.numpy as jnp

from envs_jax.base import Array, EnvSpec, TimeStep
from jaxrl.common.types import Key
from jaxrl.nn import distributions


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
        noise: Any = None
        if scores is None:  # one draw for all agents: one for each compiles slowly
            agent_keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, jnp.arange(agents, dtype=jnp.uint32))
            noise = distributions.draw_noise(agent_keys, action_probs.shape[-1])
        chosen = jnp.zeros(agents, jnp.int32)
        masks = []
        log_probs = []
        for agent in range(agents):
            mask = spec.next_mask(mask_state, open_, chosen, agent)
            masked = distributions.apply_action_mask(action_probs[agent], mask)
            if scores is None:
                action = distributions.sample(noise[agent], masked)
            else:
                action = jnp.argmax(distributions.mask_logits(scores[agent], mask)).astype(jnp.int32)
            chosen = chosen.at[agent].set(action)
            masks.append(mask)
            log_probs.append(jnp.log(jnp.maximum(distributions.select_action_value(masked, action), 1e-8)))
        return chosen, {"mask": jnp.stack(masks), "log_prob": jnp.stack(log_probs)}

    return jax.vmap(select_actions)(timestep.mask_state, action_mask, action_probs, keys, scores)
