"""python -m jaxrl.runs on run directories made by hand: the list, comparisons, the page, and damaged files."""

import hashlib
import json
import re
import shlex
import shutil
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.run_directories import make_checkpoint, make_run, write_rows
from helpers.runs import run as train
from scipy import stats

from jaxrl.cli.flags import parse
from jaxrl.cli.runs import main
from jaxrl.evaluation import learning_curves, run_page, run_summary
from jaxrl.report.tables import print_parts
from jaxrl.runtime.run_directory import lock

SCORES = {1: [0.8, 0.5, 0.2], 2: [0.9, 0.6, 0.4], 3: [1.0, 0.7, 0.3]}  # by seed, at 100, 200 and 300 steps


def rows_of(values: list[float], seconds: float = 60.0, evaluated: bool = True) -> list[dict[str, Any]]:
    """A row of training and one of evaluation at every 100 steps; the clock shows an hour's pause before the last."""
    rows: list[dict[str, Any]] = []
    for k, value in enumerate(values, start=1):
        pause = 3600.0 * (k == len(values))
        row = {"iteration": k, "step": 100 * k, "env_steps": 100 * k, "episodes": 4, "rollout/distance": value + 1.0}
        rows.append(row | {"train/actor_loss": -k, "time/unix": 1e9 + pause + seconds * k, "time/seconds": seconds * k})
        if evaluated:
            rows.append({"iteration": k, "step": 100 * k, "eval/distance": value})
    return rows


def make_runs(runs: Path) -> Path:
    """Three seeds of equal settings, one of another discount, three seeds in one program, and a run without rows."""
    for seed, values in SCORES.items():
        run = make_run(runs / f"ddpg_point/000{seed}", rows_of(values, 60.0 * seed), 1e9 + seed, seed=seed)
        make_checkpoint(run, 2, best=True, env_steps=200, finished=False)
        if seed != 2:
            make_checkpoint(run, 3, env_steps=300, finished=True)
    make_run(runs / "ddpg_point/0004", rows_of([2.0, 1.5], evaluated=False), 1e9 + 4, seed=1, gamma=0.5)
    several = make_run(runs / "ddpg_point/0005", [], 1e9 + 5, seed=1, num_seeds=3, gamma=0.25)
    for seed, values in SCORES.items():
        write_rows(several / f"seed_{seed}", rows_of(values))
        (several / f"seed_{seed}" / "config.yaml").write_text("")
    make_run(runs / "ddpg_point/0006", [], 1e9 + 6, seed=9)
    return runs


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_runs(tmp_path / "runs")


def list_runs(*words: Any, capsys: Any) -> Any:
    assert main(list(map(str, words))) == 0
    return json.loads(capsys.readouterr().out)


def test_what_is_told_of_each_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = list_runs(folder, "--json", capsys=capsys)["runs"]
    assert [run["name"] for run in runs] == [f"ddpg_point/000{k}" for k in (6, 5, 4, 3, 2, 1)]
    assert list_runs(folder / "ddpg_point", "--json", capsys=capsys)["runs"] == runs  # no seed of 0005 is a run
    by_name = {run["name"][-1]: run for run in runs}
    label = {"metric": "distance", "label": "distance", "mode": "min"}
    assert by_name["3"]["score"] == label | {"of": "selection episodes", "mean": 0.3, "ci95": None}
    assert by_name["4"]["score"] == label | {"of": "training episodes", "mean": 2.5, "ci95": None}  # 1.5 + 1
    values = [scores[-1] for scores in SCORES.values()]
    half = stats.t.ppf(0.975, 2) * np.std(values, ddof=1) / 3**0.5
    assert by_name["5"]["score"]["mean"] == pytest.approx(0.3) and by_name["5"]["seeds"] == [1, 2, 3]
    assert by_name["5"]["score"]["ci95"] == pytest.approx(half, rel=1e-6)
    assert by_name["6"]["score"] is None and by_name["6"]["env_steps"] == 0
    assert {name: run["env_steps"] for name, run in by_name.items() if name < "6"} == dict(
        zip("12345", (300, 300, 300, 200, 300), strict=True)
    )
    assert [by_name[name]["minutes"] for name in "1235"] == [3.0, 6.0, 9.0, 3.0]  # the pause does not count
    assert [by_name[name]["state"] for name in "123"] == ["finished", "crashed", "finished"]
    make_checkpoint(folder / "ddpg_point/0002", 3, env_steps=300, finished=False)
    assert list_runs(folder / "ddpg_point/0002", "--json", capsys=capsys)["runs"][0]["state"] == "stopped"
    assert [by_name[name]["best_checkpoint"] for name in "1234"] == [2, 2, 2, None]
    assert by_name["1"]["algorithm"] == "ddpg" and by_name["1"]["environment"] == "helpers.tiny:PointMass"


