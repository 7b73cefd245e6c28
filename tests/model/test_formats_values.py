"""Values of quantized formats against definitions written out: packed integers, FP4, exponent scales, blocks."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dayzero.core.errors import DayZeroError
from dayzero.model.stored.scales import packing_of
from dayzero.weights.forms.values import (
    combine,
    exponent_scales,
    float8_values,
    number_scales,
    pack_words,
    signed_codes,
    unpack_fp4,
    unpack_words,
)

PLAIN = packing_of({"quant_method": "compressed-tensors", "format": "pack-quantized"})
GPTQ = packing_of({"quant_method": "gptq", "bits": 4})
AWQ = packing_of({"quant_method": "awq", "bits": 4})


def test_ck_16_a_word_unpacks_to_the_documented_values() -> None:
    word = torch.tensor([[0x76543210]], dtype=torch.int32)
    codes = unpack_words(word, PLAIN, 4, (1, 8))
    assert codes.tolist() == [[0, 1, 2, 3, 4, 5, 6, 7]]
    assert signed_codes(codes, 4).tolist() == [[-8, -7, -6, -5, -4, -3, -2, -1]]
    # The same bytes in the interleaved order are other values: slot 1 holds code 2.
    assert unpack_words(word, AWQ, 4, (8, 1)).flatten().tolist() == [0, 4, 1, 5, 2, 6, 3, 7]


def test_ck_16_padding_is_cut_and_the_highest_code_has_no_sign() -> None:
    words = torch.tensor([[-1, 0x000000F9]], dtype=torch.int32)
    assert unpack_words(words, PLAIN, 4, (1, 10)).tolist() == [[15] * 8 + [9, 15]]
    with pytest.raises(DayZeroError, match="do not hold"):
        unpack_words(words, PLAIN, 4, (1, 8))


@settings(max_examples=40, deadline=None)
@given(rows=st.integers(1, 20), columns=st.integers(1, 70), bits=st.sampled_from([4, 8]), seed=st.integers(0, 99),
       packing=st.sampled_from([PLAIN, GPTQ, AWQ]))  # fmt: skip
def test_ck_16_packing_and_unpacking_are_inverse(rows, columns, bits, seed, packing) -> None:
    bits = 4 if packing is AWQ else bits
    order = tuple(range(32 // bits)) if packing is not AWQ else packing.order
    packing = type(packing)(name=packing.name, axis=packing.axis, order=order)
    codes = torch.randint(0, 1 << bits, (rows, columns), generator=torch.Generator().manual_seed(seed)).to(torch.uint8)
    assert torch.equal(unpack_words(pack_words(codes, packing, bits), packing, bits, (rows, columns)), codes)


def test_fp4_is_low_nibble_first() -> None:
    packed = torch.tensor([[0x10, 0xF7]], dtype=torch.uint8)
    assert unpack_fp4(packed).tolist() == [[0.0, 0.5, 6.0, -6.0]]
    assert torch.equal(unpack_fp4(packed.view(torch.int8)), unpack_fp4(packed))


def test_ck_17_exponent_bytes_mean_the_same_in_either_dtype() -> None:
    """Ones scaled by [120, 127, 130]: powers of two, never the bytes as numbers."""
    raw = torch.tensor([[120, 127, 130]], dtype=torch.uint8)
    wanted = [[2.0**-7, 1.0, 8.0]]
    assert exponent_scales(raw).tolist() == exponent_scales(raw.view(torch.float8_e8m0fnu)).tolist() == wanted
    ones = torch.ones(128, 384).to(torch.float8_e4m3fn)
    found = combine(ones.float(), exponent_scales(raw), (128, 128))
    assert found[0, [0, 127, 128, 255, 256, 383]].tolist() == [2.0**-7] * 2 + [1.0] * 2 + [8.0] * 2
    limits = exponent_scales(torch.tensor([0, 254], dtype=torch.uint8))
    assert limits.tolist() == [2.0**-127, 2.0**127]
    with pytest.raises(DayZeroError, match="NaN") as raised:
        exponent_scales(torch.tensor([[1, 255]], dtype=torch.uint8), name="a.scale")
    assert "a.scale" in str(raised.value) and "[0, 1]" in str(raised.value)


@pytest.mark.parametrize(("shape", "block"), [((576, 260), (128, 128)), ((5, 70), (1, 32)), ((6, 4), (0, 0)), ((6, 4), (1, 0))])
def test_ck_08_scales_meet_their_blocks_partial_ones_too(shape: tuple[int, int], block: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(1)
    steps = [step or size for size, step in zip(shape, block, strict=True)]
    scales = torch.rand([-(-size // step) for size, step in zip(shape, steps, strict=True)], generator=generator)
    weight = torch.randn(shape, generator=generator).to(torch.float8_e4m3fn)
    rows, columns = np.indices(shape)
    wanted = weight.float().numpy() * scales.numpy()[rows // steps[0], columns // steps[1]]
    np.testing.assert_array_equal(combine(float8_values(weight), scales, block).numpy(), wanted)
    with pytest.raises(DayZeroError, match="as many"):
        combine(torch.ones(shape), torch.ones(99, 99), block)


def test_float8_values_are_those_of_the_cast_of_torch() -> None:
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        codes = torch.arange(256).to(torch.uint8).view(dtype)
        torch.testing.assert_close(float8_values(codes), codes.to(torch.float32), rtol=0, atol=0, equal_nan=True)


def test_a_scale_that_is_no_number_is_named_with_its_place_in_the_whole_tensor() -> None:
    with pytest.raises(DayZeroError, match="NaN") as raised:
        number_scales(torch.tensor([[1.0, float("inf")], [float("nan"), 1.0]]), name="b.scale", first=(8, 4))
    assert "b.scale" in str(raised.value) and "[8, 5] and 1 more" in str(raised.value)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_nu_09_any_run_of_rows_meets_the_blocks_of_the_whole(data: st.DataObject) -> None:
    rows, columns = data.draw(st.integers(1, 90)), data.draw(st.integers(1, 70))
    block = (data.draw(st.sampled_from([0, 1, 2, 15, 16, 32, 100])), data.draw(st.sampled_from([0, 1, 3, 16, 32, 100])))
    steps = [step or size for size, step in zip((rows, columns), block, strict=True)]
    scales = torch.rand([-(-size // step) for size, step in zip((rows, columns), steps, strict=True)])
    start = data.draw(st.integers(0, rows - 1))
    stop = data.draw(st.integers(start + 1, rows))
    values = torch.randn(rows, columns)
    spread = scales.numpy()[np.indices((rows, columns))[0] // steps[0], np.indices((rows, columns))[1] // steps[1]]
    part = scales[start // steps[0] : -(-stop // steps[0])]
    for operation, wanted in (("multiply", values.numpy() * spread), ("subtract", values.numpy() - spread)):
        found = combine(values[start:stop].clone(), part, (steps[0], block[1]), first_row=start, operation=operation)
        np.testing.assert_array_equal(found.numpy(), wanted[start:stop])
