"""`dayzero plan` and `dayzero prepare`: from what the command line is given to records, files and pages.

Nothing is computed here that `plan/` does not; nothing is printed. Files go to a folder that is made for them, all or none.
"""

import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dayzero import inputs
from dayzero.core.errors import DayZeroError
from dayzero.core.model import ModelDescription
from dayzero.core.plan import Explanation, FrontierPoint, LayoutList, Plan
from dayzero.core.records import from_dict, write_text_atomic
from dayzero.core.target import Target, Workload, load_yaml
from dayzero.plan import PlanOptions, explain, frontier, make_plan, plan_all, with_figures
from dayzero.plan.experience import correction_for


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """Model, target and workload of a plan."""

    model: ModelDescription
    target: Target
    workload: Workload
    options: PlanOptions

    def plan(self) -> Plan:
        made = make_plan(self.model, self.target, self.workload, self.options,
                         corrections=correction_for(self.target.id, engine=self.options.engine))  # fmt: skip
        return replace(made, frontier=self.frontier(made)) if made.feasible else made

    def all(self) -> LayoutList:
        return plan_all(self.model, self.target, self.workload, self.options)

    def explain(self, layout: str) -> Explanation:
        return explain(self.model, self.target, self.workload, self.options, layout)

    def frontier(self, plan: Plan) -> tuple[FrontierPoint, ...]:
        return frontier(self.model, self.target, self.workload, self.options, plan.layout)


def asked(
    path: Path,
    target: str,
    workload: Path | None,
    given: Mapping[str, Any],
    *,
    figures: Sequence[str] = (),
    preset: Path | None = None,
    trust_remote_code: bool = False,
) -> Asked:
    """`given`: fields of PlanOptions that were given; they win over a preset's. `figures`: `name=value` of the target's."""
    from dayzero.devices.targets import load_target

    base = {} if preset is None else dict((load_yaml(preset) or {}).get("options") or {})
    pairs = {}
    for one in figures:
        name, equals, value = one.partition("=")
        if not equals:
            raise DayZeroError("--set takes a figure and its value", got=one, want="such as card.memory_bytes=68719476736",
                               fix="write NAME=VALUE")  # fmt: skip
        pairs[name.strip()] = value.strip()
    return Asked(
        model=inputs.description(path, trust_remote_code),
        target=with_figures(load_target(target), pairs),
        workload=inputs.workload(workload),
        options=from_dict(PlanOptions, base | dict(given), source="plan options" if preset is None else str(preset)),
    )


def role_degrees(given: Sequence[str]) -> dict[str, int]:
    """`embedding=16` and the like. Raises DayZeroError for what is none."""
    degrees = {}
    for one in given:
        role, _, degree = one.partition("=")
        if not degree.isdigit() or not int(degree):
            raise DayZeroError("--role-tp takes a role and a number of cards", got=one, want="such as head=8",
                               fix="write ROLE=N")  # fmt: skip
        degrees[role.strip()] = int(degree)
    return degrees


def export_files(
    case: Asked, plan: Plan, engine: str, folder: Path | None, *, model_path: str | None, version: str | None
) -> list[Path]:
    """Write what another engine needs for a plan. Raises DayZeroError for what it cannot be told; nothing is then written."""
    from dayzero.plan.export import export

    if folder is None:
        raise DayZeroError("--export needs a place", got="no --out", want="a new folder", fix="give --out DIR")
    if not plan.feasible:
        raise DayZeroError(f"{plan.model} does not fit, so there is nothing to start", got="; ".join(plan.reasons[:2]),
                           want="a feasible plan", fix="follow the reasons, then export")  # fmt: skip
    return write_folder(folder, export(plan, case.model, case.target, engine, model_path=model_path, version=version))


def prepare(family: Path, target: str, sizes: str | None, workload: Path | None, folder: Path) -> list[Path]:
    """Presets of an announced family, one file a size."""
    import json

    from dayzero.devices.targets import load_target
    from dayzero.model.provisional import provisional
    from dayzero.model.release import open_release
    from dayzero.plan.family import load_family
    from dayzero.plan.prepare import parse_sizes, preset_files
    from dayzero.plan.prepare import prepare as make_presets

    def describe(config: Mapping[str, Any]) -> ModelDescription:
        with tempfile.TemporaryDirectory() as scratch:
            place = Path(scratch) / "config.json"
            place.write_text(json.dumps(config), encoding="utf-8")
            return provisional(open_release(place))

    presets = make_presets(
        load_family(family), load_target(target), parse_sizes(sizes) if sizes else (), describe=describe,
        workload=inputs.workload(workload), options=PlanOptions(),
    )  # fmt: skip
    return write_folder(folder, preset_files(presets))


def write_page(case: Asked, plan: Plan, path: Path) -> None:
    from dayzero.report.html import render_plan

    path.parent.mkdir(parents=True, exist_ok=True)
    write_text_atomic(path, render_plan(plan, case.target.node.num_cards))


def write_folder(folder: Path, files: Mapping[str, str]) -> list[Path]:
    """All files or none: they are made beside the folder and moved there at once. An existing folder is not touched."""
    if folder.exists() and any(folder.iterdir()):
        raise DayZeroError("the folder is not empty", got=folder, want="a new or an empty folder", fix="choose another --out")
    folder.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}-"))
    try:
        for name, text in files.items():
            place = work / name
            place.parent.mkdir(parents=True, exist_ok=True)
            write_text_atomic(place, text)
            if name.endswith(".sh"):
                place.chmod(0o755)
        work.chmod(0o755)
        os.replace(work, folder)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise
    return [folder / name for name in files]
