"""python -m bench.parity.map_backends --q 57 --num_envs 64: do two map backends agree on this device?

Both run the same missions with the same random moves. What is exact must be equal bit for bit: stored beliefs and
counts of cells. Real numbers (observations, rewards, metrics) may differ by rounding; the largest is printed.
Ends with status 1 if the backends disagree. The backend "pallas" has been checked on CPUs only, where its kernels are
interpreted. A run on a GPU makes the same comparison at its start (`jaxrl.runtime.variants`).
`python -m bench.env_throughput --vary map_backend=dense,pallas` measures their speed.
"""

import sys
from collections.abc import Sequence

import jax

import envs_jax
from bench.harness import measure
from jaxrl.cli.entry import exit_on_error
from jaxrl.common.errors import usage_errors
from jaxrl.runtime import variants


@exit_on_error
def main(argv: Sequence[str]) -> int:
    """Entry point; returns the exit code."""
    assert __doc__ is not None
    flags = measure.parser("python -m bench.parity.map_backends", __doc__)
    flags.add_argument(
        "--backends", nargs=2, default=["dense", "pallas"], metavar="NAME", help="two backends to compare"
    )
    flags.add_argument("--q", default="57", metavar="N", help="resolution of the maps (default: 57)")
    flags.add_argument("--num_envs", default="64", metavar="N", help="missions (default: 64)")
    flags.add_argument("--steps", default="15", metavar="N", help="steps of each mission (default: 15)")
    flags.add_argument("--belief_dtype", default="int16", metavar="NAME", help="int16 or float32 (default: int16)")
    chosen = flags.parse_args(list(argv))
    num_envs = measure.parse_int(chosen.num_envs, "--num_envs", 1, measure.MOST)
    steps = measure.parse_int(chosen.steps, "--steps", 1, 15)
    settings = {"q": measure.parse_int(chosen.q, "--q", 1, 1000), "belief_dtype": chosen.belief_dtype}
    with usage_errors():
        first, second = (envs_jax.make("coverage", **settings, map_backend=backend) for backend in chosen.backends)
    exact, real = variants.compare((first, second), num_envs, steps)
    device, agree = jax.devices()[0], variants.agrees((exact, real))
    print(
        f"{' and '.join(chosen.backends)} on {device.device_kind} ({device.platform}), {num_envs} missions of "
        f"{steps} steps at q {chosen.q}, {chosen.belief_dtype}: {exact} exact values differ, real numbers by "
        f"{real:.1e} at most (allowed {variants.TOLERANCE:.0e}): {'they agree' if agree else 'THEY DISAGREE'}"
    )
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
