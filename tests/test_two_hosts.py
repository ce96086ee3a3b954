"""Training over two hosts: equal to one process, on time with delay, and both sides end when the line is cut."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from hocket import CostModel, build, lower, parse_schedule, simulate
from hosts import Hosts, torchrun_on, two_hosts, why_not
from long import long
from runtime.parity import batches, train_reference

SCRIPT = Path(__file__).parent / "data/two_hosts_train.py"
REASON = why_not()

pytestmark = [
    pytest.mark.netns,
    pytest.mark.torchrun,
    pytest.mark.slow,
    long,
    pytest.mark.skipif(REASON is not None, reason=f"no network namespaces: {REASON}"),
]

Launch = Callable[..., list[subprocess.Popen[str]]]


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    """Starts the script on both hosts, and ends whatever is left of it."""
    started: list[subprocess.Popen[str]] = []

    def start(hosts: Hosts, mode: str) -> list[subprocess.Popen[str]]:
        for host in range(2):
            words = (mode, str(tmp_path / "out"))
            log = tmp_path / f"log.{host}"
            started.append(torchrun_on(hosts, host, sys.executable, SCRIPT, *words, log=log))
        return started

    yield start
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(10)


def _finish(processes: list[subprocess.Popen[str]], folder: Path, seconds: float) -> None:
    end = time.monotonic() + seconds
    for host, process in enumerate(processes):
        try:
            code = process.wait(max(0.1, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            code = None
        assert code == 0, f"host {host} ended with {code}:\n{(folder / f'log.{host}').read_text()[-3000:]}"


def test_equals_one_process(tmp_path: Path, launch: Launch) -> None:
    with two_hosts() as hosts:
        _finish(launch(hosts, "train"), tmp_path, 90)
    losses, parameters = train_reference(2, 4, batches(3, 16))
    mine = {}
    for rank in range(2):
        their_losses, theirs = torch.load(tmp_path / f"out.{rank}")
        torch.testing.assert_close(their_losses, losses, rtol=0, atol=0)
        mine.update(theirs)
    torch.testing.assert_close(mine, parameters, rtol=0, atol=0)


def test_both_sides_end_when_the_line_is_cut(tmp_path: Path, launch: Launch) -> None:
    with two_hosts() as hosts:
        processes = launch(hosts, "endless")
        _wait_for(tmp_path / "out.1.alive", 90, processes, tmp_path)
        time.sleep(1)
        hosts.cut()
        cut = time.time()
        for rank in range(2):
            _wait_for(tmp_path / f"out.{rank}", 30, processes, tmp_path)
    for rank in range(2):
        kind, text, moment = json.loads((tmp_path / f"out.{rank}").read_text())
        last = text.splitlines()[-1]
        print(f"rank {rank}, {moment - cut:.1f} s after the cut: {kind}: {last}")
        assert kind == "PipelineTimeoutError"
        assert f"no answer within 4 s: rank {1 - rank}" in last
        assert moment - cut < 4 + 10


def _wait_for(file: Path, seconds: float, processes: list[subprocess.Popen[str]], folder: Path) -> None:
    end = time.monotonic() + seconds
    while not file.exists() or not file.read_text():
        logs = "\n".join((folder / f"log.{host}").read_text()[-3000:] for host in range(2))
        assert time.monotonic() < end, f"no {file.name} after {seconds} s:\n{logs}"
        assert any(process.poll() is None for process in processes), logs
        time.sleep(0.1)


def test_delay_costs_what_the_simulator_says(tmp_path: Path, launch: Launch) -> None:
    delay = 0.03
    with two_hosts(delay) as hosts:
        _finish(launch(hosts, "timed"), tmp_path, 110)
    measured = min(json.loads((tmp_path / "out.0").read_text())[1:])
    program = lower(build(parse_schedule("1f1b"), ranks=2, microbatches=6))
    costs = CostModel(forward=0.04, backward_input=0.04, backward_weight=0.04, hop_latency=delay)
    expected = simulate(program, costs).makespan
    alone = simulate(program, CostModel(forward=0.04, backward_input=0.04, backward_weight=0.04)).makespan
    print(f"measured {measured:.4f} s, simulated {expected:.4f} s, without delay {alone:.4f} s")
    assert measured == pytest.approx(expected, rel=0.1)
