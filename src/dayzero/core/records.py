"""Frozen dataclasses to JSON and back, strictly: an unknown key is an error that names the nearest known one.

Every record that is a file of its own carries `schema` ("dayzero.<name>/<version>"). Writing is atomic (a temporary
file in the same folder, fsync, rename), so a reader never sees half a record.
"""

import difflib
import json
import os
import tempfile
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ConfigDict, TypeAdapter, ValidationError

from dayzero.core.errors import DayZeroError

T = TypeVar("T")

STRICT = ConfigDict(extra="forbid")


_ADAPTERS: dict[Any, TypeAdapter[Any]] = {}  # building one costs milliseconds; classes do not change


def _adapter(cls: Any) -> TypeAdapter[Any]:
    if cls not in _ADAPTERS:
        _ADAPTERS[cls] = TypeAdapter(cls)
    return _ADAPTERS[cls]


def to_dict(record: Any) -> Any:
    """A record as plain JSON types."""
    return _adapter(type(record)).dump_python(record, mode="json")


def from_dict(cls: type[T], data: Any, *, source: str = "record") -> T:
    """Plain JSON types to a record. Raises DayZeroError naming the field, what it was and the nearest known key."""
    try:
        return _adapter(cls).validate_python(data, strict=False)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or cls.__name__
        fix = "correct the field"
        if first["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
            near = difflib.get_close_matches(str(first["loc"][-1]), _field_names(cls), n=1)
            fix = f"did you mean {near[0]!r}?" if near else "remove the key"
        raise DayZeroError(
            f"{source}: {where}: {first['msg']}", got=repr(first.get("input"))[:200], want=f"a valid {cls.__name__}", fix=fix
        ) from error


def _field_names(cls: Any) -> list[str]:
    """Every field name of a record and the records inside it, for suggestions."""
    return sorted(set(_property_names(_adapter(cls).json_schema())))


def _property_names(schema: Any) -> list[str]:
    if isinstance(schema, dict):
        own = list(schema["properties"]) if isinstance(schema.get("properties"), dict) else []
        return own + [name for value in schema.values() for name in _property_names(value)]
    return [name for item in schema for name in _property_names(item)] if isinstance(schema, list) else []


def read_record(cls: type[T], path: Path) -> T:
    """Read one record file. Raises DayZeroError when it is absent, not JSON, or of another schema version."""
    data = read_json(path)
    wanted = getattr(cls, "SCHEMA", None)
    if isinstance(data, dict) and wanted is not None and (found := data.pop("schema", None)) != wanted:
        raise DayZeroError(
            f"{path.name} has another schema",
            got=found,
            want=wanted,
            fix="rerun the stage that wrote it with this version of dayzero",
        )
    return from_dict(cls, data, source=str(path))


def record_json(record: Any) -> dict[str, Any]:
    """The JSON object of a record with its `schema` first: what files hold and `--json` prints."""
    schema = getattr(type(record), "SCHEMA", None)
    return ({"schema": schema} if schema else {}) | to_dict(record)


def write_record(record: Any, path: Path) -> None:
    """Write one record file atomically."""
    write_text_atomic(path, json.dumps(record_json(record), indent=1, allow_nan=False) + "\n")


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DayZeroError(
            f"{path} does not exist", got="no such file", want="a JSON record", fix="run the stage that writes it"
        ) from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise DayZeroError(
            f"{path} is not JSON", got=str(error), want="one JSON object", fix="rerun the stage that writes it"
        ) from error


def write_text_atomic(path: Path, text: str) -> None:
    """Write through a temporary file in the same folder; on any error the old file stays and no scrap is left."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, scrap = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(scrap, 0o644)
        os.replace(scrap, path)
    except BaseException:
        os.unlink(scrap)
        raise
