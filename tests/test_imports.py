"""Environments import nothing heavy. (Directions of imports: import-linter.)"""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
MODULES = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for path in sorted((ROOT / "envs_jax").rglob("*.py"))
]


PROGRAM = """
import importlib, sys
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:  # of what only makes sense with this package
        assert name == "envs_jax.adapters.workers" and error.name in ("cloudpickle", "gymnasium"), error
print(*sys.modules)
"""


def test_nothing_heavy_is_imported_before_it_is_needed():
    run = subprocess.run([sys.executable, "-c", PROGRAM, *MODULES], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    loaded = {name.split(".")[0] for name in run.stdout.split()}
    assert "jax" in loaded
    assert not loaded & {"matplotlib", "PIL", "metaworld", "mujoco", "jaxrl", "flax", "optax"}
