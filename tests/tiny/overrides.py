"""What the name-pattern rules of `dayzero.model.shrink` cannot see, one line per type. Test data only.

Mostly class defaults which contradict themselves or leave required fields empty: a release's own config needs none of it.
"""

from __future__ import annotations

from typing import Any

# Fields of the (text) config of the shrunken model.
OVERRIDES: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "inkling2_loop_text": {
        "num_hidden_layers": 4,
        "loop_layer_index_start": 1,
        "loop_layer_index_end": 3,
        "n_layers_per_attn_res_block": 1,
        "layer_types": None,
    },
    "hrm_text": {"num_hidden_layers": 2, "num_layers_per_stack": None},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "num_layers": 2},
    "zamba": {"num_hidden_layers": 6, "layers_block_type": ["linear_attention", "linear_attention", "hybrid"] * 2},
    "dory": {"num_hidden_layers": 5, "n_input_layers": 2, "n_recurrent_layers": 2, "n_output_layers": 1},
    "xlstm": {"qk_dim_factor": 1.0, "v_dim_factor": 1.0},
    # Scores of a ReLU indexer are exactly 0 where every head is cut off: with 8 heads of random weights such ties reach the
    # top-k border, and which key is then picked is nobody's fault. With 16 there are none.
    "deepseek_v32": {"index_n_heads": 16},
    "glm_moe_dsa": {"index_n_heads": 16},
}

# Fields of the class default itself, where a default instance cannot even be built.
_INDEXER = {
    "indexer_n_heads": 8,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 256,
    "indexer_budget": 2048,
    "indexer_compress_ratio": 4,
}
_PLE = _INDEXER | {"ple_layer_ids": [1], "eos_token_id": 1}
DEFAULTS: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"topk_method": "greedy", "num_experts_per_tok": 6, "first_k_dense_replace": 1, "n_routed_experts": 64},
    "dots1": {"n_routed_experts": 128, "num_experts_per_tok": 6, "first_k_dense_replace": 1, "n_shared_experts": 2},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128, "num_experts": 16},
    "ministral": {"head_dim": 128},
    "nemotron": {"num_key_value_heads": 8, "head_dim": 128},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention", "conv"] * 8},
    "qwen4_exp": {"text_config": _PLE},
    "qwen4_exp_text": _PLE,
    "step3p7": {
        "text_config": {
            "sliding_window": 512,
            "layer_types": (["full_attention"] + ["sliding_attention"] * 3) * 11 + ["full_attention"],
        }
    },
}

# Types transformers lists as causal which are encoders, encoder-decoders, or decoders of something else than text.
ENCODER_TYPES = frozenset(
    {
        "bart", "bert", "bert-generation", "big_bird", "bigbird_pegasus", "blenderbot", "blenderbot-small", "camembert",
        "data2vec-text", "electra", "ernie", "git", "got_ocr2", "marian", "mbart", "megatron-bert", "moshi",
        "moss_transcribe_diarize", "musicgen", "musicgen_melody", "mvp", "pegasus", "plbart", "prophetnet", "reformer",
        "rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer", "trocr", "whisper", "xlm", "xlm-roberta",
        "xlm-roberta-xl", "xlnet", "xmod",
    }
)  # fmt: skip

# The types every stage must work for.
REQUIRED_TYPES = [
    "llama", "qwen3", "qwen3_moe", "deepseek_v3", "deepseek_v32", "kimi_linear", "qwen3_next", "glm_moe_dsa", "gpt_oss",
    "minimax_m2", "gemma3_text", "mixtral", "llama4_text", "nemotron_h",
]  # fmt: skip
