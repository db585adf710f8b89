"""bench.studies.known: what a policy scores, what peers see of an environment, the table over seeds."""

import importlib.util
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bench.studies import known, known_peers
from bench.studies.known import table
from bench.studies.known_task import EPISODES, Task, returns, to_box
from envs_jax.adapters.common import quiet
from jaxrl.common.errors import UserError

pytestmark = pytest.mark.long  # of benchmarks, not of the product

CORRIDOR, POINT = "tests.helpers.tiny:Corridor", "tests.helpers.tiny:PointMass"


def needs(package):
    return pytest.mark.skipif(
        importlib.util.find_spec(package) is None, reason=f"needs {package}: pip install {package}"
    )


def always(number):
    def act(carry, timestep, key):
        return jnp.full(timestep.observation.shape[:2], number, jnp.int32), carry

    return act


def test_returns_of_first_episodes_alone():
    """Walking right ends each game with reward 1; the games that follow after the resets do not count."""
    task = Task(CORRIDOR, 0, options={"length": 3, "horizon": 12})
    np.testing.assert_array_equal(returns(task, always(1), sample=False), np.ones(EPISODES, np.float32))
    np.testing.assert_array_equal(returns(task, always(0), sample=False), np.zeros(EPISODES, np.float32))


def test_carry_and_keys():
    """The carry of a step reaches the next one; keys are there, and differ, only where actions are sampled."""
    seen = []

    def act(carry, timestep, key):
        seen.append((carry, None if key is None else int(jax.random.bits(key))))
        return jnp.zeros(timestep.observation.shape[:2], jnp.int32), (0 if carry is None else carry) + 1

    task = Task(CORRIDOR, 0, options={"horizon": 3})
    returns(task, act, sample=False)
    returns(task, act, sample=True)
    carries, keys = zip(*seen, strict=True)
    assert carries == (None, 1, 2) * 2
    assert keys[:3] == (None,) * 3
    assert len(set(keys[3:])) == 3


def test_random_actions_fill_the_box():
    """They are uniform over a box: mean 0 and variance b^2 / 3, within four standard errors."""
    task = Task(POINT, 0, options={"box": 2.0})
    act = known.random(task, 1).act
    timestep = jax.vmap(task.make().reset)(jax.random.split(jax.random.key(0), 512))[1]
    first, carry = act(None, timestep, None)
    second, _ = act(carry, timestep, None)
    drawn = np.concatenate([np.asarray(first), np.asarray(second)]).ravel()
    assert not np.array_equal(first, second)
    assert np.abs(drawn).max() <= 2.0
    assert abs(drawn.mean()) < 4 * np.sqrt(4 / 3 / drawn.size)
    assert abs(np.square(drawn).mean() - 4 / 3) < 4 * np.sqrt((16 / 5 - 16 / 9) / drawn.size)


def test_actions_of_peers_span_the_box():
    """-1, 0 and 1 are the ends and the middle of the environment's own box; what lies outside is clipped."""
    env = Task(POINT, 0, options={"box": 2.0}).make()
    given = jnp.array([[-1.0, 0.0], [1.0, 3.0]])
    np.testing.assert_array_equal(to_box(env, given), [[[-2.0, 0.0]], [[2.0, 2.0]]])


def result(task, learner, seed, mean, seconds=10.0):
    row = {
        "task": task, "learner": learner, "seed": seed, "env_steps": 1000, "updates": 50, "cpu_seconds": seconds,
        "wall_seconds": 12.0, "compile_share": 0.25, "greedy": {"mean": mean, "std": 1.0, "episodes": 8},
    }  # fmt: skip
    return row


def test_table():
    """Student's 95 % interval of 1, 2, 3: 4.303 / sqrt(3) = 2.48; medians of seconds."""
    rows = [result("hopper", "sac", seed, float(seed), seconds=20.0 * seed) for seed in (1, 2, 3)]
    line = list(table([*rows, result("pendulum", "sac", 1, -150.0)]))[-1]
    assert line == "| brax:hopper | sac | 3 | 1,000 | 50 | 2 ± 2.5 |  | 40 | 10 |"


def write(path, *rows, jax="1"):
    machine = {"processor": "a", "python": "3", "jax": jax}
    path.write_text(json.dumps({"machine": machine, "packages": {"brax": "2"}, "rows": rows}))


def test_joined(tmp_path):
    """Files of single runs become one; the same run twice, other versions, and what is no result, are refused."""
    for seed in (1, 2):
        write(tmp_path / f"{seed}.json", result("hopper", "sac", seed, 1.0))
    paths = [str(tmp_path / f"{seed}.json") for seed in (1, 2)]
    assert [row["seed"] for row in known.joined(paths)["rows"]] == [1, 2]
    with pytest.raises(UserError, match="repeats hopper sac 1"):
        known.joined([paths[0], paths[0]])
    with pytest.raises(UserError, match="is no result"):
        known.joined([str(tmp_path / "absent.json")])
    write(tmp_path / "3.json", result("hopper", "sac", 3, 1.0), jax="2")
    with pytest.raises(UserError, match="was made with jax 2, others with 1"):
        known.joined([paths[0], str(tmp_path / "3.json")])
    write(tmp_path / "4.json", result("hoper", "sac", 4, 1.0))
    with pytest.raises(UserError, match="is not known"):
        known.joined([str(tmp_path / "4.json")])
    for text in ("{}", "[1]", "no"):
        (tmp_path / "5.json").write_text(text)
        with pytest.raises(UserError, match="is no result"):
            known.joined([str(tmp_path / "5.json")])


