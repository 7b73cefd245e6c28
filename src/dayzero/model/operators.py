"""A release and a back end in, the `OperatorMap` out: the `map` stage from the outside.

Builds the model on meta for its sizes and a shrunken instance in the same dtype for its behaviour, and says which module of one
stands for which of the other. The mapping itself is `ops.mapping`. No weights are read.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
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
from dayzero.model.resolve import Resolved, one_line, resolve
from dayzero.model.shrink import ShrunkConfig, build_shrunken
from dayzero.ops.conformance import Device
from dayzero.ops.mapping import ModelPair, map_operators

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
    pair = pair_models(full, small, shrunk, config)
    try:
        return map_operators(
            pair,
            backend,
            model=model.name,
            dtype=model.dtype,
            layer_kinds=model.layer_kinds,
            context_tokens=context_tokens,
        )
    except DayZeroError:
        raise
    except Exception as error:  # the model's own forward: its class may not run on meta, whatever it raises
        raise DayZeroError(
            f"the operators of {model.name} cannot be observed",
            got=one_line(error),
            want="a class whose forward runs without values",
            fix="report the model type; without a map the engine still proves itself at load",
        ) from error


def pair_models(full: nn.Module, small: nn.Module, shrunk: ShrunkConfig, config: PreTrainedConfig) -> ModelPair:
    """Layers of one kind stand for each other; inside a layer, and outside of all, names are the same.

    Members of longer lists (experts kept as modules) are represented by the first that the small instance has.
    """
    layers, stack = find_layers(full)
    small_layers, small_stack = find_layers(small)
    signatures = layer_kind_signatures(full, config)
    stand_in: dict[int, int] = {}
    small_index = {layer: place for place, layer in reversed(list(enumerate(shrunk.layer_indices))) if place < len(small_stack)}
    for layer in range(len(stack)):
        alike = [place for index, place in small_index.items() if index < len(signatures) and signatures[index] == signatures[layer]]
        stand_in[layer] = min(alike, default=min(layer, len(small_stack) - 1))
    known, pairs = {name for name, _ in small.named_modules()}, {}
    for name, _ in full.named_modules():
        found = re.match(re.escape(layers) + r"\.(\d+)(.*)", name)
        head, rest = (f"{small_layers}.{stand_in[int(found.group(1))]}", found.group(2)) if found else ("", name)
        for wanted in (head + rest, head + re.sub(r"(?<=\.)\d+(?=\.|$)", "0", rest)):
            if wanted in known and name not in pairs:
                pairs[name] = wanted
    return ModelPair(full=full, small=small, stand_in=pairs, layers=layers)
