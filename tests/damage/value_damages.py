"""Damage to the bytes of tensors, under sound headers: some of it shows in the values, the rest in digests alone."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable

from tests.damage.editing import Checkpoint, Stored
from tests.damage.kinds import DOWN, GATE, NORM, OUT, UP, K, Layer, Q, V, damage, expert, of_layer, second
from tests.damage.schema_damages import retyped, scale, settings

PAGE_BYTES = 4096
NAN, INF = b"\xc0\x7f", b"\x80\x7f"  # bfloat16


def altered(name: str, tensor: str, change: Callable[[bytearray], bytes | bytearray | None], layer: Layer = "values",
            base: str = "dense") -> None:  # fmt: skip
    @damage(layer, name, base)
    def edit(c: Checkpoint) -> None:
        c.alter(tensor, change)


def replaced(content: bytearray, begin: int, new: bytes) -> bytes:
    return bytes(content[:begin]) + new + bytes(content[begin + len(new) :])


def swapped_pairs(content: bytes | bytearray) -> bytes:
    made = bytearray(len(content))
    made[0::2], made[1::2] = content[1::2], content[0::2]
    return bytes(made)


def as_half(content: bytearray) -> bytes:
    """bfloat16 numbers as float16 bits."""
    numbers = struct.unpack(f"<{len(content) // 2}f", b"".join(b"\0\0" + bytes(content[i : i + 2])
                                                            for i in range(0, len(content), 2)))  # fmt: skip
    return struct.pack(f"<{len(numbers)}e", *numbers)


altered("one NaN", of_layer(1, Q), lambda b: replaced(b, 2000, NAN))
altered("one infinity", of_layer(1, Q), lambda b: replaced(b, 2000, INF))
altered("a NaN in a norm", of_layer(1, NORM), lambda b: replaced(b, 20, NAN))
altered("one page zeroed", of_layer(1, DOWN), lambda b: replaced(b, 2 * PAGE_BYTES, bytes(PAGE_BYTES)))
altered("second half of a tensor zero", of_layer(1, DOWN), lambda b: replaced(b, len(b) // 2, bytes(len(b) // 2)))
altered("a tensor all zero", of_layer(1, DOWN), lambda b: bytes(len(b)))
altered("a norm all zero", of_layer(1, NORM), lambda b: bytes(len(b)))
altered("a bias all zero", "model.layers.1.self_attn.k_proj.bias", lambda b: bytes(len(b)), base="biased")
altered("an expert's weight all zero", expert(1, 2, "up"), lambda b: bytes(len(b)), base="experts")
altered("a tensor of one value", of_layer(1, DOWN), lambda b: b"\x80\x3f" * (len(b) // 2))
altered("high bit of an exponent flipped", of_layer(1, Q), lambda b: replaced(b, 2001, bytes([b[2001] ^ 0x40])))
altered(
    "one page of random bytes", of_layer(1, DOWN), lambda b: replaced(b, PAGE_BYTES, random.Random(1).randbytes(PAGE_BYTES))
)
altered("one page of text", of_layer(1, DOWN), lambda b: replaced(b, PAGE_BYTES, b"<p>403 Forbidden" * (PAGE_BYTES // 16)))
altered("bytes of every number swapped", of_layer(1, Q), swapped_pairs)
altered("tensor shifted by one byte", of_layer(1, Q), lambda b: b[1:] + b[:1])
altered("float16 bits under bfloat16", of_layer(1, Q), as_half)
altered("a tensor a thousand times as large", of_layer(1, Q), lambda b: bytes(
    byte + 5 if place % 2 and byte & 0x7F > 8 else byte for place, byte in enumerate(b)))  # fmt: skip
retyped("bfloat16 bits under float16", "F16", [128, 128], "values")


@damage("values", "shard's data all zero")
def zero_data(c: Checkpoint) -> None:
    header, data = c.parts(second(c))
    c.touched.update(header)
    c.write_parts(second(c), header, bytes(len(data)))


@damage("values", "shard ends in a sparse hole")
def zero_tail(c: Checkpoint) -> None:
    """As a download that was cut, in a file made as long as it should be before."""
    file = second(c)
    raw = c.raw(file)
    c.touched.update(c.tensors(file))
    with c.path(file).open("wb") as out:
        out.write(raw[: len(raw) * 6 // 10])
        out.truncate(len(raw))


def copied(name: str, base: str, pairs: Callable[[Checkpoint], list[tuple[str, str]]]) -> None:
    @damage("values", name, base)
    def change(c: Checkpoint) -> None:
        for source, target in pairs(c):
            c.put(target, c.get(source))


copied("a layer's bytes are another's", "dense", lambda c: [
    (name, name.replace(".1.", ".2.")) for name in c.names("model.layers.1.")])  # fmt: skip
copied("a matrix's bytes are another layer's", "dense", lambda c: [(of_layer(1, GATE), of_layer(2, GATE))])
copied("an expert's bytes are another's", "experts", lambda c: [
    (expert(1, 0, word), expert(1, 2, word)) for word in ("gate", "up", "down")])  # fmt: skip


@damage("values", "config: tied, and another head is stored")
def tied_otherwise(c: Checkpoint) -> None:
    c.touched.add("lm_head.weight")
    c.edit_config(tie_word_embeddings=True)


def floats(stored: Stored, change: Callable[[float], float]) -> Stored:
    dtype, shape, content = stored
    numbers = struct.unpack(f"<{len(content) // 4}f", content)
    return dtype, shape, struct.pack(f"<{len(numbers)}f", *map(change, numbers))


scale("scale inverted", lambda s: floats(s, lambda value: 1 / value), "values")
scale("scale zero", lambda s: floats(s, lambda value: 0.0), "values")
scale("scale NaN", lambda s: floats(s, lambda value: float("nan")), "values")
scale("scale negative", lambda s: floats(s, lambda value: -value), "values")
scale("scale all ones", lambda s: floats(s, lambda value: 1.0), "values")
altered("an FP8 NaN", of_layer(1, GATE), lambda b: replaced(b, 2000, b"\x7f"), base="fp8")

# --- digests: a sound release of another model -----------------------------------------------------------------------------


def exchanged(name: str, first: str, other: str, base: str = "dense") -> None:
    @damage("digests", name, base)
    def change(c: Checkpoint) -> None:
        c.swap(first, other)


altered("lowest bit of a number flipped", of_layer(1, Q), lambda b: replaced(b, 2000, bytes([b[2000] ^ 1])), "digests")
altered("sign of a number flipped", of_layer(1, Q), lambda b: replaced(b, 2001, bytes([b[2001] ^ 0x80])), "digests")
altered("rows shifted by one number", of_layer(1, Q), lambda b: b[2:] + b[:2], "digests")
altered("matrix transposed in place", of_layer(1, Q), lambda b: b"".join(
    bytes(b[2 * (row * 128 + column) :][:2]) for column in range(128) for row in range(128)), "digests")  # fmt: skip
exchanged("q and o exchanged", of_layer(1, Q), of_layer(1, OUT))
exchanged("k and v exchanged", of_layer(1, K), of_layer(1, V))
exchanged("gate and up exchanged", of_layer(1, GATE), of_layer(1, UP))
exchanged("norms of two layers exchanged", of_layer(1, NORM), of_layer(2, NORM))
exchanged("two experts' matrices exchanged", expert(1, 0, "up"), expert(1, 2, "up"), "experts")


@damage("digests", "two layers exchanged")
def layers_exchanged(c: Checkpoint) -> None:
    for name in c.names("model.layers.1."):
        c.swap(name, name.replace(".1.", ".2."))


@damage("digests", "stale shard: an older revision's")
def stale(c: Checkpoint) -> None:
    """The same names, shapes and kind of values, as after some more training."""
    file, generator = second(c), random.Random(5)
    tensors = c.tensors(file)
    for name, (dtype, shape, content) in tensors.items():
        values = bytearray(content)
        for place in range(0, len(values), 2):
            values[place] ^= generator.randrange(8)
        tensors[name] = (dtype, shape, bytes(values))
    c.touched.update(tensors)
    c.write_tensors(file, tensors)


settings("config: half the heads, twice as large", "digests", num_attention_heads=2, num_key_value_heads=1, head_dim=64)
settings("config: other rotation", "digests", rope_parameters={"rope_type": "default", "rope_theta": 1000000.0})
settings("config: other epsilon", "digests", rms_norm_eps=0.01)
settings("config: fewer experts a token", "digests", base="experts", num_experts_per_tok=1)


@damage("digests", "two tokens exchanged in the tokenizer")
def tokens_exchanged(c: Checkpoint) -> None:
    path = c.path("tokenizer.json")
    path.write_text(path.read_text().replace('"a":', '"\0":').replace('"b":', '"a":').replace('"\0":', '"b":'))
