"""Quantized releases as sources, FP8 and what holds for all forms: what is made of them, bit for bit against numpy references
written from the formats' definitions, what is refused, and the memory that it takes.
Cites CK-08, CK-17, NU-09."""

from __future__ import annotations

import json
import resource
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dayzero.core.errors import DayZeroError
from dayzero.core.units import DTYPE_BITS, SAFETENSORS_DTYPES
from dayzero.model.release import Release, open_release
from dayzero.weights.forms.plain_config import plain_config
from dayzero.weights.forms.stored import decode_stored, is_quantized
from dayzero.weights.reading import LocalStore, SourceReader
from tests.model.stored_releases import (
    AWQ,
    EXPERT,
    FP8,
    GPTQ,
    NAME,
    Tensors,
    as_dtype,
    assert_accounted,
    assert_same_bits,
    decoded_tensor,
    e4m3,
    e5m2,
    errors_of,
    float_codes,
    make_release,
    random,
    raw,
    read_all,
    read_rows,
    spread,
    warnings_of,
)

PROPERTY = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


# --- CK-08: pairing, FP8 without a scale, other tensors of one byte -------------------------------------------------------


def test_ck_08_a_scale_in_another_shard_meets_its_weight_and_integers_pass_bit_for_bit(tmp_path: Path) -> None:
    generator = random(0)
    weight, scale = float_codes((256, 384), generator), torch.rand(2, 3) + 0.5
    table, mask = torch.randint(-128, 128, (16, 4), dtype=torch.int8), torch.rand(8, 8) > 0.5
    plain = torch.randn(4, 4).to(torch.bfloat16)
    release = make_release(
        tmp_path, {f"{EXPERT}.weight": weight, "routing_table": table, "norm.weight": plain},
        {f"{EXPERT}.weight_scale_inv": scale, "mask": mask}, settings=FP8,
    )  # fmt: skip
    decoded = decode_stored(release, "bfloat16")
    assert decoded.problems == () and is_quantized(release)
    assert_accounted(release, decoded)
    found = read_all(release, decoded)
    assert set(found) == {f"{EXPERT}.weight", "routing_table", "mask", "norm.weight"}
    assert {tensor.dtype for tensor in found.values()} == {torch.bfloat16, torch.int8, torch.bool}
    wanted = e4m3(raw(weight)) * spread(scale.numpy(), (256, 384), (128, 128))
    assert_same_bits(found[f"{EXPERT}.weight"], as_dtype(wanted, "bfloat16"))
    assert torch.equal(found["routing_table"], table) and torch.equal(found["mask"], mask)
    assert torch.equal(found["norm.weight"], plain)


def test_ck_08_fp8_without_a_scale_is_an_error_unless_its_values_are_asked_for(tmp_path: Path) -> None:
    weight = float_codes((6, 10), random(1))
    other = float_codes((128, 128), random(2))
    release = make_release(tmp_path, {f"{NAME}.weight": weight, f"{EXPERT}.weight": other, f"{EXPERT}.weight_scale_inv": torch.ones(1, 1)},
                           settings=FP8)  # fmt: skip
    decoded = decode_stored(release, "bfloat16")
    assert errors_of(decoded) == [("scale_missing", f"{NAME}.weight")] and "--assume-unscaled" in decoded.problems[0].detail
    with pytest.raises(DayZeroError, match="cannot be read"):
        read_all(release, decoded)
    decoded = decode_stored(release, "bfloat16", upcast_unscaled=True)
    assert errors_of(decoded) == [] and warnings_of(decoded) == [("upcast_unscaled", f"{NAME}.weight")]
    assert decoded.decoders[f"{NAME}.weight"].operation == "upcast:fp8"
    assert_same_bits(read_all(release, decoded)[f"{NAME}.weight"], as_dtype(e4m3(raw(weight)), "bfloat16"))


