"""Both instances and two watched forwards in, the position encodings out: frequencies, pairing, scales, and who uses which.

Frequencies are those the rotary modules of the full-size config really compute, on the CPU (they are tiny). Which of them a
mixer uses is told by the angles its pairs turned (`structure.rotation`). The scale of the softmax is the one attention is
called with, read back at full size. What adds positions in another way is named; what is not seen is not known.
"""

from __future__ import annotations

import copy
import inspect
import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from dayzero.core.model import LayerKind
from dayzero.core.structure import Evidence, Positions
from dayzero.model.classes import find_layers, text_config
from dayzero.model.inventory import layer_of
from dayzero.model.structure.places import Places
from dayzero.model.structure.rotation import CHANGED, Rotation, find_rotations
from dayzero.model.structure.watch import SHIFT, TOKENS, Runs, Watched, attention_in, is_rotary, tensors_in

HEAD_SIZES = r"^(qk_head_dim|head_dim|head_size|attention_head_size|kv_head_dim|d_head|qk_dim)$"


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """One set of inverse frequencies of the full-size model. `layer_type`: "" where the module keeps one set."""

    module: str
    layer_type: str
    inverse_frequencies: tuple[float, ...]
    attention_factor: float | None
    rope: Mapping[str, Any]


def read_positions(
    places: Places | None, runs: Runs | None, kinds: Sequence[LayerKind], model: nn.Module, outside: Sequence[str]
) -> tuple[tuple[Positions, ...], list[str]]:
    """The encodings of the text decoder and notes. outside: prefixes of towers, whose positions are not meant."""
    notes: list[str] = []
    layers = find_layers(model)[0]
    numbers = {kind.layers[0] for kind in kinds} | set(places.layer_indices if places else ())
    tables = rotary_tables(model, outside, notes, lambda name: layer_of(name, layers) in {None, *numbers})
    rotations = find_rotations(runs, [table.attention_factor or 1.0 for table in tables]) if runs else []
    found: list[Positions] = []
    for kind in kinds:
        found += _of_kind(places, runs, kind, tables, rotations, model, notes)
    return tuple(_merged(found)), notes


def rotary_tables(
    model: nn.Module, outside: Sequence[str], notes: list[str], wanted: Callable[[str], bool] = lambda name: True
) -> list[Table]:
    """Every set of frequencies of the full-size model, computed on the CPU by the model's own rotary classes.

    wanted: of the names of modules; layers that are alike need not all be asked.
    """
    tables: list[Table] = []
    for name, module in model.named_modules():
        if not is_rotary(module) or not wanted(name) or any(name.startswith(prefix + ".") for prefix in outside):
            continue
        config, real = getattr(module, "config", None), _on_cpu(module)
        if isinstance(real, str):
            notes.append(f"{name} cannot be computed on the CPU: {real}")
            continue
        ropes = getattr(config, "rope_parameters", None) or {}
        for buffer, value in real.named_buffers(recurse=False):
            if not buffer.endswith("inv_freq") or buffer.startswith("original") or "original_inv_freq" in buffer:
                continue
            layer_type = buffer.removesuffix("inv_freq").rstrip("_")
            rope = ropes.get(layer_type) if layer_type else ropes
            factor = _attention_factor(real, layer_type)
            table = Table(
                module=name,
                layer_type=layer_type,
                inverse_frequencies=tuple(value.to(torch.float64).tolist()),
                attention_factor=factor,
                rope=rope if isinstance(rope, Mapping) else {},
            )
            if not any(replace(other, module="") == replace(table, module="") and other.module == name for other in tables):
                tables.append(table)
    return tables


def _on_cpu(rotary: nn.Module) -> nn.Module | str:
    """A new instance of a rotary class for the same config; the reason where its class takes something else."""
    try:
        return type(rotary)(copy.deepcopy(getattr(rotary, "config", None)))
    except Exception as error:
        return " ".join(f"{type(error).__name__}: {error}".split())[:160]


def _attention_factor(rotary: Any, layer_type: str) -> float | None:
    """What cos is at position 0, which is 1 without a factor; where the class keeps the same number, in its full precision."""
    kept = getattr(rotary, f"{layer_type}_attention_scaling" if layer_type else "attention_scaling", None)
    kept = float(kept) if isinstance(kept, (int, float)) else None
    taken = inspect.signature(rotary.forward).parameters
    given: dict[str, Any] = {"layer_type": layer_type} if layer_type and "layer_type" in taken else {}
    try:
        with torch.no_grad():
            out = tensors_in(rotary(torch.zeros(1, 1, 1, dtype=torch.float64), torch.zeros(1, 1, dtype=torch.long), **given))
        seen = float(out[0].abs().max())
    except Exception:  # a forward of another signature: what the class keeps is all there is
        return kept
    return kept if kept is not None and abs(kept - seen) <= 1e-6 * abs(seen) else seen


