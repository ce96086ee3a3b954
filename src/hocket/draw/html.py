"""A timeline as one HTML page to zoom and hover: no other file, no network, opens from disk."""

from __future__ import annotations

import html
import json
from importlib.resources import files
from typing import Any

from hocket.draw.palette import BUBBLE, NAMES, OPS, hexadecimal, ink, shade
from hocket.draw.panel import Panel, Sources, panels_of
from hocket.program import Op


def draw_html(sources: Sources, *, title: str = "hocket timeline", time_unit: str = "") -> str:
    """The text of the page. Wheel or + and - zoom, dragging or arrows move, 0 shows all; hovering tells about a bar.

    Several sources, by title, stand one above the other on the same time axis. `time_unit` follows the times.
    Raises ConfigError for events that cannot be drawn.
    """
    panels = panels_of(sources)
    shades = max(panel.stages_per_rank for panel in panels)
    colors = [[shade(op, local, shades) for local in range(shades)] for op in OPS]
    data = {
        "unit": time_unit,
        "bubble": BUBBLE,
        "ops": [op.name for op in OPS],
        "names": [NAMES[op] for op in OPS],
        "used": [OPS.index(op) for op in sorted({op for panel in panels for op in panel.ops})],
        "colors": [[hexadecimal(color) for color in row] for row in colors],
        "inks": [[ink(color) for color in row] for row in colors],
        "panels": [_of_panel(panel) for panel in panels],
    }
    # Inside a script element "</" would end it, and so the data could say more than data.
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c")
    page = files("hocket.draw").joinpath("page.html").read_text(encoding="utf-8")
    return page.replace("{{title}}", html.escape(title)).replace("{{data}}", text)


def _of_panel(panel: Panel) -> dict[str, Any]:
    """Flat lists: for a bar its start, end, op, stage, microbatch and the place of the stage on its rank."""
    numbers = {event: index for index, event in enumerate(event for row in panel.rows for event in row)}
    return {
        "title": panel.title,
        "makespan": panel.makespan,
        "bubble": panel.bubble_fraction,
        "memory_unit": "bytes" if panel.counts_bytes else "activations",
        "rows": [_bars(panel, rank) for rank in range(len(panel.rows))],
        "memory": [[_short(x) for step in steps for x in step] for steps in panel.memory],
        "links": [numbers[event] for link in panel.links for event in link],
    }


def _bars(panel: Panel, rank: int) -> list[float]:
    places, found = panel.local_index[rank], list[float]()
    for _, start, end, (op, stage, microbatch, _) in panel.rows[rank]:
        found += (_short(start), _short(end), OPS.index(Op(op)), stage, microbatch, places[stage])
    return found


def _short(value: float) -> float:
    """`value` with as many digits as a screen can ask for, and whole numbers without a point."""
    rounded = float(f"{value:.10g}")
    return int(rounded) if rounded.is_integer() else rounded
