"""Calibration text: forms of the file, two parts that share nothing, and what is refused."""

import json
import re

import pytest

from dayzero.calibrate.text import DEFAULT_TEXT, Encoder, byte_encoder, read_sequences
from dayzero.core.errors import DayZeroError

BYTES = byte_encoder(256)


def windows(sequences, width=40):
    """Every run of so many tokens."""
    return {tuple(one[start : start + width]) for one in sequences for start in range(len(one) - width)}


def test_the_default_is_split_into_parts_that_share_no_text():
    made = read_sequences(None, BYTES, length=256, calibration=10_000, held_out=10_000)
    assert len(made.calibration) > 400 and len(made.held_out) > 80
    assert {len(one) for one in made.calibration + made.held_out} == {256}
    assert made.licence and "PSF" in made.licence and (DEFAULT_TEXT.parent / "LICENSE.txt").stat().st_size > 5000
    common = windows(made.calibration) & windows(made.held_out)
    # Phrases that documentation repeats ("If the optional argument ... is true") are text of both; runs of them are not.
    assert len(common) < 0.002 * len(windows(made.held_out)), len(common)
    assert re.fullmatch("[0-9a-f]{64}", made.sha256)


def test_a_document_keeps_its_part_when_others_come(tmp_path):
    lines = [json.dumps({"tokens": [number] * 8}) for number in range(64)]
    parts = []
    for count in (32, 64):
        path = tmp_path / f"{count}.jsonl"
        path.write_text("\n".join(lines[:count]))
        made = read_sequences(path, BYTES, length=8, calibration=99, held_out=99)
        parts.append((made.calibration, made.held_out))
    for few, many in zip(*parts, strict=True):
        assert all(one in many for one in few)
    assert not windows(parts[1][0], 7) & windows(parts[1][1], 7)
    assert len(parts[1][0]) + len(parts[1][1]) == 64


def test_the_same_document_twice_counts_once(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text("\n".join([json.dumps({"tokens": [1] * 8})] * 5 + [json.dumps({"tokens": [n] * 8}) for n in range(2, 30)]))
    made = read_sequences(path, BYTES, length=8, calibration=99, held_out=99)
    assert sum(one == [1] * 8 for one in made.calibration + made.held_out) == 1


def test_messages_go_through_the_chat_template(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text("\n".join(json.dumps({"messages": [{"role": "user", "content": f"message {n}"}]}) for n in range(40)))
    chat = Encoder(
        encode=str.encode, render=lambda messages: f"<{messages[0]['role']}>{messages[0]['content']}", separator=(0,)
    )
    made = read_sequences(path, chat, length=16, calibration=99, held_out=99)
    text = bytes(made.calibration[0] + made.calibration[1]).decode()
    assert "<user>message" in text and "\0" in text
    with pytest.raises(DayZeroError, match="holds messages"):
        read_sequences(path, BYTES, length=16, calibration=99, held_out=99)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ('{"text": "a"}\n{"txt": "b"}', "2 is no document"),
        ('{"text": "a"}\n{', "2 is not JSON"),
        ('{"text": "a"}', "too little"),
    ],
)
def test_what_is_wrong_with_the_file_is_said_by_line(tmp_path, content, told):
    path = tmp_path / "x.jsonl"
    path.write_text(content)
    with pytest.raises(DayZeroError, match=told):
        read_sequences(path, BYTES, length=8, calibration=1, held_out=1)


def test_few_tokens_and_no_tokenizer_is_refused():
    with pytest.raises(DayZeroError, match="without a tokenizer"):
        byte_encoder(100)
