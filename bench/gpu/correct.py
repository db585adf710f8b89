"""Part "correct": checks of this device's results against the rules.

Reference data of the environments are recordings of the original systems where available (see
`bench.parity.records`), else recordings of independent NumPy implementations of the rules.
"""

import dataclasses
import functools
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

import envs_jax
from bench.gpu import tiny
from bench.harness import training
from bench.harness.state_digest import digest
from bench.parity import coverage as coverage_parity
from bench.parity import learner as learner_parity
from bench.parity import map_backends, records
from bench.parity import reach as reach_parity
from bench.parity import snakes as snakes_parity
from bench.parity.comparison import Comparison
from jaxrl.cli import flags as command_line
from jaxrl.runtime.build import Run, build_run
from jaxrl.runtime.checkpoint import Checkpoints

SMALL = {  # a few iterations of every algorithm
    "coma": "--config coma_quick --num_envs 16 --critic_warmup 80",
    "ddpg": "--config ddpg_quick --num_envs 32 --env_steps_per_update 32",
    "sac": "--config sac_quick --num_envs 32 --env_steps_per_update 32",
}
ITERATIONS = 16
SAVED = 12  # iterations before the checkpoint: the replay holds enough to learn from by then


def coverage(quick: bool, folder: Path) -> dict[str, Any]:
    """Check missions of coverage, of this resolution and a coarse one, with both kinds of stored beliefs."""
    source = _source("coverage_missions")
    names = {"recorded": ("m00", "m03", "m08"), "own": ("own-m02", "own-m00", "own-m01")}[source]
    comparisons = {
        f"coverage, mission {name}, {dtype}": coverage_parity.compare(name, dtype)
        for name in (names[1:2] if quick else names)
        for dtype in (["int16"] if quick else ["float32", "int16"])
    }
    return _summarize(comparisons, source)


def snakes(quick: bool, folder: Path) -> dict[str, Any]:
    """Check steps of snakes on three boards."""
    source = _source("snakes_transitions")
    boards = snakes_parity.OWN[1:2] if quick else snakes_parity.OWN
    comparisons = {f"snakes, {b[2]} on {b[0]} x {b[1]} cells": snakes_parity.compare(b, source) for b in boards}
    return _summarize(comparisons, source)


def reach(quick: bool, folder: Path) -> dict[str, Any]:
    """Check episodes of reach."""
    source = "own" if quick else _source("reach_episodes")  # the recorded ones are twenty times as long
    return _summarize({"reach": reach_parity.compare(source)}, source)


def learner(quick: bool, folder: Path) -> dict[str, Any]:
    """Check a training step of COMA, at the published width."""
    comparison = learner_parity.compare(8, 2, 2, ["float32"]) if quick else learner_parity.compare()
    return _summarize({"COMA": comparison}, "the same step on the processor")


def _source(name: str) -> str:
    """Return the source of recorded data where available, else our own."""
    return "recorded" if records.path(name).is_file() else "own"


def _summarize(comparisons: Mapping[str, Comparison], source: str) -> dict[str, Any]:
    rows = [row for name, comparison in comparisons.items() for row in comparison.rows(name)]
    return {"rows": rows, "wrong": not all(comparison.agrees for comparison in comparisons.values()), "source": source}


def maps(quick: bool, folder: Path) -> dict[str, Any]:
    """Compare map backends of accelerators at the published resolution, on the same random missions."""
    q, missions = (2, 2) if quick else (57, 32)
    dense, pallas = (envs_jax.make("coverage", q=q, map_backend=backend) for backend in ("dense", "pallas"))
    exact, real = map_backends.compare((dense, pallas), missions, 15)
    agree = map_backends.agree(exact, real)
    rows = [[f"dense and pallas agree, q {q}", agree, f"({exact} exact values differ, others by {real:.1e} at most)"]]
    return {"rows": rows, "wrong": not agree, "exact": exact, "real": real, "q": q, "missions": missions}


