"""A hook that stops a step at the first NaN or infinity, with stage, microbatch and op."""

from __future__ import annotations

import torch

from hocket.errors import StageError
from hocket.program import Action, Op


def check_finite(when: str, action: Action, tensors: list[torch.Tensor]) -> None:
    """Raise StageError if what an action has made is not finite: outputs and loss of F, input gradients of B and I.

    Off unless added: `schedule.add_hook(check_finite)`, or for one stage only, `add_hook(check_finite, stage=2)`. Each
    check waits for the device, so it slows a step down there.
    """
    if when != "after" or action.op not in (Op.F, Op.B, Op.I):
        return
    for index, tensor in enumerate(tensors):
        if (tensor.is_floating_point() or tensor.is_complex()) and not tensor.isfinite().all():
            nans, wrong = int(tensor.isnan().sum()), int((~tensor.isfinite()).sum())
            what = "output" if action.op == Op.F else "gradient of input"
            raise StageError(
                f"stage {action.stage}, microbatch {action.microbatch}, action {action}: {what} {index}, "
                f"{tensor.dtype} of shape {list(tensor.shape)}, has {nans} NaN and {wrong - nans} infinite values "
                f"among {tensor.numel()}"
            )
