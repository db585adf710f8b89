"""Checkpoints keep every bit, survive kills and damage, and fit any number of devices."""

import contextlib
import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from helpers.programs import note_compilations
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from bench.harness.state_digest import checkpoint_digest, digest
from jaxrl.runtime import checkpoint, run_directory
from jaxrl.runtime.checkpoint import CheckpointError, Checkpoints
from jaxrl.runtime.manifest import Leaf, find_difference, read_both, read_manifest

ROOT = Path(__file__).parents[1]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class State:
    params: Any
    split: Any
    key: Any


def mesh(devices: int) -> Mesh:
    return jax.make_mesh((devices,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:devices])


def place(state: State, devices: int) -> State:
    """`split` and keys with an axis over the devices, the rest on all of them."""
    split = NamedSharding(mesh(devices), PartitionSpec("data"))
    everywhere = NamedSharding(mesh(devices), PartitionSpec())
    from_host = jax.tree.map(np.asarray, state.split)  # the tests' quick compiler would quieten NaNs on the way
    return State(
        jax.device_put(state.params, everywhere),
        jax.device_put(from_host, split),
        {"one": jax.device_put(state.key["one"], everywhere), "many": jax.device_put(state.key["many"], split)},
    )


def make_state(seed: int = 0, size: int = 16) -> State:
    """Every type that a state may hold, with the values that are lost first."""
    bits = jax.random.bits(jax.random.key(seed), (8, size), jnp.uint32)
    odd = jnp.array([0x7FC00001, 0xFFC12345, 0x80000000, 0x00000001, 0x7F800000, 0xFF800000], jnp.uint32)
    return State(
        params={
            "dense/kernel": jax.lax.bitcast_convert_type(bits, jnp.float32),
            "odd": jax.lax.bitcast_convert_type(odd, jnp.float32),  # NaNs with payload, -0, denormal, infinities
            "minus_zero": jnp.full((4,), -0.0, jnp.float32),
            "count": jnp.uint32(2**32 - 1),
            "none": None,
            "empty": jnp.zeros((0, 3), jnp.float32),
        },
        split=(
            jax.lax.bitcast_convert_type(bits.astype(jnp.uint16), jnp.int16),
            jax.lax.bitcast_convert_type(bits.astype(jnp.uint16), jnp.float16),
            jax.lax.bitcast_convert_type(bits.astype(jnp.uint16), jnp.bfloat16),
            bits.astype(jnp.uint8),
            bits % 2 == 0,
        ),
        key={"one": jax.random.key(seed), "many": jax.random.split(jax.random.key(seed + 1), 8)},
    )


def assert_same_bits(a: Any, b: Any) -> None:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x, y = jax.random.key_data(x), jax.random.key_data(y)
        assert x.shape == y.shape
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


def save_steps(directory: Path, *steps: int, keep: int = 3, best: int | None = None) -> None:
    with Checkpoints(directory, keep=keep) as checkpoints:
        for step in steps:
            checkpoints.save(step, make_state(step), {"step": step}, best=step == best)


@pytest.mark.parametrize(("saved_on", "restored_on"), [(8, 8), (8, 1), (1, 8)])
def test_every_bit_comes_back_on_any_number_of_devices(tmp_path: Path, saved_on: int, restored_on: int) -> None:
    state, like = place(make_state(), saved_on), place(make_state(5), restored_on)
    with Checkpoints(tmp_path / "deep" / "checkpoints") as checkpoints:
        checkpoints.save(7, state, {"env_steps": 2**40, "name": "é"})
        step, restored, meta = checkpoints.restore(like)
    assert (step, meta) == (7, {"env_steps": 2**40, "name": "é"})
    assert_same_bits(restored, state)
    for expected, actual in zip(jax.tree.leaves(like), jax.tree.leaves(restored), strict=True):
        assert actual.sharding.is_equivalent_to(expected.sharding, actual.ndim)
    assert jax.random.key_impl(restored.key["one"]) == jax.random.key_impl(state.key["one"])


