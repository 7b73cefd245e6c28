"""Case SV-01: the pieces of a streamed text are the decoding of the whole, however the tokens come."""

from __future__ import annotations

import subprocess
import sys
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dayzero.core.errors import DayZeroError
from dayzero.serve.detokenize import MAX_WINDOW_TOKENS, REPLACEMENT, Detokenizer
from dayzero.serve.text import TextCodec
from tests.made_tokenizers import EOS_ID, make_byte_fallback_folder, make_byte_level_folder

BUILDERS = {"byte_level": make_byte_level_folder, "byte_fallback": make_byte_fallback_folder}
# Characters whose bytes are tokens of their own, joined emoji, Korean, accents, spaces at odd places, a real U+FFFD.
AWKWARD = ["😀", "👩‍👩‍👧", "한국어", "é", "e\u0301", " ", "  a", "\n", "\ufffd", "中", "a b", "\x00", "🏳️‍🌈", "ÿ", "tal alp"]
TEXTS = st.lists(st.sampled_from(AWKWARD) | st.text(max_size=4), max_size=12).map("".join)
BYTES = st.lists(st.sampled_from(list("aé中😀".encode())) | st.integers(0, 255), max_size=24).map(bytes)


@cache
def make_codec(kind: str) -> TextCodec:
    return TextCodec.load(BUILDERS[kind](Path(mkdtemp(prefix="dayzero-tokenizer-")) / kind))


def stream(codec: TextCodec, ids: tuple[int, ...], *, chunk: int = 1, continues: bool = False) -> list[str]:
    detokenizer = Detokenizer(codec, continues=continues)
    pieces = [detokenizer.push_all(ids[start : start + chunk]) for start in range(0, len(ids), chunk)]
    return [*pieces, detokenizer.flush()]


def byte_ids(codec: TextCodec, data: bytes) -> tuple[int, ...]:
    """One token per byte."""
    of_byte = {codec.token_bytes(token_id): token_id for token_id in range(3, 259)}
    return tuple(of_byte[bytes([byte])] for byte in data)


def assert_whole_prefixes(pieces: list[str], text: str) -> None:
    """No piece shows a character before it is complete, so that every partial text is a prefix of the whole."""
    shown = ""
    for piece in pieces:
        shown += piece
        assert text.startswith(shown), f"got {shown!r}, want a prefix of {text!r}"
    assert shown == text, f"got {shown!r}, want {text!r}"


@pytest.mark.parametrize("kind", BUILDERS)
@settings(max_examples=150, deadline=None)
@given(text=TEXTS, chunk=st.integers(1, 5))
@example(text="👩‍👩‍👧 x", chunk=1)
@example(text=" ", chunk=1)
@example(text="   ", chunk=1)
@example(text="\ufffd\ufffdé\ufffd", chunk=1)
def test_streamed_text_is_the_full_decode(kind: str, text: str, chunk: int) -> None:
    codec = make_codec(kind)
    ids = codec.encode(text, add_special_tokens=False)
    whole = codec.decode_visible(ids)
    assert whole == text
    assert_whole_prefixes(stream(codec, ids, chunk=chunk), text)


# Runs much longer than the window, of what gives it no place to slide: blank text, U+FFFD, characters of several bytes each.
RUNS = st.tuples(st.sampled_from(["\n", " ", "\u3000", "\u2029 ", "\ufffd", "\ufffd\u3000", "\x00"]), st.integers(1, 150))
LONG_TEXTS = st.lists(st.sampled_from(AWKWARD) | RUNS.map(lambda run: run[0] * run[1]), max_size=6).map("".join)


@pytest.mark.parametrize("kind", BUILDERS)
@settings(max_examples=60, deadline=None)
@given(text=LONG_TEXTS, continues=st.booleans())
@example(text=" " * 300 + "a", continues=False)
@example(text="\ufffd" * 100 + "😀" + "\u3000" * 100 + "é", continues=True)
def test_long_runs_without_a_place_to_slide_are_whole_too(kind: str, text: str, continues: bool) -> None:
    codec = make_codec(kind)
    ids = codec.encode(text, add_special_tokens=False)
    context = codec.context_ids if continues else ()
    want = codec.decode_visible((*context, *ids))[len(codec.decode_visible(context)) :]
    assert_whole_prefixes(stream(codec, ids, continues=continues), want)


@settings(max_examples=60, deadline=None)
@given(runs=st.lists(st.tuples(BYTES, st.integers(1, 40)), max_size=4), cut=st.integers(0, 3))
def test_the_window_is_cut_in_any_bytes_without_a_trace(runs: list[tuple[bytes, int]], cut: int) -> None:
    data = b"".join(piece * times for piece, times in runs) + "😀".encode()[:cut]
    codec = make_codec("byte_level")
    assert_whole_prefixes(stream(codec, byte_ids(codec, data)), data.decode("utf-8", "replace"))


