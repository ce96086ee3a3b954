"""Runs a stage's (F, I, W) over several microbatches beside plain autograd, and compares outputs and gradients.

A case makes a module and its inputs. The reference is a second module made from the same seed that hocket never saw.
Orders of actions in which a parameter gets its microbatches one after the other must agree in every bit.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree

from hocket.runtime.backward import BackwardSplitter, SplitMethod

MICROBATCHES = 3


@dataclass
class Case:
    """A kind of stage: `module` and `inputs` are called under a fixed seed."""

    module: Callable[[], nn.Module]
    inputs: Callable[[], Any] = lambda: torch.randn(4, 8)
    """A tensor or a tuple of them; floating ones require grad."""
    method: SplitMethod = SplitMethod.DEFERRED
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    """A context for each forward."""
    prepare: Callable[[nn.Module], None] = lambda module: None
    """What is done to the module before hocket sees it."""
    inputs_require_grad: bool = True
    bound: float = 0.0
    """Relative error allowed; 0: equal in every bit."""
    grads: Callable[[Sequence[torch.Tensor]], list[torch.Tensor | None]] | None = None
    """Gradients of the outputs; by default random ones."""
    late: Sequence[str] | None = None
    """Parameters that must have no gradient of this microbatch before W; None: all Linear weights if deferred."""


@dataclass
class Ran:
    outputs: list[list[torch.Tensor]] = field(default_factory=list)
    input_grads: list[list[torch.Tensor | None]] = field(default_factory=list)
    grads: dict[str, torch.Tensor | None] = field(default_factory=dict)
    """After all."""


def make(case: Case, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    module = case.module()
    case.prepare(module)
    return module


def batches(case: Case, count: int = MICROBATCHES) -> list[tuple[list[torch.Tensor], list[Any]]]:
    """For each microbatch its leaves, and the arguments that contain them."""
    found = []
    for index in range(count):
        torch.manual_seed(100 + index)
        values = case.inputs()
        arguments = list(values) if isinstance(values, tuple) else [values]
        leaves = [t for t in arguments if torch.is_tensor(t) and t.is_floating_point() and case.inputs_require_grad]
        for leaf in leaves:
            leaf.requires_grad_()
        found.append((leaves, arguments))
    return found


def forward(case: Case, module: nn.Module, arguments: Sequence[Any], index: int) -> list[torch.Tensor]:
    torch.manual_seed(200 + index)
    with case.around():
        output = module(*arguments)
    return [t for t in _pytree.tree_leaves(output) if torch.is_tensor(t) and t.requires_grad]


def output_grads(case: Case, outputs: Sequence[torch.Tensor], index: int) -> list[torch.Tensor | None]:
    torch.manual_seed(300 + index)
    return case.grads(outputs) if case.grads else [torch.randn_like(t) for t in outputs]


def grads_of(module: nn.Module) -> dict[str, torch.Tensor | None]:
    return {name: None if p.grad is None else p.grad.clone() for name, p in module.named_parameters()}


def plain(case: Case, module: nn.Module) -> Ran:
    """One process's own backward, microbatch after microbatch."""
    ran = Ran()
    for index, (leaves, arguments) in enumerate(batches(case)):
        outputs = forward(case, module, arguments, index)
        pairs = [
            (t, g)
            for t, g in zip(outputs, output_grads(case, outputs, index), strict=True)
            if g is not None or t.numel() == 1
        ]
        if pairs:
            torch.autograd.backward([t for t, _ in pairs], [g for _, g in pairs])
        ran.outputs.append([t.detach() for t in outputs])
        ran.input_grads.append([leaf.grad for leaf in leaves])
    ran.grads = grads_of(module)
    return ran


