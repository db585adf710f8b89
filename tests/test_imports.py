"""Environments import nothing heavy; files can be read in one go. (Directions of imports: import-linter.)"""

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
