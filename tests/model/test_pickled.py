"""PyTorch `.bin` files as a source: read by ranges, equal to torch.load bit for bit, and never executed.

Cites CK-15, and for the index CK-02 and CK-04.
"""

from __future__ import annotations

import collections
import io
import json
import os
import pickle
import struct
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from dayzero.model.release import open_release
from dayzero.weights.pickles import file as pickle_file
from dayzero.weights.pickles import program as pickle_program
from dayzero.weights.pickles.folder import INDEX, SINGLE, Pickled, read_pickled, with_pickled
from dayzero.weights.pickles.program import RefusedPickle, run_pickle
from dayzero.weights.reading import LocalStore, SourceReader

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
          torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu, torch.uint16,
          torch.uint32, torch.uint64)  # fmt: skip


def make_tensor(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Random bytes, seen as `dtype`."""
    count = torch.Size(shape).numel() * dtype.itemsize
    generator = torch.Generator().manual_seed(count)
    top = 2 if dtype == torch.bool else 256
    return torch.randint(0, top, (count,), dtype=torch.uint8, generator=generator).view(dtype).reshape(shape)


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def assert_equals_torch(folder: Path, found: Pickled, files: list[str], key: str | None = None, *, plain: bool = True) -> None:
    """Every tensor that torch.load gives, and no other, with the same dtype, shape and bytes."""
    wanted: dict[str, torch.Tensor] = {}
    for file in files:
        loaded = torch.load(folder / file, weights_only=plain)  # of this test's own making: the restricted loader has no protocol 4
        wanted |= loaded[key] if key else loaded
    wanted = {name: one for name, one in wanted.items() if isinstance(one, torch.Tensor)}
    assert set(found.logical) == set(wanted)
    reader = SourceReader(LocalStore(folder), {**found.tensors, **found.storages}, decoders=found.decoders)
    with reader:
        for name, entry in found.logical.items():
            data = bytearray(entry.num_bytes)
            reader.read_into(name, 0, memoryview(data))
            assert f"torch.{entry.dtype}" == str(wanted[name].dtype) and entry.shape == tuple(wanted[name].shape), name
            assert bytes(data) == raw(wanted[name]), name


def save(folder: Path, value: Any, name: str = SINGLE, **settings: Any) -> Path:
    folder.mkdir(exist_ok=True)
    torch.save(value, folder / name, **settings)
    return folder / name


def kinds(found: Pickled) -> list[str]:
    return [problem.kind for problem in found.problems]


def rewritten(path: Path, change: dict[str, bytes | None], *, compress: bool = False) -> None:
    """The same zip made by Python's zipfile with some members replaced, dropped (None) or added."""
    with zipfile.ZipFile(path) as archive:
        members = {one.filename: archive.read(one) for one in archive.infolist()}
    root = next(iter(members)).partition("/")[0]
    members |= {f"{root}/{name}": data for name, data in change.items() if data is not None}
    dropped = {f"{root}/{name}" for name, data in change.items() if data is None}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED if compress else zipfile.ZIP_STORED) as archive:
        for name, data in members.items():
            if name not in dropped:
                archive.writestr(name, data)


# ---------------------------------------------------------------------------------------------------------------- sound files


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_every_dtype_equals_torch(tmp_path: Path, protocol: int) -> None:
    state = {f"t.{str(dtype)[6:]}": make_tensor(dtype, 3, 5) for dtype in DTYPES}
    state |= {"scalar": torch.tensor(3.5), "empty": torch.empty(0, 7), "one": make_tensor(torch.bfloat16, 1, 1, 1)}
    save(tmp_path, state, pickle_protocol=protocol)
    found = read_pickled(tmp_path)
    assert found.problems == () and found.shared == () and not found.strided
    assert_equals_torch(tmp_path, found, [SINGLE], plain=protocol == 2)


def test_views_ties_and_parameters(tmp_path: Path) -> None:
    base = make_tensor(torch.float32, 6, 8)
    fused = make_tensor(torch.bfloat16, 12, 4)
    module = torch.nn.Linear(4, 3)
    state = collections.OrderedDict(
        rows=base[2:4], transposed=base.t(), column=base[:, 3], steps=base[::2, 1::3], expanded=base[:1].expand(5, 8), whole=base,
        tied=base, cube=base.reshape(2, 3, 8).permute(2, 0, 1), q=fused[:4], k=fused[4:8], v=fused[8:],
        weight=module.weight, frozen=torch.nn.Parameter(torch.ones(2), requires_grad=False),
    )  # fmt: skip
    state._metadata = collections.OrderedDict(version=1)  # type: ignore[attr-defined]
    save(tmp_path, state)
    found = read_pickled(tmp_path)
    assert set(found.strided) == {"transposed", "column", "steps", "expanded", "cube"}
    assert set(found.shared) == {("whole", "tied")}
    assert set(kinds(found)) == {"shared_storage"} and all(one.severity == "warning" for one in found.problems)
    assert found.tensors["rows"].begin == found.tensors["whole"].begin + 2 * 8 * 4
    assert_equals_torch(tmp_path, found, [SINGLE])
    assert found.checksum_problems() == []


