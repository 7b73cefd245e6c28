"""Progress of long work on stderr: a bar with rate and time left on a terminal, a line now and then elsewhere."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from dayzero.core.units import format_bytes

# progress(what, done_bytes, total_bytes), as `weights` calls it; a total of 0 means unknown.
Update = Callable[[str, int, int], None]

LINE_EVERY_S = 5.0


@contextmanager
def bytes_progress(say: Callable[[str], None]) -> Iterator[Update]:
    """A callable for work that moves bytes. Without a terminal it speaks through `say`, every few seconds."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _Lines(say)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bars:
        tasks: dict[str, object] = {}

        def update(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=total or None)
            bars.update(tasks[what], completed=done, total=total or None)  # type: ignore[arg-type]

        yield update


class _Lines:
    """Says how far the work is, at most every `LINE_EVERY_S` seconds."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say, self._last_s = say, time.monotonic()

    def __call__(self, what: str, done: int, total: int) -> None:
        now = time.monotonic()
        if now - self._last_s >= LINE_EVERY_S:
            self._last_s = now
            self._say(f"{what}: {format_bytes(done)} of {format_bytes(total)}" if total else what)
