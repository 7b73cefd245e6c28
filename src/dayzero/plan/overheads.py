"""What a rank's memory holds beside weights and cache: activations at the largest admitted step, communication buffers,
the runtime, loader staging and a reserve. Every line carries its formula filled with numbers.

Fixed figures and how parts combine to a peak are the engine's (`plan.engines`). What an engine keeps outside its memory
fraction is charged as far as it exceeds the rest of the card. Deliberately not done: time.
"""

from dayzero.core.model import Dimensions, ModelDescription
from dayzero.core.plan import Layout, LedgerLine
from dayzero.core.units import DTYPE_BITS, MIB
from dayzero.plan.engines import ActivationModel, Engine, Reserves
from dayzero.plan.options import Request
from dayzero.plan.weights import Weights

HELD = "indexer keys"  # gathered once and never given back
# Attention visits keys in tiles; a latent cache is expanded to heads a chunk of the context at a time.
SCORE_TILE_TOKENS = 512
LATENT_CHUNK_TOKENS = 8192
# Tokens are not routed evenly: the fullest expert rank was taken to receive twice its share.
ROUTING_IMBALANCE = 2


def step_tokens(request: Request, layout: Layout, rule: ActivationModel | None = None) -> int:
    """Tokens of the largest step of one replica: one prefill chunk, beside every other sequence's decode token unless the
    engine's chunk bounds both."""
    others = request.sequences(layout.dp) - 1
    return (
        max(request.chunk_tokens, others + 1) if rule is not None and rule.decode_is_batched else request.chunk_tokens + others
    )


def activation_lines(
    model: ModelDescription,
    expert_inner: int,
    request: Request,
    layout: Layout,
    stage: int,
    rule: ActivationModel | None = None,
) -> list[LedgerLine]:
    """The activation peak of one rank of a stage. `expert_inner` is `expert_width` of the model, which takes a while."""
    rule = rule or ActivationModel()
    lines = _parts(model, expert_inner, request, layout, stage, rule)
    if rule.combine == "sum":
        return lines
    # Parts follow each other: the largest counts, beside the residual stream that lasts through all of them. Sampling comes
    # when those are gone.
    kept = [line for line in lines if line.name == HELD]
    stream, *parts = [line for line in lines if line.name != HELD]
    trunk = [line for line in parts if line.name != "logits"]
    largest = max(trunk, key=lambda line: line.num_bytes)
    logits = next((line for line in parts if line.name == "logits"), None)
    if logits is not None and logits.num_bytes > stream.num_bytes + largest.num_bytes:
        return [logits, *kept]
    return [stream, largest, *kept]


