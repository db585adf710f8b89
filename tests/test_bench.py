"""Benchmarks: what they count by hand, what they measure, and what their commands write, compare and refuse."""

import dataclasses
import json
import sys
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.tiny import Corridor

from bench import baselines, compare, env_throughput, train_throughput
from bench.baselines import coverage
from bench.harness import flops, measure, rates, rollout_timing, tables, threads, training
from bench.studies import learning
from envs_jax.base import make, registered
from envs_jax.batch import batched
from jaxrl.cli import flags as command_line
from jaxrl.nn import networks

pytestmark = pytest.mark.bench

ENV, ALGO = "helpers.tiny:Corridor", "helpers.tiny:TinyQ"
RATES = rates.Rates(1e9, 1e8, {"float32": 2e9, "bfloat16": 1e9}, {"conv": 1e9}, 4, "float32")


def silent(sentence):
    pass


# Counting


def test_flop_of_the_network_by_hand():
    width, samples, actions = 8, 3, 6
    net = networks.ConvStack(actions, width)
    images = jnp.zeros((samples, 11, 11, 7))
    params = jax.eval_shape(net.init, jax.random.key(0), images)
    first = 7 * 7 * 5 * 5 * 7 * width
    rest = (4 * 4) * (4 * 4) * width * width + 4 * 4 * width * width + width * width + width * actions
    assert flops.count(net.apply, params, images) == 2 * samples * (first + rest)
    gradient = jax.grad(lambda p, x: net.apply(p, x).sum())
    # two products forward and for the kernel, a third for the input of all layers but the first
    assert flops.count(gradient, params, images) == 2 * samples * (2 * first + 3 * rest)


def test_flop_of_learning_and_acting():
    run = train_throughput.build_run(tiny_config())
    batch, features, actions, agents = 32, 5, 2, 1
    product = 2 * batch * agents * features * actions
    updates = run.algo.phases[1].updates
    assert updates == 4
    # values, gradient by the weights, values of the next_timesteps
    assert training.learning_flop(run) == updates * 3 * product
    assert training.acting_flop(run) == 2 * agents * features * actions


def test_flop_of_learning_in_stages():
    """An epoch more costs one forward and backward pass of actor and critic over all samples."""
    width, flags = 16, "--algo ppo --env reach --num_envs 8 --rollout_steps 16 --num_minibatches 4 --depth 1"
    flags += f" --hidden_size {width} --num_epochs "
    runs = [train_throughput.build_run(command_line.parse((flags + epochs).split()).config) for epochs in "123"]
    one, two, three = map(training.learning_flop, runs)
    spec = runs[0].env.spec
    first, actor, critic = spec.observation.shape[-1] * width, width * 4, width * 1
    assert three - two == two - one == 2 * 8 * 16 * (2 * 2 * first + 3 * (actor + critic))


# Arithmetic of results


@pytest.mark.parametrize(("seconds", "best"), [({1: 1.0, 2: 11.0}, 1), ({1: 3.0, 2: 2.0}, 2)])
def test_baselines_run_with_the_threads_that_are_best_for_them(seconds, best):
    """One slow sample of the better choice does not change it."""
    calls, samples = [], []

    def sample():
        samples.append(calls[-1])
        return seconds[calls[-1]] + (50.0 if len(samples) in (1, 2, 3, 4) else 0.0)

    assert threads.choose_threads(sample, calls.append, (1, 2)) == best
    assert calls[-1] == best and sorted(set(samples)) == [1, 2]
    assert str(best) in threads.note(best, (1, 2), "BLAS")


# Environments


@pytest.mark.parametrize("name", registered())
def test_throughput_of_every_environment_at_its_defaults(name):
    """Without a baseline, and with the reason, where there is none for these settings."""
    request = env_throughput.parse(["--env", name, "--num_envs", "2", "--quick"])[1]
    result = env_throughput.run(request, None, silent)
    assert [row["num_envs"] for row in result["rows"]] == [2]
    assert all(entry["rate"] > 0 for entry in result["rows"][0]["stages"].values())
    assert (result["baseline"] is not None) == (name in ("coverage", "reach"))
    assert (result["baseline"] is None) == any("only JAX is measured" in note for note in result["notes"])


