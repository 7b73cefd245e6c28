"""A release in, a GGUF file out: weights as f16, bf16, q8_0, q4_0 or q4_1, by the gguf package, a run of rows at a time.

The header is written first, over a hole in place of the data, and read back with `read_gguf` and transformers' tokenizer:
what they would make otherwise than the release has it is refused, or said where the file is right and transformers does not
look at that key. Only then are weights read. A release in a quantized form is decoded exactly first. The file has a hidden
name until it is whole.
What is stored how: matrices of attention, dense and expert layers and recurrent projections in the asked form where their rows
are whole blocks of 32; embeddings too; the head (or the embedding that is also the head) in q8_0 where 4 bits are asked for,
as the format's own tools do; routers, norms, vectors and anything else in f32.
In memory at once: the header, and of one tensor CHUNK_ELEMENTS (or the rows of one head) with a dozen bytes each; a tensor as a
whole where reading moves its elements (a transposition), and what a class computes from whole tensors.
Not here: files in several parts, towers of other media, draft layers.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

from dayzero.core.artifact import TensorError
from dayzero.core.errors import DayZeroError
from dayzero.core.model import ModelDescription, Problem
from dayzero.model.describe import describe_release
from dayzero.model.release import Release, damaged
from dayzero.model.resolve import Resolved, resolve
from dayzero.weights.algebra import View
from dayzero.weights.convert import left_out
from dayzero.weights.files import Progress, sync_folder
from dayzero.weights.gguf.encoding import FORMS, encoded, form_of, num_bytes, numbers, padded
from dayzero.weights.gguf.fetched import TOKEN_KEYS
from dayzero.weights.gguf.inverse import Inverter, Outgoing
from dayzero.weights.gguf.metadata import Settings, architecture_of, differences, names_of, processor_of, settings_of
from dayzero.weights.gguf.source import read_gguf
from dayzero.weights.gguf.vocabulary import Vocabulary, check_vocabulary, vocabulary_of
from dayzero.weights.loading import CheckpointSource, open_checkpoint
from dayzero.weights.places.stores import open_source
from dayzero.weights.quantize.encoding import ViewRows
from dayzero.weights.quantize.evidence import ErrorSums
from dayzero.weights.symbolic import torch_dtype


@dataclass(frozen=True, kw_only=True, slots=True)
class GgufReport:
    """`forms`: of each tensor of the file, by its name there. `errors`: what that cost, where anything was lost."""

    file: str
    architecture: str
    forms: dict[str, str]
    errors: tuple[TensorError, ...]
    problems: tuple[Problem, ...]
    bytes_read: int
    bytes_written: int
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class _Plan:
    """All that is known before a weight is read. `forms` by the file's names."""

    settings: Settings
    inverter: Inverter
    tensors: list[Outgoing]
    forms: dict[str, str]
    vocabulary: Vocabulary | None
    config: Any


def export_gguf(source: Path | str, out: Path, form: str, progress: Progress | None = None, *,
                pre: str | None = None) -> GgufReport:  # fmt: skip
    """Write `out`. `pre`: the format's name for the way the tokenizer splits text, where that cannot be found.

    Raises DayZeroError for an unsound source, an architecture or tokenizer without a GGUF form, a config that the file could
    not say, numbers that the form cannot hold, a full disk, or an `out` that is in the way; nothing is left then.
    """
    started = time.monotonic()
    if form not in FORMS:
        raise DayZeroError(f"unknown GGUF form {form!r}", got=form, want=", ".join(FORMS), fix="choose one of these")
    if out.exists():
        raise _in_the_way(out)
    with open_source(source) as opened:
        release = opened.release.require_weights()
        model = describe_release(release)
        checkpoint = open_checkpoint(release, model, opened.store)
        plan = _plan(release, model, checkpoint, form, pre)
        with _hidden_file(out) as work:
            size = _write_header(work, plan, form, release.name)
            try:
                problems = _read_back(work, plan, checkpoint)
            except DayZeroError as error:  # says the name that the user knows
                raise DayZeroError(error.what.replace(work.name, out.name), got=error.got.replace(work.name, out.name),
                                   want=error.want, fix=error.fix) from error  # fmt: skip
            with checkpoint.reader() as reader, work.open("r+b") as target:
                errors, more = _write_weights(target, plan, checkpoint.views, ViewRows(reader), progress)
                target.flush()
                os.fsync(target.fileno())
            assert work.stat().st_size == size, (work.stat().st_size, size)
            if out.exists():
                raise _in_the_way(out)
            work.rename(out)
        sync_folder(out.parent)
        notes = (*release.problems, *checkpoint.warnings, *problems, *more, *left_out(release))
    return GgufReport(file=str(out), architecture=plan.settings.architecture, forms=plan.forms, errors=tuple(errors),
                      problems=notes, bytes_read=reader.bytes_read, bytes_written=size,
                      seconds=round(time.monotonic() - started, 3))  # fmt: skip


