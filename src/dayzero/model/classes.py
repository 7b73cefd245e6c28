"""A config in, the transformers class that defines it out; and where the decoder layers of an instance are.

Structure comes from transformers alone: the class is looked up in its own mappings by `model_type`, the layer stack and
the kinds of layers in it are read off an instance. Nothing here knows an architecture by name, and no weights are read.
"""

from __future__ import annotations

import copy
import importlib
import itertools
import re
from collections.abc import Hashable
from typing import Any

import torch
import transformers
from torch import nn
from transformers.configuration_utils import PreTrainedConfig
from transformers.models.auto import modeling_auto

from dayzero.core.errors import DayZeroError

# In this order: a text-only class is preferred to the multimodal wrapper of the same type.
CLASS_MAPPINGS = (
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
    "MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES",
)

# Stacks beside the text decoder: encoders of other media, and draft layers for speculation.
SIDE_STACKS = re.compile(r"vision|visual|audio|encoder|patcher|mtp|projector")

# Numbers a layer keeps of its own place in the stack: they differ between layers of one kind.
PLACE_ATTRIBUTE = re.compile(r"idx|^(layer_id|index|training)$")


def causal_class(config: PreTrainedConfig) -> type | None:
    """The class which generates text for this config's `model_type`, or None where transformers has none."""
    for mapping in CLASS_MAPPINGS:
        name = getattr(modeling_auto, mapping).get(config.model_type)
        if name is not None:
            return getattr(transformers, name[0] if isinstance(name, (tuple, list)) else name)
    # The text part of a composite model is in no mapping: its class stands in the modelling file beside the config's.
    module_name = type(config).__module__.replace(".configuration_", ".modeling_")
    module = importlib.import_module(module_name) if module_name.startswith("transformers.models.") else None
    for name, candidate in vars(module).items() if module else ():
        if name.endswith("ForCausalLM") and getattr(candidate, "config_class", None) is type(config):
            return candidate
    return None


def model_class(config: PreTrainedConfig) -> type:
    """As `causal_class`, but a config without a class is an error for the user."""
    found = causal_class(config)
    if found is None:
        raise DayZeroError(
            what="no model class for this config",
            got=f"model_type {config.model_type!r} ({type(config).__name__})",
            want="a type in transformers' causal, image-text-to-text or multimodal mappings",
            fix=f"install a transformers newer than {transformers.__version__}, or allow the release's own code",
        )
    return found


def class_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """The part of `config` its model class takes: some text-only classes take the text part of a composite config."""
    wanted = getattr(model_class(config), "config_class", None)
    if wanted is None or isinstance(config, wanted):
        return config
    for name in getattr(config, "sub_configs", None) or {}:
        if isinstance(getattr(config, name, None), wanted):
            return getattr(config, name)
    return config


def text_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """The part of `config` which describes the text decoder (the config itself for text-only models)."""
    return config.get_text_config(decoder=True)


def build_on_meta(config: PreTrainedConfig, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    """An instance without storage: a trillion parameters take seconds and a few hundred MB."""
    with torch.device("meta"):
        return build_model(config, dtype)


def build_model(config: PreTrainedConfig, dtype: torch.dtype) -> nn.Module:
    """An instance in evaluation mode with transformers' initial weights, on the current default device."""
    cls: Any = model_class(config)
    # A copy, because transformers writes the dtype and the chosen attention into the config it is given.
    return cls._from_config(copy.deepcopy(class_config(config)), dtype=dtype).eval()


def find_layers(model: nn.Module) -> tuple[str, nn.ModuleList]:
    """Qualified name and list of the text decoder's layers.

    Of the outermost module lists, the one as long as the config's layer count, else the longest.
    Raises DayZeroError where the model has no list of layers at all.
    """
    lists = [(n, m) for n, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m) and "experts" not in n]
    outermost = [(n, m) for n, m in lists if not any(n.startswith(outer + ".") for outer, _ in lists)]
    # A text decoder may call its own stack an encoder, when there is no other.
    stacks = [(n, m) for n, m in outermost if not SIDE_STACKS.search(n)] or outermost
    if not stacks:
        raise DayZeroError(
            what="no decoder layers found",
            got=type(model).__name__,
            want="a torch.nn.ModuleList of layers",
            fix="this architecture can only run as a whole (one sequence, native cache)",
        )
    config: Any = model.config
    num_layers = getattr(text_config(config), "num_hidden_layers", None)
    return max(stacks, key=lambda stack: (len(stack[1]) == num_layers, len(stack[1])))


def layer_kind_signatures(model: nn.Module, config: PreTrainedConfig) -> list[tuple[Hashable, ...]]:
    """One hashable per decoder layer; equal means the same modules, switches and per-layer settings.

    Sizes are left out on purpose: two layers which differ in a width alone are one kind of structure.
    """
    _, layers = find_layers(model)
    signatures = [_module_signature(layer) for layer in layers]
    for name, values in per_layer_fields(text_config(config), len(layers)).items():
        signatures = [(*signature, (name, str(value))) for signature, value in zip(signatures, values, strict=True)]
    return signatures


def per_layer_fields(config: PreTrainedConfig, num_layers: int) -> dict[str, list]:
    """List fields of `config` with one entry per layer that switch structure (few distinct values, no index lists)."""
    fields = {}
    for name, value in vars(config).items():
        if isinstance(value, (list, tuple)) and len(value) == num_layers > 1 and not name.startswith("_"):
            if (
                "token_id" in name
                or is_index_list(value)
                or any(isinstance(entry, (dict, PreTrainedConfig)) for entry in value)
            ):
                continue
            # A schedule of sizes has a new value in most layers; a switch has a handful in all.
            if len({str(entry) for entry in value}) <= 4:
                fields[name] = list(value)
    return fields


def is_index_list(value: object) -> bool:
    """Whether `value` looks like a list of layer indices: strictly rising integers, more than two of them."""
    if not isinstance(value, (list, tuple)) or len(value) < 3:
        return False
    if not all(isinstance(entry, int) and not isinstance(entry, bool) for entry in value):
        return False
    return all(after > before for before, after in itertools.pairwise(value))


def _module_signature(layer: nn.Module) -> tuple:
    signature = []
    for name, module in layer.named_modules():
        switches = tuple(
            sorted(
                (key, str(value))
                for key, value in vars(module).items()
                if not key.startswith("_")
                and not PLACE_ATTRIBUTE.search(key)
                and (value is None or isinstance(value, (bool, str)))
            )
        )
        parameters = tuple(parameter for parameter, _ in module.named_parameters(recurse=False))
        signature.append((name, type(module).__name__, switches, parameters))
    return tuple(signature)
