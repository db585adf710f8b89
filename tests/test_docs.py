"""The code of the documentation runs exactly as written: put into files, checked, trained by the command shown."""

import json
import re
import runpy
import shlex
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import matplotlib
import pytest
from helpers.off_policy import assert_close, make_trainer, run

import jaxrl.cli.evaluate
import jaxrl.cli.train

ROOT = Path(__file__).parents[1]
DOCS, README = ROOT / "docs", ROOT / "README.md"
PAGE = DOCS / "tutorials" / "own_environment_and_algorithm.md"
PRESETS = DOCS / "presets.md"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)


def command(verb: str) -> list[str]:
    """Arguments of the first command of the page that calls a verb."""
    line = next(line for block in blocks("bash") for line in block.splitlines() if f"jaxrl.{verb}" in line)
    return shlex.split(line)[3:]  # python -m jaxrl.<verb>


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The page's files in a folder on the Python path."""
    folder = tmp_path_factory.mktemp("own")
    for block in blocks("python"):
        name = re.match(r"# (\w+\.py)\n", block)
        assert name, f"a block of {PAGE.name} does not begin with the name of its file"
        (folder / name.group(1)).write_text(block)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        patch.chdir(folder)
        yield folder


@pytest.fixture(scope="module")
def trained(folder: Path) -> Path:
    """The run directory of the page's command."""
    assert jaxrl.cli.train.main([*command("train"), "--runs", str(folder / "runs")]) == 0
    return Path((folder / "runs" / "latest").read_text().strip())


def test_the_page_shows_its_files(folder: Path) -> None:
    names = ["actor_critic.py", "check.py", "orchard.py", "orchard_viewer.py", "play.py"]
    assert sorted(path.name for path in folder.glob("*.py")) == names


@pytest.mark.long
def test_the_command_of_the_page_learns(trained: Path) -> None:
    lines = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    apples = [line["rollout/apples"] for line in lines if "rollout/apples" in line]
    assert len(apples) > 200
    assert sum(apples[:5]) / 5 < 2  # the page says: about one before training, about seven after it
    assert sum(apples[-50:]) / 50 > 6.5


@pytest.mark.long
def test_the_trained_policy_is_compared_with_random_actions(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert jaxrl.cli.evaluate.main([str(trained), "--episodes", "32"]) == 0
    report = json.loads((trained / "evaluation.json").read_text())["policies"]
    assert report["random"]["apples"]["mean"][-1] < 2 and report["learned"]["apples"]["mean"][-1] > 6
    assert "greedy is better than random" in " ".join(capsys.readouterr().out.split())


@pytest.mark.long
def test_the_algorithm_of_the_page_computes_the_same_on_one_and_eight_devices(folder: Path) -> None:
    """Only by `gradient` and `step`."""
    page = runpy.run_path(str(folder / "actor_critic.py"))
    env = runpy.run_path(str(folder / "orchard.py"))["Orchard"](size=4)
    states = [run(make_trainer(page["ActorCritic"], env, 16, devices), 3)[0] for devices in (1, 8)]
    assert_close(states[0].algo.replicated, states[1].algo.replicated, 2e-3)


def test_settings_of_the_page_are_flags(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        jaxrl.cli.train.main([*command("train")[:4], "--help"])
    assert caught.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "--size" in text and "rows and columns of the orchard" in text and "learning rate (Adam)" in text
    assert jaxrl.cli.train.main([*command("train")[:4], "--size", "1", "--total_env_steps", "1000"]) == 2
    assert "--size must lie between 2 and 100, not 1" in capsys.readouterr().err


@pytest.mark.parametrize("name", [pytest.param("train_and_watch", marks=pytest.mark.long), "own_environment"])
def test_the_code_of_a_notebook_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    matplotlib.use("Agg")
    module = types.ModuleType(f"notebook_{name}")  # as in a notebook, classes belong to a module
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for cell in json.loads((DOCS / "notebooks" / f"{name}.ipynb").read_text())["cells"]:
        if cell["cell_type"] == "code":
            assert not cell["outputs"], "clear the outputs"
            exec(compile("".join(cell["source"]), name, "exec"), vars(module))
    if name == "train_and_watch":
        assert (tmp_path / "arm.png").stat().st_size > 1000 and module.np.isfinite(module.evaluation["return"]).all()
    else:
        assert module.jnp.nanmean(module.last) > module.jnp.nanmean(module.first) + 5


OTHERS = [ROOT / "bench" / "README.md", ROOT / "bench" / "results" / "README.md", ROOT / "tests" / "data" / "README.md"]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted(DOCS.rglob("*.md")), *OTHERS]


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_links_and_names_of_modules_exist(page: Path) -> None:
    text = page.read_text()
    for link in re.findall(r"\]\((?!https?:)([^)#]+)", text):
        assert (page.parent / link).exists(), link
    for path in re.findall(r"`((?:envs_jax|jaxrl|scripts|configs)/[\w/]+\.(?:py|sh|yaml))`", text):
        assert (ROOT / path).is_file(), path
    text = re.sub(r"commit\s+[0-9a-f]{7},\s+`[^`]+`", "", text, flags=re.IGNORECASE)  # of commands that are gone
    for package, verb in re.findall(r"python -m (jaxrl|bench)\.([\w.]+)", text):
        path = ROOT / package / verb.replace(".", "/")
        assert path.with_suffix(".py").is_file() or (path / "__main__.py").is_file(), verb


def test_presets_of_their_page_are_all_there_are() -> None:
    rows = PRESETS.read_text().split("| preset |")[1].split("\n\n")[0].splitlines()[2:]
    named = [name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[1])]
    assert sorted(named) == sorted(path.stem for path in (ROOT / "configs").glob("*.yaml"))
