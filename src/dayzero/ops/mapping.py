"""Every operator of a model on a device: the `map` stage.

Goes in: the model on meta (its sizes), a shrunken instance in the same dtype (its behaviour), which module of one stands
for which of the other, the layer kinds (their caches) and a device. Comes out: an `OperatorMap`: sites that are alike
grouped, each with a kernel, a reason, evidence, and its share of one decode step at the given context.

A site is a module that is one operator, an attention or experts call, or `module#operator.n` for what remains, library
operator by library operator (one group per operator). Costs are taken from two observed decode steps, one token of context
apart, and continued linearly to the context; attention reads its cache as the description says. Not done here: choosing
between right kernels by speed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from dayzero.core.model import LayerKind
from dayzero.core.operators import Coverage, OperatorMap, Site
from dayzero.core.units import DTYPE_BITS
from dayzero.ops.binding import Choice, bind, bind_aten, bind_experts
from dayzero.ops.cases import Case
from dayzero.ops.conformance import Device
from dayzero.ops.definitions import OPERATORS, Cost
from dayzero.ops.observe import Call, Observation, is_view, observe
from dayzero.ops.recognise import Recognised, recognise
from dayzero.ops.sites import GROWING, Scale, attention_reads, attention_signature, module_cost, module_sizes


class Unobservable(Exception):
    """The model's own forward did not run while watched; the text is its reason."""


def _watch(model: nn.Module, **settings: Any) -> Observation:
    try:
        return observe(model, **settings)
    except Exception as error:  # the model's code: whatever it raises is the reason
        raise Unobservable(" ".join(f"{type(error).__name__}: {error}".split())[:200]) from error


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelPair:
    """`stand_in`: module name of the full model -> of the small one. `layers`: prefix of the decoder layers' names."""

    full: nn.Module
    small: nn.Module
    stand_in: Mapping[str, str]
    layers: str


@dataclass(slots=True)
class _Group:
    """Alike sites on their way into the record."""

    operator: str
    signature: str
    names: list[str] = field(default_factory=list)
    cost: Cost = field(default_factory=Cost)
    choice: Choice | None = None


def map_operators(
    models: ModelPair,
    device: Device,
    *,
    model: str,
    dtype: str,
    layer_kinds: Sequence[LayerKind],
    context_tokens: int,
) -> OperatorMap:
    """The map of a model on a device. Raises Unobservable where a forward cannot be followed."""
    known = recognise_modules(models.small)
    inner = frozenset(known)
    small = _watch(models.small, opaque=inner, keep_samples=True)
    recognised = {name: known[stand] for name, stand in models.stand_in.items() if stand in known}
    full = _watch(models.full, opaque=frozenset(recognised))
    kinds = {layer: kind for kind in layer_kinds for layer in kind.layers}
    scale = Scale(context_tokens, kinds, models.layers)
    item_bytes = DTYPE_BITS[dtype] // 8
    dtypes = list(dict.fromkeys((dtype, "float32")))
    groups = [
        *_module_groups(models, recognised, full, scale, device, item_bytes, dtypes),
        *_attention_groups(full, scale, device, item_bytes, dtypes),
        *_experts_groups(models, full, scale, device, item_bytes, dtypes),
        *_aten_groups(small, full, scale, device, dtypes),
    ]
    return _record(groups, model, device)


def recognise_modules(small: nn.Module) -> dict[str, Recognised]:
    """Modules of a small CPU instance that are one operator, by name. The inside of such a module is left out."""
    found: dict[str, Recognised] = {}
    seen = _watch(small)
    modules = dict(small.named_modules())
    closed: list[tuple[str, tuple[str, ...]]] = []
    for name in modules:  # parents come before children
        calls = seen.prefill.modules.get(name, [])
        if not name or not calls or name in seen.prefill.experts or name in seen.prefill.attention:
            continue
        if any(name.startswith(f"{outer}.") and name[len(outer) + 1 :] not in inside for outer, inside in closed):
            continue
        answer = recognise(modules[name], calls[0].args, calls[0].kwargs)
        if answer is not None:
            found[name] = answer
            closed.append((name, answer.inside))
    return found


