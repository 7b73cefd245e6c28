"""A model on the meta device in, its parameters out: name, shape, dtype, layer, role and tie; and the counts over them.

Roles are read off structure: what `get_input_embeddings` and `get_output_embeddings` return, which modules take the cache,
which parameters stack experts, the class of a module; and, between those, off the plain words modules are called by. No
shard rules and no checkpoint names here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.configuration_utils import PreTrainedConfig

from dayzero.core.model import Parameter, Role

EXPERTS_WORD = re.compile(r"(^|\.)([a-z]+_)?experts(\.|$)")
ONE_EXPERT = re.compile(r"experts\.\d+(\.|$)")
SHARED_WORD = re.compile(r"shared_(expert|mlp)|share_expert|shared_experts")
TOP_K_KEYS = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "moe_topk",
    "moe_top_k",
    "top_k_experts",
    "moe_k",
    "router_top_k",
    "top_k",
    "num_selected_experts",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where things are in the model: prefix of the layer list, of the text stack, and of the towers."""

    layers: str
    text: str
    towers: tuple[str, ...]


def find_place(model: nn.Module, layers: str) -> Place:
    """Towers are the sub-models (modules with a config of their own) that neither hold the text layers nor lie in them."""
    text = layers.rpartition(".")[0]
    towers: list[str] = []
    for name, module in model.named_modules():
        if not name or not isinstance(module, PreTrainedModel) or name == text:
            continue
        holds = layers.startswith(name + ".")
        inside = any(name.startswith(tower + ".") for tower in towers) or (text and name.startswith(text + "."))
        if not holds and not inside and any(True for _ in module.parameters()):
            towers.append(name)
    return Place(layers=layers, text=text, towers=tuple(towers))


def list_parameters(
    model: nn.Module, place: Place, mixers: Mapping[int, tuple[str, ...]], *, stateful: set[int], dtype: str
) -> list[Parameter]:
    """Every parameter, and every persistent buffer, in the order of the modules.

    mixers: per layer, the modules inside it that take the cache; stateful: layers whose mixers keep a constant state.
    """
    # Parameters that transformers keeps in float32 whatever the model's dtype.
    kept: dict[str, torch.dtype] = model._get_dtype_plan(getattr(torch, dtype)) if isinstance(model, PreTrainedModel) else {}
    kept_patterns = [re.compile(pattern.replace("*", ".*")) for pattern in kept]
    modules = dict(model.named_modules())
    known: dict[int, str] = {}
    embedding, head = _weight_id(model, "get_input_embeddings"), _weight_id(model, "get_output_embeddings")
    found: list[Parameter] = []
    num_experts = count_experts(model, place)
    for name, tensor in model.named_parameters(remove_duplicate=False):
        owner, _, leaf = name.rpartition(".")
        layer = layer_of(name, place.layers)
        # A head tied to the embedding is still a head: its own module decides.
        if id(tensor) == embedding and (id(tensor) not in known or id(tensor) != head):
            role: Role = "embedding"
        elif id(tensor) == head:
            role = "head"
        else:
            inner = name.removeprefix(f"{place.layers}.{layer}.") if layer is not None else name
            in_mixer = layer is not None and any(inner.startswith(mixer + ".") for mixer in mixers.get(layer, ()))
            role = _role(name, leaf, tensor, modules[owner], place, in_mixer, layer in stateful, num_experts)
        precise = any(pattern.search(name) for pattern in kept_patterns)
        own_dtype = "float32" if precise else str(tensor.dtype).removeprefix("torch.")
        found.append(
            Parameter(
                name=name, shape=tuple(tensor.shape), dtype=own_dtype, role=role, layer=layer, tied_to=known.get(id(tensor))
            )
        )
        known.setdefault(id(tensor), name)
    saved = model.state_dict(keep_vars=True)
    for name, buffer in model.named_buffers():
        if name in saved:
            layer = layer_of(name, place.layers)
            role = _role(
                name, name.rpartition(".")[2], buffer, modules[name.rpartition(".")[0]], place, False, False, num_experts
            )
            found.append(
                Parameter(
                    name=name,
                    shape=tuple(buffer.shape),
                    dtype=str(buffer.dtype).removeprefix("torch."),
                    role=role,
                    layer=layer,
                    is_buffer=True,
                )
            )
    return _tie_direction(found, getattr(model, "all_tied_weights_keys", {}) or {})


def layer_of(name: str, layers: str) -> int | None:
    """Global layer index of a qualified name, None outside the text layers."""
    if not name.startswith(layers + "."):
        return None
    number = name[len(layers) + 1 :].partition(".")[0]
    return int(number) if number.isdigit() else None


