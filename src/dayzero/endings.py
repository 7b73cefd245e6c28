"""How a command ends: every way out becomes an exit status and an error in four facts, never a traceback.

0 done and every required verdict passes, 1 done but one fails or is not shown, 2 bad input or environment, 130 interrupted,
141 nobody reads the output any more (what a shell shows of other programs in that case).
"""

import contextlib
import errno
import json
import os
import select
import signal
import stat
import sys
import traceback
from pathlib import Path
from typing import NoReturn, TextIO

import typer
from rich.console import Console

from dayzero.core.errors import DayZeroError

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)  # what writing to a full or failing disk ends with
SIGPIPE_STATUS = 128 + 13
err = Console(stderr=True)


def run(app: typer.Typer) -> NoReturn:
    """Run a verb; turn every way it can end into an exit status."""
    signal.signal(signal.SIGTERM, _interrupt)  # so that `finally` blocks run and nothing is left behind
    wants_json, pipes = "--json" in sys.argv, _pipes()
    try:
        _refuse_empty(sys.argv[1:])
        status = app(standalone_mode=False)
        sys.stdout.flush()  # now, while what goes wrong can still be told
        if status == 130:  # typer turns an interruption into a status of its own
            raise KeyboardInterrupt
        sys.exit(status if isinstance(status, int) else 0)
    except KeyboardInterrupt:
        fix = "run the same command with --resume" if _resumes(app) else "run the same command again"
        _fail(DayZeroError("interrupted", got="a signal", want="to finish", fix=fix), wants_json, 130)
    except DayZeroError as error:
        _fail(error, wants_json, 2)
    except SystemExit as ended:
        broken = ended.__context__
        if not isinstance(broken, BrokenPipeError):
            raise
        # rich and typer end with status 1 on it, which here is a verdict.
        _unread(broken, pipes, wants_json)
    except Exception as error:
        if isinstance(error, BrokenPipeError):
            _unread(error, pipes, wants_json)
        if isinstance(error, OSError) and error.errno in NO_ROOM:
            _no_room(error, wants_json)
        if type(error).__module__.split(".")[0] in ("click", "typer"):  # the command line itself was wrong
            message = error.format_message() if hasattr(error, "format_message") else str(error)
            _fail(
                DayZeroError(message, got=" ".join(sys.argv[1:]), want="see --help", fix="correct the command line"),
                wants_json,
                2,
            )
        _unexpected(error, wants_json)


def _unexpected(error: Exception, wants_json: bool) -> NoReturn:
    if os.environ.get("DAYZERO_DEBUG"):
        traceback.print_exc()
    where = traceback.extract_tb(error.__traceback__)[-1]
    place = f"{Path(where.filename).name}:{where.lineno}"
    _fail(
        DayZeroError(
            "dayzero met an error it did not expect",
            got=f"{type(error).__name__}: {error} ({place})",
            want="no error",
            fix="set DAYZERO_DEBUG=1 to see the traceback, and report it",
            details=getattr(error, "details", None),
        ),
        wants_json,
        2,
    )


def _interrupt(number: int, frame: object) -> NoReturn:
    raise KeyboardInterrupt


def _refuse_empty(arguments: list[str]) -> None:
    """An empty argument is a variable that is not set, and would be read as the current folder."""
    for place, argument in enumerate(arguments):
        name, _, value = argument.partition("=")
        if not argument.strip() or (name.startswith("--") and argument != name and not value.strip()):
            before = f" after {arguments[place - 1]}" if place and not argument.strip() else ""
            raise DayZeroError("an argument is empty", got=f"{argument!r}{before}", want="a path, a name or a value",
                               fix="check that the variable it comes from is set; the current folder is `.`")  # fmt: skip


def _resumes(app: typer.Typer) -> bool:
    """Whether the verb of this command line has --resume."""
    verb = next((argument for argument in sys.argv[1:] if not argument.startswith("-")), "")
    found = getattr(typer.main.get_command(app), "commands", {}).get(verb)
    return found is not None and any("--resume" in option.opts for option in found.params)


def _pipes() -> list[int]:
    """Which of stdout and stderr a program reads."""
    found = []
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # not a file, or closed
            if not stat.S_ISREG(mode := os.fstat(stream.fileno()).st_mode) and not stat.S_ISCHR(mode):
                found.append(stream.fileno())
    return found


def _unread(error: BrokenPipeError, pipes: list[int], wants_json: bool) -> NoReturn:
    """A closed pipe of ours ends quietly. One to a process of our own may break too, and that is an error."""
    poll = select.poll()
    for descriptor in pipes:
        poll.register(descriptor, 0)
    gone = any(what & (select.POLLERR | select.POLLHUP) for _, what in poll.poll(0))
    if not gone and not set(pipes) - set(_pipes()):  # rich has put the null device in its place
        _unexpected(error, wants_json)
    _drop_output(sys.stdout, sys.stderr)
    sys.exit(SIGPIPE_STATUS)


def _drop_output(*streams: TextIO) -> None:
    """What is still to be written goes nowhere: Python would try once more at its end, and fail with a status of its own."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in streams:
        with contextlib.suppress(OSError, ValueError):  # not a file
            os.dup2(nowhere, stream.fileno())


def _no_room(error: OSError, wants_json: bool) -> NoReturn:
    if error.filename is None:  # files name themselves; then it is the output, which takes no object either
        _drop_output(sys.stdout)
    what = f"{error.filename} cannot be written" if error.filename else "the output cannot be written"
    told = DayZeroError(what, got=error.strerror or str(error), want="room for it", fix="make room, or write to another place",
                        details=getattr(error, "details", None))  # fmt: skip
    _fail(told, wants_json, 2)


def _fail(error: DayZeroError, wants_json: bool, status: int) -> NoReturn:
    try:
        err.print(str(error), style="red", markup=False, highlight=False, soft_wrap=True)
        if wants_json:
            print(json.dumps(error.as_dict()), flush=True)
    except (OSError, SystemExit):  # nobody can be told (SystemExit: rich's way out); the status still says it
        _drop_output(sys.stdout, sys.stderr)
    sys.exit(status)
