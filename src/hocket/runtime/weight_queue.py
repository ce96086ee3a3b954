"""The weight products of one stage and microbatch, from its backward for the input to its backward for the weights.

Draining does what autograd's AccumulateGrad would have done: sum what a parameter gets within the microbatch, cast, add
to `.grad`, call hooks once. Source of the split: Qi et al., Zero Bubble Pipeline Parallelism, arXiv 2401.10241.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import nn

from hocket.errors import PipelineError

Gradient = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
"""A parameter's gradient; a pair (a, b) of matrices stands for a @ b, which can be added without a temporary."""


class Product(NamedTuple):
    """What the gradients of one call's parameters are made of."""

    name: str
    """Of the module's type, for messages."""
    parameters: Sequence[nn.Parameter | None]
    """Those that get a gradient; None in the place of others."""
    gradients: Callable[[torch.Tensor, torch.Tensor], Sequence[Gradient | None]]
    """gradients(grad, x): one for each of the parameters."""
    grad: torch.Tensor
    x: torch.Tensor
    versions: tuple[int, int]

    def compute(self) -> Iterator[tuple[nn.Parameter, Gradient | None]]:
        """Each parameter with its gradient, if any. Raises PipelineError if what it is made of has changed since."""
        if self.versions != (self.grad._version, self.x._version):
            raise PipelineError(
                f"{self.name}: its input, or the gradient of its output, was changed in place after the backward for "
                "the input; leave them as they are until the backward for the weights"
            )
        for parameter, gradient in zip(self.parameters, self.gradients(self.grad, self.x), strict=True):
            if parameter is not None:
                yield parameter, gradient


class WeightQueue:
    """Products in the order in which backward met them. One for each stage and microbatch: autograd has threads."""

    def __init__(self) -> None:
        self._products: deque[Product] = deque()
        self._owed: dict[nn.Parameter, None] = {}
        self._drained = False
        self.anchor = torch.empty(0, requires_grad=True)
        """A leaf that makes the output of a deferring module require grad where its input does not."""

    def __len__(self) -> int:
        return len(self._products)

    def put(self, product: Product) -> None:
        """Keep a product for `drain`; if a backward runs after that, it is done at once."""
        self._products.append(product)
        if self._drained:
            self.drain()

    @torch.no_grad()
    def drain(self) -> None:
        """Multiply, accumulate into `.grad`, call hooks, and let go of each product when it is done.

        What a parameter used several times gets is summed up first and accumulated once, as autograd does.
        """
        self._drained = True
        uses = Counter(id(p) for product in self._products for p in product.parameters)
        sums: dict[int, torch.Tensor] = {}
        while self._products:
            for parameter, gradient in self._products.popleft().compute():
                key = id(parameter)
                uses[key] -= 1
                if key in sums:
                    total = sums.pop(key)
                    gradient = total if gradient is None else total.add_(_dense(gradient))
                if gradient is None:
                    continue
                if uses[key]:
                    sums[key] = _dense(gradient)
                elif parameter.requires_grad:
                    self._owed.pop(parameter, None)
                    _accumulate(parameter, gradient)
        for parameter in list(self._owed):
            del self._owed[parameter]
            _call_hooks(parameter)

    def clear(self) -> None:
        """Forget all products."""
        self._products.clear()
        self._owed.clear()

    @contextmanager
    def holding_hooks(self, parameters: Iterable[nn.Parameter]) -> Generator[None]:
        """Put off the post-accumulate-grad hooks of these parameters to `drain`.

        A weight may be used outside its module too. That part is accumulated by the backward inside, where hooks would
        see an unfinished gradient, and `drain` would call them a second time.
        """
        held = [(hooks, list(hooks.items())) for p in parameters if (hooks := p._post_accumulate_grad_hooks)]
        try:
            for hooks, _ in held:
                hooks.clear()
                hooks[-1] = lambda parameter: self._owed.setdefault(parameter)
            yield
        finally:
            for hooks, items in held:
                hooks.clear()
                hooks.update(items)


def _dense(gradient: Gradient) -> torch.Tensor:
    return gradient if isinstance(gradient, torch.Tensor) else gradient[0] @ gradient[1]


def _accumulate(parameter: nn.Parameter, gradient: Gradient) -> None:
    if parameter._backward_hooks:
        # Registered since the forward. Autograd knows how to call them, and those after accumulation.
        torch.autograd.backward(parameter, _dense(gradient).to(parameter.grad_dtype or parameter.dtype))
        return
    grad = parameter.grad
    if grad is None:
        parameter.grad = _like(parameter, _dense(gradient))
    elif isinstance(gradient, tuple) and _multiplies_in_place(grad, *gradient):
        grad.addmm_(*gradient)
    else:
        grad.add_(_dense(gradient).to(grad.dtype))
    _call_hooks(parameter)


def _multiplies_in_place(grad: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> bool:
    # Half precision is slower in one step than in two on CPUs.
    half = grad.dtype in (torch.bfloat16, torch.float16)
    return grad.dtype == a.dtype == b.dtype and not (half and grad.device.type == "cpu")


def _like(parameter: nn.Parameter, gradient: torch.Tensor) -> torch.Tensor:
    """In the dtype and with the strides that the parameter's gradient must have."""
    gradient = gradient.to(parameter.grad_dtype or parameter.dtype)
    if gradient.stride() == parameter.stride():
        return gradient
    return torch.empty_like(parameter, dtype=gradient.dtype).copy_(gradient)


def _call_hooks(parameter: nn.Parameter) -> None:
    hooks = parameter._post_accumulate_grad_hooks
    for hook in list(hooks.values()) if hooks else ():
        hook(parameter)
