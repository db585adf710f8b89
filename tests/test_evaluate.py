"""The verb `evaluate`: its numbers against plain NumPy, equal starts for all policies, its file and its errors."""

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.coverage import sequential_masks
from helpers.tiny import PointMass
from scipy.stats import t as student

from envs_jax.base import Box, Discrete, EnvSpec, make
from envs_jax.coverage.actions import boundary_mask
from jaxrl.cli import evaluate, train
from jaxrl.evaluation import league, policies, records, reports, statistics
from jaxrl.evaluation import tables as evaluation_tables
from jaxrl.evaluation.policies import PolicySet, load
from jaxrl.runtime import rollouts
from jaxrl.runtime.rollouts import held_out_key, uniform
from jaxrl.runtime.trainer import make_env_key


def corridor(**settings) -> PolicySet:
    return load(None, "helpers.tiny:Corridor", {"num_agents": 1, "length": 4, "horizon": 6, **settings})


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A run of the tiny algorithm on the corridor, a few updates long."""
    root = tmp_path_factory.mktemp("runs")
    flags = "--algo helpers.tiny:TinyQ --env helpers.tiny:Corridor --num_envs 8 --num_agents 2 --horizon 6"
    flags += " --total_env_steps 256"
    assert train.main([*flags.split(), "--devices", "1", "--runs", str(root)]) == 0
    return Path((root / "latest").read_text().strip())


def test_numbers_equal_a_walk_by_hand():
    """ "right" walks straight to the end: everything follows from where the held-out episodes start."""
    evaluated, episodes, seed = corridor(), 12, 5
    ((_, curves),) = reports.rollout(evaluated, ["right"], episodes, seed)
    env, key = evaluated.env.env, held_out_key(seed, "evaluation")
    start = jax.jit(lambda i: env.reset(jax.random.fold_in(make_env_key(key, i), np.uint32(0)), ())[0].position[0])
    starts = [int(start(np.int32(i))) for i in range(episodes)]
    need = 4 - np.array(starts)  # steps to the end
    assert len(set(need)) > 1
    step = np.arange(7)[:, None]
    np.testing.assert_array_equal(curves["length"], np.minimum(step, need))
    np.testing.assert_array_equal(curves["return"], step >= need)
    np.testing.assert_array_equal(curves["reached"], step >= need)
    report = reports.evaluate(evaluated, ["right"], episodes, seed)
    summary = report["policies"]["right"]["reached"]
    values = (step >= need).astype(float)
    np.testing.assert_allclose(summary["mean"], values.mean(1), rtol=1e-6)
    np.testing.assert_allclose(summary["std"], values.std(1, ddof=1), rtol=1e-6)
    for low, high, mean in zip(summary["low"], summary["high"], values.mean(1), strict=True):  # the ends of Wilson's
        for end in {low, high} - {mean}:  # the end of a share of 0 or 1 is the share itself
            assert abs(end - mean) == pytest.approx(1.959964 * np.sqrt(end * (1 - end) / episodes), abs=1e-6)
    for metric in ("length", "return"):  # no shares, whatever their values are
        estimate = report["policies"]["right"][metric]
        half = student.ppf(0.975, episodes - 1) * curves[metric].std(1, ddof=1) / np.sqrt(episodes)
        np.testing.assert_allclose([x or 0 for x in estimate["ci95"]], half, rtol=1e-6, atol=1e-9)
        assert estimate["ci95"][0] is None and "low" not in estimate  # all episodes begin with 0


@dataclasses.dataclass(frozen=True)
class Still(PointMass):
    """Points of which a policy moves none."""

    baselines: ClassVar = {"still": lambda env, state, timestep, key: jnp.zeros((env.num_agents, env.dimensions))}


def test_all_policies_start_alike_and_differ_later():
    evaluated = load(None, "test_evaluate:Still", dataclasses.asdict(Still()))
    compiled = evaluated.evaluator(["random", "still"], 6).curves()  # for two seeds

    def play(policy: int, seed: int) -> np.ndarray:
        curves = compiled(evaluated.parameters(policy), held_out_key(seed, "evaluation"), evaluated.context)
        return np.asarray(curves["distance"])

    random, still = play(0, 1), play(1, 1)
    assert len(set(still[0])) == 6
    np.testing.assert_array_equal(random[0], still[0])
    assert not np.isin(random[-1], still[-1]).any()
    assert not np.isin(play(0, 2)[0], random[0]).any()


def test_chunks_and_devices_change_nothing(monkeypatch):
    evaluated = corridor(num_agents=2)
    whole = dict(reports.rollout(evaluated, ["random", "right"], 7, seed=0))
    monkeypatch.setattr(jax, "local_device_count", lambda: 3)
    parts = dict(reports.rollout(evaluated, ["random", "right"], 7, seed=0, chunk=2))
    for name, curves in whole.items():
        for metric, curve in curves.items():
            assert curve.shape == (7, 7)
            np.testing.assert_array_equal(parts[name][metric], curve)


@pytest.mark.parametrize(
    "env", [{"horizon": 6}, pytest.param({"env": "helpers.tiny:PointMass", "horizon": 7}, marks=pytest.mark.slow)]
)
def test_pieces_of_time_change_nothing(env: dict, monkeypatch) -> None:
    """Horizons that are no multiple of a piece, with episodes that end early, and with fixed ones."""
    settings = {"num_agents": 1, "length": 4} if "env" not in env else {}
    settings |= {name: value for name, value in env.items() if name != "env"}
    evaluated = load(None, env.get("env", "helpers.tiny:Corridor"), settings)
    whole = dict(reports.rollout(evaluated, ["random"], 5, seed=0, chunk=2))["random"]
    (first, *_), played = records.record(evaluated, "random", 1, seed=0).actions, evaluated.evaluator(["random"], 5)
    ended = played.jit_final_values()(evaluated.parameters(0), held_out_key(0, "evaluation"), evaluated.context)
    monkeypatch.setattr(rollouts, "STEPS", 4)
    monkeypatch.setattr(rollouts, "_STEPS_PER_CHECK", 4)
    pieces = dict(reports.rollout(evaluated, ["random"], 5, seed=0))["random"]
    for metric, curve in whole.items():
        assert len(curve) == env["horizon"] + 1
        np.testing.assert_allclose(rollouts.extend(pieces[metric], len(curve)), curve, rtol=1e-6)
        np.testing.assert_allclose(ended[metric], curve[-1], rtol=1e-6)
    again = records.record(evaluated, "random", 1, seed=0)
    assert len(again.actions) == whole["length"][-1, 1] and np.array_equal(again.actions[0], first)
    np.testing.assert_allclose(again.curves["return"], whole["return"][: len(again.actions) + 1, 1], rtol=1e-6)


def test_a_limit_of_a_billion_steps_costs_what_is_played() -> None:
    """All episodes end within a few dozen steps."""
    short, long = corridor(horizon=900), corridor(horizon=10**9)
    expected, actual = (reports.evaluate(evaluated, ["right", "random"], 6) for evaluated in (short, long))
    assert (actual["steps"], expected["steps"]) == (1000, 900) and actual["at"] == [333, 667, 1000]
    for name, metrics in expected["policies"].items():
        for metric, curve in metrics.items():
            assert len(actual["policies"][name][metric]["mean"]) == 1001
            assert actual["policies"][name][metric]["mean"][:901] == curve["mean"]
    assert actual["differences"] == expected["differences"]
    evaluator = long.evaluator(["right"], 6)
    ended = evaluator.jit_final_values()(long.parameters(0), held_out_key(0, "evaluation"), long.context)
    assert np.mean(ended["length"]) == pytest.approx(expected["policies"]["right"]["length"]["mean"][-1])
    assert len(records.record(long, "right", 0, seed=0).actions) == ended["length"][0]


def _report(mode: str, share: bool = False, **scores: np.ndarray) -> dict:
    """A report of these scores at the end of the same episodes."""
    policies = {
        name: {"score": statistics.summarise(np.stack([0 * values, values]), share)} for name, values in scores.items()
    }
    spec = EnvSpec("known", 1, Box((1,)), Discrete(2), 1, score="score", shares=("score",) * share)
    head = {"score": "score", "score_mode": mode, "episodes": len(next(iter(scores.values())))}
    return head | {"policies": policies, "differences": list(reports.compare(spec, scores))}


START = np.linspace(-0.9, 0.9, 50)  # of the episodes: policies differ little compared with the starts
NOISE = 0.1 * np.tile([1, -1], 25)  # 0.1 * 1.010 standard deviations


def test_conclusion_by_hand():
    """Student's factor of 49 degrees of freedom is 2.0096: half of the interval of NOISE is 0.0287."""
    scores = {"random": START + 0.8, "learned": START + 0.6 + NOISE, "ig": START + 0.55, "bad": START + 0.9}
    assert evaluation_tables.conclusion(_report("min", **scores)) == [
        "At the end, by score (the smaller, the better):",
        "On the same episodes greedy is better than random by 0.200 [0.171, 0.229]; bad by 0.300 [0.271, 0.329].",
        "On the same episodes greedy is worse than ig by 0.0500 [0.0213, 0.0787].",
    ]
    lines = evaluation_tables.conclusion(_report("max", **scores))
    assert lines[0] == "At the end, by score (the larger, the better):"
    assert lines[1] == "On the same episodes greedy is better than ig by 0.0500 [0.0213, 0.0787]."
    assert "greedy is worse than random by 0.200 [0.171, 0.229]; bad" in lines[2]
    tied = _report("min", random=START, learned=START + 0.02 + NOISE)
    assert evaluation_tables.conclusion(tied)[1:] == [
        "On the same episodes greedy is not shown to differ from random (difference 0.0200 [-0.0087, 0.0487]). More "
        "episodes may show more."
    ]
    assert evaluation_tables.conclusion(_report("min", random=START, ig=START)) == []
    assert evaluation_tables.conclusion(_report("min", random=START * np.nan, learned=START)) == []
    drawn = evaluation_tables.conclusion(_report("max", learned=START, sampled=START + 0.1 + NOISE))
    assert drawn[1] == "On the same episodes greedy is worse than sampled by 0.100 [0.071, 0.129]."


