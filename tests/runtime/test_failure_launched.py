"""Failures as a user sees them: under torchrun, with Ctrl-C, with a rank that never joins."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from distributed import run_torchrun
from long import long

pytestmark = [pytest.mark.slow, long]

SCRIPT = Path(__file__).parents[1] / "data/failing_train.py"


@pytest.mark.torchrun
@pytest.mark.parametrize(
    "what,line",
    [
        ("raise", "rank 1, stage 1, microbatch 2, action 1F2: ValueError: boom: 17 is no token"),
        ("kill", "rank 1 is gone: the connection closed without a word (killed, or out of memory)"),
    ],
)
def test_torchrun(what: str, line: str) -> None:
    """The launcher stops the others with SIGTERM as soon as one has ended; they have their say before."""
    done = run_torchrun(SCRIPT, 3, what, timeout=100, check=False)
    assert done.returncode != 0
    said = [text for text in done.stderr.splitlines() if line in text]
    # Each surviving rank says it once; the failing one shows its own traceback.
    assert len(said) == (2 if what == "kill" else 3), done.stderr
    if what == "raise":
        assert "in forward" in done.stderr or "in strike" in done.stderr
    assert "gloo/transport" not in done.stderr
    assert "most recent call first" not in done.stderr


def _start(rank: int, size: int, port: int, *words: str) -> subprocess.Popen[str]:
    env = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return subprocess.Popen(
        [sys.executable, str(SCRIPT), *words],
        env={**os.environ, **{name: str(value) for name, value in env.items()}},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _end(processes: list[subprocess.Popen[str]], seconds: float) -> list[tuple[int, str, str]]:
    """Exit code, stdout and stderr of each; kills what is left."""
    found = []
    try:
        end = time.monotonic() + seconds
        for process in processes:
            out, err = process.communicate(timeout=max(0.1, end - time.monotonic()))
            found.append((process.returncode, out, err))
    finally:
        for process in processes:
            process.kill()
    return found


def _port() -> int:
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def test_ctrl_c() -> None:
    """One line from each rank, within 5 seconds. No launcher: each rank gets the signal as from a terminal."""
    port = _port()
    processes = [_start(rank, 2, port, "endless") for rank in range(2)]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "training\n"
    time.sleep(0.5)
    begun = time.monotonic()
    for process in processes:
        process.send_signal(signal.SIGINT)
    ends = _end(processes, 15)
    assert time.monotonic() - begun < 5
    for rank, (code, _, err) in enumerate(ends):
        assert code in (130, -signal.SIGINT)
        assert re.fullmatch(rf"hocket: rank {rank}: interrupted in step \d+.*\n", err), err


def test_a_rank_that_never_joins() -> None:
    """P17: one of three ranks is not started. The first to give up hosts the store; the other still hears why."""
    port = _port()
    processes = [_start(0, 3, port, "join")]
    time.sleep(2)
    processes.append(_start(2, 3, port, "join"))
    ends = _end(processes, 60)
    for code, _, err in ends:
        assert code == 1
        assert err.splitlines()[-1].endswith(
            "PipelineTimeoutError: 1 of 3 ranks did not join within 6 s: rank 1; start them, or launch with the right "
            "number of processes"
        )


def test_rank_0_never_joins() -> None:
    """Then there is no store to ask either."""
    ((code, _, err),) = _end([_start(1, 2, _port(), "join")], 60)
    assert code == 1
    assert "PipelineTimeoutError: rank 1 cannot reach the store of rank 0 at 127.0.0.1:" in err.splitlines()[-1]


def test_the_host_of_the_store_is_killed() -> None:
    """Rank 0 hosts the store where no agent does: no pages of C++ frames, and the cause all the same."""
    port = _port()
    ends = _end([_start(rank, 2, port, "kill", "0") for rank in range(2)], 60)
    assert ends[0][0] == -9
    code, _, err = ends[1]
    assert code == 1
    assert "rank 0 is gone" in err
    assert "most recent call first" not in err


def test_a_normal_end_is_quiet() -> None:
    """Also when the host of the store ends first."""
    port = _port()
    for code, _, err in _end([_start(rank, 2, port, "none") for rank in range(2)], 60):
        assert code == 0
        assert "hocket" not in err
        assert "most recent call first" not in err
