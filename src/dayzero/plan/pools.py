"""Two pools: some cards only read prompts, the others only decode, and caches travel from one to the other.

Goes in: a case, and either two given layouts or a number of cards, whose every split is tried. Comes out: the pair that
serves most requests a second. Each pool holds all weights. Deliberately not done: several instances of different layout.
"""

from dataclasses import dataclass, replace

from dayzero.core.errors import DayZeroError
from dayzero.core.plan import Layout, parse_layout
from dayzero.plan.case import Case, changed_search
from dayzero.plan.search import Candidate, Search

# Up to here every split is tried; beyond, whole nodes.
FEW_DEVICES = 16


@dataclass(frozen=True, slots=True)
class Pools:
    prefill: Candidate
    decode: Candidate
    prefill_search: Search
    decode_search: Search
    requests_per_s: float
    told: str
    rejected: tuple[tuple[Layout, str], ...] = ()


def split_pools(case: Case, devices: int | None) -> Pools | None:
    """The best pair, given or searched; None where no split fits. Raises DayZeroError for given layouts that are illegal,
    and where neither layouts nor a number of cards were given."""
    options = case.options
    if options.prefill or options.decode:
        if not (options.prefill and options.decode):
            raise DayZeroError("two pools need two layouts", got=f"prefill={options.prefill}, decode={options.decode}",
                               want="a layout for each", fix="give both, or --devices and let the plan choose")  # fmt: skip
        return _given(case, parse_layout(options.prefill), parse_layout(options.decode))
    if devices is None:
        raise DayZeroError("pools need a number of cards", got="no --devices", want="the cards of both pools together",
                           fix="give --devices, or a layout of each pool")  # fmt: skip
    unit = 1 if devices <= FEW_DEVICES else case.target.node.num_cards or 1
    found: list[Pools] = []
    for size in range(unit, devices, unit):
        searches = pool_search(case, "prefill", size), pool_search(case, "decode", devices - size)
        first, second = searches[0].best_fitting(size), searches[1].best_fitting(devices - size)
        if first is not None and second is not None:
            found.append(_paired(case, first, second, searches))
    if not found:
        return None
    best = max(found, key=lambda pools: pools.requests_per_s)
    lost = tuple(
        (one.decode.layout, f"{one.prefill.layout.num_devices} cards for prompts: {one.requests_per_s:.4g} requests/s, "
         f"{best.requests_per_s / one.requests_per_s:.2f} times fewer")
        for one in found if one is not best
    )  # fmt: skip
    return replace(best, rejected=lost)


def pool_search(case: Case, role: str, devices: int, *, sp: bool | None = None) -> Search:
    """The search of one pool. A prefill pool holds the prompts it works on; a decode pool runs no chunks of prompts."""
    fixed = tuple(item for item in case.request.fixed if item[0] in ("cp", "dcp"))
    request = replace(case.request, fixed=fixed, sp=case.request.sp if sp is None else sp)
    if role == "prefill":
        request = replace(request, concurrency=min(request.concurrency, devices), average_tokens=min(
            request.context_tokens, case.workload.input_tokens))  # fmt: skip
        return changed_search(case.search, request, phase="prefill")
    return changed_search(case.search, replace(request, chunk_tokens=1), phase="decode")


def _given(case: Case, prefill: Layout, decode: Layout) -> Pools:
    searches = (pool_search(case, "prefill", prefill.num_devices, sp=prefill.sp),
                pool_search(case, "decode", decode.num_devices, sp=decode.sp))  # fmt: skip
    pair = []
    for search, layout in zip(searches, (prefill, decode), strict=True):
        candidate = search.candidate(layout)
        if candidate.evaluation is None:
            raise DayZeroError(f"{layout.spelled()} is not legal for {search.model.name}: {candidate.constraint}",
                               got=layout.spelled(), want="a layout that divides the model",
                               fix="correct the pool's layout")  # fmt: skip
        pair.append(search.timed(candidate))
    return _paired(case, pair[0], pair[1], searches)


def _paired(case: Case, prefill: Candidate, decode: Candidate, searches: tuple[Search, Search]) -> Pools:
    """The slower pool sets the pace. A prompt's cache crosses the network once, from all ranks that hold it."""
    assert prefill.timing is not None and decode.timing is not None
    prompts = searches[0].request.concurrency / prefill.timing.serve_s
    answers = searches[1].request.concurrency / decode.timing.serve_s
    evaluator, layout = case.evaluator, prefill.layout
    cached = sum(evaluator.cache.sequence_per_layer(layout, searches[0].request.average_tokens))
    moved_s = cached / layout.pp / case.search.roofline.links.network_bytes_per_s
    told = (f"{layout.spelled()} on {layout.num_devices} cards reads {prompts:.4g} prompts/s, {decode.layout.spelled()} on "
            f"{decode.layout.num_devices} writes {answers:.4g} answers/s; "
            f"moving a prompt's cache takes {moved_s:.3g} s")  # fmt: skip
    return Pools(prefill, decode, *searches, min(prompts, answers), told)
