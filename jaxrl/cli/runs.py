"""python -m jaxrl.runs [FOLDER_OR_RUN ...]: list runs, the newest first; --compare and --out compare them.

Without names it lists all runs in runs/. The score is the environment's, at the end of the run: of the episodes that
select the best checkpoint, otherwise of training.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import jax

from jaxrl.cli.entry import exit_on_error
from jaxrl.cli.flags import Parser
from jaxrl.common.errors import UsageError, one_line
from jaxrl.common.files import output, write_output
from jaxrl.evaluation import run_page, run_summary
from jaxrl.report.tables import print_parts


@exit_on_error
def main(argv: Sequence[str]) -> int:
    """Run the command and return its exit code."""
    parser = Parser(prog="python -m jaxrl.runs", description=__doc__)
    add = parser.add_argument
    add("paths", nargs="*", metavar="FOLDER_OR_RUN", help="runs, or folders of runs (default: runs)")
    add("--compare", action="store_true", help="print the settings in which these runs differ, and their scores")
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument("--json", action="store_true", help="print JSON instead of a table")
    instead.add_argument("--out", metavar="FILE.html", help="write a page with the curves of these runs")
    flags = parser.parse_args(list(argv))
    path = _page_path(flags.out)
    jax.config.update("jax_platforms", "cpu")  # the GPU may be in use by these runs
    runs = run_summary.find(
        flags.paths or [run_summary.RUNS], lambda sentence: print(f"warning: {one_line(sentence)}", file=sys.stderr)
    )
    runs = runs if flags.compare else run_summary.newest_first(runs)
    if flags.compare and len(runs) < 2:
        raise UsageError("--compare needs at least two runs: name them, or a folder that holds them")
    if path is not None:
        if len(runs) > 1:
            print(f"drawing the curves of {len(runs)} runs ...", flush=True)
        page = run_page.make_page(runs)
        write_output(path, page, "--out")
        print(f"wrote {path} ({len(page.encode()) / 2**10:,.0f} KiB), runs: {', '.join(run.name for run in runs)}")
    if flags.json:
        content = {"runs": [run.plain() for run in runs]}
        differing = {"differing_settings": run_summary.differences(runs)} if flags.compare else {}
        print(json.dumps(content | differing, indent=1, allow_nan=False))
    elif flags.compare or path is None:
        print_parts(run_summary.compare_runs(runs) if flags.compare else run_summary.list_runs(runs))
    return 0


def _page_path(text: str | None) -> Path | None:
    if text is None:
        return None
    if Path(text).suffix.lower() not in (".html", ".htm"):
        raise UsageError(f"--out {text}: curves are written as a page: name a file that ends in .html")
    return output(text, "--out")
