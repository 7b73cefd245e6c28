"""Parameters and a release's quantization settings in, what the release stores out: per group, in parameters and bytes.

A parameter finds its storage rule by its names: the class's and, where known, the checkpoint's. Only matrices of linear
modules and experts are quantized; embedding, head, routers, norms, convolutions, one-row gates and what joins a draft block
to the model stay in the model's dtype unless the settings list them one by one. Experts that the class stacks are priced as
one matrix per expert, fused gate and up apart, as quantized releases store them. Not counted: file headers, scales of a
quantized cache (a few bytes a layer). Nothing here reads a tensor.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dayzero.core.model import Parameter
from dayzero.core.structure import QuantizationGroup
from dayzero.core.units import tensor_bytes
from dayzero.model.config_keys import config_dtype
from dayzero.model.stored.quantization import Quantization, Rule, Storage, read_quantization
from dayzero.model.stored.scales import COMPANION, PACKED

# Leading components that wrappers add and settings, classes and checkpoints each spell their own way.
WRAPPERS = frozenset({"model", "language_model", "text_model", "backbone", "transformer"})
# Names of modules that are no linear layers in the code that quantizes, or that loaders refuse quantized.
KEPT = re.compile(
    r"(^|\.)(lm_head|head|output_layer|weights_proj|[a-z_]*embed(_tokens|ding|dings)?)$|(^|\.)(router|gate)(\.|$)|norm[a-z_]*$"
)
# What joins a draft block to the model is a plain linear layer in every loader.
JOINS = re.compile(r"(^|\.)(eh_proj|e_proj|h_proj|input_proj)$|(^|\.)mtp\.fc$")
KEPT_ROLES = frozenset({"embedding", "head", "norm", "router", "router_bias", "convolution", "attention_sink"})
CORRECTION = re.compile(r"(correction|expert|router)_bias$|(^|\.)tid2eid$")
MAX_LISTED = 16
NONE = "none"


@dataclass(slots=True)
class _Group:
    rule: Rule | None
    parameters: int = 0
    num_bytes: int = 0
    forms: dict[str, None] = field(default_factory=dict)


def quantization_groups(
    config: Mapping[str, Any], parameters: Sequence[Parameter], *, beside: Mapping[str, Any] | None = None
) -> tuple[QuantizationGroup, ...]:
    """The groups in which a release of this config stores these parameters, those that stay in the model's dtype last.

    beside: the content of the settings file beside the config (`quantization.BESIDE`), where there is one. Buffers count in
    `num_bytes` and not in `parameters`, as in the totals of a description. Without parameters the counts are None.
    """
    quantization = read_quantization(config, beside)
    dtype = config_dtype(config)[0] or "bfloat16"
    assigned = _assign(quantization, parameters)
    weighted = _experts_with_weights(parameters)
    hidden = _hidden_size(config)
    groups: dict[tuple[str, str], _Group] = {}
    for stated in _all_rules(quantization):
        groups.setdefault(_key(stated), _Group(stated))
    groups[NONE, NONE] = _Group(None)
    for item, rule in zip(parameters, assigned, strict=True):
        if item.tied_to is not None:
            continue
        group = groups[_key(rule)]
        elements, num_bytes = _stored(item, rule, dtype, weighted, hidden)
        group.parameters += 0 if item.is_buffer else elements
        group.num_bytes += num_bytes
        if rule is not None:
            group.forms[_form(item.name)] = None
    known = bool(parameters)
    ignored = _shortened(quantization.ignored) if quantization else ()
    return tuple(_record(name, group, known, ignored) for (name, _), group in groups.items() if group.parameters or not known)


def assignment(
    config: Mapping[str, Any], parameters: Sequence[Parameter], *, beside: Mapping[str, Any] | None = None
) -> dict[str, str]:
    """Parameter name -> the name of the `QuantizationGroup` it is stored in."""
    assigned = _assign(read_quantization(config, beside), parameters)
    return {item.name: _key(rule)[0] for item, rule in zip(parameters, assigned, strict=True)}


def storage_of(
    config: Mapping[str, Any], parameters: Sequence[Parameter], *, beside: Mapping[str, Any] | None = None
) -> dict[str, Storage | None]:
    """Parameter name -> how its matrices are stored; None where it stays in the model's dtype or the method is unknown."""
    assigned = _assign(read_quantization(config, beside), parameters)
    return {item.name: rule.storage if rule else None for item, rule in zip(parameters, assigned, strict=True)}


