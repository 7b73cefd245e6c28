"""Planned files in, files on disk out: several threads, each with its own buffers, stopped together on the first failure.

What an earlier run finished is re-read and kept. Checksums of source tensors that never passed by whole are made last.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from pathlib import Path

from dayzero.core.errors import DayZeroError
from dayzero.core.records import from_dict, to_dict, write_text_atomic
from dayzero.core.runstore import free_bytes
from dayzero.core.units import MIB, format_bytes
from dayzero.weights.checks.census import TensorCensus, TensorStatistics
from dayzero.weights.copying import BlockCopier
from dayzero.weights.files import Progress
from dayzero.weights.placement import StoredFile
from dayzero.weights.places.publishing import Output
from dayzero.weights.quantize.evidence import ErrorSums
from dayzero.weights.reading import SourceReader
from dayzero.weights.writing import MadeSource, Stopped, Written, finished, hash_source, write_file

ROOM_BYTES = 64 * MIB  # ledgers, settings and the file system's own needs
HASHES_FILE = "sources.partial.jsonl"


class Copying:
    """Files handed to threads, then the hashes of sources that did not pass by whole (`hash_sources`)."""

    def __init__(
        self, work: Path, files: tuple[StoredFile, ...], reader: SourceReader, *,
        made: Mapping[str, MadeSource] | None = None, hash_sources: Iterable[str] = (),
        progress: Progress | None = None, workers: int = 2, output: Output | None = None,
        errors: Mapping[str, ErrorSums] | None = None,
    ) -> None:  # fmt: skip
        """`output`: where finished files go, if they are not simply to lie in `work`. `errors`: by stored name, where what its
        weight loses is summed up."""
        self._errors = errors or {}
        self.work, self.files, self.reader = work, files, reader
        self._made, self._hash_sources = made or {}, frozenset(hash_sources)
        self.bytes_written = 0
        self.source_checksums: dict[str, str] = {}
        self.statistics: dict[str, TensorStatistics] = {}  # of source tensors
        self._watched: set[str] = set()
        self._progress, self._workers, self._output = progress, max(1, workers), output
        self._stop, self._lock, self._local = threading.Event(), threading.Lock(), threading.local()
        self._done, self._total = 0, sum(file.num_bytes for file in files)

    def run(self) -> list[Written]:
        # Files that go elsewhere when they are finished: no more of them than threads lie here at a time.
        passing = self._output is not None and not self._output.keeps_files
        held = sorted(self.files, key=lambda file: file.num_bytes)[-self._workers :] if passing else self.files
        check_room(self.work, sum(f.num_bytes - _size(self.work / f.file) for f in held))
        with self.reader, ThreadPoolExecutor(self._workers, thread_name_prefix="convert") as pool:
            written = self._all(pool, [pool.submit(self._file, planned) for planned in self.files])
            for one in written:
                self.source_checksums.update(one.sources)
                self.statistics.update(one.statistics)
            self._hash_rest(pool)
        return written

    def _all(self, pool: ThreadPoolExecutor, futures: list[Future]) -> list:
        """Results in order; on the first failure, or when interrupted, everything else stops."""
        try:
            done, _ = wait(futures, return_when=FIRST_EXCEPTION)
        except BaseException:
            self._abandon(pool)
            raise
        failed = [future.exception() for future in done if not future.cancelled() and future.exception() is not None]
        if failed:
            self._abandon(pool)
            raise next((error for error in failed if not isinstance(error, Stopped)), failed[0])  # type: ignore[misc]
        return [future.result() for future in futures]

    def _abandon(self, pool: ThreadPoolExecutor) -> None:
        self._stop.set()
        pool.shutdown(wait=True, cancel_futures=True)

    def _file(self, planned: StoredFile) -> Written:
        output = self._output
        earlier = finished(self.work, planned, self._stop) if output is None else output.finished(planned, self._stop)
        if earlier is not None:
            self._advance(planned.num_bytes, written=False)
            for name, runs in earlier.errors.items():
                if name in self._errors:
                    self._errors[name].restore(runs)
            return earlier
        self._announce(source_ranges(planned, self.reader, self._made))
        written = write_file(self.work, planned, self._copier(), self.reader, made=self._made, stop=self._stop,
                             advance=self._advance, census=self._census, lost=self._lost)  # fmt: skip
        if output is not None:
            output.store(planned, written)
        return written

    def _lost(self, planned: StoredFile) -> dict[str, dict[int, tuple[float, ...]]]:
        names = (tensor.parameter for tensor in planned.tensors)
        return {name: self._errors[name].runs for name in names if name in self._errors and self._errors[name].runs}

    def _announce(self, ranges: Iterable[tuple[str, int, int]]) -> None:
        """Tell a store that fetches ahead what this thread is going to read; a folder has no use for it."""
        expect = getattr(self.reader.store, "expect", None)
        if expect is not None:
            expect(ranges)

    def _census(self, name: str) -> TensorCensus | None:
        """What looks at a source tensor's values, for the first who asks: a replica need not be looked at again."""
        with self._lock:
            if name in self._watched:
                return None
            self._watched.add(name)
        entry = self.reader.entry(name)
        return TensorCensus(name, entry.dtype, entry.shape)

    def _copier(self) -> BlockCopier:
        if not hasattr(self._local, "copier"):
            self._local.copier = BlockCopier(self.reader)
        return self._local.copier

    def _advance(self, num_bytes: int, written: bool = True) -> None:
        with self._lock:
            self._done += num_bytes
            self.bytes_written += num_bytes if written else 0
            if self._progress:
                self._progress("converting", self._done, self._total)

    def _hash_rest(self, pool: ThreadPoolExecutor) -> None:
        """Sources cut between ranks or moved in pieces never passed by whole: they are read once more."""
        store = self.work / HASHES_FILE
        if store.exists():
            lines = [line for line in store.read_text(encoding="utf-8").splitlines() if _is_whole(line)]
            for line in lines:
                name, checksum, statistics = json.loads(line)
                self.source_checksums[name] = checksum
                self.statistics[name] = from_dict(TensorStatistics, statistics, source=HASHES_FILE)
            write_text_atomic(store, "".join(line + "\n" for line in lines))
        rest = sorted(self._hash_sources - set(self.source_checksums), key=lambda name: (self.reader.entry(name).file, name))
        self._total += sum(self.reader.entry(name).num_bytes for name in rest)

        def hash_one(name: str) -> None:
            entry = self.reader.entry(name)
            self._announce([(entry.file, entry.begin, entry.end)])
            census = TensorCensus(name, entry.dtype, entry.shape)
            checksum = hash_source(self.reader, name, self._stop, lambda count: self._advance(count, written=False), census)
            statistics = census.finish()
            with self._lock, store.open("a", encoding="utf-8") as file:
                self.source_checksums[name], self.statistics[name] = checksum, statistics
                file.write(json.dumps([name, checksum, to_dict(statistics)]) + "\n")

        self._all(pool, [pool.submit(hash_one, name) for name in rest])