def test_buffers_may_be_donated_as_soon_as_save_returns(tmp_path: Path) -> None:
    @partial(jax.jit, donate_argnums=0)
    def overwrite(x: jax.Array) -> jax.Array:
        return x * 0.0 - 1.0

    start = jax.device_put(jnp.arange(2.0**21), NamedSharding(mesh(8), PartitionSpec("data")))
    expected = np.array(start)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(0, {"x": start}, {})
        for _ in range(5):
            start = overwrite(start)
        start.block_until_ready()
        _, restored, _ = checkpoints.restore({"x": start})
    np.testing.assert_array_equal(restored["x"], expected)
    overwrite(restored["x"])  # a restored buffer may be donated too


def test_pruning_keeps_the_newest_and_the_best(tmp_path: Path) -> None:
    """Parts of which can be read."""
    save_steps(tmp_path, 1, 2, 3, 10, 100, keep=2, best=2)
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.steps() == [2, 10, 100]
        assert checkpoints.best_step() == 2
        step, params, meta = checkpoints.restore(jax.eval_shape(make_state).params, prefix="params", best=True)
        assert (step, meta) == (2, {"step": 2})
        assert_same_bits(params, make_state(2).params)
        shape = jax.eval_shape(make_state).params["dense/kernel"]
        step, kernel, _ = checkpoints.restore(shape, prefix="params.dense/kernel")
        assert step == 100
        assert_same_bits(kernel, make_state(100).params["dense/kernel"])
        assert checkpoints.newest() == (100, {"step": 100})
    with Checkpoints(tmp_path, keep=2) as checkpoints:  # a run that goes on knows which one is the best
        checkpoints.save(101, make_state(101), {})
        checkpoints.wait()
        assert checkpoints.best_step() == 2
        checkpoints.save(102, make_state(102), {}, best=True)
        checkpoints.wait()
        assert checkpoints.best_step() == 102
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0000000101", "0000000102"]


@pytest.mark.parametrize("best", [True, False])
def test_a_checkpoint_that_training_replaces_is_read_once_more(best: bool, tmp_path: Path, monkeypatch: Any) -> None:
    """The folder disappears after its files were verified, and there is a newer best one; then each time anew."""
    shape, read, replacements = jax.eval_shape(make_state).params, checkpoint._read_state, [2]

    def replace_then_read(folder: Path, *arguments: Any) -> Any:
        if replacements:
            new = replacements.pop(0)
            shutil.rmtree(folder)
            save_steps(tmp_path, new, best=new)
        return read(folder, *arguments)

    save_steps(tmp_path, 1, best=1)
    monkeypatch.setattr(checkpoint, "_read_state", replace_then_read)
    with Checkpoints(tmp_path) as checkpoints:
        step, params, meta = checkpoints.restore(shape, prefix="params", best=best)
        assert (step, meta) == (2, {"step": 2})
        assert_same_bits(params, make_state(2).params)
        replacements[:] = [3, 4]
        with pytest.raises(CheckpointError, match=r"^training replaces the checkpoints in .* while they are read"):
            checkpoints.restore(shape, prefix="params", best=best)
        replacements[:] = [5]
        with pytest.raises(CheckpointError, match="000004 could not be read"):
            checkpoints.restore(shape, 4, prefix="params")  # nobody asks for another one


