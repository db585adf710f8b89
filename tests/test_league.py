"""Games between policies: results against games played by hand, ratings against formulas, and what is refused."""

import dataclasses
import json
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from envs_jax.base import make
from envs_jax.batch import batched
from jaxrl.algos.ddpg import Ddpg
from jaxrl.cli import evaluate, train
from jaxrl.evaluation import league, reports, tables
from jaxrl.evaluation.policies import PolicySet, announce, load
from jaxrl.evaluation.statistics import estimate_difference
from jaxrl.rl.data_parallel import DataParallel
from jaxrl.runtime import config as configuration
from jaxrl.runtime.rollouts import held_out_key
from jaxrl.runtime.trainer import make_env_keys

STEPS = 8
STUDENT_OF_3 = 3.1824463  # quantile of three degrees of freedom, 97.5 %
TINY = {"algo": "ddpg", "env": "snakes_1v1", "max_steps": STEPS, "hidden_size": 8, "depth": 1, "num_envs": 8,
        "batch_size": 8, "buffer_size": 256, "learning_starts": 8, "total_env_steps": 128}  # fmt: skip


def make_eval_policy(seed: int, **settings) -> PolicySet:
    """A run as it would be read from disk: an untrained policy that nearly always takes its best action."""
    config = configuration.build({**TINY, **settings}, "the test")
    env = batched(config.make_env())
    algo = Ddpg(env.spec, DataParallel(8), **config.algo_settings)
    params = jax.jit(lambda key: algo.policy(algo.init(key, None)))(jax.random.key(seed))
    params = jax.tree.map(lambda x: 30.0 * x, params)
    return PolicySet(env, config.env, config.env_settings, Path(f"runs/ddpg/{seed}"), config, algo, params, step=seed)


@pytest.fixture(scope="module")
def two() -> list[PolicySet]:
    """Two runs with other observations, rewards and opponents."""
    return [make_eval_policy(1), make_eval_policy(2, observation="obs_full", reward="score", opponent="0:1,2:3")]


# Ratings


def test_two_players_by_hand():
    """70 wins, 10 draws and 20 losses, and the game that each pair is given: 75.5 points of 101."""
    wins, draws = np.array([[0, 70], [20, 0]]), np.array([[0, 10], [10, 0]])
    rating, half = league.elo(wins, draws, 1, 1000.0)
    share = 75.5 / 101
    variance = (70.5 + 10 / 4) / 101 - share**2
    slope = 400 / math.log(10) / (share * (1 - share))  # of 400 log10(p / (1 - p))
    np.testing.assert_allclose(rating, [1000 + 400 * math.log10(share / (1 - share)), 1000])
    np.testing.assert_allclose(half, [1.96 * slope * math.sqrt(variance / 101), 0])


def test_ratings_reproduce_the_odds_that_made_the_games():
    true = np.array([1000.0, 1130.0, 610.0, 1700.0])
    expected = 1 / (1 + 10 ** ((true[None] - true[:, None]) / 400))
    np.fill_diagonal(expected, 0)
    for drawn in (0.0, 0.4):  # draws are half a point: the ratings do not see them
        draws = 1e9 * drawn * np.minimum(expected, expected.T)
        rating, half = league.elo(1e9 * expected - draws / 2, draws, 0, 1000.0)
        np.testing.assert_allclose(rating, true, atol=1e-3)
        assert half[0] == 0 and np.all(half[1:] < 0.1)


def test_intervals_hold_the_truth_as_often_as_they_say():
    true, random = np.array([0.0, 100.0, 250.0, -300.0]), np.random.default_rng(0)
    inside = []
    for _ in range(300):
        wins, draws = np.zeros((2, 4, 4))
        for i in range(4):
            for j in range(i):
                p = 1 / (1 + 10 ** ((true[j] - true[i]) / 400))
                d = 0.5 * min(p, 1 - p)
                wins[i, j], wins[j, i], draws[i, j] = random.multinomial(400, [p - d / 2, 1 - p - d / 2, d])
                draws[j, i] = draws[i, j]
        rating, half = league.elo(wins, draws, 0, 0.0)
        inside.append(abs(rating - true)[1:] <= half[1:])
    assert 0.92 < np.mean(inside) < 0.98


