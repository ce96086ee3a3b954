"""A small replay of its own for the tests of the builders: when each action of a compute order starts and ends.

It shares no code with hocket's replay, so that the figures are checked by something the library does not use.
"""

from __future__ import annotations

from dataclasses import dataclass

from hocket.program import Program


@dataclass
class Times:
    """What one replay measured. `peaks[r]`: activations that rank r holds at once, each from F's start to W's end."""

    makespan: float
    span: float
    peaks: list[int]


def replay(program: Program, forward=1.0, backward=1.0, weight=1.0, hop=0.0) -> Times:
    """Run the lists in order, every action as soon as its rank is free and its inputs are there; asserts it ends."""
    cost = {"F": forward, "I": backward, "W": weight, "B": backward + weight}
    homes, last = program.placement.stage_to_rank, program.num_stages - 1
    flat = [[part for action in row for part in (action.parts or (action,))] for row in program.ranks]
    done: dict[tuple[str, int, int], float] = {}
    at, clock = [0] * len(flat), [0.0] * len(flat)
    begins: list[list[tuple[float, int]]] = [[] for _ in flat]
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(flat):
            while at[rank] < len(row):
                op, stage, microbatch, _ = row[at[rank]]
                name = op.name
                waits = {
                    "F": [("F", stage - 1)] if stage else [],
                    "W": [("I", stage)],
                }.get(name, [("F", stage), ("I", stage + 1)] if stage < last else [("F", stage)])
                keys = [(kind, other, microbatch) for kind, other in waits]
                if any(key not in done for key in keys):
                    break
                start = max([clock[rank], *(done[key] + hop * (homes[key[1]] != rank) for key in keys)])
                clock[rank] = done["I" if name == "B" else name, stage, microbatch] = start + cost[name]
                if name == "F":
                    begins[rank].append((start, 1))
                if name in "BW":
                    begins[rank].append((clock[rank], -1))
                at[rank] += 1
                moved = True
    stuck = [str(row[index]) for row, index in zip(flat, at, strict=True) if index < len(row)]
    assert not stuck, f"deadlock, waiting at {stuck}"
    starts = [min(times)[0] for times in begins]
    return Times(
        max(clock) - min(starts),
        max(end - start for end, start in zip(clock, starts, strict=True)),
        [_peak(events) for events in begins],
    )


def _peak(events: list[tuple[float, int]]) -> int:
    held = peak = 0
    for _, change in sorted((round(time, 6), change) for time, change in events):
        held += change
        peak = max(peak, held)
    return peak
