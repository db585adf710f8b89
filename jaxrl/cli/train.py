"""python -m jaxrl.train --algo coma --num_envs 4096: train, or continue a run with --resume.

Jobs that may be stopped and queued again use one command for both: --resume_or_start NAME.
"""

import argparse
from collections.abc import Sequence

import jax

from jaxrl.cli import entry
from jaxrl.cli import flags as command_line
from jaxrl.cli.process import divide_cores, speed_up_start
from jaxrl.cli.values import add_int
from jaxrl.common.errors import UsageError
from jaxrl.common.jax_flags import flags_of_numbers
from jaxrl.report.console import fold
from jaxrl.runtime import hosts
from jaxrl.runtime.run_directory import versions


@entry.exit_on_error
def main(argv: Sequence[str]) -> int:
    """Run the command and return its exit code."""
    request = command_line.parse(argv, description=__doc__, add_flags=_add_flags)
    flags = request.flags
    if flags.resume_or_start is not None and request.resume is not None:
        raise UsageError("--resume and --resume_or_start both name a run: leave one of them out")

    from jaxrl.runtime import run as runs  # slow to import, and --help and errors of the command line do without

    process = hosts.find(flags.coordinator, flags.num_hosts, flags.host_index)
    if process is None:
        divide_cores(request.config.run.cpu_devices)
    speed_up_start()
    with hosts.join(process, flags.host_timeout):
        if process is not None:
            from jaxrl.runtime.digests import digest_code, digest_files

            requested = {
                **request.config.plain(),
                **request.changes,
                "--resume": request.resume,
                "--resume_or_start": flags.resume_or_start,
            }
            facts = versions() | flags_of_numbers() | {"local devices": jax.local_device_count()}
            hosts.require_same(requested | facts | digest_code(request.config) | digest_files(requested))
        if flags.resume_or_start is not None:
            outcome = runs.resume_or_start(flags.resume_or_start, request.config, request.changes, request.source)
        elif request.resume is not None:
            outcome = runs.resume(request.resume, request.config, request.changes)
        else:
            outcome = runs.start(request.config, source=request.source)
        if hosts.is_host_0() and any(outcome.directory.glob("*/config.yaml")):  # several trials
            from jaxrl.evaluation import learning_curves  # scipy, which training does not need

            learning_curves.report(outcome.directory, print)
        print(fold(outcome.sentence), f"run directory: {outcome.directory}", sep="\n", flush=True)
        if outcome.abandoned:
            raise entry.AbandonedError
    return 0


def _add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--resume_or_start",
        metavar="NAME",
        help="resume the run runs/ALGO_ENV/NAME, or start it under that name if it does not exist: one command for "
        "jobs that are queued again",
    )
    group = parser.add_argument_group("several hosts (under SLURM, Open MPI and torchrun leave the first three out)")
    group.add_argument("--coordinator", metavar="HOST:PORT", help="address of host 0, and a free port there")
    add_int(group, "--num_hosts", 1, 10**6, None, "number of hosts of this run; 1 = only this host")
    add_int(group, "--host_index", 0, 10**6, None, "number of this host, 0 to N - 1")
    limit = "seconds to wait for the other hosts at the start"
    add_int(group, "--host_timeout", 1, 10**6, hosts.JOIN, f"{limit} (default: {hosts.JOIN})")
