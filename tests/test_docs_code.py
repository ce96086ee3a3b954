"""The code, the commands and the figures of README.md and docs/*.md are true: each page runs as a reader would."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from docpages import ROOT, Block, PageError, blocks, matches
from hocket import CostModel, build, parse_schedule, simulate

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def run(page: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, ROOT / "tests/docpages.py", page]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, timeout=110)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_page(page: Path):
    done = run(page)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_pictures_of_this_repository_exist(page: Path):
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}, which does not exist"


def test_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120


def table_of_schedules(text: str) -> list[tuple[dict, str, str]]:
    """(config, bubble, activations) of each row of README's table."""
    rows = re.findall(r"^\| `(\{.*?\})` \| .*? \| ([\d.]+) % \| ([\d.]+) \|$", text, re.M)
    return [(json.loads(config), bubble, held) for config, bubble, held in rows]


def test_figures_of_the_table_of_schedules():
    """Bubble, and activations held by the fullest rank as a share of a rank's layers: 4 ranks, 8 microbatches."""
    rows = table_of_schedules((ROOT / "README.md").read_text())
    assert len(rows) >= 6
    for config, bubble, held in rows:
        timeline = simulate(build(parse_schedule(config), ranks=4, microbatches=8), CostModel())
        per_rank = timeline.program.num_stages / 4
        assert (config, bubble, held) == (
            config,
            f"{100 * timeline.bubble_fraction:.1f}",
            f"{max(timeline.peak_in_flight) / per_rank:g}",
        )


# ---- the runner itself


@pytest.mark.parametrize(
    "text,problem",
    [
        ("```python\nx = 1\n```\n\n```python\nassert x == 2, 'x is ' + str(x)\n```\n", "line 6"),
        ("```console\n$ hocket no-such-command\n```\n", "exit status 2, not 0"),
        ("```console\n$ hocket --version\nhocket 9.9\n```\n", "the page shows\nhocket 9.9"),
        ("<!-- not run: -->\n```python\nx\n```\n", "says nothing"),
        ("<!-- run: twice -->\n```python\nx\n```\n", "cannot run by 'twice'"),
        ("<!-- run: script -->\n```python\nraise SystemExit('no')\n```\n", "exit status 1"),
    ],
)
def test_a_page_can_fail(tmp_path: Path, text: str, problem: str):
    page = tmp_path / "page.md"
    page.write_text(text)
    done = run(page)
    assert done.returncode == 1
    assert problem in done.stderr


def test_a_page_runs_in_order_in_one_folder(tmp_path: Path):
    page = tmp_path / "page.md"
    page.write_text(
        "```python\nopen('program.txt', 'w').write('x')\nx = 1\n```\n"
        "<!-- not run: it would fail -->\n```python\n1 / 0\n```\n"
        "```console\n$ python -c 'print(open(\"program.txt\").read(), 2, sep=chr(10))'\nx\n2\n"
        "$ hocket nothing # exit 2\n$ sudo never\n```\n"
        "<!-- run: script -->\n```python\nassert 'x' not in globals()\n```\n"
        "1. in a list\n\n    ```python\n    assert x == 1\n    ```\n"
    )
    done = run(page)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("4 blocks")


def test_blocks_know_their_line_and_their_marks():
    text = "# a\n\n```python\nx\n```\n<!-- run: torchrun 2 -->\n```python\ny\n```\n"
    assert list(blocks(text)) == [
        Block("python", "x\n", 4),
        Block("python", "y\n", 8, launch="torchrun 2"),
    ]
    with pytest.raises(PageError, match="says nothing"):
        list(blocks("<!-- not run:  -->\n```python\n```\n"))


@pytest.mark.parametrize(
    "expected,printed,same",
    [
        ("a\nb", "a\nb\n", True),
        ("a  \nb", "a\nb  \n\n", True),
        ("a\nb", "a\nc\n", False),
        ("a\n...\nd", "a\nb\nc\nd\n", True),
        ("a\n...\nd", "a\nd\n", True),
        ("a\n...\nd", "a\nb\n", False),
        ("a\n...", "a\nb\nc\n", True),
        ("...\nc", "a\nb\nc\n", True),
        ("...\nc", "c\n", True),
        ("a\n...\nc\n...\ne", "a\nb\nc\nd\ne\n", True),
        ("a\n...\nc\n...\ne", "a\nb\nd\ne\n", False),
        ("a\n...\na", "a\n", False),
        ("a.c", "abc", False),
    ],
)
def test_what_is_printed_matches_what_is_shown(expected: str, printed: str, same: bool):
    assert matches(expected, printed) is same
