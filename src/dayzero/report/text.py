"""Records as tables for a terminal (rich). Each function takes one record and returns something rich can print."""

from collections.abc import Iterable

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from dayzero.core.operators import OperatorMap
from dayzero.core.plan import Explanation, Layout, LayoutList, Plan
from dayzero.core.reports import Acceptance, BenchReport, Check, Spread, StabilityReport, Verdict
from dayzero.core.target import TargetSummary
from dayzero.core.units import format_bytes

MARKS: dict[Verdict, str] = {"pass": "✓ pass", "fail": "✗ fail", "not_shown": "– not shown"}
_STYLES: dict[Verdict, str] = {"pass": "green", "fail": "bold red", "not_shown": "yellow"}


def verdict_text(verdict: Verdict) -> Text:
    return Text(MARKS[verdict], style=_STYLES[verdict])


def format_value(value: float | int | str | None) -> str:
    """A check's value for people: short, never rounded to a lie."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if isinstance(value, int) or value == int(value):
        return f"{int(value):,}" if abs(value) < 1e15 else f"{value:.3e}"
    return f"{value:.3e}" if abs(value) < 1e-3 or abs(value) >= 1e6 else f"{value:.4g}"


def facts_table(title: str, rows: Iterable[tuple[str, object]]) -> Table:
    shown = Text(title, style="bold", overflow="ignore", no_wrap=True)
    table = Table(title=shown, title_justify="left", show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        if value not in (None, "", ()):
            table.add_row(name, Text(str(value)))
    return table


def listing(title: str, columns: Iterable[str], *, right: Iterable[str] = ()) -> Table:
    table = Table(title=Text(title, style="bold"), title_justify="left", header_style="bold", box=None, padding=(0, 2, 0, 0))
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", overflow="fold")
    return table


MAX_LAYOUTS = 40  # as below
MAX_REJECTED = 8  # alternatives that a person reads; scripts get them all


def _degrees(layout: Layout) -> str:
    said = f"tp {layout.tp}, pp {layout.pp}, dp {layout.dp}, cp {layout.cp}, ep {layout.ep}"
    said += f", of cp {layout.cp_in_tp} in tp" if layout.cp_in_tp > 1 else ""
    return said + (", sp" if layout.sp else "")


def plan_table(plan: Plan) -> RenderableType:
    """`plan`: the answer, the ledger of the fullest rank, and why."""
    layout = plan.layout
    facts = facts_table(f"{plan.model} on {plan.target}", (
        ("feasible", "yes" if plan.feasible else "no"),
        ("devices", f"{plan.devices} ({_degrees(layout)})"),
        *((f"{pool.role} pool", pool.layout.spelled()) for pool in plan.pools if len(plan.pools) > 1),
        ("weights per device", f"{format_bytes(plan.weights_bytes_per_device)} in {plan.weights_dtype}"),
        ("cache per token", f"{format_bytes(plan.cache_bytes_per_token_per_device)} per device, {plan.cache_dtype}"),
        ("admissible", f"{plan.admissible_tokens:,} tokens per replica"),
        ("prefill", f"{plan.prefill.low_s:.3g} to {plan.prefill.high_s:.3g} s" if plan.prefill else None),
        ("decode step", f"{plan.decode.low_s * 1e3:.3g} to {plan.decode.high_s * 1e3:.3g} ms" if plan.decode else None),
    ))  # fmt: skip
    parts: list[RenderableType] = [facts]
    if plan.ledger:
        fullest = max(plan.ledger, key=lambda ledger: ledger.total() - ledger.budget_bytes)
        ledger = listing(f"Memory of rank {fullest.rank}", ("category", "what", "size", "from"), right=("size",))
        for entry in fullest.lines:
            ledger.add_row(entry.category, Text(entry.name), format_bytes(entry.num_bytes), Text(entry.formula, style="dim"))
        ledger.add_row("total", "", format_bytes(fullest.total()), f"budget {format_bytes(fullest.budget_bytes)}", style="bold")
        parts.append(ledger)
    if plan.frontier:
        columns = ("tokens each", "sequences")
        table = listing("How many sequences fit, all at full length", columns, right=columns)
        for point in plan.frontier:
            table.add_row(f"{point.context_tokens:,}", f"{point.concurrency:,}")
        parts.append(table)
    parts += [Text(f"• {reason}") for reason in (*plan.links, *plan.reasons)]
    parts += [Text(f"rests on: {figure}", style="dim") for figure in plan.rests_on]
    for other in plan.rejected[:MAX_REJECTED]:
        parts.append(Text(f"✗ {other.layout.spelled()}: {other.constraint}", style="dim"))
    if len(plan.rejected) > MAX_REJECTED:
        parts.append(Text(f"  and {len(plan.rejected) - MAX_REJECTED} more (--json lists them)", style="dim"))
    return Group(*parts)


def layouts_table(found: LayoutList) -> RenderableType:
    """`plan --all`: what fits, the best first, then what does not by its lack."""
    columns = ("layout", "fits", "weights", "used", "budget", "admissible tokens", "serves in", "what kills it")
    right = ("weights", "used", "budget", "admissible tokens", "serves in")
    table = listing(f"{found.model} on {found.target}: {len(found.layouts)} legal of {found.enumerated}", columns, right=right)
    for row in found.layouts[:MAX_LAYOUTS]:
        figures = (row.weights_bytes, row.used_bytes, row.budget_bytes)
        sizes = [format_bytes(size) if size is not None else "" for size in figures]
        tokens = f"{row.admissible_tokens:,}" if row.admissible_tokens is not None else ""
        seconds = f"{row.serve_s:.3g} s" if row.serve_s is not None else ""
        table.add_row(row.name, "yes" if row.fits else "no", *sizes, tokens, seconds, Text(row.constraint))
    more = len(found.layouts) - MAX_LAYOUTS
    return Group(table, *([Text(f"  and {more} more (--json lists them)", style="dim")] if more > 0 else []))


def explanation_table(found: Explanation) -> RenderableType:
    """`plan --explain`: what one layout needs, and what kills it."""
    row = found.row
    parts: list[RenderableType] = [facts_table(f"{row.name}: {found.model} on {found.target}", (
        ("legal", "yes" if row.legal else "no"),
        ("fits", "yes" if row.fits else "no"),
        ("what kills it", row.constraint),
        ("admissible", f"{row.admissible_tokens:,} tokens per replica" if row.admissible_tokens is not None else None),
    ))]  # fmt: skip
    if found.ledger is not None:
        ledger = listing(f"Memory of rank {found.ledger.rank}", ("category", "what", "size", "from"), right=("size",))
        for entry in found.ledger.lines:
            ledger.add_row(entry.category, Text(entry.name), format_bytes(entry.num_bytes), Text(entry.formula, style="dim"))
        parts.append(ledger)
    return Group(*parts, *(Text(f"• {reason}") for reason in (*found.links, *found.reasons)))


def operators_table(operators: OperatorMap) -> RenderableType:
    """`map`: kinds of site with their binding and evidence, and what fell back or is missing."""
    columns = ("operator", "sites", "shape", "binding", "kernel", "worst error", "limit", "FLOPs", "bytes")
    table = listing(f"Operators on {operators.device} ({operators.instruction_set})", columns,
                   right=("sites", "worst error", "limit", "FLOPs", "bytes"))  # fmt: skip
    for site in operators.sites:
        style = {"missing": "bold red", "fallback": "yellow"}.get(site.binding, "")
        error, limit = (f"{seen.worst_error:.1e}", f"{seen.limit:.1e}") if (seen := site.evidence) else ("not shown", "")
        table.add_row(Text(site.operator), str(len(site.names)), Text(site.signature), Text(site.binding, style=style),
                      Text(site.kernel), error, limit, f"{site.flops_share:.1%}", f"{site.bytes_share:.1%}")  # fmt: skip
    notes = [Text(f"fallback: {told}", style="yellow") for told in operators.fallbacks]
    return Group(table, *notes, *(Text(f"missing: {name}", style="bold red") for name in operators.missing))


def checks_table(checks: Iterable[Check], *, title: str = "Checks") -> Table:
    table = listing(title, ("verdict", "check", "value", "limit", "where"), right=("value", "limit"))
    for check in checks:
        name = check.name if check.required else f"{check.name} (not required)"
        told = "; ".join(filter(None, (check.where, check.detail)))
        table.add_row(
            verdict_text(check.verdict),
            Text(name),
            Text(format_value(check.value)),
            Text(format_value(check.limit)),
            Text(told),
        )
    return table


def bench_table(bench: BenchReport) -> RenderableType:
    columns = ("at a time", "requests", "failed", "TTFT ms", "TPOT ms", "output tokens/s", "peak memory")
    table = listing(f"Speed, {bench.instruction_set}: median (10th to 90th percentile)", columns, right=columns)
    for point in bench.points:
        table.add_row(str(point.concurrency), str(point.requests), str(point.failed), format_spread_ms(point.ttft_s),
                      format_spread_ms(point.tpot_s), f"{point.output_tokens_per_s:.1f}",
                      format_bytes(point.peak_memory_bytes) if point.peak_memory_bytes else "not measured")  # fmt: skip
    return table


def format_ms(seconds: float) -> str:
    milliseconds = seconds * 1e3
    return f"{milliseconds:,.0f}" if milliseconds >= 1000 else f"{milliseconds:.3g}"


def format_spread_ms(spread: Spread) -> str:
    if spread.n == 0:
        return "not measured"
    return f"{format_ms(spread.median)} ({format_ms(spread.p10)} to {format_ms(spread.p90)}), n={spread.n}"


def soak_table(soak: StabilityReport) -> RenderableType:
    interval = soak.memory_slope_ci95_bytes_per_s
    slope = "" if soak.memory_slope_bytes_per_s is None else f"{soak.memory_slope_bytes_per_s:.0f} bytes/s"
    return Group(facts_table(f"Soak of {soak.duration_s:.0f} s", (
        ("requests", f"{soak.requests}, {soak.failed} failed, {soak.cancelled} left by their client"),
        ("memory slope", slope + (f", 95% interval {interval[0]:.0f} to {interval[1]:.0f}" if interval else "")),
    )), checks_table(soak.checks))  # fmt: skip


def targets_table(targets: Iterable[TargetSummary]) -> Table:
    columns = ("id", "vendor", "memory", "bandwidth GB/s", "cards/node", "torch device", "figures")
    table = listing("Targets", columns, right=("memory", "bandwidth GB/s", "cards/node"))
    for target in targets:
        bandwidth = f"{target.memory_bytes_per_s / 1e9:,.0f}" if target.memory_bytes_per_s else ""
        memory = format_bytes(target.memory_bytes) if target.memory_bytes else "unknown"
        table.add_row(Text(target.id), Text(target.vendor), memory, bandwidth, str(target.num_cards or ""),
                      target.torch_device, target.confidence)  # fmt: skip
    return table


def acceptance_table(acceptance: Acceptance) -> RenderableType:
    """`report`: the four verdicts, what did not pass, and how many limits the report lists."""
    table = listing(f"{acceptance.model} on {acceptance.target}", ("verdict", "dimension", "checks", "repeat with"))
    for dimension in acceptance.dimensions:
        passed = sum(check.verdict == "pass" for check in dimension.checks)
        table.add_row(
            verdict_text(dimension.verdict), dimension.name, f"{passed} of {len(dimension.checks)}", Text(dimension.rerun)
        )
    table.add_row(verdict_text(acceptance.verdict), "all", "", "", style="bold")
    open_checks = [check for dimension in acceptance.dimensions for check in dimension.checks
                   if check.required and check.verdict != "pass"]  # fmt: skip
    told = Text(f"{len(acceptance.limits)} fallbacks and limits are listed in the report", style="dim")
    return Group(table, *([checks_table(open_checks, title="Not passed")] if open_checks else []), told)
