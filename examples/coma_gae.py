"""COMA with a value of the state in place of counterfactual ones: the advantages of GAE (arXiv 1506.02438)."""

import dataclasses
import sys

import jax
import jax.numpy as jnp

import jaxrl
from jaxrl.algos.coma import Coma


@dataclasses.dataclass(frozen=True)
class GaeComa(Coma):
    """The critic learns V(s); A is the TD(lambda) target less V(s), the sum of (gamma lambda)^k delta_{t+k}."""

    def values(self, critic: dict, critic_input: jax.Array) -> jax.Array:
        values = super().values(critic, critic_input)
        return jnp.broadcast_to(values.mean(-1, keepdims=True), values.shape)  # the same for all actions

    def compute_advantages(self, minibatch: dict, action_probs: jax.Array) -> jax.Array:
        return minibatch["target"] - minibatch["values"][..., 0]


if __name__ == "__main__":
    episodes = int(sys.argv[1]) if len(sys.argv) > 1 else 1024
    run = jaxrl.train(GaeComa, preset="coma_quick", total_episodes=episodes, eval_every=0)
    print(f"return of the last {len(run.metrics['env_steps'])} rows: {run.metrics['train/return'][-1]:.2f}")