def test_checkpoints_of_another_run_are_refused(tmp_path: Path) -> None:
    """Three runs of one configuration, the last without its versions.json."""
    shape = jax.eval_shape(make_state).params
    sentence = "0000000002 was written by another run: move it out of this run"
    for name in ("one", "other", "unknown"):
        (tmp_path / name).mkdir()
        if name != "unknown":
            run_directory.write_versions(tmp_path / name, {"run": name, "environment": 1})
        save_steps(tmp_path / name / "checkpoints", 1, best=1)
    save_steps(tmp_path / "other" / "checkpoints", 2, best=2)
    save_steps(tmp_path / "unknown" / "checkpoints", 3, best=3)
    folder = tmp_path / "one" / "checkpoints"
    shutil.copytree(tmp_path / "other" / "checkpoints" / "0000000002", folder / "0000000002")
    with Checkpoints(folder) as checkpoints:
        assert checkpoints.best_step() == 1
        assert checkpoints.restore(shape, prefix="params", best=True)[0] == 1
        for read in (checkpoints.newest, lambda: checkpoints.restore(shape, 2, prefix="params")):
            with pytest.raises(CheckpointError, match=sentence):
                read()
        shutil.copytree(tmp_path / "unknown" / "checkpoints" / "0000000003", folder / "0000000003")
        assert checkpoints.newest()[0] == 3
    with Checkpoints(tmp_path / "unknown" / "checkpoints") as checkpoints:
        assert checkpoints.newest()[0] == 3


# Damage


def flip(file: Path, at: int) -> None:
    content = bytearray(file.read_bytes())
    content[at % len(content)] ^= 1 << at % 8
    file.write_bytes(content)


def cut(file: Path, at: int) -> None:
    file.write_bytes(file.read_bytes()[: at % file.stat().st_size])


def grow(file: Path, at: int) -> None:
    file.write_bytes(file.read_bytes() + b"[" * (1 + at % 5000))


