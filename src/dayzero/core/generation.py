"""A request to the engine and what comes back, in token ids only: text belongs to the HTTP front."""

from dataclasses import dataclass, field
from typing import Literal

from dayzero.core.errors import DayZeroError
from dayzero.core.records import STRICT

FinishReason = Literal["stop", "length", "cancelled", "error"]

MAX_TOP_LOGPROBS = 20


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How tokens are drawn. temperature 0 is greedy; None or neutral values switch a filter off.

    Order: penalties, logit bias, temperature, top-k, top-p, min-p. Logprobs are of the raw model distribution (before
    penalties, bias and temperature). With a seed the draw depends on (seed, position in the output) and the logits
    alone, never on other requests.
    """

    __pydantic_config__ = STRICT
    max_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    logit_bias: dict[int, float] = field(default_factory=dict)
    top_logprobs: int | None = None  # None: no logprobs; 0: the chosen token's only
    prompt_logprobs: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationRequest:
    id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams

    def __post_init__(self) -> None:
        if not self.prompt_token_ids:
            raise DayZeroError("the prompt is empty", got="0 tokens", want="at least one token", fix="send a prompt")


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenOutput:
    """One token of one request, or its end. The stop token itself is reported with `finish_reason="stop"` and is not
    part of the text. `error` explains `finish_reason="error"`."""

    request_id: str
    token_id: int | None
    finish_reason: FinishReason | None = None
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()
    cached_tokens: int = 0
    error: str | None = None
    prompt_logprobs: tuple[float | None, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineInfo:
    """What a loaded engine can do; the server's `/v1/models` shows it."""

    __pydantic_config__ = STRICT
    model: str
    tier: Literal["T0", "T1", "T2"]
    tier_reasons: tuple[str, ...]
    device: str
    dtype: str
    instruction_set: str
    vocab_size: int
    context_tokens: int
    capacity_tokens: int  # largest prompt + output one request may have in the whole pool
    block_tokens: int
    num_blocks: int
    max_sequences: int
    prefix_reuse: bool
    # A prefix is reused only where computing it would give the same bits: always in float32's sense of equal, and in whole
    # pieces of a prompt in dtypes that round more.
    exact_reuse: bool = False
    # Whether a request's numbers are the same bits whoever else is running.
    batch_invariant: bool = False
    fallbacks: tuple[str, ...] = ()  # each in plain words
    stop_token_ids: tuple[int, ...] = ()
    towers_not_served: tuple[str, ...] = ()
    # Ids that the tokenizer has, where that is known: rows of the embedding beyond them are padding and never sampled.
    known_tokens: int | None = None

    @property
    def sampled_tokens(self) -> int:
        """Ids from 0 to one less than this can be answered."""
        return self.vocab_size if self.known_tokens is None else min(self.known_tokens, self.vocab_size)


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineStats:
    """Gauges of a running engine. `blocks_referenced` must be 0 when idle."""

    __pydantic_config__ = STRICT
    waiting: int
    running: int
    blocks_total: int
    blocks_referenced: int
    blocks_cached: int
    steps: int
    prefill_tokens: int
    decode_tokens: int
    reused_tokens: int
    preemptions: int
    step_seconds: float
