"""A view and a release folder in, the tensor's bytes in order out, block by block through two small buffers.

Runs of elements that follow each other in source and target are passed through; anything else is gathered a block of the
target at a time, reading each source region as one span where that is cheaper than row by row. Only a cast needs torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from dayzero.core.errors import DayZeroError
from dayzero.core.units import DTYPE_BITS
from dayzero.weights.algebra import Piece, View, restrict
from dayzero.weights.proof.one_origin import first_flaw
from dayzero.weights.reading import SourceReader, UnsoundSource

# What is gathered at a time: large enough that strided reads have long rows.
BLOCK_BYTES = 8 * 2**20
# What is read, hashed and written at a time: stays in the second-level cache. Writes of several MiB at once cost ten times
# the processor time of these on some kernels (measured: 2.6 s against 0.2 s for 1 GiB).
RUN_BYTES = 512 * 2**10
# Reading a span of which less than 1/16 is wanted costs more than separate reads of its rows, unless it is this small.
SPARSE_FACTOR, SMALL_SPAN_BYTES = 16, 32 * 2**10

# What a gathered block is filled with beforehand. Conversion and proof use different ones: an element that no copy reached
# could at most be alike in one of them.
POISON, PROOF_POISON = 0xA5, 0x5A

_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def element_bytes(dtype: str) -> int:
    bits = DTYPE_BITS[dtype]
    if bits % 8:
        raise DayZeroError(f"tensors of {dtype} cannot be moved yet", got=f"{bits} bits an element", want="whole bytes",
                           fix="convert the release to another dtype first")  # fmt: skip
    return bits // 8


class BlockCopier:
    """One thread's buffers. `blocks` yields a tensor's bytes in order; a yielded block is valid until the next."""

    def __init__(self, reader: SourceReader, *, poison: int = POISON) -> None:
        self._reader, self._poison = reader, poison
        self._out = memoryview(bytearray(BLOCK_BYTES))
        self._scratch = memoryview(bytearray(BLOCK_BYTES))

    def blocks(self, view: View) -> Iterator[tuple[int, memoryview]]:
        """(segment, bytes) pairs; see `segments`. Raises DayZeroError before the first block where an element of the view
        has no origin or two: a hole would be filled with whatever the buffer held."""
        pieces = linear_pieces(view)
        if (flaw := first_flaw(pieces, view.num_elements)) is not None:
            raise DayZeroError("a tensor would be written with elements of no known origin",
                               got=f"{flaw[1]} sources for element {flaw[0]} of {view.num_elements} (shape {view.shape})",
                               want="exactly one", fix="report this: the mapping of this checkpoint is wrong")  # fmt: skip
        if all(is_run(piece) for piece in pieces):
            for number, piece in enumerate(pieces):
                size = element_bytes(piece.dtype)
                for start in range(0, piece.num_elements * size, RUN_BYTES):
                    block = self._out[: min(RUN_BYTES, piece.num_elements * size - start)]
                    self._reader.read_into(piece.source, piece.offset * size + start, block)
                    yield number, block
            return
        size = element_bytes(view.dtype)
        per_block = BLOCK_BYTES // size
        low = np.array([piece.base[0] for piece in pieces])
        high = np.array([piece.base[0] + piece.extent(0) for piece in pieces])
        for start in range(0, view.num_elements, per_block):
            stop = min(start + per_block, view.num_elements)
            block = self._out[: (stop - start) * size]
            target = np.frombuffer(block, dtype=_UNSIGNED[size])
            np.frombuffer(block, dtype=np.uint8).fill(self._poison)
            filled = 0
            for index in np.nonzero((low < stop) & (high >= start))[0]:
                for part in restrict(pieces[index], 0, start, stop):
                    self._gather(part, target, start)
                    filled += part.num_elements
            assert filled == stop - start, f"{filled} of {stop - start} elements have a source"
            yield 0, block

    def _gather(self, piece: Piece, target: np.ndarray, start: int) -> None:
        digits = [(digit.size, digit.step, digit.stride) for digit in sorted(piece.digits, key=lambda digit: -digit.stride)]
        if not piece.casts:
            self._copy(piece, piece.offset, piece.base[0] - start, digits, target)
            return
        # Gathered densely in the source's dtype first, then cast, then placed.
        size = element_bytes(piece.dtype)
        dense = np.full(piece.num_elements * size, self._poison, dtype=np.uint8).view(_UNSIGNED[size])
        order = sorted(piece.digits, key=lambda digit: -digit.step)
        steps, step = {}, 1
        for digit in reversed(order):
            steps[digit] = step
            step *= digit.size
        packed = [(digit.size, steps[digit], digit.stride) for digit in sorted(piece.digits, key=lambda digit: -digit.stride)]
        self._copy(piece, piece.offset, 0, packed, dense)
        try:
            cast = cast_elements(dense, piece.dtype, piece.casts)
        except UnsoundSource as error:
            raise UnsoundSource(f"{piece.source}: {error.what}", got=error.got, want=error.want, fix=error.fix) from error
        _strided(target, piece.base[0] - start, [d.size for d in order], [d.step for d in order])[...] = cast.reshape(
            [digit.size for digit in order]
        )

    def _copy(self, piece: Piece, offset: int, at: int, digits: list[tuple[int, int, int]], target: np.ndarray) -> None:
        """Copy the loop nest `digits` (size, target step, source stride; source strides descending)."""
        digits = [digit for digit in digits if digit[0] > 1]
        size = element_bytes(piece.dtype)
        span = 1 + sum((count - 1) * stride for count, _, stride in digits)
        count = int(np.prod([digit[0] for digit in digits], dtype=np.int64))
        dense = count * SPARSE_FACTOR >= span or span * size <= SMALL_SPAN_BYTES
        if span * size <= len(self._scratch) and dense:
            block = self._scratch[: span * size]
            self._reader.read_into(piece.source, offset * size, block)
            source = np.frombuffer(block, dtype=_UNSIGNED[size])
            sizes = [digit[0] for digit in digits]
            _strided(target, at, sizes, [digit[1] for digit in digits])[...] = _strided(
                source, 0, sizes, [digit[2] for digit in digits]
            )
            return
        number, step, stride = digits[0]
        rest = digits[1:]
        rest_span = 1 + sum((count - 1) * inner for count, _, inner in rest)
        fits = max(1, (len(self._scratch) // size - rest_span) // stride + 1)
        per = min(fits, number - 1) if count // number * SPARSE_FACTOR >= stride or (not rest and dense) else 1
        for first in range(0, number, per):
            part = [(min(per, number - first), step, stride), *rest]
            self._copy(piece, offset + first * stride, at + first * step, part, target)


def linear_pieces(view: View) -> list[Piece]:
    """The view's pieces over the flattened tensor, in target order, digits joined where they run on."""
    flat = view.reshape((view.num_elements,)).coalesced()
    return sorted(flat.pieces, key=lambda piece: piece.base)


