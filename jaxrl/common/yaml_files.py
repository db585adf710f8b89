"""Checked reading of YAML mappings written by users."""

import re
from pathlib import Path
from typing import Any

import yaml

from envs_jax.settings import short_repr
from jaxrl.common.errors import UsageError
from jaxrl.common.files import read_bounded


class _Reader(yaml.SafeLoader):
    """A loader that refuses duplicate keys, of which YAML would take the last, and aliases."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("it holds an alias (*name): write the value itself")
        return super().compose_node(parent, index)

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (yaml.YAMLError, RecursionError):
            raise
        except Exception as error:  # any error in a number, a date or a tag
            raise yaml.YAMLError(f"the value in line {node.start_mark.line + 1} cannot be read ({error})") from None

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        mapping = super().construct_mapping(node, deep)
        lines: dict[Any, int] = {}
        for key_node, _ in node.value:
            key = self.construct_object(key_node)
            line = key_node.start_mark.line + 1
            if key in lines:
                raise yaml.YAMLError(
                    f"the key {short_repr(key)} is there twice, in lines {lines[key]} and {line}: remove one of them"
                )
            lines[key] = line
        return mapping


_NUMBERS = {  # YAML's rules without those by which 010 is 8 and 1:30 is 90: such words stay words
    "tag:yaml.org,2002:int": re.compile(r"[-+]?(0|[1-9][0-9]*|[1-9][0-9]{0,2}(_[0-9]{3})+)$"),
    "tag:yaml.org,2002:float": re.compile(
        r"[-+]?([0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*)([eE][-+][0-9]+)?$|[-+]?\.(inf|Inf|INF)$|\.(nan|NaN|NAN)$"
    ),
}
_Reader.yaml_implicit_resolvers = {
    first: [(tag, _NUMBERS.get(tag, rule)) for tag, rule in rules]
    for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
}

_MAX_YAML_BYTES = 2**20  # bytes of a configuration
_MAX_REASON = 300  # characters


def read_mapping(path: Path) -> dict[str, Any]:
    """Read the mapping of a YAML file. Raises UsageError: it is unreadable or not a mapping."""
    try:
        loaded = yaml.load(read_bounded(path, _MAX_YAML_BYTES).decode(), _Reader)
    except OSError as error:
        raise UsageError(f"cannot read the configuration {path} ({error.strerror}): name another file") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        if isinstance(error, RecursionError):
            reason = "it is nested too deeply"
        elif isinstance(error, UnicodeDecodeError):
            reason = "it is not a text file"
        elif isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
            mark = error.problem_mark
            reason = f"{error.problem} in line {mark.line + 1}, column {mark.column + 1}"
        else:
            reason = " ".join(str(error).split())
        raise UsageError(f"cannot read the configuration {path}: {reason[:_MAX_REASON]}") from None
    if not isinstance(loaded, dict) or not all(isinstance(key, str) for key in loaded):
        raise UsageError(f"{path} must be a mapping of setting names to values")
    return loaded
