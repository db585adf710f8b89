"""Every test runs in some documented job, and every benchmark at the defaults of every environment."""

import re
from pathlib import Path

import pytest

from scripts import count_tests as jobs

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def tests(tmp_path_factory: pytest.TempPathFactory) -> dict[str, jobs.Test]:
    """All tests by name."""
    return jobs.collect(tmp_path_factory.mktemp("jobs") / "tests.json")


def test_every_test_runs_in_a_job(tests: dict[str, jobs.Test]) -> None:
    assert len(tests) > 2000
    counts, left = jobs.count(tests)
    assert not left
    assert all(counts.values())
    assert counts["nightly"] + sum(1 for test in tests.values() if test.packages) == len(tests)


def test_what_the_extras_job_installs_is_tested(tests: dict[str, jobs.Test]) -> None:
    packages = set().union(*(test.packages for test in tests.values()))
    for path in (ROOT / "tests").glob("*.py"):  # files that are skipped as a whole here are not among `tests`
        packages |= set(re.findall(r'"(\w+)"', " ".join(re.findall(r"\bneeds\(([^)]*)\)", path.read_text()))))
    needed = jobs.find_distributions(frozenset(packages))
    for environment in jobs.read_extras():
        assert not [name for name, distributions in environment.items() if not needed & distributions]


def test_jobs_by_hand() -> None:
    plain, slow, torch = jobs.Test(frozenset(), frozenset()), frozenset({"slow"}), frozenset({"torch"})
    tests = {
        "a": plain,
        "b": jobs.Test(slow, frozenset()),
        "c": jobs.Test(slow | {"needs"}, torch),
        "d": jobs.Test(frozenset({"needs"}), torch | {"no_such_package"}),
        "e": jobs.Test(frozenset({"needs"}), frozenset({"mujoco_playground"})),
    }
    assert jobs.count(tests) == ({"test": 1, "test-slow": 1, "test-extras": 2, "nightly": 2}, ["d"])


def test_only_the_mark_skips_for_a_package() -> None:
    """A test that skips itself is in no job that installs the package; whole files may, if all they hold is marked."""
    for path in (ROOT / "tests").rglob("*.py"):
        text = path.read_text()
        skips = re.findall(r"^.*\b(?:importorskip\(|skipif\(.*find_spec).*$", text, re.MULTILINE)
        if path == Path(__file__) or not skips:
            continue
        assert not [line for line in skips if line.startswith(" ")], path
        assert re.search(r"^pytestmark\b.*needs\(", text, re.MULTILINE), path


@pytest.mark.parametrize("target", jobs.TARGETS)
def test_jobs_are_documented_and_run_by_ci(target: str) -> None:
    assert f"make {target} " in (ROOT / "CONTRIBUTING.md").read_text()
    workflows = "".join(path.read_text() for path in (ROOT / ".github" / "workflows").glob("*.yml"))
    commands = workflows + (ROOT / ".ci" / "run").read_text()
    assert target == "test-slow" or f"make {target}" in commands  # nightly runs the slow ones