def test_a_run_is_running_while_its_lock_is_held(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = folder / "ddpg_point/0001"
    with lock(run):
        assert list_runs(run, "--json", capsys=capsys)["runs"][0]["state"] == "running"
    assert list_runs(run, "--json", capsys=capsys)["runs"][0]["state"] == "finished"
    with lock(run):  # nothing of the looking is left
        pass


def printed_lines(parts: list[Any], capsys: pytest.CaptureFixture[str]) -> list[str]:
    capsys.readouterr()
    print_parts(parts)
    return capsys.readouterr().out.splitlines()


def test_metrics_of_another_run_are_noticed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = folder / "ddpg_point/0001"
    first = (run / "metrics.jsonl").read_bytes().splitlines(keepends=True)[0]
    make_checkpoint(run, 4, env_steps=300, finished=True, metrics=[{"first": hashlib.sha256(first).hexdigest()}])
    assert len(list_runs(folder, "--json", capsys=capsys)["runs"]) == 6
    shutil.copy(folder / "ddpg_point/0002/metrics.jsonl", run / "metrics.jsonl")
    main([str(folder), "--json"])
    printed = capsys.readouterr()
    assert len(json.loads(printed.out)["runs"]) == 5
    assert "0001/metrics.jsonl is not of this run" in printed.err


def test_the_list(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    head, *rows = printed_lines(run_summary.list_runs(run_summary.find([str(folder)], pytest.fail)), capsys)
    assert [row.split()[0] for row in rows[:6]] == [f"ddpg_point/000{k}" for k in (6, 5, 4, 3, 2, 1)]
    assert head.split() == ["run", "seeds", "env", "steps", "minutes", "score", "state", "best", "checkpoint"]
    assert rows[1].split()[1:] == ["3", "300", "3", "0.3", "±0.25", "crashed"]
    assert rows[3].split()[1:] == ["1", "300", "9", "0.3", "finished", "2"]
    assert "score of helpers.tiny:PointMass: distance, on selection episodes (lower is better)" in rows


def test_comparison_shows_the_settings_that_differ(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = run_summary.find([str(folder / f"ddpg_point/000{k}") for k in (1, 2, 4)], pytest.fail)
    lines = printed_lines(run_summary.compare_runs(runs), capsys)
    assert lines[0].split() == ["run", "ddpg_point/0001", "ddpg_point/0002", "ddpg_point/0004"]
    rows = {line.split()[0]: line.split()[1:] for line in lines if line and ":" not in line}
    default = runs[0].config.algo_settings["gamma"]
    assert rows["seed"] == ["1", "2", "1"] and rows["gamma"] == [str(default), str(default), "0.5"]
    assert rows["score"] == ["0.2", "0.4", "2.5"] and "num_envs" not in rows
    assert "all settings are equal" in printed_lines(run_summary.compare_runs(runs[:1] * 2), capsys)


# The page


class Page(HTMLParser):
    """The texts of a page by tag, its open tags, and its pictures by their titles."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.texts: dict[str, list[str]] = {}
        self.open: list[str] = []
        figures = re.findall(r'<figure aria-label="(.*?)">(.*?)</figure>', text, re.DOTALL)
        self.pictures = {unescape(label): unescape(picture) for label, picture in figures}
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        assert tag not in ("img", "script", "link") and not {"src", "href", "data", "action"} & set(values)
        if tag != "meta":
            self.open.append(tag)
            self.texts.setdefault(tag, []).append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open:
            self.texts[self.open[-1]][-1] += data


def page_of(*words: Any, out: Path) -> Page:
    assert main([*map(str, words), "--out", str(out)]) == 0
    page = Page(out.read_text())
    assert not page.open
    return page


def series_of(*paths: Path) -> list[run_page.Series]:
    return run_page.group_series(run_summary.newest_first(run_summary.find(list(map(str, paths)), pytest.fail)))


@pytest.fixture(scope="module")
def page_text(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The page of runs in two environments."""
    runs = make_runs(tmp_path_factory.mktemp("page") / "runs")
    make_run(runs / "ddpg_reach/0001", rows_of(SCORES[1]), 1e9, seed=1, env="reach")
    page_of(runs, out=runs / "runs.html")
    return (runs / "runs.html").read_text()


def test_the_page_shows_all_metrics_of_each_environment_the_score_first(page_text: str) -> None:
    page = Page(page_text)
    metrics = ["distance (selection episodes)", "distance (training episodes)", "actor loss (learning)"]
    environments = ("helpers.tiny:PointMass", "reach")
    assert list(page.pictures) == [f"{metric}, {env}" for metric in metrics for env in environments]
    names = ("ddpg_point/0003 and 2 more, mean of 3 seeds", "ddpg_reach/0001")
    for title, picture in page.pictures.items():
        assert "environment steps" in picture and "minutes of training" in picture
        assert [name in picture for name in names] == [title.endswith(env) for env in environments]
    assert "ddpg_point/0006" in page.texts["td"] and "gamma" in page.texts["td"]


def test_the_page_is_readable_on_a_phone_and_in_the_dark(page_text: str) -> None:
    """Curves come before the settings, which are folded."""
    folded = page_text.index("<details>")
    assert page_text.rindex("</figure>") < folded < page_text.index("<td>gamma</td>")
    assert 'name="viewport"' in page_text and "prefers-color-scheme: dark" in page_text
    names = re.findall(r' id="([^"]+)"', page_text)
    assert names and len(names) == len(set(names)), "names of different plots meet"
    assert set(re.findall(r'(?:xlink:href="|url\()#([^")]+)', page_text)) <= set(names)
    for plot in re.findall(r"<svg.*?</svg>", page_text, re.DOTALL):
        assert "currentColor" in plot
        assert not re.search(r"(#fff\b|#ffffff|white|#000\b|#000000|black)", plot), "a fixed light or dark colour"


def test_runs_of_one_name_in_two_folders_are_told_apart(tmp_path: Path) -> None:
    for study, gamma in (("one", 0.5), ("two", 0.25)):
        make_run(tmp_path / study / "ddpg_point/0001", rows_of([2.0, 1.5]), 1e9, seed=1, gamma=gamma)
    make_run(tmp_path / "two/ddpg_point/0002", rows_of([2.0, 1.5]), 1e9, seed=1, gamma=0.125)
    runs = run_summary.find([str(tmp_path / "one"), str(tmp_path / "two")], print)
    names = ["one/ddpg_point/0001", "two/ddpg_point/0001", "ddpg_point/0002"]
    assert sorted(run.name for run in runs) == sorted(names)
    assert sorted(one.title for one in run_page.group_series(runs)) == sorted(names)


def test_curves_are_means_with_intervals(folder: Path) -> None:
    program, other, runs = series_of(folder)  # 0006 has no rows
    assert [one.title for one in (program, other, runs)] == [
        "ddpg_point/0005, mean of 3 seeds", "ddpg_point/0004", "ddpg_point/0003 and 2 more, mean of 3 seeds"
    ]  # fmt: skip
    values = np.array(list(SCORES.values()))
    half = stats.t.ppf(0.975, 2) * values.std(axis=0, ddof=1) / 3**0.5
    for one in (program, runs):
        curve = run_page.average_seeds(one, "eval/distance")
        assert curve is not None and curve["x"] == [100, 200, 300]
        np.testing.assert_allclose(curve["mean"], values.mean(0), rtol=1e-5)
        np.testing.assert_allclose(curve["ci95"], half, rtol=1e-5)
    assert run_page.average_seeds(other, "eval/distance") is None
    assert run_page.average_seeds(other, "rollout/distance") == {"x": [100.0, 200.0], "mean": [3.0, 2.5]}


def test_minutes_of_runs_with_other_clocks_are_interpolated(folder: Path) -> None:
    """Seeds take 1, 2 and 3 minutes per 100 steps: together they are known from 3 minutes on, the first until 3."""
    (one,) = series_of(folder / "ddpg_point/0001", folder / "ddpg_point/0002")
    curve = run_page.average_seeds(one, "eval/distance", over_minutes=True)
    assert curve is not None and curve["x"] == [2, 3]
    # at 2 minutes the first has made 200 steps and the second 100; at 3 minutes 300 and 150
    np.testing.assert_allclose(curve["mean"], [(0.5 + 0.9) / 2, (0.2 + 0.75) / 2], rtol=1e-6)


def test_a_repeated_seed_does_not_make_the_interval_smaller(folder: Path) -> None:
    make_run(folder / "ddpg_point/0007", rows_of(SCORES[1]), seed=1)
    series = series_of(*(folder / f"ddpg_point/000{k}" for k in (1, 2, 7)))
    assert len(series) == 2 and sum("mean of 2 seeds" in one.title for one in series) == 1


def test_a_sweep_has_a_curve_for_each_combination(tmp_path: Path) -> None:
    run = make_run(tmp_path / "runs/ddpg_point/0001", [], sweep="actor_lr=0.1,0.01", num_seeds=2, seed=1)
    for rate, seeds in (("0.1", (1, 2)), ("0.01", (2, 3))):
        for place, seed in enumerate(seeds, start=1):
            write_rows(run / f"actor_lr={rate}/seed_{place}", rows_of(SCORES[seed]))
    series = series_of(run)
    assert [one.title for one in series] == [
        f"ddpg_point/0001 actor_lr={rate}, mean of 2 seeds" for rate in ("0.1", "0.01")
    ]
    curves = [run_page.average_seeds(one, "eval/distance") for one in series]
    assert [curve and curve["mean"][-1] for curve in curves] == pytest.approx([0.3, 0.35])
    assert run_summary.read(run).score["mean"] == pytest.approx(0.3)  # of the better one


def test_the_trial_of_a_sweep_that_has_the_score_is_shown(tmp_path: Path, capsys: Any) -> None:
    """The default, 0.001 or another value, is beside no score: it was not tried."""
    other = make_run(tmp_path / "runs/ddpg_point/0001", rows_of(SCORES[1]), 1e9, seed=1, actor_lr=0.1)
    sweep = make_run(tmp_path / "runs/ddpg_point/0002", [], 1e9 + 1, sweep="actor_lr=0.1,0.01 gamma=0.5,0.25", seed=1)
    for rate in ("0.1", "0.01"):
        for gamma, seed in (("0.5", 3), ("0.25", 2)):  # the best of all ends at 0.3 - 0.1
            folder = sweep / f"actor_lr={rate},gamma={gamma}"
            write_rows(folder, rows_of([value - 0.1 * (rate == "0.01") for value in SCORES[seed]]))
    empty = make_run(tmp_path / "runs/ddpg_point/0003", [], 1e9 + 2, sweep="actor_lr=0.1,0.01", seed=1)
    listing = list_runs(other, sweep, empty, "--compare", "--json", capsys=capsys)
    assert "trial" not in listing["runs"][0]["score"] and listing["runs"][2]["score"] is None
    assert listing["runs"][1]["score"]["trial"] == "actor_lr=0.01,gamma=0.5"
    assert listing["differing_settings"]["actor_lr"] == [0.1, 0.01, [0.1, 0.01]]
    assert listing["differing_settings"]["gamma"][1] == 0.5
    runs = run_summary.find(list(map(str, (other, sweep, empty))), pytest.fail)
    lines = printed_lines(run_summary.compare_runs(runs), capsys)
    rows = {line.split()[0]: line.split()[1:] for line in lines if line and ":" not in line}
    assert rows["actor_lr"] == ["0.1", "0.01", "0.1,0.01"] and rows["gamma"][1] == "0.5"
    assert rows["score"] == ["0.2", "0.2", "(actor_lr=0.01,gamma=0.5)", "none"]
    cells = page_of(other, sweep, empty, out=tmp_path / "runs.html").texts["td"]
    assert "0.2 (actor_lr=0.01,gamma=0.5)" in cells
    place = cells.index("actor_lr")
    assert cells[place + 1 : place + 4] == ["0.1,0.01", "0.01", "0.1"]  # newest first


NAMES = (
    "price_$5_and_$6", "$\\frac{1$", "_hidden", "100%d{0}%s", "back\\slash", "<b>&amp;<script>", "[red]bold",
    ' id="g"', "@TITLE@", "'quoted\"", "naïve 🐍",
)  # fmt: skip


@pytest.mark.filterwarnings("ignore:Glyph")  # matplotlib's font has no snake; the page's reader may have one
def test_names_are_no_formulas_and_no_markup(tmp_path: Path, capsys: Any) -> None:
    """The list, the comparison, the page and the picture show the name of a run as it is."""
    rows = [row for row in rows_of(SCORES[1]) if "eval/distance" not in row]
    runs = [
        make_run(tmp_path / f"runs/{name}/0001", rows, 1e9 + place, seed=1, gamma=0.5 + place / 100)
        for place, name in enumerate(NAMES)
    ]
    names = [f"{name}/0001" for name in NAMES]
    assert [run["name"] for run in list_runs(*runs, "--compare", "--json", capsys=capsys)["runs"]] == names
    found = run_summary.find(list(map(str, runs)), pytest.fail)
    comparison = printed_lines(run_summary.compare_runs(found), capsys)
    table = "\n".join(comparison + printed_lines(run_summary.list_runs(found), capsys))
    page = page_of(*runs, out=tmp_path / "runs.html")
    for name in names:
        assert table.count(name) >= 2 and name in page.texts["td"]
        for picture in page.pictures.values():
            assert picture.count(f">{name}</text>") == 2, name  # over steps, over minutes
    page = page_of(runs[5], out=tmp_path / "one.html")
    assert page.texts["h1"] == [names[5]]
    assert all(f">{names[5]}</text>" in picture for picture in page.pictures.values())


def test_a_picture_of_trials_has_any_name(tmp_path: Path) -> None:
    """A formula that is none would be an error."""
    name = "$\\frac{1$"
    curve = {"env_steps": [1, 2], "mean": [0.5, None], "ci95": [None, 0.1]}
    trial = {"combination": "", "seed": 0, "env_steps": 2, "last": None, "best": 0.5}
    curves = {"metric": name, "of": "training episodes", "score_mode": "min", "seeds": 2, "trials": [trial]}
    learning_curves.write(curves | {"combinations": {name: curve}}, tmp_path)
    assert (tmp_path / learning_curves.PLOT).stat().st_size > 0


# Refusals, in one sentence


def check_refusal(capsys: Any, *words: Any) -> str:
    assert main(list(map(str, words))) in (1, 2)
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1 and captured.err.startswith("error: ")
    return str(captured.err)


def test_nothing_to_show(folder: Path, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "empty").mkdir()
    assert "holds no run: train one" in check_refusal(capsys, tmp_path / "empty")
    assert "does not exist" in check_refusal(capsys, tmp_path / "nowhere")
    assert "no metrics yet" in check_refusal(capsys, folder / "ddpg_point/0006", "--out", tmp_path / "runs.html")
    assert not (tmp_path / "runs.html").exists()
    assert "at least two runs" in check_refusal(capsys, folder / "ddpg_point/0001", "--compare")
    assert "ends in .html" in check_refusal(capsys, folder, "--out", tmp_path / "runs.png")
    assert "unknown flag '--jsn'" in check_refusal(capsys, folder, "--jsn")


POINT = "algo: ddpg\nenv: helpers.tiny:PointMass\n"
DAMAGED_METRICS = (
    '{"iteration": 1, "env_steps": "x"}\n{"iteration": 2}\n',
    '{"iteration": 2}\x00\n{"iteration": 3}\n',
)
DAMAGED = [
    *(("metrics.jsonl", text, "line 1 of .* is damaged") for text in DAMAGED_METRICS),
    ("config.yaml", f"{POINT}num_envs: many\n", "num_envs must be a "),
    ("config.yaml", f"{POINT}goals: {{a: 1}}\n", "goals must be a "),
    ("versions.json", "{", r"versions\.json is damaged: remove it"),
    ("versions.json", "[" * 100_000, r"versions\.json is damaged: remove it"),
]


@pytest.mark.parametrize(("file", "text", "sentence"), DAMAGED)
def test_a_damaged_file_is_told_and_its_run_left_out(
    folder: Path, file: str, text: str, sentence: str, capsys: Any
) -> None:
    """Without the score's direction, in versions.json, the best of several runs could be the worst."""
    run = folder / "ddpg_point/0002"
    (run / file).write_text(text)
    assert re.search(sentence, check_refusal(capsys, run))
    assert main([str(folder), "--compare", "--json"]) == 0
    captured = capsys.readouterr()
    assert len(json.loads(captured.out)["runs"]) == 5
    assert captured.err.count("\n") == 1 and re.match(f"warning: .*{sentence}", captured.err)


@pytest.mark.parametrize("scoring", [[], {"labels": "many"}])
def test_a_damaged_scoring(folder: Path, scoring: Any, capsys: Any) -> None:
    run = make_run(folder / "ddpg_point/0002", rows_of(SCORES[2]), scoring=scoring)
    assert re.search("the entry 'scoring' of .* is damaged: remove it", check_refusal(capsys, run))


def test_a_run_without_a_scoring_shows_its_return(folder: Path, capsys: Any) -> None:
    run = folder / "ddpg_point/0002"
    (run / "versions.json").unlink()
    write_rows(run, [{"iteration": 1, "env_steps": 8, "episodes": 1, "rollout/return": 2.5}])
    score = list_runs(run, "--json", capsys=capsys)["runs"][0]["score"]
    assert (score["metric"], score["mode"], score["mean"]) == ("return", "max", 2.5)


@pytest.mark.parametrize("meta", ["", '{"env_steps": NaN}'])
def test_a_damaged_checkpoint_is_that_of_a_stopped_run(folder: Path, meta: str, capsys: Any) -> None:
    run = folder / "ddpg_point/0001"
    (run / "checkpoints/0000000003/meta.json").write_text(meta)
    assert list_runs(run, "--json", capsys=capsys)["runs"][0]["state"] == "stopped"


# A real run


def test_a_real_run_in_its_folder(tmp_path: Path, capsys: Any) -> None:
    flags = "--algo helpers.tiny:TinyQ --env helpers.tiny:Corridor --num_envs 8 --total_env_steps 640 --eval_every 320"
    run = train(f"{flags} --eval_episodes 8", tmp_path / "runs")
    capsys.readouterr()
    (summary,) = list_runs(tmp_path / "runs", "--json", capsys=capsys)["runs"]
    assert summary["state"] == "finished" and summary["env_steps"] == 640 and summary["seeds"] == [0]
    assert 0 < summary["minutes"] < 5 and summary["score"]["of"] == "selection episodes"
    assert "env steps per second (speed)" in page_of(run, out=tmp_path / "runs.html").pictures


def test_one_seed_of_several_is_a_run(folder: Path, capsys: Any) -> None:
    run = make_run(folder / "ddpg_point/0005/seed_2", rows_of(SCORES[2]), seed=2, gamma=0.25)
    (one,) = list_runs(run, "--json", capsys=capsys)["runs"]
    assert one["name"] == "0005/seed_2" and one["seeds"] == [2] and one["score"]["mean"] == 0.4


def test_runs_are_listed_where_the_package_of_their_environment_is_absent(tmp_path: Path, capsys: Any) -> None:
    scoring = {"score": "reached", "score_mode": "min", "labels": {"reached": "arrivals, shares"}}
    rows = [{"iteration": 1, "env_steps": 100, "episodes": 4, "rollout/reached": 0.5}]
    for place, toll in enumerate((0.25, 0.5), start=1):
        make_run(tmp_path / f"runs/ddpg_away/{place}", rows, 1e9 + place, scoring, env="going:Away", toll=toll)
    listing = list_runs(tmp_path / "runs", "--json", "--compare", capsys=capsys)
    assert {run["environment"] for run in listing["runs"]} == {"going:Away"}
    assert [run["score"]["label"] for run in listing["runs"]] == ["arrivals, shares"] * 2
    assert {run["score"]["mode"] for run in listing["runs"]} == {"min"}
    assert listing["differing_settings"] == {"toll": [0.5, 0.25]}


# The page of the documentation

WATCHING = Path(__file__).parents[1] / "docs" / "watching.md"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", WATCHING.read_text(), re.DOTALL | re.MULTILINE)


def test_the_commands_of_the_page_about_watching(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """Its three commands of training are parsed; runs made by hand replace theirs, which take minutes to compile."""
    monkeypatch.chdir(tmp_path)
    training, watching = (block.splitlines() for block in blocks("bash"))
    for index, line in enumerate(training, start=1):
        config = parse(shlex.split(line)[3:]).config
        scoring = {"score": "success", "labels": {"success": "success"}}
        run = make_run(tmp_path / f"runs/sac_reach/{index:04d}", [], 1e9 + index, scoring, **config.plain())
        scores = {"eval/distance": {"eval/success": 0.25}, "rollout/distance": {"rollout/success": 0.5}}
        rows = [row | scores[next(name for name in scores if name in row)] for row in rows_of([1.0, 2.0])]
        for k in range(config.run.num_seeds) if config.run.num_seeds > 1 else [None]:
            write_rows(run if k is None else run / f"seed_{config.run.seed + k}", rows)
    for line in watching:
        assert line.startswith("python -m jaxrl.runs") and main(shlex.split(line)[3:]) == 0
        out = capsys.readouterr().out
        assert ("sac_reach/0002" in out) and ("gamma" in out) == ("--compare" in line)
    assert "sac_reach/0003" in " ".join(Page(Path("runs.html").read_text()).texts["td"])
    (code,) = blocks("python")
    exec(compile(code, str(WATCHING), "exec"), {})
    assert capsys.readouterr().out.splitlines()[0] == "sac_reach/0003 crashed 200 0.25"
