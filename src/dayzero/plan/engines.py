"""Engines as the ledger sees them: what each one's memory fraction covers, what it pads, holds twice, pages and reserves.

Goes in: one YAML file per engine in `engines/` (figures with their sources). Comes out: an `Engine`, and what of it applies
to one model on one target. Deliberately not done: launch options (`plan.export`), speed.
"""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from dayzero.core.errors import DayZeroError
from dayzero.core.model import ModelDescription
from dayzero.core.records import STRICT, from_dict
from dayzero.core.target import Target, load_yaml
from dayzero.plan.formats import Padding

FOLDER = Path(__file__).parent / "engines"
OWN = "dayzero"
Category = Literal["activations", "communication", "runtime", "graph", "loader", "reserve"]


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryModel:
    """`fraction` of the card by default. What is `outside` it must fit in the rest of the card and is charged beyond that."""

    __pydantic_config__ = STRICT
    fraction: float
    outside: tuple[Category, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Reserves:
    """An engine's fixed costs on one kind of device. `graph_bytes`: recorded device graphs."""

    __pydantic_config__ = STRICT
    runtime_bytes: int
    communication_bytes_2: int
    communication_bytes: int
    graph_bytes: int = 0
    reserve_share: float = 0.0  # of the budget, for fragmentation and alignment


@dataclass(frozen=True, kw_only=True, slots=True)
class ActivationModel:
    """How the activation peak of a step comes about.

    `combine`: the sum of all parts (an allocator that keeps them), or the largest of them beside the residual stream.
    `logits`: of every row of a step in two dtypes, or of one row a sequence with `sampler_bytes` an entry for sampling.
    `dispatch`: what one routed row takes, all its inputs and outputs or the fused kernel's two buffers. Sparse indexers:
    `indexer_contexts` keys of the full context of `indexer_row_bytes` are kept room for, and scores take `indexer_score_bytes`.
    """

    __pydantic_config__ = STRICT
    combine: Literal["sum", "peak"] = "sum"
    logits: Literal["rows", "sampled"] = "rows"
    sampler_bytes: int = 0
    dispatch: Literal["separate", "fused"] = "separate"
    indexer_contexts: int = 0
    indexer_row_bytes: int = 0
    indexer_score_bytes: int = 0
    decode_is_batched: bool = False  # the chunk bounds all tokens of a step, those of decoding sequences included


@dataclass(frozen=True, kw_only=True, slots=True)
class PaddingRule:
    """Where experts' matrices are padded: storage scheme, the release's method, and what the card must (not) compute in."""

    __pydantic_config__ = STRICT
    scheme: str
    methods: tuple[str, ...]
    vendor: str | None = None
    native: str | None = None
    not_native: str | None = None
    up_rows: int = 1
    up_columns: int = 1
    down_rows: int = 1
    down_columns: int = 1
    source: str


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightModel:
    """`vocabulary_multiple`: rows that embedding and head are padded to. `absorbed_latents`: the matrix that expands a cached
    latent to heads is held a second time, multiplied out, in the dtype of the computation. `wide_roles`: matrices of these
    roles that the description's rules leave whole are divided by TP along the side that is at least as wide as the model
    (heads, groups and channels of a mixer are); narrower ones (latents, gates per head) stay whole. `draft_ends`: a draft
    holds an embedding and a head of its own, whether its release stores them or not."""

    __pydantic_config__ = STRICT
    vocabulary_multiple: int = 1
    absorbed_latents: bool = False
    wide_roles: tuple[str, ...] = ()
    draft_ends: bool = False
    padding: tuple[PaddingRule, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheRule:
    """An entry that this engine stores otherwise than the cache dtype says: codes of `dtype`, `scale_bits` per
    `scale_group` of them. It holds for one cache kind and tensor name (None: all), one asked dtype (None: any), and with
    `sparse` for models with (True) or without (False) an indexer."""

    __pydantic_config__ = STRICT
    kind: str
    name: str | None = None
    asked: str | None = None
    sparse: bool | None = None
    dtype: str
    scale_group: int = 0
    scale_bits: int = 0
    source: str


@dataclass(frozen=True, kw_only=True, slots=True)
class CompressedPools:
    """Blocks for caches of compressed tokens (`plan.slabs`): tokens of a block, of a block of a window, of a block of the rows
    that wait to be compressed (by tokens per entry), and the bytes that pages are rounded up to."""

    __pydantic_config__ = STRICT
    block_tokens: int
    window_block_tokens: int
    state_block_tokens: dict[int, int]
    align_bytes: int
    source: str


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheModel:
    """`pages`: every tensor by itself, or pages of one size for all layers, which several kinds of layers share (`Pages`).
    Attention pages of hybrids grow in steps of `page_step_tokens` until a state fits into one. `states_by_tp`: states and
    convolution rows, which the description leaves whole, are divided by TP."""

    __pydantic_config__ = STRICT
    block_tokens: int = 16
    pages: Literal["own", "unified"] = "own"
    page_step_tokens: int = 16
    states_by_tp: bool = False
    compressed: CompressedPools | None = None
    rules: tuple[CacheRule, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class StepModel:
    """What a step takes beside its kernels and collectives, at best and at worst: starting an operator of a layer (fused and
    from a recorded graph, or one by one from Python), and scheduling, preparing and sampling a step."""

    __pydantic_config__ = STRICT
    operator_s: tuple[float, float] = (1.5e-6, 12e-6)
    step_s: tuple[float, float] = (2e-4, 8e-3)


@dataclass(frozen=True, kw_only=True, slots=True)
class Engine:
    __pydantic_config__ = STRICT
    name: str
    memory: MemoryModel
    accelerator: Reserves
    host: Reserves
    activations: ActivationModel
    weights: WeightModel = WeightModel()
    cache: CacheModel = CacheModel()
    steps: StepModel = StepModel()
    sources: dict[str, str]

    def reserves(self, target: Target) -> Reserves:
        """Ranks that live in host memory have no device context and small buffers."""
        return self.host if target.node.topology == "shared memory" else self.accelerator


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightRules:
    """What of an engine's weight model applies to one model on one target."""

    vocabulary_multiple: int = 1
    absorbed_latents: bool = False
    wide_roles: tuple[str, ...] = ()
    padding: Padding | None = None


def weight_rules(engine: Engine, model: ModelDescription, target: Target, weights_dtype: str) -> WeightRules:
    """The engine's rules for this model there. Padding follows the stored scheme, or the one that was asked for."""
    asked = {group.scheme for group in model.quantization_groups} if weights_dtype == "as published" else {weights_dtype}
    method = model.quantization.get("method", model.quantization.get("quant_method", ""))
    padding = None
    for rule in engine.weights.padding:
        native = target.card.native_dtypes
        if (rule.scheme in asked and (not rule.methods or method in rule.methods)
                and (rule.vendor is None or rule.vendor == target.vendor)
                and (rule.native is None or rule.native in native)
                and (rule.not_native is None or rule.not_native not in native)):  # fmt: skip
            padding = Padding(up_rows=rule.up_rows, up_columns=rule.up_columns, down_rows=rule.down_rows,
                              down_columns=rule.down_columns)  # fmt: skip
            break
    return WeightRules(vocabulary_multiple=engine.weights.vocabulary_multiple,
                       absorbed_latents=engine.weights.absorbed_latents, wide_roles=engine.weights.wide_roles,
                       padding=padding)  # fmt: skip


def engine_names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


@cache
def load_engine(name: str) -> Engine:
    """The memory model of an engine. Raises DayZeroError on a name without a file."""
    path = FOLDER / f"{name}.yaml"
    if not path.is_file():
        raise DayZeroError(f"no engine is named {name!r}", got=name, want=", ".join(engine_names()),
                           fix="give one of these, or write a file for it beside theirs")  # fmt: skip
    return from_dict(Engine, load_yaml(path))
