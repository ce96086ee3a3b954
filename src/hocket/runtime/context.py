"""Where a stage's code runs right now: stage, microbatch, step, and what its loss counts.

Kept in one plain variable and not in thread-local state: on accelerators autograd recomputes checkpointed layers in
threads of its own, and they must see the microbatch for which backward runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(slots=True)
class StepContext:
    """What is the same for a whole step. `weights[i]` is what microbatch i counts in the batch's loss; `scale`
    multiplies before backward; `report(stage, microbatch, name, value)` notes an auxiliary loss.
    """

    step: int
    seed: int
    weights: list[float]
    scale: float | torch.Tensor
    report: Callable[[int, int, str, Any], None]


@dataclass(slots=True)
class Place:
    """A microbatch on a stage of this rank; `recording` is False in backward, where forward may be run again."""

    step: StepContext
    stage: int
    microbatch: int
    recording: bool


_here: Place | None = None


def enter(place: Place | None) -> None:
    """Say where the code that runs next stands; None when a step ends."""
    global _here
    _here = place


def here() -> Place | None:
    """Where this code runs, or None outside a step."""
    return _here
