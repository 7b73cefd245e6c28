"""Codes that calibration chose, as conversion takes them: by parameter and row, or by the stored tensor of some rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod

from dayzero.weights.algebra import View
from dayzero.weights.quantize.codes import Codes

ReadCodes = Callable[[int, int], Codes]  # (first row, last row) -> codes; rows counted over all matrices of a parameter


@dataclass(frozen=True, kw_only=True, slots=True)
class GivenCodes:
    """`codes` by parameter; a parameter without is quantized from its weight alone. `facts`: method, data and its hash."""

    codes: Mapping[str, ReadCodes] = field(default_factory=dict)
    input_scales: Mapping[str, float] = field(default_factory=dict)
    facts: Mapping[str, str] = field(default_factory=dict)

    def of_stored(self, source: str, views: Mapping[str, View], transposed: frozenset[str]) -> ReadCodes | None:
        """Codes of a stored matrix that fills whole rows of one calibrated parameter; None where it does not."""
        for parameter, view in views.items():
            if parameter not in self.codes or parameter in transposed:
                continue
            for piece in view.pieces:
                if piece.source == source:
                    start = _first_row(view, piece.base, piece.num_elements)
                    return None if start is None else _from(self.codes[parameter], start)
        return None


def _from(read: ReadCodes, start: int) -> ReadCodes:
    return lambda first, last: read(start + first, start + last)


def _first_row(view: View, base: tuple[int, ...], num_elements: int) -> int | None:
    """The row of [rows, columns] at which whole rows of a piece begin."""
    columns = view.shape[-1]
    if base[-1] or num_elements % columns:
        return None
    row = 0
    for index, size in zip(base[:-1], view.shape[:-1], strict=True):
        row = row * size + index
    return row if row * columns + num_elements <= prod(view.shape) else None
