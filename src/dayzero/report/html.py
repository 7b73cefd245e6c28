"""`acceptance.html`: the records of a run and its `Acceptance` go in, one self-contained page comes out.

The page needs no network, no script and no font of its own; it prints, follows the reader's light or dark setting and
reads on a phone. Nothing is computed here that is not in a record; every text is escaped by the template engine.
"""

from collections.abc import Sequence
from typing import Any

import jinja2
from markupsafe import Markup

import dayzero
from dayzero.core.coverage import TargetCoverage
from dayzero.core.difference import Difference
from dayzero.core.model import ModelDescription
from dayzero.core.plan import Plan
from dayzero.core.reports import Acceptance
from dayzero.core.runstore import STAGES, RunStore
from dayzero.core.units import format_bytes, format_count
from dayzero.report import charts, model_rows, plan_pictures
from dayzero.report.layer_stack import layer_stack, stack_legend
from dayzero.report.run_records import RunRecords, read_run
from dayzero.report.text import format_spread_ms, format_value

MAX_LEDGER_LINES = 40  # of the fullest rank; the record has them all
DIMENSION_QUESTIONS = {
    "functional correctness": "Does it compute what the release computes?",
    "performance": "Does it fit, and how fast is it?",
    "stability": "Does it survive load, errors and clients that leave?",
    "ecosystem completeness": "Is everything there that a user expects around it?",
}


def render(store: RunStore, acceptance: Acceptance) -> str:
    """The page as text. Raises DayZeroError on a damaged record; a missing one is told on the page."""
    records = read_run(store)
    return _environment().get_template("acceptance.html.j2").render(
        acceptance=acceptance, records=records, version=dayzero.__version__, questions=DIMENSION_QUESTIONS,
        headline=_headline(acceptance), subject=_subject(records), place=_place(records), pictures=_pictures(records),
        ledger=_ledger(records), categories=charts.LEDGER_CATEGORIES, bindings=_bindings(records), problems=_problems(records),
        commands=[(stage, records.command(stage)) for stage in STAGES if stage != "report"],
        section=model_section(records.model) if records.model else None,
        files=[(stage, file, store.path(stage).exists()) for stage, (file, _) in STAGES.items() if stage != "report"],
        failed=[(d.name, c) for d in acceptance.dimensions for c in d.checks if c.required and c.verdict == "fail"],
    )  # fmt: skip


def render_model(
    model: ModelDescription,
    *,
    corrections: Sequence[dict[str, Any]] = (),
    against: Difference | None = None,
    coverage: TargetCoverage | None = None,
) -> str:
    """`inspect` as a page of its own, with what was asked beside."""
    return _environment().get_template("model.html.j2").render(
        model=model, version=dayzero.__version__, subject=_model_facts(model), section=model_section(model),
        corrections=corrections, against=against, coverage=coverage,
    )  # fmt: skip


def render_plan(plan: Plan, cards_per_node: int | None) -> str:
    """A plan as a page of its own: the ledger, the frontier, and where the ranks sit."""
    return _environment().get_template("plan.html.j2").render(
        plan=plan, version=dayzero.__version__, ledger=charts.memory_ledger(plan.ledger) if plan.ledger else None,
        frontier=plan_pictures.frontier(plan.frontier) if plan.frontier else None,
        topology=plan_pictures.topology(plan.layout, cards_per_node), categories=charts.LEDGER_CATEGORIES,
        fullest=max(plan.ledger, key=lambda rank: rank.total() - rank.budget_bytes) if plan.ledger else None,
    )  # fmt: skip


def model_section(model: ModelDescription) -> Markup:
    """What a model is, with the picture of its layer stack: a part of both pages."""
    mixers, forwards = stack_legend(model)
    return Markup(_environment().get_template("model_section.html.j2").render(
        model=model, stack=layer_stack(model), legends=[*mixers.items(), *forwards.items()],
        roles=model_rows.role_rows(model), structure=model_rows.structure_rows(model),
        caches={"lengths": model_rows.CACHE_LENGTHS, "rows": model_rows.cache_rows(model)},
        operators=model_rows.operator_rows(model), stored=model_rows.quantization_rows(model),
        steps=model_rows.step_rows(model),
    ))  # fmt: skip


def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("dayzero.report"), autoescape=True, undefined=jinja2.StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    environment.filters |= {"bytes": format_bytes, "value": format_value, "spread_ms": format_spread_ms, "rate": _rate}
    return environment


def _rate(bytes_per_s: float) -> str:
    return f"{'−' if bytes_per_s < 0 else '+'}{format_bytes(abs(bytes_per_s))}/s"


def _headline(acceptance: Acceptance) -> str:
    """One sentence that a hurried reader takes home."""
    checks = [check for dimension in acceptance.dimensions for check in dimension.checks if check.required]
    count = {verdict: sum(check.verdict == verdict for check in checks) for verdict in ("pass", "fail", "not_shown")}
    if not checks:
        return "Nothing has been checked yet."
    if count["fail"]:
        told = f"{count['fail']} of {len(checks)} required checks failed"
        return told + (f" and {count['not_shown']} were not shown." if count["not_shown"] else ".")
    if count["not_shown"]:
        return f"{count['not_shown']} of {len(checks)} required checks were not shown; none failed."
    return f"All {len(checks)} required checks pass. What was not required, and every limit, is listed below."


def _subject(records: RunRecords) -> list[tuple[str, str]]:
    """What was adapted."""
    return [] if records.model is None else _model_facts(records.model)


