"""Checkpoints: any optimizer and scheduler, ranks with nothing to train, and full state dicts of the whole model."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from distributed import run_distributed
from hocket import ConfigError
from hocket.runtime import (
    PipelineStageInfo,
    build_schedule,
    load_checkpoint,
    load_full_state_dict,
    parameter_groups,
    save_checkpoint,
)
from runtime.language import Part, loss_fn, tokens, weights
from runtime.resuming import INTERLEAVED, ONE_F_ONE_B, TIED, Weights, merged, train, whole

# ---- other optimizers, ranks with nothing to train -------------------------------------------------------------------

OPTIMIZERS: list[Any] = [
    partial(torch.optim.SGD, lr=0.01, momentum=0.9),
    partial(torch.optim.SGD, lr=0.01),
    partial(torch.optim.Adagrad, lr=0.01),
    partial(torch.optim.NAdam, lr=0.01),
    partial(torch.optim.Adafactor, lr=0.01),
    partial(torch.optim.AdamW, lr=torch.tensor(0.01), amsgrad=True),
]


def _resume_with(rank: int, path: Path) -> list[tuple[list[float], list[float]]]:
    found = []
    for number, make in enumerate(OPTIMIZERS):
        runs = []
        for resume in (False, True):
            info, modules = build_schedule(None, 2, "1f1b", Part, loss_fn, tied=TIED)
            optimizer = make(parameter_groups(modules))
            scheduler = torch.optim.lr_scheduler.SequentialLR(
                optimizer,
                [
                    torch.optim.lr_scheduler.ConstantLR(optimizer, 0.5, 2),
                    torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 2]),
                ],
                milestones=[2],
            )
            started = (info, modules, optimizer, scheduler)
            what: Any = {"schedule": info.schedule, "optimizer": optimizer, "lr_scheduler": scheduler}
            if resume:
                load_checkpoint(path / str(number), modules, **what)
            else:
                train(started, range(2))
                save_checkpoint(path / str(number), modules, **what)
            runs.append(train(started, range(2, 4)))
        found.append((runs[0], runs[1]))
    return found


def test_any_optimizer(tmp_path: Path) -> None:
    for first, second in run_distributed(_resume_with, 2, tmp_path)[0]:
        assert first == second


def _two_optimizers(rank: int, path: Path, config: Any, resume: bool) -> list[float]:
    """Matrices and vectors in optimizers of their own, and no empty groups: so other groups on each rank."""
    info, modules = build_schedule(None, 2, config, Part, loss_fn)
    named = [(n, p) for m in modules for n, p in m.named_parameters()]
    matrices = [[p for n, p in named if p.ndim > 1 and key in n] for key in ("up", "down", "e")]
    matrices[2] = [p for n, p in named if n in ("embed.weight", "lm_head.weight")]
    first = torch.optim.AdamW([{"params": g, "lr": 0.01 * (i + 1)} for i, g in enumerate(matrices) if g])
    second = torch.optim.SGD([p for _, p in named if p.ndim == 1], lr=0.05, momentum=0.9)
    optimizers = [first, second]
    schedulers = [
        torch.optim.lr_scheduler.CosineAnnealingLR(first, 8),
        torch.optim.lr_scheduler.LambdaLR(second, lambda s: 1 / (s + 1)),
    ]
    what: Any = {"schedule": info.schedule, "optimizer": optimizers, "lr_scheduler": schedulers}
    if resume:
        load_checkpoint(path, modules, **what)
    losses = []
    for step in range(2 if resume else 0, 4):
        x, y = tokens(8, step)
        losses.append(float(info.schedule.share_loss(info.schedule.step(x, targets=y))))
        for each in [*optimizers, *schedulers]:
            each.step()
        for each in optimizers:
            each.zero_grad()
        if step == 1:
            save_checkpoint(path, modules, **what)
    return losses[-2:]


def test_several_optimizers_whose_groups_differ_by_rank(tmp_path: Path) -> None:
    losses = run_distributed(_two_optimizers, 2, tmp_path, INTERLEAVED, False)[0]
    assert run_distributed(_two_optimizers, 2, tmp_path, INTERLEAVED, True)[0] == losses
    for ranks in (1, 3):
        resumed = run_distributed(_two_optimizers, ranks, tmp_path, "1f1b", True)[0]
        assert resumed == pytest.approx(losses, rel=1e-6)


def _frozen(rank: int, path: Path) -> tuple[list[float], list[float], int]:
    def provider(info: PipelineStageInfo) -> Part:
        return Part(info).requires_grad_(not info.is_first)

    runs = []
    for resume in (False, True):
        info, modules = build_schedule(None, 2, "1f1b", provider, loss_fn)
        optimizer = torch.optim.AdamW(parameter_groups(modules), lr=0.01)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
        started = (info, modules, optimizer, scheduler)
        what: Any = {"schedule": info.schedule, "optimizer": optimizer, "lr_scheduler": scheduler}
        if resume:
            load_checkpoint(path, modules, **what)
        else:
            train(started, range(2))
            save_checkpoint(path, modules, **what)
        runs.append(train(started, range(2, 4)))
    return runs[0], runs[1], sum(len(g["params"]) for g in optimizer.param_groups)


def test_p64_a_rank_with_nothing_to_train(tmp_path: Path) -> None:
    rows = run_distributed(_frozen, 2, tmp_path)
    assert rows[0][0] == rows[0][1] == rows[1][0] == rows[1][1]
    assert rows[0][2] == 0 < rows[1][2]


# ---- full state dicts ------------------------------------------------------------------------------------------------


def _full(rank: int, state: Weights, config: Any, tied: Any, strict: bool) -> tuple[Weights, list[str]]:
    _, modules = build_schedule(None, 4, config, Part, loss_fn, tied=tied)
    ignored = load_full_state_dict(modules, state, strict=strict)
    return weights(modules), ignored


@pytest.mark.parametrize("config", [ONE_F_ONE_B, "zero_bubble_v"])
def test_p92_p63_full_state_dict(config: Any) -> None:
    state = {name: torch.randn_like(value) for name, value in whole().named_parameters()}
    rows = run_distributed(
        _full, 3 if config == ONE_F_ONE_B else 2, {**state, "rotary": torch.ones(1)}, config, TIED, False
    )
    found = merged(rows)
    assert all(found[name].equal(value) for name, value in state.items())
    assert found["lm_head.weight"].equal(state["embed.weight"])
    assert {tuple(row[1]) for row in rows} == {("rotary",)}


def _full_misfit(rank: int, state: Weights) -> str:
    _, modules = build_schedule(None, 4, "gpipe", Part, loss_fn)
    with pytest.raises(ConfigError) as caught:
        load_full_state_dict(modules, state)
    return str(caught.value)


def test_p92_missing_and_extra_names_raise_on_all_ranks() -> None:
    state = dict(whole().named_parameters()) | {"rotary": torch.ones(1)}
    del state["layers.1.up.weight"]
    texts = run_distributed(_full_misfit, 2, {name: value.detach() for name, value in state.items()})
    assert texts[0] == texts[1]
    assert "missing in the state dict: 'layers.1.up.weight', 'lm_head.weight'" in texts[0]
    assert "in the state dict, but in no stage: 'rotary'" in texts[0]
