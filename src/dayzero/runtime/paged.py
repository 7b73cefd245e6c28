"""T2: mixers batched too, over paged pools. For models whose mixers all reach attention through transformers' interface
with keys and values of the step's own tokens (full, sliding or chunked layers).

The model's own forward runs once over [1, T] with a cache that passes keys and values through; the attention function
registered with transformers writes them into the pool and attends. What a layer may see (window, chunk) is learned at
load by probing the mask functions the model builds. No `forward` is patched and nothing is recorded at run time. Linears
are replaced by modules whose rows do not depend on their company.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn
from transformers.cache_utils import Cache, DynamicLayer
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from dayzero.core.step import StepBatch
from dayzero.ops.paged import PagedState, Visibility
from dayzero.runtime.host_memory import empty_pools
from dayzero.runtime.native import accepts, find_cache, names_argument
from dayzero.runtime.runner import Launched, LoadedModel

IMPLEMENTATION = "dayzero_paged"
_PROBE_TOKENS = 5
# Keyword tensors that attention may be handed and that carry nothing beyond positions the step already knows.
_HARMLESS_TENSORS = frozenset({"position_ids", "cache_position", "s_aux", "sinks"})


class NotPageable(Exception):
    """The model does not have the shape this tier needs; the reason is the message. Caught by the proof."""


@dataclass(slots=True)
class _AttentionCall:
    """What load-time learning found out about one attention module."""

    module: nn.Module
    layer: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    visibility: Visibility


@dataclass(slots=True)
class _Learning:
    calls: list[_AttentionCall] = field(default_factory=list)
    patterns: list[Visibility] = field(default_factory=list)
    cache: "PassThroughCache | None" = None


class _ThreadState(threading.local):
    learning: _Learning | None = None


_thread = _ThreadState()  # set only while a runner is being built; at run time nothing here is read for a decision


class PassThroughLayer(DynamicLayer):
    """Keeps nothing: the attention function owns the pool. To mask builders it looks like an empty layer."""

    def __init__(self, is_sliding: bool) -> None:
        super().__init__()
        self.is_sliding = is_sliding

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return key_states, value_states


class PassThroughCache(Cache):
    """`last_layer` is the layer whose keys came last: the one the attention call that follows belongs to."""

    def __init__(self, sliding: list[bool]) -> None:
        super().__init__(layers=[PassThroughLayer(is_sliding) for is_sliding in sliding])
        self.last_layer = -1
        self.last_shapes: tuple[torch.Size, ...] = ()

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        self.last_layer, self.last_shapes = layer_idx, (key_states.shape, value_states.shape)
        return key_states, value_states


class StepLinear(nn.Linear):
    """A linear layer over the rows of a step. Shares the weight of the one it replaces."""

    def __init__(self, linear: nn.Linear, state: PagedState) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        self.state = state
        self.register_buffer("site", state.site(-1), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.state.linear(x, self.weight, self.bias, self.site)


def _attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The function behind transformers' attention interface."""
    if _thread.learning is not None:
        _learn_call(_thread.learning, module, query, key, value, attention_mask, kwargs)
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None
    sinks = kwargs.get("s_aux")
    sinks = kwargs.get("sinks") if sinks is None else sinks
    scale = scaling if scaling is not None else getattr(module, "scaling", query.shape[-1] ** -0.5)
    state: PagedState = module.dayzero_state
    softcap = float(kwargs.get("softcap") or 0.0)
    return state.attention(query, key, value, sinks, module.dayzero_site, float(scale), softcap), None


def _mask(*args: Any, mask_function: Callable[..., Any] | None = None, **kwargs: Any) -> torch.Tensor | None:
    """The function behind transformers' mask interface: no mask at run time, a numbered pattern while learning."""
    learning = _thread.learning
    if learning is None:
        return None
    if mask_function is None:
        raise NotPageable("a mask is built without a mask function")
    pattern = probe_visibility(mask_function)
    if pattern not in learning.patterns:
        learning.patterns.append(pattern)
    return torch.full((1, 1, 1, 1), float(learning.patterns.index(pattern)))


ALL_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, _attention)  # once per process
ALL_MASK_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, _mask)


