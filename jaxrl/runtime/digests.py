"""Digests of what the hosts of a run must have alike besides settings and versions: code, and files that they read."""

import functools
import hashlib
import os
import sys
import sysconfig
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

import envs_jax
from jaxrl.common.errors import UsageError
from jaxrl.common.files import is_file
from jaxrl.runtime.config import Config

_OURS = {"jaxrl": Path(__file__).parents[1], "envs_jax": Path(envs_jax.__path__[0])}
_LIBRARIES = "site-packages", "dist-packages"
_SUFFIXES = (".py", ".json")
_PRESETS = "configs"  # in an installed jaxrl; settings are compared by themselves
_STARTED = ("__main__", "sitecustomize", "usercustomize")  # modules that depend on how a process was started


def digest_code(config: Config) -> dict[str, str]:
    """Return {"code of PACKAGE": digest} of jaxrl, envs_jax, and the user's own modules as far as they are loaded.

    The user's own are those outside of the folders of installed packages, and the packages of the environment and of
    the algorithm in `config`, wherever they are.
    """
    digests = {f"code of {name}": _digest_files(_package_files(folder)) for name, folder in _OURS.items()}
    named = {name.partition(":")[0].partition(".")[0] for name in (config.env, config.algo) if ":" in name}
    modules: dict[str, dict[str, Path]] = {}
    for name, module in sorted(sys.modules.items()):
        package = name.partition(".")[0]
        file = getattr(module, "__file__", None)
        if package in (*_OURS, *_STARTED) or not file or (_is_installed(file) and package not in named):
            continue
        if is_file(Path(file)):  # not part of an archive
            modules.setdefault(package, {})[name] = Path(file)
    return digests | {f"code of {package}": _digest_files(files) for package, files in modules.items()}


def digest_files(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return {"the file NAME of SETTING": digest} of the files that settings name. Raises UsageError: unreadable."""
    lists = {setting: value.split(",") for setting, value in settings.items() if isinstance(value, str)}
    texts = [(setting, text.strip()) for setting, listed in lists.items() for text in listed]
    files = {f"the file {text} of {setting}": Path(text) for setting, text in texts if text and is_file(Path(text))}
    return {name: _digest_files({"": path}) for name, path in files.items()}


def digest_arrays(tree: Any) -> str:
    """Return a digest of the arrays of a pytree, with their shapes and dtypes, and of its structure."""
    leaves, structure = jax.tree.flatten(tree)
    arrays = [np.asarray(leaf) for leaf in leaves]
    kinds = [(array.dtype.str, array.shape) for array in arrays]
    parts = [f"{structure} {kinds}".encode(), *(array.tobytes() for array in arrays)]
    return _combine(hashlib.sha256(part).digest() for part in parts)


def _package_files(folder: Path) -> dict[str, Path]:
    paths = [path for path in folder.rglob("*") if path.suffix in _SUFFIXES and path.is_file()]
    names = {path.relative_to(folder): path for path in sorted(paths)}
    return {str(name): path for name, path in names.items() if name.parts[0] != _PRESETS}


@functools.cache
def _installed_folders() -> tuple[str, ...]:
    """Return the folders of Python and of packages that pip has installed, as they are named and as they are."""
    folders = [Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    return tuple(f"{path}{os.sep}" for folder in folders for path in (folder, folder.resolve()))


def _is_installed(file: str) -> bool:
    return file.startswith(_installed_folders()) or any(f"{os.sep}{name}{os.sep}" in file for name in _LIBRARIES)


def _digest_files(files: Mapping[str, Path]) -> str:
    """Return a digest of names and contents of files. Raises UsageError: one cannot be read."""
    return _combine(
        digest
        for name, path in files.items()
        for digest in (hashlib.sha256(name.encode()).digest(), _digest_file(path))
    )


def _digest_file(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").digest()
    except OSError as error:
        raise UsageError(f"{path} cannot be read ({error.strerror}): make it readable on every host") from None


def _combine(digests: Iterable[bytes]) -> str:
    """Return a digest of a list of digests, of which no two lists have the same."""
    total = hashlib.sha256()
    for digest in digests:
        total.update(digest)
    return total.hexdigest()[:12]
