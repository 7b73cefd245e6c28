"""An Artifact in; everything wrong with it out, proved without the run that made it.

Every file is reread against its checksums (headers byte by byte, tensors by the ledger's), so one flipped bit anywhere is
found and named. For each rank the ledger must hold exactly the parameters that the layout assigns, in the right shapes, and
each stored element must have exactly one origin. With the source, its tensors are hashed again too, and each must be used
or dropped for a reason. Nothing is repaired here.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from math import prod
from pathlib import Path

import numpy as np

from dayzero.core.artifact import ArtifactLayout, LedgerEntry, ShardFile
from dayzero.core.errors import DayZeroError
from dayzero.core.model import ModelDescription, Problem
from dayzero.core.records import read_record
from dayzero.core.sharding import local_shape
from dayzero.core.units import tensor_bytes
from dayzero.model.headers import TensorEntry, read_header
from dayzero.model.release import Release, open_release
from dayzero.weights.algebra import Piece, View
from dayzero.weights.copying import is_run, linear_pieces
from dayzero.weights.files import Progress, hash_file
from dayzero.weights.ledger import SourceTensor, file_checksum, piece_of_range, read_lines
from dayzero.weights.placement import is_optional, owned_parameters
from dayzero.weights.writing import hash_runs

LAYOUT_FILE, MODEL_FILE, SOURCES_FILE, STATE_FILE = "layout.json", "model.json", "sources.jsonl", "source_files.json"


SEAL_FILE = "layout.sha256"  # of layout.json, which holds everything else's


def seal(layout: Path) -> bytes:
    """What `layout.sha256` must hold, in sha256sum's format."""
    return f"{hash_file(layout).removeprefix('sha256:')}  {LAYOUT_FILE}\n".encode()


def verify(folder: Path, source: Path | None = None, *, progress: Progress | None = None) -> tuple[Problem, ...]:
    """Everything wrong with the artifact; with `source` also whether it was made of that release as it is now."""
    if not (folder / LAYOUT_FILE).is_file():
        raise DayZeroError(f"{folder} is not an artifact", got=f"no {LAYOUT_FILE} in it",
                           want="a folder written by `dayzero convert`",
                           fix="convert again: an artifact without it is not finished")  # fmt: skip
    if not (folder / SEAL_FILE).is_file() or (folder / SEAL_FILE).read_bytes() != seal(folder / LAYOUT_FILE):
        return (_problem("checksum", f"{LAYOUT_FILE} is not what {SEAL_FILE} says", LAYOUT_FILE),)
    try:
        artifact = read_record(ArtifactLayout, folder / LAYOUT_FILE)
    except DayZeroError as error:
        return (_problem("damaged_record", f"{error.what}: {error.got}", LAYOUT_FILE),)
    checker = _Checker(folder, artifact, progress)
    checker.run()
    if source is not None and not checker.broken:
        release = open_release(source)
        checker.problems += [problem for problem in release.problems if problem.severity == "error"]
        checker.problems += source_problems(folder, release, progress)
    return tuple(checker.problems)


