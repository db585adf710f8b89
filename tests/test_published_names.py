"""People who come from the published systems: their flags, their files, their launchers, their saves."""

import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import yaml

import jaxrl
from envs_jax.snakes import schedule
from jaxrl.cli import evaluate, export, flags, train
from jaxrl.common.errors import UsageError, UserError
from jaxrl.integrations import published
from jaxrl.runtime.build import build_run
from jaxrl.runtime.checkpoint import committed_steps
from jaxrl.runtime.load import load_weights
from jaxrl.runtime.presets import presets

ROOT = Path(__file__).parents[1]
TINY = (
    "--algo coma --q 5 --num_agents 2 --budget 2 --hidden_size 4 --num_envs 8 --num_epochs 1 --minibatch_size 24 "
    "--total_episodes 48 --eval_every 0 --critic_warmup 0 --target_kl 0"
)

# Values of params.yaml in dmar-bonn/ipp-marl, and what its trainer makes of them: n_episodes x 600 x 5 transitions, 60
# to a mission.
IPP_MARL: dict[str, Any] = {
    "environment": {"num_envs": 2, "seed": 3, "x_dim": 50, "y_dim": 50},
    "sensor": {"pixel": {"number_x": 57, "number_y": 57}, "field_of_view": {"angle_x": 60, "angle_y": 60}},
    "mapping": {"prior": 0.5},
    "experiment": {
        "constraints": {"spacing": 5, "min_altitude": 5, "max_altitude": 15, "budget": 14, "num_actions": 6},
        "uav": {"communication_range": 25, "fix_range": True, "failure_rate": 0, "max_v": 5},
        "missions": {
            "type": "COMA", "n_episodes": 1500, "patience": 100, "n_agents": 4, "eps_max": 0.5, "eps_min": 0.02,
            "eps_anneal_phase": 10000,
        },
    },
    "networks": {
        "data_passes": 5, "batch_size": 600, "batch_number": 5, "copy_rate": 10, "gamma": 0.99, "lambda": 0.8,
        "actor": {"learning_rate": 0.00001, "hidden_dim": 128},
        "critic": {"learning_rate": 0.0001, "target_update_mode": "hard", "tau": 0.01},
    },
    "classification": {"n_episodes": 300, "batch_size": 50},
}  # fmt: skip
# Of a fork (RenHaiYang011/paper, params_fast.yaml): smaller, higher, with rewards and obstacles of its own.
FORK: dict[str, Any] = {
    "sensor": {"pixel": {"number_x": 57, "number_y": 57}},
    "search_regions": {"regions": [{"name": "zone", "priority": 1.0}], "strategy": {"mode": "priority_based"}},
    "experiment": {
        "constraints": {"max_altitude": 25, "budget": 8},
        "missions": {"n_episodes": 500, "n_agents": 4, "eps_anneal_phase": 10000},
        "coverage_weight": 0.15,
        "obstacles": {"enable": True, "safety_margin": 2.0},
    },
    "networks": {"device": "cuda", "data_passes": 2, "batch_size": 32, "batch_number": 2},
}
# Of a reproduction (canimiliya/RAC-MIPP, formal.yaml): the changes to params.yaml, inside a protocol.
REPRODUCTION: dict[str, Any] = {
    "task_id": "S1", "training": {"update_cycles": 1500}, "evaluation": {"trials": 50},
    "overrides": {
        "environment": {"seed": 3},
        "experiment": {"missions": {"n_episodes": 1500, "n_agents": 4, "eps_anneal_phase": 10000}},
        "networks": {"batch_size": 600, "batch_number": 5, "critic": {"target_update_mode": "hard"}},
    },
}  # fmt: skip
WORKER: dict[str, Any] = {  # of the collective repository's experiment/collective_metaworld.yaml
    "name": "collective_metaworld", "mode": "train_worker", "init_steps": 0, "num_train_steps": 1000000,
    "eval_freq": 4000, "num_student_online_trainsteps2": 500000, "init_steps_stu2": 4000,
    "constant_expert_weight": 4000, "start_weight": 1.0, "num_eval_episodes": 10,
    "early_stopping_threshold": 1.0, "save_freq": 20000, "batch_size": 32,
    "save": {"model": {"retain_last_n": 1}, "buffer": {"should_save": True}},
}  # fmt: skip


