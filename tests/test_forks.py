"""A process forked after JAX began, in which JAX would wait forever, is told to be spawned; others are let alone."""

import subprocess
import sys
from pathlib import Path

import pytest
from helpers.cases import by_day

from envs_jax import forks

ROOT = Path(__file__).parents[1]

# In the parent process `before` runs, in a forked child `within`; every error is printed in one line.
SCRIPT = r"""
import os, signal, sys, warnings
warnings.simplefilter("ignore")  # of JAX, about the fork

def attempt(statement):
    try:
        exec(statement)
    except Exception as error:
        print(type(error).__name__, error, flush=True)

before, within = sys.argv[1:]
attempt(before)
sys.stdout.flush()
child = os.fork()
if not child:
    signal.alarm(100)
    attempt(within)
    sys.stdout.flush()
    os._exit(0)
print("status", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
SIZES = "num_envs=4, rollout_steps=4, num_minibatches=1, num_epochs=1, hidden_size=4, total_env_steps=16"
TRAIN = f"import jaxrl; jaxrl.train('ppo', 'helpers.tiny:Corridor', progress=False, {SIZES}); print('trained')"
USE_JAX = "import jax; jax.numpy.ones(3).block_until_ready()"


def fork(before: str, within: str, cwd: Path) -> list[str]:
    """Return the lines that both processes print."""
    environment = {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "JAX_PLATFORMS": "cpu", "HOME": str(cwd)}
    command = [sys.executable, "-c", SCRIPT, before, within]
    result = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=180, check=True)
    return result.stdout.splitlines()


CALLS = {
    "training": "import jaxrl; jaxrl.train('coma', num_envs=4)",
    "a policy": "import jaxrl; jaxrl.load('pretrained:snakes')",
    "an evaluation": "import jaxrl; jaxrl.evaluate('pretrained:snakes')",
    "a command": "from jaxrl.cli import evaluate; evaluate.main(['--env', 'coverage', '--episodes', '4'])",
}


@pytest.mark.parametrize("activity", by_day(CALLS, ["training"]))
def test_after_jax_was_used_in_the_parent(activity: str, tmp_path: Path) -> None:
    """The parent has only used JAX itself."""
    within = CALLS[activity]
    if activity == "a command":  # whose sentence is on stderr
        within = f"sys.stderr = sys.stdout; {within}"
    sentence, status = fork(USE_JAX, within, tmp_path)[-2:]
    assert f"was forked from one in which JAX already ran, so {activity} would hang here" in sentence
    assert "'spawn' (multiprocessing.get_context('spawn'))" in sentence and status == "status 0"


@pytest.mark.slow
def test_after_the_parent_trained(tmp_path: Path) -> None:
    trained, sentence, status = fork(TRAIN, TRAIN, tmp_path)
    assert (trained, status) == ("trained", "status 0") and sentence.startswith("UsageError this process was forked")


def test_a_child_of_a_process_that_only_failed_is_let_alone(tmp_path: Path) -> None:
    """JAX had not begun when the process was forked; the child's second call finds the JAX of its first one."""
    load = "import jaxrl; jaxrl.load('pretrained:snakes'); print('loaded')"
    failed, *lines = fork("import jaxrl; jaxrl.load('absent')", f"{load}; {load}", tmp_path)
    assert "absent" in failed and lines == ["loaded", "loaded", "status 0"]


def test_without_the_private_names_of_jax_nothing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a version of JAX has renamed them."""
    monkeypatch.setattr(forks, "xla_bridge", object())
    monkeypatch.setattr(forks, "_owners", {1})  # a parent used JAX
    forks.check_process("training", "")
    assert len(forks._owners) == 2
