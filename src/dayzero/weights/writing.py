"""One planned file in, the file on disk with its ledger fragment out. Safe to kill at any moment.

Bytes go to `<file>.partial`, are synced, and only then get their name; `<file>.done.json` (checksums, ledger lines) follows
and says that the file is whole. Space, quota and size limits end in a DayZeroError and remove what was half-written.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from dayzero.core.artifact import LedgerEntry, ShardFile, SourceRange
from dayzero.core.errors import DayZeroError
from dayzero.core.records import STRICT, read_record, record_json, write_text_atomic
from dayzero.core.units import MIB
from dayzero.weights.checks.census import TensorCensus, TensorStatistics
from dayzero.weights.copying import RUN_BYTES, BlockCopier, is_run, linear_pieces, segments
from dayzero.weights.decoding import Decoder
from dayzero.weights.files import sync_folder
from dayzero.weights.ledger import TensorHash, file_checksum, ledger_entry, source_range
from dayzero.weights.placement import StoredFile, StoredTensor
from dayzero.weights.reading import SourceReader

DONE_SUFFIX = ".done.json"
FLUSH_BYTES = 16 * MIB


class Stopped(Exception):
    """Another thread failed or the user interrupted: give up quietly."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Written:
    """What `<file>.done.json` holds. `sources`: checksums of source tensors that went by whole; `statistics`: of those that
    this file was the first to meet; `errors`: what quantization lost so far of the weights it stores, by run of rows."""

    __pydantic_config__ = STRICT
    file: ShardFile
    entries: tuple[LedgerEntry, ...]
    sources: dict[str, str] = field(default_factory=dict)
    statistics: dict[str, TensorStatistics] = field(default_factory=dict)
    errors: dict[str, dict[int, tuple[float, ...]]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class MadeSource:
    """A tensor that is made of whole stored tensors: decoded from its stored form, or computed by transformers' operation."""

    operation: str  # "dequantize:<form>", "computed:<operations>"
    sources: tuple[str, ...]
    shape: tuple[int, ...]

    @staticmethod
    def of(decoders: Mapping[str, Decoder]) -> dict[str, MadeSource]:
        """What decoders make, by the name of the source."""
        return {
            name: MadeSource(operation=one.operation, sources=one.sources, shape=one.shape) for name, one in decoders.items()
        }


def whole_sources(tensor: StoredTensor, reader: SourceReader, made: Mapping[str, MadeSource]) -> dict[str, int]:
    """Source tensors that pass through a stored tensor whole, as one run: their hash is that segment's."""
    found: dict[str, int] = {}
    for number, piece in enumerate(segments(tensor.view)):
        if piece is None or piece.offset or piece.source in made:
            continue
        if piece.num_elements == reader.entry(piece.source).num_elements:
            found.setdefault(piece.source, number)
    return found


def write_file(
    folder: Path, planned: StoredFile, copier: BlockCopier, reader: SourceReader, *,
    made: Mapping[str, MadeSource], advance: Callable[[int], None], stop: threading.Event,
    census: Callable[[str], TensorCensus | None] = lambda name: None,
    lost: Callable[[StoredFile], dict[str, dict[int, tuple[float, ...]]]] = lambda planned: {},
) -> Written:  # fmt: skip
    """Write one file of the artifact under construction in `folder`. `made`: sources that are no stored tensors; `census`:
    what looks at the values of a source tensor, once for each; `lost`: what quantization lost of a file's weights."""
    path = folder / planned.file
    path.parent.mkdir(parents=True, exist_ok=True)
    scrap = path.with_name(path.name + ".partial")
    entries: list[LedgerEntry] = []
    sources: dict[str, str] = {}
    statistics: dict[str, TensorStatistics] = {}
    try:
        with scrap.open("wb", buffering=0) as file:
            _write(file.fileno(), memoryview(planned.header))
            end = flushed = len(planned.header)
            for tensor in planned.tensors:
                digest = TensorHash(max(len(segments(tensor.view)), 1))
                whole = whole_sources(tensor, reader, made)
                watched = {segment: (source, one) for source, segment in whole.items() if (one := census(source)) is not None}
                for segment, block in copier.blocks(tensor.view):
                    if stop.is_set():
                        raise Stopped
                    digest.update(segment, block)
                    if segment in watched:
                        watched[segment][1].update(block)
                    _write(file.fileno(), block)
                    advance(len(block))
                    end += len(block)
                    if end - flushed >= FLUSH_BYTES:
                        flushed = _start_writeback(file.fileno(), flushed, end)
                entries.append(replace(describe_tensor(tensor, planned.file, reader, made), checksum=digest.checksum))
                for source, segment in whole.items():
                    sources.setdefault(source, digest.segment(segment))
                statistics.update({source: one.finish() for source, one in watched.values()})
            os.fsync(file.fileno())
        os.replace(scrap, path)
        sync_folder(path.parent)
        checksum = file_checksum(planned.header, (entry.checksum for entry in entries))
        shard = ShardFile(file=planned.file, num_bytes=planned.num_bytes, checksum=checksum)
        written = Written(file=shard, entries=tuple(entries), sources=sources, statistics=statistics, errors=lost(planned))
        write_text_atomic(done_path(folder, planned), json.dumps(record_json(written), separators=(",", ":")) + "\n")
        return written
    except OSError as error:
        raise DayZeroError(f"cannot write {planned.file}", got=error.strerror or str(error),
                           want=f"{planned.num_bytes} bytes on this disk",
                           fix="free space or raise the limit, then run convert again: it continues") from error  # fmt: skip
    finally:
        scrap.unlink(missing_ok=True)


def done_path(folder: Path, planned: StoredFile) -> Path:
    return folder / (planned.file + DONE_SUFFIX)


def finished(folder: Path, planned: StoredFile, stop: threading.Event) -> Written | None:
    """The fragment of a file that an earlier run finished, when its bytes are still what the fragment says."""
    path, marker = folder / planned.file, done_path(folder, planned)
    if not path.is_file() or not marker.is_file():
        return None
    written = read_record(Written, marker)
    if path.stat().st_size != planned.num_bytes or [e.parameter for e in written.entries] != [
        t.parameter for t in planned.tensors
    ]:
        return None
    return written if checksums_on_disk(path, planned, stop) == [entry.checksum for entry in written.entries] else None


def checksums_on_disk(path: Path, planned: StoredFile, stop: threading.Event | None = None) -> list[str]:
    """The tensors' checksums recomputed from the file; the first is wrong when the header is."""
    found = []
    with path.open("rb", buffering=0) as file:
        header_is_right = file.read(len(planned.header)) == planned.header
        for tensor in planned.tensors:
            lengths = [tensor.num_bytes]
            pieces = linear_pieces(tensor.view)
            if all(is_run(piece) for piece in pieces):
                lengths = [piece.num_elements * (tensor.num_bytes // max(tensor.view.num_elements, 1)) for piece in pieces]
            found.append(hash_runs(file.fileno(), tensor.offset, lengths, stop))
    return found if header_is_right else ["header"]


def hash_runs(handle: int, offset: int, lengths: list[int], stop: threading.Event | None = None) -> str:
    """The checksum of bytes of a file that consist of runs of these lengths."""
    digest = TensorHash(max(len(lengths), 1))
    buffer = memoryview(bytearray(min(RUN_BYTES, max(lengths, default=1) or 1)))
    for number, length in enumerate(lengths):
        done = 0
        while done < length:
            if stop is not None and stop.is_set():
                raise Stopped
            count = os.preadv(handle, [buffer[: min(len(buffer), length - done)]], offset + done)
            if not count:
                return "truncated"
            digest.update(number, buffer[:count])
            done += count
        offset += length
    return digest.checksum


def describe_tensor(tensor: StoredTensor, file: str, reader: SourceReader, made: Mapping[str, MadeSource]) -> LedgerEntry:
    """The ledger line of a tensor, its checksum still empty."""
    ranges = []
    for piece in tensor.view.pieces:
        if piece.source not in made:
            entry = reader.entry(piece.source)
            ranges.append(source_range(piece, tensor.view, entry.shape, entry.file))
            continue
        origin = made[piece.source]
        part = source_range(piece, tensor.view, origin.shape, "")
        for name in origin.sources:
            entry = reader.entry(name)
            whole = tuple((0, size) for size in entry.shape)
            ranges.append(SourceRange(tensor=name, file=entry.file, box=whole, transforms=(origin.operation, *part.transforms),
                                      into=part.into))  # fmt: skip
    return ledger_entry(tensor, file, "", tuple(ranges))


def _start_writeback(handle: int, start: int, end: int) -> int:
    """Have the kernel begin writing these bytes out, so that the sync at the file's end finds little left to do.

    The advice drops pages that are clean; these are not yet, so they stay cached. Returns `end`.
    """
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(handle, start, end - start, os.POSIX_FADV_DONTNEED)
    return end


def _write(handle: int, block: memoryview) -> None:
    while block:
        block = block[os.write(handle, block[:RUN_BYTES]) :]


def hash_source(
    reader: SourceReader, name: str, stop: threading.Event, advance: Callable[[int], None], census: TensorCensus | None = None
) -> str:
    """The checksum of one source tensor, read by itself; `census` sees it pass."""
    total = reader.entry(name).num_bytes
    digest = TensorHash(1)
    buffer = memoryview(bytearray(min(RUN_BYTES, max(total, 1))))
    for start in range(0, total, RUN_BYTES):
        if stop.is_set():
            raise Stopped
        block = buffer[: min(RUN_BYTES, total - start)]
        reader.read_stored(name, start, block)
        digest.update(0, block)
        if census is not None:
            census.update(block)
        advance(len(block))
    return digest.checksum
