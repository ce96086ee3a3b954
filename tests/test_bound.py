"""The lower bounds: never above what is possible, and as near to it as the published optima say."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hocket.bound import lower_bound
from hocket.cost import CostModel
from hocket.errors import ConfigError
from hocket.program import Action, Op, Placement
from hocket.schedules import build, parse_schedule
from hocket.simulate import simulate

FACTS = json.loads((Path(__file__).parent / "data" / "schedule_facts.json").read_text())


def _case_bound(case: dict) -> float:
    costs = CostModel(
        case["F"],
        case["B"],
        case["W"],
        hop_latency=case["comm"],
        activation_bytes=case["MB"],
        weight_bytes=case["MW"],
    )
    return lower_bound(Placement(tuple(case["stage_rank"])), case["m"], costs, case["cap"])


@pytest.mark.parametrize("case", FACTS["proven_optimal"])
def test_never_above_a_proven_optimum(case: dict):
    assert _case_bound(case) <= case["best"]
    assert _case_bound(case) >= case["own_lb"]


def test_equal_to_most_proven_optima():
    hits = [_case_bound(case) == case["best"] for case in FACTS["proven_optimal"]]
    assert hits == [True, True, False, True, True, True, True, True]


def test_below_the_memory_of_1f1b():
    """Eight ranks, W keeps half of the activation: at least the published bounds, at most what is known possible."""
    costs = CostModel(activation_bytes=2, weight_bytes=1)
    for part, row in FACTS["below_1f1b_memory"]["cap (of 1F1B)"].items():
        bound = lower_bound(Placement.loop(8), 24, costs, 16 * float(part))
        assert row["lower_bound"] <= bound <= row["known"]


# --- against exhaustive search ----------------------------------------------------------------------------------------


def _rank_orders(stages: tuple[int, ...], microbatches: int, split: bool) -> list[tuple[Action, ...]]:
    """Every order of a rank that keeps each microbatch's own order and, per stage and op, that of the microbatches.

    Microbatches are alike, so sorting them within an op loses no makespan.
    """
    ops = (Op.F, Op.I, Op.W) if split else (Op.F, Op.B)
    chain = [(Op.F, s) for s in stages] + [(ops[1], s) for s in reversed(stages)]
    found: list[tuple[Action, ...]] = []

    def grow(order: list[Action], done: dict[tuple[Op, int], int]) -> None:
        if len(order) == microbatches * len(stages) * len(ops):
            found.append(tuple(order))
            return
        for op, stage in itertools.product(ops, stages):
            count = done.get((op, stage), 0)
            before = (Op.I, stage) if op == Op.W else None
            if op != Op.W and (place := chain.index((op, stage))):
                before = chain[place - 1]
            if count < microbatches and (before is None or done.get(before, 0) > count):
                grow([*order, Action(op, stage, count)], {**done, (op, stage): count + 1})

    grow([], {})
    return found


def _fits(order: tuple[Action, ...], held: tuple[float, ...], kept: tuple[float, ...], limit: float) -> bool:
    use = 0.0
    for action in order:
        if action.op == Op.F:
            use += held[action.stage]
        if use > limit + 1e-9:
            return False
        if action.op == Op.B:
            use -= held[action.stage]
        elif action.op == Op.I:
            use += kept[action.stage] - held[action.stage]
        elif action.op == Op.W:
            use -= kept[action.stage]
        if use > limit + 1e-9:
            return False
    return True


def _optimum(placement: Placement, microbatches: int, costs: CostModel, capacity: float, split: bool) -> float | None:
    stages = placement.num_stages
    held, kept = costs.per_stage("activation_bytes", stages), costs.per_stage("weight_bytes", stages)
    orders = [
        [o for o in _rank_orders(placement.stages_of(r), microbatches, split) if _fits(o, held, kept, capacity)]
        for r in range(placement.num_ranks)
    ]
    makespans = [_makespan(placement, ranks, costs) for ranks in itertools.product(*orders)]
    return min((makespan for makespan in makespans if makespan is not None), default=None)


def _makespan(placement: Placement, ranks: Sequence[Sequence[Action]], costs: CostModel) -> float | None:
    """When the last action ends, or None for orders that wait for each other: a few lines, not the library's replay."""
    home, last = placement.stage_to_rank, placement.num_stages - 1
    clocks, at = [0.0] * len(ranks), [0] * len(ranks)
    done: dict[tuple[str, int, int], float] = {}
    seconds = {"F": costs.forward, "B": costs.per_stage("backward", last + 1), "I": costs.backward_input}
    moved = True
    while moved:
        moved = False
        for rank, order in enumerate(ranks):
            while at[rank] < len(order):
                op, stage, microbatch, _ = order[at[rank]]
                source = None
                if op == Op.F and stage:
                    source = "F", stage - 1, microbatch
                elif op in (Op.B, Op.I) and stage < last:
                    source = "G", stage + 1, microbatch
                if source and source not in done:
                    break
                if source:
                    hop = costs.hop_latency if home[source[1]] != rank else 0
                    clocks[rank] = max(clocks[rank], done[source] + hop)
                clocks[rank] += seconds.get(op.name, costs.backward_weight)[stage]
                if op != Op.W:
                    done["F" if op == Op.F else "G", stage, microbatch] = clocks[rank]
                at[rank], moved = at[rank] + 1, True
    return max(clocks) if all(i == len(order) for i, order in zip(at, ranks, strict=True)) else None


