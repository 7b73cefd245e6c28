"""ASGI responses that notice when the client leaves: a whole JSON answer, a stream of server-sent events, a refusal."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from dayzero.serve.body import discard_rest
from dayzero.serve.errors import ApiError, ClientGone
from dayzero.serve.responses import dump

T = TypeVar("T")

SEND_TIMEOUT_S = 60.0  # a client that takes nothing for so long is gone
MAX_WARNED_FIELDS, MAX_WARNED_CHARS = 10, 60


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Run `work`; cancel it and raise ClientGone as soon as the client disconnects. The body must have been read."""
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_until_disconnect(receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientGone
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _until_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def warning_headers(ignored: tuple[str, ...]) -> dict[str, str]:
    """`x-dayzero-warning: ignored fields: a, b`, in plain ASCII whatever a client called its fields."""
    if not ignored:
        return {}
    names = ["".join(char if char.isascii() and char.isprintable() else "?" for char in name[:MAX_WARNED_CHARS])
             for name in ignored[:MAX_WARNED_FIELDS]]  # fmt: skip
    more = f" and {len(ignored) - MAX_WARNED_FIELDS} more" if len(ignored) > MAX_WARNED_FIELDS else ""
    return {"x-dayzero-warning": f"ignored fields: {', '.join(names)}{more}"}


def json_answer(data: Any, *, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(dump(data), status_code=status, headers=headers, media_type="application/json")


def error_answer(error: ApiError) -> Response:
    return json_answer(error.body(), status=error.status, headers=error.headers())


class EarlyRefusal(Response):
    """An error sent before the body was read: the answer goes out at once, then what still comes is thrown away."""

    def __init__(self, error: ApiError) -> None:
        super().__init__(dump(error.body()), status_code=error.status, media_type="application/json",
                         headers=error.headers() | {"connection": "close"})  # fmt: skip

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self.body, "more_body": True})
        await discard_rest(Request(scope, receive))
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class EventStream(Response):
    """Server-sent events. `ended` is told how it went: None, or what stopped it (ClientGone, ...); it always runs."""

    media_type = "text/event-stream"

    def __init__(
        self, events: AsyncIterator[bytes], *, ended: Callable[[BaseException | None], Awaitable[None]], headers: dict[str, str]
    ) -> None:
        self._events = events
        self._ended = ended
        self.status_code = 200
        self.background = None
        self.init_headers(headers | {"cache-control": "no-cache", "x-accel-buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        failure: BaseException | None = None
        try:
            await unless_gone(receive, self._send_all(send))
        except ClientGone as error:
            failure = error  # nobody is left to be told
        except BaseException as error:
            failure = error
            raise
        finally:
            await self._ended(failure)

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async for event in self._events:
            try:
                async with asyncio.timeout(SEND_TIMEOUT_S):
                    await send({"type": "http.response.body", "body": event, "more_body": True})
            except TimeoutError:
                raise ClientGone from None
        await send({"type": "http.response.body", "body": b"", "more_body": False})
