"""Any config becomes a small one of the same structure, and release folders made of it are as published ones."""

from __future__ import annotations

import copy
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.configuration_utils import PreTrainedConfig

from dayzero.core.errors import DayZeroError
from dayzero.model.classes import build_on_meta, find_layers, layer_kind_signatures, model_class, text_config
from dayzero.model.shrink import build_shrunken, shrink_config
from tests.tiny.build import CHECKPOINT_VOCAB_SIZE, DECODER_TYPES, default_config, make_tiny_model
from tests.tiny.census import decode_difference
from tests.tiny.overrides import REQUIRED_TYPES

SOURCE = Path(__file__).parents[2] / "src" / "dayzero"
ARCHITECTURES = re.compile(r"llama|qwen|deepseek|kimi|gpt_oss|minimax|gemma|mixtral|nemotron|glm", re.IGNORECASE)
NUM_LOGIT_TOKENS = 30  # crosses windows and chunks of 8 three times and position thresholds of 16 once

# What releases write, abridged to the fields that decide the structure.
RELEASES = {
    "dense, scaled rotary": {
        "model_type": "llama", "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80,
        "num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072,
        "rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                         "original_max_position_embeddings": 8192, "rope_type": "llama3"},
    },
    "latent attention, grouped experts": {
        "model_type": "deepseek_v3", "first_k_dense_replace": 3, "num_hidden_layers": 61, "n_routed_experts": 256,
        "n_group": 8, "topk_group": 4, "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
        "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
                         "original_max_position_embeddings": 4096, "type": "yarn"},
    },
    "shared indices": {
        "model_type": "glm_moe_dsa", "num_hidden_layers": 78,
        "mlp_layer_types": ["dense"] * 3 + ["sparse"] * 75,
        "indexer_types": ["full"] * 3 + ["shared", "shared", "shared", "full"] * 18 + ["shared"] * 3,
    },
    "windows and sinks": {
        "model_type": "gpt_oss", "num_hidden_layers": 36, "num_local_experts": 128, "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"] * 18,
    },
    "chunks and temperature": {
        "model_type": "llama4_text", "num_hidden_layers": 48, "attention_chunk_size": 8192, "floor_scale": 8192,
        "attn_temperature_tuning": True,
    },
    "layers given one by one": {
        "model_type": "gemma4_text", "num_hidden_layers": 60, "hidden_size": 5376, "num_attention_heads": 32,
        "num_key_value_heads": 16, "head_dim": 256, "sliding_window": 1024, "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 0, "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 10,
        "per_layer_config": {str(i): {"head_dim": 512, "num_key_value_heads": 4} for i in range(5, 60, 6)},
    },
    "long and short rotary factors": {
        "model_type": "phi3", "hidden_size": 3072, "num_attention_heads": 24, "num_key_value_heads": 8,
        "num_hidden_layers": 32, "max_position_embeddings": 131072, "original_max_position_embeddings": 4096,
        "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 64, "long_factor": [float(i) for i in range(1, 65)]},
    },
}  # fmt: skip
POSITION_LIMITS = re.compile(r"window|chunk|floor_scale|original_max_position|index_topk|n_floor")


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Operators on 64 columns only wait for a second thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def make_release_config(name: str) -> PreTrainedConfig:
    fields = copy.deepcopy(RELEASES[name])
    return AutoConfig.for_model(fields.pop("model_type"), **fields)


def assert_position_limits_small(fields: dict, path: str = "") -> None:
    for name, value in fields.items():
        if isinstance(value, dict):
            assert_position_limits_small(value, f"{path}{name}.")
        elif POSITION_LIMITS.search(str(name)) and isinstance(value, int) and not isinstance(value, bool):
            assert value < NUM_LOGIT_TOKENS, f"{path}{name} = {value}: not reached by {NUM_LOGIT_TOKENS} tokens"


def make_ids(num_tokens: int = NUM_LOGIT_TOKENS) -> torch.Tensor:
    return torch.randint(5, 120, (1, num_tokens), generator=torch.Generator().manual_seed(1))


def test_source_names_no_architecture() -> None:
    named = [
        f"{path.relative_to(SOURCE)}:{number}: {line.strip()}"
        for path in sorted(SOURCE.rglob("*.py"))
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if ARCHITECTURES.search(re.sub(r"llama-?(\.cpp|vocab)", "", line))  # a program and its file, not an architecture
    ]
    assert not named, "\n".join(named)


@pytest.mark.parametrize("name", RELEASES)
def test_release_keeps_its_structure(name: str) -> None:
    config = make_release_config(name)
    before = config.to_dict()
    model, shrunk = build_shrunken(config, dtype=torch.float32, seed=0)
    assert config.to_dict() == before, "the release's own config was changed"
    assert sum(parameter.numel() for parameter in model.parameters()) < 2_000_000
    assert_position_limits_small(shrunk.config.to_dict())
    full_kinds = layer_kind_signatures(build_on_meta(config), config)
    small_kinds = layer_kind_signatures(model, shrunk.config)
    assert [full_kinds[index] for index in shrunk.layer_indices] == small_kinds
    assert set(full_kinds) == set(small_kinds)
    with torch.no_grad():
        logits = model(input_ids=make_ids()).logits
    assert torch.isfinite(logits).all()
    assert 0.1 < logits.std() < 10, logits.std()


def test_number_of_layers_is_the_smallest_prefix() -> None:
    indices = {name: shrink_config(make_release_config(name)).layer_indices for name in RELEASES}
    assert indices["dense, scaled rotary"] == (0, 1)  # two at least, so that layers are told apart
    assert indices["latent attention, grouped experts"] == (0, 1, 2, 3)
    assert indices["windows and sinks"] == (0, 1)
    assert indices["chunks and temperature"] == (0, 1, 2, 3)
    # 60 layers hold all kinds here: one of each is taken instead.
    assert len(indices["layers given one by one"]) <= 4, indices["layers given one by one"]


