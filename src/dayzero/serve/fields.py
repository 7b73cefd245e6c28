"""Strict reading of a JSON request: every value is of the documented type and range, or a 400 names its field.

Nothing is coerced: "7", 7.0 and true are not the integer 7. `null` means absent. Messages quote little of what was sent, and
lists are measured before their entries are looked at.
"""

import math
from collections.abc import Callable
from typing import Any, TypeVar

from dayzero.serve.errors import ApiError, invalid, quote

T = TypeVar("T")


def wrong_type(param: str, value: Any, want: str) -> ApiError:
    return invalid(param, f"{param} must be {want}, not {quote(value)}", code="invalid_type")


def check_integer(value: Any, param: str, low: int, high: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise wrong_type(param, value, "an integer")
    if not low <= value <= high:
        raise invalid(param, f"{param} must be from {low} to {high}, not {quote(value)}")
    return value


def check_number(value: Any, param: str, low: float, high: float, *, above: bool = False) -> float:
    """A finite number in [low, high], or in (low, high] with `above`."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise wrong_type(param, value, "a number")
    if not (low < value if above else low <= value) or not value <= high or not math.isfinite(value):
        least = f"above {low:g}" if above else f"from {low:g}"
        raise invalid(param, f"{param} must be {least} to {high:g}, not {quote(value)}")
    return float(value)


def check_text(value: Any, param: str, *, max_chars: int | None = None, empty: bool = True) -> str:
    if not isinstance(value, str):
        raise wrong_type(param, value, "a string")
    if not value and not empty:
        raise invalid(param, f"{param} must not be empty")
    if max_chars is not None and len(value) > max_chars:
        raise invalid(param, f"{param} must have at most {max_chars} characters, not {len(value)}")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise invalid(param, f"{param} holds half of a surrogate pair at character {error.start}") from None
    return value


def check_flag(value: Any, param: str) -> bool:
    if not isinstance(value, bool):
        raise wrong_type(param, value, "true or false")
    return value


def check_list(value: Any, param: str, *, max_entries: int | None = None, empty: bool = True) -> list[Any]:
    if not isinstance(value, list):
        raise wrong_type(param, value, "a list")
    if not value and not empty:
        raise invalid(param, f"{param} must not be empty")
    if max_entries is not None and len(value) > max_entries:
        raise invalid(param, f"{param} may have at most {max_entries} entries, not {len(value)}")
    return value


def check_object(value: Any, param: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise wrong_type(param, value, "an object")
    return value


def check_token_ids(value: list[Any], param: str, vocab_size: int) -> tuple[int, ...]:
    """Ids of the model's vocabulary. The message names the first entry that is none."""
    for place, token_id in enumerate(value):
        if type(token_id) is not int:
            message = f"{param}: entry {place} must be a token id (an integer), not {quote(token_id)}"
            raise invalid(param, message, code="invalid_type")
        if not 0 <= token_id < vocab_size:
            raise invalid(param, f"{param}: entry {place} must be a token id from 0 to {vocab_size - 1}, not {quote(token_id)}")
    return tuple(value)


class Fields:
    """The fields of one JSON object. Those nobody asked for are `unread`."""

    def __init__(self, values: dict[str, Any], prefix: str = "") -> None:
        self._values = values
        self._prefix = prefix
        self._read: set[str] = set()
        self._inner: list[Fields] = []

    def raw(self, name: str) -> Any:
        """The value as it was sent; None when absent."""
        self._read.add(name)
        return self._values.get(name)

    def param(self, name: str) -> str:
        return self._prefix + name

    def _optional(self, name: str, check: Callable[..., T], *arguments: Any, **options: Any) -> T | None:
        value = self.raw(name)
        return None if value is None else check(value, self.param(name), *arguments, **options)

    def integer(self, name: str, low: int, high: int) -> int | None:
        return self._optional(name, check_integer, low, high)

    def number(self, name: str, low: float, high: float, *, above: bool = False) -> float | None:
        return self._optional(name, check_number, low, high, above=above)

    def flag(self, name: str) -> bool:
        return bool(self._optional(name, check_flag))

    def text(self, name: str, *, max_chars: int | None = None) -> str | None:
        return self._optional(name, check_text, max_chars=max_chars)

    def list_of(self, name: str, *, max_entries: int) -> list[Any] | None:
        return self._optional(name, check_list, max_entries=max_entries)

    def object(self, name: str) -> dict[str, Any] | None:
        return self._optional(name, check_object)

    def inner(self, name: str) -> "Fields | None":
        """The fields of an object in a field, whose unread ones are this one's too."""
        values = self.object(name)
        if values is None:
            return None
        fields = Fields(values, f"{self.param(name)}.")
        self._inner.append(fields)
        return fields

    def required(self, name: str) -> Any:
        value = self.raw(name)
        if value is None:
            raise invalid(self.param(name), f"{self.param(name)} is required", code="missing")
        return value

    @property
    def unread(self) -> list[str]:
        own = [self._prefix + name for name in self._values if name not in self._read]
        return own + [name for fields in self._inner for name in fields.unread]
