"""A small machine that executes a program, to see whether it runs right; it shares no code with hocket's replay.

Ranks advance in a random order, one action at a time. A SEND hands its value to its channel and a RECV asks for one, in
program order, and neither holds the rank up; a channel delivers its k-th message once both ends have issued their k-th.
Values are checked as they are used: whoever computes must hold what it needs.
"""

from __future__ import annotations

import random
from collections import defaultdict

from hocket.program import Action, Program

Name = tuple[str, int, int]


class Wrong(Exception):
    """The program does not run right; says where."""


class Machine:
    def __init__(self, program: Program, joint: bool, backward: bool):
        self.program, self.joint, self.backward = program, joint, backward
        self.last = program.num_stages - 1
        self.held: list[set[Name]] = [set() for _ in program.ranks]
        self.ran: set[Name] = set()
        self.sent: dict[tuple[int, int], list[Name]] = defaultdict(list)
        self.asked: dict[tuple[int, int], list[Name]] = defaultdict(list)
        self.at = [0] * program.num_ranks
        self.half_done = [False] * program.num_ranks
        self.lowered = any(len(a.op.name) > 1 and not a.parts for row in program.ranks for a in row)

    def run(self, seed: int) -> None:
        """Execute everything; raises Wrong if it gets stuck, or ends with something left to do."""
        choice = random.Random(seed)
        ranks = list(range(self.program.num_ranks))
        while ranks:
            choice.shuffle(ranks)
            moved = [rank for rank in ranks if self.step(rank)]
            if not moved:
                raise Wrong(f"deadlock at {[str(self.program.ranks[r][self.at[r]]) for r in ranks]}")
            ranks = [rank for rank in ranks if self.at[rank] < len(self.program.ranks[rank])]
        for edge in self.sent.keys() | self.asked.keys():
            if self.sent[edge] != self.asked[edge]:
                raise Wrong(f"channel {edge} is left with {self.sent[edge]} against {self.asked[edge]}")
        for stage in range(self.program.num_stages):
            for microbatch in range(self.program.num_microbatches):
                done = "".join(op for op in "FBIW" if (op, stage, microbatch) in self.ran)
                if done not in (("FB", "FIW") if self.backward else ("F",)):
                    raise Wrong(f"of stage {stage}, microbatch {microbatch} only {done} ran")

    def step(self, rank: int) -> bool:
        """Run the next action of a rank, or the next part of its pair, if it can; tell if it did."""
        if self.at[rank] >= len(self.program.ranks[rank]):
            return False
        action = self.program.ranks[rank][self.at[rank]]
        if action.parts and not self.joint:
            part = action.parts[self.half_done[rank]]
            if not self.ready(rank, part):
                return False
            self.compute(rank, part)
            self.half_done[rank] = not self.half_done[rank]
            self.at[rank] += not self.half_done[rank]
            return True
        if action.op.name.startswith(("SEND", "RECV")):
            self.issue(rank, action)
        else:
            parts = action.parts or (action,)
            if not all(self.ready(rank, part) for part in parts):
                return False
            for part in parts:
                self.compute(rank, part)
        self.at[rank] += 1
        return True

    def needs(self, action: Action) -> list[Name]:
        op, stage, microbatch, _ = action
        if op.name == "F":
            return [("act", stage - 1, microbatch)] if stage else []
        if op.name == "W":
            return [("grad", stage, microbatch)]
        own = [("act", stage, microbatch)]
        return own if stage == self.last else [*own, ("grad", stage + 1, microbatch)]

    def ready(self, rank: int, action: Action) -> bool:
        if not self.lowered:
            return all(any(name in held for held in self.held) for name in self.needs(action))
        return all(name in self.held[rank] for name in self.needs(action))

    def compute(self, rank: int, action: Action) -> None:
        op, stage, microbatch, _ = action
        if self.program.placement.stage_to_rank[stage] != rank:
            raise Wrong(f"{action} runs on rank {rank}")
        if (op.name, stage, microbatch) in self.ran:
            raise Wrong(f"{action} runs twice")
        self.ran.add((op.name, stage, microbatch))
        if op.name != "W":
            self.held[rank].add(("act" if op.name == "F" else "grad", stage, microbatch))

    def issue(self, rank: int, action: Action) -> None:
        verb, way = action.op.name.split("_")
        ahead = 1 if way == "F" else -1
        source = action.stage if verb == "SEND" else action.stage - ahead
        home = self.program.placement.stage_to_rank
        if not (0 <= source <= self.last and 0 <= source + ahead <= self.last):
            raise Wrong(f"{action} has no other end")
        edge = home[source], home[source + ahead]
        if edge[0] == edge[1] or rank != edge[verb == "RECV"]:
            raise Wrong(f"{action} on rank {rank} does not cross ranks")
        name = ("act" if way == "F" else "grad", source, action.microbatch)
        if name in (self.sent if verb == "SEND" else self.asked)[edge]:
            raise Wrong(f"{action} moves {name} again")
        if verb == "SEND" and name not in self.held[rank]:
            raise Wrong(f"{action} sends what is not made yet")
        (self.sent if verb == "SEND" else self.asked)[edge].append(name)
        sent, asked = self.sent[edge], self.asked[edge]
        through = min(len(sent), len(asked))
        if sent[:through] != asked[:through]:
            raise Wrong(f"channel {edge} carries {sent[:through]}, but {asked[:through]} are awaited")
        self.held[edge[1]].update(sent[:through])


def execute(program: Program, backward: bool, seeds: int = 2) -> None:
    """Raise Wrong unless the program runs right, with pairs in turn and jointly, whatever the order of the ranks."""
    for joint in (False, True) if any(a.parts for row in program.ranks for a in row) else (False,):
        for seed in range(seeds):
            Machine(program, joint, backward).run(seed)
