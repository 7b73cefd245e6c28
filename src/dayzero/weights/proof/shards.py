"""A safetensors file of an artifact and its ledger lines in; where header or bytes are not what the lines say out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from dayzero.core.artifact import LedgerEntry, ShardFile
from dayzero.core.model import Problem
from dayzero.core.units import tensor_bytes
from dayzero.model.headers import read_header
from dayzero.weights.algebra import View
from dayzero.weights.copying import is_run, linear_pieces
from dayzero.weights.ledger import SourceTensor, file_checksum, pieces_of_entry
from dayzero.weights.proof.conservation import problem
from dayzero.weights.writing import hash_runs


def shard_problems(
    path: Path, shard: ShardFile, entries: Sequence[LedgerEntry], sources: Mapping[str, SourceTensor],
    advance: Callable[[int], None],
) -> list[Problem]:  # fmt: skip
    """Header and tensors of one file, byte by byte. `path`: where it lies; problems call it `shard.file`."""
    if not path.is_file():
        return [problem("missing_file", f"{shard.file} is missing", shard.file)]
    header, problems = read_header(path, shard.file)
    found = list(problems)
    if header is None:
        return found
    entries = sorted(entries, key=lambda entry: entry.offset)
    stored = {name: (one.begin, one.num_bytes, one.shape, one.dtype) for name, one in header.tensors.items()}
    listed = {e.parameter: (e.offset, e.num_bytes, e.shape, e.dtype) for e in entries}
    for name in sorted(stored.keys() | listed.keys()):
        if stored.get(name) != listed.get(name):
            detail = f"{shard.file}: its header has {name} as {stored.get(name)}, the ledger as {listed.get(name)}"
            found.append(problem("header", detail, shard.file, name))
    with path.open("rb", buffering=0) as file:
        raw = file.read(header.data_begin)
        for entry in entries:
            if hash_runs(file.fileno(), entry.offset, _run_lengths(entry, sources)) != entry.checksum:
                detail = f"{shard.file}: the bytes of {entry.parameter} have changed"
                found.append(problem("checksum", detail, shard.file, entry.parameter))
            advance(entry.num_bytes)
    if path.stat().st_size != shard.num_bytes or file_checksum(raw, (e.checksum for e in entries)) != shard.checksum:
        found.append(problem("checksum", f"{shard.file}: its header has changed", shard.file))
    return found


def _run_lengths(entry: LedgerEntry, sources: Mapping[str, SourceTensor]) -> list[int]:
    """What the tensor was hashed by (see `ledger`): the runs it consists of, or the whole."""
    by_runs = entry.checksum.partition(":")[0].endswith("-runs")
    pieces = pieces_of_entry(entry, sources) if by_runs else "is hashed whole"
    if isinstance(pieces, str) or not pieces:
        return [entry.num_bytes]  # where the line describes nothing, the proof of conservation says so
    flat = linear_pieces(View(entry.shape, entry.dtype, tuple(pieces)))
    size = tensor_bytes((1,), entry.dtype)
    return [piece.num_elements * size for piece in flat] if all(is_run(piece) for piece in flat) else [entry.num_bytes]
