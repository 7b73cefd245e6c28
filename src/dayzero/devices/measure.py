"""Measure what this machine can do and write it as a `Target`, whose figures replace published ones.

Goes in: a torch device string. Comes out: a `Target` with memory, memory bandwidth, and the matrix rate of each dtype.
Deliberately not done: links between cards (that takes several processes: `measure_links`), or a benchmark. The figures are
the best of a few short repetitions and cost about 3 s together. On an idle machine they repeat within a few per cent; beside
other work they were seen to fall by a factor of four, so each carries its spread (median over best) in the notes.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from dayzero.core.errors import DayZeroError
from dayzero.core.target import Card, Node, Software, Target
from dayzero.core.units import MIB
from dayzero.devices.host import BF16_FEATURES, cpu_features, host_memory, instruction_set

if TYPE_CHECKING:
    import torch

# Long enough that the second-long governor ramps do not matter, short enough for `adapt` to measure on every run.
SECONDS_PER_FIGURE = 0.4
# Larger than any last-level cache in use, so that memory is measured and not the cache; smaller where little is free.
READ_BYTES = 512 * MIB
MATMUL_SIZE = 1024
# A product that would take longer than this (three calls of the next size) is not tried: a dtype without hardware support.
# Generous, because on a busy machine even the smallest product takes 20 ms of waiting that a larger one does not repeat.
LONGEST_STEP_S = 1.5
CPU_DTYPES = ("float32", "bfloat16")
ACCELERATOR_DTYPES = ("float32", "bfloat16", "float16")


def measure_cpu() -> Target:
    """This machine as one card named `cpu-local`. All ranks on it share its memory."""
    import torch

    memory = host_memory()
    features = cpu_features()
    device = torch.device("cpu")
    rates, spreads = _matmul_rates(device, CPU_DTYPES, _no_wait)
    bytes_per_s, read_spread = _read_rate(device, memory.available_bytes, _no_wait)
    notes = [f"instruction set: {instruction_set()}", f"torch kernels: {torch.backends.cpu.get_cpu_capability()}",
             f"{torch.get_num_threads()} threads", f"memory limited by {memory.limited_by}", read_spread, *spreads]  # fmt: skip
    return Target(
        id="cpu-local", vendor="this machine",
        card=Card(memory_bytes=memory.total_bytes, usable_memory_bytes=max(1, memory.available_bytes),
                  memory_bytes_per_s=bytes_per_s, flops_per_s=rates,
                  native_dtypes=("float32", *(("bfloat16",) if BF16_FEATURES & set(features) else ()))),
        node=Node(num_cards=1, topology="shared memory"),
        software=Software(torch_device="cpu", collective_backend="gloo"),
        confidence="measured", sources=("measured on this machine",), notes="; ".join(notes),
    )  # fmt: skip


def measure_device(device: str) -> Target:
    """The accelerator behind a torch device string (`cuda`, `npu:1`, ...), reached through `torch.accelerator` alone.

    Raises DayZeroError when torch reaches no such device.
    """
    import torch

    try:
        where = torch.device(device)
    except RuntimeError as error:  # a name that only a plugin would teach torch, or nobody
        raise _unreachable(device, str(error).splitlines()[0][:200]) from error
    if where.type == "cpu":
        return measure_cpu()
    current = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if current is None or current.type != where.type or (where.index or 0) >= torch.accelerator.device_count():
        raise _unreachable(device, f"accelerator {current}, {torch.accelerator.device_count()} devices")
    where = torch.device(where.type, torch.accelerator.current_device_index() if where.index is None else where.index)
    free_bytes, total_bytes = _device_memory(where)
    rates, spreads = _matmul_rates(where, ACCELERATOR_DTYPES, torch.accelerator.synchronize)
    bytes_per_s, read_spread = _read_rate(where, free_bytes, torch.accelerator.synchronize)
    module = torch.get_device_module(where)
    name = module.get_device_name(where) if hasattr(module, "get_device_name") else where.type
    return Target(
        id=f"{where.type}-local", vendor=str(name),
        card=Card(memory_bytes=total_bytes, usable_memory_bytes=max(1, free_bytes), flops_per_s=rates,
                  memory_bytes_per_s=bytes_per_s, native_dtypes=tuple(rates)),
        node=Node(num_cards=torch.accelerator.device_count()),
        software=Software(torch_device=where.type),
        confidence="measured", sources=("measured on this machine",),
        notes="; ".join([read_spread, *spreads]),
    )  # fmt: skip


def _unreachable(device: str, found: str) -> DayZeroError:
    return DayZeroError(f"torch reaches no {device!r} device here", got=found, want=device,
                        fix=f"run `dayzero doctor --device {device}` to see what is missing")  # fmt: skip


def _no_wait() -> None:
    """The CPU runs eagerly: there is nothing to wait for."""


def _device_memory(device: "torch.device") -> tuple[int, int]:
    """Free and total bytes, through the generic interface where this torch has it, else the device's own module."""
    import torch

    for source in (torch.accelerator, torch.get_device_module(device)):
        for name in ("get_memory_info", "mem_get_info"):
            if (ask := getattr(source, name, None)) is not None:
                free_bytes, total_bytes = ask(device)
                return int(free_bytes), int(total_bytes)
    raise DayZeroError(f"{device} does not say how much memory it has", got="no get_memory_info or mem_get_info",
                       want="free and total bytes", fix="write the hardware file by hand with memory_bytes")  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """Repetitions of one thing: disturbances only add time, so the best is the machine's and the median its company's."""

    best_s: float
    median_s: float

    def spread(self, what: str) -> str:
        return f"{what} median/best {self.median_s / self.best_s:.2f}"


