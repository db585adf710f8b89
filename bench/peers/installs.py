"""The peers: what each offers, and how its virtual environment is made. No library is imported here."""

import dataclasses
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from envs_jax.base import closest
from jaxrl.common.errors import UsageError, UserError

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / ".peers"
JAX = ("jax==0.10.2",)
GYMNAX = (*JAX, "gymnax==1.0.1", "six")  # which imports six without asking for it
SB3 = ("gymnasium==1.3.0", "stable-baselines3==2.9.2", "torch==2.14.1")
ALL = ("sac", "td3", "ppo")
OURS = "ours"


@dataclasses.dataclass(frozen=True)
class Peer:
    """A library, or ours."""

    packages: tuple[str, ...]  # for pip, with their versions
    environments: tuple[str, ...] = ()  # names of rows, see `bench.peers.environments`
    learners: tuple[str, ...] = ()  # algorithms, see `bench.peers.learners`
    repository: str = ""  # environment variable that names a checkout, for code that is in no package
    note: str = ""  # a remark for the table


PEERS = {
    OURS: Peer(
        (*GYMNAX, "-e", f"{ROOT}"),
        ("coverage q=7", "coverage q=57", "snakes", "snakes both teams", "reach"),
        ALL,
    ),
    "ours_on_host": Peer(
        (*GYMNAX, "gymnasium==1.3.0", "-e", f"{ROOT}"), learners=("sac", "ppo"), note="with gymnasium as environment"
    ),
    "numpy": Peer(
        ("-e", f"{ROOT}"),
        ("coverage q=7", "coverage q=57", "snakes"),
        note="our independent references in bench/reference",
    ),
    "metaworld": Peer(("metaworld==3.1.1", "mujoco==3.3.0", "packaging"), ("reach-v3",), note="the original of reach"),
    "jidi": Peer(
        ("numpy==2.4.6", "torch==2.14.1", "gym==0.26.2", "pyyaml==6.0.4", "pillow==13.0.0"), ("snakes_3v3",),
        repository="JIDI_REPOSITORY",
        note="the original of snakes, github.com/jidiai/Competition_3v3snakes, with its observation and greedy player",
    ),
    "pufferlib": Peer(
        ("pufferlib==3.0.0", "gymnasium==0.29.1"), ("snake",),
        note="its snake compiled from the source distribution; 6 snakes on 10 x 20 cells, in C",
    ),
    "jumanji": Peer(("jax==0.10.2", "jumanji==1.1.2"), ("Snake-v1",), note="one snake on 12 x 12 cells"),
    "jaxmarl": Peer(
        ("jax==0.10.2", "jaxmarl==0.2.0"), ("overcooked", "MPE_simple_spread_v3"), note="teams of 2 and 3"
    ),
    "gymnax": Peer(GYMNAX, ("CartPole-v1", "Breakout-MinAtar")),
    "brax": Peer((*GYMNAX, "brax==0.14.2"), learners=("sac",), note="its PPO knows only boxes"),
    "rejax": Peer((*JAX, "rejax==0.1.3", "gymnax==0.0.9", "gymnasium==1.3.0"), learners=ALL),
    "sbx": Peer((*JAX, *SB3, "sbx-rl==0.28.0"), learners=ALL),
    "sb3": Peer((*JAX, *SB3), learners=ALL),
    "cleanrl": Peer(
        (*JAX, "torch==2.14.1", "gymnasium==0.29.1", "tyro"), learners=ALL,
        repository="CLEANRL_REPOSITORY", note="scripts of github.com/vwxyzjn/cleanrl, one copy (ppo: as the others)",
    ),
}  # fmt: skip


def find(name: str) -> Peer:
    """Return a peer. Raises UsageError."""
    if name not in PEERS:
        raise UsageError(f"unknown peer '{name}': {closest(name, PEERS)}")
    return PEERS[name]


def make(name: str) -> Path:
    """Make the virtual environment of a peer, and return its interpreter. Raises UserError: pip fails."""
    peer = find(name)
    folder = FOLDER / name
    python = folder / "bin" / "python"
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    for command in ([sys.executable, "-m", "venv", str(folder)], [*pip, *peer.packages]):
        done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        if done.returncode:
            words = [line for line in done.stderr.splitlines() if line.lower().lstrip().startswith("error")]
            raise UserError(f"cannot make {folder} ({' '.join(words) or done.stderr[-200:]}): see pip's own messages")
    return python


def python_of(name: str, paths: Mapping[str, str]) -> Path:
    """Return the interpreter of a peer: from `paths`, else as `make` installed it; for our own code this one.

    Raises UsageError where there is none.
    """
    find(name)
    if name in paths:
        path = Path(paths[name])
        python = path if path.is_file() else path / "bin" / "python"
        if not python.is_file():
            raise UsageError(f"--python {name}={paths[name]} is neither an interpreter nor a virtual environment")
        return python
    installed = FOLDER / name / "bin" / "python"
    if installed.is_file():
        return installed
    if name in (OURS, "numpy"):
        return Path(sys.executable)
    raise UsageError(
        f"{name} has no virtual environment: make it with python -m bench.peers --make {name}, or name one with "
        f"--python {name}=PATH"
    )