@pytest.mark.parametrize("name", registered())
def test_training_on_every_environment_at_its_defaults_can_be_timed(name):
    """The command needs no length of training, which no measurement has."""
    request = train_throughput.parse(["--algo", "ppo", "--env", name, "--num_envs", "8", "--quick"])[1]
    assert train_throughput.build_run(request.config).config.run.total_env_steps > 0


class Steps:
    """A baseline of the corridor that does nothing."""

    name, notes = "idle", ("it does nothing",)

    def __init__(self, settings, policy, seed):
        if policy != "random":
            raise ValueError(f"no policy {policy}")
        self.left = 0

    def reset(self):
        self.left = 3

    def act(self):
        return np.zeros(1)

    def observe(self, action):
        pass

    def step(self, action):
        self.left -= 1
        return self.left == 0

    def measure(self):
        return {}


class Idle:
    """A learner that does nothing."""

    threads = 1

    def __init__(self, settings, algo, seed, device):
        assert (algo["updates_per_step"], device) == (0.5, "cpu")

    def collect(self, episodes, copies=1):
        return episodes * 10

    def learn(self):
        pass


@pytest.fixture
def entry(monkeypatch):
    """The corridor among the baselines."""
    system = baselines.Entry(
        algo=ALGO,
        policy="random",
        cases={"short": {"length": 3}, "long": {"length": 6}},
        baseline=Steps,
        learner=Idle,
        shorten=lambda spec, algo, samples: (8, {"updates_per_step": 0.5}),
    )
    monkeypatch.setitem(baselines.ENTRIES, ENV, "test_bench_entry")
    module = types.ModuleType("test_bench_entry")
    monkeypatch.setattr(module, "ENTRY", system, raising=False)
    monkeypatch.setitem(sys.modules, "test_bench_entry", module)
    return system


@pytest.mark.parametrize(("devices", "sizes"), [pytest.param(1, (2, 4), marks=pytest.mark.slow), (2, (4,))])
def test_environment_throughput(entry, devices, sizes):
    settings = {"num_agents": 1, "length": 4, "horizon": 10}
    request = env_throughput.Request(
        ENV,
        env_throughput.variants(settings, "length=4,5"),
        "random",
        (*sizes, 10**9),
        rounds=2,
        min_seconds=1e-6,
        limit=2**20,
        devices=devices,
    )
    result = env_throughput.run(request, RATES, silent)
    assert [(row["variant"], row["num_envs"]) for row in result["rows"]] == [
        (length, size) for length in ("length 4", "length 5") for size in sizes
    ]
    remark = result["notes"].pop()
    assert result["baseline_threads"] is None or f"runs with {result['baseline_threads']}" in remark
    assert result["notes"].pop() == "it does nothing" and result["baseline_name"] == "idle"
    assert [note.split(":")[0] for note in result["notes"]] == [
        "skipped 1,000,000,000 environments (length 4)", "skipped 1,000,000,000 environments (length 5)"
    ]  # fmt: skip
    row = result["rows"][len(sizes) - 1]
    assert (
        row["together"] == 4
        and row["devices"] == devices
        and row["steps"] == 10
        and set(row["stages"]) == set(rollout_timing.STAGES)
    )
    for stage in row["stages"].values():
        assert len(stage["samples"]) == 2 and stage["rate"] == 4 / stage["median"]
        assert stage["roofline"] == pytest.approx(stage["rate"] / devices * stage["needed_bytes_per_step"] / 1e9)
        assert stage["times_baseline"] > 0 and stage["compile_seconds"] > 0
    assert set(result["baseline"]) == {"without metrics", "rules", "observation", "policy", "reset"}
    assert result["baseline"]["rules"]["rate"] <= result["baseline"]["without metrics"]["rate"]


