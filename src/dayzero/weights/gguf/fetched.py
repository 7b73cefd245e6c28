"""A GGUF file in, an ordinary release folder out, after checking what was read against the file's own metadata.

transformers reads the weights and the config; it refuses `save_pretrained` on a model loaded that way, so the tensors are
copied into a fresh model. The tokenizer transformers builds from GGUF lacks the pre-tokenizer's splits, which are set
here from the file's `tokenizer.ggml.pre`. Weights are stored in bf16: a quantized GGUF holds no more than that.
Deliberately not done: streaming (this holds the whole model in memory); `convert` reads a GGUF through `source`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from dayzero.core.errors import DayZeroError
from dayzero.weights.files import Progress

SHARD_BYTES = 100 * 10**6  # small shards, so that even a small model is an ordinary sharded release

# `tokenizer.ggml.pre` -> the pre-tokenizers before byte-level splitting, as the format's reference reader defines it.
PRE_TOKENIZERS: dict[str, tuple[str, ...]] = {"smollm": ("digits",), "gpt-2": (), "default": ()}

CONTROL_TOKEN = 3  # gguf TokenType.CONTROL

# Metadata below the architecture's prefix -> where the config holds it.
CONFIG_KEYS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_parameters.rope_theta",
    "rope.dimension_count": "head_dim",
    "vocab_size": "vocab_size",
}
TOKEN_KEYS = {"bos_token_id": "bos", "eos_token_id": "eos", "unknown_token_id": "unk", "padding_token_id": "pad"}


def write_release(gguf: Path, folder: Path, *, progress: Progress | None = None) -> None:
    """Write the release folder. Raises DayZeroError where the result disagrees with the GGUF's metadata."""
    metadata = read_metadata(gguf)
    if progress:
        progress("reading the GGUF file", 0, 0)
    model, config = _load(gguf, metadata)
    tokenizer = tokenizer_of(gguf, metadata)
    differences = config_differences(metadata, config.to_dict()) + tokenizer_differences(metadata, tokenizer)
    if differences:
        raise DayZeroError(f"{gguf.name}: what was read disagrees with its metadata", got="; ".join(differences),
                           want="the values in the file", fix="use another version of transformers")  # fmt: skip
    if progress:
        progress("writing the release folder", 0, 0)
    folder.mkdir(parents=True)
    model.save_pretrained(folder, max_shard_size=SHARD_BYTES)
    tokenizer.save_pretrained(folder, save_jinja_files=False)
    local = ("backend", "is_local", "local_files_only")
    rewrite_json(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"}, drop=local)
    rewrite_json(folder / "config.json", {}, drop=("_model_name_or_path", "unk_token_id"))
    for path in folder.iterdir():
        path.chmod(0o644)


def read_metadata(gguf: Path) -> dict[str, Any]:
    """Every key of the GGUF header, read with the format's own package."""
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise DayZeroError(
            "GGUF files need the gguf package", got=str(error), want="gguf", fix="pip install 'dayzero[gguf]'"
        ) from error
    return {name: field.contents() for name, field in GGUFReader(gguf).fields.items()}


def config_differences(metadata: dict[str, Any], config: dict[str, Any]) -> list[str]:
    """Where a config (as a dict) says something else than the metadata. Floats are compared as float32, which GGUF stores."""
    found = []
    for key, path in CONFIG_KEYS.items():
        wanted = metadata.get(f"{metadata['general.architecture']}.{key}")
        value: Any = config
        for part in path.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        same = np.float32(value) == np.float32(wanted) if isinstance(wanted, float) and value is not None else value == wanted
        if wanted is not None and not same:
            found.append(f"{path} is {value}, the file says {wanted}")
    for key in ("bos_token_id", "eos_token_id"):
        wanted = metadata.get(f"tokenizer.ggml.{key}")
        if wanted is not None and config.get(key) != wanted:
            found.append(f"{key} is {config.get(key)}, the file says {wanted}")
    return found


def tokenizer_differences(metadata: dict[str, Any], tokenizer: Any) -> list[str]:
    """Where a tokenizer differs from the metadata: vocabulary by id, merges in order, special tokens, chat template."""
    tokens, kinds = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    found = []
    if (vocabulary := tokenizer.get_vocab()) != {token: index for index, token in enumerate(tokens)}:
        found.append(f"the vocabulary of {len(vocabulary)} differs from the file's {len(tokens)}")
    merges = [" ".join(pair) if not isinstance(pair, str) else pair for pair in state["model"]["merges"]]
    if merges != metadata["tokenizer.ggml.merges"]:
        found.append(f"the {len(merges)} merges differ from the file's {len(metadata['tokenizer.ggml.merges'])}")
    special = {token["id"] for token in state["added_tokens"] if token["special"]}
    control = {index for index, kind in enumerate(kinds) if kind == CONTROL_TOKEN}
    if special != control:
        found.append(f"special tokens differ: {sorted(special ^ control)[:8]}")
    for key, name in TOKEN_KEYS.items():
        wanted = metadata.get(f"tokenizer.ggml.{key}")
        if wanted is not None and getattr(tokenizer, f"{name}_token_id") != wanted:
            found.append(f"{name} token is {getattr(tokenizer, f'{name}_token_id')}, the file says {wanted}")
    if tokenizer.chat_template != metadata.get("tokenizer.chat_template"):
        found.append("the chat template differs")
    adds_bos = bool(tokens) and tokenizer.encode("a")[:1] == [metadata.get("tokenizer.ggml.bos_token_id")]
    if adds_bos != bool(metadata.get("tokenizer.ggml.add_bos_token", adds_bos)):
        found.append(f"a beginning-of-text token is {'' if adds_bos else 'not '}added")
    return found


def _load(gguf: Path, metadata: dict[str, Any]) -> tuple[Any, Any]:
    """A fresh model of the class the file's config names, holding the file's weights in bf16."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # progress is the caller's to show

    read = AutoConfig.from_pretrained(gguf.parent, gguf_file=gguf.name, trust_remote_code=False)
    plain = {key: shortest_decimals(value) for key, value in read.to_dict().items() if key != "_name_or_path"}
    config = type(read).from_dict(plain)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    # Through this function rather than from_pretrained(gguf_file=...), which also wants the accelerate package.
    tensors = load_gguf_checkpoint(str(gguf), return_tensors=True, model_to_load=model, torch_dtype=torch.bfloat16)["tensors"]
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    tied = set(getattr(model, "all_tied_weights_keys", ())) if config.tie_word_embeddings else set()
    if unexpected or set(missing) - tied:
        raise DayZeroError(f"{gguf.name}: weights and config disagree", got=f"missing {missing}, unexpected {unexpected}",
                           want="every parameter once", fix="use another version of transformers")  # fmt: skip
    model.tie_weights()
    ids = {name: getattr(config, name, None) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    model.generation_config = GenerationConfig(**{name: value for name, value in ids.items() if value is not None})
    return model, model.config


def tokenizer_of(gguf: Path, metadata: dict[str, Any]) -> Any:
    """transformers' tokenizer of the file, with the splits its `tokenizer.ggml.pre` stands for."""
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name, trust_remote_code=False)
    pre = metadata.get("tokenizer.ggml.pre", "default")
    if metadata.get("tokenizer.ggml.model") != "gpt2" or pre not in PRE_TOKENIZERS:
        raise DayZeroError(f"{gguf.name}: unknown tokenizer", got=f"{metadata.get('tokenizer.ggml.model')} / {pre}",
                           want="a byte-level BPE with " + " or ".join(sorted(PRE_TOKENIZERS)),
                           fix="take the tokenizer from the model's original release")  # fmt: skip
    splits = [pre_tokenizers.Digits(individual_digits=True) for split in PRE_TOKENIZERS[pre] if split == "digits"]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=bool(metadata.get("tokenizer.ggml.add_space_prefix", False)))
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level]) if splits else byte_level
    tokenizer.model_max_length = metadata[f"{metadata['general.architecture']}.context_length"]
    tokenizer.clean_up_tokenization_spaces = False
    return tokenizer


def shortest_decimals(value: Any) -> Any:
    """A float32 value widened to a double, back to the shortest decimal that means it (1e-05, not 9.99999974e-06)."""
    if isinstance(value, float) and float(np.float32(value)) == value:
        return float(str(np.float32(value)))
    return {key: shortest_decimals(item) for key, item in value.items()} if isinstance(value, dict) else value


def rewrite_json(path: Path, changes: dict[str, Any], *, drop: tuple[str, ...]) -> None:
    data = {key: value for key, value in json.loads(path.read_text()).items() if key not in drop} | changes
    path.write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n")