def remove(file: Path, at: int) -> None:
    file.unlink()


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints 1, 2 and 3, of which 2 is the best."""
    folder = tmp_path_factory.mktemp("three")
    save_steps(folder, 1, 2, 3, best=2)
    return folder


@pytest.mark.parametrize("harm", [flip, remove])
def test_damage_of_any_file_is_named_and_the_one_before_is_used(three: Path, tmp_path: Path, harm: Any) -> None:
    like = jax.eval_shape(make_state)
    names = ["manifest.json", *read_manifest(three / "0000000003").files]
    assert len(names) > 5 and max((three / "0000000003" / name).stat().st_size for name in names) > 1000
    for k, name in enumerate(names):
        shutil.copytree(three, folder := tmp_path / str(k))
        file = folder / "0000000003" / name
        harm(file, file.stat().st_size // 2)
        sentences: list[str] = []
        with Checkpoints(folder, warn=sentences.append) as checkpoints:
            step, restored, _ = checkpoints.restore(like)
        assert step == 2 and len(sentences) == 1 and f"3 is damaged: {name} " in sentences[0]
        assert_same_bits(restored, make_state(2))


def test_a_json_object_that_changes_after_the_check_is_noticed(three: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(three / "0000000003", tmp_path / "0000000003"))
    read_both(folder)
    (folder / "meta.json").write_text('{"step": 4}')
    with pytest.raises(ValueError, match=r"meta.json has changed since it was written"):
        read_both(folder)


def exchange(folder: Path, name: str) -> None:
    """Exchange two checkpoints, or a part of them."""
    one, other = folder / "0000000002" / name, folder / "0000000003" / name
    one.rename(folder / "aside")
    other.rename(one)
    (folder / "aside").rename(other)


@settings(max_examples=40, derandomize=True, database=None, deadline=None)
@given(st.data())
def test_whatever_happens_to_files_no_other_state_is_read(three: Path, data: st.DataObject) -> None:
    """What is read is what was saved under that number, what is skipped is named, and nothing else is raised."""
    with tempfile.TemporaryDirectory() as temporary:
        shutil.copytree(three, folder := Path(temporary) / "checkpoints")
        for _ in range(data.draw(st.integers(1, 3))):
            files = sorted(path for path in folder.rglob("*") if path.is_file())
            kind = data.draw(st.sampled_from([flip, cut, grow, remove, exchange, "copy", "lose"]))
            folders = sorted({path.relative_to(folder).parts[0] for path in files})
            if kind == "copy" and "0000000009" not in folders:
                shutil.copytree(folder / data.draw(st.sampled_from(folders)), folder / "0000000009")
            elif kind == "lose" and len(folders) > 1:
                shutil.rmtree(folder / data.draw(st.sampled_from(folders)))
            elif kind is exchange:
                with contextlib.suppress(OSError):
                    exchange(folder, data.draw(st.sampled_from(["", "arrays", "meta.json", "manifest.json"])))
            elif callable(kind) and (file := data.draw(st.sampled_from(files))).stat().st_size:
                kind(file, data.draw(st.integers(0, 10**6)))
        sentences: list[str] = []
        with Checkpoints(folder, warn=sentences.append) as checkpoints:
            above = checkpoints.steps()
            try:
                step, restored, meta = checkpoints.restore(jax.eval_shape(make_state))
            except CheckpointError:
                return
            assert_same_bits(restored, make_state(step))
            assert meta == {"step": step} and len(sentences) == sum(other_step > step for other_step in above)


def test_no_intact_checkpoint(three: Path, tmp_path: Path) -> None:
    shutil.copytree(three, tmp_path, dirs_exist_ok=True)
    for step in (1, 2, 3):
        flip(tmp_path / f"{step:010d}" / "meta.json", step)
    with Checkpoints(tmp_path) as checkpoints:
        harm = r"\S+ (has changed since|cannot be used)"
        sentence = rf"^no intact checkpoint in {tmp_path} \(checkpoint .*3 is damaged: {harm}.* start"
        for read in (checkpoints.newest, lambda: checkpoints.restore(jax.eval_shape(make_state))):
            with pytest.raises(CheckpointError, match=sentence):
                read()


def test_no_checkpoint_at_all(tmp_path: Path) -> None:
    with Checkpoints(tmp_path / "absent") as checkpoints:
        assert checkpoints.steps() == [] and checkpoints.best_step() is None
        with pytest.raises(CheckpointError, match="there is no checkpoint in"):
            checkpoints.restore(jax.eval_shape(make_state))
        with pytest.raises(CheckpointError, match="there is no checkpoint in"):
            checkpoints.newest()


# Another configuration


STATE = jax.eval_shape(make_state)
PARAMS = STATE.params
OTHER_KEY = jax.eval_shape(lambda: jax.random.key(0, impl="rbg"))


@pytest.mark.parametrize(
    ("params", "key", "difference"),
    [
        (PARAMS | {"odd": jax.ShapeDtypeStruct((3, 2), jnp.float32)}, STATE.key,
            "params.odd is float32[3, 2] here and float32[6] there"),
        (PARAMS | {"count": jax.ShapeDtypeStruct((), jnp.int32)}, STATE.key,
            "params.count is int32[] here and uint32[] there"),
        (PARAMS | {"another": jax.ShapeDtypeStruct((2,), jnp.float32)}, STATE.key,
            "params.another is float32[2] here and absent there"),
        ({name: leaf for name, leaf in PARAMS.items() if name != "count"}, STATE.key,
            "params.count is absent here and uint32[] there"),
        (PARAMS, STATE.key | {"one": OTHER_KEY}, "key.one is key<rbg>[] here and key<fry>[] there"),
    ],
)  # fmt: skip
def test_another_configuration_names_the_first_leaf(three: Path, params: Any, key: Any, difference: str) -> None:
    sentence = re.escape(difference) + "; use the configuration"
    with Checkpoints(three) as checkpoints, pytest.raises(CheckpointError, match=sentence):
        checkpoints.restore(State(params, STATE.split, key))


def test_types_that_x64_explains() -> None:
    wide, narrow, other = ([Leaf("a", *kind)] for kind in (("float64", (2,)), ("float32", (2,)), ("int64", (3,))))
    assert "set JAX_ENABLE_X64 here" in (find_difference(wide, narrow, whole=True) or "")
    assert "set JAX_ENABLE_X64 here" in (find_difference(narrow, wide, whole=True) or "")
    assert "X64" not in (find_difference(narrow, other, whole=True) or "")


@pytest.mark.parametrize("x64", [True, False])
def test_a_state_is_the_same_with_x64_and_without(tmp_path: Path, x64: bool) -> None:
    with jax.enable_x64(x64):
        save_steps(tmp_path, 1)
    with jax.enable_x64(not x64), Checkpoints(tmp_path) as checkpoints:
        like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), make_state(1))
        _, state, _ = checkpoints.restore(like)
        assert_same_bits(state, make_state(1))


def test_states_that_cannot_be_saved(tmp_path: Path) -> None:
    with Checkpoints(tmp_path) as checkpoints:
        with pytest.raises(TypeError, match="leaf a of the state is int"):
            checkpoints.save(0, {"a": 1}, {})
        with pytest.raises(TypeError, match="same name"):
            checkpoints.save(0, {"a": {"b": jnp.zeros(())}, "a.b": jnp.zeros(())}, {})


# Disks that refuse


WRITER = """
import itertools, json, resource, signal, sys
import jax, jax.numpy as jnp, numpy as np
sys.path.insert(0, "tests")
from test_checkpoint import make_state
from jaxrl.cli.entry import hide_repeated_errors
from jaxrl.runtime.checkpoint import CheckpointError, Checkpoints
hide_repeated_errors()  # as commands do
"""

FULL_DISK = """
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # a write beyond the limit fails like one to a full disk
with Checkpoints(sys.argv[1]) as checkpoints:
    checkpoints.save(1, make_state(1), {})
    checkpoints.wait()
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))
    for step, size in ((2, 1 << 16), (3, 16)):  # the one after it fits again
        try:
            noise = np.random.default_rng(0).standard_normal((60, size), np.float32)  # cannot be compressed
            many = {str(k): jnp.asarray(row) for k, row in enumerate(noise)}
            checkpoints.save(step, many if step == 2 else make_state(step), {})
            checkpoints.wait()
        except CheckpointError as error:
            print(error)
