"""An engine without a model for tests of the server: what a request generates is its own prompt, then the end token.

So every test writes the token script it needs. With a seed the script starts at place `seed % length` and wraps around, so
that choices differ and can be repeated. Prompts that begin with one of the fault tokens misbehave. It has the methods of
`dayzero.runtime.engine.Engine` and counts blocks as that does. Factory: "tests.scripted_engine:make_engine".
"""

from __future__ import annotations

import math
import os
import time
from dataclasses import dataclass, field
from typing import Any

from dayzero.core.errors import DayZeroError
from dayzero.core.generation import EngineInfo, EngineStats, GenerationRequest, TokenOutput

VOCAB_SIZE = 400  # more than the tests' tokenizers have, as in most releases
EOS_ID = 1
BLOCK_TOKENS = 4
# First tokens of prompts that make the engine fail: beyond the tokenizers, so only id prompts have them.
FAIL_IN_ADD, FAIL_ALONE, CRASH, HANG, ENDLESS = 390, 391, 392, 393, 394


@dataclass(kw_only=True)
class _Sequence:
    request: GenerationRequest
    script: list[int]
    num_done: int = 0

    @property
    def num_blocks(self) -> int:
        return math.ceil((len(self.request.prompt_token_ids) + self.num_done) / BLOCK_TOKENS)


@dataclass(kw_only=True)
class ScriptedEngine:
    info: EngineInfo
    step_s: float
    tokens_per_step: int
    waiting: list[_Sequence] = field(default_factory=list)
    running: list[_Sequence] = field(default_factory=list)
    steps: int = 0
    tokens: int = 0
    prefilled: int = 0

    def add(self, request: GenerationRequest) -> None:
        prompt = request.prompt_token_ids
        if prompt[0] == FAIL_IN_ADD:
            raise RuntimeError("an unexpected failure in add")
        if len(prompt) + request.sampling.max_tokens > self.info.capacity_tokens:
            raise DayZeroError("it never fits", got=len(prompt), want=self.info.capacity_tokens)
        start = 0 if request.sampling.seed is None else request.sampling.seed % len(prompt)
        self.waiting.append(_Sequence(request=request, script=[*prompt[start:], *prompt[:start]]))

    def step(self) -> list[TokenOutput]:
        time.sleep(self.step_s)
        while self.waiting and len(self.running) < self.info.max_sequences:
            self.running.append(self.waiting.pop(0))
            self.prefilled += len(self.running[-1].request.prompt_token_ids)
        self.steps += 1
        outputs = [output for sequence in list(self.running) for output in self._tokens_of(sequence)]
        self.tokens += len(outputs)
        return outputs

    def _tokens_of(self, sequence: _Sequence) -> list[TokenOutput]:
        outputs: list[TokenOutput] = []
        while sequence in self.running and len(outputs) < self.tokens_per_step:
            outputs.append(self._next(sequence))
        return outputs

    def _next(self, sequence: _Sequence) -> TokenOutput:
        request, place = sequence.request, sequence.num_done
        fault, params = request.prompt_token_ids[0], request.sampling
        if fault == FAIL_ALONE and place == 2:
            self.running.remove(sequence)
            return TokenOutput(request_id=request.id, token_id=None, finish_reason="error", error="its logits are not finite")
        if fault == CRASH and place == 2:
            raise RuntimeError("a scripted crash in a step")
        if fault == HANG and place == 2:
            time.sleep(3600)
        if fault == ENDLESS:
            token = sequence.script[place % len(sequence.script)]
        else:
            token = sequence.script[place] if place < len(sequence.script) else EOS_ID
        sequence.num_done += 1
        ends = (token in params.stop_token_ids or (token in self.info.stop_token_ids and not params.ignore_eos)) and (
            place >= params.min_tokens
        )
        finish = "stop" if ends else "length" if sequence.num_done >= params.max_tokens else None
        if finish is not None:
            self.running.remove(sequence)
        return TokenOutput(
            request_id=request.id, token_id=token, finish_reason=finish, cached_tokens=len(request.prompt_token_ids) // 2,
            prompt_logprobs=self._prompt_logprobs(request) if place == 0 else (), **self._logprobs(params.top_logprobs, token),
        )  # fmt: skip

    def _logprobs(self, top: int | None, token: int) -> dict[str, Any]:
        """The chosen token, then its successors, of which every other one is impossible."""
        if top is None:
            return {}
        best = [((token + i) % VOCAB_SIZE, -math.inf if i % 2 else -0.25 * (i + 1)) for i in range(top)]
        return {"logprob": -0.25, "top_logprobs": tuple(best)}

    def _prompt_logprobs(self, request: GenerationRequest) -> tuple[float | None, ...]:
        if not request.sampling.prompt_logprobs:
            return ()
        return (None, *(-0.5 for _ in request.prompt_token_ids[1:]))

    def cancel(self, request_id: str) -> None:
        for queue in (self.waiting, self.running):
            queue[:] = [sequence for sequence in queue if sequence.request.id != request_id]

    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def stats(self) -> EngineStats:
        return EngineStats(
            waiting=len(self.waiting), running=len(self.running), blocks_total=self.info.num_blocks,
            blocks_referenced=sum(sequence.num_blocks for sequence in self.running), blocks_cached=0, steps=self.steps,
            prefill_tokens=self.prefilled, decode_tokens=self.tokens, reused_tokens=0, preemptions=0, step_seconds=0.0,
        )  # fmt: skip

    def reset_prefix_cache(self) -> None:
        if self.has_work():
            raise DayZeroError("the prefix cache is in use")

    def close(self) -> None:
        pass


def make_engine(
    *, step_s: float = 0.0, tokens_per_step: int = 1, context_tokens: int = 4096, capacity_tokens: int = 1 << 20,
    max_sequences: int = 4, load_s: float = 0.0, refuse: str = "", die_once_file: str = "",
) -> ScriptedEngine:  # fmt: skip
    """`refuse` makes it fail to load; while `die_once_file` exists, loading ends the process (and `load_s` comes first)."""
    time.sleep(load_s)
    if refuse:
        raise DayZeroError(refuse, got="a scripted refusal", want="weights", fix="try another model")
    if die_once_file and os.path.exists(die_once_file):
        os._exit(7)
    info = make_info(context_tokens=context_tokens, capacity_tokens=capacity_tokens, max_sequences=max_sequences)
    return ScriptedEngine(info=info, step_s=step_s, tokens_per_step=tokens_per_step)


def make_info(*, context_tokens: int = 4096, capacity_tokens: int = 1 << 20, max_sequences: int = 4) -> EngineInfo:
    return EngineInfo(
        model="scripted", tier="T2", tier_reasons=("it is scripted",), device="cpu", dtype="float32", instruction_set="none",
        vocab_size=VOCAB_SIZE, context_tokens=context_tokens, capacity_tokens=capacity_tokens, block_tokens=BLOCK_TOKENS,
        num_blocks=1 << 18, max_sequences=max_sequences, prefix_reuse=True, stop_token_ids=(EOS_ID,),
        towers_not_served=("vision",), batch_invariant=True, fallbacks=("it is scripted",),
    )  # fmt: skip
