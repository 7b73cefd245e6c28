"""Numbers to codes and back: kernels against their definition, edges, the library's own reading of what is stored."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from dayzero.core.errors import DayZeroError
from dayzero.core.model import Parameter
from dayzero.model.headers import read_header
from dayzero.ops.cpu import build
from dayzero.weights.algebra import View
from dayzero.weights.copying import BlockCopier
from dayzero.weights.quantize.codes import Codes, block_range, decode, encode_plainly, quantize, scales_of
from dayzero.weights.quantize.encoding import Quantized, ViewRows, encoders, pack, view_of
from dayzero.weights.quantize.policy import Policy
from dayzero.weights.quantize.presets import PRESETS, preset
from dayzero.weights.reading import LocalStore, SourceReader

INTEGERS = [one for one in PRESETS.values() if one.number == "int"]
SHAPES = [(64, 256), (7, 130), (3, 5), (1, 1), (200, 128), (5, 4544)]


def weights(shape, dtype=torch.bfloat16, seed=0):
    made = (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.02).to(dtype)
    made[0] = 0
    return made


@pytest.fixture(params=build.load() and torch.ops.dayzero.available_isas() if build.load().available else [])
def isa(request):
    before = torch.ops.dayzero.isa()
    torch.ops.dayzero.set_isa(request.param)
    yield request.param
    torch.ops.dayzero.set_isa(before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
def test_kernels_give_the_bits_of_their_definition(isa, shape, dtype):
    w = weights(shape, dtype)
    for one in INTEGERS:
        width = one.block[1] or shape[1]
        low, high = torch.ops.dayzero.block_range(w, width)
        wanted = block_range(w.float(), one.block)
        assert torch.equal(low, wanted[0]) and torch.equal(high, wanted[1]), one.name
        scales, zeros = scales_of(w, one, torch.bfloat16)
        codes = encode_plainly(w, scales, zeros, one)
        made, sums = torch.ops.dayzero.integer_codes(w, scales.float(), zeros, width, one.bits, False)
        assert torch.equal(made, codes), one.name
        packed, _ = torch.ops.dayzero.integer_codes(w, scales.float(), zeros, width, one.bits, True)
        assert torch.equal(packed, pack(codes, PRESETS["int4-g32" if one.bits == 4 else "int8"])), one.name
        error = decode(Codes(codes=codes, scales=scales, zeros=zeros), one) - w.float()
        assert float(sums[0]) == pytest.approx(float(error.double().square().sum()), rel=1e-4, abs=1e-12)
        assert float(sums[4]) == pytest.approx(float(error.abs().max()), abs=1e-9)


@pytest.mark.parametrize("name", PRESETS)
@settings(max_examples=25, deadline=None)
@given(rows=st.integers(1, 200), columns=st.integers(1, 200), seed=st.integers(0, 99), size=st.floats(1e-6, 1e3))
def test_nu_09_any_shape_comes_back_within_half_a_step(name, rows, columns, seed, size):
    """NU-09: edge blocks have scales of their own, and no value is further off than its preset says."""
    one = preset(name)
    w = torch.randn((rows, columns), generator=torch.Generator().manual_seed(seed)) * size
    made = quantize(w, one, torch.float32)
    error = (decode(made, one) - w).abs()
    height, width = one.block[0] or rows, one.block[1] or columns
    assert made.scales.shape == (-(-rows // height), -(-columns // width))
    for row in range(made.scales.shape[0]):
        for column in range(made.scales.shape[1]):
            part = (slice(row * height, (row + 1) * height), slice(column * width, (column + 1) * width))
            step = float(made.scales[row, column]) if one.number == "int" else float(w[part].abs().max())
            # Symmetric integers reach from -2^(b-1) to 2^(b-1) - 1: the largest value may be half a step past the last code.
            slack = 1.0 + 1e-5 if one.number == "int" and one.symmetric else 0.5 + 1e-2
            bound = step * (slack if one.number == "int" else one.half_step) + 1e-30
            assert float(error[part].max()) <= bound, (row, column)


@pytest.mark.parametrize("name", PRESETS)
def test_ck_13_blocks_of_nothing_stay_nothing_and_nothing_becomes_nan(name):
    """CK-13: zero blocks, next to zero blocks, one large value, and what has no code."""
    one = preset(name)
    w = torch.zeros(256, 256, dtype=torch.bfloat16)
    w[0, 0] = 1
    w[200] = 1e-40
    made = quantize(w, one, torch.bfloat16)
    back = decode(made, one)
    assert (
        back.isfinite().all()
        and back[1:199].eq(0).all()
        and float(back[0, 0]) == pytest.approx(1, rel=2**-4 if one.bits == 8 else 0.5 / 7.5 + 2**-8)
    )
    assert (made.scales.float().isfinite().all() and made.scales.float().ne(0).all()) or one.scale_dtype == "uint8"
    if made.codes.dtype == torch.float8_e4m3fn:
        assert not made.codes.view(torch.uint8).bitwise_and(0x7F).eq(0x7F).any()
    large = decode(quantize(torch.full((4, 128), 480.0), one, torch.bfloat16), one)
    assert large.isfinite().all() and float(large[0, 0]) == pytest.approx(480, rel=0.07)
    for bad in (float("inf"), float("nan")):
        w[3, 5] = bad
        with pytest.raises(DayZeroError, match="not finite") as told:
            quantize(w, one, torch.bfloat16)
        assert "[3, 5]" in str(told.value.got)


def stored(tmp_path, w, one):
    """The stored parts of a weight, through the reader and copier that conversion uses."""
    save_file({"a.weight": w}, tmp_path / "x.safetensors")
    header, problems = read_header(tmp_path / "x.safetensors", "x.safetensors")
    assert header is not None and not problems
    plain = SourceReader(LocalStore(tmp_path), header.tensors)
    view = View.of("a.weight", tuple(w.shape), "bfloat16")
    made, errors = encoders(
        Quantized(name="a.weight", view=view, preset=one, sources=("a.weight",)), ViewRows(plain), packed_zeros=True
    )
    reader = SourceReader(LocalStore(tmp_path), header.tensors, decoders={part.name: part for part in made.values()})
    found = {}
    for name, part in made.items():
        raw = b"".join(bytes(block) for _, block in BlockCopier(reader).blocks(view_of(part)))
        found[name.removeprefix("a.")] = torch.frombuffer(bytearray(raw), dtype=getattr(torch, part.dtype)).reshape(part.shape)
    return found, errors.result()


@pytest.mark.parametrize("name", PRESETS)
def test_the_library_reads_what_is_stored_as_we_do(tmp_path, name):
    """compressed-tensors' own decompression of the stored parts is our decoding, rounded to the weight's dtype."""
    from compressed_tensors.compressors.base import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    one, w = preset(name), weights((300, 256))
    found, errors = stored(tmp_path, w, one)
    height, width = one.block
    args = {"num_bits": one.bits, "type": one.number, "symmetric": one.symmetric}
    args |= {"strategy": "block", "block_structure": [128, 128]} if height > 1 else {"strategy": "channel"} if not width else {
        "strategy": "group", "group_size": width}  # fmt: skip
    args |= {"scale_dtype": torch.uint8, "zp_dtype": torch.uint8} if one.scale_dtype else {}
    inputs = QuantizationArgs(num_bits=8, type=one.number, dynamic=True, strategy="token") if one.activations else None
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**args), input_activations=inputs)
    theirs = BaseCompressor.get_value_from_registry(one.form).decompress(dict(found), scheme)["weight"]
    ours = decode(quantize(w, one, torch.bfloat16), one)
    # Theirs multiplies in bfloat16: a product of two such numbers, rounded once. Ours is the same product, rounded likewise.
    assert torch.equal(theirs.to(torch.bfloat16), ours.to(torch.bfloat16))
    assert errors.relative == pytest.approx(float((ours - w.float()).norm() / w.float().norm()), rel=1e-3)
    assert errors.num_elements == w.numel() and 0 < errors.cosine <= 1 and errors.snr_db is not None


def test_roles_decide_and_rules_change_it():
    shapes = {
        "attention": (8, 8),
        "router": (4, 8),
        "norm": (8,),
        "expert": (4, 16, 8),
        "head": (32, 8),
        "indexer": (8, 8),
        "ssm": (8, 8),
    }
    made = [
        Parameter(name=f"model.layers.0.{role}.weight", shape=shape, dtype="bfloat16", role=role)
        for role, shape in shapes.items()
    ]
    chosen = Policy(preset="int8").choose(made)
    assert {name.split(".")[3] for name, one in chosen.items() if one.preset} == {"attention", "expert", "ssm"}
    chosen = Policy(preset="int4-g32", keep=("attention",), overrides=(("head", "int8"), ("re:ssm", "none"))).choose(made)
    assert {name.split(".")[3]: one.preset.name for name, one in chosen.items() if one.preset} == {
        "expert": "int4-g32",
        "head": "int8",
    }
    with pytest.raises(DayZeroError, match="speaks of no parameter"):
        Policy(preset="int8", keep=("no_such_role",)).choose(made)
    with pytest.raises(DayZeroError, match="unknown quantization preset"):
        Policy(preset="int5").choose(made)
