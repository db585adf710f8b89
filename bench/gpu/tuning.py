"""Part "tuning": the fastest settings on this device, by paired comparisons in one process.

Candidates are settings of one configuration. Their programs are compiled first, then their iterations take turns on
one training state. A candidate that wins by more than the spread of the samples is written into the table that
automatic values read (`jaxrl.runtime.tuned`), also for the units that follow. The fastest maps and convolution are
only reported: a run compares map backends itself, and `--convolution auto` reads no table.
"""

import dataclasses
import functools
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from bench.gpu import job as main_job
from bench.harness import measure
from bench.harness.timing import Timing, measure_interleaved, stopwatch
from bench.train_throughput import compile_block, measured_phase
from jaxrl.cli import flags as command_line
from jaxrl.common.errors import UserError, one_line
from jaxrl.common.files import cache_root
from jaxrl.report.cache import cache_folder
from jaxrl.runtime import config as configuration
from jaxrl.runtime import memory_plan, tuned
from jaxrl.runtime.build import Run, build_run
from jaxrl.runtime.config import Config
from jaxrl.runtime.data_parallel import REPLICATED, largest_divisor, shardings

JOBS = {  # the main job, with fewer of its equal updates
    "coma": "--algo coma --num_envs 4096 --num_epochs 1 --block_iterations 1",
    "ddpg": "--config ddpg --block_iterations 256",
    "sac": "--config sac --block_iterations 256",
}
PARTS = (1, 2, 4, 8)  # of the chunks that the memory plan chooses
ROUNDS = 5
COMPILING = 150.0  # seconds, after which no further candidate is compiled
KINDS = "FUSION,CUBLAS,CUBLASLT,CUDNN,DYNAMIC_SLICE_FUSION"  # of operations that XLA may put into command buffers
OPTIONS = {  # of the compiler, beside those of `DataParallel`
    "graphs": {
        "no command buffers": "xla_gpu_enable_command_buffer=",
        "no loops in command buffers": f"xla_gpu_enable_command_buffer={KINDS} xla_gpu_graph_min_graph_size=5",
    },
    "schedule": {
        "latency hiding": "xla_gpu_enable_latency_hiding_scheduler=true",
        "no latency hiding": "xla_gpu_enable_latency_hiding_scheduler=false",
    },
    "products": {
        "no Triton products": "xla_gpu_enable_triton_gemm=false",
        "any product by Triton": "xla_gpu_triton_gemm_any=true",
    },
}
UNKNOWN = {"unknown": "xla_no_such_option=1"}
QUICK_OPTIONS = {
    "coma": {"few passes": "xla_llvm_disable_expensive_passes=true", **UNKNOWN},
    "ddpg": UNKNOWN,
    "sac": UNKNOWN,
}


# Units


def maps(quick: bool, folder: Path) -> dict[str, Any]:
    """Compare map backends for the main job."""
    backends = ("dense", "auto") if quick else ("dense", "pallas")
    return _compare("coma", {f"map_backend {name}": {"map_backend": name} for name in backends}, quick)


def rollout_chunk(quick: bool, folder: Path) -> dict[str, Any]:
    """Compare numbers of missions that the main job rolls out together."""
    setup = build_run(_config("coma", quick))
    return _chunks("rollout_chunk", setup.config.run.rollout_chunk, _planned(setup).rollout, quick)


def learn_chunk(quick: bool, folder: Path) -> dict[str, Any]:
    """Compare sample counts of one gradient evaluation of the main job."""
    setup = build_run(_config("coma", quick))
    return _chunks("learn_chunk", setup.config.run.learn_chunk, _planned(setup).learn, quick)


def convolution(quick: bool, folder: Path) -> dict[str, Any]:
    """Compare convolution methods for the main job."""
    methods = ("auto",) if quick else ("auto", "patches", "dense")
    candidates: dict[str, dict[str, Any]] = {f"convolution {name}": {"convolution": name} for name in methods}
    if not quick:
        candidates["convolution by fusions"] = {"compiler_options": "xla_gpu_experimental_enable_conv_fusion=true"}
    return _compare("coma", candidates, quick)


