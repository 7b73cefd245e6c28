"""A small instance's forward in, everything the structure facts are measured from out: calls, attention, experts, operators.

The model is run twice, all positions shifted by `SHIFT` in the second run and every layer given the input it had in the
first, so that what depends on positions shows and nothing else.
Attention runs through the modelling file's own eager function with one-hot values, which shows the keys each query really
saw; experts are replaced by a multiple of their input, so what routers hand them is seen and nothing else of them runs.
Facts are drawn elsewhere (`structure.routing`, `structure.positions`, ...). The given model is not changed: a copy is run.
"""

from __future__ import annotations

import copy
import inspect
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from dayzero.core.errors import one_line
from dayzero.ops.observe import mask_in_full

IMPLEMENTATION = "dayzero_structure"
TOKENS = 35  # odd, shared with no size of a small instance, and crosses its windows and chunks (8 to 16) twice
SHIFT = 5
KEPT_ELEMENTS = 2**18  # nothing of a small instance that matters is larger


@dataclass(frozen=True, slots=True)
class ModuleCall:
    """The first call of a module. `at`: how many operators had been recorded when it returned."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    out: Any
    at: int


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """`seen` [queries, keys]: whether any head gave the key weight. `biased`: the mask adds more than 0 or
    "not allowed", or there is another addend with a column for each key."""

    module: str
    query: Tensor
    scale: float | None
    seen: Tensor | None
    biased: bool


@dataclass(frozen=True, slots=True)
class ExpertsCall:
    module: str
    index: Tensor
    weights: Tensor
    at: int


@dataclass(frozen=True, slots=True)
class Op:
    """One operator called directly by the forward of module `owner`. `source`: what a choice of the largest chose from."""

    owner: str
    name: str
    out: Tensor
    source: Tensor | None = None


@dataclass(slots=True)
class Watched:
    """One forward. `rotary`: (module, layer type it was asked for, ids of the tensors it returned), in order.

    `moved`: the first layer would have been given something else than in the run before: positions are added to embeddings.
    """

    calls: dict[str, ModuleCall] = field(default_factory=dict)
    attention: list[AttentionCall] = field(default_factory=list)
    experts: list[ExpertsCall] = field(default_factory=list)
    ops: list[Op] = field(default_factory=list)
    rotary: list[tuple[str, str, tuple[int, ...]]] = field(default_factory=list)
    moved: bool = False
    keep: list[Any] = field(default_factory=list)  # what ids were taken of stays alive


@dataclass(frozen=True, kw_only=True, slots=True)
class Runs:
    """`shifted` is None where the model takes no position ids or its second run took another path."""

    model: nn.Module
    first: Watched
    shifted: Watched | None
    notes: tuple[str, ...] = ()


def attention_in(watched: Watched, prefix: str) -> list[AttentionCall]:
    """Calls of attention inside a layer; those over all tokens first (a layer may also attend over a few streams)."""
    calls = [call for call in watched.attention if call.module.startswith(prefix)]
    return sorted(calls, key=lambda call: call.seen is None or call.seen.shape[0] != call.seen.shape[1])


class _Active(threading.local):
    watcher: _Watcher | None = None


_active = _Active()


def is_rotary(module: nn.Module) -> bool:
    """Whether a module keeps inverse frequencies: transformers' rotary modules do, by layer type where there are several."""
    return any(name.endswith("inv_freq") for name, _ in module.named_buffers(recurse=False))


def watch(model: nn.Module, layers: str, *, tokens: int = TOKENS) -> Runs:
    """Run a copy of a small CPU model twice. Raises what the model's forward raises."""
    subject: Any = copy.deepcopy(model)
    _make_visible(subject)
    notes = []
    subject.set_attn_implementation(IMPLEMENTATION)
    try:
        subject.set_experts_implementation(IMPLEMENTATION)
    except (ValueError, AttributeError, KeyError) as error:
        notes.append(f"experts do not go through transformers' interface ({one_line(error, 160)})")
    first = _run(subject, layers, tokens, 0)
    shifted = None
    if "position_ids" in inspect.signature(subject.forward).parameters:
        try:
            shifted = _run(subject, layers, tokens, SHIFT, replay=first)
        except Exception as error:
            notes.append(f"the forward with shifted positions failed ({one_line(error, 160)})")
        if shifted is not None and [op.name for op in shifted.ops] != [op.name for op in first.ops]:
            notes.append("the forward takes another path when positions are shifted")
            shifted = None
    else:
        notes.append("the forward takes no position ids")
    return Runs(model=subject, first=first, shifted=shifted, notes=tuple(notes))


