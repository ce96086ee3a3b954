"""Scaling, clipping, ties, scalers, auxiliary losses: a training step equals one full-batch backward."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from distributed import run_distributed
from hocket import ConfigError
from hocket.errors import PipelineError
from hocket.runtime import PipelineGradScaler, PipelineStageInfo, build_schedule, clip_grad_norm_
from runtime.language import Part, gradients, loss_fn, tokens, weights

TIED = {"lm_head.weight": "embed.weight"}
SCHEDULES = [
    {"schedule": "gpipe"},
    {"schedule": "1f1b", "num_stages_per_rank": 2},
    {"schedule": "1f1b", "zero_bubble": True},
    {"schedule": "zero_bubble_v"},
    {"schedule": "dual_pipe_v"},
]
IDS = [" ".join(map(str, s.values())) for s in SCHEDULES]


def close(mine: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], bound: float = 1e-6) -> None:
    assert mine.keys() == theirs.keys()
    for name in theirs:
        error = (mine[name] - theirs[name]).norm() / theirs[name].norm().clamp_min(1e-12)
        assert error <= bound, f"{name}: relative error {error:.2e}"


def whole(sizes: int = 8, scale: float = 1.0, reduction: str = "mean", tied: bool = False) -> nn.Module:
    """One process, one backward of the full batch."""
    model = Part(PipelineStageInfo(0, 1))
    if tied:
        model.lm_head.weight = model.embed.weight
    x, y = tokens(sizes)
    loss = loss_fn(model(x), y)
    (loss * scale * (y.numel() if reduction == "sum" else 1)).backward()
    return model


def _sum_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


def _merged(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: value for row in rows for name, value in row.items()}


def _one_step(rank: int, config: Any, count: int, reduction: str, scale: float, steps: int, size: int) -> Any:
    fn = loss_fn if reduction == "mean" else _sum_loss
    info, modules = build_schedule(None, count, config, Part, fn, loss_reduction=reduction)
    x, y = tokens(size)
    for _ in range(steps):
        result = info.schedule.step(x, targets=y, loss_scale=scale)
    return gradients(modules), float(info.schedule.share_loss(result))


@pytest.mark.parametrize("config", SCHEDULES, ids=IDS)
def test_p52_mean_equals_the_full_batch(config: Any) -> None:
    rows = run_distributed(_one_step, 2, config, 4, "mean", 1.0, 1, 8)
    close(_merged([row[0] for row in rows]), gradients([whole()]))


@pytest.mark.parametrize("count", [2, 8])
def test_p56_p57_norm_does_not_depend_on_the_number_of_microbatches(count: int) -> None:
    rows = run_distributed(_one_step, 2, "1f1b", count, "mean", 1.0, 1, 8)
    close(_merged([row[0] for row in rows]), gradients([whole()]))


def test_sum_and_unequal_microbatches_and_loss_scale_and_accumulation() -> None:
    for reduction, scale, steps, size in [
        ("sum", 1.0, 1, 7),
        ("mean", 1.0, 1, 7),
        ("mean", 8.0, 1, 8),
        ("mean", 1.0, 2, 8),
    ]:
        rows = run_distributed(_one_step, 2, "1f1b", 4, reduction, scale, steps, size)
        model = whole(size, scale * steps, reduction)
        close(_merged([row[0] for row in rows]), gradients([model]))
        x, y = tokens(size)
        unscaled = loss_fn(whole(size)(x), y).item() * (y.numel() if reduction == "sum" else 1)
        assert rows[0][1] == rows[1][1] == pytest.approx(unscaled, rel=1e-6)


def _clip(rank: int, config: Any, tied: bool) -> tuple[float, dict[str, torch.Tensor]]:
    info, modules = build_schedule(None, 4, config, Part, loss_fn, tied=TIED if tied else None)
    x, y = tokens(8)
    info.schedule.step(x, targets=y)
    return float(clip_grad_norm_(modules, 0.1)), gradients(modules)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("config", SCHEDULES, ids=IDS)
def test_p58_p60_one_norm(config: Any, tied: bool) -> None:
    rows = run_distributed(_clip, 2, config, tied)
    model = whole(tied=tied)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1).item()
    assert rows[0][0] == rows[1][0] == pytest.approx(norm, rel=1e-6)
    mine = _merged([row[1] for row in rows])
    theirs = gradients([model])
    if tied:
        theirs["lm_head.weight"] = theirs["embed.weight"]
        mine.setdefault("lm_head.weight", mine["embed.weight"])
    close(mine, theirs)


def _clip_nonfinite(rank: int) -> tuple[float, str]:
    info, modules = build_schedule(None, 2, "gpipe", Part, loss_fn)
    x, y = tokens(4)
    info.schedule.step(x, targets=y)
    if rank == 1:
        next(modules[0].parameters()).grad.fill_(float("inf"))
    with pytest.raises(PipelineError) as caught:
        clip_grad_norm_(modules, 1.0, error_if_nonfinite=True)
    return float(clip_grad_norm_(modules, 1.0)), str(caught.value)


def test_nonfinite_norm_is_reported_on_all_ranks() -> None:
    for norm, text in run_distributed(_clip_nonfinite, 2):
        assert norm == float("inf")
        assert "gradients are not finite on rank 1" in text


def test_max_norm_must_be_positive() -> None:
    with pytest.raises(ConfigError, match="max_norm is 0"):
        clip_grad_norm_([nn.Linear(1, 1)], 0)


def _train_tied(rank: int, config: Any, ties: dict[str, str]) -> tuple[Any, Any]:
    info, modules = build_schedule(None, 4, config, partial(_differently, rank), loss_fn, tied=ties)
    start = weights(modules)
    optimizer = torch.optim.AdamW({id(p): p for m in modules for p in m.parameters()}.values(), lr=0.01)
    for step in range(3):
        x, y = tokens(8, step)
        optimizer.zero_grad()
        info.schedule.step(x, targets=y)
        optimizer.step()
    return start, weights(modules)


def _differently(rank: int, info: PipelineStageInfo) -> Part:
    """Copies begin with other values than their source, so that only a broadcast makes them equal."""
    part = Part(info)
    if info.is_last:
        nn.init.constant_(part.lm_head.weight, 5.0)
    return part


@pytest.mark.parametrize("config", SCHEDULES, ids=IDS)
def test_p62_tied_embedding(config: Any) -> None:
    rows = run_distributed(_train_tied, 2, config, TIED)
    start, end = _merged([row[0] for row in rows]), _merged([row[1] for row in rows])
    assert start["embed.weight"].equal(start["lm_head.weight"])
    assert end["embed.weight"].equal(end["lm_head.weight"])
    model = Part(PipelineStageInfo(0, 1))
    model.lm_head.weight = model.embed.weight
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(3):
        x, y = tokens(8, step)
        optimizer.zero_grad()
        loss_fn(model(x), y).backward()
        optimizer.step()
    close(end, weights([model]), 1e-5)


def test_p15_p63_groups_in_any_order_on_three_ranks() -> None:
    ties = {
        "lm_head.weight": "embed.weight",
        "layers.7.up.weight": "layers.0.up.weight",
        "layers.4.up.weight": "layers.7.up.weight",
    }
    rows = run_distributed(_opposite, 3, ties)
    for moment in (0, 1):
        together = _merged([row[moment] for row in rows])
        assert together["embed.weight"].equal(together["lm_head.weight"])
        for copy in ("layers.7.up.weight", "layers.4.up.weight"):
            assert together[copy].equal(together["layers.0.up.weight"])


def _opposite(rank: int, ties: dict[str, str]) -> Any:
    return _train_tied(rank, "1f1b", dict(sorted(ties.items(), reverse=rank % 2 == 1)))


def _bad_tie(rank: int, ties: dict[str, str]) -> str:
    with pytest.raises(ConfigError) as caught:
        build_schedule(None, 2, "gpipe", Part, loss_fn, tied=ties)
    return str(caught.value)


@pytest.mark.parametrize(
    "ties,text",
    [
        ({"head.weight": "embed.weight"}, "1 of 2 names are parameters of some stage"),
        ({"layers.0.up.bias": "embed.weight"}, "make their shapes and dtypes equal"),
        ({"lm_head.weight": "layers.0.up.weight"}, "differ in shape or dtype"),
        ({"a": "b", "b": "a"}, "go in a circle"),
    ],
)
def test_ties_that_do_not_fit(ties: dict[str, str], text: str) -> None:
    assert all(text in told for told in run_distributed(_bad_tie, 2, ties))


def _scaled(rank: int, poison: bool) -> tuple[float, bool]:
    info, modules = build_schedule(None, 2, "1f1b", Part, loss_fn)
    optimizer = torch.optim.SGD([p for m in modules for p in m.parameters()], lr=0.1)
    scaler = PipelineGradScaler(init_scale=1024.0)
    before = weights(modules)
    x, y = tokens(4)
    info.schedule.step(x, targets=y, loss_scale=scaler.get_scale())
    if poison and rank == 1:
        next(modules[0].parameters()).grad.fill_(float("inf"))
    scaler.step(optimizer)
    scaler.update()
    after = weights(modules)
    return scaler.get_scale(), all(after[name].equal(before[name]) for name in before)


def test_p61_inf_on_one_stage_makes_all_skip() -> None:
    assert run_distributed(_scaled, 2, True) == [(512.0, True)] * 2
    assert run_distributed(_scaled, 2, False) == [(1024.0, False)] * 2


def _with_aux(rank: int, config: Any) -> tuple[Any, dict[str, float]]:
    info, modules = build_schedule(None, 4, config, partial(Part, aux=True), loss_fn)
    x, y = tokens(8)
    result = info.schedule.step(x, targets=y, loss_scale=2.0)
    return gradients(modules), info.schedule.share_metrics(result)


@pytest.mark.parametrize("config", SCHEDULES, ids=IDS)
def test_auxiliary_losses_of_middle_stages(config: Any) -> None:
    rows = run_distributed(_with_aux, 2, config)
    model = Part(PipelineStageInfo(0, 1), aux=True)
    info, modules = build_schedule(None, 1, "gpipe", lambda info: model, loss_fn)
    x, y = tokens(8)
    result = info.schedule.step(x, targets=y, loss_scale=2.0)
    close(_merged([row[0] for row in rows]), gradients(modules))
    expected = info.schedule.share_metrics(result)["balance"]
    assert rows[0][1]["balance"] == rows[1][1]["balance"] == pytest.approx(expected, rel=1e-5)
    plain = Part(PipelineStageInfo(0, 1), aux=True)
    (loss_fn(plain(x), y) * 2.0).backward()
    with pytest.raises(AssertionError):
        close(gradients([plain]), gradients([whole(8, 2.0)]))


def _count_reduces(rank: int) -> tuple[int, dict[str, torch.Tensor]]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.nn.parallel import DistributedDataParallel

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    seen = [0]

    def hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        seen[0] += 1
        work = dist.all_reduce(bucket.buffer().div_(2), group=mesh.get_group("dp"), async_op=True)
        return work.get_future().then(lambda f: f.value()[0])

    def provider(info: PipelineStageInfo) -> nn.Module:
        module = DistributedDataParallel(Part(info), process_group=mesh.get_group("dp"))
        module.register_comm_hook(None, hook)
        return module

    info, modules = build_schedule(mesh, 4, "1f1b", provider, loss_fn)
    x, y = tokens(16)
    half = slice(8 * (rank % 2), 8 * (rank % 2) + 8)
    info.schedule.step(x[half], targets=y[half])
    return seen[0], gradients([m.module for m in modules])


def test_p67_one_reduction_a_step() -> None:
    rows = run_distributed(_count_reduces, 4)
    assert [row[0] for row in rows] == [1, 1, 1, 1]
    close(_merged([row[1] for row in rows]), gradients([whole(16)]))
