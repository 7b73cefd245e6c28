"""A sound release in, everything out that is said against it: it should be nothing."""

from __future__ import annotations

import shutil
from pathlib import Path

from dayzero.core.errors import DayZeroError
from dayzero.core.plan import Layout
from dayzero.model.describe import describe
from dayzero.weights.convert import convert

# Doubts about the file, not the model; `cache_not_measured` and its like are about what can be measured here.
SUSPICIONS = ("config_", "odd_dtype", "missing_", "duplicate_", "unexpected_", "wrong_", "extra_", "misplaced_", "unlisted_",
              "total_size", "census", "digest_mismatch", "digest_conflict")  # fmt: skip


def alarms(folder: Path) -> list[str]:
    """It is described and converted, so that every tensor's values are looked at."""
    out = folder.with_name(folder.name + ".out")
    try:
        model = describe(folder)
        problems = [*model.problems, *convert(folder, model, Layout(), out, workers=1).problems]
    except DayZeroError as error:
        return [str(error)]
    finally:
        shutil.rmtree(out, ignore_errors=True)
    said = [one for one in problems if one.severity == "error" or one.kind.startswith(SUSPICIONS)]
    return list(dict.fromkeys(f"{one.kind}: {one.detail}" for one in said))
