"""A release and a back end in, the `OperatorMap` out: the `map` stage from the outside.

Builds the model on meta for its sizes and a shrunken instance in the same dtype for its behaviour, and says which module of one
stands for which of the other. The mapping itself is `ops.mapping`. No weights are read.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.configuration_utils import PreTrainedConfig

from dayzero.core.errors import DayZeroError
from dayzero.core.model import ModelDescription
from dayzero.core.operators import OperatorMap
from dayzero.model.classes import find_layers, layer_kind_signatures
from dayzero.model.release import open_release
from dayzero.model.resolve import Resolved, resolve
from dayzero.model.shrink import ShrunkConfig, build_shrunken
from dayzero.ops.conformance import Device
from dayzero.ops.mapping import ModelPair, Unobservable, map_operators

SEED = 0


def map_release(path: Path, model: ModelDescription, backend: Device, *, context_tokens: int) -> OperatorMap:
    """Every operator of a release on a device. Raises DayZeroError where the class cannot be had or cannot be run."""
    resolved = resolve(open_release(path))
    if not isinstance(resolved, Resolved) or resolved.remote_class is not None:
        raise DayZeroError(
            f"the operators of {model.name} cannot be found",
            got=resolved.detail if not isinstance(resolved, Resolved) else "code of the release itself",
            want="a model class in transformers",
            fix="install a transformers that knows this model_type",
        )
    return map_config(resolved.config, model, backend, context_tokens=context_tokens)


def map_config(
    config: PreTrainedConfig,
    model: ModelDescription,
    backend: Device,
    *,
    context_tokens: int,
    overrides: Mapping[str, Any] | None = None,
) -> OperatorMap:
    """As `map_release`, from a config. `overrides`: see `shrink_config`."""
    full = Resolved(config=config).build(getattr(torch, model.dtype))
    small, shrunk = build_shrunken(config, dtype=getattr(torch, model.dtype), seed=SEED, overrides=overrides)
    settings: dict[str, Any] = {"model": model.name, "dtype": model.dtype, "context_tokens": context_tokens}
    try:
        pair = pair_models(full, small, shrunk, config)
        return map_operators(pair, backend, layer_kinds=model.layer_kinds, **settings)
    except Unobservable as failure:
        # The forward needs values, which meta tensors lack. What runs is known from the small instance; sizes are not.
        told = (
            f"The model's forward cannot be followed without values ({failure}): sites, sizes and shares of this map are "
            "those of its shrunken instance."
        )
    kinds = [
        replace(kind, layers=tuple(place for place, layer in enumerate(shrunk.layer_indices) if layer in kind.layers))
        for kind in model.layer_kinds
    ]
    same = ModelPair(full=small, small=small, stand_in={n: n for n, _ in small.named_modules()}, layers=find_layers(small)[0])
    try:
        found = map_operators(same, backend, layer_kinds=kinds, **settings)
    except Unobservable as failure:
        raise DayZeroError(
            f"the operators of {model.name} cannot be observed",
            got=str(failure),
            want="a class whose forward runs on a shrunken instance",
            fix="report the model type: without a map nothing is known about its operators on this device",
        ) from failure
    return replace(found, fallbacks=(told, *found.fallbacks))


def pair_models(full: nn.Module, small: nn.Module, shrunk: ShrunkConfig, config: PreTrainedConfig) -> ModelPair:
    """Layers of one kind stand for each other; inside a layer, and outside of all, names are the same.

    Members of longer lists (experts kept as modules) are represented by the first that the small instance has.
    """
    layers, stack = find_layers(full)
    small_layers, small_stack = find_layers(small)
    signatures = layer_kind_signatures(full, config)
    stand_in: dict[int, int] = {}
    small_index = {layer: place for place, layer in reversed(list(enumerate(shrunk.layer_indices))) if layer < len(stack)}
    for layer in range(len(stack)):
        alike = [place for index, place in small_index.items() if signatures[index] == signatures[layer]]
        stand_in[layer] = min(alike, default=min(layer, len(small_stack) - 1))
    known, pairs = {name for name, _ in small.named_modules()}, {}
    for name, _ in full.named_modules():
        found = re.match(re.escape(layers) + r"\.(\d+)(.*)", name)
        head, rest = (f"{small_layers}.{stand_in[int(found.group(1))]}", found.group(2)) if found else ("", name)
        for wanted in (head + rest, head + re.sub(r"(?<=\.)\d+(?=\.|$)", "0", rest)):
            if wanted in known and name not in pairs:
                pairs[name] = wanted
    return ModelPair(full=full, small=small, stand_in=pairs, layers=layers)
