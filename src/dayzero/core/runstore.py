"""One run is one folder of numbered records. This module names them, links each to its inputs by hash, and decides
which are still valid, so that a run resumes where it stopped."""

import hashlib
import os
import re
import shutil
from pathlib import Path
from typing import Any, TypeVar

from dayzero.core.errors import DayZeroError
from dayzero.core.records import read_json, read_record, write_record, write_text_atomic

T = TypeVar("T")

# Stage -> (file, stages whose files it depends on). The order is the pipeline's.
STAGES: dict[str, tuple[str, tuple[str, ...]]] = {
    "inspect": ("1_model.json", ("inputs",)),
    "plan": ("2_plan.json", ("inputs", "inspect")),
    "convert": ("3_weights.json", ("inspect", "plan")),
    "map": ("4_operators.json", ("inspect", "plan", "convert")),
    "serve": ("5_serving.json", ("convert", "map")),
    "validate": ("6_numerics.json", ("serve",)),
    "bench": ("7_performance.json", ("serve",)),
    "soak": ("8_stability.json", ("serve",)),
    "report": ("acceptance.json", ("inspect", "plan", "convert", "map", "serve", "validate", "bench", "soak")),
}
INPUTS_FILE = "0_inputs.json"


def file_hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def safe_name(text: str) -> str:
    """A string as one plain path component."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-.") or "model"


class RunStore:
    """A run folder. Paths inside its records are relative to it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @classmethod
    def open(cls, folder: Path) -> "RunStore":
        """An existing run. Raises DayZeroError when the folder is not a run."""
        if not (folder / INPUTS_FILE).is_file():
            raise DayZeroError(
                f"{folder} is not a run folder",
                got=f"no {INPUTS_FILE} in it",
                want="a folder written by `dayzero adapt`",
                fix="run `dayzero adapt PATH --target T`",
            )
        return cls(folder)

    @classmethod
    def create(cls, runs: Path, model: str, target: str, inputs: dict[str, Any], *, keep: bool = False) -> "RunStore":
        """The run of these inputs: the folder that holds the same ones, else a new one (with a suffix if taken).

        `keep` leaves the frozen inputs of a run that is continued; otherwise versions and the measured target are those of
        now.
        """
        stem = f"{safe_name(model)}@{safe_name(target)}"
        for suffix in ["", *(f"-{number}" for number in range(2, 10_000))]:
            folder = runs / (stem + suffix)
            if not (folder / INPUTS_FILE).exists():
                if folder.exists() and any(folder.iterdir()):
                    continue  # somebody's folder, not a run: never touched
                store = cls(folder)
                write_text_atomic(folder / INPUTS_FILE, _json(inputs))
                return store
            if _identity(read_json(folder / INPUTS_FILE)) == _identity(inputs):
                if not keep:
                    write_text_atomic(folder / INPUTS_FILE, _json(inputs))
                return cls(folder)
        raise AssertionError(f"ten thousand runs named {stem}")

    @property
    def inputs(self) -> dict[str, Any]:
        data = read_json(self.folder / INPUTS_FILE)
        assert isinstance(data, dict)
        return data

    @property
    def logs(self) -> Path:
        (self.folder / "logs").mkdir(parents=True, exist_ok=True)
        return self.folder / "logs"

    def path(self, stage: str) -> Path:
        return self.folder / (INPUTS_FILE if stage == "inputs" else STAGES[stage][0])

    def input_hashes(self, stage: str) -> dict[str, str]:
        """Hashes of the files the stage reads, by stage name. Absent inputs are absent here."""
        needed = STAGES[stage][1]
        return {name: file_hash(self.path(name)) for name in needed if self.path(name).exists()}

    def is_valid(self, stage: str) -> bool:
        """Whether the stage's file exists and was made from the inputs as they are now."""
        marker = self.folder / "logs" / f"{stage}.inputs.json"
        if not self.path(stage).exists() or not marker.exists():
            return False
        return bool(read_json(marker) == self.input_hashes(stage) | {"output": file_hash(self.path(stage))})

    def write(self, stage: str, record: Any) -> None:
        write_record(record, self.path(stage))
        self.mark(stage)

    def mark(self, stage: str) -> None:
        """Record that the stage's file belongs to its inputs as they are now."""
        hashes = self.input_hashes(stage) | {"output": file_hash(self.path(stage))}
        write_text_atomic(self.logs / f"{stage}.inputs.json", _json(hashes))

    def read(self, stage: str, cls: type[T]) -> T:
        return read_record(cls, self.path(stage))

    def forget(self, stage: str) -> None:
        """Drop a stage's file, so that it runs again."""
        self.path(stage).unlink(missing_ok=True)

    def relative(self, path: Path) -> str:
        return os.path.relpath(path, self.folder)


def _identity(inputs: dict[str, Any]) -> dict[str, Any]:
    """What makes two runs the same: everything but measurements of the machine and versions, which may drift."""
    return {
        name: inputs.get(name)
        for name in ("source", "source_hash", "source_state", "target_id", "target_hash", "devices", "workload", "options")
    }


def _json(data: Any) -> str:
    import json

    return json.dumps(data, indent=1) + "\n"


def free_bytes(path: Path) -> int:
    """Free bytes of the disk that will hold `path`."""
    existing = next(parent for parent in [path, *path.parents] if parent.exists())
    return shutil.disk_usage(existing).free
