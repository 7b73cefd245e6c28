"""Where quantization blocks and experts bound a layout, size by size (TP-01), and experts on uneven ranks with copies (TP-03)."""

from dataclasses import replace

import numpy as np
import pytest

from dayzero.core.errors import DayZeroError
from dayzero.core.plan import Coordinates, Layout, parse_layout
from dayzero.core.sharding import even_split
from dayzero.core.target import Workload
from dayzero.plan import PlanOptions, explain, make_plan
from dayzero.plan.ledger import Evaluator
from dayzero.plan.options import resolve
from dayzero.plan.weights import Weights
from tests.unit.plan_builders import (
    make_dense_model,
    make_latent_moe_model,
    make_rule,
    make_target,
    with_group,
)

SMALL = {"layers": 6, "dense": 1, "hidden": 32, "heads": 8, "q_rank": 16, "kv_rank": 8, "nope": 4, "rope": 4, "value": 4,
         "inner": 48, "expert_inner": 16, "experts": 8, "chosen": 2, "vocab": 64}  # fmt: skip
# Heads that every degree of the table divides, so that the feed-forward alone decides.
HEADS = 480


def make_fused_model(inner, *, block=(128, 128), fused):
    """A dense model whose gate and up are one matrix, or two, stored in blocks; its attention can be cut by all degrees."""
    model = make_dense_model(layers=1, hidden=1024, heads=HEADS, kv_heads=HEADS, head_dim=128, inner=inner)
    if fused:
        shape = (2 * inner, 1024)
        rule = make_rule(shape, 0, segments=(inner, inner))
        kept = [p for p in model.parameters if not p.name.endswith("up_proj.weight")]
        parameters = tuple(replace(p, name=p.name.replace("gate_proj", "gate_up_proj"), shape=shape, shard=rule)
                           if "gate_proj" in p.name else p for p in kept)  # fmt: skip
        model = replace(model, parameters=parameters)
    return with_group(model, roles=("mlp",), scheme="fp8-block", weight_bits=8.0, block=block, scale_dtype="float32")


# (size of one half, degree) -> verdict, counted by hand: the half's share is a whole number of blocks of 128, or not.
TABLE = [
    (18432, 32, False), (18432, 16, True), (18432, 24, True), (3072, 16, False), (3072, 8, True), (3072, 12, True),
    (320, 4, False), (320, 5, False), (320, 1, True), (2048, 16, True), (2048, 32, False), (1536, 12, True), (1536, 8, False),
]  # fmt: skip


@pytest.mark.parametrize("fused", [False, True], ids=["two matrices", "one matrix"])
@pytest.mark.parametrize(("inner", "tp", "legal"), TABLE)
def test_a_half_is_cut_at_whole_blocks(inner, tp, legal, fused):
    """TP-01: gate and up apart. 320 on 5 ranks: the fused 640 / 5 = 128 would pass, each half's 64 does not."""
    weights = Weights(make_fused_model(inner, fused=fused), "as published")
    reason = weights.illegal(Layout(tp=tp))
    assert (reason is None) == legal, reason
    if not legal:
        assert f"{inner} / {tp} = {inner / tp:g} is not a multiple of the quantization block 128" in reason


@pytest.mark.parametrize(("inner", "tp", "legal"), TABLE)
def test_an_expert_is_cut_at_whole_blocks_too(inner, tp, legal):
    """TP-01: the ranks that share an expert, however many expert groups there are beside them."""
    model = make_latent_moe_model(layers=2, dense=0, hidden=1024, heads=HEADS, expert_inner=inner, experts=4, chosen=2)
    model = with_group(model, roles=("expert",), scheme="fp8-block", weight_bits=8.0, block=(128, 128), scale_dtype="float32")
    weights = Weights(model, "as published")
    shared = Layout(tp=tp, dp=2, ep=2)
    assert shared.expert_tp == tp and (weights.illegal(shared) is None) == legal


@pytest.mark.parametrize(("block", "guilty"), [((128, 64), "gate_proj"), ((64, 128), "down_proj"), ((64, 64), None)])
def test_both_sides_of_a_block_are_looked_at(block, guilty):
    """TP-01: 192 on 3 ranks are 64. Gate and up are cut by rows, the product back by columns: each against its own side."""
    reason = Weights(make_fused_model(192, block=block, fused=False), "as published").illegal(Layout(tp=3))
    assert (reason is None) if guilty is None else (guilty in reason and "64" in reason), reason


