"""Cases SV-04, SV-08 and SV-09 at the level of functions: what a request may say, and what is made of it."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dayzero.core.errors import DayZeroError
from dayzero.serve.body import parse_json
from dayzero.serve.chat import read_messages, read_template_arguments
from dayzero.serve.errors import ApiError, quote
from dayzero.serve.fields import Fields
from dayzero.serve.requests import Prompt, finish, read_chat, read_completion, read_prompts
from dayzero.serve.responses import json_logprob
from dayzero.serve.spec import ServerSpec
from tests.bad_requests import BAD_CHAT_FIELDS, BAD_COMPLETION_FIELDS, BAD_FIELDS
from tests.scripted_engine import make_info

MAX_ANSWER_CHARS = 1000


def parse_completion(body: dict[str, Any], **limits: int):
    """As the server does it, with one token per character."""
    info = make_info(**limits)
    fields, options, echo = read_completion({"model": "m"} | body, info, "m")
    prompts = [
        Prompt(token_ids=tuple(5 for _ in prompt) if isinstance(prompt, str) else prompt, text=None, param=param)
        for param, prompt in read_prompts(fields, info, max_prompts=100)
    ]
    return finish("completions", fields, options, prompts, info, echo=echo)


def parse_chat(body: dict[str, Any], template: str = "", **limits: int):
    info = make_info(**limits)
    fields, options = read_chat({"model": "m"} | body, info, "m")
    messages = read_messages(fields, template)
    read_template_arguments(fields)
    text = "".join(message["content"] for message in messages)
    prompt = Prompt(token_ids=tuple(5 for _ in text), text=text, param="messages")
    return messages, finish("chat/completions", fields, options, [prompt], info)


def assert_refused(error: ApiError, param: str | None) -> None:
    assert error.status == 400 and error.param == param, error.body()
    assert param is None or param.split(".")[0].split("[")[0] in error.message
    assert len(json.dumps(error.body())) < MAX_ANSWER_CHARS


@pytest.mark.parametrize(("name", "value", "param"), BAD_FIELDS + BAD_COMPLETION_FIELDS, ids=lambda value: quote(value)[:40])
def test_a_bad_completion_is_refused_naming_the_field(name: str, value: Any, param: str) -> None:
    started = time.process_time()
    with pytest.raises(ApiError) as refused:
        parse_completion({"prompt": "abc", name: value})
    assert time.process_time() - started < 0.1
    assert_refused(refused.value, param)


@pytest.mark.parametrize(("name", "value", "param"), BAD_FIELDS + BAD_CHAT_FIELDS, ids=lambda value: quote(value)[:40])
def test_a_bad_chat_is_refused_naming_the_field(name: str, value: Any, param: str) -> None:
    with pytest.raises(ApiError) as refused:
        parse_chat({"messages": [{"role": "user", "content": "abc"}], name: value})
    assert_refused(refused.value, param)


@pytest.mark.parametrize("text", ["NaN", "Infinity", "-Infinity"])
def test_numbers_that_json_does_not_have_are_refused(text: str) -> None:
    with pytest.raises(ApiError, match="no JSON number"):
        parse_json(f'{{"temperature": {text}}}'.encode())
    with pytest.raises(ApiError, match="temperature"):  # a JSON number that no float holds
        parse_completion({"prompt": "a"} | parse_json(b'{"temperature": 1e999}'))


@pytest.mark.parametrize(
    "data",
    [b"", b"{", b"[]", b"7", b"null", b'{"a":}', b"\xff\xfe", b'{"a": ' + b"9" * 5000 + b"}", b"[" * 99_999, b'{"a":' * 99_999],
    ids=range(10),
)
def test_what_is_no_json_object_is_refused(data: bytes) -> None:
    with pytest.raises(ApiError) as refused:
        parse_json(data)
    assert_refused(refused.value, None)


@settings(max_examples=120, deadline=None)
@given(
    body=st.dictionaries(
        st.sampled_from([name for name, _, _ in BAD_FIELDS + BAD_COMPLETION_FIELDS + BAD_CHAT_FIELDS]) | st.text(max_size=3),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
            lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
        ),
        max_size=4,
    )
)
def test_no_json_value_is_more_than_a_refusal(body: dict[str, Any]) -> None:
    """Whatever the fields hold: a parsed request or an ApiError, never another exception."""
    for parse in (parse_completion, parse_chat):
        try:
            parse({"prompt": "abc", "messages": [{"role": "user", "content": "a"}]} | body)
        except ApiError as error:
            assert error.status in (400, 404)


def test_null_is_absent_and_defaults_are_neutral() -> None:
    nulls = dict.fromkeys([name for name, _, _ in BAD_FIELDS if name not in ("model",)])
    assert parse_completion({"prompt": "abc"} | nulls) == parse_completion({"prompt": "abc"})
    sampling = parse_completion({"prompt": "abc"}).options.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.repetition_penalty) == (1.0, 1.0, 0, 1.0)


def test_unknown_fields_are_listed_and_change_nothing() -> None:
    plain, odd = parse_completion({"prompt": "abc"}), parse_completion({"prompt": "abc", "frobnicate": 7, "user": "me"})
    assert odd.ignored == ("frobnicate",) and odd.options == plain.options


def test_unknown_fields_of_stream_options_are_listed_too() -> None:
    plain = {"prompt": "abc", "stream": True, "stream_options": {"include_usage": True}}
    odd = plain | {"stream_options": {"include_usage": True, "include_obfuscation": False}}
    assert parse_completion(odd).ignored == ("stream_options.include_obfuscation",)
    assert parse_completion(odd).options == parse_completion(plain).options
    with pytest.raises(ApiError) as refused:
        parse_completion(plain | {"stream_options": {"include_usage": 1}})
    assert_refused(refused.value, "stream_options.include_usage")


def test_an_unknown_model_is_404() -> None:
    with pytest.raises(ApiError) as refused:
        parse_completion({"model": "x" * 10_000, "prompt": "abc"})
    assert (refused.value.status, refused.value.param, refused.value.code) == (404, "model", "model_not_found")
    assert len(refused.value.message) < MAX_ANSWER_CHARS


# -- SV-09: context 64 ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_prompt", "fields", "budget"),
    [
        (60, {}, 4),
        (60, {"max_tokens": None}, 4),
        (60, {"max_tokens": 4}, 4),
        (63, {}, 1),
        (1, {"max_completion_tokens": 63}, 63),
        (10, {"max_tokens": 5, "max_completion_tokens": 5}, 5),
        (10, {"max_tokens": 0, "echo": True}, 1),
    ],
)
def test_lengths_that_fit(num_prompt: int, fields: dict[str, Any], budget: int) -> None:
    assert parse_completion({"prompt": [5] * num_prompt} | fields, context_tokens=64).budgets == (budget,)
    if "echo" not in fields:
        messages = [{"role": "user", "content": "a" * num_prompt}]
        assert parse_chat({"messages": messages} | fields, context_tokens=64)[1].budgets == (budget,)


@pytest.mark.parametrize(
    ("num_prompt", "fields", "param", "numbers"),
    [
        (60, {"max_tokens": 16}, "max_tokens", ("60", "16", "64")),
        (60, {"max_completion_tokens": 16}, "max_completion_tokens", ("60", "16", "64")),
        (64, {}, "PROMPT", ("64",)),
        (65, {}, "PROMPT", ("65", "64")),
        (65, {"max_tokens": 1}, "PROMPT", ("65", "64")),
        (10, {"max_tokens": 10**9}, "max_tokens", ("10", "1000000000", "64")),
        (10, {"max_tokens": 5, "max_completion_tokens": 6}, "max_completion_tokens", ("5", "6")),
    ],
)
def test_lengths_that_do_not_fit(num_prompt: int, fields: dict[str, Any], param: str, numbers: tuple[str, ...]) -> None:
    """The message names the numbers."""
    messages = [{"role": "user", "content": "a" * num_prompt}]
    for parse, body, prompt_param in (
        (parse_completion, {"prompt": [5] * num_prompt}, "prompt"), (parse_chat, {"messages": messages}, "messages"),
    ):  # fmt: skip
        with pytest.raises(ApiError) as refused:
            parse(body | fields, context_tokens=64)
        assert_refused(refused.value, prompt_param if param == "PROMPT" else param)
        assert all(number in refused.value.message for number in numbers), refused.value.message


def test_what_the_cache_can_never_hold_names_the_capacity() -> None:
    """KV-08: a pool of 128 tokens and a context of 512."""
    limits = {"context_tokens": 512, "capacity_tokens": 128}
    for body in ({"prompt": [5] * 200}, {"prompt": [5] * 100, "max_tokens": 100}):
        with pytest.raises(ApiError, match=r"capacity of the cache.*128"):
            parse_completion(body, **limits)
    assert parse_completion({"prompt": [5] * 100}, **limits).budgets == (28,)


# -- SV-08: messages --------------------------------------------------------------------------------------------


def test_messages_are_brought_to_one_form() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    messages, _ = parse_chat(
        {
            "messages": [
                {"role": "developer", "content": "d"},
                {"role": "user", "content": [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]},
                {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "content": "42"},
                {"role": "assistant", "content": None, "tool_calls": []},
                {"role": "assistant", "content": "x", "tool_calls": None, "refusal": None},
            ]
        }
    )
    assert messages == [
        {"role": "system", "content": "d"},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "", "tool_calls": [call | {"function": {"name": "f", "arguments": {"x": 1}}}]},
        {"role": "tool", "content": "42"},
        {"role": "assistant", "content": ""},
        {"role": "assistant", "content": "x"},
    ]


def test_a_template_that_knows_developers_gets_them() -> None:
    messages, _ = parse_chat({"messages": [{"role": "developer", "content": "d"}]}, "{% if m.role == 'developer' %}")
    assert messages[0]["role"] == "developer"


# -- the rest ---------------------------------------------------------------------------------------------------


def test_logprobs_are_json_numbers() -> None:
    assert (json_logprob(None), json_logprob(-0.5)) == (None, -0.5)
    assert {json_logprob(value) for value in (float("-inf"), float("nan"), -1e30)} == {-9999.0}


@pytest.mark.parametrize("wrong", [{"engine_factory": "nothing"}, {"port": 70_000}, {"grace_s": -1.0}, {"max_queue": -1}])
def test_a_wrong_spec_says_so(wrong: dict[str, Any]) -> None:
    with pytest.raises(DayZeroError):
        ServerSpec(**{"engine_factory": "a:b", "served_model_name": "m"} | wrong)


def test_fields_know_what_nobody_read() -> None:
    assert Fields({"a": None}).integer("a", 0, 1) is None and Fields({"b": 1}).unread == ["b"]
