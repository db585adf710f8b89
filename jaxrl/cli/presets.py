"""Presets: YAML files under configs/, in a checkout or in the installed package."""

import contextlib
from importlib import resources
from pathlib import Path

from envs_jax.base import closest, shown
from jaxrl.common.errors import UsageError
from jaxrl.common.files import is_file
from jaxrl.runtime.run_directory import CONFIG


def preset_dirs() -> list[Path]:
    """Folders with presets: of the installed package, or of a checkout."""
    found = [Path(__file__).resolve().parents[2] / "configs"]
    with contextlib.suppress(ModuleNotFoundError):  # not in a checkout that is only on the path
        found.append(Path(str(resources.files("jaxrl.configs"))))
    return [folder for folder in found if folder.is_dir()]


def presets() -> dict[str, Path]:
    """All presets by name."""
    return {path.stem: path for folder in reversed(preset_dirs()) for path in sorted(folder.glob("*.yaml"))}


def find_preset(name: str) -> Path:
    """The file of `--config`: a path, or the name of a preset. Raises UsageError with the closest name."""
    path = Path(name)
    if is_file(path):
        return path
    if is_file(path / CONFIG):
        raise UsageError(f"{name} is a run: take --config {path / CONFIG} to start it anew, or --resume {name}")
    stem = path.stem if path.suffix == ".yaml" else name
    if stem in presets() and (path.parent == Path() or path.parent.name == "configs"):
        return presets()[stem]
    raise UsageError(f"there is no configuration {shown(name)}: {closest(stem, presets())}")
