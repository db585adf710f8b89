"""Blocks of code of the README and of docs/ run: commands at tiny sizes, Python exactly as written; see EXCEPT."""

import dataclasses
import importlib
import math
import re
import runpy
import shlex
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxrl
from envs_jax import base, make
from envs_jax.reach import tasks
from jaxrl.cli import train
from jaxrl.cli.flags import parse

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]

# Flags that a command gets at its end, by the algorithm that it trains (or plans), or by its verb.
SMALL = "--devices 1 --eval_episodes 4 --num_envs 8 --hidden_size"
OFF = f"{SMALL} 8 --batch_size 8 --buffer_size 512 --total_env_steps 160"
TINY = {
    "coma": f"{SMALL} 4 --q 2 --budget 3 --minibatch_size 32 --total_episodes 32",
    "ddpg": f"{OFF} --max_steps 6 --learning_starts 16",
    "sac": f"{OFF} --random_steps 16",
    "ppo": f"{SMALL} 8 --rollout_steps 16 --num_minibatches 2 --total_env_steps 256",
    "student": f"{OFF} --random_steps 16",
    "collective": "--devices 1 --num_envs 8 --random_steps 150 --learner_steps 150 --worker_steps 150 --batch_size 8 "
    "--initial_updates 8 --transformer_updates 8 --transformer_batch 8 --actor_updates 8 --updates_per_call 8 "
    "--hidden_size 8 --context_length 3 --embedding_size 8 --feedforward_size 8 --num_heads 2 --num_layers 1",
    "actor_critic:ActorCritic": "--devices 1 --total_env_steps 6400",
    "warm_ppo:WarmPpo": f"{SMALL} 8 --rollout_steps 16 --num_minibatches 2 --total_env_steps 256",
    "examples.dqn:Dqn": OFF,
    "--resume": "--total_episodes 48",
    "evaluate": "--episodes 8",
    "collect": "--episodes 4",
    "bench.parity.metaworld": "--episodes 2 --out parity.json",
    "bench.parity.public_agent": "--games 2",
}
PYTHON = {"num_envs": 8, "total_env_steps": 320, "hidden_size": 8, "random_steps": 16, "horizon": 6}  # of jaxrl.train

OWN_WORK = "docs/own/"  # pages that use each other's files, which the page of commands names, too

# Commands that make the runs of which pages speak, by directory; the first one is number 0001.
RUNS = {
    "coma_coverage": ["--algo coma", "--config coma_quick"],
    "ddpg_snakes_3v3": ["--algo ddpg", "--algo ddpg --seed 1"],
    "sac_reach": ["--algo sac", "--algo sac --task above", "--algo sac --task hover"],
    "collective_reach": ["--config collective --workers runs/sac_reach/0001,runs/sac_reach/0002,runs/sac_reach/0003"],
}
NAMES = {"RUN": "runs/ddpg_snakes_3v3/0001", "OTHER_RUN": "runs/ddpg_snakes_3v3/0002"}

# What blocks take from the text around them.
BEFORE = {
    "docs/environments/snakes.md": "import jax.numpy as jnp\nfrom envs_jax.snakes.opponents import Opponent, _first_of",
}

# Pages with a table of an environment's spaces.
SPACES = {
    "docs/environments/coverage.md": "coverage",
    "docs/environments/reach.md": "reach",
    "docs/environments/snakes.md": "snakes_3v3",
}

# What the output of blocks of Python contains, by the file that they name.
PRINTS = {"play.py": "(8, 1)", "check.py": "ok", "low.py": "('low',)", "outside.py": "'score_difference'"}

# Blocks of Python that another test runs: (file, its function).
ELSEWHERE = {
    "docs/python.md": ("test_api.py", "test_code_of_the_page"),
    "docs/own/network.md": ("test_api.py", "test_code_of_the_page"),
    "docs/own/sweeps.md": ("test_api.py", "test_code_of_the_page"),
    "docs/export.md": ("test_export_formats.py", "test_code_of_the_page"),
    "docs/other_libraries.md": ("test_outward.py", "test_the_code_of_the_page_runs"),
    "docs/watching.md": ("test_runs.py", "test_the_commands_of_the_page_about_watching"),
}

