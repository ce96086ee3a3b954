"""A bare pipeline loop over isend and irecv: what the executor is measured against.

It runs a given list of actions with fixed shapes and no checks, packing, hooks or records: the least that a loop of
the same order, written by hand, would do. How a stage computes is given as three functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn

from hocket.program import Action, Op, Program, unfold


class Compute(Protocol):
    """What a stage does. `forward` gives the output and what backward needs."""

    def forward(self, stage: int, x: torch.Tensor, target: torch.Tensor | None) -> tuple[torch.Tensor, Any]: ...
    def backward(self, stage: int, saved: Any, grad: torch.Tensor | None, whole: bool) -> torch.Tensor | None: ...
    def weights(self, stage: int) -> None: ...


class Autograd:
    """Plain autograd: I does the whole backward and W nothing."""

    def __init__(self, modules: dict[int, nn.Module], last: int, loss_fn: Any, count: int):
        self.modules, self.last, self.loss_fn, self.count = modules, last, loss_fn, count

    def forward(self, stage: int, x: torch.Tensor, target: torch.Tensor | None) -> tuple[torch.Tensor, Any]:
        if stage > 0:
            x.requires_grad_()
        out = self.modules[stage](x)
        if stage == self.last:
            out = self.loss_fn(out, target) / self.count
        return out.detach(), (x, out)

    def backward(self, stage: int, saved: Any, grad: torch.Tensor | None, whole: bool) -> torch.Tensor | None:
        x, out = saved
        out.backward(grad)
        return x.grad

    def weights(self, stage: int) -> None:
        pass


class BareLoop:
    """Runs one rank's lowered list; `shape` is that of every message."""

    def __init__(self, program: Program, rank: int, compute: Compute, shape: Sequence[int]):
        self.order: list[Action] = unfold(program.ranks[rank])
        self.home, self.last = program.placement.stage_to_rank, program.num_stages - 1
        self.rank, self.compute, self.shape = rank, compute, tuple(shape)

    def step(self, inputs: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
        home, last, compute, rank = self.home, self.last, self.compute, self.rank
        posted: dict[Any, Any] = {}
        made: dict[Any, Any] = {}
        saved: dict[Any, Any] = {}
        sends = []
        for op, stage, mb, _ in self.order:
            if op == Op.F:
                if stage == 0:
                    x = inputs[mb]
                elif home[stage - 1] == rank:
                    x = made.pop((0, stage - 1, mb))
                else:
                    work, x = posted.pop((0, stage - 1, mb))
                    work.wait()
                out, saved[stage, mb] = compute.forward(stage, x, targets[mb] if stage == last else None)
                if stage < last:
                    made[0, stage, mb] = out
            elif op == Op.B or op == Op.I:
                grad = None
                if stage < last:
                    if home[stage + 1] == rank:
                        grad = made.pop((1, stage + 1, mb))
                    else:
                        work, grad = posted.pop((1, stage + 1, mb))
                        work.wait()
                found = compute.backward(stage, saved.pop((stage, mb)), grad, op == Op.B)
                if stage > 0:
                    made[1, stage, mb] = found
            elif op == Op.W:
                compute.weights(stage)
            elif op == Op.SEND_F:
                sends.append(dist.isend(made.pop((0, stage, mb)), home[stage + 1]))
            elif op == Op.SEND_B:
                sends.append(dist.isend(made.pop((1, stage, mb)), home[stage - 1]))
            elif op == Op.RECV_F:
                buffer = torch.empty(self.shape)
                posted[0, stage - 1, mb] = dist.irecv(buffer, home[stage - 1]), buffer
            elif op == Op.RECV_B:
                buffer = torch.empty(self.shape)
                posted[1, stage + 1, mb] = dist.irecv(buffer, home[stage + 1]), buffer
        for work in sends:
            work.wait()