class _Checker:
    def __init__(self, folder: Path, artifact: ArtifactLayout, progress: Progress | None) -> None:
        self.folder, self.artifact, self.progress = folder, artifact, progress
        self.problems: list[Problem] = []
        self.broken = False  # a record that others rest on cannot be read
        self._done = 0
        self._total = sum(one.num_bytes for rank in artifact.files for one in rank)

    def run(self) -> None:
        self._unlisted()
        self._records()
        if self.broken:
            return
        model = read_record(ModelDescription, self.folder / MODEL_FILE)
        self.sources = {one.tensor: one for one in read_lines(SourceTensor, self.folder / SOURCES_FILE)}
        used: set[str] = set()
        for rank, files in enumerate(self.artifact.files):
            used |= self._rank(rank, files, model)
        for name, one in self.sources.items():
            if (one.dropped is None) != (name in used):
                state = "used nowhere and not listed as dropped" if one.dropped is None else "listed as dropped and used"
                self._note("conservation", f"source tensor {name} is {state}", SOURCES_FILE, name)

    def _note(self, kind: str, detail: str, file: str | None = None, tensor: str | None = None) -> None:
        self.problems.append(_problem(kind, detail, file, tensor))

    def _unlisted(self) -> None:
        """Files in the folder that layout.json does not know: harmless, and not what was published."""
        artifact = self.artifact
        listed = {one.file for rank in artifact.files for one in rank}
        listed |= {one.file for one in (*artifact.ledgers, *artifact.release_files)} | {LAYOUT_FILE, SEAL_FILE}
        for root, _, names in os.walk(self.folder):
            for name in names:
                file = os.path.relpath(os.path.join(root, name), self.folder)
                if file not in listed:
                    self._note("unlisted_file", f"{file} is not part of the artifact", file)

    def _records(self) -> None:
        for one in (*self.artifact.ledgers, *self.artifact.release_files):
            path = self.folder / one.file
            if not path.is_file():
                self._note("missing_file", f"{one.file} is missing", one.file)
            elif (found := hash_file(path)) != one.checksum:
                self._note("checksum", f"{one.file} has changed: {found}, not {one.checksum}", one.file)
            else:
                continue
            self.broken = self.broken or not one.file.startswith("release/")

    def _rank(self, rank: int, files: tuple[ShardFile, ...], model: ModelDescription) -> set[str]:
        """One rank's shards and ledger; returns the source tensors used."""
        wanted = {
            parameter.name: (parameter, boxes) for parameter, boxes in owned_parameters(model, self.artifact.layout, rank)
        }  # fmt: skip
        by_file: dict[str, list[LedgerEntry]] = {one.file: [] for one in files}
        used: set[str] = set()
        seen: set[str] = set()
        for entry in read_lines(LedgerEntry, self.folder / self.artifact.ledgers[rank].file):
            used.update(one.tensor for one in entry.sources)
            if entry.file not in by_file or entry.parameter in seen:
                detail = f"rank {rank}: {entry.parameter} is listed twice or in an unknown file"
                self._note("ledger", detail, entry.file, entry.parameter)
                continue
            seen.add(entry.parameter)
            by_file[entry.file].append(entry)
            if entry.parameter not in wanted:
                detail = f"rank {rank} stores {entry.parameter}, which the layout does not assign to it"
                self._note("coverage", detail, entry.file, entry.parameter)
                continue
            parameter, boxes = wanted[entry.parameter]
            shape = local_shape(boxes, parameter.shard.tensor_dim)
            if entry.shape != shape:
                detail = f"rank {rank}: {entry.parameter} is {list(entry.shape)}, the layout says {list(shape)}"
                self._note("coverage", detail, entry.file, entry.parameter)
            self._origins(entry)
        for name in sorted(name for name in wanted.keys() - seen if not is_optional(wanted[name][0])):
            self._note("coverage", f"rank {rank} lacks {name}", self.artifact.ledgers[rank].file, name)
        for one in files:
            self._shard(one, by_file[one.file])
        return used

    def _origins(self, entry: LedgerEntry) -> None:
        """Each element of a stored tensor comes from exactly one place."""
        if any(text.startswith("computed:") for one in entry.sources for text in one.transforms):
            return  # made by an operation of all its sources at once
        pieces = self._pieces(entry)
        if pieces is None:
            return
        covered = sum(piece.num_elements for piece in pieces)
        if covered != prod(entry.shape) or not disjoint(pieces, entry.shape):
            detail = f"{entry.parameter}: its sources cover {covered} of {prod(entry.shape)} elements, or some twice"
            self._note("conservation", detail, entry.file, entry.parameter)

    def _pieces(self, entry: LedgerEntry) -> list[Piece] | None:
        pieces = []
        for one in entry.sources:
            source = self.sources.get(one.tensor)
            made = None if source is None else piece_of_range(one, _entry_of(source))
            if made is None or any(made.base[d] + made.extent(d) >= entry.shape[d] for d in range(len(entry.shape))):
                detail = f"{entry.parameter}: its ledger line does not describe a part of {one.tensor}"
                self._note("ledger", detail, entry.file, entry.parameter)
                return None
            pieces.append(made)
        return pieces

    def _shard(self, one: ShardFile, entries: list[LedgerEntry]) -> None:
        """Header and tensors of one file, byte by byte."""
        path = self.folder / one.file
        if not path.is_file():
            self._note("missing_file", f"{one.file} is missing", one.file)
            return
        header, problems = read_header(path, one.file)
        self.problems += problems
        if header is None:
            return
        entries = sorted(entries, key=lambda entry: entry.offset)
        stored = {name: (found.begin, found.num_bytes, found.shape, found.dtype) for name, found in header.tensors.items()}
        listed = {e.parameter: (e.offset, e.num_bytes, e.shape, e.dtype) for e in entries}
        for name in sorted(stored.keys() | listed.keys()):
            if stored.get(name) != listed.get(name):
                detail = f"{one.file}: its header has {name} as {stored.get(name)}, the ledger as {listed.get(name)}"
                self._note("header", detail, one.file, name)
        with path.open("rb", buffering=0) as file:
            raw = file.read(header.data_begin)
            for entry in entries:
                found = hash_runs(file.fileno(), entry.offset, self._run_lengths(entry))
                if found != entry.checksum:
                    self._note(
                        "checksum", f"{one.file}: the bytes of {entry.parameter} have changed", one.file, entry.parameter
                    )
                self._done += entry.num_bytes
                if self.progress:
                    self.progress("verifying", self._done, self._total)
        if file_checksum(raw, (entry.checksum for entry in entries)) != one.checksum:
            self._note("checksum", f"{one.file}: its header has changed", one.file)

    def _run_lengths(self, entry: LedgerEntry) -> list[int]:
        """What the tensor was hashed by (see `ledger`): the runs it consists of, or the whole."""
        pieces = None if not entry.checksum.partition(":")[0].endswith("-runs") else self._pieces(entry)
        if not pieces:
            return [entry.num_bytes]
        flat = linear_pieces(View(entry.shape, entry.dtype, tuple(pieces)))
        size = tensor_bytes((1,), entry.dtype)
        return [piece.num_elements * size for piece in flat] if all(is_run(piece) for piece in flat) else [entry.num_bytes]


