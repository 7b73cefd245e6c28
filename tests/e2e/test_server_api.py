"""The HTTP interface through a real server with a scripted engine, which generates each prompt back (tests/scripted_engine).

Cases SV-01, SV-02, SV-04, SV-05, SV-08, SV-09, SV-10.
"""

from __future__ import annotations

import json
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from dayzero.core.records import to_dict
from dayzero.serve.launch import ServerProcess
from dayzero.serve.requests import derived_seed
from tests.bad_requests import BAD_CHAT_FIELDS, BAD_COMPLETION_FIELDS, BAD_FIELDS
from tests.made_tokenizers import make_byte_level_folder
from tests.scripted_engine import FAIL_ALONE, FAIL_IN_ADD, VOCAB_SIZE, make_info
from tests.serving import MODEL, ask, complete, events, gauge, make_client, make_server, strict_json

AWKWARD = "Ünï 👩‍👩‍👧 한국어 é  two"
MAX_BODY_BYTES = 2 << 20  # the largest row of the table of bad requests is below it


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("server")
    tokenizer = make_byte_level_folder(folder / "tokenizer")
    with make_server(folder, tokenizer=tokenizer, max_body_bytes=MAX_BODY_BYTES, template_timeout_s=1.0) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[httpx.Client]:
    with make_client(server) as client:
        yield client


def gather(response: httpx.Response) -> dict[int, dict[str, Any]]:
    """A stream put together, per choice: text, ids, logprobs, finish reason."""
    assert response.status_code == 200, response.text
    *chunks, done = events(response)
    assert done == "[DONE]"
    choices: dict[int, dict[str, Any]] = defaultdict(lambda: {"text": "", "ids": [], "logprobs": [], "finish": None})
    for chunk in chunks:
        for choice in chunk["choices"]:
            into = choices[choice["index"]]
            assert into["finish"] is None, "a choice goes on after its end"
            into["text"] += choice["text"] if "text" in choice else choice["delta"].get("content", "")
            into["ids"] += choice.get("token_ids", [])
            into["logprobs"] += _logprob_entries(choice["logprobs"])
            into["finish"] = choice["finish_reason"]
    return dict(choices)


def gather_whole(response: httpx.Response) -> dict[int, dict[str, Any]]:
    assert response.status_code == 200, response.text
    return {
        choice["index"]: {"text": choice["text"] if "text" in choice else choice["message"]["content"],
                          "ids": choice.get("token_ids", []), "logprobs": _logprob_entries(choice["logprobs"]),
                          "finish": choice["finish_reason"]}
        for choice in strict_json(response.text)["choices"]
    }  # fmt: skip


def _logprob_entries(logprobs: dict[str, Any] | None) -> list[Any]:
    if logprobs is None:
        return []
    if "content" in logprobs:
        return logprobs["content"]
    return list(zip(*(logprobs[name] for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")), strict=True))


# -- the official client ----------------------------------------------------------------------------------------


def test_the_official_client_works(server: ServerProcess) -> None:
    direct = openai.DefaultHttpxClient(trust_env=False)
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, http_client=direct) as client:
        (model,) = client.models.list().data
        assert model.id == MODEL and client.models.retrieve(MODEL).id == MODEL
        completion = client.completions.create(model=MODEL, prompt="alpha beta", max_tokens=50, logprobs=1)
        assert completion.choices[0].text == "alpha beta" and completion.choices[0].finish_reason == "stop"
        assert completion.usage is not None and completion.choices[0].logprobs is not None
        assert completion.usage.completion_tokens == completion.usage.prompt_tokens + 1  # the end token
        pieces = client.completions.create(model=MODEL, prompt=AWKWARD, stream=True)
        assert "".join(chunk.choices[0].text for chunk in pieces) == AWKWARD
        chat = client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "hello"}], logprobs=True)
        assert chat.choices[0].message.content == "user:helloassistant:" and chat.choices[0].logprobs is not None
        stream = client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": AWKWARD}], stream=True, stream_options={"include_usage": True}
        )
        chunks = list(stream)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == f"user:{AWKWARD}assistant:"
        assert chunks[0].choices[0].delta.role == "assistant" and chunks[-2].choices[0].finish_reason == "stop"
        assert chunks[-1].usage is not None and chunks[-1].usage.total_tokens > 0 and not chunks[-1].choices
        with pytest.raises(openai.BadRequestError, match="temperature") as refused:
            client.completions.create(model=MODEL, prompt="a", temperature=3)
        assert refused.value.param == "temperature"
        with pytest.raises(openai.NotFoundError):
            client.completions.create(model="another", prompt="a")


