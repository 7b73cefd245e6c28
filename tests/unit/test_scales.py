"""What headers and settings alone decide about quantized tensors: pairs, meanings of scales, packing. No torch."""

from pathlib import Path
from typing import Any

import pytest

from dayzero.core.errors import DayZeroError
from dayzero.model.headers import TensorEntry
from dayzero.model.stored.scales import (
    logical_shape,
    packing_of,
    read_stored_shape,
    scale_meaning,
    scale_of,
    storage_problems,
    weight_of,
)

FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic", "fmt": "e4m3"}
INT4 = {
    "quant_method": "compressed-tensors", "format": "pack-quantized",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": {
        "num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True, "dynamic": False}}},
}  # fmt: skip


def make_entries(**tensors: tuple[str, list[int]]) -> dict[str, TensorEntry]:
    """Entries of one file each, so that nothing lies in the file of its pair. `__` stands for a dot."""
    return {
        name.replace("__", "."): TensorEntry(file=f"{number}.safetensors", dtype=dtype, shape=tuple(shape), begin=0, end=1)
        for number, (name, (dtype, shape)) in enumerate(tensors.items())
    }


def kinds_of(tensors: dict[str, TensorEntry], settings: dict[str, Any] | None, **more: Any) -> list[tuple[str, str | None]]:
    return [(problem.kind, problem.tensor) for problem in storage_problems(tensors, settings, **more)]


def test_ck_08_weights_and_scales_pair_across_files() -> None:
    tensors = make_entries(
        e5__weight=("float8_e4m3fn", [256, 256]), e5__weight_scale_inv=("float32", [2, 2]),
        alone__weight=("float8_e4m3fn", [256, 256]), lost__weight_scale_inv=("float32", [2, 2]),
        table__weight=("int8", [4, 4]), mask=("bool", [4, 4]), bytes__weight=("uint8", [4]),
    )  # fmt: skip
    found = storage_problems(tensors, FP8)
    assert [(problem.kind, problem.tensor) for problem in found] == [
        ("scale_missing", "alone.weight"),
        ("scale_without_weight", "lost.weight_scale_inv"),
    ]
    assert all(problem.severity == "error" and problem.file for problem in found)
    assert scale_of("e5.weight", tensors) == "e5.weight_scale_inv" and weight_of("e5.weight_scale_inv", tensors) == "e5.weight"


def test_ck_08_fp8_without_a_declaration_is_no_less_an_error() -> None:
    tensors = make_entries(a__weight=("float8_e4m3fn", [4, 4]), norm__scale=("bfloat16", [4]))
    assert kinds_of(tensors, None) == [("scale_missing", "a.weight")]


def test_ck_08_another_block_size_than_declared_shows() -> None:
    tensors = make_entries(a__weight=("float8_e4m3fn", [576, 256]), a__weight_scale_inv=("float32", [5, 2]))
    assert kinds_of(tensors, FP8) == []
    assert kinds_of(tensors, {**FP8, "weight_block_size": [32, 32]}) == [("scale_shape", "a.weight")]


def test_ck_17_a_byte_is_an_exponent_where_that_is_declared() -> None:
    weight = ("float8_e4m3fn", [128, 384])
    as_bytes = make_entries(a__weight=weight, a__weight_scale_inv=("uint8", [1, 3]))
    typed = make_entries(a__weight=weight, a__weight_scale_inv=("float8_e8m0fnu", [1, 3]))
    declared = {**FP8, "scale_fmt": "ue8m0"}
    assert kinds_of(as_bytes, declared) == [] and kinds_of(typed, declared) == [] and kinds_of(typed, FP8) == []
    assert kinds_of(as_bytes, FP8) == [("scale_meaning", "a.weight_scale_inv")]
    assert scale_meaning("uint8", declared) == scale_meaning("float8_e8m0fnu", FP8) == "exponent"
    assert scale_meaning("float32", FP8) == scale_meaning("float8_e4m3fn", None) == "number"
    assert scale_meaning("uint8", {**FP8, "scale_fmt": "e4m3"}) == "fp8"
    assert scale_meaning("uint8", {"quant_method": "mxfp4"}) == "exponent"
    assert scale_meaning("uint8", None) is None and scale_meaning("int8", declared) is None


def test_ck_16_logical_shapes_come_from_the_stored_shape(tmp_path: Path) -> None:
    assert logical_shape((1, 1), per_word=8, declared=(1, 8)) == (1, 8)
    assert logical_shape((4, 2), per_word=8, declared=(4, 10)) == (4, 10) and logical_shape((4, 2), per_word=8) == (4, 16)
    for wrong in ((4, 17), (4, 8), (5, 10), (4, 0), (4,)):
        with pytest.raises(DayZeroError, match="stored shape"):
            logical_shape((4, 2), per_word=8, declared=wrong)
    path = tmp_path / "shape"
    path.write_bytes(b"xx" + (4).to_bytes(8, "little") + (10).to_bytes(8, "little"))
    entry = TensorEntry(file="shape", dtype="int64", shape=(2,), begin=2, end=18)
    assert read_stored_shape(path, entry) == (4, 10)
    with pytest.raises(DayZeroError, match="is none"):
        read_stored_shape(path, TensorEntry(file="shape", dtype="bfloat16", shape=(2,), begin=2, end=6))


def test_ck_16_an_order_that_nobody_knows_is_refused() -> None:
    tensors = make_entries(
        a__weight_packed=("int32", [4, 2]), a__weight_scale=("bfloat16", [4, 1]), a__weight_shape=("int64", [2])
    )
    assert packing_of(INT4).order == tuple(range(8)) and kinds_of(tensors, INT4) == []
    assert packing_of({"quant_method": "awq", "bits": 4, "version": "gemm"}).order == (0, 2, 4, 6, 1, 3, 5, 7)
    for settings, metadata in (
        ({**INT4, "format": "marlin-24"}, {}),
        ({**INT4, "packing": "interleaved"}, {}),
        (INT4, {"pack_order": "0,2,4,6,1,3,5,7"}),
        ({"quant_method": "awq", "bits": 4, "version": "gemv_fast"}, {}),
    ):
        assert kinds_of(tensors, settings, metadata=metadata) == [("packing_order", "a.weight_packed")]
        with pytest.raises(DayZeroError, match="order"):
            packing_of(settings, metadata)
    del tensors["a.weight_scale"]
    tensors["a.weight_shape"] = TensorEntry(file="x", dtype="int64", shape=(3,), begin=0, end=24)
    assert kinds_of(tensors, INT4) == [("scale_missing", "a.weight_packed"), ("weight_shape", "a.weight_shape")]
