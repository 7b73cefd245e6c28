"""The engine: requests in, tokens out, one model step a call. Used by the server's engine process and in-process alike.

    schedule -> run -> sample -> commit

Token ids only; text, stop strings and HTTP are the front's. Not thread-safe: one thread calls all methods.
"""

import os
import time

import torch

from dayzero.core.generation import EngineInfo, EngineStats, FinishReason, GenerationRequest, TokenOutput
from dayzero.runtime.blocks import BlockPool
from dayzero.runtime.runner import Runner
from dayzero.runtime.sampler import sample, token_logprob
from dayzero.runtime.scheduler import Scheduled, Scheduler, SchedulerLimits, Sequence


class Engine:
    """Continuous batching over a proven runner. Build one with `runtime.load.load_engine`."""

    def __init__(self, runner: Runner, info: EngineInfo, *, chunk_tokens: int) -> None:
        self.runner, self.info = runner, info
        pool = BlockPool(info.num_blocks, info.block_tokens, prefix_reuse=info.prefix_reuse)
        limits = SchedulerLimits(
            max_sequences=info.max_sequences,
            context_tokens=info.context_tokens,
            chunk_tokens=None if runner.whole_prompts else chunk_tokens,
            step_tokens=chunk_tokens + info.max_sequences,
            exact_reuse=info.exact_reuse,
        )
        self.scheduler = Scheduler(pool, limits)
        self._stop_ids = frozenset(info.stop_token_ids)
        self._prefill_tokens = self._decode_tokens = self._steps = 0
        self._seconds = 0.0

    def add(self, request: GenerationRequest) -> None:
        """Queue a request. Raises DayZeroError when it can never fit; ids must be unique among open requests."""
        assert self.scheduler.find(request.id) is None, f"request {request.id} is already open"
        seed = request.sampling.seed
        self.scheduler.add(request, int.from_bytes(os.urandom(8), "little") if seed is None else seed)

    def cancel(self, request_id: str) -> None:
        """End a request and free what it holds. Unknown and finished ids are fine: clients leave at any time."""
        sequence = self.scheduler.find(request_id)
        if sequence is not None:
            self.scheduler.finish(sequence)

    def has_work(self) -> bool:
        return bool(self.scheduler.waiting or self.scheduler.running)

    @torch.no_grad()
    def step(self) -> list[TokenOutput]:
        """One model step: the new tokens of every sequence that got one. Empty when idle or mid-prefill."""
        started = time.perf_counter()
        scheduled = self.scheduler.schedule()
        if scheduled is None:
            return []
        logits = self.runner.launch(scheduled.batch).result()
        self.scheduler.commit(scheduled)
        outputs = self._sample(scheduled, logits)
        self._steps += 1
        self._decode_tokens += scheduled.batch.num_decode
        self._prefill_tokens += len(scheduled.batch.tokens) - scheduled.batch.num_decode
        self._seconds += time.perf_counter() - started
        return outputs

    def stats(self) -> EngineStats:
        pool = self.scheduler.pool
        return EngineStats(
            waiting=len(self.scheduler.waiting),
            running=len(self.scheduler.running),
            blocks_total=pool.num_blocks,
            blocks_referenced=pool.num_referenced,
            blocks_cached=pool.num_cached,
            steps=self._steps,
            prefill_tokens=self._prefill_tokens,
            decode_tokens=self._decode_tokens,
            reused_tokens=self.scheduler.reused_tokens,
            preemptions=self.scheduler.preemptions,
            step_seconds=self._seconds,
        )

    def reset_prefix_cache(self) -> None:
        self.scheduler.pool.reset_cached()

    def close(self) -> None:
        self.runner.close()

    def _sample(self, scheduled: Scheduled, logits: torch.Tensor) -> list[TokenOutput]:
        outputs = []
        rows = zip(scheduled.batch.logit_rows, scheduled.row_owners, logits, strict=True)
        for row, sequence, row_logits in rows:
            position = scheduled.batch.positions[row]
            if position + 1 < sequence.num_prompt:
                self._note_prompt_logprob(sequence, position, row_logits)
            else:
                outputs.append(self._next_token(sequence, row_logits))
        return outputs

    def _note_prompt_logprob(self, sequence: Sequence, position: int, row_logits: torch.Tensor) -> None:
        if len(sequence.prompt_logprobs) == position + 1:  # a preempted prompt is computed twice, noted once
            sequence.prompt_logprobs.append(token_logprob(row_logits, sequence.tokens[position + 1]))

    def _next_token(self, sequence: Sequence, row_logits: torch.Tensor) -> TokenOutput:
        request, params, output = sequence.request, sequence.request.sampling, sequence.output
        stops = set(params.stop_token_ids) | (set() if params.ignore_eos else self._stop_ids)
        forbidden = tuple(stops) if len(output) < params.min_tokens else ()
        if self.info.sampled_tokens < len(row_logits):  # padding of the embedding: no draw and no log-probability
            row_logits = row_logits.clone()
            row_logits[self.info.sampled_tokens :] = float("-inf")
        try:
            drawn = sample(row_logits, params, sequence.seed, sequence.tokens[: sequence.num_prompt], output, forbidden)
        except FloatingPointError as error:  # this request fails alone: its row is poisoned, its neighbours' are not
            self.scheduler.distrust(sequence)
            self.scheduler.finish(sequence)
            return TokenOutput(request_id=request.id, token_id=None, finish_reason="error", error=str(error))
        sequence.tokens.append(drawn.token_id)
        reason: FinishReason | None = (
            "stop" if drawn.token_id in stops else "length" if len(output) + 1 >= params.max_tokens else None
        )
        if reason is not None:
            self.scheduler.finish(sequence)
        return TokenOutput(
            request_id=request.id,
            token_id=drawn.token_id,
            finish_reason=reason,
            logprob=drawn.logprob,
            top_logprobs=drawn.top_logprobs,
            cached_tokens=sequence.reused_tokens,
            prompt_logprobs=tuple(sequence.prompt_logprobs) if not output else (),
        )
