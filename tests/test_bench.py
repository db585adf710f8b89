"""Benchmarks: what they count by hand, what they measure, and what their commands write, compare and refuse."""

import json
import re
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.tiny import Corridor

from bench import baselines, env_throughput, train_throughput
from bench.harness import measure, rates, rollout_timing, threads
from bench.harness.timing import Timing
from envs_jax.base import registered
from envs_jax.batch import batched
from jaxrl.cli import flags as command_line
from jaxrl.common.errors import UserError

pytestmark = pytest.mark.bench  # of benchmarks, not of the product

ENV, ALGO = "helpers.tiny:Corridor", "helpers.tiny:TinyQ"
SECOND = Timing((1.0,))


def silent(sentence):
    pass


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


# Rates of a machine


def test_rates_are_work_over_time(monkeypatch):
    seconds = {"copy": 0.5, "fresh": 1.0, "float32": 2.0, "bfloat16": 4.0}
    monkeypatch.setattr(rates, "measure_interleaved", lambda *_: {name: Timing((s,)) for name, s in seconds.items()})
    measured = rates.measure(quick=True)
    assert measured.copy == 2 * 4 * 2**18 / 0.5 and measured.fresh == measured.copy / 2
    assert measured.matmul == {"float32": 2 * 64**3 / 2, "bfloat16": 2 * 64**3 / 4}


def test_float32_products_are_not_tf32(monkeypatch):
    """On GPUs, which round to ten bits by default; that rate has a name of its own."""
    products = {}

    def keep(name, body, carry, min_seconds):
        products[name] = str(jax.make_jaxpr(body)(carry))

    monkeypatch.setattr(rates, "repeat", keep)
    monkeypatch.setattr(rates, "measure_interleaved", lambda *_: dict.fromkeys([*products, "copy", "fresh"], SECOND))
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert set(rates.measure(quick=True).matmul) == {"float32", "tf32", "bfloat16"}
    assert "HIGHEST" in products["float32"]
    assert "HIGHEST" not in products["tf32"] + products["bfloat16"]
    assert "f32" in products["tf32"] and "bf16" not in products["tf32"]


# Environments


@pytest.mark.parametrize("name", registered())
def test_throughput_of_every_environment_at_its_defaults(name):
    """Without a baseline, and with the reason, where there is none for these settings."""
    request = env_throughput.parse(["--env", name, "--num_envs", "2", "--quick"])[1]
    result = env_throughput.run(request, silent)
    assert [row["num_envs"] for row in result["rows"]] == [2]
    assert all(entry["rate"] > 0 for entry in result["rows"][0]["stages"].values())
    assert (result["baseline"] is not None) == (name in ("coverage", "reach"))
    assert (result["baseline"] is None) == any("only JAX is measured" in note for note in result["notes"])


@pytest.mark.parametrize("name", registered())
def test_training_on_every_environment_at_its_defaults_can_be_timed(name):
    """The command needs no length of training, which no measurement has."""
    config = train_throughput.parse(["--algo", "ppo", "--env", name, "--num_envs", "8", "--quick"])[1]
    assert train_throughput.build_run(config.with_run(num_envs=8)).config.run.total_env_steps > 0


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


@pytest.fixture
def entry(monkeypatch):
    """The corridor among the baselines."""
    system = baselines.Entry(policy="random", baseline=Steps)
    monkeypatch.setitem(baselines.ENTRIES, ENV, "test_bench_entry")
    module = types.ModuleType("test_bench_entry")
    monkeypatch.setattr(module, "ENTRY", system, raising=False)
    monkeypatch.setitem(sys.modules, "test_bench_entry", module)
    return system


def test_environment_throughput(entry, monkeypatch):
    monkeypatch.setattr(env_throughput.memory_plan, "free_memory", lambda *_: 2**20)
    settings = {"num_agents": 1, "length": 4, "horizon": 10}
    request = env_throughput.Request(ENV, settings, "random", (2, 4, 10**9), rounds=2, min_seconds=1e-6, devices=2)
    result = env_throughput.run(request, silent)
    assert [row["num_envs"] for row in result["rows"]] == [2, 4]
    remark = result["notes"].pop()
    assert result["baseline_threads"] is None or f"runs with {result['baseline_threads']}" in remark
    assert result["notes"].pop() == "it does nothing" and result["baseline_name"] == "idle"
    assert [note.split(":")[0] for note in result["notes"]] == ["skipped 1,000,000,000 environments"]
    row = result["rows"][-1]
    assert (row["together"], row["devices"], row["steps"]) == (4, 2, 10)
    assert set(row["stages"]) == set(rollout_timing.STAGES)
    for stage in row["stages"].values():
        assert len(stage["samples"]) == 2 and stage["rate"] == 4 / stage["median"]
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


def test_training_throughput():
    """Sizes that do not fit are left out, and named; an error is raised where none fits."""
    result = train_throughput.run(tiny_config(memory_gb=1.0), (8, 2**24), 2, silent)
    (row,) = result["rows"]
    assert (row["num_envs"], row["devices"], len(row["iteration"]["samples"])) == (8, 8, 2)
    assert row["env_steps_per_second"] == 32 / row["iteration"]["median"]
    assert row["updates_per_second"] == 4 / row["iteration"]["median"]
    assert row["compile_seconds"] > 0 and row["bytes_per_device"] > 0
    (note,) = result["notes"]
    assert note.startswith("skipped 16,777,216 environments: ")
    with pytest.raises(UserError):
        train_throughput.run(tiny_config(memory_gb=1.0), (2**24,), 2, silent)


# Results


def test_verbs_write_json_and_a_line_for_each_size(entry, tmp_path, capsys):
    path = tmp_path / "new" / "e.json"
    flags = ["--env", ENV, "--num_envs", "2", "--quick", "--out", str(path)]
    assert env_throughput.main(flags) == 0
    out = capsys.readouterr()
    assert re.match(r"2 environments: rules \S+( [kM])? steps/s \(\S+ times the baseline\), observation ", out.out)
    assert "it does nothing" in out.err and "the figures mean nothing" in out.err
    result = json.loads(path.read_text())
    assert result["kind"] == "env_throughput" and result["quick"] and result["machine"]["jax"] == jax.__version__
    assert result["command"].startswith("python -m bench.env_throughput --env helpers.tiny:Corridor")
    assert result["rows"][0]["num_envs"] == 2
    flags = ["--algo", ALGO, *flags]
    assert train_throughput.main(flags) == 0
    assert re.match(r"2 environments: \S+( [kM])? environment steps/s, ", capsys.readouterr().out)
    assert json.loads(path.read_text())["kind"] == "train_throughput"


@pytest.mark.parametrize(
    ("verb", "argv", "words"),
    [
        (env_throughput, ["--env", "coverge"], "did you mean 'coverage'?"),
        (env_throughput, ["--num_envs", ","], "names no number"),
        (env_throughput, ["--q", "1"], "q must lie between 2 and 200"),
        (env_throughput, ["--policy", "randm"], "did you mean 'random'?"),
        (env_throughput, ["--out", "result.txt"], "must end in .json"),
        (train_throughput, [], "--algo NAME"),
        (train_throughput, ["--algo", "coma", "--hidden_sise", "3"], "did you mean '--hidden_size'?"),
    ],
)
def test_bad_input(verb, argv, words, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(measure, "RESULTS", tmp_path)
    assert verb.main(argv) == 2
    error = capsys.readouterr().err
    last = error.splitlines()[-1]
    assert last.startswith("error: ") and words in last
    assert not list(tmp_path.iterdir())
