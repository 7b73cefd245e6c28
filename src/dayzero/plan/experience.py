"""Predicted against observed, kept per target, so that the next plan starts from what a run showed.

Goes in: a plan, what its engine and its measurements say. Comes out: `Observation`s (one JSON line each in this user's cache
folder, one file per target), and `Corrections` for the next plan: per category the median of observed / predicted over the
runs on that very target, bounded, with how many runs it rests on. A prediction that was itself corrected is stored as it was
before, so that corrections do not pile up. Deliberately not done: correcting one target by another, or a layout by its like.
"""

import fcntl
import json
import math
import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import ClassVar, Literal

from dayzero.core.cachedir import cache_folder
from dayzero.core.errors import DayZeroError
from dayzero.core.generation import EngineInfo
from dayzero.core.plan import Plan, TimeEstimate
from dayzero.core.records import STRICT, from_dict, record_json
from dayzero.core.reports import BenchReport
from dayzero.core.target import Workload

OWN_ENGINE = "dayzero"
Category = Literal[
    "weights", "cache", "activations", "communication", "runtime", "loader", "memory", "admissible_tokens", "prefill", "decode"
]
TIMES = ("prefill", "decode")
# Beyond these a run is more likely to have measured something else (another process on the card, a debug build) than the
# prediction is to be that wrong; the plan says that the bound was met. Times are ranges to begin with.
BOUNDS: dict[str, tuple[float, float]] = {"bytes": (0.5, 2.0), "times": (0.1, 10.0)}
# One run does not tell how runs differ: its own spread from run to run, as the measured gate of this project allows it.
RUN_SPREAD = 1.25


@dataclass(frozen=True, kw_only=True, slots=True)
class Observation:
    """One category of one run. `predicted` is without corrections; bytes, tokens or seconds. `layout` as `Layout.spelled`."""

    SCHEMA: ClassVar[str] = "dayzero.observation/1"
    __pydantic_config__ = STRICT

    target: str
    model_hash: str
    engine: str
    layout: str
    category: Category
    predicted: float
    observed: float
    created_s: float = 0.0

    def __post_init__(self) -> None:
        for name in ("predicted", "observed"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) > 0):
                raise DayZeroError(f"observation of {self.category}: {name} must be positive", got=getattr(self, name),
                                   want="> 0", fix="leave the category out where it was not measured")  # fmt: skip

    @property
    def ratio(self) -> float:
        return self.observed / self.predicted


@dataclass(frozen=True, kw_only=True, slots=True)
class Factor:
    """observed / predicted of a category on one target: the median over `subjects` (model, layout), from `runs` runs.

    `ratio` is `observed_ratio` within bounds; `low` and `high` are the smallest and largest medians of a subject.
    """

    category: str
    ratio: float
    observed_ratio: float
    runs: int
    subjects: int
    low: float
    high: float

    @property
    def bounded(self) -> bool:
        return self.ratio != self.observed_ratio


@dataclass(frozen=True, kw_only=True, slots=True)
class Corrections:
    """What runs on a target say about predictions for it. Empty where there was none: then every figure stays as it is."""

    target: str
    engine: str
    factors: dict[str, Factor] = field(default_factory=dict)
    notes: tuple[str, ...] = ()  # lines that could not be read

    def ratio(self, category: str) -> float:
        return self.factors[category].ratio if category in self.factors else 1.0

    def amount(self, category: str, predicted: int) -> int:
        """Bytes or tokens, corrected. Bytes are rounded up, tokens down."""
        number = predicted * self.ratio(category)
        return math.floor(number) if category == "admissible_tokens" else math.ceil(number)

    def time(self, category: str, estimate: TimeEstimate) -> TimeEstimate:
        """The range that runs showed, around the corrected middle; one run widens it by what runs differ."""
        factor = self.factors.get(category)
        if factor is None:
            return estimate
        middle, (least, most) = expected_s(estimate), bounds_of(category)
        low, high = max(factor.low / RUN_SPREAD, least), min(factor.high * RUN_SPREAD, most)
        return _rescaled(estimate, middle * min(low, factor.ratio), middle * max(high, factor.ratio), factor.ratio)

    def ratios(self) -> dict[str, float]:
        """What a plan that used these corrections keeps, so that its run can be compared with the bare prediction."""
        return {category: factor.ratio for category, factor in sorted(self.factors.items())}

    def reasons(self) -> tuple[str, ...]:
        """For the plan: each correction with its ratio and n."""
        lines = []
        for category, factor in sorted(self.factors.items()):
            runs = f"n = {factor.runs}" + (f" of {factor.subjects} models or layouts" if factor.subjects > 1 else "")
            spread = f", {factor.low:.3g} to {factor.high:.3g}" if factor.subjects > 1 else ""
            bound = f"; held at the bound, {factor.observed_ratio:.3g} was observed" if factor.bounded else ""
            lines.append(
                f"{category} x {factor.ratio:.3g}: observed / predicted on {self.target} (median, {runs}{spread}{bound})"
            )
        return (*lines, *self.notes)


