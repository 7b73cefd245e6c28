"""The pictures of a plan: how many sequences of which length fit, and where its ranks sit. Records in, inline SVG out.

Colours and fonts belong to the style sheet, as in `charts`. A layout of more cards than a page can show is drawn in part, and
the picture says how many are not shown.
"""

import math
from collections.abc import Sequence

from markupsafe import Markup

from dayzero.core.plan import FrontierPoint, Layout
from dayzero.report.charts import WIDTH, dot, line, rect, svg, text

MOST_NODES, MOST_CARDS = 8, 16  # drawn; of a node, and in all
MOST_COLOURS = 7  # of the style sheet


def frontier(points: Sequence[FrontierPoint]) -> Markup:
    """Sequences that fit at once over their length, both on log scales: below the line it fits."""
    shown = [point for point in points if point.concurrency > 0]
    left, right, top, bottom = 58.0, WIDTH - 14.0, 16.0, 190.0
    if not shown:
        return svg(40, [text(0, 24, "no context of any length fits")], "Nothing fits")
    lengths = [math.log2(point.context_tokens) for point in shown]
    counts = [math.log10(point.concurrency) for point in shown]
    low, high = min(lengths), max(max(lengths), min(lengths) + 1)
    floor, ceiling = math.floor(min(counts)), max(math.ceil(max(counts)), math.floor(min(counts)) + 1)

    def x(value: float) -> float:
        return left + 12 + (right - left - 24) * (value - low) / (high - low)

    def y(value: float) -> float:
        return bottom - (bottom - top) * (value - floor) / (ceiling - floor)

    parts = []
    for power in range(floor, ceiling + 1):
        parts += [line(left, y(power), right, y(power), "grid"), text(left - 8, y(power) + 4, f"{10**power:,}", anchor="end")]
    path = " ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in zip(lengths, counts, strict=True))
    parts.append(f'<polyline points="{path}" class="series"/>')
    for point, a, b in zip(shown, lengths, counts, strict=True):
        parts += [dot(x(a), y(b), f"{point.context_tokens:,} tokens: {point.concurrency:,} at once"),
                  text(x(a), bottom + 18, short_tokens(point.context_tokens), anchor="middle")]  # fmt: skip
    parts.append(text((left + right) / 2, bottom + 36, "tokens of each sequence", anchor="middle"))
    return svg(bottom + 42, parts, "Sequences that fit at once, over their length")


def short_tokens(tokens: int) -> str:
    """`131072` -> `128K`."""
    for unit, size in (("M", 2**20), ("K", 2**10)):
        if tokens >= size and tokens % size == 0:
            return f"{tokens // size}{unit}"
    return f"{tokens:,}"


def topology(layout: Layout, cards_per_node: int | None) -> Markup:
    """Nodes as boxes, cards in them as the layout places its ranks. Colour: pipeline stage; in a card: its replica (d) and
    its place in the tensor-parallel group (t)."""
    node = max(1, min(cards_per_node or layout.num_devices, layout.num_devices))
    at_card = {layout.card_of(rank): layout.coordinates(rank) for rank in range(layout.num_devices)}
    nodes = -(-layout.num_devices // node)
    columns = min(node, MOST_CARDS)
    width, height, gap = (WIDTH - 70) / columns, 30.0, 10.0
    parts: list[str] = []
    for number in range(min(nodes, MOST_NODES)):
        y = number * (height + gap) + 4
        parts.append(text(0, y + height / 2 + 4, f"node {number}", kind="strong"))
        for place in range(columns):
            seat = at_card.get(number * node + place)
            if seat is None:
                parts.append(rect(66 + place * width, y, width - 3, height, "trough", "not used"))
                continue
            kind = f"c{seat.pp % MOST_COLOURS + 1}"
            told = f"card {number * node + place}: stage {seat.pp}, replica {seat.dp}, tp {seat.tp}, cp {seat.cp}, ep {seat.ep}"
            parts.append(rect(66 + place * width, y, width - 3, height, f"band {kind}", told))
            if width > 24:
                label = f"d{seat.dp}t{seat.tp}" if width > 40 else f"t{seat.tp}"
                middle = 66 + place * width + (width - 3) / 2
                parts.append(text(middle, y + height / 2 + 4, label, anchor="middle", kind=f"on-band on-{kind}"))
    y = min(nodes, MOST_NODES) * (height + gap) + 14
    hidden = nodes - min(nodes, MOST_NODES)
    missing = [f"{hidden} more nodes of {node} cards"] if hidden else []
    missing += [f"{node - columns} more cards a node"] if node > columns else []
    if missing:
        parts.append(text(66, y, "and " + ", ".join(missing)))
        y += 16
    return svg(y, parts, f"{layout.num_devices} cards in {nodes} nodes, and the ranks on them")