def test_strided_rows_are_read_in_runs(tmp_path: Path) -> None:
    base = make_tensor(torch.float32, 40, 30)
    save(tmp_path, {"t": base.reshape(4, 10, 30).permute(2, 0, 1)})
    found = read_pickled(tmp_path)
    decoder, data = found.decoders["t"], (tmp_path / SINGLE).read_bytes()
    begin = found.storages[decoder.sources[0]].begin

    def read(name: str, offset: int, count: int) -> memoryview:
        return memoryview(data)[begin + offset : begin + offset + count]

    wanted = base.reshape(4, 10, 30).permute(2, 0, 1).reshape(-1, 10)
    for start, stop in ((0, 1), (7, 50), (119, 120), (0, 120)):
        assert raw(decoder.decode(read, start, stop)) == raw(wanted[start:stop])


@pytest.mark.parametrize("key", ["state_dict", "model", "module"])
def test_one_obvious_nesting(tmp_path: Path, key: str) -> None:
    save(tmp_path, {key: {"a": make_tensor(torch.float16, 4)}, "epoch": 3, "optimizer": {"state": {0: torch.ones(3)}}})
    found = read_pickled(tmp_path)
    assert kinds(found) == ["not_a_tensor", "unused_member"] and "'epoch', 'optimizer'" in found.problems[0].detail
    assert_equals_torch(tmp_path, found, [SINGLE], key)


def test_index_of_several_files(tmp_path: Path) -> None:
    names = ["pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"]
    make_sharded(tmp_path)
    found = read_pickled(tmp_path)
    assert found.problems == () and found.metadata_total_bytes == 4 * 24
    assert_equals_torch(tmp_path, found, names)


def make_sharded(folder: Path) -> dict[str, Any]:
    names = ["pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"]
    parts = [{f"{file}.{i}": make_tensor(torch.float32, 2, 3) for i in range(2)} for file in "ab"]
    for name, part in zip(names, parts, strict=True):
        save(folder, part, name)
    index = {"metadata": {"total_size": 4 * 24}, "weight_map": {key: name for name, part in zip(names, parts) for key in part}}
    (folder / INDEX).write_text(json.dumps(index))
    return index


# -------------------------------------------------------------------------------------------------------- the index (CK-02, -04)


def test_index_disagreements_are_all_listed(tmp_path: Path) -> None:
    index = make_sharded(tmp_path)
    first, second = sorted(set(index["weight_map"].values()))
    index["weight_map"] |= {"a.0": second, "gone": first, "outside": "../x.bin", "absolute": "/etc/passwd", "far": "third.bin"}
    del index["weight_map"]["b.1"]
    index["metadata"]["total_size"] = 1
    (tmp_path / INDEX).write_text(json.dumps(index))
    save(tmp_path, {"z": torch.ones(1)}, "pytorch_model-extra.bin")
    found = read_pickled(tmp_path)
    assert sorted(kinds(found)) == ["misplaced_tensor", "missing_file", "missing_tensor", "unlisted_file", "unlisted_tensor",
                                    "unsafe_path", "unsafe_path"]  # fmt: skip
    named = {problem.kind: problem.tensor for problem in found.problems}
    assert named["misplaced_tensor"] == "a.0" and named["missing_tensor"] == "gone" and named["unlisted_tensor"] == "b.1"


def test_index_with_a_key_given_twice(tmp_path: Path) -> None:
    make_sharded(tmp_path)
    text = (tmp_path / INDEX).read_text()
    (tmp_path / INDEX).write_text(text.replace('"a.1":', '"a.0": "pytorch_model-00002-of-00002.bin", "a.1":'))
    assert "duplicate_key" in kinds(read_pickled(tmp_path))


def test_tensor_in_two_files(tmp_path: Path) -> None:
    index = make_sharded(tmp_path)
    first, second = sorted(set(index["weight_map"].values()))
    save(tmp_path, {"b.0": torch.ones(2, 3), "b.1": torch.ones(2, 3), "a.0": torch.zeros(2, 3)}, second)
    found = read_pickled(tmp_path)
    assert "duplicate_tensor" in kinds(found) and found.tensors["a.0"].file == first


