"""The settings that algorithms and environments declare, kept between commands: `--help` need not import JAX.

A command that begins without JAX takes the fields of the classes of these packages from a file in the cache folder.
The file belongs to one installation: on the first call, and after any change of the sources' sizes and times or of
the versions of Python and JAX, the classes are imported and it is written anew. Others' classes are always imported.
"""

import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import os
import sys
import typing
from pathlib import Path
from typing import Any, Literal

import envs_jax
from envs_jax.settings import Bounds, registry
from jaxrl import algos
from jaxrl.common.errors import UsageError, usage_errors
from jaxrl.common.files import cache_root, write_atomically

_PACKAGES = ("jaxrl", "envs_jax")
_KINDS: dict[str, Any] = {kind.__name__: kind for kind in (bool, int, float, str)}
_WITHOUT_JAX = "jax" not in sys.modules  # a command; in a process with JAX the classes themselves are at hand


@dataclasses.dataclass(frozen=True)
class Field:
    """A setting as declared by its dataclass."""

    name: str
    kind: Any
    default: Any
    section: str
    help: str
    flag: bool  # whether the command line may set it
    between: Bounds | None


def fields_of(cls: type, section: str) -> dict[str, Field]:
    """Return the settings that a dataclass declares. Raises UsageError for one that cannot be a flag."""
    kinds = typing.get_type_hints(cls)
    given = ("spec", "layout", "custom") if section == "algorithm" else ()
    fields = {
        f.name: Field(
            *(f.name, kinds[f.name], f.default, section, f.metadata.get("help", "")),
            *(f.metadata.get("flag", True), f.metadata.get("between")),
        )
        for f in dataclasses.fields(cls)
        if f.init and f.name not in given
    }
    for field in fields.values():
        if field.default is dataclasses.MISSING:
            raise UsageError(f"the {section} setting '{field.name}' has no default: declare it with setting(...)")
        inner = typing.get_args(field.kind)[:1] if typing.get_origin(field.kind) is tuple else (field.kind,)
        if inner and inner[0] not in (bool, int, float, str) and typing.get_origin(inner[0]) is not Literal:
            raise UsageError(
                f"the {section} setting '{field.name}' is of type {field.kind}: declare it as bool, int, float, str, "
                "a Literal or a tuple of one of them"
            )
    return fields


def fields_named(name: str, section: str) -> dict[str, Field]:
    """Return the settings of an algorithm or environment by name. Raises UsageError for an unknown one."""
    if (known := _lookup(section, name)) is not None:
        return {key: _decoded(key, section, entry) for key, entry in known.items()}
    with usage_errors():
        cls: type = algos.find(name) if section == "algorithm" else envs_jax.base.find(name)
    fields = fields_of(cls, section)
    _keep(section, name, {key: _encoded(field) for key, field in fields.items()})
    return fields


def has_opponents(env: str) -> bool:
    """Return whether an environment takes actions of opponents. Raises UsageError for an unknown one."""
    known = _lookup("opponents", env)
    if known is None:
        with usage_errors():
            known = {"accepted": hasattr(envs_jax.base.find(env), "accepts_opponent_actions")}
        _keep("opponents", env, known)
    return bool(known["accepted"])


def _encoded(field: Field) -> dict[str, Any]:
    """Return a field in the types of JSON."""
    entry = {name: getattr(field, name) for name in ("default", "help", "flag", "between")}
    return {"kind": _encoded_kind(field.kind), **entry}


def _decoded(name: str, section: str, entry: dict[str, Any]) -> Field:
    """Return the field that `_encoded` wrote."""
    kind, default, between = _decoded_kind(entry["kind"]), entry["default"], entry["between"]
    default = tuple(default) if isinstance(default, list) else default
    between = None if between is None else (between[0], between[1])
    return Field(name, kind, default, section, entry["help"], entry["flag"], between)


def _encoded_kind(kind: Any) -> Any:
    if typing.get_origin(kind) is Literal:
        return {"literal": list(typing.get_args(kind))}
    if typing.get_origin(kind) is tuple:
        return {"tuple": ["..." if part is Ellipsis else _encoded_kind(part) for part in typing.get_args(kind)]}
    return kind.__name__


def _decoded_kind(entry: Any) -> Any:
    if isinstance(entry, str):
        return _KINDS[entry]
    if "literal" in entry:
        return Literal[tuple(entry["literal"])]
    return tuple[tuple(Ellipsis if part == "..." else _decoded_kind(part) for part in entry["tuple"])]  # type: ignore[misc]


# The file


def _lookup(section: str, name: str) -> dict[str, Any] | None:
    """Return what the class of this name declares, if that is known without importing it."""
    return _kept().get(f"{section} {name}") if _WITHOUT_JAX and _is_ours(section, name) else None


def _keep(section: str, name: str, facts: dict[str, Any]) -> None:
    """Keep what a class declares for later commands; failures only cost time."""
    if not _WITHOUT_JAX or not _is_ours(section, name):
        return
    _kept()[f"{section} {name}"] = facts
    try:
        _file().parent.mkdir(parents=True, exist_ok=True)
        write_atomically(_file(), json.dumps({"sources": _sources(), "classes": _kept()}))
    except (OSError, RuntimeError):  # RuntimeError: there is no home directory
        pass


def _is_ours(section: str, name: str) -> bool:
    """Return whether the sources of the class are among those that the file depends on."""
    path = (algos.ALGORITHMS if section == "algorithm" else registry).get(name, "")
    return path.partition(".")[0] in _PACKAGES


@functools.cache
def _kept() -> dict[str, dict[str, Any]]:
    try:
        found = json.loads(_file().read_text(encoding="utf-8"))
        return dict(found["classes"]) if found["sources"] == _sources() else {}
    except (OSError, RuntimeError, ValueError, LookupError, TypeError):
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
    """Return a digest of the sources' names, sizes and times, and of the versions of Python and JAX."""
    digest = hashlib.sha256(f"{sys.version} {importlib.metadata.version('jax')}".encode())
    for folder in _folders():
        for path in sorted(folder.rglob("*.py")):
            stat = path.stat()
            digest.update(f"{path}:{stat.st_size}:{stat.st_mtime_ns};".encode())
    return digest.hexdigest()
