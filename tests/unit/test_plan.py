"""plan: the ledger is right, the search is complete, and a refusal says why (ME-01, TP-01, ME-04)."""

import subprocess
import sys
import time
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dayzero.core.errors import DayZeroError
from dayzero.core.model import Parameter
from dayzero.core.plan import Layout, Plan
from dayzero.core.records import from_dict, to_dict
from dayzero.core.sharding import owns_layer, rank_boxes
from dayzero.core.target import Workload
from dayzero.core.units import GIB, MIB
from dayzero.plan import PlanOptions, make_plan
from tests.unit.plan_builders import make_dense_model, make_latent_moe_model, make_target, with_group

LARGE = make_latent_moe_model()
SMALL = {"layers": 6, "dense": 1, "hidden": 32, "heads": 8, "q_rank": 16, "kv_rank": 8, "nope": 4, "rope": 4, "value": 4,
         "inner": 48, "expert_inner": 16, "experts": 8, "chosen": 2, "vocab": 64}  # fmt: skip


def make_small_plan(model=None, *, target=None, workload=None, **options):
    return make_plan(model or make_dense_model(), target or make_target(), workload or Workload(), PlanOptions(**options))


def count_bytes(model, layout, rank):
    """Bytes of one rank by marking every element of every parameter it owns: slow and obvious."""
    place, stage, total, roots = layout.coordinates(rank), rank // (layout.num_devices // layout.pp), 0, set()
    for parameter in model.parameters:
        root = parameter.tied_to or parameter.name
        if parameter.role == "mtp" or root in roots or not owns_layer(parameter, layout, stage):
            continue
        roots.add(root)
        mine = np.zeros(parameter.shape, dtype=bool)
        for box in rank_boxes(parameter, layout, place):
            mine[tuple(slice(start, stop) for start, stop in box)] = True
        total += int(mine.sum()) * 2
    return total


def test_planning_imports_no_torch():
    code = "import sys, dayzero.plan; assert not {'torch', 'transformers', 'numpy'} & set(sys.modules), 'heavy import'"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(("degrees"), [
    {"tp": 1}, {"tp": 2, "ep": 2}, {"tp": 4}, {"tp": 2, "dp": 2, "ep": 4}, {"pp": 3}, {"tp": 2, "pp": 2, "dp": 2, "ep": 2},
    {"tp": 1, "dp": 3, "ep": 3}, {"tp": 2, "cp": 2, "ep": 4}, {"tp": 8, "pp": 6},
])  # fmt: skip
def test_ledger_equals_brute_force(degrees):
    model = make_latent_moe_model(**SMALL)
    plan = make_small_plan(model, concurrency=4, **degrees)
    assert [rank.total("weights") for rank in plan.ledger] == [
        count_bytes(model, plan.layout, rank) for rank in range(plan.devices)
    ]
    assert plan.weights_bytes_per_device == max(rank.total("weights") for rank in plan.ledger)


@pytest.mark.parametrize("pp", [1, 2, 4])
def test_tied_embedding_is_counted_once_on_each_stage_that_needs_it(pp):
    """DI-04: a tied head is a copy of the embedding on the last stage, an untied one a matrix of its own."""
    untied = make_dense_model()
    other = make_small_plan(untied, pp=pp)
    assert [rank.total("weights") for rank in other.ledger] == [count_bytes(untied, other.layout, r) for r in range(pp)]
    assert sum(rank.total("weights") for rank in other.ledger) == 2 * untied.total_parameters
    model = make_dense_model(tied=True)
    plan = make_small_plan(model, pp=pp)
    assert [rank.total("weights") for rank in plan.ledger] == [count_bytes(model, plan.layout, r) for r in range(pp)]
    assert sum(rank.total("weights") for rank in plan.ledger) == 2 * model.total_parameters + (2 * 128 * 64 if pp > 1 else 0)


@pytest.mark.parametrize("tp", [1, 8, 16])
def test_latent_cache_is_not_divided_by_tp(tp):
    """ME-01: 70,272 B per token on each TP rank, 1,152 per layer."""
    plan = make_small_plan(LARGE, tp=tp, block_tokens=64)
    assert {rank.cache_bytes_per_token for rank in plan.ledger} == {70272.0}
    assert plan.admissible_tokens % 64 == 0


def test_latent_cache_is_divided_by_pp_and_cp():
    """ME-01: divided by PP (by the layers of the stage); context parallelism divides it too."""
    plan = make_small_plan(LARGE, tp=8, pp=4)
    for rank in plan.ledger:
        first, stop = plan.layout.stages[rank.stage]
        assert rank.cache_bytes_per_token == 1152 * (stop - first)
    assert make_small_plan(LARGE, tp=8, cp=2).cache_bytes_per_token_per_device == 70272 / 2


