"""A forward of a model watched from outside: which modules ran, what they were given, which library operators they called.

Goes in: a transformers model on any device (meta too). Comes out: an `Observation` of a prefill and two decode steps.
Attention enters through transformers' `AttentionInterface` and experts through its `ExpertsInterface`, each with a function
registered once per process; what a model was set to before is restored afterwards. Modules named opaque, attention and
experts count as one operator, so nothing inside them is recorded. While watched, attention is a plain average over what
the mask allows: shapes are right, values are not the model's.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.flop_counter import flop_registry
from transformers import cache_utils
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, eager_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from dayzero.ops.cases import Case
from dayzero.ops.definitions import Cost

IMPLEMENTATION = "dayzero_observe"
PREFILL_TOKENS = 11  # odd, and longer than the windows of a shrunken instance (8)
aten = torch.ops.aten
# These allocate or relabel without touching an element; those only move elements.
UNTOUCHED = {aten.empty, aten.empty_like, aten.new_empty, aten._unsafe_view, aten.lift_fresh, aten._local_scalar_dense}
MOVING = {
    aten.copy_, aten.clone, aten.cat, aten.stack, aten._to_copy, aten.repeat, aten.index, aten.index_select, aten.gather,
    aten.scatter, aten.scatter_, aten.index_put_, aten.zeros, aten.ones, aten.full, aten.zeros_like, aten.ones_like,
    aten.full_like, aten.arange, aten.constant_pad_nd, aten.where, aten.masked_fill, aten.roll, aten.flip, aten.tril, aten.triu,
}  # fmt: skip
CACHE_NAMES = ("cache", "past_key_values", "cache_params", "state")
SAMPLES = 3  # calls of one library operator kept for testing, of different shapes
SAMPLE_ELEMENTS = 2**18  # larger calls are not kept: the shrunken instance has none that matters


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """One call of a module: what it was given (tensors may be meta), and how many elements came out."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    out_elements: int


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionCall:
    """Shapes [B, heads, tokens, width] and settings that attention was called with."""

    query: tuple[int, ...]
    key: tuple[int, ...]
    value: tuple[int, ...]
    scale: float
    softcap: float
    window: int
    sinks: bool
    sparse: bool


@dataclass(frozen=True, slots=True)
class AtenCall:
    module: str
    op: torch._ops.OpOverload
    cost: Cost


@dataclass(slots=True)
class Step:
    """What one forward called. `modules` holds the calls of each module in order."""

    modules: dict[str, list[Call]] = field(default_factory=dict)
    attention: dict[str, list[AttentionCall]] = field(default_factory=dict)
    experts: dict[str, list[Call]] = field(default_factory=dict)
    aten: list[AtenCall] = field(default_factory=list)


@dataclass(slots=True)
class Observation:
    """`decode` are two steps, one context token apart. `samples` are calls by operator, with tensors copied before the call."""

    prefill: Step
    decode: tuple[Step, Step]
    samples: dict[torch._ops.OpOverload, list[Case]]


class _Active(threading.local):
    watcher: _Watcher | None = None


_active = _Active()


