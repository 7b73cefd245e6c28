"""What a release stores, without torch: bytes of each format, which parameters fall under which rule, and draft layers."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dayzero.core.model import Parameter
from dayzero.core.units import DTYPE_BITS
from dayzero.model.estimate import estimate
from dayzero.model.stored import assignment, checkpoint_bytes, estimated_parameters, quantization_groups
from dayzero.model.stored.doubts import quantization_doubts
from dayzero.model.stored.drafts import announced, draft_block
from dayzero.model.stored.quantization import NVFP4, Storage, quantization_settings, read_quantization

CONFIGS = Path(__file__).parents[1] / "data" / "configs"
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic", "fmt": "e4m3"}


def make_parameter(name: str, *shape: int, role: str = "attention", dtype: str = "bfloat16", **more: Any) -> Parameter:
    layer = next((int(part) for part in name.split(".") if part.isdigit()), None)
    return Parameter(name=name, shape=shape, dtype=dtype, role=role, **{"layer": layer, **more})  # type: ignore[arg-type]


def make_layer(number: int, prefix: str = "model.layers") -> list[Parameter]:
    """One layer of a small mixture of experts: width 256, eight experts of width 128 with gate and up fused."""
    at = f"{prefix}.{number}"
    stored = f"{at}.mlp.experts.*"
    return [
        make_parameter(f"{at}.self_attn.q_proj.weight", 256, 256),
        make_parameter(f"{at}.self_attn.kv_a_proj_with_mqa.weight", 576, 256),
        make_parameter(f"{at}.mlp.gate.weight", 8, 256, role="router", dtype="float32"),
        make_parameter(f"{at}.mlp.gate.e_score_correction_bias", 8, role="router_bias", is_buffer=True),
        make_parameter(
            f"{at}.mlp.experts.gate_up_proj", 8, 256, 256, role="expert",
            sources=(f"{stored}.gate_proj.weight", f"{stored}.up_proj.weight"),
        ),
        make_parameter(f"{at}.mlp.experts.down_proj", 8, 256, 128, role="expert", sources=(f"{stored}.down_proj.weight",)),
        make_parameter(f"{at}.mlp.shared_experts.down_proj.weight", 256, 128, role="shared_expert"),
        make_parameter(f"{at}.input_layernorm.weight", 256, role="norm"),
    ]  # fmt: skip


def make_model(num_layers: int = 2, prefix: str = "model.layers") -> list[Parameter]:
    return [
        make_parameter("model.embed_tokens.weight", 1000, 256, role="embedding"),
        *(item for number in range(num_layers) for item in make_layer(number, prefix)),
        make_parameter("lm_head.weight", 1000, 256, role="head"),
    ]


def make_config(settings: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"hidden_size": 256, "dtype": "bfloat16", "quantization_config": settings, **more}


def quantized(config: dict[str, Any], parameters: list[Parameter], **more: Any) -> set[str]:
    """Names, without the layer's prefix, of what does not stay in the model's dtype."""
    return {name for name, group in assignment(config, parameters, **more).items() if group != "none"}


# Bytes.


def test_a_partial_last_block_has_a_scale_of_its_own() -> None:
    fp8 = read_quantization(make_config(FP8)).rules[0].storage
    assert fp8.bytes_of(576, 7168) == 576 * 7168 + 5 * 56 * 4
    assert fp8.bytes_of(128, 129) == 128 * 129 + 2 * 4
    assert NVFP4.bytes_of(64, 100) == 64 * 50 + 64 * 7 + 8


@given(
    rows=st.integers(1, 300), columns=st.integers(1, 300), step=st.tuples(st.integers(0, 130), st.integers(0, 130)),
    bits=st.sampled_from([2, 4, 8]), scale=st.sampled_from(["float32", "bfloat16", "uint8"]),
)  # fmt: skip
def test_scales_are_as_many_as_blocks_that_hold_an_element(rows, columns, step, bits, scale) -> None:
    storage = Storage(scheme="x", bits=bits, block=step, scale_dtype=scale)
    blocks = {(row // (step[0] or rows), column // (step[1] or columns)) for row in range(rows) for column in range(columns)}
    assert storage.bytes_of(rows, columns) == -(-rows * columns * bits // 8) + len(blocks) * DTYPE_BITS[scale] // 8


def test_packed_words_are_padded_and_their_shape_is_stored() -> None:
    settings = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": {
        "targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}}}}  # fmt: skip
    (rule,) = read_quantization(make_config(settings)).rules
    assert rule.storage.scheme == "int4-g32"
    # Ten columns fill two words of eight codes; one group; two 64-bit integers for the shape.
    assert rule.storage.bytes_of(3, 10) == 3 * 2 * 4 + 3 * 1 * 2 + 16


# Which parameters.


def test_blocks_of_fp8_leave_router_norms_embedding_and_head() -> None:
    parameters = make_model()
    groups = {group.name: group for group in quantization_groups(make_config(FP8), parameters)}
    assert list(groups) == ["fp8", "none"] and groups["fp8"].scheme == "fp8-block" and groups["fp8"].block == (128, 128)
    kept = {
        name.rpartition("layers.")[2] for name, group in assignment(make_config(FP8), parameters).items() if group == "none"
    }
    assert kept == {"model.embed_tokens.weight", "lm_head.weight"} | {
        f"{number}.{name}"
        for number in (0, 1)
        for name in ("mlp.gate.weight", "mlp.gate.e_score_correction_bias", "input_layernorm.weight")
    }
    # Every expert is a matrix of its own, gate and up apart: 8 x (2 x [128, 256] + [256, 128]), with 2 blocks each.
    layer = (256 * 256 + 4 * 4) + (576 * 256 + 5 * 2 * 4) + 8 * 3 * (128 * 256 + 2 * 4) + (256 * 128 + 2 * 4)
    assert groups["fp8"].num_bytes == 2 * layer
    # The router is computed in float32 and stored in bfloat16; its correction is the other way round.
    assert groups["none"].num_bytes == 2 * 1000 * 256 * 2 + 2 * (8 * 256 * 2 + 8 * 4 + 256 * 2)
    assert sum(group.parameters for group in groups.values()) == sum(p.num_elements for p in parameters if not p.is_buffer)


@pytest.mark.parametrize("key", ["modules_to_not_convert", "ignored_layers"])
def test_modules_that_settings_except_stay(key: str) -> None:
    listed = ["gate", "model.layers.1.self_attn", "lm_head", "model.layers.0.mlp.shared_experts.down_proj"]
    found = quantized(make_config({**FP8, key: listed}), make_model())
    assert "model.layers.0.self_attn.q_proj.weight" in found and "model.layers.1.self_attn.q_proj.weight" not in found
    assert "model.layers.1.mlp.shared_experts.down_proj.weight" in found
    assert "model.layers.0.mlp.shared_experts.down_proj.weight" not in found
    assert "model.layers.0.mlp.experts.gate_up_proj" in found  # `gate` is a component, not a piece of one


def test_experts_in_fp4_beside_fp8() -> None:
    config = make_config({**FP8, "scale_fmt": "ue8m0"}, expert_dtype="fp4")
    groups = {group.name: group for group in quantization_groups(config, make_model(1))}
    assert groups["experts"].scheme == "mxfp4" and groups["experts"].scale_dtype == "float8_e8m0fnu"
    assert groups["experts"].num_bytes == 8 * 3 * 128 * 256 * 17 // 32
    assert groups["fp8"].scale_dtype == "float8_e8m0fnu" and groups["fp8"].parameters == 256 * 256 + 576 * 256 + 256 * 128


def test_only_experts_are_packed_where_the_method_says_so() -> None:
    """Experts stacked as [experts, input, output], as the class has them, and a bias for each."""
    parameters = [
        make_parameter("model.layers.0.mlp.experts.gate_up_proj", 4, 80, 96, role="expert"),
        make_parameter("model.layers.0.mlp.experts.gate_up_proj_bias", 4, 96, role="expert"),
        make_parameter("model.layers.0.self_attn.q_proj.weight", 80, 80),
    ]
    config = {"hidden_size": 80, "dtype": "bfloat16", "quantization_config": {"quant_method": "mxfp4"}}
    groups = {group.name: group for group in quantization_groups(config, parameters)}
    # Each of the 96 outputs has 80 inputs, in three groups of 32 of which the last is partial.
    assert groups["mxfp4"].num_bytes == 4 * 96 * (80 // 2 + 3) and groups["none"].num_bytes == 2 * (4 * 96 + 80 * 80)


INT4 = {
    "quant_method": "compressed-tensors", "format": "pack-quantized",
    "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*"],
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": {
        "num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True, "dynamic": False}}},
}  # fmt: skip


def test_patterns_are_matched_with_the_names_of_the_checkpoint() -> None:
    found = quantized(make_config(INT4), make_model())
    assert found == {f"model.layers.{n}.mlp.experts.{name}" for n in (0, 1) for name in ("gate_up_proj", "down_proj")}


def test_settings_of_a_text_config_say_nothing_of_towers() -> None:
    tower = make_parameter("model.vision_tower.layers.0.fc1.weight", 256, 256, role="tower", layer=None)
    nested = {"text_config": {"hidden_size": 256, "quantization_config": INT4}}
    assert tower.name not in quantized(nested, [*make_model(1), tower])
    assert tower.name in quantized(make_config(INT4), [*make_model(1), tower])


@pytest.mark.parametrize(
    ("weights", "form", "scheme", "block"),
    [
        ({"num_bits": 4, "type": "int", "group_size": 128}, "pack-quantized", "int4-g128", (1, 128)),
        ({"num_bits": 8, "type": "int", "strategy": "channel"}, "int-quantized", "w8a8", (1, 0)),
        ({"num_bits": 8, "type": "float", "strategy": "channel"}, "float-quantized", "fp8-channel", (1, 0)),
        ({"num_bits": 8, "type": "float", "strategy": "tensor"}, "float-quantized", "fp8", (0, 0)),
        ({"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]}, "float-quantized", "fp8-block",
         (128, 128)),
        ({"num_bits": 4, "type": "float", "group_size": 32, "strategy": "group"}, "mxfp4-pack-quantized", "mxfp4", (1, 32)),
        ({"num_bits": 4, "type": "float", "group_size": 16, "strategy": "tensor_group"}, "nvfp4-pack-quantized", "nvfp4",
         (1, 16)),
    ],
)  # fmt: skip
def test_groups_of_compressed_tensors(weights: dict[str, Any], form: str, scheme: str, block: tuple[int, int]) -> None:
    active = {"num_bits": 8, "type": "int", "dynamic": True, "strategy": "token"}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": active}
    settings = {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}}
    found = quantization_groups(make_config(settings), make_model(1))[0]
    assert (found.scheme, found.block, found.activations) == (scheme, block, "int8 dynamic token")
    assert found.num_bytes is not None and 0 < found.num_bytes < 2 * found.parameters


def test_modelopt_excludes_by_globs_whatever_the_wrappers_are_called() -> None:
    settings = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": [
        "lm_head", "language_model.model.layers.0*", "language_model.model.layers.1.self_attn*", "mtp*"]}  # fmt: skip
    parameters = make_model(2, "model.language_model.layers")
    found = quantized(make_config(settings), parameters)
    assert found and all(name.startswith("model.language_model.layers.1.mlp") for name in found)
    beside = {"quantization": {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": settings["ignore"]}}
    assert quantized({"hidden_size": 256}, parameters, beside=beside) == found


def test_mixed_precision_lists_its_modules() -> None:
    listed = {
        "model.layers.0.self_attn.q_proj": {"quant_algo": "FP8"},
        "model.layers.0.mlp.experts.0.gate_proj": {"quant_algo": "W4A16_NVFP4", "group_size": 16},
        "lm_head": {"quant_algo": "MXFP8"},
    }
    config = make_config({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": listed})
    groups = {group.name: group.scheme for group in quantization_groups(config, make_model())}
    assert groups == {"fp8": "fp8", "w4a16_nvfp4": "nvfp4", "mxfp8": "mxfp8", "none": "none"}
    found = quantized(config, make_model())
    assert found == {"model.layers.0.self_attn.q_proj.weight", "model.layers.0.mlp.experts.gate_up_proj", "lm_head.weight"}


def test_what_a_list_leaves_out_keeps_the_storage_of_the_method() -> None:
    listed = {"layers.0.mlp.experts": {"quant_algo": "NVFP4", "group_size": 16}}
    settings = {**FP8, "quant_algo": "MIXED_PRECISION", "quantized_layers": listed, "ignore": ["*.self_attn.*", "lm_head"]}
    found = assignment(make_config(settings, expert_dtype="fp4"), make_model())
    assert {name.removeprefix("model.layers."): group for name, group in found.items() if "down_proj" in name or "q_proj" in name} == {
        "0.self_attn.q_proj.weight": "fp8", "1.self_attn.q_proj.weight": "fp8",
        "0.mlp.experts.down_proj": "nvfp4", "1.mlp.experts.down_proj": "experts",
        "0.mlp.shared_experts.down_proj.weight": "fp8", "1.mlp.shared_experts.down_proj.weight": "fp8",
    }  # fmt: skip


def test_gptq_with_exceptions_and_awq() -> None:
    gptq = {"quant_method": "gptq", "bits": 4, "group_size": 128, "dynamic": {"-:.*self_attn.*": {}}}
    groups = {group.name: group for group in quantization_groups(make_config(gptq), make_model(1))}
    assert groups["gptq"].scheme == "int4-g128" and "model.layers.0.self_attn.q_proj.weight" not in groups["gptq"].targets
    awq = read_quantization(make_config({"quant_method": "awq", "bits": 4, "group_size": 128})).rules[0].storage
    # Codes, a float16 scale and a 4-bit zero point for each group of 128 inputs.
    assert awq.bytes_of(256, 256) == 256 * 128 + 256 * 2 * 2 + 256 * 2 // 2


def test_an_unknown_method_is_said_and_not_priced() -> None:
    groups = quantization_groups(make_config({"quant_method": "ternary9"}), make_model(1))
    assert groups[0].scheme.startswith("unknown: ") and "ternary9" in groups[0].scheme and groups[0].num_bytes is None
    assert groups[-1].name == "none" and checkpoint_bytes(groups) is None


def test_no_settings_mean_one_group() -> None:
    (group,) = quantization_groups({"hidden_size": 256}, make_model(1))
    assert group.scheme == "none" and checkpoint_bytes([group]) == group.num_bytes
    assert quantization_settings({"hidden_size": 256}) is None


def test_slots_without_weights_and_tied_heads_are_not_stored() -> None:
    parameters = [
        make_parameter("model.embed_tokens.weight", 10, 4, role="embedding"),
        make_parameter("lm_head.weight", 10, 4, role="head", tied_to="model.embed_tokens.weight"),
        make_parameter("model.layers.0.mlp.experts.gate_up_proj", 6, 4, 4, role="expert"),
        make_parameter("model.layers.0.mlp.experts.down_proj", 4, 4, 2, role="expert"),
    ]
    (group,) = quantization_groups({}, parameters)
    assert group.parameters == 40 + 4 * 16 + 4 * 8 and group.num_bytes == 2 * group.parameters


def test_an_estimate_is_priced_by_role() -> None:
    """A release of 1.56 TB (published) whose class nobody has; experts in MXFP4, the rest in bfloat16."""
    config = json.loads((CONFIGS / "Kimi-K3" / "config.json").read_text())
    found = estimate(config, "bfloat16")
    groups = quantization_groups(config, estimated_parameters(found.by_role, "bfloat16"))
    assert [group.scheme for group in groups] == ["mxfp4", "none"]
    assert checkpoint_bytes(groups) == pytest.approx(1561e9, rel=0.01)


# Draft layers.


def test_ck_14_an_extra_layer_is_sized_from_the_last_one() -> None:
    parameters = make_model()
    for prefix in ("model.layers", "model.language_model.layers", "language_model.model.layers"):
        block = draft_block({"num_nextn_predict_layers": 1}, make_model(2, prefix), num_layers=2)
        layer = sum(item.num_elements for item in make_layer(1) if not item.is_buffer)
        assert block.unique_parameters == layer + 256 * 512 + 3 * 256
        assert block.stored_parameters == block.unique_parameters + 2 * 1000 * 256 and len(block.copies) == 2
        assert f"{prefix}.2.eh_proj.weight" in {item.name for item in block.parameters}
        assert f"{prefix}.2.mlp.experts.*.gate_proj.weight" in {name for item in block.parameters for name in item.sources}
        assert block.notes and "num_nextn_predict_layers" in block.notes[0] and all(p.layer == 2 for p in block.parameters)
    # What joins it to the model stays in the model's dtype, the layer is stored as its like.
    found = quantized(
        make_config(FP8), [*parameters, *draft_block({"num_nextn_predict_layers": 1}, parameters, num_layers=2).parameters]
    )
    drafts = {name.removeprefix("model.layers.2.") for name in found if ".2." in name}
    assert drafts == {"self_attn.q_proj.weight", "self_attn.kv_a_proj_with_mqa.weight", "mlp.experts.gate_up_proj",
                      "mlp.experts.down_proj", "mlp.shared_experts.down_proj.weight"}  # fmt: skip


def test_a_namespace_of_its_own_repeats_an_attending_layer() -> None:
    linear = [make_parameter("model.layers.2.linear_attn.in_proj.weight", 256, 256, role="ssm"),
              make_parameter("model.layers.2.input_layernorm.weight", 256, role="norm")]  # fmt: skip
    block = draft_block({"text_config": {"mtp_num_hidden_layers": 1}}, [*make_model(2), *linear], num_layers=3)
    names = {item.name for item in block.parameters}
    assert {"mtp.fc.weight", "mtp.norm.weight", "mtp.layers.0.self_attn.q_proj.weight"} <= names and not block.copies
    assert "mtp.layers.0.linear_attn.in_proj.weight" not in names
    own = draft_block({"mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": True}, make_model(2), num_layers=2)
    assert own.copies == ("mtp.embed_tokens.weight",)


def test_keys_that_name_layers_decide_what_a_draft_layer_is() -> None:
    parameters = [
        make_parameter("model.embed_tokens.weight", 100, 8, role="embedding"),
        make_parameter("model.layers.0.mixer.q_proj.weight", 8, 8),
        make_parameter("model.layers.0.norm.weight", 8, role="norm"),
        make_parameter("model.layers.1.mixer.experts.up_proj", 4, 8, 8, role="expert"),
        make_parameter("model.layers.1.norm.weight", 8, role="norm"),
        make_parameter("model.layers.2.mixer.in_proj.weight", 8, 8, role="ssm"),
        make_parameter("model.layers.2.norm.weight", 8, role="norm"),
    ]
    for value in (["attention", "moe"], "*E"):
        key = "mtp_layers_block_type" if isinstance(value, list) else "mtp_hybrid_override_pattern"
        block = draft_block({"num_nextn_predict_layers": 1, key: value}, parameters, num_layers=3)
        assert block.unique_parameters == (64 + 8) + (4 * 64 + 8) + 8 * 16 + 3 * 8
    # A list that covers the draft layer says what it is like.
    block = draft_block({"num_nextn_predict_layers": 1, "kinds": ["a", "b", "c", "a"]}, parameters, num_layers=3)
    assert any(name.endswith("3.mixer.q_proj.weight") for name in (item.name for item in block.parameters))


def test_only_what_is_announced_is_counted() -> None:
    assert announced({"num_nextn_predict_layers": 0}) == ("num_nextn_predict_layers", 0)
    silent = draft_block({}, make_model(), num_layers=2)
    assert silent.parameters == () and silent.evidence == "none" and silent.notes == ()
    known = draft_block({}, make_model(), num_layers=2, ignorable=[r"model\.layers\.2.*"])
    assert known.evidence == "class" and known.unique_parameters > 0 and not known.copies
    assert draft_block({}, make_model(), num_layers=2, ignorable=[r"model\.layers\.20.*"]).parameters == ()
    stated = draft_block({"num_nextn_predict_layers": 0}, make_model(), num_layers=2, ignorable=[r"model\.layers\.2.*"])
    assert stated.parameters == ()
    word = draft_block({}, make_model(), num_layers=2, ignorable=[r"^mtp.*"])
    assert word.parameters == () and "would add" in word.notes[0]


# What is doubtful.

NVFP4_BESIDE = {"quantization": {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["lm_head"]}}


def doubts(config: dict[str, Any], beside: dict[str, Any] | None = None) -> list[str]:
    found = quantization_doubts(config, beside)
    assert all(problem.severity == "warning" and problem.file for problem in found)
    return [f"{problem.kind}: {problem.detail}" for problem in found]


def test_settings_that_contradict_are_told_and_the_first_is_used() -> None:
    config = make_config(FP8)
    (told,) = doubts(config, NVFP4_BESIDE)
    assert told.startswith("quantization_differs") and "fp8-block 128x128" in told and "nvfp4" in told
    assert "quantization_config is used" in told and read_quantization(config, NVFP4_BESIDE).rules[0].name == "fp8"
    nested = {"text_config": {"quantization_config": {**FP8, "weight_block_size": [64, 64]}}}
    (told,) = doubts({**config, **nested})
    assert "text_config.quantization_config says fp8-block 64x64" in told
    same = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}
    assert doubts(make_config(same), NVFP4_BESIDE) == []
    (told,) = doubts(make_config({**same, "ignore": ["lm_head", "*.self_attn.*"]}), NVFP4_BESIDE)
    assert "except other modules (*.self_attn.*)" in told


@pytest.mark.parametrize("value", ["fp8", ["fp8"], 8, True])
@pytest.mark.parametrize("key", ["quantization_config", "compression_config"])
def test_settings_in_another_form_than_an_object_are_told(key: str, value: Any) -> None:
    (told,) = doubts({"hidden_size": 8, "text_config": {key: value}})
    assert f"text_config.{key} is {value!r}" in told and "nothing of it is read" in told
    assert doubts({key: None}) == doubts({key: {}}) == []
    assert len(doubts({}, {"quantization": value})) == 1 and len(doubts({}, {"quant_algo": "NVFP4"})) == 1


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"quant_method": "zorp"}, "zorp"),
        ({**FP8, "weight_block_size": [0, 128]}, "[0, 128]"),
        ({**FP8, "weight_block_size": [128]}, "[128]"),
        ({**FP8, "weight_block_size": [True, 128]}, "[True, 128]"),
        ({**FP8, "weight_block_size": "128"}, "'128'"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 0}, "group size 0"),
        ({"quant_method": "modelopt", "quant_algo": "W4A16_AWQ", "group_size": -128}, "group size -128"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 0}, "group size 0"),
        ({"quant_method": "awq", "bits": 4, "group_size": True}, "group size True"),
        ({"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": {"num_bits": 8, "type": "int",
          "group_size": 0}}}}, "'group_size': 0"),
        ({"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": {"num_bits": 8, "type": "float",
          "strategy": "block", "block_structure": "0x128"}}}}, "0x128"),
        ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": {
          "model.layers.0.self_attn.q_proj": {"quant_algo": "NVFP4", "group_size": 0}}}, "group size 0"),
    ],
)  # fmt: skip
def test_formats_that_are_none_are_told_and_never_priced_as_another(settings: dict[str, Any], word: str) -> None:
    config = make_config(settings)
    assert any(word in text and "bytes cannot be told" in text for text in doubts(config)), doubts(config)
    assert checkpoint_bytes(quantization_groups(config, make_model(1))) is None


def test_what_is_assumed_is_told() -> None:
    assert any("one scale per matrix is assumed" in text for text in doubts(make_config({"quant_method": "fp8"})))
    assert doubts(make_config({"quant_method": "fp8", "weight_block_size": None})) == []
    assert any("nothing is said" in text for text in doubts(make_config({"quant_method": "compressed-tensors"})))
    whole_rows = {"num_bits": 8, "type": "int", "group_size": -1}
    config = make_config({"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": whole_rows}}})
    assert read_quantization(config).rules[0].storage.block == (1, 0) and doubts(config) == []
