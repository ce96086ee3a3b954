"""A timeline as Chrome trace JSON, for Perfetto (https://ui.perfetto.dev) and chrome://tracing; and read back."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from hocket.draw.palette import NAMES
from hocket.draw.panel import Panel, Sources, panels_of
from hocket.errors import ParseError
from hocket.program import Action, Op, send_of
from hocket.simulate import Event

_COMPUTE, _JOINT, _CHANNEL = 0, 1, 2
"""Threads of a rank: what it computes, the backward of a pair that runs jointly, and from here on its channels."""

_LANES = 64
"""Threads for each receiver at most."""

# A flow belongs to the bar that runs at its time. At the very end of a bar the next one may run already.
_INSIDE = 0.999

_MICROSECONDS = 1e6


def draw_trace(sources: Sources, *, seconds_per_unit: float = 1.0) -> str:
    """JSON text in the Trace Event Format: a process for each rank, bars named `2F0`, arrows for what is sent.

    `seconds_per_unit` says how long a unit of the timeline's time is. Several sources become several groups of
    processes. Raises ConfigError for events that cannot be drawn.
    """
    scale = _MICROSECONDS * seconds_per_unit
    events: list[dict[str, Any]] = []
    first = 0
    for panel in panels_of(sources, messages=True):
        events += _of_panel(panel, first, scale)
        first += len(panel.rows)
    # One event a line: a file that can be read, searched and compared.
    encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), check_circular=False).encode
    body = ",\n".join(map(encode, events))
    return f'{{"displayTimeUnit":"ms","traceEvents":[\n{body}\n]}}\n'


def _of_panel(panel: Panel, first: int, scale: float) -> Iterator[dict[str, Any]]:
    prefix = f"{panel.title} " if panel.title else ""
    for rank, row in enumerate(panel.rows):
        pid = first + rank
        yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": f"{prefix}rank {rank}"}}
        yield {"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}}
        yield _thread(pid, _COMPUTE, "compute")
        if any(_is_joint(row, index) for index in range(len(row))):
            yield _thread(pid, _JOINT, "compute, overlapped")
        for index, event in enumerate(row):
            yield _bar(event, pid, _JOINT if _is_joint(row, index) else _COMPUTE, scale)
        for time, held in panel.memory[rank]:
            yield _counter("bytes" if panel.counts_bytes else "activations", pid, time * scale, held)
    yield from _channels(panel, first, scale)
    yield from _flows(panel, first, scale)


def _time(microseconds: float) -> float:
    """Rounded to what Perfetto keeps: nanoseconds."""
    return round(microseconds, 3)


def _thread(pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": name}}


def _is_joint(row: tuple[Event, ...], index: int) -> bool:
    """True for the second part of a pair that runs jointly, which needs a thread of its own."""
    return index > 0 and row[index - 1][1:3] == row[index][1:3] and row[index].end > row[index].start


def _bar(event: Event, pid: int, tid: int, scale: float) -> dict[str, Any]:
    op, stage, microbatch, _ = event.action
    return {
        "ph": "X",
        "name": str(event.action),
        "cat": NAMES[op],
        "pid": pid,
        "tid": tid,
        "ts": _time(event.start * scale),
        "dur": _time((event.end - event.start) * scale),
        "args": {"op": op.name, "stage": stage, "microbatch": microbatch},
    }


def _counter(name: str, pid: int, time: float, value: float) -> dict[str, Any]:
    return {"ph": "C", "name": f"memory ({name})", "pid": pid, "ts": _time(time), "args": {name: value}}


def _channels(panel: Panel, first: int, scale: float) -> Iterator[dict[str, Any]]:
    """Messages that take time, on a thread of the sender for each receiver."""
    free: dict[tuple[int, int], list[float]] = {}
    for source, dest, kind, stage, microbatch, start, end in sorted(panel.messages, key=lambda m: m.start):
        # Those of a compute-only program may be on their way together, and bars of a thread must not overlap.
        lanes = free.setdefault((source, dest), [])
        lane = next((lane for lane, until in enumerate(lanes) if until <= start), len(lanes))
        tid = _CHANNEL + dest * _LANES + min(lane, _LANES - 1)
        if lane == len(lanes):
            lanes.append(end)
            if lane < _LANES:
                yield _thread(first + source, tid, f"to rank {dest}" + (f" ({lane + 1})" if lane else ""))
        lanes[lane] = end
        send = send_of(kind, stage, microbatch)
        yield {
            "ph": "X",
            "name": str(send),
            "cat": "message",
            "pid": first + source,
            "tid": tid,
            "ts": _time(start * scale),
            "dur": _time((end - start) * scale),
            "args": {"stage": stage, "microbatch": microbatch, "dest": dest},
        }


def _flows(panel: Panel, first: int, scale: float) -> Iterator[dict[str, Any]]:
    joint = {(rank, event) for rank, row in enumerate(panel.rows) for i, event in enumerate(row) if _is_joint(row, i)}
    for number, (maker, user) in enumerate(panel.links):
        kind = Op.F if maker.action.op == Op.F else Op.B
        common = {
            "name": str(send_of(kind, maker.action.stage, maker.action.microbatch)),
            "cat": "message",
            "id": (first << 32) + number,
        }
        at = maker.start + _INSIDE * (maker.end - maker.start)
        for ph, event, time in (("s", maker, at), ("f", user, user.start)):
            tid = _JOINT if (event.rank, event) in joint else _COMPUTE
            yield {**common, "ph": ph, "bp": "e", "pid": first + event.rank, "tid": tid, "ts": _time(time * scale)}


def read_trace(text: str, *, seconds_per_unit: float = 1.0) -> list[Event]:
    """The events of a trace that `draw_trace` wrote for one timeline, for instance to draw it beside another.

    Bars whose names are no compute actions are left out. Raises ParseError for text that is no such trace.
    """
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ParseError(f"the text is no JSON: {error}; expected a Chrome trace") from None
    items = found.get("traceEvents") if isinstance(found, dict) else found
    if not isinstance(items, list):
        raise ParseError("the JSON has no list 'traceEvents'; expected a Chrome trace")
    scale = _MICROSECONDS * seconds_per_unit
    events = [event for item in items if (event := _read_bar(item, scale)) is not None]
    if not events:
        raise ParseError(f"none of the {len(items)} events is an action like 2F0; expected a trace written by hocket")
    return events


def _read_bar(item: Any, scale: float) -> Event | None:
    if not isinstance(item, dict) or item.get("ph") != "X":
        return None
    try:
        action = Action.parse(str(item.get("name")))
    except ParseError:
        return None
    try:
        pid, start, length = int(item["pid"]), float(item["ts"]), float(item["dur"])
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise ParseError(f"bar {action} of the trace has no number for pid, ts or dur: {error!r}") from None
    return Event(pid, start / scale, (start + length) / scale, action) if action.computes else None
