"""verify: accepts what runs right, refuses everything else, and says what is wrong with a mark in the grid."""

from __future__ import annotations

import tracemalloc
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hocket.errors import ConfigError, ProgramError, ScheduleError
from hocket.passes import lower
from hocket.program import Action, Op, Placement, Program
from hocket.schedules import build, config_type_of, parse_schedule, schedule_names
from hocket.verify import verify
from interpreter import Wrong, execute

LEGAL = """
rank 0: 0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1
rank 1: 1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1SEND_B1
"""


def program(text: str, microbatches: int | None = None) -> Program:
    found = Program.from_text(text)
    return Program(found.placement, found.ranks, microbatches or found.num_microbatches)


def refusal(text: str, microbatches: int | None = None) -> str:
    with pytest.raises(ProgramError) as caught:
        verify(program(text, microbatches))
    return str(caught.value)


def marked(report: str) -> list[str]:
    """The actions over the marks of an error, with their notes."""
    found = []
    lines = report.splitlines()
    for above, line in pairwise(lines):
        if line.lstrip().startswith("^"):
            for at in (i for i, c in enumerate(line) if c == "^" and line[i - 1 : i] != "^"):
                width = len(line[at:]) - len(line[at:].lstrip("^"))
                note = line[at + width :].split("^")[0].strip()
                found.append(f"{above[at : at + width]}: {note}")
    return found


def test_the_legal_program_of_this_file_is_accepted():
    verify(program(LEGAL))
    verify(program(LEGAL).compute_only())


