"""A plan in words: what binds it, what killed its neighbours, and the smallest change that would make the impossible possible.

Goes in: candidates priced by `search`. Comes out: strings and `Rejected` records. Nothing here decides.
"""

from collections.abc import Callable
from dataclasses import replace
from heapq import nsmallest
from math import log2

from dayzero.core.errors import DayZeroError
from dayzero.core.plan import Rejected, TimeEstimate
from dayzero.core.units import format_bytes
from dayzero.plan.case import changed_search, with_context
from dayzero.plan.counts import could_fit, device_counts
from dayzero.plan.ledger import Evaluation, Evaluator
from dayzero.plan.options import Request
from dayzero.plan.search import Candidate, Search
from dayzero.plan.space import Degrees

MOST_REJECTED = 24
# What may be proposed instead of the weights as they are, mildest first.
SMALLER_WEIGHTS = {"fp8": "fp8 weights", "int8": "int8 weights", "w4a8": "int4 experts (w4a8)", "int4": "int4 weights"}


def rejected(search: Search, chosen: Candidate) -> tuple[Rejected, ...]:
    """The neighbours of the chosen layout, nearest first, each with the one constraint that killed it: other degrees on as
    many cards, legal or not, then the same degrees placed otherwise."""
    layout = chosen.layout
    own = Degrees(layout.tp, layout.pp, layout.dp, layout.cp_devices, layout.cp_in_tp, layout.ep)
    others = (degrees for degrees in search.degrees(layout.num_devices) if degrees != own)
    near = nsmallest(MOST_REJECTED, others, key=_distance_from(own))  # equally near: in their order
    found = [rejection(search, search.candidate(search.layout(degrees)), chosen) for degrees in near]
    return (*found, *_placed_otherwise(search, chosen))


def _distance_from(own: Degrees) -> Callable[[Degrees], float]:
    """How many times the degrees are doubled or halved from these, over all axes."""
    octaves: dict[tuple[int, int], float] = {}

    def distance(degrees: Degrees) -> float:
        total = 0.0
        for pair in zip(degrees, own, strict=True):
            if (found := octaves.get(pair)) is None:
                found = octaves[pair] = abs(log2(pair[0] / pair[1]))
            total += found
        return total

    return distance


def rejection(search: Search, candidate: Candidate, chosen: Candidate) -> Rejected:
    """The one constraint that killed a candidate, and by how much."""
    evaluation = candidate.evaluation
    if evaluation is None:
        return Rejected(layout=candidate.layout, constraint=candidate.constraint)
    if not evaluation.fits:
        return Rejected(layout=evaluation.layout, short_by_bytes=evaluation.short_bytes, constraint=lack(evaluation))
    if not chosen.fits:
        return Rejected(layout=evaluation.layout, constraint="lacks more than the chosen layout")
    return Rejected(layout=evaluation.layout, constraint=_compared(search, search.timed(candidate), search.timed(chosen)))


def lack(evaluation: Evaluation) -> str:
    """Which rank lacks how much memory, and what fills it."""
    worst = evaluation.worst
    parts = {"weights": worst.weights_bytes, "caches": worst.cache_bytes, "activations and overheads": worst.fixed_bytes}
    filled = ", ".join(f"{name} {format_bytes(size)}" for name, size in parts.items())
    return (f"memory: short by {format_bytes(evaluation.short_bytes)} per card on stage {worst.stage} "
            f"({filled} of {format_bytes(evaluation.budget_bytes)})")  # fmt: skip


def _compared(search: Search, candidate: Candidate, chosen: Candidate) -> str:
    assert candidate.timing is not None and chosen.timing is not None, (candidate, chosen)
    if candidate.timing.misses > chosen.timing.misses:
        return _missed(search, candidate)
    ratio = candidate.timing.serve_s / chosen.timing.serve_s
    if not search.roofline.rates.published:
        return "ordered behind by nominal rates: the target publishes none"
    if ratio <= 1.005:
        return f"{search.workload.objective}: predicted as fast, but less simple"
    return (f"{search.workload.objective}: predicted {ratio:.2f} times as slow "
            f"({candidate.timing.serve_s:.4g} s to {chosen.timing.serve_s:.4g} s)")  # fmt: skip


def _missed(search: Search, candidate: Candidate) -> str:
    work, timing = search.workload, candidate.timing
    assert timing is not None
    if work.max_ttft_s is not None and timing.prefill.low_s > work.max_ttft_s:
        return f"first token after {timing.prefill.low_s:.3g} s at best, {work.max_ttft_s:g} s asked"
    return f"a token every {timing.decode.low_s:.3g} s at best, {work.max_tpot_s:g} s asked"


def missed_goals(search: Search, chosen: Candidate) -> list[str]:
    """What the chosen layout cannot keep even at best. A goal never refuses: the figures behind it are predictions."""
    if chosen.timing is None or not chosen.timing.misses:
        return []
    return [f"latency goal not met: {_missed(search, chosen)}"]


