"""What holds between the sizes of a full config, made to hold in the small one. Mappings in, one of them changed.

Each function changes `small` in place and reads `full`; both map field names to values.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dayzero.model.shrink_rules import RECURRENT_HEADS


def distinct_size(full: int, full_base: int, small: int, small_base: int) -> int:
    """`small`, unless it fell together with `small_base` from which it differed: then twice or half of that."""
    if full == full_base or small != small_base:
        return small
    return small_base * 2 if full > full_base else max(1, small_base // 2)


def keep_relations(full: Mapping[str, Any], small: dict[str, Any]) -> None:
    """What holds between sizes in the full config holds in the small one.

    A head is the sum of its rotated and unrotated part, or equal to the rotated part; the heads of a recurrent layer fill
    its inner width.
    """
    for heads, head in RECURRENT_HEADS:
        sizes = (full.get(heads), full.get(head), small.get(heads), small.get(head))
        if all(isinstance(size, int) for size in sizes) and full[heads] * full[head] == _inner_width(full):
            small[heads] = _inner_width(small) // small[head]
    for name in ("head_dim", "qk_head_dim", "swa_head_dim"):
        for prefix in ("swa_", ""):
            nope, rope = f"{prefix}qk_nope_head_dim", f"{prefix}qk_rope_head_dim"
            if name in small and nope in full and rope in full:
                if full[name] == full[nope] + full[rope]:
                    small[name] = small[nope] + small[rope]
                elif full[name] == full[rope]:
                    small[name] = small[rope]


def keep_rotated_fraction(full: Mapping[str, Any], small: dict[str, Any], small_values: Mapping[str, Any]) -> None:
    """Set the rotated fraction of a head in `small` where, in full, it gives the declared rotated size."""
    before, after = ((v.get("qk_rope_head_dim") or v.get("rotary_dim"), v.get("head_dim")) for v in (full, small_values))
    if before[0] is None or before[1] is None or not after[0] or not after[1]:
        return
    pairs = zip(
        [full, *_rope_dicts(full.get("rope_parameters"))], [small, *_rope_dicts(small.get("rope_parameters"))], strict=False
    )
    for old, new in pairs:
        fraction = old.get("partial_rotary_factor")
        if fraction and round(fraction * before[1]) == before[0] and "partial_rotary_factor" in new:
            new["partial_rotary_factor"] = after[0] / after[1]


def _inner_width(values: Mapping[str, Any]) -> int:
    expand = values.get("mamba_expand") or values.get("expand") or 0
    return values.get("mamba_d_ssm") or int(expand * (values.get("hidden_size") or 0))


def scale_rotary_lists(full: Mapping[str, Any], small: dict[str, Any]) -> None:
    """Lists with one entry per rotated pair of a head, or that sum up to it, shrink with the head."""
    old, new = (values.get("head_dim") or _width_per_head(values) for values in (full, small))
    if not old or not new or old == new:
        return
    for rope in _rope_dicts(small.get("rope_parameters")) + _rope_dicts(small.get("rope_scaling")):
        for name in ("short_factor", "long_factor"):
            if isinstance(rope.get(name), list):
                length = max(1, len(rope[name]) * new // old)
                rope[name] = [rope[name][place * len(rope[name]) // length] for place in range(length)]
        sections = rope.get("mrope_section")
        if sections:
            total = max(len(sections), sum(sections) * new // old)
            scaled = [max(1, section * total // sum(sections)) for section in sections]
            scaled[0] += total - sum(scaled)
            rope["mrope_section"] = scaled


def _width_per_head(values: Mapping[str, Any]) -> int | None:
    hidden, heads = values.get("hidden_size"), values.get("num_attention_heads")
    return hidden // heads if isinstance(hidden, int) and isinstance(heads, int) and heads else None


def _rope_dicts(rope: Any) -> list[dict]:
    if not isinstance(rope, dict):
        return []
    return [rope, *(inner for inner in rope.values() if isinstance(inner, dict))]
