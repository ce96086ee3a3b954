"""When the actions of a step ended: by the host's clock, or by the accelerator's, whose kernels run behind the host."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any, Protocol

import torch


class Clock(Protocol):
    """Marks moments; what they were, in seconds of `time.perf_counter`, is told later."""

    def now(self) -> Any: ...
    def seconds(self, marks: Sequence[Any]) -> list[float]: ...


class HostClock:
    """Marks are the seconds themselves."""

    now = staticmethod(time.perf_counter)

    def seconds(self, marks: Sequence[float]) -> list[float]:
        """The marks."""
        return list(marks)


class DeviceClock:
    """Marks are events in the current stream of `device`, so nobody waits for them before they are read."""

    def __init__(self, device: torch.device):
        self.device = device

    def now(self) -> torch.Event:
        """An event behind all that is queued so far."""
        event = torch.Event(self.device, enable_timing=True)
        event.record()
        return event

    def seconds(self, marks: Sequence[torch.Event]) -> list[float]:
        """When the device came to each mark. Waits until it has done all that is queued."""
        last = self.now()
        torch.accelerator.synchronize(self.device)
        host, first = time.perf_counter(), marks[0]
        length = first.elapsed_time(last)
        return [host - (length - first.elapsed_time(mark)) / 1e3 for mark in marks]


def clock_of(device: torch.device) -> Clock:
    """The clock by which work on `device` is measured."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return DeviceClock(device) if accelerator is not None and device.type == accelerator.type else HostClock()


class Record:
    """When each action of one step ended: each began where the one before it ended, the first when this was made.

    The executor appends: to `ends` a mark for each action, to `waits` (index of the action, mark before, mark after)
    for each wait for a message.
    """

    def __init__(self, clock: Clock):
        self._clock, self.now = clock, clock.now
        self.begun = clock.now()
        self.ends: list[Any] = []
        self.waits: list[tuple[int, Any, Any]] = []

    def spans(self) -> list[tuple[float, float]]:
        """Start and end of each action, in seconds of `time.perf_counter`."""
        moments = self._moments[: len(self.ends) + 1]
        return list(pairwise(moments))

    @cached_property
    def waited(self) -> dict[int, float]:
        """Seconds that an action, by index, waited for its messages."""
        found: dict[int, float] = {}
        marks = iter(self._moments[len(self.ends) + 1 :])
        for index, _, _ in self.waits:
            before, after = next(marks), next(marks)
            found[index] = found.get(index, 0.0) + after - before
        return found

    @cached_property
    def _moments(self) -> list[float]:
        waits = [mark for _, before, after in self.waits for mark in (before, after)]
        return self._clock.seconds([self.begun, *self.ends, *waits])
