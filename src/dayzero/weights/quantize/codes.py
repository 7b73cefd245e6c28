"""Numbers to codes and scales, and back: the arithmetic of every preset, for any shape.

Scales are chosen from the largest magnitude of their block (or its least and greatest value, with zero points), as the
compressed-tensors library does, and rounded to the dtype that they are stored in before codes are made with them: the error
of rounding a scale then costs nothing. All sums are float32. A block of zeros gets a scale of finite size and codes of zero;
codes saturate. Infinity and NaN have no code: they are refused, by index.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dayzero.core.errors import DayZeroError
from dayzero.weights.forms.values import EXPONENT_BIAS, FP4_VALUES
from dayzero.weights.quantize import fast
from dayzero.weights.quantize.presets import Preset

# Where the magnitude of an FP4 code goes up by one; at the even ones of these a tie goes up, so that ties are to even.
FP4_BORDERS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
FP4_OFFSET = 2  # floor(log2(6)): the largest codes of a block share its largest value's power of two
LARGEST_EXPONENT = 254


@dataclass(frozen=True, kw_only=True, slots=True)
class Codes:
    """codes: int8, float8_e4m3fn, or uint8 FP4 codes [R, C]. scales: [blocks down, blocks across] in their stored dtype.
    zeros: int8 zero points of that shape, or None."""

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None = None


def quantize(values: torch.Tensor, preset: Preset, scale_dtype: torch.dtype) -> Codes:
    """values [R, C], any float dtype. Raises DayZeroError where they are not finite."""
    scales, zeros = scales_of(values, preset, scale_dtype)
    return Codes(codes=encode(values, scales, zeros, preset), scales=scales, zeros=zeros)


def scales_of(values: torch.Tensor, preset: Preset, scale_dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Scales and zero points of values [R, C], one for each block; the last block of a dimension may be partial."""
    low, high = fast.block_range(values, preset.block) or block_range(values.to(torch.float32), preset.block)
    _require_finite(values, low, high)
    if preset.scale_dtype == "uint8":
        return _exponents(torch.maximum(-low, high)), None
    least, greatest = preset.code_range
    if preset.symmetric:
        steps = (greatest - least) / 2
        scales = _stored(torch.maximum(-low, high) / steps, scale_dtype)
        return scales, None
    low, high = low.clamp(max=0), high.clamp(min=0)  # zero has a code of its own
    scales = _stored((high - low) / (greatest - least), scale_dtype)
    zeros = (least - low / scales.to(torch.float32)).round().clamp(least, greatest).to(torch.int8)
    return scales, zeros


def encode(values: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, preset: Preset) -> torch.Tensor:
    """Codes of values [R, C] with the scales and zero points of their blocks."""
    if (made := fast.integer_codes(values, scales, zeros, preset, packed=False)) is not None:
        return made[0]
    return encode_plainly(values, scales, zeros, preset)


def encode_plainly(values: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, preset: Preset) -> torch.Tensor:
    """`encode` in torch alone: what the kernels are held to."""
    least, greatest = preset.code_range
    scaled = _by_block(values.to(torch.float32), real_scales(scales, preset), preset.block, torch.Tensor.div)
    if preset.number == "int":
        if zeros is not None:
            scaled = _by_block(scaled, zeros.to(torch.float32), preset.block, torch.Tensor.add)
        return scaled.round_().clamp_(least, greatest).to(torch.int8)
    scaled = scaled.clamp_(least, greatest)
    return scaled.to(torch.float8_e4m3fn) if preset.bits == 8 else fp4_codes(scaled)


def decode(codes: Codes, preset: Preset, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The numbers [R, C] that codes stand for: code (less zero point) times scale in float32, rounded once to `dtype`."""
    if preset.bits == 4 and preset.number == "float":
        values = torch.tensor(FP4_VALUES, device=codes.codes.device)[codes.codes.long()]
    else:
        values = codes.codes.to(torch.float32)
    if codes.zeros is not None:
        values = _by_block(values, codes.zeros.to(torch.float32), preset.block, torch.Tensor.sub)
    return _by_block(values, real_scales(codes.scales, preset), preset.block, torch.Tensor.mul).to(dtype)


def real_scales(scales: torch.Tensor, preset: Preset) -> torch.Tensor:
    """Stored scales as float32 numbers."""
    if preset.scale_dtype == "uint8":
        return torch.ldexp(torch.ones(scales.shape, device=scales.device), scales.to(torch.int32) - EXPONENT_BIAS)
    return scales.to(torch.float32)


def block_range(values: torch.Tensor, block: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """The least and the greatest value of each block of [R, C]. Partial blocks count what they have."""
    rows, columns = values.shape
    height, width = block[0] or rows, block[1] or columns
    if height == 1 and columns % width == 0:
        return torch.aminmax(values.reshape(rows, columns // width, width), dim=-1)
    across = [torch.aminmax(part, dim=-1) for part in values.split(width, dim=1)]
    low, high = (torch.stack([part[index] for part in across], dim=1) for index in (0, 1))
    if height == 1:
        return low, high
    return (
        torch.stack([part.amin(0) for part in low.split(height)]),
        torch.stack([part.amax(0) for part in high.split(height)]),
    )


def fp4_codes(values: torch.Tensor) -> torch.Tensor:
    """uint8 codes of the nearest E2M1 numbers, ties to the even code, of values within [-6, 6]."""
    magnitude = values.abs()
    codes = torch.zeros(values.shape, dtype=torch.uint8, device=values.device)
    for number, border in enumerate(FP4_BORDERS):
        codes += (magnitude > border) if number % 2 == 0 else (magnitude >= border)
    return codes | (torch.signbit(values).to(torch.uint8) << 3)


def _exponents(largest: torch.Tensor) -> torch.Tensor:
    """Exponent bytes of blocks with these largest magnitudes. A largest value that would round up past the largest code,
    from 1.75 of its power of two on, takes the next power (the rule of the compressed-tensors library)."""
    bits = largest.to(torch.float32).contiguous().view(torch.int32) + (1 << 21)
    exponents = (bits >> 23) - FP4_OFFSET
    return exponents.clamp(0, LARGEST_EXPONENT).to(torch.uint8)


def _stored(scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Scales as they are stored. One that is zero there, of a block of next to nothing, becomes a harmless number."""
    stored = scales.to(dtype)
    return torch.where((stored == 0) | ~stored.isfinite(), torch.full_like(stored, torch.finfo(dtype).eps), stored)


def _by_block(values: torch.Tensor, numbers: torch.Tensor, block: Sequence[int], operation: object) -> torch.Tensor:
    """`operation(values, number of the block)`, without spreading the numbers where blocks divide the columns."""
    assert callable(operation)
    rows, columns = values.shape
    height, width = block[0] or rows, block[1] or columns
    if height > 1:
        numbers = numbers.repeat_interleave(height, dim=0)[:rows]
    if columns % width == 0:
        return operation(values.reshape(rows, columns // width, width), numbers.unsqueeze(-1)).reshape(rows, columns)
    return operation(values, numbers.repeat_interleave(width, dim=1)[:, :columns])


def _require_finite(values: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> None:
    if bool(torch.isfinite(low).all()) and bool(torch.isfinite(high).all()):
        return
    where = (~values.isfinite()).nonzero()
    first = where[0].tolist()
    raise DayZeroError(
        "a weight that is to be quantized is not finite",
        got=f"{values[tuple(first)].item()} at {first}" + (f" and {len(where) - 1} more" if len(where) > 1 else ""),
        want="finite numbers",
        fix="download the file again; what is broken at the source cannot be quantized",
    )
