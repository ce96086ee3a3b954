"""What messages cost that cost nothing: makespan of a lowered program under rendezvous over that of its compute order.

    python benchmarks/lowering.py [--quick]

Beside hocket's pass stands the naive one, which puts a RECV into the receiver's list when it puts the SEND into the
sender's. Its messages go through one queue for both directions, one for each pair of ranks or one for all that a rank
sends and receives (a single stream): a message starts when it is at the head of the queue at both ends. F = I = W = 1,
B = 2, transfers take no time. Needs no torch.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Sequence

from hocket import Action, Op, Program, build, lower, parse_schedule
from hocket.program import consumer_stage, message, needs, recv_of, send_of
from hocket.replay import Durations, replay

SCHEDULES = (
    {"schedule": "inference"},
    {"schedule": "gpipe"},
    {"schedule": "looped_bfs", "num_stages_per_rank": 2},
    {"schedule": "1f1b"},
    {"schedule": "1f1b", "zero_bubble": True},
    {"schedule": "1f1b", "num_stages_per_rank": 2},
    {"schedule": "1f1b", "num_stages_per_rank": 2, "zero_bubble": True},
    {"schedule": "zb_h2"},
    {"schedule": "zero_bubble_v"},
    {"schedule": "v_half"},
    {"schedule": "v_min"},
    {"schedule": "dual_pipe_v"},
    {"schedule": "greedy"},
)
SIZES = ((2, 8), (4, 8), (4, 32), (8, 16), (8, 32), (16, 64))
COSTS = {Op.F: 1.0, Op.B: 2.0, Op.I: 1.0, Op.W: 1.0}

Value = tuple[Op, int, int]


def naive(program: Program) -> list[list[Action]]:
    """Send right behind the producer, and receive at the same moment, wherever the receiver then is."""
    home, stages = program.placement.stage_to_rank, program.num_stages
    lists: list[list[Action]] = [[] for _ in program.ranks]
    held: list[set[Value]] = [set() for _ in program.ranks]
    at = [0] * program.num_ranks
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(program.ranks):
            if at[rank] == len(row) or not all(inputs(part, stages) <= held[rank] for part in row[at[rank]].computes):
                continue
            action = row[at[rank]]
            at[rank] += 1
            moved = True
            lists[rank].append(action)
            for value in made(action):
                held[rank].add(value)
                target = consumer_stage(*value[:2])
                if 0 <= target < stages and home[target] != rank and (value[0] == Op.F or program.has_backward):
                    lists[rank].append(send_of(*value))
                    lists[home[target]].append(recv_of(*value))
                    held[home[target]].add(value)
    return lists


def inputs(action: Action, stages: int) -> set[Value]:
    return {(kind, stage, action.microbatch) for kind, stage in needs(action.op, action.stage, stages)}


def made(action: Action) -> list[Value]:
    return [(Op.F if p.op == Op.F else Op.B, p.stage, p.microbatch) for p in action.computes if p.op != Op.W]


class Queues:
    """Messages that wait for each other in one queue: for each pair of ranks, or for all of a rank."""

    def __init__(self, program: Program, per_pair: bool):
        self.home, self.per_pair = program.placement.stage_to_rank, per_pair
        self.queues: dict[tuple[int, int], list[tuple[Value, float]]] = defaultdict(list)
        self.heads: dict[tuple[int, int], int] = defaultdict(int)
        self.free: dict[tuple[int, int], float] = defaultdict(float)
        self.arrived: dict[Value, float] = {}

    def issue(self, action: Action, at: float) -> None:
        """One end of a message is issued; let through what can go."""
        value = message(action)
        lane = self.lanes(value)[action.op.is_recv]
        self.queues[lane].append((value, at))
        waiting = [lane]
        while waiting:
            lane = waiting.pop()
            if self.heads[lane] < len(self.queues[lane]):
                value = self.queues[lane][self.heads[lane]][0]
                if self.pass_through(value):
                    waiting += self.lanes(value)

    def ends(self, value: Value) -> tuple[int, int]:
        return self.home[value[1]], self.home[consumer_stage(*value[:2])]

    def lanes(self, value: Value) -> tuple[tuple[int, int], tuple[int, int]]:
        """The queue at the sender and the one at the receiver."""
        source, target = self.ends(value)
        return ((source, target), (target, source)) if self.per_pair else ((source, -1), (target, -1))

    def pass_through(self, value: Value) -> bool:
        """Move `value` if it is at the head at both ends."""
        lanes = self.lanes(value)
        heads = [queue[self.heads[lane]] for lane in lanes if self.heads[lane] < len(queue := self.queues[lane])]
        if [head for head, _ in heads] != [value, value]:
            return False
        self.arrived[value] = max([self.free[lane] for lane in lanes] + [at for _, at in heads])
        for lane in lanes:
            self.free[lane] = self.arrived[value]
            self.heads[lane] += 1
        return True


def queued_makespan(program: Program, lists: Sequence[Sequence[Action]], per_pair: bool) -> float:
    """The makespan of `lists` if messages wait for each other in queues."""
    stages, queues = program.num_stages, Queues(program, per_pair)
    own: list[set[Value]] = [set() for _ in lists]
    at, clock = [0] * len(lists), [0.0] * len(lists)
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(lists):
            while at[rank] < len(row):
                action = row[at[rank]]
                if action.computes:
                    needed = set().union(*(inputs(part, stages) for part in action.computes))
                    needed -= own[rank] | set(made(action))
                    if not needed <= queues.arrived.keys():
                        break
                    clock[rank] = max([clock[rank], *(queues.arrived[value] for value in needed)])
                    clock[rank] += sum(COSTS[part.op] for part in action.computes)
                    own[rank].update(made(action))
                else:
                    queues.issue(action, clock[rank])
                at[rank] += 1
                moved = True
    assert all(at[rank] == len(row) for rank, row in enumerate(lists)), "the naive order deadlocks"
    return max(clock)


def makespan(program: Program) -> float:
    return max(max(ends) for ends in replay(program, Durations.unit(program.num_stages), "rendezvous").end)


def name(schedule: dict[str, object]) -> str:
    rest = [f"{key}={value}" for key, value in schedule.items() if key != "schedule"]
    return " ".join([str(schedule["schedule"]), *rest]).replace("num_stages_per_rank", "stages")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--quick", action="store_true", help="only 4 ranks, 8 microbatches and 8 ranks, 32 microbatches"
    )
    sizes = SIZES[1:2] + SIZES[4:5] if parser.parse_args().quick else SIZES
    print("rendezvous makespan over compute makespan: hocket / naive, a queue for a pair / naive, a queue for a rank\n")
    print("| " + " | ".join(["schedule", *(f"p={p} m={m}" for p, m in sizes)]) + " |")
    print("|" + "---|" * (len(sizes) + 1))
    worst = 0.0
    for schedule in SCHEDULES:
        cells = []
        for ranks, microbatches in sizes:
            program = build(parse_schedule(schedule), ranks=ranks, microbatches=microbatches)
            alone, ours, lists = makespan(program), makespan(lower(program)), naive(program)
            worst = max(worst, ours / alone)
            others = [queued_makespan(program, lists, per_pair) / alone for per_pair in (True, False)]
            cells.append(f"{ours / alone:.3f} / {others[0]:.2f} / {others[1]:.2f}")
        print("| " + " | ".join([name(schedule), *cells]) + " |")
    print(f"\nhocket at most {worst:.3f}")


if __name__ == "__main__":
    main()
