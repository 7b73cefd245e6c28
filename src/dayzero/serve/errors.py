"""What a client is told when a request cannot be served: an HTTP status and OpenAI's error object.

In: a message, the field at fault. Out: `{"error": {"message", "type", "param", "code"}}`. Values a client sent are quoted
shortened, so that an answer stays small whatever was sent.
"""

from typing import Any

from dayzero.core.errors import DayZeroError

MAX_QUOTED_CHARS = 120


class ApiError(Exception):
    """A request that is refused or fails. `param` names the field; `retry_after_s` becomes the header."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        type: str = "invalid_request_error",
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.type = type
        self.retry_after_s = retry_after_s

    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def headers(self) -> dict[str, str]:
        return {} if self.retry_after_s is None else {"retry-after": str(self.retry_after_s)}


class ClientGone(Exception):
    """The client closed its connection: there is nobody to answer."""


def invalid(param: str | None, message: str, *, code: str = "invalid_value") -> ApiError:
    return ApiError(400, message, param=param, code=code)


def unsupported(param: str, message: str) -> ApiError:
    return ApiError(400, message, param=param, code="unsupported")


def unavailable(message: str, *, code: str, retry_after_s: int | None = 1) -> ApiError:
    return ApiError(503, message, code=code, type="service_unavailable_error", retry_after_s=retry_after_s)


def queue_full(num_open: int) -> ApiError:
    return ApiError(429, f"the queue is full: {num_open} choices are open; try again later", code="queue_full",
                    type="rate_limit_error", retry_after_s=1)  # fmt: skip


def from_dayzero_error(error: DayZeroError, param: str | None = None) -> ApiError:
    """The engine refused a request for good: the user's four facts in one line."""
    facts = [f"{name} {value}" for name, value in (("got", error.got), ("wanted", error.want)) if value]
    message = error.what + (f" ({', '.join(facts)})" if facts else "") + (f": {error.fix}" if error.fix else "")
    return invalid(param, message)


def quote(value: Any) -> str:
    """A client's value for a message: its kind, and no more than a few characters of it."""
    if isinstance(value, (list, dict)):
        return f"{'a list' if isinstance(value, list) else 'an object'} of {len(value)} entries"
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 256:
        return f"an integer of {value.bit_length()} bits"
    text = repr(value[: MAX_QUOTED_CHARS + 1]) if isinstance(value, str) else repr(value)
    return text if len(text) <= MAX_QUOTED_CHARS else text[:MAX_QUOTED_CHARS] + "..."
