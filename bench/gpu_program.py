"""python -m bench.gpu_program [--programs coma_4096,ddpg] [--gpus 1,8]: jobs compiled for GPUs that are absent.

Fully compiles the programs for NVIDIA H200s (XLA, Triton, selection of cuDNN calls without autotuning), and runs
nothing. Shows for each: operations of the host (a CUDA graph is one, whatever it contains), kernels and copies on the
GPU, the same for every loop inside, library calls, collectives and bytes. Needs a Linux environment with jax[cuda12] or
jax[cuda13], but no GPU and no driver. Where a number of repetitions is not known in advance, one is counted. Run
again with the same --out it compiles what is missing there; all programs take an hour or two.
"""

import argparse
import dataclasses
import functools
import itertools
import os
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec, use_abstract_mesh

import envs_jax
from bench.gpu import correct, score, thunks, tuning
from bench.harness import measure
from bench.studies import seeds
from bench.train_throughput import measured_phase
from envs_jax.base import closest, short_repr
from envs_jax.batch import batched
from envs_jax.progress import start
from envs_jax.snakes.types import PUBLISHED
from jaxrl.algos.base import Phase
from jaxrl.cli import flags as command_line
from jaxrl.cli.entry import exit_on_error
from jaxrl.common.errors import UsageError, UserError, one_line
from jaxrl.evaluation.rollouts import Evaluator, learned
from jaxrl.nn import networks as nets
from jaxrl.runtime import config as configuration
from jaxrl.runtime import memory_plan, run_directory
from jaxrl.runtime.build import Run, unchecked_run
from jaxrl.runtime.data_parallel import AXIS, REPLICATED, graphs, shardings

TARGET = Path(__file__).parent / "gpu" / "h200.txtpb"
KIND = "gpu_program"
MOST = 8  # GPUs
MEMORY = 0.95 * 141e9 / memory_plan.GIB  # GiB that a run may use of an H200
LIBRARY = ("kGemm", "kCublasLtMatmul", "kConvolution", "kCuDnn", "kCustomCall", "kCholesky", "kTriangularSolve", "kFft")
COLLECTIVE = re.compile(
    r"^ *(?:ROOT )?%?([\w.\-]+) = (.*?) (all-reduce|all-gather|reduce-scatter|all-to-all)(-start)?\("
)
BYTES = {"pred": 1, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "bf16": 2, "f16": 2, "s64": 8, "u64": 8, "f64": 8}  # others 4


class Program(NamedTuple):
    """A jitted function to compile and its arguments, ShapeDtypeStructs with shardings."""

    name: str
    function: Any
    arguments: tuple[Any, ...]


@functools.cache  # devices of two calls would not be compatible
def absent_mesh(gpus: int) -> Mesh:
    """Return a mesh of absent H200s of one host. Raises UserError where JAX has no CUDA plugin."""
    try:
        topology = topologies.get_topology_desc(
            platform="cuda", topology_name="gpu", topology=f"1x1x{gpus}", target_config=TARGET.read_text()
        )
    except (RuntimeError, NotImplementedError, ValueError) as error:
        raise UserError(
            f"nothing can be compiled for GPUs here ({error}): install jax[cuda12] or jax[cuda13]"
        ) from None
    return Mesh(np.array(topology.devices), (AXIS,), axis_types=(AxisType.Auto,))


# Programs


def of_run(flags: str, gpus: int) -> Iterator[Program]:
    """Return the programs of a run: start, all phases and evaluation."""
    setup = _setup(flags, gpus)
    shapes, replicated = setup.trainer.shapes(), shardings(setup.mesh, REPLICATED)
    for phase in setup.algo.phases:
        yield _block(f"phase '{phase.name}'", setup, phase)

    def place(tree: Any) -> Any:
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=replicated), tree)

    key = place(jax.eval_shape(lambda: jax.random.key(0)))
    yield Program("start", setup.trainer.make_init(), (key, None))
    if setup.config.run.eval_every:
        yield _evaluation(setup, place(jax.eval_shape(setup.algo.policy, shapes.algo)), key, place)


