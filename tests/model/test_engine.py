"""The engine against the uncached forward of transformers, alone and among others, on tiny checkpoints of many kinds."""

import math
from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig

from dayzero.core.errors import DayZeroError
from dayzero.core.generation import GenerationRequest, SamplingParams
from dayzero.model.classes import model_class
from dayzero.runtime.scheduler import Sequence
from dayzero.runtime.subject import EngineSubject
from tests.model.engine_builders import greedy, make_engine, make_prompts, run_requests, tokens_of
from tests.tiny.overrides import REQUIRED_TYPES

LOGIT_LIMIT = 1e-3  # DESIGN, "Equality"
TIE = 1e-4  # below this distance of the two best logits either token may come first

# What each kind must reach: paged where attention goes through the interface with its own keys, prefix reuse with it.
# (llama4_text scales queries by a position it counts itself, from the cache: batched, that count is wrong.)
PAGED = {"llama", "qwen3", "qwen3_moe", "gpt_oss", "minimax_m2", "gemma3_text", "mixtral"}


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("engines")


def make_reference(checkpoint):
    config = AutoConfig.from_pretrained(checkpoint)
    return model_class(config).from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="eager").eval()


@torch.no_grad()
def reference_logits(model, tokens):
    return model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]


def assert_greedy(model, prompt, answer):
    """Every token is the reference's best, up to the first place where its two best are closer than a tie."""
    logits = reference_logits(model, [*prompt, *answer])[len(prompt) - 1 : -1]
    best = logits.topk(2).values
    for position, token in enumerate(answer):
        if float(best[position, 0] - best[position, 1]) < TIE:
            return position
        assert token == int(logits[position].argmax()), f"token {position} of {answer}"
    return len(answer)


@pytest.mark.parametrize("model_type", REQUIRED_TYPES)
def test_answers_equal_the_uncached_forward(model_type, tiny_checkpoint, folder):
    checkpoint = tiny_checkpoint(model_type, dtype="float32")
    reference, engine = make_reference(checkpoint), make_engine(checkpoint, folder)
    assert engine.info.tier == ("T2" if model_type in PAGED else "T1"), engine.info.tier_reasons
    assert engine.info.prefix_reuse == (model_type in PAGED)

    text = make_prompts([61], seed=9)[0]
    scored = torch.from_numpy(EngineSubject(engine).score(text))
    assert float((scored - reference_logits(reference, text)).abs().max()) < LOGIT_LIMIT

    prompts = make_prompts([1, 7, 16, 33, 50, 4, 12, 21])
    alone = run_requests(engine, {"a": (prompts[3], greedy(12))})["a"]
    assert assert_greedy(reference, prompts[3], tokens_of(alone)) > 6
    together = run_requests(engine, {f"r{i}": (p, greedy(12)) for i, p in enumerate(prompts)}, every=2)
    compared = [assert_greedy(reference, p, tokens_of(together[f"r{i}"])) for i, p in enumerate(prompts)]
    assert sum(compared) > 0.5 * 12 * len(prompts), f"too many ties to compare: {compared}"
    assert tokens_of(together["r3"]) == tokens_of(alone)
    assert engine.stats().blocks_referenced == 0
    engine.close()


