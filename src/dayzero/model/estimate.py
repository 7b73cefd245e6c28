"""A config that no class can be had for in, a provisional description out, from keys whose meaning is common. No torch.

What can be known so: sizes, layer kinds and caches of decoders built from known parts (see `keys`). What cannot: parameter
names, anything a key does not say, layout of new parts. Every figure is provisional. `consumed` says what each key was read
for; `inert` are keys known to change neither sizes nor caches; `unread` are keys that nothing here knows, which is where a
new release goes wrong silently; `unknown` are sentences on what had to be assumed or left out.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from dayzero.core.model import CacheSpec, Dimensions, LayerKind, OperatorGraph
from dayzero.core.sized_operators import layer_operators, outer_operators
from dayzero.core.structure import Structure
from dayzero.model.keys.accounting import accounted, some
from dayzero.model.keys.compressed import compressed_attention, uses_shared_row
from dayzero.model.keys.feed_forwards import FeedForwardSizes, dense_width, feed_forward
from dayzero.model.keys.layer_pattern import Layer, layer_pattern, pattern_depth
from dayzero.model.keys.linear_mixers import linear_attention, state_space
from dayzero.model.keys.mixers import Mixer, Sizes, attention, heads_of, rotated_and_not
from dayzero.model.keys.reader import MOST_LAYERS, Account, Reader
from dayzero.model.keys.sound import MOST_DRAFTS, config_doubts, text_reader
from dayzero.model.keys.structure import structure
from dayzero.model.keys.tables import CONCEPTS
from dayzero.model.keys.towers import towers

MTP = CONCEPTS["mtp"].spellings


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """`by_role` sums to `total_parameters`; `mtp_parameters` are further ones. Buffers (a bias on the choice of experts) and
    tied copies are in neither. `consumed`: dotted path -> meaning; `inert`: dotted path -> why."""

    dimensions: Dimensions
    layer_kinds: tuple[LayerKind, ...]
    outer_operators: OperatorGraph
    total_parameters: int
    active_parameters: int
    mtp_parameters: int
    by_role: dict[str, int]
    structure: Structure
    consumed: dict[str, str]
    inert: dict[str, str]
    unread: tuple[str, ...]
    unknown: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Counted:
    """One layer."""

    mixer: Mixer
    feed: FeedForwardSizes
    sizes: Sizes


def estimate(config: Mapping[str, Any], dtype: str) -> Estimate:
    """Raises DayZeroError when not even width, depth and vocabulary are given, or a key holds what it cannot mean."""
    account = Account()
    keys = text_reader(config, account)
    config_doubts(config)
    hidden, vocabulary, depth = keys.required("hidden"), keys.required("vocabulary"), _depth(keys)
    pattern = layer_pattern(keys, depth)
    counted = [_count_layer(keys.at(index), layer, dtype) for index, layer in enumerate(pattern)]
    sizes, idle = _outside(keys, config, hidden, vocabulary, depth)
    for item in counted:
        sizes += item.sizes
        idle += item.feed.idle
    found = towers(config, account, text_hidden=hidden)
    sizes["tower"] += sum(item.tower.parameters for item in found)
    sizes["projector"] += sum(item.projector for item in found)
    idle += sum(item.idle for item in found)
    sizes = +sizes
    _share_caches(keys, depth)
    kinds = _kinds(counted)
    num_mtp = _mtp_layers(keys)
    dimensions = _dimensions(keys, pattern, hidden, vocabulary, depth, num_mtp)
    firsts = (counted[kind.layers[0]] for kind in kinds)
    kinds = tuple(
        replace(kind, operators=layer_operators(kind, first.sizes, first.feed.idle, dimensions, dtype))
        for kind, first in zip(kinds, firsts, strict=True)
    )
    mtp = _mtp_parameters(keys, pattern, num_mtp, hidden, vocabulary, dtype)
    total = sum(sizes.values())
    parts = structure(keys, kinds, [item.tower for item in found])
    _note_assumptions(keys)
    consumed, inert, unread = accounted(config, keys, pattern)
    if unread:
        account.note(f"what {len(unread)} keys that nothing here reads decide: {some(unread)}")
    return Estimate(
        dimensions=dimensions,
        layer_kinds=kinds,
        outer_operators=outer_operators(dimensions, dtype),
        total_parameters=total,
        active_parameters=total - idle,
        mtp_parameters=mtp,
        by_role=dict(sizes),
        structure=parts,
        consumed=consumed,
        inert=inert,
        unread=unread,
        unknown=tuple(account.unknown),
    )


def _depth(keys: Reader) -> int:
    depth = keys.size("depth") or pattern_depth(keys) or keys.required("depth")
    if depth > MOST_LAYERS:
        raise keys.wrong(keys.spelled("depth") or "num_hidden_layers", depth, f"at most {MOST_LAYERS} layers")
    return depth


def _count_layer(keys: Reader, layer: Layer, dtype: str, *, experts: int | None = None) -> _Counted:
    hidden = keys.required("hidden")
    mixer, feed = _mixer(keys, layer, dtype), feed_forward(keys, layer.feed, experts=experts)
    sizes: Sizes = Counter(norm=hidden * ((layer.mixer != "none") + (layer.feed != "none")))
    streams = keys.size("streams")
    if streams:  # before each half of the layer: what the streams are mixed by, read from all of them
        sizes["other"] += 2 * ((2 + streams) * streams * (streams * hidden + 1) + 3)
    sizes += mixer.sizes
    sizes += feed.sizes
    if layer.short_convolutions:
        mixer = _with_short_convolutions(keys, mixer, sizes)
    return _Counted(mixer=mixer, feed=feed, sizes=sizes)


def _mixer(keys: Reader, layer: Layer, dtype: str) -> Mixer:
    word = layer.mixer
    if word == "none":
        return Mixer(kind="none", sizes=Counter())
    if word == "linear":
        return linear_attention(keys, dtype)
    if word == "ssm":
        return state_space(keys, dtype)
    if word == "short":
        taps, hidden = keys.size("short_kernel") or 3, keys.required("hidden")
        row = CacheSpec(kind="convolution", name="conv_states.0", dtype=dtype, elements_per_sequence=hidden * taps)
        return Mixer(kind="linear", sizes=Counter(ssm=4 * hidden * hidden, convolution=hidden * taps), cache=(row,))
    if word in ("light", "heavy") or uses_shared_row(keys):
        return compressed_attention(keys, "sliding" if word not in ("light", "heavy") else word, dtype)
    return attention(keys, word, dtype)


def _with_short_convolutions(keys: Reader, mixer: Mixer, sizes: Sizes) -> Mixer:
    """Convolutions of a few taps on keys and values and, where there are four, on what each half of the layer adds."""
    taps, number, hidden = keys.size("short_kernel") or 4, keys.count("short_convolutions") or 4, keys.required("hidden")
    if not keys.has("short_convolutions"):
        keys.account.note("how many short convolutions its layers have: 4 are assumed")
    widths = [spec.elements_per_token for spec in mixer.cache if spec.elements_per_token] + [hidden, hidden]
    rows = [
        CacheSpec(kind="convolution", name=f"conv_states.{index}", dtype="float32", elements_per_sequence=width * taps)
        for index, width in enumerate(widths[:number])
    ]
    sizes["convolution"] += sum(row.elements_per_sequence for row in rows)
    return Mixer(kind=mixer.kind, sizes=mixer.sizes, cache=(*mixer.cache, *rows))


def _outside(keys: Reader, config: Mapping[str, Any], hidden: int, vocabulary: int, depth: int) -> tuple[Sizes, int]:
    """Parameters outside the layers, and those of them that a token does not use."""
    sizes: Sizes = Counter(embedding=vocabulary * hidden, norm=hidden)
    if not _tied(keys, config):
        sizes["head"] = vocabulary * hidden
    streams = keys.size("streams")
    if streams:
        sizes["other"] += streams * (streams * hidden + 1) + 1
    width = keys.count("per_layer_input")
    if width:
        sizes["embedding"] += (keys.size("per_layer_vocabulary") or vocabulary) * depth * width
        sizes["other"] += hidden * depth * width + width + depth * (2 * hidden * width + hidden)
    rows, row_width = keys.integers("ngram_rows"), keys.size("ngram_width")
    if not rows or not row_width:
        return sizes, 0
    tables = sum(row for row in rows if row > 0) * row_width
    sizes["embedding"] += tables
    keys.account.note(
        f"how n-gram tables ({tables / 1e9:.1f}B parameters, in the total and not in the active ones) join the layers: "
        "no key says, their projections are not counted"
    )
    return sizes, tables


def _tied(keys: Reader, config: Mapping[str, Any]) -> bool:
    """The outer config decides for a model of several parts, else the text's."""
    outer = Reader(config, keys.account).flag("tied")
    inner = keys.flag("tied")
    if outer is None and inner is None:
        keys.account.note(
            "whether the head is tied to the embedding: tie_word_embeddings is absent, a head of its own is counted"
        )
    return bool(inner if outer is None else outer)


