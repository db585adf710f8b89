"""Environments on the host (Gymnasium, PettingZoo, EnvPool): what the packages return, ends, spaces, runs, refusals."""

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import host
from helpers.cases import by_day
from helpers.runs import outcome_rows

import envs_jax
import jaxrl
from envs_jax.base import TimeStep
from envs_jax.batch import BatchState, batched
from envs_jax.testing import check_types
from jaxrl.cli import evaluate, render, train
from jaxrl.common.errors import UsageError
from jaxrl.rl.data_parallel import make_mesh
from jaxrl.runtime.rollouts import Evaluator, scripted_policy
from jaxrl.runtime.session import Session

gymnasium: Any = pytest.importorskip("gymnasium", reason="gymnasium is not installed (extra 'gymnasium')")
pytest.importorskip("pettingzoo")
pytestmark = [pytest.mark.needs("gymnasium", "pettingzoo"), pytest.mark.filterwarnings("ignore")]  # of the packages
host.register()
COPIES = 3


def roll(batch: Any, actions: Any, seed: int = 0) -> tuple[list[TimeStep], BatchState]:
    """Return the time steps of all copies from a reset on, with auto-reset, for actions [T, B, A, ...]; the state."""
    keys = jax.random.split(jax.random.key(seed), len(actions[0]))
    state, timestep = jax.jit(batch.reset)(keys)
    rows, step = [timestep], jax.jit(batch.step)
    for action in actions:
        state, timestep = step(state, timestep, jnp.asarray(action, batch.spec.action.dtype))
        rows.append(timestep)
    return jax.device_get(rows), state


def seed_of(seed: int, copy: int, copies: int, episode: int) -> int:
    """Return the seed of an episode, computed without the adapter."""
    key = jax.random.fold_in(jax.random.split(jax.random.key(seed), copies)[copy], episode)
    return int(jax.random.bits(key, dtype=jnp.uint32)) // 2


def play_by_hand(name: str, actions: Any, copies: int, **keywords: Any) -> list[list[tuple[Any, ...]]]:
    """Return (observation, reward, terminated, truncated, first) of each step and copy, from Gymnasium itself."""
    envs, rows = [gymnasium.make(name, **keywords) for _ in range(copies)], []
    episodes, over = [0] * copies, [False] * copies

    def begin(copy: int) -> tuple[Any, ...]:
        over[copy] = False
        return envs[copy].reset(seed=seed_of(0, copy, copies, episodes[copy]))[0], 0.0, False, False, True

    rows.append([begin(copy) for copy in range(copies)])
    for action in actions:
        row = []
        for copy in range(copies):
            if over[copy]:
                episodes[copy] += 1
                row.append(begin(copy))
                continue
            observation, reward, terminated, truncated, _ = envs[copy].step(action[copy, 0])
            over[copy] = terminated or truncated
            row.append((observation, reward, terminated, truncated and not terminated, False))
        rows.append(row)
    return rows


@pytest.mark.parametrize(("name", "horizon"), [("CartPole-v1", 21), ("Pendulum-v1", 7)])
def test_transitions_equal_those_of_gymnasium(name: str, horizon: int) -> None:
    """Also final observations, both kinds of ends, the restart in the next step, and the seed of each episode."""
    env, rng = envs_jax.make(f"gymnasium:{name}", horizon=horizon), np.random.default_rng(0)
    if name == "CartPole-v1":
        actions: Any = rng.integers(0, 2, (60, COPIES, 1))
    else:
        actions = rng.uniform(-2, 2, (60, COPIES, 1, 1)).astype(np.float32)
    rows, _ = roll(batched(env), actions)
    expected = play_by_hand(name, actions, COPIES, max_episode_steps=horizon)
    for row, theirs in zip(rows, expected, strict=True):
        for copy, (observation, reward, terminated, truncated, first) in enumerate(theirs):
            np.testing.assert_array_equal(row.observation[copy, 0], observation.astype(np.float32))
            np.testing.assert_allclose(row.reward[copy, 0], reward, rtol=1e-6)
            assert (row.terminated[copy], row.truncated[copy], row.first[copy]) == (terminated, truncated, first)
    assert sum(row.truncated.sum() for row in rows) > 2
    assert (sum(row.terminated.sum() for row in rows) > 2) == (name == "CartPole-v1")