@torch.no_grad()
def _make_visible(model: nn.Module) -> None:
    """Constant vectors hide what they do, and frequencies near zero hide that they turn: both get values that show.

    Frequencies that are zero stay zero: those dimensions are not rotated.
    """
    generator = torch.Generator().manual_seed(2)
    for vector in model.parameters():
        if vector.dim() == 1 and vector.numel() > 1 and vector.is_floating_point() and bool((vector == vector[0]).all()):
            vector.add_(0.1 * torch.randn(vector.shape, generator=generator).to(vector.dtype))
    for module in model.modules():
        names = [name for name, _ in module.named_buffers(recurse=False) if name.endswith("inv_freq")]
        for number, name in enumerate(names):
            # Another start for each table, so that what turned tells which one turned it; multiples of pi would hide it.
            start, buffer = 0.5 + 0.03 * number, module.get_buffer(name)
            spread = start + torch.arange(buffer.numel(), dtype=buffer.dtype) / buffer.numel()
            buffer.copy_(torch.where(buffer == 0, buffer, spread.reshape(buffer.shape)))


def _run(model: Any, layers: str, tokens: int, shift: int, *, replay: Watched | None = None) -> Watched:
    generator = torch.Generator().manual_seed(0)
    vocabulary = model.get_input_embeddings().weight.shape[0]
    ids = torch.randint(min(3, vocabulary - 1), max(min(vocabulary, 120), 4), (1, tokens), generator=generator)
    extra: dict[str, Any] = {}
    if "position_ids" in inspect.signature(model.forward).parameters:
        extra["position_ids"] = torch.arange(tokens)[None] + shift
    watcher = _Watcher(model, layers)
    handles = _replayed(model.get_submodule(layers), layers, replay, watcher.seen) if replay else []
    handles += [module.register_forward_pre_hook(watcher.enter, with_kwargs=True) for module in watcher.names]
    handles += [module.register_forward_hook(watcher.leave, with_kwargs=True) for module in watcher.names]
    before, _active.watcher = _active.watcher, watcher
    try:
        with torch.no_grad(), watcher:
            model(input_ids=ids, use_cache=False, **extra)
    finally:
        _active.watcher = before
        for handle in handles:
            handle.remove()
    return watcher.seen


