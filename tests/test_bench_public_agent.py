"""Games against a program of the Jidi platform, compared with games against the environment's player."""

import dataclasses
import json

import numpy as np
import pytest

from bench.parity import public_agent
from envs_jax.base import make
from jaxrl.evaluation import league
from jaxrl.evaluation.policies import load

pytestmark = pytest.mark.bench

GREEDY = '''
def my_controller(seen, space, continuous):
    """Level 1 of the environment: the direction that comes closest to the nearest bean, whatever is in the way."""
    height, width = seen["board_height"], seen["board_width"]
    head, beans = seen[seen["controlled_snake_index"]][0], seen[1]
    square = lambda a, b: (a[0] - b[0]) ** 2 + (a[1] - b[1]) ** 2
    bean = min(beans, key=lambda b: square(head, b))
    steps = [((head[0] + r) % height, (head[1] + c) % width) for r, c in ((-1, 0), (1, 0), (0, -1), (0, 1))]
    chosen = min(range(4), key=lambda d: square(steps[d], bean))
    return [[int(d == chosen) for d in range(4)]]
'''


@pytest.mark.slow
def test_a_program_that_plays_as_level_1_has_its_games(tmp_path, capsys):
    (tmp_path / "submission.py").write_text(GREEDY)
    agent = public_agent.load_agent(tmp_path / "submission.py")
    alone = load(None, "snakes_1v1", dataclasses.asdict(make("snakes_1v1", max_steps=20)))
    ended, errors, _ = public_agent.play(alone, "level2", [agent.my_controller] * 12, seed=3)
    among = alone.with_env_settings({"opponent": "1", "side": "both"})
    ((_, _, expected),) = league.play(among, [("level2", "level1")], {}, 12, seed=3)
    assert errors == 0 and "step 20" in capsys.readouterr().out
    for name in public_agent.METRICS:
        if name != "points":
            np.testing.assert_array_equal(ended[name], expected[name], err_msg=name)
    assert len(np.unique(ended["score_difference"])) > 2 and ended["opponent_deaths"].sum() > 0
    np.testing.assert_array_equal(ended["points"], expected["win"] + expected["draw"] / 2)


def test_the_policy_of_the_package_plays(tmp_path, capsys):
    (tmp_path / "submission.py").write_text(GREEDY)
    out = tmp_path / "games.json"
    agent = str(tmp_path / "submission.py")
    words = ["pretrained:snakes", "--agent", agent, "--games", "6", "--search", "--out", str(out)]
    assert public_agent.main(words) == 0
    row = json.loads(out.read_text())["players"]["pretrained:snakes"]
    assert 0 < row["milliseconds"]["mean"] <= row["milliseconds"]["1.0"]
    assert row["milliseconds"]["0.99"] <= row["milliseconds"]["1.0"]
    assert row["checkpoint"] > 0 and row["agent_errors"] == 0
    assert {name for name, estimate in row.items() if isinstance(estimate, dict) and "low" in estimate} == {
        "win", "draw", "points"
    }  # fmt: skip
    assert capsys.readouterr().out.startswith("pretrained:snakes: score ")


def test_what_is_no_player_is_refused(tmp_path, capsys):
    (tmp_path / "submission.py").write_text(GREEDY)
    assert public_agent.main(["level9", "--agent", str(tmp_path)]) == 2
    assert "level9 is neither the directory of a run nor one of random, level1" in capsys.readouterr().err
    assert public_agent.main(["pretrained:snake", "--agent", str(tmp_path)]) == 2
    assert "unknown pretrained policy 'snake': did you mean 'snakes'?" in capsys.readouterr().err
    assert public_agent.main(["pretrained:reach", "--agent", str(tmp_path)]) == 2
    assert "pretrained:reach was trained on 'reach', which has no other team" in capsys.readouterr().err
    assert public_agent.main(["level2", "--agent", str(tmp_path / "none.py")]) == 2
    assert "none.py does not exist" in capsys.readouterr().err
