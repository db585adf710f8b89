"""Weights of the published trainer: its files are read without PyTorch, and our networks then compute what its did."""

import pickle
import struct
import zipfile
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from helpers.off_policy import outputs_of

from jaxrl import algos
from jaxrl.cli import train
from jaxrl.cli.flags import parse
from jaxrl.common.errors import UsageError, UserError
from jaxrl.integrations import torch_weights
from jaxrl.integrations.torch_weights import read, team_net
from jaxrl.rl.data_parallel import DataParallel
from jaxrl.runtime import load as loading
from jaxrl.runtime.build import build_run

RANDOM = np.random.default_rng(0)
TOTAL = "--total_env_steps 1 --devices 1"


def tensors(inputs: int, outputs: int, hidden_size: int = 256, lstm: bool = False) -> dict[str, np.ndarray]:
    """Random weights in the layout of the published networks."""
    shapes: dict[str, tuple[int, ...]] = {
        "prev_dense.0": (hidden_size, inputs),
        "post_dense.0": (hidden_size, (1 + lstm) * hidden_size),
    }
    shapes["post_dense.2"] = (outputs, hidden_size)
    tensor_shapes = {f"{name}.weight": shape for name, shape in shapes.items()}
    tensor_shapes |= {f"{name}.bias": shape[:1] for name, shape in shapes.items()}
    for suffix in ("", "_reverse") if lstm else ():
        tensor_shapes |= {
            f"comm_net.lstm.weight_{kind}_l0{suffix}": (4 * hidden_size, hidden_size) for kind in ("ih", "hh")
        }
        tensor_shapes |= {f"comm_net.lstm.bias_{kind}_l0{suffix}": (4 * hidden_size,) for kind in ("ih", "hh")}
    return {name: RANDOM.normal(size=shape, scale=0.06).astype(np.float32) for name, shape in tensor_shapes.items()}


def archive(path: Path, tensors: dict[str, np.ndarray], pickled: bytes | None = None) -> Path:
    """A file as `torch.save` lays it out, its pickle written opcode by opcode."""

    def word(text: str) -> bytes:
        return b"X" + struct.pack("<I", len(text)) + text.encode()

    def numbers(values: tuple[int, ...]) -> bytes:
        return b"(" + b"".join(b"J" + struct.pack("<i", x) for x in values) + b"t"

    empty = b"ccollections\nOrderedDict\n)R"
    data = b"\x80\x02" + empty + b"("
    for key, (name, x) in enumerate(tensors.items()):
        strides = tuple(int(np.prod(x.shape[k + 1 :])) for k in range(x.ndim))
        storage = b"(" + word("storage") + b"ctorch\nFloatStorage\n" + word(str(key)) + word("cpu")
        storage += b"J" + struct.pack("<i", x.size) + b"tQ"
        data += word(name) + b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + b"K\x00" + numbers(x.shape)
        data += numbers(strides) + b"\x89" + empty + b"tR"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("archive/data.pkl", pickled or data + b"u.")
        for key, x in enumerate(tensors.values()):
            file.writestr(f"archive/data/{key}", x.tobytes())
    return path


def compute_expected(tensors: dict[str, np.ndarray], x: np.ndarray) -> np.ndarray:
    """Section 10.1 of the specification for teams [N, A, inputs], in float64."""
    w = {name: x.astype(np.float64) for name, x in tensors.items()}
    x = x @ w["prev_dense.0.weight"].T + w["prev_dense.0.bias"]
    directions = []
    for suffix in ("", "_reverse") if len(w) > 6 else ():
        order = range(x.shape[1])[:: -1 if suffix else 1]
        state = cell = np.zeros((len(x), x.shape[2]))
        states: dict[int, np.ndarray] = {}
        for agent in order:
            gates = sum(
                v @ w[f"comm_net.lstm.weight_{kind}_l0{suffix}"].T + w[f"comm_net.lstm.bias_{kind}_l0{suffix}"]
                for kind, v in (("ih", x[:, agent]), ("hh", state))
            )
            enter, forget, new, show = np.split(gates, 4, axis=1)
            enter, forget, show = (1 / (1 + np.exp(-x)) for x in (enter, forget, show))
            cell = forget * cell + enter * np.tanh(new)
            state = show * np.tanh(cell)
            states[agent] = state
        directions.append(np.stack([states[agent] for agent in sorted(states)], 1))
    x = np.concatenate(directions, 2) if directions else x
    x = np.maximum(x @ w["post_dense.0.weight"].T + w["post_dense.0.bias"], 0)
    return x @ w["post_dense.2.weight"].T + w["post_dense.2.bias"]


