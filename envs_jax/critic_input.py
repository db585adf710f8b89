"""Default input of a centralised critic, for any environment with discrete actions."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from envs_jax.base import Array, Box, Discrete, EnvSpec, TimeStep


def with_critic_input(spec: EnvSpec) -> EnvSpec:
    """Return the spec with a `critic_input`; unchanged if it has one already, or continuous actions."""
    if not isinstance(spec.action, Discrete) or spec.critic_input is not None or spec.critic_input_spec is not None:
        return spec
    default = CriticInput(spec.action.n, _image(spec) is not None)
    return dataclasses.replace(spec, critic_input=default, critic_input_spec=_box(spec))


@dataclasses.dataclass(frozen=True)
class CriticInput:
    """Row of agent i: the global state, the actions of the others one-hot (its own zeroed), and i one-hot.

    Without a global state, the observations of all agents take its place, joined in their order. Foerster et al. 2018
    (arXiv 1705.08926) give COMA's critic these inputs. A single agent gets only the state.

    Attributes:
        num_actions: n, of an agent.
        image: the state is one image [H, W, C] (or one for each agent): the rest become constant planes.
    """

    num_actions: int
    image: bool

    def __call__(self, timestep: TimeStep, action: Array) -> Array:
        """Return float32[A, F], or [A, H, W, F] of images, of actions int32[A]."""
        agents = len(action)
        shared = jax.tree.leaves(timestep.global_state)
        leaves = [leaf.astype(jnp.float32) for leaf in shared or jax.tree.leaves(timestep.observation)]
        if not self.image:
            state = jnp.concatenate([leaf.reshape(-1) for leaf in leaves])
        else:
            state = leaves[0] if shared else jnp.concatenate(list(leaves[0]), axis=-1)
        rows = jnp.broadcast_to(state, (agents, *state.shape))
        if agents == 1:
            return rows
        identity = jnp.eye(agents, dtype=jnp.float32)
        one_hot = jax.nn.one_hot(action, self.num_actions, dtype=jnp.float32)
        others = one_hot[None] * (1 - identity)[:, :, None]  # [A, A, n]
        extra = jnp.concatenate([others.reshape(agents, -1), identity], axis=1)
        planes = extra.reshape(agents, *(1,) * (state.ndim - 1), -1)
        planes = jnp.broadcast_to(planes, (*rows.shape[:-1], planes.shape[-1]))
        return jnp.concatenate([rows, planes], axis=-1)


def _boxes(spec: EnvSpec) -> list[Any]:
    boxes = spec.observation if spec.global_state is None else spec.global_state
    return jax.tree.leaves(boxes, is_leaf=lambda x: isinstance(x, Box))


def _image(spec: EnvSpec) -> tuple[int, ...] | None:
    """Return the shape [H, W, C] of the state if it is an image; images of all agents are stacked in C."""
    boxes = _boxes(spec)
    if len(boxes) != 1 or len(boxes[0].shape) != 3:
        return None
    height, width, channels = boxes[0].shape
    return height, width, channels * (spec.num_agents if spec.global_state is None else 1)


def _box(spec: EnvSpec) -> Box:
    boxes = _boxes(spec)
    agents = spec.num_agents
    image = _image(spec)
    size = sum(math.prod(box.shape) for box in boxes) * (agents if spec.global_state is None else 1)
    lead, last = (image[:2], image[2]) if image else ((), size)
    assert isinstance(spec.action, Discrete)
    extra = 0 if agents == 1 else agents * (spec.action.n + 1)
    low = min(0.0, *(box.lowest for box in boxes))  # one-hot numbers, too
    high = max(1.0, *(box.highest for box in boxes))
    return Box((*lead, last + extra), low=low, high=high)
