"""Opening a release without torch: every way a checkpoint lies about itself is found from headers and sizes alone."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dayzero.core.errors import DayZeroError
from dayzero.core.units import DTYPE_BITS, SAFETENSORS_DTYPES
from dayzero.model.headers import read_header
from dayzero.model.paths import contained, refusal
from dayzero.model.release import INDEX, Release, open_release

SHARDS = [f"model-{number:05d}-of-00004.safetensors" for number in range(1, 5)]


def make_header(tensors: dict[str, tuple[str, list[int]]]) -> tuple[dict[str, Any], int]:
    """A correct header of these tensors, end to end, and the size of its data."""
    header, offset = {}, 0
    for name, (dtype, shape) in tensors.items():
        size = DTYPE_BITS[SAFETENSORS_DTYPES[dtype]] // 8
        for dimension in shape:
            size *= dimension
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    return header, offset


def make_file(path: Path, header: dict[str, Any] | bytes, data_bytes: int) -> None:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        file.truncate(8 + len(raw) + data_bytes)


def make_release(folder: Path, *, shards: int = 4, dimension: int = 8) -> Path:
    """`shards` files with two tensors each, and their index. The last tensor of the last shard is lm_head.weight."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "toy", "hidden_size": dimension}))
    weight_map, total = {}, 0
    for number, file in enumerate(SHARDS[:shards]):
        names = [f"layers.{number}.a.weight", f"layers.{number}.b.weight"]
        if number == shards - 1:
            names[-1] = "lm_head.weight"
        header, size = make_header({name: ("BF16", [dimension, dimension]) for name in names})
        make_file(folder / file, header, size)
        weight_map |= dict.fromkeys(names, file)
        total += size
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}))
    return folder


