"""A GGUF file in, a checkpoint under the model's own names out: byte ranges, and decoders for what is quantized or processed.

The config, the names and the processing of tensors are transformers' own (`modeling_gguf_pytorch_utils`); blocks are turned
into numbers by the format's own package, only those of the rows asked for. What transformers skips silently is a problem
here: a tensor it has no name for, a part that nothing fills. The header is checked before either of them sees the file.
A GGUF has no settings files: `settings` makes them.
Not here: files in several parts, adapters, towers of other media.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from dayzero.core.errors import DayZeroError
from dayzero.core.model import Problem
from dayzero.model.classes import build_on_meta, causal_class
from dayzero.model.headers import ShardHeader, TensorEntry
from dayzero.model.release import Release, damaged, open_release
from dayzero.weights.decoding import Decoder
from dayzero.weights.gguf.config import config_object, config_values, differences_from_file, unreadable_file
from dayzero.weights.gguf.decoding import WholeTensors, moved_rows, num_rows, unreadable
from dayzero.weights.gguf.header import GgufHeader, GgufTensor, read_gguf_header
from dayzero.weights.gguf.rows import Changed, Made, Moved, trace

# Stored as plain numbers: a byte range, where it is not processed. The gguf package has no others transformers reads.
PLAIN = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


@dataclass(frozen=True, kw_only=True, slots=True)
class GgufSource:
    """`tensors`: all by the model's names, as if they were stored plainly; of these `decoders` are made of `stored` ones.
    `stored`: every tensor of the file once, a plain one by its name in the model, others by the file's name as bytes."""

    path: Path
    header: GgufHeader
    config: dict[str, Any]
    tensors: dict[str, TensorEntry]
    decoders: dict[str, Decoder]
    stored: dict[str, TensorEntry]
    forms: dict[str, str]  # of each tensor of the model, as the format calls it: Q4_K
    problems: tuple[Problem, ...]

    def release(self, settings: Path | None = None, *, logical: bool = False) -> Release:
        """As a release, with the settings files of that folder where there is one. Its tensors are the `stored` ones, or the
        `logical` ones for those who only look at names and shapes."""
        tensors = self.tensors if logical else self.stored
        shard = ShardHeader(file=self.path.name, num_bytes=self.header.num_bytes, data_begin=self.header.data_begin,
                            tensors=self.stored, header_hash=self.header.header_hash)  # fmt: skip
        parts: dict[str, Any] = dict(
            shards={self.path.name: shard}, tensors=tensors,
            header_tensors={self.path.name: tuple(sorted(self.stored, key=lambda name: self.stored[name].begin))},
        )  # fmt: skip
        if settings is not None:
            found = open_release(settings)
            return replace(found, name=self.path.stem, problems=found.problems + self.problems,
                           source_hash=f"{found.source_hash}{self.header.header_hash}", **parts)  # fmt: skip
        return Release(folder=self.path.parent, name=self.path.stem, config=self.config, generation_config=None,
                       tokenizer_config=None, tokenizer_files=(), other_files=(), problems=self.problems,
                       source_hash=self.header.header_hash, **parts)  # fmt: skip


def read_gguf(path: Path, dtype: str = "bfloat16") -> GgufSource:
    """The checkpoint in a GGUF file. `dtype`: what quantized and computed tensors become; plain ones keep theirs.

    Raises DayZeroError for an unsound header, and where transformers cannot read this kind of file.
    """
    header, problems = read_gguf_header(path)
    if header is None or problems:
        raise damaged(problems, str(path))
    _require_one_part(path, header)
    from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

    read = config_values(path, header)
    config = config_object(path, read)
    try:
        processor = TENSOR_PROCESSORS.get(header.metadata["general.architecture"], TensorProcessor)(config=read)
        with name_tables_kept():
            names = get_gguf_hf_weights_map(build_on_meta(config), processor)
    except DayZeroError:
        raise
    except Exception as error:  # transformers raises many types; all of them are about the user's file
        raise unreadable_file(path, error) from error
    made, lost = trace(processor, names, {name: one.shape for name, one in header.tensors.items()})
    source = _Source(path.name, header, dtype, processor, names)
    for target, one in made.items():
        source.add(target, one)
    for name, reason in lost.items():
        source.note("unused_tensor", f"{name} ({header.tensors[name].form}) fills no parameter: {reason}", name)
    source.check_use(made)
    for difference in differences_from_file(header.metadata, config):
        source.note("config_differs", f"transformers' config disagrees with the file: {difference}")
    described = json.loads(config.to_json_string(use_diff=True))
    cls = causal_class(config)
    assert cls is not None, config  # build_on_meta has found one
    described |= {"architectures": [cls.__name__], "dtype": dtype}
    return GgufSource(path=path, header=header, config=described, tensors=source.tensors, decoders=source.decoders,
                      stored=source.stored, forms=source.forms, problems=tuple(source.problems))  # fmt: skip


def main_dtype(source: GgufSource) -> str:
    """The dtype of the file's plain matrices where most of its bytes are such; else bfloat16, which its codes become."""
    sizes: dict[str, int] = {}
    for name, entry in source.stored.items():
        if name in source.tensors and name not in source.decoders and len(entry.shape) > 1:
            sizes[entry.dtype] = sizes.get(entry.dtype, 0) + entry.num_bytes
    total = sum(entry.num_bytes for entry in source.stored.values())
    return next((dtype for dtype, size in sizes.items() if 2 * size > total), "bfloat16")


