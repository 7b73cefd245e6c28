"""devices.measure and devices.doctor on the device under test."""

import os
import subprocess
import sys
import time
from dataclasses import replace

import psutil
import pytest

from dayzero.core.errors import DayZeroError
from dayzero.devices.doctor import examine
from dayzero.devices.link_fit import FACTORS
from dayzero.devices.measure import measure_cpu, measure_device
from dayzero.devices.measure_links import measure_links, with_links
from dayzero.devices.targets import load_target, write_target
from tests.unit.plan_builders import make_target

# No processor or card made so far reaches these: a figure beyond them is a broken clock or a wrong formula.
FASTEST_FLOPS_PER_S, FASTEST_BYTES_PER_S = 1e17, 1e14


def assert_plausible(target):
    card = target.card
    assert 0 < card.usable_memory_bytes <= card.memory_bytes
    assert 1e8 < card.memory_bytes_per_s < FASTEST_BYTES_PER_S
    assert "float32" in card.flops_per_s
    assert all(1e7 < rate < FASTEST_FLOPS_PER_S for rate in card.flops_per_s.values())
    assert target.confidence == "measured" and "median/best" in target.notes


def test_cpu_is_measured_quickly_and_survives_its_file(tmp_path):
    import torch

    start = time.process_time()
    target = measure_cpu()
    # Processor time over the threads used: wall time would judge the neighbours.
    assert (time.process_time() - start) / torch.get_num_threads() < 3.0
    assert_plausible(target)
    assert target.node.num_cards == 1 and target.software.torch_device == "cpu" and "instruction set" in target.notes
    write_target(target, tmp_path / "cpu.yaml")
    assert load_target(str(tmp_path / "cpu.yaml")) == target


def test_a_cpu_cannot_beat_its_own_peak():
    """A matrix rate is bounded by 2 FLOPs x lanes x units x clock of the processors there are: 2048 bf16 FLOPs a cycle
    per core (the widest matrix unit built) and 6 GHz."""
    from dayzero.devices.host import num_threads

    assert max(measure_cpu().card.flops_per_s.values()) < num_threads() * 2048 * 6e9


def test_device_under_test(device):
    assert_plausible(measure_device(device))


@pytest.mark.parametrize("absent", ["npu", "musa"])
def test_absent_device_is_an_error_that_names_the_doctor(absent, device):
    if device.startswith(absent):
        pytest.skip("present here")
    with pytest.raises(DayZeroError, match="reaches no") as caught:
        measure_device(absent)
    assert f"doctor --device {absent}" in caught.value.fix


def test_doctor_on_this_device(device):
    report = examine(device)
    assert next(f for f in report.findings if f.name == f"device {device}").status == "ok"


@pytest.mark.parametrize("unreachable", ["warp", "cuda:99", "meta", ""])
def test_doctor_never_crashes(unreachable):
    report = examine(unreachable)
    assert report.ok or any(f.status == "missing" for f in report.findings)
    assert report.device == (unreachable or "cpu")


SHORT = {"sizes": (1024, 65536, 1 << 20), "budget_s": 0.01}


def workers_alive():
    return [process.pid for process in psutil.Process().children(recursive=True)
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE and "link" in " ".join(process.cmdline())]  # fmt: skip


def assert_plausible_links(found, ranks):
    assert {link.group_size for link in found.links} <= {2**power for power in range(1, ranks)} | {ranks}
    assert {link.collective for link in found.links if link.group_size == 2} <= set(FACTORS)
    assert any(link.collective == "all_reduce" and link.group_size == ranks for link in found.links)
    for link in found.links:
        assert 1e5 < link.bytes_per_s < FASTEST_BYTES_PER_S and 0 <= link.latency_s < 1.0
        assert [point.num_bytes for point in link.points] == sorted({point.num_bytes for point in link.points})
        for point in link.points:
            assert 0 < point.best_s <= point.median_s


