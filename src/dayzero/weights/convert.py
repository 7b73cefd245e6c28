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
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dayzero.core.artifact import ArtifactLayout, ArtifactQuantization, LedgerCounts, ShardFile, WeightsReport
from dayzero.core.errors import DayZeroError
from dayzero.core.model import ModelDescription, Problem
from dayzero.core.plan import Layout
from dayzero.core.records import read_record, to_dict, write_text_atomic
from dayzero.core.units import MIB
from dayzero.model.release import Release, damaged
from dayzero.weights.changes import NO_CHANGES, Changes
from dayzero.weights.checks.examining import check_published, judge_values, require_accepted, require_readable
from dayzero.weights.files import Progress
from dayzero.weights.finishing import finish, source_list
from dayzero.weights.forms.plain_config import QUANTIZATION_FILES, plain_config
from dayzero.weights.ledger import SourceFile, SourceTensor, read_lines
from dayzero.weights.loading import CheckpointSource, open_checkpoint
from dayzero.weights.placement import place
from dayzero.weights.places.publishing import Output, kept_if_sound, open_output
from dayzero.weights.places.stores import Source, open_source
from dayzero.weights.places.workfolder import KEY_FILE
from dayzero.weights.proof.expected import QUANTIZATION_FILE, RELEASE_FOLDER
from dayzero.weights.proof.verify import LAYOUT_FILE, SEAL_FILE, SOURCES_FILE, STATE_FILE, source_problems
from dayzero.weights.quantize.artifact import quantize_checkpoint
from dayzero.weights.running import HASHES_FILE, Copying
from dayzero.weights.writing import DONE_SUFFIX

# Beside the release's settings, small files travel along (licence, readme, code); larger ones are no settings.
MAX_RELEASE_FILE_BYTES = 256 * MIB


def artifact_key(source_hash: str, layout: Layout, changes: Changes = NO_CHANGES) -> str:
    """The name of the artifact of these inputs: the same inputs give the same key anywhere."""
    identity = {"source": source_hash, "layout": to_dict(layout), "changes": changes.identity, "version": 2}
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:24]


def convert(
    source: Path | str, model: ModelDescription, layout: Layout, out: Path | str, *,
    changes: Changes = NO_CHANGES, progress: Progress | None = None, workers: int = 2,
    keep: Path | None = None, spool: Path | None = None,
) -> WeightsReport:  # fmt: skip
    """Write the Artifact of `source` for `layout` to the folder or address `out`, or reuse the one that is there.

    changes: what becomes of the numbers; by itself every plain tensor keeps its stored dtype, and codes become plain.
    keep: a folder that gets a copy of what goes to an address. spool: a folder in which the weights from an address lie until
    this is done, so that what several ranks need is fetched once.
    Raises DayZeroError for an unsound checkpoint (nothing is then written), a full disk, or an `out` that is something else.
    """
    started = time.monotonic()
    with open_source(source, spool=spool, allow_pickle=changes.allow_pickle) as opened:
        require_readable(opened)
        with open_output(out, complete=LAYOUT_FILE, keep=keep) as output:
            return _convert(opened, model, layout, str(out), output, changes, progress, workers, started)


def _convert(
    source: Source, model: ModelDescription, layout: Layout, out: str, output: Output,
    changes: Changes, progress: Progress | None, workers: int, started: float,
) -> WeightsReport:  # fmt: skip
    release, work, there = source.release, output.work, output.existing()
    key = artifact_key(release.source_hash, layout, changes)
    state = json.dumps([to_dict(one) for one in source_files(source)], indent=1) + "\n"
    if there is not None and (reused := _reusable(out, output, there, key, source, state, progress)) is not None:
        output.discard()
        require_accepted(reused.accepted, changes, source.address)
        return report(out, there, reused, reused.accepted, 0, 0, started, reused=True)
    decoded = source.decode(changes.dtype or model.dtype, upcast_unscaled=changes.upcast_unscaled)
    checkpoint = open_checkpoint(release, model, source.store, decoded=decoded)
    published = check_published(source, progress=progress, workers=workers)
    config = settled_config(release, model, checkpoint, changes)
    quantized = None
    if changes.quantize is not None:
        quantized = quantize_checkpoint(checkpoint, model, changes.quantize, given=changes.given)
        model, checkpoint = quantized.model, quantized.checkpoint
    files, problems = place(checkpoint.views, model, layout, dtype=changes.dtype)
    if problems:
        raise damaged(problems, source.address)
    artifact = _complete(work, key, state)
    output.begin(f"{key}\n{state}", keep=artifact is not None)
    reader = checkpoint.reader()
    sums = quantized.rewritten.by_stored if quantized is not None else {}
    copying = Copying(work, files, reader, made=checkpoint.made, hash_sources=checkpoint.used, progress=progress,
                      workers=workers, output=output, errors=sums)  # fmt: skip
    values = artifact.accepted if artifact is not None else ()
    require_accepted(values, changes, source.address)
    if artifact is None:
        with kept_if_sound(output):
            written = copying.run()
            values = judge_values(copying.statistics, copying.source_checksums, release.tensors, source.address,
                                  accept=changes.accept_values)  # fmt: skip
        sources = source_list(release.tensors, checkpoint.dropped, checkpoint.warnings, copying.source_checksums)
        artifact = finish(
            work, key=key, state=state, source_hash=release.source_hash, model=model, layout=layout, dtype=changes.dtype,
            written=[(planned.rank, one) for planned, one in zip(files, written, strict=True)], sources=sources,
            settings=copy_settings(release, work / RELEASE_FOLDER, config=config),
            quantization=quantized.record() if quantized is not None else None, accepted=values,
        )  # fmt: skip
    for scrap in (*work.rglob("*" + DONE_SUFFIX), work / HASHES_FILE, work / KEY_FILE):
        scrap.unlink(missing_ok=True)
    records = output.seal(_sizes(work, artifact))
    told = release.problems + checkpoint.warnings + published + values + left_out(release)
    return report(out, records, artifact, told, reader.bytes_read, copying.bytes_written, started)


