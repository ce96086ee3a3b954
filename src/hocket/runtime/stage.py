"""One stage: a module with its forward, its backward in one piece or two, and a store for each microbatch.

The store holds what backward needs and nothing else: the leaves that stand for the stage's inputs, and the places in
the autograd graph where the outputs' gradients enter. It is emptied as soon as a value is consumed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from hocket.errors import ConfigError
from hocket.runtime.backward import BackwardSplitter, Root
from hocket.runtime.data_parallel import NoSync, gradient_sync
from hocket.runtime.info import PipelineStageInfo
from hocket.runtime.payload import Layout, as_call, pack, unpack


class _Entry(torch.autograd.Function):
    """Gives a stage its input as a tensor of its own: no leaf and no view, so that in-place ops on it work.

    The leaf holds no bytes: they live for as long as the stage's own graph needs them.
    """

    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        return value.data  # counts its in-place changes by itself; `detach()` would be a view to autograd

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, None]:
        return grads[0], None


_SMALL = 1 << 16
"""Bytes up to which a copy takes less time than the Function above, and may stay until backward."""


class Received(NamedTuple):
    """What came from the stage before, and whether that lives on this rank."""

    layout: Layout
    tensors: list[torch.Tensor]
    local: bool


class Saved:
    """What backward of one microbatch needs of the inputs and the outputs that require grad, in their layouts' order.

    Of outputs that is the place in the graph: their bytes are free to go when they are sent.
    """

    __slots__ = ("leaves", "outputs", "seeds")

    def __init__(self) -> None:
        self.leaves: list[torch.Tensor] = []
        self.outputs: list[Root] = []
        self.seeds: list[torch.Tensor] = []
        """The outputs' gradients, where no other stage sends them."""


