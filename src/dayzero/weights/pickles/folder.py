"""A folder of PyTorch checkpoint files in, where each tensor lies in them out, compared with their index.

The same checks as of a safetensors release: the index against the disk and against what the files hold, in both directions,
names that leave the folder, keys given twice. Nothing of the files is executed. Whether such files are read at all is the
caller's to decide (`--allow-pickle`): `with_pickled` turns a release that was refused for them into one that has weights.
Not here: the files themselves (`file`), reading tensor bytes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from dayzero.core.model import Problem
from dayzero.model.headers import ShardHeader, TensorEntry
from dayzero.model.paths import contained
from dayzero.model.release import MAX_JSON_BYTES, Release
from dayzero.weights.algebra import View
from dayzero.weights.copying import BlockCopier
from dayzero.weights.decoding import Decoder, ReadStored
from dayzero.weights.files import Progress
from dayzero.weights.pickles.file import PickleShard, checksum_problems, read_shard
from dayzero.weights.symbolic import torch_dtype

INDEX = "pytorch_model.bin.index.json"
SINGLE = "pytorch_model.bin"
PREFIX, SUFFIX = "pytorch_model", ".bin"
REFUSED = "pickle_checkpoint"  # the kind of the problem with which `open_release` refuses such files


@dataclass(frozen=True, kw_only=True, slots=True)
class Pickled:
    """`tensors` are byte ranges of files. `strided` ones are views over `storages`. `shared`: names for the same bytes."""

    folder: Path
    tensors: dict[str, TensorEntry]
    strided: dict[str, View]
    storages: dict[str, TensorEntry]
    shared: tuple[tuple[str, ...], ...]
    shards: dict[str, PickleShard]
    problems: tuple[Problem, ...]
    metadata_total_bytes: int | None = None

    @property
    def decoders(self) -> dict[str, Decoder]:
        """The strided tensors, gathered row by row from their storages."""
        return {name: _gatherer(name, view) for name, view in self.strided.items()}

    @property
    def logical(self) -> dict[str, TensorEntry]:
        """All tensors as the mapping wants them."""
        decoders = self.decoders
        return self.tensors | {name: one.entry(self.storages[one.sources[0]]) for name, one in decoders.items()}

    def checksum_problems(self, progress: Progress | None = None) -> list[Problem]:
        """Members that are not the bytes they were written as, by the zip's own CRC-32. Reads everything once."""
        found, total, done = [], sum(shard.num_bytes for shard in self.shards.values()), 0
        for file, shard in self.shards.items():
            found += checksum_problems(self.folder / file, shard.checksums.items(), file)
            done += shard.num_bytes
            if progress:
                progress("checking checksums", done, total)
        return found


def read_pickled(folder: Path) -> Pickled:
    """The PyTorch weights in `folder`: pytorch_model.bin, or the files of its index. All that is wrong is in `problems`."""
    return _Folder(folder).read()


def with_pickled(release: Release) -> Release:
    """The release with the tensors of its PyTorch files, where `open_release` refused those; others as they are."""
    if release.tensors or not any(problem.kind == REFUSED for problem in release.problems):
        return release
    found = read_pickled(release.folder)
    shards, digest = {}, hashlib.sha256(release.source_hash.encode())
    for file, shard in sorted(found.shards.items()):
        stored = {**shard.tensors, **shard.storages}
        shards[file] = ShardHeader(file=file, num_bytes=shard.num_bytes, tensors=stored, header_hash=shard.header_hash,
                                   data_begin=min((entry.begin for entry in stored.values()), default=0))  # fmt: skip
        digest.update(f"{file} {shard.num_bytes} {shard.header_hash}\n".encode())
    kept = tuple(problem for problem in release.problems if problem.kind not in (REFUSED, "no_shards"))
    names = {file: tuple(sorted(one.tensors, key=lambda name: one.tensors[name].begin)) for file, one in shards.items()}
    return replace(release, shards=shards, tensors={**found.tensors, **found.storages}, problems=kept + found.problems,
                   source_hash=digest.hexdigest(), metadata_total_bytes=found.metadata_total_bytes,
                   header_tensors=names)  # fmt: skip