def test_sizes_that_differ_between_layers_still_differ() -> None:
    small = text_config(shrink_config(make_release_config("layers given one by one")).config)
    per_layer = small.to_dict()["per_layer_config"]
    assert {layer["head_dim"] for layer in per_layer.values()} == {32}
    assert small.per_layer_config[0].head_dim == 16


@pytest.mark.parametrize("name", RELEASES)
def test_small_config_stays(name: str) -> None:
    once = shrink_config(make_release_config(name)).config
    twice = shrink_config(copy.deepcopy(once))
    assert twice.config.to_dict() == once.to_dict()
    assert twice.layer_indices == tuple(range(len(twice.layer_indices)))


def test_notes_say_what_was_dropped() -> None:
    shrunk = shrink_config(make_release_config("latent attention, grouped experts"))
    assert any("quantization_config" in note for note in shrunk.notes)
    assert getattr(shrunk.config, "quantization_config", None) is None


def test_weights_come_from_the_seed_alone() -> None:
    config = make_release_config("windows and sinks")
    torch.manual_seed(7)
    state = torch.random.get_rng_state()
    first, _ = build_shrunken(config, dtype=torch.float32, seed=3)
    assert torch.equal(torch.random.get_rng_state(), state), "the global generator was used"
    torch.manual_seed(8)
    again, _ = build_shrunken(config, dtype=torch.float32, seed=3)
    other, _ = build_shrunken(config, dtype=torch.float32, seed=4)
    for name, parameter in first.state_dict().items():
        assert torch.equal(parameter, again.state_dict()[name]), name
    assert not torch.equal(first.lm_head.weight, other.lm_head.weight)


def test_config_without_class_is_a_clear_error() -> None:
    class NobodysConfig(PreTrainedConfig):
        model_type = "nobodys"

    with pytest.raises(DayZeroError, match="no model class") as caught:
        model_class(NobodysConfig())
    assert "nobodys" in caught.value.got


def test_size_without_rule_is_a_clear_error() -> None:
    with pytest.raises(DayZeroError, match="could not be shrunk") as caught:
        shrink_config(make_release_config("dense, scaled rotary"), overrides={"intermediate_size": 1_000_000})
    assert "mlp" in caught.value.got  # names the parameter that stayed large


def test_decoder_types_are_those_of_the_study() -> None:
    assert len(DECODER_TYPES) == len(set(DECODER_TYPES)) == 163
    assert set(REQUIRED_TYPES) <= set(DECODER_TYPES)


@pytest.mark.parametrize("model_type", REQUIRED_TYPES)
def test_cached_decoding_agrees_with_uncached(model_type: str) -> None:
    model = make_tiny_model(model_type)
    with torch.no_grad():
        assert decode_difference(model, make_ids(20)) < 1e-3
    assert len(find_layers(model)[1]) == text_config(model.config).num_hidden_layers


@pytest.mark.parametrize("model_type", REQUIRED_TYPES)
def test_checkpoint_loads_to_the_same_logits(tiny_checkpoint, model_type: str) -> None:
    folder = tiny_checkpoint(model_type)
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == [model_class(default_config(model_type)).__name__]
    assert config["dtype"] == "bfloat16"
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == config["eos_token_id"] == 1
    shards = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"].values()
    assert len(set(shards)) == len(list(folder.glob("*.safetensors"))) >= 3
    reference = make_tiny_model(model_type, dtype=torch.bfloat16, vocab_size=CHECKPOINT_VOCAB_SIZE)
    loaded = AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        want, got = (model(input_ids=make_ids()).logits for model in (reference, loaded))
    assert torch.equal(got, want), f"worst logit differs by {(got - want).abs().max()}"


@pytest.mark.parametrize(
    ("model_type", "expected"),
    [
        ("mixtral", "model.layers.0.block_sparse_moe.experts.7.w1.weight"),
        ("deepseek_v3", "model.layers.3.mlp.experts.7.gate_proj.weight"),
        ("qwen3_moe", "model.layers.0.mlp.experts.7.down_proj.weight"),
        ("minimax_m2", "model.layers.0.block_sparse_moe.experts.7.w2.weight"),
        ("gpt_oss", "model.layers.0.mlp.experts.gate_up_proj"),
        ("nemotron_h", "backbone.layers.1.mixer.experts.7.up_proj.weight"),
    ],
)
def test_checkpoint_names_are_those_of_releases(tiny_checkpoint, model_type: str, expected: str) -> None:
    index = json.loads((tiny_checkpoint(model_type) / "model.safetensors.index.json").read_text())
    assert expected in index["weight_map"]


def test_checkpoint_tokenizer(tiny_checkpoint) -> None:
    folder = tiny_checkpoint("llama")
    assert tiny_checkpoint("llama") is folder, "a checkpoint is built once per session"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (0, 1, 2)
    assert 256 < len(tokenizer) <= CHECKPOINT_VOCAB_SIZE - 32
    for text in ("the quick brown fox", "naïve 漢字 \U0001f600\n\t", "  two  spaces "):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    chat = [{"role": "user", "content": "hello"}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    assert tokenizer.decode(ids) == "<|bos|><|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert ids[:2] == [0, 3]


def test_shared_fixtures_do_not_import_torch() -> None:
    code = "import sys, tests.conftest; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=SOURCE.parents[1], check=False).returncode == 0
