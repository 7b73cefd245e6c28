"""Linear layers over weights in few bits: kernels against the definition, on every instruction set of this machine.

Tolerances, decided before the run, relative to the largest reference value: float32 2e-5, bfloat16 1e-2, float16 2e-3, as for
plain linears. Numbers that codes stand for, sums of integers and rows in other company are compared bit by bit.
"""

import pytest
import torch

from dayzero.devices.backend import open_backend
from dayzero.ops.conformance import check
from dayzero.ops.cpu import load
from dayzero.ops.definitions import OPERATORS
from dayzero.ops.library import library_table
from dayzero.ops.quantized import Form, activation_codes, dequantized, quantized_linear
from dayzero.ops.registry import Kernel
from dayzero.runtime.quantized import form_of
from dayzero.weights.quantize.codes import decode, quantize
from dayzero.weights.quantize.encoding import pack
from dayzero.weights.quantize.presets import PRESETS

BUILD = load()
ISAS = torch.ops.dayzero.available_isas() if BUILD.available else []
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
NO_SITE = torch.tensor([-1, -1])
needs_kernels = pytest.mark.skipif(not BUILD.available, reason=f"no CPU kernels: {BUILD.reason}")


@pytest.fixture(params=ISAS)
def isa(request):
    assert load(request.param).isa == request.param
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield request.param
    torch.set_num_threads(threads)
    load(ISAS[0])


