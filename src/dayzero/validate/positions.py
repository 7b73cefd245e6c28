"""Logits of a candidate and of the reference for the same tokens in, the errors of each position out. numpy only.

Per position, not in one number: a mean hides one broken token and a maximum is ruled by one tie. What is too much is
decided in `checks`. Legend: n positions, v vocabulary; row i holds the logits of what follows token i.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

BEST = 5  # how many of the reference's best tokens count as candidates for the next one
CHUNK_ROWS = 64  # rows widened to float64 at a time


@dataclass(frozen=True, kw_only=True, slots=True)
class PositionErrors:
    """One entry per position, except `nll_*`: one per predicted token (negative log-likelihood, nats)."""

    worst_abs: np.ndarray  # largest error of a logit
    worst_token: np.ndarray  # of which token
    kl: np.ndarray  # KL(reference || candidate), nats
    same_best: np.ndarray  # both put the same token first
    gap: np.ndarray  # the reference's best logit minus its second best
    regret: np.ndarray  # the reference's best logit minus its logit of the candidate's best token
    gap_error: np.ndarray  # largest error of a distance between the reference's best token and its next four
    nll_got: np.ndarray
    nll_want: np.ndarray

    def __len__(self) -> int:
        return len(self.worst_abs)


def position_errors(got: np.ndarray, want: np.ndarray, token_ids: Sequence[int]) -> PositionErrors:
    """Both [n, v] for the n `token_ids`, and finite but for infinities that both share (`compare` has seen to that)."""
    assert got.shape == want.shape and len(want) == len(token_ids), (got.shape, want.shape, len(token_ids))
    parts = []
    for start in range(0, len(want), CHUNK_ROWS):
        stop = min(start + CHUNK_ROWS, len(want))
        following = np.asarray(token_ids[start + 1 : stop + 1], dtype=np.int64)
        parts.append(_errors_of_rows(got[start:stop].astype(np.float64), want[start:stop].astype(np.float64), following))
    return joined(parts)


def joined(parts: Sequence[PositionErrors]) -> PositionErrors:
    """Several texts as one, in order."""
    return PositionErrors(**{f.name: np.concatenate([getattr(part, f.name) for part in parts]) for f in fields(PositionErrors)})


def _errors_of_rows(got: np.ndarray, want: np.ndarray, following: np.ndarray) -> PositionErrors:
    rows = np.arange(len(want))
    with np.errstate(invalid="ignore"):
        error = np.where(got == want, 0.0, np.abs(got - want))
    worst_token = error.argmax(axis=1)
    log_got, log_want = log_softmax(got), log_softmax(want)
    with np.errstate(invalid="ignore"):
        divergence = np.where(np.isfinite(log_want), np.exp(log_want) * (log_want - log_got), 0.0)
    best = best_tokens(want)
    best_want, best_got = np.take_along_axis(want, best, 1), np.take_along_axis(got, best, 1)
    got_best = got.argmax(axis=1)
    predicted = rows[: len(following)]
    return PositionErrors(
        worst_abs=error[rows, worst_token],
        worst_token=worst_token,
        kl=divergence.sum(axis=1),
        same_best=got_best == best[:, 0],
        gap=best_want[:, 0] - best_want[:, 1],
        regret=best_want[:, 0] - want[rows, got_best],
        gap_error=gap_errors(best_got, best_want),
        nll_got=-log_got[predicted, following],
        nll_want=-log_want[predicted, following],
    )


def best_tokens(logits: np.ndarray) -> np.ndarray:
    """The `BEST` tokens of each row, best first; of equal ones the lowest id, as argmax does."""
    count = min(BEST, logits.shape[1])
    if logits.shape[1] > 4 * BEST:
        # argpartition may drop the lowest id of equal logits at the border only; the first place is set right below.
        some = np.sort(np.argpartition(logits, -count, axis=1)[:, -count:], axis=1)
    else:
        some = np.tile(np.arange(logits.shape[1]), (len(logits), 1))
    order = np.argsort(-np.take_along_axis(logits, some, 1), axis=1, kind="stable")[:, :count]
    best = np.take_along_axis(some, order, 1)
    first = logits.argmax(axis=1)
    if count > 1:
        missing = ~(best == first[:, None]).any(axis=1)
        best[missing, -1] = best[missing, 0]
        best[missing, 0] = first[missing]
    return best


def gap_errors(got: np.ndarray, want: np.ndarray) -> np.ndarray:
    """[n, BEST] logits of the same tokens, the reference's best first: worst error of the distances to the first."""
    with np.errstate(invalid="ignore"):
        error = np.abs((got[:, :1] - got) - (want[:, :1] - want))
    return np.where(np.isfinite(want), error, 0.0).max(axis=1)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
