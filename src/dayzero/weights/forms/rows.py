"""A stored matrix whose codes lie row by row, with its scales, in; a `Decoder` of any run of its rows out.

For all forms here: codes become exact float32 numbers, a zero point is subtracted (exact), the scale is multiplied in
float32, and the product is rounded once to the wanted dtype. Where the format's own code does otherwise:
- compressed-tensors computes in the scale's dtype. For a wanted dtype equal to the scale's the results are the same bits
  (products of such codes and scales are exact in float32); for another one it rounds twice, and this once.
- NVFP4 has two scales: they are joined first, in float32, by division (compressed-tensors: `weight_global_scale`) or by
  multiplication (ModelOpt: `weight_scale_2`), then multiplied with the code: the order of both.
A number that overflows the wanted dtype is an error. Not here: what a tensor is (`stored`), matrices whose rows are
columns of what is stored (`columns`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from dayzero.core.errors import DayZeroError
from dayzero.core.units import DTYPE_BITS
from dayzero.model.headers import TensorEntry
from dayzero.model.stored.scales import Packing
from dayzero.weights.decoding import Decoder, ReadStored
from dayzero.weights.forms.scales import Numbers, matrices_of
from dayzero.weights.forms.values import combine, float8_values, signed_codes, unpack_fp4, unpack_words

# What an element takes while it is decoded, beside the result: float32, half a step of it as integers, and room in the cache
# of a processor for both, which makes it faster than larger runs.
WORK_BYTES = 8
# float32 [rows, columns] of so many rows of stored codes.
ToNumbers = Callable[[memoryview, int], torch.Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Codes:
    """How the codes of one row are stored: in `row_bytes` bytes, which `numbers` makes float32 of."""

    form: str
    row_bytes: int
    numbers: ToNumbers


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupOrder:
    """A stored tensor [C] that says which group each column belongs to; -1 in it: it was never set, columns are in order."""

    name: str
    dtype: str
    groups: int


def float8_codes(entry: TensorEntry) -> Codes:
    dtype, columns = getattr(torch, entry.dtype), entry.shape[-1]

    def numbers(raw: memoryview, rows: int) -> torch.Tensor:
        return float8_values(torch.frombuffer(raw, dtype=dtype)).reshape(rows, columns)

    return Codes(form="fp8", row_bytes=columns, numbers=numbers)


def float4_codes(columns: int) -> Codes:
    def numbers(raw: memoryview, rows: int) -> torch.Tensor:
        return unpack_fp4(torch.frombuffer(raw, dtype=torch.uint8)).reshape(rows, columns)

    return Codes(form="fp4", row_bytes=columns // 2, numbers=numbers)


def integer_codes(entry: TensorEntry) -> Codes:
    dtype, columns = getattr(torch, entry.dtype), entry.shape[-1]

    def numbers(raw: memoryview, rows: int) -> torch.Tensor:
        return torch.frombuffer(raw, dtype=dtype).reshape(rows, columns).to(torch.float32)

    return Codes(form=entry.dtype, row_bytes=columns, numbers=numbers)


def packed_codes(words: int, columns: int, packing: Packing, bits: int) -> Codes:
    """Codes stored as value + 2^(bits - 1) in int32 words along a row."""

    def numbers(raw: memoryview, rows: int) -> torch.Tensor:
        stored = torch.frombuffer(raw, dtype=torch.int32).reshape(rows, words)
        return signed_codes(unpack_words(stored, packing, bits, (rows, columns)), bits).to(torch.float32)

    return Codes(form=f"int{bits}", row_bytes=4 * words, numbers=numbers)


def row_decoder(
    *, name: str, shape: tuple[int, ...], dtype: str, weight: str, codes: Codes, scales: Numbers | None,
    zeros: Numbers | None = None, order: GroupOrder | None = None, also: tuple[str, ...] = (), form: str = "",
) -> Decoder:  # fmt: skip
    """`scales` None: the codes are the numbers. `also`: stored tensors that were used up before, such as a stored shape."""
    _, rows, columns = matrices_of(shape)
    wanted = getattr(torch, dtype)

    def decode(read: ReadStored, start: int, stop: int) -> torch.Tensor:
        values = codes.numbers(read(weight, start * codes.row_bytes, (stop - start) * codes.row_bytes), stop - start)
        columns_in = groups_of_columns(read, order, columns, scales.block[1] if scales is not None else 0)
        for matrix, first, last in matrix_runs(start, stop, rows):
            part = values[matrix * rows + first - start : matrix * rows + last - start]
            for grid, operation in ((zeros, "subtract"), (scales, "multiply")):
                if grid is None:
                    continue
                height = grid.block[0] or rows
                numbers, block = grid.read(read, matrix, first // height, -(-last // height)), (height, grid.block[1])
                if columns_in is not None:
                    numbers, block = numbers[:, columns_in], (height, 1)
                combine(part, numbers, block, first_row=first, operation=operation)  # type: ignore[arg-type]
        return rounded(values, wanted, name, start)

    named = [*(one for grid in (scales, zeros) if grid is not None for one in grid.sources), *([order.name] if order else [])]
    return Decoder(name=name, shape=shape, dtype=dtype, sources=(weight, *named, *also),
                   operation=f"dequantize:{form or codes.form}" if scales is not None else f"upcast:{codes.form}",
                   decode=decode, work_bytes=WORK_BYTES * columns)  # fmt: skip


def matrix_runs(start: int, stop: int, rows: int) -> Iterator[tuple[int, int, int]]:
    """(matrix, first row, last row) of a run of rows over stacked matrices."""
    while start < stop:
        matrix, first = divmod(start, rows)
        last = min(rows, first + stop - start)
        yield matrix, first, last
        start += last - first


def rounded(values: torch.Tensor, dtype: torch.dtype, name: str, first_row: int) -> torch.Tensor:
    """`values` in `dtype`. Raises DayZeroError where a number is too large for it: infinity would pass as a weight."""
    made = values.to(dtype)
    # Only float16 is narrow enough for sound codes and scales to leave it; the others share float32's exponents.
    if dtype == torch.float16 and bool((lost := made.isinf() & values.isfinite()).any()):
        row, column = lost.nonzero()[0].tolist()
        found = f"{float(values[row, column]):g} at row {first_row + row}, column {column}"
        raise DayZeroError(f"{name} does not fit {dtype}", got=found, want="at most 65504",
                           fix="convert to bfloat16 or float32")  # fmt: skip
    return made


def groups_of_columns(read: ReadStored, order: GroupOrder | None, columns: int, group: int) -> torch.Tensor | None:
    """The group of each column; None where they are in order. Raises DayZeroError where one does not exist."""
    if order is None:
        return None
    raw = read(order.name, 0, columns * DTYPE_BITS[order.dtype] // 8)
    stored = torch.frombuffer(raw, dtype=getattr(torch, order.dtype)).to(torch.int64)
    if bool((stored == -1).any()):
        return None
    if bool((bad := (stored < 0) | (stored >= order.groups)).any()):
        place = int(bad.nonzero()[0])
        raise DayZeroError(f"{order.name} names a group that does not exist", got=f"{int(stored[place])} for column {place}",
                           want=f"0 to {order.groups - 1}", fix="download the file again")  # fmt: skip
    return None if torch.equal(stored, torch.arange(columns) // (group or columns)) else stored