def _rescaled(estimate: TimeEstimate, low_s: float, high_s: float, ratio: float) -> TimeEstimate:
    parts = {name: getattr(estimate, name) * ratio for name in ("compute_s", "memory_s", "communication_s", "launch_s")}
    return replace(estimate, low_s=low_s, high_s=high_s, **parts)


def bounds_of(category: str) -> tuple[float, float]:
    return BOUNDS["times" if category in TIMES else "bytes"]


def expected_s(estimate: TimeEstimate) -> float:
    """The middle of a range that spans factors."""
    return math.sqrt(estimate.low_s * estimate.high_s)


def observe_serving(
    plan: Plan, model_hash: str, info: EngineInfo, *, applied: Mapping[str, float] | None = None, engine: str = OWN_ENGINE
) -> tuple[tuple[Observation, ...], tuple[str, ...]]:
    """What an engine really admits against the plan, and why something was not learnt.

    Numbers: `plan.admissible_tokens`; `EngineInfo.num_blocks * block_tokens`. Our engine makes no larger pool than the
    request needs (context x concurrency), so a pool that was cut to that says nothing unless it is smaller still.
    """
    admitted = info.num_blocks * info.block_tokens
    wanted = info.context_tokens * plan.concurrency
    if admitted >= wanted and plan.admissible_tokens > wanted:
        return (), (f"admissible tokens: the pool was made for the request ({wanted} tokens), not for what the card holds",)
    made = _made(plan, model_hash, engine, "admissible_tokens", min(plan.admissible_tokens, wanted), admitted, applied)
    return ((made,), ()) if made is not None else ((), ("admissible tokens: the plan or the engine admits none",))


def observe_bench(
    plan: Plan, model_hash: str, report: BenchReport, workload: Workload, *, device: str,
    applied: Mapping[str, float] | None = None, engine: str = OWN_ENGINE,
) -> tuple[tuple[Observation, ...], tuple[str, ...]]:  # fmt: skip
    """Times and memory of a bench against the plan, and why something was not learnt.

    Numbers: `plan.prefill` (one prompt of the workload's input) against `ttft_s.median` at concurrency 1 (no queue);
    `plan.decode` (one step of all sequences) against `tpot_s.median` at the plan's concurrency; the sum over ranks of the
    ledger's weights, activations, communication and runtime, with the cache of the tokens the bench really held, against the
    point's `peak_memory_bytes`, where `device` (`EngineInfo.device`) is the host: elsewhere that figure is the processes' host
    memory, which no ledger is about. Points with failed requests say nothing.
    """
    points = {point.concurrency: point for point in report.points if not point.failed}
    found: list[Observation | None] = []
    missing: list[str] = []
    timed: tuple[tuple[Category, TimeEstimate | None, int], ...] = (
        ("prefill", plan.prefill, 1),
        ("decode", plan.decode, plan.concurrency),
    )
    for category, estimate, concurrency in timed:
        point = points.get(concurrency)
        if estimate is None:
            missing.append(f"{category}: the plan predicts no time")
        elif point is None:
            missing.append(f"{category}: the bench has no clean point at a concurrency of {concurrency}")
        elif category == "prefill" and point.input_tokens != min(workload.input_tokens, plan.context_tokens):
            missing.append(f"prefill: the bench sent {point.input_tokens} tokens, the plan is for {workload.input_tokens}")
        else:
            observed = point.ttft_s.median if category == "prefill" else point.tpot_s.median
            found.append(_made(plan, model_hash, engine, category, expected_s(estimate), observed, applied))
    point = points.get(plan.concurrency)
    if not device.startswith("cpu"):
        missing.append(f"memory: the bench watched host memory, the plan is about the memory of {device}")
    elif point is None or point.peak_memory_bytes <= 0:
        missing.append(f"memory: no figure at a concurrency of {plan.concurrency}")
    else:
        held = min(plan.concurrency * (point.input_tokens + point.output_tokens), plan.admissible_tokens)
        predicted = sum(_resident_bytes(plan, rank, held) for rank in range(len(plan.ledger)))
        found.append(_made(plan, model_hash, engine, "memory", predicted, point.peak_memory_bytes, applied))
    return tuple(item for item in found if item is not None), tuple(missing)


