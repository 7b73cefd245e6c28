"""GGUF export: what transformers and our own reader make of the file is the source, quantized and back by the gguf package."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dayzero.core.errors import DayZeroError
from dayzero.weights.gguf import encoding as gguf_encoding
from dayzero.weights.gguf import export as gguf_export
from dayzero.weights.gguf.export import GgufReport, export_gguf
from dayzero.weights.gguf.inverse import Inverter
from dayzero.weights.gguf.settings import write_settings
from dayzero.weights.gguf.source import read_gguf
from tests.model.test_gguf_source import read_all, transformers_tensors
from tests.tiny.build import BOS, write_tokenizer

gguf = pytest.importorskip("gguf")

SMALL = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
             max_position_embeddings=128, vocab_size=384, bos_token_id=0, eos_token_id=1, pad_token_id=2)  # fmt: skip
# 768 is what transformers takes for the experts of this type whatever a file says.
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=768, head_dim=16, norm_topk_prob=True)
TYPES: dict[str, dict[str, Any]] = {
    "llama": {}, "qwen2": {}, "phi3": {}, "qwen3_moe": EXPERTS, "gemma2": {"head_dim": 16}, "starcoder2": {}, "nemotron": {},
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128, "vocab_size": 384}, "bloom": {"n_layer": 2, "n_head": 4},
}  # fmt: skip


ADDED = ("gemma2", "nemotron")  # readers take one from each norm


def make_release(folder: Path, model_type: str = "llama", *, dtype: torch.dtype = torch.bfloat16, tokenizer: bool = False, **settings: Any) -> Path:
    """A release with every number random, biases and norms too."""
    from transformers import AutoConfig, AutoModelForCausalLM

    own = TYPES.get(model_type, {})
    config = AutoConfig.for_model(model_type, **({} if "n_embd" in own else SMALL) | own | settings)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
            parameter.view(-1)[3] = 1e-6
    model.save_pretrained(folder)
    if tokenizer:
        write_tokenizer(folder, vocab_size=352)  # fewer than the embedding has rows
        for name in ("tokenizer.json", "tokenizer_config.json"):  # transformers adds this one to any byte-level vocabulary
            path = folder / name
            path.write_text(path.read_text().replace(BOS, "<|endoftext|>"))
    return folder


def plain_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """By the class's names, as transformers loads them."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    tied = set(getattr(model, "all_tied_weights_keys", None) or {})
    return {name: tensor.detach() for name, tensor in model.state_dict().items() if name not in tied}


def forms_of_parameters(path: Path, report: GgufReport) -> dict[str, str]:
    source = read_gguf(path)
    assert {part for form in source.forms.values() for part in form.split("+")} == set(report.forms.values())
    return source.forms


def assert_is_quantized(path: Path, folder: Path, report: GgufReport) -> None:
    """Both readers give the source's tensors quantized and back, bit for bit, by the package. Which rows and blocks those are:
    rows of the class's tensors, or their columns where the class has matrices the other way round."""
    source = read_gguf(path, "float32")
    assert not [one for one in source.problems if one.kind != "config_differs"]
    forms, wanted = forms_of_parameters(path, report), plain_tensors(folder)
    theirs, ours = transformers_tensors(source, torch.float32), read_all(source)
    assert set(theirs) == set(ours) == set(wanted)
    turned = {name: path.stem == "gpt2" and re.search(r"c_(attn|proj|fc)\.weight", name) is not None for name in wanted}
    num_quantized = 0
    for name, tensor in wanted.items():
        numbers, kind = tensor.float().numpy(), gguf.GGMLQuantizationType[forms[name]]
        numbers = np.ascontiguousarray(numbers.T) if turned[name] else numbers
        if kind == gguf.GGMLQuantizationType.F32:
            expected = numbers
        else:
            num_quantized += 1
            flat = numbers.reshape(-1, numbers.shape[-1])
            expected = np.array(gguf.dequantize(gguf.quantize(flat, kind).view(np.uint8), kind)).reshape(numbers.shape)
        expected = expected.T if turned[name] else expected
        if path.stem in ADDED and name.endswith("norm.weight"):
            expected = (numbers + np.float32(1)) - np.float32(1)  # what the format stores of such a norm, and what is read
        for reader, made in (("transformers", theirs), ("ours", ours)):
            got = made[name].float().numpy()
            assert got.shape == expected.shape and np.array_equal(got.view(np.uint32), np.ascontiguousarray(expected).view(np.uint32)), (reader, name)
    assert num_quantized > 4