def test_who_wins_everything_has_a_finite_rating():
    rating, half = league.elo(np.triu(np.full((5, 5), 1000.0), 1), np.zeros((5, 5)), 2, 1000.0)
    assert np.isfinite(rating).all() and np.isfinite(half).all() and np.all(np.diff(rating) < -500)
    np.testing.assert_allclose(rating[0] - 1000, 1000 - rating[4])


# Games


def by_hand(first: PolicySet, second: PolicySet, games: int, seed: int) -> dict[str, np.ndarray]:
    """Both teams' best actions, each from its own observation, in an environment that takes the actions of both."""
    common = {"max_steps": STEPS, "opponent": "outside", "side": "both"}
    envs = [make("snakes_1v1", **common, observation=s.settings["observation"]) for s in (first, second)]
    batches = [batched(env) for env in envs]
    context = envs[0].context(type("Progress", (), {"fraction": jnp.float32(1)}))
    keys = make_env_keys(held_out_key(seed, "evaluation"), jnp.arange(games))
    states, steps = zip(*(jax.jit(batch.reset)(keys, context) for batch in batches), strict=True)
    plays = [jax.jit(batch.step_without_reset) for batch in batches]
    for _ in range(STEPS):
        actions = []
        for k, one in enumerate((first, second)):
            observation = steps[k].observation[:, k : k + 1]  # agent 0 is the first team, agent 1 the second
            actions.append(jnp.argmax(one.algo.outputs("actor", one.params, observation), -1).astype(jnp.int32))
        action = jnp.concatenate(actions, 1)
        states, steps = zip(*(p(s, action, context) for p, s in zip(plays, states, strict=True)), strict=True)
    return {name: np.asarray(value) for name, value in steps[0].metrics.items()}


@pytest.mark.slow
def test_runs_meet_each_with_its_own_eyes(two):
    ranking = league.league(two, ["random", "level2"])
    assert ranking.players == ("ddpg/1", "ddpg/2", "random", "level2")
    played = {(first, second): ended for first, second, ended in ranking.play(40, seed=3, chunk=20)}
    pairs = [("ddpg/1", "ddpg/2"), ("ddpg/1", "random"), ("ddpg/1", "level2"), ("random", "level2"),
             ("ddpg/2", "random"), ("ddpg/2", "level2")]  # fmt: skip
    assert list(played) == pairs
    expected = by_hand(*two, 40, 3)
    for name in ("score", "opponent_score", "score_difference", "win", "draw", "defeat"):
        np.testing.assert_array_equal(played["ddpg/1", "ddpg/2"][name], expected[name], err_msg=name)
    assert len(np.unique(expected["score_difference"])) > 1
    turned = by_hand(two[1], two[0], 40, 3)
    assert not np.array_equal(turned["score_difference"], -expected["score_difference"])  # sides are not symmetric


def test_each_scripted_player_is_the_level_of_its_name():
    evaluated = load(None, "snakes_1v1", dataclasses.asdict(make("snakes_1v1", max_steps=STEPS)))
    opponents = league.apply_match_settings(evaluated).env.env.match_rules.opponents
    levels = {"random": "0", **{f"level{k}": str(k) for k in range(1, 5)}}
    levels |= {"evasion": "evasion", "territory": "territory", "sharing": "sharing"}
    assert list(opponents) == list(levels)
    for name, context in opponents.items():
        np.testing.assert_array_equal(context, evaluated.with_env_settings({"opponent": levels[name]}).context)
    assert list(evaluated.with_env_settings({"opponent": "0:1,3:2"}).env.env.match_rules.opponents) == [
        "random",
        "level3",
    ]


@pytest.mark.slow
def test_a_scripted_player_plays_as_it_does_alone():
    alone = load(None, "snakes_1v1", dataclasses.asdict(make("snakes_1v1", max_steps=STEPS, side="both")))
    among = alone.with_env_settings({"opponent": "0,3"})
    ((_, curves),) = reports.rollout(alone.with_env_settings({"opponent": "3"}), ["level2"], 30, seed=1)
    ((_, _, ended),) = league.play(among, [("level2", "level3")], {}, 30, seed=1, chunk=15)
    for name, values in ended.items():
        np.testing.assert_array_equal(values, curves[name][-1], err_msg=name)


