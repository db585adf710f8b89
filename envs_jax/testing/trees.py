"""Names, comparison and host copies of trees of arrays and of boxes."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from envs_jax.base import Box

WEAK = ", weakly typed"  # the end of a `type_name`


def is_box(x: Any) -> bool:
    """Return whether x is the leaf of a tree of boxes."""
    return isinstance(x, Box)


def structure(tree: Any) -> Any:
    """Structure of a tree of values or of boxes."""
    return jax.tree.structure(tree, is_leaf=is_box)


def type_name(x: Any) -> str:
    """Return a type as in `float32[2, 3]`."""
    weak = WEAK if getattr(x, "weak_type", False) else ""
    return f"{x.dtype}[{', '.join(map(str, x.shape))}]{weak}"


def to_host(tree: Any) -> Any:
    """Convert a tree to NumPy, keys to their data."""
    return jax.device_get(
        jax.tree.map(lambda x: jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x, tree)
    )


def named_leaves(tree: Any) -> list[tuple[str, Any]]:
    """Return (path, leaf) pairs of a tree."""
    return [(jax.tree_util.keystr(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)]


def difference(a: Any, b: Any, tolerance: float) -> str:
    """Return the path of the first leaf in which two trees of equal structure differ, with a and b, or ""."""
    for (path, x), (_, y) in zip(named_leaves(to_host(a)), named_leaves(to_host(b)), strict=True):
        if jnp.issubdtype(x.dtype, jnp.floating):
            wide_x = x.astype(np.float64)
            wide_y = y.astype(np.float64)
            with np.errstate(invalid="ignore"):
                close = np.abs(wide_x - wide_y) <= tolerance * (1 + np.abs(wide_y))
            same = close | (wide_x == wide_y) | (np.isnan(wide_x) & np.isnan(wide_y))
        else:
            same = x == y
        if not np.all(same):
            index = np.unravel_index(np.argmin(same), same.shape)
            return f"{path or 'the value'} ({x[index]} and {y[index]})"
    return ""


def program_text(traced: Any) -> tuple[str, list[tuple[str, bytes]]]:
    """Return a traced function as comparable values: its text and its constant arrays."""
    arrays = [np.asarray(x) for x in to_host(traced.jaxpr.consts)]
    return str(traced.jaxpr), [(type_name(x), x.tobytes()) for x in arrays]
