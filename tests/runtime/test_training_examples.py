"""The two examples of a run to trust say that all agrees; their figures are within the bounds that they print."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent.parent / "examples"
FIGURE = re.compile(r"(loss|norm|aux|weights) ([\d.]+e[+-]\d+)")


def run(name: str, *args: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *args], capture_output=True, text=True, check=False, timeout=110
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


def test_trustworthy_run() -> None:
    lines = run("trustworthy_run.py")[2:]
    assert [line[:24].strip() for line in lines] == ["one process", "1F1B, 2 ranks", "zero bubble V, 2 ranks"]
    for line in lines:
        assert all(float(value) <= 1e-6 for _, value in FIGURE.findall(line))
        assert line.endswith("tied copies equal: True; dropout identical: True")


@pytest.mark.slow
def test_stop_and_go(tmp_path: Path) -> None:
    lines = run("stop_and_go.py", str(tmp_path))[1:]
    assert len(lines) == 5
    for line in lines:
        figures = {key: float(value) for key, value in FIGURE.findall(line)}
        assert max(figures["loss"], figures["norm"]) <= (0 if "as before" in line else 1e-6)
        assert figures["weights"] <= 1e-5
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000003"]
