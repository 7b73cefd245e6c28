"""plan.search: complete, equal to trying everything, never worse with more (TP-01, TP-03)."""

import time
from dataclasses import replace
from itertools import permutations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dayzero.core.errors import DayZeroError
from dayzero.core.plan import DEFAULT_PLACEMENT, Layout, parse_layout
from dayzero.core.sharding import rank_boxes
from dayzero.core.target import Workload
from dayzero.core.units import GIB, MIB
from dayzero.plan import PlanOptions, make_plan
from dayzero.plan.case import open_case
from dayzero.plan.search import _least_imbalance
from tests.unit.plan_builders import make_dense_model, make_latent_moe_model, make_target

SMALL = {"layers": 6, "dense": 1, "hidden": 32, "heads": 8, "q_rank": 16, "kv_rank": 8, "nope": 4, "rope": 4, "value": 4,
         "inner": 48, "expert_inner": 16, "experts": 8, "chosen": 2, "vocab": 64}  # fmt: skip


def make_search(model=None, *, target=None, workload=None, **options):
    case = open_case(model or make_latent_moe_model(**SMALL), target or make_target(), workload or Workload(), PlanOptions(**options))
    return case.search


def every_layout(devices, concurrency, layers, experts, heads=None):
    """All layouts by trying all numbers: slow and obvious."""
    numbers = range(1, devices + 1)
    for tp, pp, dp, cp, dcp, ep in product(numbers, repeat=6):
        if tp * pp * dp * cp != devices or tp % dcp or (tp * dp * cp) % ep:
            continue
        if pp > layers or dp > concurrency or ep > experts:
            continue
        if heads and dcp > 1 and max(1, tp // heads) % dcp:
            continue
        yield Layout(tp=tp, pp=pp, dp=dp, cp=cp * dcp, cp_in_tp=dcp, ep=ep)


@pytest.mark.parametrize("devices", [1, 2, 3, 4, 6, 8])
def test_every_layout_is_enumerated(devices):
    found = list(make_search(concurrency=4).layouts(devices))
    assert len(found) == len(set(found))
    assert set(found) == set(every_layout(devices, concurrency=4, layers=6, experts=8))


def test_key_value_heads_share_a_context_only_as_copies():
    model = make_dense_model(heads=8, kv_heads=2)
    found = set(make_search(model, concurrency=1).layouts(8))
    assert found == {layout for layout in every_layout(8, 1, 4, 1, heads=2) if layout.ep == 1}
    assert {layout.cp_in_tp for layout in found if layout.tp == 8} == {1, 2, 4}


@pytest.mark.parametrize(("devices", "memory", "objective", "nodes"), [
    (4, 2 * GIB, "throughput", 8), (8, 1700 * MIB, "throughput", 4), (8, 2 * GIB, "latency", 2), (6, 2 * GIB, "cost", 2),
])  # fmt: skip
def test_the_best_equals_trying_every_layout_in_every_placement(devices, memory, objective, nodes):
    target, work = make_target(memory_bytes=memory, num_cards=nodes), Workload(concurrency=4, objective=objective)
    found = make_search(target=target, workload=work).best_fitting(devices)
    naive = make_search(target=target, workload=work)
    ranks = []
    for base in every_layout(devices, 4, 6, 8):
        candidate = naive.candidate(base)
        if not candidate.fits:
            continue
        for placement, sp in product(permutations(DEFAULT_PLACEMENT), (False, True)):
            ranks.append(naive.timing(replace(candidate.layout, placement=placement, sp=sp)).rank)
    assert found is not None and ranks
    assert found.timing.rank == min(ranks)


@pytest.mark.parametrize("devices", [4, 8])
def test_bounds_from_below_are_below(devices):
    """What the search skips by is never above the real time or the real lack."""
    search = make_search(target=make_target(memory_bytes=1700 * MIB, num_cards=4), concurrency=4)
    for layout in search.layouts(devices):
        candidate = search.candidate(layout)
        if candidate.evaluation is None:
            continue
        assert search.lacks_at_least(layout) <= candidate.evaluation.short_bytes
        exact = search.timed(candidate).timing.rank
        bounds = (search._coarse(layout), search._bound(layout), search._bound(layout, _least_imbalance))
        placed = search._best_variant(layout)[0]
        assert (*bounds, placed) == tuple(sorted((*bounds, placed))) and placed <= exact, layout


@pytest.mark.parametrize("devices", [4, 6, 8])
def test_families_are_all_layouts_and_each_is_bounded_by_the_one_that_shares_most(devices):
    search = make_search(target=make_target(memory_bytes=1700 * MIB, num_cards=4), concurrency=4)
    families = search.families(devices)
    assert sorted(one for family in families for one in family) == sorted(search.degrees(devices))
    for family in families:
        members = [search.layout(degrees) for degrees in family]
        assert len({(one.tp, one.pp, one.dp, one.cp_devices, one.ep) for one in members}) == 1
        assert len({search.lacks_at_least(one) for one in members}) == 1
        legal = [one for one in members if search.illegal(one) is None]
        assert all(search._coarse(members[-1]) <= search._coarse(one) for one in legal), family


def test_a_rank_is_that_of_the_times_that_are_told():
    """The search compares without building what it tells; both must be the same figure."""
    work = Workload(concurrency=4, max_ttft_s=1e-3, max_tpot_s=1e-3)
    search = make_search(target=make_target(memory_bytes=1700 * MIB, num_cards=2), workload=work)
    for layout in search.layouts(8):
        if (candidate := search.candidate(layout)).evaluation is None:
            continue
        for variant in search.variants(candidate.layout):
            reach = search.roofline.traffic.reach(variant, variant.placement)
            assert search.rank(variant, search._pace(variant), reach) == search.timing(variant).rank, variant


def test_what_lacks_least_equals_trying_every_layout():
    target = make_target(memory_bytes=MIB * 700, num_cards=8)
    search = make_search(target=target, context=50_000_000)
    best = search.best(8)
    assert not best.fits
    naive = make_search(target=target, context=50_000_000)
    shorts = [c.evaluation.short_bytes for c in map(naive.candidate, naive.layouts(8)) if c.evaluation is not None]
    assert best.evaluation.short_bytes == min(shorts)


@pytest.mark.slow
@given(st.integers(1, 9), st.integers(1, 5), st.integers(700 * MIB, 3 * GIB), st.integers(200, 3_000_000), st.integers(1, 16))
@settings(max_examples=20, deadline=None)
def test_adding_cards_never_makes_feasible_infeasible(cards, more, memory, context, concurrency):
    model, target = make_latent_moe_model(**SMALL), make_target(memory_bytes=memory)
    work = Workload(context_tokens=context, concurrency=concurrency)
    before = make_plan(model, target, work, PlanOptions(devices=cards))
    after = make_plan(model, target, work, PlanOptions(devices=cards + more))
    assert after.feasible >= before.feasible, (before.layout, after.layout)
    assert after.devices + after.idle_devices == cards + more or not after.feasible


def test_cards_that_no_layout_uses_stay_idle():
    """Seven cards, one layer, no concurrency: a layout of four fits."""
    model = make_dense_model(layers=1, heads=4, kv_heads=4, vocab=65536, hidden=4096, head_dim=1024, inner=65536)
    target = make_target(memory_bytes=3 * GIB)
    work = Workload(context_tokens=160, concurrency=1)
    plan = make_plan(model, target, work, PlanOptions(devices=7))
    assert plan.feasible and plan.devices == 4 and plan.idle_devices == 3
    assert any("3 of them stay idle" in reason for reason in plan.reasons)


@pytest.mark.parametrize(("experts", "ep"), [(128, 6), (384, 7), (8, 3)])
def test_experts_that_ep_does_not_divide_are_dealt_out_evenly(experts, ep):
    """TP-03: each expert on exactly one rank, counts differ by at most one, every rank looked at."""
    model = make_latent_moe_model(**(SMALL | {"experts": experts}))
    plan = make_plan(model, make_target(), Workload(concurrency=ep), PlanOptions(tp=1, dp=ep, ep=ep))
    parameter = next(p for p in model.parameters if p.role == "expert")
    held = []
    for rank in range(plan.devices):
        (box,) = rank_boxes(parameter, plan.layout, plan.layout.coordinates(rank))
        held.append(range(*box[parameter.shard.expert_dim]))
    assert sorted(expert for part in held for expert in part) == list(range(experts))
    assert max(map(len, held)) - min(map(len, held)) <= 1
    router = experts * 32 * 2
    sizes = {line.name: line.num_bytes for line in plan.ledger[0].lines if line.category == "weights"}
    assert sizes["expert"] == max(map(len, held)) * 5 * 3 * 32 * 16 * 2 and sizes["router"] == 5 * router


def test_more_expert_ranks_than_experts_are_refused():
    """TP-03."""
    with pytest.raises(DayZeroError, match="exceeds the 8 experts"):
        make_plan(make_latent_moe_model(**SMALL), make_target(), Workload(concurrency=16), PlanOptions(dp=16, tp=1, ep=16))


def test_a_shared_context_divides_the_latent_cache_and_adds_no_card():
    model = make_latent_moe_model(**SMALL)
    plain, shared = (make_plan(model, make_target(), Workload(), PlanOptions(tp=8, dcp=dcp)) for dcp in (1, 4))
    assert plain.devices == shared.devices == 8
    assert shared.cache_bytes_per_token_per_device == plain.cache_bytes_per_token_per_device / 4
    assert shared.weights_bytes_per_device == plain.weights_bytes_per_device
    assert shared.admissible_tokens > 3 * plain.admissible_tokens


def test_a_shared_context_that_is_no_copy_is_refused():
    with pytest.raises(DayZeroError, match="only copies share a context"):
        make_plan(make_dense_model(), make_target(), Workload(), PlanOptions(tp=8, dcp=4))


@pytest.mark.parametrize(("text", "layout"), [
    ("TP8xPP2xEP8", Layout(tp=8, pp=2, ep=8)), ("tp8 dp2 ep16", Layout(tp=8, dp=2, ep=16)), ("TP8×DCP8×SP", Layout(
        tp=8, cp=8, cp_in_tp=8, sp=True)), ("TP8*CP2*DCP4", Layout(tp=8, cp=8, cp_in_tp=4)), ("tp=4,pp=2", Layout(tp=4, pp=2)),
    ("TP1", Layout()),
])  # fmt: skip
def test_layouts_are_read_and_spelled(text, layout):
    assert parse_layout(text) == layout
    assert parse_layout(layout.spelled()) == layout


@pytest.mark.parametrize("text", ["", "TP", "8TP", "TP8xTP4", "TP8xQP2", "TP8xDCP3", "TP2xEP3", "TP0"])
def test_texts_that_name_no_layout_are_errors(text):
    with pytest.raises(DayZeroError) as caught:
        parse_layout(text)
    assert caught.value.fix and caught.value.want


def test_placement_deals_out_every_card_once():
    layout = Layout(tp=2, pp=3, dp=2, cp=2, ep=4, placement=("pp", "tp", "dp", "cp"))
    cards = [layout.card_of(rank) for rank in range(layout.num_devices)]
    assert sorted(cards) == list(range(24))
    stages = [layout.card_of(rank) for rank in range(24) if layout.coordinates(rank).tp == layout.coordinates(rank).dp == 0
              and layout.coordinates(rank).cp == 0]  # fmt: skip
    assert stages == [0, 1, 2]


def test_tensor_parallelism_lies_inside_the_node_and_a_pipeline_across():
    plan = make_plan(make_latent_moe_model(), make_target(num_cards=8), Workload(), PlanOptions(tp=8, pp=4))
    assert plan.layout.placement[0] == "tp"
    assert any(line.startswith("tp 8: neighbouring cards, over 400 GB/s links") for line in plan.links), plan.links
    assert any(line.startswith("pp 4: every 8 cards, over the network (50 GB/s") for line in plan.links)
    turned = [entry for entry in plan.rejected if entry.layout.placement[0] == "pp"]
    assert turned and all("times as slow" in entry.constraint for entry in turned)


def test_a_thousand_cards_and_a_million_tokens_in_under_two_seconds():
    """93 layers, 896 experts, 2.8 trillion parameters estimated from counts; memory is measured with the record's own test."""
    model = replace(make_latent_moe_model(layers=93, dense=1, experts=896, expert_inner=3072, chosen=16, heads=96), parameters=())
    work = Workload(context_tokens=1_048_576, concurrency=64, input_tokens=8192, output_tokens=1024, prefill_chunk_tokens=8192)
    start = time.process_time()
    plan = make_plan(model, make_target(memory_bytes=144 * 10**9), work, PlanOptions(devices=1024))
    assert time.process_time() - start < 2.0
    assert plan.feasible and plan.devices == 1024


def test_a_layout_that_only_fits_with_its_tokens_dealt_out_is_found():
    """SP: between what one layout needs with and without it, it fits, and the plan's figures are those with it."""
    model = make_latent_moe_model(**(SMALL | {"hidden": 4096}))
    work = Workload(context_tokens=8192, prefill_chunk_tokens=8192, concurrency=1)
    options = PlanOptions(tp=8, pp=1, dp=1, ep=1)
    lacks = []
    for sp in (False, True):
        plan = make_plan(model, make_target(memory_bytes=8 * GIB), work, replace(options, sp=sp))
        lacks.append(max(rank.total() - rank.total("reserve") for rank in plan.ledger))
    assert lacks[1] < lacks[0]
    between = int((lacks[0] + lacks[1]) / 2 / 0.98 / 0.9)  # a reserve of 2% of the fraction of 0.9
    target = make_target(memory_bytes=between)
    assert not make_plan(model, target, work, replace(options, sp=False)).feasible
    found = make_plan(model, target, work, options)
    assert found.feasible and found.layout.sp
    assert found.admissible_tokens == min(rank.admissible_tokens for rank in found.ledger)
