"""Releases of four-bit floats and of integers as sources: what is made of each form, bit for bit against numpy references written
from the formats' definitions, and what is refused. Cites CK-16."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dayzero.core.errors import DayZeroError
from dayzero.weights.forms.stored import decode_stored
from tests.model.stored_releases import (
    AWQ,
    EXPERT,
    FP8,
    GPTQ,
    MXFP4,
    NAME,
    NVFP4,
    Tensors,
    as_dtype,
    assert_accounted,
    assert_same_bits,
    compressed,
    decoded_tensor,
    e4m3,
    errors_of,
    float_codes,
    int_weights,
    make_release,
    packed_fp4,
    random,
    raw,
    read_all,
    read_rows,
    spread,
    warnings_of,
    words_of,
)

PROPERTY = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


# --- four bits -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [(0, 256), (5, 37), (32, 64), (100, 200), (127, 129)])
def test_mxfp4_blocks_come_out_transposed_as_the_class_holds_them(rows: tuple[int, int], tmp_path: Path) -> None:
    generator = random(6)
    stored, values = packed_fp4(generator, 4, 48, 64)
    exponents = generator.integers(118, 135, (4, 48, 2), dtype=np.uint8)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    release = make_release(tmp_path, {f"{name}_blocks": stored.reshape(4, 48, 2, 16)}, {f"{name}_scales": torch.from_numpy(exponents)},
                           settings={"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})  # fmt: skip
    decoded = decode_stored(release, "bfloat16")
    assert decoded.problems == () and decoded.tensors[name].shape == (4, 64, 48)
    wanted = values * np.repeat(np.exp2(exponents.astype(np.float32) - 127), 32, axis=-1)
    whole = as_dtype(np.ascontiguousarray(wanted.transpose(0, 2, 1)), "bfloat16")
    assert_same_bits(read_all(release, decoded)[name], whole)
    assert_same_bits(read_rows(release, decoded, name, *rows), whole.reshape(256, 48)[slice(*rows)])


def test_mxfp4_blocks_larger_than_what_is_kept_are_read_in_strips(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = random(6)
    stored, values = packed_fp4(generator, 2, 8, 320)
    exponents = generator.integers(118, 135, (2, 8, 10), dtype=np.uint8)
    release = make_release(tmp_path, {"mlp.experts.w_blocks": stored.reshape(2, 8, 10, 16), "mlp.experts.w_scales": torch.from_numpy(exponents)},
                           settings={"quant_method": "mxfp4"})  # fmt: skip
    wanted = values * np.repeat(np.exp2(exponents.astype(np.float32) - 127), 32, axis=-1)
    monkeypatch.setattr("dayzero.weights.forms.columns.PANEL_BYTES", 8 * 16 * 3)
    decoded = decode_stored(release, "float32")
    whole = as_dtype(np.ascontiguousarray(wanted.transpose(0, 2, 1)), "float32")
    assert_same_bits(read_all(release, decoded)["mlp.experts.w"], whole)
    assert_same_bits(read_rows(release, decoded, "mlp.experts.w", 90, 500), whole.reshape(640, 8)[90:500])


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float16"])
def test_mxfp4_of_packed_rows(dtype: str, tmp_path: Path) -> None:
    generator = random(7)
    stored, values = packed_fp4(generator, 20, 96)
    exponents = generator.integers(118, 135, (20, 3), dtype=np.uint8)
    release = make_release(tmp_path, {f"{NAME}.weight_packed": stored, f"{NAME}.weight_scale": torch.from_numpy(exponents)},
                           settings=compressed("mxfp4-pack-quantized", MXFP4))  # fmt: skip
    wanted = values * np.repeat(np.exp2(exponents.astype(np.float32) - 127), 32, axis=-1)
    assert_same_bits(decoded_tensor(release, f"{NAME}.weight", dtype), as_dtype(wanted, dtype))


def test_fp4_experts_in_an_fp8_release_go_by_their_own_rule(tmp_path: Path) -> None:
    generator = random(8)
    stored, values = packed_fp4(generator, 16, 64)
    exponents = generator.integers(118, 135, (16, 2), dtype=np.uint8)
    dense, scale = float_codes((130, 64), generator), torch.tensor([[126], [129]], dtype=torch.uint8)
    release = make_release(tmp_path, {
        "layers.0.ffn.experts.0.w1.weight": stored.view(torch.int8),
        "layers.0.ffn.experts.0.w1.scale": torch.from_numpy(exponents).view(torch.float8_e8m0fnu),
        "layers.0.attn.wo.weight": dense, "layers.0.attn.wo.scale": scale.view(torch.float8_e8m0fnu),
    }, settings=FP8 | {"scale_fmt": "ue8m0"}, config={"model_type": "none", "expert_dtype": "fp4", "torch_dtype": "bfloat16"})  # fmt: skip
    found = read_all(release, decode_stored(release, "bfloat16"))
    wanted = values * np.repeat(np.exp2(exponents.astype(np.float32) - 127), 32, axis=-1)
    assert_same_bits(found["layers.0.ffn.experts.0.w1.weight"], as_dtype(wanted, "bfloat16"))
    wanted = e4m3(raw(dense)) * spread(np.array([[0.5], [4]], dtype=np.float32), (130, 64), (128, 128))
    assert_same_bits(found["layers.0.attn.wo.weight"], as_dtype(wanted, "bfloat16"))


@pytest.mark.parametrize("scale_dtype", ["uint8", "float8_e8m0fnu"])
def test_mxfp8_has_an_exponent_for_32_columns(scale_dtype: str, tmp_path: Path) -> None:
    generator = random(9)
    weight, exponents = float_codes((10, 80), generator), generator.integers(118, 135, (10, 3), dtype=np.uint8)
    scale = torch.from_numpy(exponents).view(getattr(torch, scale_dtype))
    release = make_release(tmp_path, {f"{NAME}.weight": weight, f"{NAME}.weight_scale": scale},
                           settings={"quant_method": "modelopt", "quant_algo": "MXFP8"})  # fmt: skip
    wanted = e4m3(raw(weight)) * spread(np.exp2(exponents.astype(np.float32) - 127), (10, 80), (1, 32))
    assert_same_bits(decoded_tensor(release, f"{NAME}.weight"), as_dtype(wanted, "bfloat16"))


def test_nvfp4_divides_by_the_global_scale_or_multiplies_with_the_second_one(tmp_path: Path) -> None:
    """compressed-tensors stores the reciprocal of what ModelOpt stores: the wrong one is off by its square."""
    generator = random(10)
    stored, values = packed_fp4(generator, 12, 64)
    scale = torch.from_numpy(generator.uniform(1, 400, (12, 4)).astype(np.float32)).to(torch.float8_e4m3fn)
    block = e4m3(raw(scale))
    second = np.float32(2700.3)
    release = make_release(tmp_path / "a", {f"{NAME}.weight_packed": stored, f"{NAME}.weight_scale": scale,
                                            f"{NAME}.weight_global_scale": torch.tensor([second])},
                           settings=compressed("nvfp4-pack-quantized", NVFP4))  # fmt: skip
    wanted = values * np.repeat(block / second, 16, axis=-1)
    assert_same_bits(decoded_tensor(release, f"{NAME}.weight"), as_dtype(wanted, "bfloat16"))
    second = np.float32(0.000371)
    tensors = {f"{NAME}.weight": stored, f"{NAME}.weight_scale": scale, f"{NAME}.weight_scale_2": torch.tensor(second)}
    modelopt = {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}
    release = make_release(tmp_path / "b", tensors, settings=modelopt)
    wanted = values * np.repeat(block * second, 16, axis=-1)
    assert_same_bits(decoded_tensor(release, f"{NAME}.weight"), as_dtype(wanted, "bfloat16"))
    assert_accounted(release, decode_stored(release, "bfloat16"))
    del tensors[f"{NAME}.weight_scale_2"]
    release = make_release(tmp_path / "c", tensors, settings=modelopt)
    assert errors_of(decode_stored(release, "bfloat16")) == [("stored_form", f"{NAME}.weight")]


# --- CK-16: packed integers ------------------------------------------------------------------------------------------------


def pack_quantized(generator: np.random.Generator, rows: int, columns: int, *, bits: int, group: int | None, zeros: bool,
                   dtype: torch.dtype = torch.bfloat16) -> tuple[Tensors, np.ndarray]:  # fmt: skip
    """(tensors of the module, the float32 weight they stand for)."""
    half = 1 << (bits - 1)
    signed = generator.integers(-half, half, (rows, columns))
    size = group or columns
    scale = torch.from_numpy(generator.uniform(0.01, 0.2, (rows, -(-columns // size))).astype(np.float32)).to(dtype)
    tensors = {f"{NAME}.weight_packed": torch.from_numpy(words_of(signed + half, bits)), f"{NAME}.weight_scale": scale,
               f"{NAME}.weight_shape": torch.tensor([rows, columns])}  # fmt: skip
    point = np.zeros(scale.shape, dtype=np.int64)
    if zeros:
        point = generator.integers(-half, half, scale.shape)
        tensors[f"{NAME}.weight_zero_point"] = torch.from_numpy(np.ascontiguousarray(words_of(point.T + half, bits).T))
    numbers = (signed - spread(point, (rows, columns), (1, size))).astype(np.float32)
    return tensors, numbers * spread(scale.to(torch.float32).numpy(), (rows, columns), (1, size))


def test_ck_16_a_word_means_the_documented_signed_values(tmp_path: Path) -> None:
    one = {f"{NAME}.weight_packed": torch.tensor([[0x76543210]], dtype=torch.int32), f"{NAME}.weight_scale": torch.ones(1, 1)}
    release = make_release(tmp_path / "a", one | {f"{NAME}.weight_shape": torch.tensor([1, 8])},
                           settings=compressed("pack-quantized", int_weights(group=None)))  # fmt: skip
    assert decoded_tensor(release, f"{NAME}.weight").tolist() == [[-8, -7, -6, -5, -4, -3, -2, -1]]
    ten = {
        f"{NAME}.weight_packed": torch.tensor([[0x76543210, 0x000000F9]], dtype=torch.int32),
        f"{NAME}.weight_scale": torch.ones(1, 1),
    }
    ten |= {f"{NAME}.weight_shape": torch.tensor([1, 10])}
    release = make_release(tmp_path / "b", ten, settings=compressed("pack-quantized", int_weights(group=None)))
    assert decoded_tensor(release, f"{NAME}.weight").tolist() == [[-8, -7, -6, -5, -4, -3, -2, -1, 1, 7]]


def test_ck_16_an_order_that_is_not_known_is_refused(tmp_path: Path) -> None:
    tensors, _ = pack_quantized(random(11), 4, 32, bits=4, group=32, zeros=False)
    for number, (extra, metadata) in enumerate([({"packing_order": "interleaved"}, None), ({}, {"pack_order": "awq"})]):
        release = make_release(
            tmp_path / str(number), tensors, settings=compressed("pack-quantized", int_weights(), **extra), metadata=metadata
        )
        decoded = decode_stored(release, "bfloat16")
        assert errors_of(decoded) == [("stored_form", f"{NAME}.weight_packed")] and "order" in decoded.problems[0].detail


def test_ck_16_a_stored_shape_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    tensors, _ = pack_quantized(random(12), 4, 32, bits=4, group=32, zeros=False)
    release = make_release(tmp_path, tensors | {f"{NAME}.weight_shape": torch.tensor([4, 33])},
                           settings=compressed("pack-quantized", int_weights()))  # fmt: skip
    decoded = decode_stored(release, "bfloat16")
    assert errors_of(decoded) == [("stored_form", f"{NAME}.weight_packed")] and "[4, 33]" in decoded.problems[0].detail


@PROPERTY
@given(data=st.data())
def test_ck_16_packed_integers_of_any_width_group_and_shape(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    bits, zeros = data.draw(st.sampled_from([4, 8])), data.draw(st.booleans())
    group = data.draw(st.sampled_from([None, 32, 64, 128]))
    rows = data.draw(st.integers(1, 40))
    columns = data.draw(st.integers(1, 200)) if group is None else group * data.draw(st.integers(1, 3))
    dtype = data.draw(st.sampled_from(["bfloat16", "float32"]))
    tensors, wanted = pack_quantized(random(data.draw(st.integers(0, 999))), rows, columns, bits=bits, group=group, zeros=zeros)
    release = make_release(tmp_path_factory.mktemp("int"), tensors,
                           settings=compressed("pack-quantized", int_weights(bits, group, symmetric=not zeros)))  # fmt: skip
    decoded = decode_stored(release, dtype)
    assert decoded.problems == ()
    assert_accounted(release, decoded)
    whole = as_dtype(wanted, dtype)
    assert_same_bits(read_all(release, decoded)[f"{NAME}.weight"], whole)
    start = data.draw(st.integers(0, rows - 1))
    stop = data.draw(st.integers(start + 1, rows))
    assert_same_bits(read_rows(release, decoded, f"{NAME}.weight", start, stop), whole[start:stop])


def test_groups_in_another_order_of_columns(tmp_path: Path) -> None:
    tensors, _ = pack_quantized(random(13), 6, 64, bits=4, group=32, zeros=True)
    order = torch.from_numpy(random(14).permutation(np.repeat([0, 1], 32)).astype(np.int32))
    scale, zero = tensors[f"{NAME}.weight_scale"].float().numpy(), tensors[f"{NAME}.weight_zero_point"].numpy().view(np.uint32)
    codes = (tensors[f"{NAME}.weight_packed"].numpy().view(np.uint32)[:, :, None] >> np.arange(0, 32, 4, dtype=np.uint32)) & 15
    points = ((zero[:, None, :] >> np.arange(0, 32, 4, dtype=np.uint32)[None, :, None]) & 15).reshape(-1, 2)[:6]
    settings_ = compressed("pack-quantized", int_weights(symmetric=False, actorder="group"))
    release = make_release(tmp_path / "a", tensors | {f"{NAME}.weight_g_idx": order}, settings=settings_)
    numbers = (codes.reshape(6, 64).astype(np.float32) - points[:, order.numpy()].astype(np.float32)) * scale[:, order.numpy()]
    assert_same_bits(decoded_tensor(release, f"{NAME}.weight"), as_dtype(numbers, "bfloat16"))
    assert_accounted(release, decode_stored(release, "bfloat16"))
    order[7] = 2
    release = make_release(tmp_path / "b", tensors | {f"{NAME}.weight_g_idx": order}, settings=settings_)
    with pytest.raises(DayZeroError, match="g_idx names a group that does not exist") as raised:
        decoded_tensor(release, f"{NAME}.weight")
    assert "2 for column 7" in str(raised.value)


@pytest.mark.parametrize("form", ["int-quantized", "naive-quantized"])
@pytest.mark.parametrize("shape", [(1,), (6, 1)])
def test_integers_of_one_byte(form: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    generator = random(15)
    codes = torch.from_numpy(generator.integers(-128, 128, (6, 10), dtype=np.int8))
    scale, zero = torch.rand(shape).to(torch.bfloat16), torch.from_numpy(generator.integers(-128, 128, shape, dtype=np.int8))
    group = int_weights(8, None, symmetric=False) | {"input_activations": {"num_bits": 8, "type": "int", "dynamic": True}}
    release = make_release(tmp_path, {f"{NAME}.weight": codes, f"{NAME}.weight_scale": scale, f"{NAME}.weight_zero_point": zero},
                           settings=compressed(form, group))  # fmt: skip
    wanted = (codes.numpy().astype(np.float32) - zero.numpy().astype(np.float32)) * scale.float().numpy()
    assert_same_bits(decoded_tensor(release, f"{NAME}.weight"), as_dtype(wanted, "bfloat16"))


def test_each_group_of_a_mixed_release_goes_by_its_own_rule_and_ignored_modules_are_plain(tmp_path: Path) -> None:
    generator = random(16)
    tensors, wanted = pack_quantized(generator, 8, 128, bits=4, group=32, zeros=False)
    tensors = {name.replace(NAME, EXPERT): tensor for name, tensor in tensors.items()}
    codes, scale = float_codes((200, 128), generator), torch.rand(2, 1).to(torch.bfloat16)
    attention, head = "model.layers.0.self_attn.o_proj", torch.randn(4, 128).to(torch.bfloat16)
    tensors |= {f"{attention}.weight": codes, f"{attention}.weight_scale": scale, "lm_head.weight": head}
    fp8 = {"weights": {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]},
           "targets": ["re:.*self_attn.*"], "format": "float-quantized"}  # fmt: skip
    int4 = int_weights() | {"targets": ["re:.*experts.*"], "format": "pack-quantized"}
    release = make_release(tmp_path / "a", tensors, settings=compressed("mixed-precision", fp8, int4, ignore=("lm_head",)))
    decoded = decode_stored(release, "bfloat16")
    assert decoded.problems == ()
    found = read_all(release, decoded)
    assert_same_bits(found[f"{EXPERT}.weight"], as_dtype(wanted, "bfloat16"))
    numbers = e4m3(raw(codes)) * spread(scale.float().numpy(), (200, 128), (128, 128))
    assert_same_bits(found[f"{attention}.weight"], as_dtype(numbers, "bfloat16"))
    assert torch.equal(found["lm_head.weight"], head)
    # The rules of the two groups exchanged: the tensors are not what the settings say.
    fp8["targets"], int4["targets"] = int4["targets"], fp8["targets"]
    release = make_release(tmp_path / "b", tensors, settings=compressed("mixed-precision", fp8, int4, ignore=("lm_head",)))
    assert [kind for kind, _ in errors_of(decode_stored(release, "bfloat16"))] == ["stored_form"] * 2


def test_a_method_that_is_not_known_is_refused_by_name(tmp_path: Path) -> None:
    release = make_release(tmp_path, {f"{NAME}.weight": torch.ones(4, 4, dtype=torch.int8), f"{NAME}.weight_scale": torch.ones(1)},
                           settings={"quant_method": "somebody"})  # fmt: skip
    (problem,) = decode_stored(release, "bfloat16").problems
    assert problem.severity == "error" and "'somebody'" in problem.detail


def test_a_module_that_the_settings_except_is_read_as_the_others_and_said(tmp_path: Path) -> None:
    weight, scale = float_codes((8, 8), random(17)), torch.rand(1, 1)
    release = make_release(tmp_path, {"lm_head.weight": weight, "lm_head.weight_scale_inv": scale}, settings=FP8)
    decoded = decode_stored(release, "bfloat16")
    assert errors_of(decoded) == [] and warnings_of(decoded) == [("quantized_exception", "lm_head.weight")]
    assert_same_bits(read_all(release, decoded)["lm_head.weight"], as_dtype(e4m3(raw(weight)) * scale.numpy(), "bfloat16"))


# --- GPTQ and AWQ ----------------------------------------------------------------------------------------------------------


def gptq(
    generator: np.random.Generator, rows: int, columns: int, *, bits: int, group: int, version: int, order: np.ndarray | None
) -> tuple[Tensors, np.ndarray]:
    """(tensors of the module, the float32 weight). Zero points of version 1 are stored less one, in the bits of a code."""
    groups, top = -(-columns // group), 1 << bits
    codes, zeros = generator.integers(0, top, (rows, columns)), generator.integers(0, top, (rows, groups))
    scale = torch.from_numpy(generator.uniform(0.01, 0.2, (groups, rows)).astype(np.float16))
    stored = (zeros - 1) % top if version == 1 else zeros
    index = np.arange(columns) // group if order is None else order
    tensors = {f"{NAME}.qweight": torch.from_numpy(np.ascontiguousarray(words_of(codes, bits).T)), f"{NAME}.scales": scale,
               f"{NAME}.qzeros": torch.from_numpy(words_of(stored.T, bits)), f"{NAME}.g_idx": torch.from_numpy(index.astype(np.int32))}  # fmt: skip
    numbers = (codes - zeros[:, index]).astype(np.float32) * scale.float().numpy().T[:, index]
    return tensors, numbers


@PROPERTY
@given(data=st.data())
def test_gptq_of_any_width_version_and_order(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    bits, version = data.draw(st.sampled_from([2, 4, 8])), data.draw(st.sampled_from([1, 2]))
    group = data.draw(st.sampled_from([32, 64, 128]))
    rows, columns = 32 * data.draw(st.integers(1, 6)), group * data.draw(st.integers(1, 3))
    generator = random(data.draw(st.integers(0, 999)))
    order = generator.permutation(np.arange(columns) // group) if data.draw(st.booleans()) else None
    dtype = data.draw(st.sampled_from(["bfloat16", "float32", "float16"]))
    tensors, wanted = gptq(generator, rows, columns, bits=bits, group=group, version=version, order=order)
    given_settings = GPTQ | {"bits": bits, "group_size": group, "checkpoint_format": "gptq" if version == 1 else "gptq_v2"}
    release = make_release(tmp_path_factory.mktemp("gptq"), tensors, settings=given_settings)
    decoded = decode_stored(release, dtype)
    assert decoded.problems == ()
    assert_accounted(release, decoded)
    whole = as_dtype(wanted, dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dayzero.weights.forms.columns.PANEL_BYTES", data.draw(st.sampled_from([2**24, 64 * columns])))
        decoded = decode_stored(release, dtype)
    assert_same_bits(read_all(release, decoded)[f"{NAME}.weight"], whole)
    start = data.draw(st.integers(0, rows - 1))
    stop = data.draw(st.integers(start + 1, rows))
    assert_same_bits(read_rows(release, decoded, f"{NAME}.weight", start, stop), whole[start:stop])


def test_gptq_of_one_group_a_row_and_without_an_order(tmp_path: Path) -> None:
    tensors, wanted = gptq(random(18), 32, 64, bits=4, group=64, version=1, order=None)
    del tensors[f"{NAME}.g_idx"]
    release = make_release(tmp_path, tensors, settings=GPTQ | {"group_size": -1})
    assert_same_bits(decoded_tensor(release, f"{NAME}.weight"), as_dtype(wanted, "bfloat16"))


@PROPERTY
@given(data=st.data())
def test_awq_in_its_own_order(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    rows, columns = 8 * data.draw(st.integers(1, 20)), 32 * data.draw(st.integers(1, 4))
    generator = random(data.draw(st.integers(0, 999)))
    codes, zeros = generator.integers(0, 16, (columns, rows)), generator.integers(0, 16, (columns // 32, rows))
    scale = torch.from_numpy(generator.uniform(0.01, 0.2, (columns // 32, rows)).astype(np.float16))

    def packed(values: np.ndarray) -> torch.Tensor:
        # As its packer writes: slot i of a word holds output 8 w + [0, 2, 4, 6, 1, 3, 5, 7][i].
        mixed = values.reshape(len(values), -1, 8)[:, :, [0, 2, 4, 6, 1, 3, 5, 7]].reshape(values.shape)
        return torch.from_numpy(words_of(mixed, 4))

    release = make_release(tmp_path_factory.mktemp("awq"), {f"{NAME}.qweight": packed(codes), f"{NAME}.qzeros": packed(zeros), f"{NAME}.scales": scale},
                           settings=AWQ)  # fmt: skip
    numbers = (codes - np.repeat(zeros, 32, axis=0)).astype(np.float32) * np.repeat(scale.float().numpy(), 32, axis=0)
    whole = as_dtype(np.ascontiguousarray(numbers.T), "bfloat16")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dayzero.weights.forms.columns.PANEL_BYTES", data.draw(st.sampled_from([2**24, 64 * columns])))
        decoded = decode_stored(release, "bfloat16")
    assert_same_bits(read_all(release, decoded)[f"{NAME}.weight"], whole)
    start = data.draw(st.integers(0, rows - 1))
    stop = data.draw(st.integers(start + 1, rows))
    assert_same_bits(read_rows(release, decoded, f"{NAME}.weight", start, stop), whole[start:stop])


def test_gptq_and_awq_companions_of_the_wrong_shape_are_refused(tmp_path: Path) -> None:
    tensors, _ = gptq(random(19), 32, 64, bits=4, group=32, version=1, order=None)
    for number, (name, tensor) in enumerate({"scales": torch.ones(3, 32).half(), "qzeros": torch.ones(2, 5, dtype=torch.int32),
                                             "g_idx": torch.zeros(63, dtype=torch.int32)}.items()):  # fmt: skip
        release = make_release(tmp_path / str(number), tensors | {f"{NAME}.{name}": tensor}, settings=GPTQ)
        ((kind, _),) = errors_of(decode_stored(release, "bfloat16"))
        assert kind == "stored_form", name
    del tensors[f"{NAME}.qzeros"]
    release = make_release(tmp_path / "none", tensors, settings=GPTQ)
    assert errors_of(decode_stored(release, "bfloat16")) == [("stored_form", f"{NAME}.qweight")]
    release = make_release(tmp_path / "sym", tensors, settings=GPTQ | {"sym": True})
    assert errors_of(decode_stored(release, "bfloat16")) == []


def test_a_number_too_large_for_the_dtype_is_refused(tmp_path: Path) -> None:
    release = make_release(tmp_path, {f"{NAME}.weight": torch.full((3, 4), 448.0).to(torch.float8_e4m3fn), f"{NAME}.weight_scale": torch.tensor([1.0, 150.0, 1.0])},
                           settings={"quant_method": "fbgemm_fp8"})  # fmt: skip
    with pytest.raises(DayZeroError, match="does not fit") as raised:
        decoded_tensor(release, f"{NAME}.weight", "float16")
    assert "67200 at row 1" in str(raised.value)
    assert float(decoded_tensor(release, f"{NAME}.weight", "float32")[1, 0]) == 67200