def _kinds(counted: list[_Counted]) -> tuple[LayerKind, ...]:
    """Layers with the same mixer, feed-forward, cache and sizes are one kind, named by the first two."""
    groups: dict[Any, list[int]] = {}
    for index, item in enumerate(counted):
        key = (item.mixer.kind, item.feed.kind, item.mixer.cache, tuple(sorted(item.sizes.items())))
        groups.setdefault(key, []).append(index)
    kinds: list[LayerKind] = []
    for (mixer, feed, cache, _), layers in groups.items():
        name = f"{mixer}+{feed}"
        same = sum(kind.name.partition("#")[0] == name for kind in kinds)
        name = f"{name}#{same + 1}" if same else name
        kinds.append(LayerKind(name=name, mixer=mixer, feed_forward=feed, layers=tuple(layers), cache=cache))
    return tuple(kinds)


def _mtp_layers(keys: Reader) -> int:
    if keys.flag("mtp_used") is False:
        return 0
    modules = keys.count("mtp") or keys.count("mtp_modules") * (keys.count("mtp_transformer") or 1)
    if modules > MOST_DRAFTS:
        want = f"at most {MOST_DRAFTS} layers that predict further tokens"
        raise keys.wrong(keys.spelled("mtp_modules") or "", modules, want)
    return modules