def _of_kind(
    places: Places | None,
    runs: Runs | None,
    kind: LayerKind,
    tables: Sequence[Table],
    rotations: Sequence[Rotation],
    model: nn.Module,
    notes: list[str],
) -> list[Positions]:
    prefix = places.prefix(kind) if places else None
    if places is None or runs is None or prefix is None:
        # Without a small instance it is not known which layers use what: everything is stated once, for all of them.
        plain = [_positions(table, kind, None, None) for table in tables]
        return plain or [Positions(kind="not known", layer_kinds=(kind.name,))]
    here = [rotation for rotation in rotations if rotation.owner.startswith(prefix)]
    calls = attention_in(runs.first, prefix)
    attention = calls[0] if calls else None
    scale = _scale(places, attention) if attention else None
    head_dims = places.carried(attention.query.shape[-1], [attention.module], HEAD_SIZES) if attention else None
    used = _tables_used(places, runs.first, prefix, tables)
    result = []
    for rotation in here:
        mine = next((call for call in calls if _in_mixer(rotation.owner, call.module)), None)
        table = next((table for table in used if _turned_by(places, table, rotation)), None)
        if table is None and (table := next((table for table in used if _learned(places, table)), None)) is not None:
            notes.append(f"{kind.name}: its frequencies are changed by learned values, those stated are where they start")
        if table is None and mine is None and tables:
            # What follows another path when positions shift may keep norms by chance.
            notes.append(
                f"{kind.name}: {places.inner(rotation.owner)} changes with positions as if it rotated, by frequencies that are "
                "none of the model's: not counted"
            )
            continue
        if table is None:
            notes.append(f"{kind.name} rotates by position, but which frequencies it uses is not known")
            found = Positions(
                kind="rotary", layer_kinds=(kind.name,), module=places.inner(rotation.owner), style=rotation.style
            )
        else:
            found = _positions(table, kind, rotation, places.inner(rotation.owner))
        if rotation.style is None:
            notes.append(f"{kind.name}: how the rotated dimensions are paired is not known")
        result.append(
            replace(
                found,
                head_dims=int(head_dims) if head_dims and mine else None,
                softmax_scale=_scale(places, mine) if mine else None,
                evidence="measured",
            )
        )
    if result:
        return result
    if runs.shifted is None and used:
        notes.append(f"{kind.name}: how positions are paired is not measured: {'; '.join(runs.notes)}")
        return [replace(_positions(table, kind, None, None), softmax_scale=scale) for table in used]
    if attention is None and kind.mixer in ("linear", "ssm", "none"):
        return []
    other, evidence = _other_encoding(places, runs, attention, model)
    return [
        Positions(
            kind=other,
            layer_kinds=(kind.name,),
            module=places.inner(attention.module) if attention else "",
            head_dims=int(head_dims) if head_dims else None,
            softmax_scale=scale,
            evidence=evidence,
        )
    ]


def _in_mixer(owner: str, attention: str) -> bool:
    return owner == attention or attention.startswith(owner + ".")


def _turned_by(places: Places, table: Table, rotation: Rotation) -> bool:
    """Whether the small instance's frequencies of this table turn pairs by the angles that were seen."""
    name = f"{table.layer_type}_inv_freq" if table.layer_type else "inv_freq"
    for module_name, module in places.small.named_modules():
        if not is_rotary(module) or places.full_name(module_name) != table.module or not hasattr(module, name):
            continue
        # The watched copy has frequencies of its own; a class that computes them anew at each call has its config's.
        fresh = _on_cpu(module)
        for frequencies in [getattr(module, name), *([getattr(fresh, name)] if hasattr(fresh, name) else [])]:
            cosines = sorted(math.cos(SHIFT * value) for value in frequencies.tolist() if value)
            if len(cosines) == len(rotation.turns) and all(
                abs(one - other) <= 1e-3 for one, other in zip(cosines, rotation.turns, strict=True)
            ):
                return True
    return False


def _learned(places: Places, table: Table) -> bool:
    """Whether the rotary module has weights, which the small instance has at random."""
    return any(True for _ in places.full.get_submodule(table.module).parameters())


