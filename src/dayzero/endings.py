"""How a command ends: every way out becomes an exit status and an error in four facts, never a traceback.

0 done and every required verdict passes, 1 done but one fails or is not shown, 2 bad input or environment, 130 interrupted.
"""

import json
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import NoReturn

import typer
from rich.console import Console

from dayzero.core.errors import DayZeroError

err = Console(stderr=True)


def run(app: typer.Typer) -> NoReturn:
    """Run a verb; turn every way it can end into an exit status."""
    signal.signal(signal.SIGTERM, _interrupt)  # so that `finally` blocks run and nothing is left behind
    wants_json = "--json" in sys.argv
    try:
        status = app(standalone_mode=False)
        if status == 130:  # typer turns an interruption into a status of its own
            raise KeyboardInterrupt
        sys.exit(status if isinstance(status, int) else 0)
    except KeyboardInterrupt:
        _fail(
            DayZeroError("interrupted", got="a signal", want="to finish", fix="run the same command with --resume"),
            wants_json,
            130,
        )
    except DayZeroError as error:
        _fail(error, wants_json, 2)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the reader has gone: nothing more to say
        sys.exit(1)
    except Exception as error:
        if type(error).__module__.split(".")[0] in ("click", "typer"):  # the command line itself was wrong
            message = error.format_message() if hasattr(error, "format_message") else str(error)
            _fail(
                DayZeroError(message, got=" ".join(sys.argv[1:]), want="see --help", fix="correct the command line"),
                wants_json,
                2,
            )
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
            ),
            wants_json,
            2,
        )


def _interrupt(number: int, frame: object) -> NoReturn:
    raise KeyboardInterrupt


def _fail(error: DayZeroError, wants_json: bool, status: int) -> NoReturn:
    err.print(str(error), style="red", markup=False, highlight=False, soft_wrap=True)
    if wants_json:
        print(json.dumps(error.as_dict()), flush=True)
    sys.exit(status)