def _replayed(stack: nn.Module, layers: str, before: Watched, seen: Watched) -> list[Any]:
    """Hooks that give each layer, at its first call, the first tensor that it was given before."""
    done: set[str] = set()

    def replace(name: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
            if name in done or name not in before.calls:
                return None
            call = before.calls[name]
            key = next((key for key, value in kwargs.items() if isinstance(value, Tensor) and value.is_floating_point()), None)
            if args and isinstance(args[0], Tensor):
                old, new = call.args[0], args[0]
                given: tuple[Any, Any] = (old, *args[1:]), kwargs
            elif key is not None:
                old, new = call.kwargs[key], kwargs[key]
                given = args, {**kwargs, key: old}
            else:
                return None
            seen.moved |= not done and float((old - new).abs().max()) > 1e-3 * float(old.abs().max())
            done.add(name)
            return given

        return hook

    return [
        module.register_forward_pre_hook(replace(f"{layers}.{name}"), with_kwargs=True)
        for name, module in stack.named_children()
    ]


class _Watcher(TorchDispatchMode):
    def __init__(self, model: nn.Module, layers: str) -> None:
        super().__init__()
        self.names: dict[nn.Module, str] = {}
        for name, module in model.named_modules():
            self.names.setdefault(module, name)
        self.inside = layers + "."
        self.seen, self.stack, self.hidden = Watched(), [""], 0

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.stack.append(self.names[module])

    def leave(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        name = self.stack.pop()
        if name not in self.seen.calls:
            self.seen.calls[name] = ModuleCall(args, kwargs, out, len(self.seen.ops))
        if is_rotary(module):
            words = [value for value in (*args, *kwargs.values()) if isinstance(value, str)]
            self.seen.rotary.append((name, words[0] if words else "", tuple(id(item) for item in tensors_in(out))))
            self.seen.keep.append(out)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        owner = self.stack[-1]
        if self.hidden or not (owner + ".").startswith(self.inside):
            return out
        name = func.overloadpacket.__name__
        if name == "topk":
            self.seen.ops.append(Op(owner, name, out[1].clone(), args[0].clone()))
        elif isinstance(out, Tensor) and out.is_floating_point() and out.numel() <= KEPT_ELEMENTS:
            self.seen.ops.append(Op(owner, name, out.detach().clone()))
        return out


def tensors_in(value: Any) -> list[Tensor]:
    """Tensors in a value and in the tuples, lists and dicts it is made of."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [tensor for item in value for tensor in tensors_in(item)] if isinstance(value, (list, tuple)) else []


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """The function behind transformers' attention interface while a model is watched."""
    watcher = _active.watcher
    assert watcher is not None, f"{IMPLEMENTATION} is for watched forwards only"
    scale = kwargs.get("scaling")
    scale = float(scale) if scale is not None else None
    watcher.hidden += 1
    try:
        weights = _weights(module, query, key, attention_mask, kwargs)
        groups = weights.shape[1] // value.shape[1]
        out = (weights.to(value.dtype) @ value.repeat_interleave(groups, dim=1)).transpose(1, 2).contiguous()
        seen = weights[0].abs().amax(0) > 0
        extra = [item for item in kwargs.values() if isinstance(item, Tensor) and item.is_floating_point()]
        biased = _biased(attention_mask) or any(item.dim() >= 3 and item.shape[-1] == key.shape[2] for item in extra)
        watcher.seen.attention.append(AttentionCall(watcher.names.get(module, ""), query.detach().clone(), scale, seen, biased))
    finally:
        watcher.hidden -= 1
    return out, None


def _weights(module: nn.Module, query: Tensor, key: Tensor, attention_mask: Tensor | None, kwargs: dict[str, Any]) -> Tensor:
    """[B, heads, queries, keys] by the modelling file's eager function: with one-hot values its output is its weights."""
    num_keys = key.shape[2]
    if (indices := kwargs.get("indices")) is not None and attention_mask is not None:
        # A class that picks keys leaves masking them to implementations it does not know.
        allowed = torch.zeros(query.shape[0], query.shape[2], num_keys, dtype=torch.bool).scatter(-1, indices.long(), True)
        attention_mask = attention_mask.masked_fill(~allowed[:, None], torch.finfo(query.dtype).min)
    one_hot = torch.eye(num_keys, dtype=query.dtype).expand(*key.shape[:2], num_keys, num_keys)
    eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    if eager is not None:
        out = eager(module, query, key, one_hot, attention_mask, **kwargs)[0]
        if out.shape == (query.shape[0], query.shape[2], query.shape[1], num_keys):
            return out.transpose(1, 2)
    scores = query @ key.repeat_interleave(query.shape[1] // key.shape[1], dim=1).transpose(2, 3)
    scores = scores * (kwargs.get("scaling") or query.shape[-1] ** -0.5)
    return F.softmax(scores if attention_mask is None else scores + attention_mask, dim=-1)


def _biased(mask: Tensor | None) -> bool:
    if mask is None or not mask.is_floating_point():
        return False
    return bool(((mask != 0) & (mask > torch.finfo(mask.dtype).min / 4)).any())


def _experts(module: nn.Module, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """The function behind transformers' experts interface while a model is watched."""
    watcher = _active.watcher
    assert watcher is not None, f"{IMPLEMENTATION} is for watched forwards only"
    given: Sequence[Any] = [*args, *kwargs.values()]
    index = next((item for item in given if isinstance(item, Tensor) and not item.is_floating_point()), None)
    weights = next((item for item in given if isinstance(item, Tensor) and item.is_floating_point()), None)
    if index is not None and weights is not None:
        call = ExpertsCall(watcher.names.get(module, ""), index.clone(), weights.clone(), len(watcher.seen.ops))
        watcher.seen.experts.append(call)
    return hidden_states * 0.5


ALL_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, _attention)  # once per process: importing this module
ALL_MASK_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, mask_in_full)
ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, _experts)