def coma_graphs(quick: bool, folder: Path) -> dict[str, Any]:
    """Compare command buffers (CUDA graphs) for the main job."""
    return _options("coma", OPTIONS["graphs"], quick)


def coma_schedule(quick: bool, folder: Path) -> dict[str, Any]:
    """Compare orders of operations in the main job."""
    return _options("coma", OPTIONS["schedule"], quick)


def coma_products(quick: bool, folder: Path) -> dict[str, Any]:
    """Compare matrix products of the main job."""
    return _options("coma", OPTIONS["products"], quick)


def ddpg(quick: bool, folder: Path) -> dict[str, Any]:
    """Compare all options on a block of `ddpg`."""
    return _options("ddpg", all_options(), quick)


def sac(quick: bool, folder: Path) -> dict[str, Any]:
    """Compare all options on a block of `sac`."""
    return _options("sac", all_options(), quick)


def all_options() -> dict[str, str]:
    """Return all groups of `OPTIONS`."""
    return {name: text for group in OPTIONS.values() for name, text in group.items()}


# Comparisons


def _config(job: str, quick: bool) -> Config:
    """Return the configuration of a job, with the variant of its environment that is fastest here."""
    request = command_line.parse((main_job.QUICK if quick else JOBS)[job].split(), "python -m bench.gpu")
    config = request.config.with_run(eval_every=0)
    return main_job.with_fastest_variant(config, config.run.num_envs)


def _laid_out(config: Config) -> Config:
    """Fix chunks and memory as chosen on an idle device, so that candidates differ in nothing else."""
    setup = build_run(config)
    run = setup.config.run
    memory = setup.plan.limit / memory_plan.GIB
    return config.with_run(rollout_chunk=run.rollout_chunk, learn_chunk=run.learn_chunk, memory_gb=memory)


def _planned(setup: Run) -> memory_plan.Chunks:
    """Return the chunks that the memory plan chooses without measurements."""
    return memory_plan.choose_chunks(setup.env, setup.algo, 0, 0, setup.plan.limit)


