"""Blocks of the paged cache: who holds which, and which may be reused as a prefix. Integers only, no tensors.

A block is free, referenced (by one or more sequences), or cached: full, unreferenced, findable by the hash of every
token up to its end. Cached blocks are evicted oldest first when free ones run out. Only full blocks are shared, and a
shared block is never written again: a sequence writes only into blocks that it alone holds.
"""

import hashlib
from array import array
from collections import OrderedDict, deque
from collections.abc import Sequence

from dayzero.core.errors import DayZeroError


def chain_hash(previous: bytes, tokens: Sequence[int]) -> bytes:
    """Hash of a full block given the hash of everything before it. Cryptographic, so that equal means equal."""
    return hashlib.blake2b(previous + array("q", tokens).tobytes(), digest_size=16).digest()


class BlockPool:
    """`num_blocks` blocks of `block_tokens` tokens. Not thread-safe: the engine's step loop owns it."""

    def __init__(self, num_blocks: int, block_tokens: int, *, prefix_reuse: bool) -> None:
        if num_blocks < 1 or block_tokens < 1:
            raise DayZeroError(
                "the cache has no room",
                got=f"{num_blocks} blocks of {block_tokens} tokens",
                want="at least one block",
                fix="raise --memory-fraction or lower --context",
            )
        self.num_blocks, self.block_tokens, self.prefix_reuse = num_blocks, block_tokens, prefix_reuse
        self._free: deque[int] = deque(range(num_blocks))
        self._references = [0] * num_blocks
        self._hash_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}
        self._evictable: OrderedDict[int, None] = OrderedDict()  # cached and unreferenced, oldest first

    @property
    def num_available(self) -> int:
        """Blocks that can be handed out now: free ones and cached ones nobody references."""
        return len(self._free) + len(self._evictable)

    @property
    def num_referenced(self) -> int:
        return self.num_blocks - self.num_available

    @property
    def num_cached(self) -> int:
        return len(self._evictable)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_tokens)

    def match(self, tokens: Sequence[int], *, seed: bytes = b"", multiple_tokens: int = 1) -> list[int]:
        """Blocks that hold the longest cached prefix of `tokens`, each now referenced once more.

        At least one token is left to compute, since its logits are wanted. Only prefixes published under the same `seed` are
        found, and only whole multiples of `multiple_tokens` are used.
        """
        found: list[int] = []
        if not self.prefix_reuse:
            return found
        previous = seed
        for start in range(0, (len(tokens) - 1) // self.block_tokens * self.block_tokens, self.block_tokens):
            previous = chain_hash(previous, tokens[start : start + self.block_tokens])
            block = self._block_of.get(previous)
            if block is None:
                break
            self._retain(block)
            found.append(block)
        whole = len(found) * self.block_tokens // multiple_tokens * multiple_tokens // self.block_tokens
        self.release(found[whole:])
        return found[:whole]

    def allocate(self, count: int) -> list[int] | None:
        """`count` blocks for one sequence, or None when there are not enough (nothing is taken then)."""
        if count > self.num_available:
            return None
        taken = []
        for _ in range(count):
            if self._free:
                block = self._free.popleft()
            else:
                block, _ = self._evictable.popitem(last=False)
                del self._block_of[self._hash_of.pop(block)]
            assert self._references[block] == 0, f"block {block} is referenced {self._references[block]} times"
            self._references[block] = 1
            taken.append(block)
        return taken

    def publish(self, block: int, digest: bytes) -> None:
        """Make a full block findable. When another block already holds the same tokens, this one stays private."""
        if self.prefix_reuse and digest not in self._block_of and block not in self._hash_of:
            self._block_of[digest] = block
            self._hash_of[block] = digest

    def unpublish(self, blocks: Sequence[int]) -> None:
        """Make blocks unfindable: what they hold is not to be trusted."""
        for block in blocks:
            if block in self._hash_of:
                del self._block_of[self._hash_of.pop(block)]
                if block in self._evictable:
                    del self._evictable[block]
                    self._free.append(block)

    def release(self, blocks: Sequence[int]) -> None:
        """Give back one reference of each. Later blocks become evictable first: prefixes outlive their tails."""
        for block in reversed(blocks):
            assert self._references[block] > 0, f"block {block} was released twice"
            self._references[block] -= 1
            if self._references[block] == 0:
                if block in self._hash_of:
                    self._evictable[block] = None
                else:
                    self._free.append(block)

    def reset_cached(self) -> None:
        """Forget every cached prefix. Blocks that sequences hold stay theirs but are no longer findable."""
        self._free.extend(self._evictable)
        self._evictable.clear()
        self._hash_of.clear()
        self._block_of.clear()

    def check(self) -> None:
        """Assert the invariants; called by tests and at idle by the soak."""
        free = set(self._free)
        assert len(free) == len(self._free), "a block is free twice"
        assert not free & set(self._evictable), "a block is free and cached"
        for block in range(self.num_blocks):
            unreferenced = block in free or block in self._evictable
            assert (self._references[block] == 0) == unreferenced, f"block {block}: {self._references[block]} references"

    def _retain(self, block: int) -> None:
        self._references[block] += 1
        self._evictable.pop(block, None)
