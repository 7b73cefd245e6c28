"""Host memory in huge pages, for weights and caches.

Decoding reads every weight once per step. In 4 KiB pages the address translation costs as much as the reading (a third
more time on a machine with nested paging), so weights live in one private mapping that asks for huge pages. Where the
system has none to give, this is ordinary memory.
"""

import mmap
from contextlib import suppress
from math import prod

import torch
from torch import nn

_ALIGN_BYTES = 64  # a cache line: libraries pick faster code for aligned rows
_HUGE_PAGE_BYTES = 2 * 2**20


class HugePages:
    """A bump allocator over one mapping. Tensors keep the mapping alive; nothing is freed singly."""

    def __init__(self, num_bytes: int) -> None:
        size = num_bytes + 2 * _HUGE_PAGE_BYTES
        region = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):  # a kernel without huge pages: the mapping is as good as any other
                region.madvise(mmap.MADV_HUGEPAGE)
        self._bytes = torch.frombuffer(region, dtype=torch.uint8)
        self._next = -self._bytes.data_ptr() % _HUGE_PAGE_BYTES

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor of zeros (the mapping is fresh) at a cache line."""
        num_bytes = prod(shape) * dtype.itemsize
        start = self._next
        self._next = -(-(start + num_bytes) // _ALIGN_BYTES) * _ALIGN_BYTES
        assert self._next <= len(self._bytes), "the mapping is full"
        return self._bytes[start : start + num_bytes].view(dtype).view(shape)


def aligned_bytes(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGN_BYTES) * _ALIGN_BYTES


def move_parameters(module: nn.Module) -> None:
    """Give every parameter room in huge pages, without its values: for a module about to be filled."""
    unique = {parameter.data_ptr(): parameter for parameter in module.parameters() if parameter.numel()}
    pages = HugePages(sum(aligned_bytes(parameter.nbytes) for parameter in unique.values()))
    for parameter in unique.values():
        parameter.data = pages.empty(tuple(parameter.shape), parameter.dtype)


def empty_pools(shapes: list[tuple[int, ...]], dtype: torch.dtype, device: torch.device) -> list[torch.Tensor]:
    """Zeroed cache pools; on the host in one mapping."""
    if device.type != "cpu":
        return [torch.zeros(shape, dtype=dtype, device=device) for shape in shapes]
    pages = HugePages(sum(aligned_bytes(prod(shape) * dtype.itemsize) for shape in shapes))
    return [pages.empty(shape, dtype) for shape in shapes]
