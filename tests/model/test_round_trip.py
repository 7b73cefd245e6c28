"""Out to rank shards and back, bit for bit: a sample of `benchmarks/round_trip.py`, and the cases that are easy to get wrong.

Cites CK-11, CK-14, NU-16, TP-03 (TP-01 is refused when planning: tests/unit/test_plan.py).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch.nn.functional import silu
from transformers import AutoConfig, AutoModelForCausalLM
from transformers import core_model_loading as loading

from dayzero.core.artifact import LedgerEntry
from dayzero.core.errors import DayZeroError
from dayzero.core.plan import Layout
from dayzero.model.describe import describe
from dayzero.weights.algebra import View, concatenate
from dayzero.weights.convert import convert
from dayzero.weights.copying import BlockCopier
from dayzero.weights.ledger import SourceTensor, read_lines
from dayzero.weights.proof.verify import prove, verify
from dayzero.weights.reading import LocalStore, SourceReader
from dayzero.weights.to_hf import export
from tests.model.test_convert import all_tensors, assert_refused, make_copy, reassembled, reference_state, shards
from tests.round_trip import DEGREES, has_experts, round_trips, same_bits, tensors_of

Tiny = Callable[..., Path]

# Experts merged, interleaved and transposed; latent, sparse, sliding and linear attention; state-space and hybrid layers;
# tied heads; fused projections; towers; draft layers. Layouts go round; the first four types have two.
SAMPLE = ["llama", "gpt_oss", "qwen3_moe", "deepseek_v3", "deepseek_v32", "qwen3_next", "kimi_linear", "gemma3_text",
          "nemotron_h", "llama4_text", "minimax_m2", "ernie4_5_moe", "granitemoehybrid", "mamba2", "phi3", "bloom",
          "longcat_flash", "mistral_large4", "kimi_k25", "step3p7"]  # fmt: skip


@pytest.mark.parametrize("model_type", SAMPLE)
def test_there_and_back_bit_for_bit(model_type: str, tiny_checkpoint: Tiny, tmp_path: Path) -> None:
    source = tiny_checkpoint(model_type)
    model = describe(source)
    wide = [degrees for degrees in DEGREES if degrees != (1, 1, 1) and (has_experts(model) or degrees[1] == 1)]
    at = SAMPLE.index(model_type)
    chosen = [wide[at % len(wide)], *([wide[(5 * at + 3) % len(wide)]] if at < 4 else [])]
    found = list(round_trips(source, model, tmp_path / "work", chosen))
    assert [(one.layout, one.state, one.detail) for one in found] == [(one.layout, "exact", "") for one in found]


# --- CK-11: strided slices and transposed tensors ------------------------------------------------------------------------


class _Arrays(SourceReader):
    """Tensors as C-order bytes under their names, as a file stores them, read through the reader that conversion uses."""

    def __init__(self, arrays: dict[str, np.ndarray]) -> None:
        super().__init__(LocalStore(Path()), {}, compute=lambda source: arrays)


def bytes_of(view: View, arrays: dict[str, np.ndarray]) -> bytes:
    return b"".join(bytes(block) for _, block in BlockCopier(_Arrays(arrays)).blocks(view))


@given(st.lists(st.integers(1, 7), min_size=1, max_size=3), st.data())
@settings(max_examples=60, deadline=None)
def test_ck_11_slices_are_written_as_contiguous_copies_and_rejoin(shape: list[int], data: st.DataObject) -> None:
    """Any shape, any order of dimensions, any axis, any number of ranks: each part equals numpy's ascontiguousarray."""
    order = data.draw(st.permutations(range(len(shape))))
    dim, ranks = data.draw(st.integers(0, len(shape) - 1)), data.draw(st.integers(1, 4))
    array = np.arange(int(np.prod(shape)), dtype=np.uint16).reshape(shape)
    view, want = View.of("w", tuple(shape), "int16").permute(order), array.transpose(order)
    ends = [want.shape[dim] * rank // ranks for rank in range(ranks + 1)]
    parts = [view.slice(dim, start, stop) for start, stop in pairwise(ends)]
    for part, piece in zip(parts, np.split(want, ends[1:-1], axis=dim), strict=True):
        if part.num_elements:
            assert bytes_of(part, {"w": array}) == np.ascontiguousarray(piece).tobytes()
    joined = concatenate(parts, dim)
    assert bytes_of(joined, {"w": array}) == np.ascontiguousarray(want).tobytes()
    back = np.frombuffer(bytes_of(joined, {"w": array}), dtype=np.uint16).reshape(want.shape)
    assert np.array_equal(back.transpose(np.argsort(order)), array)


def test_ck_11_arrays_in_another_memory_order_are_read_element_by_element() -> None:
    """What an operation computed may be Fortran-ordered or run backwards in memory: its elements count, not its bytes."""
    array = np.arange(48, dtype=np.uint16).reshape(6, 8)
    for stored in (
        np.asfortranarray(array),
        array[::-1],
        array[:, ::-1],
        np.arange(96, dtype=np.uint16).reshape(6, 16)[:, ::2],
    ):
        for view in (View.of("w", (6, 8), "int16"), View.of("w", (6, 8), "int16").permute((1, 0)).slice(0, 2, 7)):
            want = stored if view.shape == (6, 8) else stored.T[2:7]
            assert bytes_of(view, {"w": stored}) == np.ascontiguousarray(want).tobytes()


# --- CK-14: layers past the stack ----------------------------------------------------------------------------------------


def with_tensors(source: Path, folder: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> Path:
    """A copy of the release whose tensors are `change`d, in one file."""
    copy = make_copy(source, folder)
    tensors = change(all_tensors(copy))
    for path in [*shards(copy), *copy.glob("*.index.json")]:
        path.unlink()
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    return copy


def announcing(folder: Path, num_drafts: int) -> Path:
    """The release with a config that announces so many draft layers, wherever it keeps its text settings."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config.get("text_config", config)["num_nextn_predict_layers"] = num_drafts
    path.write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("model_type", "prefix", "name"),
    [
        ("deepseek_v3", "model.layers.", "self_attn.q_a_proj.weight"),
        ("deepseek_v3", "layers.", "mlp.experts.0.up_proj.weight"),
        ("kimi_k25", "language_model.model.blocks.", "eh_proj.weight"),
    ],
)
def test_ck_14_an_announced_draft_layer_is_listed_and_changes_no_shard(
    model_type: str, prefix: str, name: str, tiny_checkpoint: Tiny, tmp_path: Path
) -> None:
    """Whatever the names begin with. Not announced, the same tensor is an error; no layer of the stack is ever dropped."""
    source = tiny_checkpoint(model_type)
    layers = describe(source).dimensions.num_layers
    draft = f"{prefix}{layers}.{name}"

    def extended(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        renamed = {key.replace("model.", "", 1) if prefix == "layers." else key: value for key, value in tensors.items()}
        return renamed | {draft: torch.ones(4, 4, dtype=torch.bfloat16)}

    announced = announcing(with_tensors(source, tmp_path / "drafts", extended), 1)
    report = convert(announced, describe(announced), Layout(tp=2), tmp_path / "out")
    assert list(report.ledger.dropped) == [draft] and str(layers) in report.ledger.dropped[draft]
    assert prove(tmp_path / "out", announced).problems == ()
    got, want = reassembled(tmp_path / "out", describe(source)), reference_state(source)
    assert all(torch.equal(got[key], want[key]) for key in want)
    export(tmp_path / "out", tmp_path / "back")
    assert tensors_of(tmp_path / "back").keys() == tensors_of(announced).keys() - {draft}
    extra = announcing(make_copy(announced, tmp_path / "extra"), 0)
    assert_refused(extra, describe(extra), tmp_path / "refused", draft)


# --- TP-03: experts that do not divide -----------------------------------------------------------------------------------


def with_experts(source: Path, folder: Path, num_experts: int) -> Path:
    config = AutoConfig.from_pretrained(source)
    config.num_experts, config.moe_intermediate_size = num_experts, 16
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(("experts", "ranks"), [(128, 6), (8, 3)])
def test_tp_03_uneven_experts_are_each_on_one_rank(experts: int, ranks: int, tiny_checkpoint: Tiny, tmp_path: Path) -> None:
    """Union complete, disjoint, counts differ by at most one, every rank looked at; and the sum over ranks is the whole."""
    source = with_experts(tiny_checkpoint("qwen3_moe"), tmp_path / "source", experts)
    model, out = describe(source), tmp_path / "out"
    convert(source, model, Layout(dp=ranks, ep=ranks), out)
    assert len(prove(out, source).proved) == 4
    reference = reference_state(source)
    down = "model.layers.0.mlp.experts.down_proj"
    x = torch.randn(3, reference[down].shape[-1], dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    owners: dict[int, int] = {}
    total = torch.zeros(3, reference[down].shape[1], dtype=torch.float64)
    for rank in range(ranks):
        entry = next(e for e in read_lines(LedgerEntry, out / f"rank-{rank:05d}/ledger.jsonl") if e.parameter == down)
        own = sorted(int(one.tensor.split(".experts.")[1].split(".")[0]) for one in entry.sources)
        assert owners.keys().isdisjoint(own) and entry.shape[0] == len(own)
        owners |= dict.fromkeys(own, rank)
        total += torch.einsum("th,ech->tc", x, load_file(out / entry.file)[down].double())
    assert owners.keys() == set(range(experts))
    counts = [list(owners.values()).count(rank) for rank in range(ranks)]
    assert max(counts) - min(counts) <= 1
    assert torch.allclose(total, torch.einsum("th,ech->tc", x, reference[down].double()), atol=1e-6)
    export(out, tmp_path / "back")
    back, original = tensors_of(tmp_path / "back"), tensors_of(source)
    assert back.keys() == original.keys() and all(same_bits(back[name], original[name]) for name in original)


# --- NU-16: rows of gate and up ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("model_type", "interleaved"), [("qwen3_moe", False), ("mixtral", False), ("gpt_oss", True)])
def test_nu_16_every_rank_has_matching_rows_of_gate_and_up(
    model_type: str, interleaved: bool, tiny_checkpoint: Tiny, tmp_path: Path
) -> None:
    """Rows interleaved or one half after the other: a rank's gate, up and down belong to the same units, so that what the
    ranks compute adds up to the whole."""
    source = tiny_checkpoint(model_type)
    model, out, ranks = describe(source), tmp_path / "out", 2
    convert(source, model, Layout(tp=ranks), out)
    state = reference_state(source)
    up_name = next(name for name in state if name.endswith("experts.gate_up_proj"))
    down_name = up_name.replace("gate_up_proj", "down_proj")
    hidden = state["model.norm.weight"].shape[0]
    x = torch.randn(3, hidden, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def halves(fused: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return (fused[..., 0::2], fused[..., 1::2]) if interleaved else tuple(fused.chunk(2, dim=-1))  # type: ignore[return-value]

    def expert(fused: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        """The first expert; fused as [hidden, 2 units], down as [units, hidden]."""
        gate, up = halves(x @ fused[0].double() if interleaved else x @ fused[0].double().T)
        return (silu(gate) * up) @ (down[0].double() if interleaved else down[0].double().T)

    parts = []
    for rank in range(ranks):
        stored: dict[str, torch.Tensor] = {}
        for file in sorted((out / f"rank-{rank:05d}").glob("*.safetensors")):
            stored |= load_file(file)
        parts.append((stored[up_name], stored[down_name]))
    whole = expert(state[up_name], state[down_name])
    assert torch.allclose(sum(expert(*part) for part in parts), whole, atol=1e-9)
    # A swap would be seen: with gate and up exchanged on one rank the sum is another.
    fused, down = parts[1]
    dim = fused.ndim - 1 if interleaved else 1
    size = fused.shape[dim]
    order = torch.arange(size).view(-1, 2).flip(1).reshape(-1) if interleaved else torch.arange(size).roll(size // 2)
    swapped = expert(*parts[0]) + expert(fused.index_select(dim, order), down)
    assert (swapped - whole).abs().max() > 1e-6
    # And row by row.
    want_gate, want_up = halves(state[up_name] if interleaved else state[up_name].transpose(1, 2))
    for rank, (fused, _) in enumerate(parts):
        gate, up = halves(fused if interleaved else fused.transpose(1, 2))
        units = slice(rank * gate.shape[-1], (rank + 1) * gate.shape[-1])
        assert torch.equal(gate, want_gate[..., units]) and torch.equal(up, want_up[..., units])


# --- where the inverse ends ----------------------------------------------------------------------------------------------


class _CutRows(loading.ConversionOps):
    """Padding of a stored matrix that the class does not have."""

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def convert(self, input_dict: Any, source_patterns: Any, target_patterns: Any, **_: Any) -> Any:
        return {target_patterns[0]: next(iter(input_dict.values()))[0][: self.rows]}

    @property
    def reverse_op(self) -> Any:
        raise NotImplementedError


def test_padding_that_a_conversion_cuts_off_is_listed_and_the_rest_comes_back(
    tiny_checkpoint: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A source used in part: said in the list of sources, proved, and written back under the parameter's own name."""
    from transformers import conversion_mapping

    name = "model.layers.0.mlp.down_proj.weight"
    source = tiny_checkpoint("llama")
    rows = all_tensors(source)[name].shape[0]
    converter = loading.WeightConverter("mlp.down_proj.weight", "mlp.down_proj.weight", [_CutRows(rows)])
    conversion_mapping.get_checkpoint_conversion_mapping("llama")
    monkeypatch.setitem(conversion_mapping._checkpoint_conversion_mapping_cache, "llama", [converter])
    padded = with_tensors(source, tmp_path / "padded", lambda t: t | {name: torch.cat([t[name], t[name][:3] * 0 + 7])})
    report = convert(padded, describe(source), Layout(tp=2), tmp_path / "out")
    assert [problem.tensor for problem in report.problems if problem.kind == "partly_used"] == [name]
    lines = {one.tensor: one.partly_used for one in read_lines(SourceTensor, tmp_path / "out/sources.jsonl")}
    assert [key for key, reason in lines.items() if reason] == [name]
    assert len(prove(tmp_path / "out", padded).proved) == 4 and verify(tmp_path / "out") == ()
    found = export(tmp_path / "out", tmp_path / "back")
    assert [problem.kind for problem in found.problems] == ["no_inverse"]
    back, original = tensors_of(tmp_path / "back"), tensors_of(source)
    assert back.keys() == original.keys() and all(same_bits(back[key], original[key]) for key in original)


def test_a_ledger_that_does_not_say_where_elements_are_gives_no_folder(tiny_checkpoint: Tiny, tmp_path: Path) -> None:
    """The inverse of a ledger with a hole is refused, not filled."""
    source, out = tiny_checkpoint("llama"), tmp_path / "out"
    convert(source, describe(source), Layout(tp=2), out)
    ledger = out / "rank-00001/ledger.jsonl"
    lines = [json.loads(line) for line in ledger.read_text().splitlines()]
    kept = [line for line in lines if line["parameter"] != "model.layers.0.self_attn.q_proj.weight"]
    assert len(kept) == len(lines) - 1
    ledger.write_text("".join(json.dumps(line) + "\n" for line in kept))
    with pytest.raises(DayZeroError, match=r"self_attn\.q_proj\.weight"):
        export(out, tmp_path / "back")
    assert not (tmp_path / "back").exists()
    shutil.rmtree(out)
