"""DQN for discrete actions (Mnih et al. 2015, "Human-level control", Nature 518): a subclass of `OffPolicy`.

`python -m examples.dqn` trains it on two snakes; the flag is `--algo examples.dqn:Dqn`. Letters of shapes: N samples,
C critics, B environments, A agents, n actions.
"""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

import jaxrl
from envs_jax import Array, Discrete, Progress, TimeStep, pytree, setting
from jaxrl.algos.base import AlgoState, Learner, Trajectory
from jaxrl.algos.off_policy import OffPolicy
from jaxrl.nn import distributions
from jaxrl.nn.networks import Network, TeamNet


@pytree
class DqnParameters:
    """The critics with their optimizer, and the slow copy `target_critic`, which `OffPolicy.update` moves."""

    critic: Learner
    target_critic: Any


@dataclasses.dataclass(frozen=True)
class Dqn(OffPolicy):
    """Q-learning with a replay and target networks; with several critics, the smallest value counts."""

    num_critics: int = setting(1, "number of critics; targets and actions use the smallest value", between=(1, 100))
    eps_fraction: float = setting(0.3, "share of the run in which exploration falls from 1", between=(1e-6, 1))
    eps_min: float = setting(0.05, "exploration rate after that", between=(0, 1))

    parts = ("critic",)
    modes = ("greedy",)
    sweepable = ("gamma", "tau", "critic_lr", "final_lr_fraction", "eps_min")
    fixed_settings: ClassVar[dict[str, Any]] = {"actor_lr": 3e-4, "actor_update_period": 1, "random_steps": 0}

    def __post_init__(self) -> None:
        if not isinstance(self.spec.action, Discrete):
            raise ValueError(f"dqn needs discrete actions, '{self.spec.name}' has others: use sac")
        super().__post_init__()

    # Learning: OffPolicy takes steps on mean (Q(o, a) - y)^2

    def compute_target(self, params: DqnParameters, sample: dict[str, Array]) -> Array:
        """Return R + gamma^k max_a Q'(o', a), float32[N, A]."""
        values = self.outputs("critic", params.target_critic, sample["next_observation"]).min(0)
        return self.n_step_target(sample, distributions.mask_logits(values, sample["next_mask"]).max(-1))

    def critic_values(self, critic: Any, sample: dict[str, Array]) -> Array:
        """Return Q(o, a) of the stored actions, float32[C, N, A]."""
        values = self.outputs("critic", critic, sample["observation"])
        return distributions.select_action_value(values, jnp.broadcast_to(sample["action"], values.shape[:-1]))

    # Acting

    def schedules(self, progress: Progress) -> dict[str, Array]:
        return {"epsilon": jnp.maximum(1 - progress.fraction / self.eps_fraction, self.eps_min)}

    def act(
        self, policy_params: Any, carry: Any, timestep: TimeStep, keys: Array, progress: Progress, mode: str
    ) -> tuple[Array, Any, Any]:
        """Take the best open action; in training, with probability epsilon, any open one."""
        epsilon = self.schedules(progress)["epsilon"]

        def explore(values: Array, key: Array) -> Array:  # of one environment, [A, n]
            key_coin, key_values = jax.random.split(key)
            is_random = jax.random.uniform(key_coin, (len(values), 1)) < epsilon
            return jnp.where(is_random, jax.random.uniform(key_values, values.shape), values)

        values = self.outputs("critic", policy_params, timestep.observation).min(0)  # [B, A, n]
        if mode == "explore":
            values = jax.vmap(explore)(values, keys)
        if timestep.action_mask is not None:
            values = distributions.mask_logits(values, timestep.action_mask)
        return jnp.argmax(values, axis=-1).astype(jnp.int32), carry, ()

    # What is learned and stored

    @property
    def networks(self) -> dict[str, Network]:
        def make(part: str, outputs: int) -> TeamNet:
            return TeamNet(outputs, self.hidden_size, self.depth, dtype=self.layout.compute_dtype)

        return {"critic": self.critic_network(make, outputs=self.action_size)}

    def init(self, key: Array, inputs: Any) -> AlgoState:
        critic = self.fresh_networks(key, inputs)["critic"]
        params = DqnParameters(self.learner("critic", critic), jax.tree.map(jnp.copy, critic))
        return AlgoState(params, self.init_replay())

    def policy(self, state: AlgoState) -> Any:
        return state.replicated.critic.params

    @property
    def action_shapes(self) -> Any:
        return jax.ShapeDtypeStruct((self.spec.num_agents,), jnp.int32)

    def stored_action(self, trajectory: Trajectory) -> Any:
        return trajectory.action


if __name__ == "__main__":
    settings: dict[str, Any] = {"hidden_size": 64, "critic_lr": 1e-3, "gamma": 0.95}
    result = jaxrl.train("examples.dqn:Dqn", "snakes_1v1", total_env_steps=300_000, **settings)
    print(jaxrl.evaluate(result.policy, episodes=200))
