"""Randomness: masks by seed, step, microbatch and layer alone; initial weights by stage, or as in one process."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from distributed import run_distributed
from hocket import ConfigError
from hocket.runtime import PipelineStageInfo, build_schedule, keyed_rng
from runtime.language import LAYERS, WIDTH, Part, gradients, loss_fn, tokens

CONFIGS: list[Any] = [
    pytest.param("gpipe", 2, marks=pytest.mark.slow),
    pytest.param({"schedule": "looped_bfs", "num_stages_per_rank": 2}, 2, marks=pytest.mark.slow),
    ({"schedule": "1f1b", "num_stages_per_rank": 2, "zero_bubble": True}, 2),
    ("zero_bubble_v", 2),
    ("dual_pipe_v", 2),
    ("1f1b", 4),
]
Masks = dict[tuple[int, int, int], torch.Tensor]
"""Each mask by (step, microbatch, layer)."""


class Masked(nn.Module):
    """Keeps the mask of every forward, also of those that checkpointing runs a second time."""

    def __init__(self, info: PipelineStageInfo, form: str, masks: list[tuple[int, torch.Tensor]]):
        super().__init__()
        self.own, self.form, self.masks = info.layers(LAYERS), form, masks
        self.layers = nn.ModuleDict({str(layer): nn.Linear(WIDTH, WIDTH, bias=False) for layer in self.own})
        for layer in self.layers.values():
            nn.init.eye_(layer.weight)

    def one(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        x = self.layers[str(layer)](x)
        with keyed_rng(layer):
            mask = nn.functional.dropout(torch.ones_like(x), 0.5)
        self.masks.append((layer, mask.detach()))
        return x + x * mask

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.own:
            if self.form == "plain":
                x = self.one(layer, x)
            else:
                x = checkpoint(self.one, layer, x, use_reentrant=self.form == "reentrant")
        return x


def _masks(rank: int, config: Any, form: str) -> tuple[list[tuple[int, torch.Tensor]], list[float]]:
    masks: list[tuple[int, torch.Tensor]] = []
    info, _ = build_schedule(
        None, 4, config, lambda i: Masked(i, form, masks), lambda out, i: out.square().mean(), seed=5
    )
    torch.manual_seed(rank)
    before = torch.get_rng_state()
    losses = []
    for step in range(2):
        x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step)).requires_grad_(form == "reentrant")
        losses.append(float(info.schedule.share_loss(info.schedule.step(x))))
        torch.rand(rank)
    torch.set_rng_state(before)
    return masks, losses


def _by_layer(rows: list[Any]) -> dict[int, list[bytes]]:
    """The masks of each layer, without order and repetition."""
    found: dict[int, set[bytes]] = {}
    for row in rows:
        for layer, mask in row[0]:
            found.setdefault(layer, set()).add(mask.numpy().tobytes())
    return {layer: sorted(masks) for layer, masks in found.items()}


def _expected() -> dict[int, list[bytes]]:
    """What one process without any schedule draws, told all the keys."""
    found: dict[int, set[bytes]] = {layer: set() for layer in range(LAYERS)}
    for step in range(2):
        for microbatch in range(4):
            for layer in range(LAYERS):
                with keyed_rng(layer, seed=5, step=step, microbatch=microbatch):
                    mask = nn.functional.dropout(torch.ones(2, WIDTH), 0.5)
                found[layer].add(mask.numpy().tobytes())
    return {layer: sorted(masks) for layer, masks in found.items()}


@pytest.mark.parametrize("config, ranks", CONFIGS, ids=str)
def test_p86_the_same_masks_under_every_schedule(config: Any, ranks: int) -> None:
    rows = run_distributed(_masks, ranks, config, "plain")
    assert _by_layer(rows) == _expected()
    alone = _masks(0, "gpipe", "plain")[1]
    assert rows[0][1] == pytest.approx(alone, rel=1e-6)


@pytest.mark.parametrize("form", ["reentrant", "not reentrant"])
@pytest.mark.parametrize("config", ["1f1b", "zero_bubble_v"])
def test_the_same_masks_when_checkpointing_runs_forward_again(config: Any, form: str) -> None:
    rows = run_distributed(_masks, 2, config, form)
    # Twice as many forwards, and no other masks.
    assert sum(len(row[0]) for row in rows) == 2 * 2 * 4 * LAYERS
    assert _by_layer(rows) == _expected()


def _dropout_gradients(rank: int, config: Any) -> Any:
    info, modules = build_schedule(None, 4, config, partial(Part, dropout=0.3), loss_fn, seed=11)
    x, y = tokens(8)
    info.schedule.step(x, targets=y)
    return gradients(modules)


@pytest.mark.parametrize("config, ranks", [("zero_bubble_v", 2), ("1f1b", 4)], ids=str)
def test_p86_gradients_with_dropout(config: Any, ranks: int) -> None:
    alone = _dropout_gradients(0, "gpipe")
    mine = {name: value for row in run_distributed(_dropout_gradients, ranks, config) for name, value in row.items()}
    assert mine.keys() == alone.keys()
    for name, value in alone.items():
        torch.testing.assert_close(mine[name], value, rtol=1e-5, atol=1e-8)


def test_the_world_outside_is_not_disturbed() -> None:
    torch.manual_seed(1)
    expected = [torch.rand(2) for _ in range(2)]
    torch.manual_seed(1)
    first = torch.rand(2)
    with keyed_rng(0, seed=1, step=2, microbatch=3):
        torch.rand(7)
    assert first.equal(expected[0])
    assert torch.rand(2).equal(expected[1])
    with pytest.raises(ConfigError, match="needs step, microbatch as well"), keyed_rng(0, seed=1):
        pass


def test_keyed_rng_keeps_nothing() -> None:
    # torch.manual_seed would queue a call and its stack for a CUDA that is not in use, each time.
    queued = len(torch.cuda._queued_calls)  # type: ignore[attr-defined]
    for layer in range(20):
        with keyed_rng(layer, seed=1, step=2, microbatch=3):
            torch.rand(1)
    assert len(torch.cuda._queued_calls) == queued  # type: ignore[attr-defined]


# ---- initial weights -------------------------------------------------------------------------------------------------


def _equal_stages(rank: int, config: Any, init: str) -> tuple[list[torch.Tensor], float]:
    torch.manual_seed(42)
    _, modules = build_schedule(None, 4, config, lambda info: nn.Linear(3, 3), lambda o, i: o.sum(), init=init)
    return [m.weight.detach().clone() for m in modules], float(torch.rand(()))


def test_p87_one_seed_gives_different_weights_in_each_stage() -> None:
    rows = run_distributed(_equal_stages, 2, "1f1b", "per_stage")
    assert not rows[0][0][0].equal(rows[1][0][0])
    wide = run_distributed(_equal_stages, 2, {"schedule": "1f1b", "num_stages_per_rank": 2}, "per_stage")
    alone = _equal_stages(0, {"schedule": "1f1b", "num_stages_per_rank": 4}, "per_stage")
    for stage in range(4):
        assert wide[stage % 2][0][stage // 2].equal(alone[0][stage])
    torch.manual_seed(42)
    assert {row[1] for row in [*rows, *wide]} == {float(torch.rand(()))}


@pytest.mark.parametrize("config", [{"schedule": "1f1b", "num_stages_per_rank": 2}, "zero_bubble_v"], ids=str)
def test_p87_the_same_as_one_process_when_asked(config: Any) -> None:
    rows = run_distributed(_equal_stages, 2, config, "sequential")
    torch.manual_seed(42)
    alone = [nn.Linear(3, 3).weight for _ in range(4)]
    v = config == "zero_bubble_v"
    homes = [(0, 0), (1, 0), (1, 1), (0, 1)] if v else [(0, 0), (1, 0), (0, 1), (1, 1)]
    for stage, (rank, local) in enumerate(homes):
        assert rows[rank][0][local].equal(alone[stage])
