"""The replay: times by hand, and against a slow one that follows each action back to what it waits for."""

from __future__ import annotations

import random
from functools import cache

import pytest

from hocket.passes import lower
from hocket.program import Op, Program, unfold
from hocket.replay import Durations, Mode, replay
from hocket.schedules import build, parse_schedule


def times(program: Program, durations: Durations, mode: Mode = "rendezvous") -> dict[str, tuple[float, float]]:
    result = replay(program, durations, mode)
    assert result.done
    return {
        str(action): (start, end)
        for order, starts, ends in zip(result.orders, result.start, result.end, strict=True)
        for action, start, end in zip(order, starts, ends, strict=True)
    }


def costs(stages: int, hop: float = 0.0, overlap: float | None = None) -> Durations:
    """F takes 1, B 2, I 1, W 1."""
    return Durations([[c] * stages for c in (1.0, 2.0, 1.0, 1.0)], [[hop] * stages] * 2, overlap)


def test_a_compute_only_program_hands_values_over_after_the_hop():
    program = Program.from_text("rank 0: 0F0 0F1 0B0 0B1\nrank 1: 1F0 1B0 1F1 1B1")
    found = times(program, costs(2, hop=0.5))
    assert found["1F0"] == (1.5, 2.5) and found["1B0"] == (2.5, 4.5) and found["0B0"] == (5.0, 7.0)
    assert found["1F1"] == (4.5, 5.5) and found["0B1"] == (8.0, 10.0)


def test_a_channel_carries_its_messages_one_after_the_other():
    program = Program.from_text("rank 0: 0F0 0SEND_F0 0F1 0SEND_F1\nrank 1: 1RECV_F0 1RECV_F1 1F0 1F1")
    found = times(program, costs(2, hop=5.0))
    assert found["0SEND_F1"] == (2.0, 2.0)
    assert found["1F0"] == (6.0, 7.0) and found["1F1"] == (11.0, 12.0)


def test_rendezvous_waits_for_the_receive_and_buffered_does_not():
    program = Program.from_text("rank 0: 0F0 0SEND_F0 0F1 0SEND_F1\nrank 1: 1RECV_F0 1F0 1RECV_F1 1F1")
    assert times(program, costs(2, hop=5.0), "rendezvous")["1F1"] == (12.0, 13.0)
    assert times(program, costs(2, hop=5.0), "buffered")["1F1"] == (11.0, 12.0)


def test_two_directions_do_not_share_a_channel():
    program = lower(Program.from_text("rank 0: 0F0 0F1 0B0 0B1\nrank 1: 1F0 1B0 1F1 1B1"))
    result = replay(program, costs(2, hop=4.0))
    assert set(result.channels) == {(0, 1), (1, 0)}
    for channel in result.channels.values():
        assert [name for name, _ in channel.sent] == [name for name, _ in channel.posted]


def test_parts_of_a_pair_in_turn_or_jointly():
    program = Program.from_text("rank 0: 0F0 (0F1;0B0)OVERLAP_F_B 0B1")
    assert times(program, costs(1))["0F1"] == (1.0, 2.0)
    assert times(program, costs(1))["0B0"] == (2.0, 4.0)
    assert times(program, costs(1, overlap=0.5))["(0F1;0B0)OVERLAP_F_B"] == (1.0, 2.5)


def test_what_a_part_makes_leaves_as_soon_as_it_is_done():
    program = lower(Program.from_text("rank 0: 0F0 (0F1;0B0)OVERLAP_F_B 0B1\nrank 1: 1F0 1B0 1F1 1B1"))
    order = [str(action) for action in replay(program, costs(2)).orders[0]]
    assert order.index("0SEND_F1") == order.index("0F1") + 1 < order.index("0B0")
    jointly = [str(action) for action in replay(program, costs(2, overlap=1.0)).orders[0]]
    assert jointly.index("0SEND_F1") == jointly.index("(0F1;0B0)OVERLAP_F_B") + 1


def test_a_circle_comes_back_not_done():
    assert not replay(Program.from_text("rank 0: 0F0 0B0 0F1 0B1\nrank 1: 1F0 1F1 1B0 1B1"), costs(2)).done


