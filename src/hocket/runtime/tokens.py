"""Losses per valid token: weights over microbatches and data parallel ranks, so that padding biases nothing.

A mean over microbatches of means over their valid tokens weights a token by how much padding surrounds it. Instead sum
the loss over tokens (`loss_reduction="sum"`, and a loss_fn that sums), and divide once by the number of valid tokens of
the whole batch, over all data parallel ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist

from hocket.errors import ConfigError
from hocket.runtime.groups import gather_numbers
from hocket.runtime.pipeline import PipelineSchedule
from hocket.runtime.result import StepResult


@dataclass(frozen=True)
class TokenCount:
    """The valid tokens of a step's batch, over all data parallel ranks; `loss_scale` is for `step`."""

    tokens: int
    loss_scale: float
    data_parallel: dist.ProcessGroup | None = None

    def mean(self, loss_sum: torch.Tensor) -> torch.Tensor:
        """The loss per valid token of the whole batch, from `share_loss(result)`. Call it on all ranks."""
        rows = gather_numbers([float(loss_sum)], self.data_parallel)
        return torch.tensor(sum(row[0] for row in rows) / max(self.tokens, 1), dtype=torch.float64)


def count_tokens(
    schedule: PipelineSchedule,
    targets: torch.Tensor | None,
    *,
    ignore_index: int = -100,
    data_parallel: dist.ProcessGroup | None = None,
    gradients_averaged: bool = True,
) -> TokenCount:
    """Count the targets that are not `ignore_index`, for a loss per valid token. Call it on all ranks.

    targets: of this data parallel rank's batch; needed where the last stage lives. data_parallel: the group over which
    the batch is divided; None if it is not. gradients_averaged: whether the wrapper around the stages takes the mean of
    gradients over that group, as DistributedDataParallel and fully_shard do; False if gradients are summed.

        count = count_tokens(info.schedule, targets, data_parallel=dp_group)
        result = info.schedule.step(inputs, targets=targets, loss_scale=count.loss_scale)
        loss = count.mean(info.schedule.share_loss(result))

    A batch without a valid token gives loss_scale 0.
    """
    mine = None
    if schedule.rank == schedule.loss_rank:
        usable = isinstance(targets, torch.Tensor)
        mine = (targets != ignore_index).sum() if usable else torch.tensor(math.nan)
    counted = StepResult(schedule.loss_rank, losses=[] if mine is None else [mine], weights=(1.0,))
    replica = float(schedule.share_loss(counted))
    if math.isnan(replica):
        raise ConfigError(
            f"rank {schedule.loss_rank} of the pipeline holds the last stage, but its targets are no tensor; pass "
            "count_tokens the targets there"
        )
    rows = gather_numbers([replica], data_parallel)
    tokens = int(sum(row[0] for row in rows))
    replicas = len(rows) if gradients_averaged else 1
    return TokenCount(tokens, replicas / tokens if tokens else 0.0, data_parallel)
