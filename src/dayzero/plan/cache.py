"""Bytes of cache per rank and layer, by cache kind: what divides, what is replicated, what is constant.

Key/value heads are divided by TP and repeated when TP exceeds them; latents, indexer and compressed rows are the same on
every TP rank; states hold one entry a sequence. CP divides what grows with the context. Growing caches come in whole
blocks. Deliberately not done: an allocator's page unit for hybrids.
"""

from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate

from dayzero.core.errors import DayZeroError
from dayzero.core.model import CacheSpec, ModelDescription
from dayzero.core.plan import Layout
from dayzero.core.sharding import even_split, unit_range
from dayzero.core.units import DTYPE_BITS


@dataclass(frozen=True, slots=True)
class KindCache:
    """One cache tensor of one layer on one rank. `bits_per_token` is its slope while it grows (0 for states)."""

    kind: str
    spec_name: str
    dtype: str
    bits_per_token: Fraction
    sequence_bits: Fraction
    window_tokens: int | None
    local_share: Fraction  # of the unsharded tensor's heads
    note: str

    def slope(self) -> Fraction:
        """Bytes per token beyond every window."""
        return self.bits_per_token / 8 if self.window_tokens is None else Fraction(0)


class Cache:
    """Cache prices of one model at one cache dtype and block size."""

    def __init__(self, model: ModelDescription, cache_dtype: str | None, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self.cache_dtype = cache_dtype
        self.kinds = model.layer_kinds
        self.kind_of_layer = [0] * model.dimensions.num_layers
        for index, kind in enumerate(model.layer_kinds):
            for layer in kind.layers:
                self.kind_of_layer[layer] = index
        self._parts: dict[tuple[int, int, int], list[list[KindCache]]] = {}
        self._slopes: dict[tuple[int, int, int], list[Fraction]] = {}
        self._constants: dict[tuple[int, int, int], list[int]] = {}
        self._sequences: dict[tuple[int, int, int, int], list[int]] = {}

    def grows(self) -> bool:
        """Whether any cache grows with the context for ever."""
        return any(spec.elements_per_token and spec.window_tokens is None for kind in self.kinds for spec in kind.cache)

    def parts(self, layout: Layout, tp_index: int = 0) -> list[list[KindCache]]:
        """Per layer kind, what one layer of it keeps on a rank. Raises DayZeroError when heads cannot be divided."""
        key = (layout.tp, layout.cp, tp_index)
        if key not in self._parts:
            self._parts[key] = [[self._part(spec, layout, tp_index) for spec in kind.cache] for kind in self.kinds]
        return self._parts[key]

    def _part(self, spec: CacheSpec, layout: Layout, tp_index: int) -> KindCache:
        dtype = self.cache_dtype if self.cache_dtype and spec.elements_per_token else spec.dtype
        bits = DTYPE_BITS[dtype]
        heads = _local_heads(spec, layout.tp, tp_index)
        share = Fraction(heads, spec.heads) if spec.heads else Fraction(1)
        per_token = share * spec.elements_per_token * bits / spec.tokens_per_entry / layout.cp
        note = f"{heads} of {spec.heads} heads" if spec.heads else "replicated on each TP rank" if layout.tp > 1 else "whole"
        note += f", context over cp={layout.cp}" if layout.cp > 1 else ""
        return KindCache(spec.kind, spec.name, dtype, per_token, share * spec.elements_per_sequence * bits,
                         spec.window_tokens, share, note)  # fmt: skip

    def slope(self, layout: Layout, first: int, stop: int, tp_index: int = 0) -> Fraction:
        """Bytes per token beyond every window, of layers `first` to `stop`."""
        key = (layout.tp, layout.cp, tp_index)
        if key not in self._slopes:
            by_kind = [sum((part.slope() for part in parts), Fraction(0)) for parts in self.parts(layout, tp_index)]
            self._slopes[key] = [Fraction(0), *accumulate(by_kind[index] for index in self.kind_of_layer)]
        return self._slopes[key][stop] - self._slopes[key][first]

    def sequence_per_layer(self, layout: Layout, num_tokens: int, tp_index: int = 0) -> list[int]:
        """Bytes of one sequence of `num_tokens`, per layer, in whole blocks."""
        key = (layout.tp, layout.cp, tp_index, num_tokens)
        if key not in self._sequences:
            by_kind = [sum(self.part_bytes(part, num_tokens, layout.cp) for part in parts)
                       for parts in self.parts(layout, tp_index)]  # fmt: skip
            self._sequences[key] = [by_kind[index] for index in self.kind_of_layer]
        return self._sequences[key]

    def part_bytes(self, part: KindCache, num_tokens: int, cp: int) -> int:
        """Bytes of one cache tensor of one layer for one sequence."""
        kept = self.kept_tokens(num_tokens, part.window_tokens)
        # `bits_per_token` is already divided by cp; whole blocks are dealt to the ranks, the fullest gets one more.
        blocks = -(-(kept // self.block_tokens) // cp) * cp
        bits = blocks * self.block_tokens * part.bits_per_token + part.sequence_bits
        return -(-bits.numerator // (bits.denominator * 8))

    def kept_tokens(self, num_tokens: int, window: int | None) -> int:
        """Tokens held, in whole blocks. A window that has begun to slide touches one block more than it fills."""
        kept = num_tokens if window is None else min(num_tokens, window)
        whole = -(-kept // self.block_tokens) * self.block_tokens
        return whole + (self.block_tokens if window is not None and num_tokens > window else 0)

    def constant_per_layer(self, layout: Layout, tp_index: int = 0) -> list[int]:
        """The part of a long sequence that does not grow (full windows, states), per layer."""
        key = (layout.tp, layout.cp, tp_index)
        if key not in self._constants:
            by_kind = [sum(self._constant(part, layout.cp) for part in parts) for parts in self.parts(layout, tp_index)]
            self._constants[key] = [by_kind[index] for index in self.kind_of_layer]
        return self._constants[key]

    def _constant(self, part: KindCache, cp: int) -> int:
        if part.window_tokens is not None:
            return self.part_bytes(part, part.window_tokens + 1, cp)
        return self.part_bytes(part, 0, cp)


def _local_heads(spec: CacheSpec, tp: int, index: int) -> int:
    """Heads of one cache tensor on one rank (0: not divided by heads)."""
    if not spec.heads:
        return 0
    if spec.elements_per_token or spec.heads % tp == 0 or tp % spec.heads == 0:
        first, stop = unit_range(spec.heads, tp, index, replicable=True, name=f"the {spec.kind} cache {spec.name}")
        return stop - first
    if tp > spec.heads:
        raise DayZeroError(f"the {spec.kind} cache {spec.name} cannot be cut {tp} ways", got=f"{spec.heads} heads",
                           want="a degree that divides the heads or a multiple of them", fix="choose another --tp")  # fmt: skip
    first, stop = even_split(spec.heads, tp, index)
    return stop - first
