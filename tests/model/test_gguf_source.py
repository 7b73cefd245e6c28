"""GGUF as a source: names, config and values are transformers' own, bit for bit; the header is checked before anything else."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dayzero.core.errors import DayZeroError
from dayzero.weights.gguf.header import read_gguf_header
from dayzero.weights.gguf.rows import Changed, Moved, trace
from dayzero.weights.gguf.settings import write_settings
from dayzero.weights.gguf.source import GgufSource, read_gguf
from dayzero.weights.reading import LocalStore, SourceReader

gguf = pytest.importorskip("gguf")

HIDDEN, FEED, HEADS, KV_HEADS, LAYERS, VOCAB = 64, 96, 4, 2, 2, 40
EXPERT_FEED = 768  # transformers does not read this from the file: it is the class's default
Q = gguf.GGMLQuantizationType


def make_gguf(path: Path, forms: Callable[[str], Any] = lambda name: Q.F32, *, drop: tuple[str, ...] = (), extra: dict[str, tuple[int, ...]] | None = None,
              architecture: str = "llama", tied: bool = False, tokens: bool = False, change: Callable[[Any], None] | None = None) -> Path:
    """A small model; `forms` gives the type of each matrix, vectors are F32."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FEED)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(50_000.0)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    if tokens:  # the size of the vocabulary is then that of this list
        writer.add_tokenizer_model("gpt2")
        writer.add_token_list([f"token{i}" for i in range(VOCAB)])
        writer.add_token_types([1] * VOCAB)
        writer.add_token_merges(["t o", "k e"])
        writer.add_bos_token_id(3)
        writer.add_eos_token_id(4)
    else:
        writer.add_vocab_size(VOCAB)
    if change:
        change(writer)
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (VOCAB, HIDDEN), "output_norm.weight": (HIDDEN,)}
    if not tied:
        shapes["output.weight"] = (VOCAB, HIDDEN)
    for layer in range(LAYERS):
        shapes |= {f"blk.{layer}.{name}.weight": shape for name, shape in layer_shapes(architecture).items()}
    shapes |= extra or {}
    generator = np.random.default_rng(7)
    for name, shape in shapes.items():
        if name in drop:
            continue
        data = generator.standard_normal(shape).astype(np.float32)
        form = forms(name) if len(shape) > 1 else Q.F32
        if form == Q.F32:
            writer.add_tensor(name, data)
        elif form == Q.F16:
            writer.add_tensor(name, data.astype(np.float16))
        else:
            writer.add_tensor(name, gguf.quantize(data, form), raw_dtype=form)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def layer_shapes(architecture: str) -> dict[str, tuple[int, ...]]:
    key = HIDDEN // HEADS * KV_HEADS
    shapes: dict[str, tuple[int, ...]] = {
        "attn_q": (HIDDEN, HIDDEN), "attn_k": (key, HIDDEN), "attn_v": (key, HIDDEN), "attn_output": (HIDDEN, HIDDEN),
        "attn_norm": (HIDDEN,), "ffn_norm": (HIDDEN,),
    }  # fmt: skip
    if architecture == "qwen3moe":
        return shapes | {"ffn_gate_inp": (4, HIDDEN), "ffn_gate_exps": (4, EXPERT_FEED, HIDDEN),
                         "ffn_up_exps": (4, EXPERT_FEED, HIDDEN), "ffn_down_exps": (4, HIDDEN, EXPERT_FEED), "attn_q_norm": (16,), "attn_k_norm": (16,)}  # fmt: skip
    shapes |= {"ffn_gate": (FEED, HIDDEN), "ffn_up": (FEED, HIDDEN), "ffn_down": (HIDDEN, FEED)}
    if architecture == "gemma2":
        shapes |= {"post_attention_norm": (HIDDEN,), "post_ffw_norm": (HIDDEN,)}
    return shapes


