"""python -m bench.studies.known TASK LEARNER --seed N --out FILE: train on a known environment, and score the policy.

LEARNER is one of ours or that of another library (`known_peers`), at the same number of steps. Replay learners have the
same networks, batches, replay, discount and learning rates, and one update for each environment step; ours also makes
those of the random steps at the start, Brax fixes the temperature's rate and half the usual target entropy. The final
policy plays held-out episodes. Seconds are CPU seconds of training, without imports: start the process on one core,
`taskset -c 1 python -m bench.studies.known ...` with JAX_NUM_CPU_DEVICES=1.
`python -m bench.studies.known --table FILE...` joins such files to one result and prints its table.
"""

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxrl
from bench.harness import measure
from bench.studies import known_peers
from bench.studies.known_task import Task, Trained, returns
from envs_jax.base import Array, Discrete, TimeStep
from jaxrl.cli.entry import exit_on_error
from jaxrl.cli.values import parse_int
from jaxrl.common.errors import UsageError, UserError
from jaxrl.evaluation.statistics import estimate_mean

KIND = "known"

TASKS = {
    "pendulum": Task("gymnax:Pendulum-v1", 30_000, num_envs=4),
    "double_pendulum": Task("brax:inverted_double_pendulum", 50_000, options={"backend": "spring"}),
    "hopper": Task("brax:hopper", 100_000, options={"backend": "spring"}),
    "spread": Task("jaxmarl:MPE_simple_spread_v3", 1_000_000),
    "knapsack": Task(
        "jumanji:Knapsack-v1",
        3_000_000,
        ours={"hidden_size": 128, "actor_lr": 1e-3, "entropy_weight": 0.003},
    ),
    "cartpole_balance": Task("playground:CartpoleBalance", 1_000_000),
    "smax_3m": Task(
        "jaxmarl:HeuristicEnemySMAX",
        500_000,
        options={"map": "3m"},
        ours={"num_envs": 32, "hidden_size": 128, "actor_lr": 1e-3},
    ),
}


# Our learners

TEAM = {"gamma": 0.99, "final_lr_fraction": 0.1, "max_grad_norm": 0.5, "hidden_size": 64, "depth": 2}
OURS: dict[str, dict[str, Any]] = {
    "sac": {"algo": "sac"},
    "td3": {
        "algo": "ddpg", "num_critics": 2, "actor_update_period": 2, "target_update_period": 2,
        "exploration_noise": 0.1, "target_noise": 0.2, "target_noise_clip": 0.5, "first_layer": "relu",
        "initializer": "he", "max_grad_norm": 0.0,
    },
    "coma": {
        "algo": "coma", "advantage": "return", "clip_ratio": 0.2, "eps_max": 0.0, "eps_min": 0.0,
        "entropy_weight": 0.01, "scale_advantage": True, "num_minibatches": 4, "num_envs": 64, "num_epochs": 4,
        "actor_lr": 5e-4, "critic_lr": 1e-3, **TEAM,
    },
    "ppo": {
        "algo": "ppo", "entropy_weight": 0.01, "num_envs": 64, "rollout_steps": 32, "num_minibatches": 4,
        "num_epochs": 4, "actor_lr": 5e-4, "critic_lr": 1e-3, **TEAM,
    },
}  # fmt: skip


def settings_of(task: Task, learner: str) -> tuple[str, dict[str, Any]]:
    """Return the algorithm and the settings of one of our learners."""
    settings = dict(OURS[learner])
    algo = settings.pop("algo")
    if algo in ("sac", "ddpg"):
        settings |= {
            "num_envs": task.num_envs, "env_steps_per_update": 1.0, "batch_size": task.batch_size,
            "random_steps": task.random_steps, "buffer_size": task.steps, "hidden_size": task.hidden_size,
            "gamma": task.gamma, "tau": task.tau, "actor_lr": task.learning_rate, "critic_lr": task.learning_rate,
            "compute_dtype": "float32",
        }  # fmt: skip
    if algo == "sac":
        settings["alpha_lr"] = task.learning_rate
    return algo, settings | task.ours


def ours(task: Task, seed: int, learner: str) -> Trained:
    """Train with jaxrl, without evaluations in between."""
    algo, settings = settings_of(task, learner)
    with tempfile.TemporaryDirectory() as runs:
        result = jaxrl.train(
            algo, task.make(), total_env_steps=task.steps, seed=seed, eval_every=0, devices=1, runs=runs, **settings
        )
        policy = result.policy
        env_steps, updates = (int(np.nanmax(result.metrics[name])) for name in ("env_steps", "updates"))

    def act(carry: Any, timestep: TimeStep, key: Array | None) -> tuple[Array, Any]:
        return policy(timestep, carry=carry, key=key)

    return Trained(act, env_steps, updates)


