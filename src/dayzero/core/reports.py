"""Verdicts and the records of the proving stages: `6_numerics.json`, `7_performance.json`, `8_stability.json` and
`acceptance.json`. A criterion nobody checked is "not_shown", never a pass."""

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from dayzero.core.records import STRICT

Verdict = Literal["pass", "fail", "not_shown"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """One criterion: its verdict, the value seen, the limit frozen before the run, and where the worst case is.

    A non-finite value is spelled as text in JSON, and never passes.
    """

    __pydantic_config__ = STRICT
    name: str
    verdict: Verdict
    value: float | int | str | None
    limit: float | int | str | None
    where: str = ""
    required: bool = True
    detail: str = ""

    def __post_init__(self) -> None:
        for name in ("value", "limit"):
            number = getattr(self, name)
            if isinstance(number, float) and not math.isfinite(number):
                assert self.verdict != "pass" or name == "limit", f"{self.name}: {number} cannot pass"
                object.__setattr__(self, name, str(number))


def overall(checks: tuple[Check, ...]) -> Verdict:
    """fail beats not_shown beats pass, over the required checks; no required check at all is not_shown."""
    verdicts = {check.verdict for check in checks if check.required}
    return "fail" if "fail" in verdicts else "not_shown" if "not_shown" in verdicts or not verdicts else "pass"


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerError:
    """Error of one layer's output against the reference, and the reference's own error at the served dtype."""

    __pydantic_config__ = STRICT
    layer: int
    kind: str
    max_abs: float
    relative: float
    reference_relative: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """An answer beside the reference's, for a person to judge."""

    __pydantic_config__ = STRICT
    prompt: str
    answer: str
    reference: str
    same_tokens: int
    num_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class NumericsReport:
    SCHEMA: ClassVar[str] = "dayzero.numerics/1"
    __pydantic_config__ = STRICT

    verdict: Verdict
    checks: tuple[Check, ...]
    reference: str  # what it was compared with, in words
    layers: tuple[LayerError, ...] = ()
    samples: tuple[Sample, ...] = ()
    seconds: float = 0.0
    inputs: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """n measurements of one figure: median, 10th and 90th percentile."""

    __pydantic_config__ = STRICT
    n: int
    median: float
    p10: float
    p90: float


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchPoint:
    """Figures at one concurrency. Failed requests are counted apart and excluded from the figures."""

    __pydantic_config__ = STRICT
    concurrency: int
    requests: int
    failed: int
    input_tokens: int
    output_tokens: int
    ttft_s: Spread
    tpot_s: Spread
    output_tokens_per_s: float
    peak_memory_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchReport:
    SCHEMA: ClassVar[str] = "dayzero.performance/1"
    __pydantic_config__ = STRICT

    verdict: Verdict
    checks: tuple[Check, ...]
    instruction_set: str
    points: tuple[BenchPoint, ...]
    how: tuple[str, ...]  # how each number was made
    seconds: float = 0.0
    inputs: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class StabilityReport:
    SCHEMA: ClassVar[str] = "dayzero.stability/1"
    __pydantic_config__ = STRICT

    verdict: Verdict
    checks: tuple[Check, ...]
    duration_s: float
    requests: int
    failed: int
    cancelled: int
    memory_time_s: tuple[float, ...] = ()
    memory_bytes: tuple[int, ...] = ()
    memory_slope_bytes_per_s: float | None = None
    memory_slope_ci95_bytes_per_s: tuple[float, float] | None = None
    inputs: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class ServingReport:
    """`5_serving.json`: how the model is served. `equality` are the proofs made at load."""

    SCHEMA: ClassVar[str] = "dayzero.serving/1"
    __pydantic_config__ = STRICT

    verdict: Verdict
    engine: dict[str, Any]  # EngineInfo
    checks: tuple[Check, ...]
    load_s: float
    fallbacks: tuple[str, ...] = ()
    inputs: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Dimension:
    """One of the four dimensions of acceptance, with the checks it rests on (`stage:name`)."""

    __pydantic_config__ = STRICT
    name: str
    verdict: Verdict
    checks: tuple[Check, ...]
    rerun: str  # the command that repeats its checks


@dataclass(frozen=True, kw_only=True, slots=True)
class Acceptance:
    SCHEMA: ClassVar[str] = "dayzero.acceptance/1"
    __pydantic_config__ = STRICT

    verdict: Verdict
    model: str
    target: str
    dimensions: tuple[Dimension, ...]
    limits: tuple[str, ...]  # every fallback and limit in plain words
    created: str
    inputs: dict[str, str] = field(default_factory=dict)