def test_bad_input(capsys):
    assert known.main(["hoper", "sac"]) == 2
    assert "name a task (pendulum" in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.parametrize("learner", ["sac", pytest.param("td3", marks=pytest.mark.long)])
def test_our_replay_learners(learner):
    """They make one update for each environment step, and take what differs for a task."""
    task = Task(POINT, 64, num_envs=4, random_steps=16, hidden_size=8, batch_size=8, ours={"final_lr_fraction": 0.5})
    trained = known.ours(task, 1, learner)
    assert (trained.env_steps, trained.updates) == (64, 64)
    assert returns(task, trained.act, sample=False).shape == (EPISODES,)


@pytest.mark.long
@pytest.mark.parametrize("learner", ["coma", "ppo"])
def test_our_learners_of_teams(learner):
    """Walking right is soon learned: sampled, two agents end most games in time, random ones few of them."""
    task = Task(
        CORRIDOR, 10_000, options={"num_agents": 2, "length": 4, "horizon": 8},
        ours={"num_envs": 16, "hidden_size": 16, "actor_lr": 5e-3, "critic_lr": 5e-3},
    )  # fmt: skip
    trained = known.ours(task, 1, learner)
    reached = returns(task, trained.act, sample=True).mean()
    assert reached > returns(task, known.random(task, 1).act, sample=True).mean() + 0.2


@pytest.mark.parametrize(
    ("env", "learner"), [(CORRIDOR, "sac"), (POINT, "coma"), (POINT, "jaxmarl_ippo"), (POINT, "best_ratio")]
)
def test_learners_that_do_not_fit(monkeypatch, env, learner):
    monkeypatch.setitem(known.TASKS, "tiny", Task(env, 64))
    with pytest.raises(UserError, match=f"{learner} does not fit tiny"):
        known.check("tiny", learner)


@needs("stable_baselines3")
def test_copies_of_stable_baselines():
    """A cut copy shows its next game; its last observation, and that time was up, stand in the info."""
    copies = known_peers._sb3_env(Task(POINT, 0, num_envs=3, options={"horizon": 4}), seed=0)
    place, push = copies.reset()[:, :2], np.float32(0.5) * np.array([[0.5, -1.0], [1.0, 0.25], [-0.5, 0.0]], np.float32)
    for t in range(1, 9):
        seen, reward, done, infos = copies.step(2 * push)
        place = np.clip(place + push, -1.0, 1.0)
        np.testing.assert_allclose(reward, 1 - np.abs(place - 0.5).mean(1), rtol=1e-6)
        assert done.tolist() == [t % 4 == 0] * 3
        if t % 4:
            np.testing.assert_allclose(seen[:, :2], place, rtol=1e-6)
            continue
        np.testing.assert_allclose([info["terminal_observation"][:2] for info in infos], place, rtol=1e-6)
        assert all(info["TimeLimit.truncated"] for info in infos)
        assert np.abs(seen[:, :2] - place).min() > 1e-4
        place = seen[:, :2]


@pytest.mark.long
@pytest.mark.parametrize(
    "learner",
    [
        pytest.param("brax_sac", marks=needs("brax")),
        pytest.param("sbx_sac", marks=needs("sbx")),
        pytest.param("sbx_td3", marks=needs("sbx")),
    ],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # their own
def test_replay_learners_of_others(learner):
    """They make the steps that they are asked for, and an update for each one after the random steps."""
    task = Task(POINT, 64, num_envs=4, random_steps=16, hidden_size=8, batch_size=8)
    with quiet():  # the tests forbid what these libraries do
        known_peers.load(learner)
        trained = known_peers.LEARNERS[learner](task, 1)
    assert (trained.env_steps, trained.updates) == (64, 64 - 16)
    assert returns(task, trained.act, sample=False).shape == (EPISODES,)


@needs("brax")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # its own
def test_our_environment_behind_the_interface_of_brax():
    """Observations and rewards are those of the environment itself."""
    task = Task(POINT, 0, options={"horizon": 50})
    env, key = task.make(), jax.random.PRNGKey(3)
    game = known_peers._brax_env(env)
    state = game.reset(key)
    inner, timestep = env.reset(jax.random.wrap_key_data(key))
    for action in ([0.5, -1.0], [1.0, 0.25]):
        state = game.step(state, jnp.array(action))
        inner, timestep = env.step(inner, jnp.array([action]))
        np.testing.assert_array_equal(state.obs, timestep.observation[0])
        assert state.reward == timestep.reward[0]
