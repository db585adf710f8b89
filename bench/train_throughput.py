"""python -m bench.train_throughput --algo coma --num_envs 1,64,1024,4096 [--torch]: throughput of training.

Env steps and updates per second of whole training iterations, and the learner's FLOP per second (counted from the
shapes of its layers) next to the machine's rates in matrix products and convolutions. An iteration that would take
longer than --seconds is not run: its rates are projected from one chunk of environments rolled out, and from a training
step with few updates of the same arithmetic. --torch adds the PyTorch learner with the baseline's environment, in
turns. All flags of training are also accepted, such as --q 7 --hidden_size 64 or --config coma_quick."""

import argparse
import dataclasses
import importlib.util
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from bench import baselines
from bench.harness import flops, measure, rates, tables, threads
from bench.harness.timing import Sampler, Timing, measure_interleaved, seconds_of, stopwatch
from envs_jax.progress import start
from jaxrl.algos.base import Algorithm, Phase
from jaxrl.cli import flags as command_line
from jaxrl.cli.entry import exit_on_error
from jaxrl.common.errors import UsageError, UserError, usage_errors
from jaxrl.rl.data_parallel import AXIS, REPLICATED, SPLIT, compiler_options, on_mesh, shardings
from jaxrl.runtime import memory_plan
from jaxrl.runtime.build import Run, build_run
from jaxrl.runtime.config import Config

KIND = "train_throughput"
SIZES = "1,64,1024,4096"
UNNAMED_LENGTH = 10**6  # environment steps of a run whose length nobody named: a few of its iterations are timed
EPISODES = 8  # most that the PyTorch learner collects for a training step; larger ones use copies


@dataclasses.dataclass(frozen=True)
class Request:
    """Parameters of a measurement."""

    config: Config  # settings except num_envs
    num_envs: Sequence[int]  # sizes
    seconds: float = 10.0  # an iteration estimated to take longer is projected
    rounds: int = 5  # samples of everything
    torch: bool = False  # whether to measure the PyTorch learner too
    # number of samples in the shortened training step; 0 = as many as one gradient of the real step has
    samples: int = 0


# Counting


def measured_phase(algo: Algorithm) -> Phase:
    """Return the phase that training spends its time in: the last one that both steps and learns."""
    return [phase for phase in algo.phases if phase.steps and phase.updates][-1]


def _plain(algo: Algorithm) -> Algorithm:
    """Return the algorithm for counting: without devices, and without products that waste work to save time."""
    changes: dict[str, Any] = {"layout": dataclasses.replace(algo.layout, devices=1)}
    if any(field.name == "convolution" for field in dataclasses.fields(algo)):
        changes["convolution"] = "conv"
    return dataclasses.replace(algo, **changes)


def learning_flop(run: Run) -> float:
    """Count the FLOP of one call of `learn` on all devices together."""
    algo, phase = _plain(run.algo), measured_phase(run.algo)
    trainer, state = run.trainer, run.trainer.shapes()
    key, progress = jax.eval_shape(lambda: jax.random.key(0)), jax.eval_shape(start)

    def collect(state: Any, key: Any) -> Any:
        return trainer.rollout(state, phase, key)[:2]

    collected = PartitionSpec(None, AXIS), SPLIT
    arguments = trainer.specs(), REPLICATED
    trajectory, last = jax.eval_shape(on_mesh(collect, run.mesh, arguments, collected), state, key)

    if not algo.learn_stages:

        def learn(state: Any, trajectory: Any, last: Any, key: Any, progress: Any) -> Any:
            return algo.learn(state, trajectory, last, key, progress, phase)

        return flops.count(learn, state.algo, trajectory, last, key, progress)

    # Stages run in loops whose length is an argument, so that their steps are counted one by one.
    learn_inputs = state.algo, trajectory, last, key, progress
    learning, index = jax.eval_shape(algo.begin_learning, *learn_inputs), jax.ShapeDtypeStruct((), jnp.int32)
    flop = flops.count(algo.begin_learning, *learn_inputs) + flops.count(algo.end_learning, learning)
    for stage in algo.learn_stages:

        def step(learning: Any, epoch: Any, index: Any, progress: Any, name: str = stage.name) -> Any:
            return algo.learn_step(learning, name, epoch, index, progress)

        flop += stage.steps * flops.count(step, learning, index, index, progress)
    return flop


