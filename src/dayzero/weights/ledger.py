"""The records of conservation: what each stored tensor is made of, and what became of each source tensor.

`ledger.jsonl` (one per rank) has a `LedgerEntry` a line, `sources.jsonl` a `SourceTensor` a line. A checksum is
`sha256:<hex>` of a tensor's bytes, or, for a tensor that consists of runs of several sources, `sha256-runs:<hex>`: the
sha256 of its runs' digests in order, so that a merged tensor and its parts are hashed in one pass. A file's is
`sha256-file:<hex>`: of its header and its tensors' checksums. A piece that is no plain box of its source is written as a
transform `strided:size,step,stride;...` with its offsets, from which every element can be placed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

from dayzero.core.artifact import LedgerEntry, SourceRange
from dayzero.core.errors import DayZeroError
from dayzero.core.records import STRICT, from_dict, to_dict
from dayzero.model.headers import TensorEntry
from dayzero.weights.algebra import Digit, Piece, View
from dayzero.weights.placement import StoredTensor

ALGORITHM = "sha256"  # of those in hashlib the fastest here together with blake2b; SHA instructions are near universal
SAME_BYTES = "the same bytes as "  # how the reason of a tied tensor begins that is stored twice


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceTensor:
    """One tensor of the checkpoint. `dropped` says why it was left out (then its bytes were not read: no checksum), and
    `partly_used` why some of its elements reach no parameter (padding that a conversion cuts off)."""

    __pydantic_config__ = STRICT
    tensor: str
    file: str
    num_bytes: int
    dtype: str
    shape: tuple[int, ...]
    checksum: str
    dropped: str | None = None
    partly_used: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceFile:
    """A source file as it was when it was read: a changed one is noticed without reading it again."""

    __pydantic_config__ = STRICT
    file: str
    num_bytes: int
    modified_ns: int | None = None  # of a local file
    version: str | None = None  # of an object: its ETag or generation


class TensorHash:
    """Checksums of one stored tensor and of its runs, fed block by block."""

    def __init__(self, num_segments: int) -> None:
        self._segments = [hashlib.new(ALGORITHM) for _ in range(num_segments)]

    def update(self, segment: int, block: memoryview) -> None:
        self._segments[segment].update(block)

    def segment(self, index: int) -> str:
        return f"{ALGORITHM}:{self._segments[index].hexdigest()}"

    @property
    def checksum(self) -> str:
        if len(self._segments) == 1:
            return self.segment(0)
        return runs_checksum(digest.digest() for digest in self._segments)


def runs_checksum(digests: Iterable[bytes]) -> str:
    return f"{ALGORITHM}-runs:{hashlib.new(ALGORITHM, b''.join(digests)).hexdigest()}"


def file_checksum(header: bytes, checksums: Iterable[str]) -> str:
    digest = hashlib.new(ALGORITHM, header)
    for checksum in checksums:
        digest.update(b"\n" + checksum.encode())
    return f"{ALGORITHM}-file:{digest.hexdigest()}"


def ledger_entry(tensor: StoredTensor, file: str, checksum: str, sources: tuple[SourceRange, ...]) -> LedgerEntry:
    return LedgerEntry(parameter=tensor.parameter, file=file, offset=tensor.offset, num_bytes=tensor.num_bytes,
                       shape=tensor.shape, dtype=tensor.dtype, checksum=checksum, sources=sources)  # fmt: skip


def source_range(piece: Piece, view: View, shape: tuple[int, ...], file: str) -> SourceRange:
    """A piece as boxes of source and target; with the exact loop nest as a transform where boxes do not say it all."""
    into = tuple((piece.base[dim], piece.base[dim] + piece.extent(dim) + 1) for dim in range(len(view.shape)))
    box = source_box(piece, shape)
    casts = tuple(f"cast:{dtype}" for dtype in piece.casts)
    moved: tuple[str, ...] = ()
    if not _is_plain(piece, box, into, shape):
        nest = ";".join(f"{digit.dim}:{digit.size},{digit.step},{digit.stride}" for digit in piece.digits)
        moved = (f"strided:{piece.offset}:{nest}",)
    return SourceRange(tensor=piece.source, file=file, box=box, transforms=(*moved, *casts), into=into)


def source_box(piece: Piece, shape: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """The smallest box of the source that holds all elements of the piece: the piece read the other way round."""
    inverse = Piece(piece.source, piece.dtype, 0, (piece.offset,), tuple(Digit(d.size, 0, d.stride, 0) for d in piece.digits))
    parts = View((prod(shape),), piece.dtype, (inverse,)).reshape(shape).pieces
    return tuple(
        (min(part.base[dim] for part in parts), max(part.base[dim] + part.extent(dim) + 1 for part in parts))
        for dim in range(len(shape))
    )


def _is_plain(
    piece: Piece, box: tuple[tuple[int, int], ...], into: tuple[tuple[int, int], ...], shape: tuple[int, ...]
) -> bool:
    """Whether reading the box row by row and writing `into` row by row is exactly what the piece does."""
    sizes = [stop - start for start, stop in box]
    if prod(sizes) != piece.num_elements or prod(stop - start for start, stop in into) != piece.num_elements:
        return False
    return piece_of_boxes(piece.source, piece.dtype, shape, box, into) == _ordered(piece)


def piece_of_boxes(
    source: str, dtype: str, shape: tuple[int, ...], box: tuple[tuple[int, int], ...], into: tuple[tuple[int, int], ...]
) -> Piece | None:
    """The piece that two boxes stand for, or None where their shapes differ by more than sizes of one."""
    whole = View.of(source, shape, dtype).box(box)
    sizes = [stop - start for start, stop in into]
    if [size for size in whole.shape if size > 1] != [size for size in sizes if size > 1]:
        return None
    (piece,) = whole.reshape(sizes).pieces
    base = tuple(start for start, _ in into)
    return _ordered(Piece(source, dtype, piece.offset, base, piece.digits))


def _ordered(piece: Piece) -> Piece:
    digits = tuple(sorted(piece.digits, key=lambda digit: (digit.dim, -digit.step)))
    return Piece(piece.source, piece.dtype, piece.offset, piece.base, digits)


def operation_of(entry: SourceRange) -> str | None:
    """What made these elements of whole tensors ("computed:...", "dequantize:..."), or None where they were only moved."""
    first = entry.transforms[0] if entry.transforms else ""
    return first if first and not first.startswith(("strided:", "cast:")) else None


def piece_of_range(entry: SourceRange, source: TensorEntry) -> Piece | None:
    """The inverse of `source_range`; None when the line does not describe a piece of this source."""
    nest = next((text for text in entry.transforms if text.startswith("strided:")), None)
    casts = _casts(entry)
    if nest is not None:
        return _nested(entry, source.dtype, nest)
    if len(entry.box) != len(source.shape) or not all(
        0 <= start < stop <= size for (start, stop), size in zip(entry.box, source.shape, strict=True)
    ):
        return None
    piece = piece_of_boxes(entry.tensor, source.dtype, source.shape, entry.box, entry.into)
    return None if piece is None else Piece(piece.source, piece.dtype, piece.offset, piece.base, piece.digits, casts)


def pieces_of_entry(entry: LedgerEntry, sources: Mapping[str, SourceTensor]) -> list[Piece] | str:
    """All pieces of a stored tensor, or what a line of it fails to describe.

    Ranges that an operation made share one piece for all the tensors it was made of; its source is the operation with
    their names, and its own offsets are not known. Every piece lies inside its tensor and its source, its loops nested.
    """
    pieces: dict[tuple, Piece] = {}
    operands: dict[tuple, list[str]] = {}
    for number, one in enumerate(entry.sources):
        source = sources.get(one.tensor)
        if source is None:
            return f"names {one.tensor}, which is no source tensor"
        made = operation_of(one)
        piece = piece_of_range(one, entry_of(source)) if made is None else _made_piece(one, entry.dtype)
        num_elements = prod(source.shape) if made is None else None
        if piece is None or not is_sound(piece, entry.shape, num_elements):
            return f"does not describe a part of {one.tensor}"
        if (piece.casts[-1] if piece.casts else piece.dtype) != entry.dtype:
            return f"takes {piece.dtype} of {one.tensor} for {entry.dtype}"
        key = (number,) if made is None else (one.transforms, one.into)
        pieces[key] = piece
        operands.setdefault(key, []).append(one.tensor)
    return [
        piece if len(key) == 1 else replace(piece, source=f"{piece.source}({', '.join(operands[key])})")
        for key, piece in pieces.items()
    ]


def _made_piece(entry: SourceRange, dtype: str) -> Piece | None:
    """Where the elements land that an operation made. Its result's own dtype is not recorded: the stored one stands for it."""
    nest = next((text for text in entry.transforms if text.startswith("strided:")), None)
    if nest is not None:
        piece = _nested(entry, dtype, nest)
    elif any(stop <= start for start, stop in entry.into):
        return None
    else:
        piece = View.of("", tuple(stop - start for start, stop in entry.into), dtype).pieces[0]
        piece = replace(piece, base=tuple(start for start, _ in entry.into))
    return None if piece is None else replace(piece, source=entry.transforms[0], casts=())


