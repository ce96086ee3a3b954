"""A timeline as a figure for papers: bars by rank above, memory by rank below. Needs matplotlib, the extra `plot`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from hocket.draw.palette import BUBBLE, NAMES, OPS, ink, shade
from hocket.draw.panel import Panel, Sources, panels_of, same_makespan
from hocket.draw.texture import add_texture
from hocket.errors import ConfigError
from hocket.program import Op

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from hocket.draw.layout import RoundedLayout

_POINTS = 72
_FONT = 7.0
"""Points of the smallest text, that of the microbatch numbers."""

# Above this many bars the bars of an SVG or PDF become an image: a reader sees the same, and the file opens.
_VECTOR_LIMIT = 6000

# Bars thinner than this many points are drawn as the mean of their colours: drawn one by one they would alias.
_TEXTURE = 1.0

# More lines than this in one plot cannot be told apart; memory is then an image of rank by time.
_LINES = 8


def draw_figure(
    sources: Sources,
    *,
    width: float = 7.0,
    height: float | None = None,
    memory: bool = True,
    same_scale: bool = True,
    time_unit: str = "",
) -> Figure:
    """A matplotlib figure, `width` by `height` inches (None: as the number of ranks asks for).

    Colours tell the op, lightness the stage among those of the rank (later ones are lighter), numbers the microbatch,
    where they fit. `memory` adds what each rank holds: bytes if the costs say how many, else activations. Several
    sources, by title, stand one above the other. `time_unit` labels the axis.

    Raises ConfigError if matplotlib is missing, or for events that cannot be drawn.
    """
    figure_type, layout_type = _import_matplotlib()
    panels = panels_of(sources)
    if not (width >= 2 and (height is None or height >= 1)):
        raise ConfigError(f"a figure of {width!r} x {height!r} inches is too small; give at least 2 x 1")
    parts = [_bars_inches(panel) for panel in panels]
    ratios = [ratio for inches in parts for ratio in ((inches, _memory_inches(inches)) if memory else (inches,))]
    layout = layout_type(h_pad=0.03, hspace=0.02, w_pad=0.03)
    figure = figure_type(figsize=(width, height or sum(ratios) + 0.55 * len(ratios) + 0.35), layout=layout)
    axes = figure.subplots(len(ratios), 1, squeeze=False, height_ratios=ratios)[:, 0]
    lengths = same_makespan(panels, same_scale)
    for index, (panel, length) in enumerate(zip(panels, lengths, strict=True)):
        rows = axes[2 * index : 2 * index + 2] if memory else axes[index : index + 1]
        _draw_bars(rows[0], panel, length, width)
        if memory:
            _draw_memory(figure, rows[1], panel)
        for axis in rows:
            axis.set_xlim(0, length)
            axis.tick_params(labelsize=_FONT, length=2.5, width=0.6)
            axis.spines[["top", "right"]].set_visible(False)
            axis.spines[["left", "bottom"]].set_linewidth(0.6)
        rows[-1].set_xlabel(f"time ({time_unit})" if time_unit else "time", fontsize=_FONT + 1)
        if memory:
            rows[0].tick_params(labelbottom=False)
    _draw_legend(figure, panels)
    return figure


def save_figure(sources: Sources, path: str | os.PathLike[str], *, dpi: float = 200, **options: Any) -> None:
    """Write `draw_figure(sources, **options)` to `path`; its suffix says the form: .png, .svg or .pdf.

    The same input gives the same bytes. Raises ConfigError for another suffix, and what `draw_figure` raises.
    """
    suffix = os.path.splitext(path)[1].lower()
    if suffix not in (".png", ".svg", ".pdf"):
        raise ConfigError(f"a figure is written as .png, .svg or .pdf, not as {suffix!r}; rename {os.fspath(path)!r}")
    figure = draw_figure(sources, **options)
    from matplotlib import rc_context

    metadata = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}.get(suffix)
    with rc_context({"svg.hashsalt": "hocket"}):
        figure.savefig(path, dpi=dpi, metadata=metadata)


def _import_matplotlib() -> tuple[type[Figure], type[RoundedLayout]]:
    try:
        from matplotlib.figure import Figure

        from hocket.draw.layout import RoundedLayout
    except ImportError as error:
        raise ConfigError(
            f"a figure needs matplotlib, which cannot be imported ({error}); install it: pip install 'hocket[plot]'"
        ) from None
    return Figure, RoundedLayout


# --- sizes ------------------------------------------------------------------------------------------------------------


def _bars_inches(panel: Panel) -> float:
    """Few ranks are drawn tall enough for numbers, many as thin as texture."""
    ranks = len(panel.rows)
    return max(min(0.22 * ranks, 2.2 + 0.03 * ranks), 0.35)


def _memory_inches(bars: float) -> float:
    return min(max(0.55 * bars, 0.7), 1.6)


# --- bars -------------------------------------------------------------------------------------------------------------


def _draw_bars(axis: Axes, panel: Panel, length: float, width: float) -> None:
    ranks = len(panel.rows)
    axis.set_ylim(ranks - 0.5, -0.5)
    axis.set_facecolor(BUBBLE)
    points_per_time = 0.88 * width * _POINTS / length
    typical = _median([e.end - e.start for row in panel.rows for e in row]) * points_per_time
    tall = 0.92 if ranks <= 24 else 1.0
    if typical < _TEXTURE:
        add_texture(axis, panel, length, 0.88 * width)
    else:
        boxes = [box for rank in range(ranks) for box in _boxes(panel, rank, tall)]
        _add_boxes(axis, panel, boxes, edge=min(0.5, typical / 8) if typical > 2 else 0.0)
        _add_numbers(axis, panel, boxes, points_per_time, _bars_inches(panel) * _POINTS / ranks)
    axis.set_yticks(*_rank_ticks(ranks))
    axis.set_ylabel("rank", fontsize=_FONT + 1)
    title = f"{panel.title}   " if panel.title else ""
    facts = f"makespan {panel.makespan:.6g}, bubble {100 * panel.bubble_fraction:.1f} %"
    axis.set_title(title + facts, fontsize=_FONT + 1, loc="left", pad=3)


Box = tuple[float, float, float, float, int, Op, int, int]
"""Left, right, top, bottom, rank, op, stage, microbatch."""


def _boxes(panel: Panel, rank: int, tall: float) -> list[Box]:
    """The bars of a rank; those of a pair that runs jointly have half of the height each."""
    found: list[Box] = []
    for (start, end), joint in groupby(panel.rows[rank], key=lambda event: (event.start, event.end)):
        events = list(joint)
        part = tall / len(events)
        for place, event in enumerate(events):
            top = rank - tall / 2 + place * part
            op, stage, microbatch, _ = event.action
            found.append((start, end, top, top + part, rank, op, stage, microbatch))
    return found


def _add_boxes(axis: Axes, panel: Panel, boxes: Sequence[Box], edge: float) -> None:
    import numpy as np
    from matplotlib.collections import PolyCollection

    left, right, top, bottom = np.array([box[:4] for box in boxes], dtype=float).T
    corners = np.stack([left, top, right, top, right, bottom, left, bottom], axis=1).reshape(-1, 4, 2)
    colors = np.array([_color(panel, box) for box in boxes])
    axis.add_collection(
        PolyCollection(
            list(corners),
            facecolors=colors,
            edgecolors="white" if edge else "none",
            linewidths=edge,
            # Neighbours without an edge would show the background between them.
            antialiaseds=bool(edge),
            rasterized=len(boxes) > _VECTOR_LIMIT,
        )
    )


def _color(panel: Panel, box: Box) -> tuple[float, float, float]:
    _, _, _, _, rank, op, stage, _ = box
    places = panel.local_index[rank]
    return shade(op, places[stage], panel.stages_per_rank)


def _add_numbers(axis: Axes, panel: Panel, boxes: Sequence[Box], points_per_time: float, row_points: float) -> None:
    """Microbatch numbers, in the middle of the bars that are wide and tall enough for theirs.

    A collection for each number and colour: text artists one by one would take seconds.
    """
    from matplotlib.collections import PathCollection
    from matplotlib.textpath import TextPath
    from matplotlib.transforms import Affine2D

    places: dict[tuple[int, str], list[tuple[float, float]]] = {}
    for box in boxes:
        left, right, top, bottom, _, _, _, microbatch = box
        digits = 0.62 * _FONT * len(str(microbatch)) + 1.5
        if digits <= (right - left) * points_per_time and (bottom - top) * row_points >= _FONT:
            middle = (left + right) / 2, (top + bottom) / 2
            places.setdefault((microbatch, ink(_color(panel, box))), []).append(middle)
    if 3 * sum(map(len, places.values())) < len(boxes):
        return
    figure = axis.get_figure()
    for (microbatch, color), offsets in places.items():
        path = TextPath((0, 0), str(microbatch), size=_FONT)
        extents = path.get_extents()
        shifted = path.transformed(Affine2D().translate(-(extents.x0 + extents.x1) / 2, -(extents.y0 + extents.y1) / 2))
        numbers = PathCollection(
            [shifted], facecolors=color, linewidths=0, offsets=offsets, offset_transform=axis.transData, zorder=3
        )
        numbers.set_transform(Affine2D().scale(1 / _POINTS) + figure.dpi_scale_trans)  # type: ignore[union-attr]
        axis.add_collection(numbers)


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def _rank_ticks(ranks: int, most: int = 16) -> tuple[list[int], list[str]]:
    """All ranks where there is room for that many, else in steps of a power of two."""
    step = 1
    while ranks / step > most:
        step *= 2
    shown = list(range(0, ranks, step))
    return shown, [str(rank) for rank in shown]


# --- memory -----------------------------------------------------------------------------------------------------------


def _draw_memory(figure: Figure, axis: Axes, panel: Panel) -> None:
    size, unit = _memory_unit(panel)
    if len(panel.rows) <= _LINES:
        _memory_lines(axis, panel, size)
        axis.set_ylabel(unit, fontsize=_FONT + 1)
    else:
        _memory_image(figure, axis, panel, size, unit)


def _memory_unit(panel: Panel) -> tuple[float, str]:
    """What the numbers are divided by, and the name of the result."""
    if not panel.counts_bytes:
        return 1.0, "activations\nheld"
    peak = max(held for steps in panel.memory for _, held in steps)
    for size, name in ((2.0**40, "TiB"), (2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB")):
        if peak >= size:
            return size, f"{name} held"
    return 1.0, "bytes held"


def _memory_lines(axis: Axes, panel: Panel, size: float) -> None:
    from matplotlib import colormaps
    from matplotlib.ticker import MaxNLocator

    ranks, colors = len(panel.rows), colormaps["viridis"]
    for rank, steps in enumerate(panel.memory):
        times = [time for time, _ in steps] + [panel.makespan]
        held = [amount / size for _, amount in steps]
        color = colors(0.9 * rank / max(ranks - 1, 1))
        axis.step(
            times, [*held, held[-1]], where="post", lw=1.0, color=color, label=f"rank {rank}", zorder=ranks - rank
        )
    axis.set_ylim(bottom=0)
    axis.yaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 5, 10], integer=not panel.counts_bytes))
    axis.grid(axis="y", lw=0.3, color="#cccccc")
    axis.set_axisbelow(True)
    axis.legend(
        fontsize=_FONT - 1, ncols=1 if ranks <= 4 else 2, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5)
    )


def _memory_image(figure: Figure, axis: Axes, panel: Panel, size: float, unit: str) -> None:
    import numpy as np

    columns = 1200
    times = (np.arange(columns) + 0.5) * panel.makespan / columns
    rows = []
    for steps in panel.memory:
        at, held = np.array(steps, dtype=float).T
        rows.append(held[np.searchsorted(at, times, side="right") - 1] / size)
    image = axis.imshow(
        np.array(rows),
        aspect="auto",
        interpolation="nearest",
        cmap="cividis",
        vmin=0,
        extent=(0.0, panel.makespan, len(rows) - 0.5, -0.5),
    )
    bar = figure.colorbar(image, ax=axis, pad=0.01, fraction=0.03)
    bar.set_label(unit, fontsize=_FONT)
    bar.ax.tick_params(labelsize=_FONT - 1, length=2)
    axis.set_yticks(*_rank_ticks(len(rows), 8))
    axis.set_ylabel("rank", fontsize=_FONT + 1)


# --- legend -----------------------------------------------------------------------------------------------------------


def _draw_legend(figure: Figure, panels: Sequence[Panel]) -> None:
    """A patch for each op, and for each stage of a rank where it hosts several."""
    from matplotlib.legend_handler import HandlerTuple
    from matplotlib.patches import Patch

    ops = [op for op in OPS if any(op in panel.ops for panel in panels)]
    shades = min(max(panel.stages_per_rank for panel in panels), 4)
    handles = [tuple(Patch(color=shade(op, local, shades), lw=0) for local in range(shades)) for op in ops]
    names = [f"{op.name} {NAMES[op]}" for op in ops]
    if shades > 1:
        names[-1] += "  (darker: earlier stages of the rank)"
    figure.legend(
        [*handles, Patch(facecolor=BUBBLE, edgecolor="#bbbbbb", lw=0.4)],  # type: ignore[list-item]
        [*names, "bubble"],
        handler_map={tuple: HandlerTuple(ndivide=None, pad=0.0)},
        loc="outside upper left",
        ncols=len(ops) + 1,
        fontsize=_FONT,
        frameon=False,
        handlelength=1.0 + 0.5 * (shades - 1),
        handleheight=0.9,
        columnspacing=1.2,
        handletextpad=0.4,
    )