def test_an_episode_that_has_ended_rests_without_auto_reset() -> None:
    batch = batched(envs_jax.make("gymnasium:host/Screen-v0", horizon=3))
    keys = jax.random.split(jax.random.key(0), 2)
    state, timestep = batch.reset(keys)
    action = jnp.ones((2, 1), jnp.int32)
    for t in range(1, 6):
        state, timestep = batch.step_without_reset(state, action, ())
        np.testing.assert_allclose(timestep.observation[:, 0, 0, 0, 0] * 255, [min(t, 3)] * 2, rtol=1e-6)
        np.testing.assert_array_equal(timestep.truncated, [t >= 3] * 2)
        np.testing.assert_array_equal(timestep.reward, [[float(t <= 3)]] * 2)


def test_copies_of_evaluation_are_not_those_of_training() -> None:
    env = envs_jax.make("gymnasium:CartPole-v1", horizon=30)
    actions = np.random.default_rng(1).integers(0, 2, (20, COPIES, 1))
    alone, _ = roll(batched(env), actions)
    batch, other = batched(env), batched(env.for_evaluation())
    assert batch != other
    evaluator = Evaluator(other, scripted_policy(other, "random"), 4, make_mesh(1))
    finals = evaluator.jit_final_values()
    state, timestep = batch.reset(jax.random.split(jax.random.key(0), COPIES))
    for t, action in enumerate(actions):
        np.testing.assert_array_equal(timestep.observation, alone[t].observation)
        state, timestep = batch.step(state, timestep, jnp.asarray(action, jnp.int32))
        if t % 8 == 0:
            values = finals((), jax.random.key(7), ())
    assert (np.asarray(values["length"]) > 5).all() and other.failure is None
    np.testing.assert_array_equal(values["length"], finals((), jax.random.key(7), ())["length"])


def test_a_state_can_be_stepped_only_once() -> None:
    batch = batched(envs_jax.make("gymnasium:CartPole-v1"))
    state, timestep = batch.reset(jax.random.split(jax.random.key(0), 2))
    action = jnp.zeros((2, 1), jnp.int32)
    batch.step(state, timestep, action)
    assert batch.failure is None
    _, timestep = batch.step(state, timestep, action)
    assert "where a state can be stepped only once" in str(batch.failure)
    assert np.isnan(timestep.reward).all() and timestep.terminated.all()


@pytest.mark.parametrize("enabled", [False, True])
def test_a_single_copy_with_and_without_x64(enabled: bool) -> None:
    """`reset` and `step` of the environment itself, with the types that training relies on."""
    theirs = gymnasium.make("CartPole-v1")
    seed = int(jax.random.bits(jax.random.key(3), dtype=jnp.uint32)) // 2
    with jax.enable_x64(enabled):
        env = envs_jax.make("gymnasium:CartPole-v1", horizon=9)
        check_types(env)
        state, timestep = env.reset(jax.random.key(3))
        np.testing.assert_array_equal(timestep.observation[0], theirs.reset(seed=seed)[0])
        for _ in range(3):
            state, timestep = jax.jit(env.step)(state, jnp.ones(1, jnp.int32))
            np.testing.assert_array_equal(timestep.observation[0], theirs.step(1)[0])
    assert timestep.observation.dtype == timestep.reward.dtype == jnp.float32


# Spaces


def test_dictionaries_and_several_integers() -> None:
    """Parts are joined by name; an action is the index of a combination, the last integer varies first."""
    env = envs_jax.make("gymnasium:host/Parts-v0")
    assert (env.spec.observation.shape, env.spec.action.n, env.spec.horizon) == ((14,), 24, host.LIMIT)
    chosen = [0, 1, 4, 13, 23]
    host.Parts.played.clear()
    rows, _ = roll(batched(env), np.reshape(chosen, (5, 1, 1)))
    expected = [(i, 5 + j, k) for i in range(2) for j in range(3) for k in range(4)]
    assert host.Parts.played == [expected[index] for index in chosen]
    for t, row in enumerate(rows):
        np.testing.assert_allclose(row.observation[0, 0], np.float32(host.flat_parts(t)))
    seen = envs_jax.make("gymnasium:host/Parts-v0", observe="two").spec.observation
    assert (seen.shape, seen.lowest, seen.highest) == ((5,), 0, 1)


