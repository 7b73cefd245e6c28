"""A damaged release in, what today's tools make of it out: safetensors by itself, and transformers.

Each attempt runs in a child process of its own, so that one that dies or never ends is an outcome too. A warning counts where
the sound release gets none like it; whether it says what is wrong is not asked.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import re
import warnings
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

TIMEOUT_S = 20.0
Said = tuple[str, tuple[str, ...]]  # verdict, lines


def with_safetensors(folder: Path) -> None:
    """Every shard that lies there, as a loader without an index reads them."""
    from safetensors.torch import load_file

    for file in sorted(folder.glob("*.safetensors")):
        load_file(file)


def with_transformers(folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    AutoTokenizer.from_pretrained(folder)
    AutoModelForCausalLM.from_pretrained(folder, dtype="auto")


TOOLS: dict[str, Callable[[Path], None]] = {"safetensors": with_safetensors, "transformers": with_transformers}


def attempt(tool: str, folder: Path, known: Collection[str] = ()) -> Said:
    """`refused`, `warned` (in lines that are not `known`), `silent`, or `hangs` and `dies` as they are."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_in_child, args=(tool, folder, sender), daemon=True)
    child.start()
    sender.close()
    try:
        if not receiver.poll(TIMEOUT_S):
            return "hangs", ()
        verdict, lines = receiver.recv()
    except EOFError:
        return "dies", ()
    finally:
        child.kill()
        child.join()
    new = tuple(line for line in lines if line not in known)
    return ("silent" if verdict == "warned" and not new else verdict), new


def _in_child(tool: str, folder: Path, sender: Any) -> None:
    with _recorded() as lines:
        try:
            TOOLS[tool](folder)
            verdict = "warned" if lines else "silent"
        except BaseException as error:  # whatever it is, the tool did not load the release
            verdict, lines[:] = "refused", [f"{type(error).__name__}: {error}"]
    # Numbers that differ from run to run would make every warning a new one.
    sender.send((verdict, tuple(lines if verdict == "refused" else map(_general, lines))))
    sender.close()


def _general(line: str) -> str:
    """Without colours and numbers, so that it compares."""
    return re.sub(r"\x1b\[[0-9;]*m|\d+", "", line)


@contextlib.contextmanager
def _recorded() -> Iterator[list[str]]:
    """Warnings of Python and of the transformers loggers."""
    lines: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    from transformers.utils import logging as theirs

    theirs.set_verbosity_warning()
    theirs.disable_progress_bar()
    handler = Handler(logging.WARNING)
    logging.getLogger("transformers").addHandler(handler)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield lines
        lines += [str(one.message) for one in caught]
