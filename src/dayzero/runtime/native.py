"""T0: one sequence at a time, with the cache the model makes itself, or with none. The runner that always runs.

`cached=False` computes the whole sequence anew at every step: slow, and right for whatever the uncached forward is
right for. It is the last resort for models without a cache that can be continued, and the report says so.
"""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import nn

from dayzero.core.step import StepBatch
from dayzero.runtime.runner import Launched, LoadedModel

# Outputs that are never a cache.
_NOT_A_CACHE = frozenset({"logits", "loss", "aux_loss", "hidden_states", "attentions", "router_logits", "rope_deltas"})


def is_cache(value: Any) -> bool:
    """transformers' cache protocol, recognised by what it offers."""
    return hasattr(value, "layers") and hasattr(value, "get_seq_length")


def accepts(module: nn.Module, name: str) -> bool:
    """Whether the module's forward takes a keyword, by name or through **kwargs."""
    parameters = inspect.signature(module.forward).parameters
    return name in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def names_argument(module: nn.Module, name: str) -> bool:
    """Whether the module's forward names a keyword itself (behind **kwargs it may be ignored)."""
    return name in inspect.signature(module.forward).parameters


def find_cache(output: Any) -> tuple[str, Any] | None:
    """The field of a model output that continues a sequence, and its value."""
    items = [(name, value) for name, value in output.items() if name not in _NOT_A_CACHE and value is not None]
    return next((item for item in items if is_cache(item[1])), items[0] if items else None)


@contextmanager
def attention_implementation(module: nn.Module, name: str) -> Iterator[None]:
    """Run with another attention implementation, where the model has a choice."""
    before = getattr(module.config, "_attn_implementation", None)
    try:
        module.set_attn_implementation(name)
    except (ValueError, AttributeError):  # the model routes no attention through the interface: nothing to switch
        yield
        return
    try:
        yield
    finally:
        module.set_attn_implementation(before)


def position_arguments(module: nn.Module, positions: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"position_ids": positions[None]} if accepts(module, "position_ids") else {}


class NativeRunner:
    tier: Literal["T0", "T1", "T2"] = "T0"
    prefix_reuse = False

    def __init__(self, model: LoadedModel, *, cached: bool, whole_prompts: bool) -> None:
        self.model, self.cached = model, cached
        self.whole_prompts = whole_prompts and cached
        self._caches: dict[int, tuple[str, Any]] = {}
        self._tokens: dict[int, list[int]] = {}

    def launch(self, batch: StepBatch) -> Launched:
        for slot in batch.released_slots:
            self._drop(slot)
        wanted, rows = set(batch.logit_rows), []
        for index in range(batch.num_sequences):
            first, last = batch.query_offsets[index], batch.query_offsets[index + 1]
            logits = self._forward(batch.slots[index], batch.tokens[first:last], batch.context_lens[index])
            rows += [logits[row - first] for row in range(first, last) if row in wanted]
        return Launched(torch.stack(rows) if rows else torch.empty(0, self.model.vocab_size))

    def close(self) -> None:
        self._caches.clear()
        self._tokens.clear()

    def _drop(self, slot: int) -> None:
        self._caches.pop(slot, None)
        self._tokens.pop(slot, None)

    def _forward(self, slot: int, tokens: tuple[int, ...], context_len: int) -> torch.Tensor:
        """Logits [n, vocab] of the sequence's n new tokens."""
        start = context_len - len(tokens)
        if start == 0:
            self._drop(slot)
        module, device = self.model.module, self.model.device
        if not self.cached:
            history = self._tokens.setdefault(slot, [])
            history += tokens
            ids = torch.tensor([history], device=device)
            with attention_implementation(module, "eager"):  # the very forward that is the definition of right
                return module(input_ids=ids, use_cache=False).logits[0, start:]
        ids = torch.tensor([list(tokens)], device=device)
        positions = torch.arange(start, context_len, device=device)
        known = self._caches.get(slot)
        state = {known[0]: known[1]} if known else {}
        output = module(input_ids=ids, use_cache=True, **position_arguments(module, positions), **state)
        cache = find_cache(output)
        if cache is None:
            raise NotCacheable("the model returns no cache")
        self._caches[slot] = cache
        return output.logits[0]


class NotCacheable(Exception):
    """The model keeps no state that a later step could continue. Caught by the proof, which then recomputes."""
