"""plan.links: a collective is priced over the links it crosses."""

from dataclasses import replace
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dayzero.core.plan import DEFAULT_PLACEMENT, Layout
from dayzero.core.target import LinkPoint, MeasuredLink, Workload
from dayzero.devices.link_fit import FACTORS, fit, slowest, spread
from dayzero.devices.targets import load_target, write_target
from dayzero.plan import PlanOptions, make_plan, with_figures
from dayzero.plan.links import ALPHA_NETWORK_S, ALPHA_NODE_S, Links
from dayzero.plan.roofline import shares_of
from dayzero.plan.traffic import Traffic
from dayzero.plan.work import Batch
from tests.unit.plan_builders import make_dense_model, make_latent_moe_model, make_target


def make_link(collective="all_reduce", group_size=2, bytes_per_s=1e10, latency_s=1e-4):
    return MeasuredLink(collective=collective, group_size=group_size, latency_s=latency_s, bytes_per_s=bytes_per_s)


def make_measured(*links, **figures):
    """The toy card (8 a node; 400 GB/s links, 50 GB/s across) after measuring: every collective over 2 and over 8 cards."""
    every = [make_link(name, size, rate, late) for name in FACTORS for size, rate, late in ((2, 2e11, 1e-5), (8, 1e11, 9e-5))
             if name != "send_recv" or size == 2]  # fmt: skip
    return replace(make_target(**figures), network_bytes_per_s=None, links=links or tuple(every))


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


MEASURED_LINKS = Links(make_measured())
# Measured slower than any network: what is far is then no faster.
SLOW_LINKS = Links(make_measured(*(make_link(name, size, 1e9, 1e-3) for name in FACTORS for size in (2, 4))))


@given(st.integers(2, 64), st.integers(1, 64), st.integers(1, 64), st.floats(0, 1e10), st.sampled_from([LINKS, MEASURED_LINKS, SLOW_LINKS]))
def test_more_ranks_in_one_domain_never_cost_more(ranks, one, other, num_bytes, links):
    """What the bounds of the search rest on."""
    fewer, more = sorted((min(one, ranks), min(other, ranks)))
    for collective in (links.gather, links.reduce, links.exchange):
        slow, fast = collective(num_bytes, ranks, fewer), collective(num_bytes, ranks, more)
        assert fast.alpha <= slow.alpha + 1e-12 and fast.beta <= slow.beta + 1e-12


@pytest.mark.parametrize("layout", [
    Layout(tp=4, pp=2, dp=4, ep=8), Layout(tp=2, pp=4, cp=4, ep=2), Layout(tp=16, dp=2, ep=32, sp=True), Layout(tp=8, cp=8, cp_in_tp=4),
])  # fmt: skip
@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("links", [LINKS, MEASURED_LINKS, SLOW_LINKS], ids=["published", "measured", "slow"])
def test_no_placement_beats_the_bound(layout, phase, links):
    traffic, batch = Traffic(make_latent_moe_model(layers=4, dense=1), links, 2), Batch(phase, 64, 64, 4096)
    bound = traffic.at_best(layout, batch)
    for placement in permutations(DEFAULT_PLACEMENT):
        cost = traffic.step(replace(layout, placement=placement), batch)
        assert cost.alpha + cost.beta >= (bound.alpha + bound.beta) * (1 - 1e-9)


# --- measured links


@pytest.mark.parametrize("collective", list(FACTORS))
@pytest.mark.parametrize("group_size", [2, 8])
def test_the_price_of_a_collective_is_what_was_measured(collective, group_size):
    """The planner's formula and the fit's are the same one: a measured point comes back as it was."""
    link = fit(collective, group_size, tuple(
        LinkPoint(num_bytes=size, best_s=5e-5 + FACTORS[collective](group_size) * size / 3e9, median_s=1.0)
        for size in (1024, 65536, 1 << 26)
    ))  # fmt: skip
    assert (link.latency_s, link.bytes_per_s) == (pytest.approx(5e-5), pytest.approx(3e9))
    links = Links(make_measured(link))
    price = {"all_reduce": links.reduce, "all_gather": links.gather, "all_to_all": links.exchange}.get(collective)
    if collective == "send_recv":
        if group_size == 8:
            return  # between two cards only
        cost = links.hand_over(1e6, 2, 2)
    elif price is None:  # a reduce-scatter is priced as an all-gather is
        cost = Links(make_measured(replace(link, collective="all_gather"))).gather(1e6, group_size, group_size)
    else:
        cost = price(1e6, group_size, group_size)
    assert cost.alpha == pytest.approx(5e-5) and cost.beta == pytest.approx(FACTORS[collective](group_size) * 1e6 / 3e9)