def _parts(
    model: ModelDescription, expert_inner: int, request: Request, layout: Layout, stage: int, rule: ActivationModel
) -> list[LedgerLine]:
    dims, size = model.dimensions, DTYPE_BITS[request.compute_dtype] // 8
    tokens = step_tokens(request, layout, rule)
    heads = -(-(dims.num_attention_heads or 1) // layout.tp)
    width = head_width(dims)
    # Under SP each rank of the TP group keeps its share of the stream between products.
    rows = -(-tokens // layout.tp) if layout.sp else tokens
    dealt = f"{tokens} / tp {layout.tp} = {rows}" if layout.sp else f"{rows}"
    lines = [
        _line("activations", "hidden states", 4 * rows * dims.hidden_size * size,
              f"4 x {dealt} tokens x {dims.hidden_size} hidden x {size} B"),
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
    lines += _feed_forward_lines(model, expert_inner, layout, tokens, size, rule)
    ratios = [spec.tokens_per_entry for kind in model.layer_kinds for spec in kind.cache
              if spec.kind == "indexer" and spec.elements_per_token]  # fmt: skip
    if ratios and rule.indexer_contexts:
        rows = rule.indexer_contexts * -(-request.context_tokens // min(ratios))
        lines.append(_line("activations", HELD, rows * rule.indexer_row_bytes,
                           f"{rule.indexer_contexts} x {request.context_tokens} context tokens / {min(ratios)} an entry x "
                           f"{rule.indexer_row_bytes} B, held for good"))  # fmt: skip
        lines.append(_line("activations", "indexer scores", rule.indexer_score_bytes, "the engine's bound"))
    if stage == layout.pp - 1 and rule.logits == "sampled":
        rows = request.sequences(layout.dp)
        lines.append(_line("activations", "logits", rows * dims.vocab_size * rule.sampler_bytes,
                           f"{rows} sequences x {dims.vocab_size} vocabulary x {rule.sampler_bytes} B"))  # fmt: skip
    elif stage == layout.pp - 1:
        # Prompt log-probabilities want every row, in the model's dtype and in float32 at once.
        lines.append(_line("activations", "logits", tokens * dims.vocab_size * (size + 4),
                           f"{tokens} rows x {dims.vocab_size} vocabulary x ({size} + 4) B"))  # fmt: skip
    return lines


def _feed_forward_lines(
    model: ModelDescription, expert_inner: int, layout: Layout, tokens: int, size: int, rule: ActivationModel
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
            local = min(dims.num_experts, len(layout.expert_places(dims.num_experts, 0)))
            rows = min(group * min(chosen, local), -(-group * chosen * ROUTING_IMBALANCE // layout.ep))
            text = f"{group} tokens of {layout.dp} replicas x {chosen} experts x imbalance {ROUTING_IMBALANCE} / ep {layout.ep}"
        inner = -(-expert_inner // layout.expert_tp)
        if rule.dispatch == "fused":
            wide = max(2 * inner, dims.hidden_size)
            lines.append(_line("activations", "expert dispatch", rows * (inner + wide) * size,
                               f"{text} = {rows} rows x ({inner} + {wide}) x {size} B"))  # fmt: skip
            return lines
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


def communication_lines(
    model: ModelDescription, request: Request, layout: Layout, reserves: Reserves, rule: ActivationModel | None = None
) -> list[LedgerLine]:
    """Buffers of the collectives; none on a single rank."""
    if layout.num_devices == 1:
        return []
    base = reserves.communication_bytes_2 if layout.num_devices == 2 else reserves.communication_bytes
    lines = [_line("communication", "collective library", base, f"{base // MIB} MiB for {layout.num_devices} ranks")]
    size, tokens = DTYPE_BITS[request.compute_dtype] // 8, step_tokens(request, layout, rule)
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
    graphs = [
        _line(
            "graph", "recorded graphs", reserves.graph_bytes, f"{reserves.graph_bytes // MIB} MiB, the engine's default sizes"
        )
    ]
    return (graphs if reserves.graph_bytes else []) + [
        _line("runtime", "context and libraries", reserves.runtime_bytes, f"{reserves.runtime_bytes // MIB} MiB fixed"),
        _line("loader", "staging beyond activations", staging,
              f"max(0, largest tensor ({role}) {largest} B - activations {activation_bytes} B)"),
        _line("reserve", "fragmentation", reserve, f"{reserves.reserve_share:.0%} of the budget {budget_bytes} B"),
    ]  # fmt: skip


def outside_fraction(lines: list[LedgerLine], engine: Engine, budget_bytes: int, rank_bytes: int) -> list[LedgerLine]:
    """The lines as charged to the budget: categories that the engine keeps outside its memory fraction count together as far
    as they exceed what the fraction leaves of the rank's memory."""
    apart = [line for line in lines if line.category in engine.memory.outside]
    if not apart:
        return lines
    rest, total = rank_bytes - budget_bytes, sum(line.num_bytes for line in apart)
    beyond = max(0, total - rest)
    names = ", ".join(f"{line.name} {line.num_bytes} B" for line in apart)
    charged = _line(apart[0].category, "beyond the fraction", beyond,
                    f"max(0, {total} B outside the memory fraction ({names}) - {rest} B that it leaves)")  # fmt: skip
    return [line for line in lines if line.category not in engine.memory.outside] + [charged]


def _line(category: str, name: str, num_bytes: int, formula: str) -> LedgerLine:
    return LedgerLine(category=category, name=name, num_bytes=num_bytes, formula=formula)
