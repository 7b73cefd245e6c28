"""Pages of one size for layers that keep different things: what hybrids really take in an engine with one block pool.

Layers that keep the same are a type; every type is dealt into groups of as many layers as the rarest type has (of the most
frequent one's, where both are nearly the same), the last group padded. A group has a block table of its own, and a block is
one page for each layer of a group. An attention page holds as many tokens as make it no smaller than a state, which is padded
to it. Rule: vLLM, v1/core/kv_cache_utils.py and the block sizes of its hybrid models. Deliberately not done: caches of
compressed tokens (`slabs`).
"""

from collections import Counter
from dataclasses import dataclass
from fractions import Fraction

# Beyond this ratio of the most to the least frequent type, groups take the size of the least frequent one.
NEARLY_EQUAL = Fraction(5, 4)


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerPages:
    """What one layer keeps: bits a token (for ever, or for `window_tokens`) or a state of constant size."""

    kind: str
    token_bits: Fraction
    state_bytes: int
    window_tokens: int | None = None
    mixed: bool = False

    @property
    def holds(self) -> tuple[Fraction, int, int | None]:
        return self.token_bits, self.state_bytes, self.window_tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class PageType:
    """Layers that keep the same, in `groups` groups. `block_tokens` 0: a state, one page a sequence."""

    layers: int
    groups: int
    block_tokens: int
    window_tokens: int | None
    kinds: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Pages:
    """`block_bytes`: one page for each of `group_layers` layers."""

    types: tuple[PageType, ...]
    page_bytes: int
    group_layers: int
    cp: int
    chunk_tokens: int

    @property
    def block_bytes(self) -> int:
        return self.page_bytes * self.group_layers

    @classmethod
    def of(cls, layers: list[LayerPages], block: int, step: int, cp: int, chunk: int) -> "Pages | None":
        """None where there is one type only, or where a layer's caches have pools of their own."""
        counts: Counter[tuple[Fraction, int, int | None]] = Counter(layer.holds for layer in layers)
        if len(counts) < 2 or any(layer.mixed or (layer.token_bits and layer.state_bytes) for layer in layers):
            return None
        if all(window is None for _, _, window in counts) and not any(state for _, state, _ in counts):
            return None  # all grow for ever: one block table, each layer its own page size
        states = max(state for _, state, _ in counts)
        widest = max(bits for bits, _, _ in counts)
        if widest:
            grown = -(-states * 8 // widest)  # tokens until a page holds the largest state
            tokens = max(block, -(-grown // step) * step)
            page = -(-widest * tokens // 8)
        else:
            tokens, page = 0, states
        most, least = max(counts.values()), min(counts.values())
        group = most if most < least * NEARLY_EQUAL else least
        types = []
        for (bits, state, window), number in counts.items():
            alike = [layer for layer in layers if layer.holds == (bits, state, window)]
            kinds = tuple(dict.fromkeys(layer.kind for layer in alike))
            types.append(PageType(layers=number, groups=-(-number // group), window_tokens=window, kinds=kinds,
                                  block_tokens=int(page * 8 // bits) if bits else 0))  # fmt: skip
        return cls(types=tuple(types), page_bytes=page, group_layers=group, cp=cp, chunk_tokens=chunk)

    def blocks(self, kind: PageType, num_tokens: int) -> int:
        """Pages of one group of a type that a sequence of `num_tokens` holds."""
        if not kind.block_tokens:
            return 1
        span = kind.block_tokens * (self.cp if kind.window_tokens is None else 1)
        whole = -(-num_tokens // span)
        if kind.window_tokens is None:
            return whole
        kept = -(-min(num_tokens, kind.window_tokens - 1 + max(1, self.chunk_tokens)) // span)
        return min(whole, kept + 1)  # a sliding window may begin within a block

    def sequence_bytes(self, num_tokens: int) -> int:
        return self.block_bytes * sum(kind.groups * self.blocks(kind, num_tokens) for kind in self.types)

    def slope(self) -> Fraction:
        growing = [kind for kind in self.types if kind.block_tokens and kind.window_tokens is None]
        return sum((Fraction(self.block_bytes * kind.groups, kind.block_tokens * self.cp) for kind in growing), Fraction(0))

    def constant_bytes(self) -> int:
        """Full windows and states."""
        rest = [kind for kind in self.types if not kind.block_tokens or kind.window_tokens is not None]
        return self.block_bytes * sum(kind.groups * self.blocks(kind, 1 << 62) for kind in rest)
