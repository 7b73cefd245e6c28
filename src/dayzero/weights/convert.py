"""A release folder, its description and a layout in; an Artifact (rank shards with ledgers) out, streamed.

Everything is checked before the first tensor is moved: the release, names and shapes through transformers' mapping, every
parameter filled, every tensor used or dropped for a stated reason, room on the disk. Work happens in a hidden folder
beside `out`, which becomes `out` by one rename; an interrupted run leaves that folder, and the next continues it after
re-reading what was finished. Memory does not grow with the checkpoint. Not here: quantizing or dequantizing.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from pathlib import Path

from dayzero.core.artifact import ArtifactLayout, LedgerCounts, LedgerEntry, ShardFile, WeightsReport
from dayzero.core.errors import DayZeroError
from dayzero.core.model import ModelDescription, Problem
from dayzero.core.plan import Layout
from dayzero.core.records import read_record, to_dict, write_record, write_text_atomic
from dayzero.core.units import MIB
from dayzero.model.release import Release, damaged, open_release
from dayzero.weights.files import Progress, hash_file, sync_tree
from dayzero.weights.ledger import ALGORITHM, SourceFile, SourceTensor, read_lines, to_line
from dayzero.weights.loading import CheckpointSource, open_checkpoint
from dayzero.weights.placement import place
from dayzero.weights.reading import LocalStore
from dayzero.weights.running import HASHES_FILE, Copying
from dayzero.weights.verify import LAYOUT_FILE, MODEL_FILE, SEAL_FILE, SOURCES_FILE, STATE_FILE, seal, source_problems
from dayzero.weights.workfolder import KEY_FILE, locked_work_folder, prepare, publish
from dayzero.weights.writing import DONE_SUFFIX, Written

RELEASE_FOLDER = "release"
# Beside the release's settings, small files travel along (licence, readme, code); larger ones are no settings.
MAX_RELEASE_FILE_BYTES = 256 * MIB


def artifact_key(source_hash: str, layout: Layout, *, dtype: str | None = None, quantization: str | None = None) -> str:
    """The name of the artifact of these inputs: the same inputs give the same key anywhere."""
    identity = {"source": source_hash, "layout": to_dict(layout), "dtype": dtype, "quantization": quantization, "version": 1}
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:24]


def convert(
    source: Path, model: ModelDescription, layout: Layout, out: Path, *,
    dtype: str | None = None, progress: Progress | None = None, workers: int = 2,
) -> WeightsReport:  # fmt: skip
    """Write the Artifact of `source` for `layout` to the folder `out`, or reuse the one that is there.

    dtype: what tensors of the release's main dtype become; None keeps every tensor's stored dtype.
    Raises DayZeroError for an unsound checkpoint (nothing is then written), a full disk, or an `out` that is something else.
    """
    started = time.monotonic()
    release = open_release(source)
    release.require_weights()
    key = artifact_key(release.source_hash, layout, dtype=dtype)
    state = json.dumps([to_dict(one) for one in source_files(release)], indent=1) + "\n"
    with locked_work_folder(out, complete=LAYOUT_FILE) as work:
        reused = _reusable(out, key, release, state, progress)
        if reused is not None:
            shutil.rmtree(work)
            return _report(out, reused, (), 0, 0, started, reused=True)
        checkpoint = open_checkpoint(release, model)
        files, problems = place(checkpoint.views, model, layout, dtype=dtype)
        if problems:
            raise damaged(problems, str(source))
        artifact = _complete(work, key, state)
        prepare(work, f"{key}\n{state}", keep=artifact is not None)
        reader = checkpoint.reader()
        copying = Copying(work, files, reader, made=checkpoint.made, hash_sources=checkpoint.used, progress=progress,
                          workers=workers)  # fmt: skip
        if artifact is None:
            written = copying.run()
            artifact = _finish(work, key, state, release, model, layout, dtype, checkpoint, copying, written)
        for scrap in (*work.rglob("*" + DONE_SUFFIX), work / HASHES_FILE, work / KEY_FILE):
            scrap.unlink(missing_ok=True)
        sync_tree(work)
        publish(work, out)
        return _report(out, artifact, release.problems + checkpoint.warnings + left_out(release), reader.bytes_read,
                       copying.bytes_written, started)  # fmt: skip


def _finish(
    work: Path, key: str, state: str, release: Release, model: ModelDescription, layout: Layout, dtype: str | None,
    checkpoint: CheckpointSource, copying: Copying, written: list[Written],
) -> ArtifactLayout:  # fmt: skip
    """Join the fragments, copy the release's settings, and write layout.json last, all in the work folder."""
    ledgers, files = [], []
    for rank in range(layout.num_devices):
        ones = [one for one, planned in zip(written, copying.files, strict=True) if planned.rank == rank]
        entries: list[LedgerEntry] = [entry for one in ones for entry in one.entries]
        ledgers.append(_put(work, f"rank-{rank:05d}/ledger.jsonl", "".join(map(to_line, entries))))
        files.append(tuple(one.file for one in ones))
    sources = (
        SourceTensor(tensor=name, file=entry.file, num_bytes=entry.num_bytes, dtype=entry.dtype, shape=entry.shape,
                     checksum=copying.source_checksums.get(name, ""), dropped=checkpoint.dropped.get(name))
        for name, entry in sorted(release.tensors.items())
    )  # fmt: skip
    others = [_put(work, SOURCES_FILE, "".join(map(to_line, sources))), _put(work, STATE_FILE, state)]
    write_record(model, work / MODEL_FILE)
    others.append(_stored(work, MODEL_FILE))
    for name in copy_settings(release, work / RELEASE_FOLDER):
        others.append(_stored(work, f"{RELEASE_FOLDER}/{name}"))
    artifact = ArtifactLayout(key=key, model=model.name, source_hash=release.source_hash, layout=layout,
                              dtype=dtype or model.dtype, quantization=None, files=tuple(files), ledgers=tuple(ledgers),
                              release_files=tuple(others))  # fmt: skip
    sync_tree(work)
    write_record(artifact, work / LAYOUT_FILE)
    write_text_atomic(work / SEAL_FILE, seal(work / LAYOUT_FILE).decode())
    return artifact


