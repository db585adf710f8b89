"""`import jaxrl`: the code of its pages runs exactly as written; policies, seeds, and what is refused."""

import dataclasses
import importlib
import logging
import multiprocessing
import pickle
import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from helpers.tiny import Corridor, PointMass, TinyQ

import envs_jax
import jaxrl
from envs_jax.progress import start
from jaxrl import api
from jaxrl.algos.base import AlgoState, Custom, setting
from jaxrl.algos.sac import Sac
from jaxrl.cli import main as package
from jaxrl.common.errors import UsageError, UserError
from jaxrl.rl.data_parallel import DataParallel
from jaxrl.runtime.build import build_algorithm
from jaxrl.runtime.load import named_runs

DOCS = Path(__file__).parents[1] / "docs"
PAGES = [DOCS / "python.md", DOCS / "own" / "network.md", DOCS / "own" / "sweeps.md"]
NAMED = re.compile(r"^```python\n# (\w+\.py)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
FILES = {name: text for page in PAGES for name, text in NAMED.findall(page.read_text())}
TINY: dict[str, Any] = {"num_envs": 8, "devices": 1, "total_env_steps": 640}


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_code_of_the_page(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    assert "._" not in FILES[name]
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).write_text(FILES[name])
    runpy.run_path(str(tmp_path / name))
    assert "nan" not in capsys.readouterr().out  # it trains


def test_training_returns_data_and_calls_back(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    calls: list[Any] = []
    with caplog.at_level(logging.INFO, "jaxrl"):
        result = jaxrl.train(TinyQ, Corridor(length=3), callbacks=[calls.append], runs=str(tmp_path), **TINY)
    assert result.reason.startswith("finished at iteration 20 (640 environment steps)")
    assert list(result.metrics["iteration"]) == list(range(1, 21))
    assert calls[-1]["iteration"] == 20
    assert any(record.name == "jaxrl" and "run directory" in record.message for record in caplog.records)
    assert any(record.message.startswith("preset: none") for record in caplog.records)
    assert result.policy.env == Corridor(length=3) and result.policy.step == 20
    assert not any("__main__" in record.message for record in caplog.records)


def test_a_class_of_the_script_itself_is_warned_of_before_training(monkeypatch: Any, caplog: Any) -> None:
    class Ended(Exception):
        pass

    def end(*_: Any, **__: Any) -> None:
        raise Ended

    monkeypatch.setattr(api.runs, "start", end)
    monkeypatch.setattr(Corridor, "__module__", "__main__")
    monkeypatch.setattr(sys.modules["__main__"], "Corridor", Corridor, raising=False)
    for env in (Corridor, Corridor(length=3)):
        caplog.clear()
        with pytest.raises(Ended):
            jaxrl.train(TinyQ, env, **TINY)
        assert "Corridor is defined in __main__" in caplog.text and "TinyQ" not in caplog.text


@pytest.mark.slow
def test_one_function_for_all_seeds_computes_what_runs_do(tmp_path: Path) -> None:
    run = jaxrl.make_train(TinyQ, Corridor, **TINY)
    policies, metrics = jax.jit(jax.vmap(run))(jax.vmap(jax.random.key)(jnp.arange(3)))
    assert metrics["train"]["loss"].shape == (3, 18, 4) and metrics["fill"]["episodes"].shape == (3, 2)
    alone = jaxrl.train(TinyQ, Corridor, seed=2, runs=str(tmp_path), **TINY)
    np.testing.assert_allclose(policies.params[2], alone.policy.params, rtol=1e-5)
    rewards = alone.metrics["rollout/return"]
    ours = np.concatenate([metrics["fill"]["return"][2], metrics["train"]["return"][2]])
    np.testing.assert_allclose(ours[~np.isnan(ours)], rewards[~np.isnan(rewards)], rtol=1e-5)


@pytest.fixture(scope="module")
def point() -> jaxrl.Policy:
    """A policy of SAC on a point mass, whose weights are drawn."""
    settings = {"hidden_size": 8, "depth": 1, "batch_size": 8, "buffer_size": 256, "random_steps": 64}
    run = jaxrl.make_train("sac", PointMass, num_envs=8, total_env_steps=256, **settings)
    rng = np.random.default_rng(0)
    shapes = jax.eval_shape(run, jax.random.key(0))[0]
    return jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape), leaf.dtype), shapes)


