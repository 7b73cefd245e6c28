"""core.sharding: what each rank stores. Every element of every parameter lives on exactly the ranks that the degrees say,
for any layout, uneven experts included (TP-03)."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dayzero.core.errors import DayZeroError
from dayzero.core.model import Parameter, ShardRule
from dayzero.core.plan import Layout
from dayzero.core.sharding import box_elements, even_split, local_shape, owns_layer, rank_boxes
from tests.unit.plan_builders import make_dense_model, make_rule


def count_owners(parameter, layout):
    """How many ranks of one pipeline stage store each element."""
    owners = np.zeros(parameter.shape, dtype=int)
    for rank in range(layout.num_devices // layout.pp):
        for box in rank_boxes(parameter, layout, layout.coordinates(rank)):
            owners[tuple(slice(start, stop) for start, stop in box)] += 1
    return owners


def make_parameter(shape, role, rule):
    return Parameter(name="p", shape=shape, dtype="bfloat16", role=role, shard=rule)


@st.composite
def layouts(draw):
    tp, dp, cp = (draw(st.integers(1, 4)) for _ in range(3))
    ep = draw(st.sampled_from([d for d in range(1, tp * dp * cp + 1) if (tp * dp * cp) % d == 0]))
    return Layout(tp=tp, dp=dp, cp=cp, ep=ep)


@given(layouts(), st.integers(1, 5), st.integers(1, 5), st.integers(0, 2))
@settings(max_examples=150, deadline=None)
def test_every_element_of_a_fused_tensor_is_owned_once_per_replica(layout, first, second, other):
    segments = (first * layout.tp + other, second * layout.tp)  # uneven first half
    shape = (sum(segments), 3)
    parameter = make_parameter(shape, "mlp", make_rule(shape, 0, segments=segments))
    assert (count_owners(parameter, layout) == layout.dp * layout.cp).all()


@given(layouts(), st.integers(1, 13), st.integers(1, 3))
@settings(max_examples=200, deadline=None)
def test_every_element_of_every_expert_is_owned_exactly_once(layout, experts, width):
    """TP-03: experts that do not divide by ep lose nothing, and no rank points past the last one."""
    inner = width * layout.expert_tp
    shape = (experts, 2 * inner, 2)
    parameter = make_parameter(shape, "expert", make_rule(shape, 1, segments=(inner, inner), expert_dim=0))
    assert (count_owners(parameter, layout) == 1).all()


@pytest.mark.parametrize(("experts", "ranks"), [(128, 6), (384, 7), (8, 3)])
def test_uneven_experts_differ_by_at_most_one(experts, ranks):
    """TP-03: the cases of the report, every rank looked at."""
    parts = [even_split(experts, ranks, index) for index in range(ranks)]
    assert [start for start, _ in parts] == [0, *(stop for _, stop in parts[:-1])]
    assert parts[-1][1] == experts
    sizes = [stop - start for start, stop in parts]
    assert max(sizes) - min(sizes) <= 1


@given(st.sampled_from([(1, 8), (2, 8), (4, 8), (8, 8), (8, 4), (8, 2), (2, 1), (3, 3)]), st.integers(1, 4))
def test_key_value_heads_are_repeated_when_ranks_outnumber_them(case, head_dim):
    tp, heads = case
    shape = (heads * head_dim, 2)
    parameter = make_parameter(shape, "attention", make_rule(shape, 0, (heads,), replicable=True))
    assert (count_owners(parameter, Layout(tp=tp)) == max(1, tp // heads)).all()


@pytest.mark.parametrize(("heads", "tp"), [(3, 2), (4, 6), (8, 3)])
def test_key_value_heads_that_do_not_divide_are_refused(heads, tp):
    parameter = make_parameter((heads * 4, 2), "attention", make_rule((heads * 4, 2), 0, (heads,), replicable=True))
    with pytest.raises(DayZeroError, match="cannot be cut"):
        rank_boxes(parameter, Layout(tp=tp), Layout(tp=tp).coordinates(0))


def test_a_parameter_without_a_rule_is_whole_on_every_rank():
    parameter = make_parameter((5, 3), "norm", ShardRule())
    assert (count_owners(parameter, Layout(tp=4, dp=2)) == 8).all()


def test_local_shape_is_what_the_boxes_hold():
    shape = (10, 4)
    parameter = make_parameter(shape, "mlp", make_rule(shape, 0, segments=(6, 4)))
    layout = Layout(tp=2)
    for rank, rows in ((0, 5), (1, 5)):
        boxes = rank_boxes(parameter, layout, layout.coordinates(rank))
        assert local_shape(boxes, 0) == (rows, 4)
        assert box_elements(boxes) == rows * 4


@given(st.integers(1, 6), st.booleans())
def test_every_parameter_has_a_stage_and_only_tied_ones_two(pp, tied):
    model = make_dense_model(layers=6, tied=tied)
    bounds = [6 * stage // pp for stage in range(pp + 1)]
    layout = Layout(pp=pp, stages=tuple(pairwise(bounds)))
    for parameter in model.parameters:
        assert sum(owns_layer(parameter, layout, stage) for stage in range(pp)) == 1, parameter.name
