"""The NumPy oracle of the coverage environment against the recorded missions, and its own properties."""

import itertools
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from helpers import golden

from bench.reference.coverage import baselines, oracle, torch_learner
from bench.reference.coverage.oracle import Mission, Settings

BELIEF, OBSERVATION, REWARD, ENTROPY = 5e-5, 1e-5, 1e-5, 1e-6  # tolerances: the records are float32
SMALL = Settings(q=5)


def recorded_settings(record: golden.CoverageRecord) -> Settings:
    config = record.config
    comm_range = record["comm_range"] if "comm_range" in record else config["range"]
    return Settings(
        num_agents=record.num_agents,
        budget=config["budget"],
        q=record.q,
        num_actions=config["num_actions"],
        communication_range=float(comm_range),
        failure_rate=config.get("failure", 0.0),
    )


def replayed(record: golden.CoverageRecord) -> Mission:
    return Mission(
        recorded_settings(record),
        truth=record.truth,
        start=record["positions"][0],
        readings=record.reading,
        comm=record["comm"],
        keep_measured=True,
    )


def replay(record: golden.CoverageRecord) -> Iterator[Mission]:
    """The mission at t = 0 .. T, flown with the recorded actions."""
    mission = replayed(record)
    yield mission
    for actions in record["action"]:
        mission.step(actions)
        yield mission


# ---------------------------------------------------------------- recorded tables


@pytest.mark.parametrize("q", [57, 28, 11, 7, 6, 5])
def test_footprints_equal_the_recorded_table(q: int) -> None:
    table = golden.load("coverage_missions")[f"tab_footprint_px{q}"]
    for level, index in np.ndindex(3, 11):
        pose = (5 * index, 5 * index, oracle.ALTITUDES[level])
        full, clipped = oracle.footprint_full(pose, q), oracle.footprint(pose, q)
        assert full[:2] == full[2:] and clipped[:2] == clipped[2:]
        assert (*full[:2], *clipped[:2]) == tuple(table[level, index])


def test_resize_matrices_equal_the_recorded_ones() -> None:
    tables = {k: v for k, v in golden.load("coverage_missions").items() if k.startswith("tab_resize_")}
    assert len(tables) == 17
    for name, table in tables.items():
        matrix = oracle.area_matrix(int(name.rsplit("_", 1)[1]))
        np.testing.assert_allclose(matrix, table, atol=1e-7, rtol=0, err_msg=name)
        np.testing.assert_allclose(matrix.sum(1), 1.0, atol=1e-12)


@pytest.mark.parametrize("q", [57, 7])
def test_half_planes_equal_the_recorded_ones(q: int) -> None:
    n = oracle.map_side(q)
    table = golden.load("coverage_missions")[f"tab_truth_bounds_px{q}"]
    for side, i in np.ndindex(4, 31):
        r0, r1, c0, c1 = table[side, i]
        expected = np.zeros((n, n), dtype=bool)
        expected[r0:r1, c0:c1] = True
        np.testing.assert_array_equal(oracle.split_terrain(n, side, 30 + i), expected)


@pytest.mark.parametrize("num_actions", [4, 6, 27])
def test_masks_equal_the_recorded_ones(num_actions: int) -> None:
    arrays = golden.load("coverage_missions")
    own, others, boundary, final = (
        arrays[f"mask{num_actions}_{name}"] for name in ("own", "others", "boundary", "final")
    )
    for case in range(len(own)):
        mask = oracle.boundary_mask(own[case], num_actions)
        np.testing.assert_array_equal(mask, boundary[case])
        present = others[case][(others[case] >= 0).all(1)]
        np.testing.assert_array_equal(oracle.collision_mask(mask, own[case], present), final[case])


@pytest.mark.parametrize("case", range(4))
def test_original_targets_equal_the_recorded_ones(case: int) -> None:
    arrays = golden.load("coverage_missions")
    gamma_lambda, reward, done, q, target, returns = (
        arrays[f"td{case}_{name}"] for name in ("gamma_lambda", "reward", "done", "q", "target", "return")
    )
    got_target, got_returns = oracle.td_targets_original(reward, done, q, *gamma_lambda)
    np.testing.assert_allclose(got_target, target, atol=1e-6)
    np.testing.assert_allclose(got_returns, returns, atol=2e-6)


# ---------------------------------------------------------------- recorded missions