def _plan(release: Release, model: ModelDescription, checkpoint: CheckpointSource, form: str, pre: str | None) -> _Plan:
    resolved = resolve(release)
    assert isinstance(resolved, Resolved), resolved  # open_checkpoint has refused others
    instance = resolved.build(torch_dtype(model.dtype))
    settings = settings_of(instance.config, architecture_of(instance))
    processor = processor_of(settings)
    inverter = Inverter(processor, names_of(instance, processor))
    tied: Any = getattr(instance, "all_tied_weights_keys", None) or {}
    parameters = {one.name: one for one in model.parameters}
    wanted = {
        name: view.shape for name, view in checkpoint.views.items() if name not in tied and not parameters[name].is_buffer
    }
    tensors, lost = inverter.outgoing(wanted)
    if lost:
        more = f", and {len(lost) - 3} more" if len(lost) > 3 else ""
        raise DayZeroError(f"{release.name} has no GGUF form: {len(lost)} of its parameters",
                           got="; ".join(f"{name}: {why}" for name, why in list(lost.items())[:3]) + more,
                           want="parameters that transformers makes of a GGUF's tensors",
                           fix="export to another format: `dayzero convert --to hf`")  # fmt: skip
    heads = {name for name, one in parameters.items() if one.role == "head" and one.tied_to is None} | set(tied.values())
    forms = {one.name: form_of(one, parameters[one.parameter], form, head=one.parameter in heads) for one in tensors}
    table = next((parameters[one.parameter] for one in tensors if parameters[one.parameter].role == "embedding"), None)
    vocabulary = vocabulary_of(release, table.shape[0] if table else 0, pre)
    return _Plan(
        settings=settings, inverter=inverter, tensors=tensors, forms=forms, vocabulary=vocabulary, config=instance.config
    )


def _write_header(work: Path, plan: _Plan, form: str, name: str) -> int:
    """The header, and a hole for the data; the size of the whole file."""
    import gguf

    writer = gguf.GGUFWriter(work, plan.settings.architecture)
    writer.add_type("model")
    writer.add_name(name)
    kinds = next(one for one in vars(gguf.constants).values() if hasattr(one, f"MOSTLY_{form.upper()}"))  # kinds of files
    writer.add_file_type(kinds[f"MOSTLY_{form.upper()}"])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    for key, value in (plan.settings.values | (plan.vocabulary.values if plan.vocabulary else _ids(plan.config))).items():
        _add(writer, key, value)
    sizes = {one.name: num_bytes(one.shape, plan.forms[one.name]) for one in plan.tensors}
    for one in plan.tensors:
        kind = gguf.GGMLQuantizationType[plan.forms[one.name]]
        writer.add_tensor_info(one.name, one.shape, np.dtype(np.float32), sizes[one.name], raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    total = padded(work.stat().st_size) + sum(padded(size) for size in sizes.values())
    if (free := shutil.disk_usage(work.parent).free) < total:
        raise DayZeroError(f"not enough space beside {work.name}", got=f"{free} bytes", want=f"{total} bytes",
                           fix="free space, or choose another --out")  # fmt: skip
    os.truncate(work, total)
    return total


def _ids(config: Any) -> dict[str, int]:
    """The special tokens that a config names, for a release without a tokenizer."""
    ids = {key: getattr(config, f"{name}_token_id", None) for key, name in TOKEN_KEYS.items()}
    return {f"tokenizer.ggml.{key}": value for key, value in ids.items() if isinstance(value, int)}


def _add(writer: Any, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value) if value >= 0 else writer.add_int32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, list(value))


