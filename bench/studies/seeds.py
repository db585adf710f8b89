"""python -m bench.studies.seeds [--seeds 16] [--jobs sac,ddpg]: one program of N seeds against N runs in turn.

All train the same seeds on the first device. One program can train its seeds at once ("vectorized") or in turns
("in_turns"); a run chooses by its device. The result holds compile seconds, seconds per block of iterations of all
seeds (samples in turns), and how far the losses of each seed are from those of the single run of that seed.
"""

import dataclasses
import sys
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from bench.harness import measure
from bench.harness.timing import measure_interleaved
from bench.train_throughput import measured_phase
from envs_jax.base import closest
from jaxrl.algos.base import Phase
from jaxrl.cli import flags as command_line
from jaxrl.cli.entry import exit_on_error
from jaxrl.common.errors import UsageError
from jaxrl.runtime.build import Run, build_run
from jaxrl.runtime.train_state import TrainState

KIND = "seeds"
JOBS = {
    "sac": "--config sac --eval_every 0 --buffer_size 100000",
    "ddpg": "--config ddpg --eval_every 0 --buffer_size 40000 --learning_starts 2560 --opponent 0:1,2:2,4:1,evasion:1",
}
QUICK = "--num_envs 16 --batch_size 32 --hidden_size 16 --buffer_size 4000"


def run(job: str, seeds: int, iterations: int, rounds: int, quick: bool, say: measure.Say) -> dict[str, Any]:
    """Measure one job; the entry of a result."""
    flags = f"{JOBS[job]} --devices 1 --block_iterations {iterations} " + (QUICK if quick else "")
    several, single = (
        build_run(command_line.parse(f"{flags} --num_seeds {count}".split(), "python -m bench.studies.seeds").config)
        for count in (seeds, 1)
    )
    setups = {"single": single} | {
        name: dataclasses.replace(several, trainer=dataclasses.replace(several.trainer, vectorized=vectorized))
        for name, vectorized in (("vectorized", True), ("in_turns", False))
    }
    phase = measured_phase(single.algo)
    found: dict[str, Any] = {"flags": flags, "iterations_per_block": iterations}
    programs = {}
    for name, setup in setups.items():
        began = time.monotonic()
        programs[name] = _compiled(setup)
        found[f"compile_seconds_{name}"] = time.monotonic() - began
        say(f"{job}: compiled {name} in {found[f'compile_seconds_{name}']:.1f} s")

    states, losses = {}, {}
    alone = []
    for seed in range(seeds):
        states["single"], loss = _train(single, programs["single"], phase, iterations, seed)
        alone.append(loss[:, 0])
    wanted = np.stack(alone, axis=1)
    for name in ("vectorized", "in_turns"):
        states[name], losses[name] = _train(setups[name], programs[name], phase, iterations)
        difference = np.abs(losses[name] / wanted - 1).max(axis=1)
        shown = [number for number in (1, 10, 100, len(difference)) if number <= len(difference)]
        found[f"relative_difference_{name}"] = {f"first_{n}_updates": float(difference[:n].max()) for n in shown}
        say(f"{job}, {name}: relative differences of the critics' loss {found[f'relative_difference_{name}']}")
    block = {name: programs[name][phase.name] for name in programs}

    def sample(name: str, times: int) -> Any:
        def call() -> dict[str, float]:
            began = time.monotonic()
            for _ in range(times):
                states[name], metrics = block[name](states[name], np.int32(iterations))
                jax.block_until_ready(metrics)
            return {name: time.monotonic() - began}

        return call

    samples = [sample("single", seeds), sample("vectorized", 1), sample("in_turns", 1)]
    timings = measure_interleaved(samples, rounds)
    found["seconds"] = {name: timing.plain() for name, timing in timings.items()}
    runs = timings["single"].median
    for name in ("vectorized", "in_turns"):
        found[f"speed_{name}"] = runs / timings[name].median
        say(f"{job}, {name}: {timings[name].median:.3f} s for {seeds} seeds, {seeds} runs {runs:.3f} s")
    return found


def _compiled(setup: Run) -> dict[str, Any]:
    """Compile the start and every phase."""
    trainer, shapes, number = setup.trainer, setup.trainer.shapes(), jax.ShapeDtypeStruct((), np.int32)
    block: Any = trainer.make_block
    begin: Any = trainer.make_init()
    blocks = {phase.name: block(phase).lower(shapes, number).compile() for phase in setup.algo.phases}
    return {"": begin.lower(jax.eval_shape(lambda: trainer.keys(0)), None).compile(), **blocks}


def _train(
    setup: Run, programs: dict[str, Any], last: Phase, iterations: int, seed: int = 0
) -> tuple[TrainState, np.ndarray]:
    """Train from the start through one block of the phase `last`.

    Returns:
        the state; the critic's loss, float32[updates, seeds].
    """
    state, losses = programs[""](setup.trainer.keys(seed), None), []
    for index, phase in enumerate(setup.algo.phases):
        for name, value in {"phase": index, "iteration": 0}.items():
            placed = jax.tree.map(lambda x, value=value: x * 0 + value, getattr(state, name))
            state = dataclasses.replace(state, **{name: placed})
        left = iterations if phase == last else phase.iterations or 0
        while left:
            now = min(left, iterations)
            state, metrics = programs[phase.name](state, np.int32(now))
            left -= now
            if phase.updates:
                loss = np.asarray(metrics.learning["critic_loss"])[:now]  # [iterations(, seeds), updates]
                loss = loss.reshape(now, setup.trainer.trials, phase.updates)
                losses.append(np.moveaxis(loss, 1, 2).reshape(-1, setup.trainer.trials))
        if phase == last:
            break
    return state, np.concatenate(losses)


@exit_on_error
def main(argv: Sequence[str]) -> int:
    """Entry point; returns the exit code."""
    assert __doc__ is not None
    parser = measure.parser("python -m bench.studies.seeds", __doc__)
    parser.add_argument("--seeds", default="16", metavar="N", help="seeds (default: 16)")
    parser.add_argument("--jobs", default=",".join(JOBS), metavar="A,B", help=f"of {', '.join(JOBS)} (default: all)")
    parser.add_argument("--iterations", default="32", metavar="N", help="iterations per sample (default: 32)")
    parser.add_argument("--rounds", default="5", metavar="N", help="samples of everything, in turns (default: 5)")
    parser.add_argument("--out", metavar="FILE", help="JSON file to write (default: a new one under bench/results/)")
    parser.add_argument("--quick", action="store_true", help="a rehearsal in seconds: the figures mean nothing")
    parsed = parser.parse_args(list(argv))
    jobs = parsed.jobs.replace(",", " ").split()
    for job in jobs or ("",):
        if job not in JOBS:
            raise UsageError(f"--jobs: unknown job '{job}': {closest(job, JOBS)}")
    seeds = measure.parse_int(parsed.seeds, "--seeds", 2, 4096)
    iterations = measure.parse_int(parsed.iterations, "--iterations", 1, 10_000)
    rounds = measure.rounds(parsed.rounds)
    path = measure.output(parsed.out, KIND)
    result = measure.header(f"studies.{KIND}", argv, parsed.quick)
    for note in result["notes"]:
        measure.say(note)
    with measure.fresh_compiles():
        result |= {"seeds": seeds} | {
            job: run(job, seeds, iterations, rounds, parsed.quick, measure.say) for job in jobs
        }
    measure.write(result, path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