def graphs(quick: bool, folder: Path) -> dict[str, Any]:
    """Check that blocks run as CUDA graphs and launched kernel by kernel, and compare their states.

    GPUs may add up numbers in any order, so that equal bits are reported, not demanded.
    """
    rows = []
    idle = []
    algos = ["coma"] if quick else list(SMALL)
    for algo in algos:
        digests = []
        for with_graphs in (True, False, False):
            state, still = _train(*_program(algo, quick, with_graphs), ITERATIONS)
            digests.append(digest(state))
            idle += still
        rows.append([f"{algo}: the same bits with and without CUDA graphs", digests[0] == digests[1], ""])
        rows.append([f"{algo}: the same bits twice without CUDA graphs", digests[1] == digests[2], ""])
        rows.append(_learning_row(algo, still))
    return {"rows": rows, "wrong": bool(idle)}


def resume(quick: bool, folder: Path) -> dict[str, Any]:
    """Compare two blocks of iterations with and without a checkpoint between them.

    GPUs may add up numbers in any order, so that equal bits are reported, not demanded.
    """
    rows = []
    wrong = False
    for algo in SMALL if not quick else ["coma"]:
        run, block = _program(algo, quick)
        half, still = _train(run, block, SAVED)
        with tempfile.TemporaryDirectory() as place, Checkpoints(Path(place)) as checkpoints:
            checkpoints.save(SAVED, half, {})
            checkpoints.wait()
            _, resumed, _ = checkpoints.restore(run.trainer.shapes())
        rest = jnp.int32(ITERATIONS - SAVED)
        resumed, _ = block(resumed, rest)
        whole, _ = block(_train(run, block, SAVED)[0], rest)
        rows.append([f"{algo}: a resumed run has the same bits", digest(resumed) == digest(whole), ""])
        rows.append(_learning_row(algo, still))
        wrong |= bool(still)
    return {"rows": rows, "wrong": wrong}


def donation(quick: bool, folder: Path) -> dict[str, Any]:
    """Return the share of the state that is donated to a block."""
    shares = {}
    for algo in SMALL if not quick else ["coma"]:
        usage = _program(algo, quick)[1].memory_analysis()
        shares[algo] = float(usage.alias_size_in_bytes / usage.argument_size_in_bytes)
    rows = [[f"{algo}: share of the state that is donated", share, ""] for algo, share in shares.items()]
    return {"rows": rows, "wrong": min(shares.values()) < 0.99}


@functools.cache
def _program(algo: str, quick: bool, with_graphs: bool = True) -> tuple[Run, Any]:
    """Build the run of a configuration and compile its last phase, with or without CUDA graphs, cached."""
    request = command_line.parse((tiny.FLAGS if quick else SMALL)[algo].split(), "python -m bench.gpu")
    with mock.patch.dict(os.environ, {} if with_graphs else {"JAXRL_GRAPHS": "off"}):
        run = build_run(request.config.with_run(eval_every=0))
        return run, training.compile_block(run)


def _init_last_phase(run: Run) -> Any:
    """Return a training state at the beginning of the last phase."""
    phase = len(run.algo.phases) - 1
    assert run.algo.phases[phase] == training.measured_phase(run.algo)
    return dataclasses.replace(run.trainer.init(jax.random.key(0)), phase=jnp.int32(phase))


def _train(run: Run, block: Any, iterations: int) -> tuple[Any, list[str]]:
    """Return a training state after `iterations` of the last phase, and the learner's leaves that did not change."""
    initial = _init_last_phase(run)
    before = jax.device_get(initial.algo.replicated)  # a copy: the block's argument is donated
    state, _ = block(initial, jnp.int32(iterations))
    pairs = zip(
        jax.tree_util.tree_leaves_with_path(before), jax.tree.leaves(jax.device_get(state.algo.replicated)), strict=True
    )
    return state, [jax.tree_util.keystr(path) for (path, old), new in pairs if np.array_equal(old, new)]


def _learning_row(algo: str, still: list[str]) -> list[Any]:
    """Return a row of the table: without learning equal bits would prove little."""
    return [f"{algo}: all of the learner has moved", not still, f"(not {', '.join(still[:3])}, ...)" if still else ""]
