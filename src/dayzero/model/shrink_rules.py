"""The table that makes any config small: field-name patterns, small values, and the reason for each size.

No architecture is named here. A size that no pattern matches stays as released; `shrink` refuses a result that is still
large, which is how a missing rule shows. Fields that count or number layers follow the layers which are kept.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

HIDDEN_SIZE = 64  # four heads of 16: the smallest a matrix can be while rotary halves and head groups stay distinct
NUM_HEADS = 4
HEAD_DIM = 16
VOCAB_SIZE = 160
WINDOW_TOKENS = 8  # windows, chunks and top-k selections
THRESHOLD_TOKENS = 16  # position thresholds: above a window, so that crossing one is told from crossing the other


@dataclass(frozen=True, slots=True)
class ShrinkRule:
    """Integer fields whose name matches `pattern` become `value(old, siblings)`; siblings are the fields beside it."""

    pattern: str
    value: Callable[[int, Mapping[str, Any]], int]
    reason: str


def _at_most(limit: int) -> Callable[[int, Mapping[str, Any]], int]:
    return lambda old, siblings: min(old, limit)


def _keep(old: int, siblings: Mapping[str, Any]) -> int:
    return old


def _num_kv_heads(old: int, siblings: Mapping[str, Any]) -> int:
    num_heads = siblings.get("num_attention_heads") or siblings.get("n_heads") or siblings.get("n_head") or 0
    return min(old, NUM_HEADS if old == num_heads else 2)


def _num_linear_key_heads(old: int, siblings: Mapping[str, Any]) -> int:
    return min(old, NUM_HEADS if old == siblings.get("linear_num_value_heads") else 2)


# The first matching rule wins. Only integers above zero are replaced: zero, None and booleans are switches.
RULES = (
    ShrinkRule(r"^loop_|^image_size$|^patch_size$", _keep, "counts of another kind that the patterns below would catch"),
    ShrinkRule(
        r"original_max_position_embeddings|^initial_context_length$|floor_scale$|n_floor$|temperature_(len|floor|threshold)",
        _at_most(THRESHOLD_TOKENS),
        "position thresholds: behaviour past them must be reached by short tests",
    ),
    ShrinkRule(
        r"max_position_embeddings|n_positions|n_ctx|max_seq_len|model_max_length|context_length|max_target_positions",
        _at_most(512),
        "sizes position tables; long enough for any short test",
    ),
    ShrinkRule(r"ngram_vocab|engram_vocab|compressed_vocab", _at_most(200), "hash tables of token groups"),
    ShrinkRule(
        r"^(hidden_size|d_model|n_embd|embedding_size|word_embed_proj_dim|embedding_dim|lru_width|attention_hidden_size"
        r"|emb_dim|ple_embed_dim|input_embedding_size|global_hidden.*|output_embedding_size|out_hidden_size|text_hidden_size"
        r"|projector_hidden_size|projection_hidden_size|projection_dim)$",
        _at_most(HIDDEN_SIZE),
        "width of the residual stream",
    ),
    ShrinkRule(
        r"^(num_attention_heads|n_head|n_heads|num_heads|attention_heads|(swa|sliding)_num_attention_heads"
        r"|num_(swa|sliding)_attention_heads|num_attention_heads_per_layer|.*(en|de)coder_attention_heads"
        r"|num_query_groups|engram_n_heads|heads_per_ngram)$",
        _at_most(NUM_HEADS),
        "heads times head size is the width",
    ),
    ShrinkRule(
        r"^(num_key_value_heads|num_kv_heads|(swa|sliding|global)_num_key_value_heads"
        r"|num_(swa|sliding|global)_key_value_heads|kv_n_heads)$",
        _num_kv_heads,
        "multi-head, grouped and multi-query attention stay what they are",
    ),
    ShrinkRule(r"^linear_num_key_heads$", _num_linear_key_heads, "grouped linear attention stays grouped"),
    ShrinkRule(r"^(linear_num_value_heads|linear_num_heads)$", _at_most(NUM_HEADS), "heads of linear attention"),
    ShrinkRule(r"^(qk_rope_head_dim|rotary_dim|swa_rope_head_dim)$", _at_most(8), "half of a head is rotated"),
    ShrinkRule(r"^qk_head_dim$", _at_most(HEAD_DIM + 8), "the unrotated and the rotated part of a head together"),
    ShrinkRule(r"^(mamba_d_head|mamba_head_dim|mamba_headdim)$", _at_most(16), "8 heads of 16 are twice the width"),
    ShrinkRule(r"head_dim$|^dim_head$|^kv_channels$|^attention_head_size$|headdim$|index_dim$", _at_most(HEAD_DIM), "head"),
    ShrinkRule(r"^(mamba_n_heads|mamba_num_heads)$", _at_most(8), "8 heads of 16 are twice the width"),
    ShrinkRule(r"^n_mamba_heads$", _at_most(2), "the inner width must divide"),
    ShrinkRule(r"^mamba_d_ssm$", _at_most(128), "8 heads of 16"),
    ShrinkRule(r"mamba_d_state|ssm_state_size|^state_size$", _at_most(8), "recurrent state"),
    ShrinkRule(r"mamba_dt_rank|time_step_rank", _at_most(4), "a sixteenth of the width, as released"),
    ShrinkRule(r"^(mamba_n_groups|n_groups|mamba_ngroups|o_groups)$", _at_most(2), "more than one group, dividing 4 heads"),
    ShrinkRule(r"^(chunk_size|mamba_chunk_size|block_size)$", _at_most(8), "a schedule of 30 tokens crosses three"),
    ShrinkRule(r"q_lora_rank|o_lora_rank", _at_most(24), "a rank unlike any other size"),
    ShrinkRule(r"kv_lora_rank", _at_most(16), "latent cache row"),
    ShrinkRule(r"index_n_heads|num_index_heads", _at_most(8), "fewer make ReLU scores tie at zero, and top-k ambiguous"),
    ShrinkRule(r"topk_blocks", _at_most(2), "selects among the four blocks of a short test"),
    ShrinkRule(r"(index|sparse|candidate)_block_size", _at_most(4), "blocks to select among"),
    ShrinkRule(r"index_topk$", _at_most(4), "a selection smaller than a short test, of compressed entries too"),
    ShrinkRule(r"index_kpool$|indexer_compress_ratio$", _at_most(4), "tokens pooled into one index key; divides the top-k"),
    ShrinkRule(r"indexer_budget$", _at_most(8), "two of the seven blocks of a short test"),
    ShrinkRule(r"indexer_n_heads$", _at_most(8), "as index_n_heads"),
    ShrinkRule(r"compress_(rate|ratio)|compressed.*_attention$", _at_most(8), "a schedule of 30 tokens makes three entries"),
    ShrinkRule(
        r"^(num_experts|n_routed_experts|num_local_experts|moe_num_experts|zero_expert_num)$|_n_routed_experts$",
        _at_most(8),
        "two groups of four",
    ),
    ShrinkRule(
        r"experts_per_tok(en)?$|^(moe_topk|moe_top_k|moe_k|top_k_experts)$", _at_most(2), "a choice, with weights to share"
    ),
    ShrinkRule(r"^(n_group|num_expert_group)$", _at_most(2), "groups of experts stay a choice"),
    ShrinkRule(r"^topk_group$", _at_most(1), "one group of two"),
    ShrinkRule(
        r"moe.*intermediate|expert.*(intermediate|ffn)|expert_ffn|shared?.*(intermediate|expert_dim)|ffn_hidden_size$"
        r"|intermediate_size_mlp|feed_forward_size",
        _at_most(48),
        "experts narrower than the dense layer, so that the two are not mixed up",
    ),
    ShrinkRule(r"moe_latent|moe_hidden_size|routed_expert_hidden_size|router_hidden_size", _at_most(32), "half the width"),
    ShrinkRule(
        r"intermediate_size|ffn_dim|^d_inner$|^dff$|^dim_ff$|n_inner|ffn_hidden|feed_forward_dim", _at_most(96), "dense layer"
    ),
    ShrinkRule(
        r"^(sliding_window|sliding_window_size|attention_chunk_size|window_size|attention_window_size|local_attention"
        r"|local_attention_window_len|keep_window_size|max_window_size)$",
        _at_most(WINDOW_TOKENS),
        "a schedule of 30 tokens crosses three",
    ),
    ShrinkRule(r"hc_lowrank|rank$", _at_most(8), "low-rank factors"),
    ShrinkRule(r"hidden_size_per_layer_input", _at_most(16), "per-layer embeddings"),
    ShrinkRule(r"^d_rel$", _at_most(4), "relative positions"),
    ShrinkRule(r"^rel_extent$", _at_most(WINDOW_TOKENS), "relative distances end within a short test"),
    ShrinkRule(r"^hidden_sizes$", _at_most(32), "widths of the stages of an encoder"),
    ShrinkRule(r"^depths?$", _at_most(2), "layers of the stages of an encoder"),
    ShrinkRule(r"split_ngram_parts", _at_most(2), "hash tables of token groups"),
    ShrinkRule(r"dim_model_base", _at_most(64), "scales logits by width"),
    ShrinkRule(r"query_pre_attn_scalar", _at_most(HEAD_DIM), "is the head size in every release"),
    ShrinkRule(r"ffn_round_up_to_multiple_of|block_multiple_of", _at_most(8), "rounding of widths"),
)

# Counts of layers at the front or at the back of the stack, and single layer numbers: they follow the selection.
FRONT_COUNT = re.compile(r"^(first_k_dense_replace|num_dense_layers|num_hash_layers|max_window_layers)$|^n_dense|dense_layers$")
BACK_COUNT = re.compile(r"^num_kv_shared_layers$")
LAYER_NUMBER = re.compile(r"^(moe_layer_(start|end)_index|.*source_layer_id)$")
LAYER_COUNT = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_blocks")
VOCAB = re.compile(r"(^|_)vocab_size(_per_layer_input|_base)?$|^group_vocab$")
LAYER_LIST = re.compile(r"(layer|block)_(ids|idxs?|indices|indexes)$|(source|moe|attn|skip)_layers$")
TOKEN_ID = re.compile(r"(^|_)token_ids?$|token_index$")
SIDE_CONFIG = re.compile(r"vision|visual|audio|encoder|patcher")
RECURRENT_HEADS = (
    ("num_heads", "head_dim"),
    ("mamba_num_heads", "mamba_head_dim"),
    ("mamba_n_heads", "mamba_d_head"),
    ("n_mamba_heads", "mamba_headdim"),
)
# Kept by transformers for itself or about the release, not about structure.
BOOKKEEPING = frozenset(
    {
        "architectures", "attribute_map", "auto_map", "compression_config", "dtype", "id2label",
        "ignore_keys_at_rope_validation", "label2id", "model_type", "name_or_path", "per_layer_config",
        "quantization_config", "torch_dtype", "transformers_version",
    }
)  # fmt: skip