@pytest.mark.parametrize("name", golden.COVERAGE_MISSIONS)
def test_replay_reproduces_beliefs(name: str) -> None:
    record = golden.coverage_mission(name)

    def check(kind: str, t: int, belief: np.ndarray) -> None:
        flat = belief.reshape(*belief.shape[:-2], -1)
        if name in golden.COVERAGE_FULL_MISSIONS:
            np.testing.assert_allclose(belief, record[f"belief_{kind}"][t], atol=BELIEF, rtol=0)
        else:
            expected = record[f"belief_{kind}_probe"][t]
            np.testing.assert_allclose(flat[..., record["probe_cells"]], expected, atol=BELIEF, rtol=0)
        sums = np.stack([flat.sum(-1), (flat**2).sum(-1), oracle.entropy(flat).sum(-1)], -1)
        np.testing.assert_allclose(sums, record[f"belief_{kind}_stats"][t], rtol=1e-6)

    for t, mission in enumerate(replay(record)):
        np.testing.assert_array_equal(mission.positions, record["positions"][t])
        assert mission.measured_beliefs is not None
        check("measured", t, mission.measured_beliefs)
        check("global", t, mission.global_belief)
        if t < record.steps:
            check("fused", t, mission.local_beliefs)
    if name not in golden.COVERAGE_FULL_MISSIONS:
        np.testing.assert_allclose(mission.global_belief, record["belief_global_final"], atol=BELIEF, rtol=0)


@pytest.mark.parametrize("name", golden.COVERAGE_MISSIONS)
def test_replay_reproduces_observations_masks_rewards_and_metrics(name: str) -> None:
    record = golden.coverage_mission(name)
    mission = replayed(record)
    one_cell = 1.0 / record.truth.sum()
    for t, actions in enumerate(record["action"]):
        check_metrics(mission, record, t + 1, one_cell)
        check_utilities(mission, record, t)
        for own, expected in zip(mission.positions, record["mask_boundary"][t], strict=True):
            np.testing.assert_array_equal(oracle.boundary_mask(own), expected)
        _, masks = mission.act(lambda agent, mask, actions=actions: actions[agent])
        np.testing.assert_array_equal(masks, record["mask"][t])
        obs = mission.observe()
        np.testing.assert_allclose(obs, record["obs"][t], atol=OBSERVATION, rtol=0)
        state = mission.critic_state(actions, obs)
        np.testing.assert_array_equal(state[..., :7], obs)
        np.testing.assert_allclose(state[..., 7:], record["state_extra"][t], atol=OBSERVATION, rtol=0)
        reward, done = mission.step(actions)
        assert done == record["done"][t]
        if not done:
            assert reward == pytest.approx(record["reward"][t + 1], abs=REWARD)  # aligned: one step earlier
    check_metrics(mission, record, record.steps + 1, one_cell)


def check_metrics(mission: Mission, record: golden.CoverageRecord, index: int, one_cell: float) -> None:
    metrics = mission.metrics()
    assert metrics["entropy"] == pytest.approx(record["eval_entropy"][index], abs=ENTROPY)
    assert metrics["f1"] == pytest.approx(record["eval_f1_tie0"][index], abs=one_cell)
    assert metrics["f1_strict"] == pytest.approx(record["eval_f1"][index], abs=0.11)  # rounding decides ties


def check_utilities(mission: Mission, record: golden.CoverageRecord, t: int) -> None:
    before, after = mission.previous_global_belief, mission.global_belief
    weight = oracle.class_weight(after)
    relative, absolute = oracle.utilities(oracle.entropy(before), oracle.entropy(after), weight)
    assert relative == pytest.approx(record["utility_rel"][t], abs=1e-6)
    assert absolute == pytest.approx(record["utility_abs"][t], abs=1e-6)
    assert 10.0 * absolute - 0.17 == pytest.approx(record["reward_abs"][t], abs=REWARD)
    assert oracle.reward(before, after, mission.settings) == pytest.approx(record["reward"][t], abs=REWARD)


@pytest.mark.parametrize("name", [*golden.COVERAGE_MISSIONS, *golden.COVERAGE_GREEDY])
def test_messages_follow_range_and_failure(name: str) -> None:
    record = golden.coverage_mission(name)
    settings = recorded_settings(record)
    draws = np.ones((record.num_agents,) * 2)
    if settings.failure_rate:  # the original reseeds at every step: the range's index first, then one draw per pair
        legacy = np.random.RandomState(record.config["episode"])
        assert settings.communication_range == oracle.RANDOM_RANGES[legacy.randint(4)]
        draws = legacy.uniform(size=draws.shape)
    for t, comm in enumerate(record["comm"]):
        got = oracle.received_messages(
            record["positions"][t], settings.communication_range, draws, settings.failure_rate
        )
        np.testing.assert_array_equal(got, comm)


