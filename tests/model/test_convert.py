"""Conversion: exact, complete, resumable, and refused where the checkpoint is unsound.

Cites CK-01, CK-02, CK-04, CK-09, CK-11, CK-12, CK-14.
"""

from __future__ import annotations

import hashlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import core_model_loading as loading

from dayzero.core.artifact import ArtifactLayout, LedgerEntry
from dayzero.core.errors import DayZeroError
from dayzero.core.model import ModelDescription
from dayzero.core.plan import Layout
from dayzero.core.records import read_record, write_record
from dayzero.model.classes import model_class
from dayzero.model.describe import describe
from dayzero.model.release import open_release
from dayzero.model.resolve import Resolved, resolve
from dayzero.weights import copying, placement
from dayzero.weights.algebra import NotDataMovement, View
from dayzero.weights.changes import Changes
from dayzero.weights.convert import artifact_key, convert
from dayzero.weights.copying import BlockCopier
from dayzero.weights.ledger import read_lines
from dayzero.weights.placement import owned_parameters
from dayzero.weights.proof.verify import verify
from dayzero.weights.reading import LocalStore, SourceReader
from dayzero.weights.symbolic import ViewTensor, dtype_name
from dayzero.weights.to_hf import export
from tests.tiny.overrides import REQUIRED_TYPES

Tiny = Callable[..., Path]
LAYOUTS = [Layout(), Layout(tp=2), Layout(tp=2, ep=2), Layout(dp=2, ep=2), Layout(tp=2, dp=2, ep=2)]


# --- helpers -------------------------------------------------------------------------------------------------------------


