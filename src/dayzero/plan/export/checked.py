"""The options an engine has, as its own source says (`options/<engine>-<version>.json`, made by `scripts/engine_options.py`).

Goes in: an option and its value. Comes out: nothing, or a DayZeroError: an option that does not exist in that version, a value
of another type, a choice it does not have. Deliberately not done: rules between options (the engine modules keep those).
"""

import difflib
import json
import re
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from dayzero.core.errors import DayZeroError
from dayzero.core.records import read_json

FOLDER = Path(__file__).parent / "options"
_PYTHON_TYPES: dict[str, tuple[type, ...]] = {"int": (int,), "float": (int, float), "bool": (bool,), "json": (dict,)}


@dataclass(frozen=True, kw_only=True, slots=True)
class OptionList:
    """One engine's options of one version. `options`: spelling -> {type, choices, ...}, aliases included."""

    engine: str
    version: str
    options: dict[str, dict[str, Any]]
    environment: tuple[str, ...] = ()
    connectors: tuple[str, ...] = ()
    base: "OptionList | None" = field(default=None)

    def check(self, name: str, value: Any) -> None:
        """Raises DayZeroError when this version would not take `name value`."""
        known = self.options.get(name)
        if known is None:
            near = difflib.get_close_matches(name, self.options, n=2)
            raise self._wrong(f"has no option {name}", name, "one of: " + ", ".join(near or ["(see its option list)"]))
        kind = str(known["type"])
        if kind in _PYTHON_TYPES and (not isinstance(value, _PYTHON_TYPES[kind]) or (kind != "bool" and value is True)):
            raise self._wrong(f"takes another type for {name}", repr(value), kind)
        choices = known.get("choices")
        if choices and value not in choices:
            raise self._wrong(f"has no {name} {value}", value, ", ".join(map(str, choices)))
        inside = known.get("fields")
        if inside and isinstance(value, dict) and (extra := sorted(_keys(value, inside) - set(inside))):
            raise self._wrong(f"has no key {', '.join(extra)} in {name}", ", ".join(extra), ", ".join(inside))

    def has_key(self, name: str, key: str) -> bool:
        """Whether the JSON of an option may hold a key (dotted for an inner object): versions differ."""
        return key in (self.options.get(name, {}).get("fields") or ())

    def check_environment(self, name: str) -> None:
        if name not in self.environment:
            raise self._wrong(f"does not read the environment variable {name}", name, ", ".join(self.environment))

    def check_connector(self, name: str) -> None:
        if name not in self.connectors:
            raise self._wrong(f"has no cache connector {name}", name, ", ".join(self.connectors))

    def _wrong(self, what: str, got: object, want: str) -> DayZeroError:
        return DayZeroError(f"{self.engine} {self.version} {what}", got=got, want=want,
                            fix="choose what this version has, or remake its option list with scripts/engine_options.py "
                                "for another version")  # fmt: skip


@cache
def load_options(engine: str, version: str | None = None) -> OptionList:
    """The list of that version, or of the newest kept in the tree."""
    listed = {path.stem.removeprefix(f"{engine}-"): path for path in FOLDER.glob(f"{engine}-[0-9]*.json")}
    chosen = version or max(listed, key=_order, default="")
    if chosen not in listed:
        raise DayZeroError(f"there is no option list of {engine} {chosen}".rstrip(), got=version or "none",
                           want=", ".join(sorted(listed, key=_order)) or "at least one version",
                           fix="make one from the engine's source package with scripts/engine_options.py")  # fmt: skip
    data = read_json(listed[chosen])
    base = load_options(*str(data["base"]).rsplit("-", 1)) if data.get("base") else None
    options = {name: item for item in data["options"] for name in (item["option"], *item["aliases"])}
    return OptionList(engine=engine, version=chosen, options=options, environment=tuple(data["environment"]),
                      connectors=tuple(data["connectors"]), base=base)  # fmt: skip


def _keys(value: dict[str, Any], inside: list[str]) -> set[str]:
    """Keys of a JSON value; dotted for an inner object whose keys the list knows."""
    keys = set(value)
    for name, inner in value.items():
        if isinstance(inner, dict) and any(field.startswith(f"{name}.") for field in inside):
            keys |= {f"{name}.{key}" for key in inner}
    return keys


def _order(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version))


def spelled(value: Any) -> str:
    """A value as one word of a command line (not yet quoted)."""
    if isinstance(value, dict):
        return json.dumps(value, sort_keys=True, separators=(",", ":"))
    return f"{value:g}" if isinstance(value, float) else str(value)
