"""Measure what collectives cost between the cards of this machine: latency and bandwidth per collective and group size.

Goes in: a torch device string, how many ranks. Comes out: `MeasuredLink`s and notes; `with_links` puts them into a `Target`.
Each group size is a set of processes of its own (`link_worker`); none outlives the call. Deliberately not done: links
between hosts, and contention between groups: the other cards are idle.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

from dayzero.core.errors import DayZeroError
from dayzero.core.target import MeasuredLink, Target
from dayzero.core.units import KIB, format_bytes
from dayzero.devices.host import host_memory
from dayzero.devices.link_fit import FACTORS, fit, slowest, spread

# Factors of four: the two figures of a fit need no more points, and a decode step's messages and a prompt's lie between.
SIZES = tuple(KIB * 4**power for power in range(9))  # to 64 MiB
SECONDS_PER_POINT = 0.04
CPU_RANKS = 2
# For one group size, start of the processes included: two import torch within 3 s, eight on a busy host within a minute.
TIMEOUT_S = 180.0
POLL_S = 0.02


@dataclass(frozen=True, kw_only=True, slots=True)
class LinksFound:
    links: tuple[MeasuredLink, ...]
    notes: tuple[str, ...]
    backend: str | None  # None: nothing was measured


def measure_links(
    device: str = "cpu", num_ranks: int | None = None, *, backend: str | None = None, sizes: Sequence[int] = SIZES,
    budget_s: float = SECONDS_PER_POINT, timeout_s: float = TIMEOUT_S, worker: str = "dayzero.devices.link_worker",
) -> LinksFound:  # fmt: skip
    """Every collective over groups of 2, 4, ... and all of `num_ranks` (default: all devices of the kind; 2 on the CPU).

    A collective that the back end refuses is a note. Raises DayZeroError where there are fewer devices or no such back end,
    and where a rank dies or hangs: with its name, what it was doing and its last words.
    """
    from dayzero.devices.backend import require_reachable

    kind = device.partition(":")[0]
    if kind != "cpu":
        require_reachable(device)
    ranks = _num_ranks(kind, num_ranks)
    if ranks == 1:
        return LinksFound(links=(), notes=("one rank: no links to measure",), backend=None)
    name = _backend(kind, backend)
    sizes, notes = _affordable(kind, ranks, tuple(sorted(sizes)))
    links: list[MeasuredLink] = []
    for group_size in _group_sizes(ranks):
        collectives = [one for one in FACTORS if one != "send_recv" or group_size == 2]
        answers = _group(group_size, dict(device=kind, backend=name, collectives=collectives, sizes=sizes, budget_s=budget_s,
                                          timeout_s=timeout_s), timeout_s, worker)  # fmt: skip
        for collective, reason in answers[0]["refused"].items():
            notes.append(f"{collective} over {group_size} ranks not supported by {name}: {reason}")
        found = [fit(one, group_size, slowest([answer["measured"][one] for answer in answers]))
                 for one in answers[0]["measured"]]  # fmt: skip
        notes += [f"{name} {spread(link)}" for link in found]
        links += found
    return LinksFound(links=tuple(links), notes=tuple(notes), backend=name)


def with_links(target: Target, found: LinksFound) -> Target:
    """The target with these links, the back end they were measured with, and what there is to say of them."""
    software = replace(target.software, collective_backend=found.backend or target.software.collective_backend)
    notes = "; ".join(filter(None, [target.notes, *found.notes]))
    return replace(target, links=found.links, software=software, notes=notes or None)


def _num_ranks(kind: str, asked: int | None) -> int:
    import torch

    if asked is not None and asked < 1:
        raise DayZeroError("links are measured between devices", got=f"--devices {asked}", want="at least 2, or 1 for no links",
                           fix="give another --devices")  # fmt: skip
    if kind == "cpu":
        return asked or CPU_RANKS
    there = torch.accelerator.device_count()
    if asked is not None and asked > there:
        raise DayZeroError(f"there are not so many {kind} devices here", got=f"--devices {asked}", want=f"at most {there}",
                           fix="give fewer --devices, or none for all")  # fmt: skip
    return asked or there


def _backend(kind: str, asked: str | None) -> str:
    """The named back end, the one known for the device, or what torch names for it."""
    import torch.distributed as dist

    from dayzero.devices.backend import COLLECTIVES

    if not dist.is_available():
        raise DayZeroError("this torch was built without torch.distributed", got="no collectives",
                           want="a torch with torch.distributed", fix="install one, or give --devices 1")  # fmt: skip
    name = asked or COLLECTIVES.get(kind) or dist.get_default_backend_for_device(kind)
    if not dist.is_backend_available(name):
        listed = [one for one in dist.Backend.backend_list if one not in ("undefined", "fake")]
        there = [one for one in listed if dist.is_backend_available(one)]
        raise DayZeroError(f"this torch has no collective back end {name!r}", got=name, want=", ".join(there) or "one",
                           fix="install the plugin that brings it, or give --backend")  # fmt: skip
    return name


def _group_sizes(num_ranks: int) -> list[int]:
    return sorted({*(2**power for power in range(1, num_ranks.bit_length()) if 2**power <= num_ranks), num_ranks})


def _affordable(kind: str, ranks: int, sizes: tuple[int, ...]) -> tuple[tuple[int, ...], list[str]]:
    """On the host all ranks share the memory: two buffers each, and as much again inside the back end."""
    if kind != "cpu":
        return sizes, []
    free_bytes = host_memory().available_bytes // 2
    kept = tuple(size for size in sizes if 4 * size * ranks <= free_bytes)
    if not kept:
        raise DayZeroError("there is too little memory to measure links", got=format_bytes(2 * free_bytes) + " free",
                           want=format_bytes(8 * sizes[0] * ranks), fix="end other programs, or give --devices 1")  # fmt: skip
    return kept, [f"links: no sizes past {format_bytes(kept[-1])}, memory is short"] if kept != sizes else []


def _group(num_ranks: int, job: dict[str, Any], timeout_s: float, worker: str) -> list[dict[str, Any]]:
    """What each rank of one group found. All processes are gone when this returns or raises."""
    import torch.distributed as dist

    # This process holds the store: its port is free by construction, and it can ask where each rank was.
    store = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory(prefix="dayzero-links-") as folder:
        logs = [Path(folder) / f"{rank}.log" for rank in range(num_ranks)]
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for rank, log in enumerate(logs):
                text = json.dumps(job | {"port": store.port, "rank": rank, "num_ranks": num_ranks})
                with log.open("wb") as file:
                    processes.append(_start(worker, text, file))
            failed = _wait(processes, time.monotonic() + timeout_s)
            if failed:
                raise _failure(failed, processes, store, logs, timeout_s)
            return [json.loads(store.get(f"result/{rank}")) for rank in range(num_ranks)]
        finally:
            _end(processes)


def _start(worker: str, text: str, log: IO[bytes]) -> subprocess.Popen[bytes]:
    """`-P`: the working folder is the user's. Standard input stays open as long as this process lives."""
    return subprocess.Popen([sys.executable, "-P", "-m", worker, text], stdin=subprocess.PIPE, stdout=log, stderr=log,
                            process_group=0)  # fmt: skip


