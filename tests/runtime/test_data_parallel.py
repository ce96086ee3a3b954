"""Stages wrapped by DistributedDataParallel or fully_shard: right gradients, one reduction a step, current weights."""

from __future__ import annotations

from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from distributed import run_distributed
from hocket import ConfigError
from hocket.runtime import (
    PipelineStageInfo,
    build_schedule,
    clip_grad_norm_,
    load_checkpoint,
    load_full_state_dict,
    parameter_groups,
    save_checkpoint,
)
from runtime.language import Part, loss_fn, tokens

TIED = {"lm_head.weight": "embed.weight"}
SCHEDULES = ["1f1b", {"schedule": "1f1b", "zero_bubble": True}, "zero_bubble_v"]
WAYS = ["ddp", "fsdp", "fsdp layers"]
BATCH = 16


def _mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))


def _wrapped(mesh: DeviceMesh, way: str, info: PipelineStageInfo) -> nn.Module:
    part = Part(info)
    if way == "ddp":
        return DistributedDataParallel(part, process_group=mesh.get_group("dp"))
    if way == "fsdp layers":
        for layer in part.layers.values():
            fully_shard(layer, mesh=mesh["dp"])
    fully_shard(part, mesh=mesh["dp"])
    return part


def _half(mesh: DeviceMesh, step: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """This data parallel rank's half of the batch."""
    x, y = tokens(BATCH, step)
    first = BATCH // 2 * mesh.get_local_rank("dp")
    return x[first : first + BATCH // 2], y[first : first + BATCH // 2]


def _full(value: torch.Tensor) -> torch.Tensor:
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()


def _named(modules: list[nn.Module], gradients: bool) -> dict[str, torch.Tensor]:
    return {
        name.removeprefix("module."): _full(p.grad if gradients and p.grad is not None else p)
        for module in modules
        for name, p in module.named_parameters()
    }


def _counting(counts: Counter[str]) -> None:
    """Count the collectives of fully_shard from now on, in this process."""
    # torch 2.13 has new names for the two that fully_shard calls.
    for name in ("all_gather", "reduce_scatter"):
        old = {"all_gather": "all_gather_into_tensor", "reduce_scatter": "reduce_scatter_tensor"}[name]
        found = f"{name}_single" if hasattr(dist, f"{name}_single") else old
        original = getattr(dist, found)

        def counted(*args: Any, _name: str = name, _original: Any = original, **kwargs: Any) -> Any:
            counts[_name] += 1
            return _original(*args, **kwargs)

        setattr(dist, found, counted)


def _train(rank: int, way: str, config: Any, tied: dict[str, str] | None, steps: int) -> Any:
    mesh = _mesh()
    info, modules = build_schedule(mesh, 4, config, partial(_wrapped, mesh, way), loss_fn, tied=tied)
    optimizer = torch.optim.AdamW(parameter_groups(modules), lr=0.01)
    norms = []
    for step in range(steps):
        optimizer.zero_grad()
        x, y = _half(mesh, step)
        info.schedule.step(x, targets=y)
        found = _named(modules, True)
        # Between step and optimizer, where a stale copy of the weights would be left behind.
        info.schedule.evaluate(x, targets=y)
        norms.append(float(clip_grad_norm_(modules, 0.5, mesh)))
        optimizer.step()
    return found, norms, _named(modules, False), info.schedule.describe()


def _reference(tied: bool, steps: int) -> tuple[dict[str, torch.Tensor], list[float], dict[str, torch.Tensor]]:
    model = Part(PipelineStageInfo(0, 1))
    if tied:
        model.lm_head.weight = model.embed.weight
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    norms = []
    for step in range(steps):
        optimizer.zero_grad()
        x, y = tokens(BATCH, step)
        loss_fn(model(x), y).backward()
        found = _named([model], True)
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
    return found, norms, _named([model], False)


# All three ways under zero bubble; the rest of the table takes long.
TABLE = [
    pytest.param(way, config, marks=[] if way == "ddp" or config == SCHEDULES[1] else pytest.mark.slow)
    for way in WAYS
    for config in SCHEDULES
]


@pytest.mark.parametrize("way, config", TABLE, ids=str)
def test_p68_p69_wrapped_stages_train_like_one_process(way: str, config: Any) -> None:
    rows = run_distributed(_train, 4, way, config, None, 3)
    gradients, norms, weights = _reference(False, 3)
    mine = {name: value for row in rows for name, value in row[0].items()}
    after = {name: value for row in rows for name, value in row[2].items()}
    assert mine.keys() == gradients.keys()
    for name, value in gradients.items():
        torch.testing.assert_close(mine[name], value, rtol=1e-5, atol=1e-7)
    for name, value in weights.items():
        torch.testing.assert_close(after[name], value, rtol=1e-5, atol=2e-6)
    for row in rows:
        assert row[1] == pytest.approx(norms, rel=1e-5)


@pytest.mark.parametrize("way", ["ddp", pytest.param("fsdp", marks=pytest.mark.slow), "fsdp layers"])
def test_ties_between_wrapped_stages(way: str) -> None:
    rows = run_distributed(_train, 4, way, "1f1b", TIED, 2)
    after = {name: value for row in rows for name, value in row[2].items()}
    assert after["lm_head.weight"].equal(after["embed.weight"])
    for name, value in _reference(True, 2)[2].items():
        torch.testing.assert_close(after[name], value, rtol=1e-5, atol=2e-6)


def _tie_on_one_rank(rank: int) -> str:
    mesh = _mesh()
    with pytest.raises(ConfigError) as caught:
        build_schedule(mesh, 4, "zero_bubble_v", partial(_wrapped, mesh, "ddp"), loss_fn, tied=TIED)
    return str(caught.value)


def test_a_tie_that_a_wrapper_would_not_see_is_refused() -> None:
    assert all("wrapped for data parallelism already" in text for text in run_distributed(_tie_on_one_rank, 4))


def _collectives(rank: int, config: Any) -> Counter[str]:
    mesh = _mesh()
    info, modules = build_schedule(mesh, 8, config, partial(_wrapped, mesh, "fsdp"), loss_fn)
    optimizer = torch.optim.SGD(parameter_groups(modules), lr=0.1)
    counts: Counter[str] = Counter()
    _counting(counts)
    for step in range(3):
        x, y = _half(mesh, step)
        info.schedule.step(x, targets=y)
        optimizer.step()
    return counts


@pytest.mark.parametrize("config", [pytest.param("1f1b", marks=pytest.mark.slow), *SCHEDULES[1:]], ids=str)
def test_p70_one_gather_and_one_reduction_a_step(config: Any) -> None:
    stages = 2 if config == "zero_bubble_v" else 1
    for counts in run_distributed(_collectives, 4, config):
        assert counts == {"all_gather": 3 * stages, "reduce_scatter": 3 * stages}


def _resume(rank: int, path: Path, way: str) -> Any:
    mesh = _mesh()
    runs = []
    for resume in (False, True):
        info, modules = build_schedule(mesh, 4, "1f1b", partial(_wrapped, mesh, way), loss_fn, tied=TIED)
        optimizer = torch.optim.AdamW(parameter_groups(modules), lr=0.01)
        if resume:
            load_checkpoint(path, modules, schedule=info.schedule, optimizer=optimizer)
        losses = []
        for step in range(2 if resume else 0, 4):
            if step == 2 and not resume:
                save_checkpoint(path, modules, schedule=info.schedule, optimizer=optimizer, async_=True).wait()
            x, y = _half(mesh, step)
            optimizer.zero_grad()
            losses.append(float(info.schedule.share_loss(info.schedule.step(x, targets=y))))
            optimizer.step()
        runs.append(losses[-2:])
    return runs


@pytest.mark.parametrize("way", [pytest.param("ddp", marks=pytest.mark.slow), "fsdp layers"])
def test_checkpoints_of_wrapped_stages(way: str, tmp_path: Path) -> None:
    for first, second in run_distributed(_resume, 4, tmp_path, way):
        assert first == second
    model = Part(PipelineStageInfo(0, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    load_checkpoint(tmp_path, model, optimizer=optimizer)
    assert optimizer.state[model.layers["3"].up.weight]["exp_avg"].shape == (16, 8)


def _load_full(rank: int, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    mesh = _mesh()
    _, modules = build_schedule(mesh, 4, "1f1b", partial(_wrapped, mesh, "fsdp layers"), loss_fn)
    load_full_state_dict(modules, state, mesh)
    return _named(modules, False)


def test_full_state_dict_into_shards() -> None:
    state = {n: torch.randn_like(p) for n, p in Part(PipelineStageInfo(0, 1)).named_parameters()}
    rows = run_distributed(_load_full, 4, state)
    found = {name: value for row in rows for name, value in row.items()}
    assert all(found[name].equal(value) for name, value in state.items())


def _buffers(rank: int) -> list[float]:
    mesh = _mesh()

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)
            self.register_buffer("count", torch.zeros(()) + dist.get_rank())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count += 1
            return self.layer(x)

    def provider(info: PipelineStageInfo) -> nn.Module:
        return DistributedDataParallel(Counting(), process_group=mesh.get_group("dp"))

    info, modules = build_schedule(mesh, 2, "1f1b", provider, lambda out, index: out.mean())
    with torch.no_grad():
        modules[0].module.count.add_(100 * mesh.get_local_rank("dp"))
    for _ in range(2):
        info.schedule.step(torch.ones(2, 2))
    return [float(modules[0].module.count)]


def test_ddp_buffers_follow_the_first_replica() -> None:
    rows = run_distributed(_buffers, 4)
    assert rows[0] == rows[1]
    assert rows[2] == rows[3]
