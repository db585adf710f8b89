"""Measured rates of a machine."""

import jax
import pytest

from bench.harness import rates
from bench.harness.timing import Timing

pytestmark = pytest.mark.bench


def test_rates_are_work_over_time(monkeypatch):
    seconds = {"copy": 0.5, "fresh": 1.0, "float32": 2.0, "bfloat16": 4.0}
    monkeypatch.setattr(rates, "measure_interleaved", lambda *_: {name: Timing((s,)) for name, s in seconds.items()})
    measured = rates.measure(quick=True)
    assert measured.copy == 2 * 4 * 2**18 / 0.5 and measured.fresh == measured.copy / 2
    assert measured.matmul == {"float32": 2 * 64**3 / 2, "bfloat16": 2 * 64**3 / 4}


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
    assert set(rates.measure(quick=True).matmul) == {"float32", "tf32", "bfloat16"}
    programs = {name: str(jax.make_jaxpr(body)(carry)) for name, (body, carry) in precisions.items() if "f" in name}
    assert {name: "HIGHEST" in text for name, text in programs.items()} == {
        "float32": True, "tf32": False, "bfloat16": False
    }  # fmt: skip
    assert "f32" in programs["tf32"] and "bf16" not in programs["tf32"]
