"""A timeline as text: a row for each rank, lengths that follow the costs, bubbles that can be seen."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from hocket.draw.palette import NAMES, TERMINAL
from hocket.draw.panel import Panel, Sources, panels_of, same_makespan
from hocket.errors import ConfigError
from hocket.program import Action, Op

MIN_WIDTH, MAX_WIDTH = 16, 100_000
"""Columns that a picture takes at least and at most."""


class Marks(NamedTuple):
    """The characters besides letters and digits."""

    bubble: str
    fill: str
    edge: str
    dot: str


UNICODE = Marks("·", "─", "│", "·")
ASCII = Marks(".", "-", "|", "-")


def draw_text(
    sources: Sources,
    *,
    width: int = 80,
    start: float = 0.0,
    end: float | None = None,
    color: bool = False,
    ascii_only: bool = False,
    same_scale: bool = True,
) -> str:
    """A picture of at most `width` columns of the time from `start` to `end` (None: to the last end).

    Each action is as long as it takes, and named as far as there is room: `2F0`, else `F0`, else `F`. Where even that
    is too long, a column shows the op that has most of it, or a bubble. Several sources, by title, are drawn one above
    the other: to the same scale, or each to the full width. `color` adds ANSI escapes; columns do not count them.

    Raises ConfigError if the width is not in 16..100000, or the window is empty.
    """
    if not MIN_WIDTH <= width <= MAX_WIDTH:
        raise ConfigError(f"cannot draw in a width of {width} columns; give {MIN_WIDTH} to {MAX_WIDTH}")
    panels = panels_of(sources)
    marks = ASCII if ascii_only else UNICODE
    label = len(str(max(len(panel.rows) for panel in panels) - 1))
    label += 5 if width >= 40 else 0
    blocks = []
    for panel, length in zip(panels, same_makespan(panels, same_scale), strict=True):
        window = _window(start, length if end is None else end)
        grid = Grid(panel, window, _columns(panel, window, width - label - 2), marks, color)
        blocks.append(_block(grid, label, width))
    legend = _legend(panels, marks)
    return "\n\n".join([*blocks, *([legend] if len(legend) <= width else [textwrap.fill(legend, width)])])


def _window(start: float, end: float) -> tuple[float, float]:
    if not (math.isfinite(start) and math.isfinite(end) and start < end):
        raise ConfigError(f"the window from {start:g} to {end:g} is empty; give a start before its end")
    return start, end


# --- columns ----------------------------------------------------------------------------------------------------------


class Columns(NamedTuple):
    """`count` columns, `per_time` of them for one unit of time; the first begins at `start`."""

    start: float
    per_time: float
    count: int

    def at(self, time: float) -> int:
        """The column at whose left edge `time` is, to the nearest; cut off at both ends of the picture."""
        # The small part more keeps halves from going up here and down there, as sums of floats fall.
        return min(max(math.floor((time - self.start) * self.per_time + 0.5 + 1e-9), 0), self.count)


def _columns(panel: Panel, window: tuple[float, float], room: int) -> Columns:
    """As many columns for each unit of time as fit; a whole number if possible, so that equals look equal."""
    length = window[1] - window[0]
    unit = _common_unit(panel)
    if unit and (whole := math.floor(room * unit / length + 1e-9)) >= 1:
        return Columns(window[0], whole / unit, math.ceil(length / unit * whole - 1e-9))
    return Columns(window[0], room / length, room)


def _common_unit(panel: Panel) -> float | None:
    """The shortest duration, if it divides all times."""
    unit = min((e.end - e.start for row in panel.rows for e in row if e.end > e.start), default=0.0)
    if not unit:
        return None
    times = (time / unit for row in panel.rows for event in row for time in (event.start, event.end))
    return unit if all(abs(time - round(time)) < 1e-6 for time in times) else None


# --- names ------------------------------------------------------------------------------------------------------------

# From the longest to the shortest. Names that begin with a digit need a blank between them.
_FORMS: tuple[tuple[int, Callable[[Action], str]], ...] = (
    (1, str),
    (0, lambda action: f"{action.op.name}{action.microbatch}"),
    (0, lambda action: action.op.name),
)


def _name(actions: Sequence[Action], form: int) -> str:
    """The name of a bar; of two that run jointly both names."""
    return "+".join(map(_FORMS[form][1], actions))


def _fits(actions: Sequence[Action], form: int, columns: int) -> bool:
    return len(_name(actions, form)) + _FORMS[form][0] <= columns


class Cell(NamedTuple):
    """A bar in columns. `actions` are two where a forward and a backward run jointly."""

    left: int
    right: int
    actions: tuple[Action, ...]


@dataclass(frozen=True)
class Grid:
    """One panel laid out in columns."""

    panel: Panel
    window: tuple[float, float]
    columns: Columns
    marks: Marks
    color: bool

    def rows(self) -> list[str]:
        """The picture of each rank, without its label."""
        cells = [self._cells(rank) for rank in range(len(self.panel.rows))]
        bars = [cell for row in cells for cell in row]
        if sum(cell.right > cell.left for cell in bars) < 0.9 * len(bars):
            return [self._texture(rank) for rank in range(len(self.panel.rows))]
        return [self._line(rank, row, self._form(bars)) for rank, row in enumerate(cells)]

    def _cells(self, rank: int) -> list[Cell]:
        """The bars of a rank that the window shows."""
        low, high = self.window
        visible = (event for event in self.panel.rows[rank] if event.end > low and event.start < high)
        at = self.columns.at
        return [
            Cell(at(start), at(end), tuple(event.action for event in joint))
            for (start, end), joint in groupby(visible, key=lambda event: (event.start, event.end))
            if end > start
        ]

    def _form(self, bars: Sequence[Cell]) -> int:
        """The longest form of names for which nine in ten have room: one form for all looks calmer."""
        for form in range(len(_FORMS) - 1):
            if sum(_fits(cell.actions, form, cell.right - cell.left) for cell in bars) >= 0.9 * len(bars):
                return form
        return len(_FORMS) - 1

    def _line(self, rank: int, cells: Sequence[Cell], form: int) -> str:
        parts, column = [], 0
        for left, right, actions in cells:
            # Measured bars of a rank may overlap; the later one then shows what is left of it.
            left = max(left, column)
            if right <= left:
                continue
            parts.append(self.marks.bubble * (left - column))
            parts.append(self._paint(rank, actions[0], self._bar(actions, form, right - left)))
            column = right
        parts.append(self.marks.bubble * (self.columns.count - column))
        return "".join(parts)

    def _bar(self, actions: Sequence[Action], form: int, columns: int) -> str:
        while form < len(_FORMS) - 1 and not _fits(actions, form, columns):
            form += 1
        name, gap = _name(actions, form)[:columns], _FORMS[form][0]
        return name.ljust(columns - gap, self.marks.fill).ljust(columns)

    def _texture(self, rank: int) -> str:
        """For each column an op or a bubble, each as often as its share of the time says.

        What a column cannot show, since it shows one thing only, is owed to those after it.
        """
        owed: dict[Op | None, float] = {}
        parts = []
        for share in self._shares(rank):
            owed[None] = owed.get(None, 0.0) + 1 - sum(share.values())
            for (op, _), part in share.items():
                owed[op] = owed.get(op, 0.0) + part
            best = max(owed, key=lambda op: (round(owed[op], 9), -1 if op is None else -op))
            owed[best] -= 1
            if best is None:
                parts.append(self.marks.bubble)
                continue
            stages = {stage: part for (op, stage), part in share.items() if op == best}
            stage = max(stages, key=lambda stage: stages[stage], default=next(iter(self.panel.local_index[rank])))
            parts.append(self._paint(rank, Action(best, stage, 0), best.name))
        return "".join(parts)

    def _shares(self, rank: int) -> list[dict[tuple[Op, int], float]]:
        """For each column the part of it that each op and stage takes; bars that run jointly share."""
        start, per_time, count = self.columns
        shares: list[dict[tuple[Op, int], float]] = [{} for _ in range(count)]
        for _, begin, end, action in self.panel.rows[rank]:
            low, high = max((begin - start) * per_time, 0.0), min((end - start) * per_time, float(count))
            key = action.op, action.stage
            for column in range(int(low), min(math.ceil(high), count)):
                part = min(high, column + 1) - max(low, column)
                shares[column][key] = shares[column].get(key, 0.0) + part
        for column, share in enumerate(shares):
            total = sum(share.values())
            if total > 1:
                shares[column] = {key: part / total for key, part in share.items()}
        return shares

    def _paint(self, rank: int, action: Action, text: str) -> str:
        if not self.color:
            return text
        shades = TERMINAL[action.op]
        later = self.panel.local_index[rank][action.stage] > 0
        return f"\x1b[38;5;16;48;5;{shades[later]}m{text}\x1b[0m"

    def axis(self) -> str:
        """Times, each with its first digit in the column where it is."""
        start, per_time, count = self.columns
        step = _step(count / per_time, max(count // 10, 1))
        line, tick = "", math.ceil(start / step - 1e-9)
        while (column := self.columns.at(tick * step)) < count:
            text = f"{tick * step:.6g}"
            if column >= len(line) + bool(line) and column + len(text) <= count:
                line = line.ljust(column) + text
            tick += 1
        return line


def _step(length: float, most: int) -> float:
    """A round step, 1, 2 or 5 times a power of ten, that divides `length` into at most `most` parts."""
    power = 10.0 ** math.floor(math.log10(length / most))
    return next(power * digit for digit in (1, 2, 5, 10, 20) if power * digit * most >= length * (1 - 1e-9))


# --- what stands around the rows ------------------------------------------------------------------------------------


def _block(grid: Grid, label: int, width: int) -> str:
    panel, edge = grid.panel, grid.marks.edge
    name = "rank " if label > 5 else ""
    lines = [textwrap.shorten(panel.title, width, placeholder="...")] if panel.title else []
    for rank, row in enumerate(grid.rows()):
        lines.append(f"{name}{rank:>{label - len(name)}}{edge}{row}{edge}")
    lines.append(f"{'time' if name else '':<{label}} {grid.axis()}".rstrip())
    facts = [f"makespan {panel.makespan:.6g}", f"bubble {100 * panel.bubble_fraction:.1f} %"]
    if grid.window[0] > 0 or grid.window[1] < panel.makespan:
        facts.append(f"shown {grid.window[0]:.6g} to {grid.window[1]:.6g}")
    return "\n".join([*lines, *textwrap.wrap(f" {grid.marks.dot} ".join(facts), width)])


def _legend(panels: Sequence[Panel], marks: Marks) -> str:
    ops = sorted({op for panel in panels for op in panel.ops})
    return "  ".join([*(f"{op.name} {NAMES[op]}" for op in ops), f"{marks.bubble} bubble"])
