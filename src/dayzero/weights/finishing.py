"""Written files' fragments and the source list in; an artifact's ledgers, records and seal out, in its work folder.

One way to end, for a conversion in one go and for one that was made in parts, so that both leave the same bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from dayzero.core.artifact import ArtifactLayout, ArtifactQuantization, LedgerEntry, ShardFile
from dayzero.core.model import ModelDescription, Problem
from dayzero.core.plan import Layout
from dayzero.core.records import write_record, write_text_atomic
from dayzero.model.headers import TensorEntry
from dayzero.weights.files import hash_file, sync_tree
from dayzero.weights.ledger import ALGORITHM, SourceTensor, to_line
from dayzero.weights.proof.expected import QUANTIZATION_FILE, RELEASE_FOLDER
from dayzero.weights.proof.verify import LAYOUT_FILE, MODEL_FILE, SEAL_FILE, SOURCES_FILE, STATE_FILE, seal
from dayzero.weights.writing import Written


def source_list(
    tensors: Mapping[str, TensorEntry], dropped: Mapping[str, str], warnings: Iterable[Problem], checksums: Mapping[str, str]
) -> list[SourceTensor]:
    """What became of each stored tensor. `warnings`: those of the mapping, which say what is used in part."""
    partly = {one.tensor: one.detail for one in warnings if one.kind == "partly_used"}
    return [
        SourceTensor(tensor=name, file=entry.file, num_bytes=entry.num_bytes, dtype=entry.dtype, shape=entry.shape,
                     checksum=checksums.get(name, ""), dropped=dropped.get(name), partly_used=partly.get(name))
        for name, entry in sorted(tensors.items())
    ]  # fmt: skip


def finish(
    work: Path, *, key: str, state: str, source_hash: str, model: ModelDescription, layout: Layout, dtype: str | None,
    written: Iterable[tuple[int, Written]], sources: Iterable[SourceTensor], settings: Iterable[str],
    quantization: ArtifactQuantization | None = None, accepted: Iterable[Problem] = (),
) -> ArtifactLayout:  # fmt: skip
    """Join the fragments and write layout.json last.

    written: (rank, fragment) of every file, in the order of the plan. settings: names in the release folder, which is there.
    """
    ledgers: list[list[LedgerEntry]] = [[] for _ in range(layout.num_devices)]
    files: list[list[ShardFile]] = [[] for _ in range(layout.num_devices)]
    for rank, one in written:
        ledgers[rank] += one.entries
        files[rank].append(one.file)
    put = [_put(work, f"rank-{rank:05d}/ledger.jsonl", "".join(map(to_line, entries))) for rank, entries in enumerate(ledgers)]
    others = [_put(work, SOURCES_FILE, "".join(map(to_line, sources))), _put(work, STATE_FILE, state)]
    write_record(model, work / MODEL_FILE)
    others.append(stored(work, MODEL_FILE))
    others += [stored(work, f"{RELEASE_FOLDER}/{name}") for name in settings]
    if quantization is not None:
        write_record(quantization, work / QUANTIZATION_FILE)
        others.append(stored(work, QUANTIZATION_FILE))
    preset = quantization.preset if quantization is not None else None
    artifact = ArtifactLayout(key=key, model=model.name, source_hash=source_hash, layout=layout, dtype=dtype or model.dtype,
                              quantization=preset, files=tuple(map(tuple, files)), ledgers=tuple(put),
                              release_files=tuple(others), accepted=tuple(accepted))  # fmt: skip
    sync_tree(work)
    write_record(artifact, work / LAYOUT_FILE)
    write_text_atomic(work / SEAL_FILE, seal(work / LAYOUT_FILE).decode())
    return artifact


def _put(work: Path, name: str, text: str) -> ShardFile:
    write_text_atomic(work / name, text)
    return stored(work, name)


def stored(work: Path, name: str) -> ShardFile:
    return ShardFile(file=name, num_bytes=(work / name).stat().st_size, checksum=hash_file(work / name, ALGORITHM))
