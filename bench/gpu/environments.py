"""Part "environments": steps per second, by stage and number of copies."""

from pathlib import Path
from typing import Any

from bench import env_throughput
from bench.gpu import results
from bench.harness import measure
from envs_jax.snakes.types import PUBLISHED

SIZES = {
    "coverage": [1024, 4096, 16384],
    "snakes_3v3": [1024, 16384, 65536, 262144, 1048576],
    "reach": [1024, 16384, 65536, 262144, 1048576],
}
SMALL: dict[str, tuple[str, dict[str, Any]]] = {
    "coverage": ("coverage", {"q": 2}),
    "snakes_3v3": ("snakes", PUBLISHED | {"height": 3, "width": 4, "snakes": 2, "beans": 1}),
    "reach": ("reach", {"horizon": 4}),
}


def coverage(quick: bool, folder: Path) -> dict[str, Any]:
    """Measure coverage with 493 x 493 cells."""
    return _measure_env("environments_coverage", "coverage", quick, folder)


def snakes(quick: bool, folder: Path) -> dict[str, Any]:
    """Measure snakes, three against three."""
    return _measure_env("environments_snakes", "snakes_3v3", quick, folder)


def reach(quick: bool, folder: Path) -> dict[str, Any]:
    """Measure reach."""
    return _measure_env("environments_reach", "reach", quick, folder)


def _measure_env(unit: str, env: str, quick: bool, folder: Path) -> dict[str, Any]:
    """Measure size by size; results are saved, and stay if a later size is cut off."""
    noted = results.read(folder).get(unit, {})
    rows = noted.get("rows", [])
    sizes = noted.get("sizes", {})
    name, settings = SMALL[env] if quick else (env, PUBLISHED if env == "snakes_3v3" else {})
    for size in [2] if quick else SIZES[env]:
        if str(size) in sizes:
            continue
        request = env_throughput.Request(
            env=name,
            settings=settings,
            policy="random",
            num_envs=[size],
            rounds=1 if quick else 5,
            min_seconds=1e-6 if quick else 0.2,
            baseline=False,
        )
        measured = env_throughput.run(request, measure.say)
        for row in measured["rows"]:
            for stage, entry in row["stages"].items():
                what = f"{name}, {row['num_envs']:,} copies, {stage}"
                rows.append([what, entry["rate"], "steps/s"])
        sizes[str(size)] = measured
        results.note(folder, unit, rows=rows, sizes=sizes)
    return {"rows": rows, "sizes": sizes}
