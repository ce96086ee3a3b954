"""Hooks on parameters, tensors and modules fire as often and with what they fire with in one backward."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hocket.runtime.backward import BackwardSplitter, SplitMethod
from runtime.split_cases import Case, assert_equal, check, plain_grads, run_input
from runtime.split_stages import WIDTH, Fn, linear, mlp, tied

DEFERRED, AUTOGRAD, FULL = SplitMethod.DEFERRED, SplitMethod.AUTOGRAD, SplitMethod.FULL


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("stage", [mlp, lambda: nn.Conv1d(4, 4, 3), tied], ids=["deferred", "autograd", "tied"])
def test_post_accumulate_hooks_fire_once_with_the_gradient(stage: Any, full: bool) -> None:
    module = stage()
    x = {nn.Conv1d: torch.randn(2, 4, 9)}.get(type(module), torch.randn(4, WIDTH))
    x = torch.randint(11, (4,)) if stage is tied else x.requires_grad_()
    expected = plain_grads(module, x)
    fired: Counter[str] = Counter()
    for name, p in module.named_parameters():

        def hook(p: torch.Tensor, name: str = name) -> None:
            fired[name] += 1
            assert_equal(p.grad, expected[name], 1e-6, name)

        p.register_post_accumulate_grad_hook(hook)
    splitter = BackwardSplitter(module, split=True)
    for key in range(3):
        for p in module.parameters():
            p.grad = None
        with splitter.forward_scope(key):
            y = module(x)
        backward = splitter.backward_full if full else splitter.backward_input
        backward(key, [y], [torch.ones_like(y)], [x] if x.requires_grad else [])
        splitter.backward_weight(key)
        assert set(fired.values()) == {key + 1} and len(fired) == len(expected)


def test_hooks_of_deferred_weights_fire_in_w_and_of_others_in_i() -> None:
    module = nn.Sequential(nn.LayerNorm(WIDTH), linear())
    fired: list[str] = []
    for name, p in module.named_parameters():
        p.register_post_accumulate_grad_hook(lambda p, name=name: fired.append(name))
    splitter = BackwardSplitter(module, split=True)
    run_input(splitter, module, torch.randn(4, WIDTH))
    assert sorted(fired) == ["0.bias", "0.weight"]
    splitter.backward_weight(0)
    assert sorted(fired) == ["0.bias", "0.weight", "1.bias", "1.weight"]


def test_hook_of_a_weight_that_only_others_used_fires_in_w() -> None:
    module = Fn(lambda m, x: F.linear(x, m.a.weight), a=linear())
    fired: list[bool] = []
    module.a.weight.register_post_accumulate_grad_hook(lambda p: fired.append(p.grad is not None))
    splitter = BackwardSplitter(module, split=True)
    run_input(splitter, module, torch.randn(4, WIDTH))
    splitter.backward_weight(0)
    assert fired == [True]
    assert list(module.a.weight._post_accumulate_grad_hooks) != [-1]


@pytest.mark.parametrize("when", ["before", "between", "after_forward"])
def test_tensor_hook_on_a_weight_sees_and_changes_its_gradient(when: str) -> None:
    module, x = mlp(), torch.randn(4, WIDTH)
    expected = plain_grads(module, x)
    weight, seen = module[0].weight, [0]

    def double(grad: torch.Tensor) -> torch.Tensor:
        seen[0] += 1
        return grad * 2

    if when == "before":
        weight.register_hook(double)
    splitter = BackwardSplitter(module, split=True)
    if when == "between":
        weight.register_hook(double)
    with splitter.forward_scope(0):
        y = module(x)
    if when == "after_forward":
        weight.register_hook(double)
    splitter.backward_input(0, [y], [torch.ones_like(y)], [])
    assert (weight.grad is None) == (when == "after_forward")
    splitter.backward_weight(0)
    assert seen == [1]
    assert_equal(weight.grad, expected["0.weight"] * 2, 0.0, "weight")
    assert_equal(module[2].weight.grad, expected["2.weight"], 0.0, "other weight")


def test_accumulator_held_by_others_is_left_alone() -> None:
    """As wrappers do that reduce gradients in hooks on it."""
    module, x = mlp(), torch.randn(4, WIDTH)
    node = torch.autograd.graph.get_gradient_edge(module[0].weight).node
    seen: list[int] = []
    node.register_hook(lambda *args: seen.append(1))
    splitter = BackwardSplitter(module, split=True)
    run_input(splitter, module, x)
    assert seen == [1]
    splitter.backward_weight(0)
    assert seen == [1]
    assert splitter.choice.method is DEFERRED and "done in I: those of 1 Linear" in splitter.choice.reason


def test_module_hooks_see_what_they_see_without_hocket() -> None:
    def run(split: bool) -> list[Any]:
        torch.manual_seed(0)
        module, seen = mlp(), []
        for layer in module:
            layer.register_forward_pre_hook(lambda m, args: (args[0] * 0.5,))
            layer.register_forward_hook(lambda m, args, y: y + 1)
            layer.register_full_backward_pre_hook(lambda m, grads: seen.append(grads[0].clone()))
            layer.register_full_backward_hook(lambda m, gx, gy: seen.append(gx[0].clone()))
        x = torch.randn(4, WIDTH, requires_grad=True)
        splitter = BackwardSplitter(module, split=split)
        seen += run_input(splitter, module, x)
        splitter.backward_weight(0)
        return seen + [p.grad for p in module.parameters()]

    for a, b in zip(run(True), run(False), strict=True):
        assert_equal(a, b, 0.0, "seen by a hook")


def test_tensor_hook_in_the_forward_of_a_cut_graph_changes_its_gradient_once() -> None:
    def scaled(m: Any, x: torch.Tensor) -> torch.Tensor:
        y = m.a(x)
        y.register_hook(lambda g: g * 3)
        return m.b(y)

    check(Case(lambda: Fn(scaled, a=nn.Conv1d(4, 4, 3), b=nn.Conv1d(4, 4, 3)), lambda: torch.randn(2, 4, 9), AUTOGRAD))
