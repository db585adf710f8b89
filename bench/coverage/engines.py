"""python -m bench.coverage.engines --q 57 --num_envs 64: do two map engines agree on this machine's device?

Both fly the same missions with the same random moves. What is exact must be equal bit for bit: stored beliefs and
counts of cells. Real numbers (observations, rewards, metrics) may differ by rounding; the largest is printed.
Ends with status 1 if the engines disagree. The engine "pallas" has been checked on CPUs only, where its kernels are
interpreted: run this on a GPU before `--map_engine pallas` is trusted there. `python -m bench.env_throughput
--vary map_engine=dense,pallas` then tells how fast they are.
"""

import functools
import sys
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

import envs_jax
from bench import measure
from envs_jax.batch import BatchedEnvironment, batched
from jaxrl.config import exit_on_error, usage_errors

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


@exit_on_error
def main(argv: Sequence[str]) -> int:
    """Entry point; returns the exit code."""
    assert __doc__ is not None
    flags = measure.parser("python -m bench.coverage.engines", __doc__)
    flags.add_argument("--engines", nargs=2, default=["dense", "pallas"], metavar="NAME", help="which two to compare")
    flags.add_argument("--q", default="57", metavar="N", help="resolution of the maps (default: 57)")
    flags.add_argument("--num_envs", default="64", metavar="N", help="missions (default: 64)")
    flags.add_argument("--steps", default="15", metavar="N", help="of each mission (default: 15)")
    flags.add_argument("--belief_dtype", default="int16", metavar="NAME", help="int16 or float32 (default: int16)")
    chosen = flags.parse_args(list(argv))
    num_envs = measure.whole(chosen.num_envs, "--num_envs", 1, measure.MOST)
    steps = measure.whole(chosen.steps, "--steps", 1, 15)
    settings = {"q": measure.whole(chosen.q, "--q", 1, 1000), "belief_dtype": chosen.belief_dtype}
    with usage_errors():
        flown = [batched(envs_jax.make("coverage", **settings, map_engine=engine)) for engine in chosen.engines]
    keys = jax.random.split(jax.random.key(0), num_envs)
    missions = [fly(env, keys, steps) for env in flown]
    exact, real = differences(*missions)
    device, agree = jax.devices()[0], exact == 0 and real <= TOLERANCE
    print(
        f"{' and '.join(chosen.engines)} on {device.device_kind} ({device.platform}), {num_envs} missions of "
        f"{steps} steps at q {chosen.q}, {chosen.belief_dtype}: {exact} exact values differ, real numbers by "
        f"{real:.1e} at most (allowed {TOLERANCE:.0e}): {'they agree' if agree else 'THEY DISAGREE'}"
    )
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
