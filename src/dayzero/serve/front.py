"""What the HTTP routes stand on: the state of one server, and the way of a generation request through it.

A request is read and checked, tokenised in a thread, handed to the engine, and answered whole or as a stream. Its resources
are freed on every way out. `Front` knows HTTP and asyncio, not uvicorn and not processes' lives (server.py).
"""

import asyncio
import itertools
import logging
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from dayzero.core.generation import EngineInfo
from dayzero.serve.answers import EarlyRefusal, EventStream, error_answer, json_answer, unless_gone, warning_headers
from dayzero.serve.body import parse_json, read_body
from dayzero.serve.chat import read_messages, read_template_arguments
from dayzero.serve.engine_link import EngineLink
from dayzero.serve.errors import ApiError, ClientGone, invalid, queue_full, unavailable
from dayzero.serve.generation import Generation
from dayzero.serve.metrics import Metrics
from dayzero.serve.requests import Endpoint, ParsedRequest, Prompt, finish, read_chat, read_completion, read_prompts
from dayzero.serve.responses import Responder, server_sent_event
from dayzero.serve.spec import ServerSpec
from dayzero.serve.template import TemplateRenderer
from dayzero.serve.text import TextCodec

log = logging.getLogger("dayzero.serve")

Parse = Callable[[dict[str, Any], EngineInfo], Awaitable[ParsedRequest]]
ID_PREFIX: dict[Endpoint, str] = {"completions": "cmpl", "chat/completions": "chatcmpl"}


class Front:
    def __init__(self, spec: ServerSpec, link: EngineLink) -> None:
        self.spec = spec
        self.link = link
        self.metrics = Metrics(link)
        self.codec: TextCodec | None = None
        self.renderer: TemplateRenderer | None = None
        self.is_draining = False
        self.is_started = False  # the tokenizer, if there is one, is loaded
        self.num_open = 0  # HTTP requests being answered
        self.created = int(time.time())
        self._numbers = itertools.count()
        self._stem = uuid.uuid4().hex[:12]  # ids never repeat, not over restarts either

    # -- state --------------------------------------------------------------------------------------------------

    @property
    def status(self) -> str:
        """ "ok", or why no request is taken: "draining", or the engine's state."""
        if self.is_draining:
            return "draining"
        if self.link.state != "ready":
            return self.link.state
        return "ok" if self.is_started else "loading"

    def available_info(self) -> EngineInfo:
        """Raises ApiError 503 saying why no request is taken now, or 429 when the queue is full."""
        if self.is_draining:
            raise unavailable("the server is shutting down", code="draining", retry_after_s=None)
        info = self.link.info
        if self.status != "ok" or info is None:
            raise unavailable(f"the engine is {self.status}", code=f"engine_{self.status}")
        if self.link.num_open >= self.max_open(info):
            raise queue_full(self.link.num_open)
        return info

    def max_open(self, info: EngineInfo) -> int:
        """Choices that may be open at once: those the engine runs and those that wait."""
        return info.max_sequences + self.spec.max_queue

    # -- parsing ------------------------------------------------------------------------------------------------

    async def parse_completion(self, body: dict[str, Any], info: EngineInfo) -> ParsedRequest:
        fields, options, echo = read_completion(body, info, self.spec.served_model_name)
        self._check_stops(options.stops)
        prompts = []
        for param, prompt in read_prompts(fields, info, max_prompts=self.max_open(info)):
            if isinstance(prompt, str):
                ids = await self._encode(prompt, add_special_tokens=True, param=param)
                prompts.append(Prompt(token_ids=ids, text=prompt, param=param))
            else:
                prompts.append(Prompt(token_ids=prompt, text=None, param=param))
        request = finish("completions", fields, options, prompts, info, echo=echo)
        return self._check_size(request, info)

    async def parse_chat(self, body: dict[str, Any], info: EngineInfo) -> ParsedRequest:
        fields, options = read_chat(body, info, self.spec.served_model_name)
        self._check_stops(options.stops)
        if self.codec is None:
            raise invalid("messages", "this server has no tokenizer: send token ids to /v1/completions", code="no_tokenizer")
        if self.renderer is None or self.codec.chat_template is None:
            raise invalid("messages", "this model has no chat template: use /v1/completions", code="no_chat_template")
        messages = read_messages(fields, self.codec.chat_template)
        text = await self.renderer.render(messages, read_template_arguments(fields))
        ids = await self._encode(text, add_special_tokens=False, param="messages")
        request = finish("chat/completions", fields, options, [Prompt(token_ids=ids, text=text, param="messages")], info)
        return self._check_size(request, info)

    def _check_stops(self, stops: tuple[str, ...]) -> None:
        if stops and self.codec is None:
            raise invalid("stop", "this server has no tokenizer: use stop_token_ids", code="no_tokenizer")

    async def _encode(self, text: str, *, add_special_tokens: bool, param: str) -> tuple[int, ...]:
        if self.codec is None:
            raise invalid(param, "this server has no tokenizer: send the prompt as token ids", code="no_tokenizer")
        return await asyncio.to_thread(self.codec.encode, text, add_special_tokens=add_special_tokens)

    def _check_size(self, request: ParsedRequest, info: EngineInfo) -> ParsedRequest:
        if request.num_choices > self.max_open(info):
            raise invalid("n", f"{request.num_choices} choices (prompts times n) are more than this server ever takes at once "
                               f"({self.max_open(info)})")  # fmt: skip
        return request

    # -- the way of a request -----------------------------------------------------------------------------------

    async def generate(self, request: Request, endpoint: Endpoint, parse: Parse) -> Response:
        """One generation request, answered. A stream is still running when this returns."""
        call = _Call(self, endpoint)
        has_body = False
        try:
            info = self.available_info()
            data = await read_body(request, max_bytes=self.spec.max_body_bytes, timeout_s=self.spec.body_timeout_s)
            has_body = True
            body = parse_json(data)
            return await unless_gone(request.receive, call.begin(body, info, parse))
        except ApiError as error:
            call.end(error)
            return error_answer(error) if has_body else EarlyRefusal(error)
        except ClientGone as error:
            call.end(error)
            return Response(status_code=499)  # never sent: nobody is there
        except BaseException as error:
            call.end(error)
            raise

    def next_id(self, endpoint: Endpoint) -> str:
        return f"{ID_PREFIX[endpoint]}-{self._stem}-{next(self._numbers)}"


