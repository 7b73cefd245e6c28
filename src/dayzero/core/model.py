"""What a model is, read from its release folder: the record `1_model.json`.

Names: a parameter is its qualified name in the unsharded transformers class with the global layer index. Its
`sources` are checkpoint names, where `*` stands for an expert index. Ranks never appear in names.
"""

from dataclasses import dataclass, field
from math import prod
from typing import ClassVar, Literal

from dayzero.core.records import STRICT
from dayzero.core.structure import QuantizationGroup, Structure
from dayzero.core.units import DTYPE_BITS, tensor_bytes

# What a parameter is for. Decides what stays in high precision, how it may be sharded and how it is displayed.
Role = Literal[
    "embedding",
    "head",
    "norm",
    "attention",
    "attention_sink",
    "indexer",
    "mlp",
    "expert",
    "shared_expert",
    "router",
    "router_bias",
    "ssm",
    "convolution",
    "tower",
    "projector",
    "mtp",
    "other",
]

# What a layer keeps between steps. `full` and `sliding` hold keys and values per head, `latent` one compressed row
# shared by all heads, `state` a constant per sequence.
CacheKind = Literal["full", "sliding", "chunked", "latent", "indexer", "compressed", "convolution", "state"]

MixerKind = Literal["full", "sliding", "chunked", "latent", "sparse_latent", "compressed", "linear", "ssm", "hybrid", "none"]
FeedForwardKind = Literal["dense", "moe", "none"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardRule:
    """How one parameter may be cut, for any tensor-parallel and expert-parallel degree (`core.sharding` applies it).

    `tensor_dim` is the dimension that TP cuts, or None when the parameter is replicated; it holds `segments` (sizes
    that sum to that dimension) cut one by one, as fused gate|up or q|k|v need. `units` per segment is how many
    indivisible groups a segment has (attention heads, key/value heads, quantization blocks). When `replicable`, a
    degree larger than `units` repeats units instead of being illegal (key/value heads under wide TP).
    `expert_dim` is the dimension that EP cuts. `proof` says where the rule comes from.
    """

    __pydantic_config__ = STRICT
    tensor_dim: int | None = None
    segments: tuple[int, ...] = ()
    units: tuple[int, ...] = ()
    replicable: bool = False
    expert_dim: int | None = None
    proof: Literal["tp_plan", "data_flow", "role", "none"] = "none"


@dataclass(frozen=True, kw_only=True, slots=True)
class Parameter:
    """One parameter of the unsharded model. `shape` is logical; `stored_dtype` is the checkpoint's, if known, and `group` the
    name of the `QuantizationGroup` that the release stores it in."""

    __pydantic_config__ = STRICT
    name: str
    shape: tuple[int, ...]
    dtype: str
    role: Role
    stored_dtype: str | None = None
    group: str = "none"
    layer: int | None = None
    tied_to: str | None = None
    is_buffer: bool = False
    sources: tuple[str, ...] = ()
    shard: ShardRule = ShardRule()

    @property
    def num_elements(self) -> int:
        return prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes at the dtype the engine computes in."""
        return tensor_bytes(self.shape, self.dtype)


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheSpec:
    """One cache tensor that one layer keeps, per sequence, as the engine allocates it.

    Growing kinds: `elements_per_token` per token, kept for at most `window_tokens` (None: for ever). Constant kinds:
    `elements_per_sequence`. `heads` is the number of key/value heads that TP may divide (0: replicated on each rank).
    `tokens_per_entry` > 1 where one entry serves several tokens (compressed caches).
    """

    __pydantic_config__ = STRICT
    kind: CacheKind
    name: str
    dtype: str
    elements_per_token: int = 0
    elements_per_sequence: int = 0
    window_tokens: int | None = None
    tokens_per_entry: int = 1
    heads: int = 0

    def bytes_for(self, num_tokens: int, dtype: str | None = None) -> int:
        """Bytes of this tensor for one sequence of `num_tokens` (one layer). `dtype` replaces a growing cache's dtype."""
        bits = DTYPE_BITS[dtype if dtype and self.elements_per_token else self.dtype]
        kept = num_tokens if self.window_tokens is None else min(num_tokens, self.window_tokens)
        entries = kept // self.tokens_per_entry  # an entry is made when its tokens are complete
        return -(-(entries * self.elements_per_token + self.elements_per_sequence) * bits // 8)


@dataclass(frozen=True, kw_only=True, slots=True)
class OperatorNode:
    """Alike operators of one layer. `name` is the first site inside the layer, `kind` the semantic operator (a library
    operator's name where there is none), `count` how many there are in this layer, all of them in the formulas.

    `flops` and `bytes` (read and written) are formulas in B (sequences), T (new tokens a sequence) and C (tokens a sequence
    that its cache holds, the new ones included), evaluated by `core.formulas`. Masked attention is counted in full, as an
    operator without knowledge of the mask computes it.
    """

    __pydantic_config__ = STRICT
    name: str
    kind: str
    count: int
    flops: str = "0"
    bytes: str = "0"


Phase = Literal["prefill", "decode"]
PHASES: tuple[Phase, ...] = ("prefill", "decode")


@dataclass(frozen=True, kw_only=True, slots=True)
class OperatorGraph:
    """Operators in the order they run: a prefill (C = T) and a decode step (T = 1). `notes`: what could not be resolved."""

    __pydantic_config__ = STRICT
    prefill: tuple[OperatorNode, ...] = ()
    decode: tuple[OperatorNode, ...] = ()
    notes: tuple[str, ...] = ()

    def of(self, phase: Phase) -> tuple[OperatorNode, ...]:
        return self.prefill if phase == "prefill" else self.decode


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerKind:
    """Layers that are alike: same mixer, feed-forward, cache and operators. `layers` are global indices."""

    __pydantic_config__ = STRICT
    name: str
    mixer: MixerKind
    feed_forward: FeedForwardKind
    layers: tuple[int, ...]
    cache: tuple[CacheSpec, ...] = ()
    operators: OperatorGraph = OperatorGraph()


@dataclass(frozen=True, kw_only=True, slots=True)
class Dimensions:
    """The sizes that plans and engines need. None where the architecture has no such thing."""

    __pydantic_config__ = STRICT
    hidden_size: int
    num_layers: int
    vocab_size: int
    max_position_tokens: int | None = None
    num_attention_heads: int | None = None
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    value_head_dim: int | None = None
    intermediate_size: int | None = None
    num_experts: int = 0
    num_experts_per_token: int = 0
    num_shared_experts: int = 0
    num_mtp_layers: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """Something wrong or doubtful in the input. `error` stops the pipeline, `warning` is carried to the report."""

    __pydantic_config__ = STRICT
    kind: str
    severity: Literal["error", "warning"]
    detail: str
    file: str | None = None
    tensor: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelDescription:
    """Everything known about a model without loading it. `provisional` when no class could be built.

    `parameters_by_role` counts tied ones once and no buffers. `outer_operators` are those outside the decoder layers.
    Every key of the config is in one of three lists (dotted paths): consumed (by whom: `key_readers`), inert (known, but
    nothing that builds or runs the model reads it), unconsumed (nobody knows it here). `novel_keys` are those of the last list
    that no model known to transformers has. `checkpoint_bytes` is counted where there are weights, else computed.
    """

    SCHEMA: ClassVar[str] = "dayzero.model/1"
    __pydantic_config__ = STRICT

    name: str
    model_type: str
    architecture: str
    source_hash: str
    dtype: str
    dimensions: Dimensions
    layer_kinds: tuple[LayerKind, ...]
    parameters: tuple[Parameter, ...]
    total_parameters: int
    active_parameters: int
    mtp_parameters: int = 0
    parameters_by_role: dict[str, int] = None  # type: ignore[assignment]
    outer_operators: OperatorGraph = OperatorGraph()
    structure: Structure = field(default_factory=Structure)
    towers: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    tokenizer_tokens: int | None = None  # one more than the largest id of the tokenizer, where it could be read
    quantization: dict[str, str] = None  # type: ignore[assignment]
    quantization_groups: tuple[QuantizationGroup, ...] = ()
    rope: dict[str, dict[str, float | str | None]] = None  # type: ignore[assignment]
    consumed_keys: tuple[str, ...] = ()
    inert_keys: tuple[str, ...] = ()
    novel_keys: tuple[str, ...] = ()
    key_readers: dict[str, str] = None  # type: ignore[assignment]
    unconsumed_keys: tuple[str, ...] = ()
    checkpoint_bytes: int | None = None
    has_weights: bool = False
    provisional: bool = False
    problems: tuple[Problem, ...] = ()

    def __post_init__(self) -> None:
        covered = sorted(layer for kind in self.layer_kinds for layer in kind.layers)
        assert covered == list(range(self.dimensions.num_layers)), f"layer kinds cover {covered}"
        object.__setattr__(self, "quantization", self.quantization or {})
        object.__setattr__(self, "rope", self.rope or {})
        object.__setattr__(self, "key_readers", self.key_readers or {})
        object.__setattr__(self, "parameters_by_role", self.parameters_by_role or _by_role(self.parameters))

    def kind_of(self, layer: int) -> LayerKind:
        return next(kind for kind in self.layer_kinds if layer in kind.layers)

    def cache_bytes(self, num_tokens: int, dtype: str | None = None) -> int:
        """Bytes of all caches of one sequence of `num_tokens`, unsharded."""
        return sum(spec.bytes_for(num_tokens, dtype) * len(kind.layers) for kind in self.layer_kinds for spec in kind.cache)

    @property
    def cache_bytes_per_token(self) -> float:
        """The slope of `cache_bytes` beyond every window, at the model's dtype."""
        return sum(
            spec.elements_per_token * DTYPE_BITS[spec.dtype] / 8 / spec.tokens_per_entry * len(kind.layers)
            for kind in self.layer_kinds
            for spec in kind.cache
            if spec.window_tokens is None
        )

    @property
    def cache_bytes_per_sequence(self) -> int:
        """The constant part: full windows and recurrent states of one sequence, at the model's dtype."""
        return sum(
            spec.bytes_for(spec.window_tokens if spec.window_tokens is not None else 0) * len(kind.layers)
            for kind in self.layer_kinds
            for spec in kind.cache
        )


def _by_role(parameters: tuple[Parameter, ...]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for parameter in parameters:
        if parameter.tied_to is None and not parameter.is_buffer:
            counts[parameter.role] = counts.get(parameter.role, 0) + parameter.num_elements
    return counts
