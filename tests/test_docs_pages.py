"""Pages as readers of the repository see them, without the documentation site; links, words, versions, notebooks."""

import json
import re
import sys
import tomllib
import types
from pathlib import Path

import matplotlib
import pytest
import yaml
from markdown_it import MarkdownIt

import jaxrl

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
DOCS = sorted((ROOT / "docs").rglob("*.md"))
OTHERS = [ROOT / "bench" / "README.md", ROOT / "bench" / "results" / "README.md", ROOT / "tests" / "data" / "README.md"]
PAGES = [*sorted(ROOT.glob("*.md")), *DOCS, *OTHERS]
LINES = 90  # of the README
WORDS = 13_179  # of README and docs/, without code and generated parts


def problems(text: str) -> list[str]:
    """What a reader would stumble over: directives of the site's build, marks and tables with nothing in them."""
    prose = re.sub(r"^ *```.*?^ *```$", "", text, flags=re.DOTALL | re.MULTILINE)
    found = re.findall(r"^(?::::|!!!|\?\?\?|--8<--|\{%|\{\{).*$", prose, re.MULTILINE)
    found += re.findall(r"^<!-- [^\n]+ -->\n+<!-- end -->$", text, re.MULTILINE)
    page = MarkdownIt("commonmark").enable(["table", "strikethrough"]).render(text)
    tables = re.findall(r"<table>.*?</table>", page, re.DOTALL)
    found += [f"a table without rows: {table}" for table in tables if "<tbody>" not in table]
    found += re.findall(r"<p>\|.*\|", page)  # rows that are no table on the page
    for block in re.findall(r"(?:^\|.*\|$\n?)+", prose, re.MULTILINE):
        # Markdown drops cells that are too many, and fills up those that are missing, without a word.
        counts = {len(re.findall(r"(?<!\\)\|", re.sub(r"`[^`\n]*`", "", row))) for row in block.splitlines()}
        found += [f"rows of different lengths: {block}"] * (len(counts) > 1)
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_page_looks_right_as_plain_markdown(page: Path) -> None:
    assert not problems(page.read_text())


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("# Page\n\n::: jaxrl.api\n    options:\n", "::: jaxrl.api"),
        ("<!-- settings a:B -->\n<!-- end -->\n", "<!-- settings a:B -->"),
        ("Text\n\n| a | b |\n|---|---|\n", "a table without rows"),
        ("| a | b | c |\n|---|---|\n| 1 | 2 | 3 |\n", "<p>| a | b | c |"),
        ("| a | b |\n|---|---|\n| 1 | 2 | 3 |\n", "rows of different lengths"),
        ("!!! note\n    Text\n", "!!! note"),
    ],
)
def test_problems_are_found(text: str, problem: str) -> None:
    assert any(found.startswith(problem) for found in problems(text))
    assert not problems("# Page\n\n```text\n::: jaxrl.api\n```\n\n| a |\n|---|\n| 1 |\n")


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
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
    rows = (ROOT / "docs" / "presets.md").read_text().split("| preset |")[1].split("\n\n")[0].splitlines()[2:]
    named = [name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[1])]
    assert sorted(named) == sorted(path.stem for path in (ROOT / "configs").glob("*.yaml"))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["train_and_watch", "own_environment"])
def test_the_code_of_a_notebook_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    matplotlib.use("Agg")
    module = types.ModuleType(f"notebook_{name}")  # as in a notebook, classes belong to a module
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for cell in json.loads((ROOT / "docs" / "notebooks" / f"{name}.ipynb").read_text())["cells"]:
        if cell["cell_type"] == "code":
            assert not cell["outputs"], "clear the outputs"
            exec(compile("".join(cell["source"]), name, "exec"), vars(module))
    if name == "train_and_watch":
        assert (tmp_path / "arm.png").stat().st_size > 1000 and module.np.isfinite(module.evaluation["return"]).all()
    else:
        assert module.jnp.nanmean(module.last) > module.jnp.nanmean(module.first) + 5


def count_words(text: str) -> int:
    """Return the number of words that people wrote: without code and what bench.tables makes."""
    text = re.sub(r"^<!-- .*? -->$.*?^<!-- end -->$", "", text, flags=re.DOTALL | re.MULTILINE)
    return len(re.sub(r"^ *```.*?^ *```$", "", text, flags=re.DOTALL | re.MULTILINE).split())


def test_length_of_the_pages() -> None:
    assert count_words("one two\n\n```text\nno\n```\n\n<!-- settings a:B -->\n\nno\n\n<!-- end -->\n\nthree\n") == 3
    assert len(README.read_text().splitlines()) <= LINES
    assert sum(count_words(page.read_text()) for page in (README, *DOCS)) <= WORDS


def test_settings_of_every_class_are_on_a_page() -> None:
    marks = re.findall(r"^<!-- settings (\S+) -->$", "".join(page.read_text() for page in DOCS), re.MULTILINE)
    algos = [f"jaxrl.algos.{name}" for name in ("coma:Coma", "ddpg:Ddpg", "ppo:Ppo", "sac:Sac", "student:Student")]
    environments = [f"envs_jax.{name}" for name in ("coverage.env:Coverage", "snakes.env:Snakes", "reach.env:Reach")]
    assert set(marks) >= {*algos, *environments, "jaxrl.algos.collective.algorithm:Collective"}
    assert len(marks) == len(set(marks))


def test_versions_agree() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == jaxrl.__version__
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == jaxrl.__version__
    (newest, *_) = re.findall(r"^## (\d+\.\d+\.\d+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest == jaxrl.__version__
    assert len((ROOT / "CHANGELOG.md").read_text().splitlines()) <= 60
    assert project["license-files"] == ["LICENSE", "NOTICE"]


@pytest.mark.parametrize("path", sorted((ROOT / ".github").rglob("*.yml")), ids=lambda path: path.name)
def test_workflows_call_what_is_there(path: Path) -> None:
    content = yaml.safe_load(path.read_text())
    assert isinstance(content, dict)
    makefile = (ROOT / "Makefile").read_text()
    for job in content.get("jobs", {}).values():
        for step in job["steps"]:
            command = step.get("run", "")
            for target in re.findall(r"^make ([\w-]+)", command):
                assert f"\n{target}: " in makefile, command
            for script in re.findall(r"^\.ci/\w+", command):
                assert (ROOT / script).is_file(), command
