"""The `convert` verb: what to convert for, where to, and what is printed. It stands between the command line and `weights`."""

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.table import Table

from dayzero.core.errors import DayZeroError
from dayzero.core.model import ModelDescription
from dayzero.core.plan import Layout, Plan
from dayzero.core.records import read_record, record_json, to_dict
from dayzero.core.units import format_bytes
from dayzero.progress import bytes_progress

Say = Callable[[str], None]


def convert_release(
    path: Path, out: Path, plan_file: Path | None, degrees: dict[str, int], to: str | None, say: Say
) -> dict[str, Any]:
    """Convert and return the report as JSON. `degrees` other than 1 and a plan file exclude each other."""
    from dayzero.weights.convert import convert
    from dayzero.weights.to_hf import export

    if to not in (None, "hf"):
        raise DayZeroError("unknown form to convert to", got=to, want="hf", fix="give --to hf, or leave it out for rank shards")
    if to == "hf":
        with bytes_progress(say) as progress:
            return record_json(export(path, out, progress=progress))
    from dayzero.model.describe import describe
    from dayzero.stages import require_sound

    model = describe(path)
    require_sound(model)
    layout = _layout(model, plan_file, degrees)
    with bytes_progress(say) as progress:
        return record_json(convert(path, model, layout, out, progress=progress))


def _layout(model: ModelDescription, plan_file: Path | None, degrees: dict[str, int]) -> Layout:
    """The layout of a plan, or of the degrees given, with pipeline stages cut as the planner cuts them."""
    if plan_file is not None:
        if any(degree != 1 for degree in degrees.values()):
            raise DayZeroError("a plan and degrees exclude each other", got=f"--plan {plan_file} and {degrees}",
                               want="one of them", fix="leave the degrees out: the plan has them")  # fmt: skip
        return read_record(Plan, plan_file).layout
    whole = Layout(tp=degrees["tp"], pp=degrees["pp"], dp=degrees["dp"], cp=degrees["cp"], ep=degrees["ep"])
    if whole.pp == 1:
        return whole
    from dayzero.plan.stages import cut_stages

    costs, first, last = [0] * model.dimensions.num_layers, 0, 0
    for parameter in model.parameters:
        if parameter.layer is not None and parameter.layer < len(costs):
            costs[parameter.layer] += parameter.num_bytes
        elif parameter.role in ("embedding", "tower", "projector"):
            first += parameter.num_bytes
        else:
            last += parameter.num_bytes
    return replace(whole, stages=cut_stages(costs, whole.pp, first_extra=first, last_extra=last))


def verify_artifact(folder: Path, source: Path | None, say: Say) -> dict[str, Any]:
    """Read an artifact back against its ledgers, and its source where given."""
    from dayzero.weights.verify import verify

    started = time.monotonic()
    with bytes_progress(say) as progress:
        problems = verify(folder, source, progress=progress)
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    return {
        "schema": "dayzero.verify/1",
        "artifact": str(folder),
        "problems": [to_dict(problem) for problem in problems],
        "bytes_read": size,
        "bytes_written": 0,
        "seconds": round(time.monotonic() - started, 3),
    }


def problems_table(report: dict[str, Any]) -> Any:
    if not report["problems"]:
        return f"{report['artifact']}: {format_bytes(report['bytes_read'])} agree with the ledger ({report['seconds']} s)"
    table = Table("kind", "file", "tensor", "detail", title=f"{len(report['problems'])} problems")
    for problem in report["problems"]:
        table.add_row(problem["kind"], problem["file"] or "", problem["tensor"] or "", problem["detail"])
    return table


def result_table(report: dict[str, Any]) -> Any:
    rate = report["bytes_written"] / max(report["seconds"], 1e-9)
    reused = " (an artifact that was there is reused)" if report.get("reused") else ""
    return (
        f"{report['artifact']}: {format_bytes(report['bytes_written'])} written in {report['seconds']:.1f} s, "
        f"{format_bytes(rate)}/s{reused}"
    )
