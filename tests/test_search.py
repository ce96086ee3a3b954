"""Comparing schedules, and searching for the fastest that fits."""

from __future__ import annotations

import json

import pytest

from hocket.bound import lower_bound
from hocket.cost import CostModel
from hocket.errors import ConfigError
from hocket.schedules import GPipeConfig, build, parse_schedule, schedule_names
from hocket.search import compare, expand, search
from hocket.simulate import peak_bytes, simulate


def test_a_bare_name_stands_for_all_its_variants():
    configs = expand(["looped_bfs", "zb_h2", {"schedule": "1f1b"}, GPipeConfig()], (1, 3))
    assert [config.model_dump() for config in configs] == [
        {"schedule": "looped_bfs", "num_stages_per_rank": 1},
        {"schedule": "looped_bfs", "num_stages_per_rank": 3},
        {"schedule": "zb_h2"},
        parse_schedule("1f1b").model_dump(),
        {"schedule": "gpipe"},
    ]
    assert {config.schedule for config in expand(None, (1,))} == set(schedule_names()) - {"inference"}


def test_compare_in_units_of_a_ranks_share():
    table = compare(ranks=4, microbatches=8, schedules=["gpipe", "1f1b", "zero_bubble_v"], stages_per_rank=(1, 2))
    found = {(row.name, row.stages_per_rank): row for row in table.rows}
    assert found["gpipe", 1].makespan == found["1f1b", 1].makespan == 33
    assert found["1f1b zero_bubble", 1].makespan == 27
    assert found["1f1b", 2].makespan == 57 / 2, "a stage is half of a share"
    assert found["zero_bubble_v", 2].makespan == 51 / 2
    assert (found["gpipe", 1].peak_bytes, found["1f1b", 1].peak_bytes, found["1f1b", 2].peak_bytes) == (8, 4, 5.5)
    assert found["1f1b", 1].bubble_fraction == pytest.approx(3 / 11)
    assert found["1f1b zero_bubble", 1].distance == 0
    assert found["1f1b", 1].distance == pytest.approx(33 / 27 - 1)
    assert [row.makespan for row in table.rows] == sorted(row.makespan for row in table.rows)
    assert all(row.fits for row in table.rows)
    assert table.best is table.rows[0]


def test_compare_with_a_budget():
    table = compare(ranks=4, microbatches=8, memory=3.5, stages_per_rank=(1, 2))
    assert table.best is not None
    assert {row.config.schedule for row in table.rows if row.fits} == {"v_half", "v_min"}
    assert all(row.peak_bytes <= 3.5 for row in table.rows if row.fits)
    assert all(row.lower_bound <= row.makespan for row in table.rows)
    assert not any(row.fits for row in table.rows[2:])


def test_compare_with_costs_per_layer():
    costs = CostModel([1, 1, 1, 5], 1, 1, activation_bytes=[1, 2, 3, 4])
    table = compare(costs, ranks=2, microbatches=4, n_layers=4, schedules=["1f1b"], stages_per_rank=(1, 2, 3))
    one = next(row for row in table.rows if row.stages_per_rank == 1)
    program = build(one.config, ranks=2, microbatches=4)
    stages = CostModel([2, 6], 2, 2, activation_bytes=[3, 7])
    assert one.makespan in {simulate(program, stages).makespan}
    assert one.peak_bytes == max(peak_bytes(program, stages))
    assert one.layers == (range(2), range(2, 4))
    refused = [row for row in table.rows if row.refused]
    assert refused and all("4 layers on 6 stages" in row.refused for row in refused)
    assert table.rows[-1].refused, "the refused come last"


def test_the_table_as_text_and_as_json():
    table = compare(ranks=4, microbatches=4, schedules=["gpipe", "dual_pipe_v"])
    lines = str(table).splitlines()
    assert lines[0].split() == [
        "schedule",
        "stages/rank",
        "microbatches",
        "makespan",
        "bubble",
        "peak",
        "over",
        "bound",
        "fits",
    ]
    assert lines[1].split() == ["gpipe", "1", "4", "21", "42.9%", "4", "40.0%", "yes"]
    assert lines[2].startswith("refused: dual_pipe_v: schedule 'dual_pipe_v' needs at least 2 microbatches per rank")
    data = json.loads(json.dumps(table.to_mapping()))
    assert data[0]["makespan"] == 21 and data[0]["fits"] is True
    assert data[1].keys() == {"schedule", "microbatches", "refused"}
    seen: list[tuple[int, int]] = []
    compare(ranks=2, microbatches=4, schedules=["gpipe", "zb_h2"], progress=lambda *at: seen.append(at))
    assert seen == [(1, 2), (2, 2)]


