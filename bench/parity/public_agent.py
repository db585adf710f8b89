"""python -m bench.parity.public_agent PLAYER ... --agent FILE: games against a public agent of the Jidi platform.

FILE is the agent's program, a submission.py of 3v3 snakes with a function `my_controller`, from its own repository; it
is called as the platform calls it, once per snake and step. Each player is a run, such as runs/ddpg_snakes_3v3/0001 or
pretrained:snakes, or a scripted player, such as level2. A run plays as the NumPy agent that jaxrl.export writes, called
in the same way. Both sides, the rules of jaxrl's environment; prints scores with 95 % intervals.

The strongest heuristic agent that was found, its commit in the figures:
https://github.com/CarlossShi/Competition_3v3snakes, agent/submit/submission.py
"""

import dataclasses
import functools
import hashlib
import random
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bench.harness import measure
from bench.parity.agent_games import Controller, load_agent, wrap_controller
from bench.reference.snakes import oracle
from envs_jax.base import make
from envs_jax.batch import start_statistics, update_statistics, where
from envs_jax.snakes.board import Board
from envs_jax.snakes.segments import to_segments
from jaxrl.cli.entry import exit_on_error
from jaxrl.cli.process import speed_up_start
from jaxrl.cli.values import add_int, add_seed
from jaxrl.common.errors import UsageError
from jaxrl.evaluation import policies
from jaxrl.evaluation.league import estimate_points, get_match_rules
from jaxrl.evaluation.policies import PolicySet
from jaxrl.evaluation.statistics import interval
from jaxrl.evaluation.tables import choose_digits, format_estimate
from jaxrl.integrations.standalone import jidi_files
from jaxrl.runtime.rollouts import held_out_key, make_step_keys, scripted_policy
from jaxrl.runtime.run_directory import follow_latest, split_checkpoint
from jaxrl.runtime.trainer import make_env_keys

METRICS = ("score", "opponent_score", "score_difference", "win", "draw", "points", "deaths", "opponent_deaths")


class Games(NamedTuple):
    """Results of held-out games."""

    metrics: dict[str, np.ndarray]  # float32[games] at the end of each, with "points": 1 for a win, 0.5 for a draw
    errors: int  # calls of the other team's controllers that raised an error
    seconds: list[float]  # that each call of the first team's controllers took


def play(
    evaluated: PolicySet,
    team: str | Sequence[Controller],
    controllers: Sequence[Controller],
    seed: int,
    say: Callable[[str], None] = print,
) -> Games:
    """Play held-out games of a team against controllers, all at once.

    Args:
        evaluated: the environment and its policies.
        team: the name of a scripted policy, or a controller for each game.
        controllers: of the other team, one for each game, as they may remember it; where one raises an error, its
            snake moves up.
        seed: of the held-out games.
        say: receives a line now and then.
    """
    games = len(controllers)
    evaluated = evaluated.with_env_settings({"opponent": "self", "side": "both", "stale_observation_bug": False})
    env = evaluated.env
    half = evaluated.settings["snakes"] // 2
    context = get_match_rules(evaluated).outside
    board = Board(evaluated.settings["height"], evaluated.settings["width"])
    rule = oracle.Settings(*(evaluated.settings[x] for x in ("height", "width", "snakes", "beans", "max_steps")))
    keys = make_env_keys(held_out_key(seed, "evaluation"), jnp.arange(games))
    state, timestep = jax.jit(env.reset)(keys, context)

    @jax.jit
    def act(state: Any, timestep: Any, t: Any) -> Any:
        assert isinstance(team, str)
        return scripted_policy(env, team)((), (), state, timestep, make_step_keys(keys, t))[0]

    @jax.jit
    def step(state: Any, timestep: Any, statistics: Any, action: Any) -> Any:
        state, new = env.step_without_reset(state, action, context)
        ended = where(timestep.done, (timestep, statistics), (new, update_statistics(env.spec, statistics, new)))
        return state, *ended

    errors = 0

    def call(controller: Controller, observation: dict[Any, Any], space: Any, continuous: bool) -> list[list[int]]:
        nonlocal errors
        try:
            return controller(observation, space, continuous)
        except Exception:  # raised by a program that is not ours
            errors += 1
            return [[1, 0, 0, 0]]

    seconds: list[float] = []
    agents = [wrap_controller(functools.partial(call, controller)) for controller in controllers]
    own_agents = [] if isinstance(team, str) else [wrap_controller(controller, seconds) for controller in team]
    statistics = start_statistics(timestep)
    for t in range(evaluated.settings["max_steps"]):
        now, second = jax.tree.map(np.asarray, (state.env.game, state.env.plays_second_half))
        action = np.zeros((games, 2 * half), np.int32)
        if isinstance(team, str):
            action[:, :half] = act(state, timestep, np.uint32(t))
        for i in np.flatnonzero(~np.asarray(timestep.done)):
            bodies, directions, beans = to_segments(board, jax.tree.map(lambda x, i=i: x[i], now))
            game: Any = SimpleNamespace(state=oracle.State(bodies, directions, beans, t + 1), settings=rule)
            action[i, half:] = agents[i](game, 0 if second[i] else 1)
            if own_agents:
                action[i, :half] = own_agents[i](game, 1 if second[i] else 0)
        state, timestep, statistics = step(state, timestep, statistics, action)
        if (t + 1) % 20 == 0:
            say(f"step {t + 1}: score difference {np.mean(statistics.metrics['score_difference']):.2f}")
    ended = {metric: np.asarray(value) for metric, value in statistics.metrics.items()}
    return Games(ended | {"points": ended["win"] + ended["draw"] / 2}, errors, seconds)


