"""python -m bench.studies.scaling AXIS ...: how speed and memory grow with copies, map, agents, snakes or devices.

Environment steps per CPU second on one core, with random actions, auto-reset and observations, as `bench.peers`
measures them; the values of an axis take turns. For the axis "devices", start the process with JAX_NUM_CPU_DEVICES=8: a
core that plays eight devices shows what dividing the copies costs, not what eight devices gain. The axis "learning" is
PPO on CartPole-v1 of gymnax, with the same updates per environment step, until a greedy return of 475.
"""

import dataclasses
import functools
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
from matplotlib.figure import Figure

from bench.harness import measure
from bench.harness.timing import Timing
from bench.peers.environments import Game, Measured, Skipped, compiled, ours
from envs_jax.base import closest
from envs_jax.snakes.types import PUBLISHED
from jaxrl.cli.entry import exit_on_error
from jaxrl.cli.values import parse_int
from jaxrl.common.errors import UsageError

KIND = "scaling"
LEAST = 0.3  # CPU seconds per sample


@dataclasses.dataclass(frozen=True)
class Axis:
    """An axis of the study: the values of what is varied.

    Attributes:
        label: of the horizontal axis.
        values: the points.
        curves: {name: (environment, settings, copies)} at a value.
    """

    label: str
    values: tuple[int, ...]
    curves: Callable[[int], dict[str, tuple[str, dict[str, Any], int]]]


def _copies(copies: int) -> dict[str, tuple[str, dict[str, Any], int]]:
    return {
        "coverage, q = 7": ("coverage", {"q": 7}, copies),
        "snakes": ("snakes_3v3", PUBLISHED, copies),
        "reach": ("reach", {"goals": "pool"}, copies),
    }


AXES = {
    "copies": Axis("copies", (1, 8, 64, 512, 4096, 16384), _copies),
    "map": Axis(
        "q, cells along the camera footprint",
        (7, 14, 28, 57),
        lambda q: {"coverage, 64 copies": ("coverage", {"q": q}, 64)},
    ),
    "agents": Axis(
        "agents",
        (1, 2, 4, 8),
        lambda agents: {"coverage, q = 7, 64 copies": ("coverage", {"q": 7, "num_agents": agents}, 64)},
    ),
    "snakes": Axis(
        "snakes on 10 x 20 cells",
        (2, 6, 10, 14),
        lambda snakes: {
            "snakes, 1,024 games": ("snakes", PUBLISHED | {"height": 10, "width": 20, "snakes": snakes}, 1024)
        },
    ),
    "devices": Axis(
        "devices on one core", (1, 2, 4, 8), lambda _: {"snakes, 4,096 games": ("snakes_3v3", PUBLISHED, 4096)}
    ),
}
LEARNING = (1, 4, 16, 64, 256)  # copies


def divided(game: Game, devices: int) -> Game:
    """Return an environment whose copies are divided among devices; `game` is that of one device."""
    from jaxrl.runtime.data_parallel import AXIS, REPLICATED, SPLIT, make_mesh, on_mesh

    reset, step, agents = game
    mesh = make_mesh(devices)

    def own(key: Any) -> Any:
        return jax.random.fold_in(key, jax.lax.axis_index(AXIS))

    return (
        on_mesh(lambda key: reset(own(key)), mesh, (REPLICATED,), SPLIT),
        on_mesh(lambda carry, key: step(carry, own(key)), mesh, (SPLIT, REPLICATED), SPLIT),
        agents,
    )


