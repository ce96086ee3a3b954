"""What the ranks do, as data: operations, actions, placements, programs, and the one rule of who needs what.

Nothing here knows how an action is executed. A program is plain tuples; builders make it, passes rewrite it,
`verify`, `simulate` and the executor read it. The notation is that of torch.distributed.pipelining.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from itertools import repeat
from operator import itemgetter
from typing import NamedTuple

from hocket.counts import positive
from hocket.errors import ConfigError, ParseError, ProgramError


class Op(IntEnum):
    """The kinds of action. `B` is a full backward; `I` and `W` are its input half and its weight half."""

    F = 0
    B = 1
    I = 2  # noqa: E741 - the field's own letter for the backward for the input
    W = 3
    SEND_F = 4
    RECV_F = 5
    SEND_B = 6
    RECV_B = 7
    OVERLAP_F_B = 8

    @property
    def is_compute(self) -> bool:
        """True for F, B, I, W and the overlapped pair."""
        return self <= Op.W or self == Op.OVERLAP_F_B

    @property
    def is_send(self) -> bool:
        return self == Op.SEND_F or self == Op.SEND_B

    @property
    def is_recv(self) -> bool:
        return self == Op.RECV_F or self == Op.RECV_B

    def __str__(self) -> str:
        return self.name


class Action(NamedTuple):
    """One op on one stage and microbatch. An overlapped pair carries its forward and its backward in `parts`."""

    op: Op
    stage: int
    microbatch: int
    parts: tuple[Action, ...] = ()

    @classmethod
    def pair(cls, forward: Action, backward: Action) -> Action:
        """A forward and a backward that may overlap; written `(0F3;7B1)OVERLAP_F_B`."""
        if forward.op != Op.F or backward.op not in (Op.B, Op.I):
            raise ConfigError(
                f"an overlapped pair is an F and then a B or an I, got {forward} and {backward}; swap or change them"
            )
        return cls(Op.OVERLAP_F_B, forward.stage, forward.microbatch, (forward, backward))

    @property
    def computes(self) -> tuple[Action, ...]:
        """The F, B, I or W actions in it: itself, the two parts of a pair, nothing for a send or a receive."""
        return self.parts or ((self,) if self.op <= Op.W else ())

    def __str__(self) -> str:
        if self.parts:
            return f"({self.parts[0]};{self.parts[1]})OVERLAP_F_B"
        return f"{self.stage}{self.op.name}{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """The action that `text` writes; raises ParseError for anything else."""
        if match := _PAIR.fullmatch(text):
            try:
                return cls.pair(cls.parse(match[1]), cls.parse(match[2]))
            except ConfigError as error:
                raise ParseError(f"{text!r} is no action: {error}") from None
        if match := _ACTION.fullmatch(text):
            return cls(Op[match[2]], int(match[1]), int(match[3]))
        raise ParseError(
            f"{text[:60]!r} is no action; expected forms like 2F0, 2B0, 2I0, 2W0, 2SEND_F0, 3RECV_F0, "
            "(0F3;7B1)OVERLAP_F_B"
        )


def make_actions(ops: Iterable[Op], stages: Iterable[int], microbatches: Iterable[int]) -> Iterator[Action]:
    """As `map(Action, ops, stages, microbatches)` in half the time: without a call in Python for each."""
    fields = zip(ops, stages, microbatches, repeat(()))
    return map(tuple.__new__, repeat(Action), fields)  # pyrefly: ignore[bad-specialization] - Action is a tuple


_op_of = itemgetter(0)
_ACTION = re.compile(r"([0-9]{1,9})(SEND_F|RECV_F|SEND_B|RECV_B|F|B|I|W)([0-9]{1,9})")
_PAIR = re.compile(r"\(([0-9A-Z_]{3,30});([0-9A-Z_]{3,30})\)OVERLAP_F_B")


# --- the dependency rule ----------------------------------------------------------------------------------------
#
# Two values exist for a stage and a microbatch: its activation, named by Op.F, and the gradient for its input, named
# by Op.B (whether a B or an I made it). Microbatches never mix, so the rule is one of ops and stages alone. Everyone
# who must know who feeds whom (communication pass, checker, simulator, executor) reads these functions.


def produces(op: Op) -> Op | None:
    """The kind of value that `op` makes at its own stage: Op.F an activation, Op.B a gradient, None for W."""
    return (Op.F, Op.B, Op.B, None)[op]


def needs(op: Op, stage: int, num_stages: int) -> tuple[tuple[Op, int], ...]:
    """The values (kind, stage) that `op` on `stage` consumes, for the same microbatch.

    F needs the activation of the stage before. B and I need the stage's own activation and the gradient of the stage
    after. W needs that I has made the stage's own gradient.
    """
    if op == Op.F:
        return ((Op.F, stage - 1),) if stage > 0 else ()
    if op == Op.W:
        return ((Op.B, stage),)
    own = (Op.F, stage)
    return (own, (Op.B, stage + 1)) if stage + 1 < num_stages else (own,)


def consumer_stage(kind: Op, stage: int) -> int:
    """The stage to which the value (kind, stage) goes next; outside 0..S-1 when it goes nowhere."""
    return stage + 1 if kind == Op.F else stage - 1


def message(action: Action) -> tuple[Op, int, int]:
    """The name of the message that a SEND or a RECV moves: (kind, producing stage, microbatch)."""
    op, stage, microbatch, _ = action
    if op == Op.SEND_F or op == Op.SEND_B:
        return (Op.F if op == Op.SEND_F else Op.B, stage, microbatch)
    return (Op.F, stage - 1, microbatch) if op == Op.RECV_F else (Op.B, stage + 1, microbatch)


def send_of(kind: Op, stage: int, microbatch: int) -> Action:
    """The action by which the producer sends a message."""
    return Action(Op.SEND_F if kind == Op.F else Op.SEND_B, stage, microbatch)


def recv_of(kind: Op, stage: int, microbatch: int) -> Action:
    """The action by which the consumer receives a message."""
    return Action(Op.RECV_F if kind == Op.F else Op.RECV_B, consumer_stage(kind, stage), microbatch)


def unfold(actions: Sequence[Action]) -> list[Action]:
    """The order in which a rank runs `actions` when the parts of a pair run one after the other.

    A SEND that directly follows a pair leaves as soon as the part that makes its value is done: so the forward's
    SENDs come before the backward.
    """
    if not any(action.parts for action in actions):
        return list(actions)
    flat: list[Action] = []
    index = 0
    while index < len(actions):
        action = actions[index]
        index += 1
        if not action.parts:
            flat.append(action)
            continue
        first, second = action.parts
        early, late = [], []
        while index < len(actions) and actions[index].op.is_send:
            send = actions[index]
            (early if message(send) == (Op.F, first.stage, first.microbatch) else late).append(send)
            index += 1
        flat += [first, *early, second, *late]
    return flat


# --- placements and programs --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Placement:
    """Which rank hosts which stage. `stage_to_rank[s]` is the rank of stage s."""

    stage_to_rank: tuple[int, ...]

    @classmethod
    def loop(cls, ranks: int, stages_per_rank: int = 1) -> Placement:
        """Stage s on rank s mod ranks."""
        ranks, stages_per_rank = positive("ranks", ranks), positive("stages_per_rank", stages_per_rank)
        return cls(tuple(range(ranks)) * stages_per_rank)

    @classmethod
    def v(cls, ranks: int, stages_per_rank: int = 2) -> Placement:
        """Zig-zag: up through the ranks and down again; with two per rank, rank r hosts r and 2p-1-r."""
        ranks, stages_per_rank = positive("ranks", ranks), positive("stages_per_rank", stages_per_rank)
        up = tuple(range(ranks))
        return cls(sum((up if i % 2 == 0 else up[::-1] for i in range(stages_per_rank)), ()))

    @property
    def num_stages(self) -> int:
        return len(self.stage_to_rank)

    @cached_property
    def num_ranks(self) -> int:
        return max(self.stage_to_rank) + 1

    @cached_property
    def _rank_to_stages(self) -> tuple[tuple[int, ...], ...]:
        hosted: list[list[int]] = [[] for _ in range(self.num_ranks)]
        for stage, rank in enumerate(self.stage_to_rank):
            hosted[rank].append(stage)
        return tuple(map(tuple, hosted))

    def rank_of(self, stage: int) -> int:
        return self.stage_to_rank[stage]

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that `rank` hosts, in the order of the forward pass."""
        return self._rank_to_stages[rank]

    def __str__(self) -> str:
        return "stage:rank " + " ".join(f"{s}:{r}" for s, r in enumerate(self.stage_to_rank))


