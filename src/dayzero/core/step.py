"""`StepBatch`: what the scheduler hands to a runner. Integers only, so that it can be broadcast to ranks."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class StepBatch:
    """All scheduled tokens of all sequences, laid end to end. Decode sequences (one token each) come first.

    Shapes, for T tokens of S sequences: tokens [T], positions [T], query_offsets [S+1], context_lens [S] (tokens of the
    sequence in its cache after this step), slots [S] (the sequence's row in per-sequence state), block_tables [S][...]
    (empty where the runner keeps native caches), logit_rows [L] (rows of T whose logits are wanted).
    `released_slots` are rows whose state may be dropped before this step.
    """

    step: int
    tokens: tuple[int, ...]
    positions: tuple[int, ...]
    query_offsets: tuple[int, ...]
    context_lens: tuple[int, ...]
    slots: tuple[int, ...]
    block_tables: tuple[tuple[int, ...], ...]
    logit_rows: tuple[int, ...]
    num_decode: int
    released_slots: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        assert len(self.tokens) == len(self.positions) == self.query_offsets[-1], self
        assert len(self.query_offsets) == len(self.slots) + 1 == len(self.context_lens) + 1, self

    @property
    def num_sequences(self) -> int:
        return len(self.slots)
