"""Linear layers whose weights are kept in few bits, in plain torch: what they compute, on any device.

A weight is codes, scales and perhaps zero points: a number is (code - zero) * scale. What a layer is given may be rounded to
codes first, each row with a scale of its own or all with one that was measured. Codes are made in float32 whatever the dtype
of the rows, as the compressed-tensors library makes them in float32. Fast kernels (`ops.cpu`) are compared with this.

Legend: E matrices, R rows (output), C columns (input), T rows that are multiplied.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

# How codes are kept: bytes of code + 128, int8, nibbles of code + 8, E4M3, nibbles of E2M1; the low half of a byte first.
CODES = ("unsigned8", "signed8", "nibble", "fp8", "fp4")
ACTIVATIONS = ("none", "int8", "fp8")
FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
EXPONENT_BIAS = 127
# A row's largest magnitude is this many scales: half of the 255 steps of int8, the largest E4M3 number.
LARGEST = {"int8": 127.5, "fp8": 448.0}
# The largest magnitude of a row, 127.5 scales, lies on the border of two codes, and the last bit of a division would decide
# between them. What is below this takes the outer one, as the library's own arithmetic does in most cases.
BORDER = -127.49
SCALE_OF_ZEROS = 2.0**-23  # of a row without anything in it: any number would do


@dataclass(frozen=True, kw_only=True, slots=True)
class Form:
    """`block_rows` x `block_columns` codes share a scale; 0 columns are a whole row."""

    code: Literal["unsigned8", "signed8", "nibble", "fp8", "fp4"]
    block_rows: int = 1
    block_columns: int = 0
    activations: Literal["none", "int8", "fp8"] = "none"

    @property
    def numbers(self) -> tuple[int, int, int, int]:
        """As the compiled operators take it."""
        return CODES.index(self.code), self.block_rows, self.block_columns, ACTIVATIONS.index(self.activations)


def numbers_of(codes: Tensor, code: str, columns: int) -> Tensor:
    """Stored codes [..., R, bytes or words] as numbers, float32 [..., R, C]."""
    raw = codes.contiguous().view(torch.uint8)
    if code == "unsigned8":
        return raw[..., :columns].to(torch.float32) - 128
    if code == "signed8":
        return raw[..., :columns].view(torch.int8).to(torch.float32)
    if code == "fp8":
        return raw[..., :columns].view(torch.float8_e4m3fn).to(torch.float32)
    halves = torch.stack([raw & 15, raw >> 4], dim=-1).flatten(-2)[..., :columns]
    if code == "nibble":
        return halves.to(torch.float32) - 8
    return torch.tensor(FP4_VALUES, device=codes.device)[halves.long()]


def dequantized(
    codes: Tensor, scales: Tensor, zeros: Tensor | None, *, form: Form, columns: int, dtype: torch.dtype = torch.float32
) -> Tensor:
    """The numbers [..., R, C] that parts stand for. Computed in float32 (float64 where that is asked for), rounded once."""
    values = numbers_of(codes, form.code, columns)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    real = torch.ldexp(torch.ones((), device=scales.device), scales.to(torch.int32) - EXPONENT_BIAS) if (
        scales.dtype == torch.uint8) else scales  # fmt: skip
    if zeros is not None:
        values = values - _spread(zeros.to(torch.float32), form, values)
    return (values.to(wide) * _spread(real.to(wide), form, values)).to(dtype)


def _spread(numbers: Tensor, form: Form, like: Tensor) -> Tensor:
    rows, columns = like.shape[-2:]
    if form.block_rows > 1:
        numbers = numbers.repeat_interleave(form.block_rows, dim=-2)[..., :rows, :]
    return numbers if not form.block_columns else numbers.repeat_interleave(form.block_columns, dim=-1)[..., :columns]


def activation_codes(x: Tensor, activations: str, input_scale: Tensor | None) -> tuple[Tensor, Tensor]:
    """Rows [..., C] as codes in float32, and their scales [..., 1]. `input_scale`: one that was measured, for all rows."""
    wide = x.to(torch.float32)
    scale = (wide.abs().amax(-1, keepdim=True) / LARGEST[activations]) if input_scale is None else (
        input_scale.to(torch.float32).reshape(1).expand(*x.shape[:-1], 1))  # fmt: skip
    scale = torch.where(scale == 0, torch.full_like(scale, SCALE_OF_ZEROS), scale)
    scaled = wide / scale
    if activations == "int8":
        scaled = scaled if input_scale is not None else torch.where(scaled < BORDER, -128.0, scaled)
        return scaled.round().clamp(-128, 127), scale
    return scaled.clamp(-448, 448).to(torch.float8_e4m3fn).to(torch.float32), scale


def rounded_activations(x: Tensor, activations: str, input_scale: Tensor | None) -> Tensor:
    """Rows as the layer means them, in their own dtype."""
    if activations == "none" or not x.numel():
        return x
    codes, scale = activation_codes(x, activations, input_scale)
    return (codes * scale).to(x.dtype)


def quantized_linear(
    x: Tensor, codes: Tensor, scales: Tensor, zeros: Tensor | None, bias: Tensor | None, input_scale: Tensor | None, *,
    code: str, block_rows: int, block_columns: int, activations: str,
) -> Tensor:  # fmt: skip
    """The definition: x [..., C] float64 -> [..., R]. Sums of integer codes are exact in float64."""
    form = Form(code=code, block_rows=block_rows, block_columns=block_columns)  # type: ignore[arg-type]
    weight = dequantized(codes, scales, zeros, form=form, columns=x.shape[-1], dtype=torch.float64)
    rows, scale = (x, 1.0) if activations == "none" or not x.numel() else (
        part.to(torch.float64) for part in activation_codes(x, activations, input_scale))  # fmt: skip
    out = (rows.reshape(-1, x.shape[-1]) @ weight.t()).reshape(*x.shape[:-1], weight.shape[0]) * scale
    return out if bias is None else out + bias


def composed_quantized_linear(
    x: Tensor, codes: Tensor, scales: Tensor, zeros: Tensor | None, bias: Tensor | None, input_scale: Tensor | None, *,
    code: str, block_rows: int, block_columns: int, activations: str,
) -> Tensor:  # fmt: skip
    """The same with torch's operators in the dtype of the rows: weights and rows are made plain, then multiplied."""
    form = Form(code=code, block_rows=block_rows, block_columns=block_columns)  # type: ignore[arg-type]
    weight = dequantized(codes, scales, zeros, form=form, columns=x.shape[-1], dtype=x.dtype)
    return F.linear(rounded_activations(x, activations, input_scale), weight, bias)