CASES = {
    "missing F": ("1F1 ", "", "no 1F1: it is missing on rank 1", ["1B1: has no F"]),
    "missing backward": (" 1B0", "", "no 1B0 (nor 1I0): it is missing on rank 1", ["1F0: has no backward"]),
    "doubled": ("0F1 ", "0F1 0F1 ", "0F1 stands twice; each action runs once", ["0F1: again", "0F1: again"]),
    "doubled message": ("0SEND_F1", "0SEND_F1 0SEND_F1", "0SEND_F1 stands twice", ["0SEND_F1: again"] * 2),
    "B and I": ("1B0 ", "1B0 1I0 ", "stage 1, microbatch 0 has both a B and an I", ["1B0: here", "1I0: here"]),
    "B and W": ("1B0 ", "1B0 1W0 ", "stage 1, microbatch 0 has both a B and a W", ["1B0: here", "1W0: here"]),
    "I without W": ("1B0 ", "1I0 ", "stage 1, microbatch 0 has an I but no W; its weight", ["1I0: here"]),
    "missing SEND": (
        "0SEND_F1 ",
        "",
        "0SEND_F1 is missing on rank 0: its other end 1RECV_F1 would wait for ever",
        ["1RECV_F1: has no partner"],
    ),
    "missing RECV": (
        "0RECV_B1 ",
        "",
        "0RECV_B1 is missing on rank 0: its other end 1SEND_B1 would wait for ever",
        ["1SEND_B1: has no partner"],
    ),
    "useless message": ("1B0 ", "1B0 1SEND_F0 ", "1SEND_F0 moves a message that nobody", ["1SEND_F0: here"]),
    "W before I": (
        "1B0 1SEND_B0",
        "1W0 1I0 1SEND_B0",
        "rank 1 cannot start 1W0: it needs 1I0, which comes later in its list; move 1W0 behind it",
        ["1W0: stuck", "1I0: needed"],
    ),
    "ahead of what it needs": (
        "1F1 1B1",
        "1B1 1F1",
        "rank 1 cannot start 1B1: it needs 1F1, which comes later in its list",
        ["1B1: stuck", "1F1: needed"],
    ),
    "sent before it is made": (
        "0F0 0SEND_F0",
        "0SEND_F0 0F0",
        "rank 0 cannot issue 0SEND_F0: its value is made by 0F0, which comes later in its list",
        ["0SEND_F0: stuck", "0F0: makes its value"],
    ),
    "awaited before it is received": (
        "0RECV_B1 0B1",
        "0B1 0RECV_B1",
        "rank 0 cannot start 0B1: it needs what 0RECV_B1 brings, which comes later in its list",
        ["0B1: stuck", "0RECV_B1: needed"],
    ),
    "sends in another order than receives": (
        "0F0 0SEND_F0 0F1 0SEND_F1",
        "0F0 0F1 0SEND_F1 0SEND_F0",
        "channel 0->1: its ends disagree on message 0: rank 0 issues 0SEND_F1, rank 1 issues 1RECV_F0",
        ["0SEND_F1: sent", "1RECV_F0: awaited"],
    ),
    "receives in another order than sends": (
        "0RECV_B0 0B0 0RECV_B1",
        "0RECV_B1 0RECV_B0 0B0",
        "channel 1->0: its ends disagree on message 0: rank 1 issues 1SEND_B0, rank 0 issues 0RECV_B1",
        ["0RECV_B1: awaited", "1SEND_B0: sent"],
    ),
    "a circle of two ranks": (
        "0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1\nrank 1: 1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1",
        "0RECV_B0 0B0 0F1 0SEND_F1 0RECV_B1 0B1\nrank 1: 1RECV_F0 1F0 1RECV_F1 1F1 1B0 1SEND_B0 1B1",
        (
            "deadlock: the ranks wait in a circle\n  rank 0 cannot start 0B0: it waits for 1SEND_B0 of rank 1\n"
            "  rank 1 cannot start 1F1: it waits for 0SEND_F1 of rank 0"
        ),
        ["0B0: stuck", "1F1: stuck"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_refusals_name_the_action_and_mark_it(name: str):
    old, new, text, marks = CASES[name]
    assert old in LEGAL
    report = refusal(LEGAL.replace(old, new, 1), microbatches=2)
    assert text in report
    assert marked(report) == marks


def test_a_send_may_come_later_as_long_as_nobody_waits_in_a_circle():
    verify(program(LEGAL.replace("1B0 1SEND_B0 1F1", "1B0 1F1 1SEND_B0")))
    late = LEGAL.replace("0SEND_F1 0RECV_B0 0B0", "0RECV_B0 0B0 0SEND_F1")
    verify(program(late))
    report = refusal(late.replace("1B0 1SEND_B0 1F1", "1B0 1F1 1SEND_B0"))
    assert "deadlock: the ranks wait in a circle" in report
    assert "rank 1 cannot start 1F1: it waits for 0SEND_F1 of rank 0" in report


def test_a_compute_only_circle_names_the_actions():
    report = refusal("rank 0: 0F0 0B0 0F1 0B1\nrank 1: 1F0 1F1 1B0 1B1")
    assert "rank 0 cannot start 0B0: it waits for 1B0 of rank 1" in report
    assert "rank 1 cannot start 1F1: it waits for 0F1 of rank 0" in report
    assert marked(report) == ["0B0: stuck", "1F1: stuck"]


def test_a_circle_of_three_ranks():
    report = refusal("rank 0: 3F0 0F0\nrank 1: 1F0 4F0\nrank 2: 2F0 5F0")
    assert report.splitlines()[:4] == [
        "deadlock: the ranks wait in a circle",
        "  rank 0 cannot start 3F0: it waits for 2F0 of rank 2",
        "  rank 2 cannot start 2F0: it waits for 1F0 of rank 1",
        "  rank 1 cannot start 1F0: it waits for 0F0 of rank 0",
    ]


def test_who_is_stuck_behind_a_circle_is_left_out():
    report = refusal("rank 0: 0F0 0B0 0F1 0B1\nrank 1: 1F0 1B0 1F1 1B1\nrank 2: 2F0 2F1 2B0 2B1")
    assert report.count("cannot start") == 2
    assert "rank 1 cannot start 1B0" in report and "rank 2 cannot start 2F1" in report


def test_pairs_are_checked_in_turn_and_jointly():
    """A pair whose backward needs its own forward runs in turn, but not jointly."""
    report = refusal("rank 0: (0F0;0B0)OVERLAP_F_B")
    assert "cannot start 0B0 when the parts of an overlapped pair run jointly: it needs 0F0" in report
    assert "^" in report
    verify(program("rank 0: 0F0 (0F1;0B0)OVERLAP_F_B 0B1"))
    # Jointly, each rank's pair waits for what the other one's makes.
    rows = "rank 0: 0F0 (0F1;0B0)OVERLAP_F_B 0B1\nrank 1: 1F0 (1F1;1B0)OVERLAP_F_B 1B1"
    report = refusal(rows)
    assert "circle when the parts of an overlapped pair run jointly" in report
    assert marked(report) == ["(0F1;0B0)OVERLAP_F_B: stuck", "(1F1;1B0)OVERLAP_F_B: stuck"]


def test_swapped_rank_lists_are_refused():
    legal = lower(build(parse_schedule("1f1b"), ranks=2, microbatches=4))
    swapped = Program(legal.placement, legal.ranks[::-1], 4)
    with pytest.raises(ProgramError, match=r"1RECV_F0 on rank 0: stage 1 lives on rank 1") as caught:
        verify(swapped)
    assert marked(str(caught.value)) == ["1RECV_F0: here"]


@pytest.mark.parametrize(
    "action,text",
    [
        (Action(Op.F, 2, 0), "2F0 on rank 0: there are stages 0..1 only"),
        (Action(Op.F, -1, 0), "-1F0 on rank 0: there are stages 0..1 only"),
        (Action(Op.F, 0, 2), "0F2 on rank 0: there are microbatches 0..1 only"),
        (Action(Op.F, 0, 10**30), "rank 0 has an action that is no Op and two whole numbers"),
        (Action(Op.F, 0, "x"), "rank 0 has an action that is no Op and two whole numbers"),
        (Action(300, 0, 0), "rank 0 has an action that is no Op and two whole numbers"),
        (Action(77, 0, 0), "rank 0 has an action with op 77"),
        ((Op.F, 0), "rank 0 has an action that is no Op and two whole numbers"),
        (None, "rank 0 has an action that is no Op and two whole numbers"),
        (Action(Op.OVERLAP_F_B, 0, 0), "a pair has two parts, an F and a B or an I"),
        (Action(Op.F, 0, 0, (Action(Op.F, 0, 0), Action(Op.B, 0, 0))), "a pair has two parts"),
        (Action(Op.OVERLAP_F_B, 0, 0, (Action(Op.F, 0, 0), Action(Op.W, 0, 0))), "a pair has two parts"),
    ],
)
def test_what_is_no_action_is_refused(action: Action, text: str):
    legal = program(LEGAL)
    with pytest.raises(ProgramError) as caught:
        verify(Program(legal.placement, ((*legal.ranks[0], action), legal.ranks[1]), 2))
    assert text in str(caught.value)


def test_shapes_that_do_not_fit():
    legal = program(LEGAL)
    with pytest.raises(ProgramError, match="lists 1 ranks, but its placement uses 2"):
        verify(Program(legal.placement, legal.ranks[:1], 2))
    with pytest.raises(ProgramError, match="0 microbatches"):
        verify(Program(legal.placement, ((), ()), 0))
    with pytest.raises(ProgramError, match="0F0 is missing"):
        verify(Program(legal.placement, ((), ()), 1))


def test_numbers_from_a_file_cannot_ask_for_memory():
    huge = Program.from_csv("0F0,0F999999999\n")
    tracemalloc.start()
    with pytest.raises(ProgramError, match="0F1 is missing"):
        verify(huge)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1_000_000


def test_the_error_of_a_large_program_stays_readable():
    legal = lower(build(parse_schedule({"schedule": "1f1b"}), ranks=32, microbatches=32))
    rows = list(legal.ranks)
    at = rows[16].index(Action.parse("16F20"))
    rows[16] = rows[16][:at] + rows[16][at + 1 :]
    with pytest.raises(ProgramError) as caught:
        verify(Program(legal.placement, tuple(rows), 32))
    lines = str(caught.value).splitlines()
    assert len(lines) < 12 and max(map(len, lines)) < 240
    assert marked(str(caught.value)) == ["16B20: has no F"]


# --- mutations ------------------------------------------------------------------------------------------------------

POOL = [
    lower(found) if lowered else found
    for source in (
        "inference",
        "gpipe",
        "1f1b",
        {"schedule": "1f1b", "num_stages_per_rank": 2, "zero_bubble": True},
        "zero_bubble_v",
        "dual_pipe_v",
    )
    for ranks, microbatches in ((2, 4), (3, 6))
    for found in [build(parse_schedule(source), ranks=ranks, microbatches=microbatches)]
    for lowered in (False, True)
]


@st.composite
def mutants(draw: st.DrawFn) -> tuple[Program, bool]:
    """A legal program with a few actions swapped, moved, dropped, doubled or carried off, and if it has a backward."""
    original = draw(st.sampled_from(POOL))
    rows = [list(row) for row in original.ranks]
    for _ in range(draw(st.integers(1, 3))):
        row = rows[draw(st.integers(0, len(rows) - 1))]
        if not row:
            continue
        at = draw(st.integers(0, len(row) - 1))
        near = min(max(0, at + draw(st.integers(-4, 4))), len(row) - 1)
        match draw(st.sampled_from(["swap", "swap", "move", "move", "drop", "double", "carry", "ranks"])):
            case "swap":
                row[at], row[near] = row[near], row[at]
            case "move":
                row.insert(near, row.pop(at))
            case "drop":
                del row[at]
            case "double":
                row.insert(near, row[at])
            case "carry":
                other = rows[draw(st.integers(0, len(rows) - 1))]
                other.insert(draw(st.integers(0, len(other))), row.pop(at))
            case "ranks":
                rows.append(rows.pop(0))
    return Program(original.placement, tuple(map(tuple, rows)), original.num_microbatches), original.has_backward


@settings(max_examples=600, deadline=None)
@given(mutants())
def test_mutations_are_refused_exactly_if_they_do_not_run_right(mutant: tuple[Program, bool]):
    program, backward = mutant
    try:
        execute(program, backward)
        wrong = None
    except Wrong as error:
        wrong = error
    try:
        verify(program)
        refused = None
    except ProgramError as error:
        refused = error
    assert (wrong is None) == (refused is None), f"interpreter: {wrong}\nverify: {refused}\n{program}"


# --- P02: what can run is accepted ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", schedule_names())
def test_p02_every_count_of_microbatches_runs_or_is_ruled_out_by_the_definition(name: str):
    config = config_type_of(name)()
    ruled_out = {"dual_pipe_v": lambda r, m: m < 2 * r, "greedy": lambda r, m: m < r}.get(name, lambda r, m: False)
    for ranks in range(1, 9):
        for microbatches in range(1, 9):
            if ruled_out(ranks, microbatches):
                with pytest.raises(ScheduleError):
                    build(config, ranks=ranks, microbatches=microbatches)
                continue
            found = lower(build(config, ranks=ranks, microbatches=microbatches))
            verify(found)
            if ranks <= 4 and microbatches <= 4:
                execute(found, found.has_backward, seeds=1)


def test_the_interpreter_can_tell_wrong_from_right():
    execute(program(LEGAL), backward=True)
    with pytest.raises(Wrong, match="sends what is not made"):
        execute(program(LEGAL.replace("0F0 0SEND_F0", "0SEND_F0 0F0")), backward=True)
    with pytest.raises(Wrong, match="deadlock"):
        execute(program(LEGAL.replace("0RECV_B1 0B1", "0B1 0RECV_B1")), backward=True)
    with pytest.raises(ConfigError):
        Placement.loop(0)
