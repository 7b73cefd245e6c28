"""How a model is laid out on a target and what it costs there: the record `2_plan.json`.

devices of a pool = tp * pp * dp * (cp / cp_in_tp). EP adds no devices: within a pipeline stage ep divides the other ranks
and overlays them; each expert is tensor-split by what is left. SP reuses the TP group, and so does the part `cp_in_tp` of
CP (decode context parallelism). A single rank is the special case of many.
"""

import re
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from dayzero.core.errors import DayZeroError
from dayzero.core.records import STRICT

AXES = ("tp", "pp", "dp", "cp", "ep")
# Innermost first: which ranks sit on neighbouring cards.
DEFAULT_PLACEMENT = ("tp", "cp", "dp", "pp")


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Parallel degrees of one pool and the layers of each pipeline stage (half-open ranges; empty: not yet cut).

    `cp`: over how many ranks the context of a sequence is spread. `cp_in_tp` of them are ranks of the TP group, which hold
    the same cache otherwise (latents, or key/value heads that TP repeats); the rest are devices of their own. `sp`: the TP
    group splits the tokens between its matrix products. `redundant_experts`: places for a second copy of busy experts in each
    layer, beside one for every expert; EP deals out all places, so that it may have more ranks than experts. `placement`: the
    axes from the innermost (neighbouring cards) to the outermost; it decides which link an axis lies on, and nothing that a
    rank holds.
    """

    __pydantic_config__ = STRICT
    tp: int = 1
    pp: int = 1
    dp: int = 1
    cp: int = 1
    ep: int = 1
    cp_in_tp: int = 1
    sp: bool = False
    redundant_experts: int = 0
    placement: tuple[str, ...] = DEFAULT_PLACEMENT
    stages: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        if min(self.tp, self.pp, self.dp, self.cp, self.ep, self.cp_in_tp) < 1:
            name = next(name for name in (*AXES, "cp_in_tp") if getattr(self, name) < 1)
            raise DayZeroError(
                f"layout: {name} must be at least 1",
                got=getattr(self, name),
                want=">= 1",
                fix=f"give --{name} a positive number",
            )
        if self.tp % self.cp_in_tp or self.cp % self.cp_in_tp:
            raise DayZeroError(
                "layout: decode context parallelism must divide tp and cp",
                got=f"dcp={self.cp_in_tp}, tp={self.tp}, cp={self.cp}",
                want="a divisor of both",
                fix="choose dcp so that it divides tp",
            )
        if self.redundant_experts < 0 or (self.redundant_experts and self.ep == 1):
            raise DayZeroError(
                "layout: copies of experts are for expert parallelism",
                got=f"redundant_experts={self.redundant_experts}, ep={self.ep}",
                want="0, or more with ep above 1",
                fix="choose an ep, or leave the copies out",
            )
        if self.placement is not DEFAULT_PLACEMENT and sorted(self.placement) != sorted(DEFAULT_PLACEMENT):
            raise DayZeroError(
                "layout: the placement names each axis once",
                got=", ".join(self.placement),
                want="tp, cp, dp and pp in some order, innermost first",
                fix="correct the placement",
            )
        if self.stage_devices % self.ep:
            raise DayZeroError(
                "layout: ep must divide tp * dp * cp",
                got=f"ep={self.ep}, tp*dp*cp={self.stage_devices}",
                want="a divisor",
                fix="choose ep so that it divides tp * dp * cp",
            )

    @property
    def cp_devices(self) -> int:
        """Context ranks that are devices of their own."""
        return self.cp // self.cp_in_tp

    @property
    def stage_devices(self) -> int:
        """Devices of one pipeline stage."""
        return self.tp * self.dp * self.cp_devices

    @property
    def num_devices(self) -> int:
        return self.pp * self.stage_devices

    @property
    def expert_tp(self) -> int:
        """Ranks that share one expert's tensors."""
        return self.stage_devices // self.ep

    def expert_places(self, num_experts: int, ep_index: int) -> range:
        """The places for experts of one layer that an expert rank has: those of all experts first, then those of copies, dealt
        out so that no rank has more than one above another."""
        base, extra = divmod(num_experts + self.redundant_experts, self.ep)
        start = ep_index * base + min(ep_index, extra)
        return range(start, start + base + (ep_index < extra))

    def degree(self, axis: str) -> int:
        """Devices along an axis of the mesh (`cp`: those of its own)."""
        return self.cp_devices if axis == "cp" else int(getattr(self, axis))

    def coordinates(self, rank: int) -> "Coordinates":
        """Rank -> place. Order, slowest to fastest: pp, dp, cp, tp. The expert group runs over dp, cp, tp."""
        assert 0 <= rank < self.num_devices, (rank, self)
        rest, tp = divmod(rank, self.tp)
        rest, cp = divmod(rest, self.cp_devices)
        pp, dp = divmod(rest, self.dp)
        flat = (dp * self.cp_devices + cp) * self.tp + tp
        ep, expert_tp = divmod(flat, self.expert_tp)
        return Coordinates(tp=tp, pp=pp, dp=dp, cp=cp, ep=ep, expert_tp=expert_tp)

    def card_of(self, rank: int) -> int:
        """The card a rank runs on, counted along the topology: neighbours of the innermost axis sit next to each other."""
        place, card, stride = self.coordinates(rank), 0, 1
        for axis in self.placement:
            card += getattr(place, axis) * stride
            stride *= self.degree(axis)
        return card

    def spelled(self) -> str:
        """`TP8xPP2xEP8`, degrees of 1 left out. CP counts devices of its own, DCP ranks of the TP group, RE copies of
        experts."""
        degrees = [("TP", self.tp), ("PP", self.pp), ("DP", self.dp), ("CP", self.cp_devices), ("DCP", self.cp_in_tp),
                   ("EP", self.ep)]  # fmt: skip
        parts = [f"{name}{degree}" for name, degree in degrees if degree > 1]
        parts += [f"RE{self.redundant_experts}"] if self.redundant_experts else []
        return "x".join([*parts, *(["SP"] if self.sp else [])]) or "TP1"


