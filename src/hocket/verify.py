"""Proves that a program is complete, in order, paired and free of deadlock, or raises with the grid and a mark.

First every action is counted; then each rank's own order is checked, and that both ends of each channel agree; last,
the program is replayed on paper under rendezvous semantics. A replay that ends has followed program order, data
dependencies and channel order without a cycle; where it gets stuck, the ranks wait in a circle, and the error shows it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hocket.collector import collector_paused
from hocket.errors import ProgramError
from hocket.program import Action, Op, Program, consumer_stage, message, recv_of, send_of
from hocket.replay import Durations, Replay, run

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from hocket.wiring import Columns, Wiring

_JOINT = " when the parts of an overlapped pair run jointly"


def verify(program: Program) -> None:
    """Return if `program`, compute only or lowered, is legal; else raise ProgramError naming the action at fault.

    Legal means: each stage and microbatch has one F and, unless the program is forward only, one B or one I and one W;
    each stands on the rank of its stage, after all that it needs; and, in a lowered program, each message has one SEND
    and one RECV, both ends of a channel agree on its order, and nothing waits in a circle, whether the parts of an
    overlapped pair run in turn or jointly. Takes time linear in the number of actions.
    """
    prove(program)


def prove(program: Program) -> Replay:
    """As `verify`; returns the replay with unit costs, in which pairs run jointly."""
    from hocket.wiring import read  # here, so that `import hocket` need not wait for numpy

    with collector_paused():
        _check_shape(program)
        columns = read(program)
        _check_counts(columns)
        result = _prove_order(columns)
        return _prove_order(read(program, joint=True)) if columns.has_pairs else result


def _prove_order(columns: Columns) -> Replay:
    from hocket.wiring import wire

    wiring = wire(columns)
    _check_own_order(wiring)
    if columns.is_lowered:
        _check_issues(wiring)
        _check_channels(columns)
    result = run(wiring, Durations.unit(columns.program.num_stages, overlap=1.0 if columns.joint else None))
    if not result.done:
        raise _circle(result)
    return result


# --- counting -----------------------------------------------------------------------------------------------------


def _check_shape(program: Program) -> None:
    stages, count = program.num_stages, program.num_microbatches
    if len(program.ranks) != program.placement.num_ranks:
        raise ProgramError(
            f"the program lists {len(program.ranks)} ranks, but its placement uses {program.placement.num_ranks}; "
            "give each rank one list"
        )
    if count < 1:
        raise ProgramError(f"the program has {count} microbatches; it needs at least 1")
    # Tables below are as large as stages x microbatches: bound that by what is really there.
    if stages * count > 2 * sum(map(len, program.ranks)):
        held = {
            (part.stage, part.microbatch) for _, _, a in program.actions() for part in a.computes if part.op == Op.F
        }
        lost = next((s, m) for s in range(stages) for m in range(count) if (s, m) not in held)
        raise ProgramError(f"no F of stage {lost[0]}, microbatch {lost[1]} ({Action(Op.F, *lost)} is missing)")


def _check_counts(columns: Columns) -> None:
    """Every action stands once: those of each stage and microbatch, the ends of each message, and no other."""
    import numpy as np

    program = columns.program
    shape = 8, program.num_stages, program.num_microbatches
    key = np.ravel_multi_index((columns.op, columns.stage, columns.microbatch), shape)
    seen = np.zeros(shape, dtype=bool)
    seen.ravel()[key] = True
    if np.count_nonzero(seen) < len(key):
        order = np.argsort(key, kind="stable")
        again = order[1:][key[order[1:]] == key[order[:-1]]].min()
        action = columns.action(again)
        raise program.fault(f"{action} stands twice; each action runs once", {action: "again"})
    _check_complete(program, seen)
    if columns.is_lowered:
        _check_messages(program, seen)


def _check_complete(program: Program, seen: NDArray[np.bool_]) -> None:
    forward, full, inputs, weights = seen[: Op.W + 1]
    has_backward = (full | inputs | weights).any()
    for done, op, note in ((forward, Op.F, "has no F"), (full | inputs, Op.B, "has no backward")):
        if (op == Op.F or has_backward) and not done.all():
            stage, microbatch = _first(~done)
            what = f"no {Action(op, stage, microbatch)}" + (f" (nor {Action(Op.I, stage, microbatch)})" if op else "")
            where = f"rank {program.placement.rank_of(stage)}"
            raise program.fault(f"{what}: it is missing on {where}", _all_of(stage, microbatch, note))
    for wrong, text in (
        (full & inputs, "has both a B and an I; a B is the whole backward"),
        (full & weights, "has both a B and a W; a B is the whole backward"),
        (inputs & ~weights, "has an I but no W; its weight gradients would be lost"),
    ):
        if wrong.any():
            stage, microbatch = _first(wrong)
            notes = _all_of(stage, microbatch, "here")
            del notes[Action(Op.F, stage, microbatch)]
            raise program.fault(f"stage {stage}, microbatch {microbatch} {text}", notes)


def _first(mask: NDArray[np.bool_]) -> tuple[int, int]:
    stage, microbatch = divmod(int(mask.argmax()), mask.shape[1])
    return stage, microbatch


def _all_of(stage: int, microbatch: int, note: str) -> dict[Action, str]:
    return {Action(op, stage, microbatch): note for op in (Op.F, Op.B, Op.I, Op.W)}


def _check_messages(program: Program, seen: NDArray[np.bool_]) -> None:
    """Every value that crosses ranks has its SEND and its RECV, and no other value has any."""
    home, stages = program.placement.stage_to_rank, range(program.num_stages)
    expected = {
        (action.op, action.stage)
        for kind in ((Op.F, Op.B) if program.has_backward else (Op.F,))
        for stage in stages
        if (target := consumer_stage(kind, stage)) in stages and home[stage] != home[target]
        for action in (send_of(kind, stage, 0), recv_of(kind, stage, 0))
    }
    for op in (Op.SEND_F, Op.RECV_F, Op.SEND_B, Op.RECV_B):
        for stage in stages:
            there = seen[op, stage]
            if (op, stage) in expected and not there.all():
                raise _unpaired(program, Action(op, stage, int(there.argmin())))
            if (op, stage) not in expected and there.any():
                action = Action(op, stage, int(there.argmax()))
                raise program.fault(f"{action} moves a message that nobody on another rank needs", {action: "here"})


def _unpaired(program: Program, action: Action) -> ProgramError:
    name = message(action)
    other = recv_of(*name) if action.op.is_send else send_of(*name)
    text = f"{action} is missing on rank {program.placement.rank_of(action.stage)}"
    if program.find(other):
        return program.fault(f"{text}: its other end {other} would wait for ever", {other: "has no partner"})
    return ProgramError(f"{text}, and so is its other end {other}")


# --- the order on each rank and in each channel --------------------------------------------------------------------


def _check_own_order(wiring: Wiring) -> None:
    """What an entry needs of its own rank is made before it."""
    import numpy as np

    columns, entries = wiring.columns, np.arange(len(wiring.row))
    for needed in (wiring.own, wiring.near):
        late = (needed >= 0) & (wiring.made[needed] >= entries)
        if late.any():
            entry = late.argmax()
            action, maker = columns.action(wiring.row[entry]), _maker(wiring, needed[entry])
            raise _out_of_order(columns, action, f"it needs {maker}", {maker: "needed"})


def _check_issues(wiring: Wiring) -> None:
    """A SEND stands behind what makes its value, and a RECV before what needs it."""
    import numpy as np

    columns, entries = wiring.columns, np.arange(len(wiring.row))
    early = wiring.made > wiring.sent  # no SEND: sent is NEVER
    if early.any():
        slot = int(early.argmax())
        send, maker = send_of(*columns.name(slot)), _maker(wiring, slot)
        raise _out_of_order(columns, send, f"its value is made by {maker}", {maker: "makes its value"})
    late = (wiring.far >= 0) & (wiring.posted[wiring.far] >= entries)
    if late.any():
        entry = late.argmax()
        action, recv = columns.action(wiring.row[entry]), recv_of(*columns.name(wiring.far[entry]))
        raise _out_of_order(columns, action, f"it needs what {recv} brings", {recv: "needed"})


def _out_of_order(columns: Columns, action: Action, why: str, notes: dict[Action, str]) -> ProgramError:
    rank = columns.program.placement.rank_of(action.stage)
    verb = "issue" if action.op > Op.W else "start"
    text = f"rank {rank} cannot {verb} {action}{_JOINT if columns.joint else ''}: {why}, which comes later in its list"
    return columns.program.fault(f"{text}; move {action} behind it", {**notes, action: "stuck"})


def _maker(wiring: Wiring, slot: int) -> Action:
    return wiring.columns.action(wiring.row[wiring.maker[slot]])


def _check_channels(columns: Columns) -> None:
    """Both ends of each channel issue its messages in the same order."""
    from hocket.wiring import by_channel, rows_of

    sent, posted = (by_channel(columns, columns.slot[rows_of(columns, *ops)]) for ops in _ENDS)
    differ = sent != posted
    if differ.any():
        at = differ.argmax()
        send, recv = send_of(*columns.name(sent[at])), recv_of(*columns.name(posted[at]))
        source, target = columns.edges[columns.channel_of(sent)[at]]
        place = (columns.channel_of(sent[:at]) == columns.channel_of(sent)[at]).sum()
        raise columns.program.fault(
            f"channel {source}->{target}: its ends disagree on message {place}: rank {source} issues {send}, "
            f"rank {target} issues {recv}; a channel keeps its order",
            {send: "sent", recv: "awaited"},
        )


_ENDS = (Op.SEND_F, Op.SEND_B), (Op.RECV_F, Op.RECV_B)


# --- a replay that got stuck -----------------------------------------------------------------------------------------


def _circle(result: Replay) -> ProgramError:
    """Every rank that is stuck waits for another one that is: follow them until one comes again."""
    wiring, columns = result.wiring, result.wiring.columns
    # By rank, the first entry that did not run.
    stuck = {int(columns.rank[wiring.row[e]]): e for e in reversed(range(len(result.ends))) if result.ends[e] is None}
    rank = min(stuck)
    chain: list[int] = []
    while rank not in chain:
        chain.append(rank)
        rank = int(columns.rank[wiring.row[wiring.waits[stuck[rank]]]])
    chain = chain[chain.index(rank) :]
    lines, notes = [], {}
    for rank, following in zip(chain, [*chain[1:], chain[0]], strict=True):
        entry = stuck[rank]
        action, name = columns.action(wiring.row[entry]), columns.name(wiring.far[entry])
        wanted = send_of(*name) if columns.is_lowered else _maker(wiring, wiring.far[entry])
        lines.append(f"\n  rank {rank} cannot start {action}: it waits for {wanted} of rank {following}")
        notes[action] = "stuck"
    how = _JOINT if columns.joint else ""
    return columns.program.fault(f"deadlock: the ranks wait in a circle{how}{''.join(lines)}", notes)
