"""State and settings of a game, shared by the environment, its scripted policies and its viewer."""

import dataclasses
import functools
from typing import Any

from envs_jax.base import Array, Environment, check_settings, pytree, setting, short_repr, take_exactly
from envs_jax.snakes import reward, schedule, spawn
from envs_jax.snakes.board import MOST_COLUMNS, Board
from envs_jax.snakes.rules import Game

SIDES = ("first", "second", "both")
# what the 3v3 baseline was published with (jidiai/Competition_3v3snakes); the defaults are what learns
PUBLISHED: dict[str, Any] = {"observation": "obs26", "reward": "original", "masks": False}
OBSERVATIONS = ("obs26", "obs30", "obs35", "obs_full", "obs_heading")
MOST_SNAKES = 14
MOST_ROWS = 64


@pytree
class State:
    """State of one game.

    Attributes:
        key: key[], of the draws of its steps.
        game: state of the rules.
        level: int32[], the other team's player, index in `schedule.PLAYERS`.
        plays_second_half: bool[], the learner's team plays the second half of the snakes.
        stale: first deaths, which scripted opponents keep observing, () without `stale_observation_bug`.
    """

    key: Array
    game: Game
    level: Array
    plays_second_half: Array
    stale: Any = ()


@dataclasses.dataclass(frozen=True)
class SnakesConfig(Environment):
    """Settings of a game, and values derived from them.

    Raises ValueError: impossible settings.
    """

    height: int = setting(10, "give the board this many rows", between=(3, MOST_ROWS))
    width: int = setting(20, "give the board this many columns, at most 32", between=(3, MOST_COLUMNS))
    snakes: int = setting(6, "play with this many snakes", between=(1, MOST_SNAKES))
    beans: int = setting(5, "keep this many beans on the board; each eaten bean is replaced", between=(1, 32))
    max_steps: int = setting(200, "end a game after this many steps", between=(1, 1_000_000))
    teams: int = setting(
        2,
        "let the first half of the snakes play against the second (2), or every snake for itself, all learning (1)",
        between=(1, 2),
    )
    opponent: str = setting(
        "2",
        f"choose who plays the other team: {', '.join(schedule.PLAYERS)} (0: random; 1 to 4: greedy; evasion: greedy, "
        "only into cells with a way out; self: snapshots of the learner); a mixture by weights, 0:1,2:3; a schedule by "
        "shares of training, '0@0 2@0.5'; the published schedules of levels, linear, exponential or curriculum, also "
        "with a later player, 'curriculum evasion@0.8'; or outside",
    )
    eval_opponent: str = setting("2", "play against this opponent in the evaluations that select the best checkpoint")
    exclusive_beans: bool = setting(False, "let levels 3, 4 and evasion choose their beans in turn, as level 2 does")
    stale_observation_bug: bool = setting(
        False,
        "let scripted opponents keep observing each snake where it first died, as in the training of the published "
        "weights",
    )
    side: str = setting(
        "first", f"let the learner play this team: {', '.join(SIDES)} (drawn for each game)", choices=SIDES
    )
    observation: str = setting(
        "obs_full", f"show snakes this observation: {', '.join(OBSERVATIONS)} (published: obs26)", choices=OBSERVATIONS
    )
    reward: str = setting(
        "lives", f"pay this reward: {', '.join(reward.NAMES)} (published: original)", choices=reward.NAMES
    )
    loss_weight: float = setting(
        1.0, "multiply the points that a snake loses by its death, in the rewards lives and duel", between=(0, 1000)
    )
    masks: bool = setting(True, "provide action masks, which close cells that hold a body (published: none)")
    careful_masks: int = setting(
        0,
        "let masks also close directions of sure death, unless another snake dies before, and cells that a mate of "
        "lower index can enter; snakes of at least this length also avoid cells that an opponent can enter; 0 = never",
        between=(0, MOST_ROWS * MOST_COLUMNS),
    )
    time_limit: str = setting(
        "terminate",
        "end a game at max_steps as a true end (terminate, as published) or as a cut (truncate)",
        choices=("terminate", "truncate"),
    )
    fixed_respawn: bool = setting(False, "respawn snakes connected and with correct directions")

    def __post_init__(self) -> None:
        take_exactly(self)
        check_settings(self)
        if self.teams == 2 and self.snakes % 2:
            raise ValueError(
                f"snakes: {self.snakes} snakes do not form two equal teams; choose an even number or teams 1"
            )
        if not spawn.always_room(self.board, self.snakes):
            raise ValueError(
                f"snakes: a board of {self.height} x {self.width} may have no room for the start of {self.snakes} "
                "snakes; choose a larger board or fewer snakes"
            )
        if self.teams == 1 and (self.reward == "duel" or self.careful_masks):
            raise ValueError(
                "snakes: the reward duel and careful_masks are for 2 teams: choose the reward lives and careful_masks 0"
            )
        if self.careful_masks and not self.masks:
            raise ValueError(f"snakes: careful_masks {self.careful_masks} needs action masks: add masks true")
        if self.loss_weight != 1.0 and self.reward not in ("lives", "duel"):
            raise ValueError(
                f"snakes: loss_weight is for the rewards lives and duel: choose one of them instead of {self.reward}"
            )
        if self.observation in ("obs30", "obs35") and (self.snakes, self.beans, self.teams) != (6, 5, 2):
            raise ValueError(
                f"snakes: {self.observation} is published for 2 teams, 6 snakes and 5 beans, not {self.teams}, "
                f"{self.snakes} and {self.beans}; choose obs26 or obs_full"
            )
        schedule.parse(self.opponent)
        if self.eval_opponent == schedule.OUTSIDE or schedule.SELF in schedule.parse(self.eval_opponent).used:
            raise ValueError(
                f"snakes: eval_opponent {short_repr(self.eval_opponent)} cannot play in evaluations; choose scripted "
                "players, such as 2"
            )

    # Derived values

    @property
    def board(self) -> Board:
        return Board(self.height, self.width)

    @property
    def outside(self) -> bool:
        """True if both teams are agents: the first half of them is one team, the second half the other."""
        return self.teams == 2 and self.opponent == schedule.OUTSIDE

    @property
    def scripted(self) -> bool:
        """True if half of the snakes are played by scripted opponents."""
        return self.teams == 2 and not self.outside

    @property
    def num_agents(self) -> int:
        return self.snakes // 2 if self.scripted else self.snakes

    @functools.cached_property
    def schedule(self) -> schedule.Schedule:
        return schedule.parse(self.opponent)

    @property
    def accepts_opponent_actions(self) -> bool:
        """True if some games' other team is played from outside: `step` takes its actions after the learner's."""
        return self.scripted and schedule.SELF in self.schedule.used
