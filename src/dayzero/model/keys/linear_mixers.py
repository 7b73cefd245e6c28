"""The keys of one layer in, a mixer with a constant state out: linear attention in three forms, state-space layers in two.

Which form is told by which sizes are given: key and value heads (gated delta rule), heads of one kind (with a decay per
channel), none at all (decays fixed by the head's number); heads of a state-space layer or none.
"""

from collections import Counter
from math import ceil

from dayzero.core.model import CacheSpec
from dayzero.core.units import canonical_dtype
from dayzero.model.keys.mixers import Mixer, Sizes
from dayzero.model.keys.reader import Reader


def linear_attention(keys: Reader, dtype: str) -> Mixer:
    if keys.has("value_heads") or keys.has("key_heads"):
        return _gated_delta(keys, dtype)
    nested = keys.nested("linear_nested")
    if keys.has("linear_heads") or keys.has("linear_dim") or (nested is not None and nested.has("nested_heads")):
        return _channel_decay(keys, nested, dtype)
    return _fixed_decay(keys, dtype)


def _gated_delta(keys: Reader, dtype: str) -> Mixer:
    """Queries and keys of one width, values and their gate of another; a decay and a step size per value head."""
    hidden, key_heads, value_heads = keys.required("hidden"), keys.required("key_heads"), keys.required("value_heads")
    key_dim, value_dim = keys.required("linear_key_dim"), keys.required("linear_value_dim")
    key, value = key_heads * key_dim, value_heads * value_dim
    mixed, taps = 2 * key + value, keys.size("linear_kernel") or 4
    sizes: Sizes = Counter(
        ssm=hidden * (mixed + 2 * value + 2 * value_heads) + 2 * value_heads, convolution=mixed * taps, norm=value_dim
    )
    return Mixer(kind="linear", sizes=sizes, cache=_constant(keys, dtype, mixed * taps, value_heads * key_dim * value_dim))


def _channel_decay(keys: Reader, nested: Reader | None, dtype: str) -> Mixer:
    """A decay per channel through a bottleneck of one head's width; the output gate likewise, or of full rank."""
    hidden = keys.required("hidden")
    if nested is not None and nested.has("nested_heads"):
        heads, width = nested.required("nested_heads"), nested.required("nested_dim")
        taps = nested.size("linear_kernel") or 4
    else:
        heads, width, taps = keys.required("linear_heads"), keys.required("linear_dim"), keys.size("linear_kernel") or 4
    wide = heads * width
    bottleneck = (hidden + wide) * width
    given = (nested or keys).flag("full_rank_gate")
    if given is None:
        keys.account.note("the rank of decay and output gate of its linear-attention layers: one head's width is assumed")
    gate = hidden * wide if given else bottleneck
    sizes: Sizes = Counter(
        ssm=4 * hidden * wide + bottleneck + gate + hidden * heads + wide + heads, convolution=3 * wide * taps, norm=width
    )
    return Mixer(kind="linear", sizes=sizes, cache=_constant(keys, dtype, 3 * wide * taps, heads * width * width))


def _fixed_decay(keys: Reader, dtype: str) -> Mixer:
    """Query, key, value, an output gate and the output, all as wide as ordinary attention; no convolution."""
    hidden, heads = keys.required("hidden"), keys.required("heads")
    width = keys.size("head_dim") or hidden // heads
    keys.account.note("the form of its linear attention: no key gives its sizes, those of ordinary attention are assumed")
    sizes: Sizes = Counter(ssm=5 * hidden * heads * width, norm=heads * width)
    state = CacheSpec(kind="state", name="linear_cache", dtype=dtype, elements_per_sequence=heads * width * width)
    return Mixer(kind="linear", sizes=sizes, cache=(state,))


def state_space(keys: Reader, dtype: str) -> Mixer:
    hidden, state, taps = keys.required("hidden"), keys.required("ssm_state"), keys.size("ssm_kernel") or 4
    heads, expand = keys.size("ssm_heads"), keys.ratio("ssm_expand") or 2.0
    if heads is None and keys.spelled("heads") == "num_heads":  # the spelling of models that are nothing but state-space
        heads = keys.size("heads")
    conv_bias = keys.flag("ssm_conv_bias") is not False
    if heads:
        width = keys.size("ssm_head_dim") or int(expand * hidden) // heads
        keys.raw("ssm_expand")
        inner, mixed = heads * width, heads * width + 2 * (keys.size("ssm_groups") or 1) * state
        projection = inner + mixed + heads
        sizes: Sizes = Counter(
            ssm=hidden * (projection + inner) + 3 * heads, norm=inner, convolution=mixed * (taps + conv_bias)
        )
        if keys.flag("ssm_bias"):
            sizes["ssm"] += projection + hidden
        return Mixer(kind="ssm", sizes=sizes, cache=_constant(keys, dtype, mixed * taps, inner * state))
    inner, given = int(expand * hidden), keys.raw("ssm_rank")
    rank = given if isinstance(given, int) and not isinstance(given, bool) and given > 0 else ceil(hidden / 16)
    sizes = Counter(ssm=hidden * 3 * inner + inner * (rank + 2 * state) + rank * inner + inner + inner * (state + 1))
    sizes["convolution"] = inner * (taps + conv_bias)
    return Mixer(kind="ssm", sizes=sizes, cache=_constant(keys, dtype, inner * taps, inner * state))


def _constant(keys: Reader, dtype: str, convolution: int, state: int) -> tuple[CacheSpec, ...]:
    given = keys.word("ssm_dtype")
    try:
        state_dtype = canonical_dtype(given) if given else "float32"
    except KeyError:
        raise keys.wrong(keys.spelled("ssm_dtype") or "", given, "a dtype") from None
    return (
        CacheSpec(kind="convolution", name="conv_states.0", dtype=dtype, elements_per_sequence=convolution),
        CacheSpec(kind="state", name="recurrent_states.0", dtype=state_dtype, elements_per_sequence=state),
    )
