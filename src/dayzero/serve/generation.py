"""One HTTP request as it runs: its choices, their requests to the engine, and the pieces that come back.

In: a ParsedRequest. Out: `pieces()`, and the token counts for `usage`. Whatever ends it (the last token, an error, a client
that leaves), `close()` frees all that the engine still holds for it. It knows no JSON and no sockets.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import replace

from dayzero.core.generation import GenerationRequest, TokenOutput
from dayzero.serve.choice import Choice, Piece, TokenLogprob
from dayzero.serve.detokenize import Detokenizer
from dayzero.serve.engine_link import EngineGone, EngineLink, RequestEvent
from dayzero.serve.errors import ApiError, from_dayzero_error, queue_full, unavailable
from dayzero.serve.metrics import Metrics
from dayzero.serve.requests import ParsedRequest, Prompt, derived_seed
from dayzero.serve.text import TextCodec
from dayzero.serve.wire import Accepted, Refused


class Generation:
    """`id` names the request; the engine's requests are "id:0", "id:1", ... one per choice. `deadline` is a time of
    `time.monotonic`."""

    def __init__(
        self, *, id: str, request: ParsedRequest, link: EngineLink, codec: TextCodec | None, metrics: Metrics,
        deadline: float,
    ) -> None:  # fmt: skip
        self.id = id
        self.request = request
        self._link = link
        self._metrics = metrics
        self._deadline = deadline
        self._codec = codec
        n = request.options.n
        self.choices = [self._make_choice(index, request.prompts[index // n]) for index in range(request.num_choices)]
        self._engine_ids = {f"{id}:{index}": index for index in range(request.num_choices)}
        self._accepted = False
        self._early: list[TokenOutput] = []
        self.prompt_logprobs: dict[int, tuple[TokenLogprob, ...]] = {}
        self.cached_tokens = 0
        self._started = time.monotonic()
        self._first_token_at: dict[int, float] = {}

    def _make_choice(self, index: int, prompt: Prompt) -> Choice:
        options, codec = self.request.options, self._codec
        # A chat answer is a text of its own; a completion goes on from its prompt.
        continues = (codec is not None and self.request.endpoint == "completions"
                     and not all(codec.is_hidden(token_id) for token_id in prompt.token_ids))  # fmt: skip
        return Choice(
            index=index, codec=codec, stops=options.stops, include_stop=options.include_stop,
            min_tokens=options.sampling.min_tokens, continues=continues,
            wants_logprobs=options.sampling.top_logprobs is not None,
            text_before=len(self.echo_text(prompt)) if self.request.echo else 0,
        )  # fmt: skip

    def prompt_of(self, index: int) -> Prompt:
        return self.request.prompts[index // self.request.options.n]

    def echo_text(self, prompt: Prompt) -> str:
        """The prompt as it is repeated before the answer."""
        if prompt.text is not None:
            return prompt.text
        return "" if self._codec is None else self._codec.decode_visible(prompt.token_ids)

    @property
    def prompt_tokens(self) -> int:
        """Each prompt once, however many choices it has."""
        return sum(len(prompt.token_ids) for prompt in self.request.prompts)

    @property
    def completion_tokens(self) -> int:
        return 0 if self.request.score_only else sum(choice.num_tokens for choice in self.choices)

    async def start(self, *, max_open: int) -> None:
        """Hand all choices to the engine and wait until it has accepted each. Raises ApiError when it does not, when it is
        not there, or when more than `max_open` choices would be open."""
        if self._link.state != "ready":
            raise unavailable("the engine is not there at the moment", code="engine_gone")
        if self._link.num_open + len(self.choices) > max_open:
            raise queue_full(self._link.num_open)
        self._subscription = self._link.submit([self._engine_request(index) for index in range(len(self.choices))])
        waiting = len(self.choices)
        while waiting:
            event = await self._next_event()
            if isinstance(event, TokenOutput):
                self._early.append(event)
            else:
                self._raise_if_failed(event)
                waiting -= 1
        self._accepted = True

    async def _next_event(self) -> RequestEvent:
        try:
            async with asyncio.timeout(self._deadline - time.monotonic()):
                return await self._subscription.events.get()
        except TimeoutError:
            message = "the request took longer than this server allows"
            raise ApiError(504, message, code="timeout", type="server_error") from None

    def _engine_request(self, index: int) -> GenerationRequest:
        options = self.request.options
        prompt_index = index // options.n
        seed = options.sampling.seed
        sampling = replace(
            options.sampling,
            max_tokens=self.request.budgets[prompt_index],
            seed=None if seed is None else derived_seed(seed, index),
            prompt_logprobs=options.sampling.prompt_logprobs and index % options.n == 0,
        )
        prompt = self.request.prompts[prompt_index]
        return GenerationRequest(id=f"{self.id}:{index}", prompt_token_ids=prompt.token_ids, sampling=sampling)

    def _raise_if_failed(self, event: RequestEvent) -> None:
        match event:
            case Refused(error=error, internal=internal):
                if error is not None:
                    raise from_dayzero_error(error, "prompt")
                raise ApiError(500, f"the engine failed on this request: {internal}", code="engine_error", type="server_error")
            case EngineGone(reason=reason):
                raise unavailable(f"the request was cut off: {reason}", code="engine_gone")
            case TokenOutput(finish_reason="error" | "cancelled" as finish, error=error):
                raise ApiError(500, f"the engine ended this request: {error or finish}", code="engine_error",
                               type="server_error")  # fmt: skip

    async def pieces(self) -> AsyncIterator[Piece]:
        """All pieces of all choices as they come. Ends when each choice has finished. Raises ApiError on a failure."""
        for output in self._early:
            self._raise_if_failed(output)
            if (piece := self._take(output)) is not None:
                yield piece
        while not all(choice.finished for choice in self.choices):
            event = await self._next_event()
            self._raise_if_failed(event)
            assert not isinstance(event, (Accepted, Refused, EngineGone)), event
            if (piece := self._take(event)) is not None:
                yield piece

    def _take(self, output: TokenOutput) -> Piece | None:
        index = self._engine_ids[output.request_id]
        choice = self.choices[index]
        if choice.finished:
            return None  # generated before the engine heard that a stop string had ended it
        now = time.monotonic()
        if index not in self._first_token_at:
            self._first_token_at[index] = now
            self._metrics.ttft_s.observe(now - self._started)
            if index % self.request.options.n == 0:
                self.cached_tokens += output.cached_tokens
                self._keep_prompt_logprobs(index, output)
        piece = choice.feed(output)
        if choice.finished:
            if choice.stopped_by_text:
                self._link.cancel([output.request_id])
            if choice.num_tokens > 1:
                self._metrics.tpot_s.observe((now - self._first_token_at[index]) / (choice.num_tokens - 1))
        if self.request.score_only:
            return replace(piece, text="", token_ids=(), logprobs=(), finish_reason="length", stop_reason=None)
        return piece

    def _keep_prompt_logprobs(self, index: int, output: TokenOutput) -> None:
        """Logprobs of the prompt's tokens, for all choices of the prompt."""
        if not self.request.options.sampling.prompt_logprobs:
            return
        ids = self.prompt_of(index).token_ids
        if len(output.prompt_logprobs) != len(ids):
            raise ApiError(500, f"the engine gave {len(output.prompt_logprobs)} prompt logprobs for {len(ids)} tokens",
                           code="engine_error", type="server_error")  # fmt: skip
        detokenizer = None if self._codec is None else Detokenizer(self._codec, continues=False)
        entries, offset = [], 0
        for token_id, logprob in zip(ids, output.prompt_logprobs, strict=True):
            top = () if logprob is None else ((token_id, logprob),)
            entries.append(TokenLogprob(token_id=token_id, logprob=logprob, top=top, offset=offset))
            offset += 0 if detokenizer is None else len(detokenizer.push(token_id))
        self.prompt_logprobs[index // self.request.options.n] = tuple(entries)

    def close(self) -> None:
        """Free what is still open in the engine. Harmless when all is done."""
        self._link.cancel(self._engine_ids)
        if not self._accepted:
            return
        self._metrics.prompt_tokens.inc(self.prompt_tokens)
        self._metrics.cached_tokens.inc(self.cached_tokens)
        self._metrics.generated_tokens.inc(self.completion_tokens)


def token_text(codec: TextCodec | None, token_id: int) -> str:
    """One token as text, for logprobs: "bytes:\\xe2\\x82" where it is not whole characters, "token_id:7" where it has none."""
    data = None if codec is None else codec.token_bytes(token_id)
    if data is None:
        return f"token_id:{token_id}"
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
