"""A release folder or an Artifact in, an ordinary Hugging Face folder out: shards with an index, values bit for bit
where nothing else was asked for.

Of a release, also in another dtype, in plain numbers, or quantized (`origin`); of an artifact, the inverse of conversion
(`inverse`).
"""

from __future__ import annotations

import contextlib
import json
import time
from dataclasses import replace
from pathlib import Path

from dayzero.core.artifact import LedgerCounts, WeightsReport
from dayzero.core.errors import DayZeroError
from dayzero.core.model import Problem
from dayzero.core.records import to_dict, write_record, write_text_atomic
from dayzero.model.release import CONFIG, open_release
from dayzero.model.remote.objects import is_remote
from dayzero.weights.changes import NO_CHANGES, Changes
from dayzero.weights.checks.examining import check_published, judge_values
from dayzero.weights.convert import copy_settings, left_out
from dayzero.weights.files import Progress
from dayzero.weights.inverse import artifact_origin
from dayzero.weights.origin import Origin, release_origin
from dayzero.weights.placement import pack_files
from dayzero.weights.places.publishing import kept_if_sound, open_output
from dayzero.weights.places.stores import has_file, open_artifact, open_source
from dayzero.weights.places.workfolder import KEY_FILE
from dayzero.weights.proof.verify import LAYOUT_FILE
from dayzero.weights.running import HASHES_FILE, Copying
from dayzero.weights.writing import DONE_SUFFIX

SHARD_BYTES = 5 * 10**9  # what transformers writes by default
EVIDENCE_FILE = "dayzero_quantization.json"
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


def export(
    source_or_artifact: Path | str, out: Path | str, *, changes: Changes = NO_CHANGES, shard_bytes: int = SHARD_BYTES,
    progress: Progress | None = None, workers: int = 2,
) -> WeightsReport:  # fmt: skip
    """Write `out`, a folder or address. Raises DayZeroError for an unsound source, values that no sound checkpoint has, a full
    disk, or an `out` that is in the way."""
    started = time.monotonic()
    with contextlib.ExitStack() as stack:
        origin, published = _opened(source_or_artifact, stack, changes, progress, workers)
        out_folder = None if is_remote(out) else Path(out)
        if out_folder is not None and out_folder.exists() and (not out_folder.is_dir() or any(out_folder.iterdir())):
            raise _in_the_way(out)
        output = stack.enter_context(open_output(out, complete=CONFIG))  # without it nothing can be loaded
        if output.existing() is not None:
            raise _in_the_way(out)
        work = output.work
        states = [to_dict(one) for one in origin.store.states(sorted({entry.file for entry in origin.tensors.values()}))]
        output.begin(f"{origin.identity}\n{shard_bytes}\n{json.dumps(changes.identity)}\n{json.dumps(states)}\n")
        files = tuple(pack_files(list(origin.views.items()), rank=0, folder="", file_bytes=shard_bytes))
        if len(files) == 1:
            files = (replace(files[0], file=SINGLE),)
        reader = origin.reader
        used = [name for name in origin.tensors if name not in origin.dropped] if origin.is_release else []
        copying = Copying(work, files, reader, made=origin.made, hash_sources=used, progress=progress, workers=workers,
                          output=output, errors=origin.errors)  # fmt: skip
        values: tuple[Problem, ...] = ()
        with kept_if_sound(output):
            copying.run()
            if origin.is_release:
                values = judge_values(copying.statistics, copying.source_checksums, origin.tensors, str(source_or_artifact),
                                      accept=changes.accept_values)  # fmt: skip
        for scrap in (*work.rglob("*" + DONE_SUFFIX), work / HASHES_FILE):
            scrap.unlink(missing_ok=True)
        total = sum(tensor.num_bytes for one in files for tensor in one.tensors)
        if len(files) > 1:
            weight_map = {tensor.parameter: one.file for one in files for tensor in one.tensors}
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            write_text_atomic(work / INDEX, json.dumps(index, indent=2) + "\n")
        settings = open_release(origin.settings)
        copy_settings(settings, work, config=origin.config)
        record = None
        if origin.quantized is not None:
            record = origin.quantized.record()
            write_record(record, work / EVIDENCE_FILE)
        origin.problems += [*published, *values, *left_out(settings)]
        (work / KEY_FILE).unlink()
        others = {path.name: path.stat().st_size for path in work.iterdir() if path.is_file()}
        output.seal({one.file: one.num_bytes for one in files} | others)
    sizes = {name: entry.num_bytes for name, entry in origin.tensors.items()}
    counts = LedgerCounts(source_bytes=sum(sizes.values()), filled_parameters=len(origin.views), dropped=origin.dropped,
                          used_bytes=sum(size for name, size in sizes.items() if name not in origin.dropped))  # fmt: skip
    return WeightsReport(artifact=str(out), key=origin.identity, ledger=counts, problems=tuple(origin.problems),
                         bytes_read=reader.bytes_read, bytes_written=copying.bytes_written,
                         seconds=round(time.monotonic() - started, 3), quantize=record)  # fmt: skip


def _opened(
    place: Path | str, stack: contextlib.ExitStack, changes: Changes, progress: Progress | None, workers: int
) -> tuple[Origin, tuple[Problem, ...]]:
    """A release or an artifact, a folder or an address, open for as long as `stack` is; and what is told of its digests."""
    if has_file(place, LAYOUT_FILE):
        if changes.identity:
            raise DayZeroError("an artifact is turned back as it is", got=", ".join(changes.identity), want="no changes",
                               fix="give the release instead of the artifact")  # fmt: skip
        found = stack.enter_context(open_artifact(place))
        return artifact_origin(found.folder, found.store), ()
    source = stack.enter_context(open_source(place, allow_pickle=changes.allow_pickle))
    origin = release_origin(source, changes)
    return origin, check_published(source, progress=progress, workers=workers)


def _in_the_way(out: Path | str) -> DayZeroError:
    return DayZeroError(f"{out} is in the way", got="a folder that is not empty", want="a new or empty folder",
                        fix="choose another --out or remove it")  # fmt: skip
