"""The settings that algorithms and environments declare."""

import dataclasses
import typing
from typing import Any, Literal

import envs_jax
from envs_jax.settings import Bounds
from jaxrl import algos
from jaxrl.common.errors import UsageError, usage_errors


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
    arguments = ("spec", "layout", "custom") if section == "algorithm" else ()
    fields = {
        f.name: Field(
            *(f.name, kinds[f.name], f.default, section, f.metadata.get("help", "")),
            *(f.metadata.get("flag", True), f.metadata.get("between")),
        )
        for f in dataclasses.fields(cls)
        if f.init and f.name not in arguments
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


def find_fields(name: str, section: str) -> dict[str, Field]:
    """Return the settings of an algorithm or environment by name. Raises UsageError for an unknown one."""
    with usage_errors():
        cls: type = algos.find(name) if section == "algorithm" else envs_jax.base.find(name)
    return fields_of(cls, section)


def has_opponents(env: str) -> bool:
    """Return whether an environment takes actions of opponents. Raises UsageError for an unknown one."""
    with usage_errors():
        return hasattr(envs_jax.base.find(env), "accepts_opponent_actions")