def acting_flop(run: Run) -> float:
    """Count the FLOP of acting in one environment for one step."""
    algo, timestep = _plain(run.algo), _timesteps(run, 1)
    policy = jax.eval_shape(algo.policy, run.trainer.shapes().algo)
    actor = jax.eval_shape(algo.init_carry, policy, timestep, jax.ShapeDtypeStruct((1,), jnp.int32))
    keys, progress = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 1)), jax.eval_shape(start)

    def act(policy: Any, carry: Any, timestep: Any, keys: Any, progress: Any) -> Any:
        return algo.act(policy, carry, timestep, keys, progress, "explore")

    return flops.count(act, policy, actor, timestep, keys, progress)


def _timesteps(run: Run, count: int) -> Any:
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), count))
    return jax.eval_shape(lambda keys: run.env.reset(keys, run.env.context(start()))[1], keys)


# Parts of an iteration


class Parts:
    """Collecting and learning of one configuration, compiled separately.

    Attributes:
        run: of the configuration.
        env_steps: of one call of `collect`.
        flop: of one call of `learn`.
    """

    def __init__(self, run: Run, min_seconds: float = 0.1) -> None:
        self.run, self._min_seconds = run, min_seconds
        self.phase = measured_phase(run.algo)
        self.env_steps = self.phase.steps * run.trainer.layout.num_envs
        trainer = run.trainer
        time_first = PartitionSpec(None, AXIS)
        collect = on_mesh(self._collect, run.mesh, (trainer.specs(),), (time_first, SPLIT))
        self._state = trainer.init(jax.random.key(0))
        self._collect_rollout = jax.jit(collect, compiler_options=compiler_options()).lower(self._state).compile()
        self.flop = 0.0

    def _collect(self, state: Any) -> Any:
        """Make the first half of an iteration, like the trainer."""
        return self.run.trainer.rollout(state, self.phase, state.key)[:2]

    def collecting(self, name: str) -> Sampler:
        return stopwatch(name, lambda: self._collect_rollout(self._state), self._min_seconds)

    def learning(self, name: str) -> Sampler:
        """Sample seconds of learning from an iteration; compiles."""
        run, trainer, phase = self.run, self.run.trainer, self.phase
        specs = trainer.specs().algo

        def train(state: Any, trajectory: Any, last: Any, key: Any, progress: Any) -> Any:
            return run.algo.learn(state, trajectory, last, key, progress, phase)

        in_specs = (specs, PartitionSpec(None, AXIS), SPLIT, REPLICATED, REPLICATED)
        function = on_mesh(train, run.mesh, in_specs, (specs, REPLICATED))
        data = jax.block_until_ready(self._collect_rollout(self._state))
        rest = (*data, self._state.key, self._state.progress)
        compiled = (
            jax.jit(function, donate_argnums=0, compiler_options=compiler_options())
            .lower(self._state.algo, *rest)
            .compile()
        )
        self.flop = learning_flop(run)
        held = [jax.tree.map(jnp.copy, self._state.algo)]

        def learn() -> Any:
            held[0], metrics = compiled(held[0], *rest)
            return held[0], metrics

        return stopwatch(name, learn, self._min_seconds)


def iterations(run: Run, block: Any) -> Callable[[], Any]:
    """Return a function that makes a whole iteration, continuing from the last, and returns its results."""
    index = list(run.algo.phases).index(measured_phase(run.algo))
    state = run.trainer.init(jax.random.key(0))
    placed = shardings(run.mesh, REPLICATED)
    held = [dataclasses.replace(state, phase=jax.device_put(jnp.int32(index), placed))]
    one = jax.device_put(jnp.int32(1), placed)

    def iterate() -> Any:
        held[0], metrics = block(held[0], one)
        return held[0], metrics

    return iterate


# One size after another


