"""What conversion leaves behind: rank shards with proof. Records: `layout.json` of an Artifact and `3_weights.json`.

An Artifact is a folder: `layout.json` (published last, by rename), `release/` (config, tokenizer, generation settings,
copied verbatim), `rank-00000/*.safetensors` and `rank-00000/ledger.jsonl`. It is device-neutral.
"""

from dataclasses import dataclass, field
from typing import ClassVar

from dayzero.core.model import Problem
from dayzero.core.plan import Layout
from dayzero.core.records import STRICT


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardFile:
    __pydantic_config__ = STRICT
    file: str  # relative to the artifact
    num_bytes: int
    checksum: str  # "<algorithm>:<hex>"


@dataclass(frozen=True, kw_only=True, slots=True)
class ArtifactLayout:
    """`layout.json`: which rank stores what. `files` per rank, `ledgers` are the per-rank conservation ledgers."""

    SCHEMA: ClassVar[str] = "dayzero.artifact/1"
    __pydantic_config__ = STRICT

    key: str
    model: str
    source_hash: str
    layout: Layout
    dtype: str
    quantization: str | None
    files: tuple[tuple[ShardFile, ...], ...]
    ledgers: tuple[ShardFile, ...]
    release_files: tuple[ShardFile, ...]
    accepted: tuple[Problem, ...] = ()  # what the values said against the checkpoint it was made of, and was accepted


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorError:
    """What storing a tensor in fewer bits did to it. `max_abs`: the largest difference. `relative`: the Frobenius norm of the
    differences over that of the weight. `cosine`: of the two as vectors. `snr_db`: 10 log10 of the weight's energy over the
    error's; None where nothing was lost."""

    __pydantic_config__ = STRICT
    tensor: str
    preset: str
    num_elements: int
    max_abs: float
    relative: float
    cosine: float
    snr_db: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class QuantizedParameter:
    """A parameter of the class of which the artifact stores parts: `<name>_packed` or `<name>` (codes), `<name>_scale`, and
    with zero points `<name>_zero_point` (int8). `shape` is the class's; `transposed`: the parts are of its last two
    dimensions exchanged, [..., output, input]."""

    __pydantic_config__ = STRICT
    name: str
    preset: str
    shape: tuple[int, ...]
    transposed: bool = False
    input_scale: float | None = None  # of what the layer is given, where the preset wants one that was measured


@dataclass(frozen=True, kw_only=True, slots=True)
class ArtifactQuantization:
    """`quantization.json` of an artifact whose weights are stored in fewer bits: what, how, and what it cost."""

    SCHEMA: ClassVar[str] = "dayzero.quantization/1"
    __pydantic_config__ = STRICT

    preset: str
    dtype: str  # that the plain weights had, and that the engine computes in
    parameters: tuple[QuantizedParameter, ...]
    kept: dict[str, str] = field(default_factory=dict)  # parameter -> why it stays in its own dtype
    errors: tuple[TensorError, ...] = ()
    calibration: dict[str, str] = field(default_factory=dict)  # method, hash of the data, tokens; empty: from the weights alone


@dataclass(frozen=True, kw_only=True, slots=True)
class LedgerEntry:
    """One line of `ledger.jsonl`: one stored tensor, where its bytes came from and through what."""

    __pydantic_config__ = STRICT
    parameter: str
    file: str
    offset: int
    num_bytes: int
    shape: tuple[int, ...]
    dtype: str
    checksum: str
    sources: tuple["SourceRange", ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceRange:
    """A source tensor, the box taken of it, the transforms applied, and where it lands in the stored tensor."""

    __pydantic_config__ = STRICT
    tensor: str
    file: str
    box: tuple[tuple[int, int], ...]
    transforms: tuple[str, ...]
    into: tuple[tuple[int, int], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class LedgerCounts:
    __pydantic_config__ = STRICT
    source_bytes: int
    used_bytes: int
    dropped: dict[str, str] = field(default_factory=dict)  # source tensor -> reason
    filled_parameters: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightsReport:
    """`3_weights.json`: where the Artifact is, what it cost and what was wrong."""

    SCHEMA: ClassVar[str] = "dayzero.weights/1"
    __pydantic_config__ = STRICT

    artifact: str  # path relative to the run folder (or the --out folder)
    key: str
    ledger: LedgerCounts
    problems: tuple[Problem, ...]
    bytes_read: int
    bytes_written: int
    seconds: float
    reused: bool = False
    verified: bool = False
    quantize: ArtifactQuantization | None = None
    inputs: dict[str, str] = field(default_factory=dict)
