"""A model's config in, the settings a GGUF says it by out; and what a reader of the file makes another value of.

Which keys there are, and which of the config's values they hold, is transformers' own table, read backwards. Keys that its
readers do not look at but others of the format need (sizes of heads and experts, scaling of rotary positions, caps) are added
under the names the gguf package has for them. Not here: the tokenizer (`vocabulary`), tensors.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dayzero.core.errors import DayZeroError, one_line
from dayzero.model.keys.tables import INERT, INERT_ENDINGS
from dayzero.weights.gguf.source import name_tables_kept

# Beside what is inert for any stage: layer_types is made of it, and is compared itself.
MADE_INTO_OTHERS = frozenset({"max_window_layers", "sliding_window_pattern", "use_sliding_window"})
# Scaling of rotary positions that the format's own keys say whole. Whatever else a config has there is refused.
SCALINGS = ("linear", "yarn")


@dataclass(kw_only=True, slots=True)
class Settings:
    """`values` by the format's key; `read`: those that transformers reads, by its name. `held`: the config's keys which some
    key of the file says, read by transformers or not."""

    architecture: str
    read: dict[str, Any] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    held: set[str] = field(default_factory=set)


def architecture_of(instance: Any) -> str:
    """The format's name for an instance's architecture. Raises DayZeroError for one that the format does not have.

    Which name transformers takes for which type stands inside its function, so it is watched asking for it.
    """
    import gguf
    from transformers.modeling_gguf_pytorch_utils import TensorProcessor

    asked: list[Any] = []
    original = gguf.get_tensor_name_map

    def watched(architecture: Any, num_blocks: int) -> Any:
        asked.append(architecture)
        return original(architecture, num_blocks)

    gguf.get_tensor_name_map = watched  # type: ignore[assignment]
    try:
        names_of(instance, TensorProcessor())
    finally:
        gguf.get_tensor_name_map = original
    return gguf.MODEL_ARCH_NAMES[asked[0]]


def names_of(instance: Any, processor: Any) -> dict[str, str]:
    """transformers' map from the format's names to the instance's."""
    from transformers.modeling_gguf_pytorch_utils import get_gguf_hf_weights_map

    try:
        with name_tables_kept():
            return get_gguf_hf_weights_map(instance, processor)
    except Exception as error:  # transformers raises many types, all of them about this architecture
        raise _unknown(instance.config.model_type, one_line(error)) from error


def processor_of(settings: Settings) -> Any:
    """transformers' processor for a file with these settings."""
    from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor

    return TENSOR_PROCESSORS.get(settings.architecture, TensorProcessor)(config=dict(settings.read))


def _unknown(model_type: str, got: str) -> DayZeroError:
    return DayZeroError(f"{model_type} has no GGUF form", got=got,
                        want="an architecture that the gguf package has and transformers reads",
                        fix="export to another format: `dayzero convert --to hf`")  # fmt: skip


def settings_of(config: Any, architecture: str) -> Settings:
    """Raises DayZeroError where transformers has no table of keys."""
    from gguf.constants import Keys
    from transformers.modeling_gguf_pytorch_utils import GGUF_TO_TRANSFORMERS_MAPPING

    tables = GGUF_TO_TRANSFORMERS_MAPPING["config"]
    table = tables.get(config.model_type, tables.get(architecture))
    if table is None:
        raise _unknown(config.model_type, f"transformers has no table of keys for {architecture}")
    made = Settings(architecture=architecture)
    for key, name in table.items():
        if name is not None and (value := _value(config, name)) is not None:
            made.values[f"{architecture}.{key}"] = made.read[name] = value
            made.held.add(_flat_name(config, name))
    head_dim = _value(config, "head_dim")
    if head_dim is None and _value(config, "num_attention_heads"):
        head_dim = config.hidden_size // config.num_attention_heads
    rotary = _value(config, "partial_rotary_factor")
    others = {
        Keys.LLM.VOCAB_SIZE: "vocab_size", Keys.LLM.CONTEXT_LENGTH: "max_position_embeddings",
        Keys.LLM.FEED_FORWARD_LENGTH: "intermediate_size", Keys.Attention.HEAD_COUNT_KV: "num_key_value_heads",
        Keys.Rope.FREQ_BASE: "rope_theta", Keys.Attention.KEY_LENGTH: "head_dim", Keys.Attention.VALUE_LENGTH: "head_dim",
        Keys.LLM.EXPERT_FEED_FORWARD_LENGTH: "moe_intermediate_size", Keys.Attention.SLIDING_WINDOW: "sliding_window",
        Keys.LLM.EXPERT_SHARED_FEED_FORWARD_LENGTH: "shared_expert_intermediate_size",
        Keys.LLM.ATTN_LOGIT_SOFTCAPPING: "attn_logit_softcapping", Keys.LLM.FINAL_LOGIT_SOFTCAPPING: "final_logit_softcapping",
    }  # fmt: skip
    for pattern, name in others.items():
        value = head_dim if name == "head_dim" else _value(config, name)
        key = pattern.format(arch=architecture)
        if isinstance(value, (int, float)) and made.values.setdefault(key, value) == value:
            made.held.add(_flat_name(config, name))
    if head_dim is not None:
        turned = head_dim if rotary is None else int(head_dim * rotary)
        made.values.setdefault(Keys.Rope.DIMENSION_COUNT.format(arch=architecture), turned)
        made.held |= {"partial_rotary_factor", "rope_parameters.partial_rotary_factor"}
    _add_scaling(made, config)
    return made


