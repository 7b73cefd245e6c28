"""A release whose class is code of its own in, its `ModelDescription` out, made in a confined child process.

Only called after the user allowed the code to run. The child (`python -m dayzero.model.remote.sandbox`) has no network, a time
limit, a throw-away home, none of the user's environment, and can write to nothing but its work folder; what it could not be
kept from is in `problems` (see `model.confinement`). Its answer is data from a stranger: bounded, parsed strictly, and
compared with what this process reads itself. `problems` name every file that ran, with the hash that this process took.
Not done here: deciding whether code is needed (`model.resolve`), and running it for anything but a description.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dayzero.core.errors import DayZeroError
from dayzero.core.model import ModelDescription, Problem
from dayzero.core.records import from_dict, to_dict
from dayzero.model.release import Release, open_release
from dayzero.model.remote.code import code_hashes, refuse_remote, require_code

TIME_LIMIT_S = 120.0
MAX_ANSWER_BYTES = 256 << 20  # 0.4 kB a parameter: 0.4 MB where experts are fused, some ten MB where each is a module
MAX_TOLD = 100  # files and network attempts that are listed
LOG_TAIL_BYTES = 4000
# All that the child gets of this process's environment.
INHERITED = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "LC_CTYPE", "TZ")

_allowed_here = False


def allowed_here() -> bool:
    """Whether this process is the confined child, the only one in which a release's code may run."""
    return _allowed_here


def describe_in_sandbox(path: Path, *, time_limit_s: float = TIME_LIMIT_S, use_namespaces: bool = True) -> ModelDescription:
    """The description of the release at `path`. Raises DayZeroError with what the code did instead of giving one.

    use_namespaces: False leaves only the weaker guard, as on systems that have no namespaces.
    """
    refuse_remote(path)
    release = open_release(path)
    require_code(release)
    hashes = code_hashes(release.folder)
    with tempfile.TemporaryDirectory(prefix="dayzero-sandbox-") as work:
        answer = _run(Path(path).absolute(), Path(work), time_limit_s, use_namespaces)
    if code_hashes(release.folder) != hashes:
        raise DayZeroError("the release's code changed while it ran", got=f"other Python files in {release.folder}",
                           want="files that stay as they are", fix="run it again, on a folder nobody writes to")  # fmt: skip
    return _checked(answer, release, hashes)


@dataclass(kw_only=True, slots=True)
class _Answer:
    """What the child said, in its own words."""

    confinement: dict[str, Any] = field(default_factory=dict)
    imported: list[str] = field(default_factory=list)
    network: list[str] = field(default_factory=list)
    result: Any = None
    error: Any = None

    def take(self, line: bytes) -> bool:
        """One line of the child. Whether it was the last one that matters."""
        try:
            said = json.loads(line.decode("utf-8"), parse_constant=_refuse_constant)
        except (ValueError, RecursionError) as error:
            raise _nonsense(f"a line that is not JSON: {error}") from error
        if not isinstance(said, dict) or len(said) != 1:
            raise _nonsense("a line that is not an object with one key")
        ((key, value),) = said.items()
        if key == "confinement" and not self.confinement and isinstance(value, dict):
            self.confinement = value  # the first one was said before any code of the release ran
        elif key in ("imported", "network") and len(told := getattr(self, key)) < MAX_TOLD:
            told.append(_plain(value))
        elif key in ("result", "error"):
            setattr(self, key, value)
            return True
        return False


