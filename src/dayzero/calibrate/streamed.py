"""The class's own uncached forward over many sequences, with one layer's weights in memory.

Each chunk of sequences runs the model's forward in a thread of its own, one thread at a time. A forward that reaches a
station (a decoder layer, the embedding, the head) waits there until all the others have come; then the station's weights are
read, it runs for one chunk after another, and the weights are let go. What a forward keeps between layers (masks, rotary
tables, side outputs, whatever the class does) stays in its own frames: nothing is sliced, recorded or imitated, so that any
architecture that has a forward can be run so. Large outputs of layers lie in a file while their forward waits.

Everything is float32. Not here: caches, generation.
"""

from __future__ import annotations

import mmap
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from dayzero.calibrate.skeleton import Provider, Skeleton

# Smaller results of a layer are kept in memory.
SPILL_BYTES = 2**20

# What runs a station for the chunks that wait at it: results in the order of the calls.
Visit = Callable[[str, Sequence["Call"]], Sequence[Any]]


class Abandoned(BaseException):
    """Ends the thread of a chunk whose run is given up. No error of its own, and no `except Exception` swallows it."""


@dataclass(slots=True)
class Call:
    """A chunk's forward waiting at a station. `run` is the station's own forward on its own arguments."""

    chunk: int
    station: str
    forward: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def run(self) -> Any:
        return self.forward(*self.args, **self.kwargs)


@dataclass(slots=True)
class _Chunk:
    tokens: torch.Tensor
    go: threading.Event = field(default_factory=threading.Event)
    back: threading.Event = field(default_factory=threading.Event)
    call: Call | None = None
    result: Any = None
    logits: torch.Tensor | None = None
    error: BaseException | None = None
    thread: threading.Thread | None = None
    ended: bool = False


class StreamedRun:
    """One forward of a model over chunks of token ids, each [sequences, T]. A context manager: leaving it ends all threads.

    `advance` moves every chunk by one station, `finish` takes one chunk to its logits. `spill`: a folder for layer outputs.
    """

    def __init__(self, skeleton: Skeleton, provider: Provider, chunks: Sequence[torch.Tensor], *, visit: Visit | None = None,
                 spill: Path | None = None) -> None:  # fmt: skip
        self.skeleton, self.provider, self._visit, self._spill = skeleton, provider, visit, spill
        self._chunks = [_Chunk(tokens=tokens) for tokens in chunks]
        self._local = threading.local()
        self._forwards: dict[str, Callable[..., Any]] = {}
        self._abandoned = False
        self._filled_head = False  # the head is filled from its first chunk to its last
        self._embedding_filled = False

    def __enter__(self) -> StreamedRun:
        for name, station in self.skeleton.stations.items():
            self._forwards[name] = station.forward
            station.forward = self._waiting(name)
        for number, chunk in enumerate(self._chunks):
            chunk.thread = threading.Thread(target=self._work, args=(number,), daemon=True)
        return self

    def __exit__(self, *_: object) -> None:
        self._abandoned = True
        for chunk in self._chunks:
            if chunk.thread is not None and chunk.thread.is_alive() and not chunk.ended:
                chunk.go.set()
                chunk.thread.join()
        if self._embedding_filled:
            self._empty_embedding()
        if self._filled_head and self.skeleton.head is not None:
            self.skeleton.empty(self.skeleton.head)
        for name, station in self.skeleton.stations.items():
            station.forward = self._forwards[name]
            vars(station).pop("forward", None)

    @property
    def waiting(self) -> dict[str, list[int]]:
        """Chunks that wait at each station."""
        places: dict[str, list[int]] = {}
        for number, chunk in enumerate(self._chunks):
            if chunk.call is not None:
                places.setdefault(chunk.call.station, []).append(number)
        return places

    def start(self) -> None:
        """Every chunk to its first station."""
        if self.skeleton.embedding is not None:
            self.skeleton.fill(self.skeleton.embedding, self.provider)
            self._embedding_filled = True
        for number, chunk in enumerate(self._chunks):
            if chunk.thread is not None and not chunk.thread.is_alive() and not chunk.ended:
                self._resume(number)

    def advance(self) -> bool:
        """One station for all chunks that wait there; False when none wait, or all do at the head."""
        places = self.waiting
        if not places or set(places) == {self.skeleton.head}:
            return False
        # Forwards of one model take the same way: there is one place, unless shapes differ.
        station, numbers = next(item for item in places.items() if item[0] != self.skeleton.head)
        self._run_station(station, numbers)
        return True

    def finish(self, number: int) -> torch.Tensor:
        """Logits [sequences, T, vocabulary] of a chunk, which are not kept."""
        chunk = self._chunks[number]
        while chunk.call is not None:
            self._run_station(chunk.call.station, [number])
        logits, chunk.logits = chunk.logits, None
        assert logits is not None, "a chunk has its logits once"
        return logits

    def _run_station(self, station: str, numbers: Sequence[int]) -> None:
        calls = [call for number in numbers if (call := self._chunks[number].call) is not None]
        head = station == self.skeleton.head
        if not (head and self._filled_head):
            self.skeleton.fill(station, self.provider)
        self._filled_head = head or self._filled_head
        try:
            with torch.no_grad():
                if self._visit is not None and not head:
                    for number, result in zip(numbers, self._visit(station, calls), strict=True):
                        self._hand_over(number, result)
                else:
                    for number, call in zip(numbers, calls, strict=True):
                        self._hand_over(number, call.run())
        finally:
            if not head:
                self.skeleton.empty(station)
        if head and all(chunk.ended or chunk is self._chunks[numbers[-1]] for chunk in self._chunks):
            self.skeleton.empty(station)
            self._filled_head = False
        if self._embedding_filled:
            self._empty_embedding()
        for number in numbers:
            self._resume(number)

    def _empty_embedding(self) -> None:
        if self.skeleton.embedding is not None:
            self.skeleton.empty(self.skeleton.embedding)
        self._embedding_filled = False

    def _hand_over(self, number: int, result: Any) -> None:
        chunk = self._chunks[number]
        assert chunk.call is not None
        last = chunk.call.station == self.skeleton.head
        chunk.result = result if self._spill is None or last else _spilled(result, self._spill)
        chunk.call = None

    def _resume(self, number: int) -> None:
        """Let a chunk's forward go on to its next station, or its end. Only then anything else goes on."""
        chunk = self._chunks[number]
        chunk.back.clear()
        assert chunk.thread is not None
        if chunk.thread.ident is None:
            chunk.thread.start()
        else:
            chunk.go.set()
        chunk.back.wait()
        if chunk.error is not None:
            error, chunk.error = chunk.error, None
            raise error

    # In the chunks' threads.

    def _work(self, number: int) -> None:
        chunk = self._chunks[number]
        self._local.number = number
        try:
            with torch.no_grad():
                chunk.logits = self.skeleton.module(input_ids=chunk.tokens, use_cache=False).logits
        except Abandoned:
            pass
        except BaseException as error:
            chunk.error = error
        finally:
            chunk.ended = True
            chunk.back.set()

    def _waiting(self, station: str) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            number = getattr(self._local, "number", None)
            if number is None:  # a station inside another: run by the main thread
                return self._forwards[station](*args, **kwargs)
            chunk = self._chunks[number]
            chunk.call = Call(number, station, self._forwards[station], args, kwargs)
            del args, kwargs
            chunk.go.clear()
            chunk.back.set()
            chunk.go.wait()
            if self._abandoned:
                raise Abandoned
            result, chunk.result = chunk.result, None
            return result

        return forward


