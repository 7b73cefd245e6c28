"""What calibration leaves behind, as records: per matrix, per layer, and as a whole. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from dayzero.core.records import STRICT

Method = Literal["gptq", "scales", "data-free"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """`method`: "gptq" chooses scales and makes up for errors, "scales" only chooses scales (the search of AWQ's clipping).
    A matrix that fewer than `min_tokens` tokens reached is rounded data-free. `statistics_bytes`: room for sums of x x^T at a
    time; a layer whose matrices need more is run several times. `absorb`: scales of inputs are first moved into what makes the
    inputs, where that is exact (AWQ): parameters that stay plain then change too."""

    __pydantic_config__ = STRICT
    method: Method = "gptq"
    damping: float = 0.01
    search_scales: bool = True
    min_tokens: int = 32
    statistics_bytes: int = 4 * 2**30
    absorb: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class MatrixRecord:
    """`loss`: of the layer's output, squared error over squared output on the calibration inputs; `data_free_loss`: what plain
    rounding would have. `reason`: why it is data-free, or what had to be done. `tokens`: how many reached it."""

    __pydantic_config__ = STRICT
    parameter: str
    index: int
    preset: str
    method: Method
    tokens: int
    columns: int
    loss: float | None = None
    data_free_loss: float | None = None
    input_max: float = 0.0
    reason: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerRecord:
    """`station`: the layer's module. `file` holds `<parameter>:<index>:codes`, `:scales` and `:zeros` of each matrix."""

    SCHEMA: ClassVar[str] = "dayzero.calibrated-layer/1"
    __pydantic_config__ = STRICT
    station: str
    fingerprint: str
    file: str
    checksum: str
    part: int
    parts: int
    matrices: tuple[MatrixRecord, ...]
    transposed: tuple[str, ...] = ()
    unseen: tuple[str, ...] = ()
    plain: tuple[str, ...] = ()  # parameters that are not quantized and were changed: `<parameter>:plain` in the file
    scaled: tuple[str, ...] = ()  # quantized parameters whose codes are of rows or columns that were scaled
    notes: tuple[str, ...] = ()
    passes: int = 1
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class CalibrationRecord:
    """`calibration.json` of a folder of calibrated layers. `data` is what `text.Sequences.record` says."""

    SCHEMA: ClassVar[str] = "dayzero.calibration/1"
    __pydantic_config__ = STRICT
    fingerprint: str
    settings: Settings
    presets: dict[str, str]  # parameter -> preset
    data: dict[str, str]
    layers: tuple[str, ...]
    parts: int = 1
    notes: tuple[str, ...] = field(default=())
