"""How a matrix is stored, in bytes: codes, scales, zero points, padding. Integers in, bytes out.

Goes in: a scheme's figures, a parameter and the part of it that is asked for. Comes out: the matrices that it is stored as
and their bytes, exact, partial blocks and padding included.
Deliberately not done: finding which parameter a release stores how (`model.stored`), reading tensors.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dayzero.core.units import DTYPE_BITS

if TYPE_CHECKING:
    from dayzero.core.model import Parameter

# Endings of the tensors that quantized formats store beside or instead of `<module>.weight` (or a bare parameter).
PACKED = re.compile(r"(?:\.(?:weight_packed|qweight)|_(?:blocks|packed))$")
COMPANION = re.compile(
    r"(?:\.(?:weight|input|output|activation)_(?:scale_inv|scale_2|scale|zero_point|global_scale|shape|g_idx|offset|amax)"
    r"|\.(?:qzeros|scales|g_idx|scale|input_amax|weight_bias)|_(?:scales|scale_inv|scale|zero_point|amax|shape))$"
)
CORRECTION = re.compile(r"(correction|expert|router)_bias$|(^|\.)tid2eid$")
Extent = tuple[int, int]
# Names for parameters that are known by role and size alone, as releases most often call them: settings name modules.
STAND_INS = {
    "embedding": "model.embed_tokens.weight",
    "head": "lm_head.weight",
    "attention": "model.layers.0.self_attn.o_proj.weight",
    "mlp": "model.layers.0.mlp.down_proj.weight",
    "expert": "model.layers.0.mlp.experts.0.down_proj.weight",
    "shared_expert": "model.layers.0.mlp.shared_experts.down_proj.weight",
    "router": "model.layers.0.mlp.gate.weight",
    "indexer": "model.layers.0.self_attn.indexer.wq_b.weight",
    "ssm": "model.layers.0.self_attn.in_proj.weight",
    "convolution": "model.layers.0.self_attn.conv1d.weight",
    "tower": "vision_tower.layers.0.proj.weight",
    "projector": "mm_projector.proj.weight",
    "norm": "model.norm.weight",
    "mtp": "model.layers.0.mlp.experts.0.down_proj.weight",  # most of it, and stored as its neighbours are
}


def stand_in(role: str) -> str:
    return STAND_INS.get(role, f"model.layers.0.{role}.weight")


def name_form(name: str) -> str:
    """A parameter's name with `*` for each number, as `QuantizationGroup.targets` lists them."""
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", name)