def copy_settings(release: Release, folder: Path) -> list[str]:
    """Config, tokenizer, templates, licence and code of a release, copied and never run."""
    folder.mkdir(exist_ok=True)
    names = sorted(
        name for name in {"config.json", *release.other_files} if release.path(name).stat().st_size <= MAX_RELEASE_FILE_BYTES
    )
    for name in names:
        shutil.copyfile(release.path(name), folder / name)
    return names


def left_out(release: Release) -> tuple[Problem, ...]:
    """What lies beside the weights and does not travel along: files past the size limit, and folders."""
    large = [name for name in release.other_files if release.path(name).stat().st_size > MAX_RELEASE_FILE_BYTES]
    folders = sorted(one.name for one in release.folder.iterdir() if one.is_dir() and not one.name.startswith("."))
    why = dict.fromkeys(large, f"more than {MAX_RELEASE_FILE_BYTES} bytes") | dict.fromkeys(folders, "a folder")
    return tuple(
        Problem(kind="file_not_copied", severity="warning", file=name, detail=f"{name} of the release is not copied: {reason}")
        for name, reason in why.items()
    )


def _put(work: Path, name: str, text: str) -> ShardFile:
    write_text_atomic(work / name, text)
    return _stored(work, name)


def _stored(work: Path, name: str) -> ShardFile:
    return ShardFile(file=name, num_bytes=(work / name).stat().st_size, checksum=hash_file(work / name, ALGORITHM))


def _complete(work: Path, key: str, state: str) -> ArtifactLayout | None:
    """The artifact that an earlier run finished in the work folder and was killed before publishing."""
    if not (work / SEAL_FILE).is_file() or not (work / STATE_FILE).is_file():
        return None
    artifact = read_record(ArtifactLayout, work / LAYOUT_FILE)
    return artifact if artifact.key == key and (work / STATE_FILE).read_text(encoding="utf-8") == state else None


def source_files(release: Release) -> list[SourceFile]:
    return LocalStore(release.folder).states(sorted({entry.file for entry in release.tensors.values()}))


def _reusable(out: Path, key: str, release: Release, state: str, progress: Progress | None) -> ArtifactLayout | None:
    """The finished artifact at `out` when it is this one, whole in size and made from the source as it is now."""
    if not (out / LAYOUT_FILE).is_file():
        return None
    artifact = read_record(ArtifactLayout, out / LAYOUT_FILE)
    if artifact.key != key:
        raise DayZeroError(f"{out} holds another artifact", got=f"key {artifact.key} of {artifact.model}", want=f"key {key}",
                           fix="choose another --out or remove it")  # fmt: skip
    listed = [one for rank in artifact.files for one in rank] + [*artifact.ledgers, *artifact.release_files]
    for one in listed:
        if not (out / one.file).is_file() or (out / one.file).stat().st_size != one.num_bytes:
            return None
    if (out / STATE_FILE).read_text(encoding="utf-8") == state:
        return artifact
    # Same headers, other files: the same bytes copied again, or other weights of the same shape. Only reading can tell.
    return None if source_problems(out, release, progress) else artifact


def _report(
    out: Path, artifact: ArtifactLayout, problems: tuple[Problem, ...], bytes_read: int, bytes_written: int, started: float,
    *, reused: bool = False,
) -> WeightsReport:  # fmt: skip
    sources = list(read_lines(SourceTensor, out / SOURCES_FILE))
    dropped = {one.tensor: one.dropped for one in sources if one.dropped is not None}
    filled = len(
        {json.loads(line)["parameter"] for one in artifact.ledgers for line in (out / one.file).open(encoding="utf-8")}
    )
    counts = LedgerCounts(source_bytes=sum(one.num_bytes for one in sources), dropped=dropped, filled_parameters=filled,
                          used_bytes=sum(one.num_bytes for one in sources if one.dropped is None))  # fmt: skip
    return WeightsReport(artifact=str(out), key=artifact.key, ledger=counts, problems=problems, bytes_read=bytes_read,
                         bytes_written=bytes_written, seconds=round(time.monotonic() - started, 3), reused=reused)  # fmt: skip
