"""Environments import nothing heavy. (Directions of imports: import-linter.)"""

import subprocess
import sys
from pathlib import Path

import pytest

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


LISTING = """
import contextlib, sys
from jaxrl.cli.train import main
with contextlib.suppress(SystemExit):
    main(["--help"])
print(*sys.modules)
"""
READING = """
import sys
import jaxrl.cli.render
from jaxrl.runtime.load import load_policy
load_policy("jaxrl/pretrained/coverage")
print(*sys.modules)
"""


@pytest.mark.parametrize(
    ("script", "slow"),
    [
        (LISTING, {"optax", "orbax", "scipy", "tensorboardX", "jax.experimental.pallas", "jaxrl.runtime.run"}),
        (READING, {"orbax", "scipy", "tensorboardX", "matplotlib", "jax.experimental.pallas"}),
    ],
    ids=["help", "a policy to draw"],
)  # fmt: skip
def test_commands_import_what_they_need(script: str, slow: set[str]) -> None:
    run = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert not slow & set(run.stdout.split("\n")[-2].split())