def test_the_stages_play_the_same_episodes():
    env = batched(Corridor(num_agents=2, length=3))
    alone = rollout_timing.EnvTimer(env, 6, seed=3, stages=())
    flight = rollout_timing.EnvTimer(env, 6, seed=3, devices=2)
    assert np.array_equal(alone._tape, flight._tape) and len(flight._tape.sharding.device_set) == 2
    ends = {}
    for stage in rollout_timing.STAGES:
        program = flight._programs[stage]
        state, timestep, _ = program(*flight._reset(flight._keys), flight._tape, flight._keys)
        ends[stage] = state.env.position
        assert isinstance(timestep.observation, tuple) == (stage == "rules")
    assert jnp.array_equal(ends["rules"], ends["observation"]) and jnp.array_equal(ends["rules"], ends["policy"])
    assert flight._tape.shape == (10, 6, 2)


# Training


def tiny_config(**changes):
    flags = ["--algo", ALGO, "--env", ENV, "--total_env_steps", "1000", "--num_envs", "8"]
    return command_line.parse(flags).config.with_run(**changes)


@pytest.fixture(scope="module")
def whole():
    request = train_throughput.Request(tiny_config(), (8,), seconds=100.0, rounds=1, torch=True)
    return train_throughput.run(request, RATES, silent)


def test_training_throughput(whole):
    (row,) = whole["rows"]
    assert not row["projected"] and row["torch"] is None and row["devices"] == 8
    assert whole["notes"] == [f"no PyTorch learner: there is none for {ALGO} on {ENV}"]
    assert row["updates"] == 4 and row["env_steps_per_second"] == 32 / row["iteration_seconds"]
    assert row["updates_per_second"] == 4 / row["iteration_seconds"]
    assert row["iteration_seconds"] == row["whole"]["median"]
    assert row["flop_per_iteration"] == row["learn"]["flop"] == 4 * 3 * 640
    assert row["learn"]["of_matmul"] == pytest.approx(row["learn"]["rate"] / 8 / 2e9)
    assert row["learn"]["of_convolution"] == pytest.approx(row["learn"]["rate"] / 8 / 1e9)
    assert row["bytes_per_env"] == row["bytes_per_device"]  # one environment per device


@pytest.mark.parametrize("sizes", [(8,), pytest.param((8, 16), marks=pytest.mark.slow)])
def test_long_iterations_are_projected(entry, sizes):
    request = train_throughput.Request(tiny_config(devices=1), sizes, seconds=1e-12, rounds=1, torch=True)
    result = train_throughput.run(request, RATES, silent)
    assert tuple(row["num_envs"] for row in result["rows"]) == sizes and result["torch_threads"] == 1
    for row in result["rows"]:
        assert row["projected"] and row["whole"] is None
        assert row["learn"]["updates"] == 2 and row["learn"]["flop"] == row["flop_per_iteration"] / 2
        collect, learn = row["collect"]["rate"], row["learn"]["rate"]
        env_steps = 4 * row["num_envs"]
        assert row["iteration_seconds"] == pytest.approx(env_steps / collect + row["flop_per_iteration"] / learn)
        theirs = row["torch"]
        seconds = env_steps / theirs["collect"]["rate"] + row["flop_per_iteration"] / theirs["learn"]["rate"]
        assert theirs["env_steps_per_second"] == pytest.approx(env_steps / seconds)
        assert theirs["times"] == pytest.approx(seconds / row["iteration_seconds"])
    assert "projected from parts" in result["notes"][0]


# Coverage's entry


def test_the_baseline_of_coverage_flies():
    baseline = coverage.ENTRY.baseline(dataclasses.asdict(make("coverage", q=3, budget=2)), "random", 0)
    baseline.reset()
    ends = []
    for _ in range(3):
        action = baseline.act()
        baseline.observe(action)
        ends.append(baseline.step(action))
    assert ends == [False, False, True] and 0 < baseline.measure()["coverage"] < 1
    with pytest.raises(ValueError, match="unknown policy"):
        coverage.ENTRY.baseline({}, "clever", 0)


