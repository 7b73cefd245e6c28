"""One conversion in parts: what is joined is what a single run makes, byte for byte, and nothing less is ever joined."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dayzero.core.errors import DayZeroError
from dayzero.core.model import ModelDescription
from dayzero.core.plan import Layout
from dayzero.core.records import read_record, write_record
from dayzero.model.describe import describe
from dayzero.weights import parts, placement, running
from dayzero.weights.convert import convert
from dayzero.weights.ledger import SourceTensor, read_lines
from dayzero.weights.merging import merge
from dayzero.weights.parts import PART_FILE, PartRecord, convert_part, deal, parse_part, part_folder
from dayzero.weights.places.workfolder import locked_work_folder
from dayzero.weights.proof.verify import prove
from tests.model.test_convert import folder_hash, make_copy

Tiny = Callable[..., Path]
LAYOUT = Layout(tp=2, ep=2)


@pytest.fixture(autouse=True)
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many files, as a real checkpoint has."""
    monkeypatch.setattr(placement, "FILE_BYTES", 20_000)


@pytest.fixture
def source(tiny_checkpoint: Tiny) -> Path:
    return tiny_checkpoint("qwen3_moe")


def make_parts(source: Path, model: ModelDescription, out: Path, num_parts: int, layout: Layout = LAYOUT) -> list[Path]:
    for part in range(1, num_parts + 1):
        convert_part(source, model, layout, out, part, num_parts)
    return [part_folder(out, part, num_parts) for part in range(1, num_parts + 1)]


@pytest.mark.parametrize("num_parts", [1, 3, 40])
def test_joined_parts_are_the_single_run_byte_for_byte(num_parts: int, source: Path, tmp_path: Path) -> None:
    """Also with more parts than files; each file is made, and each source hashed for the record, by exactly one part."""
    model = describe(source)
    single = convert(source, model, LAYOUT, tmp_path / "single")
    folders = make_parts(source, model, tmp_path / "out", num_parts)
    records = [read_record(PartRecord, folder / PART_FILE) for folder in folders]
    made = Counter(one.file.file for record in records for one in record.written)
    assert set(made.values()) == {1} and made.keys() == {file.file for file in records[0].files}
    hashed = Counter(name for record in records for name in record.checksums)
    used = {one.tensor for one in read_lines(SourceTensor, tmp_path / "single/sources.jsonl") if one.dropped is None}
    assert set(hashed.values()) == {1} and hashed.keys() == used
    report = merge(tmp_path / "out")
    assert folder_hash(tmp_path / "out") == folder_hash(tmp_path / "single")
    assert (report.key, report.ledger) == (single.key, single.ledger) and report.bytes_written == single.bytes_written
    assert len(prove(tmp_path / "out", source).proved) == 4
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "single"]
    assert merge(tmp_path / "out").reused  # asked again, as a retried job does


def test_parts_carry_about_the_same(source: Path, tmp_path: Path) -> None:
    model = describe(source)
    folders = make_parts(source, model, tmp_path / "out", 3)
    sizes = [sum(one.file.num_bytes for one in read_record(PartRecord, folder / PART_FILE).written) for folder in folders]
    assert max(sizes) - min(sizes) <= 20_000


@given(st.lists(st.integers(0, 10**12), max_size=60), st.integers(1, 9))
@settings(max_examples=200, deadline=None)
def test_a_deal_is_complete_and_no_part_has_more_than_a_fair_share_and_one_item(sizes: list[int], num_parts: int) -> None:
    parts = deal(sizes, num_parts)
    assert len(parts) == len(sizes) and set(parts) <= set(range(1, num_parts + 1)) and parts == deal(sizes, num_parts)
    loads = [sum(size for size, part in zip(sizes, parts, strict=True) if part == one) for one in range(1, num_parts + 1)]
    assert max(loads) <= sum(sizes) / num_parts + max(sizes, default=0)


