"""python -m bench.claims NAME ...: train, evaluate and judge what README.md and docs/results.md claim.

Each claim of claims.yaml names its commands, its seeds, and figures with their tolerance. The means over the seeds
are compared with the expected ones; seconds are only noted. The result is bench/results/claims/NAME.json. The exit code
is 1 if a claim does not hold. A claim that was interrupted goes on: its runs resume, and seeds that are finished count
as long as neither the commands nor the committed sources change.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.claims import result
from bench.claims.claim import TIERS, Claim, choose, read_claims
from bench.claims.needs import find_missing, read_files
from bench.claims.run import digest_sources, run_seed
from bench.harness import measure
from jaxrl.cli.entry import exit_on_error
from jaxrl.common.errors import UsageError, UserError, one_line


def describe(claim: Claim) -> list[str]:
    """Return the cells of a claim in the table of --list."""
    unit = "GPU" if claim.tier == "gpu" else "core"
    cost = f"{len(claim.seeds)} x {claim.cost:g} {unit} minutes"
    measured = result.read(claim)
    verdict = "not run yet"
    if measured is not None:
        holds = "holds" if measured["verdict"]["holds"] else "does not hold"
        verdict = f"{holds} at {measured['rows'][-1]['commit'][:8]}, {len(measured['rows'])} of {len(claim.seeds)} runs"
    return [claim.name, claim.tier, claim.kind, cost, ", ".join(claim.needs), verdict]


def list_claims(claims: Sequence[Claim]) -> str:
    """Return a table of claims, their cost, what they need, and their verdict (rows, commit)."""
    table = [["claim", "tier", "kind", "cost", "needs", "verdict"], *(describe(claim) for claim in claims)]
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in table)


def judge_again(claim: Claim) -> bool:
    """Judge the rows of a result, print its verdict and return whether the claim holds, False also without a result."""
    measured = result.read(claim)
    if measured is None or measured["commands"] != claim.commands:
        measure.say(f"{claim.name} has no result of its commands: run it without --judge")
        return False
    verdict = result.write(claim, measured["rows"])["verdict"]
    print(verdict["sentence"])
    return bool(verdict["holds"])


def run_claim(claim: Claim, seeds: Sequence[int | None], runs: Path, files: dict[str, str]) -> bool:
    """Run what is not finished of a claim, print its verdict and return whether it holds, False also if it fails."""
    try:
        verdict = finish_claim(claim, seeds, runs, files)
    except UserError as error:  # the next claim may do better
        measure.say(f"{claim.name} failed: {one_line(str(error))}")
        return False
    print(verdict["sentence"], flush=True)
    return bool(verdict["holds"])


def finish_claim(claim: Claim, seeds: Sequence[int | None], runs: Path, files: dict[str, str]) -> dict[str, Any]:
    """Run what is not finished of a claim, write its result and return its verdict. Raises UserError."""
    sources = digest_sources()
    previous = result.read(claim)
    rows = result.usable_rows(claim, previous, sources, files)
    if previous and len(rows) < len(previous["rows"]) and claim.kind not in result.MEASURED_ANEW:
        measure.say(f"{claim.name}: the result is of other sources, files, commands or JAX, and is replaced")
    for seed in seeds:
        if seed not in [row["seed"] for row in rows]:
            row = run_seed(claim, seed, runs, sources, files)
            rows = result.usable_rows(claim, result.read(claim), sources, files)  # another process may run other seeds
            rows = [*(former for former in rows if former["seed"] != seed), row]
            result.write(claim, rows)
    return result.judge(claim, rows)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line. Raises UsageError."""
    assert __doc__ is not None
    parser = measure.parser("python -m bench.claims", __doc__)
    add = parser.add_argument
    add("names", nargs="*", metavar="NAME", help="run these claims")
    add("--tier", choices=TIERS, help="run the claims of this tier, but for those that need what is not here")
    add("--list", action="store_true", help="list all claims, or those named, or those of the tier")
    add(
        "--judge",
        action="store_true",
        help="judge the results that are there again, after a change of what is expected",
    )
    add("--seeds", metavar="A,B", help="train with these seeds instead of the claim's")
    add("--file", action="append", default=[], metavar="NAME=PATH", help="a file that claims need, such as agent=PATH")
    add("--runs", default="runs/claims", metavar="DIR", help="folder of the runs (default: runs/claims)")
    return parser.parse_args(list(argv))


@exit_on_error
def main(argv: Sequence[str]) -> int:
    """Entry point; returns the exit code."""
    parsed = parse(argv)
    claims = read_claims()
    if parsed.list:
        listed = parsed.names or parsed.tier
        print(list_claims(choose(claims, parsed.names, parsed.tier) if listed else list(claims.values())))
        return 0
    seeds = None if parsed.seeds is None else measure.parse_list(parsed.seeds, "--seeds", 0, 2**32 - 1)
    files = read_files(parsed.file)
    chosen = choose(claims, parsed.names, parsed.tier)
    if parsed.judge:
        held = [judge_again(claim) for claim in chosen]
        return 0 if all(held) else 1
    runnable = []
    for claim in chosen:
        if missing := find_missing(claim, files):
            if parsed.names:
                raise UsageError(f"{claim.name} cannot be run here: {missing}")
            measure.say(f"{claim.name} is left out: {missing}")
        else:
            runnable.append(claim)
    if not runnable:
        raise UsageError("none of these claims can be run here")
    runs = Path(parsed.runs).absolute()
    try:
        runs.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--runs {parsed.runs} cannot be written: {error.strerror}") from None
    digest_sources()  # before anything is run
    try:
        held = [run_claim(claim, seeds if seeds and claim.train else claim.seeds, runs, files) for claim in runnable]
    except KeyboardInterrupt:
        raise UserError("interrupted: the same command goes on from here") from None
    return 0 if all(held) else 1


if __name__ == "__main__":
    sys.exit(main())
