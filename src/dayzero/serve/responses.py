"""A generation as OpenAI's JSON: whole answers and the chunks of a stream, for both endpoints.

Logprobs are of the model's raw distribution, before penalties, bias and temperature. JSON cannot hold infinities: a logprob
that is not finite, or below it, is FLOOR_LOGPROB.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from dayzero.serve.choice import Piece, TokenLogprob
from dayzero.serve.generation import Generation, token_text
from dayzero.serve.text import TextCodec

FLOOR_LOGPROB = -9999.0


def json_logprob(value: float | None) -> float | None:
    if value is None:
        return None
    return max(value, FLOOR_LOGPROB) if math.isfinite(value) else FLOOR_LOGPROB


def dump(data: Any) -> bytes:
    return json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode("utf-8")


def server_sent_event(data: Any) -> bytes:
    return b"data: " + (data if isinstance(data, bytes) else dump(data)) + b"\n\n"


@dataclass(kw_only=True, slots=True)
class _Collected:
    """The pieces of one choice put together."""

    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    last: Piece | None = None


class Responder:
    """Renders one generation. `created` is a Unix time in seconds."""

    def __init__(self, generation: Generation, codec: TextCodec | None, *, model: str, created: int) -> None:
        self._generation = generation
        self._request = generation.request
        self._codec = codec
        self._is_chat = self._request.endpoint == "chat/completions"
        self._base = {"id": generation.id, "created": created, "model": model}
        self._begun: set[int] = set()
        self._collected = [_Collected() for _ in generation.choices]

    # -- whole answers ------------------------------------------------------------------------------------------

    def collect(self, piece: Piece) -> None:
        collected = self._collected[piece.index]
        collected.text.append(piece.text)
        collected.token_ids.extend(piece.token_ids)
        collected.logprobs.extend(piece.logprobs)
        collected.last = piece

    def whole(self) -> dict[str, Any]:
        kind = "chat.completion" if self._is_chat else "text_completion"
        choices = [self._whole_choice(index, collected) for index, collected in enumerate(self._collected)]
        return self._base | {"object": kind, "choices": choices, "usage": self.usage()} | self._chat_prompt_ids()

    def _whole_choice(self, index: int, collected: _Collected) -> dict[str, Any]:
        text, logprobs = "".join(collected.text), tuple(collected.logprobs)
        assert collected.last is not None
        end = {"finish_reason": collected.last.finish_reason, "stop_reason": collected.last.stop_reason}
        ids = self._ids(index, collected.token_ids, begins=True)
        if self._is_chat:
            message = {"role": "assistant", "content": text, "refusal": None}
            return {"index": index, "message": message, "logprobs": self._logprobs(index, logprobs, begins=True)} | end | ids
        text = self._echo(index) + text
        return {"index": index, "text": text, "logprobs": self._logprobs(index, logprobs, begins=True)} | end | ids

    def usage(self) -> dict[str, Any]:
        prompt, generated = self._generation.prompt_tokens, self._generation.completion_tokens
        return {"prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated,
                "prompt_tokens_details": {"cached_tokens": self._generation.cached_tokens}}  # fmt: skip

    # -- streams ------------------------------------------------------------------------------------------------

    def chunks(self, piece: Piece) -> list[dict[str, Any]]:
        """The chunks for one piece; none for a token that shows nothing yet."""
        begins = piece.index not in self._begun
        self._begun.add(piece.index)
        options = self._request.options
        result = []
        if begins and self._is_chat:
            result.append(self._chunk({"index": piece.index, "delta": {"role": "assistant", "content": ""}, "logprobs": None,
                                       "finish_reason": None}) | self._chat_prompt_ids())  # fmt: skip
        text = (self._echo(piece.index) if begins else "") + piece.text
        wanted = options.return_token_ids or options.sampling.top_logprobs is not None
        if not (text or wanted or piece.finish_reason):
            return result
        choice: dict[str, Any] = {"index": piece.index, "logprobs": self._logprobs(piece.index, piece.logprobs, begins=begins),
                                  "finish_reason": piece.finish_reason}  # fmt: skip
        if piece.finish_reason is not None:
            choice["stop_reason"] = piece.stop_reason
        if self._is_chat:
            choice["delta"] = {"content": text} if text or not piece.finish_reason else {}
        else:
            choice["text"] = text
        return [*result, self._chunk(choice | self._ids(piece.index, piece.token_ids, begins=begins))]

    def usage_chunk(self) -> dict[str, Any]:
        return self._chunk() | {"choices": [], "usage": self.usage()}

    def _chunk(self, *choices: dict[str, Any]) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self._is_chat else "text_completion"
        usage = {"usage": None} if self._request.options.include_usage else {}
        return self._base | {"object": kind, "choices": list(choices)} | usage

    # -- parts of a choice --------------------------------------------------------------------------------------

    def _echo(self, index: int) -> str:
        return self._generation.echo_text(self._generation.prompt_of(index)) if self._request.echo else ""

    def _chat_prompt_ids(self) -> dict[str, Any]:
        """A chat has one prompt: its ids stand beside the choices, too, where other servers have them."""
        wanted = self._is_chat and self._request.options.return_token_ids
        return {"prompt_token_ids": list(self._request.prompts[0].token_ids)} if wanted else {}

    def _ids(self, index: int, token_ids: Sequence[int], *, begins: bool) -> dict[str, Any]:
        if not self._request.options.return_token_ids:
            return {}
        prompt = {"prompt_token_ids": list(self._generation.prompt_of(index).token_ids)} if begins else {}
        return prompt | {"token_ids": list(token_ids)}

    def _logprobs(self, index: int, entries: tuple[TokenLogprob, ...], *, begins: bool) -> dict[str, Any] | None:
        if self._request.options.sampling.top_logprobs is None:
            return None
        if self._is_chat:
            return {"content": [self._chat_logprob(entry) for entry in entries], "refusal": None}
        if begins:
            entries = self._generation.prompt_logprobs.get(index // self._request.options.n, ()) + entries
        return {
            "tokens": [token_text(self._codec, entry.token_id) for entry in entries],
            "token_logprobs": [json_logprob(entry.logprob) for entry in entries],
            "top_logprobs": [self._top_by_text(entry) for entry in entries],
            "text_offset": [entry.offset for entry in entries],
        }

    def _top(self, entry: TokenLogprob) -> tuple[tuple[int, float], ...]:
        """As many as were asked for."""
        return entry.top[: self._request.options.sampling.top_logprobs]

    def _top_by_text(self, entry: TokenLogprob) -> dict[str, float | None] | None:
        """The best tokens and the chosen one; a spelling that is taken already gives way to the token's id."""
        if entry.logprob is None:
            return None
        pairs = self._top(entry)
        if all(token_id != entry.token_id for token_id, _ in pairs):
            pairs += ((entry.token_id, entry.logprob),)
        result: dict[str, float | None] = {}
        for token_id, logprob in pairs:
            name = token_text(self._codec, token_id)
            result[f"token_id:{token_id}" if name in result else name] = json_logprob(logprob)
        return result

    def _chat_logprob(self, entry: TokenLogprob) -> dict[str, Any]:
        top = [self._chat_token(token_id, logprob) for token_id, logprob in self._top(entry)]
        return self._chat_token(entry.token_id, entry.logprob) | {"top_logprobs": top}

    def _chat_token(self, token_id: int, logprob: float | None) -> dict[str, Any]:
        data = None if self._codec is None else self._codec.token_bytes(token_id)
        return {"token": token_text(self._codec, token_id), "logprob": json_logprob(logprob),
                "bytes": None if data is None else list(data)}  # fmt: skip
