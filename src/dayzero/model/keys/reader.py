"""A config in, values by meaning out; and the account: which key was read for what, and what had to be assumed.

A value of the wrong kind is a DayZeroError that names the key, what it holds and what it should. Null is as if absent. A
list where one number is meant is one number per layer: `at(layer)` is the view of one layer, which also sees keys that the
config overrides for that layer.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from dayzero.core.errors import DayZeroError
from dayzero.model.keys.tables import CONCEPTS, Concept

# Sizes beyond these are typing errors; without a bound a mistyped depth would be a loop without end.
MOST_LAYERS, LARGEST = 10_000, 2**48


@dataclass(slots=True)
class Account:
    """What was read (path -> meaning) and what no key says (sentences, in order)."""

    consumed: dict[str, str] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)

    def note(self, sentence: str) -> None:
        if sentence not in self.unknown:
            self.unknown.append(sentence)


@dataclass(frozen=True, slots=True)
class Reader:
    data: Mapping[str, Any]
    account: Account
    prefix: str = ""
    layer: int | None = None
    table: Mapping[str, Concept] = field(default_factory=lambda: CONCEPTS)

    def size(self, name: str) -> int | None:
        """A positive integer, or None."""
        return self._integer(name, least=1)

    def count(self, name: str) -> int:
        """An integer of at least 0; 0 where absent."""
        return self._integer(name, least=0) or 0

    def experts(self) -> int:
        """Experts of a layer that has them; 0 where there is at most one, which every token uses."""
        found = self.count("experts")
        return found if found > 1 and self.flag("experts_used") is not False else 0

    def required(self, name: str) -> int:
        value = self.size(name)
        if value is None:
            spellings = ", ".join(self.table[name].spellings)
            raise DayZeroError(
                f"this config says too little to describe the model: {self.table[name].meaning}",
                got=f"none of {spellings}",
                want="a positive integer",
                fix="use a transformers that knows the model, or add the key",
            )
        return value

    def has(self, name: str) -> bool:
        """Whether any spelling is there and not null."""
        return self._find(name)[1] is not None

    def flag(self, name: str) -> bool | None:
        key, value = self._find(name)
        if value is None or isinstance(value, bool):
            return value
        raise self.wrong(key, value, "true or false")

    def word(self, name: str) -> str | None:
        key, value = self._find(name)
        if value is None or isinstance(value, str):
            return value
        raise self.wrong(key, value, "a string")

    def ratio(self, name: str) -> float | None:
        key, value = self._find(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < LARGEST:
            raise self.wrong(key, value, "a positive number")
        return float(value)

    def items(self, name: str, length: int | None = None, *, kind: type | None = None) -> list[Any] | None:
        """A list of at least `length` items (cut to it: more are for layers that predict further tokens), or None."""
        key, value = self._find(name)
        if value is None:
            return None
        if not isinstance(value, list) or (kind is not None and not all(isinstance(item, kind) for item in value)):
            raise self.wrong(key, value, f"a list of {kind.__name__ if kind else 'items'}")
        if length is not None and len(value) < length:
            raise self.wrong(key, f"{len(value)} items", f"one for each of {length} layers")
        return list(value) if length is None else value[:length]

    def integers(self, name: str, length: int | None = None) -> list[int] | None:
        """As `items`, for a list of integers (true and false count as 1 and 0)."""
        found = self.items(name, length)
        if found is not None and not all(isinstance(item, int) for item in found):
            raise self.wrong(self.spelled(name) or name, found, "a list of integers")
        return found

    def nested(self, name: str) -> "Reader | None":
        key, value = self._find(name)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self.wrong(key, value, "an object")
        return replace(self, data=value, prefix=f"{self.prefix}{key}.")

    def raw(self, name: str) -> Any:
        return self._find(name)[1]

    def spelled(self, name: str) -> str | None:
        """The spelling this config uses, or None."""
        return self._find(name)[0] or None

    def same_key(self, first: str, second: str) -> bool:
        """Whether two meanings are answered by one key, as where the only width is both the dense and the experts'."""
        return self.spelled(first) is not None and self.spelled(first) == self.spelled(second)

    def at(self, layer: int) -> "Reader":
        """The view of one layer: single-layer overrides win, lists give that layer's number."""
        overrides = self.raw("per_layer")
        if isinstance(overrides, Mapping):
            for key, value in overrides.items():
                if isinstance(value, Mapping) and str(key).isdecimal() and int(key) == layer:
                    return replace(self, data={**self.data, **value}, layer=layer)
        return replace(self, layer=layer)

    def wrong(self, key: str, got: Any, want: str) -> DayZeroError:
        shown = got if isinstance(got, str) and " " in got else repr(got)
        return DayZeroError(
            f"config.json: {self.prefix}{key} is not usable", got=shown[:80], want=want, fix=f"correct {key} in config.json"
        )

    def _find(self, name: str) -> tuple[str, Any]:
        """(spelling, value) of the first spelling that is there and not null; the others, if there, are consumed too."""
        concept = self.table[name]
        found: tuple[str, Any] = ("", None)
        for key in concept.spellings:
            if key not in self.data:
                continue
            if found[1] is None:
                self.account.consumed.setdefault(self.prefix + key, concept.meaning)
                found = (key, self.data[key])
            elif self.data[key] is not None and len(concept.spellings) > 1 and name not in ("dense_width", "expert_width"):
                self.account.consumed.setdefault(self.prefix + key, f"{concept.meaning} (another spelling)")
                if self.data[key] != found[1]:
                    self.account.note(f"{found[0]} and {key} contradict each other on {concept.meaning}: {found[0]} is used")
        return found

    def _integer(self, name: str, *, least: int) -> int | None:
        key, value = self._find(name)
        if isinstance(value, list):
            value = self._of_layer(key, value)
            if not key.endswith("_per_layer"):
                self.account.note(f"whether {key} may be a list: it is read as one number for each layer, as few classes do")
        if value is None:
            return None
        want = "a positive integer" if least else "an integer of at least 0"
        if isinstance(value, bool) or not isinstance(value, int) or value < least or value > LARGEST:
            raise self.wrong(key, value, want)
        return value

    def _of_layer(self, key: str, values: list[Any]) -> Any:
        if not values:
            raise self.wrong(key, values, "a number, or one for each layer")
        if self.layer is None:
            return values[0]
        if self.layer >= len(values):
            raise self.wrong(key, f"{len(values)} items", "one for each layer")
        return values[self.layer]
