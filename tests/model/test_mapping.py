"""The map of operators: every required type, full-size configs on meta, recognition by measurement, honest shares."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import nn

from dayzero.core.operators import OperatorMap
from dayzero.core.records import from_dict, to_dict
from dayzero.devices.backend import Backend, Tables, joined, open_backend
from dayzero.model.describe import describe
from dayzero.model.operators import map_release
from dayzero.ops.mapping import recognise_modules
from dayzero.ops.recognise import recognise
from dayzero.ops.registry import Kernel
from tests.tiny.build import make_tiny_model
from tests.tiny.overrides import REQUIRED_TYPES

CONFIGS = Path(__file__).parents[1] / "data" / "configs"
FULL_SIZE_LIMIT_S = 20.0


@cache
def cpu() -> Backend:
    return open_backend("cpu")


def assert_sound(found: OperatorMap) -> None:
    """Shares are whole, every site has a kernel, nothing is missing or falls back, and the record survives its file."""
    assert abs(sum(site.flops_share for site in found.sites) - 1) < 1e-9
    assert abs(sum(part.bytes_share for part in found.coverage.values()) - 1) < 1e-9
    assert abs(sum(part.flops_share for part in found.coverage.values()) - 1) < 1e-9
    assert sum(part.sites for part in found.coverage.values()) == sum(len(site.names) for site in found.sites)
    assert all(site.kernel and site.reason and site.names for site in found.sites)
    assert found.missing == () and "fallback" not in found.coverage, found.fallbacks
    for site in found.sites:
        assert site.evidence is None or site.evidence.worst_error <= site.evidence.limit, site
    assert from_dict(OperatorMap, to_dict(found)) == found


@pytest.mark.parametrize("model_type", REQUIRED_TYPES)
def test_required_types_are_mapped(model_type: str, tiny_checkpoint: Callable[..., Path]) -> None:
    folder = tiny_checkpoint(model_type)
    model = describe(folder)
    found = map_release(folder, model, cpu(), context_tokens=2048)
    assert_sound(found)
    recognised = Counter(site.operator for site in found.sites for _ in site.names if not site.operator.startswith("aten::"))
    bare = [site.operator for site in found.sites if site.evidence is None]
    print(f"{model_type}: {dict(recognised)}, {sum(found.coverage[name].sites for name in found.coverage)} sites, bare {bare}")
    assert bare == []
    # Each layer has its norms; all attention and experts that announce themselves are single sites.
    assert recognised["linear"] >= model.dimensions.num_layers and recognised["embedding"] == 1
    assert recognised["rms_norm"] >= model.dimensions.num_layers
    attending = [kind for kind in model.layer_kinds if kind.mixer not in ("linear", "ssm", "none")]
    assert recognised["attention"] == sum(len(kind.layers) for kind in attending)


def test_the_kernels_a_plain_model_runs(tiny_checkpoint: Callable[..., Path]) -> None:
    """Sites by name; the weights of linears are most of what a decode step reads; views cost nothing."""
    folder = tiny_checkpoint("llama")
    found = map_release(folder, describe(folder), cpu(), context_tokens=64)
    sites = {name: site for site in found.sites for name in site.names}
    assert sites["model.layers.0.self_attn.q_proj"].operator == "linear"
    assert sites["model.layers.0.mlp"].operator == "gated_activation"
    assert sites["model.layers.1.self_attn"].operator == "attention"
    assert "eps 1e-06" in sites["model.norm"].signature
    assert sites["model.layers.0.self_attn#neg.0"].operator == "aten::neg"
    assert sum(site.bytes_share for site in found.sites if site.operator == "linear") > 0.5
    assert all(site.flops_share == site.bytes_share == 0 for site in found.sites if site.signature == "view")


def test_attention_grows_with_the_context_and_windows_do_not(tiny_checkpoint: Callable[..., Path]) -> None:
    folder = tiny_checkpoint("gemma3_text")
    model = describe(folder)

    def shares(context_tokens: int) -> dict[str, float]:
        found = map_release(folder, model, cpu(), context_tokens=context_tokens)
        linears = sum(site.flops_share for site in found.sites if site.operator == "linear")
        by_cache = {"full": 0.0, "sliding": 0.0}
        for site in found.sites:
            if site.operator == "attention":
                by_cache["sliding" if "sliding" in site.signature else "full"] += site.flops_share / linears
        return by_cache

    short, long = shares(256), shares(4096)
    assert long["full"] == pytest.approx(16 * short["full"], rel=1e-6)
    assert long["sliding"] == pytest.approx(short["sliding"], rel=1e-6)


@pytest.mark.parametrize("folder", ["DeepSeek-V3", "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16"])
def test_full_size_models_are_mapped_from_their_config(folder: str) -> None:
    path = CONFIGS / folder
    model = describe(path)
    started = time.perf_counter()
    found = map_release(path, model, cpu(), context_tokens=4096)
    seconds = time.perf_counter() - started
    print(f"{folder}: {len(found.sites)} kinds of site, {seconds:.1f} s")
    assert_sound(found)
    assert seconds < FULL_SIZE_LIMIT_S
    experts = [site for site in found.sites if site.operator == "experts"]
    moe = [kind for kind in model.layer_kinds if kind.feed_forward == "moe"]
    assert sum(len(site.names) for site in experts) == sum(len(kind.layers) for kind in moe)
    # Only active experts count: at one row, fewer operations than the whole model has parameters to multiply by.
    linears = [site for site in found.sites if site.operator in ("linear", "experts")]
    assert 0 < sum(site.flops_share for site in linears) <= 1


def test_a_model_that_needs_values_is_mapped_from_its_small_instance(tiny_checkpoint: Callable[..., Path]) -> None:
    """Its forward turns tensors into Python numbers, which meta tensors do not have. The map says what it then shows."""
    folder = tiny_checkpoint("jetmoe")
    found = map_release(folder, describe(folder), cpu(), context_tokens=128)
    assert_sound(found)
    assert "shrunken instance" in found.fallbacks[0]


def test_a_refused_kernel_is_told_in_the_map(tiny_checkpoint: Callable[..., Path]) -> None:
    """OP-01: a vendor's wrong softmax and linear do not reach the model, and the record names both."""
    from dataclasses import replace

    def softmax_without_max(x: torch.Tensor, dim: int, half_to_float: bool) -> torch.Tensor:
        return torch.exp(x) / torch.exp(x).sum(dim, keepdim=True)

    wrong = {
        "aten::_softmax": (Kernel(name="vendor::softmax", call=softmax_without_max, binding="custom"),),
        "linear": (Kernel(name="vendor::linear", call=lambda x, weight, bias: x @ weight.t() * 1.1, binding="fused"),),
    }
    own = cpu()
    tables = Tables(table=joined(wrong, own.tables.table))
    folder = tiny_checkpoint("qwen3_moe")
    found = map_release(folder, describe(folder), replace(own, name="vendor", make_tables=lambda: tables), context_tokens=64)
    assert_sound(found)
    assert not any(site.kernel.startswith("vendor::") for site in found.sites)
    for name in wrong.values():
        assert any(name[0].name in told and "refused" in told for told in found.fallbacks), found.fallbacks


