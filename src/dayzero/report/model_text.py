"""`inspect` for a terminal (rich): a first answer, the measured one, what changed against another model, coverage."""

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from dayzero.core.coverage import TargetCoverage
from dayzero.core.difference import Difference
from dayzero.core.model import ModelDescription
from dayzero.core.units import format_bytes, format_count
from dayzero.report import model_rows as rows
from dayzero.report.text import facts_table, listing

MOST_CHANGES = 60  # of one section; --json has them all


def model_table(model: ModelDescription) -> RenderableType:
    """Everything a person asks first: sizes, layer kinds, how it is built, caches, operators, keys, problems."""
    size = model.dimensions
    stored = "" if model.checkpoint_bytes is None else format_bytes(model.checkpoint_bytes)
    facts = facts_table(model.name + (" (provisional)" if model.provisional else ""), (
        ("architecture", f"{model.architecture} ({model.model_type})"),
        ("parameters", f"{format_count(model.total_parameters)}, {format_count(model.active_parameters)} active per token"),
        ("dtype", model.dtype),
        ("sizes", f"{size.num_layers} layers, hidden {size.hidden_size}, vocabulary {size.vocab_size:,}"),
        ("context", f"{size.max_position_tokens:,} tokens" if size.max_position_tokens else None),
        ("heads", rows.heads(model)),
        ("experts", f"{size.num_experts}, {size.num_experts_per_token} per token, {size.num_shared_experts} shared"
                    if size.num_experts else None),
        ("cache per token", format_bytes(model.cache_bytes_per_token)),
        ("cache per sequence", format_bytes(model.cache_bytes_per_sequence)),
        ("checkpoint", stored + ("" if model.has_weights else " by the config, no weights in the folder")),
        ("not served", ", ".join(model.towers)),
        ("keys nobody reads", ", ".join(model.unconsumed_keys)),
        ("new keys", ", ".join(model.novel_keys)),
    ))  # fmt: skip
    kinds = listing("Layer kinds", ("kind", "layers", "mixer", "feed-forward", "cache"), right=("layers",))
    for kind in model.layer_kinds:
        caches = ", ".join(f"{spec.name} ({spec.kind})" for spec in kind.cache)
        kinds.add_row(Text(kind.name), str(len(kind.layers)), kind.mixer, kind.feed_forward, Text(caches))
    parts: list[RenderableType] = [facts, kinds]
    if structure := rows.structure_rows(model):
        parts.append(facts_table("How it is built", structure))
    parts += [_roles(model), _caches(model)]
    if stored_as := rows.quantization_rows(model):
        table = listing("As the release stores it", ("group", "scheme", "parameters", "bytes"), right=("parameters", "bytes"))
        for row in stored_as:
            table.add_row(*map(Text, row))
        parts.append(table)
    if operators := rows.operator_rows(model):
        if steps := rows.step_rows(model):
            table = listing("One sequence", ("step", "as computed by", "FLOPs", "weights", "other bytes"),
                            right=("FLOPs", "weights", "other bytes"))  # fmt: skip
            for step in steps:
                table.add_row(*map(Text, step))
            parts.append(table)
        columns = ("operator", "sites", "FLOPs, decode", "bytes, decode", "FLOPs, prefill", "bytes, prefill")
        how = "as its class is written" if model.parameters else "from keys"
        table = listing(f"Operators {how}: one decode step at 8K of context, one prefill of 8K", columns, right=columns[1:])
        for operator in operators:
            table.add_row(*map(Text, operator))
        parts.append(table)
    problems = [Text(f"{problem.severity}: {problem.detail}", style="red" if problem.severity == "error" else "yellow")
                for problem in model.problems]  # fmt: skip
    return Group(*parts, *problems)


def inspection(model: ModelDescription, *, corrections: Sequence[dict[str, object]] = (), against: Difference | None = None,
               coverage: TargetCoverage | None = None) -> RenderableType:  # fmt: skip
    """The whole answer of the verb."""
    parts: list[RenderableType] = [model_table(model)]
    parts += [corrections_table(corrections)] if corrections else []
    parts += [coverage_table(coverage)] if coverage is not None else []
    parts += [difference_table(against)] if against is not None else []
    return Group(*parts)


