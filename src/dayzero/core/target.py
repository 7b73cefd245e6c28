"""Where a model is to run and what it must do there: `Target` (one YAML file each) and `Workload`."""

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from dayzero.core.errors import DayZeroError
from dayzero.core.records import STRICT

Confidence = Literal["measured", "high", "medium", "low", "unverified"]
Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Card:
    """One device as the framework sees it. Rates are dense and decimal; None = not published."""

    __pydantic_config__ = STRICT
    memory_bytes: int | None = None
    usable_memory_bytes: int | None = None
    memory_bytes_per_s: float | None = None
    flops_per_s: dict[str, float] = field(default_factory=dict)  # canonical dtype -> dense rate
    native_dtypes: tuple[str, ...] = ()
    power_w: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """Cards that share a host and their link (bytes per second per card, one way)."""

    __pydantic_config__ = STRICT
    num_cards: int | None = None
    link_bytes_per_s: float | None = None
    topology: str | None = None
    scaleup_domain: int | None = None  # cards reachable over the fast link, when larger than the node


@dataclass(frozen=True, kw_only=True, slots=True)
class Software:
    """How PyTorch reaches the card."""

    __pydantic_config__ = STRICT
    torch_device: str
    torch_plugin: str | None = None
    collective_backend: str | None = None
    visible_devices_env: str | None = None
    constraints: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkPoint:
    """Seconds of one collective on so many bytes: an all-reduce's or reduce-scatter's input, an all-gather's result, what a
    rank sends in all in an all-to-all, one message."""

    __pydantic_config__ = STRICT
    num_bytes: int
    best_s: float
    median_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredLink:
    """One collective over `group_size` cards of one host: seconds = latency_s + bytes over the busiest card's link /
    bytes_per_s (`devices.measure_links` states the formula), and the points it was fitted to."""

    __pydantic_config__ = STRICT
    collective: Collective
    group_size: int
    latency_s: float
    bytes_per_s: float
    points: tuple[LinkPoint, ...] = ()

    def __post_init__(self) -> None:
        if self.group_size < 2 or not self.latency_s >= 0 or not self.bytes_per_s > 0:
            raise DayZeroError(
                f"measured link {self.collective}: not a speed between cards",
                got=f"{self.group_size} cards, {self.latency_s} s, {self.bytes_per_s} bytes/s",
                want="at least 2 cards, a latency of at least 0, a rate above 0",
                fix="measure again with `dayzero targets measure`, or remove the entry from links",
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    SCHEMA: ClassVar[str] = "dayzero.target/1"
    __pydantic_config__ = STRICT

    id: str
    vendor: str
    card: Card
    node: Node
    software: Software
    network_bytes_per_s: float | None = None  # per card, between nodes
    confidence: Confidence = "high"
    unverified_fields: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()
    notes: str | None = None
    links: tuple[MeasuredLink, ...] = ()  # measured on this machine; each replaces the published link for its collective

    def __post_init__(self) -> None:
        measured = [(link.collective, link.group_size) for link in self.links]
        if twice := sorted({f"{name} over {size}" for name, size in measured if measured.count((name, size)) > 1}):
            raise DayZeroError(
                f"target {self.id}: a link is stated twice",
                got=", ".join(twice),
                want="one entry in links for each collective and group size",
                fix="remove one of the two from the hardware file",
            )
        if self.card.memory_bytes is not None and self.card.memory_bytes <= 0:
            raise DayZeroError(
                f"target {self.id}: memory must be positive",
                got=self.card.memory_bytes,
                want="bytes per card",
                fix="correct memory_bytes in the hardware file",
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class TargetSummary:
    """One row of `dayzero targets`. None where a figure is not published."""

    __pydantic_config__ = STRICT
    id: str
    vendor: str
    memory_bytes: int | None
    memory_bytes_per_s: float | None
    num_cards: int | None
    torch_device: str
    torch_plugin: str | None
    confidence: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """What the deployment must serve. Defaults suit a first adaptation run on any card."""

    SCHEMA: ClassVar[str] = "dayzero.workload/1"
    __pydantic_config__ = STRICT

    context_tokens: int = 2048
    concurrency: int = 8
    input_tokens: int = 128
    output_tokens: int = 32
    max_ttft_s: float | None = None
    max_tpot_s: float | None = None
    prefill_chunk_tokens: int = 512
    soak_s: float = 15.0
    objective: Literal["throughput", "latency", "cost", "fewest_cards"] = "throughput"

    def __post_init__(self) -> None:
        for name in ("context_tokens", "concurrency", "input_tokens", "output_tokens", "prefill_chunk_tokens"):
            if getattr(self, name) < 1:
                raise DayZeroError(
                    f"workload: {name} must be at least 1",
                    got=getattr(self, name),
                    want=">= 1",
                    fix="correct the workload file",
                )
        if self.input_tokens + self.output_tokens > self.context_tokens:
            raise DayZeroError(
                "workload: input and output do not fit the context",
                got=f"{self.input_tokens} + {self.output_tokens} tokens",
                want=f"at most context_tokens = {self.context_tokens}",
                fix="raise context_tokens or shorten the requests",
            )


def load_yaml(path: Any) -> Any:
    """A YAML file as plain data. Imported lazily: most verbs never read one."""
    import yaml

    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise DayZeroError(f"{path} is not YAML", got=str(error), want="a YAML mapping", fix="correct the file") from error