def checkpoint_bytes(groups: Iterable[QuantizationGroup]) -> int | None:
    """Bytes of all tensors that a release of these groups stores, without file headers. None when one of them is unknown."""
    sizes = [group.num_bytes for group in groups]
    return None if not sizes or any(size is None for size in sizes) else sum(size for size in sizes if size is not None)


def stored_dtype(item: Parameter, dtype: str) -> str:
    """The dtype in which releases keep a parameter that is not quantized, `dtype` being the model's.

    Routers are computed in float32 by many classes and stored in the model's dtype by all releases seen; the correction of
    the choice is float32 in all of them, whatever the class makes of it.
    """
    if item.role == "router" and item.dtype == "float32":
        return dtype
    if CORRECTION.search(item.name) and item.dtype in ("bfloat16", "float16"):
        return "float32"
    return item.dtype


def estimated_parameters(by_role: Mapping[str, int], dtype: str) -> tuple[Parameter, ...]:
    """Stand-ins for the parameters of an estimate that knows roles and sizes alone, named as releases most often do.

    Scales come out as if every matrix had one row: exact for scales per group of columns that divide the matrices.
    """
    names = {
        "embedding": "model.embed_tokens.weight",
        "head": "lm_head.weight",
        "attention": "model.layers.0.self_attn.o_proj.weight",
        "mlp": "model.layers.0.mlp.down_proj.weight",
        "expert": "model.layers.0.mlp.experts.0.down_proj.weight",
        "shared_expert": "model.layers.0.mlp.shared_experts.down_proj.weight",
        "router": "model.layers.0.mlp.gate.weight",
        "indexer": "model.layers.0.self_attn.indexer.wq_b.weight",
        "ssm": "model.layers.0.self_attn.in_proj.weight",
        "convolution": "model.layers.0.self_attn.conv1d.weight",
        "tower": "vision_tower.layers.0.proj.weight",
        "projector": "mm_projector.proj.weight",
        "norm": "model.norm.weight",
        "mtp": "model.layers.0.mlp.experts.0.down_proj.weight",  # most of it, and stored as its neighbours are
    }
    return tuple(
        Parameter(name=names.get(role, f"model.layers.0.{role}.weight"), shape=(1, size), dtype=dtype, role=role)  # type: ignore[arg-type]
        for role, size in by_role.items()
        if size
    )


def _all_rules(quantization: Quantization | None) -> list[Rule]:
    if quantization is None:
        return []
    return [*(quantization.listed or {}).values(), *quantization.rules]


def _key(rule: Rule | None) -> tuple[str, str]:
    return (rule.name, rule.storage.scheme if rule.storage else "unknown") if rule else (NONE, NONE)


def _assign(quantization: Quantization | None, parameters: Sequence[Parameter]) -> list[Rule | None]:
    if quantization is None:
        return [None] * len(parameters)
    ignored = _Patterns(quantization.ignored)
    targets = [(rule, _Patterns(rule.targets)) for rule in quantization.rules]
    listed = {_without_wrappers(module): rule for module, rule in (quantization.listed or {}).items()}
    outside = ("tower", "projector") if quantization.text_only else ()
    return [None if item.role in outside else _rule_of(item, listed, ignored, targets) for item in parameters]