def edit_index(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    index = json.loads((folder / INDEX).read_text())
    change(index)
    (folder / INDEX).write_text(json.dumps(index))


def kinds(release: Release) -> list[str]:
    return [problem.kind for problem in release.problems]


def the_problem(release: Release, kind: str) -> Any:
    found = [problem for problem in release.problems if problem.kind == kind]
    assert len(found) == 1, release.problems
    return found[0]


def test_a_sound_release_has_no_problems(tmp_path: Path) -> None:
    release = open_release(make_release(tmp_path / "m"))
    assert release.problems == ()
    assert len(release.tensors) == 8 and release.checkpoint_bytes == 8 * 128 and release.require_weights() is release
    entry = release.tensors["layers.1.b.weight"]
    assert entry.shape == (8, 8) and entry.dtype == "bfloat16" and entry.num_bytes == 128
    assert release.path(entry.file).stat().st_size == release.tensors["layers.1.b.weight"].end  # the last of its file


def test_reading_needs_no_torch(tmp_path: Path) -> None:
    make_release(tmp_path / "m")
    code = "import sys; from dayzero.model.release import open_release; from dayzero.model import config_keys; "
    code += f"from pathlib import Path; open_release(Path({str(tmp_path / 'm')!r})); config_keys.known_rope_types(); "
    code += "print('torch' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "False"


# CK-01: a shard shorter than its header declares.


@pytest.mark.parametrize("where", ["data", "header", "length"])
def test_ck_01_a_cut_shard_is_named_with_its_first_tensor_and_both_sizes(tmp_path: Path, where: str) -> None:
    folder = make_release(tmp_path / "m", dimension=256)
    shard = folder / SHARDS[2]
    whole = shard.stat().st_size
    header_end = 8 + int.from_bytes(shard.read_bytes()[:8], "little")
    cut = {"data": header_end + int((whole - header_end) * 0.6), "header": 8 + (header_end - 8) // 2, "length": 5}[where]
    os.truncate(shard, cut)
    problem = the_problem(open_release(folder), "truncated")
    first = "layers.2.b.weight" if where == "data" else "layers.2.a.weight"
    expected = {"data": whole, "header": header_end, "length": 8}[where]
    assert problem.severity == "error" and problem.file == SHARDS[2] and problem.tensor == first
    for fact in (SHARDS[2], first, f"{expected} bytes", f"got {cut} bytes"):
        assert fact in problem.detail, (fact, problem.detail)
    with pytest.raises(DayZeroError, match="not usable") as raised:
        open_release(folder).require_weights()
    assert SHARDS[2] in raised.value.got and first in raised.value.got


def test_ck_01_the_check_reads_headers_and_sizes_only(tmp_path: Path) -> None:
    """A sparse file of 16 GiB, cut, is judged in milliseconds."""
    (tmp_path / "config.json").write_text("{}")
    header, size = make_header({"a": ("F32", [1 << 15, 1 << 16]), "b": ("F32", [1 << 15, 1 << 16])})
    make_file(tmp_path / "model.safetensors", header, size)
    os.truncate(tmp_path / "model.safetensors", size - 1)
    start = time.perf_counter()
    problem = the_problem(open_release(tmp_path), "truncated")
    assert time.perf_counter() - start < 0.5
    assert problem.tensor == "b"


# CK-02: index, disk and headers disagree.


def test_ck_02_1_a_missing_shard_is_named_with_all_its_tensors(tmp_path: Path) -> None:
    folder = make_release(tmp_path / "m")
    (folder / SHARDS[1]).unlink()
    (folder / SHARDS[2]).unlink()
    release = open_release(folder)
    missing = [problem for problem in release.problems if problem.kind == "missing_file"]
    assert [problem.file for problem in missing] == SHARDS[1:3]
    assert "layers.1.a.weight" in missing[0].detail and "layers.1.b.weight" in missing[0].detail
    with pytest.raises(DayZeroError) as raised:
        release.require_weights()
    assert SHARDS[1] in raised.value.got and SHARDS[2] in raised.value.got, "all of them at once"


def test_ck_02_2_a_tensor_in_another_shard_names_both(tmp_path: Path) -> None:
    folder = make_release(tmp_path / "m")
    edit_index(folder, lambda index: index["weight_map"].update({"lm_head.weight": SHARDS[0]}))
    problem = the_problem(open_release(folder), "misplaced_tensor")
    assert problem.severity == "error" and problem.tensor == "lm_head.weight"
    assert SHARDS[0] in problem.detail and SHARDS[3] in problem.detail


def test_ck_02_3_a_tensor_that_exists_nowhere_is_named(tmp_path: Path) -> None:
    folder = make_release(tmp_path / "m")
    edit_index(folder, lambda index: index["weight_map"].update({"mtp.fc.weight": SHARDS[0], "mtp.norm.weight": SHARDS[1]}))
    missing = [problem for problem in open_release(folder).problems if problem.kind == "missing_tensor"]
    assert [problem.tensor for problem in missing] == ["mtp.fc.weight", "mtp.norm.weight"]
    assert all(problem.severity == "error" for problem in missing)


def test_ck_02_4_bytes_after_the_index_are_an_error(tmp_path: Path) -> None:
    folder = make_release(tmp_path / "m")
    with (folder / INDEX).open("a") as file:
        file.write('{"weight_map": {}}')
    problem = the_problem(open_release(folder), "index_json")
    assert problem.severity == "error" and problem.file == INDEX and "Extra data" in problem.detail


def test_ck_02_5_a_wrong_total_size_is_a_warning_and_never_used(tmp_path: Path) -> None:
    folder = make_release(tmp_path / "m")
    edit_index(folder, lambda index: index["metadata"].update({"total_size": 8 * 128 + 2 * 64}))
    release = open_release(folder)
    problem = the_problem(release, "total_size")
    assert problem.severity == "warning" and "1152" in problem.detail and "1024" in problem.detail
    assert release.checkpoint_bytes == 1024 and release.require_weights() is release


def test_other_directions_are_compared_too(tmp_path: Path) -> None:
    folder = make_release(tmp_path / "m")
    header, size = make_header({"layers.0.a.weight": ("BF16", [8, 8]), "extra": ("BF16", [8])})
    make_file(folder / SHARDS[1], header, size)
    make_file(folder / "consolidated.safetensors", header, size)
    found = kinds(open_release(folder))
    assert found.count("duplicate_tensor") == 1 and "unlisted_tensor" in found and "unlisted_file" in found
    assert found.count("missing_tensor") == 2, found


# CK-04: names that leave the folder.


@pytest.mark.parametrize(
    "name", ["../secret/w.safetensors", "/abs/w.safetensors", "sub/../../x", "a\0b", "a\\b", "", " ", "C:w", "a\nb", 7, None]
)
def test_ck_04_names_that_leave_the_folder_are_refused_before_open(
    tmp_path: Path, name: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_release(tmp_path / "m")
    (tmp_path / "secret").mkdir()
    os.mkfifo(tmp_path / "secret" / "w.safetensors")  # opening it would block
    edit_index(folder, lambda index: index["weight_map"].update({"evil.weight": name}))
    opened: list[str] = []
    real = os.open
    monkeypatch.setattr(os, "open", lambda path, *rest, **more: (opened.append(str(path)), real(path, *rest, **more))[1])
    problem = the_problem(open_release(folder), "unsafe_path")
    assert problem.severity == "error" and problem.tensor == "evil.weight" and "evil.weight" in problem.detail
    assert all(Path(path).parent == folder for path in opened), opened


def test_ck_04_a_nested_plain_name_is_accepted(tmp_path: Path) -> None:
    folder = make_release(tmp_path / "m")
    (folder / "part1").mkdir()
    (folder / SHARDS[0]).rename(folder / "part1" / SHARDS[0])
    edit_index(
        folder,
        lambda index: index["weight_map"].update(
            {name: f"part1/{file}" for name, file in index["weight_map"].items() if file == SHARDS[0]}
        ),
    )
    release = open_release(folder)
    assert release.problems == () and len(release.tensors) == 8


def test_ck_04_links_that_leave_the_folder_are_refused_and_cache_snapshots_are_not(tmp_path: Path) -> None:
    folder = make_release(tmp_path / "m")
    outside = tmp_path / "outside.safetensors"
    (folder / SHARDS[0]).rename(outside)
    (folder / SHARDS[0]).symlink_to(outside)
    refused = [problem for problem in open_release(folder).problems if problem.kind == "unsafe_path"]
    assert [problem.tensor for problem in refused] == ["layers.0.a.weight", "layers.0.b.weight"]
    assert "link" in refused[0].detail

    cache = tmp_path / "models--org--toy"
    snapshot = make_release(cache / "snapshots" / "0123abcd")
    (cache / "blobs").mkdir()
    for number, file in enumerate([*SHARDS, "config.json", INDEX]):
        (snapshot / file).rename(cache / "blobs" / str(number))
        (snapshot / file).symlink_to(f"../../blobs/{number}")
    release = open_release(snapshot)
    assert release.problems == () and release.name == "toy" and len(release.tensors) == 8
    (snapshot / SHARDS[0]).unlink()
    (snapshot / SHARDS[0]).symlink_to("../../../outside.safetensors")
    assert "unsafe_path" in kinds(open_release(snapshot))


def test_ck_04_code_and_tokenizer_names_are_checked_too(tmp_path: Path) -> None:
    folder = make_release(tmp_path / "m")
    (folder / "config.json").write_text(json.dumps({"auto_map": {"AutoModel": "../evil.Model", "AutoConfig": "fine.Config"}}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"vocab_file": "/etc/passwd", "merges_file": "merges.txt"}))
    found = [problem for problem in open_release(folder).problems if problem.kind == "unsafe_path"]
    assert [problem.file for problem in found] == ["config.json", "tokenizer_config.json"]


@given(st.text(min_size=0, max_size=30))
@settings(max_examples=300, deadline=None)
def test_ck_04_whatever_is_accepted_stays_inside(name: str) -> None:
    folder = Path("/nonexistent-root/model")
    place, reason = contained(folder, name)
    assert (place is None) == bool(reason)
    if place is not None:
        assert Path(os.path.normpath(place)).is_relative_to(folder) and not refusal(name)


# CK-06, CK-07: headers that lie, and files that are no weights.

GOOD = {
    "a": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]},
    "b": {"dtype": "F32", "shape": [2], "data_offsets": [16, 24]},
}


