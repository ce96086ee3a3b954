"""Panels: times from 0, memory as the simulator counts it, links as the dependency rule says."""

import math
from collections import Counter

import pytest

from hocket.draw.panel import panels_of
from hocket.errors import ConfigError
from hocket.program import Action
from hocket.simulate import Event

SCHEDULES = [
    ("gpipe", 3, 5),
    ("1f1b", 4, 8),
    ({"schedule": "1f1b", "num_stages_per_rank": 2, "zero_bubble": True}, 4, 8),
    ("zero_bubble_v", 4, 6),
    ("dual_pipe_v", 3, 8),
    ("inference", 4, 4),
]


@pytest.mark.parametrize("schedule,ranks,microbatches", SCHEDULES)
@pytest.mark.parametrize("overlap", [None, 1.3])
def test_memory_peaks_are_those_of_the_timeline(timeline, schedule, ranks, microbatches, overlap):
    drawn = timeline(schedule, ranks, microbatches, overlap_speedup=overlap)
    (panel,) = panels_of(drawn)
    assert tuple(max(held for _, held in steps) for steps in panel.memory) == drawn.peak_in_flight
    sized = timeline(schedule, ranks, microbatches, activation_bytes=100, weight_bytes=30, static_bytes=7)
    (panel,) = panels_of(sized)
    assert tuple(max(held for _, held in steps) for steps in panel.memory) == sized.peak_bytes
    assert {steps[-1][1] for steps in panel.memory} == {7}


@pytest.mark.parametrize("schedule,ranks,microbatches", SCHEDULES)
def test_figures_and_links_are_those_of_the_timeline(timeline, schedule, ranks, microbatches):
    drawn = timeline(schedule, ranks, microbatches, hop_latency=0.25)
    (panel,) = panels_of(drawn, messages=True)
    assert panel.makespan == pytest.approx(drawn.makespan)
    assert panel.bubble_fraction == pytest.approx(drawn.bubble_fraction)
    assert len(panel.links) == len(panel.messages) == len(drawn.messages)
    between = Counter((maker.rank, user.rank) for maker, user in panel.links)
    assert between == Counter((m.source, m.dest) for m in drawn.messages)
    assert all(user.start >= maker.end + 0.25 - 1e-9 for maker, user in panel.links)


def test_times_begin_at_zero_and_pairs_come_apart():
    pair = Action.pair(Action.parse("0F1"), Action.parse("0B0"))
    (panel,) = panels_of([Event(0, 50.0, 52.0, pair), Event(0, 49.0, 50.0, Action.parse("0F0"))])
    assert [str(event.action) for event in panel.rows[0]] == ["0F0", "0F1", "0B0"]
    assert panel.rows[0][0].start == 0 and panel.makespan == 3 and panel.bubble_fraction == 0


def test_bars_that_overlap_count_once():
    bars = [(0, 8, "0F0"), (1, 2, "0F1"), (6, 10, "0F2"), (15, 20, "0F3")]
    (panel,) = panels_of([Event(0, start, end, Action.parse(name)) for start, end, name in bars])
    assert panel.bubble_fraction == pytest.approx(0.25)


@pytest.mark.parametrize(
    "source,message",
    [
        ([], "no compute event"),
        ({}, "no timeline"),
        ([Event(0, 0, 1, Action.parse("0SEND_F0"))], "no compute event"),
        ([Event(0, 2.0, 1.0, Action.parse("0F0"))], "0F0 of rank 0 runs from 2.0 to 1.0"),
        ([Event(-1, 0.0, 1.0, Action.parse("0F0"))], "rank -1"),
        ([Event(0, 0.0, math.nan, Action.parse("0F0"))], "to nan"),
        (7, "int given cannot be drawn"),
        (["0F0"], "list given cannot be drawn"),
        ({"mine": None}, "NoneType mine cannot be drawn"),
    ],
)
def test_refused(source, message):
    with pytest.raises(ConfigError, match=message):
        panels_of(source)