def _module_groups(
    models: ModelPair,
    recognised: Mapping[str, Recognised],
    full: Observation,
    scale: Scale,
    device: Device,
    item_bytes: int,
    dtypes: list[str],
) -> list[_Group]:
    modules, groups = dict(models.full.named_modules()), {}
    for name, what in recognised.items():
        calls = full.prefill.modules.get(name) or full.decode[1].modules.get(name)
        if not calls:
            continue
        module = modules[name]
        signature, sizes = module_sizes(module, what, calls[0])
        key = (what.operator, signature, str(sorted(what.settings.items())))
        if key not in groups:
            groups[key] = _Group(what.operator, signature)
            groups[key].choice = bind(device, what.operator, what.settings, sizes, dtypes)
        group = groups[key]
        group.names.append(name)
        costs = [[module_cost(module, what, call, item_bytes) for call in step.modules.get(name, [])] for step in full.decode]
        group.cost += scale.cost(name, *costs)
    return list(groups.values())


def _attention_groups(full: Observation, scale: Scale, device: Device, item_bytes: int, dtypes: list[str]) -> list[_Group]:
    groups: dict[str, _Group] = {}
    for name, calls in full.decode[1].attention.items():
        first = full.decode[0].attention.get(name, calls)
        kind = scale.kind(name)
        specs = [spec for spec in kind.cache if spec.kind in GROWING] if kind else []
        for number, call in enumerate(calls):
            before = first[number] if number < len(first) else call
            settings, visible, cache_bytes = attention_reads(call, before, specs, scale.context_tokens, item_bytes)
            sizes = {
                "heads": call.query[1], "kv_heads": call.key[1], "qk_dim": call.query[3], "v_dim": call.value[3],
                "sinks": float(call.sinks), "sparse": float(call.sparse),
            }  # fmt: skip
            signature = attention_signature(call, settings)
            if signature not in groups:
                groups[signature] = _Group("attention", signature)
                groups[signature].choice = bind(device, "attention", settings, sizes, dtypes)
            group = groups[signature]
            group.names.append(name if len(calls) == 1 else f"{name}#attention.{number}")
            group.cost += OPERATORS["attention"].cost(
                sizes | {"rows": call.query[2], "visible_tokens": visible, "cache_bytes": cache_bytes, "item_bytes": item_bytes}
            )
    return list(groups.values())


def _experts_groups(
    models: ModelPair, full: Observation, scale: Scale, device: Device, item_bytes: int, dtypes: list[str]
) -> list[_Group]:
    modules, small = dict(models.full.named_modules()), dict(models.small.named_modules())
    groups: dict[tuple[str, str], _Group] = {}
    for name, calls in full.decode[1].experts.items():
        module, stand_in = modules[name], small[models.stand_in[name]]
        first = next(iter(module.parameters()))
        num_experts, elements = int(first.shape[0]), sum(p.numel() for p in module.parameters()) / first.shape[0]
        active = _active_experts(calls[0])
        signature = f"{num_experts} experts of {int(elements)} elements, {active} active"
        key = (signature, type(module).__qualname__)
        if key not in groups:
            groups[key] = _Group("experts", signature)
            groups[key].choice = bind_experts(device, stand_in, _experts_cases(stand_in, calls[0]), dtypes)
        groups[key].names.append(name)
        sizes = {
            "experts": num_experts, "expert_elements": elements, "active": active, "item_bytes": item_bytes,
            "width": calls[0].args[0].shape[-1],
        }  # fmt: skip
        costs = [
            [OPERATORS["experts"].cost(sizes | {"rows": c.out_elements / sizes["width"]}) for c in step.experts.get(name, [])]
            for step in full.decode
        ]
        groups[key].cost += scale.cost(name, *costs)
    return list(groups.values())


def _active_experts(call: Call) -> int:
    tensors = [value for value in (*call.args[1:], *call.kwargs.values()) if isinstance(value, Tensor)]
    return int(tensors[0].shape[-1]) if tensors else 1


