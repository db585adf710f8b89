"""bench.studies.ablation: which runs it makes, what it keeps of them, and the table."""

import json

import pytest

from bench.studies import ablation
from jaxrl.common.errors import UserError

pytestmark = pytest.mark.long  # of benchmarks, not of the product

PLAN = """
preset: ddpg
train: --max_seconds 1
evaluate: --episodes 2
show:
  wins: [learned, win]
variants:
  recommended: ""
  two critics: --num_critics 2
"""


@pytest.fixture
def plan(tmp_path):
    path = tmp_path / "plan.yaml"
    path.write_text(PLAN)
    return path


@pytest.fixture
def made(monkeypatch):
    """The (flags, seed) of every trial, each of which wins seed / 10 of its games."""
    calls = []

    def trial(asked, flags, seed, runs):
        calls.append((flags, seed))
        return {"env_steps": 100 * seed, "updates": seed, "scores": {"wins": seed / 10}}

    monkeypatch.setattr(ablation, "trial", trial)
    return calls


def test_every_variant_with_every_seed(plan, made, tmp_path, capsys):
    out = tmp_path / "result.json"
    assert ablation.main([str(plan), "--seeds", "1,2,6", "--out", str(out), "--note", "two at a time"]) == 0
    assert sorted(made) == sorted((flags, seed) for flags in ("", "--num_critics 2") for seed in (1, 2, 6))
    result = json.loads(out.read_text())
    assert result["note"] == "two at a time"
    assert result["variants"]["two critics"]["seeds"]["6"]["scores"] == {"wins": 0.6}
    lines = out.with_suffix(".md").read_text().splitlines()
    assert lines[0] == "| variant | wins | environment steps |"
    assert lines[2] == "| recommended | 0.3 (0.1 to 0.6) | 300 |"
    assert capsys.readouterr().out.splitlines() == lines


def test_what_is_there_is_not_made_again(plan, made, tmp_path, capsys):
    out = tmp_path / "result.json"
    call = [str(plan), "--out", str(out)]
    assert ablation.main([*call, "--seeds", "1"]) == 0
    assert ablation.main([*call, "--seeds", "1,2"]) == 0
    assert sorted(made) == [("", 1), ("", 2), ("--num_critics 2", 1), ("--num_critics 2", 2)]
    made.clear()
    plan.write_text(PLAN.replace("--num_critics 2", "--num_critics 3"))
    assert ablation.main([*call, "--seeds", "1,2"]) == 0
    assert made == [("--num_critics 3", 1), ("--num_critics 3", 2)]
    made.clear()
    before = out.read_text()
    plan.write_text(PLAN.replace("--max_seconds 1", "--max_seconds 2"))
    assert ablation.main([*call, "--seeds", "1"]) == 2
    assert "holds results of something else" in capsys.readouterr().err.splitlines()[-1]
    assert not made and out.read_text() == before


def test_one_failure_keeps_what_was_made(plan, tmp_path, monkeypatch, capsys):
    def trial(asked, flags, seed, runs):
        if flags:
            raise UserError("jaxrl.train failed: no memory")
        return {"env_steps": 1, "updates": 1, "scores": {"wins": 1.0}}

    monkeypatch.setattr(ablation, "trial", trial)
    out = tmp_path / "result.json"
    assert ablation.main([str(plan), "--jobs", "1", "--seeds", "1", "--out", str(out)]) == 1
    assert capsys.readouterr().err.splitlines()[-1] == "error: jaxrl.train failed: no memory"
    assert list(json.loads(out.read_text())["variants"]["recommended"]["seeds"]) == ["1"]


def test_figures_of_contests_and_of_policies():
    matches = [{"first": "sampled", "second": "level2", "win": {"mean": 0.9}}]
    assert ablation._find({"matches": matches}, "sampled against level2", "win") == {"mean": 0.9}
    policies = {"learned": {"success": {"mean": [0.0, 0.5], "ci95": [0.0, 0.4]}}}
    assert ablation._find({"policies": policies}, "learned", "success") == {"mean": 0.5, "ci95": 0.4}
    with pytest.raises(UserError, match=r"no success of 'sampled'.*only learned"):
        ablation._find({"policies": policies}, "sampled", "success")


def test_a_run_that_fails_is_named(tmp_path):
    with pytest.raises(UserError, match=r"jaxrl\.train --config ddpg --critcs 2 .*did you mean '--num_critics'"):
        ablation.trial({"preset": "ddpg", "train": "--critcs 2"}, "", 1, tmp_path)


@pytest.mark.parametrize(
    ("text", "code", "words"),
    [
        (None, 2, "cannot read the plan"),
        ("{", 2, "line 1, column 2"),
        ("seed: 2024-13-45", 2, "cannot read the plan"),
        ("seed: " + "[" * 3000, 2, "nested too deeply"),
        ("preset: ddpg", 2, "must have the entries"),
        (PLAN.replace("variants:", "variants: 3\nmore:"), 2, "must have the entries"),
        (PLAN.replace("--max_seconds 1", "[1]"), 2, "must be text"),
        (PLAN.replace("--num_critics 2", "2"), 2, "must be text"),
        (PLAN.replace("--num_critics 2", "--name 'a"), 2, "close the quote"),
        (PLAN.replace("[learned, win]", "win"), 2, "'show' must map"),
        (PLAN, 2, "--seeds"),
    ],
)
def test_bad_input(text, code, words, made, tmp_path, capsys):
    path = tmp_path / "plan.yaml"
    if text is not None:
        path.write_text(text)
    seeds = "x" if text == PLAN else "1"
    assert ablation.main([str(path), "--seeds", seeds, "--out", str(tmp_path / "r.json")]) == code
    error = capsys.readouterr().err.splitlines()
    assert error[-1].startswith("error: ") and words in error[-1]
    assert not made