def configure(content: dict[str, Any], folder: Path, *words: str) -> Any:
    (folder / "theirs.yaml").write_text(yaml.safe_dump(content))
    return flags.parse(["--config", str(folder / "theirs.yaml"), *words]).config


# Their files


def test_the_file_of_ipp_marl_is_the_published_setting(tmp_path: Path, capsys: Any) -> None:
    settings = configure(IPP_MARL, tmp_path).flat()
    expected = yaml.safe_load((ROOT / "configs" / "coma_published.yaml").read_text())
    odd = {name for name, value in expected.items() if settings[name] != pytest.approx(value)}
    assert (odd, settings["seed"]) == (set(), 3)  # 75,000 missions from the corners, 50 per training step, ...
    lines = capsys.readouterr().err.splitlines()
    assert [line for line in lines if "patience 100" in line]
    assert not [line for line in lines[1:-1] if "altitude" in line or "x_dim" in line]  # the same here
    assert "num_envs" in lines[-1] and "without effect" in lines[-1]


def changed(content: dict[str, Any], path: str, **changes: Any) -> dict[str, Any]:
    """The content with other values in one of its sections, such as "networks.critic"."""
    first, _, rest = path.partition(".")
    section = content[first]
    return content | {first: changed(section, rest, **changes) if rest else section | changes}


@pytest.mark.parametrize(
    ("content", "words", "expected", "told"),
    [
        (IPP_MARL, "", {"tau": 0, "random_range": False}, ["patience 100"]),
        (IPP_MARL, "--algo coma_original", {"reward_timing": "original", "start": "original"}, []),
        (changed(IPP_MARL, "networks.critic", target_update_mode="soft"), "", {"tau": 0.01}, []),
        (changed(IPP_MARL, "experiment.uav", fix_range=False), "", {"random_range": True}, []),
        (  # 36 transitions to a mission, 64 to a training step; random moves do not end before the run does
            FORK, "", {"num_envs": 2, "total_episodes": 888, "eps_anneal": 10_000 / 888, "minibatch_size": 32},
            ["constraints.max_altitude 25: altitudes", "coverage_weight 0.15", "obstacles:", "search_regions:"],
        ),
        (
            REPRODUCTION, "--start uniform --q 7",  # flags come last
            {"num_envs": 50, "minibatch_size": 600, "total_episodes": 75_000, "start": "uniform", "q": 7},
            ["task_id 'S1': there is nothing like it here"],
        ),
    ],
)  # fmt: skip
def test_files_of_ipp_marl(
    content: dict[str, Any], words: str, expected: dict[str, Any], told: list[str], tmp_path: Path, capsys: Any
) -> None:
    settings = configure(content, tmp_path, *words.split()).flat()
    assert {name: settings[name] for name in expected} == expected
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("not carried over: ")]
    for words in told:
        assert len([line for line in lines if words in line]) == 1


def test_the_stages_of_the_collective_repository(tmp_path: Path, capsys: Any) -> None:
    worker = configure(WORKER, tmp_path)
    assert (worker.algo, worker.run.total_env_steps, worker.algo_settings["random_steps"]) == ("sac", 1_000_000, 0)
    assert (worker.run.eval_every, worker.run.checkpoint_every, worker.run.keep_checkpoints) == (4000, 20_000, 1)
    assert worker.algo_settings["batch_size"] == 512  # not the 32 of another stage
    assert "early_stopping_threshold 1.0: runs have their full length" in capsys.readouterr().err
    student = configure(WORKER | {"mode": "train_student"}, tmp_path)
    assert (student.algo, student.run.total_env_steps, student.algo_settings["random_steps"]) == (
        "student", 500_000, 4000,
    )  # fmt: skip
    composed = {  # by hydra: sections, and more environments, so that an iteration has as many steps
        "experiment": WORKER, "env": {"benchmark": {"env_name": "reach-v2"}}, "setup": {"seed": 7},
        "worker": {"multitask": {"num_envs": 16}, "builder": {"critic_tau": 0.01, "actor_update_freq": 2}},
        "replay_buffer": {"batch_size": 2048},
    }  # fmt: skip
    config = configure(composed, tmp_path)
    assert (config.run.num_envs, config.run.eval_every, config.run.seed) == (16, 4000, 7)
    assert config.run.checkpoint_every == 1250
    assert [config.algo_settings[name] for name in ("tau", "actor_update_period", "batch_size")] == [0.01, 2, 2048]