# Commands and blocks of Python, by page and first words, and why they do not run, or not always: "package NAME" runs
# where it is installed, "slow" with the slow tests, as all commands do.
EXCEPT = {
    ("README.md", "git clone"): "network",
    ("README.md", "make "): "network: makes a virtual environment",
    ("README.md", "pip install"): "network",
    ("README.md", "source .venv"): "shell: of the virtual environment",
    ("CONTRIBUTING.md", "make "): "network: makes a virtual environment, in which it runs the tests",
    ("docs/gpu.md", "python -m bench.gpu"): "GPU; tests/test_bench_gpu.py runs its parts on a CPU",
    ("docs/metaworld.md", "pip install"): "network",
    ("docs/metaworld.md", "python -m jaxrl"): "package metaworld",
    ("docs/metaworld.md", "python -m bench"): "package metaworld",
    ("docs/other_libraries.md", "pip install"): "network",
    ("docs/other_libraries.md", "python -m jaxrl.train --algo sac"): "package gymnax",
    ("docs/other_libraries.md", "python -m jaxrl.train --algo ppo --env gymnasium"): "package gymnasium",
    ("docs/other_libraries.md", "python -m jaxrl.train --algo ppo --env jaxmarl"): "package jaxmarl",
    ("docs/other_libraries.md", "python -m jaxrl.evaluate"): "package gymnasium",
    ("docs/export.md", "python -m jaxrl.export"): "package flatbuffers",
    ("docs/several_hosts.md", "python -m jaxrl.train"): "several hosts: tests/test_hosts.py",
    ("README.md", "import jaxrl, numpy"): "slow",
    ("docs/gpu.md", "import jax, jaxrl"): "slow",
    ("docs/environments/snakes.md", "# outside.py"): "slow",
    ("docs/own/gymnasium.md", "pip install"): "network",
    ("docs/own/gymnasium.md", "python -m jaxrl.train"): "package gymnasium",
    ("docs/own/gymnasium.md", "# thermostat.py"): "package gymnasium",
}


@dataclasses.dataclass(frozen=True)
class Block:
    page: str
    language: str
    text: str

    @property
    def name(self) -> str | None:
        """The file that its first line names."""
        match = re.match(r"# (\w+\.(?:py|yaml))\b.*\n", self.text)
        return match[1] if match else None


def blocks_of(page: Path) -> list[Block]:
    fenced = re.findall(r"^ *```(\w*)\n(.*?)^ *```$", page.read_text(), re.DOTALL | re.MULTILINE)
    return [Block(str(page.relative_to(ROOT)), language, text) for language, text in fenced]


BLOCKS = [block for page in PAGES for block in blocks_of(page)]
COMMANDS = [
    (block.page, line)
    for block in BLOCKS
    if block.language == "bash"
    for line in block.text.replace("\\\n", " ").splitlines()
]


SCRIPTS = [(block.page, block.text) for block in BLOCKS if block.language == "python" and block.page not in ELSEWHERE]


def exception(page: str, line: str) -> str:
    """Why a command does not run, or not always; empty otherwise."""
    reasons = [
        why for (excepted_page, start), why in EXCEPT.items() if excepted_page == page and line.startswith(start)
    ]
    assert len(reasons) <= 1, line
    return reasons[0] if reasons else ""


def cases(texts: Sequence[tuple[str, str]]) -> list[Any]:
    """Texts with their pages as parameters of a test, without those that never run."""
    params = []
    for page, text in texts:
        why, name = exception(page, text), " ".join(text.removeprefix("python -m ").splitlines()[0].split()[:5])
        if why in ("", "slow") or why.startswith("package "):
            marks = [pytest.mark.slow] if why == "slow" else [pytest.mark.needs(why.split()[1])] if why else []
            params.append(pytest.param(page, text, marks=marks, id=f"{page}: {name}"))
    return params


def test_every_block_has_a_language_and_every_exception_a_command() -> None:
    assert {block.language for block in BLOCKS} == {"bash", "python", "text", "yaml"}
    texts = [*COMMANDS, *SCRIPTS]
    for page, start in EXCEPT:
        assert any(text_page == page and text.startswith(start) for text_page, text in texts), f"{page} has no {start}"
    for path in re.findall(r"tests/\w+\.py", " ".join(EXCEPT.values())):
        assert (ROOT / path).is_file(), path
    for page, (file, function) in ELSEWHERE.items():
        text = (ROOT / "tests" / file).read_text()
        assert f"def {function}(" in text and f'"{Path(page).name}"' in text
        assert any(block.page == page and block.language == "python" for block in BLOCKS)
    assert set(PRINTS) <= {block.name for block in BLOCKS}
    for page in BEFORE:
        assert any(block.page == page and block.language == "python" for block in BLOCKS)