class _Folder:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.problems: list[Problem] = []
        self.shards: dict[str, PickleShard] = {}
        self.total_bytes: int | None = None

    def note(
        self, kind: str, detail: str, *, file: str | None = None, tensor: str | None = None, warning: bool = False
    ) -> None:
        severity = "warning" if warning else "error"
        self.problems.append(Problem(kind=kind, severity=severity, detail=detail, file=file, tensor=tensor))  # type: ignore[arg-type]

    def read(self) -> Pickled:
        named = sorted(one.name for one in self.folder.iterdir() if one.name.startswith(PREFIX) and one.name.endswith(SUFFIX))
        weight_map = self._index()
        files = sorted(set(weight_map.values()))
        if not weight_map and not self.problems:
            files = [SINGLE] if SINGLE in named else named
        for extra in sorted(set(named) - set(files)):
            beside = f"{INDEX} does not name it" if weight_map else f"it lies beside {SINGLE} without an index"
            self.note("unlisted_file", f"{extra} is not read: {beside}", file=extra, warning=True)
        if not files and not self.problems:
            self.note("no_pickle_weights", f"none of the pickles here is {SINGLE}, named {PREFIX}*{SUFFIX} or in {INDEX}: "
                      "rename the one that holds the weights")  # fmt: skip
        first_of: dict[str, str] = {}
        for tensor, file in weight_map.items():
            first_of.setdefault(file, tensor)
        for file in files:
            self._read_file(file, weight_map, first_of.get(file))
        owner = self._owners(weight_map)
        if weight_map:
            self._check_index(weight_map, owner)

        def mine(file: str, name: str) -> bool:
            return owner[name] == file

        tensors = {name: one for file, shard in self.shards.items() for name, one in shard.tensors.items() if mine(file, name)}
        strided = {name: one for file, shard in self.shards.items() for name, one in shard.strided.items() if mine(file, name)}
        storages = {name: one for shard in self.shards.values() for name, one in shard.storages.items()}
        return Pickled(folder=self.folder, tensors=tensors, strided=strided, storages=storages, shards=self.shards,
                       shared=tuple(group for shard in self.shards.values() for group in shard.shared),
                       problems=tuple(self.problems), metadata_total_bytes=self.total_bytes)  # fmt: skip

    def _index(self) -> dict[str, str]:
        """The index's weight map with acceptable file names; empty without one."""
        place, reason = contained(self.folder, INDEX)
        if place is None:
            self.note("unsafe_path", f"{INDEX}: {reason}", file=INDEX)
            return {}
        if not place.is_file():
            return {}
        repeated: list[str] = []

        def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
            made: dict[str, Any] = {}
            for key, value in pairs:
                if key in made:
                    repeated.append(key)
                made[key] = value
            return made

        try:
            if place.stat().st_size > MAX_JSON_BYTES:
                raise ValueError(f"{place.stat().st_size} bytes, more than {MAX_JSON_BYTES}")
            index = json.loads(place.read_bytes().decode("utf-8"), object_pairs_hook=unique)
        except (OSError, ValueError, RecursionError) as error:
            self.note("index_json", f"{INDEX} is not one JSON object: {str(error)[:200]}", file=INDEX)
            return {}
        for key in dict.fromkeys(repeated):
            self.note("duplicate_key", f"{INDEX} gives {key!r:.200} more than once", file=INDEX, tensor=key)
        if not isinstance(index, dict) or not isinstance(index.get("weight_map"), dict) or not index["weight_map"]:
            self.note("index_json", f"{INDEX} has no weight_map object", file=INDEX)
            return {}
        total = index["metadata"].get("total_size") if isinstance(index.get("metadata"), dict) else None
        if isinstance(total, (int, float)) and not isinstance(total, bool):
            self.total_bytes = int(total)
        reasons = {str(file): contained(self.folder, file)[1] for file in index["weight_map"].values()}
        for tensor, file in index["weight_map"].items():
            if reason := reasons[str(file)]:
                self.note("unsafe_path", f"{INDEX}: weight_map[{tensor!r}] = {file!r:.200} is refused: {reason}", file=INDEX,
                          tensor=tensor)  # fmt: skip
        return {tensor: file for tensor, file in index["weight_map"].items() if not reasons[str(file)]}

    def _read_file(self, file: str, weight_map: dict[str, str], first_tensor: str | None) -> None:
        place, reason = contained(self.folder, file)
        if place is None:
            self.note("unsafe_path", f"{file!r} is refused: {reason}", file=file)
        elif not place.exists():
            listed = [tensor for tensor, where in weight_map.items() if where == file]
            shown = ", ".join(listed[:8]) + (f" and {len(listed) - 8} more" if len(listed) > 8 else "")
            self.note("missing_file", f"{file} is in the index and not on disk; it should hold {len(listed)} tensors: {shown}",
                      file=file)  # fmt: skip
        else:
            shard, problems = read_shard(place, file, first_tensor=first_tensor)
            self.problems += problems
            if shard is not None:
                self.shards[file] = shard

    def _owners(self, weight_map: dict[str, str]) -> dict[str, str]:
        """The file each tensor is taken from: where several hold it, the one the index says."""
        owner: dict[str, str] = {}
        for file, shard in self.shards.items():
            for name in (*shard.tensors, *shard.strided):
                if name in owner:
                    self.note("duplicate_tensor", f"{name} is in {owner[name]} and in {file}", file=file, tensor=name)
                if name not in owner or weight_map.get(name) == file:
                    owner[name] = file
        return owner

    def _check_index(self, weight_map: dict[str, str], owner: dict[str, str]) -> None:
        for tensor, file in weight_map.items():
            if file not in self.shards or owner.get(tensor) == file:
                continue  # an unreadable or missing file is a problem of its own
            if tensor in owner:
                self.note("misplaced_tensor", f"{tensor}: the index says {file}, it is in {owner[tensor]}", file=file,
                          tensor=tensor)  # fmt: skip
            else:
                self.note("missing_tensor", f"{tensor}: the index says {file}, which has it not", file=file, tensor=tensor)
        for tensor in sorted(set(owner) - set(weight_map)):
            self.note("unlisted_tensor", f"{tensor} is in {owner[tensor]} and not in the index", file=owner[tensor],
                      tensor=tensor, warning=True)  # fmt: skip
        found = sum(one.num_bytes for shard in self.shards.values() for one in shard.tensors.values())
        found += sum(one.num_elements * torch_dtype(one.dtype).itemsize for shard in self.shards.values()
                     for one in shard.strided.values())  # fmt: skip
        shared = sum(self.shards[owner[group[0]]].tensors[group[0]].num_bytes * (len(group) - 1)
                     for shard in self.shards.values() for group in shard.shared if group[0] in shard.tensors)  # fmt: skip
        complete = len(self.shards) == len(set(weight_map.values()))
        if complete and self.total_bytes is not None and self.total_bytes not in (found, found - shared):
            self.note("total_size", f"{INDEX} says total_size {self.total_bytes}, the tensors sum to {found} bytes, which is "
                      "used", file=INDEX, warning=True)  # fmt: skip


def _gatherer(name: str, view: View) -> Decoder:
    """A tensor whose elements lie apart, as rows gathered from its storage."""
    storage = view.pieces[0].source
    columns = view.shape[-1] if view.shape else 1
    rows = view.reshape((view.num_elements // columns, columns))

    def decode(read: ReadStored, start: int, stop: int) -> torch.Tensor:
        data = b"".join(bytes(block) for block in _blocks(read, rows.slice(0, start, stop)))
        return torch.frombuffer(bytearray(data), dtype=torch_dtype(view.dtype)).reshape(stop - start, columns)

    return Decoder(name=name, shape=view.shape, dtype=view.dtype, sources=(storage,), operation="strided", decode=decode)


class _Reading:
    """What `BlockCopier` reads through: a decoder's own way to stored bytes."""

    def __init__(self, read: ReadStored) -> None:
        self._read = read

    def read_into(self, source: str, offset: int, target: memoryview) -> None:
        target[:] = self._read(source, offset, len(target))


def _blocks(read: ReadStored, view: View) -> Iterator[memoryview]:
    for _, block in BlockCopier(_Reading(read)).blocks(view):  # type: ignore[arg-type]
        yield block
