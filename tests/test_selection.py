"""Which checkpoint is the best, and that training, selection and evaluation see other episodes of one seed."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.tiny import PointMass

from envs_jax.base import EnvSpec
from envs_jax.progress import start
from jaxrl.cli.flags import parse
from jaxrl.evaluation import reports
from jaxrl.evaluation.policies import load
from jaxrl.report.writer import NullWriter
from jaxrl.runtime.build import Run, build_run
from jaxrl.runtime.compiling import RunCompiler
from jaxrl.runtime.rollouts import Evaluator, held_out_key
from jaxrl.runtime.session import Session
from jaxrl.runtime.train_state import Position
from jaxrl.runtime.trainer import make_env_keys

SEED = 11
POINTS = (
    "--algo sac --env helpers.tiny:PointMass --num_envs 8 --devices 1 --hidden_size 4 --depth 1 --batch_size 8 "
    f"--buffer_size 64 --env_steps_per_update 8 --total_env_steps 640 --eval_every 1 --eval_episodes 8 --seed {SEED}"
)


@pytest.fixture(scope="module")
def run() -> Run:
    return build_run(parse(POINTS.split()).config)


def session_of(run: Run, spec: EnvSpec, evaluations: Any, directory: Path) -> Session:
    """A session whose evaluations end with these values, one after the other; everything else does nothing."""
    quiet: Any = SimpleNamespace(block=lambda info: None, say=lambda sentence: None)
    env = SimpleNamespace(spec=spec, env=run.env.env)
    trainer = SimpleNamespace(layout=run.trainer.layout, trials=1, policies=lambda state: (), keys=run.trainer.keys)
    chosen: Any = SimpleNamespace(
        phases=run.algo.phases,
        config=run.config,
        algo=run.algo,
        env=env,
        eval_env=run.eval_env,
        mesh=run.mesh,
        trainer=trainer,
    )
    evaluations.ready = True  # as a program that has been compiled
    programs: Any = SimpleNamespace(evaluate=evaluations)
    return Session(chosen, programs, directory, quiet, [NullWriter(directory)], quiet, quiet)


STATE: Any = SimpleNamespace(algo=(), progress=start())


def evaluate_all(run: Run, spec: EnvSpec, ends: list[dict[str, float]], directory: Path) -> list[bool]:
    """Whether each of these evaluations, the last one at the end of the run, makes its policy the best so far."""
    rows = iter(ends)

    def evaluations(policy: Any, key: Any, progress: Any) -> dict[str, jax.Array]:
        return {name: jnp.full(8, value) for name, value in next(rows).items()}

    session, evaluated = session_of(run, spec, evaluations, directory), []
    for index in range(len(ends)):
        last = index == len(ends) - 1
        session.position = Position(len(run.algo.phases) - 1, index, index, 640 if last else 32 * index)
        evaluated.append(session._evaluate(STATE))
    return evaluated


@pytest.mark.parametrize(
    ("mode", "scores", "best"),
    [
        ("min", [5.0, 3.0, 4.0, 3.0, 2.5, 9.0], [True, True, False, False, True, False]),
        ("max", [5.0, 3.0, 6.0, 6.0, 7.0, 1.0], [True, False, True, False, True, False]),
        ("max", [5.0, float("nan"), 5.0], [True, False, True]),  # the run's last stays if it is as good
        ("min", [5.0, 5.0, 5.0], [True, False, True]),
    ],
)
def test_the_best_is_the_best_by_the_mode_of_the_score(
    mode: Any, scores: list[float], best: list[bool], run: Run, tmp_path: Path
) -> None:
    spec = dataclasses.replace(run.env.spec, score="distance", score_mode=mode)
    ends = [{"distance": score, "return": 0.0} for score in scores]
    assert evaluate_all(run, spec, ends, tmp_path) == best


def test_ties_go_to_the_second_score_and_then_to_the_third(run: Run, tmp_path: Path) -> None:
    """Success is 1 throughout; the last policy has a worse second score, and is not the best."""
    spec = dataclasses.replace(run.env.spec, score="success", score_mode="max", tie_breakers=("at_end", "return"))
    rows = [(0.9, 0.9, 9.0), (1.0, 0.8, 1.0), (1.0, 0.8, 0.5), (1.0, 0.8, 2.0), (1.0, 0.9, 0.1), (1.0, 0.7, 9.0)]
    ends = [{"success": a, "at_end": b, "return": c} for a, b, c in rows]
    assert evaluate_all(run, spec, ends, tmp_path) == [True, True, False, True, True, False]


def test_training_selection_and_evaluation_start_from_other_states(run: Run, tmp_path: Path, monkeypatch: Any) -> None:
    """The keys are those that the verbs hand to the programs, and those that training starts its environments with."""
    keys: dict[str, Any] = {}

    def show_key(policy: Any, key: Any, context: Any) -> dict[str, jax.Array]:
        return {"key": jax.random.key_data(key)}

    with monkeypatch.context() as patch:
        patch.setattr(Evaluator, "final_values", lambda self: show_key)
        program = RunCompiler(run, lambda line: None).make_evaluation()
        program.compile()
    policies = run.trainer.policies(run.trainer.init(jax.random.key(SEED)))

    def selection(_: Any, key: Any, progress: Any) -> dict[str, jax.Array]:
        keys["selection"] = jax.random.wrap_key_data(program(policies, key, progress)["key"])
        return {name: jnp.zeros(8) for name in ("distance", "return")}

    session_of(run, run.env.spec, selection, tmp_path)._evaluate(STATE)
    held_out = held_out_key(SEED, "selection")
    np.testing.assert_array_equal(jax.random.key_data(keys["selection"]), jax.random.key_data(held_out))

    def evaluation(params: Any, key: Any, context: Any) -> dict[str, jax.Array]:
        keys["evaluation"] = key
        return {name: jnp.zeros((2, 8)) for name in ("distance", "return")}

    monkeypatch.setattr(Evaluator, "curves", lambda self: evaluation)
    points = load(None, "helpers.tiny:PointMass", dataclasses.asdict(PointMass()))
    list(reports.rollout(points, ["random"], 8, SEED))

    places = {"training": np.asarray(run.trainer.init(jax.random.key(SEED)).env.env.place)}
    reset = jax.jit(lambda key: run.env.reset(make_env_keys(key, jnp.arange(8)), ())[0])
    for name, key in keys.items():
        places[name] = np.asarray(reset(key).env.place)
    assert len(places) == 3 and all(place.size == 16 for place in places.values())
    for one, other in (("training", "selection"), ("training", "evaluation"), ("selection", "evaluation")):
        assert not np.intersect1d(places[one], places[other]).size, f"{one} and {other} start alike"