def test_a_policy_takes_arrays_with_or_without_a_batch(point: jaxrl.Policy) -> None:
    shape = point.env.spec.observation.shape
    batch = jax.random.normal(jax.random.key(1), (5, 1, *shape))
    actions, carry = point(batch)
    assert actions.shape == (5, 1, *point.env.spec.action.shape) and carry == ()
    np.testing.assert_allclose(point(batch[3])[0], actions[3], rtol=1e-6)
    np.testing.assert_array_equal(actions, point(batch)[0])  # greedy: no chance in it
    drawn = [point(batch, key=jax.random.key(seed))[0] for seed in (0, 0, 1)]
    np.testing.assert_array_equal(drawn[0], drawn[1])
    assert not np.allclose(drawn[0], drawn[2])
    with pytest.raises(ValueError, match=r"observations of 'point_mass' have the shapes \[\(1, "):
        point(batch[0, 0])


@pytest.mark.filterwarnings("ignore:.*fork")
def test_a_policy_is_sent_to_other_processes(point: jaxrl.Policy) -> None:
    observation = jax.random.normal(jax.random.key(1), (3, 1, *point.env.spec.observation.shape))
    expected = point(observation)[0]
    copy = pickle.loads(pickle.dumps(point))
    np.testing.assert_array_equal(copy(observation)[0], expected)
    assert copy.config == point.config and copy.env == point.env
    with multiprocessing.get_context("fork").Pool(1) as pool, pytest.raises(ValueError, match="workers with 'spawn'"):
        pool.apply_async(point, (np.asarray(observation),)).get(timeout=60)


def test_a_policy_is_plain_data(point: jaxrl.Policy) -> None:
    """Nothing of a trace stays in it, and what is not its parameters decides whether a program is another one."""
    observation = jax.random.normal(jax.random.key(1), (3, 1, *point.env.spec.observation.shape))
    both = jax.tree.map(lambda x: jnp.stack([x, 2 * x]), point)
    with jax.checking_leaks():
        actions, returned = jax.jit(jax.vmap(lambda policy: (policy(observation)[0], policy)))(both)
    np.testing.assert_allclose(actions[0], point(observation)[0], rtol=1e-5)
    chex.assert_trees_all_equal(returned.params, both.params)
    structure: Any = jax.tree.structure(returned)
    assert structure.node_data()[1] == (point.env, point.algo, point.step, point.config)
    assert structure == jax.tree.structure(point) and hash(structure) == hash(jax.tree.structure(point))
    other = dataclasses.replace(point, env=PointMass(horizon=9))
    same = jax.jit(lambda policy: policy)
    assert [same(policy).env.horizon for policy in (point, other, point)] == [8, 9, 8]


def test_a_policy_refuses_nan(point: jaxrl.Policy) -> None:
    observation = jnp.zeros((1, *point.env.spec.observation.shape)).at[0, 0].set(jnp.nan)
    with pytest.raises(ValueError, match="observations of 'point_mass' hold NaN"):
        point(observation)
    assert jax.jit(lambda x: point(x)[0])(observation).shape == (1, 2)  # values are not known there


class CountingSac(Sac):
    """Its carry counts the calls."""

    def init_carry(self, policy_params: Any, timestep: Any, indices: Any) -> Any:
        return jnp.zeros(len(indices), jnp.int32)

    def act(self, policy: Any, carry: Any, timestep: Any, keys: Any, progress: Any, mode: Any) -> Any:
        action, _, extras = super().act(policy, (), timestep, keys, progress, mode)
        return action, carry + 1, extras


