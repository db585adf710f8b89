"""The leaves of a training state by name, and a checkpoint's manifest: its leaves, and SHA-256 of its files."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from jaxrl.common.files import write_atomically

ARRAYS, META, MANIFEST = "arrays", "meta.json", "manifest.json"
CHANGING = ""  # in place of the digest of META while it is replaced, see `amend`
_WIDE = ("float64", "int64", "uint64", "complex128")  # types that there are only with JAX_ENABLE_X64
_Result = TypeVar("_Result")


class Leaf(NamedTuple):
    """The description of one leaf; `kind` is the dtype, or key<...> for a typed PRNG key."""

    name: str
    kind: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.kind}[{', '.join(map(str, self.shape))}]"


def list_leaves(tree: Any, prefix: str | None = None) -> list[Leaf]:
    """Return all leaves of a pytree in order. Raises TypeError: a leaf is not an array, or two leaves have one name."""
    leaves = []
    for path, value in jax.tree_util.tree_flatten_with_path(tree)[0]:
        name = ".".join(filter(None, (prefix, jax.tree_util.keystr(path, simple=True, separator="."))))
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


def find_difference(expected: list[Leaf], stored: list[Leaf], whole: bool) -> str | None:
    """Describe the first leaf that differs, or return None; further stored leaves count only if `whole`."""
    by_name = {leaf.name: leaf for leaf in stored}
    for leaf in expected:
        other = by_name.pop(leaf.name, None)
        if other is None:
            return f"{leaf.name} is {leaf} here and absent there"
        if leaf != other:
            is_width = leaf.shape == other.shape and (leaf.kind in _WIDE) != (other.kind in _WIDE)
            hint = " (set JAX_ENABLE_X64 here as it was there)" if is_width else ""
            return f"{leaf.name} is {leaf} here and {other} there{hint}"
    return next((f"{leaf.name} is absent here and {leaf} there" for leaf in by_name.values() if whole), None)


class Manifest(NamedTuple):
    """A checkpoint's number, leaves, digests and sizes (bytes) by file, whether it was the best, and its run's id."""

    step: int
    leaves: list[Leaf]
    files: dict[str, str]
    sizes: dict[str, int]
    best: bool = False
    run: str = ""


def _digest(content: Path | str) -> str:
    if isinstance(content, str):
        return hashlib.sha256(content.encode()).hexdigest()
    with content.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_manifest(folder: Path, arrays: Path, step: int, leaves: list[Leaf], best: bool, run: str = "") -> None:
    """Write the manifest of a checkpoint with the files META in `folder` and all in `arrays`. Raises OSError."""
    paths = {f"{ARRAYS}/{path.relative_to(arrays)}": path for path in arrays.rglob("*") if path.is_file()}
    paths = {META: folder / META, **paths}
    digests = {name: _digest(path) for name, path in paths.items()}
    sizes = {name: path.stat().st_size for name, path in paths.items()}
    _write(folder, Manifest(step, leaves, digests, sizes, best, run))


def _write(folder: Path, manifest: Manifest) -> None:
    contents = manifest._asdict()
    write_atomically(folder / MANIFEST, json.dumps({"sha256": _digest(json.dumps(contents)), "contents": contents}))


def amend(folder: Path, meta: str, best: bool) -> None:
    """Replace META of an intact checkpoint, and note whether it is the best; a kill leaves it intact at any moment.

    Raises OSError: a file cannot be written; ValueError: the manifest is damaged.
    """
    manifest = read_manifest(folder)
    sizes = {name: size for name, size in manifest.sizes.items() if name != META}
    _write(folder, manifest._replace(files=manifest.files | {META: CHANGING}, sizes=sizes, best=best))
    write_atomically(folder / META, meta)
    digests = manifest.files | {META: _digest(folder / META)}
    _write(folder, manifest._replace(files=digests, sizes=sizes | {META: (folder / META).stat().st_size}, best=best))


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a checkpoint. Raises ValueError: it is absent or damaged."""
    try:
        stored = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        if _digest(json.dumps(stored["contents"])) != stored["sha256"]:
            raise ValueError("its checksum differs")
        manifest = Manifest(**stored["contents"])
        _check_types(manifest)
        return manifest._replace(leaves=[Leaf(name, kind, tuple(shape)) for name, kind, shape in manifest.leaves])
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(f"{MANIFEST} cannot be used: {getattr(error, 'strerror', None) or error}") from None


