"""The page in headless Chromium: what it shows, and that wheel, drag, keys and hovering do what they say."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from hocket.draw import draw_html

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--window-size=1200,800",
    "--virtual-time-budget=3000",
]

# Runs after the page's own script, inside the page; what it finds stands in the text of the document afterwards.
PROBE = """
<pre id="found"></pre>
<script>
{
const found = {}, { view, barAt, boxOf, data: all } = window.hocket;
const at = (type, event, x, y, more) => {
  const box = canvas.getBoundingClientRect();
  canvas.dispatchEvent(new event(type, { clientX: box.left + x, clientY: box.top + y, bubbles: true,
                                         cancelable: true, ...more }));
};
const middle = bar => { const b = boxOf(bar); return [b.x + b.w / 2, b.y + b.h / 2]; };
const colorAt = (x, y) => Array.from(pen.getImageData(x * devicePixelRatio, y * devicePixelRatio, 1, 1).data);
const bars = all.panels[0].bars;
found.errors = window.errors;
found.all = { ...view };
found.hits = bars.every(bar => barAt(...middle(bar)) === bar);
found.color = colorAt(boxOf(bars[0]).x + 3, boxOf(bars[0]).y + 2);
at("pointermove", PointerEvent, ...middle(bars[0]));
found.tip = tip.textContent;
found.shown = getComputedStyle(tip).display;
const before = timeAt(300);
at("wheel", WheelEvent, 300, 40, { deltaY: -300 });
found.zoomed = view.end - view.start;
found.kept = Math.abs(timeAt(300) - before) < 1e-6;
const start = view.start;
at("pointerdown", PointerEvent, 300, 40);
at("pointermove", PointerEvent, 250, 40);
window.dispatchEvent(new PointerEvent("pointerup"));
found.dragged = view.start - start;
for (let i = 0; i < 80; i++) window.dispatchEvent(new KeyboardEvent("keydown", { key: "+" }));
found.deepest = view.end - view.start;
window.dispatchEvent(new KeyboardEvent("keydown", { key: "0" }));
found.back = { ...view };
document.getElementById("out").click();
found.out = { ...view };
at("pointerleave", PointerEvent, 0, 0);
found.hidden = getComputedStyle(tip).display;
found.label = canvas.getAttribute("aria-label");
const begun = performance.now();
draw();
found.milliseconds = performance.now() - begun;
document.getElementById("found").textContent = JSON.stringify(found);
}
</script>
"""

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: apt-get install chromium"),
]


def probe(page: str, folder: Path) -> dict:
    """What PROBE finds in the page."""
    catch = "<script>window.errors = []; onerror = text => { errors.push(text); };</script>"
    page = page.replace("<style>", catch + "<style>").replace("</body>", PROBE + "</body>")
    (folder / "page.html").write_text(page)
    done = subprocess.run(
        [str(CHROMIUM), *FLAGS, f"--user-data-dir={folder / 'profile'}", "--dump-dom", f"file://{folder}/page.html"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    text = re.search(r'<pre id="found">(.*?)</pre>', done.stdout, re.S)
    assert text and text[1], done.stdout[-500:] + done.stderr[-500:]
    return json.loads(text[1].replace("&gt;", ">").replace("&lt;", "<").replace("&amp;", "&"))


def test_zoom_drag_hover(timeline, tmp_path):
    sources = {"plan": timeline("dual_pipe_v", 4, 8, overlap_speedup=1.5), "in turn": timeline("dual_pipe_v", 4, 8)}
    found = probe(draw_html(sources, time_unit="ms"), tmp_path)
    longest = pytest.approx(max(drawn.makespan for drawn in sources.values()))
    assert found["errors"] == []
    assert found["all"] == {"start": 0, "end": longest}
    assert found["hits"]
    assert found["color"] == [0x3B, 0x6E, 0xA8, 255]
    assert found["shown"] == "block" and found["hidden"] == "none"
    assert found["tip"].splitlines() == [
        "0F0   forward",
        "rank 0, stage 0, microbatch 0",
        "0 ms to 1 ms, takes 1 ms",
        "to 1F0 on rank 1",
    ]
    assert found["zoomed"] == pytest.approx(51 / 2) and found["kept"]
    assert found["dragged"] > 0
    assert found["deepest"] == pytest.approx(51e-6)
    assert found["back"] == found["out"] == found["all"]
    assert found["label"].startswith("plan 4 ranks, makespan")


@pytest.mark.slow
def test_a_large_page_is_quick_enough_to_move_about(timeline, tmp_path):
    found = probe(draw_html(timeline({"schedule": "1f1b", "num_stages_per_rank": 2}, 64, 256)), tmp_path)
    assert found["errors"] == []
    assert found["milliseconds"] < 500
