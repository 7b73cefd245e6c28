"""plan.stages: every layer exactly once, in order, and the worst stage as light as any cut makes it (DI-04)."""

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dayzero.core.errors import DayZeroError
from dayzero.core.target import Workload
from dayzero.core.units import GIB
from dayzero.plan import PlanOptions, make_plan
from dayzero.plan.stages import Caps, cut_stages, first_cut, lightest_cost, stages_from_sizes
from tests.unit.plan_builders import make_dense_model, make_latent_moe_model, make_target


def assert_covers(stages, num_layers):
    assert [layer for start, stop in stages for layer in range(start, stop)] == list(range(num_layers))
    assert all(start < stop for start, stop in stages), stages


def heaviest(costs, stages, first, last):
    sums = [sum(costs[start:stop]) for start, stop in stages]
    sums[0] += first
    sums[-1] += last
    return max(sums)


@pytest.mark.parametrize(("layers", "stages"), [(30, 4), (10, 3), (61, 4), (61, 8)])
def test_uneven_splits_drop_no_layer(layers, stages):
    """DI-04: 30 on 4 used to become 28, 10 on 3 became 8."""
    cut = cut_stages([7] * layers, stages, first_extra=3, last_extra=3)
    assert_covers(cut, layers)
    sizes = [stop - start for start, stop in cut]
    assert max(sizes) - min(sizes) <= 1
    model = make_dense_model(layers=layers)
    plan = make_plan(model, make_target(), Workload(), PlanOptions(pp=stages))
    assert_covers(plan.layout.stages, layers)


def test_more_stages_than_layers_are_refused():
    """DI-04: (5, 8)."""
    with pytest.raises(DayZeroError, match="more pipeline stages than layers"):
        cut_stages([1] * 5, 8)


@pytest.mark.parametrize("sizes", [(16, 15, 15), (16, 15, 15, 16), (31, 30, 0, 0), (), (62, -1)])
def test_bad_partitions_are_refused(sizes):
    """DI-04: wrong length or sum, an empty stage."""
    with pytest.raises(DayZeroError, match="does not cover"):
        stages_from_sizes(61, sizes)


def test_a_good_partition_is_taken_as_it_is():
    """DI-04: 16,15,15,15."""
    assert stages_from_sizes(61, (16, 15, 15, 15)) == ((0, 16), (16, 31), (31, 46), (46, 61))


def test_dense_layers_weigh_little_and_the_head_is_on_the_last_stage():
    """DI-04: 3 dense layers and 58 expert layers over 4 stages: balanced bytes, not balanced counts."""
    plan = make_plan(make_latent_moe_model(), make_target(memory_bytes=500 * GIB), Workload(), PlanOptions(tp=8, pp=4))
    sizes = [stop - start for start, stop in plan.layout.stages]
    assert_covers(plan.layout.stages, 61)
    assert sizes[0] > max(sizes[1:]), sizes
    roles = [{line.name for line in rank.lines if line.category == "weights"} for rank in plan.ledger]
    for rank, held in zip(plan.ledger, roles, strict=True):
        assert ("embedding" in held) == (rank.stage == 0) and ("head" in held) == (rank.stage == 3)
    assert plan.admissible_tokens == min(rank.admissible_tokens for rank in plan.ledger)
    assert any("limited by stage" in reason for reason in plan.reasons)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=9), st.integers(1, 9), st.integers(0, 60), st.integers(0, 60))
def test_no_cut_has_a_lighter_worst_stage(costs, num_stages, first, last):
    if num_stages > len(costs):
        return
    best = min(
        heaviest(costs, tuple(zip((0, *inner), (*inner, len(costs)), strict=True)), first, last)
        for inner in combinations(range(1, len(costs)), num_stages - 1)
    )
    for cut in (cut_stages, first_cut):
        stages = cut(costs, num_stages, first_extra=first, last_extra=last)
        assert_covers(stages, len(costs))
        assert len(stages) == num_stages
        assert heaviest(costs, stages, first, last) == best


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=8), st.integers(1, 8), st.integers(0, 30),
       st.integers(0, 30), st.integers(1, 150))  # fmt: skip
def test_no_cut_within_the_memory_has_a_faster_slowest_stage(layers, num_stages, first, last, room):
    """Seconds are balanced, bytes are kept: against every cut there is."""
    if num_stages > len(layers):
        return
    times, held = [time for time, _ in layers], [size for _, size in layers]
    cuts = [tuple(zip((0, *inner), (*inner, len(layers)), strict=True))
            for inner in combinations(range(1, len(layers)), num_stages - 1)]  # fmt: skip
    within = [cut for cut in cuts if heaviest(held, cut, first, last) <= room]
    caps = Caps(held, first, last, room)
    if not within:
        with pytest.raises(DayZeroError, match="no cut keeps every stage within its memory"):
            cut_stages(times, num_stages, caps=caps)
        return
    best = min(heaviest(times, cut, 0, 7) for cut in within)
    for function in (cut_stages, first_cut):
        stages = function(times, num_stages, last_extra=7, caps=caps)
        assert_covers(stages, len(layers))
        assert heaviest(times, stages, 0, 7) == best and heaviest(held, stages, first, last) <= room


@given(st.data(), st.lists(st.sampled_from([0, 1, 7, 30, 31]) | st.integers(0, 99), min_size=1, max_size=9))
def test_the_heaviest_stage_costs_what_the_best_of_all_cuts_does(data, costs):
    """What the search bounds times by: neither above (a faster layout would be skipped) nor below."""
    num_stages, last = data.draw(st.integers(1, len(costs))), data.draw(st.integers(0, 60))
    every = [(0, *inner, len(costs)) for inner in combinations(range(1, len(costs)), num_stages - 1)]
    best = min(heaviest(costs, list(pairwise(ends)), 0, last) for ends in every)
    assert lightest_cost(costs, num_stages, last_extra=last) == best
