"""What a rank's memory holds beside weights and cache: activations at the largest admitted step, communication buffers,
the runtime, loader staging and a reserve. Every line carries its formula filled with numbers.

Lines are added although not all of them peak together; the difference is what a caching allocator keeps. Deliberately
not done: other engines' habits (their figures will be further `Reserves`).
"""

from dataclasses import dataclass

from dayzero.core.model import Dimensions, ModelDescription
from dayzero.core.plan import Layout, LedgerLine
from dayzero.core.target import Target
from dayzero.core.units import DTYPE_BITS, GIB, MIB
from dayzero.plan.options import Request
from dayzero.plan.weights import Weights


@dataclass(frozen=True, kw_only=True, slots=True)
class Reserves:
    """An engine's fixed costs on one kind of device.

    Sources: a GPU context with its libraries was seen at 0.2 to 0.4 GiB beside the allocator, device graphs at 0.3 GiB
    and more; NCCL buffers at 342 MiB for 2 and 392 MiB for more ranks; an interpreter with torch and the model classes
    at about 0.6 GiB of host memory.
    """

    runtime_bytes: int
    communication_bytes_2: int
    communication_bytes: int
    reserve_share: float  # of the budget, for fragmentation and alignment


ACCELERATOR = Reserves(runtime_bytes=GIB, communication_bytes_2=342 * MIB, communication_bytes=392 * MIB, reserve_share=0.02)
HOST = Reserves(runtime_bytes=640 * MIB, communication_bytes_2=32 * MIB, communication_bytes=32 * MIB, reserve_share=0.02)

# Attention visits keys in tiles; a latent cache is expanded to heads a chunk of the context at a time.
SCORE_TILE_TOKENS = 512
LATENT_CHUNK_TOKENS = 8192
# Tokens are not routed evenly: the fullest expert rank was taken to receive twice its share.
ROUTING_IMBALANCE = 2


def reserves_for(target: Target) -> Reserves:
    """Ranks that live in host memory have no device context and small buffers."""
    return HOST if target.node.topology == "shared memory" else ACCELERATOR


def step_tokens(request: Request, layout: Layout) -> int:
    """Tokens of the largest step of one replica: one prefill chunk beside every other sequence's decode token."""
    return request.chunk_tokens + request.sequences(layout.dp) - 1


