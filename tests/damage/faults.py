"""A sound release and a seed in, random corruptions of copies of it and what DayZero says of each out.

Each corruption is one that disks, networks and people make: a flipped bit anywhere, a cut, zeroed or exchanged blocks, shards
missing, exchanged or of another revision, headers that say something else. Settings stay as they are.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dayzero.model.describe import describe
from tests.damage.editing import INDEX, Checkpoint
from tests.damage.outcomes import Outcome, dayzero, warnings_of, write_digests

DTYPES = ("F64", "F32", "F16", "BF16", "I64", "I32", "I16", "I8", "U8", "F8_E4M3")


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    kind: str
    touched: frozenset[str]
    outcome: Outcome

    @property
    def found(self) -> bool:
        """Refused or warned of, in words that name a file or tensor that was touched, with nothing at the output's place."""
        return self.outcome.verdict != "silent" and self.outcome.names(self.touched) and not self.outcome.left_behind


def fault_run(sound: Path, other: Path, root: Path, *, count: int, seed: int, digests: bool) -> list[Fault]:
    """`other`: a release of the same shapes and other values. Both are left as they are; `root` is a folder to work in."""
    reference = Path(shutil.copytree(sound, root / "reference"))
    if digests:
        write_digests(reference)
    model, known = describe(reference), warnings_of(reference, root / "out")
    chance = random.Random(seed)
    faults: list[Fault] = []
    while len(faults) < count:
        folder = Path(shutil.copytree(reference, root / "damaged"))
        checkpoint, kind = Checkpoint(folder), chance.choice(list(KINDS))
        KINDS[kind](checkpoint, chance, other)
        if any(not (folder / name).is_file() or (folder / name).read_bytes() != (reference / name).read_bytes()
               for name in checkpoint.touched if (reference / name).is_file()):  # fmt: skip
            outcome = dayzero(folder, root / "out", known, model=model)
            faults.append(Fault(kind=kind, touched=frozenset(checkpoint.touched), outcome=outcome))
        shutil.rmtree(folder)
    return faults


def _flip(c: Checkpoint, file: str, place: int, bit: int) -> None:
    raw = bytearray(c.raw(file))
    raw[place] ^= 1 << bit
    c.write_raw(file, bytes(raw))


def _header_end(c: Checkpoint, file: str) -> int:
    return 8 + int.from_bytes(c.raw(file)[:8], "little")


def header_bit(c: Checkpoint, chance: random.Random, other: Path) -> None:
    file = chance.choice(c.shards)
    names = list(c.parts(file)[0])
    _flip(c, file, chance.randrange(_header_end(c, file)), chance.randrange(8))
    c.touched.update(names)


def data_bit(c: Checkpoint, chance: random.Random, other: Path) -> None:
    file = chance.choice(c.shards)
    _flip(c, file, chance.randrange(_header_end(c, file), len(c.raw(file))), chance.randrange(8))
    c.touched.update(c.tensors(file))


def index_bit(c: Checkpoint, chance: random.Random, other: Path) -> None:
    _flip(c, INDEX, chance.randrange(len(c.raw(INDEX))), chance.randrange(8))
    c.touched.update({INDEX, *c.shards})


def truncation(c: Checkpoint, chance: random.Random, other: Path) -> None:
    file = chance.choice(c.shards)
    c.touched.update(c.tensors(file))
    c.write_raw(file, c.raw(file)[: chance.randrange(len(c.raw(file)))])


def extension(c: Checkpoint, chance: random.Random, other: Path) -> None:
    file = chance.choice(c.shards)
    c.write_raw(file, c.raw(file) + chance.randbytes(chance.randrange(1, 5000)))


def zeroed_block(c: Checkpoint, chance: random.Random, other: Path) -> None:
    file = chance.choice(c.shards)
    raw, size = c.raw(file), chance.choice((512, 4096, 65536))
    begin = chance.randrange(_header_end(c, file), len(raw)) // 512 * 512
    c.touched.update(c.tensors(file))
    c.write_raw(file, raw[:begin] + bytes(min(size, len(raw) - begin)) + raw[begin + size :])


def exchanged_blocks(c: Checkpoint, chance: random.Random, other: Path) -> None:
    file = chance.choice(c.shards)
    raw, begin = c.raw(file), _header_end(c, file)
    size = 4096
    first, last = sorted(chance.sample(range((len(raw) - begin) // size), 2))
    first, last = begin + first * size, begin + last * size
    c.touched.update(c.tensors(file))
    c.write_raw(file, raw[:first] + raw[last : last + size] + raw[first + size : last] + raw[first : first + size]
                + raw[last + size :])  # fmt: skip


def missing_shard(c: Checkpoint, chance: random.Random, other: Path) -> None:
    c.path(chance.choice(c.shards)).unlink()


def exchanged_shards(c: Checkpoint, chance: random.Random, other: Path) -> None:
    first, second = chance.sample(c.shards, 2)
    one, two = c.raw(first), c.raw(second)
    c.write_raw(first, two)
    c.write_raw(second, one)


def stale_shard(c: Checkpoint, chance: random.Random, other: Path) -> None:
    file = chance.choice(c.shards)
    c.touched.update(c.tensors(file))
    c.write_raw(file, (other / file).read_bytes())


def wrong_header(c: Checkpoint, chance: random.Random, other: Path) -> None:
    tensor = chance.choice(c.names())
    header, _ = c.parts(c.file_of(tensor))
    begin, end = header[tensor]["data_offsets"]
    c.edit_entry(tensor, **chance.choice((
        {"dtype": chance.choice(DTYPES)},
        {"shape": [size * chance.choice((1, 2)) for size in header[tensor]["shape"]]},
        {"shape": header[tensor]["shape"][::-1]},
        {"data_offsets": [begin + chance.randrange(-64, 64), end]},
        {"data_offsets": [begin, end + chance.randrange(1, 1 << 20)]},
        {"data_offsets": [end, begin]},
    )))  # fmt: skip


def exchanged_tensors(c: Checkpoint, chance: random.Random, other: Path) -> None:
    tensor = chance.choice(c.names())
    alike = [name for name in c.names() if name != tensor and c.get(name)[:2] == c.get(tensor)[:2]]
    if alike:
        c.swap(tensor, chance.choice(alike))


KINDS: dict[str, Callable[[Checkpoint, random.Random, Path], None]] = {
    "bit of a header": header_bit, "bit of the data": data_bit, "bit of the index": index_bit, "cut": truncation,
    "bytes added": extension, "block zeroed": zeroed_block, "blocks exchanged": exchanged_blocks,
    "shard missing": missing_shard, "shards exchanged": exchanged_shards, "shard of another revision": stale_shard,
    "header that lies": wrong_header, "tensors exchanged": exchanged_tensors,
}  # fmt: skip