def run_streamed(skeleton: Skeleton, provider: Provider, chunks: Sequence[torch.Tensor], *, visit: Visit | None = None,
                 consume: Callable[[int, torch.Tensor], None] | None = None, spill: Path | None = None) -> None:  # fmt: skip
    """All chunks through the model; `consume` gets each chunk's logits. Without it the last stations are left out."""
    with StreamedRun(skeleton, provider, chunks, visit=visit, spill=spill) as run:
        run.start()
        while run.advance():
            pass
        for number in range(len(chunks) if consume is not None else 0):
            assert consume is not None
            consume(number, run.finish(number))


def lockstep(runs: Sequence[StreamedRun]) -> None:
    """Several runs to their heads, station by station together, so that what is read for one layer serves all of them."""
    for run in runs:
        run.start()
    while sum(run.advance() for run in runs):  # every one of them, whatever the others said
        pass


def split_chunks(tokens: torch.Tensor, sequences: int) -> list[torch.Tensor]:
    """[B, T] into chunks of at most so many sequences, all but the last of that size."""
    return list(tokens.split(sequences))


def _spilled(value: Any, folder: Path) -> Any:
    """The same nested value with its large tensors in files that nobody else can see. Their pages are the system's to keep."""
    if isinstance(value, torch.Tensor):
        size = value.numel() * value.element_size()
        return value if size < SPILL_BYTES or value.device.type != "cpu" else _in_file(value, size, folder)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_spilled(item, folder) for item in value))
    if type(value) in (tuple, list):
        return type(value)(_spilled(item, folder) for item in value)
    return value


def _in_file(value: torch.Tensor, size: int, folder: Path) -> torch.Tensor:
    with tempfile.TemporaryFile(dir=folder) as file:
        file.truncate(size)
        pages = mmap.mmap(file.fileno(), size)
    kept = torch.frombuffer(pages, dtype=value.dtype).view(value.shape)
    kept.copy_(value)
    if hasattr(mmap, "MADV_DONTNEED"):
        pages.madvise(mmap.MADV_DONTNEED)  # of a shared file: out of this process, not lost
    return kept