def make_copy(source: Path, folder: Path) -> Path:
    return Path(shutil.copytree(source, folder))


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def all_tensors(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in shards(folder):
        found |= load_file(file)
    return found


def reference_state(source: Path) -> dict[str, torch.Tensor]:
    """The state dict transformers itself loads, in the checkpoint's dtype."""
    resolved = resolve(open_release(source))
    assert isinstance(resolved, Resolved), resolved
    return dict(model_class(resolved.config).from_pretrained(source, dtype="auto").state_dict())


def reassembled(out: Path, model: ModelDescription) -> dict[str, torch.Tensor]:
    """Every parameter put together from all ranks; asserts that each element is stored and that replicas agree."""
    artifact = read_record(ArtifactLayout, out / "layout.json")
    whole: dict[str, torch.Tensor] = {}
    covered: dict[str, torch.Tensor] = {}
    for rank in range(artifact.layout.num_devices):
        stored: dict[str, torch.Tensor] = {}
        for file in artifact.files[rank]:
            stored |= load_file(out / file.file)
        for parameter, boxes in owned_parameters(model, artifact.layout, rank):
            part, start, dim = stored.pop(parameter.name), 0, parameter.shard.tensor_dim
            target = whole.setdefault(parameter.name, torch.zeros(parameter.shape, dtype=part.dtype))
            mark = covered.setdefault(parameter.name, torch.zeros(parameter.shape, dtype=torch.bool))
            for box in boxes:
                region = tuple(slice(*ends) for ends in box)
                piece = part
                if len(boxes) > 1:
                    assert dim is not None
                    piece = part.narrow(dim, start, box[dim][1] - box[dim][0])
                    start += box[dim][1] - box[dim][0]
                assert torch.equal(target[region][mark[region]], piece[mark[region]]), parameter.name
                target[region] = piece
                mark[region] = True
        assert not stored, stored.keys()
    assert all(bool(mark.all()) for mark in covered.values())
    for parameter in model.parameters:
        if parameter.tied_to in whole:
            whole.setdefault(parameter.name, whole[parameter.tied_to])
    return whole


def folder_hash(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def assert_nothing_left(out: Path) -> None:
    """No output and no scraps beside it."""
    assert not out.exists()
    assert [path.name for path in out.parent.iterdir() if path.name.startswith(f".{out.name}")] == []


# --- the algebra on transformers' own operations -------------------------------------------------------------------------


class _Config:
    num_attention_heads = 4
    n_experts = 3
    vocab_size, unpadded_vocab_size = 12, 8
    vision_config: Any = None

    def get_text_config(self) -> _Config:
        return self


_Config.vision_config = _Config()


class _Model:
    """What operations ask a model for: the shape and dtype of a target parameter."""

    def get_parameter(self, name: str) -> torch.Tensor:
        rows = {"q": 4, "k": 2, "v": 2}.get(name.rpartition(".")[2], 8)
        return torch.empty(rows, 6, dtype=torch.bfloat16, device="meta")


def _many(*shapes: tuple[int, ...]) -> list[tuple[int, ...]]:
    return list(shapes)


# operation, {source pattern: shapes of the tensors collected for it}, target patterns
OPERATIONS: list[tuple[str, Any, dict[str, list[tuple[int, ...]]], list[str]]] = [
    ("chunk", loading.Chunk(dim=0), {"a": _many((8, 6))}, ["q", "k"]),
    ("chunk-inner", loading.Chunk(dim=1), {"a": _many((8, 6))}, ["q", "k", "v"]),
    ("chunk-by-config", loading.Chunk(dim=0, num_shards_attribute="n_experts"), {"a": _many((9, 4))}, ["e.*.w"]),
    ("split", loading.Split(dim=0), {"a": _many((8, 6))}, ["q", "k", "v"]),
    ("concatenate", loading.Concatenate(dim=0), {"a": _many((2, 6)), "b": _many((3, 6))}, ["t"]),
    ("concatenate-inner", loading.Concatenate(dim=1), {"a": _many((2, 6)), "b": _many((2, 3))}, ["t"]),
    ("interleave", loading.Interleave(dim=0), {"a": _many((8, 6))}, ["t"]),
    ("interleave-inner", loading.Interleave(dim=1), {"a": _many((2, 8, 6))}, ["t"]),
    ("interleave-inverse", loading.Interleave(dim=1, inverse=True), {"a": _many((2, 8, 6))}, ["t"]),
    ("merge", loading.MergeModulelist(dim=0), {"e.*.w": _many(*[(4, 6)] * 5)}, ["t"]),
    ("merge-inner", loading.MergeModulelist(dim=1), {"e.*.w": _many(*[(4, 6)] * 3)}, ["t"]),
    ("split-list", loading.SplitModulelist(dim=0), {"a": _many((5, 4, 6))}, ["e.*.w"]),
    ("transpose", loading.Transpose(0, 1), {"a": _many((8, 6))}, ["t"]),
    ("transpose-3d", loading.Transpose(1, 2), {"a": _many((3, 8, 6))}, ["t"]),
    ("conv3d-to-linear", loading.Conv3dToLinear(3, (2, 2, 2)), {"a": _many((4, 3, 2, 2, 2))}, ["t"]),
    ("linear-to-conv3d", loading.LinearToConv3d(3, (2, 2, 2)), {"a": _many((4, 24))}, ["t"]),
    ("rope", loading.PermuteForRope(), {"a": _many((16, 6))}, ["t"]),
    ("rope-inverse", loading.PermuteForRope(inverse=True), {"a": _many((16, 6))}, ["t"]),
    ("rope-bias", loading.PermuteForRope(), {"a": _many((16,))}, ["t"]),
    ("vision-fuse", loading.VisionFuseAndPermuteForRope(), {"q": _many((16, 6)), "k": _many((16, 6))}, ["t"]),
    ("vision-unfuse", loading.VisionUnfuseAndPermuteForRope(), {"a": _many((32, 6))}, ["q", "k"]),
    ("text-vision-experts", loading.ErnieFuseAndSplitTextVisionExperts(),
     {"g.*": _many(*[(4, 6)] * 4), "u.*": _many(*[(4, 6)] * 4)}, ["t", "v"]),
    ("text-vision-experts-inverse", loading.ErnieSplitAndDecoupleTextVisionExperts(),
     {"t": _many((2, 8, 6)), "v": _many((2, 8, 6))}, ["g.*", "u.*"]),
    ("message-queries", loading.Inkling2LoopMergeMessageQueries(), {"a": _many((6, 5)), "b": _many((6, 5))}, ["t"]),
    ("message-queries-inverse", loading.Inkling2LoopMergeMessageQueries(inverse=True), {"a": _many((3, 4, 5))}, ["x", "y"]),
    ("unpad-vocab", loading.Inkling2UnpadVocab(), {"a": _many((12, 6))}, ["t"]),
]  # fmt: skip
# Operations that compute: they run on real tensors, as a group.
COMPUTING = {"Inkling2LoopDequantizeExperts", "_IdentityOp"}


def run_operation(operation: Any, inputs: dict[str, list[torch.Tensor]], targets: list[str]) -> dict[str, torch.Tensor]:
    made = operation.convert(
        inputs, source_patterns=list(inputs), target_patterns=targets, full_layer_name=f"layer.{targets[0]}",
        config=_Config(), model=_Model(), missing_keys=None,
    )  # fmt: skip
    return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


def fill(view: View, sources: dict[str, torch.Tensor]) -> torch.Tensor:
    """The tensor of a view, through the copier that conversion uses."""

    class Memory(SourceReader):
        def read_into(self, source: str, offset: int, target: memoryview) -> None:
            raw = sources[source].contiguous().reshape(-1).view(torch.uint8).numpy().data
            target[:] = raw[offset : offset + len(target)]

    data = b"".join(bytes(block) for _, block in BlockCopier(Memory(LocalStore(Path()), {})).blocks(view))
    return torch.frombuffer(bytearray(data), dtype=getattr(torch, view.dtype)).reshape(view.shape)


@pytest.mark.parametrize(
    ("operation", "shapes", "targets"), [case[1:] for case in OPERATIONS], ids=[case[0] for case in OPERATIONS]
)
@pytest.mark.parametrize("block_bytes", [64, 2**20])
def test_operations_of_transformers_are_followed_exactly(
    operation: Any,
    shapes: dict[str, list[tuple[int, ...]]],
    targets: list[str],
    block_bytes: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """CK-11's kind: transposed, interleaved and sliced tensors come out in the right order, whatever the block size."""
    monkeypatch.setattr(copying, "BLOCK_BYTES", block_bytes)
    monkeypatch.setattr(copying, "RUN_BYTES", block_bytes)
    monkeypatch.setattr(copying, "SMALL_SPAN_BYTES", 16)
    generator = torch.Generator().manual_seed(0)
    real = {
        pattern: [torch.randn(shape, generator=generator).to(torch.bfloat16) for shape in group]
        for pattern, group in shapes.items()
    }
    sources = {f"{pattern}#{number}": tensor for pattern, group in real.items() for number, tensor in enumerate(group)}
    symbolic: dict[str, list[torch.Tensor]] = {
        pattern: [ViewTensor(View.of(f"{pattern}#{n}", tuple(t.shape), dtype_name(t.dtype))) for n, t in enumerate(group)]
        for pattern, group in real.items()
    }
    with torch.no_grad():
        got = run_operation(operation, symbolic, targets)
        want = run_operation(operation, real, targets)
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        view = got[name]
        assert isinstance(view, ViewTensor)
        assert torch.equal(fill(view.view_of, sources), tensor), name


def test_every_operation_of_this_transformers_is_in_the_table() -> None:
    """A new operation must be tried here; until then conversion follows or computes it, but nobody has compared."""
    known = {type(case[1]).__name__ for case in OPERATIONS} | COMPUTING
    found = {cls.__name__ for cls in loading.ConversionOps.__subclasses__() if cls.__module__ == loading.__name__}
    assert found <= known, found - known


def test_what_computes_is_said_to_compute() -> None:
    tensor = ViewTensor(View.of("a", (4, 6), "bfloat16"))
    for compute in (
        lambda: tensor + 1,
        lambda: tensor.sum(),
        lambda: torch.zeros(4, 6).copy_(tensor),
        lambda: tensor[0].mul_(2),
    ):
        with pytest.raises(NotDataMovement):
            compute()


def test_casts_equal_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copying, "BLOCK_BYTES", 64)
    source = torch.randn(7, 10, generator=torch.Generator().manual_seed(0))
    view = View.of("a", (7, 10), "float32").permute((1, 0)).slice(0, 2, 9).cast("bfloat16")
    assert torch.equal(fill(view, {"a": source}), source.T[2:9].to(torch.bfloat16))


# --- conversion equals what transformers loads ---------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", REQUIRED_TYPES)
def test_shards_equal_what_transformers_loads_and_the_inverse_is_exact(
    model_type: str, tiny_checkpoint: Tiny, tmp_path: Path
) -> None:
    """Bitwise, on one rank and on one wide layout (another for each type); verified; and back to a Hugging Face folder."""
    source = tiny_checkpoint(model_type)
    model, want = describe(source), reference_state(source)
    original = all_tensors(source)
    wide = LAYOUTS[1 + REQUIRED_TYPES.index(model_type) % (len(LAYOUTS) - 1)]
    for layout in (Layout(), wide):
        out = tmp_path / f"artifact-{layout.num_devices}"
        report = convert(source, model, layout, out)
        assert verify(out, source) == ()
        got = reassembled(out, model)
        assert got.keys() >= want.keys()
        for name, tensor in want.items():
            assert torch.equal(got[name].to(tensor.dtype), tensor), (name, layout)
        assert report.ledger.used_bytes == report.ledger.source_bytes and not report.ledger.dropped
        export(out, tmp_path / f"back-{layout.num_devices}", shard_bytes=60_000)
        back = all_tensors(tmp_path / f"back-{layout.num_devices}")
        assert back.keys() == original.keys()
        assert all(torch.equal(back[name], original[name]) and back[name].dtype == original[name].dtype for name in original)
    again = reference_state(tmp_path / "back-1")
    assert all(torch.equal(again[name], want[name]) for name in want)


def test_pipeline_stages_store_their_layers_and_a_tied_head_on_both_ends(tiny_checkpoint: Tiny, tmp_path: Path) -> None:
    source = tiny_checkpoint("gemma3_text")
    model = describe(source)
    last = model.dimensions.num_layers
    convert(source, model, Layout(pp=2, stages=((0, 1), (1, last))), tmp_path / "out")
    assert verify(tmp_path / "out", source) == ()
    artifact = read_record(ArtifactLayout, tmp_path / "out/layout.json")
    names = [
        {entry.parameter for entry in read_lines(LedgerEntry, tmp_path / "out" / ledger.file)} for ledger in artifact.ledgers
    ]
    assert "model.embed_tokens.weight" in names[0] and "lm_head.weight" in names[1]
    assert {name for name in names[0] if ".layers." in name} == {name for name in names[0] if ".layers.0." in name}
    got, want = reassembled(tmp_path / "out", model), reference_state(source)
    assert all(torch.equal(got[name], want[name]) for name in want)


def test_a_release_is_resharded_and_a_small_one_is_a_single_file(tiny_checkpoint: Tiny, tmp_path: Path) -> None:
    source = tiny_checkpoint("llama")
    export(source, tmp_path / "hf")
    assert [path.name for path in shards(tmp_path / "hf")] == ["model.safetensors"]
    assert all(torch.equal(tensor, all_tensors(tmp_path / "hf")[name]) for name, tensor in all_tensors(source).items())
    assert open_release(tmp_path / "hf").problems == ()


def test_another_dtype_is_a_recorded_cast(tiny_checkpoint: Tiny, tmp_path: Path) -> None:
    source = tiny_checkpoint("qwen3_moe")
    model, want = describe(source), reference_state(source)
    convert(source, model, Layout(tp=2), tmp_path / "out", changes=Changes(dtype="float32"))
    assert verify(tmp_path / "out", source) == ()
    got = reassembled(tmp_path / "out", model)
    assert all(got[name].dtype == torch.float32 and torch.equal(got[name], want[name].float()) for name in want)
    entries = list(read_lines(LedgerEntry, tmp_path / "out/rank-00001/ledger.jsonl"))
    assert all("cast:float32" in one.transforms for entry in entries for one in entry.sources)


def test_an_operation_that_computes_runs_on_its_group(
    tiny_checkpoint: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not data movement: transformers' own operation makes the tensor, and the ledger says so."""
    from transformers import conversion_mapping

    class Doubled(loading.ConversionOps):
        def convert(self, input_dict: Any, source_patterns: Any, target_patterns: Any, **_: Any) -> Any:
            tensor = next(iter(input_dict.values()))[0]
            return {target_patterns[0]: tensor * 2}

        @property
        def reverse_op(self) -> Any:
            raise NotImplementedError

    converter = loading.WeightConverter("mlp.down_proj.weight", "mlp.down_proj.weight", [Doubled()])
    conversion_mapping.get_checkpoint_conversion_mapping("llama")
    monkeypatch.setitem(conversion_mapping._checkpoint_conversion_mapping_cache, "llama", [converter])
    source = tiny_checkpoint("llama")
    model = describe(source)
    report = convert(source, model, Layout(tp=2), tmp_path / "out")
    assert [problem.kind for problem in report.problems] == ["computed_group"] * model.dimensions.num_layers + ["digests"]
    assert verify(tmp_path / "out", source) == ()
    name = "model.layers.0.mlp.down_proj.weight"
    assert torch.equal(reassembled(tmp_path / "out", model)[name], all_tensors(source)[name] * 2)
    entries = {entry.parameter: entry for entry in read_lines(LedgerEntry, tmp_path / "out/rank-00000/ledger.jsonl")}
    assert entries[name].sources[0].transforms[0] == "computed:Doubled"


# --- unsound checkpoints are refused before anything is written ----------------------------------------------------------


def assert_refused(source: Path, model: ModelDescription, out: Path, *words: str) -> None:
    with pytest.raises(DayZeroError) as caught:
        convert(source, model, Layout(), out)
    for word in words:
        assert word in str(caught.value), f"{word!r} is not in: {caught.value}"
    assert_nothing_left(out)


@pytest.mark.parametrize("cut", ["data", "header", "length"])
def test_ck_01_a_short_shard_is_refused_by_name(cut: str, tiny_checkpoint: Tiny, tmp_path: Path) -> None:
    source = make_copy(tiny_checkpoint("llama"), tmp_path / "source")
    model = describe(source)
    shard = shards(source)[-1]
    size = {"data": int(shard.stat().st_size * 0.6), "header": 40, "length": 5}[cut]
    os.truncate(shard, size)
    assert_refused(source, model, tmp_path / "out", shard.name, str(size))


def test_ck_02_index_and_disk_that_disagree_are_refused_with_everything_named(tiny_checkpoint: Tiny, tmp_path: Path) -> None:
    clean = tiny_checkpoint("llama")
    model = describe(clean)
    files = [path.name for path in shards(clean)]

    def damaged(name: str, change: Callable[[Path, dict[str, Any]], None]) -> Path:
        folder = make_copy(clean, tmp_path / name)
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        change(folder, index)
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        return folder

    missing = damaged("missing", lambda folder, _: (folder / files[0]).unlink())
    assert_refused(missing, model, tmp_path / "out", files[0])
    other = next(name for name, file in json.loads((clean / "model.safetensors.index.json").read_text())["weight_map"].items()
                 if file == files[1])  # fmt: skip
    misplaced = damaged("misplaced", lambda _, index: index["weight_map"].update({other: files[0]}))
    assert_refused(misplaced, model, tmp_path / "out", other)
    unknown = damaged("unknown", lambda _, index: index["weight_map"].update({"mtp.fc.weight": files[0], "x.y": files[1]}))
    assert_refused(unknown, model, tmp_path / "out", "mtp.fc.weight", "x.y")
    extra = make_copy(clean, tmp_path / "extra")
    with (extra / "model.safetensors.index.json").open("a") as file:
        file.write("{}")
    assert_refused(extra, model, tmp_path / "out", "model.safetensors.index.json")
    # A wrong total is a warning with both numbers, and the headers decide.
    total = damaged("total", lambda _, index: index["metadata"].update(total_size=index["metadata"]["total_size"] + 2))
    report = convert(total, model, Layout(), tmp_path / "out")
    assert [problem.kind for problem in report.problems] == ["total_size", "digests"]
    assert report.ledger.source_bytes == sum(t.numel() * t.element_size() for t in all_tensors(clean).values())


@pytest.mark.parametrize("name", ["../secret/w.safetensors", "/etc/w.safetensors", "sub/../../x", "a\\b", "", "x\0y"])
def test_ck_04_a_shard_outside_the_folder_is_never_opened(name: str, tiny_checkpoint: Tiny, tmp_path: Path) -> None:
    source = make_copy(tiny_checkpoint("llama"), tmp_path / "source")
    model = describe(source)
    (tmp_path / "secret").mkdir()
    os.mkfifo(tmp_path / "secret/w.safetensors")  # opening it would hang
    index = json.loads((source / "model.safetensors.index.json").read_text())
    index["weight_map"]["lm_head.weight"] = name
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    assert_refused(source, model, tmp_path / "out", "lm_head.weight")


def test_missing_unused_and_misshapen_tensors_are_all_listed_at_once(tiny_checkpoint: Tiny, tmp_path: Path) -> None:
    source = make_copy(tiny_checkpoint("qwen3_moe"), tmp_path / "source")
    model = describe(source)
    tensors = all_tensors(source)
    for path in [*shards(source), source / "model.safetensors.index.json"]:
        path.unlink()
    gone = "model.layers.0.input_layernorm.weight"
    del tensors[gone]
    tensors["model.layers.0.surprise.weight"] = torch.zeros(2)
    tensors["model.norm.weight"] = torch.zeros(3, dtype=torch.bfloat16)
    del tensors["model.layers.0.mlp.experts.1.up_proj.weight"]
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    assert_refused(source, model, tmp_path / "out", gone, "surprise", "model.norm.weight", "model.layers.0.mlp.experts")


def test_ck_09_a_tied_head_may_be_stored_on_either_side_or_both(tiny_checkpoint: Tiny, tmp_path: Path) -> None:
    clean = tiny_checkpoint("gemma3_text")
    model, tensors = describe(clean), all_tensors(clean)
    embedding = tensors["model.embed_tokens.weight"]

    def variant(name: str, change: dict[str, torch.Tensor | None]) -> Path:
        folder = make_copy(clean, tmp_path / name)
        for path in [*shards(folder), folder / "model.safetensors.index.json"]:
            path.unlink()
        kept = {key: value for key, value in (tensors | change).items() if value is not None}
        save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
        return folder

    only_head = variant("head", {"model.embed_tokens.weight": None, "lm_head.weight": embedding})
    convert(only_head, model, Layout(), tmp_path / "a")
    assert torch.equal(reassembled(tmp_path / "a", model)["model.embed_tokens.weight"], embedding)
    both = variant("both", {"lm_head.weight": embedding.clone()})
    report = convert(both, model, Layout(), tmp_path / "b")
    assert list(report.ledger.dropped) == ["lm_head.weight"] and verify(tmp_path / "b", both) == ()
    assert_refused(
        variant("differ", {"lm_head.weight": embedding + 1}), model, tmp_path / "c", "lm_head.weight", "different values"
    )
    assert_refused(variant("none", {"model.embed_tokens.weight": None}), model, tmp_path / "d", "model.embed_tokens.weight")


def test_draft_layers_are_dropped_with_a_reason_and_other_extra_layers_refused(tiny_checkpoint: Tiny, tmp_path: Path) -> None:
    clean = tiny_checkpoint("deepseek_v3")
    layers = describe(clean).dimensions.num_layers

    def with_layer(name: str, draft_layers: int) -> Path:
        folder = make_copy(clean, tmp_path / name)
        config = json.loads((folder / "config.json").read_text()) | {"num_nextn_predict_layers": draft_layers}
        (folder / "config.json").write_text(json.dumps(config))
        tensors = all_tensors(folder)
        for path in [*shards(folder), folder / "model.safetensors.index.json"]:
            path.unlink()
        tensors[f"model.layers.{layers}.eh_proj.weight"] = torch.ones(4, 4)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder

    drafts = with_layer("drafts", 1)
    report = convert(drafts, describe(drafts), Layout(), tmp_path / "out")
    assert list(report.ledger.dropped) == [f"model.layers.{layers}.eh_proj.weight"]
    assert verify(tmp_path / "out", drafts) == ()
    extra = with_layer("extra", 0)
    assert_refused(extra, describe(extra), tmp_path / "refused", f"model.layers.{layers}.eh_proj.weight")


# --- proof ---------------------------------------------------------------------------------------------------------------


def test_one_flipped_bit_anywhere_is_found_and_named(tiny_checkpoint: Tiny, tmp_path: Path) -> None:
    source = tiny_checkpoint("qwen3_moe")
    out = tmp_path / "out"
    convert(source, describe(source), Layout(tp=2), out)
    assert verify(out) == ()
    files = [path for path in sorted(out.rglob("*")) if path.is_file()]
    assert len(files) >= 12
    for path in files:
        data = path.read_bytes()
        name = str(path.relative_to(out))
        for place in {0, 9, len(data) // 3, len(data) // 2, len(data) - 1}:
            flipped = bytearray(data)
            flipped[place] ^= 1 << (place % 8)
            path.write_bytes(bytes(flipped))
            found = verify(out)
            assert found, (name, place)
            assert any(problem.file == name or (problem.file and name.startswith("layout")) for problem in found), (
                name,
                place,
                found,
            )
        path.write_bytes(data)
    # Inside a tensor's bytes the tensor is named.
    entry = next(iter(read_lines(LedgerEntry, out / "rank-00001/ledger.jsonl")))
    with (out / entry.file).open("r+b") as file:
        file.seek(entry.offset + 5)
        byte = file.read(1)
        file.seek(entry.offset + 5)
        file.write(bytes([byte[0] ^ 16]))
    assert [(problem.file, problem.tensor) for problem in verify(out)] == [(entry.file, entry.parameter)]


def test_missing_extra_and_swapped_files_are_found(tiny_checkpoint: Tiny, tmp_path: Path) -> None:
    source = tiny_checkpoint("llama")
    out = tmp_path / "out"
    convert(source, describe(source), Layout(tp=2), out)
    first, second = (sorted((out / f"rank-0000{rank}").glob("*.safetensors"))[0] for rank in (0, 1))
    swap = tmp_path / "swap"
    first.rename(swap), second.rename(first), swap.rename(second)
    assert {problem.file for problem in verify(out)} == {str(path.relative_to(out)) for path in (first, second)}
    first.rename(swap), second.rename(first), swap.rename(second)
    (out / "rank-00000/stray.safetensors").write_bytes(b"x")
    assert [problem.kind for problem in verify(out)] == ["unlisted_file"]
    (out / "rank-00000/stray.safetensors").unlink()
    second.unlink()
    assert [problem.kind for problem in verify(out)] == ["missing_file"]
    (out / "layout.json").unlink()
    with pytest.raises(DayZeroError):
        verify(out)


def test_a_changed_source_is_found_and_not_reused(tiny_checkpoint: Tiny, tmp_path: Path) -> None:
    source = make_copy(tiny_checkpoint("llama"), tmp_path / "source")
    model, out = describe(source), tmp_path / "out"
    first = convert(source, model, Layout(), out)
    assert not first.reused and convert(source, model, Layout(), out).reused
    os.utime(shards(source)[0])  # the same bytes, copied again
    assert convert(source, model, Layout(), out).reused
    shard = shards(source)[0]
    data = bytearray(shard.read_bytes())
    data[-3] ^= 1
    shard.write_bytes(bytes(data))  # other weights behind the same header
    found = verify(out, source)
    assert [problem.kind for problem in found] == ["source_changed"] and found[0].file == shard.name and found[0].tensor
    again = convert(source, model, Layout(), out)
    assert not again.reused and again.key == first.key == artifact_key(model.source_hash, Layout())
    assert verify(out, source) == ()
    with pytest.raises(DayZeroError, match="another artifact"):
        convert(source, model, Layout(tp=2), out)


# --- bad luck ------------------------------------------------------------------------------------------------------------

CHILD = """
import sys, time
from pathlib import Path
from dayzero.core.plan import Layout
from dayzero.core.model import ModelDescription
from dayzero.core.records import read_record, write_record
from dayzero.weights import convert, placement, writing
placement.FILE_BYTES = 20_000
write = writing._write
def slow(handle, block):
    time.sleep(0.02)
    write(handle, block)
writing._write = slow
convert.convert(Path(sys.argv[1]), read_record(ModelDescription, Path(sys.argv[2])), Layout(tp=2), Path(sys.argv[3]))
"""


def test_ck_12_a_killed_conversion_resumes_to_the_same_bytes(
    tiny_checkpoint: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placement, "FILE_BYTES", 20_000)
    source = tiny_checkpoint("qwen3_moe")
    model = describe(source)
    clean, out, record = tmp_path / "clean", tmp_path / "out", tmp_path / "model.json"
    total = convert(source, model, Layout(tp=2), clean).bytes_written
    write_record(model, record)
    work = tmp_path / ".out.partial"
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(source), str(record), str(out)], stderr=subprocess.PIPE, text=True
    )
    try:
        deadline = time.monotonic() + 120
        while len(list(work.rglob("*.done.json"))) < 3:
            assert child.poll() is None and time.monotonic() < deadline, child.communicate()
            time.sleep(0.005)
    finally:
        child.send_signal(signal.SIGKILL)
        child.communicate()
    assert not out.exists() and list(work.rglob("*.safetensors"))
    assert not (work / "layout.json").exists()
    with pytest.raises(DayZeroError, match="not an artifact"):
        verify(work)
    # A finished file that was damaged meanwhile is not trusted.
    damaged = sorted(work.rglob("*.safetensors"))[0]
    data = bytearray(damaged.read_bytes())
    data[-1] ^= 1
    damaged.write_bytes(bytes(data))
    assert 0 < convert(source, model, Layout(tp=2), out).bytes_written < total
    assert folder_hash(out) == folder_hash(clean)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["clean", "model.json", "out"]


def test_a_conversion_killed_before_publishing_only_publishes(
    tiny_checkpoint: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tiny_checkpoint("llama")
    model, out = describe(source), tmp_path / "out"

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("dayzero.weights.places.publishing.publish", killed)
    with pytest.raises(KeyboardInterrupt):
        convert(source, model, Layout(), out)
    assert not out.exists()
    monkeypatch.undo()
    assert convert(source, model, Layout(), out).bytes_written == 0
    assert verify(out, source) == ()


def test_a_file_size_limit_ends_in_one_clear_error_and_no_output(
    tiny_checkpoint: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a full disk would: nothing usable is left, and the next run continues."""
    monkeypatch.setattr(placement, "FILE_BYTES", 20_000)
    source, out = tiny_checkpoint("llama"), tmp_path / "out"
    model = describe(source)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    for limit in (30_000, 10_000):  # within a shard; and past the shards, in a record
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
        try:
            with pytest.raises(DayZeroError, match="cannot write"):
                convert(source, model, Layout(), out)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert not out.exists() and not list((tmp_path / ".out.partial").rglob("*.partial"))
        assert not (tmp_path / ".out.partial/layout.json").exists()
    convert(source, model, Layout(), out)
    assert verify(out, source) == ()


def test_a_full_disk_is_known_before_anything_is_written(
    tiny_checkpoint: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dayzero.weights import running

    source = tiny_checkpoint("llama")
    monkeypatch.setattr(running, "free_bytes", lambda path: 1000)
    with pytest.raises(DayZeroError, match="not enough space"):
        convert(source, describe(source), Layout(), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_output_that_is_something_else_is_never_touched(tiny_checkpoint: Tiny, tmp_path: Path) -> None:
    source = tiny_checkpoint("llama")
    (tmp_path / "out").mkdir()
    (tmp_path / "out/thesis.txt").write_text("mine")
    with pytest.raises(DayZeroError, match="in the way"):
        convert(source, describe(source), Layout(), tmp_path / "out")
    with pytest.raises(DayZeroError, match="in the way"):
        export(source, tmp_path / "out")
    assert (tmp_path / "out/thesis.txt").read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


def test_two_conversions_into_one_folder_do_not_meet(tiny_checkpoint: Tiny, tmp_path: Path) -> None:
    from dayzero.weights.places.workfolder import locked_work_folder

    source = tiny_checkpoint("llama")
    with locked_work_folder(tmp_path / "out", complete="layout.json"), pytest.raises(DayZeroError, match="another conversion"):
        convert(source, describe(source), Layout(), tmp_path / "out")
