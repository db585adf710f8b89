"""Teams of PettingZoo whose agents enter, leave and end apart (issue 54): flags, presence, targets by hand."""

import dataclasses
import functools
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
from helpers.tiny import Corridor

import envs_jax
from envs_jax.base import TimeStep
from envs_jax.testing import ContractError, check_env, check_types
from jaxrl.algos.base import Trajectory
from jaxrl.algos.ppo import Ppo
from jaxrl.algos.targets import lambda_targets
from jaxrl.cli import train
from jaxrl.cli.flags import parse
from jaxrl.rl.data_parallel import DataParallel
from jaxrl.runtime.build import build_run

pytestmark = pytest.mark.needs("gymnasium", "pettingzoo")

pytest.importorskip("gymnasium", reason="gymnasium is not installed (extra 'gymnasium')")
pytest.importorskip("pettingzoo", reason="pettingzoo is not installed (extra 'pettingzoo')")
A, B = AGENTS
BOTH, NOBODY = frozenset(AGENTS), plan.NOBODY
SEEN = {A: np.ones(1), B: np.ones(1)}
OPEN = {A: [1, 1, 1], B: [1, 1, 1]}
TEAM = "pettingzoo:helpers.plan"


@pytest.fixture(autouse=True)
def _plain(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("returns", {}), ("unseen", NOBODY), ("masks", [])):
        monkeypatch.setattr(Plan, name, value)


@functools.cache
def program(complete_team: bool = False) -> tuple[Any, Any, Any]:
    """Return the batch of one copy, and its compiled reset and step."""
    batch = envs_jax.make(TEAM, complete_team=complete_team, horizon=50).batched()
    return batch, jax.jit(batch.reset), jax.jit(batch.step)


def play(rows: list[Row], monkeypatch: pytest.MonkeyPatch, complete_team: bool = False) -> tuple[Any, str | None]:
    """Return the time steps of a plan, leaves [T, 1, ...], and the failure."""
    monkeypatch.setattr(Plan, "rows", rows)
    batch, reset, step = program(complete_team)
    batch.vector.failure = None
    state, timestep = reset(jax.random.split(jax.random.key(0), 1))
    steps = [timestep]
    for _ in rows[1:]:
        state, timestep = step(state, timestep, jnp.zeros((1, 2), jnp.int32))
        steps.append(timestep)
    return jax.device_get(jax.tree.map(lambda *x: jnp.stack(x), *steps)), batch.failure


def targets(steps: TimeStep, value: Any, lambda_: float, gamma: float = 0.5) -> np.ndarray:
    """Return the targets [T, A] of the steps but the last, for values [T + 1, A] of all."""
    before, last = jax.tree.map(lambda x: x[:-1], steps), jax.tree.map(lambda x: x[-1], steps)
    trajectory = Trajectory(before, np.zeros((len(before.first), 1, 2), np.int32), ())
    values = np.asarray(value, np.float32)[:, None]
    return np.asarray(lambda_targets(trajectory, last, values[:-1], values[-1], gamma, lambda_))[:, 0]


