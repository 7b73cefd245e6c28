"""Weights from and to places that are no folders: an S3 server through a faulty network, the web, fsspec's memory, hub caches.

What can pass is borne, what cannot is refused by name, each byte is fetched once, and nothing is left behind.
"""

from __future__ import annotations

import functools
import http.server
import json
import os
import random
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dayzero.core.artifact import ArtifactLayout
from dayzero.core.errors import DayZeroError
from dayzero.core.model import ModelDescription
from dayzero.core.plan import Layout
from dayzero.core.records import read_record
from dayzero.core.units import MIB
from dayzero.model.describe import describe
from dayzero.model.headers import TensorEntry
from dayzero.model.release import open_release
from dayzero.model.remote import objects, s3
from dayzero.model.remote.objects import ObjectFolder, is_remote
from dayzero.weights.convert import convert
from dayzero.weights.places import publishing
from dayzero.weights.places.stores import FsspecStore, local_folder, open_artifact, open_source
from dayzero.weights.proof.verify import LAYOUT_FILE, SEAL_FILE, STATE_FILE, verify
from dayzero.weights.to_hf import export
from tests.faulty_store import Fault, Proxy, Request, S3Server

SHARD = "model.safetensors"
LAYOUT = Layout()


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    made = S3Server()
    yield made
    made.close()


@pytest.fixture
def proxy(server: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Proxy]:
    """The way to the server; also quick to try again, and with temporary folders of this test's own."""
    made = Proxy(target=server.target)
    settings = {"AWS_ENDPOINT_URL": made.address, "AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test",
                "AWS_DEFAULT_REGION": "us-east-1", "AWS_CONFIG_FILE": "/dev/null", "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
                "no_proxy": "127.0.0.1", "NO_PROXY": "127.0.0.1"}  # fmt: skip
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(objects, "PAUSE_S", 0.002)
    monkeypatch.setattr(s3, "PART_PAUSE_S", 0.002)
    for name in ("scratch", "cache"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "scratch"))
    monkeypatch.setattr(publishing, "cache_folder", lambda kind: tmp_path / "cache")
    yield made
    made.close()
    assert list((tmp_path / "scratch").iterdir()) == [], "left behind"


@pytest.fixture(scope="module")
def source(tiny_checkpoint: Callable[..., Path]) -> Path:
    return tiny_checkpoint("qwen3", dtype="float32", num_shards=1)


@pytest.fixture(scope="module")
def model(source: Path) -> ModelDescription:
    return describe(source)