def _read_back(work: Path, plan: _Plan, checkpoint: CheckpointSource) -> list[Problem]:
    """What readers of the file get otherwise than the release has it. Raises DayZeroError where the file does not say it."""
    read = read_gguf(work)
    found = {"model_type": (plan.config.model_type, read.config["model_type"])}
    if read.config["model_type"] == plan.config.model_type:
        found = differences(plan.config, type(plan.config).from_dict(read.config))
    unsaid = {key: values for key, values in found.items() if key not in plan.settings.held}
    if unsaid:
        listed = (f"{key} is {one}, a reader of the file takes {other}" for key, (one, other) in unsaid.items())
        raise DayZeroError(f"{plan.config.model_type}: a GGUF cannot say all of this config", got="; ".join(listed),
                           want="values that the format has keys for, or that readers take by default",
                           fix="export to another format: `dayzero convert --to hf`")  # fmt: skip
    shapes = {one.parameter: checkpoint.views[one.parameter].shape for one in plan.tensors}
    other = [problem for problem in read.problems if problem.kind != "config_differs"]
    if other or {name: entry.shape for name, entry in read.tensors.items()} != shapes:
        raise damaged(other, str(work)) if other else AssertionError((shapes, read.tensors))
    problems = [
        Problem(kind="reader_differs", severity="warning",
                detail=f"{key} is {one} in the file as in the release; transformers does not read it there and takes {taken}")
        for key, (one, taken) in found.items()
    ]  # fmt: skip
    if plan.vocabulary is None:
        none = Problem(kind="no_tokenizer", severity="warning", detail="the release has no tokenizer, nor has the file")
        return [*problems, none]
    problems += plan.vocabulary.problems + check_vocabulary(work, read.header.metadata, plan.vocabulary)
    for key, name in TOKEN_KEYS.items():
        asked = getattr(plan.config, f"{name}_token_id", None)
        said = plan.vocabulary.values.get(f"tokenizer.ggml.{key}")
        if asked is not None and asked != said:
            detail = f"{name}_token_id is {asked} in the config; the file says {said}, as the tokenizer does"
            problems.append(Problem(kind="token_id_differs", severity="warning", detail=detail))
    return problems


def _write_weights(
    target: BinaryIO, plan: _Plan, views: Mapping[str, View], rows: ViewRows, progress: Progress | None
) -> tuple[list[TensorError], list[Problem]]:
    total = sum(num_bytes(one.shape, plan.forms[one.name]) for one in plan.tensors)
    at = target.seek(0, os.SEEK_END) - sum(padded(num_bytes(one.shape, plan.forms[one.name])) for one in plan.tensors)
    done, errors, problems = 0, [], []
    for one in plan.tensors:
        target.seek(at)
        form = plan.forms[one.name]
        sums, changed = ErrorSums(one.parameter, form.lower()), 0
        for start, values in numbers(one, views[one.parameter], rows, plan.inverter):
            stored = values.to(torch.float32) - one.added
            if one.added:  # read again it is rounded once more
                changed += int(((stored + one.added).to(values.dtype) != values).sum())
            data, made = encoded(one, stored, form)
            sums.add(start, stored, made)
            target.write(np.ascontiguousarray(data).data)
            done += data.nbytes
            if progress:
                progress("writing the GGUF file", done, total)
        at += padded(num_bytes(one.shape, form))
        if form != "F32" and (error := sums.result()).max_abs:
            errors.append(error)
        if changed:
            detail = (f"{one.parameter}: readers add {one.added:g} to what is stored, and {changed} of its numbers come out "
                      "rounded")  # fmt: skip
            problems.append(Problem(kind="rounded", severity="warning", tensor=one.parameter, detail=detail))
    return errors, problems


@contextlib.contextmanager
def _hidden_file(out: Path) -> Iterator[Path]:
    """A file beside `out` that this process alone writes. Gone in the end, unless it was renamed."""
    work = out.with_name(f".{out.name}.partial")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(work, os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o644)
    except OSError as error:
        raise DayZeroError(f"cannot write beside {out}", got=error.strerror or str(error), want="a writable folder",
                           fix="choose another --out") from error  # fmt: skip
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise DayZeroError(f"another export to {out} is running", got="a locked file", want="one export at a time",
                           fix="wait for it, or choose another --out") from None  # fmt: skip
    try:
        yield work
    except OSError as error:
        raise DayZeroError(f"cannot write {out}", got=error.strerror or str(error), want="space and permission beside it",
                           fix="free space or raise the limit, then run it again") from error  # fmt: skip
    finally:
        work.unlink(missing_ok=True)
        os.close(handle)


def _in_the_way(out: Path) -> DayZeroError:
    return DayZeroError(f"{out} is in the way", got="something with that name", want="a new file",
                        fix="choose another --out or remove it")  # fmt: skip
