"""python -m bench.coverage.engines --q 57 --num_envs 64: do two map engines agree on this machine's device?

Both fly the same missions with the same random moves. What is exact must be equal bit for bit: stored beliefs and
counts of cells. Real numbers (observations, rewards, metrics) may differ by rounding; the largest is printed.
Ends with status 1 if the engines disagree. The engine "pallas" has been checked on CPUs only, where its kernels are
interpreted: run this on a GPU before `--map_engine pallas` is trusted there. `python -m bench.env_throughput
--vary map_engine=dense,pallas` then tells how fast they are.
"""

import argparse
import functools
import sys
from typing import Any

import jax
import numpy as np

import envs_jax
from envs_jax.batch import BatchedEnvironment, batched
from envs_jax.coverage import maps

TOLERANCE = 2e-5  # of real numbers; a device's exp and log differ from each other by a few units in the last place


def fly(env: BatchedEnvironment, keys: Any, steps: int) -> list[Any]:
    """(beliefs, counts, time step) on the host, of a reset and of `steps` random moves."""
    spec, n = env.spec, env.env.n  # type: ignore[attr-defined]
    assert spec.action is not None
    reset = jax.jit(functools.partial(env.reset, context=()))
    play = jax.jit(functools.partial(env.play, context=()), donate_argnums=0)
    state, timestep = reset(keys)
    seen = []
    for t in range(steps + 1):
        held = state.env.maps
        seen.append(jax.device_get((held.beliefs[..., :n, :n], held.sums.counts, timestep)))
        action = jax.random.randint(jax.random.key(t), (len(keys), spec.num_agents), 0, spec.action.n)  # type: ignore[union-attr]
        state, timestep = play(state, action)
    return seen


def differences(first: list[Any], second: list[Any]) -> tuple[int, float]:
    """How many exact values differ, and the largest difference of real numbers."""
    exact, real = 0, 0.0
    for one, other in zip(first, second, strict=True):
        for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
            if np.issubdtype(a.dtype, np.floating) and a.dtype != one[0].dtype:
                real = max(real, float(np.max(np.abs(a - b))))
            else:
                exact += int(np.sum(a != b))
    return exact, real


def main(arguments: list[str] | None = None) -> int:
    """The verb."""
    flags = argparse.ArgumentParser(prog="bench.coverage.engines", description=__doc__.split("\n\n")[0])
    flags.add_argument("--engines", nargs=2, default=["dense", "pallas"], choices=maps.ENGINES, metavar="NAME")
    flags.add_argument("--q", type=int, default=57)
    flags.add_argument("--num_envs", type=int, default=64)
    flags.add_argument("--steps", type=int, default=15)
    flags.add_argument("--belief_dtype", default="int16", choices=("int16", "float32"))
    chosen = flags.parse_args(arguments)
    keys = jax.random.split(jax.random.key(0), chosen.num_envs)
    missions = [
        fly(
            batched(envs_jax.make("coverage", q=chosen.q, belief_dtype=chosen.belief_dtype, map_engine=engine)),
            keys,
            chosen.steps,
        )
        for engine in chosen.engines
    ]
    exact, real = differences(*missions)
    device, agree = jax.devices()[0], exact == 0 and real <= TOLERANCE
    print(
        f"{' and '.join(chosen.engines)} on {device.device_kind} ({device.platform}), {chosen.num_envs} missions of "
        f"{chosen.steps} steps at q {chosen.q}, {chosen.belief_dtype}: {exact} exact values differ, real numbers by "
        f"{real:.1e} at most (allowed {TOLERANCE:.0e}): {'they agree' if agree else 'THEY DISAGREE'}"
    )
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