def source_ranges(
    planned: StoredFile, reader: SourceReader, made: Mapping[str, MadeSource]
) -> Iterator[tuple[str, int, int]]:  # fmt: skip
    """(file, begin, end) of the source bytes behind a file, in the order of its tensors; gaps within a range are not told."""
    for tensor in planned.tensors:
        for piece in sorted(tensor.view.pieces, key=lambda piece: piece.base):
            if (decoder := reader.decoders.get(piece.source)) is not None:
                yield from ((entry.file, entry.begin, entry.end) for entry in map(reader.entry, decoder.sources))
            elif piece.source not in made:
                entry = reader.entry(piece.source)
                size = entry.num_bytes // max(entry.num_elements, 1)
                last = piece.offset + sum((digit.size - 1) * digit.stride for digit in piece.digits)
                yield entry.file, entry.begin + piece.offset * size, entry.begin + (last + 1) * size


def _is_whole(line: str) -> bool:
    """Whether a line was not cut by a crash: what it was of is hashed again then."""
    try:
        return len(json.loads(line)) == 3
    except (ValueError, TypeError):
        return False


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


def check_room(work: Path, needed: int) -> None:
    free = free_bytes(work)
    if free < needed + ROOM_BYTES:
        raise DayZeroError(f"not enough space for the artifact beside {work.parent}", got=f"{format_bytes(free)} free",
                           want=format_bytes(needed + ROOM_BYTES), fix="free space or choose another --out")  # fmt: skip
