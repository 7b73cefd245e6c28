"""One rank of a link measurement: a process of its own, started by `measure_links`.

Goes in: a `Job` as JSON, the only argument. Comes out: seconds per call of every repetition, in the parent's store under
`result/<rank>`; where it is now stands under `at/<rank>`, and what failed first under `first failure`. It ends when the
parent's end of its standard input closes.
Deliberately not done: judging the figures. Each repetition runs a collective several times in a row, as a forward pass
queues them, and a rank's seconds include waiting for the others: the slowest rank's count.
"""

import json
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from math import ceil
from typing import Any

import torch
import torch.distributed as dist

from dayzero.core.records import STRICT, from_dict

# Shorter repetitions would measure the clock and the barrier.
SECONDS_PER_REPETITION = 1e-3
FEWEST_REPETITIONS, MOST_REPETITIONS, MOST_CALLS = 3, 20, 50


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """`budget_s`: seconds for one size of one collective, past the fewest repetitions. `sizes`: bytes as `LinkPoint` counts."""

    __pydantic_config__ = STRICT
    port: int
    rank: int
    num_ranks: int
    device: str  # kind of device, without an index: rank 0 takes the first
    backend: str
    collectives: tuple[str, ...]
    sizes: tuple[int, ...]
    budget_s: float
    timeout_s: float


def run(job: Job) -> None:
    timeout = timedelta(seconds=job.timeout_s)
    store = dist.TCPStore("127.0.0.1", job.port, None, is_master=False, timeout=timeout)
    try:
        _measure(job, store, timeout)
    except Exception as error:
        # The others fail of this failure: the parent shows the first.
        if store.add("failures", 1) == 1:
            store.set("first failure", f"{job.rank} {type(error).__name__}: {error}")
        raise


def _measure(job: Job, store: Any, timeout: timedelta) -> None:
    store.set(f"at/{job.rank}", f"joining a {job.backend} group")
    device, wait = torch.device(job.device), _no_wait
    torch.set_num_threads(max(1, torch.get_num_threads() // job.num_ranks))
    if device.type != "cpu":
        torch.accelerator.set_device_index(job.rank)
        device, wait = torch.device(job.device, job.rank), torch.accelerator.synchronize
    dist.init_process_group(job.backend, store=dist.PrefixStore("group", store), rank=job.rank, world_size=job.num_ranks,
                            timeout=timeout)  # fmt: skip
    measured: dict[str, list[list[Any]]] = {}
    refused: dict[str, str] = {}
    for collective in job.collectives:
        store.set(f"at/{job.rank}", f"the first {collective}")
        reason = _refusal(job, store, collective, prepare(job, collective, job.sizes[0], device)[1], wait)
        if reason is not None:
            refused[collective] = reason
            continue
        for size in job.sizes:
            store.set(f"at/{job.rank}", f"{collective} of {size} bytes")
            num_bytes, call = prepare(job, collective, size, device)
            seconds = _seconds(job, store, f"{collective}/{size}", call, wait)
            messages = 2 if collective == "send_recv" else 1
            measured.setdefault(collective, []).append([num_bytes, [one / messages for one in seconds]])
    store.set(f"result/{job.rank}", json.dumps({"measured": measured, "refused": refused}))
    # Whoever leaves first would break off what the others still receive.
    store.wait([f"result/{rank}" for rank in range(job.num_ranks)], timeout)
    dist.destroy_process_group()


def prepare(job: Job, collective: str, size: int, device: torch.device) -> tuple[int, Callable[[], Any]]:
    """The bytes really used (each rank has an equal part of them) and the call. float32: reductions of other dtypes are not
    a link's speed on the CPU."""
    part = max(1, size // (4 * job.num_ranks))
    whole, other = (torch.ones(part * job.num_ranks, device=device) for _ in range(2))
    # The longer names are deprecated from torch 2.13 on, the shorter absent before.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    calls: dict[str, Callable[[], Any]] = {
        # The values grow to infinity, which costs the same; setting them back would be work of its own.
        "all_reduce": lambda: dist.all_reduce(whole),
        "all_gather": lambda: gather(whole, other[:part]),
        "reduce_scatter": lambda: scatter(other[:part], whole),
        "all_to_all": lambda: dist.all_to_all_single(other, whole),
        "send_recv": lambda: _there_and_back(job.rank, whole),
    }
    return whole.numel() * 4, calls[collective]


def _there_and_back(rank: int, message: torch.Tensor) -> None:
    """Two messages between ranks 0 and 1, one after the other: half of it is one."""
    for sender in (0, 1):
        if rank == sender:
            dist.send(message, 1 - sender)
        else:
            dist.recv(message, sender)


def _refusal(job: Job, store: Any, collective: str, call: Callable[[], Any], wait: Callable[[], None]) -> str | None:
    """Why a rank could not run it at all, or None. All ranks come to the same answer."""
    try:
        call()
        wait()
        said = ""
    except (RuntimeError, ValueError, TypeError) as error:  # back ends refuse in each of these ways
        said = f"{type(error).__name__}: {error}".splitlines()[0][:160]
    store.set(f"tried/{collective}/{job.rank}", said)
    answers = [store.get(f"tried/{collective}/{rank}").decode() for rank in range(job.num_ranks)]
    return next(filter(None, answers), None)


def _seconds(job: Job, store: Any, key: str, call: Callable[[], Any], wait: Callable[[], None]) -> list[float]:
    """Seconds of one call, per repetition. Rank 0 says how many, by what the first calls took."""
    _, estimate = (_time(call, wait, 1) for _ in range(2))  # the first is the warm-up
    if job.rank == 0:
        calls = min(MOST_CALLS, max(1, ceil(SECONDS_PER_REPETITION / estimate)))
        repetitions = min(MOST_REPETITIONS, max(FEWEST_REPETITIONS, int(job.budget_s / (calls * estimate))))
        store.set(f"plan/{key}", f"{calls} {repetitions}")
    calls, repetitions = map(int, store.get(f"plan/{key}").split())
    return [_time(call, wait, calls) for _ in range(repetitions)]


def _time(call: Callable[[], Any], wait: Callable[[], None], calls: int) -> float:
    dist.barrier()
    wait()
    start = time.perf_counter()
    for _ in range(calls):
        call()
    wait()
    return (time.perf_counter() - start) / calls


def _no_wait() -> None:
    """The CPU's collectives return when they are done."""


def _end_with_parent() -> None:
    """The parent holds the other end of standard input and never writes to it: its end is the parent's, however it came."""

    def watch() -> None:
        while os.read(0, 4096):
            pass
        os._exit(1)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


if __name__ == "__main__":
    _end_with_parent()
    warnings.simplefilter("ignore")  # the end of standard error is shown where a rank fails
    run(from_dict(Job, json.loads(sys.argv[1]), source="link measurement"))
