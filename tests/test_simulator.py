"""Policies in a simulator: the loop, rewards by each task's rule, labels by hand, refusals; real Meta-World.

Most tests put arms in its place that move as they are told; none of these needs the extra `real`.
"""

import dataclasses
import functools
import json
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from helpers import runs

from envs_jax import make
from envs_jax.adapters import metaworld as adapter
from envs_jax.batch import batched
from envs_jax.reach import goals, tasks
from jaxrl.algos.sac import Sac
from jaxrl.cli import collect, evaluate
from jaxrl.evaluation import collection, simulator
from jaxrl.evaluation.policies import PolicySet
from jaxrl.integrations import expert_dataset
from jaxrl.rl.data_parallel import DataParallel

HORIZON, LANES = 12, 3
TOOL = np.array([0.0, 0.0, -0.045])


class Puppet:
    """An arm whose hand goes where actions lead it; the fingers obey at once."""

    scripted = np.array([0.5, 0.0, 0.0, 0.25], np.float32)

    def __init__(self, task: str = "reach-v3", numbers: int = 39) -> None:
        self.numbers, self.vectors = numbers, []

    def reset(self, vector: np.ndarray) -> np.ndarray:
        self.vectors.append(vector)
        self.hand, self.opening, self.vector, self.before = np.array([0.0, 0.6, 0.2]), 1.0, vector, None
        return self._observe()

    @property
    def tool(self) -> np.ndarray:
        return self.hand + TOOL

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool]:
        self.hand = self.hand + 0.02 * action[:3].astype(np.float64)  # never out of what is shown
        self.opening = 0.5 - 0.5 * float(action[3])
        return self._observe(), 7.0, bool(self.hand[2] > 0.21)

    def _observe(self) -> np.ndarray:
        now = np.concatenate([self.hand, [self.opening], self.vector[:3], [0, 0, 0, 1], np.zeros(7)])
        observation = np.concatenate([now, now if self.before is None else self.before, self.vector[3:6]])
        self.before = now
        return np.pad(observation, (0, self.numbers - 39))


noise_of = jax.jit(
    lambda stream: jax.random.normal(jax.random.fold_in(jax.random.key(0), stream), (HORIZON, 1, 4))[:, 0]
)


@functools.cache
def weights() -> Any:
    """Of a fresh worker."""
    algo = make_eval_policy(params=()).algo
    return jax.jit(lambda key: algo.weights(algo.init(key, None)))(jax.random.key(0))


def make_eval_policy(params: Any = None, **settings: Any) -> PolicySet:
    """A fresh worker of reach."""
    env = make("reach", **{"horizon": HORIZON, **settings})
    algo = Sac(env.spec, DataParallel(8), hidden_size=8, depth=1, batch_size=8, buffer_size=800)
    params = weights()["actor"] if params is None else params
    return PolicySet(batched(env), "reach", dataclasses.asdict(env), algo=algo, params=params)


def world(one: PolicySet, own_vectors: bool = False, lanes: int = LANES) -> tuple[simulator.Simulator, Any]:
    """Puppets in the place of Meta-World's arms, and these."""
    vectors = np.array([[0.0, 0.6, 0.02, 0.1, 0.85, 0.1], [0.0, 0.7, 0.02, 0.0, 0.9, 0.2]]) if own_vectors else None
    real = adapter.RealReach(one.env.env, [Puppet() for _ in range(lanes)], vectors)
    task, scripted = ("drawer-close-v3", real.scripted) if own_vectors else (None, None)
    wrapped = simulator.Simulator("puppets", task, real.spec, lanes, real.in_order, real.step_without_reset, scripted)
    return wrapped, real


def goals_in_order(one: PolicySet, numbers: list[int]) -> np.ndarray:
    """Those of episodes of the list here, not in the other simulator."""
    begin = jax.jit(lambda key, numbers: one.env.in_order(jax.random.split(key, len(numbers)), numbers)[0].env.goal)
    return np.asarray(begin(jax.random.key(0), np.int32(numbers)))


