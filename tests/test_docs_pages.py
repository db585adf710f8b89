"""Pages as readers of the repository see them, without the documentation site; words, versions and workflows."""

import re
import tomllib
from pathlib import Path

import pytest
import yaml
from markdown_it import MarkdownIt
from markdown_it.token import Token

import jaxrl
from bench.tables import reference

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
DOCS = sorted((ROOT / "docs").rglob("*.md"))
PAGES = [*sorted(ROOT.glob("*.md")), *DOCS, ROOT / "bench" / "README.md", ROOT / "bench" / "results" / "README.md"]
LINES = 90  # of the README
WORDS = 13_179  # of README and docs/, without code and generated parts


def render(text: str) -> list[Token]:
    """Return the parts of a page, as sites that show repositories read Markdown."""
    return MarkdownIt("commonmark").enable(["table", "strikethrough"]).parse(text)


def problems(text: str) -> list[str]:
    """What a reader would stumble over: directives of the site's build, marks and tables with nothing in them."""
    found = []
    prose = re.sub(r"^ *```.*?^ *```$", "", text, flags=re.DOTALL | re.MULTILINE)
    found += re.findall(r"^(?::::|!!!|\?\?\?|--8<--|\{%|\{\{).*$", prose, re.MULTILINE)
    found += re.findall(r"^<!-- [^\n]+ -->\n+<!-- end -->$", text, re.MULTILINE)
    tokens = render(text)
    tables = 0
    rows = 0
    for token in tokens:
        tables += token.type == "table_open"
        rows += token.type == "tr_open"
        if token.type == "table_open":
            rows = 0
        if token.type == "table_close" and rows < 2:
            found.append("a table without rows")
        if token.type == "inline" and re.match(r"\|.*\|", token.content):
            found.append(f"no table: {token.content}")
    heads = re.findall(r"^\|(?:-+\|)+$", prose, re.MULTILINE)
    if tables != len(heads):
        found.append(f"{len(heads)} tables in the text, {tables} on the page")
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_page_looks_right_as_plain_markdown(page: Path) -> None:
    assert not problems(page.read_text())


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_rows_have_as_many_cells_as_their_head(page: Path) -> None:
    """Markdown drops what is too much, and fills up what is missing, without a word."""
    for block in re.findall(r"(?:^\|.*\|$\n?)+", page.read_text(), re.MULTILINE):
        counts = {len(re.findall(r"(?<!\\)\|", re.sub(r"`[^`\n]*`", "", row))) for row in block.splitlines()}
        assert len(counts) == 1, block


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("# Page\n\n::: jaxrl.api\n    options:\n", "::: jaxrl.api"),
        ("<!-- settings a:B -->\n<!-- end -->\n", "<!-- settings a:B -->\n<!-- end -->"),
        ("Text\n\n| a | b |\n|---|---|\n", "a table without rows"),
        ("| a | b | c |\n|---|---|\n| 1 | 2 | 3 |\n", "1 tables in the text, 0 on the page"),
        ("!!! note\n    Text\n", "!!! note"),
    ],
)
def test_problems_are_found(text: str, problem: str) -> None:
    assert problem in problems(text)
    assert not problems("# Page\n\n```text\n::: jaxrl.api\n```\n\n| a |\n|---|\n| 1 |\n")


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


def test_defaults_are_shown_as_flags_take_them() -> None:
    lines = reference.settings_table("jaxrl.algos.sac:Sac").splitlines()
    assert lines[0] == "| setting | default | range | meaning |"
    assert "| `batch_size` | 512 | 1 to 16,777,216 | transitions per update; each holds all agents |" in lines
    assert all(re.fullmatch(r"\| `\w+` \| \S.* \| .*\| \S.* \|", line) for line in lines[2:])
    shown = [reference._show_default(value) for value in (True, (1, 2), "", None, 0.5)]
    assert shown == ["true", "1,2", "empty", "None", "0.5"]


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
