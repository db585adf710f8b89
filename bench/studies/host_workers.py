"""Environments on the host by number of `host_workers`, compared with an earlier commit, in turns.

    python -m bench.studies.host_workers --before DIR --out bench/results/host_workers_cpu.json

DIR is a checkout of the earlier commit (`git worktree add DIR 1a031751`), which steps all copies in one process. Each
measurement is a process of its own: this file as a script, which imports the `envs_jax` of one of the two checkouts.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

COPIES = {"CartPole-v1": 64, "Image-v0": 16, "Slow-v0": 16}
ROUNDS = 5
_SECONDS = 3.0  # that a measurement lasts, at least


class Image(gymnasium.Env):
    """Four planes of 84 x 84 bytes, of which the newest is noise; nothing else costs time."""

    observation_space = gymnasium.spaces.Box(0, 255, (4, 84, 84), np.uint8)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self._planes = np.zeros((4, 84, 84), np.uint8)
        return self._planes, {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self._planes[:-1] = self._planes[1:]
        self._planes[-1] = self.np_random.integers(0, 256, (84, 84), np.uint8)
        return self._planes, 1.0, False, False, {}


class Slow(gymnasium.Env):
    """A step takes 5 ms of waiting, as for a simulator in a process of its own."""

    observation_space = gymnasium.spaces.Box(-1, 1, (4,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        return np.zeros(4, np.float32), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        time.sleep(0.005)
        return np.zeros(4, np.float32), 1.0, False, False, {}


def register() -> None:
    """Make the environments known to Gymnasium."""
    kinds: dict[str, Any] = {"Image-v0": Image, "Slow-v0": Slow}
    for name, kind in kinds.items():
        gymnasium.register(name, entry_point=kind, max_episode_steps=1000)


def measure(name: str, workers: int) -> float:
    """Return environment steps per second of random actions in a compiled loop, without starting and compiling."""
    import jax

    import envs_jax

    register()
    copies = COPIES[name]
    settings = {"host_workers": workers} if workers else {}
    batch = envs_jax.batched(envs_jax.make(f"gymnasium:{name}", **settings))

    def take_step(carry: Any, key: Any) -> tuple[Any, Any]:
        action = jax.random.randint(key, (copies, 1), 0, 2, "int32")
        state, timestep = batch.step(carry[0], carry[1], action)
        return (state, timestep), timestep.observation.mean()

    run = jax.jit(lambda carry, key: jax.lax.scan(take_step, carry, jax.random.split(key, 20)))
    carry = jax.jit(batch.reset)(jax.random.split(jax.random.key(0), copies))
    carry, _ = jax.block_until_ready(run(carry, jax.random.key(1)))
    began = time.perf_counter()
    steps = 0
    while (seconds := time.perf_counter() - began) < _SECONDS:
        carry, _ = jax.block_until_ready(run(carry, jax.random.key(steps)))
        steps += 20 * copies
    assert batch.failure is None, batch.failure
    return steps / seconds


def measure_comparison() -> dict[str, float]:
    """Return CPU microseconds of a step of CartPole on the host, and of comparing its observation with the space."""
    import envs_jax
    from envs_jax.adapters.host import NO_SEED, HostVector

    copies = COPIES["CartPole-v1"]
    calls = 100
    env: Any = envs_jax.make("gymnasium:CartPole-v1")
    vector = HostVector(env)
    rng = np.random.default_rng(0)
    seeds = np.arange(copies, dtype=np.int32)
    rows = np.ones(copies, np.bool_)
    step = vector.advance(0, seeds, np.zeros((copies, 1), np.int32))
    value = np.zeros(4, np.float32)
    arrays = vector.arrays
    dtype = value.dtype
    shape = value.shape

    def take_steps() -> None:
        nonlocal step
        for action in rng.integers(0, 2, (calls, copies, 1), np.int32):
            over = step.terminated | step.truncated
            step = vector.advance(step.calls, np.where(over, seeds, np.int32(NO_SEED)), action)

    def compare() -> None:
        for _ in range(calls):
            for _ in range(copies):
                type(value) is np.ndarray and value.dtype is dtype and value.shape == shape
            arrays.check(rows)

    def loop() -> None:
        for _ in range(calls):
            for _ in range(copies):
                pass

    seconds: dict[Any, list[float]] = {take_steps: [], compare: [], loop: []}
    for _ in range(4 * ROUNDS):
        for call, sample in seconds.items():
            began = time.process_time()
            call()
            sample.append((time.process_time() - began) / calls / copies)
    steps, compared, empty = (1e6 * statistics.median(sample) for sample in seconds.values())
    return {"step_us": steps, "comparison_us": compared - empty, "share": (compared - empty) / steps}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure both checkouts in turns and write the result."""
    from bench.harness import measure as harness

    here = Path(__file__).resolve().parents[2]
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("--before", required=True, help="checkout of the earlier commit")
    flags.add_argument("--out", required=True)
    parsed = flags.parse_args(argv)
    roots = {"before": Path(parsed.before).resolve(), "after": here}
    variants = [("before", 0), ("after", 1), ("after", 2)]
    rates: dict[str, dict[str, list[float]]] = {name: {} for name in COPIES}
    for _ in range(ROUNDS):
        for name in COPIES:
            for when, workers in variants:
                environment = os.environ | {"PYTHONPATH": str(roots[when])}
                command = [sys.executable, __file__, name, str(workers)]
                rate = float(
                    subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
                )
                key = f"{when}, {max(workers, 1)} process{'es' if workers > 1 else ''}"
                rates[name].setdefault(key, []).append(rate)
                print(f"{name}, {key}: {rate:,.0f} steps/s", file=sys.stderr)
    commits = {
        when: subprocess.run(["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True).stdout.strip()
        for when, root in roots.items()
    }
    result = {
        **harness.header("host_workers", sys.argv[1:] if argv is None else argv, False, "studies.host_workers"),
        "gymnasium": gymnasium.__version__,
        "commits": commits,
        "copies": COPIES,
        "comparison": measure_comparison(),
        "steps_per_second": {
            name: {key: {"median": statistics.median(one), "all": one} for key, one in by_key.items()}
            for name, by_key in rates.items()
        },
    }
    Path(parsed.out).write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    if len(sys.argv) == 3 and sys.argv[1] in COPIES:
        print(measure(sys.argv[1], int(sys.argv[2])))
    else:
        raise SystemExit(main())
