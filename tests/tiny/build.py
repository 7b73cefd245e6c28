"""A model type's name in, a tiny model or a release folder as published out.

A release folder is what `save_pretrained` writes: config.json, generation_config.json, several safetensors shards with an
index and the checkpoint's own parameter names, and a byte-level BPE tokenizer with a chat template. Weights are random.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.configuration_utils import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from dayzero.model.classes import text_config
from dayzero.model.shrink import build_shrunken
from tests.tiny.overrides import DEFAULTS, ENCODER_TYPES, OVERRIDES

# Text decoders reached through the multimodal class alone.
MULTIMODAL_ONLY_TYPES = ["kimi_k25", "mistral_large4", "muse_spark", "step3p7"]
DECODER_TYPES = [t for t in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if t not in ENCODER_TYPES] + MULTIMODAL_ONLY_TYPES

CHECKPOINT_VOCAB_SIZE = 320  # 256 bytes, specials and a few merges, and a tail no token uses (as most releases have)
BOS, EOS, PAD, START, END = "<|bos|>", "<|eos|>", "<|pad|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = [BOS, EOS, PAD, START, END]
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOKENIZER_TEXT = ["the quick brown fox jumps over the lazy dog", "one command takes a freshly published model", "0123456789"]


def default_config(model_type: str) -> PreTrainedConfig:
    """The class default of a type, completed where it cannot be built from."""
    return CONFIG_MAPPING[model_type](**DEFAULTS.get(model_type, {}))


def make_tiny_model(
    model_type: str, seed: int = 0, dtype: torch.dtype = torch.float32, *, vocab_size: int = 160
) -> torch.nn.Module:
    """A tiny model of a type with every layer kind of its class default; the same seed gives the same weights."""
    model, _ = build_shrunken(
        default_config(model_type), dtype=dtype, seed=seed, overrides=OVERRIDES.get(model_type), vocab_size=vocab_size
    )
    return model


def make_tiny_checkpoint(
    model_type: str,
    folder: Path | str,
    *,
    dtype: str = "bfloat16",
    num_shards: int = 3,
    tokenizer: bool = True,
    seed: int = 0,
    vocab_size: int = CHECKPOINT_VOCAB_SIZE,
) -> Path:
    """Write a release folder of a tiny model; at least `num_shards` shards as long as no tensor is larger than one."""
    folder = Path(folder)
    overrides = OVERRIDES.get(model_type, {}) | {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    model, _ = build_shrunken(
        default_config(model_type), dtype=getattr(torch, dtype), seed=seed, overrides=overrides, vocab_size=vocab_size
    )
    assert text_config(model.config).vocab_size > 256 + len(SPECIAL_TOKENS), text_config(model.config).vocab_size
    for config in (model.config, text_config(model.config)):
        config.bos_token_id, config.eos_token_id, config.pad_token_id = 0, 1, 2
    model.generation_config = GenerationConfig(bos_token_id=0, eos_token_id=1, pad_token_id=2)
    num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in model.state_dict().values())
    model.save_pretrained(folder, max_shard_size=-(-num_bytes // num_shards))
    if tokenizer:
        write_tokenizer(folder, vocab_size=min(vocab_size, text_config(model.config).vocab_size) - 32)
    return folder


def write_tokenizer(folder: Path, *, vocab_size: int) -> None:
    """tokenizer.json and tokenizer_config.json of a byte-level BPE: specials first, then 256 bytes, then merges."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    bpe = tokenizers.Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(TOKENIZER_TEXT * 4, trainer)
    bpe.save(str(folder / "tokenizer.json"))
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "additional_special_tokens": [START, END],
        "clean_up_tokenization_spaces": False,
        "model_max_length": 512,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
