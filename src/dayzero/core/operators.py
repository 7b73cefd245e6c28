"""Which operator runs at which place of a model, and why one may believe it: the record `4_operators.json`."""

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from dayzero.core.records import STRICT

Binding = Literal["library", "fused", "composed", "custom", "fallback", "missing"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Evidence:
    """Agreement of a binding with its float64 definition: cases run, worst error, and the limit it had to meet."""

    __pydantic_config__ = STRICT
    cases: int
    worst_error: float
    limit: float
    method: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Site:
    """One place where an operator runs. `names` are the module names (or `name#operator.n`) that are alike.

    `flops_share` and `bytes_share` are of one decode step at the workload's context.
    """

    __pydantic_config__ = STRICT
    operator: str
    names: tuple[str, ...]
    signature: str  # shapes and settings that make the sites alike, e.g. "576->1536"
    binding: Binding
    kernel: str
    reason: str
    evidence: Evidence | None
    flops_share: float
    bytes_share: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Coverage:
    __pydantic_config__ = STRICT
    sites: int
    flops_share: float
    bytes_share: float


@dataclass(frozen=True, kw_only=True, slots=True)
class OperatorMap:
    SCHEMA: ClassVar[str] = "dayzero.operators/1"
    __pydantic_config__ = STRICT

    model: str
    device: str
    instruction_set: str
    sites: tuple[Site, ...]
    coverage: dict[str, Coverage] = field(default_factory=dict)  # binding -> its share
    fallbacks: tuple[str, ...] = ()  # each in plain words
    missing: tuple[str, ...] = ()
    inputs: dict[str, str] = field(default_factory=dict)
