"""Metrics from `info` of environments on the host (issue 54): values by hand, tables, refusals."""

import itertools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import plan
from helpers.plan import AGENTS, Plan, Row

import envs_jax
from jaxrl.cli import evaluate, train

gymnasium: Any = pytest.importorskip("gymnasium", reason="gymnasium is not installed (extra 'gymnasium')")
pytest.importorskip("pettingzoo")
spaces: Any = gymnasium.spaces
pytestmark = [pytest.mark.needs("gymnasium", "pettingzoo"), pytest.mark.filterwarnings("ignore")]  # of the packages
counter = itertools.count()


def register(infos: list[dict[str, Any]], limit: int = 9) -> str:
    """Return the name of an environment that ends after these infos, the first of which is that of the reset."""

    class Told(gymnasium.Env):  # type: ignore[misc]
        observation_space, action_space = spaces.Box(-1, 1, (1,)), spaces.Box(-1, 1, (1,))

        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            self.t = 0
            return np.zeros(1, np.float32), infos[0]

        def step(self, action: Any) -> Any:
            self.t += 1
            return np.zeros(1, np.float32), 1.0, self.t == len(infos) - 1, False, infos[self.t]

    name = f"host/Told{next(counter)}-v0"
    gymnasium.register(name, entry_point=Told, max_episode_steps=limit)
    return f"gymnasium:{name}"


def play(name: str, steps: int, **settings: Any) -> tuple[Any, list[dict[str, float]], str | None]:
    """Return the spec, the metrics of the first copy after the reset and each step, and the failure."""
    batch = envs_jax.make(name, **settings).batched()
    state, step = batch.reset(jax.random.split(jax.random.key(0), 2))
    rows = [step.metrics]
    for _ in range(steps):
        state, step = batch.step(state, step, jnp.zeros((2, *step.reward.shape[1:], 1), jnp.float32))
        rows.append(step.metrics)
    return batch.spec, [{key: float(value[0]) for key, value in row.items()} for row in rows], batch.failure


def test_values_by_hand() -> None:
    """Of x = 5 (reset), -3, -1, -4 the reset does not count; `last` need not be there before the end."""
    infos: list[Any] = [{"x": 5}, {"x": -3}, {"x": np.float32(-1)}, {"x": np.array([-4]), "is_success": True}]
    keys = {how: f"x:{how}" for how in ("last", "sum", "mean", "min", "max")}
    expected = {"last": -4, "sum": -8, "mean": -8 / 3, "min": -4, "max": -1}
    name = register(infos)
    for how, key in keys.items():
        spec, rows, failure = play(name, 4, info_keys=f" {key}, is_success ")
        assert failure is None and dict(spec.metrics) == {"x": "last", "is_success": "last"}
        np.testing.assert_allclose(rows[3]["x"], expected[how], rtol=1e-6)
        assert rows[3]["is_success"] == 1 and rows[4]["x"] == 0  # the next episode


def test_any_is_a_share() -> None:
    name = register([{}, {"hit": 0}, {"hit": True}, {"hit": False}])
    spec, rows, failure = play(name, 3, info_keys="hit:any")
    assert failure is None and dict(spec.metrics) == {"hit": "any"} and rows[3] == {"hit": 1}
    _, rows, failure = play(register([{}, {}, {}, {"is_success": True}]), 3, info_keys="is_success:any")
    assert failure is None and rows[3] == {"is_success": 1}
    _, _, failure = play(register([{}, {"hit": 3}]), 1, info_keys="hit:any")
    assert "(info['hit'] is 3): name it without ':any', or return 0 or 1" in str(failure)


