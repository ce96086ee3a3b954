"""The simulator against closed forms, published figures and facts measured by an independent simulator."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hocket.cost import CostModel
from hocket.errors import ConfigError, ProgramError
from hocket.passes import lower
from hocket.program import Op, Placement, Program
from hocket.schedules import build, parse_schedule
from hocket.simulate import Timeline, simulate

DATA = Path(__file__).parent / "data"
FACTS = json.loads((DATA / "schedule_facts.json").read_text())
COSTS = {
    "F1B1W1": CostModel(),
    "F1B1.2W0.8": CostModel(1, 1.2, 0.8),
    "F1B2W1": CostModel(1, 2, 1),
    "F1B1W1_comm0.1": CostModel(hop_latency=0.1),
}


def _program(ranks: int, microbatches: int, **config: object) -> Program:
    return build(parse_schedule(config), ranks=ranks, microbatches=microbatches)


def _config(fact: dict) -> dict:
    """The config that a line of the facts speaks of."""
    name, hosted = fact["schedule"], fact["stages_per_rank"]
    fixed = {"gpipe": "gpipe", "ZB-H2": "zb_h2", "V-Half": "v_half", "V-Min": "v_min"}
    if name in fixed:
        return {"schedule": fixed[name]}
    if name in ("zero_bubble_v", "dual_pipe_v"):
        return {"schedule": name}
    if name.startswith("looped_bfs"):
        return {"schedule": "looped_bfs", "num_stages_per_rank": hosted}
    return {"schedule": "1f1b", "num_stages_per_rank": hosted, "zero_bubble": "zero bubble" in name}


# V-Half and V-Min have no one right order at both ends of a step; tests of their builders compare figures.
EXACT = [fact for fact in FACTS["schedules"] if not fact["schedule"].startswith("V-")]


@pytest.mark.parametrize("fact", EXACT, ids=lambda fact: f"{fact['schedule']}/{fact['ranks']}")
@pytest.mark.parametrize("lowered", [False, True])
def test_facts_to_the_last_digit(fact: dict, lowered: bool):
    program = _program(fact["ranks"], fact["microbatches"], **_config(fact))
    program = lower(program) if lowered else program
    for name, costs in COSTS.items():
        for mode in ("buffered", "rendezvous"):
            timeline = simulate(program, costs, mode)
            assert (round(timeline.makespan, 9), round(timeline.span, 9)) == tuple(fact[name].values()), (name, mode)
            assert timeline.lower_bound <= timeline.makespan
    assert list(timeline.peak_in_flight) == fact["peak_per_rank"]
    assert max(timeline.peak_in_flight) == fact["peak_in_flight"] * fact["stages_per_rank"]


ORDERS = [("v_half", "V-Half"), ("v_min", "V-Min"), ("zb_h1", "ZB-H1"), ("zb_h2", "ZB-H2")]


@pytest.mark.parametrize("section, name", ORDERS)
def test_given_orders_have_the_given_figures(section: str, name: str):
    """Programs that nobody here built, read from text, also those of V-Half and V-Min."""
    text = (DATA / "orders.md").read_text()
    rows = re.search(rf"{section}\n```\n(.*?)```", text, re.DOTALL)
    assert rows
    program = Program.from_text(re.sub(r"^r(\d)", r"rank \1", rows[1], flags=re.MULTILINE))
    fact = next(f for f in FACTS["schedules"] if f["schedule"].startswith(name) and f["ranks"] == 4)
    for label, costs in COSTS.items():
        timeline = simulate(program, costs)
        assert (round(timeline.makespan, 9), round(timeline.span, 9)) == tuple(fact[label].values())
    assert list(timeline.peak_in_flight) == fact["peak_per_rank"]


# --- closed forms -----------------------------------------------------------------------------------------------------

SIZES = [(1, 1), (1, 4), (2, 2), (2, 7), (3, 3), (4, 8), (4, 13), (8, 16), (8, 40)]


@pytest.mark.parametrize("ranks, microbatches", SIZES)
def test_closed_forms(ranks: int, microbatches: int):
    """Equal stages. GPipe, 1F1B, interleaved (Narayanan et al., SC 2021), ZB-H1 (arXiv 2401.10241, table 2)."""
    f, i, w = 3.0, 4.0, 2.0
    b, costs = i + w, CostModel(f, i, w)
    whole = microbatches * (f + b)
    for config in ({"schedule": "gpipe"}, {"schedule": "1f1b"}, {"schedule": "looped_bfs"}):
        timeline = simulate(_program(ranks, microbatches, **config), costs)
        assert timeline.makespan == whole + (ranks - 1) * (f + b)
        assert timeline.bubble_fraction == pytest.approx((ranks - 1) / (microbatches + ranks - 1))
        assert timeline.busy == (whole,) * ranks
        assert timeline.idle == (timeline.makespan - whole,) * ranks
    if microbatches >= ranks:
        zero = simulate(_program(ranks, microbatches, schedule="1f1b", zero_bubble=True), costs)
        assert zero.span == whole + (ranks - 1) * (f + i - w)
    if microbatches % ranks == 0:
        for hosted in (2, 3):
            program = _program(ranks, microbatches, schedule="1f1b", num_stages_per_rank=hosted)
            assert simulate(program, costs).makespan == hosted * whole + (ranks - 1) * (f + b)
    forward = simulate(_program(ranks, microbatches, schedule="inference"), costs)
    assert forward.makespan == (microbatches + ranks - 1) * f
    assert forward.peak_in_flight == (1,) * ranks


PAPER = {
    "1F1B": {"schedule": "1f1b"},
    "ZB-H1": {"schedule": "1f1b", "zero_bubble": True},
    "ZB-H2": {"schedule": "zb_h2"},
}


@pytest.mark.parametrize("row", FACTS["zero_bubble_paper"], ids=lambda row: row["model"])
def test_published_bubbles(row: dict):
    """arXiv 2401.10241, tables 5 and 9: from the paper's own times of F, B, W and a hop, within half its last digit."""
    ranks, microbatches = (int(part[1:]) for part in row["model"].split("|")[1:])
    f, b, w, hop = row["F_B_W_comm"]
    work = microbatches * (f + b + w)
    for name, config in PAPER.items():
        span = simulate(_program(ranks, microbatches, **config), CostModel(f, b, w, hop_latency=hop), check=False).span
        assert (span - work) / span == pytest.approx(row["bubble"][name], abs=5e-5)