def test_a_policy_refuses_the_carry_of_something_else(point: jaxrl.Policy) -> None:
    settings = {field.name: getattr(point.algo, field.name) for field in dataclasses.fields(point.algo) if field.init}
    counting = dataclasses.replace(point, algo=CountingSac(**settings))
    observation = jnp.zeros((3, 1, *point.env.spec.observation.shape))
    _, carry = counting(observation)
    _, carry = counting(observation, carry=carry)
    np.testing.assert_array_equal(carry, [2, 2, 2])
    for wrong in ((), carry[:2], {"a": carry}):
        with pytest.raises(ValueError, match="carry must be what the last call returned for 3 observations"):
            counting(observation, carry=wrong)
    with pytest.raises(ValueError, match="carry must be what"):
        point(observation, carry=carry)


def test_a_batch_without_rows(point: jaxrl.Policy) -> None:
    actions, carry = point(jnp.zeros((0, 1, *point.env.spec.observation.shape)))
    assert actions.shape == (0, 1, *point.env.spec.action.shape) and actions.dtype == jnp.float32 and carry == ()


def test_an_evaluation_is_that_of_the_command(point: jaxrl.Policy) -> None:
    evaluation = jaxrl.evaluate(point, episodes=6, baselines="random")
    assert evaluation["return"].shape == (6,) and set(evaluation.baselines) == {"random"}
    assert np.array_equal(evaluation["return"], jaxrl.evaluate(point, episodes=6, baselines=[])["return"])
    assert not np.array_equal(evaluation["return"], jaxrl.evaluate(point, episodes=6, baselines=[], seed=1)["return"])


def test_a_printed_evaluation_has_intervals() -> None:
    """Wilson's of 8 of 8, of 0 of 8; Student's, 2.3646 standard errors of eight numbers; equal numbers have none."""
    ends, baseline = ({"won": np.full(8, won), "deaths": np.zeros(8), "return": np.arange(8.0)} for won in (1.0, 0.0))
    lines = str(api.Evaluation(ends, {"[red]": baseline}, ("won",))).splitlines()
    assert [line.split() for line in lines[1:]] == [
        ["policy", "[red]"],
        ["won", "1.00", "[0.68,", "1.00]", "0.00", "[0.00,", "0.32]"],
        ["deaths", "0.000", "0.000"],
        ["return", "3.5", "±2.0", "3.5", "±2.0"],
    ]
    assert "not finite" in str(api.Evaluation({"return": np.array([np.nan, 1.0])}, {}))
    assert str(api.Evaluation({"return": np.array([1.5])}, {})).endswith("return    1.50")


def test_an_optimizer_of_ones_own_sees_the_layers_and_has_its_own_rate() -> None:
    def is_kernel(params: Any) -> Any:
        return jax.tree_util.tree_map_with_path(lambda path, _: "kernel" in str(path[-1]), params)

    chain = optax.chain(optax.add_decayed_weights(0.5, mask=is_kernel), optax.sgd(0.1))
    algo = Sac(PointMass().spec, DataParallel(1), Custom(optimizers={"actor": chain}), hidden_size=4)
    params = jax.jit(algo.networks["actor"].init)(jax.random.key(0))
    learner = algo.learner("actor", params)
    stepped, _ = algo.step("actor", learner, jax.tree.map(jnp.ones_like, params), start())
    for path, after in jax.tree_util.tree_leaves_with_path(stepped.params):
        before = params["params"][path[-1].key]
        decay = 0.5 * np.asarray(before) if "kernel" in path[-1].key else 0.0
        np.testing.assert_allclose(after, before - 0.1 * (1 + decay), rtol=1e-5, atol=1e-7)


def other_object(name: str, module: str) -> object:
    """An object of another library's class."""
    return type(name, (), {"__module__": module})()