def test_models_say_what_is_served(client: httpx.Client) -> None:
    (model,) = client.get("/v1/models").json()["data"]
    assert (model["tier"], model["prefix_reuse"], model["context_tokens"]) == ("T2", True, 4096)
    assert model["towers_not_served"] == ["vision"]
    assert (model["batch_invariant"], model["fallbacks"]) == (True, ["it is scripted"])
    assert model["engine"] == json.loads(json.dumps(to_dict(make_info())))
    assert client.get("/v1/models/nothing").status_code == 404


# -- streamed and whole are equal -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"max_tokens": 5},
        {"stop": "ha b"},
        {"stop": ["한국", "é"], "include_stop_str_in_output": True},
        {"n": 3, "seed": 5},
        {"n": 2, "seed": 7, "stop": [" "]},
        {"stop_token_ids": [*range(70, 76)]},
        {"min_tokens": 8, "stop": "a"},
        {"ignore_eos": True, "max_tokens": 60},
    ],
    ids=str,
)
def test_streamed_and_whole_answers_are_equal(client: httpx.Client, fields: dict[str, Any]) -> None:
    text = f"alpha beta {AWKWARD}"
    extra = fields | {"return_token_ids": True}
    for whole, streamed in (
        (complete(client, text, logprobs=2, **extra), complete(client, text, logprobs=2, stream=True, **extra)),
        (ask(client, text, logprobs=True, top_logprobs=2, **extra),
         ask(client, text, logprobs=True, top_logprobs=2, stream=True, **extra)),
    ):  # fmt: skip
        assert gather(streamed) == gather_whole(whole)
        usage = whole.json()["usage"]
        assert usage["completion_tokens"] == sum(len(choice["ids"]) for choice in gather_whole(whole).values())
        for choice in gather_whole(whole).values():
            assert len(choice["logprobs"]) == len(choice["ids"])


def test_a_stop_string_ends_text_and_engine_request(client: httpx.Client) -> None:
    answer = complete(client, "alpha beta gamma delta", stop=["beta gamma"]).json()
    assert (answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]) == ("alpha ", "stop")
    assert answer["choices"][0]["stop_reason"] == "beta gamma"
    assert answer["usage"]["completion_tokens"] < answer["usage"]["prompt_tokens"]


def test_a_truncated_character_is_one_replacement(client: httpx.Client) -> None:
    whole = complete(client, "a😀", max_tokens=3).json()["choices"][0]
    assert (whole["text"], whole["finish_reason"]) == ("a\ufffd", "length")
    assert gather(complete(client, "a😀", max_tokens=3, stream=True))[0]["text"] == "a\ufffd"


# -- choices, seeds, prompts ------------------------------------------------------------------------------------


def test_n_choices_are_n_requests_with_derived_seeds(client: httpx.Client) -> None:
    """SV-10: each index with its own end; the prompt counted once; each choice repeatable by itself."""
    text, seed = "abcdefgh ijklmnop", 12345
    answer = complete(client, text, n=3, seed=seed, stop=["l"]).json()
    alone = [complete(client, text, seed=derived_seed(seed, index), stop=["l"]).json() for index in range(3)]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert [choice["text"] for choice in answer["choices"]] == [one["choices"][0]["text"] for one in alone]
    assert len({choice["text"] for choice in answer["choices"]}) > 1
    assert answer["usage"]["prompt_tokens"] == alone[0]["usage"]["prompt_tokens"]
    assert answer["usage"]["completion_tokens"] == sum(one["usage"]["completion_tokens"] for one in alone)
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == answer["usage"]["prompt_tokens"] // 2


def test_every_kind_of_prompt(client: httpx.Client) -> None:
    answer = complete(client, ["first", "second one"], n=2, return_token_ids=True).json()
    assert [choice["text"] for choice in answer["choices"]] == ["first", "first", "second one", "second one"]
    ids = [choice["prompt_token_ids"] for choice in answer["choices"]]
    assert answer["usage"]["prompt_tokens"] == len(ids[0]) + len(ids[2])
    assert [choice["text"] for choice in complete(client, [ids[0], ids[2]]).json()["choices"]] == ["first", "second one"]
    single = complete(client, ids[2], return_token_ids=True).json()["choices"][0]
    assert (single["text"], single["token_ids"][:-1]) == ("second one", ids[2])