def test_one_lucky_episode_is_not_better():
    for episodes, wins in ((1, 1), (5, 1), (5, 5), (20, 4)):
        report = _report("max", True, random=np.zeros(episodes), learned=(np.arange(episodes) < wins) * 1.0)
        lines = evaluation_tables.conclusion(report)
        assert "greedy is not shown to differ from random" in lines[1], lines
        assert ("6 episodes are the fewest that can." in lines[1]) == (episodes < 6)
    lines = evaluation_tables.conclusion(_report("max", True, random=np.zeros(6), learned=np.ones(6)))
    assert "is better than random" in lines[1]


def test_a_metric_says_what_it_is():
    snakes, reach, coverage = (make(name).spec for name in ("snakes_3v3", "reach", "coverage"))
    assert [name for name in snakes.metrics if snakes.is_share(name)] == ["win", "draw", "defeat"]
    assert [name for name in reach.metrics if reach.is_share(name)] == ["success", "success_at_end"]
    assert not any(map(coverage.is_share, [*coverage.metrics, "return", "length"]))
    assert reach.is_share("success/reach") and not reach.is_share("distance/reach")
    assert not make("snakes_5p").spec.shares  # without a second team nobody wins


def test_a_count_that_is_0_or_1_by_chance_is_no_share(monkeypatch):
    """All metrics are 0 or 1 in all episodes; only "reached" is declared as a share."""
    curve = np.repeat(np.arange(7)[:, None] > 3, 8, axis=1).astype(np.float32)
    rolled = [(name, {"return": curve, "reached": curve, "length": curve}) for name in ("a", "b")]
    monkeypatch.setattr(reports, "rollout", lambda *arguments: iter(rolled))
    for summaries in reports.evaluate(corridor(), ["a", "b"], 8)["policies"].values():
        assert [name for name, summary in summaries.items() if "low" in summary] == ["reached"]
    games = {"win": np.ones(8), "draw": np.zeros(8), "deaths": np.tile([0.0, 1.0], 4)}
    (summaries,) = league.summarise_matches([("a", "b", games)], make("snakes_3v3").spec, list(games))
    assert [name for name, summary in summaries.items() if "low" in summary] == ["win", "draw", "points"]


