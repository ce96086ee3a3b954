"""The weight products of one stage and microbatch, from its backward for the input to its backward for the weights.

Draining does what autograd's AccumulateGrad would have done: sum what a parameter gets within the microbatch, cast, add
to `.grad`, call hooks once. Source of the split: Qi et al., Zero Bubble Pipeline Parallelism, arXiv 2401.10241.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from hocket.errors import PipelineError


class Product:
    """What the gradients of one call's parameters are made of."""

    __slots__ = ("_gradients", "_versions", "grad", "module", "parameters", "x")

    def __init__(
        self,
        module: nn.Module,
        gradients: Callable[[nn.Module, torch.Tensor, torch.Tensor], Sequence[torch.Tensor | None]],
        parameters: Sequence[nn.Parameter | None],
        grad: torch.Tensor,
        x: torch.Tensor,
    ):
        """gradients(module, grad, x) gives one for each of the parameters."""
        self.module, self._gradients, self.parameters = module, gradients, parameters
        # Without the graphs that they come from.
        self.grad, self.x = (t.detach() if t.requires_grad else t for t in (grad, x))
        self._versions = grad._version, x._version

    def compute(self) -> Sequence[torch.Tensor | None]:
        """The parameters' gradients. Raises PipelineError if what they are made of has changed since."""
        if self._versions != (self.grad._version, self.x._version):
            raise PipelineError(
                f"{type(self.module).__name__}: its input, or the gradient of its output, was changed in place after "
                "the backward for the input; leave them as they are until the backward for the weights"
            )
        return self._gradients(self.module, self.grad, self.x)


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
        products, uses, sums = self._products, self._uses(), {}
        while products:
            product = products.popleft()
            for parameter, gradient in zip(product.parameters, product.compute(), strict=True):
                if parameter is None or not parameter.requires_grad:
                    continue
                key = id(parameter)
                left = uses[key] = uses[key] - 1
                if key in sums:
                    total = sums.pop(key)
                    gradient = total if gradient is None else total.add_(gradient)
                if gradient is None:
                    continue
                if left:
                    sums[key] = gradient
                else:
                    self._owed.pop(parameter, None)
                    _accumulate(parameter, gradient)
        while self._owed:
            _call_hooks(self._owed.popitem()[0])

    def _uses(self) -> dict[int, int]:
        """How many products each parameter has, by id."""
        uses: dict[int, int] = {}
        for product in self._products:
            for parameter in product.parameters:
                uses[id(parameter)] = uses.get(id(parameter), 0) + 1
        return uses

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


def _accumulate(parameter: nn.Parameter, gradient: torch.Tensor) -> None:
    if parameter._backward_hooks:
        # Registered since the forward. Autograd knows how to call them, and those after accumulation.
        torch.autograd.backward(parameter, gradient.to(parameter.grad_dtype or parameter.dtype))
        return
    grad = parameter.grad
    if grad is None:
        parameter.grad = _like(parameter, gradient)
    else:
        # Not addmm_, which would save a temporary but round otherwise than autograd, which multiplies and then adds.
        grad.add_(gradient if gradient.dtype == grad.dtype else gradient.to(grad.dtype))
    _call_hooks(parameter)


def _like(parameter: nn.Parameter, gradient: torch.Tensor) -> torch.Tensor:
    """In the dtype and with the strides that the parameter's gradient must have."""
    gradient = gradient.to(parameter.grad_dtype or parameter.dtype)
    if gradient.stride() == parameter.stride():
        return gradient
    return torch.empty_like(parameter, dtype=gradient.dtype).copy_(gradient)


def _call_hooks(parameter: nn.Parameter) -> None:
    hooks = parameter._post_accumulate_grad_hooks
    if hooks:
        for hook in list(hooks.values()):
            hook(parameter)
