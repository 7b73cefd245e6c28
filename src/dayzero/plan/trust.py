"""How far a target's figures can be trusted: which are doubtful, and which an answer rests on.

Goes in: a target, an evaluator. Comes out: lines for a person. A doubtful figure never refuses a plan by itself.
"""

from dayzero.core.target import Target
from dayzero.core.units import format_bytes
from dayzero.plan.ledger import Evaluator


def doubtful(target: Target, field: str) -> bool:
    """Whether a figure is unverified or of low confidence (a prefix in `unverified_fields` covers what is below it)."""
    if target.confidence in ("low", "unverified"):
        return True
    return any(name == "all" or field == name or field.startswith(name + ".") for name in target.unverified_fields)


def memory_field(target: Target) -> str:
    """The figure that bounds memory."""
    usable, total = target.card.usable_memory_bytes, target.card.memory_bytes
    return "card.usable_memory_bytes" if usable is not None and (total is None or usable <= total) else "card.memory_bytes"


def rests_on(evaluator: Evaluator, dtypes: tuple[str, ...]) -> tuple[str, ...]:
    """Each target figure the answer depends on, with its value and how far it can be trusted."""
    target = evaluator.target
    figures: list[tuple[str, object]] = [(memory_field(target), format_bytes(evaluator.memory_bytes))]
    figures += [(f"card.flops_per_s.{dtype}", target.card.flops_per_s.get(dtype)) for dtype in dtypes]
    figures += [("card.memory_bytes_per_s", target.card.memory_bytes_per_s),
                ("node.link_bytes_per_s", target.node.link_bytes_per_s), ("node.num_cards", target.node.num_cards),
                ("network_bytes_per_s", target.network_bytes_per_s)]  # fmt: skip
    if target.node.scaleup_domain:
        figures.append(("node.scaleup_domain", target.node.scaleup_domain))
    lines = []
    for field, value in figures:
        trust = "unverified" if doubtful(target, field) else target.confidence
        shown = f"{value:.4g}" if isinstance(value, float) else value
        lines.append(f"{field} = {shown} ({trust})" if value is not None else f"{field}: not published")
    if evaluator.weights.formats.assumed:
        lines.append("weight formats: assumed from the configuration, no checkpoint header was read")
    return tuple(lines)
