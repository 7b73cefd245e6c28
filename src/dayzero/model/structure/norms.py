"""Observed calls of a small instance in, its norms out: kind, eps, form of the weight, grouped by alike places.

`ops.recognise` decides by values in float64. A module that calls itself a norm and is none of the known ones is listed as
not known, so that none is missing from the list. Norms of towers are left out.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from dayzero.core.structure import Norm
from dayzero.model.structure.places import Places
from dayzero.model.structure.watch import Watched
from dayzero.ops.recognise import Recognised, recognise

NORMS = ("rms_norm", "layer_norm", "l2_norm")


def read_norms(places: Places, watched: Watched, outside: Sequence[str]) -> tuple[Norm, ...]:
    """Every norm that ran, alike ones together, in the order they ran."""
    known: dict[tuple[Any, ...], Recognised | None] = {}
    groups: dict[tuple[Any, ...], list[str]] = {}
    for name, call in watched.calls.items():
        module = places.small.get_submodule(name)
        if any(name.startswith(prefix + ".") for prefix in outside) or not _may_be_norm(module):
            continue
        tensors = [value for value in (*call.args, *call.kwargs.values()) if isinstance(value, Tensor)]
        if not tensors:
            continue
        place = places.inner(name)
        numbers = tuple(sorted((key, value) for key, value in vars(module).items() if isinstance(value, float)))
        alike = (type(module), place, tuple(tensors[0].shape[1:]), len(tensors), numbers)
        if alike not in known:
            known[alike] = recognise(module, call.args, call.kwargs)
        found = known[alike]
        is_norm = found is not None and found.operator in NORMS
        if not is_norm and "norm" not in type(module).__name__.lower():
            continue
        entry: tuple[Any, ...] = ("not known", None, 0.0)
        if found is not None and is_norm:
            entry = (_kind(found), found.settings.get("eps"), float(found.settings.get("weight_offset", 0.0)))
        members = groups.setdefault(entry, [])
        if place not in members:
            members.append(place)
    return tuple(
        Norm(
            kind=kind,
            eps=eps,
            weight_offset=offset,
            modules=tuple(members),
            evidence="unknown" if kind == "not known" else "measured",
        )
        for (kind, eps, offset), members in groups.items()
    )


def _may_be_norm(module: nn.Module) -> bool:
    if any(True for _ in module.children()):
        return False
    weights = list(module.parameters(recurse=False))
    named = re.search("norm", type(module).__name__, re.IGNORECASE)
    return bool(named) or (bool(weights) and len(weights) <= 2 and all(weight.dim() == 1 for weight in weights))


def _kind(found: Recognised) -> str:
    words = [found.operator]
    if "weight" not in found.slots:
        words.append("no weight")
    if "bias" in found.slots:
        words.append("bias")
    if found.settings.get("groups", 1) != 1:
        words.append("in groups")
    if gate := found.settings.get("gate_activation"):
        words.append(f"gated by {gate} " + ("before" if found.settings.get("gate_first") else "after"))
    return ", ".join(words)
