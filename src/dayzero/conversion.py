"""The `convert` verb: what to convert for, where to, and what is printed. It stands between the command line and `weights`."""

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.table import Table

from dayzero.calibration import calibrated_codes, discard
from dayzero.core.errors import DayZeroError
from dayzero.core.model import ModelDescription
from dayzero.core.plan import Layout, Plan
from dayzero.core.records import read_record, record_json, to_dict
from dayzero.core.units import format_bytes
from dayzero.model.remote.objects import is_remote
from dayzero.progress import bytes_progress

Say = Callable[[str], None]
FORMS = (None, "hf", "gguf")


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What the command line asked for."""

    path: str | None
    out: str
    plan_file: Path | None = None
    degrees: Mapping[str, int] = field(default_factory=dict)
    to: str | None = None
    dtype: str | None = None
    quantize: str | None = None
    keep: tuple[str, ...] = ()
    override: tuple[str, ...] = ()
    calibrate: str | None = None
    method: str = "gptq"
    part: str | None = None
    merge: bool = False
    parts: tuple[Path, ...] = ()
    allow_pickle: bool = False
    assume_unscaled: bool = False
    accept_values: bool = False
    spool: Path | None = None
    keep_copy: Path | None = None


def convert_release(asked: Request, say: Say) -> dict[str, Any]:
    """Convert and return the report as JSON. Raises DayZeroError for options that do not go together."""
    if asked.to not in FORMS:
        raise DayZeroError("unknown form to convert to", got=asked.to, want="hf or gguf",
                           fix="give --to hf, --to gguf, or leave it out for rank shards")  # fmt: skip
    if asked.to is not None and (asked.part or asked.merge or asked.plan_file or any(n != 1 for n in asked.degrees.values())):
        raise DayZeroError("parts and degrees are for rank shards", got=f"--to {asked.to} beside them", want="one or the other",
                           fix="leave out --to, or --part, --merge, --plan and the degrees")  # fmt: skip
    if asked.merge:
        from dayzero.weights.merging import merge

        with bytes_progress(say) as progress:
            return record_json(merge(Path(asked.out), asked.parts, accept_values=asked.accept_values, progress=progress))
    assert asked.path is not None
    if asked.to == "gguf":
        others = {"dtype": asked.dtype, "keep": asked.keep, "override": asked.override, "calibrate": asked.calibrate,
                  "allow-pickle": asked.allow_pickle, "assume-unscaled": asked.assume_unscaled, "spool": asked.spool,
                  "accept-values": asked.accept_values}  # fmt: skip
        if (given := [name for name, value in others.items() if value]) or is_remote(asked.path) or is_remote(asked.out):
            raise DayZeroError("a GGUF file is made of a release folder as it is", got=", ".join(given) or "an address",
                               want="--to gguf, with --quantize alone",
                               fix="convert --to hf first, then that to GGUF")  # fmt: skip
        from dayzero.weights.gguf.export import export_gguf

        with bytes_progress(say) as progress:
            return to_dict(export_gguf(Path(asked.path), Path(asked.out), asked.quantize or "bf16", progress=progress))
    changes, folder = _calibrated(asked, _changes(asked), say)
    made = _converted(asked, changes, say)
    if folder is not None:
        discard(folder)  # what was made holds all of it
    return made


def _converted(asked: Request, changes: Any, say: Say) -> dict[str, Any]:
    assert asked.path is not None
    if asked.to == "hf":
        from dayzero.weights.to_hf import export

        with bytes_progress(say) as progress:
            return record_json(export(asked.path, asked.out, changes=changes, progress=progress))
    return _to_shards(asked, changes, say)


def _calibrated(asked: Request, changes: Any, say: Say) -> tuple[Any, Path | None]:
    """The changes with codes chosen on text, and the folder that holds those, where that was asked for."""
    if asked.calibrate is None:
        if changes.quantize is not None and asked.quantize == "w8a8-static":
            raise DayZeroError("scales of a layer's inputs are measured", got="w8a8-static without a text", want="--calibrate",
                               fix="give --calibrate default, or take w8a8")  # fmt: skip
        return changes, None
    if changes.quantize is None or asked.part is not None:
        raise DayZeroError("--calibrate chooses codes", got="no --quantize" if asked.part is None else "a part of the work",
                           want="a preset, and the whole of the work", fix="give --quantize, without --part")  # fmt: skip
    if asked.to == "hf" and asked.quantize == "w8a8-static":
        raise DayZeroError("input scales are not written to that form yet", got="--to hf --quantize w8a8-static",
                           want="rank shards, or w8a8", fix="leave --to out, or take w8a8")  # fmt: skip
    folder = Path(asked.out).parent / f".{Path(asked.out).name}.calibration"
    assert asked.path is not None
    given = calibrated_codes(Path(asked.path), changes.quantize, asked.calibrate, asked.method, folder, say)
    return replace(changes, given=given), folder


def _to_shards(asked: Request, changes: Any, say: Say) -> dict[str, Any]:
    from dayzero.stages import require_sound
    from dayzero.weights.convert import convert
    from dayzero.weights.parts import convert_part, parse_part

    assert asked.path is not None
    model = _describe(asked.path, changes)
    require_sound(model)
    layout = _layout(model, asked.plan_file, dict(asked.degrees))
    with bytes_progress(say) as progress:
        if asked.part is None:
            made = convert(asked.path, model, layout, asked.out, changes=changes, progress=progress, keep=asked.keep_copy,
                           spool=asked.spool)  # fmt: skip
        else:
            number, count = parse_part(asked.part)
            made = convert_part(asked.path, model, layout, Path(asked.out), number, count, changes=changes, progress=progress)
    return record_json(made)


def _describe(path: str, changes: Any) -> ModelDescription:
    """The model of a release wherever it lies."""
    from dayzero.weights.places.stores import open_source

    with open_source(path, allow_pickle=changes.allow_pickle) as source:
        return source.describe()


def _changes(asked: Request) -> Any:
    from dayzero.core.units import canonical_dtype
    from dayzero.weights.changes import Changes
    from dayzero.weights.quantize.policy import Policy
    from dayzero.weights.quantize.presets import preset

    policy = None
    if asked.quantize is not None:
        pairs = [rule.rpartition("=")[::2] for rule in asked.override]
        if any(not pattern or not name for pattern, name in pairs):
            raise DayZeroError("an override is not RULE=PRESET", got=", ".join(asked.override), want="for instance head=int8",
                               fix="correct --override")  # fmt: skip
        policy = Policy(preset=preset(asked.quantize).name, keep=asked.keep, overrides=tuple(pairs))
        if asked.dtype is not None:
            raise DayZeroError("codes are made of the release's own numbers", got=f"--dtype {asked.dtype} with --quantize",
                               want="one of them", fix="leave --dtype out")  # fmt: skip
    elif asked.keep or asked.override:
        raise DayZeroError("--keep and --override speak of --quantize", got="no --quantize", want="a preset",
                           fix="give --quantize, or leave them out")  # fmt: skip
    dtype = None if asked.dtype is None else canonical_dtype(asked.dtype)
    if dtype not in (None, "bfloat16", "float16", "float32"):
        raise DayZeroError("weights cannot become that dtype", got=asked.dtype, want="bfloat16, float16 or float32",
                           fix="choose one of them, or --quantize")  # fmt: skip
    return Changes(dtype=dtype, quantize=policy, upcast_unscaled=asked.assume_unscaled, allow_pickle=asked.allow_pickle,
                   accept_values=asked.accept_values)  # fmt: skip


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


def verify_artifact(folder: Path, source: str | None, say: Say, *, allow_pickle: bool = False) -> dict[str, Any]:
    """Read an artifact back against its ledgers, and its source where given."""
    from dayzero.weights.proof.verify import prove

    started = time.monotonic()
    with bytes_progress(say) as progress:
        found = prove(folder, source, allow_pickle=allow_pickle, progress=progress)
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    return {
        "schema": "dayzero.verify/1",
        "artifact": str(folder),
        "problems": [to_dict(problem) for problem in found.problems],
        "proved": list(found.proved),
        "not_proved": list(found.not_proved),
        "bytes_read": size,
        "bytes_written": 0,
        "seconds": round(time.monotonic() - started, 3),
    }


def problems_table(report: dict[str, Any]) -> Any:
    if not report["problems"]:
        lines = [f"{report['artifact']}: {format_bytes(report['bytes_read'])} agree with the ledger ({report['seconds']} s)"]
        lines += [f"  proved: {text}" for text in report["proved"]] + [f"  not proved: {text}" for text in report["not_proved"]]
        return "\n".join(lines)
    table = Table("kind", "file", "tensor", "detail", title=f"{len(report['problems'])} problems")
    for problem in report["problems"]:
        table.add_row(problem["kind"], problem["file"] or "", problem["tensor"] or "", problem["detail"])
    return table


def result_table(report: dict[str, Any]) -> Any:
    rate = report["bytes_written"] / max(report["seconds"], 1e-9)
    reused = " (an artifact that was there is reused)" if report.get("reused") else ""
    lines = [
        f"{report.get('artifact') or report.get('file')}: {format_bytes(report['bytes_written'])} written in "
        f"{report['seconds']:.1f} s, {format_bytes(rate)}/s{reused}"
    ]
    if (made := report.get("quantize")) is not None:
        lines += _quantized(made)
    lines += [f"  {problem['severity']}: {problem['detail']}" for problem in report["problems"]]
    return "\n".join(lines)


def _quantized(made: dict[str, Any]) -> list[str]:
    """What was stored in fewer bits, what that lost, and what stayed."""
    errors = sorted(made["errors"], key=lambda one: -one["relative"])
    if not errors:
        return ["  nothing was quantized"]
    middle, worst = errors[len(errors) // 2], errors[0]
    reasons = Counter(made["kept"].values())
    return [
        f"  {made['preset']}: {len(errors)} matrices, relative error {middle['relative']:.3g} in the middle, "
        f"{worst['relative']:.3g} at worst ({worst['tensor']})",
        "  kept: " + "; ".join(f"{count} ({reason})" for reason, count in reasons.most_common()),
    ]
