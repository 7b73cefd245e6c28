"""Sizes of one layer from keys in, its large operators out, where no class is there to be followed.

What carries nearly all of a step can be said from sizes alone: each matrix is one product a token, attention is two products
with what the cache holds, a state is updated and read once a token. Norms, positions, routing and everything element by
element are left out, and the graph says so. Decoding reads a latent cache as an engine does, without expanding it.
"""

from collections.abc import Mapping

from dayzero.core.model import Dimensions, LayerKind, OperatorGraph, OperatorNode
from dayzero.core.units import DTYPE_BITS

LINEAR_ROLES = ("attention", "mlp", "shared_expert", "router", "ssm", "indexer")
# A state is decayed, corrected by what it already holds (two products), added to and read.
OPERATIONS_A_STATE_ELEMENT = 6
LEFT_OUT = "from keys: matrices, attention, experts and states; norms, positions and element-wise operators are not counted"


def layer_operators(
    kind: LayerKind, sizes: Mapping[str, int], idle: int, dimensions: Dimensions, dtype: str
) -> OperatorGraph:
    """`sizes`: parameters by role of one such layer; `idle`: those of them that a token does not use."""
    item = DTYPE_BITS[dtype] // 8
    phases = {}
    for phase, rows in (("prefill", "B*T"), ("decode", "B")):
        nodes = [
            _product(role, sizes[role], dimensions.hidden_size, rows, item) for role in LINEAR_ROLES if sizes.get(role)
        ]
        if sizes.get("expert") and dimensions.num_experts:
            nodes.append(_experts(sizes["expert"], idle, dimensions, rows, item))
        nodes += _caches(kind, dimensions, rows, item)
        phases[phase] = tuple(nodes)
    return OperatorGraph(prefill=phases["prefill"], decode=phases["decode"], notes=(LEFT_OUT,))


def outer_operators(dimensions: Dimensions, dtype: str) -> OperatorGraph:
    item, size = DTYPE_BITS[dtype] // 8, dimensions.vocab_size * dimensions.hidden_size
    phases = []
    for rows in ("B*T", "B"):
        looked_up = f"{2 * dimensions.hidden_size * item}*{rows}"
        phases.append((
            OperatorNode(name="embedding", kind="embedding", count=1, bytes=looked_up),
            _product("head", size, dimensions.hidden_size, rows, item),
        ))  # fmt: skip
    return OperatorGraph(prefill=phases[0], decode=phases[1], notes=(LEFT_OUT,))


def _product(role: str, elements: int, hidden: int, rows: str, item: int) -> OperatorNode:
    """All matrices of a role as one: read once, and rows of about the hidden width in and out."""
    moved = f"{elements * item} + {2 * hidden * item}*{rows}"
    return OperatorNode(name=role, kind="linear", count=1, flops=f"{2 * elements}*{rows}", bytes=moved)


def _experts(elements: int, idle: int, dimensions: Dimensions, rows: str, item: int) -> OperatorNode:
    one, chosen = elements // dimensions.num_experts, dimensions.num_experts_per_token
    read = f"{one * item}*min({chosen}*{rows}, {dimensions.num_experts})"
    return OperatorNode(
        name="experts", kind="experts", count=1, flops=f"{2 * (elements - idle)}*{rows}",
        bytes=f"{read} + {2 * dimensions.hidden_size * item}*{rows}",
    )  # fmt: skip


def _caches(kind: LayerKind, dimensions: Dimensions, rows: str, item: int) -> list[OperatorNode]:
    growing = [spec for spec in kind.cache if spec.elements_per_token and spec.kind != "indexer"]
    states = sum(spec.elements_per_sequence for spec in kind.cache if spec.kind == "state")
    nodes = []
    if growing:
        heads = dimensions.num_attention_heads or 1
        latent = any(spec.kind == "latent" for spec in growing)
        # A latent cache is read as it is: keys of the latent row and its rotated part, values of the latent row again.
        width = sum(spec.elements_per_token for spec in growing)
        pair = width + growing[0].elements_per_token if latent else (dimensions.head_dim or 0) + (
            dimensions.value_head_dim or dimensions.head_dim or 0
        )  # fmt: skip
        window = min((spec.window_tokens for spec in growing if spec.window_tokens is not None), default=None)
        kept = "C" if window is None else f"min(C, {window})"
        nodes.append(OperatorNode(
            name="attention", kind="attention", count=1, flops=f"{2 * heads * pair}*{rows}*{kept}",
            bytes=f"{width * item}*B*{kept} + {heads * pair * item}*{rows}",
        ))  # fmt: skip
    if states:
        nodes.append(OperatorNode(
            name="state", kind="linear_attention" if kind.mixer == "linear" else "state_space_scan", count=1,
            flops=f"{OPERATIONS_A_STATE_ELEMENT * states}*{rows}", bytes=f"{2 * states * 4}*B",
        ))  # fmt: skip
    return nodes
