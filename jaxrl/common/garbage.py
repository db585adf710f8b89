"""Python's garbage collector while JAX is imported and traces."""

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def collected_rarely() -> Iterator[None]:
    """Collect garbage rarely: imports and traces make millions of objects that stay, a tenth of whose time it takes."""
    former = gc.get_threshold()
    gc.set_threshold(max(former[0], 200_000) if former[0] else 0, *former[1:])  # 0 = never, the user's choice
    try:
        yield
    finally:
        gc.set_threshold(*former)
