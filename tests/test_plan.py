"""The memory plan: parts by hand, chunks that divide, refusals that name what fits, the devices that are used."""

import dataclasses
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import pytest
from helpers.tiny import Corridor, TinyQ

from envs_jax.batch import batched
from jaxrl.algos.base import MemoryNeeds, Phase
from jaxrl.cli.flags import parse
from jaxrl.common.errors import UsageError
from jaxrl.rl.data_parallel import DataParallel
from jaxrl.runtime import memory_plan
from jaxrl.runtime.build import Run, compile_run, unchecked_run
from jaxrl.runtime.memory_plan import GIB, Chunks, Plan, TooLargeError, choose_chunks, choose_devices
from jaxrl.runtime.train_state import Position

TINY = "--algo helpers.tiny:TinyQ --env helpers.tiny:Corridor --num_envs 8 --total_env_steps 320"


def setup_of(argv: str) -> Run:
    return unchecked_run(parse(argv.split()).config)


def test_parts_by_hand() -> None:
    made = setup_of(f"{TINY} --devices 1").plan
    replay = 8 * 64 * (5 * 2 + 4 + 4 + 1 + 1) + 8 * 4  # observation, action, reward, terminated, done; head
    replicated = 3 * 5 * 2 * 4 + 4 + (5 * 8 + 4)  # weights and Adam's moments and counter; progress
    state = (4 + 4 + 8) + 8 + 4  # position, t, key; key and number of the episode
    timestep = 5 * 4 + 2 + 4 + 3 + 4  # observation, mask, reward, flags, metric
    kept = 8 * (state + timestep + 3 * 4)  # statistics: return, length, metric
    row = 5 * 2 + 2 + 4 + 3 + 4 + 4  # as above, the observation in float16; action
    assert made.parts == {
        "parameters": 2 * replicated,
        "replay": replay,
        "environments": 2 * kept,
        "trajectory": 4 * 8 * row,
        "checkpoint": replicated + replay + kept,
    }
    assert made.total == sum(made.parts.values())
    assert made.scaling == 2 * replay + 3 * kept + 4 * 8 * row
    assert made.num_envs == 8


def test_the_longest_phase_counts_wherever_it_stands() -> None:
    row = setup_of(f"{TINY} --devices 1").plan.parts["trajectory"] // 4  # of 8 environments
    for steps in ((12, 4), (4, 12)):

        @dataclasses.dataclass(frozen=True)
        class Uneven(TinyQ):
            phases = tuple(Phase(str(number), number, 0, iterations=2) for number in steps)

        setup = setup_of(f"{TINY} --devices 1")
        trainer = dataclasses.replace(setup.trainer, algo=Uneven(setup.env.spec, setup.trainer.layout))
        assert memory_plan.make_plan(trainer, GIB).parts["trajectory"] == 12 * row


def test_devices_share_what_is_split() -> None:
    one, four = (setup_of(f"{TINY} --devices {devices}").plan for devices in (1, 4))
    assert four.parts["replay"] == one.parts["replay"] // 4
    assert four.parts["trajectory"] == one.parts["trajectory"] // 4
    assert four.parts["parameters"] == one.parts["parameters"]
    assert four.limit == pytest.approx(one.limit / 4, rel=0.2)  # of a CPU's memory, of which the rest varies


def test_evaluation_counts_where_training_flies_fewer() -> None:
    quiet, loud = (
        setup_of(f"{TINY} --devices 1 --capacity 1 --num_envs 2000 --eval_every {every} --eval_episodes 2000").plan
        for every in (0, 1)
    )
    assert "evaluation" not in quiet.parts
    flying = 3 * memory_plan.rollout_env_bytes(batched(Corridor())) * 2000
    assert loud.parts["evaluation"] == max(0, flying - loud.parts["trajectory"]) > 0


def test_evaluation_takes_as_many_episodes_as_fit() -> None:
    """A run of two environments that go on evaluates more at a time."""
    many = "--devices 1 --capacity 1 --num_envs 2 --logical_shards 1 --eval_every 1 --eval_episodes 300"
    assert setup_of(f"{TINY} {many}").plan.eval_chunk == 300
    one = 3 * memory_plan.rollout_env_bytes(batched(Corridor())) / memory_plan.SHARE
    trainer = setup_of(f"{TINY} {many}").trainer
    assert memory_plan.make_plan(trainer, int(40.5 * one), 300).eval_chunk == 40


def test_the_compiler_needs_about_what_was_planned() -> None:
    sizes = "--devices 1 --num_envs 256 --capacity 4096 --length 40 --total_env_steps 5120"
    setup, said = setup_of(f"{TINY} {sizes}"), []
    programs = compile_run(setup, None, said.append, Position())
    programs.compile()
    assert setup.plan.total > 50 * 2**20
    assert 0.5 < programs.peak / setup.plan.total < 1.5
    assert len(said) == 2  # phases
    assert all("it needs" in sentence for sentence in said)


