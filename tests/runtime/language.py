"""A tiny language model in stages: embedding first, head last, and parameters named as in the whole model."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from hocket.runtime import PipelineStageInfo, add_aux_loss, keyed_rng

VOCABULARY, WIDTH, LAYERS, LENGTH = 11, 8, 8, 5


class Block(nn.Module):
    """One layer, with keyed dropout and an auxiliary loss if asked for."""

    def __init__(self, layer: int, dropout: float, aux: bool):
        super().__init__()
        self.layer, self.dropout, self.aux = layer, dropout, aux
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.up(x))
        if self.dropout:
            with keyed_rng(self.layer):
                hidden = nn.functional.dropout(hidden, self.dropout, self.training)
        out = x + self.down(hidden)
        return add_aux_loss(out, 0.01 * hidden.square().mean(), "balance") if self.aux else out


class Part(nn.Module):
    """One stage: its layers under the numbers of the whole model, the embedding on the first, the head on the last."""

    def __init__(self, info: PipelineStageInfo, *, dropout: float = 0.0, aux: bool = False):
        super().__init__()
        if info.is_first:
            self.embed = nn.Embedding(VOCABULARY, WIDTH)
        layers = {}
        for layer in info.layers(LAYERS):
            torch.manual_seed(50 + layer)
            layers[str(layer)] = Block(layer, dropout, aux and layer % 2 == 0)
        self.layers = nn.ModuleDict(layers)
        if info.is_last:
            torch.manual_seed(99)
            self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if info.is_first:
            torch.manual_seed(98)
            nn.init.normal_(self.embed.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if hasattr(self, "embed"):
            x = self.embed(x)
        for layer in self.layers.values():
            x = layer(x)
        return self.lm_head(x) if hasattr(self, "lm_head") else x


def loss_fn(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def tokens(size: int, step: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets of one batch: [size, LENGTH] each."""
    drawn = torch.randint(0, VOCABULARY, (size, LENGTH + 1), generator=torch.Generator().manual_seed(step))
    return drawn[:, :-1], drawn[:, 1:]


def gradients(modules: Iterable[nn.Module]) -> dict[str, torch.Tensor]:
    return {n: p.grad.clone() for m in modules for n, p in m.named_parameters() if p.grad is not None}


def weights(modules: Iterable[nn.Module]) -> dict[str, torch.Tensor]:
    return {n: p.detach().clone() for m in modules for n, p in m.named_parameters(remove_duplicate=False)}
