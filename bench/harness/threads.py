"""The number of threads of a baseline: the faster of one and all cores, for NumPy's BLAS.

A baseline of small arrays loses most of its time to BLAS threads that wait for each other on a busy machine.
"""

import ctypes
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

SetThreads = Callable[[int], None]
_PREFIXES = ("scipy_openblas", "openblas")
_SUFFIXES = ("64_", "_64", "")


def cores() -> int:
    """Return the cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def blas_setter() -> SetThreads | None:
    """Return what sets the threads of the OpenBLAS that came with NumPy; None for another BLAS."""
    for folder in (Path(np.__file__).parents[1] / "numpy.libs", Path(np.__file__).parent / ".dylibs"):
        for path in sorted(folder.glob("*openblas*")):
            library = ctypes.CDLL(str(path))
            for prefix in _PREFIXES:
                for suffix in _SUFFIXES:
                    function = getattr(library, f"{prefix}_set_num_threads{suffix}", None)
                    if function is not None:
                        function.argtypes = [ctypes.c_int]
                        function.restype = None
                        return lambda number: function(number)
    return None


def choose_threads(
    sample: Callable[[], float], set_threads: SetThreads, choices: Sequence[int], rounds: int = 3
) -> int:
    """Return the choice with the quickest of `rounds` samples, and set it.

    Args:
        sample: takes a sample, returns seconds.
        set_threads: of the library that the sample uses.
        choices: numbers of threads, which take turns.
        rounds: samples of each, after one that is discarded.
    """
    quickest = dict.fromkeys(choices, math.inf)
    for index in range(rounds + 1):
        for count in quickest:
            set_threads(count)
            seconds = sample()
            if index:
                quickest[count] = min(quickest[count], seconds)
    best = min(quickest, key=lambda count: quickest[count])
    set_threads(best)
    return best


def note(count: int, choices: Sequence[int], library: str) -> str:
    """Return a sentence for the result."""
    if len(set(choices)) == 1:
        return f"the baseline runs with {count} {library} thread, the only core"
    return (
        f"the baseline runs with {count} of {max(choices)} {library} threads, the faster of 1 and {max(choices)} here"
    )
