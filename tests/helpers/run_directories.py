"""Run directories made by hand: a configuration, rows of metrics with known numbers, and what a checkpoint tells."""

import json
import os
from pathlib import Path
from typing import Any

import yaml

from jaxrl.runtime import run_directory
from jaxrl.runtime.manifest import ARRAYS, META, write_manifest

POINT = {"algo": "ddpg", "env": "helpers.tiny:PointMass", "num_envs": 8, "total_env_steps": 1000}


DISTANCE = {"score": "distance", "score_mode": "min", "labels": {"distance": "distance"}}


def make_run(
    directory: Path, rows: list[dict[str, Any]], began: float = 0.0, scoring: Any = DISTANCE, **settings: Any
) -> Path:
    """Write config.yaml, versions.json (modified at `began`, if not 0) and metrics.jsonl."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.yaml").write_text(yaml.safe_dump(POINT | settings))
    run_directory.write_versions(directory, {"environment": 1, "scoring": scoring})
    write_rows(directory, rows)
    if began:
        os.utime(directory / "versions.json", (began, began))
    return directory


def write_rows(directory: Path, rows: list[dict[str, Any]]) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def make_checkpoint(directory: Path, step: int, best: bool = False, **meta: Any) -> None:
    """Write the files of a checkpoint that are read without its arrays."""
    folder = directory / "checkpoints" / f"{step:010d}"
    (folder / ARRAYS).mkdir(parents=True)
    (folder / META).write_text(json.dumps(meta))
    write_manifest(folder, folder / ARRAYS, step, [], best)