@pytest.mark.slow
def test_matches_of_several_seeds():
    """Means over the games of each seed, and Student's interval; scripted players have no seeds."""
    first, second = make_eval_policy(1, opponent="1,2"), make_eval_policy(3, opponent="1,2")
    both = dataclasses.replace(first, seed_params=(first.params, second.params))
    names = ["learned", "level1"]
    alone = [{name: reports.play_matches(one, [name], 16)["matches"] for name in names} for one in (first, second)]
    result = reports.play_matches(both, names, 16)
    assert result["seeds"] == 2
    for name in names:
        for index, match in enumerate(m for m in result["matches"] if m["first"] == name):
            singles = [matches[name][index] for matches in alone]
            if name == "level1":
                assert match == singles[0]
                continue
            for metric in ("score_difference", "return"):
                means = np.array([single[metric]["mean"] for single in singles])
                assert match[metric]["mean"] == pytest.approx(means.mean(), rel=1e-6, abs=1e-6)
                half = 12.7062047 * means.std(ddof=1) / 2**0.5  # one degree of freedom, 97.5 %
                assert match[metric]["ci95"] == pytest.approx(half, rel=1e-4, abs=1e-6)


# What is refused


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"width": 9}, "one was trained with width 9, the other with width 8"),
        ({"max_steps": STEPS + 1}, "max_steps 9, the other with max_steps 8"),
        ({"env": "snakes_3v3"}, "snakes 6"),
        ({"env": "snakes_2p"}, "was trained on 'snakes_2p', which does not have two teams"),
    ],
)
def test_runs_of_other_games_do_not_meet(two, changes, words):
    with pytest.raises(league.UsageError, match=words):
        league.league([two[0], make_eval_policy(3, **changes)])


def test_players_of_a_league(two):
    with pytest.raises(league.UsageError, match="runs/ddpg/1 is named twice"):
        league.league([two[0], two[1], two[0]])
    with pytest.raises(league.UsageError, match="unknown player 'level22': did you mean 'level2'"):
        league.league(two, ["level22"])
    with pytest.raises(league.UsageError, match="cannot play each other with --opponent 2"):
        league.league([dataclasses.replace(two[0], named_settings=frozenset(["opponent"])), two[1]])
    assert league.league(two, ["random"]).anchor == "ddpg/1" and league.league(two).anchor == "level2"
    elsewhere = dataclasses.replace(two[0], run=Path("other/ddpg/2"))
    assert league.league([two[1], elsewhere], []).players == ("runs/ddpg/2", "other/ddpg/2")


def test_an_opponent_from_outside_must_be_there(two):
    with pytest.raises(league.UsageError, match=r"there is no player for the other team: .* --opponent 0,1,2"):
        two[0].with_env_settings({"opponent": "self"}).evaluator(["learned"], 2)


class GreedyOnly(Ddpg):
    """An algorithm that cannot sample, such as DQN."""

    modes = ("greedy",)


def test_a_policy_that_cannot_sample_is_not_evaluated_so():
    run = make_eval_policy(0)
    assert league.default_policies(run)[:2] == ["sampled", "learned"]
    settings = run.config.algo_settings
    greedy_only = dataclasses.replace(run, algo=GreedyOnly(run.env.spec, DataParallel(8), **settings))
    names = league.default_policies(greedy_only)
    assert names[0] == "learned" and "sampled" not in names
    greedy_only.check_policies(names)


@pytest.mark.parametrize(
    ("argv", "code", "words"),
    [
        (["--env", "snakes_1v1", "--against", "runs"], 2, "name the run first"),
        (["--env", "snakes_1v1", "--policy", "level5"], 2, "did you mean 'level4'"),
        (["--against"], 2, "--against needs a value"),
        (["{run}"], 1, "there is no checkpoint in"),
    ],
)
def test_errors_are_one_sentence(tmp_path, argv, code, words, capsys):
    (tmp_path / "config.yaml").write_text(configuration.build(TINY, "the test").to_yaml())
    assert evaluate.main([word.format(run=tmp_path) for word in argv]) == code
    out, err = capsys.readouterr()
    assert words in err and err.startswith("error: ") and err.count("\n") == 1 and not out


# Words