def _add_scaling(made: Settings, config: Any) -> None:
    from gguf.constants import Keys

    rope = getattr(config, "rope_parameters", None) or {}
    kind = rope.get("rope_type", "default")
    if kind not in SCALINGS:
        return  # a kind that is not the default is a difference, found when the file is read back
    says = {"rope_type": Keys.Rope.SCALING_TYPE, "factor": Keys.Rope.SCALING_FACTOR,
            "original_max_position_embeddings": Keys.Rope.SCALING_ORIG_CTX_LEN,
            "beta_fast": Keys.Rope.SCALING_YARN_BETA_FAST, "beta_slow": Keys.Rope.SCALING_YARN_BETA_SLOW}  # fmt: skip
    for name, key in says.items():
        if rope.get(name) is not None:
            value = rope[name]
            made.values[key.format(arch=made.architecture)] = float(value) if name.startswith(("factor", "beta")) else value
            made.held.add(f"rope_parameters.{name}")


def differences(config: Any, read: Any) -> dict[str, tuple[Any, Any]]:
    """Where a config read back differs from the source's in anything that decides a result: key -> (source, read)."""
    if config.model_type != read.model_type:
        return {"model_type": (config.model_type, read.model_type)}
    ours, theirs = _flat(config.to_dict()), _flat(read.to_dict())
    found, plain = {}, type(config)()
    for key in sorted({*ours, *theirs}):
        name = key.partition(".")[0]
        if name in INERT or name in MADE_INTO_OTHERS or name.endswith(INERT_ENDINGS) or name.startswith("_"):
            continue
        if key not in ours and not hasattr(plain, name):
            continue  # a default of the reader's own, which the class does not know
        if not _same(ours.get(key), theirs.get(key)):
            found[key] = (ours.get(key), theirs.get(key))
    return found


def _same(one: Any, other: Any) -> bool:
    """Floats as the file has them, in 32 bits."""
    if isinstance(one, float) and isinstance(other, (int, float)):
        return bool(np.float32(one) == np.float32(other))
    return json.dumps(one, default=str, sort_keys=True) == json.dumps(other, default=str, sort_keys=True)


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    made: dict[str, Any] = {}
    for key, value in values.items():
        made |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return made


def _rotary(config: Any) -> dict[str, Any]:
    """How positions are rotated; of layers that differ in it, those with full attention, which the format's keys speak of."""
    rope = getattr(config, "rope_parameters", None) or {}
    return rope.get("full_attention", rope)


def _value(config: Any, name: str) -> Any:
    value = getattr(config, name, None)
    return _rotary(config).get(name) if value is None else value


def _flat_name(config: Any, name: str) -> str:
    """The name a value has in the config's own dict: some classes give it a second one."""
    name = (getattr(config, "attribute_map", None) or {}).get(name, name)
    if getattr(config, name, None) is None and name in _rotary(config):
        nested = "full_attention." if "full_attention" in (getattr(config, "rope_parameters", None) or {}) else ""
        return f"rope_parameters.{nested}{name}"
    return name
