"""What runs teach the planner: stored per target, a bounded median, never compounded, never from another target."""

import multiprocessing
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dayzero.core.errors import DayZeroError
from dayzero.core.generation import EngineInfo
from dayzero.core.plan import Layout, LedgerLine, MemoryLedger, Plan, Pool, TimeEstimate
from dayzero.core.reports import BenchPoint, BenchReport, Spread
from dayzero.core.target import Workload
from dayzero.core.units import GIB, MIB
from dayzero.plan.experience import (
    BOUNDS,
    Observation,
    correction_for,
    expected_s,
    history_file,
    observe_bench,
    observe_serving,
    read_history,
    record,
)

WORKLOAD = Workload(context_tokens=1024, concurrency=4, input_tokens=128, output_tokens=32)


def make_observation(ratio=1.2, *, target="card", model="m1", engine="dayzero", layout="TP1", category="weights"):
    return Observation(target=target, model_hash=model, engine=engine, layout=layout, category=category, predicted=1000.0,
                       observed=1000.0 * ratio)  # fmt: skip


def make_estimate(low=0.01, high=0.04):
    return TimeEstimate(compute_s=0.01, memory_s=0.005, communication_s=0.0, low_s=low, high_s=high)


def make_run_plan(**more):
    layout = Layout(stages=((0, 4),))
    lines = tuple(LedgerLine(category=name, name=name, num_bytes=size * MIB, formula="")
                  for name, size in (("weights", 600), ("cache", 64), ("activations", 100), ("runtime", 300), ("reserve", 50)))  # fmt: skip
    ledger = MemoryLedger(rank=0, stage=0, budget_bytes=4 * GIB, lines=lines, cache_bytes_per_token=1024.0,
                          cache_bytes_per_sequence=2048, admissible_tokens=100_000)  # fmt: skip
    facts = dict(model="toy", target="card", feasible=True, layout=layout, devices=1, pools=(Pool(role="mixed", layout=layout),),
                 weights_dtype="bfloat16", cache_dtype="bfloat16", context_tokens=1024, concurrency=4, memory_fraction=0.9,
                 block_tokens=16, prefill_chunk_tokens=512, weights_bytes_per_device=600 * MIB,
                 cache_bytes_per_token_per_device=1024.0, admissible_tokens=3000, ledger=(ledger,), prefill=make_estimate(),
                 decode=make_estimate(0.02, 0.08))  # fmt: skip
    return Plan(**(facts | more))


def make_info(num_blocks=150, **more):
    facts = dict(model="toy", tier="T2", tier_reasons=(), device="cpu", dtype="bfloat16", instruction_set="avx2", vocab_size=100,
                 context_tokens=1024, capacity_tokens=1024, block_tokens=16, num_blocks=num_blocks, max_sequences=4,
                 prefix_reuse=True)  # fmt: skip
    return EngineInfo(**(facts | more))


def make_bench(*points):
    def point(concurrency, ttft=0.03, tpot=0.05, failed=0, input_tokens=128):
        return BenchPoint(concurrency=concurrency, requests=8, failed=failed, input_tokens=input_tokens, output_tokens=32,
                          ttft_s=Spread(n=8, median=ttft, p10=ttft, p90=ttft), tpot_s=Spread(n=8, median=tpot, p10=tpot, p90=tpot),
                          output_tokens_per_s=10.0, peak_memory_bytes=1200 * MIB)  # fmt: skip

    return BenchReport(verdict="pass", checks=(), instruction_set="avx2", how=(), points=tuple(point(**one) for one in points))


def test_nothing_is_corrected_before_the_first_run(tmp_path):
    corrections = correction_for("card", folder=tmp_path)
    assert corrections.factors == {} and corrections.reasons() == () and corrections.ratios() == {}
    assert corrections.amount("weights", 12345) == 12345 and corrections.time("decode", make_estimate()) == make_estimate()


