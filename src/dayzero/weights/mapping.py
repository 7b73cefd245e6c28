"""A model class and a checkpoint's headers in; for each parameter the view of its elements in the checkpoint out.

Names and operations are transformers' own: its renamings and converters are applied in its loader's order, and each
converter runs on `ViewTensor`s. Where a converter computes (or moves elements too finely to list), its parameters come from
a `ComputedGroup`: the same converter run on the group's real tensors, when they are needed. Everything the checkpoint holds
is accounted for: used, dropped with a reason, or a problem. No tensor byte is read here.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

from dayzero.core.model import Problem
from dayzero.model.classes import SIDE_STACKS, find_layers
from dayzero.model.headers import TensorEntry
from dayzero.model.reconcile import ignorable_patterns
from dayzero.model.sources import conversions
from dayzero.weights.algebra import NotDataMovement, View
from dayzero.weights.symbolic import ViewTensor, dtype_name

ReadTensor = Callable[[str], torch.Tensor]
MTP_NAME = re.compile(r"(^|[._])(mtp|nextn)(?=[._]|$)")


@dataclass(frozen=True, kw_only=True, slots=True)
class ComputedGroup:
    """Parameters that must be made by running transformers' conversion on whole source tensors."""

    name: str
    entries: tuple[tuple[str, str], ...]  # (source tensor, the converter's pattern it matched)
    converter: WeightConverter
    reason: str
    num_bytes: int

    def run(self, model: nn.Module, read: ReadTensor) -> dict[str, torch.Tensor]:
        return _realise(self.converter, self.name, [(read(source), source, pattern) for source, pattern in self.entries], model)


@dataclass(kw_only=True, slots=True)
class CheckpointMap:
    """`views`: state-dict name -> view. A piece's source is a checkpoint tensor, or a name in `computed`."""

    views: dict[str, View] = field(default_factory=dict)
    computed: dict[str, tuple[ComputedGroup, str]] = field(default_factory=dict)  # "computed:<parameter>" -> (group, parameter)
    dropped: dict[str, str] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)
    ties: dict[str, str] = field(default_factory=dict)  # parameter -> the parameter it shares elements with
    duplicates: dict[str, str] = field(default_factory=dict)  # both stored: must be shown equal before one is dropped
    problems: list[Problem] = field(default_factory=list)


def map_checkpoint(model: nn.Module, tensors: Mapping[str, TensorEntry], *, num_mtp_layers: int = 0) -> CheckpointMap:
    """Map every tensor of a checkpoint. `model` is an instance on the meta device."""
    state = model.state_dict(keep_vars=True)
    made = CheckpointMap()
    groups, unmatched = _group(model, tensors, state)
    for target, (converter, entries) in groups.items():
        _convert_group(made, model, target, converter, entries, tensors, state)
    accounting = _Accounting(model, num_mtp_layers)
    for source, renamed in unmatched.items():
        reason, kind = accounting.judge(renamed, source)
        if reason:
            made.dropped[source] = reason
        else:
            detail = f"{source} in {tensors[source].file} fills no parameter ({renamed})"
            made.problems.append(Problem(kind=kind, severity="error", file=tensors[source].file, tensor=source, detail=detail))
    _partly_used(made, tensors)
    _tie(made, model)
    _missing(made, model, state)
    return made


