"""Part "correct": comparisons of this device with what the rules say.

Reference data of the environments are the recordings of the original systems, where they are at hand (see
`bench.parity.records`), and else what independent NumPy implementations of the rules do.
"""

import dataclasses
import functools
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import envs_jax
from bench import train_throughput
from bench.gpu import job
from bench.parity import coverage as coverage_parity
from bench.parity import learner as learner_parity
from bench.parity import reach as reach_parity
from bench.parity import records
from bench.parity import snakes as snakes_parity
from bench.parity.comparison import Comparison
from jaxrl.cli import flags as command_line
from jaxrl.runtime import tuned, variants
from jaxrl.runtime.build import Run, build_run
from jaxrl.runtime.checkpoint import Checkpoints
from jaxrl.runtime.manifest import digest

SMALL = {  # a few iterations of every algorithm
    "coma": "--config coma_quick --num_envs 16",
    "ddpg": "--config ddpg_quick --num_envs 32",
    "sac": "--config sac_quick --num_envs 32",
}


def coverage(quick: bool, folder: Path) -> dict[str, Any]:
    """Missions of coverage, of this resolution and a coarse one, with both kinds of stored beliefs."""
    source = _source("coverage_missions")
    names = {"recorded": ("m00", "m03", "m08"), "own": ("own-m02", "own-m00", "own-m01")}[source]
    found = {
        f"coverage, mission {name}, {dtype}": coverage_parity.compare(name, dtype)
        for name in (names[1:2] if quick else names)
        for dtype in (["int16"] if quick else ["float32", "int16"])
    }
    return _compared(found, source)


def snakes(quick: bool, folder: Path) -> dict[str, Any]:
    """Steps of snakes on three boards."""
    source = _source("snakes_transitions")
    boards = snakes_parity.OWN[1:2] if quick else snakes_parity.OWN
    found = {f"snakes, {b[2]} on {b[0]} x {b[1]} cells": snakes_parity.compare(b, source) for b in boards}
    return _compared(found, source)


def reach(quick: bool, folder: Path) -> dict[str, Any]:
    """Episodes of reach."""
    source = "own" if quick else _source("reach_episodes")  # the recorded ones are twenty times as long
    return _compared({"reach": reach_parity.compare(source)}, source)


def learner(quick: bool, folder: Path) -> dict[str, Any]:
    """A training step of COMA, at the published width."""
    found = learner_parity.compare(8, 2, 2) if quick else learner_parity.compare()
    return _compared({"COMA": found}, "the same step on the processor")


def _source(name: str) -> str:
    """The recorded data where they are, else our own."""
    return "recorded" if records.path(name).is_file() else "own"


def _compared(found: Mapping[str, Comparison], source: str) -> dict[str, Any]:
    rows = [row for name, comparison in found.items() for row in comparison.rows(name)]
    return {"rows": rows, "wrong": not all(comparison.agrees for comparison in found.values()), "source": source}


def maps_agree(quick: bool, folder: Path) -> dict[str, Any]:
    """Map backends of accelerators against each other at the published resolution, on the same random missions."""
    q, missions = (2, 2) if quick else (57, 32)
    dense, pallas = (envs_jax.make("coverage", q=q, map_backend=backend) for backend in ("dense", "pallas"))
    exact, real = variants.compare((dense, pallas), missions, variants.STEPS)
    agree = variants.agrees((exact, real))
    rows = [[f"dense and pallas agree, q {q}", agree, f"({exact} exact values differ, others by {real:.1e} at most)"]]
    return {"rows": rows, "wrong": not agree, "exact": exact, "real": real, "q": q, "missions": missions}


def graphs_agree(quick: bool, folder: Path) -> dict[str, Any]:
    """Blocks as CUDA graphs and the same blocks launched kernel by kernel: equal hashes of the whole state.

    Graphs are to blame only where two calls without them give the same bits, or where this unit never ends.
    """
    rows, wrong = [], False
    algos = ["coma"] if quick else list(SMALL)
    with ThreadPoolExecutor() as pool:  # the compiler is what takes time
        pairs = product(algos, (tuned.AUTO, job.NO_GRAPHS))
        list(pool.map(lambda pair: _program(pair[0], quick, True, pair[1]), pairs))
    for algo in algos:
        states = []
        for options in (tuned.AUTO, job.NO_GRAPHS, job.NO_GRAPHS):
            setup, block = _program(algo, quick, True, options)
            states.append(digest(block(_begun(setup), jnp.int32(2))[0]))
        same, steady = states[0] == states[1], states[1] == states[2]
        rows.append([f"{algo}: the same bits with and without CUDA graphs", same, ""])
        rows.append([f"{algo}: the same bits twice without CUDA graphs", steady, ""])
        wrong |= steady and not same
    return {"rows": rows, "wrong": wrong}


def resume_is_exact(quick: bool, folder: Path) -> dict[str, Any]:
    """Four iterations at once, and two and two with a checkpoint between: equal hashes of the whole state.

    With --exact_sharding they must be equal; without, GPUs may add up numbers in any order.
    """
    rows, wrong = [], False
    for algo in SMALL if not quick else ["coma"]:
        for exact in (True,) if quick else (True, False):
            setup, block = _program(algo, quick, exact)
            two = jnp.int32(2)
            whole, _ = block(block(_begun(setup), two)[0], two)
            half, _ = block(_begun(setup), two)
            with tempfile.TemporaryDirectory() as place, Checkpoints(Path(place)) as checkpoints:
                checkpoints.save(2, half, {})
                checkpoints.wait()
                _, resumed, _ = checkpoints.restore(setup.trainer.shapes())
            resumed, _ = block(resumed, two)
            same = digest(resumed) == digest(whole)
            rows.append([f"{algo}: a resumed run has the same bits{', exact_sharding' if exact else ''}", same, ""])
            wrong |= exact and not same
    return {"rows": rows, "wrong": wrong}


def state_is_donated(quick: bool, folder: Path) -> dict[str, Any]:
    """Share of the state that a block writes the new state over."""
    shares = {}
    for algo in SMALL if not quick else ["coma"]:
        memory = _program(algo, quick, True)[1].memory_analysis()
        shares[algo] = float(memory.alias_size_in_bytes / memory.argument_size_in_bytes)
    rows = [[f"{algo}: share of the state that is donated", share, ""] for algo, share in shares.items()]
    return {"rows": rows, "wrong": min(shares.values()) < 0.99}


@functools.cache
def _program(algo: str, quick: bool, exact: bool, options: str = tuned.AUTO) -> tuple[Run, Any]:
    """A configuration made real, and its compiled last phase, for all units that need it."""
    request = command_line.parse((job.QUICK if quick else SMALL[algo]).split(), "python -m bench.gpu")
    setup = build_run(request.config.with_run(eval_every=0, exact_sharding=exact, compiler_options=options))
    return setup, train_throughput.compile_block(setup)


def _begun(setup: Run) -> Any:
    """A training state at the beginning of the last phase."""
    phase = len(setup.algo.phases) - 1
    assert setup.algo.phases[phase] == train_throughput.measured_phase(setup.algo)
    return dataclasses.replace(setup.trainer.init(jax.random.key(0)), phase=jnp.int32(phase))
