"""Conditions that one program plays: the episodes of each are those of an environment of its own, to the last bit."""

import dataclasses
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.coverage import make

from envs_jax.batch import EpisodeStatistics
from envs_jax.coverage.env import Coverage
from jaxrl.algos import coma, ppo
from jaxrl.evaluation import conditions, policies
from jaxrl.evaluation.conditions import Condition, Outcome
from jaxrl.evaluation.policies import PolicySet
from jaxrl.rl.data_parallel import DataParallel
from jaxrl.runtime import rollouts
from jaxrl.runtime.config import build

TINY = {"q": 3, "budget": 3, "communication_range": 50.0}


def make_policies(algo: str, settings: dict[str, Any], **env_settings: Any) -> PolicySet:
    """Two seeds of an untrained policy, whose weights are large so that no two actions are equally good."""
    config = build({"env": "coverage", "algo": algo, **TINY, **env_settings, **settings}, "settings")
    scripted = policies.load(None, "coverage", config.env_settings)
    cls: Any = {"ppo": ppo.Ppo, "coma": coma.Coma}[algo]
    learner = cls(scripted.env.spec, DataParallel(1), **settings | cls.acting_settings)

    def draw(seed: int) -> Any:
        params = jax.jit(lambda key: learner.policy(learner.init(key, None)))(jax.random.key(seed))
        return jax.tree.map(lambda leaf: np.asarray(leaf * 4 if leaf.dtype == jnp.float32 else leaf), params)

    seeds = draw(0), draw(1)
    return dataclasses.replace(scripted, config=config, algo=learner, params=seeds[0], seed_params=seeds)


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """All programs that evaluations compile; an evaluator has two, of the start and of the steps."""
    made: list[Any] = []

    class Counted(rollouts.Program):
        def __init__(self, *arguments: Any):
            super().__init__(*arguments)
            made.append(self)

    monkeypatch.setattr(rollouts, "Program", Counted)
    return made


def play(policy_set: PolicySet, settings: list[dict[str, Any]], names: list[str], episodes: int = 6) -> list[Outcome]:
    chosen = [Condition(str(number), changes) for number, changes in enumerate(settings)]
    return conditions.rollout(policy_set, chosen, names, episodes, seed=3)


def check_same(policy_set: PolicySet, settings: list[dict[str, Any]], names: list[str]) -> list[Outcome]:
    """Play all conditions together, and each alone; return the outcomes."""
    together = play(policy_set, settings, names)
    alone = [outcome for changes in settings for outcome in play(policy_set, [changes], names)]
    assert [outcome.policy for outcome in together] == [outcome.policy for outcome in alone]
    assert [outcome.condition for outcome in together] == [str(i) for i in range(len(settings)) for _ in names]
    for one, other in zip(together, alone, strict=True):
        assert list(one.ends) == list(other.ends)
        for metric, values in other.ends.items():
            np.testing.assert_array_equal(one.ends[metric], values, err_msg=f"{one.condition}, {one.policy}, {metric}")
    return together


MIXED: list[dict[str, Any]] = [
    {"failure_rate": 0.5},
    {"delay": 2, "team_sizes": [2], "communication_range": 15.0},
    {"num_agents": 5, "loss_rate": 0.3},
]
TEAM = {"memory": "gru", "message_passing": "attention", "hidden_size": 8, "memory_size": 8, "message_heads": 2}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algo", "settings"),
    [
        ("ppo", {**TEAM, "depth": 1, "critic": "central"}),
        ("ppo", {"hidden_size": 8}),
        ("coma", {"hidden_size": 8, "egocentric": True}),
        ("coma", {**TEAM, "depth": 1}),
    ],
    ids=["memory-and-messages", "ppo", "coma", "coma-team"],
)
def test_numbers_are_those_of_programs_of_their_own(algo: str, settings: dict[str, Any], programs: list[Any]) -> None:
    policy_set = make_policies(algo, settings, num_agents=3)
    together = check_same(policy_set, MIXED, ["learned", "sampled", "ig", "random"])
    assert len(programs) == 2 * (1 + len(MIXED))  # for all conditions, then for each alone
    assert together[0].ends["entropy"].shape == (2, 6)  # seeds, episodes
    assert "uavs" not in together[0].ends and {"uavs", "delivered"} <= set(together[4].ends)
    for policy in range(4):  # no condition is another one
        assert len({tuple(outcome.ends["entropy"].ravel()) for outcome in together[policy::4]}) == len(MIXED)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fixed", "settings"),
    [
        ({"channel_ramp": 0.5, "failure_rate": (0.1, 0.6), "delay": (0, 1, 3)},
         [{}, {"failure_rate": [0.9]}, {"delay": 2}, {"channel_ramp": 0.0, "delay": [3]}]),
        ({"mission_metrics": True, "num_agents": 6, "team_sizes": (2, 4, 6)},
         [{"team_sizes": [2, 6]}, {"team_sizes": [5]}, {"team_sizes": []}, {"team_sizes": [], "num_agents": 11}]),
        ({"random_range": True, "start": "corners", "terrain": "mixed", "num_actions": 27},
         [{"num_agents": 1}, {"num_agents": 2, "loss_rate": 0.1}, {"num_agents": 7, "failure_rate": 1.0}]),
        ({"q": 15, "map_backend": "windows"}, [{"num_agents": 2, "delay": 1}, {"num_agents": 4}]),
        ({"show_ages": True}, [{"delay": 1}, {"delay": 3, "failure_rate": 0.5}, {"team_sizes": [3]}]),
    ],
    ids=["lists-and-ramp", "team-sizes", "numbers-of-agents", "windows", "ages"],
)  # fmt: skip
def test_scripted_policies_play_the_same(
    fixed: dict[str, Any], settings: list[dict[str, Any]], programs: list[Any]
) -> None:
    policy_set = policies.load(None, "coverage", {**TINY, **fixed})
    check_same(policy_set, settings, ["ig", "ig_sequential", "lawnmower", "random"])
    assert len(programs) == 2 * (1 + len(settings))


