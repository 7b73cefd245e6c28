"""A config that no class can be had for in, a provisional description out, from keys whose meaning is common.

What can be known so: dense, mixture-of-experts and latent-attention sizes of a standard decoder, to a few percent. What
cannot: parameter names, anything a key does not say (norms, gates, convolutions, positions), cache layouts of new kinds.
Every key that was used is listed as consumed and every other as not. No torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dayzero.core.errors import DayZeroError
from dayzero.core.model import CacheSpec, Dimensions, LayerKind

LAYER_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
HIDDEN = ("hidden_size", "d_model", "n_embd", "dim")
HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
EXPERTS = ("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts")
PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "top_k_experts", "moe_k")
SHARED = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
EXPERT_WIDTH = (
    "moe_intermediate_size",
    "expert_ffn_hidden_size",
    "moe_ffn_hidden_size",
    "ffn_hidden_size",
    "intermediate_size",
)
DENSE_FIRST = ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index")
MTP = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers")


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    dimensions: Dimensions
    layer_kinds: tuple[LayerKind, ...]
    total_parameters: int
    active_parameters: int
    by_role: dict[str, int]
    consumed: tuple[str, ...]
    unknown: tuple[str, ...]


@dataclass(slots=True)
class _Keys:
    data: Mapping[str, Any]
    prefix: str
    used: set[str] = field(default_factory=set)

    def integer(self, *names: str, default: int | None = None) -> int | None:
        for name in names:
            value = self.data.get(name)
            if isinstance(value, int) and not isinstance(value, bool):
                self.used.add(self.prefix + name)
                return value
        return default

    def required(self, *names: str) -> int:
        value = self.integer(*names)
        if value is None or value < 1:
            raise DayZeroError(
                "this config says too little to describe the model",
                got=f"none of {', '.join(names)}",
                want="a positive integer",
                fix="use a transformers that knows the model, or add the key",
            )
        return value


def estimate(config: Mapping[str, Any], dtype: str) -> Estimate:
    """Raises DayZeroError when not even width, depth, heads and vocabulary are given."""
    nested = config.get("text_config")
    keys = _Keys(nested, "text_config.") if isinstance(nested, Mapping) else _Keys(config, "")
    hidden, depth, heads, vocabulary = (keys.required(*names) for names in (HIDDEN, LAYER_COUNTS, HEADS, ("vocab_size",)))
    head_dim = keys.integer("head_dim") or keys.integer("v_head_dim") or hidden // heads
    kv_heads = keys.integer("num_key_value_heads", "num_kv_heads", default=heads) or heads
    unknown: list[str] = []
    blocks = _block_kinds(keys, hidden, heads, kv_heads, head_dim, depth, unknown)
    experts = keys.integer(*EXPERTS, default=0) or 0
    per_token = keys.integer(*PER_TOKEN, default=0) or 0
    expert_width = keys.integer(*EXPERT_WIDTH) if experts else None
    shared = keys.integer(*SHARED, default=0) or 0 if experts else 0
    dense_width = keys.integer("intermediate_size", "ffn_dim", "n_inner", "d_ff")
    if dense_width is None:
        dense_width = 4 * hidden
        unknown.append("the width of the feed-forward layers (4 times the hidden size is assumed)")
    dense_first = keys.integer(*DENSE_FIRST, default=0) or 0 if experts else depth
    latent = keys.integer("moe_latent_size", "moe_hidden_size", "routed_expert_hidden_size")
    roles = {
        "embedding": vocabulary * hidden,
        "head": 0 if _tied(keys, config) else vocabulary * hidden,
        "norm": hidden * (2 * depth + 1),
    }
    active = sum(roles.values())
    kinds: dict[tuple[str, str], list[int]] = {}
    for layer in range(depth):
        mixer, mixer_size, _ = blocks[layer]
        roles["attention"] = roles.get("attention", 0) + mixer_size
        active += mixer_size
        if layer < dense_first or not experts:
            _add(roles, "mlp", 3 * hidden * dense_width)
            active += 3 * hidden * dense_width
            kinds.setdefault((mixer, "dense"), []).append(layer)
            continue
        assert expert_width is not None
        one, width = 3 * (latent or hidden) * expert_width, 3 * hidden * expert_width
        down_up = 2 * hidden * latent if latent else 0
        _add(roles, "expert", experts * one)
        _add(roles, "shared_expert", shared * width + down_up)
        _add(roles, "router", experts * hidden)
        active += per_token * one + shared * width + down_up + experts * hidden
        kinds.setdefault((mixer, "moe"), []).append(layer)
    cache_of = {mixer: specs for mixer, _, specs in blocks}
    for part in cache_of.values():
        if not part:
            unknown.append("the size of the constant state of its linear or state-space layers")
    made = tuple(
        LayerKind(name=f"{mixer}+{feed}", mixer=mixer, feed_forward=feed, layers=tuple(layers), cache=cache_of[mixer])  # type: ignore[arg-type]
        for (mixer, feed), layers in kinds.items()
    )
    made = tuple(_with_dtype(kind, dtype) for kind in made)
    dimensions = Dimensions(
        hidden_size=hidden,
        num_layers=depth,
        vocab_size=vocabulary,
        max_position_tokens=keys.integer("max_position_embeddings"),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=dense_width,
        num_experts=experts,
        num_experts_per_token=per_token,
        num_shared_experts=shared,
        num_mtp_layers=keys.integer(*MTP, default=0) or 0,
    )
    return Estimate(
        dimensions=dimensions,
        layer_kinds=made,
        total_parameters=sum(roles.values()),
        active_parameters=active,
        by_role=roles,
        consumed=tuple(sorted(keys.used)),
        unknown=tuple(dict.fromkeys(unknown)),
    )


def _add(roles: dict[str, int], role: str, number: int) -> None:
    roles[role] = roles.get(role, 0) + number


def _tied(keys: _Keys, config: Mapping[str, Any]) -> bool:
    keys.used.add(keys.prefix + "tie_word_embeddings")
    return bool(keys.data.get("tie_word_embeddings", config.get("tie_word_embeddings", False)))


def _block_kinds(
    keys: _Keys, hidden: int, heads: int, kv_heads: int, head_dim: int, depth: int, unknown: list[str]
) -> list[tuple[str, int, tuple[CacheSpec, ...]]]:
    """Per layer: mixer kind, its parameters, its cache."""
    rank = keys.integer("kv_lora_rank")
    if rank:
        rope, nope = (
            keys.integer("qk_rope_head_dim", default=64) or 64,
            keys.integer("qk_nope_head_dim", default=head_dim) or head_dim,
        )
        value, query_rank = keys.integer("v_head_dim", default=head_dim) or head_dim, keys.integer("q_lora_rank")
        query = hidden * query_rank + query_rank * heads * (nope + rope) if query_rank else hidden * heads * (nope + rope)
        gate = hidden * heads * value if keys.data.get("mla_use_output_gate") else 0
        size = query + hidden * (rank + rope) + rank * heads * (nope + value) + heads * value * hidden + gate
        attention: tuple[str, int, tuple[CacheSpec, ...]] = (
            "latent",
            size,
            (
                CacheSpec(kind="latent", name="keys", dtype="bfloat16", elements_per_token=rank),
                CacheSpec(kind="latent", name="values", dtype="bfloat16", elements_per_token=rope),
            ),
        )
    else:
        size = hidden * head_dim * (2 * heads + 2 * kv_heads)
        specs = tuple(
            CacheSpec(kind="full", name=name, dtype="bfloat16", elements_per_token=kv_heads * head_dim, heads=kv_heads)
            for name in ("keys", "values")
        )
        attention = ("full", size, specs)
    blocks: list[tuple[str, int, tuple[CacheSpec, ...]]] = [attention] * depth
    linear = keys.data.get("linear_attn_config")
    if isinstance(linear, Mapping) and isinstance(linear.get("kda_layers"), list):
        keys.used.add(keys.prefix + "linear_attn_config")
        wide = int(linear.get("num_heads", heads)) * int(linear.get("head_dim", head_dim))
        gate = hidden * wide if linear.get("use_full_rank_gate") else 2 * wide * int(linear.get("head_dim", head_dim))
        size = (
            4 * hidden * wide
            + gate
            + hidden * int(linear.get("num_heads", heads))
            + wide * int(linear.get("head_dim", head_dim))
        )
        unknown.append("low-rank gates and convolutions of its linear-attention layers")
        state = int(linear.get("num_heads", heads)) * int(linear.get("head_dim", head_dim)) ** 2
        kernel = int(linear.get("short_conv_kernel_size", 0))
        specs = (
            CacheSpec(kind="convolution", name="conv_states", dtype="bfloat16", elements_per_sequence=3 * wide * kernel),
            CacheSpec(kind="state", name="recurrent_states", dtype="float32", elements_per_sequence=state),
        )
        for number in linear["kda_layers"]:  # numbered from 1 in every release that has this key
            if isinstance(number, int) and 1 <= number <= depth:
                blocks[number - 1] = ("linear", size, specs)
    return blocks


def _with_dtype(kind: LayerKind, dtype: str) -> LayerKind:
    from dataclasses import replace

    return replace(kind, cache=tuple(replace(spec, dtype=dtype) if spec.dtype == "bfloat16" else spec for spec in kind.cache))
