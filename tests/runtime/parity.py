"""The reference of all runtime tests: one process that runs the same microbatches in the same order."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from hocket import split_microbatch_ranges
from hocket.runtime import PipelineStageInfo, build_schedule

WIDTH = 6


def make_stage(info: PipelineStageInfo) -> nn.Module:
    """A small stage, different for each index, the same wherever it is made."""
    torch.manual_seed(1000 + info.current_stage)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


def mse(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(output, target)


def batches(steps: int, size: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(7)
    return [(torch.randn(size, WIDTH), torch.randn(size, WIDTH)) for _ in range(steps)]


Trained = tuple[list[torch.Tensor], dict[str, torch.Tensor]]
"""The loss of each step, and all parameters under 'stage.name'."""


def train_reference(
    num_stages: int,
    microbatches: int,
    data: list[tuple[torch.Tensor, torch.Tensor]],
    *,
    provider: Callable[[PipelineStageInfo], nn.Module] = make_stage,
    loss_fn: Callable[..., torch.Tensor] = mse,
) -> Trained:
    stages = [provider(PipelineStageInfo(s, num_stages)) for s in range(num_stages)]
    parameters = [p for stage in stages for p in stage.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=1e-2)
    losses = []
    for inputs, targets in data:
        optimizer.zero_grad()
        total = torch.zeros(())
        for index, items in enumerate(split_microbatch_ranges(len(inputs), microbatches)):
            output = inputs[items.start : items.stop]
            for stage in stages:
                output = stage(output)
            loss = loss_fn(output, targets[items.start : items.stop])
            weight = len(items) / len(inputs)
            (loss * weight).backward()
            total = loss.detach() * weight if index == 0 else total + loss.detach() * weight
        optimizer.step()
        losses.append(total)
    return losses, named(dict(enumerate(stages)))


def named(stages: Mapping[int, nn.Module]) -> dict[str, torch.Tensor]:
    return {f"{s}.{name}": p.detach().clone() for s, stage in stages.items() for name, p in stage.named_parameters()}


def train_pipeline(
    mesh: Any,
    config: Any,
    microbatches: int,
    data: list[tuple[torch.Tensor, torch.Tensor]],
    *,
    provider: Callable[[PipelineStageInfo], nn.Module] = make_stage,
    loss_fn: Callable[..., torch.Tensor] = mse,
) -> Trained:
    """Train this rank's stages; the losses are those shared by the last stage's rank."""
    info, modules = build_schedule(mesh, microbatches, config, provider, loss_fn)
    schedule = info.schedule
    optimizer = torch.optim.AdamW([p for m in modules for p in m.parameters()], lr=1e-2)
    losses = []
    for inputs, targets in data:
        optimizer.zero_grad()
        result = schedule.step(inputs, targets=targets)
        assert (result.loss is not None) == info.has_last_stage
        losses.append(schedule.share_loss(result).float())
        optimizer.step()
    indices = schedule.program.placement.stages_of(schedule.rank)
    return losses, named(dict(zip(indices, modules, strict=True)))
