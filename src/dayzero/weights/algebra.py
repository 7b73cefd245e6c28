"""Where each element of a tensor comes from, when it was only moved. Integers only, no torch, exact.

A `View` is a tensor shape made of `Piece`s. A piece takes elements of one source tensor: every digit is a loop of `size`
steps which advances one target dimension by `step` and the source by `stride` elements. Stacking, concatenating, slicing,
transposing and reshaping turn views into views without touching an element, so a rank's part of a merged tensor is found
by slicing the merged tensor's view, and its bytes are copied without the merged tensor ever existing.

In each target dimension digits nest: a digit's step is larger than everything smaller digits add up to. All operations
keep that, and slicing and reshaping rest on it. What is no data movement is not here: it raises `NotDataMovement`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import prod

# More pieces than this in one tensor are copied faster by running the operation itself on the whole group.
MAX_PIECES = 1 << 18


class NotDataMovement(Exception):
    """An operation which computes, or scatters elements too finely to be listed."""


@dataclass(frozen=True, slots=True)
class Digit:
    size: int
    dim: int
    step: int
    stride: int


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements `offset + sum(i * stride)` of `source`, at target index `base + sum(i * step)` per dimension.

    `casts` are the dtypes the elements pass through after `dtype`, the source's own.
    """

    source: str
    dtype: str
    offset: int
    base: tuple[int, ...]
    digits: tuple[Digit, ...]
    casts: tuple[str, ...] = ()

    @property
    def num_elements(self) -> int:
        return prod(digit.size for digit in self.digits)

    def fixed(self, index: int, at: int, size: int = 1) -> Piece:
        """The piece with digit `index` restricted to `size` steps from `at`."""
        digit = self.digits[index]
        base = list(self.base)
        base[digit.dim] += at * digit.step
        kept = (replace(digit, size=size),) if size > 1 else ()
        return replace(self, offset=self.offset + at * digit.stride, base=tuple(base),
                       digits=self.digits[:index] + kept + self.digits[index + 1 :])  # fmt: skip

    def extent(self, dim: int, below: int | None = None) -> int:
        """How far digits of `dim` (with a step below `below`) reach past the base."""
        return sum((d.size - 1) * d.step for d in self.digits if d.dim == dim and (below is None or d.step < below))


@dataclass(frozen=True, slots=True)
class View:
    shape: tuple[int, ...]
    dtype: str
    pieces: tuple[Piece, ...]

    @staticmethod
    def of(source: str, shape: Sequence[int], dtype: str) -> View:
        """The whole of a source tensor, stored row by row."""
        digits, stride = [], 1
        for dim in reversed(range(len(shape))):
            if shape[dim] > 1:
                digits.append(Digit(shape[dim], dim, 1, stride))
            stride *= shape[dim]
        pieces = (Piece(source, dtype, 0, (0,) * len(shape), tuple(reversed(digits))),) if stride else ()
        return View(tuple(shape), dtype, pieces)

    @property
    def num_elements(self) -> int:
        return prod(self.shape)

    def permute(self, order: Sequence[int]) -> View:
        """As torch.permute: dimension `i` of the result is dimension `order[i]` of this."""
        assert sorted(order) == list(range(len(self.shape))), (order, self.shape)
        place = {old: new for new, old in enumerate(order)}
        pieces = (
            replace(piece, base=tuple(piece.base[old] for old in order),
                    digits=tuple(replace(digit, dim=place[digit.dim]) for digit in piece.digits))
            for piece in self.pieces
        )  # fmt: skip
        return View(tuple(self.shape[old] for old in order), self.dtype, tuple(pieces))

    def slice(self, dim: int, start: int, stop: int) -> View:
        """Elements `start` to `stop` of a dimension."""
        assert 0 <= start <= stop <= self.shape[dim], (dim, start, stop, self.shape)
        pieces = []
        for piece in self.pieces:
            for part in restrict(piece, dim, start, stop):
                base = _replaced(part.base, dim, part.base[dim] - start)
                pieces.append(replace(part, base=base))
        return View(_replaced(self.shape, dim, stop - start), self.dtype, _bounded(pieces))

    def box(self, box: Sequence[tuple[int, int]]) -> View:
        view = self
        for dim, (start, stop) in enumerate(box):
            if (start, stop) != (0, view.shape[dim]):
                view = view.slice(dim, start, stop)
        return view

    def reshape(self, shape: Sequence[int]) -> View:
        """As torch.reshape of the logical tensor (never a question of strides here)."""
        assert prod(shape) == self.num_elements, (shape, self.shape)
        if not self.num_elements:
            return View(tuple(shape), self.dtype, ())
        pieces = [_flat(piece, self.shape) for piece in self.pieces]
        for dim in range(len(shape) - 1):
            pieces = list(_bounded(part for piece in pieces for part in _split(piece, dim, prod(shape[dim + 1 :]))))
        if not shape:
            pieces = [replace(piece, base=()) for piece in pieces]
        return View(tuple(shape), self.dtype, tuple(pieces))

    def cast(self, dtype: str) -> View:
        if dtype == self.dtype:
            return self
        return View(self.shape, dtype, tuple(replace(piece, casts=(*piece.casts, dtype)) for piece in self.pieces))

    def coalesced(self) -> View:
        """The same with digits joined that run on, and pieces joined that follow each other whole."""
        return View(self.shape, self.dtype, tuple(_coalesce(piece) for piece in self.pieces))


