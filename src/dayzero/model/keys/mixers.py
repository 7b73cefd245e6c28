"""The keys of one layer in, its attention out: parameters by role and the cache it keeps. Softmax attention of every form.

Cache rows are named and shaped as the model's own cache holds them: keys and values per head, or the latent row and its
rotated part, then the indexer's keys.
"""

from collections import Counter
from dataclasses import dataclass

from dayzero.core.model import CacheKind, CacheSpec, MixerKind
from dayzero.model.keys.reader import Reader

Sizes = Counter[str]  # by `core.model.Role`


@dataclass(frozen=True, kw_only=True, slots=True)
class Mixer:
    kind: MixerKind
    sizes: Sizes
    cache: tuple[CacheSpec, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Heads:
    queries: int
    key_values: int
    key_dim: int
    value_dim: int


def heads_of(keys: Reader, word: str) -> Heads:
    """Heads of ordinary attention. Windowed and unwindowed layers may each have numbers of their own."""
    hidden = keys.required("hidden")
    queries = keys.required("heads")
    block = _block_attention(keys)
    group = block.get("n_heads_in_group") if block else None
    kv_heads = queries // group if isinstance(group, int) and group > 0 else keys.size("kv_heads") or queries
    if keys.flag("one_kv_head"):
        kv_heads = 1
    own_dim = keys.size("head_dim")
    key_dim, value_dim = own_dim or hidden // queries, keys.size("value_dim")
    if word in ("sliding", "chunked"):
        queries, kv_heads = keys.size("sliding_heads") or queries, keys.size("sliding_kv_heads") or kv_heads
        key_dim, value_dim = keys.size("sliding_head_dim") or key_dim, keys.size("sliding_value_dim") or value_dim
    else:
        kv_heads, key_dim = keys.size("global_kv_heads") or kv_heads, keys.size("global_head_dim") or key_dim
    if key_dim < 1:
        raise keys.wrong("head_dim", f"absent, and {hidden} / {queries} is less than 1", "an explicit head_dim")
    if not own_dim and hidden % queries:
        keys.account.note(
            f"the width of a head: head_dim is absent and {hidden} / {queries} is not whole; {key_dim} is assumed"
        )
    if queries % kv_heads:
        raise keys.wrong(
            keys.spelled("kv_heads") or "num_key_value_heads", f"{kv_heads}, with {queries} query heads", "a divisor of them"
        )
    return Heads(queries=queries, key_values=kv_heads, key_dim=key_dim, value_dim=value_dim or key_dim)


def attention(keys: Reader, word: str, dtype: str) -> Mixer:
    """`word` of the layer pattern: full, sliding, chunked, indexed."""
    if keys.count("kv_rank"):
        return _latent(keys, word, dtype)
    hidden, heads = keys.required("hidden"), heads_of(keys, word)
    query, key = heads.queries * heads.key_dim, heads.key_values * heads.key_dim
    value, out = heads.key_values * heads.value_dim, heads.queries * heads.value_dim
    reuse = word not in ("sliding", "chunked") and keys.flag("keys_are_values")
    sizes: Sizes = Counter(attention=hidden * (query + key + (0 if reuse else value) + out))
    sizes["attention"] += _gate(keys, hidden, heads.queries, heads.value_dim)
    if keys.flag("attention_bias"):
        sizes["attention"] += query + key + value + hidden
    elif keys.flag("qkv_bias"):
        sizes["attention"] += query + key + value
    if keys.flag("query_key_norm"):
        whole = keys.word("query_key_norm_type") == "per_layer"
        sizes["norm"] += query + key if whole else 2 * heads.key_dim
    if keys.flag("sliding_sinks" if word == "sliding" else "full_sinks"):
        sizes["attention_sink"] += heads.queries
    kind, window = windowed(keys, word)
    cache = tuple(
        CacheSpec(kind=kind, name=name, dtype=dtype, elements_per_token=width, window_tokens=window, heads=heads.key_values)
        for name, width in (("keys", key), ("values", value))
    )
    if word == "indexed":
        added, row = indexer(keys, dtype, source=hidden, on_heads=True)
        return Mixer(kind="full", sizes=sizes + added, cache=(*cache, row))
    return Mixer(kind=kind, sizes=sizes, cache=cache)  # type: ignore[arg-type]


def _latent(keys: Reader, word: str, dtype: str) -> Mixer:
    """Multi-head latent attention: one compressed row for all heads, and its rotated part."""
    hidden, heads, rank = keys.required("hidden"), keys.required("heads"), keys.count("kv_rank")
    rope, nope = rotated_and_not(keys)
    value = keys.size("value_dim") or nope
    query_rank, queries = keys.count("q_rank"), heads * (rope + nope)
    sizes: Sizes = Counter()
    if query_rank:
        sizes["attention"] += hidden * query_rank + query_rank * queries
        sizes["norm"] += query_rank
    else:
        sizes["attention"] += hidden * queries
    sizes["attention"] += hidden * (rank + rope) + rank * heads * (nope + value) + heads * value * hidden
    sizes["attention"] += _gate(keys, hidden, heads, value)
    sizes["norm"] += rank
    if keys.flag("attention_bias"):
        sizes["attention"] += query_rank + rank + rope + hidden
    windowed_kind, window = windowed(keys, word)
    kind: CacheKind = "latent" if windowed_kind == "full" else windowed_kind
    rows = (("keys", rank), ("values", rope)) if rope else (("keys", rank),)
    cache = tuple(
        CacheSpec(
            kind=kind, name=name, dtype=dtype, elements_per_token=width, window_tokens=window, heads=int(kind != "latent")
        )
        for name, width in rows
    )
    if word != "indexed":
        return Mixer(kind="latent" if kind == "latent" else kind, sizes=sizes, cache=cache)  # type: ignore[arg-type]
    added, row = indexer(keys, dtype, source=query_rank or hidden, on_heads=False)
    return Mixer(kind="sparse_latent", sizes=sizes + added, cache=(*cache, row))


def rotated_and_not(keys: Reader) -> tuple[int, int]:
    """(rotated, unrotated) dimensions of a query head of latent attention: two of three keys decide."""
    rope, nope, both = keys.count("rope_dim"), keys.count("nope_dim"), keys.size("qk_dim")
    bits = keys.integers("rotary_bits")
    unrotated = bits is not None and keys.layer is not None and keys.layer < len(bits) and not bits[keys.layer]
    if not nope:
        nope = both - rope if both else keys.size("head_dim") or keys.size("value_dim") or 0
        keys.account.note(f"the unrotated width of a latent head: {nope} is assumed")
    if not keys.has("rope_dim") and both:
        rope = both - nope
    if rope < 0 or nope <= 0:
        got = f"qk_head_dim {both}, unrotated {nope}"
        raise keys.wrong("qk_rope_head_dim", got, "rotated and unrotated dimensions that sum to qk_head_dim")
    return (0, rope + nope) if unrotated else (rope, nope)


def indexer(keys: Reader, dtype: str, *, source: int, on_heads: bool) -> tuple[Sizes, CacheSpec]:
    """The small scorer that picks tokens. On latent attention its queries come from the latent query (`source` wide)."""
    hidden, nested = keys.required("hidden"), keys.nested("sparse_nested")
    where = nested if nested is not None and nested.has("index_heads") else keys
    heads, width = where.size("index_heads"), where.size("index_dim")
    if not heads or not width:
        keys.account.note("sizes of the indexer of its sparse layers: it is counted as nothing")
        return Counter(), CacheSpec(kind="indexer", name="indexer_keys", dtype=dtype)
    if on_heads:
        sizes: Sizes = Counter(indexer=hidden * heads * width + hidden * width + 2 * width)
        return sizes, CacheSpec(kind="indexer", name="idx_keys", dtype=dtype, elements_per_token=width, heads=1)
    sizes = Counter(indexer=source * heads * width + hidden * width + 2 * width + hidden * heads)
    pool, row = keys.size("index_pool"), width
    if pool:  # pooled keys need the keys, their gates and a count
        sizes["indexer"] += pool * width + hidden * width
        row = 2 * width + 1
    return sizes, CacheSpec(kind="indexer", name="indexer_keys", dtype=dtype, elements_per_token=row)


def windowed(keys: Reader, word: str) -> tuple[CacheKind, int | None]:
    window = keys.count("window") if word == "sliding" else keys.size("chunk") if word == "chunked" else None
    if not window:
        if word in ("sliding", "chunked"):
            keys.account.note(f"how many tokens a {word} layer keeps: no key says, all are assumed")
        return "full", None
    return ("sliding" if word == "sliding" else "chunked"), window


def _gate(keys: Reader, hidden: int, heads: int, value_dim: int) -> int:
    """A gate on the attention output has one number per element, or one per head."""
    if keys.flag("output_gate"):
        return hidden * heads * value_dim
    given = keys.raw("head_gate")
    if not keys.has("output_gate") and given is None:
        keys.account.note("whether attention output is gated: no key says so, no gate is counted")
    if isinstance(given, str):
        return hidden * heads * (value_dim if "elem" in given else 1)
    return hidden * heads if given is True else 0


def _block_attention(keys: Reader) -> dict[str, object] | None:
    blocks = keys.items("block_configs", kind=dict)
    if not blocks or keys.layer is None or keys.layer >= len(blocks):
        return None
    found = blocks[keys.layer].get("attention")
    return found if isinstance(found, dict) else None
