"""Quantized releases through the whole conversion: rank shards equal those of the same release written in the plain numbers that
numpy makes of the codes. Cites CK-08, CK-09, CK-16, NU-16."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from dayzero.core.artifact import ArtifactLayout
from dayzero.core.errors import DayZeroError
from dayzero.core.plan import Layout
from dayzero.core.records import read_record
from dayzero.model.describe import describe
from dayzero.model.release import open_release
from dayzero.weights.convert import convert
from dayzero.weights.forms.stored import decode_stored
from tests.model.stored_releases import (
    FP8,
    Tensors,
    as_dtype,
    assert_accounted,
    assert_same_bits,
    compressed,
    e2m1,
    e4m3,
    float_codes,
    int_weights,
    make_release,
    raw,
    read_all,
    spread,
    words_of,
)

Tiny = Callable[..., Path]
MXFP4 = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"],
}


def tensors_of(folder: Path) -> Tensors:
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def rank_shards(out: Path) -> list[Tensors]:
    artifact = read_record(ArtifactLayout, out / "layout.json")
    return [{name: tensor for one in files for name, tensor in load_file(out / one.file).items()} for files in artifact.files]


def assert_converts_alike(quantized: Path, plain: Path, place: Path, layouts: list[Layout]) -> None:
    """Bitwise, for each layout; and every stored tensor is used or dropped."""
    model, reference = describe(quantized), describe(plain)
    assert not [one for one in model.problems if one.severity == "error"], model.problems
    for number, layout in enumerate(layouts):
        report = convert(quantized, model, layout, place / f"quantized-{number}")
        convert(plain, reference, layout, place / f"plain-{number}")
        for found, wanted in zip(
            rank_shards(place / f"quantized-{number}"), rank_shards(place / f"plain-{number}"), strict=True
        ):
            assert found.keys() == wanted.keys()
            for name, tensor in wanted.items():
                assert_same_bits(found[name], tensor)
        release = open_release(quantized)
        assert report.ledger.source_bytes == release.checkpoint_bytes
        lost = sum(release.tensors[name].num_bytes for name in report.ledger.dropped)
        assert report.ledger.used_bytes + lost == report.ledger.source_bytes


def quantized_pair(source: Path, place: Path, quantize: Callable[[str, torch.Tensor], tuple[Tensors, Tensors, np.ndarray] | None],
                   settings: dict[str, Any]) -> tuple[Path, Path]:  # fmt: skip
    """(quantized release, plain release of the same numbers). `quantize`: for a name, what is stored in the first file and in the
    second, and the float32 numbers it stands for; None: the tensor stays as it is."""
    first, second, plain = {}, {}, {}
    for name, tensor in tensors_of(source).items():
        made = quantize(name, tensor)
        if made is None:
            first[name] = plain[name] = tensor
            continue
        first |= made[0]
        second |= made[1]
        plain[name] = as_dtype(made[2], "bfloat16")
    config = json.loads((source / "config.json").read_text())
    make_release(place / "quantized", first, second, settings=settings, config=config)
    make_release(place / "plain", plain, config=config)
    return place / "quantized", place / "plain"


def is_linear(name: str, tensor: torch.Tensor) -> bool:
    return tensor.dim() == 2 and name.endswith("_proj.weight")


def test_ck_08_an_fp8_moe_with_its_scales_in_another_shard(tiny_checkpoint: Tiny, tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    block = (16, 32)

    def quantize(name: str, tensor: torch.Tensor) -> tuple[Tensors, Tensors, np.ndarray] | None:
        if not is_linear(name, tensor):
            return None
        shape = (tensor.shape[0], tensor.shape[1])
        grid = (-(-shape[0] // block[0]), -(-shape[1] // block[1]))
        codes, scale = float_codes(shape, generator), torch.from_numpy(generator.uniform(0.001, 0.01, grid).astype(np.float32))
        numbers = e4m3(raw(codes)) * spread(scale.numpy(), shape, block)
        extra = {name.replace(".weight", ".input_scale"): torch.ones(1)} if "q_proj" in name else {}
        return {name: codes}, {f"{name}_scale_inv": scale} | extra, numbers

    source = tiny_checkpoint("qwen3_moe")
    quantized, plain = quantized_pair(
        source, tmp_path, quantize, FP8 | {"weight_block_size": list(block), "activation_scheme": "static"}
    )
    assert any(".experts." in name for name in decode_stored(open_release(quantized), "bfloat16").decoders)
    assert_converts_alike(quantized, plain, tmp_path, [Layout(), Layout(tp=2), Layout(tp=2, ep=2)])
    ledger = (tmp_path / "quantized-1/rank-00001/ledger.jsonl").read_text()
    assert "dequantize:fp8, scales of 16x32" in ledger and "weight_scale_inv" in ledger


def test_ck_16_a_packed_int4_model(tiny_checkpoint: Tiny, tmp_path: Path) -> None:
    generator = np.random.default_rng(1)

    def quantize(name: str, tensor: torch.Tensor) -> tuple[Tensors, Tensors, np.ndarray] | None:
        rows, columns = tensor.shape if tensor.dim() == 2 else (0, 0)
        if not is_linear(name, tensor) or columns % 32:
            return None
        codes = generator.integers(-8, 8, (rows, columns))
        scale = torch.from_numpy(generator.uniform(0.001, 0.02, (rows, columns // 32)).astype(np.float32)).to(torch.bfloat16)
        stem = name.removesuffix(".weight")
        numbers = codes.astype(np.float32) * spread(scale.float().numpy(), (rows, columns), (1, 32))
        return {f"{stem}.weight_packed": torch.from_numpy(words_of(codes + 8, 4))}, {
            f"{stem}.weight_scale": scale, f"{stem}.weight_shape": torch.tensor([rows, columns])}, numbers  # fmt: skip

    quantized, plain = quantized_pair(
        tiny_checkpoint("llama"), tmp_path, quantize, compressed("pack-quantized", int_weights(), ignore=("lm_head",))
    )
    assert len(decode_stored(open_release(quantized), "bfloat16").decoders) >= 6
    assert_converts_alike(quantized, plain, tmp_path, [Layout(), Layout(tp=2)])


def mxfp4_pair(source: Path, place: Path) -> tuple[Path, Path]:
    generator = np.random.default_rng(2)

    def quantize(name: str, tensor: torch.Tensor) -> tuple[Tensors, Tensors, np.ndarray] | None:
        if not re.search(r"experts\.(gate_up|down)_proj$", name):
            return None
        experts, columns, rows = tensor.shape
        codes = generator.integers(0, 16, (experts, rows, columns), dtype=np.uint8)
        exponents = generator.integers(118, 124, (experts, rows, columns // 32), dtype=np.uint8)
        packed = (codes[..., 0::2] | codes[..., 1::2] << 4).reshape(experts, rows, columns // 32, 16)
        numbers = e2m1(codes) * np.repeat(np.exp2(exponents.astype(np.float32) - 127), 32, axis=-1)
        return {f"{name}_blocks": torch.from_numpy(packed)}, {f"{name}_scales": torch.from_numpy(exponents)}, \
            np.ascontiguousarray(numbers.transpose(0, 2, 1))  # fmt: skip

    return quantized_pair(source, place, quantize, MXFP4)


def test_mxfp4_blocks_of_stacked_experts(tiny_checkpoint: Tiny, tmp_path: Path) -> None:
    quantized, plain = mxfp4_pair(tiny_checkpoint("gpt_oss"), tmp_path)
    assert len(decode_stored(open_release(quantized), "bfloat16").decoders) >= 2
    assert_converts_alike(quantized, plain, tmp_path, [Layout(), Layout(tp=2), Layout(tp=2, ep=2)])


@pytest.mark.parametrize(("model_type", "interleaved"), [("gpt_oss", True), ("qwen3_moe", False)])
def test_nu_16_every_rank_gets_matching_gate_and_up_rows(
    model_type: str, interleaved: bool, tiny_checkpoint: Tiny, tmp_path: Path
) -> None:
    """The experts' middle, gate and up alone, from two ranks' shards: together those of the whole, in order, and each pair on one
    rank. Exchanged halves would show: silu(gate) * up is not symmetric."""
    source = tiny_checkpoint(model_type)
    source = mxfp4_pair(source, tmp_path)[0] if interleaved else source
    model = describe(source)
    whole = {}
    for number, layout in enumerate((Layout(), Layout(tp=2))):
        convert(source, model, layout, tmp_path / f"out-{number}")
        whole[number] = rank_shards(tmp_path / f"out-{number}")
    name = next(name for name in whole[0][0] if re.search(r"experts\.gate_up_proj$", name))

    def middle(weight: torch.Tensor) -> torch.Tensor:
        """silu(gate) * up for one input, [experts, width], by the family's layout of its own tensor."""
        generator = torch.Generator().manual_seed(3)
        wide = weight.to(torch.float32)
        wide = wide.transpose(1, 2) if interleaved else wide  # [experts, gate and up, input]
        rows = torch.einsum("erh,h->er", wide, torch.randn(wide.shape[2], generator=generator))
        gate, up = (rows[:, 0::2], rows[:, 1::2]) if interleaved else rows.chunk(2, dim=1)
        return torch.nn.functional.silu(gate) * up

    wanted = middle(whole[0][0][name])
    parts = [middle(shards[name]) for shards in whole[1]]
    assert [part.shape[1] for part in parts] == [wanted.shape[1] // 2] * 2
    torch.testing.assert_close(torch.cat(parts, dim=1), wanted, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(middle(whole[0][0][name].flip(2 if interleaved else 1)), wanted, rtol=1e-2)


def test_nu_16_a_fused_tensor_of_an_unknown_family_is_refused(tiny_checkpoint: Tiny, tmp_path: Path) -> None:
    source = mxfp4_pair(tiny_checkpoint("gpt_oss"), tmp_path)[0]
    model = describe(source)
    config = json.loads((source / "config.json").read_text()) | {"model_type": "nobody_knows", "architectures": ["NobodyKnows"]}
    (source / "config.json").write_text(json.dumps(config))
    with pytest.raises(DayZeroError, match="cannot be converted"):
        convert(source, model, Layout(tp=2), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_ck_08_a_missing_scale_stops_conversion_and_names_the_tensor_alone(tiny_checkpoint: Tiny, tmp_path: Path) -> None:
    def quantize(name: str, tensor: torch.Tensor) -> tuple[Tensors, Tensors, np.ndarray] | None:
        if not is_linear(name, tensor):
            return None
        codes = float_codes((tensor.shape[0], tensor.shape[1]), np.random.default_rng(4))
        scales = (
            {}
            if "layers.0.mlp.up_proj" in name
            else {f"{name}_scale_inv": torch.ones(-(-tensor.shape[0] // 128), -(-tensor.shape[1] // 128))}
        )
        return {name: codes}, scales, e4m3(raw(codes))

    quantized, _ = quantized_pair(tiny_checkpoint("llama"), tmp_path, quantize, FP8)
    with pytest.raises(DayZeroError) as raised:
        convert(quantized, describe(quantized), Layout(), tmp_path / "out")
    assert (
        "1 problem" in str(raised.value)
        and "layers.0.mlp.up_proj.weight" in str(raised.value)
        and "no scale" in str(raised.value)
    )
    assert not (tmp_path / "out").exists()


def test_ck_09_a_tied_model_in_fp8_fills_its_head_from_the_embedding(tiny_checkpoint: Tiny, tmp_path: Path) -> None:
    def quantize(name: str, tensor: torch.Tensor) -> tuple[Tensors, Tensors, np.ndarray] | None:
        if not is_linear(name, tensor):
            return None
        codes = float_codes((tensor.shape[0], tensor.shape[1]), np.random.default_rng(5))
        return {name: codes}, {f"{name}_scale_inv": torch.full((1, 1), 0.01)}, e4m3(raw(codes)) * np.float32(0.01)

    source = tiny_checkpoint("gemma3_text")
    assert "lm_head.weight" not in tensors_of(source)
    quantized, plain = quantized_pair(source, tmp_path, quantize, FP8 | {"weight_block_size": [4096, 4096]})
    assert_converts_alike(quantized, plain, tmp_path, [Layout()])
    (stored,) = rank_shards(tmp_path / "quantized-0")
    head = stored.get("lm_head.weight", stored["model.embed_tokens.weight"])
    assert torch.equal(head, stored["model.embed_tokens.weight"])


def test_every_stored_tensor_of_a_release_with_draft_layers_is_accounted_for(tiny_checkpoint: Tiny, tmp_path: Path) -> None:
    """Draft layers decode like the others; conversion drops them with all their scales, and says why."""
    source = tiny_checkpoint("deepseek_v3")
    config = json.loads((source / "config.json").read_text())
    layers = config["num_hidden_layers"]
    config["num_nextn_predict_layers"] = 1
    tensors = tensors_of(source)
    weight, scale = float_codes((32, 64), np.random.default_rng(6)), torch.ones(1, 1)
    draft = f"model.layers.{layers}.eh_proj"
    release = make_release(
        tmp_path / "q", tensors | {f"{draft}.weight": weight}, {f"{draft}.weight_scale_inv": scale}, settings=FP8, config=config
    )
    decoded = decode_stored(release, "bfloat16")
    assert_accounted(release, decoded)
    assert_same_bits(read_all(release, decoded)[f"{draft}.weight"], as_dtype(e4m3(raw(weight)), "bfloat16"))
    report = convert(tmp_path / "q", describe(tmp_path / "q"), Layout(), tmp_path / "out")
    assert set(report.ledger.dropped) == {f"{draft}.weight", f"{draft}.weight_scale_inv"}
    assert report.ledger.used_bytes + weight.numel() + 4 == report.ledger.source_bytes