def test_cache_is_counted_in_whole_blocks():
    """ME-01: one token costs a block."""
    model, work = make_dense_model(), Workload(context_tokens=65, concurrency=1, input_tokens=1, output_tokens=1)
    plan = make_small_plan(model, workload=work, tp=1, block_tokens=64)
    assert plan.ledger[0].total("cache") == 128 * 4 * 2 * 4 * 8 * 2


def test_parameter_totals_of_the_671b_sizes():
    """ME-04: experts by EP and the rest by TP; the three buckets add up. (The published total has 58 x 256 biases more.)"""
    assert LARGE.total_parameters == 671_026_419_200 - 58 * 256
    plan = make_small_plan(LARGE, tp=8, ep=8)
    lines = {line.name: line.num_bytes for line in plan.ledger[0].lines if line.category == "weights"}
    assert lines["expert"] == 58 * 256 * 3 * 7168 * 2048 * 2 // 8
    assert lines["router"] == 58 * 256 * 7168 * 2
    assert lines["embedding"] == 129280 * 7168 * 2 // 8


@given(st.integers(1, 8), st.sampled_from([1, 2, 4, 8]), st.booleans())
@settings(max_examples=40, deadline=None)
def test_worst_rank_is_the_first_of_its_stage(experts_more, ranks, ep):
    """What the search prices (each stage's first rank) bounds every rank, uneven experts included."""
    model = make_latent_moe_model(**(SMALL | {"experts": 8 + experts_more}))
    plan = make_small_plan(model, tp=ranks, **({"ep": ranks} if ep else {}))
    assert plan.ledger[0].total() == max(rank.total() for rank in plan.ledger)


@given(st.integers(600 * MIB, 4 * GIB), st.integers(0, 2 * GIB), st.sampled_from([1, 2, 4]),
       st.integers(160, 100_000), st.integers(1, 64))  # fmt: skip
@settings(max_examples=30, deadline=None)
def test_adding_memory_never_makes_feasible_infeasible(memory, more, devices, context, concurrency):
    model = make_latent_moe_model(**SMALL)
    options = {"devices": devices, "context": context, "concurrency": concurrency}
    before = make_small_plan(model, target=make_target(memory_bytes=memory), **options)
    after = make_small_plan(model, target=make_target(memory_bytes=memory + more), **options)
    assert after.feasible >= before.feasible
    # Admissible tokens grow too where the layout is the same one.
    if before.layout == after.layout:
        assert after.admissible_tokens >= before.admissible_tokens


@given(st.integers(1, 200), st.integers(1, 60), st.integers(600 * MIB, 3 * GIB))
@settings(max_examples=60, deadline=None)
def test_feasible_means_the_demand_is_within_the_budget(context_blocks, concurrency, memory):
    work = Workload(context_tokens=context_blocks * 160, concurrency=concurrency)
    plan = make_small_plan(target=make_target(memory_bytes=memory), workload=work, tp=1)
    rank = plan.ledger[0]
    assert plan.feasible == (rank.total() <= rank.budget_bytes)
    held = sum(line.num_bytes for line in rank.lines if line.category != "cache")
    per_token = Fraction(rank.cache_bytes_per_token)
    assert plan.admissible_tokens * per_token <= max(0, rank.budget_bytes - held)
    if rank.budget_bytes > held:
        assert (plan.admissible_tokens + 16) * per_token > rank.budget_bytes - held
    if plan.feasible:
        assert plan.admissible_tokens >= plan.context_tokens


def test_full_concurrency_that_does_not_fit_is_told():
    """One full context and the others at the average length is the documented rule; more is said, not refused."""
    tight = make_target(memory_bytes=3 * GIB)
    plan = make_small_plan(target=tight, tp=1, context=1_000_000, concurrency=4)
    assert plan.feasible and plan.admissible_tokens < 4_000_000
    held = plan.admissible_tokens // plan.context_tokens
    assert 1 <= held < 4
    assert any(f"only {held} at the full 1000000" in reason for reason in plan.reasons), plan.reasons


def test_sliding_cache_does_not_grow_beyond_its_window():
    plan = make_small_plan(make_dense_model(window=32), tp=1, context=100_000)
    assert plan.cache_bytes_per_token_per_device == 0
    assert plan.ledger[0].cache_bytes_per_sequence == (32 + 16) * 4 * 2 * 4 * 8 * 2
    assert plan.admissible_tokens > 100_000


