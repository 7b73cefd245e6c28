"""The torch-free parts of the validator: errors per position, the tie rule, limits, inputs without a tokenizer, HTTP."""

import json
import threading
from collections.abc import Iterator
from dataclasses import fields
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from dayzero.core.errors import DayZeroError
from dayzero.core.reports import Check
from dayzero.validate.answers import agreement, first_difference, first_tie, malformed, path_of
from dayzero.validate.checks import Repeat, check_answers, check_repeats
from dayzero.validate.http_subject import HttpSubject
from dayzero.validate.inputs import TEXTS, InputOptions, bundled_text, load_inputs
from dayzero.validate.limits import LIMITS, Limits
from dayzero.validate.parameters import digest_of, rounded
from dayzero.validate.positions import PositionErrors, best_tokens, position_errors
from dayzero.validate.regime import Regime
from dayzero.validate.subject import ServerRefused

INFO = SimpleNamespace(model="m", device="cpu", dtype="float32", vocab_size=100, sampled_tokens=100, context_tokens=400, capacity_tokens=300,
                       block_tokens=16, prefix_reuse=True, stop_token_ids=())  # fmt: skip


def test_limits_are_frozen_and_each_says_why() -> None:
    """A limit that is widened must be widened here too, in the open."""
    values = {field.name: getattr(LIMITS, field.name).value for field in fields(Limits)}
    assert values == {
        "logits_max_abs": 1e-3, "logits_relative": 1e-3, "layer_relative": 1e-4, "kl_divergence": 1e-6,
        "perplexity_relative": 1e-3, "tie_gap": 1e-4, "own_error_factor": 2.0, "own_kl_factor": 4.0, "own_mean_sigmas": 3.0,
        "selection_share": 0.05, "dtype_rounding": 1.0,
    }  # fmt: skip
    assert all(len(why) > 40 for why in LIMITS.justifications().values())


def test_position_errors_against_a_plain_computation() -> None:
    rng = np.random.default_rng(0)
    want, ids = rng.normal(size=(130, 40)).astype(np.float32), rng.integers(0, 40, 130).tolist()
    got = (want + rng.normal(size=want.shape) * 0.1).astype(np.float32)
    errors = position_errors(got, want, ids)
    p, q = (np.exp(x.astype(float)) / np.exp(x.astype(float)).sum(1, keepdims=True) for x in (want, got))
    np.testing.assert_allclose(errors.kl, (p * np.log(p / q)).sum(1), atol=1e-12)
    np.testing.assert_allclose(errors.nll_got, -np.log(q[np.arange(129), ids[1:]]), atol=1e-12)
    np.testing.assert_allclose(errors.worst_abs, np.abs(got.astype(float) - want).max(1))
    ranked = np.sort(want.astype(float), axis=1)
    np.testing.assert_allclose(errors.gap, ranked[:, -1] - ranked[:, -2])
    assert (errors.same_best == (got.argmax(1) == want.argmax(1))).all() and (errors.regret[errors.same_best] == 0).all()
    assert len(errors) == 130 and len(errors.nll_want) == 129


def test_masked_vocabulary_is_no_error() -> None:
    """Logits of minus infinity at one place in both."""
    want = np.zeros((3, 30), dtype=np.float32)
    want[:, 7:] = -np.inf
    want[:, 2] = 1
    errors = position_errors(want.copy(), want, [0, 1, 2])
    assert errors.worst_abs.max() == errors.kl.max() == errors.gap_error.max() == 0


def test_best_tokens_start_with_the_lowest_id_of_equals() -> None:
    logits = np.zeros((2, 50), dtype=np.float32)
    logits[1, 30] = 1
    assert best_tokens(logits)[:, 0].tolist() == [0, 30]


def make_logits(rows: list[dict[int, float]]) -> np.ndarray:
    logits = np.zeros((len(rows), 8), dtype=np.float32)
    for row, values in enumerate(rows):
        for token, value in values.items():
            logits[row, token] = value
    return logits