@pytest.mark.parametrize("form", gguf_encoding.FORMS)
@pytest.mark.parametrize("model_type", ["llama", "qwen3_moe"])
def test_readers_get_the_quantized_source(tmp_path: Path, model_type: str, form: str) -> None:
    folder = make_release(tmp_path / "release", model_type)
    report = export_gguf(folder, tmp_path / "m.gguf", form)
    assert_is_quantized(tmp_path / "m.gguf", folder, report)
    assert report.bytes_written == (tmp_path / "m.gguf").stat().st_size and not list(tmp_path.glob(".*"))
    assert set(report.forms.values()) == {"F32", form.upper()} | ({"Q8_0"} if form in ("q4_0", "q4_1") else set())
    assert report.forms["output.weight"] == {"q4_0": "Q8_0", "q4_1": "Q8_0"}.get(form, form.upper())
    assert report.forms["token_embd.weight"] == form.upper() and report.forms["blk.0.attn_norm.weight"] == "F32"
    assert report.forms.get("blk.0.ffn_gate_inp.weight", "F32") == "F32"  # the router
    # bf16 loses nothing, f16 only the number near zero.
    errors = {one.tensor: one.relative for one in report.errors}
    assert bool(errors) == (form != "bf16") and max(errors.values(), default=0.0) < {"f16": 1e-7, "q8_0": 0.01}.get(form, 0.2)


@pytest.mark.parametrize("model_type", [one for one in TYPES if one not in ("llama", "qwen3_moe")])
def test_other_processing_is_undone(tmp_path: Path, model_type: str) -> None:
    """Permuted vectors, transposed matrices, interleaved heads, norms to which readers add."""
    folder = make_release(tmp_path / "release", model_type)
    path = tmp_path / f"{model_type}.gguf"
    report = export_gguf(folder, path, "q8_0")
    assert_is_quantized(path, folder, report)
    rounded = {one.tensor: one.detail for one in report.problems if one.kind == "rounded"}
    norms = {name for name in plain_tensors(folder) if name.endswith("norm.weight")} if model_type in ADDED else set()
    assert {name for name in rounded if name.endswith("norm.weight")} == norms and bool(rounded) == bool(norms)
    assert all("and 1 of its numbers" in detail for detail in rounded.values())  # the one near zero


def test_the_config_is_read_back(tmp_path: Path) -> None:
    from transformers import AutoConfig

    settings = dict(rope_parameters={"rope_theta": 12345.0, "rope_type": "default"}, rms_norm_eps=3e-6, tie_word_embeddings=True)
    folder = make_release(tmp_path / "release", tokenizer=True, **settings)
    report = export_gguf(folder, tmp_path / "m.gguf", "q8_0")
    ours, source = read_gguf(tmp_path / "m.gguf").config, json.loads((folder / "config.json").read_text())
    theirs = AutoConfig.from_pretrained(tmp_path, gguf_file="m.gguf")
    for key in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_key_value_heads", "max_position_embeddings", "vocab_size",
                "head_dim", "tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id", "model_type"):  # fmt: skip
        assert getattr(theirs, key) == source[key] and ours.get(key, getattr(theirs, key)) == source[key], key
    assert np.float32(theirs.rms_norm_eps) == np.float32(3e-6) and theirs.rope_parameters["rope_theta"] == 12345.0
    assert "output.weight" not in report.forms and report.forms["token_embd.weight"] == "Q8_0" and not report.problems