class _Source:
    """Tensors of the model collected one by one."""

    def __init__(self, file: str, header: GgufHeader, dtype: str, processor: Any, names: Mapping[str, str]) -> None:
        self.file, self.header, self.dtype, self.processor, self.names = file, header, dtype, processor, names
        self.tensors: dict[str, TensorEntry] = {}
        self.decoders: dict[str, Decoder] = {}
        self.stored: dict[str, TensorEntry] = {}
        self.forms: dict[str, str] = {}
        self.problems: list[Problem] = []
        self._unreadable: dict[str, str] = {}  # by form: why

    def note(self, kind: str, detail: str, tensor: str | None = None) -> None:
        self.problems.append(
            Problem(kind=kind, severity="error", file=self.file, tensor=tensor, detail=f"{self.file}: {detail}")
        )

    def add(self, target: str, made: Made) -> None:
        stored = [self.header.tensors[name] for name in made.sources]
        self.forms[target] = "+".join(dict.fromkeys(one.form for one in stored))
        for name, one in zip(made.sources, stored, strict=True):
            if one.form not in self._unreadable:
                self._unreadable[one.form] = unreadable(one.form)
            if reason := self._unreadable[one.form]:
                self.note("unknown_form", f"{name} is stored as {one.form}, which cannot be decoded: {reason}", name)
                return
        if made.incomplete:
            self.note("incomplete_tensor", f"{target}: {made.incomplete} of its rows are in no tensor of the file (it is made "
                      f"of {', '.join(made.sources)})", made.sources[0])  # fmt: skip
            return
        first = stored[0]
        if (
            isinstance(made.how, Moved)
            and first.form in PLAIN
            and len(stored) == 1
            and made.how.is_whole(num_rows(first.shape))
        ):
            entry = TensorEntry(file=self.file, dtype=PLAIN[first.form], shape=made.how.shape, begin=first.begin, end=first.end)
            self.tensors[target] = self.stored[target] = entry
            return
        for name, one in zip(made.sources, stored, strict=True):
            self.stored[name] = TensorEntry(file=self.file, dtype="uint8", shape=(one.end - one.begin,), begin=one.begin,
                                            end=one.end)  # fmt: skip
        self.decoders[target] = decoder = self._decoder(target, made, stored)
        self.tensors[target] = decoder.entry(self.stored[made.sources[0]])

    def check_use(self, made: Mapping[str, Made]) -> None:
        """Rows of the file that reach no parameter, or several."""
        used: dict[str, int] = {}
        for one in made.values():
            if isinstance(one.how, Changed):
                used |= dict.fromkeys(one.sources, -1)  # whole
                continue
            source, _ = one.how.rows_between(0, one.how.rows)
            for at, count in zip(*np.unique(source[source >= 0], return_counts=True), strict=True):
                name = one.sources[int(at)]
                used[name] = used.get(name, 0) + int(count)
        for name, count in used.items():
            rows = num_rows(self.header.tensors[name].shape)
            if count not in (-1, rows):
                self.note("partly_used", f"{name}: {count} of its {rows} rows reach a parameter", name)
        for name in sorted({name for one in made.values() for name in one.sources} - set(used)):
            self.note("unused_tensor", f"{name} is overwritten by another tensor of the file", name)

    def _decoder(self, target: str, made: Made, stored: list[GgufTensor]) -> Decoder:
        operation = f"dequantize:gguf {self.forms[target]}"
        if isinstance(made.how, Changed):
            whole = WholeTensors(self.processor, self.names, self.dtype, target, made, stored)
            return Decoder(name=target, shape=made.how.shape, dtype=self.dtype, sources=made.sources, decode=whole.decode,
                           operation=f"{operation}, processed whole: {made.how.reason}")  # fmt: skip
        plain = {one.form for one in stored}
        kept = PLAIN[stored[0].form] if len(plain) == 1 and stored[0].form in PLAIN else None
        how = made.how
        rows = moved_rows(made.sources, stored, how, kept or self.dtype, kept is not None)
        moved = "" if how.is_whole(num_rows(stored[0].shape)) else ", rows moved"
        # Beside the row itself: its bytes, and the package's float32 steps from nibbles to numbers.
        work_bytes = how.shape[-1] * (4 if kept else 16)
        return Decoder(name=target, shape=how.shape, dtype=kept or self.dtype, sources=made.sources, decode=rows,
                       work_bytes=work_bytes,
                       operation=f"moved:gguf {stored[0].form}, rows moved" if kept else operation + moved,
                       row_step=how.step)  # fmt: skip


@contextmanager
def name_tables_kept() -> Iterator[None]:
    """transformers asks for the format's table of names once per module, always for the same one, which takes 20 to 150 ms to
    make: inside this it is made once. Measured on a model of 30 layers: 397 times, 19 s."""
    import gguf

    original = gguf.get_tensor_name_map
    gguf.get_tensor_name_map = functools.lru_cache(maxsize=4)(original)
    try:
        yield
    finally:
        gguf.get_tensor_name_map = original


def _require_one_part(path: Path, header: GgufHeader) -> None:
    if "general.architecture" not in header.metadata:
        raise DayZeroError(f"{path.name}: it does not say what it holds", got="no general.architecture", want="a model",
                           fix="take another file")  # fmt: skip
    parts = header.metadata.get("split.count", 1)
    if parts != 1:
        raise DayZeroError(f"{path.name}: one of several parts", got=f"part {header.metadata.get('split.no', '?')} of {parts}",
                           want="a GGUF file in one part", fix="join them with the format's `gguf-split --merge`")  # fmt: skip
