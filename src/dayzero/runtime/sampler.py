"""From logits to tokens. In: one float32 row per wanted token and its request's settings. Out: token ids, logprobs.

Each row is treated by itself, so a request's draw never depends on who shares the batch. The random number of a draw
comes from a counter-based generator keyed by (seed, position in the output): nothing to save, nothing to disturb.
"""

from dataclasses import dataclass

import numpy as np
import torch

from dayzero.core.generation import SamplingParams


@dataclass(frozen=True, kw_only=True, slots=True)
class Drawn:
    token_id: int
    logprob: float | None
    top_logprobs: tuple[tuple[int, float], ...]


def uniform(seed: int, position: int) -> float:
    """The random number in [0, 1) of draw `position` under `seed` (Philox, Salmon et al. 2011)."""
    return float(np.random.Generator(np.random.Philox(key=seed & (2**64 - 1), counter=position)).random())


def sample(
    logits: torch.Tensor,
    params: SamplingParams,
    seed: int,
    prompt: list[int],
    output: list[int],
    forbidden: tuple[int, ...] = (),
) -> Drawn:
    """Draw one token from `logits` [vocab] (float32). `forbidden` ids get no probability (stop tokens before min_tokens).

    Raises FloatingPointError when the logits hold a NaN or +Inf: such a row must never become a token.
    """
    if not bool((logits < float("inf")).all()):  # NaN compares false as well
        raise FloatingPointError("the model returned a NaN or infinite logit")
    raw = logits
    logits = _adjust(logits, params, prompt, output, forbidden)
    token_id = int(logits.argmax()) if params.temperature == 0 else _draw(logits, params, uniform(seed, len(output)))
    if params.top_logprobs is None:
        return Drawn(token_id=token_id, logprob=None, top_logprobs=())
    return _with_logprobs(raw, token_id, params.top_logprobs)


def _with_logprobs(raw: torch.Tensor, token_id: int, count: int) -> Drawn:
    logprobs = torch.log_softmax(raw, -1)
    values, ids = logprobs.topk(min(count, int(logprobs.isfinite().sum())))  # ids that cannot be drawn have none
    pairs = tuple(zip(ids.tolist(), values.tolist(), strict=True))
    return Drawn(token_id=token_id, logprob=float(logprobs[token_id]), top_logprobs=pairs)


def token_logprob(logits: torch.Tensor, token_id: int) -> float:
    """Log-probability of a given token, for prompt logprobs."""
    return float(torch.log_softmax(logits, -1)[token_id])


def _adjust(
    logits: torch.Tensor, params: SamplingParams, prompt: list[int], output: list[int], forbidden: tuple[int, ...]
) -> torch.Tensor:
    """Penalties, then logit bias, then forbidden tokens. Returns the input itself where nothing applies."""
    penalised = params.repetition_penalty != 1 or params.presence_penalty or params.frequency_penalty
    if not (penalised or params.logit_bias or forbidden):
        return logits
    logits = logits.clone()
    if params.repetition_penalty != 1:  # Keskar et al. 2019: over prompt and output
        seen = torch.tensor(sorted(set(prompt) | set(output)), device=logits.device)
        values = logits[seen]
        logits[seen] = torch.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
    if output and (params.presence_penalty or params.frequency_penalty):  # over the output only, as OpenAI defines them
        ids, counts = torch.tensor(output, device=logits.device).unique(return_counts=True)
        logits[ids] -= params.presence_penalty + params.frequency_penalty * counts.to(logits.dtype)
    for token_id, bias in params.logit_bias.items():
        logits[token_id] += bias
    if forbidden:
        logits[list(forbidden)] = float("-inf")
    return logits


def _draw(logits: torch.Tensor, params: SamplingParams, random: float) -> int:
    """Inverse-CDF draw in float64 over what temperature, top-k, top-p and min-p leave."""
    scaled = logits.double() / params.temperature
    count = params.top_k if 0 < params.top_k < scaled.numel() else scaled.numel()
    narrowed = count < scaled.numel() or params.top_p < 1
    if narrowed:
        scaled, ids = scaled.topk(count)  # sorted, best first
    probabilities = torch.softmax(scaled, -1)
    keep = probabilities > 0  # what cannot be drawn is not drawn by rounding either
    if params.top_p < 1:  # the smallest set of best tokens that reaches top_p; the best one always stays
        keep &= probabilities.cumsum(-1) - probabilities < params.top_p
    if params.min_p > 0:
        keep &= probabilities >= params.min_p * probabilities.max()
    cumulative = torch.where(keep, probabilities, 0).cumsum(-1)
    index = int(torch.searchsorted(cumulative, random * float(cumulative[-1]), right=True))
    index = min(index, int(keep.nonzero()[-1]))  # rounding at the far end
    return int(ids[index]) if narrowed else index