def test_answers_are_compared_up_to_the_first_tie_of_the_reference() -> None:
    # Two prompt tokens: rows 1 to 4 judge the answer. The third answer token is a tie between 3 and 4.
    logits = make_logits([{0: 9}, {1: 5}, {2: 5}, {3: 5, 4: 5 - 5e-5}, {5: 5}, {}])
    same = agreement(path_of(logits, 2, [1, 2, 3, 5]), 1e-4)
    assert (same.same, same.cut, same.wrong) == (4, 2, ())
    other = path_of(logits, 2, [1, 2, 4, 5])
    assert (agreement(other, 1e-4).same, agreement(other, 1e-4).wrong) == (2, ())
    assert agreement(other, 1e-5).wrong == (2,)
    assert agreement(path_of(logits, 2, [1, 6, 3, 5]), 1e-4).wrong == (1,)
    # Behind the tie the claim is weaker, but not gone.
    assert agreement(path_of(logits, 2, [1, 2, 4, 6]), 1e-4).wrong == (3,)
    assert first_tie(path_of(logits, 2, [1, 2, 3, 5]), 1e-4) == 2 and first_tie(path_of(logits, 2, [1, 2, 3, 5]), 1e-5) == 4
    assert first_difference([1, 2, 4, 7], [1, 2, 3, 5], 2) is None
    assert first_difference([1, 7, 3, 5], [1, 2, 3, 5], 2) == 1
    assert first_difference([1], [1, 2, 3, 5], 2) == 1
    assert first_difference([1, 2, 3, 5, 6], [1, 2, 3, 5], 4) == 4
    assert malformed([1, 2], 8, 3) and malformed([1, 8, 2], 8, 3) and malformed([1, 2, 3], 8, 3) is None


def make_regime(dtype: str, own_gap_error: float) -> Regime:
    shape = {field.name: np.full(20, own_gap_error) for field in fields(PositionErrors)}
    return Regime(limits=LIMITS, dtype=dtype, selects=False, own=PositionErrors(**shape))


def test_a_token_check_that_compared_next_to_nothing_is_not_shown() -> None:
    rows = [{0: 9}, *({token: 5.0, 7: 4.0} for token in (1, 2, 3, 4)), {}]
    path = path_of(make_logits(rows), 2, [1, 2, 3, 4])
    assert check_answers(make_regime("bfloat16", 0.01), "greedy_tokens", [path], ["a"]).verdict == "pass"
    # Ties are wider than the distance to the second best, not wider than what a blind guess costs.
    wide = make_regime("bfloat16", 0.6)
    check = check_answers(wide, "greedy_tokens", [path], ["a"])
    assert check.verdict == "not_shown" and "0 of 4 tokens compared" in check.detail
    wrong = check_answers(wide, "greedy_tokens", [path_of(make_logits(rows), 2, [1, 2, 6, 4])], ["a"])
    assert wrong.verdict == "fail"

    def repeated(*others: tuple[int, ...], regime: Regime | None) -> Check:
        repeat = Repeat(label="a", first=path.token_ids, others=others, path=path)
        return check_repeats("prefix_reuse_equal", [repeat], "repeat", regime=regime)

    assert repeated((1, 2, 3, 4), regime=wide).verdict == "pass"
    assert "4 of 4 tokens compared" in repeated((1, 2, 3, 4), regime=wide).detail
    assert repeated((1, 2, 3, 6), regime=wide).verdict == "not_shown"
    assert repeated((1, 2, 3, 6), regime=None).verdict == "fail"
    assert repeated((1, 2, 3, 4, 4), regime=None).verdict == "fail"
    assert repeated(regime=None).verdict == "not_shown"


def test_only_selections_in_a_reduced_dtype_excuse_positions() -> None:
    values = np.arange(100.0)
    for dtype, selects, kept in (("float32", True, 100), ("bfloat16", False, 100), ("bfloat16", True, 95)):
        assert len(Regime(limits=LIMITS, dtype=dtype, selects=selects).kept(values)) == kept


def test_rounding_to_a_reduced_dtype() -> None:
    # 1 + 2**-8 lies halfway between two bfloat16 numbers and goes to the even one.
    halfway = np.array([1 + 2**-8, 1 + 3 * 2**-8, -3.0, 0.0], dtype=np.float32)
    assert rounded(halfway, "bfloat16").tolist() == [1.0, 1 + 2**-6, -3.0, 0.0]
    assert rounded(np.float32([1 + 2**-12]), "float16").tolist() == [1.0]


def test_digests_tell_shapes_and_single_bits_apart() -> None:
    values = np.arange(10_000, dtype=np.float32).reshape(100, 100)
    other = values.copy()
    other[60, 3] = np.nextafter(other[60, 3], np.float32(np.inf))
    first, second = digest_of(values), digest_of(other)
    assert first == digest_of(np.asfortranarray(values)) and first != second and first != digest_of(values.reshape(50, 200))
    assert [first.blocks[i : i + 16] == second.blocks[i : i + 16] for i in (0, 16, 32)] == [True, False, True]


def test_bundled_texts_are_there_with_their_licence() -> None:
    assert all(len(bundled_text(name)) > 300 for name in TEXTS)
    assert "CC0" in bundled_text("ABOUT") and all(name in bundled_text("ABOUT") for name in TEXTS)