def test_links_between_two_processes_of_this_machine(tmp_path):
    found = measure_links("cpu", 2, **SHORT)
    assert found.backend == "gloo" and workers_alive() == []
    assert_plausible_links(found, 2)
    told = " ".join(found.notes)
    # Each collective has a figure, or a reason.
    for name in FACTORS:
        link = [one for one in found.links if one.collective == name]
        assert len(link) == 1 or f"{name} over 2 ranks not supported by gloo" in told
    reduce = next(link for link in found.links if link.collective == "all_reduce")
    assert [point.num_bytes for point in reduce.points] == list(SHORT["sizes"]) and "median/best" in told
    # A megabyte takes longer than a kilobyte, and no processor copies 100 GB/s through a socket.
    assert reduce.points[-1].best_s > reduce.points[0].best_s and reduce.points[-1].best_s > (1 << 20) / 1e11
    target = with_links(replace(make_target(), software=replace(make_target().software, torch_device="cpu")), found)
    write_target(target, tmp_path / "mine.yaml")
    assert load_target(str(tmp_path / "mine.yaml")) == target and target.software.collective_backend == "gloo"


def test_links_of_the_device_under_test(device):
    import torch

    if device.startswith("cpu") or torch.accelerator.device_count() < 2:
        pytest.skip("needs two accelerators")
    assert_plausible_links(measure_links(device, 2, **SHORT), 2)
    assert workers_alive() == []


def test_one_device_has_no_links():
    found = measure_links("cpu", 1)
    assert found.links == () and found.backend is None and "no links" in found.notes[0]


@pytest.mark.parametrize(("ranks", "backend", "match"), [(0, None, "between devices"), (2, "warp", "no collective back end 'warp'")])
def test_links_refuse_what_cannot_be(ranks, backend, match):
    with pytest.raises(DayZeroError, match=match):
        measure_links("cpu", ranks, backend=backend)


BROKEN = """
import json, os, signal, sys, time
import torch.distributed as dist
from dayzero.devices import link_worker

job = link_worker.Job(**json.loads(sys.argv[1]))
def die(*_): os.kill(os.getpid(), signal.SIGKILL)
def fail(*_): raise RuntimeError("lane 7 is down")
def hang(*_): time.sleep(600)
FAULT
link_worker.run(job)
"""


@pytest.fixture
def broken(tmp_path, monkeypatch):
    """`broken(fault)`: the name of a worker module in which that goes wrong."""

    def make(fault):
        (tmp_path / "broken_link_worker.py").write_text(BROKEN.replace("FAULT", fault))
        paths = filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")])
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
        return "broken_link_worker"

    return make


@pytest.mark.parametrize(("fault", "what", "got"), [
    ("if job.rank == 1: link_worker._time = die", "rank 1 of 2 died at all_reduce of 1024 bytes", "SIGKILL"),
    ("if job.rank == 1: link_worker._time = fail", "rank 1 of 2 died at all_reduce", "RuntimeError: lane 7 is down"),
])  # fmt: skip
def test_a_rank_that_dies_is_named_and_none_is_left(broken, fault, what, got):
    start = time.monotonic()
    with pytest.raises(DayZeroError) as caught:
        measure_links("cpu", 2, worker=broken(fault), **SHORT)
    assert what in caught.value.what and got in caught.value.got
    assert workers_alive() == [] and time.monotonic() - start < 60, "not by a timeout"


def test_a_rank_that_hangs_ends_at_the_timeout(broken):
    start = time.monotonic()
    with pytest.raises(DayZeroError, match="no answer within 8 s") as caught:
        measure_links("cpu", 2, worker=broken("if job.rank == 1: link_worker.prepare = hang"), timeout_s=8, **SHORT)
    assert "rank 1 still at" in caught.value.got and workers_alive() == [] and time.monotonic() - start < 20


def test_a_collective_that_the_back_end_lacks_is_a_note(broken):
    found = measure_links("cpu", 2, worker=broken("dist.all_to_all_single = fail"), **SHORT)
    assert {link.collective for link in found.links} == set(FACTORS) - {"all_to_all"}
    assert any(note == "all_to_all over 2 ranks not supported by gloo: RuntimeError: lane 7 is down" for note in found.notes)


def test_workers_end_with_a_killed_parent():
    code = ("from dayzero.devices.measure_links import measure_links\n"
            "measure_links('cpu', 2, budget_s=100, sizes=(1024,))")  # fmt: skip
    parent = subprocess.Popen([sys.executable, "-c", code])
    try:
        deadline = time.monotonic() + 60
        while len(children := psutil.Process(parent.pid).children()) < 2:
            assert parent.poll() is None and time.monotonic() < deadline
            time.sleep(0.1)
    finally:
        parent.kill()
        parent.wait()
    _, alive = psutil.wait_procs(children, timeout=30)
    assert alive == []
