"""Compiles the CPU kernels on first use and loads them once per process.

In: the C++ sources beside this file, a compiler, a cache folder. Out: a `KernelBuild` that says whether the operators of
`torch.ops.dayzero` exist, which instruction set they use, or why there are none. It does not choose kernels for an
operator site and reads no environment variable: callers pass what they want to override.

The library is cached under a key of sources (this file among them), flags, compiler and torch version. It is written
beside its place and renamed, under a file lock, so that two processes compile once and neither sees half a file.
"""

import contextlib
import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from dayzero.core.cachedir import cache_folder as shared_cache_folder

_FOLDER = Path(__file__).parent
_OPERATOR_SOURCES = ("state.cpp", "linear.cpp", "attention.cpp", "quantize.cpp", "quantized_linear.cpp")
_COMMON_FLAGS = ("-std=c++20", "-O3", "-fPIC", "-fvisibility=hidden", "-w")
_X86_FLAGS = {
    "avx2": "-mavx2 -mfma -mf16c",
    "avx512": "-mavx512f -mavx512bw -mavx512vl -mavx512dq -mfma -mf16c",
    "avx512_bf16": "-mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512bf16 -mfma -mf16c",
    "amx_bf16": "-mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512bf16 -mamx-tile -mamx-bf16 -mfma -mf16c",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelBuild:
    """Whether the compiled operators can be used in this process.

    `isa` is the instruction set in use ("" when unavailable); `reason` says why there are none, or which instruction sets
    the compiler could not produce ("" when there is nothing to say).
    """

    available: bool
    isa: str
    reason: str
    path: Path | None = None


_lock = threading.Lock()
_loaded: KernelBuild | None = None


def load(isa: str | None = None, *, cache_folder: Path | None = None, compiler: str | None = None) -> KernelBuild:
    """Make `torch.ops.dayzero` usable; the first call compiles (about a minute) unless the cache holds the library.

    `isa` forces an instruction set the machine can run (the best one otherwise). A failure is a result, not an exception,
    and is not remembered: a later call with a compiler succeeds.
    """
    global _loaded
    with _lock:
        if _loaded is None:
            path, reason = _find_or_compile(cache_folder, compiler)
            if path is None:
                return KernelBuild(available=False, isa="", reason=reason)
            try:
                torch.ops.load_library(str(path))
            except (OSError, RuntimeError) as error:
                return KernelBuild(available=False, isa="", reason=f"cannot load {path}: {error}")
            _register_fakes()
            _loaded = KernelBuild(available=True, isa=torch.ops.dayzero.isa(), reason=reason, path=path)
        if isa is not None:
            usable = torch.ops.dayzero.available_isas()
            if isa not in usable:
                return replace(
                    _loaded,
                    available=False,
                    isa="",
                    reason=f"instruction set {isa!r} is not usable here; usable: {', '.join(usable)}",
                )
            torch.ops.dayzero.set_isa(isa)
        return replace(_loaded, isa=torch.ops.dayzero.isa())


def _register_fakes() -> None:
    """Shapes and dtypes of the tensor operators, for meta tensors and `torch.export`."""

    @torch.library.register_fake("dayzero::linear")
    @torch.library.register_fake("dayzero::linear_at")
    def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, place: object) -> torch.Tensor:
        return x.new_empty(*x.shape[:-1], weight.shape[0])

    @torch.library.register_fake("dayzero::linears_at")
    def _linears(x: torch.Tensor, weights: list[torch.Tensor], biases: list[torch.Tensor | None], site: torch.Tensor) -> object:
        return [x.new_empty(*x.shape[:-1], weight.shape[0]) for weight in weights]

    @torch.library.register_fake("dayzero::quantized_linear_at")
    def _quantized_linear(x: torch.Tensor, codes: torch.Tensor, *rest: object) -> torch.Tensor:
        return x.new_empty(*x.shape[:-1], codes.shape[0])

    @torch.library.register_fake("dayzero::quantized_linears_at")
    def _quantized_linears(x: torch.Tensor, codes: list[torch.Tensor], *rest: object) -> object:
        return [x.new_empty(*x.shape[:-1], one.shape[0]) for one in codes]

    @torch.library.register_fake("dayzero::dequantized")
    def _dequantized(codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, columns: int, code: int,
                     block_rows: int, block_columns: int, dtype: torch.dtype) -> torch.Tensor:  # fmt: skip
        return codes.new_empty(codes.shape[0], columns, dtype=dtype)

    @torch.library.register_fake("dayzero::paged_attention")
    @torch.library.register_fake("dayzero::paged_attention_at")
    def _attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: object) -> torch.Tensor:
        return q.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[3])

    @torch.library.register_fake("dayzero::block_range")
    def _block_range(x: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        made = x.new_empty(x.shape[0], -(-x.shape[1] // width), dtype=torch.float32)
        return made, torch.empty_like(made)

    @torch.library.register_fake("dayzero::integer_codes")
    def _integer_codes(
        x: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, width: int, bits: int, packed: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        columns = -(-x.shape[1] * bits // 32) if packed else x.shape[1]
        made = x.new_empty(x.shape[0], columns, dtype=torch.int32 if packed else torch.int8)
        return made, x.new_empty(5, dtype=torch.float64)

    @torch.library.register_fake("dayzero::rms_norm")
    def _rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float, weight_offset: float) -> torch.Tensor:
        return x.new_empty(x.shape)


def find_compiler(wanted: str | None = None) -> tuple[str | None, str]:
    """(path, reason): the C++ compiler to use, or None and why there is none."""
    for name in [wanted] if wanted else ["g++", "c++", "clang++"]:
        if path := shutil.which(name):
            return path, ""
    return None, f"no C++ compiler: {wanted or 'g++, c++ and clang++'} not found on PATH"


def _find_or_compile(cache_folder: Path | None, compiler: str | None) -> tuple[Path | None, str]:
    path, reason = find_compiler(compiler)
    if path is None:
        return None, reason
    version = subprocess.run([path, "--version"], capture_output=True, text=True).stdout.partition("\n")[0]
    try:
        folder = cache_folder or shared_cache_folder("kernels")
        folder.mkdir(parents=True, exist_ok=True)
        library = folder / f"dayzero_cpu-{_key(version)}.so"
        note = library.with_suffix(".txt")
        if not library.exists():
            with _exclusive(folder / f"{library.stem}.lock"):
                if not library.exists():
                    reason = _compile(path, library)
                    note.write_text(reason)
        return library, note.read_text() if note.exists() else ""
    except (OSError, ImportError, subprocess.SubprocessError) as error:  # ImportError: torch's build helpers want setuptools
        return None, f"compiling the CPU kernels failed: {error}"
    except _CompileError as error:
        return None, str(error)


def _key(compiler_version: str) -> str:
    digest = hashlib.sha256()
    for part in (
        compiler_version,
        torch.__version__,
        str(torch._C._GLIBCXX_USE_CXX11_ABI),
        platform.machine(),
        repr(_COMMON_FLAGS),
        repr(_X86_FLAGS),
        _FOLDER.joinpath("build.py").read_text(),
    ):
        digest.update(part.encode() + b"\0")
    for source in sorted([*_FOLDER.glob("*.cpp"), *_FOLDER.glob("*.h")]):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return digest.hexdigest()[:20]


def _torch_flags() -> list[str]:
    from torch.utils.cpp_extension import include_paths  # a slow import, needed only to compile

    abi = int(torch._C._GLIBCXX_USE_CXX11_ABI)
    return [f"-D_GLIBCXX_USE_CXX11_ABI={abi}", "-fopenmp", *(flag for path in include_paths() for flag in ("-isystem", path))]


class _CompileError(Exception):
    pass


def _compile(compiler: str, library: Path) -> str:
    """Write `library`; returns which instruction sets had to be left out, or "". Raises `_CompileError`."""
    isas = {"generic": "-ffp-contract=off"} | (_X86_FLAGS if platform.machine() in ("x86_64", "AMD64") else {})
    with tempfile.TemporaryDirectory(dir=library.parent) as work:
        commands = {
            name: [compiler, *_COMMON_FLAGS, *_torch_flags(), "-c", str(_FOLDER / name), "-o", f"{work}/{name}.o"]
            for name in _OPERATOR_SOURCES
        }
        for name, flags in isas.items():
            commands[name] = [
                compiler,
                *_COMMON_FLAGS,
                *flags.split(),
                f"-DDAYZERO_ISA={name}",
                "-c",
                str(_FOLDER / "isa.cpp"),
                "-o",
                f"{work}/{name}.o",
            ]
        with ThreadPoolExecutor(max(1, min(len(commands), os.cpu_count() or 1))) as pool:
            failures = {name: error for name, error in zip(commands, pool.map(_run, commands.values()), strict=True) if error}
        for name in (*_OPERATOR_SOURCES, "generic"):
            if name in failures:
                raise _CompileError(f"compiling {name} failed: {failures[name]}")
        torch_libraries = Path(torch.__file__).parent / "lib"
        objects = [f"{work}/{name}.o" for name in commands if name not in failures]
        linked = f"{work}/library.so"
        error = _run([compiler, "-shared", "-fopenmp", *objects, "-o", linked, f"-L{torch_libraries}", "-ltorch_cpu", "-lc10"])
        if error:
            raise _CompileError(f"linking the CPU kernels failed: {error}")
        os.replace(linked, library)
    return f"not compiled: {', '.join(failures)} ({next(iter(failures.values()))})" if failures else ""


def _run(command: list[str]) -> str:
    """Empty on success, else the first error lines."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode == 0:
        return ""
    lines = [line for line in done.stderr.splitlines() if "error" in line.lower()] or done.stderr.splitlines()
    return "; ".join(lines[:3]) or f"{command[0]} ended with status {done.returncode}"


@contextlib.contextmanager
def _exclusive(path: Path) -> Iterator[None]:
    with open(path, "w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
