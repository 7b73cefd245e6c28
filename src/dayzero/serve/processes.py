"""How processes own each other: a parent owns its child's process group, a child ends when its parent is gone.

Linux tells a child by signal (prctl); elsewhere, and on top of it, the end of the pipe or socket to the parent does.
"""

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def python_module(name: str, *arguments: str) -> list[str]:
    """The command line of a child that runs one of our modules. `-P`: the working folder is the user's, and a queue.py in it
    must not be taken for the standard library's."""
    return [sys.executable, "-P", "-m", name, *arguments]


def end_with_parent(parent_pid: int) -> None:
    """Have this process killed when its parent ends. To be called in the child, first thing.

    Tied to the thread that started the child, so that the parent must start it from a thread that lives on.
    """
    if sys.platform == "linux":
        result = ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        if result != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:  # it ended between the start and the call above
        end_own_group()


def end_own_group() -> None:
    """Kill this process and, where it leads its own group, everything it started in it. Does not return."""
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def kill_group(pid: int) -> None:
    """Kill a child that leads its own process group, with all in it. Nothing happens when all are gone."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def at_end_of_file(descriptor: int, then: Callable[[], None]) -> None:
    """Watch a pipe nobody writes to any more; `then` runs in a daemon thread once its other end is closed."""

    def watch() -> None:
        while os.read(descriptor, 4096):
            pass
        then()

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def describe_exit(pid: int, returncode: int) -> str:
    """`pid 12 was killed by SIGKILL`, for messages."""
    if returncode < 0:
        try:
            name = signal.Signals(-returncode).name
        except ValueError:
            name = f"signal {-returncode}"
        return f"pid {pid} was killed by {name}"
    return f"pid {pid} exited with status {returncode}"