class CountingCodec:
    """Counts the tokens that are decoded."""

    def __init__(self, codec: TextCodec) -> None:
        self._codec = codec
        self.num_decoded = 0
        self.context_ids, self.is_hidden, self.fallback_byte = codec.context_ids, codec.is_hidden, codec.fallback_byte

    def decode(self, ids: list[int]) -> str:
        self.num_decoded += len(ids)
        return self._codec.decode(ids)


@pytest.mark.parametrize("kind", BUILDERS)
@pytest.mark.parametrize("unit", ["\n", " ", "\ufffd", "a"], ids=repr)
def test_the_work_per_token_is_bounded(kind: str, unit: str) -> None:
    """Two thousand newlines once cost the square of that, in the loop that serves everyone."""
    codec = make_codec(kind)
    token_ids = codec.encode("x" + unit, add_special_tokens=False)[-len(unit.encode()) :] * 2000
    counting = CountingCodec(codec)
    Detokenizer(counting, continues=True).push_all(token_ids)
    assert counting.num_decoded <= 2 * MAX_WINDOW_TOKENS * len(token_ids)


@pytest.mark.parametrize("kind", BUILDERS)
@settings(max_examples=100, deadline=None)
@given(before=st.text("ab é", min_size=1, max_size=6), after=TEXTS)
def test_a_continuation_reads_on_from_its_prompt(kind: str, before: str, after: str) -> None:
    codec = make_codec(kind)
    prompt = codec.encode(before + "z", add_special_tokens=False)
    ids = codec.encode("z" + after, add_special_tokens=False)
    first = codec.encode("z", add_special_tokens=False)
    assert ids[: len(first)] == first, "a merge crosses the cut: choose another letter"
    ids = ids[len(first) :]
    assert "".join(stream(codec, ids, continues=True)) == codec.decode_visible(prompt + ids)[len(before) + 1 :]


@settings(max_examples=300, deadline=None)
@given(data=BYTES, chunk=st.integers(1, 5))
@example(data=b"\xf0\x9f\x98", chunk=1)
@example(data=b"a\xff\xfeb", chunk=1)
@example(data=b"\xe0\x80\x80 \xc3", chunk=2)
def test_byte_level_agrees_with_the_tokenizer_on_any_bytes(data: bytes, chunk: int) -> None:
    codec = make_codec("byte_level")
    ids = byte_ids(codec, data)
    want = data.decode("utf-8", "replace")
    assert codec.decode_visible(ids) == want, "the rule that a truncated character is one U+FFFD"
    assert_whole_prefixes(stream(codec, ids, chunk=chunk), want)


@settings(max_examples=300, deadline=None)
@given(data=BYTES)
def test_byte_fallback_decodes_bytes_by_the_same_rule(data: bytes) -> None:
    """The tokenizer itself turns a whole run of bytes, valid ones included, into U+FFFD when its last character is cut."""
    codec = make_codec("byte_fallback")
    ids = byte_ids(codec, b"x" + data)
    assert_whole_prefixes(stream(codec, ids), "x" + data.decode("utf-8", "replace"))


@pytest.mark.parametrize("kind", BUILDERS)
def test_nothing_is_lost_around_special_and_unknown_ids(kind: str) -> None:
    codec = make_codec(kind)
    e_acute = byte_ids(codec, "é".encode())
    ids = (EOS_ID, e_acute[0], EOS_ID, 100_000, e_acute[1], *codec.encode("a", add_special_tokens=False))
    text = "".join(stream(codec, ids))
    assert text.replace(" ", "") == "éa"


@pytest.mark.parametrize("kind", BUILDERS)
def test_a_partial_character_is_held_back_and_flushed_once(kind: str) -> None:
    codec = make_codec(kind)
    pieces = stream(codec, byte_ids(codec, "a😀".encode() + b"\xf0\x9f\x98"))
    assert pieces == ["a", "", "", "", "😀", "", "", "", REPLACEMENT]


def test_a_leading_space_after_partial_bytes() -> None:
    codec = make_codec("byte_fallback")
    space_a = codec.encode(" a", add_special_tokens=False)
    assert stream(codec, (*byte_ids(codec, b"x\xe4\xb8"), *space_a[1:]))[-2:] == [REPLACEMENT + " a", ""]


def test_a_folder_without_a_tokenizer_says_so(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(DayZeroError, match="holds no tokenizer"):
        TextCodec.load(tmp_path)


@pytest.mark.slow
def test_loading_a_tokenizer_json_needs_no_torch(tmp_path: Path) -> None:
    folder = make_byte_level_folder(tmp_path)
    code = f"""import sys; from pathlib import Path; from dayzero.serve.text import TextCodec
from dayzero.serve import app, launch, server
TextCodec.load(Path({str(folder)!r}))
sys.exit('torch' in sys.modules)"""
    subprocess.run([sys.executable, "-c", code], check=True)