"""

ENDLESS = """
with Checkpoints(sys.argv[1], keep=2) as checkpoints:
    for step in itertools.count(checkpoints.steps()[-1] + 1 if checkpoints.steps() else 0):
        checkpoints.save(step, make_state(step, 4096), {"step": step}, best=step % 3 == 0)
        print(step, flush=True)
"""


def start(program: str, directory: Path) -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", WRITER + program, str(directory)]
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=-1, stderr=-1, text=True)


def test_a_full_disk_is_one_sentence_and_harms_nothing(tmp_path: Path) -> None:
    output, errors = start(FULL_DISK, tmp_path).communicate(timeout=120)
    assert re.fullmatch(r"checkpoint 2 could not be written under .* \(File too large\); make .*\n", output), errors
    assert "Traceback" not in errors
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.steps() == [1, 3]
        assert_same_bits(checkpoints.restore(jax.eval_shape(make_state))[1], make_state(3))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0000000001", "0000000003"]


def test_a_manifest_that_cannot_be_written_fails_the_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, make_state(), {})
        checkpoints.wait()
        with monkeypatch.context() as patch:
            patch.setattr("jaxrl.runtime.manifest.write_manifest", full)
            checkpoints.save(2, make_state(), {}, best=True)
            with pytest.raises(CheckpointError, match=r"written under \S+ \(No space left on device\); make"):
                checkpoints.wait()
        assert checkpoints.steps() == [1] and checkpoints.best_step() is None
        checkpoints.save(3, make_state(), {})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0000000001", "0000000003"]


@pytest.mark.slow
def test_kill_9_at_any_moment(tmp_path: Path) -> None:
    sentences: list[str] = []
    newest = -1
    leftovers = 0
    for delay in (0.0, 0.01, 0.03, 0.1):  # a save takes about 0.03 s
        with start(ENDLESS, tmp_path) as process:
            assert process.stdout is not None and process.stderr is not None
            lines = [process.stdout.readline() for _ in range(3)]
            assert all(lines), process.stderr.read()
            time.sleep(delay)
            process.send_signal(signal.SIGKILL)
        leftovers += sum(not path.name.isdecimal() for path in tmp_path.iterdir())
        with Checkpoints(tmp_path, warn=sentences.append) as checkpoints:
            like = jax.eval_shape(partial(make_state, size=4096))
            best, params, meta = checkpoints.restore(like.params, prefix="params", best=True)
            assert meta == {"step": best}
            assert_same_bits(params, make_state(best, 4096).params)
            step, restored, meta = checkpoints.restore(like)
            assert meta == {"step": step}
            assert_same_bits(restored, make_state(step, 4096))
            assert step >= max(newest + 2, int(lines[-1]) - 1)  # a save begins when the one before it is sealed
            newest = step
    assert sentences == []  # what was never complete is not called damaged
    assert leftovers > 0
    with Checkpoints(tmp_path) as checkpoints:  # the next run clears it away
        checkpoints.save(newest + 1, make_state(), {})
    assert all(path.name.isdecimal() for path in tmp_path.iterdir())


def test_a_reader_clears_nothing_away(tmp_path: Path) -> None:
    save_steps(tmp_path, 1)
    uncommitted = tmp_path / "0000000002.orbax-checkpoint-tmp"
    shutil.copytree(tmp_path / "0000000001", uncommitted)
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.restore(jax.eval_shape(make_state))[0] == 1
    assert uncommitted.is_dir()
    save_steps(tmp_path, 3)
    assert not uncommitted.exists()


def test_what_is_on_disk_can_be_read_without_jaxrl(tmp_path: Path) -> None:
    """The manifest lists every leaf under the name by which orbax knows it."""
    save_steps(tmp_path, 1)
    contents = json.loads((tmp_path / "0000000001" / "manifest.json").read_text())["contents"]
    names = [name for name, _, shape in contents["leaves"] if 0 not in shape]
    restored = ocp.PyTreeCheckpointer().restore(
        tmp_path / "0000000001" / "arrays",
        restore_args={name: ocp.RestoreArgs(restore_type=np.ndarray) for name in names},
    )
    assert set(restored) == set(names)
    np.testing.assert_array_equal(restored["params.dense/kernel"], make_state(1).params["dense/kernel"])


def test_digest(tmp_path: Path) -> None:
    """The same from a state, from another layout of it, and from disk; every bit counts."""
    state = make_state(3)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(7, place(state, 4), {})
        checkpoints.wait()
        assert checkpoint_digest(tmp_path) == digest(state) == digest(place(state, 2))
        checkpoints.save(8, make_state(4), {})
    assert checkpoint_digest(tmp_path) == digest(make_state(4)) != digest(state) == checkpoint_digest(tmp_path, 7)
    assert digest({"x": jnp.zeros(1)}) != digest({"x": jnp.full((1,), -0.0)})
    assert digest({"x": jnp.zeros(1)}) != digest({"x": jnp.zeros(1, jnp.int32)}) != digest({"y": jnp.zeros(1)})
    assert digest({"x": jax.random.key(0)}) != digest({"x": jax.random.key(1)})


def test_the_first_checkpoint_of_several_devices_compiles_nothing(tmp_path: Path) -> None:
    """Shapes that no other test has, replicated and split, which were a program each."""
    state = State(
        {f"weights_{k}": np.arange((16 + 8 * k) * 37, dtype=np.float32).reshape(-1, 37) for k in range(4)},
        {"rows": np.arange(8 * 41, dtype=np.int32).reshape(8, 41)},
        {"one": jax.random.key(1), "many": jax.random.split(jax.random.key(2), 8)},
    )
    placed = place(state, 8)
    with note_compilations() as compiled, Checkpoints(tmp_path / "checkpoints") as checkpoints:
        checkpoints.save(1, placed, {})
        checkpoints.wait()
        assert compiled == []
        jax.jit(lambda x: x * 3 + 1)(jnp.ones(43)).block_until_ready()
        assert len(compiled) > 0  # they are counted
    with Checkpoints(tmp_path / "checkpoints") as checkpoints:
        _, restored, _ = checkpoints.restore(placed)
    jax.tree.map(np.testing.assert_array_equal, restored.params, state.params)
    assert all(
        x.sharding == y.sharding for x, y in zip(jax.tree.leaves(restored), jax.tree.leaves(placed), strict=True)
    )
