"""Names to creators and kernels: duplicates and unknown names are errors that say what exists; vendors load lazily."""

import subprocess
import sys
from importlib.metadata import EntryPoint

import pytest

from dayzero.core.errors import DayZeroError
from dayzero.ops import registry
from dayzero.ops.registry import Kernel, Registry, checked_table


def make_kernel(name: str = "vendor::linear") -> Kernel:
    return Kernel(name=name, call=lambda *tensors: tensors[0], binding="custom")


def make_registry(monkeypatch: pytest.MonkeyPatch, *declared: tuple[str, str]) -> Registry:
    """A registry with `os:getcwd` built in as "here", and entry points as packages would declare them."""
    points = [EntryPoint(name=name, value=value, group="g") for name, value in declared]
    monkeypatch.setattr(registry, "entry_points", lambda group: points)
    return Registry("back end", group="g", built_in={"here": "os:getcwd"})


def test_built_in_and_declared_names_are_created(monkeypatch: pytest.MonkeyPatch) -> None:
    found = make_registry(monkeypatch, ("vendor", "os:getpid"))
    found.add("mine", lambda: 7)
    assert found.names() == ["here", "mine", "vendor"]
    assert found.create("mine") == 7 and isinstance(found.create("vendor"), int) and isinstance(found.create("here"), str)


def test_the_same_declaration_twice_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """pyproject.toml declares what is also built in."""
    assert make_registry(monkeypatch, ("here", "os:getcwd")).names() == ["here"]


@pytest.mark.parametrize("name", ["here", "vendor"])
def test_a_taken_name_is_an_error(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    found = make_registry(monkeypatch, ("vendor", "os:getpid"))
    with pytest.raises(DayZeroError, match="two of the same back end"):
        found.add(name, lambda: None)


def test_two_packages_that_claim_one_name_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    found = make_registry(monkeypatch, ("npu", "one:create"), ("npu", "other:create"))
    with pytest.raises(DayZeroError) as error:
        found.names()
    assert "one:create and other:create" in error.value.got


def test_an_unknown_name_lists_what_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DayZeroError) as error:
        make_registry(monkeypatch, ("vendor", "os:getpid")).create("vendro")
    assert "here, vendor" in error.value.want


def test_a_vendor_package_is_imported_by_its_creator_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    found = make_registry(monkeypatch, ("broken", "no_such_package_of_a_vendor:create"))
    assert "broken" in found.names()
    with pytest.raises(DayZeroError, match="cannot be loaded") as error:
        found.create("broken")
    assert "no_such_package_of_a_vendor" in error.value.got


def test_a_table_names_known_operators_and_each_kernel_once() -> None:
    table = {"linear": (make_kernel("a"), make_kernel("b")), "aten::topk": (make_kernel("c"),)}
    assert checked_table(table, ["linear", "attention"]) is table
    with pytest.raises(DayZeroError, match="unknown operator 'lienar'") as error:
        checked_table({"lienar": ()}, ["linear", "attention"])
    assert "attention, linear" in error.value.want
    with pytest.raises(DayZeroError, match="two of the same kernel for linear"):
        checked_table({"linear": (make_kernel(), make_kernel())}, ["linear"])


def test_the_registry_needs_no_torch() -> None:
    """So that `targets` or `plan` may ask which back ends there are without paying for it."""
    code = "import sys, dayzero.ops.registry; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