def _experts_cases(module: nn.Module, call: Call) -> list[Case]:
    """One token, a few, and more than any per-token path takes; each token sees distinct experts."""
    num_experts = int(next(iter(module.parameters())).shape[0])
    down = next(parameter for name, parameter in module.named_parameters() if "down" in name and parameter.dim() == 3)
    width = int(down.shape[2] if getattr(module, "is_transposed", False) else down.shape[1])
    active = min(_active_experts(call), num_experts)
    generator, cases = torch.Generator().manual_seed(9), []
    for tokens in (1, 7, 67):
        hidden = torch.randn(tokens, width, generator=generator, dtype=torch.float64)
        index = torch.stack([torch.randperm(num_experts, generator=generator)[:active] for _ in range(tokens)])
        weights = torch.rand(tokens, active, generator=generator, dtype=torch.float64)
        cases.append(Case(label=f"{tokens} tokens", args=(hidden, index, weights / weights.sum(-1, keepdim=True))))
    return cases


def _aten_groups(small: Observation, full: Observation, scale: Scale, device: Device, dtypes: list[str]) -> list[_Group]:
    """What remains, one group per library operator. Operators that only a prefill calls have no share."""
    names: dict[torch._ops.OpOverload, dict[str, None]] = defaultdict(dict)
    for step in (full.prefill, *full.decode):
        counts: dict[tuple[str, torch._ops.OpOverload], int] = defaultdict(int)
        for call in step.aten:
            number = counts[call.module, call.op]
            counts[call.module, call.op] += 1
            names[call.op][f"{call.module}#{_short(call.op)}.{number}"] = None
    for op in small.samples:  # reached on the small instance alone: still an operator the device must have
        names.setdefault(op, {f"#{_short(op)}.0": None})
    costs: tuple[dict[Any, list[Cost]], dict[Any, list[Cost]]] = (defaultdict(list), defaultdict(list))
    for step, into in zip(full.decode, costs, strict=True):
        for call in step.aten:
            into[call.op, call.module].append(call.cost)
    groups = {op: _Group(op.name(), "view" if is_view(op) else "as called", list(listed)) for op, listed in names.items()}
    for op, module in {**costs[0], **costs[1]}:
        groups[op].cost += scale.cost(module, costs[0].get((op, module), []), costs[1].get((op, module), []))
    for op, group in groups.items():
        group.choice = bind_aten(device, op, small.samples.get(op, []), dtypes)
    return list(groups.values())


def _short(op: torch._ops.OpOverload) -> str:
    return op._schema.name.partition("::")[2]


def _record(groups: Sequence[_Group], model: str, device: Device) -> OperatorMap:
    flops, moved = (sum(getattr(group.cost, name) for group in groups) or 1.0 for name in ("flops", "bytes"))
    sites, fallbacks, missing = [], list(device.notes), []
    for group in sorted(groups, key=lambda group: -group.cost.bytes):
        choice = group.choice
        assert choice is not None, group
        what = f"{group.operator} ({group.signature})"
        sites.append(
            Site(
                operator=group.operator,
                names=tuple(group.names),
                signature=group.signature,
                binding=choice.binding,
                kernel=choice.kernel,
                reason=choice.reason,
                evidence=choice.evidence,
                flops_share=group.cost.flops / flops,
                bytes_share=group.cost.bytes / moved,
            )
        )
        if choice.binding == "fallback":
            fallbacks.append(f"{what} runs as {choice.kernel}: {choice.reason}.")
        else:
            fallbacks += [f"{what}: {told}: refused; {choice.kernel} is used." for told in choice.refused]
        if choice.binding == "missing":
            missing.append(f"{what}: {choice.reason}")
    return OperatorMap(
        model=model,
        device=device.device,
        instruction_set=device.instruction_set,
        sites=tuple(sites),
        coverage=_coverage(sites),
        fallbacks=tuple(dict.fromkeys(fallbacks)),
        missing=tuple(missing),
    )


def _coverage(sites: Sequence[Site]) -> dict[str, Coverage]:
    found: dict[str, Coverage] = {}
    for binding in dict.fromkeys(site.binding for site in sites):
        own = [site for site in sites if site.binding == binding]
        found[binding] = Coverage(
            sites=sum(len(site.names) for site in own),
            flops_share=sum(site.flops_share for site in own),
            bytes_share=sum(site.bytes_share for site in own),
        )
    return found
