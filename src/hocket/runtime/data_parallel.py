"""Stages wrapped for data parallelism: gradients go over the data parallel ranks once a step, with the last backward.

A wrapper reduces gradients while backward runs, so its stage's backward is not split: I does all of it.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel


class GradientSync(Protocol):
    """How a wrapped stage is told which of a step's backwards is its last."""

    def forward_scope(self) -> AbstractContextManager[None]:
        """Entered around each forward."""
        ...

    def before_backward(self, last: bool) -> None:
        """Called before each backward; `last` for the one after which gradients are complete."""
        ...

    def without_backward(self) -> None:
        """Called when forwards end without the last backward: after an evaluation, or a step that failed."""
        ...


class NoSync:
    """A stage that is not wrapped."""

    def forward_scope(self) -> AbstractContextManager[None]:
        return nullcontext()

    def before_backward(self, last: bool) -> None:
        pass

    def without_backward(self) -> None:
        pass


class _DDP:
    """All forwards run without synchronisation; the reducer is armed right before the last backward.

    DDP itself arms it in the forward, but here other microbatches' backwards may still come in between.
    """

    def __init__(self, module: DistributedDataParallel):
        self.module = module

    def forward_scope(self) -> AbstractContextManager[None]:
        return self.module.no_sync()

    def before_backward(self, last: bool) -> None:
        if last:
            self.module.reducer.prepare_for_backward([])
            # As after a forward with synchronisation: the next one gives all replicas the buffers of the first.
            self.module.require_forward_param_sync = True

    def without_backward(self) -> None:
        pass


class _FSDP:
    """Parameters are gathered once and stay so until the last backward, which reduces gradients and frees them."""

    def __init__(self, module: FSDPModule, parts: list[FSDPModule]):
        self.module, self.parts = module, parts
        module.set_reshard_after_forward(False)

    def forward_scope(self) -> AbstractContextManager[None]:
        return nullcontext()

    def before_backward(self, last: bool) -> None:
        self.module.set_is_last_backward(last)
        self.module.set_requires_gradient_sync(last)
        self.module.set_reshard_after_backward(last)

    def without_backward(self) -> None:
        # Else the gathered parameters would stay, and be used after the optimizer has changed the shards.
        for part in self.parts:
            part.reshard()


def gradient_sync(module: nn.Module) -> GradientSync:
    """What tells `module` of its last backward, by the kind of its wrapper."""
    if isinstance(module, DistributedDataParallel):
        return _DDP(module)
    if isinstance(module, FSDPModule):
        return _FSDP(module, [m for m in module.modules() if isinstance(m, FSDPModule)])
    return NoSync()


def is_wrapped(module: nn.Module) -> bool:
    """True if gradients are reduced by the module itself while backward runs."""
    return any(isinstance(m, (DistributedDataParallel, FSDPModule)) for m in module.modules())
