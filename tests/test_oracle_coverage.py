"""The NumPy oracle of the coverage environment and its PyTorch learner against the recorded missions."""

import importlib
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from helpers import golden
from helpers.cases import by_day

from bench.reference.coverage import baselines, oracle, torch_learner
from bench.reference.coverage.oracle import Mission, Settings

BELIEF, OBSERVATION, REWARD, ENTROPY = 5e-5, 1e-5, 1e-5, 1e-6  # tolerances: the records are float32

MISSIONS = by_day(golden.COVERAGE_MISSIONS, {*golden.COVERAGE_MISSIONS} - {"m01", "m02"})  # which are large


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


def replay(record: golden.CoverageRecord) -> Iterator[Mission]:
    """The mission at t = 0 .. T, with the recorded actions."""
    mission = Mission(
        recorded_settings(record),
        truth=record.truth,
        start=record["positions"][0],
        readings=record.reading,
        comm=record["comm"],
        keep_measured=True,
    )
    yield mission
    for t, actions in enumerate(record["action"]):
        reward, done = mission.step(actions)
        assert done == (t + 1 == record.steps)
        if "reward" in record and not done:
            assert reward == pytest.approx(record["reward"][t + 1], abs=REWARD)  # aligned: one step earlier
        yield mission


# ---------------------------------------------------------------- recorded missions


@pytest.mark.parametrize("name", MISSIONS)
def test_missions_are_as_recorded(name: str) -> None:
    record = golden.coverage_mission(name)
    one_cell = 1.0 / record.truth.sum()
    for t, mission in enumerate(replay(record)):
        np.testing.assert_array_equal(mission.positions, record["positions"][t])
        check_beliefs(mission, record, t)
        check_metrics(mission, record, t + 1, one_cell)
        if mission.done:
            assert record["done"][t - 1]
            break
        check_utilities(mission, record, t)
        for position, expected in zip(mission.positions, record["mask_boundary"][t], strict=True):
            np.testing.assert_array_equal(oracle.boundary_mask(position), expected)
        actions = record["action"][t]
        _, masks = mission.act(lambda agent, mask, actions=actions: actions[agent])
        np.testing.assert_array_equal(masks, record["mask"][t])
        obs = mission.observe()
        np.testing.assert_allclose(obs, record["obs"][t], atol=OBSERVATION, rtol=0)
        state = mission.critic_state(actions, obs)
        np.testing.assert_array_equal(state[..., :7], obs)
        np.testing.assert_allclose(state[..., 7:], record["state_extra"][t], atol=OBSERVATION, rtol=0)


def check_beliefs(mission: Mission, record: golden.CoverageRecord, t: int) -> None:
    assert mission.measured_beliefs is not None
    kinds = {"measured": mission.measured_beliefs, "global": mission.global_belief}
    if not mission.done:
        kinds["fused"] = mission.local_beliefs
    for kind, belief in kinds.items():
        flat = belief.reshape(*belief.shape[:-2], -1)
        if record.name in golden.COVERAGE_FULL_MISSIONS:
            np.testing.assert_allclose(belief, record[f"belief_{kind}"][t], atol=BELIEF, rtol=0)
        else:
            expected = record[f"belief_{kind}_probe"][t]
            np.testing.assert_allclose(flat[..., record["probe_cells"]], expected, atol=BELIEF, rtol=0)
        sums = np.stack([flat.sum(-1), (flat**2).sum(-1), oracle.entropy(flat).sum(-1)], -1)
        np.testing.assert_allclose(sums, record[f"belief_{kind}_stats"][t], rtol=1e-6)
    if mission.done and record.name not in golden.COVERAGE_FULL_MISSIONS:
        np.testing.assert_allclose(mission.global_belief, record["belief_global_final"], atol=BELIEF, rtol=0)


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
        utility = baselines.normalise(gains)
        if communication:
            targets = mission.positions[:, None, :] + oracle.MOVES[6]
            utility = baselines.discount(utility, masks, targets)
        np.testing.assert_allclose(utility, record["utility"][t], atol=1e-6, rtol=0)
        np.testing.assert_array_equal(baselines.ig_policy(mission, communication), record["action"][t])


# ---------------------------------------------------------------- PyTorch learner


@pytest.fixture(scope="module")
def torch() -> Iterator[Any]:
    module = importlib.import_module("torch")
    threads = module.get_num_threads()
    module.set_num_threads(1)  # the networks are small; threads that wait for a busy core cost more than they save
    yield module
    module.set_num_threads(threads)


@pytest.mark.needs("torch")
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


@pytest.mark.needs("torch")
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
