"""Scales moved from a matrix's inputs into what makes them, so that what the inputs weigh most is rounded finest.

Columns of a matrix whose inputs are large are multiplied by s > 1 before rounding, and what made the inputs is divided by s
(J. Lin et al., AWQ, 2023). What made them is found by trial, never by name: a vector or a matrix's rows of the right size are
divided by a random s, every matrix that is given this input is multiplied by it, and the pair is taken where the layer's
output then is what it was. So a norm before its projections, values before the output projection and the linear half of a
gated layer before its last matrix are all found where they are exact, and nothing else is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dayzero.calibrate.inputs import MatrixName, Seen
from dayzero.weights.quantize.codes import decode, quantize
from dayzero.weights.quantize.presets import Preset

EXPONENTS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)
# Of the output's largest value: rounding of float32 sums in another order, far below what a wrong pair does.
SAME = 1e-5
SMALLEST = 1e-4  # of the largest scale: columns without inputs are left alone


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """`producers` [.., columns first] are divided by s, `consumers` (True: kept as [input, output]) multiplied along their
    inputs. `one_plus`: the class adds 1 to the producer's values before it multiplies with them."""

    producers: tuple[str, ...]
    consumers: tuple[tuple[str, bool], ...]
    columns: int
    one_plus: bool = False


Parameters = Mapping[str, torch.Tensor]
Run = Callable[[], Any]


def find_pairs(parameters: Parameters, seen: Mapping[MatrixName, Seen], run: Run) -> tuple[list[Pair], dict[str, str]]:
    """Exact pairs, and for what is given an input that nothing absorbs: the reason. `seen`: all matrices of the layer on the
    calls that `run` repeats. Parameters are changed while this runs, and are afterwards as they were."""
    groups = _by_input(seen)
    wanted = _output(run)
    pairs: list[Pair] = []
    skipped: dict[str, str] = {}
    taken: set[str] = set()
    for consumers, columns in groups:
        names = {name for name, _ in consumers}
        found = None
        for producers in _producers(parameters, columns):
            if taken & {*producers} or names & {*producers}:
                continue
            for one_plus in (False, True) if parameters[producers[0]].dim() == 1 else (False,):
                pair = Pair(producers=producers, consumers=consumers, columns=columns, one_plus=one_plus)
                if found is None and _is_exact(pair, parameters, run, wanted):
                    found = pair
        if found is None:
            skipped |= dict.fromkeys(sorted(names), "nothing before it takes its scale exactly")
        else:
            pairs.append(found)
            taken |= {*found.producers}
    return pairs, skipped


def apply(pair: Pair, parameters: Parameters, scale: torch.Tensor) -> dict[str, torch.Tensor]:
    """New values of the pair's parameters for a scale [columns]."""
    made = {}
    for name in pair.producers:
        values = parameters[name]
        shaped = scale if values.dim() == 1 else scale[:, None]
        made[name] = (values + 1) / shaped - 1 if pair.one_plus else values / shaped
    for name, transposed in pair.consumers:
        made[name] = parameters[name] * (scale[:, None] if transposed else scale)
    return made


def search_scale(
    pair: Pair, parameters: Parameters, seen: Mapping[MatrixName, Seen], presets: Mapping[str, Preset],
    scale_dtype: Callable[[str], torch.dtype],
) -> tuple[torch.Tensor, float]:  # fmt: skip
    """The power of the inputs' root mean square with the least weighted rounding error, and its gain over no scale (1: none).
    Consumers that are not quantized count nothing."""
    power = _power(pair, seen)
    rms = power.clamp_min(0).sqrt()
    rms = torch.where(rms > 0, rms, rms[rms > 0].mean() if bool((rms > 0).any()) else torch.ones(()))
    errors = []
    scales = []
    for exponent in EXPONENTS:
        scale = rms**exponent
        scale = scale / (scale.max() * scale.min()).sqrt()
        scale = scale.clamp_min(float(scale.max()) * SMALLEST)
        error = 0.0
        for name, transposed in pair.consumers:
            if (one := presets.get(name)) is None:
                continue
            for part in parameters[name].reshape(-1, *parameters[name].shape[-2:]):
                weight = part.T if transposed else part
                made = decode(quantize((weight * scale).contiguous(), one, scale_dtype(name)), one) / scale
                error += float(((made - weight).square() * power).sum())
        errors.append(error)
        scales.append(scale)
    best = min(range(len(errors)), key=lambda index: errors[index])
    return scales[best], errors[best] / errors[0] if errors[0] else 1.0


