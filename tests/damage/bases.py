"""Small sound releases out, with several shards, an index and a tokenizer; `damages` harms copies of them.

Weights are random, as large as trained ones are: matrices normal with a standard deviation of 0.02, norms about 1, no two
tensors alike. The same seed gives the same bytes.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.tiny.build import write_tokenizer

HIDDEN, VOCABULARY, LAYERS, SHARDS, EXPERTS, BLOCK = 128, 320, 4, 4, 4, 64
SIZES: dict[str, Any] = {
    "hidden_size": HIDDEN, "intermediate_size": 256, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "vocab_size": VOCABULARY, "max_position_embeddings": 512, "bos_token_id": 0,
    "eos_token_id": 1, "pad_token_id": 2,
}  # fmt: skip


def make_dense(folder: Path, seed: int = 0, **changes: Any) -> Path:
    return _make("llama", folder, seed, **{"tie_word_embeddings": False} | changes)


def make_tied(folder: Path, seed: int = 0) -> Path:
    return make_dense(folder, seed, tie_word_embeddings=True)


def make_biased(folder: Path, seed: int = 0) -> Path:
    return _make("qwen2", folder, seed, tie_word_embeddings=False)


def make_experts(folder: Path, seed: int = 0) -> Path:
    return _make("qwen3_moe", folder, seed, tie_word_embeddings=False, num_experts=EXPERTS, num_experts_per_tok=2,
                 moe_intermediate_size=64, decoder_sparse_step=1, mlp_only_layers=[])  # fmt: skip


def make_fp8(folder: Path, seed: int = 0) -> Path:
    """The dense release with its linear weights as FP8 in blocks, each scale beside its weight."""
    make_dense(folder, seed)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    for file in sorted(folder.glob("*.safetensors")):
        stored: dict[str, torch.Tensor] = {}
        for name, tensor in load_file(file).items():
            if "_proj." not in name:
                stored[name] = tensor
                continue
            rows, columns = tensor.shape
            blocks = tensor.float().reshape(rows // BLOCK, BLOCK, columns // BLOCK, BLOCK)
            scale = blocks.abs().amax(dim=(1, 3), keepdim=True) / 448
            stored[name] = (blocks / scale).reshape(rows, columns).to(torch.float8_e4m3fn)
            stored[f"{name}_scale_inv"] = scale[:, 0, :, 0].contiguous()
            index["weight_map"][f"{name}_scale_inv"] = file.name
        save_file(stored, file, metadata={"format": "pt"})
    index["metadata"]["total_size"] = sum(
        tensor.numel() * tensor.element_size() for file in folder.glob("*.safetensors") for tensor in load_file(file).values()
    )
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK],
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    return folder


BASES: dict[str, Callable[..., Path]] = {
    "dense": make_dense, "tied": make_tied, "biased": make_biased, "experts": make_experts, "fp8": make_fp8,
}  # fmt: skip


def _make(model_type: str, folder: Path, seed: int, **changes: Any) -> Path:
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[model_type](**SIZES | changes), dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.empty(parameter.shape).normal_(generator=generator)
            parameter.copy_(1 + 0.05 * noise if "norm" in name else 0.02 * noise)
    model.generation_config = GenerationConfig(bos_token_id=0, eos_token_id=1, pad_token_id=2)
    num_bytes = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    model.save_pretrained(folder, max_shard_size=-(-num_bytes // SHARDS))
    write_tokenizer(folder, vocab_size=VOCABULARY - 32)
    return folder
