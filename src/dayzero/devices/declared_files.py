"""The files behind `devices.declared`: YAML to records, strictly.

Goes in: a path under `operators/`. Comes out: a `DeviceFile` or an `AnyFile`. An unknown key is an error that names the
nearest known one; a key or a name that stands twice, an operator nobody knows and an entry without a source are errors too.
What the entries mean for a model is not decided here.
"""

from __future__ import annotations

import difflib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import yaml

from dayzero.core.errors import DayZeroError
from dayzero.core.operators import Binding
from dayzero.core.records import STRICT, from_dict

ANY = "any"
ATEN = "aten::"
# What the operator graph calls its nodes, besides library operators: `ops.graph` and `ops.definitions`.
SEMANTIC = (
    "linear", "matmul", "embedding", "rms_norm", "layer_norm", "l2_norm", "activation", "gated_activation", "softmax",
    "attention", "experts", "convolution", "linear_attention", "state_space_scan",
)  # fmt: skip

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One semantic operator in a device's file. `kernel` is its real name; empty only where it is missing."""

    __pydantic_config__ = STRICT
    binding: Binding
    source: str
    kernel: str = ""
    conditions: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class NameList:
    """Library operators without their `aten::`, and where the list is from."""

    __pydantic_config__ = STRICT
    source: str
    names: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Unlisted:
    """What becomes of a library operator that neither the device's plugin nor torch itself has a kernel for."""

    __pydantic_config__ = STRICT
    binding: Binding
    reason: str
    source: str


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceFile:
    """`aten`: operators with a kernel of the device. Without `unlisted` that list is not complete."""

    SCHEMA: ClassVar[str] = "dayzero.declared/1"
    __pydantic_config__ = STRICT
    device: str
    library: str
    operators: dict[str, Entry]
    aten: NameList | None = None
    unlisted: Unlisted | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Composition:
    """A semantic operator out of library operators; a single part is the operator itself."""

    __pydantic_config__ = STRICT
    parts: tuple[str, ...]
    source: str
    conditions: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class AnyFile:
    """`core`: every device should have them. `composite`: torch brings an implementation for all devices. `decomposed`: torch
    has a rule that expresses them in core operators. `other`: none of these. A name in no list was never looked up.
    """

    SCHEMA: ClassVar[str] = "dayzero.declared-any/1"
    __pydantic_config__ = STRICT
    compositions: dict[str, Composition]
    core: NameList
    composite: NameList
    decomposed: NameList
    other: NameList

    @property
    def looked_up(self) -> frozenset[str]:
        return frozenset(name for part in (self.core, self.composite, self.decomposed, self.other) for name in part.names)


def read_device_file(path: Path) -> DeviceFile:
    """One device's file. Raises DayZeroError on unknown and repeated keys, unknown operators, and entries without source."""
    found = _read(DeviceFile, path)
    _require(found.device == path.stem, path, "device", found.device, f"{path.stem!r}, as the file is named")
    for kind, entry in found.operators.items():
        if kind not in SEMANTIC:
            near = difflib.get_close_matches(kind, SEMANTIC, n=1)
            _require(False, path, f"operators.{kind}", kind, f"one of: {', '.join(SEMANTIC)}",
                     f"did you mean {near[0]!r}?" if near else "library operators belong under aten")  # fmt: skip
        _require(bool(entry.source.strip()), path, f"operators.{kind}.source", entry.source, "where it is documented")
        _require(bool(entry.kernel) or entry.binding == "missing", path, f"operators.{kind}.kernel", "", "the kernel's name")
    if found.aten:
        _checked_names(path, "aten", found.aten)
    return found


def read_any_file(path: Path) -> AnyFile:
    """What any device has. Raises DayZeroError as `read_device_file`, and where a composition has a part in no list."""
    found = _read(AnyFile, path)
    for name in ("core", "composite", "decomposed", "other"):
        _checked_names(path, name, getattr(found, name))
    for kind, composition in found.compositions.items():
        _require(kind in SEMANTIC, path, f"compositions.{kind}", kind, f"one of: {', '.join(SEMANTIC)}")
        _require(bool(composition.parts), path, f"compositions.{kind}.parts", "none", "at least one library operator")
        for part in composition.parts:
            _require(part.removeprefix(ATEN) in found.looked_up, path, f"compositions.{kind}.parts", part, "a listed operator")
    return found


class _NoRepeats(yaml.SafeLoader):
    """YAML in which a key that stands twice is an error instead of the last one winning."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        counts = Counter(key.value for key, _ in node.value)
        if repeated := [str(key) for key, number in counts.items() if number > 1]:
            raise yaml.constructor.ConstructorError(None, None, f"the key {repeated[0]!r} stands twice", node.start_mark)
        return super().construct_mapping(node, deep)


def _read(cls: type[T], path: Path) -> T:
    try:
        data = yaml.load(path.read_text(encoding="utf-8"), _NoRepeats)
    except yaml.YAMLError as error:
        raise DayZeroError(f"{path.name} is no table of operators", got=" ".join(str(error).split()),
                           want="YAML, each key once", fix="correct the file") from error  # fmt: skip
    _require(isinstance(data, dict), path, "file", type(data).__name__, "a mapping")
    wanted = cls.SCHEMA  # type: ignore[attr-defined]
    found = data.pop("schema", None)
    _require(found == wanted, path, "schema", found, wanted)
    return from_dict(cls, data, source=path.name)


def _checked_names(path: Path, where: str, listed: NameList) -> None:
    _require(bool(listed.source.strip()), path, f"{where}.source", listed.source, "where the list is from")
    repeated = [name for name, number in Counter(listed.names).items() if number > 1]
    _require(not repeated, path, f"{where}.names", ", ".join(repeated), "each name once")
    prefixed = [name for name in listed.names if "::" in name]
    _require(not prefixed, path, f"{where}.names", ", ".join(prefixed), "names without their namespace")


def _require(holds: bool, path: Path, where: str, got: object, want: str, fix: str = "correct the file") -> None:
    if not holds:
        raise DayZeroError(f"{path.name}: {where} is wrong", got=got, want=want, fix=fix)
