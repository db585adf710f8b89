"""The files of the pages about one's own work: shown with names, trained by the commands shown."""

import dataclasses
import json
import re
import runpy
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest
from helpers.off_policy import assert_close, make_trainer, run

import jaxrl.cli.evaluate
import jaxrl.cli.train
from envs_jax.progress import start
from jaxrl.algos.ppo import Ppo
from jaxrl.rl.data_parallel import DataParallel

DOCS = Path(__file__).parents[1] / "docs"
PAGES = {path.stem: path.read_text() for path in sorted((DOCS / "own").glob("*.md"))}
FENCED = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def blocks(page: str, language: str) -> list[str]:
    return [text for its_language, text in FENCED.findall(PAGES[page]) if its_language == language]


def command(page: str) -> list[str]:
    """Arguments of the first command of a page that trains."""
    line = next(line for block in blocks(page, "bash") for line in block.splitlines() if "jaxrl.train" in line)
    return shlex.split(line)[3:]  # python -m jaxrl.train


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The files of all pages in one folder on the Python path."""
    folder = tmp_path_factory.mktemp("own")
    for page in PAGES:
        for block in blocks(page, "python"):
            name = re.match(r"# (\w+\.py)\n", block)
            assert name, f"a block of {page}.md does not begin with the name of its file"
            path = folder / name.group(1)
            assert not path.exists(), f"two blocks are named {path.name}"
            path.write_text(block)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        patch.chdir(folder)
        yield folder


def train(page: str, folder: Path) -> Path:
    """Run a page's command, and return the run directory."""
    runs = folder / f"runs_{page}"
    assert jaxrl.cli.train.main([*command(page), "--runs", str(runs)]) == 0
    return Path((runs / "latest").read_text().strip())


@pytest.mark.slow
@pytest.mark.parametrize("page", ["environment", "algorithm_from_scratch"])
def test_the_command_of_the_page_learns(page: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """About one apple before training, about seven after it, as the page says."""
    trained = train(page, folder)
    assert jaxrl.cli.evaluate.main([str(trained), "--episodes", "32"]) == 0
    report = json.loads((trained / "evaluation.json").read_text())["policies"]
    assert report["random"]["apples"]["mean"][-1] < 2 and report["learned"]["apples"]["mean"][-1] > 6
    assert "greedy is better than random" in " ".join(capsys.readouterr().out.split())


@pytest.mark.slow
def test_the_algorithm_of_the_page_computes_the_same_on_one_and_eight_devices(folder: Path) -> None:
    """Only by `gradient` and `step`."""
    page = runpy.run_path(str(folder / "actor_critic.py"))
    env = runpy.run_path(str(folder / "orchard.py"))["Orchard"](size=4)
    states = [run(make_trainer(page["ActorCritic"], env, 16, devices), 3)[0] for devices in (1, 8)]
    assert_close(states[0].algo.replicated, states[1].algo.replicated, 2e-3)


@pytest.mark.parametrize(
    ("page", "words"),
    [
        ("algorithm_from_scratch", "learning rate (Adam)"),
        ("algorithm", "share of the run in which learning rates rise"),
    ],
)
def test_settings_of_the_page_are_flags(page: str, words: str, folder: Path, capsys: Any) -> None:
    with pytest.raises(SystemExit):
        jaxrl.cli.train.main([*command(page), "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert words in text and "rows and columns of the orchard" in text


def test_the_learning_rate_of_the_changed_algorithm_rises(folder: Path) -> None:
    warm = runpy.run_path(str(folder / "warm_ppo.py"))["WarmPpo"]
    algo = warm(runpy.run_path(str(folder / "orchard.py"))["Orchard"]().spec, DataParallel(8), warmup=0.5)
    usual = Ppo(algo.spec, algo.layout)
    for fraction, share in ((0.0, 0.0), (0.25, 0.5), (0.75, 1.0)):
        progress = dataclasses.replace(start(), fraction=jnp.float32(fraction))
        for part in ("actor", "critic"):
            expected = share * float(usual.learning_rate(part, progress))
            assert float(algo.learning_rate(part, progress)) == pytest.approx(expected)
