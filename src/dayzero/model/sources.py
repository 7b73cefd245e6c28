"""Parameter names in, checkpoint names out, and the reverse, through transformers' own conversion mapping.

With the names of a real checkpoint (`match_checkpoint`) each is renamed as transformers' loader would, collected per
converter, and the converters are run on meta tensors of the stored shapes, so that a wrong number or size of sources shows
before a byte is read. Without (`expected_sources`) the mapping is reversed on names alone. Quantized storage is recognised
by its companions (scales, zero points, packed words): they belong to the parameter they scale; shapes are compared as the
matrices that packed tensors hold, where their format lets that be told (`model.scales`). Not done here: dequantizing.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    PrefixChange,
    WeightConverter,
    WeightRenaming,
    WeightTransform,
    apply_converters,
    apply_renamings,
    dot_natural_key,
    rename_source_key,
)

from dayzero.model.headers import TensorEntry
from dayzero.model.stored.scales import COMPANION, KV_SCALE, PACKED, logical_shapes


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointMatch:
    """`sources`: parameter -> checkpoint names, in loading order; `packed`: parameters whose stored shape is not logical.

    `unexpected`: names that no parameter takes. `mismatched`: parameter -> the shape that the
    conversion gives instead of its own, or why it gives none.
    """

    sources: dict[str, tuple[str, ...]]
    packed: frozenset[str]
    companions: dict[str, str]  # companion -> parameter
    unexpected: tuple[str, ...]
    mismatched: dict[str, tuple[int, ...] | str] = field(default_factory=dict)


def conversions(model: nn.Module) -> list[WeightTransform]:
    """transformers' transforms for loading this model, in order."""
    return get_model_conversion_mapping(model)


