"""How a model is laid out on a target and what it costs there: the record `2_plan.json`.

devices of a pool = tp * pp * dp * cp. EP adds no devices: within a pipeline stage ep divides tp * dp * cp and overlays
them; each expert is tensor-split by tp * dp * cp / ep. A single rank is the special case of many.
"""

from dataclasses import dataclass, field
from typing import ClassVar

from dayzero.core.errors import DayZeroError
from dayzero.core.records import STRICT


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Parallel degrees of one pool and the layers of each pipeline stage (half-open ranges; empty: not yet cut)."""

    __pydantic_config__ = STRICT
    tp: int = 1
    pp: int = 1
    dp: int = 1
    cp: int = 1
    ep: int = 1
    stages: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "dp", "cp", "ep"):
            if getattr(self, name) < 1:
                raise DayZeroError(
                    f"layout: {name} must be at least 1",
                    got=getattr(self, name),
                    want=">= 1",
                    fix=f"give --{name} a positive number",
                )
        if (self.tp * self.dp * self.cp) % self.ep:
            raise DayZeroError(
                "layout: ep must divide tp * dp * cp",
                got=f"ep={self.ep}, tp*dp*cp={self.tp * self.dp * self.cp}",
                want="a divisor",
                fix="choose ep so that it divides tp * dp * cp",
            )

    @property
    def num_devices(self) -> int:
        return self.tp * self.pp * self.dp * self.cp

    @property
    def expert_tp(self) -> int:
        """Ranks that share one expert's tensors."""
        return self.tp * self.dp * self.cp // self.ep

    def coordinates(self, rank: int) -> "Coordinates":
        """Rank -> place. Order, slowest to fastest: pp, dp, cp, tp. The expert group runs over dp, cp, tp."""
        assert 0 <= rank < self.num_devices, (rank, self)
        rest, tp = divmod(rank, self.tp)
        rest, cp = divmod(rest, self.cp)
        pp, dp = divmod(rest, self.dp)
        flat = (dp * self.cp + cp) * self.tp + tp
        ep, expert_tp = divmod(flat, self.expert_tp)
        return Coordinates(tp=tp, pp=pp, dp=dp, cp=cp, ep=ep, expert_tp=expert_tp)


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
    role: str
    layout: Layout
    role_layouts: dict[str, Layout] = field(default_factory=dict)  # overrides per parameter role


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
    inputs: dict[str, str] = field(default_factory=dict)
