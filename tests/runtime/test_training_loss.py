"""Losses per valid token, losses on every rank, and what a logger gets; parameter groups and frozen stages."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from distributed import run_distributed
from hocket import ConfigError
from hocket.runtime import (
    PipelineGradScaler,
    PipelineStageInfo,
    build_schedule,
    clip_grad_norm_,
    count_tokens,
    parameter_groups,
)
from runtime.language import Part, gradients, loss_fn, tokens

BATCH = 8


def sum_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


def padded(size: int = BATCH) -> tuple[torch.Tensor, torch.Tensor]:
    """Sequences of very different lengths; the last two have no valid token at all."""
    x, y = tokens(size)
    y = y.clone()
    for row in range(size):
        y[row, max(1, 5 - row) if row < size - 2 else 0 :] = -100
    return x, y


def reference(size: int = BATCH) -> tuple[float, dict[str, torch.Tensor]]:
    """The mean over all valid tokens of the whole batch, in one process."""
    model = Part(PipelineStageInfo(0, 1))
    x, y = padded(size)
    loss = loss_fn(model(x), y)
    loss.backward()
    return loss.item(), gradients([model])


def worst(mine: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """The largest relative error of a gradient."""
    assert mine.keys() == theirs.keys()
    return max(float((mine[n] - theirs[n]).norm() / theirs[n].norm().clamp_min(1e-9)) for n in theirs)


def _per_token(rank: int, config: Any) -> tuple[float, dict[str, torch.Tensor]]:
    info, modules = build_schedule(None, 4, config, Part, sum_loss, loss_reduction="sum")
    x, y = padded()
    count = count_tokens(info.schedule, y if info.has_last_stage else None)
    result = info.schedule.step(x, targets=y, loss_scale=count.loss_scale)
    return float(count.mean(info.schedule.share_loss(result))), gradients(modules)


@pytest.mark.parametrize("config", ["1f1b", "zero_bubble_v"])
def test_p54_loss_per_valid_token(config: Any) -> None:
    rows = run_distributed(_per_token, 2, config)
    loss, grads = reference()
    assert rows[0][0] == rows[1][0] == pytest.approx(loss, abs=1e-6)
    assert worst(rows[0][1] | rows[1][1], grads) < 1e-6


def _per_token_replicas(rank: int, wrapped: bool) -> tuple[float, dict[str, torch.Tensor], int]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    group = mesh.get_group("dp")

    def provider(info: PipelineStageInfo) -> nn.Module:
        return DistributedDataParallel(Part(info), process_group=group) if wrapped else Part(info)

    info, modules = build_schedule(mesh, 2, "1f1b", provider, sum_loss, loss_reduction="sum")
    first = BATCH // 2 * mesh.get_local_rank("dp")
    x, y = (t[first : first + BATCH // 2] for t in padded())
    count = count_tokens(info.schedule, y, data_parallel=group, gradients_averaged=wrapped)
    result = info.schedule.step(x, targets=y, loss_scale=count.loss_scale)
    if not wrapped:
        for module in modules:
            for parameter in module.parameters():
                torch.distributed.all_reduce(parameter.grad, group=group)
    found = gradients([m.module for m in modules] if wrapped else modules)
    return float(count.mean(info.schedule.share_loss(result))), found, count.tokens


@pytest.mark.parametrize("wrapped", [True, False])
def test_p54_loss_per_valid_token_over_data_parallel_ranks(wrapped: bool) -> None:
    rows = run_distributed(_per_token_replicas, 4, wrapped)
    loss, grads = reference()
    assert {row[2] for row in rows} == {int((padded()[1] != -100).sum())}
    assert len({row[0] for row in rows}) == 1
    assert rows[0][0] == pytest.approx(loss, abs=1e-6)
    assert worst({n: v for row in rows for n, v in row[1].items()}, grads) < 1e-6


def _mean_of_means(rank: int) -> tuple[float, dict[str, torch.Tensor]]:
    info, modules = build_schedule(None, 3, "1f1b", Part, loss_fn)
    x, y = (t[:6] for t in padded())
    return float(info.schedule.share_loss(info.schedule.step(x, targets=y))), gradients(modules)


def test_p54_a_mean_of_means_is_biased() -> None:
    rows = run_distributed(_mean_of_means, 2)
    loss, grads = reference()  # the last two sequences have no valid token
    assert abs(rows[0][0] - loss) > 1e-3
    assert worst(rows[0][1] | rows[1][1], grads) > 1e-3


def _no_targets(rank: int) -> str:
    info, _ = build_schedule(None, 2, "1f1b", Part, sum_loss, loss_reduction="sum")
    assert count_tokens(info.schedule, torch.full((2, 2), -100)).loss_scale == 0.0
    with pytest.raises(ConfigError) as caught:
        count_tokens(info.schedule, None)
    return str(caught.value)


def test_count_tokens_without_targets_is_refused_on_all_ranks() -> None:
    assert all("rank 1 of the pipeline holds the last stage" in text for text in run_distributed(_no_targets, 2))


# ---- the loss on every rank, and what a logger gets ------------------------------------------------------------------


def _log(rank: int, config: Any) -> Any:
    def with_metrics(logits: torch.Tensor, targets: torch.Tensor) -> Any:
        return loss_fn(logits, targets), {"accuracy": (logits.argmax(-1) == targets).float().mean()}

    info, _ = build_schedule(None, 4, config, partial(Part, aux=True), with_metrics)
    x, y = tokens(BATCH)
    result = info.schedule.step(x, targets=y)
    shown = None if result.loss is None else result.loss.item()
    assert result.wait_seconds >= 0 < result.busy_seconds
    assert result.busy_seconds + result.wait_seconds <= result.seconds
    return (
        shown,
        len(result.losses),
        result.loss_rank,
        float(info.schedule.share_loss(result)),
        info.schedule.share_metrics(result),
    )


@pytest.mark.parametrize("config, owner", [("1f1b", 1), ("zero_bubble_v", 0), ("dual_pipe_v", 0)])
def test_p82_p83_p106_loss_and_metrics_on_every_rank(config: Any, owner: int) -> None:
    rows = run_distributed(_log, 2, config)
    model = Part(PipelineStageInfo(0, 1))
    x, y = tokens(BATCH)
    with torch.no_grad():
        logits = model(x)
    for rank, (shown, count, loss_rank, shared, metrics) in enumerate(rows):
        assert loss_rank == owner
        assert shared == pytest.approx(loss_fn(logits, y).item(), rel=1e-6)
        assert (
            (shown == pytest.approx(shared, rel=1e-6), count) == (True, 4)
            if rank == owner
            else (shown, count) == (None, 0)
        )
        assert metrics["accuracy"] == pytest.approx((logits.argmax(-1) == y).float().mean().item(), rel=1e-6)
        assert metrics["balance"] > 0
    assert rows[0][3:] == rows[1][3:]


def _odd_dtypes(rank: int) -> Any:
    def bf16_loss(logits: torch.Tensor, targets: torch.Tensor) -> Any:
        right = logits.argmax(-1) == targets
        return loss_fn(logits, targets).to(torch.bfloat16), {
            "any": right.any(),
            "right": right.sum(),
            "half": right.half().mean(),
        }

    tied = {"lm_head.weight": "embed.weight"}
    info, modules = build_schedule(None, 2, "1f1b", lambda i: Part(i).to(torch.bfloat16), bf16_loss, tied=tied)
    x, y = tokens(BATCH)
    result = info.schedule.step(x, targets=y)
    norm = clip_grad_norm_(modules, 1.0)
    scaler = PipelineGradScaler()
    assert scaler.get_scale() > 1
    return float(info.schedule.share_loss(result)), info.schedule.share_metrics(result), float(norm), gradients(modules)


def test_p108_bool_and_bf16_losses_and_flags() -> None:
    rows = run_distributed(_odd_dtypes, 2)
    assert rows[0][:3] == rows[1][:3]
    assert rows[0][0] > 0 and rows[0][2] > 0
    assert rows[0][1].keys() == {"any", "right", "half"}
    assert rows[0][3]["embed.weight"].equal(rows[1][3]["lm_head.weight"])


class Careless(torch.autograd.Function):
    """The identity; its backward writes into the gradient that it was given, as fused losses do."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        result = grads[0].clone()
        grads[0].zero_()
        return result


