"""python -m bench.studies.recurrent_ppo --python VENV --repository DIR: our PPO with a GRU compared with PureJaxRL's.

Both train on MemoryChain of gymnax for as many environment steps, with equal rollouts, minibatches, epochs and learning
rates; each run is a process of its own, and the libraries take turns. The observation at the start shows which of two
actions is right at the end, six steps later: without a memory the mean return is 0, the best is 1.
VENV has what `ppo_rnn.py` of github.com/luchris429/purejaxrl needs (jax==0.4.13, flax==0.6.11, gymnax==0.0.6, distrax),
and DIR is a checkout of it. The result is a JSON file and a table (.md). Pin the command to one core for figures.
"""

import importlib.util
import json
import os
import resource
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.harness import measure
from jaxrl.cli.entry import exit_on_error
from jaxrl.common.errors import UsageError, UserError

KIND = "recurrent_ppo"
WORKER = Path(__file__).with_name("recurrent_ppo_worker.py")
VARIABLE = "PUREJAXRL_REPOSITORY"
SETTINGS: dict[str, Any] = {
    "env": "MemoryChain-bsuite", "num_envs": 64, "rollout_steps": 32, "minibatches": 4, "epochs": 4,
    "learning_rate": 2.5e-4, "gamma": 0.99, "gae_lambda": 0.95, "clip_ratio": 0.2, "entropy_weight": 0.01,
    "max_grad_norm": 0.5,
}  # fmt: skip
LAST = 10  # updates whose episodes are the final return
NEAR = 0.9  # a return near the best
NOTES = [
    "networks: a dense layer of 128 units, a GRU of 128, then jaxrl: a linear layer, for actor and critic each; "
    "purejaxrl: one such trunk for both, and for each a dense layer of 128 and a linear one",
    "jaxrl: the first step of an episode after another is a step of its own, so that 6 of 7 steps play; targets are "
    "normalised. purejaxrl: clips the value loss, and normalises advantages in each minibatch",
    f"final return: of the episodes of the last {LAST} updates, with sampled actions; chance 0, best 1",
    "learning rates fall linearly to 0; process: all CPU seconds of the process, with imports",
]