def _group(
    model: nn.Module, tensors: Mapping[str, TensorEntry], state: Mapping[str, Any]
) -> tuple[dict[str, tuple[WeightConverter | None, list[tuple[str, str]]]], dict[str, str]]:
    """Checkpoint names collected per first target, in transformers' order, and those no parameter takes."""
    transforms = conversions(model)
    renamings = [transform for transform in transforms if isinstance(transform, WeightRenaming)]
    converters = [transform for transform in transforms if isinstance(transform, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    prefix = model.base_model_prefix
    groups: dict[str, tuple[WeightConverter | None, list[tuple[str, str]]]] = {}
    unmatched: dict[str, str] = {}
    for name in sorted(tensors, key=dot_natural_key):
        renamed, pattern = rename_source_key(name, renamings, converters, prefix, state)
        if renamed not in state and name in state:
            renamed, pattern = rename_source_key(name, [], [], prefix, state)
        if renamed not in state:
            unmatched[name] = renamed
            continue
        converter = by_pattern[pattern] if pattern is not None else None
        groups.setdefault(renamed, (converter, []))[1].append((name, pattern or name))
    return groups, unmatched


def _convert_group(
    made: CheckpointMap,
    model: nn.Module,
    target: str,
    converter: WeightConverter | None,
    entries: list[tuple[str, str]],
    tensors: Mapping[str, TensorEntry],
    state: Mapping[str, Any],
) -> None:
    file = tensors[entries[0][0]].file
    if converter is None and len(entries) > 1:
        names = ", ".join(source for source, _ in entries)
        made.problems.append(Problem(kind="ambiguous_sources", severity="error", file=file, tensor=target,
                                     detail=f"{target} would be filled {len(entries)} times: {names}"))  # fmt: skip
        return
    try:
        views = _views(model, target, converter, entries, tensors)
    except NotDataMovement as error:
        assert converter is not None, target
        views = _computed(made, model, target, converter, entries, tensors, str(error))
    except Exception as error:
        # Any exception of transformers' operation: what is stored does not fit what the operation expects.
        detail = f"{len(entries)} stored tensors do not convert into {target}: {' '.join(str(error).split())[:200]}"
        made.problems.append(Problem(kind="conversion_error", severity="error", file=file, tensor=target, detail=detail))
        return
    for name, view in views.items():
        wanted = state.get(name)
        if wanted is None:
            made.problems.append(Problem(kind="unknown_parameter", severity="error", file=file, tensor=name,
                                         detail=f"the conversion gives {name}, which the class does not have"))  # fmt: skip
        elif tuple(wanted.shape) != view.shape:
            made.problems.append(Problem(kind="shape_mismatch", severity="error", file=file, tensor=entries[0][0],
                                         detail=f"{name}: the checkpoint gives {list(view.shape)}, the class wants "
                                         f"{list(wanted.shape)}"))  # fmt: skip
        else:
            made.views[name] = view
    made.used.update(source for source, _ in entries)


def _views(
    model: nn.Module,
    target: str,
    converter: WeightConverter | None,
    entries: list[tuple[str, str]],
    tensors: Mapping[str, TensorEntry],
) -> dict[str, View]:
    whole = [View.of(source, tensors[source].shape, tensors[source].dtype) for source, _ in entries]
    if converter is None:
        return {target: whole[0]}
    inputs = [(ViewTensor(view), source, pattern) for view, (source, pattern) in zip(whole, entries, strict=True)]
    realised = _realise(converter, target, inputs, model)
    if not all(isinstance(tensor, ViewTensor) for tensor in realised.values()):
        raise NotDataMovement("the conversion made a tensor of its own")
    return {name: tensor.view_of for name, tensor in realised.items()}


def _realise(
    converter: WeightConverter, target: str, inputs: Sequence[tuple[torch.Tensor, str, str]], model: nn.Module
) -> dict[str, torch.Tensor]:
    """Run transformers' converter on tensors (real or symbolic)."""
    own = copy.deepcopy(converter)
    for tensor, source, pattern in inputs:
        own.add_tensor(target, source, pattern, tensor)
    with torch.no_grad():
        made = own.convert(target, model=model, config=model.config)
    return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


def _computed(
    made: CheckpointMap,
    model: nn.Module,
    target: str,
    converter: WeightConverter,
    entries: list[tuple[str, str]],
    tensors: Mapping[str, TensorEntry],
    reason: str,
) -> dict[str, View]:
    """Views into tensors that will be computed; their shapes are found on the meta device."""
    from dayzero.weights.symbolic import torch_dtype

    group = ComputedGroup(name=target, entries=tuple(entries), converter=converter, reason=reason,
                          num_bytes=sum(tensors[source].num_bytes for source, _ in entries))  # fmt: skip
    shapes = group.run(
        model, lambda source: torch.empty(tensors[source].shape, dtype=torch_dtype(tensors[source].dtype), device="meta")
    )
    views = {}
    for name, tensor in shapes.items():
        key = f"computed:{name}"
        made.computed[key] = (group, name)
        views[name] = View.of(key, tuple(tensor.shape), dtype_name(tensor.dtype))
    return views


class _Accounting:
    """Why a tensor that fills no parameter may be left out, or that it may not."""

    def __init__(self, model: nn.Module, num_mtp_layers: int) -> None:
        self.stack, layers = find_layers(model)
        self.num_layers, self.num_mtp = len(layers), num_mtp_layers
        self.layer = re.compile(rf"(?:^|\.){re.escape(self.stack.rpartition('.')[2])}\.(\d+)\.")
        self.ignorable = ignorable_patterns(model)
        buffers = [name for name, _ in model.named_buffers()]
        self.recomputed = set(buffers) - set(model.state_dict())
        base = getattr(model, str(model.base_model_prefix), model)
        children = [name for module in (model, base) for name, _ in module.named_children()]
        self.text_only = not any(SIDE_STACKS.search(name) for name in children)

    def judge(self, renamed: str, source: str) -> tuple[str, str]:
        """(reason to drop, "") or ("", kind of problem)."""
        is_side = SIDE_STACKS.search(renamed.partition(".layers.")[0])
        found = self.layer.search(renamed)
        if found and int(found.group(1)) >= self.num_layers and not is_side:
            index = int(found.group(1))
            if index < self.num_layers + self.num_mtp:
                return f"multi-token prediction layer {index}: not served", ""
            return "", "unexpected_layer"
        if MTP_NAME.search(source) or MTP_NAME.search(renamed):
            return "multi-token prediction weight: not served", ""
        if renamed in self.recomputed:
            return "a buffer the class computes itself", ""
        pattern = next((one for one in self.ignorable if re.search(one, renamed)), None)
        if pattern is not None:
            return f"the class ignores it ({pattern})", ""
        if self.text_only and SIDE_STACKS.search(renamed):
            return "tower of another medium: not served", ""
        return "", "unused_tensor"


def _partly_used(made: CheckpointMap, tensors: Mapping[str, TensorEntry]) -> None:
    """Padding that a conversion cuts off is said: those elements reach no parameter."""
    taken: dict[str, int] = {}
    for view in made.views.values():
        for piece in view.pieces:
            taken[piece.source] = taken.get(piece.source, 0) + piece.num_elements
    for source, count in taken.items():
        if source in tensors and count < tensors[source].num_elements:
            detail = f"{source}: the conversion uses {count} of its {tensors[source].num_elements} elements"
            made.problems.append(
                Problem(kind="partly_used", severity="warning", file=tensors[source].file, tensor=source, detail=detail)
            )


def _tie(made: CheckpointMap, model: nn.Module) -> None:
    """Fill tied parameters from the one that is stored, whichever side it is on, as transformers does."""
    for target, source in dict(getattr(model, "all_tied_weights_keys", None) or {}).items():
        has_target, has_source = target in made.views, source in made.views
        if has_target and has_source:
            if made.views[target] != made.views[source]:
                made.duplicates[target] = source
        elif has_source:
            made.views[target] = made.views[source]
        elif has_target:
            made.views[source] = made.views[target]
        if target in made.views and source in made.views:
            made.ties[target] = source


def _missing(made: CheckpointMap, model: nn.Module, state: Mapping[str, Any]) -> None:
    """Unfilled parameters are errors; buffers, and what the class declares optional, keep the value the class gives them."""
    optional = sorted(getattr(model, "_keys_to_ignore_on_load_missing", None) or ())
    tied = dict(getattr(model, "all_tied_weights_keys", None) or {})
    buffers = {name for name, _ in model.named_buffers()}
    reported = {problem.tensor for problem in made.problems}
    for name in state:
        if name in made.views or name in reported:
            continue
        if name in buffers or any(re.search(pattern, name) for pattern in optional):
            made.problems.append(Problem(kind="not_stored", severity="warning", tensor=name,
                                         detail=f"{name} is not in the checkpoint: the class's own value is used"))  # fmt: skip
            continue
        also = f" (nor is {tied[name]}, which it is tied to)" if name in tied else ""
        made.problems.append(Problem(kind="missing_parameter", severity="error", tensor=name,
                                     detail=f"{name} is not in the checkpoint{also}"))  # fmt: skip
