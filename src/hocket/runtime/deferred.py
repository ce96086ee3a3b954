"""Weight products put off from the backward for the input to the backward for the weights.

A module whose type is registered (`nn.Linear` is) runs, inside a `collecting` scope, through a Function of its own:
its backward computes the input's gradient at once, and puts what the weights' gradients are made of into the queue of
this stage and microbatch. Outside a scope, in compiled code, without gradients, and wherever a parameter is no plain
leaf, the module's own forward runs and autograd does everything.

Parameters are no inputs of the Function, else autograd would call their accumulators, and the hooks there, too early.
Source of the split: Qi et al., Zero Bubble Pipeline Parallelism, arXiv 2401.10241, section 2.
"""

from __future__ import annotations

import copyreg
import functools
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from hocket.errors import ConfigError, PipelineError
from hocket.runtime.weight_queue import Product, WeightQueue

# --- which types -----------------------------------------------------------------------------------------------------


class Rule(NamedTuple):
    """How a module type computes, as registered."""

    parameters: tuple[str, ...]
    forward: Callable[..., torch.Tensor]
    grad_input: Callable[..., torch.Tensor]
    grad_parameters: Callable[..., Sequence[torch.Tensor | None]]


_rules: dict[type[nn.Module], Rule] = {}


def register_deferred(
    module_type: type[nn.Module],
    *,
    forward: Callable[..., torch.Tensor],
    grad_input: Callable[..., torch.Tensor],
    grad_parameters: Callable[..., Sequence[torch.Tensor | None]],
    parameters: Sequence[str] = ("weight", "bias"),
) -> None:
    """Let the weight products of a module type of your own wait for W; call it before `build_schedule`.

    The type's forward must take one tensor x and return one that is affine in x, and use nothing else that requires
    grad but the parameters named, of which the first is the weight. The three functions are pure, and each of `params`
    is None where the module has None:

    - `forward(module, x, *params) -> y`: what the type's own forward computes. Under autocast it gets all floating
      tensors in autocast's dtype.
    - `grad_input(module, grad_y, x, *params) -> grad_x`, of x's shape, in the unit of loss per x; run in I. It takes
      no more from x than its shape.
    - `grad_parameters(module, grad_y, x) -> gradients`, one for each name, of that parameter's shape; run in W. A
      gradient is a new tensor, which may become `.grad`; those of frozen parameters, and None, are dropped.

    x and grad_y have any number of leading dimensions. Subclasses are covered as long as they do not override forward.
    Registering a type again replaces what it had. Raises ConfigError for what is no module type, or without names.

    A matrix kept as (in, out), as in GPT-2's Conv1D:

        register_deferred(
            Conv1D,
            forward=lambda m, x, w, b: x @ w + b,
            grad_input=lambda m, gy, x, w, b: gy @ w.t(),
            grad_parameters=lambda m, gy, x: (x.flatten(0, -2).t() @ gy.flatten(0, -2), gy.flatten(0, -2).sum(0)),
        )
    """
    if not (isinstance(module_type, type) and issubclass(module_type, nn.Module)):
        raise ConfigError(f"register_deferred: {module_type!r} is no subclass of nn.Module")
    if not parameters or isinstance(parameters, str):
        raise ConfigError(f"register_deferred: parameters is {parameters!r}; give the names as a tuple of one or more")
    _rules[module_type] = Rule(tuple(parameters), forward, grad_input, grad_parameters)
    _rule_of.cache_clear()


def rule_of(module: nn.Module) -> Rule | None:
    """The rule that covers `module`: that of its type, or of a base whose forward it has not overridden."""
    return None if "forward" in module.__dict__ else _rule_of(_plain_class(type(module)))


@functools.cache
def _rule_of(cls: type[nn.Module]) -> Rule | None:
    return next((_rules[base] for base in cls.__mro__ if base in _rules and base.forward is cls.forward), None)