class Stage:
    """One stage of the pipeline on this rank. `split` says whether its program has I and W."""

    def __init__(self, module: nn.Module, info: PipelineStageInfo, *, split: bool):
        self.module, self.info, self.index = module, info, info.current_stage
        self.splitter = BackwardSplitter(module, split=split)
        self.sync = gradient_sync(module)
        self._unsynced = type(self.sync) is NoSync
        self.saved: dict[int, Saved] = {}
        self.final_microbatch = -1
        """The microbatch whose backward is the stage's last of the step."""
        self._signature = inspect.signature(_innermost(module).forward)
        self.keywords = _keywords(self._signature)
        """The keyword arguments that the module's forward names; None if it has `**kwargs` and takes any."""
        self.takes = _keyword_filter(self.keywords)
        """Those of a step's keyword arguments that the module's forward names, or all if it has `**kwargs`."""

    def forward(
        self,
        microbatch: int,
        received: Received | None,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        train: bool,
        halved: bool,
    ) -> Any:
        """Run the module on what the stage before has sent (or, on stage 0, on `args`), and on the step's kwargs.

        halved: this microbatch's backward comes as I and W, not as B.
        """
        saved = Saved()
        if kwargs:
            kwargs = self.takes(kwargs)
        if received is not None:
            args, sent = self._enter(received, saved, train=train)
            if sent:
                kwargs = {**kwargs, **sent}
        if not train:
            return self.module(*args, **kwargs)
        self.saved[microbatch] = saved
        halved = halved and self.splitter.needs_scope
        if not halved and self._unsynced:
            return self.module(*args, **kwargs)
        with self.sync.forward_scope(), self.splitter.forward_scope(microbatch) if halved else nullcontext():
            return self.module(*args, **kwargs)

    def check_call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Raise ConfigError if forward cannot be called with these: an argument missing, one too many, or one twice."""
        try:
            self._signature.bind(*args, **self.takes(kwargs))
        except TypeError as error:
            raise ConfigError(
                f"stage {self.index} ({type(_innermost(self.module)).__name__}) takes {self._signature}, but got "
                f"{len(args)} positional arguments and the keywords {sorted(self.takes(kwargs))}: {error}"
            ) from error

    def _enter(self, received: Received, saved: Saved, *, train: bool) -> tuple[tuple[Any, ...], dict[str, Any]]:
        tensors = received.tensors
        if train:
            tensors = list(tensors)
            for index in received.layout.grads:
                value = tensors[index]
                if value.nbytes <= _SMALL:
                    leaf = value.requires_grad_()
                    tensors[index] = leaf.clone()
                else:
                    leaf = value.new_empty(1).expand(value.shape).requires_grad_()
                    # The stage before may still hold what it handed over; in-place ops must not reach that.
                    tensors[index] = _Entry.apply(leaf, value.clone() if received.local else value)
                saved.leaves.append(leaf)
        return as_call(unpack(received.layout, tensors))

    def leave(self, microbatch: int, output: Any) -> tuple[Layout, list[torch.Tensor]]:
        """Note which outputs need gradients, and return all of them detached, as they travel on."""
        layout, tensors = pack(output)
        saved = self.saved.get(microbatch)
        if saved is not None:
            saved.outputs = [get_gradient_edge(tensors[index]) for index in layout.grads]
        kept = self._buffer_storages() if any(t.grad_fn is None for t in tensors) else ()
        # A buffer may change in the next forward, before the send is through or the next stage has run.
        return layout, [t.detach().clone() if kept and _storage(t) in kept else t.detach() for t in tensors]

    def _buffer_storages(self) -> set[int]:
        return {_storage(buffer) for buffer in self.module.buffers() if buffer.numel()}

    def root(self, microbatch: int, loss: torch.Tensor, gradient: torch.Tensor) -> None:
        """Let backward of this microbatch start from `loss`, with that gradient."""
        if loss.requires_grad:
            saved = self.saved[microbatch]
            saved.outputs = [loss]
            saved.seeds = [gradient]

    def backward_full(self, microbatch: int, gradients: Sequence[torch.Tensor] | None) -> list[torch.Tensor]:
        """B. Gradients of the outputs in (None: this stage has the loss), of the inputs out."""
        return self._backward(self.splitter.backward_full, microbatch, gradients)

    def backward_input(self, microbatch: int, gradients: Sequence[torch.Tensor] | None) -> list[torch.Tensor]:
        """I: like B, but what the weights need may be left to W."""
        return self._backward(self.splitter.backward_input, microbatch, gradients)

    def backward_weight(self, microbatch: int) -> None:
        """W: the rest of I."""
        self.splitter.backward_weight(microbatch)

    def _backward(
        self,
        run: Callable[..., Sequence[torch.Tensor | None]],
        microbatch: int,
        gradients: Sequence[torch.Tensor] | None,
    ) -> list[torch.Tensor]:
        saved = self.saved.pop(microbatch)
        found: Sequence[torch.Tensor | None] = [None] * len(saved.leaves)
        self.sync.before_backward(microbatch == self.final_microbatch)
        if saved.outputs:
            found = run(microbatch, saved.outputs, gradients or saved.seeds, saved.leaves)
        else:
            self.splitter.discard(microbatch)
        return [
            torch.zeros_like(leaf, memory_format=torch.contiguous_format) if grad is None else grad
            for leaf, grad in zip(saved.leaves, found, strict=True)
        ]

    def forget(self) -> None:
        """Drop what a failed step left behind."""
        for microbatch in list(self.saved):
            self.splitter.discard(microbatch)
        self.saved.clear()
        self.sync.without_backward()


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _keywords(signature: inspect.Signature) -> frozenset[str] | None:
    parameters = signature.parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return None
    return frozenset(p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY))


def _keyword_filter(names: frozenset[str] | None) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    if names is None:
        return dict
    return lambda kwargs: {name: value for name, value in kwargs.items() if name in names}


def _innermost(module: nn.Module) -> nn.Module:
    """The module whose signature counts, inside wrappers that take anything and pass it on."""
    while True:
        inner = getattr(module, "_orig_mod", None)
        if inner is None and isinstance(module, nn.parallel.DistributedDataParallel):
            inner = module.module
        if not isinstance(inner, nn.Module):
            return module
        module = inner