def _check_types(manifest: Manifest) -> None:
    """Raise ValueError if entries have other types than they are written with."""
    wrong = {
        "step": not is_count(manifest.step),
        "leaves": not isinstance(manifest.leaves, list) or not all(map(_is_leaf, manifest.leaves)),
        "files": not isinstance(manifest.files, dict) or not all(map(_is_file, manifest.files.items())),
        "best": not isinstance(manifest.best, bool),
        "run": not isinstance(manifest.run, str),
        "sizes": not isinstance(manifest.sizes, dict) or not all(map(is_count, manifest.sizes.values())),
    }
    if names := [name for name, is_wrong in wrong.items() if is_wrong]:
        raise ValueError(f"its entry '{names[0]}' does not have the expected form")
    if len({name for name, *_ in manifest.leaves}) < len(manifest.leaves):
        raise ValueError("it lists a leaf twice")
    if META not in manifest.files:
        raise ValueError(f"it does not list {META}")


def is_count(value: Any) -> bool:
    """Return whether a value of JSON is an integer that counts something."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def _is_leaf(value: Any) -> bool:
    if not isinstance(value, list) or len(value) != 3:
        return False
    name, kind, shape = value
    return isinstance(name, str) and isinstance(kind, str) and isinstance(shape, list) and all(map(is_count, shape))


def _is_file(item: tuple[str, Any]) -> bool:
    path = PurePosixPath(item[0])
    return isinstance(item[1], str) and not path.is_absolute() and ".." not in path.parts


def read_meta(folder: Path, manifest: Manifest) -> dict[str, Any]:
    """Return the JSON object of a checkpoint. Raises ValueError: it is absent, damaged, or no object."""
    try:
        content = (folder / META).read_bytes()
    except OSError as error:
        raise ValueError(f"{META} cannot be read: {error.strerror}") from None
    if manifest.files[META] not in (CHANGING, hashlib.sha256(content).hexdigest()):
        raise ValueError(f"{META} has changed since it was written")
    try:
        meta = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{META} cannot be used: {error}") from None
    if not isinstance(meta, dict):
        raise ValueError(f"{META} is not a JSON object")
    return meta


def read_both(folder: Path) -> tuple[Manifest, dict[str, Any]]:
    """Return manifest and JSON object of a checkpoint. Raises ValueError: one is absent or damaged."""
    return _read_with_manifest(folder, lambda manifest: (manifest, read_meta(folder, manifest)))


def _read_with_manifest(folder: Path, read: Callable[[Manifest], _Result]) -> _Result:
    """Return what `read` makes of the manifest; reads again if `amend` has replaced it meanwhile."""
    manifest = read_manifest(folder)
    while True:
        try:
            return read(manifest)
        except ValueError:
            newer = read_manifest(folder)
            if newer == manifest:
                raise
            manifest = newer


def check_sizes(folder: Path, step: int, arrays: Path | None = None) -> None:
    """Check that all files of a checkpoint are there, with their sizes, which notices no changed bytes but is quick.

    Before it is committed, its `arrays` are elsewhere. Raises ValueError: the damage.
    """
    manifest = read_manifest(folder)
    if manifest.step != step:
        raise ValueError(f"it holds step {manifest.step}")
    for name in manifest.files:
        path = arrays / PurePosixPath(name).relative_to(ARRAYS) if arrays and name != META else folder / name
        try:
            size = path.stat().st_size
        except OSError as error:
            raise ValueError(f"{name} cannot be read: {error.strerror}") from None
        if size != (expected := manifest.sizes.get(name, size)):
            raise ValueError(f"{name} has {size:,} bytes instead of {expected:,}")


def verify(folder: Path) -> Manifest:
    """Return the manifest of a committed checkpoint that is intact. Raises ValueError: the damage."""
    return _read_with_manifest(folder, lambda manifest: _verify(folder, manifest))


def _verify(folder: Path, manifest: Manifest) -> Manifest:
    if folder.name != f"{manifest.step:010d}":  # renamed, exchanged or copied
        raise ValueError(f"it holds step {manifest.step}")
    for name, digest in manifest.files.items():
        try:
            is_changed = digest != CHANGING and _digest(folder / name) != digest
        except OSError as error:
            raise ValueError(f"{name} cannot be read: {error.strerror}") from None
        if is_changed:
            raise ValueError(f"{name} has changed since it was written")
    read_meta(folder, manifest)
    return manifest
