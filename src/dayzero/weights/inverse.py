"""An Artifact's ledgers in, the source's tensors as views over its shards out: conversion read backwards.

The ledger says where every element of every source tensor was stored, so they are rebuilt under their own names, replicas
once. Tensors that conversion dropped are not in an artifact and cannot come back. A tensor that an operation computed or
decoded, or whose source was used in part, has no inverse; it is given under its parameter's name, which transformers loads
as well. What was quantized has no inverse at all.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from pathlib import Path

from dayzero.core.artifact import ArtifactLayout, LedgerEntry
from dayzero.core.errors import DayZeroError
from dayzero.core.model import ModelDescription, Problem
from dayzero.core.records import read_record
from dayzero.core.sharding import Box
from dayzero.model.headers import TensorEntry
from dayzero.model.release import damaged
from dayzero.weights.algebra import Digit, Piece, View
from dayzero.weights.ledger import SourceTensor, operation_of, pieces_of_entry, read_lines
from dayzero.weights.origin import Origin
from dayzero.weights.placement import owned_parameters
from dayzero.weights.proof.expected import RELEASE_FOLDER
from dayzero.weights.proof.one_origin import first_flaw
from dayzero.weights.proof.verify import LAYOUT_FILE, MODEL_FILE, SOURCES_FILE
from dayzero.weights.reading import ByteStore


def artifact_origin(folder: Path, store: ByteStore) -> Origin:
    """Raises DayZeroError where the artifact does not hold its sources whole."""
    artifact = read_record(ArtifactLayout, folder / LAYOUT_FILE)
    if artifact.quantization is not None:
        raise DayZeroError(f"{folder} cannot be turned back", got=f"weights quantized to {artifact.quantization}",
                           want="an artifact of plain numbers",
                           fix="export from the release: dayzero convert RELEASE --to hf --quantize ...")  # fmt: skip
    model = read_record(ModelDescription, folder / MODEL_FILE)
    sources = {one.tensor: one for one in read_lines(SourceTensor, folder / SOURCES_FILE)}
    origin = Origin(store=store, tensors={}, settings=folder / RELEASE_FOLDER, identity=artifact.key)
    own_names, lost = _without_inverse(folder, artifact, sources)
    pieces: dict[str, dict[tuple, Piece]] = {
        name: {} for name, one in sources.items() if one.dropped is None and name not in lost
    }
    dtypes: dict[str, set[str]] = {}
    computed: dict[str, dict[Box, View]] = {}
    for rank, ledger in enumerate(artifact.ledgers):
        boxes = {parameter.name: (parameter, boxes) for parameter, boxes in owned_parameters(model, artifact.layout, rank)}
        for entry in read_lines(LedgerEntry, folder / ledger.file):
            stored = f"{rank}/{entry.parameter}"
            origin.tensors[stored] = TensorEntry(file=entry.file, dtype=entry.dtype, shape=entry.shape, begin=entry.offset,
                                                 end=entry.offset + entry.num_bytes)  # fmt: skip
            if entry.parameter in own_names:
                parameter, own = boxes[entry.parameter]
                _collect_boxes(computed.setdefault(entry.parameter, {}), stored, entry, own, parameter.shard.tensor_dim)
                continue
            made = pieces_of_entry(entry, sources)
            if isinstance(made, str):
                raise DayZeroError(f"{ledger.file} does not say where {entry.parameter} comes from", got=f"a line that {made}",
                                   want="parts of source tensors", fix="run `dayzero convert --verify`")  # fmt: skip
            for piece in made:
                inverse = _inverse(piece, stored, entry)
                signature = (inverse.base, tuple(sorted((digit.size, digit.step) for digit in inverse.digits)))
                pieces[piece.source].setdefault(signature, inverse)
                dtypes.setdefault(piece.source, set()).add(entry.dtype)
    for name, parts in pieces.items():
        shape = sources[name].shape
        flaw = first_flaw(sorted(parts.values(), key=lambda piece: piece.base), prod(shape))
        if flaw is not None or len(dtypes.get(name, ())) > 1:
            detail = (f"{name}: the artifact has element {flaw[0]} of its {prod(shape)} {flaw[1]} times" if flaw is not None
                      else f"{name}: the artifact has parts of it in {' and '.join(sorted(dtypes[name]))}")  # fmt: skip
            origin.problems.append(Problem(kind="partly_stored", severity="error", tensor=name, detail=detail))
            continue
        (dtype,) = dtypes.get(name, {sources[name].dtype})
        origin.views[name] = View((prod(shape),), dtype, tuple(parts.values())).reshape(shape)
    if origin.problems:
        raise damaged(origin.problems, str(folder))
    for name, cuts in computed.items():
        shape = next(parameter.shape for parameter in model.parameters if parameter.name == name)
        origin.views[name] = _assembled(cuts, shape)
        detail = f"{name} was computed, decoded or cut from its sources, and is written under its own name"
        origin.problems.append(Problem(kind="no_inverse", severity="warning", tensor=name, detail=detail))
    for name in sorted(one.tensor for one in sources.values() if one.dropped is not None):
        origin.problems.append(Problem(kind="dropped", severity="warning", tensor=name,
                                       detail=f"{name} was dropped by conversion: {sources[name].dropped}"))  # fmt: skip
    used = {piece.source for view in origin.views.values() for piece in view.pieces}
    origin.tensors = {name: entry for name, entry in origin.tensors.items() if name in used}
    return origin


def _without_inverse(folder: Path, artifact: ArtifactLayout, sources: Mapping[str, SourceTensor]) -> tuple[set[str], set[str]]:
    """Parameters that cannot be turned back into their sources (operations made them, or part of a source was left out),
    with all that share a source with them; and those sources."""
    read = {source: set[str]() for source in sources}
    made: set[str] = set()
    for ledger in artifact.ledgers:
        for entry in read_lines(LedgerEntry, folder / ledger.file):
            for one in (one for one in entry.sources if one.tensor in sources):  # others are refused where pieces are made
                read[one.tensor].add(entry.parameter)
                if operation_of(one) is not None or sources[one.tensor].partly_used is not None:
                    made.add(entry.parameter)
    lost: set[str] = set()
    while more := {source for source, readers in read.items() if source not in lost and readers & made}:
        lost |= more
        made |= {parameter for source in more for parameter in read[source]}
    return made, lost


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
