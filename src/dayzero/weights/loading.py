"""A release and its description in; where every parameter's elements come from out, after all checks that need no bytes.

Builds the class on the meta device, maps the checkpoint through transformers, shows that doubly stored tied weights are
equal, and turns every error into one refusal that lists them all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from dayzero.core.errors import DayZeroError
from dayzero.core.model import ModelDescription, Problem
from dayzero.model.release import Release, damaged
from dayzero.model.resolve import resolve
from dayzero.weights.algebra import View
from dayzero.weights.copying import BlockCopier, SourceReader
from dayzero.weights.mapping import CheckpointMap, ComputedGroup, map_checkpoint
from dayzero.weights.symbolic import torch_dtype
from dayzero.weights.writing import ComputedSource

_UNSIGNED = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointSource:
    """`views` by parameter; `compute` makes a computed source's group; `used` and `dropped` cover all tensors."""

    views: dict[str, View]
    computed: dict[str, ComputedSource]
    compute: Callable[[str], dict[str, np.ndarray]]
    used: frozenset[str]
    dropped: dict[str, str]
    warnings: tuple[Problem, ...]


def open_checkpoint(release: Release, model: ModelDescription) -> CheckpointSource:
    """Raises DayZeroError listing everything wrong: unfilled parameters, unused tensors, shapes, tied weights that differ."""
    if release.config.get("quantization_config") or release.config.get("compression_config"):
        stored = release.config.get("quantization_config") or release.config["compression_config"]
        raise DayZeroError(f"{release.name} is stored quantized", got=str(stored)[:200], want="a release in bf16, fp16 or fp32",
                           fix="quantized releases cannot be converted by this version")  # fmt: skip
    resolved = resolve(release)
    if isinstance(resolved, Problem):
        raise DayZeroError(f"{release.name} cannot be converted", got=resolved.detail,
                           want="a class that defines the parameters",
                           fix="install a transformers that has it: the release's own code only describes it")  # fmt: skip
    instance = resolved.build(torch_dtype(model.dtype))
    found = map_checkpoint(instance, release.tensors, num_mtp_layers=model.dimensions.num_mtp_layers)
    problems = found.problems + _tied_differences(release, found)
    if errors := [problem for problem in problems if problem.severity == "error"]:
        raise damaged(errors, str(release.folder))

    def read(name: str) -> torch.Tensor:
        entry = release.tensors[name]
        data = bytearray(entry.num_bytes)
        with SourceReader(release.folder, release.tensors) as reader:
            reader.read_into(name, 0, memoryview(data))
        return torch.frombuffer(data, dtype=torch_dtype(entry.dtype)).reshape(entry.shape) if data else torch.empty(entry.shape)

    def compute(source: str) -> dict[str, np.ndarray]:
        made = found.computed[source][0].run(instance, read)
        return {f"computed:{name}": _elements(tensor) for name, tensor in made.items()}

    computed = {
        source: ComputedSource(operation=_operation(group), sources=tuple(name for name, _ in group.entries),
                               shape=found.views[parameter].shape)
        for source, (group, parameter) in found.computed.items()
    }  # fmt: skip
    warnings = tuple(problem for problem in problems if problem.severity == "warning") + tuple(
        Problem(kind="computed_group", severity="warning", tensor=group.name,
                detail=f"{group.name}: transformers' operation runs on whole tensors ({group.num_bytes} bytes at once): "
                       f"{group.reason}")
        for group in {group.name: group for group, _ in found.computed.values()}.values()
    )  # fmt: skip
    return CheckpointSource(views=found.views, computed=computed, compute=compute, used=frozenset(found.used),
                            dropped=found.dropped, warnings=warnings)  # fmt: skip


def _operation(group: ComputedGroup) -> str:
    return "computed:" + "+".join(repr(operation) for operation in group.converter.operations)


def _elements(tensor: torch.Tensor) -> np.ndarray:
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(_UNSIGNED[flat.element_size()]).numpy()


def _tied_differences(release: Release, found: CheckpointMap) -> list[Problem]:
    """Where both sides of a tie are stored: equal ones become one (the other is dropped), others are an error."""
    problems = []
    for target, source in found.duplicates.items():
        first, second = found.views[target], found.views[source]
        with SourceReader(release.folder, release.tensors) as reader:
            blocks = zip(BlockCopier(reader).blocks(first), BlockCopier(reader).blocks(second), strict=False)
            same = first.dtype == second.dtype and first.shape == second.shape and all(a[1] == b[1] for a, b in blocks)
        names = sorted({piece.source for piece in first.pieces})
        if same:
            kept = {piece.source for name, view in found.views.items() if name != target for piece in view.pieces}
            for name in set(names) - kept:
                found.used.discard(name)
                found.dropped[name] = f"the same bytes as {source}, which {target} is tied to"
            found.views[target] = second
        else:
            problems.append(Problem(kind="tied_weights_differ", severity="error", tensor=names[0] if names else target,
                                    detail=f"the config ties {target} to {source}, and the checkpoint stores both with "
                                    "different values"))  # fmt: skip
    return problems
