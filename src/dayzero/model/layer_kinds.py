"""Observed caches and roles of each decoder layer in, layer kinds out: what mixes tokens, what feeds forward, what is kept.

Where the cache could be measured (`cache_probe`) the kinds follow from it. Where it could not, `assumed_caches` derives what
it can from widely used config keys, and the caller marks the description provisional.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace

from torch import nn
from transformers.configuration_utils import PreTrainedConfig

from dayzero.core.errors import DayZeroError
from dayzero.core.model import CacheKind, CacheSpec, FeedForwardKind, LayerKind, MixerKind, Parameter
from dayzero.model.cache_probe import LayerCache
from dayzero.model.config_keys import attention_shape

GROWING = frozenset({"full", "sliding", "chunked", "latent"})


def refine(spec: CacheSpec, *, latent_rank: int | None, rope_dim: int | None, chunked: bool) -> CacheSpec:
    """Names growing rows by what they hold: one compressed row for all heads is latent, a sliding chunk is chunked."""
    if spec.kind == "full" and latent_rank and spec.heads == 1 and spec.elements_per_token in (latent_rank, rope_dim):
        return replace(spec, kind="latent", heads=0)
    if spec.kind == "sliding" and chunked:
        return replace(spec, kind="chunked")
    return spec


def refined_caches(caches: Sequence[LayerCache], text: PreTrainedConfig) -> list[LayerCache]:
    rank = getattr(text, "kv_lora_rank", None)
    rope = getattr(text, "qk_rope_head_dim", None)
    types = layer_types(text, len(caches))
    return [
        replace(
            cache,
            specs=tuple(
                refine(spec, latent_rank=rank, rope_dim=rope, chunked="chunked" in types[index]) for spec in cache.specs
            ),
        )
        for index, cache in enumerate(caches)
    ]


def layer_types(text: PreTrainedConfig, num_layers: int) -> list[str]:
    """transformers' own word for each layer, where the config has them."""
    types = getattr(text, "layer_types", None)
    return [str(item) for item in types] if isinstance(types, (list, tuple)) and len(types) == num_layers else [""] * num_layers


def mixer_kind(cache: LayerCache, layer: nn.Module, type_word: str) -> MixerKind:
    kinds = {spec.kind for spec in cache.specs}
    constant = {spec.kind for spec in cache.specs if spec.kind in ("convolution", "state") and spec.elements_per_sequence}
    growing = kinds & GROWING
    if "compressed" in kinds:
        return "compressed"
    if "latent" in kinds:
        return "sparse_latent" if "indexer" in kinds else "latent"
    if growing and "state" in constant:
        return "hybrid"
    if growing:
        return "sliding" if "sliding" in kinds else "chunked" if "chunked" in kinds else "full"
    if constant:
        # The direct path from input to output, D, is what state-space layers have and linear attention has not.
        words = {name.rpartition(".")[2] for mixer in cache.mixers for name, _ in layer.get_submodule(mixer).named_parameters()}
        return "ssm" if "D" in words else "linear"
    if cache.mixers:  # it reads what another layer keeps
        return "sliding" if "sliding" in type_word else "chunked" if "chunked" in type_word else "full"
    return "none"


def feed_forward_kind(parameters: Sequence[Parameter]) -> FeedForwardKind:
    roles = {item.role for item in parameters}
    if roles & {"expert", "router"}:
        return "moe"
    return "dense" if roles & {"mlp", "shared_expert"} else "none"


