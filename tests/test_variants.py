"""Variants of an environment that differ in speed: the fastest one that agrees is taken, and kept by its run."""

import dataclasses
import json
import os
import time
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import pytest
import yaml
from helpers.runs import resume, run
from helpers.tiny import Corridor, CorridorState

import envs_jax
from envs_jax import TimeStep
from envs_jax.base import Array, setting
from jaxrl.cli.flags import parse
from jaxrl.runtime import variants
from jaxrl.runtime.config import Config, read_run

LABOUR = 3000  # products of 8 x 8 matrices, beside which a step takes no time


@dataclasses.dataclass(frozen=True)
class Paced(Corridor):
    """A corridor with a slow and a quick way to step, which stores its positions with a row that is not read."""

    way: str = setting("auto", "how steps are made")
    offered: ClassVar[tuple[str, ...]] = ("slow", "quick")

    def variants(self) -> tuple[dict[str, Any], ...]:
        return tuple({"way": way} for way in self.offered) if self.way == "auto" else ()

    def comparable_state(self, state: CorridorState) -> Any:
        return state.position[..., : self.num_agents], state.t, state.key

    def for_any_device(self) -> "Paced":
        return dataclasses.replace(self, way="slow")

    def _stored(self, state: CorridorState) -> CorridorState:
        rows = 0 if self.way == "slow" else 1
        return dataclasses.replace(state, position=jnp.pad(state.position, (0, rows)))

    def reset(self, key: Array, context: Any = None) -> tuple[CorridorState, TimeStep]:
        state, timestep = super().reset(key, context)
        return self._stored(state), timestep

    def step(self, state: CorridorState, action: Array, context: Any = None) -> tuple[CorridorState, TimeStep]:
        if self.way == "breaks":
            raise NotImplementedError("no such kernel\non this device")
        if self.way == "dies":
            os._exit(7)
        state, timestep = super().step(dataclasses.replace(state, position=state.position[:1]), action, context)
        reward = timestep.reward
        if self.way == "slow":
            product = jax.lax.fori_loop(0, LABOUR, lambda _, x: x @ x, jnp.full((8, 8), reward[0] / 8))
            reward = reward + 0 * product[0, 0]
        if self.way in ("rounds", "wrong"):
            reward = reward + (1e-5 if self.way == "rounds" else 1e-4)
        if self.way == "miscounts":
            state = dataclasses.replace(state, t=jnp.where(state.t == 3, jnp.int32(4), state.t))
        return self._stored(state), dataclasses.replace(timestep, reward=reward)


class Deadly(Paced):
    offered = ("slow", "dies")


def look(*ways: str) -> variants.Found:
    changes = [{"way": way} for way in ways]
    return variants.benchmark_variants(Paced(), changes, copies=2, steps=4, rounds=2)


@pytest.mark.parametrize(("ways", "taken"), [(("slow", "quick"), "quick"), (("quick", "slow"), "quick")])
def test_the_faster_one_is_taken(ways: tuple[str, ...], taken: str) -> None:
    found = look(*ways)
    assert found["settings"] == {"way": taken}
    assert found["differences"] == {f"way {ways[1]}": [0, 0.0]} and not found["failures"]
    assert len(found["seconds"]["way slow"]) == 2
    assert min(found["seconds"]["way slow"]) > max(found["seconds"]["way quick"])


@pytest.mark.parametrize(
    ("way", "exact", "real", "taken"),
    [
        ("rounds", 0, 1e-5, "rounds"),
        ("wrong", 0, 1e-4, "slow"),
        ("miscounts", 4, 0.0, "slow"),  # the time, from the third of four steps on, in both copies
    ],
)
def test_one_that_disagrees_is_not_taken(way: str, exact: int, real: float, taken: str) -> None:
    found = look("slow", way)
    assert found["settings"] == {"way": taken}
    assert found["differences"] == {f"way {way}": [exact, pytest.approx(real, rel=0.01)]}


def test_one_that_fails_is_not_taken() -> None:
    found = look("slow", "breaks", "quick")
    assert found["settings"] == {"way": "quick"}
    assert found["failures"] == {"way breaks": "NotImplementedError: no such kernel on this device"}


