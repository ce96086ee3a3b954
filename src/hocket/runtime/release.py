"""When a message that this rank has sent is surely through: known from the program, without asking the backend.

Gloo cannot say without blocking whether a send is done. But a rank consumes a message before it issues the sends that
follow in its list; so when such a later message arrives here, all that its sender had consumed by then is through,
and its buffers can go.
"""

from __future__ import annotations

from hocket.program import Action, Op, Program, message, needs, unfold

Name = tuple[Op, int, int]


def releases(program: Program, rank: int) -> dict[Name, tuple[Name, ...]]:
    """For each message that `rank` receives: the messages it sent whose delivery that arrival proves."""
    found: dict[Name, tuple[Name, ...]] = {}
    for peer in range(program.num_ranks):
        if peer != rank:
            found.update(_proofs(program, rank, peer))
    return found


def _proofs(program: Program, rank: int, peer: int) -> dict[Name, tuple[Name, ...]]:
    home = program.placement.stage_to_rank
    consumed: list[Name] = []
    found: dict[Name, tuple[Name, ...]] = {}
    for action in unfold(program.ranks[peer]):
        if action.op.is_send:
            name = message(action)
            if consumed and _target(action, home) == rank:
                found[name] = tuple(consumed)
                consumed.clear()
            continue
        for part in action.computes:
            for kind, stage in needs(part.op, part.stage, program.num_stages):
                if stage != part.stage and home[stage] == rank:
                    consumed.append((kind, stage, part.microbatch))
    return found


def _target(send: Action, home: tuple[int, ...]) -> int:
    return home[send.stage + 1 if send.op == Op.SEND_F else send.stage - 1]
