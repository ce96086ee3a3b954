"""Colours of the ops, one lightness for each stage of a rank, for all pictures alike."""

from __future__ import annotations

from hocket.program import Op

OPS = (Op.F, Op.B, Op.I, Op.W)
"""The ops that are drawn, in the order of the legend."""

NAMES = {Op.F: "forward", Op.B: "backward", Op.I: "backward for input", Op.W: "backward for weights"}

# Told apart in print and by readers who do not see red and green: the four also differ in lightness.
COLORS = {Op.F: "#3b6ea8", Op.B: "#d9714a", Op.I: "#e9a93f", Op.W: "#6fae8c"}

BUBBLE = "#f1f1ef"

# The nearest of the 256 colours that terminals know: a first and a lighter one.
TERMINAL = {Op.F: (67, 110), Op.B: (173, 216), Op.I: (179, 222), Op.W: (108, 151)}

_LIGHTEST = 0.55


def shade(op: Op, local: int, stages: int) -> tuple[float, float, float]:
    """Red, green and blue, from 0 to 1, of `op` on a rank's `local`-th of so many stages: later ones are lighter."""
    base = (int(COLORS[op][i : i + 2], 16) / 255 for i in (1, 3, 5))
    part = _LIGHTEST * local / (stages - 1) if stages > 1 else 0.0
    red, green, blue = (channel + (1 - channel) * part for channel in base)
    return red, green, blue


def ink(color: tuple[float, float, float]) -> str:
    """Black or white, whichever is easier to read on `color`."""
    red, green, blue = color
    return "#ffffff" if 0.299 * red + 0.587 * green + 0.114 * blue < 0.58 else "#1a1a1a"


def hexadecimal(color: tuple[float, float, float]) -> str:
    """`color` as #rrggbb."""
    return "#" + "".join(f"{round(255 * channel):02x}" for channel in color)
