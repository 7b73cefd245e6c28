"""One choice of a request: the engine's tokens in, pieces of text with their ids and logprobs out.

The same state serves streamed and whole answers, so that both are equal: the whole text is the pieces joined. Every
generated token counts (usage, token_ids, logprobs), the end token and those of a matched stop string included; the end
token has no text. A stop string is looked for in the text after the first `min_tokens` tokens.
"""

from dataclasses import dataclass
from typing import Literal

from dayzero.core.generation import TokenOutput
from dayzero.serve.detokenize import Detokenizer
from dayzero.serve.stop_strings import StopMatcher
from dayzero.serve.text import TextCodec


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenLogprob:
    """Logprob of one token and of the best ones in its place, best first. None: it has none (the first prompt token).
    `offset`: characters of text before it."""

    token_id: int
    logprob: float | None
    top: tuple[tuple[int, float], ...]
    offset: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """What one engine output adds to a choice. `finish_reason` is set on its last piece."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    finish_reason: Literal["stop", "length"] | None = None
    stop_reason: str | int | None = None  # the stop string or the token that ended it, where one did


class Choice:
    def __init__(
        self,
        *,
        index: int,
        codec: TextCodec | None,
        stops: tuple[str, ...],
        include_stop: bool,
        min_tokens: int,
        continues: bool,
        wants_logprobs: bool,
        text_before: int = 0,
    ) -> None:
        assert codec is not None or not stops, "stop strings need a tokenizer"
        self.index = index
        self._detokenizer = None if codec is None else Detokenizer(codec, continues=continues)
        self._stops = StopMatcher(stops, include=include_stop)
        self._min_tokens = min_tokens
        self._wants_logprobs = wants_logprobs
        self._offset = text_before
        self.num_tokens = 0
        self.finished = False
        self.stopped_by_text = False

    def feed(self, output: TokenOutput) -> Piece:
        """The next output of the engine (not an error and not a cancellation)."""
        assert not self.finished, self.index
        assert output.finish_reason in (None, "stop", "length"), output
        ids = () if output.token_id is None else (output.token_id,)
        self.num_tokens += len(ids)
        logprobs = self._logprobs(output)
        text = "" if output.finish_reason == "stop" else self._decode(ids)
        finish: Literal["stop", "length"] | None = output.finish_reason
        stop_reason: str | int | None = output.token_id if finish == "stop" else None
        if finish is not None and self._stops.matched is None:
            text += self._flush()
        if self._stops.matched is not None:
            self.stopped_by_text = output.finish_reason is None
            finish, stop_reason = "stop", self._stops.matched
        self.finished = finish is not None
        return Piece(
            index=self.index, text=text, token_ids=ids, logprobs=logprobs, finish_reason=finish, stop_reason=stop_reason
        )

    def _decode(self, ids: tuple[int, ...]) -> str:
        if self._detokenizer is None:
            return ""
        text = self._detokenizer.push_all(ids)
        self._offset += len(text)
        return self._stops.pass_through(text) if self.num_tokens <= self._min_tokens else self._stops.push(text)

    def _flush(self) -> str:
        if self._detokenizer is None:
            return ""
        rest = self._detokenizer.flush()
        if self.num_tokens <= self._min_tokens:
            return self._stops.pass_through(rest)
        return self._stops.push(rest) + self._stops.flush()

    def _logprobs(self, output: TokenOutput) -> tuple[TokenLogprob, ...]:
        if not self._wants_logprobs or output.token_id is None:
            return ()
        top = tuple(sorted(output.top_logprobs, key=lambda pair: -pair[1]))
        return (TokenLogprob(token_id=output.token_id, logprob=output.logprob, top=top, offset=self._offset),)