SHAPES = [((0, 1), 3), ((0, 1, 2), 2), ((0, 1, 0), 2), ((0, 1, 1, 0), 1), ((0, 0), 2), ((0,), 3)]


@settings(max_examples=60, deadline=None)
@given(data=st.data(), shape=st.sampled_from(SHAPES), split=st.booleans())
def test_never_above_the_optimum_of_exhaustive_search(data: st.DataObject, shape: tuple, split: bool):
    homes, microbatches = shape
    numbers = lambda low, high: st.lists(  # noqa: E731
        st.integers(low, high), min_size=len(homes), max_size=len(homes)
    )
    costs = CostModel(
        data.draw(numbers(0, 9)),
        data.draw(numbers(0, 9)),
        data.draw(numbers(0, 9)),
        hop_latency=data.draw(st.integers(0, 4)),
        activation_bytes=data.draw(numbers(1, 4)),
        weight_bytes=data.draw(numbers(0, 3)),
    )
    placement = Placement(homes)
    need = max(sum(costs.activation_bytes[s] for s in placement.stages_of(r)) for r in range(placement.num_ranks))
    capacity = need + data.draw(st.integers(0, 6))
    best = _optimum(placement, microbatches, costs, capacity, split)
    if best is not None:
        assert lower_bound(placement, microbatches, costs, capacity, split=split) <= best + 1e-9


def test_exhaustive_search_is_met_where_memory_binds():
    """Two ranks, three microbatches, room for two: the bound is what the search finds; without a limit it is less."""
    costs, placement = CostModel([2] * 2, [2] * 2, [1] * 2, activation_bytes=2, weight_bytes=1), Placement.loop(2)
    assert _optimum(placement, 3, costs, 4, True) == lower_bound(placement, 3, costs, 4) == 18
    assert _optimum(placement, 3, costs, 6, True) == lower_bound(placement, 3, costs, 6) == 17


# --- against schedules ------------------------------------------------------------------------------------------------

CONFIGS = [
    {"schedule": "gpipe"},
    {"schedule": "looped_bfs", "num_stages_per_rank": 2},
    {"schedule": "1f1b"},
    {"schedule": "1f1b", "num_stages_per_rank": 2},
    {"schedule": "1f1b", "num_stages_per_rank": 3, "zero_bubble": True},
    {"schedule": "1f1b", "zero_bubble": True},
    {"schedule": "zb_h2"},
    {"schedule": "zero_bubble_v"},
    {"schedule": "dual_pipe_v"},
    {"schedule": "greedy", "policy": "gpipe"},
]


