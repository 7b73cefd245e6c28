"""Every kind of damage is refused or named, and sound releases are not.

The same, beside today's tools, as a table: scripts/damage_table.py; random faults: test_faults. Cites CK-01, CK-02, CK-04, CK-06,
CK-07, CK-09, CK-12, CK-14, CK-15.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dayzero.core.plan import Layout
from dayzero.model.describe import describe
from dayzero.weights.convert import convert
from tests.damage.bases import BASES
from tests.damage.damages import ALL, LAYERS, Damage
from tests.damage.outcomes import dayzero, warnings_of, write_digests

DOCUMENT = Path(__file__).parents[2] / "docs" / "damage.md"
Sound = Callable[[str], tuple[Path, frozenset[str]]]


@pytest.fixture(autouse=True)
def no_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here cuts the power, and waiting for the disk takes a third of a small conversion."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Sound:
    """A sound release of a base and what is said of it; each is made once. Read only."""
    made: dict[str, tuple[Path, frozenset[str]]] = {}

    def make(base: str) -> tuple[Path, frozenset[str]]:
        if base not in made:
            folder = BASES[base](tmp_path_factory.mktemp(base) / base)
            made[base] = folder, warnings_of(folder, folder.parent / "out")
        return made[base]

    return make


def of_layers(*layers: str) -> list[Any]:
    """Kinds of damage as parameters."""
    return [pytest.param(one, id=one.name) for one in ALL if one.layer in layers]


def assert_found(damage: Damage, sound: Sound, tmp_path: Path, *, digests: bool = False) -> None:
    source, known = sound(damage.base)
    folder = Path(shutil.copytree(source, tmp_path / "model"))
    if digests:
        write_digests(folder)
    touched = damage.apply(folder)
    outcome = dayzero(folder, tmp_path / "out", known)
    assert outcome.verdict != "silent", f"{damage.name} passes"
    assert outcome.names(touched), f"{damage.name}: none of {sorted(touched)[:9]} in {outcome.words[:2000]}"
    assert not outcome.left_behind
    assert sorted(path.name for path in tmp_path.iterdir() if not path.name.startswith("model")) == []


def test_there_are_more_kinds_than_were_published() -> None:
    assert len(ALL) >= 68 and {one.layer for one in ALL} == set(LAYERS)


@pytest.mark.parametrize("damage", of_layers("container", "index", "schema"))
def test_what_files_index_and_schema_show_is_named_before_a_tensor_is_moved(
    damage: Damage, sound: Sound, tmp_path: Path
) -> None:
    assert_found(damage, sound, tmp_path)


@pytest.mark.parametrize("damage", of_layers("values"))
def test_what_values_show_is_named(damage: Damage, sound: Sound, tmp_path: Path) -> None:
    assert_found(damage, sound, tmp_path)


@pytest.mark.parametrize("damage", of_layers("values", "digests"))
def test_digests_show_everything(damage: Damage, sound: Sound, tmp_path: Path) -> None:
    assert_found(damage, sound, tmp_path, digests=True)


def test_the_report_says_whether_there_were_digests(sound: Sound, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(sound("dense")[0], tmp_path / "model"))
    told = {}
    for name in ("without", "with"):
        report = convert(folder, describe(folder), Layout(), tmp_path / name)
        told[name] = [problem for problem in report.problems if "digest" in problem.kind]
        write_digests(folder)
    assert [problem.severity for problem in told["without"]] == ["warning"] and not told["with"]


@pytest.mark.parametrize("base", BASES)
def test_sound_releases_are_converted_without_a_word_of_damage(base: str, sound: Sound) -> None:
    said = [line for line in sound(base)[1] if "digest" not in line]
    assert said == []


def test_the_document_lists_every_kind() -> None:
    rows = re.findall(r"^\| ([^|]+?) +\| (\w+) +\|", DOCUMENT.read_text(encoding="utf-8"), re.MULTILINE)
    listed = [row for row in rows if row[1] in LAYERS]
    assert listed == [(one.name, one.layer) for one in ALL], "remake docs/damage.md: scripts/damage_table.py"