def plain_parameters(module: nn.Module, rule: Rule) -> list[nn.Parameter | None] | None:
    """The module's parameters in the rule's order if its weight can be deferred as things stand, else None.

    Not if one is computed from others or of a special type, nor if it has a tensor hook: that may change a gradient,
    which it must see whole.
    """
    try:
        found = [module._parameters[name] for name in rule.parameters]
    except KeyError:
        return None
    for p in found:
        if p is not None and (type(p) is not nn.Parameter or p._backward_hooks):
            return None
    return found if found[0] is not None and found[0].requires_grad else None


# --- which class a module has ----------------------------------------------------------------------------------------


def patch(module: nn.Module) -> None:
    """Give the module a subclass of its class that defers inside a scope; for good, since checkpoint recomputes later.

    The class is swapped, not the instance's forward: a shallow copy would stay bound to the module it came from.
    """
    if "_hocket_plain" not in type(module).__dict__:
        module.__class__ = _deferring_class(type(module))


def _plain_class(cls: type) -> type:
    return cls.__dict__.get("_hocket_plain", cls)


_copyreg: Any = copyreg


@functools.cache
def _deferring_class(cls: type[nn.Module]) -> type[nn.Module]:
    own = cls.forward

    @functools.wraps(own)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # Compiled code is traced through here; its backward is one function that has no place for a queue.
        if not torch.compiler.is_compiling():
            queue = current_queue()
            if queue is not None and len(args) == 1 and not kwargs:
                y = _defer(self, cls, args[0], queue)
                if y is not None:
                    return y
        return own(self, *args, **kwargs)

    def reduce(self: nn.Module, protocol: Any) -> Any:
        # Copies and pickles are of the plain class: they load where hocket is not, and belong to no stage.
        make, arguments, *rest = cls.__reduce_ex__(self, protocol)
        if make is _copyreg.__newobj__:
            make, arguments = _copyreg._reconstructor, (cls, object, None)
        return (make, arguments, *rest)

    body = {"forward": forward, "__reduce_ex__": reduce, "_hocket_plain": cls, "__module__": cls.__module__}
    made = type(cls.__name__, (cls,), body)
    made.__qualname__ = cls.__qualname__
    return made


# --- the scope -------------------------------------------------------------------------------------------------------


class _Local(threading.local):
    queue: WeightQueue | None = None


_local = _Local()
# Checkpoint recomputes in autograd's own threads on accelerators, which know nothing of the caller's.
_in_backward: WeightQueue | None = None


def current_queue() -> WeightQueue | None:
    """The queue of the scope this thread is in, else of the backward that is under way."""
    queue = _local.queue
    return queue if queue is not None else _in_backward


@contextmanager
def collecting(queue: WeightQueue, *, backward: bool = False) -> Generator[None]:
    """Modules that run inside, in this thread (`backward`: in autograd's threads too), use `queue`."""
    global _in_backward
    before, outer = _local.queue, _in_backward
    _local.queue = queue
    if backward:
        _in_backward = queue
    try:
        yield
    except RuntimeError as error:
        if not backward and "have been used in the graph" in str(error):
            error.add_note(
                "under schedules with I and W the weights of nn.Linear and of registered types are not in the graph; "
                "where forward differentiates with respect to one, call nn.functional.linear(x, layer.weight, "
                "layer.bias) in place of layer(x)"
            )
        raise
    finally:
        _local.queue = before
        if backward:
            _in_backward = outer


# --- one call of a module --------------------------------------------------------------------------------------------


