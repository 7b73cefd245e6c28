"""plan.links: a collective is priced over the links it crosses."""

from dataclasses import replace
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dayzero.core.plan import DEFAULT_PLACEMENT, Layout
from dayzero.plan.links import ALPHA_NETWORK_S, ALPHA_NODE_S, Links
from dayzero.plan.traffic import Traffic
from dayzero.plan.work import Batch
from tests.unit.plan_builders import make_latent_moe_model, make_target

LINKS = Links(make_target(num_cards=8))  # 400 GB/s inside, 50 GB/s across
GB = 1e9


def test_a_ring_inside_a_node():
    cost = LINKS.reduce(8 * GB, 8, 8)
    assert cost.beta == pytest.approx(2 * 7 / 8 * 8 / 400) and cost.alpha == pytest.approx(3 * ALPHA_NODE_S)


def test_across_nodes_every_card_carries_its_part():
    cost = LINKS.gather(16 * GB, 16, 8)
    assert cost.beta == pytest.approx(7 / 8 * 16 / 400 + 1 / 2 * 16 / 8 / 50)
    assert cost.alpha == pytest.approx(3 * ALPHA_NODE_S + ALPHA_NETWORK_S)
    assert LINKS.gather(16 * GB, 2, 1).beta == pytest.approx(1 / 2 * 16 / 50), "one rank a node: all of it over the network"


def test_one_rank_speaks_to_nobody():
    for cost in (LINKS.gather(GB, 1, 1), LINKS.reduce(GB, 1, 1), LINKS.exchange(GB, 1, 1)):
        assert cost.alpha == cost.beta == 0


def test_stages_inside_a_node_hand_over_over_its_link():
    near, far = LINKS.hand_over(GB, 4, 4), LINKS.hand_over(GB, 4, 1)
    assert near.beta == pytest.approx(3 / 400) and far.beta == pytest.approx(3 / 50)


@given(st.integers(2, 64), st.integers(1, 64), st.integers(1, 64), st.floats(0, 1e10))
def test_more_ranks_in_one_domain_never_cost_more(ranks, one, other, num_bytes):
    """What the bounds of the search rest on."""
    fewer, more = sorted((min(one, ranks), min(other, ranks)))
    for collective in (LINKS.gather, LINKS.reduce, LINKS.exchange):
        slow, fast = collective(num_bytes, ranks, fewer), collective(num_bytes, ranks, more)
        assert fast.alpha <= slow.alpha + 1e-12 and fast.beta <= slow.beta + 1e-12


@pytest.mark.parametrize("layout", [
    Layout(tp=4, pp=2, dp=4, ep=8), Layout(tp=2, pp=4, cp=4, ep=2), Layout(tp=16, dp=2, ep=32, sp=True), Layout(tp=8, cp=8, cp_in_tp=4),
])  # fmt: skip
@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_no_placement_beats_the_bound(layout, phase):
    traffic, batch = Traffic(make_latent_moe_model(layers=4, dense=1), LINKS, 2), Batch(phase, 64, 64, 4096)
    bound = traffic.at_best(layout, batch)
    for placement in permutations(DEFAULT_PLACEMENT):
        cost = traffic.step(replace(layout, placement=placement), batch)
        assert cost.alpha + cost.beta >= (bound.alpha + bound.beta) * (1 - 1e-9)
