"""On GPUs: no host synchronization within a step, messages beside computation, and the parameters of one process.

Skipped where there is no GPU; those over NCCL need one GPU for each rank.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from distributed import run_distributed
from hocket.runtime import PipelineStageInfo, build_schedule

pytestmark = pytest.mark.gpu

WIDTH, LAYERS, COUNT = 512, 8, 8
CONFIGS = [
    {"schedule": "gpipe"},
    {"schedule": "1f1b"},
    {"schedule": "1f1b", "num_stages_per_rank": 2, "zero_bubble": True},
    {"schedule": "zero_bubble_v"},
    {"schedule": "dual_pipe_v"},
]
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def _layers(info: PipelineStageInfo) -> nn.Module:
    made = []
    for index in info.layers(LAYERS):
        torch.manual_seed(index)
        made += [nn.Linear(WIDTH, WIDTH), nn.Tanh()]
    return nn.Sequential(*made).cuda()


def _mse(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(output, target)


def _data() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(99)
    return torch.randn(COUNT * 64, WIDTH).cuda(), torch.randn(COUNT * 64, WIDTH).cuda()


def _reference() -> dict[str, torch.Tensor]:
    model, (x, y) = _layers(PipelineStageInfo(0, 1)), _data()
    for a, b in zip(x.chunk(COUNT), y.chunk(COUNT), strict=True):
        (_mse(model(a), b) / COUNT).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@needs_gpu
@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: " ".join(map(str, c.values())))
def test_a_step_never_waits_for_the_device(config: dict[str, Any]) -> None:
    """One rank: what the executor, the split backward and the loss do is queued, and the trace is the device's."""
    info, modules = build_schedule(None, COUNT, config, _layers, _mse)
    x, y = _data()
    info.schedule.step(x, targets=y)
    for module in modules:
        module.zero_grad()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        result = info.schedule.step(x, targets=y)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert result.loss is not None
    expected = list(_reference().values())
    found = [p.grad for module in modules for p in module.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    trace = info.schedule.trace()
    assert trace.makespan > 0
    assert trace.busy(0) <= trace.makespan * 1.001


def _train(rank: int, config: dict[str, Any], folder: str) -> tuple[list[torch.Tensor], list[dict[str, Any]]]:
    torch.cuda.set_device(rank)
    info, modules = build_schedule(None, COUNT, config, _layers, _mse)
    x, y = _data()
    for _ in range(2):
        for module in modules:
            module.zero_grad()
        info.schedule.step(x, targets=y)
    grads = [p.grad.cpu().clone() for module in modules for p in module.parameters() if p.grad is not None]
    with torch.profiler.profile() as profile:
        info.schedule.step(x, targets=y)
    file = Path(folder) / f"{rank}.json"
    profile.export_chrome_trace(str(file))
    return grads, json.loads(file.read_text())["traceEvents"]


@needs_two
@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: " ".join(map(str, c.values())))
def test_nccl_equals_one_process_and_overlaps(config: dict[str, Any], tmp_path: Path) -> None:
    """Messages run on streams of their own, and the host calls nothing that waits for the device until the end."""
    rows = run_distributed(_train, 2, config, str(tmp_path), backend="nccl", timeout=120)
    expected = _reference()
    found = [grad for grads, _ in rows for grad in grads]
    key = lambda t: (tuple(t.shape), float(t.double().sum()))  # noqa: E731
    for a, b in zip(sorted(found, key=key), sorted((g.cpu() for g in expected.values()), key=key), strict=True):
        assert torch.equal(a, b)
    for _, events in rows:
        kernels = [e for e in events if e.get("cat") == "kernel"]
        lanes = {e["args"]["stream"] for e in kernels if "nccl" in e["name"].lower()}
        compute = {e["args"]["stream"] for e in kernels if "nccl" not in e["name"].lower()}
        assert lanes
        assert not lanes & compute
        waits = ("cudaStreamSynchronize", "cudaEventSynchronize", "cudaMemcpy")
        step = [e for e in events if e.get("cat") == "cuda_runtime" and e["name"] in waits]
        assert not step, [e["name"] for e in step]