@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_a_cached_prompt_gives_the_same_answer_and_leaves_shared_blocks_alone(kernels, tiny_checkpoint, folder):
    """KV-02: prompts around one and two blocks of 16, three times each; logprobs to 1e-5, shared pages unchanged."""
    engine = make_engine(tiny_checkpoint("llama", dtype="float32"), folder, block_tokens=16, kernels=kernels)
    for length in (16, 32, 31, 33):
        prompt, seen, pages = make_prompts([length], seed=length)[0], [], None
        for turn in range(3):
            outputs = run_requests(engine, {f"{length}-{turn}": (prompt, greedy(8, top_logprobs=3))})[f"{length}-{turn}"]
            seen.append(outputs)
            assert outputs[0].cached_tokens == (0 if turn == 0 else (length - 1) // 16 * 16)
            if pages is None:
                shared = engine.scheduler.pool.match(prompt)
                engine.scheduler.pool.release(shared)
                pages = [(pool[shared].clone(), shared) for pool in engine.runner.pools]
        for outputs in seen[1:]:
            assert tokens_of(outputs) == tokens_of(seen[0])
            for mine, first in zip(outputs, seen[0], strict=True):
                assert mine.logprob == pytest.approx(first.logprob, abs=1e-5)
        for (before, shared), pool in zip(pages, engine.runner.pools, strict=True):
            assert torch.equal(before, pool[shared])
    engine.close()


@pytest.mark.parametrize("model_type", ["llama", "qwen3_next", "mixtral"])
def test_a_seeded_request_is_the_same_alone_and_among_others(model_type, tiny_checkpoint, folder):
    """Also while another prompt is being prefilled in chunks, whatever its place in the batch. In bfloat16, where any
    difference in rounding would soon change a token."""
    engine = make_engine(tiny_checkpoint(model_type), folder, dtype="bfloat16", context_tokens=512)
    params = SamplingParams(max_tokens=24, temperature=0.8, seed=42, ignore_eos=True)
    prompt, other, long = make_prompts([13, 9, 150], seed=4)
    unseeded = SamplingParams(max_tokens=24, temperature=1.0, ignore_eos=True)
    alone = tokens_of(run_requests(engine, {"a": (prompt, params)})["a"])
    for order in (["a", "x", "long"], ["x", "long", "a"], ["long", "a", "x", "y"]):
        engine.reset_prefix_cache()
        requests = {"a": (prompt, params), "x": (other, unseeded), "y": (other, params), "long": (long, unseeded)}
        got = run_requests(engine, {name: requests[name] for name in order}, every=1)
        assert tokens_of(got["a"]) == alone, order
    again = SamplingParams(max_tokens=24, temperature=0.8, seed=43, ignore_eos=True)
    assert tokens_of(run_requests(engine, {"b": (prompt, again)})["b"]) != alone
    engine.close()


def test_a_reused_prefix_changes_no_bit_in_a_dtype_that_rounds(tiny_checkpoint, folder):
    """Prompts of one piece and of many, sent again and extended by what was answered: the same tokens and logprobs, to the
    last bit, as on an empty cache; and something is reused."""
    engine = make_engine(tiny_checkpoint("llama"), folder, dtype="bfloat16")
    params = SamplingParams(max_tokens=12, temperature=0.8, seed=7, ignore_eos=True, top_logprobs=2)
    for length in (6, 15, 17, 33, 70):
        prompt = make_prompts([length], seed=length)[0]
        engine.reset_prefix_cache()
        cold = run_requests(engine, {f"{length}-cold": (prompt, params)})[f"{length}-cold"]
        longer = [*prompt, *tokens_of(cold), 9, 8, 7]
        warm = run_requests(engine, {f"{length}-warm": (prompt, params)})[f"{length}-warm"]
        assert [(o.token_id, o.logprob) for o in warm] == [(o.token_id, o.logprob) for o in cold]
        warm_longer = run_requests(engine, {f"{length}-l": (longer, params)})[f"{length}-l"]
        assert warm[0].cached_tokens > 0 and warm_longer[0].cached_tokens % 4 == 0
        engine.reset_prefix_cache()
        cold_longer = run_requests(engine, {f"{length}-k": (longer, params)})[f"{length}-k"]
        assert [(o.token_id, o.logprob) for o in warm_longer] == [(o.token_id, o.logprob) for o in cold_longer]
    engine.close()


def test_a_cancelled_request_frees_what_it_holds_at_any_stage(tiny_checkpoint, folder):
    engine = make_engine(tiny_checkpoint("llama", dtype="float32"), folder, max_sequences=2)
    prompts = make_prompts([40, 40, 40])
    from dayzero.core.generation import GenerationRequest

    for index, prompt in enumerate(prompts):
        engine.add(GenerationRequest(id=f"r{index}", prompt_token_ids=tuple(prompt), sampling=greedy(20)))
    engine.cancel("r2")  # queued
    engine.step()
    engine.cancel("r0")  # in the middle of its prompt
    for _ in range(6):
        engine.step()
    engine.cancel("r1")  # decoding
    engine.cancel("r1")
    engine.cancel("never seen")
    assert not engine.has_work()
    assert engine.stats().blocks_referenced == 0
    engine.scheduler.pool.check()
    engine.close()


def test_stop_tokens_end_a_request_and_min_tokens_holds_them_back(tiny_checkpoint, folder):
    """CF-08: the stop set ends a request with reason "stop"; ignore_eos disables it; the request's own ids still count."""
    checkpoint = tiny_checkpoint("llama", dtype="float32")
    engine = make_engine(checkpoint, folder)
    prompt = make_prompts([9])[0]
    answer = tokens_of(run_requests(engine, {"a": (prompt, greedy(10))})["a"])
    engine.close()
    engine = make_engine(checkpoint, folder, stop_token_ids=(answer[3],))
    at = answer.index(answer[3])
    outputs = run_requests(engine, {"a": (prompt, SamplingParams(max_tokens=10, temperature=0.0))})["a"]
    assert tokens_of(outputs) == answer[: at + 1] and outputs[-1].finish_reason == "stop"
    ignored = run_requests(engine, {"a": (prompt, greedy(10))})["a"]
    assert tokens_of(ignored) == answer and ignored[-1].finish_reason == "length"
    own = run_requests(engine, {"a": (prompt, greedy(10, stop_token_ids=(answer[1],)))})["a"]
    assert tokens_of(own) == answer[: answer.index(answer[1]) + 1] and own[-1].finish_reason == "stop"
    held = run_requests(engine, {"a": (prompt, SamplingParams(max_tokens=10, temperature=0.0, min_tokens=6))})["a"]
    assert answer[3] not in tokens_of(held)[:6] and len(held) >= 6
    engine.close()


def test_prompt_logprobs_are_those_of_the_reference(tiny_checkpoint, folder):
    checkpoint = tiny_checkpoint("llama", dtype="float32")
    engine, prompt = make_engine(checkpoint, folder), make_prompts([37])[0]
    outputs = run_requests(engine, {"a": (prompt, greedy(2, prompt_logprobs=True))})["a"]
    want = torch.log_softmax(reference_logits(make_reference(checkpoint), prompt), -1)
    got = outputs[0].prompt_logprobs
    assert got[0] is None and len(got) == len(prompt)
    for position in range(1, len(prompt)):
        assert got[position] == pytest.approx(float(want[position - 1, prompt[position]]), abs=1e-4)
    engine.close()


def test_two_engines_live_in_one_process(tiny_checkpoint, folder):
    left = make_engine(tiny_checkpoint("llama", dtype="float32"), folder)
    right = make_engine(tiny_checkpoint("gemma3_text", dtype="float32"), folder)
    prompt = make_prompts([20])[0]
    before = [tokens_of(run_requests(engine, {"a": (prompt, greedy(8))})["a"]) for engine in (left, right)]
    from dayzero.core.generation import GenerationRequest

    for engine in (left, right):
        engine.reset_prefix_cache()
        engine.add(GenerationRequest(id="b", prompt_token_ids=tuple(prompt), sampling=greedy(8)))
    answers: list[list[int]] = [[], []]
    while left.has_work() or right.has_work():  # steps of the two take turns
        for answer, engine in zip(answers, (left, right), strict=True):
            answer += [output.token_id for output in engine.step()]
    assert answers == before
    left.close()
    after = tokens_of(run_requests(right, {"c": (prompt, greedy(8))})["c"])
    assert after == before[1]
    right.close()


def test_a_poisoned_row_fails_its_own_request_only(tiny_checkpoint, folder):
    engine = make_engine(tiny_checkpoint("llama", dtype="float32"), folder)
    good, bad = make_prompts([8, 8], seed=6)
    bad[-1] = 199
    want = tokens_of(run_requests(engine, {"good": (good, greedy(6))})["good"])
    with torch.no_grad():
        engine.runner.model.module.get_input_embeddings().weight[199] = float("nan")
    engine.reset_prefix_cache()
    got = run_requests(engine, {"good": (good, greedy(6)), "bad": (bad, greedy(6))})
    assert tokens_of(got["good"]) == want
    assert got["bad"][-1].finish_reason == "error" and "NaN" in got["bad"][-1].error
    assert engine.scheduler.pool.match([*bad, 5]) == []  # nobody is given what the poisoned request left
    assert engine.stats().blocks_referenced == 0
    engine.close()


def test_a_lower_tier_gives_the_same_answers(tiny_checkpoint, folder):
    checkpoint, prompts = tiny_checkpoint("llama", dtype="float32"), make_prompts([5, 18, 30])
    answers = []
    for tier in ("T2", "T1", "T0"):
        engine = make_engine(checkpoint, folder, tier=tier)
        assert engine.info.tier == tier
        got = run_requests(engine, {f"r{i}": (p, greedy(8)) for i, p in enumerate(prompts)})
        answers.append([tokens_of(got[f"r{i}"]) for i in range(3)])
        engine.close()
    assert answers[0] == answers[1] == answers[2]


def test_what_cannot_be_served_is_refused(tiny_checkpoint, folder):
    checkpoint = tiny_checkpoint("llama", dtype="float32")
    cases = [({"tier": "T9"}, "unknown tier"), ({"device": "nowhere"}, "cannot be used"), ({"device": "meta"}, "meta")]
    for settings, words in [*cases, ({"dtype": "int8"}, "dtype"), ({"pool_tokens": 0}, "no room")]:
        with pytest.raises(DayZeroError, match=words):
            make_engine(checkpoint, folder, **settings)


def test_cf_10_padding_of_the_vocabulary_is_never_answered(tiny_checkpoint, folder):
    """32 rows, 29 ids: rows 29 to 31 have the largest logits and no draw, greedy or not, and no log-probability."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(32, generator=generator)
    logits[29:] = 50.0
    engine = make_engine(tiny_checkpoint("llama"), folder)
    engine.info = replace(engine.info, vocab_size=32, known_tokens=29)
    seen = set()
    for index, temperature in enumerate([0.0] + [2.0] * 10_000):
        top = 32 if index < 2 else None
        sampling = SamplingParams(max_tokens=9, temperature=temperature, seed=index, ignore_eos=True, top_logprobs=top)
        request = GenerationRequest(id=str(index), prompt_token_ids=(1,), sampling=sampling)
        sequence = Sequence(request=request, seed=index, tokens=[1])
        drawn = engine._next_token(sequence, logits)
        seen.add(drawn.token_id)
        if index < 2:
            assert len(drawn.top_logprobs) == 29 and math.isclose(sum(math.exp(p) for _, p in drawn.top_logprobs), 1, rel_tol=1e-5)
    assert max(seen) == 28 and {27, 28} <= seen  # added ids stay usable
    assert logits[29:].tolist() == [50.0] * 3  # the runner's rows are not ours to change