def absorb(
    parameters: Parameters, seen: Mapping[MatrixName, Seen], presets: Mapping[str, Preset],
    scale_dtype: Callable[[str], torch.dtype], run: Run,
) -> tuple[dict[str, torch.Tensor], list[str]]:  # fmt: skip
    """New values of the layer's parameters, with which it computes the same, and notes on what was scaled and what was not."""
    pairs, skipped = find_pairs(parameters, seen, run)
    made: dict[str, torch.Tensor] = {}
    notes = []
    for pair in pairs:
        now = {**parameters, **made}
        if not any(name in presets for name, _ in pair.consumers):
            continue
        scale, gain = search_scale(pair, now, seen, presets, scale_dtype)
        told = f"{', '.join(pair.producers)} takes the input scale of {', '.join(name for name, _ in pair.consumers)}"
        if gain >= 1:
            notes.append(f"{told}: no scale is better than none")
            continue
        made |= _rounded(pair, now, apply(pair, now, scale), presets, scale_dtype)
        notes.append(f"{told}: rounding error {gain:.2f} of what it was")
    notes += [f"{name}: {reason}" for name, reason in skipped.items() if name in presets]
    return made, notes


def _rounded(pair: Pair, before: Parameters, after: dict[str, torch.Tensor], presets: Mapping[str, Preset],
             scale_dtype: Callable[[str], torch.dtype]) -> dict[str, torch.Tensor]:  # fmt: skip
    """Plain parameters as their dtype holds them: that is what will be stored."""
    return {name: values if name in presets else values.to(scale_dtype(name)).float() for name, values in after.items()}


def _by_input(seen: Mapping[MatrixName, Seen]) -> list[tuple[tuple[tuple[str, bool], ...], int]]:
    """Parameters that are given the same input, with its width. Of experts each is given some of the tokens, together all:
    the largest magnitudes of all of them are those of the whole input."""
    largest: dict[str, torch.Tensor] = {}
    turned: dict[str, bool] = {}
    for name, one in seen.items():
        known = largest.get(name.parameter)
        largest[name.parameter] = one.largest if known is None else torch.maximum(known, one.largest)
        turned[name.parameter] = one.transposed
    groups: list[tuple[list[str], torch.Tensor]] = []
    for parameter, sizes in largest.items():
        group = next((names for names, other in groups if other.shape == sizes.shape and torch.equal(other, sizes)), None)
        if group is None:
            groups.append(([parameter], sizes))
        else:
            group.append(parameter)
    return [(tuple((name, turned[name]) for name in names), len(sizes)) for names, sizes in groups]


def _producers(parameters: Parameters, columns: int) -> list[tuple[str, ...]]:
    """Modules whose vectors, or whose matrix's rows, are as many as the columns: each as its parameters' names."""
    modules: dict[str, list[str]] = {}
    for name, values in parameters.items():
        if values.dim() in (1, 2) and values.shape[0] == columns:
            modules.setdefault(name.rpartition(".")[0], []).append(name)
    # A matrix first: a bias goes with it.
    return [tuple(sorted(names, key=lambda name: -parameters[name].dim())) for names in modules.values()]


def _is_exact(pair: Pair, parameters: Parameters, run: Run, wanted: Sequence[torch.Tensor]) -> bool:
    scale = torch.empty(pair.columns).uniform_(0.5, 2.0, generator=torch.Generator().manual_seed(pair.columns))
    changed = apply(pair, parameters, scale)
    before = {name: parameters[name].clone() for name in changed}
    try:
        for name, values in changed.items():
            parameters[name].data.copy_(values)
        got = _output(run)
    finally:
        for name, values in before.items():
            parameters[name].data.copy_(values)
    return len(got) == len(wanted) and all(
        one.shape == other.shape and float((one - other).abs().max()) <= SAME * float(other.abs().max())
        for one, other in zip(got, wanted, strict=True)
        if one.numel()
    )


def _output(run: Run) -> list[torch.Tensor]:
    """All floating tensors that the layer returns."""
    found: list[torch.Tensor] = []

    def walk(value: Any) -> None:
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            found.append(value.float())
        elif isinstance(value, (tuple, list)):
            for item in value:
                walk(item)

    walk(run())
    return found


def _power(pair: Pair, seen: Mapping[MatrixName, Seen]) -> torch.Tensor:
    """Sum of squares of each column of the input: the first consumer's, of a stack all its matrices' together."""
    parts = [one.power for name, one in seen.items() if name.parameter == pair.consumers[0][0]]
    return torch.stack(parts).sum(0)