def test_ck_08_everything_wrong_is_listed_at_once(tmp_path: Path) -> None:
    ones = torch.ones(128, 128).to(torch.float8_e4m3fn)
    release = make_release(tmp_path, {
        "a.weight": ones,  # no scale
        "b.weight_scale_inv": torch.ones(1, 1),  # no weight
        "c.weight": ones, "c.weight_scale_inv": torch.ones(3, 1),  # another grid
        "d.weight": ones, "d.weight_scale_inv": torch.ones(1, 1, dtype=torch.int16),  # no number
        "e.weight": torch.ones(4, 4), "e.weight_scale_inv": torch.ones(1, 1),  # applied or not?
        "f.weight": ones, "f.weight_scale_inv": torch.ones(1, 1), "f.pre_quant_scale": torch.ones(128),
    }, settings=FP8)  # fmt: skip
    assert sorted(errors_of(decode_stored(release, "bfloat16"))) == [
        ("scale_meaning", "d.weight_scale_inv"), ("scale_missing", "a.weight"), ("scale_of_plain", "e.weight_scale_inv"),
        ("scale_shape", "c.weight"), ("scale_without_weight", "b.weight_scale_inv"), ("stored_form", "f.weight"),
    ]  # fmt: skip


def test_ck_08_many_alike_are_one_line(tmp_path: Path) -> None:
    ones = torch.ones(2, 2).to(torch.float8_e4m3fn)
    release = make_release(tmp_path, {f"experts.{number}.w.weight": ones for number in range(40)}, settings=FP8)
    (problem,) = decode_stored(release, "bfloat16").problems
    assert problem.tensor == "experts.*.w.weight" and problem.detail.startswith(
        "experts.*.w.weight: 40 tensors, the first: experts.0"
    )


def test_scales_of_activations_and_caches_are_dropped_and_said(tmp_path: Path) -> None:
    one = torch.ones(1)
    tensors: Tensors = {}
    for layer in range(3):
        stem = f"model.layers.{layer}.self_attn"
        tensors |= {f"{stem}.k_proj.weight": torch.ones(4, 4).to(torch.float8_e4m3fn), f"{stem}.k_proj.weight_scale": one.clone(),
                    f"{stem}.k_proj.input_scale": one.clone(), f"{stem}.k_scale": one.clone(), f"{stem}.v_scale": one.clone()}  # fmt: skip
    release = make_release(tmp_path, tensors, settings={"quant_method": "fp8", "activation_scheme": "static"})
    decoded = decode_stored(release, "bfloat16")
    assert_accounted(release, decoded)
    assert set(decoded.tensors) == {f"model.layers.{layer}.self_attn.k_proj.weight" for layer in range(3)}
    assert decoded.dropped["model.layers.1.self_attn.k_scale"] == "a scale of the cache, not part of the weights"
    assert decoded.dropped["model.layers.1.self_attn.k_proj.input_scale"] == "a scale of activations, not part of the weights"
    assert len(decoded.dropped) == 9 and sorted(warnings_of(decoded)) == [
        ("kept_out", f"model.layers.*.self_attn.{name}") for name in ("k_proj.input_scale", "k_scale", "v_scale")
    ]  # fmt: skip


def test_a_plain_release_is_itself(tmp_path: Path) -> None:
    release = make_release(tmp_path, {"a.weight": torch.ones(2, 2), "scale": torch.ones(2), "a.k_scale": torch.ones(1)})
    assert decode_stored(release, "bfloat16").tensors is release.tensors and not is_quantized(release)


# --- CK-17 and NU-09: what scales mean, and which elements they scale ------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e8m0fnu])
def test_ck_17_exponent_scales_are_powers_of_two_in_either_dtype(dtype: torch.dtype, tmp_path: Path) -> None:
    scale = torch.tensor([[120, 127, 130]], dtype=torch.uint8).view(dtype)
    release = make_release(tmp_path, {f"{NAME}.weight": torch.ones(128, 384).to(torch.float8_e4m3fn), f"{NAME}.weight_scale_inv": scale},
                           settings=FP8 | {"scale_fmt": "ue8m0"})  # fmt: skip
    found = decoded_tensor(release, f"{NAME}.weight")
    assert found[5, ::128].tolist() == [2.0**-7, 1.0, 8.0] and found[127, [127, 255, 383]].tolist() == [2.0**-7, 1.0, 8.0]


