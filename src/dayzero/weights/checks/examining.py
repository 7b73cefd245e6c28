"""What is looked at beside names and shapes: the publisher's digests before anything is moved, the values once they went by."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from dayzero.core.model import Problem
from dayzero.model.config_against_tensors import SCHEMA_KINDS
from dayzero.model.headers import TensorEntry
from dayzero.model.release import damaged
from dayzero.weights.changes import Changes
from dayzero.weights.checks.census import TensorStatistics
from dayzero.weights.checks.census_rules import judge
from dayzero.weights.checks.digests import WEIGHT_ENDINGS, check_digests, hash_files, publisher_digests
from dayzero.weights.files import Progress
from dayzero.weights.places.stores import Source
from dayzero.weights.reading import LocalStore, UnsoundSource

ACCEPTED = "accepted: "  # begins what was an error
ACCEPT = "download the named files again; --accept-values goes on with what is there"


def require_readable(source: Source) -> None:
    """Raises DayZeroError listing everything that keeps the tensors from being read, and which small files (an index, settings)
    are not what was published: those are often behind it."""
    release = source.release
    if all(problem.kind in SCHEMA_KINDS for problem in release.errors):
        release.require_readable()
        return
    digests = publisher_digests(source.settings)
    small = [file for file in digests.by_file() if not file.endswith(WEIGHT_ENDINGS)]
    found = check_digests(source.settings, replace(digests, digests=_of(digests.digests, small)),
                          hash_files(source.settings, digests, small))  # fmt: skip
    raise damaged([*release.errors, *(one for one in found if one.severity == "error")], source.address)


def check_published(
    source: Source, *, progress: Progress | None = None, workers: int = 2, share: tuple[int, int] = (1, 1)
) -> tuple[Problem, ...]:
    """Files held against the digests that came with them: a pass of its own over what they name, and no pass without any.

    share: which of how many hosts this is; each looks at its share of the files. Returns warnings, one of which says so where
    weights have no digest; raises DayZeroError listing every file that is not what was published.
    """
    digests = publisher_digests(source.settings)
    weights = sorted({entry.file for entry in source.release.tensors.values()})
    local = isinstance(source.store, LocalStore)
    number, count = share
    files = [file for file in digests.by_file() if local or file not in weights][number - 1 :: count]
    hashes = hash_files(source.settings, digests, files, progress=progress, workers=workers)
    problems = check_digests(source.settings, replace(digests, digests=_of(digests.digests, files)), hashes)
    if not local and any(file in weights for file in digests.by_file()):
        problems.append(_note("digests of weights at an address are not compared with their bytes: convert a local copy"))
    elif digests.uncovered(weights):
        problems.append(_note(digests.coverage(weights)))
    if errors := [problem for problem in problems if problem.severity == "error"]:
        raise damaged(errors, source.address)
    return tuple(problems)


def judge_values(
    statistics: Mapping[str, TensorStatistics], checksums: Mapping[str, str], tensors: Mapping[str, TensorEntry], where: str,
    *, accept: bool,
) -> tuple[Problem, ...]:  # fmt: skip
    """What the values of a checkpoint say about it: warnings, which errors become with `accept`.

    Raises DayZeroError listing every tensor whose values no sound checkpoint has.
    """
    problems = judge(statistics, checksums, tensors)
    errors = [problem for problem in problems if problem.severity == "error"]
    if errors and not accept:
        said = damaged(errors, where)
        raise UnsoundSource(said.what, got=said.got, want="values that a model can have", fix=ACCEPT)
    return tuple(
        replace(problem, severity="warning", detail=f"{ACCEPTED}{problem.detail}") if problem.severity == "error" else problem
        for problem in problems
    )


def require_accepted(problems: Iterable[Problem], changes: Changes, where: str) -> None:
    """What was accepted once is not so for good: raises UnsoundSource where it would have to be accepted again."""
    grave = [problem for problem in problems if problem.detail.startswith(ACCEPTED)]
    if grave and not changes.accept_values:
        said = damaged(grave, where)
        raise UnsoundSource(said.what, got=said.got, want="values that a model can have", fix=ACCEPT)


def _of(digests: tuple, files: list[str]) -> tuple:
    return tuple(one for one in digests if one.file in set(files))


def _note(text: str) -> Problem:
    return Problem(kind="digests", severity="warning", detail=text)
