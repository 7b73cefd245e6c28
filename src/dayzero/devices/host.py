"""Facts about the machine this process runs on, without torch: memory that may really be used, instruction set, compiler.

Goes in: /proc, the control groups, the PATH. Comes out: plain numbers and strings. Deliberately not done: anything that
takes time (rates are measured by `devices.measure`) or needs a driver.
"""

import os
import platform
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

CGROUP_ROOT = Path("/sys/fs/cgroup")
# Groups without a limit report the largest page-aligned integer (v1) or "max" (v2); nothing real is as large.
NO_LIMIT_BYTES = 2**60

# What compiled kernels choose by, in the order they are listed in notes and reports.
X86_FEATURES = ("avx2", "fma", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "avx_vnni", "amx_bf16", "amx_int8")
ARM_FEATURES = ("asimd", "asimdhp", "asimddp", "bf16", "i8mm", "sve", "sve2")
BF16_FEATURES = frozenset({"avx512_bf16", "amx_bf16", "bf16"})


@dataclass(frozen=True, kw_only=True, slots=True)
class HostMemory:
    """Bytes this process may use: `total` is the smaller of machine and container limit, `available` is free now."""

    total_bytes: int
    available_bytes: int
    limited_by: str  # "machine" or the control group's path


def host_memory() -> HostMemory:
    """Total and available memory. A container's limit (control groups v1 and v2, every ancestor) counts when smaller."""
    import psutil

    machine = psutil.virtual_memory()
    total, available, limited_by = int(machine.total), int(machine.available), "machine"
    for folder in _memory_groups():
        limit = _read_number(folder / "memory.max", folder / "memory.limit_in_bytes")
        if limit is None or limit >= NO_LIMIT_BYTES:
            continue
        used = _read_number(folder / "memory.current", folder / "memory.usage_in_bytes") or 0
        free = limit - max(0, used - _reclaimable_bytes(folder))
        if limit < total:
            total, limited_by = limit, str(folder)
        available = min(available, max(0, free))
    return HostMemory(total_bytes=total, available_bytes=min(available, total), limited_by=limited_by)


def _memory_groups(membership: Path = Path("/proc/self/cgroup"), root: Path = CGROUP_ROOT) -> list[Path]:
    """Folders of the control groups that bound this process, innermost first; [] where there are none."""
    folders: list[Path] = []
    lines = membership.read_text().splitlines() if membership.exists() else []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        base = root / "memory" if controllers else root
        group = base / path.lstrip("/")
        # Inside a container the path may not exist under the mounted root: the root itself is then the container's group.
        folders += [folder for folder in (group, *group.parents) if folder.is_relative_to(base) and folder.is_dir()]
    return folders


def _read_number(*candidates: Path) -> int | None:
    for path in candidates:
        if path.exists():
            text = path.read_text().strip()
            return None if text == "max" else int(text)
    return None


def _reclaimable_bytes(folder: Path) -> int:
    """File pages the kernel gives back under pressure: they count as used but do not stand in the way."""
    stat = folder / "memory.stat"
    if not stat.exists():
        return 0
    fields = dict(line.split(None, 1) for line in stat.read_text().splitlines() if " " in line)
    return int(fields.get("inactive_file", fields.get("total_inactive_file", "0")))


def cpu_features(cpuinfo: Path = Path("/proc/cpuinfo")) -> tuple[str, ...]:
    """Instruction-set extensions that matter to kernels, in a fixed order; () where the system does not list them."""
    flags: set[str] = set()
    if cpuinfo.exists():
        for line in cpuinfo.read_text(errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() in ("flags", "Features"):
                flags = set(value.split())
                break
    return tuple(name for name in (*X86_FEATURES, *ARM_FEATURES) if name in flags)


def instruction_set() -> str:
    """One line for reports: `x86_64 avx2 fma avx512f ...`."""
    return " ".join([platform.machine() or "unknown", *cpu_features()])


def num_threads() -> int:
    """Processors this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def compiler() -> str | None:
    """The first line of the C++ compiler's version, or None when there is none on the PATH (`CXX` is not read here)."""
    for name in ("c++", "g++", "clang++"):
        if (path := shutil.which(name)) is not None:
            answer = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=10, check=False)
            if answer.returncode == 0 and answer.stdout.strip():
                return answer.stdout.strip().splitlines()[0]
    return None
