"""python -m bench.studies.convolution: the methods of `convolve`, by layer and width, forward and backward.

Each runs inside a compiled loop, as in training, on the first device. FLOP are those of a plain convolution:
multiplications by zeros in "dense" do not count. The fastest by layer and width belongs in
`jaxrl.nn.networks.convolution_methods`.
"""

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from bench.harness import measure, plots, rates
from bench.harness.timing import measure_interleaved
from envs_jax.base import closest
from jaxrl.cli.entry import exit_on_error
from jaxrl.common.errors import UsageError
from jaxrl.nn import networks

KIND = "convolution"
WIDTHS = "16,32,64,128,256"


def run(
    widths: Sequence[int],
    methods: Sequence[networks.Convolution],
    samples: int,
    channels: int,
    dtype: Any,
    rounds: int,
    least: float,
    say: measure.Say,
) -> dict[str, Any]:
    """Measure; the entries "rows" (one for each width and layer), "methods", "samples" and "dtype" of a result."""
    rows = []
    for width in widths:
        say(f"width {width}")
        totals = dict.fromkeys(methods, 0.0)
        work = 0
        for name, layer in rates.layers(width, channels).items():
            timings = measure_interleaved(
                [rates.convolution(method, layer, samples, method, dtype, least) for method in methods], rounds
            )
            flop = layer.flop(samples)
            work += flop
            for method in methods:
                totals[method] += timings[method].median
            rows.append(_row(width, name, flop, {method: timings[method].plain() for method in methods}))
        rows.append(_row(width, "all", work, {method: {"median": seconds} for method, seconds in totals.items()}))
    return {"rows": rows, "methods": list(methods), "samples": samples, "dtype": jnp.dtype(dtype).name}


def default_methods(platform: str) -> tuple[networks.Convolution, ...]:
    """Return the methods to measure on a platform."""
    return rates.METHODS if platform != "cpu" else ("dense", "patches")


def _row(width: int, layer: str, flop: int, seconds: dict[str, dict[str, Any]]) -> dict[str, Any]:
    rates_ = {method: flop / entry["median"] for method, entry in seconds.items()}
    return {"width": width, "layer": layer, "flop": flop, "flop_per_second": rates_, "seconds": seconds}


def _flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--widths", default=WIDTHS, metavar="N,M,...", help=f"channels (default: {WIDTHS})")
    parser.add_argument("--methods", metavar="A,B,...", help=f"of {', '.join(rates.METHODS)} (default: all; on a CPU "
                        "without conv, which takes minutes there)")  # fmt: skip
    parser.add_argument("--samples", default="512", metavar="N", help="images per gradient (default: 512)")
    parser.add_argument("--channels", default="12", metavar="N", help="of the images (default: 12)")
    parser.add_argument(
        "--dtype", metavar="NAME", help="float32 or bfloat16 (default: the compute dtype of networks here)"
    )
    parser.add_argument("--rounds", default="5", metavar="N", help="samples of everything, in turns (default: 5)")
    parser.add_argument("--out", metavar="FILE", help="JSON file to write (default: a new one under bench/results/)")
    parser.add_argument("--quick", action="store_true", help="a rehearsal in seconds: the figures mean nothing")


@exit_on_error
def main(argv: Sequence[str]) -> int:
    """Entry point; returns the exit code."""
    assert __doc__ is not None
    parser = measure.parser("python -m bench.studies.convolution", __doc__)
    _flags(parser)
    parsed = parser.parse_args(list(argv))
    platform = jax.default_backend()
    methods = default_methods(platform) if parsed.methods is None else tuple(parsed.methods.replace(",", " ").split())
    for method in methods or ("",):
        if method not in rates.METHODS:
            raise UsageError(f"--methods: unknown method '{method}': {closest(method, rates.METHODS)}")
    dtype = parsed.dtype or ("float32" if platform == "cpu" else "bfloat16")
    if dtype not in ("float32", "bfloat16"):
        raise UsageError(f"--dtype: unknown dtype '{dtype}': {closest(dtype, ('float32', 'bfloat16'))}")
    widths = measure.parse_list(parsed.widths, "--widths", 1, 4096)
    samples = measure.parse_int(parsed.samples, "--samples", 1, 2**20)
    channels = measure.parse_int(parsed.channels, "--channels", 1, 1024)
    rounds = measure.rounds(parsed.rounds)
    least = 0.2
    if parsed.quick:
        widths, samples, rounds, least = widths[:1], 4, 1, 1e-6
    path = measure.output(parsed.out, KIND)
    result = measure.header(KIND, argv, parsed.quick, "studies.convolution")
    for note in result["notes"]:
        measure.say(note)
    with measure.fresh_compiles():
        result |= run(widths, methods, samples, channels, dtype, rounds, least, measure.say)
    measure.write(result, path)
    plots.show(result, path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