def test_table_and_file_hold_the_same_numbers(tmp_path, capsys):
    path = tmp_path / "numbers.json"
    settings = ["--env", "helpers.tiny:Corridor", "--length", "3", "--horizon=6"]
    assert evaluate.main([*settings, "--episodes", "9", "--seed", "3", "--json", str(path)]) == 0
    out, err = capsys.readouterr()
    report = json.loads(path.read_text())
    assert report["env_settings"] == {"num_agents": 1, "length": 3, "horizon": 6}
    assert (report["episodes"], report["seed"], report["at"], report["run"]) == (9, 3, [2, 4, 6], None)
    assert list(report["policies"]) == ["random", "right"]
    again = reports.evaluate(corridor(length=3), ["random", "right"], 9, 3)
    assert json.loads(json.dumps(again)) == report
    mean = report["policies"]["random"]["return"]["mean"]
    rows = out.splitlines()
    line = rows[rows.index("return") + 1]  # of "random", the first policy
    printed = [float(word) for word in line.split()[1::3]]  # each before its interval and deviation
    assert line.startswith("random") and len(printed) == 3
    np.testing.assert_allclose(printed, [mean[k] for k in (2, 4, 6)], atol=6e-3)
    assert "random: 9 episodes" in err and all(line == line.rstrip() for line in out.splitlines())