def test_ck_17_bytes_without_a_declared_meaning_are_refused_and_nan_is_named(tmp_path: Path) -> None:
    ones = torch.ones(128, 384).to(torch.float8_e4m3fn)
    tensors = {f"{NAME}.weight": ones, f"{NAME}.weight_scale_inv": torch.tensor([[120, 127, 255]], dtype=torch.uint8)}
    release = make_release(tmp_path / "a", tensors, settings=FP8)
    assert errors_of(decode_stored(release, "bfloat16")) == [("scale_meaning", f"{NAME}.weight_scale_inv")]
    release = make_release(tmp_path / "b", tensors, settings=FP8 | {"scale_fmt": "ue8m0"})
    with pytest.raises(DayZeroError, match="NaN") as raised:
        decoded_tensor(release, f"{NAME}.weight")
    assert f"{NAME}.weight_scale_inv" in str(raised.value) and "[0, 2]" in str(raised.value)
    tensors[f"{NAME}.weight_scale_inv"] = torch.tensor([[1.0, float("nan"), 1.0]])
    release = make_release(tmp_path / "c", tensors, settings=FP8)
    with pytest.raises(DayZeroError, match="NaN") as raised:
        decoded_tensor(release, f"{NAME}.weight")
    assert f"{NAME}.weight_scale_inv" in str(raised.value) and "[0, 1]" in str(raised.value)


def test_ck_17_e4m3_scales_stored_as_bytes_are_numbers(tmp_path: Path) -> None:
    scale = torch.tensor([[0.5, 2.0]]).to(torch.float8_e4m3fn).view(torch.uint8)
    release = make_release(tmp_path, {f"{NAME}.weight": torch.ones(128, 256).to(torch.float8_e4m3fn), f"{NAME}.weight_scale_inv": scale},
                           settings=FP8 | {"scale_dtype": "e4m3"})  # fmt: skip
    assert decoded_tensor(release, f"{NAME}.weight")[0, ::128].tolist() == [0.5, 2.0]


def test_nu_09_the_last_block_is_partial(tmp_path: Path) -> None:
    """200x128 of ones with a [2, 1] grid; the case's 576x7168 has 5x56; and 1x1."""
    one = torch.ones(1, 1).to(torch.float8_e4m3fn)
    generator = random(3)
    large, scale = float_codes((576, 7168), generator), torch.rand(5, 56) + 0.5
    release = make_release(tmp_path, {
        "a.weight": one.expand(200, 128).clone(), "a.weight_scale_inv": torch.tensor([[2.0], [3.0]]),
        "b.weight": one, "b.weight_scale_inv": torch.tensor([[0.25]]),
        "c.kv_a_proj.weight": large, "c.kv_a_proj.weight_scale_inv": scale,
    }, settings=FP8)  # fmt: skip
    found = read_all(release, decode_stored(release, "bfloat16"))
    assert found["a.weight"][[0, 100, 127, 128, 199], 0].tolist() == [2.0, 2.0, 2.0, 3.0, 3.0]
    assert found["b.weight"].tolist() == [[0.25]]
    wanted = e4m3(raw(large)) * spread(scale.numpy(), (576, 7168), (128, 128))
    assert_same_bits(found["c.kv_a_proj.weight"], as_dtype(wanted, "bfloat16"))


def test_nu_09_a_grid_of_the_wrong_shape_names_tensor_and_shapes(tmp_path: Path) -> None:
    ones = torch.ones(1000, 128).to(torch.float8_e4m3fn)
    release = make_release(tmp_path, {f"{NAME}.weight": ones, f"{NAME}.weight_scale_inv": torch.ones(9, 1)}, settings=FP8)
    (problem,) = decode_stored(release, "bfloat16").problems
    assert problem.tensor == f"{NAME}.weight" and "[9, 1]" in problem.detail and "[8, 1]" in problem.detail
    # The same without a declared block size: 1000 / 8 = 125 rows would divide, and are not what was meant.
    release = make_release(tmp_path / "b", {f"{NAME}.weight": ones, f"{NAME}.weight_scale_inv": torch.ones(8, 1)},
                           settings={"quant_method": "fp8"})  # fmt: skip
    (problem,) = decode_stored(release, "bfloat16").problems
    assert problem.kind == "stored_form" and "[8, 1]" in problem.detail and "[1000, 128]" in problem.detail


