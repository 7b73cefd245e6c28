"""Keys whose spelling varies, read into one form each."""

from typing import Any

import pytest

from dayzero.core.errors import DayZeroError
from dayzero.model.config_keys import (
    attention_shape,
    config_dtype,
    known_rope_types,
    normalise_rope,
    quantization_summary,
    stop_tokens,
)
from dayzero.model.estimate import estimate
from dayzero.model.keys.sound import CONTROL, config_doubts
from dayzero.model.known_keys import known_elsewhere

YARN = {"rope_type": "yarn", "factor": 4.0}

# CF-01: what is written -> the normal form, or words of the error.
ROPE_ROWS: list[tuple[Any, Any]] = [
    ({"type": "yarn", "factor": 4.0}, {"all": YARN}),
    ({"rope_type": "yarn", "factor": 4.0}, {"all": YARN}),
    ({"type": "yarn", "rope_type": "yarn", "factor": 4.0}, {"all": YARN}),
    ({"type": "yarn", "rope_type": "linear", "factor": 4.0}, "type='yarn', rope_type='linear'"),
    ({"factor": 4}, "rope_type beside them"),
    (None, {}),
    ({}, {}),
    ({"type": "su", "long_factor": [1.0, 2.5]}, {"all": {"rope_type": "longrope", "long_factor": "1.0,2.5"}}),
    ({"type": "su", "rope_type": "longrope"}, {"all": {"rope_type": "longrope"}}),
    ({"type": "mrope", "mrope_section": [16, 24]}, {"all": {"rope_type": "default", "mrope_section": "16,24"}}),
    ({"type": "default"}, {"all": {"rope_type": "default"}}),
    ({"rope_type": "foo"}, "'foo'"),
    ({"rope_type": 3}, "3"),
    ("yarn", "'yarn'"),
]


@pytest.mark.parametrize("written, wanted", ROPE_ROWS, ids=[str(row[0])[:40] for row in ROPE_ROWS])
@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_cf_01_position_scaling_has_one_form_or_an_error(key: str, written: Any, wanted: Any) -> None:
    if isinstance(wanted, dict):
        assert normalise_rope({key: written}) == wanted
        return
    with pytest.raises(DayZeroError) as raised:
        normalise_rope({key: written})
    assert wanted in str(raised.value), str(raised.value)


def test_cf_01_both_places_must_agree() -> None:
    assert normalise_rope({"rope_scaling": {"type": "yarn", "factor": 4.0}, "rope_parameters": YARN}) == {"all": YARN}
    with pytest.raises(DayZeroError, match="contradict"):
        normalise_rope({"rope_scaling": {"type": "yarn", "factor": 8.0}, "rope_parameters": YARN})


def test_cf_02_theta_is_found_in_every_place() -> None:
    assert normalise_rope({"rope_theta": 5e5}) == {"all": {"rope_type": "default", "rope_theta": 5e5}}
    assert normalise_rope({"rope_parameters": {"rope_theta": 5e5}})["all"]["rope_theta"] == 5e5
    assert normalise_rope({"rope_theta": 5e5, "rope_parameters": {"rope_theta": 500000}})["all"]["rope_theta"] == 500000
    with pytest.raises(DayZeroError, match="rope_theta"):
        normalise_rope({"rope_theta": 1e4, "rope_parameters": {"rope_theta": 5e5}})
    nested = {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}
    assert {name: form["rope_theta"] for name, form in normalise_rope({"rope_parameters": nested}).items()} == {
        "full_attention": 1e6,
        "sliding_attention": 1e4,
    }


def test_known_types_are_those_of_transformers() -> None:
    assert {"default", "linear", "dynamic", "yarn", "longrope"} <= known_rope_types()