def test_images_of_bytes() -> None:
    env = envs_jax.make("gymnasium:host/Screen-v0")
    assert (env.spec.observation.shape, env.spec.observation.highest) == ((9, 10, 2), 1)
    rows, _ = roll(batched(env), np.ones((2, 1, 1), np.int32))
    expected = np.moveaxis(np.arange(180).reshape(2, 9, 10), 0, -1)
    for t, row in enumerate(rows):
        np.testing.assert_allclose(row.observation[0, 0], (expected + t) / 255, rtol=1e-6)


@pytest.mark.parametrize("ends", ["terminated", "truncated"])
def test_a_team_of_pettingzoo(ends: str) -> None:
    """An agent that leaves sees zeros and gets nothing; the episode ends with the last agent."""
    env = envs_jax.make("pettingzoo:helpers.host", arguments=json.dumps({"ends": ends}))
    assert (env.spec.num_agents, env.spec.observation.shape, env.spec.action.n) == (2, (2,), 3)
    rows, _ = roll(batched(env), np.full((5, 1, 2), 2))
    seen = [[[t, 0], [t, 1]] for t in range(3)] + [[[0, 0], [t, 1]] for t in (3, 4)] + [[[0, 0], [0, 1]]]
    np.testing.assert_array_equal([row.observation[0] for row in rows], seen)
    rewards = [[0, 0], [2, 2], [2, 2], [0, 2], [0, 2], [0, 0]]
    np.testing.assert_array_equal([row.reward[0] for row in rows], rewards)
    over = [t == 4 for t in range(6)]
    assert [bool(row.terminated[0]) for row in rows] == [x and ends == "terminated" for x in over]
    assert [bool(row.truncated[0]) for row in rows] == [x and ends == "truncated" for x in over]
    assert [row.action_mask[0, 1].tolist() for row in rows[:2]] == [[True, False, True], [True] * 3]


@pytest.mark.parametrize("enabled", [False, True])
def test_a_team_of_several_types(enabled: bool) -> None:
    """By hand: padding, masks, integers of each agent, an agent that leaves, returns by type; with x64 too."""
    with jax.enable_x64(enabled):
        env = envs_jax.make("pettingzoo:helpers.hunt")
        check_types(env)
        rows, _ = roll(batched(env), [[[1, 2, 3]], [[2, 0, 0]], [[3, 2, 1]], [[0, 0, 0]]])
    spec = env.spec
    assert (spec.num_agents, spec.observation.shape, spec.action.n, spec.agent_types) == (3, (2,), 4, (0, 1, 0))
    assert spec.metrics == {"return_hunter": "sum", "return_prey": "sum"}
    prey = [[0, 0], [1, 0], [2, 0], [0, 0], [0, 0]]  # zeros after it has left, too
    seen = [[[t, 1], prey[row], [t, 1]] for row, t in enumerate((0, 1, 2, 3, 0))]
    np.testing.assert_array_equal([row.observation[0] for row in rows], seen)
    # 1, 2, 3 of two integers are (0, 1), (1, 0), (1, 1); the prey's third action comes after its end
    rewards = [[0, 0, 0], [1, -2, 11], [10, 0, 0], [11, 0, 1], [0, 0, 0]]
    np.testing.assert_array_equal([row.reward[0] for row in rows], rewards)
    np.testing.assert_array_equal([row.metrics["return_hunter"][0] for row in rows], [0, 6, 5, 6, 0])
    np.testing.assert_array_equal([row.metrics["return_prey"][0] for row in rows], [0, -2, 0, 0, 0])
    masks = [[1, 1, 1, 0], [1, 0, 1, 0], [1, 1, 1, 0], [1, 1, 1, 0], [1, 1, 1, 0]]
    np.testing.assert_array_equal([row.action_mask[0] for row in rows], [[[1] * 4, mask, [1] * 4] for mask in masks])
    assert [bool(row.truncated[0]) for row in rows] == [False, False, False, True, False]