def of_tuning(job: str, gpus: int) -> Iterator[Program]:
    """Return iterations of a job of the part "tuning", with each of the compiler's options."""
    for name, options in tuning.all_options().items():
        setup = _setup(tuning.JOBS[job], gpus, compiler_options=options)
        yield _block(name, setup, measured_phase(setup.algo))


def of_seeds(flags: str, gpus: int) -> Iterator[Program]:
    """Return iterations of one seed, and of sixteen seeds in one program."""
    for count in (1, 16):
        setup = _setup(f"{flags} --num_seeds {count}", gpus)
        yield _block(f"{count} seeds" if count > 1 else "1 seed", setup, measured_phase(setup.algo))


def _setup(flags: str, gpus: int, **changes: Any) -> Run:
    """Build the run of a configuration for absent GPUs."""
    request = command_line.parse(flags.split(), "python -m bench.gpu_program")
    config = configuration.changed(request.config.with_run(devices=gpus, memory_gb=MEMORY), changes)
    made, mesh = unchecked_run(config), absent_mesh(gpus)
    return dataclasses.replace(made, mesh=mesh, trainer=dataclasses.replace(made.trainer, mesh=mesh))


def _block(name: str, setup: Run, phase: Phase) -> Program:
    number = jax.ShapeDtypeStruct((), jnp.int32, sharding=shardings(setup.mesh, REPLICATED))
    return Program(name, setup.trainer.make_block(phase), (setup.trainer.shapes(), number))


def _evaluation(setup: Run, policy: Any, key: Any, place: Callable[[Any], Any]) -> Program:
    evaluator = Evaluator(
        setup.eval_env,
        learned(setup.algo, "greedy"),
        setup.eval_episodes,
        setup.mesh,
        setup.config.run.rollout_chunk,
        setup.algo.init_carry,
    )
    context = place(jax.eval_shape(setup.eval_env.context, setup.trainer.shapes().progress))
    return Program("evaluation", evaluator.compiled(), (policy, key, context))


def of_device(gpus: int) -> Iterator[Program]:
    """Return the programs by which `bench.gpu` measures the device."""
    del gpus
    square = lambda dtype: _placed(((8192, 8192), dtype))  # noqa: E731
    yield Program("copy", jax.jit(lambda x: -x, donate_argnums=0), (_placed(((2**28,), jnp.float32)),))
    for name, dtype, precision in (
        ("float32", jnp.float32, "highest"), ("tf32", jnp.float32, None), ("bfloat16", jnp.bfloat16, None)
    ):  # fmt: skip
        product = jax.jit(functools.partial(jnp.matmul, precision=precision))
        yield Program(f"matrix product, {name}", product, (square(dtype), square(dtype)))

    def loss(x: Any, kernel: Any) -> Any:
        return jnp.sum(jnp.square(nets.convolve(x, kernel, "conv")).astype(jnp.float32))

    shapes = ((8192, 7, 7, 256), jnp.bfloat16), ((4, 4, 256, 256), jnp.bfloat16)
    yield Program("convolution", jax.jit(jax.grad(loss, argnums=(0, 1))), tuple(map(_placed, shapes)))


def of_env(name: str, num_envs: int, **settings: Any) -> Iterator[Program]:
    """Return reset and step of environments on one GPU."""
    env = batched(envs_jax.make(name, **settings))
    context = jax.eval_shape(env.context, jax.eval_shape(start))
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), num_envs))
    state, timestep = jax.eval_shape(env.reset, keys, context)
    space = env.spec.action
    action = jax.ShapeDtypeStruct((num_envs, env.spec.num_agents, *space.shape), space.dtype)
    keys, context, state, timestep, action = _on_one((keys, context, state, timestep, action))
    yield Program("reset", jax.jit(env.reset, compiler_options=graphs()), (keys, context))
    yield Program(
        "step", jax.jit(env.step, donate_argnums=(0, 1), compiler_options=graphs()), (state, timestep, action, context)
    )


def _placed(shape: tuple[tuple[int, ...], Any]) -> Any:
    return _on_one(jax.ShapeDtypeStruct(*shape))


def _on_one(tree: Any) -> Any:
    place = NamedSharding(absent_mesh(1), PartitionSpec())
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), tree)


