"""What the last step really took: start and end of each compute action, on this rank or on all."""

from __future__ import annotations

import json
import statistics
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from hocket.program import Action, Op, Program
from hocket.replay import Durations, replay
from hocket.runtime.executor import Executor
from hocket.runtime.p2p import Transport


class Measured(NamedTuple):
    """A compute action of a rank: the seconds from the step's first action on at which it began, without the wait for
    its input, and ended.
    """

    rank: int
    start: float
    end: float
    action: Action


@dataclass(frozen=True)
class StepTrace:
    """The compute actions of one step, of one rank or of all, in order of their start."""

    program: Program
    events: tuple[Measured, ...]
    waited: dict[int, float]
    """Seconds that each rank waited for messages."""

    @property
    def makespan(self) -> float:
        """Seconds from the first start to the last end."""
        return max(e.end for e in self.events) - min(e.start for e in self.events)

    def busy(self, rank: int) -> float:
        """Seconds that `rank` computed."""
        return sum(e.end - e.start for e in self.events if e.rank == rank)

    def ideal_makespan(self, hop_latency: float = 0.0) -> float:
        """The makespan of the same program at the median time of each op and stage; a message takes `hop_latency`
        seconds.

        Needs the events of all ranks; where some are missing their stages count nothing.
        """
        seconds: dict[tuple[Op, int], list[float]] = defaultdict(list)
        for _, start, end, action in self.events:
            seconds[action.op, action.stage].append(end - start)
        stages = self.program.num_stages
        compute = [
            [statistics.median(seconds.get((Op(op), stage), [0.0])) for stage in range(stages)] for op in range(4)
        ]
        result = replay(self.program, Durations(compute, [[hop_latency] * stages] * 2))
        return max(ends[-1] for ends in result.end if ends)

    def report(self) -> str:
        """For each rank: busy, waiting and idle; and how far the step is from its ideal."""
        lines = []
        for rank in sorted(self.waited):
            busy, waited = self.busy(rank), self.waited[rank]
            idle = max(0.0, self.makespan - busy - waited)
            lines.append(f"rank {rank}: busy {busy:.4f} s, waiting {waited:.4f} s, idle {idle:.4f} s")
        if len(self.waited) == self.program.num_ranks:
            ideal = self.ideal_makespan()
            lines.append(f"makespan {self.makespan:.4f} s, {self.makespan / ideal:.3f} x the simulated {ideal:.4f} s")
        return "\n".join(lines)

    def to_chrome(self) -> str:
        """JSON in the Trace Event Format, a process a rank: for Perfetto and `hocket draw --measured FILE`."""
        first = min((e.start for e in self.events), default=0.0)
        bars: list[dict[str, Any]] = [
            {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}}
            for rank in sorted(self.waited)
        ]
        for rank, start, end, action in self.events:
            bars.append(
                {
                    "ph": "X",
                    "name": str(action),
                    "cat": "compute",
                    "pid": rank,
                    "tid": 0,
                    "ts": round((start - first) * 1e6, 3),
                    "dur": round((end - start) * 1e6, 3),
                    "args": {"op": action.op.name, "stage": action.stage, "microbatch": action.microbatch},
                }
            )
        return json.dumps({"displayTimeUnit": "ms", "traceEvents": bars})


def trace_of(executor: Executor, transport: Transport | None, *, all_ranks: bool) -> StepTrace:
    """The trace of the executor's last step. `all_ranks`: of every rank; then all ranks must call it."""
    computes = [index for index, action in enumerate(executor.order) if action.op.is_compute]
    spans, waits = executor.record.spans(), executor.record.waited
    # Hosts share no clock but that of the wall.
    offset = time.time() - time.perf_counter()
    mine = [(spans[i][0] + waits.get(i, 0.0) + offset, spans[i][1] + offset) for i in computes]
    waited = sum(waits.values())
    if transport is None or not all_ranks:
        return _assemble(executor, {executor.rank: mine}, {executor.rank: waited})
    longest = max(row[0] for row in transport.gather([len(mine)]))
    flat = [waited, *(moment for span in mine for moment in span)]
    rows = transport.gather_floats(flat + [0.0] * (2 * longest + 1 - len(flat)))
    spans_of = {rank: list(zip(row[1::2], row[2::2], strict=True)) for rank, row in enumerate(rows)}
    return _assemble(executor, spans_of, {rank: row[0] for rank, row in enumerate(rows)})


def _assemble(
    executor: Executor, spans: Mapping[int, Sequence[tuple[float, float]]], waited: dict[int, float]
) -> StepTrace:
    program, events = executor.program, []
    for rank, moments in spans.items():
        actions = [action for action in executor.order_of(rank) if action.op.is_compute]
        for action, (start, end) in zip(actions, moments, strict=False):
            events += [Measured(rank, start, end, part) for part in action.computes]
    first = min((e.start for e in events), default=0.0)
    shifted = (e._replace(start=e.start - first, end=e.end - first) for e in events)
    return StepTrace(program, tuple(sorted(shifted, key=lambda e: (e.start, e.rank))), waited)
