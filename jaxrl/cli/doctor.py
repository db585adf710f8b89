"""python -m jaxrl.doctor [--algo coma --num_envs 4096 ...]: is this machine ready, and will that run fit?

Prints devices, driver and library versions, and whether JAX really uses the GPU. With --algo or --config (and any other
flag of training) the run is compiled, but not started, and its memory is compared with the free memory. The exit code
is 0 if all is well, 1 if a GPU is not used or the run does not fit.
"""

import itertools
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.text import Text

from jaxrl.cli import flags as command_line
from jaxrl.cli.entry import exit_on_error
from jaxrl.cli.process import divide_cores, speed_up_start
from jaxrl.runtime import config as configuration
from jaxrl.runtime import diagnosis
from jaxrl.runtime import load as loading

_MARKS = {"": " ", "good": "+", "hint": "i", "bad": "!"}
_STYLES = {"": "", "good": "green", "hint": "yellow", "bad": "bold red"}


def show(section: diagnosis.Section) -> None:
    """Print a section, in colour for a terminal."""
    title, findings = section
    console, width = Console(highlight=False), max(len(finding.name) for finding in findings)
    console.print(Text(title, "bold cyan"))
    for name, value, state in findings:
        console.print(Text.assemble(f"{_MARKS[state]} {name:{width}}  ", (value, _STYLES[state])), soft_wrap=True)


@exit_on_error
def main(argv: Sequence[str]) -> int:
    """Run the command and return its exit code."""
    config, resuming, request = None, False, None
    if argv:
        request = command_line.parse(argv, "python -m jaxrl.doctor", __doc__)
        resuming = request.resume is not None
        if resuming:
            config = configuration.apply_resume_changes(request.config, request.changes)
        else:
            config = loading.resolve_config(request.config)
    if config is not None:
        divide_cores(config.run.cpu_devices)
    speed_up_start()
    bad = []
    sections: Iterable[diagnosis.Section] = diagnosis.checks(config, resuming)
    if request is not None and request.resume is not None:
        sections = itertools.chain(sections, [("checkpoint", diagnosis.look_at_checkpoints(request.resume))])
    for section in sections:
        show(section)
        bad += [finding.value for finding in section[1] if finding.state == "bad"]
    verdict = "not well: " + "; ".join(bad) if bad else "all is well"
    Console(highlight=False).print(Text(verdict, _STYLES["bad" if bad else "good"]), soft_wrap=True)
    return 1 if bad else 0
