"""The bytes of a stored tensor in, block by block while they pass by; a small record of its values out.

Made for conversion, where every tensor is hashed anyway: a block is looked at while it is in the cache, for a fraction of the
hash's time. Exact over all elements: NaN and infinity, the largest value and where it is, vanishing values, runs of zeros. From
evenly spread samples: magnitudes, how many values are distinct, and whether the bits read better as another type.

Nothing is judged here (`census_rules`). What no record of this kind can show: a changed mantissa or sign, a value moved to
another place, two tensors exchanged; those need the publisher's digests (`digests`).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from dayzero.core.records import STRICT
from dayzero.core.storage import COMPANION
from dayzero.core.units import DTYPE_BITS
from dayzero.model.stored.scales import WEIGHT_SCALE
from dayzero.weights.checks.census_samples import FLOATS, FloatFormat, describe_samples

CHUNK_BYTES = 512 * 2**10  # looked at in one go: still in the second-level cache after hashing
# Shorter runs of zeros are not recorded. Chance makes none of 64 numbers; published weights have some of less.
RUN_BYTES = 512
# One word in so many is looked at to find them: three or more of those lie in every run of RUN_BYTES.
RUN_STRIDE_WORDS = 16
PAGE_BYTES = 4096
# Samples, words of 32 bits, for each so many bytes, within limits: 4096 give the entropy of a byte to a tenth of a bit.
SAMPLE_BYTES, LEAST_SAMPLES, MOST_SAMPLES = 2048, 256, 4096
# Below 2**-48 lies no number of a million normal ones in a hundred billion tensors, and no float16 at all.
VANISHING_LOG2 = -48
UNSIGNED: dict[int, np.dtype[Any]] = {
    1: np.dtype(np.uint8),
    2: np.dtype(np.uint16),
    4: np.dtype(np.uint32),
    8: np.dtype(np.uint64),
}
INTEGERS = ("int8", "uint8", "int32", "uint32", "float4_e2m1")  # codes of weights; other integers are lists and not looked at


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorStatistics:
    """What one tensor's values are like. `_at` are element indices in the flattened tensor, `_log2` of absolute values.

    `largest` is finite; `second` is the largest outside the 1/256 of the tensor (at most 4 KiB) that holds it. Zero runs are
    in elements: `row_run` the longest that consists of whole rows, `ragged_run` the longest that does not.
    """

    __pydantic_config__ = STRICT
    num_nan: int = 0
    num_infinite: int = 0
    num_negative_infinite: int = 0
    nonfinite_at: int | None = None
    largest: float = 0.0
    largest_at: int = 0
    second: float = 0.0
    num_vanishing: int = 0  # not zero, below 2**VANISHING_LOG2
    vanishing_at: int | None = None
    num_zero: int | None = None  # exact, for scales and their like; None: only the share is known
    num_negative: int | None = None
    num_row_runs: int = 0
    row_run: tuple[int, int] = (0, 0)  # first element, number of elements
    num_ragged_runs: int = 0
    ragged_run: tuple[int, int] = (0, 0)
    all_zero: bool = False
    num_samples: int = 0
    mean_log2: float = 0.0
    deviation_log2: float = 0.0
    zero_share: float = 0.0
    negative_share: float = 0.0
    num_distinct: int = 0  # bit patterns among at most 512 of the samples
    reads_like: str = ""  # the type that the bits look like, where they do not look like their own


class TensorCensus:
    """One tensor's counts. `update` takes its blocks in order, each of whole elements; `finish` makes the record."""

    def __init__(self, name: str, dtype: str, shape: tuple[int, ...]) -> None:
        # A scale in bytes without a type is an exponent or FP8: 255 is NaN in both, and only that is told of single values.
        exponent = dtype == "uint8" and WEIGHT_SCALE.search(name) is not None
        self._format = FLOATS.get("float8_e8m0fnu" if exponent else dtype)
        self._counted = self._format is not None or dtype in INTEGERS
        self._dtype = "float8_e8m0fnu" if exponent else dtype
        self._bytes = max(1, DTYPE_BITS[dtype] // 8)
        self._total = -(-prod(shape) * DTYPE_BITS[dtype] // 8) // self._bytes
        self._row = max(1, self._total // max(1, prod(shape[:-1]))) if shape else 1
        self._exact = COMPANION.search(name) is not None
        self._done = 0
        # A tensor has 256 cells or more, each of a power of two of elements up to a page.
        cell = min(PAGE_BYTES // self._bytes, max(1, self._total // 256))
        self._cell = 1 << (cell.bit_length() - 1)
        self._nan = self._infinite = self._negative_infinite = self._vanishing = self._zero = self._negative = 0
        self._nonfinite_at: int | None = None
        self._vanishing_at: int | None = None
        self._top = self._top_at = self._second = 0
        self._carried = 0  # zero elements at the end of what was seen
        self._runs = {True: (0, (0, 0)), False: (0, (0, 0))}  # whole rows? -> how many, the longest
        words = self._total * self._bytes // self._word.itemsize
        wanted = min(MOST_SAMPLES, max(LEAST_SAMPLES, self._total * self._bytes // SAMPLE_BYTES))
        self._step = max(1, words // wanted) | 1  # odd, so that samples do not all lie in the same columns
        self._next = 0
        self._samples: list[np.ndarray] = []

    @property
    def _word(self) -> np.dtype[Any]:
        """What is sampled: pairs of 16-bit numbers, else single ones."""
        return UNSIGNED[4 if self._bytes == 2 else self._bytes]

    def update(self, block: memoryview) -> None:
        if not self._counted:
            return
        data = np.frombuffer(block, dtype=np.uint8)
        for start in range(0, len(data), CHUNK_BYTES):
            self._chunk(data[start : start + CHUNK_BYTES])

    def finish(self) -> TensorStatistics:
        if not self._counted:
            return TensorStatistics()
        assert self._done == self._total, f"{self._done} of {self._total} elements were given"
        if self._carried:
            self._run(self._total - self._carried, self._total)
        form = self._format
        samples = np.concatenate(self._samples) if self._samples else np.empty(0, self._word)
        described = describe_samples(samples, self._dtype)
        all_zero = self._total > 0 and (self._top == 0 and not self._nan + self._infinite if form else
                                        self._carried == self._total)  # fmt: skip
        return TensorStatistics(
            num_nan=self._nan, num_infinite=self._infinite, num_negative_infinite=self._negative_infinite,
            nonfinite_at=self._nonfinite_at, largest=form.value(self._top) if form else 0.0, largest_at=self._top_at,
            second=form.value(self._second) if form else 0.0, num_vanishing=self._vanishing, vanishing_at=self._vanishing_at,
            num_zero=self._zero if self._exact else None, num_negative=self._negative if self._exact else None,
            num_row_runs=self._runs[True][0], row_run=self._runs[True][1],
            num_ragged_runs=self._runs[False][0], ragged_run=self._runs[False][1], all_zero=bool(all_zero), **described,
        )  # fmt: skip

    def _chunk(self, data: np.ndarray) -> None:
        elements = data.view(UNSIGNED[self._bytes])
        self._zero_runs(data, elements)
        words = data[: len(data) // self._word.itemsize * self._word.itemsize].view(self._word)
        if self._next < len(words):
            self._samples.append(words[self._next :: self._step].copy())
            self._next += len(self._samples[-1]) * self._step
        self._next -= len(words)
        if self._format is not None:
            self._values(elements, self._format)
        self._done += len(elements)

    def _values(self, elements: np.ndarray, form: FloatFormat) -> None:
        """Largest and smallest absolute values without masking signs off, which would write everything once more: seen as
        unsigned integers negative numbers come last, seen as signed ones first, and in both the larger of them later."""
        mask = elements.dtype.type(form.mask)
        views = [elements, elements.view(f"i{self._bytes}")] if form.signed else [elements]
        cells = self._largest_of_cells(views, mask)
        if int(cells.max()) >= form.nonfinite:
            elements = self._without_nonfinite(elements, form)
            cells = self._largest_of_cells([elements], mask)
        at = int(cells.argmax())
        top = int(cells[at])
        cells[at] = 0
        if top > self._top:
            begin = at * self._cell
            self._second = max(int(cells.max()), self._top)
            self._top_at = self._done + begin + int((elements[begin : begin + self._cell] & mask).argmax())
            self._top = top
        else:
            self._second = max(self._second, top)
        if self._exact:
            filled = (elements & mask) != 0
            self._zero += len(elements) - int(np.count_nonzero(filled))
            if form.signed:
                self._negative += int(np.count_nonzero((elements > mask) & filled))
        if form.vanishing and min(int(view.min()) & form.mask for view in views) < form.vanishing:
            self._count_vanishing(elements & mask, form)

    def _largest_of_cells(self, views: list[np.ndarray], mask: np.generic) -> np.ndarray:
        found: np.ndarray | None = None
        for view in views:
            whole = len(view) // self._cell * self._cell
            cells = view[:whole].reshape(-1, self._cell).max(axis=1)
            if whole < len(view):
                cells = np.append(cells, view[whole:].max())
            cells = cells.view(mask.dtype) & mask
            found = cells if found is None else np.maximum(found, cells)
        assert found is not None
        return found

    def _count_vanishing(self, found: np.ndarray, form: FloatFormat) -> None:
        small = np.flatnonzero((found < form.vanishing) & (found != 0))
        if len(small):
            self._vanishing += len(small)
            if self._vanishing_at is None:
                self._vanishing_at = self._done + int(small[0])

    def _without_nonfinite(self, elements: np.ndarray, form: FloatFormat) -> np.ndarray:
        """Count them; the others as they are without sign, zero in their places."""
        found = elements & elements.dtype.type(form.mask)
        bad = np.flatnonzero(found >= form.nonfinite)
        infinite = bad[found[bad] == form.infinity] if form.infinity else bad[:0]
        self._infinite += len(infinite)
        self._negative_infinite += int(np.count_nonzero(elements[infinite] > form.mask))
        self._nan += len(bad) - len(infinite)
        if self._nonfinite_at is None:
            self._nonfinite_at = self._done + int(bad[0])
        found[bad] = 0
        return found

    def _zero_runs(self, data: np.ndarray, elements: np.ndarray) -> None:
        whole = data[: len(data) // 8 * 8].view(np.uint64)
        regular = len(data) >= RUN_BYTES and not len(data) % 8 and whole[-1] and not (self._carried and not elements[0])
        # No run can be here, or reach in or out, unless one of these words is zero.
        if regular and (whole[::RUN_STRIDE_WORDS] != 0).all():
            self._end_carried()
            return
        filled = np.flatnonzero(elements)
        if not len(filled):
            self._carried += len(elements)
            return
        self._carried += int(filled[0])
        self._end_carried(self._done + int(filled[0]))
        gaps = np.diff(filled) - 1
        for index in np.flatnonzero(gaps * self._bytes >= RUN_BYTES):
            begin = self._done + int(filled[index]) + 1
            self._run(begin, begin + int(gaps[index]))
        self._carried = len(elements) - 1 - int(filled[-1])

    def _end_carried(self, end: int | None = None) -> None:
        if self._carried:
            end = self._done if end is None else end
            self._run(end - self._carried, end)
            self._carried = 0

    def _run(self, begin: int, end: int) -> None:
        if (end - begin) * self._bytes < RUN_BYTES:
            return
        rows = begin % self._row == 0 and (end % self._row == 0 or end == self._total)
        count, longest = self._runs[rows]
        self._runs[rows] = count + 1, max(longest, (begin, end - begin), key=lambda run: run[1])