class _Watcher(TorchDispatchMode):
    def __init__(self, model: nn.Module, opaque: frozenset[str], keep_samples: bool, answer: bool) -> None:
        super().__init__()
        self.names = {module: name for name, module in model.named_modules()}
        self.opaque, self.keep_samples, self.answer = opaque, keep_samples, answer
        self.step, self.depth, self.stack = Step(), 0, [""]
        self.samples: dict[torch._ops.OpOverload, list[Case]] = {}
        self._shapes: dict[torch._ops.OpOverload, set[str]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.depth or called_from(cache_utils.__file__):
            return self._run(func, args, kwargs)
        if self.keep_samples:
            self._sample(func, args, kwargs)
        out = self._run(func, args, kwargs)
        self.step.aten.append(AtenCall(self.stack[-1], func, aten_cost(func, args, kwargs, out)))
        return out

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func is aten._local_scalar_dense.default and args[0].is_meta:
            return value_answered(args[0], self.answer)
        return func(*args, **kwargs)

    def _sample(self, func: Any, args: Any, kwargs: Any) -> None:
        kept, seen = self.samples.setdefault(func, []), self._shapes.setdefault(func, set())
        leaves = tree_flatten((args, kwargs))[0]
        shapes = str([(leaf.shape, leaf.dtype, leaf.stride()) if isinstance(leaf, Tensor) else leaf for leaf in leaves])
        size = sum(leaf.numel() for leaf in leaves if isinstance(leaf, Tensor))
        if len(kept) < SAMPLES and shapes not in seen and size <= SAMPLE_ELEMENTS:
            seen.add(shapes)
            copied = tree_map(lambda leaf: leaf.detach().clone() if isinstance(leaf, Tensor) else leaf, (args, kwargs))
            kept.append(Case(label=f"as called in {self.stack[-1] or 'the model'}", args=copied[0], settings=copied[1]))

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        name = self.names[module]
        self.stack.append(name)
        self.depth += name in self.opaque

    def leave(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        name = self.stack.pop()
        self.depth -= name in self.opaque
        elements = out.numel() if isinstance(out, Tensor) else 0
        self.step.modules.setdefault(name, []).append(Call(args=args, kwargs=kwargs, out_elements=elements))

    @contextlib.contextmanager
    def hidden(self) -> Iterator[None]:
        self.depth += 1
        try:
            yield
        finally:
            self.depth -= 1


def aten_cost(func: Any, args: Any, kwargs: Any, out: Any) -> Cost:
    """Matrix products by torch's own formulas, other arithmetic one operation per output element; views are free."""
    tensors = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, Tensor)]
    outs = [leaf for leaf in tree_flatten(out)[0] if isinstance(leaf, Tensor)]
    if is_view(func) or not outs or func.overloadpacket in UNTOUCHED:
        return Cost()
    moved = sum(tensor.numel() * tensor.element_size() for tensor in outs)
    # A lookup reads what it returns, not the table.
    lookup = func.overloadpacket in (aten.index, aten.index_select, aten.gather, aten.embedding)
    moved += moved if lookup else sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    if (formula := flop_registry.get(func.overloadpacket)) is not None:
        return Cost(flops=float(formula(*args, **kwargs, out_val=out)), bytes=moved)
    if func.overloadpacket in MOVING:
        return Cost(bytes=moved)
    return Cost(flops=float(sum(tensor.numel() for tensor in outs if tensor.is_floating_point())), bytes=moved)


def is_view(func: torch._ops.OpOverload) -> bool:
    """Whether every output shares an argument's storage: no device does any work for it."""
    returns = func._schema.returns
    return bool(returns) and all(one.alias_info is not None and not one.alias_info.is_write for one in returns)


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """The function behind transformers' attention interface while a model is watched."""
    watcher = _active.watcher
    assert watcher is not None, f"{IMPLEMENTATION} is for watched forwards only"
    sinks = next((kwargs[name] for name in ("s_aux", "sinks") if kwargs.get(name) is not None), None)
    scale = kwargs.get("scaling")
    call = AttentionCall(
        query=tuple(query.shape),
        key=tuple(key.shape),
        value=tuple(value.shape),
        scale=float(scale if scale is not None else getattr(module, "scaling", query.shape[-1] ** -0.5)),
        softcap=float(kwargs.get("softcap") or 0.0),
        window=int(kwargs.get("sliding_window") or 0),
        sinks=sinks is not None,
        sparse=kwargs.get("indices") is not None,
    )
    watcher.step.attention.setdefault(watcher.names[module], []).append(call)
    shape = (query.shape[0], query.shape[2], query.shape[1], value.shape[3])
    with watcher.hidden():
        if query.is_meta:
            return query.new_empty(shape), None
        out = F.scaled_dot_product_attention(query, key, value, scale=call.scale, enable_gqa=query.shape[1] != key.shape[1])
        return out.transpose(1, 2).contiguous(), None


def _experts(module: nn.Module, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """The function behind transformers' experts interface while a model is watched."""
    watcher = _active.watcher
    assert watcher is not None, f"{IMPLEMENTATION} is for watched forwards only"
    call = Call(args=(hidden_states, *args), kwargs=kwargs, out_elements=hidden_states.numel())
    watcher.step.experts.setdefault(watcher.names[module], []).append(call)
    with watcher.hidden():
        return hidden_states * 0.5


def mask_in_full(*args: Any, **kwargs: Any) -> Tensor:
    for name in ("allow_is_causal_skip", "allow_is_bidirectional_skip"):
        kwargs.pop(name, None)
    return eager_mask(*args, **kwargs)


ALL_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, _attention)  # once per process: importing this module
ALL_MASK_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, mask_in_full)
ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, _experts)