def make_entry(**change: Any) -> dict[str, Any]:
    return {"a": GOOD["a"], "b": GOOD["b"] | change}


BAD_HEADERS: dict[str, tuple[Any, int, str]] = {
    "backwards offsets": (make_entry(data_offsets=[24, 16]), 24, "backwards"),
    "overlap": (make_entry(data_offsets=[8, 16]), 16, "overlaps"),
    "span": ({"a": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 8]}}, 8, "needs 16 bytes"),
    "hole": (make_entry(data_offsets=[20, 28]), 28, "belong to no tensor"),
    "trailing bytes": (GOOD, 30, "6 bytes follow the last tensor"),
    "negative shape": (make_entry(shape=[-2]), 24, "not a list of sizes"),
    "float shape": (make_entry(shape=[2.0]), 24, "not a list of sizes"),
    "bool shape": (make_entry(shape=[True, 2]), 24, "not a list of sizes"),
    "negative offset": (make_entry(data_offsets=[-8, 0]), 24, "not two byte offsets"),
    "unknown dtype": (make_entry(dtype="F8_E5M2X"), 24, "'F8_E5M2X'"),
    "extra field": (make_entry(extra=1), 24, "wanted dtype, shape and data_offsets"),
    "not an object": ([1, 2], 0, "wanted"),
    "not JSON": (b'{"a": ', 0, "not JSON"),
    "duplicate key": (
        b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}',
        8,
        "more than once",
    ),
    "deep nesting": (b'{"a":' + b"[" * 200_000, 0, "not JSON"),
}


