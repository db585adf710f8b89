"""python -m bench.parity.metaworld --episodes 50: the arm of `reach` against real Meta-World (extra `real`).

Plays fresh episodes of five policies in Meta-World's reach-v3, with its puck and all contacts, then replays the
recorded actions through the JAX environment, open loop from the reset over 500 steps, and compares. Prints a table
with a bound for every figure; the exit code is 1 if one is exceeded.
"""

import argparse
import dataclasses
import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from bench.harness import measure
from bench.parity.comparison import DIFFERS
from envs_jax import base as environments
from envs_jax.adapters import metaworld
from envs_jax.reach.env import Reach
from envs_jax.reach.reward import MOST
from envs_jax.reach.types import TARGET_UNIT
from jaxrl.cli.entry import exit_on_error
from jaxrl.cli.values import add_int
from jaxrl.common.errors import UsageError, usage_errors

KIND = "reach_parity"
STEPS = 500
START = np.array([0.0, 0.6, 0.2])  # the hand, approximately, as in the reward, m
POLICIES = ("scripted", "scripted_noisy", "random", "ou", "corner")


@dataclasses.dataclass(frozen=True)
class Recording:
    """N episodes of T steps in the real simulator; index t of what belongs to a step is the step from t to t + 1."""

    policy: np.ndarray  # str[N]
    # puck, goal: float64[N, 3]
    puck: np.ndarray
    goal: np.ndarray
    action: np.ndarray  # float32[N, T, 4]
    observation: np.ndarray  # float[N, T + 1, 39]
    tool: np.ndarray  # float[N, T + 1, 3], tool centre
    reward: np.ndarray  # float[N, T]
    success: np.ndarray  # bool[N, T]
    contact: np.ndarray  # bool[N, T], the arm touched something

    @property
    def free(self) -> np.ndarray:
        """bool[N, T]: no contact up to and including this step."""
        return np.cumsum(self.contact, axis=1) == 0


# Policies


def actor(policy: str, goal: np.ndarray, rng: np.random.Generator) -> Callable[[np.ndarray], np.ndarray]:
    """Make one of POLICIES: hand float[3] -> action float32[4], with a memory of its own.

    `ou` is correlated noise (0.95 from step to step), `corner` holds extreme actions for 10 to 89 steps.
    """
    wander = np.zeros(4)
    held = np.zeros(4)
    left = 0

    def act(hand: np.ndarray) -> np.ndarray:
        nonlocal wander, held, left
        if policy == "random":
            return rng.uniform(-1, 1, 4)
        if policy == "ou":
            wander = 0.95 * wander + np.sqrt(1 - 0.95**2) * rng.normal(size=4)
            return wander
        if policy == "corner":
            if left == 0:
                left = int(rng.integers(10, 90))
                choices = np.stack([np.full(4, -1.0), np.zeros(4), np.ones(4), rng.uniform(-1, 1, 4)])
                held = choices[rng.integers(4, size=4), np.arange(4)]
            left -= 1
            return held
        action = np.append(np.clip(5 * (goal - hand), -1, 1), 0.0)
        return action + rng.normal(scale=0.5, size=4) if policy == "scripted_noisy" else action

    return lambda hand: np.clip(act(hand), -1, 1).astype(np.float32)


# The real simulator


