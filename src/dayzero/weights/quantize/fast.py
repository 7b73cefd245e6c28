"""The compiled kernels for rows of weights, where this machine has them: bits equal to `codes`' own arithmetic."""

from __future__ import annotations

from functools import cache

import torch

from dayzero.weights.quantize.presets import Preset

TYPES = (torch.float32, torch.bfloat16, torch.float16)


@cache
def available() -> bool:
    from dayzero.ops.cpu import build

    return build.load().available


def block_range(values: torch.Tensor, block: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor] | None:
    """`codes.block_range` of values in any of `TYPES`; None where there is no kernel for it."""
    if block[0] != 1 or not _fits(values):
        return None
    return torch.ops.dayzero.block_range(values, block[1] or values.shape[1])


def integer_codes(
    values: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, preset: Preset, *, packed: bool
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """`codes.encode` (and `encoding.pack`) of integer presets, with the five sums that errors are told from; None where there
    is no kernel for it."""
    if preset.number != "int" or preset.block[0] != 1 or not _fits(values):
        return None
    width = preset.block[1] or values.shape[1]
    return torch.ops.dayzero.integer_codes(values, scales.to(torch.float32), zeros, width, preset.bits, packed)


def _fits(values: torch.Tensor) -> bool:
    return values.device.type == "cpu" and values.dtype in TYPES and values.numel() > 0 and available()
