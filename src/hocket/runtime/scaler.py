"""A GradScaler whose verdict is that of the whole pipeline: an inf on one stage makes every rank skip."""

from __future__ import annotations

from typing import Any

import torch

from hocket.runtime.groups import Mesh, gather_numbers, group_of


class PipelineGradScaler(torch.amp.GradScaler):
    """`torch.amp.GradScaler` for a pipeline; use it on every rank, and pass `loss_scale=scaler.get_scale()` to `step`.

    mesh: as given to `build_schedule`. The other arguments are those of torch.amp.GradScaler. A rank without
    gradients takes part like any other. Call `unscale_` (or `step`, which does) on all ranks alike.
    """

    def __init__(self, mesh: Mesh = None, device: str = "cpu", **options: Any):
        super().__init__(device, **options)
        self._pipeline = group_of(mesh)
        # The scale exists from the first use on; ranks without the loss never scale anything themselves.
        self.scale(torch.ones((), device=device))

    def _unscale_grads_(self, *args: Any, **kwargs: Any) -> dict[torch.device, torch.Tensor]:
        found = super()._unscale_grads_(*args, **kwargs)
        mine = max((float(flag) for flag in found.values()), default=0.0)
        anywhere = max(row[0] for row in gather_numbers([mine], self._pipeline))
        device = torch.device(self._device)
        flags = found or {device: torch.zeros(1, device=device)}
        return {place: torch.full_like(flag, anywhere) for place, flag in flags.items()}
