"""Config keys that need no class to be known: what stages here read them for, and what is alike for every model. No torch."""

import importlib.util
import re
from functools import cache
from pathlib import Path

# Keys that stages here read themselves, whatever the class does with them: key -> what it is read for.
STORAGE_READERS = {
    "model_type": "the choice of class", "architectures": "the choice of class", "auto_map": "code of the release",
    "quantization_config": "what the release stores", "compression_config": "what the release stores",
    "torch_dtype": "the dtype", "dtype": "the dtype", "tie_word_embeddings": "tied parameters",
    "eos_token_id": "stop tokens", "per_layer_config": "layers that differ",
}  # fmt: skip
# Known to transformers for any model, or records about the file itself; nothing of the model's structure.
GENERIC = frozenset({
    "transformers_version", "_name_or_path", "name_or_path", "_commit_hash", "id2label", "label2id", "num_labels",
    "problem_type", "output_attentions", "output_hidden_states", "return_dict", "use_cache", "attn_implementation",
    "_attn_implementation", "experts_implementation", "is_encoder_decoder", "is_decoder", "add_cross_attention",
    "cross_attention_hidden_size", "chunk_size_feed_forward", "tie_encoder_decoder", "pruned_heads", "torchscript",
    "use_bfloat16", "tf_legacy_loss", "finetuning_task", "task_specific_params", "tokenizer_class", "prefix", "bos_token_id",
    "pad_token_id", "sep_token_id", "decoder_start_token_id", "unsloth_version", "unsloth_fixed", "tie_last_hidden_states",
})  # fmt: skip


def known_elsewhere(key: str) -> bool:
    """Whether any config class of the installed transformers has this word: then the key is not new, only unused here."""
    return re.search(rf"\b{re.escape(key)}\b", _all_config_sources()) is not None


@cache
def _all_config_sources() -> str:
    spec = importlib.util.find_spec("transformers")  # found, not imported
    assert spec is not None and spec.submodule_search_locations, "transformers is a dependency"
    models = Path(next(iter(spec.submodule_search_locations))) / "models"
    return "\n".join(path.read_text(encoding="utf-8") for path in sorted(models.glob("*/configuration_*.py")))
