"""What changed between two descriptions: numbers of layers and experts put aside, nothing said where nothing differs."""

from dataclasses import replace

import pytest

from dayzero.core.difference import difference
from dayzero.core.model import OperatorGraph, OperatorNode
from dayzero.core.operator_totals import operator_totals
from dayzero.core.sized_operators import engine_step
from dayzero.core.structure import QuantizationGroup, Routing, Structure
from dayzero.summaries import corrections, inspect_summary
from tests.unit.plan_builders import make_latent_moe_model

SMALL = {"layers": 5, "experts": 8}


def changes(old, new) -> dict[tuple[str, str], tuple[str | None, str | None]]:
    return {(change.section, change.item): (change.old, change.new) for change in difference(old, new).changes}


def test_a_model_differs_from_itself_in_nothing():
    model = make_latent_moe_model(**SMALL)
    assert difference(model, model).changes == ()


def test_each_section_tells_its_own_change():
    old = make_latent_moe_model(**SMALL)
    kind = old.layer_kinds[-1]
    node = OperatorNode(name="mlp", kind="linear_attention", count=2, flops="4*B*T", bytes="B")
    group = QuantizationGroup(name="group_0", scheme="mxfp4", weight_bits=4, block=(1, 32), scale_dtype="float8_e8m0fnu")
    new = replace(
        old,
        layer_kinds=(*old.layer_kinds[:-1], replace(kind, cache=kind.cache[:1], operators=OperatorGraph(decode=(node,)))),
        structure=Structure(routing=(Routing(scoring="sigmoid", experts_per_token=2),)),
        quantization_groups=(group,),
        unconsumed_keys=("attn_twist",),
    )
    found = changes(old, new)
    assert found["structure", "routing scoring"] == (None, "sigmoid")
    assert found["operators", "decode linear_attention"] == (None, str(2 * len(kind.layers)))
    assert found["quantization", "group group_0"] == (None, "mxfp4, 4 bits, block 1x32, scales float8_e8m0fnu")
    assert found["keys", "attn_twist"] == (None, "consumed by nobody")
    gone = [item for section, item in found if section == "cache" and found[section, item][1] is None]
    assert gone == [f"{kind.name} {kind.cache[1].name}"]


def test_layers_and_experts_are_one_line():
    old, new = make_latent_moe_model(**SMALL), make_latent_moe_model(**SMALL | {"layers": 7})
    named = [item for section, item in changes(old, new) if section == "parameters" and "." in item]
    assert named == []
    assert changes(old, new)["sizes", "num_layers"] == ("5", "7")


def test_operators_of_all_layers_are_added_up():
    model = make_latent_moe_model(**SMALL)
    first, rest = model.layer_kinds[0], model.layer_kinds[1:]
    nodes = (OperatorNode(name="a", kind="linear", count=2, flops="6*B*T", bytes="B*T + 10"),
             OperatorNode(name="b", kind="attention", count=1, flops="B*T*min(C, 8)", bytes="B*C"))  # fmt: skip
    model = replace(
        model,
        layer_kinds=(replace(first, operators=OperatorGraph(prefill=nodes)), *rest),
        outer_operators=OperatorGraph(prefill=(OperatorNode(name="head", kind="linear", count=1, flops="B*T", bytes="5"),)),
    )
    layers = len(first.layers)
    linear, attention = (next(one for one in operator_totals(model) if one.kind == kind) for kind in ("linear", "attention"))
    assert linear.prefill.count == 2 * layers + 1 and linear.decode.count == 0
    assert linear.prefill.at(sequences=2, new_tokens=3, context_tokens=3) == (36 * layers + 6, 16 * layers + 5)
    assert attention.prefill.at(sequences=1, new_tokens=100, context_tokens=100)[0] == 800 * layers
    listed = {one["kind"]: one for one in inspect_summary(model)["operators"]}
    assert listed["linear"]["count"] == 2 * layers + 1 and listed["linear"]["first_site"].startswith(first.name)


def test_a_first_answer_is_confirmed_or_corrected_line_by_line():
    first = make_latent_moe_model(**SMALL)
    told = {one["figure"]: one for one in corrections(first, replace(first, active_parameters=first.active_parameters + 1))}
    assert not told["active_parameters"]["same"] and told["total_parameters"]["same"] and told["layer_kinds"]["same"]


def test_what_an_engine_does_is_each_active_matrix_once_and_the_cache():
    """Latents are not expanded, idle experts not read; weights count as the release stores them."""
    model = make_latent_moe_model(**SMALL)
    dims = model.dimensions
    near = engine_step(model, new_tokens=1, context_tokens=1)
    far = engine_step(model, new_tokens=1, context_tokens=1025)
    assert near is not None and far is not None
    attention = 2 * dims.num_attention_heads * (2 * 512 + 64) * dims.num_layers
    assert far.flops - near.flops == 1024 * attention
    matrices = sum(model.parameters_by_role[role] for role in ("attention", "mlp", "shared_expert", "router", "head") if role in model.parameters_by_role)
    used = model.parameters_by_role["expert"] * dims.num_experts_per_token / dims.num_experts
    assert near.flops == pytest.approx(2 * (matrices + used) + attention, rel=1e-3)
    assert far.other_bytes == model.cache_bytes(1025)
    half = replace(
        model,
        parameters=tuple(replace(one, group="g" if one.role == "expert" else "none") for one in model.parameters),
        quantization_groups=(QuantizationGroup(name="g", scheme="fp8", weight_bits=8, parameters=100, num_bytes=100),),
    )
    saved = near.weight_bytes - engine_step(half, new_tokens=1, context_tokens=1).weight_bytes
    assert saved == pytest.approx(used, rel=1e-3)  # one byte less for each parameter of an expert that is read