@pytest.mark.needs("torch")
def test_the_torch_learner_of_coverage_learns():
    config = command_line.parse(
        ["--config", "coma_published", "--q", "2", "--budget", "2", "--hidden_size", "4"]
    ).config
    settings = config.algo_settings | {"num_epochs": 1, "minibatch_size": 100}
    learner = coverage.ENTRY.learner(config.env_settings, settings, 0)
    assert learner.collect(2) == 6 and learner.threads > 0
    learner.learn()
    with pytest.raises(ValueError, match="depth 1"):
        coverage.ENTRY.learner(config.env_settings, settings | {"depth": 2}, 0)


# Results


@pytest.fixture
def quick_machine(monkeypatch):
    monkeypatch.setattr(rates, "measure", lambda *_, **__: RATES)


def test_verbs_write_json_and_table(whole, entry, quick_machine, tmp_path, capsys):
    path = tmp_path / "new" / "e.json"
    flags = ["--env", ENV, "--num_envs", "2", "--quick", "--out", str(path)]
    assert env_throughput.main(flags) == 0
    out = capsys.readouterr()
    assert (
        "env steps/s by stage (times idle)" in out.out
        and "it does nothing" in out.err
        and "the figures mean nothing" in out.err
    )
    result = json.loads(path.read_text())
    assert result["kind"] == "env_throughput" and result["quick"] and result["machine"]["jax"] == jax.__version__
    assert result["command"].startswith("python -m bench.env_throughput --env helpers.tiny:Corridor")
    assert result["rates"]["copy"] == 1e9 and result["rows"][0]["num_envs"] == 2
    page = path.with_suffix(".md").read_text()
    assert "| num_envs | at once | rules |" in page and "| idle | 1 |" in page
    trained = result | whole | {"kind": "train_throughput", "notes": []}
    assert "| 8 |" in tables.markdown(trained) and "torch" not in tables.markdown(trained)