def _rule_of(
    item: Parameter, listed: Mapping[str, Rule], ignored: _Patterns, targets: list[tuple[Rule, _Patterns]]
) -> Rule | None:
    if not _is_matrix(item):
        return None
    modules = _modules(item)
    for module in modules if listed else ():
        for name in _ancestors(_without_wrappers(module)):
            if name in listed:
                return listed[name]
    kept = _is_kept(item, modules)
    if ignored.match(modules):
        return None
    for rule, patterns in targets:
        if rule.experts_only and not _is_expert(item):
            continue
        if patterns.match(modules) or (patterns.every_linear and not kept):
            return rule
    return None


def _is_matrix(item: Parameter) -> bool:
    """Whether this is the matrix of a linear module, or of experts."""
    if item.is_buffer or len(item.shape) < 2 or item.dtype not in ("float32", "float16", "bfloat16", "float64"):
        return False
    leaf = item.name.rpartition(".")[2]
    if _is_expert(item):
        return "bias" not in leaf and "scale" not in leaf
    return leaf == "weight" and len(item.shape) == 2


def _is_expert(item: Parameter) -> bool:
    return item.role == "expert" or (item.role == "mtp" and re.search(r"(^|\.)experts\.", item.name) is not None)


def _is_kept(item: Parameter, modules: Sequence[str]) -> bool:
    if item.role in KEPT_ROLES or (item.role == "shared_expert" and item.shape[0] == 1 and "gate" in item.name):
        return True
    if item.role == "mtp" and any(JOINS.search(module) for module in modules):
        return True
    return not _is_expert(item) and any(KEPT.search(module) for module in modules)


def _modules(item: Parameter) -> tuple[str, ...]:
    """Names of the modules that hold this parameter in the checkpoint and in the class; expert 0 stands for all."""
    names = [name.replace("*", "0") for name in _weights(item.sources)] + [item.name]
    found: dict[str, None] = {}
    for name in names:
        owner, _, leaf = name.rpartition(".")
        found[owner if leaf in ("weight", "bias") else name] = None
    return tuple(found)


def _weights(sources: Sequence[str]) -> list[str]:
    """Checkpoint names of the weights themselves: of a quantized release, scales and their like lie among the sources."""
    kept = [name for name in sources if COMPANION.search(name) is None] or list(sources)
    return [PACKED.sub(lambda found: ".weight" if found.group().startswith(".") else "", name) for name in kept]


def _ancestors(module: str) -> list[str]:
    parts = module.split(".")
    return [".".join(parts[:count]) for count in range(len(parts), 0, -1)]


def _without_wrappers(name: str) -> str:
    parts = name.split(".")
    while len(parts) > 1 and parts[0] in WRAPPERS:
        parts = parts[1:]
    return ".".join(parts)


class _Patterns:
    """Names in settings: plain ones (a module, or a run of components of its name), globs, and `re:` expressions."""

    def __init__(self, patterns: Iterable[str]) -> None:
        plain, globs, expressions = set(), [], []
        self.every_linear = False
        for pattern in patterns:
            if pattern.startswith("re:"):
                expressions.append(f"(?:{pattern[3:]})")
            elif pattern[:1].isupper() and pattern.isalnum():
                self.every_linear = True  # the name of a class of modules
            elif any(sign in pattern for sign in "*?["):
                globs.append(fnmatch.translate(_without_wrappers(pattern)))
            else:
                plain.add(_without_wrappers(pattern.removesuffix(".weight").removesuffix(".")))
        self.plain = plain
        self.globs = re.compile("|".join(globs)) if globs else None
        self.expressions = re.compile("|".join(expressions)) if expressions else None

    def match(self, modules: Iterable[str]) -> bool:
        for module in modules:
            # Expressions are written against the names as stored, which a wrapper's prefix may or may not begin.
            if self.expressions is not None and any(
                self.expressions.match(name) for name in (module, _without_wrappers(module))
            ):
                return True
            for name in _ancestors(_without_wrappers(module)):
                if self.globs is not None and self.globs.match(name):
                    return True
                parts = name.split(".")
                if self.plain and any(".".join(parts[start:]) in self.plain for start in range(len(parts))):
                    return True
        return False