@pytest.mark.parametrize("name", golden.COVERAGE_GREEDY)
def test_greedy_baseline_reproduces_gains_and_actions(name: str) -> None:
    record = golden.coverage_mission(name)
    communication = record.config["communication"]
    one_cell = 1.0 / record.truth.sum()
    for t, mission in enumerate(replay(record)):
        if t > 0:  # the record has the prior at 0 and leaves out the start measurement
            assert mission.metrics()["entropy"] == pytest.approx(record["eval_entropy"][t], abs=ENTROPY)
            assert mission.metrics()["f1_strict"] == pytest.approx(record["eval_f1"][t], abs=0.11 + one_cell)
        if mission.done:
            break
        masks = baselines.greedy_masks(mission)
        np.testing.assert_array_equal(masks, record["mask"][t])
        gains = baselines.raw_gains(mission, masks)
        np.testing.assert_allclose(gains, record["raw_gain"][t], atol=1e-6, rtol=0)
        utility = baselines.normalised(gains)
        if communication:
            targets = mission.positions[:, None, :] + oracle.MOVES[6]
            utility = baselines.discounted(utility, masks, targets)
        np.testing.assert_allclose(utility, record["utility"][t], atol=1e-6, rtol=0)
        np.testing.assert_array_equal(baselines.ig_policy(mission, communication), record["action"][t])


# ---------------------------------------------------------------- rules by hand


def test_map_sides_and_radii() -> None:
    sides = {57: 493, 29: 251, 28: 242, 11: 95, 7: 60, 6: 51, 5: 43}
    assert {q: oracle.map_side(q) for q in sides} == sides
    assert [oracle.radius(z, 57) for z in oracle.ALTITUDES] == [28, 57, 85]
    assert [oracle.radius(z, 7) for z in oracle.ALTITUDES] == [3, 7, 10]


def test_actions_move_one_lattice_step() -> None:
    start = np.array([25, 25, 10])
    reached = [tuple(oracle.move(start, a, 6) - start) for a in range(6)]
    assert reached == [(0, 0, 5), (-5, 0, 0), (0, -5, 0), (0, 5, 0), (5, 0, 0), (0, 0, -5)]
    assert tuple(oracle.MOVES[27][0]) == (-5, -5, 5) and tuple(oracle.MOVES[27][26]) == (5, 5, -5)
    assert not oracle.MOVES[27][13].any()


def test_an_empty_mask_falls_back_to_the_boundary() -> None:
    mission = Mission(replace(SMALL, num_actions=4), np.random.default_rng(0), start=[[0, 0, 15]] * 4)
    earlier = [np.array([5, 0, 15]), np.array([0, 5, 15])]
    boundary = oracle.boundary_mask(mission.positions[2], 4)
    assert not oracle.collision_mask(boundary, mission.positions[2], np.array(earlier)).any()
    np.testing.assert_array_equal(mission.action_mask(2, earlier), boundary)


def test_belief_update_adds_log_odds_and_clips_before() -> None:
    p = np.array([0.5, 0.2, 1.0, 0.0])
    odds = np.log(np.clip(p, 1e-4, 0.9999) / (1 - np.clip(p, 1e-4, 0.9999)))
    for altitude, ell in zip(oracle.ALTITUDES, (4.5951199, 1.0201407, 0.5108256), strict=True):
        for reading, sign in ((True, 1), (False, -1)):
            expected = 1 / (1 + np.exp(-(odds + sign * ell)))
            np.testing.assert_allclose(oracle.bayes(p, reading, altitude), expected, rtol=1e-6)
    assert oracle.bayes(np.array([1.0]), True, 5)[0] > oracle.P_MAX


def test_other_priors_are_subtracted_and_do_not_drift() -> None:
    settings = replace(SMALL, prior=0.3, communication_range=100.0)
    mission = Mission(settings, np.random.default_rng(0))
    while not mission.done:
        mission.step(mission.random_actions())
    np.testing.assert_allclose(mission.global_belief[~mission.seen], 0.3, rtol=1e-14)
    updated = oracle.bayes(np.array([0.3]), True, 15, prior=0.3)[0]
    assert updated == pytest.approx(0.625)  # the first reading alone decides


