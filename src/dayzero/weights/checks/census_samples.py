"""Some of a tensor's bits in, what they say out: magnitudes, signs, and whether another type explains them better.

Numbers of a trained or freshly drawn matrix spread over a few octaves around a small one, with both signs; the byte that
holds the exponent repeats a few values, the one of the mantissa takes all. Bits read as a type they are not of break this in
ways that differ from type to type. Only where the declared type reads badly, and another one well, is that one named.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

LEAST_SAMPLES = 128  # below this, entropies and spreads say little
# Where the mean and the deviation of log2|x| of a matrix may lie. A normal distribution deviates by 1.6, whatever its width.
MEAN_LOG2, DEVIATION_LOG2 = (-26.0, 8.0), (0.8, 4.0)
# A matrix whose numbers lie this close together has one magnitude: signs, or an exponent read as part of something else.
NARROW_LOG2 = 0.6


@dataclass(frozen=True, kw_only=True, slots=True)
class FloatFormat:
    """The bits of a floating-point type. Patterns without their sign order as the numbers do; from `nonfinite` on they are
    infinity (exactly `infinity`, 0 where the type has none) or NaN; below `vanishing` the number is under 2**-48."""

    bits: int
    mantissa: int
    bias: int
    nonfinite: int
    infinity: int = 0
    signed: bool = True
    vanishing: int = 0

    @property
    def mask(self) -> int:
        return (1 << (self.bits - self.signed)) - 1

    def values(self, patterns: np.ndarray) -> np.ndarray:
        """Absolute values of patterns without sign, in float64; those that are not finite become NaN."""
        exponents = (patterns >> patterns.dtype.type(self.mantissa)).astype(np.int64)
        fractions = (patterns & patterns.dtype.type((1 << self.mantissa) - 1)).astype(np.float64) / 2**self.mantissa
        normal = (exponents > 0) | (not self.signed)
        made = np.ldexp(np.where(normal, 1.0 + fractions, fractions), np.where(normal, exponents, 1) - self.bias)
        return np.where(patterns >= self.nonfinite, np.nan, made)

    def value(self, pattern: int) -> float:
        exponent, fraction = pattern >> self.mantissa, (pattern & ((1 << self.mantissa) - 1)) / 2**self.mantissa
        subnormal = self.signed and not exponent
        return math.ldexp(fraction if subnormal else 1 + fraction, max(exponent, int(self.signed)) - self.bias)


def _ieee(bits: int, mantissa: int, *, vanishing: bool = True) -> FloatFormat:
    width = bits - 1 - mantissa
    bias, infinity = (1 << (width - 1)) - 1, ((1 << width) - 1) << mantissa
    return FloatFormat(bits=bits, mantissa=mantissa, bias=bias, nonfinite=infinity, infinity=infinity,
                       vanishing=(bias - 48) << mantissa if vanishing else 0)  # fmt: skip


FLOATS: dict[str, FloatFormat] = {
    "float64": _ieee(64, 52),
    "float32": _ieee(32, 23),
    "bfloat16": _ieee(16, 7),
    "float16": _ieee(16, 10, vanishing=False),
    "float8_e5m2": _ieee(8, 2, vanishing=False),
    "float8_e4m3fn": FloatFormat(bits=8, mantissa=3, bias=7, nonfinite=0x7F),
    "float8_e8m0fnu": FloatFormat(bits=8, mantissa=0, bias=127, nonfinite=0xFF, signed=False),
}


def describe_samples(words: np.ndarray, dtype: str) -> dict[str, Any]:
    """The fields of `TensorStatistics` that come from samples. `words`: pairs of 16-bit numbers, else single numbers."""
    form = FLOATS.get(dtype)
    elements = words.view(np.uint16) if form and form.bits == 16 else words
    if not len(elements):
        return {}
    few = np.sort(elements[: 4 * LEAST_SAMPLES])
    found: dict[str, Any] = {"num_samples": len(elements), "num_distinct": 1 + int(np.count_nonzero(few[1:] != few[:-1]))}
    found["zero_share"] = round(1 - int(np.count_nonzero(elements)) / len(elements), 4)
    if form is None:
        return found
    spread = mean, deviation, _ = _spread(elements, dtype)
    if form.signed:
        found["negative_share"] = round(int(np.count_nonzero(elements > form.mask)) / len(elements), 4)
    found |= {"mean_log2": round(mean, 2), "deviation_log2": round(deviation, 2)}
    if len(words) >= LEAST_SAMPLES and form.bits >= 16:
        found["reads_like"] = _reads_like(words, elements, dtype, spread)
    return found


def _logs(elements: np.ndarray, dtype: str) -> np.ndarray:
    """log2 of the absolute values; NaN for zero and what is not finite."""
    if dtype == "float32":  # the upper half of one is a bfloat16, exact to 1/128: enough here
        elements, dtype = (elements >> np.uint32(16)).astype(np.uint16), "bfloat16"
    if dtype == "float64":
        return _log_values(elements, FLOATS[dtype])
    return _table(dtype)[elements]


@cache
def _table(dtype: str) -> np.ndarray:
    bits = FLOATS[dtype].bits
    return _log_values(np.arange(1 << bits, dtype=np.uint16 if bits == 16 else np.uint8), FLOATS[dtype]).astype(np.float32)


def _log_values(elements: np.ndarray, form: FloatFormat) -> np.ndarray:
    values = form.values(elements & elements.dtype.type(form.mask))
    values[values == 0] = np.nan
    return np.log2(values)


def _spread(elements: np.ndarray, dtype: str) -> tuple[float, float, float]:
    """Mean and deviation of log2 of the finite numbers that are not zero, and the share of all that those are."""
    logs = _logs(elements, dtype)
    kept = logs[logs == logs]
    if not len(kept):
        return 0.0, 0.0, 0.0
    mean = float(np.add.reduce(kept)) / len(kept)
    off = kept - kept.dtype.type(mean)
    return mean, math.sqrt(float(np.dot(off, off)) / len(kept)), len(kept) / len(elements)


def _sound(elements: np.ndarray, dtype: str) -> bool:
    """Whether the bits make an ordinary matrix of this type."""
    mean, deviation, share = _spread(elements, dtype)
    negative = np.count_nonzero(elements > FLOATS[dtype].mask) / len(elements)
    sizes = share > 0.9 and MEAN_LOG2[0] < mean < MEAN_LOG2[1] and DEVIATION_LOG2[0] < deviation < DEVIATION_LOG2[1]
    return bool(sizes and 0.2 < negative < 0.8)


def _reads_like(words: np.ndarray, elements: np.ndarray, dtype: str, spread: tuple[float, float, float]) -> str:
    if dtype == "float32":
        halves = words.view(np.uint16)
        for other in ("bfloat16", "float16"):
            # Mantissa bits of a real float32 make no sound numbers of 16 bits.
            if _sound(halves[0::2], other) and _sound(halves[1::2], other):
                return other
    mean, deviation, share = spread
    if dtype == "float16" and deviation < NARROW_LOG2 and abs(mean) < 3 and _sound(elements, "bfloat16"):
        return "bfloat16"
    if share and MEAN_LOG2[0] < mean < MEAN_LOG2[1] and deviation < DEVIATION_LOG2[1]:
        return ""
    swapped = elements.byteswap()
    if _sound(swapped, dtype) and _entropy(swapped) + 1 < _entropy(elements):
        return f"{dtype} with its bytes swapped"
    # A step of float16's exponent is eight of bfloat16's: 2^-6 reads as 2^-55. Not so for a matrix damaged in one part only.
    if dtype == "bfloat16" and mean < MEAN_LOG2[0] and _sound(elements, "float16"):
        return "float16"
    if FLOATS[dtype].bits == 16 and _sound(words, "float32") and _entropy(elements[1::2]) + 1 < _entropy(elements[0::2]):
        return "float32"
    return ""


def _entropy(elements: np.ndarray) -> float:
    """Bits of entropy of the top byte."""
    top = (elements >> elements.dtype.type(8 * elements.itemsize - 8)).astype(np.int64)
    shares = np.bincount(top, minlength=256) / len(top)
    shares = shares[shares > 0]
    return float(-(shares * np.log2(shares)).sum())
