"""What a plan asks of any engine, in the engines' own terms: sequences per replica, tokens per step, what the checkpoint needs.

Goes in: a Plan and its ModelDescription. Comes out: plain values, notes, and a DayZeroError for whatever no engine can be told.
Each engine module asks here first, so that nothing a plan says is dropped by one of them and kept by another.
"""

from collections.abc import Collection
from dataclasses import MISSING, fields

from dayzero.core.errors import DayZeroError
from dayzero.core.model import ModelDescription
from dayzero.core.plan import Layout, Plan, Pool
from dayzero.core.target import Target
from dayzero.core.units import DTYPE_BITS, canonical_dtype, format_bytes
from dayzero.plan.engines import OWN
from dayzero.plan.links import Links

AS_PUBLISHED = "as published"
PLAIN = ("bfloat16", "float16", "float32", "float64")
# Kernels over one compressed row per token take pages of multiples of 64 tokens, others of 16.
LATENT_BLOCK, PLAIN_BLOCK = 64, 16
ROLES = ("mixed", "prefill", "decode")
SAME_RESULTS = "results are the same, activations of a prefill are larger than planned and collectives are all-reduces"
_LAYOUT = ("tp", "pp", "dp", "cp", "cp_in_tp", "ep", "sp", "redundant_experts", "placement", "stages")
_POOL = ("role", "layout", "role_layouts", "prefill", "decode")


def cannot(engine: str, what: str, got: object, fix: str, want: str = "") -> DayZeroError:
    return DayZeroError(
        f"{engine} cannot be told {what}", got=got, want=want or "something this engine has an option for", fix=fix
    )


def require_expressible(plan: Plan, model: ModelDescription, engine: str) -> tuple[Pool, ...]:
    """The plan's pools. Raises DayZeroError for a plan that does not fit and for fields nothing here knows how to hand over."""
    if not plan.feasible:
        raise DayZeroError(
            "an infeasible plan is not exported",
            got=plan.reasons[0] if plan.reasons else "feasible: false",
            want="a plan that fits",
            fix="see the plan's reasons for the smallest change that would fit",
        )
    limit = model.dimensions.max_position_tokens
    if limit is not None and plan.context_tokens > limit:
        raise cannot(
            engine,
            "to serve more positions than the model states",
            f"a context of {plan.context_tokens} tokens",
            f"plan with --context {limit}, or give the release the rotary scaling it needs",
            f"at most {limit}",
        )
    pools = plan.pools or (Pool(role="mixed", layout=plan.layout),)
    roles = [pool.role for pool in pools]
    if roles != ["mixed"] and sorted(roles) != ["decode", "prefill"]:
        raise cannot(engine, "these pools", ", ".join(roles), "plan one mixed pool, or one prefill and one decode pool")
    for pool in pools:
        _require_known(pool, _POOL, engine)
        _require_known(pool.layout, _LAYOUT, engine)
    return pools


def _require_known(record: Layout | Pool, known: Collection[str], engine: str) -> None:
    """A field added to the record later must not be lost here: any other value than its default is refused."""
    for item in fields(record):
        default = item.default
        if default is MISSING:
            default = item.default_factory() if item.default_factory is not MISSING else None
        value = getattr(record, item.name)
        if item.name not in known and value != default:
            raise cannot(engine, f"{type(record).__name__.lower()}.{item.name}", value,
                         f"plan without {item.name}, or teach plan/export what it means")  # fmt: skip


def overrides(pool: Pool) -> dict[str, Layout]:
    """The roles whose layout really differs from the pool's."""
    return {role: layout for role, layout in pool.role_layouts.items() if layout != pool.layout}


def degrees(layout: Layout) -> str:
    """The options that plan just these devices: one degree fixed alone leaves the search layouts that it does not divide."""
    given = (("tp", layout.tp), ("pp", layout.pp), ("dp", layout.dp), ("cp", layout.cp_devices), ("dcp", layout.cp_in_tp))
    return " ".join(f"--{axis} {degree}" for axis, degree in given)


def placement_note(layout: Layout, order: tuple[str, ...], target: Target, notes: list[str]) -> None:
    """Which axis lies on which link is fixed in an engine: `order` is its numbering of ranks, innermost first. Not told
    inside one scale-up domain, where every order lies on the same links."""
    if layout.num_devices <= Links(target).domain:
        return
    planned = [axis for axis in layout.placement if layout.degree(axis) > 1]
    fixed = [axis for axis in order if layout.degree(axis) > 1]
    if planned != fixed:
        notes.append(
            f"ranks lie on neighbouring cards in the order {', '.join(fixed)} (innermost first), which this engine fixes; "
            f"the plan placed them {', '.join(planned)}: a card holds the same, collectives use other links than predicted"
        )