def make(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def make_weight(name, rows, columns, dtype=torch.bfloat16):
    """(form, codes, scales, zeros), and the numbers that they stand for."""
    one = PRESETS[name]
    made = quantize(make(rows, columns).to(dtype), one, dtype)
    codes = pack(made.codes, one)
    codes = codes.view(torch.uint8) if codes.dtype == torch.float8_e4m3fn else codes
    return form_of(one), (codes, made.scales, made.zeros), decode(made, one)


def run(x, form, parts, bias=None, input_scale=None, site=NO_SITE):
    return torch.ops.dayzero.quantized_linear_at(x, *parts, bias, input_scale, site, *form.numbers)


def define(x, form, parts, bias=None, input_scale=None):
    numbers = dict(code=form.code, block_rows=form.block_rows, block_columns=form.block_columns, activations=form.activations)
    return quantized_linear(x.double(), *parts, None if bias is None else bias.double(), input_scale, **numbers)


def assert_close(got, want, what):
    error, bound = (got.double() - want).abs(), TOLERANCE[got.dtype] * want.abs().max().clamp(min=1e-6)
    worst = int(error.argmax())
    assert torch.isfinite(got).all() and error.max() <= bound, (
        f"{what}: worst index {worst} got {got.flatten()[worst]} want {want.flatten()[worst]}, max {error.max():.3g} "
        f"mean {error.mean():.3g} bound {bound:.3g}"
    )


def shapes(name):
    """Rows and columns: even, with partial blocks, tiny. Groups along a row must fill it."""
    one = PRESETS[name]
    if one.block[0] == 1 and one.block[1]:
        return [(96, 256), (17, 128), (5, 384)]
    return [(96, 256), (70, 100), (130, 129), (3, 7), (1, 1)]


@pytest.mark.parametrize("name", PRESETS)
def test_the_definition_decodes_as_conversion_encodes(name):
    for rows, columns in shapes(name):
        form, parts, numbers = make_weight(name, rows, columns)
        assert torch.equal(dequantized(*parts, form=form, columns=columns), numbers), (rows, columns)
        stacked = [None if part is None else torch.stack([part, part.flip(0)]) for part in parts]
        assert torch.equal(dequantized(*stacked, form=form, columns=columns)[0], numbers)


@needs_kernels
@pytest.mark.parametrize("name", PRESETS)
def test_kernels_decode_to_the_same_bits(isa, name):
    for rows, columns in shapes(name):
        form, parts, numbers = make_weight(name, rows, columns)
        for dtype in TOLERANCE:
            got = torch.ops.dayzero.dequantized(*parts, columns, form.numbers[0], form.block_rows, form.block_columns, dtype)
            assert torch.equal(got, numbers.to(dtype)), (rows, columns, dtype)


@needs_kernels
@pytest.mark.parametrize("name", PRESETS)
def test_kernels_are_their_definition(isa, name):
    for rows, columns in shapes(name):
        form, parts, _ = make_weight(name, rows, columns)
        scale = torch.tensor([0.03]) if name.endswith("static") else None
        for dtype in TOLERANCE:
            for count in (1, 2, 3, 4, 5, 8, 17, 70):
                x, bias = make(1, count, columns, seed=5).to(dtype), make(rows).to(dtype) if count % 2 else None
                assert_close(
                    run(x, form, parts, bias, scale),
                    define(x, form, parts, bias, scale),
                    f"{rows}x{columns} {dtype} {count} rows",
                )


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("max_rows", [4, 40])
@pytest.mark.parametrize("name", ["int8", "int4-g32-asym", "w8a8", "fp8", "mxfp4"])
def test_bits_do_not_depend_on_the_step(isa, name, max_rows, dtype):
    """Decoding rows and each prefill chunk are the same bits alone and in a mixed step, with one thread and with two."""
    form, parts, _ = make_weight(name, 130, 256)
    x, lengths = make(1, 200, 256).to(dtype), [1] * 9 + [3, 50, 8, 1, 129]
    handle = torch.ops.dayzero.create_state()
    site = torch.tensor([handle, -1])
    torch.ops.dayzero.set_max_rows(handle, max_rows)

    def begin(lengths, num_decode):
        n = torch.tensor(lengths, dtype=torch.int32)
        offsets = torch.cat([torch.zeros(1), n.cumsum(0)]).int()
        torch.ops.dayzero.begin_step(handle, offsets, n, torch.zeros(len(lengths), 16, dtype=torch.int32), num_decode)

    begin(lengths, 9)
    together = run(x, form, parts, site=site)
    assert_close(together, define(x, form, parts), "together")
    torch.set_num_threads(2)
    assert torch.equal(run(x, form, parts, site=site), together), "two threads"
    torch.set_num_threads(1)
    row = 0
    for n in lengths:
        begin([n], 1 if n == 1 else 0)
        assert torch.equal(run(x[:, row : row + n], form, parts, site=site), together[:, row : row + n]), f"rows {row} + {n}"
        row += n
    torch.ops.dayzero.destroy_state(handle)


@needs_kernels
def test_integers_are_summed_exactly_whatever_the_number_of_rows(isa):
    """By our kernel and by the library's product, with the largest codes: a sum that passes through 16 bits is wrong."""
    form, (codes, scales, zeros), _ = make_weight("w8a8", 33, 512)
    codes = torch.where(torch.arange(512) % 2 == 0, codes, torch.full_like(codes, -128))
    x = torch.cat([-make(40, 512).abs(), torch.full((8, 512), -3.0)])
    together = run(x, form, (codes, scales, zeros))
    rows, scale = activation_codes(x, "int8", None)
    sums = (rows.double() @ codes.double().t()).float()
    assert torch.equal(together, sums * scales.float().t() * scale)
    for count in (1, 2, 3, 4, 5, 16):
        assert torch.equal(run(x[:count], form, (codes, scales, zeros)), together[:count]), count


@needs_kernels
def test_several_weights_of_one_input_are_one_operator_of_the_same_bits(isa):
    for name in ("int4-g32-asym", "w8a8", "fp8"):
        made = [make_weight(name, rows, 256) for rows in (96, 40, 7)]
        parts = [list(column) for column in zip(*(parts for _, parts, _ in made), strict=True)]
        for count in (1, 6, 100):
            x = make(count, 256).bfloat16()
            got = torch.ops.dayzero.quantized_linears_at(x, *parts, [None, make(40), None], NO_SITE, *made[0][0].numbers)
            for index, (form, own, _) in enumerate(made):
                assert torch.equal(got[index], run(x, form, own, make(40) if index == 1 else None)), (name, count)


@needs_kernels
def test_parts_that_do_not_fit_are_refused():
    form, (codes, scales, zeros), _ = make_weight("int8", 8, 64)
    for x, parts in (
        (make(1, 80), (codes, scales, zeros)),
        (make(1, 64), (codes, scales[:4], zeros)),
        (make(1, 64), (codes, scales.long(), zeros)),
    ):
        with pytest.raises(RuntimeError, match="dayzero::quantized"):
            run(x, form, parts)
    assert run(make(0, 64), form, (codes, scales, zeros)).shape == (0, 8)


@pytest.mark.parametrize("name", ["w8a8", "fp8"])
def test_rows_are_rounded_as_the_compressed_tensors_library_rounds_them(name):
    """In float32, bit by bit; but for the largest magnitude of an int8 row, which lies on the border of two codes."""
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize
    from compressed_tensors.quantization.utils.helpers import compute_dynamic_scales_and_zp

    one, x = PRESETS[name], make(1, 300, 96)
    args = QuantizationArgs(num_bits=8, type=one.number, dynamic=True, strategy="token", symmetric=True)
    scale, zero = compute_dynamic_scales_and_zp(x, args, torch.nn.Linear(1, 1))
    theirs = fake_quantize(x, scale, zero, args)
    codes, own_scale = activation_codes(x, "int8" if one.number == "int" else "fp8", None)
    assert torch.equal(scale, own_scale)
    ours = codes * own_scale
    border = (x.abs() == x.abs().amax(-1, keepdim=True)) & (one.number == "int")
    assert torch.equal(ours[~border], theirs[~border])
    assert bool(((ours - theirs).abs() <= own_scale * 1.001).all())


FORMS = [Form(code="unsigned8"), Form(code="unsigned8", block_columns=32), Form(code="signed8", activations="int8"),
         Form(code="nibble", block_columns=32), Form(code="fp8", activations="fp8"), Form(code="fp8", block_rows=128, block_columns=128),
         Form(code="fp4", block_columns=32)]  # fmt: skip


@pytest.mark.parametrize("form", FORMS, ids=lambda form: f"{form.code}-{form.block_columns}-{form.activations}")
def test_the_kit_passes_what_the_tables_name_and_refuses_a_wrong_kernel(device, form):
    backend = open_backend(device)
    settings = dict(code=form.code, block_rows=form.block_rows, block_columns=form.block_columns, activations=form.activations)
    sizes = {"in_features": 256, "out_features": 97, "zeros": form.code in ("unsigned8", "nibble"), "bias": 1}
    kernels = list(library_table()["quantized_linear"])
    if BUILD.available and device == "cpu":

        def compiled(x, codes, scales, zeros, bias, input_scale, **settings):
            return run(x, Form(**settings), (codes, scales, zeros), bias, input_scale)

        kernels.append(Kernel(name="dayzero::quantized_linear", call=compiled, binding="custom"))
    operator = OPERATORS["quantized_linear"]
    for kernel in kernels:
        verdict = check(backend, operator, kernel, settings=settings, sizes=sizes, dtypes=("bfloat16", "float32"))
        assert not verdict.refusal, (kernel.name, verdict)

    def without_zeros(x, codes, scales, zeros, bias, input_scale, **settings):
        return kernels[0].call(x, codes, scales, None, None, input_scale, **settings)

    wrong = Kernel(name="forgets the bias", call=without_zeros)
    assert check(backend, operator, wrong, settings=settings, sizes=sizes, dtypes=("float32",)).refusal
