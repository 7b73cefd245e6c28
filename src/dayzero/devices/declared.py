"""What each device's plugin or library is known to have, from public documents: one YAML file per torch device string.

Goes in: a torch device string. Comes out: a `DeclaredTable` that answers for a kind of operator with a binding, a kernel, its
conditions and its source, or with None where nothing is known. `any.yaml` holds what is true of every device that torch
reaches: the core ATen operators, those that torch composes itself, and what semantic operators are composed of. Nothing is
asked of a device and torch is not imported: what really runs is measured by `ops.mapping`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

from dayzero.core.coverage import Declared, TargetCoverage, coverage_of, kinds_of
from dayzero.core.errors import DayZeroError
from dayzero.core.model import ModelDescription
from dayzero.core.operators import Binding
from dayzero.devices.declared_files import ANY, ATEN, AnyFile, Composition, DeviceFile, read_any_file, read_device_file

OPERATORS = Path(__file__).parent / "operators"
# From what always is right to what stops a model: a composition is as good as its worst part.
WORST_LAST: tuple[Binding, ...] = ("library", "fused", "custom", "composed", "fallback", "missing")


@dataclass(frozen=True, kw_only=True, slots=True)
class DeclaredTable:
    """The answers for one device: its own file (None where there is none) before `any`."""

    device: str
    own: DeviceFile | None
    shared: AnyFile
    notes: tuple[str, ...] = field(default=())

    def find(self, kind: str) -> Declared | None:
        """What is declared for a kind of node, None where no table knows it."""
        if self.own and (entry := self.own.operators.get(kind)):
            return Declared(binding=entry.binding, kernel=entry.kernel, source=entry.source, table=self.own.device,
                            conditions=entry.conditions)  # fmt: skip
        if kind.startswith(ATEN):
            name = kind.removeprefix(ATEN)
            found = self._library_operator(name)
            if found is None and (plain := functional_name(name)) != name and (found := self._library_operator(plain)):
                found = replace(found, conditions=(*found.conditions, f"the in-place form of {ATEN}{plain}"))
            return found
        composition = self.shared.compositions.get(kind)
        return self._composed(kind, composition) if composition else None

    def for_kinds(self, kinds: Iterable[str]) -> dict[str, Declared]:
        """The plain mapping that `core.coverage` takes; kinds that no table knows are left out."""
        return {kind: found for kind in kinds if (found := self.find(kind))}

    def _library_operator(self, name: str) -> Declared | None:
        own, shared, kernel = self.own, self.shared, ATEN + name
        if own and own.aten and name in own.aten.names:
            return Declared(binding="library", kernel=kernel, source=own.aten.source, table=own.device,
                            reason=f"{own.library} registers a kernel")  # fmt: skip
        if name in shared.composite.names:
            in_core = name in shared.core.names or functional_name(name) in shared.core.names
            return Declared(binding="library" if in_core else "composed", kernel=kernel,
                            source=shared.composite.source, table=ANY,
                            reason="torch's own implementation out of other operators")  # fmt: skip
        if own and own.unlisted and name in shared.looked_up:
            return Declared(binding=own.unlisted.binding, kernel=kernel if own.unlisted.binding == "fallback" else "",
                            source=own.unlisted.source, table=own.device, reason=own.unlisted.reason)  # fmt: skip
        if name in shared.core.names:
            return Declared(binding="library", kernel=kernel, source=shared.core.source, table=ANY,
                            reason="a core ATen operator: every device should have it")  # fmt: skip
        if name in shared.decomposed.names:
            return Declared(binding="composed", kernel=kernel, source=shared.decomposed.source, table=ANY,
                            reason="torch expresses it in core operators where it compiles")  # fmt: skip
        return None

    def _composed(self, kind: str, composition: Composition) -> Declared | None:
        """As good as its worst part; a single part is the operator itself."""
        parts = {part: self.find(part) for part in composition.parts}
        known = [found for found in parts.values() if found]
        if len(known) < len(parts):
            return None
        worst = max(known, key=lambda found: WORST_LAST.index(found.binding))
        if len(known) == 1:
            return replace(worst, conditions=(*composition.conditions, *worst.conditions))
        failing = [part for part, found in parts.items() if found and found.binding in ("fallback", "missing")]
        if failing:
            reason = f"composed, but for {', '.join(failing)}: {worst.reason}"
            return Declared(binding=worst.binding, kernel=", ".join(failing), source=worst.source, table=worst.table,
                            reason=reason, conditions=composition.conditions)  # fmt: skip
        return Declared(binding="composed", kernel=" + ".join(composition.parts), source=composition.source, table=ANY,
                        reason=f"no kernel for {kind} is declared: library operators compute it",
                        conditions=composition.conditions)  # fmt: skip


def declared_devices() -> tuple[str, ...]:
    """Torch device strings that have a file of their own."""
    return tuple(sorted(path.stem for path in OPERATORS.glob("*.yaml") if path.stem != ANY))


def declared_table(device: str) -> DeclaredTable:
    """The table of a torch device string such as `npu` or `cuda:0`. Raises DayZeroError where the device has none."""
    kind = device.partition(":")[0]
    if kind not in declared_devices():
        near = difflib.get_close_matches(kind, declared_devices(), n=1)
        raise DayZeroError(
            f"nothing is declared for the device {device!r}",
            got=kind,
            want=f"one of: {', '.join(declared_devices())}",
            fix=f"did you mean {near[0]!r}?" if near else f"add devices/operators/{kind}.yaml, or use what any device has",
        )
    own = _shipped(kind)
    return DeclaredTable(device=device, own=own, shared=_shared(), notes=own.notes)


def table_or_any(device: str) -> DeclaredTable:
    """As `declared_table`; for a device without a file what any device has, and a note that says so."""
    try:
        return declared_table(device)
    except DayZeroError as error:
        return DeclaredTable(device=device, own=None, shared=_shared(),
                             notes=(f"{error.what}: what any device should have is shown",))  # fmt: skip


def declared_coverage(
    model: ModelDescription, device: str, *, batch: int = 1, prompt_tokens: int = 2048, context_tokens: int = 2048
) -> TargetCoverage:
    """The coverage of a model on a device by what is declared for it."""
    table = table_or_any(device)
    return coverage_of(
        model, table.for_kinds(kinds_of(model)), device=device, batch=batch, prompt_tokens=prompt_tokens,
        context_tokens=context_tokens, notes=table.notes,
    )  # fmt: skip


def functional_name(name: str) -> str:
    """`add_.Tensor` -> `add.Tensor`: what an in-place operator computes. Other names as they are."""
    base, dot, overload = name.partition(".")
    return base.removesuffix("_") + dot + overload if not base.startswith("__") else name


@cache
def _shipped(device: str) -> DeviceFile:
    return read_device_file(OPERATORS / f"{device}.yaml")


@cache
def _shared() -> AnyFile:
    return read_any_file(OPERATORS / f"{ANY}.yaml")
