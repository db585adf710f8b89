"""Environments import nothing heavy. (Directions of imports: import-linter.)"""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
MODULES = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for path in sorted((ROOT / "envs_jax").rglob("*.py"))
]
ENVIRONMENTS = """
import importlib, sys
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:  # of what only makes sense with this package
        assert name == "envs_jax.adapters.workers" and error.name in ("cloudpickle", "gymnasium"), error
print(*sys.modules)
"""
COMMANDS = """
import contextlib, io, sys
from jaxrl.cli.train import main
with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):
    main(["--help"])
print(*sys.modules)
import jaxrl.cli.render
from jaxrl.runtime.load import load_policy
load_policy("jaxrl/pretrained/coverage")
print(*sys.modules)
"""


def list_modules(program: str, *words: str) -> list[set[str]]:
    """Names of the loaded modules, at each point where a program prints them."""
    done = subprocess.run([sys.executable, "-c", program, *words], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [set(line.split()) for line in done.stdout.splitlines()]


def test_environments_import_nothing_heavy() -> None:
    (loaded,) = list_modules(ENVIRONMENTS, *MODULES)
    packages = {name.partition(".")[0] for name in loaded}
    assert "jax" in packages
    assert not packages & {"matplotlib", "PIL", "metaworld", "mujoco", "jaxrl", "flax", "optax"}


def test_commands_import_what_they_need() -> None:
    """The help of training, and the reading of a policy to draw."""
    training_help, reading = list_modules(COMMANDS)
    never = {"orbax", "scipy", "tensorboardX", "jax.experimental.pallas"}
    assert not training_help & {*never, "optax", "jaxrl.runtime.run"}
    assert not reading & {*never, "matplotlib"}
