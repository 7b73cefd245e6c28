"""The block pool: nothing leaks, nothing is shared that is still written, prefixes are found and only prefixes."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from dayzero.core.errors import DayZeroError
from dayzero.runtime.blocks import BlockPool, chain_hash


def make_pool(num_blocks=8, block_tokens=4, prefix_reuse=True):
    return BlockPool(num_blocks, block_tokens, prefix_reuse=prefix_reuse)


def publish_all(pool, blocks, tokens):
    digest = b""
    for index, block in enumerate(blocks):
        digest = chain_hash(digest, tokens[index * pool.block_tokens : (index + 1) * pool.block_tokens])
        pool.publish(block, digest)


def test_an_empty_pool_is_refused():
    with pytest.raises(DayZeroError, match="no room"):
        make_pool(num_blocks=0)


def test_allocation_is_all_or_nothing():
    pool = make_pool(num_blocks=3)
    assert pool.allocate(4) is None
    assert pool.num_available == 3
    assert len(pool.allocate(3) or []) == 3


def test_a_published_prefix_is_found_and_one_token_is_left_to_compute():
    pool, tokens = make_pool(), list(range(8))
    blocks = pool.allocate(2)
    publish_all(pool, blocks, tokens)
    pool.release(blocks)
    assert pool.num_cached == 2
    assert pool.match(tokens) == blocks[:1]  # KV-02: at most prompt - 1 tokens are reused
    assert pool.match([*tokens, 99]) == blocks
    assert pool.match([1, *tokens]) == []


def test_blocks_after_a_different_token_do_not_match():
    pool, tokens = make_pool(), list(range(12))
    blocks = pool.allocate(3)
    publish_all(pool, blocks, tokens)
    other = [0, 1, 2, 3, 9, 5, 6, 7, 8, 9, 10, 11, 12]
    assert pool.match(other) == blocks[:1]


def test_cached_blocks_are_evicted_oldest_first_and_prefixes_outlive_their_tails():
    pool, tokens = make_pool(num_blocks=3), list(range(12))
    blocks = pool.allocate(3)
    publish_all(pool, blocks, tokens)
    pool.release(blocks)
    assert pool.allocate(1) == [blocks[2]]
    assert pool.match([*tokens, 0]) == blocks[:2]


def test_a_double_release_is_an_error():
    pool = make_pool()
    blocks = pool.allocate(1)
    pool.release(blocks)
    with pytest.raises(AssertionError, match="released twice"):
        pool.release(blocks)


def test_without_reuse_nothing_is_cached():
    pool = make_pool(prefix_reuse=False)
    blocks = pool.allocate(2)
    publish_all(pool, blocks, list(range(8)))
    pool.release(blocks)
    assert (pool.num_cached, pool.num_referenced, pool.match(list(range(9)))) == (0, 0, [])


class PoolMachine(RuleBasedStateMachine):
    """Sequences come, match, grow, publish and go in any order."""

    def __init__(self):
        super().__init__()
        self.pool = make_pool(num_blocks=6, block_tokens=2)
        self.held: list[tuple[list[int], list[int]]] = []

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=9))
    def start(self, tokens):
        shared = self.pool.match(tokens)
        fresh = self.pool.allocate(self.pool.blocks_for(len(tokens)) - len(shared))
        if fresh is None:
            self.pool.release(shared)
            return
        others = {block for blocks, _ in self.held for block in blocks}
        assert not set(fresh) & others, "a block that somebody holds was handed out"
        blocks = shared + fresh
        self.held.append((blocks, tokens))
        publish_all(self.pool, blocks[: len(tokens) // 2], tokens)

    @rule(index=st.integers(0, 100))
    def finish(self, index):
        if self.held:
            blocks, _ = self.held.pop(index % len(self.held))
            self.pool.release(blocks)

    @rule()
    def reset(self):
        self.pool.reset_cached()

    @invariant()
    def holds(self):
        self.pool.check()
        assert self.pool.num_referenced == len({block for blocks, _ in self.held for block in blocks})


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


@given(st.lists(st.integers(0, 2**40), min_size=1, max_size=8), st.lists(st.integers(0, 2**40), min_size=1, max_size=8))
def test_hashes_tell_token_lists_apart(left, right):
    assert (chain_hash(b"", left) == chain_hash(b"", right)) == (left == right)
