"""The verdict of a run: the run folder's records go in, an `Acceptance` with its four dimensions comes out.

Nothing is measured here. A dimension rests on the checks that the stages made, and on what their records state outright
(problems, evidence, coverage). What no record shows is "not_shown". Names of checks are `stage:name`.
"""

import datetime
from dataclasses import replace

from dayzero.core.names import TOKENIZER_FILES
from dayzero.core.operators import OperatorMap
from dayzero.core.reports import Acceptance, Check, Dimension, Verdict, overall
from dayzero.core.runstore import STAGES, RunStore
from dayzero.report.limits import limits_of, towers_not_served
from dayzero.report.run_records import RunRecords, read_run
from dayzero.report.surface import PREFIX


def build(store: RunStore, *, created: str | None = None) -> Acceptance:
    """Judge a run by its records. `created` (ISO 8601) replaces the clock. Raises DayZeroError on a damaged record."""
    records = read_run(store)
    groups = (
        ("functional correctness", _functional(records), "validate"),
        ("performance", _performance(records), "bench"),
        ("stability", _stability(records), "soak"),
        ("ecosystem completeness", _ecosystem(records), "soak"),
    )
    dimensions = tuple(
        Dimension(name=name, verdict=overall(checks), checks=checks, rerun=records.command(stage))
        for name, checks, stage in groups
    )
    inputs, served = records.inputs, records.model
    return Acceptance(
        verdict=overall(tuple(check for dimension in dimensions for check in dimension.checks)),
        model=served.name if served else str(inputs.get("model") or records.source.rstrip("/").rsplit("/", 1)[-1]),
        target=records.plan.target if records.plan else str(inputs.get("target_id", "unknown")),
        dimensions=dimensions, limits=limits_of(records), inputs=store.input_hashes("report"),
        created=created or datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    )  # fmt: skip


def _functional(records: RunRecords) -> tuple[Check, ...]:
    checks = _missing(records, "inspect", "convert", "map", "serve", "validate")
    if records.stale:
        checks.append(Check(name="run:records belong together", verdict="not_shown", limit="none stale",
                            value=", ".join(records.stale),
                            detail="made from inputs that have changed since; repeat these stages"))  # fmt: skip
    if records.model is not None:
        errors = [problem for problem in records.model.problems if problem.severity == "error"]
        checks.append(_none("inspect:no error in the release", [problem.detail for problem in errors]))
    if (weights := records.weights) is not None:
        checks.append(_none("convert:every byte accounted for", [p.detail for p in weights.problems if p.severity == "error"]))
        checks.append(Check(name="convert:verified by reading back", verdict="pass" if weights.verified else "not_shown",
                            value="verified" if weights.verified else "not verified", limit="verified"))  # fmt: skip
    if records.operators is not None:
        checks += _evidence(records.operators)
    if records.serving is not None:
        checks += _named("serve", records.serving.checks)
    if records.numerics is not None:
        checks += _named("validate", records.numerics.checks)
    return tuple(checks)


def _evidence(operators: OperatorMap) -> list[Check]:
    """Every binding against its definition: the worst error as a multiple of its own limit."""
    proven = [(site, site.evidence) for site in operators.sites if site.evidence is not None]
    bare = [site for site in operators.sites if site.evidence is None and site.binding != "missing"]
    ratio, where = 0.0, ""
    for site, evidence in proven:
        found = evidence.worst_error / evidence.limit if evidence.limit > 0 else (float("inf") if evidence.worst_error else 0.0)
        if not found <= ratio:  # also true for NaN, which must not pass
            ratio, where = found, f"{site.operator} {site.signature} on {site.kernel}"
    verdict: Verdict = "not_shown" if not proven else "pass" if ratio <= 1 else "fail"
    return [
        Check(name="map:bindings agree with their definitions", verdict=verdict, value=ratio if proven else None, limit=1.0,
              where=where, detail=f"worst error / its limit, {len(proven)} kinds of site"),
        Check(name="map:every binding has evidence", verdict="not_shown" if bare else "pass", value=len(bare), limit=0,
              where=", ".join(f"{site.operator} ({site.binding})" for site in bare), required=False),
    ]  # fmt: skip


