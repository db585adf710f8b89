"""Results of claims: bench/results/claims/NAME.json, with a row for each seed, and the verdict over all of them."""

import importlib.metadata
import json
import statistics
from collections.abc import Mapping
from typing import Any

from bench.claims.claim import Claim, Figure
from bench.claims.needs import digest_files
from bench.harness import measure
from jaxrl.common.errors import UserError
from jaxrl.common.files import write_atomically

RESULTS = measure.RESULTS / "claims"
MEASURED_ANEW = ("ratio", "parity")  # in each call: they train nothing, and depend on more than the sources


def read(claim: Claim) -> dict[str, Any] | None:
    """Return the result of a claim, None if there is none. Raises UserError: it is damaged."""
    path = RESULTS / f"{claim.name}.json"
    if not path.is_file():
        return None
    try:
        result: dict[str, Any] = json.loads(path.read_text())
        if not {"commands", "verdict", "rows"} <= result.keys():
            raise ValueError
    except (ValueError, AttributeError):
        raise UserError(f"{path} is damaged: delete it, and run the claim again") from None
    return result


def usable_rows(
    claim: Claim, result: dict[str, Any] | None, sources: str, files: Mapping[str, str]
) -> list[dict[str, Any]]:
    """Return the rows of a result that the same commands, sources and files have made, with this version of JAX."""
    if result is None or result["commands"] != claim.commands or claim.kind in MEASURED_ANEW:
        return []
    digests = digest_files(claim, files)
    names = {figure.name for figure in claim.figures}
    version = importlib.metadata.version("jax")
    return [
        row
        for row in result["rows"]
        if row["sources"] == sources
        and row["versions"]["jax"] == version
        and row.get("files", {}) == digests
        and names <= set(row["figures"])
    ]


def write(claim: Claim, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Write the result of a claim with these rows, and return it."""
    rows = sorted(rows, key=lambda row: row["seed"] or 0)
    result = {
        "claim": claim.name,
        "about": claim.about,
        "kind": claim.kind,
        "commands": claim.commands,
        "verdict": judge(claim, rows),
        "rows": rows,
    }
    RESULTS.mkdir(parents=True, exist_ok=True)
    write_atomically(RESULTS / f"{claim.name}.json", _format(result))
    return result


def _format(result: dict[str, Any]) -> str:
    return json.dumps(result, indent=1, allow_nan=False, ensure_ascii=False) + "\n"


def judge(claim: Claim, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return {"holds", "sentence", "figures": {name: {"mean", "expected", "within", "holds"}}} over all rows."""
    if claim.kind == "parity":
        (code,) = [row["figures"]["exit_code"] for row in rows]
        verb = "does not hold" if code else "holds"
        sentence = f"{claim.name} {verb}: {claim.command.split()[0]} ended with exit code {code}"
        return {"holds": code == 0, "sentence": sentence, "figures": {}}
    judged = {figure.name: _judge_figure(claim, figure, rows) for figure in claim.figures}
    seeds = [str(row["seed"]) for row in rows if row["seed"] is not None]
    over = f" over seed{'s' if len(seeds) > 1 else ''} {', '.join(seeds)}" if seeds else ""
    failed = [name for name, entry in judged.items() if entry["holds"] is False]
    if failed:
        problems = [_describe(name, judged[name], "which is not") for name in failed]
        sentence = f"{claim.name} does not hold{over}: {'; '.join(problems)}"
    else:
        checked = [_describe(name, entry, "within") for name, entry in judged.items() if entry["holds"]]
        sentence = f"{claim.name} holds{over}: {'; '.join(checked)}"
    return {"holds": not failed, "sentence": sentence, "figures": judged}


def _judge_figure(claim: Claim, figure: Figure, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Judge the mean of some seeds: with fewer than the claim's, the tolerance grows as the error of a mean does."""
    values = [row["figures"][figure.name] for row in rows]
    mean = None if None in values else statistics.fmean(values)  # None: a score that was never reached
    entry = {"mean": mean, "expected": figure.expectation, "within": None, "holds": None}
    if figure.within is None:
        return entry
    within = figure.within * max(1.0, len(claim.seeds) / len(rows)) ** 0.5
    return entry | {"within": within, "holds": mean is not None and abs(mean - figure.expectation) <= within}


def _describe(name: str, entry: dict[str, Any], relation: str) -> str:
    if entry["mean"] is None:
        return f"{name} was never reached, {relation} {entry['expected']:.4g} ± {entry['within']:.4g}"
    return f"{name} is {entry['mean']:.4g}, {relation} {entry['expected']:.4g} ± {entry['within']:.4g}"
