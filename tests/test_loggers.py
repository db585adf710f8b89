"""--logger: rows reach the services once, a run goes on with or without them; the real packages where installed."""

import importlib
import json
import struct
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.runs import resume, run, shared_programs

from jaxrl.cli.train import main
from jaxrl.report import loggers
from jaxrl.report.loggers import open_writer
from jaxrl.report.writer import read_metrics

Capture = pytest.CaptureFixture[str]
FLAGS = "--algo helpers.tiny:TinyQ --env helpers.tiny:Corridor --num_envs 8 --total_env_steps 640 --eval_every 320"
FLAGS += " --eval_episodes 8 --checkpoint_every 10"


class Service:
    """Replaces a package: notes what it receives, and fails as asked."""

    def __init__(self) -> None:
        self.began: list[dict[str, Any]] = []
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.ended: list[Any] = []
        self.fails: str = ""
        self.first = 0
        self.sent: list[int] = []
        self.gate = threading.Event()
        self.gate.set()

    def log(self, metrics: dict[str, float], step: int) -> None:
        self.gate.wait()
        if self.fails == "log":
            raise ConnectionError("the service\nis gone")
        self.sent.append(step)
        if step >= self.first:  # wandb ignores earlier ones
            self.rows.append((step, metrics))

    def begin(self, **arguments: Any) -> None:
        if self.fails == "begin":
            raise ValueError("no such project")
        self.began.append(arguments)
        self.first = self.rows[-1][0] + 1 if self.rows else 0  # a run goes on after its last step


@pytest.fixture(scope="module", autouse=True)
def programs() -> Iterator[None]:
    with shared_programs():
        yield


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> Service:
    service = Service()

    def init(id: str | None, **arguments: Any) -> Any:
        service.begin(id=id, **arguments)

        def finish(exit_code: int) -> None:
            service.ended.append(exit_code)

        return SimpleNamespace(id=id or "id-1", step=service.first, log=service.log, finish=finish)

    package = SimpleNamespace(init=init, login=lambda **_: False, Settings=dict)
    monkeypatch.setitem(sys.modules, "wandb", package)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    return service


def expected_rows(directory: Path) -> list[tuple[int, dict[str, float]]]:
    """The rows of metrics.jsonl as a service should get them: finite numbers, by step."""
    rows = [{name: value for name, value in row.items() if value is not None} for row in read_metrics(directory)]
    return [(row.pop("step", row["iteration"]), row) for row in rows]


def test_a_run_and_its_continuation_are_one_run_of_each_service(tmp_path: Path, wandb: Service, capsys: Any) -> None:
    directory = run(f"{FLAGS} --logger wandb", tmp_path)
    resume(directory, "--total_env_steps 960")
    assert (
        wandb.rows == expected_rows(directory) and len(expected_rows(directory)) == 33
    )  # 30 iterations and 3 evaluations
    assert wandb.ended == [0, 0]
    first, second = wandb.began
    assert first["id"] is None and first["config"]["total_env_steps"] == 640 and first["config"]["gamma"] == 0.9
    assert second["id"] == "id-1" and second["resume"] == "allow" and second["config"] is None
    assert first["name"].endswith("/0001") and first["mode"] == "offline"
    assert capsys.readouterr().out.count("warning: wandb has no login and stays offline") == 2


@pytest.mark.parametrize("checkpoint", [3, 4, 6])
def test_rows_that_a_killed_process_did_not_send_are_sent_again(
    checkpoint: int, tmp_path: Path, wandb: Service
) -> None:
    """The service has rows 1 to 4; 5 and 6 were lost in the queue, before or after the last checkpoint."""
    wandb_online(wandb)
    with open_writer(tmp_path, "wandb", {}, pytest.fail) as writer:
        for iteration in range(1, 5):
            writer.write(iteration, {"train/loss": iteration / 8})
    with open_writer(tmp_path, "none", {}, pytest.fail) as writer:  # what reaches metrics.jsonl only
        writer.write(5, {"train/loss": 5 / 8})
        writer.write(6, {"train/loss": 6 / 8})
    with open_writer(tmp_path, "wandb", {}, pytest.fail) as writer:
        writer.trim(checkpoint)
        for iteration in range(checkpoint + 1, 8):
            writer.write(iteration, {"train/loss": iteration / 8})
        writer.write(7, {"eval/score": 1.0})
    assert len(wandb.sent) == len(wandb.rows) + max(0, 4 - checkpoint)  # nothing else is sent twice
    losses = [(step, row["train/loss"]) for step, row in wandb.rows if "train/loss" in row]
    assert losses == [(k, k / 8) for k in range(1, 8)]
    assert [step for step, row in wandb.rows if "eval/score" in row] == [7]


def wandb_online(service: Service) -> None:
    sys.modules["wandb"].login = lambda **_: True  # type: ignore[attr-defined]


def test_a_logger_that_joins_later_gets_the_earlier_rows(tmp_path: Path, wandb: Service) -> None:
    wandb_online(wandb)
    with open_writer(tmp_path, "none", {}, pytest.fail) as writer:
        for iteration in range(1, 6):
            writer.write(iteration, {"train/loss": 0.5, "odd": float("nan")}, 10 * iteration)
    with open_writer(tmp_path, "wandb", {}, pytest.fail) as writer:
        writer.trim(3)
        writer.write(4, {"train/loss": 0.5}, 40)
    assert wandb.rows == [(10 * k, {"iteration": k, "train/loss": 0.5}) for k in range(1, 5)]
    assert wandb.began[0]["mode"] is None and wandb.began[0]["id"] is None


