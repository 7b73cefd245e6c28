"""Codes chosen on text, for the verb `convert`: it stands between the command line and `calibrate`."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dayzero.core.errors import DayZeroError

Say = Callable[[str], None]
BUNDLED = "default"
METHODS = ("gptq", "scales")


def calibrated_codes(path: Path, policy: Any, data: str, method: str, folder: Path, say: Say) -> Any:
    """`GivenCodes` of a release folder for a policy. `data`: a JSONL or text file, or "default" for the bundled text.

    `folder` holds what is finished, layer by layer: a run that was cut off goes on there. Raises DayZeroError.
    """
    from dayzero.calibrate.from_release import calibrate
    from dayzero.calibrate.records import Settings
    from dayzero.model.describe import describe_release
    from dayzero.model.release import open_release
    from dayzero.weights.quantize.codes import Codes
    from dayzero.weights.quantize.given import GivenCodes

    if method not in METHODS:
        raise DayZeroError("unknown way to calibrate", got=method, want=" or ".join(METHODS), fix="correct --method")
    if data != BUNDLED and not Path(data).is_file():
        raise DayZeroError(f"there is no calibration text at {data}", got="no such file",
                           want="a .jsonl or text file, or default", fix="correct --calibrate")  # fmt: skip
    release = open_release(path).require_weights()
    settings = Settings(method=method)  # type: ignore[arg-type]
    found = calibrate(release, describe_release(release), policy, None if data == BUNDLED else Path(data), folder,
                      settings=settings, log=say)  # fmt: skip
    for one in found.starved:
        say(f"{one.parameter}[{one.index}] is rounded by its weight alone: {one.reason} ({one.tokens} tokens)")
    lock = threading.Lock()

    def guarded(read: Callable[[int, int], Codes]) -> Callable[[int, int], Codes]:
        def locked(start: int, stop: int) -> Codes:
            with lock:
                return read(start, stop)

        return locked

    reads = {name: read for name in found.presets if (read := found.codes(name)) is not None}
    facts = {"method": method, **{key: str(value) for key, value in _facts(found.record.data).items()}}
    return GivenCodes(codes={name: guarded(read) for name, read in reads.items()}, input_scales=found.input_scales, facts=facts)


def _facts(data: Any) -> dict[str, Any]:
    from dayzero.core.records import to_dict

    return to_dict(data)


def discard(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
