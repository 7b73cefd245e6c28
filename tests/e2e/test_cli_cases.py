"""Cases of damaged checkpoints and unusual configs, through inspect, plan and convert: exit status, what is named, what is left."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.builders import GIB, Ended, ask_all, dayzero_here, edit_json, make_target, told

INDEX = "model.safetensors.index.json"
Checkpoint = Callable[..., Path]


@pytest.fixture
def release(tiny_checkpoint: Checkpoint, tmp_path: Path) -> Path:
    """A release of its own to damage."""
    return Path(shutil.copytree(tiny_checkpoint("llama"), tmp_path / "model"))


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return make_target(tmp_path)


# -- checkpoints ----------------------------------------------------------------------------------------------------


def weight_map(release: Path) -> dict[str, str]:
    return dict(json.loads((release / INDEX).read_text())["weight_map"])


@pytest.mark.parametrize("cut", ["data", "header", "length"])
def test_ck_01_a_short_shard_stops_every_verb(release: Path, target: Path, cut: str) -> None:
    shard = sorted(release.glob("*.safetensors"))[1]
    size, header = shard.stat().st_size, int.from_bytes(shard.read_bytes()[:8], "little")
    kept = {"data": int(size * 0.6), "header": 8 + header // 2, "length": 5}[cut]
    described = json.loads(shard.read_bytes()[8 : 8 + header])
    os.truncate(shard, kept)
    ends = {name: 8 + header + entry["data_offsets"][1] for name, entry in described.items() if name != "__metadata__"}
    first = min((name for name in ends if ends[name] > kept), key=ends.__getitem__)
    for verb, ended in ask_all(release, target).items():
        text = told(ended)
        facts = [shard.name, str(kept)] + {"data": [first, str(size)], "header": [str(8 + header)], "length": ["8"]}[cut]
        assert all(fact in text.replace(",", "") for fact in facts), (verb, facts, text)


def test_ck_01_only_headers_are_read(release: Path, target: Path) -> None:
    """A shard that lacks one byte of 64 GiB (a sparse file) is found at once."""
    header = json.dumps({"huge": {"dtype": "F32", "shape": [16 * GIB], "data_offsets": [0, 64 * GIB]}}).encode()
    shard = sorted(release.glob("*.safetensors"))[1]
    with shard.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + 64 * GIB - 1)
    started = time.monotonic()
    assert all(fact in told(dayzero_here("inspect", release, "--json")) for fact in (shard.name, "huge"))
    assert time.monotonic() - started < 5.0


def test_ck_02_an_index_that_disagrees_names_everything(release: Path, target: Path) -> None:
    names, whole = weight_map(release), (release / INDEX).read_text()
    files = sorted(set(names.values()))
    inside = [name for name in names if names[name] == files[1]]

    removed = (release / files[1]).read_bytes()
    (release / files[1]).unlink()
    assert_all_say(ask_all(release, target), [files[1]])
    (release / files[1]).write_bytes(removed)

    edit_json(release / INDEX, weight_map=names | dict.fromkeys(inside[:2], files[0]))
    assert_all_say(ask_all(release, target), [*inside[:2], files[0]])

    edit_json(release / INDEX, weight_map=names | {"mtp.fc.weight": files[0], "mtp.norm.weight": files[2]})
    assert_all_say(ask_all(release, target), ["mtp.fc.weight", "mtp.norm.weight"])

    (release / INDEX).write_text(whole + '{"metadata": {}}')
    assert_all_say(ask_all(release, target), [INDEX])

    (release / INDEX).write_text(whole)
    sound = ask_all(release, target)
    stated, true = json.loads(whole)["metadata"]["total_size"] + 2 * 1000, json.loads(whole)["metadata"]["total_size"]
    edit_json(release / INDEX, metadata={"total_size": stated})
    shutil.rmtree(release.parent / "written")
    answers = ask_all(release, target)
    assert [ended.status for ended in answers.values()] == [0, 0, 0], {verb: ended.stderr for verb, ended in answers.items()}
    for verb in ("inspect", "convert"):
        told = answers[verb].json["problems"]
        warnings = [one for one in told if one["severity"] == "warning" and one["kind"] != "digests"]
        assert len(warnings) == 1 and str(stated) in warnings[0]["detail"] and str(true) in warnings[0]["detail"], (
            verb,
            warnings,
        )
    assert answers["plan"].json["weights_bytes_per_device"] == sound["plan"].json["weights_bytes_per_device"] == true


def assert_all_say(answers: dict[str, Ended], words: list[str]) -> None:
    for verb, ended in answers.items():
        text = told(ended)
        assert all(word in text for word in words), (verb, words, text)


def test_ck_04_names_that_leave_the_folder_are_never_opened(release: Path, target: Path) -> None:
    """The file outside is a pipe nobody writes to: opening it would wait for ever."""
    names = weight_map(release)
    tensor = next(iter(names))
    (release.parent / "secret").mkdir()
    os.mkfifo(pipe := release.parent / "secret" / "w.safetensors")
    for bad in (
        "../secret/w.safetensors",
        str(pipe),
        "sub/../../secret/w.safetensors",
        "a\x00b.safetensors",
        "..\\secret\\w.safetensors",
        "",
    ):
        edit_json(release / INDEX, weight_map=names | {tensor: bad})
        assert_all_say(ask_all(release, target), [tensor])


def test_ck_04_a_nested_shard_is_accepted(release: Path, target: Path) -> None:
    names = weight_map(release)
    (release / "part1").mkdir()
    for file in set(names.values()):
        (release / file).rename(release / "part1" / file)
    edit_json(release / INDEX, weight_map={name: f"part1/{file}" for name, file in names.items()})
    answers = ask_all(release, target)
    assert [ended.status for ended in answers.values()] == [0, 0, 0], {verb: ended.stderr for verb, ended in answers.items()}
    assert (release.parent / "written" / "artifact" / "layout.json").is_file()


# -- configs ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def config(release: Path) -> Callable[..., Ended]:
    """Inspect the config alone, with some of its keys changed (None: null; ...: absent)."""
    folder = release.parent / "config"
    folder.mkdir()
    written = json.loads((release / "config.json").read_text())

    def inspect(**changes: Any) -> Ended:
        changed = written | changes
        (folder / "config.json").write_text(json.dumps({name: value for name, value in changed.items() if value is not ...}))
        return dayzero_here("inspect", folder, "--json")

    return inspect


SCALED = {"factor": 4.0, "original_max_position_embeddings": 128}
# CF-01: rope_scaling as written -> the form inspect shows (keys that must be there), or words of the error.
ROPE = [
    ({"type": "yarn"} | SCALED, {"rope_type": "yarn", "factor": 4.0}),
    ({"rope_type": "yarn"} | SCALED, {"rope_type": "yarn", "factor": 4.0}),
    ({"type": "yarn", "rope_type": "yarn"} | SCALED, {"rope_type": "yarn", "factor": 4.0}),
    ({"type": "yarn", "rope_type": "linear"} | SCALED, ["'yarn'", "'linear'"]),
    ({"factor": 4}, ["factor", "rope_type"]),
    (None, {"rope_type": "default"}),
    ({}, {"rope_type": "default"}),
    ({"type": "default"}, {"rope_type": "default"}),
    ({"type": "foo"}, ["'foo'"]),
]


def test_cf_01_position_scaling_has_one_form_or_an_error(config: Callable[..., Ended]) -> None:
    for written, wanted in ROPE:
        ended = config(rope_parameters=..., rope_theta=10000.0, rope_scaling=written)
        if isinstance(wanted, list):
            assert all(word in told(ended) for word in wanted), (written, told(ended))
        else:
            assert ended.status == 0, (written, ended.stderr)
            assert wanted.items() <= ended.json["rope"]["all"].items(), (written, ended.json["rope"])


def test_cf_04_heads_give_the_cache_or_an_error_that_names_the_key(config: Callable[..., Ended]) -> None:
    layers, value_bytes = 2, 2
    rows: list[tuple[dict[str, Any], Any]] = [
        ({"hidden_size": 2880, "num_attention_heads": 64, "head_dim": 64, "num_key_value_heads": 8}, 8 * 64),
        ({"head_dim": None}, 4 * 16),
        ({"head_dim": ..., "hidden_size": 128}, 4 * 32),
        ({"num_key_value_heads": ...}, 4 * 16),
        ({"num_key_value_heads": None}, 4 * 16),
        ({"num_key_value_heads": 2}, 2 * 16),
        ({"head_dim": ..., "hidden_size": 100, "num_attention_heads": 3, "num_key_value_heads": 3}, "head_dim"),
        ({"num_attention_heads": 0}, "num_attention_heads"),
        ({"num_key_value_heads": 0}, "num_key_value_heads"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
    ]
    for changes, wanted in rows:
        ended = config(**changes)
        if isinstance(wanted, str):
            assert wanted in told(ended), (changes, told(ended))
        else:
            assert ended.json["cache"]["bytes_per_token"] == 2 * wanted * layers * value_bytes, changes


def test_cf_08_inspect_shows_the_stop_set_of_all_sources(release: Path) -> None:
    def stops(config: Any, generation: Any) -> tuple[list[int], list[str]]:
        edit_json(release / "config.json", eos_token_id=config)
        (release / "generation_config.json").write_text(json.dumps({"eos_token_id": generation, "temperature": 0.5}))
        shown = dayzero_here("inspect", release, "--json").json
        return shown["stop_token_ids"], [one["detail"] for one in shown["problems"]]

    assert stops(2, [2, 7]) == ([1, 2, 7], [])  # 1: the tokenizer's own
    assert stops(None, [7]) == ([1, 7], [])
    assert stops([], []) == ([1], [])
    assert stops([3, 2], 7) == ([1, 2, 3, 7], [])
    found, problems = stops(2, [99_999])
    assert found == [1, 2] and len(problems) == 1 and "99999" in problems[0]


def test_an_index_before_its_shards_is_described_and_planned_and_not_converted(release: Path, target: Path) -> None:
    for shard in release.glob("*.safetensors"):
        shard.unlink()
    answers = ask_all(release, target)
    assert [answers[verb].status for verb in ("inspect", "plan", "convert")] == [0, 0, 2], answers["inspect"].stderr
    assert "holds no weights" in told(answers["convert"])
    (problem,) = answers["inspect"].json["problems"]
    assert (problem["kind"], problem["severity"]) == ("no_shards", "warning") and "none of the" in problem["detail"]


def test_doubtful_settings_of_quantization_are_told(release: Path, config: Callable[..., Ended]) -> None:
    for settings, words in (("fp8", ["'fp8'", "not an object"]), ({"quant_method": "zorp"}, ["zorp", "not known"])):
        ended = config(quantization_config=settings)
        details = [one["detail"] for one in ended.json["problems"]]
        assert any(all(word in detail for word in words) for detail in details), (settings, ended.json["problems"])
