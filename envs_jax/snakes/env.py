"""Snakes as an environment: the order of a step, and the spec."""

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp

from envs_jax.base import Array, Discrete, EnvSpec, TimeStep, with_default
from envs_jax.batch import BatchedEnvironment, BatchLast, BatchState, batch_first, batch_last, for_keys
from envs_jax.matches import OUTCOMES, MatchRules
from envs_jax.progress import Progress, start
from envs_jax.snakes import baselines, respawn, reward, rules, spawn, stale_observation, teams, timesteps
from envs_jax.snakes.types import SnakesConfig, State


@dataclasses.dataclass(frozen=True)
class Snakes(SnakesConfig):
    """Teams of snakes compete for beans on a torus; the package names the source, `SnakesConfig` the settings."""

    name = "snakes"
    version = 2  # 2: in obs_full and the masks, the tail of a snake is not free if a bean lies next to its head
    baselines = baselines.BASELINES

    @functools.cached_property
    def spec(self) -> EnvSpec:
        metrics = {name: timesteps.METRICS[name] for name in timesteps.metrics_of(self)}
        return EnvSpec(
            name=self.name,
            num_agents=self.num_agents,
            observation=timesteps.observation_box(self),
            action=Discrete(4),
            horizon=self.max_steps,
            full_length=True,  # a board that is full, or without room for a respawn, ends a game earlier
            metrics={name: metric.reduction for name, metric in metrics.items()},
            shares=tuple(name for name in OUTCOMES if name in metrics),
            labels={name: metric.label for name, metric in metrics.items()},
            score="score_difference" if self.teams == 2 else "score",
            action_order=self.observation == "obs_heading",
        )

    def context(self, progress: Progress) -> Any:
        """float32[players]: probabilities of the players of the other team in the games that begin now."""
        return self.schedule.at(progress.fraction)

    def for_evaluation(self) -> "Snakes":
        """Return the environment against `eval_opponent`, without the stale observation bug."""
        if self.outside:
            return self
        return dataclasses.replace(self, opponent=self.eval_opponent, stale_observation_bug=False)

    @property
    def match_rules(self) -> MatchRules | None:
        return baselines.match_rules(self) if self.teams == 2 else None

    # Environment: one game, or many in the last axis (see `board`)

    def reset(self, key: Array, context: Any = None) -> tuple[State, TimeStep]:
        context = self.context(start()) if context is None else context
        key, words = for_keys(functools.partial(spawn.start_words, self.snakes, self.beans), key)
        state = self._begin(key, words, context)
        return state, timesteps.show(self, teams.learner_view(self, state))

    def step(self, state: State, action: Array, context: Any = None) -> tuple[State, TimeStep]:
        draw = functools.partial(spawn.step_words, self.snakes, self.beans)
        return self._advance(state, for_keys(draw, state.key, state.game.steps), action)

    def opponent_view(self, state: State) -> tuple[TimeStep, Array]:
        """Return the other team's time step, as if it were the learner's, and a key for its draws in this step."""
        opponent_game = teams.half_turn(teams.learner_view(self, state), self.snakes // 2)
        return timesteps.show(self, opponent_game), for_keys(spawn.opponent_key, state.key, state.game.steps)

    def batched(self) -> BatchedEnvironment:
        return SnakesBatch(self)

    def _begin(self, key: Array, words: Array, context: Array) -> State:
        """Return the state at the start, for random words uint32[n + K + 2, ...]."""
        game = spawn.begin(self.board, words[:-2], self.snakes, self.beans)
        chance = words[-2].astype(jnp.float32) * jnp.float32(2**-32)
        level = jnp.zeros(chance.shape, jnp.int32)
        below = jnp.float32(0)
        for k in self.schedule.used:  # the last whose interval begins at or below the draw
            level = jnp.where((chance >= below) & (context[k] > 0), k, level)
            below = below + context[k]
        plays_second = {"first": jnp.zeros_like(words[-1]), "second": jnp.ones_like(words[-1]), "both": words[-1] >> 31}
        stale = stale_observation.begin(game) if self.stale_observation_bug and self.scripted else ()
        return State(key, game, level, plays_second[self.side] != 0, stale)

    def _advance(self, state: State, words: Array, action: Array) -> tuple[State, TimeStep]:
        """Step with random words uint32[:, ...] and actions int32[A, ...]."""
        board = self.board
        snakes = self.snakes
        beans = self.beans
        plays_self = self.accepts_opponent_actions
        expected = snakes if plays_self else self.num_agents
        if len(action) != expected:
            hint = "; only training plays the opponent 'self': pass the other team's actions, too" if plays_self else ""
            raise ValueError(
                f"snakes: step got {len(action)} actions, but a game with the opponent '{self.opponent}' takes "
                f"{expected}{hint}"
            )
        if self.scripted:
            action = teams.with_opponents(self, state, words[-1], action)
        action = teams.swap_teams(self, action, state.plays_second_half)
        direction = rules.resolve_directions(state.game.direction, action, spawn.turns(words[beans:], snakes))
        game, score_change, hit, ate = rules.move(board, state.game, direction)
        if self.stale_observation_bug and self.scripted:
            stale = stale_observation.update(board, state.stale, state.game, game, ate, hit)
            state = dataclasses.replace(state, stale=stale)
        opponent_losses = jnp.zeros_like(score_change)
        if self.reward == "duel":
            met = rules.collisions(board, state.game, direction, ate)
            opponent_losses = reward.opponent_losses(met, hit, state.game.length)
        game = respawn.respawn(board, game, self.fixed_respawn)
        game = spawn.refill(board, game, words[:beans])
        state = dataclasses.replace(state, game=game)
        score_change, hit, opponent_losses = (
            teams.swap_teams(self, x, state.plays_second_half) for x in (score_change, hit, opponent_losses)
        )
        return state, timesteps.show(self, teams.learner_view(self, state), score_change, hit, opponent_losses)

    def step_label(self, step: int) -> str:
        return f"{step} step{'' if step == 1 else 's'}"

    def viewer(self) -> Any:
        from envs_jax.snakes.viewer import SnakesViewer

        return SnakesViewer()


@dataclasses.dataclass(frozen=True)
class Snakes1v1(Snakes):
    """One snake against one on the small board."""

    height: int = with_default(Snakes, "height", 6)
    width: int = with_default(Snakes, "width", 8)
    snakes: int = with_default(Snakes, "snakes", 2)
    max_steps: int = with_default(Snakes, "max_steps", 50)

    name = "snakes_1v1"


@dataclasses.dataclass(frozen=True)
class Snakes2p(Snakes1v1):
    """Two snakes on the small board, each for itself."""

    teams: int = with_default(Snakes, "teams", 1)

    name = "snakes_2p"


@dataclasses.dataclass(frozen=True)
class Snakes5p(Snakes):
    """Five snakes, each for itself."""

    snakes: int = with_default(Snakes, "snakes", 5)
    teams: int = with_default(Snakes, "teams", 1)

    name = "snakes_5p"


@dataclasses.dataclass(frozen=True)
class SnakesBatch(BatchLast):
    """[B] games; actions of the other team may come from outside."""

    env: Snakes

    def opponent_view(self, state: BatchState) -> tuple[TimeStep, Array]:
        """See `Snakes.opponent_view`; leaves [B, ...]."""
        timestep, keys = self.env.opponent_view(batch_last(state.env))
        return batch_first(timestep), keys