@pytest.mark.needs("mpe2")
def test_tag_steps_as_pettingzoo_does() -> None:
    """Adversaries see 16 numbers and the agent 14, after which zeros come."""
    tag = importlib.import_module("mpe2.simple_tag_v3").parallel_env()
    env = envs_jax.make("pettingzoo:mpe2.simple_tag_v3")
    assert env.spec.agent_types == (0, 0, 0, 1)
    actions = np.random.default_rng(0).integers(0, 5, (25, 1, 4))
    rows, _ = roll(batched(env), actions)
    observations, rewards = tag.reset(seed=seed_of(0, 0, 1, 0))[0], dict.fromkeys(tag.possible_agents, 0.0)
    for t, row in enumerate(rows):
        for index, agent in enumerate(tag.possible_agents):
            np.testing.assert_array_equal(row.observation[0, index], np.resize([*observations[agent], 0, 0], 16))
            np.testing.assert_allclose(row.reward[0, index], rewards[agent], rtol=1e-6)
        if t < len(actions):
            chosen = dict(zip(tag.possible_agents, actions[t, 0].tolist(), strict=True))
            observations, rewards, *_ = tag.step(chosen)
    assert rows[-1].truncated[0] and not any(row.truncated[0] for row in rows[:-1])


@pytest.mark.needs("envpool")
def test_envpool() -> None:
    """The pool itself, made with the same seed; both restart an ended copy in the next step."""
    import envpool

    env = envs_jax.make("envpool:CartPole-v1", horizon=15)
    actions = np.random.default_rng(0).integers(0, 2, (50, COPIES, 1))
    rows, _ = roll(batched(env), actions)
    pool = envpool.make_gymnasium("CartPole-v1", num_envs=COPIES, seed=seed_of(0, 0, COPIES, 0), max_episode_steps=15)
    np.testing.assert_array_equal(rows[0].observation[:, 0], pool.reset()[0])
    for row, action in zip(rows[1:], actions, strict=True):
        observation, reward, terminated, truncated, _ = pool.step(action[:, 0])
        np.testing.assert_array_equal(row.observation[:, 0], observation)
        np.testing.assert_array_equal(row.reward[:, 0], np.where(row.first, 0, reward))
        np.testing.assert_array_equal(row.terminated, terminated)
        np.testing.assert_array_equal(row.truncated, truncated & ~terminated)
    assert sum(row.terminated.sum() for row in rows) and sum(row.truncated.sum() for row in rows)
    assert sum(row.first.sum() for row in rows) > 2 * COPIES


@pytest.mark.needs("envpool")
def test_an_episode_of_envpool_that_has_ended_rests_without_auto_reset() -> None:
    batch = batched(envs_jax.make("envpool:CartPole-v1", horizon=12))
    state, timestep = batch.reset(jax.random.split(jax.random.key(0), COPIES))
    step, timestep = jax.jit(batch.step_without_reset), jax.device_get(timestep)
    for _ in range(18):
        state, after = step(state, jnp.ones((COPIES, 1), jnp.int32), ())
        after = jax.device_get(after)
        np.testing.assert_array_equal(after.reward[:, 0], ~timestep.done)
        changed = (after.observation != timestep.observation).any(axis=(1, 2))
        np.testing.assert_array_equal(changed, ~timestep.done)
        timestep = after
    assert timestep.done.all()


# Runs

SMALL = "--hidden_size 8 --num_envs 4 --eval_episodes 8 --memory_gb 8"
PPO = f"--algo ppo --env gymnasium:CartPole-v1 --rollout_steps 16 --num_minibatches 2 {SMALL} --eval_every 128"
RUNS = {
    "cartpole, ppo": f"{PPO} --total_env_steps 256",
    "pendulum, ppo": PPO.replace("CartPole", "Pendulum") + " --total_env_steps 256",
    "pendulum, sac": f"--algo sac --env gymnasium:Pendulum-v1 --random_steps 16 --batch_size 16 --horizon 20 {SMALL} "
    "--total_env_steps 240 --eval_every 120",
    "parts, ppo": PPO.replace("CartPole-v1", "host/Parts-v0") + " --total_env_steps 128",
    "screen, ppo": PPO.replace("CartPole-v1", "host/Screen-v0") + " --total_env_steps 128",
    "pair, coma": f"--algo coma --env pettingzoo:helpers.host --horizon 6 --total_env_steps 96 --num_epochs 1 {SMALL}",
    "hunt, ppo": f"{PPO} --total_env_steps 128 --share_parameters false --env pettingzoo:helpers.hunt",
}