def first_answer(model: ModelDescription) -> RenderableType:
    """The provisional answer, short: what keys alone say."""
    kinds = ", ".join(f"{len(kind.layers)} x {kind.name}" for kind in model.layer_kinds)
    return facts_table(f"{model.name}, provisional: from the keys of its config alone", (
        ("parameters", f"{format_count(model.total_parameters)}, {format_count(model.active_parameters)} active per token"),
        ("layers", kinds),
        ("cache per token", format_bytes(model.cache_bytes_per_token)),
        ("cache per sequence", format_bytes(model.cache_bytes_per_sequence)),
        *((f"cache at {name}", format_bytes(model.cache_bytes(tokens))) for name, tokens in rows.CACHE_LENGTHS.items()),
        ("checkpoint", None if model.checkpoint_bytes is None else format_bytes(model.checkpoint_bytes)),
    ))  # fmt: skip


def corrections_table(corrections: Sequence[dict[str, object]]) -> RenderableType:
    """Each figure of the first answer: confirmed, or what it is."""
    table = listing("The first answer, measured", ("figure", "first answer", "measured", "", ""))
    for one in corrections:
        same = bool(one["same"])
        table.add_row(Text(str(one["figure"]).replace("_", " ")), Text(_plain(one["first"])), Text(_plain(one["measured"])),
                      Text("confirmed" if same else "corrected", style="green" if same else "yellow"),
                      Text(str(one["note"])))  # fmt: skip
    return table


def difference_table(found: Difference) -> RenderableType:
    parts: list[RenderableType] = []
    for section in dict.fromkeys(change.section for change in found.changes):
        changes = [change for change in found.changes if change.section == section]
        table = listing(f"{section.capitalize()}: {found.old} -> {found.new}", ("what", found.old, found.new))
        for change in changes[:MOST_CHANGES]:
            table.add_row(Text(change.item), Text(change.old or "-"), Text(change.new or "-"))
        parts.append(table)
        if len(changes) > MOST_CHANGES:
            parts.append(Text(f"  and {len(changes) - MOST_CHANGES} more (--json lists them)", style="dim"))
    if not parts:
        parts.append(Text(f"{found.new} differs from {found.old} in nothing that is described here."))
    return Group(*parts, *(Text(note, style="yellow") for note in found.notes))


def coverage_table(found: TargetCoverage) -> RenderableType:
    """By binding, then the operators that are not plain library calls: those are the work to be done."""
    columns = ("binding", "sites", "FLOPs, decode", "bytes, decode", "FLOPs, prefill", "bytes, prefill")
    table = listing(f"Operators on {found.device}, {found.evidence}", columns, right=columns[1:])
    phases = [{} if phase is None else phase.bindings for phase in (found.decode, found.prefill)]
    for name in dict.fromkeys((*phases[0], *phases[1])):
        cells: list[str] = []
        for bindings in phases:
            part = bindings.get(name)
            cells += [f"{part.flops_share:.1%}", f"{part.bytes_share:.1%}"] if part else ["", ""]
        sites = max(bindings[name].sites for bindings in phases if name in bindings)
        table.add_row(_binding(name), str(sites), *cells)
    work = listing("Not a library call", ("operator", "binding", "with", "why", "bytes, decode"), right=("bytes, decode",))
    for operator in found.operators:
        if operator.binding != "library":
            share = f"{operator.decode.bytes_share:.1%}" if operator.decode else ""
            work.add_row(Text(operator.kind), _binding(operator.binding), Text(operator.kernel), Text(operator.reason), share)
    notes = [Text(note, style="yellow") for note in found.notes]
    return Group(table, *([work] if work.row_count else []), *notes)


def _binding(name: str) -> Text:
    return Text(name, style={"missing": "bold red", "fallback": "yellow", "unknown": "yellow"}.get(name, ""))


def _roles(model: ModelDescription) -> RenderableType:
    table = listing("Parameters by role", ("role", "parameters", "share"), right=("parameters", "share"))
    for row in rows.role_rows(model):
        table.add_row(*map(Text, row))
    return table


def _caches(model: ModelDescription) -> RenderableType:
    table = listing("Cache of one sequence", ("dtype", *rows.CACHE_LENGTHS), right=tuple(rows.CACHE_LENGTHS))
    for dtype, sizes in rows.cache_rows(model):
        table.add_row(Text(dtype), *map(Text, sizes))
    return table


def _plain(value: object) -> str:
    return f"{value:,}" if isinstance(value, (int, float)) and not isinstance(value, bool) else str(value)
