"""Self-play: who plays the other team of which game, what it sees, how the pool changes, and that runs stay exact."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.runs import outcome, resume, run
from helpers.tiny import Corridor

import envs_jax
from envs_jax.base import Array
from envs_jax.batch import BatchedEnvironment, batched
from envs_jax.progress import count, start
from jaxrl.algos.base import Algorithm
from jaxrl.cli import train
from jaxrl.cli.flags import parse
from jaxrl.rl.data_parallel import DataParallel
from jaxrl.runtime.build import _with_self_play, build_algorithm
from jaxrl.runtime.self_play import SelfPlay

BOARD = {"height": 6, "width": 8, "snakes": 4, "beans": 4, "max_steps": 12}
SELF = (
    "--algo ddpg --env snakes --height 4 --width 5 --snakes 2 --beans 2 --max_steps 5 --opponent self:3,0:1 "
    "--observation obs_full --reward lives --num_envs 16 --logical_shards 4 --batch_size 16 --buffer_size 800 "
    "--hidden_size 8 --depth 1 --num_critics 1 --n_step 1 --learning_starts 16 --self_play 2 --self_play_every 64 "
    "--env_steps_per_update 16 --total_env_steps 640 "
    "--eval_every 0 --devices 1"
)


@dataclasses.dataclass(frozen=True)
class Sum(Algorithm):
    """Takes the action `parameters + what it sees`, and notes how it was asked."""

    def act(self, policy: Any, carry: Any, timestep: Any, keys: Array, progress: Any, mode: Any) -> Any:
        assert mode == "sample" and carry == () and len(keys) == len(timestep)
        return (policy + timestep)[:, None], carry, ()


@dataclasses.dataclass(frozen=True)
class Echo(BatchedEnvironment):
    """Shows the other team of a game its number times 100; a step returns the actions."""

    def opponent_view(self, state: Any) -> Any:
        return 100 * state, jax.random.split(jax.random.key(0), len(state))

    def step_without_reset(self, state: Any, action: Array, context: Any) -> Any:
        assert context == "own"
        return state, action


@pytest.mark.parametrize(
    ("group", "players"), [(4, [1, 1, 1, 1, 2, 2, 2, 2]), (2, [1, 1, 2, 2, 1, 1, 2, 2]), (1, [1, 2, 1, 2, 1, 2, 1, 2])]
)
def test_each_group_of_games_is_played_by_its_snapshot(group: int, players: list[int]) -> None:
    env: Any = SelfPlay(None, Echo(None), Sum(Corridor().spec, DataParallel(8)), group, snapshots=2, every=1)  # type: ignore[arg-type]
    own_action = jnp.full((8, 1), 7)
    _, action = env.step_without_reset(jnp.arange(8), own_action, ("own", jnp.array([1, 2])))
    np.testing.assert_array_equal(action, np.stack([np.full(8, 7), np.array(players) + 100 * np.arange(8)], 1))


def test_the_oldest_snapshot_is_replaced() -> None:
    env: Any = SelfPlay(None, None, None, 0, snapshots=3, every=2)  # type: ignore[arg-type]
    pool, pools = env.init_pool(jnp.float32(-1)), []
    update_pool = jax.jit(env.update_pool)
    for call in range(9):
        progress = dataclasses.replace(start(), learn_calls=count(call))
        pool = update_pool(pool, jnp.float32(call), progress)
        pools.append(pool.tolist())
    assert pools[0] == pools[1] == [0, -1, -1] and pools[2] == [0, 2, -1] and pools[4] == [0, 2, 4]
    assert pools[5] == [0, 2, 4] and pools[6] == [6, 2, 4] and pools[8] == [6, 8, 4]


@pytest.mark.slow
@pytest.mark.parametrize(("side", "observation"), [("first", "obs_full"), ("second", "obs26")])
def test_opponents_see_and_play_as_the_other_team_does(side: str, observation: str) -> None:
    """A game whose other team is "self", compared with the same game with both teams outside."""
    settings = BOARD | {"observation": observation}
    with_self = batched(envs_jax.make("snakes", opponent="self", side=side, **settings))
    outside = batched(envs_jax.make("snakes", opponent="outside", side=side, **settings))
    keys, random = jax.random.split(jax.random.key(3), 5), np.random.default_rng(0)
    one, observed = jax.jit(with_self.reset)(keys, with_self.context(start()))
    both, timestep = jax.jit(outside.reset)(keys, outside.context(start()))
    opponents, play, play_both = (
        jax.jit(f) for f in (with_self.opponent_view, with_self.step_without_reset, outside.step_without_reset)
    )
    drawn = []
    for _ in range(12):
        theirs, opponent_keys = opponents(one)
        np.testing.assert_array_equal(
            np.concatenate([observed.observation, theirs.observation], 1), timestep.observation
        )
        drawn.append(jax.random.bits(opponent_keys[0]))
        action = jnp.asarray(random.integers(0, 4, (5, 4)), jnp.int32)
        one, observed = play(one, action, with_self.context(start()))
        both, timestep = play_both(both, action, outside.context(start()))
        for a, b in zip(jax.tree.leaves(one.env.game), jax.tree.leaves(both.env.game), strict=True):
            np.testing.assert_array_equal(a, b)
    assert len({int(x) for x in drawn}) == 12


@pytest.mark.slow
def test_scripted_games_of_a_mixture_ignore_the_opponents() -> None:
    mixed, plain = (batched(envs_jax.make("snakes", opponent=o, **BOARD)) for o in ("self,1", "1"))
    keys, random = jax.random.split(jax.random.key(3), 40), np.random.default_rng(0)
    one, _ = jax.jit(mixed.reset)(keys, mixed.context(start()))
    other, _ = jax.jit(plain.reset)(keys, plain.context(start()))
    scripted = np.asarray(one.env.level) == 1
    assert 8 < scripted.sum() < 32
    play, play_plain = jax.jit(mixed.step_without_reset), jax.jit(plain.step_without_reset)
    for _ in range(6):
        action = jnp.asarray(random.integers(0, 4, (40, 4)), jnp.int32)
        one, _ = play(one, action, mixed.context(start()))
        other, _ = play_plain(other, action[:, :2], plain.context(start()))
    same = [
        (np.asarray(a) == np.asarray(b)).reshape(40, -1).all(1)
        for a, b in zip(jax.tree.leaves(one.env.game), jax.tree.leaves(other.env.game), strict=True)
    ]
    same_games = np.all(same, axis=0)
    assert same_games[scripted].all() and same_games[~scripted].sum() < 3


@pytest.mark.slow
def test_a_run_is_exact_on_any_number_of_devices_and_resumes(tmp_path: Path) -> None:
    whole = outcome(run(f"{SELF} --devices 2", tmp_path / "whole"))
    cut = run(f"{SELF} --total_env_steps 320 --schedule_env_steps 640", tmp_path / "cut")
    resume(cut, "--total_env_steps 640")
    assert outcome(cut) == whole


@pytest.mark.parametrize(("snapshots", "expected"), [(1, 1), (2, 2), (3, 2), (9, 4)])
def test_the_pool_divides_the_games_of_a_logical_shard(snapshots: int, expected: int) -> None:
    config = parse(f"{SELF} --self_play {snapshots}".split()).config
    env = _with_self_play(batched(config.make_env()), build_algorithm(config), config.run)
    assert isinstance(env, SelfPlay) and (env.snapshots, env.group) == (expected, 4 // expected)


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("--self_play 0", "self_play must lie between 1 and"),
        ("--eval_opponent self", "eval_opponent 'self' cannot play in evaluations; choose scripted"),
        ("--self_play_every 0", "self_play_every must lie between 1 and"),
    ],
)
def test_impossible_settings_are_refused(flags: str, sentence: str, tmp_path: Path, capsys: Any) -> None:
    assert train.main([*SELF.split(), *flags.split(), "--runs", str(tmp_path)]) == 2
    assert sentence in capsys.readouterr().err
