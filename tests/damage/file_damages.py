"""Damage to files: what a header, a size, a kind of file or the index shows. Nothing is known here of the model."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable

from tests.damage.editing import INDEX, Checkpoint
from tests.damage.kinds import OUT, Layer, Q, damage, of_layer, second

# --- container: the file by itself ---------------------------------------------------------------------------------------


def cut(name: str, where: Callable[[bytes, int], int]) -> None:
    """`where`: the new size, of the file's content and the length of its header."""

    @damage("container", name)
    def change(c: Checkpoint) -> None:
        raw = c.raw(second(c))
        c.touched.update(c.tensors(second(c)))
        c.write_raw(second(c), raw[: where(raw, int.from_bytes(raw[:8], "little"))])


cut("shard cut inside its length field", lambda raw, header: 5)
cut("shard cut inside its header", lambda raw, header: 8 + header // 2)
cut("shard cut inside its data", lambda raw, header: len(raw) * 6 // 10)
cut("shard cut by one byte", lambda raw, header: len(raw) - 1)
cut("shard ends with its header", lambda raw, header: 8 + header)
cut("shard is empty", lambda raw, header: 0)


def become(name: str, content: Callable[[bytes], bytes]) -> None:
    @damage("container", name)
    def change(c: Checkpoint) -> None:
        c.write_raw(second(c), content(c.raw(second(c))))


become("shard is an LFS pointer", lambda raw: (
    b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize %d\n" % len(raw)))  # fmt: skip
become("shard is a web page", lambda raw: b"<!DOCTYPE html><html><body>403 Forbidden</body></html>")
become("shard is an error in JSON", lambda raw: b'{"error":"Repository not found"}')
become("shard is zero bytes of its size", lambda raw: bytes(len(raw)))
become("shard is random bytes of its size", lambda raw: random.Random(1).randbytes(len(raw)))
become("bytes follow the last tensor", lambda raw: raw + b"\0" * 100)
become("bytes precede the length field", lambda raw: b"\xef\xbb\xbf" + raw)
become("header length 2^63", lambda raw: (1 << 63).to_bytes(8, "little") + raw[8:])
become("header length all ones (negative)", lambda raw: b"\xff" * 8 + raw[8:])
become("header length equal to the file", lambda raw: len(raw).to_bytes(8, "little") + raw[8:])
become("header length zero", lambda raw: bytes(8) + raw[8:])
become("header length 8 too small", lambda raw: (int.from_bytes(raw[:8], "little") - 8).to_bytes(8, "little") + raw[8:])
become("header length 8 too large", lambda raw: (int.from_bytes(raw[:8], "little") + 8).to_bytes(8, "little") + raw[8:])
become("a brace of the header flipped", lambda raw: raw[:8] + raw[8:].replace(b"}", b"{", 1))


def header_edit(name: str, **change: object) -> None:
    @damage("container", name)
    def edit(c: Checkpoint) -> None:
        c.edit_entry(of_layer(1, Q), **change)


header_edit("dtype that does not exist", dtype="F8_E5M2X")
header_edit("negative size in a shape", shape=[-128, -128])
header_edit("fraction in a shape", shape=[128.0, 128])
header_edit("shape larger than its bytes", shape=[256, 128])
header_edit("dtype of another width than its bytes", dtype="F32")
header_edit("negative offset", data_offsets=[-32768, 0])


def offsets(name: str, move: Callable[[int, int], list[int]]) -> None:
    @damage("container", name)
    def edit(c: Checkpoint) -> None:
        header, _ = c.parts(c.file_of(of_layer(1, Q)))
        c.edit_entry(of_layer(1, Q), data_offsets=move(*header[of_layer(1, Q)]["data_offsets"]))


offsets("offsets run backwards", lambda begin, end: [end, begin])
offsets("span past the end of the file", lambda begin, end: [begin + (1 << 30), end + (1 << 30)])
offsets("tensor overlaps its neighbour", lambda begin, end: [begin - 64, end - 64])


@damage("container", "hole between two tensors")
def hole(c: Checkpoint) -> None:
    file = second(c)
    header, data = c.parts(file)
    last = max((name for name in header if name != "__metadata__"), key=lambda name: header[name]["data_offsets"])
    begin, end = header[last]["data_offsets"]
    header[last]["data_offsets"] = [begin + 64, end + 64]
    c.touched.add(last)
    c.write_parts(file, header, data[:begin] + bytes(64) + data[begin:])


def twice(name: str, shift: bool) -> None:
    @damage("container", name)
    def change(c: Checkpoint) -> None:
        """The key once more, at the end, with its own offsets or with those of another tensor of its shape."""
        file = c.file_of(of_layer(1, Q))
        header, data = c.parts(file)
        entry = json.dumps(header[of_layer(1, OUT if shift else Q)], separators=(",", ":"))
        raw = json.dumps(header, separators=(",", ":"))[:-1] + f',"{of_layer(1, Q)}":{entry}}}'
        c.touched.add(of_layer(1, Q))
        c.write_parts(file, raw.encode(), data)


twice("header key twice, same offsets", shift=False)
twice("header key twice, other offsets", shift=True)


@damage("container", "shard is a FIFO")
def fifo(c: Checkpoint) -> None:
    c.path(second(c)).unlink()
    os.mkfifo(c.path(second_gone(c)))


def second_gone(c: Checkpoint) -> str:
    """The name of the second shard, which is not there."""
    return sorted(set(c.index()["weight_map"].values()) - set(c.shards))[0]


@damage("container", "shard is a folder")
def directory(c: Checkpoint) -> None:
    c.path(second(c)).unlink()
    c.path(second_gone(c)).mkdir()


@damage("container", "shard is a link out of the folder")
def link_outside(c: Checkpoint) -> None:
    outside = c.folder.parent / f"{c.folder.name}.outside.safetensors"
    file = second(c)
    c.path(file).rename(outside)
    c.path(file).symlink_to(outside)


@damage("container", "shard is a link to nothing")
def link_to_nothing(c: Checkpoint) -> None:
    file = second(c)
    c.path(file).unlink()
    c.path(file).symlink_to("nowhere.safetensors")


@damage("container", "shard is a link to itself")
def link_to_itself(c: Checkpoint) -> None:
    file = second(c)
    c.path(file).unlink()
    c.path(file).symlink_to(file)


def as_text(name: str, file: str, change: Callable[[str], str], layer: Layer = "container") -> None:
    @damage(layer, name)
    def edit(c: Checkpoint) -> None:
        c.write_raw(file, change((c.folder / file).read_text()).encode())


as_text("config cut", "config.json", lambda text: text[: len(text) // 2])
as_text("config is empty", "config.json", lambda text: "")
as_text("config key twice", "config.json", lambda text: text.replace("{", '{\n  "num_hidden_layers": 3,', 1))
as_text("tokenizer cut", "tokenizer.json", lambda text: text[: len(text) // 2])
as_text("generation config cut", "generation_config.json", lambda text: text[: len(text) // 2])

# --- index: the index against the files ----------------------------------------------------------------------------------

as_text("index cut", INDEX, lambda text: text[: len(text) // 2], "index")
as_text("index is empty", INDEX, lambda text: "", "index")
as_text("a second object after the index", INDEX, lambda text: text + '{"weight_map": {}}', "index")
as_text("index key twice", INDEX, lambda text: text.replace(
    '"weight_map": {', f'"weight_map": {{\n    "{of_layer(1, Q)}": "model-00001-of-00005.safetensors",', 1), "index")  # fmt: skip
as_text("index with two weight maps", INDEX, lambda text: text.replace(
    '"weight_map": {', '"weight_map": {},\n  "weight_map": {', 1), "index")  # fmt: skip


@damage("index", "index without a weight map")
def no_map(c: Checkpoint) -> None:
    c.edit_index(lambda index: index.pop("weight_map"))


@damage("index", "shard missing")
def missing_shard(c: Checkpoint) -> None:
    c.path(second(c)).unlink()


@damage("index", "index and last shard missing")
def missing_index(c: Checkpoint) -> None:
    c.path(INDEX).unlink()
    c.path(c.shards[-1]).unlink()


@damage("index", "a shard that the index does not list")
def extra_shard(c: Checkpoint) -> None:
    c.write_tensors("model-00006-of-00006.safetensors", {"extra.weight": ("BF16", [4], bytes(8))})


@damage("index", "names of two shards exchanged")
def exchanged(c: Checkpoint) -> None:
    first, other, between = c.path(c.shards[1]), c.path(c.shards[2]), c.folder / "between"
    first.rename(between)
    other.rename(first)
    between.rename(other)


def map_to(name: str, value: object, tensor: str = of_layer(1, Q)) -> None:
    @damage("index", name)
    def change(c: Checkpoint) -> None:
        c.touched.add(tensor)
        c.edit_index(lambda index: index["weight_map"].update({tensor: value}))


map_to("index maps a tensor to another shard", "model-00003-of-00005.safetensors")
map_to("index maps a tensor to a file that is not there", "model-00009-of-00009.safetensors")
map_to("index maps a tensor to a number", 3)
map_to("index maps a tensor to an absolute path", "/etc/hostname")
map_to("index maps a tensor out of the folder", "../other/model.safetensors")
map_to("index maps a tensor to an empty name", "")
map_to("index names a tensor that is nowhere", "model-00003-of-00005.safetensors", "mtp.fc.weight")


@damage("index", "index omits a tensor")
def omitted(c: Checkpoint) -> None:
    c.touched.add(of_layer(1, Q))
    c.edit_index(lambda index: index["weight_map"].pop(of_layer(1, Q)))


@damage("index", "total_size is off")
def total(c: Checkpoint) -> None:
    c.edit_index(lambda index: index["metadata"].update(total_size=index["metadata"]["total_size"] * 2))


@damage("index", "a tensor in two shards")
def in_two(c: Checkpoint) -> None:
    dtype, shape, content = c.get(of_layer(1, Q))
    c.touched.add(of_layer(1, Q))
    c.write_tensors(c.shards[2], c.tensors(c.shards[2]) | {of_layer(1, Q): (dtype, shape, content[::-1])})


@damage("index", "a bit of a tensor's name flipped")
def misspelt(c: Checkpoint) -> None:
    name = of_layer(1, Q)
    c.touched.add(name)
    c.write_raw(c.file_of(name), c.raw(c.file_of(name)).replace(b"layers.1.self_attn.q", b"layers.1.self_attn.s", 1))


@damage("index", "shard of a larger model")
def other_model(c: Checkpoint) -> None:
    tensors = {name: (dtype, [2 * size for size in shape], content * 2 ** len(shape))
               for name, (dtype, shape, content) in c.tensors(second(c)).items()}  # fmt: skip
    c.touched.update(tensors)
    c.write_tensors(second(c), tensors)
