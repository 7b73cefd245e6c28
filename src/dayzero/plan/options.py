"""What a plan is asked for: `PlanOptions` as a user gives them, `Request` with every blank filled in.

Deliberately not done: anything that needs the model's layers (that is `search` and `ledger`).
"""

from dataclasses import dataclass, field, replace
from typing import Literal

from dayzero.core.errors import DayZeroError
from dayzero.core.model import ModelDescription
from dayzero.core.records import STRICT
from dayzero.core.target import Target, Workload
from dayzero.plan.engines import OWN, load_engine
from dayzero.plan.formats import AS_PUBLISHED, cache_dtype_name, weight_dtype_name

AXES = ("tp", "pp", "dp", "cp", "ep", "dcp")
# Roles that a pool may split over another number of cards than its attention.
SPLIT_ROLES = ("embedding", "head", "mlp", "shared_expert")

Objective = Literal["throughput", "latency", "cost", "fewest_cards"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanOptions:
    """None means: choose it (degrees, devices), take it from the workload (context, concurrency) or from the release.

    `cp`: context ranks that are cards of their own; `dcp`: those inside the TP group. `weights_dtype`, `cache_dtype`: one
    name, or several with commas between them, of which the objective chooses. `pools`: one mixed pool, a prefill and a
    decode pool, or whichever is better; `prefill`, `decode`: a given layout of such a pool (`TP8xDP2`). `role_tp`: over how
    many cards of a stage a role is split; `split_roles` searches them. `redundant_experts`: places for copies of experts in
    each layer, for engines that keep such. `engine`: whose memory model the ledger follows.
    """

    __pydantic_config__ = STRICT
    devices: int | None = None
    tp: int | None = None
    pp: int | None = None
    ep: int | None = None
    dp: int | None = None
    cp: int | None = None
    dcp: int | None = None
    sp: bool | None = None
    context: int | None = None
    concurrency: int | None = None
    memory_fraction: float | None = None  # None: the engine's
    weights_dtype: str | None = None
    cache_dtype: str | None = None
    block_tokens: int = 16
    mtp: bool = False  # count the multi-token-prediction layers
    objective: Objective | None = None  # None: the workload's
    pools: Literal["mixed", "split", "auto"] = "mixed"
    prefill: str | None = None
    decode: str | None = None
    role_tp: dict[str, int] = field(default_factory=dict)
    split_roles: bool = False
    redundant_experts: int = 0
    engine: str = OWN

    def __post_init__(self) -> None:
        for name in ("devices", *AXES, "context", "concurrency", "block_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise DayZeroError(f"plan: {name} must be at least 1", got=value, want=">= 1",
                                   fix=f"give --{name.replace('_', '-')} a positive number")  # fmt: skip
        if self.redundant_experts < 0 or (self.redundant_experts and self.engine == OWN):
            raise DayZeroError("plan: copies of experts are for engines that keep some", got=f"redundant_experts="
                               f"{self.redundant_experts} in the engine {self.engine}", want="0, or another engine",
                               fix="leave the copies out, or plan for another --engine")  # fmt: skip
        for role in self.role_tp:
            if role not in SPLIT_ROLES:
                raise DayZeroError(f"no role is split by itself as {role!r}", got=role, want=", ".join(SPLIT_ROLES),
                                   fix="correct the role")  # fmt: skip
        if self.memory_fraction is not None and not 0.0 < self.memory_fraction <= 1.0:
            raise DayZeroError("plan: memory_fraction is a share of a card's memory", got=self.memory_fraction,
                               want="0 < fraction <= 1", fix="give --memory-fraction a value such as 0.9")  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """The options with every blank filled in. `fixed` are the degrees a user gave."""

    context_tokens: int
    concurrency: int
    average_tokens: int  # prompt + answer of a typical request, what concurrent requests hold on average
    chunk_tokens: int
    compute_dtype: str
    weights_dtype: str
    cache_dtype: str | None  # None: each cache at its own dtype
    memory_fraction: float
    block_tokens: int
    mtp: bool
    fixed: tuple[tuple[str, int], ...]
    sp: bool | None = None
    role_tp: tuple[tuple[str, int], ...] = ()
    split_roles: bool = False
    redundant_experts: int = 0
    notes: tuple[str, ...] = ()

    def sequences(self, dp: int) -> int:
        """Sequences one replica of `dp` holds at once (the fullest)."""
        return -(-self.concurrency // dp)


def choices(options: PlanOptions) -> list[PlanOptions]:
    """One set of options for each combination of the weights and cache dtypes that were offered."""
    weights = options.weights_dtype.split(",") if options.weights_dtype else [None]
    caches = options.cache_dtype.split(",") if options.cache_dtype else [None]
    return [replace(options, weights_dtype=weight and weight.strip(), cache_dtype=cache and cache.strip())
            for weight in weights for cache in caches]  # fmt: skip


def resolve(model: ModelDescription, workload: Workload, options: PlanOptions) -> Request:
    """Fill the blanks. Raises DayZeroError for a dtype nobody knows."""
    notes = []
    context = options.context if options.context is not None else workload.context_tokens
    limit = model.dimensions.max_position_tokens
    if limit is not None and context > limit:
        if options.context is None:
            context = limit
            notes.append(f"context cut from the workload's {workload.context_tokens} to the model's {limit} positions")
        else:
            notes.append(f"context {context} exceeds the {limit} positions the model states; memory is planned as asked")
    return Request(
        context_tokens=context, concurrency=options.concurrency or workload.concurrency,
        average_tokens=min(context, workload.input_tokens + workload.output_tokens),
        chunk_tokens=min(context, workload.prefill_chunk_tokens), compute_dtype=model.dtype,
        weights_dtype=_weights_dtype(model, options.weights_dtype),
        cache_dtype=cache_dtype_name(options.cache_dtype) if options.cache_dtype else None,
        memory_fraction=options.memory_fraction or load_engine(options.engine).memory.fraction,
        block_tokens=options.block_tokens, mtp=options.mtp,
        fixed=tuple((axis, value) for axis in AXES if (value := getattr(options, axis)) is not None), sp=options.sp,
        role_tp=tuple(sorted(options.role_tp.items())), split_roles=options.split_roles,
        redundant_experts=options.redundant_experts, notes=tuple(notes),
    )  # fmt: skip


def _weights_dtype(model: ModelDescription, asked: str | None) -> str:
    if asked is None or asked == AS_PUBLISHED:
        return AS_PUBLISHED if model.quantization else model.dtype
    return weight_dtype_name(asked)


def memory_bytes(target: Target) -> int:
    """What a rank may count on before the fraction: the usable figure where known, never more than the card's total."""
    figures = [size for size in (target.card.memory_bytes, target.card.usable_memory_bytes) if size is not None]
    if not figures:
        raise DayZeroError(f"target {target.id} publishes no memory size", got="memory_bytes: null",
                           want="bytes per card", fix="measure it on the device (`dayzero targets measure --device D`), "
                           "or copy the hardware file and fill in memory_bytes")  # fmt: skip
    return min(figures)
