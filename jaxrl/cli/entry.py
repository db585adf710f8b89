"""Begin and end of a command: signals, errors in one sentence, exit codes."""

import functools
import gc
import io
import logging
import os
import signal
import sys
import threading
import types
from collections.abc import Callable, Sequence
from typing import Any

import jax

from envs_jax.places import find_place
from envs_jax.settings import short_repr
from jaxrl.common.errors import UserError, one_line
from jaxrl.common.forks import require_own_process

_LATER_S = 0.02  # until an interrupt is raised that nothing could take
_AGAIN_S = 1.0  # until one that was raised is raised again


class AbandonedError(Exception):
    """The command has ended well, but something still runs that Python would wait for: the compiler, or a block."""


def exit_on_error(main: Callable[[Sequence[str]], int]) -> Callable[..., int]:
    """Turn UserErrors of a main function into one sentence on stderr and their exit code, without a traceback."""

    @functools.wraps(main)
    def run_command(argv: Sequence[str] | None = None) -> int:
        if argv is None:
            collect_garbage_rarely()
            if not sys.flags.safe_path:  # jaxrl-train finds the files of this folder as python -m jaxrl.train does
                sys.path.insert(0, "")
            raise_interrupts()
            hide_repeated_errors()
            if isinstance(sys.stdout, io.TextIOWrapper):  # names of files need not be in the output's encoding
                sys.stdout.reconfigure(errors="backslashreplace")
        try:
            require_own_process("a command")
            return main(sys.argv[1:] if argv is None else argv) or 0
        except UserError as error:
            print(f"error: {one_line(str(error))}", file=sys.stderr)
            return error.exit_code
        except AbandonedError:
            if argv is None:
                sys.stdout.flush()
                os._exit(0)
            return 0
        except BrokenPipeError:  # the reader closed the pipe
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 141
        except KeyboardInterrupt as stop:
            signal.setitimer(signal.ITIMER_REAL, 0)  # do not raise it again
            number = next(iter(stop.args), signal.SIGINT)
            print(f"stopped by {signal.Signals(number).name}, before anything was saved", file=sys.stderr)
            if argv is None:  # compilation threads crash when Python exits
                sys.stdout.flush()
                os._exit(128 + number)
            return 128 + number
        except Exception as error:
            platforms = os.environ.get("JAX_PLATFORMS")
            if isinstance(error, (RuntimeError, AssertionError)) and platforms and not _has_devices():
                sentence = f"JAX cannot use JAX_PLATFORMS={short_repr(platforms)} here: unset it"
                print(f"error: {sentence}", file=sys.stderr)
                return 1
            if place := find_place(error):  # the last line of a long traceback
                error.add_note(f"It comes from {place}.")
            raise

    return run_command


def collect_garbage_rarely() -> None:
    """Let Python look for garbage less often, and never among what is imported.

    A start makes many objects that stay, and hardly any garbage: looking at them again and again, and once more at the
    end of the process, takes a tenth of its time.
    """
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


def raise_interrupts() -> None:
    """Let signals that end a command raise KeyboardInterrupt with their number.

    Handlers that are not Python's own stay in place. SIGINT is answered even if the process was started to ignore it,
    as by `&` in a script: it was sent on purpose.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        if signal.getsignal(number) in (signal.default_int_handler, signal.SIG_IGN, signal.SIG_DFL):
            signal.signal(number, functools.partial(_interrupt, number))


def _interrupt(first: int, number: int, frame: types.FrameType | None) -> None:
    """Raise KeyboardInterrupt for signal `first`, and again at the next alarm: JAX may lose it while it compiles."""
    signal.signal(signal.SIGALRM, functools.partial(_interrupt, first))
    # Python prints and ignores exceptions in callbacks of its garbage collector, and JAX has such a callback.
    callbacks = [getattr(callback, "__code__", None) for callback in gc.callbacks]
    while frame is not None:
        if frame.f_code in callbacks:
            signal.setitimer(signal.ITIMER_REAL, _LATER_S)
            return
        frame = frame.f_back
    signal.setitimer(signal.ITIMER_REAL, _AGAIN_S)
    raise KeyboardInterrupt(first)


def hide_repeated_errors() -> None:
    """Hide the tracebacks of a failed write to disk, which our command reports in one sentence.

    Orbax and asyncio log them, and TensorStore prints one for each array that is written after orbax has given up. Hide
    interrupts, too, that are raised where Python ignores exceptions: `_interrupt` raises them again.
    """
    logging.getLogger("absl").addFilter(lambda record: "orbax" not in record.pathname)
    logging.getLogger("asyncio").addFilter(lambda record: "never retrieved" not in record.getMessage())
    show = sys.unraisablehook

    def show_others(unraisable: Any) -> None:
        error = unraisable.exc_value
        if str(error) != "Event loop is closed" and not isinstance(error, KeyboardInterrupt):
            show(unraisable)

    sys.unraisablehook = show_others


def _has_devices() -> bool:
    try:
        return bool(jax.devices())
    except (RuntimeError, AssertionError):
        return False
