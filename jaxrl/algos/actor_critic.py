"""An actor and a critic of state values for discrete actions or boxes, vectors or images, and teams.

Layout letters: T time, B environments, A agents, N samples, n actions of an agent or numbers of its action.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from envs_jax.base import SMALLEST_IMAGE, Array, Box, Discrete, EnvSpec, TimeStep
from jaxrl.algos import team
from jaxrl.algos.box_actions import BoxActions
from jaxrl.common.types import Key, Params, PolicyParams
from jaxrl.nn import distributions, networks
from jaxrl.rl.data_parallel import DataParallel
from jaxrl.rl.running_statistics import RunningStatistics, start

Arrays = dict[str, Array]
Statistics = dict[str, RunningStatistics]
MIN_LOGIT = -69.0  # of an action when sampling, relative to the largest logit
INPUT_LIMIT = 10.0  # normalised inputs lie in +/- this


def check_spec(spec: EnvSpec, name: str, critic: str) -> None:
    """Raise ValueError for an environment that does not fit the networks, or has no view for a central critic."""
    if not isinstance(spec.observation, Box):
        raise ValueError(
            f"{name} needs one array per agent as observation, '{spec.name}' has several: concatenate them"
        )
    if not isinstance(spec.action, Discrete):
        BoxActions.from_spec(spec, name)
    if critic == "central" and not has_view(spec):
        raise ValueError(
            f"critic central needs a critic_input or a single array as global_state, '{spec.name}' has neither: use "
            "--critic local"
        )


def has_view(spec: EnvSpec) -> bool:
    """Return whether an environment has a centralised view for critics."""
    return spec.critic_input_spec is not None or isinstance(spec.global_state, Box)


@dataclasses.dataclass(frozen=True, eq=False)
class ActorCritic:
    """One actor for all agents, and one critic, of an agent's own observation or of a centralised view.

    Attributes:
        spec: of the environment.
        actor: observations [N, ...] -> logits float32[N, n], or means and logarithms of deviations [N, 2 n].
        critic: its inputs [N, ...] -> float32[N, 1].
        view: what the critic sees, "observation" or "central".
        standard: (outputs, shape of an input) -> the flax module of both, unless the user gives another one.
    """

    spec: EnvSpec
    actor: networks.Network
    critic: networks.Network
    view: str
    standard: Callable[[int, tuple[int, ...]], Any]

    @classmethod
    def make(
        cls, spec: EnvSpec, make_network: Callable[..., networks.Network], critic: str, initial_std: float, *sizes: Any
    ) -> "ActorCritic":
        """Return networks made by `Algorithm.make_network`.

        Args:
            spec: of the environment.
            make_network: of the algorithm.
            critic: "local", "central", or "auto": central where there is such a view and a team or a global state.
            initial_std: deviation of continuous actions at the start.
            sizes: the rest of the arguments of `team.network`.
        """
        actor_shape = critic_shape = spec.observation.shape
        central_exists = has_view(spec) and (spec.num_agents > 1 or spec.global_state is not None)
        view = "central" if critic == "central" or (critic == "auto" and central_exists) else "observation"
        if view == "central" and spec.critic_input_spec is not None:
            critic_shape = spec.critic_input_spec.shape
        elif view == "central":
            critic_shape = (math.prod(actor_shape) + math.prod(spec.global_state.shape),)

        def standard(outputs: int, shape: tuple[int, ...]) -> Any:
            image = len(shape) == 3 and min(shape[:2]) >= SMALLEST_IMAGE
            return team.network(outputs, shape if image else (math.prod(shape),), *sizes)

        def gaussian(outputs: int) -> Any:
            return networks.GaussianOutputs(standard(outputs // 2, actor_shape), outputs // 2, initial_std)

        def logits(outputs: int) -> Any:
            return standard(outputs, actor_shape)

        if isinstance(spec.action, Discrete):
            actor = make_network("actor", spec.action.n, logits, (1, *actor_shape))
        else:
            actor = make_network("actor", 2 * math.prod(spec.action.shape), gaussian, (1, *actor_shape))
        critic_net = make_network("critic", 1, lambda outputs: standard(outputs, critic_shape), (1, *critic_shape))
        return cls(spec, actor, critic_net, view, standard)

    @property
    def box(self) -> BoxActions | None:
        """Return the conversion of continuous actions, None for discrete ones."""
        return None if isinstance(self.spec.action, Discrete) else BoxActions(self.spec.action)

    def statistics(self, inputs: str, values: bool) -> Statistics:
        """Return fresh statistics of inputs ("auto": of vectors whose bounds are missing or wide) and of values."""
        box = self.spec.observation
        needs_scaling = len(box.shape) == 1 and max(-box.lowest, box.highest) > INPUT_LIMIT
        enabled = {"always": True, "never": False, "auto": needs_scaling}[inputs]
        shapes = {"actor": self.actor.inputs[0][1:], "critic": self.critic.inputs[0][1:]} if enabled else {}
        return {name: start(shape) for name, shape in (shapes | ({"value": ()} if values else {})).items()}

    def inputs(self, timestep: TimeStep, layout: DataParallel) -> Arrays:
        """Return the inputs of actor and critic, {"observation" and, if in use, "central": [T, B, A, ...]}.

        The critic gives the value of a state: other agents' actions in `critic_input` are set to 0. A global state is
        appended to the agent's own observation.
        """
        spec, inputs = self.spec, {"observation": timestep.observation}
        if self.view == "observation":
            return inputs

        def central_input(step: TimeStep) -> Array:
            if spec.critic_input is not None:
                return spec.critic_input(step, jnp.zeros((spec.num_agents, *spec.action.shape), spec.action.dtype))
            local = step.observation.reshape(spec.num_agents, -1).astype(jnp.float32)
            shared = jnp.broadcast_to(step.global_state.reshape(1, -1), (spec.num_agents, step.global_state.size))
            return jnp.concatenate([local, shared.astype(jnp.float32)], axis=-1)

        return inputs | {"central": jax.vmap(jax.vmap(central_input))(timestep)}

    def outputs(self, actor: Params, statistics: Statistics, observation: Array) -> Array:
        """Return the actor's outputs float32[N, ...] of observations [N, ...]."""
        return self.actor.apply(actor, _normalize("actor", statistics, observation))

    def value(self, critic: Params, statistics: Statistics, sample: Arrays) -> Array:
        """Return values float32[N] of `inputs` [N, ...], normalised ones if the critic learns these."""
        return self.critic.apply(critic, _normalize("critic", statistics, sample[self.view]))[:, 0]

    def log_prob(self, outputs: Array, sample: Arrays) -> tuple[Array, Array]:
        """Return log-probabilities of actions float32[...], and the policy's entropy, of outputs [..., n].

        Discrete actions come with their "mask"; continuous ones are samples before clipping.
        """
        if self.box is not None:
            mean, log_std = jnp.split(outputs, 2, axis=-1)
            log_prob = distributions.normal_log_prob(mean, log_std, sample["action"])
            return log_prob, distributions.normal_entropy(log_std)
        log_probs = jax.nn.log_softmax(distributions.mask_logits(outputs, sample["mask"]))
        log_prob = distributions.select_action_value(log_probs, sample["action"])
        return log_prob, distributions.entropy(jnp.exp(log_probs))

    def act(self, policy_params: PolicyParams, timestep: TimeStep, keys: Key, greedy: bool) -> tuple[Array, Arrays]:
        """Select actions [B, A, ...]; continuous ones are clipped to their box.

        Args:
            policy_params: {"actor": parameters, "statistics": of its inputs}.
            timestep: leaves [B, ...].
            keys: key[B].
            greedy: take the most probable actions.

        Returns:
            actions; "log_prob" float32[B, A]; for discrete actions "mask" bool[B, A, n], for continuous ones "action"
            float32[B, A, n], the samples before clipping to [-1, 1].
        """
        observation = timestep.observation
        flat = observation.reshape(-1, *observation.shape[2:])
        outputs = self.outputs(policy_params["actor"], policy_params["statistics"], flat)
        outputs = outputs.reshape(*observation.shape[:2], -1)
        if self.box is None:
            mask = True if timestep.action_mask is None else timestep.action_mask
            logits = outputs - jnp.where(mask, outputs, -jnp.inf).max(-1, keepdims=True)
            probs = jnp.exp(jnp.clip(logits, MIN_LOGIT, 0.0))  # above 0, so that an action can always be sampled
            scores = outputs if greedy else None
            action, extras = team.sample_sequentially(self.spec, timestep, probs, keys, scores)
            return action, extras | {"log_prob": self.log_prob(outputs, {"action": action} | extras)[0]}
        mean, log_std = jnp.split(outputs, 2, axis=-1)
        noise = jax.vmap(lambda key: jax.random.normal(key, mean.shape[1:], jnp.float32))(keys)
        sample = {"action": mean if greedy else mean + jnp.exp(log_std) * noise}
        action = self.box.denormalize(jnp.clip(sample["action"], -1.0, 1.0))
        return action, sample | {"log_prob": self.log_prob(outputs, sample)[0]}


