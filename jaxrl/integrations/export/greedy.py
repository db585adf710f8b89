"""The greedy policy as a function of flat arrays, with the parameters inside and a free batch size."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.export
import jax.numpy as jnp

from envs_jax.base import Array
from envs_jax.progress import final_progress
from jaxrl.integrations.export.units import ActionUnits
from jaxrl.runtime.policy import Policy

PLATFORMS = ("cpu", "cuda")


@dataclasses.dataclass(frozen=True)
class Argument:
    """An array that the exported function takes or returns."""

    # a field of `TimeStep`, with the path of a leaf where the field has several; "action", or part of a carry
    name: str
    shape: tuple[int, ...]  # without the batch axis, which is the first one
    dtype: str  # name of a NumPy dtype

    def struct(self, batch: Any) -> jax.ShapeDtypeStruct:
        """Return the array's ShapeDtypeStruct; `batch` is a number or a symbolic dimension."""
        return jax.ShapeDtypeStruct((batch, *self.shape), self.dtype)


@dataclasses.dataclass(frozen=True, eq=False)
class Greedy:
    """The greedy policy as `function(*inputs)` -> action, with a carry `function(*inputs, carry)` -> action, carry.

    Actions are the environment's own, see `units`; a tuple of them where there are several.
    """

    inputs: tuple[Argument, ...]  # fields of the time step that the actions depend on, in order
    # what the function returns for its next call, a tuple of arrays; none for most policies. At the first step it may
    # hold anything, such as zeros: it is reset where the input "first" is True.
    carry: tuple[Argument, ...]
    actions: tuple[Argument, ...]  # its result, [batch, agents, ...]; one for each agent where their shapes differ
    function: Callable[..., Any]  # pure, for arrays with a batch axis

    def structs(self, batch: Any) -> list[Any]:
        carry = tuple(argument.struct(batch) for argument in self.carry)
        return [*(argument.struct(batch) for argument in self.inputs), *([carry] if carry else [])]


def make_greedy(policy: Policy) -> Greedy:
    """Return the greedy function of a policy; it takes only the arrays that the actions depend on."""
    shapes = policy._blank
    units = ActionUnits.from_env(policy.env)
    fields, structure = jax.tree_util.tree_flatten_with_path(shapes)
    indices = jax.ShapeDtypeStruct((1,), jnp.int32)
    carries, carry_structure = jax.tree_util.tree_flatten_with_path(
        jax.eval_shape(policy.algo.init_carry, policy.params, shapes, indices)
    )
    count = len(fields)
    leaves = [_argument(path, leaf) for path, leaf in fields]
    leaves += [_argument((jax.tree_util.GetAttrKey("carry"), *path), leaf) for path, leaf in carries]
    structs = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves]

    def act_once(carry_indices: Sequence[int], *arrays: Array) -> list[Array]:
        """Act in one environment: leaves of the time step, then of the carry -> actions, then these of the carry."""
        single = [x[None] for x in arrays]
        timestep = jax.tree_util.tree_unflatten(structure, single[:count])
        fresh = policy.algo.init_carry(policy.params, timestep, jnp.zeros(1, jnp.int32))
        carry = jax.tree.map(
            lambda new, old: jnp.where(timestep.first[0], new, old),
            fresh,
            jax.tree_util.tree_unflatten(carry_structure, single[count:]),
        )
        keys = jax.random.split(jax.random.key(0), 1)
        action, carry, _ = policy.algo.act(policy.params, carry, timestep, keys, final_progress(), "greedy")
        next_carry = jax.tree.leaves(carry)
        return [*units.convert(action[0]), *(next_carry[i][0] for i in carry_indices)]

    carry_indices: list[int] = []  # leaves of the carry that actions depend on, now or later
    while True:
        function = jax.jit(functools.partial(act_once, carry_indices))
        used = jax.export.export(function, platforms=PLATFORMS)(*structs).module_kept_var_idx
        needed = [i - count for i in used if i >= count]
        if set(needed) <= set(carry_indices):
            break
        carry_indices = sorted({*carry_indices, *needed})
    inputs = [i for i in used if i < count]
    actions = jax.eval_shape(functools.partial(act_once, ()), *structs)

    def act_batch(*arrays: Any) -> Any:
        used_values = dict(zip(inputs, arrays[: len(inputs)], strict=True))
        used_values |= zip([count + i for i in carry_indices], arrays[-1] if carry_indices else (), strict=True)

        def act_row(values: dict[int, Array]) -> list[Array]:
            blanks = [jnp.zeros(leaf.shape, leaf.dtype) for leaf in leaves]
            return act_once(carry_indices, *(values.get(i, blank) for i, blank in enumerate(blanks)))

        results = jax.vmap(act_row)(used_values)
        chosen = results[: len(actions)]
        carry = results[len(actions) :]
        action = chosen[0] if len(chosen) == 1 else tuple(chosen)
        return (action, tuple(carry)) if carry_indices else action

    return Greedy(
        tuple(leaves[i] for i in inputs),
        tuple(leaves[count + i] for i in carry_indices),
        tuple(
            Argument(name, one.shape, jnp.dtype(one.dtype).name) for name, one in zip(units.names, actions, strict=True)
        ),
        act_batch,
    )


def _argument(path: tuple[Any, ...], leaf: Any) -> Argument:
    """Return the argument for a leaf [1, ...]; the path names fields, keys and indices."""
    name = jax.tree_util.keystr(path, simple=True, separator=".")
    return Argument(name, tuple(leaf.shape[1:]), jnp.dtype(leaf.dtype).name)
