"""Sizes of layers in, the large operators of a step out, as a serving engine computes them.

What carries nearly all of a step can be said from sizes alone: each matrix is one product a token, attention is two products
with what the cache holds, a state is updated and read once a token. Norms, positions, routing and everything element by
element are left out, and the graph says so. Decoding reads a latent cache as it is, without expanding it; a token passes the
experts it is routed to and no others; an indexer limits what is attended to.

Two uses: the operators of a model that no class is known for, and beside the operators of a class as it is written (which may
expand its cache at every step, or run all experts) what an engine really has to do: `engine_step`.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from dayzero.core.formulas import evaluate
from dayzero.core.model import Dimensions, LayerKind, ModelDescription, OperatorGraph, OperatorNode, Phase
from dayzero.core.records import STRICT
from dayzero.core.units import DTYPE_BITS

LINEAR_ROLES = ("attention", "mlp", "shared_expert", "router", "ssm", "indexer")
# A state is decayed, corrected by what it already holds (two products), added to and read.
OPERATIONS_A_STATE_ELEMENT = 6
LEFT_OUT = "from keys: matrices, attention, experts and states; norms, positions and element-wise operators are not counted"


def layer_operators(
    kind: LayerKind,
    sizes: Mapping[str, int],
    idle: int,
    dimensions: Dimensions,
    dtype: str,
    *,
    top_k: int | None = None,
) -> OperatorGraph:
    """`sizes`: parameters by role of one such layer; `idle`: those of them that a token does not use; `top_k`: tokens that an
    indexer lets through."""
    item = DTYPE_BITS[dtype] // 8
    phases = {}
    for phase, rows in (("prefill", "B*T"), ("decode", "B")):
        nodes = [_product(role, sizes[role], dimensions.hidden_size, rows, item) for role in LINEAR_ROLES if sizes.get(role)]
        if sizes.get("expert") and dimensions.num_experts:
            nodes.append(_experts(sizes["expert"], idle, dimensions, rows, item))
        nodes += _caches(kind, dimensions, rows, item, top_k)
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


def _caches(kind: LayerKind, dimensions: Dimensions, rows: str, item: int, top_k: int | None) -> list[OperatorNode]:
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
        window = min(filter(None, (window, top_k)), default=None)
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


@dataclass(frozen=True, kw_only=True, slots=True)
class StepCost:
    """One step of one sequence: FLOPs, and bytes of weights (as the release stores them) and of everything else."""

    __pydantic_config__ = STRICT
    flops: float
    weight_bytes: float
    other_bytes: float


def engine_step(model: ModelDescription, *, new_tokens: int, context_tokens: int) -> StepCost | None:
    """What one sequence costs an engine. None where the description lists no parameters by layer.

    Weights are counted at the bytes that the release stores them in: groups of `quantization_groups`, else the model's dtype.
    """
    if not model.parameters:
        return None
    sizes_at = {"B": 1, "T": new_tokens, "C": context_tokens}
    phase: Phase = "decode" if new_tokens == 1 else "prefill"
    stored = {group.name: group.num_bytes / group.parameters for group in model.quantization_groups
              if group.num_bytes and group.parameters}  # fmt: skip
    item = DTYPE_BITS[model.dtype] / 8
    flops = weights = moved = 0.0
    num_experts, chosen = model.dimensions.num_experts, model.dimensions.num_experts_per_token
    read_share = min(1.0, chosen * new_tokens / num_experts) if num_experts else 1.0
    for kind in model.layer_kinds:
        first = kind.layers[0]
        own = [one for one in model.parameters if one.layer == first and not one.is_buffer and one.tied_to is None]
        sizes: dict[str, int] = {}
        for parameter in own:
            sizes[parameter.role] = sizes.get(parameter.role, 0) + parameter.num_elements
        experts = sizes.get("expert", 0)
        idle = round(experts * (1 - chosen / num_experts)) if num_experts else 0
        graph = layer_operators(kind, sizes, idle, model.dimensions, model.dtype, top_k=_chosen_tokens(model, kind))
        held = sum(
            parameter.num_elements * stored.get(parameter.group, item) * (read_share if parameter.role == "expert" else 1.0)
            for parameter in own
        )
        flops += sum(evaluate(node.flops, **sizes_at) for node in graph.of(phase)) * len(kind.layers)
        moved += sum(spec.bytes_for(context_tokens) for spec in kind.cache) * len(kind.layers)
        weights += held * len(kind.layers)
    flops += sum(evaluate(node.flops, **sizes_at) for node in outer_operators(model.dimensions, model.dtype).of(phase))
    weights += model.dimensions.vocab_size * model.dimensions.hidden_size * item
    return StepCost(flops=flops, weight_bytes=weights, other_bytes=moved)


def _chosen_tokens(model: ModelDescription, kind: LayerKind) -> int | None:
    """How many tokens an indexer lets through, where the structure says so."""
    indexed = any(spec.kind == "indexer" for spec in kind.cache)
    return (model.structure.visible_tokens or {}).get(kind.name) or None if indexed else None