def _model_facts(model: ModelDescription) -> list[tuple[str, str]]:
    size = model.dimensions
    rows = [
        ("Architecture", f"{model.architecture} ({model.model_type})"),
        ("Parameters", f"{format_count(model.total_parameters)}, {format_count(model.active_parameters)} active per token"),
        ("Sizes", f"{size.num_layers} layers, hidden size {size.hidden_size}, vocabulary {size.vocab_size:,}"),
        ("Context", f"{size.max_position_tokens:,} tokens" if size.max_position_tokens else ""),
        ("Heads", model_rows.heads(model)),
        ("Experts", f"{size.num_experts}, {size.num_experts_per_token} per token, {size.num_shared_experts} shared"
                    if size.num_experts else ""),
        ("Data type", ", ".join([model.dtype, *(f"{name}: {scheme}" for name, scheme in model.quantization.items())])),
        ("Cache per token", format_bytes(model.cache_bytes_per_token)),
        ("Cache per request", format_bytes(model.cache_bytes_per_sequence) if model.cache_bytes_per_sequence else ""),
        ("Checkpoint", format_bytes(model.checkpoint_bytes) if model.checkpoint_bytes else ""),
        ("Not served", ", ".join(model.towers)),
        ("Source hash", model.source_hash[:16]),
    ]
    return [(name, value) for name, value in rows if value]


def _place(records: RunRecords) -> list[tuple[str, str]]:
    """On what: target, layout, engine, versions."""
    rows: list[tuple[str, Any]] = []
    if (plan := records.plan) is not None:
        layout = plan.layout
        degrees = ", ".join(f"{axis} {getattr(layout, axis)}" for axis in ("tp", "pp", "dp", "cp", "ep"))
        rows += [("Target", plan.target), ("Devices", f"{plan.devices} ({degrees})"),
                 ("Weights, cache", f"{plan.weights_dtype}, {plan.cache_dtype}"),
                 ("Room for", f"{plan.admissible_tokens:,} tokens per replica")]  # fmt: skip
    else:
        rows.append(("Target", records.inputs.get("target_id", "")))
    engine = records.serving.engine if records.serving else {}
    rows += [
        ("Device", engine.get("device") or (records.operators.device if records.operators else "")),
        ("Instruction set", engine.get("instruction_set") or (records.operators.instruction_set if records.operators else "")),
        ("Computes in", engine.get("dtype", "")),
        ("Engine", f"tier {engine['tier']}, blocks of {engine.get('block_tokens', '?')} tokens" if engine.get("tier") else ""),
        ("Prefix reuse", {True: "on", False: "off"}.get(engine.get("prefix_reuse", ""), "")),
        ("Loads in", f"{records.serving.load_s:.1f} s" if records.serving else ""),
    ]
    versions = records.inputs.get("versions")
    if isinstance(versions, dict):
        rows.append(("Versions", ", ".join(f"{name} {version}" for name, version in versions.items())))
    return [(name, str(value)) for name, value in rows if value]


def _pictures(records: RunRecords) -> dict[str, Any]:
    """The charts whose records are there; the page says "not shown" where one is missing."""
    found: dict[str, Any] = dict.fromkeys(("ledger", "layers", "throughput", "tpot", "ttft", "memory", "coverage"))
    if records.plan is not None and records.plan.ledger:
        found["ledger"] = charts.memory_ledger(records.plan.ledger)
    if records.numerics is not None and records.numerics.layers:
        found["layers"] = charts.layer_errors(records.numerics.layers)
    if records.bench is not None and records.bench.points:
        found |= {kind: charts.over_concurrency(records.bench.points, kind) for kind in ("throughput", "tpot", "ttft")}
    if records.soak is not None and len(records.soak.memory_bytes) > 2:
        found["memory"] = charts.memory_over_time(records.soak)
    if records.operators is not None and records.operators.coverage:
        shares = {name: (part.flops_share, part.bytes_share) for name, part in records.operators.coverage.items()}
        found["coverage"] = charts.coverage(shares)
    return found


def _ledger(records: RunRecords) -> dict[str, Any] | None:
    """The fullest rank, line by line, largest first."""
    if records.plan is None or not records.plan.ledger:
        return None
    fullest = max(records.plan.ledger, key=lambda ledger: ledger.total() - ledger.budget_bytes)
    lines = sorted(fullest.lines, key=lambda entry: -entry.num_bytes)
    return {"rank": fullest.rank, "lines": lines[:MAX_LEDGER_LINES], "left_out": max(0, len(lines) - MAX_LEDGER_LINES),
            "total": fullest.total(), "budget": fullest.budget_bytes}  # fmt: skip


def _bindings(records: RunRecords) -> list[tuple[int, str, Any]]:
    coverage = records.operators.coverage if records.operators else {}
    return [(number, name, coverage[name]) for number, name in enumerate(charts.BINDINGS, 1) if name in coverage]


def _problems(records: RunRecords) -> list[tuple[str, str, str, str]]:
    """(severity, stage, where, detail) of everything wrong or doubtful that a stage met."""
    found = []
    for stage, record in (("inspect", records.model), ("convert", records.weights)):
        for problem in record.problems if record else ():
            where = " ".join(filter(None, (problem.file, problem.tensor)))
            found.append((problem.severity, stage, where, f"{problem.kind}: {problem.detail}"))
    return sorted(found)