@dataclasses.dataclass
class Size:
    """One number of environments."""

    run: Run  # its run
    block: Any  # the compiled iteration
    compile_seconds: float  # of the block
    bytes: int  # memory of the block per device
    flop: float  # of learning in an iteration
    whole: bool  # iterations are run, not projected

    @property
    def num_envs(self) -> int:
        return self.run.trainer.layout.num_envs


def compile_block(run: Run) -> Any:
    """Compile the program of the measured phase's iterations."""
    iterations = jax.ShapeDtypeStruct((), jnp.int32, sharding=shardings(run.mesh, REPLICATED))
    block: Any = run.trainer.make_block(measured_phase(run.algo))
    return block.lower(run.trainer.shapes(), iterations).compile()


def compile_size(run: Run, flop_rate: float, seconds: float) -> Size:
    """Compile an iteration; decide by its FLOP whether to run it. Raises memory_plan.TooLargeError."""
    began = time.perf_counter()
    block = compile_block(run)
    took = time.perf_counter() - began
    phase = measured_phase(run.algo)
    needed = memory_plan.compiled_bytes(block)
    memory_plan.check_fits(needed, run.limit, run.trainer.shapes(), run.config, run.algo)
    flop = learning_flop(run)
    acting = acting_flop(run) * run.trainer.layout.num_envs * phase.steps
    return Size(run, block, took, needed, flop, whole=(flop + acting) / flop_rate <= seconds)


def stand_ins(request: Request, size: Size, entry: baselines.Entry | None) -> tuple[Config, Config] | None:
    """Return configurations to project collecting and learning of `size` from; None if there are none."""
    if size.whole:
        return (size.run.config, size.run.config)
    if entry is None:
        return None
    settings, layout = size.run.config.run, size.run.trainer.layout
    chunk = (settings.rollout_chunk or layout.local_envs) * layout.devices
    restarts = measured_phase(size.run.algo).restart
    collecting = request.config.with_run(num_envs=chunk if restarts else size.num_envs, learn_chunk=0)
    return collecting, shorten_config(request, entry, settings.learn_chunk * layout.devices)


def shorten_config(request: Request, entry: baselines.Entry, samples: int) -> Config:
    """Return a training step of the same kind with about `samples` samples."""
    config = request.config
    count, changes = entry.shorten(config.make_env().spec, config.algo_settings, request.samples or samples)
    shorter = dataclasses.replace(config, algo_settings=config.algo_settings | changes)
    return shorter.with_run(num_envs=count, rollout_chunk=0, learn_chunk=0, logical_shards=0)


def run(request: Request, machine_rates: rates.Rates, say: measure.Say, torch: "Torch | None" = None) -> dict[str, Any]:
    """Measure; the entries "algo", "env", "settings", "rows", "torch" and "notes" of a result.

    `torch` is the PyTorch learner, if already made. Raises UserError: no size can be measured.
    """
    entry = baselines.find(request.config.env)
    flop_rate = max(machine_rates.convolution.values())
    notes: list[str] = []
    groups: dict[Any, list[Size]] = {}
    error: UserError | None = None
    for num_envs in request.num_envs:
        try:
            built = build_run(request.config.with_run(num_envs=num_envs))
            say(f"{num_envs:,} environments: compiling an iteration")
            size = compile_size(built, flop_rate, request.seconds)
        except UserError as refused:
            notes.append(f"skipped {num_envs:,} environments: {refused}")
            error = refused
            continue
        configs = stand_ins(request, size, entry)
        if configs is None:
            notes.append(f"skipped {num_envs:,} environments: an iteration takes longer than --seconds")
            continue
        if not size.whole:
            size.block = None
            notes.append(f"{num_envs:,} environments: projected from parts (see 'together' and 'updates measured')")
        key = tuple(str(sorted(part.flat().items(), key=str)) for part in configs)
        groups.setdefault(key, []).append(size)
    if not groups and error is not None:
        raise error
    if request.torch and torch is None:
        try:
            torch = make_torch(request, entry, memory_plan.CPU_SAMPLES)
        except UsageError as refused:
            notes.append(f"no PyTorch learner: {refused}")
    for note in notes:
        say(note)
    rows: list[dict[str, Any]] = []
    for sizes in groups.values():
        rows += _group(request, sizes, entry, torch, machine_rates, say)
    rows.sort(key=lambda row: row["num_envs"])
    settings = {**request.config.env_settings, **request.config.algo_settings}
    return {
        "algo": request.config.algo,
        "env": request.config.env,
        "settings": settings,
        "rows": rows,
        "torch_threads": torch.threads if torch else None,
        "notes": notes,
    }


