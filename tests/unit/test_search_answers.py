"""plan: what scripts and people ask for beside one plan (every layout, one layout, the frontier, other figures, pools)."""

from dataclasses import replace

import pytest

from dayzero.core.errors import DayZeroError
from dayzero.core.plan import Explanation, Layout, LayoutList, Plan
from dayzero.core.records import from_dict, to_dict
from dayzero.core.target import Workload
from dayzero.core.units import GIB
from dayzero.plan import PlanOptions, explain, figure_names, frontier, make_plan, plan_all, with_figures
from dayzero.plan.case import open_case
from dayzero.plan.roofline import MEASURED, PUBLISHED, shares_of
from tests.unit.plan_builders import make_dense_model, make_latent_moe_model, make_target

pytestmark = pytest.mark.slow

LARGE = make_latent_moe_model()
SMALL = {"layers": 6, "dense": 1, "hidden": 32, "heads": 8, "q_rank": 16, "kv_rank": 8, "nope": 4, "rope": 4, "value": 4,
         "inner": 48, "expert_inner": 16, "experts": 8, "chosen": 2, "vocab": 64}  # fmt: skip


def make_small_plan(model=None, *, target=None, workload=None, **options):
    return make_plan(model or LARGE, target or make_target(), workload or Workload(), PlanOptions(**options))


# --- objectives


def test_each_objective_is_best_at_its_own():
    target, plans = make_target(memory_bytes=200 * GIB), {}
    for objective in ("throughput", "latency", "cost", "fewest_cards"):
        plans[objective] = make_small_plan(target=target, objective=objective, workload=Workload(concurrency=64))
        assert plans[objective].objective == objective and plans[objective].feasible
    alone = {name: plan.prefill.low_s + plan.prefill.high_s for name, plan in plans.items()}
    assert plans["fewest_cards"].devices == min(plan.devices for plan in plans.values())
    assert alone["latency"] <= min(alone.values()) * 1.01
    assert plans["latency"].devices >= plans["fewest_cards"].devices


def test_the_fewest_cards_are_found_among_all_numbers():
    plan = make_small_plan(objective="fewest_cards")
    assert plan.feasible
    assert not any(make_small_plan(devices=fewer).feasible for fewer in range(max(1, plan.devices - 3), plan.devices))


def test_a_latency_goal_is_kept_or_told():
    slow = make_small_plan(devices=32)
    goal = Workload(max_tpot_s=slow.decode.low_s * 0.9)
    kept = make_small_plan(workload=goal)
    assert kept.feasible
    assert kept.decode.low_s <= goal.max_tpot_s or any("latency goal not met" in reason for reason in kept.reasons)
    never = make_small_plan(devices=32, workload=Workload(max_tpot_s=1e-9))
    assert never.feasible and any("latency goal not met: a token every" in reason for reason in never.reasons)


# --- reasons


def test_every_neighbour_has_one_constraint_with_its_amount():
    plan = make_small_plan(target=make_target(memory_bytes=50 * GIB), devices=32)
    assert plan.feasible and len(plan.rejected) >= 10
    for entry in plan.rejected:
        assert any(char.isdigit() for char in entry.constraint) or entry.constraint.endswith("less simple"), entry
        assert (entry.short_by_bytes is not None) == entry.constraint.startswith("memory: short by"), entry
    assert any(entry.short_by_bytes for entry in plan.rejected)
    assert any("times as slow" in entry.constraint for entry in plan.rejected)


def test_illegal_neighbours_say_what_does_not_divide():
    plan = make_small_plan(make_dense_model(heads=8, kv_heads=8), devices=8, tp=4)
    assert plan.feasible
    plan = make_small_plan(make_dense_model(layers=1, heads=12, kv_heads=12, head_dim=8), devices=8, concurrency=1)
    assert any("12 heads are not divisible by tp=8" in entry.constraint for entry in plan.rejected), plan.rejected


