"""The settings that algorithms and environments declare, kept between commands: `--help` need not import JAX.

A command that begins without JAX takes the fields of registered classes from a file in the cache folder. The file
belongs to the sources of this installation, by their sizes and times: after any change, and on the first call, the
classes are imported and it is written anew. User-defined classes are always imported.
"""

import functools
import hashlib
import json
import os
import sys
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from jaxrl.common.files import cache_root, write_atomically

_PACKAGES = ("jaxrl", "envs_jax")
_KINDS: dict[str, Any] = {kind.__name__: kind for kind in (bool, int, float, str)}
_WITHOUT_JAX = "jax" not in sys.modules  # a command; in a process with JAX the classes themselves are at hand

Declared = dict[str, Any]  # {setting: its entries}, or other facts, in the types of JSON


def lookup(section: str, name: str) -> Declared | None:
    """Return what the class of this name declares, if that is known without importing it."""
    return _kept().get(f"{section} {name}") if _WITHOUT_JAX else None


def keep(section: str, name: str, declared: Declared) -> None:
    """Keep what a registered class declares for later commands; failures only cost time."""
    if not _WITHOUT_JAX or ":" in name:
        return
    _kept()[f"{section} {name}"] = declared
    try:
        _file().parent.mkdir(parents=True, exist_ok=True)
        write_atomically(_file(), json.dumps({"sources": _sources(), "classes": _kept()}))
    except OSError:
        pass


def encode_kind(kind: Any) -> Any:
    """Return the type of a setting as JSON."""
    if typing.get_origin(kind) is Literal:
        return {"literal": list(typing.get_args(kind))}
    if typing.get_origin(kind) is tuple:
        return {"tuple": ["..." if part is Ellipsis else encode_kind(part) for part in typing.get_args(kind)]}
    return kind.__name__


def decode_kind(entry: Any) -> Any:
    """Return the type that `encode_kind` wrote."""
    if isinstance(entry, Mapping) and "literal" in entry:
        return Literal[tuple(entry["literal"])]
    if isinstance(entry, Mapping):
        return tuple[tuple(Ellipsis if part == "..." else decode_kind(part) for part in entry["tuple"])]  # type: ignore[misc]
    return _KINDS[entry]


@functools.cache
def _kept() -> dict[str, Declared]:
    try:
        found = json.loads(_file().read_text(encoding="utf-8"))
        return dict(found["classes"]) if found["sources"] == _sources() else {}
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return {}


@functools.cache
def _folders() -> tuple[Path, ...]:
    root = Path(__file__).resolve().parents[2]
    return tuple(root / package for package in _PACKAGES)


def _file() -> Path:
    """Return the file of this installation: several checkouts do not overwrite each other's."""
    return cache_root() / f"settings-{hashlib.sha256(os.fsencode(_folders()[0])).hexdigest()[:16]}.json"


@functools.cache
def _sources() -> str:
    """Return a digest of the sources' names, sizes and times, and of Python's version."""
    digest = hashlib.sha256(sys.version.encode())
    for folder in _folders():
        for path in sorted(folder.rglob("*.py")):
            stat = path.stat()
            digest.update(f"{path}:{stat.st_size}:{stat.st_mtime_ns};".encode())
    return digest.hexdigest()