def test_made_and_arrived():
    result = replay(Program.from_text("rank 0: 0F0 0B0 2F0 2B0\nrank 1: 1F0 1B0").compute_only(), costs(3, 0.5))
    assert not result.done
    result = replay(Program.from_text("rank 0: 0F0 2F0 2B0 0B0\nrank 1: 1F0 1B0"), costs(3, 0.5))
    assert (result.made(Op.F, 0, 0), result.arrived(Op.F, 0, 0)) == (1.0, 1.5)
    assert (result.made(Op.B, 2, 0), result.arrived(Op.B, 2, 0)) == (6.0, 6.5)
    assert result.arrived(Op.F, 2, 0) == result.made(Op.F, 2, 0) == 4.0


def reference(program: Program, durations: Durations, mode: Mode) -> list[list[tuple[float, float]]]:
    """Starts and ends, each found by going back from the action. Pairs run in turn."""
    orders = [unfold(row) for row in program.ranks]
    home, last = program.placement.stage_to_rank, program.num_stages - 1
    where = {str(a): (r, i) for r, order in enumerate(orders) for i, a in enumerate(order)}
    lowered = program.is_lowered
    chan: dict[tuple[int, int], list[tuple[str, int, int]]] = {}
    for order in orders:
        for op, stage, microbatch, _ in order:
            if op.name.startswith("SEND"):
                other = stage + (1 if op == Op.SEND_F else -1)
                chan.setdefault((home[stage], home[other]), []).append((op.name[-1], stage, microbatch))

    @cache
    def span(rank: int, index: int) -> tuple[float, float]:
        op, stage, microbatch, _ = orders[rank][index]
        start = span(rank, index - 1)[1] if index else 0.0
        if len(op.name) > 1:
            return start, start
        for kind, at in {
            "F": [("F", stage - 1)] if stage else [],
            "W": [],
        }.get(op.name, [("B", stage + 1)] if stage < last else []):
            start = max(start, there(kind, at, microbatch, home[stage]))
        return start, start + durations.compute[op][stage]

    def made(kind: str, stage: int, microbatch: int) -> float:
        name = f"{stage}{kind}{microbatch}"
        return span(*where[name if name in where else f"{stage}I{microbatch}"])[1]

    def there(kind: str, stage: int, microbatch: int, rank: int) -> float:
        hop = durations.hop[0 if kind == "F" else 1][stage]
        if home[stage] == rank:
            return made(kind, stage, microbatch)
        if not lowered:
            return made(kind, stage, microbatch) + hop
        return arrival(home[stage], rank, chan[home[stage], rank].index((kind, stage, microbatch)))

    @cache
    def carried(source: int, target: int, index: int) -> float:
        kind, stage, microbatch = chan[source, target][index]
        sent = span(*where[f"{stage}SEND_{kind}{microbatch}"])[0]
        free = carried(source, target, index - 1) if index else 0.0
        start = sent if mode == "buffered" else max(sent, posted(source, target, index))
        return max(free, start) + durations.hop[0 if kind == "F" else 1][stage]

    def posted(source: int, target: int, index: int) -> float:
        kind, stage, microbatch = chan[source, target][index]
        return span(*where[f"{stage + (1 if kind == 'F' else -1)}RECV_{kind}{microbatch}"])[0]

    def arrival(source: int, target: int, index: int) -> float:
        return max(carried(source, target, index), posted(source, target, index))

    return [[span(rank, index) for index in range(len(order))] for rank, order in enumerate(orders)]


@pytest.mark.parametrize("mode", ["buffered", "rendezvous"])
@pytest.mark.parametrize("hop", [0.0, 0.7])
@pytest.mark.parametrize(
    "schedule",
    [
        "gpipe",
        "1f1b",
        {"schedule": "1f1b", "num_stages_per_rank": 2, "zero_bubble": True},
        {"schedule": "looped_bfs", "num_stages_per_rank": 2},
        "zero_bubble_v",
        "dual_pipe_v",
        "inference",
    ],
)
def test_equal_to_a_replay_that_goes_back_from_each_action(schedule: str | dict, hop: float, mode: Mode):
    generator = random.Random(str((schedule, hop)))
    for ranks, microbatches in ((1, 3), (2, 4), (3, 6)):
        program = build(parse_schedule(schedule), ranks=ranks, microbatches=microbatches)
        stages = program.num_stages
        durations = Durations(
            [[generator.uniform(0.5, 2.0) for _ in range(stages)] for _ in range(4)],
            [[hop * generator.uniform(0.5, 2.0) for _ in range(stages)] for _ in range(2)],
        )
        for found in (program, lower(program)):
            result = replay(found, durations, mode)
            pairs = [list(zip(*row, strict=True)) for row in zip(result.start, result.end, strict=True)]
            assert pairs == reference(found, durations, mode)
