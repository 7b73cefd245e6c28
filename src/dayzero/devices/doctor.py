"""What this machine, its torch and its device plugins can do, and what is missing or mismatched, with the fix.

Goes in: a torch device string, or none. Comes out: a `DoctorReport`. A device that is unknown or cannot be reached is a
finding, not an error. Plugins are read from installed metadata and never imported here (torch loads those that register
themselves). Deliberately not done: measuring (`devices.measure`) or testing operators (the conformance kit).
"""

import operator
import platform
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from dayzero.core.records import STRICT
from dayzero.core.units import format_bytes
from dayzero.devices.host import BF16_FEATURES, compiler, cpu_features, host_memory, instruction_set, num_threads

if TYPE_CHECKING:
    from rich.table import Table

Status = Literal["ok", "info", "warning", "missing", "mismatch"]
# Findings that stop an adaptation on the examined device.
BAD: frozenset[Status] = frozenset({"missing", "mismatch"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One row: what was looked at, what was found, what is wanted, and what to do about a difference."""

    __pydantic_config__ = STRICT
    name: str
    status: Status
    found: str
    wanted: str = ""
    fix: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class DoctorReport:
    """`ok` when nothing is missing or mismatched for `device`."""

    SCHEMA: ClassVar[str] = "dayzero.doctor/1"
    __pydantic_config__ = STRICT

    ok: bool
    device: str
    python: str
    system: str
    instruction_set: str
    processors: int
    memory_total_bytes: int
    memory_available_bytes: int
    disk_free_bytes: int
    compiler: str | None
    findings: tuple[Finding, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Plugin:
    """A package that adds a device to torch. `distributions` are its names in a registry, the first is proposed.

    `follows_torch`: its version must have torch's major.minor; then torch's own floor is the plugin's. Others count by
    themselves: what they declare about torch is checked, and no floor of ours is known.
    """

    device: str
    distributions: tuple[str, ...]
    follows_torch: bool
    note: str = ""


PLUGINS: tuple[Plugin, ...] = (
    Plugin(device="npu", distributions=("torch-npu",), follows_torch=True, note="needs the CANN toolkit"),
    Plugin(device="xla", distributions=("torch-xla",), follows_torch=True),
    Plugin(device="xpu", distributions=("intel-extension-for-pytorch",), follows_torch=True),
    Plugin(device="musa", distributions=("torch-musa",), follows_torch=False, note="needs the MUSA toolkit"),
    Plugin(device="mlu", distributions=("torch-mlu",), follows_torch=False, note="needs the Neuware toolkit"),
    Plugin(device="hpu", distributions=("habana-torch-plugin", "habana_torch_plugin"), follows_torch=False),
    Plugin(device="gcu", distributions=("torch-gcu",), follows_torch=False, note="part of tops-extension"),
    Plugin(device="supa", distributions=("torch-br",), follows_torch=False),
)
# Devices that torch's own builds reach; vendors that reuse `cuda` ship a build of torch.
BUILT_IN = ("cpu", "cuda", "xpu", "mps", "meta")


COMPARE: dict[str, Callable[[tuple[int, ...], tuple[int, ...]], bool]] = {
    ">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt, "==": operator.eq, "!=": operator.ne,
}  # fmt: skip


def version_tuple(text: str) -> tuple[int, ...]:
    """`2.13.0+cpu` -> (2, 13, 0). Pre-release and local parts are left out; () when there is no number."""
    found = re.match(r"[vV]?(\d+(?:\.\d+)*)", text.strip())
    return tuple(int(part) for part in found.group(1).split(".")) if found else ()


def satisfies(version: str, bounds: str) -> bool:
    """Whether a version is within `>=2.11,<3` (>=, >, <=, <, ==, !=, ~=; `==2.5.*` too)."""
    return all(_within(version_tuple(version), bound.strip()) for bound in bounds.split(",") if bound.strip())


def _within(version: tuple[int, ...], bound: str) -> bool:
    found = re.match(r"(>=|<=|==|!=|~=|>|<)\s*(\S+)", bound)
    assert found is not None, bound
    sign, text = found.groups()
    wanted = version_tuple(text)
    if text.endswith(".*"):
        return (version[: len(wanted)] == wanted) == (sign == "==")
    if sign == "~=":
        return version >= wanted and version[: len(wanted) - 1] == wanted[:-1]
    width = max(len(version), len(wanted))
    one, other = (numbers + (0,) * (width - len(numbers)) for numbers in (version, wanted))
    return COMPARE[sign](one, other)


def parse_requirement(line: str) -> tuple[str, str, str | None]:
    """`fastapi<1,>=0.115; extra == "serve"` -> (name, bounds, extra)."""
    head, _, marker = line.partition(";")
    found = re.match(r"\s*([A-Za-z0-9._-]+)\s*(?:\[[^\]]*\])?\s*\(?([^)]*)\)?\s*$", head)
    assert found is not None, line
    extra = re.search(r"extra\s*==\s*['\"]([^'\"]+)['\"]", marker)
    return found.group(1), found.group(2).strip(), extra.group(1) if extra else None


def installed(name: str) -> str | None:
    """The version of an installed distribution, read from its metadata."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def check_requirement(name: str, bounds: str, found: str | None, extra: str | None = None) -> Finding:
    """A library against the bounds of this package. A missing optional one is a warning."""
    wanted = bounds or "any version"
    package = f"pip install '{name}{bounds}'" if extra is None else f"pip install 'dayzero[{extra}]'"
    if found is None:
        return Finding(name=name, status="missing" if extra is None else "warning", found="not installed",
                       wanted=wanted + (f" (for {extra})" if extra else ""), fix=package)  # fmt: skip
    if not satisfies(found, bounds):
        return Finding(name=name, status="mismatch" if extra is None else "warning", found=found, wanted=wanted, fix=package)
    return Finding(name=name, status="ok", found=found, wanted=wanted)


def check_plugin(
    plugin: Plugin, found: str | None, torch_version: str | None, torch_bounds: str, declares: str | None, *, needed: bool
) -> Finding:
    """A device plugin against the installed torch: `declares` are its own bounds on torch, if it states any.

    `needed` when the examined device depends on it; otherwise a mismatch is only a warning.
    """
    name = plugin.distributions[0]
    bad: Status = "mismatch" if needed else "warning"
    if found is None:
        fix = f"install {name} for your torch{'; ' + plugin.note if plugin.note else ''}"
        return Finding(name=name, status="missing" if needed else "info", found="not installed",
                       wanted=f"for --device {plugin.device}", fix=fix if needed else "")  # fmt: skip
    if torch_version is None:
        return Finding(name=name, status=bad, found=found, wanted="torch", fix="install torch")
    torch_minor, own_minor = version_tuple(torch_version)[:2], version_tuple(found)[:2]
    if plugin.follows_torch:
        wanted = f"{'.'.join(map(str, torch_minor))}.* as torch {torch_version}; floor torch{torch_bounds}"
        if own_minor != torch_minor or not satisfies(found, torch_bounds):
            fix = (f"install torch and {name} of one release within torch{torch_bounds}; where there is none yet, describe, "
                   "plan and convert here and serve on a host that has one")  # fmt: skip
            return Finding(name=name, status=bad, found=found, wanted=wanted, fix=fix)
        return Finding(name=name, status="ok", found=found, wanted=wanted)
    if declares and not satisfies(torch_version, declares):
        return Finding(name=name, status=bad, found=f"{found} with torch {torch_version}",
                       wanted=f"torch{declares}, as it declares",
                       fix=f"install the torch that {name} {found} was built for")  # fmt: skip
    stated = f"torch{declares}, as it declares" if declares else "no floor is known: see its release notes"
    return Finding(name=name, status="ok", found=found, wanted=stated)


def device_finding(device: str, reached: tuple[bool, str]) -> Finding:
    """Whether torch reaches the device, with what to do when it does not."""
    kind = device.partition(":")[0]
    if reached[0]:
        return Finding(name=f"device {device}", status="ok", found=reached[1])
    plugin = next((plugin for plugin in PLUGINS if plugin.device == kind), None)
    if plugin is not None:
        fix = f"install {plugin.distributions[0]} and its driver, then check that torch.accelerator sees a device"
    elif kind in BUILT_IN:
        fix = f"install a torch build for {kind} and its driver, or choose --device cpu"
    else:
        fix = "give one of: " + ", ".join([*BUILT_IN, *(plugin.device for plugin in PLUGINS if plugin.device not in BUILT_IN)])
    return Finding(name=f"device {device}", status="missing", found=reached[1], wanted="a device torch can compute on", fix=fix)


def _requirements() -> list[tuple[str, str, str | None]]:
    return [parse_requirement(line) for line in metadata.requires("dayzero") or []]


def _torch_bound_of(distribution: str) -> str | None:
    """What an installed distribution declares about torch."""
    named = [parse_requirement(line) for line in metadata.requires(distribution) or []]
    return next((bounds for name, bounds, extra in named if name == "torch" and extra is None and bounds), None)


def _reach(device: str) -> tuple[bool, str]:
    """Whether torch computes on the device, and what it said. Any failure inside torch or a plugin is a finding."""
    try:
        import torch

        where = torch.device(device)
        if where.type == "meta":
            return False, "the meta device holds no values"
        value = torch.ones(2, device=where).sum().item()
    except Exception as error:  # a vendor's stack may raise anything; the reason is what the user came for
        return False, f"{type(error).__name__}: {str(error).splitlines()[0][:200] if str(error) else 'no message'}"
    return value == 2.0, f"torch {torch.__version__} computes on it" if value == 2.0 else f"1 + 1 gave {value}"


def examine(device: str | None = None) -> DoctorReport:
    """Look at this machine for `device` (default: cpu). Never raises for a device that is unknown or absent."""
    device = device or "cpu"
    kind, memory = device.partition(":")[0], host_memory()
    torch_version, requirements = installed("torch"), _requirements()
    torch_bounds = next((bounds for name, bounds, extra in requirements if name == "torch" and extra is None), "")
    findings = [check_requirement(name, bounds, installed(name), extra)
                for name, bounds, extra in requirements if extra != "dev"]  # fmt: skip
    findings.append(device_finding(device, _reach(device)))
    for plugin in PLUGINS:
        name = next((name for name in plugin.distributions if installed(name) is not None), None)
        findings.append(check_plugin(plugin, installed(name) if name else None, torch_version, torch_bounds,
                                     _torch_bound_of(name) if name else None,
                                     needed=plugin.device == kind and kind not in BUILT_IN))  # fmt: skip
    built_with, features = compiler(), cpu_features()
    no_compiler = "" if built_with else "install g++: without it compiled CPU kernels are not built"
    findings.append(Finding(name="C++ compiler", status="ok" if built_with else "warning", found=built_with or "none",
                            wanted="any (g++ or clang++)", fix=no_compiler))  # fmt: skip
    native = bool(BF16_FEATURES & set(features))
    bf16 = "in hardware" if native else "emulated: prefer --weights-dtype float32 for speed"
    findings.append(Finding(name="bfloat16 on the CPU", status="ok" if native else "info", found=bf16))
    return DoctorReport(
        ok=not any(finding.status in BAD for finding in findings), device=device, python=platform.python_version(),
        system=f"{platform.system()} {platform.release()}", instruction_set=instruction_set(), processors=num_threads(),
        memory_total_bytes=memory.total_bytes, memory_available_bytes=memory.available_bytes,
        disk_free_bytes=shutil.disk_usage(Path.cwd()).free, compiler=built_with,
        findings=(*findings, Finding(name="memory", status="info", found=format_bytes(memory.available_bytes) + " available",
                                     wanted=f"limited by {memory.limited_by}")),
    )  # fmt: skip


def doctor_table(report: DoctorReport) -> "Table":
    """The findings as a person reads them."""
    from rich.table import Table
    from rich.text import Text

    machine = f"{report.system}, Python {report.python}, {report.instruction_set}, {report.processors} processors"
    title = f"{machine}, device {report.device}"
    table = Table("what", "status", "found", "wanted", "what to do", title=title, title_justify="left")
    for finding in report.findings:
        style = "red" if finding.status in BAD else "yellow" if finding.status == "warning" else ""
        row = (finding.name, finding.status, finding.found, finding.wanted, finding.fix)
        table.add_row(*(Text(cell) for cell in row), style=style)
    return table
