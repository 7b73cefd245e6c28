"""What tells one operator site from another, what it costs, and what its test cases are made from.

Goes in: calls observed on the full model (shapes alone) and the caches of its layers. Comes out: signatures, sizes for
`cases`, and costs continued from two observed decode steps to the wanted context.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from dayzero.core.model import CacheSpec, LayerKind
from dayzero.ops.cases import tested
from dayzero.ops.definitions import OPERATORS, Cost
from dayzero.ops.observe import PREFILL_TOKENS, AttentionCall, Call
from dayzero.ops.recognise import Recognised

GROWING = ("full", "sliding", "chunked", "latent")
# Context tokens seen by the second observed decode step.
OBSERVED_CONTEXT = PREFILL_TOKENS + 2


@dataclass(frozen=True, slots=True)
class Scale:
    """Observed costs continued to the wanted context."""

    context_tokens: int
    kinds: Mapping[int, LayerKind]
    layers: str

    def kind(self, name: str) -> LayerKind | None:
        found = re.match(re.escape(self.layers) + r"\.(\d+)(\.|$)", name)
        return self.kinds.get(int(found.group(1))) if found else None

    def context(self, name: str) -> int:
        """Context that the layer of a module keeps: no more than its windows."""
        kind = self.kind(name)
        growing = [spec for spec in kind.cache if spec.elements_per_token] if kind else []
        if growing and all(spec.window_tokens is not None for spec in growing):
            return min(self.context_tokens, max(int(spec.window_tokens or 0) for spec in growing))
        return self.context_tokens

    def cost(self, name: str, first: Sequence[Cost], second: Sequence[Cost]) -> Cost:
        """Linear in the context. A step that calls another number of operators does something periodic: not continued."""
        one, two = sum(first, Cost()), sum(second, Cost())
        if len(first) != len(second):
            return two
        steps = self.context(name) - OBSERVED_CONTEXT
        return Cost(
            flops=max(two.flops + (two.flops - one.flops) * steps, 0.0),
            bytes=max(two.bytes + (two.bytes - one.bytes) * steps, 0.0),
        )


def _tensor_bytes(module: nn.Module) -> float:
    return float(sum(tensor.numel() * tensor.element_size() for tensor in module.parameters(recurse=False)))


def _width(call: Call) -> int:
    return next(int(value.shape[-1]) for value in (*call.args, *call.kwargs.values()) if isinstance(value, Tensor))


def module_sizes(module: nn.Module, what: Recognised, call: Call) -> tuple[str, dict[str, float]]:
    """How sites are told apart, and the sizes that cases are made from."""
    slots = dict.fromkeys(what.slots, 1.0)
    if what.operator == "linear":
        inputs, outputs = _width(call), _linear_outputs(module, _width(call))
        told = f"{inputs}->{outputs}" + (" +bias" if slots else "")
        return told, {"in_features": tested(inputs), "out_features": tested(outputs), **slots}
    if what.operator == "embedding":
        rows, width = _matrix(module).shape
        scaled = what.settings["scale"]
        return f"{rows}x{width}" + (f" *{scaled:.6g}" if scaled != 1 else ""), {"width": tested(width)}
    if what.operator == "convolution":
        assert isinstance(module, nn.Conv1d)
        channels, taps = module.in_channels, module.kernel_size[0]
        told = f"{channels} channels, {taps} taps" + (", depthwise" if module.groups > 1 else "")
        return told, {"channels": tested(channels), "taps": taps, **slots}
    if what.operator == "gated_activation":
        width = _linear_outputs(module.get_submodule(what.inside[0]), 0)
        return f"{what.settings['activation']} {width}", {"width": tested(width)}
    width = _width(call)
    told = ", ".join(
        f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in what.settings.items()
        if (name, value) not in (("groups", 1), ("weight_offset", 0.0))
    )
    return f"{width}, {told}" + ("" if slots or what.operator == "activation" else ", no weight"), {"width": width, **slots}


def _matrix(module: nn.Module) -> Tensor:
    return next(parameter for parameter in module.parameters(recurse=False) if parameter.dim() == 2)


def _linear_outputs(module: nn.Module, inputs: int) -> int:
    """Of a linear whose weight may lie either way round; the parameter is [out, in] when both fit."""
    rows, columns = _matrix(module).shape
    return int(rows) if inputs in (0, columns) else int(columns)


def module_cost(module: nn.Module, what: Recognised, call: Call, item_bytes: int) -> Cost:
    sizes: dict[str, float] = {"item_bytes": item_bytes, "elements": call.out_elements, "weight_bytes": _tensor_bytes(module)}
    sizes["inputs"] = 2 if what.operator == "gated_activation" or what.settings.get("gate_activation") else 1
    if what.operator == "linear":
        inputs = _width(call)
        outputs = _linear_outputs(module, inputs)
        sizes |= {"in_features": inputs, "out_features": outputs, "rows": call.out_elements / outputs}
    elif what.operator == "embedding":
        width = _matrix(module).shape[1]
        sizes |= {"width": width, "rows": call.out_elements / width}
    elif what.operator == "convolution":
        sizes["taps"] = float(_taps(module))
    elif what.operator == "gated_activation":
        linear = module.get_submodule(what.inside[-1])
        rows = call.out_elements / max(_linear_outputs(linear, 0), 1)
        sizes["elements"] = rows * _linear_outputs(module.get_submodule(what.inside[0]), 0)
    return OPERATORS[what.operator].cost(sizes)


def _taps(module: nn.Module) -> int:
    assert isinstance(module, nn.Conv1d)
    return module.kernel_size[0] * module.in_channels // module.groups


def attention_reads(
    call: AttentionCall, before: AttentionCall, specs: Sequence[CacheSpec], context_tokens: int, item_bytes: int
) -> tuple[dict[str, Any], float, float]:
    """Settings for the test cases, keys a decoding query sees, and bytes of cache it reads."""
    settings: dict[str, Any] = {"scale": call.scale, "softcap": call.softcap, "window": 0, "chunk": 0}
    if not specs:  # the layer keeps something else: what was observed, continued
        tokens = call.key[2] + (call.key[2] - before.key[2]) * (context_tokens - OBSERVED_CONTEXT)
        visible = max(float(tokens), 1.0)
        settings |= {"cache": "other", "window": call.window}
        return settings, visible, visible * call.key[1] * (call.query[3] + call.value[3]) * item_bytes
    limit = next((spec.window_tokens for spec in specs if spec.window_tokens is not None), None)
    kind = specs[0].kind
    settings["cache"] = kind
    settings["chunk" if kind == "chunked" else "window"] = limit or 0
    visible = float(context_tokens if limit is None else min(context_tokens, limit))
    return settings, visible, float(sum(spec.bytes_for(context_tokens) for spec in specs))


def attention_signature(call: AttentionCall, settings: Mapping[str, Any]) -> str:
    said = [f"{call.query[1]} heads, {call.key[1]} kv, {call.query[3]}/{call.value[3]} wide, {settings['cache']} cache"]
    said += [f"{name} {settings[name]:g}" for name in ("window", "chunk", "softcap") if settings[name]]
    said += [name for name, given in (("sinks", call.sinks), ("sparse", call.sparse)) if given]
    return ", ".join([*said, f"scale {call.scale:.6g}"])