def test_echo_and_scoring_of_a_prompt(client: httpx.Client) -> None:
    whole = complete(client, AWKWARD, echo=True, logprobs=1)
    choice = strict_json(whole.text)["choices"][0]
    assert choice["text"] == AWKWARD * 2
    assert choice["logprobs"]["token_logprobs"][:2] == [None, -0.5] and choice["logprobs"]["top_logprobs"][0] is None
    assert gather(complete(client, AWKWARD, echo=True, logprobs=1, stream=True)) == gather_whole(whole)
    offsets = choice["logprobs"]["text_offset"]
    assert offsets == sorted(offsets) and offsets[-1] == len(choice["text"])
    scored = complete(client, AWKWARD, echo=True, logprobs=1, max_tokens=0).json()
    assert scored["choices"][0]["text"] == AWKWARD and scored["usage"]["completion_tokens"] == 0
    assert len(scored["choices"][0]["logprobs"]["tokens"]) == scored["usage"]["prompt_tokens"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("max_tokens", [0, 3])
def test_a_prompt_of_one_token_can_be_scored(client: httpx.Client, max_tokens: int, stream: bool) -> None:
    """It has no logprob: there is nothing before it."""
    for prompt in ("a", [70]):
        response = complete(client, prompt, echo=True, logprobs=1, max_tokens=max_tokens, stream=stream)
        logprobs = (gather if stream else gather_whole)(response)[0]["logprobs"]
        assert [entry[1] for entry in logprobs] == [None, *([-0.25] * min(max_tokens, 2))]


def test_the_prompt_is_tokenised_as_by_the_release(server: ServerProcess, client: httpx.Client) -> None:
    """`prompt_token_ids` is what AutoTokenizer and its chat template give, in both endpoints, whole and streamed."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(server.spec.tokenizer_folder)
    messages = [{"role": "system", "content": "short"}, {"role": "user", "content": AWKWARD}]
    templated = list(tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"])
    for stream in (False, True):
        answers = [
            complete(client, AWKWARD, n=2, max_tokens=2, return_token_ids=True, stream=stream),
            ask(client, messages, n=2, max_tokens=2, return_token_ids=True, stream=stream),
        ]
        parts = [events(answer)[:-1] if stream else [answer.json()] for answer in answers]
        for chunks, want in zip(parts, (tokenizer(AWKWARD)["input_ids"], templated), strict=True):
            by_choice = [(choice["index"], choice["prompt_token_ids"]) for chunk in chunks for choice in chunk["choices"]
                         if "prompt_token_ids" in choice]  # fmt: skip
            assert sorted(by_choice) == [(0, want), (1, want)]
        assert parts[1][0]["prompt_token_ids"] == templated
    for response in (complete(client, "abc", max_tokens=1), ask(client, "abc", max_tokens=1)):
        assert "token_ids" not in response.text


def test_logprobs_are_json_and_hold_the_chosen_token(client: httpx.Client) -> None:
    """SV-05: the scripted alternatives are impossible (-inf) every other time."""
    choice = strict_json(complete(client, "ab😀", logprobs=4).text)["choices"][0]
    for name, logprob, top, _ in _logprob_entries(choice["logprobs"]):
        assert top[name] == logprob and len(top) == 4 and list(top.values()) == sorted(top.values(), reverse=True)
        assert min(top.values()) == -9999.0
    chat = strict_json(ask(client, "😀", logprobs=True, top_logprobs=3).text)["choices"][0]["logprobs"]["content"]
    assert all(len(entry["top_logprobs"]) == 3 for entry in chat)
    emoji = bytes(byte for entry in chat for byte in entry["bytes"] if entry["token"] != "<|eos|>")
    assert emoji.decode() == "user:😀<|im_end|>assistant:"
    assert complete(client, "ab", logprobs=0).json()["choices"][0]["logprobs"]["top_logprobs"][0] == {"a": -0.25}


# -- refusals ---------------------------------------------------------------------------------------------------


def test_bad_requests_reach_nobody(client: httpx.Client) -> None:
    """SV-04: each bad value is refused at once, the engine sees none of it, a good request beside them is undisturbed."""
    good_text = "good " * 100
    before = gauge(client, "dayzero_engine_prefill_tokens")
    good: list[Any] = []
    thread = threading.Thread(target=lambda: good.append(complete(client, good_text, return_token_ids=True).json()))
    thread.start()
    table = [("/v1/completions", {"prompt": "abc"}, BAD_FIELDS + BAD_COMPLETION_FIELDS),
             ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}, BAD_CHAT_FIELDS)]  # fmt: skip
    seconds = []
    for path, base, rows in table:
        for name, value, param in rows:
            body = json.dumps({"model": MODEL} | base | {name: value})
            started = time.perf_counter()
            response = client.post(path, content=body, headers={"content-type": "application/json"})
            seconds.append(time.perf_counter() - started)
            error = response.json()["error"]
            assert (response.status_code, error["param"]) == (400, param), (name, str(value)[:80], error)
            assert error.keys() == {"message", "type", "param", "code"}
    thread.join()
    assert sorted(seconds)[len(seconds) // 2] < 0.1, f"median {sorted(seconds)[len(seconds) // 2]} s"
    assert good[0]["choices"][0]["text"] == good_text
    num_prompt = good[0]["usage"]["prompt_tokens"]
    assert gauge(client, "dayzero_engine_prefill_tokens") - before == num_prompt


@pytest.mark.parametrize(
    ("content", "kind", "status"),
    [
        (b"{", "application/json", 400), (b"[]", "application/json", 400), (b"\xff", "application/json", 400),
        (b'{"temperature": NaN}', "application/json; charset=utf-8", 400), (b"[" * 100_000, "application/json", 400),
        (b'{"model": "m"}', "text/plain", 400), (b"a=b", "application/x-www-form-urlencoded", 400), (b"{}", "", 400),
    ],
)  # fmt: skip
def test_malformed_bodies(client: httpx.Client, content: bytes, kind: str, status: int) -> None:
    for path in ("/v1/completions", "/v1/chat/completions"):
        response = client.post(path, content=content, headers={"content-type": kind})
        assert response.status_code == status and response.json()["error"]["message"], response.text
    assert client.get("/health").status_code == 200


def test_a_huge_body_is_413(client: httpx.Client) -> None:
    """With and without a declared length; neither is read into memory."""
    huge = b'{"model": "m", "prompt": "' + b"x" * (50 << 20)
    for content in (huge, (huge[start : start + (1 << 20)] for start in range(0, len(huge), 1 << 20))):
        response = client.post("/v1/completions", content=content, headers={"content-type": "application/json"})
        assert response.status_code == 413 and response.json()["error"]["code"] == "body_too_large"
    assert complete(client, "still here").status_code == 200


def test_unknown_paths_methods_and_fields(client: httpx.Client) -> None:
    assert client.get("/v1/nothing").status_code == 404 and "error" in client.get("/v1/nothing").json()
    assert client.get("/v1/completions").status_code == 405 and "error" in client.get("/v1/completions").json()
    response = complete(client, "abc", frobnicate=1, **{"x\r\ny: z": 1})
    assert response.status_code == 200 and response.headers["x-dayzero-warning"] == "ignored fields: frobnicate, x??y: z"
    assert "x-dayzero-warning" not in complete(client, "abc", user="me").headers
    response = ask(client, "abc", stream=True, stream_options={"include_usage": True, "later": 1})
    assert response.headers["x-dayzero-warning"] == "ignored fields: stream_options.later"
    assert events(response)[-2]["usage"]["prompt_tokens"] > 0


@pytest.mark.parametrize("stream", [False, True])
def test_lengths_by_one_rule(client: httpx.Client, stream: bool) -> None:
    """SV-09 through the server; the table of numbers is in the unit tests."""
    for response in (
        complete(client, [5] * 4090, max_tokens=16, stream=stream),
        complete(client, "x" * 5000, stream=stream),
        ask(client, "x" * 4080, max_tokens=500, stream=stream),
    ):
        assert response.status_code == 400 and response.json()["error"]["code"] == "context_length_exceeded"
        assert "4096" in response.json()["error"]["message"]
    response = complete(client, [5] * 4090, ignore_eos=True, stream=stream, return_token_ids=True)
    choice = (gather if stream else gather_whole)(response)[0]
    assert (len(choice["ids"]), choice["finish"]) == (6, "length")


def test_failures_of_one_request_are_its_own(client: httpx.Client) -> None:
    response = complete(client, [FAIL_IN_ADD, 5])
    assert response.status_code == 500 and "unexpected failure in add" in response.json()["error"]["message"]
    response = complete(client, [FAIL_ALONE, 5, 6, 7])
    assert response.status_code == 500 and "not finite" in response.json()["error"]["message"]
    streamed = events(complete(client, [FAIL_ALONE, 5, 6, 7], stream=True))
    assert "not finite" in streamed[-1]["error"]["message"] and "[DONE]" not in streamed
    assert client.get("/health").json()["engine_restarts"] == 0
    assert complete(client, [VOCAB_SIZE - 1, 5]).json()["choices"][0]["finish_reason"] == "stop"  # an id with no text


# -- chat templates (the hostile ones are in test_server_templates.py) ------------------------------------------


def test_the_template_speaks_for_itself(client: httpx.Client) -> None:
    response = ask(client, [{"role": "martian", "content": "hi"}])
    assert response.status_code == 400 and "no martians here" in response.json()["error"]["message"]
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
             {"role": "assistant", "content": None, "tool_calls": []}]  # fmt: skip
    assert ask(client, parts).json()["choices"][0]["message"]["content"] == "user:abassistant:assistant:"


def test_the_prefix_cache_can_be_reset(client: httpx.Client) -> None:
    assert client.post("/reset_prefix_cache").json() == {"reset": True}
