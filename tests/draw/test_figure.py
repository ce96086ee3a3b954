"""Figures: the right pixels, the same bytes each time, quick when large, and an error that says what to install."""

import sys
import time
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import PathCollection

from hocket.draw import draw_figure, save_figure
from hocket.draw.palette import BUBBLE, hexadecimal, ink, shade
from hocket.errors import ConfigError
from hocket.program import Op


def pixels(figure, axis) -> Callable[[float, float], str]:
    """The colour that the figure has at a time and a rank."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    image = np.asarray(canvas.buffer_rgba())

    def color(when: float, rank: float) -> str:
        x, y = axis.transData.transform((when, rank))
        red, green, blue, _ = image[len(image) - 1 - int(y), int(x)]
        return f"#{red:02x}{green:02x}{blue:02x}"

    return color


def test_bars_have_their_colours(timeline):
    drawn = timeline({"schedule": "1f1b", "num_stages_per_rank": 2}, 2, 4)
    figure = draw_figure(drawn, width=10)
    bars, memory = figure.axes
    pixel = pixels(figure, bars)
    for event in drawn.events:
        color = hexadecimal(shade(event.action.op, event.action.stage // 2, 2))
        assert pixel(event.start + 0.1 * (event.end - event.start), event.rank + 0.2) == color
    assert pixel(drawn.makespan - 0.5, 1) == BUBBLE
    assert [line.get_ydata().max() for line in memory.lines] == list(drawn.peak_in_flight)


def test_a_pair_that_runs_jointly_shares_the_height(timeline):
    drawn = timeline("dual_pipe_v", 2, 4, overlap_speedup=1.5)
    figure = draw_figure(drawn, memory=False)
    pixel = pixels(figure, figure.axes[0])
    forward, backward = next((a, b) for a, b in pairwise(drawn.events) if a[:3] == b[:3])
    local = {0: 0, 3: 1, 1: 0, 2: 1}
    for event, offset in ((forward, -0.3), (backward, 0.3)):
        color = hexadecimal(shade(event.action.op, local[event.action.stage], 2))
        assert pixel(event.start + 0.2, event.rank + offset) == color


def test_numbers_only_where_they_fit(timeline):
    def numbers(drawn) -> int:
        collections = draw_figure(drawn).axes[0].collections
        return sum(len(c.get_offsets()) for c in collections if isinstance(c, PathCollection))

    assert numbers(timeline("1f1b", 4, 8)) == 64
    assert numbers(timeline("1f1b", 16, 64)) == 0


def test_thin_bars_become_the_mean_of_their_colours(timeline):
    figure = draw_figure(timeline("gpipe", 4, 600, backward=1), memory=False)
    (bars,) = figure.axes
    pixel = pixels(figure, bars)
    assert not bars.collections and len(bars.images) == 1
    assert pixel(300, 0) == hexadecimal(shade(Op.F, 0, 1))
    assert pixel(900, 3) == hexadecimal(shade(Op.B, 0, 1))


@pytest.mark.parametrize("suffix,head", [(".png", b"\x89PNG"), (".svg", b"<?xml"), (".pdf", b"%PDF")])
def test_files_are_the_same_each_time(timeline, tmp_path, suffix, head):
    drawn = {"plan": timeline("1f1b", 3, 4), "measured": timeline("zero_bubble_v", 2, 4, activation_bytes=2**30)}
    for name in ("a", "b"):
        save_figure(drawn, tmp_path / f"{name}{suffix}", dpi=80, time_unit="ms")
    data = (tmp_path / f"a{suffix}").read_bytes()
    assert data.startswith(head) and data == (tmp_path / f"b{suffix}").read_bytes()


def test_places_are_rounded_at_every_draw(timeline):
    # The solver's last bits depend on the addresses of its objects, and the SVG writer names clip paths by them.
    figure = draw_figure(timeline("1f1b", 12, 16))
    assert len(figure.axes) == 3, "bars, memory as an image, its colour bar"
    seen = []
    for dpi in (100, 100, 300):
        figure.set_dpi(dpi)
        figure.draw_without_rendering()
        seen.append([axes.get_position(original=True).bounds for axes in figure.axes])
        points = np.array([axes.get_position(original=True).get_points() for axes in figure.axes])
        assert np.array_equal(points, np.round(points, 6))
    assert np.allclose(seen[0], seen[1], atol=1e-3) and np.allclose(seen[0], seen[2], atol=0.02)
    figure.axes[0].set_xlabel("a label\nof two lines")
    figure.draw_without_rendering()
    assert figure.axes[0].get_position().height < seen[2][0][3], "laid out anew"


def test_a_large_figure_takes_seconds(timeline, tmp_path):
    drawn = timeline({"schedule": "1f1b", "num_stages_per_rank": 2}, 64, 256)
    begun = time.process_time()
    save_figure(drawn, tmp_path / "large.png")
    assert time.process_time() - begun < 15
    assert (tmp_path / "large.png").stat().st_size < 3e6


def test_without_matplotlib(timeline, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match=r"needs matplotlib.*pip install 'hocket\[plot\]'"):
        draw_figure(timeline("1f1b", 2, 2))


@pytest.mark.parametrize("name,message", [("x.gif", "not as '.gif'"), ("x", "not as ''")])
def test_refused_suffix(timeline, tmp_path, name, message):
    with pytest.raises(ConfigError, match=message):
        save_figure(timeline("1f1b", 2, 2), tmp_path / name)


def test_refused_size(timeline):
    with pytest.raises(ConfigError, match="too small"):
        draw_figure(timeline("1f1b", 2, 2), width=0.5)


def test_stages_get_lighter_and_stay_readable():
    for op in (Op.F, Op.B, Op.I, Op.W):
        shades = [shade(op, local, 4) for local in range(4)]
        assert sorted(shades, key=sum) == shades and len(set(shades)) == 4
        for color in shades:
            light = sum(color) / 3
            assert (ink(color) == "#ffffff") == (light < 0.6) or 0.4 < light < 0.75