def test_a_run_corrects_the_next_plan_on_that_target_with_that_engine_only(tmp_path):
    record([make_observation(1.25)], folder=tmp_path)
    assert correction_for("card", folder=tmp_path).amount("weights", 1001) == 1252  # bytes are rounded up
    assert correction_for("card-2", folder=tmp_path).amount("weights", 1000) == 1000
    assert correction_for("card", engine="vllm", folder=tmp_path).amount("weights", 1000) == 1000
    record([make_observation(0.9, category="admissible_tokens")], folder=tmp_path)
    assert correction_for("card", folder=tmp_path).amount("admissible_tokens", 1001) == 900  # tokens down
    (told,) = [line for line in correction_for("card", folder=tmp_path).reasons() if line.startswith("weights")]
    assert "x 1.25" in told and "n = 1" in told and "card" in told


def test_names_that_differ_only_in_what_a_file_name_cannot_hold_stay_apart(tmp_path):
    record([make_observation(1.5, target="a/b")], folder=tmp_path)
    assert history_file("a/b", tmp_path) == history_file("a:b", tmp_path)
    assert correction_for("a:b", folder=tmp_path).factors == {} and correction_for("a/b", folder=tmp_path).factors


def test_the_median_is_over_models_not_over_runs(tmp_path):
    record([make_observation(1.8)] * 9 + [make_observation(1.1, model="m2"), make_observation(1.2, model="m3")], folder=tmp_path)
    factor = correction_for("card", folder=tmp_path).factors["weights"]
    assert factor.ratio == pytest.approx(1.2) and factor.runs == 11 and factor.subjects == 3
    assert factor.low == pytest.approx(1.1) and factor.high == pytest.approx(1.8)


def test_a_ratio_is_bounded_and_the_plan_says_so(tmp_path):
    record([make_observation(7.0)], folder=tmp_path)
    corrections = correction_for("card", folder=tmp_path)
    assert corrections.ratio("weights") == BOUNDS["bytes"][1] and corrections.factors["weights"].bounded
    assert "held at the bound, 7 was observed" in corrections.reasons()[0]
    record([make_observation(2.0, target="exact")], folder=tmp_path)
    assert not correction_for("exact", folder=tmp_path).factors["weights"].bounded


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=9))
def test_any_history_gives_a_bounded_ratio(tmp_path_factory, ratios):
    folder = tmp_path_factory.mktemp("history")
    record([make_observation(ratio, model=str(index)) for index, ratio in enumerate(ratios)], folder=folder)
    factor = correction_for("card", folder=folder).factors["weights"]
    assert 0.5 <= factor.ratio <= 2.0 and factor.low <= factor.observed_ratio <= factor.high and factor.runs == len(ratios)


def test_corrections_do_not_pile_up(tmp_path):
    """The engine always admits 0.8 of the bare prediction: however many plans were corrected in between, 0.8 stays."""
    for _ in range(5):
        corrections = correction_for("card", folder=tmp_path)
        plan = make_run_plan(admissible_tokens=corrections.amount("admissible_tokens", 3000))
        found, missing = observe_serving(plan, "m1", make_info(), applied=corrections.ratios())
        assert not missing
        record(found, folder=tmp_path)
    assert correction_for("card", folder=tmp_path).ratio("admissible_tokens") == pytest.approx(0.8)


def test_a_pool_made_for_the_request_teaches_nothing():
    found, missing = observe_serving(make_run_plan(admissible_tokens=50_000), "m1", make_info(num_blocks=256))
    assert found == () and "made for the request" in missing[0]
    (short,), _ = observe_serving(make_run_plan(admissible_tokens=50_000), "m1", make_info(num_blocks=128))
    assert short.predicted == 4096 and short.observed == 2048  # promised for the request, and not even that was admitted


