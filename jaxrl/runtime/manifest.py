"""Manifest of a checkpoint: names, types and shapes of all leaves, and SHA-256 of every file."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl.common.files import write_atomically

ARRAYS, META, MANIFEST = "arrays", "meta.json", "manifest.json"


_X64_PAIRS = ({"float32", "float64"}, {"int32", "int64"}, {"uint32", "uint64"}, {"complex64", "complex128"})
_WIDE = ("float64", "int64", "uint64", "complex128")


class Leaf(NamedTuple):
    """The description of one leaf; `kind` is the dtype, or key<...> for a typed PRNG key."""

    name: str
    kind: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.kind}[{', '.join(map(str, self.shape))}]"


def leaves_of(tree: Any, prefix: str | None = None) -> list[Leaf]:
    """Return all leaves of a pytree in order. Raises TypeError: a leaf is not an array, or two leaves have one name."""
    leaves = []
    for path, value in jax.tree_util.tree_flatten_with_path(tree)[0]:
        own = jax.tree_util.keystr(path, simple=True, separator=".")
        name = ".".join(part for part in (prefix, own) if part)
        if not hasattr(value, "shape") or not hasattr(value, "dtype"):
            raise TypeError(f"leaf {name} of the state is {type(value).__name__}, not an array")
        leaves.append(Leaf(name, str(value.dtype), tuple(value.shape)))
    if len({leaf.name for leaf in leaves}) < len(leaves):
        raise TypeError("two leaves of the state have the same name; rename a dictionary key that holds a dot")
    return leaves


def is_stored(leaf: Leaf) -> bool:
    """Return whether a leaf has elements to store: orbax refuses empty arrays."""
    return 0 not in leaf.shape


def is_key(value: Any) -> bool:
    """Return whether an array holds typed PRNG keys."""
    return bool(jnp.issubdtype(value.dtype, jax.dtypes.prng_key))


def plain_array(value: Any) -> Any:
    """Return the array itself, or the data of a typed PRNG key."""
    return jax.random.key_data(value) if is_key(value) else value


def difference(wanted: list[Leaf], found: list[Leaf], whole: bool) -> str | None:
    """Describe the first leaf that differs, or return None; extra leaves count only if `whole`."""
    stored = {leaf.name: leaf for leaf in found}
    for leaf in wanted:
        if leaf.name not in stored:
            return f"{leaf.name} is {leaf} here and absent there"
        if leaf != stored[leaf.name]:
            return f"{leaf.name} is {leaf} here and {stored[leaf.name]} there{_x64_hint(leaf, stored[leaf.name])}"
    names = {leaf.name for leaf in wanted}
    surplus = [leaf for leaf in found if leaf.name not in names] if whole else []
    return f"{surplus[0].name} is absent here and {surplus[0]} there" if surplus else None


def _x64_hint(wanted: Leaf, found: Leaf) -> str:
    """Return a remark on two leaves that differ as those of a program with and without x64, else ""."""
    pair = {wanted.kind, found.kind}
    if wanted.shape != found.shape or pair not in _X64_PAIRS:
        return ""
    there, here = ("set", "unset") if found.kind in _WIDE else ("unset", "set")
    return f" (JAX_ENABLE_X64 was {there} there and is {here} here: have it {there} here too)"


def _digest(content: Path | str) -> str:
    """Return the SHA-256 of a file or of a text."""
    if isinstance(content, str):
        return hashlib.sha256(content.encode()).hexdigest()
    with content.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_manifest(folder: Path, arrays: Path, step: int, leaves: list[Leaf], best: bool, run_id: str = "") -> None:
    """Write the manifest of a checkpoint whose other files are complete. Raises OSError.

    Args:
        folder: with META; orbax's own notes there change when it commits and are not read.
        arrays: what will be the folder ARRAYS there when orbax commits.
        step, leaves, best, run_id: see `Manifest`.
    """
    files = sorted(path for path in arrays.rglob("*") if path.is_file())
    contents = {
        "step": step,
        "best": best,
        "run": run_id,
        "leaves": [list(leaf) for leaf in leaves],
        "files": {META: _digest(folder / META)}
        | {f"{ARRAYS}/{path.relative_to(arrays).as_posix()}": _digest(path) for path in files},
    }
    text = json.dumps(contents)
    write_atomically(folder / MANIFEST, json.dumps({"sha256": _digest(text), "contents": contents}))


class Manifest(NamedTuple):
    """The content of a manifest: the checkpoint's number, whether it was the best, digests by file, and the leaves.

    `run_id` is that of the run that wrote it, "" for older checkpoints.
    """

    step: int
    best: bool
    run_id: str
    files: dict[str, str]
    leaves: list[Leaf]


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a checkpoint. Raises OSError, ValueError: it is absent or damaged."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except RecursionError:
        raise ValueError("not a manifest") from None
    if not isinstance(manifest, dict) or set(manifest) != {"sha256", "contents"}:
        raise ValueError("not a manifest")
    contents = manifest["contents"]
    if _digest(json.dumps(contents)) != manifest["sha256"]:
        raise ValueError("its checksum differs")
    try:
        leaves = [Leaf(name, kind, tuple(shape)) for name, kind, shape in contents["leaves"]]
        return Manifest(
            contents["step"], contents.get("best", False), contents.get("run", ""), dict(contents["files"]), leaves
        )
    except (TypeError, KeyError, AttributeError):
        raise ValueError("not a manifest") from None


def find_damage(folder: Path) -> str | None:
    """Describe the damage of a committed checkpoint, or return None."""
    if not folder.is_dir():
        return "it is no folder" if os.path.lexists(folder) else "it does not exist"
    try:
        manifest = read_manifest(folder)
    except (OSError, ValueError) as error:
        return f"{MANIFEST} cannot be used: {getattr(error, 'strerror', None) or error}"
    if folder.name != f"{manifest.step:010d}":  # renamed, swapped or copied, perhaps without the leading zeros
        wrong_name = int(folder.name) == manifest.step
        return f"holds step {manifest.step}" + (f", whose folder is called {manifest.step:010d}" if wrong_name else "")
    for name, digest in manifest.files.items():
        try:
            if _digest(folder / name) != digest:
                return f"{name} has changed since it was written"
        except OSError as error:
            return f"{name} cannot be read: {error.strerror}"
    return None
