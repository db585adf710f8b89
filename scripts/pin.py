"""Write constraints.txt: the versions of packages with which the tests passed, from one environment for each Python.

python scripts/pin.py .venv-3.11 .venv-3.12 .venv-3.13 > constraints.txt

Each environment is one in which `make lint docs test` has passed. Only what jaxrl and its developers' tools need is
pinned.
CUDA's libraries are left out: a plugin of JAX takes the version of JAX, and chooses its libraries.
"""

import importlib.metadata
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

EXTRA = "dev"
HEADER = """\
# Versions with which the tests passed: pip install -c constraints.txt .
# Made by scripts/pin.py, which says how.
"""


class Environment(NamedTuple):
    """A virtual environment: its Python, such as "3.12", and the packages in it by name."""

    python: str
    packages: Mapping[str, importlib.metadata.Distribution]


def read_environment(folder: Path) -> Environment:
    """Read what is installed in a virtual environment. Raises SystemExit if it is none, or lacks jaxrl."""
    folders = sorted(folder.glob("lib/python3.*/site-packages"))
    if len(folders) != 1:
        sys.exit(f"error: {folder} is no virtual environment of one Python")
    packages = importlib.metadata.distributions(path=[str(folders[0])])
    environment = Environment(
        folders[0].parent.name.removeprefix("python"), {canonicalize_name(one.name): one for one in packages}
    )
    if "jaxrl" not in environment.packages:
        sys.exit(f"error: jaxrl is not installed in {folder}")
    return environment


def find_versions(environment: Environment) -> dict[str, str]:
    """Return {package: version} of everything that jaxrl needs there, itself left out.

    Raises SystemExit: a package is missing.
    """
    versions: dict[str, str] = {}
    pending = [("jaxrl", EXTRA), ("jaxrl", "")]
    seen = set(pending)
    while pending:
        name, extra = pending.pop()
        package = environment.packages.get(name)
        if package is None:
            sys.exit(f"error: {name} is not installed for Python {environment.python}")
        versions[name] = package.version
        markers = {**default_environment(), "python_version": environment.python, "extra": extra}
        markers["python_full_version"] = f"{environment.python}.0"
        for text in package.requires or ():
            required = Requirement(text)
            if required.marker is None or required.marker.evaluate(markers):
                wanted = {(canonicalize_name(required.name), extra) for extra in ("", *required.extras)}
                pending += wanted - seen
                seen |= wanted
    del versions["jaxrl"]
    return versions


def write_constraints(versions: Mapping[str, Mapping[str, str]]) -> str:
    """Return the lines of constraints for {Python: {package: version}}, with a marker where Pythons differ."""
    pythons, lines = sorted(versions, key=Version), [HEADER]
    for name in sorted({name for packages in versions.values() for name in packages}):
        by_version: dict[str, list[str]] = {}
        for python in pythons:
            if name in versions[python]:
                by_version.setdefault(versions[python][name], []).append(python)
        for version, group in by_version.items():
            marker = "" if len(by_version) == 1 else f"; {_mark(group, pythons)}"
            lines.append(f"{name}=={version}{marker}\n")
    return "".join(lines)


def _mark(group: list[str], pythons: list[str]) -> str:
    """Return the marker of some Pythons in a row; newer and older ones count as the last and the first of all."""
    parts = [] if group[0] == pythons[0] else [f'python_version >= "{group[0]}"']
    parts += [] if group[-1] == pythons[-1] else [f'python_version <= "{group[-1]}"']
    assert group == pythons[pythons.index(group[0]) : pythons.index(group[-1]) + 1], "versions alternate"
    return " and ".join(parts)


if __name__ == "__main__":
    read = [read_environment(Path(word)) for word in sys.argv[1:]]
    if not read:
        sys.exit(f"error: name the virtual environments\n\n{__doc__}")
    sys.stdout.write(write_constraints({one.python: find_versions(one) for one in read}))
