"""Bytes of cache per rank and layer, by cache kind: what divides, what is replicated, what is constant.

Key/value heads are divided by TP and repeated when TP exceeds them; latents, indexer and compressed rows are the same on
every TP rank; states hold one entry a sequence. CP divides what grows with the context. Growing caches come in whole
blocks. Engines whose allocator has one page size for all layers are priced by the pages of a stage (`plan.pages`); others
tensor by tensor. Deliberately not done: prefix sharing, offloading.
"""

from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate

from dayzero.core.errors import DayZeroError
from dayzero.core.model import CacheSpec, ModelDescription
from dayzero.core.plan import Layout
from dayzero.core.sharding import even_split, unit_range
from dayzero.plan.engines import CacheModel, CacheRule
from dayzero.plan.formats import cache_bits, cache_dtype_name
from dayzero.plan.pages import LayerPages, Pages
from dayzero.plan.slabs import CompressedLayer, compressed_pages


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
    """Cache prices of one model at one cache dtype and block size, as an engine's `rules` store and page it.

    `chunk_tokens`: what a step may add to a window before old entries are given back. `draft_layers` keep caches as the layer
    does that caches most a token; they are on the last stage.
    """

    def __init__(self, model: ModelDescription, cache_dtype: str | None, block_tokens: int, *,
                 rules: CacheModel | None = None, chunk_tokens: int = 0, draft_layers: int = 0) -> None:  # fmt: skip
        self.block_tokens = block_tokens
        self.cache_dtype = cache_dtype_name(cache_dtype) if cache_dtype else None
        self.rules = rules or CacheModel()
        self.chunk_tokens = chunk_tokens
        self.draft_layers = draft_layers
        self.kinds = model.layer_kinds
        self.sparse = any(spec.kind == "indexer" for kind in self.kinds for spec in kind.cache)
        self.compresses = any(spec.kind == "compressed" for kind in self.kinds for spec in kind.cache)
        self.kind_of_layer = [0] * model.dimensions.num_layers
        for index, kind in enumerate(model.layer_kinds):
            for layer in kind.layers:
                self.kind_of_layer[layer] = index
        self._parts: dict[tuple[int, int, int], list[list[KindCache]]] = {}
        self._slopes: dict[tuple[int, int, int], list[Fraction]] = {}
        self._constants: dict[tuple[int, int, int], list[int]] = {}
        self._sequences: dict[tuple[int, int, int, int], list[int]] = {}
        self._pages: dict[tuple[int, int, int, int, int], Pages | None] = {}

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
        dtype, bits, stored = self._entry(spec)
        heads = _local_heads(spec, layout.tp, tp_index)
        share = Fraction(heads, spec.heads) if spec.heads else Fraction(1)
        per_token = share * spec.elements_per_token * bits / spec.tokens_per_entry / layout.cp
        note = f"{heads} of {spec.heads} heads" if spec.heads else "replicated on each TP rank" if layout.tp > 1 else "whole"
        note += f", context over cp={layout.cp}" if layout.cp > 1 else ""
        note += stored
        state = share * spec.elements_per_sequence * bits
        if self.rules.states_by_tp and spec.kind in ("state", "convolution") and not spec.heads and layout.tp > 1:
            state, note = state / layout.tp, f"1 of {layout.tp} parts"
        return KindCache(spec.kind, spec.name, dtype, per_token, state,
                         spec.window_tokens, share, note)  # fmt: skip

    def _entry(self, spec: CacheSpec) -> tuple[str, Fraction, str]:
        """Dtype, bits an element with its scales, and a note where the engine stores it its own way."""
        if not spec.elements_per_token:
            return spec.dtype, cache_bits(spec.dtype), ""
        rule = next((rule for rule in self.rules.rules if self._applies(rule, spec)), None)
        if rule is None:
            dtype = self.cache_dtype or spec.dtype
            return dtype, cache_bits(dtype), ""
        bits = cache_bits(rule.dtype) + (Fraction(rule.scale_bits, rule.scale_group) if rule.scale_group else 0)
        return rule.dtype, bits, f" ({rule.source})"

    def _applies(self, rule: CacheRule, spec: CacheSpec) -> bool:
        return (rule.kind == spec.kind and rule.name in (None, spec.name) and rule.asked in (None, self.cache_dtype)
                and rule.sparse in (None, self.sparse))  # fmt: skip

    def pages(self, layout: Layout, first: int, stop: int, tp_index: int = 0) -> Pages | None:
        """The common pages of layers `first` to `stop`; None where every tensor is paged by itself: by the engine's rule, or
        because all layers grow alike and nothing is shared."""
        if self.rules.pages != "unified":
            return None
        key = (layout.tp, layout.cp, first, stop, tp_index)
        if key not in self._pages:
            held = self.kind_of_layer[first:stop] + [self.draft_kind] * self.drafts_in(stop)
            if self.rules.compressed is not None and self.compresses:
                kept = [self._compressed_layer(index) for index in held]
                self._pages[key] = compressed_pages(kept, self.rules.compressed, layout.cp, self.chunk_tokens)
                return self._pages[key]
            layers = [self._layer_pages(layout, index, tp_index) for index in held]
            self._pages[key] = Pages.of([layer for layer in layers if layer is not None], self.block_tokens,
                                        self.rules.page_step_tokens, layout.cp, self.chunk_tokens)  # fmt: skip
        return self._pages[key]

    def _compressed_layer(self, kind_index: int) -> CompressedLayer:
        specs = self.kinds[kind_index].cache
        entry = next((spec for spec in specs if spec.kind == "compressed" and spec.elements_per_token), None)
        index = next((spec for spec in specs if spec.kind == "indexer" and spec.elements_per_token), None)
        windows = [spec.window_tokens for spec in specs if spec.window_tokens and spec.elements_per_token]
        ratio = entry.tokens_per_entry if entry is not None else 1
        overlaps = any(spec.name.startswith("overlap") for spec in specs)
        return CompressedLayer(
            entry_bits=self._entry(entry)[1] * entry.elements_per_token if entry is not None else Fraction(0),
            index_bits=self._entry(index)[1] * index.elements_per_token if index is not None else Fraction(0),
            ratio=ratio, waiting_tokens=ratio * (2 if overlaps else 1), window_tokens=max(windows, default=0),
        )  # fmt: skip

    def _layer_pages(self, layout: Layout, kind_index: int, tp_index: int) -> LayerPages | None:
        parts = self.parts(layout, tp_index)[kind_index]
        if not parts:
            return None
        windows = [part.window_tokens for part in parts if part.window_tokens is not None]
        # Compressed caches beside a window have pools of their own: the page of such a layer is not one size.
        mixed = any(part.kind == "compressed" for part in parts)
        token_bits = sum((part.bits_per_token for part in parts), Fraction(0)) * layout.cp
        return LayerPages(kind=self.kinds[kind_index].name, token_bits=token_bits,
                          state_bytes=-(-sum((p.sequence_bits for p in parts), Fraction(0)) // 8),
                          window_tokens=max(windows) if windows else None, mixed=mixed)  # fmt: skip

    def stage_sequence(self, layout: Layout, first: int, stop: int, num_tokens: int, tp_index: int = 0) -> int:
        """Bytes that one sequence of `num_tokens` takes in layers `first` to `stop`, in the engine's pages."""
        pages = self.pages(layout, first, stop, tp_index)
        if pages is not None:
            return pages.sequence_bytes(num_tokens)
        drafts = sum(self.part_bytes(part, num_tokens, layout.cp) for part in self.draft_parts(layout, stop, tp_index))
        return sum(self.sequence_per_layer(layout, num_tokens, tp_index)[first:stop]) + drafts * self.drafts_in(stop)

    def stage_slope(self, layout: Layout, first: int, stop: int, tp_index: int = 0) -> Fraction:
        """Bytes per token beyond every window, of layers `first` to `stop`, in the engine's pages."""
        pages = self.pages(layout, first, stop, tp_index)
        if pages is not None:
            return pages.slope()
        drafts = sum((part.slope() for part in self.draft_parts(layout, stop, tp_index)), Fraction(0))
        return self.slope(layout, first, stop, tp_index) + drafts * self.drafts_in(stop)

    def stage_constant(self, layout: Layout, first: int, stop: int, tp_index: int = 0) -> int:
        """What does not grow of a long sequence in layers `first` to `stop`, in the engine's pages."""
        pages = self.pages(layout, first, stop, tp_index)
        if pages is not None:
            return pages.constant_bytes()
        drafts = sum(self._constant(part, layout.cp) for part in self.draft_parts(layout, stop, tp_index))
        return sum(self.constant_per_layer(layout, tp_index)[first:stop]) + drafts * self.drafts_in(stop)

    def drafts_in(self, stop: int) -> int:
        """Draft layers of the stage that ends before layer `stop`."""
        return self.draft_layers if stop == len(self.kind_of_layer) else 0

    @property
    def draft_kind(self) -> int:
        """The layer kind whose caches a draft layer keeps."""
        sizes = [sum(spec.elements_per_token for spec in kind.cache if spec.window_tokens is None) for kind in self.kinds]
        return sizes.index(max(sizes))

    def draft_parts(self, layout: Layout, stop: int, tp_index: int = 0) -> list[KindCache]:
        return self.parts(layout, tp_index)[self.draft_kind] if self.drafts_in(stop) else []

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