def _tables_used(places: Places, watched: Watched, prefix: str, tables: Sequence[Table]) -> list[Table]:
    """Tables whose cos and sin (or rotary module) are handed to, or lie in, the small layer."""
    given: list[tuple[str, str]] = []
    ids = {
        id(tensor)
        for name, call in watched.calls.items()
        if (name + ".").startswith(prefix)
        for tensor in tensors_in((*call.args, *call.kwargs.values()))
    }
    for name, layer_type, tensors in watched.rotary:
        if name.startswith(prefix) or ids.intersection(tensors):
            given.append((places.full_name(name), layer_type))
    exact = [
        table
        for table in tables
        if any(table.module == name and (not word or word == table.layer_type) for name, word in given)
    ]
    # A module that keeps one set is asked without a type, or answers every type alike.
    return exact or [table for table in tables if any(table.module == name and not table.layer_type for name, _ in given)]


def _positions(table: Table, kind: LayerKind, rotation: Rotation | None, module: str | None) -> Positions:
    rope = table.rope
    theta, factor = rope.get("rope_theta"), rope.get("factor")
    turning = sum(value != 0 for value in table.inverse_frequencies)
    return Positions(
        kind="rotary",
        layer_kinds=(kind.name,),
        module=table.module if module is None else module,
        theta=float(theta) if isinstance(theta, (int, float)) else None,
        scaling=str(rope.get("rope_type", "default")) if rope else None,
        factor=float(factor) if isinstance(factor, (int, float)) else None,
        style=rotation.style if rotation else None,
        rotated_dims=2 * turning,
        inverse_frequencies=table.inverse_frequencies,
        attention_factor=table.attention_factor,
        evidence="measured",
    )


def _scale(places: Places, call: Any) -> float | None:
    """The scale attention is called with, at full size: from the same attribute of the module, or the rule of head sizes."""
    width = call.query.shape[-1]
    scale = call.scale if call.scale is not None else width**-0.5
    kept = places.carried(scale, [call.module], "scal|norm_factor|multiplier|softmax")
    if kept is not None:
        return kept
    size = places.carried(width, [call.module], HEAD_SIZES)
    if size and abs(scale - width**-0.5) <= 1e-6 * scale:
        return size**-0.5
    return scale if abs(scale - 1.0) < 1e-9 else None


def _other_encoding(places: Places, runs: Runs, attention: Any, model: nn.Module) -> tuple[str, Evidence]:
    """What a kind of layer that rotates nothing has instead."""
    if attention is not None and attention.biased:
        return "bias by distance", "measured"
    positions = torch.arange(TOKENS)
    for name, call in runs.first.calls.items():
        module = places.small.get_submodule(name)
        weight = getattr(module, "weight", None)
        if not isinstance(module, nn.Embedding) or weight is None:
            continue
        for tensor in tensors_in((*call.args, *call.kwargs.values())):
            flat = tensor.flatten()
            if not tensor.is_floating_point() and flat.numel() == TOKENS and torch.equal(flat - flat[0], positions):
                return "learned", "measured"
    if runs.shifted is not None and runs.shifted.moved:
        return "added to the embedding", "measured"
    if attention is not None and runs.shifted is not None:
        shifted = next(
            call for call in attention_in(runs.shifted, attention.module) if call.query.shape == attention.query.shape
        )
        change = float((attention.query - shifted.query).abs().max()) / float(attention.query.abs().max())
        if change <= CHANGED:
            return "none", "measured"
        alike = torch.cosine_similarity(attention.query, shifted.query, dim=-1)
        return ("queries scaled by position", "measured") if float(alike.abs().min()) > 1 - 1e-5 else ("not known", "unknown")
    source = sys.modules[type(model).__module__]
    biased = any(re.search("alibi", name, re.IGNORECASE) for name in vars(source))
    if biased and getattr(text_config(model.config), "alibi", True):
        return "alibi", "keys"
    return "not known", "unknown"


def _merged(found: Sequence[Positions]) -> list[Positions]:
    merged: list[Positions] = []
    for item in found:
        same = next((one for one in merged if replace(one, layer_kinds=()) == replace(item, layer_kinds=())), None)
        if same is None:
            merged.append(item)
        elif item.layer_kinds[0] not in same.layer_kinds:
            merged[merged.index(same)] = replace(same, layer_kinds=(*same.layer_kinds, *item.layer_kinds))
    return merged
