"""Parameter views and a layout in; every rank's files out: which tensors they hold, their headers, and each tensor's view.

One rule decides a rank's part of a parameter (`core.sharding`), for the planner and here. A tied parameter is stored once
per rank, under the name of the parameter it is tied to where the rank has that one. Nothing is read or written.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from dayzero.core.model import ModelDescription, Parameter, Problem
from dayzero.core.plan import Layout
from dayzero.core.sharding import Box, owns_layer, rank_boxes
from dayzero.core.units import DTYPE_BITS, GIB, SAFETENSORS_DTYPES, tensor_bytes
from dayzero.weights.algebra import View, concatenate

# A rank's files: small enough to keep several threads busy (one writes while another waits for the disk) and to be cheap
# to repeat after an interruption, large enough to be few.
FILE_BYTES, MAX_FILE_BYTES, USUAL_FILES = GIB // 4, 2 * GIB, 32
HEADER_NAMES = {dtype: name for name, dtype in SAFETENSORS_DTYPES.items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredTensor:
    """One tensor of one file. `offset` counts from the file's beginning."""

    parameter: str
    shape: tuple[int, ...]
    dtype: str
    offset: int
    view: View

    @property
    def num_bytes(self) -> int:
        return tensor_bytes(self.shape, self.dtype)


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredFile:
    """One safetensors file, relative to the artifact. `header` is everything before the first tensor."""

    rank: int
    file: str
    header: bytes
    tensors: tuple[StoredTensor, ...]

    @property
    def num_bytes(self) -> int:
        return len(self.header) + sum(tensor.num_bytes for tensor in self.tensors)


def owned_parameters(model: ModelDescription, layout: Layout, rank: int) -> list[tuple[Parameter, tuple[Box, ...]]]:
    """The parameters a rank stores and their boxes, in the model's order."""
    place = layout.coordinates(rank)
    owned = {parameter.name: parameter for parameter in model.parameters if owns_layer(parameter, layout, place.pp)}
    kept = [parameter for parameter in owned.values() if parameter.tied_to is None or parameter.tied_to not in owned]
    boxed = ((parameter, rank_boxes(parameter, layout, place)) for parameter in kept)
    return [(parameter, boxes) for parameter, boxes in boxed if boxes]


def is_optional(parameter: Parameter) -> bool:
    """Whether a checkpoint without it is sound: a buffer (or declared so), which then keeps the class's own value."""
    return not parameter.sources and parameter.tied_to is None


def local_view(view: View, boxes: tuple[Box, ...], tensor_dim: int | None) -> View:
    parts = [view.box(box) for box in boxes]
    return parts[0] if len(parts) == 1 else concatenate(parts, tensor_dim or 0)


def place(
    views: Mapping[str, View], model: ModelDescription, layout: Layout, *, dtype: str | None = None
) -> tuple[tuple[StoredFile, ...], tuple[Problem, ...]]:
    """All files of all ranks. `dtype` replaces the release's main dtype; tensors stored in another one keep theirs."""
    problems: dict[str, Problem] = {}
    files: list[StoredFile] = []
    for rank in range(layout.num_devices):
        tensors = []
        for parameter, boxes in owned_parameters(model, layout, rank):
            view = views.get(parameter.name)
            if view is None and is_optional(parameter):
                continue
            if view is None:
                problems[parameter.name] = Problem(kind="missing_parameter", severity="error", tensor=parameter.name,
                                                   detail=f"{parameter.name} has no source in the checkpoint")  # fmt: skip
                continue
            if view.shape != parameter.shape:
                problems[parameter.name] = Problem(kind="shape_mismatch", severity="error", tensor=parameter.name,
                                                   detail=f"{parameter.name}: the checkpoint gives {list(view.shape)}, the "
                                                   f"model description has {list(parameter.shape)}")  # fmt: skip
                continue
            part = local_view(view, boxes, parameter.shard.tensor_dim)
            if dtype is not None and part.dtype == model.dtype and not parameter.is_buffer:
                part = part.cast(dtype)
            tensors.append((parameter.name, part))
        total = sum(tensor_bytes(view.shape, view.dtype) for _, view in tensors)
        size = min(max(FILE_BYTES, total // USUAL_FILES), MAX_FILE_BYTES)
        files += pack_files(tensors, rank=rank, folder=f"rank-{rank:05d}", file_bytes=size)
    return tuple(files), tuple(problems.values())


def pack_files(tensors: list[tuple[str, View]], *, rank: int, folder: str, file_bytes: int) -> list[StoredFile]:
    """Tensors in order, packed into files of about `file_bytes` (a larger tensor is a file of its own)."""
    groups: list[list[tuple[str, View]]] = []
    held = 0
    for name, view in tensors:
        size = tensor_bytes(view.shape, view.dtype)
        if not groups or (held and held + size > file_bytes):
            groups.append([])
            held = 0
        groups[-1].append((name, view))
        held += size
    prefix = f"{folder}/" if folder else ""
    count = len(groups)
    return [
        _file(group, rank, f"{prefix}model-{number:05d}-of-{count:05d}.safetensors")
        for number, group in enumerate(groups, start=1)
    ]


def _file(group: list[tuple[str, View]], rank: int, file: str) -> StoredFile:
    # Wide elements first: every tensor then begins at a multiple of its element's size, which readers rely on.
    group = sorted(group, key=lambda item: -DTYPE_BITS[item[1].dtype])
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, view in group:
        size = tensor_bytes(view.shape, view.dtype)
        header[name] = {"dtype": HEADER_NAMES[view.dtype], "shape": list(view.shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # the format asks for aligned data
    raw = len(text).to_bytes(8, "little") + text
    tensors, at = [], len(raw)
    for name, view in group:
        tensors.append(StoredTensor(parameter=name, shape=view.shape, dtype=view.dtype, offset=at, view=view))
        at += tensor_bytes(view.shape, view.dtype)
    return StoredFile(rank=rank, file=file, header=raw, tensors=tuple(tensors))