# --- recognition ---------------------------------------------------------------------------------------------------------


class Renamed(nn.Module):
    """Modules under names that say nothing, as recognition must not read them."""


class Gauge(Renamed):
    def __init__(self, weight_offset: float, eps: float) -> None:
        super().__init__()
        self.alpha, self.tiny, self.weight_offset = nn.Parameter(torch.randn(24)), eps, weight_offset

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.tiny)
        return (y * (self.alpha.float() + self.weight_offset)).to(x.dtype)


class Pillar(Renamed):
    def __init__(self, order: tuple[str, str], activation: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(24, 40, bias=False), nn.Linear(24, 40, bias=False), nn.Linear(40, 24, bias=False)
        self.order, self.activation = order, activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = (getattr(self, name)(x) for name in self.order)
        return self.c(self.activation(gate) * up)


class Centred(Gauge):
    """Almost a root mean square norm: it must not pass for one."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x - 0.01 * x.mean(-1, keepdim=True))


@pytest.mark.parametrize("weight_offset", [0.0, 1.0])
@pytest.mark.parametrize("eps", [1e-6, 1e-5, 3e-4])
def test_norms_are_recognised_with_their_eps(weight_offset: float, eps: float) -> None:
    found = recognise(Gauge(weight_offset, eps), (torch.zeros(1, 3, 24),), {})
    assert found is not None and found.operator == "rms_norm"
    assert (found.settings["eps"], found.settings["weight_offset"]) == (eps, weight_offset)


def test_what_is_almost_a_norm_is_not_one() -> None:
    assert recognise(Centred(0.0, 1e-6), (torch.zeros(1, 3, 24),), {}) is None


@pytest.mark.parametrize("order", [("a", "b"), ("b", "a")])
def test_gated_feed_forwards_are_recognised_in_any_order(order: tuple[str, str]) -> None:
    found = recognise(Pillar(order, nn.functional.silu), (torch.zeros(1, 3, 24),), {})
    assert found is not None and (found.operator, found.settings["activation"]) == ("gated_activation", "silu")
    assert set(found.inside) == {"a", "b", "c"}


def test_a_feed_forward_with_another_gate_is_composed() -> None:
    assert recognise(Pillar(("a", "b"), lambda x: x.clamp(max=0.5)), (torch.zeros(1, 3, 24),), {}) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_recognition_leaves_the_model_as_it_was(dtype: torch.dtype) -> None:
    model = make_tiny_model("llama", dtype=dtype)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    attention = model.config._attn_implementation
    tokens = torch.arange(5)[None]
    with torch.no_grad():
        logits = model(input_ids=tokens).logits
    found = recognise_modules(model)
    assert Counter(item.operator for item in found.values())["rms_norm"] == 2 * len(model.model.layers) + 1
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert model.config._attn_implementation == attention
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    with torch.no_grad():
        assert torch.equal(model(input_ids=tokens).logits, logits)
