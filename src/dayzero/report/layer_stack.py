"""The picture of a model's layer stack: a `ModelDescription` goes in, inline SVG and the legend of its colours come out.

Layers run from left (the embedding) to right (the head). Two bands say what each layer is (mixer, feed-forward), two rows of
bars what it weighs (parameters, cache of one long sequence). Colours and fonts belong to the style sheet, as in `charts`.
"""

import itertools
from collections.abc import Sequence

from markupsafe import Markup

from dayzero.core.model import ModelDescription
from dayzero.core.units import format_bytes, format_count
from dayzero.report.charts import WIDTH, line, rect, svg, text

CACHE_TOKENS = 131_072
LEFT, RIGHT = 112.0, WIDTH - 8.0
BAND, BARS, GAP = 26.0, 54.0, 14.0
MOST_COLOURS = 7  # of the style sheet; a model has fewer kinds of mixers


def layer_stack(model: ModelDescription) -> Markup:
    layers = model.dimensions.num_layers
    kinds = [model.kind_of(layer) for layer in range(layers)]
    mixers, forwards = stack_legend(model)
    parts: list[str] = []
    y = 20.0
    for label, names, numbers in (("mixer", [kind.mixer for kind in kinds], mixers),
                                  ("feed-forward", [kind.feed_forward for kind in kinds], forwards)):  # fmt: skip
        parts += [text(0, y + BAND / 2 + 4, label, kind="strong"), *_band(y, names, numbers, layers)]
        y += BAND + GAP
    weights = [0] * layers
    for parameter in model.parameters:
        if parameter.layer is not None and parameter.tied_to is None and not parameter.is_buffer:
            weights[parameter.layer] += parameter.num_elements
    if any(weights):
        parts += _bars(y, "parameters", weights, format_count(max(weights)), format_count)
        y += BARS + GAP
    caches = [sum(spec.bytes_for(CACHE_TOKENS) for spec in kind.cache) for kind in kinds]
    if any(caches):
        parts += _bars(y, "cache at 128K", caches, format_bytes(max(caches)), format_bytes)
        y += BARS + GAP
    every = max(1, -(-layers // 12))
    for layer in range(0, layers, every):
        parts.append(text(_x(layer + 0.5, layers), y + 4, layer, anchor="middle"))
    parts.append(text((LEFT + RIGHT) / 2, y + 22, "layer", anchor="middle"))
    return svg(y + 30, parts, f"The {layers} layers of {model.name}: kinds, parameters and cache")


def stack_legend(model: ModelDescription) -> tuple[dict[str, int], dict[str, int]]:
    """Colour numbers of mixers and feed-forwards; they share none, so that one legend explains both."""
    mixers = dict.fromkeys(str(kind.mixer) for kind in model.layer_kinds)
    forwards = dict.fromkeys(str(kind.feed_forward) for kind in model.layer_kinds)
    numbers = itertools.count(1)
    found = [{name: min(next(numbers), MOST_COLOURS) for name in names if name != "none"} for names in (mixers, forwards)]
    return found[0], found[1]


def _x(layer: float, layers: int) -> float:
    return LEFT + (RIGHT - LEFT) * layer / layers


def _band(y: float, names: Sequence[str], numbers: dict[str, int], layers: int) -> list[str]:
    """Neighbours that are alike are one piece, with its number where there is room for it."""
    parts = [rect(LEFT, y, RIGHT - LEFT, BAND, "trough")]
    at = 0
    for name, run in itertools.groupby(names):
        size = len(list(run))
        left, right = _x(at, layers), _x(at + size, layers)
        if name in numbers:
            span = f"layer {at}" if size == 1 else f"layers {at} to {at + size - 1}"
            kind = f"c{numbers[name]}"
            parts.append(rect(left, y, right - left, BAND, f"band {kind}", f"{name.replace('_', ' ')}, {span}"))
            if right - left > 13:
                label = text((left + right) / 2, y + BAND / 2 + 4, numbers[name], anchor="middle", kind=f"on-band on-{kind}")
                parts.append(label)
        at += size
    return parts


def _bars(y: float, label: str, values: Sequence[float], top: str, said: object) -> list[str]:
    assert callable(said)
    highest = max(values)
    parts = [text(0, y + BARS / 2, label, kind="strong"), text(0, y + BARS / 2 + 16, top),
             line(LEFT, y + BARS, RIGHT, y + BARS, "grid")]  # fmt: skip
    for layer, value in enumerate(values):
        left, right = _x(layer, len(values)), _x(layer + 1, len(values))
        height = BARS * value / highest
        inset = min(1.0, (right - left) / 8)
        if value:
            bar = (left + inset, y + BARS - height, right - left - 2 * inset, height)
            parts.append(rect(*bar, "band c1", f"layer {layer}: {said(value)}"))
    return parts