# A part of the sentence: a call that ends in it.
REFUSED: dict[str, Callable[[jaxrl.Policy], Any]] = {
    "did you mean 'coma'": lambda _: jaxrl.make_train("koma", "coverage"),
    "did you mean 'reach'": lambda _: jaxrl.make_train("sac", "reech"),
    "sac needs continuous actions": lambda _: jaxrl.make_train("sac", "coverage"),
    "unknown setting 'num_env': did you mean 'num_envs'": lambda _: jaxrl.make_train("sac", "reach", num_env=3),
    "networks has the unknown part 'aktor': choose from: actor, critic": lambda _: jaxrl.make_train(
        "sac", "reach", networks={"aktor": nn.Dense}
    ),
    "optimizers has the unknown part 'actor': this algorithm takes none": lambda _: jaxrl.make_train(
        TinyQ, Corridor, optimizers={"actor": optax.sgd(1.0)}, **TINY
    ),
    "one device": lambda _: jaxrl.make_train("student", "reach", total_env_steps=64),
    "was trained in PointMass, but env is of the type Corridor": lambda point: jaxrl.evaluate(point, Corridor()),
    "episodes must lie between 1 and 1,000,000, not 0": lambda point: jaxrl.evaluate(point, episodes=0),
    "seed must lie between 0 and 4,294,967,295": lambda point: jaxrl.evaluate(point, seed=2**32),
    "baselines must be a list of names": lambda point: jaxrl.evaluate(point, baselines=5),
    "no_run does not exist": lambda _: jaxrl.evaluate("~/no_run", episodes=np.int64(8)),
    "callbacks must be a list of functions": lambda _: jaxrl.train("sac", "reach", callbacks=print),
    "preset must be a name from configs/ or a YAML file, not 3": lambda _: jaxrl.train("sac", "reach", preset=3),
    "names a home directory that is not known here": lambda _: jaxrl.train("sac", "reach", runs="~nobody-here/x"),
    "optimizers: 'actor' must be an optax chain": lambda _: jaxrl.train("sac", "reach", optimizers={"actor": 3e-4}),
    "networks: 'actor' must be a flax module": lambda _: jaxrl.train("sac", "reach", networks={"actor": 3}),
    "give algo and env by name": lambda _: jaxrl.train("sac", 3),
    "name instead, such as env='gymnax": lambda _: jaxrl.train("sac", other_object("CartPole", "gymnax.cartpole")),
    "object of gymnasium: pass its name": lambda _: jaxrl.train("sac", other_object("Env", "gymnasium.core")),
    "object of gym: register its class with Gymnasium": lambda _: jaxrl.train("sac", other_object("Env", "gym.core")),
    "the arguments: num_envs must be a whole number, not": lambda _: jaxrl.train("sac", "reach", num_envs="many"),
    "name the run's directory": lambda _: jaxrl.load(3),
    "greedy must be true or false": lambda point: jaxrl.evaluate(point, greedy="no"),
    "best must be true or false": lambda _: jaxrl.load("runs", best=1),
    "progress must be true or false": lambda _: jaxrl.train(TinyQ, Corridor, progress=None),
}


@pytest.mark.parametrize("sentence", REFUSED)
def test_a_call_is_refused(sentence: str, point: jaxrl.Policy) -> None:
    with pytest.raises(UserError, match=re.escape(sentence)) as caught:
        REFUSED[sentence](point)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("wrong", [3, np.uint32(3), jnp.zeros(2, jnp.uint32)])
def test_what_is_no_key_is_refused(wrong: Any, point: jaxrl.Policy) -> None:
    with pytest.raises(ValueError, match="a key is needed"):
        point(jnp.zeros((1, *point.env.spec.observation.shape)), key=wrong)
    with pytest.raises(ValueError, match="a key is needed"):
        jaxrl.make_train(TinyQ, Corridor, **TINY)(wrong)


def test_a_name_that_the_package_does_not_have() -> None:
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        jaxrl.trian  # noqa: B018


def test_settings_take_paths_and_numbers_of_numpy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    config = api._config("sac", "reach", None, {"runs": Path("some/runs"), "seed": np.uint32(2**32 - 1)})
    assert (config.run.runs, config.run.seed) == ("some/runs", 2**32 - 1)
    config = api._config("student", "reach", None, {"runs": "~/runs", "teacher": "one, ~/two"})
    assert config.run.runs == f"{tmp_path}/runs"
    assert named_runs(config, "teacher") == ["one", f"{tmp_path}/two"]


