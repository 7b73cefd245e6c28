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
from dayzero.core.storage import (
    Storage,
    experts_with_weights,
    is_expert,
    matrices,
    name_form,
    stand_in,
    stored_dtype,
    weight_names,
)
from dayzero.core.structure import QuantizationGroup
from dayzero.core.units import tensor_bytes
from dayzero.model.config_keys import config_dtype
from dayzero.model.stored.quantization import Quantization, Rule, read_quantization

# Leading components that wrappers add and settings, classes and checkpoints each spell their own way.
WRAPPERS = frozenset({"model", "language_model", "text_model", "backbone", "transformer"})
# Names of modules that are no linear layers in the code that quantizes, or that loaders refuse quantized.
KEPT = re.compile(
    r"(^|\.)(lm_head|head|output_layer|weights_proj|[a-z_]*embed(_tokens|ding|dings)?)$|(^|\.)(router|gate)(\.|$)|norm[a-z_]*$"
)
# What joins a draft block to the model is a plain linear layer in every loader.
JOINS = re.compile(r"(^|\.)(eh_proj|e_proj|h_proj|input_proj)$|(^|\.)mtp\.fc$")
KEPT_ROLES = frozenset({"embedding", "head", "norm", "router", "router_bias", "convolution", "attention_sink"})
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
    weighted = experts_with_weights(parameters)
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
            group.forms[name_form(item.name)] = None
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


def estimated_parameters(by_role: Mapping[str, int], dtype: str) -> tuple[Parameter, ...]:
    """Stand-ins for the parameters of an estimate that knows roles and sizes alone, named as releases most often do.

    Scales come out as if every matrix had one row: exact for scales per group of columns that divide the matrices.
    """
    return tuple(
        Parameter(name=stand_in(role), shape=(1, size), dtype=dtype, role=role)  # type: ignore[arg-type]
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
        if rule.experts_only and not is_expert(item):
            continue
        if patterns.match(modules) or (patterns.every_linear and not kept):
            return rule
    return None


def _is_matrix(item: Parameter) -> bool:
    """Whether this is the matrix of a linear module, or of experts."""
    if item.is_buffer or len(item.shape) < 2 or item.dtype not in ("float32", "float16", "bfloat16", "float64"):
        return False
    leaf = item.name.rpartition(".")[2]
    if is_expert(item):
        return "bias" not in leaf and "scale" not in leaf
    return leaf == "weight" and len(item.shape) == 2


def _is_kept(item: Parameter, modules: Sequence[str]) -> bool:
    if item.role in KEPT_ROLES or (item.role == "shared_expert" and item.shape[0] == 1 and "gate" in item.name):
        return True
    if item.role == "mtp" and any(JOINS.search(module) for module in modules):
        return True
    return not is_expert(item) and any(KEPT.search(module) for module in modules)


def _modules(item: Parameter) -> tuple[str, ...]:
    """Names of the modules that hold this parameter in the checkpoint and in the class; expert 0 stands for all."""
    names = [name.replace("*", "0") for name in weight_names(item.sources)] + [item.name]
    found: dict[str, None] = {}
    for name in names:
        owner, _, leaf = name.rpartition(".")
        found[owner if leaf in ("weight", "bias") else name] = None
    return tuple(found)


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


def _hidden_size(config: Mapping[str, Any]) -> int | None:
    nested = config.get("text_config")
    parts = [nested, config] if isinstance(nested, Mapping) else [config]
    return next((part["hidden_size"] for part in parts if isinstance(part.get("hidden_size"), int)), None)


def _stored(item: Parameter, rule: Rule | None, dtype: str, weighted: int, hidden: int | None) -> tuple[int, int]:
    """(elements, bytes) of one parameter as the release stores it."""
    shape = item.shape
    if is_expert(item) and len(shape) == 3 and weighted:
        shape = (min(shape[0], weighted), *shape[1:])
    elements = 1
    for size in shape:
        elements *= size
    if rule is None or rule.storage is None:
        return elements, tensor_bytes(shape, stored_dtype(item, dtype))
    stored = matrices(item, hidden, experts=weighted)
    return elements, sum(count * rule.storage.bytes_of(*matrix) for count, matrix in stored)


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
        activations=storage.activations, targets=targets, ignored=ignored, word_columns=storage.word_columns,
        zero_bits=storage.zero_bits, column_bytes=storage.column_bytes, matrix_bytes=storage.matrix_bytes, **counts,
    )  # fmt: skip