@dataclasses.dataclass(frozen=True)
class Torch:
    """The PyTorch learner: one instance collects, another learns repeatedly from one collection."""

    samplers: list[Sampler]  # "torch collect" (one episode) and "torch learn" (a training step with few updates)
    env_steps: int  # of an episode
    flop: float  # of that training step
    threads: int  # that PyTorch uses
    step: Callable[[], None]  # collects an episode, then makes that training step


def make_torch(request: Request, entry: baselines.Entry | None, samples: int) -> Torch:
    """Make the PyTorch learner of a entry, on the same device as ours.

    Raises:
        UsageError: there is none for these settings.
        UserError: PyTorch is missing.
    """
    if entry is None or entry.learner is None or entry.algo != request.config.algo:
        raise UsageError(f"there is none for {request.config.algo} on {request.config.env}")
    short = shorten_config(request, entry, samples)
    with usage_errors():
        try:
            device = "cuda" if jax.default_backend() == "gpu" else "cpu"
            arguments = short.env_settings, short.algo_settings, 0, device
            pilot, student = (entry.learner(*arguments) for _ in range(2))
        except ImportError as error:
            raise UserError(str(error)) from None
    copies = -(-short.run.num_envs // EPISODES)
    episodes = short.run.num_envs // copies
    short = short.with_run(num_envs=episodes * copies)
    env_steps = student.collect(episodes, copies) // episodes

    def step() -> None:
        pilot.collect(1)
        student.learn()

    samplers = [stopwatch("torch collect", lambda: pilot.collect(1), 0.1), stopwatch("torch learn", student.learn, 0.1)]
    thread_count = student.threads
    if device == "cpu" and (set_torch := threads.torch_setter()) is not None:
        thread_count = threads.choose_threads(
            lambda: seconds_of(step), set_torch, (1, threads.cores()), min(request.rounds, 3)
        )
    return Torch(samplers, env_steps, learning_flop(build_run(short)), thread_count, step)


def _group(
    request: Request,
    sizes: Sequence[Size],
    entry: baselines.Entry | None,
    torch: Torch | None,
    machine_rates: rates.Rates,
    say: measure.Say,
) -> list[dict[str, Any]]:
    configs = stand_ins(request, sizes[0], entry)
    assert configs is not None
    say(f"measuring {', '.join(f'{size.num_envs:,}' for size in sizes)} environments: compiling parts")
    learning = Parts(build_run(configs[1]))
    collecting = learning if configs[0] == configs[1] else Parts(build_run(configs[0]))
    samplers = [collecting.collecting("collect"), learning.learning("learn")]
    for size in sizes:
        if size.whole:
            samplers.append(stopwatch(f"whole {size.num_envs}", iterations(size.run, size.block), 0.1))
    if torch is not None:
        samplers += torch.samplers
    say(f"measuring {', '.join(f'{size.num_envs:,}' for size in sizes)} environments: in turns")
    timings = measure_interleaved(samplers, request.rounds)
    return [_row(size, collecting, learning, timings, torch, machine_rates) for size in sizes]


def project_seconds(env_steps: float, flop: float, steps_per_second: float, flop_per_second: float) -> float:
    """Project the seconds of an iteration from the rates of its parts."""
    return env_steps / steps_per_second + flop / flop_per_second


def _row(
    size: Size,
    collecting: Parts,
    learning: Parts,
    timings: Mapping[str, Timing],
    torch: Torch | None,
    machine_rates: rates.Rates,
) -> dict[str, Any]:
    phase, layout = measured_phase(size.run.algo), size.run.trainer.layout
    env_steps = phase.steps * size.num_envs
    collect = measure.rate(timings["collect"], collecting.env_steps)
    learn = measure.rate(timings["learn"], learning.flop)
    learn["of_matmul"] = learn["rate"] / layout.devices / machine_rates.matmul[jnp.dtype(layout.compute_dtype).name]
    learn["of_convolution"] = learn["rate"] / layout.devices / max(machine_rates.convolution.values())
    whole = timings.get(f"whole {size.num_envs}")
    seconds = whole.median if whole else project_seconds(env_steps, size.flop, collect["rate"], learn["rate"])
    row = {
        "num_envs": size.num_envs,
        "projected": whole is None,
        "iteration_seconds": seconds,
        "whole": whole.plain() if whole else None,
        "env_steps_per_second": env_steps / seconds,
        "updates": phase.updates,
        "updates_per_second": phase.updates / seconds,
        "collect": collect | {"num_envs": collecting.run.trainer.layout.num_envs},
        "learn": learn | {"updates": learning.phase.updates, "flop": learning.flop},
        "flop_per_iteration": size.flop,
        "acting_flop_per_env_step": acting_flop(size.run),
        "compile_seconds": size.compile_seconds,
        "bytes_per_device": size.bytes,
        "bytes_per_env": size.bytes * layout.devices / size.num_envs,
        "devices": layout.devices,
        "torch": None,
    }
    if torch is not None:
        stepping = measure.rate(timings["torch collect"], torch.env_steps)
        learning_rate = measure.rate(timings["torch learn"], torch.flop)
        theirs = project_seconds(env_steps, size.flop, stepping["rate"], learning_rate["rate"])
        row["torch"] = {
            "collect": stepping,
            "learn": learning_rate,
            "env_steps_per_second": env_steps / theirs,
            "updates_per_second": phase.updates / theirs,
            "times": theirs / seconds,
        }
    return row


# Command line


def _flags(parser: argparse.ArgumentParser) -> None:
    measure.add_common(parser, SIZES)
    parser.add_argument("--seconds", default="10", metavar="X", help="project iterations that would take longer "
                        "than X seconds by their FLOP (default: 10)")  # fmt: skip
    parser.add_argument(
        "--torch", action="store_true", help="time the PyTorch learner too, in the baseline's environment"
    )


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, Request]:
    """Parse the command line. Raises UsageError."""
    assert __doc__ is not None
    bench_parser = command_line.Parser(prog="python -m bench.train_throughput", add_help=False)
    _flags(bench_parser)
    parsed, others = bench_parser.parse_known_args(list(argv))
    if any(word in ("-h", "--help") for word in others):
        print(bench_parser.format_help(), __doc__.partition("\n\n")[2], sep="\n")
    request = command_line.parse(others, "python -m bench.train_throughput", __doc__)
    if request.config is None or request.resume is not None:
        raise measure.UsageError("the benchmark starts no run and resumes none: give --algo or --config")
    if parsed.torch and importlib.util.find_spec("torch") is None:
        raise measure.UsageError("--torch needs PyTorch: pip install -e '.[torch]'")
    config = request.config
    if not config.run.total_env_steps and not config.run.total_episodes:
        config = config.with_run(total_env_steps=UNNAMED_LENGTH)
    seconds = measure.positive(parsed.seconds, "--seconds")
    return parsed, Request(
        config=config,
        num_envs=measure.sizes(parsed, SIZES),
        seconds=seconds,
        rounds=measure.rounds(parsed),
        torch=parsed.torch,
    )


def network_width(config: Config) -> int:
    """Return the width whose convolution is the reference rate."""
    return int(config.algo_settings.get("hidden_size", 256))


@exit_on_error
def main(argv: Sequence[str]) -> int:
    """Entry point; returns the exit code."""
    parsed, request = parse(argv)
    path = measure.output(parsed.out, KIND)
    with measure.fresh_compiles():
        result = measure.header(KIND, argv, parsed.quick)
        for note in result["notes"]:
            measure.say(note)
        measure.say("measuring the machine")
        machine_rates = rates.measure(network_width(request.config), quick=parsed.quick, rounds=request.rounds)
        measured = run(request, machine_rates, measure.say)
    result |= {"rates": machine_rates.plain(), **measured, "notes": [*result["notes"], *measured["notes"]]}
    measure.write(result, path)
    tables.show(result, path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
