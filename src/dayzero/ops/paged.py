"""Linears and attention over flat steps: the state an engine owns, in two implementations with one interface.

A step is one flat token axis [T]: decode sequences (one row each) first, prefill chunks after them. `CompiledState` calls
the C++ operators (`ops.cpu`), `TorchState` is plain PyTorch: it runs on any device, and is what the other is tested
against. Pools are [blocks, block_tokens, kv_heads, head_dim] per layer and are written in place.

Legend: T rows of the step, S sequences, H query heads, G key/value heads, D head size, C context tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import torch
from torch.nn import functional as F

from dayzero.core.step import StepBatch


@dataclass(frozen=True, kw_only=True, slots=True)
class Visibility:
    """Which keys j a query i may see: j <= i, within `window` of it (i - j < window), in the same `chunk`. 0 = no limit."""

    window: int = 0
    chunk: int = 0


class PagedState(Protocol):
    """One engine's pools and the step in progress. Not thread-safe."""

    def set_max_rows(self, max_rows: int) -> None:
        """The most rows that will ever decode together: picks kernels for the engine's whole life."""
        ...

    def set_pool(self, layer: int, k_pool: torch.Tensor, v_pool: torch.Tensor, visibility: Visibility) -> None: ...

    def site(self, layer: int) -> torch.Tensor:
        """The handle a module keeps as a buffer: int64 [2], this state and the layer (-1 where there is none)."""
        ...

    def begin_step(self, batch: StepBatch) -> None: ...

    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, site: torch.Tensor) -> torch.Tensor: ...

    def attention(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: torch.Tensor | None,
        site: torch.Tensor,
        scale: float,
        softcap: float,
    ) -> torch.Tensor:
        """q [1, H, T, D], k and v [1, G, T, D] -> [1, T, H, Dv]. Writes k and v into the layer's pool first."""
        ...

    def close(self) -> None: ...


class CompiledState:
    """The C++ operators on the CPU. `dayzero.ops.cpu.load()` must have succeeded."""

    def __init__(self) -> None:
        self.handle: int = torch.ops.dayzero.create_state()

    def set_max_rows(self, max_rows: int) -> None:
        torch.ops.dayzero.set_max_rows(self.handle, max_rows)

    def set_pool(self, layer: int, k_pool: torch.Tensor, v_pool: torch.Tensor, visibility: Visibility) -> None:
        block_tokens = k_pool.shape[1]
        torch.ops.dayzero.set_pool(self.handle, layer, k_pool, v_pool, block_tokens, visibility.window, visibility.chunk)

    def site(self, layer: int) -> torch.Tensor:
        return torch.tensor([self.handle, layer])

    def begin_step(self, batch: StepBatch) -> None:
        width = max((len(table) for table in batch.block_tables), default=0)
        tables = torch.tensor([[*table, *[0] * (width - len(table))] for table in batch.block_tables], dtype=torch.int32)
        offsets = torch.tensor(batch.query_offsets, dtype=torch.int32)
        contexts = torch.tensor(batch.context_lens, dtype=torch.int32)
        torch.ops.dayzero.begin_step(self.handle, offsets, contexts, tables, batch.num_decode)

    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, site: torch.Tensor) -> torch.Tensor:
        return torch.ops.dayzero.linear_at(x, weight, bias, site)

    def attention(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: torch.Tensor | None,
        site: torch.Tensor,
        scale: float,
        softcap: float,
    ) -> torch.Tensor:
        return torch.ops.dayzero.paged_attention_at(q, k, v, sinks, site, scale, softcap)

    def close(self) -> None:
        if self.handle >= 0:
            torch.ops.dayzero.destroy_state(self.handle)
        self.handle = -1


