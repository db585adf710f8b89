"""Random command lines, configurations, datasets, weights and evaluations: each is read, or refused in one sentence."""

import copy
import dataclasses
import json
import pickle
import random
import warnings
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from test_expert_dataset import save
from test_torch_weights import archive, tensors

from envs_jax.base import make, registered
from jaxrl.algos import ALGORITHMS
from jaxrl.cli.flags import parse
from jaxrl.common.errors import UserError
from jaxrl.evaluation import records
from jaxrl.evaluation.policies import load
from jaxrl.integrations import expert_dataset, torch_weights
from jaxrl.runtime.config import RunSettings
from jaxrl.runtime.presets import presets

pytestmark = pytest.mark.slow


def fuzz(examples: int) -> settings:
    """Bounded and seeded."""
    return settings(
        max_examples=examples, derandomize=True, deadline=None, database=None, phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip


def read_or_refuse(function: Any, *arguments: Any) -> None:
    """No error but ours, and no silent one."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            function(*arguments)
        except UserError as error:
            sentence = str(error)
        except SystemExit:  # --help
            return
        else:
            return
    assert sentence.strip()


def damage(content: bytes, seed: int) -> bytes:
    """Some bytes flipped, removed, repeated or put in."""
    drawn = random.Random(seed)
    for _ in range(drawn.randint(1, 3)):
        start = drawn.randrange(len(content) + 1)
        piece = content[start : start + drawn.choice([1, 1, 4, 64])]
        flipped = bytes(b ^ 1 << drawn.randrange(8) for b in piece)
        new = drawn.choice([b"", piece * 2, flipped, b"\xff" * len(piece), b"\0" * len(piece), b"9" * 30])
        content = content[:start] + new + content[start + len(piece) :]
    return content[: drawn.randrange(len(content) + 1)] if drawn.random() < 0.2 else content


FLAGS = [*(field.name for field in dataclasses.fields(RunSettings)), *"algo env config resume q gamma opponent".split()]
NUMBERS = "0 1 -1 0.5 1e-3 1e308 1e400 nan inf 1e12 99999999999999999999 0x10 1_000 ٣ 1e 1,2,3 , 0:1,2:3@0.5".split()
PATHS = [".", "..", "/", "/dev/null", "/proc/self", "nowhere", "x" * 300, "x/" * 3000, "a.npz", "a.pth,b.pth"]
WORDS = [*ALGORITHMS, *registered(), *presets(), "helpers.tiny:TinyQ", "helpers.tiny:Nothing", "../x:Y", ":",
         "os:system", "auto", "-", "--", "=", "%s", "\n", "\x1b[2J", "\udc80", "é", "", "9" * 5000]  # fmt: skip
VALUES = st.sampled_from([*NUMBERS, *PATHS, *WORDS]) | st.text(max_size=12).filter(lambda text: "\0" not in text)
BASES = ["--algo coma", "--algo sac", "--algo student", "--config coma_quick", "--algo helpers.tiny:TinyQ", ""]


@fuzz(500)
@given(st.sampled_from(BASES), st.lists(st.tuples(st.sampled_from(FLAGS), VALUES, st.integers(0, 3)), max_size=3))
def test_command_lines(base: str, changes: list[tuple[str, str, int]]) -> None:
    words = base.split()
    for flag, value, kind in changes:
        words += [[f"--{flag}", value], [f"--{flag}={value}"], [f"--{flag}"], [value]][kind]
    read_or_refuse(parse, words)


SCALARS = ["2024-13-45", "!!int foo", "!!python/name:os.system", "9" * 5000, "[" * 3000, "&a [1]", "*a", ".nan",
           "1:2:3", "'", '"\\0"', "|", "%", "- 1", "null", "[]", "{a: 1}", "reach", "0.5", "/dev/null"]  # fmt: skip


@fuzz(200)
@given(st.lists(st.tuples(st.sampled_from([*FLAGS, "lr", "~", "[a]"]), st.sampled_from(SCALARS) | st.text(max_size=9)),
                max_size=4), st.none() | st.integers(0, 2**32))  # fmt: skip
def test_configurations(tmp_path_factory: Any, lines: list[tuple[str, str]], seed: int | None) -> None:
    file = tmp_path_factory.getbasetemp() / "fuzzed.yaml"
    text = "algo: helpers.tiny:TinyQ\nenv: helpers.tiny:Corridor\nnum_envs: 8\ntotal_env_steps: 64\n"
    content = (text + "".join(f"{key}: {value}\n" for key, value in lines)).encode(errors="replace")
    file.write_bytes(content if seed is None else damage(content, seed))
    read_or_refuse(parse, ["--config", str(file)])


SHAPES = [(), (0,), (1,), (40,), (40, 0), (40, 2), (40, 3), (40, 39), (39, 2), (40, 1, 1)]
KINDS = ["f2", "f4", ">f8", "i1", "i8", "u8", "?", "c8", "U1", "U0", "S3", "M8[s]", "V3"]
FIELDS = "version environment task_names task step observation action reward mu value more".split()


@fuzz(100)
@given(st.sampled_from(FIELDS), st.sampled_from(SHAPES), st.sampled_from(KINDS), st.none() | st.integers(0, 2**32))
def test_expert_datasets(tmp_path_factory: Any, name: str, shape: Any, kind: str, seed: int | None) -> None:
    file = tmp_path_factory.getbasetemp() / "fuzzed.npz"
    save(file, **({name: np.zeros(shape, kind)} if seed is None else {}))
    if seed is not None:
        file.write_bytes(damage(file.read_bytes(), seed))
    read_or_refuse(expert_dataset.read, file)


@fuzz(100)
@given(st.recursive(st.none() | st.integers() | st.text(max_size=5), lambda x: st.lists(x, max_size=3), max_leaves=5),
       st.integers(0, 2**32), st.integers(0, 3))  # fmt: skip
def test_weights(tmp_path_factory: Any, content: Any, seed: int, how: int) -> None:
    file: Path = tmp_path_factory.getbasetemp() / "fuzzed.pth"
    archive(file, tensors(26, 4, hidden_size=8), pickle.dumps(content) if how == 0 else None)
    if how == 1:
        file.write_bytes(damage(file.read_bytes(), seed))
    elif how > 1:  # whole as an archive, damaged inside
        members = {name: zipfile.ZipFile(file).read(name) for name in zipfile.ZipFile(file).namelist()}
        with zipfile.ZipFile(file, "w") as rewritten:
            for name, member in members.items():
                rewritten.writestr(name, damage(member, seed) if name.endswith("data.pkl") == (how == 2) else member)
    read_or_refuse(torch_weights.read, file)


COVERAGE = dataclasses.asdict(make("coverage", q=4, num_agents=2, budget=2))
CURVE = {"mean": [0.5, 0.4, 0.3, 0.2], "ci95": [0.1, None, 0.1, 0.1]}
ODD = [None, [], {}, "", "x" * 5000, "\ud800", 0, -1, 10**400, 1e308, float("nan"), True, [[1]], CURVE]


@fuzz(100)
@given(st.sampled_from(ODD), st.integers(0, 2**32), st.booleans())
def test_evaluations(tmp_path_factory: Any, value: Any, seed: int, whole: bool) -> None:
    file = tmp_path_factory.getbasetemp() / "fuzzed.json"
    report: Any = {
        "format": 1, "env": "coverage", "env_settings": dict(COVERAGE), "steps": 3, "score": "entropy",
        "score_mode": "min", "policies": {name: {"entropy": copy.deepcopy(CURVE)} for name in ("random", "ig")},
    }  # fmt: skip
    node, drawn = report, random.Random(seed)
    while True:  # put the value somewhere
        name = drawn.choice(list(node) if isinstance(node, dict) else list(range(len(node))))
        if not isinstance(node[name], dict | list) or not node[name] or drawn.random() < 0.3:
            node[name] = copy.deepcopy(value)
            break
        node = node[name]
    text = json.dumps(report).encode()
    file.write_bytes(text if whole else damage(text, seed))
    read_or_refuse(records.read_evaluation, file, load(None, "coverage", COVERAGE), "random")
