"""The keys of one layer in, compressed attention out: a window of recent tokens, and older ones several to an entry.

Two forms. Heavy: one entry for many tokens, all entries attended. Light: entries of few tokens that overlap, of which an
indexer, with compressed keys of its own, chooses some. Both have one key/value row shared by all heads and a grouped,
low-rank output projection.
"""

from collections import Counter
from collections.abc import Mapping

from dayzero.core.model import CacheKind, CacheSpec
from dayzero.model.keys.mixers import Mixer, Sizes, windowed
from dayzero.model.keys.reader import Reader


def uses_shared_row(keys: Reader) -> bool:
    """Whether attention is of this family: a low-rank grouped output is what only it has."""
    return keys.has("output_rank") and keys.has("output_groups")


def compressed_attention(keys: Reader, word: str, dtype: str) -> Mixer:
    """`word`: light, heavy, or sliding for a layer that keeps its window alone."""
    hidden, heads, width = keys.required("hidden"), keys.required("heads"), keys.required("head_dim")
    query_rank, rank, groups = keys.count("q_rank"), keys.size("output_rank"), keys.size("output_groups")
    queries = heads * width
    sizes: Sizes = Counter(attention=hidden * width, norm=width, attention_sink=heads)
    if query_rank:
        sizes["attention"] += query_rank * (hidden + queries)
        sizes["norm"] += query_rank
    else:
        sizes["attention"] += hidden * queries
    sizes["attention"] += (queries + groups * hidden) * rank if rank and groups else queries * hidden
    kind, window = windowed(keys, "sliding")
    # One row, which is both the keys and the values.
    rows: list[CacheSpec] = [CacheSpec(kind=kind, name="keys", dtype=dtype, elements_per_token=width, window_tokens=window)]
    if word == "sliding":
        return Mixer(kind="sliding", sizes=sizes, cache=tuple(rows))
    ratio, overlap = _ratio(keys, word), 2 if word == "light" else 1
    if _keeps(keys, "compress_layers"):
        sizes["attention"] += (2 * hidden + ratio) * overlap * width
        sizes["norm"] += width
        rows += _entries("compressed", "compressor", width, ratio, overlap, dtype)
    index_heads, index_width = keys.size("index_heads"), keys.size("index_dim")
    if word == "light" and index_heads and index_width and _keeps(keys, "index_layers"):
        sizes["indexer"] += (2 * hidden + ratio) * overlap * index_width + index_width
        sizes["indexer"] += (query_rank or hidden) * index_heads * index_width + hidden * index_heads
        rows += _entries("indexer", "indexer", index_width, ratio, overlap, dtype)
    return Mixer(kind="compressed", sizes=sizes, cache=tuple(rows))


def _entries(kind: CacheKind, owner: str, width: int, ratio: int, overlap: int, dtype: str) -> list[CacheSpec]:
    """Finished entries, tokens that wait for theirs to be full and, where entries overlap, the last one again."""
    rows = [CacheSpec(kind=kind, name=f"compressed_kv.{owner}", dtype=dtype, elements_per_token=width, tokens_per_entry=ratio)]
    waiting = (ratio - 1) * overlap * width
    for name, elements, row_dtype in (
        ("buffer_kv", waiting, dtype),
        ("buffer_gate", waiting, dtype),
        ("overlap_kv", ratio * width if overlap > 1 else 0, dtype),
        ("overlap_gate", ratio * width if overlap > 1 else 0, "float32"),
    ):
        if elements:
            rows.append(CacheSpec(kind=kind, name=f"{name}.{owner}", dtype=row_dtype, elements_per_sequence=elements))
    return rows


def _ratio(keys: Reader, word: str) -> int:
    """Tokens per entry: the layer's own number, or that of its kind."""
    ratios, layer = keys.integers("compress_ratios"), keys.layer
    if ratios is not None and layer is not None and layer < len(ratios) and ratios[layer] > 0:
        return ratios[layer]
    rates = keys.raw("compress_rates")
    for name, rate in rates.items() if isinstance(rates, Mapping) else ():
        if ("heavily" in name) == (word == "heavy") and isinstance(rate, int) and rate > 0:
            return rate
    assumed = 128 if word == "heavy" else 4
    keys.account.note(f"how many tokens an entry of its {word} compressed layers holds: {assumed} is assumed")
    return assumed


def _keeps(keys: Reader, name: str) -> bool:
    """Where a list names the layers that make entries, the others read theirs."""
    layers = keys.integers(name)
    if layers is None:
        return True
    keys.account.note(f"what layers outside {keys.spelled(name)} read: they are counted as keeping nothing of the kind")
    return keys.layer in layers
