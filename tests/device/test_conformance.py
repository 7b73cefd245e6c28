"""The kit that every binding must pass, on --device: wrong kernels are refused with a reason (OP-01, OP-02)."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from dayzero.core.errors import DayZeroError
from dayzero.devices.backend import Backend, open_backend
from dayzero.ops.binding import bind, bind_aten
from dayzero.ops.cases import CASES, Case
from dayzero.ops.conformance import LIMITS, check
from dayzero.ops.definitions import OPERATORS
from dayzero.ops.dispatch import ask
from dayzero.ops.registry import Kernel

DTYPES = ("bfloat16", "float32")
aten = torch.ops.aten


@pytest.fixture(scope="module")
def backend(device: str) -> Backend:
    return open_backend(device)


@dataclass
class Wrapped:
    """A device whose table has further kernels in front, or which can only be asked."""

    inner: Backend
    front: dict[str, tuple[Kernel, ...]] = field(default_factory=dict)
    reachable: bool = True
    dispatch_key: str = ""
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self.dispatch_key = self.dispatch_key or self.inner.dispatch_key
        self.name, self.device, self.instruction_set = "wrapped", self.inner.device, self.inner.instruction_set

    def kernels(self, operator: str) -> tuple[Kernel, ...]:
        return self.front.get(operator, ()) + self.inner.kernels(operator)


def make_sites() -> list[tuple[str, dict[str, Any], dict[str, float]]]:
    """Operator, settings, sizes: what occurs in models, odd widths among them."""
    attention = {"heads": 6, "kv_heads": 2, "qk_dim": 64, "v_dim": 64}
    plain = {"scale": 0.125, "softcap": 0.0, "window": 0, "chunk": 0, "cache": "full"}
    norm = {"eps": 1e-6, "weight_offset": 0.0, "groups": 1}
    return [
        ("linear", {}, {"in_features": 64, "out_features": 97}),
        ("linear", {}, {"in_features": 33, "out_features": 8, "bias": 1}),
        ("embedding", {"scale": 1.0}, {"width": 48}),
        ("embedding", {"scale": 11.3}, {"width": 48}),
        ("rms_norm", norm, {"width": 576, "weight": 1}),
        ("rms_norm", norm | {"weight_offset": 1.0}, {"width": 65, "weight": 1}),
        ("rms_norm", norm, {"width": 16}),
        ("rms_norm", norm | {"groups": 4, "gate_activation": "silu", "gate_first": True}, {"width": 64, "weight": 1}),
        ("rms_norm", norm | {"gate_activation": "sigmoid", "gate_first": False}, {"width": 64, "weight": 1}),
        ("l2_norm", {"eps": 1e-6}, {"width": 64}),
        ("layer_norm", {"eps": 1e-5}, {"width": 96, "weight": 1, "bias": 1}),
        *[("activation", {"activation": name}, {"width": 96}) for name in ("silu", "gelu", "gelu_tanh", "relu_squared")],
        ("gated_activation", {"activation": "silu"}, {"width": 96}),
        ("convolution", {"padding": 3, "groups": 24}, {"channels": 24, "taps": 4, "bias": 1}),
        ("softmax", {"dim": -1}, {"width": 131}),
        ("attention", plain, attention),
        ("attention", plain | {"window": 100, "cache": "sliding"}, attention | {"sinks": 1}),
        ("attention", plain | {"chunk": 100, "cache": "chunked"}, attention),
        ("attention", plain | {"softcap": 30.0}, attention),
        ("attention", plain | {"cache": "latent"}, {"heads": 4, "kv_heads": 4, "qk_dim": 24, "v_dim": 16, "sparse": 1}),
    ]


@pytest.mark.parametrize(("operator", "settings", "sizes"), make_sites())
def test_every_operator_has_a_kernel_that_agrees(backend: Backend, operator: str, settings: Any, sizes: Any) -> None:
    choice = bind(backend, operator, settings, sizes, DTYPES)
    assert choice.binding not in ("fallback", "missing"), choice
    assert choice.evidence is not None and choice.evidence.cases >= 2 * 3
    assert choice.evidence.worst_error <= choice.evidence.limit, choice


def test_no_kernel_of_the_tables_is_wrong(backend: Backend) -> None:
    """Passing over a kernel for what it was not made for is fine; a wrong number anywhere in our own tables is a bug."""
    refused = [told for operator, settings, sizes in make_sites() for kernel in backend.kernels(operator)
               if (told := check(backend, OPERATORS[operator], kernel, settings=settings, sizes=sizes, dtypes=DTYPES)).refusal
               and not told.declined]  # fmt: skip
    assert refused == []


def test_the_cpu_runs_its_own_kernels() -> None:
    from dayzero.ops import cpu

    if not (build := cpu.load()).available:
        pytest.skip(build.reason)
    backend = open_backend("cpu")
    chosen = {name: bind(backend, name, settings, sizes, DTYPES).kernel for name, settings, sizes in reversed(make_sites())}
    assert chosen["linear"] == "dayzero::linear"
    assert chosen["attention"] == "dayzero::paged_attention"
    assert chosen["rms_norm"] == "aten::rms_norm"  # compiled layers fuse their norms: the engine calls no kernel of ours


# --- deliberately wrong kernels (OP-01) --------------------------------------------------------------------------------


def softmax_without_max(x: torch.Tensor, dim: int = -1, half_to_float: bool = False) -> torch.Tensor:
    weights = torch.exp(x)
    return weights / weights.sum(dim, keepdim=True)


def zeros_without_zeroing(size: list[int], *, dtype: Any = None, device: Any = None, **_: Any) -> torch.Tensor:
    return torch.empty(size, dtype=dtype, device=device).fill_(0.1)  # what happened to be there


def floor_divide_without_int32(x: torch.Tensor, y: Any) -> torch.Tensor:
    if x.dtype == torch.int32:
        raise RuntimeError("int32 is not implemented")
    return torch.floor_divide(x, y)


def topk_wrong_beyond_64(x: torch.Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
    values, indices = torch.topk(x, k, dim, largest, sorted)
    return values, torch.where(torch.arange(k, device=x.device) >= 64, 0, indices)


def topk_truncating_empty(x: torch.Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
    if k == 0:
        raise RuntimeError("grid size 0")
    return torch.topk(x, k, dim, largest, sorted)


WRONG = [
    (aten._softmax.default, softmax_without_max, "error inf"),
    (aten.zeros.default, zeros_without_zeroing, "error"),
    (aten.floor_divide.default, floor_divide_without_int32, "int32 is not implemented"),
    (aten.topk.default, topk_wrong_beyond_64, "error inf"),
    (aten.topk.default, topk_truncating_empty, "grid size 0"),
]


@pytest.mark.parametrize(("op", "call", "why"), WRONG, ids=[call.__name__ for _, call, _ in WRONG])
def test_op_01_a_wrong_replacement_is_refused_and_the_own_operator_is_used(
    backend: Backend, op: Any, call: Any, why: str
) -> None:
    name = op._schema.name
    device = Wrapped(backend, front={name: (Kernel(name=f"vendor::{call.__name__}", call=call, binding="custom"),)})
    choice = bind_aten(device, op, [], DTYPES)
    assert choice.kernel == op.name() and choice.binding == "library"
    assert len(choice.refused) == 1 and why in choice.refused[0] and call.__name__ in choice.refused[0], choice.refused
    assert choice.evidence is not None and choice.evidence.worst_error <= choice.evidence.limit


def test_op_01_a_right_replacement_is_used(backend: Backend) -> None:
    kernel = Kernel(name="vendor::topk", call=lambda *args, **settings: torch.topk(*args, **settings), binding="custom")
    choice = bind_aten(Wrapped(backend, front={"aten::topk": (kernel,)}), aten.topk.default, [], DTYPES)
    assert (choice.kernel, choice.binding, choice.refused) == ("vendor::topk", "custom", ())


def make_wrong_operators() -> list[tuple[str, dict[str, Any], dict[str, float], Any]]:
    """The ways a fused kernel is usually wrong: one rounding too many, a mask off by one, eps in the wrong place."""

    def half_linear(x: Any, weight: Any, bias: Any) -> Any:
        return F.linear(x.to(torch.bfloat16), weight.to(torch.bfloat16)).to(x.dtype)

    def one_token_only(x: Any, weight: Any, bias: Any) -> Any:
        out = F.linear(x, weight, bias)
        return out if x.shape[1] <= 64 else out.index_fill(1, torch.tensor([65], device=x.device), 0)

    def eps_outside(x: Any, weight: Any, gate: Any, *, eps: float, **_: Any) -> Any:
        return (x.float() / (x.float().square().mean(-1, keepdim=True).sqrt() + eps) * weight.float()).to(x.dtype)

    def window_off_by_one(q: Any, k: Any, v: Any, sinks: Any, keep: Any, *, window: int, **settings: Any) -> Any:
        from dayzero.ops.library import _attention_library

        return _attention_library(q, k, v, sinks, keep, window=window + 1, **settings)

    norm = {"eps": 1e-6, "weight_offset": 0.0, "groups": 1}
    window = {"scale": 0.125, "softcap": 0.0, "window": 100, "chunk": 0, "cache": "sliding"}
    return [
        ("linear", {}, {"in_features": 64, "out_features": 96}, half_linear),
        ("linear", {}, {"in_features": 64, "out_features": 96}, one_token_only),
        ("rms_norm", norm, {"width": 64, "weight": 1}, eps_outside),
        ("attention", window, {"heads": 4, "kv_heads": 2, "qk_dim": 64, "v_dim": 64}, window_off_by_one),
    ]


@pytest.mark.parametrize(("operator", "settings", "sizes", "call"), make_wrong_operators())
def test_a_wrong_kernel_is_refused_and_the_next_is_used(
    backend: Backend, operator: str, settings: Any, sizes: Any, call: Any
) -> None:
    wrong = Kernel(name="vendor::wrong", call=call, binding="fused")
    choice = bind(Wrapped(backend, front={operator: (wrong,)}), operator, settings, sizes, DTYPES)
    assert choice.kernel != "vendor::wrong" and choice.binding != "fallback"
    assert len(choice.refused) == 1 and "is allowed" in choice.refused[0], choice


def test_when_nothing_is_right_the_definition_runs_on_the_cpu(backend: Backend) -> None:
    wrong = Kernel(name="vendor::wrong", call=lambda x, weight, bias: x[..., :1], binding="fused")
    device = Wrapped(backend, front={"linear": (wrong,)})
    device.kernels = lambda operator: device.front[operator]  # type: ignore[method-assign]
    choice = bind(device, "linear", {}, {"in_features": 8, "out_features": 8}, DTYPES)
    assert choice.binding == "fallback" and "CPU" in choice.kernel and "vendor::wrong" in choice.reason


# --- the reference itself (OP-02) ----------------------------------------------------------------------------------------


def test_op_02_topk_of_the_reference_is_a_sort() -> None:
    """The CPU's own answer against a plain Python sort: many elements, strided input, ties, k of 0 and n."""
    generator = torch.Generator().manual_seed(0)
    for x in (torch.randn(4097, generator=generator), torch.randn(64, 3, generator=generator).t()[1],
              torch.randint(0, 5, (200,), generator=generator).double()):  # fmt: skip
        for k in (0, 1, 65 if len(x) > 65 else 3, len(x)):
            values, indices = torch.topk(x, k)
            assert values.tolist() == sorted(x.tolist(), reverse=True)[:k]
            assert x[indices].tolist() == values.tolist() and len(set(indices.tolist())) == k


