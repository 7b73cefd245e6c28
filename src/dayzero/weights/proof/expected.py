"""An artifact's own config and source list (or its source release) in; what its ledgers ought to say, and its bytes, out.

The mapping and the placement are made anew: from the release where it is at hand, else from the config and the names,
shapes and dtypes of the source tensors that travel with the artifact, so a ledger that a faulty converter wrote
consistently is still found wrong. With the source each stored tensor is gathered again, over a poison of its own, and
compared. Nothing that the run computed is used but the lists compared with.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

from dayzero.core.artifact import ArtifactLayout, ArtifactQuantization, LedgerEntry, SourceRange
from dayzero.core.model import ModelDescription, Problem
from dayzero.core.records import read_record
from dayzero.model.headers import TensorEntry
from dayzero.model.release import damaged, open_release
from dayzero.model.resolve import resolve
from dayzero.weights.algebra import Piece, View
from dayzero.weights.copying import PROOF_POISON, BlockCopier, segments
from dayzero.weights.ledger import SAME_BYTES, SourceTensor, TensorHash, entry_of, runs_checksum
from dayzero.weights.placement import StoredTensor, place
from dayzero.weights.places.stores import Source
from dayzero.weights.proof.conservation import flat_index, place_of, problem
from dayzero.weights.reading import SourceReader
from dayzero.weights.writing import MadeSource, describe_tensor, hash_source

RELEASE_FOLDER = "release"
MODEL_FILE, QUANTIZATION_FILE = "model.json", "quantization.json"
WORKERS = 2  # as conversion: one hashes while the other waits for the disk, and both where there are two cores


@dataclass(frozen=True, kw_only=True, slots=True)
class Expected:
    """`stored` by rank and parameter; what else the mapping says of each source tensor."""

    stored: Mapping[tuple[int, str], StoredTensor]
    made: Mapping[str, MadeSource]
    dropped: frozenset[str]
    partly_used: frozenset[str]
    reader: SourceReader

    def ledger_problems(self, rank: int, entry: LedgerEntry) -> list[Problem]:
        """Where a ledger line differs from the one that the layout and the mapping ask for."""
        tensor = self.stored.get((rank, entry.parameter))
        if tensor is None:
            detail = f"{place_of(rank, entry, 0)}: {entry.parameter} has no source in this checkpoint, or not on this rank"
            return [problem("conservation", detail, entry.file, entry.parameter)]
        if (entry.shape, entry.dtype) != (tensor.shape, tensor.dtype):
            detail = (f"{place_of(rank, entry, 0)}: {entry.parameter} is {entry.dtype}{list(entry.shape)}, the mapping "
                      f"gives {tensor.dtype}{list(tensor.shape)}")  # fmt: skip
            return [problem("conservation", detail, entry.file, entry.parameter)]
        want = Counter(describe_tensor(tensor, entry.file, self.reader, self.made).sources)
        found = Counter(entry.sources)
        if want == found:
            return []
        first = min((want - found) + (found - want), key=lambda one: tuple(start for start, _ in one.into))
        element = flat_index([start for start, _ in first.into], entry.shape)
        said, asked = ([one for one in group if one.into == first.into] for group in (found - want, want - found))
        detail = (f"{place_of(rank, entry, element)}: {entry.parameter} at {_box(first.into)} is said to come from "
                  f"{_ranges(said)}; the layout asks for {_ranges(asked)}")  # fmt: skip
        return [problem("conservation", detail, entry.file, entry.parameter)]

    def source_problems(self, sources: Mapping[str, SourceTensor], file: str) -> list[Problem]:
        """Where the list of source tensors claims another use of one."""
        found = []
        for name, one in sources.items():
            if (one.dropped is not None) != (name in self.dropped):
                state = f"dropped ({one.dropped})" if one.dropped is not None else "used"
                other = "used" if one.dropped is not None else "dropped"
                found.append(problem("conservation", f"{name} is listed as {state}; the mapping has it {other}", file, name))
            elif (one.partly_used is not None) != (name in self.partly_used):
                state = "in part" if one.partly_used is not None else "whole"
                found.append(problem("conservation", f"{name} is listed as used {state}; the mapping differs", file, name))
        return found


def expect(
    folder: Path, artifact: ArtifactLayout, model: ModelDescription, sources: Mapping[str, SourceTensor],
    *, decoded: bool, source: Source | None, upcast_unscaled: bool = False,
) -> Expected | str:  # fmt: skip
    """What the artifact in `folder` ought to be, or why that cannot be told. With `source`, tensors can be read.

    decoded: its ledgers say that tensors were decoded from a stored form.
    Raises DayZeroError where the source, or what is recorded of it, is not one that could have been converted.
    """
    from dayzero.weights.loading import open_checkpoint
    from dayzero.weights.quantize.artifact import quantize_chosen, recorded_choices

    if artifact.quantization is not None and source is None:
        return f"quantized to {artifact.quantization}: which codes they ought to be is told with --source only"
    listed: frozenset[str] = frozenset()
    if source is not None:
        plain = model if artifact.quantization is None else source.describe()
        checkpoint = open_checkpoint(
            source.release, plain, source.store, decoded=source.decode(artifact.dtype, upcast_unscaled=upcast_unscaled)
        )
        if artifact.quantization is not None:
            record = read_record(ArtifactQuantization, folder / QUANTIZATION_FILE)
            if record.calibration:
                return "its codes were chosen by calibration: they are proved to be what was written, not what is best"
            again = quantize_chosen(checkpoint, plain, recorded_choices(record, plain))
            if again.model.parameters != model.parameters:
                return f"{MODEL_FILE} is not what this release gives when its parameters are quantized as recorded"
            checkpoint = again.checkpoint
    elif decoded:
        return "the release was stored quantized or packed: how it is decoded is told with --source only"
    else:
        own = open_release(folder / RELEASE_FOLDER)
        if isinstance(found := resolve(own), Problem):
            return f"the class is not known here: {found.detail}"
        # Which of two equal tensors was kept is told by their bytes alone: here the list is believed.
        listed = frozenset(name for name, one in sources.items() if (one.dropped or "").startswith(SAME_BYTES))
        tensors = {name: entry_of(one) for name, one in sources.items() if name not in listed}
        checkpoint = open_checkpoint(replace(own, tensors=tensors, problems=()), model)
    files, problems = place(checkpoint.views, model, artifact.layout, dtype=artifact.dtype)
    if problems:
        raise damaged(problems, str(folder))
    return Expected(
        stored={(file.rank, tensor.parameter): tensor for file in files for tensor in file.tensors},
        made=checkpoint.made,
        dropped=frozenset(checkpoint.dropped) | listed,
        partly_used=frozenset(p.tensor for p in checkpoint.warnings if p.kind == "partly_used" and p.tensor),
        reader=checkpoint.reader(),
    )


def changed_sources(
    sources: Mapping[str, SourceTensor], tensors: Mapping[str, TensorEntry], reader: SourceReader,
    advance: Callable[[int], None],
) -> list[Problem]:  # fmt: skip
    """Where source tensors as they are now differ from those the artifact was made of. Dropped ones were never read."""
    found = []
    for name in sorted(sources.keys() ^ tensors.keys()):
        where = "the artifact's ledger" if name in sources else "the source"
        found.append(problem("source_changed", f"source tensor {name} is only in {where}", None, name))
    read = [(one, tensors[name]) for name, one in sources.items() if name in tensors and one.dropped is None]

    def compare(pair: tuple[SourceTensor, TensorEntry]) -> Problem | None:
        one, entry = pair
        described = (entry.file, entry.dtype, entry.shape) == (one.file, one.dtype, one.shape)
        if described and hash_source(reader, one.tensor, threading.Event(), advance) == one.checksum:
            return None
        detail = f"{one.tensor} in {entry.file} is not what the artifact was made of"
        return problem("source_changed", detail, entry.file, one.tensor)

    with ThreadPoolExecutor(WORKERS, thread_name_prefix="verify") as pool:
        return found + [one for one in pool.map(compare, read) if one is not None]


class ByteProof:
    """Stored tensors against the source's bytes, gathered again. What was shown once (replicas, or sources that pass by
    whole) is not read again. Safe to use from several threads."""

    def __init__(self, folder: Path, expected: Expected, sources: Mapping[str, SourceTensor]) -> None:
        self._folder, self._expected, self._sources = folder, expected, sources
        self._local = threading.local()  # a copier for each thread
        self._shown: dict[View, str] = {}

    def problems(self, rank: int, entry: LedgerEntry) -> list[Problem]:
        """`entry` is a line in order (no `ledger_problems`), whose checksum the stored bytes have; the sources have theirs."""
        tensor = self._expected.stored[rank, entry.parameter]
        if self._gathered(tensor) == entry.checksum:
            return []
        offset = self._first_wrong_byte(tensor, entry)
        detail = (f"{place_of(rank, entry, 0)}: {entry.parameter} is not what its sources give"
                  + (f", from byte {offset} of {entry.file} on" if offset is not None else ""))  # fmt: skip
        return [problem("conservation", detail, entry.file, entry.parameter)]

    def _gathered(self, tensor: StoredTensor) -> str:
        """The checksum of what the view takes from the source now."""
        parts = segments(tensor.view)
        known = [self._whole(piece) for piece in parts]
        if known and all(known):  # sources that were just hashed, one after the other
            checksums = [checksum for checksum in known if checksum]
            digests = (bytes.fromhex(checksum.partition(":")[2]) for checksum in checksums)
            return checksums[0] if len(checksums) == 1 else runs_checksum(digests)
        if tensor.view not in self._shown:
            digest = TensorHash(max(len(parts), 1))
            for segment, block in self._copier().blocks(tensor.view):
                digest.update(segment, block)
            self._shown[tensor.view] = digest.checksum
        return self._shown[tensor.view]

    def _whole(self, piece: Piece | None) -> str | None:
        """The checksum of the source that a run is the whole of."""
        if piece is None or piece.offset or piece.source in self._expected.made:
            return None
        source = self._sources[piece.source]
        return source.checksum if piece.num_elements == prod(source.shape) else None

    def _copier(self) -> BlockCopier:
        if not hasattr(self._local, "copier"):
            self._local.copier = BlockCopier(self._expected.reader, poison=PROOF_POISON)
        return self._local.copier

    def _first_wrong_byte(self, tensor: StoredTensor, entry: LedgerEntry) -> int | None:
        at = entry.offset
        with (self._folder / entry.file).open("rb") as file:
            file.seek(at)
            for _, block in self._copier().blocks(tensor.view):
                stored = file.read(len(block))
                if stored != block:
                    return at + next((n for n, (a, b) in enumerate(zip(stored, block, strict=False)) if a != b), len(stored))
                at += len(block)
        return None


def _box(box: tuple[tuple[int, int], ...]) -> str:
    return "[" + ", ".join(f"{start}:{stop}" for start, stop in box) + "]"


def _ranges(ranges: list[SourceRange]) -> str:
    return " and ".join(
        f"{one.tensor}{_box(one.box)}" + (f" through {', '.join(one.transforms)}" if one.transforms else "") for one in ranges
    ) or "nothing"  # fmt: skip
