"""Constraints: the closure of what is installed, markers where Pythons differ, and the file in the repository."""

import itertools
import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from scripts.pin import find_versions, read_environment, write_constraints

ROOT = Path(__file__).parents[1]


def install(environment: Path, name: str, version: str, *requires: str) -> None:
    folder = environment / f"lib/python3.12/site-packages/{name}-{version}.dist-info"
    folder.mkdir(parents=True)
    lines = [f"Name: {name}", f"Version: {version}", *(f"Requires-Dist: {text}" for text in requires)]
    (folder / "METADATA").write_text("\n".join(["Metadata-Version: 2.1", *lines, ""]))


def test_only_what_jaxrl_needs_is_pinned(tmp_path: Path) -> None:
    install(tmp_path, "jaxrl", "0.1.0", "jax>=0.10", 'pytest; extra == "dev"', 'torch; extra == "torch"')
    install(tmp_path, "jax", "0.12.0", "Type_Things", 'old; python_version < "3.12"', 'cuda; extra == "cuda12"')
    install(tmp_path, "pytest", "9.0", "click[colour]")
    install(tmp_path, "click", "8.0", 'rich; extra == "colour"', "jax")
    for name in ("type-things", "rich", "torch", "old", "cuda"):
        install(tmp_path, name, "1.5")
    environment = read_environment(tmp_path)
    assert environment.python == "3.12"
    assert find_versions(environment) == {
        "jax": "0.12.0", "pytest": "9.0", "click": "8.0", "type-things": "1.5", "rich": "1.5"
    }  # fmt: skip


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="is no virtual environment"):
        read_environment(tmp_path)
    install(tmp_path, "jax", "0.12.0")
    with pytest.raises(SystemExit, match="jaxrl is not installed"):
        read_environment(tmp_path)
    install(tmp_path, "jaxrl", "0.1.0", "flax")
    with pytest.raises(SystemExit, match=r"flax is not installed for Python 3\.12"):
        find_versions(read_environment(tmp_path))


def test_pythons_that_differ_have_markers() -> None:
    """Each package has exactly one version for every Python, also one that was not tried."""
    versions = {
        "3.11": {"jax": "0.10", "numpy": "2.0", "flax": "1"},
        "3.12": {"jax": "0.12", "numpy": "2.1", "flax": "1"},
        "3.13": {"jax": "0.12", "numpy": "2.2", "flax": "1", "new": "3"},
    }
    lines = [Requirement(line) for line in write_constraints(versions).splitlines() if not line.startswith("#")]
    for python in ("3.10", "3.11", "3.12", "3.13", "3.14"):
        chosen = [line for line in lines if not line.marker or line.marker.evaluate({"python_version": python})]
        expected = versions[min(max(python, "3.11"), "3.13")]
        assert {line.name: str(line.specifier) for line in chosen if line.name != "new"} == {
            name: f"=={version}" for name, version in expected.items() if name != "new"
        }


def test_the_constraints_allow_what_pyproject_asks_for() -> None:
    """Every dependency is pinned, within its bounds, for every Python that CI has."""
    text = (ROOT / "constraints.txt").read_text()
    pins = [Requirement(line) for line in text.splitlines() if not line.startswith("#")]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    tools = [project["optional-dependencies"][extra] for extra in ("test", "lint", "docs")]
    lines = [*project["dependencies"], *itertools.chain(*tools)]
    pythons = re.search(r"python: \[(.*)\]", (ROOT / ".github/workflows/ci.yml").read_text())
    assert pythons
    for python in pythons[1].replace('"', "").split(", "):
        chosen = {pin.name: pin for pin in pins if not pin.marker or pin.marker.evaluate({"python_version": python})}
        for line in lines:
            required = Requirement(line)
            (pin,) = chosen[canonicalize_name(required.name)].specifier
            assert required.specifier.contains(pin.version), f"{python}: {line} but {pin}"