def parse_layout(text: str) -> Layout:
    """`TP8xPP2xEP8` (also `tp8 pp2`, `TP8*DCP8*SP`) -> Layout. Raises DayZeroError naming the part that cannot be read."""
    degrees: dict[str, int] = {}
    sp = False
    for part in re.split(r"[x*, \N{MULTIPLICATION SIGN}]+", text.strip().lower()):
        found = re.fullmatch(r"(tp|pp|dp|cp|ep|dcp|re)[=:]?(\d+)", part)
        if part == "sp":
            sp = True
        elif found and found[1] not in degrees:
            degrees[found[1]] = int(found[2])
        else:
            raise DayZeroError(
                f"no layout reads {text!r}",
                got=part or text,
                want="degrees such as TP8xPP2xDP2xCP2xEP16xDCP8xRE32xSP, each at most once",
                fix="correct that part",
            )
    dcp, copies = degrees.pop("dcp", 1), degrees.pop("re", 0)
    tp, pp, dp, cp, ep = (degrees.get(axis, 1) for axis in AXES)
    return Layout(tp=tp, pp=pp, dp=dp, cp=cp * dcp, ep=ep, cp_in_tp=dcp, sp=sp, redundant_experts=copies)


@dataclass(frozen=True, kw_only=True, slots=True)
class Coordinates:
    __pydantic_config__ = STRICT
    tp: int
    pp: int
    dp: int
    cp: int
    ep: int
    expert_tp: int


@dataclass(frozen=True, kw_only=True, slots=True)
class LedgerLine:
    """One line of a rank's memory: how many bytes and the formula they come from."""

    __pydantic_config__ = STRICT
    category: str  # weights, cache, activations, communication, runtime, loader, reserve
    name: str
    num_bytes: int
    formula: str


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryLedger:
    """One rank's device memory. `budget_bytes` is what the plan may use of it."""

    __pydantic_config__ = STRICT
    rank: int
    stage: int
    budget_bytes: int
    lines: tuple[LedgerLine, ...]
    cache_bytes_per_token: float
    cache_bytes_per_sequence: int
    admissible_tokens: int

    def total(self, category: str | None = None) -> int:
        return sum(line.num_bytes for line in self.lines if category in (None, line.category))


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeEstimate:
    """Predicted seconds, as a range; None where the target publishes no rate."""

    __pydantic_config__ = STRICT
    compute_s: float
    memory_s: float
    communication_s: float
    low_s: float
    high_s: float
    launch_s: float = 0.0  # starting operators, at best
    note: str = ""  # how certain the figures are that it rests on


