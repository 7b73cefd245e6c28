"""`dayzero inspect`: a first answer from keys within seconds, the measured one, and what was asked beside it.

The first answer is shown before torch is imported. Beside the description: the difference to another model, and how much of
the operators a target has kernels for. Exceptions are the user's to read (`DayZeroError`), and carry the answers that were
there before them in their details; nothing is printed here.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dayzero.core.coverage import TargetCoverage
from dayzero.core.difference import Difference, difference
from dayzero.core.errors import DayZeroError
from dayzero.core.model import ModelDescription
from dayzero.core.records import read_record, write_text_atomic
from dayzero.core.sized_operators import engine_step
from dayzero.model.provisional import provisional
from dayzero.model.release import Release, open_release
from dayzero.model.remote.objects import is_remote
from dayzero.summaries import corrections, inspect_summary

MUCH_MORE = 1.5  # a class that computes so many times what an engine does: its shares are told apart


@dataclass(frozen=True, kw_only=True, slots=True)
class Inspection:
    """`first` is None where keys do not suffice for an answer; `model` is the same record where that is all there is."""

    first: ModelDescription | None
    model: ModelDescription
    against: Difference | None = None
    coverage: TargetCoverage | None = None

    def summary(self) -> dict[str, Any]:
        return inspect_summary(
            self.model, corrected=self.corrections(), against=self.against, coverage=self.coverage
        )

    def corrections(self) -> list[dict[str, Any]]:
        """Empty where there is no class to measure on: the first answer is then all there is."""
        return corrections(self.first, self.model) if self.first is not None and self.model.parameters else []


def inspect(
    path: str,
    *,
    trust_remote_code: bool = False,
    only_first: bool = False,
    against: str | None = None,
    target: str | None = None,
    show_first: Callable[[ModelDescription], None],
) -> Inspection:
    """`show_first` gets the provisional answer as soon as it is there. only_first: nothing else is computed."""
    release = opened(path)
    first = None
    if only_first:
        first = provisional(release)
    else:
        with contextlib.suppress(DayZeroError):  # what is wrong is said by the description, whose class may know more
            first = provisional(release)
    if first is not None:
        show_first(first)
    if only_first:
        assert first is not None
        model = first
    else:
        from dayzero.model.describe import describe_release

        with _keeping(first):
            model = describe_release(release, trust_remote_code=trust_remote_code, operators=True)
    with _keeping(model):
        return Inspection(
            first=first,
            model=model,
            against=None if against is None else difference(_other(against, trust_remote_code, only_first), model),
            coverage=None if target is None else _coverage(model, target),
        )


@contextlib.contextmanager
def _keeping(answer: ModelDescription | None) -> Iterator[None]:
    """What fails in here takes the answer that is there already along, for scripts; people have seen the first one."""
    try:
        yield
    except Exception as error:
        if answer is not None:
            own = error.details if isinstance(error, DayZeroError) else {}
            error.details = inspect_summary(answer) | own  # type: ignore[attr-defined]
        raise


def opened(path: str) -> Release:
    """A release folder, a config.json, or the address of a release, of which only config, index and headers are read."""
    if is_remote(path):
        from dayzero.model.remote.release import open_remote_release

        return open_remote_release(path)
    return open_release(Path(path))


def _other(path: str, trust_remote_code: bool, only_first: bool) -> ModelDescription:
    """The model to compare with: a release, or the 1_model.json of an earlier run."""
    if path.endswith("_model.json"):
        return read_record(ModelDescription, Path(path))
    if only_first:
        return provisional(opened(path))
    from dayzero.model.describe import describe_release

    return describe_release(opened(path), trust_remote_code=trust_remote_code, operators=True)


def _coverage(model: ModelDescription, target: str) -> TargetCoverage:
    """As declared for the target's device: it need not be here. `dayzero map` measures where it is."""
    from dayzero.devices.declared import declared_coverage
    from dayzero.devices.targets import load_target

    found = declared_coverage(model, load_target(target).software.torch_device)
    engine = engine_step(model, new_tokens=1, context_tokens=found.decode.context_tokens or 1) if found.decode else None
    if engine is not None and found.decode is not None and (found.decode.flops or 0) > MUCH_MORE * engine.flops:
        told = (
            f"shares are those of the class as it is written, which computes {(found.decode.flops or 0) / engine.flops:.0f} "
            "times what an engine does in a decode step (it expands its cache, or runs all experts)"
        )
        return replace(found, notes=(told, *found.notes))
    return found


def write_page(found: Inspection, path: Path) -> None:
    from dayzero.report.html import render_model

    path.parent.mkdir(parents=True, exist_ok=True)
    write_text_atomic(path, render_model(
        found.model, corrections=found.corrections(), against=found.against, coverage=found.coverage
    ))  # fmt: skip
