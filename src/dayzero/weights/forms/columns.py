"""A stored matrix whose columns are the rows of the logical one, in; a `Decoder` of any run of those rows out.

GPTQ and AWQ store [input, output], and one form of stacked FP4 experts stores each matrix transposed to what the class
holds. A run of logical rows is then a strip of stored columns, read row by row, or whole where that is one read. What was
read last stays: a strip of `PANEL_BYTES` of codes for each thread, shared by all decoders of a release.

Arithmetic: code minus zero point (exact), times the scale in float32, one rounding. The packages that made these formats
multiply in float16: for float16 that is the same bits, for another dtype it rounds twice, and this once.
Zero points of GPTQ are stored less one, in the bits of a code: the stored 15 of 4 bits is -1, and stands for 0, as its
reference has it (`(stored + 1) & 15`); version 2 of that format and AWQ store them as they are.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from dayzero.core.errors import DayZeroError
from dayzero.core.units import DTYPE_BITS
from dayzero.model.headers import TensorEntry
from dayzero.model.stored.scales import Packing
from dayzero.weights.decoding import Decoder, ReadStored
from dayzero.weights.forms.rows import WORK_BYTES, GroupOrder, groups_of_columns, matrix_runs, rounded
from dayzero.weights.forms.values import combine, exponent_scales, number_scales, unpack_fp4, unpack_words

PANEL_BYTES = 16 * 2**20
# Strips begin at multiples of this many rows: a whole number of words of any width of code.
STRIP_ROWS = 64


class LastStrip(threading.local):
    """The strip that this thread read last, whichever decoder it belongs to."""

    key: tuple[Any, ...] | None = None
    value: Any = None

    def get(self, key: tuple[Any, ...], make: Callable[..., Any], *given: Any) -> Any:
        if self.key != key:
            self.key, self.value = None, None  # not two at a time in memory
            self.value = make(*given)
            self.key = key
        return self.value


@dataclass(frozen=True, kw_only=True, slots=True)
class Words:
    """What GPTQ and AWQ store for one matrix of logical shape [R, C] in groups of `group` columns (0: one).

    qweight: int32 [W, R] (GPTQ) or [C, W] (AWQ); scales [G, R]; qzeros int32 [G, W], packed along the rows; `zero`: the zero
    point of all where none are stored. `order`: which group each column belongs to.
    """

    qweight: str
    scales: str
    scales_dtype: str
    qzeros: str | None
    zero: int
    order: GroupOrder | None
    rows: int
    columns: int
    groups: int
    group: int
    bits: int
    packing: Packing

    def strip(self, read: ReadStored, first: int, last: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """uint8 codes [n, C], float32 zero points and scales [n, G] of rows first to last."""
        per, count = 32 // self.bits, last - first
        size = DTYPE_BITS[self.scales_dtype] // 8
        # Words that run along the output are cut to whole ones; the last may be padded.
        low, high = first // per, -(-last // per)
        if self.packing.axis == "input":
            words = read_strip(read, self.qweight, self.columns // per, self.rows * 4, first * 4, last * 4).view(torch.int32)
        else:
            row_bytes = -(-self.rows // per) * 4
            words = read_strip(read, self.qweight, self.columns, row_bytes, low * 4, high * 4).view(torch.int32)
        codes = unpack_words(words, self.packing, self.bits, (count, self.columns))
        raw = read_strip(read, self.scales, self.groups, self.rows * size, first * size, last * size)
        scales = number_scales(raw.view(getattr(torch, self.scales_dtype)), name=self.scales, first=(0, first)).T.contiguous()
        if self.qzeros is None:
            return codes, torch.full_like(scales, self.zero), scales
        raw = read_strip(read, self.qzeros, self.groups, -(-self.rows // per) * 4, low * 4, high * 4)
        # Zero points run along the output in both formats, in the order of the codes.
        along = replace(self.packing, name="zeros", axis="output")
        zeros = unpack_words(raw.view(torch.int32), along, self.bits, (count, self.groups)).to(torch.int32)
        if self.packing.name == "gptq":
            zeros = (zeros + 1) & ((1 << self.bits) - 1)
        return codes, zeros.to(torch.float32), scales


def words_decoder(*, name: str, dtype: str, words: Words, kept: LastStrip, form: str) -> Decoder:
    wanted = getattr(torch, dtype)
    per_strip = max(STRIP_ROWS, PANEL_BYTES // max(words.columns, 1) // STRIP_ROWS * STRIP_ROWS)

    def decode(read: ReadStored, start: int, stop: int) -> torch.Tensor:
        made = []
        columns_in = groups_of_columns(read, words.order, words.columns, words.group)
        for number, first, last in matrix_runs(start, stop, per_strip):
            base = number * per_strip
            codes, zeros, scales = kept.get((name, base), words.strip, read, base, min(base + per_strip, words.rows))
            values = codes[first:last].to(torch.float32)
            for numbers, operation in ((zeros, "subtract"), (scales, "multiply")):
                part, block = numbers[first:last], (1, words.group)
                if columns_in is not None:
                    part, block = part[:, columns_in], (1, 1)
                combine(values, part, block, operation=operation)  # type: ignore[arg-type]
            made.append(rounded(values, wanted, name, base + first))
        return made[0] if len(made) == 1 else torch.cat(made)

    sources = [words.qweight, words.scales, *([words.qzeros] if words.qzeros else [])]
    sources += [words.order.name] if words.order else []
    return Decoder(name=name, shape=(words.rows, words.columns), dtype=dtype, sources=tuple(sources),
                   operation=f"dequantize:{form}", decode=decode,
                   work_bytes=WORK_BYTES * words.columns)  # fmt: skip


def transposed_blocks_decoder(
    *, name: str, dtype: str, blocks: tuple[str, TensorEntry], scales: tuple[str, TensorEntry], kept: LastStrip
) -> Decoder:
    """FP4 codes [E, R, G, B] in blocks of 2 B with an exponent for each [E, R, G], as the logical [E, 2 B G, R].

    Raises DayZeroError where the shapes are not such.
    """
    (weight, entry), (scale, scale_entry) = blocks, scales
    if len(entry.shape) != 4 or entry.dtype != "uint8" or entry.shape[-1] != 16 or scale_entry.shape != entry.shape[:-1]:
        raise DayZeroError(f"{scale} does not fit {weight}", want="uint8 blocks [experts, rows, groups, 16], a scale for each",
                           got=f"scales {list(scale_entry.shape)} for {entry.dtype} {list(entry.shape)}",
                           fix="download the file again, or use another release of the model")  # fmt: skip
    experts, rows, groups, width = entry.shape
    columns, row_bytes = groups * 2 * width, groups * width
    wanted = getattr(torch, dtype)
    # Groups of one expert that fit a strip: most often all of them, which are then one read.
    per_strip = max(1, min(groups, PANEL_BYTES // max(rows * width, 1)))

    def strip(read: ReadStored, expert: int, first: int) -> tuple[torch.Tensor, torch.Tensor]:
        last = min(first + per_strip, groups)
        codes = read_strip(read, weight, rows, row_bytes, first * width, last * width, at=expert * rows * row_bytes)
        stored = read_strip(read, scale, rows, groups, first, last, at=expert * rows * groups)
        return codes, exponent_scales(stored, name=f"{scale}[{expert}]", first=(0, first))

    def decode(read: ReadStored, start: int, stop: int) -> torch.Tensor:
        made = torch.empty((stop - start, rows), dtype=wanted)
        for expert, first, last in matrix_runs(start, stop, columns):
            group, size = first // (2 * width), 2 * width
            while group * size < last:
                base = group // per_strip * per_strip
                codes, exponents = kept.get((name, expert, base), strip, read, expert, base)
                until = min(base + per_strip, -(-last // size))
                values = unpack_fp4(codes[:, (group - base) * width : (until - base) * width])
                combine(values, exponents[:, group - base : until - base], (1, size))
                low, high = max(first, group * size), min(last, until * size)
                part = values[:, low - group * size : high - group * size]
                at = expert * columns + low - start
                made[at : at + high - low] = rounded(part, wanted, name, 0).T
                group = until
        return made

    return Decoder(name=name, shape=(experts, columns, rows), dtype=dtype, sources=(weight, scale), row_step=2 * width,
                   operation="dequantize:mxfp4, transposed", decode=decode, work_bytes=WORK_BYTES * rows)  # fmt: skip


def read_strip(read: ReadStored, name: str, rows: int, row_bytes: int, first: int, last: int, *, at: int = 0) -> torch.Tensor:
    """Bytes first to last of each of `rows` stored rows that begin at byte `at`: uint8 [rows, last - first]."""
    if first == 0 and last == row_bytes:
        return torch.frombuffer(read(name, at, rows * row_bytes), dtype=torch.uint8).reshape(rows, row_bytes)
    made = torch.empty((rows, last - first), dtype=torch.uint8)
    target = memoryview(made.numpy()).cast("B")
    for row in range(rows):
        begin = at + row * row_bytes
        target[row * (last - first) : (row + 1) * (last - first)] = read(name, begin + first, last - first)
    return made
