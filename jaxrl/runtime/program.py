"""A compiled function that its thread makes: when it is called first, or earlier, in parallel with others."""

import functools
import threading
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl.common.errors import usage_errors
from jaxrl.rl.data_parallel import compiler_options

_POLL = 0.02  # seconds: Python handles signals only between waits


class StopRequestedError(Exception):
    """The user wants the program to end while it compiles."""


class Program:
    """A function of arrays, traced and compiled once.

    `make` returns the function, jitted, and shapes of its arguments; `check` receives the compiled program and the
    seconds that it took, and may raise an error.
    """

    def __init__(
        self,
        make: Callable[[], tuple[Any, ...]],
        check: Callable[[Any, float], None] = lambda executable, seconds: None,
    ) -> None:
        self._make = make
        self._check = check
        self._began = 0.0
        self._thread: threading.Thread | None = None
        self._executable: Any = None
        self._result_shapes: Any = None
        self._seconds = 0.0
        self._error: BaseException | None = None
        self.ready = False

    def start_compiling(self) -> None:
        """Trace here, under the caller's settings of JAX, and let another thread compile. Raises UsageError."""
        if self._thread is None:
            self._began = time.monotonic()
            with usage_errors(traced=True):
                function, *arguments = self._make()
                lowered = function.lower(*arguments)
            self._result_shapes = lowered.out_info
            # Not a daemon: Python waits for it at its end, as a compiler that outlives Python aborts the process.
            self._thread = threading.Thread(target=self._run_compiler, args=(lowered,))
            self._thread.start()

    def _run_compiler(self, lowered: Any) -> None:
        try:
            self._executable = lowered.compile()
        except Exception as error:
            self._error = error
        self._seconds = time.monotonic() - self._began

    def compile(self, stop: Callable[[], bool] = lambda: False) -> None:
        """Wait until the program is compiled; signals are handled meanwhile.

        Raises:
            StopRequestedError: `stop()` became true meanwhile; the compiler is still at work.
            Exception: what the compiler or the check raises.
        """
        if self.ready:
            return
        self.start_compiling()
        assert self._thread is not None
        while self._thread.is_alive():
            if stop():
                raise StopRequestedError
            self._thread.join(_POLL)
        if self._error is not None:
            raise self._error
        self._check(self._executable, self._seconds)
        self.ready = True

    def __call__(self, *arguments: Any) -> Any:
        self.compile()
        return self._executable(*arguments)

    def empty_results(self) -> Any:
        """Return zeros with the shapes, dtypes and shardings of the program's results."""
        self.compile()
        places = self._executable.output_shardings
        make_zeros = functools.partial(jax.tree.map, lambda x: jnp.zeros(x.shape, x.dtype), self._result_shapes)
        # one program: another for each array would take a second to compile
        return jax.jit(make_zeros, out_shardings=places, compiler_options=compiler_options(once=True))()