def test_random_of_any_environment_obeys_the_masks():
    env = make("coverage", q=2, budget=2, num_agents=4)

    @jax.jit
    def draw(key, keys):
        positions = env._draw_mission(key).positions
        mask = boundary_mask(positions, 6)
        timestep = SimpleNamespace(mask_state=positions, action_mask=mask)
        chosen = jax.vmap(lambda key: uniform(env, None, timestep, key))(keys)
        return chosen, jax.vmap(lambda c: sequential_masks(positions, mask, c, 6))(chosen), mask

    chosen, allowed, mask = draw(jax.random.key(3), jax.random.split(jax.random.key(0), 200))
    assert np.all(np.take_along_axis(np.asarray(allowed), np.asarray(chosen)[..., None], -1))
    open_ = np.asarray(mask[0])
    counts = np.bincount(np.asarray(chosen)[:, 0], minlength=6)
    expected = 200 / open_.sum()
    assert np.all((counts > 0) == open_) and np.all(abs(counts[open_] - expected) < 5 * np.sqrt(expected))


# With a run


def test_a_run_beside_every_baseline(run, capsys):
    assert evaluate.main([str(run), "--episodes", "6"]) == 0
    report = json.loads((run / reports.FILE).read_text())
    assert list(report["policies"]) == ["learned", "sampled", "random", "right"]
    assert (
        report["algo"] == "helpers.tiny:TinyQ" and report["settings"]["batch_size"] == 32 and report["checkpoint"] > 0
    )
    assert report["versions"]["jax"] == jax.__version__
    out = capsys.readouterr().out
    assert f"run {'/'.join(run.parts[-2:])}" in out and str(run.parent.parent) not in json.dumps(report["run"])
    assert "At the end, by return (the larger, the better):" in out and "learned" not in out
    assert [entry["second"] for entry in report["differences"]] == ["sampled", "random", "right"]
    starts = [result["reached"]["mean"][0] for result in report["policies"].values()]
    assert len(set(starts)) == 1


def test_a_policy_moves_to_settings_that_fit(run):
    settings = {"num_agents": 2, "length": 4, "horizon": 9}
    moved = load(run, "helpers.tiny:Corridor", settings)
    ((_, curves),) = reports.rollout(moved, ["learned"], 4, 0)
    assert curves["return"].shape == (10, 4)
    with pytest.raises(policies.UsageError, match="does not match length 7"):
        load(run, "helpers.tiny:Corridor", {**settings, "horizon": 6, "length": 7})
