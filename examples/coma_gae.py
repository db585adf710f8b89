"""COMA with the advantages of GAE (arXiv 1506.02438) in place of counterfactual ones: python -m examples.coma_gae."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

import jaxrl
from jaxrl.algos.coma import Coma


@dataclasses.dataclass(frozen=True)
class GaeComa(Coma):
    """The critic learns V(s); A is the TD(lambda) target less V(s), GAE where the target critic equals the critic."""

    def values(self, critic: Any, critic_input: jax.Array) -> jax.Array:
        values = super().values(critic, critic_input)
        return jnp.broadcast_to(values.mean(-1, keepdims=True), values.shape)  # the same for all actions

    def compute_advantages(self, minibatch: dict[str, Any], action_probs: jax.Array) -> jax.Array:
        return minibatch["target"] - minibatch["values"][..., 0]


if __name__ == "__main__":
    settings = {"num_envs": 16, "critic_warmup": 0, "eval_every": 0}
    result = jaxrl.train("examples.coma_gae:GaeComa", preset="coma_quick", total_env_steps=19_200, **settings)
    print(jaxrl.evaluate(result.policy, episodes=200))