def update_statistics(statistics: Statistics, samples: Arrays, weight: Array, layout: DataParallel) -> Statistics:
    """Add samples [S local, m, ...] with weights float32[S local, m] to the statistics that are in use.

    Samples of weight 0 are not counted. Weights must have a mean of 1 over all samples.
    """
    weighted_mean = jax.vmap(lambda x: layout.sample_mean(weight * x), in_axes=-1)
    share_counted = layout.sample_mean((weight > 0).astype(jnp.float32))
    updated, count = dict(statistics), share_counted * (weight.shape[1] * layout.shards)
    for name, values in samples.items():
        if name in updated:
            rows, shape = values.reshape(*weight.shape, -1).astype(jnp.float32), updated[name].mean.shape
            mean = weighted_mean(rows)
            variance = weighted_mean(jnp.square(rows - mean[None, None])).reshape(shape)
            updated[name] = updated[name].merge(mean.reshape(shape), variance, count)
    return updated


def _normalize(name: str, statistics: Statistics, inputs: Array) -> Array:
    """Return inputs float32[N, ...], normalised where there are statistics of them."""
    inputs = inputs.astype(jnp.float32)
    return jnp.clip(statistics[name].normalize(inputs), -INPUT_LIMIT, INPUT_LIMIT) if name in statistics else inputs
