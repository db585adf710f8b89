"""SHA-256 of a training state, in memory or in a checkpoint: equal digests are equal bits."""

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from jaxrl.runtime.checkpoint import committed_steps
from jaxrl.runtime.manifest import Leaf, is_stored, list_leaves, plain_array, read_manifest


def digest(state: Any) -> str:
    """Return the digest of names, types, shapes and bits of all leaves of a state."""
    return _digest(list_leaves(state), [plain_array(value) for value in jax.tree.leaves(state)])


def checkpoint_digest(directory: Path, step: int | None = None) -> str:
    """Return the same of the state in a checkpoint, by default the newest of the folder."""
    folder = directory / f"{committed_steps(directory)[-1] if step is None else step:010d}"
    leaves = read_manifest(folder).leaves
    as_numpy = {leaf.name: ocp.RestoreArgs(restore_type=np.ndarray) for leaf in leaves if is_stored(leaf)}
    arrays = ocp.PyTreeCheckpointer().restore(folder / "arrays", restore_args=as_numpy)
    return _digest(leaves, [arrays.get(leaf.name) for leaf in leaves])


def _digest(leaves: list[Leaf], values: Iterable[Any]) -> str:
    total = hashlib.sha256()
    for leaf, value in sorted(zip(leaves, values, strict=True), key=lambda pair: pair[0].name):
        total.update(f"{leaf.name} {leaf}\n".encode())
        total.update(np.ascontiguousarray(value).tobytes() if is_stored(leaf) else b"")
    return total.hexdigest()
