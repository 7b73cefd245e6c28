"""Releases read over HTTP: the same record as from the folder, for the bytes of the headers alone; servers that misbehave."""

import http.server
import json
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dayzero.core.errors import DayZeroError
from dayzero.model.release import Release, open_release
from dayzero.model.remote import release as remote_release
from dayzero.model.remote.code import tokenizer_needs_code
from dayzero.model.remote.release import FIRST_BYTES, is_address, open_remote_release
from dayzero.model.remote.sandbox import describe_in_sandbox
from dayzero.model.stored.quantization import settings_beside

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
DATA_BYTES = 1 << 20  # of each shard, against headers of about a kilobyte


def write_shard(path: Path, names: list[str], *, data_bytes: int = DATA_BYTES) -> int:
    """A shard of uint8 tensors. The length of its header, length field included."""
    each = data_bytes // len(names)
    header = {
        name: {"dtype": "U8", "shape": [each], "data_offsets": [each * place, each * (place + 1)]}
        for place, name in enumerate(names)
    }
    raw = json.dumps(header).encode()
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + bytes(each * len(names)))
    return 8 + len(raw)


def make_release(folder: Path) -> int:
    """A release of two shards; the bytes of both headers."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "toy", "hidden_size": 8}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 3}))
    names = [[f"layers.{layer}.weight" for layer in range(first, first + 16)] for first in (0, 16)]
    total = sum(write_shard(folder / shard, own) for shard, own in zip(SHARDS, names, strict=True))
    weight_map = {name: shard for shard, own in zip(SHARDS, names, strict=True) for name in own}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return total


class Server:
    """Serves a folder with ranges; `sent` counts body bytes by file, `asked` requests. `behave` may answer instead."""

    def __init__(self, folder: Path) -> None:
        self.sent: dict[str, int] = {}
        self.asked: list[tuple[str, str | None]] = []
        self.behave: Any = None
        server = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                name, span = self.path.split("?")[0].removeprefix("/org/toy/"), self.headers.get("Range")
                server.asked.append((name, span))
                place = folder / name
                if server.behave is not None and server.behave(self, name, place):
                    return None
                if not place.is_file():
                    return self.answer(name, 404, b"no such file")
                content = place.read_bytes()
                if span is None:
                    return self.answer(name, 200, content)
                first, last = map(int, re.fullmatch(r"bytes=(\d+)-(\d+)", span).groups())  # type: ignore[union-attr]
                if first >= len(content):
                    return self.answer(name, 416, b"", {"Content-Range": f"bytes */{len(content)}"})
                part = content[first : last + 1]
                told = {"Content-Range": f"bytes {first}-{first + len(part) - 1}/{len(content)}"}
                return self.answer(name, 206, part, told)

            def answer(self, name: str, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
                self.send_response(status)
                for key, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
                    self.send_header(key, value)
                self.end_headers()
                self.wfile.write(body)
                if status < 400:
                    server.sent[name] = server.sent.get(name, 0) + len(body)

            def log_message(self, *arguments: Any) -> None:
                pass

        self.httpd = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.httpd.daemon_threads = True
        self.thread = threading.Thread(target=self.httpd.serve_forever, args=(0.02,))
        self.thread.start()
        self.address = f"http://127.0.0.1:{self.httpd.server_port}/org/toy/"

    def close(self) -> None:
        self.httpd.shutdown()
        self.thread.join()
        self.httpd.server_close()


@pytest.fixture(autouse=True)
def direct(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(remote_release, "PAUSE_S", 0.01)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[Path, Server]]:
    folder = tmp_path / "toy"
    make_release(folder)
    server = Server(folder)
    yield folder, server
    server.close()


def refusal(address: str, **options: Any) -> str:
    with pytest.raises(DayZeroError) as caught:
        open_remote_release(address, **options)
    return str(caught.value)


def kinds(release: Release) -> set[str]:
    return {problem.kind for problem in release.problems}


def test_a_remote_release_is_what_the_folder_is(served: tuple[Path, Server]) -> None:
    folder, server = served
    local, remote = open_release(folder), open_remote_release(server.address)
    assert replace(remote, folder=local.folder) == local  # names, sizes, offsets, problems and source hash
    assert remote.name == "toy" and len(remote.tensors) == 32 and remote.checkpoint_bytes == 2 * DATA_BYTES


def test_only_headers_are_sent_of_the_shards(served: tuple[Path, Server]) -> None:
    folder, server = served
    open_remote_release(server.address)
    for shard in SHARDS:
        header_bytes = 8 + int.from_bytes((folder / shard).read_bytes()[:8], "little")
        assert header_bytes > FIRST_BYTES  # so that the second request is made
        assert server.sent[shard] == header_bytes
        assert all(span for name, span in server.asked if name == shard)


def test_a_short_header_costs_one_request_and_no_more_than_its_first_bytes(served: tuple[Path, Server]) -> None:
    folder, server = served
    (folder / "model.safetensors.index.json").unlink()
    for shard in SHARDS:
        (folder / shard).unlink()
    write_shard(folder / "model.safetensors", ["a"])
    assert set(open_remote_release(server.address).tensors) == {"a"}
    assert server.sent["model.safetensors"] == FIRST_BYTES
    assert [name for name, _ in server.asked].count("model.safetensors") == 1


def test_a_config_alone_is_a_release(served: tuple[Path, Server]) -> None:
    folder, server = served
    for path in folder.iterdir():
        if path.name != "config.json":
            path.unlink()
    found = open_remote_release(server.address + "config.json")
    assert found.config["hidden_size"] == 8 and not found.has_weights and found.problems == ()
    (folder / "config.json").unlink()
    assert "holds no config.json" in refusal(server.address)


@pytest.mark.parametrize("form", ["{0}", "{1}", "{1}/config.json", "{1}?token=1"])
def test_addresses_in_several_forms(served: tuple[Path, Server], form: str) -> None:
    address = form.format(str(Path(served[1].address)), served[1].address.rstrip("/"))  # Path: one slash after the scheme
    assert is_address(address) and open_remote_release(address).name == "toy"


def test_addresses_that_are_none() -> None:
    assert not is_address("/models/http") and not is_address("org/name") and not is_address(Path("https"))
    for address in ("http://", "http://user:secret@host/x/", "ftp://host/x"):
        assert "not a usable web address" in refusal(address)


def test_a_hub_address_is_named_after_its_repository() -> None:
    assert remote_release._name("hub", "/org/model-7B/resolve/main/") == "model-7B"
    assert remote_release._name("hub", "/") == "hub" and remote_release._name("hub", "/a/%2e%2e/") == "hub"


def test_a_missing_shard_and_damaged_ones_are_problems_as_on_disk(served: tuple[Path, Server]) -> None:
    folder, server = served
    (folder / SHARDS[0]).unlink()
    content = (folder / SHARDS[1]).read_bytes()
    (folder / SHARDS[1]).write_bytes(content[:-5])
    found = open_remote_release(server.address)
    assert {"missing_file", "truncated"} <= kinds(found)
    details = {problem.kind: problem.detail for problem in found.problems}
    assert "not on the server" in details["missing_file"] and f"got {len(content) - 5} bytes" in details["truncated"]
    (folder / SHARDS[1]).write_bytes(content[:700])
    (folder / SHARDS[0]).write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n")
    assert {"lfs_pointer", "truncated"} <= kinds(open_remote_release(server.address))
    (folder / SHARDS[0]).write_bytes(b"")
    assert "empty_file" in kinds(open_remote_release(server.address))


def test_names_that_leave_the_folder_are_never_asked_for(served: tuple[Path, Server]) -> None:
    folder, server = served
    weight_map = {"a": "../secret.safetensors", "b": "http://other/x.safetensors", "c": SHARDS[0]}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    found = open_remote_release(server.address)
    assert "unsafe_path" in kinds(found) and not any("secret" in name for name, _ in server.asked)


@pytest.mark.parametrize("content", ["{", "[1]", '{"weight_map": 3}', "[" * 100_000])
def test_a_bad_index_is_a_problem_and_a_bad_config_an_error(served: tuple[Path, Server], content: str) -> None:
    folder, server = served
    (folder / "model.safetensors.index.json").write_text(content)
    assert "index_json" in kinds(open_remote_release(server.address))
    (folder / "config.json").write_text("[1]")
    assert f"{server.address}config.json is not" in refusal(server.address)


@pytest.mark.parametrize("told", [True, False])
def test_a_server_without_ranges_is_described_from_its_config_before_a_shard_is_sent(
    served: tuple[Path, Server], told: bool
) -> None:
    _, server = served
    started: list[int] = []

    def whole(handler: Any, name: str, place: Path) -> bool:
        if not name.endswith(".safetensors"):
            return False
        handler.send_response(200)
        if told:
            handler.send_header("Content-Length", str(1 << 40))
        handler.end_headers()
        try:
            for _ in range(1000):
                handler.wfile.write(bytes(1 << 16))
                started.append(1 << 16)
        except OSError:
            pass  # the client went away, as it must
        return True

    server.behave = whole
    found = open_remote_release(server.address, workers=1)
    (problem,) = found.problems
    assert problem.kind == "not_read" and problem.severity == "warning" and problem.file == SHARDS[0]
    assert "ignores Range" in problem.detail and "not read" in problem.detail
    assert found.config["hidden_size"] == 8 and found.generation_config and not found.has_weights and found.shards == {}
    with pytest.raises(DayZeroError, match="holds no weights"):
        found.require_weights()
    time.sleep(0.1)
    assert sum(started) < 32 << 20  # what sockets buffer, of a terabyte


def test_other_ranges_than_asked_for_are_refused(served: tuple[Path, Server]) -> None:
    _, server = served
    server.behave = lambda handler, name, place: (
        name in SHARDS and (handler.answer(name, 206, b"x" * 512, {"Content-Range": "bytes 512-1023/4096"}) or True)
    )
    assert "Content-Range" in refusal(server.address)


def test_answers_cut_short_are_asked_for_again_and_then_given_up(served: tuple[Path, Server]) -> None:
    folder, server = served
    cuts = {"left": 2}

    def cut(handler: Any, name: str, place: Path) -> bool:
        if name != SHARDS[0] or cuts["left"] == 0:
            return False
        cuts["left"] -= 1
        size = place.stat().st_size
        handler.answer(name, 206, place.read_bytes()[:100],
                       {"Content-Length": "512", "Content-Range": f"bytes 0-511/{size}"})  # fmt: skip
        return True

    server.behave = cut
    assert open_remote_release(server.address).tensors == open_release(folder).tensors and cuts["left"] == 0
    cuts["left"] = 1000
    assert SHARDS[0] in refusal(server.address) and cuts["left"] == 1000 - remote_release.ATTEMPTS


def test_errors_of_the_server_are_told(served: tuple[Path, Server]) -> None:
    _, server = served
    server.behave = lambda handler, name, place: name in SHARDS and (handler.answer(name, 403, b"") or True)
    assert "HTTP 403" in refusal(server.address, workers=1)
    assert sum(name == SHARDS[0] for name, _ in server.asked) == 1  # forbidden stays forbidden
    server.behave = lambda handler, name, place: name in SHARDS and (handler.answer(name, 503, b"") or True)
    server.asked.clear()
    assert "HTTP 503" in refusal(server.address, workers=1)
    assert sum(name == SHARDS[0] for name, _ in server.asked) == remote_release.ATTEMPTS


@pytest.mark.parametrize("drip", [False, True])
def test_silent_and_dripping_servers_end_in_time(served: tuple[Path, Server], drip: bool) -> None:
    _, server = served

    def slow(handler: Any, name: str, place: Path) -> bool:
        if drip:
            handler.send_response(200)
            handler.end_headers()
        for _ in range(100):
            time.sleep(0.02)
            if drip:
                try:
                    handler.wfile.write(b" ")
                except OSError:
                    break
        return True

    server.behave = slow
    started = time.monotonic()
    assert "no answer within 0.1 s" in refusal(server.address, timeout_s=0.1)
    assert time.monotonic() - started < 1.8  # three tries; one whole answer takes 2 s


def test_nothing_listens_there(served: tuple[Path, Server]) -> None:
    _, server = served
    server.close()
    assert "refused" in refusal(server.address)


def test_sizes_that_no_file_has_and_headers_past_the_limit(served: tuple[Path, Server]) -> None:
    _, server = served
    said = {"size": 10**25, "length": 100}

    def lie(handler: Any, name: str, place: Path) -> bool:
        if name not in SHARDS:
            return False
        start = said["length"].to_bytes(8, "little") + b"{" + b" " * 503
        handler.answer(name, 206, start, {"Content-Range": f"bytes 0-511/{said['size']}"})
        return True

    server.behave = lie
    assert "cannot be read" in refusal(server.address)
    said.update(size=1 << 40, length=1 << 35)
    assert f"a header of {1 << 35} bytes" in refusal(server.address)


def test_one_shard_without_ranges_leaves_no_half_of_the_weights(served: tuple[Path, Server]) -> None:
    _, server = served
    server.behave = lambda handler, name, place: (
        name == SHARDS[1] and (handler.answer(name, 200, place.read_bytes()) or True)
    )
    found = open_remote_release(server.address, workers=1)
    assert [problem.kind for problem in found.problems] == ["not_read"] and found.tensors == {}


def test_every_settings_file_is_read_as_in_the_folder(served: tuple[Path, Server]) -> None:
    """The settings file beside the config decides the bytes; without it the address gives other figures than the folder."""
    folder, server = served
    written = {"producer": {}, "quantization": {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["lm_head"]}}
    (folder / "hf_quant_config.json").write_text(json.dumps(written))
    local, remote = open_release(folder), open_remote_release(server.address)
    assert settings_beside(remote) == settings_beside(local) == written
    assert replace(remote, folder=local.folder) == local
    (folder / "hf_quant_config.json").write_text("{")
    assert "settings_json" in kinds(open_release(folder)) & kinds(open_remote_release(server.address))


def test_a_tokenizer_that_is_not_fetched_is_told(served: tuple[Path, Server]) -> None:
    folder, server = served
    (folder / "tokenizer.json").write_text(json.dumps({"padding": "x" * (1 << 16)}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"auto_map": {"AutoTokenizer": ["own.Tokenizer", None]}}))
    found = open_remote_release(server.address)
    (problem,) = found.problems
    assert (problem.kind, problem.severity, problem.file) == ("not_read", "warning", "tokenizer.json")
    assert server.sent["tokenizer.json"] == FIRST_BYTES
    assert tokenizer_needs_code(found) is None  # there is a tokenizer.json to read instead


def test_without_its_shards_a_server_holds_no_weights(served: tuple[Path, Server]) -> None:
    folder, server = served
    for shard in SHARDS:
        (folder / shard).unlink()
    found = open_remote_release(server.address)
    assert [(problem.kind, problem.severity) for problem in found.problems] == [("no_shards", "warning")]


def test_code_of_an_address_is_never_run_and_the_reason_is_true(served: tuple[Path, Server]) -> None:
    folder, server = served
    auto_map = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
    (folder / "config.json").write_text(json.dumps({"model_type": "toy", "auto_map": auto_map}))
    (folder / "own.py").write_text("raise SystemExit")
    with pytest.raises(DayZeroError, match="is not run") as caught:
        describe_in_sandbox(open_remote_release(server.address).folder)
    assert server.address.rstrip("/") in caught.value.got and "download" in caught.value.fix
    assert not any(name.endswith(".py") for name, _ in server.asked)