def _mtp_parameters(keys: Reader, pattern: list[Layer], number: int, hidden: int, vocabulary: int, dtype: str) -> int:
    """Each: a layer like the last one that attends, with the last one's feed-forward, and a matrix that joins two inputs."""
    if not number:
        return 0
    attending = [index for index, layer in enumerate(pattern) if layer.mixer not in ("linear", "ssm", "short", "none")]
    feeding = [index for index, layer in enumerate(pattern) if layer.feed != "none"]
    if not attending or not feeding:
        keys.account.note("the layers that predict further tokens: no layer of the decoder is like them")
        return 0
    layer = Layer(mixer=pattern[attending[-1]].mixer, feed=pattern[feeding[-1]].feed)
    one = _count_layer(keys.at(attending[-1]), layer, dtype, experts=keys.size("mtp_experts"))
    own = vocabulary * hidden if keys.flag("mtp_embeddings") else 0
    keys.account.note(
        f"the {number} layers that predict further tokens: each is counted as a layer like the last ones, a matrix of "
        "2 x hidden by hidden and three norms, without copies of embedding and head; the total does not hold them"
    )
    keys.raw("mtp_pattern")
    return number * (sum(one.sizes.values()) + 2 * hidden * hidden + 3 * hidden + own)


def _share_caches(keys: Reader, depth: int) -> None:
    shared = keys.count("shared_cache_layers")
    if shared:
        keys.account.note(f"which cache the last {min(shared, depth)} layers reuse: each is counted with a cache of its own")


def _dimensions(keys: Reader, pattern: list[Layer], hidden: int, vocabulary: int, depth: int, num_mtp: int) -> Dimensions:
    experts = keys.experts()
    latent = bool(keys.count("kv_rank"))
    words = [layer.mixer for layer in pattern]
    attending = next((index for index, word in enumerate(words) if word in ("full", "indexed", "sliding", "chunked")), None)
    shared_row = any(word in ("light", "heavy") for word in words)
    heads = heads_of(keys.at(attending), words[attending]) if attending is not None and not latent and not shared_row else None
    return Dimensions(
        hidden_size=hidden,
        num_layers=depth,
        vocab_size=vocabulary,
        max_position_tokens=keys.size("positions"),
        num_attention_heads=keys.size("heads"),
        num_key_value_heads=heads.key_values if heads else keys.size("kv_heads"),
        head_dim=heads.key_dim if heads else sum(rotated_and_not(keys)) if latent else keys.size("head_dim"),
        value_head_dim=heads.value_dim if heads else keys.size("value_dim"),
        intermediate_size=dense_width(keys) if any(layer.feed == "dense" for layer in pattern) else keys.size("dense_width"),
        num_experts=experts,
        num_experts_per_token=(keys.size("per_token") or 0) if experts else 0,
        num_shared_experts=(keys.count("shared") or int(keys.count("shared_width") > 0)) if experts else 0,
        num_mtp_layers=num_mtp,
    )


def _note_assumptions(keys: Reader) -> None:
    """What no config says, whatever the model."""
    keys.account.note(
        "parameter names; norms and small vectors beyond two norms a layer (a fraction of a percent); and what a class of the "
        "model sets by default where a key is absent"
    )