def test_files_are_read_without_torch(tmp_path: Path) -> None:
    written = tensors(7, 4, hidden_size=5, lstm=True)
    loaded = read(archive(tmp_path / "actor.pth", written))
    assert loaded.keys() == written.keys()
    for name, values in written.items():
        np.testing.assert_array_equal(loaded[name], values)


def algorithm(argv: str) -> Any:
    """The algorithm of a command line, without a run around it."""
    config = parse(f"{argv} {TOTAL}".split()).config
    return algos.find(config.algo)(config.make_env().spec, DataParallel(8), **config.algo_settings)


@pytest.mark.parametrize("lstm", [False, True], ids=["ddpg", "bicnet"])
def test_weights_compute_what_they_did(lstm: bool, tmp_path: Path) -> None:
    """From two files to the outputs of both networks."""
    actor, critic = tensors(26, 4, lstm=lstm), tensors(30, 1, lstm=lstm)
    files = [archive(tmp_path / f"{name}.pth", x) for name, x in (("actor", actor), ("critic", critic))]
    algo = algorithm(f"--config {'bicnet' if lstm else 'ddpg_competition'}")
    params = torch_weights.load(f"{files[0]},{files[1]}", algo, jax.random.key(0))
    observation = RANDOM.integers(0, 20, (9, 3, 26)).astype(np.float32)
    vector = RANDOM.dirichlet(np.ones(4), (9, 3)).astype(np.float32)
    logits = outputs_of(algo, "actor")(params["actor"], observation)
    values = np.asarray(outputs_of(algo, "critic")(params["critic"], observation, vector))
    np.testing.assert_allclose(logits, compute_expected(actor, observation), rtol=1e-4, atol=1e-4)
    expected_values = compute_expected(critic, np.concatenate([observation, vector], -1))
    np.testing.assert_allclose(values[0], expected_values[..., 0], rtol=1e-4, atol=1e-4)


@pytest.mark.needs("torch")
@pytest.mark.parametrize("lstm", [False, True], ids=["ddpg", "bicnet"])
def test_files_of_torch(lstm: bool, tmp_path: Path) -> None:
    """A module under the published names, saved by torch itself, and its output."""
    import torch

    nn, width = torch.nn, 2 if lstm else 1

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.prev_dense = nn.Sequential(nn.Linear(26, 256))
            if lstm:
                self.comm_net = nn.Module()
                self.comm_net.lstm = nn.LSTM(256, 256, batch_first=True, bidirectional=True)
            self.post_dense = nn.Sequential(nn.Linear(256 * width, 256), nn.ReLU(), nn.Linear(256, 4))

        def forward(self, x: Any) -> Any:
            x = self.prev_dense(x)
            return self.post_dense(self.comm_net.lstm(x)[0] if lstm else x)

    torch.manual_seed(0)
    net = Net()
    torch.save(net.state_dict(), tmp_path / "actor.pth")
    algo = algorithm(f"--config ddpg_competition --network {'bicnet' if lstm else 'mlp'}")
    observation = RANDOM.integers(0, 20, (9, 3, 26)).astype(np.float32)
    logits = algo.outputs("actor", team_net(read(tmp_path / "actor.pth")), observation)
    expected = net(torch.tensor(observation)).detach().numpy()
    np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-4)


