"""COMA as the public dmar-bonn/ipp-marl computes it, including its bugs, for comparison.

Differences from `coma`:

* the target critic is never updated (`OriginalParameters.first_target`);
* targets are not TD(lambda): see `jaxrl.rl.returns.ipp_marl_targets`;
* the actor's loss uses the log-probability before masking, each sample weighted by its number of allowed actions.

The published reward and starts are settings of the environment: --reward_timing original --start original.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from envs_jax.base import Array, EnvSpec, TimeStep, pytree
from envs_jax.progress import Progress
from jaxrl.algos.base import AlgoState, Trajectory, next_timesteps
from jaxrl.algos.coma import Coma, ComaParameters, Samples, policy_metrics
from jaxrl.common.shapes import Bool, Float32, Int32, assert_equal_shape
from jaxrl.common.types import Key, Params
from jaxrl.nn import distributions
from jaxrl.rl import returns


def original_actor_loss(
    logits: Float32[Array, "N n"],
    epsilon: Float32[Array, ""],
    mask: Bool[Array, "N n"],
    values: Float32[Array, "N n"],
    action: Int32[Array, "N"],
    weight: Samples,
) -> tuple[Float32[Array, ""], Samples, Samples]:
    """Return the loss, its advantage and its log-probability."""
    assert_equal_shape([logits, mask, values])
    assert_equal_shape([action, weight])
    mixed, mask = distributions.epsilon_mix(logits, epsilon), mask.astype(jnp.float32)
    allowed = mixed * mask
    action_probs = jnp.maximum(allowed / jnp.maximum(allowed.sum(-1, keepdims=True), 1e-5), 1e-5)
    advantage = distributions.select_action_value(values, action) - jnp.sum(action_probs * values * mask, axis=-1)
    advantage = jax.lax.stop_gradient(advantage)
    log_prob = jnp.log(distributions.select_action_value(mixed, action))
    return -jnp.mean(weight * advantage * log_prob * mask.mean(-1)), advantage, log_prob


@pytree
class OriginalParameters(ComaParameters):
    """COMA's parameters, and the target critic, which is never updated."""

    first_target: Params


@dataclasses.dataclass(frozen=True)
class ComaOriginal(Coma):
    """COMA with the targets and the actor's loss of the public repository."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, neutral in (("clip_ratio", 0), ("target_kl", 0), ("advantage", "critic"), ("scale_advantage", False)):
            if getattr(self, name) != neutral:
                raise ValueError(
                    f"{name} does not apply to coma_original, whose actor loss is fixed: remove it, or use coma"
                )
        if self.layout.shards > 1:
            raise ValueError("coma_original uses all episodes of a training step at once: use --logical_shards 1")
        if not self.spec.fixed_horizon:
            raise ValueError("coma_original needs an environment whose episodes all have the same length")

    @classmethod
    def batch(cls, spec: EnvSpec, settings: dict[str, Any], num_envs: int) -> int:
        """Return 1, which makes one logical shard: targets need all episodes in one row."""
        return 1

    def init(self, key: Key, inputs: Any) -> AlgoState:
        """Return COMA's state, with a further copy of the critic."""
        state = super().init(key, inputs)
        params = {field.name: getattr(state.replicated, field.name) for field in dataclasses.fields(ComaParameters)}
        first_target = jax.tree.map(jnp.copy, params["critic"])
        return AlgoState(OriginalParameters(**params, first_target=first_target), state.sharded)

    def _data(
        self, params: ComaParameters, trajectory: Trajectory, last: TimeStep, key: Key, progress: Progress
    ) -> dict[str, Array]:
        """Return COMA's data, with the values of the first target critic."""
        assert isinstance(params, OriginalParameters)
        params = dataclasses.replace(params, target=params.first_target)
        return super()._data(params, trajectory, last, key, progress)

    def _targets(self, trajectory: Trajectory, last: TimeStep, value: Array, last_value: Array) -> Array:
        """Return the original's sums over each agent's episodes in one row, episode after episode."""
        del last_value
        steps = self.spec.horizon

        def row(x: Array) -> Array:
            """[T, B, ...] -> [B x T, ...]."""
            return jnp.swapaxes(x, 0, 1).reshape(-1, *x.shape[2:])

        def of_envs(rows: tuple[TimeStep, Array]) -> Array:
            following, value = rows

            def of_agent(reward: Array, value: Array) -> Array:
                done = row(following.done)
                return returns.ipp_marl_targets(reward, done, value, self.gamma, self.td_lambda, steps)[0]

            targets = jax.vmap(of_agent, in_axes=1, out_axes=1)(row(following.reward), row(value))
            return jnp.swapaxes(targets.reshape(-1, steps, value.shape[2]), 0, 1)

        return self.layout.map_shards(of_envs, (next_timesteps(trajectory, last), value), axis=1)

    def _policy_loss(self, logits: Array, epsilon: Array, sample: dict[str, Array]) -> tuple[Array, dict[str, Array]]:
        """Return the original's loss; its log-probability is not the sampled policy's, so there is no "kl"."""
        samples = (sample[name] for name in ("mask", "values", "action", "weight"))
        value, advantage, log_prob = original_actor_loss(logits, epsilon, *samples)
        return value, policy_metrics(advantage, log_prob, sample["weight"])
