"""The CPU: our C++ kernels where a compiler is, torch's operators behind them.

Loading (at worst compiling) the C++ kernels waits until a kernel is asked for. Without a compiler the table is torch's
alone and a note says why.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dayzero.devices.backend import Backend, Tables, host_figures, joined
from dayzero.devices.host import instruction_set
from dayzero.ops import cpu
from dayzero.ops.library import library_table
from dayzero.ops.registry import Kernel, Table, Unsupported

BLOCK_TOKENS = 16
# What the paged kernel keeps in its pools.
PAGED_CACHES = ("full", "sliding", "chunked")


def create(device: str = "cpu") -> Backend:
    return Backend(
        name="cpu",
        device=device,
        dispatch_key="CPU",
        make_tables=make_tables,
        memory=host_figures,
        instruction_set=instruction_set(),
        collective="gloo",
    )


def make_tables() -> Tables:
    build = cpu.load()
    if not build.available:
        note = f"The compiled CPU kernels are not used: {build.reason}. torch's own operators are."
        return Tables(table=library_table(), notes=(note,))
    return Tables(table=joined(compiled_table(), library_table()))


def compiled_table() -> Table:
    """What the engine's paged tier really calls. `dayzero::rms_norm` is not among it: compiled layers fuse their norms."""
    return {
        "linear": (Kernel(name="dayzero::linear", call=_linear, binding="custom"),),
        "attention": (Kernel(name="dayzero::paged_attention", call=_attention, binding="custom"),),
    }


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.dayzero.linear(x, weight, bias, -1)  # -1: no engine's state, all rows are one segment


def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    keep: Tensor | None,
    *,
    scale: float,
    softcap: float = 0.0,
    window: int = 0,
    chunk: int = 0,
    cache: str = "full",
) -> Tensor:
    """q [B, H, T, D], k and v [B, G, C, D] -> [B, H, T, Dv] through pools, as an engine's step would do it.

    The first C - T keys are put into the pools beforehand; blocks are handed out in reverse, so that their order matters.
    """
    if keep is not None:
        raise Unsupported("the kernel has no sparse selection of keys")
    if cache not in PAGED_CACHES:
        raise Unsupported(f"the kernel pages keys and values per head, not a cache of kind {cache!r}")
    (num_sequences, _, rows, _), context = q.shape, k.shape[2]
    per_sequence = -(-context // BLOCK_TOKENS)
    tables = torch.arange(num_sequences * per_sequence, dtype=torch.int32).flip(0).reshape(num_sequences, per_sequence)
    pools = [t.new_zeros(num_sequences * per_sequence, BLOCK_TOKENS, t.shape[1], t.shape[3]) for t in (k, v)]
    positions = torch.arange(context - rows)
    for sequence in range(num_sequences):
        slots = (tables[sequence, positions // BLOCK_TOKENS].long(), positions % BLOCK_TOKENS)
        for pool, tensor in zip(pools, (k, v), strict=True):
            pool[slots] = tensor[sequence, :, : context - rows].transpose(0, 1)
    offsets = torch.arange(num_sequences + 1, dtype=torch.int32) * rows
    contexts = torch.full((num_sequences,), context, dtype=torch.int32)
    new = (q, k[:, :, context - rows :], v[:, :, context - rows :])
    flat = [t.transpose(1, 2).flatten(0, 1).transpose(0, 1)[None] for t in new]
    handle = torch.ops.dayzero.create_state()
    try:
        torch.ops.dayzero.set_pool(handle, 0, *pools, BLOCK_TOKENS, window, chunk)
        torch.ops.dayzero.begin_step(handle, offsets, contexts, tables, num_sequences if rows == 1 else 0)
        out = torch.ops.dayzero.paged_attention(*flat, sinks, handle, 0, scale, softcap)  # [1, B T, H, Dv]
    finally:
        torch.ops.dayzero.destroy_state(handle)
    return out[0].unflatten(0, (num_sequences, rows)).transpose(1, 2)
