"""python -m jaxrl.doctor [--algo coma --num_envs 4096 ...]: is this machine ready, and will that run fit?

Devices, driver and library versions, whether JAX really uses the GPU, measured rates of memory, matrix products and
convolutions. With --algo or --config (and any other flag of training): the speed of its environment, the memory plan,
and the largest number of environments that fits; --compile true adds the compiler's exact figure. Exit code 0 if all
is well, 1 if a GPU lies idle or the run does not fit.
"""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from envs_jax.base import short_repr
from jaxrl.cli import flags as command_line
from jaxrl.cli.entry import exit_on_error
from jaxrl.cli.flags import Parser
from jaxrl.common.errors import UsageError
from jaxrl.report import diagnosis
from jaxrl.report.cache import enable_compilation_cache
from jaxrl.runtime import config as configuration
from jaxrl.runtime import load as loading
from jaxrl.runtime.config import Config

_MARKS = {"": " ", "good": "+", "hint": "i", "bad": "!"}
_STYLES = {"": "", "good": "green", "hint": "yellow", "bad": "bold red"}


def show(section: diagnosis.Section) -> None:
    """Print a section: in colour for a terminal, aligned text otherwise."""
    title, findings = section
    console = Console(highlight=False)
    if not console.is_terminal:
        width = max(len(finding.name) for finding in findings)
        print(title)
        for finding in findings:
            print(f"{_MARKS[finding.state]} {finding.name:{width}}  {finding.value}", flush=True)
        return
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for finding in findings:
        table.add_row(finding.name, Text(finding.value, _STYLES[finding.state]))
    console.print(Text(title, "bold cyan"))
    console.print(table)


def parse(argv: Sequence[str]) -> tuple[Config | None, bool, bool]:
    """Parse flags: configuration or None, whether to compile, whether to run a quick check. Raises UsageError."""
    prog = "python -m jaxrl.doctor"
    own = Parser(prog=prog, add_help=False, usage=f"{prog} [--compile true] [any flag of training]")
    own.add_argument("--compile", default="false", metavar="BOOL", help="compile the run for the exact memory figure")
    own.add_argument("--quick", action="store_true", help="a rehearsal: the measured figures mean nothing")
    parsed, others = own.parse_known_args(list(argv))
    if any(word in ("-h", "--help") for word in others):
        print(own.format_help())
    if parsed.compile.lower() not in ("true", "false", "yes", "no", "1", "0"):
        raise UsageError(f"--compile must be true or false, not {short_repr(parsed.compile)}")
    compile_it = parsed.compile.lower() in ("true", "yes", "1")
    if not others:
        if compile_it:
            raise UsageError("--compile needs a run to compile: add --algo NAME or --config FILE")
        return None, False, parsed.quick
    request = command_line.parse(others, prog, __doc__)
    config = request.config
    assert config is not None
    if request.resume is not None:
        config = configuration.resumed(config, request.changes)
    else:
        config = loading.resolve_config(config)
    return config, compile_it, parsed.quick


@exit_on_error
def main(argv: Sequence[str]) -> int:
    """Run the command and return its exit code."""
    config, compile_it, quick = parse(argv)
    enable_compilation_cache()
    sections = []
    for section in diagnosis.checks(config, compile_it, quick):
        show(section)
        sections.append(section)
    bad = [finding.value for _, findings in sections for finding in findings if finding.state == "bad"]
    if len(sections) > 1:  # else JAX finds no device, which is all there is to say
        verdict = "not well: " + "; ".join(bad) if bad else "all is well"
        Console(highlight=False).print(Text(verdict, _STYLES["bad" if bad else "good"]), soft_wrap=True)
    return 1 if bad else 0