@pytest.mark.parametrize("name", BAD_HEADERS)
def test_ck_06_headers_that_lie_are_refused_with_their_own_reason(tmp_path: Path, name: str) -> None:
    header, data_bytes, words = BAD_HEADERS[name]
    raw = header if isinstance(header, (dict, bytes)) else json.dumps(header).encode()
    make_file(tmp_path / "x.safetensors", raw, data_bytes)
    _, problems = read_header(tmp_path / "x.safetensors", "x.safetensors")
    assert problems and any(words in problem.detail for problem in problems), problems


@pytest.mark.parametrize("length", [1 << 63, (1 << 64) - 1, 1 << 40, 0])
def test_ck_06_absurd_header_lengths_allocate_nothing(tmp_path: Path, length: int) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(length.to_bytes(8, "little") + json.dumps(GOOD).encode())
    header, problems = read_header(path, path.name)
    assert header is None and problems[0].kind == "header_length" and str(length) in problems[0].detail


def test_ck_06_a_header_as_long_as_the_file_is_cut(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    raw = json.dumps(GOOD).encode()
    path.write_bytes((8 + len(raw)).to_bytes(8, "little") + raw)
    assert read_header(path, path.name)[1][0].kind == "truncated"


@pytest.mark.slow
def test_ck_06_a_file_of_many_tensors_is_accepted(tmp_path: Path) -> None:
    header, size = make_header({f"layers.{number}.w": ("U8", [1]) for number in range(100_000)})
    make_file(tmp_path / "x.safetensors", header, size)
    found, problems = read_header(tmp_path / "x.safetensors", "x.safetensors")
    assert problems == [] and found is not None and len(found.tensors) == 100_000


def test_ck_07_files_that_are_no_weights_are_called_what_they_are(tmp_path: Path) -> None:
    folder = make_release(tmp_path / "m")
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614\nsize 4976698672\n"
    (folder / SHARDS[0]).write_text(pointer)
    (folder / SHARDS[1]).write_text("<!DOCTYPE html><html><body>403</body></html>")
    (folder / SHARDS[2]).write_bytes(b"")
    release = open_release(folder)
    details = {problem.kind: problem.detail for problem in release.problems}
    assert "LFS" in details["lfs_pointer"] and "4976698672" in details["lfs_pointer"] and SHARDS[0] in details["lfs_pointer"]
    assert "web page" in details["web_page"] and "empty" in details["empty_file"]


def test_a_fifo_in_place_of_a_shard_is_not_read(tmp_path: Path) -> None:
    folder = make_release(tmp_path / "m")
    (folder / SHARDS[0]).unlink()
    os.mkfifo(folder / SHARDS[0])
    assert "not_a_file" in kinds(open_release(folder))


@given(st.binary(max_size=300))
@settings(max_examples=300, deadline=None)
def test_ck_06_no_bytes_crash_the_reader(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "random.safetensors"
    for body in (
        content,
        len(content).to_bytes(8, "little") + content,
        (len(content) + 2).to_bytes(8, "little") + b"{}" + content,
    ):
        path.write_bytes(body)
        header, problems = read_header(path, path.name)
        assert header is not None or problems


# What a user does wrong.


def test_user_mistakes_are_named(tmp_path: Path) -> None:
    with pytest.raises(DayZeroError, match="does not exist"):
        open_release(tmp_path / "nowhere")
    with pytest.raises(DayZeroError, match="empty folder"):
        open_release(tmp_path)
    (tmp_path / "note.txt").write_text("x")
    with pytest.raises(DayZeroError, match=r"holds no config\.json"):
        open_release(tmp_path)
    for broken in ("[1]", "{", '{"a": 1} x', "\xff"):
        (tmp_path / "config.json").write_bytes(broken.encode("latin-1"))
        with pytest.raises(DayZeroError, match=r"config\.json is not"):
            open_release(tmp_path)
    (tmp_path / "config.json").write_text('{"hidden_size": 8}')
    for path in (tmp_path, tmp_path / "config.json"):
        release = open_release(path)
        assert not release.has_weights and release.checkpoint_bytes is None and release.problems == ()
        with pytest.raises(DayZeroError, match="holds no weights"):
            release.require_weights()


def test_ck_15_pickle_weights_are_refused_and_ignored_beside_safetensors(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    assert the_problem(open_release(tmp_path), "pickle_checkpoint").severity == "error"
    header, size = make_header({"a": ("F32", [1])})
    make_file(tmp_path / "model.safetensors", header, size)
    release = open_release(tmp_path)
    assert release.problems == () and list(release.tensors) == ["a"] and "pytorch_model.bin" not in release.other_files


def test_the_source_hash_follows_settings_headers_and_sizes(tmp_path: Path) -> None:
    folder = make_release(tmp_path / "m")
    first = open_release(folder).source_hash
    assert open_release(folder).source_hash == first == open_release(make_release(tmp_path / "n")).source_hash
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 7]}')
    second = open_release(folder).source_hash
    header, size = make_header({"layers.0.a.weight": ("F16", [8, 8]), "layers.0.b.weight": ("BF16", [8, 8])})
    make_file(folder / SHARDS[0], header, size)
    assert len({first, second, open_release(folder).source_hash}) == 3


def test_an_index_whose_shards_are_all_absent_is_a_release_without_weights(tmp_path: Path) -> None:
    folder = make_release(tmp_path / "m")
    for shard in SHARDS:
        (folder / shard).unlink()
    release = open_release(folder)
    problem = the_problem(release, "no_shards")
    assert problem.severity == "warning" and "4 files" in problem.detail and not release.errors and not release.has_weights
    with pytest.raises(DayZeroError, match="holds no weights"):
        release.require_weights()
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04.")  # weights that are there and not read stay an error
    assert the_problem(open_release(folder), "pickle_checkpoint").severity == "error"
    (folder / "pytorch_model.bin").unlink()
    header, size = make_header({"a": ("BF16", [8])})
    make_file(folder / "other.safetensors", header, size)  # another download than the index is of
    assert kinds(open_release(folder)).count("missing_file") == 4
    (folder / "other.safetensors").unlink()
    (folder / SHARDS[0]).symlink_to("nowhere")  # so does a link to nothing: it was there
    assert "no_shards" not in kinds(open_release(folder))


def test_settings_of_quantization_that_are_doubtful_are_told_by_every_reader(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 8, "quantization_config": "fp8"}))
    before = open_release(tmp_path).source_hash
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "zorp"}}))
    for path in (tmp_path, tmp_path / "config.json"):
        found = [problem for problem in open_release(path).problems if problem.kind.startswith("quantization")]
        assert [problem.severity for problem in found] == ["warning", "warning"] and "zorp" in found[1].detail
        assert [problem.file for problem in found] == ["config.json", "hf_quant_config.json"]
    assert open_release(tmp_path).source_hash != before  # it decides what the bytes mean


@pytest.mark.parametrize("address", ["ftp://x/y", "s3://x/y", "http://x/y", "file:///x/y"])
def test_an_address_is_called_one_and_keeps_its_slashes(address: str) -> None:
    with pytest.raises(DayZeroError, match="is an address") as caught:
        open_release(Path(address))
    assert caught.value.what.startswith(address.replace("///", "//")) and "download" in caught.value.fix
