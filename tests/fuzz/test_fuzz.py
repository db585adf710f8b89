"""Random command lines, configurations, datasets, weights, evaluations: no traceback, nothing lost, no silence."""

import contextlib
import dataclasses
import json
import pickle
import random
import shutil
import zipfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness import COVERAGE, REACH, SNAKES, TINY, VERBS, call, made, told, world
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from test_expert_dataset import saved
from test_torch_weights import archive, tensors

from envs_jax.base import make, registered
from jaxrl.algos import ALGORITHMS
from jaxrl.cli.flags import parse
from jaxrl.common.errors import UserError
from jaxrl.evaluation import records
from jaxrl.evaluation.policies import load
from jaxrl.runtime import build
from jaxrl.runtime import run as runs
from jaxrl.runtime.presets import presets

__all__ = ["made", "world"]
pytestmark = pytest.mark.fuzz

COMMANDS, CONFIGURATIONS, FILES = 3000, 500, 100  # examples; FILES of each kind


def fuzz(examples: int) -> settings:
    """Bounded and seeded."""
    return settings(
        max_examples=examples,
        derandomize=True,
        deadline=None,
        database=None,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )


# Command lines

BASES = {
    "train": [
        TINY,
        TINY,
        SNAKES,
        REACH,
        "--algo coma",
        "--algo sac",
        "--config coma_quick",
        "--resume tiny",
        "--resume snakes",
        "--algo collective",
        "--algo student",
        "--config small.yaml",
        "",
    ],
    "evaluate": [
        "tiny",
        "snakes",
        "reach",
        f"{COVERAGE} --policy random",
        "snakes --against tiny",
        "reach --simulator jax",
        "--policy random --env snakes_1v1",
        "--env helpers.tiny:Corridor --policy right",
        "",
    ],
    "collect": ["reach --out set.npz --episodes 3 --simulator jax", "tiny --out set.npz", "reach", ""],
    "render": [f"{COVERAGE} --policy random --out page.html", "snakes --out game.gif", "reach --out arm.png", ""],
    "export": ["snakes --format jidi --out agent", "tiny --format stablehlo --out agent", "snakes --format numpy", ""],
    "doctor": [TINY, "--algo coma", ""],
    "plots": ["result.json", ""],
    "env_throughput": ["--quick --env helpers.tiny:Corridor --out out.json", "--quick", ""],
    "train_throughput": [f"--quick {TINY} --out out.json", ""],
    "compare": ["--quick --env coverage --out out.json", ""],
    "convolution": ["--quick --out out.json", ""],
    "learning": ["tiny --out out", "snakes", ""],
}
FLAGS = (
    "algo env config resume num_envs seed total_env_steps total_episodes max_seconds schedule_env_steps init_from "
    "devices logical_shards rollout_chunk learn_chunk compute_dtype rollout_dtype memory_gb "
    "block_iterations block_seconds log_every self_play self_play_every eval_every eval_episodes checkpoint_every "
    "checkpoint_minutes keep_checkpoints runs coordinator num_hosts host_index host_timeout env_steps_per_update "
    "update_interval n_step critics depth units gamma tau actor_lr critic_lr batch_size buffer_size warmup capacity "
    "length horizon num_agents q budget task goals opponent teams snakes beans class_weights state_entries labelled "
    "workers collective width minibatches transitions learning_rate help last episodes policy against "
    "at json out chunk simulator expert episode format greedy rounds vary at_once "
    "no_baseline seconds torch widths methods dtype metric "
).split()
PATHS = (
    "tiny snakes reach empty folder.json text text.npz text.pth text.json nothing bytes.yaml small.yaml result.json "
    "arrays.npz pipe.json link.json away nowhere tiny/config.yaml tiny/checkpoints . .. / /dev/null /dev/zero "
    "/proc/self empty/ out.png/ out.png out.gif out.html out.json out.npz tiny,reach text.pth,text.pth a/b/c.png "
).split()
NUMBERS = (
    "0 1 2 3 7 8 -1 -0 0.5 1e-3 1e30 1e-300 1e308 1e400 -1e30 nan inf -inf 1e12 1000000000 2000000000 4294967296 "
    "99999999999999999999 1e-12 0x10 1_000 ٣ 1e 1,2,3 1,x , ,, 16,8 2:1 0:1,2:3@0.5 q=1,2 num_agents=1,2 "
    "localhost:99999 localhost:1 "
).split() + ["", " ", "9" * 400, "9" * 5000]
WORDS = [
    *ALGORITHMS,
    *registered(),
    *presets(),
    "helpers.tiny:TinyQ",
    "helpers.tiny:Corridor",
    "helpers.tiny:PointMass",
    "helpers.tiny:Nothing",
    "../../x:Y",
    ".x:Y",
    ":",
    "a:",
    ":b",
    "os:path",
    "os:system",
    "tiny:jnp",
    "jaxrl.algos.base:Algorithm",
    "envs_jax.base:Environment",
    "jaxrl.algos.off_policy:OffPolicy",
    "auto",
    "float32",
    "bfloat15",
    "true",
    "maybe",
    "random",
    "learned",
    "sampled",
    "zero_code",
    "ig",
    "right",
    "2",
    "self",
    "outside",
    "curriculum",
    "jidi",
    "metaworld",
    "jax",
    "scripted",
    "all",
    "reach,closed",
    "x" * 300,
    "x" * 5000,
    "x/" * 3000,
    "\n",
    "a\x1b[2Jb",
    "\udc80",
    "é",
    "-",
    "--",
    "---",
    "=",
    "%s",
    "{x}",
    "*",
    "--=1",
    "-h",
]
VALUES = st.one_of(
    st.sampled_from(NUMBERS),
    st.sampled_from(WORDS),
    st.sampled_from(PATHS),
    st.text(max_size=12).filter(lambda t: "\0" not in t),
)