@pytest.mark.parametrize("case", by_day(RUNS, ["cartpole, ppo", "pendulum, sac"]))
def test_trains(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Train, evaluate, act and resume; the first case twice, which gives the same run.

    On resuming, the last time step before the stop becomes a truncation.
    """
    cut_episodes, cuts = Session._cut_episodes, []

    def record(self: Session, state: Any) -> Any:
        after = cut_episodes(self, state)
        cuts.append(jax.device_get((state.timestep, after.timestep)))
        return after

    monkeypatch.setattr(Session, "_cut_episodes", record)
    monkeypatch.chdir(tmp_path)
    words, first = RUNS[case].split(), case == next(iter(RUNS))
    assert train.main(words) == 0
    said = capsys.readouterr().out
    assert "steps on the host, which took" in said
    run = Path((tmp_path / "runs" / "latest").read_text().strip())
    if first:
        assert train.main(words) == 0
        again = Path((tmp_path / "runs" / "latest").read_text().strip())
        assert (
            outcome_rows(run) == outcome_rows(again)
            and again != run
            and any("eval/return" in row for row in outcome_rows(run))
        )
    assert evaluate.main([str(run), "--episodes", "3"]) == 0
    policy = jaxrl.load(run)
    observation = np.zeros((policy.env.spec.num_agents, *policy.env.spec.observation.shape), np.float32)
    shapes = {"pair, coma": (2, 3), "hunt, ppo": (3, 4)}
    masks = {"action_mask": np.ones(shapes[case], bool)} if case in shapes else {}
    assert len(policy(observation, **masks)[0]) == policy.env.spec.num_agents
    capsys.readouterr()
    total = 2 * int(words[words.index("--total_env_steps") + 1])
    assert train.main(["--resume", str(run), "--total_env_steps", str(total)]) == 0
    said = capsys.readouterr().out.replace("\n", " ")
    is_cut = "coma" not in case  # whose iterations begin with new episodes
    assert ("cannot be saved: all begin new episodes" in said) == is_cut
    for before, after in cuts if is_cut else []:
        np.testing.assert_array_equal(after.observation, before.observation)
        np.testing.assert_array_equal(after.truncated, ~before.terminated)
        assert after.done.all()
    assert cuts or not is_cut


@pytest.mark.parametrize("algo", by_day(["ppo", "ddpg"], ["ppo"]))
def test_a_run_equals_that_of_the_same_environment_in_jax(algo: str, tmp_path: Path, monkeypatch: Any) -> None:
    """A walk in which nothing is random: metrics of episodes and of learning, and evaluations."""
    monkeypatch.chdir(tmp_path)
    settings = "--rollout_steps 16 --num_minibatches 2" if algo == "ppo" else "--learning_starts 16 --batch_size 16"
    runs = []
    for env in ("gymnasium:host/Line-v0", "helpers.host:JaxLine"):
        words = f"--algo {algo} --env {env} {settings} {SMALL} --seed 1 --total_env_steps 512 --eval_every 128"
        assert train.main(words.split()) == 0
        runs.append(outcome_rows(Path((tmp_path / "runs" / "latest").read_text().strip())))
    assert len(runs[0]) == len(runs[1]) > 4 and any("return" in name for row in runs[0] for name in row)
    for row, other in zip(*runs, strict=True):
        assert row.keys() == other.keys()
        np.testing.assert_allclose(list(row.values()), list(other.values()), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("command", ["train", "evaluate"])
def test_an_environment_that_raises(command: str, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    if command == "train":
        code = train.main(f"{RUNS['pendulum, ppo']} --env gymnasium:host/Fragile-v0".split())
    else:
        code = evaluate.main(["--env", "gymnasium:host/Fragile-v0", "--episodes", "2", "--policy", "random"])
    error = capsys.readouterr().err
    assert code == 1 and error.count("in the environment:\nTraceback") == error.count("Traceback") == 1
    place = "'gymnasium:host/Fragile-v0' failed on the host in step 4 of environment 0"
    assert error.splitlines()[-1] == f"error: {place} (RuntimeError: the rope broke): correct it and start again"


@pytest.mark.slow
def test_large_arrays_on_one_core_end_in_time() -> None:
    """The program waits for the host and the host for the program's actions: megabytes, on one thread."""
    code = (
        "import jax, jax.numpy as jnp; from helpers import host; host.register(); import envs_jax\n"
        "env = envs_jax.make('gymnasium:host/Fragile-v0', arguments='{\"size\": 20000, \"last\": -1}')\n"
        "batch = envs_jax.batched(env); keys = jax.random.split(jax.random.key(0), 64)\n"
        "def step(carry, t):\n"
        "    action = jnp.tanh(carry[1].observation + jnp.float32(0.1))\n"
        "    return batch.step(*carry, action), carry[1].reward\n"
        "run = jax.jit(lambda keys: jax.lax.scan(step, batch.reset(keys), jnp.arange(20))[1])\n"
        "print(run(keys).sum(), batch.failure)"
    )
    root = Path(__file__).parents[1]
    environment = {"PYTHONPATH": f"{root}:{root / 'tests'}", "JAX_PLATFORMS": "cpu", "PATH": "/usr/bin:/bin"}
    command = ["taskset", "-c", "0", sys.executable, "-c", code]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=180)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split()[-1] == "None"


