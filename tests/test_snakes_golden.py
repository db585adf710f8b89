"""Observations, shaped rewards and scripted players against the recorded ones of the original code."""

import golden
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_snakes_rules import CONFIGURATIONS, recorded, stack

from envs_jax.snakes import observation, opponents, reward, segments

SIX = [configuration for configuration in CONFIGURATIONS if configuration[2:4] == (6, 5)]


@pytest.mark.parametrize("configuration", [c for c in CONFIGURATIONS if c[2] in (2, 6)], ids=str)
def test_recorded_choices_of_the_scripted_players(configuration):
    board, rows, games, record = recorded(configuration)
    half = configuration[2] // 2
    word = jnp.zeros(len(rows), jnp.uint32)
    used = (1, 2, 3, 4, 5)

    @jax.jit
    def act(level):
        return opponents.act(board, games, slice(half, 2 * half), level, word, used)

    checked = 0
    for place, level in enumerate(used):
        wanted = record["opp_action"][:, place, :half].T
        known = wanted >= 0
        chosen = np.asarray(act(jnp.full(len(rows), level, jnp.int32)))
        np.testing.assert_array_equal(chosen[known], wanted[known], err_msg=opponents.LEVELS[level])
        checked += known.sum()
    assert checked > 100


@pytest.mark.parametrize("configuration", SIX, ids=str)
def test_recorded_observations(configuration):
    board, rows, games, _ = recorded(configuration)
    record = golden.load("snakes_transitions")
    lanes = np.flatnonzero(np.isin(rows, record["obs_row"]))
    places = np.searchsorted(record["obs_row"], rows[lanes])
    games = jax.tree.map(lambda x: x[..., lanes], games)
    builders = {"obs26": observation.classic, "obs30": observation.extended_30, "obs35": observation.extended_35}
    for name, build in builders.items():
        columns = jax.jit(lambda games, build=build: build(board, games, 3))(games)
        seen = np.stack([np.asarray(x, np.float64) for x in columns], -1).swapaxes(0, 1)
        wanted = record[name][places].astype(np.float64)
        np.testing.assert_allclose(seen, wanted, rtol=1e-6 if name != "obs26" else 0, atol=0, err_msg=name)


@pytest.mark.parametrize("configuration", SIX, ids=str)
def test_recorded_shaped_rewards(configuration):
    board, _, _, record = recorded(configuration)
    valid = np.flatnonzero(record["shaped_valid"])

    def cells(flat):
        return [divmod(int(x), board.width) for x in flat if x >= 0]

    after = stack(
        [
            segments.from_segments(
                board,
                [cells(snake) for snake in record["seg_after"][t]],
                record["dir_after"][t],
                cells(record["beans_after"][t]),
                5,
            )
            for t in valid
        ]
    )
    engine, hit, code = (record[k][valid].T for k in ("reward", "hit", "score_code"))
    for name, key in (("original", "shaped_orig"), ("v1.1", "shaped_v11"), ("plus", "shaped_plus")):
        paid = reward.shaped(name, after, jnp.asarray(engine, jnp.int32)[:3], jnp.asarray(hit > 0)[:3], code)
        np.testing.assert_allclose(np.asarray(paid).T, record[key][valid], rtol=1e-5, atol=1e-6, err_msg=name)