def _placed_otherwise(search: Search, chosen: Candidate) -> list[Rejected]:
    if not chosen.fits:
        return []
    chosen = search.timed(chosen)
    base = replace(chosen.layout, stages=chosen.layout.stages)
    found: list[Rejected] = []
    for layout in search.variants(base):
        if layout == chosen.layout or len(found) == 4:
            continue
        assert chosen.evaluation is not None
        evaluation = replace(chosen.evaluation, layout=layout)
        other = replace(chosen, layout=layout, evaluation=evaluation, timing=search.timing(layout))
        where = f"with {'' if layout.sp else 'no '}sp, axes {' < '.join(layout.placement)}: "
        found.append(Rejected(layout=layout, constraint=where + _compared(search, other, chosen)))
    return found


def binding(evaluator: Evaluator, evaluation: Evaluation) -> list[str]:
    """What binds a plan: the fullest rank, the pool, and whether all sequences fit at full length at once."""
    request, layout, worst = evaluator.request, evaluation.layout, evaluation.worst
    parts = {"weights": worst.weights_bytes, "caches": worst.cache_bytes, "activations and overheads": worst.fixed_bytes}
    used = sum(parts.values())
    largest = max(parts, key=lambda name: parts[name])
    where = f" of stage {worst.stage} (layers {layout.stages[worst.stage][0]}-{layout.stages[worst.stage][1] - 1})"
    lines = [f"{layout.spelled()} on {layout.num_devices}: the fullest rank{where if layout.pp > 1 else ''} needs "
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
    replicated = sum(cost.num_bytes for cost in evaluator.weights.by_role(layout, layout.coordinates(0), 0).values()
                     if cost.elements == cost.whole_elements and layout.tp * layout.ep > 1)  # fmt: skip
    if replicated * 20 > worst.weights_bytes:
        lines.append(f"{format_bytes(replicated)} of the weights are whole on every rank of a stage: no rule divides them")
    return lines


def time_binding(name: str, estimate: TimeEstimate) -> str:
    """What a step's time goes into."""
    parts = {"computing": estimate.compute_s, "reading memory": estimate.memory_s, "collectives": estimate.communication_s,
             "starting operators": estimate.launch_s}  # fmt: skip
    largest = max(parts, key=lambda part: parts[part])
    shown = ", ".join(f"{part} {seconds:.3g} s" for part, seconds in parts.items())
    return f"{name} is bound by {largest} ({shown} at the stated rates)"


def smallest_change(search: Search, chosen: Evaluation, devices: int) -> list[str]:
    """What would make an impossible request possible, each alone, on the best layout for it: more cards, smaller weights, a
    smaller cache, a shorter context, one request at a time."""
    request, changes = search.request, []
    if (count := more_devices(search, devices)) is not None:
        changes.append(f"{count} cards")

    def fits(changed: Request) -> bool:
        try:
            return changed_search(search, changed).fits(devices)
        except DayZeroError:  # a dtype that this model cannot be stored in
            return False

    if (dtype := _smaller_weights(search, fits)) is not None:
        changes.append(SMALLER_WEIGHTS[dtype])
    if request.cache_dtype != "fp8" and fits(replace(request, cache_dtype="fp8")):
        changes.append("fp8 caches")
    if (context := _shorter_context(request, fits)) is not None:
        changes.append(f"a context of {context} tokens")
    if request.concurrency > 1 and fits(replace(request, concurrency=1)):
        changes.append("a concurrency of 1")
    cards = "card is" if devices == 1 else "cards are"
    told = f"{devices} {cards} short by {format_bytes(chosen.short_bytes)} per card"
    if not changes:
        return [f"{told}: no number of cards up to the target's limit, no smaller weights and no shorter context help"]
    return [f"{told}: use {', or '.join(changes)}"]


def more_devices(search: Search, devices: int) -> int | None:
    """The smallest larger number of devices on which some layout fits, whatever degrees were fixed."""
    free = changed_search(search, replace(search.request, fixed=()))
    counts = (count for count in device_counts(free, start=devices + 1) if could_fit(free, count))
    return next((count for count in counts if free.fits(count)), None)


def _smaller_weights(search: Search, fits: Callable[[Request], bool]) -> str | None:
    """The mildest quantization that makes some layout fit, where the weights are not smaller already."""
    stored = search.evaluator.stored_bytes
    for dtype in SMALLER_WEIGHTS:
        request = replace(search.request, weights_dtype=dtype)
        try:
            smaller = changed_search(search, request).evaluator.stored_bytes < stored
        except DayZeroError:  # not a format for this model
            continue
        if smaller and fits(request):
            return dtype
    return None


def _shorter_context(request: Request, fits: Callable[[Request], bool]) -> int | None:
    """The longest context, in whole blocks, at which some layout fits; None when none does."""
    block = request.block_tokens
    low, high = 0, request.context_tokens // block
    if not high or not fits(with_context(request, block)):
        return None
    while low < high:
        middle = (low + high + 1) // 2
        if fits(with_context(request, middle * block)):
            low = middle
        else:
            high = middle - 1
    return low * block or None
