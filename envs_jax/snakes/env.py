"""Snakes as an environment: settings, the order of a step, and what the learner's team is shown and paid."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from envs_jax.base import (
    Array,
    Box,
    Contest,
    Discrete,
    Environment,
    EnvSpec,
    Reduction,
    TimeStep,
    check_settings,
    closest,
    pytree,
    setting,
    shown,
)
from envs_jax.batch import BatchedEnvironment, BatchState
from envs_jax.snakes import baselines, draws, full, ghosts, observation, opponents, respawn, reward, rules, schedule
from envs_jax.snakes.board import MOST_COLUMNS, Board, total
from envs_jax.snakes.room import always_room
from envs_jax.snakes.rules import Game
from envs_jax.stages import stage

SEATS = ("first", "second", "both")
TIME_LIMITS = ("terminate", "truncate")
OBSERVATIONS = ("obs26", "obs30", "obs35", "obs_full")
_LABELS = {
    "score": "score, points",
    "opponent_score": "opponents' score, points",
    "score_difference": "score difference, points",
    "meals": "beans eaten",
    "opponent_meals": "opponents' beans eaten",
    "opponent_deaths": "opponents' deaths",
    "win": "games won",
    "draw": "games drawn",
    "defeat": "games lost",
}
MOST_SNAKES = 14
MOST_BEANS = 32
MOST_STEPS = 1_000_000
MOST_ROWS = 64


@pytree
class State:
    """State of one game.

    Attributes:
        key: key[], of the draws of its steps.
        game: what the rules know.
        level: int32[], who plays the other team, index in `schedule.PLAYERS`.
        second: bool[], the learner's team plays the second half of the snakes.
        ghosts: what stale opponents see, () unless there are some.
    """

    key: Array
    game: Game
    level: Array
    second: Array
    ghosts: Any = ()


def _known(name: str, value: str, names: tuple[str, ...]) -> None:
    if value not in names:
        raise ValueError(f"snakes: unknown {name} {shown(value)}: {closest(str(value), names)}")


@dataclasses.dataclass(frozen=True)
class Snakes(Environment):
    """Teams of snakes compete for beans on a torus. See the package's docstring for the source of the rules.

    Raises:
        ValueError: impossible settings.
    """

    height: int = setting(10, "rows of the board")
    width: int = setting(20, "columns of the board, at most 32")
    snakes: int = setting(6, "number of snakes", between=(1, MOST_SNAKES))
    beans: int = setting(5, "beans kept on the board", between=(1, MOST_BEANS))
    max_steps: int = setting(200, "steps of a game", between=(1, MOST_STEPS))
    teams: int = setting(2, "2: the first half of the snakes against the second; 1: everyone for itself, all learn")
    opponent: str = setting(
        "2", "who plays the other team: 0 to 4, evasion, self, a mixture 0:1,2:3, a schedule or outside"
    )
    eval_opponent: str = setting("2", "the same in the evaluations that choose the best checkpoint")
    exclusive_beans: bool = setting(False, "whether levels 3, 4 and evasion choose their beans in turn, as 2 does")
    stale_opponents: bool = setting(
        False, "whether scripted opponents go on seeing each snake where it first died, as the published weights' did"
    )
    seat: str = setting("first", f"which team the learner plays: {', '.join(SEATS)} (drawn for each game)")
    observation: str = setting("obs26", f"what snakes see: {', '.join(OBSERVATIONS)}")
    reward: str = setting("original", f"what snakes are paid: {', '.join(reward.NAMES)}")
    masks: bool = setting(False, "whether snakes are told which directions are open, for --masking")
    time_limit: str = setting("terminate", "what the end of the time does: terminate (as published) or truncate")
    fixed_respawn: bool = setting(False, "whether snakes respawn connected and with true directions")

    name = "snakes"
    version = 2  # 2: in obs_full and the masks, a tail beside whose head a bean lies is not free
    baselines = baselines.BASELINES

    def __post_init__(self) -> None:
        if self.height < 3 or self.width < 3:
            raise ValueError(
                f"snakes: the board is {self.height} x {self.width}; snakes need at least 3 rows and 3 columns"
            )
        if self.width > MOST_COLUMNS or self.height > MOST_ROWS:
            raise ValueError(
                f"snakes: the board is {self.height} x {self.width}; choose at most {MOST_ROWS} rows and "
                f"{MOST_COLUMNS} columns"
            )
        check_settings(self)
        if self.teams not in (1, 2):
            raise ValueError(f"snakes: teams is {self.teams}; choose 2, or 1 where everyone plays for itself")
        if self.teams == 2 and self.snakes % 2:
            raise ValueError(f"snakes: {self.snakes} snakes make no two equal teams; choose an even number or teams 1")
        if not always_room(self.board, self.snakes):
            raise ValueError(
                f"snakes: a board of {self.height} x {self.width} may have no room for the start of {self.snakes} "
                "snakes; choose a larger board or fewer snakes"
            )
        _known("seat", self.seat, SEATS)
        _known("observation", self.observation, OBSERVATIONS)
        _known("reward", self.reward, reward.NAMES)
        _known("time_limit", self.time_limit, TIME_LIMITS)
        if self.observation in ("obs30", "obs35") and (self.snakes, self.beans, self.teams) != (6, 5, 2):
            raise ValueError(
                f"snakes: {self.observation} is published for 2 teams, 6 snakes and 5 beans, not {self.teams}, "
                f"{self.snakes} and {self.beans}; choose obs26 or obs_full"
            )
        schedule.parse(self.opponent)
        if self.eval_opponent == schedule.OUTSIDE or schedule.SELF in schedule.parse(self.eval_opponent).used:
            raise ValueError(f"snakes: eval_opponent is {shown(self.eval_opponent)}; choose scripted players")

    # What follows from the settings

    @property
    def board(self) -> Board:
        return Board(self.height, self.width)

    @property
    def outside(self) -> bool:
        """Both teams are agents: the first half of them is one team, the second half the other."""
        return self.teams == 2 and self.opponent == schedule.OUTSIDE

    @property
    def scripted(self) -> bool:
        """Half of the snakes are played by scripted opponents."""
        return self.teams == 2 and not self.outside

    @property
    def num_agents(self) -> int:
        return self.snakes // 2 if self.scripted else self.snakes

    @functools.cached_property
    def schedule(self) -> schedule.Schedule:
        return schedule.parse(self.opponent)

    @property
    def takes_rivals(self) -> bool:
        """Some games' other team is played from outside: `step` takes its actions behind the learner's."""
        return self.scripted and schedule.SELF in self.schedule.used

    @functools.cached_property
    def spec(self) -> EnvSpec:
        most = max(self.height, self.width, self.snakes + 2)
        boxes = {
            "obs26": Box((6 + 2 * self.beans + 2 * (self.snakes - 1),), jnp.int8, low=0, high=most - 1),
            "obs30": Box((30,)),
            "obs35": Box((35,)),
            "obs_full": Box((full.Layout(self.snakes, self.beans).size,), jnp.int8, low=-full.ONE, high=full.ONE),
        }
        metrics: dict[str, Reduction] = {"score": "last", "deaths": "sum", "meals": "sum"}
        if self.teams == 2:
            metrics |= {
                "opponent_score": "last",
                "score_difference": "last",
                "win": "last",
                "draw": "last",
                "defeat": "last",
                "opponent_deaths": "sum",
                "opponent_meals": "sum",
            }
        return EnvSpec(
            name=self.name,
            num_agents=self.num_agents,
            observation=boxes[self.observation],
            action=Discrete(4),
            horizon=self.max_steps,
            metrics=metrics,
            labels=_LABELS,
            score="score_difference" if self.teams == 2 else "score",
        )

    def context(self, progress: Any) -> Any:
        """float32[7]: chances of the players of the other team in the games that begin now."""
        return self.schedule.at(progress.fraction)

    def for_evaluation(self) -> "Snakes":
        """Against `eval_opponent`, who sees the game as it is."""
        return self if self.outside else dataclasses.replace(self, opponent=self.eval_opponent, stale_opponents=False)

    @property
    def contest(self) -> Contest | None:
        return baselines.contest(self) if self.teams == 2 else None

    # Environment: one game without lanes

    def reset(self, key: Array, context: Any) -> tuple[State, TimeStep]:
        state = self._begin(*self._draw_start(key), context)
        return state, self._show(self.seen(state))

    def step(self, state: State, action: Array, context: Any) -> tuple[State, TimeStep]:
        return self._advance(state, self._draw_step(state.key, state.game.steps), action)

    def rivals(self, state: State) -> tuple[TimeStep, Array]:
        """What the other team sees, as if it were the learner's, and a key for what it draws in this step."""
        return self._show(_half_turn(self.seen(state), self.snakes // 2)), self._rival_key(state)

    def batched(self) -> BatchedEnvironment:
        """The batch that `envs_jax.batch.batched` makes of this environment."""
        return SnakesBatch(self)

    # Parts, for one game or many on lanes

    def _draw_start(self, key: Array) -> tuple[Array, Array]:
        key_steps, key_start = jax.random.split(key)
        return key_steps, jax.random.bits(key_start, (self.snakes + self.beans + 2,))

    def _draw_step(self, key: Array, steps: Array) -> Array:
        """uint32[K + turns + 1]: the random words of a step: for beans, for turns, for random opponents."""
        count = self.beans + -(-self.snakes // draws.PER_WORD) + 1
        return jax.random.bits(jax.random.fold_in(key, steps), (count,))

    def _rival_key(self, state: State) -> Array:
        return jax.random.fold_in(jax.random.fold_in(state.key, state.game.steps), 1)

    def _begin(self, key: Array, words: Array, context: Array) -> State:
        """The state at the start, for random words uint32[n + K + 2, ...]."""
        game = draws.begin(self.board, words[:-2], self.snakes, self.beans)
        chance = words[-2].astype(jnp.float32) * jnp.float32(2**-32)
        level = jnp.zeros(chance.shape, jnp.int32)
        below = jnp.float32(0)
        for k in self.schedule.used:  # the last whose chances begin at or below the draw
            level = jnp.where((chance >= below) & (context[k] > 0), k, level)
            below = below + context[k]
        second = {"first": jnp.zeros_like(words[-1]), "second": jnp.ones_like(words[-1]), "both": words[-1] >> 31}
        stale = ghosts.begin(game) if self.stale_opponents and self.scripted else ()
        return State(key, game, level, second[self.seat] != 0, stale)

    def _swapped(self, values: Array, second: Array, axis: int = 0) -> Array:
        """Values along an axis of all snakes, the halves exchanged where the learner plays the second."""
        if self.seat == "first" or self.teams == 1:
            return values
        swapped = jnp.roll(values, self.snakes // 2, axis)
        return swapped if self.seat == "second" else jnp.where(second[(None,) * (axis + 1)], swapped, values)

    def seen(self, state: State) -> Game:
        """The game as the learner's team sees it: its own snakes come first."""
        game, second = state.game, state.second
        names = ("head", "tail", "length", "direction", "split")
        changed = {name: self._swapped(getattr(game, name), second) for name in names}
        return dataclasses.replace(game, body=self._swapped(game.body, second, 1), **changed)

    def _shown_to_opponents(self, state: State) -> Game:
        """The game as scripted opponents see it, whose snakes come last."""
        if not self.stale_opponents:
            return self.seen(state)
        return self.seen(dataclasses.replace(state, game=ghosts.shown(self.board, state.ghosts, state.game)))

    def _advance(self, state: State, words: Array, action: Array) -> tuple[State, TimeStep]:
        """One step for random words uint32[:, ...] and actions int32[A, ...]."""
        board, snakes, beans = self.board, self.snakes, self.beans
        wanted = snakes if self.takes_rivals else self.num_agents
        if len(action) != wanted:
            raise ValueError(
                f"snakes: {len(action)} actions for a game with the opponent '{self.opponent}', which takes {wanted}"
                + ("; 'self' needs a run with --self_play" if self.takes_rivals else "")
            )
        if self.scripted:
            action = self._with_opponents(state, words[-1], action)
        action = self._swapped(action, state.second)
        direction = rules.resolved(state.game.direction, action, draws.turns(words[beans:], snakes))
        game, engine, hit, ate = rules.move(board, state.game, direction)
        if self.stale_opponents and self.scripted:
            stale = ghosts.update(board, state.ghosts, state.game, game, ate, hit)
            state = dataclasses.replace(state, ghosts=stale)
        game = respawn.respawn(board, game, self.fixed_respawn)
        game = draws.refill(board, game, words[:beans])
        state = dataclasses.replace(state, game=game)
        return state, self._show(self.seen(state), *(self._swapped(x, state.second) for x in (engine, hit)))

    def _with_opponents(self, state: State, word: Array, action: Array) -> Array:
        """int32[n, ...]: the actions of the learner's team, then those of the other in the state's game."""
        half = self.snakes // 2
        players = tuple(k for k in self.schedule.used if k != schedule.SELF)
        if not players:
            return action
        others = opponents.act(
            self.board,
            self._shown_to_opponents(state),
            slice(half, self.snakes),
            state.level,
            word,
            players,
            self.exclusive_beans,
        )
        if self.takes_rivals:
            others = jnp.where((state.level == schedule.SELF)[None], action[half:], others)
        return jnp.concatenate([action[:half], others])

    def _show(self, game: Game, engine: Array | None = None, hit: Array | None = None) -> TimeStep:
        """The time step of a game as a team sees it, its own snakes first.

        Engine rewards int32[n, ...] and deaths bool[n, ...] are those of the step before, if any.
        """
        stuck, late = rules.ended(self.board, game, self.max_steps)
        start = engine is None or hit is None
        if engine is None or hit is None:
            engine, hit = jnp.zeros_like(game.head), jnp.zeros_like(game.head, bool)
            stuck = jnp.zeros_like(stuck)
        done = stuck | late
        truncated = late & ~stuck if self.time_limit == "truncate" else jnp.zeros_like(done)
        paid = self._pay(game, engine, hit, done)
        return TimeStep(
            observation=stage(self._observe)(game),
            action_mask=stage(self._open)(game) if self.masks else None,
            mask_state=(),
            global_state=(),
            reward=jnp.zeros_like(paid) if start else paid,
            terminated=done & ~truncated,
            truncated=truncated,
            first=game.steps == 0,
            metrics=self._measure(game, engine, hit),
        )

    def _both(self, values: Array) -> tuple[Array, Array]:
        """Sums over the own team and over the other (0 where there is none)."""
        if self.teams == 1:
            return total(values), jnp.zeros_like(values[0])
        half = self.snakes // 2
        return total(values[:half]), total(values[half:])

    def _pay(self, game: Game, engine: Array, hit: Array, done: Array) -> Array:
        """float32[A, ...]"""
        if self.outside:  # each half as the learner's team
            half = self.snakes // 2
            other = _half_turn(game, half)
            return jnp.concatenate(
                [
                    self._pay_team(game, engine, hit, done, half),
                    self._pay_team(other, jnp.roll(engine, half, 0), jnp.roll(hit, half, 0), done, half),
                ]
            )
        return self._pay_team(game, engine, hit, done, self.num_agents)

    def _pay_team(self, game: Game, engine: Array, hit: Array, done: Array, agents: int) -> Array:
        if self.reward == "score":
            if self.teams == 1:
                return engine.astype(jnp.float32)
            own, others = self._both(engine)
            return jnp.broadcast_to((own - others).astype(jnp.float32)[None], engine[:agents].shape)
        own, others = self._both(rules.score(game))
        code = reward.lead_code(own, others, done) if self.teams == 2 else jnp.zeros_like(own)
        return reward.shaped(self.reward, game, engine[:agents], hit[:agents], code)

    def _open(self, game: Game) -> Array:
        """bool[A, 4, ...]: the directions that every agent may choose."""
        if self.outside:
            half = self.snakes // 2
            return jnp.concatenate([full.open_directions(self.board, g, half) for g in (game, _half_turn(game, half))])
        return full.open_directions(self.board, game, self.num_agents)

    def _observe(self, game: Game) -> Array:
        """[A, F, ...]: what every agent sees."""
        if self.outside:
            half = self.snakes // 2
            return jnp.concatenate([self._observe_team(g, half) for g in (game, _half_turn(game, half))])
        return self._observe_team(game, self.num_agents)

    def _observe_team(self, game: Game, agents: int) -> Array:
        if self.observation == "obs_full":
            return jnp.moveaxis(full.columns(self.board, game, agents, self.teams), 0, 1)
        layouts = {"obs26": observation.classic, "obs30": observation.extended_30, "obs35": observation.extended_35}
        columns = layouts[self.observation](self.board, game, agents)
        dtype = self.spec.observation.dtype
        return jnp.stack([x.astype(dtype) for x in columns], axis=1)

    def _measure(self, game: Game, engine: Array, hit: Array) -> dict[str, Array]:
        """float32[...] for each metric."""
        own, others = self._both(rules.score(game))
        deaths, other_deaths = self._both(hit.astype(jnp.int32))
        meals, other_meals = self._both((engine > 0).astype(jnp.int32))
        values = {"score": own, "deaths": deaths, "meals": meals}
        if self.teams == 2:
            values |= {
                "opponent_score": others,
                "score_difference": own - others,
                "win": own > others,
                "draw": own == others,
                "defeat": own < others,
                "opponent_deaths": other_deaths,
                "opponent_meals": other_meals,
            }
        return {name: value.astype(jnp.float32) for name, value in values.items()}

    def moment(self, step: int) -> str:
        return f"{step} step{'' if step == 1 else 's'}"

    def viewer(self) -> Any:
        from envs_jax.snakes.viewer import SnakesViewer

        return SnakesViewer()


def _half_turn(game: Game, half: int) -> Game:
    """The game as the other team sees it."""
    names = ("head", "tail", "length", "direction", "split")
    changed = {name: jnp.roll(getattr(game, name), half, 0) for name in names}
    return dataclasses.replace(game, body=jnp.roll(game.body, half, 1), **changed)


@dataclasses.dataclass(frozen=True)
class Snakes1v1(Snakes):
    """One snake against one on the small board."""

    height: int = setting(6, "rows of the board")
    width: int = setting(8, "columns of the board, at most 32")
    snakes: int = setting(2, "number of snakes", between=(1, MOST_SNAKES))
    max_steps: int = setting(50, "steps of a game", between=(1, MOST_STEPS))

    name = "snakes_1v1"


@dataclasses.dataclass(frozen=True)
class Snakes2p(Snakes1v1):
    """Two snakes on the small board, everyone for itself."""

    teams: int = setting(1, "2: the first half of the snakes against the second; 1: everyone for itself, all learn")

    name = "snakes_2p"


@dataclasses.dataclass(frozen=True)
class Snakes5p(Snakes):
    """Five snakes, everyone for itself."""

    snakes: int = setting(5, "number of snakes", between=(1, MOST_SNAKES))
    teams: int = setting(1, "2: the first half of the snakes against the second; 1: everyone for itself, all learn")

    name = "snakes_5p"


def _lanes_first(tree: Any) -> Any:
    return jax.tree.map(lambda x: jnp.moveaxis(x, -1, 0), tree)


def _lanes_last(tree: Any) -> Any:
    return jax.tree.map(lambda x: jnp.moveaxis(x, 0, -1), tree)


@dataclasses.dataclass(frozen=True)
class SnakesBatch(BatchedEnvironment):
    """[B] games: inside a step they are the last axis, so that every loop runs over games; see `board`."""

    @property
    def _snakes(self) -> Snakes:
        assert isinstance(self.env, Snakes)
        return self.env

    def _start(self, keys: Array, episode: Array, context: Any) -> tuple[BatchState, TimeStep]:
        env = self._snakes
        step_keys, words = jax.vmap(lambda key, e: env._draw_start(jax.random.fold_in(key, e)))(keys, episode)
        state = env._begin(step_keys, words.T, context)
        timestep = env._show(env.seen(state))
        return BatchState(env=_lanes_first(state), key=keys, episode=episode), _lanes_first(timestep)

    def play(self, state: BatchState, action: Array, context: Any) -> tuple[BatchState, TimeStep]:
        env = self._snakes
        words = jax.vmap(env._draw_step)(state.env.key, state.env.game.steps)
        games, timestep = env._advance(_lanes_last(state.env), words.T, action.T)
        return dataclasses.replace(state, env=_lanes_first(games)), _lanes_first(timestep)

    def rivals(self, state: BatchState) -> tuple[TimeStep, Array]:
        """See `Snakes.rivals`; leaves [B, ...]."""
        games = _lanes_last(state.env)
        timestep = self._snakes._show(_half_turn(self._snakes.seen(games), self._snakes.snakes // 2))
        return _lanes_first(timestep), jax.vmap(self._snakes._rival_key)(state.env)
