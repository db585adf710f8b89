"""Presets: YAML files under configs/, in a checkout or in the installed package."""

import sys
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any

import envs_jax
from envs_jax.settings import closest, short_repr
from jaxrl import algos
from jaxrl.common.errors import UsageError, usage_errors
from jaxrl.common.files import expand_home, is_file
from jaxrl.common.yaml_files import read_mapping
from jaxrl.integrations import published
from jaxrl.runtime.config import CPU, TOTALS, Config, build, find_env_name, find_fields, read_yaml
from jaxrl.runtime.run_directory import CONFIG

_NO_FILE = "the command line"  # named in errors about settings that are from no file


def presets() -> dict[str, Path]:
    """Return all presets by name: of this checkout, or of the installed package."""
    root = Path(__file__).resolve().parents[2]
    checkout = (root / "pyproject.toml").is_file()  # where packages are installed, another one may own a folder configs
    folder = root / "configs" if checkout else Path(str(resources.files("jaxrl.configs")))
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def find_preset(name: str) -> Path:
    """Return the file of `--config`: a path, or the name of a preset. Raises UsageError with the closest name."""
    path = Path(expand_home(name))
    if is_file(path):
        return path
    if is_file(path / CONFIG):
        raise UsageError(f"{name} is a run: use --config {path / CONFIG} to start it again, or --resume {name}")
    stem = path.stem if path.suffix == ".yaml" else name
    if stem in presets() and (path.parent == Path() or path.parent.name == "configs"):
        return presets()[stem]
    if path.parent != Path() and path.parent.name != "configs":
        raise UsageError(
            f"there is no file {short_repr(name)}: name a YAML file that is there, or a preset, such as coma_quick"
        )
    raise UsageError(f"there is neither a file nor a preset {short_repr(name)}: {closest(stem, presets())}")


def base_and_source(algo: str | None, config: str | None, env: str | None) -> tuple[Config, str]:
    """Return the configuration before the user's own settings, and a line that says where it is from.

    Raises UsageError.

    `algo` is None where `config` names it; `config` is a preset or YAML file, also of a published system, and None for
    the algorithm's preset, if it has one; `env` replaces the preset's environment.
    """
    values, where = _preset(algo, config)
    if algo is not None and values.setdefault("algo", algo) != algo:
        values = _move_to_algo(values, algo, where)
    if env is not None and env != (preset_env := find_env_name(values)):
        if config is None and not (preset_env and _are_related(preset_env, env)):  # a preset for something else
            values = {"algo": values["algo"]}
            where = _NO_FILE
        values = _move_to_env(values, env)
    return build(values, where), _describe_source(where)


def _move_to_algo(values: dict[str, Any], algo: str, where: str) -> dict[str, Any]:
    """Transfer a preset to a user's subclass of its algorithm, whose fixed settings win.

    Raises UsageError: it is no subclass.
    """
    with usage_errors():
        cls = algos.find(algo)
        is_subclass = ":" in algo and issubclass(cls, algos.find(values["algo"]))
    if not is_subclass:
        raise UsageError(f"{where} is for the algorithm '{values['algo']}', not '{algo}': leave one of them out")
    env = find_env_name(values)
    kept = _keep_settings(values, lambda name: name not in cls.fixed_settings)
    return kept | {"algo": algo} | ({} if env is None else {"env": env})


def _describe_source(where: str) -> str:
    if where == _NO_FILE:
        return "preset: none, all settings have their defaults"
    path = Path(where)
    return f"preset: {path.stem if presets().get(path.stem) == path else path}"


def _preset(algo: str | None, config: str | None) -> tuple[dict[str, Any], str]:
    """Return the settings of `--config`, else of the preset of `--algo` if there is one, and the name of their file."""
    if config is not None:
        path = find_preset(config)
        converted = published.convert(read_mapping(path), algo)
        return (read_yaml(path) if converted is None else _published_values(converted, path)), str(path)
    if algo is not None:
        find_fields(algo, "algorithm")
        if algo in presets():
            return read_yaml(presets()[algo]), str(presets()[algo])
    return {}, _NO_FILE


def _published_values(converted: published.Converted, path: Path) -> dict[str, Any]:
    """Return the settings of a published system's file over its preset; print how the file was converted."""
    values = read_yaml(presets()[converted.preset]) | {"algo": converted.algo}
    if converted.settings.keys() & set(TOTALS):
        values |= dict.fromkeys(TOTALS, 0)
    changes = ", ".join(f"{name} {short_repr(value)}" for name, value in converted.settings.items())
    print(
        f"{path} is a file of {converted.system.name}; over the preset {converted.preset}: {changes}", file=sys.stderr
    )
    for line in converted.left:
        print(f"not carried over: {line}", file=sys.stderr)
    return values | converted.settings


def _move_to_env(values: dict[str, Any], env: str) -> dict[str, Any]:
    """Transfer a preset to another environment, dropping environment settings unless the two are related."""
    previous_env = find_env_name(values)
    valid = set()
    dropped = set(find_fields(previous_env, "environment")) if previous_env else set()
    if previous_env and _are_related(previous_env, env):
        valid = set(find_fields(env, "environment"))
    return _keep_settings(values, lambda name: name not in dropped - valid) | {"env": env}


def _keep_settings(values: dict[str, Any], keeps: Callable[[str], bool]) -> dict[str, Any]:
    """Return some of a preset's settings, also of its section for a CPU."""
    kept = {name: value for name, value in values.items() if keeps(name)}
    return kept | ({CPU: _keep_settings(values[CPU], keeps)} if CPU in values else {})


def _are_related(one: str, other: str) -> bool:
    """Return whether two environments share a base class, so that settings mean the same. Raises UsageError."""
    with usage_errors():
        classes = [{*envs_jax.base.find(name).__mro__} - {*envs_jax.Environment.__mro__} for name in (one, other)]
    return bool(classes[0] & classes[1])