def make_moe(path: Path, forms: Callable[[str], Any] = lambda name: Q.Q8_0, **settings: Any) -> Path:
    def change(writer: Any) -> None:
        writer.add_expert_count(4)
        writer.add_expert_used_count(2)
        writer.add_expert_feed_forward_length(EXPERT_FEED)
        writer.add_key_length(16)
        writer.add_value_length(16)

    return make_gguf(path, forms, architecture="qwen3moe", change=change, **settings)


def transformers_tensors(source: GgufSource, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    from transformers import AutoConfig
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    from dayzero.model.classes import build_on_meta

    config = AutoConfig.from_pretrained(source.path.parent, gguf_file=source.path.name)
    return load_gguf_checkpoint(str(source.path), return_tensors=True, model_to_load=build_on_meta(config),
                                torch_dtype=dtype)["tensors"]  # fmt: skip


def read_all(source: GgufSource) -> dict[str, torch.Tensor]:
    made = {}
    with SourceReader(LocalStore(source.path.parent), source.stored, decoders=source.decoders) as reader:
        for name, entry in source.tensors.items():
            data = bytearray(entry.num_bytes)
            reader.read_into(name, 0, memoryview(data))
            made[name] = torch.frombuffer(data, dtype=getattr(torch, entry.dtype)).reshape(entry.shape)
    return made


def assert_equals_transformers(source: GgufSource, dtype: torch.dtype) -> None:
    assert not source.problems, source.problems
    wanted, got = transformers_tensors(source, dtype), read_all(source)
    assert set(got) == set(wanted)
    for name, tensor in wanted.items():
        found = got[name].to(dtype)  # plain tensors keep the dtype of the file
        assert found.shape == tensor.shape, name
        assert torch.equal(found.view(torch.uint8), tensor.to(dtype).contiguous().view(torch.uint8)), name


QUANTIZED = [Q.Q8_0, Q.Q4_0, Q.Q4_1, Q.Q5_0, Q.Q5_1]


def mixed(name: str) -> Any:
    forms = [Q.F32, Q.F16, Q.BF16, *QUANTIZED]
    return forms[sum(name.encode()) % len(forms)]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("form", [Q.F32, Q.F16, Q.BF16, *QUANTIZED, mixed], ids=lambda form: getattr(form, "name", None) or form.__name__)
def test_equals_transformers(tmp_path: Path, form: Any, dtype: str) -> None:
    source = read_gguf(make_gguf(tmp_path / "m.gguf", form if callable(form) else lambda name: form), dtype)
    assert_equals_transformers(source, getattr(torch, dtype))
    if form in (Q.F32, Q.F16, Q.BF16):  # only rows that move are decoded, and those are copied as they are
        assert len(source.decoders) == 2 * LAYERS and all("moved" in one.operation for one in source.decoders.values())
        assert {one.dtype for one in source.decoders.values()} == {{Q.F32: "float32", Q.F16: "float16", Q.BF16: "bfloat16"}[form]}
    assert all(one.row_step in (1, 16) for one in source.decoders.values())
    assert {one.row_step for name, one in source.decoders.items() if "q_proj" in name} == {16}  # the rows of a head


def random_blocks(form: Any, rows: int, columns: int, generator: np.random.Generator) -> np.ndarray:
    """Random bytes with small scales: forms that the package can decode and not make."""
    per_block, size = gguf.GGML_QUANT_SIZES[form]
    return generator.integers(0, 60, (rows, columns // per_block * size), dtype=np.uint8)


@pytest.mark.parametrize("form", [Q.Q2_K, Q.Q3_K, Q.Q4_K, Q.Q5_K, Q.Q6_K, Q.IQ4_NL, Q.IQ4_XS, Q.IQ2_XXS, Q.IQ3_S, Q.IQ1_S, Q.TQ1_0, Q.MXFP4], ids=str)
def test_other_forms(tmp_path: Path, form: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """K-quants and the like: rows of 256 elements."""
    monkeypatch.setitem(globals(), "HIDDEN", 256)
    generator = np.random.default_rng(1)
    monkeypatch.setattr(gguf, "quantize", lambda data, form: random_blocks(form, len(data), data.shape[1], generator))
    path = make_gguf(tmp_path / "m.gguf", lambda name: Q.F32 if "ffn" in name else form)
    source = read_gguf(path)
    assert len(source.decoders) == 4 * LAYERS + 2
    assert_equals_transformers(source, torch.bfloat16)


def test_any_run_of_rows(tmp_path: Path) -> None:
    source = read_gguf(make_moe(tmp_path / "m.gguf"), "float32")
    data = source.path.read_bytes()

    def read(name: str, offset: int, count: int) -> memoryview:
        begin = source.stored[name].begin + offset
        assert begin + count <= source.stored[name].end
        return memoryview(data)[begin : begin + count]

    generator = np.random.default_rng(3)
    for decoder in source.decoders.values():
        whole = decoder.decode(read, 0, decoder.rows)
        for _ in range(5):
            start = int(generator.integers(0, decoder.rows))
            stop = int(generator.integers(start + 1, decoder.rows + 1))
            assert torch.equal(decoder.decode(read, start, stop), whole[start:stop]), (decoder.name, start, stop)


@pytest.mark.parametrize("form", [Q.Q8_0, Q.F16, Q.Q4_1], ids=str)
def test_experts_of_two_tensors(tmp_path: Path, form: Any) -> None:
    source = read_gguf(make_moe(tmp_path / "m.gguf", lambda name: form))
    assert_equals_transformers(source, torch.bfloat16)
    joined = source.decoders["model.layers.0.mlp.experts.gate_up_proj"]
    assert joined.sources == ("blk.0.ffn_gate_exps.weight", "blk.0.ffn_up_exps.weight") and joined.shape == (4, 2 * EXPERT_FEED, HIDDEN)
    assert "whole" not in joined.operation


def test_values_that_are_computed(tmp_path: Path) -> None:
    """A processor that subtracts from norms: whole vectors, said so."""
    def change(writer: Any) -> None:
        writer.add_key_length(HIDDEN // HEADS)
        writer.add_value_length(HIDDEN // HEADS)
        writer.add_attn_logit_softcapping(50.0)
        writer.add_final_logit_softcapping(30.0)
        writer.add_sliding_window(64)

    source = read_gguf(make_gguf(tmp_path / "m.gguf", lambda name: Q.Q8_0, architecture="gemma2", tied=True, change=change))
    assert_equals_transformers(source, torch.bfloat16)
    assert "processed whole: it computes new values, or moves elements across rows" in source.decoders["model.norm.weight"].operation


def test_two_threads_decode_whole_tensors(tmp_path: Path) -> None:
    from concurrent.futures import ThreadPoolExecutor

    source = read_gguf(make_gguf(tmp_path / "m.gguf", mixed))
    alone = read_all(source)
    with ThreadPoolExecutor(2) as pool:
        for both in pool.map(lambda _: read_all(source), range(4)):
            assert all(torch.equal(both[name], tensor) for name, tensor in alone.items())


def test_config_is_that_of_transformers(tmp_path: Path) -> None:
    from transformers import AutoConfig

    for path in (make_gguf(tmp_path / "a.gguf"), make_gguf(tmp_path / "b.gguf", tied=True), make_gguf(tmp_path / "d.gguf", tokens=True), make_moe(tmp_path / "c.gguf")):
        source = read_gguf(path)
        wanted = AutoConfig.from_pretrained(tmp_path, gguf_file=path.name)
        ours = type(wanted).from_dict(source.config)
        for key, value in wanted.to_dict().items():
            if key not in ("architectures", "dtype", "_name_or_path"):
                got = getattr(ours, key, None) if key != "model_type" else ours.model_type
                near = isinstance(value, float) and np.float32(value) == np.float32(got)
                assert near or json.dumps(got, default=str) == json.dumps(value, default=str) or key == "rope_parameters", (path, key, value, got)
        assert source.config["dtype"] == "bfloat16" and len(source.config["architectures"]) == 1


def test_config_that_transformers_misreads_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import modeling_gguf_pytorch_utils

    path = make_gguf(tmp_path / "m.gguf", tokens=True)
    assert not read_gguf(path).problems
    original = modeling_gguf_pytorch_utils.load_gguf_checkpoint

    def wrong(*args: Any, **settings: Any) -> Any:
        read = original(*args, **settings)
        read["config"] |= {"rms_norm_eps": 1e-6, "eos_token_id": 2}
        return read

    monkeypatch.setattr(modeling_gguf_pytorch_utils, "load_gguf_checkpoint", wrong)
    assert [one.kind for one in read_gguf(path).problems] == ["config_differs"] * 2


def test_mapping_of_a_class_finds_every_parameter(tmp_path: Path) -> None:
    from dayzero.model.resolve import Resolved, resolve
    from dayzero.weights.mapping import map_checkpoint

    for path in (make_gguf(tmp_path / "a.gguf", mixed), make_moe(tmp_path / "c.gguf"), make_gguf(tmp_path / "t.gguf", tied=True)):
        source = read_gguf(path)
        resolved = resolve(source.release(logical=True))
        assert isinstance(resolved, Resolved)
        found = map_checkpoint(resolved.build(torch.bfloat16), source.tensors)
        assert not [one for one in found.problems if one.severity == "error"] and not found.dropped


# ------------------------------------------------------------------------------------------------- what does not fit is named


def test_what_transformers_skips_is_a_problem(tmp_path: Path) -> None:
    source = read_gguf(make_gguf(tmp_path / "m.gguf", extra={"rope_freqs.weight": (8,), "blk.0.unheard_of.weight": (4, 4)}))
    assert [(one.kind, one.tensor) for one in source.problems] == [("unused_tensor", "rope_freqs.weight"), ("unused_tensor", "blk.0.unheard_of.weight")]


def test_half_of_the_experts_missing(tmp_path: Path) -> None:
    source = read_gguf(make_moe(tmp_path / "m.gguf", drop=("blk.1.ffn_up_exps.weight",)))
    assert [one.kind for one in source.problems] == ["incomplete_tensor"]
    assert "model.layers.1.mlp.experts.gate_up_proj" in source.problems[0].detail and f"{4 * EXPERT_FEED} of its rows" in source.problems[0].detail
    assert "model.layers.1.mlp.experts.gate_up_proj" not in source.tensors


def test_form_the_package_cannot_decode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_gguf(tmp_path / "m.gguf", lambda name: Q.Q8_0)
    from dayzero.weights.gguf import decoding as gguf_decoding

    numbers = gguf_decoding.numbers_of

    def unable(data: np.ndarray, form: str) -> np.ndarray:
        if form == "Q8_0":
            raise NotImplementedError("not yet")
        return numbers(data, form)

    monkeypatch.setattr(gguf_decoding, "numbers_of", unable)
    assert {one.kind for one in read_gguf(path).problems} == {"unknown_form"}


def test_one_of_several_parts(tmp_path: Path) -> None:
    path = make_gguf(tmp_path / "m.gguf", change=lambda writer: writer.add_uint16("split.count", 3))
    with pytest.raises(DayZeroError, match="one of several parts"):
        read_gguf(path)


def test_unknown_architecture(tmp_path: Path) -> None:
    with pytest.raises(DayZeroError, match="transformers cannot read") as caught:
        read_gguf(make_gguf(tmp_path / "m.gguf", architecture="unheard"))
    assert "unheard" in caught.value.got


def test_tracing_says_why_a_tensor_is_made_whole() -> None:
    class Processor:
        config: dict[str, Any] = {}

        def process(self, weights: np.ndarray, name: str, **_: Any) -> Any:
            from transformers.modeling_gguf_pytorch_utils import GGUFTensor

            made = {"same": lambda: weights, "turned": lambda: weights.T, "abs": lambda: np.abs(weights), "swapped": lambda: weights[:, ::-1],
                    "blocks": lambda: weights.reshape(3, 2, 5), "rows": lambda: weights[::-1]}  # fmt: skip
            return GGUFTensor(made[name](), name, {})

    names = {name: name for name in ("same", "turned", "abs", "swapped", "blocks", "rows")}
    made, lost = trace(Processor(), names, dict.fromkeys(names, (6, 5)) | {"lost": (6, 5)})
    assert {name: isinstance(one.how, Moved) for name, one in made.items()} == {
        "same": True, "turned": False, "abs": False, "swapped": False, "blocks": False, "rows": True}  # fmt: skip
    assert made["turned"].how == Changed(shape=(5, 6), reason="it gives shape [2, 6]")
    assert isinstance(made["rows"].how, Moved) and not made["rows"].how.is_whole(6) and made["same"].how.is_whole(6)  # type: ignore[union-attr]
    assert list(lost) == ["lost"] and "KeyError" in lost["lost"]


# ------------------------------------------------------------------------------------------------------------------ the header


def kinds(path: Path) -> list[str]:
    return [problem.kind for problem in read_gguf_header(path)[1]]


def test_header_equals_the_package(tmp_path: Path) -> None:
    path = make_gguf(tmp_path / "m.gguf", mixed)
    header, problems = read_gguf_header(path)
    assert header is not None and not problems
    reader = gguf.GGUFReader(path)
    assert header.data_begin == reader.data_offset and list(header.tensors) == [one.name for one in reader.tensors]
    for one in reader.tensors:
        mine = header.tensors[one.name]
        assert (mine.form, mine.begin, mine.end - mine.begin) == (one.tensor_type.name, one.data_offset, one.n_bytes)
        assert mine.shape == tuple(reversed(one.shape.tolist()))
    for key, value in header.metadata.items():
        assert reader.fields[key].contents() == value


def test_damaged_headers_are_named(tmp_path: Path) -> None:
    path = make_gguf(tmp_path / "m.gguf", lambda name: Q.Q8_0)
    whole = path.read_bytes()
    header, _ = read_gguf_header(path)
    assert header is not None

    def damaged(at: int, new: bytes) -> list[str]:
        path.write_bytes(whole[:at] + new + whole[at + len(new) :])
        return kinds(path)

    assert damaged(0, b"GGUX") == ["not_gguf"]
    assert damaged(4, struct.pack("<I", 1)) == ["gguf_version"]
    assert damaged(4, struct.pack(">I", 3)) == ["gguf_version"]
    assert damaged(8, struct.pack("<Q", 2**60)) == ["gguf_counts"]
    assert damaged(16, struct.pack("<Q", 2**60)) == ["gguf_counts"]
    assert damaged(24, struct.pack("<Q", 2**62)) == ["truncated"]
    info = whole.index(b"blk.0.attn_q.weight") + len(b"blk.0.attn_q.weight")
    assert damaged(info, struct.pack("<I", 9)) == ["tensor_shape"]  # dimensions
    assert damaged(info + 4, struct.pack("<Q", 2**62)) == ["tensor_shape"]
    assert "tensor_shape" in damaged(info + 4, struct.pack("<Q", 63))  # no whole blocks
    assert "overlap" in damaged(info + 12, struct.pack("<Q", 640))
    assert damaged(info + 20, struct.pack("<I", 77)) == ["unknown_dtype"]
    assert "tensor_offsets" in damaged(info + 24, struct.pack("<Q", 7))
    assert set(damaged(info + 24, struct.pack("<Q", 2**40))) == {"hole", "truncated"}
    assert "duplicate_tensor" in damaged(info - len(b"blk.0.attn_q.weight"), b"blk.0.attn_k.weight")
    path.write_bytes(whole + b"\0" * 32)
    assert kinds(path) == ["trailing_bytes"]
    path.write_bytes(b"")
    assert kinds(path) == ["empty_file"]


def test_every_truncation(tmp_path: Path) -> None:
    path = make_gguf(tmp_path / "m.gguf", lambda name: Q.Q8_0)
    whole = path.read_bytes()
    header, _ = read_gguf_header(path)
    assert header is not None
    last = max(header.tensors.values(), key=lambda one: one.end)
    lengths = {*range(0, header.data_begin, 41), *range(header.data_begin, last.end, 9973), last.end - 1}
    for length in sorted(lengths):
        path.write_bytes(whole[:length])
        assert len(kinds(path)) == 1, length
        with pytest.raises(DayZeroError, match="not usable"):
            read_gguf(path)
    _, problems = read_gguf_header(path)
    assert problems[0].kind == "truncated" and problems[0].tensor is not None


def test_keys_twice_and_strange_values(tmp_path: Path) -> None:
    path = make_gguf(tmp_path / "m.gguf")
    whole = path.read_bytes()
    first, second = b"llama.block_count", b"llama.context_len"
    assert whole.count(second) == 1
    # The same key twice: one key renamed to another of the same length.
    text = b"llama.attention.head_count_kv"
    start = whole.index(text)
    path.write_bytes(whole[:start] + b"llama.attention.head_count_kx" + whole[start + len(text) :])
    assert kinds(path) == []  # another key is no damage of the container
    path.write_bytes(whole.replace(b"llama.block_count", b"llama.\xff\xfeock_count"))
    assert kinds(path) == ["gguf_text"]
    assert first in whole
    at = whole.index(b"llama.vocab_size") + len(b"llama.vocab_size")
    path.write_bytes(whole[:at] + struct.pack("<I", 99) + whole[at + 4 :])
    assert kinds(path) == ["gguf_type"]
    path.write_bytes(whole[:at] + struct.pack("<I", 9) + whole[at + 4 :])  # an array
    assert kinds(path)[0] in ("gguf_type", "gguf_counts", "truncated")
    path = make_gguf(tmp_path / "n.gguf", change=lambda writer: writer.add_uint32("general.alignment", 33))
    assert kinds(path) == ["gguf_alignment"]


def test_duplicate_setting(tmp_path: Path) -> None:
    def change(writer: Any) -> None:
        writer.add_uint32("zzz.one", 1)
        writer.add_uint32("zzz.two", 2)

    path = make_gguf(tmp_path / "m.gguf", change=change)
    path.write_bytes(path.read_bytes().replace(b"zzz.two", b"zzz.one"))
    assert kinds(path) == ["duplicate_key"]


# ---------------------------------------------------------------------------------------------------------------- the settings


def test_settings_are_written_and_agree(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    from dayzero.weights.gguf.fetched import write_release
    from tests.model.test_fetch import make_gguf as make_with_tokenizer

    make_with_tokenizer(tmp_path / "m.gguf")
    source = read_gguf(tmp_path / "m.gguf")
    write_settings(source, tmp_path / "settings")
    write_release(tmp_path / "m.gguf", tmp_path / "whole")  # the other way: through the loaded model
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "settings" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    mine, other = (json.loads((tmp_path / one / "config.json").read_text()) for one in ("settings", "whole"))
    assert {key: mine.get(key) for key in other} == other
    release = source.release(tmp_path / "settings")
    assert not release.errors and set(release.tensors) == set(source.stored) and release.tokenizer_files
    # A tokenizer from elsewhere is taken when it gives every id to the file's token, and else refused.
    write_settings(source, tmp_path / "again", tokenizer=tmp_path / "settings")
    assert (tmp_path / "again" / "tokenizer.json").read_bytes() == (tmp_path / "settings" / "tokenizer.json").read_bytes()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "settings")
    tokenizer.add_tokens(["another"])
    tokenizer.save_pretrained(tmp_path / "other")
    with pytest.raises(DayZeroError, match="disagrees") as caught:
        write_settings(source, tmp_path / "third", tokenizer=tmp_path / "other")
    assert "another" in caught.value.got
