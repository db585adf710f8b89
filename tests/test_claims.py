"""`python -m bench.claims`: every claim's commands are real ones, and what is run, kept, refused and judged."""

import importlib
import importlib.metadata
import json
import re
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

import envs_jax
from bench import env_throughput
from bench.claims import __main__ as command
from bench.claims import claim as claims
from bench.claims import needs, result, run
from bench.parity.comparison import DIFFERS
from jaxrl.cli import evaluate as evaluate_command
from jaxrl.cli import flags as train_flags
from jaxrl.cli import policies
from jaxrl.common.errors import UsageError, UserError
from jaxrl.evaluation import conditions
from jaxrl.runtime.saved_run import read_config

Capture = pytest.CaptureFixture[str]
CLAIMS = claims.read_claims()
JAX = importlib.metadata.version("jax")
PLACES = {"seed": "1", **dict.fromkeys(needs.FILES, "README.md")}


class Parsed(Exception):
    """A command line has been parsed."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[claims.Claim], str]:
    """Function that makes the run directory of a claim's last stage, with nothing but its configuration."""
    made: dict[tuple[str, ...], str] = {}

    def make(claim: claims.Claim) -> str:
        if claim.train not in made:
            folder = tmp_path_factory.mktemp("run")
            for flags in claim.train:
                words = run.fill(flags, PLACES | {"previous": "pretrained:coverage"})
                config = train_flags.parse([*words, "--seed", "1"]).config
                config.make_env()
                (folder / "config.yaml").write_text(yaml.safe_dump(config.plain()))
            made[claim.train] = str(folder)
        return made[claim.train]

    return make


METRICS = {metric for name in ("coverage", "reach") for metric in envs_jax.make(name).spec.metrics}


def check_figures(claim: claims.Claim, conditions: set[str], policies: set[str]) -> None:
    """Check that figures are of the conditions, policies and metrics that the command writes."""
    for figure in claim.figures:
        head, *steps = figure.path.split("/")
        if head == "conditions":
            assert steps.pop(0) in conditions, figure
            head = steps.pop(0)
        if head == "policies":
            assert steps[0] in policies and steps[1] in METRICS, figure
        elif head == "matches":
            players = {*policies, *envs_jax.make("snakes_3v3").baselines}
            assert set(re.findall("=([^,]+)", steps[0])) <= players and steps[1] in {"win", "score"}, figure
        else:
            assert head + "/" == run.REACHED, figure


@pytest.mark.parametrize("name", CLAIMS)
def test_commands_are_what_the_programs_take(
    name: str, runs: Callable[[claims.Claim], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    claim = CLAIMS[name]
    if claim.curve:
        assert claim.curve in read_config(Path(runs(claim))).make_env().spec.metrics
    module, *words = run.fill(claim.command, PLACES | ({"run": runs(claim)} if claim.train else {}))
    if module == "jaxrl.evaluate":
        parsed, read = policies.parse(words, module, None, evaluate_command._flags, source_required=True)
        known = {"greedy", "sampled"}
        env_settings: dict[str, Any] = {}
        if parsed.run is None:
            policy_set = read()
            known |= set(policy_set.policies)
            env_settings = dict(policy_set.settings)
        assert set(parsed.policy.split(",")) <= known
        listed = conditions.read_conditions(Path(parsed.conditions)) if parsed.conditions else []
        for condition in listed:
            envs_jax.make("coverage", **env_settings | condition.settings)
        check_figures(claim, {condition.name for condition in listed}, {"learned", *parsed.policy.split(",")})
        return

    def parse_args(parser: train_flags.Parser, *arguments: Any) -> None:
        super(train_flags.Parser, parser).parse_args(*arguments)
        raise Parsed

    monkeypatch.setattr(train_flags.Parser, "parse_args", parse_args)
    with pytest.raises(Parsed):
        importlib.import_module(module).main(words)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.needs(package) for package in claim.needs])
        for name, claim in CLAIMS.items()
        if claim.command.startswith("bench.env_throughput ")
    ],
)
def test_speeds_are_compared_with_a_baseline(name: str) -> None:
    request = env_throughput.parse(run.fill(CLAIMS[name].command, PLACES)[1:])[1]
    assert env_throughput.find_baseline(request, []) is not None


