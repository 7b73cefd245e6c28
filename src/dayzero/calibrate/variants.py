"""Providers of quantized weights: the numbers that codes stand for, made when a layer's turn comes.

What a provider gives is what the stored form decodes to in the dtype of the plain weight, so that a forward with it is the
quantized model's (weights only: what a preset does to activations is not applied).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from dayzero.calibrate.calibrated import Calibrated
from dayzero.calibrate.inputs import InputWatch, MatrixName
from dayzero.calibrate.run import matrix, repeatable
from dayzero.calibrate.skeleton import Provider, Skeleton
from dayzero.calibrate.streamed import run_streamed
from dayzero.weights.quantize.codes import decode, quantize
from dayzero.weights.quantize.presets import Preset


def quantized_provider(
    provider: Provider, presets: Mapping[str, Preset], scale_dtype: Callable[[str], torch.dtype], *,
    transposed: frozenset[str] = frozenset(), calibrated: Calibrated | None = None,
) -> Provider:  # fmt: skip
    """`presets`: parameter -> preset; others are given as they are. `transposed`: those kept as [..., input, output]. Codes
    are `calibrated`'s where it has them, else made from the weight alone."""
    transposed = transposed | (calibrated.transposed if calibrated is not None else frozenset())

    def give(name: str) -> torch.Tensor:
        if calibrated is not None and name in calibrated.layer_codes.plain:
            return calibrated.layer_codes.read_plain(name)
        values, preset = provider(name), presets.get(name)
        if preset is None:
            return values
        made, dtype = values.to(torch.float32, copy=True), scale_dtype(name)
        stored = calibrated is not None and name in calibrated.layer_codes.matrices
        for index in range(made.reshape(-1, *made.shape[-2:]).shape[0]):
            part = matrix(made, index, name in transposed)
            if stored:
                assert calibrated is not None
                codes = calibrated.layer_codes.read(MatrixName(name, index))
            else:
                codes = quantize(part, preset, dtype)
            part.copy_(decode(codes, preset, dtype))
        return made

    return give


def last_kept(provider: Provider) -> tuple[Provider, Callable[[], None]]:
    """A provider that reads a tensor once until told to forget: several runs in lockstep share what is read."""
    kept: dict[str, torch.Tensor] = {}

    def give(name: str) -> torch.Tensor:
        if name not in kept:
            kept[name] = provider(name)
        return kept[name]

    return give, kept.clear


def orientations(skeleton: Skeleton, provider: Provider, tokens: torch.Tensor) -> frozenset[str]:
    """Parameters that the class keeps as [..., input, output], seen while one chunk of tokens [sequences, T] runs."""
    found: set[str] = set()

    def visit(station: str, calls: object) -> list[object]:
        results = []
        for call in calls:  # type: ignore[attr-defined]
            with InputWatch(skeleton.parameters_of(station)) as watch:
                results.append(repeatable(call).run())
            found.update(name.parameter for name, one in watch.seen.items() if one.transposed)
        return results

    skeleton.fill_resident(provider)
    run_streamed(skeleton, provider, [tokens], visit=visit)
    return frozenset(found)
