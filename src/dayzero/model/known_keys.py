"""Config keys that need no class to be known: what stages here read them for, and what is alike for every model. No torch."""

import ast
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


# What a configuration file declares, once its prose (strings in triple quotes, comments) is gone: attributes of a class and
# parameters (alone on a line, or in one), what `self` is given, keys of a dict, and quoted names that are no English words.
COMMENT = re.compile(r"#[^\n]*")
DECLARED = re.compile(
    r"^    (\w+)\s*(?::|=[^=])|^        (\w+)\s*(?::[^\n]*|=[^=][^\n]*),$|\bself\.(\w+)|[\"'](\w+_\w+)[\"']"
    r"|[\"'](\w+)[\"']\s*:|(?:pop|get)\(\s*[\"'](\w+)|(?:getattr|setattr)\(\w+,\s*[\"'](\w+)",
    re.MULTILINE,
)
SIGNATURE = re.compile(r"def \w+\(([^)]*)\)")
PARAMETER = re.compile(r"(\w+)\s*(?=[:=,]|$)")


def known_elsewhere(key: str) -> bool:
    """Whether any config class of the installed transformers declares this name: then the key is not new, only unused here.

    A name that merely occurs in its prose does not count: new keys are English words too.
    """
    return key in _declared_names()


@cache
def known_layer_words() -> frozenset[str]:
    """Kinds of layers that transformers lists, old names included, read from its source without importing it."""
    listed: set[str] = set()
    for node in ast.parse((_transformers() / "configuration_utils.py").read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and any("LAYER_TYPE" in getattr(target, "id", "") for target in node.targets):
            listed |= {item.value for item in ast.walk(node.value) if isinstance(item, ast.Constant)}  # type: ignore[misc]
    return frozenset(word for word in listed if isinstance(word, str))


@cache
def classes_of_type() -> dict[str, frozenset[str]]:
    """model_type -> names of the classes that transformers' own tables give it."""
    text = (_transformers() / "models" / "auto" / "modeling_auto.py").read_text(encoding="utf-8")
    found: dict[str, set[str]] = {}
    for model_type, name in re.findall(r'\(\s*"([\w.-]+)",\s*"(\w+)",?\s*\)', text):
        found.setdefault(model_type, set()).add(name)
    return {model_type: frozenset(names) for model_type, names in found.items()}


@cache
def _declared_names() -> frozenset[str]:
    names: set[str] = set()
    for path in sorted((_transformers() / "models").glob("*/configuration_*.py")):
        text = COMMENT.sub("", " ".join(path.read_text(encoding="utf-8").split('"""')[::2]))
        names.update(name for groups in DECLARED.findall(text) for name in groups if name)
        for signature in SIGNATURE.findall(text):
            names.update(PARAMETER.findall(signature))
    return frozenset(names)


def _transformers() -> Path:
    spec = importlib.util.find_spec("transformers")  # found, not imported
    assert spec is not None and spec.submodule_search_locations, "transformers is a dependency"
    return Path(next(iter(spec.submodule_search_locations)))