def expected_sources(model: nn.Module, names: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Checkpoint names of each parameter as the mapping, reversed, gives them; `*` stands for an expert index."""
    # Prefixes that loading drops or adds may or may not be in a checkpoint: not reversible, left out as transformers does.
    reverse = [
        transform.reverse_transform()
        for transform in get_model_conversion_mapping(model, add_legacy=False)[::-1]
        if not isinstance(transform, PrefixChange)
    ]
    renamings = [transform for transform in reverse if isinstance(transform, WeightRenaming)]
    converters = [transform for transform in reverse if isinstance(transform, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    found = {}
    for name in names:
        renamed, pattern = apply_converters(name, converters)
        if pattern is None:
            variants = [renamed]
        else:
            targets = by_pattern[pattern].target_patterns
            variants = [renamed.replace(targets[0], target, 1) for target in targets]
        found[name] = tuple(apply_renamings(variant, renamings).replace("\\.", ".") for variant in variants)
    return found


def match_checkpoint(
    model: nn.Module, tensors: Mapping[str, TensorEntry], *, quantized: bool, settings: Mapping[str, Any] | None = None
) -> CheckpointMatch:
    """Match every checkpoint name with the parameters it fills, as transformers' loader does, and check the shapes.

    quantized: the config declares quantization, so scales and packed tensors are looked for. settings: that declaration;
    without it the shapes of a quantized checkpoint are not compared.
    """
    state = dict(model.state_dict(keep_vars=True).items())
    transforms = conversions(model)
    renamings = [transform for transform in transforms if isinstance(transform, WeightRenaming)]
    converters = [transform for transform in transforms if isinstance(transform, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    prefix = model.base_model_prefix
    collected: dict[str, list[tuple[str, str | None]]] = {}
    packed: set[str] = set()
    companions: dict[str, str] = {}
    unexpected: list[str] = []

    @cache  # a companion asks for its weight's target once more
    def target_of(name: str) -> tuple[str | None, str | None]:
        renamed, pattern = rename_source_key(name, renamings, converters, prefix, state)
        if renamed not in state and name in state:
            renamed, pattern = rename_source_key(name, [], [], prefix, state)
        return (renamed, pattern) if renamed in state else (None, None)

    def stored_for(name: str, ending: re.Pattern[str]) -> tuple[str | None, str | None]:
        """The parameter that a packed tensor or a companion of this name belongs to."""
        for stem in _stems(name, ending):
            if (found := target_of(stem))[0] is not None:
                return found
        return None, None

    for name in sorted(tensors, key=dot_natural_key):
        target, pattern = target_of(name)
        if target is None and quantized:
            target, pattern = stored_for(name, PACKED)
            if target is not None:
                packed.add(target)
            elif (owner := stored_for(name, COMPANION)[0]) is not None or KV_SCALE.search(name):
                companions[name] = owner or ""
                continue
        if target is None:
            unexpected.append(name)
        else:
            collected.setdefault(target, []).append((name, pattern))
    sources: dict[str, tuple[str, ...]] = {}
    mismatched: dict[str, tuple[int, ...] | str] = {}
    stored = {name: (entry.shape, 0) for name, entry in tensors.items()}
    if quantized:
        names = [name for entries in collected.values() for name, _ in entries]
        stored = logical_shapes(tensors, names, settings) if settings is not None else {}
    alike: dict[object, list[tuple[int, ...] | str | None]] = {}
    for target, entries in collected.items():
        pattern = entries[0][1]
        converter = by_pattern[pattern] if pattern is not None else None
        targets = _targets(target, converter)
        # Layers of one kind convert alike: the same converter on the same shapes, for parameters of the same shapes.
        key = (
            pattern,
            tuple((part, stored[name][0] if name in stored else None) for name, part in entries),
            tuple(tuple(state[item].shape) if item in state else None for item in targets),
        )
        if key in alike:
            realised = dict(zip(targets, alike[key], strict=True))
        else:
            realised = _realise(model, target, entries, converter, stored)
            if set(realised) == set(targets):
                alike[key] = [realised[item] for item in targets]
        padding = max((stored[name][1] for name, _ in entries if name in stored), default=0)
        for parameter, shape in realised.items():
            sources[parameter] = tuple(dict.fromkeys((*sources.get(parameter, ()), *(name for name, _ in entries))))
            wanted = state.get(parameter)
            if isinstance(shape, str) or (
                wanted is not None and shape is not None and not _fits(shape, tuple(wanted.shape), padding)
            ):
                mismatched[parameter] = shape
    return CheckpointMatch(
        sources=sources, packed=frozenset(packed), companions=companions, unexpected=tuple(unexpected), mismatched=mismatched
    )


def starred(names: Iterable[str]) -> tuple[str, ...]:
    """Names with the one integer component in which they differ (the expert index) replaced by `*`, each form once."""
    names = list(names)
    forms: dict[str, list[str]] = {}
    for name in names:
        forms.setdefault(re.sub(r"(?<=\.)\d+(?=\.|$)", "#", name), []).append(name)
    result = []
    for group in forms.values():
        parts = [name.split(".") for name in group]
        varying = [index for index in range(len(parts[0])) if len({part[index] for part in parts}) > 1]
        if not varying:
            result.append(group[0])
            continue
        result.append(".".join("*" if index in varying else part for index, part in enumerate(parts[0])))
    return tuple(result)


def _fits(shape: tuple[int, ...], wanted: tuple[int, ...], padding: int) -> bool:
    """Whether the shape is the wanted one, up to padding of the last dimension of packed tensors."""
    if not shape or not wanted or not padding:
        return shape == wanted
    return shape[:-1] == wanted[:-1] and 0 <= shape[-1] - wanted[-1] <= padding


def _stems(name: str, ending: re.Pattern[str]) -> list[str]:
    """`x.weight_scale` -> `x.weight`, `x`; `y_blocks` -> `y`: what a companion may belong to."""
    found = ending.search(name)
    if found is None:
        return []
    base = name[: found.start()]
    return [f"{base}.weight", base]


def _targets(target: str, converter: WeightConverter | None) -> list[str]:
    """All parameters that the conversion of one collected target fills."""
    if converter is None:
        return [target]
    return [target.replace(converter.target_patterns[0], pattern) for pattern in converter.target_patterns]


def _realise(
    model: nn.Module,
    target: str,
    entries: list[tuple[str, str | None]],
    converter: WeightConverter | None,
    stored: Mapping[str, tuple[tuple[int, ...], int]],
) -> dict[str, tuple[int, ...] | str | None]:
    """The parameters that these sources fill and the shapes they get (None: not known); a string says why it fails.

    stored: name -> (logical shape, padding of its last dimension), for the sources whose shape can be told.
    """
    if converter is None:
        last = entries[-1][0]
        return {target: stored[last][0] if last in stored else None}
    targets = _targets(target, converter)
    if not all(name in stored for name, _ in entries):  # the number of experts still shows
        counts = {item: sum(pattern == item for _, pattern in entries) for item in converter.source_patterns if "*" in item}
        uneven = f"unequal numbers of stored tensors: {counts}" if len(set(counts.values())) > 1 else None
        return dict.fromkeys(targets, uneven)
    own = copy.deepcopy(converter)
    for name, pattern in entries:
        assert pattern is not None, name
        own.add_tensor(target, name, pattern, torch.empty(stored[name][0], device="meta"))
    try:
        made = own.convert(target, model=model, config=model.config)
    except Exception as error:
        reason = f"{len(entries)} stored tensors do not convert: {' '.join(str(error).split())[:200]}"
        return dict.fromkeys(targets, reason)
    return {name: tuple((value[0] if isinstance(value, list) else value).shape) for name, value in made.items()}