def test_the_arguments_that_the_snakes_trainer_saves(tmp_path: Path) -> None:
    saved = {
        "game_name": "snakes_3v3", "algo": "ddpg", "max_episodes": 50000, "a_lr": 3e-4, "c_lr": 3e-4, "epsilon": 0.4,
        "epsilon_speed": 0.9995, "opponent_difficulty_strategy": "linear", "enable_opponent_evasion": True,
        "opponent_evasion_start_episode": 20000, "save_interval": 1000,
    }  # fmt: skip
    config = configure(saved, tmp_path)
    assert (config.algo, config.env, config.run.total_episodes, config.run.total_env_steps) == (
        "ddpg", "snakes_3v3", 50_000, 0,
    )  # fmt: skip
    assert [config.algo_settings[name] for name in ("actor_lr", "eps_start", "eps_decay")] == [3e-4, 0.4, 0.9995]
    assert config.env_settings["opponent"] == "linear evasion@0.4"


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (IPP_MARL | {"networks": {"batch_number": 0}}, "networks.batch_number must be a positive whole number, not 0"),
        (IPP_MARL | {"networks": {"batch_number": "five"}}, "must be a positive whole number, not 'five'"),
        (FORK | {"missions": {"type": "DeepQ"}}, "missions of type COMA, not 'DeepQ'"),
        (WORKER | {"mode": "record"}, "the mode 'record' does not train: use python -m jaxrl.evaluate"),
        (WORKER | {"num_train_steps": "many"}, "total_env_steps must be a whole number, not 'many'"),
        (WORKER | {"save_freq": [1]}, "save_freq must be a positive whole number"),
    ],
)
def test_files_that_are_refused(content: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=re.escape(sentence)):
        configure(content, tmp_path)


# The table


def test_settings_of_the_table_exist() -> None:
    for system in published.SYSTEMS:
        for algo, preset in system.presets.items():
            assert preset in presets()
            schema = flags.make_schema(algo, yaml.safe_load(presets()[preset].read_text())["env"])
            for name in system.names:
                if name.ours not in ("", "env", "algo") and algo in (name.algos or system.presets):
                    elsewhere = algo == "collective" and name.ours not in schema  # only its workers have it
                    assert name.ours in schema or elsewhere, name
                    assert not name.same or name.ours in schema or elsewhere


def test_our_presets_are_not_taken_for_theirs() -> None:
    for path in presets().values():
        assert published.convert(yaml.safe_load(path.read_text()), None) is None, path


# Their flags


@pytest.mark.parametrize(
    ("words", "setting", "value"),
    [
        ("--algo ddpg --max_episodes 50000", "total_episodes", 50_000),
        ("--algo bicnet --c_lr=2e-4", "critic_lr", 2e-4),
        ("--algo ddpg --opponent_difficulty_strategy exponential", "opponent", "exponential"),
        ("--algo coma --n_agents 3", "num_agents", 3),
        ("--algo sac --num_train_steps 1000", "total_env_steps", 1000),
        ("--algo student --num_student_online_trainsteps2 1000", "total_env_steps", 1000),
    ],
)
def test_flags_that_mean_the_same(words: str, setting: str, value: Any) -> None:
    assert flags.parse(words.split()).config.flat()[setting] == value


def test_games_are_counted_with_their_reset() -> None:
    config = flags.parse(["--config", "ddpg_competition", "--max_episodes", "50000", "--buffer_size", "1000"]).config
    assert build_run(config).config.run.total_env_steps == 50_000 * 201  # as configs/ddpg_competition.yaml counts


def test_evasion_follows_a_published_schedule() -> None:
    """By the rules of the fork: evasion replaces the level from its first episode on."""

    begins = 0.0, 0.1, 0.3, 0.6, 0.85  # of the levels
    parsed = schedule.parse("curriculum evasion@0.8")
    for fraction in np.linspace(0.01, 0.99, 40):  # not at the begins, which float32 rounds
        (player,) = np.flatnonzero(np.asarray(parsed.at(np.float32(fraction))))
        expected = "evasion" if fraction >= 0.8 else str(sum(fraction >= begin for begin in begins) - 1)
        assert schedule.PLAYERS[player] == expected, fraction
    for text in ("curriculum evasion", "linear evasion@0", "linear x@0.5", "linear evasion@2"):
        with pytest.raises(ValueError, match="opponent"):
            schedule.parse(text)


