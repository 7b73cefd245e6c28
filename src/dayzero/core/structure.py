"""What a layer is made of, in the words an engineer asks with: the parts of a `ModelDescription` that no engine needs.

Every record says where it comes from: `measured` on an instance of the class, read from `keys` of the config, or `unknown`.
"""

from dataclasses import dataclass
from typing import Literal

from dayzero.core.records import STRICT
from dayzero.core.storage import Storage

Evidence = Literal["measured", "keys", "unknown"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Routing:
    """How tokens find their experts. None: not known. `bias`: a correction added for the choice alone, not for the weights.

    `normalised`: the chosen weights are divided by their sum; otherwise they are the scores over all experts, gathered.
    `default_keys`: keys that decide it and are absent from the config, so that the class's default decided.
    """

    __pydantic_config__ = STRICT
    layer_kinds: tuple[str, ...] = ()
    scoring: str | None = None
    experts_per_token: int = 0
    groups: int = 1
    groups_per_token: int = 1
    bias: bool | None = None
    scaling: float | None = None
    normalised: bool | None = None
    default_keys: tuple[str, ...] = ()
    evidence: Evidence = "unknown"


@dataclass(frozen=True, kw_only=True, slots=True)
class Positions:
    """One position encoding of the model, and the layer kinds that use it.

    `kind`: rotary, learned, added to the embedding (by other means), bias by distance, alibi, queries scaled by position,
    none, not known. `style` is how rotary dimensions are paired: `half` (i with i + d/2) or
    `interleaved` (2i with 2i + 1). `rotated_dims` of `head_dims`; `inverse_frequencies` as the class really computes them,
    `attention_factor` multiplies cos and sin; `softmax_scale` is what attention is really called with, scaling included.
    """

    __pydantic_config__ = STRICT
    kind: str
    layer_kinds: tuple[str, ...] = ()
    module: str = ""
    theta: float | None = None
    scaling: str | None = None
    factor: float | None = None
    style: Literal["half", "interleaved"] | None = None
    rotated_dims: int | None = None
    head_dims: int | None = None
    inverse_frequencies: tuple[float, ...] = ()
    attention_factor: float | None = None
    softmax_scale: float | None = None
    evidence: Evidence = "unknown"


@dataclass(frozen=True, kw_only=True, slots=True)
class FeedForward:
    """A dense or expert feed-forward: its activation, and how a fused gate-and-up matrix is laid out.

    `layout`: `separate` (two matrices), `concatenated` ([gate | up]), `interleaved` (g0 u0 g1 u1), `plain` (no gate).
    """

    __pydantic_config__ = STRICT
    module: str
    activation: str | None = None
    layout: Literal["separate", "concatenated", "interleaved", "plain"] | None = None
    evidence: Evidence = "unknown"


@dataclass(frozen=True, kw_only=True, slots=True)
class Norm:
    """A norm of the model: `modules` are the alike places inside a layer (or outside, where they start with no dot)."""

    __pydantic_config__ = STRICT
    kind: str
    eps: float | None = None
    weight_offset: float = 0.0
    modules: tuple[str, ...] = ()
    evidence: Evidence = "unknown"


@dataclass(frozen=True, kw_only=True, slots=True)
class Tower:
    """A part beside the text decoder. `feeds_into`: how its output reaches the text (ids it replaces, cross-attention)."""

    __pydantic_config__ = STRICT
    name: str
    kind: str
    parameters: int
    feeds_into: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Structure:
    """`visible_tokens`: how many keys a query far from the start really sees, by layer kind (0: all), itself included."""

    __pydantic_config__ = STRICT
    routing: tuple[Routing, ...] = ()
    positions: tuple[Positions, ...] = ()
    feed_forwards: tuple[FeedForward, ...] = ()
    norms: tuple[Norm, ...] = ()
    towers: tuple[Tower, ...] = ()
    visible_tokens: dict[str, int] | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class QuantizationGroup:
    """Parameters that a release stores alike. `scheme` uses the names of the presets (`fp8-block`, `mxfp4`, `nvfp4`,
    `int4-g32`, `w8a8`, `fp8`, ...) or `none` for what stays in the model's dtype.

    `block`: rows and columns that share a scale, 0 where the scale spans the whole dimension. `parameters` and `num_bytes`
    (scales included) of this group in the release, None where no parameter list could be had. The figures after them price
    any part of a parameter exactly (`storage`), and are those of `core.storage.Storage`.
    """

    __pydantic_config__ = STRICT
    name: str
    scheme: str
    weight_bits: float
    block: tuple[int, ...] = ()
    scale_dtype: str | None = None
    activations: str | None = None
    targets: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    parameters: int | None = None
    num_bytes: int | None = None
    word_columns: int = 1
    zero_bits: int = 0
    column_bytes: int = 0
    matrix_bytes: int = 0

    @property
    def storage(self) -> Storage | None:
        """How one of its matrices is stored; None where it stays in the model's dtype or the scheme is not known."""
        if not self.weight_bits:
            return None
        return Storage(
            scheme=self.scheme, bits=int(self.weight_bits), block=self.block, scale_dtype=self.scale_dtype,
            activations=self.activations, word_columns=self.word_columns, zero_bits=self.zero_bits,
            column_bytes=self.column_bytes, matrix_bytes=self.matrix_bytes,
        )  # fmt: skip
