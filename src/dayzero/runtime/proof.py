"""Which tier runs a model, decided by measurement at load, never by a list of names.

In: a runner to try and a model. Out: a `Proof` with the worst error seen. A shrunken instance of the release's own
config runs a schedule that crosses window, chunk and block boundaries, with prompts in pieces and sequences that join
midway; every logit is compared with the uncached forward of that sequence alone, in float32.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from dayzero.core.step import StepBatch
from dayzero.runtime.native import attention_implementation
from dayzero.runtime.runner import Runner

# DESIGN, "Equality": teacher-forced in float32, every logit within 1e-3 of the uncached forward.
MAX_LOGIT_ERROR = 1e-3

# Prompt lengths and steps, each a list of (sequence, new tokens). Lengths cross the shrunken window and chunk (8) and
# blocks of 4; sequence 3 is a one-token prompt; sequences 2 to 4 join while others decode.
PROMPTS = (7, 21, 13, 1, 9)
DECODED = 8
IN_PIECES = ([(0, 7), (1, 10)], [(0, 1), (1, 11), (2, 13)], [(0, 1), (1, 1), (2, 1), (3, 1), (4, 9)])
IN_ONE_PIECE = ([(0, 7), (1, 21)], [(0, 1), (2, 13), (1, 1)], [(0, 1), (1, 1), (2, 1), (3, 1), (4, 9)])
BLOCK_TOKENS = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Proof:
    """Whether a tier was shown to be right, its worst logit error, and the reason where it was not."""

    tier: str
    passed: bool
    max_error: float
    reason: str


def uncached_logits(module: nn.Module, tokens: Sequence[int], device: torch.device) -> torch.Tensor:
    """Logits [n, vocab] of the plain forward without a cache, with eager attention: the definition of right."""
    with attention_implementation(module, "eager"):
        return module(input_ids=torch.tensor([list(tokens)], device=device), use_cache=False).logits[0].float().cpu()


@torch.no_grad()
def appending_error(module: nn.Module, tokens: Sequence[int], device: torch.device) -> float:
    """How much the logits of a prefix change when the rest of the sequence is appended: 0 for a causal model."""
    half = len(tokens) // 2
    short, long = uncached_logits(module, tokens[:half], device), uncached_logits(module, tokens, device)
    return float((short - long[:half]).abs().max())


def replay(
    runner: Runner,
    sequences: Sequence[Sequence[int]],
    steps: Sequence[Sequence[tuple[int, int]]],
    *,
    block_tokens: int,
    num_blocks: int | None = None,
) -> list[torch.Tensor]:
    """Run given tokens through a runner, teacher-forced. Returns every sequence's logits [n, vocab].

    Blocks are dealt out in an order that is not ascending, so that a runner that ignores its block table is wrong.
    """
    done = [0] * len(sequences)
    logits: list[list[torch.Tensor]] = [[] for _ in sequences]
    needed = [-(-len(tokens) // block_tokens) for tokens in sequences]
    order = list(range(num_blocks if num_blocks is not None else sum(needed)))[::-1]
    tables = [[order.pop() if number % 2 else order.pop(0) for number in range(count)] for count in needed]
    for number, step in enumerate(steps):
        step = sorted(step, key=lambda part: part[1] != 1 or done[part[0]] == 0)  # decode sequences come first
        num_decode = sum(count == 1 and done[index] > 0 for index, count in step)
        parts = [(index, done[index], done[index] + count) for index, count in step]
        offsets = [0]
        for _, start, stop in parts:
            offsets.append(offsets[-1] + stop - start)
        batch = StepBatch(
            step=number,
            tokens=tuple(token for index, start, stop in parts for token in sequences[index][start:stop]),
            positions=tuple(position for _, start, stop in parts for position in range(start, stop)),
            query_offsets=tuple(offsets),
            context_lens=tuple(stop for _, _, stop in parts),
            slots=tuple(index for index, _, _ in parts),
            block_tables=tuple(tuple(tables[index][: -(-stop // block_tokens)]) for index, _, stop in parts),
            logit_rows=tuple(range(offsets[-1])),
            num_decode=num_decode,
        )
        result = runner.launch(batch).result()
        for (index, _, stop), first, last in zip(parts, offsets, offsets[1:], strict=False):
            logits[index].append(result[first:last])
            done[index] = stop
    return [torch.cat(parts) for parts in logits]


def schedule(whole_prompts: bool) -> list[list[tuple[int, int]]]:
    return [*(IN_ONE_PIECE if whole_prompts else IN_PIECES), *([[(i, 1) for i in range(len(PROMPTS))]] * (DECODED - 3))]


def proof_sequences(vocab_size: int, seed: int = 3) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    limit = min(vocab_size, 90)  # below the ids that small vocabularies keep for special tokens
    low = min(3, limit - 1)
    return [torch.randint(low, limit, (length + DECODED,), generator=generator).tolist() for length in PROMPTS]


@torch.no_grad()
def prove(make: Callable[[], Runner], tier: str, references: list[torch.Tensor], sequences: list[list[int]]) -> Proof:
    """Try one runner on a shrunken instance. Whatever it raises refutes it, with the reason kept for the report."""
    try:
        runner = make()
    except Exception as error:  # any failure of an untried architecture means "not this tier", never a crash
        return Proof(tier=tier, passed=False, max_error=float("inf"), reason=_describe(error))
    try:
        lengths = schedule(runner.whole_prompts)
        got = replay(runner, sequences, lengths, block_tokens=BLOCK_TOKENS)
    except Exception as error:
        return Proof(tier=tier, passed=False, max_error=float("inf"), reason=_describe(error))
    finally:
        runner.close()
    return judge(tier, got, references)


def judge(tier: str, got: list[torch.Tensor], references: list[torch.Tensor]) -> Proof:
    worst, where = 0.0, ""
    for index, (mine, reference) in enumerate(zip(got, references, strict=True)):
        difference = (mine - reference[: len(mine)]).abs().amax(-1)
        if not bool(torch.isfinite(difference).all()):
            return Proof(tier=tier, passed=False, max_error=float("inf"), reason=f"sequence {index}: a logit is not finite")
        if float(difference.max()) > worst:
            worst, where = float(difference.max()), f"sequence {index}, position {int(difference.argmax())}"
    passed = worst <= MAX_LOGIT_ERROR
    return Proof(
        tier=tier, passed=passed, max_error=worst, reason="" if passed else f"a logit differs by {worst:.2g} at {where}"
    )


def _describe(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:300]
