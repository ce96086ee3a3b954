"""Bars too thin to be seen, as an image: each column has the mean colour of the time that it stands for."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

from hocket.draw.palette import BUBBLE, shade
from hocket.draw.panel import Panel

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.axes import Axes

# More than a printer shows, so that the picture decides and not the image.
_COLUMNS_PER_INCH = 300

_GROUND = tuple(int(BUBBLE[i : i + 2], 16) / 255 for i in (1, 3, 5))


def add_texture(axis: Axes, panel: Panel, length: float, inches: float) -> None:
    """Draw the bars of `panel` into `axis`, which shows `length` units of time on so many inches."""
    import numpy as np

    edges = np.linspace(0.0, length, max(int(inches * _COLUMNS_PER_INCH), 2))
    image = np.stack([_row(panel, rank, edges) for rank in range(len(panel.rows))])
    axis.imshow(
        image.clip(0.0, 1.0),
        aspect="auto",
        interpolation="antialiased",
        extent=(0.0, length, len(image) - 0.5, -0.5),
    )


def _row(panel: Panel, rank: int, edges: np.ndarray) -> np.ndarray:
    """Red, green and blue of each column, by the integral of the colour over time."""
    import numpy as np

    places, stages = panel.local_index[rank], panel.stages_per_rank
    known = {(op, stage): shade(op, places[stage], stages) for op in panel.ops for stage in places}
    times, colors, until = [0.0], [], 0.0
    for (start, end), joint in groupby(panel.rows[rank], key=lambda event: (event.start, event.end)):
        if end <= until:
            continue
        found = [known[event.action.op, event.action.stage] for event in joint]
        color = (
            found[0] if len(found) == 1 else tuple(sum(channel) / len(found) for channel in zip(*found, strict=True))
        )
        times += [max(start, until), end]
        colors += [_GROUND, color]
        until = end
    times.append(max(float(edges[-1]), until))
    colors.append(_GROUND)
    total = np.concatenate([np.zeros((1, 3)), np.cumsum(np.diff(times)[:, None] * np.array(colors), axis=0)])
    at_edges = np.stack([np.interp(edges, times, total[:, channel]) for channel in range(3)], axis=1)
    return np.diff(at_edges, axis=0) / np.diff(edges)[:, None]
