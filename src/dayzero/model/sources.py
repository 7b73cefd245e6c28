"""Parameter names in, checkpoint names out, and the reverse, through transformers' own conversion mapping.

With the names of a real checkpoint (`match_checkpoint`) each is renamed as transformers' loader would, collected per
converter, and the converters are run on meta tensors of the stored shapes, so that a wrong number or size of sources shows
before a byte is read. Without (`expected_sources`) the mapping is reversed on names alone. Quantized storage is recognised
by its companions (scales, zero points, packed words): they belong to the parameter they scale. Not done here:
dequantizing, and shapes of packed tensors.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

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

# Endings of the tensors that quantized formats store beside or instead of `<module>.weight` (or a bare parameter).
PACKED = re.compile(r"(?:\.(?:weight_packed|qweight)|_(?:blocks|packed))$")
COMPANION = re.compile(
    r"(?:\.(?:weight|input|output|activation)_(?:scale_inv|scale_2|scale|zero_point|global_scale|shape|g_idx|offset|amax)"
    r"|\.(?:qzeros|scales|g_idx|scale|input_amax|weight_bias)|_(?:scales|scale_inv|scale|zero_point|amax|shape))$"
)
KV_SCALE = re.compile(r"\.(?:[kqv]_(?:scale|zero_point)|kv_scale|prob_output_scale)$")


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
    return get_model_conversion_mapping(model)  # type: ignore[arg-type]


def expected_sources(model: nn.Module, names: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Checkpoint names of each parameter as the mapping, reversed, gives them; `*` stands for an expert index."""
    # Prefixes that loading drops or adds may or may not be in a checkpoint: not reversible, left out as transformers does.
    reverse = [
        transform.reverse_transform()
        for transform in get_model_conversion_mapping(model, add_legacy=False)[::-1]  # type: ignore[arg-type]
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


def match_checkpoint(model: nn.Module, tensors: Mapping[str, TensorEntry], *, quantized: bool) -> CheckpointMatch:
    """Match every checkpoint name with the parameters it fills, as transformers' loader does, and check the shapes.

    quantized: the config declares quantization, so scales and packed tensors are looked for.
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

    def target_of(name: str) -> tuple[str | None, str | None]:
        renamed, pattern = rename_source_key(name, renamings, converters, prefix, state)  # type: ignore[arg-type]
        if renamed not in state and name in state:
            renamed, pattern = rename_source_key(name, [], [], prefix, state)  # type: ignore[arg-type]
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
    for target, entries in collected.items():
        pattern = entries[0][1]
        converter = by_pattern[pattern] if pattern is not None else None
        realised = _realise(model, target, entries, converter, tensors, skip_shapes=quantized)
        for parameter, shape in realised.items():
            sources[parameter] = tuple(dict.fromkeys((*sources.get(parameter, ()), *(name for name, _ in entries))))
            wanted = state.get(parameter)
            if isinstance(shape, str) or (
                wanted is not None and shape is not None and shape != tuple(wanted.shape) and not quantized
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


def _stems(name: str, ending: re.Pattern[str]) -> list[str]:
    """`x.weight_scale` -> `x.weight`, `x`; `y_blocks` -> `y`: what a companion may belong to."""
    found = ending.search(name)
    if found is None:
        return []
    base = name[: found.start()]
    return [f"{base}.weight", base]


def _realise(
    model: nn.Module,
    target: str,
    entries: list[tuple[str, str | None]],
    converter: WeightConverter | None,
    tensors: Mapping[str, TensorEntry],
    *,
    skip_shapes: bool,
) -> dict[str, tuple[int, ...] | str | None]:
    """The parameters that these sources fill and the shapes they get; a string says why the conversion fails."""
    if converter is None:
        return {target: tensors[entries[-1][0]].shape}
    targets = [target.replace(converter.target_patterns[0], pattern) for pattern in converter.target_patterns]
    if skip_shapes:  # stored shapes say nothing of packed tensors; the number of experts still shows
        counts = {item: sum(pattern == item for _, pattern in entries) for item in converter.source_patterns if "*" in item}
        uneven = f"unequal numbers of stored tensors: {counts}" if len(set(counts.values())) > 1 else None
        return dict.fromkeys(targets, uneven)
    own = copy.deepcopy(converter)
    for name, pattern in entries:
        assert pattern is not None, name
        own.add_tensor(target, name, pattern, torch.empty(tensors[name].shape, device="meta"))  # type: ignore[arg-type]
    try:
        made = own.convert(target, model=model, config=model.config)
    except Exception as error:
        reason = f"{len(entries)} stored tensors do not convert: {' '.join(str(error).split())[:200]}"
        return dict.fromkeys(targets, reason)
    return {name: tuple((value[0] if isinstance(value, list) else value).shape) for name, value in made.items()}
