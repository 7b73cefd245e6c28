"""What all tests share: the `--device` option, one marker per test folder, and generated checkpoints.

torch is imported inside fixtures alone, so that unit tests stay free of it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
# Run from any folder, with or without an installed package.
for folder in (TESTS.parent, TESTS.parent / "src"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

# Before torch is imported anywhere. More threads only wait for each other on models this small.
os.environ.setdefault("OMP_NUM_THREADS", "2")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

MARKERS = {
    "unit": "no torch, seconds",
    "model": "tiny generated checkpoints and full-size configs on the meta device",
    "device": "values of operators on --device against their float64 definition",
    "e2e": "through the command line, with a generated model",
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", default="cpu", help="torch device the `device` tests run on (default: cpu)")


def pytest_configure(config: pytest.Config) -> None:
    for name, meaning in MARKERS.items():
        config.addinivalue_line("markers", f"{name}: {meaning}")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        path = Path(item.path)
        if TESTS in path.parents:
            folder = path.relative_to(TESTS).parts[0]
            if folder in MARKERS:
                item.add_marker(folder)


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> str:
    """The torch device string given on the command line."""
    return request.config.getoption("--device")


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`tiny_checkpoint("llama", dtype="float32")` -> a release folder, built once per session. Treat it as read-only.

    Further keywords are those of `tests.tiny.build.make_tiny_checkpoint`; each combination is a folder of its own.
    """
    built: dict[tuple, Path] = {}

    def build(model_type: str, dtype: str = "bfloat16", **options: object) -> Path:
        from tests.tiny.build import make_tiny_checkpoint

        key = (model_type, dtype, *sorted(options.items()))
        if key not in built:
            folder = tmp_path_factory.mktemp(f"{model_type}-{dtype}") / model_type
            built[key] = make_tiny_checkpoint(model_type, folder, dtype=dtype, **options)
        return built[key]

    return build