def random(task: Task, seed: int) -> Trained:
    """Return uniformly random actions, among those that are allowed."""
    action = task.make().spec.action

    def act(carry: Any, timestep: TimeStep, key: Array | None) -> tuple[Array, Any]:
        key = jax.random.key(seed) if carry is None else carry
        drawn, following = jax.random.split(key)
        shape = timestep.observation.shape[:2]
        if isinstance(action, Discrete):
            mask = timestep.action_mask
            logits = jnp.zeros((*shape, action.n)) if mask is None else jnp.where(mask, 0.0, -jnp.inf)
            return jax.random.categorical(drawn, logits), following
        drawn = jax.random.uniform(drawn, (*shape, *action.shape), minval=action.low, maxval=action.high)
        return drawn.astype(action.dtype), following

    return Trained(act, 0, 0)


def best_ratio(task: Task, seed: int) -> Trained:
    """Return the usual heuristic for knapsacks: pack what is worth most for its weight, among what still fits."""
    del seed
    items = task.make().spec.observation.shape[0] // 3  # an observation holds weights, values, and what is packed

    def act(carry: Any, timestep: TimeStep, key: Array | None) -> tuple[Array, Any]:
        observation, mask = timestep.observation, timestep.action_mask
        values, weights = observation[..., items : 2 * items], observation[..., :items]
        return jnp.argmax(jnp.where(mask, values / weights, -1.0), axis=-1), carry

    return Trained(act, 0, 0)


BOX = ("sac", "td3", "brax_sac", "sbx_sac", "sbx_td3")  # learners of continuous actions alone


def check(name: str, learner: str) -> None:
    """Raise UsageError for a learner that cannot take a task."""
    task = TASKS[name]
    discrete = isinstance(task.make().spec.action, Discrete)
    if (
        (learner in BOX and discrete)
        or (learner in ("coma", "jaxmarl_ippo") and not discrete)
        or (learner == "jaxmarl_ippo" and not task.env.startswith("jaxmarl:"))
        or (learner == "best_ratio" and name != "knapsack")
    ):
        raise UsageError(f"{learner} does not fit {name} (its actions, or its library): choose another learner")


def learners() -> dict[str, Callable[..., Trained]]:
    """Return all learners by name; those of other libraries need these."""

    def of(name: str) -> Callable[[Task, int], Trained]:
        return lambda task, seed: ours(task, seed, name)

    scripted: dict[str, Callable[..., Trained]] = {"random": random, "best_ratio": best_ratio}
    return scripted | {name: of(name) for name in OURS} | known_peers.LEARNERS


# One run


