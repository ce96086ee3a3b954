"""The measured step: every action on every rank, no shorter than the simulated one, readable by `hocket draw`."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import nn

from distributed import run_distributed
from hocket import ConfigError, CostModel, simulate
from hocket.draw import read_trace
from hocket.runtime import PipelineStageInfo, build_schedule
from hocket.runtime.record import DeviceClock, Record, clock_of
from runtime.parity import WIDTH, batches, mse

NAP = 0.02


class _Nap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        time.sleep(NAP)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        time.sleep(2 * NAP)
        return grads[0]


class Sleeper(nn.Module):
    """Sleeps in forward and twice as long in backward; its parameter comes first, so that backward always runs."""

    def __init__(self, info: PipelineStageInfo):
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Nap.apply(x + self.shift)


def _traced(rank: int) -> tuple[Any, Any, str, str]:
    info, _ = build_schedule(None, 4, "1f1b", Sleeper, mse)
    with pytest.raises(ConfigError, match="no step has run yet"):
        info.schedule.trace()
    x, y = batches(1, 8)[0]
    for _ in range(2):
        result = info.schedule.step(x, targets=y)
    mine, everyone = info.schedule.trace(), info.schedule.trace(all_ranks=True)
    assert {e.rank for e in mine.events} == {rank}
    assert result.busy_seconds + result.wait_seconds <= result.seconds
    assert result.busy_seconds == pytest.approx(mine.busy(rank), rel=0.05)
    return everyone.events, everyone.makespan, everyone.report(), everyone.to_chrome()


def test_p106_trace_of_all_ranks_is_near_the_simulation() -> None:
    (events, makespan, report, chrome), other = run_distributed(_traced, 2)
    assert [e.action for e in events] == [e.action for e in other[0]]
    expected = sorted(f"{s}{op}{m}" for s in range(2) for op in "FB" for m in range(4))
    assert sorted(str(e.action) for e in events) == expected
    assert all(e.end - e.start >= NAP * (1 if e.action.op == 0 else 2) for e in events)
    # Sleeping is exact enough that a wrong order or a lost wait would show; a slow machine only makes it longer.
    assert makespan >= 0.99 * 5 * 3 * NAP
    assert "rank 0: busy" in report
    assert "x the simulated" in report
    assert [str(e.action) for e in read_trace(chrome) if e.rank == 0] == [str(e.action) for e in events if e.rank == 0]


def test_simulated_bubble_of_that_program() -> None:
    from hocket import Interleaved1F1BConfig, build

    program = build(Interleaved1F1BConfig(), ranks=2, microbatches=4)
    costs = CostModel(forward=NAP, backward_input=NAP, backward_weight=NAP)
    assert simulate(program, costs).makespan == pytest.approx(5 * 3 * NAP)


class _Device:
    """A device whose work begins when the host is at 100 s, and is known only when somebody waits for it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.host, self.work, self.waited = 100.0, 0.0, 0
        device = self

        class Event:
            def __init__(self, at: torch.device, *, enable_timing: bool):
                assert at == torch.device("cuda")
                assert enable_timing

            def record(self) -> None:
                self.at = device.work

            def elapsed_time(self, other: Any) -> float:
                return (other.at - self.at) * 1e3

        def synchronize(at: torch.device) -> None:
            device.waited += 1
            device.host = max(device.host, 100.0 + device.work)

        monkeypatch.setattr(torch, "Event", Event)
        monkeypatch.setattr(torch.accelerator, "synchronize", synchronize)
        monkeypatch.setattr(time, "perf_counter", lambda: device.host)


def test_on_a_device_its_own_time_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host queues three actions at once; the device takes 1, 2 and 4 seconds, and waits 0.5 in the second."""
    device = _Device(monkeypatch)
    record = Record(DeviceClock(torch.device("cuda")))
    device.work += 1
    record.ends.append(record.now())
    before = record.now()
    device.work += 0.5
    record.waits.append((1, before, record.now()))
    for seconds in (1.5, 4):
        device.work += seconds
        record.ends.append(record.now())
    assert device.waited == 0
    assert record.spans() == [(100, 101), (101, 103), (103, 107)]
    assert record.waited == {1: 0.5}
    assert device.waited == 1


def test_without_an_accelerator_the_host_counts() -> None:
    if torch.accelerator.is_available():
        pytest.skip("this machine has an accelerator")
    for name in ("cpu", "meta"):
        record = Record(clock_of(torch.device(name)))
        record.ends.append(record.now())
        ((start, end),) = record.spans()
        assert start <= end <= time.perf_counter()
