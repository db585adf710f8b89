"""Memory: what compiled programs need, refusals that name what to lower, chunks that divide, devices that are used."""

import dataclasses
import math
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import pytest
from helpers.tiny import Corridor, TinyQ

from envs_jax.batch import batched
from envs_jax.coverage.env import Coverage
from envs_jax.snakes import timesteps
from envs_jax.snakes.env import Snakes
from jaxrl.algos.base import Phase
from jaxrl.cli.flags import parse
from jaxrl.common.errors import UsageError
from jaxrl.rl.data_parallel import DataParallel, make_mesh
from jaxrl.runtime import memory_plan
from jaxrl.runtime.build import Run, build_run
from jaxrl.runtime.compiling import compile_run
from jaxrl.runtime.config import RunSettings
from jaxrl.runtime.devices import choose_devices
from jaxrl.runtime.memory_plan import GIB, TooLargeError, choose_chunks
from jaxrl.runtime.pieces import Pieces
from jaxrl.runtime.program import Program
from jaxrl.runtime.train_state import Position
from jaxrl.runtime.trainer import Trainer

TINY = "--algo test_plan:Stored --env helpers.tiny:Corridor --num_envs 8 --total_env_steps 320"


@dataclasses.dataclass(frozen=True)
class Stored(TinyQ):
    """Q-learning that says which setting its replay follows."""

    storage_setting: ClassVar[str] = "capacity"


def setup_of(argv: str) -> Run:
    return build_run(parse(argv.split()).config)


def quiet(sentence: str) -> None:
    del sentence


def needs(run: Run) -> list[int]:
    programs = compile_run(run, None, quiet, Position())
    programs.compile()
    return programs.needed


# What a run needs


def test_the_state_by_hand() -> None:
    trainer = setup_of(f"{TINY} --devices 1").trainer
    replay = 8 * 64 * (5 * 2 + 4 + 4 + 1 + 1) + 8 * 4  # observation, action, reward, terminated, done; head
    assert memory_plan.local_size(trainer.shapes().algo.sharded) == replay
    shared = setup_of(f"{TINY} --devices 4").trainer.shapes().algo
    assert memory_plan.local_size(shared.sharded) == replay // 4
    assert memory_plan.local_size(shared.replicated) == memory_plan.local_size(trainer.shapes().algo.replicated)


@pytest.fixture(scope="module")
def large() -> tuple[Run, list[int]]:
    """A run that needs memory for its replay most of all, and the bytes that its programs need."""
    run = setup_of(f"{TINY} --devices 1 --capacity 65536")
    return run, needs(run)


def test_the_compiler_counts_the_state_and_a_copy_of_it(large: tuple[Run, list[int]]) -> None:
    run, needed = large
    state = memory_plan.local_size(run.trainer.shapes())
    assert all(2 * state <= each < 3 * state for each in needed)


def test_a_run_that_fits_and_one_that_does_not_quite(large: tuple[Run, list[int]]) -> None:
    run, needed = large
    said: list[str] = []
    compile_run(dataclasses.replace(run, limit=max(needed)), None, said.append, Position()).compile()
    assert len(said) == 2 and all("it needs" in sentence for sentence in said)  # phases
    with pytest.raises(TooLargeError, match=r"may be used \(--memory_gb\): lower --capacity from 65536 to about 65"):
        needs(dataclasses.replace(run, limit=max(needed) - 1))


@pytest.mark.parametrize("capacity", [10**8, 10**12])
def test_what_is_out_of_the_question_is_refused_before_it_is_compiled(capacity: int, monkeypatch: Any) -> None:
    monkeypatch.setattr(Program, "start_compiling", lambda self: pytest.fail("compiles"))
    run = setup_of(f"{TINY} --devices 1 --capacity {capacity} --memory_gb 1")
    with pytest.raises(TooLargeError) as caught:
        needs(run)
    fitting = int(str(caught.value).rsplit(maxsplit=1)[-1])
    fits = setup_of(f"{TINY} --devices 1 --capacity {fitting} --memory_gb 1")
    assert 0.9 * GIB < 2 * memory_plan.local_size(fits.trainer.shapes()) <= GIB


def test_a_run_that_cannot_be_smaller_is_refused() -> None:
    with pytest.raises(TooLargeError, match="choose smaller networks, batches or environments, or a machine with more"):
        needs(setup_of(f"{TINY} --memory_gb 1e-9"))
    config = setup_of(f"{TINY} --devices 1").config.with_run(memory_gb=1e-6)
    with pytest.raises(TooLargeError, match="resume it where more is free, or with more --devices"):
        needs(build_run(config, resuming=True))


def test_every_piece_of_an_iteration_is_counted() -> None:
    """What was collected stays in memory during each stage."""
    argv = "--algo coma --env helpers.tiny:Corridor --hidden_size 4 --num_envs 8192 --total_env_steps 81920 --devices 1"
    run = setup_of(argv)
    programs = compile_run(run, None, quiet, Position())
    (pieces,) = programs.blocks
    assert isinstance(pieces, Pieces)
    rows = memory_plan.size(pieces.programs["buffers"]._result_shapes)
    assert max(programs.needed) > memory_plan.local_size(run.trainer.shapes()) + rows