def split(case: Case, module: nn.Module, splitter: BackwardSplitter, order: str = "FIW") -> Ran:
    """The same by hocket. order: FIW runs each microbatch alone; FFIIWW all forwards, then all I, then all W; FB."""
    ran = Ran()
    inputs = batches(case)
    outputs: dict[int, list[torch.Tensor]] = {}

    def run(letter: str, index: int) -> None:
        leaves, arguments = inputs[index]
        if letter == "F":
            with splitter.forward_scope(index):
                outputs[index] = forward(case, module, arguments, index)
            ran.outputs.append([t.detach() for t in outputs[index]])
        elif letter == "W":
            splitter.backward_weight(index)
        else:
            backward = splitter.backward_input if letter == "I" else splitter.backward_full
            mine = outputs.pop(index)
            ran.input_grads.append(backward(index, mine, output_grads(case, mine, index), leaves))

    if len(set(order)) == len(order):
        steps = [(letter, index) for index in range(len(inputs)) for letter in order]
    else:
        steps = [(letter, index) for letter in dict.fromkeys(order) for index in range(len(inputs))]
    for letter, index in steps:
        run(letter, index)
    ran.grads = grads_of(module)
    assert not splitter._queues and not splitter._cuts
    return ran


def assert_equal(ours: Any, theirs: Any, bound: float, what: str) -> None:
    if ours is None or theirs is None:
        assert ours is None and theirs is None, f"{what}: {ours} for {theirs}"
        return
    assert ours.dtype == theirs.dtype, what
    if bound == 0.0:
        assert torch.equal(ours, theirs), f"{what}: differs by {float((ours - theirs).abs().max())}"
    else:
        assert float((ours - theirs).abs().max()) <= bound * max(float(theirs.abs().max()), 1e-6), what


def assert_same(ours: Ran, theirs: Ran, bound: float) -> None:
    for kind in ("outputs", "input_grads"):
        for index, (mine, other) in enumerate(zip(getattr(ours, kind), getattr(theirs, kind), strict=True)):
            for a, b in zip(mine, other, strict=True):
                assert_equal(a, b, bound, f"{kind} of microbatch {index}")
    _assert_grads(ours.grads, theirs.grads, bound)


def _assert_grads(ours: dict[str, Any], theirs: dict[str, Any], bound: float) -> None:
    assert ours.keys() == theirs.keys()
    for name in theirs:
        assert_equal(ours[name], theirs[name], bound, name)


def linear_weights(module: nn.Module) -> list[str]:
    """Names of the weights of nn.Linear modules that require grad."""
    found = [(f"{name}.weight", m) for name, m in module.named_modules() if isinstance(m, nn.Linear)]
    return [name.lstrip(".") for name, m in found if m.weight.requires_grad]


def check(case: Case) -> BackwardSplitter:
    """All orders agree with plain autograd, and I alone gives the inputs' gradients and no late weight's."""
    reference = plain(case, make(case))
    for order in ("FIW", "FFIIWW", "FB"):
        module = make(case)
        splitter = BackwardSplitter(module, split=True)
        assert splitter.choice.method is case.method, splitter.choice
        assert_same(split(case, module, splitter, order), reference, case.bound)
    _check_late(case, reference)
    return splitter


def _check_late(case: Case, reference: Ran) -> None:
    """After I: the inputs' gradients are there, late weights' are not; after W they are."""
    module = make(case)
    splitter = BackwardSplitter(module, split=True)
    names = case.late
    if names is None:
        names = linear_weights(module) if case.method is SplitMethod.DEFERRED else []
    parameters = dict(module.named_parameters())
    ((leaves, arguments), *_) = batches(case)
    with splitter.forward_scope(0):
        outputs = forward(case, module, arguments, 0)
    found = splitter.backward_input(0, outputs, output_grads(case, outputs, 0), leaves)
    for a, b in zip(found, reference.input_grads[0], strict=True):
        assert_equal(a, b, case.bound, "input gradient of I alone")
    late = [name for name in names if reference.grads[name] is not None]
    for name in late:
        assert parameters[name].grad is None, f"{name} has its gradient before W"
    splitter.backward_weight(0)
    for name in late:
        assert parameters[name].grad is not None, name


def run_input(splitter: BackwardSplitter, module: nn.Module, x: torch.Tensor, key: Any = 0) -> list[Any]:
    """F and I of one microbatch, with ones as gradients."""
    with splitter.forward_scope(key):
        y = module(x)
    return splitter.backward_input(key, [y], [torch.ones_like(y)], [x] if x.requires_grad else [])


def plain_grads(module: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor | None]:
    """What plain autograd gives to the parameters of a copy."""
    twin = copy.deepcopy(module)
    y = twin(x.detach().requires_grad_(x.requires_grad))
    y.backward(torch.ones_like(y))
    return {name: p.grad for name, p in twin.named_parameters()}
