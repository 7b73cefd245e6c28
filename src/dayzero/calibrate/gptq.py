"""A weight matrix and what it is given in, codes whose error in the layer's output is small out.

Columns are rounded one after the other, the most active first; what rounding a column costs is made up for by the columns
that are still to come (E. Frantar et al., GPTQ, 2022). Scales are chosen before, for the groups of the stored form, so that
no order has to be stored with the codes. Where a scale is chosen from a grid, the least error weighted by how large each
column's inputs are decides; the data-free scale is tried beside it, and the lower error of the output wins. All arithmetic
is float32 except the factorisation, which is float64 where float32 fails.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from dayzero.weights.quantize.codes import Codes, decode, encode_plainly, scales_of
from dayzero.weights.quantize.presets import Preset

# Columns that are updated together: their inner updates stay in the cache.
BLOCK_COLUMNS = 128
# Fractions of the data-free scale that are tried. Above 1 because a symmetric grid's far end is used on one side only.
SHRINKS = (1.07, 1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65, 0.6)
# Of the mean of the diagonal, added to all of it; raised tenfold when the factorisation fails.
DAMPING, MOST_DAMPING = 0.01, 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Rounded:
    """`loss` and `data_free_loss`: tr((W - Q) H (W - Q)^T) over tr(W H W^T), of these codes and of plain rounding."""

    codes: Codes
    loss: float
    data_free_loss: float
    damping: float
    dead_columns: int
    notes: tuple[str, ...] = ()


def round_matrix(
    weight: torch.Tensor, products: torch.Tensor, preset: Preset, scale_dtype: torch.dtype, *, search_scales: bool = True,
    feedback: bool = True, damping: float = DAMPING, shrinks: Sequence[float] = SHRINKS,
) -> Rounded:  # fmt: skip
    """weight [rows, columns] (output, input), products [columns, columns] = sum of x x^T. `feedback`: whether errors are made
    up for by other columns; without it only scales are chosen."""
    weight, hessian = weight.float(), products.float()
    diagonal = hessian.diagonal().clone()
    plain_scales, plain_zeros = scales_of(weight, preset, scale_dtype)
    plain = _codes(weight, plain_scales, plain_zeros, preset)
    scales, zeros = plain_scales, plain_zeros
    if search_scales:
        scales, zeros = searched_scales(weight, diagonal, preset, scale_dtype, shrinks)
    notes: list[str] = []
    used = 0.0
    dead = int((diagonal <= 0).sum())
    made = _codes(weight, scales, zeros, preset)
    before = _loss(weight, plain, preset, hessian)
    best = (_loss(weight, made, preset, hessian), made)
    if before <= best[0]:
        best = (before, plain)
    if feedback:
        factor, used, notes = inverse_factor(hessian, damping)
        order = torch.argsort(diagonal, descending=True, stable=True)
        # Scales that are best for rounding alone need not be best with feedback: both are tried.
        tried = [(scales, zeros)] + ([(plain_scales, plain_zeros)] if search_scales else [])
        for scale, zero in tried:
            fed = Codes(codes=_feed_back(weight, factor, order, scale, zero, preset), scales=scale, zeros=zero)
            loss = _loss(weight, fed, preset, hessian)
            if loss <= best[0]:
                best = (loss, fed)
        if best[1] is made or best[1] is plain:
            notes.append("error feedback did not pay: plain rounding is kept")
    whole = float((weight @ hessian).mul_(weight).sum())
    whole = whole if whole > 0 else 1.0
    return Rounded(codes=best[1], loss=best[0] / whole, data_free_loss=before / whole, damping=used, dead_columns=dead,
                   notes=tuple(notes))  # fmt: skip


def searched_scales(
    weight: torch.Tensor, importance: torch.Tensor, preset: Preset, scale_dtype: torch.dtype, shrinks: Sequence[float] = SHRINKS
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """For each block, of the data-free scale times each fraction the one with the least error weighted by importance [columns]
    (the mean square of each input, or ones)."""
    rows, columns = weight.shape
    height, width = preset.block[0] or rows, preset.block[1] or columns
    best: tuple[torch.Tensor, torch.Tensor | None] | None = None
    least = torch.empty(0)
    # A column that no token reached still counts a little: another text may reach it.
    importance = importance.clamp_min(float(importance.mean()) * 1e-3 + 1e-30)
    for shrink in shrinks:
        scales, zeros = scales_of(weight * shrink, preset, scale_dtype)
        error = decode(_codes(weight, scales, zeros, preset), preset).sub_(weight).square_().mul_(importance)
        error = _block_sums(error, height, width)
        if best is None:
            best, least = (scales, zeros), error
            continue
        better = error < least
        least = torch.where(better, error, least)
        chosen = torch.where(better, scales, best[0])
        best = (chosen, torch.where(better, zeros, best[1]) if zeros is not None and best[1] is not None else None)
    assert best is not None
    return best


def inverse_factor(hessian: torch.Tensor, damping: float = DAMPING) -> tuple[torch.Tensor, float, list[str]]:
    """The damped inverse's matrix [columns, columns] before ordering, the damping used, and what had to be said. Columns that
    nothing reached are left to plain rounding."""
    hessian = hessian.clone()
    diagonal = hessian.diagonal()
    dead = diagonal <= 0
    mean = float(diagonal[~dead].mean()) if bool((~dead).any()) else 1.0
    diagonal[dead] = mean
    notes: list[str] = []
    used = damping
    while True:
        for dtype in (torch.float32, torch.float64):
            trial = hessian.to(dtype)
            trial.diagonal().add_(used * mean)
            factor, info = torch.linalg.cholesky_ex(trial)
            if int(info) == 0:
                inverse = torch.cholesky_inverse(factor)
                if bool(torch.isfinite(inverse).all()):
                    return inverse, used, notes
        if used >= MOST_DAMPING:
            notes.append("the inputs' products have no usable inverse: no error feedback between columns")
            return torch.eye(len(hessian)), used, notes
        used *= 10
        notes.append(f"damping raised to {used:g}: the factorisation failed")


def _feed_back(
    weight: torch.Tensor, inverse: torch.Tensor, order: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None,
    preset: Preset,
) -> torch.Tensor:  # fmt: skip
    """Codes [rows, columns] of the weight, its columns rounded in this order."""
    rows, columns = weight.shape
    upper, info = torch.linalg.cholesky_ex(inverse[order][:, order].double(), upper=True)
    assert int(info) == 0, "the inverse of a positive definite matrix is one"
    factor = upper.float()
    left = weight[:, order].contiguous()
    single = replace(preset, block=(1, 1))
    height, width = preset.block[0] or rows, preset.block[1] or columns
    tall = scales.repeat_interleave(height, dim=0)[:rows]
    tall_zeros = zeros.repeat_interleave(height, dim=0)[:rows] if zeros is not None else None
    groups = (order // width).tolist()
    made = []
    for start in range(0, columns, BLOCK_COLUMNS):
        stop = min(start + BLOCK_COLUMNS, columns)
        errors = torch.empty(rows, stop - start)
        for column in range(start, stop):
            group = groups[column]
            scale = tall[:, group : group + 1]
            zero = tall_zeros[:, group : group + 1] if tall_zeros is not None else None
            value = left[:, column : column + 1]
            code = encode_plainly(value, scale, zero, single)
            made.append(code)
            back = decode(Codes(codes=code, scales=scale, zeros=zero), single)
            error = (value - back) / factor[column, column]
            errors[:, column - start] = error[:, 0]
            if column + 1 < stop:
                left[:, column + 1 : stop].addmm_(error, factor[column : column + 1, column + 1 : stop], alpha=-1)
        if stop < columns:
            left[:, stop:].addmm_(errors, factor[start:stop, stop:], alpha=-1)
    ordered = torch.cat([code.view(torch.uint8) for code in made], dim=1)  # bytes: not every dtype can be indexed
    codes = torch.empty_like(ordered)
    codes[:, order] = ordered
    return codes.view(made[0].dtype)


def _codes(weight: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, preset: Preset) -> Codes:
    return Codes(codes=encode_plainly(weight, scales, zeros, preset), scales=scales, zeros=zeros)


def _loss(weight: torch.Tensor, codes: Codes, preset: Preset, hessian: torch.Tensor) -> float:
    error = decode(codes, preset).sub_(weight)
    return float((error @ hessian).mul_(error).sum())


def _block_sums(values: torch.Tensor, height: int, width: int) -> torch.Tensor:
    across = torch.stack([part.sum(1) for part in values.split(width, dim=1)], dim=1)
    return across if height == 1 else torch.stack([part.sum(0) for part in across.split(height)])
