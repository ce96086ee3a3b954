"""What test_two_hosts runs on each host: `train`, `endless` until the line is cut, or `timed` with sleeping stages."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

sys.path[:0] = [str(Path(__file__).parents[1])]
from hocket.errors import PipelineError  # noqa: E402
from hocket.runtime import PipelineStageInfo, build_schedule, init_process_group  # noqa: E402
from runtime.parity import batches, make_stage, mse, train_pipeline  # noqa: E402

FORWARD, BACKWARD = 0.04, 0.08


class _Sleeps(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        time.sleep(FORWARD)
        return x + 1

    @staticmethod
    def backward(ctx: object, *grads: torch.Tensor) -> torch.Tensor:
        time.sleep(BACKWARD)
        return grads[0]


class Sleeper(nn.Module):
    def __init__(self, info: PipelineStageInfo):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Sleeps.apply(x * self.weight)


def train(out: Path) -> None:
    losses, parameters = train_pipeline(None, "1f1b", 4, batches(3, 16))
    torch.save((losses, parameters), out)


def endless(out: Path) -> None:
    schedule = build_schedule(None, 4, "1f1b", make_stage, mse, timeout=4)[0].schedule
    (x, y), *_ = batches(1, 16)
    try:
        while True:
            schedule.step(x, targets=y)
            Path(f"{out}.alive").write_text(str(schedule.steps))
            time.sleep(0.01)
    except PipelineError as error:
        out.write_text(json.dumps([type(error).__name__, str(error), time.time()]))
        raise


def timed(out: Path) -> None:
    schedule = build_schedule(None, 6, "1f1b", Sleeper, mse, timeout=60)[0].schedule
    x = torch.zeros(12, 4)
    seconds = []
    for _ in range(6):
        dist.barrier()
        schedule.step(x, targets=x)
        seconds.append(schedule.trace(all_ranks=True).makespan)
    out.write_text(json.dumps(seconds))


if __name__ == "__main__":
    init_process_group("gloo", join_timeout=60)
    {"train": train, "endless": endless, "timed": timed}[sys.argv[1]](Path(f"{sys.argv[2]}.{dist.get_rank()}"))
