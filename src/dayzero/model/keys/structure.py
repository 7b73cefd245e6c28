"""Keys in, the parts of a `Structure` that keys tell: routing, activation, norms, what a query sees. Nothing is measured."""

from collections.abc import Iterable

from dayzero.core.model import LayerKind
from dayzero.core.structure import FeedForward, Norm, Positions, Routing, Structure, Tower
from dayzero.model.keys.feed_forwards import matrices
from dayzero.model.keys.reader import Reader

NORM_EPS = (
    ("rms_norm_eps", "rms"), ("norm_eps", "rms"), ("layer_norm_eps", "layer"), ("layer_norm_epsilon", "layer"),
    ("norm_epsilon", "rms"),
)  # fmt: skip
THETA = ("rope_theta", "rotary_emb_base")
# Mixers that keep a state and no keys: how many of them a query sees is no question there.
WITHOUT_KEYS = ("linear", "ssm", "none")


def structure(keys: Reader, kinds: Iterable[LayerKind], towers: Iterable[Tower]) -> Structure:
    kinds = tuple(kinds)
    return Structure(
        routing=(routing(keys, kinds),) if keys.experts() else (),
        positions=_positions(keys, kinds),
        feed_forwards=_feed_forwards(keys, kinds),
        norms=_norms(keys),
        towers=tuple(towers),
        visible_tokens={kind.name: _visible(keys, kind) for kind in kinds if kind.mixer not in WITHOUT_KEYS},
    )


def routing(keys: Reader, kinds: tuple[LayerKind, ...]) -> Routing:
    """What no key says is None and named in `default_keys`, by its most common spelling."""
    bias = keys.flag("router_bias")
    choice = keys.word("choice")
    if bias is None and choice is not None and "noaux" in choice:
        bias = True  # choosing without an auxiliary loss is done with a bias
    absent = tuple(keys.table[name].spellings[0] for name in ("scoring", "router_scale", "normalised") if not keys.has(name))
    return Routing(
        layer_kinds=tuple(kind.name for kind in kinds if kind.feed_forward == "moe"),
        scoring=keys.word("scoring"),
        experts_per_token=keys.size("per_token") or 0,
        groups=keys.count("groups") or 1,
        groups_per_token=keys.count("groups_per_token") or 1,
        bias=bias,
        scaling=keys.ratio("router_scale"),
        normalised=keys.flag("normalised"),
        default_keys=absent,
        evidence="keys",
    )


def _feed_forwards(keys: Reader, kinds: tuple[LayerKind, ...]) -> tuple[FeedForward, ...]:
    activation = keys.word("activation")
    layout = None if activation is None or matrices(keys) == 3 else "plain"
    return tuple(
        FeedForward(module=name, activation=activation, layout=layout, evidence="keys")  # type: ignore[arg-type]
        for name in ("dense", "moe")
        if any(kind.feed_forward == name for kind in kinds)
    )


def _norms(keys: Reader) -> tuple[Norm, ...]:
    for key, kind in NORM_EPS:
        eps = keys.data.get(key)
        if isinstance(eps, (int, float)) and not isinstance(eps, bool):
            return (Norm(kind=kind, eps=float(eps), evidence="keys"),)
    return ()


def _positions(keys: Reader, kinds: tuple[LayerKind, ...]) -> tuple[Positions, ...]:
    """Rotary, where a base is given at the top; per-layer bases are left to `normalise_rope`."""
    theta = next((value for key in THETA if isinstance(value := keys.data.get(key), (int, float))), None)
    attending = tuple(kind.name for kind in kinds if kind.mixer not in WITHOUT_KEYS)
    if theta is None or isinstance(theta, bool) or not attending:
        return ()
    return (
        Positions(
            kind="rotary",
            layer_kinds=attending,
            theta=float(theta),
            rotated_dims=keys.count("rope_dim") or None,
            evidence="keys",
        ),
    )


def _visible(keys: Reader, kind: LayerKind) -> int:
    """0: everything. A windowed layer sees its window; an indexed one what its indexer lets through."""
    windows = [spec.window_tokens for spec in kind.cache if spec.window_tokens]
    if kind.mixer == "compressed":
        return 0
    if any(spec.kind == "indexer" for spec in kind.cache):
        return keys.count("index_topk")
    return windows[0] if windows and all(spec.window_tokens for spec in kind.cache) else 0