@pytest.mark.parametrize("scale", [0.5, torch.tensor(0.5), torch.tensor([0.5], dtype=torch.float64)])
def test_a_backward_that_writes_into_its_gradient_harms_no_other_microbatch(scale: Any) -> None:
    x, y = torch.randn(8, 4), torch.randn(8, 4)
    found = []
    for careless in (False, True):
        torch.manual_seed(0)
        loss = lambda out, target: (Careless.apply if careless else torch.clone)(nn.functional.mse_loss(out, target))  # noqa: B023, E731
        info, modules = build_schedule(None, 4, "gpipe", lambda stage: nn.Linear(4, 4), loss)
        info.schedule.step(x, targets=y, loss_scale=scale)
        found.append(modules[0].weight.grad)
    assert torch.equal(found[0], found[1])
    assert found[0].abs().sum() > 0


def test_a_complex_loss_is_refused() -> None:
    info, _ = build_schedule(None, 2, "gpipe", lambda stage: nn.Linear(4, 4), lambda out, target: out.sum() * 1j)
    with pytest.raises(ConfigError, match=r"loss of torch\.complex64; return a real one"):
        info.schedule.step(torch.randn(4, 4), targets=torch.zeros(4))


# ---- groups and frozen parts -----------------------------------------------------------------------------------------


