"""The page as text: one file, its data inside and nothing that a title could break."""

import json
import re

import pytest

from hocket.draw import draw_html


def data_of(page: str) -> dict:
    found = re.search(r'<script id="data" type="application/json">(.*?)</script>', page, re.S)
    assert found
    return json.loads(found[1])


def test_bars_and_links(timeline):
    drawn = timeline("zero_bubble_v", 3, 5, hop_latency=0.1)
    (panel,) = data_of(draw_html(drawn))["panels"]
    assert panel["makespan"] == pytest.approx(drawn.makespan)
    bars = [row[i : i + 6] for row in panel["rows"] for i in range(0, len(row), 6)]
    assert [(a, b, s, m) for a, b, _, s, m, _ in bars] == [
        (pytest.approx(e.start), pytest.approx(e.end), e.action.stage, e.action.microbatch) for e in drawn.events
    ]
    assert len(panel["links"]) == 2 * len(drawn.messages)


def test_nothing_comes_from_elsewhere(timeline):
    page = draw_html(timeline("1f1b", 2, 2))
    assert "default-src 'none'" in page
    assert not re.search(r"https?://|src=|<link|@import|url\(", page)
    assert "{{" not in page


def test_titles_are_text_and_not_markup(timeline):
    evil = "</script><script>alert(1)</script>"
    page = draw_html({evil: timeline("1f1b", 2, 2)}, title=evil)
    assert page.count("<script") == 2
    assert data_of(page)["panels"][0]["title"] == evil