def test_index_total_is_checked(tmp_path: Path) -> None:
    index = make_sharded(tmp_path)
    index["metadata"]["total_size"] = 95
    (tmp_path / INDEX).write_text(json.dumps(index))
    assert kinds(read_pickled(tmp_path)) == ["total_size"]


def test_link_out_of_the_folder(tmp_path: Path) -> None:
    save(tmp_path / "elsewhere", {"a": torch.ones(1)})
    (tmp_path / "release").mkdir()
    (tmp_path / "release" / SINGLE).symlink_to(tmp_path / "elsewhere" / SINGLE)
    assert kinds(read_pickled(tmp_path / "release")) == ["unsafe_path"]


# ----------------------------------------------------------------------------------------------------- nothing executes (CK-15)


class Marker:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


class ByBuild:
    """Code through BUILD: __setstate__ of a class found by name."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return collections.Counter, (), {"x": Marker(self.path)}


def make_hostile(folder: Path, value: Any) -> Path:
    """torch.save's container around a pickle of any value."""
    path = save(folder, {"a": torch.ones(3)})
    rewritten(path, {"data.pkl": pickle.dumps(value, protocol=2)})
    return path


@pytest.mark.parametrize("wrap", [lambda one: one, lambda one: {"a": 1, "b": one}, lambda one: ["x", (one,)]])
@pytest.mark.parametrize("hostile", [Marker, ByBuild])
def test_marker_is_never_made(tmp_path: Path, wrap: Any, hostile: Any) -> None:
    marker = tmp_path / "marker"
    folder = tmp_path / "release"
    path = make_hostile(folder, wrap(hostile(marker)))
    (folder / "config.json").write_text('{"model_type": "x"}')
    release = open_release(folder)  # without the flag
    assert [one.kind for one in release.errors] == ["pickle_checkpoint"]
    allowed = with_pickled(release)  # with the flag
    assert [one.kind for one in allowed.errors] == ["unknown_global"] and not allowed.tensors
    assert "posix.system" in allowed.errors[0].detail or "collections.Counter" in allowed.errors[0].detail
    assert not marker.exists()
    with zipfile.ZipFile(path) as archive:  # the file is what it is said to be: unpickling it does make the marker
        data = next(archive.read(name) for name in archive.namelist() if name.endswith("data.pkl"))
    pickle.loads(data)
    assert marker.exists()


@pytest.mark.parametrize(
    "code",
    [
        b"cposix\nsystem\n.",
        b"cbuiltins\neval\n(S'1'\ntR.",
        b"(S'touch x'\niposix\nsystem\n.",
        b"\x80\x02ctorch\nload\n.",
        b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n)\x81.",  # NEWOBJ
        b"\x80\x02ctorch.FloatStorage\n__init__\n.",
        b"\x80\x04\x8c\x05posix\x8c\x06system\x93.",
        b"\x80\x02\x82\x01.",  # EXT1
        b"\x80\x02ctorch\nFloatStorage\n)R.",
        b"\x80\x02}}b}.",
        b"\x80\x02(.",
        b"\x80\x02K\x01\x86.",
        b"\x80\x02h\x05.",
        b"\x80\x02}K\x01",
        b"\x80\x02(K\x01K\x02u.",
        b"\x80\x02}.}",
        b"",
    ],
)
def test_other_programs_are_refused(code: bytes) -> None:
    with pytest.raises(RefusedPickle):
        run_pickle(code)


def test_nested_tuples_cost_nothing() -> None:
    """A few hundred bytes whose printing or hashing would take 2**200 steps."""
    bomb = b"\x80\x02)" + b"q\x00h\x00\x86" * 200
    assert isinstance(run_pickle(bomb + b"."), tuple)
    for code in (b"\x80\x02}" + bomb[2:] + b"K\x01s.", bomb + b"Q.", b"\x80\x02ctorch\nSize\n" + bomb[2:] + b"\x85R."):
        try:
            run_pickle(code)
        except RefusedPickle as error:
            assert len(str(error)) < 300


def test_bytes_that_would_become_a_thousand_times_as_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pickle_program, "MAX_DICTS", 1000)
    for code in (b"}" * 2000, b"ccollections\nOrderedDict\nq\0" + b"h\0)R" * 2000):
        with pytest.raises(RefusedPickle, match="1000 dicts"):
            run_pickle(code)
    monkeypatch.setattr(pickle_program, "MAX_INSTRUCTIONS", 1000)
    with pytest.raises(RefusedPickle, match="1000 instructions"):
        run_pickle(b"K\1" + b"\x85" * 2000)
    with pytest.raises(RefusedPickle):
        run_pickle(b"\x8d" + b"\xff" * 7 + b"\x7f")  # text of 2**63 bytes