@pytest.mark.slow
def test_evaluation_and_training_show_them(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    name = register([{}, {"x": 1}, {"x": 2, "x/y z": 0.25}])
    flags = ["--env", name, "--info_keys", "x:sum,x/y z"]
    assert evaluate.main([*flags, "--episodes", "3", "--policy", "random", "--out", "scores.json"]) == 0
    table = capsys.readouterr().out
    assert "x y z" in table and "3.00" in table and "0.25" in table
    words = "--algo ppo --num_envs 2 --hidden_size 4 --rollout_steps 16 --num_minibatches 2 --total_env_steps 64"
    assert train.main([*words.split(), *flags, "--eval_every", "32", "--eval_episodes", "4", "--memory_gb", "8"]) == 0
    run = Path((tmp_path / "runs" / "latest").read_text().strip())
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for kind in ("rollout", "eval"):
        assert {row[f"{kind}/x"] for row in rows if f"{kind}/x" in row} == {3.0}
        assert {row[f"{kind}/x_y z"] for row in rows if f"{kind}/x_y z" in row} == {0.25}


def test_the_command_of_the_page(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    """The walk of FrozenLake goes each of three ways with probability 1/3."""
    page = (Path(__file__).parents[1] / "docs/other_libraries.md").read_text()
    (line,) = (line for line in page.splitlines() if line.startswith("python") and "--info_keys" in line)
    monkeypatch.chdir(tmp_path)
    assert evaluate.main([*line.split()[3:], "--episodes", "4"]) == 0
    assert "prob" in capsys.readouterr().out and "--info_keys prob:min" in line


ABSENT = "in step {} of environment 0 (info has no '{}', which info_keys names; it {}): return it"


@pytest.mark.parametrize(
    ("infos", "keys", "sentence"),
    [
        ([{}, {"a": 1}, {"a": 1, "b": 2}], "is_success", ABSENT.format(2, "is_success", "has a, b")),
        ([{"a": 1}, {}], "a", ABSENT.format(1, "a", "is empty")),
        ([{}, {"a": 1}, {}], "a:sum", ABSENT.format(2, "a", "is empty")),
        ([{}, {}, {"a": 1}], "a:max", ABSENT.format(1, "a", "is empty")),
        ([{}, {"a": 1}, {}], "a:any", ABSENT.format(2, "a", "is empty")),
        ([{}, {"a": 10**400}], "a", "0, too large for float32)"),
        ([{}, {"a": None}], "a", "(info['a'] is None, not one number): return a number"),
        ([{}, {"a": "1"}], "a", "(info['a'] is '1', not one number)"),
        ([{}, {"a": {"r": 1}}], "a", "(info['a'] is {'r': 1}, not one number)"),
        ([{}, {"a": 1e39}], "a", "(info['a'] is 1e+39, too large for float32)"),
    ],
)
def test_what_is_missing(infos: list[dict[str, Any]], keys: str, sentence: str) -> None:
    assert sentence in str(play(register(infos), len(infos) - 1, info_keys=keys)[2])


def test_the_horizon_ends_an_episode_too() -> None:
    infos = [{}, {}, {"a": 1}, {}]
    assert play(register(infos, limit=2), 2, info_keys="a")[2] is None
    assert "in step 1 of environment 0 (info has no 'a'" in str(play(register(infos, limit=1), 1, info_keys="a")[2])


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ("x:median", "info_keys has 'x:median': choose from|info_keys has 'x:median': did you mean"),
        ("x, x:sum", "info_keys has 'x' twice: leave one of them out"),
        ("x/y, x_y", "info_keys has 'x_y' twice: leave one of them out"),
        ("length", "info_keys has 'length', which is always reported: leave it out"),
        ("return:max", "info_keys has 'return', which is always reported: leave it out"),
        (",,", "info_keys ',,' names nothing: leave it out"),
        (":max", "info_keys has ':max', which names no number: write its name before the colon"),
    ],
)
def test_refused_keys(keys: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        envs_jax.make(register([{}, {}]), info_keys=keys)


FIRST, SECOND = AGENTS


@pytest.mark.parametrize(
    ("keys", "infos", "expected"),
    [
        ("won:any", [{}, {FIRST: {"won": 0}, SECOND: {"won": 1}}], {"won": 1}),
        ("x:sum,y", [{FIRST: {"x": 1}, SECOND: {"x": 2}}, {FIRST: {"x": 7}, SECOND: {"y": 3}}], {"x": 1.5 + 7, "y": 3}),
    ],
)
def test_teams_have_the_maximum_or_the_mean_of_the_agents_that_have_the_key(
    keys: str, infos: list[Any], expected: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    infos = [{}, *infos]
    monkeypatch.setattr(Plan, "_infos", lambda self: infos[self.t])
    monkeypatch.setattr(Plan, "rows", [Row(set(AGENTS)), Row(set(AGENTS)), Row(plan.NOBODY, terminated=set(AGENTS))])
    batch = envs_jax.make("pettingzoo:helpers.plan", info_keys=keys).batched()
    state, step = batch.reset(jax.random.split(jax.random.key(0), 1))
    for _ in range(2):
        state, step = batch.step(state, step, jnp.zeros((1, 2), jnp.int32))
    assert batch.failure is None and {name: float(value[0]) for name, value in step.metrics.items()} == expected
