"""Any number of environments gets the updates, evaluations and snapshots that a preset has per environment step."""

import functools
from typing import Any

import pytest

from jaxrl import algos
from jaxrl.cli.flags import parse
from jaxrl.rl.data_parallel import DataParallel
from jaxrl.runtime import build, config
from jaxrl.runtime.presets import presets

# preset: environments, steps of each and updates in an iteration, iterations between evaluations, as published
PUBLISHED = {
    "bicnet": (1, 1, 1, 10000), "ddpg": (128, 1, 1, 2000), "ddpg_competition": (1, 1, 1, 10000),
    "ddpg_ext30": (1, 1, 1, 10000), "ddpg_ext30_multi": (8, 1, 1, 10000), "ddpg_ext35": (1, 1, 1, 10000),
    "ddpg_ext35_multi": (8, 10, 10, 10000), "ddpg_hour": (256, 1, 1, 4000), "ddpg_quick": (128, 1, 1, 1000),
    "ddpg_reach": (64, 1, 1, 250), "sac": (64, 1, 1, 250), "sac_quick": (64, 1, 1, 250),
    "sac_worker_gpu_server": (16, 1, 16, 250), "sac_worker_original": (1, 1, 1, 4000), "student": (64, 1, 1, 125),
    "student_original": (1, 1, 1, 4000), "student_sparse": (32, 1, 1, 160),
}  # fmt: skip


@functools.cache
def algo_of(*argv: str) -> tuple[Any, config.Config]:
    """The algorithm of a command, without compiling anything."""
    settings = parse([*argv, "--devices", "1"]).config
    if settings.algo == "student":
        settings = config.apply_changes(settings, {"teacher_weight": 0.0, "guide_steps": 0})
    spec, run = settings.make_env().spec, settings.run
    return algos.find(settings.algo)(spec, DataParallel(run.num_envs), **settings.algo_settings), settings


@pytest.mark.parametrize("preset", PUBLISHED)
def test_presets_make_the_updates_that_they_were_published_with(preset: str) -> None:
    algo, settings = algo_of("--config", preset)
    envs, steps, updates, evaluation = PUBLISHED[preset]
    train = algo.phases[-1]
    assert (settings.run.num_envs, train.steps, train.updates) == (envs, steps, updates)
    assert build.iterations_for(settings.run.eval_every, algo) == evaluation


@pytest.mark.parametrize("name", ["ddpg", "sac"])
@pytest.mark.parametrize("envs", [8, 24, 48, 64, 96, 100, 128, 1000, 4096])
def test_updates_per_environment_step_do_not_depend_on_the_number_of_environments(name: str, envs: int) -> None:
    usual, _ = algo_of("--algo", name)
    algo, settings = algo_of("--algo", name, "--num_envs", str(envs))
    train = algo.phases[-1]
    ratio = usual.layout.num_envs / usual.phases[-1].updates
    assert envs * train.steps / train.updates == pytest.approx(ratio, rel=0.1)
    between = build.iterations_for(settings.run.eval_every, algo) * envs * train.steps
    assert between == pytest.approx(settings.run.eval_every, rel=0.1)


@pytest.mark.parametrize("preset", presets())
def test_a_run_is_evaluated_twice_to_a_thousand_times(preset: str) -> None:
    """A preset whose eval_every counts iterations would be evaluated after each of thousands."""
    settings = parse(["--config", preset]).config
    run, cls = settings.run, algos.find(settings.algo)
    if run.eval_every:
        spec = settings.make_env().spec
        envs = run.num_envs or cls.default_num_envs(spec, settings.algo_settings)
        total = run.total_env_steps or run.total_episodes * spec.horizon
        assert 2 <= total / max(run.eval_every, envs) <= 1010


def test_a_run_that_sees_only_the_beginning_of_episodes_says_so() -> None:
    """The 400,000 steps of sac are 97 of each of 4,096 arms, whose episodes have 400."""
    algo, settings = algo_of("--algo", "sac", "--num_envs", "4096")
    warning = build.warn_of_short_episodes(algo, settings.run.total_env_steps)
    assert warning is not None and "97 of each of 4,096 environments, less than an episode of 400" in warning
    assert build.warn_of_short_episodes(algo, 400 * 4096) is None
    usual, _ = algo_of("--algo", "sac")
    assert build.warn_of_short_episodes(usual, settings.run.total_env_steps) is None