def test_the_compiler_has_the_last_word() -> None:
    setup = setup_of(f"{TINY} --devices 1")
    tight = dataclasses.replace(setup, plan=dataclasses.replace(setup.plan, limit=100))
    with pytest.raises(TooLargeError, match=r"^the run needs \d+ KiB per device, but 0 KiB may be used"):
        compile_run(tight, None, lambda sentence: None)


# Refusals


def affine(fixed: int, per_env: float, num_envs: int, limit: int) -> Plan:
    return Plan({"fixed": fixed, "envs": int(per_env * num_envs)}, limit, num_envs, int(per_env * num_envs))


@pytest.mark.parametrize(("fixed", "per_env"), [(0, 1000), (5000, 7), (90_000, 123.4)])
def test_the_largest_that_fits(fixed: int, per_env: float) -> None:
    limit = 100_000
    made = affine(fixed, per_env, 1 << 20, limit)
    found = memory_plan.search_largest(made, 1 << 20, lambda n: affine(fixed, per_env, n, limit), memory_plan.rounded)
    assert affine(fixed, per_env, found, limit).fits
    best = (limit - fixed) / per_env
    assert best - 8 - 0.05 * best <= found <= best
    assert found % 8 == 0


def test_the_search_survives_a_plan_that_bends() -> None:
    """Chunks are chosen anew for each number, so that bytes are not exactly affine."""

    def replan(num_envs: int) -> Plan:
        return affine(20_000 + 300 * int(math.sqrt(num_envs)), 40, num_envs, 100_000)

    found = memory_plan.search_largest(replan(100_000), 100_000, replan, memory_plan.rounded)
    assert replan(found).fits
    assert not replan(int(1.25 * found)).fits


@pytest.mark.parametrize("asked", [1300, 1500, 1900, 8000])
@pytest.mark.parametrize("jump", [False, True])
def test_the_search_survives_a_bend_near_the_limit(asked: int, jump: bool) -> None:
    def replan(num_envs: int) -> Plan:
        fixed = 400.0 * (num_envs >= 1000) if jump else 0.4 * min(num_envs, 1000)
        return affine(int(fixed), 0.5, num_envs, 1000)

    found = memory_plan.search_largest(replan(asked), asked, replan, memory_plan.rounded)
    assert 0.95 * 1200 <= found <= 1200


def test_nothing_fits() -> None:
    made = affine(200_000, 10, 64, 100_000)
    rounded = memory_plan.rounded
    assert memory_plan.search_largest(made, 64, lambda n: affine(200_000, 10, n, 100_000), rounded) == 0
    assert memory_plan.search_largest(affine(0, 5000, 64, 100_000), 64, lambda n: None, rounded) == 0
    assert [memory_plan.two_digits(x) for x in (987_654.0, 43.2, 0.0567)] == pytest.approx([980_000.0, 43.0, 0.056])
    with pytest.raises(TooLargeError, match="choose smaller networks, batches or environments"):
        made.check(made.total)


def test_refusal_after_compiling() -> None:
    made = affine(0, GIB, 64, 40 * GIB)
    made.check(40 * GIB)
    with pytest.raises(TooLargeError) as caught:
        made.check(80 * GIB)  # a quarter more than from shapes
    assert str(caught.value) == (
        "the run needs 80.0 GiB per device, but 40.0 GiB may be used (--memory_gb): "
        "the largest --num_envs that fits is 32"
    )


# Chunks


@dataclasses.dataclass(frozen=True)
class Chunky(TinyQ):
    """Learns from `samples` of `bytes` each."""

    samples: int = 1
    bytes: int = 1

    @property
    def phases(self) -> tuple[Any, ...]:
        return tuple(dataclasses.replace(phase, restart=True) for phase in super().phases)

    @property
    def memory(self) -> MemoryNeeds:
        return MemoryNeeds(self.samples, self.bytes)


def chunks(rollout: int, learn: int, limit: int, adapt: bool = False, **layout: Any) -> Chunks:
    env = batched(Corridor())
    sizes = {"num_envs": 96, "shards": 4, "devices": 1} | layout
    return choose_chunks(
        env, Chunky(env.spec, DataParallel(**sizes), samples=3000, bytes=1000), rollout, learn, limit, adapt
    )


