"""The ledger's bytes against slow and obvious counts: weights with scales and padding, caches in pages, reserves, drafts."""

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dayzero.core.errors import DayZeroError
from dayzero.core.model import CacheSpec, Dimensions, LayerKind, ShardRule
from dayzero.core.plan import Layout
from dayzero.core.sharding import owns_layer, rank_boxes
from dayzero.core.storage import Storage, matrices
from dayzero.core.target import Workload
from dayzero.core.units import DTYPE_BITS, GIB, MIB
from dayzero.plan.cache import Cache
from dayzero.plan.engines import engine_names, load_engine, weight_rules
from dayzero.plan.formats import cache_bits, cache_dtype_name, weight_dtype_name
from dayzero.plan.ledger import Evaluator
from dayzero.plan.options import PlanOptions, resolve
from dayzero.plan.slabs import CompressedLayer, compressed_pages
from dayzero.plan.unlisted import with_drafts, with_parameters
from dayzero.plan.weights import COPIES, Weights
from tests.unit.plan_builders import (
    ModelBuilder,
    add_ends,
    make_dense_model,
    make_latent_moe_model,
    make_model,
    make_target,
    with_group,
)

SMALL = {"layers": 6, "dense": 1, "hidden": 32, "heads": 8, "q_rank": 16, "kv_rank": 8, "nope": 4, "rope": 4, "value": 4,
         "inner": 48, "expert_inner": 16, "experts": 8, "chosen": 2, "vocab": 64}  # fmt: skip
BLOCKS = {
    "none": None,
    "tensor": {"scheme": "fp8", "weight_bits": 8.0, "block": (0, 0), "scale_dtype": "float32", "matrix_bytes": 4},
    "channel": {"scheme": "w8a8", "weight_bits": 8.0, "block": (1, 0), "scale_dtype": "bfloat16"},
    "group": {"scheme": "int4-g4", "weight_bits": 4.0, "block": (1, 4), "scale_dtype": "bfloat16", "zero_bits": 4},
    "block": {"scheme": "fp8-block", "weight_bits": 8.0, "block": (4, 4), "scale_dtype": "float32"},
    "odd": {"scheme": "odd", "weight_bits": 4.0, "block": (3, 5), "scale_dtype": "uint8", "column_bytes": 2, "word_columns": 8},
}


def make_evaluator(model, *, target=None, engine="dayzero", workload=None, cache_dtype=None, **options):
    request = resolve(model, workload or Workload(), PlanOptions(**options))
    return Evaluator(model, target or make_target(), replace(request, cache_dtype=cache_dtype), engine=engine)


def stored_bytes(parameter, boxes, storage):
    """Bytes of one rank's part, counted on arrays: codes one by one, scales by the blocks that elements fall into."""
    if storage is None:
        mine = np.zeros(parameter.shape, dtype=bool)
        for box in boxes:
            mine[tuple(slice(*extent) for extent in box)] = True
        return int(mine.sum()) * DTYPE_BITS[parameter.dtype] // 8
    total = 0
    for box in boxes:
        part = np.ones([stop - start for start, stop in box], dtype=bool)
        for matrix in part.reshape(-1, *part.shape[-2:]):  # one for each expert
            first = box[-2][0]
            # Gate and up lie one after the other in rows: a matrix each, wherever the box was cut.
            half = parameter.shape[-2] // 2 if parameter.name.endswith("gate_up_proj") else parameter.shape[-2]
            owner = (np.arange(matrix.shape[0]) + first) // half
            for which in np.unique(owner):
                total += piece_bytes(matrix[owner == which], storage)
    return total


