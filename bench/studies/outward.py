"""python -m bench.studies.outward [--num_envs 1,64,1024]: steps per second of reach through Gymnasium.

`GymnasiumVectorEnv` against Gymnasium's own `SyncVectorEnv` of the single environment, in turns, with the same prepared
actions, NumPy arrays in and out. Needs the extra `gymnasium`.
"""

import sys
import time
from collections.abc import Sequence
from importlib import metadata
from typing import Any

import numpy as np

import envs_jax
from bench.harness import measure
from bench.harness.timing import measure_interleaved
from envs_jax.adapters import outward
from envs_jax.adapters.gymnasium import GymnasiumEnv, GymnasiumVectorEnv
from jaxrl.cli.entry import exit_on_error
from jaxrl.common.errors import UserError

KIND = "outward"
LEAST_SECONDS = 0.5  # of a sample


def run(num_envs: int, rounds: int, quick: bool, say: measure.Say) -> dict[str, Any]:
    """Measure both at one size; a row of the result, in steps of single copies per second."""
    import gymnasium

    env = envs_jax.make("reach")
    vectors = {
        "vector": GymnasiumVectorEnv(env, num_envs),
        "sync": gymnasium.vector.SyncVectorEnv([lambda: GymnasiumEnv(env)] * num_envs),
    }
    actions = np.random.default_rng(0).uniform(-1, 1, (num_envs, 4)).astype(np.float32)

    def seconds(vector: Any, calls: int) -> float:
        began = time.perf_counter()
        for _ in range(calls):
            vector.step(actions)
        return (time.perf_counter() - began) / calls

    def sampler(name: str, vector: Any) -> Any:
        vector.reset(seed=0)
        seconds(vector, 2)  # compiles
        calls = 1 if quick else max(1, round(LEAST_SECONDS / seconds(vector, 2)))
        return lambda: {name: seconds(vector, calls)}

    timings = measure_interleaved([sampler(name, vector) for name, vector in vectors.items()], rounds)
    row = {name: measure.rate(timing, num_envs) for name, timing in timings.items()}
    say(f"{num_envs:,} copies: " + ", ".join(f"{name} {value['rate']:,.0f} steps/s" for name, value in row.items()))
    return {"num_envs": num_envs, **row}


@exit_on_error
def main(argv: Sequence[str]) -> int:
    """Entry point; returns the exit code."""
    assert __doc__ is not None
    parser = measure.parser("python -m bench.studies.outward", __doc__)
    measure.add_common(parser, "1,64,1024")
    parsed = parser.parse_args(list(argv))
    try:
        outward.require("gymnasium")
    except ValueError as error:
        raise UserError(str(error)) from None
    sizes = measure.parse_list(parsed.num_envs, "--num_envs", 1, measure.MOST)
    rounds = measure.rounds(parsed.rounds)
    path = measure.output(parsed.out, KIND)
    result = measure.header(f"studies.{KIND}", argv, parsed.quick)
    result["machine"]["gymnasium"] = metadata.version("gymnasium")
    for note in result["notes"]:
        measure.say(note)
    result["rows"] = [run(size, rounds, parsed.quick, measure.say) for size in sizes]
    measure.write(result, path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
