"""Pictures of a plan: every rank has its seat, what is not drawn is told."""

import re

from dayzero.core.plan import FrontierPoint, Layout
from dayzero.report.plan_pictures import frontier, short_tokens, topology


def seats(picture) -> list[str]:
    return re.findall(r"<title>(card [^<]*)</title>", str(picture))


def test_every_rank_has_its_seat():
    layout = Layout(tp=4, pp=2, dp=2)
    drawn = seats(topology(layout, 8))
    assert len(drawn) == 16 and len(set(drawn)) == 16
    assert sum("stage 1" in seat for seat in drawn) == 8 and "more" not in re.sub(r"<title>.*?</title>", "", str(topology(layout, 8)))
    assert "2 nodes" in str(topology(layout, 8))


def test_what_is_not_drawn_is_told():
    picture = str(topology(Layout(tp=8, dp=128), 8))
    assert "120 more nodes of 8 cards" in picture and len(seats(picture)) == 64
    assert "48 more cards a node" in str(topology(Layout(dp=64), 64))


def test_the_frontier_has_a_point_a_length_and_says_where_nothing_fits():
    points = [FrontierPoint(context_tokens=8192, concurrency=100), FrontierPoint(context_tokens=131072, concurrency=6),
              FrontierPoint(context_tokens=2**20, concurrency=0)]  # fmt: skip
    picture = str(frontier(points))
    assert "8,192 tokens: 100 at once" in picture and "131,072 tokens: 6 at once" in picture and "1M" not in picture
    assert "no context" in str(frontier(points[-1:]))


def test_lengths_are_short():
    assert [short_tokens(n) for n in (512, 8192, 131072, 2**20, 1000)] == ["512", "8K", "128K", "1M", "1,000"]