def test_times_and_memory_of_a_bench():
    plan = make_run_plan()
    found, missing = observe_bench(plan, "m1", make_bench({"concurrency": 1}, {"concurrency": 4}), WORKLOAD, device="cpu")
    by = {item.category: item for item in found}
    assert not missing and set(by) == {"prefill", "decode", "memory"}
    assert by["prefill"].predicted == pytest.approx(0.02) and by["prefill"].observed == 0.03
    assert by["decode"].predicted == pytest.approx(0.04) and by["decode"].observed == 0.05
    assert by["memory"].predicted == 1000 * MIB + 4 * 160 * 1024 + 4 * 2048 and by["memory"].observed == 1200 * MIB
    assert all(item.target == "card" and item.layout == "TP1" and item.model_hash == "m1" for item in found)


def test_what_a_bench_does_not_show_is_not_learnt():
    report = make_bench({"concurrency": 1, "input_tokens": 64}, {"concurrency": 2}, {"concurrency": 4, "failed": 1})
    found, missing = observe_bench(make_run_plan(prefill=None), "m1", report, WORKLOAD, device="cuda:0")
    assert found == ()
    assert [line.split(":")[0] for line in missing] == ["prefill", "decode", "memory"]
    assert "predicts no time" in missing[0] and "no clean point at a concurrency of 4" in missing[1] and "host memory" in missing[2]
    _, missing = observe_bench(make_run_plan(), "m1", report, WORKLOAD, device="cpu")
    assert "sent 64 tokens" in missing[0]


def test_a_measured_target_narrows_the_range(tmp_path):
    estimate = make_estimate(0.01, 0.09)
    record([make_observation(2.0, category="decode", model=str(index)) for index in range(3)], folder=tmp_path)
    corrected = correction_for("card", folder=tmp_path).time("decode", estimate)
    assert corrected.low_s < expected_s(estimate) * 2.0 < corrected.high_s
    assert corrected.high_s / corrected.low_s < 0.2 * estimate.high_s / estimate.low_s
    assert corrected.compute_s == pytest.approx(2 * estimate.compute_s)


def test_a_range_holds_what_was_observed(tmp_path):
    ratios = (0.7, 1.0, 2.5)
    record([make_observation(ratio, category="decode", model=str(ratio)) for ratio in ratios], folder=tmp_path)
    estimate = make_estimate()
    corrected = correction_for("card", folder=tmp_path).time("decode", estimate)
    assert corrected.low_s < 0.7 * expected_s(estimate) and corrected.high_s > 2.5 * expected_s(estimate)


def test_a_line_that_cannot_be_read_is_left_out_and_told(tmp_path):
    record([make_observation(1.5)], folder=tmp_path)
    path = history_file("card", tmp_path)
    path.write_text(path.read_text() + '{"schema": "dayzero.observation/9"}\n[1]\n{"torn": \n')
    record([make_observation(1.5, model="m2")], folder=tmp_path)
    history, notes = read_history("card", folder=tmp_path)
    assert len(history) == 2 and len(notes) == 3 and all(str(path) in note for note in notes)
    assert set(notes) <= set(correction_for("card", folder=tmp_path).reasons())


def test_an_observation_must_be_a_measurement():
    for wrong in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(DayZeroError, match="must be positive"):
            replace(make_observation(), observed=wrong)


def _append(folder):
    for _ in range(50):
        record([make_observation(1.5)], folder=folder)


def test_two_runs_that_end_at_once_keep_both_their_lines(tmp_path):
    context = multiprocessing.get_context("fork")
    runs = [context.Process(target=_append, args=(tmp_path,)) for _ in range(2)]
    for run in runs:
        run.start()
    for run in runs:
        run.join()
    history, notes = read_history("card", folder=tmp_path)
    assert len(history) == 100 and not notes


def test_the_history_lives_in_the_users_cache_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    record([make_observation(1.5)])
    assert (tmp_path / ".cache" / "dayzero" / "experience" / "card.jsonl").is_file()
    assert correction_for("card").ratio("weights") == 1.5