@pytest.mark.parametrize(
    ("fails", "reason"), [("begin", "no such project"), ("log", "ConnectionError: the service is gone")]
)
def test_a_logger_that_fails_warns_once_and_the_run_goes_on(
    fails: str, reason: str, tmp_path: Path, wandb: Service
) -> None:
    wandb.fails = fails
    wandb_online(wandb)
    said: list[str] = []
    with open_writer(tmp_path, "wandb", {}, said.append) as writer:
        for iteration in range(1, 4):
            writer.write(iteration, {"train/loss": 0.5})
    (sentence,) = said
    assert sentence.startswith("warning: wandb gets no more metrics (") and reason in sentence
    assert len(read_metrics(tmp_path)) == 3 and not wandb.rows


def test_a_slow_logger_neither_delays_nor_fills_the_memory(tmp_path: Path, wandb: Service, monkeypatch: Any) -> None:
    monkeypatch.setattr(loggers, "_ROOM", 10)
    monkeypatch.setattr(loggers, "WAIT", 0.05)
    wandb_online(wandb)
    wandb.gate.clear()
    said: list[str] = []
    with open_writer(tmp_path, "wandb", {}, said.append) as writer:
        for iteration in range(100):
            writer.write(iteration, {"a": 1.0})
    assert len(read_metrics(tmp_path)) == 100
    assert said == ["warning: wandb gets no more metrics (it is too slow); metrics.jsonl has all of them"]
    (tmp_path / "other").mkdir()
    with open_writer(tmp_path / "other", "wandb", {}, said.append) as writer:
        writer.write(1, {"a": 1.0})
    assert len(said) == 2 and "it did not end within 0 s" in said[1]
    wandb.fails = "log"
    wandb.gate.set()
    for thread in threading.enumerate():
        if thread.name.startswith("logger"):
            thread.join()
    assert len(said) == 2  # whatever fails later, each of the two has warned


def test_a_run_that_fails_ends_as_failed(tmp_path: Path, wandb: Service) -> None:
    wandb_online(wandb)
    with pytest.raises(TypeError), open_writer(tmp_path, "wandb", {}, pytest.fail) as writer:
        writer.write(1, {"a": object()})
    assert wandb.ended == [1]


def test_a_package_that_is_not_installed(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    for module in (None, SimpleNamespace()):  # a folder of this name is imported as an empty package
        monkeypatch.setitem(sys.modules, "wandb", module)
        assert main([*FLAGS.split(), "--logger", "wandb", "--runs", str(tmp_path)]) == 2
        captured = capsys.readouterr()
        assert "pip install -e '.[wandb]'" in captured.err and captured.err.count("\n") == 1 and captured.out == ""
    assert not list(tmp_path.iterdir())


def test_an_unknown_logger(tmp_path: Path, capsys: Capture) -> None:
    assert main([*FLAGS.split(), "--logger", "none,wandbb", "--runs", str(tmp_path)]) == 2
    assert "unknown logger 'none,wandbb': did you mean 'wandb'?" in capsys.readouterr().err


def test_no_logger_is_no_thread(tmp_path: Path) -> None:
    before = threading.active_count()
    with open_writer(tmp_path, "none", {}, pytest.fail):
        assert threading.active_count() == before


# The real packages


def two_processes(folder: Path, name: str, said: list[str]) -> None:
    """Rows 1 to 3 by one process, 4 by another."""
    for iterations in ((1, 2, 3), (4,)):
        with open_writer(folder, name, {"gamma": 0.9, "env": "corridor"}, said.append) as writer:
            writer.trim(iterations[0] - 1)
            for iteration in iterations:
                writer.write(iteration, {"train/loss": iteration / 8, "time/unix": 1e9}, 32 * iteration)


def records(path: Path) -> list[Any]:
    """The records of a file of wandb: LevelDB's log format, blocks of 32 KiB after a head of seven bytes."""
    proto = importlib.import_module("wandb.proto.wandb_internal_pb2")
    content, position, part, records_read = path.read_bytes(), 7, b"", []
    while position + 7 <= len(content):
        if 32768 - position % 32768 < 7:
            position += 32768 - position % 32768
            continue
        _, length, kind = struct.unpack_from("<IHB", content, position)
        part += content[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # whole, or the last piece
            records_read.append(proto.Record.FromString(part))
            part = b""
    return records_read


@pytest.mark.needs("wandb")
@pytest.mark.filterwarnings("default")
def test_real_wandb_without_a_login(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("WANDB_MODE", "WANDB_API_KEY", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    said: list[str] = []
    folder = tmp_path / "point/0001"
    two_processes(folder, "wandb", said)
    assert len(said) == 2 and all("wandb has no login and stays offline" in line for line in said)
    files = sorted((folder / "wandb").glob("offline-run-*/*.wandb"))
    assert {path.parent.name.rpartition("-")[2] for path in files} == {(folder / "wandb.id").read_text().strip()}
    rows = [
        {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        for path in files
        for record in records(path)
        if record.WhichOneof("record_type") == "history"
    ]
    assert sorted((row["_step"], row["train/loss"]) for row in rows) == [(32 * k, k / 8) for k in (1, 2, 3, 4)]