def config_of(env: str) -> Config:
    return parse(
        f"--algo helpers.tiny:TinyQ --env test_variants:{env} --total_env_steps 64 --num_envs 8".split()
    ).config


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of environments of each search, all of which find the quick way."""
    found: list[int] = []

    def search(config: Config, copies: int, reference: variants.Change) -> variants.Found:
        found.append(copies)
        seconds = {"way slow": [3.0, 4.0, 5.0], "way quick": [0.001, 0.002, 0.003]}
        rest = {"differences": {"way quick": [0, 1e-6]}, "failures": {}, "steps": 2, "copies": copies}
        return {"settings": {"way": "quick"}, "seconds": seconds, **rest}

    monkeypatch.setattr(variants, "search", search)
    return found


def test_a_decision_is_kept_for_these_versions_and_settings(
    searches: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, file, said = config_of("Paced"), tmp_path / "new" / "file.json", []
    first = variants.choose(config, 8, said.append, file)
    assert variants.choose(config, 8, said.append, file) == first and first["settings"] == {"way": "quick"}
    assert searches == [8]
    assert said[0] == (
        "way quick is taken: 2 steps of 8 copies take 2 ms; way slow 4e+03 ms; "
        "way quick: 0 integers differ, real numbers by 1.0e-06 at most"
    )
    assert said[1] == f"{said[0]} (found by an earlier run)"
    longer = dataclasses.replace(config, env_settings={**config.env_settings, "length": 5})
    variants.choose(longer, 8, said.append, file)
    variants.choose(config, 4, said.append, file)
    for name in ("jax", "jaxlib", "jaxrl", "backend"):
        known = variants.versions()
        with monkeypatch.context() as patch:
            patch.setattr(variants, "versions", lambda known=known, name=name: known | {name: "other"})
            variants.choose(config, 8, said.append, file)
    assert searches == [8, 8, 4, 8, 8, 8, 8]
    variants.choose(config, 8, said.append, file)
    assert len(searches) == 7


@pytest.mark.parametrize("content", ["{", "[]", '{"a": 1', "\udcff"])
def test_a_damaged_file_is_left_out(content: str, searches: list[int], tmp_path: Path) -> None:
    file, said = tmp_path / "file.json", []
    file.write_bytes(content.encode(errors="surrogateescape"))
    assert variants.choose(config_of("Paced"), 8, said.append, file)["settings"] == {"way": "quick"}
    assert said[0] == f"warning: {file} cannot be read, or holds no mapping, and is ignored: delete it"
    assert len(said) == 2 and len(json.loads(file.read_text())) == 1


def test_an_entry_that_is_no_variant_is_not_taken(searches: list[int], tmp_path: Path) -> None:
    config, file, said = config_of("Paced"), tmp_path / "file.json", []
    variants.choose(config, 8, said.append, file)
    (key,) = json.loads(file.read_text())
    whole = json.loads(file.read_text())[key]
    for entry in ("quick", {}, whole | {"settings": {"way": "wrong"}}, {"settings": {"way": "quick"}}):
        file.write_text(json.dumps({key: entry}))
        assert variants.choose(config, 8, said.append, file)["settings"] == {"way": "quick"}
    assert len(searches) == 5


@pytest.mark.parametrize(
    ("way", "warning", "later"),
    [
        (
            "breaks",
            "warning: way breaks is skipped, it failed: NotImplementedError: no such kernel on this device",
            2,
        ),
        (
            "wrong",
            "warning: way wrong is skipped, its results are wrong on this device: 0 integers differ, real numbers by ",
            1,
        ),
    ],
)
def test_what_is_left_out_is_told_and_what_failed_is_tried_again_after_an_hour(
    way: str, warning: str, later: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Paced, "offered", ("slow", way))
    searches: list[int] = []

    def search(config: Config, copies: int, reference: variants.Change) -> variants.Found:
        searches.append(copies)
        return look("slow", way)

    monkeypatch.setattr(variants, "search", search)
    config, file, said = config_of("Paced"), tmp_path / "file.json", []
    assert variants.choose(config, 8, said.append, file)["settings"] == {"way": "slow"}
    assert said[0].startswith(warning) and said[1].startswith("way slow is taken: ")
    variants.choose(config, 8, said.append, file)
    assert len(searches) == 1
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 3600)
    variants.choose(config, 8, said.append, file)
    assert len(searches) == later


def test_a_folder_that_cannot_be_written_is_a_warning(searches: list[int], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    said: list[str] = []
    found = variants.choose(config_of("Paced"), 8, said.append, tmp_path / "file" / "table.json")
    assert found["settings"] == {"way": "quick"} and said[-1].endswith("the next run measures again")


def test_a_search_in_a_process_of_its_own() -> None:
    found = variants.search(config_of("Paced"), 2, {"way": "slow"})
    assert found["settings"] == {"way": "quick"} and found["copies"] == 2
    assert found["steps"] == Paced().horizon < variants.STEPS


def test_a_search_that_dies_ends_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    found = variants.search(config_of("Deadly"), 2, {"way": "slow"})
    assert found["settings"] == {"way": "slow"}
    assert found["failures"]["the comparison"].startswith("its process ended with exit code 7 (")
    monkeypatch.setattr(variants, "LIMIT", 0.01)
    found = variants.search(config_of("Paced"), 2, {"way": "slow"})
    assert found["failures"] == {"the comparison": "it took longer than 0 s"}


def test_a_run_keeps_its_variant(searches: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(variants, "cache_folder", lambda: tmp_path / "cache")
    flags = "--algo helpers.tiny:TinyQ --env test_variants:Paced --num_envs 8 --devices 1 --total_env_steps 128"
    directory = run(flags, tmp_path / "run")
    assert searches == [8]
    assert yaml.safe_load((directory / "config.yaml").read_text())["way"] == "quick"
    assert json.loads((directory / "versions.json").read_text())["variant"]["settings"] == {"way": "quick"}
    (tmp_path / "cache" / variants.FILE).unlink()
    resume(directory, "--total_env_steps 192")
    assert searches == [8]
    assert yaml.safe_load((directory / "config.yaml").read_text())["way"] == "quick"
    assert read_run(directory)[1].env_settings["way"] == "slow"


COVERAGE = envs_jax.make("coverage", q=2, num_agents=1, budget=2)
BACKENDS = ({"map_backend": "dense"}, {"map_backend": "pallas"})


def test_pallas_and_dense_are_compared_away_from_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    env = COVERAGE
    assert env.variants() == () and env.for_any_device() is env
    kernels = dataclasses.replace(env, map_backend="pallas")
    assert kernels.for_any_device() == env
    monkeypatch.setattr("envs_jax.coverage.env.on_cpu", lambda: False)
    assert env.variants() == BACKENDS
    assert kernels.for_any_device() is kernels and kernels.variants() == ()


@pytest.mark.long
def test_interpreted_kernels_agree() -> None:
    found = variants.benchmark_variants(COVERAGE, BACKENDS, copies=1, steps=1, rounds=1)
    assert not found["failures"] and variants.agrees(found["differences"]["map_backend pallas"])
    assert set(found["seconds"]) == {"map_backend dense", "map_backend pallas"}
