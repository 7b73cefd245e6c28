"""What a request to a store came to, whichever client made it: an object as asked for, or one of three refusals.

`Passing` may be asked again, `Changed` is another object than the one looked at, `Unusable` will not change by asking. Clients
are optional packages with exception classes of their own, which are recognised here by status, code and name.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from dayzero.core.errors import one_line
from dayzero.core.units import MIB

CHUNK_BYTES = MIB
RANGE = re.compile(r"bytes (?:(\d+)-(\d+)|\*)/(\d+)$")
PASSING_STATUS = (408, 425, 429, 500, 502, 503, 504)
# Of botocore, aiohttp, requests and fsspec, by name: those packages are optional, and not all are there.
PASSING_CLASSES = frozenset({
    "HTTPClientError", "ConnectionError", "ConnectionClosedError", "IncompleteReadError", "ResponseStreamingError",
    "ResponseParserError", "ClientConnectionError", "ClientPayloadError", "ClientOSError", "ServerDisconnectedError",
    "TimeoutError", "FSTimeoutError", "ChunkedEncodingError", "TransportError", "RetryError",
})  # fmt: skip
MISSING_CODES = ("404", "NoSuchKey", "NoSuchBucket", "NotFound")
THROTTLED = re.compile(r"slow ?down|throttl|request ?timeout", re.IGNORECASE)


class Passing(Exception):
    """What may pass: a dropped connection, a timeout, a server that is busy. `done`: the bytes that came before it."""

    def __init__(self, reason: str, *, done: int = 0, after_s: float = 0.0) -> None:
        super().__init__(reason)
        self.reason, self.done, self.after_s = reason, done, after_s


class Changed(Exception):
    """The object is another one than was looked at; the text says what it is now."""


class Unusable(Exception):
    """Refused for a reason that stays: no permission, no ranges, no such bucket."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ObjectState:
    """What tells whether an object is still the same: its size and its ETag, generation or time of change."""

    num_bytes: int
    version: str | None = None


class Outcome:
    """What is known of a request inside `_told`."""

    def __init__(self) -> None:
        self.done, self.missing = 0, False


@contextmanager
def told(missing: bool = True) -> Iterator[Outcome]:
    """Exceptions of any client become Passing, Changed or Unusable. missing: raise also where there is no such object."""
    outcome = Outcome()
    try:
        yield outcome
    except (Passing, Changed, Unusable):
        raise
    except Exception as error:
        kind, said = kind_of(error), one_line(error, 200)
        if kind == "missing" and not missing:
            outcome.missing = True
            return
        if kind in ("missing", "changed"):
            raise Changed("an object that is not there" if kind == "missing" else "another version") from error
        if kind == "passing":
            raise Passing(said, done=outcome.done, after_s=after_s(error)) from error
        raise Unusable(said) from error


def kind_of(error: BaseException) -> str:
    """missing, changed, passing or final; the causes of an error count as it does."""
    seen: BaseException | None = error
    while seen is not None:
        response = getattr(seen, "response", None)
        code = str(response.get("Error", {}).get("Code", "")) if isinstance(response, dict) else ""
        numbers = [response.get("ResponseMetadata", {}).get("HTTPStatusCode")] if isinstance(response, dict) else []
        numbers.append(getattr(seen, "status", None) or getattr(seen, "code", None))
        status = next((number for number in numbers if isinstance(number, int)), None)
        if code in MISSING_CODES or status in (404, 410) or isinstance(seen, FileNotFoundError):
            return "missing"
        if status in (412, 416):
            return "changed"
        if status in PASSING_STATUS or THROTTLED.search(code):
            return "passing"
        if status is not None or isinstance(seen, (PermissionError, IsADirectoryError, FileExistsError)):
            return "final"
        names = {one.__name__ for one in type(seen).__mro__}
        if names & PASSING_CLASSES or isinstance(seen, (ConnectionError, TimeoutError, asyncio.IncompleteReadError)):
            return "passing"
        seen = seen.__cause__
    return "final"


def after_s(error: BaseException) -> float:
    """What the server asks to wait, where it says so in seconds."""
    response = getattr(error, "response", None)
    headers = response.get("ResponseMetadata", {}).get("HTTPHeaders", {}) if isinstance(response, dict) else None
    value = (headers or getattr(error, "headers", None) or {}).get("retry-after", "")
    return float(value) if str(value).isdigit() else 0.0


def check_range(told: str, start: int, length: int, state: ObjectState, version: str | None) -> None:
    check_version(version, state)
    given = RANGE.match(told)
    if given is None or given.group(1) is None:
        raise Unusable(f"Content-Range {told!r:.100} instead of the bytes asked for")
    if int(given.group(3)) != state.num_bytes:
        raise Changed(f"{given.group(3)} bytes")
    if (int(given.group(1)), int(given.group(2))) != (start, start + length - 1):
        raise Unusable(f"Content-Range {told!r:.100} instead of bytes {start}-{start + length - 1}")


def check_version(version: str | None, state: ObjectState) -> None:
    if version != state.version:
        raise Changed(f"version {version}")


async def fill(read: Callable[[int], Any], target: memoryview, outcome: Outcome) -> None:
    while outcome.done < len(target):
        block = await read(min(CHUNK_BYTES, len(target) - outcome.done))
        if not block:
            raise Passing(f"the answer ended after {outcome.done} of {len(target)} bytes", done=outcome.done)
        target[outcome.done : outcome.done + len(block)] = block
        outcome.done += len(block)


def shown(state: ObjectState | None) -> str:
    return "an object that is not there" if state is None else f"{state.num_bytes} bytes, version {state.version}"