@pytest.mark.parametrize("limit", [10_000, 100_000, 1_000_000, 10_000_000, GIB])
@pytest.mark.parametrize("layout", [{}, {"devices": 4}, {"num_envs": 4 * 61}])
def test_chunks_divide_and_stay_within_their_share(limit: int, layout: dict[str, Any]) -> None:
    made = chunks(0, 0, limit, **layout)
    envs = {"num_envs": 96, "devices": 1} | layout
    flown = envs["num_envs"] // envs["devices"]
    assert flown % made.rollout == 0
    assert 3000 * 4 % made.learn == 0
    per_env = 3 * memory_plan.rollout_env_bytes(batched(Corridor()))
    assert made.rollout == 1 or made.rollout * per_env <= memory_plan.SHARE * limit
    assert made.learn == 1 or made.learn * 1000 <= memory_plan.SHARE * limit


def test_chunks_on_a_cpu_are_not_larger_than_its_caches_like() -> None:
    assert chunks(0, 0, 100 * GIB) == Chunks(rollout=48, learn=500)


def test_chunks_of_awkward_numbers() -> None:
    assert chunks(0, 0, GIB, num_envs=4 * 127, devices=4).rollout == 127  # a prime: all at once, not one by one
    assert chunks(0, 0, 100_000, num_envs=4 * 127, devices=4).rollout == 1  # unless there is no room


def test_given_chunks_are_kept_and_checked() -> None:
    assert chunks(32, 100, 1) == Chunks(32, 100)
    assert chunks(1000, 0, GIB).rollout == 96
    with pytest.raises(UsageError, match="rollout_chunk 36 does not divide 96: use 32"):
        chunks(36, 0, GIB)
    with pytest.raises(UsageError, match="learn_chunk 70 does not divide 12000: use 60"):
        chunks(0, 70, GIB)  # the four logical shards of a device are cut together
    assert chunks(32, 4000, GIB, adapt=True, devices=4) == Chunks(24, 3000)


def test_an_algorithm_that_does_not_say_what_can_be_cut() -> None:
    assert setup_of(f"{TINY} --devices 1").config.run.learn_chunk == 0
    assert setup_of(TINY).config.run.rollout_chunk == 1  # 8 environments, which live on, on 8 devices


# Devices


@pytest.mark.parametrize(
    ("requested", "num_envs", "shards", "used", "warning"),
    [
        (0, 64, 8, 8, None),
        (2, 64, 8, 2, None),
        (0, 6, 2, 2, "6 environments are cut into 2 logical shards, which 8 devices cannot share evenly: only 2 of "
         "them are used; --num_envs 8 would let 8 be used"),
        (0, 64, 4, 4, "only 4 of them are used; a minibatch that 8 divides and no --logical_shards would let 8 be"),
    ],
)  # fmt: skip
def test_devices(requested: int, num_envs: int, shards: int, used: int, warning: str | None) -> None:
    found, sentence = choose_devices(requested, num_envs, shards)
    assert found == used
    assert (sentence is None) == (warning is None)
    assert warning is None or warning in str(sentence)


def test_devices_that_cannot_be_had() -> None:
    with pytest.raises(UsageError, match="--devices 9, but there are only 8: choose 8 or fewer"):
        choose_devices(9, 64, 8)
    with pytest.raises(UsageError, match="use --devices 2, or --num_envs 8 with 1, 2, 4 or 8 devices"):
        choose_devices(3, 6, 2)


def test_the_warning_reaches_the_user() -> None:
    assert any("devices cannot share evenly" in note for note in setup_of(f"{TINY} --num_envs 6").notes)


# What the machine has


def test_free_memory_of_a_container(tmp_path: Path) -> None:
    names = memory_plan.CGROUPS[0]
    assert memory_plan._left_in_cgroup(*names, root=tmp_path) == math.inf
    for name, text in zip(names[:3], ("1000\n", "700\n", "anon 400\ninactive_file 250\n"), strict=True):
        (tmp_path / name).write_text(text)
    assert memory_plan._left_in_cgroup(*names, root=tmp_path) == 550
    (tmp_path / names[0]).write_text("max\n")
    assert memory_plan._left_in_cgroup(*names, root=tmp_path) == math.inf


def test_devices_of_a_cpu_share_its_memory() -> None:
    device = jax.local_devices()[0]
    assert 0 < memory_plan.free_memory(device, 8) < memory_plan.free_memory(device)


def test_the_peak_of_a_run() -> None:
    """In a process of its own: what other tests have held is given back at any moment."""
    program = """if True:
        import numpy as np
        from jaxrl.report.gpu import PeakMemory
        before = np.ones(2**25, np.uint8)  # 32 MiB that are held already
        peak = PeakMemory()
        first = peak.read()
        ballast = np.ones(2**26, np.uint8)
        del ballast
        assert peak.read() - first > 0.9 * 2**26, (first, peak.read())
        assert first < 2**25, first
        assert before.any()
    """
    subprocess.run([sys.executable, "-c", program], check=True)
