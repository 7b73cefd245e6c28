"""What names, dtypes and a config show before there is a class; keys that a file gives twice. No torch.

Cites CK-02, CK-06, CK-07, CK-14.
"""

import json
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from dayzero.core.errors import DayZeroError
from dayzero.core.model import Problem
from dayzero.model.config_against_tensors import config_against_tensors
from dayzero.model.headers import TensorEntry
from dayzero.model.release import INDEX, open_release
from dayzero.model.settings_files import MAX_REPEATED, RepeatedKey, read_settings, repeated_problems
from tests.unit.test_release import SHARDS, kinds, make_file, make_header, make_release, the_problem

WORDS = ("gate", "up", "down")


def make_tensors(*names: str, dtype: str = "bfloat16") -> dict[str, TensorEntry]:
    return {name: TensorEntry(file="model.safetensors", dtype=dtype, shape=(2, 2), begin=0, end=8) for name in names}


def make_names(layers: int = 3, experts: int = 4, stack: str = "model.layers") -> list[str]:
    experts_of = [f"mlp.experts.{number}.{word}_proj.weight" for number in range(experts) for word in WORDS]
    return [f"{stack}.{layer}.{part}" for layer in range(layers) for part in (*experts_of, "norm.weight")]


def found(names: list[str], **config: Any) -> list[Problem]:
    return config_against_tensors(config, make_tensors(*names))


def test_whole_numberings_are_nothing_to_tell() -> None:
    assert found(make_names(), num_hidden_layers=3, num_experts=4) == []
    # Parts of a tower, modules of a sequence, and layers without some module are no gaps.
    odd = ["visual.merger.mlp.0.weight", "visual.merger.mlp.2.weight", "visual.blocks.0.norm.weight", "model.layers.1.extra"]
    assert found([*make_names(), *odd]) == []


def test_an_expert_that_is_nowhere_is_named() -> None:
    names = [name for name in make_names() if not name.startswith("model.layers.1.mlp.experts.2.")]
    (problem,) = found(names)
    assert (problem.kind, problem.severity) == ("missing_expert", "error") and problem.file == "model.safetensors"
    assert problem.tensor == "model.layers.1.mlp.experts.2.down_proj.weight" and "up to 3 without 2" in problem.detail


def test_a_matrix_that_one_expert_lacks_is_named() -> None:
    lost = "model.layers.1.mlp.experts.2.up_proj.weight"
    (problem,) = found([name for name in make_names() if name != lost])
    assert problem.kind == "missing_expert" and problem.tensor == lost and "3 other experts" in problem.detail


@pytest.mark.parametrize("ending", ["weight_scale_inv", "weight_packed", "weight_shape"])
def test_experts_excepted_from_quantization_are_not_missing_anything(ending: str) -> None:
    """One expert in full precision among packed ones, and one packed among those in full precision."""
    names = make_names(layers=1)
    packed = [name.replace("weight", ending) for name in names if ".experts." in name and ".0." not in name.partition("mlp")[2]]
    assert found([*names, *packed]) == []
    plain = {name.replace(ending, "weight") for name in packed}
    assert found([name for name in names if name not in plain] + [one.replace(ending, "weight_packed") for one in packed]) == []


def test_a_layer_without_tensors_is_the_class_to_judge() -> None:
    """A layer whose attention and feed-forward were both searched away stores nothing."""
    assert found([name for name in make_names(layers=5, stack="h") if not name.startswith(("h.1.", "h.2."))]) == []


def test_two_spellings_are_told_where_the_files_can_tell() -> None:
    (problem,) = found(make_names(), num_experts=2, num_local_experts=4)
    assert (problem.kind, problem.severity, problem.file) == ("config_spellings", "warning", "config.json")
    assert "num_experts is 2" in problem.detail and "num_local_experts is 4" in problem.detail
    # One spelling that the files contradict is the class's to judge: some experts have no weights.
    assert found(make_names(), num_experts=2) == [] and found(make_names(), num_hidden_layers=7) == []


def test_a_tensor_in_the_other_16_bit_format_is_named() -> None:
    tensors = make_tensors(*make_names()) | make_tensors("model.layers.1.norm.weight", dtype="float16")
    (problem,) = config_against_tensors({}, tensors)
    assert (problem.kind, problem.severity, problem.tensor) == ("odd_dtype", "warning", "model.layers.1.norm.weight")
    # A kind that is wholly in it is a choice.
    norms = make_tensors(*(name for name in make_names() if "norm" in name), dtype="float16")
    assert config_against_tensors({}, make_tensors(*make_names()) | norms) == []


def test_numbers_that_are_none_allocate_nothing() -> None:
    huge = ["model.layers.99999.mlp.experts.99999.up_proj.weight", f"model.layers.{10**30}.x.weight",
            f"model.layers.0.experts.{10**30}.x", "model.layers.².x.weight", "experts.1", "layers..x", "h.1"]  # fmt: skip
    tracemalloc.start()
    problems = found(huge)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert {problem.kind for problem in problems} == {"missing_expert"} and peak < 4 << 20


