"""Inputs that broke planners elsewhere: every layer placed, sizes even, counts validated, large microbatch counts."""

from __future__ import annotations

import pytest

from hocket import ConfigError, partition_layers
from hocket.plan import build_pipeline_plan, compare


def test_p93_p96_every_layer_is_placed_and_sizes_differ_by_one_at_most() -> None:
    for layers in range(1, 60):
        for stages in range(1, layers + 1):
            ranges = partition_layers(layers, stages)
            assert [i for r in ranges for i in r] == list(range(layers))
            sizes = [len(r) for r in ranges]
            assert max(sizes) - min(sizes) <= 1
    assert [len(r) for r in partition_layers(38, 8)] == [5, 5, 5, 5, 5, 5, 4, 4]
    assert [len(r) for r in partition_layers(30, 4)] == [8, 8, 7, 7]


def test_p94_stated_counts_are_validated_on_one_rank_too() -> None:
    with pytest.raises(ConfigError, match="9"):
        build_pipeline_plan(8, "gpipe", ranks=1, microbatches=2, partition="counts", layer_counts=[9])


def test_p105_a_planner_that_shows_memory_beside_time() -> None:
    rows = compare(ranks=4, microbatches=512, schedules=["gpipe", "1f1b"]).rows
    gpipe = next(row for row in rows if row.config.schedule == "gpipe")
    leanest = min((row for row in rows if row.config.schedule == "1f1b"), key=lambda row: row.peak_in_flight)
    assert (gpipe.peak_in_flight, leanest.peak_in_flight) == (512, 4)
    assert gpipe.makespan > leanest.makespan >= leanest.lower_bound
