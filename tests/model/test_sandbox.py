"""Code of a release: never run unless allowed, and then confined, bounded, named by file and hash, and believed little. CF-09."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from dayzero.core.artifact import ArtifactLayout
from dayzero.core.errors import DayZeroError
from dayzero.core.model import ModelDescription
from dayzero.core.plan import Layout
from dayzero.core.records import read_record, to_dict
from dayzero.model.describe import describe
from dayzero.model.release import open_release
from dayzero.model.remote import sandbox
from dayzero.model.remote.code import code_hashes, model_code, tokenizer_needs_code
from dayzero.model.remote.sandbox import describe_in_sandbox
from dayzero.model.resolve import remote_class, resolve

CONFIG: dict[str, Any] = {
    "model_type": "toy_new",
    "architectures": ["ToyForCausalLM"],
    "auto_map": {"AutoConfig": "configuration_toy.ToyConfig", "AutoModelForCausalLM": "modeling_toy.ToyForCausalLM"},
    "transformers_version": "4.99",
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 64, "dtype": "bfloat16",
}  # fmt: skip
FILES = {
    "configuration_toy.py": "from transformers import LlamaConfig\nclass ToyConfig(LlamaConfig):\n    model_type = 'toy_new'\n",
    "helper_toy.py": "WIDTH = 1\n",
    "never_imported.py": "raise RuntimeError('imported')\n",
    "modeling_toy.py": (
        "from transformers import LlamaForCausalLM\nfrom .configuration_toy import ToyConfig\nfrom .helper_toy import WIDTH\n"
        "class ToyForCausalLM(LlamaForCausalLM):\n    config_class = ToyConfig\n"
    ),
}
RUN_FILES = {"configuration_toy.py", "helper_toy.py", "modeling_toy.py"}


def make_release(folder: Path, *, first: str = "", last: str = "", **config: Any) -> Path:
    """A release of an unknown model_type with code of its own; `first` and `last` stand around its modelling file."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | config))
    for name, text in FILES.items():
        (folder / name).write_text(text)
    (folder / "modeling_toy.py").write_text(first + FILES["modeling_toy.py"] + last)
    return folder


CONFINE = """
import json, sys
from pathlib import Path
from dayzero.model.remote.confinement import confine
confinement = confine(Path(sys.argv[1]), cpu_s=60, use_namespaces=True)
"""


