"""Networks whose parameters are one vector, so that an optimizer step is a few operations instead of a few per leaf."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from envs_jax.base import Array
from jaxrl.common.types import Key, Params
from jaxrl.nn import optimizers


@dataclasses.dataclass(frozen=True, eq=False)
class Packed:
    """A flax module whose parameters are one vector float32[P], or an ensemble of such modules.

    Attributes:
        module: the flax module.
        inputs: shapes of a call's arguments, with a batch axis.
        members: C modules with parameters of their own, leaves [C, ...], outputs [C, ...]; 0 = one without that axis.
    """

    module: Any
    inputs: tuple[tuple[int, ...], ...]
    members: int = 0

    def init(self, key: Key) -> Array:
        """Return fresh parameters float32[P]."""
        return optimizers.ravel(self._fresh(key))

    def apply(self, params: Array | Params, *inputs: Array) -> Array:
        """Return the outputs for parameters float32[P], or as flax has them."""
        tree = params if isinstance(params, Mapping) else self.tree(params)
        out: Array
        if self.members > 1:
            out = jax.vmap(lambda member: self.module.apply(member, *inputs))(tree)
        elif self.members == 1:
            out = self.module.apply(jax.tree.map(lambda leaf: leaf[0], tree), *inputs)[None]
        else:
            out = self.module.apply(tree, *inputs)
        return out

    def tree(self, vector: Array) -> Params:
        """Return parameters as flax has them."""
        return optimizers.unravel(vector, self.shapes)

    def vector(self, tree: Params) -> Array:
        """Invert `tree`."""
        return optimizers.ravel(tree)

    def of_tree(self, chain: optax.GradientTransformation) -> optax.GradientTransformation:
        """Return an optax chain for the vector, given one for the parameters as flax has them."""
        return optimizers.of_tree(chain, self.shapes)

    @functools.cached_property
    def shapes(self) -> Any:
        """Return the tree's ShapeDtypeStructs."""
        return jax.eval_shape(self._fresh, jax.random.key(0))

    def _fresh(self, key: Key) -> Params:
        inputs = [jnp.zeros(shape, jnp.float32) for shape in self.inputs]
        if self.members:
            return jax.vmap(lambda k: self.module.init(k, *inputs))(jax.random.split(key, self.members))
        return self.module.init(key, *inputs)
