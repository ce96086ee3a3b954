"""Pictures of timelines: text, Chrome trace, figure, page. All take one timeline or several by title."""

from hocket.draw.figure import draw_figure, save_figure
from hocket.draw.html import draw_html
from hocket.draw.panel import EventLike, HasEvents, Source, Sources
from hocket.draw.text import draw_text
from hocket.draw.trace import draw_trace, read_trace

__all__ = [
    "EventLike",
    "HasEvents",
    "Source",
    "Sources",
    "draw_figure",
    "draw_html",
    "draw_text",
    "draw_trace",
    "read_trace",
    "save_figure",
]
