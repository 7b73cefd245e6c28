"""Keys in, what each layer is out: a word for what mixes tokens and one for what feeds forward.

Mixers: full, sliding, chunked, indexed (sparse), light (compressed, indexed), heavy (compressed), linear, ssm, short
(convolution), none; `short_` before one where short convolutions stand in the same layer. Feed-forwards: dense, moe, none.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dayzero.model.keys.reader import Reader
from dayzero.model.known_keys import known_layer_words

# Words in the name of a layer type, whole: a part of an unknown word says nothing about the layer.
MIXER_WORDS = {
    **dict.fromkeys(("full_attention", "attention", "global_attention", "self_attention", "full", "global", "hybrid"), "full"),
    **dict.fromkeys((
        "sliding_attention", "sliding_window_attention", "sliding_window", "sliding", "local_attention", "local",
        "window_attention", "hybrid_sliding", "reference_sliding_attention",
    ), "sliding"),
    **dict.fromkeys(("chunked_attention", "chunked"), "chunked"),
    **dict.fromkeys(("indexed_attention", "sparse_attention"), "indexed"),
    "compressed_sparse_attention": "light", "heavily_compressed_attention": "heavy",
    "linear_attention": "linear", "linear": "linear",
    **dict.fromkeys(("mamba", "mamba2", "ssm", "recurrent"), "ssm"),
    **dict.fromkeys(("conv", "short_conv"), "short"),
}  # fmt: skip
# Names of one family's attention that picks tokens; known only where transformers lists the whole word.
INDEXED_ENDINGS = ("_sparse_attention", "_sparse")
HYBRID = ("hybrid", "hybrid_sliding")
FEED_WORDS = {"moe": "moe", "sparse": "moe", "hash_moe": "moe", "mlp": "dense", "dense": "dense"}
# One letter a layer: a state-space mixer, attention, experts, a dense feed-forward; each is a layer of its own.
PATTERN_LETTERS = {"M": ("ssm", "none"), "*": ("full", "none"), "E": ("none", "moe"), "-": ("none", "dense")}
# Compression of at most this many tokens an entry is the overlapping kind that an indexer chooses from.
LIGHT_COMPRESSION = 32


# Meanings any of which says that layers differ in what mixes tokens.
PATTERNS = ("layer_types", "full_interval", "attention_period", "linear_nested", "block_configs", "attention_layers")
# Meanings that decide the pattern where nothing above them in rank does.
SAID_AGAIN = (
    "full_interval", "full_every", "window_pattern", "attention_period", "attention_offset", "attention_bits", "windowed",
    "window_from", "window", "dense_first", "moe_last", "moe_frequency", "moe_step", "moe_period", "moe_offset", "moe_layers",
    "dense_layers",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Layer:
    mixer: str
    feed: str
    short_convolutions: bool = False


def layer_pattern(keys: Reader, depth: int) -> list[Layer]:
    """Raises DayZeroError for lists that do not fit the depth and words or letters that mean nothing known."""
    parts = _single_part_layers(keys, depth)
    if parts is not None:
        return parts
    if _state_space_alone(keys):
        return [Layer(mixer="ssm", feed="none")] * depth
    words = keys.items("layer_types", depth, kind=str)
    short = [bool(words and words[layer] in HYBRID) for layer in range(depth)]
    mixers = _mixers(keys, depth, words)
    feeds = _feeds(keys, depth)
    for name in SAID_AGAIN:  # known, and whatever they say is in the pattern already
        keys.raw(name)
    return [Layer(mixer=mixers[i], feed=feeds[i], short_convolutions=short[i]) for i in range(depth)]


def pattern_depth(keys: Reader) -> int | None:
    """The number of layers that a list of kinds implies, where no key says the number."""
    for name in ("layer_types", "block_configs"):
        found = keys.items(name)
        if found:
            return len(found)
    letters = keys.word("hybrid_pattern")
    return len(letters.replace("|", "")) if letters else None


def _single_part_layers(keys: Reader, depth: int) -> list[Layer] | None:
    """Layers that hold either a mixer or a feed-forward; None where layers hold both."""
    letters = keys.word("hybrid_pattern")
    if letters:
        letters = letters.replace("|", "")
        if len(letters) < depth or any(letter not in PATTERN_LETTERS for letter in letters):
            want = f"{depth} letters out of {' '.join(PATTERN_LETTERS)}"
            raise keys.wrong(keys.spelled("hybrid_pattern") or "", letters, want)
        return [Layer(mixer=PATTERN_LETTERS[letter][0], feed=PATTERN_LETTERS[letter][1]) for letter in letters[:depth]]
    words = keys.items("layer_types", depth, kind=str)
    if not words or not any(word in FEED_WORDS for word in words):
        return None
    return [
        Layer(mixer="none", feed=FEED_WORDS[word]) if word in FEED_WORDS else Layer(mixer=_mixer_of(keys, word), feed="none")
        for word in words
    ]


def _state_space_alone(keys: Reader) -> bool:
    """Sizes of state-space layers, none of attention and no pattern: every layer is one, and holds nothing else."""
    if any(keys.has(name) for name in PATTERNS) or keys.has("kv_heads"):
        return False
    return keys.has("ssm_state") and keys.spelled("heads") in (None, "num_heads")


def _mixers(keys: Reader, depth: int, words: list[str] | None) -> list[str]:
    if words is not None:
        found = [_mixer_of(keys, word) for word in words]
        return [_with_index(keys, mixer, layer, named=True) for layer, mixer in enumerate(found)]
    for source in (_from_blocks, _from_nested_layers, _from_compression, _from_bits, _from_intervals, _from_windows):
        sourced = source(keys, depth)
        if sourced is not None:
            return [_with_index(keys, mixer, layer) for layer, mixer in enumerate(sourced)]
    if keys.has("ssm_state") or keys.has("linear_heads") or keys.has("value_heads"):
        keys.account.note("which layers are linear or state-space: sizes of such layers are given, no key says which they are")
    return [_with_index(keys, "full", layer) for layer in range(depth)]


def _mixer_of(keys: Reader, word: str) -> str:
    mixer = MIXER_WORDS.get(word)
    if mixer is None and word.endswith(INDEXED_ENDINGS) and word in known_layer_words():
        mixer = "indexed"
    if mixer is None:
        keys.account.note(f"what a layer of kind {word!r} is: it is counted as full attention")
        return "full"
    sizes = ("value_heads", "linear_heads", "linear_nested")
    if mixer == "linear" and keys.has("ssm_state") and not any(keys.has(name) for name in sizes):
        return "ssm"
    return mixer


def _with_index(keys: Reader, mixer: str, layer: int, *, named: bool = False) -> str:
    """Whether an attention layer has an indexer: by its own list, else by its name, else because sizes are given."""
    if mixer not in ("full", "indexed"):
        return mixer
    types = keys.items("index_types", kind=str)
    nested = keys.nested("sparse_nested")
    bits = nested.integers("index_bits") if nested else None
    for word in types or ():
        if word not in ("full", "shared"):
            keys.account.note(f"what an indexer of kind {word!r} is: it is counted as one of the layer's own")
    if types is not None and mixer == "indexed" and layer < len(types):
        return "full" if types[layer] == "shared" else "indexed"
    if bits is not None and layer < len(bits):
        return "indexed" if bits[layer] else "full"
    return "indexed" if not named and keys.has("index_heads") and keys.has("index_dim") else mixer


def _from_blocks(keys: Reader, depth: int) -> list[str] | None:
    blocks = keys.items("block_configs", depth, kind=dict)
    if blocks is None:
        return None
    return ["none" if (block.get("attention") or {}).get("no_op") else "full" for block in blocks]


def _from_nested_layers(keys: Reader, depth: int) -> list[str] | None:
    nested = keys.nested("linear_nested")
    if nested is None:
        return None
    linear, full = nested.integers("nested_linear_layers"), nested.integers("nested_full_layers")
    if linear is None:
        return None
    numbers = sorted({*linear, *(full or ())})
    if numbers and not (numbers[0] > 0 and numbers[-1] <= depth):
        raise nested.wrong("kda_layers", f"layers {numbers[0]} to {numbers[-1]}", f"layers counted from 1 to {depth}")
    return ["linear" if layer + 1 in set(linear) else "full" for layer in range(depth)]


def _from_compression(keys: Reader, depth: int) -> list[str] | None:
    ratios = keys.integers("compress_ratios", depth)
    if ratios is None:
        return None
    return ["sliding" if not ratio else "light" if ratio <= LIGHT_COMPRESSION else "heavy" for ratio in ratios]


def _from_bits(keys: Reader, depth: int) -> list[str] | None:
    bits, chosen = keys.integers("attention_bits", depth), keys.integers("attention_layers")
    if chosen is not None:
        other = "ssm" if keys.has("ssm_state") else "short" if keys.has("short_kernel") else "linear"
        return ["full" if layer in chosen else other for layer in range(depth)]
    if bits is None:
        return None
    return ["full" if bit else "linear" for bit in bits]


def _from_intervals(keys: Reader, depth: int) -> list[str] | None:
    interval, period = keys.size("full_interval"), keys.size("attention_period")
    other = "ssm" if keys.has("ssm_state") else "linear"
    if interval:
        return ["full" if (layer + 1) % interval == 0 else other for layer in range(depth)]
    if period:
        offset = keys.count("attention_offset")
        return ["full" if layer % period == offset else other for layer in range(depth)]
    return None


def _from_windows(keys: Reader, depth: int) -> list[str] | None:
    chunk, bits = keys.size("chunk"), keys.integers("rotary_bits") or None
    if chunk:
        if bits is None:
            keys.account.note("which layers attend in chunks: every layer but each fourth is assumed")
            bits = [int((layer + 1) % 4 != 0) for layer in range(depth)]
        return ["chunked" if layer >= len(bits) or bits[layer] else "full" for layer in range(depth)]
    if not keys.count("window") or keys.flag("windowed") is False:
        return None
    pattern, every = keys.raw("window_pattern"), keys.size("full_every")
    if isinstance(pattern, str) and pattern:  # L: local, G: global, repeated
        if set(pattern) - set("LG*"):
            raise keys.wrong("sliding_window_pattern", pattern, "a positive integer or a string of L and G")
        return ["full" if pattern[layer % len(pattern)] in "G*" else "sliding" for layer in range(depth)]
    if isinstance(pattern, int) and not isinstance(pattern, bool) and pattern > 0:
        every = pattern
    elif pattern is not None:
        raise keys.wrong("sliding_window_pattern", pattern, "a positive integer or a string of L and G")
    if every:
        return ["full" if (layer + 1) % every == 0 else "sliding" for layer in range(depth)]
    if keys.flag("windowed") and keys.has("window_from"):
        first = keys.count("window_from")
        return ["sliding" if layer >= first else "full" for layer in range(depth)]
    keys.account.note("which layers are windowed: a window is given and no pattern, every layer is assumed to be")
    return ["sliding"] * depth


def _feeds(keys: Reader, depth: int) -> list[str]:
    if not keys.experts():  # one expert that every token uses is a dense feed-forward
        if keys.spelled("expert_width") == "moe_intermediate_size" and not keys.has("experts"):
            keys.account.note("how many experts there are: their width is given and their number is not; none are counted")
        return ["none" if _no_feed(keys, layer) else "dense" for layer in range(depth)]
    words = keys.items("feed_types", depth, kind=str)
    if words is not None:
        first = keys.count("dense_first")
        leading = next((layer for layer, word in enumerate(words) if word != "dense"), depth)
        if keys.has("dense_first") and leading != min(first, depth):
            keys.account.note(f"which layers are dense: {keys.spelled('dense_first')} {first} and the list of kinds contradict")
        for word in words:
            if word not in FEED_WORDS:
                keys.account.note(f"what a feed-forward of kind {word!r} is: it is counted as experts")
        return [FEED_WORDS.get(word, "moe") for word in words]
    sources: tuple[Callable[[Reader, int], list[bool] | None], ...] = (_moe_frequency, _moe_period, _moe_list, _moe_range)
    found = next((result for source in sources if (result := source(keys, depth)) is not None), None)
    if found is None:
        if keys.has("dense_width") and not keys.same_key("dense_width", "expert_width"):
            keys.account.note(
                "where the dense feed-forward is: its width is given and no key says which layers have it, or whether it (and "
                "an attention of its own) stands beside the experts of a layer; only experts are counted"
            )
        found = [True] * depth
    return ["moe" if item else "dense" for item in found]


def _no_feed(keys: Reader, layer: int) -> bool:
    blocks = keys.items("block_configs")
    return bool(blocks and (blocks[layer].get("ffn") or {}).get("no_op"))


def _moe_frequency(keys: Reader, depth: int) -> list[bool] | None:
    value: Any = keys.raw("moe_frequency")
    if not isinstance(value, list):
        return None
    bits = keys.integers("moe_frequency", depth) or []
    return [bool(bit) for bit in bits]


def _moe_period(keys: Reader, depth: int) -> list[bool] | None:
    period = keys.size("moe_period")
    return None if period is None else [layer % period == keys.count("moe_offset") for layer in range(depth)]


def _moe_list(keys: Reader, depth: int) -> list[bool] | None:
    chosen = keys.raw("moe_layers")
    if isinstance(chosen, str):  # "3,4,5"
        if not all(item.strip().isdecimal() for item in chosen.split(",")):
            raise keys.wrong(keys.spelled("moe_layers") or "", chosen, "layer numbers with commas between them")
        chosen = [int(item) for item in chosen.split(",")]
    elif chosen is not None:
        chosen = keys.integers("moe_layers")
    return None if not chosen else [layer in chosen for layer in range(depth)]


def _moe_range(keys: Reader, depth: int) -> list[bool] | None:
    """First and last layer, a step, and exceptions."""
    known = any(keys.has(name) for name in ("dense_first", "moe_step", "moe_frequency", "dense_layers"))
    if not known:
        return None
    first, last = keys.count("dense_first"), keys.count("moe_last") if keys.has("moe_last") else depth
    step, frequency = keys.size("moe_step") or 1, keys.size("moe_frequency") or 1
    dense = set(keys.integers("dense_layers") or ())
    # A step counts layers from 1, a frequency from 0: that is how the releases that have these keys do it.
    return [
        first <= layer <= last and (layer + 1) % step == 0 and layer % frequency == 0 and layer not in dense
        for layer in range(depth)
    ]