@pytest.mark.slow
def test_compare(entry, quick_machine, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(compare.importlib.util, "find_spec", lambda name: None)
    preset = tmp_path / "tiny.yaml"
    preset.write_text(f"algo: {ALGO}\nenv: {ENV}\ntotal_env_steps: 1000\ndevices: 1\n")
    path = tmp_path / "c.json"
    flags = ["--env", ENV, "--config", str(preset), "--num_envs", "8", "--quick", "--out", str(path)]
    assert compare.main(flags) == 0
    result = json.loads(path.read_text())
    assert list(result["cases"]) == ["long"]  # a rehearsal takes the last case
    case = result["cases"]["long"]
    assert case["environment"]["variants"][""]["length"] == case["training"]["settings"]["length"] == 6
    assert any("PyTorch is not installed" in note for note in result["notes"])
    assert "**long, " in path.with_suffix(".md").read_text()
    assert "long, helpers.tiny:TinyQ on helpers.tiny:Corridor: training" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("verb", "argv", "words"),
    [
        (env_throughput, ["--env", "coverge"], "did you mean 'coverage'?"),
        (env_throughput, ["--num_envs", ","], "names no number"),
        (env_throughput, ["--q", "1"], "q must lie between 2 and 200"),
        (env_throughput, ["--policy", "randm"], "did you mean 'random'?"),
        (env_throughput, ["--vary", "q=a,b"], "must be of type int"),
        (env_throughput, ["--vary", "q"], "must be NAME=A,B"),
        (env_throughput, ["--at_once", "3", "--num_envs", "64"], "does not divide"),
        (env_throughput, ["--memory_gb", "-1"], "--memory_gb"),
        (env_throughput, ["--out", "result.txt"], "must end in .json"),
        (train_throughput, [], "--algo NAME"),
        (train_throughput, ["--algo", "coma", "--seconds", "0"], "--seconds must be a number above 0"),
        (train_throughput, ["--algo", "coma", "--hidden_sise", "3"], "did you mean '--hidden_size'?"),
        (compare, ["--env", "snake"], "nothing to compare"),
    ],
)
def test_bad_input(verb, argv, words, quick_machine, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(measure, "RESULTS", tmp_path)
    assert verb.main(argv) == 2
    error = capsys.readouterr().err
    last = error.splitlines()[-1]
    assert last.startswith("error: ") and words in last
    assert not list(tmp_path.iterdir())


def test_learning_reads_selections_or_hundreds_of_training_games(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(measure, "RESULTS", tmp_path / "results")
    run = tmp_path / "runs" / "snakes" / "0001"
    run.mkdir(parents=True)
    (run / "config.yaml").write_text("algo: ddpg\n")
    selections = {3: -5.0, 4: 2.0}  # by iteration; training scores 1, 1, 2, 2, ... in lines of fifty games each
    lines = []
    for k in range(1, 6):
        line = {"iteration": k, "env_steps": 10 * k, "time/unix": 100.0 + k, "episodes": 50.0}
        lines.append(line | {"rollout/score": float((k + 1) // 2)})
        if k in selections:
            lines.append({"iteration": k, "eval/score_difference": selections[k]})
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    match = {"first": "sampled", "second": "random", "score": {"mean": 2.5}}
    evaluation = {"score": "score_difference", "episodes": 7, "settings": {"seed": 4}, "versions": {}}
    (run / "evaluation.json").write_text(json.dumps(evaluation | {"matches": [match]}))
    assert learning.main([str(run), "--name", "a", "--reach", "0"]) == 0
    study = json.loads((tmp_path / "results" / "learning_a.json").read_text())
    assert study["curves"] == [
        [{"env_steps": 30, "seconds": 2.0, "score": -5.0}, {"env_steps": 40, "seconds": 3.0, "score": 2.0}]
    ]
    assert study["reached"] == {"score": 0.0, "env_steps": [40], "median": 40, "seconds": [3.0]}
    assert study["seeds"] == [4]
    assert study["held_out"] == {"sampled against random": [{"score": {"mean": 2.5}}]}
    assert learning.main([str(run), "--name", "b", "--training", "score"]) == 0
    study = json.loads((tmp_path / "results" / "learning_b.json").read_text())
    assert [(point["env_steps"], point["score"]) for point in study["curves"][0]] == [(20, 1.0), (40, 2.0)]
    (run / "evaluation.json").write_text(json.dumps(evaluation | {"matches": [match], "score_mode": "min"}))
    assert learning.main([str(run), "--name", "d", "--reach", "0"]) == 0  # where small is good, -5 was already there
    study = json.loads((tmp_path / "results" / "learning_d.json").read_text())
    assert study["reached"]["env_steps"] == [30] and study["reached"]["seconds"] == [2.0]

    def entry(*means: Any) -> Any:
        return {"mean": list(means), "std": [0.5] * len(means), "maximum": 9.0}

    policies = {"learned": {"score_difference": entry(1.0, 4.0), "length": entry(7.0, 8.0)}}
    (run / "evaluation.json").write_text(json.dumps(evaluation | {"policies": policies}))
    assert learning.main([str(run), "--name", "e"]) == 0
    study = json.loads((tmp_path / "results" / "learning_e.json").read_text())
    assert study["held_out"] == {"learned": [{"mean": 4.0, "std": 0.5}]}  # at the end of the episode
    assert study["other_metrics"] == {"length": {"learned": [{"mean": 8.0, "std": 0.5}]}}
    capsys.readouterr()
    assert learning.main([str(run), "--name", "c", "--training", "scores"]) == 1
    assert "no hundred training episodes with a 'scores'" in capsys.readouterr().err
    assert learning.main([str(run), "--name", "../c"]) == 2
    assert "must be a name without folders" in capsys.readouterr().err
    for damaged in ('{"score": ', "{}", "[]"):
        (run / "evaluation.json").write_text(damaged)
        assert learning.main([str(run), "--name", "c"]) == 1
        assert "evaluation.json is damaged: evaluate the run again" in capsys.readouterr().err