def test_inputs_without_a_tokenizer_are_the_same_each_time_and_avoid_reserved_ids(tmp_path: Path) -> None:
    config = {"eos_token_id": [1, 2], "text_config": {"image_token_id": 3}, "pad_token_id": None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    first, second = load_inputs(tmp_path, INFO), load_inputs(tmp_path, INFO)
    assert first.texts == second.texts and first.reuse == second.reuse and "no tokenizer" in first.source
    tokens = {t for group in (first.texts, first.samples, first.concurrent, first.reuse) for x in group for t in x.token_ids}
    assert not tokens & {1, 2, 3} and max(tokens) < 100
    assert [len(r.token_ids) for r in first.reuse] == [16, 32, 31, 33]  # KV-02
    assert len({len(c.token_ids) for c in first.concurrent}) == 8
    other = load_inputs(tmp_path, INFO, options=InputOptions(seed=1))
    assert other.texts != first.texts


def test_a_subject_with_hardly_any_room_is_refused(tmp_path: Path) -> None:
    tight = SimpleNamespace(**{**vars(INFO), "capacity_tokens": 20})
    with pytest.raises(DayZeroError, match="too few tokens"):
        load_inputs(tmp_path, tight)


class FakeServer(BaseHTTPRequestHandler):
    """Answers token ids that count up from the prompt's last; `broken` says what goes wrong."""

    broken = ""
    together = threading.Barrier(3, timeout=20)

    def do_GET(self) -> None:
        self.reply(200, {"data": [{"id": "tiny"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self.broken == "refuses":
            return self.reply(400, {"error": {"message": "no such prompt"}})
        if self.broken == "waits for three":
            self.together.wait()
        if body["max_tokens"] == 1 and "ignore_eos" not in body:
            assert body["return_token_ids"] is True
            if self.path == "/v1/chat/completions":
                length = len(body["messages"][0]["content"])
                return self.reply(200, {"choices": [{"message": {}}], "prompt_token_ids": [7, length]})
            ids = {} if self.broken == "no ids" else {"prompt_token_ids": [len(body["prompt"])]}
            return self.reply(200, {"choices": [{"text": "x", **ids}]})
        asked = (body["model"], body["temperature"], body["ignore_eos"], body["return_token_ids"], body["logprobs"])
        assert asked == ("tiny", 0.0, True, True, 5), body
        start, count = body["prompt"][-1] + 1, body["max_tokens"]
        choice = {"text": "x", "token_ids": list(range(start, start + count)), "logprobs": {"token_logprobs": [-0.5] * count}}
        if self.broken == "no ids":
            del choice["token_ids"]
        return self.reply(200, {"choices": [choice], "usage": {"prompt_tokens_details": {"cached_tokens": 3}}})

    def reply(self, status: int, body: dict) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[tuple[str, type[FakeServer]]]:
    handler = type("Handler", (FakeServer,), {})
    http = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=http.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{http.server_port}", handler
    http.shutdown()
    thread.join()
    http.server_close()


def test_http_subject_sends_all_prompts_at_once_and_keeps_their_order(server: tuple[str, type[FakeServer]]) -> None:
    url, handler = server
    handler.broken = "waits for three"
    with HttpSubject(url + "/") as subject:
        assert subject.generate([[1, 2], [10], [20]], 3) == [[3, 4, 5], [11, 12, 13], [21, 22, 23]]
        handler.broken = ""
        answer = subject.answers([[1]], 2)[0]
        assert answer.token_ids == (2, 3) and answer.logprobs == (-0.5, -0.5) and answer.cached_tokens == 3


def test_http_subject_tells_the_tokens_of_a_text(server: tuple[str, type[FakeServer]]) -> None:
    url, handler = server
    with HttpSubject(url) as subject:
        assert subject.prompt_ids("text", "abc") == [3] and subject.prompt_ids("chat", "abcd") == [7, 4]
        handler.broken = "no ids"
        with pytest.raises(ServerRefused, match="does not tell"):
            subject.prompt_ids("text", "abc")
        handler.broken = "refuses"
        with pytest.raises(ServerRefused):
            subject.prompt_ids("chat", "abc")


@pytest.mark.parametrize(("broken", "word"), [("refuses", "no such prompt"), ("no ids", "token_ids")])
def test_http_subject_turns_a_server_that_cannot_be_judged_into_an_error(
    server: tuple[str, type[FakeServer]], broken: str, word: str
) -> None:
    url, handler = server
    handler.broken = broken
    with HttpSubject(url) as subject, pytest.raises(DayZeroError) as caught:
        subject.generate([[1]], 2)
    assert word in str(caught.value)


def test_http_subject_without_a_server() -> None:
    with HttpSubject("http://127.0.0.1:9", model="m") as subject, pytest.raises(DayZeroError, match="does not answer"):
        subject.generate([[1]], 2)