class _Call:
    """One forward of a deferring module: what its backward needs, but for the input if that is saved by autograd."""

    __slots__ = ("dtype", "module", "packed", "parameters", "queue", "rule", "unpack", "versions")

    def __init__(
        self, module: nn.Module, rule: Rule, parameters: list[nn.Parameter | None], queue: WeightQueue, x: torch.Tensor
    ):
        self.module, self.rule, self.parameters, self.queue = module, rule, parameters, queue
        self.versions = [0 if p is None else p._version for p in parameters]
        device = x.device.type
        self.dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        self.packed: Any = None
        self.unpack: Callable[[Any], torch.Tensor] | None = None

    def cast(self, tensor: torch.Tensor | None) -> torch.Tensor | None:
        """As autocast would, whose cache could keep weights cast without a graph for those who need one."""
        if tensor is None or not tensor.is_floating_point() or tensor.dtype == torch.float64:
            return tensor
        return tensor.to(self.dtype)

    def values(self) -> list[torch.Tensor | None]:
        """The parameters as the module computes with them.

        Cast anew in backward: a cast copy for each microbatch in flight would add up.
        """
        if self.dtype is None:
            return self.parameters  # type: ignore[return-value]
        return [self.cast(p) for p in self.parameters]

    def check_parameters(self) -> None:
        """Raise PipelineError if they have changed, as autograd does."""
        for p, version in zip(self.parameters, self.versions, strict=True):
            if p is not None and p._version != version:
                raise PipelineError(
                    f"{type(self.module).__name__}: a parameter of shape {tuple(p.shape)} was modified by an inplace "
                    "operation between a forward and its backward; change parameters between steps only"
                )


def _defer(module: nn.Module, cls: type[nn.Module], x: Any, queue: WeightQueue) -> torch.Tensor | None:
    """The module's output, with its weight product left to `queue`; None where autograd must do it."""
    if type(x) not in (torch.Tensor, nn.Parameter) or not torch.is_grad_enabled():
        return None
    rule = _rule_of(cls)
    parameters = rule and plain_parameters(module, rule)
    if not rule or not parameters or torch._C._are_functorch_transforms_active():
        return None
    call = _Call(module, rule, parameters, queue, x)
    if call.dtype is not None:
        x = call.cast(x)
    return _apply(x, None if x.requires_grad else queue.anchor, call)


class _Deferred(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, anchor: torch.Tensor | None, call: _Call) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.call = call
        hooks = _saved_tensors_hooks(False)
        if hooks is None:
            ctx.save_for_backward(x)
        else:
            # `ctx` saves when this returns, but a checkpoint that computes its layers again stops at the last tensor to
            # be saved. Saved here, the product below is left out then, as it is in a plain Linear.
            call.packed, call.unpack = hooks[0](x.detach()), hooks[1]
        y = call.rule.forward(call.module, x, *call.values())
        # In-place ops on a view made in here would be refused.
        return torch.ops.aten._unsafe_view(y, y.shape) if y._is_view() else y

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, None, None]:
        grad, call = grads[0], ctx.call
        if grad is None:
            return None, None, None
        x = ctx.saved_tensors[0] if call.unpack is None else call.unpack(call.packed)
        if grad.dim() != 2:
            grad = grad.contiguous()
        # Not valid inside autograd.grad, which asks for some tensors only, never for a leaf met on the way.
        if torch.autograd._is_checkpoint_valid():
            call.queue.put(Product(call.module, call.rule.grad_parameters, call.parameters, grad, x))
        if not ctx.needs_input_grad[0]:
            return None, None, None
        call.check_parameters()
        return call.rule.grad_input(call.module, grad, x, *call.values()), None, None


# Private names of torch. Function.apply without its detour for functorch, which takes as long as a small product.
_apply: Any = super(torch.autograd.Function, _Deferred).apply  # type: ignore[misc]
_saved_tensors_hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks  # type: ignore[attr-defined]


# --- built-in types --------------------------------------------------------------------------------------------------


def _linear_gradients(
    module: nn.Module, grad: torch.Tensor, x: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None]:
    if grad.dim() != 2:
        grad, x = grad.reshape(-1, grad.shape[-1]), x.reshape(-1, x.shape[-1])
    return grad.t() @ x, None if module.bias is None else grad.sum(0)


register_deferred(
    nn.Linear,
    forward=lambda module, x, weight, bias: nn.functional.linear(x, weight, bias),
    grad_input=lambda module, grad, x, weight, bias: grad.matmul(weight),
    grad_parameters=_linear_gradients,
)