@PROPERTY
@given(data=st.data())
def test_nu_09_fp8_blocks_of_any_shape_and_any_run_of_rows(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    rows, columns = data.draw(st.integers(1, 300)), data.draw(st.integers(1, 300))
    block = (data.draw(st.sampled_from([1, 2, 32, 128])), data.draw(st.sampled_from([16, 32, 128])))
    kind = data.draw(st.sampled_from(["float32", "bfloat16", "float16", "float8_e8m0fnu"]))
    code = data.draw(st.sampled_from([torch.float8_e4m3fn, torch.float8_e5m2]))
    dtype = data.draw(st.sampled_from(["bfloat16", "float32"]))
    generator = random(data.draw(st.integers(0, 999)))
    weight = float_codes((rows, columns), generator, code)
    grid = (-(-rows // block[0]), -(-columns // block[1]))
    scale = torch.from_numpy(generator.uniform(0.1, 2, grid).astype(np.float32)).to(getattr(torch, kind))
    exact = scale.to(torch.float32).numpy()
    if kind == "float8_e8m0fnu":
        exponents = generator.integers(110, 140, grid, dtype=np.uint8)
        scale, exact = torch.from_numpy(exponents).view(torch.float8_e8m0fnu), np.exp2(exponents.astype(np.float32) - 127)
    ending = data.draw(st.sampled_from(["weight_scale_inv", "weight_scale", "scale"]))
    release = make_release(tmp_path_factory.mktemp("fp8"), {f"{NAME}.weight": weight, f"{NAME}.{ending}": scale},
                           settings=FP8 | {"weight_block_size": list(block)})  # fmt: skip
    wanted = (e4m3 if code == torch.float8_e4m3fn else e5m2)(raw(weight)) * spread(exact, (rows, columns), block)
    whole = as_dtype(wanted, dtype)
    decoded = decode_stored(release, dtype)
    assert_same_bits(read_all(release, decoded)[f"{NAME}.weight"], whole)
    start = data.draw(st.integers(0, rows - 1))
    stop = data.draw(st.integers(start + 1, rows))
    assert_same_bits(read_rows(release, decoded, f"{NAME}.weight", start, stop), whole[start:stop])


@pytest.mark.parametrize("shape", [(), (1,), (6,), (6, 1), (1, 10), (1, 1)])
def test_fp8_of_one_scale_a_tensor_a_row_or_a_column(shape: tuple[int, ...], tmp_path: Path) -> None:
    weight, scale = float_codes((6, 10), random(4)), torch.rand(shape) + 0.5
    release = make_release(
        tmp_path, {f"{NAME}.weight": weight, f"{NAME}.weight_scale": scale}, settings={"quant_method": "fbgemm_fp8"}
    )
    full = scale.numpy().reshape(6, 1) if shape == (6,) else scale.numpy()
    assert_same_bits(decoded_tensor(release, f"{NAME}.weight"), as_dtype(e4m3(raw(weight)) * full, "bfloat16"))


def test_stacked_experts_have_blocks_or_rows_each(tmp_path: Path) -> None:
    generator = random(5)
    weight, scale = float_codes((3, 200, 130), generator), torch.rand(3, 2, 2) + 0.5
    columns = torch.rand(3, 1, 130) + 0.5
    release = make_release(
        tmp_path / "a", {"mlp.experts.up_proj": weight, "mlp.experts.up_proj_scale_inv": scale}, settings=FP8
    )
    wanted = np.stack([e4m3(raw(weight))[e] * spread(scale[e].numpy(), (200, 130), (128, 128)) for e in range(3)])
    assert_same_bits(decoded_tensor(release, "mlp.experts.up_proj"), as_dtype(wanted, "bfloat16"))
    decoded = decode_stored(release, "bfloat16")
    assert_same_bits(
        read_rows(release, decoded, "mlp.experts.up_proj", 190, 410), as_dtype(wanted, "bfloat16").reshape(600, 130)[190:410]
    )
    release = make_release(tmp_path / "b", {"mlp.experts.up_proj": weight, "mlp.experts.up_proj_scale": columns},
                           settings={"quant_method": "fbgemm_fp8"})  # fmt: skip
    assert_same_bits(decoded_tensor(release, "mlp.experts.up_proj"), as_dtype(e4m3(raw(weight)) * columns.numpy(), "bfloat16"))


# --- the config of plain numbers -------------------------------------------------------------------------------------------


def test_a_plain_config_says_nothing_of_quantization() -> None:
    config = {
        "model_type": "a", "torch_dtype": "float8_e4m3fn", "expert_dtype": "fp4", "quantization_config": {"quant_method": "fp8"},
        "text_config": {"dtype": "float8_e4m3fn", "hidden_size": 4, "compression_config": {}, "quantization_config": {}},
        "vision_config": {"dtype": "float32", "deeper": [{"kept": 1}]},
    }  # fmt: skip
    assert plain_config(config, "bfloat16") == {
        "model_type": "a", "torch_dtype": "bfloat16", "text_config": {"dtype": "bfloat16", "hidden_size": 4},
        "vision_config": {"dtype": "float32", "deeper": [{"kept": 1}]},
    }  # fmt: skip
    assert plain_config({"a": 1}, "float16") == {"a": 1, "dtype": "float16"}


# --- memory ----------------------------------------------------------------------------------------------------------------


def hollow_release(folder: Path, tensors: dict[str, tuple[str, tuple[int, ...]]], settings_: dict[str, Any]) -> Release:
    """A release of full size that holds nothing: a header and a sparse file."""
    header, offset = {}, 0
    for name, (dtype, shape) in tensors.items():
        size = DTYPE_BITS[SAFETENSORS_DTYPES[dtype]] * prod(shape) // 8
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + offset)
    (folder / "config.json").write_text(json.dumps({"model_type": "none", "quantization_config": settings_}))
    return open_release(folder)


@pytest.mark.parametrize(
    ("tensors", "settings_"),
    [
        ({"a.weight": ("F8_E4M3", (129280, 7168)), "a.weight_scale_inv": ("F32", (1010, 56))}, FP8),
        ({"a.qweight": ("I32", (896, 129280)), "a.scales": ("F16", (56, 129280)), "a.qzeros": ("I32", (56, 16160))},
         GPTQ | {"group_size": 128}),
        ({"a.qweight": ("I32", (7168, 16160)), "a.scales": ("F16", (56, 129280)), "a.qzeros": ("I32", (56, 16160))},
         AWQ | {"group_size": 128}),
        ({"m.experts.a_blocks": ("U8", (2, 40960, 512, 16)), "m.experts.a_scales": ("U8", (2, 40960, 512))},
         {"quant_method": "mxfp4"}),
    ],
    ids=["fp8", "gptq", "awq", "mxfp4-blocks"],
)  # fmt: skip
def test_a_table_of_a_gigabyte_is_decoded_in_tens_of_megabytes(
    tensors: dict[str, tuple[str, tuple[int, ...]]], settings_: dict[str, Any], tmp_path: Path
) -> None:
    """A run of rows from the middle: what is read for it, and the process's own memory."""
    release = hollow_release(tmp_path, tensors, settings_)
    decoded = decode_stored(release, "bfloat16")
    assert errors_of(decoded) == []
    ((name, decoder),) = decoded.decoders.items()
    with SourceReader(LocalStore(release.folder), release.tensors, decoders=decoded.decoders) as reader:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for part in (1, 2, 3):
            reader.read_into(name, decoder.num_bytes // 4 * part, memoryview(bytearray(2**19)))
        assert reader.bytes_read <= 3 * 40 * 2**20
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before <= 200 * 2**10  # KiB
