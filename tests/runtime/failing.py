"""Pipelines that are made to fail: a training run with one fault in it, and what became of each rank."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from distributed import run_distributed
from hocket.runtime import PipelineStageInfo, build_schedule

WIDTH = 6
MICROBATCHES = 4


@dataclass
class Fault:
    """What goes wrong: `what` on `rank`, in the compute action of `op`, `stage` and `microbatch` of step `step`.

    what: raise, exit, kill, stop, loop, sleep; where: stage, loss, hook, provider.
    """

    what: str = "raise"
    where: str = "stage"
    rank: int = 1
    step: int = 1
    microbatch: int = 2
    op: str = "F"
    seconds: float = 60.0

    def strike(self) -> None:
        """Do it."""
        match self.what:
            case "raise":
                raise ValueError("boom: 17 is no token")
            case "exit":
                os._exit(3)
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "stop":
                _store().set("stopped", str(os.getpid()))
                os.kill(os.getpid(), signal.SIGSTOP)
            case "sleep":
                time.sleep(self.seconds)
            case "loop":
                end = time.monotonic() + self.seconds
                while time.monotonic() < end:
                    pass


@dataclass
class Told:
    """What a rank raised: the type's name, the message, seconds from the fault, and its process."""

    kind: str
    text: str
    seconds: float
    pid: int


class Fragile(nn.Module):
    """A layer that strikes at the given call of its forward, or of its backward."""

    def __init__(self, info: PipelineStageInfo, rank: int, fault: Fault):
        super().__init__()
        torch.manual_seed(info.current_stage)
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.fault = fault if fault.rank == rank and fault.where == "stage" else None
        self.calls = {"F": 0, "B": 0}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self._count("F")
        y = self.layer(x)
        if y.requires_grad:
            y.register_hook(lambda grad: self._count("B"))
        return y

    def _count(self, op: str) -> None:
        fault = self.fault
        if fault and fault.op == op and self.calls[op] == fault.step * MICROBATCHES + fault.microbatch:
            clock(write=True)
            fault.strike()
        self.calls[op] += 1


def clock(*, write: bool = False) -> float:
    """Seconds since the fault; `write` sets them to 0."""
    store = _store()
    if write:
        store.set("fault", str(time.time()))
        return 0.0
    return time.time() - float(store.get("fault")) if store.check(["fault"]) else 0.0


def train(rank: int, fault: Fault, config: Any = "1f1b", timeout: float = 20.0, steps: int = 4) -> Told | None:
    """Train with one fault; what this rank raised, or None if it came to the end."""

    def provider(info: PipelineStageInfo) -> nn.Module:
        if fault.where == "provider" and fault.rank == rank:
            fault.strike()
        return Fragile(info, rank, fault)

    struck = False

    def strike_once() -> None:
        nonlocal struck
        if schedule.steps == fault.step and not struck:
            struck = True
            clock(write=True)
            fault.strike()

    def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if fault.where == "loss":
            strike_once()
        return (output - target).square().mean()

    def hook(when: str, action: Any, values: Any) -> None:
        strike_once()

    try:
        info, _ = build_schedule(None, MICROBATCHES, config, provider, loss_fn, timeout=timeout)
        schedule = info.schedule
        if fault.where == "hook" and fault.rank == rank:
            schedule.add_hook(hook)
        torch.manual_seed(0)
        for step in range(steps):
            if fault.where == "between" and fault.rank == rank and step == fault.step:
                clock(write=True)
                fault.strike()
            x = torch.randn(8, WIDTH)
            schedule.step(x, targets=x)
    except Exception as error:
        told = Told(type(error).__name__, str(error), clock(), os.getpid())
        _end_stopped()
        return told
    return None


def _end_stopped() -> None:
    """Kill a process that a fault has stopped, so that the test need not wait for it."""
    if _store().check(["stopped"]):
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(_store().get("stopped")), signal.SIGKILL)


def _store() -> dist.Store:
    return dist.distributed_c10d._get_default_store()


def fates(
    ranks: int,
    fault: Fault,
    run: Callable[..., Told | None] = train,
    limit: float = 45.0,
    **arguments: Any,
) -> list[Told | int | None]:
    """What became of each rank: what it raised, its exit code if it died, or None if it ended well.

    Fails if a rank still runs after `limit` seconds.
    """
    outcomes = run_distributed(_call, ranks, run, fault, arguments, timeout=limit, check=False)
    hung = [outcome for outcome in outcomes if outcome.stack is not None]
    assert not hung, f"ranks {[o.rank for o in hung]} hang after {limit} s, with {fault}:\n{hung[0].stack}"
    broken = [outcome for outcome in outcomes if outcome.traceback]
    assert not broken, broken[0].traceback
    return [outcome.value if outcome.done else outcome.exitcode for outcome in outcomes]


def _call(rank: int, run: Callable[..., Told | None], fault: Fault, arguments: dict[str, Any]) -> Told | None:
    return run(rank, fault, **arguments)


def last_line(told: Told | int | None) -> str:
    """The last line of what a rank raised."""
    assert isinstance(told, Told), told
    return told.text.splitlines()[-1]
