"""bench.tables: the pages say what the committed figures say."""

import json
import re

import pytest

from bench.tables import formats, reference
from bench.tables.__main__ import ROOT, fill_page, main, tables, update
from jaxrl.common.errors import UserError

TEMPLATES = ROOT / "bench" / "tables"
PAGE = "# Page\n\n<!-- generated: part.one -->\n\n{}\n\n<!-- end -->\n\nText.\n"


def make_tables(text="| 1 |"):
    return {"part.one": lambda: text}


def test_the_committed_pages_are_up_to_date(capsys):
    assert main(["--check"]) == 0
    assert capsys.readouterr().out == "all tables are up to date\n"


def test_no_measured_figure_is_written_by_hand():
    """Outside the tables of docs/results.md are no decimals, intervals and percentages but 95 %, code and versions."""
    text = re.sub(r"<!-- generated.*?<!-- end -->", "", (ROOT / "docs" / "results.md").read_text(), flags=re.DOTALL)
    text = re.sub(r"`[^`]*`", "", text)
    assert not re.findall(r"±|(?<!\b95) %|(?<![\d.])\d+\.\d+(?![\d.])", text)


def test_a_table_of_small_figures(tmp_path, monkeypatch):
    """A sweep at 50 and 100 % with half intervals of 10 and 0 %, the second first above 95 % after 26,000 steps."""
    monkeypatch.setattr(formats, "RESULTS", tmp_path)
    low = {"env_steps": [9600, 25600], "mean": [0.1, 0.5], "ci95": [0.3, 0.1], "std": [0.2, 0.04]}
    high = {"env_steps": [9600, 25600], "mean": [0.2, 1.0], "ci95": [0.3, 0.0], "std": [0.2, 0.0]}
    file = tmp_path / "sweep_sac_actor_lr.json"
    file.write_text(json.dumps({"combinations": {"actor_lr=0.1": low, "actor_lr=0.2": high}}))
    page = "<!-- generated: reach.sac_sweep -->\n<!-- end -->\n"
    text, names, stale = fill_page("page.md", page, tables(TEMPLATES))
    assert names == stale == ["reach.sac_sweep"]
    assert text.splitlines() == [
        "<!-- generated: reach.sac_sweep -->",
        "",
        "| actor_lr | success | first evaluation with 95 % in the mean |",
        "|---|---|---|",
        "| 0.1 | 50 ± 10 % | never |",
        "| 0.2 | 100 ± 0 % | 26 k |",
        "",
        "<!-- end -->",
    ]
    assert fill_page("page.md", text, tables(TEMPLATES)) == (text, names, [])
    file.write_text('{"combination": {}}')
    with pytest.raises(UserError, match=r"reach\.sac_sweep cannot be made .* has no attribute 'combinations'"):
        fill_page("page.md", page, tables(TEMPLATES))
    file.unlink()
    with pytest.raises(UserError, match=r"reach\.sac_sweep cannot be made .*sweep_sac_actor_lr\.json"):
        fill_page("page.md", page, tables(TEMPLATES))


def test_formats():
    assert formats.interval({"mean": [0.9, 0.1236], "ci95": [0.5, 0.0104], "std": [1, 2]}) == "0.124 ± 0.010"
    share = {"mean": [0.5, 0.85], "ci95": [0.5, 0.05], "low": [0, 0.8], "high": [1, 0.89], "std": [0.5, 0.3]}
    assert formats.interval(share, ".0f", 100, deviation=True) == "85 [80, 89]"
    entries = [{"mean": 0.5, "ci95": 0.1, "std": 0.25}] * 2
    assert formats.interval(entries, ".0f", 100, deviation=True) == "50 ± 10 (25), 50 ± 10 (25)"
    assert formats.form(2.5, ".2f") == "2.50"
    assert formats.percent([0.975, 1.0, 0.0123]) == "97.5, 100, 1.23"
    assert formats.thousands([153_600, 97_600]) == "154, 98 k"
    assert formats.between(iter([3.0, 1.0, 2.0]), ".1f") == "1.0 to 3.0"
    assert formats.mean_range([0.951, 0.969], ".1f", 100, " %") == "96.0 % (95.1 to 96.9)"
    assert formats.mean_range([1.0, 1.0], ".1f", 100, " %") == "100.0 %"
    assert formats.within([{"within": True}] * 3) == "all 3"
    assert formats.within([{"within": True}, {"within": False}]) == "1 of 2"
    curves = [[{"score": 0.9, "seconds": 3.0}, {"score": 0.4, "seconds": 5.0}], [{"score": 0.8, "seconds": 4.0}]]
    assert formats.seconds_to({"curves": curves}, 0.9) == [3.0]
    assert formats.seconds_to({"curves": curves, "score_mode": "min"}, 0.8) == [5.0, 4.0]
    assert formats.first_above({"env_steps": [1000, 2000], "mean": [0.1, 0.2]}, 0.3) == "never"


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


def test_update(tmp_path):
    """A figure that was edited by hand is found and, without `check`, replaced; nothing else changes."""
    page = tmp_path / "docs" / "below" / "page.md"
    page.parent.mkdir(parents=True)
    page.write_text(PAGE.format("| 2 |"))
    assert update(tmp_path, make_tables(), check=True) == ["part.one"]
    assert page.read_text() == PAGE.format("| 2 |")
    assert update(tmp_path, make_tables(), check=False) == ["part.one"]
    assert page.read_text() == PAGE.format("| 1 |")
    assert update(tmp_path, make_tables(), check=True) == []
    (tmp_path / "README.md").write_text(PAGE.format("| 1 |"))
    with pytest.raises(UserError, match=r"part\.one is in 2 places"):
        update(tmp_path, make_tables(), check=False)
    with pytest.raises(UserError, match=r"part\.none is in 0 places: put its two lines into one page"):
        update(tmp_path / "docs", {"part.none": str}, check=False)


def test_a_stale_table_ends_the_check(tmp_path, monkeypatch, capsys):
    (tmp_path / "README.md").write_text(PAGE.format("| 2 |"))
    monkeypatch.setattr("bench.tables.__main__.ROOT", tmp_path)
    monkeypatch.setattr("bench.tables.__main__.tables", lambda folder: make_tables())
    assert main(["--check"]) == 1
    assert capsys.readouterr().err == "error: not up to date: part.one; run python -m bench.tables\n"
    assert main([]) == 0
    assert capsys.readouterr().out == "wrote part.one\n"
    assert main(["--check"]) == 0


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
