"""The hidden folder beside an output in which it is made: locked, resumable, and published by one rename."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from dayzero.core.errors import DayZeroError
from dayzero.core.records import write_text_atomic

KEY_FILE = "key"  # in a work folder: what it is being made of


@contextlib.contextmanager
def locked_work_folder(out: Path, *, complete: str) -> Iterator[Path]:
    """The hidden folder beside `out`, held by this process alone. Raises DayZeroError when `out` is something else.

    complete: the file that an output which is whole, and may be replaced, has.
    """
    if out.exists() and not (out / complete).is_file() and (not out.is_dir() or any(out.iterdir())):
        raise DayZeroError(f"{out} is in the way", got=f"a folder or file without {complete}", want="a new or empty folder",
                           fix="choose another --out or remove it")  # fmt: skip
    work = out.parent / f".{out.name}.partial"
    lock = out.parent / f".{out.name}.lock"
    try:
        work.mkdir(parents=True, exist_ok=True)
        handle = os.open(lock, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise DayZeroError(f"cannot write beside {out}", got=error.strerror or str(error), want="a writable folder",
                           fix="choose another --out") from error  # fmt: skip
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise DayZeroError(f"another conversion into {out} is running", got="a locked folder", want="one conversion at a time",
                           fix="wait for it, or choose another --out") from None  # fmt: skip
    try:
        yield work
    except OSError as error:
        raise DayZeroError(f"cannot write {out}", got=error.strerror or str(error), want="space and permission beside it",
                           fix="free space or raise the limit, then run it again: it continues") from error  # fmt: skip
    finally:
        if work.is_dir() and not any(work.iterdir()):
            work.rmdir()  # nothing was begun: leave nothing
        lock.unlink(missing_ok=True)
        os.close(handle)


def prepare(work: Path, state: str, *, keep: bool = False) -> None:
    """Start anew unless the folder belongs to the same inputs (`state`); half-written files go in any case."""
    marker = work / KEY_FILE
    same = marker.is_file() and marker.read_text(encoding="utf-8") == state
    if not same and not keep:
        shutil.rmtree(work)
        work.mkdir()
        write_text_atomic(marker, state)
    for scrap in work.rglob("*.partial"):
        scrap.unlink()


def publish(work: Path, out: Path) -> None:
    """The work folder becomes `out`. An artifact that was there (damaged, or of changed sources) makes room first."""
    old = None
    if out.exists():
        if any(out.iterdir()):
            old = out.parent / f".{out.name}.old"
            shutil.rmtree(old, ignore_errors=True)
            out.rename(old)
        else:
            out.rmdir()
    work.rename(out)
    if old is not None:
        shutil.rmtree(old)
