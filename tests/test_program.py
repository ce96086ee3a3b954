"""Actions, pairs, placements and programs as data; text and CSV both ways; the dependency rule."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hocket.errors import ConfigError, HocketError, ParseError, ProgramError
from hocket.passes import lower
from hocket.program import (
    Action,
    Op,
    Placement,
    Program,
    consumer_stage,
    make_actions,
    message,
    needs,
    produces,
    recv_of,
    send_of,
    unfold,
)
from hocket.schedules import build, config_type_of, schedule_names
from hocket.verify import verify

TORCH = sorted((Path(__file__).parent / "data/torch").glob("*.csv"))
"""`_dump_csv` of the schedules of torch.distributed.pipelining 2.13: name, ranks, stages per rank, microbatches."""

FORMS = ["2F0", "2B0", "2I0", "2W0", "2SEND_F0", "3RECV_F0", "3SEND_B0", "2RECV_B0", "(0F3;7B1)OVERLAP_F_B"]

numbers = st.integers(0, 10**9 - 1)


def actions(*ops: Op) -> st.SearchStrategy[Action]:
    return st.tuples(st.sampled_from(ops), numbers, numbers).map(lambda fields: Action(*fields))


plain = actions(*list(Op)[:8])
pairs = st.tuples(actions(Op.F), actions(Op.B, Op.I)).map(lambda parts: Action.pair(*parts))


# --- ops and actions --------------------------------------------------------------------------------------------------


def test_kinds_of_op():
    assert [str(op) for op in Op if op.is_compute] == ["F", "B", "I", "W", "OVERLAP_F_B"]
    assert [str(op) for op in Op if op.is_send] == ["SEND_F", "SEND_B"]
    assert [str(op) for op in Op if op.is_recv] == ["RECV_F", "RECV_B"]


def test_an_action_is_a_plain_tuple():
    action = Action(Op.F, 2, 0)
    assert action == (Op.F, 2, 0, ()) and tuple(action) == (0, 2, 0, ())
    assert Action.parse("2F0") == action and hash(action) == hash(Action.parse("2F0"))


@pytest.mark.parametrize("text", FORMS)
def test_the_notation_goes_both_ways(text: str):
    assert str(Action.parse(text)) == text


@given(plain | pairs)
def test_every_action_comes_back_from_its_text(action: Action):
    assert Action.parse(str(action)) == action


@pytest.mark.parametrize("text", FORMS)
def test_torch_reads_the_same_notation(text: str):
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    read = schedules._Action.from_str(text)
    assert str(read) == text


@pytest.mark.parametrize(
    "text",
    ["", "F", "2F", "F0", "-1F0", "2X0", "2f0", " 2F0", "2F0 ", "2F0\n", "2F1.5", "2FULL_BACKWARD0", "٢F0",
     "1" * 10 + "F0", "(0F3)OVERLAP_F_B", "(0F3;7B1)", "(0F3;7W1)OVERLAP_F_B", "(0B3;7F1)OVERLAP_F_B",
     "((0F0;1B0)OVERLAP_F_B;1B0)OVERLAP_F_B"],
)  # fmt: skip
def test_what_is_no_action_says_so(text: str):
    with pytest.raises(ParseError, match="is no action"):
        Action.parse(text)


def test_a_pair_is_a_forward_and_a_backward():
    pair = Action.pair(Action(Op.F, 0, 3), Action(Op.I, 7, 1))
    assert pair.computes == pair.parts == (Action(Op.F, 0, 3), Action(Op.I, 7, 1))
    assert Action(Op.W, 1, 1).computes == (Action(Op.W, 1, 1),) and Action(Op.SEND_F, 1, 1).computes == ()
    with pytest.raises(ConfigError, match=r"an F and then a B or an I, got 0F3 and 0W1; swap or change them"):
        Action.pair(Action(Op.F, 0, 3), Action(Op.W, 0, 1))


def test_make_actions_is_the_constructor_for_many():
    made = list(make_actions([Op.F, Op.SEND_B], [1, 2], range(2)))
    assert made == [Action(Op.F, 1, 0), Action(Op.SEND_B, 2, 1)]
    assert all(type(action) is Action for action in made)


# --- the dependency rule --------------------------------------------------------------------------------------------


def test_who_needs_what():
    assert needs(Op.F, 0, 3) == () and needs(Op.F, 2, 3) == ((Op.F, 1),)
    assert needs(Op.B, 1, 3) == needs(Op.I, 1, 3) == ((Op.F, 1), (Op.B, 2))
    assert needs(Op.B, 2, 3) == ((Op.F, 2),) and needs(Op.W, 1, 3) == ((Op.B, 1),)
    assert [produces(op) for op in (Op.F, Op.B, Op.I, Op.W)] == [Op.F, Op.B, Op.B, None]


@given(st.sampled_from([Op.F, Op.B]), st.integers(1, 9), st.integers(0, 9))
def test_both_ends_of_a_message_name_it(kind: Op, stage: int, microbatch: int):
    send, recv = send_of(kind, stage, microbatch), recv_of(kind, stage, microbatch)
    assert message(send) == message(recv) == (kind, stage, microbatch)
    assert send.stage == stage and recv.stage == consumer_stage(kind, stage)
    assert (kind, stage) in needs(kind, recv.stage, 11)


def test_unfold_lets_the_forwards_sends_go_before_the_backward():
    row = [Action.parse(t) for t in ("0F0", "(0F1;0B0)OVERLAP_F_B", "0SEND_B0", "0SEND_F1", "0RECV_B1", "0B1")]
    assert [str(a) for a in unfold(row)] == ["0F0", "0F1", "0SEND_F1", "0B0", "0SEND_B0", "0RECV_B1", "0B1"]
    assert unfold(row[4:]) == row[4:]


# --- placements ----------------------------------------------------------------------------------------------------


def test_loop_and_v():
    assert Placement.loop(3, 2).stage_to_rank == (0, 1, 2, 0, 1, 2)
    assert Placement.v(3).stage_to_rank == (0, 1, 2, 2, 1, 0)
    assert Placement.v(2, 3).stage_to_rank == (0, 1, 1, 0, 0, 1)
    assert str(Placement.v(2)) == "stage:rank 0:0 1:1 2:1 3:0"


@given(st.sampled_from([Placement.loop, Placement.v]), st.integers(1, 9), st.integers(1, 5))
def test_placements_go_both_ways(kind, ranks: int, per_rank: int):
    placement = kind(ranks, per_rank)
    assert (placement.num_ranks, placement.num_stages) == (ranks, ranks * per_rank)
    assert [placement.rank_of(s) for s in range(placement.num_stages)] == list(placement.stage_to_rank)
    for rank in range(ranks):
        stages = placement.stages_of(rank)
        assert len(stages) == per_rank and sorted(stages) == list(stages)
        assert {placement.rank_of(stage) for stage in stages} == {rank}
    if kind == Placement.v and per_rank == 2:
        assert all(placement.stages_of(r) == (r, 2 * ranks - 1 - r) for r in range(ranks))


@pytest.mark.parametrize("numbers", [(0,), (-1,), (2, 0)])
def test_a_placement_needs_ranks_and_stages(numbers: tuple[int, ...]):
    for kind in (Placement.loop, Placement.v):
        with pytest.raises(ConfigError, match="must be at least 1, got"):
            kind(*numbers)
        with pytest.raises(ConfigError, match=r"stages_per_rank must be a whole number, got 1\.5"):
            kind(2, 1.5)  # type: ignore[arg-type]


# --- text and CSV ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", schedule_names())
def test_programs_come_back_from_text_and_csv(name: str):
    program = build(config_type_of(name)(), ranks=3, microbatches=6)
    for found in (program, lower(program)):
        assert Program.from_csv(found.to_csv()) == found
        assert Program.from_text(str(found)) == found == Program.from_text(found.to_text())


def test_a_program_is_a_readable_grid():
    text = "# 2 ranks, 2 stages, 1 microbatches\nrank 0: 0F0 0B0\nrank 1: 1F0 1B0"
    assert str(Program.from_text("rank 0: 0F0 0B0 # comment\n\n# comment\nrank 1: 1F0  1B0\n")) == text


@pytest.mark.parametrize("path", TORCH, ids=lambda p: p.stem)
def test_files_of_torch_load(path: Path):
    _, ranks, per_rank, microbatches = path.stem.split("_")
    program = Program.from_csv(path.read_text())
    assert program.num_ranks == int(ranks) and program.num_microbatches == int(microbatches)
    assert program.num_stages == int(ranks) * int(per_rank) and not program.is_lowered and program.has_backward
    verify(program)
    verify(lower(program))


def test_files_of_torch_are_there():
    assert len(TORCH) == 5


@pytest.mark.parametrize(
    "text,message",
    [
        ("", "holds no action"),
        (",,,\n", "holds no action"),
        ("0F0,nope\n", "'nope' is no action"),
        ("0F0\n0B0\n", "stage 0 computes on rank 0 and, by 0B0, on rank 1; a stage lives on one rank"),
        ("0F0\n2F0\n", "no action computes stage 1, but stage 2 has some"),
        ("0F0\n\n1F0\n", "rank 1 of 3 computes nothing"),
        ("999999999F0\n", "no action computes stage 0"),
    ],
)
def test_csv_that_is_no_program(text: str, message: str):
    with pytest.raises(ParseError, match=message):
        Program.from_csv(text)


def test_csv_with_a_byte_order_mark():
    assert Program.from_csv("\ufeff0F0,0B0\n") == Program.from_csv("0F0,0B0\n")


@pytest.mark.parametrize(
    "text,message",
    [
        ("0F0 0B0", "does not begin with 'rank 0:'; give each rank one line"),
        ("rank 1: 0F0", "does not begin with 'rank 0:'"),
        ("rank 0: 0F0\nrank 0: 1F0", "does not begin with 'rank 1:'"),
        ("rank 0: 0F0,0B0", "is no action"),
    ],
)
def test_text_that_is_no_program(text: str, message: str):
    with pytest.raises(ParseError, match=message):
        Program.from_text(text)


alphabet = st.sampled_from(
    [*FORMS, "0F0", "1F0", "0B0", "0F999999999", "999999999F0", "rank 0:", "rank 1:", "(", ")", ";", "#", ",", " ",
     "\n", "\0", "é", "9" * 40, "\u2028", "\x1c"],
)  # fmt: skip


@settings(max_examples=300, deadline=1000)
@given(st.text() | st.lists(alphabet, max_size=40).map("".join) | st.lists(alphabet, max_size=40).map(" ".join))
def test_any_text_is_a_program_or_a_parse_error(text: str):
    for parse in (Program.from_csv, Program.from_text, Action.parse):
        try:
            found = parse(text)
        except ParseError:
            continue
        assert isinstance(found, Program | Action)
        if isinstance(found, Program):
            assert Program.from_csv(found.to_csv()) == found
            try:
                verify(found)
            except ProgramError:
                continue


def test_parsing_takes_memory_by_the_length_of_the_text():
    text = "0F999999999,0B999999999\n" + "," * 200_000
    tracemalloc.start()
    with pytest.raises(ParseError):
        Program.from_csv(text)
    for hostile in ("(" * 100_000, "0F0" * 50_000, "(0F0;" * 20_000, "9" * 200_000 + "F0"):
        with pytest.raises(ParseError) as caught:
            Action.parse(hostile)
        assert len(str(caught.value)) < 300
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 40 * len(text)


# --- faults in the grid -----------------------------------------------------------------------------------------------


def test_a_fault_shows_the_actions_around_it():
    program = build(config_type_of("gpipe")(), ranks=9, microbatches=9)
    error = program.fault("look", {Action(Op.F, 0, 0): "one", Action(Op.B, 0, 8): "two", Action(Op.F, 8, 4): "three"})
    assert isinstance(error, ProgramError)
    assert str(error).splitlines() == [
        "look",
        "rank 0: 0F0 0F1 0F2 0F3 0F4 0F5 … 0B3 0B4 0B5 0B6 0B7 0B8",
        "        ^^^ one                                       ^^^ two",
        *(f"rank {r}: {r}F0 {r}F1 {r}F2 {r}F3 {r}F4 {r}F5 … {r}B3 {r}B4 {r}B5 {r}B6 {r}B7 {r}B8" for r in (1, 2, 3)),
        "… 1 ranks",
        *(f"rank {r}: {r}F0 {r}F1 {r}F2 {r}F3 {r}F4 {r}F5 {r}F6 {r}F7 {r}F8 {r}B0 …" for r in (5, 6, 7)),
        "rank 8: 8F0 8F1 8F2 8F3 8F4 8F5 8F6 8F7 8F8 8B0 …",
        "                        ^^^ three",
    ]


def test_notes_side_by_side_do_not_run_into_each_other():
    program = Program.from_text("rank 0: 0F0 0F1 0F2")
    lines = str(program.fault("x", {Action(Op.F, 0, 0): "a long note", Action(Op.F, 0, 1): "b"})).splitlines()
    assert lines[1:] == ["rank 0: 0F0             0F1 0F2", "        ^^^ a long note ^^^ b"]


def test_all_errors_are_hockets():
    assert issubclass(ParseError, ProgramError) and issubclass(ProgramError, HocketError)
    assert issubclass(ProgramError, ValueError)
