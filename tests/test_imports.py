"""Who imports whom: no circles, environments that stand alone, files that can be read in one go."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("envs_jax", "jaxrl")
LONGEST = 500  # lines of a file
FILES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for package in PACKAGES
    for path in sorted((ROOT / package).rglob("*.py"))
}


def imports(name: str) -> set[str]:
    """All that a module imports, within functions and for type checkers too, in full names.

    Of `from a import b` that is module a.b where there is one, else a.
    """
    found = set()
    package = name if FILES[name].name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(FILES[name].read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = package.split(".")
                base = ".".join([*parts[: len(parts) - node.level + 1], *filter(None, [base])])
            members = {f"{base}.{alias.name}" for alias in node.names}
            found |= {member if member in FILES else base for member in members}
    return found


GRAPH = {name: {other for other in imports(name) if other in FILES and other != name} for name in FILES}


def circles(graph: dict[str, set[str]]) -> list[set[str]]:
    """Groups of modules of which each reaches every other."""
    reached = {}
    for start in graph:
        todo, known = [start], set()
        while todo:
            for other in graph.get(todo.pop(), ()):
                if other not in known:
                    known.add(other)
                    todo.append(other)
        reached[start] = known
    groups = [frozenset(b for b in graph if b in reached[a] and a in reached[b]) for a in graph if a in reached[a]]
    return [set(group) for group in dict.fromkeys(groups)]


def test_circles_are_found():
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [{"a", "b", "c"}]
    assert circles({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []
    assert "envs_jax.coverage.maps.dense" in GRAPH["envs_jax.coverage.maps"]  # from a package
    assert "envs_jax.snakes.viewer" in GRAPH["envs_jax.snakes.env"]  # within a function


@pytest.mark.parametrize("package", PACKAGES)
def test_no_circle(package):
    assert circles({name: others for name, others in GRAPH.items() if name.split(".")[0] == package}) == []


def test_environments_stand_alone():
    foreign = {"jaxrl", "flax", "optax", "orbax", "torch"}
    for name in FILES:
        if name.startswith("envs_jax"):
            assert not {other.split(".")[0] for other in imports(name)} & foreign, name


def test_nothing_heavy_is_imported_before_it_is_needed():
    modules = [name for name in FILES if name.startswith("envs_jax")]
    program = f"import importlib, sys\nfor name in {modules}: importlib.import_module(name)\nprint(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    loaded = {name.split(".")[0] for name in run.stdout.split()}
    assert "jax" in loaded
    assert not loaded & {"matplotlib", "PIL", "metaworld", "mujoco", "jaxrl", "flax", "optax"}


@pytest.mark.parametrize("package", PACKAGES)
def test_files_are_short(package):
    lines = {name: len(path.read_text().splitlines()) for name, path in FILES.items() if name.startswith(package)}
    assert {name: count for name, count in lines.items() if count > LONGEST} == {}


@pytest.mark.parametrize("verb", ["train", "evaluate", "collect", "render", "export", "doctor"])
def test_verbs_are_thin(verb):
    """They parse, call the library and print."""
    assert len(FILES[f"jaxrl.cli.{verb}"].read_text().splitlines()) < 100