def _performance(records: RunRecords) -> tuple[Check, ...]:
    checks = _missing(records, "plan", "bench")
    if (plan := records.plan) is not None:
        worst = max(plan.ledger, key=lambda ledger: ledger.total() - ledger.budget_bytes, default=None)
        fits = plan.feasible and (worst is None or worst.total() <= worst.budget_bytes)
        checks.append(Check(name="plan:fits the target's memory", verdict="pass" if fits else "fail",
                            value=worst.total() if worst else None, limit=worst.budget_bytes if worst else None,
                            where=f"rank {worst.rank}" if worst else "", detail="bytes"))  # fmt: skip
    if records.bench is not None:
        checks += _named("bench", records.bench.checks)
    return tuple(checks)


def _stability(records: RunRecords) -> tuple[Check, ...]:
    checks = _missing(records, "soak")
    if records.soak is not None:
        checks += _named("soak", tuple(check for check in records.soak.checks if not check.name.startswith(PREFIX)))
    return tuple(checks)


def _ecosystem(records: RunRecords) -> tuple[Check, ...]:
    checks = _missing(records, "inspect", "map", "soak")
    if records.soak is not None:
        interface = tuple(check for check in records.soak.checks if check.name.startswith(PREFIX))
        nothing = Check(name=f"soak:{PREFIX}interface", verdict="not_shown", value=None, limit=None)
        checks += _named("soak", interface) or [nothing]
    checks += [_tokenizer(records), _chat_template(records)]
    if (operators := records.operators) is not None:
        share = operators.coverage["fallback"].flops_share if "fallback" in operators.coverage else 0.0
        checks.append(_none("map:no operator is missing", list(operators.missing)))
        checks.append(_noted("map:share of FLOPs on fallbacks", share == 0, value=share, limit=0.0,
                             detail="a fallback is right but slow" if share else ""))  # fmt: skip
    if (model := records.model) is not None:
        keys = model.unconsumed_keys
        checks.append(
            _noted("inspect:every config key is understood", not keys, value=len(keys), limit=0, where=", ".join(keys))
        )
        checks.append(_noted("inspect:structure known from its class", not model.provisional, value=model.architecture))
    if towers := towers_not_served(records):
        checks.append(_noted("serve:towers served", False, value=", ".join(towers), limit="none left out",
                             detail="the model is served as text"))  # fmt: skip
    checks.append(_noted("convert:export to an ordinary folder", False, detail="try: dayzero convert PATH --out DIR --to hf"))
    return tuple(checks)


def _tokenizer(records: RunRecords) -> Check:
    files = [file.file.rsplit("/", 1)[-1] for file in records.artifact.release_files] if records.artifact else []
    found = [name for name in TOKENIZER_FILES if name in files]
    absent = "none in the release: served with token ids only" if files else "the converted weights are not at hand"
    return _noted("convert:tokenizer travels with the weights", bool(found), value=found[0] if found else None,
                  detail="" if found else absent)  # fmt: skip


def _chat_template(records: RunRecords) -> Check:
    """A template is there when chat answered, or when its file travels with the weights."""
    chat = f"{PREFIX}/v1/chat/completions"
    answered = any(c.name == chat and c.verdict == "pass" for c in (records.soak.checks if records.soak else ()))
    files = [file.file for file in records.artifact.release_files] if records.artifact else []
    file = next((name for name in files if "chat_template" in name), "answers over chat" if answered else None)
    return _noted("convert:chat template", file is not None, value=file, detail="" if file else "no chat answer was seen")


def _missing(records: RunRecords, *stages: str) -> list[Check]:
    return [
        Check(name=f"{stage}:record", verdict="not_shown", value=None, limit=STAGES[stage][0],
              detail=f"this stage has not run: {records.command(stage)}") for stage in stages if not records.has(stage)
    ]  # fmt: skip


def _noted(name: str, shown: bool, *, value: float | int | str | None = None, limit: float | int | str | None = None,
           where: str = "", detail: str = "") -> Check:  # fmt: skip
    """A criterion that completes the picture but is not required: pass where it is shown."""
    return Check(name=name, verdict="pass" if shown else "not_shown", value=value, limit=limit, where=where, detail=detail,
                 required=False)  # fmt: skip


def _none(name: str, found: list[str]) -> Check:
    return Check(name=name, verdict="fail" if found else "pass", value=len(found), limit=0, detail=found[0] if found else "",
                 where="" if len(found) < 2 else f"and {len(found) - 1} more")  # fmt: skip


def _named(stage: str, checks: tuple[Check, ...]) -> list[Check]:
    return [replace(check, name=f"{stage}:{check.name}") for check in checks]
