"""A plain model's parameters and views and a policy in, the same with quantized weights' stored parts out.

Everything after it (placing on ranks, streaming, ledgers, verification) sees stored parts as parameters like any other, with
sharding rules of their own: a cut falls between blocks and between packed words, or the parameter cannot be cut.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from math import lcm

from dayzero.core.model import ModelDescription, Parameter, ShardRule
from dayzero.weights.algebra import View
from dayzero.weights.decoding import Decoder
from dayzero.weights.quantize.codes import Codes
from dayzero.weights.quantize.encoding import Quantized, ViewRows, encoders, view_of
from dayzero.weights.quantize.evidence import ErrorSums
from dayzero.weights.quantize.policy import Choice
from dayzero.weights.quantize.presets import Preset


@dataclass(kw_only=True, slots=True)
class Rewritten:
    """`weights`: what is quantized, by the plain name; `parts`: stored name -> the plain name it stores a part of."""

    views: dict[str, View] = field(default_factory=dict)
    decoders: dict[str, Decoder] = field(default_factory=dict)  # by the source name that views use
    weights: dict[str, Quantized] = field(default_factory=dict)
    parts: dict[str, str] = field(default_factory=dict)
    errors: list[ErrorSums] = field(default_factory=list)
    by_stored: dict[str, ErrorSums] = field(default_factory=dict)  # stored codes -> their weight's sums
    kept: dict[str, str] = field(default_factory=dict)  # what was to be quantized and cannot be -> why

    def add(self, name: str, weight: Quantized, rows: ViewRows, *, packed_zeros: bool) -> None:
        self.weights[name] = weight
        made, errors = encoders(weight, rows, packed_zeros=packed_zeros)
        self.errors.append(errors)
        self.by_stored[weight.stored_name("codes")] = errors
        for stored, decoder in made.items():
            self.views[stored] = view_of(decoder)
            self.decoders[decoder.name] = decoder
            self.parts[stored] = name


def quantized_model(
    model: ModelDescription, views: Mapping[str, View], choices: Mapping[str, Choice], rows: ViewRows, *,
    sources: Mapping[str, tuple[str, ...]], transposed: frozenset[str] = frozenset(),
    codes: Mapping[str, Callable[[int, int], Codes]] | None = None,
) -> tuple[ModelDescription, Rewritten]:  # fmt: skip
    """The model as its artifact stores it. `sources`: stored tensors behind a parameter; `transposed`: parameters that the
    class keeps as [..., input, output]; `codes`: what calibration chose for rows of a parameter."""
    made = Rewritten()
    parameters: list[Parameter] = []
    for one in model.parameters:
        choice, view = choices.get(one.name), views.get(one.name)
        if view is None or choice is None or choice.preset is None:
            parameters.append(one)
            if view is not None:
                made.views[one.name] = view
            continue
        columns = view.shape[-2 if one.name in transposed else -1]
        if (why := choice.preset.unfit(columns, on_disk=False)) is not None:
            made.kept[one.name] = why
            parameters.append(one)
            made.views[one.name] = view
            continue
        rule = one.shard
        if one.name in transposed:
            order = (*range(len(view.shape) - 2), len(view.shape) - 1, len(view.shape) - 2)
            view, rule = view.permute(order), _swapped(rule, len(view.shape))
        weight = Quantized(name=one.name, view=view, preset=choice.preset, sources=sources[one.name],
                           codes=(codes or {}).get(one.name))  # fmt: skip
        made.add(one.name, weight, rows, packed_zeros=False)
        for part, (shape, dtype) in weight.stored_parts(packed_zeros=False).items():
            parameters.append(
                replace(one, name=weight.stored_name(part), shape=shape, dtype=dtype, stored_dtype=None,
                        shard=part_rule(rule, part, choice.preset, weight.matrix, len(shape)))
            )  # fmt: skip
    return replace(model, parameters=tuple(parameters)), made


def part_rule(rule: ShardRule, part: str, preset: Preset, matrix: tuple[int, int], rank: int) -> ShardRule:
    """How a stored part is cut so that all parts of a weight are cut at the same places."""
    if rule.tensor_dim is None:
        return rule
    across = rule.tensor_dim == rank - 1
    height, width = preset.block
    extent = matrix[1] if across else matrix[0]
    granule = lcm(preset.word_columns, width or 1) if across else max(height, 1)
    segments = rule.segments or (extent,)
    units = rule.units or segments
    counts = tuple(_units(size, count, granule) for size, count in zip(segments, units, strict=True))
    if across:
        per = preset.word_columns if part == "codes" else width
    else:
        per = height if part == "scale" else 1
    if across and part != "codes" and not width:
        return replace(rule, tensor_dim=None, segments=(), units=(), replicable=False)  # one scale for the whole row
    sizes = tuple(-(-size // max(per, 1)) for size in segments)
    return replace(rule, segments=sizes, units=counts)


def _units(size: int, count: int, granule: int) -> int:
    """Pieces that a segment of `count` units can be cut into at multiples of both a unit and a granule; 1 when nowhere."""
    width = lcm(size // count, granule)
    return size // width if size % width == 0 else 1


def _swapped(rule: ShardRule, rank: int) -> ShardRule:
    turned = {rank - 1: rank - 2, rank - 2: rank - 1}
    return rule if rule.tensor_dim is None else replace(rule, tensor_dim=turned.get(rule.tensor_dim, rule.tensor_dim))
