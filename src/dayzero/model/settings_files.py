"""A JSON file of a release in, its object out, with the keys that it gives more than once. No meaning is known here.

Every JSON reader keeps one of several values of a key, and not all keep the same one: a key that is given twice with
different values is a file that two programs read differently, so it is an error. Twice the same value is a warning.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dayzero.core.collector import collector_paused
from dayzero.core.errors import DayZeroError
from dayzero.core.model import Problem
from dayzero.model.paths import contained

# Larger than any real settings file (tokenizer.json of a 256k vocabulary has 35 MB), small enough to parse.
MAX_JSON_BYTES = 256 << 20
MAX_REPEATED = 32  # told one by one; of more, the number
MAX_SHOWN = 60


@dataclass(frozen=True, kw_only=True, slots=True)
class RepeatedKey:
    """A key that one object gives several times, with its values in the order of the file. The last is the one kept."""

    key: str
    values: tuple[Any, ...]


def read_object(path: Path, repeated: list[RepeatedKey] | None = None) -> dict[str, Any]:
    """One JSON object from a file of the release. Raises DayZeroError naming the file and the place of the mistake.

    repeated: where keys that are given more than once are put, at any depth; they are not looked for without it.
    """
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise ValueError(f"{path.stat().st_size} bytes, more than {MAX_JSON_BYTES}")
        text = path.read_bytes().decode("utf-8")
        with collector_paused():
            data = json.loads(text, object_pairs_hook=None if repeated is None else _noting(repeated))
    except (OSError, ValueError, RecursionError) as error:
        raise DayZeroError(
            f"{path} is not readable JSON", got=str(error)[:300], want="one JSON object in UTF-8", fix="download the file again"
        ) from error
    if not isinstance(data, dict):
        raise DayZeroError(
            f"{path} is not a JSON object", got=type(data).__name__, want="an object", fix="download the file again"
        )
    return data


def read_settings(path: Path, file: str) -> tuple[dict[str, Any], list[Problem]]:
    """As `read_object`, with a problem for every key that is there more than once."""
    repeated: list[RepeatedKey] = []
    return read_object(path, repeated), repeated_problems(repeated, file)


def optional_settings(folder: Path, name: str, problems: list[Problem]) -> dict[str, Any] | None:
    """A settings file that may be absent; one that is broken is a problem, not an end."""
    place, reason = contained(folder, name)
    if place is None:
        problems.append(Problem(kind="unsafe_path", severity="error", file=name, detail=f"{name}: {reason}"))
        return None
    if not place.is_file():
        return None
    try:
        content, repeated = read_settings(place, name)
    except DayZeroError as error:
        problems.append(
            Problem(kind="settings_json", severity="error", file=name, detail=f"{name} is not one JSON object: {error.got}")
        )
        return None
    problems += repeated
    return content


def repeated_problems(repeated: list[RepeatedKey], file: str) -> list[Problem]:
    problems = []
    for one in repeated[:MAX_REPEATED]:
        values = ", then ".join(f"{value!r:.{MAX_SHOWN}}" for value in one.values[:3]) + ", ..." * (len(one.values) > 3)
        differ = any(value != one.values[0] for value in one.values[1:])
        said = f"{file} gives {one.key!r} {len(one.values)} times: {values}"
        said += "; readers differ in which they take" if differ else " (the same value)"
        problems.append(Problem(kind="duplicate_key", severity="error" if differ else "warning", file=file, detail=said))
    if len(repeated) > MAX_REPEATED:
        said = f"{file} gives {len(repeated) - MAX_REPEATED} further keys more than once"
        problems.append(Problem(kind="duplicate_key", severity="error", file=file, detail=said))
    return problems


def _noting(repeated: list[RepeatedKey]) -> Any:
    def note(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(pairs)
        if len(made) < len(pairs):
            values: dict[str, list[Any]] = {}
            for key, value in pairs:
                values.setdefault(key, []).append(value)
            repeated.extend(RepeatedKey(key=key, values=tuple(all_)) for key, all_ in values.items() if len(all_) > 1)
        return made

    return note
