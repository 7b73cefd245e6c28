"""`make_plan`: the stage's one entry. Resolves the request, searches, and writes the `Plan` with its reasons.

Goes in: what the model is, where it runs, what it must serve. Comes out: a `Plan`, also when nothing fits (`feasible` is
then False and the reasons say by how much and what would help). Illegal degrees are a DayZeroError.
"""

from dataclasses import replace

from dayzero.core.model import ModelDescription
from dayzero.core.plan import MemoryLedger, Plan, Pool, Rejected
from dayzero.core.target import Target, Workload
from dayzero.core.units import format_bytes
from dayzero.plan import advice
from dayzero.plan.case import Case, open_case
from dayzero.plan.counts import Choice, choose
from dayzero.plan.experience import Corrections
from dayzero.plan.options import PlanOptions, choices
from dayzero.plan.pools import Pools, split_pools
from dayzero.plan.roles import Split
from dayzero.plan.trust import doubtful, memory_field, rests_on


def make_plan(
    model: ModelDescription, target: Target, workload: Workload, options: PlanOptions, *, corrections: Corrections | None = None
) -> Plan:
    """The best layout for the request, or the least impossible one. `corrections`: what earlier runs on the target taught; they
    move the predicted times, and lower what is admitted, never raise it.

    Raises DayZeroError for degrees that cannot be (naming the nearest that can) and for a target without a memory size.
    A memory figure that is unverified or of low confidence never makes a plan infeasible; the reasons say so.
    """
    plan = _chosen(model, target, workload, options)
    if corrections is None or not corrections.factors:
        return plan
    return replace(
        plan,
        prefill=None if plan.prefill is None else corrections.time("prefill", plan.prefill),
        decode=None if plan.decode is None else corrections.time("decode", plan.decode),
        admissible_tokens=min(plan.admissible_tokens, corrections.amount("admissible_tokens", plan.admissible_tokens)),
        corrections=corrections.ratios(),
        reasons=(*plan.reasons, *corrections.reasons()),
    )


def _chosen(model: ModelDescription, target: Target, workload: Workload, options: PlanOptions) -> Plan:
    found = [(case, choose(case)) for case in (open_case(model, target, workload, one) for one in choices(options))]
    (case, choice), *others = sorted(found, key=lambda pair: _preference(*pair))
    plan = _written(case, choice)
    if options.pools != "mixed" or options.prefill or options.decode:
        pools = split_pools(case, choice.asked)
        mixed_rate = case.request.concurrency / choice.candidate.timing.serve_s if choice.candidate.timing else 0.0
        if pools is not None and (options.pools != "auto" or pools.requests_per_s > mixed_rate or not plan.feasible):
            return _with_pools(case, plan, pools, mixed_rate)
        split = (
            "no split into a prefill and a decode pool fits"
            if pools is None
            else f"a prefill and a decode pool would serve {pools.requests_per_s:.4g} requests/s, one pool {mixed_rate:.4g}"
        )
        plan = replace(plan, reasons=(*plan.reasons, split))
    told = [f"{other.request.weights_dtype} weights, {other.request.cache_dtype or 'own'} cache: {_outcome(lost, choice)}"
            for other, lost in others]  # fmt: skip
    return replace(plan, reasons=(*plan.reasons, *told)) if told else plan


def _preference(case: Case, choice: Choice) -> tuple[bool, int, int, float]:
    """Among offered dtypes: what fits, then the objective. Fewer cards count where their number is free."""
    candidate = choice.candidate
    short = 0 if candidate.evaluation is None else max(0, candidate.evaluation.short_bytes)
    seconds = candidate.timing.serve_s if candidate.timing else 0.0
    free = choice.asked is None and case.workload.objective in ("throughput", "fewest_cards")
    return not candidate.fits, short, candidate.layout.num_devices if free else 0, seconds


def _outcome(lost: Choice, won: Choice) -> str:
    one, other = lost.candidate, won.candidate
    if one.evaluation is not None and not one.fits:
        return f"short by {format_bytes(one.evaluation.short_bytes)} per card on {one.layout.num_devices} cards"
    if one.timing is None or other.timing is None:
        return "not chosen"
    return (f"{one.layout.spelled()} on {one.layout.num_devices} cards, "
            f"{one.timing.serve_s / other.timing.serve_s:.2f} times as slow")  # fmt: skip