def observe(
    model: nn.Module, *, opaque: frozenset[str] = frozenset(), keep_samples: bool = False, prefill_tokens: int = PREFILL_TOKENS
) -> Observation:
    """Watch a prefill and two decode steps of one sequence. Raises what the model's forward raises.

    On meta, a forward that asks for a value is answered True, then (where that fails) False.
    """
    device = next(model.parameters()).device
    failure: Exception | None = None
    for answer in (True, False) if device.type == "meta" else (True,):
        try:
            return _observe(model, device, opaque, keep_samples, prefill_tokens, answer)
        except Exception as error:
            failure = failure or error
    assert failure is not None
    raise failure


def _observe(
    model: nn.Module, device: torch.device, opaque: frozenset[str], keep_samples: bool, prefill_tokens: int, answer: bool
) -> Observation:
    watcher = _Watcher(model, opaque, keep_samples, answer)
    with _interfaces(model), _hooks(model, watcher), meta_nonzero(), torch.no_grad(), watcher:
        tokens = torch.ones(1, prefill_tokens, dtype=torch.long, device=device)
        steps: list[Step] = []
        past: dict[str, Any] = {}
        for length in (prefill_tokens, 1, 1):
            watcher.step = Step()
            output = model(input_ids=tokens[:, :length], use_cache=True, **past)
            past = cache_of(model, output)
            steps.append(watcher.step)
    return Observation(prefill=steps[0], decode=(steps[1], steps[2]), samples=watcher.samples)


def cache_of(model: nn.Module, output: Any) -> dict[str, Any]:
    """The cache that a forward returned, under the name that the next one takes it by."""
    taken = inspect.signature(model.forward).parameters
    for name in CACHE_NAMES:
        if (cache := getattr(output, name, None)) is not None:
            return {"cache" if "cache" in taken else name: cache}
    return {}


def value_answered(tensor: Tensor, answer: bool) -> bool | int | float:
    """A forward asks for a value that meta tensors do not have: every question gets the same answer, in the tensor's type."""
    dtype = tensor.dtype
    return answer if dtype == torch.bool else float(answer) if dtype.is_floating_point else int(answer)


def called_from(*files: str) -> bool:
    """Whether code of one of the files, below the nearest module, calls the operator at hand; to be asked in
    `__torch_dispatch__`. How a cache is kept, for one, is the engine's business, which pages it: copying all of it at each
    step, as transformers' own does, is no operator of the model."""
    frame = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename != nn.modules.module.__file__:
        if frame.f_code.co_filename in files:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


@contextlib.contextmanager
def _interfaces(model: Any) -> Iterator[None]:
    """Attention and experts of the model through our functions, and back again whatever happens."""
    with implementations_restored(model):
        model.set_attn_implementation(IMPLEMENTATION)
        model.set_experts_implementation(IMPLEMENTATION)
        yield


@contextlib.contextmanager
def implementations_restored(model: nn.Module) -> Iterator[list[tuple[Any, str]]]:
    """Whatever is set for attention and experts inside, it is as before afterwards. Gives (config, field) of each setting."""
    configs = {id(module.config): module.config for module in model.modules() if hasattr(module, "config")}
    fields = ("_attn_implementation_internal", "_experts_implementation_internal")
    before = [(config, name, getattr(config, name)) for config in configs.values() for name in fields if hasattr(config, name)]
    try:
        yield [(config, name) for config, name, _ in before]
    finally:
        for config, name, value in before:
            setattr(config, name, value)


@contextlib.contextmanager
def _hooks(model: nn.Module, watcher: _Watcher) -> Iterator[None]:
    handles: list[Any] = []
    before: _Watcher | None = _active.watcher
    enter: Callable[..., None] = watcher.enter
    leave: Callable[..., None] = watcher.leave
    try:
        for module in watcher.names:
            handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
            handles.append(module.register_forward_hook(leave, with_kwargs=True))
        _active.watcher = watcher
        yield
    finally:
        _active.watcher = before
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def meta_nonzero() -> Iterator[None]:
    """On meta, nonzero finds every element, so that its shape is known."""
    from torch.fx.experimental import _config as settings

    before = settings.meta_nonzero_assume_all_nonzero
    settings.meta_nonzero_assume_all_nonzero = True
    try:
        yield
    finally:
        settings.meta_nonzero_assume_all_nonzero = before
