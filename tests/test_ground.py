"""Coverage over grounds of the user's: files, resampling, areas, runs that find their file again."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.coverage import batch, make, wander
from helpers.programs import get_programs
from helpers.runs import resume, run
from PIL import Image

import jaxrl.cli.evaluate
import jaxrl.cli.render
import jaxrl.cli.train
from envs_jax.coverage import raster, terrain
from envs_jax.testing import check_env
from envs_jax.viewing import Record


def cells_of(env: Any) -> np.ndarray:
    return np.asarray(terrain.whole(terrain.from_raster(env.ground), env.n))


@pytest.fixture
def file(tmp_path: Path) -> str:
    """A ground that neither rectangles nor symmetry describe."""
    path = tmp_path / "ground.npy"
    np.save(path, np.random.default_rng(5).random((9, 14)))
    return str(path)


# Rasters


@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (26, 7), (60, 26), (131, 40)], ids=str)
def test_cells_are_means_of_the_raster(shape: tuple[int, int]) -> None:
    """Against fine maps of 26 H x 26 W equal squares, of which each cell holds H x W."""
    values = np.random.default_rng(0).random(shape)
    fine = np.repeat(np.repeat(values, 26, axis=0), 26, axis=1)
    expected = fine.reshape(26, shape[0], 26, shape[1]).mean(axis=(1, 3))
    np.testing.assert_allclose(raster.resample(values, 26), expected, atol=1e-12)


def test_a_raster_of_the_size_of_the_map_is_taken_as_it_is(tmp_path: Path) -> None:
    values = np.random.default_rng(1).random((43, 43)) < 0.3
    for kind in (bool, np.uint8, np.float32):
        path = tmp_path / f"{np.dtype(kind).name}.npy"
        np.save(path, values.astype(kind))
        env = make(q=5, terrain=str(path))
        np.testing.assert_array_equal(cells_of(env), values)
        assert env.ground.count == values.sum() and env.ground.bits.shape == (6, 43)


def test_half_of_a_cell_is_not_the_region(tmp_path: Path) -> None:
    half_full = np.tile([[0.0, 1.0], [1.0, 0.0]], (26, 26))  # each cell: two of four
    half_full[0, 0] = 1.0  # and three of four in one cell
    np.save(tmp_path / "half.npy", half_full)
    np.save(tmp_path / "more.npy", np.tile([[0.0, 1.0], [1.0, 0.01]], (26, 26)))
    assert make(q=3, terrain=str(tmp_path / "half.npy")).n == 25  # 52 values over 25 cells
    half, more = (raster.load(str(tmp_path / name), 26).count for name in ("half.npy", "more.npy"))
    assert half == 1 and more == 26 * 26


def test_pictures_have_x_to_the_right_and_y_upwards(tmp_path: Path) -> None:
    grey = np.zeros((30, 20), np.uint8)  # 30 rows from the top, 20 columns
    grey[20:, :10] = 128  # below, left: just above a half
    grey[:10, 10:] = 127
    expected = np.zeros((26, 26), bool)
    expected[:13, :9] = True  # 10 of 30 rows are 8 2/3 cells
    Image.fromarray(grey).save(tmp_path / "grey.png")
    Image.fromarray(grey.astype(np.uint16) * 257).save(tmp_path / "wide.png")
    Image.fromarray(np.repeat(grey[..., None], 3, axis=2)).save(tmp_path / "colours.PNG")
    Image.fromarray(grey).point(lambda value: 255 * (value > 127)).convert("1").save(tmp_path / "bits.png")
    for name in ("grey.png", "wide.png", "colours.PNG"):
        assert raster.load(str(tmp_path / name), 26).count == 13 * 8, name  # a ninth row holds 0.5 x 2/3
    bits = raster.load(str(tmp_path / "bits.png"), 26)
    np.testing.assert_array_equal(terrain.unpack(jnp.asarray(bits.bits), 26), expected)


def save_picture(path: Path, mode: str, colour: Any) -> None:
    Image.new(mode, (4, 4), colour).save(path)


BAD: dict[str, tuple[Any, str]] = {
    "row.npy": (np.zeros(4), r"has the shape \(4,\): it must be a raster with two dimensions"),
    "colours.npy": (np.zeros((4, 4, 3)), r"has the shape \(4, 4, 3\): it must be a raster"),
    "empty.npy": (np.zeros((0, 4)), r"has the shape \(0, 4\)"),
    "nan.npy": (np.full((3, 3), np.nan), "holds NaN: write 0 or 1 where nothing is known"),
    "high.npy": (np.full((3, 3), 255), "holds values from 255 to 255: scale them to 0 to 1"),
    "zeros.npy": (np.zeros((3, 3)), "has no cell above 0.5, so the region of interest would be empty: raise some"),
    "low.npy": (np.array([[-0.5, 1.0]]), "holds values from -0.5 to 1"),
    "infinite.npy": (np.array([[0.0, np.inf]]), "holds values from 0 to inf"),
    "words.npy": (np.array([["a", "b"]]), "holds values of type <U1: it must hold numbers from 0 to 1"),
    "objects.npy": (np.array([[None, 1]], object), "is not a NumPy array: write it with numpy.save"),
    "text.npy": (b"0 1 0 1", "is not a NumPy array"),
    "nothing.npy": (b"", "is not a NumPy array"),
    "text.png": (b"P1 2 2", "is not a readable PNG: save the picture again"),
    "cut.png": (b"\x89PNG\r\n\x1a\n\x00\x00", "is not a readable PNG"),
    "red.png": (("RGB", (200, 0, 0)), "has colours: save it in shades of grey"),
    "clear.png": (("RGBA", (200, 200, 200, 90)), "is transparent in places: save it without"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_rasters(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content, words = BAD[name]
    path = tmp_path / name
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif isinstance(content, tuple):
        save_picture(path, *content)
    else:
        np.save(path, content)
    assert jaxrl.cli.evaluate.main(["--env", "coverage", "--q", "3", "--terrain", str(path)]) == 2
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1 and re.search(words, error) and str(path) in error


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"terrain": "no/such.npy"}, r"no/such.npy' cannot be read \(No such file or directory\): put the file there"),
        ({"terrain": "map.tif"}, r"unknown terrain 'map.tif' \(files end in .npy or .png\): choose from: band"),
        ({"area": 0.0}, "area must lie between 0.1 and"),
    ],
)
def test_bad_settings(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make(**settings)


# Missions


def with_array(ground: terrain.Terrain, n: int, copies: int) -> terrain.Terrain:
    """The ground of a file as an array in the state, for each of the copies."""
    bits = terrain.pack(terrain.whole(ground, n))
    return jax.tree.map(lambda x: jnp.stack([x] * copies), dataclasses.replace(ground, bits=bits))


@pytest.mark.parametrize("backend", ["dense", pytest.param("windows", marks=pytest.mark.slow)])
def test_missions_are_those_over_the_same_ground_in_the_state(backend: str, file: str) -> None:
    """Grounds in states are compared with the oracle elsewhere."""
    env = make(terrain=file, q=4, budget=3, num_agents=3, failure_rate=0.2, map_backend=backend)
    plain = dataclasses.replace(env, terrain="field")
    draw, measure, move = batch(env)
    state = draw(jax.random.split(jax.random.key(2), 3))
    other = dataclasses.replace(state, terrain=with_array(terrain.from_raster(env.ground), env.n, 3))
    positions, rng = state.positions, np.random.default_rng(0)
    for _ in range(env.steps + 1):
        state, timestep = measure(state, positions)
        other, expected = batch(plain)[1](other, positions)
        assert isinstance(state.terrain.bits, raster.Raster)
        np.testing.assert_array_equal(state.maps.beliefs, other.maps.beliefs)
        pairs = zip(jax.tree.leaves((timestep, state.maps)), jax.tree.leaves((expected, other.maps)), strict=True)
        for a, b in pairs:
            np.testing.assert_allclose(a, b, rtol=0, atol=2e-6 if a.dtype == np.float32 else 0)
        positions = move(positions, rng.integers(0, 6, (3, 3), np.int32))
    assert np.asarray(timestep.terminated).all()


def test_there_is_one_copy_for_all_environments(file: str) -> None:
    def count_bytes(env: Any) -> int:
        state = jax.eval_shape(env.reset, jax.random.key(0))[0]
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state) if x.dtype != jax.random.key(0).dtype)

    assert count_bytes(make(terrain=file, q=7)) == count_bytes(make(q=7)) < count_bytes(make(terrain="field", q=7))


def test_environments_over_one_file_are_equal(file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    env = make(terrain="ground.npy")
    assert env.terrain == file and env == make(terrain=file) == dataclasses.replace(env) != make()
    assert dataclasses.replace(env, terrain="four") == make(terrain="four")
    np.save(file, np.eye(9))
    with pytest.raises(ValueError, match="has changed since these settings were made: put the former file back"):
        dataclasses.replace(env, budget=3)
    with pytest.raises(ValueError, match="has changed"):
        env.reset(jax.random.key(0))
    changed = make(terrain=file)
    assert changed != env and hash(changed.ground) != hash(changed) and changed.ground.count < 200
    np.save(tmp_path / "other.npy", np.eye(9))
    other = dataclasses.replace(env, terrain=str(tmp_path / "other.npy"))  # another file is no change of this one
    assert other.ground == changed.ground and other != changed


@pytest.mark.slow
def test_an_area_stretches_all_but_the_range() -> None:
    """A mission in 100 m with a range of 50 m is that in 50 m with 25 m."""
    usual = make(failure_rate=0.1, communication_range=25.0)
    large, shorter = (make(failure_rate=0.1, communication_range=x, area=100.0) for x in (50.0, 25.0))
    heard = np.zeros(2)
    for key in jax.random.split(jax.random.key(3), 4):
        one, other, less = (get_programs(env).reset(key, ()) for env in (usual, large, shorter))
        for a, b in zip(jax.tree.leaves(one[1]), jax.tree.leaves(other[1]), strict=True):
            np.testing.assert_array_equal(a, b)
        heard += [np.sum(np.asarray(x[1].links) >= 0) for x in (one, less)]
        distance = 10.0 * np.linalg.norm(np.diff(np.asarray(less[0].positions)[:2], axis=0))  # 10 m between points
        if distance > 25:
            assert less[1].links[0, 1] == -1
    assert heard[1] < heard[0]
    ranges = jax.jit(jax.vmap(lambda key: make(random_range=True, area=100.0)._draw_mission(key).comm_range))
    drawn = set(np.asarray(ranges(jax.random.split(jax.random.key(0), 60))).tolist())
    assert drawn == {0.0, 7.5, 12.5, 50.0}


@pytest.mark.slow
def test_the_contract_over_a_file(file: str) -> None:
    check_env(make(terrain=file, q=3, num_agents=2, budget=2, area=20.0, map_backend="windows"))


def test_drawings_have_the_ground_and_its_metres(tmp_path: Path) -> None:
    values = np.zeros((2, 2))
    values[1, 0] = 1.0  # x > 1/2, y < 1/2: to the right, below
    np.save(tmp_path / "quarter.npy", values)
    env = make(terrain=str(tmp_path / "quarter.npy"), area=200.0, budget=1, num_agents=2)
    steps_seen = wander(env, jax.random.key(0))
    states = jax.tree.map(lambda *x: jnp.stack(x), *(state for state, _ in steps_seen))
    timesteps = jax.tree.map(lambda *x: jnp.stack(x), *(timestep for _, timestep in steps_seen))
    record = Record(env, "title", "subtitle", "random", states, timesteps, np.zeros((2, 2), np.int32), {})
    drawing = env.viewer().drawing(record)
    truth = next(shape for shape in drawing.panels[0].still if shape.style == "truth")
    corners = np.array(truth.parts).reshape(-1, 2)  # y downwards
    side = drawing.panels[0].image_box[2]
    np.testing.assert_allclose(corners.min(0), side / 2, atol=2)
    np.testing.assert_allclose(corners.max(0), side, atol=0.01)
    words = [shape.value for shape in drawing.panels[0].still if shape.style == "across"]
    assert words == ["0", "40", "80", "120", "160 m"]
    assert any(entry.words == "footprint seen from 60 m" for entry in drawing.legend)


# Commands


SMALL = "--q 3 --num_agents 2 --budget 2"


@pytest.mark.slow
def test_runs_find_their_file_again(file: str, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    sizes = "--num_envs 8 --hidden_size 8 --minibatch_size 16 --num_epochs 1 --critic_warmup 0"
    directory = run(f"--algo coma --terrain ground.npy {SMALL} {sizes} --total_episodes 16", tmp_path / "runs")
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert f"terrain: {file}\n" in (directory / "config.yaml").read_text()
    resume(directory, "--total_episodes 32")
    assert jaxrl.cli.evaluate.main([str(directory), "--episodes", "4", "--policy", "greedy"]) == 0
    assert jaxrl.cli.evaluate.main([str(directory), "--episodes", "4", "--policy", "greedy", "--terrain", "four"]) == 0
    assert jaxrl.cli.render.main([str(directory), "--out", "mission.html"]) == 0
    assert "<svg" in Path("mission.html").read_text() or "canvas" in Path("mission.html").read_text()
    capsys.readouterr()
    content = Path(file).read_bytes()
    np.save(file, np.eye(4))
    for command in (jaxrl.cli.evaluate.main, jaxrl.cli.train.main):
        argv = [str(directory)] if command is jaxrl.cli.evaluate.main else ["--resume", str(directory)]
        assert command(argv) == 2
        error = capsys.readouterr().err
        assert len(error.splitlines()) == 1 and "has changed since these settings were made" in error
        Path(file).unlink()
        assert command(argv) == 2
        error = capsys.readouterr().err
        assert len(error.splitlines()) == 1 and f"'{file}' cannot be read (No such file" in error
        np.save(file, np.eye(4))
    Path(file).write_bytes(content)
    assert jaxrl.cli.evaluate.main([str(directory), "--episodes", "4", "--policy", "greedy"]) == 0