def play(episodes: int, policies: Sequence[str], seed: int, steps: int = STEPS) -> Recording:
    """Play fresh episodes in the real simulator, the policies in turn. Raises UsageError."""
    with usage_errors():
        real = metaworld.Arm(metaworld.REACH, watch=True)
        tasks = metaworld.pool(metaworld.REACH, seed)
    rng = np.random.default_rng(seed)
    rows: list[dict[str, Any]] = []
    for episode in range(episodes):
        task = tasks[int(rng.integers(len(tasks)))]
        puck = task[:3]
        goal = task[3:]
        observation = real.reset(task)
        policy = policies[episode % len(policies)]
        act = actor(policy, goal, rng)
        observations = [observation]
        tool = [real.tool]
        steps_taken = []
        for _ in range(steps):
            action = act(observation[:3])
            observation, reward, success = real.step(action)
            observations.append(observation)
            tool.append(real.tool)
            steps_taken.append((action, reward, success, real.touched))
        names = ("action", "reward", "success", "contact")
        parts = dict(zip(names, (np.array(part) for part in zip(*steps_taken, strict=True)), strict=True))
        start = {"policy": policy, "puck": puck, "goal": goal}
        rows.append({**start, "observation": np.array(observations), "tool": np.array(tool), **parts})
    return Recording(**{name: np.array([row[name] for row in rows]) for name in rows[0]})


# The replay


@functools.cache
def _programs(env: Reach) -> tuple[Any, Any]:
    return jax.jit(env.begin), jax.jit(env.advance)


def replay(recording: Recording) -> dict[str, np.ndarray]:
    """Replay the same actions in the JAX environment.

    {"observation" [N, T, 39], "reward" [N, T], "success" bool[N, T], "target" float64[N, T, 3] of the hand, m}.
    """
    env = environments.make("reach", horizon=STEPS)
    assert isinstance(env, Reach)

    def lanes(x: np.ndarray) -> Any:
        return jnp.asarray(x.T, jnp.float32)

    begin, advance = _programs(env)
    state, _ = begin(lanes(recording.puck), lanes(recording.goal), jnp.zeros(len(recording.goal), jnp.int32))
    rows = []
    for action in recording.action.swapaxes(0, 1):
        state, timestep = advance(state, lanes(action)[None])
        rows.append(
            jax.device_get(
                (timestep.observation[0].T, timestep.reward[0], timestep.metrics["success"] > 0, state.mocap_target.T)
            )
        )
    names = ("observation", "reward", "success", "target")
    replayed = {name: np.stack(part, axis=1) for name, part in zip(names, zip(*rows, strict=True), strict=True)}
    return replayed | {"target": replayed["target"] * TARGET_UNIT}


# Comparison

# (figure, unit): (mean, most), three times the values measured over 40 episodes; None = no bound. The reward's:
# `steepest` of goals at least 0.2 m from the hand's start, as all of Meta-World's are, times the hand's bound.
BOUNDS = {
    ("hand, before the first contact", "mm"): (5e-4, 3e-3),
    ("gripper opening, before the first contact", ""): (None, 2e-6),
    ("reward, before the first contact", ""): (None, 3e-4),
    ("reward, all steps", ""): (4e-2, None),
    ("success, all steps: differences", "steps"): (None, 0.0),
}


def steepest(goal: np.ndarray) -> np.ndarray:
    """[...]: largest change of the reward per metre of the tool, for goals [..., 3].

    It is 10 tail(x) of x = (metres to the goal - 0.05) / (metres from the hand's start to the goal), and tail's slope
    18 x / (1 + 9 x^2)^2 is at most 1.95 (at x = 1 / sqrt(27)).
    """
    return MOST * 1.95 / np.linalg.norm(goal - START, axis=-1)


def compare(recording: Recording, replayed: Mapping[str, np.ndarray]) -> list[dict[str, Any]]:
    """Return one row per entry of BOUNDS: figure, unit, mean, most, their bounds, and whether they hold."""
    free = recording.free
    expected = recording.observation[:, 1:]
    hand = 1e3 * np.linalg.norm(replayed["observation"][..., :3] - expected[..., :3], axis=-1)
    opening = np.abs(replayed["observation"][..., 3] - expected[..., 3])
    reward = np.abs(replayed["reward"] - recording.reward)
    differ = np.sum(replayed["success"] != recording.success, keepdims=True)
    values = (hand[free], opening[free], reward[free], reward, differ)
    rows = []
    for ((figure, unit), bounds), value in zip(BOUNDS.items(), values, strict=True):
        mean = float(value.mean())
        most = float(value.max())
        holds = all(b is None or x <= b for x, b in zip((mean, most), bounds, strict=True))  # false for NaN
        rows.append({"figure": figure, "unit": unit, "mean": mean, "most": most, "bounds": bounds, "holds": holds})
    return rows


