"""The CPU kernels against their float64 definitions, bit by bit against themselves, on every instruction set of this machine.

Tolerances, decided before the run: relative to the largest reference value, float32 2e-5, bfloat16 1e-2, float16 2e-3 (half a unit
in the last place of the output is 4e-3 and 5e-4; sums of products of rounded inputs are exact to float32).
"""

import itertools
import subprocess
import sys
from dataclasses import dataclass, field

import pytest
import torch

from dayzero.ops.cpu import build, load

BUILD = load()
pytestmark = pytest.mark.skipif(not BUILD.available, reason=f"no CPU kernels: {BUILD.reason}")
ISAS = torch.ops.dayzero.available_isas() if BUILD.available else []
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


@pytest.fixture(autouse=True)
def one_thread():
    """Tests that are about threads ask for two; on a busy machine every parallel region may cost a time slice."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(params=ISAS)
def isa(request):
    assert load(request.param).isa == request.param
    yield request.param
    load(ISAS[0])


@pytest.fixture(params=[name for name in ISAS if name != "avx512_bf16" or name == ISAS[0]])
def attention_isa(request):
    """avx512_bf16 attends with the same code as amx_bf16."""
    assert load(request.param).isa == request.param
    yield request.param
    load(ISAS[0])


def assert_close(got, want, what=""):
    error = (got.double() - want).abs()
    bound = TOLERANCE[got.dtype] * want.abs().max().clamp(min=1e-6)
    worst = int(error.argmax())
    assert torch.isfinite(got).all() and error.max() <= bound, (
        f"{what}: worst index {worst} got {got.flatten()[worst]} want {want.flatten()[worst]}, max {error.max():.3g} mean {error.mean():.3g} bound {bound:.3g}"
    )


def make(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


# --- a step of several sequences over paged pools ------------------------------------------------------------------------


@dataclass
class Case:
    """One layer, several sequences as (context before the step, new tokens); decoding sequences first."""

    sequences: list[tuple[int, int]]
    heads: int = 4
    kv_heads: int = 2
    k_dim: int = 64
    v_dim: int = 64
    dtype: torch.dtype = torch.float32
    block_size: int = 16
    window: int = 0
    chunk: int = 0
    softcap: float = 0.0
    sinks: bool = False
    num_decode: int | None = None
    names: list[int] = field(default_factory=list)  # a sequence's content depends on its name alone

    def data(self, i):
        name = self.names[i] if self.names else i
        n = sum(self.sequences[i])
        g = torch.Generator().manual_seed(1000 + name)
        return tuple(torch.randn(h, n, d, generator=g).to(self.dtype) for h, d in ((self.heads, self.k_dim), (self.kv_heads, self.k_dim), (self.kv_heads, self.v_dim)))

    @property
    def scale(self):
        return self.k_dim**-0.5

    def sink_values(self):
        return make(self.heads, seed=7).to(self.dtype) if self.sinks else None


def run_case(case, scramble=0):
    """Each sequence's output [new, H, Dv], after filling the pool with its earlier keys and values."""
    size = case.block_size
    needed = [-(-sum(s) // size) for s in case.sequences]
    blocks = torch.randperm(sum(needed) + 3, generator=torch.Generator().manual_seed(scramble)).int()
    tables = torch.full((len(needed), max(needed)), -1, dtype=torch.int32)
    k_pool = torch.full((len(blocks), size, case.kv_heads, case.k_dim), float("nan"), dtype=case.dtype)
    v_pool = torch.full((len(blocks), size, case.kv_heads, case.v_dim), float("nan"), dtype=case.dtype)
    used, q, k, v = 0, [], [], []
    for i, (before, _) in enumerate(case.sequences):
        tables[i, : needed[i]] = blocks[used : used + needed[i]]
        used += needed[i]
        qs, ks, vs = case.data(i)
        at = torch.arange(before)
        slots = (tables[i, at // size].long(), at % size)
        k_pool[slots], v_pool[slots] = ks[:, :before].transpose(0, 1), vs[:, :before].transpose(0, 1)
        q.append(qs[:, before:]), k.append(ks[:, before:]), v.append(vs[:, before:])
    new = torch.tensor([n for _, n in case.sequences], dtype=torch.int32)
    offsets = torch.cat([torch.zeros(1), new.cumsum(0)]).int()
    num_decode = case.num_decode
    if num_decode is None:
        num_decode = next((i for i, (_, n) in enumerate(case.sequences) if n != 1), len(case.sequences))
    handle = torch.ops.dayzero.create_state()
    try:
        torch.ops.dayzero.set_pool(handle, 5, k_pool, v_pool, size, case.window, case.chunk)
        torch.ops.dayzero.begin_step(handle, offsets, torch.tensor([sum(s) for s in case.sequences], dtype=torch.int32), tables, num_decode)
        flat = [torch.cat(t, 1).transpose(0, 1).contiguous().transpose(0, 1)[None] for t in (q, k, v)]  # views of [T, heads, D]
        out = torch.ops.dayzero.paged_attention(*flat, case.sink_values(), handle, 5, case.scale, case.softcap)
    finally:
        torch.ops.dayzero.destroy_state(handle)
    assert out.shape == (1, int(offsets[-1]), case.heads, case.v_dim) and out.is_contiguous() and out.dtype == case.dtype
    for i, (before, n) in enumerate(case.sequences):
        for p in {before, before + n - 1}:
            assert torch.equal(k_pool[tables[i, p // size], p % size], case.data(i)[1][:, p]), "the new key is not in the pool"
    return list(out[0].split(new.tolist()))


def define_case(case, i):
    """The definition in float64: scores, softcap, mask, sinks, softmax, values."""
    before, n = case.sequences[i]
    q, k, v = (t.double() for t in case.data(i))
    k, v = (t.repeat_interleave(case.heads // case.kv_heads, 0) for t in (k, v))
    scores = q[:, before:] @ k.transpose(1, 2) * case.scale
    if case.softcap:
        scores = case.softcap * torch.tanh(scores / case.softcap)
    query, key = torch.arange(before, before + n)[:, None], torch.arange(before + n)[None]
    visible = key <= query
    if case.window:
        visible &= key > query - case.window
    if case.chunk:
        visible &= key // case.chunk == query // case.chunk
    scores = scores.masked_fill(~visible, -torch.inf)
    if case.sinks:
        scores = torch.cat([scores, case.sink_values().double()[:, None, None].expand(-1, n, 1)], 2)
    return (scores.softmax(2)[..., : before + n] @ v).transpose(0, 1)


MIXED = [(40, 1), (0, 1), (130, 1), (0, 50), (33, 20), (16, 3)]
VARIANTS = {
    "plain": {},
    "mha": dict(kv_heads=4),
    "mqa": dict(kv_heads=1),
    "group of 7": dict(heads=7, kv_heads=1),
    "block 1": dict(block_size=1),
    "block 32": dict(block_size=32),
    "head 16": dict(k_dim=16, v_dim=16),
    "head 72": dict(k_dim=72, v_dim=72),
    "head 80": dict(k_dim=80, v_dim=80),
    "head 96": dict(k_dim=96, v_dim=96),
    "head 128": dict(k_dim=128, v_dim=128),
    "mla": dict(k_dim=192, v_dim=128),
    "odd head": dict(k_dim=13, v_dim=7),
    "window": dict(window=24),
    "window 1": dict(window=1),
    "chunk": dict(chunk=32),
    "softcap": dict(softcap=2.0),
    "sinks": dict(sinks=True),
    "everything": dict(window=24, softcap=5.0, sinks=True, heads=6),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_attention_is_its_definition(attention_isa, variant):
    for dtype in TOLERANCE:
        case = Case(MIXED, dtype=dtype, **VARIANTS[variant])
        for i, got in enumerate(run_case(case)):
            assert_close(got, define_case(case, i), f"{variant} {dtype} sequence {i}")


@pytest.mark.parametrize("limits", [{}, {"window": 700}, {"chunk": 300}], ids=str)
def test_attention_over_several_partitions(attention_isa, limits):
    for dtype in (torch.float32, torch.bfloat16):
        case = Case([(511, 1), (512, 1), (1300, 1), (1023, 3), (1000, 40), (0, 600)], dtype=dtype, **limits)
        for i, got in enumerate(run_case(case)):
            assert_close(got, define_case(case, i), f"{dtype} sequence {i}")


def test_attention_with_freed_blocks_before_the_window():
    """Blocks that no query can see need not exist."""
    case = Case([(100, 1)], window=16)
    handle = torch.ops.dayzero.create_state()
    k_pool, v_pool = torch.zeros(2, 16, 2, 64), torch.zeros(2, 16, 2, 64)
    torch.ops.dayzero.set_pool(handle, 0, k_pool, v_pool, 16, 16, 0)
    tables = torch.tensor([[-1, -1, -1, -1, -1, 0, 1]], dtype=torch.int32)
    step = (torch.tensor([0, 1], dtype=torch.int32), torch.tensor([101], dtype=torch.int32), tables, 1)
    torch.ops.dayzero.begin_step(handle, *step)
    q, k, v = (t[:, -1:][None] for t in case.data(0))
    assert torch.isfinite(torch.ops.dayzero.paged_attention(q, k, v, None, handle, 0, 1.0, 0.0)).all()
    torch.ops.dayzero.set_pool(handle, 0, k_pool, v_pool, 16, 40, 0)
    with pytest.raises(RuntimeError, match="names block -1"):
        torch.ops.dayzero.paged_attention(q, k, v, None, handle, 0, 1.0, 0.0)
    torch.ops.dayzero.destroy_state(handle)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_attention_bits_do_not_depend_on_neighbours_or_threads(attention_isa, dtype):
    """Alone, among others, in other blocks, with one thread: the same bits."""
    torch.set_num_threads(2)
    sequences = [(40, 1), (1200, 1), (0, 1), (600, 1), (7, 5), (0, 64), (70, 33)]
    together = run_case(Case(sequences, dtype=dtype, names=list(range(7))))
    for i, sequence in enumerate(sequences):
        alone = run_case(Case([sequence], dtype=dtype, names=[i]), scramble=i + 1)[0]
        assert torch.equal(alone, together[i]), f"sequence {i}"
    torch.set_num_threads(1)
    single = run_case(Case(sequences[:5], dtype=dtype, names=list(range(5))))
    assert all(torch.equal(a, b) for a, b in zip(single, together[:5]))


def test_short_prompt_equals_decoding_token_by_token(attention_isa):
    """A chunk of up to 8 tokens is computed as if each were decoded."""
    whole = run_case(Case([(20, 6)], dtype=torch.bfloat16, names=[3]))[0]
    # data() draws from one stream per sequence, so a prefix has other values: cut the long sequence instead
    case = Case([(20, 6)], dtype=torch.bfloat16, names=[3])
    q, k, v = case.data(0)
    for t in range(6):
        part = Case([(20 + t, 1)], dtype=torch.bfloat16)
        part.data = lambda i, t=t: (q[:, : 21 + t], k[:, : 21 + t], v[:, : 21 + t])
        assert torch.equal(run_case(part)[0][0], whole[t])


# --- linear --------------------------------------------------------------------------------------------------------------


SHAPES = [(576, 192), (64, 64), (33, 17), (7, 5), (1, 1), (100, 70), (512, 130), (31, 200)]


@pytest.mark.parametrize("K, N", SHAPES)
def test_linear_is_its_definition(isa, K, N):
    for dtype, M in itertools.product(TOLERANCE, [1, 2, 3, 4, 5, 8, 16, 17, 40, 70]):
        weight, bias, with_bias = make(N, K, dtype=dtype), make(N, dtype=dtype), M % 3 != 1
        x = make(1, M, K, dtype=dtype)
        got = torch.ops.dayzero.linear(x, weight, bias if with_bias else None, -1)
        want = x.double() @ weight.double().T + (bias.double() if with_bias else 0)
        assert got.shape == (1, M, N) and got.dtype == dtype
        assert_close(got, want, f"{dtype} M {M}")


def test_linear_of_mixed_types_and_views(isa):
    weight = make(96, 80, dtype=torch.bfloat16)
    for x in (make(3, 80), make(3, 160, dtype=torch.bfloat16)[:, ::2], make(80, 3, dtype=torch.bfloat16).T, make(70, 80)):
        assert_close(torch.ops.dayzero.linear(x, weight, None, -1), x.double() @ weight.double().T)
    cut = make(96, 200)[:, 10:90]
    assert_close(torch.ops.dayzero.linear(make(3, 80), cut, None, -1), make(3, 80).double() @ cut.double().T)
    x = make(3, 80).double()
    assert torch.equal(torch.ops.dayzero.linear(x, cut.double(), None, -1)[1:2], torch.ops.dayzero.linear(x[1:2], cut.double(), None, -1))
    assert torch.ops.dayzero.linear(make(0, 80), cut, None, -1).shape == (0, 96)
    assert torch.ops.dayzero.linear(make(80), cut, None, -1).shape == (96,)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("K, N", [(576, 192), (100, 70), (33, 17), (1536, 576)])
def test_linear_bits_do_not_depend_on_the_number_of_rows(isa, dtype, K, N):
    weight, bias, x = make(N, K, dtype=dtype), make(N, dtype=dtype), make(40, K, dtype=dtype)
    together = torch.ops.dayzero.linear(x, weight, bias, -1)
    for M in range(1, 21):
        first = 19 - M // 2
        assert torch.equal(torch.ops.dayzero.linear(x[first : first + M], weight, bias, -1), together[first : first + M]), f"M {M}"
    torch.set_num_threads(2)
    assert torch.equal(torch.ops.dayzero.linear(x, weight, bias, -1), together), "two threads"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_linear_bits_do_not_depend_on_the_step(isa, dtype):
    """Decoding rows and each prefill chunk are the same bits alone and in a mixed step; logits rows are decoding rows."""
    weight, x = make(192, 100, dtype=dtype), make(1, 200, 100, dtype=dtype)
    lengths = [1] * 9 + [3, 50, 8, 1, 129]
    handle = torch.ops.dayzero.create_state()

    def begin(lengths, num_decode):
        n = torch.tensor(lengths, dtype=torch.int32)
        torch.ops.dayzero.begin_step(handle, torch.cat([torch.zeros(1), n.cumsum(0)]).int(), n, torch.zeros(len(lengths), 16, dtype=torch.int32), num_decode)

    begin(lengths, 9)
    together = torch.ops.dayzero.linear(x, weight, None, handle)
    assert_close(together, x.double() @ weight.double().T)
    row = 0
    for n in lengths:
        begin([n], 1 if n == 1 else 0)
        assert torch.equal(torch.ops.dayzero.linear(x[:, row : row + n], weight, None, handle), together[:, row : row + n]), f"rows {row} + {n}"
        row += n
    begin([1] * 100, 100)
    decoded = torch.ops.dayzero.linear(x[:, :100], weight, None, handle)
    begin([2] * 100, 0)
    assert torch.equal(torch.ops.dayzero.linear(x[:, :100], weight, None, handle), decoded), "100 logits rows of 100 sequences"
    torch.ops.dayzero.destroy_state(handle)


# --- norm, shapes, state, build ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_rms_norm_is_its_definition(isa, dtype, offset):
    for n in (576, 64, 33, 7):
        x, weight = make(1, 5, n, dtype=dtype), make(n, dtype=dtype)
        unweighted = x.double() * (x.double().pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt()
        assert_close(torch.ops.dayzero.rms_norm(x, weight, 1e-5, offset), unweighted * (offset + weight.double()))
        assert_close(torch.ops.dayzero.rms_norm(x, None, 1e-5, 0.0), unweighted)


def test_operators_have_shapes_on_meta_and_export_with_a_free_length():
    class Module(torch.nn.Module):
        def forward(self, x, weight, k):
            y = torch.ops.dayzero.rms_norm(torch.ops.dayzero.linear(x, weight, None, -1), None, 1e-5, 0.0)
            q = y.view(1, -1, 4, 16).transpose(1, 2)
            return torch.ops.dayzero.paged_attention(q, k, k, None, 0, 0, 1.0, 0.0)

    tokens = torch.export.Dim("tokens", min=1, max=4096)
    exported = torch.export.export(Module(), (make(1, 9, 32), make(64, 32), make(1, 2, 9, 16)), dynamic_shapes=({1: tokens}, None, {2: tokens}), strict=False)
    assert [n.target for n in exported.graph.nodes if "dayzero" in str(n.target)] == [torch.ops.dayzero.linear.default, torch.ops.dayzero.rms_norm.default, torch.ops.dayzero.paged_attention.default]
    assert torch.ops.dayzero.linear(torch.empty(2, 3, 32, device="meta"), torch.empty(64, 32, device="meta"), None, -1).shape == (2, 3, 64)


def test_two_states_do_not_mix_and_errors_are_told():
    first, second = torch.ops.dayzero.create_state(), torch.ops.dayzero.create_state()
    assert first != second
    torch.ops.dayzero.destroy_state(first)
    one = torch.ones(1, dtype=torch.int32)
    with pytest.raises(RuntimeError, match="no state has handle"):
        torch.ops.dayzero.begin_step(first, torch.tensor([0, 1], dtype=torch.int32), one, one[None], 1)
    torch.ops.dayzero.begin_step(second, torch.tensor([0, 1], dtype=torch.int32), one, one[None], 1)
    x = make(1, 2, 1, 16)
    with pytest.raises(RuntimeError, match="has no pool"):
        torch.ops.dayzero.paged_attention(x, x, x, None, second, 0, 1.0, 0.0)
    torch.ops.dayzero.set_pool(second, 0, torch.zeros(1, 4, 2, 16), torch.zeros(1, 4, 2, 16), 4, 0, 0)
    with pytest.raises(RuntimeError, match="names block 1 of a pool of 1"):
        torch.ops.dayzero.paged_attention(x, x, x, None, second, 0, 1.0, 0.0)
    with pytest.raises(RuntimeError, match="usable: "):
        torch.ops.dayzero.set_isa("abacus")
    assert not load("abacus").available and "abacus" in load("abacus").reason
    torch.ops.dayzero.destroy_state(second)


def in_new_process(code):
    done = subprocess.run([sys.executable, "-c", f"import pathlib, sys, time\nsys.path[:] = {sys.path!r}\nfrom dayzero.ops.cpu import build\n{code}"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_second_process_takes_the_library_from_the_cache():
    out = in_new_process("t = time.perf_counter(); b = build.load(compiler=None); print(b.available, b.isa, time.perf_counter() - t)")
    available, isa, seconds = out.split()
    assert available == "True" and isa == ISAS[0] and float(seconds) < 10


def test_without_a_compiler_there_is_a_reason(tmp_path):
    assert "no C++ compiler: abacus++ not found" in in_new_process(f"print(build.load(compiler='abacus++', cache_folder=pathlib.Path({str(tmp_path)!r})))")
    broken = tmp_path / "broken++"
    broken.write_text("#!/bin/sh\necho 'error: out of beads' >&2\nexit 1\n")
    broken.chmod(0o755)
    out = in_new_process(f"print(build.load(compiler={str(broken)!r}, cache_folder=pathlib.Path({str(tmp_path)!r})))")
    assert "available=False" in out and "out of beads" in out
    assert not list(tmp_path.glob("*.so")) and BUILD.path == build.load().path