@pytest.fixture(scope="module")
def local(source: Path, model: ModelDescription, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("local") / "artifact"
    convert(source, model, LAYOUT, out)
    return out


def upload(server: S3Server, folder: Path, prefix: str) -> str:
    for path in folder.rglob("*"):
        if path.is_file():
            server.put(f"{prefix}/{path.relative_to(folder).as_posix()}", path.read_bytes())
    return f"s3://bucket/{prefix}"


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def assert_same_artifact(found: dict[str, bytes], wanted: dict[str, bytes]) -> None:
    """Byte for byte, but for what the source's files were (and the checksum of that, in the layout)."""
    assert found.keys() == wanted.keys()
    for name in wanted.keys() - {STATE_FILE, LAYOUT_FILE, SEAL_FILE}:
        assert found[name] == wanted[name], name
    layouts = [json.loads(one[LAYOUT_FILE]) for one in (found, wanted)]
    for layout in layouts:
        layout["release_files"] = [one for one in layout["release_files"] if one["file"] != STATE_FILE]
    assert layouts[0] == layouts[1]


def refusal(action: Callable[[], object]) -> str:
    with pytest.raises(DayZeroError) as caught:
        action()
    return str(caught.value)


# --- from a store --------------------------------------------------------------------------------------------------------


def test_from_s3_the_artifact_is_the_same_and_each_byte_is_fetched_once(
    server: S3Server, proxy: Proxy, source: Path, model: ModelDescription, local: Path, tmp_path: Path
) -> None:
    address = upload(server, source, "plain")
    report = convert(address, model, LAYOUT, tmp_path / "out")
    assert_same_artifact(contents(tmp_path / "out"), contents(local))
    assert verify(tmp_path / "out") == ()
    size = (source / SHARD).stat().st_size
    assert size <= proxy.sent_of(SHARD) <= 1.1 * size, (proxy.sent_of(SHARD), size)
    assert not report.reused and convert(address, model, LAYOUT, tmp_path / "out").reused
    state = json.loads((tmp_path / "out" / STATE_FILE).read_text())
    assert state[0]["version"] and state[0]["modified_ns"] is None


def test_several_shards_for_two_ranks(
    server: S3Server, proxy: Proxy, tiny_checkpoint: Callable[..., Path], model: ModelDescription, tmp_path: Path
) -> None:
    source = tiny_checkpoint("qwen3", dtype="float32")
    address = upload(server, source, "ranks")
    convert(address, model, Layout(tp=2), tmp_path / "out")
    convert(source, model, Layout(tp=2), tmp_path / "local")
    assert_same_artifact(contents(tmp_path / "out"), contents(tmp_path / "local"))
    size = sum(path.stat().st_size for path in source.glob("*.safetensors"))
    assert proxy.sent_of(".safetensors") <= 1.1 * size  # all of it fits into the blocks' memory


def test_a_release_in_a_store_is_described_as_the_folder_is(server: S3Server, proxy: Proxy, source: Path) -> None:
    address = upload(server, source, source.name)
    here = open_release(source)
    with open_source(address) as opened:
        assert (opened.release.source_hash, opened.release.tensors) == (here.source_hash, here.tensors)
        assert opened.release.other_files == here.other_files and opened.release.problems == here.problems
        assert not (opened.settings / SHARD).exists()  # no holes that could be taken for weights
        assert describe(opened.settings).dimensions == describe(source).dimensions


def test_dropped_connections_and_busy_servers_are_borne(
    server: S3Server, proxy: Proxy, source: Path, model: ModelDescription, local: Path, tmp_path: Path
) -> None:
    def fault(request: Request) -> Fault | None:
        if request.method == "GET" and request.path.endswith(SHARD):
            return {1: Fault(busy=True), 2: Fault(busy=True), 5: Fault(keep=100_000), 6: Fault(keep=0)}.get(request.number)
        return Fault(busy=True) if request.number == 1 else None  # of everything else, the first time

    address = upload(server, source, "faults")
    proxy.fault = fault
    convert(address, model, LAYOUT, tmp_path / "out")
    assert_same_artifact(contents(tmp_path / "out"), contents(local))
    assert proxy.count("GET", SHARD) >= 7
    size = (source / SHARD).stat().st_size
    assert proxy.sent_of(SHARD) <= 1.1 * size, "what had come was asked for again"


def test_an_answer_that_is_always_cut_is_refused_by_name(
    server: S3Server, proxy: Proxy, source: Path, model: ModelDescription, tmp_path: Path
) -> None:
    address = upload(server, source, "cut")
    proxy.fault = lambda request: Fault(keep=10) if request.path.endswith(SHARD) and request.number > 2 else None
    said = refusal(lambda: convert(address, model, LAYOUT, tmp_path / "out"))
    assert f"{address}/{SHARD} cannot be reached" in said and "tries" in said
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("size", ["same", "other"])
def test_an_object_that_is_replaced_half_way_is_refused_by_name(
    server: S3Server, proxy: Proxy, source: Path, model: ModelDescription, tmp_path: Path, size: str
) -> None:
    address = upload(server, source, f"replaced-{size}")
    data = bytearray((source / SHARD).read_bytes())
    data[-1] ^= 1
    other = bytes(data) + (b"more" if size == "other" else b"")

    def fault(request: Request) -> Fault | None:
        # The header was read; the first answer of tensors is cut, and before it is asked for again the object is another.
        if request.method == "GET" and request.path.endswith(SHARD):
            put = lambda: server.put(f"replaced-{size}/{SHARD}", other)
            return {3: Fault(keep=100_000), 4: Fault(before=put)}.get(request.number)
        return None

    proxy.fault = fault
    said = refusal(lambda: convert(address, model, LAYOUT, tmp_path / "out"))
    assert f"{address}/{SHARD} changed while it was read" in said, said
    assert not (tmp_path / "out").exists()
    proxy.fault = lambda request: None
    if size == "same":  # the next run begins anew with the new object
        convert(address, model, LAYOUT, tmp_path / "out")
        assert verify(tmp_path / "out") == ()


def test_a_truncated_object_is_refused_before_anything_is_moved(
    server: S3Server, proxy: Proxy, source: Path, model: ModelDescription, tmp_path: Path
) -> None:
    address = upload(server, source, "short")
    server.put(f"short/{SHARD}", (source / SHARD).read_bytes()[:-1000])
    said = refusal(lambda: convert(address, model, LAYOUT, tmp_path / "out"))
    assert SHARD in said and "not usable" in said and address in said and str(tmp_path / "scratch") not in said
    assert proxy.sent_of(SHARD) < 100_000 and not (tmp_path / "out").exists()


def test_errors_name_the_address_and_what_is_wrong_with_it(server: S3Server, proxy: Proxy, tmp_path: Path,
                                                           monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    def opening(address: str) -> str:
        return refusal(lambda: open_source(address).__enter__())

    assert "s3://bucket/nothing/ holds no config.json" in opening("s3://bucket/nothing")
    assert "not an address this can read" in opening("nosuch://bucket/x")
    proxy.fault = lambda request: Fault(busy=True)
    assert "SlowDown" in opening("s3://bucket/nothing")
    proxy.fault = lambda request: None
    monkeypatch.setitem(sys.modules, "s3fs", None)
    assert "pip install 'dayzero[remote]'" in opening("s3://bucket/nothing")


def test_from_a_web_server_and_from_any_other_file_system(
    proxy: Proxy, source: Path, model: ModelDescription, local: Path, tmp_path: Path
) -> None:
    import fsspec

    class Handler(http.server.SimpleHTTPRequestHandler):
        """Python's own, with ranges."""

        def send_head(self):  # type: ignore[no-untyped-def]
            path = Path(self.translate_path(self.path))
            span = self.headers.get("Range")
            if span is None or not path.is_file():
                return super().send_head()
            first, last = map(int, span.removeprefix("bytes=").split("-"))
            data = path.read_bytes()
            part = data[first : last + 1]
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {first}-{first + len(part) - 1}/{len(data)}")
            self.send_header("Content-Length", str(len(part)))
            self.send_header("ETag", '"one"')
            self.end_headers()
            self.wfile.write(part)
            return None

        def log_message(self, *arguments: object) -> None:
            pass

    httpd = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=str(source.parent)))
    thread = threading.Thread(target=httpd.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        convert(f"http://127.0.0.1:{httpd.server_port}/{source.name}/", model, LAYOUT, tmp_path / "web")
    finally:
        httpd.shutdown()
        httpd.server_close()
    assert_same_artifact(contents(tmp_path / "web"), contents(local))

    memory = fsspec.filesystem("memory")
    memory.put(f"{source}/", "/models/tiny/", recursive=True)
    convert("memory://models/tiny", model, LAYOUT, tmp_path / "memory")
    assert_same_artifact(contents(tmp_path / "memory"), contents(local))
    convert("memory://models/tiny", model, LAYOUT, "memory://artifacts/tiny")
    with open_artifact("memory://artifacts/tiny") as found:
        artifact = read_record(ArtifactLayout, found.folder / LAYOUT_FILE)
        one = artifact.files[0][0]
        data = bytearray(one.num_bytes)
        found.store.read_into(one.file, 0, memoryview(data))
        assert bytes(data) == (local / one.file).read_bytes()
        assert found.files == {name: len(content) for name, content in contents(local).items()} | {
            STATE_FILE: found.files[STATE_FILE]
        }
        with found.on_disk(one.file) as path:
            assert path.read_bytes() == (local / one.file).read_bytes()
        assert not path.exists()


# --- to a store ----------------------------------------------------------------------------------------------------------


def fetched(server: S3Server, prefix: str) -> dict[str, bytes]:
    return {name.removeprefix(f"{prefix}/"): server.get(name) for name in server.names(f"{prefix}/")}


def test_to_s3_the_artifact_is_the_same_and_nothing_stays_here(
    server: S3Server, proxy: Proxy, source: Path, model: ModelDescription, local: Path, tmp_path: Path
) -> None:
    report = convert(source, model, LAYOUT, "s3://bucket/out")
    assert report.artifact == "s3://bucket/out" and report.ledger.filled_parameters
    assert fetched(server, "out") == contents(local)  # the same sources, so all of it
    puts = [one.path for one in proxy.asked if one.method == "PUT"]
    assert [path for path in puts if path.endswith(f"/{LAYOUT_FILE}")] == puts[-1:], "it makes the output usable: it is last"
    assert list((tmp_path / "cache").iterdir()) == []
    before = len(puts)
    again = convert(source, model, LAYOUT, "s3://bucket/out")
    assert again.reused and proxy.count("PUT", "") == before
    assert "another artifact" in refusal(lambda: convert(source, model, Layout(tp=2), "s3://bucket/out"))


def test_from_store_to_store_with_a_copy_kept_here(
    server: S3Server, proxy: Proxy, source: Path, model: ModelDescription, local: Path, tmp_path: Path
) -> None:
    address = upload(server, source, "kept-source")
    convert(address, model, LAYOUT, "s3://bucket/kept", keep=tmp_path / "kept")
    assert fetched(server, "kept") == contents(tmp_path / "kept")
    assert_same_artifact(contents(tmp_path / "kept"), contents(local))


def test_an_interrupted_upload_looks_unfinished_and_goes_on_where_it_was(
    server: S3Server, proxy: Proxy, source: Path, model: ModelDescription, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dayzero.weights.placement.FILE_BYTES", 200_000)  # several files
    convert(source, model, LAYOUT, tmp_path / "whole")
    shards = sorted(name for name in contents(tmp_path / "whole") if name.endswith(".safetensors"))
    assert len(shards) >= 3
    proxy.fault = lambda request: Fault(busy=True) if request.method == "PUT" and request.path.endswith(shards[2]) else None
    said = refusal(lambda: convert(source, model, LAYOUT, "s3://bucket/broken", workers=1))
    assert f"s3://bucket/broken/{shards[2]} cannot be reached" in said and "what is finished is kept" in said
    there = server.names("broken/")
    assert f"broken/{LAYOUT_FILE}" not in there and f"broken/{shards[0]}" in there
    shutil.rmtree(tmp_path / "cache")  # another machine goes on
    (tmp_path / "cache").mkdir()
    server.put(f"broken/{shards[1]}", b"somebody else's")  # no longer what was noted: made again
    proxy.fault = lambda request: None
    proxy.asked.clear()
    convert(source, model, LAYOUT, "s3://bucket/broken")
    assert fetched(server, "broken") == contents(tmp_path / "whole")
    assert proxy.count("PUT", f"broken/{shards[0]}") == 0, "uploaded twice"
    assert proxy.count("PUT", f"broken/{shards[1]}") == 1


def test_what_arrives_otherwise_than_it_was_sent_is_never_published(
    server: S3Server, proxy: Proxy, source: Path, model: ModelDescription
) -> None:
    flip = Fault(change=lambda body: bytes([body[0] ^ 1]) + body[1:])
    proxy.fault = lambda request: flip if request.method == "PUT" and request.path.endswith(".safetensors") else None
    said = refusal(lambda: convert(source, model, LAYOUT, "s3://bucket/flipped"))
    assert "s3://bucket/flipped/rank-00000/" in said
    assert f"flipped/{LAYOUT_FILE}" not in server.names("flipped/")


def test_large_files_go_in_parts_and_a_dropped_part_is_sent_again(
    server: S3Server, proxy: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3, "PART_BYTES", 5 * MIB)
    monkeypatch.setattr(objects, "ATTEMPTS", 2)
    data = random.Random(0).randbytes(12 * MIB)
    (tmp_path / "large").write_bytes(data)
    proxy.fault = lambda request: Fault(busy=True) if request.method == "PUT" and request.number in (1, 3) else None
    folder = ObjectFolder("s3://bucket/parts")
    state = folder.put("large", tmp_path / "large")
    assert server.get("parts/large") == data and (state.version or "").endswith('-3"')
    proxy.fault = lambda request: Fault(busy=True) if request.method == "PUT" else None
    assert "s3://bucket/parts/other cannot be reached" in refusal(lambda: folder.put("other", tmp_path / "large"))
    assert b"<UploadId>" not in server.ask("GET", "/bucket?uploads")  # no parts that only the bill shows
    folder.close()


def test_to_an_ordinary_folder_and_back_from_store_to_store(
    server: S3Server, proxy: Proxy, source: Path, model: ModelDescription, local: Path, tmp_path: Path
) -> None:
    address = upload(server, local, "to-hf")
    export(address, tmp_path / "here")
    export(local, tmp_path / "wanted")
    assert contents(tmp_path / "here") == contents(tmp_path / "wanted")
    export(address, "s3://bucket/to-hf-out", shard_bytes=200_000)
    puts = [one.path for one in proxy.asked if one.method == "PUT"]
    assert puts[-1].endswith("/config.json"), "without it nothing can be loaded: it is last"
    export(local, tmp_path / "several", shard_bytes=200_000)
    assert fetched(server, "to-hf-out") == contents(tmp_path / "several")
    assert "is in the way" in refusal(lambda: export(local, "s3://bucket/to-hf-out"))


def test_something_else_at_the_address_is_never_touched(
    server: S3Server, proxy: Proxy, source: Path, model: ModelDescription
) -> None:
    server.put("mine/notes.txt", b"mine")
    assert "is in the way" in refusal(lambda: convert(source, model, LAYOUT, "s3://bucket/mine"))
    assert server.names("mine/") == ["mine/notes.txt"]


# --- blocks --------------------------------------------------------------------------------------------------------------


def test_blocks_are_right_for_any_read_and_stay_within_their_memory(server: S3Server, proxy: Proxy) -> None:
    data = random.Random(1).randbytes(1_000_000)
    server.put("blocks/file", data)
    chance = random.Random(2)
    entries, at = [], 1000
    while at < len(data) - 70_000:
        size = chance.choice((10, 5_000, 60_000))
        entries.append(TensorEntry(file="file", dtype="uint8", shape=(size,), begin=at, end=at + size))
        at += size
    with FsspecStore(ObjectFolder("s3://bucket/blocks"), block_bytes=20_000, memory_bytes=200_000) as store:
        store.arrange(entries)
        bounds = store._bounds["file"]
        large = {entry.begin for entry in entries if entry.num_bytes > 20_000}
        assert large <= set(bounds) and len(bounds) < len(entries) + 2 * len(large), "small neighbours share a block"
        failed: list[object] = []

        def read(seed: int) -> None:
            own = random.Random(seed)
            for _ in range(20):
                start = own.randrange(len(data))
                wanted = data[start : start + own.randrange(1, 50_000)]
                target = bytearray(len(wanted))
                store.read_into("file", start, memoryview(target))
                if target != wanted or store._held_bytes > 200_000 + 3 * 20_000:
                    failed.append((seed, start, len(wanted), store._held_bytes))

        threads = [threading.Thread(target=read, args=(seed,)) for seed in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failed == []
        assert "ends early" in refusal(lambda: store.read_into("file", len(data) - 1, memoryview(bytearray(2))))


def test_blocks_are_fetched_ahead_of_who_reads_in_order_and_of_what_was_announced(server: S3Server, proxy: Proxy) -> None:
    data = random.Random(3).randbytes(400_000)
    server.put("ahead/file", data)
    proxy.latency_s = 0.02
    for announce in (False, True):
        proxy.most_at_once = 0
        proxy.sent.clear()
        with FsspecStore(ObjectFolder("s3://bucket/ahead"), block_bytes=10_000) as store:
            # Announced, also what jumps about: every other block, backwards.
            starts = list(range(380_000, -1, -20_000)) if announce else list(range(0, 400_000, 10_000))
            if announce:
                store.expect(("file", start, start + 10_000) for start in starts)
            for start in starts:
                target = bytearray(10_000)
                store.read_into("file", start, memoryview(target))
                assert target == data[start : start + 10_000]
        assert proxy.most_at_once > 2, announce
        assert proxy.sent_of("file") == 10_000 * len(starts), announce


def test_a_spool_keeps_what_leaves_the_memory_and_goes_in_the_end(
    server: S3Server, proxy: Proxy, source: Path, model: ModelDescription, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address, size = upload(server, source, "spooled"), (source / SHARD).stat().st_size
    small = functools.partial(open_source, block_bytes=size // 50, memory_bytes=size // 10)
    fetched_bytes = []
    monkeypatch.setattr("dayzero.weights.convert.open_source", lambda place, spool, **_: small(place, spool=spool))
    for number, (tp, spool) in enumerate([(1, None), (2, None), (2, tmp_path / "spool")]):
        proxy.sent.clear()
        convert(address, model, Layout(tp=tp), tmp_path / f"out-{number}", spool=spool)
        fetched_bytes.append(proxy.sent_of(SHARD))
    assert_same_artifact(contents(tmp_path / "out-1"), contents(tmp_path / "out-2"))
    assert fetched_bytes[0] <= 1.1 * size, "in order, no block is needed twice"
    assert fetched_bytes[1] > 1.5 * size, "the test's memory is too large to need a spool"
    assert fetched_bytes[2] <= 1.1 * size
    assert list((tmp_path / "spool").iterdir()) == []


# --- folders -------------------------------------------------------------------------------------------------------------


def test_a_repository_in_the_hub_cache_is_its_main_snapshot(source: Path, model: ModelDescription, local: Path,
                                                            tmp_path: Path) -> None:  # fmt: skip
    repository = tmp_path / "models--org--name"
    (repository / "blobs").mkdir(parents=True)
    for revision in ("aaa", "bbb"):
        (repository / "snapshots" / revision).mkdir(parents=True)
    for path in source.iterdir():
        blob = repository / "blobs" / f"blob-{path.name}"
        shutil.copyfile(path, blob)
        (repository / "snapshots" / "bbb" / path.name).symlink_to(os.path.relpath(blob, repository / "snapshots" / "bbb"))
    said = refusal(lambda: local_folder(repository))
    assert "aaa, bbb" in said and "which snapshot" in said
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("bbb")
    assert local_folder(repository).name == "bbb"
    convert(repository, model, LAYOUT, tmp_path / "out")
    assert_same_artifact(contents(tmp_path / "out"), contents(local))
    (repository / "refs" / "main").write_text("ccc")
    assert "no snapshot of its main branch" in refusal(lambda: local_folder(repository))
    shutil.rmtree(repository / "refs")
    shutil.rmtree(repository / "snapshots" / "aaa")
    assert local_folder(repository).name == "bbb"


def test_addresses_are_told_from_paths() -> None:
    assert all(map(is_remote, ("s3://b/x", "s3:/b/x", Path("gs://b/x"), "http://h/x", "memory://x")))
    assert not any(map(is_remote, ("/a/b", "a/b", "file:///a", "local:///a", "c:/x", Path("org/name"))))
    assert local_folder("file:///a/b") == Path("/a/b") == local_folder(Path("file:///a/b"))
