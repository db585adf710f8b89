"""Importing all modules, and training from Python, leave the user's process as it was."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# Packages of others, and what they set up when they are used first, come before the first look at the process.
SCRIPT = r"""
import asyncio, faulthandler, gc, importlib, logging, os, pkgutil, random, resource, signal, sys, threading, warnings

def load(name):
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:  # a package that only an extra brings
        assert error.name.partition(".")[0] not in ("jaxrl", "envs_jax"), error

for name in sys.argv[2:]:
    load(name)
import jax
import numpy as np

def look():
    known = [logging.getLogger(), *map(logging.getLogger, sorted(logging.Logger.manager.loggerDict))]
    return {
        "hooks of sys": [sys.excepthook, sys.unraisablehook, sys.displayhook, sys.breakpointhook, sys.gettrace()],
        "hook of threads": threading.excepthook,
        "shown warnings": [warnings.showwarning, warnings.formatwarning],
        "filters of warnings": list(warnings.filters),
        "signals": {number: signal.getsignal(number) for number in signal.valid_signals()},
        "alarm": signal.getitimer(signal.ITIMER_REAL),
        "environment variables": dict(os.environ),
        "settings of JAX": dict(jax.config.values),
        "random bits": jax.jit(lambda key: jax.random.bits(key, (3,))).lower(jax.random.key(0)).as_text(),
        "logging": {x.name: (x.level, x.propagate, *x.handlers, *x.filters) for x in known if x.handlers or x.filters},
        "garbage collector": [gc.isenabled(), gc.get_threshold(), *gc.callbacks],
        "random numbers": [random.getstate(), np.random.get_state()[1].tolist()],
        "paths": [os.getcwd(), *sys.path, *sys.meta_path],
        "faults": faulthandler.is_enabled(),
        "limits": [resource.getrlimit(getattr(resource, x)) for x in dir(resource) if x.startswith("RLIMIT")],
        "events": asyncio.get_event_loop_policy(),
        "forks": list(forks),
    }

def peak():
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1])

forks = []
os.register_at_fork = lambda **hooks: forks.append(hooks)
b"x" * 2**29
before, highest = look(), peak()

import envs_jax, jaxrl
for package in (envs_jax, jaxrl):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        try:
            load(module.name)
        except FileNotFoundError:  # agents that are copied next to weights
            assert module.name.endswith((".submission", ".agent")), module.name
for name in jaxrl.__all__:
    assert name == "__version__" or callable(getattr(jaxrl, name)), name

sizes = dict(num_envs=4, rollout_steps=4, num_minibatches=1, num_epochs=1, hidden_size=4, depth=1, horizon=4)
often = dict(eval_every=16, eval_episodes=8, checkpoint_every=1)
result = jaxrl.train("ppo", "reach", progress=False, total_env_steps=48, runs=sys.argv[1], **sizes, **often)
jaxrl.evaluate(result.directory, episodes=8)
jaxrl.load(result.directory)(np.zeros((1, *result.policy.env.spec.observation.shape), np.float32))
after = look()
assert not (changed := [name for name in before if before[name] != after[name]]), changed
assert peak() >= highest, (peak(), highest)
"""
OTHERS = (
    "jax", "jax.experimental.pallas", "flax.linen", "optax", "orbax.checkpoint", "tensorboardX", "rich.live",
    "matplotlib.figure", "PIL.Image", "scipy.stats", "pynvml", "chex", "jaxtyping", "gymnasium", "pettingzoo", "torch",
    "onnx", "safetensors",
)  # fmt: skip


@pytest.mark.slow
def test_the_users_process_stays_as_it_was(tmp_path: Path) -> None:
    variables = {**os.environ, "XLA_FLAGS": "--xla_backend_optimization_level=0", "PYTHONPATH": str(ROOT)}
    variables["JAX_COMPILATION_CACHE_DIR"] = str(ROOT / ".cache" / "jax")
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "runs"), *OTHERS]
    done = subprocess.run(command, env=variables, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
