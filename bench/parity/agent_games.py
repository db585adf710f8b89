"""python -m bench.parity.agent_games DIR: games of an exported agent by the original rules, in plain NumPy.

DIR is what `python -m jaxrl.export RUN --format jidi --out DIR` wrote. The agent is called as the Jidi platform calls
it, once per snake and step, and plays the scripted players on both sides. Prints a table of means with standard errors,
and how long calls take.
"""

import argparse
import importlib.util
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.reference.snakes import oracle
from bench.reference.snakes.opponents import LEVELS, Policy, play, scripted
from envs_jax.base import closest
from jaxrl.cli.entry import exit_on_error
from jaxrl.cli.flags import Parser
from jaxrl.common.errors import UsageError, UserError

NAMES = ("up", "down", "left", "right")
OPPONENTS: dict[str, int | str] = {"random": 0, **{str(level): level for level in LEVELS if level}}
Controller = Callable[[dict[Any, Any], Any, bool], list[list[int]]]


def load_agent(directory: Path) -> Any:
    """Load the module of the agent in a directory, or that of a file, anew at each call. Raises UserError."""
    path = directory / "submission.py" if directory.is_dir() else directory
    spec = importlib.util.spec_from_file_location("submission", path)
    if spec is None or spec.loader is None or not path.is_file():
        raise UserError(f"{path} does not exist: name the directory that jaxrl.export wrote")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def observation(
    state: oracle.State, settings: oracle.Settings, snake: int, last_direction: Sequence[int] | None
) -> dict[Any, Any]:
    """Return the platform's observation for a snake's controller; cells are lists, numbered 1 (beans), snake + 2."""
    cells = {k: [list(cell) for cell in body] for k, body in enumerate((state.beans, *state.bodies), 1)}
    return {
        **cells,
        "board_width": settings.width,
        "board_height": settings.height,
        "last_direction": None if last_direction is None else [NAMES[d] for d in last_direction],
        "controlled_snake_index": snake + 2,
    }


def controlled(controller: Controller, seconds: list[float] | None = None) -> Policy:
    """Wrap a platform's controller as a policy of the oracle; `seconds` receives the duration of each call."""
    before: list[int] = []

    def policy(game: oracle.Game, side: int) -> list[int]:
        last = list(before) if game.state.step_count > 1 else None
        before[:] = game.state.directions
        actions = []
        for snake in game.settings.team(side):
            seen = observation(game.state, game.settings, snake, last)
            began = time.perf_counter()
            answer = controller(seen, None, False)
            if seconds is not None:
                seconds.append(time.perf_counter() - began)
            actions.append(answer[0].index(1))
        return actions

    return policy


def games(
    agent: Policy, opponent: Policy, settings: oracle.Settings, number: int, side: int, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Team scores of the agent and of its opponent, int[number] each; game i has the same start on both sides."""
    scores = []
    for i in range(number):
        policies = (agent, opponent) if side == 0 else (opponent, agent)
        scores.append(play(oracle.Game(settings, np.random.default_rng((seed, i))), policies))
    own, other = np.array(scores).T if side == 0 else np.array(scores)[:, ::-1].T
    return own, other


def row(own: np.ndarray, other: np.ndarray) -> str:
    """Return means with standard errors, and shares of won, lost and drawn games."""

    def mean(values: np.ndarray) -> str:
        error = values.std(ddof=1) / len(values) ** 0.5 if len(values) > 1 else float("nan")
        return f"{values.mean():6.2f} ± {error:4.2f}"

    shares = " / ".join(f"{100 * share.mean():.1f}" for share in (own > other, own < other, own == other))
    return f"{mean(own)}  {mean(other)}  {mean(own - other)}  {shares}"


@exit_on_error
def main(argv: Sequence[str]) -> int:
    """Entry point; returns the exit code."""
    parser = Parser(prog="python -m bench.parity.agent_games", description=__doc__,
                    formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("directory", metavar="DIR", type=Path, help="directory that jaxrl.export wrote")
    parser.add_argument("--games", metavar="N", type=int, default=200,
                        help="games against each opponent on each side (default: 200)")  # fmt: skip
    parser.add_argument("--opponents", metavar="A,B,...", default="random,2",
                        help=f"of {', '.join(OPPONENTS)} (default: random,2)")  # fmt: skip
    parser.add_argument("--seed", metavar="N", type=int, default=0, help="seed of games and actions (default: 0)")
    flags = parser.parse_args(list(argv))
    opponents = flags.opponents.split(",")
    for name in opponents:
        if name not in OPPONENTS:
            raise UsageError(f"unknown opponent '{name}': {closest(name, OPPONENTS)}")
    if flags.games < 1 or flags.seed < 0:
        raise UsageError("--games must be 1 or above and --seed 0 or above")
    agent = load_agent(flags.directory)
    settings = oracle.CONFIGURATIONS["snakes_3v3" if agent.POLICY.settings["snakes"] == 6 else "snakes_1v1"]
    np.random.seed(flags.seed)  # the agent draws as the platform does, from the global generator
    seconds: list[float] = []
    policy = controlled(agent.my_controller, seconds)
    print(f"{flags.games} games per line; team scores, mean ± standard error; win / loss / draw in %")
    print(f"{'opponent':10}{'side':8}{'own':>13}  {'opponent':>13}  {'difference':>13}  win / loss / draw")
    for name in opponents:
        both = []
        for side in (0, 1):
            both.append(games(policy, scripted(OPPONENTS[name]), settings, flags.games, side, flags.seed))
            print(f"{name:10}{('first', 'second')[side]:8}{row(*both[-1])}", flush=True)
        print(f"{name:10}{'both':8}{row(*np.concatenate(both, axis=1))}", flush=True)
    times = 1000 * np.array(seconds)
    print(f"calls: median {np.median(times):.2f} ms, 99 % below {np.quantile(times, 0.99):.2f} ms, longest "
          f"{times.max():.2f} ms of {len(times):,}")  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
