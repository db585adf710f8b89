"""Needs of some claims that are not met everywhere: a GPU, a simulator, files of other projects."""

import hashlib
import importlib.util
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from bench.claims.claim import Claim
from jaxrl.common.errors import UsageError

FILES = {
    "agent": "submission.py of github.com/CarlossShi/Competition_3v3snakes",
    "weights": "actor_2000.pth of github.com/jidiai/Competition_3v3snakes",
}


def read_files(words: list[str]) -> dict[str, str]:
    """Return the paths of --file NAME=PATH by name. Raises UsageError: it is no such file."""
    files = {}
    for word in words:
        name, _, path = word.partition("=")
        if name not in FILES:
            raise UsageError(f"--file {word}: it is one of {', '.join(f'{known}=PATH' for known in FILES)}")
        if not Path(path).is_file():
            raise UsageError(f"--file {word}: there is no such file")
        files[name] = str(Path(path).absolute())
    return files


def digest_files(claim: Claim, files: Mapping[str, str]) -> dict[str, str]:
    """Return the SHA-256 of each file that a claim needs."""
    needed = [name for name in claim.needs if name in files]
    return {name: hashlib.sha256(Path(files[name]).read_bytes()).hexdigest() for name in needed}


def find_missing(claim: Claim, files: Mapping[str, str]) -> str:
    """Return half a sentence about what a claim needs and is not here, "" if all of it is here."""
    for need in claim.needs:
        if need in FILES and need not in files:
            return f"it needs --file {need}=PATH, {FILES[need]}"
        if need == "metaworld" and importlib.util.find_spec("metaworld") is None:
            return "it needs Meta-World: pip install -e '.[real]'"
        if need == "gpu" and _find_backend() != "gpu":
            return "it needs a GPU that JAX can use"
    return ""


def _find_backend() -> str:
    """Return the name of JAX's backend, found by a process of its own: this one must leave the GPU to the commands."""
    code = "import jax; print(jax.default_backend())"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip()
