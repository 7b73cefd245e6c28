"""devices.doctor: the tables of versions, without torch."""

import pytest

from dayzero.core.records import from_dict, to_dict
from dayzero.devices import doctor
from dayzero.devices.doctor import (
    PLUGINS,
    DoctorReport,
    check_plugin,
    check_requirement,
    device_finding,
    parse_requirement,
    satisfies,
)

NPU = next(plugin for plugin in PLUGINS if plugin.device == "npu")
MUSA = next(plugin for plugin in PLUGINS if plugin.device == "musa")


@pytest.mark.parametrize(("version", "bounds", "within"), [
    ("2.13.0+cpu", ">=2.11,<3", True), ("2.10.1", ">=2.11,<3", False), ("3.0", ">=2.11,<3", False), ("2.11", ">=2.11.0", True),
    ("2.9.1", ">=2.11", False), ("2.5.1", "==2.5.*", True), ("2.6.0", "==2.5.*", False), ("2.6.0", "!=2.5.*", True),
    ("1.4.5", "~=1.4.2", True), ("1.5.0", "~=1.4.2", False), ("1", "", True), ("2.11.0rc1", ">=2.11", True),
])  # fmt: skip
def test_version_bounds(version, bounds, within):
    assert satisfies(version, bounds) is within


@pytest.mark.parametrize(("line", "parsed"), [
    ("torch<3,>=2.11", ("torch", "<3,>=2.11", None)),
    ("fastapi<1,>=0.115; extra == 'serve'", ("fastapi", "<1,>=0.115", "serve")),
    ("torch (>=2.1)", ("torch", ">=2.1", None)), ("numpy", ("numpy", "", None)),
    ("uvicorn[standard]>=0.30", ("uvicorn", ">=0.30", None)),
])  # fmt: skip
def test_requirement_lines(line, parsed):
    assert parse_requirement(line) == parsed


@pytest.mark.parametrize(("found", "extra", "status"), [
    ("5.24.0", None, "ok"), ("4.50", None, "mismatch"), (None, None, "missing"), (None, "serve", "warning"),
    ("4.50", "serve", "warning"),
])  # fmt: skip
def test_libraries_against_their_bounds(found, extra, status):
    finding = check_requirement("transformers", ">=5.20,<6", found, extra)
    assert finding.status == status and (finding.status == "ok" or finding.fix)


@pytest.mark.parametrize(("found", "torch", "needed", "status"), [
    ("2.13.0", "2.13.0+cpu", True, "ok"), ("2.12.0", "2.13.0", True, "mismatch"), ("2.12.0", "2.13.0", False, "warning"),
    ("2.9.0", "2.9.0", True, "mismatch"), (None, "2.13.0", True, "missing"), (None, "2.13.0", False, "info"),
    ("2.13.0", None, True, "mismatch"),
])  # fmt: skip
def test_a_plugin_that_follows_torch(found, torch, needed, status):
    """The floor is torch's own, and major.minor must be equal: plugins trail torch."""
    finding = check_plugin(NPU, found, torch, ">=2.11,<3", None, needed=needed)
    assert finding.status == status
    assert finding.fix or status in ("ok", "info")


@pytest.mark.parametrize(("declares", "status"), [(None, "ok"), ("==2.13.*", "ok"), ("==2.5.*", "mismatch")])
def test_a_plugin_with_its_own_numbers(declares, status):
    assert check_plugin(MUSA, "1.3.0", "2.13.0", ">=2.11,<3", declares, needed=True).status == status


def test_plugins_are_told_apart():
    names = [name for plugin in PLUGINS for name in plugin.distributions]
    assert len(names) == len(set(names)) and len({plugin.device for plugin in PLUGINS}) == len(PLUGINS)


@pytest.mark.parametrize(("device", "hint"), [("npu:0", "torch-npu"), ("cuda", "torch build"), ("warp", "give one of: cpu")])
def test_an_unreachable_device_is_missing_with_a_fix(device, hint):
    finding = device_finding(device, (False, "RuntimeError: no such device"))
    assert finding.status == "missing" and hint in finding.fix and "RuntimeError" in finding.found


def test_examine_reports_a_missing_device_and_does_not_raise(monkeypatch):
    monkeypatch.setattr(doctor, "_reach", lambda device: (device == "cpu", "as told"))
    good, bad = doctor.examine(None), doctor.examine("warp:7")
    assert good.device == "cpu" and next(f for f in good.findings if f.name == "device cpu").status == "ok"
    assert not bad.ok and [f.name for f in bad.findings if f.status == "missing"] == ["device warp:7"]
    assert good.memory_total_bytes >= good.memory_available_bytes > 0 and good.disk_free_bytes > 0
    assert from_dict(DoctorReport, to_dict(good)) == good


def test_a_needed_plugin_that_is_absent_is_missing(monkeypatch):
    monkeypatch.setattr(doctor, "_reach", lambda device: (False, "as told"))
    names = {f.name for f in doctor.examine("musa").findings if f.status == "missing"}
    assert names == {"device musa", "torch-musa"}
