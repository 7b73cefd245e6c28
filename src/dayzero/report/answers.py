"""Timing of one streamed answer: server events with their arrival times go in, one `Answer` comes out.

Pure arithmetic, no clock and no socket, so that a known schedule gives known figures:

- TTFT runs from just before the connection is opened to the first event that carries text or token ids. An event with
  only a role, and a usage event, are not an answer.
- decode time runs from that event to the last one that carries text or token ids.
- TPOT = decode time / (completion tokens - tokens in the first such event). Completion tokens are the server's `usage`
  (token ids are counted where it sends none). Text is never tokenised again and events are never counted as tokens.

An answer without a token, one that only calls a tool and one that broke off have no TTFT; their outcome says so.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

# ok: complete and with content; empty: complete, nothing in it; tool_only: complete, nothing but tool calls;
# refused: 429 or 503; cancelled: this client left on purpose; failed: everything else.
Outcome = Literal["ok", "empty", "tool_only", "refused", "cancelled", "failed"]

HOW_TIMES = (
    "TTFT: from just before the connection is opened to the first event that carries text or token ids; an event with only "
    "a role never counts.",
    "TPOT: (arrival of the last event with text or token ids - arrival of the first) / (completion tokens in the server's "
    "usage - tokens in the first such event), per request.",
    "Failed and refused requests, answers without a token and answers that only call a tool are reported apart and are in "
    "no figure.",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """One request as its client saw it. `tokens_from` says where `completion_tokens` comes from, `first_tokens_known`
    whether the server told how many tokens its first event held (otherwise one is assumed)."""

    outcome: Outcome
    status: int
    started_s: float
    finished_s: float
    ttft_s: float | None = None
    decode_s: float | None = None
    completion_tokens: int = 0
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    first_tokens: int = 1
    first_tokens_known: bool = False
    tokens_from: Literal["usage", "token_ids", "nothing"] = "nothing"
    text: str = ""
    token_ids: tuple[int, ...] = ()
    finish_reason: str | None = None
    error: str = ""

    @property
    def tpot_s(self) -> float | None:
        """Seconds per token after the first event; None where there were none or nobody counted them."""
        if self.outcome != "ok" or self.decode_s is None or self.tokens_from == "nothing":
            return None
        later_tokens = self.completion_tokens - self.first_tokens
        return self.decode_s / later_tokens if later_tokens > 0 else None


@dataclass(slots=True)
class AnswerTimer:
    """Collects the events of one stream. `feed` takes each decoded `data:` object with the time its bytes arrived."""

    started_s: float
    first_s: float | None = None
    last_s: float | None = None
    first_tokens: int = 1
    first_tokens_known: bool = False
    usage: dict[str, Any] = field(default_factory=dict)
    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    tool_calls: bool = False
    finish_reason: str | None = None
    error: str = ""

    def feed(self, event: dict[str, Any], now_s: float) -> None:
        if event.get("error"):
            self.error = error_text(event)
            return
        usage = event.get("usage") or {}
        pieces: list[Any] = []
        ids: list[int] = []
        for choice in event.get("choices") or ():
            delta = choice.get("delta") or choice.get("message") or choice
            pieces += [delta.get(name) or "" for name in ("text", "content", "reasoning_content", "reasoning")]
            ids += choice.get("token_ids") or []
            self.tool_calls |= bool(delta.get("tool_calls") or delta.get("function_call"))
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
        text = "".join(piece for piece in pieces if isinstance(piece, str))
        if text or ids:
            self._content(now_s, len(ids) or _counted(event, usage))
            self.text.append(text)
            self.token_ids += ids
        self.usage = usage or self.usage

    def _content(self, now_s: float, num_tokens: int | None) -> None:
        self.last_s = now_s
        if self.first_s is None:
            self.first_s = now_s
            if num_tokens:
                self.first_tokens, self.first_tokens_known = num_tokens, True

    def finish(self, now_s: float, *, status: int, outcome: Outcome | None = None, error: str = "") -> Answer:
        """The answer as it stands at its end. `outcome` overrides what the events say (refused, cancelled, failed)."""
        error = error or self.error
        if outcome is None:
            outcome = self._outcome(error)
            if outcome == "failed" and not error:
                error = "the stream ended without a finish_reason"
        counted = self.usage.get("completion_tokens")
        ok = outcome == "ok" and self.first_s is not None and self.last_s is not None
        details = self.usage.get("prompt_tokens_details") or {}
        return Answer(
            outcome=outcome, status=status, started_s=self.started_s, finished_s=now_s, error=error,
            ttft_s=self.first_s - self.started_s if ok and self.first_s is not None else None,
            decode_s=self.last_s - self.first_s if ok and self.first_s is not None and self.last_s is not None else None,
            completion_tokens=counted if counted is not None else len(self.token_ids),
            tokens_from="usage" if counted is not None else "token_ids" if self.token_ids else "nothing",
            prompt_tokens=self.usage.get("prompt_tokens"), cached_tokens=details.get("cached_tokens"),
            first_tokens=self.first_tokens, first_tokens_known=self.first_tokens_known,
            text="".join(self.text), token_ids=tuple(self.token_ids), finish_reason=self.finish_reason,
        )  # fmt: skip

    def _outcome(self, error: str) -> Outcome:
        if error or self.finish_reason is None:
            return "failed"
        if self.finish_reason == "error":
            return "failed"
        if self.first_s is None:
            return "tool_only" if self.tool_calls else "empty"
        return "empty" if self.usage.get("completion_tokens") == 0 else "ok"


def _counted(event: dict[str, Any], usage: dict[str, Any]) -> int | None:
    """Tokens of one event where the server tells: running usage in each event, or logprobs per token."""
    if usage.get("completion_tokens"):
        return int(usage["completion_tokens"])
    for choice in event.get("choices") or ():
        logprobs = choice.get("logprobs") or {}
        for tokens in (logprobs.get("tokens"), logprobs.get("content")):
            if tokens:
                return len(tokens)
    return None


def error_text(reply: Any) -> str:
    """The message of an OpenAI-shaped error object, or the reply itself where it has another shape."""
    error = reply.get("error", reply) if isinstance(reply, dict) else reply
    message = error.get("message") if isinstance(error, dict) else None
    return str(message if message else error)[:500]