def _written(case: Case, choice: Choice) -> Plan:
    search, request, workload = case.search, case.request, case.workload
    candidate = search.timed(search.evened(choice.candidate))
    evaluation = candidate.evaluation
    assert evaluation is not None, candidate
    feasible, reasons = evaluation.fits, list(request.notes)
    if not case.listed:
        reasons.append("weights are estimated from parameter counts: the release's class is not known here")
    if not feasible:
        reasons += advice.smallest_change(search, evaluation, choice.asked or evaluation.layout.num_devices)
        if doubtful(case.target, field := memory_field(case.target)):
            feasible = True
            reasons.append(f"not refused, because {field} = {format_bytes(case.evaluator.memory_bytes)} is unverified: "
                           "read the memory from the device before relying on this plan")  # fmt: skip
    reasons += advice.binding(case.evaluator, evaluation)
    layout = evaluation.layout
    if choice.idle:
        reasons.append(f"no layout of all {choice.asked} cards fits: {choice.idle} of them stay idle")
    if choice.asked is None and evaluation.fits and workload.objective in ("throughput", "fewest_cards"):
        reasons.append(f"{layout.num_devices} is the smallest number of cards that fits")
    reasons += advice.missed_goals(search, candidate)
    timing = candidate.timing
    assert timing is not None, candidate
    published = search.roofline.rates.published
    if published:
        reasons += [advice.time_binding("a prompt", timing.prefill), advice.time_binding("a decode step", timing.decode),
                    f"times are a range: {search.roofline.shares.note}"]  # fmt: skip
    else:
        reasons.append("no time is predicted: the target publishes no compute or no memory rate")
    if layout.num_devices > 1 and search.roofline.links.assumed:
        reasons.append(f"{' and '.join(search.roofline.links.assumed)} not published: 25 GB/s a card assumed")
    ledger = ledgers(case, candidate.split, search.evaluator.ledgers(evaluation))
    return Plan(
        model=case.evaluator.model.name, target=case.target.id, feasible=feasible, layout=layout, devices=layout.num_devices,
        pools=(Pool(role="mixed", layout=layout, role_layouts=candidate.split.layouts if candidate.split else {}),),
        weights_dtype=request.weights_dtype, cache_dtype=cache_dtype(case), context_tokens=request.context_tokens,
        concurrency=request.concurrency, memory_fraction=request.memory_fraction, block_tokens=request.block_tokens,
        prefill_chunk_tokens=request.chunk_tokens,
        weights_bytes_per_device=max(rank.total("weights") for rank in ledger),
        cache_bytes_per_token_per_device=max(rank.cache_bytes_per_token for rank in ledger),
        admissible_tokens=min(rank.admissible_tokens for rank in ledger), ledger=ledger,
        prefill=timing.prefill if published else None, decode=timing.decode if published else None,
        reasons=tuple(reasons), rejected=(*choice.ruled_out, *advice.rejected(search, candidate)),
        rests_on=rests_on(case.evaluator, search.roofline.dtypes), links=search.roofline.links.told(layout),
        objective=workload.objective, engine=case.options.engine, idle_devices=choice.idle,
    )  # fmt: skip


def ledgers(case: Case, split: Split | None, made: tuple[MemoryLedger, ...]) -> tuple[MemoryLedger, ...]:
    """The ledgers with the weights of split roles as they are really held."""
    if split is None or case.search.splitter is None:
        return made
    return tuple(case.search.splitter.corrected(ledger, split) for ledger in made)


def _with_pools(case: Case, plan: Plan, pools: Pools, mixed_rate: float) -> Plan:
    """The plan of two pools. `layout` and `decode` are the decode pool's, `prefill` the other's; ledgers of both, the
    prefill pool's ranks first."""
    ledger: list[MemoryLedger] = []
    for search, candidate in ((pools.prefill_search, pools.prefill), (pools.decode_search, pools.decode)):
        assert candidate.evaluation is not None
        start = len(ledger)
        ledger += [replace(rank, rank=start + rank.rank) for rank in search.evaluator.ledgers(candidate.evaluation)]
    layout, prompt, token = pools.decode.layout, pools.prefill.timing, pools.decode.timing
    assert prompt is not None and token is not None
    fits = pools.prefill.fits and pools.decode.fits
    reasons = [reason for reason in plan.reasons if "estimated from parameter counts" in reason]
    for name, candidate in (("prefill pool", pools.prefill), ("decode pool", pools.decode)):
        assert candidate.evaluation is not None
        if not candidate.fits:
            reasons.append(f"{name} {candidate.layout.spelled()}: {advice.lack(candidate.evaluation)}")
        reasons += [f"{name}: {line}" for line in advice.binding(case.evaluator, candidate.evaluation)]
    reasons += [pools.told, f"one mixed pool of as many cards would serve {mixed_rate:.4g} requests/s"]
    published = case.search.roofline.rates.published
    rejected = tuple(Rejected(layout=one, constraint=why) for one, why in pools.rejected)
    return replace(
        plan, feasible=fits or doubtful(case.target, memory_field(case.target)), layout=layout,
        devices=pools.prefill.layout.num_devices + layout.num_devices,
        pools=(Pool(role="prefill", layout=pools.prefill.layout), Pool(role="decode", layout=layout)), ledger=tuple(ledger),
        weights_bytes_per_device=max(rank.total("weights") for rank in ledger),
        cache_bytes_per_token_per_device=max(rank.cache_bytes_per_token for rank in ledger),
        admissible_tokens=pools.decode.evaluation.admissible_tokens if pools.decode.evaluation else 0,
        prefill=prompt.prefill if published else None, decode=token.decode if published else None, reasons=tuple(reasons),
        rejected=(*rejected, *advice.rejected(pools.decode_search, pools.decode)), idle_devices=0,
        links=case.search.roofline.links.told(layout),
    )  # fmt: skip


def cache_dtype(case: Case) -> str:
    """The cache's dtype, the model's own where none was asked for."""
    model = case.evaluator.model
    growing = [spec.dtype for kind in model.layer_kinds for spec in kind.cache if spec.elements_per_token]
    return case.request.cache_dtype or (growing[0] if growing else model.dtype)
