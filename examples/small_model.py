"""A tiny language model in stages, and the processes to run it on, for the examples beside this file.

Its embedding and its head share one weight, its dropout is keyed, and every second layer has an auxiliary loss.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor, nn

from hocket.runtime import PipelineStageInfo, add_aux_loss, keyed_rng

VOCABULARY, WIDTH, LAYERS, LENGTH, BATCH = 17, 16, 8, 6, 16
TIED = {"lm_head.weight": "embed.weight"}


class Block(nn.Module):
    """One layer under its number in the whole model; `masks` collects what its dropout drew."""

    def __init__(self, layer: int):
        super().__init__()
        self.layer = layer
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.masks: list[bytes] = []

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.relu(self.up(x))
        with keyed_rng(self.layer):
            mask = F.dropout(torch.ones_like(hidden), 0.1, self.training)
        self.masks.append(mask.numpy().tobytes())
        out = x + self.down(hidden * mask)
        return add_aux_loss(out, 0.01 * hidden.square().mean(), "activity") if self.layer % 2 else out


class Stage(nn.Module):
    """The layers of one stage; names are those of the whole model, so that any other pipeline can load them."""

    def __init__(self, info: PipelineStageInfo):
        super().__init__()
        if info.is_first:
            self.embed = seeded(nn.Embedding(VOCABULARY, WIDTH), 1000)
        self.layers = nn.ModuleDict({str(layer): seeded(Block(layer), layer) for layer in info.layers(LAYERS)})
        if info.is_last:
            self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        if hasattr(self, "embed"):
            x = self.embed(x)
        for layer in self.layers.values():
            x = layer(x)
        return self.lm_head(x) if hasattr(self, "lm_head") else x


def seeded(module: nn.Module, seed: int) -> nn.Module:
    """`module` with weights that depend on `seed` alone, so that every pipeline starts from the same model."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(0, 0.12, generator=generator)
    return module


def loss_fn(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def draw_batch(step: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets of one step, the same on every rank: sequences that count up from a random start."""
    start = torch.randint(VOCABULARY, (BATCH, 1), generator=torch.Generator().manual_seed(step))
    text = (start + torch.arange(LENGTH + 1)) % VOCABULARY
    return text[:, :-1], text[:, 1:]


def on_ranks(ranks: int, run: Callable[..., Any], *args: Any) -> list[Any]:
    """`run(*args)` on that many processes that form a gloo group; one: right here. Returns their values by rank."""
    if ranks == 1:
        return [run(*args)]
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(_process, (ranks, Path(folder), run, args), nprocs=ranks, start_method="fork")
        return [torch.load(Path(folder) / f"{rank}.pt") for rank in range(ranks)]


def _process(rank: int, ranks: int, folder: Path, run: Callable[..., Any], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    torch.save(run(*args), folder / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()