def test_the_smallest_change_names_each_way_out_and_each_works():
    plan = make_small_plan(devices=8)
    told = plan.reasons[0]
    assert not plan.feasible and told.startswith("8 cards are short by ")
    cards = int(told.split("use ")[1].split()[0])
    assert make_small_plan(devices=cards).feasible
    assert "int4 experts (w4a8)" in told or "int4 weights" in told
    dtype = "w4a8" if "w4a8" in told else "int4"
    assert make_small_plan(devices=8, weights_dtype=dtype).feasible
    long = make_small_plan(make_latent_moe_model(**SMALL), target=make_target(memory_bytes=2 * GIB), devices=1,
                           context=40_000_000, concurrency=1)  # fmt: skip
    assert not long.feasible
    context = int(long.reasons[0].split("a context of ")[1].split()[0])
    small = make_latent_moe_model(**SMALL)
    for tokens, fits in ((context, True), (context + 16, False)):
        assert make_small_plan(small, target=make_target(memory_bytes=2 * GIB), devices=1, context=tokens,
                               concurrency=1).feasible == fits  # fmt: skip


def test_a_plan_says_what_its_time_is_bound_by_and_on_which_figures_it_rests():
    plan = make_small_plan(devices=32)
    assert any(reason.startswith("a decode step is bound by ") for reason in plan.reasons)
    assert any(reason.startswith("times are a range: published rates: compute 35%-85%") for reason in plan.reasons)
    assert any(line.startswith("card.memory_bytes = ") for line in plan.rests_on)
    assert any(line.startswith("network_bytes_per_s = ") for line in plan.rests_on)


# --- time


def test_a_measured_target_narrows_the_range_and_a_doubtful_one_widens_it():
    spans = {}
    for confidence in ("measured", "high", "unverified"):
        plan = make_small_plan(target=make_target(confidence=confidence), devices=32, tp=8, dp=4)
        spans[confidence] = plan.prefill.high_s / plan.prefill.low_s
    assert spans["measured"] < spans["high"] < spans["unverified"]
    assert MEASURED.compute[1] > PUBLISHED.compute[1]
    assert "unverified: card.flops_per_s.bfloat16" in shares_of(make_target(unverified=("card.flops_per_s",)), "bfloat16").note


def test_operator_graphs_are_used_where_a_description_has_them():
    from dayzero.core.model import OperatorGraph, OperatorNode

    model = make_dense_model()
    mixer = OperatorNode(name="self_attn", kind="attention", count=1, flops="512*B*C", bytes="256*B*C")
    moving = OperatorNode(name="norm", kind="rms_norm", count=2, flops="0", bytes="1000000000*B*T")
    graph = OperatorGraph(prefill=(mixer, moving), decode=(mixer, moving))
    kinds = tuple(replace(kind, operators=graph) for kind in model.layer_kinds)
    plain, drawn = (make_small_plan(one, tp=1) for one in (model, replace(model, layer_kinds=kinds)))
    assert drawn.decode.memory_s > plain.decode.memory_s + 4 * 8e9 / 3e12 * 0.99
    split = make_small_plan(replace(model, layer_kinds=kinds), tp=4, sp=True)
    whole = make_small_plan(replace(model, layer_kinds=kinds), tp=4, sp=False)
    assert split.decode.memory_s < whole.decode.memory_s / 3, "SP divides what TP repeats"


def test_a_collective_is_dearer_across_nodes():
    near, far = (make_small_plan(target=make_target(num_cards=cards, memory_bytes=400 * GIB), tp=8, devices=8)
                 for cards in (8, 2))  # fmt: skip
    assert far.decode.communication_s > 1.5 * near.decode.communication_s
    assert far.links[0].startswith("tp 8: neighbouring cards, over 400 GB/s links in groups of 2, then the network (50 GB/s")


def test_quantized_weights_run_at_their_own_rate():
    target = make_target()
    target = replace(target, card=replace(target.card, flops_per_s={"bfloat16": 9e14, "int8": 18e14}))
    wide, narrow = (make_small_plan(target=target, tp=8, dp=4, weights_dtype=dtype) for dtype in ("bf16", "int8"))
    assert narrow.prefill.compute_s < 0.6 * wide.prefill.compute_s


# --- scripts