@pytest.fixture(scope="module")
def trained_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where runs that several commands read are trained, once."""
    return tmp_path_factory.mktemp("trained")


def provide(line: str, trained_runs: Path, here: Path) -> None:
    """Copy the runs that a command names into the directory `here`; train them first where they are new.

    A raster that it names as its terrain is made there, and an agent for the Jidi platform exported.
    """
    for name in re.findall(r"--terrain (\w+\.npy)", line):
        np.save(here / name, np.linspace(0, 1, 2500).reshape(50, 50))
    if "--agent agent/" in line:
        jaxrl.export("pretrained:snakes", "jidi", here / "agent")
    for kind, run_index in re.findall(r"runs/([\w-]+)(?:/(\d{4}))?", line):
        kind, run_index = ("coma_coverage" if kind == "latest" else kind), run_index or "0001"
        for k, command in enumerate(RUNS[kind][: int(run_index)], start=1):
            if not (trained_runs / f"runs/{kind}/{k:04d}").exists():
                provide(command, trained_runs, trained_runs)
                with pytest.MonkeyPatch.context() as patch:
                    patch.chdir(trained_runs)
                    perform(f"python -m jaxrl.train {command}")
        if not (here / f"runs/{kind}/{run_index}").exists():
            shutil.copytree(trained_runs / f"runs/{kind}/{run_index}", here / f"runs/{kind}/{run_index}")
            (here / "runs/latest").write_text(f"runs/{kind}/{run_index}\n")


def write_files(page: str, folder: Path) -> None:
    """Write the files that a page shows, and those of all pages about one's own work for them and for the commands."""
    uses_own_work = page.startswith(OWN_WORK) or page == "docs/commands.md"
    for block in BLOCKS:
        if block.name and (block.page == page or (uses_own_work and block.page.startswith(OWN_WORK))):
            (folder / block.name).write_text(block.text)


def perform(line: str) -> None:
    """Call the main function of a command, with the flags that make it tiny."""
    _, _, module, *words = shlex.split(line, comments=True)
    verb = module.removeprefix("jaxrl.")
    if words and verb in ("train", "doctor"):
        verb = "--resume" if "--resume" in words else parse(words, add_flags=train._add_flags).config.algo
    main = importlib.import_module(module.replace("jaxrl.", "jaxrl.cli.")).main
    assert main([*words, *TINY.get(verb, "").split()]) == 0
    if "--out" in words:
        assert Path(words[words.index("--out") + 1]).exists()


@pytest.mark.slow
@pytest.mark.parametrize(("page", "line"), cases(COMMANDS))
@pytest.mark.filterwarnings("ignore")  # of other packages
def test_a_command_runs(page: str, line: str, trained_runs: Path, tmp_path: Path, monkeypatch: Any) -> None:
    write_files(page, tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    line = " ".join(NAMES.get(word, word) for word in line.split())
    provide("runs/latest" if line.split()[2] == "jaxrl.runs" and "runs/" not in line else line, trained_runs, tmp_path)
    monkeypatch.chdir(tmp_path)
    perform(line)


@pytest.mark.parametrize(("page", "text"), cases(SCRIPTS))
def test_a_block_of_python_runs(page: str, text: str, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    write_files(page, tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tasks, "TASKS", dict(tasks.TASKS))  # a tutorial adds one,
    monkeypatch.setattr(base, "ADAPTERS", dict(base.ADAPTERS))  # another one a library
    if page == "README.md":
        real = jaxrl.train
        monkeypatch.setattr(jaxrl, "train", lambda *names, **settings: real(*names, **(settings | PYTHON)))
    (tmp_path / "block.py").write_text(f"{BEFORE.get(page, '')}\n{text}")
    name = Block(page, "python", text).name
    if page in SPACES and name is None:
        make(SPACES[page])  # imports what may not be imported while tracing
        jax.eval_shape(lambda: runpy.run_path(str(tmp_path / "block.py")) and None)  # other tests compile environments
    else:
        runpy.run_path(str(tmp_path / "block.py"))
    assert PRINTS.get(name or "", "") in capsys.readouterr().out


def show_range(space: Any) -> str:
    """The range of a space as tables of environments' pages show it."""
    low, high = (0, space.n - 1) if isinstance(space, base.Discrete) else (space.lowest, space.highest)
    return "any" if math.isinf(low) and math.isinf(high) else f"{low:g} to {high:g}"


@pytest.mark.parametrize(("page", "name"), SPACES.items())
def test_the_table_of_spaces_shows_the_environment(page: str, name: str) -> None:
    env = make(name)
    spec = env.spec
    _, timestep = jax.eval_shape(env.reset, jax.random.key(0))
    spaces = {"observation": spec.observation, "action": spec.action, "critic_input": spec.critic_input_spec}
    expected = {
        name: [str([spec.num_agents, *space.shape]), jnp.dtype(space.dtype).name, show_range(space)]
        for name, space in spaces.items()
        if space is not None
    }
    expected["reward"] = [str(list(timestep.reward.shape)), timestep.reward.dtype.name, "any"]
    if timestep.action_mask is not None:
        mask = timestep.action_mask
        expected["action_mask"] = [str(list(mask.shape)), mask.dtype.name, "true: allowed"]
    text = (ROOT / page).read_text()
    table = text.partition("| name | shape | dtype | range |\n|---|---|---|---|\n")[2].partition("\n\n")[0]
    rows = [[cell.strip(" `") for cell in row.strip("|").split("|")] for row in table.splitlines()]
    assert {row[0]: row[1:] for row in rows} == expected
