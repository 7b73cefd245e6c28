"""The command line's own furniture: the app that verbs register with, options that several share, and how answers are shown.

Under `--json` one object goes to stdout; people read stdout, progress and logs go to stderr.
"""

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from dayzero import endings

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    help="From a release folder to a served, validated model and an acceptance report: one verb a stage.",
)
# Into a pipe a table is as wide as it needs, not as narrow as a terminal of the sixties.
out, err = Console(width=None if sys.stdout.isatty() else 160), endings.err

RunArgument = Annotated[Path, typer.Argument(help="a run folder, as written by `adapt`")]
JsonOption = Annotated[bool, typer.Option("--json", help="print one JSON object on stdout")]
TargetOption = Annotated[str, typer.Option("--target", help="a name from `dayzero targets`, or a hardware file")]
DeviceOption = Annotated[str | None, typer.Option("--device", help="a torch device string, such as cpu or cuda:0")]
RunsOption = Annotated[Path, typer.Option("--runs", help="where run folders are kept")]
TrustOption = Annotated[bool, typer.Option("--trust-remote-code", help="allow the release's own modelling code to run")]


def say(text: str) -> None:
    err.print(text, markup=False, highlight=False, soft_wrap=True)


def show(as_json: bool, data: Any, table: Any) -> None:
    """One JSON object, or a table. `table` is a callable, so that nothing is rendered for scripts."""
    if as_json:
        print(json.dumps(data, allow_nan=False), flush=True)
    else:
        out.print(table())


def status(verdict: str) -> int:
    return 0 if verdict == "pass" else 1
