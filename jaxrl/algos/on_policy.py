"""What COMA and PPO share: networks, acting one agent after another, targets, and minibatches of a rollout.

Layout letters: T time, B environments, A agents, n actions of an agent, S logical shards, m samples of a minibatch in
one shard.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from envs_jax.base import Array, EnvSpec, TimeStep
from jaxrl.algos.base import Trajectory, next_timesteps
from jaxrl.common.types import Key
from jaxrl.nn import distributions, networks
from jaxrl.rl.data_parallel import DataParallel
from jaxrl.rl.policy_gradient import lambda_returns


def make_network(
    outputs: int, shape: tuple[int, ...], hidden_size: int, depth: int, initializer: Any, stride: int,
    convolution: Any, dtype: Any,
) -> Any:  # fmt: skip
    """Return a network for vectors or images; `convolution` "auto" selects by backend and hidden_size."""
    if len(shape) not in (1, 3):
        raise ValueError(f"networks need vectors or images (H, W, C) as observations, not arrays of shape {shape}")
    if len(shape) == 1:
        return networks.MLP(outputs, hidden_size, depth, initializer, dtype)
    smallest = 5 + (4 - 1) * stride  # leaves a pixel for the last convolution
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


def central_input(spec: EnvSpec, step: TimeStep) -> Array:
    """Return the centralised view [A, ...] of a state, from a time step of one environment.

    Other agents' actions in `critic_input` are set to 0. A global state is appended to the agent's own observation.
    """
    if spec.critic_input is not None:
        return spec.critic_input(step, jnp.zeros((spec.num_agents, *spec.action.shape), spec.action.dtype))
    local = step.observation.reshape(spec.num_agents, -1).astype(jnp.float32)
    shared = jnp.broadcast_to(step.global_state.reshape(1, -1), (spec.num_agents, step.global_state.size))
    return jnp.concatenate([local, shared.astype(jnp.float32)], axis=-1)


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
        if scores is None:  # of all agents at once: a generator for each takes long to compile
            agent_keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, jnp.arange(agents, dtype=jnp.uint32))
            noise = distributions.draw_noise(agent_keys, action_probs.shape[-1])
        chosen, masks, log_probs = jnp.zeros(agents, jnp.int32), [], []
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


@dataclasses.dataclass(frozen=True)
class Minibatches:
    """The minibatches of a training step, and epochs over them.

    Attributes:
        layout: of the environments.
        agents: A.
        samples: agent transitions of one logical shard.
        per_epoch: minibatches per epoch.
        size: m, samples of a minibatch in one logical shard; the remainder is dropped after shuffling.
        row_samples: how many samples each of these is, see `segments`.
    """

    layout: DataParallel
    agents: int
    samples: int
    per_epoch: int
    size: int
    row_samples: int = 1

    def flatten(self, x: Array) -> Array:
        """[T, B local, A, ...] -> [S local, samples, ...]."""
        return self.layout.split(jnp.swapaxes(x, 0, 1)).reshape(self.layout.local_shards, -1, *x.shape[3:])

    def flatten_all(self, **rows: Array) -> dict[str, Array]:
        return {name: self.flatten(x) for name, x in rows.items()}

    def unflatten(self, x: Array) -> Array:
        """Invert `flatten`."""
        return jnp.swapaxes(x.reshape(self.layout.local_envs, -1, self.agents, *x.shape[2:]), 0, 1)

    def shuffle(self, keys: Key) -> Array:
        """Return shuffled sample indices of every minibatch, int32[S local, epochs, per_epoch, m], from key[epochs]."""

        def shuffle_epoch(key: Key) -> Array:
            return jax.vmap(lambda k: jax.random.permutation(k, jnp.arange(self.samples, dtype=jnp.int32)))(
                self.layout.shard_keys(key)
            )

        order = jnp.swapaxes(jax.lax.map(shuffle_epoch, keys), 0, 1)[:, :, : self.size * self.per_epoch]
        return order.reshape(*order.shape[:2], self.per_epoch, self.size)

    def empty_metrics(self, update: Callable[..., Any], *arguments: Any, epochs: int) -> dict[str, Array]:
        """Return zeros float32[updates] for each metric that `update(*arguments)` returns second."""
        shapes = jax.eval_shape(update, *arguments)[1]
        return {name: jnp.zeros(epochs * self.per_epoch, jnp.float32) for name in shapes}

    def sample_weights(self, trajectory: Trajectory) -> Array:
        """Return the weight float32[T, B, A] of each transition, with a mean of 1.

        It is 0 after an episode's end, and for agents that are not present.
        """
        valid = jnp.broadcast_to(~trajectory.timestep.done[..., None], trajectory.action.shape[:3]).astype(jnp.float32)
        if jax.tree.leaves(trajectory.timestep.present):
            valid = valid * trajectory.timestep.present.astype(jnp.float32)
        share = self.layout.sample_mean(self.flatten(valid))
        return valid / jnp.maximum(share, 1e-8)

    weights = sample_weights  # the former name, for programs that use it

    def deviation(self, values: Array, weight: Array) -> Array:
        """Return the standard deviation of values [S local, m, ...] over a minibatch, repeated for each of them.

        It is 1 where a single sample counts, which has none.
        """
        total = jnp.maximum(self.layout.sample_mean(weight), 1e-8)  # 1 over a rollout, not in each minibatch
        mean = self.layout.sample_mean(weight * values) / total
        variance = self.layout.sample_mean(weight * jnp.square(values - mean)) / total
        counted = self.layout.sample_mean((weight > 0).astype(jnp.float32)) * (weight[0].size * self.layout.shards)
        deviation = jnp.where(counted < 1.5, 1.0, jnp.maximum(jnp.sqrt(variance), 1e-6))
        return jnp.full_like(values, deviation)


def lambda_targets(
    trajectory: Trajectory,
    last: TimeStep,
    value: Array,
    last_value: Array,
    gamma: Array | float,
    lambda_: Array | float,
) -> Array:
    """Return TD(lambda) targets y float32[T, B, A].

    y_t = r + gamma (1 - terminated) ((1 - l) v_{t+1} + l y_{t+1}) with l = lambda (1 - done); y = v after step T. A
    truncated episode bootstraps from the value of its last observation, which has a row of its own; an agent that is
    not present in the next step has terminated (no value follows), or was truncated alone where `TimeStep.cut` (l = 0).
    `value` is v float32[T, B, A], or [T, B, A, K]; `last` is the time step after the trajectory, and `last_value` its v
    [B, A], or [B, A, K].
    """

    def over_agents(x: Array) -> Array:
        return jnp.broadcast_to(jnp.expand_dims(x.astype(jnp.float32), range(x.ndim, value.ndim)), value.shape)

    next_steps = next_timesteps(trajectory, last)
    next_value = jnp.concatenate([value[1:], last_value[None]])
    discount = gamma * over_agents(~next_steps.terminated)
    lambda_t = lambda_ * over_agents(~next_steps.done)
    if jax.tree.leaves(next_steps.present):
        cut = next_steps.cut if jax.tree.leaves(next_steps.cut) else jnp.zeros_like(next_steps.present)
        discount = discount * over_agents(next_steps.present | cut)
        lambda_t = lambda_t * over_agents(~cut)
    return lambda_returns(over_agents(next_steps.reward), discount, next_value, lambda_t)


def quantile_targets(
    layout: DataParallel,
    key: Key,
    trajectory: Trajectory,
    last: TimeStep,
    quantiles: Array,
    last_quantiles: Array,
    gamma: Array | float,
    lambda_: Array | float,
) -> Array:
    """Return samples float32[T, B, A, K] of the return: TD(lambda) targets that bootstrap at a random step.

    Each goes on with probability lambda, and otherwise ends with its quantile of the next state (SR(lambda) of Nam et
    al. 2021, arXiv 2105.11366). The mean of both, as in `lambda_targets`, would have too small a spread.
    """

    def draw(index: Array) -> Array:
        shape = len(quantiles), *quantiles.shape[2:]
        return jax.random.uniform(jax.random.fold_in(key, index), shape, jnp.float32)

    goes_on = jax.vmap(draw, out_axes=1)(layout.env_indices()) < lambda_
    return lambda_targets(trajectory, last, quantiles, last_quantiles, gamma, goes_on.astype(jnp.float32))


def pick(data: dict[str, Array], indices: Array, *names: str) -> dict[str, Array]:
    """Select the samples int32[S, m] of data [S, samples, ...], by name."""
    take = jax.vmap(lambda rows, i: jnp.take(rows, i, axis=0, mode="clip"))
    return {name: jax.tree.map(lambda rows: take(rows, indices), data[name]) for name in names}
