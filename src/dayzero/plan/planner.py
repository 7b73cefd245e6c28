"""`make_plan`: the stage's one entry. Resolves the request, searches, and writes the `Plan` with its reasons.

Goes in: what the model is, where it runs, what it must serve. Comes out: a `Plan`, also when nothing fits (`feasible` is
then False and the reasons say by how much and what would help). Illegal degrees are a DayZeroError.
"""

from dataclasses import replace

from dayzero.core.errors import DayZeroError
from dayzero.core.model import ModelDescription
from dayzero.core.plan import Plan, Pool, Rejected, TimeEstimate
from dayzero.core.target import Target, Workload
from dayzero.core.units import format_bytes
from dayzero.plan import advice
from dayzero.plan.ledger import Evaluation, Evaluator
from dayzero.plan.options import PlanOptions, resolve
from dayzero.plan.search import MOST_DEVICES, SPANNING, Candidate, Search, fixed_devices
from dayzero.plan.unlisted import with_parameters


def make_plan(model: ModelDescription, target: Target, workload: Workload, options: PlanOptions) -> Plan:
    """The best layout for the request, or the least impossible one.

    Raises DayZeroError for degrees that cannot be (naming the nearest that can) and for a target without a memory size.
    A memory figure that is unverified or of low confidence never makes a plan infeasible; the reasons say so.
    """
    listed = bool(model.parameters)
    model = with_parameters(model)
    request = resolve(model, workload, options)
    search = Search(Evaluator(model, target, request), workload)
    asked = fixed_devices(search.fixed, options.devices)
    candidates, chosen, smaller = _search(search, asked)
    evaluation = _even(search.evaluator, chosen)
    feasible, reasons = evaluation.fits, list(request.notes)
    if not listed:
        reasons.append("weights are estimated from parameter counts: the release's class is not known here")
    if not feasible:
        reasons += advice.smallest_change(search, evaluation, evaluation.layout.num_devices)
        if advice.doubtful(target, field := advice.memory_field(target)):
            feasible = True
            reasons.append(f"not refused, because {field} = {format_bytes(search.evaluator.memory_bytes)} is unverified: "
                           "read the memory from the device before relying on this plan")  # fmt: skip
    reasons += advice.binding(search.evaluator, evaluation)
    if asked is None and evaluation.fits:
        reasons.append(f"{evaluation.layout.num_devices} is the smallest number of cards that fits")
    rates = search.roofline.rates
    sequences = -(-request.sequences(evaluation.layout.dp) // evaluation.layout.pp)
    prefill: TimeEstimate | None = None
    decode: TimeEstimate | None = None
    if rates.published:
        prefill = search.roofline.prefill(evaluation, min(workload.input_tokens, request.context_tokens))
        decode = search.roofline.decode(evaluation, sequences, request.average_tokens)
    else:
        reasons.append("no time is predicted: the target publishes no compute or no memory rate")
    ledger = search.evaluator.ledgers(evaluation)
    layout = evaluation.layout
    return Plan(
        model=model.name, target=target.id, feasible=feasible, layout=layout, devices=layout.num_devices,
        pools=(Pool(role="mixed", layout=layout),), weights_dtype=request.weights_dtype,
        cache_dtype=request.cache_dtype or _own_cache_dtype(model), context_tokens=request.context_tokens,
        concurrency=request.concurrency, memory_fraction=request.memory_fraction, block_tokens=request.block_tokens,
        prefill_chunk_tokens=request.chunk_tokens,
        weights_bytes_per_device=max(rank.total("weights") for rank in ledger),
        cache_bytes_per_token_per_device=max(rank.cache_bytes_per_token for rank in ledger),
        admissible_tokens=min(rank.admissible_tokens for rank in ledger), ledger=ledger, prefill=prefill, decode=decode,
        reasons=tuple(reasons), rejected=(*smaller, *advice.rejected(search, candidates, chosen)),
        rests_on=advice.rests_on(search.evaluator, request.compute_dtype),
    )  # fmt: skip


def _search(search: Search, asked: int | None) -> tuple[list[Candidate], Candidate, tuple[Rejected, ...]]:
    """Candidates of the number of devices that was asked for, or of the smallest that fits; the chosen one; and what
    ruled out the next smaller number."""
    if asked is not None:
        candidates = search.candidates(asked)
        if (best := search.best(candidates)) is None:
            raise _illegal(search, candidates, asked)
        return candidates, best, ()
    least: tuple[list[Candidate], Candidate] | None = None  # where nothing fits, the smallest number of cards is shown
    before: int | None = None
    for devices in search.device_counts():
        if least is None or search.could_fit(devices):
            candidates = search.candidates(devices)
            best = search.best(candidates)
            if best is not None and best.evaluation is not None and best.evaluation.fits:
                return candidates, best, _ruled_out(search, before)
            least = least or (None if best is None else (candidates, best))
        before = devices
    if least is None:
        raise _illegal(search, [], MOST_DEVICES)
    return (*least, ())


def _ruled_out(search: Search, devices: int | None) -> tuple[Rejected, ...]:
    """What the next smaller number of cards lacks, at best."""
    best = search.best(search.candidates(devices)) if devices is not None else None
    if best is None or best.evaluation is None:
        return ()
    short = best.evaluation.short_bytes
    return (Rejected(layout=best.evaluation.layout, short_by_bytes=short,
                     constraint=f"memory: {devices} cards are short by {format_bytes(short)} per card at best"),)  # fmt: skip


def _illegal(search: Search, candidates: list[Candidate], devices: int) -> DayZeroError:
    """Why no layout of the asked degrees is legal, with the nearest tensor-parallel degrees that are."""
    if not candidates:
        said = ", ".join(f"{axis}={degree}" for axis, degree in search.fixed.items()) or f"{devices} devices"
        return DayZeroError("no layout has these degrees", got=said, want=f"{' * '.join(SPANNING)} = {devices}",
                            fix="correct a degree or --devices")  # fmt: skip
    first = next((c for c in candidates if c.error is not None), candidates[0])
    layout = first.layout
    legal = search.evaluator.weights.legal_tp(replace(layout, ep=1, stages=()), max(64, 2 * layout.tp))
    near = sorted(legal, key=lambda degree: (abs(degree - layout.tp), degree))[:4]
    wanted = first.error.want if first.error is not None and not legal else f"tp of {', '.join(map(str, sorted(near)))}"
    if "pipeline" in first.constraint and first.error is not None:
        return first.error
    said = advice.spelled(layout)
    return DayZeroError(f"{said} is not legal for {search.model.name}: {first.constraint}", got=said, want=wanted,
                        fix="choose one of these degrees, or let the plan choose")  # fmt: skip


def _even(evaluator: Evaluator, chosen: Candidate) -> Evaluation:
    """The chosen layout with a balanced cut, unless that were to cost the fit."""
    assert chosen.evaluation is not None
    if chosen.layout.pp == 1:
        return chosen.evaluation
    even = evaluator.evaluate(replace(chosen.layout, stages=()))
    return even if even.fits or not chosen.evaluation.fits else chosen.evaluation


def _own_cache_dtype(model: ModelDescription) -> str:
    growing = [spec.dtype for kind in model.layer_kinds for spec in kind.cache if spec.elements_per_token]
    return growing[0] if growing else model.dtype