def test_infeasible_plan_is_returned_with_the_gap_and_the_smallest_change():
    plan = make_small_plan(LARGE, devices=8)
    assert not plan.feasible
    assert plan.reasons[0].startswith("8 cards are short by ") and "GiB per card: use " in plan.reasons[0]
    assert any(entry.short_by_bytes for entry in plan.rejected)
    worst = max(rank.total() for rank in plan.ledger)
    assert worst > plan.ledger[0].budget_bytes
    count = int(plan.reasons[0].split("use ")[1].split()[0])
    assert make_small_plan(LARGE, devices=count).feasible
    assert not any(make_small_plan(LARGE, devices=fewer).feasible for fewer in (9, 16) if fewer < count)


def test_smallest_number_of_cards_is_found_and_the_next_smaller_is_rejected_with_bytes():
    plan = make_small_plan(LARGE)
    assert plan.feasible and plan.rejected[0].short_by_bytes is not None and plan.rejected[0].short_by_bytes > 0
    assert plan.rejected[0].layout.num_devices < plan.devices


@pytest.mark.parametrize("confidence_or_field", ["low", "unverified", "card.memory_bytes", "card", "all"])
def test_a_doubtful_memory_figure_never_refuses_by_itself(confidence_or_field):
    is_level = confidence_or_field in ("low", "unverified")
    target = make_target(**({"confidence": confidence_or_field} if is_level else {"unverified": (confidence_or_field,)}))
    plan = make_small_plan(LARGE, target=target, devices=8)
    assert plan.feasible and any("unverified" in reason for reason in plan.reasons)
    assert plan.reasons[0].startswith("8 cards are short by ")
    assert any(line.startswith("card.memory_bytes") and "unverified" in line for line in plan.rests_on)


def test_a_doubtful_link_does_not_excuse_a_lack_of_memory():
    assert not make_small_plan(LARGE, target=make_target(unverified=("node.link_bytes_per_s",)), devices=8).feasible


def test_unpublished_memory_and_rates():
    with pytest.raises(DayZeroError, match="publishes no memory size"):
        make_small_plan(target=make_target(memory_bytes=None))
    plan = make_small_plan(target=make_target(rates=False))
    assert plan.prefill is None and plan.decode is None and any("no time is predicted" in r for r in plan.reasons)


@pytest.mark.parametrize(("options", "match"), [
    ({"tp": 3}, "not legal"),                                # 4 key/value heads
    ({"tp": 2, "ep": 2}, "no experts"),
    ({"pp": 5}, "more pipeline stages than layers"),
    ({"devices": 8, "tp": 3}, "do not make up the devices"),
    ({"devices": 8, "tp": 2, "pp": 1, "dp": 1, "cp": 1}, "do not make up the devices"),
    ({"tp": 1, "ep": 3}, "ep must divide"),
    ({"weights_dtype": "fp3"}, "no weights dtype"),
    ({"cache_dtype": "fp3"}, "no cache dtype"),
])  # fmt: skip
def test_impossible_requests_are_errors(options, match):
    with pytest.raises(DayZeroError, match=match) as caught:
        make_small_plan(**options)
    assert caught.value.fix and caught.value.want


@pytest.mark.parametrize("bad", [{"memory_fraction": 0.0}, {"memory_fraction": 1.5}, {"tp": 0}, {"context": 0}])
def test_option_values_are_checked(bad):
    with pytest.raises(DayZeroError):
        PlanOptions(**bad)


@pytest.mark.parametrize(("inner", "tp", "legal"), [
    (18432, 32, False), (3072, 16, False), (320, 4, False), (2048, 16, True), (2048, 32, False), (18432, 16, True),
])  # fmt: skip
def test_quantization_blocks_bound_tp(inner, tp, legal):
    """TP-01: 18432/32 = 576, 3072/16 = 192, 320/4 = 80 and 2048/32 = 64 are no multiples of 128; gate and up apart."""
    model = with_group(make_dense_model(layers=2, hidden=1024, heads=32, kv_heads=32, head_dim=128, inner=inner))
    if legal:
        assert make_small_plan(model, tp=tp).layout.tp == tp
        return
    with pytest.raises(DayZeroError, match="not a multiple of the quantization block 128") as caught:
        make_small_plan(model, tp=tp)
    assert "tp of" in caught.value.want


def test_quantized_release_is_counted_with_its_scales():
    model = with_group(make_dense_model(layers=2, hidden=256, heads=4, kv_heads=4, head_dim=64, inner=512))
    plan = make_small_plan(model, tp=1)
    linear = 2 * (4 * 256 * 256 + 3 * 256 * 512)
    rest = 2 * 128 * 256 + 256 * 3
    assert plan.weights_dtype == "as published"
    assert plan.weights_bytes_per_device == linear + linear // (128 * 128) * 4 + 2 * rest
    assert any("assumed" in line for line in plan.rests_on)


