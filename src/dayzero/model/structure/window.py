"""Which keys the queries of a small instance saw in, how many a query of the full-size model sees out.

A window of W means W keys with the query's own to some code and W + 1 to other code: the count on the small instance says
which it is, and the full-size window is counted the same way. Layers whose attention does not go through transformers'
interface, or does not attend over tokens, are left out and named in the notes.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from dayzero.core.model import LayerKind
from dayzero.model.structure.places import Places
from dayzero.model.structure.watch import Watched, attention_in

LIMIT_WORDS = r"^(?!.*(expert|moe|max_window_layers)).*(window|chunk|local_attention|index_?topk|budget)"


def read_visible(places: Places, watched: Watched, kinds: Sequence[LayerKind]) -> tuple[dict[str, int], list[str]]:
    """Visible keys by layer kind (0: all, nothing limits them), and what could not be said."""
    found: dict[str, int] = {}
    notes: list[str] = []
    for kind in kinds:
        prefix = places.prefix(kind)
        calls = attention_in(watched, prefix) if prefix else []
        if not calls or calls[0].seen is None:
            if kind.mixer not in ("linear", "ssm", "none"):
                notes.append(f"how far {kind.name} sees is not measured: its attention was not seen")
            continue
        seen = calls[0].seen
        if seen.shape[0] != seen.shape[1]:
            notes.append(f"how far {kind.name} sees is not measured: its {seen.shape[1]} keys are no tokens")
            continue
        count = visible_keys(seen)
        if count == 0:
            found[kind.name] = 0
            continue
        full = places.carried(count, [calls[0].module, *_inside(places, calls[0].module)], LIMIT_WORDS, near=1.0)
        if full is None:
            notes.append(
                f"a query of {kind.name} sees {count} keys in the small instance; what sets it at full size is not known"
            )
        else:
            found[kind.name] = int(full)
    return found, notes


def visible_keys(seen: Tensor) -> int:
    """The most keys that a query in the second half sees, its own included; 0 where each sees all keys before it.

    seen: [queries, keys], of one prompt from its start.
    """
    counts = seen.sum(-1).tolist()
    half = len(counts) // 2
    if all(count == place + 1 for place, count in enumerate(counts)):
        return 0
    return int(max(counts[half:]))


def _inside(places: Places, name: str) -> list[str]:
    return [f"{name}.{inner}" for inner, _ in places.small.get_submodule(name).named_modules() if inner]
