"""What every picture is drawn from: bars on ranks, with times from 0 on, of a simulated or a measured timeline."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

from hocket.errors import ConfigError
from hocket.program import Action, Op, needs, produces
from hocket.simulate import Event, Message, Timeline


class EventLike(Protocol):
    """An action that a rank ran from `start` to `end`, in seconds or any other unit."""

    @property
    def rank(self) -> int: ...
    @property
    def start(self) -> float: ...
    @property
    def end(self) -> float: ...
    @property
    def action(self) -> Action: ...


class HasEvents(Protocol):
    """Anything with events: a `Timeline`, or the trace of a real run."""

    @property
    def events(self) -> Sequence[EventLike]: ...


Source = HasEvents | Iterable[EventLike]
"""A timeline, a trace, or bare events."""

Sources = Source | Mapping[str, Source]
"""One source, or several by title, which are drawn one above the other."""


@dataclass(frozen=True)
class Panel:
    """One timeline as it is drawn: for each rank its F, B, I and W in order of time, the first of all starting at 0."""

    title: str
    rows: tuple[tuple[Event, ...], ...]
    messages: tuple[Message, ...] = ()
    """Those that take time to travel, if the source knows them."""
    whole: tuple[float, ...] = ()
    """What each stage holds from the start of its F to the end of its I or B; empty: 1, an activation."""
    rest: tuple[float, ...] = ()
    """What each stage holds from the end of its I to the end of its W; empty: 1, an activation."""
    static: tuple[float, ...] = ()
    """What each rank holds all the time."""

    @cached_property
    def makespan(self) -> float:
        """From the first start, which is 0, to the last end."""
        return max((event.end for row in self.rows for event in row), default=0.0)

    @cached_property
    def num_stages(self) -> int:
        return 1 + max((event.action.stage for row in self.rows for event in row), default=-1)

    @cached_property
    def ops(self) -> tuple[Op, ...]:
        """The ops that occur, in their order of definition."""
        return tuple(sorted({event.action.op for row in self.rows for event in row}))

    @cached_property
    def local_index(self) -> tuple[dict[int, int], ...]:
        """For each rank: its stages, in order, and the place of each among them."""
        found = (sorted({event.action.stage for event in row}) for row in self.rows)
        return tuple({stage: place for place, stage in enumerate(stages)} for stages in found)

    @cached_property
    def stages_per_rank(self) -> int:
        """The most stages that a rank hosts."""
        return max(map(len, self.local_index), default=1)

    @property
    def bubble_fraction(self) -> float:
        """The part of ranks x makespan in which nothing is computed. Bars that overlap count once."""
        total = len(self.rows) * self.makespan
        return max(0.0, 1 - math.fsum(map(_covered, self.rows)) / total) if total else 0.0

    @property
    def counts_bytes(self) -> bool:
        """True if memory is in bytes, False if in activations."""
        return bool(self.whole)

    @cached_property
    def memory(self) -> tuple[tuple[tuple[float, float], ...], ...]:
        """For each rank what it holds, as steps (time, held from then on) in order of time; the first is at 0."""
        return tuple(self._steps(rank) for rank in range(len(self.rows)))

    def _steps(self, rank: int) -> tuple[tuple[float, float], ...]:
        one = (1.0,) * self.num_stages
        whole, rest = self.whole or one, self.rest or one
        base = self.static[rank] if self.static else 0.0
        forward_only = self.ops == (Op.F,)
        changes: list[tuple[float, float]] = []
        for _, start, end, (op, stage, _, _) in self.rows[rank]:
            if op == Op.F:
                changes.append((start, whole[stage]))
                if forward_only:
                    changes.append((end, -whole[stage]))
            else:
                changes.append((end, {Op.B: -whole[stage], Op.I: rest[stage] - whole[stage], Op.W: -rest[stage]}[op]))
        changes.sort()
        steps, held = [(0.0, base)], base
        for time, change in changes:
            held += change
            # What ends at a time is let go before what starts then takes its place.
            if steps[-1][0] == time:
                steps.pop()
            steps.append((time, held))
        return tuple(steps)

    @cached_property
    def links(self) -> tuple[tuple[Event, Event], ...]:
        """The pairs (producer, consumer) on two ranks: what is sent from one to the other."""
        makers = {
            (kind, event.action.stage, event.action.microbatch): event
            for row in self.rows
            for event in row
            if (kind := produces(event.action.op)) is not None
        }
        found = []
        for event in (event for row in self.rows for event in row):
            op, stage, microbatch, _ = event.action
            for kind, source in needs(op, stage, self.num_stages):
                maker = makers.get((kind, source, microbatch))
                if maker is not None and maker.rank != event.rank:
                    found.append((maker, event))
        return tuple(found)


def panels_of(sources: Sources, *, messages: bool = False) -> list[Panel]:
    """The panels to draw, from top to bottom, with messages only if asked for: they are as many as the events.

    Raises ConfigError for events that cannot be drawn.
    """
    if isinstance(sources, Mapping):
        if not sources:
            raise ConfigError("there is no timeline to draw; give at least one")
        return [_panel(str(title), source, messages) for title, source in sources.items()]
    return [_panel("", sources, messages)]


def _panel(title: str, source: Any, messages: bool) -> Panel:
    events = getattr(source, "events", source)
    try:
        rows, origin = _rows(events, title)
    except (AttributeError, TypeError) as error:
        raise ConfigError(
            f"{type(source).__name__} {title or 'given'} cannot be drawn: {error}; give a Timeline, or events with "
            "rank, start, end and action"
        ) from None
    if not isinstance(source, Timeline):
        return Panel(title, rows)
    program, costs = source.program, source.costs
    found = source.messages if messages else ()
    moved = tuple(m._replace(start=m.start - origin, end=m.end - origin) for m in found if m.end > m.start)
    if not costs.counts_bytes:
        return Panel(title, rows, moved)
    whole, rest = (costs.per_stage(name, program.num_stages) for name in ("activation_bytes", "weight_bytes"))
    return Panel(title, rows, moved, whole, rest, costs.static_of(program.num_ranks))


def _rows(events: Iterable[EventLike], title: str) -> tuple[tuple[tuple[Event, ...], ...], float]:
    """The compute events by rank and time, moved so that the first starts at 0; and when that was."""
    found = [Event(event.rank, event.start, event.end, part) for event in events for part in event.action.computes]
    if not found:
        raise ConfigError(f"timeline {title!r} has no compute event, so there is nothing to draw")
    for rank, start, end, action in found:
        if rank < 0 or not (math.isfinite(start) and math.isfinite(end) and start <= end):
            raise ConfigError(
                f"event {action} of rank {rank} runs from {start!r} to {end!r}; ranks count from 0, times are finite "
                "numbers, and an event ends at or after its start"
            )
    origin = min(event.start for event in found)
    rows: list[list[Event]] = [[] for _ in range(1 + max(event.rank for event in found))]
    for rank, start, end, action in found:
        rows[rank].append(Event(rank, start - origin, end - origin, action))
    for row in rows:
        row.sort(key=lambda event: (event.start, event.end))
    return tuple(map(tuple, rows)), origin


def _covered(row: Sequence[Event]) -> float:
    """Seconds in which at least one bar of the row runs."""
    total, until = [], 0.0
    for _, start, end, _ in row:
        if end > until:
            total.append(end - max(start, until))
            until = end
    return math.fsum(total)


def same_makespan(panels: Sequence[Panel], same_scale: bool) -> list[float]:
    """The time that each panel's width stands for: the longest makespan for all, or each its own."""
    longest = max(panel.makespan for panel in panels)
    return [(longest if same_scale else panel.makespan) or 1.0 for panel in panels]