def run_worker(command: Sequence[str | Path]) -> dict[str, Any]:
    """Run a worker, and return its figures with the CPU seconds of its process. Raises UserError if it fails."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([*map(str, command)], capture_output=True, text=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        reason = (done.stderr.strip() or "it says nothing").splitlines()[-1]
        raise UserError(f"{command[0]} cannot train ({reason}): check the packages of its environment")
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return figures | {"process_cpu_seconds": cpu}


def summarize(library: str, seed: int, figures: dict[str, Any]) -> dict[str, Any]:
    """Return the row of a run; env steps are those of updates that ran."""
    returns = figures["returns"]
    per_update = SETTINGS["num_envs"] * SETTINGS["rollout_steps"]
    env_steps = per_update * len(returns)
    near = next((per_update * (n + 1) for n, value in enumerate(returns) if value >= NEAR), None)
    spent = {name: figures[name] for name in ("process_cpu_seconds", "compile_cpu_seconds", "run_cpu_seconds")}
    return {"library": library, "seed": seed, "env_steps": env_steps, "episodes": sum(figures["episodes"])} | spent | {
        "env_steps_per_cpu_second": env_steps / figures["run_cpu_seconds"],
        "final_return": statistics.fmean(returns[-LAST:]),
        "env_steps_to_near": near,
    }  # fmt: skip


def markdown(result: dict[str, Any]) -> str:
    """Return the table of a result."""
    spent = ("process_cpu_seconds", "compile_cpu_seconds", "run_cpu_seconds")
    head = ["library", "seed", "CPU s, process", "compiling", "running", "env steps per CPU s", "final return"]
    head += [f"env steps to {NEAR}"]
    rows = [
        [row["library"], f"{row['seed']}", *(f"{row[name]:.1f}" for name in spent)]
        + [f"{row['env_steps_per_cpu_second']:,.0f}", f"{row['final_return']:.3f}"]
        + [f"{row['env_steps_to_near']:,}" if row["env_steps_to_near"] else "never"]
        for row in result["rows"]
    ]
    machine = result["machine"]
    title = f"`{result['command']}` on {machine['processor']}, {machine['cores']} core(s).\n"
    lines = ["| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *rows)]
    return "\n".join([title, *lines, "", *(f"- {note}" for note in result["notes"]), ""])


def find_purejaxrl(python: str | None, repository: str | None) -> tuple[Path, Path, str]:
    """Return the interpreter, the folder of the scripts, and the commit. Raises UsageError where one is missing."""
    if not python:
        raise UsageError("--python is missing: name a virtual environment with what PureJaxRL needs")
    path = Path(python)
    interpreter = path if path.is_file() else path / "bin" / "python"
    if not interpreter.is_file():
        raise UsageError(f"--python {python} is neither an interpreter nor a virtual environment")
    if not repository:
        raise UsageError(f"--repository is missing: name a checkout of PureJaxRL, here or in {VARIABLE}")
    folder = Path(repository) / "purejaxrl"
    if not (folder / "ppo_rnn.py").is_file():
        raise UsageError(f"--repository {repository} has no purejaxrl/ppo_rnn.py: name a checkout of PureJaxRL")
    commit = subprocess.run(["git", "-C", repository, "rev-parse", "HEAD"], stdout=subprocess.PIPE, text=True).stdout
    return interpreter, folder, commit.strip()


@exit_on_error
def main(argv: Sequence[str]) -> int:
    """Entry point; returns the exit code."""
    assert __doc__ is not None
    flags = measure.parser(f"python -m bench.studies.{KIND}", __doc__)
    flags.add_argument("--python", metavar="PATH", help="PureJaxRL's interpreter, or its virtual environment")
    flags.add_argument("--repository", metavar="DIR", default=os.environ.get(VARIABLE),
                       help=f"a checkout of PureJaxRL (default: the variable {VARIABLE})")  # fmt: skip
    flags.add_argument("--seeds", default="1,2,3", metavar="A,B", help="train with each of these (default: 1,2,3)")
    flags.add_argument("--env_steps", default="500000", metavar="N", help="train for N steps (default: 500000)")
    flags.add_argument(
        "--out", metavar="FILE", help="write the result to this JSON file (default: a new one under bench/results/)"
    )
    parsed = flags.parse_args(list(argv))
    python, folder, commit = find_purejaxrl(parsed.python, parsed.repository)
    if importlib.util.find_spec("gymnax") is None:
        raise UsageError("gymnax is not installed here: pip install -e '.[gymnax]'")
    seeds = measure.parse_list(parsed.seeds, "--seeds", 0, 2**31)
    per_update = SETTINGS["num_envs"] * SETTINGS["rollout_steps"]
    env_steps = measure.parse_int(parsed.env_steps, "--env_steps", LAST * per_update, 10**9)
    settings = SETTINGS | {"env_steps": env_steps // per_update * per_update}
    path = measure.output(parsed.out, KIND)
    result = measure.header(f"studies.{KIND}", argv, quick=False)
    result["notes"] += NOTES
    result |= {"settings": settings, "purejaxrl_commit": commit, "versions": {}, "rows": []}
    commands: dict[str, tuple[str | Path, list[Path]]]
    commands = {"jaxrl": (sys.executable, []), "purejaxrl": (python, [folder])}
    for seed in seeds:
        for library, (interpreter, more) in commands.items():
            figures = run_worker([interpreter, WORKER, library, json.dumps(settings), f"{seed}", *more])
            result["versions"][library] = figures["versions"]
            result["rows"].append(row := summarize(library, seed, figures))
            measure.say(f"{library}, seed {seed}: {row['run_cpu_seconds']:.1f} s, return {row['final_return']:.3f}")
            measure.write(result, path)
            path.with_suffix(".md").write_text(markdown(result))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