# What becomes of one agent in a step. acts: in this step; flags; whether env.agents names it afterwards.
# Then by hand: acts next, only truncated, its target of this step's action for reward 1, gamma 0.5 and the value 8 of
# its last observation (None: it took no action).
TABLE = {
    "goes on": (True, "", True, True, False, 5.0),
    "leaves": (True, "", False, False, False, 1.0),
    "terminates, stays": (True, "terminated", True, False, False, 1.0),
    "terminates, leaves": (True, "terminated", False, False, False, 1.0),
    "truncates, stays": (True, "truncated", True, False, True, 5.0),
    "truncates, leaves": (True, "truncated", False, False, True, 5.0),
    "terminates and truncates, stays": (True, "terminated truncated", True, False, False, 1.0),
    "terminates and truncates, leaves": (True, "terminated truncated", False, False, False, 1.0),
    "stays out": (False, "", False, False, False, None),
    "enters": (False, "", True, True, False, None),
}
PAIRS = [pair for pair in itertools.product(TABLE, TABLE) if any(TABLE[one][0] for one in pair)]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("pair", PAIRS, ids="; ".join)
def test_ends_of_two_agents(pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """All combinations: the episode's flags, who is present, and the target of each action."""
    acts, flags, named, acts_next, cut, target = zip(*(TABLE[one] for one in pair), strict=True)

    def names(chosen: Any) -> frozenset[str]:
        return frozenset(itertools.compress(AGENTS, chosen))

    ended = [names(word in text for text in flags) for word in ("terminated", "truncated")]
    steps, failure = play([Row(names(acts)), Row(names(named), *ended)], monkeypatch)
    assert failure is None
    assert Plan.acted == [set(names(acts))]
    over = not any(acts_next)
    assert steps.truncated[1, 0] == (over and any(cut))
    assert steps.terminated[1, 0] == (over and not any(cut))
    np.testing.assert_array_equal(steps.present[0, 0], acts)
    np.testing.assert_array_equal(steps.present[1, 0], cut if over else acts_next)
    np.testing.assert_array_equal(steps.reward[1, 0], acts)  # 1 for those that acted
    shown = [acted or then for acted, then in zip(acts, acts_next, strict=True)]
    np.testing.assert_array_equal(steps.observation[1, 0, :, 0], 2.0 * np.array(shown))
    found = targets(steps, [[3, 3], [8, 8]], lambda_=0.0)[0]
    for agent, expected in enumerate(target):
        assert expected is None or found[agent] == expected


def test_targets_of_three_steps_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """gamma = lambda = 1/2; `a` is truncated alone in step 2, `b` terminates in step 3.

    b: y2 = 3; y1 = 2 + (8/2 + 3/2)/2 = 4.75; y0 = 1 + (4/2 + 4.75/2)/2 = 3.1875.
    a: y1 = 2 + 4/2 = 4, without lambda; y0 = 1 + (6/2 + 4/2)/2 = 3.5; no action in step 3.
    """
    rows = [Row(BOTH), Row(BOTH), Row({B}, truncated={A}), Row(NOBODY, terminated={B})]
    steps, failure = play(rows, monkeypatch)
    assert failure is None and steps.terminated[:, 0].tolist() == [False] * 3 + [True]
    np.testing.assert_array_equal(steps.cut[:, 0], [[False] * 2] * 2 + [[True, False]] + [[False] * 2])
    value = np.float32([[8, 2], [6, 4], [4, 8], [100, 100]])
    found = targets(steps, value, lambda_=0.5)
    np.testing.assert_allclose(found[:, 1], [3.1875, 4.75, 3])
    np.testing.assert_allclose(found[:2, 0], [3.5, 4])

    batch, _, _ = program()
    spec = batch.spec
    algo = Ppo(spec, DataParallel(1, 1, 1), gamma=0.5, td_lambda=0.5, rollout_steps=3, num_minibatches=1)
    before, last = jax.tree.map(lambda x: x[:-1], steps), jax.tree.map(lambda x: x[-1], steps)
    trajectory = Trajectory(jax.tree.map(jnp.asarray, before), jnp.zeros((3, 1, 2), jnp.int32), ())
    advantages = algo.compute_advantages(trajectory, last, value[:-1, None], value[-1, None])[:, 0]
    np.testing.assert_allclose(advantages[:, 1], [1.1875, 0.75, -5])
    np.testing.assert_allclose(advantages[:2, 0], [-4.5, -2])
    weights = np.asarray(algo.batches.sample_weights(trajectory))[:, 0]
    np.testing.assert_allclose(weights, np.array([[1, 1], [1, 1], [0, 1]]) * 6 / 5)


def test_targets_of_a_terminated_agent_among_truncated_mates(monkeypatch: pytest.MonkeyPatch) -> None:
    """`a`: y0 = 1 + (6/2 + 2/2)/2 = 3, y1 = 2. `b`: y1 = 2 + 8/2 = 6, y0 = 1 + (4/2 + 6/2)/2 = 3.5."""
    rows = [Row(BOTH), Row(BOTH), Row(NOBODY, terminated={A}, truncated={A, B})]
    steps, _ = play(rows, monkeypatch)
    assert steps.truncated[2, 0] and not steps.terminated[2, 0]
    found = targets(steps, [[9, 9], [6, 4], [8, 8]], lambda_=0.5)
    np.testing.assert_allclose(found, [[3, 3.5], [2, 6]])


def test_a_relay(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second agent enters when the first one ends; then the first comes back, and all leave without a flag."""
    rows = [Row({A}), Row({A}), Row({B}, terminated={A}), Row({B}), Row(BOTH), Row(NOBODY), Row({A})]
    steps, failure = play(rows, monkeypatch)
    assert failure is None
    present = [[1, 0], [1, 0], [0, 1], [0, 1], [1, 1], [0, 0], [1, 0]]
    np.testing.assert_array_equal(steps.present[:, 0], present)
    np.testing.assert_array_equal(steps.reward[:, 0], [[0, 0], [1, 0], [2, 0], [0, 3], [0, 4], [5, 5], [0, 0]])
    assert steps.terminated[:, 0].tolist() == [False] * 5 + [True, False]
    assert not steps.truncated.any() and steps.first[:, 0].tolist() == [True] + [False] * 5 + [True]


def test_an_agent_that_ended_and_stays_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is named in env.agents until the end, as by careless environments, and gets actions that count nowhere."""
    rows = [Row(BOTH), Row(BOTH, terminated={A}), Row(BOTH), Row(BOTH, terminated=BOTH)]
    steps, failure = play(rows, monkeypatch)
    assert failure is None and Plan.acted == [set(BOTH)] * 3
    np.testing.assert_array_equal(steps.present[:3, 0], [[1, 1], [0, 1], [0, 1]])
    np.testing.assert_array_equal(steps.reward[:, 0], [[0, 0], [1, 1], [0, 2], [0, 3]])
    assert steps.terminated[:, 0].tolist() == [False] * 3 + [True]


def test_the_horizon_cuts_those_that_are_present(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Plan, "rows", [Row(BOTH), Row(BOTH), Row({B}, terminated={A})])
    batch = envs_jax.make(TEAM, horizon=2).batched()
    state, step = batch.reset(jax.random.split(jax.random.key(0), 1))
    for _ in range(2):
        state, step = batch.step(state, step, jnp.zeros((1, 2), jnp.int32))
    assert step.truncated[0] and not step.terminated[0]
    np.testing.assert_array_equal(step.present[0], [False, True])


def test_spec_says_that_agents_may_be_absent() -> None:
    for complete_team in (False, True):
        env = envs_jax.make(TEAM, complete_team=complete_team)
        assert env.spec.absent_agents != complete_team
        check_types(env)


@pytest.mark.parametrize(
    ("rows", "agent"),
    [
        ([Row(BOTH), Row({B}, terminated={A})], A),
        ([Row({A})], B),
        ([Row(BOTH), Row(NOBODY, terminated={A}, truncated={B})], A),
        ([Row(BOTH), Row({A})], B),
    ],
)
def test_a_complete_team_refuses_agents_that_go_apart(
    rows: list[Row], agent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps, failure = play(rows, monkeypatch, complete_team=True)
    assert f"'{agent}' enters, leaves or ends apart from the others" in str(failure)
    assert "choose complete_team false, with ppo or coma" in str(failure)
    assert np.isnan(steps.reward[-1]).all()


@pytest.mark.parametrize("end", ["terminated", "truncated"])
def test_a_complete_team_ends_at_once(end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    steps, failure = play([Row(BOTH), Row(BOTH), Row(NOBODY, **{end: BOTH})], monkeypatch, complete_team=True)
    assert failure is None and getattr(steps, end)[:, 0].tolist() == [False, False, True]
    assert not jax.tree.leaves((steps.present, steps.cut))


def test_a_terminated_agent_needs_no_last_observation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Plan, "unseen", BOTH)
    for complete_team in (False, True):
        rows = [Row(BOTH), Row(NOBODY, terminated=BOTH)]
        steps, failure = play(rows, monkeypatch, complete_team)
        assert failure is None and steps.terminated[1, 0] and not steps.observation[1].any()


SMALL = f"--env {TEAM} --num_envs 2 --hidden_size 4 --total_env_steps 32 --eval_every 0 --memory_gb 8"


def test_off_policy_learners_refuse_teams_that_may_be_incomplete(tmp_path: Any, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Plan, "rows", [Row(BOTH), Row(BOTH), Row(NOBODY, terminated=BOTH)])
    words = f"--algo ddpg {SMALL} --learning_starts 8 --batch_size 8".split()
    assert train.main(words) == 2
    assert "(teams of pettingzoo: --complete_team true)" in capsys.readouterr().err
    assert build_run(parse([*words, "--complete_team", "true"]).config).env.spec.absent_agents is False


@pytest.mark.slow
@pytest.mark.parametrize("messages", ["none", "attention"])
def test_ppo_learns_from_a_relay(messages: str, tmp_path: Any, monkeypatch: Any, capsys: Any) -> None:
    """With messages, too, which absent agents do not send; the run resumes."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Plan, "rows", [Row({A}), Row(BOTH), Row({B}, truncated={A}), Row(NOBODY, terminated={B})])
    words = f"--algo ppo {SMALL} --rollout_steps 8 --num_minibatches 2 --message_passing {messages}"
    assert train.main(words.split()) == 0, capsys.readouterr().err
    run = (tmp_path / "runs" / "latest").read_text().strip()
    rows = map(json.loads, Path(run, "metrics.jsonl").read_text().splitlines())
    assert {row["rollout/length"] for row in rows if "rollout/length" in row} == {3.0}
    assert train.main(["--resume", run, "--total_env_steps", "64"]) == 0


# What PettingZoo's interface asks for


@pytest.mark.parametrize(
    ("returns", "sentence"),
    [
        ({"reset": {A: np.ones(1), B: np.ones(1)}}, "reset returned an object of type dict): return the pair "),
        ({"reset": (np.ones(1), np.ones(1))}, "reset returned 2 values): return the pair (observations, infos)"),
        ({"step": None}, "in step 1 of environment 0 (step returned None): return the five dictionaries observations"),
        ({"step": ({}, {}, {}, {})}, "step returned 4 values): return the five dictionaries"),
        ({"step": ({}, {}, {}, {}, None)}, "step returned 5 values): return the five dictionaries"),
        ({"step": ({}, {}, {A: "no"}, {}, {})}, "one of terminations is 'no', not true or false): return a bool"),
        ({"step": (SEEN, {A: None}, {}, {}, {})}, "a reward is None, not one number): return a number"),
        ({"step": (SEEN, {}, {}, {}, {A: 3})}, "an entry of infos is not a dictionary): return"),
        ({"step": ({A: np.ones(1)}, {}, {}, {}, {})}, "there is no observation of 'b_0', which is in env.agents): ret"),
        ({"step": ({B: np.ones(1)}, {}, {}, {A: True}, {})}, "no observation of 'a_0', which was truncated): return"),
    ],
)
def test_what_breaks_the_interface(returns: Any, sentence: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Plan, "returns", returns)
    named = {B} if "which was truncated" in sentence else BOTH
    _, failure = play([Row(BOTH), Row(named)], monkeypatch)
    assert sentence in str(failure) and str(failure).startswith(f"'{TEAM}' failed on the host")


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        ([Row(NOBODY)], "in a reset of environment 0 (env.agents is empty after a reset): list the agents"),
        ([Row(BOTH), Row({A, "c_0"})], "in step 1 of environment 0 ('c_0' is in env.agents): name it in possible_ag"),
    ],
)
def test_agents_that_cannot_be(rows: list[Row], sentence: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert sentence in str(play(rows, monkeypatch)[1])


# What `check_env` says about cuts


def cutting(present: Any, cut: Any) -> type[Corridor]:
    """Return a team of two in which these agents are present and cut after t steps."""

    class Cutting(Corridor):
        @property
        def spec(self) -> envs_jax.EnvSpec:
            return dataclasses.replace(super().spec, absent_agents=True)

        def _with_cuts(self, pair: Any) -> Any:
            state, step = pair
            flags = [jnp.asarray(flags)[jnp.minimum(state.t, len(flags) - 1)] for flags in (present, cut)]
            return state, dataclasses.replace(step, present=flags[0], cut=flags[1])

        def reset(self, key: Any, context: Any = None) -> Any:
            return self._with_cuts(super().reset(key, context))

        def step(self, state: Any, action: Any, context: Any = None) -> Any:
            return self._with_cuts(super().step(state, action, context))

    return Cutting


YES, NO, FIRST, SECOND = [True, True], [False, False], [True, False], [False, True]


@pytest.mark.parametrize(
    ("present", "cut", "sentence"),
    [
        ([YES, YES, FIRST], [NO, NO, SECOND, NO], None),
        ([YES], [NO, NO, SECOND, NO], r"agent 1 is cut and present at step 2 \(environment 0\): an agent that is cut"),
        ([YES, FIRST], [NO, SECOND, SECOND, NO], r"agent 1 is cut at step 2 .*, but was not present before"),
        ([FIRST, FIRST], [SECOND, NO], r"agent 1 is cut after reset .*: an episode begins without cuts"),
    ],
)
def test_a_cut_agent_was_present_and_is_no_longer(present: Any, cut: Any, sentence: str | None) -> None:
    env = cutting(present, cut)(num_agents=2, length=3)  # type: ignore[call-arg]
    if sentence is None:
        check_env(env)
    else:
        with pytest.raises(ContractError, match=sentence):
            check_env(env)


# Masks in infos


def test_masks_in_infos(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of agents that act; an agent that enters later has one too, and one that has ended needs none."""
    open_, half = [1, 1, 1], [1, 0, 1]
    monkeypatch.setattr(Plan, "masks", [{A: half}, {A: open_, B: [0, 0, 1]}, {B: half}, {}])
    monkeypatch.setattr(Plan, "rows", [Row({A}), Row(BOTH), Row({B}, terminated={A}), Row(NOBODY, terminated={B})])
    batch = envs_jax.make(TEAM, horizon=40).batched()
    state, step = batch.reset(jax.random.split(jax.random.key(0), 1))
    masks = [step.action_mask[0]]
    for _ in range(3):
        state, step = batch.step(state, step, jnp.zeros((1, 2), jnp.int32))
        masks.append(step.action_mask[0])
    assert batch.failure is None
    expected = [[half, open_], [open_, [0, 0, 1]], [open_, half], [open_, open_]]
    np.testing.assert_array_equal(masks, expected)


@pytest.mark.parametrize(
    ("masks", "sentence"),
    [
        ([OPEN, {A: [1, 1, 1]}], "in step 1 of environment 0 (there is no info['action_mask'])"),
        ([OPEN, {A: [1, 1], B: [1, 1, 1]}], "info['action_mask'] has the shape (2,), but its space has (3"),
        ([OPEN, {A: [1, 2, 1], B: [1] * 3}], "info['action_mask'] holds 2, outside of its space"),
        ([{}, OPEN], "(info has an action_mask, but had none after the first reset): return it"),
    ],
)
def test_masks_that_change(masks: Any, sentence: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Plan, "masks", masks)
    monkeypatch.setattr(Plan, "rows", [Row(BOTH), Row(BOTH)])
    batch = envs_jax.make(TEAM, horizon=41 + (not masks[0])).batched()  # which spaces there are is found once
    state, step = batch.reset(jax.random.split(jax.random.key(0), 1))
    batch.step(state, step, jnp.zeros((1, 2), jnp.int32))
    assert sentence in str(batch.failure)
