"""Random corruptions of a source checkpoint: all are found and named where digests are given. Cites CK-01, CK-02, CK-12.

`scripts/damage_table.py --faults N` runs more of them.
"""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest

from tests.damage.bases import make_dense
from tests.damage.faults import KINDS, fault_run

NUM_FAULTS, NUM_FAULTS_WITHOUT = 300, 100


@pytest.fixture(autouse=True)
def no_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here cuts the power, and waiting for the disk takes a third of a small conversion."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_dense(tmp_path_factory.mktemp("sound") / "dense")


def run_faults(sound: Path, tmp_path: Path, *, count: int, digests: bool) -> list[str]:
    """What was not found of `count` corruptions; the counts are printed."""
    other = make_dense(tmp_path / "other", seed=1)
    faults = fault_run(sound, other, tmp_path, count=count, seed=20260, digests=digests)
    missed = Counter(fault.kind for fault in faults if not fault.found)
    print(
        f"{len(faults) - missed.total()} of {len(faults)} found, {'with' if digests else 'without'} digests; missed: {missed}"
    )
    assert {fault.kind for fault in faults} == set(KINDS)
    assert not any(fault.outcome.left_behind for fault in faults)
    return [f"{fault.kind}: {fault.outcome.verdict} {fault.outcome.words[:300]}" for fault in faults if not fault.found]


def test_all_random_faults_are_found_with_digests(sound: Path, tmp_path: Path) -> None:
    assert run_faults(sound, tmp_path, count=NUM_FAULTS, digests=True) == []


def test_without_digests_only_values_can_hide(sound: Path, tmp_path: Path) -> None:
    """What nobody but the publisher can tell stays: bits and blocks of sound-looking values."""
    hidden = ("bit of the data", "bit of the index", "bit of a header", "block zeroed", "blocks exchanged",
              "shard of another revision", "tensors exchanged", "header that lies")  # fmt: skip
    missed = run_faults(sound, tmp_path, count=NUM_FAULTS_WITHOUT, digests=False)
    assert len(missed) < NUM_FAULTS_WITHOUT / 2 and not [line for line in missed if not line.startswith(hidden)]
