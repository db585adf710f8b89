"""Notebooks run, links and names exist, and presets are all on their page."""

import json
import re
import sys
import types
from pathlib import Path

import matplotlib
import pytest

ROOT = Path(__file__).parents[1]
DOCS, README = ROOT / "docs", ROOT / "README.md"
PRESETS = DOCS / "presets.md"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["train_and_watch", "own_environment"])
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