def test_reward_by_hand() -> None:
    before = np.array([[0.5, 0.5], [0.5, 0.9]])
    after = np.array([[0.9, 0.1], [0.5, 0.9]])
    h = oracle.entropy(np.array([0.9]))[0]
    expected = (1 - h) / (1 + 0.5 + h)  # weights 1, 0, 0.5, 1 of the map after
    assert oracle.reward(before, after, Settings()) == pytest.approx(22 * expected - 0.5)
    sure = np.zeros((2, 2))
    assert oracle.reward(sure, sure, Settings()) == -0.5


def test_targets_by_hand() -> None:
    reward, done, q = np.array([1.0, 2.0, 4.0, 8.0]), np.array([0, 1, 0, 1]), np.array([10.0, 20.0, 30.0, 40.0])
    target = oracle.td_targets(reward, done, q, 0.5, 0.25)
    np.testing.assert_allclose(target, [1 + 0.5 * (0.75 * 20 + 0.25 * 2), 2, 4 + 0.5 * (0.75 * 40 + 0.25 * 8), 8])


def test_resize_to_blocks_and_enlarging_keep_constants() -> None:
    image = np.arange(22 * 22, dtype=float).reshape(22, 22)
    np.testing.assert_allclose(oracle.resize(image), image.reshape(11, 2, 11, 2).mean((1, 3)))
    for side in (4, 6, 10, 43, 493):
        np.testing.assert_allclose(oracle.resize(np.full((side, side), 0.3)), 0.3, rtol=1e-12)


@pytest.mark.parametrize("family", [*oracle.TERRAINS, "mixed"])
def test_terrains_have_both_classes(family: str) -> None:
    for seed in range(20):
        truth = oracle.draw_terrain(np.random.default_rng(seed), 60, family)
        assert truth.shape == (60, 60) and truth.dtype == bool
        assert 0.1 < truth.mean() < 0.9


def test_terrain_shapes() -> None:
    def drawn(truth: np.ndarray) -> list[str]:
        return ["".join(".#"[int(cell)] for cell in row) for row in truth[::5, ::5]]

    assert drawn(oracle.corner_terrain(20, 1, 56, 56)) == ["....", "....", "###.", "###."]
    assert drawn(oracle.band_terrain(20, 2, 25, 75)) == [".##."] * 4
    assert drawn(oracle.band_terrain(20, 1, 25, 75)) == ["####", "....", "....", "####"]
    assert drawn(oracle.diagonal_terrain(20, 0, 51)) == ["##..", "##..", "..##", "..##"]
    assert drawn(oracle.diagonal_terrain(20, 1, 51)) == ["..##", "..##", "##..", "##.."]
    assert drawn(oracle.four_terrain(20, 0, 30)) == ["##.#", "##.#", "....", "##.#"]
    assert drawn(oracle.four_terrain(20, 1, 30)) == ["..#.", "..#.", "####", "..#."]


def test_wrong_settings_are_refused_with_a_sentence() -> None:
    with pytest.raises(ValueError, match="num_actions is 9"):
        Settings(num_actions=9)
    with pytest.raises(ValueError, match="unknown terrain"):
        Settings(terrain="hills")
    with pytest.raises(ValueError, match="unknown start"):
        Settings(start="middle")
    with pytest.raises(ValueError, match="give it a generator"):
        Mission(SMALL)


# ---------------------------------------------------------------- properties


@pytest.mark.parametrize("level", range(3))
def test_readings_are_true_as_often_as_stated(level: int) -> None:
    truth = oracle.split_terrain(493, 0, 45)
    rng = np.random.default_rng(1)
    box = (0, 493, 0, 493)
    right = oracle.draw_readings(rng, truth, box, oracle.ALTITUDES[level]) == truth
    assert right.mean() == pytest.approx(1 - oracle.ERROR_RATES[level], abs=0.004)
    assert right[truth].mean() == pytest.approx(right[~truth].mean(), abs=0.008)


def test_unseen_cells_keep_the_prior_and_the_last_row_and_column_are_never_seen() -> None:
    for seed in range(5):
        mission = Mission(replace(SMALL, num_agents=8), np.random.default_rng(seed))
        while not mission.done:
            mission.step(mission.random_actions())
        assert np.all(mission.global_belief[~mission.seen] == 0.5)
        assert not mission.seen[-1].any() and not mission.seen[:, -1].any()
        assert 0 < mission.metrics()["coverage"] <= (42 / 43) ** 2


