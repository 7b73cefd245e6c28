"""A release and its description in; where every parameter's elements come from out, after all checks that need no bytes.

Builds the class on the meta device, maps the checkpoint through transformers, shows that doubly stored tied weights are
equal, and turns every error into one refusal that lists them all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import torch

from dayzero.core.errors import DayZeroError
from dayzero.core.model import ModelDescription, Problem
from dayzero.model.headers import TensorEntry
from dayzero.model.release import Release, damaged
from dayzero.model.resolve import resolve
from dayzero.weights.algebra import View
from dayzero.weights.copying import BlockCopier, unsigned_type
from dayzero.weights.decoding import Decoder
from dayzero.weights.forms.stored import Decoded, decode_stored, is_quantized
from dayzero.weights.ledger import SAME_BYTES
from dayzero.weights.mapping import CheckpointMap, ComputedGroup, map_checkpoint
from dayzero.weights.reading import ByteStore, LocalStore, SourceReader
from dayzero.weights.symbolic import torch_dtype
from dayzero.weights.writing import MadeSource


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointSource:
    """`views` by parameter, over stored tensors and what is `made` of them; `used` and `dropped` cover all stored tensors."""

    release: Release
    store: ByteStore
    views: dict[str, View]
    decoders: dict[str, Decoder]
    made: dict[str, MadeSource]
    compute: Callable[[str], dict[str, np.ndarray]]
    used: frozenset[str]
    dropped: dict[str, str]
    warnings: tuple[Problem, ...]
    tensors: dict[str, TensorEntry]  # the checkpoint in plain numbers, by the names a plain one has
    was_coded: bool = False  # whether the release stored codes, or says so
    transposed: frozenset[str] = frozenset()  # parameters that the class keeps as [..., input, output]

    def reader(self) -> SourceReader:
        return SourceReader(self.store, self.release.tensors, decoders=self.decoders, compute=self.compute)


def open_checkpoint(
    release: Release, model: ModelDescription, store: ByteStore | None = None, *, decoded: Decoded | None = None
) -> CheckpointSource:
    """`store`: what the weights are read through, where that is not the release's folder. decoded: the release in plain
    numbers, where that is known already.

    Raises DayZeroError listing everything wrong: unfilled parameters, unused tensors, shapes, tied weights that differ."""
    was_coded = is_quantized(release) if decoded is None else bool(decoded.decoders) or is_quantized(release)
    decoded = decoded or decode_stored(release, model.dtype, store=store)
    resolved = resolve(release)
    if isinstance(resolved, Problem):
        raise DayZeroError(f"{release.name} cannot be converted", got=resolved.detail,
                           want="a class that defines the parameters",
                           fix="install a transformers that has it: the release's own code only describes it")  # fmt: skip
    instance = resolved.build(torch_dtype(model.dtype))
    found = map_checkpoint(instance, decoded.tensors, num_mtp_layers=model.dimensions.num_mtp_layers)
    store = store or LocalStore(release.folder)
    reader = SourceReader(store, release.tensors, decoders=decoded.decoders)
    problems = [*release.errors, *decoded.problems, *found.problems, *_tied_differences(reader, found)]
    if errors := [problem for problem in problems if problem.severity == "error"]:
        raise damaged(errors, str(release.folder))

    def read(name: str) -> torch.Tensor:
        entry = decoded.tensors[name]
        data = bytearray(entry.num_bytes)
        reader.read_into(name, 0, memoryview(data))  # others may be reading from the same store: it stays open
        return torch.frombuffer(data, dtype=torch_dtype(entry.dtype)).reshape(entry.shape) if data else torch.empty(entry.shape)

    def compute(source: str) -> dict[str, np.ndarray]:
        made = found.computed[source][0].run(instance, read)
        return {f"computed:{name}": _elements(tensor) for name, tensor in made.items()}

    def stored(names: Iterable[str]) -> tuple[str, ...]:
        """The stored tensors behind logical names."""
        parts = (decoded.decoders[name].sources if name in decoded.decoders else (name,) for name in names)
        return tuple(dict.fromkeys(one for part in parts for one in part))

    made = MadeSource.of(decoded.decoders)
    for source, (group, parameter) in found.computed.items():
        sources = stored(name for name, _ in group.entries)
        made[source] = MadeSource(operation=_operation(group), sources=sources, shape=found.views[parameter].shape)
    warnings = tuple(problem for problem in problems if problem.severity == "warning") + tuple(
        Problem(kind="computed_group", severity="warning", tensor=group.name,
                detail=f"{group.name}: transformers' operation runs on whole tensors ({group.num_bytes} bytes at once): "
                       f"{group.reason}")
        for group in {group.name: group for group, _ in found.computed.values()}.values()
    )  # fmt: skip
    used = frozenset(stored(found.used))
    dropped = {one: reason for name, reason in found.dropped.items() for one in stored([name]) if one not in used}
    dropped |= decoded.dropped
    return CheckpointSource(release=release, store=store, views=found.views, decoders=decoded.decoders, made=made,
                            compute=compute, used=used, dropped=dropped, warnings=warnings, tensors=decoded.tensors,
                            was_coded=was_coded, transposed=transposed_parameters(instance, model))  # fmt: skip


def transposed_parameters(instance: torch.nn.Module, model: ModelDescription) -> frozenset[str]:
    """Stacked experts that the class multiplies from the right: as it says itself, or where only that fits its width."""
    hidden, found = model.dimensions.hidden_size, set()
    for parameter in model.parameters:
        if parameter.role != "expert" or len(parameter.shape) != 3:
            continue
        owner, _, leaf = parameter.name.rpartition(".")
        said = getattr(instance.get_submodule(owner), "is_transposed", None)
        rows, columns = parameter.shape[1:]
        out = "down" in leaf or "output" in leaf  # what leads back to the model's width
        fits = rows != columns and (columns == hidden if out else rows == hidden)
        if said if said is not None else fits:
            found.add(parameter.name)
    return frozenset(found)


def _operation(group: ComputedGroup) -> str:
    return "computed:" + "+".join(repr(operation) for operation in group.converter.operations)


def _elements(tensor: torch.Tensor) -> np.ndarray:
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(unsigned_type(flat.element_size())).numpy()


def _tied_differences(reader: SourceReader, found: CheckpointMap) -> list[Problem]:
    """Where both sides of a tie are stored: equal ones become one (the other is dropped), others are an error."""
    problems = []
    for target, source in found.duplicates.items():
        first, second = found.views[target], found.views[source]
        with reader:
            blocks = zip(BlockCopier(reader).blocks(first), BlockCopier(reader).blocks(second), strict=False)
            same = first.dtype == second.dtype and first.shape == second.shape and all(a[1] == b[1] for a, b in blocks)
        names = sorted({piece.source for piece in first.pieces})
        if same:
            kept = {piece.source for name, view in found.views.items() if name != target for piece in view.pieces}
            for name in set(names) - kept:
                found.used.discard(name)
                found.dropped[name] = f"{SAME_BYTES}{source}, which {target} is tied to"
            found.views[target] = second
        else:
            problems.append(Problem(kind="tied_weights_differ", severity="error", tensor=names[0] if names else target,
                                    detail=f"the config ties {target} to {source}, and the checkpoint stores both with "
                                    "different values"))  # fmt: skip
    return problems