# --- what a timeline holds --------------------------------------------------------------------------------------------


def test_events_and_messages_of_a_small_program():
    program = Program.from_text("rank 0: 0F0 0B0\nrank 1: 1F0 1I0 1W0")
    costs = CostModel(1, 2, 3, hop_latency=0.5, bandwidth=10, message_bytes=5)
    timeline = simulate(program, costs)
    assert [(e.rank, e.start, e.end, str(e.action)) for e in timeline.events] == [
        (0, 0, 1, "0F0"),
        (0, 6, 11, "0B0"),
        (1, 2, 3, "1F0"),
        (1, 3, 5, "1I0"),
        (1, 5, 8, "1W0"),
    ]
    assert [tuple(m) for m in timeline.messages] == [(0, 1, Op.F, 0, 0, 1, 2), (1, 0, Op.B, 1, 0, 5, 6)]
    assert (timeline.makespan, timeline.span) == (11, 11)
    assert timeline.busy == (6, 6)
    assert timeline.bubble_fraction == pytest.approx(1 - 12 / 22)
    assert simulate(lower(program), costs, "rendezvous").messages == timeline.messages
    assert repr(timeline) == "Timeline(ranks=2, microbatches=1, makespan=11, bubble_fraction=0.4545)"


def test_span_is_less_than_makespan_where_ranks_end_early():
    timeline = simulate(_program(4, 8, schedule="zb_h2"))
    assert (timeline.makespan, timeline.span) == (27, 24)


def test_a_channel_carries_one_message_at_a_time():
    """Two forwards of no length give two messages at once: the second waits for the first in a lowered program."""
    program = Program.from_text("rank 0: 0F0 0F1\nrank 1: 1F0 1F1")
    costs = CostModel(forward=[0, 1], hop_latency=3)
    assert [(m.start, m.end) for m in simulate(program, costs).messages] == [(0, 3), (0, 3)]
    for mode in ("buffered", "rendezvous"):
        assert [(m.start, m.end) for m in simulate(lower(program), costs, mode).messages] == [(0, 3), (3, 6)]


def test_pairs_in_turn_and_together():
    program = Program.from_text("rank 0: 0F0 1F0 (0F1;1B0)OVERLAP_F_B (1F1;0B0)OVERLAP_F_B 1B1 0B1")
    in_turn = simulate(program, CostModel())
    assert in_turn.makespan == 12
    assert [str(e.action) for e in in_turn.events] == ["0F0", "1F0", "0F1", "1B0", "1F1", "0B0", "1B1", "0B1"]
    together = simulate(program, CostModel(overlap_speedup=1.5))
    assert together.makespan == 10
    assert [(e.start, e.end, str(e.action)) for e in together.events][2:4] == [(2, 4, "0F1"), (2, 4, "1B0")]
    assert together.busy == (10,)
    assert in_turn.peak_in_flight == (3,)


def test_memory_in_bytes():
    program = Program.from_text("rank 0: 0F0 0F1 0I0 0W0 0I1 0F2 0W1 0B2")
    timeline = simulate(program, CostModel(activation_bytes=10, weight_bytes=4, static_bytes=100))
    assert timeline.peak_bytes == (120,)
    assert timeline.peak_in_flight == (2,)
    later = Program.from_text("rank 0: 0F0 0I0 0F1 0I1 0W0 0W1")
    assert simulate(later, CostModel(activation_bytes=10, weight_bytes=4)).peak_bytes == (14,)
    assert simulate(later, CostModel(activation_bytes=10, weight_bytes=11)).peak_bytes == (22,)
    assert simulate(later, CostModel(activation_bytes=10)).peak_bytes == (10,)
    forward = _program(3, 5, schedule="inference")
    assert simulate(forward, CostModel(activation_bytes=10, static_bytes=(1, 2, 3))).peak_bytes == (11, 12, 13)


