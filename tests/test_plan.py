"""Plans: the greedy ones in every field, other schedules, shared weights, and what is refused."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from hocket.errors import ConfigError, PartitionError, ScheduleError
from hocket.plan import PipelinePlan, build_pipeline_plan, rank_workload, shared_weight_gradients
from hocket.schedules import GPipeConfig, schedule_names

GREEDY = json.loads((Path(__file__).parent / "data" / "greedy_plans.json").read_text())
PLANS = [case for case in GREEDY if "error" not in case]
REFUSALS = [case for case in GREEDY if "error" in case]


def _plan(case: dict) -> PipelinePlan:
    config = {"schedule": "greedy", "policy": case["schedule"], "num_stages_per_rank": case["virtual"]}
    return build_pipeline_plan(case["layers"], config, ranks=case["stages"], microbatches=case["microbatches"])


def _name(case: dict) -> str:
    return f"{case['schedule']}-{case['layers']}-{case['stages']}x{case['virtual']}-{case['microbatches']}"


@pytest.mark.parametrize("case", PLANS, ids=_name)
def test_greedy_plans_in_every_field(case: dict):
    plan = _plan(case)
    metrics, ranks = plan.metrics, case["stages"]
    assert (metrics.total_ticks, metrics.total_events) == (case["ticks"], case["events"])
    assert (list(metrics.busy_ticks), list(metrics.idle_ticks)) == (case["busy"], case["idle"])
    assert np.float32(metrics.bubble_fraction) == np.float32(case["bubble"]), "the file has single precision"
    assert [[a.layer_range.start, a.layer_range.stop] for a in plan.stage_assignments] == case["ranges"]
    assert [a.stage for a in plan.stage_assignments] == list(range(ranks * case["virtual"]))
    assert [(a.rank, a.local_index) for a in plan.stage_assignments] == [
        (a.stage % ranks, a.stage // ranks) for a in plan.stage_assignments
    ]
    assert [" ".join(f"{e.tick}:{e.action}" for e in plan.events_for(r)) for r in range(ranks)] == case["ranks"]


@pytest.mark.parametrize("case", REFUSALS, ids=_name)
def test_greedy_refusals_name_the_numbers(case: dict):
    with pytest.raises(ValueError, match=r"(?s)\w") as error:
        _plan(case)
    got, wanted = case["error"].rsplit("got ", 1)[1].rstrip(")").replace("<", ">").split(" > ")
    assert isinstance(error.value, ConfigError)
    assert f"got {got}" in str(error.value) or f"={got}" in str(error.value)
    assert wanted in str(error.value).split(got, 1)[1]
    assert any(word in str(error.value) for word in ("lower", "raise", "fewer", "more")), "it says what to change"


def test_a_plan_says_it_all():
    plan = _plan(PLANS[2])
    assert plan.summary() == (
        "greedy (policy=gpipe, num_stages_per_rank=2): 10 layers in 6 stages on 3 ranks, 6 microbatches: 28 ticks, "
        "72 events, bubble 14.3%"
    )
    assert [a.layer_range for a in plan.assignments_for(1)] == [range(2, 4), range(8, 9)]
    data = json.loads(json.dumps(plan.to_mapping()))
    assert data["schedule"] == {"schedule": "greedy", "policy": "gpipe", "num_stages_per_rank": 2}
    assert data["total_ticks"] == 28
    assert data["stages"][4] == {"stage": 4, "rank": 1, "local_index": 1, "layers": [8, 9]}
    assert data["events"][0][:3] == ["0:0F0", "1:0F1", "2:0F2"]
    assert [event.tick for event in plan.events] == sorted(event.tick for event in plan.events)
    assert sum(len(plan.events_for(r)) for r in range(3)) == len(plan.events) == 72


def test_one_tick_each_but_two_for_the_full_backward_of_a_split_schedule():
    gpipe = build_pipeline_plan(8, GPipeConfig(), ranks=4, microbatches=8)
    assert gpipe.metrics.total_ticks == 2 * (8 + 3)
    assert build_pipeline_plan(8, "gpipe", ranks=4, microbatches=8, backward_ticks=2).metrics.total_ticks == 3 * (8 + 3)
    zero = build_pipeline_plan(8, {"schedule": "1f1b", "zero_bubble": True}, ranks=4, microbatches=8)
    assert zero.metrics.total_ticks == 8 * 3 + 3
    assert {event.ticks for event in zero.events} == {1}
    pairs = build_pipeline_plan(8, "dual_pipe_v", ranks=4, microbatches=8)
    assert {event.ticks for event in pairs.events if str(event.action.op) == "B"} == {2}
    assert pairs.metrics.total_ticks == 51


@pytest.mark.parametrize("name", [name for name in schedule_names() if name != "inference"])
def test_every_schedule_can_be_planned(name: str):
    plan = build_pipeline_plan(16, name, ranks=4, microbatches=8)
    stages = plan.num_stages
    assert [layer for a in plan.stage_assignments for layer in a.layer_range] == list(range(16))
    metrics = plan.metrics
    assert all(b + i == metrics.total_ticks for b, i in zip(metrics.busy_ticks, metrics.idle_ticks, strict=True))
    assert 0 <= metrics.bubble_fraction < 1
    assert sum(event.action.op == 0 for event in plan.events) == stages * 8
    for rank in range(4):
        events = plan.events_for(rank)
        assert all(a.tick + a.ticks <= b.tick for a, b in pairwise(events))


def test_partitions():
    costs = [1.0] * 7 + [9.0]
    plan = build_pipeline_plan(8, "1f1b", ranks=2, microbatches=4, partition="costs", layer_costs=costs)
    assert [len(a.layer_range) for a in plan.stage_assignments] == [7, 1]
    plan = build_pipeline_plan(8, "1f1b", ranks=2, microbatches=4, partition="costs", last_cost=2.0)
    assert [len(a.layer_range) for a in plan.stage_assignments] == [5, 3]
    plan = build_pipeline_plan(8, "1f1b", ranks=2, microbatches=4, partition="counts", layer_counts=[2, 6])
    assert [len(a.layer_range) for a in plan.stage_assignments] == [2, 6]
    plan = build_pipeline_plan(2, "1f1b", ranks=3, microbatches=4, allow_empty=True)
    assert [len(a.layer_range) for a in plan.stage_assignments] == [1, 1, 0]


@pytest.mark.parametrize(
    "layers, config, options, kind, text",
    [
        ("4", "gpipe", {}, PartitionError, r"n_layers must be a whole number, got '4'"),
        (0, "gpipe", {}, PartitionError, r"a plan needs at least 1 layer, got n_layers=0"),
        (8, "gpipe", {"ranks": 0}, ScheduleError, r"ranks must be at least 1, got 0"),
        (8, "gpipe", {"microbatches": 0}, ScheduleError, r"microbatches must be at least 1, got 0"),
        (8, {"schedule": "greedy", "num_stages_per_rank": 0}, {}, ConfigError, r"num_stages_per_rank=0"),
        (3, {"schedule": "looped_bfs", "num_stages_per_rank": 2}, {}, PartitionError, r"got 4 > 3\): 2 ranks with 2"),
        (8, "gpipe", {"partition": "odd"}, ConfigError, r"unknown partition 'odd'; choose one of 'even', 'costs', 'co"),
        (8, "gpipe", {"layer_costs": [1] * 8}, ConfigError, r"layer_costs is given, but partition is 'even'; say"),
        (8, "gpipe", {"partition": "counts"}, ConfigError, r"layer_counts is missing"),
        (
            8,
            "gpipe",
            {"partition": "counts", "layer_counts": [4, 5]},
            PartitionError,
            r"place 9 layers, but there are 8",
        ),
        (8, "gpipe", {"backward_ticks": 0}, ConfigError, r"backward_ticks must be at least 1, got 0"),
        (8, "no_such", {}, ConfigError, r"unknown schedule 'no_such'"),
    ],
)
def test_refused(layers: int, config: object, options: dict, kind: type, text: str):
    with pytest.raises(kind, match=text):
        build_pipeline_plan(layers, config, **{"ranks": 2, "microbatches": 4, **options})


def test_the_work_of_one_process():
    plan = build_pipeline_plan(8, "zero_bubble_v", ranks=2, microbatches=4)
    work = rank_workload(plan, 5, 1, 2)
    assert (work.global_rank, work.pipeline_rank, work.data_parallel_rank) == (5, 1, 2)
    assert [a.stage for a in work.assignments] == [1, 2]
    assert {str(e.action.op) for e in work.forward_events} == {"F"}
    assert {str(e.action.op) for e in work.backward_events} == {"I", "W"}
    assert len(work.forward_events) + len(work.backward_events) == len(plan.events_for(1)) == 24
    with pytest.raises(ConfigError, match=r"rank 2 is outside 0..1; the plan has 2 ranks"):
        rank_workload(plan, 5, 2, 0)
    with pytest.raises(ConfigError, match=r"data_parallel_rank must be at least 0, got -1"):
        rank_workload(plan, 0, 0, -1)


def test_a_weight_shared_by_all_layers():
    gradient = lambda layer, microbatch: (layer + 1) * 10.0 + microbatch  # noqa: E731
    for name in ("greedy", "gpipe", "zero_bubble_v", "dual_pipe_v"):
        plan = build_pipeline_plan(8, name, ranks=2, microbatches=4)
        report = shared_weight_gradients(plan, 0.5, 100.0, gradient)
        assert report.reference_gradient == report.merged_gradient == sum(report.rank_gradients) == 1488
        assert report.updated_weight == 100 - 0.5 * 1488
    layers = [range(2), range(6, 8)]  # what rank 0 of the last plan, a V, hosts
    assert report.rank_gradients[0] == sum(gradient(i, m) for part in layers for i in part for m in range(4))


def test_a_shared_weight_may_be_an_array():
    plan = build_pipeline_plan(4, "gpipe", ranks=2, microbatches=2)
    asked = []
    report = shared_weight_gradients(
        plan, 0.1, np.ones(3), lambda layer, microbatch: asked.append((layer, microbatch)) or np.full(3, layer)
    )
    assert sorted(asked) == [(layer, microbatch) for layer in range(4) for microbatch in range(2)]
    np.testing.assert_allclose(report.updated_weight, 1 - 0.1 * np.full(3, 12.0))
    with pytest.raises(ConfigError, match=r"'inference' runs forwards only and has no gradients"):
        shared_weight_gradients(
            build_pipeline_plan(4, "inference", ranks=2, microbatches=2), 0.1, 1.0, lambda a, b: 0.0
        )
