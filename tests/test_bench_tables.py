"""bench.tables: the pages say what the committed figures say."""

import json
import re

import pytest

from bench.claims import result
from bench.claims.claim import Claim, Figure, read_claims
from bench.tables import formats, reference
from bench.tables.__main__ import NOTE, ROOT, fill_page, main, tables, update
from jaxrl.common.errors import UserError

TEMPLATES = ROOT / "bench" / "tables"
PAGE = "# Page\n\n<!-- generated: part.one -->\n\n{}\n\n<!-- end -->\n\nText.\n"


def make_tables(text="| 1 |"):
    return {"part.one": lambda: text}


def test_the_committed_pages_are_up_to_date_and_show_every_claim(monkeypatch, capsys):
    """Tables show the figures of all claims, but for policies of the package and parity, which pages tell in words."""
    shown = set()
    find = formats.claim
    monkeypatch.setitem(formats.GLOBALS, "claim", lambda name: shown.add(name) or find(name))
    assert main(["--check"]) == 0
    assert capsys.readouterr().out == "all tables are up to date\n"
    assert {name.partition("_")[0] for name in read_claims() if name not in shown} == {"shipped", "parity"}


# Where the numbers in what people wrote on these pages are from. All others are in generated parts: claims, ratios,
# tables of peers, and what others published.
BY_HAND = {
    "README.md": {
        "3.11 to 3.13": "pyproject.toml",
        "some 3 minutes": "the claim coverage_quick, and installing",
        "one to two minutes": "the claim coverage_quick",
        "two minutes on two cores": "the claim reach_sac",
        "four trained policies": "jaxrl/pretrained",
        "about 50 lines": "docs/own/environment.md",
        "11 x 11 x 7": "the environment's specification",
        "1 to 12": "the environment's settings",
        "3 against 3": "the environment's settings",
        "263 integers": "the environment's specification",
        "39 numbers": "the environment's specification",
        "6 moves": "the environment's specification",
        "4 directions": "the environment's specification",
        "1 | 4 numbers": "the environment's specification",
    },
    "docs/results.md": {
        "95 % ones": "jaxrl/evaluation/statistics.py",
        "493 x 493 cells": "configs/coma.yaml",
        "60 x 60 cells": "configs/coma_quick.yaml",
        "200 missions each": "bench/claims/claims.yaml",
        "60 of its seconds": "bench/results/score_h200.json",
        "within 5 cm": "envs_jax/reach/reward.py",
        "Meta-World 3.1.1": "pyproject.toml",
        "50 pairs": "envs_jax/reach/goals.py",
        "26-value observation": "envs_jax/snakes/observation.py",
    },
}


@pytest.mark.parametrize("page", BY_HAND)
def test_every_number_has_a_source(page):
    """Outside generated parts, code, links and names no number is left that the list above does not name."""
    text = re.sub(r"<!-- generated.*?<!-- end -->", "", (ROOT / page).read_text(), flags=re.DOTALL)
    text = re.sub(r"```.*?```", lambda code: " ".join(re.findall(r"#.*", code[0])), text, flags=re.DOTALL)
    text = re.sub(r"`[^`]*`|\]\([^)]*\)|<[^>]*>", " ", text)
    text = " ".join(text.split())
    for words in BY_HAND[page]:
        assert words in text, words
        text = text.replace(words, "")
    names = r"snakes_\w+|3v3\w*|[Ll]evel 2|Apache-2\.0|H200|TD3|cuda1[23]|x86_64"
    left = re.findall(r"\S*\d\S*", re.sub(names, "", text))
    assert not left, left


ROW = {"commit": "c0ffee", "sources": "", "training_cpu_seconds": 90.0}


def test_a_claim_is_shown_as_measured_or_else_as_recorded(monkeypatch, tmp_path):
    figures = (
        Figure("won", "", (0.4, 0.6), 0.1),
        Figure("lost", "", (0.25,), 0.1, ci95=0.125),
    )
    one = Claim("one", "", "release", 20, "train", ("--algo ddpg",), "one", "", (1, 2), figures)
    monkeypatch.setattr(formats, "read_all_claims", lambda: {"one": one})
    monkeypatch.setattr(result, "RESULTS", tmp_path)
    recorded = formats.claim("one")
    assert (recorded.percent("won"), recorded.interval("lost"), recorded.minutes) == ("50 %", "0.250 ± 0.125", 20)
    assert recorded.cite("50 %") == r"50 %\*" and recorded.seeds == 2
    rows = [{**ROW, "seed": seed, "figures": {"won": won, "lost": 0.1}} for seed, won in enumerate((0.5, 0.7, 0.9), 1)]
    result.write(one, rows[:1])
    assert formats.claim("one") == recorded  # one seed does not replace two
    result.write(one, rows)
    measured = formats.claim("one")
    assert (measured.percent("won"), measured.minutes, measured.seeds) == ("70 %", 1.5, 3)
    assert measured.interval("won") == "0.700 ± 0.497"  # Student: 4.303 * 0.2 / sqrt(3)
    assert measured.interval("lost") == "0.100"  # equal values say nothing of the width
    assert measured.cite("70 %") == "[70 %](bench/results/claims/one.json)"


def test_recorded_figures_have_a_note(tmp_path):
    page = "<!-- generated: part.one -->\n<!-- end -->\n"
    assert NOTE in fill_page("page.md", page, make_tables(r"| 1\* |"))[0]
    assert NOTE not in fill_page("page.md", page, make_tables("| 1 |"))[0]


