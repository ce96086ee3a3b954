"""The backward of one stage, in one piece (B) or in two: for the input (I), then for the weights (W).

What a stage does in I and in W is chosen when it is built, and `choice` says why in words:

- DEFERRED: the weight products of `nn.Linear` and of types registered with `register_deferred` wait in a queue for W;
  all else is done once, in I. What stays from I to W is each product's input and the gradient of its output.
- AUTOGRAD: I runs the graph towards the inputs, W runs the rest of it (graph_split.py). The graph is checked for each
  microbatch; one that cannot be cut safely is run whole in I.
- FULL: I is the full backward, W does nothing.

The caller enters `forward_scope(key)` around each forward that will have a backward, calls `backward_full`, or
`backward_input` and later `backward_weight`, once for each key, or `discard`. Between I and W it changes neither the
stage's inputs nor the outputs' gradients in place (PipelineError where that can be seen).

Source: Qi et al., Zero Bubble Pipeline Parallelism, arXiv 2401.10241.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge

from hocket.runtime.deferred import collecting, patch, register_deferred
from hocket.runtime.graph_split import Cut, cut, run_first, run_second
from hocket.runtime.split_choice import SplitChoice, SplitMethod, choose_split, deferrable
from hocket.runtime.weight_queue import WeightQueue

__all__ = ["BackwardSplitter", "Root", "SplitChoice", "SplitMethod", "choose_split", "register_deferred"]


Root = torch.Tensor | GradientEdge
"""Where backward starts: an output, or its place in the graph."""


class BackwardSplitter:
    """The backward of one stage.

    module: the stage. split: False if the schedule has no I and W; True patches the module's deferrable layers for
    good (they get a subclass of their class; state dict, copies and pickles stay as they were).
    """

    def __init__(self, module: nn.Module, *, split: bool):
        if split:
            self.choice = choose_split(module)
        else:
            self.choice = SplitChoice(SplitMethod.FULL, "the schedule runs each backward in one piece")
        self._deferring = deferrable(module) if self.choice.method is SplitMethod.DEFERRED else []
        for layer in self._deferring:
            patch(layer)
        self._queues: dict[Hashable, WeightQueue] = {}
        self._cuts: dict[Hashable, Cut] = {}

    @property
    def needs_scope(self) -> bool:
        """False if `forward_scope` does nothing, and need not be entered."""
        return bool(self._deferring)

    def forward_scope(self, key: Hashable) -> AbstractContextManager[None]:
        """Entered around the forward of microbatch `key`, so that its layers find their queue."""
        if not self._deferring or not torch.is_grad_enabled():
            return nullcontext()
        self.discard(key)
        queue = self._queues[key] = WeightQueue()
        return collecting(queue)

    def backward_full(
        self,
        key: Hashable,
        outputs: Sequence[Root],
        grad_outputs: Sequence[torch.Tensor | None],
        inputs: Sequence[torch.Tensor],
    ) -> list[torch.Tensor | None]:
        """B. Returns the gradients of `inputs` and adds those of the parameters to `.grad`.

        outputs: tensors of any shapes, of which those that do not require grad are passed over, or edges of the graph.
        grad_outputs: one of the same shape each; None stands for 1 at a scalar tensor, and elsewhere for no gradient.
        inputs: leaves that require grad; None is returned for one that no output depends on.
        """
        found = self._run(key, outputs, grad_outputs, inputs)
        self.backward_weight(key)
        return found

    def backward_input(
        self,
        key: Hashable,
        outputs: Sequence[Root],
        grad_outputs: Sequence[torch.Tensor | None],
        inputs: Sequence[torch.Tensor],
    ) -> list[torch.Tensor | None]:
        """I: like `backward_full`, but what the parameters get may be left to `backward_weight`."""
        return self._run(key, outputs, grad_outputs, inputs, split=self.choice.method is SplitMethod.AUTOGRAD)

    def backward_weight(self, key: Hashable) -> None:
        """W: the rest of I; afterwards nothing is kept for `key`."""
        queue = self._queues.pop(key, None)
        if queue is not None:
            queue.drain()
        division = self._cuts.pop(key, None)
        while division is not None and division.late:
            run_second(division.late.pop())

    def discard(self, key: Hashable) -> None:
        """Forget microbatch `key`."""
        self._cuts.pop(key, None)
        queue = self._queues.pop(key, None)
        if queue is not None:
            queue.clear()

    def _run(
        self,
        key: Hashable,
        outputs: Sequence[Root],
        grad_outputs: Sequence[torch.Tensor | None],
        inputs: Sequence[torch.Tensor],
        split: bool = False,
    ) -> list[torch.Tensor | None]:
        """One call of the engine; with `split`, its rest is kept for W."""
        filled = map(_gradient, outputs, grad_outputs)
        pairs = [(output, grad) for output, grad in zip(outputs, filled, strict=True) if grad is not None]
        if not pairs:
            return [None] * len(inputs)
        roots, grads = zip(*pairs, strict=True)
        queue = self._queues.get(key)
        if queue is not None:
            with collecting(queue, backward=True), queue.holding_hooks(self._parameters()):
                _backward(roots, grads)
        elif split and (division := cut(roots, inputs)) is not None and division.late:
            run_first(division, roots, grads)
            self._cuts[key] = division
        else:
            _backward(roots, grads)
        return [_take_grad(leaf) for leaf in inputs]

    def _parameters(self) -> Iterator[nn.Parameter]:
        for layer in self._deferring:
            for parameter in layer._parameters.values():
                if parameter is not None:
                    yield parameter


# A private name of torch, old and used by others: torch.autograd.backward without its checks of the gradients' shapes,
# which take as long as the backward of a small layer. Here each gradient was made for its output.
_run_engine: Any = torch.autograd.Variable._execution_engine.run_backward  # type: ignore[attr-defined]


def _backward(roots: tuple[Root, ...], grads: tuple[torch.Tensor, ...]) -> None:
    _run_engine(roots, grads, False, False, (), allow_unreachable=True, accumulate_grad=True)


def _gradient(output: Root, grad: torch.Tensor | None) -> torch.Tensor | None:
    """What backward starts with at `output`, if anything."""
    if isinstance(output, GradientEdge):
        return grad
    if grad is None and output.numel() == 1:
        grad = torch.ones_like(output)
    return grad if output.requires_grad else None


def _take_grad(leaf: torch.Tensor) -> torch.Tensor | None:
    grad, leaf.grad = leaf.grad, None
    return grad