def group_layers(
    layers: Sequence[nn.Module], caches: Sequence[LayerCache], parameters: Sequence[Parameter], text: PreTrainedConfig
) -> tuple[LayerKind, ...]:
    """Layers with the same mixer, feed-forward, cache and parameter shapes are one kind, named by the first two."""
    by_layer: list[list[Parameter]] = [[] for _ in layers]
    for item in parameters:
        if item.layer is not None and item.layer < len(layers):
            by_layer[item.layer].append(item)
    types = layer_types(text, len(layers))
    groups: dict[tuple[MixerKind, FeedForwardKind, tuple[CacheSpec, ...], Hashable], list[int]] = {}
    for index, layer in enumerate(layers):
        mixer = mixer_kind(caches[index], layer, types[index])
        shapes = tuple((item.name.split(f".{index}.", 1)[-1], item.shape) for item in by_layer[index])
        groups.setdefault((mixer, feed_forward_kind(by_layer[index]), caches[index].specs, shapes), []).append(index)
    kinds: list[LayerKind] = []
    for (mixer, feed_forward, specs, _), indices in groups.items():
        name = f"{mixer}+{feed_forward}"
        same = sum(kind.name.partition("#")[0] == name for kind in kinds)
        kinds.append(
            LayerKind(
                name=f"{name}#{same + 1}" if same else name,
                mixer=mixer,
                feed_forward=feed_forward,
                layers=tuple(indices),
                cache=specs,
            )
        )
    return tuple(kinds)


def attention_heads(
    layers: Sequence[nn.Module], caches: Sequence[LayerCache], text: PreTrainedConfig
) -> dict[int, tuple[int, int]]:
    """(attention heads, key/value heads) of each layer whose mixer attends over keys and values or a latent row."""
    found = {}
    for index, (layer, cache) in enumerate(zip(layers, caches, strict=True)):
        growing = [spec for spec in cache.specs if spec.kind in GROWING]
        if not growing or any(spec.kind in ("state", "convolution", "compressed") for spec in cache.specs):
            continue
        module = next(
            (
                item
                for mixer in cache.mixers
                for item in layer.get_submodule(mixer).modules()
                if isinstance(getattr(item, "num_key_value_groups", None), int)
            ),
            None,
        )
        kv_heads = max(spec.heads for spec in growing)
        heads = kv_heads * int(module.num_key_value_groups) if module is not None and kv_heads else None
        if heads is None:
            heads = getattr(text, "num_attention_heads", None)
        if isinstance(heads, int) and heads > 0:
            found[index] = (heads, kv_heads or heads)
    return found


def with_sharded_heads(kinds: Sequence[LayerKind], parameters: Sequence[Parameter]) -> tuple[LayerKind, ...]:
    """Cache heads are only divided where the projections that fill them are: elsewhere every rank keeps all of it."""
    cut = {item.layer for item in parameters if item.role == "attention" and item.shard.tensor_dim is not None}
    return tuple(
        kind if kind.layers[0] in cut else replace(kind, cache=tuple(replace(spec, heads=0) for spec in kind.cache))
        for kind in kinds
    )


def assumed_caches(layers: Sequence[nn.Module], text: PreTrainedConfig, dtype: str) -> list[LayerCache]:
    """What the config's keys say each layer keeps. Layers with constant states are left without: their sizes are not known."""
    types = layer_types(text, len(layers))
    rank, rope = getattr(text, "kv_lora_rank", None), getattr(text, "qk_rope_head_dim", None)
    window = getattr(text, "sliding_window", None) or getattr(text, "attention_chunk_size", None)
    keys = {
        name: getattr(text, name, None) for name in ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    }
    result = []
    for word in types:
        specs: tuple[CacheSpec, ...] = ()
        if "linear" in word or word in ("conv", "moe"):
            pass
        elif rank:
            specs = (
                CacheSpec(kind="latent", name="keys", dtype=dtype, elements_per_token=rank),
                CacheSpec(kind="latent", name="values", dtype=dtype, elements_per_token=rope or 0),
            )
        else:
            try:
                shape = attention_shape(keys)
            except DayZeroError:
                result.append(LayerCache(specs=(), mixers=()))
                continue
            limited = window if "sliding" in word or "chunked" in word else None
            kind: CacheKind = "chunked" if "chunked" in word else "sliding" if limited else "full"
            specs = tuple(
                CacheSpec(
                    kind=kind,
                    name=name,
                    dtype=dtype,
                    elements_per_token=shape.num_kv_heads * shape.head_dim,
                    window_tokens=limited,
                    heads=shape.num_kv_heads,
                )
                for name in ("keys", "values")
            )
        result.append(LayerCache(specs=specs, mixers=()))
    return result
