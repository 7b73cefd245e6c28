"""Well-known config keys: which spellings mean the same, what the value must be, and what it decides. Tables only.

`CONCEPTS` are keys that this package reads. `BEHAVIOUR` are keys that change what is computed but no size and no cache.
`INERT` are keys that change neither. A key in none of the three is one that nobody here knows.
"""

from dataclasses import dataclass
from typing import Literal

# size: an integer of at least 1 (null: as if absent). count: at least 0. ratio: a positive number. items: a list.
ValueKind = Literal["size", "count", "ratio", "flag", "word", "items", "any"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Concept:
    """One meaning. The first spelling that a config has wins."""

    kind: ValueKind
    meaning: str
    spellings: tuple[str, ...]


def _concept(kind: ValueKind, meaning: str, spellings: str) -> Concept:
    return Concept(kind=kind, meaning=meaning, spellings=tuple(spellings.split()))


CONCEPTS: dict[str, Concept] = {
    # The whole model.
    "hidden": _concept("size", "width of the residual stream", "hidden_size d_model n_embd dim model_dim"),
    "depth": _concept("size", "number of layers", "num_hidden_layers n_layer n_layers num_layers"),
    "vocabulary": _concept("size", "rows of the embedding", "vocab_size padded_vocab_size n_vocab"),
    "positions": _concept(
        "size", "longest sequence",
        "max_position_embeddings n_positions max_seq_len seq_length model_max_length max_sequence_length"
    ),
    "tied": _concept("flag", "the head reuses the embedding", "tie_word_embeddings tie_embeddings"),
    "per_layer_input": _concept("count", "width of embeddings fed into every layer", "hidden_size_per_layer_input"),
    "per_layer_vocabulary": _concept("size", "rows of the per-layer embeddings", "vocab_size_per_layer_input"),
    "ngram_rows": _concept("items", "rows of hashed n-gram tables", "engram_num_embeddings"),
    "ngram_width": _concept("size", "width of a row of an n-gram table", "engram_head_dim"),
    "streams": _concept("size", "parallel residual streams (hyper-connections)", "hc_mult hc_count"),
    # Which layer is what.
    "layer_types": _concept("items", "kind of each layer", "layer_types layers_block_type layer_type_list"),
    "hybrid_pattern": _concept("word", "kind of each layer, one letter each", "hybrid_override_pattern"),
    "attention_bits": _concept("items", "1: attention, 0: linear attention, for each layer", "attn_type_list"),
    "attention_layers": _concept("items", "layers that attend", "attn_layer_indices full_attn_idxs"),
    "full_interval": _concept("size", "every n-th layer attends to everything", "full_attention_interval layer_group_size"),
    "full_every": _concept("size", "every n-th layer is not windowed", "global_attn_every_n_layers"),
    "window_pattern": _concept("any", "which layers are windowed", "sliding_window_pattern"),
    "attention_period": _concept("size", "distance of attention layers", "attn_layer_period"),
    "attention_offset": _concept("count", "first attention layer", "attn_layer_offset"),
    "rotary_bits": _concept("items", "0: the layer has no positions and sees everything", "no_rope_layers"),
    "per_layer": _concept("any", "keys that differ in single layers", "per_layer_config"),
    "block_configs": _concept("items", "attention and feed-forward of each layer", "block_configs"),
    "shared_cache_layers": _concept("count", "last layers that reuse another layer's keys", "num_kv_shared_layers"),
    # Attention.
    "heads": _concept(
        "size", "query heads", "num_attention_heads n_head n_heads num_heads attention_heads num_attention_heads_per_layer"
    ),
    "kv_heads": _concept("size", "key and value heads", "num_key_value_heads num_kv_heads n_head_kv multi_query_group_num"),
    "one_kv_head": _concept("flag", "one key and value head for all query heads", "multi_query"),
    "head_dim": _concept("size", "width of a head", "head_dim kv_channels attention_head_dim"),
    "value_dim": _concept("size", "width of a value head", "v_head_dim"),
    "sliding_heads": _concept("size", "query heads of windowed layers", "swa_num_attention_heads num_sliding_attention_heads"),
    "sliding_kv_heads": _concept("size", "key and value heads of windowed layers", "swa_num_key_value_heads"),
    "sliding_head_dim": _concept("size", "width of a head of windowed layers", "swa_head_dim"),
    "sliding_value_dim": _concept("size", "width of a value head of windowed layers", "swa_v_head_dim"),
    "global_kv_heads": _concept("size", "key and value heads of unwindowed layers", "num_global_key_value_heads"),
    "global_head_dim": _concept("size", "width of a head of unwindowed layers", "global_head_dim"),
    "keys_are_values": _concept("flag", "unwindowed layers use keys as values", "attention_k_eq_v"),
    "window": _concept("count", "tokens a windowed layer sees", "sliding_window sliding_window_size window_size"),
    "windowed": _concept("flag", "windows are in use", "use_sliding_window"),
    "window_from": _concept("count", "layers below this one are not windowed", "max_window_layers"),
    "chunk": _concept("size", "tokens of an attention chunk", "attention_chunk_size"),
    "output_gate": _concept(
        "flag", "attention output is gated, element by element",
        "attn_output_gate attention_output_gate mla_use_output_gate use_output_gate"
    ),
    "head_gate": _concept("any", "attention output is gated", "gating use_head_wise_attn_gate headwise_attn_output_gate"),
    "attention_bias": _concept("flag", "biases on all attention projections", "attention_bias"),
    "qkv_bias": _concept("flag", "biases on query, key and value", "qkv_bias use_qkv_bias add_qkv_bias"),
    "query_key_norm": _concept("flag", "norms on queries and keys", "use_qk_norm qk_norm"),
    "query_key_norm_type": _concept("word", "whether those norms span one head or all", "qk_norm_type"),
    "full_sinks": _concept("flag", "a learned sink per head, unwindowed layers", "add_full_attention_sink_bias"),
    "sliding_sinks": _concept("flag", "a learned sink per head, windowed layers", "add_swa_attention_sink_bias"),
    # Latent attention.
    "kv_rank": _concept("count", "width of the latent row that is cached", "kv_lora_rank"),
    "q_rank": _concept("count", "width of the latent query", "q_lora_rank"),
    "rope_dim": _concept("count", "rotated dimensions of a head", "qk_rope_head_dim"),
    "nope_dim": _concept("count", "unrotated dimensions of a head", "qk_nope_head_dim"),
    "qk_dim": _concept("size", "width of a query head", "qk_head_dim"),
    # Sparse and compressed attention.
    "index_heads": _concept("size", "heads of the indexer", "index_n_heads indexer_n_heads sparse_num_index_heads"),
    "index_dim": _concept("size", "width of an indexer head", "index_head_dim indexer_head_dim sparse_index_dim"),
    "index_topk": _concept("count", "tokens the indexer lets through", "index_topk"),
    "index_types": _concept("items", "which layers have an indexer of their own", "indexer_types"),
    "index_bits": _concept("items", "1: the layer has an indexer", "sparse_attention_freq"),
    "index_layers": _concept("items", "layers that have an indexer", "index_source_layer_ids"),
    "index_pool": _concept("size", "tokens that share an index key", "index_kpool"),
    "compress_ratios": _concept("items", "tokens per compressed entry of each layer, 0: window only", "compress_ratios"),
    "compress_rates": _concept("any", "tokens per compressed entry of each kind of layer", "compress_rates"),
    "compress_layers": _concept("items", "layers that keep compressed entries", "kv_source_layer_ids"),
    "output_groups": _concept("size", "groups of the output projection", "o_groups"),
    "output_rank": _concept("size", "width of the latent output", "o_lora_rank"),
    # Linear attention.
    "key_heads": _concept("size", "key heads of linear attention", "linear_num_key_heads"),
    "value_heads": _concept("size", "value heads of linear attention", "linear_num_value_heads"),
    "linear_key_dim": _concept("size", "width of a key head of linear attention", "linear_key_head_dim"),
    "linear_value_dim": _concept("size", "width of a value head of linear attention", "linear_value_head_dim"),
    "linear_heads": _concept("size", "heads of linear attention", "linear_num_heads"),
    "linear_dim": _concept("size", "width of a head of linear attention", "linear_head_dim"),
    "linear_kernel": _concept(
        "size", "taps of the convolution before linear attention", "linear_conv_kernel_dim short_conv_kernel_size"
    ),
    "linear_nested": _concept("any", "sizes and layers of linear attention", "linear_attn_config"),
    "sparse_nested": _concept("any", "sizes and layers of sparse attention", "sparse_attention_config"),
    "nested_linear_layers": _concept("items", "layers of linear attention, counted from 1", "kda_layers"),
    "nested_full_layers": _concept("items", "layers of full attention, counted from 1", "full_attn_layers"),
    "nested_heads": _concept("size", "heads of linear attention", "num_heads"),
    "nested_dim": _concept("size", "width of a head of linear attention", "head_dim"),
    "full_rank_gate": _concept("flag", "the output gate of linear attention has full rank", "use_full_rank_gate"),
    # State-space layers.
    "ssm_heads": _concept("size", "heads of a state-space layer", "mamba_num_heads mamba_n_heads"),
    "ssm_head_dim": _concept("size", "width of a head of a state-space layer", "mamba_head_dim mamba_d_head"),
    "ssm_state": _concept("size", "state of a channel of a state-space layer", "ssm_state_size mamba_d_state state_size"),
    "ssm_groups": _concept("size", "groups of a state-space layer", "n_groups mamba_n_groups mamba_ngroups"),
    "ssm_kernel": _concept("size", "taps of the convolution of a state-space layer", "conv_kernel mamba_d_conv"),
    "ssm_expand": _concept("ratio", "inner width of a state-space layer", "expand mamba_expand"),
    "ssm_rank": _concept("any", "width of the step size of a state-space layer", "mamba_dt_rank time_step_rank"),
    "ssm_bias": _concept("flag", "biases of a state-space layer's projections", "mamba_proj_bias use_bias"),
    "ssm_conv_bias": _concept("flag", "bias of a state-space layer's convolution", "use_conv_bias mamba_conv_bias"),
    "ssm_dtype": _concept("word", "dtype of the state", "mamba_ssm_cache_dtype mamba_ssm_dtype"),
    "short_kernel": _concept("size", "taps of the short convolutions in a layer", "conv_kernel_size conv_L_cache"),
    "short_convolutions": _concept("count", "short convolutions in a layer", "number_of_conv_states"),
    # Feed-forward.
    "dense_width": _concept(
        "size", "inner width of a dense feed-forward",
        "dense_intermediate_size intermediate_size_mlp intermediate_size ffn_hidden_size ffn_dim n_inner d_ff"
    ),
    "activation": _concept("word", "activation", "hidden_act mlp_hidden_act hidden_activation activation_function activation"),
    "mlp_bias": _concept("flag", "biases of the feed-forward", "mlp_bias"),
    "experts": _concept(
        "count", "experts", "n_routed_experts num_experts num_local_experts moe_num_experts num_routed_experts"
    ),
    "experts_used": _concept("flag", "there are experts", "is_moe use_moe"),
    "per_token": _concept(
        "size", "experts a token uses",
        "num_experts_per_tok num_experts_per_token experts_per_token moe_topk moe_top_k top_k_experts moe_k "
        "num_selected_experts router_top_k"
    ),
    "expert_width": _concept(
        "size", "inner width of an expert",
        "moe_intermediate_size expert_ffn_hidden_size moe_ffn_hidden_size expert_intermediate_size intermediate_size "
        "ffn_hidden_size"
    ),
    "expert_hidden": _concept(
        "size", "width that routed experts work in", "moe_latent_size moe_hidden_size routed_expert_hidden_size"
    ),
    "latent_norm": _concept("flag", "a norm on the width that experts work in", "latent_moe_use_norm"),
    "shared": _concept(
        "count", "shared experts", "n_shared_experts num_shared_experts moe_num_shared_experts num_shared_expert"
    ),
    "shared_width": _concept(
        "count", "inner width of the shared experts",
        "shared_expert_intermediate_size moe_shared_expert_intermediate_size shared_experts_intermediate_size "
        "shared_intermediate_size share_expert_dim"
    ),
    "zero_experts": _concept("count", "experts without weights that the router can choose", "zero_expert_num"),
    "experts_beside": _concept("flag", "experts stand beside a dense feed-forward", "enable_moe_block"),
    "feed_types": _concept("items", "dense or experts, for each layer", "mlp_layer_types"),
    "dense_first": _concept(
        "count", "first layers without experts", "first_k_dense_replace num_dense_layers moe_layer_start_index"
    ),
    "moe_last": _concept("count", "last layer with experts", "moe_layer_end_index"),
    "moe_frequency": _concept("any", "which layers have experts", "moe_layer_freq"),
    "moe_step": _concept(
        "size", "every n-th layer has experts", "decoder_sparse_step interleave_moe_layer_step moe_layer_interval"
    ),
    "moe_period": _concept("size", "distance of layers with experts", "expert_layer_period"),
    "moe_offset": _concept("count", "first layer with experts", "expert_layer_offset"),
    "moe_layers": _concept("items", "layers with experts", "moe_layers moe_layers_enum"),
    "dense_layers": _concept("items", "layers without experts", "mlp_only_layers"),
    # Routing.
    "scoring": _concept(
        "word", "scores of the router", "scoring_func score_function moe_router_activation_func expert_selection_fn"
    ),
    "groups": _concept("count", "groups of experts", "n_group num_expert_group"),
    "groups_per_token": _concept("count", "groups a token uses", "topk_group"),
    "router_bias": _concept(
        "flag", "a bias on the choice of experts", "use_routing_bias use_moe_router_bias moe_router_enable_expert_bias"
    ),
    "choice": _concept("word", "how experts are chosen", "topk_method"),
    "router_scale": _concept(
        "ratio", "factor on the weights of experts",
        "routed_scaling_factor route_scale router_scaling_factor moe_routed_scaling_factor moe_router_scaling_factor"
    ),
    "normalised": _concept("flag", "weights of the chosen experts are made to sum to 1", "norm_topk_prob moe_renormalize"),
    # Prediction of further tokens.
    "mtp": _concept(
        "count", "layers that predict further tokens", "num_nextn_predict_layers num_mtp_layers mtp_num_hidden_layers"
    ),
    "mtp_modules": _concept("count", "modules that predict further tokens", "num_mtp_modules"),
    "mtp_used": _concept("flag", "layers that predict further tokens exist", "use_mtp"),
    "mtp_transformer": _concept("count", "decoder layers of one such module", "mtp_transformer_layers"),
    "mtp_experts": _concept("size", "experts of such a layer", "dspark_n_routed_experts"),
    "mtp_embeddings": _concept("flag", "such a layer has an embedding of its own", "mtp_use_dedicated_embeddings"),
    "mtp_pattern": _concept("any", "parts of such a layer", "mtp_hybrid_override_pattern mtp_layers_block_type"),
}  # fmt: skip

# Keys of a tower (a nested config beside the text's). Read with these spellings and no others.
TOWER_CONCEPTS: dict[str, Concept] = {
    "hidden": _concept("size", "width of the tower", "vt_hidden_size hidden_size embed_dim width d_model"),
    "depth": _concept(
        "size", "layers of the tower", "vt_num_hidden_layers num_hidden_layers depth n_layers layers encoder_layers"
    ),
    "heads": _concept("size", "heads of the tower", "vt_num_attention_heads num_attention_heads num_heads"),
    "attention_width": _concept("size", "width of query, key and value", "qkv_hidden_size"),
    "inner": _concept("size", "inner width of the feed-forward", "vt_intermediate_size intermediate_size encoder_ffn_dim"),
    "inner_ratio": _concept("ratio", "inner width of the feed-forward, relative", "mlp_ratio"),
    "activation": _concept("word", "activation", "hidden_act activation_func"),
    "gated_activation": _concept("word", "activation of a gated feed-forward", "hidden_activation"),
    "patch": _concept("any", "pixels along a patch", "patch_size"),
    "frames": _concept("size", "frames of a patch", "temporal_patch_size patch_temporal"),
    "channels": _concept("size", "channels of a pixel", "num_channels in_channels in_chans"),
    "position_rows": _concept("size", "rows of a table of positions", "num_position_embeddings position_embedding_size"),
    "position_height": _concept("size", "rows of a grid of positions", "init_pos_emb_height pos_emb_height posemb_grid_size"),
    "position_width": _concept("size", "columns of a grid of positions", "init_pos_emb_width pos_emb_width"),
    "merge": _concept(
        "any", "patches merged along a side", "spatial_merge_size merge_kernel_size merge_size adapter_merge_size"
    ),
    "out": _concept("size", "width the tower hands over", "text_hidden_size out_hidden_size adapter_out_dim"),
    "deep": _concept("items", "layers whose output is handed over too", "deepstack_visual_indexes"),
    "experts": _concept("count", "experts of a layer", "num_local_experts"),
    "expert_width": _concept("size", "inner width of an expert", "moe_intermediate_size"),
    "per_token": _concept("size", "experts a token uses", "num_experts_per_tok"),
    "feed_types": _concept("items", "dense or experts, for each layer", "mlp_layer_types"),
    "per_layer": _concept("any", "keys that differ in single layers", "per_layer_config"),
}  # fmt: skip

# Names of nested configs: the text decoder, and what stands beside it.
TEXT_CONFIGS = ("text_config", "llm_config", "language_config", "thinker_config")
TOWER_CONFIGS = {"vision_config": "vision", "audio_config": "audio", "visual": "vision", "encoder_config": "encoder"}

# Keys of a tower that its estimate leaves aside: biases, positions and pictures.
TOWER_ASIDE = frozenset({
    "attention_bias", "attn_bias", "linear_bias", "mlp_bias", "patch_embed_proj_bias", "head_dim", "global_head_dim",
    "num_key_value_heads", "image_size", "max_position_embeddings", "init_pos_emb_time", "pos_emb_time", "pos_emb_type",
    "pos_emb_interpolation_mode", "video_attn_type", "norm_type", "mlp_type", "layer_types", "rope_mode", "standardize",
    "use_clipped_linears", "default_output_length", "max_image_tokens", "min_pixels", "max_wh_ratio", "vocab_size",
    "vision_segment_max_frames", "router_scaling_factor", "spatial_merge_size", "temporal_patch_size", "sampling_rate",
    "hop_length", "feature_size", "n_mel_bins", "hidden_act", "mlp_ratio",
})  # fmt: skip

# Meanings that decide nothing where a model has no experts, no heads of ordinary attention, or no layer with an indexer.
WITHOUT_EXPERTS = (
    "experts", "per_token", "expert_width", "shared", "shared_width", "groups", "groups_per_token", "normalised",
    "router_scale", "scoring", "choice", "router_bias", "experts_beside", "expert_hidden",
)  # fmt: skip
WITH_LATENT_ROWS = ("head_dim", "kv_heads", "qk_dim")
WITHOUT_INDEXER = ("index_heads", "index_dim", "index_topk", "index_types")

# Activations whose feed-forward has no gate: two matrices instead of three.
PLAIN_ACTIVATIONS = frozenset({
    "relu", "relu2", "gelu", "gelu_new", "gelu_fast", "gelu_python", "gelu_pytorch_tanh", "quick_gelu",
    "xielu",
})  # fmt: skip
# The spelling `hidden_activation` belongs to models whose gelu is gated.
GATED_SPELLINGS = frozenset({"hidden_activation"})

_POSITION, _ROUTE, _NUMBERS = "positions", "routing", "values inside a layer"
BEHAVIOUR: dict[str, str] = {
    **dict.fromkeys((
        "rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor", "rotary_dim", "rope_interleave",
        "indexer_rope_interleave", "compress_rope_theta", "layer_rope_theta", "mla_use_nope", "use_mrope",
        "initial_context_length", "original_max_position_embeddings", "swa_rope_theta", "rope_local_base_freq",
        "log_scaling_alpha", "log_scaling_n_floor", "query_pre_attn_scalar", "attn_scale", "floor_scale", "rotary_emb_base",
        "attn_temperature_tuning", "attention_scaling", "rope_type", "alibi", "position_embedding_type",
    ), _POSITION),
    **dict.fromkeys((
        "use_grouped_topk", "num_hash_layers", "moe_router_logit_softcapping", "moe_apply_router_weight_on_input",
        "router_logit_softcapping", "enable_moe_fp32_combine", "shared_expert_combination_strategy", "use_gate",
        "moe_norm_min", "mup_enabled", "rms_norm_eps_moe_gate",
    ), _ROUTE),
    **dict.fromkeys((
        "rms_norm_eps", "norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "swiglu_limit", "swiglu_alpha",
        "swiglu_limits", "swiglu_limits_shared", "final_logit_softcapping", "attn_logit_softcapping", "logit_scale",
        "embedding_multiplier_scale", "output_multiplier_scale", "output_multiplier", "attention_value_scale",
        "activation_situ_beta", "activation_situ_linear_beta", "time_step_limit", "gate_lower_bound", "kda_lower_bound",
        "linear_lower_bound", "hc_eps", "hc_sinkhorn_iters", "hc_magnitude", "residual_multiplier",
        "attention_multiplier", "embedding_multiplier", "logits_scaling", "full_attn_alpha_factor", "full_attn_beta_factor",
        "linear_attn_alpha_factor", "linear_attn_beta_factor", "mlp_alpha_factor", "mlp_beta_factor", "kda_safe_gate",
        "mlp_gate_softcap", "mlp_up_softcap", "qk_scale_factor", "qk_l2_clip_threshold", "rel_l2_clip_threshold",
        "logits_mup_width_multiplier", "post_norm_eps", "output_gate_type", "residual_gate_temperature",
        "use_bidirectional_attention", "learnable_sink_init", "residual_in_fp32", "block_size", "chunk_size",
        "mamba_chunk_size", "rms_norm", "clip_qkv",
    ), _NUMBERS),
    **dict.fromkeys((
        "sparse_block_size", "sparse_topk_blocks", "sparse_init_block", "sparse_local_block", "sparse_score_type",
        "sparse_disable_index_value", "use_sparse_attention", "index_topk_freq", "index_topk_pattern", "index_block_size",
        "index_topk_blocks", "index_local_blocks", "index_skip_topk_offset", "index_kpool_always_select_tail",
        "index_share_for_mtp_iteration", "candidate_block_size", "candidate_source_layer_id", "candidate_topk_blocks",
    ), "which tokens sparse attention lets through"),
    **dict.fromkeys((
        "dspark_block_size", "dspark_num_experts_per_tok", "dspark_noise_token_id", "mtp_hidden_states_first",
        "chain_hidden_post_norm",
    ), "prediction of further tokens"),
    **dict.fromkeys(("expert_dtype", "quantization_config", "compression_config"), "how weights are stored"),
    **dict.fromkeys((
        "multimodal_projector_bias", "projector_hidden_act", "projector_hidden_size", "projector_bias", "merged_hidden_size",
        "projection_hidden_size", "projection_layer_norm_eps", "projector_ln_eps", "mm_hidden_size", "mm_projector_type",
        "merge_type", "image_token_compression_method", "projection_dim", "projection_hidden_dim", "adapter_in_dim",
        "projection_intermediate_size", "downsample_ratio", "pooling_kernel_size", "merger_type", "adapter_input_size",
    ), "how a tower joins the text"),
}  # fmt: skip

_RECORDS, _TRAINING, _GENERATION, _KERNEL = (
    "a record about the file", "training alone", "a default for generation", "which kernel or switch a program uses",
)  # fmt: skip
INERT: dict[str, str] = {
    **dict.fromkeys((
        "model_type", "architectures", "auto_map", "transformers_version", "torch_dtype", "dtype", "_name_or_path",
        "name_or_path", "_commit_hash", "id2label", "label2id", "num_labels", "problem_type", "tokenizer_class", "prefix",
        "unsloth_version", "unsloth_fixed", "finetuning_task", "task_specific_params", "pruned_heads", "is_encoder_decoder",
        "is_decoder", "add_cross_attention", "cross_attention_hidden_size", "tie_encoder_decoder", "torchscript",
        "use_bfloat16", "tf_legacy_loss", "image_placeholder", "video_placeholder", "image_seq_length", "video_seq_length",
        "ignore_index", "vision_soft_tokens_per_image", "language_model_only", "num_reward_heads", "image_grid_pinpoints",
        "process_image_mode", "vision_feature_layer", "vision_feature_select_strategy", "mtp_loss_scaling_factor",
    ), _RECORDS),
    **dict.fromkeys((
        "initializer_range", "initializer_factor", "attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop",
        "attn_pdrop", "dropout", "router_aux_loss_coef", "aux_loss_alpha", "seq_aux", "router_jitter_noise",
        "output_router_logits", "rescale_prenorm_residual", "time_step_min", "time_step_max", "time_step_floor",
        "pretraining_tp", "router_z_loss_coef", "hidden_dropout_prob", "attention_probs_dropout_prob", "seed",
        "classifier_dropout", "z_loss_coef", "layerdrop", "init_std", "norm_topk_prob_eps", "layer_scale_init_value",
    ), _TRAINING),
    **dict.fromkeys((
        "max_length", "min_length", "do_sample", "early_stopping", "num_beams", "num_beam_groups", "diversity_penalty",
        "temperature", "top_k", "top_p", "typical_p", "repetition_penalty", "length_penalty", "no_repeat_ngram_size",
        "encoder_no_repeat_ngram_size", "bad_words_ids", "num_return_sequences", "output_scores", "return_dict_in_generate",
        "forced_bos_token_id", "forced_eos_token_id", "remove_invalid_values", "exponential_decay_length_penalty",
        "suppress_tokens", "begin_suppress_tokens", "return_dict", "output_attentions", "output_hidden_states", "use_cache",
    ), _GENERATION),
    **dict.fromkeys((
        "chunk_size_feed_forward", "attn_implementation", "_attn_implementation", "experts_implementation", "ep_size",
        "use_mamba_kernels", "use_mambapy", "use_associative_scan", "num_logits_to_keep", "moe_shared_expert_overlap",
        "mamba_hidden_act", "use_unified_vision_chunk",
    ), _KERNEL),
}  # fmt: skip
INERT_ENDINGS = ("_token_id", "_token_index", "_token_ids")