def summary(recording: Recording) -> list[dict[str, Any]]:
    """Return one row per policy: episodes, successes (any step), mean return, share of steps with contact."""
    rows = []
    for policy in dict.fromkeys(recording.policy):
        selected = recording.policy == policy
        rows.append(
            {
                "policy": str(policy),
                "episodes": int(selected.sum()),
                "successes": int(recording.success[selected].any(axis=1).sum()),
                "return": float(recording.reward[selected].sum(axis=1).mean()),
                "contact": float(recording.contact[selected].mean()),
            }
        )
    return rows


def show(rows: Sequence[Mapping[str, Any]], policies: Sequence[Mapping[str, Any]], console: Console) -> None:
    """Print both tables."""
    table = Table(title="JAX environment against Meta-World, open loop")
    for column in ("figure", "mean", "most", "bound: mean", "bound: most", ""):
        table.add_column(column, justify="left" if column == "figure" else "right")
    for row in rows:
        figure = row["figure"] + (f", {row['unit']}" if row["unit"] else "")
        bounds = ["-" if bound is None else f"{bound:.2g}" for bound in row["bounds"]]
        table.add_row(figure, f"{row['mean']:.2g}", f"{row['most']:.2g}", *bounds, "ok" if row["holds"] else "BROKEN")
    console.print(table)
    table = Table(title="episodes in Meta-World")
    for column in ("policy", "episodes", "successes", "mean return", "steps with contact"):
        table.add_column(column, justify="left" if column == "policy" else "right")
    for row in policies:
        numbers = (str(row["episodes"]), str(row["successes"]), f"{row['return']:.0f}", f"{100 * row['contact']:.2f} %")
        table.add_row(row["policy"], *numbers)
    console.print(table)


# Command line


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line. Raises UsageError."""
    assert __doc__ is not None
    parser = measure.parser("python -m bench.parity.metaworld", __doc__)
    add_int(parser, "--episodes", 1, 10_000, 50, "play N episodes, shared by the policies (default: 50)")
    parser.add_argument(
        "--policies", default=",".join(POLICIES), metavar="A,B", help="act by these policies (default: all five)"
    )
    add_int(parser, "--seed", 0, 2**31 - 1, 0, "draw puck, goal and policies by this seed (default: 0)")
    parser.add_argument(
        "--out", metavar="FILE", help=f"write the result to this JSON file (default: bench/results/{KIND}_<time>.json)"
    )
    parsed = parser.parse_args(list(argv))
    parsed.policies = parsed.policies.split(",")
    for name in parsed.policies:
        if name not in POLICIES:
            raise UsageError(f"unknown policy '{name}': {environments.closest(name, POLICIES)}")
    return parsed


@exit_on_error
def main(argv: Sequence[str]) -> int:
    """Entry point; returns the exit code."""
    parsed = parse(argv)
    with usage_errors():
        metaworld.packages()
    path = measure.output(parsed.out, KIND)
    result = measure.header(KIND, argv, quick=False, module="parity.metaworld")
    measure.say(f"playing {parsed.episodes} episodes in Meta-World")
    recording = play(parsed.episodes, parsed.policies, parsed.seed)
    measure.say("replaying them in the JAX environment")
    rows = compare(recording, replay(recording))
    policies = summary(recording)
    measure.write(result | {"rows": rows, "policies": policies}, path)
    show(rows, policies, Console())
    return 0 if all(row["holds"] for row in rows) else DIFFERS


if __name__ == "__main__":
    sys.exit(main())
