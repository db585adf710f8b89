"""Measured rates of a machine, and the stopwatch."""

import jax
import pytest

from bench.harness import rates
from bench.harness.timing import Timing, measure_interleaved, seconds_of, stopwatch

pytestmark = pytest.mark.long  # of benchmarks, not of the product


def test_rates_are_work_over_time(monkeypatch):
    seconds = {"copy": 0.5, "fresh": 1.0, "float32": 2.0, "bfloat16": 4.0, "conv": 8.0}
    monkeypatch.setattr(rates, "measure_interleaved", lambda *_: {name: Timing((s,)) for name, s in seconds.items()})
    monkeypatch.setattr(rates.networks, "convolution_methods", lambda *_: (None, "conv"))
    measured = rates.measure(16, quick=True)
    assert measured.copy == 2 * 4 * 2**18 / 0.5 and measured.fresh == measured.copy / 2
    assert measured.matmul == {"float32": 2 * 64**3 / 2, "bfloat16": 2 * 64**3 / 4}
    product = 2 * 8 * 16 * 16 * 16 * 16  # samples, 4 x 4 outputs, 4 x 4 taps, channels, features
    assert measured.convolution == {"conv": 3 * product / 8}


def test_float32_products_are_not_tf32(monkeypatch):
    """On GPUs, which round to ten bits by default; that rate has a name of its own."""
    precisions = {}
    monkeypatch.setattr(
        rates, "repeat", lambda name, body, carry, min_seconds: precisions.setdefault(name, (body, carry))
    )
    monkeypatch.setattr(
        rates, "measure_interleaved", lambda *_: {n: Timing((1.0,)) for n in (*precisions, "copy", "fresh")}
    )
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert set(rates.measure(4, quick=True).matmul) == {"float32", "tf32", "bfloat16"}
    programs = {name: str(jax.make_jaxpr(body)(carry)) for name, (body, carry) in precisions.items() if "f" in name}
    assert {name: "HIGHEST" in text for name, text in programs.items()} == {
        "float32": True, "tf32": False, "bfloat16": False
    }  # fmt: skip
    assert "f32" in programs["tf32"] and "bf16" not in programs["tf32"]


def test_measured_samplers_run():
    measured = rates.measure(4, quick=True, rounds=1, min_seconds=1e-6)
    assert min(measured.copy, measured.fresh, *measured.matmul.values(), *measured.convolution.values()) > 0


def test_turns_and_medians():
    calls = []

    def sampler(name, values):
        values = iter(values)

        def sample():
            calls.append(name)
            return {name: next(values)}

        return sample

    timings = measure_interleaved([sampler("a", [9.0, 1.0, 2.0, 6.0]), sampler("b", [9.0, 4.0, 4.0, 4.0])], rounds=3)
    assert calls == ["a", "b"] * 4
    assert timings["a"].seconds == (1.0, 2.0, 6.0) and timings["a"].median == 2.0 and timings["a"].spread == 2.5
    assert timings["b"].spread == 0.0
    assert timings["a"].plain() == {"median": 2.0, "spread": 2.5, "samples": [1.0, 2.0, 6.0]}


def test_a_sample_is_long_enough(monkeypatch):
    clock = iter(float(t) for t in range(100))
    monkeypatch.setattr("bench.harness.timing.time.perf_counter", lambda: next(clock))
    calls = []
    watch = stopwatch("a", lambda: calls.append(1), min_seconds=4.0)
    assert watch() == {"a": 1.0 / 4}  # one second for four calls
    assert len(calls) == 1 + 4
    assert seconds_of(lambda: None, calls=2) == 0.5
