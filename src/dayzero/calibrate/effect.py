"""What fewer bits do to the model on text it was not calibrated on: divergence, agreement, perplexity, each with an interval.

The original and the quantized weights run side by side, layer by layer, so that neither model has to fit in memory. Figures
are means over all positions that have a next token; the intervals are 95% of a bootstrap over sequences, which are what is
independent. Not here: what a preset does to activations.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import numpy as np
import torch

from dayzero.calibrate.skeleton import Provider, Skeleton
from dayzero.calibrate.streamed import StreamedRun, lockstep
from dayzero.core.records import STRICT

RESAMPLES = 2000


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """A mean with its 95% interval."""

    __pydantic_config__ = STRICT
    value: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Effect:
    """`kl`: mean KL(original || quantized) per token in nats. `top1`: share of tokens whose likeliest next token is the same.
    `perplexity_ratio`: quantized over original, of the same tokens."""

    SCHEMA: ClassVar[str] = "dayzero.effect/1"
    __pydantic_config__ = STRICT
    kl: Figure
    top1: Figure
    perplexity: Figure
    original_perplexity: Figure
    perplexity_ratio: Figure
    num_sequences: int
    num_tokens: int
    seed: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenSums:
    """Means of each sequence [sequences]: divergence, agreement, and the negative log likelihoods of the next tokens."""

    kl: np.ndarray
    top1: np.ndarray
    original: np.ndarray
    quantized: np.ndarray
    tokens: int

    def effect(self, seed: int = 0) -> Effect:
        count = len(self.kl)
        figure = partial(_figure, picks=np.random.default_rng(seed).integers(0, count, (RESAMPLES, count)))
        return Effect(
            kl=figure(self.kl), top1=figure(self.top1), perplexity=figure(self.quantized, exponential=True),
            original_perplexity=figure(self.original, exponential=True),
            perplexity_ratio=figure(self.quantized - self.original, exponential=True),
            num_sequences=count, num_tokens=self.tokens, seed=seed,
        )  # fmt: skip


def kl_difference(first: TokenSums, second: TokenSums, seed: int = 0) -> Figure:
    """How much more the first diverges from the original than the second, on the same sequences: below 0 it is better."""
    count = len(first.kl)
    assert count == len(second.kl), (count, len(second.kl))
    return _figure(first.kl - second.kl, picks=np.random.default_rng(seed).integers(0, count, (RESAMPLES, count)))


def _figure(values: np.ndarray, *, picks: np.ndarray, exponential: bool = False) -> Figure:
    means, whole = values[picks].mean(1), values.mean()
    if exponential:
        means, whole = np.exp(means), np.exp(whole)
    low, high = np.quantile(means, (0.025, 0.975))
    return Figure(value=float(whole), low=float(low), high=float(high))


def measure_effect(
    skeletons: tuple[Skeleton, Skeleton], original: Provider, quantized: Provider, chunks: Sequence[torch.Tensor], *,
    seed: int = 0,
) -> Effect:  # fmt: skip
    """chunks: held-out token ids [sequences, T]. Two skeletons, as each holds the weights of one."""
    return measure_sums(skeletons[0], original, [(skeletons[1], quantized)], chunks)[0].effect(seed)


def measure_sums(
    skeleton: Skeleton, original: Provider, variants: Sequence[tuple[Skeleton, Provider]], chunks: Sequence[torch.Tensor]
) -> list[TokenSums]:
    """Several quantized variants against one original, in one passage through the layers."""
    for one, provider in ((skeleton, original), *variants):
        one.fill_resident(provider)
    rows: list[list[tuple[torch.Tensor, ...]]] = [[] for _ in variants]
    with ExitStack() as stack:
        reference = stack.enter_context(StreamedRun(skeleton, original, chunks))
        others = [stack.enter_context(StreamedRun(one, provider, chunks)) for one, provider in variants]
        lockstep([reference, *others])
        for number, tokens in enumerate(chunks):
            expected = torch.log_softmax(reference.finish(number)[:, :-1].float(), dim=-1)
            for found, run in zip(rows, others, strict=True):
                found.append(_compare(expected, run.finish(number), tokens))
    made = []
    for found in rows:
        kl, top1, first, second = (torch.cat(parts).numpy() for parts in zip(*found, strict=True))
        made.append(TokenSums(kl=kl, top1=top1, original=first, quantized=second,
                              tokens=sum(one.shape[0] * (one.shape[1] - 1) for one in chunks)))  # fmt: skip
    return made


def _compare(expected: torch.Tensor, logits: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Means over the positions of each sequence, float64."""
    got = torch.log_softmax(logits[:, :-1].float(), dim=-1)
    kl = (expected.exp() * (expected - got)).sum(-1).double().mean(-1)
    top1 = (expected.argmax(-1) == got.argmax(-1)).double().mean(-1)
    following = tokens[:, 1:, None]
    first, second = (-one.gather(-1, following)[..., 0].double().mean(-1) for one in (expected, got))
    return kl, top1, first, second