def test_all_layouts_are_listed_and_the_first_is_the_plan():
    model, work = make_latent_moe_model(**SMALL), Workload(concurrency=4)
    listed = plan_all(model, make_target(), work, PlanOptions(devices=8))
    case = open_case(model, make_target(), work, PlanOptions(devices=8))
    legal = [layout for layout in case.search.layouts(8) if case.search.illegal(layout) is None]
    assert listed.enumerated >= len(listed.layouts) == len(legal)
    assert all(row.legal and row.fits and row.serve_s and row.admissible_tokens for row in listed.layouts)
    plan = make_plan(model, make_target(), work, PlanOptions(devices=8))
    assert listed.layouts[0].serve_s <= min(row.serve_s for row in listed.layouts)
    assert any(row.layout.spelled() == plan.layout.spelled() and float(f"{row.serve_s:.3g}") ==
               float(f"{listed.layouts[0].serve_s:.3g}") for row in listed.layouts)  # fmt: skip
    assert from_dict(LayoutList, to_dict(listed)) == listed


@pytest.mark.parametrize(("layout", "legal", "fits", "word"), [
    ("TP8xPP4", True, True, ""), ("TP8", True, False, "memory: short by"), ("TP3", False, False, "128 heads are not divisible by tp=3"),
    ("TP8xPP62", False, False, "more pipeline stages than layers"), ("TP16xDP16xEP256", True, True, ""),
])  # fmt: skip
def test_one_layout_is_explained(layout, legal, fits, word):
    found = explain(LARGE, make_target(), Workload(concurrency=16), PlanOptions(), layout)
    assert (found.row.legal, found.row.fits) == (legal, fits)
    assert word in found.row.constraint
    assert from_dict(Explanation, to_dict(found)) == found
    if legal:
        assert found.ledger.total() - found.ledger.budget_bytes == (found.row.short_by_bytes or found.row.used_bytes -
                                                                     found.row.budget_bytes)  # fmt: skip
    if legal and not fits:
        assert "GiB" in found.row.constraint and found.row.short_by_bytes > 0
        assert any("short by" in reason and "use " in reason for reason in found.reasons)
    if not legal:
        assert any(reason.startswith("tp of ") for reason in found.reasons)


def test_a_pool_is_explained_by_itself():
    """A decode pool runs no chunks of prompts, so that it needs less for activations."""
    work = Workload(context_tokens=8192, input_tokens=4000, prefill_chunk_tokens=4096, concurrency=32)
    mixed, decode = (explain(LARGE, make_target(), work, PlanOptions(), "DP32xEP32", role=role) for role in ("mixed", "decode"))
    assert decode.row.used_bytes < mixed.row.used_bytes


def test_the_frontier_is_the_border_of_what_fits():
    model, target, layout = make_latent_moe_model(**SMALL), make_target(memory_bytes=2 * GIB), Layout(tp=2)
    points = frontier(model, target, Workload(), PlanOptions(context=100_000), layout)
    assert [point.context_tokens for point in points] == sorted(point.context_tokens for point in points)
    assert [p.concurrency for p in points] == sorted((p.concurrency for p in points), reverse=True)
    for point in points:
        work = Workload(context_tokens=point.context_tokens, input_tokens=point.context_tokens - 1, output_tokens=1)
        for more, fits in ((0, True), (1, False)):
            if point.concurrency + more < 1 or point.concurrency >= 1 << 16:
                continue
            plan = make_plan(model, target, work, PlanOptions(tp=2, sp=False, concurrency=point.concurrency + more))
            assert plan.feasible == fits, point


def test_any_figure_is_set():
    target = make_target(confidence="unverified")
    assert make_small_plan(target=target, devices=8).feasible, "an unverified figure never refuses"
    given = with_figures(target, {"card.memory_bytes": "96GiB", "node.link_bytes_per_s": "900GB/s", "card.flops_per_s.fp8": "2e15"})
    assert given.card.memory_bytes == 96 * GIB and given.node.link_bytes_per_s == 9e11
    assert given.card.flops_per_s["float8_e4m3fn"] == 2e15
    assert not make_small_plan(target=given, devices=8).feasible, "a figure that the user states does"
    plan = make_small_plan(target=given, devices=32)
    assert "card.memory_bytes = 96.00 GiB (medium)" in plan.rests_on
    assert any(line.startswith("card.memory_bytes_per_s") and "unverified" in line for line in plan.rests_on)
    assert with_figures(target, {"network_bytes_per_s": "null"}).network_bytes_per_s is None
    usable = replace(target, card=replace(target.card, usable_memory_bytes=10 * GIB))
    assert with_figures(usable, {"card.memory_bytes": "96GiB"}).card.usable_memory_bytes is None
    assert "card.power_w" in figure_names(target)