def test_a_table_of_a_file(tmp_path, monkeypatch):
    monkeypatch.setattr(formats, "RESULTS", tmp_path)
    file = tmp_path / "known_cpu.json"
    row = {"task": "hopper", "learner": "sac", "env_steps": 1000, "updates": 10}
    row |= {"cpu_seconds": 8.0, "compile_share": 0.5}
    runs = [{**row, "greedy": {"mean": value}} for value in (1.0, 2.0, 3.0)]
    file.write_text(json.dumps({"rows": runs}))
    page = "<!-- generated: others.returns -->\n<!-- end -->\n"
    text, names, stale = fill_page("page.md", page, tables(TEMPLATES))
    assert names == stale == ["others.returns"]
    assert "| brax:hopper | sac | 3 | 1,000 | 10 | 2 ± 2.5 |  | 8 | 4 |" in text
    assert fill_page("page.md", text, tables(TEMPLATES)) == (text, names, [])
    file.write_text('{"row": []}')
    with pytest.raises(UserError, match=r"others\.returns cannot be made .* has no attribute 'rows'"):
        fill_page("page.md", page, tables(TEMPLATES))
    file.unlink()
    with pytest.raises(UserError, match=r"others\.returns cannot be made .*known_cpu\.json"):
        fill_page("page.md", page, tables(TEMPLATES))


def test_paragraphs_are_wrapped_but_not_in_code():
    text = formats.wrapped(f"{'word ' * 22}`--flag value` end")
    assert text.splitlines()[1] == "`--flag value` end"


@pytest.mark.parametrize(
    ("page", "sentence"),
    [
        (PAGE.replace("<!-- end -->\n", ""), "page.md: every .* needs one <!-- end --> after it; found: part.one$"),
        (PAGE.replace("<!-- generated: part.one -->", ""), "found: end$"),
        (PAGE.replace("<!-- end -->", "<!-- end -->\n<!-- end -->"), "found: part.one, end, end$"),
        (PAGE.replace("{}", "<!-- generated: part.one -->"), "found: part.one, part.one, end$"),
        (PAGE.replace("part.one", "part.two"), "page.md: no template in bench/tables has part.two: write its macro"),
    ],
)
def test_lines_around_tables_that_are_wrong(page, sentence):
    with pytest.raises(UserError, match=sentence):
        fill_page("page.md", page, make_tables())


def test_a_figure_that_was_edited_by_hand_is_found_and_replaced(tmp_path, monkeypatch, capsys):
    """On any page; nothing else changes."""
    page = tmp_path / "docs" / "below" / "page.md"
    page.parent.mkdir(parents=True)
    page.write_text(PAGE.format("| 2 |"))
    monkeypatch.setattr("bench.tables.__main__.ROOT", tmp_path)
    monkeypatch.setattr("bench.tables.__main__.tables", lambda folder: make_tables())
    assert main(["--check"]) == 1
    assert capsys.readouterr().err == "error: not up to date: part.one; run python -m bench.tables\n"
    assert page.read_text() == PAGE.format("| 2 |")
    assert main([]) == 0 and main(["--check"]) == 0
    assert page.read_text() == PAGE.format("| 1 |")
    (tmp_path / "README.md").write_text(PAGE.format("| 1 |"))
    with pytest.raises(UserError, match=r"part\.one is in 2 places"):
        update(tmp_path, make_tables(), check=False)
    with pytest.raises(UserError, match=r"part\.none is in 0 places: put its two lines into one page"):
        update(tmp_path / "docs", {"part.none": str}, check=False)


def test_a_template_that_is_no_template(tmp_path):
    (tmp_path / "part.jinja").write_text("{% macro one() %}")
    with pytest.raises(UserError, match=r"part\.jinja cannot be made"):
        tables(tmp_path)


def test_parts_that_are_made_from_the_code():
    """A part is filled in again after an edit by hand, on any page and any number of times."""
    page = "Text.\n\n<!-- settings jaxrl.algos.sac:Sac -->\n\n| by hand |\n\n<!-- end -->\n\nMore.\n"
    text, names, stale = fill_page("docs/page.md", page, {})
    assert names == stale == ["settings jaxrl.algos.sac:Sac"]
    assert text == page.replace("| by hand |", reference.settings_table("jaxrl.algos.sac:Sac"))
    assert fill_page("docs/page.md", text, {}) == (text, names, [])


def test_names_of_the_api():
    functions = reference.api_list("jaxrl.api: load, Result").splitlines()
    assert functions == [
        "- `load(run, *, best=True, checkpoint=None, networks=None)`: Return the policy of a run.",
        "- `Result`: The result of `train`.",
    ]
    methods = reference.api_list("envs_jax.base.Box: contains").splitlines()
    assert methods[0].startswith("- `Box`: ") and methods[1].startswith("  - `contains(x)`: ")
    assert reference.api_list("envs_jax.make").startswith("- `make(name, **settings)`: ")


@pytest.mark.parametrize(
    "mark", ["settings jaxrl.algos.sac:None", "names: nobody", "api jaxrl.api: nothing", "api jaxrl.nowhere.at_all"]
)
def test_parts_that_cannot_be_made(mark):
    with pytest.raises(UserError, match=f"<!-- {mark} --> cannot be made"):
        fill_page("page.md", f"<!-- {mark} -->\n<!-- end -->\n", {})


@pytest.mark.parametrize("path", sorted((ROOT / "bench/results").glob("*.json")), ids=lambda path: path.stem)
def test_a_figure_names_its_commit(path):
    """Commands that are gone are there."""
    assert re.fullmatch("[0-9a-f]{8}", json.loads(path.read_text())["commit"])
