"""Every fallback and every limit of a run, as sentences for a person who has to sign. Read off the records alone."""

from collections import Counter

from dayzero.core.model import Problem
from dayzero.core.units import format_bytes
from dayzero.report.run_records import RunRecords


def limits_of(records: RunRecords) -> tuple[str, ...]:
    """Sentences without repetition, the engine's first: they are what a user of the server meets."""
    found = [*_serving(records), *_operators(records), *_model(records), *_weights(records), *_plan(records), *_proofs(records)]
    return tuple(dict.fromkeys(found))


def towers_not_served(records: RunRecords) -> tuple[str, ...]:
    """What of the model is not served: as the engine says, else as the description lists it."""
    served = tuple(records.serving.engine.get("towers_not_served") or ()) if records.serving else ()
    return served or (records.model.towers if records.model else ())


def _serving(records: RunRecords) -> list[str]:
    if records.serving is None:
        return []
    engine, told = records.serving.engine, list(records.serving.fallbacks)
    tier = engine.get("tier")
    if tier and tier != "T2":
        way = "one sequence at a time (T0)" if tier == "T0" else "with each sequence's mixers run apart (T1)"
        reasons = "; ".join(engine.get("tier_reasons") or ()) or "no reason was recorded"
        told.append(f"The engine runs {way}, because: {reasons}.")
    if engine.get("prefix_reuse") is False:
        told.append("Prompts that begin alike are computed anew each time: prefix reuse is off for this model.")
    if towers := towers_not_served(records):
        told.append(f"Served as text only. Not served: {', '.join(towers)}.")
    capacity, context = engine.get("capacity_tokens"), engine.get("context_tokens")
    if capacity and context and capacity < context:
        told.append(f"One request may hold {capacity} tokens at most, prompt and answer together: the cache is smaller than "
                    f"the context of {context} tokens.")  # fmt: skip
    elif context:
        told.append(f"One request may hold {context} tokens at most, prompt and answer together.")
    return told


def _operators(records: RunRecords) -> list[str]:
    if (operators := records.operators) is None:
        return []
    told = [*operators.fallbacks, *(f"An operator is missing on this device: {name}." for name in operators.missing)]
    bare = sorted({site.operator for site in operators.sites if site.evidence is None and site.binding != "missing"})
    if bare:
        told.append(f"Not compared with a definition of their own: {', '.join(bare)}.")
    return told


def _model(records: RunRecords) -> list[str]:
    if (model := records.model) is None:
        return []
    told = [_warning(problem) for problem in model.problems if problem.severity == "warning"]
    if model.unconsumed_keys:
        told.append(f"Config keys that nothing reads, and that may mean something: {', '.join(model.unconsumed_keys)}.")
    if model.mtp_parameters:
        told.append("The layers that predict several tokens at once are not served.")
    if model.provisional:
        told.append("The model's structure was derived from its config keys alone; no class could be built.")
    return told


def _weights(records: RunRecords) -> list[str]:
    if (weights := records.weights) is None:
        return []
    dropped = Counter(weights.ledger.dropped.values())
    told = [f"Not converted: {count} tensor{'s' * (count > 1)} ({reason})." for reason, count in dropped.items()]
    return told + [_warning(problem) for problem in weights.problems if problem.severity == "warning"]


def _plan(records: RunRecords) -> list[str]:
    if (plan := records.plan) is None:
        return []
    told = []
    if plan.ledger:
        worst = min(plan.ledger, key=lambda ledger: ledger.budget_bytes - ledger.total())
        told.append(f"The plan uses {format_bytes(worst.total())} of a budget of {format_bytes(worst.budget_bytes)} on its "
                    f"fullest device, for {plan.concurrency} requests of {plan.context_tokens} tokens.")  # fmt: skip
    return told + [f"The plan rests on: {figure}." for figure in plan.rests_on]


def _proofs(records: RunRecords) -> list[str]:
    """What was looked at and could not be shown, in the words of the check."""
    found = []
    for stage, report in (("validation", records.numerics), ("measurement", records.bench), ("soak", records.soak)):
        for check in report.checks if report else ():
            if check.verdict == "not_shown":
                found.append(f"Not shown by the {stage}: {check.name}{f' ({check.detail})' if check.detail else ''}.")
    if records.bench is not None and records.bench.instruction_set:
        found.append(f"Figures hold for this machine and its instruction set, {records.bench.instruction_set}.")
    return found


def _warning(problem: Problem) -> str:
    where = " in ".join(filter(None, (problem.tensor, problem.file)))
    text = problem.detail.strip().rstrip(".") + (f" ({where})" if where else "")
    return text[:1].upper() + text[1:] + "."
