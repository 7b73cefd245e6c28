"""An address in, a `ByteStore` that fetches ahead out: blocks of a few MiB, kept within a bounded memory.

Who reads in order, or has said what will be read (`expect`), finds the next blocks there or on their way, so that download and
conversion overlap. Blocks follow the tensors' bounds (`arrange`): a tensor that is read by itself costs its own bytes only.
Nothing touches the disk unless a `spool` is given; then what is wanted again after it left the memory is read from there, and
each byte crosses the network once whatever the layout. Not here: what a request is, trying again (`model.remote`).
"""

from __future__ import annotations

import bisect
import contextlib
import os
import threading
from collections import OrderedDict
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from dayzero.core.errors import DayZeroError
from dayzero.core.units import MIB
from dayzero.model.headers import TensorEntry
from dayzero.model.remote.objects import ObjectFolder
from dayzero.weights.ledger import SourceFile

# A block takes far longer to send than a request to answer: 8 MiB are 70 ms at 1 Gbit/s, against some 20 to 100 ms.
BLOCK_BYTES = 8 * MIB
MEMORY_BYTES = 256 * MIB
FIRST_AHEAD = 1  # blocks ahead of a reader that has just begun to read in order; doubled with each block it goes on

Key = tuple[str, int]  # file, number of the block


@dataclass(kw_only=True, slots=True)
class _Block:
    num_bytes: int
    data: Future[memoryview] = field(default_factory=Future)
    was_read: bool = False


@dataclass(kw_only=True, slots=True)
class _Reading:
    """How far one thread is in one file."""

    last: int
    ahead: int = 0


