"""What the tests of the command line share: running `dayzero` as a process, its files (workload, target) and its family."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import yaml

from tests.serving import ROOT, strict_json, wait_until

WORKLOAD = {
    "context_tokens": 128, "concurrency": 2, "input_tokens": 16, "output_tokens": 8, "prefill_chunk_tokens": 32, "soak_s": 2,
}  # fmt: skip
GIB = 2**30
TIMEOUT_S = 240.0  # of one command: a first use also compiles kernels, which takes a minute


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """A command that ended: its exit status and what it printed."""

    status: int
    stdout: str
    stderr: str

    @property
    def json(self) -> Any:
        """The one object on stdout."""
        assert self.stdout.count("\n") == 1, self.stdout
        return strict_json(self.stdout)

    @property
    def error(self) -> dict[str, str]:
        """The error of a command that met bad input."""
        assert self.status == 2, (self.status, self.stdout, self.stderr)
        error = self.json["error"]
        assert set(error) == {"what", "got", "wanted", "fix"} and all(isinstance(fact, str) for fact in error.values())
        assert error["what"] and "Traceback" not in self.stderr
        return error


def environment(folder: Path | None = None) -> dict[str, str]:
    """One thread: these models are small, and other processes run beside."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path, "COLUMNS": "120"}


def command(*arguments: Any) -> list[str]:
    return [sys.executable, "-m", "dayzero", *map(str, arguments)]


def dayzero(*arguments: Any, cwd: Path | None = None) -> Ended:
    """Run a command to its end."""
    done = subprocess.run(
        command(*arguments), capture_output=True, text=True, timeout=TIMEOUT_S, env=environment(), cwd=cwd, check=False
    )
    return Ended(status=done.returncode, stdout=done.stdout, stderr=done.stderr)


class Running:
    """A command while it runs, as the leader of its own group (as in a terminal). Nothing of it outlives the block."""

    def __init__(self, folder: Path, *arguments: Any) -> None:
        self.out, self.err = folder / "running.out", folder / "running.err"
        with self.out.open("w") as out, self.err.open("w") as err:
            self.process = subprocess.Popen(
                command(*arguments), stdout=out, stderr=err, env=environment(), start_new_session=True
            )
        self._seen: dict[int, psutil.Process] = {}

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *_: object) -> None:
        for process in [*self.family(), self.process]:
            process.kill()
        self.process.wait()

    def family(self) -> list[psutil.Process]:
        """Every process it has started that is still alive, those whose parent is gone included."""
        if self.process.poll() is None:
            found = psutil.Process(self.process.pid).children(recursive=True)
            self._seen |= {child.pid: child for child in found}
        return [child for child in self._seen.values() if is_alive(child)]

    def wait_for(self, condition: Callable[[], bool], what: str) -> None:
        def met() -> bool:
            self.family()
            assert self.process.poll() is None or condition(), f"it ended before {what}:\n{self.err.read_text()}"
            return condition()

        wait_until(met, within_s=TIMEOUT_S, what=f"{what} (stderr: {self.err})")

    def wait_for_line(self, text: str) -> None:
        self.wait_for(lambda: text in self.err.read_text(), repr(text))

    def signal(self, number: int) -> Ended:
        """Send a signal to the command alone and wait for its end."""
        self.family()
        self.process.send_signal(number)
        status = self.process.wait(timeout=60.0)
        return Ended(status=status, stdout=self.out.read_text(), stderr=self.err.read_text())


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def assert_nothing_left(running: Running, within_s: float = 5.0) -> None:
    wait_until(lambda: not running.family(), within_s=within_s, what="end of the server and the engine")


def make_workload(folder: Path, **fields: Any) -> Path:
    path = folder / f"workload-{len(list(folder.glob('workload-*')))}.yaml"
    path.write_text(yaml.safe_dump(WORKLOAD | fields))
    return path


def make_target(folder: Path, *, memory_bytes: int = 8 * GIB, num_cards: int = 1, name: str = "bench-top") -> Path:
    """A hardware file for this machine's processor: nothing is measured, so that a command costs seconds less."""
    path = folder / f"{name}.yaml"
    target = {
        "schema": "dayzero.target/1", "id": name, "vendor": "a test",
        "card": {"memory_bytes": memory_bytes, "memory_bytes_per_s": 1e10, "flops_per_s": {"float32": 1e11, "bfloat16": 1e11},
                 "native_dtypes": ["float32", "bfloat16"]},
        "node": {"num_cards": num_cards, "link_bytes_per_s": 1e9}, "software": {"torch_device": "cpu"},
    }  # fmt: skip
    path.write_text(yaml.safe_dump(target))
    return path


def edit_json(path: Path, **changes: Any) -> None:
    """Set keys of a JSON file; None removes one."""
    data = json.loads(path.read_text())
    for key, value in changes.items():
        if value is None:
            data.pop(key, None)
        else:
            data[key] = value
    path.write_text(json.dumps(data))


def modified(folder: Path) -> dict[str, int]:
    """Modification times of the records of a run."""
    return {file.name: file.stat().st_mtime_ns for file in sorted(folder.glob("*.json"))}


def files_in(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*")) if folder.exists() else []


def make_large_checkpoint(tiny: Path, folder: Path, *, vocab_size: int = 1_500_000) -> Path:
    """A copy of a tiny release whose embedding and head have this many rows: what is written takes seconds."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    shutil.copytree(tiny, folder)
    old = json.loads((folder / "config.json").read_text())["vocab_size"]
    edit_json(folder / "config.json", vocab_size=vocab_size)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    for shard in sorted(set(index["weight_map"].values())):
        with safe_open(folder / shard, "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
        large = {
            name: tensor.repeat(-(-vocab_size // old), 1)[:vocab_size].contiguous() if tensor.shape[0] == old else tensor
            for name, tensor in tensors.items()
        }
        save_file(large, folder / shard, metadata={"format": "pt"})
    return folder


def dayzero_here(*arguments: Any) -> Ended:
    """A command in this process, through the same way out: the same exit status and output, without seconds of imports."""
    from dayzero import cli, endings

    out, err, before, on_term = io.StringIO(), io.StringIO(), sys.argv, signal.getsignal(signal.SIGTERM)
    sys.argv = ["dayzero", *map(str, arguments)]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            endings.run(cli.app)
    except SystemExit as ended:
        assert isinstance(ended.code, int), ended.code
        return Ended(status=ended.code, stdout=out.getvalue(), stderr=err.getvalue())
    finally:
        sys.argv = before
        signal.signal(signal.SIGTERM, on_term)


def ask_all(release: Path, target: Path) -> dict[str, Ended]:
    """inspect, plan and convert of one release. Nothing may be left where convert was to write when it refused."""
    out = release.parent / "written" / "artifact"
    answers = {
        "inspect": dayzero_here("inspect", release, "--json"),
        "plan": dayzero_here("plan", release, "--target", target, "--json"),
        "convert": dayzero_here("convert", release, "--out", out, "--json"),
    }
    if answers["convert"].status != 0:
        assert files_in(out.parent) == []
    return answers


def told(ended: Ended) -> str:
    """Everything an error says, after a look at its shape."""
    error = ended.error
    assert error["what"] in ended.stderr and error["fix"] in ended.stderr, ended.stderr  # people read the same there
    return "\n".join(error.values())
