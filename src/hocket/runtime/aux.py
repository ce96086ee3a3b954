"""Auxiliary losses of any stage: added to backward with the right scale, and reported with the step's result."""

from __future__ import annotations

from typing import Any

import torch

from hocket.errors import ConfigError
from hocket.runtime.context import here


class _AddLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, loss: torch.Tensor, scale: Any) -> torch.Tensor:
        ctx.scale, ctx.shape = scale, loss.shape
        ctx.like = loss.new_empty(())
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[torch.Tensor, torch.Tensor, None]:
        scale = ctx.scale
        if isinstance(scale, torch.Tensor):
            scale = scale.to(ctx.like)
        return grads[0], torch.ones_like(ctx.like).expand(ctx.shape) * scale, None


def add_aux_loss(tensor: torch.Tensor, loss: torch.Tensor, name: str = "aux") -> torch.Tensor:
    """Return `tensor` unchanged, and let `loss`, a scalar, take part in backward: for load balancing of experts,
    multi-token prediction and the like. Use what it returns; where no gradient comes back to it, the loss has none.

    Call it in a stage's forward. `loss` counts like the loss of the same microbatch: weighted by its size for a mean
    over the batch, times the step's `loss_scale`. `result.aux_losses[name]` has the batch's value, summed over the
    calls of that name on this rank; `schedule.share_metrics(result)` gives the sum over all ranks.

    Outside a step (a plain module in one process) the loss is added to backward with weight 1.
    """
    if loss.numel() != 1:
        raise ConfigError(f"auxiliary loss {name!r} has shape {tuple(loss.shape)}; reduce it to a scalar")
    place = here()
    scale: Any = 1.0
    if place is not None:
        scale = place.step.weights[place.microbatch] * place.step.scale
        if place.recording:
            place.step.report(place.stage, place.microbatch, name, loss)
    return _AddLoss.apply(tensor, loss, scale)