@pytest.mark.parametrize(("name", "value", "near"), [
    ("card.memory_byte", "1", "card.memory_bytes"), ("memory_bytes", "1", "card.memory_bytes"), ("node.cards", "8", "node.num_cards"),
    ("card.memory_bytes", "lots", "correct --set"), ("card.memory_bytes", "1.5", "correct --set"),
    ("card.flops_per_s.fp3", "1", "card.flops_per_s"), ("card.memory_bytes", "0", "correct memory_bytes"),
])  # fmt: skip
def test_what_cannot_be_set_is_an_error_with_the_nearest_name(name, value, near):
    with pytest.raises(DayZeroError) as caught:
        with_figures(make_target(), {name: value})
    assert near in caught.value.fix


# --- quantization, pools, roles


def test_offered_dtypes_are_chosen_from_and_the_others_told():
    plan = make_small_plan(devices=16, weights_dtype="bf16,int8")
    assert plan.feasible and plan.weights_dtype == "int8"
    assert any(reason.startswith("bfloat16 weights, own cache: short by ") for reason in plan.reasons), plan.reasons
    listed = plan_all(make_latent_moe_model(**SMALL), make_target(), Workload(), PlanOptions(devices=2, weights_dtype="bf16,int8"))
    assert {row.weights_dtype for row in listed.layouts} == {"bfloat16", "int8"}


def test_two_pools_are_searched_over_every_split():
    model, target = make_latent_moe_model(**SMALL), make_target(memory_bytes=4 * GIB)
    work = Workload(concurrency=16, input_tokens=1000, output_tokens=500)
    plan = make_plan(model, target, work, PlanOptions(devices=8, pools="split"))
    assert [pool.role for pool in plan.pools] == ["prefill", "decode"]
    assert plan.devices == 8 == sum(pool.layout.num_devices for pool in plan.pools) and len(plan.ledger) == 8
    assert any("prompts/s" in reason for reason in plan.reasons)
    assert len([entry for entry in plan.rejected if "cards for prompts" in entry.constraint]) == 6
    assert from_dict(Plan, to_dict(plan)) == plan
    both = make_plan(model, target, work, PlanOptions(devices=8, pools="auto"))
    assert any("requests/s" in reason for reason in both.reasons)


def test_given_pools_are_taken_as_they_are():
    plan = make_small_plan(prefill="TP8xDP2", decode="DP32xEP32", workload=Workload(concurrency=64))
    assert plan.devices == 48 and [pool.layout.spelled() for pool in plan.pools] == ["TP8xDP2", "DP32xEP32"]
    with pytest.raises(DayZeroError, match="two layouts"):
        make_small_plan(prefill="TP8")
    with pytest.raises(DayZeroError, match="not legal"):
        make_small_plan(prefill="TP3", decode="TP8")


def test_roles_are_split_over_other_numbers_of_cards():
    """One deployment: attention and experts over 32 cards, the embedding over 16, head and dense feed-forward over 8."""
    split = {"embedding": 16, "head": 8, "mlp": 8}
    plain, own = (make_small_plan(tp=32, ep=32, role_tp=roles) for roles in ({}, split))
    sizes = [{line.name: line.num_bytes for line in plan.ledger[0].lines if line.category == "weights"} for plan in (plain, own)]
    for role, degree in split.items():
        assert sizes[1][role] == sizes[0][role] * 32 // degree
        assert own.pools[0].role_layouts[role].tp == degree
    assert sizes[1]["expert"] == sizes[0]["expert"] and own.admissible_tokens < plain.admissible_tokens
    searched = make_small_plan(tp=32, ep=32, split_roles=True)
    assert searched.weights_bytes_per_device <= plain.weights_bytes_per_device
    with pytest.raises(DayZeroError, match="no role is split"):
        PlanOptions(role_tp={"expert": 2})
    with pytest.raises(DayZeroError, match="not legal"):
        make_small_plan(tp=32, ep=32, role_tp={"head": 5})