def test_each_collective_has_its_own_figure_and_what_was_not_measured_the_published_one():
    links = Links(make_measured(make_link("all_reduce", 8, 1e11, 9e-5)))
    assert links.reduce(8 * GB, 8, 8) == pytest.approx((9e-5, 2 * 7 / 8 * 8 / 100))
    assert links.gather(8 * GB, 8, 8) == LINKS.gather(8 * GB, 8, 8) and links.exchange(GB, 8, 8) == LINKS.exchange(GB, 8, 8)


@pytest.mark.parametrize(("ranks", "size"), [(2, 2), (3, 2), (4, 2), (5, 8), (6, 8), (8, 8), (64, 8)])
def test_the_nearest_measured_group_size_stands_for_others(ranks, size):
    assert MEASURED_LINKS.measured("all_reduce", ranks).group_size == size
    rate = {2: 2e11, 8: 1e11}[size]
    inside = min(ranks, 8)
    near = 2 * (1 - 1 / inside) * GB / rate
    far = 2 * (1 / inside - 1 / ranks) * GB / 2.5e10  # the network is assumed
    assert MEASURED_LINKS.reduce(GB, ranks, inside).beta == pytest.approx(near + far)
    told = MEASURED_LINKS.told(Layout(tp=ranks))[0]
    assert f"all_reduce measured over {size} ranks" in told and (f"the nearest to {ranks}" in told) == (ranks != size)


@pytest.mark.parametrize("suffix", ["yaml", "json"])
def test_a_measured_file_is_what_the_plan_uses(tmp_path, suffix):
    """Written, read and planned with: ten times the rate is a tenth of the transfers, in the range and in the words."""
    plans, model = [], make_dense_model(layers=8, hidden=1024, heads=16, kv_heads=8, head_dim=64, inner=4096)
    for rate in (1e8, 1e9):
        links = tuple(make_link(name, size, rate, 0.0) for name in FACTORS for size in (2, 4))
        write_target(make_measured(*links), tmp_path / f"mine.{suffix}")
        target = load_target(str(tmp_path / f"mine.{suffix}"))
        assert target.links == links
        plans.append(make_plan(model, target, Workload(), PlanOptions(tp=4, devices=4, pp=1, dp=1)))
    slow, fast = plans
    assert slow.prefill.communication_s == pytest.approx(10 * fast.prefill.communication_s) and fast.prefill.communication_s > 0
    assert slow.decode.high_s > fast.decode.high_s and slow.decode.low_s > fast.decode.low_s
    resting = [line for line in fast.rests_on if line.startswith("links.all_reduce")]
    assert resting == ["links.all_reduce = 1 GB/s after 0 us over 2 ranks, 1 GB/s after 0 us over 4 ranks "
                       "(measured on this machine; other sizes take the nearest)"]  # fmt: skip
    assert not any(line.startswith("node.link_bytes_per_s") for line in fast.rests_on)
    assert any("all_reduce measured over 4 ranks" in line for line in fast.links)


def test_measured_links_narrow_the_range():
    model, options = make_dense_model(layers=8, hidden=1024, heads=16, kv_heads=8, head_dim=64), PlanOptions(tp=8, devices=8, pp=1, dp=1)
    # The same rate, published and measured: slow enough to be most of the time.
    node = replace(make_target().node, link_bytes_per_s=1e8)
    published = replace(make_target(), node=node)
    measured = replace(published, network_bytes_per_s=None, links=tuple(make_link(name, 8, 1e8, 1.8e-5) for name in FACTORS))
    partly = replace(measured, links=measured.links[:2])
    wide, narrow, part = (make_plan(model, target, Workload(), options).prefill for target in (published, measured, partly))
    assert narrow.communication_s == pytest.approx(wide.communication_s, rel=0.01)
    assert narrow.high_s / narrow.low_s < wide.high_s / wide.low_s and "links measured" in narrow.note
    assert "links measured" not in part.note and "links measured" not in wide.note