def _repeat(run: Callable[[], Any], wait: Callable[[], None], budget_s: float) -> Timing:
    """At least two repetitions after one warm-up, then as many as fit the budget."""
    run()
    wait()
    times: list[float] = []
    while len(times) < 2 or sum(times) < budget_s:
        start = time.perf_counter()
        run()
        wait()
        times.append(time.perf_counter() - start)
    return Timing(best_s=min(times), median_s=median(times))


def _matmul_rates(
    device: "torch.device", dtypes: tuple[str, ...], wait: Callable[[], None]
) -> tuple[dict[str, float], list[str]]:
    """FLOP/s of a square linear layer per dtype; and notes: the spread of each figure, or why a dtype has none."""
    import torch

    rates: dict[str, float] = {}
    notes: list[str] = []
    for name in dtypes:
        dtype = getattr(torch, name)
        try:
            # Small products first: where a dtype has no hardware support the full size would take seconds.
            size, timing = 128, _time_linear(device, dtype, 128, wait, budget_s=0.0)
            while size < MATMUL_SIZE and timing.best_s * 8 * 3 < LONGEST_STEP_S:
                size *= 2
                timing = _time_linear(device, dtype, size, wait, budget_s=0.0)
            timing = _time_linear(device, dtype, size, wait, budget_s=SECONDS_PER_FIGURE)
            rates[name] = 2.0 * size**3 / timing.best_s
            notes.append(timing.spread(f"{name} matmul of {size}:"))
        except RuntimeError as error:
            notes.append(f"{name} matmul does not run: {str(error).splitlines()[0][:120]}")
    return rates, notes


def _time_linear(device: "torch.device", dtype: "torch.dtype", size: int, wait: Callable[[], None], budget_s: float) -> Timing:
    import torch

    inputs, weight = (torch.ones(size, size, device=device, dtype=dtype) for _ in range(2))
    with torch.inference_mode():
        return _repeat(lambda: torch.nn.functional.linear(inputs, weight), wait, budget_s)


def _read_rate(device: "torch.device", free_bytes: int, wait: Callable[[], None]) -> tuple[float, str]:
    """Bytes per second of reading a buffer once (a sum), and its spread: decoding reads weights, it hardly writes."""
    import torch

    num_bytes = max(MIB, min(READ_BYTES, free_bytes // 8))
    buffer = torch.ones(num_bytes // 4, dtype=torch.float32, device=device)
    with torch.inference_mode():
        timing = _repeat(buffer.sum, wait, SECONDS_PER_FIGURE)
    return num_bytes / timing.best_s, timing.spread("memory read:")
