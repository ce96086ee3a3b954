"""Proves that a program is complete, in order, paired and free of deadlock, or raises with the grid and a mark.

First every action is counted in its place; then the program is replayed on paper under rendezvous semantics. A replay
that ends has followed program order, data dependencies and channel order without a cycle; where it gets stuck, the
chain of who waits for whom is the fault, and the error shows it.
"""

from __future__ import annotations

from hocket.errors import ProgramError
from hocket.program import (
    Action,
    Op,
    Program,
    consumer_stage,
    message,
    needs,
    recv_of,
    send_of,
)
from hocket.replay import Durations, Replay, replay

_Marks = dict[tuple[int, int], str]


def verify(program: Program) -> None:
    """Return if `program`, compute only or lowered, is legal; else raise ProgramError naming the action at fault.

    Legal means: each stage and microbatch has one F and, unless the program is forward only, one B or one I and one W;
    each stands on the rank of its stage, after all that it needs; and, in a lowered program, each message has one SEND
    and one RECV, both ends of a channel agree on its order, and nothing waits in a circle, whether the parts of an
    overlapped pair run in turn or jointly. Takes time linear in the number of actions.
    """
    _check_shape(program)
    seen = _count(program)
    _check_complete(program, seen)
    if program.is_lowered:
        _check_messages(program, seen)
    _check_replay(program, None)
    if any(action.parts for actions in program.ranks for action in actions):
        _check_replay(program, 1.0)


def _fail(program: Program, text: str, marks: _Marks) -> ProgramError:
    return ProgramError(f"{text}\n{program.excerpt(marks)}" if marks else text)


def _find(program: Program, wanted: Action) -> tuple[int, int] | None:
    """Where `wanted` stands, alone or as part of a pair."""
    for rank, index, action in program.actions():
        if action == wanted or wanted in action.parts:
            return rank, index
    return None


def _check_shape(program: Program) -> None:
    stages, count = program.num_stages, program.num_microbatches
    if len(program.ranks) != program.placement.num_ranks:
        raise ProgramError(
            f"the program lists {len(program.ranks)} ranks, but its placement uses {program.placement.num_ranks}"
        )
    if count < 1:
        raise ProgramError(f"the program has {count} microbatches; it needs at least 1")
    # Tables below are as large as stages x microbatches: bound that by what is really there.
    if stages * count > sum(len(a.parts) or 1 for actions in program.ranks for a in actions):
        held = {
            (part.stage, part.microbatch) for _, _, a in program.actions() for part in a.computes if part.op == Op.F
        }
        lost = next((s, m) for s in range(stages) for m in range(count) if (s, m) not in held)
        raise ProgramError(f"no F of stage {lost[0]}, microbatch {lost[1]} ({Action(Op.F, *lost)} is missing)")


def _count(program: Program) -> list[bytearray]:
    """Tick off every action by op, stage and microbatch; refuse what is doubled, out of range or on a wrong rank."""
    stages, count = program.num_stages, program.num_microbatches
    seen = [bytearray(stages * count) for _ in range(Op.RECV_B + 1)]
    for rank, actions in enumerate(program.ranks):
        here = [home == rank for home in program.placement.stage_to_rank]
        for index, action in enumerate(actions):
            for op, stage, microbatch, _ in action.parts or (action,):
                if not (0 <= stage < stages and 0 <= microbatch < count and here[stage]):
                    raise _fail(program, _misplaced(program, rank, op, stage, microbatch), {(rank, index): "here"})
                row, slot = seen[op], stage * count + microbatch
                if row[slot]:
                    marks = {place: "again" for place in [_find(program, Action(op, stage, microbatch))] if place}
                    text = f"{Action(op, stage, microbatch)} stands twice; each action runs once"
                    raise _fail(program, text, {**marks, (rank, index): "again"})
                row[slot] = 1
    return seen


