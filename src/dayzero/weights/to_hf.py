"""A release folder or an Artifact in, an ordinary Hugging Face folder out: shards with an index, values bit for bit.

From an artifact this is the inverse of conversion: the ledger says where every element of every source tensor was stored,
so the source's tensors are rebuilt under their own names, replicas once. Tensors that conversion dropped are not in an
artifact and cannot come back. A tensor that an operation computed has no inverse; it is written under its parameter's
name, which transformers loads as well.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from math import prod
from pathlib import Path

from dayzero.core.artifact import ArtifactLayout, LedgerCounts, LedgerEntry, WeightsReport
from dayzero.core.errors import DayZeroError
from dayzero.core.model import ModelDescription, Problem
from dayzero.core.records import read_record, write_text_atomic
from dayzero.core.sharding import Box
from dayzero.model.headers import TensorEntry
from dayzero.model.release import damaged, open_release
from dayzero.weights.algebra import Digit, Piece, View
from dayzero.weights.convert import RELEASE_FOLDER, copy_settings, left_out
from dayzero.weights.files import Progress, sync_tree
from dayzero.weights.ledger import SourceTensor, piece_of_range, read_lines
from dayzero.weights.placement import owned_parameters, pack_files
from dayzero.weights.reading import LocalStore, SourceReader
from dayzero.weights.running import HASHES_FILE, Copying
from dayzero.weights.verify import LAYOUT_FILE, MODEL_FILE, SOURCES_FILE
from dayzero.weights.workfolder import KEY_FILE, locked_work_folder, prepare, publish
from dayzero.weights.writing import DONE_SUFFIX

SHARD_BYTES = 5 * 10**9  # what transformers writes by default
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


@dataclass(kw_only=True, slots=True)
class _Origin:
    """What is to be written: views by checkpoint name, over tensors of `folder`."""

    folder: Path
    tensors: dict[str, TensorEntry]
    views: dict[str, View] = field(default_factory=dict)
    settings: Path
    identity: str
    problems: list[Problem] = field(default_factory=list)


def export(source_or_artifact: Path, out: Path, *, shard_bytes: int = SHARD_BYTES, progress: Progress | None = None,
           workers: int = 2) -> WeightsReport:  # fmt: skip
    """Write the folder `out`. Raises DayZeroError for an unsound source, a full disk, or an `out` that is in the way."""
    started = time.monotonic()
    origin = _artifact(source_or_artifact) if (source_or_artifact / LAYOUT_FILE).is_file() else _release(source_or_artifact)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise DayZeroError(f"{out} is in the way", got="a folder that is not empty", want="a new or empty folder",
                           fix="choose another --out or remove it")  # fmt: skip
    with locked_work_folder(out, complete=INDEX) as work:
        prepare(work, f"{origin.identity}\n{shard_bytes}\n")
        files = tuple(pack_files(list(origin.views.items()), rank=0, folder="", file_bytes=shard_bytes))
        reader = SourceReader(LocalStore(origin.folder), origin.tensors)
        copying = Copying(work, files, reader, progress=progress, workers=workers)
        copying.run()
        for scrap in (*work.rglob("*" + DONE_SUFFIX), work / HASHES_FILE):
            scrap.unlink(missing_ok=True)
        total = sum(tensor.num_bytes for one in files for tensor in one.tensors)
        if len(files) == 1:
            (work / files[0].file).rename(work / SINGLE)
        else:
            weight_map = {tensor.parameter: one.file for one in files for tensor in one.tensors}
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            write_text_atomic(work / INDEX, json.dumps(index, indent=2) + "\n")
        settings = open_release(origin.settings)
        copy_settings(settings, work)
        origin.problems += left_out(settings)
        (work / KEY_FILE).unlink()
        sync_tree(work)
        publish(work, out)
    used = sum(entry.num_bytes for entry in origin.tensors.values())
    counts = LedgerCounts(source_bytes=used, used_bytes=used, filled_parameters=len(origin.views))
    return WeightsReport(artifact=str(out), key=origin.identity, ledger=counts, problems=tuple(origin.problems),
                         bytes_read=reader.bytes_read, bytes_written=copying.bytes_written,
                         seconds=round(time.monotonic() - started, 3))  # fmt: skip


def _release(source: Path) -> _Origin:
    """A release as it is, resharded: every tensor it has, whatever it is for."""
    release = open_release(source).require_weights()
    views = {name: View.of(name, entry.shape, entry.dtype) for name, entry in release.tensors.items()}
    return _Origin(
        folder=release.folder, tensors=release.tensors, views=views, settings=release.folder, identity=release.source_hash
    )


def _artifact(folder: Path) -> _Origin:
    artifact = read_record(ArtifactLayout, folder / LAYOUT_FILE)
    model = read_record(ModelDescription, folder / MODEL_FILE)
    sources = {one.tensor: one for one in read_lines(SourceTensor, folder / SOURCES_FILE)}
    origin = _Origin(folder=folder, tensors={}, settings=folder / RELEASE_FOLDER, identity=artifact.key)
    pieces: dict[str, dict[tuple, Piece]] = {name: {} for name, one in sources.items() if one.dropped is None}
    dtypes: dict[str, set[str]] = {}
    computed: dict[str, dict[Box, View]] = {}
    for rank, ledger in enumerate(artifact.ledgers):
        boxes = {parameter.name: (parameter, boxes) for parameter, boxes in owned_parameters(model, artifact.layout, rank)}
        for entry in read_lines(LedgerEntry, folder / ledger.file):
            stored = f"{rank}/{entry.parameter}"
            origin.tensors[stored] = TensorEntry(file=entry.file, dtype=entry.dtype, shape=entry.shape, begin=entry.offset,
                                                 end=entry.offset + entry.num_bytes)  # fmt: skip
            if any(text.startswith("computed:") for one in entry.sources for text in one.transforms):
                parameter, own = boxes[entry.parameter]
                _collect_boxes(computed.setdefault(entry.parameter, {}), stored, entry, own, parameter.shard.tensor_dim)
                for one in entry.sources:
                    pieces.pop(one.tensor, None)
                continue
            for one in entry.sources:
                source = sources[one.tensor]
                made = piece_of_range(
                    one, TensorEntry(file="", dtype=source.dtype, shape=source.shape, begin=0, end=source.num_bytes)
                )
                assert made is not None, f"ledger line of {entry.parameter} describes no part of {one.tensor}: run --verify"
                inverse = _inverse(made, stored, entry)
                signature = (inverse.base, tuple(sorted((digit.size, digit.step) for digit in inverse.digits)))
                pieces[one.tensor].setdefault(signature, inverse)
                dtypes.setdefault(one.tensor, set()).add(entry.dtype)
    for name, parts in pieces.items():
        shape = sources[name].shape
        covered = sum(piece.num_elements for piece in parts.values())
        if covered != prod(shape):
            detail = f"{name}: the artifact holds {covered} of its {prod(shape)} elements"
            origin.problems.append(Problem(kind="partly_stored", severity="error", tensor=name, detail=detail))
            continue
        (dtype,) = dtypes.get(name, {sources[name].dtype})
        origin.views[name] = View((prod(shape),), dtype, tuple(parts.values())).reshape(shape)
    if origin.problems:
        raise damaged(origin.problems, str(folder))
    for name, cuts in computed.items():
        shape = next(parameter.shape for parameter in model.parameters if parameter.name == name)
        origin.views[name] = _assembled(cuts, shape)
        detail = f"{name} was computed from its sources and is written under its own name"
        origin.problems.append(Problem(kind="no_inverse", severity="warning", tensor=name, detail=detail))
    for name in sorted(one.tensor for one in sources.values() if one.dropped is not None):
        origin.problems.append(Problem(kind="dropped", severity="warning", tensor=name,
                                       detail=f"{name} was dropped by conversion: {sources[name].dropped}"))  # fmt: skip
    used = {piece.source for view in origin.views.values() for piece in view.pieces}
    origin.tensors = {name: entry for name, entry in origin.tensors.items() if name in used}
    return origin


def _inverse(piece: Piece, stored: str, entry: LedgerEntry) -> Piece:
    """The piece read backwards: elements of the stored tensor, at their places in the flattened source."""
    strides = [prod(entry.shape[dim + 1 :]) for dim in range(len(entry.shape))]
    offset = sum(base * stride for base, stride in zip(piece.base, strides, strict=True))
    digits = tuple(Digit(digit.size, 0, digit.stride, digit.step * strides[digit.dim]) for digit in piece.digits)
    return Piece(stored, entry.dtype, offset, (piece.offset,), digits)


def _collect_boxes(cuts: dict[Box, View], stored: str, entry: LedgerEntry, boxes: tuple[Box, ...], dim: int | None) -> None:
    """Cut a stored part back into the boxes it was concatenated from."""
    whole, start = View.of(stored, entry.shape, entry.dtype), 0
    for box in boxes:
        part = whole
        if len(boxes) > 1:
            assert dim is not None
            size = box[dim][1] - box[dim][0]
            part = whole.slice(dim, start, start + size)
            start += size
        cuts.setdefault(box, part)


def _assembled(cuts: dict[Box, View], shape: tuple[int, ...]) -> View:
    """A parameter from its boxes: pieces moved to where the box lies."""
    pieces = []
    for box, view in cuts.items():
        for piece in view.pieces:
            base = tuple(at + start for at, (start, _) in zip(piece.base, box, strict=True))
            pieces.append(Piece(piece.source, piece.dtype, piece.offset, base, piece.digits))
    dtype = next(iter(cuts.values())).dtype
    assert sum(piece.num_elements for piece in pieces) == prod(shape), shape
    return View(shape, dtype, tuple(pieces))