def test_verdicts_go_by_the_interval():
    spread = np.tile([1.0, -1.0], 5)
    means = {("sampled", "random"): 2, ("sampled", "level1"): -0.4, ("sampled", "level2"): -3, ("random", "level2"): -9}
    scores = {pair: mean + spread for pair, mean in means.items()}
    pairs = [{"first": first, "second": second} for first, second in scores]
    margins = [pair | estimate_difference(score) for pair, score in zip(pairs, scores.values(), strict=True)]
    report = {"matches": pairs, "margins": margins, "score": "score_difference", "score_mode": "max"}
    (sentence,) = tables.verdict(report)
    assert sentence == ("By the 95 % interval of its score difference, sampled beats random; loses to level2; "
                        "is not shown to beat or lose to level1.")  # fmt: skip
    assert "beats level2; loses to random" in tables.verdict(report | {"score_mode": "min"})[0]


def test_draws_count_for_both_sides(two):
    """100 games of each pair; points by hand, and ratings of the same games whoever is named first."""
    meeting = league.League({"a": two[0]}, ("random", "level1"))
    games = {("a", "random"): (50, 40, 10), ("a", "level1"): (0, 90, 10), ("random", "level1"): (20, 20, 60)}

    def rate(turned: bool) -> dict:
        matches = []
        for (first, second), (win, draw, loss) in games.items():
            if turned:
                first, second, win, loss = second, first, loss, win
            shares = zip(tables.OUTCOMES, (win, draw, loss), strict=True)
            matches.append({"first": first, "second": second} | {name: {"mean": n / 100} for name, n in shares})
        return meeting.ratings(matches, 100)

    points = {name: row["points"] for name, row in rate(False).items()}
    assert points == pytest.approx({"a": (70 + 45) / 200, "random": (30 + 30) / 200, "level1": (55 + 70) / 200})
    for name, row in rate(True).items():
        assert row == pytest.approx(rate(False)[name])


def test_results_by_hand():
    ended = {"score_difference": np.array([3.0, -1.0, 0.0, 2.0]), "win": np.array([1.0, 0, 0, 1])}
    ended["draw"] = np.array([0.0, 0, 1, 0])
    said: list[str] = []
    played = announce([("a", "b", ended)], "4 games", said.append)
    (result,) = league.summarise_matches(played, make("snakes_3v3").spec, ["score_difference", "win"])
    assert (result["first"], result["second"], result["win"]["mean"]) == ("a", "b", 0.5)
    deviation = math.sqrt((4 + 4 + 1 + 1) / 3)
    assert result["score_difference"] == pytest.approx(
        {"mean": 1.0, "std": deviation, "ci95": STUDENT_OF_3 * deviation / 2, "error": deviation / 2}
    )
    deviation = math.sqrt(0.6875 / 3)  # of 1, 0, 0.5 and 1
    assert result["points"] == pytest.approx(
        {
            "mean": 0.625,
            "std": deviation,
            "ci95": STUDENT_OF_3 * deviation / 2,
            "error": deviation / 2,
            "low": 0,
            "high": 1,
        }
    )  # Student's interval ends at -0.14 and 1.39
    assert said[1].startswith("a against b: 4 games in")


def test_drawn_games_have_points_with_a_width():
    """Of twelve drawn games the margin is 0, with Bonett and Price's interval; half of it is that of the points."""
    points = league.estimate_points(np.zeros(12), np.ones(12))
    half = 1.959964 * math.sqrt((2 / 14) / 14)
    assert (points["mean"], points["low"], points["high"]) == pytest.approx((0.5, 0.5 - half / 2, 0.5 + half / 2))
    assert points["ci95"] == pytest.approx(half / 2)
    assert league.estimate_points(np.zeros(2), np.ones(2))["ci95"] is None
    won = league.estimate_points(np.ones((2, 6)), np.zeros((2, 6)))
    assert (won["low"], won["high"]) == pytest.approx((1 / (1 + 1.959964**2 / 12), 1.0))  # Wilson's, of 12 of 12
    rng, covered = np.random.default_rng(0), 0
    for _ in range(400):
        played = rng.random(10)
        points = league.estimate_points((played < 0.05) * 1.0, (played > 0.15) * 1.0)  # 0.05 wins, 0.1 defeats
        covered += (points["low"] or 0) <= 0.475 <= (points["high"] or 1)
    assert covered / 400 > 0.95