def sequences(plan: Plan, layout: Layout) -> int:
    """Sequences that one replica holds at once."""
    return max(1, -(-plan.concurrency // layout.dp))


def step_tokens(plan: Plan, running: int) -> int:
    """Tokens of the largest step: a chunk beside the other sequences' decode tokens; where the ledger followed an engine whose
    chunk bounds both together, the chunk."""
    if plan.engine == OWN:
        return plan.prefill_chunk_tokens + running - 1
    return max(plan.prefill_chunk_tokens, running)


def prompt_scores_note(plan: Plan, model: ModelDescription, tokens: int) -> str | None:
    """What a request for the log-probabilities of its prompt would take beyond the plan, where the ledger followed an engine
    that keeps room for sampled rows alone: rows of a whole step in the model's dtype and in float32 at once."""
    if plan.engine == OWN:
        return None
    size = DTYPE_BITS[model.dtype] // 8
    needed = format_bytes(tokens * model.dimensions.vocab_size * (size + 4))
    return (f"log-probabilities of prompts are not in the plan: {tokens} rows x {model.dimensions.vocab_size} vocabulary x "
            f"({size} + 4) B = {needed} a card at least; refuse requests for them, or plan a smaller chunk")  # fmt: skip


def has_experts(model: ModelDescription) -> bool:
    return model.dimensions.num_experts > 0


def require_even_places(model: ModelDescription, layout: Layout, engine: str) -> None:
    """Engines with copies of experts give each expert rank as many as the others. Raises DayZeroError otherwise."""
    places = model.dimensions.num_experts + layout.redundant_experts
    if layout.redundant_experts and places % layout.ep:
        up = layout.redundant_experts + -places % layout.ep
        raise cannot(engine, "to give expert ranks different numbers of experts beside copies",
                     f"{model.dimensions.num_experts} + {layout.redundant_experts} on ep={layout.ep}",
                     f"plan with {up} copies", f"a multiple of {layout.ep} in all")  # fmt: skip


def is_latent(model: ModelDescription) -> bool:
    """Whether the growing caches are shared by all heads, so that tensor parallelism does not divide them."""
    caches = [spec for kind in model.layer_kinds for spec in kind.cache]
    growing = [spec for spec in caches if spec.elements_per_token and spec.window_tokens is None]
    return bool(growing) and all(spec.kind in ("latent", "indexer", "compressed") for spec in growing)


def has_windows(model: ModelDescription) -> bool:
    """Whether some caches keep only the last tokens."""
    return any(spec.window_tokens is not None for kind in model.layer_kinds for spec in kind.cache)


def has_states(model: ModelDescription) -> bool:
    """Whether some layers keep a state that does not grow."""
    return any(spec.elements_per_sequence for kind in model.layer_kinds for spec in kind.cache)


def is_sparse(model: ModelDescription) -> bool:
    """Whether an indexer chooses the tokens that a shared cache is read for."""
    return any(kind.mixer == "sparse_latent" for kind in model.layer_kinds)


def block_tokens(plan: Plan, model: ModelDescription, notes: list[str]) -> int | None:
    """Tokens of a cache block; None where the engine's kernels would not take the plan's, with a note."""
    latent = any(spec.kind in ("latent", "compressed") for kind in model.layer_kinds for spec in kind.cache)
    step = LATENT_BLOCK if latent else PLAIN_BLOCK
    if plan.block_tokens % step:
        notes.append(
            f"cache blocks of {plan.block_tokens} tokens are not asked for: kernels for these caches take multiples of {step}, "
            "so the engine chooses; a sequence may hold up to one larger block more than planned"
        )
        return None
    return plan.block_tokens


def stage_sizes(layout: Layout) -> str | None:
    """Layers of each pipeline stage, as both engines read them from the environment; None where there is one stage."""
    return ",".join(str(stop - start) for start, stop in layout.stages) if layout.pp > 1 and layout.stages else None


def cache_dtype(plan: Plan, model: ModelDescription) -> str | None:
    """The canonical dtype of the growing caches; None where it is the model's own, which every engine takes by itself."""
    own = {spec.dtype for kind in model.layer_kinds for spec in kind.cache if spec.elements_per_token}
    try:
        asked = canonical_dtype(plan.cache_dtype)
    except KeyError:
        asked = plan.cache_dtype  # a block format such as nvfp4: the engine's option list decides
    return None if asked in own or (not own and asked == model.dtype) else asked


def static_fraction(plan: Plan) -> float | None:
    """Share of a card for weights and caches alone (what is left is activations and overheads); None without a ledger.

    The fullest rank decides; rounded down to a thousandth, so that rounding never takes memory from the activations.
    """
    shares = []
    for rank in plan.ledger:
        memory = rank.budget_bytes / plan.memory_fraction
        other = rank.total() - rank.total("weights") - rank.total("cache")
        shares.append((rank.budget_bytes - other) / memory)
    return int(min(shares) * 1000) / 1000 if shares else None


def quantize_at_load(plan: Plan, model: ModelDescription, engine: str, names: dict[str, str]) -> tuple[str | None, str | None]:
    """(quantization, dtype) to ask for, None where the checkpoint says it itself. `names`: what this engine can make at load.

    Raises DayZeroError where the weights would have to be re-quantized, or quantized to what the engine cannot make.
    """
    asked = plan.weights_dtype
    if asked == AS_PUBLISHED or (asked == model.dtype and not model.quantization):
        return None, None
    if model.quantization:
        raise cannot(engine, f"to load this quantized release as {asked}", asked,
                     "plan with the release's own weights (no --weights-dtype), or convert the checkpoint first")  # fmt: skip
    if asked in PLAIN:
        return None, asked
    if asked not in names:
        raise cannot(
            engine,
            f"to quantize a {model.dtype} release to {asked} while loading",
            asked,
            "convert the checkpoint first and plan its folder",
            ", ".join(sorted(names)) or "no quantization",
        )
    return names[asked], None


def pool_note(pools: tuple[Pool, ...]) -> str | None:
    if len(pools) == 1:
        return None
    return (
        "prefill and decode are two servers: a router that sends each request to one and then the other is a program of its "
        "own and is not written here; concurrency, chunk and cache figures of the plan are given to both"
    )