WRONG = {
    "another observation": ("--config ddpg_ext30", "26 inputs, 2 layers of 256 units, 4 outputs, the actor of this run "
                            "has 30 inputs, 2 layers"),
    "another network": ("--config bicnet", "the actor of this run has 26 inputs, 2 layers of 256 units, an LSTM, 4 ou"),
    "a better observation": ("--config ddpg", "the actor of this run has 263 inputs, 2 layers of 256 units, layer n"),
    "a ReLU": ("--config ddpg_competition --first_layer relu", "give --first_layer linear --scale_observation false"),
    "scaled": ("--config ddpg_competition --scale_observation", "give --first_layer linear --scale_observation false"),
    "two critics": ("--config ddpg_competition --num_critics 2", "actor.pth holds 26 inputs, 2 layers of 256 units, "
    "4 outp"
                    "uts, the critic of this run has 2 times 30 inputs"),
    "another algorithm": ("--config coma_quick --hidden_size 4", "holds weights of the published snakes trainer: use "
    "them"),
}  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG)
def test_weights_that_do_not_fit(wrong: str, tmp_path: Path) -> None:
    argv, sentence = WRONG[wrong]
    file = archive(tmp_path / "actor.pth", tensors(26, 4))
    both = f"{file},{file}" if "critic" in sentence else str(file)
    with pytest.raises(UsageError) as caught:
        torch_weights.load(both, algorithm(argv), jax.random.key(0))
    assert sentence in str(caught.value) and "\n" not in str(caught.value)


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`--init_from` finds files as it finds runs, and refuses those that do not fit before a run is made."""
    file = archive(tmp_path / "actor.pth", tensors(26, 4, hidden_size=8))
    argv = f"--config ddpg_competition --hidden_size 8 --buffer_size 200 {TOTAL} --runs {tmp_path} --init_from"
    run = build_run(parse([*argv.split(), str(file)]).config)
    weights = loading.load_weights(str(file), run)["actor"]["params"]
    np.testing.assert_array_equal(weights["out_kernel"], read(file)["post_dense.2.weight"].T)
    assert train.main([*argv.replace("--hidden_size 8", "--hidden_size 9").split(), str(file)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and "layers of 8 units" in error
    assert list(tmp_path.iterdir()) == [file]


class Evil:
    """Runs code when it is unpickled."""

    def __reduce__(self) -> Any:
        return print, ("ran code",)


def test_files_that_are_something_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = tensors(3, 2, hidden_size=2)
    bent = {name: x for name, x in whole.items() if name != "post_dense.0.bias"}
    contents = {
        "no torch file": (tmp_path / "text.pth", "is not a state dict that torch.save"),
        "code": (archive(tmp_path / "evil.pth", whole, pickle.dumps(Evil())), "it holds builtins.print, only tensors"),
        "other": (archive(tmp_path / "list.pth", whole, pickle.dumps([1, 2])), "it is not a dictionary of tensors"),
        "absent": (tmp_path / "absent.pth", "No such file or directory"),
    }
    contents["no torch file"][0].write_text("weights")
    for path, sentence in contents.values():
        with pytest.raises(UserError, match=sentence):
            read(path)
    assert "ran code" not in capsys.readouterr().out
    torn = archive(tmp_path / "torn.pth", whole)
    torn.write_bytes(torn.read_bytes()[:-30])
    with pytest.raises(UserError, match=r"torn\.pth is not a state dict"):
        read(torn)
    with pytest.raises(ValueError, match=r"it lacks 'post_dense\.0\.bias'"):
        team_net(bent)
    with pytest.raises(ValueError, match=r"it has 'module\.x'"):
        team_net(whole | {"module.x": whole["post_dense.2.bias"]})
    with pytest.raises(UserError, match="names 3 files"):
        torch_weights.load("a.pth,b.pth,c.pth", None, jax.random.key(0))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (pickle.dumps({1: 2, "b": 3}), "it is not a dictionary of tensors by name"),
        (b"\x80\x02}r\xff\xff\xff\x7f.", "it numbers more objects than it holds"),  # two billion places, 16 GB
        (b"\x80\x02" + b"(" * 50 + b"l" * 49 + b".", "is not a state dict"),
    ],
)
def test_a_pickle_of_something_else(content: bytes, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=sentence) as caught:
        read(archive(tmp_path / "x.pth", tensors(3, 2, hidden_size=2), content))
    assert len(str(caught.value)) < 500 + len(str(tmp_path))