def _misplaced(program: Program, rank: int, op: Op, stage: int, microbatch: int) -> str:
    name = str(Action(op, stage, microbatch))
    if not 0 <= stage < program.num_stages:
        return f"{name} on rank {rank}: there are stages 0..{program.num_stages - 1} only"
    if not 0 <= microbatch < program.num_microbatches:
        return f"{name} on rank {rank}: there are microbatches 0..{program.num_microbatches - 1} only"
    return f"{name} on rank {rank}: stage {stage} lives on rank {program.placement.rank_of(stage)}"


def _check_complete(program: Program, seen: list[bytearray]) -> None:
    everything = b"\1" * (program.num_stages * program.num_microbatches)
    if seen[Op.F] != everything:
        raise _missing(program, seen[Op.F], Op.F)
    full, inputs, weights = (int.from_bytes(seen[op], "little") for op in (Op.B, Op.I, Op.W))
    if not full | inputs | weights:
        return
    if full | inputs != int.from_bytes(everything, "little"):
        raise _missing(program, bytes(b | i for b, i in zip(seen[Op.B], seen[Op.I], strict=True)), Op.B)
    for mask, text in (
        (full & inputs, "has both a B and an I; a B is the whole backward"),
        (full & weights, "has both a B and a W; a B is the whole backward"),
        (inputs & ~weights, "has an I but no W; its weight gradients would be lost"),
    ):
        if mask:
            stage, microbatch = _slot(program, mask)
            place = _find(program, Action(Op.B, stage, microbatch)) or _find(program, Action(Op.I, stage, microbatch))
            marks: _Marks = {place: "here"} if place else {}
            raise _fail(program, f"stage {stage}, microbatch {microbatch} {text}", marks)


