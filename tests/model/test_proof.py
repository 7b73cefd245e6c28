"""`convert --verify`: a ledger that lies consistently is found, every flipped bit is named, no hole is ever filled silently.

The tampered artifacts here are resealed: all checksums are right, as a faulty or malicious converter would leave them.
Cites CK-11, CK-14, TP-03.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from dayzero.core.artifact import ArtifactLayout, LedgerEntry
from dayzero.core.errors import DayZeroError
from dayzero.core.model import Problem
from dayzero.core.plan import Layout
from dayzero.core.records import read_record, write_record, write_text_atomic
from dayzero.model.describe import describe
from dayzero.weights.algebra import Digit, Piece, View, concatenate
from dayzero.weights.convert import convert
from dayzero.weights.copying import POISON, PROOF_POISON, BlockCopier, is_run, linear_pieces
from dayzero.weights.files import hash_file
from dayzero.weights.ledger import SourceTensor, file_checksum, pieces_of_entry, read_lines, to_line
from dayzero.weights.proof.one_origin import first_flaw
from dayzero.weights.proof.verify import SEAL_FILE, prove, seal, verify
from dayzero.weights.reading import LocalStore, SourceReader
from dayzero.weights.writing import hash_runs
from tests.model.test_convert import all_tensors, make_copy, shards

Tiny = Callable[..., Path]
Change = Callable[[LedgerEntry], LedgerEntry | None]
LAYOUT = Layout(tp=2, ep=2)
DOWN, NORM = "model.layers.0.mlp.experts.down_proj", "model.layers.0.input_layernorm.weight"


# --- an artifact and ways to falsify it ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def source(tiny_checkpoint: Tiny) -> Path:
    return tiny_checkpoint("qwen3_moe")


@pytest.fixture(scope="module")
def sound(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("proof") / "sound"
    convert(source, describe(source), LAYOUT, out)
    return out


@pytest.fixture
def out(sound: Path, tmp_path: Path) -> Path:
    return make_copy(sound, tmp_path / "out")


def entries_of(out: Path, rank: int) -> list[LedgerEntry]:
    return list(read_lines(LedgerEntry, out / f"rank-{rank:05d}/ledger.jsonl"))


def entry_of(out: Path, rank: int, parameter: str) -> LedgerEntry:
    return next(entry for entry in entries_of(out, rank) if entry.parameter == parameter)


def reseal(out: Path) -> None:
    """Make every checksum of the artifact that of what lies there now, the ledgers' own included."""
    artifact = read_record(ArtifactLayout, out / "layout.json")
    sources = {one.tensor: one for one in read_lines(SourceTensor, out / "sources.jsonl")}
    ledgers, ranks = [], []
    for rank, files in enumerate(artifact.files):
        entries = []
        for entry in entries_of(out, rank):
            pieces = pieces_of_entry(entry, sources)
            lengths = [entry.num_bytes]
            if not isinstance(pieces, str) and "-runs:" in entry.checksum:
                flat = linear_pieces(View(entry.shape, entry.dtype, tuple(pieces)))
                if all(is_run(piece) for piece in flat):
                    runs = [piece.num_elements * entry.num_bytes // max(1, int(np.prod(entry.shape))) for piece in flat]
                    lengths = runs if sum(runs) == entry.num_bytes else lengths
            with (out / entry.file).open("rb") as file:
                entries.append(replace(entry, checksum=hash_runs(file.fileno(), entry.offset, lengths)))
        write_text_atomic(out / artifact.ledgers[rank].file, "".join(map(to_line, entries)))
        made = []
        for one in files:
            own = sorted((entry for entry in entries if entry.file == one.file), key=lambda entry: entry.offset)
            raw = (out / one.file).read_bytes()
            header = raw[: 8 + int.from_bytes(raw[:8], "little")]
            made.append(replace(one, checksum=file_checksum(header, [entry.checksum for entry in own])))
        ranks.append(tuple(made))
        ledgers.append(artifact.ledgers[rank])
    stored = [replace(one, checksum=hash_file(out / one.file), num_bytes=(out / one.file).stat().st_size) for one in ledgers]
    others = [
        replace(one, checksum=hash_file(out / one.file), num_bytes=(out / one.file).stat().st_size)
        for one in artifact.release_files
    ]
    artifact = replace(artifact, files=tuple(ranks), ledgers=tuple(stored), release_files=tuple(others))
    write_record(artifact, out / "layout.json")
    (out / SEAL_FILE).write_bytes(seal(out / "layout.json"))


def falsify(out: Path, change: Change, ranks: tuple[int, ...] = (0, 1)) -> None:
    for rank in ranks:
        changed = [change(entry) for entry in entries_of(out, rank)]
        text = "".join(to_line(entry) for entry in changed if entry is not None)
        write_text_atomic(out / f"rank-{rank:05d}/ledger.jsonl", text)
    reseal(out)


def renamed(entry: LedgerEntry, names: dict[str, str]) -> LedgerEntry:
    return replace(entry, sources=tuple(replace(one, tensor=names.get(one.tensor, one.tensor)) for one in entry.sources))


def only(parameter: str, change: Callable[[LedgerEntry], LedgerEntry | None]) -> Change:
    return lambda entry: change(entry) if entry.parameter == parameter else entry


def assert_found(problems: tuple[Problem, ...], *words: str) -> None:
    """Something is found, and one finding says all of this."""
    assert problems
    assert any(all(word in f"{one.kind} {one.file} {one.tensor} {one.detail}" for word in words) for one in problems), (
        words,
        problems,
    )


def swap_bytes(out: Path, entry: LedgerEntry, first: int, second: int, num_bytes: int) -> None:
    with (out / entry.file).open("r+b") as file:
        parts = []
        for place in (first, second):
            file.seek(entry.offset + place)
            parts.append(file.read(num_bytes))
        for place, part in zip((second, first), parts, strict=True):
            file.seek(entry.offset + place)
            file.write(part)


# --- what is sound is proved, and what could not be is said --------------------------------------------------------------


def test_a_sound_artifact_is_proved_and_what_was_not_shown_is_said(sound: Path, source: Path) -> None:
    alone, whole = prove(sound), prove(sound, source)
    assert alone.problems == whole.problems == ()
    assert len(whole.proved) == 4 and whole.not_proved == ()
    assert len(alone.proved) == 3 and "give --source" in alone.not_proved[0]


def test_resealing_alone_changes_nothing(out: Path, source: Path) -> None:
    """The tool that falsifies here is itself sound: without a change it leaves the artifact as it was."""
    before = {path: path.read_bytes() for path in sorted(out.rglob("*")) if path.is_file()}
    reseal(out)
    assert {path: path.read_bytes() for path in before} == before
    assert verify(out, source) == ()


# --- ledgers that lie consistently ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("with_source", [False, True])
def test_two_experts_exchanged_on_every_rank(out: Path, source: Path, with_source: bool) -> None:
    """Ledger and bytes agree, every element has one origin: only the expert's place is wrong."""
    names = {f"model.layers.0.mlp.experts.{a}.down_proj.weight": f"model.layers.0.mlp.experts.{b}.down_proj.weight"
             for a, b in ((1, 2), (2, 1))}  # fmt: skip
    for rank in (0, 1):
        entry = entry_of(out, rank, DOWN)
        expert = entry.num_bytes // entry.shape[0]
        if rank == 0:
            swap_bytes(out, entry, expert, 2 * expert, expert)
    falsify(out, only(DOWN, lambda entry: renamed(entry, names)))
    assert_found(verify(out, source if with_source else None), "conservation", DOWN, "rank 0", "offset")


@pytest.mark.parametrize("with_source", [False, True])
def test_two_layers_norms_exchanged(out: Path, source: Path, with_source: bool) -> None:
    other = NORM.replace("0", "1")
    names = {NORM: other, other: NORM}
    falsify(out, lambda entry: renamed(entry, names) if entry.parameter in names else entry)
    found = verify(out, source if with_source else None)
    assert_found(found, "conservation", NORM, "rank 0", "offset", other)


def test_key_and_value_exchanged_is_found_without_the_source(out: Path) -> None:
    names = {f"model.layers.0.self_attn.{a}_proj.weight": f"model.layers.0.self_attn.{b}_proj.weight"
             for a, b in (("k", "v"), ("v", "k"))}  # fmt: skip
    falsify(out, lambda entry: renamed(entry, names) if entry.parameter in names else entry)
    assert_found(verify(out), "conservation", "k_proj", "v_proj")


def test_gate_and_up_exchanged_inside_a_merged_tensor(out: Path, source: Path) -> None:
    """NU-16: names, shapes and counts are all as they should be; the mapping made anew says which half is which."""
    fused = "model.layers.0.mlp.experts.gate_up_proj"
    ends = ("gate_proj.weight", "up_proj.weight")

    def exchange(entry: LedgerEntry) -> LedgerEntry:
        swapped = tuple(
            replace(one, tensor=one.tensor.replace(*(ends if one.tensor.endswith("." + ends[0]) else ends[::-1])))
            for one in entry.sources
        )
        return replace(entry, sources=swapped)

    falsify(out, only(fused, exchange))
    for release in (None, source):
        assert_found(verify(out, release), "conservation", fused, "rank 0", "offset", "the layout asks for")


@pytest.mark.parametrize("with_source", [False, True])
def test_one_ranks_slice_sent_to_the_other(out: Path, source: Path, with_source: bool) -> None:
    """Both ranks hold a half; each holds the other's. Bytes, ledgers and checksums agree."""
    name = "model.layers.0.self_attn.q_proj.weight"
    entries = [entry_of(out, rank, name) for rank in (0, 1)]
    data = [(out / entry.file).read_bytes()[entry.offset : entry.offset + entry.num_bytes] for entry in entries]
    for entry, other in zip(entries, reversed(data), strict=True):
        with (out / entry.file).open("r+b") as file:
            file.seek(entry.offset)
            file.write(other)
    boxes = [entry.sources[0].box for entry in entries]
    for rank in (0, 1):
        box = boxes[1 - rank]
        falsify(out, only(name, lambda entry, box=box: replace(entry, sources=(replace(entry.sources[0], box=box),))), (rank,))
    assert_found(verify(out, source if with_source else None), "conservation", name, "rank 0", "offset")


def test_a_replica_that_comes_from_elsewhere(out: Path) -> None:
    """Rank 1's copy of a norm claims to be another layer's: the replicas of one element must have one origin."""
    falsify(out, only(NORM, lambda entry: renamed(entry, {NORM: NORM.replace("0", "1")})), (1,))
    assert_found(verify(out), "conservation", NORM, "rank 1", "its replica at rank 0")


def test_elements_taken_twice_and_elements_left_out(out: Path) -> None:
    """Both halves of a matrix claim to be the source's first half."""
    name = "model.layers.0.self_attn.q_proj.weight"
    box = entry_of(out, 0, name).sources[0].box
    falsify(out, only(name, lambda entry: replace(entry, sources=(replace(entry.sources[0], box=box),))), (1,))
    assert_found(verify(out), "conservation", name, "fills 2 elements")


def test_a_hole_inside_a_stored_tensor(out: Path) -> None:
    falsify(out, only(DOWN, lambda entry: replace(entry, sources=entry.sources[1:])), (0,))
    assert_found(verify(out), "conservation", DOWN, "0 origins", "rank 0")


def test_a_source_tensor_declared_dropped(out: Path, source: Path) -> None:
    """A parameter is cut from model.json, ledgers and shards as if its source had been left out for a reason."""
    lines = list(read_lines(SourceTensor, out / "sources.jsonl"))
    text = "".join(to_line(replace(one, dropped="not needed") if one.tensor == NORM else one) for one in lines)
    write_text_atomic(out / "sources.jsonl", text)
    reseal(out)
    assert_found(verify(out), "conservation", NORM, "listed as dropped and used")
    model = json.loads((out / "model.json").read_text())
    model["parameters"] = [one for one in model["parameters"] if one["name"] != NORM]
    (out / "model.json").write_text(json.dumps(model))
    for rank in (0, 1):
        drop_tensor(out, entry_of(out, rank, NORM), rank)
    reseal(out)
    assert_found(verify(out), "conservation", NORM, "the mapping has it used")
    assert_found(verify(out, source), "conservation", NORM, "the mapping has it used")


def drop_tensor(out: Path, gone: LedgerEntry, rank: int) -> None:
    """Take the last tensor's place in its file: the header loses it, and its bytes become the neighbour's problem."""
    path = out / gone.file
    tensors = load_file(path)
    del tensors[gone.parameter]
    save_file(tensors, path, metadata={"format": "pt"})
    raw = path.read_bytes()
    header, begin = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")]), 8 + int.from_bytes(raw[:8], "little")
    changed = []
    for entry in entries_of(out, rank):
        if entry.parameter == gone.parameter:
            continue
        offset = begin + header[entry.parameter]["data_offsets"][0] if entry.file == gone.file else entry.offset
        changed.append(replace(entry, offset=offset))
    write_text_atomic(out / f"rank-{rank:05d}/ledger.jsonl", "".join(map(to_line, changed)))
    artifact = read_record(ArtifactLayout, out / "layout.json")
    files = tuple(
        tuple(replace(one, num_bytes=path.stat().st_size) if one.file == gone.file else one for one in own)
        for own in artifact.files
    )
    write_record(replace(artifact, files=files), out / "layout.json")


def test_bytes_that_are_not_the_sources(out: Path, source: Path) -> None:
    """Ledger right, checksums right, bytes wrong: nothing but the source can tell, and it names the first wrong byte."""
    entry = entry_of(out, 1, DOWN)
    with (out / entry.file).open("r+b") as file:
        file.seek(entry.offset + 100)
        byte = file.read(1)[0]
        file.seek(entry.offset + 100)
        file.write(bytes([byte ^ 1]))
    reseal(out)
    assert verify(out) == ()
    assert_found(verify(out, source), "conservation", DOWN, "rank 1", f"from byte {entry.offset + 100} of {entry.file}")


def test_a_claim_that_part_of_a_source_is_not_used(out: Path, source: Path) -> None:
    lines = list(read_lines(SourceTensor, out / "sources.jsonl"))
    text = "".join(to_line(replace(one, partly_used="padding") if one.tensor == NORM else one) for one in lines)
    write_text_atomic(out / "sources.jsonl", text)
    reseal(out)
    assert_found(verify(out), "conservation", NORM, "used in part")


MALFORMED: dict[str, Callable[[Any], Any]] = {
    "box outside": lambda one: replace(one, box=((0, 10**6),)),
    "box reversed": lambda one: replace(one, box=((5, 2),)),
    "into outside": lambda one: replace(one, into=((1, 65),)),
    "no dimensions": lambda one: replace(one, box=()),
    "unknown source": lambda one: replace(one, tensor="nothing"),
    "loop that stands still": lambda one: replace(one, transforms=("strided:0:0:64,1,0",)),
    "loop that crosses itself": lambda one: replace(one, transforms=("strided:0:0:8,1,8;0:8,7,1",)),
    "loop before the beginning": lambda one: replace(one, transforms=("strided:-1:0:64,1,1",)),
    "no loop at all": lambda one: replace(one, transforms=("strided:x",)),
    "loop in no dimension": lambda one: replace(one, transforms=("strided:0:7:64,1,1",)),
    "cast to another dtype": lambda one: replace(one, transforms=("cast:float32",)),
}


@pytest.mark.parametrize("kind", MALFORMED)
def test_lines_that_describe_nothing(kind: str, out: Path) -> None:
    falsify(out, only(NORM, lambda entry: replace(entry, sources=(MALFORMED[kind](entry.sources[0]),))), (1,))
    assert_found(verify(out), "ledger", NORM, "rank 1")


def test_a_computed_or_decoded_tensor_needs_its_whole_target(out: Path, source: Path) -> None:
    """An operation's result is followed to its tensors; that it covers the stored tensor is still counted."""
    made = only(NORM, lambda entry: replace(
        entry, sources=(replace(entry.sources[0], transforms=("dequantize:x",), into=((0, 40),)),)))  # fmt: skip
    falsify(out, made, (0, 1))
    assert_found(verify(out), "conservation", NORM, "0 origins", "rank 0")


def make_quantized(source: Path, folder: Path) -> Path:
    """The release with its matrices in FP8, a scale for each block of 128x128."""
    quantized, tensors = make_copy(source, folder), {}
    for name, tensor in all_tensors(source).items():
        if tensor.ndim != 2 or any(word in name for word in ("norm", "embed", "lm_head", "mlp.gate.")):
            tensors[name] = tensor
            continue
        blocks = [-(-size // 128) for size in tensor.shape]
        tensors[name] = (tensor.float() * 64).to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = torch.full(blocks, 1 / 64) * (1 + torch.rand(blocks))
    for path in [*shards(quantized), *quantized.glob("*.index.json")]:
        path.unlink()
    save_file(tensors, quantized / "model.safetensors", metadata={"format": "pt"})
    settings = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    config = json.loads((quantized / "config.json").read_text()) | {"quantization_config": settings}
    (quantized / "config.json").write_text(json.dumps(config))
    return quantized


def test_a_decoded_tensor_is_proved_with_its_source_and_what_was_not_shown_without_it_is_said(
    tiny_checkpoint: Tiny, tmp_path: Path
) -> None:
    """The ledger follows a decoded tensor to the stored ones; which rows lie where only decoding them again can show."""
    quantized = make_quantized(tiny_checkpoint("deepseek_v3"), tmp_path / "fp8")
    out = tmp_path / "out"
    convert(quantized, describe(quantized), Layout(tp=2), out)
    shown, alone = prove(out, quantized), prove(out)
    assert shown.problems == alone.problems == () and len(shown.proved) == 4 and shown.not_proved == ()
    assert "quantized" in alone.not_proved[0]
    name = next(entry.parameter for entry in entries_of(out, 1) if entry.parameter.endswith("q_b_proj.weight"))
    entry = entry_of(out, 1, name)
    assert entry.sources[0].transforms[0].startswith("dequantize:")
    swap_bytes(out, entry, 0, entry.num_bytes // 2, entry.num_bytes // 2)
    reseal(out)
    assert_found(verify(out, quantized), "conservation", name, "rank 1", "offset")


# --- tampering -----------------------------------------------------------------------------------------------------------


def test_a_bit_flipped_anywhere_is_found_and_named(out: Path) -> None:
    """320 seeded places over all files, weighted so that small files get their share, tensors named where one was hit."""
    generator = random.Random(7)
    files = [path for path in sorted(out.rglob("*")) if path.is_file()]
    entries = [entry for rank in (0, 1) for entry in entries_of(out, rank)]
    inside = 0
    for number in range(320):
        path = files[number % len(files)] if number < 4 * len(files) else generator.choice(files)
        name, data = str(path.relative_to(out)), path.read_bytes()
        place, bit = generator.randrange(len(data)), generator.randrange(8)
        with path.open("r+b") as file:
            file.seek(place)
            file.write(bytes([data[place] ^ 1 << bit]))
        found = verify(out)
        hit = [e for e in entries if e.file == name and e.offset <= place < e.offset + e.num_bytes]
        named = {problem.file for problem in found}
        assert name in named or (name == SEAL_FILE and "layout.json" in named), (name, place, bit, found)
        if hit:
            inside += 1
            assert [(p.file, p.tensor) for p in found] == [(name, hit[0].parameter)], (name, place, bit, found)
        path.write_bytes(data)
    assert inside > 50 and verify(out) == ()


def test_truncated_swapped_deleted_and_added_files_are_named(out: Path) -> None:
    files = [path for path in sorted(out.rglob("*")) if path.is_file()]
    for path in files:
        name, data = str(path.relative_to(out)), path.read_bytes()
        for size in {0, len(data) // 2, len(data) - 1}:
            path.write_bytes(data[:size])
            assert_named(out, name)
        path.write_bytes(data + b"\n")
        assert_named(out, name)
        path.unlink()
        if name == "layout.json":
            with pytest.raises(DayZeroError, match="not an artifact"):
                verify(out)
        else:
            assert_named(out, name)
        path.write_bytes(data)
    (out / "release/extra.py").write_text("x")
    assert_named(out, "release/extra.py")
    (out / "release/extra.py").unlink()
    assert verify(out) == ()


def assert_named(out: Path, name: str) -> None:
    named = {problem.file for problem in verify(out)}
    assert name in named or (name == SEAL_FILE and "layout.json" in named), (name, named)


def test_exchanged_shards_ranks_and_ledgers_are_named(out: Path, source: Path, tmp_path: Path) -> None:
    def exchange(first: Path, second: Path) -> None:
        first.rename(out.parent / "swap"), second.rename(first), (out.parent / "swap").rename(second)

    shards = [next((out / f"rank-0000{rank}").glob("*.safetensors")) for rank in (0, 1)]
    ledgers = [out / f"rank-0000{rank}/ledger.jsonl" for rank in (0, 1)]
    folders = [out / f"rank-0000{rank}" for rank in (0, 1)]
    for pair in (shards, ledgers, folders):
        exchange(*pair)
        named = {problem.file for problem in verify(out)}
        assert {"rank-00000", "rank-00001"} <= {str(name).partition("/")[0] for name in named}, pair
        exchange(*pair)
    wide = tmp_path / "wide"
    convert(source, describe(source), Layout(tp=4), wide)
    for name in ("rank-00000/ledger.jsonl", "layout.json", "sources.jsonl"):
        kept = (out / name).read_bytes()
        (out / name).write_bytes((wide / name).read_bytes() + (b"" if name == "layout.json" else b"\n"))
        assert_named(out, name)
        (out / name).write_bytes(kept)
    assert verify(out) == ()


def test_a_line_given_twice_and_another_artifacts_ledger_are_found_when_resealed(
    out: Path, source: Path, tmp_path: Path
) -> None:
    ledger = out / "rank-00001/ledger.jsonl"
    lines = ledger.read_text().splitlines(keepends=True)
    ledger.write_text("".join([*lines, lines[3]]))
    reseal(out)
    assert_found(verify(out), "ledger", "listed twice", entries_of(out, 1)[3].parameter)
    convert(source, describe(source), Layout(tp=4), tmp_path / "wide")
    shutil.copyfile(tmp_path / "wide/rank-00001/ledger.jsonl", ledger)
    artifact = read_record(ArtifactLayout, out / "layout.json")
    stored = tuple(replace(one, checksum=hash_file(out / one.file), num_bytes=(out / one.file).stat().st_size)
                   for one in artifact.ledgers)  # fmt: skip
    write_record(replace(artifact, ledgers=stored), out / "layout.json")
    (out / SEAL_FILE).write_bytes(seal(out / "layout.json"))
    assert_found(verify(out), "rank-00001")


# --- poison and holes ----------------------------------------------------------------------------------------------------


class _Memory(SourceReader):
    def __init__(self, sources: dict[str, torch.Tensor]) -> None:
        super().__init__(LocalStore(Path()), {})
        self._sources = sources

    def read_into(self, source: str, offset: int, target: memoryview) -> None:
        raw = self._sources[source].contiguous().reshape(-1).view(torch.uint8).numpy().data
        target[:] = raw[offset : offset + len(target)]


def copied(view: View, sources: dict[str, torch.Tensor], poison: int = POISON) -> bytes:
    return b"".join(bytes(block) for _, block in BlockCopier(_Memory(sources), poison=poison).blocks(view))


def broken_views() -> dict[str, View]:
    whole = View.of("a", (8, 6), "float32")
    rows, columns = whole.permute((1, 0)), View.of("a", (4, 6), "float32")
    double = View((8, 6), "float32", (*columns.pieces, *columns.pieces))  # as many elements as wanted, half of them twice
    interleaved = tuple(Piece("a", "float32", 0, (at,), (Digit(24, 0, 2, 1),)) for at in (0, 0))
    return {
        "a run too few": View((8, 6), "float32", columns.pieces),
        "a transposed piece too few": View((6, 8), "float32", rows.slice(0, 0, 5).pieces),
        "one half twice and one never": double,
        "every second element twice": View((48,), "float32", interleaved),
        "nothing at all": View((8, 6), "float32", ()),
        "past the end": View((4, 6), "float32", whole.pieces),
    }


@pytest.mark.parametrize("kind", broken_views())
def test_a_hole_is_never_filled_with_what_the_buffer_held(kind: str) -> None:
    with pytest.raises(DayZeroError, match="no known origin"):
        copied(broken_views()[kind], {"a": torch.arange(48.0)})


def test_buffers_are_poisoned_differently_for_making_and_proving(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy loop that forgets elements: conversion and proof then differ at exactly those, whatever they should have been."""
    view = View.of("a", (8, 6), "float32").permute((1, 0))
    sources = {"a": torch.arange(48.0)}
    assert copied(view, sources) == copied(view, sources, PROOF_POISON)
    copy = BlockCopier._copy

    def forgetful(self: BlockCopier, piece: Piece, offset: int, at: int, digits: Any, target: np.ndarray) -> None:
        kept = target[3].copy()
        copy(self, piece, offset, at, digits, target)
        target[3] = kept

    monkeypatch.setattr(BlockCopier, "_copy", forgetful)
    first, second = (np.frombuffer(copied(view, sources, poison), dtype=np.uint32) for poison in (POISON, PROOF_POISON))
    assert list(np.nonzero(first != second)[0]) == [3]


# --- the counting of origins ---------------------------------------------------------------------------------------------


@st.composite
def views(draw: st.DrawFn) -> View:
    """Any mix of slicing, transposing, reshaping and joining, as operations make them."""
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
    view = View.of("s0", shape, "int16")
    for number in range(draw(st.integers(0, 4))):
        dim = draw(st.integers(0, len(view.shape) - 1))
        match draw(st.sampled_from(["permute", "slice", "reshape", "join"])):
            case "permute":
                view = view.permute(draw(st.permutations(range(len(view.shape)))))
            case "slice":
                start = draw(st.integers(0, view.shape[dim] - 1))
                view = view.slice(dim, start, draw(st.integers(start + 1, view.shape[dim])))
            case "reshape":
                view = view.reshape(draw(st.sampled_from([(view.num_elements,), (1, *view.shape), (*view.shape[::-1],)])))
            case "join":
                view = concatenate([view, View.of(f"s{number + 1}", view.shape, "int16")], dim)
    return view


@given(views(), st.data())
@settings(max_examples=300, deadline=None)
def test_origins_are_counted_as_by_laying_them_out(view: View, data: st.DataObject) -> None:
    """Against the obvious count of every element, on whole views and on views with a piece taken out or moved."""
    pieces = list(linear_pieces(view))
    kind = data.draw(st.sampled_from(["whole", "lacking", "doubled", "moved"]))
    at = data.draw(st.integers(0, len(pieces) - 1))
    if kind == "lacking":
        del pieces[at]
    elif kind == "doubled":
        pieces.append(pieces[at])
    elif kind == "moved" and pieces[at].base[0]:
        pieces[at] = replace(pieces[at], base=(pieces[at].base[0] - 1,))
    pieces.sort(key=lambda piece: piece.base)
    counts = np.zeros(view.num_elements, dtype=int)
    for piece in pieces:
        places = np.array([piece.base[0]])
        for digit in piece.digits:
            places = (places[:, None] + np.arange(digit.size) * digit.step).reshape(-1)
        np.add.at(counts, places, 1)
    wrong = np.nonzero(counts != 1)[0]
    assert first_flaw(pieces, view.num_elements) == ((int(wrong[0]), int(counts[wrong[0]])) if len(wrong) else None)
    doubles = np.nonzero(counts > 1)[0]
    want = (int(doubles[0]), int(counts[doubles[0]])) if len(doubles) else None
    assert first_flaw(pieces, view.num_elements, holes=True) == want