@pytest.mark.parametrize(
    ("shape", "dtype", "description"),
    [((), "int32", r"int32\[8\]"), ((1,), "float32", r"float32\[8, 1\]"), ((1, 2), "int32", r"int32\[8, 1, 2\]")],
)
def test_actions_that_the_environment_does_not_take(shape: tuple[int, ...], dtype: str, description: str) -> None:
    class Wrong(TinyQ):
        def act(self, policy: Any, carry: Any, timestep: Any, keys: Any, progress: Any, mode: Any) -> Any:
            return jnp.zeros((len(keys), *shape), dtype), carry, ()

    with pytest.raises(UsageError, match=rf"act returned actions {description}, but 'corridor' takes int32\[8, 1\]"):
        jax.eval_shape(jaxrl.make_train(set_module_name(Wrong), Corridor, **TINY), jax.random.key(0))


def set_module_name(cls: type) -> Any:
    """The class, to be found by its name in this module, as runs find theirs."""
    cls.__qualname__ = cls.__name__
    globals()[cls.__name__] = cls
    return cls


@pytest.mark.parametrize(
    ("results", "sentence"),
    [
        (lambda state: state, "learn must return state, metrics, not AlgoState"),
        (lambda state: (state, {}, 1), "learn must return state, metrics, not 3 values"),
        (lambda state: (state, None), "learn must return metrics as a dictionary"),
        (lambda state: ((1, 2), {}), "learn must return an AlgoState and metrics, not tuple and metrics"),
        (lambda state: (AlgoState(jnp.zeros(2), ()), {}), "a state of the same structure"),
        (
            lambda state: (jax.tree.map(lambda x: x[None], state), {}),
            r"learn changed replicated.* keep shape and dtype",
        ),
    ],
)
def test_what_learn_returns_is_checked(results: Any, sentence: str) -> None:
    class Odd(TinyQ):
        def learn(self, state: Any, *rest: Any) -> Any:
            return results(state)

    with pytest.raises(UsageError, match=sentence):
        jax.eval_shape(jaxrl.make_train(set_module_name(Odd), Corridor, **TINY), jax.random.key(0))


def test_an_error_in_the_users_own_code_keeps_its_traceback() -> None:
    class Broken(TinyQ):
        def act(self, policy: Any, carry: Any, timestep: Any, keys: Any, progress: Any, mode: Any) -> Any:
            _, _ = (1, 2, 3)  # type: ignore[misc]

    with pytest.raises(ValueError, match="too many values to unpack") as caught:
        jax.eval_shape(jaxrl.make_train(set_module_name(Broken), Corridor, **TINY), jax.random.key(0))
    assert caught.traceback[-1].path == Path(__file__)


def test_settings_need_the_decorator() -> None:
    class Undecorated(TinyQ):
        lr: float = setting(0.5, "learning rate")

    class Longer(Corridor):
        horizon: int = setting(500, "steps")

    with pytest.raises(UsageError, match="Undecorated' must be a frozen dataclass that subclasses jaxrl"):
        jaxrl.make_train(set_module_name(Undecorated), Corridor, **TINY)
    with pytest.raises(UsageError, match="Longer' must be a frozen dataclass that subclasses envs_jax"):
        jaxrl.make_train(TinyQ, set_module_name(Longer), **TINY)


