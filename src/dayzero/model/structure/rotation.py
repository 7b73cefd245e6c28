"""Two watched forwards of a small instance in, the rotations by position found in them out; and the rotation by definition.

What changes between two runs with shifted positions is rotated, the pairs are those whose norm stays, and the order in
which they stand in the output of the projection (or norm) before the rotation is the order of the weights. That order
differs from what attention is given where a class reorders while it rotates. Which frequencies turned is decided elsewhere.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from dayzero.model.structure.watch import TOKENS, Runs, Watched, is_rotary, tensors_in

Style = Literal["half", "interleaved"]
CHANGED = 1e-3  # of the largest value: in float32 what should not change does by 1e-5


@dataclass(frozen=True, kw_only=True, slots=True)
class Rotation:
    """A rotation found in the forward of module `owner` (small instance): how many dimensions, and their pairs.

    `turns`: the cosine of the angle that each pair turned between the runs, sorted.
    """

    owner: str
    rotated_dims: int
    style: Style | None
    turns: tuple[float, ...]


def rotate(x: Tensor, position: int, frequencies: Sequence[float], style: Style, factor: float = 1.0) -> Tensor:
    """x [..., d] at a position, in float64: the first 2 * len(frequencies) dimensions turned in pairs, the rest as it is.

    The result stands in the order of the input. half: dimension i with i + n; interleaved: 2i with 2i + 1.
    """
    num = len(frequencies)
    angles = position * torch.tensor(frequencies, dtype=torch.float64)
    cos, sin = angles.cos() * factor, angles.sin() * factor
    out = x.to(torch.float64).clone()
    part = (slice(0, num), slice(num, 2 * num)) if style == "half" else (slice(0, 2 * num, 2), slice(1, 2 * num, 2))
    first, second = (x[..., dims].to(torch.float64) for dims in part)
    out[..., part[0]], out[..., part[1]] = first * cos - second * sin, second * cos + first * sin
    return out


def find_rotations(runs: Runs, factors: Sequence[float] = (1.0,)) -> list[Rotation]:
    """One `Rotation` for each module whose own forward rotates something by position, in the order they ran."""
    if runs.shifted is None:
        return []
    found: dict[str, Rotation] = {}
    for at, (one, other) in enumerate(zip(runs.first.ops, runs.shifted.ops, strict=True)):
        known = found.get(one.owner)
        # A norm of rotated values keeps their pairs; what rotates is a module with parts, or a rotary module.
        owner = runs.model.get_submodule(one.owner)
        if not is_rotary(owner) and not any(True for _ in owner.children()):
            continue
        if (known and known.style is not None) or one.out.shape != other.out.shape:
            continue
        pairs = _rotated(one.out, other.out)
        if pairs is None:
            continue
        style = _source_style(runs.first, one.owner, at, one.out, pairs, factors)
        if known is None or style is not None:
            found[one.owner] = Rotation(
                owner=one.owner, rotated_dims=2 * len(pairs), style=style, turns=_turns(one.out, other.out, pairs)
            )
    return list(found.values())


def _rotated(one: Tensor, other: Tensor) -> list[tuple[int, int]] | None:
    """The pairs where `other` is `one` with pairs of its last dimension turned; else None."""
    if one.dim() < 3 or one.shape[-1] < 4 or TOKENS not in one.shape[:-1]:
        return None
    one, other = one.to(torch.float64).flatten(0, -2), other.to(torch.float64).flatten(0, -2)
    size = float(one.abs().max())
    changed = ((one - other).abs().amax(0) > CHANGED * size).nonzero().flatten().tolist()
    num = len(changed)
    if size == 0 or num < 2 or num % 2:
        return None
    low, high = changed[: num // 2], changed[num // 2 :]
    options = [list(zip(changed[0::2], changed[1::2], strict=True))] if _run_of(changed, 1) else []
    # Where only the first pairs of a wide head turn, the halves are apart.
    if _run_of(low, 1) and _run_of(high, 1):
        options.append(list(zip(low, high, strict=True)))
    kept = []
    for pairs in options:
        first, second = (list(side) for side in zip(*pairs, strict=True))
        before = one[:, first] ** 2 + one[:, second] ** 2
        after = other[:, first] ** 2 + other[:, second] ** 2
        # A table of cos and sin keeps the norm of its pairs too, but that is 1 everywhere.
        if float((before - after).abs().max()) <= 1e-3 * float(before.max()) and float(before.std()) > 1e-3 * float(
            before.max()
        ):
            kept.append(pairs)
    return kept[0] if kept and all(pairs == kept[0] for pairs in kept) else None


def _turns(one: Tensor, other: Tensor, pairs: Sequence[tuple[int, int]]) -> tuple[float, ...]:
    one, other = one.to(torch.float64).flatten(0, -2), other.to(torch.float64).flatten(0, -2)
    cosines = []
    for pair in pairs:
        before, after = one[:, list(pair)], other[:, list(pair)]
        cosines.append(float((before * after).sum() / (before * before).sum()))
    return tuple(sorted(cosines))


def _run_of(numbers: Sequence[int], step: int) -> bool:
    return all(after - before == step for before, after in itertools.pairwise(numbers))


def _source_style(
    watched: Watched,
    owner: str,
    at: int,
    out: Tensor,
    pairs: Sequence[tuple[int, int]],
    factors: Sequence[float],
) -> Style | None:
    """How the pairs stand in what a linear or norm put out before the rotation, found by value at position 0."""
    dims = [dim for pair in pairs for dim in pair]
    turned = _first_token(out)[0, dims]
    mixer = owner.split(".")
    scopes = [".".join(mixer[:length]) + "." for length in range(len(mixer), 1, -1)]
    before = sorted(
        (call for name, call in watched.calls.items() if call.at <= at and any(name.startswith(s) for s in scopes[:2])),
        key=lambda call: -call.at,
    )
    given = [
        _first_token(tensor).flatten()
        for call in before
        for tensor in tensors_in(call.out)
        if tensor.is_floating_point() and TOKENS in tensor.shape[:-1]
    ]
    for factor in dict.fromkeys((1.0, *factors)):
        for values in given:
            if style := _ordered(values, turned / factor):
                return style
    # Queries may be multiplied by a constant of their own: then the largest of them tells it, for each value it may have been.
    for values in [values for values in given if values.numel() <= 512][:4]:
        for value in values[values != 0]:
            if style := _ordered(values, turned * float(value / turned[turned.abs().argmax()])):
                return style
    return None


def _first_token(tensor: Tensor) -> Tensor:
    """[everything else, last dimension] at the first token."""
    tensor = tensor.detach().to(torch.float64)
    axis = next(axis for axis, size in enumerate(tensor.shape[:-1]) if size == TOKENS)
    return tensor.select(axis, 0).reshape(-1, tensor.shape[-1])


def _ordered(values: Tensor, wanted: Tensor) -> Style | None:
    """wanted: the two values of each pair, pair after pair."""
    distance = (values[None, :] - wanted[:, None]).abs()
    if values.numel() < wanted.numel() or float(distance.amin(-1).max()) > 1e-5 * max(float(wanted.abs().max()), 1e-12):
        return None
    places = distance.argmin(-1).tolist()
    first, second = places[0::2], places[1::2]
    if len(set(places)) != len(places) or len(first) < 2:  # one pair alone stands in both orders
        return None
    if _run_of(first, 1) and _run_of(second, 1) and second[0] - first[0] >= len(first):
        return "half"
    return "interleaved" if _run_of(first, 2) and _run_of(second, 2) and second[0] - first[0] == 1 else None
