"""For scripts: every legal layout with its figures, one given layout explained, and the admissible (context x concurrency)
frontier as data.

Goes in: what `make_plan` is given. Comes out: records. Everything listed is priced; nothing is left out by a bound.
"""

from dataclasses import replace

from dayzero.core.model import ModelDescription
from dayzero.core.plan import Explanation, FrontierPoint, Layout, LayoutList, LayoutRow, parse_layout
from dayzero.core.target import Target, Workload
from dayzero.core.units import format_bytes
from dayzero.plan import advice
from dayzero.plan.case import Case, changed_search, open_case, with_context, with_request
from dayzero.plan.counts import choose, nearest_tp
from dayzero.plan.engines import OWN
from dayzero.plan.options import PlanOptions, choices
from dayzero.plan.planner import cache_dtype, ledgers
from dayzero.plan.pools import pool_search
from dayzero.plan.search import Candidate, Search
from dayzero.plan.space import fixed_devices
from dayzero.plan.trust import doubtful, memory_field, rests_on

FIRST_CONTEXT_TOKENS = 1024
MOST_SEQUENCES = 1 << 16


def plan_all(model: ModelDescription, target: Target, workload: Workload, options: PlanOptions) -> LayoutList:
    """Every legal layout of the cards asked for (of the number `make_plan` would choose, where none is asked), with its
    figures, the best first: what fits by time, then what does not by its lack."""
    rows: list[LayoutRow] = []
    enumerated = 0
    for case in (open_case(model, target, workload, one) for one in choices(options)):
        devices = fixed_devices(case.search.fixed, options.devices)
        devices = choose(case).candidate.layout.num_devices if devices is None else devices
        for layout in case.search.layouts(devices):
            enumerated += 1
            candidate = case.search.candidate(layout)
            if candidate.evaluation is not None:
                rows.append(row_of(case, case.search, case.search.timed(candidate)))
    rows.sort(key=lambda row: (not row.fits, row.short_by_bytes or 0, row.serve_s or 0.0, row.name))
    return LayoutList(model=model.name, target=target.id, enumerated=enumerated, layouts=tuple(rows),
                      rests_on=rests_on(case.evaluator, case.search.roofline.dtypes))  # fmt: skip


def row_of(case: Case, search: Search, candidate: Candidate) -> LayoutRow:
    evaluation, timing = candidate.evaluation, candidate.timing
    known = {"name": candidate.layout.spelled(), "layout": candidate.layout, "weights_dtype": case.request.weights_dtype,
             "cache_dtype": cache_dtype(case)}  # fmt: skip
    if evaluation is None:
        return LayoutRow(**known, legal=False, fits=False, constraint=candidate.constraint)  # type: ignore[arg-type]
    worst, published = evaluation.worst, search.roofline.rates.published
    return LayoutRow(
        **known, legal=True, fits=evaluation.fits, constraint="" if evaluation.fits else advice.lack(evaluation),  # type: ignore[arg-type]
        budget_bytes=evaluation.budget_bytes, used_bytes=worst.weights_bytes + worst.fixed_bytes + worst.cache_bytes,
        weights_bytes=max(load.weights_bytes for load in evaluation.stages), short_by_bytes=max(0, evaluation.short_bytes),
        admissible_tokens=evaluation.admissible_tokens, serve_s=timing.serve_s if timing else None,
        prefill=timing.prefill if timing and published else None, decode=timing.decode if timing and published else None,
    )  # fmt: skip