# Their saves

SAVES = "--algo helpers.tiny:TinyQ --env helpers.tiny:Corridor --num_envs 8 --devices 1"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with the checkpoints 2, 4 and 6."""
    runs = tmp_path_factory.mktemp("saves")
    words = f"{SAVES} --total_env_steps 192 --checkpoint_every 2 --keep_checkpoints 9 --runs {runs}"
    assert train.main(words.split()) == 0
    directory = Path((runs / "latest").read_text().strip())
    assert committed_steps(directory / "checkpoints") == [2, 4, 6]
    return directory


def digest(policy: Any) -> float:
    return float(sum(np.abs(np.asarray(leaf)).sum() for leaf in jax.tree.leaves(policy.params)))


def test_checkpoints_are_loaded_by_number_and_by_folder(run: Path) -> None:
    policies = {step: jaxrl.load(run, checkpoint=step) for step in (2, 4, 6)}
    assert [policy.step for policy in policies.values()] == [2, 4, 6]
    assert len({digest(policy) for policy in policies.values()}) == 3
    assert digest(jaxrl.load(run / "checkpoints" / f"{4:010d}")) == digest(policies[4])
    assert digest(jaxrl.load(run, checkpoint=np.int64(4))) == digest(policies[4])
    assert digest(jaxrl.load(run)) == digest(policies[6])
    for wrong in ("4", True, -1, 4.5):
        with pytest.raises(UsageError, match=r"checkpoint must (be a whole number|lie between 0 and)"):
            jaxrl.load(run, checkpoint=wrong)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="choose from 2, 4, 6"):
        jaxrl.load(run, checkpoint=5)


def test_a_run_begins_from_a_checkpoint(run: Path) -> None:
    words = f"{SAVES} --total_env_steps 32 --init_from {run} --checkpoint 4"
    begun = build_run(flags.parse(words.split()).config)
    folder = begun.config.run.init_from
    assert folder == str(run / "checkpoints" / f"{4:010d}")
    np.testing.assert_array_equal(load_weights(folder, begun), jaxrl.load(run, checkpoint=4).params)


@pytest.mark.slow
def test_commands_take_a_checkpoint(run: Path, tmp_path: Path) -> None:
    folder = run / "checkpoints" / f"{2:010d}"
    assert export.main([str(folder), "--format", "run", "--out", str(tmp_path / "small")]) == 0
    assert jaxrl.load(tmp_path / "small").step == 2
    words = [str(run), "--checkpoint", "4", "--episodes", "8", "--policy", "learned"]
    assert evaluate.main([*words, "--json", str(tmp_path / "e.json")]) == 0
    assert yaml.safe_load((tmp_path / "e.json").read_text())["checkpoint"] == 4
    assert not (run / "evaluation.json").exists()


# Jobs that are queued again


@pytest.mark.slow
def test_one_command_starts_a_run_and_resumes_it(tmp_path: Path, capsys: Any) -> None:
    words = f"{TINY} --runs {tmp_path} --compute_dtype auto --resume_or_start job".split()
    assert train.main(words) == 0
    run = tmp_path / "coma_coverage" / "job"
    assert committed_steps(run / "checkpoints")[-1] == 6
    assert train.main([*words, "--total_episodes", "64"]) == 0
    assert "resumed at iteration 6" in "".join(capsys.readouterr())
    assert committed_steps(run / "checkpoints")[-1] == 8
    assert [path.name for path in run.parent.iterdir()] == ["job"]
    assert train.main([*words, "--budget", "3"]) == 2
    assert "budget cannot change on resume" in capsys.readouterr().err
    (tmp_path / "coma_coverage" / "empty").mkdir()  # of a job that was stopped before it wrote anything
    assert train.main([*words[:-1], "empty"]) == 0
    for name in ("0001", "../x", "latest/x", ""):
        assert train.main([*words[:-1], name]) == 2
        assert "a run cannot be named" in capsys.readouterr().err
    assert train.main(["--resume", str(run), "--resume_or_start", "job"]) == 2
