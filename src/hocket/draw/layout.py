"""The layout of a figure, the same to the bit each time. Imports matplotlib, so figure.py imports this when asked."""

from __future__ import annotations

import numpy as np
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.transforms import Bbox

_DECIMALS = 6
"""Of the figure's size: a thousandth of a pixel."""


class RoundedLayout(ConstrainedLayoutEngine):
    """Constrained layout whose positions are rounded.

    Its solver adds terms in the order of the addresses of its objects, so positions differ in their last bits from one
    call to the next, and the SVG writer makes a name out of all the bits of a clip rectangle.
    """

    def execute(self, fig: Figure) -> None:
        super().execute(fig)
        for axes in fig.axes:
            taking_part = axes.get_in_layout()
            axes.set_position(Bbox(np.round(axes.get_position(original=True).get_points(), _DECIMALS)))
            # A position set by hand takes the axes out of the layout; the next draw is to lay them out again.
            axes.set_in_layout(taking_part)