def run(name: str, learner: str, seed: int, say: measure.Say) -> dict[str, Any]:
    """Train and score once; a row of the result."""
    task, compiling = TASKS[name], list[float]()

    def listen(event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            compiling.append(duration_secs)

    check(name, learner)
    known_peers.load(learner)
    task.make()
    jax.monitoring.register_event_duration_secs_listener(listen)
    wall, cpu = time.perf_counter(), time.process_time()
    with measure.fresh_compiles():
        trained = learners()[learner](task, seed)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    row: dict[str, Any] = {
        "task": name, "learner": learner, "seed": seed, "env_steps": trained.env_steps, "updates": trained.updates,
        "cpu_seconds": cpu, "wall_seconds": wall, "compile_share": sum(compiling) / wall,
        "greedy": _summary(returns(task, trained.act, sample=False)),
    }  # fmt: skip
    if isinstance(task.make().spec.action, Discrete):
        row["sampled"] = _summary(returns(task, trained.act, sample=True))
    say(f"{name}, {learner}, seed {seed}: return {row['greedy']['mean']:.4g}, {cpu:.0f} s of CPU time")
    return row


def _summary(values: np.ndarray) -> dict[str, float]:
    return {"mean": float(values.mean()), "std": float(values.std(ddof=1)), "episodes": len(values)}


# Tables


def table(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield the lines of a Markdown table, one row for each task and learner: means and 95 % intervals over seeds."""
    head = (
        "environment",
        "learner",
        "seeds",
        "steps",
        "updates",
        "return, greedy",
        "sampled",
        "CPU seconds",
        "compiling",
    )
    yield f"| {' | '.join(head)} |"
    yield f"|{'---|' * len(head)}"
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["task"], row["learner"]), []).append(row)
    order = {name: place for place, name in enumerate(TASKS)}
    for (task, learner), runs in sorted(groups.items(), key=lambda item: (order[item[0][0]], item[0][1])):
        first = runs[0]
        seconds = [(row["cpu_seconds"], row["cpu_seconds"] * row["compile_share"]) for row in runs]
        times = [
            f"{statistics.median(column):.0f}" if first["updates"] else "" for column in zip(*seconds, strict=True)
        ]
        cells = [
            TASKS[task].env, learner, str(len(runs)),
            *(f"{first[key]:,}" if first[key] else "" for key in ("env_steps", "updates")),
            *(_interval([row[mode]["mean"] for row in runs if mode in row]) for mode in ("greedy", "sampled")), *times,
        ]  # fmt: skip
        yield f"| {' | '.join(cells)} |"


def _interval(means: list[float]) -> str:
    if not means:
        return ""
    over_seeds = estimate_mean(np.array(means))
    half = over_seeds["ci95"]
    text = f"{over_seeds['mean']:.4g}"
    return text if half is None else f"{text} ± {float(f'{half:.2g}'):g}"  # 150, not 1.5e+02


@exit_on_error
def main(argv: Sequence[str]) -> int:
    """Entry point; returns the exit code."""
    assert __doc__ is not None
    parser = measure.parser("python -m bench.studies.known", __doc__)
    parser.add_argument("task", nargs="?", metavar="TASK", help=", ".join(TASKS))
    parser.add_argument("learner", nargs="?", metavar="LEARNER", help=", ".join(learners()))
    parser.add_argument("--seed", default="1", metavar="N", help="seed of the run (default: 1)")
    parser.add_argument("--table", nargs="+", metavar="FILE", help="results to join, instead of a run")
    parser.add_argument("--out", metavar="FILE", help="JSON file to write")
    args = parser.parse_args(argv)
    if args.table:
        result = joined(args.table)
    elif args.task not in TASKS or args.learner not in learners():
        raise UsageError(
            f"name a task ({', '.join(TASKS)}) and a learner ({', '.join(learners())}), or files after --table"
        )
    else:
        out = measure.output(args.out, KIND)
        seed = parse_int(args.seed, "--seed", 0, 2**31 - 1)
        result = measure.header(f"studies.{KIND}", argv, quick=False)
        result |= {"packages": packages(), "rows": [run(args.task, args.learner, seed, measure.say)]}
        measure.write(result, out)
        return 0
    print("\n".join(table(result["rows"])))
    if args.out:
        measure.write(result, measure.output(args.out, KIND))
    return 0


def joined(paths: Sequence[str]) -> dict[str, Any]:
    """Return one result of those of single runs.

    Raises UserError: no such file, no result, two rows of one run, or results of different machines or versions.
    """
    rows: dict[tuple[str, str, int], dict[str, Any]] = {}
    result: dict[str, Any] = {}
    versions: dict[str, str] = {}
    for path in paths:
        try:
            part = json.loads(Path(path).read_text())
            machine = {name: part["machine"][name] for name in ("processor", "python", "jax")} | part["packages"]
            names = [(row["task"], row["learner"], row["seed"]) for row in part["rows"]]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"{path} is no result ({error!r}): name files that this command has written") from None
        for name, version in machine.items():
            if versions.setdefault(name, version) != version:
                raise UserError(f"{path} was made with {name} {version}, others with {versions[name]}: run it again")
        for name, row in zip(names, part["rows"], strict=True):
            if name in rows or name[0] not in TASKS:
                raise UserError(
                    f"{path} repeats {' '.join(map(str, name))}, or its task is not known: name each run once"
                )
            rows[name] = row
        result = {**part, **result}
    command = f"python -m bench.studies.{KIND} TASK LEARNER --seed SEED"
    return result | {"command": command, "packages": versions, "rows": list(rows.values())}


def packages() -> dict[str, str]:
    """Return the versions of the libraries beside ours."""
    names = (
        "gymnax",
        "brax",
        "jaxmarl",
        "jumanji",
        "playground",
        "mujoco",
        "sbx-rl",
        "stable_baselines3",
        "torch",
        "flax",
        "optax",
    )
    installed = {dist.metadata["Name"]: dist.version for dist in metadata.distributions()}
    return {name: installed[name] for name in names if name in installed}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