@pytest.mark.parametrize("games", [6, 20])
def test_ratings_of_few_games(games):
    """Also where most games are drawn, or one player wins nearly all."""
    rng, inside = np.random.default_rng(0), []
    for best, drawn in ((0.5, 0.8), (0.5, 0.0), (0.8, 0.1), (0.95, 0.02)):
        true = league.ELO * math.log(best / (1 - best))
        for _ in range(200):
            wins, draws = np.zeros((2, 2, 2))
            counts = rng.multinomial(games, [best - drawn / 2, 1 - best - drawn / 2, drawn])
            wins[1, 0], wins[0, 1], draws[0, 1] = counts
            rating, half = league.elo(wins, draws + draws.T, 0, 0.0)
            inside.append(abs(rating[1] - true) <= half[1])
    assert np.reshape(inside, (4, -1)).mean(1).min() > 0.88


# The verb, with runs


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> list[Path]:
    """Two short runs on the small board, the second with other observations and rewards."""
    root, directories = tmp_path_factory.mktemp("runs"), []
    flags = [f"--{name}={value}" for name, value in TINY.items()]
    for more in ([], ["--observation=obs_full", "--reward=score"]):
        assert train.main([*flags, *more, "--runs", str(root)]) == 0
        directories.append(Path((root / "latest").read_text().strip()))
    return directories


@pytest.mark.slow
def test_a_run_against_every_scripted_player(runs, capsys):
    assert evaluate.main([str(runs[0]), "--episodes", "20"]) == 0
    out, _ = capsys.readouterr()
    report = json.loads((runs[0] / reports.FILE).read_text())
    first = list(dict.fromkeys(match["first"] for match in report["matches"]))
    assert first == ["sampled", "learned", "random", "level2"] and len(report["matches"]) == 4 * 7
    assert report["env_settings"]["side"] == "both" and report["settings"]["side"] == "first"
    match = report["matches"][0]
    rows = out.splitlines()
    row = rows[rows.index("sampled") + 1]
    assert row.startswith("score difference, points")
    assert f"{match['score_difference']['mean']:.2f} ±{match['score_difference']['ci95']:.2f}" in row
    row = next(line for line in rows if line.startswith("games won"))
    assert f"{100 * match['win']['mean']:.1f} [{100 * match['win']['low']:.1f}, " in row
    assert sum(match[name]["mean"] for name in tables.OUTCOMES) == pytest.approx(1)
    assert "By the 95 % interval of its score difference, sampled" in out and f"wrote {runs[0]}" in out


@pytest.mark.slow
def test_a_league_of_two_runs(runs, tmp_path, capsys):
    path = tmp_path / "league.json"
    assert evaluate.main([str(runs[0]), "--against", str(runs[1]), "--episodes", "12", "--out", str(path)]) == 0
    out, _ = capsys.readouterr()
    report = json.loads(path.read_text())
    assert len(report["ratings"]) == 9 and len(report["matches"]) == 9 * 8 // 2
    assert report["ratings"]["level2"]["elo"] == 1000 and report["anchor"] == "level2"
    assert sum(row["points"] for row in report["ratings"].values()) == pytest.approx(9 / 2)
    best = next(iter(report["ratings"]))
    assert any(line.startswith(best) for line in out.splitlines()) and "fixed" in out
    drawn = {match["second"]: match for match in report["matches"]}
    assert set(report["actions"].values()) == {"sampled"}
    argv = [str(runs[0]), "--against", str(runs[1]), "--episodes", "12", "--policy", "level2", "--greedy"]
    assert evaluate.main([*argv, "--out", str(path)]) == 0
    report = json.loads(path.read_text())
    assert set(report["actions"].values()) == {"greedy"}
    assert any(match["score"] != drawn[match["second"]]["score"] for match in report["matches"])  # other games
    capsys.readouterr()
    assert evaluate.main([str(runs[0]), "--greedy"]) == 2
    assert "--greedy works only with --against" in capsys.readouterr().err
    assert evaluate.main([str(runs[0]), "--against", str(runs[0])]) == 2
    assert "is named twice" in capsys.readouterr().err