def _run(path: Path, work: Path, time_limit_s: float, use_namespaces: bool) -> _Answer:
    """Start the child and hear it out. Nothing of it is left afterwards."""
    reading, writing = os.pipe()
    command = [sys.executable, "-P", "-m", "dayzero.model.remote.sandbox", str(path), str(work), str(writing),
               str(int(2 * time_limit_s) + 1), str(int(use_namespaces))]  # fmt: skip
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, cwd=work, process_group=0,
        env=_environment(work), pass_fds=(writing,),
    )  # fmt: skip
    os.close(writing)
    try:
        assert process.stderr is not None
        answer, log = _Answer(), bytearray()
        ended = _listen(reading, process.stderr.fileno(), answer, log, time.monotonic() + time_limit_s)
        if not ended:
            raise DayZeroError("the release's own code ran too long", got=f"no description within {time_limit_s:g} s",
                               want="code that builds the model on the meta device in seconds",
                               fix=f"read the code in {path}; it was stopped")  # fmt: skip
        if answer.result is None and answer.error is None:
            code = process.wait(timeout=10)
            raise DayZeroError("the release's own code ended the process that described it",
                               got=f"{_exit_words(code)}; it said: {_plain(log.decode('utf-8', 'replace')) or 'nothing'}",
                               want="code that can be imported and built on the meta device",
                               fix=f"read the code in {path}")  # fmt: skip
        return answer
    finally:
        with suppress(ProcessLookupError):  # it is gone already
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        os.close(reading)
        assert process.stderr is not None
        process.stderr.close()


def _listen(channel: int, log_source: int, answer: _Answer, log: bytearray, deadline: float) -> bool:
    """Read until the child gave its answer or closed the channel. False when the deadline came first."""
    pending, total = bytearray(), 0
    with selectors.DefaultSelector() as selector:
        selector.register(channel, selectors.EVENT_READ)
        selector.register(log_source, selectors.EVENT_READ)
        while channel in selector.get_map():
            if (left := deadline - time.monotonic()) <= 0:
                return False
            for key, _ in selector.select(left):
                piece = os.read(key.fd, 1 << 16)
                if not piece:
                    selector.unregister(key.fd)
                elif key.fd == log_source:
                    log += piece
                    del log[:-LOG_TAIL_BYTES]
                else:
                    total += len(piece)
                    if total > MAX_ANSWER_BYTES:
                        raise _nonsense(f"more than {MAX_ANSWER_BYTES} bytes")
                    pending += piece
                    if b"\n" in piece:
                        *lines, rest = pending.split(b"\n")
                        pending = bytearray(rest)
                        if any(answer.take(bytes(line)) for line in lines):
                            return True
    return True


def _checked(answer: _Answer, release: Release, hashes: dict[str, str]) -> ModelDescription:
    """The description, believed only as far as it is a valid one and agrees with the release as read here."""
    if answer.result is None:
        error = answer.error if isinstance(answer.error, dict) else {"what": _plain(answer.error)}
        got = _plain(error.get("got", ""))
        if answer.network:
            got = f"the code tried to use the network, which it may not: {answer.network[0]}; then {got}"
        raise DayZeroError(_plain(error.get("what", "")) or "the release's own code failed", got=got,
                           want=_plain(error.get("wanted", "")), fix=_plain(error.get("fix", "")))  # fmt: skip
    if (odd := _odd_text(answer.result)) is not None:
        raise _nonsense(f"a text with control characters: {odd!r:.100}")
    found = from_dict(ModelDescription, answer.result, source="the description made by the release's own code")
    counted = ("checkpoint_bytes",) if release.has_weights else ()  # otherwise the child computes it
    for name in ("name", "source_hash", "has_weights", *counted):
        if getattr(found, name) != getattr(release, name):
            raise _nonsense(f"{name} = {getattr(found, name)!r:.100}, and it is {getattr(release, name)!r:.100}")
    said = tuple(problem for problem in found.problems if not problem.kind.startswith("remote_code_"))
    return replace(found, problems=(*said, *_account(answer, hashes)))


def _account(answer: _Answer, hashes: dict[str, str]) -> list[Problem]:
    """What ran, by file and hash, and what it could not be kept from."""

    def note(kind: str, detail: str, file: str | None = None) -> Problem:
        return Problem(kind=f"remote_code_{kind}", severity="warning", file=file, detail=detail)

    notes = [
        note("used", f"{file} of the release was run, as allowed, in a process without network: sha256 {hashes[file]}", file)
        for file in dict.fromkeys(answer.imported)
        if file in hashes
    ]
    held = answer.confinement
    if held.get("namespaces") is not True:
        notes.append(note("guard", "only the weaker guard, inside the interpreter, held the release's code from the network: "
                                   f"no namespaces ({_plain(held.get('reason', ''))})"))  # fmt: skip
    if held.get("read_only") is not True:
        notes.append(note("writable", "the release's code could write wherever this user can, the release included: no "
                                      f"read-only view of the file system ({_plain(held.get('reason', ''))})"))  # fmt: skip
    if answer.network:
        tried = ", ".join(dict.fromkeys(answer.network))
        notes.append(note("network", f"the release's code tried to use the network and was refused: {tried}"[:1000]))
    return notes