def _random_costs(seed: int, stages: int, speedup: float | None) -> CostModel:
    """Costs of all kinds: whole or broken, equal or not, with zeros, with and without sizes."""
    rng = random.Random(seed)
    draw = rng.choice([lambda: float(rng.randint(0, 9)), lambda: rng.uniform(0, 10), lambda: 1.0])
    row = lambda: tuple(draw() for _ in range(stages))  # noqa: E731
    return CostModel(
        row(),
        row(),
        row(),
        backward=row() if rng.random() < 0.3 else None,
        hop_latency=rng.choice([0.0, 0.5, rng.uniform(0, 3)]),
        overlap_speedup=speedup,
        activation_bytes=row() if rng.random() < 0.7 else 0.0,
        weight_bytes=row() if rng.random() < 0.5 else 0.0,
        static_bytes=rng.choice([0.0, 3.5]),
    )


@settings(max_examples=120, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    config=st.sampled_from(CONFIGS),
    ranks=st.integers(1, 5),
    microbatches=st.integers(1, 9),
    speedup=st.sampled_from([None, 1.0, 1.3, 2.0]),
)
def test_every_schedule_is_above(seed: int, config: dict, ranks: int, microbatches: int, speedup: float | None):
    if config["schedule"] == "dual_pipe_v":
        microbatches = max(microbatches, 2 * ranks)
    program = build(parse_schedule(config), ranks=ranks, microbatches=microbatches)
    costs = _random_costs(seed, program.num_stages, speedup)
    timeline = simulate(program, costs)
    capacity = timeline.peak_bytes if costs.counts_bytes else timeline.peak_in_flight
    bound = lower_bound(program.placement, microbatches, costs, capacity)
    assert bound <= timeline.makespan * (1 + 1e-9) + 1e-9
    assert lower_bound(program.placement, microbatches, costs) <= bound
    assert timeline.lower_bound <= timeline.makespan
    if not any(action.op == Op.W for _, _, a in program.actions() for action in a.computes):
        full = lower_bound(program.placement, microbatches, costs, capacity, split=False)
        assert full <= timeline.makespan * (1 + 1e-9) + 1e-9


def test_closed_forms_are_met():
    """1F1B is the best with full backwards in its memory; ZB-H2 without a limit; inference always."""
    for ranks, microbatches in itertools.product((1, 2, 4, 8), (16, 64)):
        placement = Placement.loop(ranks)
        costs = CostModel(2, 2, 1)
        fused = lower_bound(placement, microbatches, costs, ranks, split=False)
        assert fused == (microbatches + ranks - 1) * 5
        assert lower_bound(placement, microbatches, costs) == microbatches * 5 + (ranks - 1) * 2
        assert lower_bound(placement, microbatches, costs, forward_only=True) == (microbatches + ranks - 1) * 2
        forwards = simulate(build(parse_schedule("inference"), ranks=ranks, microbatches=microbatches), costs)
        assert forwards.lower_bound == forwards.makespan


def test_what_is_refused():
    placement = Placement.v(2)
    with pytest.raises(ConfigError, match=r"leaves 1 for the activations of rank 0, .* alone holds 2; raise the cap"):
        lower_bound(placement, 4, CostModel(), 1)
    with pytest.raises(ConfigError, match=r"capacity has 3 numbers for 2 ranks"):
        lower_bound(placement, 4, CostModel(), (1, 2, 3))
    with pytest.raises(ConfigError, match=r"microbatches must be at least 1, got 0"):
        lower_bound(placement, 0, CostModel())
    with pytest.raises(ConfigError, match=r"leaves 3 for the activations of rank 1"):
        lower_bound(placement, 4, CostModel(activation_bytes=2, static_bytes=(1, 7)), 10)


def test_more_microbatches_take_no_longer_to_bound():
    costs = CostModel(activation_bytes=1e9, weight_bytes=3.3e8, static_bytes=1e10)
    assert lower_bound(Placement.v(64), 10**6, costs, 8e10) > 3e6