# Refusals


@pytest.mark.parametrize(
    ("name", "settings", "sentence"),
    [
        ("gymnasium:CartPol-v1", {}, "unknown environment 'gymnasium:CartPol-v1': did you mean 'CartPole-v1'"),
        ("gymnasium:absent_module:X-v0", {}, "there is no module 'absent_module' on the Python path"),
        ("pettingzoo:absent", {}, "unknown environment 'pettingzoo:absent'"),
        ("pettingzoo:helpers.tiny", {}, "has no parallel_env, and jaxrl trains only agents"),
        ("pettingzoo:helpers.hunt", {"arguments": '{"boxes": true}'}, "different actions that are not all integers"),
        ("pettingzoo:helpers.hunt", {"arguments": '{"images": true}'}, "different observations, some of them images"),
        ("gymnasium:host/Parts-v0", {"arguments": '{"other": "text"}'}, "has observations of the kind Text in 'other'"),
        ("gymnasium:host/Parts-v0", {"arguments": '{"other": "sequence"}'}, "of the kind Sequence in 'other'"),
        ("gymnasium:host/Parts-v0", {"arguments": '{"other": "many"}'}, "actions of 6 integers with 531,441 combinat"),
        ("gymnasium:host/Parts-v0", {"arguments": "other"}, "arguments must be a JSON object, such as"),
        ("gymnasium:host/Parts-v0", {"arguments": '{"size": 3}'}, "the package cannot make .*TypeError"),
        ("gymnasium:host/Parts-v0", {"observe": "boxes"}, "has no part 'boxes': did you mean 'box'"),
    ],
)
def test_refusals(name: str, settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        envs_jax.make(name, **settings)


@pytest.mark.parametrize("library", ["gymnasium", "pettingzoo", "envpool"])
def test_missing_package(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ValueError, match=rf"'{library}' is not installed: pip install -e '\.\[{library}\]'"):
        envs_jax.make(f"{library}:Absent-v0")


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("--devices 2", "serves only one device: use --devices 1"),
        ("--num_seeds 2", "where one run trains one policy: start a run for each seed"),
        ("--sweep actor_lr=1e-3,1e-4", "where one run trains one policy: start a run for each seed"),
    ],
)
def test_refused_runs(flags: str, sentence: str, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    assert train.main(f"{RUNS['cartpole, ppo']} {flags}".split()) == 2
    assert sentence in capsys.readouterr().err


def test_refused_functions(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UsageError, match="a function that JAX can vmap"):
        jaxrl.make_train("ppo", "gymnasium:CartPole-v1", num_envs=4, total_env_steps=1024)
    flags = "--env gymnasium:CartPole-v1 --policy random --out mission.html"
    assert render.main(flags.split()) == 2
    assert "has no viewer" in capsys.readouterr().err
