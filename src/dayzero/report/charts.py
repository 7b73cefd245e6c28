"""The pictures of the report, drawn as small inline SVG: plain numbers go in, markup comes out.

Colours and fonts belong to the style sheet (classes), so that the same picture works on paper and in the dark. Nothing is
told by colour alone: bands carry numbers, series differ in shape. Every text from outside is escaped.
"""

import math
from collections.abc import Callable, Sequence

from markupsafe import Markup, escape

from dayzero.core.plan import MemoryLedger
from dayzero.core.reports import BenchPoint, LayerError, StabilityReport
from dayzero.core.units import format_bytes
from dayzero.report.memory import SETTLE_SHARE
from dayzero.report.text import format_ms

WIDTH = 560  # user units; the page scales the picture, small screens scroll it

# Order of the bands and their number in the legend.
LEDGER_CATEGORIES = ("weights", "cache", "activations", "communication", "runtime", "loader", "reserve")
BINDINGS = ("library", "fused", "composed", "custom", "fallback", "missing")


def svg(height: float, parts: Sequence[str], label: str) -> Markup:
    body = "".join(parts)
    return Markup(f'<svg viewBox="0 0 {WIDTH} {height:g}" role="img" aria-label="{escape(label)}">{body}</svg>')


def text(x: float, y: float, content: object, *, anchor: str = "start", kind: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" class="{kind}">{escape(str(content))}</text>'


def line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{kind}"/>'


def dot(x: float, y: float, title: str) -> str:
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" class="dot"><title>{escape(title)}</title></circle>'


def rect(x: float, y: float, width: float, height: float, kind: str, title: str = "") -> str:
    inside = f"<title>{escape(title)}</title>" if title else ""
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(0.0, width):.1f}" height="{height:.1f}" class="{kind}">{inside}</rect>'


def _nice_ticks(low: float, high: float, count: int = 4) -> list[float]:
    """Round figures that span [low, high]."""
    step = (high - low or abs(high) or 1.0) / count
    size = 10.0 ** math.floor(math.log10(step))
    step = next(size * m for m in (1, 2, 2.5, 5, 10) if size * m >= step * 0.999)
    first = math.floor(low / step)
    return [(first + i) * step for i in range(math.ceil(high / step - first - 1e-9) + 1)]


Band = tuple[str, int, float, str]  # class, number in the legend, value, title


def stacked_bar(y: float, height: float, parts: Sequence[Band], scale: Callable[[float], float]) -> list[str]:
    """Bands laid end to end."""
    drawn, at = [], 0.0
    for kind, number, value, title in parts:
        left, right = scale(at), scale(at + value)
        drawn.append(rect(left, y, right - left, height, f"band {kind}", title))
        if right - left > 13:
            drawn.append(text((left + right) / 2, y + height / 2 + 4, number, anchor="middle", kind=f"on-band on-{kind}"))
        at += value
    return drawn


def memory_ledger(ledgers: Sequence[MemoryLedger]) -> Markup:
    """One bar per distinct rank, bands by category, and the budget as a line across them."""
    groups: dict[tuple[object, ...], list[MemoryLedger]] = {}
    for ledger in ledgers:
        groups.setdefault((ledger.budget_bytes, *(ledger.total(c) for c in LEDGER_CATEGORIES)), []).append(ledger)
    shown = list(groups.values())[:8]
    top = max(max(group[0].total(), group[0].budget_bytes) for group in shown) * 1.04 or 1
    left, bar, row = (8.0, 34.0, 62.0)

    def scale(value: float) -> float:
        return left + (WIDTH - 2 * left) * value / top

    parts = []
    for index, group in enumerate(shown):
        y = 24 + index * row
        ledger = group[0]
        ranks = f"rank {ledger.rank}" if len(group) == 1 else f"ranks {ledger.rank} to {group[-1].rank} ({len(group)} alike)"
        budget = f"budget {format_bytes(ledger.budget_bytes)}"
        parts += [text(left, y - 8, f"{ranks}: {format_bytes(ledger.total())}", kind="strong"),
                  text(WIDTH - left, y - 8, budget, anchor="end", kind="budget-text")]  # fmt: skip
        bands = [(f"c{number}", number, ledger.total(category), f"{category}: {format_bytes(ledger.total(category))}")
                 for number, category in enumerate(LEDGER_CATEGORIES, 1) if ledger.total(category)]  # fmt: skip
        parts += [rect(left, y, scale(top) - left, bar, "trough"), *stacked_bar(y, bar, bands, scale)]
        parts.append(line(scale(ledger.budget_bytes), y - 5, scale(ledger.budget_bytes), y + bar + 5, "budget"))
    return svg(24 + len(shown) * row - 18, parts, "Memory per device by category, against its budget")


