"""A damaged release in, what DayZero says of it out: refused, warned or silent, in which words, and whether they name it.

The stages of `inspect` and `convert` in their order, ended at the first refusal: opening (files and index), describing
(names, shapes and settings), converting (values). Warnings that a sound release of the same kind has do not count.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dayzero.core.errors import DayZeroError
from dayzero.core.model import ModelDescription, Problem
from dayzero.core.plan import Layout
from dayzero.model.describe import describe_release
from dayzero.model.release import open_release
from dayzero.weights.convert import convert

DIGESTS = "SHA256SUMS"
Verdict = Literal["refused", "warned", "silent"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    verdict: Verdict
    stage: str  # where it was refused, or the last one there was
    words: str
    left_behind: bool = False  # something at the place of the output, after a refusal

    def names(self, touched: Iterable[str]) -> bool:
        return any(name in self.words for name in touched)


def dayzero(folder: Path, out: Path, known: Collection[str] = (), *, model: ModelDescription | None = None) -> Outcome:
    """`known`: lines that are said of the undamaged release too. model: its description, where the settings are unchanged, so
    that only what opening and converting find counts (and nothing is described)."""
    found: list[Problem] = []
    stage = "open"
    try:
        release = open_release(folder)
        found += release.problems
        if release.errors:
            return _refused(stage, found, known, out)
        if model is None:
            stage = "describe"
            model = describe_release(release)
            found = list(model.problems)
            if any(problem.severity == "error" for problem in found):
                return _refused(stage, found, known, out)
        stage = "convert"
        report = convert(folder, model, Layout(), out, workers=1)
        found += report.problems
    except DayZeroError as error:
        return Outcome(verdict="refused", stage=stage, words=str(error), left_behind=_left(out))
    finally:
        shutil.rmtree(out, ignore_errors=True)
    words = _words(found, known)
    return Outcome(verdict="warned" if words else "silent", stage=stage, words=words)


def write_digests(folder: Path) -> None:
    """A SHA256SUMS file of all files of a release, as publishers put beside it."""
    lines = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in sorted(folder.iterdir())]
    (folder / DIGESTS).write_text("".join(lines))


def warnings_of(folder: Path, out: Path) -> frozenset[str]:
    """What is said of a sound release, which must not be refused."""
    told = dayzero(folder, out)
    assert told.verdict != "refused", told
    return frozenset(told.words.split("\n")) if told.words else frozenset()


def _refused(stage: str, found: Iterable[Problem], known: Collection[str], out: Path) -> Outcome:
    return Outcome(verdict="refused", stage=stage, words=_words(found, known), left_behind=_left(out))


def _words(found: Iterable[Problem], known: Collection[str]) -> str:
    lines = dict.fromkeys(f"{one.file or ''} {one.tensor or ''} {one.detail}".strip() for one in found)
    return "\n".join(line for line in lines if line not in known)


def _left(out: Path) -> bool:
    """Whether something was published; a hidden folder of unfinished work is none."""
    return out.exists()