def _environment(work: Path) -> dict[str, str]:
    folder = str(work)
    return {name: os.environ[name] for name in INHERITED if name in os.environ} | {
        "HOME": folder, "TMPDIR": folder, "XDG_CACHE_HOME": folder, "HF_HOME": folder, "TORCHINDUCTOR_CACHE_DIR": folder,
        "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "",
    }  # fmt: skip


def _nonsense(got: str) -> DayZeroError:
    return DayZeroError("the process that ran the release's code gave no valid description", got=got,
                        want="the description of this release", fix="do not trust this release's code")  # fmt: skip


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is no number of JSON")


def _plain(text: object) -> str:
    """Text of the child made fit for a terminal and a report."""
    return "".join(letter if letter.isprintable() or letter == "\n" else "?" for letter in str(text))[:2000].strip()


def _odd_text(value: Any) -> str | None:
    """A string inside `value`, keys included, that could not be shown as it is."""
    if isinstance(value, str):
        return None if all(letter.isprintable() or letter == "\n" for letter in value) else value
    items = [*value, *value.values()] if isinstance(value, dict) else value if isinstance(value, list) else ()
    return next((odd for odd in map(_odd_text, items) if odd is not None), None)


def _exit_words(code: int) -> str:
    number = -code if code < 0 else code - 128
    if code < 0 or code > 128:
        with suppress(ValueError):
            return f"killed by {signal.Signals(number).name}"
    return f"exit status {code}"


# -- the child ----------------------------------------------------------------------------------------------------


def main(arguments: list[str]) -> None:
    """Confine this process, describe, answer, end at once. Does not return."""
    global _allowed_here
    from dayzero.model.remote.confinement import confine, refuse_network

    path, work, channel, cpu_s, use_namespaces = Path(arguments[0]), Path(arguments[1]), *map(int, arguments[2:])

    def tell(**said: Any) -> None:
        """All of a line in one piece, so that lines of threads do not mix."""
        line = memoryview(json.dumps(said).encode() + b"\n")
        while line:
            line = line[os.write(channel, line) :]

    confinement = confine(work, cpu_s=cpu_s, use_namespaces=bool(use_namespaces))
    tell(confinement={name: getattr(confinement, name) for name in ("namespaces", "read_only", "reason")})
    import dayzero.model.resolve  # noqa: F401  the trusted libraries, before anything is refused
    from dayzero.model.describe import describe_release

    release = open_release(path)
    _report_imports(release.folder, work, lambda name: tell(imported=name))
    refuse_network(confinement, lambda attempt: tell(network=attempt))
    _allowed_here = True
    try:
        tell(result=to_dict(describe_release(release, trust_remote_code=True, operators=True)))
    except DayZeroError as error:
        tell(error=error.as_dict()["error"])
    except BaseException as error:  # also SystemExit: a release's code may raise anything
        from dayzero.model.resolve import failure_of_code

        tell(error=failure_of_code(release, error).as_dict()["error"])
    os._exit(0)  # without the handlers that the code may have left for the end


def _report_imports(folder: Path, work: Path, tell: Callable[[str], None]) -> None:
    """Tell of each file of the release before its code is executed: what was told cannot be taken back."""
    copies = work / "modules" / "transformers_modules"  # where transformers copies code: <name of the folder>/<hash>/

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "exec" and (file := getattr(arguments[0], "co_filename", None)):
            if Path(file).is_relative_to(copies):
                tell("/".join(Path(file).relative_to(copies).parts[2:]))
            elif Path(file).is_relative_to(folder):
                tell(Path(file).relative_to(folder).as_posix())

    sys.addaudithook(hook)


if __name__ == "__main__":
    # Not this module's own `main`: `allowed_here` must be true for those who import it under its name.
    from dayzero.model.remote.sandbox import main as child

    child(sys.argv[1:])