@dataclass(frozen=True)
class Program:
    """For each rank the ordered list of its actions, with the placement of the stages."""

    placement: Placement
    ranks: tuple[tuple[Action, ...], ...]
    num_microbatches: int

    @property
    def num_ranks(self) -> int:
        return len(self.ranks)

    @property
    def num_stages(self) -> int:
        return self.placement.num_stages

    @cached_property
    def is_lowered(self) -> bool:
        """True if it has sends or receives; else it is compute only."""
        return self._has(Op.SEND_F, Op.RECV_F, Op.SEND_B, Op.RECV_B)

    @cached_property
    def has_backward(self) -> bool:
        """False for a program of forwards only, such as inference."""
        return self._has(Op.B, Op.I, Op.W, Op.OVERLAP_F_B)

    def _has(self, *ops: Op) -> bool:
        # Bytes, because a comparison of enums is a call in Python.
        rows = (bytes(map(_op_of, actions)) for actions in self.ranks)
        return any(op in row for row in rows for op in ops)

    def compute_only(self) -> Program:
        """The same program without its sends and receives."""
        kept = tuple(tuple(a for a in actions if not Op.SEND_F <= a.op <= Op.RECV_B) for actions in self.ranks)
        return Program(self.placement, kept, self.num_microbatches)

    def __str__(self) -> str:
        return self.to_text()

    def to_text(self) -> str:
        """A readable grid, one line a rank, that `from_text` reads back."""
        head = f"# {self.num_ranks} ranks, {self.num_stages} stages, {self.num_microbatches} microbatches"
        return "\n".join([head, *(f"rank {r}: " + " ".join(map(str, row)) for r, row in enumerate(self.ranks))])

    @classmethod
    def from_text(cls, text: str) -> Program:
        """Read `to_text` back: lines `rank 0: 0F0 0F1 …`; `#` begins a comment. Raises ParseError."""
        lines = [line for raw in text.splitlines() if (line := raw.split("#", 1)[0].strip())]
        rows = []
        for number, line in enumerate(lines):
            label, colon, actions = line.partition(":")
            if not colon or label.split() != ["rank", str(number)]:
                raise ParseError(f"line {line[:60]!r} does not begin with 'rank {number}:'; give each rank one line")
            rows.append(actions.split())
        return cls._from_cells(rows)

    def to_csv(self) -> str:
        """One line a rank, actions between commas: the file format of torch.distributed.pipelining."""
        return "".join(",".join(map(str, actions)) + "\n" for actions in self.ranks)

    @classmethod
    def from_csv(cls, text: str) -> Program:
        """Read `to_csv`, or a compute-only file of torch, back; empty cells are idle steps. Raises ParseError."""
        # Some editors and spreadsheets begin a file with a byte order mark.
        lines = text.removeprefix("\ufeff").splitlines()
        return cls._from_cells([[cell.strip() for cell in line.split(",")] for line in lines])

    @classmethod
    def _from_cells(cls, rows: Iterable[Sequence[str]]) -> Program:
        ranks = tuple(tuple(Action.parse(cell) for cell in row if cell) for row in rows)
        if not any(ranks):
            raise ParseError("the text holds no action; expected one line a rank")
        return cls.from_actions(ranks)

    @classmethod
    def from_actions(cls, ranks: Sequence[Sequence[Action]]) -> Program:
        """A program from rank lists alone: the placement is where each stage computes."""
        homes: dict[int, int] = {}
        microbatch = -1
        for rank, actions in enumerate(ranks):
            for action in (part for a in actions for part in a.computes):
                if homes.setdefault(action.stage, rank) != rank:
                    raise ParseError(
                        f"stage {action.stage} computes on rank {homes[action.stage]} and, by {action}, on rank "
                        f"{rank}; a stage lives on one rank"
                    )
                microbatch = max(microbatch, action.microbatch)
        _check_homes(homes, len(ranks))
        placement = Placement(tuple(homes[s] for s in range(len(homes))))
        return cls(placement, tuple(map(tuple, ranks)), microbatch + 1)

    def find(self, action: Action) -> list[tuple[int, int]]:
        """Where `action` stands, alone or as part of a pair: (rank, index in the rank's list)."""
        return [(rank, index) for rank, index, a in self.actions() if a == action or action in a.parts]

    def fault(self, text: str, notes: Mapping[Action, str]) -> ProgramError:
        """An error to raise, that shows the grid around some actions and under each its note."""
        marks = {place: note for action, note in notes.items() for place in self.find(action)}
        return ProgramError(f"{text}\n{self.excerpt(marks)}" if marks else text)

    def excerpt(self, marks: Mapping[tuple[int, int], str], around: int = 5) -> str:
        """The grid near some actions. `marks[rank, index]` is the note set under that action.

        Ranks without a mark show their actions near the same index; those far from all marks are left out.
        """
        marked = sorted({rank for rank, _ in marks})
        lines, skipped = [], 0
        for rank, actions in enumerate(self.ranks):
            nearest = min(marked, key=lambda r: abs(r - rank), default=rank)
            if abs(nearest - rank) > 3:
                skipped += 1
                continue
            if skipped:
                lines.append(f"… {skipped} ranks")
                skipped = 0
            centers = [index for r, index in marks if r == nearest] or [0]
            lines += _excerpt_line(rank, actions, centers, around, marks)
        return "\n".join([*lines, f"… {skipped} ranks"] if skipped else lines)

    def actions(self) -> Iterator[tuple[int, int, Action]]:
        """All actions as (rank, index in the rank's list, action)."""
        for rank, actions in enumerate(self.ranks):
            for index, action in enumerate(actions):
                yield rank, index, action


