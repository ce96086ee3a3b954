"""The communication pass: never slower than the compute order, in both modes; messages bounded, symmetric and early."""

from __future__ import annotations

import gc
import random
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hocket.collector import collector_paused
from hocket.errors import ProgramError, ScheduleError
from hocket.passes import add_communication, lower, lower_rank
from hocket.program import Action, Op, Program, message, needs
from hocket.replay import Durations, Mode, replay
from hocket.schedules import ScheduleConfig, build, config_type_of, parse_schedule, schedule_names
from hocket.verify import verify

VARIANTS = [
    *(config_type_of(name)() for name in schedule_names()),
    *map(
        parse_schedule,
        (
            {"schedule": "greedy", "policy": "gpipe", "num_stages_per_rank": 2},
            {"schedule": "inference", "num_stages_per_rank": 2},
            {"schedule": "looped_bfs", "num_stages_per_rank": 2},
            {"schedule": "looped_bfs", "num_stages_per_rank": 3},
            {"schedule": "1f1b", "num_stages_per_rank": 2},
            {"schedule": "1f1b", "num_stages_per_rank": 3},
            {"schedule": "1f1b", "zero_bubble": True},
            {"schedule": "1f1b", "zero_bubble": True, "num_stages_per_rank": 2},
            {"schedule": "1f1b", "zero_bubble": True, "num_stages_per_rank": 3},
            {"schedule": "1f1b", "warmup": "deep"},
        ),
    ),
]


def try_build(config: ScheduleConfig, ranks: int, microbatches: int) -> Program | None:
    """The program, or None where the schedule's definition rules the numbers out."""
    try:
        return build(config, ranks=ranks, microbatches=microbatches)
    except ScheduleError:
        return None


def makespan(program: Program, durations: Durations, mode: Mode = "rendezvous") -> float:
    result = replay(program, durations, mode)
    assert result.done
    return max(map(max, filter(None, result.end)))


def random_costs(stages: int, seed: int, overlap: float | None = None) -> Durations:
    generator = random.Random(seed)
    compute = [[generator.uniform(0.2, 3.0) for _ in range(stages)] for _ in range(4)]
    return Durations(compute, [[0.0] * stages] * 2, overlap)


def check_never_slower(program: Program, seed: int) -> None:
    lowered = lower(program)
    verify(lowered)
    pairs = any(action.parts for row in program.ranks for action in row)
    for durations in (
        Durations.unit(program.num_stages),
        random_costs(program.num_stages, seed),
        *([random_costs(program.num_stages, seed, overlap=0.8)] if pairs else []),
    ):
        alone = makespan(program, durations)
        assert makespan(lowered, durations, "rendezvous") == alone
        assert makespan(lowered, durations, "buffered") == alone


@pytest.mark.parametrize("config", VARIANTS, ids=lambda c: c.model_dump_json(exclude_defaults=False))
def test_messages_free_of_charge_cost_nothing(config: ScheduleConfig):
    """Rendezvous and compute-only makespan are equal for ranks 2..16 and up to 64 microbatches."""
    for ranks, counts in ((2, (1, 7, 64)), (3, (24,)), (4, (3, 8)), (6, (33,)), (8, (2, 16)), (13, (26,)), (16, (32,))):
        for microbatches in counts:
            program = try_build(config, ranks, microbatches)
            if program is not None:
                check_never_slower(program, seed=ranks * 100 + microbatches)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(VARIANTS), st.integers(1, 8), st.integers(1, 24), st.integers(0, 999))
def test_any_config_builds_lowers_verifies_and_keeps_its_makespan(config, ranks: int, microbatches: int, seed: int):
    program = try_build(config, ranks, microbatches)
    if program is not None:
        verify(program)
        check_never_slower(program, seed)


# --- what a lowered program looks like --------------------------------------------------------------------------------

LOWERED = [
    lower(program)
    for config in VARIANTS
    for ranks, microbatches in ((2, 4), (4, 8), (8, 16))
    if (program := try_build(config, ranks, microbatches)) is not None
]


