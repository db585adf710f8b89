"""python -m jaxrl.train --algo coma --num_envs 4096: train, or continue a run with --resume.

Jobs that may be stopped and queued again begin and continue with one command: --resume_or_start NAME.
"""

import argparse
import contextlib
import math
import os
from collections.abc import Sequence

from jaxrl.cli import entry
from jaxrl.cli import flags as command_line
from jaxrl.common.errors import UsageError


@entry.exit_on_error
def main(argv: Sequence[str]) -> int:
    """Run the command and return its exit code."""
    request = command_line.parse(argv, description=__doc__, add_flags=_add_flags)
    flags = request.flags
    if flags.resume_or_start is not None and request.resume is not None:
        raise UsageError("--resume and --resume_or_start both name a run: leave one of them out")

    import jax

    from jaxrl.report.cache import enable_in_command
    from jaxrl.runtime import hosts
    from jaxrl.runtime import run as runs
    from jaxrl.runtime.run_directory import versions

    place = hosts.find(flags.coordinator, flags.num_hosts, flags.host_index)
    if place is None:
        _divide_cores(request.config.run.cpu_devices)
    enable_in_command()
    with hosts.joined(place):
        if place is not None:
            asked = {
                **request.config.plain(),
                **request.changes,
                "--resume": request.resume,
                "--resume_or_start": flags.resume_or_start,
            }
            hosts.require_same({**asked, **versions(), "local devices": jax.local_device_count()})
        if flags.resume_or_start is not None:
            ended = runs.resume_or_start(flags.resume_or_start, request.config, request.changes, flags.profile)
        elif request.resume is not None:
            ended = runs.resume(request.resume, request.config, request.changes, flags.profile)
        else:
            ended = runs.start(request.config, flags.profile)
        print(*filter(None, (ended.sentence, ended.memory, f"run directory: {ended.directory}")), sep="\n", flush=True)
        if ended.abandoned:
            raise entry.AbandonedError
    return 0


def _divide_cores(devices: int) -> None:
    """Let JAX divide the cores of a CPU into devices, 0 = one for each, unless the user has or it is too late."""
    import jax

    cores = len(os.sched_getaffinity(0))
    number = devices or 2 ** int(math.log2(min(cores, 8)))
    if "JAX_NUM_CPU_DEVICES" not in os.environ and number > 1:
        with contextlib.suppress(RuntimeError):  # JAX has its devices already
            jax.config.update("jax_num_cpu_devices", number)


def _add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--profile",
        action="store_true",
        help="keep a trace of one block in the run's profile/, for TensorBoard or ui.perfetto.dev; changes "
        "nothing that is trained",
    )
    parser.add_argument(
        "--resume_or_start",
        metavar="NAME",
        help="resume the run runs/ALGO_ENV/NAME, or start it under that name if there is none: one command for jobs "
        "that are queued again",
    )
    group = parser.add_argument_group("several hosts (SLURM, Open MPI and torchrun are found without these)")
    group.add_argument("--coordinator", metavar="HOST:PORT", help="address of host 0, and a free port there")
    group.add_argument("--num_hosts", type=int, metavar="N", help="processes of this run; 1 = train alone")
    group.add_argument("--host_index", type=int, metavar="I", help="number of this one, 0 to N - 1")