def source_problems(folder: Path, release: Release, progress: Progress | None = None) -> list[Problem]:
    """Where the release as it is now differs from what the artifact was made of."""
    problems = []
    sources = {one.tensor: one for one in read_lines(SourceTensor, folder / SOURCES_FILE)}
    for name in sorted(sources.keys() ^ release.tensors.keys()):
        where = "the artifact's ledger" if name in sources else "the source"
        problems.append(_problem("source_changed", f"source tensor {name} is only in {where}", None, name))
    done, total = 0, sum(one.num_bytes for one in sources.values())
    for name, one in sources.items():
        entry = release.tensors.get(name)
        if entry is None or one.dropped is not None:
            continue
        with release.path(entry.file).open("rb", buffering=0) as file:
            same = (entry.dtype, entry.shape) == (one.dtype, one.shape) and hash_runs(
                file.fileno(), entry.begin, [entry.num_bytes]
            ) == one.checksum
        if not same:
            problems.append(
                _problem("source_changed", f"{name} in {entry.file} is not what the artifact was made of", entry.file, name)
            )
        done += one.num_bytes
        if progress:
            progress("reading the source", done, total)
    return problems


def disjoint(pieces: Iterable[Piece], shape: tuple[int, ...]) -> bool:
    """Whether no element is written twice. Boxes are compared along the first dimension they are cut in; loops with gaps
    are laid out in full, one bit an element of the region they share."""
    pieces = list(pieces)
    if len(pieces) < 2:
        return True
    flat = linear_pieces(View(shape, pieces[0].casts[-1] if pieces[0].casts else pieces[0].dtype, tuple(pieces)))
    reached = -1
    group: list[Piece] = []
    for piece in flat:
        if piece.base[0] > reached and group:
            if not _laid_out_once(group):
                return False
            group = []
        group.append(piece)
        reached = max(reached, piece.base[0] + piece.extent(0))
    return _laid_out_once(group)


def _laid_out_once(pieces: list[Piece]) -> bool:
    """Pieces whose ranges overlap: mark every element, in windows of bounded size."""
    if len(pieces) == 1:
        return True
    from dayzero.weights.algebra import restrict

    window = 2**24
    low = min(piece.base[0] for piece in pieces)
    high = max(piece.base[0] + piece.extent(0) for piece in pieces) + 1
    for start in range(low, high, window):
        marks = np.zeros(min(window, high - start), dtype=np.uint8)
        for piece in pieces:
            for part in restrict(piece, 0, start, start + len(marks)):
                place = np.array([part.base[0] - start])
                for digit in part.digits:
                    place = (place[:, None] + np.arange(digit.size) * digit.step).reshape(-1)
                if marks[place].any():
                    return False
                marks[place] = 1
    return True


def _entry_of(source: SourceTensor) -> TensorEntry:
    return TensorEntry(file=source.file, dtype=source.dtype, shape=source.shape, begin=0, end=source.num_bytes)


def _problem(kind: str, detail: str, file: str | None = None, tensor: str | None = None) -> Problem:
    return Problem(kind=kind, severity="error", detail=detail, file=file, tensor=tensor)
