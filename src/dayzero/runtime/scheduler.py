"""Which tokens run in the next step: continuous batching with prefill chunks mixed with decode. No tensors.

In: requests. Out: `StepBatch` records. Chunk boundaries are absolute positions in the sequence (multiples of
`chunk_tokens`), never a share of what is left in a step: the rows that are computed together for one sequence do not
depend on who else is running, which keeps its numbers, and so its tokens, the same alone and among others.

"Not now" and "never" are apart: a request whose prompt and output cannot fit the whole pool is refused by `add`; one
that merely has to wait, waits. When decoding runs out of blocks, the youngest sequence is preempted: its blocks are
given back and it is computed again later, with the tokens it already has.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from dayzero.core.errors import DayZeroError
from dayzero.core.generation import GenerationRequest
from dayzero.core.step import StepBatch
from dayzero.runtime.blocks import BlockPool, chain_hash


@dataclass(slots=True, eq=False)
class Sequence:
    """One running request. `tokens` are prompt and output; the first `num_computed` are in the cache."""

    request: GenerationRequest
    seed: int
    tokens: list[int]
    slot: int = -1
    num_computed: int = 0
    blocks: list[int] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)
    reused_tokens: int = 0
    prompt_logprobs: list[float | None] = field(default_factory=list)

    @property
    def num_prompt(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def output(self) -> list[int]:
        return self.tokens[self.num_prompt :]

    @property
    def is_decoding(self) -> bool:
        """Only its newest token is missing from the cache."""
        return self.num_computed == len(self.tokens) - 1 and self.num_computed > 0


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerLimits:
    """`chunk_tokens` None: prompts run in one piece (mixers whose state cannot be continued mid-prompt).

    `exact_reuse`: a prefix is reused only where computing it would give the same bits (dtypes in which sums of another shape
    round differently). Then prompts shorter than a chunk run in quarters of one, so that they too have something to reuse.
    """

    max_sequences: int
    context_tokens: int
    chunk_tokens: int | None
    step_tokens: int
    exact_reuse: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Scheduled:
    """A batch and, row by row of `logit_rows`, whose they are. `complete` sequences get a new token."""

    batch: StepBatch
    sequences: tuple[Sequence, ...]
    row_owners: tuple[Sequence, ...]


class Scheduler:
    def __init__(self, pool: BlockPool, limits: SchedulerLimits) -> None:
        self.pool, self.limits = pool, limits
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # oldest first
        self.preemptions = 0
        self.reused_tokens = 0
        self._free_slots = list(range(limits.max_sequences - 1, -1, -1))
        self._released_slots: list[int] = []
        self._steps = 0

    @property
    def capacity_tokens(self) -> int:
        """Most tokens (prompt and output) that one request may have."""
        return min(self.limits.context_tokens, self.pool.num_blocks * self.pool.block_tokens)

    def add(self, request: GenerationRequest, seed: int) -> None:
        """Queue a request. Raises DayZeroError when it can never run."""
        prompt, wanted = len(request.prompt_token_ids), request.sampling.max_tokens
        if prompt + wanted > self.capacity_tokens:
            raise DayZeroError(
                "the request can never fit",
                got=f"{prompt} prompt tokens + {wanted} output tokens",
                want=f"at most {self.capacity_tokens} tokens in total (context {self.limits.context_tokens}, "
                f"cache capacity {self.pool.num_blocks * self.pool.block_tokens})",
                fix="shorten the prompt or lower max_tokens",
            )
        noted: list[float | None] = [None] if request.sampling.prompt_logprobs else []  # nothing predicts the first token
        tokens = list(request.prompt_token_ids)
        self.waiting.append(Sequence(request=request, seed=seed, tokens=tokens, prompt_logprobs=noted))

    def find(self, request_id: str) -> Sequence | None:
        return next((s for s in [*self.running, *self.waiting] if s.request.id == request_id), None)

    def finish(self, sequence: Sequence) -> None:
        """Take a sequence out, wherever it is, and free all it holds."""
        if sequence in self.running:
            self.running.remove(sequence)
            self._release(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)

    def schedule(self) -> Scheduled | None:
        """The next batch, or None when nothing can run. Decode tokens first, then whole prefill chunks that fit."""
        decoding = self._grow_decoding()
        budget = self.limits.step_tokens - len(decoding)
        prefilling: list[tuple[Sequence, int]] = []
        for sequence in [s for s in self.running if not s.is_decoding]:
            budget = self._take_chunk(sequence, prefilling, budget)
        while self.waiting and self._free_slots and (budget > 0 or not prefilling):
            if not self._admit(self.waiting[0], prefilling, budget):
                break
            budget = self._take_chunk(self.running[-1], prefilling, budget)
        if not decoding and not prefilling:
            assert self.running or not self.waiting, "requests wait although nothing runs: they should have been refused"
            return None
        return self._batch([(s, 1) for s in decoding] + prefilling, len(decoding))

    def commit(self, scheduled: Scheduled) -> None:
        """After the runner is done: the scheduled tokens are in the cache, full blocks become findable."""
        for sequence, start, stop in _ranges(scheduled):
            assert sequence.num_computed == start, (sequence.num_computed, start)
            sequence.num_computed = stop
            self._publish(sequence)

    def distrust(self, sequence: Sequence) -> None:
        """What the sequence put into its blocks is not to be reused."""
        self.pool.unpublish(sequence.blocks)

    def _publish(self, sequence: Sequence) -> None:
        """Make full blocks findable. With exact reuse only what prefill computed, in whole pieces: rows that were decoded
        one by one have other bits than the same rows in a piece."""
        if not self.pool.prefix_reuse:
            return
        ready = sequence.num_computed
        if self.limits.exact_reuse:
            piece = self._piece_tokens(sequence)
            ready = min(ready, sequence.num_prompt) // piece * piece
        for index in range(len(sequence.digests), ready // self.pool.block_tokens):
            self.pool.publish(sequence.blocks[index], self._digest(sequence))

    def _digest(self, sequence: Sequence) -> bytes:
        """Append and return the hash of the sequence's next block."""
        size, index = self.pool.block_tokens, len(sequence.digests)
        previous = sequence.digests[-1] if sequence.digests else self._seed(sequence)
        sequence.digests.append(chain_hash(previous, sequence.tokens[index * size : (index + 1) * size]))
        return sequence.digests[-1]

    def _piece_tokens(self, sequence: Sequence) -> int:
        """Size of the pieces that a prompt runs in. Never depends on who else is running."""
        chunk = self.limits.chunk_tokens
        assert chunk is not None
        if not self.limits.exact_reuse or sequence.num_prompt >= chunk:
            return chunk
        quarter = chunk // 4 // self.pool.block_tokens * self.pool.block_tokens
        return max(quarter, self.pool.block_tokens)

    def _seed(self, sequence: Sequence) -> bytes:
        """Blocks of prompts that run in pieces of another size are another family of hashes."""
        return str(self._piece_tokens(sequence)).encode() if self.limits.exact_reuse else b""

    def _grow_decoding(self) -> list[Sequence]:
        """Decoding sequences with a block for their newest token, preempting the youngest where blocks run out."""
        for sequence in [s for s in self.running if s.is_decoding]:
            while sequence in self.running and not self._extend(sequence, len(sequence.tokens)):
                self._preempt(self.running[-1])
        return [s for s in self.running if s.is_decoding]

    def _chunk_stop(self, sequence: Sequence) -> int:
        total = len(sequence.tokens)
        if self.limits.chunk_tokens is None:
            return total
        size = self._piece_tokens(sequence)
        return min(total, (sequence.num_computed // size + 1) * size)

    def _take_chunk(self, sequence: Sequence, chosen: list[tuple[Sequence, int]], budget: int) -> int:
        """Schedule the sequence's next whole chunk if it fits the step (the first one always does)."""
        count = self._chunk_stop(sequence) - sequence.num_computed
        if count > budget and chosen:
            return budget
        chosen.append((sequence, count))
        return budget - count

    def _admit(self, sequence: Sequence, chosen: list[tuple[Sequence, int]], budget: int) -> bool:
        """Move the first waiting sequence to the running ones if its chunk fits the step and its prompt the pool.

        It gets the blocks of its whole prompt at once, so that a prefill that has begun can always go on.
        """
        wants_all_rows = sequence.request.sampling.prompt_logprobs
        reused = [] if wants_all_rows else self._match(sequence)
        sequence.num_computed = len(reused) * self.pool.block_tokens
        needed = self.pool.blocks_for(len(sequence.tokens)) - len(reused)
        chunk = self._chunk_stop(sequence) - sequence.num_computed
        fresh = None if chosen and chunk > budget else self.pool.allocate(needed)
        if fresh is None:
            self.pool.release(reused)
            sequence.num_computed = 0
            return False
        self.waiting.popleft()
        sequence.blocks, sequence.slot = reused + fresh, self._free_slots.pop()
        sequence.digests = []
        for _ in reused:
            self._digest(sequence)
        sequence.reused_tokens = max(sequence.reused_tokens, min(sequence.num_computed, sequence.num_prompt - 1))
        self.reused_tokens += sequence.num_computed
        self.running.append(sequence)
        return True

    def _match(self, sequence: Sequence) -> list[int]:
        if not self.limits.exact_reuse:
            return self.pool.match(sequence.tokens)
        piece = self._piece_tokens(sequence)
        return self.pool.match(sequence.tokens, seed=self._seed(sequence), multiple_tokens=piece)

    def _extend(self, sequence: Sequence, num_tokens: int) -> bool:
        """Blocks for the first `num_tokens` tokens of a sequence; False when there are not enough."""
        missing = self.pool.blocks_for(num_tokens) - len(sequence.blocks)
        if missing <= 0:
            return True
        blocks = self.pool.allocate(missing)
        if blocks is None:
            return False
        sequence.blocks.extend(blocks)
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._release(sequence)
        sequence.num_computed = 0
        self.waiting.appendleft(sequence)
        self.preemptions += 1

    def _release(self, sequence: Sequence) -> None:
        self.pool.release(sequence.blocks)
        sequence.blocks, sequence.digests = [], []
        self._free_slots.append(sequence.slot)
        self._released_slots.append(sequence.slot)
        sequence.slot = -1

    def _batch(self, work: list[tuple[Sequence, int]], num_decode: int) -> Scheduled:
        tokens: list[int] = []
        positions: list[int] = []
        offsets, rows = [0], list[int]()
        owners: list[Sequence] = []
        for sequence, count in work:
            start = sequence.num_computed
            tokens += sequence.tokens[start : start + count]
            positions += range(start, start + count)
            offsets.append(len(tokens))
            if sequence.request.sampling.prompt_logprobs and start + count <= sequence.num_prompt:
                rows += range(offsets[-2], offsets[-1])
                owners += [sequence] * count
            elif start + count == len(sequence.tokens):
                rows.append(offsets[-1] - 1)
                owners.append(sequence)
        self._steps += 1
        released, self._released_slots = tuple(self._released_slots), []
        batch = StepBatch(
            step=self._steps,
            tokens=tuple(tokens),
            positions=tuple(positions),
            query_offsets=tuple(offsets),
            context_lens=tuple(s.num_computed + count for s, count in work),
            slots=tuple(s.slot for s, _ in work),
            block_tables=tuple(tuple(s.blocks) for s, _ in work),
            logit_rows=tuple(rows),
            num_decode=num_decode,
            released_slots=released,
        )
        return Scheduled(batch=batch, sequences=tuple(s for s, _ in work), row_owners=tuple(owners))


def _ranges(scheduled: Scheduled) -> Iterable[tuple[Sequence, int, int]]:
    """(sequence, first position, end position) of each part of a batch."""
    batch = scheduled.batch
    for index, sequence in enumerate(scheduled.sequences):
        count = batch.query_offsets[index + 1] - batch.query_offsets[index]
        yield sequence, batch.context_lens[index] - count, batch.context_lens[index]