class _Call:
    """One HTTP request from its arrival to its end, which is counted once."""

    def __init__(self, front: Front, endpoint: Endpoint) -> None:
        self._front = front
        self._endpoint = endpoint
        self._started = time.monotonic()
        self._generation: Generation | None = None
        self._failed_inside: ApiError | None = None  # an error sent as an event of a stream
        self._is_open = True
        front.num_open += 1
        front.metrics.open_requests.set(front.num_open)

    async def begin(self, body: dict[str, Any], info: EngineInfo, parse: Parse) -> Response:
        """Everything up to the whole answer, or up to the start of a stream."""
        front = self._front
        parsed = await parse(body, info)
        headers = warning_headers(parsed.ignored)
        self._generation = generation = Generation(
            id=front.next_id(self._endpoint), request=parsed, link=front.link, codec=front.codec, metrics=front.metrics,
            deadline=self._started + front.spec.request_timeout_s,
        )  # fmt: skip
        await generation.start(max_open=front.max_open(info))
        responder = Responder(generation, front.codec, model=front.spec.served_model_name, created=int(time.time()))
        if parsed.options.stream:
            return EventStream(self._events(generation, responder), ended=self._ended, headers=headers)
        async for piece in generation.pieces():
            responder.collect(piece)
        self.end(None)
        return json_answer(responder.whole(), headers=headers)

    async def _events(self, generation: Generation, responder: Responder) -> AsyncIterator[bytes]:
        """The stream; a failure is its last event."""
        try:
            async for piece in generation.pieces():
                for chunk in responder.chunks(piece):
                    yield server_sent_event(chunk)
        except ApiError as error:
            self._failed_inside = error
            yield server_sent_event(error.body())
            return
        if generation.request.options.include_usage:
            yield server_sent_event(responder.usage_chunk())
        yield server_sent_event(b"[DONE]")

    async def _ended(self, failure: BaseException | None) -> None:
        self.end(failure if failure is not None else self._failed_inside)

    def end(self, failure: BaseException | None) -> None:
        """Free everything and count how it ended. Only the first call counts."""
        if not self._is_open:
            return
        self._is_open = False
        front = self._front
        front.num_open -= 1
        front.metrics.open_requests.set(front.num_open)
        if self._generation is not None:
            self._generation.close()
        front.metrics.requests.labels(self._endpoint, _outcome(failure)).inc()
        if failure is None:
            front.metrics.request_s.labels(self._endpoint).observe(time.monotonic() - self._started)


def _outcome(failure: BaseException | None) -> str:
    match failure:
        case None:
            return "ok"
        case ClientGone():
            return "client_left"
        case ApiError(status=status):
            return "queue_full" if status == 429 else "refused" if status < 500 else "failed"
        case _:
            return "failed"