def player(name: str, games: int, greedy: bool, search: bool) -> tuple[PolicySet, str | list[Controller]]:
    """Return a run, however it is named, or a scripted player, as (its environment and policies, what plays).

    A run is exported, and its agent loaded anew for each game. Raises UsageError.
    """
    env: Any = make("snakes_3v3")
    if name in env.baselines and not Path(name).is_dir():
        return policies.load(None, env.name, dataclasses.asdict(env)), name
    if not follow_latest(split_checkpoint(name)[0]).is_dir():
        raise UsageError(f"{name} is neither the directory of a run nor one of {', '.join(env.baselines)}")
    run = policies.load_run(name)
    if run.env.env.match_rules is None:
        raise UsageError(f"{name} was trained on '{run.name}', which has no other team: name a run of snakes")
    assert run.algo is not None
    with tempfile.TemporaryDirectory() as folder:
        for file, content in jidi_files(run.env.env, run.algo, run.params, greedy, search).items():
            (Path(folder) / file).write_bytes(content)
        return run, [load_agent(Path(folder)).my_controller for _ in range(games)]


@exit_on_error
def main(argv: Sequence[str]) -> int:
    """Entry point; returns the exit code."""
    assert __doc__ is not None
    speed_up_start()
    parser = measure.parser("python -m bench.parity.public_agent", __doc__)
    parser.add_argument("players", nargs="+", metavar="PLAYER", help="let this run or scripted player play")
    parser.add_argument(
        "--agent", required=True, metavar="FILE", type=Path, help="read the public agent from this submission.py"
    )
    add_int(parser, "--games", 1, 100_000, 200, "play N games per player (default: 200)")
    add_seed(parser, "the held-out games")
    for flag in ("--greedy", "--search"):
        parser.add_argument(flag, action="store_true", help=f"export runs with {flag}")
    parser.add_argument("--out", metavar="FILE", help="write the result to this JSON file")
    flags = parser.parse_args(list(argv))
    games = flags.games
    seed = flags.seed
    path = measure.output(flags.out, "public_agent") if flags.out else None
    players = [player(name, games, flags.greedy, flags.search) for name in flags.players]
    agents = [load_agent(flags.agent) for _ in range(games)]
    for agent in agents:
        agent.print = lambda *_: None  # what it prints is hidden anyway, and takes most of its time
    rows: dict[str, Any] = {}
    result = measure.header("parity.public_agent", argv, quick=False) | {
        "notes": [],  # scores do not depend on how busy the machine is
        "agent": {"file": flags.agent.name, "sha256": hashlib.sha256(flags.agent.read_bytes()).hexdigest()},
        "games": games,
        "seed": seed,
        "players": rows,
    }
    for title, (evaluated, team) in zip(flags.players, players, strict=True):
        random.seed(seed)  # agents draw from the global generators
        np.random.seed(seed)
        ended, errors, seconds = play(
            evaluated, team, [agent.my_controller for agent in agents], seed, lambda line: print(line, file=sys.stderr)
        )
        rows[title] = {
            metric: estimate_points(ended["win"], ended["draw"])
            if metric == "points"
            else interval(ended[metric], evaluated.env.spec.is_share(metric))
            for metric in METRICS
        }
        means = [
            f"{metric} {format_estimate({**estimate, 'std': None}, choose_digits([estimate]))}"
            for metric, estimate in rows[title].items()
        ]
        print(f"{title}: {', '.join(means)}; {errors} errors of the agent", flush=True)
        rows[title] |= {"checkpoint": evaluated.step, "agent_errors": errors}
        if seconds:
            quantiles = {str(q): 1e3 * float(np.quantile(seconds, q)) for q in (0.99, 1.0)}
            rows[title] |= {"milliseconds": {"mean": 1e3 * float(np.mean(seconds))} | quantiles}
        if path:
            measure.write(result, path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
