"""Runs to save and to resume, for the tests of checkpoints."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from hocket.runtime import PipelineStageInfo, build_schedule, parameter_groups
from runtime.language import Part, loss_fn, tokens

TIED = {"lm_head.weight": "embed.weight"}
ONE_F_ONE_B = {"schedule": "1f1b"}
INTERLEAVED = {"schedule": "1f1b", "num_stages_per_rank": 2}
Weights = dict[str, torch.Tensor]


def start(config: Any, tied: dict[str, str] | None = TIED, dropout: float = 0.1) -> tuple[Any, Any, Any, Any]:
    info, modules = build_schedule(None, 4, config, partial(Part, dropout=dropout), loss_fn, tied=tied, seed=3)
    groups = parameter_groups(modules, [("*.bias", {"weight_decay": 0.0}), ("embed.*", {"lr": 0.02})])
    optimizer = torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, [0.01, 0.02, 0.01], total_steps=20)
    return info, modules, optimizer, scheduler


def train(started: tuple[Any, Any, Any, Any], steps: range) -> list[float]:
    info, _, optimizer, scheduler = started
    losses = []
    for step in steps:
        x, y = tokens(8, step)
        optimizer.zero_grad()
        losses.append(float(info.schedule.share_loss(info.schedule.step(x, targets=y))))
        optimizer.step()
        scheduler.step()
    return losses


def merged(rows: list[Any]) -> Weights:
    return {name: value for row in rows for name, value in row[0].items()}


def whole() -> Part:
    model = Part(PipelineStageInfo(0, 1))
    model.lm_head.weight = model.embed.weight
    return model