def test_goals_come_in_order_each_for_every_task() -> None:
    one = make_eval_policy(task="reach,mirrored", goals="pool", pool_seed=3)
    here, real = world(one)
    played = simulator.play(one, here, "random", range(7), seed=0)
    pool = goals.pool(3)
    np.testing.assert_allclose(played.observation[:, 0, 36:], pool[np.arange(7) // 2, 3:], rtol=1e-6)
    np.testing.assert_array_equal(played.task, np.arange(7) % 2)
    vectors = [arm.vectors for arm in real.arms]  # lanes 0, 1, 2 play episodes 0, 3, 6 and so on; the last are padded
    np.testing.assert_array_equal([vectors[0][1], vectors[1][1]], pool[[1, 2]])
    np.testing.assert_allclose(goals_in_order(one, [101, 204]), pool[[0, 2], 3:], rtol=1e-6)


def test_fresh_goals_are_the_same_in_both_worlds_and_never_those_of_the_pool() -> None:
    one = make_eval_policy(task="reach,mirrored", pool_seed=3)
    here, real = world(one)
    goals_seen = simulator.play(one, here, "random", range(7), seed=0).observation[:, 0, 36:]
    vectors = np.array([arm.vectors[1] for arm in real.arms])  # lanes 0, 1, 2 play episodes 0, 3, 6
    np.testing.assert_array_equal(goals_seen[[0, 2, 4]], goals_seen[[1, 3, 5]])  # each for all tasks
    assert (
        len(np.unique(goals_seen[::2], axis=0)) == 4
        and not np.isclose(goals_seen[:, None], goals.pool(3)[:, 3:]).all(2).any()
    )
    np.testing.assert_allclose(goals_in_order(one, [3, 4, 5]), vectors[:, 3:], rtol=1e-6)
    low, high = goals.GOAL.T
    assert (low <= goals_seen).all() and (goals_seen <= high).all()


@pytest.mark.parametrize("task", tasks.TASKS)
@pytest.mark.parametrize("hidden", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_task_of_the_family_pays_by_its_own_rule(task: str, hidden: bool) -> None:
    one = make_eval_policy(task=task, goals="pool", partially_observable=hidden)
    here, _ = world(one)
    played = simulator.play(one, here, "random", range(LANES), seed=1)
    pool, rule = goals.pool(0)[:LANES], tasks.TASKS[task]
    place = np.array(rule.scale) * (pool[:, 3:] if rule.anchor == "goal" else pool[:, :3]) + np.array(rule.offset)
    tool = played.observation[:, 1:, :3].astype(np.float64) + TOOL
    far = np.linalg.norm(tool - place[:, None], axis=-1)
    margin = np.linalg.norm(place - [0, 0.6, 0.2], axis=-1)[:, None]
    opening = played.observation[:, 1:, 3]
    amiss = np.maximum(0, np.maximum(rule.required_opening[0] - opening, opening - rule.required_opening[1]))
    pay = 10 / (1 + 9 * (np.maximum(far - 0.05, 0) / margin) ** 2) / (1 + 9 * (amiss / 0.5) ** 2)
    np.testing.assert_allclose(played.reward, pay, rtol=2e-5)
    success = np.cumsum((far <= 0.05) & (amiss <= 0), axis=1) > 0
    np.testing.assert_array_equal(played.curves["success"][1:].T, success)
    np.testing.assert_allclose(played.curves["return"][1:].T, np.cumsum(pay, axis=1), rtol=2e-5)
    goal = np.zeros_like(pool[:, 3:]) if hidden else pool[:, 3:]
    np.testing.assert_allclose(played.observation[:, :, 36:], np.broadcast_to(goal[:, None], (LANES, 13, 3)), rtol=1e-6)
    np.testing.assert_array_equal(played.observation[:, 1:, 18:36], played.observation[:, :-1, :18])


def test_the_simulators_own_task_pays_judges_and_advises_by_itself() -> None:
    one = make_eval_policy(partially_observable=True)
    here, real = world(one, own_vectors=True)
    played = simulator.play(one, here, "scripted", range(4), seed=0, advised=True)
    assert (played.reward == 7).all() and set(played.curves) == {"return", "length", "success", "success_at_end"}
    np.testing.assert_array_equal(played.action, np.broadcast_to(Puppet.scripted, (4, HORIZON, 4)))
    np.testing.assert_array_equal(played.advice, played.action)
    assert (played.observation[..., 36:] == 0).all()
    np.testing.assert_array_equal(real.arms[0].vectors[1], real.vectors[3 % 2])
    risen = simulator.play(one, here, "random", range(LANES), seed=0)
    np.testing.assert_array_equal(risen.curves["success_at_end"][1:].T, risen.observation[:, 1:, 2] > np.float32(0.21))


@pytest.mark.parametrize("name", ["sampled", "learned", "random"])
def test_an_episode_is_the_same_whichever_others_are_played(name: str) -> None:
    one = make_eval_policy()
    wide, narrow = world(one)[0], world(one, lanes=2)[0]
    both = simulator.play(one, wide, name, range(5), seed=4), simulator.play(one, narrow, name, [4], seed=4)
    np.testing.assert_allclose(both[0].action[4:], both[1].action, rtol=1e-5, atol=1e-6)
    other = simulator.play(one, narrow, name, [4], seed=5)
    assert np.allclose(other.action, both[1].action) == (name == "learned")


# Labels


def dense(params: Any, x: np.ndarray) -> np.ndarray:
    """A network with one hidden layer, in float64."""
    leaves = {"/".join(str(k.key) for k in path): np.asarray(leaf, np.float64)
              for path, leaf in jax.tree_util.tree_leaves_with_path(params)}  # fmt: skip
    kernels = [leaves[name] for name in sorted(leaves) if leaves[name].ndim == 2]
    biases = [leaves[name] for name in sorted(leaves) if leaves[name].ndim == 1]
    return np.maximum(x @ kernels[0] + biases[0], 0) @ kernels[1] + biases[1]


def gaussian(actor: Any, observation: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    mean, raw = np.split(dense(actor, observation), 2, axis=-1)
    return mean, -20 + 11 * (np.tanh(raw) + 1)


@pytest.mark.parametrize("expert", collection.EXPERTS)
def test_labels_by_hand(expert: str, tmp_path: Path) -> None:
    one = make_eval_policy(task="reach,above")
    expert_weights = weights() | {"log_alpha": np.float32([-1, 0.5])}
    dataset = collection.collect(one, expert_weights, world(one)[0], ["random", "sampled", "scripted"], 7, 0, expert)
    assert dataset.task_names == ("reach", "above") and dataset.environment == "puppets"
    np.testing.assert_array_equal(dataset.task.reshape(7, HORIZON)[:, 0], np.arange(7) // 3 % 2)
    np.testing.assert_array_equal(dataset.step, np.tile(np.arange(HORIZON), 7))
    np.testing.assert_array_equal(dataset.observation.reshape(7, HORIZON, 39)[:, 1:],
                                  dataset.next_observation.reshape(7, HORIZON, 39)[:, :-1])  # fmt: skip
    mean, log_std = gaussian(expert_weights["actor"], dataset.observation)
    np.testing.assert_allclose(dataset.log_std, log_std, rtol=1e-3, atol=1e-3)
    if expert == "policy":
        np.testing.assert_allclose(dataset.mu, np.tanh(mean), atol=1e-4)
    else:
        scripted = np.arange(7) % 3 == 2
        by_script = np.repeat(scripted, HORIZON)
        np.testing.assert_array_equal(dataset.mu[by_script], dataset.action[by_script])
        place = dataset.observation[:, 36:] + np.where(dataset.task[:, None] == 1, [0, 0, 0.15], 0)
        np.testing.assert_allclose(
            dataset.mu[:, :3], np.clip(5 * (place - dataset.observation[:, :3]), -1, 1), atol=1e-5
        )
    # values: the same draw from the policy behind each step
    for episode in range(7):
        rows = slice(episode * HORIZON, (episode + 1) * HORIZON)
        noise = np.asarray(noise_of(collection._STREAM + episode), np.float64)
        mean, log_std = gaussian(expert_weights["actor"], dataset.next_observation[rows])
        action = np.tanh(mean + np.exp(log_std) * noise)
        density = np.sum(-0.5 * noise**2 - log_std - 0.5 * np.log(2 * np.pi) - np.log(1 - action**2 + 1e-6), axis=-1)
        inputs = np.concatenate([dataset.next_observation[rows], action], axis=-1)
        critics = [jax.tree.map(lambda x, c=c: np.asarray(x)[c], expert_weights["critic"]) for c in range(2)]
        smallest = np.min([dense(critic, inputs)[:, 0] for critic in critics], axis=0)
        alpha = np.exp([-1.0, 0.5][episode // 3 % 2])
        value = dataset.reward[rows] + 0.99 * (smallest - alpha * density)
        np.testing.assert_allclose(dataset.value[rows], value, rtol=1e-3, atol=2e-3)
    expert_dataset.write(tmp_path / "set.npz", dataset)
    assert expert_dataset.read(tmp_path / "set.npz", min_episodes=3).episodes.tolist() == [4, 3]


# The verbs

SCRIPTED = "--env reach --policy random --horizon 12 --episodes 2 --simulator"


def one_sentence(text: str, expected: str) -> None:
    assert text.startswith("error: ") and expected in text and text.count("\n") == 1 and "Traceback" not in text


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (f"{SCRIPTED} mujoco", "unknown simulator 'mujoco': choose from: jax, metaworld"),
        (f"{SCRIPTED} metaworld", "Meta-World is not installed"),
        (f"{SCRIPTED} metaworld --task drawer-close-v3,reach", "one of its own tasks at a time, not drawer-close-v3,r"),
        (
            f"{SCRIPTED} metaworld --weld v2",
            "turns the hand like weld v3, but the environment has weld v2: choose weld v3",
        ),
        ("--env snakes_1v1 --policy random --simulator metaworld", "plays only 'reach', but this is 'snakes_1v1'"),
    ],
)
def test_evaluate_refuses(argv: str, expected: str, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "metaworld", None)
    assert evaluate.main(argv.split()) == 2
    one_sentence(capsys.readouterr().err, expected)


def test_a_report_has_the_form_of_any_evaluation(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any) -> None:
    monkeypatch.setattr(adapter, "Arm", Puppet)
    monkeypatch.setattr(adapter, "version", lambda: "0")
    path = tmp_path / "real.json"
    argv = "--env reach --policy random,scripted --horizon 40 --goals pool --episodes 3 --simulator metaworld --json"
    assert evaluate.main([*argv.split(), str(path)]) == 0
    report = json.loads(path.read_text())
    assert report["simulator"] == "Meta-World 0, reach-v3, task reach" and report["stream"] == "pool in order"
    assert report["episodes"] == 3 and report["policies"]["scripted"]["success"]["mean"][-1] == 1.0
    output = capsys.readouterr().out
    assert "Meta-World 0" in output and "goals of the pool in order" in output and "success at the end" in output


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A worker of reach, hardly trained."""
    sizes = "--horizon 12 --num_envs 8 --devices 1 --total_env_steps 64 --hidden_size 8 --batch_size 8"
    return runs.run(f"--algo sac --env reach {sizes} --random_steps 0 --eval_every 0", tmp_path_factory.mktemp("runs"))


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ("--out OUT", "name a run of sac on reach, whose policy plays"),
        ("RUN", "say where to write: --out FILE.npz"),
        ("RUN --out set.csv", "--out 'set.csv': an expert dataset must end in .npz"),
        ("RUN --out OUT --task drawer-close-v3", "'drawer-close-v3' is a task of Meta-World itself: use --simulator"),
    ],
)
def test_collect_refuses(argv: str, expected: str, tmp_path: Path, capsys: Any) -> None:
    """Before it has read the run's weights."""
    out = tmp_path / "set.npz"
    (tmp_path / "config.yaml").write_text("algo: sac\nenv: reach\n")
    assert collect.main(argv.replace("RUN", str(tmp_path)).replace("OUT", str(out)).split()) == 2
    one_sentence(capsys.readouterr().err, expected)
    assert not out.exists()


@pytest.mark.slow
def test_collect_writes_or_says_why_not(run: Path, tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "metaworld", None)
    out = tmp_path / "set.npz"
    cases = [
        ([str(run), "--out", str(out), "--policy", "randm"], "unknown policy 'randm': did you mean 'random'?", 2),
        ([str(run), "--out", str(out), "--simulator", "metaworld"], "install the extra 'real'", 2),
        ([str(run), "--out", str(tmp_path / "absent" / "set.npz")], "choose a file in a writable directory", 1),
    ]
    for argv, expected, code in cases:
        capsys.readouterr()
        assert collect.main(argv) == code
        one_sentence(capsys.readouterr().err, expected)
    assert not out.exists()
    argv = [str(run), "--out", str(out), "--episodes", "6", "--policy", "random,learned,scripted", "--task", "above"]
    assert collect.main(argv) == 0
    dataset = expert_dataset.read(out, min_episodes=6)
    assert len(dataset) == 72 and dataset.task_names == ("above",) and dataset.environment == "reach"
    assert np.isfinite(dataset.value).all()


# The real simulator


def metaworld(test: Any) -> Any:
    return pytest.mark.needs("metaworld")(pytest.mark.filterwarnings("ignore")(test))  # warnings of the packages


@metaworld
def test_the_rule_of_reach_pays_what_the_simulator_pays() -> None:
    one = make_eval_policy(horizon=90, goals="pool")  # the simulator's own goals
    ours, theirs = (
        simulator.make_simulator("metaworld", one, None, 2),
        simulator.make_simulator("metaworld", one, "reach-v3", 2),
    )
    by_rule, by_simulator = (simulator.play(one, where, "scripted", range(2), 0) for where in (ours, theirs))
    np.testing.assert_allclose(by_rule.action, by_simulator.action, atol=1e-5)
    np.testing.assert_allclose(by_rule.reward, by_simulator.reward, rtol=1e-4)
    for name in ("success", "success_at_end"):
        np.testing.assert_array_equal(by_rule.curves[name], by_simulator.curves[name])
    assert by_rule.curves["success"][-1].any()


@metaworld
def test_the_simulator_and_the_jax_environment_play_the_same_episodes() -> None:
    one = make_eval_policy(horizon=90)
    for name in ("scripted", "random"):  # without contacts
        worlds = (simulator.make_simulator(name, one, None, 3) for name in ("metaworld", "jax"))
        metaworld_record, jax_record = (simulator.play(one, where, name, range(3), 0) for where in worlds)
        arm = [*range(4), *range(18, 22), *range(36, 39)]  # the puck jitters
        np.testing.assert_allclose(metaworld_record.observation[..., arm], jax_record.observation[..., arm], atol=2e-4)
        np.testing.assert_allclose(metaworld_record.reward, jax_record.reward, atol=2e-3)
        np.testing.assert_array_equal(metaworld_record.curves["success"], jax_record.curves["success"])
        assert metaworld_record.curves["success"][-1].any() == (name == "scripted")