def test_op_02_any_order_among_exact_ties_is_accepted(backend: Backend) -> None:
    def last_among_ties(x: torch.Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
        values, indices = torch.topk(x.flip(dim), k, dim, largest, sorted)
        return values, x.shape[dim] - 1 - indices

    kernel = Kernel(name="vendor::topk", call=last_among_ties, binding="custom")
    ties = [Case(label="ties", args=(torch.tensor([[2.0, 1.0, 2.0, 2.0]]).bfloat16(), 2))]
    device = Wrapped(backend, front={"aten::topk": (kernel,)})
    assert bind_aten(device, aten.topk.default, ties, DTYPES).kernel == "vendor::topk"


def test_definitions_agree_with_an_independent_float64_path() -> None:
    """Each definition against torch's own float64 operator, where it has one."""
    theirs = {
        "linear": F.linear,
        "embedding": lambda ids, weight, scale: F.embedding(ids, weight) * scale,
        "layer_norm": lambda x, weight, bias, eps: F.layer_norm(x, x.shape[-1:], weight, bias, eps),
        "softmax": torch.softmax,
        "convolution": lambda x, weight, bias, padding, groups: F.conv1d(x, weight, bias, padding=padding, groups=groups),
    }
    compared = 0
    for operator, settings, sizes in make_sites():
        for case in CASES[operator](settings, sizes) if operator in theirs else ():
            want = theirs[operator](*case.args, **case.settings)
            got = OPERATORS[operator].define(*case.args, **case.settings)
            assert got.shape == want.shape
            assert not got.numel() or float((got - want).abs().max()) < 1e-9 * max(1.0, float(want.abs().max()))
            compared += 1
    assert compared > 20


# --- devices -------------------------------------------------------------------------------------------------------------


def test_an_unreachable_device_is_asked_and_the_reason_says_so(backend: Backend) -> None:
    # Meta has kernels for nearly everything and computes nothing: exactly a device that can only be asked.
    device = Wrapped(backend, reachable=False, dispatch_key="Meta")
    samples = [Case(label="", args=(torch.ones(2, 2), torch.ones(2, 2)))]
    for choice in (
        bind_aten(device, aten.mm.default, samples, DTYPES),
        bind_aten(device, aten.matmul.default, samples, DTYPES),  # composite: its parts are asked
        bind(device, "layer_norm", {"eps": 1e-5}, {"width": 8, "weight": 1}, DTYPES),
    ):
        assert choice.binding == "library" and choice.evidence is None and "asked, not run" in choice.reason


def test_an_operator_without_kernel_is_missing_on_an_unreachable_device(backend: Backend) -> None:
    device = Wrapped(backend, reachable=False, dispatch_key="PrivateUse1")
    samples = [Case(label="", args=(torch.ones(2, 2), torch.ones(2, 2)))]
    for op in (aten.mm.default, aten.matmul.default):
        choice = bind_aten(device, op, samples, DTYPES)
        assert choice.binding == "missing" and "aten::mm" in choice.reason and "PrivateUse1" in choice.reason


def test_a_device_that_sends_what_it_lacks_to_the_cpu_is_a_fallback() -> None:
    """In a process of its own: what is registered with the dispatcher cannot be taken back for others."""
    import subprocess
    import sys

    code = (
        "import torch; from dayzero.ops.dispatch import ask\n"
        "library = torch.library.Library('_', 'IMPL')\n"
        "library.fallback(lambda op, *args, **settings: op(*args, **settings), 'PrivateUse1')\n"
        "print(ask(torch.ops.aten.mm.default, 'PrivateUse1'), ask(torch.ops.aten.mm.default, 'CPU'))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["host", "kernel"], done.stderr


def test_the_dispatcher_distinguishes_kernels_and_composites() -> None:
    assert ask(aten.mm.default, "CPU") == "kernel" and ask(aten.matmul.default, "CPU") == "composite"
    assert ask(aten.mm.default, "PrivateUse1") == "none"


def test_backends_tell_what_they_are(backend: Backend, device: str) -> None:
    assert backend.device == device and backend.instruction_set
    memory = backend.memory()
    assert 0 < memory.available_bytes <= memory.total_bytes
    assert open_backend("cpu").collective == "gloo"


@pytest.mark.parametrize("name", ["cuda", "npu", "xpu", "musa", "notadevice", "meta"])
def test_a_device_that_cannot_be_reached_says_what_is_missing(name: str) -> None:
    if name in ("cuda", "xpu") and getattr(torch, name).is_available():
        pytest.skip(f"{name} is here")
    with pytest.raises(DayZeroError) as error:
        open_backend(name)
    assert name in error.value.what and error.value.want and error.value.fix


def test_limits_are_frozen() -> None:
    """Widening one to make a kernel pass is a decision, not a repair."""
    assert {name: LIMITS[name] for name in ("float32", "bfloat16", "float16")} == {
        "float32": 2e-5,
        "bfloat16": 1e-2,
        "float16": 2e-3,
    }
    assert all(math.isfinite(limit) for limit in itertools.chain(LIMITS.values()))