def _groups(rank: int, config: Any) -> list[tuple[dict[str, float], list[str]]]:
    tied = {"lm_head.weight": "embed.weight"}
    _, modules = build_schedule(None, 2, config, Part, loss_fn, tied=tied)
    names = {id(p): n for m in reversed(modules) for n, p in m.named_parameters()}
    groups = parameter_groups(
        modules, [("*.bias", {"weight_decay": 0.0}), ("embed.*", {"lr": 0.1}), (lambda n, p: ".3." in n, {"lr": 0.3})]
    )
    return [({k: v for k, v in g.items() if k != "params"}, [names[id(p)] for p in g["params"]]) for g in groups]


@pytest.mark.parametrize("config", ["1f1b", "zero_bubble_v"])
def test_groups_by_name_over_stages(config: Any) -> None:
    rows = run_distributed(_groups, 2, config)
    assert [[g[0] for g in row] for row in rows] == [[{"weight_decay": 0.0}, {"lr": 0.1}, {"lr": 0.3}, {}]] * 2
    biases, embeddings, third, rest = (sorted(n for row in rows for n in row[i][1]) for i in range(4))
    every = [name for name, _ in Part(PipelineStageInfo(0, 1)).named_parameters()]
    assert biases == sorted(n for n in every if n.endswith("bias"))
    assert (
        embeddings == ["embed.weight"]
        if config == "zero_bubble_v"
        else embeddings == ["embed.weight", "lm_head.weight"]
    )
    assert third == ["layers.3.down.weight", "layers.3.up.weight"]
    assert len(rest) == 14


def test_rules_that_are_none() -> None:
    with pytest.raises(ConfigError, match="rule 0 is"):
        parameter_groups(nn.Linear(1, 1), [("*", {"params": []})])
    with pytest.raises(ConfigError, match="two parameters of this rank are named 'weight'"):
        parameter_groups([nn.Linear(1, 1), nn.Linear(1, 1)])


def _frozen(rank: int, config: Any) -> Any:
    flags: dict[str, bool] = {}

    def provider(info: PipelineStageInfo) -> Part:
        part = Part(info)
        for name, parameter in part.named_parameters():
            parameter.requires_grad_(not (info.is_first or "down" in name))
            flags[name] = parameter.requires_grad
        return part

    info, modules = build_schedule(None, 4, config, provider, loss_fn)
    assert {n: p.requires_grad for m in modules for n, p in m.named_parameters()} == flags
    optimizer = torch.optim.AdamW(parameter_groups(modules), lr=0.01)
    x, y = tokens(BATCH)
    info.schedule.step(x, targets=y)
    norm = float(clip_grad_norm_(modules, 1e9))
    optimizer.step()
    optimizer.zero_grad()
    optimizer.load_state_dict(optimizer.state_dict())
    info.schedule.step(x, targets=y)
    return norm, gradients(modules), sum(len(m.state_dict()) for m in modules)


@pytest.mark.parametrize("config", ["1f1b", {"schedule": "1f1b", "zero_bubble": True}], ids=str)
def test_p64_p66_frozen_stage_and_frozen_parts(config: Any) -> None:
    rows = run_distributed(_frozen, 2, config)
    assert rows[0][0] == rows[1][0] > 0
    assert rows[0][1] == {}
    assert rows[1][1].keys() == {n for n, _ in Part(PipelineStageInfo(1, 2)).named_parameters() if "down" not in n}


def _norm_of_nothing(rank: int) -> float:
    _, modules = build_schedule(None, 2, "1f1b", lambda i: Part(i).requires_grad_(not i.is_first), loss_fn)
    return float(clip_grad_norm_(modules, 1.0))


def test_norm_without_gradients_is_zero() -> None:
    assert run_distributed(_norm_of_nothing, 2) == [0.0, 0.0]