def explain(
    model: ModelDescription, target: Target, workload: Workload, options: PlanOptions, layout: Layout | str,
    *, role: str = "mixed",
) -> Explanation:  # fmt: skip
    """What one layout would need, and what kills it. `role`: of a mixed pool, or of a `prefill` or `decode` pool alone.

    Never raises for an illegal layout: that is the answer. Raises DayZeroError for a text that names no layout.
    """
    layout = parse_layout(layout) if isinstance(layout, str) else layout
    asked = replace(options, tp=None, pp=None, dp=None, cp=None, dcp=None, ep=None, devices=None,
                    sp=layout.sp or bool(options.sp),
                    redundant_experts=0 if options.engine == OWN else layout.redundant_experts)  # fmt: skip
    case = open_case(model, target, workload, asked)
    search = case.search if role == "mixed" else pool_search(case, role, layout.num_devices)
    candidate = search.timed(search.candidate(layout))
    row = row_of(case, search, candidate)
    figures = rests_on(search.evaluator, search.roofline.dtypes)
    evaluation, reasons = candidate.evaluation, list(case.request.notes)
    if evaluation is None:
        near = nearest_tp(search, layout)
        reasons += [candidate.constraint, f"tp of {', '.join(map(str, near))} divide every parameter"]
        return Explanation(model=model.name, target=target.id, row=row, reasons=tuple(reasons), rests_on=figures)
    if not evaluation.fits:
        reasons += _kill(search, candidate)
        if doubtful(target, field := memory_field(target)):
            reasons.append(f"not refused by this alone: {field} = {format_bytes(search.evaluator.memory_bytes)} is unverified")
    reasons += advice.binding(search.evaluator, evaluation)
    if candidate.timing is not None and search.roofline.rates.published:
        reasons += [advice.time_binding("a prompt", candidate.timing.prefill),
                    advice.time_binding("a decode step", candidate.timing.decode)]  # fmt: skip
    made = ledgers(case, candidate.split, search.evaluator.ledgers(evaluation))
    fullest = max(made, key=lambda rank: rank.total() - rank.budget_bytes)
    return Explanation(
        model=model.name, target=target.id, row=row, ledger=fullest, frontier=frontier_of(search, evaluation.layout),
        links=search.roofline.links.told(evaluation.layout), reasons=tuple(reasons), rests_on=figures,
    )  # fmt: skip


def _kill(search: Search, candidate: Candidate) -> list[str]:
    """The gap of a given layout, what would close it at these degrees, and the nearest layout that fits."""
    evaluation = candidate.evaluation
    assert evaluation is not None
    layout = replace(evaluation.layout, stages=())
    degrees = (("tp", layout.tp), ("pp", layout.pp), ("dp", layout.dp), ("cp", layout.cp_devices), ("ep", layout.ep),
               ("dcp", layout.cp_in_tp))  # fmt: skip
    same = changed_search(search, replace(search.request, fixed=degrees))
    lines = [advice.lack(evaluation), *advice.smallest_change(same, evaluation, layout.num_devices)]
    other = search.best_fitting(layout.num_devices)
    lines.append(f"on as many cards {other.layout.spelled()} fits" if other is not None else
                 f"no layout of {layout.num_devices} cards fits")  # fmt: skip
    return lines


def frontier(
    model: ModelDescription, target: Target, workload: Workload, options: PlanOptions, layout: Layout
) -> tuple[FrontierPoint, ...]:
    """How many sequences a layout admits, all at full length, at each context up to the model's limit."""
    return frontier_of(open_case(model, target, workload, options).search, layout)


def frontier_of(search: Search, layout: Layout) -> tuple[FrontierPoint, ...]:
    limit = search.model.dimensions.max_position_tokens or 4 * search.request.context_tokens
    limit = max(limit, search.request.context_tokens)
    contexts = {search.request.context_tokens, limit}
    tokens = FIRST_CONTEXT_TOKENS
    while tokens < limit:
        contexts.add(tokens)
        tokens *= 2
    return tuple(FrontierPoint(context_tokens=at, concurrency=most_sequences(search, layout, at)) for at in sorted(contexts))


def most_sequences(search: Search, layout: Layout, context_tokens: int) -> int:
    """Sequences of that length, all at once (0: not even one), at most 65,536; found by bisection over the ledger."""

    def fits(count: int) -> bool:
        request = replace(with_context(search.request, context_tokens), average_tokens=context_tokens, concurrency=count)
        return with_request(search.evaluator, request).evaluate(layout, even=False).fits

    if not fits(1):
        return 0
    low, high = 1, 2
    while high < MOST_SEQUENCES and fits(high):
        low, high = high, high * 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