def test_missions_draw_the_same_from_a_context() -> None:
    """Terrain, start, range, failure rate, delay and team of 100 missions, of lists of several lengths."""
    usual = {"budget": 5, "start": "uniform"}
    envs = [
        make(**usual, failure_rate=(0.1, 0.3, 0.3), delay=(0, 4), num_agents=4, team_sizes=(1, 3)),
        make(**usual, failure_rate=0.7, delay=2, num_agents=7, communication_range=40.0),
        make(**usual, delay=(1, 2, 3), num_agents=2, channel_ramp=0.5, area=50.0),
    ]
    env, contexts = envs[0].join(envs[1:])
    draw = jax.jit(jax.vmap(env._draw_mission, in_axes=(0, None)))
    keys = jax.random.split(jax.random.key(1), 100)
    for one, context in zip(envs, contexts, strict=True):
        agents, alone = one.num_agents, one.for_evaluation()
        own, mission = jax.jit(jax.vmap(alone._draw_mission))(keys), draw(keys, context)
        np.testing.assert_array_equal(own.positions, mission.positions[:, :agents])
        np.testing.assert_array_equal(own.comm_range, mission.comm_range)
        np.testing.assert_array_equal(own.channel.failure_rate, mission.channel.failure_rate)
        np.testing.assert_array_equal(own.channel.delay, mission.channel.delay)
        sizes = own.team.size if one.has_teams else np.full(100, agents)
        np.testing.assert_array_equal(sizes, mission.team.size)
        np.testing.assert_array_equal(mission.team.present.sum(1), sizes)
        assert int(env.count_agents(context)) == agents == one.count_agents(())
    assert draw._cache_size() == 1


class Ruled(Coverage):
    """A user's rules, which know nothing of contexts."""


def test_what_a_program_must_know_is_not_joined() -> None:
    base = make(num_agents=4)
    for other in (
        make(num_agents=4, q=4), make(num_agents=4, budget=5), make(num_agents=4, random_range=True),
        make(num_agents=4, mission_metrics=True), make(num_agents=4, communication_range=0.0),
    ):  # fmt: skip
        assert base.join([other]) is None and base.join([base, other]) is None
    assert make(show_ages=True, num_agents=4).join([make(show_ages=True, num_agents=5)]) is None
    assert make(map_backend="pallas").join([make(map_backend="pallas", num_agents=5)]) is not None
    assert Ruled(q=3).join([Ruled(q=3, failure_rate=0.5)]) is None


@pytest.mark.slow
def test_groups_are_played_in_turn_and_reported_in_order(programs: list[Any]) -> None:
    policy_set = policies.load(None, "coverage", {**TINY, "num_agents": 2})
    settings = [{}, {"q": 4}, {"failure_rate": 1.0}, {"q": 4, "failure_rate": 1.0}]
    check_same(policy_set, settings, ["ig"])
    assert len(programs) == 2 * (2 + len(settings))


def test_long_evaluations_have_no_empty_places() -> None:
    """Places of agents that are not there cost time: where many episodes are played, arrays have their own lengths."""
    policy_set = policies.load(None, "coverage", TINY)
    changed = [policy_set.with_env_settings({"num_agents": n, "failure_rate": 0.1}) for n in (4, 6, 4)]
    changed.append(policy_set.with_env_settings({"num_agents": 6, "team_sizes": [2]}))

    def members(episodes: int) -> list[list[int]]:
        return [list(group.contexts) for group in conditions._group(changed, episodes)]

    assert members(100) == [[0, 1, 2, 3]]
    assert members(1_000_000) == [[0, 2], [1, 3]]


def test_learners_that_know_no_absent_agents_get_none() -> None:
    policy_set = policies.load(None, "coverage", {**TINY, "num_agents": 3})
    algo: Any = types.SimpleNamespace(weighs_agents=False)
    changed = [
        dataclasses.replace(policy_set.with_env_settings(settings), algo=algo)
        for settings in ({}, {"failure_rate": 0.5}, {"num_agents": 2})
    ]
    assert conditions._join(changed) is None and conditions._join(changed[:2]) is not None


def test_returns_are_means_over_the_agents_that_there_are() -> None:
    returns = jnp.array([[1.0, 2.0, 6.0, 100.0]])
    statistics = EpisodeStatistics(returns=returns, length=jnp.ones(1), metrics={})
    assert float(rollouts.values(statistics, jnp.int32(3))["return"][0]) == 3.0
    assert float(rollouts.values(statistics, 4)["return"][0]) == 27.25