Make = Callable[[int], Iterator[Program]]


def _run(flags: str) -> Make:
    return lambda gpus: of_run(flags, gpus)


def _env(name: str, num_envs: int, **settings: Any) -> Make:
    return lambda gpus: of_env(name, num_envs, **settings) if gpus == 1 else iter(())


def _seeds(flags: str) -> Make:
    return lambda gpus: of_seeds(flags, gpus) if gpus == 1 else iter(())


def _tuning(job: str) -> Make:
    return lambda gpus: of_tuning(job, gpus) if gpus == 1 else iter(())


SETS: dict[str, Make] = {
    "device": lambda gpus: of_device(gpus) if gpus == 1 else iter(()),
    "maps_dense": _env("coverage", 1024, map_backend="dense"),
    "maps_pallas": _env("coverage", 1024, map_backend="pallas"),
    **{f"resume_{name}": _run(f"{flags} --eval_every 0") for name, flags in correct.SMALL.items()},
    "coma_4096": _run("--algo coma --num_envs 4096 --map_backend dense"),
    "coma_4096_pallas": _run("--algo coma --num_envs 4096 --map_backend pallas"),
    "coma_16384": _run("--algo coma --num_envs 16384 --map_backend dense"),
    "coma_16384_pallas": _run("--algo coma --num_envs 16384 --map_backend pallas"),
    **{f"score_{name}": _run(flags) for name, flags in score.FLAGS.items()},
    "sac_4096": _run("--config sac --num_envs 4096 --env_steps_per_update 512 --eval_every 0"),
    "coma_4096_patches": _run("--algo coma --num_envs 4096 --map_backend pallas --convolution patches --eval_every 0"),
    "snakes": _env("snakes_3v3", 65536, **PUBLISHED),
    "reach": _env("reach", 65536),
    **{f"tuning_{job}": _tuning(job) for job in tuning.JOBS},
    **{f"seeds_{job}": _seeds(flags) for job, flags in seeds.JOBS.items()},
}  # in the order of the parts of `bench.gpu`; a program for one GPU is the same on each of several


# Compiling and counting


def compiled(program: Program) -> tuple[Any, float]:
    """Compile a program; return it with the seconds that it took."""
    kernels = AbstractMesh((), (), abstract_device=AbstractDevice("NVIDIA H200", 132, "gpu"))  # for Pallas: Triton
    began = time.perf_counter()
    with use_abstract_mesh(kernels):
        made = program.function.trace(*program.arguments).lower().compile()
    return made, time.perf_counter() - began


def counted(made: Any, dump: Path) -> dict[str, Any]:
    """Count operations, library calls, collectives and bytes of a compiled program whose thunks lie in `dump`."""
    text, memory = made.as_text(), made.memory_analysis()
    root, sizes = thunks.read(dump, text), collective_bytes(text)
    calls: Counter[str] = Counter()
    collectives: Counter[str] = Counter()
    for times, leaf in root.leaves():
        if leaf.kind in LIBRARY:
            calls[leaf.kind] += times
        if leaf.name in sizes:
            collectives[sizes[leaf.name]] += times
    return {
        "host_operations": root.host_operations(),
        "nodes": root.nodes(),
        "loops": [loop._asdict() for loop in root.loops()],
        "library_calls": dict(calls),
        "collectives": dict(collectives),
        "argument_bytes": int(memory.argument_size_in_bytes),
        "alias_bytes": int(memory.alias_size_in_bytes),
        "temporary_bytes": int(memory.temp_size_in_bytes),
        "peak_bytes": memory_plan.compiled_bytes(made),
    }


def collective_bytes(hlo: str) -> dict[str, str]:
    """{instruction: "all-reduce of N bytes"} of a program's text."""
    found = {}
    for line in hlo.splitlines():
        if match := COLLECTIVE.match(line):
            size = sum(
                BYTES.get(kind, 4) * int(np.prod([int(d) for d in dims.split(",") if d] or [1]))
                for kind, dims in re.findall(r"(\w+)\[([\d,]*)\]", match[2])
            )
            if match[4]:  # its type lists the operands, too
                size //= 2
            found[match[1]] = f"{match[3]} of {size} bytes"
    return found