def _nested(entry: SourceRange, dtype: str, nest: str) -> Piece | None:
    try:
        _, offset, loops = nest.split(":", 2)
        digits = []
        for loop in loops.split(";") if loops else []:
            dim, _, numbers = loop.partition(":")
            size, step, stride = (int(number) for number in numbers.split(","))
            digits.append(Digit(size, int(dim), step, stride))
        return Piece(entry.tensor, dtype, int(offset), tuple(start for start, _ in entry.into), tuple(digits), _casts(entry))
    except ValueError:
        return None  # the caller says which line describes nothing


def _casts(entry: SourceRange) -> tuple[str, ...]:
    return tuple(text.removeprefix("cast:") for text in entry.transforms if text.startswith("cast:"))


def is_sound(piece: Piece, shape: tuple[int, ...], num_source_elements: int | None) -> bool:
    """Whether a piece lies inside a target of this shape and inside its source, and reaches no element of either twice."""
    if len(piece.base) != len(shape) or any(digit.size < 2 or not 0 <= digit.dim < len(shape) for digit in piece.digits):
        return False
    loops = [[(digit.step, digit.size) for digit in piece.digits if digit.dim == dim] for dim in range(len(shape))]
    if not all(_once(one) and base >= 0 and base + _reach(one) < size
               for one, base, size in zip(loops, piece.base, shape, strict=True)):  # fmt: skip
        return False
    strides = [(digit.stride, digit.size) for digit in piece.digits]
    return num_source_elements is None or (
        _once(strides) and piece.offset >= 0 and piece.offset + _reach(strides) < num_source_elements
    )


def _reach(loops: list[tuple[int, int]]) -> int:
    return sum(step * (size - 1) for step, size in loops)


def _once(loops: list[tuple[int, int]]) -> bool:
    """Whether loops (step, size) nest: each step is larger than all smaller loops together."""
    reach = 0
    for step, size in sorted(loops):
        if step <= reach:
            return False
        reach += step * (size - 1)
    return True


def entry_of(source: SourceTensor) -> TensorEntry:
    return TensorEntry(file=source.file, dtype=source.dtype, shape=source.shape, begin=0, end=source.num_bytes)


def to_line(record: Any) -> str:
    return json.dumps(to_dict(record), separators=(",", ":"), ensure_ascii=False) + "\n"


def read_lines(cls: Any, path: Path) -> Iterator[Any]:
    """The records of a .jsonl file, one at a time. Raises DayZeroError naming the line that is not one."""
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, start=1):
            try:
                data = json.loads(line)
            except json.JSONDecodeError as error:
                raise DayZeroError(f"{path.name} line {number} is not JSON", got=str(error), want="one JSON object a line",
                                   fix="convert again: the ledger is damaged") from error  # fmt: skip
            yield from_dict(cls, data, source=f"{path.name} line {number}")
