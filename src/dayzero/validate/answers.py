"""Free-running tokens against the reference, without letting the reference run free: one uncached forward per answer.

As long as an answer follows the reference's best token, a forward over prompt + answer gives the very logits which greedy
decoding of the reference would have seen, so by induction both agree up to the first place where the answer's token is not
the best. The rule (DESIGN, equality): tokens are compared up to the first place where the reference's two best logits are
closer than the tie gap; how many were cut there is counted. What lies behind a cut is still held to a weaker claim, that
each token is within the tie gap of the best one given the answer's own tokens before it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dayzero.validate.positions import best_tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class Path:
    """What the reference thinks along one answer of n tokens. `best` and `best_logits` are [n, 5], best first; `regret` is
    the best logit minus that of the token answered, `blind_regret` minus the median logit: what a blind guess costs."""

    token_ids: tuple[int, ...]
    best: np.ndarray
    best_logits: np.ndarray
    regret: np.ndarray
    blind_regret: np.ndarray

    @property
    def gap(self) -> np.ndarray:
        return self.best_logits[:, 0] - self.best_logits[:, 1]


def path_of(logits: np.ndarray, num_prompt_tokens: int, answer: Sequence[int]) -> Path:
    """`logits` [prompt + answer, v] of the reference over prompt + answer (the last row is not used)."""
    rows = logits[num_prompt_tokens - 1 : num_prompt_tokens - 1 + len(answer)].astype(np.float64)
    best = best_tokens(rows)
    best_logits = np.take_along_axis(rows, best, 1)
    chosen = rows[np.arange(len(answer)), np.asarray(answer, dtype=np.int64)]
    return Path(token_ids=tuple(answer), best=best, best_logits=best_logits, regret=best_logits[:, 0] - chosen,
                blind_regret=best_logits[:, 0] - np.median(rows, axis=1))  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Agreement:
    """`same`: leading tokens which are the reference's. `best`: tokens which are its best after the answer's own before them.
    `cut`: tokens from the first near-tie on, which only have to be near the best. `wrong`: places of tokens that are neither
    the best nor within the tie gap of it."""

    num_tokens: int
    same: int
    best: int
    cut: int
    wrong: tuple[int, ...]


def agreement(path: Path, tie_gap: float) -> Agreement:
    """Judge one answer. A token that is not the best where the gap is wide has a regret of at least the gap."""
    differs = path.best[:, 0] != np.asarray(path.token_ids)
    ties = path.gap < tie_gap
    num_tokens = len(path.token_ids)
    same = int(np.argmax(differs)) if differs.any() else num_tokens
    cut = num_tokens - int(np.argmax(ties)) if ties.any() else 0
    return Agreement(num_tokens=num_tokens, same=same, best=num_tokens - int(differs.sum()), cut=cut,
                     wrong=tuple(int(place) for place in np.flatnonzero(differs & (path.regret >= tie_gap))))  # fmt: skip


def first_tie(path: Path, tie_gap: float) -> int:
    """The first place where the reference's two best logits are closer than `tie_gap`; the length where there is none."""
    ties = np.flatnonzero(path.gap < tie_gap)
    return int(ties[0]) if len(ties) else len(path.token_ids)


def first_difference(got: Sequence[int], want: Sequence[int], limit: int) -> int | None:
    """First place before `limit` where `got` leaves `want`, else None. An answer that is too short differs where it ends; one
    that is too long where the other ends, if that is compared whole."""
    for place, token in enumerate(want[:limit]):
        if place >= len(got) or got[place] != token:
            return place
    return len(want) if limit == len(want) and len(got) > len(want) else None


def malformed(answer: Sequence[int], vocab_size: int, max_tokens: int) -> str | None:
    """Why an answer cannot even be looked at: it would break the reference's embedding or compare less than was asked."""
    if len(answer) != max_tokens:
        return f"{len(answer)} tokens instead of {max_tokens}"
    bad = [token for token in answer if not 0 <= token < vocab_size]
    return f"token {bad[0]} is outside the vocabulary of {vocab_size}" if bad else None