def test_every_known_name_of_the_refusals_is_refused() -> None:
    for name in pickle_program.KNOWN_OTHERS:
        module, _, last = name.rpartition(".")
        with pytest.raises(RefusedPickle, match="which is no plain tensor"):
            run_pickle(f"c{module}\n{last}\n.".encode())


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (lambda: torch.ones(2, 2).to_sparse(), "a sparse tensor"),
        (lambda: torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8), "a quantized tensor"),
        (lambda: torch.empty(2, device="meta"), "without storage"),
        (lambda: torch.ones(2, dtype=torch.complex128), "ComplexDoubleStorage"),
    ],
)
def test_tensors_of_other_kinds_are_named(tmp_path: Path, value: Any, says: str) -> None:
    save(tmp_path, {"a": value()})
    found = read_pickled(tmp_path)
    assert kinds(found) == ["unknown_global"] and says in found.problems[0].detail, found.problems


def test_conjugated_tensor_is_refused(tmp_path: Path) -> None:
    save(tmp_path, {"a": torch.ones(2, dtype=torch.complex64).conj()})
    assert kinds(read_pickled(tmp_path)) == ["tensor_metadata"]


# ------------------------------------------------------------------------------------------------------------------- containers


def test_legacy_file(tmp_path: Path) -> None:
    save(tmp_path, {"a": torch.ones(2)}, _use_new_zipfile_serialization=False)
    assert kinds(read_pickled(tmp_path)) == ["legacy_pickle"]


@pytest.mark.parametrize("content", [b"", b"version https://git-lfs.github.com/spec/v1\noid sha256:x\nsize 5\n", b"<!DOCTYPE html>", b"abc"])
def test_what_is_no_checkpoint(tmp_path: Path, content: bytes) -> None:
    (tmp_path / SINGLE).write_bytes(content)
    assert len(kinds(read_pickled(tmp_path))) == 1
    assert not read_pickled(tmp_path).tensors


def test_torchscript(tmp_path: Path) -> None:
    torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), tmp_path / SINGLE)
    assert kinds(read_pickled(tmp_path)) in (["torchscript"], ["compressed_member"])


def test_compressed_members(tmp_path: Path) -> None:
    rewritten(save(tmp_path, {"a": torch.zeros(500)}), {}, compress=True)
    assert kinds(read_pickled(tmp_path)) == ["compressed_member"]


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({"byteorder": b"big"}, "byte_order"),
        ({"data/0": b"\0" * 8}, "storage_bytes"),
        ({"data/0": b"\0" * 16}, "storage_bytes"),
        ({"data/0": None}, "missing_member"),
        ({"data.pkl": None}, "not_a_checkpoint"),
        ({"data.pkl": b"\x80\x02]."}, "no_state_dict"),
        ({"data.pkl": b"\x80\x02}."}, "no_state_dict"),
        ({"data/77": b"abc"}, "unused_member"),
        ({"../../evil": b"abc"}, "unused_member"),
    ],
)
def test_members_that_do_not_fit(tmp_path: Path, change: dict[str, bytes | None], kind: str) -> None:
    path = save(tmp_path, {"a": torch.ones(3)})
    rewritten(path, {})
    assert read_pickled(tmp_path).problems == ()
    rewritten(path, change)
    assert kinds(read_pickled(tmp_path)) == [kind]


def test_pickle_that_is_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, {"a": torch.ones(3)})
    monkeypatch.setattr(pickle_file, "MAX_PICKLE_BYTES", 100)
    assert kinds(read_pickled(tmp_path)) == ["pickle_too_large"]


def test_name_given_twice(tmp_path: Path) -> None:
    path = save(tmp_path, {"a": torch.ones(3), "b": torch.zeros(3)})
    with zipfile.ZipFile(path) as archive:
        code = next(archive.read(name) for name in archive.namelist() if name.endswith("data.pkl"))
    rewritten(path, {"data.pkl": code.replace(b"X\x01\x00\x00\x00b", b"X\x01\x00\x00\x00a")})
    found = read_pickled(tmp_path)
    assert "duplicate_key" in kinds(found) and found.problems[0].tensor == "a"