def test_the_range_covers_the_points_the_line_does_not_meet():
    """Half the rate at 64 MiB, as where a cache is too small: the range reaches down to it; start-up is not a share of a rate."""
    points = tuple(LinkPoint(num_bytes=size, best_s=best_s, median_s=best_s)
                   for size, best_s in ((1024, 1e-3), (1 << 20, 1e-4 + 1e-3), (1 << 26, 1e-4 + 128e-3)))  # fmt: skip
    link = MeasuredLink(collective="send_recv", group_size=2, latency_s=1e-4, bytes_per_s=(1 << 20) / 1e-3, points=points)
    target = make_measured(*(link if name == "send_recv" else make_link(name) for name in FACTORS))
    assert Links(target).spread() == (1.0, pytest.approx(0.5, rel=0.01))
    assert "link 50%-100%" in shares_of(target, "bfloat16").note
    assert "link 70%-100%" in shares_of(make_measured(), "bfloat16").note


def test_a_link_that_the_user_states_replaces_the_measured_ones():
    given = with_figures(make_measured(), {"node.link_bytes_per_s": "900GB/s"})
    assert given.links == () and given.node.link_bytes_per_s == 9e11
    assert with_figures(make_measured(), {"card.memory_bytes": "96GiB"}).links == make_measured().links


@given(st.floats(0, 1e-2), st.floats(1e6, 1e12), st.sampled_from(list(FACTORS)), st.integers(2, 64))
def test_a_fit_finds_the_line_its_points_lie_on(latency_s, rate, collective, group_size):
    points = tuple(LinkPoint(num_bytes=4**power, best_s=latency_s + FACTORS[collective](group_size) * 4**power / rate, median_s=1.0)
                   for power in range(5, 14))  # fmt: skip
    link = fit(collective, group_size, points)
    for point in points:
        back = link.latency_s + FACTORS[collective](group_size) * point.num_bytes / link.bytes_per_s
        assert back == pytest.approx(point.best_s, rel=1e-3)


def test_twice_too_long_weighs_as_much_as_half():
    """Of one size measured as 1 ms and as 4 ms, the line lies at 2 ms."""
    link = fit("send_recv", 2, tuple(LinkPoint(num_bytes=10**6, best_s=s, median_s=s) for s in (1e-3, 4e-3)))
    assert link.latency_s + 1e6 / link.bytes_per_s == pytest.approx(2e-3)


def test_a_fit_never_invents_speed():
    """Time that falls with the bytes (a disturbed machine) and a negative start-up."""
    falling = tuple(LinkPoint(num_bytes=size, best_s=s, median_s=s) for size, s in ((1000, 3e-3), (10**6, 1e-3)))
    link = fit("send_recv", 2, falling)
    assert link.bytes_per_s == pytest.approx(1e9) and link.latency_s == 1e-3
    late = tuple(LinkPoint(num_bytes=size, best_s=s, median_s=s) for size, s in ((1000, 1e-6), (2000, 4e-6)))
    assert fit("send_recv", 2, late).latency_s == 0.0
    single = fit("send_recv", 2, falling[1:])
    assert single.bytes_per_s == pytest.approx(1e9) and single.latency_s == 0.0


def test_the_slowest_rank_of_each_repetition_counts():
    ranks = [[[1024, [1e-3, 4e-3, 2e-3]]], [[1024, [3e-3, 1e-3, 5e-3]]]]
    (point,) = slowest(ranks)
    assert (point.best_s, point.median_s) == (3e-3, 4e-3)
    assert "median/best up to 1.33, fit within 0%" in spread(fit("all_reduce", 2, (point,)))
