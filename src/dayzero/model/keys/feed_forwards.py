"""The keys of one layer in, its feed-forward out: parameters by role, and how many of the experts' a token uses."""

from collections import Counter
from dataclasses import dataclass

from dayzero.core.model import FeedForwardKind
from dayzero.model.keys.mixers import Sizes
from dayzero.model.keys.reader import Reader
from dayzero.model.keys.tables import GATED_SPELLINGS, PLAIN_ACTIVATIONS


@dataclass(frozen=True, kw_only=True, slots=True)
class FeedForwardSizes:
    """`idle`: parameters of experts that a token, on average, does not use."""

    kind: FeedForwardKind
    sizes: Sizes
    idle: int = 0


def feed_forward(keys: Reader, word: str, *, experts: int | None = None) -> FeedForwardSizes:
    """`word` of the layer pattern: dense, moe, none. `experts` replaces the config's number."""
    if word == "none":
        return FeedForwardSizes(kind="none", sizes=Counter())
    if word == "dense":
        return FeedForwardSizes(kind="dense", sizes=Counter(mlp=_dense(keys)))
    return _mixture(keys, experts or keys.required("experts"))


def matrices(keys: Reader) -> int:
    """3 where a gate multiplies the inner width, 2 where it does not."""
    spelled, activation = keys.spelled("activation"), keys.word("activation")
    if activation is None:
        return 3
    plain = activation in PLAIN_ACTIVATIONS and spelled not in GATED_SPELLINGS
    if plain:
        keys.account.note(f"whether its feed-forward is gated: {activation!r} is taken to have no gate")
    return 2 if plain else 3


def dense_width(keys: Reader) -> int:
    block_width = _block_width(keys)
    if block_width is not None:
        return block_width
    width = keys.size("dense_width")
    if width is None:
        hidden = keys.required("hidden")
        keys.account.note("the width of its dense feed-forward layers: 4 times the hidden size is assumed")
        return 4 * hidden
    return width


def _dense(keys: Reader) -> int:
    hidden, width, number = keys.required("hidden"), dense_width(keys), matrices(keys)
    bias = (number - 1) * width + hidden if keys.flag("mlp_bias") else 0
    return number * hidden * width + bias


def _mixture(keys: Reader, experts: int) -> FeedForwardSizes:
    hidden, number = keys.required("hidden"), matrices(keys)
    width = keys.size("expert_width")
    if width is None:
        width = 4 * hidden
        keys.account.note("the inner width of an expert: 4 times the hidden size is assumed")
    per_token, zero = keys.size("per_token"), keys.count("zero_experts")
    inner = keys.size("expert_hidden")
    one = number * (inner or hidden) * width
    sizes: Sizes = Counter(expert=experts * one, router=(experts + zero) * hidden)
    if inner:
        sizes["mlp"] += 2 * hidden * inner
        sizes["norm"] += inner if keys.flag("latent_norm") else 0
    sizes["shared_expert"] += _shared(keys, hidden, number, width)
    if keys.flag("experts_beside"):
        sizes["mlp"] += _dense(keys)
    if per_token is None:
        keys.account.note("how many experts a token uses: all are counted as active")
    if zero:
        keys.account.note(
            f"how often a token draws one of {zero} experts without weights: each is taken to be as likely as others"
        )
    used = min(experts, (per_token or experts) * experts / (experts + zero))
    return FeedForwardSizes(kind="moe", sizes=+sizes, idle=round((experts - used) * one))


def _shared(keys: Reader, hidden: int, number: int, expert_width: int) -> int:
    """Experts that every token uses: so many of an expert's width, or of a width of their own."""
    own, named = keys.count("shared_width"), keys.has("shared_width")
    shared = keys.count("shared") if keys.has("shared") else int(own > 0)
    if not keys.has("shared") and not named:
        keys.account.note("whether there are shared experts: no key says so, none are counted")
    if named and own and shared > 1:
        keys.account.note(f"whether {keys.spelled('shared_width')} is the width of one shared expert or of all: one is assumed")
    return number * hidden * (own if named and own else expert_width) * shared if shared and (own or not named) else 0


def _block_width(keys: Reader) -> int | None:
    """Width of a layer that is given as a multiple: two thirds of it, rounded up to 256, as gated feed-forwards have."""
    blocks = keys.items("block_configs", kind=dict)
    if not blocks or keys.layer is None or keys.layer >= len(blocks):
        return None
    ffn = blocks[keys.layer].get("ffn")
    multiple = ffn.get("ffn_mult") if isinstance(ffn, dict) else None
    if not isinstance(multiple, (int, float)) or isinstance(multiple, bool) or not 0 < multiple < 1e6:
        return None
    return -(-int(2 * multiple * keys.required("hidden") / 3) // 256) * 256