def makers(action: Action) -> list[tuple[int, int, int]]:
    """The values that a compute action makes, as names of messages."""
    parts = action.parts or (action,)
    return [(Op.F if p.op == Op.F else Op.B, p.stage, p.microbatch) for p in parts if p.op in (Op.F, Op.B, Op.I)]


@pytest.mark.parametrize("program", LOWERED, ids=lambda p: f"{p.num_ranks}x{p.num_stages}x{p.num_microbatches}")
def test_each_send_stands_behind_what_makes_its_value(program: Program):
    for row in program.ranks:
        made: list[tuple[int, int, int]] = []
        for action in row:
            if action.op.is_send:
                assert message(action) in made
            elif action.op.is_compute:
                made = makers(action)


@pytest.mark.parametrize("program", LOWERED, ids=lambda p: f"{p.num_ranks}x{p.num_stages}x{p.num_microbatches}")
def test_p07_p08_messages_go_one_by_one_and_meet_in_order(program: Program):
    """Nothing is batched: each channel has its own order, the same at both ends, each message once."""
    home = program.placement.stage_to_rank
    ends: dict[tuple[int, int], tuple[list, list]] = {}
    for rank, row in enumerate(program.ranks):
        for action in row:
            if action.op.is_send or action.op.is_recv:
                kind, stage, _ = name = message(action)
                edge = home[stage], home[stage + (1 if kind == Op.F else -1)]
                assert rank == edge[action.op.is_recv] and edge[0] != edge[1]
                ends.setdefault(edge, ([], []))[action.op.is_recv].append(name)
    for sent, received in ends.values():
        assert sent == received and len(set(sent)) == len(sent)


@pytest.mark.parametrize("program", LOWERED, ids=lambda p: f"{p.num_ranks}x{p.num_stages}x{p.num_microbatches}")
def test_posted_receives_are_bounded_by_what_is_in_flight(program: Program):
    """Buffers posted and not yet used: at most as many as the rank holds activations, and one a channel."""
    for rank, row in enumerate(program.ranks):
        posted, most, held, peak = set(), 0, 0, 0
        for action in row:
            if action.op.is_recv:
                posted.add(message(action))
                most = max(most, len(posted))
            for part in action.computes:
                posted -= {(kind, at, part.microbatch) for kind, at in needs(part.op, part.stage, program.num_stages)}
                held += (part.op == Op.F) - (part.op in (Op.B, Op.W))
                peak = max(peak, held)
        channels = {(message(a)[0], program.placement.rank_of(message(a)[1])) for a in row if a.op.is_recv}
        bound = peak if program.has_backward else len(program.placement.stages_of(rank))
        assert most <= bound + len(channels), f"rank {rank} posts {most}"


@pytest.mark.parametrize("program", LOWERED, ids=lambda p: f"{p.num_ranks}x{p.num_stages}x{p.num_microbatches}")
def test_a_receive_is_posted_before_the_action_ahead_of_its_consumer(program: Program):
    """So that the transfer hides behind a computation; unless the consumer is the rank's first action."""
    for row in program.ranks:
        between: dict[tuple[int, int, int], int] = {}
        first = True
        for action in row:
            if action.op.is_recv:
                between[message(action)] = 1 if first else 0
            elif action.op.is_compute:
                for part in action.computes:
                    for kind, at in needs(part.op, part.stage, program.num_stages):
                        assert between.pop((kind, at, part.microbatch), 1) > 0
                between = {name: count + 1 for name, count in between.items()}
                first = False


def test_p03_gpipe_with_one_microbatch():
    program = lower(build(parse_schedule("gpipe"), ranks=2, microbatches=1))
    assert program.to_csv() == "0RECV_B0,0F0,0SEND_F0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0\n"


def test_p05_interleaved_needs_no_buffering():
    program = lower(build(parse_schedule({"schedule": "1f1b", "num_stages_per_rank": 2}), ranks=2, microbatches=4))
    verify(program)
    assert replay(program, Durations.unit(4), "rendezvous").done


