"""Hardware files: names to `Target` records.

Goes in: the name of a shipped card, `cpu-local`, or the path of a YAML or JSON file of one's own. Comes out: a `Target`.
Deliberately not done: asking a device anything (`devices.measure` does) or judging a figure (`plan` says what it rests on).
"""

import difflib
import json
import os
from functools import cache
from pathlib import Path
from typing import Any

from dayzero.core.errors import DayZeroError
from dayzero.core.records import from_dict, read_json, record_json, write_text_atomic
from dayzero.core.target import Target, TargetSummary, load_yaml

HARDWARE = Path(__file__).parent / "hardware"
CPU_LOCAL = "cpu-local"
SUFFIXES = (".yaml", ".yml", ".json")


def list_targets() -> list[TargetSummary]:
    """This machine first, then every shipped card by name. Nothing is measured beyond this machine's memory."""
    from dayzero.devices.host import host_memory

    local = TargetSummary(id=CPU_LOCAL, vendor="this machine", memory_bytes=host_memory().total_bytes,
                          memory_bytes_per_s=None, num_cards=1, torch_device="cpu", torch_plugin=None,
                          confidence="measured")  # fmt: skip
    return [local, *(_summary(_shipped(name)) for name in _shipped_names())]


def _summary(target: Target) -> TargetSummary:
    return TargetSummary(id=target.id, vendor=target.vendor, memory_bytes=target.card.memory_bytes,
                         memory_bytes_per_s=target.card.memory_bytes_per_s, num_cards=target.node.num_cards,
                         torch_device=target.software.torch_device, torch_plugin=target.software.torch_plugin,
                         confidence=target.confidence)  # fmt: skip


def load_target(name_or_file: str) -> Target:
    """The target of that name, or of that file.

    `cpu-local` measures this machine (a few seconds). Raises DayZeroError naming the nearest names when the name is
    unknown, or the field and the nearest key when a file is malformed.
    """
    if name_or_file == CPU_LOCAL:
        from dayzero.devices.measure import measure_cpu

        return measure_cpu()
    if name_or_file in _shipped_names():
        return _shipped(name_or_file)
    path = Path(name_or_file)
    if path.suffix.lower() in SUFFIXES or os.sep in name_or_file or path.is_file():
        return _read_file(path)
    names = [CPU_LOCAL, *_shipped_names()]
    near = difflib.get_close_matches(name_or_file.lower(), names, n=3, cutoff=0.4)
    near += [name for name in names if name_or_file.lower() in name and name not in near]
    raise DayZeroError(f"no target is named {name_or_file!r}", got=name_or_file,
                       want="one of: " + ", ".join(near[:5] or names),
                       fix="`dayzero targets` lists all names; a hardware file of your own is given by its path")  # fmt: skip


@cache
def _shipped_names() -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in HARDWARE.glob("*.yaml")))


@cache
def _shipped(name: str) -> Target:
    target = _read_file(HARDWARE / f"{name}.yaml")
    assert target.id == name, (target.id, name)
    return target


def _read_file(path: Path) -> Target:
    if not path.is_file():
        raise DayZeroError(f"there is no hardware file at {path}", got="no such file", want="a YAML or JSON hardware file",
                           fix="correct the path, or give a name from `dayzero targets`")  # fmt: skip
    data: Any = read_json(path) if path.suffix.lower() == ".json" else load_yaml(path)
    if not isinstance(data, dict):
        raise DayZeroError(f"{path} is not a hardware file", got=type(data).__name__, want="a mapping with id, card, node",
                           fix="start from the output of `dayzero targets measure`")  # fmt: skip
    if (schema := data.pop("schema", Target.SCHEMA)) != Target.SCHEMA:
        raise DayZeroError(f"{path} has another schema", got=schema, want=Target.SCHEMA,
                           fix="write it again with this version's `dayzero targets measure`")  # fmt: skip
    return from_dict(Target, data, source=str(path))


def write_target(target: Target, path: Path) -> None:
    """Write a hardware file that `load_target` reads back to the same record; JSON or YAML by its suffix."""
    data = record_json(target)
    if path.suffix.lower() == ".json":
        text = json.dumps(data, indent=1) + "\n"
    else:
        import yaml

        # Innermost lists and mappings on one line each: a measured file has dozens of points.
        text = yaml.safe_dump(data, sort_keys=False, allow_unicode=True, width=120, default_flow_style=None)
    write_text_atomic(path, text)
