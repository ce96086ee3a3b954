"""A bare pipeline loop over isend and irecv: what the executor is measured against.

It runs a given list of actions with fixed shapes and no checks, packing, hooks or records: the least that a hand-written
loop of the same order would do. Split backwards are not supported: I does the whole backward and W nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn

from hocket.program import Action, Op, Program, unfold


class BareLoop:
    """Runs one rank's lowered list; `shape` is that of every message."""

    def __init__(self, program: Program, rank: int, modules: Mapping[int, nn.Module], shape: Sequence[int], loss_fn):
        self.order: list[Action] = unfold(program.ranks[rank])
        self.home, self.last = program.placement.stage_to_rank, program.num_stages - 1
        self.rank, self.modules, self.shape, self.loss_fn = rank, modules, tuple(shape), loss_fn
        self.count = program.num_microbatches

    def step(self, inputs: Sequence[torch.Tensor] | None, targets: Sequence[torch.Tensor] | None) -> None:
        home, last, modules, rank = self.home, self.last, self.modules, self.rank
        posted, made, saved, sends = {}, {}, {}, []
        for op, stage, mb, _ in self.order:
            if op == Op.F:
                if stage == 0:
                    x = inputs[mb]
                elif home[stage - 1] == rank:
                    x = made.pop((0, stage - 1, mb)).detach().requires_grad_()
                else:
                    work, x = posted.pop((0, stage - 1, mb))
                    work.wait()
                    x.requires_grad_()
                out = modules[stage](x)
                if stage == last:
                    out = self.loss_fn(out, targets[mb]) / self.count
                else:
                    made[0, stage, mb] = out
                saved[stage, mb] = x, out
            elif op == Op.B or op == Op.I:
                x, out = saved.pop((stage, mb))
                if stage == last:
                    out.backward()
                else:
                    if home[stage + 1] == rank:
                        grad = made.pop((1, stage + 1, mb))
                    else:
                        work, grad = posted.pop((1, stage + 1, mb))
                        work.wait()
                    out.backward(grad)
                if stage > 0:
                    made[1, stage, mb] = x.grad
            elif op == Op.SEND_F:
                sends.append(dist.isend(made.pop((0, stage, mb)).detach(), home[stage + 1]))
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
