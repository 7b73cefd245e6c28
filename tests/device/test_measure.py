"""devices.measure and devices.doctor on the device under test."""

import time

import pytest

from dayzero.core.errors import DayZeroError
from dayzero.devices.doctor import examine
from dayzero.devices.measure import measure_cpu, measure_device
from dayzero.devices.targets import load_target, write_target

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