def count_experts(model: nn.Module, place: Place) -> int:
    """Experts of a layer that have weights: stacked parameters' smallest first dimension, or the length of a module list."""
    stacked: list[int] = []
    for name, module in model.named_modules():
        if (
            not name.startswith(place.layers + ".")
            or not EXPERTS_WORD.search(name.rpartition(".")[2])
            or SHARED_WORD.search(name)
        ):
            continue
        if isinstance(module, nn.ModuleList):
            return len(module)
        stacked += [parameter.shape[0] for _, parameter in module.named_parameters(recurse=False) if parameter.dim() == 3]
        if stacked:
            break
    return min(stacked, default=0)


def experts_per_token(config: PreTrainedConfig) -> int:
    """How many routed experts a token uses; 0 when the config has no such key."""
    for key in TOP_K_KEYS:
        value = getattr(config, key, None)
        if isinstance(value, (list, tuple)) and value:
            value = max(value)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return 0


def count_parameters(parameters: Sequence[Parameter], num_experts: int, per_token: int) -> tuple[dict[str, int], int]:
    """(by role, active): tied once, without buffers; experts beyond those with weights count nothing; a token uses its share.

    Where a router also has slots without weights, a slot is chosen as often as any other, so the mean share is
    per_token / slots.
    """
    by_role: dict[str, int] = {}
    active = 0.0
    slots = max((item.shape[0] for item in parameters if item.role == "expert" and len(item.shape) == 3), default=num_experts)
    for item in parameters:
        if item.is_buffer or item.tied_to is not None:
            continue
        elements = item.num_elements
        if item.role == "expert" and num_experts:
            if len(item.shape) == 3 and item.shape[0] > num_experts:
                elements = elements // item.shape[0] * num_experts
            active += elements * min(1.0, per_token / slots) if per_token else elements
        else:
            active += elements
        by_role[item.role] = by_role.get(item.role, 0) + elements
    return by_role, round(active)


def _weight_id(model: nn.Module, getter: str) -> int | None:
    try:
        module = getattr(model, getter)()
    except (AttributeError, NotImplementedError):
        return None
    weight = getattr(module, "weight", None)
    return id(weight) if weight is not None else None


def _role(
    name: str,
    leaf: str,
    tensor: torch.Tensor,
    module: nn.Module,
    place: Place,
    in_mixer: bool,
    stateful: bool,
    num_experts: int,
) -> Role:
    """First match wins, from what is certain to what is only a word."""
    if any(name.startswith(tower + ".") for tower in place.towers):
        return "tower"
    inside_text = not place.text or name.startswith(place.text + ".")
    if isinstance(module, nn.Embedding):
        return "embedding" if inside_text else "projector"
    if not inside_text:
        return "projector" if place.towers else "other"
    words = name.rpartition(".")[0]
    if re.search(r"(^|\.)mtp", name):
        return "mtp"
    if "indexer" in words:
        return "indexer"
    if SHARED_WORD.search(words):
        return "shared_expert"
    if (
        num_experts
        and EXPERTS_WORD.search(words)
        and (ONE_EXPERT.search(words) or (tensor.dim() >= 2 and tensor.shape[0] >= num_experts))
    ):
        return "expert"
    if "norm" in type(module).__name__.lower() or "norm" in words.rpartition(".")[2] or "norm" in leaf:
        return "norm"
    if (
        num_experts
        and not in_mixer
        and re.search(r"(^|\.)(router|gate)(\.|$)", words)
        and tensor.shape[:1].numel() >= num_experts
    ):
        return "router" if tensor.dim() >= 2 else "router_bias"
    if re.search(r"correction_bias|expert_bias|router_bias", leaf):
        return "router_bias"
    if re.search(r"router", words):
        return "router"
    if "sink" in leaf:
        return "attention_sink"
    if isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d)) or "conv" in words.rpartition(".")[2]:
        return "convolution"
    if in_mixer:
        return "ssm" if stateful else "attention"
    if (
        place.layers
        and name.startswith(place.layers + ".")
        and tensor.dim() >= 1
        and re.search(r"mlp|feed_forward|ffn|mixer|fc|proj|dense", words)
    ):
        return "mlp"
    return "other"


def _tie_direction(found: list[Parameter], declared: Mapping[str, str]) -> list[Parameter]:
    """transformers says which name of a tied pair is the copy; module order decides where it says nothing."""
    turned = {item.tied_to: item.name for item in found if item.tied_to is not None and declared.get(item.tied_to) == item.name}
    if not turned:
        return found
    return [
        replace(item, tied_to=turned[item.name])
        if item.name in turned
        else replace(item, tied_to=None)
        if item.name in turned.values()
        else item
        for item in found
    ]