def settled_config(
    release: Release, model: ModelDescription, checkpoint: CheckpointSource, changes: Changes
) -> dict[str, Any] | None:
    """What the release's config says of its numbers once they are plain, or of another dtype; None where nothing changes."""
    plain = changes.dtype or (model.dtype if checkpoint.was_coded else None)
    return None if plain is None else plain_config(release.config, plain)


def copy_settings(release: Release, folder: Path, *, config: Mapping[str, Any] | None = None) -> list[str]:
    """Config, tokenizer, templates, licence and code of a release, copied and never run.

    config: what config.json is to say when it is not to be a copy; settings of stored codes beside it stay behind then.
    """
    folder.mkdir(exist_ok=True)
    small = {name for name in release.other_files if release.path(name).stat().st_size <= MAX_RELEASE_FILE_BYTES}
    names = sorted(({"config.json"} | small) - (set(QUANTIZATION_FILES) if config is not None else set()))
    for name in names:
        shutil.copyfile(release.path(name), folder / name)
    if config is not None:
        write_text_atomic(folder / "config.json", json.dumps(config, indent=2, ensure_ascii=False) + "\n")
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


def _complete(work: Path, key: str, state: str) -> ArtifactLayout | None:
    """The artifact that an earlier run finished in the work folder and was killed before publishing."""
    if not (work / SEAL_FILE).is_file() or not (work / STATE_FILE).is_file():
        return None
    artifact = read_record(ArtifactLayout, work / LAYOUT_FILE)
    return artifact if artifact.key == key and (work / STATE_FILE).read_text(encoding="utf-8") == state else None


def _sizes(work: Path, artifact: ArtifactLayout) -> dict[str, int]:
    """All files of an artifact."""
    sizes = {one.file: one.num_bytes for one in _listed(artifact)}
    return sizes | {name: (work / name).stat().st_size for name in (LAYOUT_FILE, SEAL_FILE)}


def _listed(artifact: ArtifactLayout) -> list[ShardFile]:
    return [one for rank in artifact.files for one in rank] + [*artifact.ledgers, *artifact.release_files]


def source_files(source: Source) -> list[SourceFile]:
    return source.store.states(sorted({entry.file for entry in source.release.tensors.values()}))


def _reusable(
    out: str, output: Output, there: Path, key: str, source: Source, state: str, progress: Progress | None
) -> ArtifactLayout | None:
    """The finished artifact at `out` when it is this one, whole in size and made from the source as it is now. Its records
    are in the folder `there`."""
    artifact = read_record(ArtifactLayout, there / LAYOUT_FILE)
    if artifact.key != key:
        raise DayZeroError(f"{out} holds another artifact", got=f"key {artifact.key} of {artifact.model}", want=f"key {key}",
                           fix="choose another --out or remove it")  # fmt: skip
    if not output.holds(_listed(artifact)):
        return None
    if (there / STATE_FILE).read_text(encoding="utf-8") == state:
        return artifact
    # Same headers, other files: the same bytes copied again, or other weights of the same shape. Only reading can tell.
    return None if source_problems(there, source.release, progress, source.store) else artifact


def report(
    out: str, records: Path, artifact: ArtifactLayout, problems: tuple[Problem, ...], bytes_read: int, bytes_written: int,
    started: float, *, reused: bool = False,
) -> WeightsReport:  # fmt: skip
    """`records`: the folder of the artifact's records."""
    sources = list(read_lines(SourceTensor, records / SOURCES_FILE))
    dropped = {one.tensor: one.dropped for one in sources if one.dropped is not None}
    filled = len(
        {json.loads(line)["parameter"] for one in artifact.ledgers for line in (records / one.file).open(encoding="utf-8")}
    )
    recorded = records / QUANTIZATION_FILE
    made = read_record(ArtifactQuantization, recorded) if artifact.quantization is not None else None
    counts = LedgerCounts(source_bytes=sum(one.num_bytes for one in sources), dropped=dropped, filled_parameters=filled,
                          used_bytes=sum(one.num_bytes for one in sources if one.dropped is None))  # fmt: skip
    return WeightsReport(artifact=out, key=artifact.key, ledger=counts, problems=problems, bytes_read=bytes_read,
                         bytes_written=bytes_written, seconds=round(time.monotonic() - started, 3), reused=reused,
                         quantize=made)  # fmt: skip