@pytest.mark.parametrize(("inner", "tp"), [(18432, 32), (3072, 16), (320, 4), (2048, 32)])
def test_a_refusal_names_the_nearest_degrees(inner, tp):
    """TP-01: refused before anything is converted, with the four legal degrees nearest to the asked one."""
    model = make_fused_model(inner, fused=True)
    with pytest.raises(DayZeroError, match="quantization block 128") as caught:
        make_plan(model, make_target(), Workload(concurrency=1), PlanOptions(tp=tp))
    legal = [d for d in range(1, max(64, 2 * tp) + 1) if d == 1 or (inner % (128 * d) == 0 and HEADS % d == 0)]
    nearest = sorted(sorted(legal, key=lambda degree: (abs(degree - tp), degree))[:4])
    assert caught.value.want == f"tp of {', '.join(map(str, nearest))}"


def test_a_free_plan_keeps_experts_whole_where_they_cannot_be_cut():
    """TP-01: experts of 320 are never cut 2 to 16 ways; the plan takes EP instead, and says which degrees it took."""
    model = make_latent_moe_model(layers=2, dense=0, hidden=1024, heads=16, expert_inner=320, experts=16, chosen=2, shared=0)
    model = with_group(model, roles=("expert",), scheme="fp8-block", weight_bits=8.0, block=(128, 128), scale_dtype="float32")
    plan = make_plan(model, make_target(), Workload(concurrency=8), PlanOptions(devices=16))
    assert plan.feasible and plan.layout.expert_tp == 1 and plan.layout.ep == 16


# --- experts


UNEVEN = [(128, 6, 0), (384, 7, 0), (8, 3, 0), (128, 6, 16), (384, 7, 16), (8, 3, 16),
          (256, 320, 64), (256, 64, 0), (256, 64, 64)]  # fmt: skip


@pytest.mark.parametrize(("experts", "ep", "copies"), UNEVEN)
def test_every_place_is_on_one_rank_and_no_rank_has_two_more_than_another(experts, ep, copies):
    """TP-03: each expert on exactly one primary rank, copies after them, none beyond the last place; every rank looked at."""
    layout = Layout(dp=ep, ep=ep, redundant_experts=copies)
    held = [layout.expert_places(experts, rank) for rank in range(ep)]
    assert [place for part in held for place in part] == list(range(experts + copies))
    assert max(map(len, held)) - min(map(len, held)) <= 1
    if not copies:
        assert [(part.start, part.stop) for part in held] == [even_split(experts, ep, rank) for rank in range(ep)]


