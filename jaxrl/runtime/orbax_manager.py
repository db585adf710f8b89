"""Orbax as checkpoints use it: what it writes, keeps and commits; imported by the first save."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp

from jaxrl.runtime.manifest import ARRAYS


class Arrays(ocp.PyTreeCheckpointHandler):
    """Writes the arrays, and then, on host 0, the files beside them, before orbax commits the checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.beside: Callable[[Path], None] = lambda folder: None

    def finalize(self, directory: Any) -> None:
        super().finalize(directory)
        self.beside(Path(directory))


@dataclasses.dataclass
class Kept(ocp.checkpoint_managers.PreservationPolicy):
    """Keeps the newest checkpoints and the best one."""

    newest: int
    best: int | None

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        first = len(checkpoints) - self.newest
        return [index >= first or found.step == self.best for index, found in enumerate(checkpoints)]


def manager(directory: Path, kept: Kept, arrays: Arrays, digits: int) -> ocp.CheckpointManager:
    """Return a manager of the checkpoints in a directory, which are named by numbers of so many digits."""
    registry = ocp.handlers.DefaultCheckpointHandlerRegistry()
    registry.add(ARRAYS, ocp.args.PyTreeSave, arrays)
    options = ocp.CheckpointManagerOptions(
        step_format_fixed_length=digits,
        preservation_policy=kept,
        cleanup_tmp_directories=True,
        single_host_load_and_broadcast=True,  # a network file system may show others an older folder
        lightweight_initialize=True,
        save_root_metadata=False,
    )
    return ocp.CheckpointManager(directory, options=options, handler_registry=registry)
