"""The records of one run folder, read once: each is there or None. A damaged record is an error, never a missing one."""

import os
import posixpath
import shlex
from dataclasses import dataclass, field
from typing import Any, TypeVar

from dayzero.core.artifact import ArtifactLayout, WeightsReport
from dayzero.core.model import ModelDescription
from dayzero.core.operators import OperatorMap
from dayzero.core.plan import Plan
from dayzero.core.records import read_record
from dayzero.core.reports import BenchReport, NumericsReport, ServingReport, StabilityReport
from dayzero.core.runstore import STAGES, RunStore

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRecords:
    """What a run folder holds. `stale`: stages whose file was made from inputs that have changed since."""

    run: str  # how a command names the run folder, from the folder that holds `runs`
    source: str = "PATH"  # the release, from there too
    inputs: dict[str, Any] = field(default_factory=dict)
    model: ModelDescription | None = None
    plan: Plan | None = None
    weights: WeightsReport | None = None
    artifact: ArtifactLayout | None = None
    operators: OperatorMap | None = None
    serving: ServingReport | None = None
    numerics: NumericsReport | None = None
    bench: BenchReport | None = None
    soak: StabilityReport | None = None
    stale: tuple[str, ...] = ()

    def has(self, stage: str) -> bool:
        held = {"inspect": self.model, "plan": self.plan, "convert": self.weights, "map": self.operators, "serve": self.serving,
                "validate": self.numerics, "bench": self.bench, "soak": self.soak}  # fmt: skip
        return held[stage] is not None

    def command(self, stage: str) -> str:
        """The command that repeats a stage's checks, with paths relative to the folder that holds `runs`."""
        if stage == "inspect":
            words = ["inspect", self.source]
        elif stage == "plan":
            words = ["plan", f"{self.run}/{STAGES['inspect'][0]}", "--target", str(self.inputs.get("target_id", "TARGET"))]
            if self.plan is not None:
                words += ["--devices", str(self.plan.devices), "--context", str(self.plan.context_tokens),
                          "--concurrency", str(self.plan.concurrency)]  # fmt: skip
        elif stage == "convert":
            artifact = posixpath.normpath(f"{self.run}/{self.weights.artifact}") if self.weights else "ARTIFACT"
            words = ["convert", "--verify", artifact, "--source", self.source]
        else:
            words = [stage, self.run]
        return "dayzero " + shlex.join(words)


def read_run(store: RunStore) -> RunRecords:
    """Every record that is there. Raises DayZeroError when one is damaged or of another schema version."""
    weights = _read(store, "convert", WeightsReport)
    layout = (store.folder / weights.artifact / "layout.json") if weights is not None else None
    folder, inputs = store.folder.absolute(), store.inputs
    source = str(inputs.get("source", "PATH"))
    return RunRecords(
        run=f"{folder.parent.name}/{folder.name}", inputs=inputs,
        source=os.path.relpath(source, folder.parent.parent) if os.path.isabs(source) else source,
        model=_read(store, "inspect", ModelDescription), plan=_read(store, "plan", Plan), weights=weights,
        artifact=read_record(ArtifactLayout, layout) if layout is not None and layout.is_file() else None,
        operators=_read(store, "map", OperatorMap), serving=_read(store, "serve", ServingReport),
        numerics=_read(store, "validate", NumericsReport), bench=_read(store, "bench", BenchReport),
        soak=_read(store, "soak", StabilityReport),
        stale=tuple(stage for stage in STAGES
                    if stage != "report" and store.path(stage).exists() and not store.is_valid(stage)),
    )  # fmt: skip


def _read(store: RunStore, stage: str, cls: type[T]) -> T | None:
    return store.read(stage, cls) if store.path(stage).exists() else None