def test_span_past_the_storage(tmp_path: Path) -> None:
    path = save(tmp_path, {"a": torch.ones(3)})
    with zipfile.ZipFile(path) as archive:
        code = next(archive.read(name) for name in archive.namelist() if name.endswith("data.pkl"))
    assert code.count(b"QK\x00K\x03\x85") == 1  # offset 0, shape (3,)
    for other in (b"QK\x01K\x03\x85", b"QK\x00K\x04\x85"):
        rewritten(path, {"data.pkl": code.replace(b"QK\x00K\x03\x85", other)})
        assert "tensor_span" in kinds(read_pickled(tmp_path))


def test_every_truncation_and_trailing_byte(tmp_path: Path) -> None:
    path = save(tmp_path, {"a": torch.ones(3), "b": torch.ones(2, 2).t()})
    whole = path.read_bytes()
    for length in range(0, len(whole), 7):
        path.write_bytes(whole[:length])
        found = read_pickled(tmp_path)
        assert any(one.severity == "error" for one in found.problems) and not found.tensors, length
    path.write_bytes(whole + b"\0")
    assert kinds(read_pickled(tmp_path)) == ["truncated"]


def test_every_bit_flip_is_found(tmp_path: Path) -> None:
    """In the container, the pickle or the data: by the headers, or by the zip's own checksums."""
    path = save(tmp_path, {"a": torch.full((3,), 1.5), "b": torch.ones(2, 2).t()})
    whole = path.read_bytes()
    sound = read_pickled(tmp_path)
    unseen = []
    for at in range(len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ (1 << at % 8)]) + whole[at + 1 :])
        found = read_pickled(tmp_path)
        if found.problems or found.checksum_problems():
            continue
        assert found.tensors == sound.tensors and found.strided == sound.strided, at
        unseen.append(at)
    # Left are bytes that mean nothing: versions, dates and attributes in the directory, padding before the data.
    with zipfile.ZipFile(io.BytesIO(whole)) as archive:
        for one in archive.infolist():
            name, extra = struct.unpack("<2H", whole[one.header_offset + 26 : one.header_offset + 30])
            begin = one.header_offset + 30 + name + extra
            assert not set(unseen) & set(range(begin, begin + one.file_size)), one.filename


def zip64(whole: bytes) -> bytes:
    """The same file with the sizes and offset of every member in zip64 fields, as past 4 GiB."""
    end64 = whole.rindex(b"PK\x06\x06")
    begin = struct.unpack("<Q", whole[end64 + 48 : end64 + 56])[0]
    made, at = b"", begin
    while whole[at : at + 4] == b"PK\x01\x02":
        size, _, name, extra, _ = struct.unpack("<2I3H", whole[at + 20 : at + 34])
        (offset,) = struct.unpack("<I", whole[at + 42 : at + 46])
        field = struct.pack("<HH3Q", 1, 24, size, size, offset)
        made += whole[at : at + 20] + b"\xff" * 8 + struct.pack("<HH", name, len(field)) + whole[at + 32 : at + 42] + b"\xff" * 4
        made += whole[at + 46 : at + 46 + name] + field
        at += 46 + name + extra
    record = whole[end64 : end64 + 40] + struct.pack("<2Q", len(made), begin)
    locator = b"PK\x06\x07" + struct.pack("<IQI", 0, begin + len(made), 1)
    tail = whole[-22:]
    return whole[:begin] + made + record + locator + tail[:12] + struct.pack("<2I", 0xFFFFFFFF, 0xFFFFFFFF) + tail[20:]


def test_zip64(tmp_path: Path) -> None:
    path = save(tmp_path, {"a": make_tensor(torch.float32, 30), "b": make_tensor(torch.bfloat16, 4)})
    large = zip64(path.read_bytes())
    path.write_bytes(large)
    found = read_pickled(tmp_path)
    assert found.problems == ()
    assert_equals_torch(tmp_path, found, [SINGLE])
    path.write_bytes(large.replace(struct.pack("<HH", 1, 24), struct.pack("<HH", 1, 23), 1))
    assert kinds(read_pickled(tmp_path)) == ["zip_directory"]


def test_files_that_are_not_weights_are_not_read(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    make_hostile(tmp_path / "release", Marker(marker)).rename(tmp_path / "release" / "training_args.bin")
    found = read_pickled(tmp_path / "release")
    assert kinds(found) == ["no_pickle_weights"] and not marker.exists()


def test_safetensors_beside_it_win(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"a": torch.ones(2)}, tmp_path / "model.safetensors")
    make_hostile(tmp_path, Marker(tmp_path / "marker"))
    (tmp_path / "config.json").write_text('{"model_type": "x"}')
    release = open_release(tmp_path)
    assert with_pickled(release) is release and set(release.tensors) == {"a"} and not release.errors
    assert not (tmp_path / "marker").exists()