def concatenate(views: Sequence[View], dim: int) -> View:
    """As torch.cat, for views of one dtype."""
    first = views[0]
    assert all(view.dtype == first.dtype and len(view.shape) == len(first.shape) for view in views), [v.dtype for v in views]
    pieces, start = [], 0
    for view in views:
        assert view.shape[:dim] + view.shape[dim + 1 :] == first.shape[:dim] + first.shape[dim + 1 :], (view.shape, first.shape)
        for piece in view.pieces:
            base = _replaced(piece.base, dim, piece.base[dim] + start)
            pieces.append(replace(piece, base=base))
        start += view.shape[dim]
    return View(_replaced(first.shape, dim, start), first.dtype, _bounded(pieces))


def restrict(piece: Piece, dim: int, start: int, stop: int) -> list[Piece]:
    """The parts of a piece whose index in `dim` is in [start, stop), at unchanged target indices."""
    low, high = piece.base[dim], piece.base[dim] + piece.extent(dim)
    if start <= low and high < stop:
        return [piece]
    if high < start or low >= stop:
        return []
    index, digit = max(((i, d) for i, d in enumerate(piece.digits) if d.dim == dim), key=lambda item: item[1].step)
    reach = piece.extent(dim, below=digit.step)
    parts: list[Piece] = []
    # Steps which lie inside as a whole, and those cut by a border: at most one on each side, as digits nest.
    inside_from = max(0, -(-(start - low) // digit.step))
    inside_to = min(digit.size, (stop - 1 - reach - low) // digit.step + 1)
    touched_from = max(0, -(-(start - low - reach) // digit.step))
    touched_to = min(digit.size, (stop - 1 - low) // digit.step + 1)
    inside_to = max(inside_to, inside_from)
    for at in range(touched_from, min(inside_from, touched_to)):
        parts += restrict(piece.fixed(index, at), dim, start, stop)
    if inside_to > inside_from:
        parts.append(piece.fixed(index, inside_from, inside_to - inside_from))
    for at in range(max(inside_to, touched_from), touched_to):
        if at >= inside_from:
            parts += restrict(piece.fixed(index, at), dim, start, stop)
    return parts


def _flat(piece: Piece, shape: Sequence[int]) -> Piece:
    """The piece in the target flattened to one dimension: always possible, steps are only scaled."""
    scale = [prod(shape[dim + 1 :]) for dim in range(len(shape))]
    base = sum(index * factor for index, factor in zip(piece.base, scale, strict=True))
    return replace(piece, base=(base,), digits=tuple(replace(d, dim=0, step=d.step * scale[d.dim]) for d in piece.digits))


def _split(piece: Piece, dim: int, inner: int) -> Iterable[Piece]:
    """The piece with its last dimension `dim` split into (dim, dim + 1), where dim + 1 has `inner` elements."""
    if inner == 0:
        return
    low = [(index, digit) for index, digit in enumerate(piece.digits) if digit.dim == dim and digit.step % inner]
    outer_base, inner_base = divmod(piece.base[dim], inner)
    if inner_base + sum((digit.size - 1) * digit.step for _, digit in low) < inner:
        digits = tuple(
            digit if digit.dim != dim else
            replace(digit, step=digit.step // inner) if digit.step % inner == 0 else replace(digit, dim=dim + 1)
            for digit in piece.digits
        )  # fmt: skip
        yield replace(piece, base=(*piece.base[:dim], outer_base, inner_base), digits=digits)
        return
    index, digit = max(low, key=lambda item: item[1].step)
    first, rest = divmod(inner_base, digit.step)
    per_row = inner // digit.step
    if (
        inner % digit.step
        or digit.size == 1
        or rest + piece.extent(dim, below=digit.step) >= digit.step
        or any(d.step > digit.step for _, d in low)
    ):
        for at in range(digit.size):
            yield from _split(piece.fixed(index, at), dim, inner)
        return
    # The digit crosses row borders at regular places: a partial first row, whole rows, a partial last row.
    head = min(digit.size, (-first) % per_row)
    rows, tail = divmod(digit.size - head, per_row)
    if head:
        yield from _split(piece.fixed(index, 0, head), dim, inner)
    if rows:
        middle = piece.fixed(index, head, rows * per_row)
        at = index
        if rows * per_row > 1:
            pair = (Digit(rows, dim, inner, digit.stride * per_row), Digit(per_row, dim, digit.step, digit.stride))
            kept = tuple(part for part in pair if part.size > 1)
            middle = replace(middle, digits=middle.digits[:at] + kept + middle.digits[at + 1 :])
        yield from _split(middle, dim, inner)
    if tail:
        yield from _split(piece.fixed(index, head + rows * per_row, tail), dim, inner)


def _coalesce(piece: Piece) -> Piece:
    digits: list[Digit] = []
    for digit in sorted(piece.digits, key=lambda d: (d.dim, -d.step)):
        last = digits[-1] if digits else None
        if last and last.dim == digit.dim and last.step == digit.size * digit.step and last.stride == digit.size * digit.stride:
            digits[-1] = replace(digit, size=last.size * digit.size)
        else:
            digits.append(digit)
    return replace(piece, digits=tuple(digits))


def _replaced(numbers: tuple[int, ...], at: int, value: int) -> tuple[int, ...]:
    return (*numbers[:at], value, *numbers[at + 1 :])


def _bounded(pieces: Iterable[Piece]) -> tuple[Piece, ...]:
    made: list[Piece] = []
    for piece in pieces:
        made.append(piece)
        if len(made) > MAX_PIECES:
            raise NotDataMovement(f"more than {MAX_PIECES} pieces")
    return tuple(made)