# CF-04: heads.
HEADS: list[tuple[dict[str, Any], Any]] = [
    ({"hidden_size": 2880, "num_attention_heads": 64, "head_dim": 64, "num_key_value_heads": 8}, (64, 8, 64)),
    ({"hidden_size": 4096, "num_attention_heads": 32, "head_dim": None}, (32, 32, 128)),
    ({"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": None}, (32, 32, 128)),
    ({"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8}, (32, 8, 128)),
    ({"hidden_size": 2880, "num_attention_heads": 64 + 7}, "head_dim"),
    ({"hidden_size": 2880, "num_attention_heads": 0}, "num_attention_heads"),
    ({"hidden_size": 2880, "num_attention_heads": -4}, "num_attention_heads"),
    ({"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 0}, "num_key_value_heads"),
    ({"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 5}, "num_key_value_heads"),
    ({"hidden_size": 4096, "num_attention_heads": 32, "head_dim": 0}, "head_dim"),
    ({"hidden_size": 4096, "num_attention_heads": 32, "head_dim": 64.0}, "head_dim"),
    ({"hidden_size": 4096, "num_attention_heads": True}, "num_attention_heads"),
    ({"hidden_size": 4096}, "num_attention_heads"),
]


@pytest.mark.parametrize("config, wanted", HEADS, ids=[str(row[0]) for row in HEADS])
def test_cf_04_heads_are_explicit_exact_or_an_error_naming_the_key(config: dict[str, Any], wanted: Any) -> None:
    if isinstance(wanted, tuple):
        shape = attention_shape(config)
        assert (shape.num_heads, shape.num_kv_heads, shape.head_dim) == wanted
        return
    with pytest.raises(DayZeroError) as raised:
        attention_shape(config)
    assert f"config.json: {wanted} " in raised.value.what and raised.value.fix


def test_cf_04_a_default_of_the_class_is_used_only_when_the_file_says_nothing() -> None:
    config = {"hidden_size": 1000, "num_attention_heads": 3}
    assert attention_shape(config, default_head_dim=128).head_dim == 128
    assert attention_shape(config | {"head_dim": 64}, default_head_dim=128).head_dim == 64


# CF-08: stop set.
def stops(config: Any = None, generation: Any = None, tokenizer_config: Any = None, tokenizer: Any = None) -> Any:
    return stop_tokens(
        config or {}, vocab_size=16, generation_config=generation, tokenizer_config=tokenizer_config, tokenizer=tokenizer
    )


def test_cf_08_the_stop_set_is_the_union_of_all_sources() -> None:
    decoder = {"eos_token": "<end>", "added_tokens_decoder": {"9": {"content": "<end>"}}}
    assert stops({"eos_token_id": 2}, {"eos_token_id": [2, 7]}, decoder) == ((2, 7, 9), ())
    assert stops({"text_config": {"eos_token_id": [3]}, "eos_token_id": 2}) == ((2, 3), ())
    assert stops({}, {"eos_token_id": 7}) == ((7,), ())


@pytest.mark.parametrize("nothing", [None, [], ()])
def test_cf_08_null_and_empty_take_nothing_away(nothing: Any) -> None:
    assert stops({"eos_token_id": nothing}, {"eos_token_id": 7}) == ((7,), ())
    assert stops({"eos_token_id": 2}, {"eos_token_id": nothing}) == ((2,), ())


@pytest.mark.parametrize("bad", [16, -1, "7", 2.0, True])
def test_cf_08_ids_outside_the_vocabulary_are_left_out_with_a_warning(bad: Any) -> None:
    found, problems = stops({"eos_token_id": 2}, {"eos_token_id": [bad, 7]})
    assert found == (2, 7) and len(problems) == 1
    assert (
        problems[0].severity == "warning" and problems[0].file == "generation_config.json" and repr(bad) in problems[0].detail
    )


def test_cf_08_the_tokenizers_end_is_found_in_each_of_its_files() -> None:
    eos = {"eos_token": {"content": "<end>"}}
    assert stops(tokenizer_config=eos, tokenizer={"added_tokens": [{"content": "<end>", "id": 9}]})[0] == (9,)
    assert stops(tokenizer_config=eos, tokenizer={"model": {"vocab": {"<end>": 11}}})[0] == (11,)
    assert stops(tokenizer_config=eos)[0] == ()


def test_dtypes_are_resolved_in_order_and_conflicts_are_seen() -> None:
    assert config_dtype({"dtype": "bfloat16"})[0] == config_dtype({"torch_dtype": "torch.bfloat16"})[0] == "bfloat16"
    assert config_dtype({"text_config": {"dtype": "float16"}})[0] == "float16"
    assert config_dtype({"torch_dtype": "auto"}) == (None, ())
    dtype, problems = config_dtype({"dtype": "bfloat16", "torch_dtype": "float16"})
    assert dtype == "bfloat16" and len(problems) == 1
    assert config_dtype({"dtype": "float99"})[1][0].severity == "warning"


def test_quantization_is_summed_up_in_strings() -> None:
    fp8 = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3"}}
    assert quantization_summary(fp8) == {"method": "fp8", "weight_block_size": "128,128", "fmt": "e4m3"}
    groups = {"group_0": {"weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}}}
    packed = {"text_config": {"quantization_config": {"quant_method": "compressed-tensors", "config_groups": groups}}}
    assert quantization_summary(packed)["group_0.weights"] == "int4 group 32"
    assert quantization_summary({}) == {}


# Values that no model can have are refused by name, wherever they stand; see keys/sound.py.
PLAIN: dict[str, Any] = {
    "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 100, "intermediate_size": 128,
}  # fmt: skip
MIXTURE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
IMPOSSIBLE: list[tuple[dict[str, Any], str]] = [
    ({"rope_theta": 0}, "rope_theta"),
    ({"rope_theta": -1e4}, "rope_theta"),
    ({"rope_theta": "1e4"}, "rope_theta"),
    ({"rope_theta": float("nan")}, "rope_theta"),
    ({"rope_theta": {"__float__": "Infinity"}}, "rope_theta"),
    ({"rope_parameters": {"full_attention": {"rope_theta": 0}}}, "rope_parameters.full_attention.rope_theta"),
    ({"vision_config": {"rope_theta": 0.0}}, "vision_config.rope_theta"),
    ({"layer_rope_theta": [0, 0, 0, 0]}, "layer_rope_theta"),
    ({"layer_rope_theta": [1e4, -1, 0, 1e4]}, "layer_rope_theta"),
    ({"rms_norm_eps": float("inf")}, "rms_norm_eps"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": float("inf")}}, "rope_scaling.factor"),
    ({"time_step_limit": [0.0, float("nan")]}, "time_step_limit"),
    ({"hidden_size": 64.0}, "hidden_size"),
    ({"text_config": "hi"}, "text_config"),
    ({"vision_config": [1]}, "vision_config"),
    ({"architectures": "SomeForCausalLM"}, "architectures"),
    ({"architectures": [3]}, "architectures"),
    ({"model_type": "a\x1b[31mb"}, "model_type"),
    ({"note": "a\u202eb"}, "note"),
    ({"a\x07b": 1}, "a\\x07b"),
    ({"a\nb": 1}, "a\\nb"),
    (MIXTURE | {"num_experts_per_tok": 9}, "num_experts_per_tok"),
    (MIXTURE | {"n_group": 3}, "n_group"),
    (MIXTURE | {"n_group": 4, "topk_group": 5}, "topk_group"),
    (MIXTURE | {"n_group": 8, "topk_group": 1}, "topk_group"),
    ({"num_nextn_predict_layers": 1_000_000}, "num_nextn_predict_layers"),
    ({"num_mtp_modules": 500, "mtp_transformer_layers": 500}, "num_mtp_modules"),
]


@pytest.mark.parametrize("change, key", IMPOSSIBLE, ids=[ascii(row[0])[:50] for row in IMPOSSIBLE])
def test_what_no_model_can_have_is_refused_by_name(change: dict[str, Any], key: str) -> None:
    with pytest.raises(DayZeroError) as raised:
        estimate(PLAIN | change, "bfloat16")
    assert raised.value.what == f"config.json: {key} is not usable"
    assert not CONTROL.search(str(raised.value))


@pytest.mark.parametrize(
    "change",
    [
        {"time_step_limit": [0.0, float("inf")]},
        {"time_step_limit": [0.0, {"__float__": "Infinity"}]},
        {"layer_rope_theta": [1e4, 0, 1e4, 0]},
        {"rope_theta": None, "text_config": None, "architectures": None},
        {"chat_template": "a\n\tb\r\nc"},
        MIXTURE | {"n_group": 4, "topk_group": 2},
        MIXTURE | {"n_group": 0, "topk_group": None},
        MIXTURE | {"num_experts_per_tok": 10, "zero_expert_num": 4},
        {"num_experts": 1, "num_experts_per_tok": 2},
        {"num_nextn_predict_layers": 3},
    ],
    ids=ascii,
)
def test_what_a_model_can_have_is_not_refused(change: dict[str, Any]) -> None:
    assert estimate(PLAIN | change, "bfloat16").total_parameters > 0
    assert config_doubts(PLAIN | change) == []


def test_a_size_given_twice_and_not_alike_is_told() -> None:
    (told,) = config_doubts(PLAIN | {"text_config": PLAIN | {"num_hidden_layers": 8}})
    assert "num_hidden_layers is 4 at the top and 8 in text_config" in told.detail and told.severity == "warning"
    assert config_doubts(PLAIN | {"text_config": dict(PLAIN)}) == []


def test_new_keys_that_are_english_words_are_new() -> None:
    assert not any(known_elsewhere(word) for word in ("memory", "residual", "compute", "sparsity", "attn_res_block_size"))
    known = (
        "hidden_size",
        "n_embd",
        "scoring_func",
        "moe_layer_freq",
        "rope_theta",
        "kda_layers",
        "n_group",
        "dropout",
        "gating",
    )
    assert all(known_elsewhere(word) for word in known)