# Chunks


@dataclasses.dataclass(frozen=True)
class Chunky(TinyQ):
    """Learns from 3000 samples at once."""

    gradient_samples: ClassVar[int] = 3000

    @property
    def phases(self) -> tuple[Phase, ...]:
        return tuple(dataclasses.replace(phase, restart=True) for phase in super().phases)


def choose(rollout: int, learn: int, limit: int, adapt: bool = False, **layout: Any) -> tuple[int, int, int]:
    """The environments of a chunk, and the samples of a gradient and of a forward pass."""
    env = batched(Corridor())
    algo = Chunky(env.spec, DataParallel(**{"num_envs": 96, "shards": 4, "devices": 1} | layout))
    return choose_chunks(RunSettings(rollout_chunk=rollout, learn_chunk=learn), env, algo, make_mesh(1), limit, adapt)


@pytest.mark.parametrize("limit", [10_000, 100_000, 1_000_000, 10_000_000, GIB])
@pytest.mark.parametrize("layout", [{}, {"devices": 4}, {"num_envs": 4 * 61}])
def test_chunks_divide_and_stay_within_their_share(limit: int, layout: dict[str, Any]) -> None:
    rollout, learn, _ = choose(0, 0, limit, **layout)
    envs = {"num_envs": 96, "devices": 1} | layout
    assert envs["num_envs"] // envs["devices"] % rollout == 0
    assert 3000 * 4 % learn == 0
    env_bytes = memory_plan.rollout_env_bytes(batched(Corridor()), 1, make_mesh(1))
    assert rollout == 1 or 3 * rollout * env_bytes <= memory_plan.SHARE * limit


def test_a_chunk_is_chosen_by_a_trace_that_the_rollout_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    traced: list[Any] = []
    conclude = Coverage._conclude
    monkeypatch.setattr(Coverage, "_conclude", lambda *arguments: traced.append(None) or conclude(*arguments))
    small = "--num_envs 8 --budget 3 --q 5 --num_agents 2 --hidden_size 4 --minibatch_size 8 --devices 1"
    run = build_run(parse(f"--config coma_quick {small}".split()).config)
    assert len(traced) == 1
    block = run.trainer.make_block(run.algo.phases[0])
    jax.eval_shape(block, run.trainer.shapes(), jax.ShapeDtypeStruct((), jnp.int32))
    assert len(traced) == 1


def test_the_start_of_games_is_traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    traced: list[str] = []
    begin = Snakes._begin
    observe = timesteps.observe
    init = Trainer._init
    monkeypatch.setattr(Trainer, "_init", lambda *arguments: traced.append("init") or init(*arguments))
    monkeypatch.setattr(Snakes, "_begin", lambda *arguments: traced.append("begin") or begin(*arguments))
    monkeypatch.setattr(timesteps, "observe", lambda *arguments: traced.append("observe") or observe(*arguments))
    small = "--num_envs 8 --snakes 2 --beans 3 --buffer_size 640 --learning_starts 64 --hidden_size 4 --batch_size 8"
    run = build_run(parse(f"--config ddpg_quick {small} --devices 1".split()).config)
    state = run.trainer.shapes()
    run.trainer.make_init().lower(run.trainer.key_shapes(), None)
    jax.eval_shape(run.trainer.make_block(run.algo.phases[-1]), state, jax.ShapeDtypeStruct((), jnp.int32))
    assert traced == ["init", "begin", "observe"]


AWKWARD = {"num_envs": 4 * 127, "devices": 4}


@pytest.mark.parametrize(
    ("given", "limit", "layout", "expected"),
    [
        ((0, 0), 100 * GIB, {}, (48, 500, 500)),  # not larger than the caches of a CPU like
        ((0, 0), GIB, AWKWARD, (127, 500, 500)),  # a prime: all at once, not one by one
        ((0, 0), 100_000, AWKWARD, (1, 500, 500)),  # unless there is no room
        ((32, 100), 1, {}, (32, 100, 100)),
        ((1000, 0), GIB, {}, (96, 500, 500)),
        ((32, 4000), GIB, {"adapt": True, "devices": 4}, (24, 3000, 3000)),
    ],
)
def test_chunks(given: tuple[int, int], limit: int, layout: dict[str, Any], expected: tuple[int, int, int]) -> None:
    assert choose(*given, limit, **layout) == expected


def test_only_gpus_pass_more_samples_forward_than_through_a_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jax.default_backend", lambda: "gpu")
    assert choose(0, 0, 100 * GIB) == choose(0, 0, 90 * GIB) == (96, 12_000, 2**16)
    assert choose(0, 12_000, 100 * GIB)[1:] == (12_000, 2**16)  # resumed, with the number that was chosen before
    assert choose(0, 100, 100 * GIB)[1:] == (100, 100)  # who asks for small chunks has little memory


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ((36, 0), "rollout_chunk 36 does not divide 96: use 32"),
        ((0, 70), "learn_chunk 70 does not divide 12000: use 60"),  # of a device's four logical shards together
    ],
)
def test_chunks_that_do_not_divide(given: tuple[int, int], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        choose(*given, GIB)


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
    devices, sentence = choose_devices(requested, num_envs, shards)
    assert devices == used
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
