"""A plan in words: what binds it, what killed its neighbours, which figures it rests on, and the smallest change that
would make an impossible request possible.

Goes in: candidates priced by `search`. Comes out: strings and `Rejected` records. Nothing here decides.
"""

from dataclasses import replace
from math import log2

from dayzero.core.errors import DayZeroError
from dayzero.core.plan import Layout, Rejected
from dayzero.core.target import Target
from dayzero.core.units import format_bytes
from dayzero.plan.ledger import Evaluation, Evaluator
from dayzero.plan.search import Candidate, Search

MOST_REJECTED = 24
# What may be proposed instead of the weights as they are, mildest first.
SMALLER_WEIGHTS = ("fp8", "int8", "int4")


def spelled(layout: Layout) -> str:
    """`TP8xPP2xEP8`, degrees of 1 left out."""
    axes = (("TP", layout.tp), ("PP", layout.pp), ("DP", layout.dp), ("CP", layout.cp), ("EP", layout.ep))
    return "x".join(f"{name}{degree}" for name, degree in axes if degree > 1) or "one rank"


def rejected(search: Search, candidates: list[Candidate], chosen: Candidate) -> tuple[Rejected, ...]:
    """The neighbours of the chosen layout, nearest first, each with the one constraint that killed it."""
    others = sorted((c for c in candidates if c is not chosen), key=lambda c: _distance(c.layout, chosen.layout))
    return tuple(_rejection(search, candidate, chosen) for candidate in others[:MOST_REJECTED])


def _distance(one: Layout, other: Layout) -> float:
    return sum(abs(log2(getattr(one, axis) / getattr(other, axis))) for axis in ("tp", "pp", "dp", "cp", "ep"))


def _rejection(search: Search, candidate: Candidate, chosen: Candidate) -> Rejected:
    evaluation = candidate.evaluation
    if evaluation is None:
        return Rejected(layout=candidate.layout, constraint=candidate.constraint)
    if not evaluation.fits:
        return Rejected(layout=evaluation.layout, short_by_bytes=evaluation.short_bytes,
                        constraint=f"memory: short by {format_bytes(evaluation.short_bytes)} per card on "
                                   f"stage {evaluation.worst.stage}")  # fmt: skip
    if chosen.evaluation is not None and not chosen.evaluation.fits:
        return Rejected(layout=evaluation.layout, constraint="lacks more than the chosen layout")
    ratio = search.time_s(candidate) / search.time_s(chosen)
    slower = f"{ratio:.2f} times as slow" if ratio > 1.005 else "as fast, but less simple"
    return Rejected(layout=evaluation.layout, constraint=f"{search.workload.objective}: predicted {slower}")


def binding(evaluator: Evaluator, evaluation: Evaluation) -> list[str]:
    """What binds a plan: the fullest rank, the pool, and whether all sequences fit at full length at once."""
    request, layout, worst = evaluator.request, evaluation.layout, evaluation.worst
    parts = {"weights": worst.weights_bytes, "caches": worst.cache_bytes, "activations and overheads": worst.fixed_bytes}
    used = sum(parts.values())
    largest = max(parts, key=lambda name: parts[name])
    where = f" of stage {worst.stage} (layers {layout.stages[worst.stage][0]}-{layout.stages[worst.stage][1] - 1})"
    lines = [f"{spelled(layout)} on {layout.num_devices}: the fullest rank{where if layout.pp > 1 else ''} needs "
             f"{format_bytes(used)} of {format_bytes(evaluation.budget_bytes)}, most of it {largest} "
             f"({format_bytes(parts[largest])})"]  # fmt: skip
    sequences = request.sequences(layout.dp)
    if evaluation.fits:
        pool = evaluation.limiting
        named = f", limited by stage {pool.stage}" if layout.pp > 1 else ""
        lines.append(f"the caches admit {evaluation.admissible_tokens} tokens per replica{named}")
        if sequences * pool.full_sequence_bytes > pool.cache_bytes and sequences > 1:
            room = evaluation.budget_bytes - pool.weights_bytes - pool.fixed_bytes
            held = room // max(1, pool.full_sequence_bytes)
            if held < sequences:
                lines.append(f"{sequences} sequences per replica fit at the average {request.average_tokens} tokens, but only "
                             f"{held} at the full {request.context_tokens}: beyond that requests wait")  # fmt: skip
    replicated = sum(cost.num_bytes for role, cost in evaluator.weights.by_role(layout, layout.coordinates(0), 0).items()
                     if cost.elements == cost.whole_elements and layout.tp * layout.ep > 1)  # fmt: skip
    if replicated * 20 > worst.weights_bytes:
        lines.append(f"{format_bytes(replicated)} of the weights are whole on every rank of a stage: no rule divides them")
    return lines