def _chunks(name: str, usual: int, planned: int, quick: bool) -> dict[str, Any]:
    """Return chunks of the main job: the default, the memory plan's choice, and divisors of it."""
    sizes = dict.fromkeys([usual, *(largest_divisor(planned, planned // part) for part in PARTS)])
    candidates = {f"{name} {size}": {name: size} for size in list(sizes)[: 1 if quick else None]}
    return _compare("coma", candidates, quick, keep=True)


def _options(job: str, candidates: Mapping[str, str], quick: bool) -> dict[str, Any]:
    """Compare compiler options, added to those in use."""
    taken = tuned.parse_options(build_run(_config(job, quick)).config.run.compiler_options)
    changes = {"options as they are": {"compiler_options": tuned.write_options(taken)}}
    if taken:
        changes["no options"] = {"compiler_options": ""}
    for name, text in (QUICK_OPTIONS[job] if quick else candidates).items():
        changes[name] = {"compiler_options": tuned.write_options(taken | tuned.parse_options(text))}
    return _compare(job, changes, quick, keep=True)


def _compare(job: str, candidates: Mapping[str, Mapping[str, Any]], quick: bool, keep: bool = False) -> dict[str, Any]:
    """Compare seconds of an iteration of each candidate; all continue one training state.

    Args:
        job: of `JOBS`.
        candidates: {name: settings}, the first is the default.
        quick: a rehearsal, whose figures mean nothing.
        keep: whether to write the settings of one that wins into the table.

    Raises:
        UserError: the first candidate cannot be run.
    """
    config, until = _laid_out(_config(job, quick)), time.monotonic() + COMPILING
    held: list[Any] = []
    samplers, compiling, skipped = [], {}, {}
    setups: dict[str, Run] = {}
    for name, change in candidates.items():
        if time.monotonic() > until:
            skipped[name] = f"compiling took more than {COMPILING:.0f} s before its turn came"
            continue
        began = time.perf_counter()
        try:
            setups[name] = build_run(configuration.changed(config, dict(change)))
            block = _compiled(setups[name])
            compiling[name] = time.perf_counter() - began
            call = functools.partial(_advance, block, setups[name], held)
            jax.block_until_ready(call())
        except Exception as error:  # unknown option, too little memory, any compiler error
            skipped[name] = one_line(f"{type(error).__name__}: {error}")[:500]
            held.clear()
            continue
        samplers.append(stopwatch(name, call, 0.0 if quick else 0.2))
    usual = next(iter(candidates))
    if usual in skipped:
        raise UserError(f"{usual} cannot be run: {skipped[usual]}")
    iterations = config.run.block_iterations
    timings = measure_interleaved(samplers, 2 if quick else ROUNDS)
    best = winner(timings, usual)
    kept = _keep(setups[usual], candidates[best], quick) if keep and best != usual else {}
    rows: list[list[Any]] = [
        [
            f"{job}: {name}",
            timing.median / iterations,
            f"s an iteration (ready after {compiling[name]:.3g} s)",
        ]
        for name, timing in timings.items()
    ]
    rows += [[f"{job}: {name}", "left out", why] for name, why in skipped.items()]
    rows.append([f"{job}: fastest by more than the spread", best, f"({gain(timings, usual, best):+.1%} in speed)"])
    return {
        "rows": rows,
        "seconds": {name: timing.plain() for name, timing in timings.items()},
        "compile_seconds": compiling,
        "candidates": candidates,
        "skipped": skipped,
        "best": best,
        "kept": kept,
    }


def winner(timings: Mapping[str, Timing], usual: str) -> str:
    """Return the fastest if it beats the default by more than the spread of either's samples, else the default."""
    best = min(timings, key=lambda name: timings[name].median)
    spread = max(max(timings[name].seconds) - min(timings[name].seconds) for name in (usual, best))
    return best if timings[usual].median - timings[best].median > spread else usual


def gain(timings: Mapping[str, Timing], usual: str, best: str) -> float:
    """Return by what share `best` is faster than the default."""
    return timings[usual].median / timings[best].median - 1


def _compiled(setup: Run) -> Any:
    """Compile a block of the phase that training spends its time in. Raises TooLargeError."""
    block = compile_block(setup)
    setup.plan.check(memory_plan.compiled_bytes(block))
    return block


def _advance(block: Any, setup: Run, held: list[Any]) -> Any:
    """Run a whole block of iterations on the training state in `held`."""
    if not held:
        index = setup.algo.phases.index(measured_phase(setup.algo))
        held.append(dataclasses.replace(setup.trainer.init(jax.random.key(0)), phase=_placed(index, setup)))
    held[0], metrics = block(held[0], _placed(setup.config.run.block_iterations, setup))
    return held[0], metrics


def _placed(number: int, setup: Run) -> jax.Array:
    return jax.device_put(jnp.int32(number), shardings(setup.mesh, REPLICATED))


def _keep(setup: Run, settings: Mapping[str, Any], quick: bool) -> dict[str, Any]:
    """Write settings into the tables: beside the programs of this benchmark, and among the user's own.

    Returns:
        the tables' entries, {job: settings}.
    """
    name = tuned.job(setup.config, setup.env, setup.algo)
    rehearsal = quick or jax.default_backend() == "cpu"
    for folder in (cache_folder(),) if rehearsal else dict.fromkeys((cache_folder(), cache_root())):
        tuned.record(name, dict(settings), folder / tuned.FILE, measure.say)
    return {name: dict(settings)}
