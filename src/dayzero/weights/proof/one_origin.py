"""Pieces of a flattened tensor in; out, the first element that no piece writes or that two write. Integers only, exact.

Pieces that overlap as ranges but loop alike (interleaved rows, heads of a fused tensor) are compared one step of their
outer loop at a time, so the answer costs as much as there are pieces, not elements. Only where loops differ are elements
counted one by one, in windows of bounded size. No bytes are read here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from dayzero.weights.algebra import Digit, Piece, restrict

WINDOW_ELEMENTS = 2**22


def first_flaw(pieces: Sequence[Piece], num_elements: int, *, holes: bool = False) -> tuple[int, int] | None:
    """(element, how many pieces write it: 0 or more than 1), or None when every element has exactly one origin.

    pieces: over one dimension, in the order of their base, their digits nested (as views and `is_sound` give them).
    holes: elements that nothing writes are no flaw.
    """
    inside = not pieces or (pieces[0].base[0] >= 0 and max(p.base[0] + p.extent(0) for p in pieces) < num_elements)
    covered = sum(piece.num_elements for piece in pieces)
    if inside and (covered == num_elements or holes) and disjoint(pieces):
        return None
    return _first_miscounted(pieces, num_elements, holes)


def disjoint(pieces: Iterable[Piece]) -> bool:
    """Whether no element is written twice by pieces over one dimension that are sorted by their base."""
    return all(_apart(group) for group in _overlapping(pieces))


def _overlapping(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Groups of pieces whose ranges touch each other."""
    reached, group = -1, list[Piece]()
    for piece in pieces:
        if group and piece.base[0] > reached:
            yield group
            group = []
        group.append(piece)
        reached = max(reached, piece.base[0] + piece.extent(0))
    if group:
        yield group


def _apart(group: list[Piece]) -> bool:
    if len(group) == 1:
        return True
    outer = [max(piece.digits, key=lambda digit: digit.step, default=None) for piece in group]
    first = outer[0]
    if first is not None and all(digit and (digit.size, digit.step) == (first.size, first.step) for digit in outer):
        inner = [_without(piece, digit) for piece, digit in zip(group, outer, strict=True) if digit is not None]
        low = min(piece.base[0] for piece in inner)
        if max(piece.base[0] + piece.extent(0) for piece in inner) - low < first.step:
            # All lie within one step of the loop they share: what holds in one round holds in each.
            return disjoint(sorted(inner, key=lambda piece: piece.base))
    low = min(piece.base[0] for piece in group)
    high = max(piece.base[0] + piece.extent(0) for piece in group) + 1
    return all(counts.max(initial=0) <= 1 for _, counts in _counts(group, low, high))


def _without(piece: Piece, digit: Digit) -> Piece:
    at = piece.digits.index(digit)
    return replace(piece, digits=piece.digits[:at] + piece.digits[at + 1 :])


def _first_miscounted(pieces: Sequence[Piece], num_elements: int, holes: bool) -> tuple[int, int] | None:
    # What lies outside the tensor is a flaw too: counted as its last element, which it would overwrite.
    for piece in pieces:
        if piece.base[0] < 0 or piece.base[0] + piece.extent(0) >= num_elements:
            return max(num_elements - 1, 0), 2
    for start, counts in _counts(pieces, 0, num_elements):
        wrong = np.nonzero(counts > 1 if holes else counts != 1)[0]
        if len(wrong):
            return start + int(wrong[0]), int(counts[wrong[0]])
    return None


def _counts(pieces: Sequence[Piece], low: int, high: int) -> Iterator[tuple[int, np.ndarray]]:
    """(first element, how often each of the following is written), window by window."""
    for start in range(low, high, WINDOW_ELEMENTS):
        counts = np.zeros(min(WINDOW_ELEMENTS, high - start), dtype=np.uint32)
        for piece in pieces:
            for part in restrict(piece, 0, start, start + len(counts)):
                counts[elements(part) - start] += 1
        yield start, counts


def elements(piece: Piece, *, of_source: bool = False) -> np.ndarray:
    """The target (or source) elements of a piece over one dimension, in the order of its loops."""
    places = np.array([piece.offset if of_source else piece.base[0]], dtype=np.int64)
    for digit in sorted(piece.digits, key=lambda digit: -digit.step):
        places = (places[:, None] + np.arange(digit.size) * (digit.stride if of_source else digit.step)).reshape(-1)
    return places