def _experts_with_weights(parameters: Sequence[Parameter]) -> int:
    """Experts of a layer that have weights: some classes allocate slots behind them that no release stores."""
    return min((item.shape[0] for item in parameters if item.role == "expert" and len(item.shape) == 3), default=0)


def _hidden_size(config: Mapping[str, Any]) -> int | None:
    nested = config.get("text_config")
    parts = [nested, config] if isinstance(nested, Mapping) else [config]
    return next((part["hidden_size"] for part in parts if isinstance(part.get("hidden_size"), int)), None)


def _stored(item: Parameter, rule: Rule | None, dtype: str, weighted: int, hidden: int | None) -> tuple[int, int]:
    """(elements, bytes) of one parameter as the release stores it."""
    shape = item.shape
    if _is_expert(item) and len(shape) == 3 and weighted:
        shape = (min(shape[0], weighted), *shape[1:])
    elements = 1
    for size in shape:
        elements *= size
    if rule is None or rule.storage is None:
        return elements, tensor_bytes(shape, stored_dtype(item, dtype))
    return elements, sum(count * rule.storage.bytes_of(*matrix) for count, matrix in _matrices(item, shape, hidden))


def _matrices(item: Parameter, shape: tuple[int, ...], hidden: int | None) -> list[tuple[int, tuple[int, int]]]:
    """(how many, [rows, columns]) of the matrices that a parameter is stored as."""
    sources = _weights(item.sources)
    if len(shape) == 2:
        # Rows that the class fuses and the checkpoint does not: only sources of equal size are told apart.
        parts = len(sources) if sources and shape[0] % len(sources) == 0 else 1
        return [(parts, (shape[0] // parts, shape[1]))]
    count, rows, columns = shape[0], shape[1], shape[-1]
    leaf = item.name.rpartition(".")[2]
    into_hidden = re.search(r"down|w2|out", leaf) is not None
    # Some classes stack experts as [experts, input, output]: the side that is the model's width tells which is the input.
    if hidden is not None and rows != columns and ((rows == hidden) != into_hidden) and (hidden in (rows, columns)):
        rows, columns = columns, rows
    starred = sum("*" in name for name in sources)
    fused = starred or (2 if re.search(r"gate_up|up_gate|w13|w1_w3", leaf) else 1)
    return [(count * fused, (rows // fused, columns))] if rows % fused == 0 else [(count, (rows, columns))]


def _form(name: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", name)


def _shortened(patterns: Sequence[str]) -> tuple[str, ...]:
    """Patterns as given or, where there are many, their forms with `*` for each number."""
    if len(patterns) <= MAX_LISTED:
        return tuple(patterns)
    return tuple(dict.fromkeys(re.sub(r"(?<=\.)\d+", "*", pattern) for pattern in patterns))


def _record(name: str, group: _Group, known: bool, ignored: tuple[str, ...]) -> QuantizationGroup:
    rule = group.rule
    counts: dict[str, Any] = {
        "parameters": group.parameters if known else None,
        "num_bytes": group.num_bytes if known and not (rule and rule.storage is None) else None,
    }
    if rule is None:
        return QuantizationGroup(name=NONE, scheme=NONE, weight_bits=0.0, **counts)
    targets = tuple(group.forms) if known else _shortened(rule.targets)
    if rule.storage is None:
        return QuantizationGroup(name=name, scheme=f"unknown: {rule.unknown}", weight_bits=0.0, targets=targets, **counts)
    storage = rule.storage
    return QuantizationGroup(
        name=name, scheme=storage.scheme, weight_bits=float(storage.bits), block=storage.block, scale_dtype=storage.scale_dtype,
        activations=storage.activations, targets=targets, ignored=ignored, **counts,
    )  # fmt: skip
