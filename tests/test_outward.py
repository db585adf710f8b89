"""Environments for users of other libraries: the code and the figures of the page, and absent packages."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.outward import needs_gymnasium, needs_pettingzoo
from helpers.tiny import Corridor

import envs_jax
from envs_jax import make
from envs_jax.adapters import outward
from envs_jax.adapters.gymnasium import GymnasiumEnv, GymnasiumVectorEnv
from envs_jax.adapters.pettingzoo import PettingZooParallelEnv

PAGE = Path(__file__).parents[1] / "docs" / "other_libraries.md"
RESULTS = Path(__file__).parents[1] / "bench" / "results"


@pytest.mark.parametrize(
    ("package", "adapter"),
    [
        ("gymnasium", GymnasiumEnv),
        ("gymnasium", lambda env: GymnasiumVectorEnv(env, 2)),
        ("pettingzoo", PettingZooParallelEnv),
    ],
)
def test_a_missing_package(package: str, adapter: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ValueError, match=re.escape(f"install the extra '{package}', pip install -e '.[{package}]'")):
        adapter(Corridor())


@pytest.mark.parametrize("settings", [{"team_sizes": (2, 4)}, {"loss_rate": 0.1}], ids=str)
def test_teams_that_may_be_incomplete_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"agents of 'coverage' may be absent, .* without team_sizes and loss_rate"):
        outward.checked_spec(make("coverage", **settings))
    assert outward.checked_spec(make("coverage")).num_agents == 4


# The page

BLOCKS = dict(re.findall(r"^```python\n# (\w+)\.py\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("vector", marks=needs_gymnasium),
        pytest.param("ppo", marks=[needs_gymnasium, pytest.mark.needs("stable_baselines3")]),
        pytest.param("parallel", marks=needs_pettingzoo),
        "scan",
    ],
)
@pytest.mark.filterwarnings("ignore")  # of other packages
def test_the_code_of_the_page_runs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "scan":  # in the smallest environment: compiling the arm takes seconds
        monkeypatch.setattr(envs_jax, "make", lambda _: Corridor())
    run = {"__name__": "__main__"}
    exec(compile(BLOCKS[name], f"{name}.py", "exec"), run)
    if name == "vector":
        assert run["observations"].shape == (64, 39) and run["infos"]["success"].shape == (64,)
    if name == "parallel":
        assert set(run["rewards"]) == {"agent_0", "agent_1"} and run["env"].state().ndim == 1
    if name == "scan":
        assert run["reward"].shape == run["done"].shape == (64,)


def test_the_figures_of_the_notebook_are_those_of_the_result() -> None:
    result = json.loads((RESULTS / "outward_cpu.json").read_text())
    notebook = (RESULTS / "README.md").read_text()
    section = notebook.partition("### jaxrl's environments in Gymnasium")[2].partition("\n#")[0]
    shown = re.findall(r"^\| ([\d,]+) \| ([\d,]+) \| ([\d,]+) \|", section, re.MULTILINE)
    numbers = [[int(number.replace(",", "")) for number in row] for row in shown]
    measured = [[row["num_envs"], row["vector"]["rate"], row["sync"]["rate"]] for row in result["rows"]]
    np.testing.assert_allclose(numbers, measured, rtol=0.05)