def test_results_are_of_the_commands_and_judged_by_what_is_expected() -> None:
    paths = list(result.RESULTS.glob("*.json"))
    assert paths
    for path in paths:
        found = result.read(CLAIMS[path.stem])
        assert found is not None and found["commands"] == CLAIMS[path.stem].commands, path
        assert found["verdict"] == result.judge(CLAIMS[path.stem], found["rows"]), f"{path}: run it with --judge"


# What is run

TWO_STAGES = """
two_stages:
  about: something
  tier: nightly
  cost: 1
  seeds: [1, 2]
  train: [--config coma_quick, "--config coma --init_from {previous}"]
  curve: entropy
  evaluate: jaxrl.evaluate {run} --episodes 200
  expect:
    entropy: {of: policies/learned/entropy, expected: [0.1, 0.3], within: 0.02}
    f1: {of: policies/learned/f1, expected: 0.8}
shared:
  about: the same runs, judged by another command
  tier: nightly
  cost: 1
  seeds: [1]
  train: two_stages
  evaluate: bench.parity.public_agent {run} --agent {agent}
  needs: [agent]
  expect:
    won: {of: "players/{run}/win", expected: 0.5, within: 0.1}
limited:
  about: a run of some seconds
  tier: release
  cost: 1
  seeds: [1]
  train: ["--algo coma --max_seconds 900"]
  evaluate: jaxrl.evaluate {run}
  expect: {entropy: {of: policies/learned/entropy, expected: 0.2, within: 0.02}}
parity:
  about: an exit code
  tier: release
  cost: 1
  check: bench.parity.metaworld --episodes 50
"""