@st.composite
def command_lines(draw: Any) -> tuple[str, list[str]]:
    verb = draw(st.sampled_from([*VERBS, "train", "train", "train", "evaluate", "render"]))
    words = draw(st.sampled_from(BASES[verb])).split()
    for _ in range(draw(st.integers(0, 3))):
        kind = draw(st.integers(0, 9))
        value = draw(VALUES)
        if kind < 7:
            flag = f"--{draw(st.sampled_from(FLAGS))}"
            words += [flag, value] if kind < 5 else [f"{flag}={value}"] if kind < 6 else [flag]
        elif kind < 8:
            words.insert(draw(st.integers(0, len(words))), value)
        elif words:
            del words[draw(st.integers(0, len(words) - 1))]
    return verb, words


def test_command_lines(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outcomes: Counter[str] = Counter()

    @fuzz(COMMANDS)
    @given(command_lines())
    def one(line: tuple[str, list[str]]) -> None:
        call(*line, world, outcomes)

    one()
    told(outcomes, capsys, "command lines")


# Configurations

KEYS = [
    "algo",
    "env",
    "seed",
    "gamma",
    "num_envs",
    "lr",
    "length",
    "task",
    "layer_norm",
    "q",
    "total_env_steps",
    "expert_datasets",
    "init_from",
    "runs",
    "gama",
    "1",
    "~",
    "[a]",
]
SCALARS = [
    "2024-13-45",
    "2024-01-01",
    "!!int foo",
    "!!float foo",
    "!!bool foo",
    "!!timestamp foo",
    "!!binary x",
    "!!set {a}",
    "!!omap [a: 1]",
    "!!pairs [a: 1]",
    "!!null x",
    "!!python/name:os.system",
    "!x y",
    "9" * 5000,
    "9" * 4000,
    "0x" + "f" * 5000,
    "[" * 3000,
    "[" * 200 + "]" * 200,
    "{" * 500,
    "&a [1]",
    "*a",
    "&a *a",
    "1e400",
    ".inf",
    ".nan",
    "-.inf",
    "1:2:3",
    "'",
    '"',
    '"\\0"',
    '"\\udc80"',
    "|",
    ">",
    "%",
    "@",
    "`",
    "- 1",
    "? a",
    "true",
    "null",
    "[]",
    "{}",
    "[1, 2]",
    "{a: 1}",
    "reach",
    "coverage",
    "helpers.tiny:TinyQ",
    "helpers.tiny:Corridor",
    "sac",
    "coma",
    "0",
    "1",
    "0.5",
    "64",
    "x" * 5000,
    "runs",
    "/dev/null",
    "tiny",
    "text.npz",
    "text.pth",
]
ODD_TEXT = st.text(st.characters(codec="utf-8"), max_size=20)


@st.composite
def yaml_texts(draw: Any) -> bytes:
    text = "algo: helpers.tiny:TinyQ\nenv: helpers.tiny:Corridor\nnum_envs: 8\ntotal_env_steps: 64\n"
    for _ in range(draw(st.integers(0, 4))):
        value = draw(st.one_of(st.sampled_from(SCALARS), ODD_TEXT))
        text += draw(st.sampled_from([f"{draw(st.sampled_from(KEYS))}: {value}\n", f"{value}\n", f"<<: {value}\n"]))
    content = text.encode()
    if draw(st.booleans()):
        content = damaged(content, draw(st.integers(0, 2**32)))
    return content


def damaged(content: bytes, seed: int) -> bytes:
    """Some bytes flipped, removed, repeated or put in."""
    drawn = random.Random(seed)
    for _ in range(drawn.randint(1, 3)):
        start = drawn.randrange(len(content) + 1)
        piece = content[start : start + drawn.choice([1, 1, 4, 64])]
        new = drawn.choice(
            [
                b"",
                piece * 2,
                bytes(b ^ 1 << drawn.randrange(8) for b in piece),
                b"\xff" * len(piece),
                b"\0" * len(piece),
                drawn.randbytes(len(piece)),
                b"9" * 30,
            ]
        )
        content = content[:start] + new + content[start + len(piece) :]
    return content[: drawn.randrange(len(content) + 1)] if drawn.random() < 0.2 else content


def test_configurations(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outcomes: Counter[str] = Counter()
    run = world / "changed"
    shutil.copytree(world / "tiny", run)

    @fuzz(CONFIGURATIONS)
    @given(yaml_texts(), st.integers(0, 4))
    def one(content: bytes, how: int) -> None:
        (run / "config.yaml").write_bytes(content)
        lines = (
            ["train", "--config", "changed/config.yaml"],
            ["train", "--resume", "changed"],
            ["evaluate", "changed"],
            ["train_throughput", "--config", "changed/config.yaml", "--out", "out.json"],
            ["train", *TINY.split(), "--init_from", "changed"],
        )
        call(lines[how][0], lines[how][1:], world, outcomes)

    one()
    shutil.rmtree(run)
    told(outcomes, capsys, "configurations")


# Files of arrays, weights and evaluations


@st.composite
def changes(draw: Any) -> dict[str, Any]:
    """Arrays of other shapes and types in an expert dataset."""
    name = draw(
        st.sampled_from(
            [
                "version",
                "environment",
                "task_names",
                "task",
                "step",
                "observation",
                "action",
                "reward",
                "terminated",
                "mu",
                "value",
                "log_std",
                "more",
            ]
        )
    )
    shape = draw(st.sampled_from([(), (0,), (1,), (40,), (40, 0), (40, 2), (40, 3), (40, 39), (39, 2), (40, 1, 1)]))
    kind = draw(st.sampled_from(["f2", "f4", ">f8", "i1", "i8", "u8", "?", "c8", "U1", "U0", "S3", "M8[s]", "V3", "O"]))
    return {name: np.zeros(shape, kind) if kind != "O" else np.full(shape, None)}


def test_expert_dataset_sets(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outcomes: Counter[str] = Counter()
    file = world / "fuzzed.npz"

    @fuzz(FILES)
    @given(changes(), st.integers(0, 2**32), st.integers(0, 2))
    def one(changes: dict[str, Any], seed: int, how: int) -> None:
        saved(file, **(changes if how else {}))
        if how < 2:
            file.write_bytes(damaged(file.read_bytes(), seed))
        argv = "--algo collective --env reach --devices 1 --memory_gb 8 --expert_datasets fuzzed.npz"
        call("train", argv.split(), world, outcomes)

    one()
    file.unlink()
    told(outcomes, capsys, "expert datasets")


def test_weights(world: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes: Counter[str] = Counter()
    file = world / "fuzzed.pth"
    argv = f"{SNAKES} --config ddpg_competition --init_from fuzzed.pth --hidden_size 8 --first_layer linear"
    words = argv.replace("--algo ddpg --env snakes_1v1 ", "").split()
    setup = build.build_run(parse(words).config)
    monkeypatch.setattr(runs, "build_run", lambda config, custom: setup)  # weights are read behind it
    odd = st.recursive(
        st.none() | st.integers() | st.text(max_size=5) | st.binary(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3) | st.dictionaries(st.integers() | st.text(max_size=3), inner, max_size=3)
        ),
        max_leaves=5,
    )

    @fuzz(FILES)
    @given(odd, st.integers(0, 2**32), st.integers(0, 4))
    def one(content: Any, seed: int, how: int) -> None:
        whole = tensors(26, 4, hidden_size=8)
        if how == 0:
            archive(file, whole, pickle.dumps(content))
        else:
            archive(file, whole)
        if how in (1, 2):
            file.write_bytes(damaged(file.read_bytes(), seed))
        elif how in (3, 4):  # whole as an archive, damaged inside
            members = {name: zipfile.ZipFile(file).read(name) for name in zipfile.ZipFile(file).namelist()}
            with zipfile.ZipFile(file, "w") as made:
                for name, member in members.items():
                    made.writestr(name, damaged(member, seed) if name.endswith("data.pkl") == (how == 3) else member)
        call("train", words, world, outcomes)

    one()
    file.unlink()
    told(outcomes, capsys, "weights")


def test_evaluations(tmp_path: Path) -> None:
    file = tmp_path / "fuzzed.json"
    curve = {"mean": [0.5, 0.4, 0.3, 0.2], "ci95": [0.1, None, 0.1, 0.1]}
    settings_of_env = dataclasses.asdict(make("coverage", q=4, num_agents=2, budget=2))
    subject = load(None, "coverage", settings_of_env)
    values = st.sampled_from(
        [None, [], {}, "", "x" * 5000, "\ud800", 0, -1, 10**400, 1e308, float("nan"), True, [[1]], curve]
    )

    def put(node: Any, where: random.Random, value: Any) -> None:
        while True:
            names = list(node) if isinstance(node, dict) else list(range(len(node)))
            name = where.choice(names)
            if not isinstance(node[name], dict | list) or not node[name] or where.random() < 0.3:
                node[name] = value
                return
            node = node[name]

    @fuzz(FILES)
    @given(values, st.integers(0, 2**32), st.integers(0, 2))
    def one(value: Any, seed: int, how: int) -> None:
        report = {
            "format": 1,
            "env": "coverage",
            "env_settings": settings_of_env,
            "steps": 3,
            "score": "entropy",
            "score_mode": "min",
            "policies": {"random": {"entropy": dict(curve), "f1": dict(curve)}, "ig": {"entropy": dict(curve)}},
        }
        if how:
            put(report, random.Random(seed), value)
        text = json.dumps(report).encode()
        file.write_bytes(damaged(text, seed) if how < 2 else text)
        with contextlib.suppress(UserError):
            records.read_evaluation(file, subject, "random")

    one()