@pytest.mark.parametrize(
    ("networks", "sentence"),
    [
        (
            {"actor": nn.Dense(3)},
            r"'actor' must return float32\[1, 1, 4\] for inputs \[1, 1, 3\], not float32\[1, 1, 3\]",
        ),
        (
            {"critic": nn.Dense(3)},
            r"'critic' must return float32\[1, 1, 1\] for inputs \[1, 1, 5\], not float32\[1, 1, 3\]",
        ),
        ({"actor": lambda outputs: None}, "'actor' must be a flax.linen module, not NoneType"),
        ({"actor": nn.GRUCell(4)}, "'actor' is called with 1 array and no carry, which GRUCell does not take"),
        ({"alpha": nn.Dense}, "'alpha' is a number for each task, not a network"),
        (nn.Dense, "networks must be a dictionary by part"),
        ([nn.Dense], "networks must be a dictionary by part"),
    ],
)
def test_networks_of_ones_own_are_checked(networks: Any, sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        jaxrl.make_train("sac", PointMass, networks=networks, num_envs=8, total_env_steps=64)


@pytest.mark.slow
def test_with_an_optimizer_that_stands_still_nothing_moves(tmp_path: Path) -> None:
    """As long as the run may be; its policy needs no optimizer."""
    settings = {"hidden_size": 8, "depth": 1, "batch_size": 8, "buffer_size": 256, "random_steps": 64, "num_envs": 8}
    still = {"actor": optax.set_to_zero()}
    short, long = (
        jaxrl.train("sac", PointMass, optimizers=still, total_env_steps=steps, runs=str(tmp_path), **settings)
        for steps in (96, 256)
    )
    chex.assert_trees_all_equal(short.policy.params, long.policy.params)
    chex.assert_trees_all_equal(jaxrl.load(long.directory).params, long.policy.params)
    assert repr(long).startswith("Result(") and "\n" not in repr(long)


def test_coverage_needs_the_whole_time_step(point: jaxrl.Policy) -> None:
    config = api._config("coma", "coverage", None, {"q": 2, "num_agents": 2})
    policy = dataclasses.replace(point, env=config.make_env(), algo=build_algorithm(config))
    with pytest.raises(ValueError, match="pass the whole time step"):
        policy(jnp.zeros((2, *policy.env.spec.observation.shape)))


@pytest.mark.slow
def test_masks_of_ones_own() -> None:
    """A mask decides the action, or is refused: never ignored."""
    sizes = {"num_envs": 4, "rollout_steps": 4, "num_minibatches": 1, "total_env_steps": 16, "hidden_size": 4}
    policy = jaxrl.make_train("ppo", envs_jax.make("snakes_1v1"), **sizes)(jax.random.key(0))[0]
    agents, numbers = policy.env.spec.num_agents, policy.env.spec.action.n
    observation = jnp.zeros((agents, *policy.env.spec.observation.shape))
    for action in range(numbers):
        mask = jnp.broadcast_to(jnp.arange(numbers) == action, (agents, numbers))
        assert (policy(observation, action_mask=mask)[0] == action).all()
        assert (policy(observation[None], action_mask=mask[None])[0] == action).all()
    for wrong in (mask[None], mask[:, :-1], mask[0]):
        with pytest.raises(ValueError, match=r"action_mask must have the shape \(\d, \d\), as the observation has"):
            policy(observation, action_mask=wrong)
    timestep = policy.env.reset(jax.random.key(0))[1]
    assert policy(timestep)[0].shape == (agents,)
    with pytest.raises(ValueError, match="a time step has its own masks"):
        policy(timestep, action_mask=mask)
    unmasked = dataclasses.replace(policy, env=envs_jax.make("snakes_1v1", masks=False))
    with pytest.raises(ValueError, match="has no action masks: leave action_mask out"):
        unmasked(observation, action_mask=mask)


def test_the_package_lists_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert package.main([]) == 0
    printed = capsys.readouterr().out
    for name in ("python -m jaxrl evaluate", "coma_quick", "student", "snakes_3v3"):
        assert name in printed
    assert package.main(["--help"]) == 0
    assert capsys.readouterr().out == printed
    assert package.main(["trian", "--algo", "coma"]) == 2
    assert capsys.readouterr().err == "error: unexpected word 'trian': did you mean 'train'?\n"


@pytest.mark.parametrize("name", package.COMMANDS)
def test_each_command_is_a_word_after_the_package(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    said = []
    command = importlib.import_module(f"jaxrl.cli.{name}").main
    for main, first in ((command, []), (package.main, [name])):
        with pytest.raises(SystemExit) as stop:
            main([*first, "--help"])
        assert stop.value.code == 0
        assert main([*first, "--nothing", "1"]) == 2
        said.append(capsys.readouterr())
    assert said[0] == said[1] and said[0].err.startswith("error: ") and said[0].out.startswith("usage: python -m")
