"""Damage to values of small checkpoints is found and named; sound ones, random or fresh, are left alone."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dayzero.core.model import Problem
from dayzero.core.records import from_dict, to_dict
from dayzero.model.headers import TensorEntry, read_header
from dayzero.weights.checks.census import TensorCensus, TensorStatistics
from dayzero.weights.checks.census_rules import judge
from tests.tiny.build import make_tiny_checkpoint, make_tiny_model

Tensors = dict[str, torch.Tensor]
LAYERS, EXPERTS, SIZE, BLOCK = 6, 4, 128, 64
Q, DOWN, NORM, UP = "self_attn.q_proj.weight", "mlp.down_proj.weight", "input_layernorm.weight", "mlp.up_proj.weight"
BIAS, EXPERT = "self_attn.q_proj.bias", "mlp.experts.{}.up_proj.weight"
EMBEDDING = "model.embed_tokens.weight"


def of(layer: int, part: str) -> str:
    return f"model.layers.{layer}.{part}"


def make_tensors(dtype: torch.dtype = torch.bfloat16) -> Tensors:
    """A sound model: normal weights of width 0.02, norms about 1, an embedding with padding behind, constant sinks."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return (0.02 * torch.randn(*shape, generator=generator)).to(dtype)

    tensors = {EMBEDDING: normal(320, SIZE), "lm_head.weight": normal(320, SIZE)}
    tensors[EMBEDDING][300:] = 0
    tensors[EMBEDDING][2] = 0
    for layer in range(LAYERS):
        tensors[of(layer, Q)] = normal(SIZE, SIZE)
        tensors[of(layer, BIAS)] = normal(SIZE)
        tensors[of(layer, DOWN)] = normal(SIZE, 2 * SIZE)
        tensors[of(layer, UP)] = normal(2 * SIZE, SIZE)
        tensors[of(layer, NORM)] = 1 + normal(SIZE)
        tensors[of(layer, "self_attn.sinks")] = torch.zeros(SIZE, dtype=dtype)
        for expert in range(EXPERTS):
            tensors[of(layer, EXPERT.format(expert))] = normal(64, SIZE)
    return tensors