def run_confined(work: Path, code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    work.mkdir(exist_ok=True)
    return subprocess.run([sys.executable, "-c", CONFINE + code, str(work), *arguments], capture_output=True, text=True,
                          timeout=60)  # fmt: skip


@pytest.fixture(scope="module")
def namespaces(tmp_path_factory: pytest.TempPathFactory) -> bool:
    """Whether this system allows them: in some containers only the weaker guard can be had, and said."""
    done = run_confined(tmp_path_factory.mktemp("asked"), "print(confinement.namespaces)")
    assert done.returncode == 0, done.stderr
    return done.stdout.strip() == "True"


# --- without permission -----------------------------------------------------------------------------------------------------


def test_code_that_is_not_allowed_never_runs_and_is_named(tmp_path: Path) -> None:
    folder = make_release(tmp_path / "toy", first=f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    (folder / "configuration_toy.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    found = describe(folder)
    (told,) = [problem for problem in found.problems if problem.kind == "unknown_model_type"]
    assert found.provisional and "class ToyForCausalLM in modeling_toy.py" in told.detail
    assert "class ToyConfig in configuration_toy.py" in told.detail and "--trust-remote-code" in told.detail
    # Nor does it run in this process when it is allowed: converting has no sandbox.
    assert remote_class(open_release(folder)) is not None
    with pytest.raises(DayZeroError, match="runs only to describe"):
        resolve(open_release(folder), trust_remote_code=True)
    assert not (tmp_path / "ran").exists()


def test_a_type_that_transformers_has_needs_no_code(tmp_path: Path) -> None:
    folder = make_release(tmp_path / "toy", first="raise SystemExit\n", model_type="llama")
    assert remote_class(open_release(folder)) is None
    assert model_code({"auto_map": {"AutoConfig": "a.B"}}) is None and model_code({"auto_map": "x"}) is None
    references = model_code({"auto_map": {"AutoConfig": "org/name--conf.C", "AutoModel": ["sub/model.M", None]}})
    assert references is not None
    assert [str(one) for one in references] == ["class C in conf.py of org/name", "class M in sub/model.py"]


# --- confinement, without torch ---------------------------------------------------------------------------------------------

PROBE = """
import ctypes, os, socket, subprocess
def attempt(action):
    try:
        action()
    except OSError as error:
        return type(error).__name__ + " " + str(error.errno)
    return "done"
libc = ctypes.CDLL(None, use_errno=True)
def check(result):
    if result != 0:
        raise OSError(ctypes.get_errno(), "refused")
port, release = int(sys.argv[2]), Path(sys.argv[3])
attributes = (ctypes.c_uint64 * 4)(0, 1, 0, 0)
found = {
    "connect": attempt(lambda: socket.create_connection(("127.0.0.1", port), timeout=2)),
    "write": attempt(lambda: (release / "config.json").write_text("")),
    "create": attempt(lambda: (release / "new").write_text("")),
    "remount": attempt(lambda: check(libc.syscall(442, -100, b"/", 0x8000, ctypes.byref(attributes), ctypes.c_size_t(32)))),
    "work": attempt(lambda: Path("scrap").write_text("x")),
    "inside": os.getcwd() == sys.argv[1],
    "big": attempt(lambda: open("big", "wb").truncate(1 << 40)),
    "visible": attempt(lambda: os.kill(int(sys.argv[4]), 0)),
}
subprocess.Popen(["sleep", sys.argv[5]], start_new_session=True)
print(json.dumps(found))
"""


def test_namespaces_take_network_files_and_processes_away(tmp_path: Path, namespaces: bool) -> None:
    if not namespaces:
        pytest.skip("this system refuses namespaces")
    release, seconds = make_release(tmp_path / "toy"), f"{10**6 + os.getpid()}"
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        socket.create_connection(("127.0.0.1", port)).close()  # from here it can be reached
        done = run_confined(tmp_path / "work", PROBE, str(port), str(release), str(os.getpid()), seconds)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["connect"].startswith(("OSError 101", "ConnectionRefusedError")), found  # its own loopback is down, and empty
    assert found["write"] == found["create"] == "OSError 30" and found["remount"] == "PermissionError 1", found
    assert found["work"] == "done" and found["inside"] and found["big"].startswith("OSError"), found
    assert found["visible"] == "ProcessLookupError 3", found
    assert json.loads((release / "config.json").read_text()) == CONFIG and list((tmp_path / "work").iterdir()) == []
    assert not [one for one in psutil.process_iter(["cmdline"]) if seconds in (one.info["cmdline"] or [])]  # nobody got away


def test_the_end_of_a_confined_process_is_told(tmp_path: Path) -> None:
    assert run_confined(tmp_path / "a", "sys.exit(7)").returncode == 7
    killed = run_confined(tmp_path / "b", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)").returncode
    assert sandbox._exit_words(killed) == "killed by SIGKILL"
    hungry = run_confined(tmp_path / "c", "bytearray(40 << 30)")
    assert hungry.returncode == 1 and "MemoryError" in hungry.stderr


# --- described by its own code ----------------------------------------------------------------------------------------------

# What the code finds is told through the name of its class, the one text of its own that a description holds.
SPY = """
import os, socket
def _tried(action):
    try:
        action()
    except Exception as error:
        return type(error).__name__
    return "done"
_found = {
    "secret": os.environ.get("SECRET_TOKEN"),
    "home": os.environ["HOME"] == os.getcwd() == os.environ["HF_HOME"],
    "offline": os.environ["HF_HUB_OFFLINE"],
    "network": _tried(lambda: socket.create_connection(("127.0.0.1", 9), timeout=1)),
    "write": _tried(lambda: open(RELEASE + "/new", "w")),
}
ToyForCausalLM.__name__ = " ".join(f"{key}={value}" for key, value in _found.items())
import atexit
atexit.register(lambda: os.kill(os.getpid(), 9))
"""


@pytest.fixture
def left_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Neither a process nor a folder of the sandbox is there after the test."""
    (tmp_path / "scratch").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "scratch"))
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    yield
    assert {child.pid for child in psutil.Process().children(recursive=True)} <= before
    assert not list((tmp_path / "scratch").iterdir())


def test_a_description_by_the_releases_own_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, namespaces: bool, left_over: None
) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "hunter2")
    folder = make_release(tmp_path / "toy", last=f"RELEASE = {str(tmp_path / 'toy')!r}\n" + SPY)
    found = describe_in_sandbox(folder)
    same = LlamaForCausalLM(
        LlamaConfig(**{key: value for key, value in CONFIG.items() if key.endswith(("size", "heads", "layers"))})
    )
    assert found.total_parameters == sum(item.numel() for item in same.parameters())
    assert not found.provisional and found.model_type == "toy_new" and found.dimensions.num_key_value_heads == 2
    assert found.cache_bytes_per_token == 3 * 2 * 2 * 8 * 2  # layers, keys and values, heads, dims, bytes
    written = "OSError" if namespaces else "done"
    assert found.architecture == f"secret=None home=True offline=1 network=PermissionError write={written}"
    used = {one.file: one.detail for one in found.problems if one.kind == "remote_code_used"}
    assert set(used) == RUN_FILES
    for file, detail in used.items():
        assert hashlib.sha256((folder / file).read_bytes()).hexdigest() in detail
    (network,) = [one for one in found.problems if one.kind == "remote_code_network"]
    assert "socket.getaddrinfo '127.0.0.1'" in network.detail
    assert bool({one.kind for one in found.problems} & {"remote_code_guard", "remote_code_writable"}) != namespaces
    assert not (folder / "__pycache__").exists() and (folder / "new").exists() != namespaces


def test_only_the_weaker_guard_is_said_and_network_is_a_clear_end(tmp_path: Path, left_over: None) -> None:
    code = (
        "import subprocess, urllib.request\n"
        "try:\n    subprocess.run(['true'])\nexcept PermissionError:\n    urllib.request.urlopen('http://model.example/weights')\n"
    )
    with pytest.raises(DayZeroError) as caught:
        describe_in_sandbox(make_release(tmp_path / "toy", last=code), use_namespaces=False)
    assert "tried to use the network" in caught.value.got and "model.example" in caught.value.got
    assert "modeling_toy.py line" in caught.value.got


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (
            "from transformers.models.gone import Thing\n",
            ["modeling_toy.py line 1", "ModuleNotFoundError", "4.99", "transformers 5"],
        ),
        ("import os\nos.abort()\n", ["ended the process", "SIGABRT"]),
    ],
    ids=["import", "crash"],
)
def test_code_that_fails_is_told_with_its_place(tmp_path: Path, code: str, words: list[str], left_over: None) -> None:
    with pytest.raises(DayZeroError) as caught:
        describe_in_sandbox(make_release(tmp_path / "toy", first=code))
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_code_that_hangs_is_stopped_at_the_time_limit(tmp_path: Path, left_over: None) -> None:
    started = time.monotonic()
    with pytest.raises(DayZeroError, match="ran too long") as caught:
        describe_in_sandbox(make_release(tmp_path / "toy", first="while True: pass\n"), time_limit_s=9)
    assert "within 9 s" in caught.value.got and time.monotonic() - started < 25


def test_code_that_is_not_all_there_is_refused(tmp_path: Path) -> None:
    folder = make_release(tmp_path / "toy")
    (folder / "modeling_toy.py").unlink()
    with pytest.raises(DayZeroError, match="not complete") as caught:
        describe_in_sandbox(folder)
    assert "class ToyForCausalLM in modeling_toy.py" in caught.value.got


# --- what the child says is data of a stranger ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ModelDescription]:
    folder = make_release(tmp_path_factory.mktemp("honest") / "toy")
    return folder, describe(folder)


FORGED: dict[str, dict[str, Any]] = {
    "another release": {"source_hash": "0" * 64},
    "weights that are not there": {"has_weights": True},
    "control characters": {"architecture": "Toy\x1b[2J"},
    "an unknown field": {"trusted": True},
    "a wrong type": {"total_parameters": "many"},
    "layers that do not add up": {"layer_kinds": []},
}


@pytest.mark.parametrize("case", FORGED)
def test_a_forged_description_is_refused(honest: tuple[Path, ModelDescription], case: str) -> None:
    folder, description = honest
    answer = sandbox._Answer(result=to_dict(description) | FORGED[case])
    with pytest.raises(DayZeroError):
        sandbox._checked(answer, open_release(folder), code_hashes(folder))


def test_what_ran_is_told_by_the_parent_not_by_the_child(honest: tuple[Path, ModelDescription]) -> None:
    folder, description = honest
    claim = {"kind": "remote_code_used", "severity": "warning", "detail": "harmless.py", "file": None, "tensor": None}
    answer = sandbox._Answer(imported=["modeling_toy.py", "no_such.py", "modeling_toy.py"], network=["socket.connect 'x'"],
                             result=to_dict(description) | {"problems": [claim]})  # fmt: skip
    found = sandbox._checked(answer, open_release(folder), code_hashes(folder))
    assert [(one.kind, one.file) for one in found.problems] == [
        ("remote_code_used", "modeling_toy.py"), ("remote_code_guard", None), ("remote_code_writable", None),
        ("remote_code_network", None),
    ]  # fmt: skip


@pytest.mark.parametrize("line", [b"\xff", b"[1]", b"{}", b'{"result": NaN}', b'{"a": 1, "b": 2}', b"[" * 100_000])
def test_lines_that_are_no_answer_are_refused(line: bytes) -> None:
    with pytest.raises(DayZeroError, match="no valid description"):
        sandbox._Answer().take(line)


def test_the_first_word_on_confinement_stands_and_lists_are_bounded() -> None:
    answer = sandbox._Answer()
    assert not answer.take(b'{"confinement": {"namespaces": false}}') and not answer.take(
        b'{"confinement": {"namespaces": true}}'
    )
    assert answer.confinement == {"namespaces": False}
    for _ in range(1000):
        answer.take(b'{"network": "a\\u001bb"}')
    assert answer.network == ["a?b"] * sandbox.MAX_TOLD and answer.take(b'{"error": 3}')


def test_an_endless_answer_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "MAX_ANSWER_BYTES", 1 << 20)
    reading, writing = os.pipe()
    writer = subprocess.Popen(["cat", "/dev/zero"], stdout=writing)
    os.close(writing)
    silent, other = os.pipe()
    try:
        with pytest.raises(DayZeroError, match="no valid description"):
            sandbox._listen(reading, silent, sandbox._Answer(), bytearray(), time.monotonic() + 30)
    finally:
        writer.kill()
        writer.wait()
        for descriptor in (reading, silent, other):
            os.close(descriptor)


# --- CF-09: tokenizers that are code ----------------------------------------------------------------------------------------


def make_tokenizer_release(folder: Path, marker: Path) -> Path:
    """Weights of a known type, and a tokenizer of a vocabulary file and Python code that leaves a mark when it runs."""
    config = LlamaConfig(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
                         num_key_value_heads=1, vocab_size=260)  # fmt: skip
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    for name in ("tokenization_x.py", "helper_x.py"):
        (folder / name).write_text(f"open({str(marker)!r}, 'w')\nclass XTokenizer: pass\n")
    lines = (base64.b64encode(bytes([value])) + f" {value}\n".encode() for value in range(256))
    (folder / "tiktoken.model").write_bytes(b"".join(lines))
    (folder / "LICENSE.txt").write_text("free")
    added = {str(256 + place): {"content": text, "special": True} for place, text in enumerate(("<think>", "</think>"))}
    settings = {"tokenizer_class": "XTokenizer", "added_tokens_decoder": added,
                "auto_map": {"AutoTokenizer": ["tokenization_x.XTokenizer", None]}}  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def test_cf_09_a_tokenizer_that_is_code_is_named_and_not_run(tmp_path: Path) -> None:
    folder = make_tokenizer_release(tmp_path / "toy", tmp_path / "ran")
    problem = tokenizer_needs_code(open_release(folder))
    assert problem is not None and "class XTokenizer in tokenization_x.py" in problem.detail
    from dayzero.serve.text import TextCodec

    with pytest.raises(DayZeroError):
        TextCodec.load(folder)
    describe(folder)
    assert not (tmp_path / "ran").exists()
    (folder / "tokenization_x.py").unlink()
    missing = tokenizer_needs_code(open_release(folder))
    assert missing is not None and "does not have" in missing.detail
    (folder / "tokenizer.json").write_text("{}")
    assert tokenizer_needs_code(open_release(folder)) is None
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer"}')
    assert tokenizer_needs_code(open_release(folder)) is None


def test_cf_09_conversion_carries_every_file_and_runs_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from dayzero.weights.convert import convert
    from dayzero.weights.proof.verify import verify
    from dayzero.weights.to_hf import export

    folder = make_tokenizer_release(tmp_path / "toy", tmp_path / "ran")
    others = {path.name for path in folder.iterdir()} - {"model.safetensors"}
    assert {"tiktoken.model", "tokenization_x.py", "helper_x.py", "tokenizer_config.json", "LICENSE.txt"} <= others
    out = tmp_path / "artifact"
    convert(folder, describe(folder), Layout(), out)
    recorded = {one.file: one for one in read_record(ArtifactLayout, out / "layout.json").release_files}
    export(folder, tmp_path / "hf")
    export(out, tmp_path / "back")
    for name in others:
        content = (folder / name).read_bytes()
        for place in (out / "release", tmp_path / "hf", tmp_path / "back"):
            assert (place / name).read_bytes() == content, (place, name)
        assert recorded[f"release/{name}"].num_bytes == len(content) and recorded[f"release/{name}"].checksum
    assert not verify(out)
    monkeypatch.setattr("dayzero.weights.convert.MAX_RELEASE_FILE_BYTES", 1000)
    (folder / "assets").mkdir()
    reports = convert(folder, describe(folder), Layout(), tmp_path / "small"), export(folder, tmp_path / "small-hf")
    for report in reports:
        told = {one.file for one in report.problems if one.kind == "file_not_copied"}
        assert told == {"tiktoken.model", "assets"}, told
    (out / "release" / "tokenization_x.py").write_text("other = 1\n")
    assert [problem.file for problem in verify(out)] == ["release/tokenization_x.py"]
    assert not (tmp_path / "ran").exists()
