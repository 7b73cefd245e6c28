"""No false alarm: nothing is said of sound releases, whatever their architecture.

A sample; `scripts/damage_table.py --sound` takes every decoder type. Cites CK-14.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.damage.sound import alarms
from tests.tiny.build import make_tiny_checkpoint

# Odd by their build or by their numbers, and some plain ones.
SOUND_TYPES = ("llama", "mixtral", "deepseek_v3", "gpt_oss", "longcat_flash", "gpt2", "dory", "qwen3_next")


@pytest.mark.parametrize("model_type", SOUND_TYPES)
def test_no_false_alarm_on_sound_types(model_type: str, tmp_path: Path) -> None:
    assert alarms(make_tiny_checkpoint(model_type, tmp_path / model_type)) == []
