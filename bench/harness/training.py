"""Training as a user would start it: a process of its own, with its wall and CPU seconds."""

import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from jaxrl.common.errors import UserError


def train(
    preset: Sequence[str], folder: Path, variables: Mapping[str, str] | None = None, **settings: object
) -> tuple[Path, dict[str, float]]:
    """Train the only run of a folder.

    Args:
        preset: words after --config.
        folder: of the run and its log; it is made.
        variables: environment variables to add.
        settings: of the run.

    Returns:
        The run's directory; "seconds" and "cpu_seconds", with imports, compiling and selection episodes.

    Raises:
        UserError: training fails.
    """
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "jaxrl.train", "--config", *preset, "--runs", str(folder)]
    command += [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    began, before = time.monotonic(), os.times()
    with (folder / "log.txt").open("w") as log:
        if subprocess.run(command, stdout=log, stderr=log, env=os.environ | dict(variables or {})).returncode:
            raise UserError(f"training {' '.join(preset)} failed: see {folder / 'log.txt'}")
    after = os.times()
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    (run,) = folder.glob("*/0001")
    return run, {"seconds": time.monotonic() - began, "cpu_seconds": cpu}
