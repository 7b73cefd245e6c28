"""How far a target's figures can be trusted: which are doubtful, and which an answer rests on.

Goes in: a target, an evaluator. Comes out: lines for a person. A doubtful figure never refuses a plan by itself.
"""

from dayzero.core.target import Target
from dayzero.core.units import format_bytes
from dayzero.plan.ledger import Evaluator

# What a step runs; a reduce-scatter counts as an all-gather.
COLLECTIVES = ("all_reduce", "all_gather", "all_to_all", "send_recv")


def doubtful(target: Target, field: str) -> bool:
    """Whether a figure is unverified or of low confidence (a prefix in `unverified_fields` covers what is below it)."""
    if target.confidence in ("low", "unverified"):
        return True
    return any(name == "all" or field == name or field.startswith(name + ".") for name in target.unverified_fields)


def memory_field(target: Target) -> str:
    """The figure that bounds memory."""
    usable, total = target.card.usable_memory_bytes, target.card.memory_bytes
    return "card.usable_memory_bytes" if usable is not None and (total is None or usable <= total) else "card.memory_bytes"


def links_measured(target: Target) -> bool:
    """Whether no published or assumed link enters inside a host: every collective of a step has a measured figure."""
    return {link.collective for link in target.links}.issuperset(COLLECTIVES)


def _measured_links(target: Target) -> list[str]:
    """The measured links that prices come from, one line a collective."""
    lines = []
    for name in COLLECTIVES:
        sizes = [f"{link.bytes_per_s / 1e9:.4g} GB/s after {link.latency_s * 1e6:.4g} us over {link.group_size} ranks"
                 for link in sorted(target.links, key=lambda link: link.group_size) if link.collective == name]  # fmt: skip
        if sizes:
            lines.append(f"links.{name} = {', '.join(sizes)} (measured on this machine; other sizes take the nearest)")
    return lines


def rests_on(evaluator: Evaluator, dtypes: tuple[str, ...]) -> tuple[str, ...]:
    """Each target figure the answer depends on, with its value and how far it can be trusted."""
    target = evaluator.target
    figures: list[tuple[str, object]] = [(memory_field(target), format_bytes(evaluator.memory_bytes))]
    figures += [(f"card.flops_per_s.{dtype}", target.card.flops_per_s.get(dtype)) for dtype in dtypes]
    figures += [("card.memory_bytes_per_s", target.card.memory_bytes_per_s),
                ("node.link_bytes_per_s", target.node.link_bytes_per_s), ("node.num_cards", target.node.num_cards),
                ("network_bytes_per_s", target.network_bytes_per_s)]  # fmt: skip
    if links_measured(target):
        figures = [(field, value) for field, value in figures if field != "node.link_bytes_per_s"]
    if target.node.scaleup_domain:
        figures.append(("node.scaleup_domain", target.node.scaleup_domain))
    lines = []
    for field, value in figures:
        trust = "unverified" if doubtful(target, field) else target.confidence
        shown = f"{value:.4g}" if isinstance(value, float) else value
        lines.append(f"{field} = {shown} ({trust})" if value is not None else f"{field}: not published")
    lines += _measured_links(target)
    if evaluator.weights.formats.assumed:
        lines.append("weight formats: assumed from the configuration, no checkpoint header was read")
    return tuple(lines)