class TorchState:
    """Plain PyTorch on any device: the fallback where no C++ compiler is, and on accelerators without bound kernels."""

    def __init__(self) -> None:
        self._pools: dict[int, tuple[torch.Tensor, torch.Tensor, Visibility]] = {}

    def set_max_rows(self, max_rows: int) -> None:
        """Nothing to choose: the library has one kernel."""

    def set_pool(self, layer: int, k_pool: torch.Tensor, v_pool: torch.Tensor, visibility: Visibility) -> None:
        self._pools[layer] = (k_pool, v_pool, visibility)

    def site(self, layer: int) -> torch.Tensor:
        return torch.tensor([-1, layer])

    def begin_step(self, batch: StepBatch) -> None:
        self._batch = batch
        self._rows: dict[torch.device, list[torch.Tensor]] = {}

    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, site: torch.Tensor) -> torch.Tensor:
        """Decode rows and each prefill chunk by themselves, so that a chunk's numbers do not depend on its company."""
        offsets, decode = self._batch.query_offsets, self._batch.num_decode
        bounds = [0, *offsets[decode:]] if decode else list(offsets)
        if len(bounds) <= 2 or x.dim() != 3 or x.shape[1] != offsets[-1]:
            return F.linear(x, weight, bias)
        parts = [F.linear(x[:, first:last], weight, bias) for first, last in pairwise(bounds) if last > first]
        return torch.cat(parts, 1)

    def attention(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: torch.Tensor | None,
        site: torch.Tensor,
        scale: float,
        softcap: float,
    ) -> torch.Tensor:
        batch, (k_pool, v_pool, visibility) = self._batch, self._pools[int(site[1])]
        block_tokens, outputs = k_pool.shape[1], []
        slots = self._slots(q.device, block_tokens)
        for index in range(batch.num_sequences):
            first, last = batch.query_offsets[index], batch.query_offsets[index + 1]
            rows, context = slots[index], batch.context_lens[index]
            k_flat, v_flat = k_pool.flatten(0, 1), v_pool.flatten(0, 1)  # views [slots, G, D]
            new = rows[context - (last - first) :]
            k_flat[new] = k[0, :, first:last].transpose(0, 1).to(k_flat.dtype)
            v_flat[new] = v[0, :, first:last].transpose(0, 1).to(v_flat.dtype)
            k_seq, v_seq = k_flat[rows].transpose(0, 1), v_flat[rows].transpose(0, 1)  # [G, C, D]
            outputs.append(attend(q[0, :, first:last], k_seq, v_seq, sinks, scale, softcap, visibility))
        return torch.cat(outputs, 1).transpose(0, 1)[None].contiguous()

    def close(self) -> None:
        self._pools.clear()

    def _slots(self, device: torch.device, block_tokens: int) -> list[torch.Tensor]:
        """Pool rows of every sequence's context, once a step."""
        if device not in self._rows:
            inside = torch.arange(block_tokens, device=device)
            tables = [torch.tensor(table, dtype=torch.long, device=device) for table in self._batch.block_tables]
            rows = [(table[:, None] * block_tokens + inside).flatten() for table in tables]
            self._rows[device] = [row[:length] for row, length in zip(rows, self._batch.context_lens, strict=True)]
        return self._rows[device]


def visible(num_queries: int, num_keys: int, visibility: Visibility, device: torch.device) -> torch.Tensor:
    """Boolean [num_queries, num_keys]; the queries are the last positions of the context."""
    query = torch.arange(num_keys - num_queries, num_keys, device=device)[:, None]
    key = torch.arange(num_keys, device=device)[None]
    seen = key <= query
    if visibility.window:
        seen &= key > query - visibility.window
    if visibility.chunk:
        seen &= key // visibility.chunk == query // visibility.chunk
    return seen


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    scale: float,
    softcap: float,
    visibility: Visibility,
) -> torch.Tensor:
    """Causal attention of one sequence: q [H, N, D], k and v [G, C, D] -> [H, N, Dv]. Softmax in float32 or wider."""
    heads, num_queries = q.shape[:2]
    groups, num_keys = k.shape[:2]
    seen = visible(num_queries, num_keys, visibility, q.device)
    if sinks is None and not softcap:
        out = F.scaled_dot_product_attention(q[None], k[None], v[None], seen, scale=scale, enable_gqa=heads != groups)
        return out[0]
    k, v = k.repeat_interleave(heads // groups, 0), v.repeat_interleave(heads // groups, 0)
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = (q.to(wide) @ k.to(wide).transpose(-1, -2)) * scale
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(~seen, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(wide).reshape(-1, 1, 1).expand(-1, num_queries, 1)], -1)
    weights = torch.softmax(scores, -1)[..., :num_keys]
    return (weights @ v.to(wide)).to(q.dtype)