def _slot(program: Program, mask: int) -> tuple[int, int]:
    """Stage and microbatch of the lowest byte set in `mask`."""
    return divmod(((mask & -mask).bit_length() - 1) // 8, program.num_microbatches)


def _missing(program: Program, row: bytes | bytearray, op: Op) -> ProgramError:
    stage, microbatch = divmod(row.index(0), program.num_microbatches)
    wanted = Action(op, stage, microbatch)
    what = f"no {wanted}" + (f" (nor {Action(Op.I, stage, microbatch)})" if op == Op.B else "")
    place = _find(program, Action(Op.F, stage, microbatch))
    return _fail(
        program,
        f"{what}: it is missing on rank {program.placement.rank_of(stage)}",
        {place: "has no backward"} if place and op == Op.B else {},
    )


def _check_messages(program: Program, seen: list[bytearray]) -> None:
    """Every value that crosses ranks has its SEND and its RECV, and no other value has any."""
    count, home = program.num_microbatches, program.placement.stage_to_rank
    kinds = (Op.F, Op.B) if program.has_backward else (Op.F,)
    expected = [bytearray(len(seen[0])) for _ in range(Op.RECV_B + 1)]
    for kind in kinds:
        for stage in range(program.num_stages):
            target = consumer_stage(kind, stage)
            if 0 <= target < program.num_stages and home[stage] != home[target]:
                for action in (send_of(kind, stage, 0), recv_of(kind, stage, 0)):
                    expected[action.op][action.stage * count : (action.stage + 1) * count] = b"\1" * count
    for op in (Op.SEND_F, Op.RECV_F, Op.SEND_B, Op.RECV_B):
        if seen[op] != expected[op]:
            slot = next(i for i, (a, b) in enumerate(zip(seen[op], expected[op], strict=True)) if a != b)
            action = Action(op, *divmod(slot, count))
            place = _find(program, action)
            if place:
                raise _fail(program, f"{action} moves a message that nobody on another rank needs", {place: "here"})
            raise _unpaired(program, action)


def _unpaired(program: Program, action: Action) -> ProgramError:
    kind, stage, microbatch = message(action)
    other = recv_of(kind, stage, microbatch) if action.op.is_send else send_of(kind, stage, microbatch)
    place = _find(program, other)
    text = f"{action} is missing on rank {program.placement.rank_of(action.stage)}"
    if place:
        return _fail(program, f"{text}: its other end {other} would wait for ever", {place: "has no partner"})
    return _fail(program, f"{text}, and so is its other end {other}", {})


# --- the replay, and what it says when it gets stuck ---------------------------------------------------------------


def _check_replay(program: Program, overlap: float | None) -> None:
    result = replay(program, Durations.unit(program.num_stages, overlap), "rendezvous")
    if result.done:
        return
    for (source, target), channel in sorted(result.channels.items()):
        if (at := channel.mismatch) is not None:
            sent, posted = send_of(*channel.sent[at][0]), recv_of(*channel.posted[at][0])
            marks = {
                place: note
                for action, note in ((sent, "sent"), (posted, "awaited"))
                if (place := _find(program, action))
            }
            raise _fail(
                program,
                f"channel {source}->{target}: its ends disagree on message {at}: rank {source} issues "
                f"{sent}, rank {target} issues {posted}; a channel keeps its order",
                marks,
            )
    raise _stuck(program, result, joint=overlap is not None)


def _stuck(program: Program, result: Replay, joint: bool) -> ProgramError:
    """Follow who waits for whom from the first stuck rank until a fault on one rank or a circle shows."""
    rank = next(r for r, ends in enumerate(result.end) if len(ends) < len(result.orders[r]))
    lines: list[str] = []
    marks: _Marks = {}
    visited: set[int] = set()
    while rank is not None and rank not in visited:
        visited.add(rank)
        action = result.orders[rank][len(result.end[rank])]
        reason, following = _reason(program, result, rank, action)
        lines.append(f"rank {rank} cannot start {action}: {reason}")
        place = _find(program, action)
        if place:
            marks[place] = "stuck"
        rank = following
    head = "deadlock: the ranks wait in a circle" if rank is not None else f"{lines[-1].split(': ', 1)[0]}"
    if joint:
        head += " (when the parts of an overlapped pair run jointly)"
    return _fail(program, head + "\n  " + "\n  ".join(lines), marks)


def _reason(program: Program, result: Replay, rank: int, action: Action) -> tuple[str, int | None]:
    """Why `action` cannot start, and the rank to look at next (None: the fault is on this rank)."""
    if action.op.is_send:
        kind, stage, _ = message(action)
        return f"its value {_maker(kind, action.stage, action.microbatch)} is made later in the same list", None
    for part in action.computes:
        for kind, stage in needs(part.op, part.stage, program.num_stages):
            maker = _maker(kind, stage, part.microbatch)
            home = program.placement.rank_of(stage)
            if result.made(kind, stage, part.microbatch) is None:
                if home == rank:
                    return f"it needs {maker}, which comes later in the same list", None
                return f"it needs {maker} of rank {home}", home
            if stage != part.stage and result.arrived(kind, stage, part.microbatch) is None:
                return _undelivered(result, (kind, stage, part.microbatch), home, rank)
    return "its rank waits", None


def _maker(kind: Op, stage: int, microbatch: int) -> str:
    return str(Action(Op.F, stage, microbatch)) if kind == Op.F else f"the backward of {stage}F{microbatch}"


def _undelivered(result: Replay, name: tuple[Op, int, int], source: int, rank: int) -> tuple[str, int | None]:
    """Why a message whose value is made has not arrived."""
    channel = result.channels.get((source, rank))
    send, recv = send_of(*name), recv_of(*name)
    if channel is None or name not in [n for n, _ in channel.posted]:
        return f"{recv} comes later in the same list, so the message cannot be received before it is needed", None
    if name not in [n for n, _ in channel.sent]:
        return f"{send} of rank {source} has not been issued", source
    head = channel.sent[channel.through][0]
    return (
        f"{send} stands in channel {source}->{rank} behind {send_of(*head)}, whose {recv_of(*head)} comes too late",
        None,
    )