def test_more_microbatches_cost_no_more_memory_in_1f1b_and_less_bubble():
    """512 microbatches: what the table is for (the time order of the schedules, with what they hold)."""
    table = compare(ranks=8, microbatches=512, schedules=["gpipe", "1f1b"], stages_per_rank=(1,))
    rows = {row.name: row for row in table.rows}
    assert rows["gpipe"].peak_bytes == 512
    assert rows["1f1b"].peak_bytes == 8
    assert rows["1f1b zero_bubble"].makespan < rows["1f1b"].makespan == rows["gpipe"].makespan
    assert rows["1f1b"].bubble_fraction < 0.014


def test_search_finds_what_looking_at_all_finds():
    costs = CostModel(1, 1.1, 0.9, hop_latency=0.3, activation_bytes=3, weight_bytes=1, static_bytes=10)
    head = CostModel(2, 2, 1, activation_bytes=1)
    found = search(
        12, costs, ranks=2, microbatches=[2, 4, 8], batch=8, memory=100, last=head, stages_per_rank=(1, 2, 3)
    )
    best = found.best
    assert best.fits and best.peak_bytes <= 100
    everything = []
    for count in (2, 4, 8):
        for config in expand(None, (1, 2, 3)):
            try:
                program = build(config, ranks=2, microbatches=count)
            except ConfigError:
                continue
            for layers in {best.layers, _even(12, program.num_stages)}:
                if len(layers) == program.num_stages:
                    stages = costs.scaled(8 // count).of_stages(layers, None, head.scaled(8 // count))
                    if max(peak_bytes(program, stages)) <= 100:
                        everything.append(simulate(program, stages).makespan)
    assert best.makespan == pytest.approx(min(everything))
    assert found.skipped > 0 and found.too_large > 0
    assert "over the lower bound" in found.summary and best.config.schedule in found.summary


def _even(layers: int, stages: int) -> tuple[range, ...]:
    from hocket.partition import partition_layers

    return tuple(partition_layers(layers, stages))


def test_search_uses_the_budget_and_the_partition():
    costs = CostModel(1, 1, 1, activation_bytes=1)
    wide, narrow = (
        search(16, costs, ranks=4, microbatches=8, memory=memory, stages_per_rank=(1, 2)).best for memory in (1000, 12)
    )
    assert wide.makespan < narrow.makespan and narrow.peak_bytes <= 12 < wide.peak_bytes
    heavy = search(16, costs, ranks=4, microbatches=8, last=CostModel(3, 3, 3), schedules=["1f1b"], stages_per_rank=[1])
    assert list(map(len, heavy.best.layers)) == [5, 5, 5, 1], "the last stage has the head to carry"
    placement = build(heavy.best.config, ranks=4, microbatches=8).placement
    assert heavy.best.lower_bound == lower_bound(placement, 8, CostModel(*[[5, 5, 5, 4]] * 3))


@pytest.mark.parametrize(
    "options, text",
    [
        ({"memory": 0.5}, r"nothing fits on 2 ranks with memory 0.5: the least is .* microbatches; raise memory, use"),
        ({"memory": -1}, r"memory is -1; give each rank more than 0"),
        ({"memory": [1, 2, 3]}, r"memory has 3 numbers for 2 ranks; give one number, or 2"),
        ({"microbatches": []}, r"microbatches is empty"),
        ({"microbatches": [2, 4]}, r"microbatches has 2 numbers, whose steps would not do the same work; give batch"),
        ({"microbatches": [2, 9], "batch": 8}, r"cannot split 8 items into 9 microbatches; use 1 to 8"),
        ({"schedules": ["no_such"]}, r"unknown schedule 'no_such'"),
        ({"schedules": ["1f1b"], "stages_per_rank": [9]}, r"every candidate was refused; the first: 1f1b"),
    ],
)
def test_search_refused(options: dict, text: str):
    with pytest.raises(ConfigError, match=text):
        search(8, CostModel(), **{"ranks": 2, "microbatches": 4, **options})


@pytest.mark.parametrize(
    "options, text",
    [
        ({"schedules": "1f1b"}, r"schedules is '1f1b'; give a list of them: \['1f1b'\]"),
        ({"stages_per_rank": [1, 0]}, r"stages_per_rank must be at least 1, got 0"),
        ({"memory": "much"}, r"memory is 'much'; give a number, or one for each rank"),
    ],
)
def test_compare_refused(options: dict, text: str):
    with pytest.raises(ConfigError, match=text):
        compare(ranks=2, microbatches=4, **options)


def test_costs_of_a_share_are_one_number():
    with pytest.raises(ConfigError, match=r"forward has 2 numbers, where one is needed"):
        compare(CostModel([1, 2]), ranks=2, microbatches=2)
