"""python -m bench.studies.published_learning: what the published settings learn in plain PyTorch on the NumPy oracle.

Neither the environment nor the learner here shares code with envs_jax or jaxrl: if `ddpg_competition` scores the same,
the score comes from the settings. Plays one game after another against the opponent of the preset, then games against
random players on both sides by the published protocol: sampled actions, no exploration.
"""

import sys
import time
from collections.abc import Sequence

import numpy as np

from bench.harness import measure
from bench.parity.agent_games import games, row
from bench.reference.coverage.torch_learner import require_torch
from bench.reference.snakes.opponents import scripted
from bench.reference.snakes.oracle import Game
from bench.systems.snakes import TorchGames
from jaxrl.cli import flags as command_line
from jaxrl.cli.entry import exit_on_error
from jaxrl.cli.values import parse_int
from jaxrl.common.errors import UserError

PRESET = "ddpg_competition"


def train(play: TorchGames, episodes: int) -> list[int]:
    """Play `episodes` games with an update after each step; return the team's game score of each."""
    scores, began = [], time.perf_counter()
    for episode in range(1, episodes + 1):
        play.collect(1, after_step=play.learn)
        team = play.match.settings.team(play.match.sides[0])
        scores.append(int(play.match.game.totals[team].sum()))
        if episode % 100 == 0:
            seconds = time.perf_counter() - began
            print(f"{episode} games, {seconds:.0f} s: {np.mean(scores[-100:]):.2f} points in the last 100", flush=True)
    return scores


@exit_on_error
def main(argv: Sequence[str]) -> int:
    """Entry point; returns the exit code."""
    assert __doc__ is not None
    parser = measure.parser("python -m bench.studies.published_learning", __doc__)
    parser.add_argument("--episodes", default="2000", metavar="N", help="games of 200 steps (default: 2000)")
    parser.add_argument("--games", default="500", metavar="N", help="evaluation games on each side (default: 500)")
    parser.add_argument("--seed", default="1", metavar="N", help="random seed (default: 1)")
    parser.add_argument("--fresh_opponents", action="store_true", help="opponents observe the true state, as in the "
                        "published trainer since December 2021")  # fmt: skip
    parser.add_argument("--out", metavar="FILE", help="JSON file to write")
    parsed = parser.parse_args(list(argv))
    episodes = parse_int(parsed.episodes, "--episodes", 1, 1_000_000)
    number = parse_int(parsed.games, "--games", 2, 1_000_000)
    seed = parse_int(parsed.seed, "--seed", 0, 2**31 - 1)
    path = measure.output(parsed.out, "published_learning") if parsed.out else None
    try:
        require_torch().set_num_threads(1)
    except ImportError as error:
        raise UserError(str(error)) from None
    config = command_line.parse(["--config", PRESET]).config
    stale = {"stale_observation_bug": not parsed.fresh_opponents}
    play = TorchGames(config.env_settings | stale, config.algo_settings, seed)
    training = train(play, episodes)
    play.learner.epsilon = 0.0

    def policy(game: Game, side: int) -> list[int]:
        return [int(action) for action in play.learner.act(game.observe(play.match.layout, side))[0]]

    print("own, opponent, difference; mean ± standard error; win / loss / draw in %")
    sides = []
    for side in (0, 1):
        sides.append(games(policy, scripted(0), play.match.settings, number, side, seed))
        print(f"random, {('first', 'second')[side]} side: {row(*sides[-1])}", flush=True)
    own, other = np.concatenate(sides, axis=1)
    print(f"random, both sides: {row(own, other)}")
    if path:
        hundreds = np.array(training[: len(training) // 100 * 100]).reshape(-1, 100).mean(1)
        result = measure.header("snakes.published_learning", argv, False, "studies.published_learning") | {
            "notes": [],
            "episodes": episodes,
            "seed": seed,
            **stale,
            "training_score_per_100_games": hundreds.tolist(),
            "against_random": {
                "games": own.size,
                "score": float(own.mean()),
                "score_error": float(own.std(ddof=1) / own.size**0.5),
                "opponent_score": float(other.mean()),
                "win": float((own > other).mean()),
                "draw": float((own == other).mean()),
            },
        }
        measure.write(result, path)
        print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
