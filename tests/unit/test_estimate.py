"""A description from keys alone: exact where keys say everything, close where they do not, and plain about what is missing."""

import json
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

from dayzero.core.errors import DayZeroError
from dayzero.core.formulas import evaluate
from dayzero.core.model import Role
from dayzero.model.estimate import Estimate, estimate

CONFIGS = Path(__file__).parents[1] / "data" / "configs"
DENSE = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 100, "intermediate_size": 128}
LATENT = {
    "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
}  # fmt: skip
MIXTURE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}

# name: (exact total, exact active or None, parts that the exact count leaves out), counted on meta with the model's class
# where transformers has one, by hand from the published layout for the ones marked.
EXACT = {
    "DeepSeek-V3": (671_026_404_352, 37_552_282_624, ()),
    "Kimi-K2-Instruct": (1_026_408_209_408, 32_861_477_888, ()),
    "Meta-Llama-3.1-8B": (8_030_261_248, None, ()),
    "Kimi-K3": (2_779_479_459_840, 105_359_001_600, ("tower", "projector")),  # by hand
    "Ling-1T": (999_703_969_792, 51_053_068_288, ()),  # by hand
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": (31_577_937_344, 3_580_073_408, ()),
    "Qwen3-Next-80B-A3B-Thinking": (79_674_391_296, None, ()),
    "Qwen3.8-2.4T-A95B": (2_419_804_697_984, 95_287_866_752, ()),
    "Qwen3-VL-2B-Instruct": (2_127_532_032, None, ()),
    "gemma-4-26B-A4B": (25_805_933_872, 4_395_322_672, ()),
    "gpt-oss-120b": (116_829_156_672, 5_711_982_912, ()),
    "GLM-5.2-NVFP4": (743_377_000_704, 41_250_511_104, ()),
    "DeepSeek-V4-Flash": (284_332_230_231, 13_799_622_231, ()),
    "default-jamba": (51_570_323_328, 12_110_311_296, ()),
    "default-bailing_hybrid": (124_414_191_072, None, ()),
}
# What keys cannot tell, and the sentence that has to say so: (exact total, least and most error in percent, words).
SHORT_OF = {
    "Llama-4-Scout-17B-16E-Instruct": (107_769_861_120, -6, -5, "whether there are shared experts"),
    "Step-3.7-Flash": (197_824_847_872, -1.1, -0.9, "sets by default where a key is absent"),
}


def load(name: str) -> dict:
    return json.loads((CONFIGS / name / "config.json").read_text())


def of(name: str) -> Estimate:
    return estimate(load(name), "bfloat16")


def cache_bytes(guess: Estimate, num_tokens: int) -> int:
    return sum(spec.bytes_for(num_tokens) * len(kind.layers) for kind in guess.layer_kinds for spec in kind.cache)


def kinds(guess: Estimate) -> dict[str, int]:
    return {kind.name: len(kind.layers) for kind in guess.layer_kinds}


def words(guess: Estimate) -> str:
    return "\n".join(guess.unknown)