def test_with_unlimited_range_every_belief_is_the_global_one() -> None:
    settings = replace(SMALL, communication_range=100.0, num_actions=4, budget=3)
    mission = Mission(settings, np.random.default_rng(0))
    while not mission.done:  # at most 16 readings at 15 m: the clip, which depends on the order, is not reached
        for belief in mission.local_beliefs:
            np.testing.assert_allclose(belief, mission.global_belief, atol=1e-12)
        mission.step(mission.random_actions())


def test_without_range_agents_know_their_own_measurements_only() -> None:
    start = np.array([[0, 0, 15], [50, 50, 15]])
    settings = replace(SMALL, num_agents=2, communication_range=0.0, budget=1)
    mission = Mission(settings, np.random.default_rng(0), start=start)
    mission.step(mission.random_actions())
    assert np.all(mission.local_beliefs[0][-10:, -10:] == 0.5) and np.all(mission.local_beliefs[1][:10, :10] == 0.5)
    np.testing.assert_array_equal(mission.received, np.eye(2, dtype=bool))


def test_agents_in_one_place_hear_each_other_whatever_fails() -> None:
    positions = np.array([[5, 5, 15], [5, 5, 15], [5, 10, 15]])
    got = oracle.received_messages(positions, 25.0, np.full((3, 3), 0.3), 1.0)
    np.testing.assert_array_equal(got, [[1, 1, 0], [1, 1, 0], [0, 0, 1]])
    lossy = oracle.received_messages(positions, 5.0, np.array([[0.0, 0, 0.5], [0, 0, 0.1], [0, 0.9, 0]]), 0.5)
    np.testing.assert_array_equal(lossy, [[1, 1, 1], [1, 1, 0], [0, 1, 1]])


def test_exchanging_the_axes_exchanges_the_results() -> None:
    n = oracle.map_side(5)
    noise = np.random.default_rng(3)
    readings = {(k, i): noise.random((n, n)) < 0.5 for k, i in np.ndindex(6, 3)}
    truth = oracle.split_terrain(n, 0, 40)
    start = np.array([[0, 25, 15], [10, 45, 15], [30, 30, 15]])
    swapped_action = [0, 2, 1, 4, 3, 5]

    def mission(swap: bool) -> Mission:
        def read(k: int, agent: int, box: oracle.Box) -> np.ndarray:
            image = readings[k, agent]
            return (image.T if swap else image)[box[0] : box[1], box[2] : box[3]]

        settings = replace(SMALL, num_agents=3, budget=4)
        begin = start[:, [1, 0, 2]] if swap else start
        return Mission(settings, np.random.default_rng(0), truth=truth.T if swap else truth, start=begin, readings=read)

    one, other = mission(False), mission(True)
    while not one.done:
        actions = one.random_actions()
        swapped = [swapped_action[a] for a in actions]
        state = one.critic_state(actions).swapaxes(1, 2)[..., :11]  # channel 11 holds action numbers
        np.testing.assert_allclose(state, other.critic_state(swapped)[..., :11], atol=1e-6)
        assert one.step(actions)[0] == pytest.approx(other.step(swapped)[0], abs=1e-9)
    assert one.metrics() == pytest.approx(other.metrics())


@pytest.mark.parametrize("num_actions", [4, 6, 27])
def test_random_missions_stay_inside(num_actions: int) -> None:
    settings = replace(SMALL, num_actions=num_actions, num_agents=8, failure_rate=0.2, fix_range=False)
    mission = Mission(replace(settings, terrain="mixed"), np.random.default_rng(num_actions))
    while not mission.done:
        actions = mission.random_actions()
        obs, state = mission.observe(), mission.critic_state(actions)
        assert obs.shape == (8, 11, 11, 7) and state.shape == (8, 11, 11, 12)
        assert np.isfinite(state).all() and obs.min() >= 0 and obs.max() <= 1
        reward, _ = mission.step(actions)
        assert np.isfinite(reward)
        assert (mission.positions >= (0, 0, 5)).all() and (mission.positions <= (50, 50, 15)).all()
    with pytest.raises(ValueError, match="mission is over"):
        mission.step(actions)


# ---------------------------------------------------------------- scripted policies