def test_the_tokenizer_is_read_back(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    folder = make_release(tmp_path / "release", tokenizer=True)
    export_gguf(folder, tmp_path / "m.gguf", "q4_0")
    fields = gguf.GGUFReader(tmp_path / "m.gguf").fields
    assert fields["tokenizer.ggml.pre"].contents() == "gpt-2" and len(fields["tokenizer.ggml.tokens"].contents()) == 384
    source, read = AutoTokenizer.from_pretrained(folder), AutoTokenizer.from_pretrained(tmp_path, gguf_file="m.gguf")
    text = "Tokens of 123 numbers,\n  spaces — and bytes: 语言 🙂"
    for token in source.all_special_tokens:
        assert read.encode(token + text) == source.encode(token + text)
    assert read.chat_template == source.chat_template is not None
    write_settings(read_gguf(tmp_path / "m.gguf"), tmp_path / "settings")
    again = AutoTokenizer.from_pretrained(tmp_path / "settings")
    assert again.encode(text) == source.encode(text) and again.decode(again.encode(text)) == text


def test_a_token_that_only_transformers_has(tmp_path: Path) -> None:
    folder = make_release(tmp_path / "release", tokenizer=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_text((folder / name).read_text().replace("<|endoftext|>", "<|begin|>"))
    report = export_gguf(folder, tmp_path / "m.gguf", "q8_0")
    assert [one.detail for one in report.problems] == ["transformers adds '<|endoftext|>' to the 384 tokens of the file"]


def set_splits(folder: Path, *steps: dict[str, Any], normalizer: dict[str, Any] | None = None) -> None:
    state = json.loads((folder / "tokenizer.json").read_text())
    state["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": list(steps)}
    state["normalizer"] = normalizer
    (folder / "tokenizer.json").write_text(json.dumps(state))


BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}


def split_by(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def test_splits_that_have_a_name(tmp_path: Path) -> None:
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    folder = make_release(tmp_path / "release", tokenizer=True)
    set_splits(folder, {"type": "Digits", "individual_digits": True}, BYTES | {"use_regex": True})
    export_gguf(folder, tmp_path / "a.gguf", "q8_0")
    assert gguf.GGUFReader(tmp_path / "a.gguf").fields["tokenizer.ggml.pre"].contents() == "smollm"
    set_splits(folder, split_by(GGUF_PRE_TOKENIZER_SPLITS["qwen2"]), BYTES, normalizer={"type": "NFC"})
    report = export_gguf(folder, tmp_path / "b.gguf", "q8_0")
    assert gguf.GGUFReader(tmp_path / "b.gguf").fields["tokenizer.ggml.pre"].contents() == "qwen2"
    assert [one.kind for one in report.problems] == ["normalizer_not_held"]


def test_splits_without_a_name(tmp_path: Path) -> None:
    folder = make_release(tmp_path / "release", tokenizer=True)
    set_splits(folder, split_by(r"[a-m]+|[^a-m]+"), BYTES)
    with pytest.raises(DayZeroError, match="tokenizer has no GGUF form") as caught:
        export_gguf(folder, tmp_path / "m.gguf", "q8_0")
    assert "a-m" in caught.value.got and sorted(one.name for one in tmp_path.iterdir()) == ["release"]
    report = export_gguf(folder, tmp_path / "m.gguf", "q8_0", pre="of-this-test")
    assert [one.kind for one in report.problems] == ["tokenizer_not_checked"]
    with pytest.raises(DayZeroError, match="encode otherwise"):  # a name that readers know, of other splits
        export_gguf(folder, tmp_path / "n.gguf", "q8_0", pre="smollm")
    assert not (tmp_path / "n.gguf").exists()


@pytest.mark.parametrize("model_type", ["olmo2", "mistral", "granite"])
def test_unknown_architecture_is_refused_by_name(tmp_path: Path, model_type: str) -> None:
    folder = make_release(tmp_path / "release", model_type)
    with pytest.raises(DayZeroError, match=f"{model_type} has no GGUF form"):
        export_gguf(folder, tmp_path / "out" / "m.gguf", "q8_0")
    assert sorted(one.name for one in tmp_path.iterdir()) == ["release"]


def test_what_cannot_be_undone_is_refused_by_name(tmp_path: Path) -> None:
    folder = make_release(tmp_path / "release", "mamba", state_size=16)
    with pytest.raises(DayZeroError, match="2 of its parameters") as caught:
        export_gguf(folder, tmp_path / "m.gguf", "q8_0")
    assert "layers.0.mixer.A_log" in caught.value.got and "cannot be undone" in caught.value.got


@pytest.mark.parametrize(("settings", "named"), [
    ({"hidden_act": "gelu"}, "hidden_act is gelu, a reader of the file takes silu"), ({"attention_bias": True}, "attention_bias is True"),
    ({"rope_parameters": {"rope_theta": 1e4, "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                          "original_max_position_embeddings": 64}}, "rope_parameters.low_freq_factor"),
])  # fmt: skip
def test_a_config_that_a_file_cannot_say(tmp_path: Path, settings: dict[str, Any], named: str) -> None:
    folder = make_release(tmp_path / "release", **settings)
    with pytest.raises(DayZeroError, match="cannot say all of this config") as caught:
        export_gguf(folder, tmp_path / "m.gguf", "q8_0")
    assert named in caught.value.got and not list(tmp_path.glob("*.gguf")) and not list(tmp_path.glob(".*"))


def test_what_the_file_says_and_transformers_does_not_read(tmp_path: Path) -> None:
    rope = {"rope_theta": 1e4, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    folder = make_release(tmp_path / "release", rope_parameters=rope)
    report = export_gguf(folder, tmp_path / "m.gguf", "q8_0")
    fields = gguf.GGUFReader(tmp_path / "m.gguf").fields
    said = {key.rpartition("scaling.")[2]: field.contents() for key, field in fields.items() if "rope.scaling" in key}
    assert said == {"type": "yarn", "factor": 4.0, "original_context_length": 32}
    differs = {one.detail.partition(" ")[0] for one in report.problems if one.kind == "reader_differs"}
    assert differs == {f"rope_parameters.{name}" for name in ("rope_type", "factor", "original_max_position_embeddings")}


def test_numbers_that_a_form_cannot_hold(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = make_release(tmp_path / "release")
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    # The scale of a block is a float of 16 bits: 1e6 / 127 is one, 1e6 / 8 and 1e6 / 15 are not.
    for value, forms in ((1e6, {"f16", "q4_0", "q4_1"}), (1e9, {"f16", "q8_0", "q4_0", "q4_1"}), (float("nan"), set(gguf_encoding.FORMS))):
        tensors[name][3, 5] = value
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        for form in gguf_encoding.FORMS:
            if form in forms:
                with pytest.raises(DayZeroError, match=f"{name} cannot be stored as {form}"):
                    export_gguf(folder, tmp_path / "m.gguf", form)
                assert sorted(one.name for one in tmp_path.iterdir()) == ["release"]
            else:
                export_gguf(folder, tmp_path / "m.gguf", form)
                (tmp_path / "m.gguf").unlink()


def test_a_quantized_release_is_decoded_first(tmp_path: Path) -> None:
    """Blocks of FP8: the file is that of the numbers they stand for."""
    from safetensors.torch import load_file, save_file

    folder = make_release(tmp_path / "release", hidden_size=256, intermediate_size=256)
    plain, stored = tmp_path / "plain", load_file(folder / "model.safetensors")
    plain.mkdir()
    numbers, codes = {}, {}
    for name, tensor in stored.items():
        if "proj" not in name:
            numbers[name] = codes[name] = tensor
            continue
        rows, columns = tensor.shape
        scale = torch.rand(-(-rows // 128), -(-columns // 128)) * 0.01 + 0.001
        codes[name] = (tensor * 100).to(torch.float8_e4m3fn)
        codes[name + "_scale_inv"] = scale
        whole = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[:rows, :columns]
        numbers[name] = (codes[name].float() * whole).to(torch.bfloat16)
    config = json.loads((folder / "config.json").read_text())
    save_file(numbers, plain / "model.safetensors", metadata={"format": "pt"})
    (plain / "config.json").write_text(json.dumps(config))
    save_file(codes, folder / "model.safetensors", metadata={"format": "pt"})
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    (folder / "config.json").write_text(json.dumps(config))
    for form in ("q4_1", "bf16"):
        export_gguf(folder, tmp_path / f"{form}.gguf", form)
        export_gguf(plain, tmp_path / f"{form}-plain.gguf", form)
        one, other = read_gguf(tmp_path / f"{form}.gguf"), read_gguf(tmp_path / f"{form}-plain.gguf")
        for name, entry in one.header.tensors.items():
            begin, end = other.header.tensors[name].begin, other.header.tensors[name].end
            assert one.path.read_bytes()[entry.begin : entry.end] == other.path.read_bytes()[begin:end], name


def test_small_chunks_give_the_same_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_release(tmp_path / "release", "qwen3_moe")
    whole = export_gguf(folder, tmp_path / "m.gguf", "q4_0")
    monkeypatch.setattr(gguf_encoding, "CHUNK_ELEMENTS", 1000)
    seen: list[int] = []
    report = export_gguf(folder, tmp_path / "n.gguf", "q4_0", lambda what, done, total: seen.append(done))
    assert (tmp_path / "m.gguf").read_bytes() == (tmp_path / "n.gguf").read_bytes()
    assert len(seen) > 500 and seen == sorted(seen) and seen[-1] <= report.bytes_written
    # Errors are of all rows: those of a parameter made of two tensors come in two halves.
    sizes: dict[str, int] = {}
    for one, other in zip(report.errors, whole.errors, strict=True):
        sizes[one.tensor] = sizes.get(one.tensor, 0) + one.num_elements
        assert one.max_abs == other.max_abs and one.relative == pytest.approx(other.relative, rel=1e-6)
    assert sizes == {name: plain_tensors(folder)[name].numel() for name in sizes}


def test_nothing_half_written_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, out = make_release(tmp_path / "release"), tmp_path / "m.gguf"
    encoded, calls = gguf_export.encoded, []

    def fails(*arguments: Any) -> Any:
        calls.append(out.exists())
        if len(calls) == 9:
            raise OSError(28, "No space left on device")
        return encoded(*arguments)

    monkeypatch.setattr(gguf_export, "encoded", fails)
    with pytest.raises(DayZeroError, match="cannot write") as caught:
        export_gguf(folder, out, "q8_0")
    assert caught.value.got == "No space left on device" and not any(calls)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["release"]
    monkeypatch.undo()
    with gguf_export._hidden_file(out), pytest.raises(DayZeroError, match="another export"):
        export_gguf(folder, out, "q8_0")
    export_gguf(folder, out, "q8_0")
    before = out.read_bytes()
    with pytest.raises(DayZeroError, match="in the way"):
        export_gguf(folder, out, "q4_0")
    with pytest.raises(DayZeroError, match="unknown GGUF form"):
        export_gguf(folder, tmp_path / "k.gguf", "q4_k")
    assert out.read_bytes() == before


def test_only_what_reaches_the_parameter_once_is_inverted() -> None:
    class Processor:
        config: dict[str, Any] = {}

        def process(self, weights: np.ndarray, name: str, **_: Any) -> Any:
            from transformers.modeling_gguf_pytorch_utils import GGUFTensor

            made = {"same": lambda: weights, "rows": lambda: weights[::-1], "turned": lambda: weights.T, "less": lambda: weights - 1,
                    "swapped": lambda: weights[:, ::-1], "twice": lambda: weights[[0, 0, 1, 2, 3, 4]], "abs": lambda: np.abs(weights),
                    "double": lambda: weights * 2}  # fmt: skip
            return GGUFTensor(made[name.removesuffix(".weight")](), name, {})

    kinds = ("same", "rows", "turned", "less", "swapped", "twice", "abs", "double")
    inverter = Inverter(Processor(), {f"{name}.weight": name for name in kinds})
    made, lost = inverter.outgoing(dict.fromkeys([*kinds, "nameless"], (6, 5)))
    found = {one.parameter: one for one in made}
    assert set(lost) == {"twice", "abs", "double", "nameless"} and "no name" in lost["nameless"]
    assert found["same"].rows is None and found["rows"].rows is not None and found["rows"].rows.tolist() == [5, 4, 3, 2, 1, 0]
    assert found["turned"].shape == (5, 6) and found["turned"].whole and found["less"].added == -1.0 and found["swapped"].whole
    numbers = np.arange(30).reshape(6, 5)
    stored = numbers.reshape(-1)[inverter.elements(found["turned"], (6, 5))].reshape(5, 6)
    assert np.array_equal(stored.T, numbers)
    assert np.array_equal(numbers.reshape(-1)[inverter.elements(found["swapped"], (6, 5))].reshape(6, 5)[:, ::-1], numbers)