@pytest.mark.parametrize(("experts", "ep", "copies"), UNEVEN)
def test_weights_and_scales_follow_the_places(experts, ep, copies):
    """TP-03: what each rank's ledger holds of experts is its places times an expert with its scales, on every rank."""
    model = with_group(make_latent_moe_model(**(SMALL | {"experts": experts, "layers": 2})), roles=("expert",),
                       scheme="fp8-block", weight_bits=8.0, block=(8, 8), scale_dtype="float32")  # fmt: skip
    request = resolve(model, Workload(concurrency=ep), PlanOptions(engine="vllm"))
    evaluator = Evaluator(model, make_target(), request, engine="vllm")
    layout = Layout(dp=ep, ep=ep, redundant_experts=copies)
    assert evaluator.weights.illegal(layout) is None or copies > experts * (ep - 1)
    ledgers = evaluator.ledgers(evaluator.evaluate(layout))
    total, one = 0, 3 * 32 * 16 + 3 * (32 // 8) * (16 // 8) * 4  # an expert's codes, and a scale for each block of 8 x 8
    for rank, ledger in enumerate(ledgers):
        line = next(line for line in ledger.lines if (line.category, line.name) == ("weights", "expert"))
        assert line.num_bytes == min(experts, len(layout.expert_places(experts, rank))) * one, rank
        assert not copies or f"{experts} + {copies} places" in line.formula
        exchange = [line.num_bytes for line in ledger.lines if line.name == "expert exchange"]
        assert exchange == ([min(experts, -(-(experts + copies) // ep)) * one] if copies else [])
        total += line.num_bytes
    assert total == (experts + copies) * one, "no more is claimed than the places there are"


@pytest.mark.parametrize(("experts", "ep", "copies"), UNEVEN)
def test_simulated_ranks_add_up_to_the_dense_result(experts, ep, copies):
    """TP-03: routing that hits the first and the last expert of each rank and all copies; the sum over ranks is the dense loop."""
    layout = Layout(dp=ep, ep=ep, redundant_experts=copies)
    held = [layout.expert_places(experts, rank) for rank in range(ep)]
    random = np.random.default_rng(experts + ep)
    matrices = random.standard_normal((experts, 4, 4))
    expert_of = [place if place < experts else (place - experts) * 7 % experts for place in range(experts + copies)]
    ends = [place for part in held for place in (part[0], part[-1])] + list(range(experts, experts + copies))
    tokens = random.standard_normal((len(ends), 4))
    dense = np.stack([matrices[expert_of[place]] @ token for place, token in zip(ends, tokens, strict=True)])
    summed = np.zeros_like(dense)
    for part in held:  # a rank knows its local list alone: its global numbers are part[0] + local
        local = np.stack([matrices[expert_of[place]] for place in part])
        for row, (place, token) in enumerate(zip(ends, tokens, strict=True)):
            if place in part:
                summed[row] += local[place - part.start] @ token
    assert np.abs(summed - dense).max() < 1e-6


@pytest.mark.parametrize(("layout", "told"), [
    (Layout(dp=16, ep=16), "ep=16 exceeds the 8 experts"),
    (Layout(dp=16, ep=16, redundant_experts=4), "ep=16 exceeds the 8 experts and 4 copies"),
    (Layout(dp=2, ep=2, redundant_experts=9), "9 copies: more than one of each of 8 experts on each of ep=2 ranks"),
])  # fmt: skip
def test_places_that_no_rank_or_no_expert_can_fill_are_refused(layout, told):
    """TP-03: a map that points past the last expert is refused when planning."""
    assert Weights(make_latent_moe_model(**SMALL), "bfloat16").illegal(layout) == told


def test_copies_are_planned_explained_and_spelled():
    """TP-03: the plan holds them, the ledger says so, and each costs its expert."""
    model, target = make_latent_moe_model(**SMALL), make_target()
    options = PlanOptions(engine="vllm", tp=1, dp=4, ep=4, redundant_experts=8)
    plain, copied = (make_plan(model, target, Workload(concurrency=4), replace(options, redundant_experts=n)) for n in (0, 8))
    assert copied.layout.redundant_experts == 8 and copied.layout.spelled() == "DP4xEP4xRE8"
    assert parse_layout("DP4xEP4xRE8").redundant_experts == 8
    expert = 5 * 3 * 32 * 16 * 2
    assert copied.weights_bytes_per_device - plain.weights_bytes_per_device == 2 * expert
    told = explain(model, target, Workload(concurrency=4), PlanOptions(engine="vllm"), "DP4xEP4xRE8")
    assert told.row.legal and told.row.weights_bytes == copied.weights_bytes_per_device
    assert any("8 + 8 places" in line.formula for line in told.ledger.lines)
    alone = explain(model, target, Workload(concurrency=4), PlanOptions(), "DP4xEP4xRE8")
    assert not alone.row.legal and "keeps each expert once" in alone.row.constraint
    with pytest.raises(DayZeroError, match="copies of experts"):
        PlanOptions(redundant_experts=8)
    with pytest.raises(DayZeroError, match="expert parallelism"):
        Layout(redundant_experts=8)


def test_a_search_with_copies_may_have_more_ranks_than_experts():
    """TP-03: 8 experts and 8 copies on 16 expert ranks; a search proposes only layouts that divide experts."""
    plan = make_plan(make_latent_moe_model(**SMALL), make_target(), Workload(concurrency=16),
                     PlanOptions(engine="sglang", devices=16, ep=16, redundant_experts=8))  # fmt: skip
    assert plan.layout.ep == 16 and plan.layout.redundant_experts == 8
    free = make_plan(make_latent_moe_model(**SMALL), make_target(), Workload(concurrency=16),
                     PlanOptions(engine="vllm", devices=8, redundant_experts=8))  # fmt: skip
    assert free.layout.ep > 1 and free.layout.redundant_experts == 8


def test_the_last_rank_of_copies_holds_a_copy_alone():
    """TP-03: 8 experts on 10 ranks with 2 copies: ranks 8 and 9 have no expert of their own and one place each."""
    weights = Weights(make_latent_moe_model(**SMALL), "bfloat16")
    layout = Layout(dp=10, ep=10, redundant_experts=2)
    sizes = [weights.by_role(layout, Coordinates(tp=0, pp=0, dp=r, cp=0, ep=r, expert_tp=0), 0)["expert"].elements
             for r in range(10)]  # fmt: skip
    assert set(sizes) == {5 * 3 * 32 * 16}