def test_parts_may_lie_elsewhere_and_come_in_any_order(source: Path, tmp_path: Path) -> None:
    """Each host in a folder of its own, copied to one afterwards: given folders are read and left alone."""
    model = describe(source)
    convert(source, model, LAYOUT, tmp_path / "single")
    given_folders = []
    for part in (2, 1):
        (folder,) = [part_folder(tmp_path / f"host{part}/out", part, 2)]
        convert_part(source, model, LAYOUT, tmp_path / f"host{part}/out", part, 2)
        given_folders.append(Path(shutil.move(folder, tmp_path / f"copied{part}")))
    merge(tmp_path / "out", given_folders)
    assert folder_hash(tmp_path / "out") == folder_hash(tmp_path / "single")
    assert all((folder / PART_FILE).is_file() for folder in given_folders)


def test_an_interrupted_part_goes_on_where_it_stopped(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = describe(source)
    convert(source, model, LAYOUT, tmp_path / "single")
    make_parts(source, model, tmp_path / "other", 2)
    whole = read_record(PartRecord, part_folder(tmp_path / "other", 2, 2) / PART_FILE).bytes_written
    write, count = running.write_file, 0

    def dying(*args: object, **options: object) -> object:
        nonlocal count
        count += 1
        if count > 2:
            raise KeyboardInterrupt
        return write(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(running, "write_file", dying)
    with pytest.raises(KeyboardInterrupt):
        convert_part(source, model, LAYOUT, tmp_path / "out", 2, 2, workers=1)
    monkeypatch.setattr(running, "write_file", write)
    assert not part_folder(tmp_path / "out", 2, 2).exists()
    convert_part(source, model, LAYOUT, tmp_path / "out", 1, 2)
    with pytest.raises(DayZeroError, match="missing: 2/2"):
        merge(tmp_path / "out")
    assert 0 < convert_part(source, model, LAYOUT, tmp_path / "out", 2, 2).bytes_written < whole
    merge(tmp_path / "out")
    assert folder_hash(tmp_path / "out") == folder_hash(tmp_path / "single")


def test_the_same_part_twice_at_once_is_refused_and_another_is_not(source: Path, tmp_path: Path) -> None:
    model, out = describe(source), tmp_path / "out"
    with locked_work_folder(part_folder(out, 1, 2), complete=PART_FILE):
        with pytest.raises(DayZeroError, match="another conversion"):
            convert_part(source, model, LAYOUT, out, 1, 2)
        convert_part(source, model, LAYOUT, out, 2, 2)
    convert_part(source, model, LAYOUT, out, 1, 2)
    assert convert_part(source, model, LAYOUT, out, 1, 2).reused
    merge(out)


def assert_not_joined(out: Path, *words: str, parts: list[Path] | None = None) -> None:
    with pytest.raises(DayZeroError) as caught:
        merge(out, parts or ())
    for word in words:
        assert word in str(caught.value), f"{word!r} is not in: {caught.value}"
    assert not out.exists()


def test_parts_that_are_missing_or_of_another_conversion_are_named(source: Path, tiny_checkpoint: Tiny, tmp_path: Path) -> None:
    model, out = describe(source), tmp_path / "out"
    assert_not_joined(out, "there are no parts")
    folders = make_parts(source, model, out, 3)
    shutil.move(folders[1], tmp_path / "away")
    assert_not_joined(out, "1 of 3 parts", "2/3")
    (tmp_path / folders[1].name).mkdir()
    assert_not_joined(out, "no finished part", folders[1].name)
    shutil.rmtree(tmp_path / folders[1].name)
    other_layout = make_parts(source, model, tmp_path / "wide", 3, Layout(tp=4))[1]
    assert_not_joined(out, "part 2 is of another conversion", parts=[folders[0], other_layout, folders[2]])
    other_count = make_parts(source, model, tmp_path / "four", 4)[1]
    assert_not_joined(out, "part 2 is of another conversion", "number of parts", parts=[folders[0], other_count, folders[2]])
    release = tiny_checkpoint("qwen3_moe", seed=5)
    other_bytes = make_parts(release, describe(release), tmp_path / "seed", 3)[1]
    assert_not_joined(out, "the source's bytes", parts=[folders[0], other_bytes, folders[2]])
    assert_not_joined(out, "part 1 is there twice", parts=[folders[0], folders[0], folders[2]])
    shutil.move(tmp_path / "away", folders[1])
    merge(out)


def test_what_changed_in_a_part_is_named_with_it_and_nothing_is_published(source: Path, tmp_path: Path) -> None:
    model, out = describe(source), tmp_path / "out"
    folders = make_parts(source, model, out, 2)
    for path in sorted(folders[0].rglob("*")):
        if not path.is_file():
            continue
        whole = path.read_bytes()
        for place in (0, len(whole) // 2, len(whole) - 1):
            data = bytearray(whole)
            data[place] ^= 1 << (place % 8)
            path.write_bytes(bytes(data))
            assert_not_joined(out, path.name if path.name != "part.sha256" else PART_FILE)
        path.unlink()
        assert_not_joined(out, path.name if path.name != "part.sha256" else PART_FILE)
        path.write_bytes(whole)
    shard = next(folders[1].rglob("*.safetensors"))
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-1])
    assert_not_joined(out, "part 2", shard.name)
    shard.write_bytes(whole)
    merge(out)


def test_copies_of_a_release_with_other_times_are_told(source: Path, tmp_path: Path) -> None:
    """Hosts without a shared file system read copies. Which sizes agree is known; which bytes do, only to --verify."""
    model, out = describe(source), tmp_path / "out"
    convert_part(source, model, LAYOUT, out, 1, 2)
    copied = make_copy(source, tmp_path / source.name)
    for shard in copied.glob("*.safetensors"):
        os.utime(shard, ns=(1, 1))
    convert_part(copied, model, LAYOUT, out, 2, 2)
    assert {problem.kind for problem in merge(out).problems} == {"other_copy", "digests"}
    assert prove(out, source).problems == ()


def test_a_source_that_changed_between_parts_is_found(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same headers, other bytes: what parts read of the same tensors is compared, and --verify reads all again."""
    model, out = describe(source), tmp_path / "out"
    copied = make_copy(source, tmp_path / source.name)
    monkeypatch.setattr(parts, "sample_of", lambda source: "as if no sample had met the change")
    convert_part(copied, model, LAYOUT, out, 1, 2)
    for shard in copied.glob("*.safetensors"):
        data = bytearray(shard.read_bytes())
        data[-2000] ^= 1
        shard.write_bytes(bytes(data))
    convert_part(copied, model, LAYOUT, out, 2, 2)
    try:
        merge(out)
    except DayZeroError as error:
        assert "was not the same for all parts" in str(error)
    else:
        assert {problem.kind for problem in prove(out, copied).problems} == {"source_changed"}


@pytest.mark.parametrize("text", ["0/4", "5/4", "1", "1/0", "a/b", "-1/2", "1/2/3", ""])
def test_parts_count_from_one(text: str) -> None:
    assert parse_part("1/4") == (1, 4) and parse_part(" 4/4 ") == (4, 4)
    with pytest.raises(DayZeroError):
        parse_part(text)


CHILD = """
import os, sys
from pathlib import Path
from dayzero.core.plan import Layout
from dayzero.core.model import ModelDescription
from dayzero.core.records import read_record
from dayzero.weights import placement
from dayzero.weights.parts import convert_part, parse_part
placement.FILE_BYTES = 20_000
part, num_parts = parse_part(sys.argv[4])
model = read_record(ModelDescription, Path(sys.argv[2]))
convert_part(Path(sys.argv[1]), model, Layout(tp=2, ep=2), Path(sys.argv[3]), part, num_parts)
"""


def test_the_recipe_for_torchrun(source: Path, tmp_path: Path) -> None:
    """docs/many-hosts.md: two processes that know only their rank and how many they are; then one joins."""
    model, script, record = describe(source), tmp_path / "part.py", tmp_path / "model.json"
    convert(source, model, LAYOUT, tmp_path / "single")
    write_record(model, record)
    script.write_text(CHILD)
    shell = f'{sys.executable} {script} {source} {record} {tmp_path / "out"} "$((RANK + 1))/$WORLD_SIZE"'
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "--no-python",
        "sh",
        "-c",
    ]
    done = subprocess.run(
        [*command, shell], capture_output=True, text=True, timeout=240, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr[-2000:]
    merge(tmp_path / "out")
    assert folder_hash(tmp_path / "out") == folder_hash(tmp_path / "single")
