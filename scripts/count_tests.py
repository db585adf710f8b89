"""python -m scripts.count_tests: which make target runs how many tests, and which tests none of them runs.

The targets are read from the Makefile, their marks from the tests. A test with the mark `needs` runs where its packages
are installed, which is what `make test-extras` does, for simulators and CUDA in virtual environments of their own.
"""

import collections
import json
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
TARGETS = ("test", "test-slow", "test-extras", "nightly")
EXTRAS_TARGET = "test-extras"
MODULES = {  # names of imported packages whose distribution has another name
    "mujoco_playground": "playground",
    "sbx": "sbx-rl",
    "jaxrl": "",  # installed by every target
}
BROUGHT = {"cuda12": ["jax-cuda12-plugin"]}  # distributions that an extra installs through others
COLLECT = """
import json, pathlib, sys, pytest
class Plugin:
    def pytest_collection_modifyitems(self, items):
        tests = {}
        for item in items:
            packages = [name for mark in item.iter_markers("needs") for name in mark.args]
            tests[item.nodeid] = {"marks": [mark.name for mark in item.iter_markers()], "packages": packages}
        pathlib.Path(sys.argv[1]).write_text(json.dumps(tests))
sys.exit(pytest.main(["--collect-only", "-qq", "-m", "", "-p", "no:cacheprovider"], plugins=[Plugin()]))
"""


class Test(NamedTuple):
    """Marks and packages that decide where a test runs."""

    marks: frozenset[str]
    packages: frozenset[str]  # names that it imports and that a user need not have


def collect(report: Path) -> dict[str, Test]:
    """Return all tests by their id, through the file `report`. Raises subprocess.CalledProcessError: pytest failed."""
    subprocess.run([sys.executable, "-c", COLLECT, str(report)], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    tests = json.loads(report.read_text())
    return {name: Test(frozenset(test["marks"]), frozenset(test["packages"])) for name, test in tests.items()}


def read_selections() -> dict[str, str]:
    """Return the expression of marks by which each target selects its tests."""
    options = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]["addopts"]
    default = re.search(r"-m '([^']*)'", options)
    assert default is not None
    selections = {}
    for target in TARGETS:
        recipe = re.search(rf"^{target}:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert recipe is not None, f"the Makefile has no target {target}"
        chosen = re.search(r"""-m ("[^"]*"|'[^']*'|\w+)""", recipe[1].partition("$(PYTEST)")[2])
        selections[target] = chosen[1].strip("\"'") if chosen else default[1]
    return selections


def is_selected(test: Test, expression: str) -> bool:
    """Return whether pytest's expression of marks, such as "slow or bench", selects a test; "" selects all."""
    marks = collections.defaultdict(bool, dict.fromkeys(test.marks, True))
    return not expression or bool(eval(expression, {"__builtins__": {}}, marks))


def read_extras() -> list[dict[str, frozenset[str]]]:
    """Return what `make test-extras` installs in each of its environments: {extra or package: distributions}."""
    makefile = (ROOT / "Makefile").read_text()
    optional = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    variables = dict(re.findall(r"^(\w+) \?= (.*)$", makefile, re.MULTILINE))
    environments = [
        (variables["EXTRAS"], variables["TEST_PACKAGES"]),
        ("playground", ""),
        ("cuda12", ""),
    ]
    result = []
    for extras, packages in environments:
        requirements = {extra: optional[extra] + BROUGHT.get(extra, []) for extra in extras.split(",")} | {
            name: [name] for name in packages.split()
        }
        result.append(
            {
                name: frozenset(re.split(r"[\[<>=~]", word)[0].replace("_", "-") for word in words)
                for name, words in requirements.items()
            }
        )
    return result


def find_distributions(packages: frozenset[str]) -> frozenset[str]:
    """Return the distributions that have these packages."""
    return frozenset(MODULES.get(name, name.replace("_", "-")) for name in packages) - {""}


def count(tests: Mapping[str, Test]) -> tuple[dict[str, int], list[str]]:
    """Return the number of tests that each target runs, and the tests that none runs."""
    counts, left = dict.fromkeys(TARGETS, 0), []
    selections = read_selections()
    environments = [frozenset().union(*extras.values()) for extras in read_extras()]
    for name, test in tests.items():
        targets = [target for target, expression in selections.items() if is_selected(test, expression)]
        if test.packages:
            installed = any(find_distributions(test.packages) <= environment for environment in environments)
            targets = [target for target in targets if target == EXTRAS_TARGET and installed]
        for target in targets:
            counts[target] += 1
        if not targets:
            left.append(name)
    return counts, left


def main(argv: Sequence[str] = ()) -> int:
    """Print the table; return 1 if a test runs nowhere."""
    with tempfile.TemporaryDirectory() as folder:
        tests = collect(Path(folder) / "tests.json")
    counts, left = count(tests)
    for target, number in counts.items():
        print(f"make {target:<12} {number:>6,}")
    print(f"run by none      {len(left):>6,}\ncollected        {len(tests):>6,}")
    print("\n".join(left))
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
