"""The scheduler: every token runs exactly once and in order, chunks do not depend on company, nothing waits for ever."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dayzero.core.errors import DayZeroError
from dayzero.core.generation import GenerationRequest, SamplingParams
from dayzero.runtime.blocks import BlockPool
from dayzero.runtime.scheduler import Scheduler, SchedulerLimits


def make_scheduler(*, num_blocks=16, block_tokens=4, chunk=8, sequences=4, context=64, prefix_reuse=False, exact_reuse=False):
    pool = BlockPool(num_blocks, block_tokens, prefix_reuse=prefix_reuse)
    limits = SchedulerLimits(
        max_sequences=sequences,
        context_tokens=context,
        chunk_tokens=chunk,
        step_tokens=(chunk or 64) + sequences,
        exact_reuse=exact_reuse,
    )
    return Scheduler(pool, limits)


def make_request(name, prompt, max_tokens, **sampling):
    return GenerationRequest(
        id=name, prompt_token_ids=tuple(prompt), sampling=SamplingParams(max_tokens=max_tokens, **sampling)
    )


def next_token(tokens):
    """A made-up model: the token depends on everything before it."""
    return (sum(tokens) * 31 + len(tokens)) % 97


class Driver:
    """Plays runner and sampler; keeps what was computed per sequence and asserts that it is computed in order."""

    def __init__(self, scheduler):
        self.scheduler, self.answers, self.chunks = scheduler, {}, {}

    def step(self):
        scheduled = self.scheduler.schedule()
        if scheduled is None:
            return False
        batch = scheduled.batch
        for index, sequence in enumerate(scheduled.sequences):
            first, last = batch.query_offsets[index], batch.query_offsets[index + 1]
            start = batch.context_lens[index] - (last - first)
            assert start == sequence.num_computed
            assert list(batch.tokens[first:last]) == sequence.tokens[start : batch.context_lens[index]]
            assert list(batch.positions[first:last]) == list(range(start, batch.context_lens[index]))
            assert len(batch.block_tables[index]) * self.scheduler.pool.block_tokens >= batch.context_lens[index]
            if index < batch.num_decode:
                assert last - first == 1
            self.chunks.setdefault(sequence.request.id, []).append((start, batch.context_lens[index]))
        self.scheduler.commit(scheduled)
        for row, sequence in zip(batch.logit_rows, scheduled.row_owners, strict=True):
            assert batch.positions[row] == len(sequence.tokens) - 1
            token = next_token(sequence.tokens)
            sequence.tokens.append(token)
            self.answers.setdefault(sequence.request.id, []).append(token)
            if len(sequence.output) == sequence.request.sampling.max_tokens:
                self.scheduler.finish(sequence)
        self.scheduler.pool.check()
        return True

    def run(self, most=2000):
        for _ in range(most):
            if not self.step():
                return
        raise AssertionError("the scheduler does not come to an end")


def expected(prompt, count):
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


def test_one_request_is_prefilled_in_chunks_at_absolute_positions():
    scheduler = make_scheduler()
    scheduler.add(make_request("a", range(19), 3), seed=0)
    driver = Driver(scheduler)
    driver.run()
    assert driver.chunks["a"] == [(0, 8), (8, 16), (16, 19), (19, 20), (20, 21)]
    assert driver.answers["a"] == expected(range(19), 3)


def test_chunks_are_the_same_alone_and_among_others():
    alone = Driver(make_scheduler(num_blocks=64))
    alone.scheduler.add(make_request("a", range(21), 4), seed=0)
    alone.run()
    company = Driver(make_scheduler(num_blocks=64))
    for name, length in (("x", 5), ("y", 30), ("a", 21), ("z", 1)):
        company.scheduler.add(make_request(name, range(length), 4), seed=0)
    company.run()
    assert company.chunks["a"] == alone.chunks["a"]
    assert company.answers["a"] == alone.answers["a"]


def test_prompts_in_one_piece_where_the_runner_needs_it():
    driver = Driver(make_scheduler(chunk=None))
    driver.scheduler.add(make_request("a", range(30), 2), seed=0)
    driver.run()
    assert driver.chunks["a"][0] == (0, 30)


def test_a_request_that_can_never_fit_is_refused_at_once_and_the_next_is_served():
    """KV-08: pool of 8 blocks x 16 = 128 tokens, context 512."""
    scheduler = make_scheduler(num_blocks=8, block_tokens=16, context=512, chunk=64)
    with pytest.raises(DayZeroError, match="never fit") as error:
        scheduler.add(make_request("big", range(200), 1), seed=0)
    assert "128" in error.value.want
    with pytest.raises(DayZeroError, match="never fit"):
        scheduler.add(make_request("grows", range(100), 100), seed=0)
    scheduler.add(make_request("small", range(10), 5), seed=0)
    driver = Driver(scheduler)
    driver.run()
    assert driver.answers["small"] == expected(range(10), 5)


def test_two_requests_that_cannot_progress_together_finish_one_after_the_other():
    """KV-08: each fits alone, both together do not; the younger is preempted and computed again."""
    scheduler = make_scheduler(num_blocks=8, block_tokens=16, context=128, chunk=64)
    for name in ("old", "young"):
        scheduler.add(make_request(name, range(50), 60), seed=0)
    driver = Driver(scheduler)
    driver.run()
    assert scheduler.preemptions >= 1
    assert driver.answers == {name: expected(range(50), 60) for name in ("old", "young")}


def test_a_fully_cached_prompt_computes_at_least_one_token():
    """KV-02: prompts of 16, 32, 31 and 33 tokens, block 16, three times each."""
    for length in (16, 32, 31, 33):
        scheduler = make_scheduler(num_blocks=32, block_tokens=16, chunk=64, prefix_reuse=True)
        driver, answers = Driver(scheduler), []
        for turn in range(3):
            scheduler.add(make_request(f"{length}-{turn}", range(length), 3), seed=0)
            driver.run()
            answers.append(driver.answers[f"{length}-{turn}"])
        assert answers[0] == answers[1] == answers[2] == expected(range(length), 3)
        assert driver.chunks[f"{length}-1"][0][0] == (length - 1) // 16 * 16
        assert scheduler.pool.num_referenced == 0


def test_exact_reuse_computes_the_same_pieces_cold_and_warm():
    """What is computed together for a prompt must not depend on what was found: only whole pieces are reused."""
    for length in (5, 7, 8, 9, 16, 17, 23, 40):
        scheduler = make_scheduler(num_blocks=64, block_tokens=2, chunk=16, context=128, prefix_reuse=True, exact_reuse=True)
        driver = Driver(scheduler)
        for turn in ("cold", "warm"):
            scheduler.add(make_request(f"{length}-{turn}", range(length), 3), seed=0)
            driver.run()
        cold, warm = driver.chunks[f"{length}-cold"], driver.chunks[f"{length}-warm"]
        assert warm == cold[len(cold) - len(warm) :], (cold, warm)
        piece = 16 if length >= 16 else 4
        assert warm[0][0] == (length - 1) // piece * piece
        assert driver.answers[f"{length}-cold"] == driver.answers[f"{length}-warm"] == expected(range(length), 3)


def test_a_prompt_whose_every_row_is_wanted_reuses_nothing():
    scheduler = make_scheduler(num_blocks=32, prefix_reuse=True, chunk=32)
    for turn in range(2):
        scheduler.add(make_request(f"r{turn}", range(16), 1, prompt_logprobs=True), seed=0)
        scheduled = scheduler.schedule()
        assert scheduled.batch.logit_rows == tuple(range(16))
        scheduler.commit(scheduled)
        scheduler.finish(scheduled.sequences[0])


def test_blocks_and_slots_come_back_whenever_a_request_leaves():
    """KV-05: 2000 short requests, 30% aborted at random stages, twice for some; prefix reuse off and on."""
    for prefix_reuse in (False, True):
        scheduler, chance = make_scheduler(num_blocks=24, prefix_reuse=prefix_reuse), random.Random(5)
        driver, opened = Driver(scheduler), []
        for number in range(2000):
            name = f"r{number}"
            scheduler.add(make_request(name, [chance.randrange(4) for _ in range(chance.randrange(1, 20))], 4), seed=0)
            opened.append(name)
            for _ in range(chance.randrange(3)):
                driver.step()
            if chance.random() < 0.3:
                victim = scheduler.find(chance.choice(opened[-12:]))
                for _ in range(2):
                    if victim is not None:
                        scheduler.finish(victim)
        driver.run()
        assert scheduler.pool.num_referenced == 0
        assert len(scheduler._free_slots) == scheduler.limits.max_sequences
        scheduler.pool.reset_cached()
        assert scheduler.pool.num_cached == 0 and scheduler.pool.num_available == 24


@settings(max_examples=60, deadline=None)
@given(
    requests=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 12)), min_size=1, max_size=8),
    num_blocks=st.integers(14, 40),
    prefix_reuse=st.booleans(),
    seed=st.integers(0, 3),
)
def test_answers_do_not_depend_on_room_or_company(requests, num_blocks, prefix_reuse, seed):
    scheduler = make_scheduler(num_blocks=num_blocks, prefix_reuse=prefix_reuse, context=56)
    driver, chance, prompts = Driver(scheduler), random.Random(seed), {}
    for number, (length, count) in enumerate(requests):
        prompts[f"r{number}"] = ([chance.randrange(2) for _ in range(length)], count)
        scheduler.add(make_request(f"r{number}", prompts[f"r{number}"][0], count), seed=0)
        if chance.random() < 0.5:
            driver.step()
    driver.run()
    assert driver.answers == {name: expected(prompt, count) for name, (prompt, count) in prompts.items()}
    assert scheduler.pool.num_referenced == 0
