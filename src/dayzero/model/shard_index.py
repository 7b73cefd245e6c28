"""A release folder in, its shards' headers and tensors out, with every disagreement of index, disk and headers. No torch.

The index is compared with the disk and with the headers, in both directions, and all disagreements are noted as `Problem`s;
nothing is raised. Names found in the index are never opened before they were shown to stay inside the folder. Without an
index the shards' own numbering says how many there should be. Not here: what a header itself gets wrong (`model.headers`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dayzero.core.errors import DayZeroError
from dayzero.core.model import Problem
from dayzero.model.headers import ShardHeader, TensorEntry, read_header
from dayzero.model.paths import contained
from dayzero.model.settings_files import read_settings

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
NUMBERED = re.compile(r"(.*?)(\d+)-of-(\d+)\.safetensors")
MAX_NUMBERED = 100_000  # no release has so many shards: a larger number is no count of them


class Weights:
    """Index, disk and headers of one folder, compared."""

    def __init__(self, folder: Path, problems: list[Problem]) -> None:
        self.folder = folder
        self.problems = problems
        self.shards: dict[str, ShardHeader] = {}
        self.tensors: dict[str, TensorEntry] = {}
        self.total_size: int | None = None

    def note(
        self, kind: str, detail: str, *, file: str | None = None, tensor: str | None = None, warning: bool = False
    ) -> None:
        severity = "warning" if warning else "error"
        self.problems.append(Problem(kind=kind, severity=severity, detail=detail, file=file, tensor=tensor))  # type: ignore[arg-type]

    def read(self) -> None:
        on_disk = sorted(entry.name for entry in self.folder.iterdir() if entry.name.endswith(".safetensors"))
        index = self._index()
        if index is None:
            files, weight_map = self._unindexed(on_disk), {}
        else:
            weight_map = self._safe_map(index)
            files = list(dict.fromkeys(weight_map.values()))
            for extra in sorted(set(on_disk) - set(files)):
                self.note("unlisted_file", f"{extra} is not in the index and is not read", file=extra, warning=True)
        first_of: dict[str, str] = {}
        for tensor, file in weight_map.items():
            first_of.setdefault(file, tensor)
        absent = bool(weight_map) and not on_disk and not any(self._lies_there(file) for file in files)
        if absent:  # a release before its download; some of several missing is a damaged one
            count = f"none of the {len(files)} files" if len(files) > 1 else f"not the file {files[0]}"
            self.note("no_shards", f"{count} that {INDEX} names is here: no weights are read", file=INDEX, warning=True)
            files = []
        for file in sorted(files):
            self._read_file(file, weight_map, first_of.get(file))
        self._collect(weight_map)
        if index is not None:
            self._check_index(weight_map)
        pickles = sorted(entry.name for entry in self.folder.iterdir() if entry.name.endswith(PICKLE_SUFFIXES))
        if pickles and not on_disk and (index is None or absent):
            self.note(
                "pickle_checkpoint",
                f"only pickle weights ({', '.join(pickles[:3])}), which can run code when read, are not read;"
                " convert them to safetensors, or give --allow-pickle, which reads ranges and runs nothing of the file",
                file=pickles[0],
            )

    def _index(self) -> dict[str, Any] | None:
        place, reason = contained(self.folder, INDEX)
        if place is None:
            self.note("unsafe_path", f"{INDEX}: {reason}", file=INDEX)
            return None
        if not place.is_file():
            return None
        try:
            index, repeated = read_settings(place, INDEX)
        except DayZeroError as error:
            self.note("index_json", f"{INDEX} is not one JSON object: {error.got}", file=INDEX)
            return None
        self.problems += repeated
        if not isinstance(index.get("weight_map"), dict):
            self.note("index_json", f"{INDEX} has no weight_map object", file=INDEX)
            return None
        return index

    def _lies_there(self, file: str) -> bool:
        """Whether anything has this name, be it a link to nothing."""
        place, _ = contained(self.folder, file)
        return place is None or place.is_symlink() or place.exists()

    def _unindexed(self, on_disk: list[str]) -> list[str]:
        """Without an index: model.safetensors alone, else every file of the standard naming, else every file."""
        standard = [name for name in on_disk if name == SINGLE] or [name for name in on_disk if name.startswith("model")]
        for extra in sorted(set(on_disk) - set(standard)) if standard else []:
            self.note(
                "unlisted_file", f"{extra} lies beside {standard[0]} without an index and is not read", file=extra, warning=True
            )
        self._note_absent(standard or on_disk)
        return standard or on_disk

    def _note_absent(self, files: list[str]) -> None:
        """Shards that the numbering of the others (`-00001-of-00004`) says there should be."""
        numbered = [found for file in files if (found := NUMBERED.fullmatch(file))]
        for stem, total in sorted({(found[1], found[3]) for found in numbered}):
            there = {int(found[2]) for found in numbered if (found[1], found[3]) == (stem, total)}
            if int(total) > MAX_NUMBERED or max(there) > int(total):
                continue
            first = 0 if 0 in there else 1  # some count from 0
            absent = [number for number in range(first, int(total) + first) if number not in there]
            names = [f"{stem}{number:0{len(total)}d}-of-{total}.safetensors" for number in absent[:8]]
            if absent:
                more = f" and {len(absent) - 8} more" if len(absent) > 8 else ""
                detail = f"{', '.join(names)}{more}: not on disk, and there is no index; the other files count {int(total)}"
                self.note("missing_file", detail, file=names[0])

    def _safe_map(self, index: Mapping[str, Any]) -> dict[str, str]:
        total = index["metadata"].get("total_size") if isinstance(index.get("metadata"), dict) else None
        if isinstance(total, (int, float)) and not isinstance(total, bool):
            self.total_size = int(total)
        safe: dict[str, str] = {}
        reasons: dict[tuple[str, str], str] = {}  # by file, not by tensor: looking at links is slow
        for tensor, file in index["weight_map"].items():
            key = (type(file).__name__, str(file))
            if key not in reasons:
                reasons[key] = contained(self.folder, file)[1]
            if reason := reasons[key]:
                self.note(
                    "unsafe_path", f"{INDEX}: weight_map[{tensor!r}] = {file!r} is refused: {reason}", file=INDEX, tensor=tensor
                )
            else:
                safe[tensor] = file
        return safe

    def _read_file(self, file: str, weight_map: Mapping[str, str], first_tensor: str | None) -> None:
        place, reason = contained(self.folder, file)
        if place is None:
            self.note("unsafe_path", f"{file!r} is refused: {reason}", file=file)
        elif not place.exists():
            listed = [tensor for tensor, where in weight_map.items() if where == file]
            shown = ", ".join(listed[:8]) + (f" and {len(listed) - 8} more" if len(listed) > 8 else "")
            self.note(
                "missing_file",
                f"{file} is in {INDEX} and not on disk; it should hold {len(listed)} tensors: {shown}",
                file=file,
            )
        else:
            header, problems = read_header(place, file, first_tensor=first_tensor)
            self.problems += problems
            if header is not None:
                self.shards[file] = header

    def _collect(self, weight_map: Mapping[str, str]) -> None:
        for file, shard in self.shards.items():
            for name, entry in shard.tensors.items():
                if name not in self.tensors:
                    self.tensors[name] = entry
                    continue
                self.note("duplicate_tensor", f"{name} is in {self.tensors[name].file} and in {file}", file=file, tensor=name)
                if weight_map.get(name) == file:
                    self.tensors[name] = entry

    def _check_index(self, weight_map: Mapping[str, str]) -> None:
        for tensor, file in weight_map.items():
            if file not in self.shards or tensor in self.shards[file].tensors:
                continue  # an unreadable or missing file is a problem of its own
            if tensor in self.tensors:
                self.note(
                    "misplaced_tensor",
                    f"{tensor}: the index says {file}, it is in {self.tensors[tensor].file}",
                    file=file,
                    tensor=tensor,
                )
            else:
                self.note("missing_tensor", f"{tensor}: the index says {file}, no header has it", file=file, tensor=tensor)
        for tensor in sorted(set(self.tensors) - set(weight_map)):
            file = self.tensors[tensor].file
            self.note("unlisted_tensor", f"{tensor} is in {file} and not in the index", file=file, tensor=tensor, warning=True)
        found = sum(entry.num_bytes for entry in self.tensors.values())
        if self.total_size is not None and self.total_size != found and len(self.shards) == len(set(weight_map.values())):
            self.note(
                "total_size",
                f"{INDEX} says total_size {self.total_size}, the headers sum to {found} bytes, which is used",
                file=INDEX,
                warning=True,
            )