class FsspecStore:
    """A `ByteStore` over an address, with read-ahead. Use it as a context: it holds threads and connections."""

    def __init__(
        self, objects: ObjectFolder | str, *,
        block_bytes: int = BLOCK_BYTES, memory_bytes: int = MEMORY_BYTES, prefetch: bool = True, spool: Path | None = None,
    ) -> None:  # fmt: skip
        """memory_bytes: of all blocks held. A block that a reader waits for is fetched even when they are used up.
        spool: a folder of this store's own for what was fetched; the caller removes it."""
        self.objects = ObjectFolder(objects) if isinstance(objects, str) else objects
        self._block_bytes, self._memory_bytes, self._prefetch = block_bytes, memory_bytes, prefetch
        self._spool, self._spooled = spool, set[Key]()
        self._bounds: dict[str, list[int]] = {}
        self._blocks: OrderedDict[Key, _Block] = OrderedDict()  # the one read least recently first
        self._held_bytes = 0
        self._readings: dict[tuple[int, str], _Reading] = {}
        self._expected: dict[int, tuple[list[Key], int]] = {}  # by thread: blocks in the order they will be read
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(self.objects.connections, thread_name_prefix="fetch")

    def __enter__(self) -> FsspecStore:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
        with self._lock:
            for block in self._blocks.values():
                if not block.data.done():  # it was queued: nobody may wait for it for ever
                    block.data.set_exception(RuntimeError("the store was closed"))
        self.close()
        self.objects.close()

    @property
    def bytes_fetched(self) -> int:
        return self.objects.bytes_fetched

    def arrange(self, tensors: Iterable[TensorEntry]) -> None:
        """Cut files where tensors end: what is read together is fetched together, and nothing else with it."""
        spans: dict[str, list[tuple[int, int]]] = {}
        for entry in tensors:
            spans.setdefault(entry.file, []).append((entry.begin, entry.end))
        for file, found in spans.items():
            found.sort()
            bounds = [0, found[0][0]] if found[0][0] else [0]  # what lies before the first tensor was read already
            for begin, end in found:
                if end - bounds[-1] <= self._block_bytes:
                    continue  # small neighbours share a block
                if begin > bounds[-1]:
                    bounds.append(begin)
                bounds += range(bounds[-1] + self._block_bytes, end, self._block_bytes)
            self._bounds[file] = bounds

    def states(self, files: Iterable[str]) -> list[SourceFile]:
        files = list(files)
        found = zip(files, self.objects.states(files), strict=True)
        return [SourceFile(file=file, num_bytes=state.num_bytes, version=state.version) for file, state in found]

    def read_into(self, file: str, offset: int, target: memoryview) -> None:
        size = self.objects.state(file).num_bytes
        if offset + len(target) > size:
            raise DayZeroError(f"{self.objects.shown(file)} ends early", got=f"{size} bytes",
                               want=f"{offset + len(target)} bytes", fix="upload it again")  # fmt: skip
        bounds = self._bounds_of(file, size)
        number, done = bisect.bisect_right(bounds, offset) - 1, 0
        while done < len(target):
            data, at = self._block(file, number), offset + done - bounds[number]
            count = min(len(target) - done, len(data) - at)
            target[done : done + count] = data[at : at + count]
            done, number = done + count, number + 1

    def expect(self, ranges: Iterable[tuple[str, int, int]]) -> None:
        """What this thread is going to read, in order: (file, begin, end). It is then fetched ahead across gaps and files."""
        keys: list[Key] = []
        for file, begin, end in ranges:
            bounds = self._bounds_of(file, self.objects.state(file).num_bytes)
            first, last = bisect.bisect_right(bounds, begin) - 1, bisect.bisect_left(bounds, end) - 1
            keys += [(file, number) for number in range(first, last + 1) if not keys or keys[-1] != (file, number)]
        with self._lock:
            self._expected[threading.get_ident()] = (keys, 0)
            self._fetch_ahead(keys[: self._deepest()])

    def close(self) -> None:
        """Let go of the blocks in memory. Whoever is reading goes on."""
        with self._lock:
            for key in [key for key, block in self._blocks.items() if block.data.done()]:
                self._drop(key)
            self._readings.clear()
            self._expected.clear()

    def _bounds_of(self, file: str, size: int) -> list[int]:
        if file not in self._bounds:
            self._bounds[file] = list(range(0, max(size, 1), self._block_bytes))
        return self._bounds[file]

    def _block(self, file: str, number: int) -> memoryview:
        key = (file, number)
        with self._lock:
            block = self._blocks.get(key)
            mine = block is None
            if block is None:
                block = self._add(key, needed=True)
                assert block is not None
            self._blocks.move_to_end(key)
            block.was_read = True
            if self._prefetch:
                self._fetch_ahead(self._next(file, number))
        if mine:
            self._load(key, block)  # in this thread, which has nothing else to do: never behind what is only guessed
        try:
            return block.data.result()
        except BaseException:
            with self._lock:  # asked for again, it is fetched again
                if self._blocks.get(key) is block:
                    self._drop(key)
            raise

    def _next(self, file: str, number: int) -> list[Key]:
        """Blocks that this thread will want after this one, as far as it can be known."""
        thread = threading.get_ident()
        expected = self._expected.get(thread)
        if expected is not None:
            keys, at = expected
            with contextlib.suppress(ValueError):  # read in another order, as of parts that interleave
                at = keys.index((file, number), at, at + 2 * self._deepest())
                self._expected[thread] = (keys, at)
                return keys[at + 1 : at + 1 + self._deepest()]
        reading = self._readings.setdefault((thread, file), _Reading(last=number, ahead=FIRST_AHEAD if number == 0 else 0))
        if number == reading.last + 1:
            reading.ahead = min(max(FIRST_AHEAD, 2 * reading.ahead), self._deepest())
        elif number != reading.last:
            reading.ahead = 0
        reading.last = number
        end = min(number + 1 + reading.ahead, len(self._bounds[file]))
        return [(file, one) for one in range(number + 1, end)]

    def _deepest(self) -> int:
        """Blocks ahead of one reader: all connections busy, and the memory shared between the readers."""
        fair = self._memory_bytes // self._block_bytes // max(2, len(self._expected) + 1)
        return max(1, min(self.objects.connections, fair - 1))

    def _fetch_ahead(self, keys: Iterable[Key]) -> None:
        for key in keys:
            if key not in self._blocks and (block := self._add(key, needed=False)) is not None:
                self._pool.submit(self._load, key, block)

    def _add(self, key: Key, *, needed: bool) -> _Block | None:
        """Room for one more block: those read longest ago make it. None where there is none and it can wait."""
        bounds, number = self._bounds[key[0]], key[1]
        end = bounds[number + 1] if number + 1 < len(bounds) else self.objects.state(key[0]).num_bytes
        block = _Block(num_bytes=end - bounds[number])
        if self._held_bytes + block.num_bytes > self._memory_bytes:
            ready = [(old, one.was_read) for old, one in self._blocks.items() if one.data.done()]
            # What was fetched and not read yet goes last, and only for what a reader waits for.
            for old in [old for old, was_read in ready if was_read] + [
                old for old, was_read in ready if needed and not was_read
            ]:
                self._drop(old)
                if self._held_bytes + block.num_bytes <= self._memory_bytes:
                    break
            else:
                if not needed:
                    return None
        self._blocks[key] = block
        self._held_bytes += block.num_bytes
        return block

    def _drop(self, key: Key) -> None:
        self._held_bytes -= self._blocks.pop(key).num_bytes

    def _load(self, key: Key, block: _Block) -> None:
        try:
            data = memoryview(bytearray(block.num_bytes))
            if self._spool is None:
                self.objects.read_into(key[0], self._bounds[key[0]][key[1]], data)
            else:
                self._load_through(self._spool / key[0], key, data)
            block.data.set_result(data)
        except BaseException as error:  # whoever waits for the block is told
            block.data.set_exception(error)

    def _load_through(self, place: Path, key: Key, data: memoryview) -> None:
        start = self._bounds[key[0]][key[1]]
        place.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(place, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            if key in self._spooled and os.preadv(handle, [data], start) == len(data):
                return
            self.objects.read_into(key[0], start, data)
            if os.pwrite(handle, data, start) == len(data):
                self._spooled.add(key)
        finally:
            os.close(handle)
