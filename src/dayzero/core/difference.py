"""Two descriptions in, what changed between them out: what an engineer reads when a new release resembles a supported one.

Sections: structure, sizes, parameters, cache, operators, checkpoint names, quantization, keys. Names are compared as patterns:
the numbers of layers and experts are put aside, so that one more layer is one line and not three hundred. Nothing is judged
here; "what does it need that the old one did not" is the reader's question, and `new` is where the answer stands.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import ClassVar, Literal

from dayzero.core.model import PHASES, ModelDescription
from dayzero.core.operator_totals import graphs_of
from dayzero.core.records import STRICT
from dayzero.core.structure import Structure
from dayzero.core.units import format_bytes, format_count

Section = Literal["structure", "sizes", "parameters", "cache", "operators", "checkpoint", "quantization", "keys"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """`old` or `new` None: it is only in the other."""

    __pydantic_config__ = STRICT
    section: Section
    item: str
    old: str | None
    new: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    SCHEMA: ClassVar[str] = "dayzero.difference/1"
    __pydantic_config__ = STRICT

    old: str
    new: str
    changes: tuple[Change, ...] = ()
    notes: tuple[str, ...] = ()


def difference(old: ModelDescription, new: ModelDescription) -> Difference:
    """What is not the same in `new` as in `old`, section by section."""
    changes = [
        *_facts("structure", _structure(old), _structure(new)),
        *_facts("sizes", _sizes(old), _sizes(new)),
        *_facts("parameters", _parameters(old), _parameters(new)),
        *_facts("cache", _caches(old), _caches(new)),
        *_facts("operators", _operators(old), _operators(new)),
        *_facts("checkpoint", _checkpoint(old), _checkpoint(new)),
        *_facts("quantization", _quantization(old), _quantization(new)),
        *_facts("keys", _keys(old), _keys(new)),
    ]
    notes = [
        f"{model.name} is described from its keys alone: its parameter and checkpoint names are not known"
        for model in (old, new)
        if not model.parameters
    ]
    if old.parameters and new.parameters and (not _has_sources(old) or not _has_sources(new)):
        notes.append("checkpoint names are compared where both are known")
    return Difference(old=old.name, new=new.name, changes=tuple(changes), notes=tuple(notes))


Facts = dict[str, str]


def _facts(section: Section, old: Facts, new: Facts) -> Iterable[Change]:
    for item in dict.fromkeys((*new, *old)):
        if old.get(item) != new.get(item):
            yield Change(section=section, item=item, old=old.get(item), new=new.get(item))


def _structure(model: ModelDescription) -> Facts:
    found = {"model_type": model.model_type, "class": model.architecture, "towers": ", ".join(model.towers) or "none"}
    found |= {f"layers {kind.name}": str(len(kind.layers)) for kind in model.layer_kinds}
    structure: Structure = model.structure
    for place, routing in enumerate(structure.routing):
        name = "routing" if len(structure.routing) == 1 else f"routing {place}"
        found |= {f"{name} {item.name}": _said(getattr(routing, item.name)) for item in fields(routing)
                  if item.name not in ("evidence", "default_keys", "layer_kinds")}  # fmt: skip
    for place, encoding in enumerate(structure.positions):
        name = f"positions {encoding.module or place}"
        found |= {f"{name} {item.name}": _said(getattr(encoding, item.name)) for item in fields(encoding)
                  if item.name not in ("evidence", "inverse_frequencies", "module", "layer_kinds")}  # fmt: skip
    for forward in structure.feed_forwards:
        found[f"feed-forward {_pattern(forward.module)}"] = f"{forward.activation or '?'}, gate and up {forward.layout or '?'}"
    for norm in structure.norms:
        for module in norm.modules:
            offset = f", weight + {norm.weight_offset:g}" if norm.weight_offset else ""
            found[f"norm {_pattern(module)}"] = f"{norm.kind}, eps {_said(norm.eps)}{offset}"
    return found


def _sizes(model: ModelDescription) -> Facts:
    return {item.name: _said(getattr(model.dimensions, item.name)) for item in fields(model.dimensions)}


def _parameters(model: ModelDescription) -> Facts:
    found = {"total": format_count(model.total_parameters), "active": format_count(model.active_parameters)}
    found |= {"mtp": format_count(model.mtp_parameters)} if model.mtp_parameters else {}
    found |= {f"role {role}": format_count(count) for role, count in model.parameters_by_role.items()}
    shapes: dict[str, set[tuple[int, ...]]] = {}
    for parameter in model.parameters:
        shapes.setdefault(_pattern(parameter.name), set()).add(parameter.shape)
    return found | {name: " or ".join(str(list(shape)) for shape in sorted(one)) for name, one in sorted(shapes.items())}


def _caches(model: ModelDescription) -> Facts:
    found = {
        "per token": format_bytes(model.cache_bytes_per_token),
        "per sequence": format_bytes(model.cache_bytes_per_sequence),
    }
    for kind in model.layer_kinds:
        for spec in kind.cache:
            size = f"{spec.elements_per_token or spec.elements_per_sequence} x {spec.dtype}"
            size += " a token" if spec.elements_per_token else " a sequence"
            window = f", last {spec.window_tokens} tokens" if spec.window_tokens else ""
            shared = f", one entry for {spec.tokens_per_entry} tokens" if spec.tokens_per_entry > 1 else ""
            found[f"{kind.name} {spec.name}"] = f"{spec.kind}, {size}{window}{shared}"
    return found


def _operators(model: ModelDescription) -> Facts:
    found: Facts = {}
    for phase in PHASES:
        counts: dict[str, int] = {}
        for graph, layers, _ in graphs_of(model):
            for node in graph.of(phase):
                counts[node.kind] = counts.get(node.kind, 0) + node.count * layers
        found |= {f"{phase} {name}": str(count) for name, count in sorted(counts.items())}
    return found


def _checkpoint(model: ModelDescription) -> Facts:
    found: Facts = {}
    for parameter in model.parameters:
        for source in parameter.sources:
            found.setdefault(_pattern(source), f"for {_pattern(parameter.name)}")
    return found


def _has_sources(model: ModelDescription) -> bool:
    return any(parameter.sources for parameter in model.parameters)


def _quantization(model: ModelDescription) -> Facts:
    found = {"dtype": model.dtype}
    found |= {} if model.checkpoint_bytes is None else {"checkpoint": format_bytes(model.checkpoint_bytes)}
    for group in model.quantization_groups:
        block = f", block {'x'.join(map(str, group.block))}" if group.block else ""
        found[f"group {group.name}"] = f"{group.scheme}, {group.weight_bits:g} bits{block}, scales {_said(group.scale_dtype)}"
    return found | {f"key {key}": value for key, value in model.quantization.items()}


def _keys(model: ModelDescription) -> Facts:
    found = dict.fromkeys(model.consumed_keys, "consumed") | dict.fromkeys(model.inert_keys, "inert")
    return found | dict.fromkeys(model.unconsumed_keys, "consumed by nobody")


def _pattern(name: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.)", "*", name)


def _said(value: object) -> str:
    if value is None:
        return "none"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value)) or "none"
    return f"{value:g}" if isinstance(value, float) else str(value).lower() if isinstance(value, bool) else str(value)
