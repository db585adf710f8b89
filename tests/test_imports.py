"""Environments import nothing heavy. (Directions of imports: import-linter.)"""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
MODULES = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for path in sorted((ROOT / "envs_jax").rglob("*.py"))
]


def test_nothing_heavy_is_imported_before_it_is_needed():
    program = f"import importlib, sys\nfor name in {MODULES}: importlib.import_module(name)\nprint(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    loaded = {name.split(".")[0] for name in run.stdout.split()}
    assert "jax" in loaded
    assert not loaded & {"matplotlib", "PIL", "metaworld", "mujoco", "jaxrl", "flax", "optax"}