def piece_bytes(matrix, storage):
    rows, columns = matrix.shape
    padded = columns + (-columns) % storage.word_columns
    total = -(-rows * padded * storage.bits // 8) + columns * storage.column_bytes + storage.matrix_bytes
    if storage.block:
        down, across = (step or size for step, size in zip(storage.block, matrix.shape, strict=True))
        blocks = {(row // down, column // across) for row in range(rows) for column in range(columns)}
        total += len(blocks) * DTYPE_BITS[storage.scale_dtype] // 8 + -(-len(blocks) * storage.zero_bits // 8)
    return total


def count_rank(model, layout, rank, mtp=False):
    """Bytes of everything one rank owns."""
    place, stage, total, roots = layout.coordinates(rank), rank // (layout.num_devices // layout.pp), 0, set()
    groups = {group.name: group.storage for group in model.quantization_groups}
    for parameter in model.parameters:
        root = parameter.tied_to or parameter.name
        if (parameter.role == "mtp" and not mtp) or root in roots or not owns_layer(parameter, layout, stage):
            continue
        roots.add(root)
        if boxes := rank_boxes(parameter, layout, place):
            total += stored_bytes(parameter, boxes, groups.get(parameter.group))
    return total


@given(
    st.sampled_from(sorted(BLOCKS)), st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 3]), st.sampled_from([1, 2, 3]),
    st.booleans(), st.integers(3, 9), st.booleans(),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_weights_equal_a_brute_force_sharding(kind, tp, pp, dp, ep, experts, tied):
    """Random layouts of tensors in random storage: every rank's ledger equals what marking its elements one by one gives."""
    model = make_latent_moe_model(**(SMALL | {"experts": experts})) if not tied else make_dense_model(
        layers=3, hidden=16, heads=8, kv_heads=4, head_dim=4, inner=24, vocab=24, tied=True)  # fmt: skip
    if BLOCKS[kind]:
        model = with_group(model, name="group", **BLOCKS[kind])
    evaluator = make_evaluator(model, concurrency=4)
    layout = Layout(tp=tp, pp=pp, dp=dp, ep=tp * dp if ep and not tied and tp * dp <= experts else 1)
    try:
        evaluation = evaluator.evaluate(layout)
    except DayZeroError:
        return  # illegal: heads or units do not divide
    ledgers = evaluator.ledgers(evaluation)
    assert [rank.total("weights") for rank in ledgers] == [
        count_rank(model, evaluation.layout, rank) for rank in range(layout.num_devices)
    ]


def test_experts_on_uneven_ranks_are_held_once():
    """TP-03: 10 experts on 4 ranks are 3 + 3 + 2 + 2, scales with them; the sum is the unsharded tensor."""
    model = with_group(make_latent_moe_model(**(SMALL | {"experts": 10})))
    weights = Weights(model, "as published")
    layout, whole = Layout(tp=4, ep=4), Layout()
    parts = [weights.by_role(layout, layout.coordinates(rank), 0)["expert"] for rank in range(4)]
    assert [part.elements // (5 * 3 * 32 * 16) for part in parts] == [3, 3, 2, 2]
    assert sum(part.num_bytes for part in parts) == weights.by_role(whole, whole.coordinates(0), 0)["expert"].num_bytes


def test_blocks_count_for_each_half_of_a_fused_matrix():
    """TP-01: gate and up of 6 rows each take two scale rows of blocks of 4 apart; 12 rows in one would take three."""
    storage = Storage(scheme="x", bits=8, block=(4, 4), scale_dtype="float32")
    model = make_latent_moe_model(**(SMALL | {"expert_inner": 6, "experts": 1, "chosen": 1}))
    fused = next(p for p in model.parameters if p.name.endswith("gate_up_proj"))
    assert matrices(fused, 32) == [(2, (6, 32))]
    assert sum(count * storage.bytes_of(*matrix) for count, matrix in matrices(fused, 32)) == 12 * 32 + 2 * 2 * 8 * 4


@pytest.mark.parametrize("engine", engine_names())
@given(st.integers(2 * GIB, 40 * GIB), st.integers(0, 20 * GIB), st.sampled_from([1, 2, 4, 8]), st.integers(64, 200_000),
       st.integers(1, 64), st.booleans())  # fmt: skip
@settings(max_examples=25, deadline=None)
def test_memory_never_makes_it_worse(engine, memory, more, tp, context, concurrency, ep):
    model = make_latent_moe_model(**SMALL)
    layout = Layout(tp=tp, ep=tp if ep else 1)
    room = []
    for size in (memory, memory + more):
        evaluator = make_evaluator(model, target=make_target(memory_bytes=size), engine=engine, context=context,
                                   workload=Workload(context_tokens=context, input_tokens=32, output_tokens=32),
                                   concurrency=concurrency)  # fmt: skip
        found = evaluator.evaluate(layout)
        room.append((found.fits, -found.short_bytes, found.admissible_tokens))
    assert room[1] >= room[0] and room[1][2] >= room[0][2]


def test_logits_of_every_row_are_in_the_peak():
    """ME-03: 8192 rows of 163,840 in two dtypes at once are 8,053,063,680 bytes."""
    model = make_latent_moe_model(**(SMALL | {"vocab": 163840}))
    evaluator = make_evaluator(model, workload=Workload(context_tokens=8192, prefill_chunk_tokens=8192, concurrency=1))
    rank = evaluator.ledgers(evaluator.evaluate(Layout()))[0]
    lines = {line.name: line for line in rank.lines}
    assert lines["logits"].num_bytes == 8_053_063_680
    assert {line.category for line in rank.lines} >= {"weights", "cache", "activations", "runtime", "reserve"}
    assert all(line.formula for line in rank.lines)


def test_what_is_outside_the_fraction_is_charged_beyond_the_rest():
    model = make_dense_model()
    fraction = {"memory_fraction": 0.9}
    roomy = make_evaluator(model, engine="sglang", target=make_target(memory_bytes=80 * GIB), **fraction)
    tight = make_evaluator(model, engine="sglang", target=make_target(memory_bytes=20 * GIB), **fraction)
    lines = [evaluator.ledgers(evaluator.evaluate(Layout()))[0] for evaluator in (roomy, tight)]
    beyond = [next(line.num_bytes for line in rank.lines if line.name == "beyond the fraction") for rank in lines]
    apart = sum(load_engine("sglang").accelerator.__getattribute__(name) for name in ("runtime_bytes", "graph_bytes"))
    assert beyond[0] == 0 and apart - 2 * GIB - MIB < beyond[1] < apart - 2 * GIB + GIB


def test_an_engine_pads_the_experts_and_holds_copies():
    """Experts of 96 columns a rank are padded to 256; the latent's expansion is there twice; the vocabulary is padded."""
    model = make_latent_moe_model(**(SMALL | {"hidden": 256, "expert_inner": 96, "vocab": 100}))
    model = with_group(
        model, roles=("expert",), name="mxfp4", scheme="mxfp4", weight_bits=4.0, block=(1, 32), scale_dtype="uint8"
    )
    model = replace(model, quantization={"method": "mxfp4"})
    target = make_target()
    card = replace(target.card, native_dtypes=("mxfp4",))
    evaluator = make_evaluator(model, engine="vllm", target=replace(target, vendor="NVIDIA", card=card))
    roles = evaluator.weights.by_role(Layout(), Layout().coordinates(0), 0)
    assert roles["expert"].num_bytes == 5 * 8 * 3 * 256 * 256 * 17 // 32
    assert roles[COPIES].num_bytes == 6 * 8 * (4 + 4) * 8 * 2
    assert roles["head"].num_bytes == 128 * 256 * 2
    plain = make_evaluator(model, target=target).weights.by_role(Layout(), Layout().coordinates(0), 0)
    assert plain["expert"].num_bytes == 5 * 8 * 3 * 256 * 96 * 17 // 32 and COPIES not in plain


def make_hybrid_model(*, states=69, latents=24, state_bytes=823296):
    """Latent attention in a quarter of the layers, a state a sequence in the others; one tensor a layer."""
    build = ModelBuilder()
    for layer in range(states + latents):
        build.add(f"layers.{layer}.proj.weight", (64, 64), "attention", layer)
    add_ends(build, 128, 64, tied=False)
    latent = (CacheSpec(kind="latent", name="keys", dtype="bfloat16", elements_per_token=512),
              CacheSpec(kind="latent", name="values", dtype="bfloat16", elements_per_token=64))  # fmt: skip
    state = (CacheSpec(kind="state", name="states", dtype="float32", elements_per_sequence=state_bytes // 4),)
    kinds = (LayerKind(name="linear", mixer="linear", feed_forward="dense", layers=tuple(range(states)), cache=state),
             LayerKind(name="latent", mixer="latent", feed_forward="dense", layers=tuple(range(states, states + latents)),
                       cache=latent))  # fmt: skip
    dims = Dimensions(hidden_size=64, num_layers=states + latents, vocab_size=128, num_attention_heads=8, head_dim=8,
                      intermediate_size=64)  # fmt: skip
    return make_model(build, kinds, dims)


def test_pages_of_a_hybrid_are_those_of_its_allocator():
    """A page holds 1440 tokens, the least multiple of 16 that makes it no smaller than a state; 69 state layers are three
    groups of 24: a sequence of 1M tokens takes (729 + 3) blocks of 24 pages."""
    cache = Cache(make_hybrid_model(), "fp8", 16, rules=load_engine("vllm").cache)
    pages = cache.pages(Layout(), 0, 93)
    assert (pages.page_bytes, pages.group_layers) == (1440 * 576, 24)
    assert cache.stage_sequence(Layout(), 0, 93, 1048576) == (729 + 3) * 24 * 1440 * 576
    assert cache.stage_constant(Layout(), 0, 93) == 3 * 24 * 1440 * 576
    assert cache.stage_slope(Layout(), 0, 93) == 24 * 576
    own = Cache(make_hybrid_model(), "fp8", 16)
    assert own.pages(Layout(), 0, 93) is None
    assert own.stage_sequence(Layout(), 0, 93, 1440) == 24 * 1440 * 576 + 69 * 823296


def test_windows_share_pages_with_full_attention():
    """18 + 18 layers: a window of 128 within a chunk of 512 keeps at most 41 blocks of 16, full attention all of them."""
    sliding, full = make_dense_model(layers=18, window=128), make_dense_model(layers=18)
    kinds = (sliding.layer_kinds[0], replace(full.layer_kinds[0], layers=tuple(range(18, 36))))
    model = replace(full, layer_kinds=kinds, dimensions=replace(full.dimensions, num_layers=36))
    cache = Cache(model, None, 16, rules=load_engine("vllm").cache, chunk_tokens=512)
    block = 18 * 16 * 2 * 4 * 8 * 2
    assert cache.stage_sequence(Layout(), 0, 36, 16384) == block * (1024 + 41)
    assert cache.stage_sequence(Layout(), 0, 36, 64) == block * (4 + 4)


def test_an_fp8_latent_of_a_sparse_model_takes_656_bytes():
    """ME-01: 512 codes, 4 float32 scales, 64 rotary numbers in two bytes; 132 B for the indexer; 576 B without an indexer."""
    dense = make_latent_moe_model(**(SMALL | {"kv_rank": 512, "rope": 64}))
    key = CacheSpec(kind="indexer", name="indexer_keys", dtype="bfloat16", elements_per_token=128)
    sparse = replace(dense, layer_kinds=tuple(replace(kind, cache=(*kind.cache, key)) for kind in dense.layer_kinds))
    for model, per_layer in ((dense, 576), (sparse, 656 + 132)):
        for name in ("vllm", "sglang"):
            cache = Cache(model, "fp8", 64, rules=load_engine(name).cache)
            assert cache.stage_slope(Layout(tp=8), 0, 6) == 6 * per_layer
    assert Cache(sparse, None, 64).stage_slope(Layout(), 0, 6) == 6 * 2 * (576 + 128)
    drafted = Cache(sparse, "fp8", 64, rules=load_engine("vllm").cache, draft_layers=1)
    assert drafted.stage_slope(Layout(), 0, 6) == 7 * 788 and drafted.stage_slope(Layout(), 0, 3) == 3 * 788


@pytest.mark.parametrize(("name", "bits"), [("bf16", 16), ("fp8", 8), ("int8", 8), ("int4", Fraction(9, 2)),
                                            ("mxfp4", Fraction(17, 4)), ("nvfp4", Fraction(9, 2))])  # fmt: skip
def test_cache_dtypes_count_their_scales(name, bits):
    assert cache_bits(cache_dtype_name(name)) == bits
    evaluator = make_evaluator(make_dense_model(), cache_dtype=cache_dtype_name(name))
    assert evaluator.cache.slope(Layout(), 0, 4) == 4 * 2 * 4 * 8 * Fraction(bits) / 8
    with pytest.raises(DayZeroError):
        cache_dtype_name("fp3")


def test_two_formats_in_one_name():
    model = make_latent_moe_model()
    weights = Weights(model, weight_dtype_name("w4a8"))
    roles = weights.by_role(Layout(), Layout().coordinates(0), 0)
    assert roles["expert"].formats == ("int4",) and "int8" in roles["attention"].formats
    assert roles["expert"].num_bytes == pytest.approx(roles["expert"].elements * (4 + 16 / 128) / 8)


def test_drafts_that_are_only_counted_are_listed():
    """A copy of the last layer and a joining matrix, in the last stage, in one line of the ledger."""
    model = make_latent_moe_model(**SMALL)
    last = sum(p.num_elements for p in model.parameters if p.layer == 5)
    model = replace(model, mtp_parameters=last + 2 * 32 * 32)
    listed = with_drafts(model)
    assert sum(p.num_elements for p in listed.parameters) - sum(p.num_elements for p in model.parameters) == last + 2 * 32 * 32
    evaluator = make_evaluator(model, mtp=True, pp=2)
    ledgers = evaluator.ledgers(evaluator.evaluate(Layout(pp=2)))
    drafts = [sum(line.num_bytes for line in rank.lines if line.name == "mtp") for rank in ledgers]
    assert drafts == [0, 2 * (last + 2 * 32 * 32)]


def test_counts_by_role_make_the_weights_of_a_bare_description():
    """Roles, and the groups that settings put them in, are enough for the exact total and nearly for a rank's share."""
    real = with_group(make_latent_moe_model(), roles=("expert",))
    targets = ("model.layers.*.mlp.experts.*.down_proj.weight",)
    groups = tuple(replace(group, targets=targets) for group in real.quantization_groups)
    bare = with_parameters(replace(real, parameters=(), quantization_groups=groups))
    for layout in (Layout(), Layout(tp=8, ep=8)):
        both = [sum(c.num_bytes for c in Weights(m, "as published").by_role(layout, layout.coordinates(0), 0).values())
                for m in (real, bare)]  # fmt: skip
        assert both[1] == pytest.approx(both[0], rel=0.02)


def test_an_engine_divides_what_the_rules_leave_whole():
    """A mixer's matrix as wide as the model is divided along that side, narrower ones are whole on every rank."""
    model = make_dense_model()
    build = ModelBuilder()
    build.parameters = list(model.parameters)
    build.add("layers.0.mixer.in_proj.weight", (256, 64), "ssm", 0)
    build.add("layers.0.mixer.out_proj.weight", (64, 256), "ssm", 0)
    build.add("layers.0.mixer.gates.weight", (8, 64), "ssm", 0)
    model = replace(model, parameters=tuple(build.parameters))
    place = Layout(tp=4).coordinates(0)
    own, theirs = (Weights(model, "bfloat16", rules=weight_rules(load_engine(name), model, make_target(), "bfloat16"))
                   .by_role(Layout(tp=4), place, 0)["ssm"].elements for name in ("dayzero", "vllm"))  # fmt: skip
    assert (own, theirs) == (2 * 256 * 64 + 512, 2 * 256 * 64 // 4 + 512)


def test_engines_demand_whole_heads():
    """Where the description leaves attention whole, our engine takes any degree and the others need heads to divide."""
    model = make_dense_model(heads=6, kv_heads=6, inner=96)
    whole = tuple(replace(p, shard=ShardRule()) if p.role == "attention" else p for p in model.parameters)
    model = replace(model, parameters=whole)
    assert make_evaluator(model).weights.illegal(Layout(tp=4)) is None
    assert "6 attention heads" in make_evaluator(model, engine="vllm").weights.illegal(Layout(tp=4))


def test_an_unknown_engine_names_those_there_are():
    with pytest.raises(DayZeroError, match="no engine is named") as caught:
        load_engine("none")
    assert "vllm-ascend" in caught.value.want


@pytest.mark.parametrize("engine", ["dayzero", "vllm"])
@pytest.mark.parametrize("tp", [2, 8])
def test_dealt_out_tokens_divide_what_lies_between_the_products(engine, tp):
    """SP: the stream and the norms' rows are a rank's share of the tokens, rounded up; what is inside a product is not."""
    model = make_latent_moe_model(**(SMALL | {"hidden": 4096}))
    work = Workload(context_tokens=8192, prefill_chunk_tokens=4099, concurrency=1)
    evaluator = make_evaluator(model, engine=engine, workload=work)
    plain, dealt = (evaluator.evaluate(Layout(tp=tp, sp=sp)) for sp in (False, True))
    lines = [{line.name: line for line in evaluator.ledgers(one)[0].lines} for one in (plain, dealt)]
    whole, share = 4 * 4099 * 4096 * 2, 4 * -(-4099 // tp) * 4096 * 2
    assert [held["hidden states"].num_bytes for held in lines] == [whole, share]
    assert f"4099 / tp {tp} = {-(-4099 // tp)} tokens" in lines[1]["hidden states"].formula
    assert plain.short_bytes - dealt.short_bytes == whole - share
    assert dealt.admissible_tokens > plain.admissible_tokens
    others = [{name: line.num_bytes for name, line in held.items() if name not in ("hidden states", "staging beyond activations")}
              for held in lines]  # fmt: skip
    assert others[0] == others[1]


@pytest.mark.parametrize("chunk", [512, 2048, 8192])
@pytest.mark.parametrize("concurrency", [1, 64])
def test_the_heaviest_step_is_what_is_planned(chunk, concurrency):
    """ME-03: a chunk beside every other sequence's token, all of whose rows may be asked for; each part on a line of its own,
    as large as its own count: logits of all rows in two dtypes, routed rows with their inputs and outputs, collectives."""
    model = make_latent_moe_model(**(SMALL | {"vocab": 163840, "experts": 16, "chosen": 8}))
    work = Workload(context_tokens=16384, prefill_chunk_tokens=chunk, concurrency=concurrency)
    evaluator = make_evaluator(model, workload=work)
    rank = evaluator.ledgers(evaluator.evaluate(Layout(tp=2, ep=2)))[0]
    lines = {line.name: line for line in rank.lines}
    tokens = chunk + concurrency - 1
    assert lines["logits"].num_bytes == tokens * 163840 * (2 + 4)
    routed = tokens * 8 * 2 // 2  # twice an even share of the choices falls on one of two ranks
    assert lines["expert dispatch"].num_bytes == routed * (2 * 32 + 3 * 16) * 2
    assert lines["all-reduce buffer"].num_bytes == tokens * 32 * 2
    assert {line.category for line in rank.lines} == {"weights", "cache", "activations", "communication", "runtime", "loader",
                                                      "reserve"}  # fmt: skip
    assert rank.total("activations") == sum(line.num_bytes for line in rank.lines if line.category == "activations")
    assert all(line.formula for line in rank.lines)


def make_compressed_layers(few, many, *, ratio=4):
    """Layers with a window of 128 rows, `few` of them with entries of `ratio` tokens and index keys, `many` of 128 tokens."""
    row, key = Fraction(584 * 8), Fraction(132 * 8)
    return [CompressedLayer(entry_bits=row, index_bits=key, ratio=ratio, waiting_tokens=2 * ratio, window_tokens=128),
            ] * few + [CompressedLayer(entry_bits=row, index_bits=Fraction(0), ratio=128, waiting_tokens=128, window_tokens=128),
            ] * many  # fmt: skip


def test_blocks_of_compressed_caches_hold_a_page_of_every_layer():
    """61 layers: 31 pages of 37,440 B (two groups of windows of 31 and 30 layers; 30 layers with entries of 4 tokens), 30 of index
    keys, 31 of entries of 128 tokens: 1,473,408 B, as an engine's change log states. A sequence holds blocks for a chunk of windows
    and waiting rows, whatever its length."""
    pools = load_engine("vllm").cache.compressed
    pages = compressed_pages(make_compressed_layers(30, 31), pools, 1, 8192)
    assert pages.block_bytes == 31 * 37440 + 30 * 8640 + 31 * 1728 == 1_473_408
    windows, few, many = 2 * (-(-(8192 + 127) // 64) + 1), -(-(8192 + 7) // 4) + 1, -(-(8192 + 127) // 8) + 1
    assert pages.constant_bytes() == (windows + few + many) * 1_473_408
    assert pages.sequence_bytes(1 << 20) == (4096 + windows + few + many) * 1_473_408
    assert pages.slope() == Fraction(1_473_408, 256)
    assert pages.sequence_bytes(256) == (1 + 2 * 4 + 64 + 32) * 1_473_408  # no more than the sequence has
    assert compressed_pages(make_compressed_layers(4, 0, ratio=2), pools, 1, 8192) is None, "not known how it is paged"
