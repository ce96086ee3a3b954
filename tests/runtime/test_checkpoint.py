"""Checkpoints: whole-model names, loaded at any other pipeline, and what happens when something does not fit."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from distributed import run_distributed
from hocket import ConfigError
from hocket.errors import PipelineError
from hocket.runtime import (
    PipelineStageInfo,
    build_schedule,
    checkpoint_files,
    latest_checkpoint,
    load_checkpoint,
    parameter_groups,
    save_checkpoint,
)
from runtime.language import Part, loss_fn, weights
from runtime.resuming import INTERLEAVED, ONE_F_ONE_B, TIED, Weights, merged, start, train, whole


def _save(rank: int, path: Path, config: Any, steps: int = 2, async_: bool = False) -> tuple[Weights, list[float]]:
    started = info, modules, optimizer, scheduler = start(config)
    train(started, range(steps))
    before = weights(modules)
    saved = save_checkpoint(
        path,
        modules,
        schedule=info.schedule,
        optimizer=optimizer,
        lr_scheduler=scheduler,
        extra={"epoch": 7},
        async_=async_,
    )
    assert saved.step == steps
    losses = train(started, range(steps, steps + 2))
    assert saved.wait() == path / f"step-{steps:08d}"
    assert saved.done
    return before, losses


def _load(rank: int, path: Path, config: Any, tied: dict[str, str] | None = TIED) -> tuple[Weights, list[float], int]:
    started = info, modules, optimizer, scheduler = start(config, tied)
    with torch.no_grad():
        for module in modules:
            for parameter in module.parameters():
                parameter.zero_()
    loaded = load_checkpoint(path, modules, schedule=info.schedule, optimizer=optimizer, lr_scheduler=scheduler)
    assert loaded.extra == {"epoch": 7}
    after = weights(modules)
    return after, train(started, range(loaded.step, loaded.step + 2)), info.schedule.steps


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Weights, list[float]]:
    path = tmp_path_factory.mktemp("checkpoints")
    rows = run_distributed(_save, 2, path, INTERLEAVED)
    return path, merged(rows), rows[0][1]


def test_p88_names_are_those_of_the_unsplit_model(saved: Any) -> None:
    metadata = dcp.FileSystemReader(saved[0] / "step-00000002").read_metadata().state_dict_metadata
    names = {name for name in metadata if not name.startswith("optimizer/")}
    assert names == set(whole().state_dict())
    state = {name.split("/", 2)[2] for name in metadata if name.startswith("optimizer/")}
    assert state == {name for name, _ in whole().named_parameters()}


@pytest.mark.parametrize("config, ranks", [(INTERLEAVED, 2), ("zero_bubble_v", 2), ("gpipe", 1), (ONE_F_ONE_B, 4)])
def test_p90_loads_at_any_other_pipeline(saved: Any, config: Any, ranks: int) -> None:
    path, before, losses = saved
    rows = run_distributed(_load, ranks, path, config) if ranks > 1 else [_load(0, path, config)]
    after = merged(rows)
    assert after.keys() == before.keys()
    assert all(after[name].equal(before[name]) for name in before)
    if config == INTERLEAVED:
        assert rows[0][1] == losses
    assert rows[0][1] == pytest.approx(losses, rel=1e-6)
    assert {row[2] for row in rows} == {4}


def test_p90_and_back_through_one_process(saved: Any, tmp_path: Path) -> None:
    path, before, losses = saved
    info, modules, optimizer, scheduler = start("gpipe")
    load_checkpoint(path, modules, schedule=info.schedule, optimizer=optimizer, lr_scheduler=scheduler)
    save_checkpoint(
        tmp_path, modules, schedule=info.schedule, optimizer=optimizer, lr_scheduler=scheduler, extra={"epoch": 7}
    )
    rows = run_distributed(_load, 2, tmp_path, ONE_F_ONE_B)
    assert all(merged(rows)[name].equal(before[name]) for name in before)
    assert rows[0][1] == pytest.approx(losses, rel=1e-6)


def test_p90_one_whole_model_without_a_schedule(saved: Any) -> None:
    path, before, _ = saved
    model = whole()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    with pytest.raises(ConfigError, match="group 0 of the optimizer puts together"):
        load_checkpoint(path, model, optimizer=optimizer)
    optimizer = torch.optim.AdamW(parameter_groups(model, [("*.bias", {}), ("embed.*", {})]))
    assert load_checkpoint(path, model, optimizer=optimizer).step == 2
    assert all(value.equal(before[name]) for name, value in weights([model]).items())
    assert optimizer.state[model.embed.weight]["step"] == 2
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.0, 0.1, 0.1]


def test_ties_may_differ_between_saving_and_loading(saved: Any) -> None:
    path, before, _ = saved
    untied = Part(PipelineStageInfo(0, 1))
    optimizer = torch.optim.AdamW(parameter_groups(untied, [("*.bias", {}), ("embed.*", {})]))
    with pytest.raises(ConfigError, match="puts together"):
        load_checkpoint(path, untied, optimizer=optimizer)
    optimizer = torch.optim.AdamW(parameter_groups(untied, [("*.bias", {}), ("embed.*", {}), ("lm_head.*", {})]))
    load_checkpoint(path, untied, optimizer=optimizer)
    assert untied.lm_head.weight.equal(before["embed.weight"])
    mine, other = optimizer.state[untied.lm_head.weight], optimizer.state[untied.embed.weight]
    assert mine["exp_avg"].equal(other["exp_avg"])
    assert mine["exp_avg"].abs().sum() > 0


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_async_save_is_of_the_moment_it_was_asked(ranks: int, tmp_path: Path) -> None:
    rows = (
        run_distributed(_save, 2, tmp_path, ONE_F_ONE_B, 2, True)
        if ranks > 1
        else [_save(0, tmp_path, "gpipe", 2, True)]
    )
    again = run_distributed(_load, 2, tmp_path, ONE_F_ONE_B)
    before = merged(rows)
    assert all(merged(again)[name].equal(before[name]) for name in before)
    assert again[0][1] == pytest.approx(rows[0][1], rel=1e-6)


# ---- what does not fit -----------------------------------------------------------------------------------------------


class Grown(Part):
    """A part with names that no checkpoint has, and without one that it has."""

    def __init__(self, info: PipelineStageInfo):
        super().__init__(info)
        if info.is_last:
            self.norm = nn.LayerNorm(3)
            del self.lm_head
        self.layers[next(iter(self.layers))].up = nn.Linear(1, 2)


def _misfit(rank: int, path: Path, strict: bool) -> str:
    _, modules = build_schedule(None, 2, "gpipe", Grown, loss_fn)
    with pytest.raises(ConfigError) as caught:
        load_checkpoint(path, modules, strict=strict)
    return str(caught.value)


def test_missing_and_extra_names_and_shapes_are_listed_on_all_ranks(saved: Any) -> None:
    texts = run_distributed(_misfit, 2, saved[0], True)
    assert texts[0] == texts[1]
    assert "missing in the checkpoint: 'norm.bias', 'norm.weight'" in texts[0]
    assert "in the checkpoint, but in no stage: 'lm_head.weight'" in texts[0]
    assert "'layers.0.up.weight' is (2, 1) here and (16, 8) in the checkpoint" in texts[0]
    assert "'layers.4.up.weight' is (2, 1) here" in texts[0]
    assert "in no stage" not in run_distributed(_misfit, 2, saved[0], False)[0]


def _ignore_extra(rank: int, path: Path) -> list[str]:
    def without_head(info: PipelineStageInfo) -> Part:
        part = Part(info)
        if info.is_last:
            part.lm_head = nn.Identity()
        return part

    _, modules = build_schedule(None, 2, "gpipe", without_head, loss_fn)
    return load_checkpoint(path, modules, strict=False).ignored


def test_extra_names_are_ignored_on_request(saved: Any) -> None:
    assert run_distributed(_ignore_extra, 2, saved[0]) == [["lm_head.weight"]] * 2


class Twice(nn.Module):
    def __init__(self, info: PipelineStageInfo):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("table", torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


def _claims(rank: int, path: Path) -> str:
    info, modules = build_schedule(None, 2, "gpipe", Twice, loss_fn)
    with pytest.raises(ConfigError) as caught:
        save_checkpoint(path, modules, schedule=info.schedule)
    return str(caught.value)


def test_two_stages_that_claim_one_name(tmp_path: Path) -> None:
    texts = run_distributed(_claims, 2, tmp_path)
    assert texts[0] == texts[1]
    assert "'layer.bias' by stages [0, 1]; 'layer.weight' by stages [0, 1]; 'table' by stages [0, 1]" in texts[0]
    assert list(tmp_path.iterdir()) == []


def _bad_extra(rank: int, path: Path) -> str:
    info, modules = build_schedule(None, 2, "gpipe", Part, loss_fn)
    with pytest.raises(ConfigError) as caught:
        save_checkpoint(path, modules, schedule=info.schedule, extra={"loader": Path()})
    return str(caught.value)


def test_what_cannot_be_read_back_is_refused_at_save(tmp_path: Path) -> None:
    texts = run_distributed(_bad_extra, 2, tmp_path)
    assert texts[0] == texts[1]
    assert "on rank 0: the checkpoint cannot hold 'extra'" in texts[0]


def test_no_step_and_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="give save_checkpoint the schedule, or a step"):
        save_checkpoint(tmp_path, nn.Linear(1, 1))
    with pytest.raises(ConfigError, match="no complete checkpoint in"):
        load_checkpoint(tmp_path, nn.Linear(1, 1))
    assert latest_checkpoint(tmp_path / "nowhere") is None
    save_checkpoint(tmp_path, nn.Linear(1, 1), step=3)
    with pytest.raises(ConfigError, match="holds no optimizer state"):
        load_checkpoint(tmp_path, model := nn.Linear(1, 1), optimizer=torch.optim.SGD(model.parameters()))
    with pytest.raises(ConfigError, match="on the meta device"):
        load_checkpoint(tmp_path, nn.Linear(1, 1, device="meta"))
    with pytest.raises(ConfigError, match="in none of the modules"):
        save_checkpoint(tmp_path, model, step=4, optimizer=torch.optim.SGD(nn.Linear(1, 1).parameters()))


# ---- cut off ---------------------------------------------------------------------------------------------------------


def _die_in_the_middle(rank: int, path: Path, where: str) -> None:
    info, modules, optimizer, _ = start(ONE_F_ONE_B)

    def die(*args: Any, **kwargs: Any) -> Any:
        os._exit(9)

    if where == "write" and rank == 1:
        dcp.FileSystemWriter.write_data = die  # type: ignore[method-assign]
    if where == "rename" and rank == 0:
        checkpoint_files._finish = die
    save_checkpoint(path, modules, schedule=info.schedule, optimizer=optimizer, step=9)


@pytest.mark.parametrize("where", ["write", pytest.param("rename", marks=pytest.mark.slow)])
def test_killed_in_the_middle_of_a_save(where: str, tmp_path: Path) -> None:
    rows = run_distributed(_save, 2, tmp_path, ONE_F_ONE_B)
    outcomes = run_distributed(_die_in_the_middle, 2, tmp_path, where, check=False, timeout=20)
    assert not all(o.done for o in outcomes)
    assert (tmp_path / "step-00000009.partial").is_dir()
    assert latest_checkpoint(tmp_path) == tmp_path / "step-00000002"
    again = run_distributed(_load, 2, tmp_path, ONE_F_ONE_B)
    assert again[0][1] == rows[0][1]
    run_distributed(_save, 2, tmp_path, ONE_F_ONE_B, 3)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000002", "step-00000003"]


def test_the_same_step_again_and_between_two_renames(tmp_path: Path) -> None:
    model = nn.Linear(1, 1)
    for value in (1.0, 2.0):
        nn.init.constant_(model.weight, value)
        save_checkpoint(tmp_path, model, step=3)
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000003"]
    (tmp_path / "step-00000003").rename(tmp_path / "step-00000003.old")
    nn.init.zeros_(model.weight)
    load_checkpoint(tmp_path, model)
    assert model.weight.item() == 2.0


def _cannot_write(rank: int, path: Path) -> str:
    info, modules = build_schedule(None, 2, "gpipe", Part, loss_fn)
    with pytest.raises(PipelineError) as caught:
        save_checkpoint(path / "file" / "deeper", modules, schedule=info.schedule)
    return f"{type(caught.value).__name__}: {caught.value}"


def test_a_disk_that_refuses(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    for text in run_distributed(_cannot_write, 2, tmp_path):
        assert text.startswith("PipelineError: on rank 0: saving a checkpoint failed: NotADirectoryError")
