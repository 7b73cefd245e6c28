"""A release's config and its config object in, the keys that somebody reads and those that nobody does out.

A key is consumed when its config class declares it (a field, an alias, a nested config), when the class takes it out of its
arguments, or when building the model reads it from the object. What transformers knows for every model (generation
defaults, bookkeeping) is consumed too. Everything else is listed with its dotted path: a key that changes the model and
that nobody reads is how a new release goes wrong silently.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from transformers.configuration_utils import PreTrainedConfig
from transformers.generation.configuration_utils import GenerationConfig

from dayzero.model.estimate import MTP
from dayzero.model.resolve import STORAGE_KEYS

# Read by transformers for any model, or records about the file itself.
GENERIC = frozenset({
    "model_type", "architectures", "auto_map", "transformers_version", "torch_dtype", "dtype", "_name_or_path",
    "name_or_path", "_commit_hash", "quantization_config", "compression_config", "id2label", "label2id", "num_labels",
    "problem_type", "output_attentions", "output_hidden_states", "return_dict", "use_cache", "attn_implementation",
    "_attn_implementation", "experts_implementation", "is_encoder_decoder", "is_decoder", "add_cross_attention",
    "cross_attention_hidden_size", "chunk_size_feed_forward", "tie_encoder_decoder", "tie_word_embeddings", "pruned_heads",
    "torchscript", "use_bfloat16", "tf_legacy_loss", "finetuning_task", "task_specific_params", "tokenizer_class",
    "prefix", "bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "decoder_start_token_id", "unsloth_version",
    "unsloth_fixed", "per_layer_config", "tie_last_hidden_states",
})  # fmt: skip
ROPE = frozenset({"rope_scaling", "rope_theta", "rope_parameters", "partial_rotary_factor"})


@contextmanager
def recorded_reads() -> Iterator[set[str]]:
    """While active, names of attributes that are read from any config object are collected."""
    seen: set[str] = set()
    original = PreTrainedConfig.__getattribute__

    def reading(self: PreTrainedConfig, name: str) -> Any:
        seen.add(name)
        return original(self, name)

    PreTrainedConfig.__getattribute__ = reading  # type: ignore[method-assign]
    try:
        yield seen
    finally:
        PreTrainedConfig.__getattribute__ = original  # type: ignore[method-assign]


def key_usage(data: Mapping[str, Any], config: PreTrainedConfig, reads: set[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(consumed, unconsumed) dotted paths of every key of `data`, the config.json that `config` was made from."""
    consumed: list[str] = []
    unconsumed: list[str] = []
    _walk(data, config, reads, "", consumed, unconsumed)
    return tuple(sorted(consumed)), tuple(sorted(unconsumed))


def _walk(
    data: Mapping[str, Any], config: PreTrainedConfig, reads: set[str], prefix: str, consumed: list[str], unconsumed: list[str]
) -> None:
    declared = {item.name for item in dataclasses.fields(config)} if dataclasses.is_dataclass(config) else set()
    declared |= set(config.attribute_map) | set(config.attribute_map.values()) | set(config.sub_configs)
    generation = set(GenerationConfig._get_default_generation_params())
    for key, value in data.items():
        nested = getattr(config, key, None)
        if isinstance(value, Mapping) and isinstance(nested, PreTrainedConfig):
            consumed.append(prefix + key)
            _walk(value, nested, reads, f"{prefix}{key}.", consumed, unconsumed)
            continue
        known = key in declared or key in GENERIC or key in generation or key in STORAGE_KEYS or key in MTP
        rotary = key in ROPE and ("rope_parameters" in declared or hasattr(config, "rope_parameters"))
        taken = key not in vars(config) and not known  # an argument that the class consumed while it was made
        property_of_class = isinstance(getattr(type(config), key, None), property)
        read = known or rotary or taken or property_of_class or key in reads
        (consumed if read else unconsumed).append(prefix + key)