@dataclass(frozen=True, kw_only=True, slots=True)
class Storage:
    """How one matrix [rows, columns] (output, input) is stored.

    `block`: rows and columns that share a scale of `scale_dtype`, where 0 spans the whole dimension; `()`: no scales.
    `word_columns`: columns are padded to a multiple of this, what one packed word holds. Beside the codes and scales:
    `zero_bits` a block (zero points), `column_bytes` a column (an order or a smoothing factor), and `matrix_bytes` a matrix
    (global scales, the logical shape, a static input scale).
    """

    scheme: str
    bits: int
    block: tuple[int, ...] = ()
    scale_dtype: str | None = None
    activations: str | None = None
    word_columns: int = 1
    zero_bits: int = 0
    column_bytes: int = 0
    matrix_bytes: int = 0

    def bytes_of(self, rows: int, columns: int) -> int:
        """Bytes of one matrix and everything stored for it. A partial last block has a scale of its own."""
        padded = -(-columns // self.word_columns) * self.word_columns
        total = -(-rows * padded * self.bits // 8)
        if self.block:
            down, across = (-(-size // (step or size)) for size, step in zip((rows, columns), self.block, strict=True))
            total += down * across * DTYPE_BITS[self.scale_dtype or "float32"] // 8
            total += -(-down * across * self.zero_bits // 8)
        return total + columns * self.column_bytes + self.matrix_bytes


def stored_dtype(item: Parameter, dtype: str) -> str:
    """The dtype in which releases keep a parameter that is not quantized, `dtype` being the model's.

    Routers are computed in float32 by many classes and stored in the model's dtype by all releases seen; the correction of
    the choice is float32 in all of them, whatever the class makes of it.
    """
    if item.role == "router" and item.dtype == "float32":
        return dtype
    if CORRECTION.search(item.name) and item.dtype in ("bfloat16", "float16"):
        return "float32"
    return item.dtype


def weight_names(sources: Sequence[str]) -> list[str]:
    """Checkpoint names of the weights themselves: of a quantized release, scales and their like lie among the sources."""
    kept = [name for name in sources if COMPANION.search(name) is None] or list(sources)
    return [PACKED.sub(lambda found: ".weight" if found.group().startswith(".") else "", name) for name in kept]


def is_expert(item: Parameter) -> bool:
    """Whether this belongs to routed experts, those of draft layers included."""
    return item.role == "expert" or (item.role == "mtp" and re.search(r"(^|\.)experts\.", item.name) is not None)


def experts_with_weights(parameters: Iterable[Parameter]) -> int:
    """Experts of a layer that have weights: some classes allocate slots behind them that no release stores. 0: none."""
    return min((item.shape[0] for item in parameters if item.role == "expert" and len(item.shape) == 3), default=0)


def matrices(
    item: Parameter, hidden: int | None, part: Sequence[Extent] | None = None, *, experts: int = 0
) -> list[tuple[int, tuple[int, int]]]:
    """(how many, [rows, columns]) of the matrices that a part of a parameter of two or three dimensions is stored as.

    `part`: a half-open range per dimension, None for all of it. Experts that a class stacks are a matrix each, of those
    `experts` that have weights (0: all). Fused matrices are stored apart, as the checkpoint's names or the class's say.
    """
    extents = list(part) if part is not None else [(0, size) for size in item.shape]
    sources = weight_names(item.sources)
    if len(item.shape) == 2:
        # Rows that the class fuses and the checkpoint does not: only sources of equal size are told apart.
        count = len(sources) if sources and item.shape[0] % len(sources) == 0 else 1
        return _pieces(1, extents[0], extents[1], item.shape[0] // count)
    number = extents[0][1] - extents[0][0]
    if experts and is_expert(item) and len(item.shape) == 3:
        number = max(0, min(extents[0][1], experts) - extents[0][0])
    for start, stop in extents[1:-2]:
        number *= stop - start
    row_dim, column_dim = len(item.shape) - 2, len(item.shape) - 1
    leaf = item.name.rpartition(".")[2]
    into_hidden = re.search(r"down|w2|out", leaf) is not None
    # Some classes stack experts as [experts, input, output]: the side that is the model's width tells which is the input.
    rows, columns = item.shape[row_dim], item.shape[column_dim]
    if hidden is not None and rows != columns and ((rows == hidden) != into_hidden) and (hidden in (rows, columns)):
        row_dim, column_dim = column_dim, row_dim
    starred = sum("*" in name for name in sources)
    fused = starred or (2 if re.search(r"gate_up|up_gate|w13|w1_w3", leaf) else 1)
    rows = item.shape[row_dim]
    return _pieces(number, extents[row_dim], extents[column_dim], rows // fused if rows % fused == 0 else rows)


def _pieces(number: int, rows: Extent, columns: Extent, step: int) -> list[tuple[int, tuple[int, int]]]:
    """`number` times the rows of one extent, cut at every multiple of `step`."""
    start, stop = rows
    width = columns[1] - columns[0]
    counts: dict[int, int] = {}
    while start < stop and number and width:
        end = min(stop, (start // step + 1) * step) if step else stop
        counts[end - start] = counts.get(end - start, 0) + number
        start = end
    return [(count, (height, width)) for height, count in counts.items()]
