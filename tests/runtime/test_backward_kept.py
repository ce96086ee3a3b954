"""What a split backward keeps and for how long, what it costs in operations, what can be registered, what it says."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from hocket.errors import ConfigError, PipelineError
from hocket.runtime.backward import BackwardSplitter, SplitMethod, choose_split, register_deferred
from hocket.runtime.deferred import _rule_of, _rules
from runtime.split_cases import Case, assert_equal, check, make, plain_grads, run_input
from runtime.split_stages import WIDTH, Attention, Block, Conv1D, Fn, Scaled, Square, linear, mlp, three_d

DEFERRED, AUTOGRAD, FULL = SplitMethod.DEFERRED, SplitMethod.AUTOGRAD, SplitMethod.FULL


# --- what is kept, and for how long ----------------------------------------------------------------------------------


def test_p77_what_is_returned_and_what_is_accumulated() -> None:
    """The inputs' gradients are returned and not kept; the parameters' are in `.grad`, added to what was there."""
    module, x = mlp(), torch.randn(4, WIDTH, requires_grad=True)
    expected = plain_grads(module, x)
    y = copy.deepcopy(module)(x)
    (wanted,) = torch.autograd.grad(y, x, torch.ones_like(y))
    splitter = BackwardSplitter(module, split=True)
    for key in range(2):
        (found,) = run_input(splitter, module, x, key)
        splitter.backward_weight(key)
        assert torch.equal(found, wanted) and x.grad is None
    for name, p in module.named_parameters():
        assert_equal(p.grad, expected[name] * 2, 0.0, name)


def test_forward_without_gradients_leaves_nothing() -> None:
    module = mlp()
    splitter = BackwardSplitter(module, split=True)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode(), splitter.forward_scope(0):
            assert not module(torch.randn(4, WIDTH)).requires_grad
    assert not splitter._queues
    with splitter.forward_scope(0), torch.no_grad():
        module(torch.randn(4, WIDTH))
    splitter.backward_weight(0)
    assert not splitter._queues


@pytest.mark.parametrize("end", ["backward_weight", "discard"])
@pytest.mark.parametrize("stage", [mlp, lambda: nn.Conv1d(WIDTH, WIDTH, 1)], ids=["deferred", "autograd"])
def test_nothing_is_kept_after_w_or_discard(stage: Any, end: str) -> None:
    module = stage()
    splitter = BackwardSplitter(module, split=True)
    gc.disable()
    try:
        run_input(splitter, module, torch.randn(4, WIDTH, WIDTH, requires_grad=True))
        references = [weakref.ref(kept) for kept in (*splitter._queues.values(), *splitter._cuts.values())]
        references += [weakref.ref(p.x) for queue in splitter._queues.values() for p in queue._products]
        assert references and all(r() is not None for r in references)
        getattr(splitter, end)(0)
        assert all(r() is None for r in references), "kept by a cycle"
    finally:
        gc.enable()
    assert not splitter._queues and not splitter._cuts


def test_products_are_let_go_one_by_one() -> None:
    """The queue is shorter at each accumulation, so that memory falls while W runs."""
    module = nn.Sequential(*(linear(bias=False) for _ in range(4)))
    splitter = BackwardSplitter(module, split=True)
    lengths: list[int] = []
    for p in module.parameters():
        p.register_post_accumulate_grad_hook(lambda p: lengths.append(len(queue)))
    run_input(splitter, module, torch.randn(4, WIDTH))
    queue = splitter._queues[0]
    splitter.backward_weight(0)
    assert lengths == [3, 2, 1, 0]


def test_many_microbatches_in_flight_and_w_in_any_order() -> None:
    module = nn.Sequential(Block(), Block())
    inputs = [three_d().requires_grad_() for _ in range(4)]
    twin = copy.deepcopy(module)
    for x in inputs:
        y = twin(x.detach())
        y.backward(torch.ones_like(y))
    splitter = BackwardSplitter(module, split=True)
    for key, x in enumerate(inputs):
        run_input(splitter, module, x, key)
    for key in (2, 0, 3, 1):
        splitter.backward_weight(key)
    for (name, p), q in zip(module.named_parameters(), twin.parameters(), strict=True):
        assert_equal(p.grad, q.grad, 2e-6, name)


def test_a_change_in_place_between_i_and_w_is_refused() -> None:
    module, x = mlp(), torch.randn(4, WIDTH)
    splitter = BackwardSplitter(module, split=True)
    run_input(splitter, module, x)
    x.mul_(2)
    with pytest.raises(PipelineError, match="changed in place"):
        splitter.backward_weight(0)


def test_a_weight_changed_between_f_and_i_is_refused() -> None:
    module, x = mlp(), torch.randn(4, WIDTH)
    splitter = BackwardSplitter(module, split=True)
    with splitter.forward_scope(0):
        y = module(x)
    with torch.no_grad():
        module[2].weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        splitter.backward_input(0, [y], [torch.ones_like(y)], [])


def test_a_backward_after_w_is_not_lost() -> None:
    module, x = mlp(), torch.randn(4, WIDTH)
    splitter = BackwardSplitter(module, split=True)
    with splitter.forward_scope(0):
        y = module(x)
    splitter.backward_weight(0)
    y.backward(torch.ones_like(y))
    for name, grad in plain_grads(module, x).items():
        assert_equal(module.get_parameter(name).grad, grad, 0.0, name)


# --- the cost, in operations -----------------------------------------------------------------------------------------


def backward_flops(module: nn.Module, x: torch.Tensor, split: bool) -> int:
    splitter = BackwardSplitter(module, split=split)
    with splitter.forward_scope(0):
        y = module(x)
    with FlopCounterMode(display=False) as counter:
        splitter.backward_input(0, [y], [torch.ones_like(y)], [x])
        splitter.backward_weight(0)
    return counter.get_total_flops()


@pytest.mark.parametrize(
    "stage", [Block, Attention, lambda: nn.Sequential(*(nn.Conv1d(5, 5, 3, padding=1) for _ in range(3)))]
)
def test_the_halves_cost_what_the_whole_costs(stage: Any) -> None:
    x = three_d().requires_grad_()
    module = stage()
    assert backward_flops(copy.deepcopy(module), x, split=True) == backward_flops(module, x, split=False)


def test_halves_of_a_block_are_even() -> None:
    """The products of the weights are all in W: their operations are those of the forward's matmuls."""
    module, x = mlp(), torch.randn(4, WIDTH, requires_grad=True)
    splitter = BackwardSplitter(module, split=True)
    with splitter.forward_scope(0):
        y = module(x)
    with FlopCounterMode(display=False) as first:
        splitter.backward_input(0, [y], [torch.ones_like(y)], [x])
    with FlopCounterMode(display=False) as second:
        splitter.backward_weight(0)
    assert first.get_total_flops() == second.get_total_flops() == 2 * 2 * 4 * WIDTH * WIDTH