# Command line


@exit_on_error
def main(argv: Sequence[str]) -> int:
    """Entry point; returns the exit code."""
    assert __doc__ is not None
    parser = measure.parser("python -m bench.gpu_program", __doc__)
    _flags(parser)
    asked = parser.parse_args(list(argv))
    names = _names(asked.programs)
    numbers = measure.parse_list(asked.gpus, "--gpus", 1, MOST)
    with tempfile.TemporaryDirectory() as dump:
        _without_gpus(Path(dump))
        path = measure.output(asked.out, KIND)
        absent_mesh(1)
        rows = _earlier(path)
        done = {(row["set"], row["program"], row["gpus"]) for row in rows}
        failed: list[str] = []
        for name, gpus in itertools.product(names, numbers):
            programs = list(SETS[name](gpus))
            if not programs:
                print(f"{name}, {_gpus(gpus)}: nothing, its programs run on one GPU alone", flush=True)
            for program in programs:
                if (name, program.name, gpus) in done:
                    continue
                try:
                    made, seconds = compiled(program)
                except RuntimeError as error:  # of XLA: continue with the other programs
                    failed.append(program.name)
                    print(f"{name}, {program.name}, {_gpus(gpus)}: FAILED: {one_line(str(error))}", flush=True)
                    continue
                row = {"set": name, "program": program.name, "gpus": gpus, "compile_seconds": seconds}
                rows.append(row | counted(made, Path(dump)))
                print(line(rows[-1]), flush=True)
                measure.write(_result(rows), path)
                for file in Path(dump).glob("*.txt"):
                    file.unlink()
    return 1 if failed else 0


def _without_gpus(dump: Path) -> None:
    """Make JAX compile for GPUs as if there were some; call before JAX initialises its devices."""
    os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_dump_to={dump}".strip()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", MOST)
    jax.default_backend = lambda: "gpu"  # programs differ between CPUs and GPUs


def _earlier(path: Path) -> list[dict[str, Any]]:
    """Read the rows of an earlier call. Raises UserError where the file is of other versions or something else."""
    if not path.exists():
        return []
    found = measure.read(path)
    if {**found, "rows": []} != _result([]):
        raise UserError(f"{path} holds other results, or those of other versions: choose another file with --out")
    return list(found["rows"])


def _result(rows: list[dict[str, Any]]) -> dict[str, Any]:
    versions = run_directory.versions()
    return {
        "format": measure.FORMAT,
        "kind": KIND,
        "target": "NVIDIA H200, compiled for, not run on",
        "versions": {name: versions[name] for name in ("python", "jax", "jaxlib", "jaxrl")},
        "rows": rows,
    }


def _flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--programs", metavar="A,B,...", help=f"of {', '.join(SETS)} (default: all)")
    parser.add_argument("--gpus", default="1,8", metavar="N,M", help="numbers of GPUs to compile for (default: 1,8)")
    parser.add_argument("--out", metavar="FILE", help="JSON file to write (default: a new one under bench/results/)")


def _names(text: str | None) -> Sequence[str]:
    names = tuple(SETS) if text is None else tuple(text.replace(",", " ").split())
    for name in names or ("",):
        if name not in SETS:
            raise UsageError(f"--programs: there is no set of programs {short_repr(name)}: {closest(name, SETS)}")
    return names


def _gpus(number: int) -> str:
    return f"{number} GPU" if number == 1 else f"{number} GPUs"


def line(row: dict[str, Any]) -> str:
    """Format a row."""
    inside = "; ".join(f"{loop['path']}: {loop['host_operations']} and {loop['nodes']}" for loop in row["loops"])
    return (
        f"{row['set']}, {row['program']}, {_gpus(row['gpus'])}: {row['host_operations']} host operations, "
        f"{row['nodes']} on the GPU, temporaries {row['temporary_bytes'] / memory_plan.GIB:.3f} GiB, "
        f"peak {row['peak_bytes'] / memory_plan.GIB:.3f} GiB, library calls {row['library_calls']}, "
        f"collectives {row['collectives']}, compiled in "
        f"{row['compile_seconds']:.0f} s" + (f"; loops, each time: {inside}" if inside else "")
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