def is_run(piece: Piece) -> bool:
    """Whether consecutive target elements are consecutive source elements, unchanged."""
    return not piece.casts and (
        not piece.digits or (len(piece.digits) == 1 and piece.digits[0].step == 1 and piece.digits[0].stride == 1)
    )


def segments(view: View) -> list[Piece | None]:
    """What a tensor is hashed by: each run by itself when it consists of runs, else the whole (None)."""
    pieces = linear_pieces(view)
    return list(pieces) if all(is_run(piece) for piece in pieces) else [None]


def cast_elements(elements: np.ndarray, dtype: str, casts: tuple[str, ...]) -> np.ndarray:
    """Elements (as unsigned integers of their width) through a chain of dtypes, as torch casts."""
    import torch

    tensor = torch.from_numpy(elements).view(getattr(torch, dtype))
    for name in casts:
        before, tensor = tensor, tensor.to(getattr(torch, name))
        if name == "float16" and bool((tensor.isinf() & before.isfinite()).any()):
            largest = before.where(before.isfinite(), 0).abs().max().item()
            raise UnsoundSource("numbers are too large for float16", got=f"{largest:g}", want="at most 65504",
                                fix="take bfloat16 or float32")  # fmt: skip
    width = element_bytes(casts[-1])
    return tensor.view(unsigned_type(width)).numpy()


def unsigned_type(width_bytes: int) -> Any:
    """torch's unsigned integers of a width, as which elements of any dtype pass through numpy."""
    import torch

    return {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}[width_bytes]


def _strided(array: np.ndarray, at: int, sizes: list[int], steps: list[int]) -> np.ndarray:
    last = at + sum((size - 1) * step for size, step in zip(sizes, steps, strict=True))
    assert 0 <= at <= last < len(array), (at, last, len(array))
    return np.lib.stride_tricks.as_strided(array[at:], sizes, [step * array.itemsize for step in steps])