def _resident_bytes(plan: Plan, rank: int, held_tokens: int) -> float:
    """What a rank should really touch while `held_tokens` are in the caches of its replica group."""
    ledger = plan.ledger[rank]
    per_replica = held_tokens / plan.layout.dp
    cache = ledger.cache_bytes_per_token * per_replica + ledger.cache_bytes_per_sequence * plan.concurrency / plan.layout.dp
    return sum(ledger.total(name) for name in ("weights", "activations", "communication", "runtime")) + cache


def _made(
    plan: Plan,
    model_hash: str,
    engine: str,
    category: Category,
    predicted: float,
    observed: float,
    applied: Mapping[str, float] | None,
) -> Observation | None:
    bare = predicted / (applied or {}).get(category, 1.0)
    if not (bare > 0 and observed > 0 and math.isfinite(bare) and math.isfinite(observed)):
        return None
    return Observation(target=plan.target, model_hash=model_hash, engine=engine, layout=plan.layout.spelled(),
                       category=category, predicted=bare, observed=float(observed), created_s=time.time())  # fmt: skip


def history_file(target: str, folder: Path | None = None) -> Path:
    """Where the runs on a target are kept."""
    return (folder or cache_folder("experience")) / f"{re.sub(r'[^A-Za-z0-9._-]+', '-', target).strip('-.') or 'target'}.jsonl"


def record(observations: Iterable[Observation], *, folder: Path | None = None) -> None:
    """Append to the history of their target. Whole lines under a lock: two runs may end at once."""
    for observation in observations:
        line = json.dumps(record_json(observation), allow_nan=False) + "\n"
        with history_file(observation.target, folder).open("a", encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.write(line)
            file.flush()


def read_history(target: str, *, folder: Path | None = None) -> tuple[tuple[Observation, ...], tuple[str, ...]]:
    """The observations on a target, oldest first, and what could not be read, with the reason: a history is never in the way
    of a plan."""
    path, found, notes = history_file(target, folder), [], []
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    for number, line in enumerate(lines, 1):
        try:
            data = json.loads(line)
            if not isinstance(data, dict) or data.pop("schema", None) != Observation.SCHEMA:
                raise DayZeroError("it has another schema", want=Observation.SCHEMA)
            found.append(from_dict(Observation, data, source=f"{path.name}:{number}"))
        except (json.JSONDecodeError, DayZeroError) as error:
            reason = error.what if isinstance(error, DayZeroError) else str(error)
            notes.append(f"line {number} of {path} was left out: {reason}")
    return tuple(item for item in found if item.target == target), tuple(notes)


def correction_for(target: str, *, engine: str = OWN_ENGINE, folder: Path | None = None) -> Corrections:
    """The corrections for plans on a target with an engine. Runs of the same model and layout count as one subject, so that
    a model that was run often does not outvote the others."""
    history, notes = read_history(target, folder=folder)
    subjects: dict[str, dict[tuple[str, str], list[float]]] = {}
    for item in history:
        if item.engine == engine:
            subjects.setdefault(item.category, {}).setdefault((item.model_hash, item.layout), []).append(item.ratio)
    factors = {}
    for category, groups in subjects.items():
        medians = [median(ratios) for ratios in groups.values()]
        least, most = bounds_of(category)
        middle = median(medians)
        factors[category] = Factor(
            category=category,
            ratio=min(max(middle, least), most),
            observed_ratio=middle,
            runs=sum(map(len, groups.values())),
            subjects=len(groups),
            low=min(medians),
            high=max(medians),
        )
    return Corrections(target=target, engine=engine, factors=factors, notes=notes)