@dataclass(frozen=True, kw_only=True, slots=True)
class Rejected:
    """An alternative and the one constraint that killed it."""

    __pydantic_config__ = STRICT
    layout: Layout
    constraint: str
    short_by_bytes: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Pool:
    """Devices that serve one role (mixed, prefill or decode)."""

    __pydantic_config__ = STRICT
    role: Literal["mixed", "prefill", "decode"]
    layout: Layout
    role_layouts: dict[str, Layout] = field(default_factory=dict)  # overrides per parameter role (embedding, head, mlp)


@dataclass(frozen=True, kw_only=True, slots=True)
class FrontierPoint:
    """How many sequences of this length fit at once, all of them at full length."""

    __pydantic_config__ = STRICT
    context_tokens: int
    concurrency: int


@dataclass(frozen=True, kw_only=True, slots=True)
class LayoutRow:
    """One layout with its figures: what `plan --all` lists. `constraint` says what kills it, "" where nothing does.

    `serve_s`: predicted seconds to serve the workload's concurrent requests once (one alone, where latency is wanted);
    only to compare layouts where the target publishes no rates. Figures are None for a layout that is not legal.
    """

    __pydantic_config__ = STRICT
    name: str
    layout: Layout
    weights_dtype: str
    cache_dtype: str
    legal: bool
    fits: bool
    constraint: str = ""
    budget_bytes: int | None = None
    used_bytes: int | None = None  # by the fullest rank
    weights_bytes: int | None = None
    short_by_bytes: int | None = None
    admissible_tokens: int | None = None
    serve_s: float | None = None
    prefill: TimeEstimate | None = None
    decode: TimeEstimate | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class LayoutList:
    """Every legal layout, best first, with its figures, and how many were enumerated in all."""

    SCHEMA: ClassVar[str] = "dayzero.layouts/1"
    __pydantic_config__ = STRICT
    model: str
    target: str
    enumerated: int
    layouts: tuple[LayoutRow, ...]
    rests_on: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Explanation:
    """What one given layout would need, and what kills it. `ledger` is that of its fullest rank."""

    SCHEMA: ClassVar[str] = "dayzero.explanation/1"
    __pydantic_config__ = STRICT
    model: str
    target: str
    row: LayoutRow
    ledger: MemoryLedger | None = None
    frontier: tuple[FrontierPoint, ...] = ()
    links: tuple[str, ...] = ()  # which axis lies on which link
    reasons: tuple[str, ...] = ()
    rests_on: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    SCHEMA: ClassVar[str] = "dayzero.plan/1"
    __pydantic_config__ = STRICT

    model: str
    target: str
    feasible: bool
    layout: Layout
    devices: int
    pools: tuple[Pool, ...]
    weights_dtype: str
    cache_dtype: str
    context_tokens: int
    concurrency: int
    memory_fraction: float
    block_tokens: int
    prefill_chunk_tokens: int
    weights_bytes_per_device: int
    cache_bytes_per_token_per_device: float
    admissible_tokens: int
    ledger: tuple[MemoryLedger, ...]
    prefill: TimeEstimate | None = None
    decode: TimeEstimate | None = None
    reasons: tuple[str, ...] = ()
    rejected: tuple[Rejected, ...] = ()
    rests_on: tuple[str, ...] = ()  # target figures the answer depends on, with their confidence
    links: tuple[str, ...] = ()  # which axis lies on which link
    objective: str = "throughput"
    engine: str = "dayzero"  # whose memory model the ledger follows
    corrections: dict[str, float] = field(default_factory=dict)  # category -> ratio that earlier runs on the target taught
    frontier: tuple[FrontierPoint, ...] = ()
    idle_devices: int = 0  # asked for, but no layout on all of them fits
    inputs: dict[str, str] = field(default_factory=dict)