def coverage(shares: dict[str, tuple[float, float]]) -> Markup:
    """FLOPs and bytes of one decode step by binding: two bars. `shares`: binding -> (share of FLOPs, share of bytes)."""
    left = 62.0

    def scale(value: float) -> float:
        return left + (WIDTH - left - 8) * min(value, 1.0)

    parts = []
    for row, name in enumerate(("FLOPs", "bytes")):
        y = 6 + row * 40
        bands = [(f"b{number}", number, shares[binding][row], f"{binding}: {shares[binding][row]:.1%}")
                 for number, binding in enumerate(BINDINGS, 1) if binding in shares and shares[binding][row] > 0]  # fmt: skip
        parts += [text(0, y + 19, name, kind="strong"), rect(left, y, scale(1) - left, 30, "trough")]
        parts += stacked_bar(y, 30, bands, scale)
    return svg(80, parts, "Share of FLOPs and bytes by the way operators are bound")


def layer_errors(layers: Sequence[LayerError]) -> Markup:
    """Relative error of each layer (dots) on a log scale, the reference's own error (open diamonds) as the yardstick."""
    values = [value for layer in layers for value in (layer.relative, layer.reference_relative) if value > 0]
    low = math.floor(math.log10(min(values))) if values else -8
    high = max(math.ceil(math.log10(max(values)) + 1e-9) if values else 0, low + 1)
    left, right, top, bottom = 58.0, WIDTH - 10.0, 12.0, 210.0

    def x(index: int) -> float:
        return left + 10 + (right - left - 20) * (index / max(1, len(layers) - 1) if len(layers) > 1 else 0.5)

    def y(value: float) -> float:
        place = (math.log10(value) - low) / (high - low) if value > 0 else 0.0
        return bottom - (bottom - top) * min(1.0, max(0.0, place))

    step = max(1, (high - low) // 6)
    parts = []
    for power in range(low, high + 1, step):
        parts += [line(left, y(10.0**power), right, y(10.0**power), "grid"),
                  text(left - 8, y(10.0**power) + 4, f"1e{power}", anchor="end")]  # fmt: skip
    every = max(1, math.ceil(len(layers) / 10))
    for index, layer in enumerate(layers):
        if index % every == 0:
            parts.append(text(x(index), bottom + 18, layer.layer, anchor="middle"))
        px, py = x(index), y(layer.reference_relative)
        if layer.reference_relative > 0:
            parts.append(f'<path d="M{px:.1f} {py - 5:.1f}l5 5l-5 5l-5 -5z" class="yardstick"/>')
        own = f"reference's own {layer.reference_relative:.2e}"
        parts.append(dot(px, y(layer.relative), f"layer {layer.layer} ({layer.kind}): {layer.relative:.2e}, {own}"))
    parts.append(text((left + right) / 2, bottom + 36, "layer", anchor="middle"))
    return svg(bottom + 42, parts, "Relative error of each layer's output, log scale, with the reference's own error")


def over_concurrency(points: Sequence[BenchPoint], kind: str) -> Markup:
    """`throughput`: bars. `ttft` or `tpot` (ms): the median as a dot, 10th to 90th percentile as a whisker."""
    left, right, top, bottom = 58.0, WIDTH - 10.0, 22.0, 170.0
    spreads = [point.ttft_s if kind == "ttft" else point.tpot_s for point in points]
    is_bar = kind == "throughput"
    highs = [p.output_tokens_per_s for p in points] if is_bar else [s.p90 * 1e3 for s in spreads if s.n]
    ticks = _nice_ticks(0.0, max([*highs, 1e-9]))

    def y(value: float) -> float:
        return bottom - (bottom - top) * value / ticks[-1]

    parts = []
    for tick in ticks:
        parts += [line(left, y(tick), right, y(tick), "grid"), text(left - 8, y(tick) + 4, f"{tick:g}", anchor="end")]
    width = (right - left) / len(points)
    for index, (point, spread) in enumerate(zip(points, spreads, strict=True)):
        x = left + width * (index + 0.5)
        parts.append(text(x, bottom + 18, point.concurrency, anchor="middle"))
        if is_bar:
            bar, height = min(46.0, width * 0.6), bottom - y(point.output_tokens_per_s)
            parts.append(rect(x - bar / 2, bottom - height, bar, height, "band c1"))
            parts.append(text(x, bottom - height - 6, f"{point.output_tokens_per_s:.1f}", anchor="middle", kind="strong"))
        elif spread.n:
            low, middle, high = y(spread.p10 * 1e3), y(spread.median * 1e3), y(spread.p90 * 1e3)
            parts += [line(x, low, x, high, "whisker"), line(x - 7, low, x + 7, low, "whisker"),
                      line(x - 7, high, x + 7, high, "whisker"), dot(x, middle, f"n = {spread.n}"),
                      text(x + 12, middle + 4, format_ms(spread.median), kind="strong")]  # fmt: skip
        else:
            parts.append(text(x, bottom - 8, "not measured", anchor="middle"))
    parts.append(text((left + right) / 2, bottom + 36, "requests at a time", anchor="middle"))
    names = {
        "throughput": "Output tokens per second",
        "tpot": "Milliseconds per output token",
        "ttft": "Milliseconds to the first",
    }
    return svg(bottom + 42, parts, f"{names[kind]} over concurrency")


def memory_over_time(soak: StabilityReport) -> Markup:
    """Resident memory through the soak, and the fitted slope over the part it was fitted on."""
    left, right, top, bottom = 76.0, WIDTH - 10.0, 26.0, 200.0
    times, values = soak.memory_time_s, soak.memory_bytes
    every = max(1, len(times) // 500)
    unit = 2**30 if max(values) >= 2**30 else 2**20
    span = max(max(values) - min(values), max(values) * 0.02, 1)
    ticks = _nice_ticks(max(0.0, (min(values) - 0.15 * span) / unit), (max(values) + 0.15 * span) / unit)
    x_ticks = _nice_ticks(0.0, max(times[-1], 1.0), 5)

    def x(seconds: float) -> float:
        return left + (right - left) * seconds / x_ticks[-1]

    def y(num_bytes: float) -> float:
        return bottom - (bottom - top) * (num_bytes / unit - ticks[0]) / (ticks[-1] - ticks[0])

    parts = []
    for tick in ticks:
        height = y(tick * unit)
        parts += [line(left, height, right, height, "grid"), text(left - 8, height + 4, f"{tick:g}", anchor="end")]
    parts += [text(x(tick), bottom + 18, f"{tick:g}", anchor="middle") for tick in x_ticks]
    path = " ".join(f"{x(t):.1f},{y(b):.1f}" for t, b in list(zip(times, values, strict=True))[::every])
    parts.append(f'<polyline points="{path}" class="series"/>')
    if (slope := soak.memory_slope_bytes_per_s) is not None and len(times) > 2:
        fitted = [(t, b) for t, b in zip(times, values, strict=True) if t >= times[-1] * SETTLE_SHARE]
        mean_t = math.fsum(t for t, _ in fitted) / len(fitted)
        mean_b = math.fsum(b for _, b in fitted) / len(fitted)
        ends = [(x(t), y(mean_b + slope * (t - mean_t))) for t in (fitted[0][0], fitted[-1][0])]
        parts.append(line(*ends[0], *ends[1], "slope"))
    parts.append(text((left + right) / 2, bottom + 36, "seconds", anchor="middle"))
    parts.append(text(left, top - 8, "GiB" if unit == 2**30 else "MiB"))
    return svg(bottom + 42, parts, "Memory of the serving processes over time, with the fitted slope")