class Programs:
    """Stands for the programs that claims run; keeps their commands."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.words: list[list[str]] = []
        self.entropy: Mapping[str, float] = {"1": 0.19, "2": 0.2}  # by seed
        self.failing = ""  # the module that fails
        self.exit_code = 0

    def __call__(self, words: list[str], log: Path, codes: tuple[int, ...] = (0,)) -> int:
        self.words.append(words)
        if words[0] == "jaxrl.train":
            run_folder = Path(self.value("--runs")) / "coma_coverage" / self.value("--resume_or_start")
            run_folder.mkdir(parents=True, exist_ok=True)
            (run_folder / "config.yaml").touch()
            steps = (960, 1920, 2880)
            rows = [
                {"iteration": 1, "env_steps": step, "rollout/entropy": 0.7, "eval/entropy": 500 / step}
                for step in steps
            ]
            del rows[1]["eval/entropy"]
            (run_folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        if words[0] == self.failing:
            raise UserError(f"{words[0]} ended with exit code 1: see {log}")
        if "--out" in words and "seed_" in words[1]:
            seed = words[1].split("seed_")[1][0]
            scores = {"entropy": {"mean": [0.9, self.entropy[seed]]}, "f1": {"mean": [0.0, 0.8]}}
            report = {"policies": {"learned": scores}, "players": {words[1]: {"win": {"mean": 0.5}}}}
            Path(self.value("--out")).write_text(json.dumps({**report, "versions": {"jax": JAX}}))
        return self.exit_code

    def value(self, flag: str) -> str:
        return self.words[-1][self.words[-1].index(flag) + 1]

    def run(self, *words: str) -> int:
        return int(command.main([*words, "--runs", str(self.folder / "runs")]))

    def read(self, name: str) -> Any:
        return json.loads((self.folder / "results" / f"{name}.json").read_text())


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Programs:
    (tmp_path / "claims.yaml").write_text(TWO_STAGES)
    made = claims.read_claims(tmp_path / "claims.yaml")
    programs = Programs(tmp_path)
    monkeypatch.setattr(command, "read_claims", lambda: made)
    monkeypatch.setattr(run, "run_command", programs)
    monkeypatch.setattr(run, "git", lambda *words: {"status": "", "ls-tree": "tree", "rev-parse": "c0ffee"}[words[0]])
    monkeypatch.setattr(result, "RESULTS", tmp_path / "results")
    return programs


def test_a_claim_that_holds(programs: Programs, capfd: Capture) -> None:
    assert programs.run("two_stages") == 0
    assert capfd.readouterr().out == "two_stages holds over seeds 1, 2: entropy is 0.195, within 0.2 ± 0.02\n"
    assert [words[0] for words in programs.words] == ["jaxrl.train", "jaxrl.train", "jaxrl.evaluate"] * 2
    first, second, evaluation = programs.words[:3]
    assert first[1:5] == ["--config", "coma_quick", "--seed", "1"]
    first_run = str(Path(first[first.index("--runs") + 1]) / "coma_coverage" / "run")
    assert second[second.index("--init_from") + 1] == first_run
    assert evaluation[1] == str(Path(second[second.index("--runs") + 1]) / "coma_coverage" / "run")
    found = programs.read("two_stages")
    assert found["commands"][0] == "python -m jaxrl.train --config coma_quick --seed {seed}"
    assert found["verdict"]["holds"] and [row["seed"] for row in found["rows"]] == [1, 2]
    row = found["rows"][1]
    assert row["figures"] == {"entropy": 0.2, "f1": 0.8} and row["commit"] == "c0ffee"
    assert row["versions"] == {"jax": JAX} and row["training_seconds"] >= 0
    assert row["curve"] == [[960, 0.52083], [2880, 0.17361]]


def test_a_broken_claim_says_which_figure_is_what_and_should_be_what(programs: Programs, capfd: Capture) -> None:
    programs.entropy = {"1": 0.7, "2": 0.74}
    assert programs.run("two_stages") == 1
    sentence = "two_stages does not hold over seeds 1, 2: entropy is 0.72, which is not 0.2 ± 0.02\n"
    assert capfd.readouterr().out == sentence
    assert programs.read("two_stages")["verdict"]["figures"]["entropy"]["holds"] is False
    assert command.main(["--list"]) == 0
    assert "does not hold at c0ffee, 2 of 2 runs" in capfd.readouterr().out


def test_the_tolerance_of_fewer_seeds_is_wider(programs: Programs, capfd: Capture) -> None:
    """One of two seeds: by the square root of two."""
    programs.entropy = {"1": 0.2281, "2": 0.2281}
    assert programs.run("two_stages", "--seeds", "1") == 0
    assert "over seed 1: entropy is 0.2281, within 0.2 ± 0.02828" in capfd.readouterr().out
    assert programs.run("two_stages") == 1


def test_parity_is_an_exit_code(programs: Programs, capfd: Capture) -> None:
    assert programs.run("parity") == 0
    programs.exit_code = DIFFERS
    assert programs.run("parity") == 1  # which is not kept, but checked anew
    assert "parity does not hold: bench.parity.metaworld ended with exit code 3" in capfd.readouterr().out


def test_a_comparison_that_breaks_is_no_difference(programs: Programs, capfd: Capture) -> None:
    programs.failing = "bench.parity.metaworld"
    assert programs.run("parity") == 1
    captured = capfd.readouterr()
    assert "parity failed: bench.parity.metaworld ended with exit code 1: see " in captured.err and not captured.out


def test_a_claim_that_fails_leaves_the_others(programs: Programs, capfd: Capture) -> None:
    programs.failing = "jaxrl.evaluate"
    assert programs.run("two_stages", "parity") == 1
    captured = capfd.readouterr()
    assert "two_stages failed: jaxrl.evaluate ended with exit code 1: see " in captured.err
    assert captured.out == "parity holds: bench.parity.metaworld ended with exit code 0\n"


def test_an_interrupted_claim_goes_on(programs: Programs, capfd: Capture) -> None:
    programs.failing = "jaxrl.train"
    assert programs.run("two_stages") == 1
    programs.failing = "jaxrl.evaluate"
    assert programs.run("two_stages") == 1
    names = [words[words.index("--resume_or_start") + 1] for words in programs.words[:3]]
    assert names == ["run"] * 3  # the first stage twice, then the second
    programs.failing = ""
    programs.words.clear()
    assert programs.run("two_stages", "--seeds", "1") == 0
    assert [words[0] for words in programs.words] == ["jaxrl.evaluate"]  # both stages are finished
    programs.words.clear()
    assert programs.run("two_stages") == 0
    assert [words[words.index("--seed") + 1] for words in programs.words[:2]] == ["2", "2"] and len(programs.words) == 3
    assert programs.run("two_stages") == 0 and len(programs.words) == 3
    assert "holds over seeds 1, 2" in capfd.readouterr().out.splitlines()[-1]


def test_seconds_of_a_limited_run_are_those_of_one_process(programs: Programs) -> None:
    programs.failing = "jaxrl.train"
    assert programs.run("limited") == 1
    programs.failing = ""
    assert programs.run("limited") == 0
    names = [words[words.index("--resume_or_start") + 1] for words in programs.words[:2]]
    assert len(set(names)) == 2
    assert programs.words[-1][1].endswith(names[1])


def test_rows_of_other_sources_are_not_used_again(
    programs: Programs, monkeypatch: pytest.MonkeyPatch, capfd: Capture
) -> None:
    assert programs.run("two_stages") == 0
    monkeypatch.setattr(run, "git", lambda *words: {"status": "", "ls-tree": "new", "rev-parse": "dead"}[words[0]])
    assert programs.run("two_stages", "--seeds", "1") == 0
    assert len(programs.words) == 9  # trained again, too
    assert [row["commit"] for row in programs.read("two_stages")["rows"]] == ["dead"]
    assert "is of other sources, files, commands or JAX, and is replaced" in capfd.readouterr().err


def test_rows_of_another_version_of_jax_are_not_used_again(programs: Programs) -> None:
    claim = command.read_claims()["two_stages"]
    programs.run("two_stages")
    kept = programs.read("two_stages")
    sources = kept["rows"][0]["sources"]
    assert result.usable_rows(claim, kept, sources, {}) == kept["rows"]
    kept["rows"][0]["versions"]["jax"] = "0.0.1"
    assert result.usable_rows(claim, kept, sources, {}) == kept["rows"][1:]


def test_nothing_runs_from_sources_that_no_commit_holds(
    programs: Programs, monkeypatch: pytest.MonkeyPatch, capfd: Capture
) -> None:
    monkeypatch.setattr(run, "git", lambda *words: " M jaxrl/train.py\n M jaxrl/api.py")
    assert programs.run("two_stages") == 2 and not programs.words
    sentence = "error: a result names the commit that it holds for, and jaxrl/train.py and 1 more is in none: commit it"
    assert capfd.readouterr().err.startswith(sentence)


def test_wrong_use_is_refused_in_a_sentence(programs: Programs, capfd: Capture, tmp_path: Path) -> None:
    for words, sentence in {
        "--list unknown": "unknown claim 'unknown'",
        "shared --file agent=missing.py": "--file agent=missing.py: there is no such file",
        "--tier gpu": "none of these claims can be run here",
    }.items():
        assert command.main(words.split()) == 2
        assert sentence in capfd.readouterr().err
    (tmp_path / "file").touch()
    assert command.main(["parity", "--runs", str(tmp_path / "file" / "runs")]) == 2
    assert "cannot be written: Not a directory" in capfd.readouterr().err
    (programs.folder / "results").mkdir()
    (programs.folder / "results" / "parity.json").write_text("{}")
    assert programs.run("parity") == 1
    assert "parity.json is damaged: delete it" in capfd.readouterr().err
    assert not programs.words


def test_runs_of_another_claim_are_used(programs: Programs, capfd: Capture) -> None:
    assert programs.run("two_stages", "--seeds", "1") == 0
    assert programs.run("shared") == 2
    assert "shared cannot be run here: it needs --file agent=PATH" in capfd.readouterr().err
    assert programs.run("--tier", "nightly", "--seeds", "1") == 0  # which leaves it out
    assert "shared is left out" in capfd.readouterr().err
    assert programs.run("shared", "--file", f"agent={__file__}") == 0
    assert len(programs.words) == 4 and programs.words[-1][2:4] == ["--agent", __file__]


def test_rows_against_another_file_are_not_used_again(programs: Programs, tmp_path: Path) -> None:
    agent = tmp_path / "agent.py"
    agent.write_text("one agent")
    assert programs.run("shared", "--file", f"agent={agent}") == 0
    played = len(programs.words)
    assert programs.run("shared", "--file", f"agent={agent}") == 0 and len(programs.words) == played
    agent.write_text("another one")
    assert programs.run("shared", "--file", f"agent={agent}") == 0 and len(programs.words) == played + 1


def test_two_processes_share_the_seeds_of_a_claim(programs: Programs, monkeypatch: pytest.MonkeyPatch) -> None:
    """While one trains seed 1, the other writes seed 2, and neither is lost."""
    train = run.train

    def be_overtaken(stage: Path, words: list[str]) -> Path:
        monkeypatch.setattr(run, "train", train)
        assert programs.run("two_stages", "--seeds", "2") == 0
        return train(stage, words)

    monkeypatch.setattr(run, "train", be_overtaken)
    assert programs.run("two_stages", "--seeds", "1") == 0
    assert [row["seed"] for row in programs.read("two_stages")["rows"]] == [1, 2]


def test_what_is_expected_may_change_without_running_again(programs: Programs, capfd: Capture) -> None:
    assert programs.run("two_stages", "--judge") == 1
    assert "two_stages has no result of its commands" in capfd.readouterr().err
    programs.entropy = {"1": 0.3, "2": 0.3}
    assert programs.run("two_stages") == 1
    (programs.folder / "claims.yaml").write_text(TWO_STAGES.replace("[0.1, 0.3]", "0.31"))
    command.read_claims = lambda: claims.read_claims(programs.folder / "claims.yaml")  # undone by the fixture
    assert programs.run("two_stages", "--judge") == 0
    assert programs.read("two_stages")["verdict"]["holds"] and len(programs.words) == 6


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["two_stagse"], "unknown claim 'two_stagse': did you mean 'two_stages'?"),
        ([], "name claims, or a --tier of them"),
        (["limited", "--tier", "test"], "name claims, or a --tier of them"),
        (["limited", "--seeds", ""], "--seeds names no number"),
        (["limited", "--seeds", "one"], "--seeds must be a whole number"),
        (["limited", "--file", "agent=nowhere.py"], "--file agent=nowhere.py: there is no such file"),
        (["limited", "--file", "robot=a.py"], "it is one of agent=PATH, weights=PATH"),
    ],
)
def test_bad_command_lines(programs: Programs, words: list[str], sentence: str, capfd: Capture) -> None:
    assert programs.run(*words) == 2
    assert sentence in capfd.readouterr().err and not programs.words


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (("tier: nightly", "tier: daily"), "the tier is one of"),
        (("seeds: [1, 2]", "sedes: [1, 2]"), "seeds are of claims that train"),
        (("  check: bench", "  curve: entropy\n  check: bench"), "a curve is of training, and nothing is trained"),
        (("about: something", "abuot: something"), "unexpected keyword argument 'abuot'"),
        (("train: two_stages", "train: two_stage"), "KeyError"),
        (("expected: [0.1, 0.3], within: 0.02", "expected: [0.1, 0.3]"), "no figure has a tolerance"),
    ],
)
def test_a_claim_that_cannot_be_read_is_named(tmp_path: Path, change: tuple[str, str], problem: str) -> None:
    path = tmp_path / "claims.yaml"
    path.write_text(TWO_STAGES.replace(*change))
    with pytest.raises(UsageError, match=problem):
        claims.read_claims(path)


# Figures in results


def test_paths_lead_to_numbers_curves_and_estimates() -> None:
    matches = [{"first": "sampled", "second": name, "win": {"mean": share}} for name, share in (("a", 0.5), ("b", 0.7))]
    report = {"matches": matches, "rows": [{"num_envs": 64, "rate": 3}], "curve": {"mean": [1, 2, 4]}, "none": None}
    assert claims.take(report, "matches/first=sampled,second=b/win") == 0.7
    assert claims.take(report, "rows/num_envs=64/rate") == 3
    assert claims.take(report, "curve") == 4
    for path in ("matches/first=sampled/win", "rows/num_envs=1/rate", "curve/median", "none"):
        with pytest.raises(UsageError, match=f"has no figure '{path}'"):
            claims.take(report, path)


def test_steps_to_a_value_are_those_of_the_first_evaluation_that_reaches_it(tmp_path: Path) -> None:
    values = enumerate((0.0, 0.96, 0.5, 1.0))
    rows = [{"iteration": at, "env_steps": 100 * at, "eval/success": value} for at, value in values]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    assert run.find_reached(tmp_path, "reached/success/0.95") == 100
    assert run.find_reached(tmp_path, "reached/success/1.5") is None


def test_what_is_never_reached_is_no_number_and_hides_no_other() -> None:
    figures = (claims.Figure("steps", "reached/success/0.95", (9e4,)), claims.Figure("success", "x", (1.0,), 0.1))
    one = claims.Claim("one", "", "release", 1, "train", ("--algo sac",), "one", "x", (1,), figures)
    verdict = result.judge(one, [{"seed": 1, "figures": {"steps": None, "success": 0.3}}])
    assert verdict["sentence"] == "one does not hold over seed 1: success is 0.3, which is not 1 ± 0.1"
    assert verdict["figures"]["steps"] == {"mean": None, "expected": 9e4, "within": None, "holds": None}


# Processes and git


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A program that Python finds as `program`."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path / "program.py"


def test_a_program_that_fails_or_is_stopped(program: Path, tmp_path: Path) -> None:
    program.write_text("import sys; sys.exit(3)")
    assert run.run_command(["program"], tmp_path / "log.txt", codes=(3,)) == 3
    with pytest.raises(UserError, match=r"program ended with exit code 3: see .*log\.txt"):
        run.run_command(["program"], tmp_path / "log.txt")
    program.write_text("print('stopped by\\nSIGTERM at iteration 3; continue with --resume')")
    with pytest.raises(UserError, match="program was stopped by a signal: run the claim again"):
        run.run_command(["program"], tmp_path / "log.txt")
    program.write_text("print('stopped by max_seconds at iteration 3')")
    with pytest.raises(
        UserError, match="program reached its preset's max_seconds: run the claim again, and it goes on"
    ):
        run.run_command(["program"], tmp_path / "log.txt")
    assert run.run_command(["program", "--max_seconds", "9"], tmp_path / "log.txt") == 0
    program.write_text("")
    assert run.run_command(["program"], tmp_path / "log.txt") == 0  # what is older in the log does not count


def test_an_interrupt_lets_the_program_save(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    events: list[Any] = []

    class Process:
        def __init__(self, *_: Any, **__: Any) -> None:
            self.send_signal = events.append

        def wait(self) -> int:
            events.append("wait")
            if len(events) == 1:
                raise KeyboardInterrupt
            return 0

    monkeypatch.setattr(subprocess, "Popen", Process)
    with pytest.raises(KeyboardInterrupt):
        run.run_command(["program"], tmp_path / "log.txt")
    assert events == ["wait", run.signal.SIGTERM, "wait"]


def test_only_committed_sources_are_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(run, "ROOT", tmp_path)
    with pytest.raises(UserError, match="run them in a git checkout"):
        run.digest_sources()

    def commit() -> str:
        words = ["git", "-c", "user.name=a", "-c", "user.email=a@b.c", "commit", "--quiet", "--message", "change"]
        subprocess.run(["git", "add", "."], cwd=tmp_path, check=True)
        subprocess.run(words, cwd=tmp_path, check=True)
        return run.digest_sources()

    subprocess.run(["git", "init", "--quiet"], cwd=tmp_path, check=True)
    (tmp_path / "jaxrl").mkdir()
    (tmp_path / "bench" / "results").mkdir(parents=True)
    source = tmp_path / "jaxrl" / "sac.py"
    source.write_text("1")
    first = commit()
    (tmp_path / "bench" / "results" / "new.json").write_text("{}")
    (tmp_path / "README.md").write_text("more")
    assert run.digest_sources() == first  # results and pages may change
    assert commit() == first
    for path in (source, tmp_path / "jaxrl" / "ddpg.py"):
        path.write_text("2")
        with pytest.raises(UsageError, match=f"{path.name} is in none: commit it first"):
            run.digest_sources()
        second = commit()
        assert second != first
        first = second
