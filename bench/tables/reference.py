"""Parts of pages that are made from the code: settings of classes, names of published systems, the Python API."""

import dataclasses
import importlib
import inspect
import itertools
from collections.abc import Callable
from typing import Any

from envs_jax.base import load
from envs_jax.settings import format_bound
from jaxrl.common.errors import UserError
from jaxrl.integrations import published


def settings_table(name: str) -> str:
    """Return a Markdown table of the settings of a dataclass, which `name` gives as module:Class."""
    rows = ["| setting | default | range | meaning |", "|---|---|---|---|"]
    for field in dataclasses.fields(load(name, "class")):
        if "help" in field.metadata:
            bounds = " to ".join(map(format_bound, field.metadata["between"] or ()))
            meaning = field.metadata["help"].replace("|", r"\|")
            rows.append(f"| `{field.name}` | {_show_default(field.default)} | {bounds} | {meaning} |")
    return "\n".join(rows)


def _show_default(value: Any) -> str:
    """Return a default as a command line takes it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        value = ",".join(map(str, value))
    return "empty" if value == "" else str(value)


def names_table(name: str) -> str:
    """Return a Markdown table of a published system's settings: their names, ours, the conversion."""
    system = next(system for system in published.SYSTEMS if system.name == name)
    rows = ["| theirs | here | note |", "|---|---|---|"]
    others = [setting for setting in system.names if setting.flag != setting.ours]
    for (ours, note), group in itertools.groupby(others, lambda setting: (setting.ours, setting.note)):
        theirs = ", ".join(f"`{setting.theirs}`" for setting in group)
        rows.append(f"| {theirs} | {f'`{ours}`' if ours else 'none'} | {note} |")
    same = ", ".join(dict.fromkeys(f"`{setting.ours}`" for setting in system.names if setting.flag == setting.ours))
    return "\n".join(rows) + f"\n\nThe same here: {same}."


def api_list(text: str) -> str:
    """Return a list of objects with the first sentence of each.

    Args:
        text: "package.module: name, name", or "package.module.Class: member, member", or one object, such as
            "package.module.function".
    """
    path, names = split_api(text)
    owner = find_object(path)
    lines = [] if inspect.ismodule(owner) else [_describe(path.rpartition(".")[2], owner)]
    indent = "" if inspect.ismodule(owner) else "  "
    lines += [indent + _describe(name, getattr(owner, name)) for name in names]
    return "\n".join(lines)


def split_api(text: str) -> tuple[str, list[str]]:
    """Return the path and the names of "path: name, name"."""
    path, _, names = text.partition(":")
    return path, [name.strip() for name in names.split(",") if name.strip()]


def find_object(path: str) -> Any:
    """Return the module, class or function of a dotted path."""
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError:
        module, _, name = path.rpartition(".")
        return getattr(importlib.import_module(module), name)


def _describe(name: str, value: Any) -> str:
    """Return a line of a list: a function with the names of its arguments, and the first paragraph of its docstring."""
    arguments = ""
    if inspect.isfunction(value):
        parameters = list(inspect.signature(value).parameters.values())
        shown = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in parameters]
        arguments = str(inspect.Signature(shown)).replace("(self, ", "(")
    first = (inspect.getdoc(value) or "").split("\n\n")[0]
    return f"- `{name}{arguments}`: {' '.join(first.split())}"


KINDS: dict[str, Callable[[str], str]] = {"settings": settings_table, "names:": names_table, "api": api_list}


def make(name: str) -> str:
    """Return the text of a part, such as "settings jaxrl.algos.sac:Sac". Raises UserError if it cannot be made."""
    kind, _, argument = name.partition(" ")
    try:
        return KINDS[kind](argument)
    except (AttributeError, ImportError, StopIteration, TypeError, ValueError) as error:
        raise UserError(f"<!-- {name} --> cannot be made: {error!r}") from error
