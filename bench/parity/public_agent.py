"""python -m bench.parity.public_agent PLAYER ... --agent FILE: games against a public agent of the Jidi platform.

FILE is the agent's program, a submission.py of 3v3 snakes with a function `my_controller`, from its own repository; it
is called as the platform calls it, once per snake and step. Each player is a run (its policy, sampled), such as
runs/ddpg_snakes_3v3/0001 or pretrained:snakes, or a scripted player, such as level2. Both sides, the rules of jaxrl's
environment; prints a table with 95 % intervals.

The strongest heuristic agent that was found, its commit in the figures:
https://github.com/CarlossShi/Competition_3v3snakes, agent/submit/submission.py
"""

import dataclasses
import functools
import hashlib
import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

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
from jaxrl.common.errors import UserError
from jaxrl.evaluation import policies
from jaxrl.evaluation.league import estimate_points, get_match_rules
from jaxrl.evaluation.policies import PolicySet
from jaxrl.evaluation.statistics import interval
from jaxrl.evaluation.tables import choose_digits, format_estimate
from jaxrl.runtime.rollouts import held_out_key, learned_policy, make_step_keys, scripted_policy
from jaxrl.runtime.run_directory import follow_latest, split_checkpoint
from jaxrl.runtime.trainer import make_env_keys

METRICS = ("score", "opponent_score", "score_difference", "win", "draw", "points", "deaths", "opponent_deaths")


def play(
    evaluated: PolicySet, name: str, controllers: Sequence[Controller], seed: int, say: Callable[[str], None] = print
) -> tuple[dict[str, np.ndarray], int]:
    """Play held-out games of the first team's policy against controllers, all at once.

    Args:
        evaluated: the environment and its policies.
        name: one of its policies.
        controllers: one for each game, as they may remember it; plays the other team; where it raises an error, its
            snake moves up.
        seed: of the held-out games.
        say: receives a line now and then.

    Returns:
        {metric: float32[games]} at the end of each game, with "points": 1 for a win, 0.5 for a draw.
        number of calls of the controllers that raised an error.
    """
    games = len(controllers)
    evaluated = evaluated.with_env_settings({"opponent": "self", "side": "both", "stale_observation_bug": False})
    env = evaluated.env
    half = evaluated.settings["snakes"] // 2
    context = get_match_rules(evaluated).outside
    board = Board(evaluated.settings["height"], evaluated.settings["width"])
    policy = (
        learned_policy(evaluated.algo, "sample") if name == "sampled" and evaluated.algo else scripted_policy(env, name)
    )
    rule = oracle.Settings(*(evaluated.settings[x] for x in ("height", "width", "snakes", "beans", "max_steps")))
    keys = make_env_keys(held_out_key(seed, "evaluation"), jnp.arange(games))
    state, timestep = jax.jit(env.reset)(keys, context)

    @jax.jit
    def step(params: Any, state: Any, timestep: Any, statistics: Any, theirs: Any, t: Any) -> Any:
        action, _ = policy(params, (), state, timestep, make_step_keys(keys, t))
        state, new = env.step_without_reset(state, jnp.concatenate([action, theirs], 1), context)
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

    agents = [wrap_controller(functools.partial(call, controller)) for controller in controllers]
    statistics = start_statistics(timestep)
    for t in range(evaluated.settings["max_steps"]):
        now, second = jax.tree.map(np.asarray, (state.env.game, state.env.plays_second_half))
        theirs = np.zeros((games, half), np.int32)
        for i in np.flatnonzero(~np.asarray(timestep.done)):
            bodies, directions, beans = to_segments(board, jax.tree.map(lambda x, i=i: x[i], now))
            game: Any = SimpleNamespace(state=oracle.State(bodies, directions, beans, t + 1), settings=rule)
            theirs[i] = agents[i](game, 0 if second[i] else 1)
        state, timestep, statistics = step(evaluated.params, state, timestep, statistics, theirs, np.uint32(t))
        if (t + 1) % 20 == 0:
            say(f"{name}, step {t + 1}: score difference {np.mean(statistics.metrics['score_difference']):.2f}")
    ended = {metric: np.asarray(value) for metric, value in statistics.metrics.items()}
    return ended | {"points": ended["win"] + ended["draw"] / 2}, errors


def player(name: str) -> tuple[PolicySet, str]:
    """Return a run, however it is named, or a scripted player as (its environment and policies, its policy's name).

    Raises UserError.
    """
    env: Any = make("snakes_3v3")
    if name in env.baselines and not Path(name).is_dir():
        return policies.load(None, env.name, dataclasses.asdict(env)), name
    if not follow_latest(split_checkpoint(name)[0]).is_dir():
        raise UserError(f"{name} is neither the directory of a run nor one of {', '.join(env.baselines)}")
    run = policies.load_run(name)
    if run.env.env.match_rules is None:
        raise UserError(f"{name} was trained on '{run.name}', which has no other team: name a run of snakes")
    return run, "sampled"


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
    parser.add_argument("--out", metavar="FILE", help="write the result to this JSON file")
    flags = parser.parse_args(list(argv))
    games = flags.games
    seed = flags.seed
    path = measure.output(flags.out, "public_agent") if flags.out else None
    players = [player(name) for name in flags.players]
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
    for title, (evaluated, name) in zip(flags.players, players, strict=True):
        random.seed(seed)  # the agent draws from the global generator
        ended, errors = play(
            evaluated, name, [agent.my_controller for agent in agents], seed, lambda line: print(line, file=sys.stderr)
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
        if path:
            measure.write(result, path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
