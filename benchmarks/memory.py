"""What a step holds: live activations over the schedule's own count, and what stays after it.

    python benchmarks/memory.py

1F1B, 4 ranks, 32 microbatches. Each stage saves one marked tensor a microbatch; weak references count those alive at
every action. Beside it torch's schedule, and the receive buffers that each holds. After the step nothing may be left.
"""

from __future__ import annotations

import gc
import weakref
from typing import Any

import torch
from harness import machine, run_distributed, table, torch_schedule
from torch import nn

from hocket import simulate
from hocket.runtime import build_schedule

RANKS, COUNT, WIDTH, ROWS = 4, 32, 1024, 64
BYTES = WIDTH * ROWS * 4


_alive: weakref.WeakSet[_Token] = weakref.WeakSet()


class _Keep(torch.autograd.Function):
    """Saves a copy of its input for backward, and lets it be counted."""

    peak = 0

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        kept = x.clone()
        ctx.save_for_backward(kept, scale)
        ctx.token = _Token()
        _alive.add(ctx.token)
        _Keep.peak = max(_Keep.peak, len(_alive))
        return x * scale

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        kept, scale = ctx.saved_tensors
        return grads[0] * scale, (grads[0] * kept).sum().reshape(1)


class _Token:
    pass


class Holder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Keep.apply(x, self.scale)


def mse(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(output, target)


def _big_tensors() -> int:
    """Live tensors of a message's size, parameters and gradients left out."""
    gc.collect()
    return sum(1 for o in gc.get_objects() if type(o) is torch.Tensor and o.numel() == WIDTH * ROWS)


def measure(rank: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    config = {"schedule": "1f1b"}
    info, _ = build_schedule(None, COUNT, config, lambda info: Holder(), mse)
    program = info.schedule.program
    x, y = torch.randn(COUNT * ROWS, WIDTH), torch.randn(COUNT * ROWS, WIDTH)
    theirs = torch_schedule(config, COUNT, {rank: Holder()}, program.num_stages, mse)
    first, last = info.has_first_stage, info.has_last_stage
    found: dict[str, Any] = {"planned": simulate(program).peak_in_flight[rank]}
    steps = {
        "hocket": lambda: info.schedule.step(x, targets=y),
        "torch": lambda: theirs.step(*([x] if first else []), target=y if last else None),
    }
    before = _big_tensors()
    for name, step in steps.items():
        step()
        _Keep.peak = 0
        step()
        found[name] = _Keep.peak
        now = _big_tensors()
        found[f"{name} left"], before = now - before, now
    return found


def main() -> None:
    print(machine())
    rows = [
        [
            rank,
            f["planned"],
            f["hocket"],
            f"{f['hocket'] / f['planned']:.2f}",
            f["torch"],
            f["hocket left"],
            f["torch left"],
        ]
        for rank, f in enumerate(run_distributed(measure, RANKS, timeout=300))
    ]
    head = ["rank", "planned", "hocket peak", "/planned", "torch peak", "hocket kept after", "torch kept after"]
    print(table(head, rows))


if __name__ == "__main__":
    main()
