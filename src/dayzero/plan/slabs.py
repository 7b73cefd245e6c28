"""Blocks for caches of compressed tokens, in an engine that gives all of a model's caches blocks of one size.

A block holds one page of every layer for its tokens: entries of few tokens, entries of many, index keys. Windows and the rows
that wait to be compressed lie in blocks of the same size, but of fewer tokens, each group of layers with a block table of its
own; so that a sequence holds, whatever its length, blocks for a whole chunk of them. Goes in: what the layers of a stage keep.
Comes out: `Pages`. Deliberately not done: engines that give each kind of cache a pool of its own.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from dayzero.plan.engines import CompressedPools
from dayzero.plan.pages import Pages, PageType


@dataclass(frozen=True, kw_only=True, slots=True)
class CompressedLayer:
    """What one layer keeps. `entry_bits`: of one entry (0: it makes none), for `ratio` tokens; `index_bits`: of its index key;
    `waiting_tokens`: rows that wait, with those of the entry before where entries overlap; `window_tokens`: 0 without one."""

    entry_bits: Fraction
    index_bits: Fraction
    ratio: int
    waiting_tokens: int
    window_tokens: int


def compressed_pages(layers: Sequence[CompressedLayer], pools: CompressedPools, cp: int, chunk: int) -> Pages | None:
    """None where a layer's number of tokens per entry is none that the engine is known to page."""
    ratios = Counter(layer.ratio for layer in layers if layer.entry_bits)
    if not ratios or any(ratio not in pools.state_block_tokens for ratio in ratios):
        return None
    entry = max(layer.entry_bits for layer in layers)
    growing: Counter[int] = Counter()
    for layer in layers:
        for bits in filter(None, (layer.entry_bits, layer.index_bits)):
            growing[_page(bits * pools.block_tokens / layer.ratio, pools)] += 1
    windows = [layer for layer in layers if layer.window_tokens]
    window_page = _page(entry * pools.window_block_tokens, pools)
    # Layers with a window are dealt into groups about as large as that of the layers with pages of the same size.
    groups = max(1, round(len(windows) / growing[window_page])) if growing[window_page] else 1
    pages = {**growing, window_page: max(growing[window_page], -(-len(windows) // groups))}
    types = [PageType(layers=sum(ratios.values()), groups=1, block_tokens=pools.block_tokens, window_tokens=None,
                      kinds=("compressed entries",))]  # fmt: skip
    if windows:
        types.append(PageType(layers=len(windows), groups=groups, block_tokens=pools.window_block_tokens,
                              window_tokens=max(layer.window_tokens for layer in windows), kinds=("windows",)))  # fmt: skip
    for ratio, waiting in sorted(_waiting(layers).items()):
        types.append(PageType(layers=ratios[ratio], groups=1, block_tokens=pools.state_block_tokens[ratio],
                              window_tokens=waiting, kinds=(f"rows of entries of {ratio}",)))  # fmt: skip
    return Pages(types=tuple(types), page_bytes=_slab(pages), group_layers=1, cp=cp, chunk_tokens=chunk)


def _page(bits: Fraction, pools: CompressedPools) -> int:
    return -(-bits // (8 * pools.align_bytes)) * pools.align_bytes


def _slab(pages: Mapping[int, int]) -> int:
    return sum(size * count for size, count in pages.items())


def _waiting(layers: Sequence[CompressedLayer]) -> dict[int, int]:
    kept = [layer for layer in layers if layer.entry_bits]
    return {ratio: max(layer.waiting_tokens for layer in kept if layer.ratio == ratio) for ratio in {one.ratio for one in kept}}