def run(name: str, axis: Axis, rounds: int, limit: float, say: measure.Say) -> list[dict[str, Any]]:
    """Measure one axis; rows {"axis", "value", "curve", "num_envs", "rate", ...}."""
    rows, opened = [], list[tuple[dict[str, Any], Measured]]()
    for value in axis.values:
        for curve, (env, settings, copies) in axis.curves(value).items():
            devices = value if name == "devices" else 1
            game = ours(env, copies // devices, **settings)
            row: dict[str, Any] = {"axis": name, "value": value, "curve": curve, "num_envs": copies}
            rows.append(row)
            try:
                made = compiled(*(divided(game, devices) if devices > 1 else game)[:2], copies, game[2], limit)
            except Skipped as reason:
                row["skipped"] = str(reason)
            else:
                row |= {"agents": made.agents} | made.facts
                opened.append((row, made))
            say(f"{name} {value}, {curve}: {row.get('skipped', 'compiled')}")
    samples: list[list[float]] = [[] for _ in opened]
    for _ in range(rounds + 1):  # the first one chooses the number of steps
        for (_, made), seconds in zip(opened, samples, strict=True):
            sample = made.sample(LEAST)
            seconds.append(sample["cpu"] / sample["env_steps"])
    for (row, _), seconds in zip(opened, samples, strict=True):
        row |= measure.rate(Timing(tuple(seconds[1:])), 1)
    return rows


def learning(say: measure.Say) -> list[dict[str, Any]]:
    """Train PPO on more and more copies until it has learned."""
    from bench.peers import learners

    rows = []
    for copies in LEARNING:
        steps = max(4096 // copies, 16)  # of a rollout
        changes = {"num_envs": copies, "rollout_steps": steps, "num_minibatches": copies * steps // 256}
        task = dataclasses.replace(learners.CARTPOLE, ours=learners.CARTPOLE.ours | changes)
        clock = learners.Clock(task, learners.TASKS["ppo"][1])
        learners.LEARNERS["ours"]("ppo", task, 1, learners.Watch(2 * copies * steps, clock.evaluate))
        found: dict[str, Any] = clock.reached or {"skipped": f"a return of {clock.rows[-1]['return']:.0f} at the end"}
        rows.append({"axis": "learning", "value": copies, "curve": "PPO on CartPole-v1", **found})
        say(f"learning, {copies} copies: {found.get('skipped', 'learned')}")
    return rows


def draw(name: str, rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw environment steps per CPU second and bytes per copy, or seconds to the score."""
    keys = ["rate", "bytes_per_copy"] if name != "learning" else ["cpu", "env_steps"]
    titles = {
        "rate": "environment steps per CPU second", "bytes_per_copy": "bytes per copy",
        "cpu": "CPU seconds to a return of 475", "env_steps": "environment steps to it",
    }  # fmt: skip
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    for axes, key in zip(figure.subplots(1, 2), keys, strict=True):
        for curve in dict.fromkeys(row["curve"] for row in rows):
            points = [(row["value"], row[key]) for row in rows if row["curve"] == curve and key in row]
            axes.loglog(*zip(*points, strict=True), marker="o", label=curve)
        values = sorted({row["value"] for row in rows})
        axes.set_xticks(values, [f"{value:,}" for value in values])
        axes.minorticks_off()
        axes.set_xlabel(AXES[name].label if name in AXES else "copies")
        axes.set_title(titles[key], fontsize=10)
        axes.grid(True, which="both", alpha=0.3)
        axes.legend(fontsize=8)
    figure.savefig(path, dpi=120)


@exit_on_error
def main(argv: Sequence[str]) -> int:
    """Entry point; returns the exit code."""
    assert __doc__ is not None
    parser = measure.parser("python -m bench.studies.scaling", __doc__)
    names = (*AXES, "learning")
    parser.add_argument("axes", nargs="*", metavar="AXIS", help=f"{', '.join(names)} (default: copies)")
    parser.add_argument("--core", default="0", metavar="N", help="core to run on, -1 = any (default: 0)")
    parser.add_argument("--memory_gb", default="4", metavar="X", help="GiB that one environment may use (default: 4)")
    parser.add_argument("--rounds", default="5", metavar="N", help="samples of everything, in turns (default: 5)")
    parser.add_argument("--out", metavar="FILE", help="JSON file to write (default: a new one under bench/results/)")
    parsed = parser.parse_args(list(argv))
    axes = parsed.axes or ["copies"]
    for axis in axes:
        if axis not in names:
            raise UsageError(f"unknown axis '{axis}': {closest(axis, names)}")
    if "devices" in axes and (found := jax.local_device_count()) < max(AXES["devices"].values):
        most = max(AXES["devices"].values)
        raise UsageError(
            f"the axis devices needs {most} devices, here are {found}: start with JAX_NUM_CPU_DEVICES={most}"
        )
    core = parse_int(parsed.core, "--core", -1, (os.cpu_count() or 1) - 1)
    if core >= 0:
        os.sched_setaffinity(0, {core})
    path = measure.output(parsed.out, KIND)
    result = measure.header(f"studies.{KIND}", argv, quick=False) | {"rows": []}
    measure_axis = functools.partial(
        run, rounds=measure.rounds(parsed.rounds), limit=measure.gibibytes_of(parsed.memory_gb), say=measure.say
    )
    with measure.fresh_compiles():
        for axis in axes:
            rows = learning(measure.say) if axis == "learning" else measure_axis(axis, AXES[axis])
            result["rows"] += rows
            measure.write(result, path)
            draw(axis, rows, path.with_name(f"{path.stem}_{axis}.png"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