def test_lawnmower_paths() -> None:
    paths = np.stack([baselines.lawnmower_path(i, 10) for i in range(4)])
    assert paths.shape == (4, 15, 3)
    np.testing.assert_array_equal(np.abs(np.diff(paths, axis=1)).sum(-1), 5)
    assert paths[1, 0].tolist() == [10, 30, 10] and paths[1, -1].tolist() == [10, 40, 10]
    np.testing.assert_array_equal(paths[2], paths[0][:, [1, 0, 2]])


@pytest.mark.parametrize(("policy", "options"), [("random", {}), ("ig", {}), ("lawnmower", {"altitude": 10})])
def test_fly_returns_whole_curves(policy: str, options: dict[str, Any]) -> None:
    curves = baselines.fly(policy, SMALL, seed=3, **options)
    assert curves["entropy"].shape == (17,) and curves["reward"].shape == (15,)
    assert curves["entropy"][0] == 1.0 and curves["f1"][0] == 0.0 and curves["coverage"][0] == 0.0
    assert np.all(np.diff(curves["coverage"]) >= 0) and np.all(curves["roi_coverage"] <= 1)
    again = baselines.fly(policy, SMALL, seed=3, **options)
    np.testing.assert_array_equal(curves["reward"], again["reward"])
    if policy == "lawnmower":
        path = baselines.lawnmower_path(0, 10)
        np.testing.assert_array_equal(curves["positions"][:, 0], np.concatenate([path, path[-2:-1]]))


def test_greedy_beats_random() -> None:
    settings = Settings(q=7)

    def final(policy: str) -> float:
        return float(np.mean([baselines.fly(policy, settings, seed)["entropy"][-1] for seed in range(12)]))

    assert final("ig") < final("random") - 0.1


# ---------------------------------------------------------------- PyTorch learner


@pytest.fixture(scope="module")
def torch() -> Iterator[Any]:
    module = pytest.importorskip("torch", reason="PyTorch is not installed: pip install -e '.[torch]'")
    threads = module.get_num_threads()
    module.set_num_threads(1)  # the networks are small; threads that wait for a busy core cost more than they save
    yield module
    module.set_num_threads(threads)


def test_a_missing_torch_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ImportError, match="pip install"):
        torch_learner.TorchComa(4, 6)


def test_epsilon_schedule() -> None:
    assert [torch_learner.epsilon(e) for e in (5000, 10_000, 20_000)] == pytest.approx([0.26, 0.02, 0.02])


def test_learner_reproduces_the_recorded_training_step(torch: Any) -> None:
    arrays = golden.load("coverage_learner")
    used = [0, 1, 2, 3, 4, 5, 6, 7, 10, 11]  # fc2 is not used and not built
    learner = torch_learner.TorchComa(4, 6, actor_loss="original", td_target="original")
    networks = {"actor": ("actor", 100, 7), "critic": ("critic", 200, 12), "target_critic": ("target", 300, 12)}
    for name, (label, base, channels) in networks.items():
        learner.set_parameters(name, list(golden.coverage_network(base, channels).values()))
        np.testing.assert_allclose(summary(learner, name), arrays[f"{label}_param_summary_init"][used], atol=1e-9)

    eps = float(arrays["eps"])
    batch = {name: arrays[name] for name in ("obs", "action", "mask", "reward", "done", "eps")}
    batch["state"] = np.concatenate([arrays["obs"], arrays["state_extra"]], axis=-1)
    data = learner.build_run(batch)
    np.testing.assert_allclose(data["target"].numpy(), arrays["td_target"].reshape(-1), atol=1e-6)
    with torch.no_grad():
        q_target = learner.target_critic(data["state"]).numpy()
    np.testing.assert_allclose(q_target.reshape(75, 4, 6), arrays["q_target_net"], atol=1e-6)

    index = torch.from_numpy(arrays["batch_index"].astype(np.int64))
    minibatches = [{name: values[rows] for name, values in data.items()} for rows in index]
    with torch.no_grad():
        probs = learner.policy(minibatches[0]["obs"], eps).numpy()
        np.testing.assert_allclose(probs, arrays["probs_first_batch"], atol=1e-6)
        np.testing.assert_allclose(learner.critic(minibatches[0]["state"]), arrays["q_first_batch"], atol=1e-6)

    losses, values = [], []
    for b, minibatch in enumerate(minibatches):
        loss, q = learner.critic_update(minibatch)
        np.testing.assert_allclose(gradient_norms(learner.critic), arrays["critic_grad_norms"][b][used], rtol=1e-4)
        np.testing.assert_allclose(q.numpy(), arrays["q_after"][b], atol=1e-6)
        losses.append(loss)
        values.append(q)
    assert np.mean(losses) == pytest.approx(arrays["critic_loss_mean"], abs=1e-6)

    records, advantages = [], []
    for b, (minibatch, q) in enumerate(zip(minibatches, values, strict=True)):
        with torch.no_grad():
            masked = learner.masked(learner.policy(minibatch["obs"], eps), minibatch["mask"])
            advantages.append(learner.advantage(masked, q, minibatch).numpy())
        records.append(learner.actor_update(minibatch, q, eps))
        np.testing.assert_allclose(gradient_norms(learner.actor), arrays["actor_grad_norms"][b][used], rtol=1e-4)
    for ours, theirs in {"actor_loss": "actor_loss", "log_prob": "log_prob_chosen"}.items():
        assert np.mean([record[ours] for record in records]) == pytest.approx(arrays[f"{theirs}_mean"], abs=1e-6)
    assert np.mean(advantages) == pytest.approx(arrays["advantage_mean"], abs=1e-6)
    assert np.std(advantages, ddof=1) == pytest.approx(arrays["advantage_std"], abs=1e-6)

    for name in ("actor", "critic"):
        after = arrays[f"{name}_param_summary_after"][used]
        np.testing.assert_allclose(summary(learner, name), after, rtol=1e-5, atol=2e-3)  # sums of up to a million
        heads = [p.detach().numpy().ravel()[:6] for p in getattr(learner, name).parameters()]
        np.testing.assert_allclose(heads, arrays[f"{name}_param_heads_after"][used], atol=1e-6)