# --- types of the user's own -----------------------------------------------------------------------------------------


@pytest.fixture
def registered() -> Any:
    register_deferred(
        Conv1D,
        forward=lambda m, x, w, b: x @ w + b,
        grad_input=lambda m, gy, x, w, b: gy @ w.t(),
        grad_parameters=lambda m, gy, x: (x.flatten(0, -2).t() @ gy.flatten(0, -2), gy.flatten(0, -2).sum(0)),
    )
    yield
    del _rules[Conv1D]
    _rule_of.cache_clear()


def test_a_type_is_deferred_once_registered(registered: None) -> None:
    stage = lambda: nn.Sequential(Conv1D(), nn.GELU(), Conv1D())  # noqa: E731
    splitter = check(Case(stage, three_d, bound=1e-6, late=["0.weight", "2.weight", "0.bias"]))
    assert "2 Conv1D with 100%" in splitter.choice.reason
    check(Case(stage, three_d, bound=2e-2, around=lambda: torch.autocast("cpu", torch.bfloat16)))


def test_a_type_that_is_not_registered_is_cut_by_autograd() -> None:
    check(Case(lambda: nn.Sequential(Conv1D(), nn.GELU(), Conv1D()), three_d, AUTOGRAD, late=["0.weight"]))


def test_what_cannot_be_registered() -> None:
    functions: dict[str, Any] = {"forward": None, "grad_input": None, "grad_parameters": None}
    with pytest.raises(ConfigError, match=r"no subclass of nn\.Module"):
        register_deferred(int, **functions)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="give the names"):
        register_deferred(nn.Conv2d, parameters=(), **functions)


# --- the choice and its words ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "stage, method, words",
    [
        (Block, DEFERRED, "4 Linear with 100% of the weights"),
        (lambda: nn.Embedding(9, 4), FULL, "no weights but embeddings"),
        (lambda: nn.Sequential(nn.Embedding(999, WIDTH), Block()), DEFERRED, "4 Linear with 100%"),
        (lambda: nn.Sequential(nn.Conv2d(8, 8, 3), linear()), AUTOGRAD, "cannot be deferred (1 Conv2d)"),
        (lambda: nn.Sequential(nn.Conv2d(8, 8, 1), linear()), DEFERRED, "done in I: those of 1 Conv2d"),
        (lambda: Scaled(4, 4), AUTOGRAD, "1 Scaled"),
        (lambda: nn.ReLU(), FULL, "no parameter requires grad"),
        (lambda: nn.MultiheadAttention(8, 2), AUTOGRAD, "1 MultiheadAttention"),
    ],
)
def test_each_choice_says_why(stage: Any, method: SplitMethod, words: str) -> None:
    choice = choose_split(stage())
    assert choice.method is method and words in choice.reason, choice


def test_data_parallel_wrappers_keep_the_full_backward(tmp_path: Any) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        choice = choose_split(nn.parallel.DistributedDataParallel(mlp()))
    finally:
        dist.destroy_process_group()
    assert choice.method is FULL and "data parallel" in choice.reason


def test_a_graph_that_cannot_be_cut_is_run_whole() -> None:
    """A custom Function, found only when the graph is there: all in I, and W has nothing to do."""
    module = Fn(lambda m, x: Square.apply(m.a(x)), a=nn.Conv1d(4, 4, 3))
    splitter = BackwardSplitter(module, split=True)
    x = torch.randn(2, 4, 9, requires_grad=True)
    expected = plain_grads(module, x)
    run_input(splitter, module, x)
    assert_equal(module.a.weight.grad, expected["a.weight"], 0.0, "weight")
    assert not splitter._cuts


def test_make_is_deterministic() -> None:
    """The comparisons rest on it."""
    case = Case(Block)
    for p, q in zip(make(case).parameters(), make(case).parameters(), strict=True):
        assert torch.equal(p, q)


def test_a_forward_that_differentiates_by_a_deferred_weight_is_told_what_to_do() -> None:
    """Autograd's own message says nothing of why the weight is not in the graph."""
    module = linear()
    splitter = BackwardSplitter(module, split=True)
    with pytest.raises(RuntimeError) as found, splitter.forward_scope(0):
        torch.autograd.grad(module(torch.randn(2, WIDTH)).sum(), module.weight)
    assert "call nn.functional.linear(x, layer.weight, layer.bias)" in found.value.__notes__[0]
    with splitter.forward_scope(0):
        y = nn.functional.linear(torch.randn(2, WIDTH), module.weight)
        torch.autograd.grad(y.sum(), module.weight)