def test_me_01_latent_cache_is_one_row_for_all_heads():
    config = {**DENSE, **LATENT, "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128}
    guess = estimate(config, "bfloat16")
    (kind,) = guess.layer_kinds
    assert [(spec.kind, spec.elements_per_token, spec.heads) for spec in kind.cache] == [("latent", 512, 0), ("latent", 64, 0)]
    assert cache_bytes(guess, 1) == 70_272
    assert cache_bytes(guess, 1000) == 70_272_000
    assert cache_bytes(of("DeepSeek-V3"), 1) == 70_272


@pytest.mark.parametrize(
    "sizes, total",
    [
        ({"num_attention_heads": 128, "n_routed_experts": 256, "first_k_dense_replace": 3, "vocab_size": 129280}, 671_026_404_352),
        ({"num_attention_heads": 64, "n_routed_experts": 384, "first_k_dense_replace": 1, "vocab_size": 163840}, 1_026_408_209_408),
    ],
)  # fmt: skip
def test_me_04_totals_of_mixtures_are_exact(sizes, total):
    common = {
        "hidden_size": 7168, "num_hidden_layers": 61, "intermediate_size": 18432, "moe_intermediate_size": 2048,
        "n_shared_experts": 1, "num_experts_per_tok": 8, "tie_word_embeddings": False, "hidden_act": "silu",
    }  # fmt: skip
    assert estimate({**common, **LATENT, **sizes}, "bfloat16").total_parameters == total


@pytest.mark.parametrize("name", sorted(EXACT))
def test_totals_of_releases(name):
    total, active, left_out = EXACT[name]
    guess = of(name)
    outside = sum(guess.by_role.get(role, 0) for role in left_out)
    assert abs(guess.total_parameters - outside - total) / total < (0.002 if name == "Kimi-K3" else 0.01)
    if active is not None:
        assert abs(guess.active_parameters - outside - active) / active < 0.02
    assert sum(guess.by_role.values()) == guess.total_parameters
    assert set(guess.by_role) <= set(get_args(Role))


@pytest.mark.parametrize("name", sorted(SHORT_OF))
def test_what_keys_cannot_tell_is_said(name):
    total, least, most, sentence = SHORT_OF[name]
    guess = of(name)
    assert least < (guess.total_parameters - total) / total * 100 < most
    assert sentence in words(guess)


def test_a_model_that_no_class_is_had_for():
    """KDA and latent attention in one stack, layers numbered from 1, experts in a narrower space."""
    guess = of("Kimi-K3")
    assert kinds(guess) == {"linear+dense": 1, "linear+moe": 68, "latent+moe": 24}
    latent = next(kind for kind in guess.layer_kinds if kind.mixer == "latent")
    assert latent.layers[:2] == (3, 7) and latent.layers[-2:] == (91, 92)
    linear = next(kind for kind in guess.layer_kinds if kind.mixer == "linear")
    assert {(spec.kind, spec.dtype): spec.elements_per_sequence for spec in linear.cache} == {
        ("convolution", "bfloat16"): 3 * 96 * 128 * 4,
        ("state", "float32"): 96 * 128 * 128,
    }
    assert guess.by_role["attention"] == 5_572_657_152
    assert guess.by_role["expert"] == 2_722_740_830_208
    assert guess.by_role["shared_expert"] == 12_155_092_992
    (routing,) = guess.structure.routing
    assert (routing.scoring, routing.experts_per_token, routing.bias, routing.normalised) == ("sigmoid", 16, True, True)
    assert guess.consumed["text_config.routed_expert_hidden_size"] == "width that routed experts work in"
    assert guess.consumed["text_config.linear_attn_config.kda_layers"] == "layers of linear attention, counted from 1"
    assert guess.unread == ("text_config.attn_res_block_size",)
    assert "text_config.attn_res_block_size" in words(guess)


def test_tables_beside_the_decoder_are_in_the_total_and_not_active():
    guess = of("DeepSeek-V4.1-Flash")
    tables = (384_006_168 + 384_016_682) * 256
    assert abs(guess.total_parameters - tables - 552e9) / 552e9 < 0.01  # published: 552B beside 196.6B of tables
    assert abs(guess.total_parameters + guess.mtp_parameters - 763.21e9) / 763.21e9 < 0.01
    assert guess.active_parameters < 18e9 and "n-gram tables (196.6B" in words(guess)


def test_layers_of_different_widths():
    guess = of("Llama-3_3-Nemotron-Super-49B-v1")
    assert abs(guess.total_parameters - 49.87e9) < 0.05e9  # published: 49.9B
    assert {kind.mixer for kind in guess.layer_kinds} == {"full", "none"}


def test_caches_that_the_model_really_allocates():
    """Measured on meta for these releases: kind, elements, window, tokens per entry."""

    def rows(name, kind):
        found = next(item for item in of(name).layer_kinds if item.name == kind)
        return {
            (spec.name, spec.elements_per_token, spec.elements_per_sequence, spec.window_tokens, spec.tokens_per_entry)
            for spec in found.cache
        }

    assert rows("GLM-5.2-NVFP4", "sparse_latent+moe") == {
        ("keys", 512, 0, None, 1), ("values", 64, 0, None, 1), ("indexer_keys", 128, 0, None, 1),
    }  # fmt: skip
    assert kinds(of("GLM-5.2-NVFP4")) == {"sparse_latent+dense": 3, "latent+moe": 57, "sparse_latent+moe": 18}
    assert rows("gpt-oss-120b", "sliding+moe") == {("keys", 512, 0, 128, 1), ("values", 512, 0, 128, 1)}
    assert rows("gemma-4-26B-A4B", "full+moe") == {("keys", 1024, 0, None, 1), ("values", 1024, 0, None, 1)}
    assert rows("NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "ssm+none") == {
        ("conv_states.0", 0, 24576, None, 1), ("recurrent_states.0", 0, 524288, None, 1),
    }  # fmt: skip
    assert rows("Llama-4-Scout-17B-16E-Instruct", "chunked+moe") == {("keys", 1024, 0, 8192, 1), ("values", 1024, 0, 8192, 1)}
    heavy = next(kind for kind in of("DeepSeek-V4-Flash").layer_kinds if kind.layers[0] == 3)
    assert {(spec.name, spec.elements_per_token or spec.elements_per_sequence) for spec in heavy.cache} == {
        ("keys", 512), ("buffer_kv.compressor", 65024), ("buffer_gate.compressor", 65024),
        ("compressed_kv.compressor", 512),
    }  # fmt: skip


def test_an_indexer_on_ordinary_heads_stands_where_its_list_says():
    sparse = {"sparse_num_index_heads": 2, "sparse_index_dim": 8, "sparse_attention_freq": [0, 1, 1, 0]}
    guess = estimate({**DENSE, "sparse_attention_config": sparse}, "bfloat16")
    assert guess.by_role["indexer"] == 2 * (64 * 2 * 8 + 64 * 8 + 2 * 8)
    with_index = next(kind for kind in guess.layer_kinds if len(kind.cache) == 3)
    assert with_index.layers == (1, 2) and with_index.cache[2].elements_per_token == 8


@pytest.mark.parametrize(
    "keys, expected",
    [
        ({"sliding_window": 16, "sliding_window_pattern": 2}, ["sliding", "full", "sliding", "full"]),
        ({"sliding_window": 16, "sliding_window_pattern": "LLG"}, ["sliding", "sliding", "full", "sliding"]),
        ({"sliding_window": 16, "use_sliding_window": False}, ["full"] * 4),
        ({"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 3}, ["full"] * 3 + ["sliding"]),
        ({"sliding_window": None}, ["full"] * 4),
        ({"attention_chunk_size": 8, "no_rope_layers": [1, 0, 1, 1]}, ["chunked", "full", "chunked", "chunked"]),
        ({"attn_type_list": [0, 1, 1, 0]}, ["linear", "full", "full", "linear"]),
        ({"full_attention_interval": 2, "linear_num_heads": 4, "linear_head_dim": 16}, ["linear", "full"] * 2),
        ({"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 4}, ["ssm", "full"] * 2),
        ({"layer_types": ["linear_attention", "full_attention", "sliding_attention", "mamba", "further"],
          "mamba_d_state": 4, "linear_num_heads": 4, "linear_head_dim": 16, "sliding_window": 8},
         ["linear", "full", "sliding", "ssm"]),
        ({"hybrid_override_pattern": "M*-E", "ssm_state_size": 4, **MIXTURE}, ["ssm", "full", "none", "none"]),
        ({"linear_attn_config": {"kda_layers": [1, 2, 4], "full_attn_layers": [3], "num_heads": 4, "head_dim": 16}},
         ["linear", "linear", "full", "linear"]),
        ({"index_n_heads": 2, "index_head_dim": 8, "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8,
          "indexer_types": ["full", "shared", "full", "shared"], "layer_types": ["sparse_attention"] * 4},
         ["sparse_latent", "latent", "sparse_latent", "latent"]),
    ],
)  # fmt: skip
def test_layer_patterns(keys, expected):
    guess = estimate({**DENSE, **keys}, "bfloat16")
    assert [next(kind.mixer for kind in guess.layer_kinds if layer in kind.layers) for layer in range(4)] == expected


@pytest.mark.parametrize(
    "keys, expected",
    [
        ({"first_k_dense_replace": 1}, "dmmm"),
        ({"first_k_dense_replace": 0, "moe_layer_freq": 2}, "mdmd"),
        ({"moe_layer_freq": [0, 1, 0, 1]}, "dmdm"),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [3]}, "dmdd"),
        ({"expert_layer_period": 2, "expert_layer_offset": 1}, "dmdm"),
        ({"mlp_layer_types": ["dense", "sparse", "sparse", "dense"]}, "dmmd"),
        ({"moe_layer_start_index": 1, "moe_layer_end_index": 2}, "dmmd"),
        ({"moe_layers_enum": "2,3"}, "ddmm"),
        ({"num_experts": 1}, "dddd"),
        ({"num_experts": 0}, "dddd"),
        ({"is_moe": False}, "dddd"),
    ],
)
def test_which_layers_have_experts(keys, expected):
    guess = estimate({**DENSE, **MIXTURE, **keys}, "bfloat16")
    found = [next(kind.feed_forward for kind in guess.layer_kinds if layer in kind.layers) for layer in range(4)]
    assert "".join(word[0] for word in found) == expected


def test_experts_without_weights_lower_what_is_active():
    plain = estimate({**DENSE, **MIXTURE}, "bfloat16")
    zero = estimate({**DENSE, **MIXTURE, "zero_expert_num": 8}, "bfloat16")
    one = 3 * 64 * 32
    assert zero.total_parameters - plain.total_parameters == 4 * 8 * 64  # router rows alone
    assert plain.active_parameters - zero.active_parameters == 4 * (one - 8 * 64)


def test_further_token_layers_are_counted_apart():
    without, with_layers = (estimate({**DENSE, "num_nextn_predict_layers": number}, "bfloat16") for number in (0, 2))
    assert with_layers.total_parameters == without.total_parameters and without.mtp_parameters == 0
    layer = 4 * 64 * 64 + 3 * 64 * 128 + 2 * 64
    assert with_layers.mtp_parameters == 2 * (layer + 2 * 64 * 64 + 3 * 64)
    assert with_layers.dimensions.num_mtp_layers == 2


def test_every_key_is_accounted_for_once():
    for folder in sorted(CONFIGS.iterdir()):
        guess = of(folder.name)
        groups = (set(guess.consumed), set(guess.inert), set(guess.unread))
        assert sum(len(group) for group in groups) == len(set.union(*groups)), folder.name
        assert "initializer_range" not in {path.rpartition(".")[2] for path in groups[0] | groups[2]}
        assert all(guess.consumed.values()) and all(guess.inert.values())
    strange = estimate({**DENSE, "flux_gate": 3, "initializer_range": 0.1, "other": None}, "bfloat16")
    assert strange.unread == ("flux_gate",) and "flux_gate" in words(strange)
    assert strange.inert == {"initializer_range": "training alone", "other": "null, as if absent"}


@pytest.mark.parametrize(
    "change, named, got, wanted",
    [
        ({"hidden_size": "64"}, "hidden_size", "'64'", "a positive integer"),
        ({"num_hidden_layers": -4}, "num_hidden_layers", "-4", "a positive integer"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers", "1000000000", "at most"),
        ({"num_key_value_heads": 3}, "num_key_value_heads", "3, with 4", "a divisor"),
        ({"layer_types": ["full_attention"]}, "layer_types", "1 items", "4 layers"),
        ({"layer_types": "full"}, "layer_types", "'full'", "a list"),
        ({"hybrid_override_pattern": "MM?E"}, "hybrid_override_pattern", "MM?E", "4 letters"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings", "'yes'", "true or false"),
        ({"num_experts": 8, "num_experts_per_tok": 0}, "num_experts_per_tok", "0", "a positive integer"),
        ({"vision_config": {"hidden_size": 8.5, "depth": 2}}, "vision_config.hidden_size", "8.5", "a positive integer"),
        ({"linear_attn_config": {"kda_layers": [0, 1]}}, "linear_attn_config.kda_layers", "layers 0 to 1", "from 1 to 4"),
        ({"linear_attn_config": 3}, "linear_attn_config", "3", "an object"),
    ],
)
def test_a_wrong_value_names_its_key(change, named, got, wanted):
    with pytest.raises(DayZeroError) as caught:
        estimate({**DENSE, **change}, "bfloat16")
    assert named in caught.value.what and got in caught.value.got and wanted in caught.value.want


def test_too_little_is_an_error_that_names_the_spellings():
    with pytest.raises(DayZeroError, match="too little") as caught:
        estimate({"num_hidden_layers": 2, "vocab_size": 10}, "bfloat16")
    assert "hidden_size" in caught.value.got


def test_layers_of_experts_without_a_number_of_experts():
    with pytest.raises(DayZeroError, match="experts") as caught:
        estimate({**DENSE, "hybrid_override_pattern": "*E*E"}, "bfloat16")
    assert "n_routed_experts" in caught.value.got


def test_contradictions_are_said():
    guess = estimate({**DENSE, **MIXTURE, "num_local_experts": 4}, "bfloat16")
    assert guess.dimensions.num_experts == 8 and "num_experts and num_local_experts contradict" in words(guess)


def test_answers_without_torch():
    code = (
        "import json, sys; from dayzero.model.estimate import estimate; "
        f"estimate(json.load(open({str(CONFIGS / 'Kimi-K3' / 'config.json')!r})), 'bfloat16'); "
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize("name", ["DeepSeek-V3", "Meta-Llama-3.1-8B", "Kimi-K3", "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16"])
def test_operators_from_keys_multiply_each_active_matrix_once(name: str) -> None:
    """Without context a token costs two operations for each parameter it uses, but for those that are no matrices."""
    guess = of(name)
    no_matrix = sum(guess.by_role.get(role, 0) for role in ("embedding", "norm", "convolution", "other", "tower", "projector",
                                                            "attention_sink"))  # fmt: skip
    graphs = [*((kind.operators, len(kind.layers)) for kind in guess.layer_kinds), (guess.outer_operators, 1)]
    for nodes, tokens in (("decode", 1), ("prefill", 1)):
        flops = sum(
            evaluate(node.flops, B=1, T=tokens, C=0) * layers
            for graph, layers in graphs
            for node in getattr(graph, nodes)
            if node.kind in ("linear", "experts")
        )
        assert flops == pytest.approx(2 * (guess.active_parameters - no_matrix), rel=2e-3)
    assert all(graph.notes for graph, _ in graphs)


@pytest.mark.parametrize(
    "word", ["quantum_attention", "fullness", "hybrid_quantum", "linear_quantum", "quantum_sparse_attention"]
)
def test_a_word_that_only_contains_a_known_one_is_not_known(word: str) -> None:
    guess = estimate({**DENSE, "layer_types": [word, "full_attention"] * 2}, "bfloat16")
    assert kinds(guess) == {"full+dense": 4}
    assert f"what a layer of kind {word!r} is: it is counted as full attention" in words(guess)


def test_words_of_transformers_lists_are_known() -> None:
    from dayzero.model.known_keys import known_layer_words

    sizes = {
        "mamba_d_state": 4, "sliding_window": 8, "attention_chunk_size": 8, "linear_num_heads": 4, "linear_head_dim": 16,
        "head_dim": 16,
    }  # fmt: skip
    assert len(known_layer_words()) > 12
    for word in sorted(known_layer_words() - {"sparse", "dense", "moe"}):
        told = words(estimate({**DENSE, **sizes, "layer_types": [word] * 4}, "bfloat16"))
        assert "what a layer of kind" not in told, word


def test_other_words_that_mean_nothing_known_are_said_or_refused() -> None:
    told = words(estimate({**DENSE, **MIXTURE, "mlp_layer_types": ["dense", "quantum", "sparse", "moe"]}, "bfloat16"))
    assert "what a feed-forward of kind 'quantum' is: it is counted as experts" in told
    with pytest.raises(DayZeroError, match="sliding_window_pattern"):
        estimate({**DENSE, "sliding_window": 8, "sliding_window_pattern": "LQG"}, "bfloat16")


def test_a_list_where_one_number_is_usual_is_told() -> None:
    assert "whether num_attention_heads may be a list" in words(estimate({**DENSE, "num_attention_heads": [4] * 4}, "bfloat16"))
    assert "may be a list" not in words(estimate(DENSE, "bfloat16"))


def test_layers_without_keys_see_no_number_of_them() -> None:
    sizes = {"linear_num_heads": 4, "linear_head_dim": 16, "mamba_d_state": 4}
    types = ["linear_attention", "full_attention", "mamba", "full_attention"]
    guess = estimate({**DENSE, **sizes, "layer_types": types}, "bfloat16")
    assert guess.structure.visible_tokens == {"full+dense": 0}
