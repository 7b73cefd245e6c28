"""Work that makes objects faster than it frees them, without the garbage collector looking through them in vain."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[None]:
    """While active no cycles are collected: a header of many tensors, or a recording of many calls, has none, and looking for
    them takes a quarter of the time or more. As it was afterwards."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