def _excerpt_line(
    rank: int, actions: Sequence[Action], centers: Sequence[int], around: int, marks: Mapping[tuple[int, int], str]
) -> list[str]:
    """The line of a rank near some indices, and, if it has marks, a line of notes below."""
    line, under, following = f"rank {rank}: ", "", 0
    shown = {i for c in centers for i in range(max(0, c - around), min(c + around + 1, len(actions)))}
    for index in sorted(shown):
        line += "… " if index > following else ""
        following = index + 1
        note = marks.get((rank, index))
        if note is not None:
            line = line.ljust(len(under))
            under = under.ljust(len(line)) + "^" * len(str(actions[index])) + f" {note} "
        line += f"{actions[index]} "
    line += "…" if following < len(actions) else ""
    return [line.rstrip(), under.rstrip()] if under else [line.rstrip()]


def _check_homes(homes: Mapping[int, int], num_ranks: int) -> None:
    if homes and max(homes) != len(homes) - 1:
        missing = next(s for s in range(max(homes)) if s not in homes)
        raise ParseError(
            f"no action computes stage {missing}, but stage {max(homes)} has some; number stages from 0 on"
        )
    idle = set(range(num_ranks)) - set(homes.values())
    if idle:
        raise ParseError(f"rank {min(idle)} of {num_ranks} computes nothing; drop its line or give it a stage")
