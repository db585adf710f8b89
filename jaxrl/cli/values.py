"""Flags that are not settings, and their values."""

import argparse
import math
import re
from collections.abc import Sequence

from envs_jax.base import closest, short_repr
from jaxrl.common.errors import UsageError
from jaxrl.runtime.run_directory import choose_checkpoint


def parse_int(text: str, flag: str, low: int, high: int) -> int:
    """Parse a whole number from the command line. Raises UsageError."""
    try:
        number = int(text if re.fullmatch(r"[+-]?\d{1,3}(_\d{3})+", text) else text.replace("_", "x"))
    except ValueError:  # Python would take 8_0 for 80
        raise UsageError(f"{flag} must be a whole number, not {short_repr(text)}") from None
    if not low <= number <= high:
        bounds = f"lie between {low} and {high:,}" if low < high else f"be {low} here"
        raise UsageError(f"{flag} must {bounds}, not {short_repr(number)}")
    return number


def parse_number(text: str, flag: str) -> float:
    """Parse a finite number from the command line. Raises UsageError."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise UsageError(f"{flag} must be a number, not {short_repr(text)}")
    return number


def parse_list(text: str) -> list[str]:
    """Split comma-separated words, dropping duplicates."""
    return list(dict.fromkeys(text.replace(",", " ").split()))


def add_int(parser: argparse._ActionsContainer, flag: str, low: int, high: int, default: int | None, help: str) -> None:
    """Add a flag whose value is a whole number between bounds."""
    parser.add_argument(
        flag, type=lambda text: parse_int(text, flag, low, high), default=default, metavar="N", help=help
    )


def add_seed(parser: argparse.ArgumentParser, purpose: str) -> None:
    """Add the flag --seed; `purpose` names what it determines."""
    add_int(parser, "--seed", 0, 2**32 - 1, 0, f"random seed of {purpose} (default: 0)")


def add_checkpoint(parser: argparse.ArgumentParser) -> None:
    """Add the flags that choose a checkpoint of a run."""
    parser.add_argument("--last", action="store_true", help="use the run's newest checkpoint instead of its best")
    add_int(parser, "--checkpoint", 0, 10**10 - 1, None, "use the run's checkpoint of this number, which is the name "
            "of its folder in RUN/checkpoints (this folder may also be named as RUN)")  # fmt: skip


def find_checkpoint(flags: argparse.Namespace) -> int | None:
    """Return the number of the checkpoint that a command line asks for, None for the best or newest.

    Raises UsageError: it asks for several.
    """
    number = choose_checkpoint(flags.run, flags.checkpoint)[1]
    if flags.last and number is not None:
        raise UsageError(f"--last and the checkpoint {number} are two checkpoints: leave one of them out")
    return number


def add_choice(
    parser: argparse.ArgumentParser, flag: str, options: Sequence[str], help: str, default: str | None = None
) -> None:
    """Add a flag whose value is one of `options`."""

    def one_of(text: str) -> str:
        if text not in options:
            raise UsageError(f"unknown {flag.removeprefix('--')} {short_repr(text)}: {closest(text, options)}")
        return text

    parser.add_argument(flag, type=one_of, default=default, metavar="{" + ",".join(options) + "}", help=help)
