"""The shape of the house, kept by a test: who imports whom, no architecture named, no torch where none is wanted."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[2] / "src" / "dayzero"

# What each package may import of the others (DESIGN: core <- ops <- model <- {weights, devices} <- runtime <- serve).
BELOW = {
    "core": set(),
    "ops": {"core"},
    "model": {"core", "ops"},
    "weights": {"core", "ops", "model"},
    "devices": {"core", "ops", "model"},
    "runtime": {"core", "ops", "model", "weights", "devices"},
    "calibrate": {"core", "ops", "model", "weights", "runtime"},
    "serve": {"core", "ops", "model", "weights", "devices", "runtime"},
    "validate": {"core", "ops", "model", "weights", "devices", "runtime"},
    "plan": {"core"},
    "report": {"core"},
}
NO_TORCH = ("core", "plan", "report")
ARCHITECTURES = re.compile(r"llama|qwen|deepseek|kimi|gpt_oss|minimax|gemma|mixtral|nemotron|glm", re.IGNORECASE)
# The GGUF format itself is named after the program that defined it.
ALLOWED = re.compile(r"llama\.cpp|llama-vocab")


def imports_of(path):
    """Absolute names of everything a file imports, wherever in it."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 or path.name == "__init__.py", f"{path}: relative import"
            if node.level:
                continue
            yield node.module or ""


def test_every_package_is_in_the_table():
    packages = {path.parent.name for path in SOURCE.glob("*/__init__.py")}
    assert packages == set(BELOW)


@pytest.mark.parametrize("package", sorted(BELOW))
def test_imports_run_one_way(package):
    for path in (SOURCE / package).rglob("*.py"):
        for name in imports_of(path):
            parts = name.split(".")
            if parts[0] == "dayzero" and len(parts) > 1 and (SOURCE / parts[1]).is_dir():
                assert parts[1] == package or parts[1] in BELOW[package], f"{path.relative_to(SOURCE)} imports {name}"
            elif parts[0] == "dayzero" and len(parts) > 1:
                raise AssertionError(f"{path.relative_to(SOURCE)} imports {name}: the command line is above every package")


@pytest.mark.parametrize("package", NO_TORCH)
def test_some_packages_never_load_torch(package):
    for path in (SOURCE / package).rglob("*.py"):
        for name in imports_of(path):
            assert name.split(".")[0] not in ("torch", "transformers", "safetensors"), f"{path.relative_to(SOURCE)} imports {name}"


def test_the_command_line_starts_without_torch():
    code = "import sys, dayzero.cli, dayzero.pipeline, dayzero.stages; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_no_architecture_is_named():
    for path in [*SOURCE.rglob("*.py"), *SOURCE.rglob("*.cpp"), *SOURCE.rglob("*.h"), *SOURCE.rglob("*.j2")]:
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            assert not ARCHITECTURES.search(ALLOWED.sub("", line)), f"{path.relative_to(SOURCE)}:{number}: {line.strip()}"


def test_the_pipeline_is_short_and_files_are_of_readable_size():
    assert len((SOURCE / "pipeline.py").read_text().splitlines()) < 150
    long = {str(path.relative_to(SOURCE)): n for path in SOURCE.rglob("*.py") if (n := len(path.read_text().splitlines())) > 400}
    assert not long, f"two files each: {long}"
