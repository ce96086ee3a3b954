"""The greedy schedule: the known plans to the letter, and the rule as written, tick by tick."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hocket.errors import ScheduleError
from hocket.schedules import GreedyConfig, build
from schedules.paper_replay import replay

PLANS = json.loads((Path(__file__).parents[1] / "data" / "greedy_plans.json").read_text())
LAYERS = "n_layer"  # refusals that speak of layers are the planner's


@pytest.mark.parametrize("plan", [plan for plan in PLANS if "ticks" in plan])
def test_known_plans(plan):
    config = GreedyConfig(policy=plan["schedule"], num_stages_per_rank=plan["virtual"])
    program = build(config, ranks=plan["stages"], microbatches=plan["microbatches"])
    assert [list(map(str, row)) for row in program.ranks] == [
        [event.split(":")[1] for event in row.split()] for row in plan["ranks"]
    ]
    assert replay(program, 1, 0.5, 0.5).makespan == plan["ticks"]


@pytest.mark.parametrize("plan", [plan for plan in PLANS if "error" in plan and LAYERS not in plan["error"]])
def test_known_refusals(plan):
    config = GreedyConfig(policy=plan["schedule"], num_stages_per_rank=plan["virtual"])
    with pytest.raises(ScheduleError) as caught:
        build(config, ranks=plan["stages"], microbatches=plan["microbatches"])
    numbers = [plan["virtual"] if "virtual" in plan["error"] else plan["microbatches"], plan["stages"]]
    assert all(str(number) in str(caught.value) for number in numbers)


def by_the_letter(policy, ranks, per_rank, microbatches):
    """The rule of the issue, each tick from scratch."""
    stages = ranks * per_rank
    units = [(op, s, m) for op in "FB" for s in range(stages) for m in range(microbatches)]
    done, rows = set(), [[] for _ in range(ranks)]

    def ready(op, stage, microbatch):
        if op == "F":
            return stage == 0 or ("F", stage - 1, microbatch) in done
        own = ("F", stage, microbatch) in done
        return own and (stage == stages - 1 or ("B", stage + 1, microbatch) in done)

    while len(done) < len(units):
        chosen = []
        for rank in range(ranks):
            mine = [u for u in units if u[1] % ranks == rank and u not in done and ready(*u)]
            forwards = [u for u in mine if u[0] == "F"]
            backwards = [u for u in mine if u[0] == "B"]
            if policy == "gpipe":
                pick = min(forwards, key=lambda u: (u[2], u[1]), default=None)
                pick = pick or min(backwards, key=lambda u: (u[2], -u[1]), default=None)
            else:
                pick = min(backwards, key=lambda u: (u[2], -(u[1] // ranks), -u[1]), default=None)
                pick = pick or min(forwards, key=lambda u: (u[2], u[1] // ranks, u[1]), default=None)
            if pick:
                chosen.append(pick)
                rows[rank].append(f"{pick[1]}{pick[0]}{pick[2]}")
        done.update(chosen)
    return rows


@given(
    policy=st.sampled_from(["gpipe", "interleaved_1f1b"]),
    ranks=st.integers(1, 4),
    per_rank=st.integers(1, 3),
    more=st.integers(0, 5),
)
@settings(max_examples=40, deadline=None)
def test_the_rule_to_the_letter(policy, ranks, per_rank, more):
    per_rank, microbatches = min(per_rank, ranks), ranks + more
    program = build(GreedyConfig(policy=policy, num_stages_per_rank=per_rank), ranks=ranks, microbatches=microbatches)
    assert [list(map(str, row)) for row in program.ranks] == by_the_letter(policy, ranks, per_rank, microbatches)