def _wait(processes: list[subprocess.Popen[bytes]], deadline: float) -> list[int]:
    """Nobody when all ended well; else the ranks that died, or at the deadline those that still run."""
    while True:
        codes = [process.poll() for process in processes]
        if died := [rank for rank, code in enumerate(codes) if code]:
            return died
        running = [rank for rank, code in enumerate(codes) if code is None]
        if not running or time.monotonic() > deadline:
            return running
        time.sleep(POLL_S)


def _failure(ranks: list[int], processes: list[Any], store: Any, logs: list[Path], timeout_s: float) -> DayZeroError:
    """One rank's end makes the others fail: a killed rank is the one to name, then whoever reported the first error."""
    codes = {rank: processes[rank].returncode for rank in ranks}
    if None in codes.values():
        what = f"no answer within {timeout_s:g} s"
        got = ", ".join(f"rank {rank} still at {_place(store, rank)}" for rank in ranks)
    else:
        killed = next((rank for rank, code in codes.items() if code < 0), None)
        if killed is None and store.check(["first failure"]):
            number, _, said = store.get("first failure").decode().partition(" ")
            rank, got = int(number), " ".join(said.split())[:400]
        else:
            rank = ranks[0] if killed is None else killed
            said = " ".join(logs[rank].read_text(errors="replace").split())[-400:]
            end = f"exit status {codes[rank]}" if killed is None else f"killed by {_signal_name(-codes[rank])}"
            got = f"{end}: {said}" if said else end
        what = f"rank {rank} of {len(processes)} died at {_place(store, rank)}"
    return DayZeroError(f"links were not measured: {what}", got=got, want="every rank to finish",
                        fix="give fewer --devices or another --backend; --devices 1 measures no links")  # fmt: skip


def _place(store: Any, rank: int) -> str:
    return store.get(f"at/{rank}").decode() if store.check([f"at/{rank}"]) else "its start"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # not one this platform names
        return f"signal {number}"


def _end(processes: list[subprocess.Popen[bytes]]) -> None:
    """Kill what still runs, and wait: none stays behind, not as a zombie either."""
    for process in processes:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if process.stdin is not None:
            process.stdin.close()