@pytest.mark.parametrize(("dtype", "bits"), [("bf16", 16), ("float32", 32), ("fp8", 8), ("int8", 8), ("int4", 4), ("mxfp4", 4)])
def test_asked_weight_dtypes(dtype, bits):
    plan = make_small_plan(LARGE, tp=8, weights_dtype=dtype)
    expert = next(line for line in plan.ledger[0].lines if line.name == "expert")
    whole = 58 * 256 * 3 * 7168 * 2048 * bits // 8 // 8
    assert whole <= expert.num_bytes <= whole * 1.07


def test_mtp_is_counted_only_when_asked():
    model = make_dense_model()
    extra = Parameter(name="model.layers.4.eh_proj.weight", shape=(64, 128), dtype="bfloat16", role="mtp", layer=4)
    with_mtp = replace(model, parameters=(*model.parameters, extra))
    without, counted = (make_small_plan(with_mtp, tp=1, mtp=asked).weights_bytes_per_device for asked in (False, True))
    assert without == make_small_plan(model, tp=1).weights_bytes_per_device and counted == without + 64 * 128 * 2


def test_a_description_without_parameters_is_planned_from_its_counts():
    bare = replace(LARGE, parameters=(), provisional=True)
    plan, real = make_small_plan(bare, tp=8, ep=8), make_small_plan(LARGE, tp=8, ep=8)
    assert plan.weights_bytes_per_device == pytest.approx(real.weights_bytes_per_device, rel=0.03)
    assert any("estimated from parameter counts" in reason for reason in plan.reasons)


def test_search_equals_naive_enumeration():
    """The chosen number of cards is the least at which any layout at all fits, tried one by one."""
    model, target = make_latent_moe_model(**SMALL), make_target(memory_bytes=3 * GIB)
    plan = make_small_plan(model, target=target, context=3_000_000, concurrency=2)
    fits = {}
    for devices in (1, 2, 4, 8):
        if devices > plan.devices:
            break
        found = False
        for tp, pp, dp, cp, ep in ((a, b, c, d, e) for a in range(1, 9) for b in range(1, 7) for c in (1, 2)
                                   for d in range(1, 9) for e in range(1, 9)):  # fmt: skip
            if tp * pp * dp * cp != devices or (tp * dp * cp) % ep:
                continue
            try:
                one = make_small_plan(model, target=target, context=3_000_000, concurrency=2, tp=tp, pp=pp, dp=dp, cp=cp, ep=ep)
            except DayZeroError:
                continue
            if one.feasible:
                found = True
                break
        fits[devices] = found
    assert fits == {devices: devices == plan.devices for devices in fits}, (fits, plan.layout)


def test_ranks_of_one_host_share_its_memory():
    host = make_target(memory_bytes=8 * GIB, num_cards=1, topology="shared memory")
    one, two = (make_small_plan(target=host, tp=tp).ledger[0].budget_bytes for tp in (1, 2))
    assert two == one // 2
    assert make_small_plan(target=host).devices == 1


def test_a_target_that_is_too_small_is_infeasible_on_one_card():
    plan = make_small_plan(target=make_target(memory_bytes=MIB, num_cards=1, topology="shared memory"))
    assert not plan.feasible and plan.devices == 1 and plan.admissible_tokens == 0


def test_plan_survives_its_file():
    plan = make_small_plan(LARGE, tp=8, pp=2, ep=4)
    assert from_dict(Plan, to_dict(plan)) == plan


def test_reasons_and_lines_carry_numbers():
    plan = make_small_plan(LARGE, devices=32)
    assert all(any(char.isdigit() for char in line.formula) for rank in plan.ledger for line in rank.lines)
    assert {line.category for line in plan.ledger[0].lines} == {
        "weights", "cache", "activations", "communication", "runtime", "loader", "reserve",
    }  # fmt: skip
    assert plan.rejected and all(entry.constraint for entry in plan.rejected)
    assert plan.prefill is not None and 0 < plan.prefill.low_s < plan.prefill.high_s


def test_a_thousand_cards_are_planned_in_under_two_seconds():
    start = time.process_time()
    plan = make_small_plan(LARGE, devices=1024, context=131_072)
    assert plan.feasible and len(plan.ledger) == 1024
    assert time.process_time() - start < 2.0


def test_layout_coordinates_cover_every_place_once():
    layout = Layout(tp=2, pp=3, dp=2, cp=2, ep=4)
    assert len({layout.coordinates(rank) for rank in range(layout.num_devices)}) == layout.num_devices