def activation_lines(
    model: ModelDescription, expert_inner: int, request: Request, layout: Layout, stage: int
) -> list[LedgerLine]:
    """The activation peak of one rank of a stage. `expert_inner` is `expert_width` of the model, which takes a while."""
    dims, size = model.dimensions, DTYPE_BITS[request.compute_dtype] // 8
    tokens = step_tokens(request, layout)
    heads = -(-(dims.num_attention_heads or 1) // layout.tp)
    width = head_width(dims)
    lines = [
        _line("activations", "hidden states", 4 * tokens * dims.hidden_size * size,
              f"4 x {tokens} tokens x {dims.hidden_size} hidden x {size} B"),
        _line("activations", "attention", tokens * heads * width * (3 * size + 4),
              f"{tokens} tokens x {heads} heads x {width} x (q, k, out at {size} B + 4 B accumulator)"),
        _line("activations", "attention workspace", tokens * heads * SCORE_TILE_TOKENS * 4,
              f"{tokens} tokens x {heads} heads x tile of {SCORE_TILE_TOKENS} scores x 4 B"),
    ]  # fmt: skip
    if any(spec.kind == "latent" for kind in model.layer_kinds for spec in kind.cache):
        chunk = min(request.context_tokens, LATENT_CHUNK_TOKENS)
        both = (dims.head_dim or width) + (dims.value_head_dim or dims.head_dim or width)
        lines.append(_line("activations", "latent expansion", chunk * heads * both * size,
                           f"{chunk} context tokens x {heads} heads x {both} (k + v) x {size} B"))  # fmt: skip
    lines += _feed_forward_lines(model, expert_inner, layout, tokens, size)
    if stage == layout.pp - 1:
        # Prompt log-probabilities want every row, in the model's dtype and in float32 at once.
        lines.append(_line("activations", "logits", tokens * dims.vocab_size * (size + 4),
                           f"{tokens} rows x {dims.vocab_size} vocabulary x ({size} + 4) B"))  # fmt: skip
    return lines


def _feed_forward_lines(
    model: ModelDescription, expert_inner: int, layout: Layout, tokens: int, size: int
) -> list[LedgerLine]:
    dims, lines = model.dimensions, []
    if any(kind.feed_forward == "dense" for kind in model.layer_kinds) and dims.intermediate_size:
        inner = -(-dims.intermediate_size // layout.tp)
        lines.append(_line("activations", "feed-forward", 3 * tokens * inner * size,
                           f"3 x {tokens} tokens x {dims.intermediate_size} / tp {layout.tp} x {size} B"))  # fmt: skip
    if dims.num_experts and any(kind.feed_forward == "moe" for kind in model.layer_kinds):
        chosen = dims.num_experts_per_token
        group = layout.dp * tokens  # experts are shared by all replicas of a stage
        rows = group * chosen
        text = f"{group} tokens of {layout.dp} replicas x {chosen} experts"
        if layout.ep > 1:
            local = -(-dims.num_experts // layout.ep)
            rows = min(group * min(chosen, local), -(-group * chosen * ROUTING_IMBALANCE // layout.ep))
            text = f"{group} tokens of {layout.dp} replicas x {chosen} experts x imbalance {ROUTING_IMBALANCE} / ep {layout.ep}"
        inner = -(-expert_inner // layout.expert_tp)
        lines.append(_line("activations", "expert dispatch", rows * (2 * dims.hidden_size + 3 * inner) * size,
                           f"{text} = {rows} rows x (2 x {dims.hidden_size} + 3 x {inner}) x {size} B"))  # fmt: skip
    return lines


def head_width(dims: Dimensions) -> int:
    """The wider of a head's key and value, from what the architecture states."""
    given = max(dims.head_dim or 0, dims.value_head_dim or 0)
    return given or -(-dims.hidden_size // (dims.num_attention_heads or 1))


def expert_width(model: ModelDescription) -> int:
    """One expert's inner size: an expert has three matrices of hidden x inner (gate, up, down), or two."""
    dims = model.dimensions
    layer = next((p.layer for p in model.parameters if p.role == "expert" and p.layer is not None), None)
    if layer is None:
        return dims.intermediate_size or dims.hidden_size
    expert = [p for p in model.parameters if p.role == "expert" and p.layer == layer and len(p.shape) >= 2]
    elements = sum(p.num_elements for p in expert)
    return max(1, round(elements / (3 * dims.hidden_size * max(1, dims.num_experts))))


def communication_lines(model: ModelDescription, request: Request, layout: Layout, reserves: Reserves) -> list[LedgerLine]:
    """Buffers of the collectives; none on a single rank."""
    if layout.num_devices == 1:
        return []
    base = reserves.communication_bytes_2 if layout.num_devices == 2 else reserves.communication_bytes
    lines = [_line("communication", "collective library", base, f"{base // MIB} MiB for {layout.num_devices} ranks")]
    size, tokens = DTYPE_BITS[request.compute_dtype] // 8, step_tokens(request, layout)
    if layout.tp > 1:
        lines.append(_line("communication", "all-reduce buffer", tokens * model.dimensions.hidden_size * size,
                           f"{tokens} tokens x {model.dimensions.hidden_size} hidden x {size} B"))  # fmt: skip
    if layout.pp > 1:
        lines.append(_line("communication", "stage hand-over", 2 * tokens * model.dimensions.hidden_size * size,
                           f"2 x {tokens} tokens x {model.dimensions.hidden_size} hidden x {size} B"))  # fmt: skip
    return lines


def fixed_lines(
    weights: Weights, layout: Layout, stage: int, reserves: Reserves, budget_bytes: int, activation_bytes: int
) -> list[LedgerLine]:
    """Runtime, loader staging and reserve of one rank."""
    place = layout.coordinates(stage * layout.num_devices // layout.pp)
    largest, role = weights.largest_part(layout, place, stage)
    # Staging is given back before the first step, so only what exceeds the activations' peak counts.
    staging = max(0, largest - activation_bytes)
    reserve = int(budget_bytes * reserves.reserve_share)
    return [
        _line("runtime", "context and libraries", reserves.runtime_bytes, f"{reserves.runtime_bytes // MIB} MiB fixed"),
        _line("loader", "staging beyond activations", staging,
              f"max(0, largest tensor ({role}) {largest} B - activations {activation_bytes} B)"),
        _line("reserve", "fragmentation", reserve, f"{reserves.reserve_share:.0%} of the budget {budget_bytes} B"),
    ]  # fmt: skip


def _line(category: str, name: str, num_bytes: int, formula: str) -> LedgerLine:
    return LedgerLine(category=category, name=name, num_bytes=num_bytes, formula=formula)
