"""Case SV-02: stop strings against an oracle that sees the whole text."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dayzero.core.generation import TokenOutput
from dayzero.serve.choice import Choice
from dayzero.serve.stop_strings import StopMatcher
from tests.unit.test_detokenize import make_codec

STOPS = st.lists(st.text("ab😀", min_size=1, max_size=4), min_size=1, max_size=4).map(tuple)


def oracle(text: str, stops: tuple[str, ...], *, include: bool) -> tuple[str, str | None]:
    """The first place in the full text where any stop string begins; the shortest of those that begin there."""
    found = [(text.find(stop), len(stop), stop) for stop in stops if stop in text]
    if not found:
        return text, None
    start, length, stop = min(found)
    return text[: start + (length if include else 0)], stop


def run(pieces: list[str], stops: tuple[str, ...], *, include: bool = False) -> tuple[str, str | None]:
    matcher = StopMatcher(stops, include=include)
    out = ""
    for piece in pieces:
        out += matcher.push(piece)
        if matcher.matched is not None:
            return out, matcher.matched
    return out + matcher.flush(), matcher.matched


@settings(max_examples=500, deadline=None)
@given(pieces=st.lists(st.text("ab😀", max_size=4), max_size=10), stops=STOPS, include=st.booleans())
@example(pieces=["x", "abc", "dy"], stops=("abcd", "bc"), include=False)
@example(pieces=["x", "abc", "ey"], stops=("abcd", "bc"), include=False)
@example(pieces=list("aaab"), stops=("aab",), include=False)
@example(pieces=["a", "b"], stops=("ab", "a"), include=True)
@example(pieces=["a"], stops=("abbbbbb",), include=False)
def test_the_text_ends_where_the_oracle_says(pieces: list[str], stops: tuple[str, ...], include: bool) -> None:
    assert run(pieces, stops, include=include) == oracle("".join(pieces), stops, include=include)


@settings(max_examples=300, deadline=None)
@given(text=st.text("ab", max_size=12), stops=STOPS)
def test_only_a_proper_prefix_of_a_stop_is_withheld(text: str, stops: tuple[str, ...]) -> None:
    matcher = StopMatcher(stops, include=False)
    shown = ""
    for place, char in enumerate(text):
        shown += matcher.push(char)
        if matcher.matched is not None:
            return
        held = text[len(shown) : place + 1]
        # Also while a match waits for one that began before it.
        assert not held or any(stop.startswith(held) and stop != held for stop in stops), (held, stops)


def test_text_that_cannot_match_is_not_delayed() -> None:
    matcher = StopMatcher(("beta gamma",), include=False)
    assert [matcher.push(piece) for piece in ("alpha ", "be", "at ", "beta g", "o")] == ["alpha ", "", "beat ", "", "beta go"]


def generate(text: str, stops: tuple[str, ...], *, include: bool = False, min_tokens: int = 0, finish: str = "length"):
    """A choice fed with a text's tokens: (text, finish reason, tokens counted)."""
    codec = make_codec("byte_level")
    choice = Choice(index=0, codec=codec, stops=stops, include_stop=include, min_tokens=min_tokens, continues=False,
                    wants_logprobs=False)  # fmt: skip
    ids = list(codec.encode(text, add_special_tokens=False))
    outputs = [TokenOutput(request_id="r", token_id=token_id) for token_id in ids[:-1]]
    outputs.append(TokenOutput(request_id="r", token_id=ids[-1], finish_reason=finish))
    pieces = []
    for output in outputs:
        pieces.append(choice.feed(output))
        if choice.finished:
            break
    return "".join(piece.text for piece in pieces), pieces[-1].finish_reason, choice.num_tokens


@pytest.mark.parametrize(
    ("stops", "include", "want"),
    [
        (("beta gamma",), False, ("alpha ", "stop")),
        (("beta gamma",), True, ("alpha beta gamma", "stop")),
        (("delta", "lp"), False, ("a", "stop")),
        (("alpha",), False, ("", "stop")),
        (("delta!",), False, ("alpha beta gamma delta", "length")),
        (("alpha beta gamma delta and more",), False, ("alpha beta gamma delta", "length")),
    ],
)
def test_a_choice_ends_before_its_stop_string(stops: tuple[str, ...], include: bool, want: tuple[str, str]) -> None:
    text, finish, num_tokens = generate("alpha beta gamma delta", stops, include=include)
    assert (text, finish) == want
    whole = len(make_codec("byte_level").encode("alpha beta gamma delta", add_special_tokens=False))
    assert num_tokens <= whole and (finish == "stop" or num_tokens == whole), "usage counts what was generated"


def test_a_stop_string_of_several_bytes_split_over_tokens() -> None:
    assert generate("ab😀cd", ("😀c",))[:2] == ("ab", "stop")
    assert generate("ab😀cd", ("😁",))[:2] == ("ab😀cd", "length")


def test_the_end_token_has_no_text_and_is_counted() -> None:
    codec = make_codec("byte_level")
    assert generate("abcd", (), finish="stop") == ("abc", "stop", len(codec.encode("abcd", add_special_tokens=False)))


def test_no_match_before_min_tokens() -> None:
    assert generate("xyxyxy", ("y",))[:2] == ("x", "stop")
    assert generate("xyxyxy", ("y",), min_tokens=3)[:2] == ("xyx", "stop")
    assert generate("xyxyxy", ("y",), min_tokens=6)[:2] == ("xyxyxy", "length")