def make_fp8() -> Tensors:
    """The linear weights of it as FP8 in blocks, with a scale each, one block of them all zero."""
    tensors: Tensors = {}
    for name, weight in make_tensors(torch.float32).items():
        if "_proj.weight" not in name:
            tensors[name] = weight
            continue
        rows, columns = weight.shape
        if name == of(0, DOWN):
            weight[:BLOCK, :BLOCK] = 0
        blocks = weight.reshape(rows // BLOCK, BLOCK, columns // BLOCK, BLOCK)
        scale = blocks.abs().amax(dim=(1, 3), keepdim=True) / 448
        codes = blocks / scale.clamp(min=1e-30)
        tensors[name] = codes.reshape(rows, columns).to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = scale[:, 0, :, 0].contiguous()
    return tensors


def make_packed() -> Tensors:
    """Four-bit codes in words of 32 bits, as GPTQ stores them, zero points all alike, and microscaled blocks."""
    generator = torch.Generator().manual_seed(0)
    tensors: Tensors = {}
    for layer in range(LAYERS):
        base = of(layer, "mlp.up_proj")
        tensors[f"{base}.qweight"] = torch.randint(-(2**31), 2**31 - 1, (32, 64), generator=generator, dtype=torch.int32)
        tensors[f"{base}.scales"] = (torch.rand(8, 64, generator=generator) * 0.01 + 0.001).half()
        tensors[f"{base}.qzeros"] = torch.full((8, 8), 0x77777777, dtype=torch.int32)
        tensors[f"{base}.g_idx"] = torch.arange(256, dtype=torch.int32) // 32
        base = of(layer, "mlp.experts.down_proj")
        tensors[f"{base}_blocks"] = torch.randint(0, 256, (4, 32, 4, 16), generator=generator, dtype=torch.uint8)
        tensors[f"{base}_scales"] = torch.randint(115, 124, (4, 32, 4), generator=generator, dtype=torch.uint8)
    return tensors


def take(name: str, tensor: torch.Tensor, block_bytes: int = 4096) -> tuple[TensorStatistics, str]:
    raw = memoryview(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())
    census = TensorCensus(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
    for start in range(0, len(raw), block_bytes):
        census.update(raw[start : start + block_bytes])
    return census.finish(), hashlib.sha256(raw).hexdigest()


def judged(tensors: Tensors) -> list[Problem]:
    taken = {name: take(name, tensor) for name, tensor in tensors.items()}
    entries, begin = {}, 1000
    for name, tensor in tensors.items():
        end = begin + tensor.numel() * tensor.element_size()
        dtype = str(tensor.dtype).removeprefix("torch.")
        entries[name] = TensorEntry(file="model.safetensors", dtype=dtype, shape=tuple(tensor.shape), begin=begin, end=end)
        begin = end
    return judge({name: one[0] for name, one in taken.items()}, {name: one[1] for name, one in taken.items()}, entries)


def judged_folder(folder: Path) -> list[Problem]:
    from safetensors import safe_open

    entries: dict[str, TensorEntry] = {}
    taken = {}
    for path in sorted(folder.glob("*.safetensors")):
        header, problems = read_header(path, path.name)
        assert header is not None and not problems
        entries |= header.tensors
        with safe_open(path, "pt") as file:
            taken |= {name: take(name, file.get_tensor(name), 1 << 19) for name in header.tensors}
    return judge({name: one[0] for name, one in taken.items()}, {name: one[1] for name, one in taken.items()}, entries)


def put(name: str, change: Callable[[torch.Tensor], torch.Tensor | None]) -> Callable[[Tensors], None]:
    """Damage to one tensor: changed in place, or replaced by what is returned."""

    def edit(tensors: Tensors) -> None:
        made = change(tensors[name])
        if made is not None:
            tensors[name] = made

    return edit


def bytes_of(tensor: torch.Tensor) -> np.ndarray:
    return tensor.view(torch.uint8).reshape(-1).numpy()


def zero_bytes(name: str, begin: int, count: int | None = None) -> Callable[[Tensors], None]:
    def edit(tensors: Tensors) -> None:
        bytes_of(tensors[name])[begin : None if count is None else begin + count] = 0

    return edit


def copied(*pairs: tuple[str, str]) -> Callable[[Tensors], None]:
    def edit(tensors: Tensors) -> None:
        for source, target in pairs:
            tensors[target] = tensors[source].clone()

    return edit


def flip(name: str, index: int, bit: int) -> Callable[[Tensors], None]:
    def edit(tensors: Tensors) -> None:
        tensors[name].view(torch.int16).reshape(-1)[index] ^= torch.tensor(1 << bit, dtype=torch.int16)

    return edit


def set_value(name: str, index: int, value: float) -> Callable[[Tensors], None]:
    return put(name, lambda tensor: tensor.reshape(-1).__setitem__(index, value))


# damage -> (kind of problem, tensor named, severity, what the detail says)
DENSE: dict[str, tuple[Callable[[Tensors], None], str, str, str, str]] = {
    "a NaN": (set_value(of(1, Q), 1000, float("nan")), "nonfinite_values", of(1, Q), "error", "1 NaN of 16384 values, the first at index 1000"),
    "an infinity": (set_value(of(1, Q), 77, float("-inf")), "nonfinite_values", of(1, Q), "error", "1 infinite of 16384 values, the first at index 77"),
    "a NaN in a norm": (set_value(of(1, NORM), 3, float("nan")), "nonfinite_values", of(1, NORM), "error", "index 3"),
    "a page of zeros across rows": (zero_bytes(of(1, DOWN), 5000, 4096), "zero_run", of(1, DOWN), "error", "4096 bytes of zeros from byte 5000"),
    "a page of zeros, whole rows": (zero_bytes(of(1, DOWN), 8192, 4096), "zero_run", of(1, DOWN), "error", "8 whole rows of 128"),
    "a hole of 600 bytes": (zero_bytes(of(1, DOWN), 7000, 600), "zero_run", of(1, DOWN), "error", "600 bytes of zeros from byte 7000"),
    "a page of zeros in the embedding": (zero_bytes(EMBEDDING, 10000, 4096), "zero_run", EMBEDDING, "error", "from byte 10000"),
    "half of the embedding": (zero_bytes(EMBEDDING, 256 * 150), "zero_run", EMBEDDING, "warning", "up to its end"),
    "a tail of zeros": (zero_bytes(of(1, DOWN), 40000), "zero_run", of(1, DOWN), "error", "up to its end"),
    "one row of zeros": (zero_bytes(of(1, DOWN), 512 * 5, 512), "zero_run", of(1, DOWN), "warning", "1 whole rows"),
    "a matrix of zeros": (zero_bytes(of(1, DOWN), 0), "zero_tensor", of(1, DOWN), "error", "5 of 5 others are not"),
    "a norm of zeros": (zero_bytes(of(1, NORM), 0), "zero_tensor", of(1, NORM), "error", "all 128 values are zero"),
    "a bias of zeros": (zero_bytes(of(1, BIAS), 0), "zero_tensor", of(1, BIAS), "error", "all 128 values are zero"),
    "an embedding of zeros": (zero_bytes(EMBEDDING, 0), "zero_tensor", EMBEDDING, "error", "all 40960 values are zero"),
    "an expert of zeros": (zero_bytes(of(1, EXPERT.format(2)), 0), "zero_tensor", of(1, EXPERT.format(2)), "error", "23 of 23"),
    "one value everywhere": (put(of(1, DOWN), torch.ones_like), "constant_tensor", of(1, DOWN), "error", "5 of 5 others vary"),
    "an exponent's top bit": (flip(of(1, Q), 1234, 14), "exponent_out_of_line", of(1, Q), "error", "at index 1234 is no sound value"),
    "an exponent's top bit in the head": (flip("lm_head.weight", 5, 14), "exponent_out_of_line", "lm_head.weight", "error", "at index 5 "),
    "an exponent's second bit": (flip(of(1, Q), 1234, 13), "exponent_out_of_line", of(1, Q), "warning", "index 1234 is below 2^-48"),
    "one number far above": (set_value(of(1, Q), 99, 5000.0), "exponent_out_of_line", of(1, Q), "error", "4.99e+03 at index 99 stands alone"),
    "a matrix far too large": (put(of(1, Q), lambda t: t * 1024), "exponent_out_of_line", of(1, Q), "error", "its values are about 2^3, those of its kind about 2^-7"),
    "a matrix far too small": (put(of(1, Q), lambda t: t * 2.0**-30), "exponent_out_of_line", of(1, Q), "warning", "those of its kind about 2^-7"),
    "bytes swapped": (put(of(1, Q), lambda t: t.view(torch.uint8).reshape(-1, 2).flip(1).contiguous().view(torch.bfloat16).reshape(t.shape)),
                      "nonfinite_values", of(1, Q), "error", "its bytes swapped"),
    "float16 bits": (put(of(1, Q), lambda t: t.half().view(torch.bfloat16)), "wrong_type", of(1, Q), "error", "read like float16"),
    "bfloat16 bits as float16": (put(of(1, Q), lambda t: t.view(torch.float16)), "wrong_type", of(1, Q), "error", "read like bfloat16"),
    "float32 halves": (put(of(1, Q), lambda t: torch.randn(SIZE, SIZE // 2, generator=torch.Generator().manual_seed(1)).mul(0.02).view(torch.bfloat16)),
                       "nonfinite_values", of(1, Q), "error", "read like float32"),
    "bfloat16 pairs as float32": (put(of(1, Q), lambda t: t.reshape(-1).view(torch.float32).reshape(SIZE, -1)), "wrong_type", of(1, Q), "error", "read like bfloat16"),
    "an expert twice": (copied((of(1, EXPERT.format(0)), of(1, EXPERT.format(2)))), "identical_tensors", of(1, EXPERT.format(2)), "error", of(1, EXPERT.format(0))),
    "a matrix of another layer": (copied((of(1, UP), of(3, UP))), "identical_tensors", of(3, UP), "error", of(1, UP)),
    "a whole layer twice": (lambda tensors: copied(*[(name, name.replace(".1.", ".3.", 1)) for name in list(tensors) if ".layers.1." in name])(tensors),
                            "identical_tensors", of(3, UP), "warning", "whole layers are alike"),
}  # fmt: skip
SCALE = of(1, f"{UP}_scale_inv")
FP8: dict[str, tuple[Callable[[Tensors], None], str, str, str, str]] = {
    "scales inverted": (put(SCALE, lambda t: 1 / t), "scale_values", SCALE, "error", "look inverted"),
    "scales of one": (put(SCALE, torch.ones_like), "scale_values", SCALE, "error", "scales about 2^0.0"),
    "scales far too small": (put(SCALE, lambda t: t * 2.0**-20), "scale_values", SCALE, "warning", "those of its kind"),
    "scales of zero": (put(SCALE, torch.zeros_like), "scale_values", SCALE, "error", "8 of 8 scales are zero, and the weight's codes are not"),
    "one scale of zero": (set_value(SCALE, 2, 0.0), "scale_values", SCALE, "error", "1 of 8 scales are zero"),
    "scale of NaN": (set_value(SCALE, 2, float("nan")), "scale_values", SCALE, "error", "1 NaN and 0 infinite of 8 scales, the first at index 2"),
    "scale negative": (set_value(SCALE, 2, -1e-4), "scale_values", SCALE, "error", "1 of 8 scales are negative"),
    "an FP8 NaN": (put(of(1, UP), lambda t: bytes_of(t).__setitem__(2000, 0xFF)), "nonfinite_values", of(1, UP), "error", "index 2000"),
    "an FP8 page of zeros": (zero_bytes(of(1, UP), 3000, 4096), "zero_run", of(1, UP), "error", "4096 bytes of zeros"),
}  # fmt: skip
WORDS, BLOCKS, EXPONENTS = (
    of(2, "mlp.up_proj.qweight"),
    of(2, "mlp.experts.down_proj_blocks"),
    of(2, "mlp.experts.down_proj_scales"),
)
PACKED: dict[str, tuple[Callable[[Tensors], None], str, str, str, str]] = {
    "words of zero": (put(WORDS, torch.zeros_like), "zero_tensor", WORDS, "error", "are zero"),
    "words all alike": (put(WORDS, lambda t: torch.full_like(t, 0x12345678)), "constant_tensor", WORDS, "error", "packed words are the same"),
    "a page of zeros in words": (zero_bytes(WORDS, 1000, 4096), "zero_run", WORDS, "error", "4096 bytes of zeros"),
    "a page of zeros in blocks": (zero_bytes(BLOCKS, 1000, 4096), "zero_run", BLOCKS, "error", "4096 bytes of zeros"),
    "an exponent that is NaN": (put(EXPONENTS, lambda t: t.reshape(-1).__setitem__(100, 255)), "scale_values", EXPONENTS, "error", "index 100"),
    "exponents inverted": (put(EXPONENTS, lambda t: 254 - t), "scale_values", EXPONENTS, "error", "look inverted"),
    "all scales negative": (put(of(2, "mlp.up_proj.scales"), lambda t: -t), "scale_values", of(2, "mlp.up_proj.scales"), "error", "512 of 512"),
}  # fmt: skip
CASES = [(make, name, *case) for make, table in ((make_tensors, DENSE), (make_fp8, FP8), (make_packed, PACKED))
         for name, case in table.items()]  # fmt: skip


@pytest.mark.parametrize(
    ("make", "name", "damage", "kind", "tensor", "severity", "says"), CASES, ids=[case[1] for case in CASES]
)
def test_damage_is_found_and_named(
    make: Callable[[], Tensors], name: str, damage: Any, kind: str, tensor: str, severity: str, says: str
) -> None:
    tensors = make()
    damage(tensors)
    found = judged(tensors)
    mine = [problem for problem in found if problem.tensor == tensor]
    assert [(problem.kind, problem.severity) for problem in mine] == [(kind, severity)], found
    assert says in mine[0].detail and mine[0].file == "model.safetensors"
    if name != "a whole layer twice":
        assert found == mine, "nothing else is blamed"


@pytest.mark.parametrize("make", [make_tensors, make_fp8, make_packed])
def test_sound_tensors_are_left_alone(make: Callable[[], Tensors]) -> None:
    assert judged(make()) == []


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
def test_sound_tensors_of_other_types_are_left_alone(dtype: torch.dtype) -> None:
    assert judged(make_tensors(dtype)) == []


def test_outliers_and_structure_of_sound_models_are_left_alone() -> None:
    tensors = make_tensors()
    tensors[of(2, DOWN)][:, 7] *= 50  # a channel of outliers
    tensors[of(2, DOWN)][3, 9] = 6.0  # one weight that everything depends on
    tensors[of(2, NORM)][5] = 40.0
    for layer in range(LAYERS):
        tensors[of(layer, "attn.bias")] = torch.ones(64, 64, dtype=torch.bfloat16).tril()
        tensors[of(layer, "attn.mask")] = torch.full((64, 64), float("-inf"), dtype=torch.bfloat16).triu(1)
        tensors[of(layer, "rotary.table")] = torch.outer(torch.arange(64.0), 0.9 ** torch.arange(64.0)).sin()
        tensors[of(layer, "attn.pruned.weight")] = tensors[of(layer, Q)] * (torch.arange(SIZE)[:, None] % 16 < 8)
        tensors[of(layer, "shared.weight")] = tensors["lm_head.weight"][:64]
    for number in range(LAYERS):  # tables of which one holds padding
        tensors[f"model.codebooks.{number}.embed.weight"] = torch.randn(
            64, SIZE, generator=torch.Generator().manual_seed(number)
        )
    tensors["model.codebooks.3.embed.weight"][50:] = 0
    tensors["model.causal"] = torch.ones(512, 512).tril()
    tensors["model.fill_value"] = torch.full((1,), torch.finfo(torch.float32).min)
    tensors["model.positions.embed.weight"] = torch.arange(512.0).reshape(-1, 1).mul(torch.logspace(0, -4, 512)).sin()
    found = judged(tensors)
    # One block that all layers share is told, and as no error.
    assert [(problem.kind, problem.severity, problem.tensor) for problem in found] == [
        ("identical_tensors", "warning", of(LAYERS - 1, "shared.weight"))
    ]


def test_one_scale_of_a_kind_is_held_against_its_weight() -> None:
    tensors = {name: tensor for name, tensor in make_fp8().items() if ".1.mlp.up" in name}
    assert judged(tensors) == []
    tensors[SCALE] = 1 / tensors[SCALE]
    assert [(problem.severity, problem.tensor) for problem in judged(tensors)] == [("error", SCALE)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_top_bit_of_any_exponent_is_found(dtype: torch.dtype) -> None:
    """Each element whose number is not far below its neighbours; the bit makes a float16 only 2^16 times as large."""
    sound = make_tensors(dtype)
    generator = torch.Generator().manual_seed(3)
    width, kind = {2: (16, torch.int16), 4: (32, torch.int32)}[sound[of(1, Q)].element_size()]
    indices = torch.nonzero(sound[of(1, Q)].reshape(-1).abs() > 0.01).reshape(-1)
    for index in indices[torch.randperm(len(indices), generator=generator)[:12]].tolist():
        tensors = sound | {of(1, Q): sound[of(1, Q)].clone()}
        tensors[of(1, Q)].view(kind).reshape(-1)[index] ^= torch.tensor(1 << (width - 2), dtype=kind)
        found = [(problem.severity, problem.tensor) for problem in judged(tensors) if f"index {index} " in problem.detail + " "]
        assert found == [("error", of(1, Q))], index


@pytest.mark.parametrize("block_bytes", [8, 24, 1000, 4096, 1 << 20])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float8_e4m3fn", "uint8"])
def test_counts_are_exact_however_the_bytes_arrive(dtype: str, block_bytes: int) -> None:
    """Against the same counts made of the whole tensor at once."""
    kind = getattr(torch, dtype)
    size = torch.empty(0, dtype=kind).element_size()
    generator = torch.Generator().manual_seed(5)
    numbers = torch.randn(100, 600, generator=generator)
    numbers = torch.where(numbers.abs() < 0.01, 1.0, numbers)
    tensor = (numbers * 20 + 128).clamp(min=1).to(kind) if dtype == "uint8" else numbers.to(kind)
    flat = tensor.reshape(-1)
    raw = bytes_of(tensor)
    raw[12100 : 12100 + 6000] = 0  # from within a row, across blocks and rows
    raw[6000 * size * 5 : 6000 * size * 5 + 600 * size * 3] = 0  # rows 50 to 52
    if dtype != "uint8":
        flat[777] = float("nan")
    found, _ = take("model.layers.0.w.weight", tensor, block_bytes)
    assert (found.num_ragged_runs, found.ragged_run) == _longest_run(flat.view(_INTEGER[size]).numpy(), 600, rows=False)
    assert (found.num_row_runs, found.row_run) == _longest_run(flat.view(_INTEGER[size]).numpy(), 600, rows=True)
    assert found.num_row_runs == 1 and found.num_ragged_runs + found.num_row_runs == 2
    if dtype != "uint8":
        values = flat.double().abs().nan_to_num(0)
        assert (found.num_nan, found.nonfinite_at) == (1, 777)
        assert found.largest == float(values.max()) and values[found.largest_at] == found.largest
        assert 0 < found.second <= found.largest


_INTEGER = {1: torch.int8, 2: torch.int16, 4: torch.int32}


def _longest_run(numbers: np.ndarray, row: int, *, rows: bool) -> tuple[int, tuple[int, int]]:
    """How many runs of zeros of 512 bytes or more (of whole rows, or not), and the first and length of the longest."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], numbers == 0, [False])).astype(np.int8)))
    runs = [(int(begin), int(end - begin)) for begin, end in edges.reshape(-1, 2) if (end - begin) * numbers.itemsize >= 512]
    runs = [run for run in runs if (run[0] % row == 0 and run[1] % row == 0) == rows]
    return len(runs), max(runs, key=lambda run: run[1], default=(0, 0))


def test_the_record_is_small_and_survives_json() -> None:
    found, _ = take(of(0, Q), make_tensors()[of(0, Q)])
    data = json.dumps(to_dict(found), allow_nan=False)
    assert from_dict(TensorStatistics, json.loads(data)) == found and len(data) < 700


def test_many_alike_are_told_once_for_their_form() -> None:
    tensors = {f"model.layers.{layer}.w.weight": torch.full((4, 4), float("nan")) for layer in range(40)}
    found = judged(tensors)
    assert len(found) == 1 and "model.layers.*.w.weight: 40 tensors" in found[0].detail


SAMPLED = [
    "llama", "qwen3_moe", "gpt2", "mamba", "mamba2", "deepseek_v3", "gpt_oss", "falcon", "bloom", "opt", "jamba", "zamba2",
    "gemma3_text", "qwen3_next", "rwkv", "ctrl", "xglm", "recurrent_gemma", "granitemoehybrid", "lfm2", "olmoe", "phimoe",
    "helium", "inkling2_text", "kimi_k25",
]  # fmt: skip


@pytest.mark.parametrize("model_type", SAMPLED)
def test_no_alarm_on_sound_checkpoints(model_type: str, tmp_path: Path) -> None:
    from tests.tiny.build import DECODER_TYPES

    assert model_type in DECODER_TYPES
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        make_tiny_checkpoint(model_type, tmp_path, tokenizer=False)
    assert judged_folder(tmp_path) == []


@pytest.mark.parametrize("model_type", ["llama", "mamba2", "gpt_oss", "bloom"])
def test_no_alarm_on_fresh_models(model_type: str) -> None:
    """Ones in all norms, zeros in all biases, as classes set them: tensors that are the same in every layer."""
    model = make_tiny_model(model_type)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.fill_(float("norm" in name or "ln_" in name))
    assert judged({name: tensor.detach() for name, tensor in model.state_dict().items()}) == []
