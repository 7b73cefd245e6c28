"""The body of a request: bounded in size and time, JSON, an object. Nothing beyond the limit is kept in memory."""

import asyncio
import json
import time
from typing import Any, NoReturn

from starlette.requests import Request
from starlette.types import Message

from dayzero.serve.errors import ApiError, ClientGone, invalid, quote

# After a refusal the rest of a body is read and thrown away, so far and so long: closing at once would reset the connection
# and take the answer with it.
LINGER_BYTES = 1 << 28
LINGER_S = 5.0


def _too_large(max_bytes: int) -> ApiError:
    return ApiError(413, f"the body has more than {max_bytes} bytes", code="body_too_large")


def check_content_type(request: Request) -> None:
    kind = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(400, f"the content type must be application/json, not {quote(kind)}", code="unsupported_media_type")


async def read_body(request: Request, *, max_bytes: int, timeout_s: float) -> bytes:
    """Raises ApiError 413, 408 or 400, or ClientGone."""
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared[:20]) > max_bytes:
        raise _too_large(max_bytes)
    check_content_type(request)
    try:
        async with asyncio.timeout(timeout_s):
            return await _read(request, max_bytes)
    except TimeoutError:
        raise ApiError(408, f"the body did not arrive within {timeout_s:g} s", code="timeout") from None


async def _read(request: Request, max_bytes: int) -> bytes:
    data = bytearray()
    more = True
    while more:
        message: Message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        data += message.get("body", b"")
        more = message.get("more_body", False)
        if len(data) > max_bytes:
            raise _too_large(max_bytes)
    return bytes(data)


def parse_json(data: bytes) -> dict[str, Any]:
    try:
        body = json.loads(data.decode("utf-8"), parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        raise invalid(None, f"the body is not UTF-8: {error.reason} at byte {error.start}", code="invalid_json") from None
    except RecursionError:
        raise invalid(None, "the body is nested too deeply", code="invalid_json") from None
    except ValueError as error:
        raise invalid(None, f"the body is not JSON: {str(error)[:200]}", code="invalid_json") from None
    if not isinstance(body, dict):
        raise invalid(None, f"the body must be a JSON object, not {quote(body)}", code="invalid_json")
    return body


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


async def discard_rest(request: Request) -> None:
    """Read on after a refusal, until the body or the client's patience ends."""
    num_bytes, deadline = 0, time.monotonic() + LINGER_S
    while num_bytes < LINGER_BYTES and (remaining := deadline - time.monotonic()) > 0:
        try:
            message = await asyncio.wait_for(request.receive(), remaining)
        except TimeoutError:
            return
        num_bytes += len(message.get("body", b""))
        if message["type"] == "http.disconnect" or not message.get("more_body", False):
            return
