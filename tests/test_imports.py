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
import contextlib, importlib, io, sys
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:  # of what only makes sense with this package
        assert name == "envs_jax.adapters.workers" and error.name in ("cloudpickle", "gymnasium"), error
print(*sys.modules)
from jaxrl.cli.train import main
with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):
    main(["--help"])
print(*sys.modules)
import jaxrl.cli.render
from jaxrl.runtime.load import load_policy
load_policy("jaxrl/pretrained/coverage")
print(*sys.modules)
"""


def test_nothing_heavy_is_imported_before_it_is_needed() -> None:
    """By all environments, the help of training, and the reading of a policy to draw, in one process."""
    run = subprocess.run([sys.executable, "-c", PROGRAM, *MODULES], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    environments, training_help, reading = (set(line.split()) for line in run.stdout.splitlines())
    assert "jax" in environments
    packages = {name.partition(".")[0] for name in environments}
    assert not packages & {"matplotlib", "PIL", "metaworld", "mujoco", "jaxrl", "flax", "optax"}
    never = {"orbax", "scipy", "tensorboardX", "jax.experimental.pallas"}
    assert not training_help & {*never, "optax", "jaxrl.runtime.run"}
    assert not reading & {*never, "matplotlib"}