def probe_visibility(mask_function: Callable[..., Any]) -> Visibility:
    """What a mask function lets each query see, from the function's own answers at many positions.

    Raises NotPageable where it is not causal, optionally within one window or one chunk.
    """
    zero = torch.tensor(0)
    queries = sorted({0, 1, 2, 3, 5, 7, 8, 9, *(2**n + d for n in range(4, 18) for d in (-1, 0, 1))})
    first_seen: dict[int, int] = {}
    for query in queries:
        keys = torch.arange(query + 4)
        seen = torch.as_tensor(mask_function(zero, zero, torch.tensor(query), keys)).expand(query + 4)
        visible = seen.nonzero().flatten().tolist()
        if not visible or visible[-1] != query or len(visible) != query - visible[0] + 1:
            raise NotPageable(f"the mask of query {query} is not one run of keys that ends at it")
        first_seen[query] = visible[0]
    if not any(first_seen.values()):
        return Visibility()
    last = queries[-1]
    window = last - first_seen[last] + 1
    if all(first == max(0, query - window + 1) for query, first in first_seen.items()):
        return Visibility(window=window)
    starts = sorted(first for first in first_seen.values() if first)
    chunk = starts[0]
    if all(first == query // chunk * chunk for query, first in first_seen.items()):
        return Visibility(chunk=chunk)
    raise NotPageable(f"the mask is neither full, a window nor chunks: first keys {first_seen}")


def _learn_call(
    learning: _Learning,
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    kwargs: dict[str, Any],
) -> None:
    assert learning.cache is not None
    layer, learning.cache.last_layer = learning.cache.last_layer, -1
    if layer < 0:
        raise NotPageable("attention without keys of its own (shared or cross attention)")
    strange = [name for name, item in kwargs.items() if isinstance(item, torch.Tensor) and name not in _HARMLESS_TENSORS]
    if strange:
        raise NotPageable(f"attention takes tensors of its own: {', '.join(strange)}")
    if not (query.shape[2] == key.shape[2] == value.shape[2] == _PROBE_TOKENS):
        raise NotPageable(f"keys do not belong to the step's tokens: q {tuple(query.shape)}, k {tuple(key.shape)}")
    if kwargs.get("is_causal") is False or (mask is None and getattr(module, "is_causal", True) is False):
        raise NotPageable("attention is not causal")
    if mask is not None and tuple(mask.shape) != (1, 1, 1, 1):
        raise NotPageable(f"the model reshapes its mask to {tuple(mask.shape)}")
    visibility = learning.patterns[int(mask)] if mask is not None else Visibility(window=int(kwargs.get("sliding_window") or 0))
    if learning.cache.last_shapes != (key.shape, value.shape):
        cached, used = ([tuple(shape) for shape in pair] for pair in (learning.cache.last_shapes, (key.shape, value.shape)))
        raise NotPageable(f"keys and values are expanded after they are cached: {cached} becomes {used}")
    if any(call.module is module or call.layer == layer for call in learning.calls):
        raise NotPageable("an attention module or a cache layer is used twice in one forward")
    learning.calls.append(_AttentionCall(module, layer, key.shape[1], key.shape[3], value.shape[3], visibility))


class PagedRunner:
    """Owns the pools. The module is changed (attention implementation, linears) until `close`."""

    tier: Literal["T0", "T1", "T2"] = "T2"
    whole_prompts = False
    prefix_reuse = True

    def __init__(
        self, model: LoadedModel, state: PagedState, *, num_blocks: int, block_tokens: int, max_sequences: int
    ) -> None:
        self.model, self.state = model, state
        self._replaced: list[tuple[nn.Module, str, nn.Linear]] = []
        self._attention_modules: list[nn.Module] = []
        self.pools: list[torch.Tensor] = []
        self.before_close: Callable[[], None] = lambda: None
        module = model.module
        self._implementation = getattr(module.config, "_attn_implementation", "eager")
        self._keeps_rows = names_argument(module, "logits_to_keep")
        if not accepts(module, "position_ids"):
            raise NotPageable("the model takes no position ids")
        self._key, sliding = _native_cache(model)
        self.cache = PassThroughCache(sliding)
        try:
            self.calls = self._learn()
            state.set_max_rows(max_sequences)
            self._attach(num_blocks, block_tokens)
        except BaseException:
            self.close()
            raise

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers."""
        width = torch.empty(0, dtype=self.model.dtype).element_size()
        return self.block_tokens * width * sum(call.num_kv_heads * (call.key_dim + call.value_dim) for call in self.calls)

    def launch(self, batch: StepBatch) -> Launched:
        self.state.begin_step(batch)
        device = self.model.device
        tokens = torch.tensor([batch.tokens], device=device)
        positions = torch.tensor([batch.positions], device=device)
        rows = torch.tensor(batch.logit_rows, dtype=torch.long, device=device)
        keep = {"logits_to_keep": rows} if self._keeps_rows else {}
        output = self.model.module(input_ids=tokens, position_ids=positions, use_cache=True, **{self._key: self.cache}, **keep)
        logits = output.logits[0]
        return Launched(logits if self._keeps_rows else logits[rows])

    def close(self) -> None:
        """Give the module back as it was and free the pools."""
        self.before_close()
        for parent, name, linear in self._replaced:
            setattr(parent, name, linear)
        for module in self._attention_modules:
            del module.dayzero_state, module.dayzero_site
        self._replaced.clear()
        self._attention_modules.clear()
        self.pools.clear()
        self.model.module.set_attn_implementation(self._implementation)
        self.state.close()

    def _learn(self) -> list[_AttentionCall]:
        module, learning = self.model.module, _Learning(cache=self.cache)
        module.set_attn_implementation(IMPLEMENTATION)
        ids = torch.arange(_PROBE_TOKENS, device=self.model.device)[None] % (self.model.vocab_size - 3) + 3
        positions = torch.arange(_PROBE_TOKENS, device=self.model.device)[None]
        with _learn_mode(learning):
            module(input_ids=ids, position_ids=positions, use_cache=True, **{self._key: self.cache})
        if {call.layer for call in learning.calls} != set(range(len(self.cache.layers))):
            raise NotPageable(f"{len(learning.calls)} attention calls for {len(self.cache.layers)} cache layers")
        return learning.calls

    def _attach(self, num_blocks: int, block_tokens: int) -> None:
        self.block_tokens, device, dtype = block_tokens, self.model.device, self.model.dtype
        shapes: list[tuple[int, ...]] = [
            (num_blocks, block_tokens, call.num_kv_heads, width)
            for call in self.calls
            for width in (call.key_dim, call.value_dim)
        ]
        self.pools = empty_pools(shapes, dtype, device)
        for index, call in enumerate(self.calls):
            k_pool, v_pool = self.pools[2 * index], self.pools[2 * index + 1]
            self.state.set_pool(call.layer, k_pool, v_pool, call.visibility)
            call.module.dayzero_state = self.state
            call.module.register_buffer("dayzero_site", self.state.site(call.layer), persistent=False)
            self._attention_modules.append(call.module)
        for parent in list(self.model.module.modules()):
            for name, child in list(parent.named_children()):
                if type(child) is nn.Linear and self._is_served(child):
                    self._replaced.append((parent, name, child))
                    setattr(parent, name, StepLinear(child, self.state))

    def _is_served(self, linear: nn.Linear) -> bool:
        head = self.model.module.get_output_embeddings()
        return linear is head or any(linear is child for child in self.model.layers.modules())


def _native_cache(model: LoadedModel) -> tuple[str, list[bool]]:
    """Keyword and sliding flags of the cache the model makes itself; NotPageable unless every layer keeps just keys and
    values of each token."""
    output = model.module(input_ids=torch.tensor([[3, 4, 5]], device=model.device), use_cache=True)
    found = find_cache(output)
    if found is None or not isinstance(found[1], Cache):
        raise NotPageable("the model returns no cache of the standard kind")
    for layer in found[1].layers:
        kept = sorted(name for name, value in vars(layer).items() if isinstance(value, torch.Tensor) and value.dim() > 1)
        lists = [name for name, value in vars(layer).items() if isinstance(value, (list, dict)) and value]
        if kept != ["keys", "values"] or lists:
            raise NotPageable(f"a cache layer ({type(layer).__name__}) keeps {', '.join(kept + lists) or 'nothing'}")
    return found[0], [bool(getattr(layer, "is_sliding", False)) for layer in found[1].layers]


@contextmanager
def _learn_mode(learning: _Learning) -> Iterator[None]:
    _thread.learning = learning
    try:
        yield
    finally:
        _thread.learning = None