def smallest_change(search: Search, chosen: Evaluation, devices: int) -> list[str]:
    """What would make an impossible request possible, each alone: more cards, smaller weights, a shorter context."""
    evaluator, changes = search.evaluator, []
    if (count := _more_devices(search, devices)) is not None:
        changes.append(f"{count} cards")
    if (dtype := _smaller_weights(evaluator, chosen.layout)) is not None:
        changes.append(f"{dtype} weights")
    if (context := _shorter_context(evaluator, chosen.layout)) is not None:
        changes.append(f"a context of {context} tokens")
    if evaluator.request.concurrency > 1 and _fits(
        Evaluator(evaluator.model, evaluator.target, replace(evaluator.request, concurrency=1)), chosen.layout
    ):
        changes.append("a concurrency of 1")
    told = f"short by {format_bytes(chosen.short_bytes)} per card"
    if not changes:
        return [f"{told}: no number of cards up to the target's limit, no smaller weights and no shorter context help"]
    return [f"{told}: use {', or '.join(changes)}"]


def _smaller_weights(evaluator: Evaluator, layout: Layout) -> str | None:
    """The mildest quantization that makes the layout fit, where the weights are not smaller already."""
    for dtype in SMALLER_WEIGHTS:
        smaller = Evaluator(evaluator.model, evaluator.target, replace(evaluator.request, weights_dtype=dtype))
        if smaller.stored_bytes < evaluator.stored_bytes and _fits(smaller, layout):
            return dtype
    return None


def _fits(evaluator: Evaluator, layout: Layout) -> bool:
    try:
        bare = replace(layout, stages=())
        return evaluator.weights.illegal(bare) is None and evaluator.evaluate(bare, even=False).fits
    except DayZeroError:
        return False


def _more_devices(search: Search, devices: int) -> int | None:
    """The smallest larger number of devices on which some layout fits, whatever degrees were fixed."""
    free = Search(Evaluator(search.model, search.evaluator.target, replace(search.request, fixed=())), search.workload)
    for count in free.device_counts(start=devices + 1):
        if free.could_fit(count) and any(
            c.evaluation is not None and c.evaluation.fits for c in map(free.candidate, free.layouts(count))
        ):
            return count
    return None


def _shorter_context(evaluator: Evaluator, layout: Layout) -> int | None:
    """The longest context, in whole blocks, at which the layout fits; None when none does."""
    block = evaluator.request.block_tokens
    low, high = 0, evaluator.request.context_tokens // block
    while low < high:
        middle = (low + high + 1) // 2
        request = replace(evaluator.request, context_tokens=middle * block,
                          average_tokens=min(evaluator.request.average_tokens, middle * block),
                          chunk_tokens=min(evaluator.request.chunk_tokens, middle * block))  # fmt: skip
        if _fits(Evaluator(evaluator.model, evaluator.target, request), layout):
            low = middle
        else:
            high = middle - 1
    return low * block or None


def doubtful(target: Target, field: str) -> bool:
    """Whether a figure is unverified or of low confidence (a prefix in `unverified_fields` covers what is below it)."""
    if target.confidence in ("low", "unverified"):
        return True
    return any(name == "all" or field == name or field.startswith(name + ".") for name in target.unverified_fields)


def memory_field(target: Target) -> str:
    """The figure that bounds memory."""
    usable, total = target.card.usable_memory_bytes, target.card.memory_bytes
    return "card.usable_memory_bytes" if usable is not None and (total is None or usable <= total) else "card.memory_bytes"


def rests_on(evaluator: Evaluator, dtype: str) -> tuple[str, ...]:
    """Each target figure the answer depends on, with its value and how far it can be trusted."""
    target = evaluator.target
    figures: list[tuple[str, object]] = [(memory_field(target), format_bytes(evaluator.memory_bytes))]
    figures.append((f"card.flops_per_s.{dtype}", target.card.flops_per_s.get(dtype)))
    figures.append(("card.memory_bytes_per_s", target.card.memory_bytes_per_s))
    figures += [("node.link_bytes_per_s", target.node.link_bytes_per_s), ("node.num_cards", target.node.num_cards),
                ("network_bytes_per_s", target.network_bytes_per_s)]  # fmt: skip
    lines = []
    for field, value in figures:
        trust = "unverified" if doubtful(target, field) else target.confidence
        shown = f"{value:.4g}" if isinstance(value, float) else value
        lines.append(f"{field} = {shown} ({trust})" if value is not None else f"{field}: not published")
    if evaluator.weights.formats.assumed:
        lines.append("weight formats: assumed from the configuration, no checkpoint header was read")
    return tuple(lines)
