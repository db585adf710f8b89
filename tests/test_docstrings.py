"""Docstrings name what is there: every argument and attribute that they list exists."""

import ast
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGES = ("envs_jax", "jaxrl", "bench", "tests")


def list_names(node: ast.AST, section: str) -> list[str]:
    """Names in a section of a docstring in Google's style, such as `a` and `b` of a line "a, b: both numbers."."""
    lines = (ast.get_docstring(node) or "").splitlines()
    if f"{section}:" not in lines:
        return []
    names = []
    for line in lines[lines.index(f"{section}:") + 1 :]:
        if not line.startswith("    "):
            break
        if line[4] != " ":  # deeper lines go on with a description
            names += [name.strip().lstrip("*") for name in line.partition(":")[0].split(",")]
    return names


def arguments(node: ast.FunctionDef) -> set[str]:
    args = node.args
    return {arg.arg for arg in [*args.posonlyargs, *args.args, *args.kwonlyargs, args.vararg, args.kwarg] if arg}


def members(node: ast.ClassDef) -> set[str]:
    """Fields, methods, and what is set on self."""
    fields = {part.target.id for part in node.body if isinstance(part, ast.AnnAssign)}
    methods = {part.name for part in node.body if isinstance(part, ast.FunctionDef)}
    attributes = [part for part in ast.walk(node) if isinstance(part, ast.Attribute)]
    assigned = {part.attr for part in attributes if isinstance(part.value, ast.Name) and part.value.id == "self"}
    return fields | methods | assigned


def unknown(source: str) -> list[str]:
    """Names that docstrings list and the code has not, as "function: name"."""
    unknown_names = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef):
            unknown_names += [
                f"{node.name}: {name}" for name in list_names(node, "Args") if name not in arguments(node)
            ]
        if isinstance(node, ast.ClassDef):
            init_arguments = [arguments(part) for part in node.body if getattr(part, "name", "") == "__init__"]
            known = members(node).union(*init_arguments)
            names = list_names(node, "Attributes") + list_names(node, "Args")
            unknown_names += [f"{node.name}: {name}" for name in names if name not in known]
    return unknown_names


def test_docstrings_list_what_exists():
    paths = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    wrong = {str(path.relative_to(ROOT)): unknown(path.read_text()) for path in paths}
    assert {path: names for path, names in wrong.items() if names} == {}
