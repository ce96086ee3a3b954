"""The text grid: as wide as asked, as long as the costs say, with bubbles where there are bubbles."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hocket.draw import draw_text
from hocket.errors import ConfigError
from hocket.program import Action
from hocket.schedules import schedule_names
from hocket.simulate import Event


def rows(picture: str) -> list[str]:
    """The grid of each rank, between its edges."""
    return [line.split("│")[1] for line in picture.splitlines() if line.count("│") == 2]


@settings(deadline=None, max_examples=60)
@given(
    name=st.sampled_from([n for n in schedule_names() if n not in ("greedy", "dual_pipe_v")]),
    ranks=st.integers(1, 9),
    microbatches=st.integers(1, 40),
    width=st.integers(16, 150),
    forward=st.floats(0.1, 5.0),
    color=st.booleans(),
)
def test_any_picture_fits(timeline, name, ranks, microbatches, width, forward, color):
    drawn = timeline(name, ranks, microbatches, forward=forward)
    picture = draw_text(drawn, width=width, color=color)
    plain = re.sub(r"\x1b\[[0-9;]*m", "", picture)
    assert max(map(len, plain.splitlines())) <= width
    assert plain == draw_text(drawn, width=width)
    grid = rows(plain)
    assert len(grid) == ranks
    assert len({len(row) for row in grid}) == 1
    # The share of the bubble is that of the timeline, to about a column for each gap between bars.
    columns = len(grid[0])
    for row, idle in zip(grid, drawn.idle, strict=True):
        gaps = 2 + len(re.findall("·+", row))
        assert abs(row.count("·") - columns * idle / drawn.makespan) <= 1 + gaps


@pytest.mark.parametrize("width", [60, 80, 150, 300])
def test_whole_times_have_whole_columns(timeline, width):
    drawn = timeline("1f1b", 4, 8)
    grid = rows(draw_text(drawn, width=width))
    unit = len(grid[0]) / drawn.makespan
    assert unit >= 1 and unit.is_integer()
    for row, idle in zip(grid, drawn.idle, strict=True):
        assert row.count("·") == unit * idle
        assert [len(bar) for bar in re.findall("F[0-9]?─*", row.replace(" ", "─"))] == [unit] * 8 or unit > 3


def test_names_get_shorter_as_the_room_does(timeline):
    drawn = timeline("gpipe", 2, 2)
    assert "0F0─ 0F1─ " in draw_text(drawn, width=60)
    assert "F0F1" in draw_text(drawn, width=24) and "0F0" not in draw_text(drawn, width=24)
    assert "FF" in draw_text(drawn, width=18)


def test_a_window_shows_that_time_only(timeline):
    drawn = timeline("1f1b", 4, 8)
    picture = draw_text(drawn, width=60, start=10, end=14)
    assert rows(picture)[0].startswith("0B0")
    assert "shown 10 to 14" in picture and "0B7" not in picture
    assert picture.splitlines()[4].split() == ["time", "10", "11", "12", "13"]


def test_two_timelines_share_a_scale_or_not(timeline):
    both = {"plan": timeline("1f1b", 2, 4), "measured": timeline("1f1b", 2, 4, forward=2, backward=4)}
    shared = draw_text(both, width=80)
    assert shared.index("plan") < shared.index("measured")
    first, *_, last = rows(shared)
    assert len(first) == len(last) and first.rstrip("·") != first  # the plan ends half way
    own = rows(draw_text(both, width=80, same_scale=False))
    assert own[:2] == own[2:]


def test_a_pair_that_runs_jointly_is_one_bar_with_two_names(timeline):
    assert "·3F2+0B0── " in draw_text(timeline("dual_pipe_v", 2, 4, overlap_speedup=1.5), width=120)


def test_bare_events_of_a_run():
    events = [
        Event(0, 100.0, 101.0, Action.parse("0F0")),
        Event(1, 101.5, 102.5, Action.parse("1F0")),
        Event(1, 101.4, 101.5, Action.parse("1RECV_F0")),
    ]
    first, second = rows(draw_text(events, width=32))
    assert first == "0F0──────── " + 17 * "·"
    assert second == 17 * "·" + "1F0──────── "
    assert "makespan 2.5 · bubble 60.0 %" in draw_text(events, width=32)


def test_bars_that_overlap_leave_a_row_as_long_as_the_others():
    bars = [(0, 6, "0F0"), (2, 4, "0F1"), (4, 9, "0F2"), (9, 12, "0F3")]
    (row,) = rows(draw_text([Event(0, start, end, Action.parse(name)) for start, end, name in bars], width=46))
    assert row == "0F0─────────────── 0F2────── 0F3───── "


def test_a_texture_has_each_op_as_often_as_its_share(timeline):
    drawn = timeline("1f1b", 8, 128)
    for row, idle in zip(rows(draw_text(drawn, width=80)), drawn.idle, strict=True):
        per_time = len(row) / drawn.makespan
        assert set(row) == set("FB·")
        assert row.count("F") == pytest.approx(128 * per_time, abs=1.5)
        assert row.count("B") == pytest.approx(256 * per_time, abs=1.5)
        assert row.count("·") == pytest.approx(idle * per_time, abs=1.5)


@pytest.mark.parametrize(
    "change,message",
    [
        ({"width": 15}, "width of 15 columns; give 16 to"),
        ({"width": 10**9}, "width of 1000000000 columns"),
        ({"start": 5, "end": 5}, "window from 5 to 5 is empty"),
        ({"end": float("nan")}, "window from 0 to nan"),
        ({"end": float("inf")}, "window from 0 to inf"),
    ],
)
def test_refused(timeline, change, message):
    with pytest.raises(ConfigError, match=message):
        draw_text(timeline("1f1b", 2, 2), **change)