def test_costs_per_stage_move_the_bottleneck():
    timeline = simulate(_program(2, 10, schedule="1f1b"), CostModel([1, 5], [1, 5], [1, 5]))
    assert timeline.makespan == 10 * 15 + 1 + 2
    assert timeline.busy == (30, 150)
    assert timeline.lower_bound == 10 * 15 + 1, "I of stage 0 alone must still follow, and a W may run meanwhile"


def test_small_activations_beside_large_weights():
    """The bound is that of the activations alone, whatever rounding the sum with the static bytes does."""
    program = _program(3, 6, schedule="1f1b", num_stages_per_rank=2)
    small = CostModel(activation_bytes=0.3, weight_bytes=0.1)
    large = CostModel(activation_bytes=0.3, weight_bytes=0.1, static_bytes=1e17)
    assert simulate(program, large).lower_bound == simulate(program, small).lower_bound


# --- properties -------------------------------------------------------------------------------------------------------

CONFIGS = [
    {"schedule": "gpipe"},
    {"schedule": "1f1b"},
    {"schedule": "1f1b", "num_stages_per_rank": 2, "zero_bubble": True},
    {"schedule": "zero_bubble_v"},
    {"schedule": "looped_bfs", "num_stages_per_rank": 2},
    {"schedule": "inference"},
]


@settings(max_examples=40, deadline=None)
@given(
    config=st.sampled_from(CONFIGS),
    ranks=st.integers(1, 5),
    microbatches=st.integers(1, 8),
    times=st.lists(st.integers(0, 8), min_size=3, max_size=3),
    hop=st.integers(0, 3),
)
def test_modes_and_lowering(config: dict, ranks: int, microbatches: int, times: list[int], hop: int):
    """No slower with free transfers; never faster than the compute order alone; buffered never behind rendezvous."""
    program = _program(ranks, microbatches, **config)
    lowered = lower(program)
    free = CostModel(*times)
    assert simulate(lowered, free, "rendezvous").makespan == simulate(program, free).makespan
    costs = CostModel(*times, hop_latency=hop)
    plain = simulate(program, costs)
    buffered, rendezvous = simulate(lowered, costs, "buffered"), simulate(lowered, costs, "rendezvous")
    assert plain.makespan <= buffered.makespan <= rendezvous.makespan
    assert plain.peak_in_flight == rendezvous.peak_in_flight
    assert len(plain.messages) == len(rendezvous.messages)
    _check_events(rendezvous)


def _check_events(timeline: Timeline) -> None:
    """A rank does one thing at a time, and everything that is needed is there before it starts."""
    program, ends = timeline.program, {}
    for event in timeline.events:
        ends[event.action] = event.end
    for rank in range(program.num_ranks):
        for before, after in itertools.pairwise(timeline.events_of(rank)):
            assert before.end <= after.start
    for message in timeline.messages:
        assert message.start <= message.end
    for event in timeline.events:
        op, stage = event.action[:2]
        if op == Op.F and stage:
            assert ends[event.action._replace(stage=stage - 1)] <= event.start
        if op == Op.W:
            assert ends[event.action._replace(op=Op.I)] <= event.start
    assert len(timeline.events) == sum(len(a.computes) for _, _, a in program.actions())


# --- what is refused --------------------------------------------------------------------------------------------------


def test_refused():
    program = _program(2, 2, schedule="gpipe")
    with pytest.raises(ConfigError, match="costs is a dict; give a CostModel"):
        simulate(program, {"forward": 1})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"mode is 'fast'; choose 'buffered' or 'rendezvous'"):
        simulate(program, CostModel(), "fast")  # pyrefly: ignore
    with pytest.raises(ConfigError, match=r"forward has 3 numbers for 2 stages"):
        simulate(program, CostModel([1, 2, 3]))
    with pytest.raises(ConfigError, match=r"static_bytes has 3 numbers for 2 ranks"):
        simulate(program, CostModel(static_bytes=[1, 2, 3]))
    with pytest.raises(ProgramError, match=r"rank 1 cannot start 1B1: it needs 1F1"):
        simulate(Program(Placement.loop(2), (program.ranks[0], program.ranks[1][::-1]), 2))
    stuck = Program.from_text("rank 0: 0F0 0B0 0F1 0B1\nrank 1: 1F0 1F1 1B0 1B1")
    for check in (True, False):
        with pytest.raises(ProgramError, match=r"wait in a circle"):
            simulate(stuck, check=check)
