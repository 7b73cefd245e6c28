"""Named tensors in, their bytes out: straight from a file, decoded from a stored form, or computed by an operation.

Files are read through a `ByteStore` (a folder here, an object store elsewhere) by ranges into memory that is given, never
through a mapping: mapped pages would count as the process's memory. Everything is safe to call from several threads.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Protocol

import numpy as np

from dayzero.core.errors import DayZeroError
from dayzero.model.headers import TensorEntry
from dayzero.weights.decoding import Decoder
from dayzero.weights.ledger import SourceFile

# Rows that are decoded at a time: enough that each call of torch does much, little enough to stay in the caches.
DECODE_BYTES = 4 * 2**20


class UnsoundSource(DayZeroError):
    """What is stored cannot be right: no second try will do better, and nothing made of it is worth keeping."""


class ReadFailure(DayZeroError):
    """A file or object could not be read: another try may."""


class ByteStore(Protocol):
    """Files of one place, read by ranges from several threads."""

    def read_into(self, file: str, offset: int, target: memoryview) -> None:
        """Fill `target` with the file's bytes from `offset` on. Raises DayZeroError naming the file where it cannot, also
        when the file has changed since it was first looked at."""

    def states(self, files: Iterable[str]) -> list[SourceFile]:
        """What tells whether a file is still the same, without reading it."""

    def close(self) -> None:
        """Give back what is open. Reading afterwards opens it again."""


class LocalStore:
    """A folder. Files are opened once and shared by all threads."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._handles: dict[str, int] = {}
        self._lock = threading.Lock()

    def read_into(self, file: str, offset: int, target: memoryview) -> None:
        handle, done = self._open(file), 0
        while done < len(target):
            try:
                count = os.preadv(handle, [target[done:]], offset + done)
            except OSError as error:
                raise DayZeroError(f"cannot read {file}", got=error.strerror or str(error),
                                   want=f"bytes {offset} to {offset + len(target)}",
                                   fix="check the disk") from error  # fmt: skip
            if count == 0:
                raise DayZeroError(f"{file} ends early", got=f"{offset + done} bytes",
                                   want=f"{offset + len(target)} bytes",
                                   fix="the file changed while it was read: download it again")  # fmt: skip
            done += count

    def states(self, files: Iterable[str]) -> list[SourceFile]:
        found = ((file, (self.folder / file).stat()) for file in files)
        return [SourceFile(file=file, num_bytes=status.st_size, modified_ns=status.st_mtime_ns) for file, status in found]

    def close(self) -> None:
        with self._lock:
            for handle in self._handles.values():
                os.close(handle)
            self._handles.clear()

    def _open(self, file: str) -> int:
        with self._lock:
            if file not in self._handles:
                self._handles[file] = os.open(self.folder / file, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
            return self._handles[file]


class SourceReader:
    """Bytes of named tensors. A name is looked for among decoders, then stored tensors, then computed ones."""

    def __init__(
        self, store: ByteStore, tensors: Mapping[str, TensorEntry], *,
        decoders: Mapping[str, Decoder] | None = None, compute: Callable[[str], dict[str, np.ndarray]] | None = None,
    ) -> None:  # fmt: skip
        """`compute` gives all tensors of the group that a computed source belongs to; the last group is kept."""
        self.store, self._tensors, self.decoders, self._compute = store, tensors, decoders or {}, compute
        self._computed: dict[str, memoryview] = {}
        self._lock, self._compute_lock, self._local = threading.Lock(), threading.Lock(), threading.local()
        self.bytes_read = 0

    def __enter__(self) -> SourceReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.store.close()
        self._computed.clear()

    def entry(self, stored: str) -> TensorEntry:
        return self._tensors[stored]

    def read_into(self, source: str, offset: int, target: memoryview) -> None:
        """Fill `target` with the tensor's bytes from `offset` on."""
        if source in self.decoders:
            self._decode_into(self.decoders[source], offset, target)
        elif source in self._tensors:
            self.read_stored(source, offset, target)
        else:
            data = self._compute_once(source)
            target[:] = data[offset : offset + len(target)]

    def read_stored(self, name: str, offset: int, target: memoryview) -> None:
        """The same of a tensor as it is stored, whatever it stands for."""
        entry = self._tensors[name]
        assert offset + len(target) <= entry.num_bytes, (name, offset, len(target), entry)
        try:
            self.store.read_into(entry.file, entry.begin + offset, target)
        except DayZeroError as error:
            raise ReadFailure(f"{error.what}, inside {name}", got=error.got, want=error.want, fix=error.fix) from error
        with self._lock:
            self.bytes_read += len(target)

    def _decode_into(self, decoder: Decoder, offset: int, target: memoryview) -> None:
        row_bytes = decoder.num_bytes // max(decoder.rows, 1)
        step = decoder.row_step
        per = max(step, DECODE_BYTES // max(row_bytes + decoder.work_bytes, 1) // step * step)
        done = 0
        while done < len(target):
            start = (offset + done) // row_bytes // per * per
            block = self._rows(decoder, start, min(start + per, decoder.rows))
            at = offset + done - start * row_bytes
            count = min(len(target) - done, len(block) - at)
            target[done : done + count] = block[at : at + count]
            done += count

    def _rows(self, decoder: Decoder, start: int, stop: int) -> memoryview:
        """Decoded rows; each thread keeps the last ones, as the next read most often goes on there."""
        kept = getattr(self._local, "rows", None)
        if kept is None or kept[0] != (decoder.name, start, stop):
            import torch

            try:
                made = decoder.decode(self._read_some, start, stop)
            except DayZeroError as error:
                if isinstance(error, (ReadFailure, UnsoundSource)):
                    raise
                raise UnsoundSource(error.what, got=error.got, want=error.want, fix=error.fix) from error
            assert tuple(made.shape) == (stop - start, decoder.columns), (decoder.name, made.shape, start, stop)
            data = made.contiguous().reshape(-1).view(torch.uint8).numpy().data
            self._local.rows = kept = ((decoder.name, start, stop), data)
        return kept[1]

    def _read_some(self, name: str, offset: int, num_bytes: int) -> memoryview:
        data = memoryview(bytearray(num_bytes))
        self.read_stored(name, offset, data)
        return data

    def _compute_once(self, source: str) -> memoryview:
        with self._compute_lock:  # one group in memory at a time
            if source not in self._computed:
                assert self._compute is not None, source
                self._computed = {}
                self._computed = {
                    name: np.ascontiguousarray(made).reshape(-1).view(np.uint8).data
                    for name, made in self._compute(source).items()
                }
            return self._computed[source]