def summary(learner: torch_learner.TorchComa, network: str) -> np.ndarray:
    """[10, 2]: sum and sum of squares of every parameter tensor."""
    tensors = [p.detach().double() for p in getattr(learner, network).parameters()]
    return np.array([[p.sum().item(), (p**2).sum().item()] for p in tensors])


def gradient_norms(network: Any) -> np.ndarray:
    return np.array([p.grad.double().norm().item() for p in network.parameters()])


def test_advantage_of_a_uniform_critic_is_zero(torch: Any) -> None:
    learner = torch_learner.TorchComa(2, 6, hidden_size=8)
    mask = torch.tensor([[1.0, 1, 0, 1, 0, 1]]).repeat(5, 1)
    masked = learner.masked(torch.softmax(torch.randn(5, 6), -1), mask)
    minibatch = {"action": torch.tensor([0, 1, 3, 5, 0]), "mask": mask}
    np.testing.assert_allclose(masked.sum(-1), 1.0, atol=1e-6)
    advantage = learner.advantage(masked, torch.full((5, 6), 3.0), minibatch)
    np.testing.assert_allclose(advantage, 0.0, atol=1e-5)


def test_masked_actions_are_never_chosen(torch: Any) -> None:
    learner = torch_learner.TorchComa(4, 6, hidden_size=8)
    rng = np.random.default_rng(0)
    obs = rng.random((4, 11, 11, 7), dtype=np.float32)
    for _ in range(200):
        mask = rng.random((4, 6)) < 0.4
        mask[:, rng.integers(6)] = True
        for greedy in (False, True):
            actions = learner.act(obs, mask, eps=0.3, greedy=greedy)
            assert mask[np.arange(4), actions].all()


@pytest.mark.parametrize(
    "options",
    [{}, {"actor_loss": "original", "td_target": "original"}, {"tau": 0.01, "num_epochs": 1, "num_minibatches": 2}],
)
def test_training_runs(torch: Any, options: dict[str, Any]) -> None:
    settings = Settings(q=5, num_agents=3, budget=4)
    learner = torch_learner.TorchComa(3, 6, hidden_size=16, seed=1, **options)
    before = summary(learner, "actor")
    for stats in itertools.islice(torch_learner.training(learner, settings, missions_per_step=4, seed=0), 2):
        assert all(np.isfinite(value) for value in stats.values())
    assert stats["missions"] == 8 and learner.training_steps == 2
    assert np.abs(summary(learner, "actor") - before).max() > 0
    curves = baselines.fly(torch_learner.greedy_policy(learner), settings, seed=0)
    assert curves["entropy"].shape == (7,) and curves["entropy"][-1] < 1