def test_p06_no_send_waits_behind_a_receive():
    """pp=8, two stages each, 16 microbatches: every SEND goes out right behind its producer, ahead of all RECVs."""
    config = parse_schedule({"schedule": "1f1b", "num_stages_per_rank": 2})
    program = lower(build(config, ranks=8, microbatches=16))
    blocked = [
        (rank, str(row[at]), str(row[at + 1]))
        for rank, row in enumerate(program.ranks)
        for at in range(len(row) - 1)
        if row[at].op.is_recv and row[at + 1].op.is_send
    ]
    assert blocked == []


def test_what_each_part_of_a_pair_makes_leaves_when_that_part_is_done():
    """DualPipeV, p=4, m=8: 51; a pair that sends only at its end would take 54."""
    program = build(parse_schedule("dual_pipe_v"), ranks=4, microbatches=8)
    unit = Durations.unit(8)
    assert makespan(program, unit) == makespan(lower(program), unit) == 51
    whole = Program(program.placement, lower(program).ranks, 8)
    rows = tuple(tuple(part for action in row for part in (action.parts or (action,))) for row in whole.ranks)
    assert makespan(Program(program.placement, rows, 8), unit) == 54


# --- the contract of a pass -------------------------------------------------------------------------------------------


def test_a_pass_is_pure_and_lowering_twice_changes_nothing():
    program = build(parse_schedule("zero_bubble_v"), ranks=4, microbatches=8)
    before = program.to_csv()
    lowered = lower(program)
    assert program.to_csv() == before and lowered.compute_only() == program
    assert lower(lowered) is lowered
    assert all(type(action) is Action and type(action.op) is Op for row in lowered.ranks for action in row)
    assert lowered == Program.from_csv(lowered.to_csv())
    with pytest.raises(ProgramError, match="has sends and receives already"):
        add_communication(lowered)


def test_one_rank_needs_no_messages():
    program = build(parse_schedule({"schedule": "1f1b", "num_stages_per_rank": 3}), ranks=1, microbatches=4)
    assert lower(program) == program


@pytest.mark.parametrize("config", VARIANTS, ids=lambda c: c.model_dump_json())
def test_one_rank_gets_its_own_list_alone(config: ScheduleConfig):
    program = build(config, ranks=4, microbatches=9)
    lowered = lower(program)
    for rank in range(4):
        assert lower_rank(program, rank) == lower_rank(lowered, rank) == lowered.ranks[rank]


def test_what_is_not_legal_is_refused():
    with pytest.raises(ProgramError, match="circle"):
        lower(Program.from_text("rank 0: 0F0 0B0 0F1 0B1\nrank 1: 1F0 1F1 1B0 1B1"))
    with pytest.raises(ProgramError, match="no 1F1"):
        lower(Program.from_text("rank 0: 0F0 0F1\nrank 1: 1F0"))


# --- fast -----------------------------------------------------------------------------------------------------------


def test_time_per_action_does_not_grow():
    """The time of this process, so that others on the machine do not count much."""

    def seconds(ranks: int, microbatches: int) -> float:
        begin = time.process_time()
        lowered = lower(build(parse_schedule(SIZED), ranks=ranks, microbatches=microbatches))
        verify(lowered)
        return time.process_time() - begin

    small, large = min(seconds(8, 256) for _ in range(3)) / 12_288, min(seconds(32, 512) for _ in range(2)) / 98_304
    assert large < 2.5 * small
    assert large < 10e-6


SIZED = {"schedule": "1f1b", "num_stages_per_rank": 2, "zero_bubble": True}


def test_the_collector_is_as_it_was_whatever_happens():
    assert gc.isenabled()
    with collector_paused(), collector_paused():
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(RuntimeError), collector_paused():
        raise RuntimeError
    assert gc.isenabled()
    gc.disable()
    try:
        with collector_paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_the_collector_stays_off_until_the_last_thread_leaves():
    entered, leave = threading.Event(), threading.Event()

    def other() -> None:
        with collector_paused():
            entered.set()
            leave.wait(10)

    with collector_paused():
        thread = threading.Thread(target=other)
        thread.start()
        assert entered.wait(10)
    assert not gc.isenabled()
    leave.set()
    thread.join()
    assert gc.isenabled()