def test_200000_tensors_take_a_moment_and_little_memory() -> None:
    tensors = make_tensors(*make_names(layers=260, experts=256))
    assert len(tensors) > 199_000
    started = time.process_time()
    assert config_against_tensors({"num_experts": 256, "num_hidden_layers": 260}, tensors) == []
    seconds = time.process_time() - started
    tracemalloc.start()
    config_against_tensors({}, tensors)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert seconds < 2 and peak < 20 << 20, (seconds, peak)


# Keys that a file gives twice.


def test_a_key_given_twice_is_told_and_an_error_where_the_values_differ(tmp_path: Path) -> None:
    place = tmp_path / "config.json"
    place.write_text('{"a": 1, "b": {"c": [1], "c": [1]}, "a": 2}')
    content, problems = read_settings(place, "config.json")
    assert content == {"a": 2, "b": {"c": [1]}}
    assert [(problem.kind, problem.severity) for problem in problems] == [
        ("duplicate_key", "warning"),
        ("duplicate_key", "error"),
    ]
    assert "'a' 2 times: 1, then 2" in problems[1].detail and problems[1].file == "config.json"


def test_keys_given_twice_in_settings_and_index_are_found_on_opening(tmp_path: Path) -> None:
    folder = make_release(tmp_path / "m")
    for name, before in (("config.json", '"hidden_size": 9, '), (INDEX, '"weight_map": {"x": 1}, ')):
        (folder / name).write_text("{" + before + (folder / name).read_text()[1:])
    (folder / "generation_config.json").write_text('{"eos_token_id": 1, "eos_token_id": 2}')
    twice = [problem for problem in open_release(folder).errors if problem.kind == "duplicate_key"]
    assert [problem.file for problem in twice] == ["config.json", "generation_config.json", INDEX]


def test_many_repeated_keys_are_counted() -> None:
    many = [RepeatedKey(key=str(number), values=(1, 2)) for number in range(MAX_REPEATED + 5)]
    told = repeated_problems(many, "x.json")
    assert len(told) == MAX_REPEATED + 1 and "5 further keys" in told[-1].detail


def test_settings_that_are_no_object_are_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(DayZeroError, match=r"config\.json is not readable JSON"):
        read_settings(tmp_path / "config.json", "config.json")


# Shards without an index, and things that are no shards.


@pytest.mark.parametrize("first", [0, 1])
def test_without_an_index_the_numbering_says_what_is_missing(tmp_path: Path, first: int) -> None:
    (tmp_path / "config.json").write_text("{}")
    for number in range(first, 4 + first):
        header, size = make_header({f"layers.{number - first}.a": ("BF16", [8])})
        make_file(tmp_path / f"model-{number:05d}-of-00004.safetensors", header, size)
    assert open_release(tmp_path).problems == ()
    (tmp_path / f"model-{2 + first:05d}-of-00004.safetensors").unlink()
    problem = the_problem(open_release(tmp_path), "missing_file")
    assert problem.file == f"model-{2 + first:05d}-of-00004.safetensors" and "count 4" in problem.detail


def test_a_folder_in_place_of_a_shard_is_named(tmp_path: Path) -> None:
    folder = make_release(tmp_path / "m")
    (folder / SHARDS[1]).unlink()
    (folder / SHARDS[1]).mkdir()
    problem = the_problem(open_release(folder), "not_a_file")
    assert problem.file == SHARDS[1] and "a folder" in problem.detail


@pytest.mark.parametrize(("content", "kind"), [
    (b'{"error": "Repository not found"}', "text"), (b"Access denied\n" * 9, "text"), (b"PK\x03\x04" + bytes(99), "other_format"),
    (b"GGUF" + bytes(99), "other_format"), (b"\x80\x02}q\x00." + bytes(9), "other_format"),
])  # fmt: skip
def test_ck_07_files_of_another_kind_are_called_what_they_are(tmp_path: Path, content: bytes, kind: str) -> None:
    folder = make_release(tmp_path / "m")
    (folder / SHARDS[0]).write_bytes(content)
    assert kind in kinds(open_release(folder))


@pytest.mark.parametrize("length", [0x0280, 0x8B1F])
def test_a_length_that_begins_like_another_format_is_a_length(tmp_path: Path, length: int) -> None:
    """640 and 35615 are the first bytes of pickles and gzip files."""
    (tmp_path / "config.json").write_text("{}")
    header, size = make_header({"a": ("F32", [1])})
    make_file(tmp_path / "model.safetensors", json.dumps(header).encode().ljust(length), size)
    assert open_release(tmp_path).problems == ()
