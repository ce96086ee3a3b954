"""Checkpoints, compiled code, copies, other users: what surrounds a stage works when its backward is split."""

from __future__ import annotations

import copy
import io
import pickle
import threading
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from hocket.runtime import PipelineStageInfo, build_schedule
from hocket.runtime.backward import BackwardSplitter, SplitMethod
from hocket.runtime.deferred import current_queue
from runtime.split_cases import Case, assert_equal, check, plain_grads, run_input
from runtime.split_stages import WIDTH, Block, Fn, linear, mlp, three_d

DEFERRED, AUTOGRAD, FULL = SplitMethod.DEFERRED, SplitMethod.AUTOGRAD, SplitMethod.FULL


# --- checkpoints -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reentrant", [False, True], ids=["non_reentrant", "reentrant"])
@pytest.mark.parametrize("inner", [lambda: Block(0.3), lambda: nn.Sequential(nn.Conv1d(4, 4, 3), nn.Dropout(0.3))])
def test_q2_checkpoint(inner: Any, reentrant: bool) -> None:
    conv = isinstance(inner(), nn.Sequential)
    case = Case(
        lambda: Fn(
            lambda m, x: checkpoint(m.b, checkpoint(m.a, x, use_reentrant=reentrant), use_reentrant=reentrant),
            a=inner(),
            b=inner(),
        ),
        (lambda: torch.randn(2, 4, 9)) if conv else three_d,
        AUTOGRAD if conv else DEFERRED,
    )
    check(case)


def test_checkpoint_runs_forward_again_once() -> None:
    """Counted in block forwards: two for each block, however the backward is split."""
    for inner, shape in ((Block, (2, 5, WIDTH)), (lambda: nn.Conv1d(4, 4, 3, padding=1), (2, 4, 9))):
        runs: Counter[int] = Counter()
        blocks = nn.ModuleList(inner() for _ in range(3))
        for index, block in enumerate(blocks):
            block.register_forward_pre_hook(lambda *args, index=index, runs=runs: runs.update([index]))

        def stage(m: Any, x: torch.Tensor) -> torch.Tensor:
            for block in m.blocks:
                x = checkpoint(block, x, use_reentrant=False)
            return x

        module = Fn(stage, blocks=blocks)
        splitter = BackwardSplitter(module, split=True)
        run_input(splitter, module, torch.randn(shape, requires_grad=True))
        splitter.backward_weight(0)
        assert runs == {0: 2, 1: 2, 2: 2}


@pytest.mark.parametrize("split", [False, True])
def test_p71_checkpoint_keeps_what_it_keeps_without_hocket(split: bool) -> None:
    """After F no activation inside a checkpointed block is alive; after I those that W needs, after W none."""
    inside: list[Any] = []

    def stage(m: Any, x: torch.Tensor) -> torch.Tensor:
        for block in m.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x

    module = Fn(stage, blocks=nn.ModuleList(Block() for _ in range(3)))
    splitter = BackwardSplitter(module, split=split)

    def alive() -> int:
        return sum(not reference.expired() for reference in inside)

    for block in module.blocks:
        block.mlp[2].register_forward_pre_hook(lambda m, args: inside.append(StorageWeakRef(args[0].untyped_storage())))
    x = three_d().requires_grad_()
    with splitter.forward_scope(0):
        y = module(x)
    assert len(inside) == 3 and alive() == 0
    splitter.backward_input(0, [y], [torch.ones_like(y)], [x])
    assert len(inside) == 6 and alive() == (3 if split else 0)
    splitter.backward_weight(0)
    assert alive() == 0


def test_recomputation_in_another_thread_finds_the_queue() -> None:
    """On accelerators autograd runs checkpoints in threads of its own."""
    module, x = mlp(), torch.randn(4, WIDTH, requires_grad=True)
    found: list[bool] = []

    class Elsewhere(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, y: torch.Tensor) -> torch.Tensor:
            return y.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            thread = threading.Thread(target=lambda: found.append(current_queue() is not None))
            thread.start()
            thread.join()
            return grad

    stage = Fn(lambda m, x: Elsewhere.apply(m.a(x)), a=module)
    splitter = BackwardSplitter(stage, split=True)
    run_input(splitter, stage, x)
    assert found == [True] and current_queue() is None


# --- compiled code ---------------------------------------------------------------------------------------------------


def compiled(module: nn.Module, how: str) -> nn.Module:
    if how == "method":
        module.compile(backend="aot_eager")
        return module
    return torch.compile(module, backend="aot_eager")  # type: ignore[return-value]


@pytest.mark.parametrize("how", ["wrapper", "method"])
def test_p73_compiled_stage(how: str) -> None:
    splitter = check(Case(lambda: compiled(mlp(), how), method=FULL, bound=1e-6))
    assert "compiled as a whole" in splitter.choice.reason


@pytest.mark.parametrize("how", ["wrapper", "method"])
def test_compiled_block_beside_a_plain_one(how: str) -> None:
    splitter = check(
        Case(
            lambda: Fn(lambda m, x: m.b(m.a(x)), a=compiled(mlp(), how), b=mlp()),
            bound=1e-6,
            late=["b.0.weight", "b.2.weight"],
        )
    )
    assert "2 Linear with 50%" in splitter.choice.reason


def test_all_blocks_compiled() -> None:
    splitter = check(
        Case(lambda: nn.Sequential(*(compiled(mlp(), "wrapper") for _ in range(2))), method=FULL, bound=1e-6)
    )
    assert "compiled modules" in splitter.choice.reason


def test_function_compiled_inside_a_stage() -> None:
    """Seen by nobody when the stage is built: its layers are traced, and autograd does their weights in I."""

    def module() -> nn.Module:
        return Fn(
            lambda m, x: torch.compile(lambda z: m.a(z).relu(), backend="aot_eager")(x) + m.b(x), a=linear(), b=linear()
        )

    check(Case(module, bound=1e-6, late=["b.weight"]))


# --- copies, pickles, other users of the module ----------------------------------------------------------------------


def test_state_dict_copies_and_pickles_stay_as_they_were() -> None:
    module, x = Block(), three_d()
    keys, text = list(module.state_dict()), repr(module)
    splitter = BackwardSplitter(module, split=True)
    assert list(module.state_dict()) == keys and repr(module) == text
    assert isinstance(module.mlp[0], nn.Linear) and type(module.mlp[0]) is not nn.Linear
    buffer = io.BytesIO()
    torch.save(module.state_dict(), buffer)
    buffer.seek(0)
    module.load_state_dict(torch.load(buffer))
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module)), copy.copy(module.mlp[0])):
        layer = twin if isinstance(twin, nn.Linear) else twin.mlp[0]
        assert type(layer) is nn.Linear
        assert torch.equal(layer.weight, module.mlp[0].weight)
    with splitter.forward_scope(0):
        y = module(x)
    assert torch.equal(copy.deepcopy(module)(x), y)
    splitter.discard(0)


def test_module_used_outside_the_pipeline() -> None:
    module, x = mlp(), torch.randn(4, WIDTH)
    expected = plain_grads(module, x)
    BackwardSplitter(module, split=True)
    y = module(x)
    y.backward(torch.ones_like(y))
    for name, p in module.named_parameters():
        assert_equal(p.grad, expected[name], 0.0, name)
    rows = torch.func.vmap(module)(x)
    assert torch.allclose(rows, y, atol=1e-6)


def test_vmap_inside_a_stage() -> None:
    check(Case(lambda: Fn(lambda m, x: torch.func.vmap(m.a)(x), a=linear()), late=[]))


def test_built_twice_and_shared_by_two_stages() -> None:
    module, x = mlp(), torch.randn(4, WIDTH, requires_grad=True)
    first, second = BackwardSplitter(module, split=True), BackwardSplitter(module, split=True)
    assert first.choice == second.choice
    expected = plain_grads(module, x)
    with first.forward_scope(0):
        y = module(x)
    run_input(second, module, x.detach())
    first.backward_input(0, [y], [torch.ones_like(y)], [x])
    assert module[0].weight.grad is None
    second.backward_weight(0)
    assert_equal(module[0].weight.grad, expected["0.weight"], 0.0, "second alone")
    first.backward_weight(0)
    assert_equal(module[0].weight.grad, expected["0.weight"] * 2, 1e-6, "both")


def test_weights_replaced_after_building() -> None:
    """As a parametrization or a tie does."""
    module = mlp()
    splitter = BackwardSplitter(module, split=True)
    nn.utils.parametrizations.weight_norm(module[0])
    module[2].weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
    x = torch.randn(4, WIDTH, requires_grad=True)
    expected = plain_grads(module, x)
    run_input(splitter, module, x)
    splitter.backward_weight(0)
    for name, p in module.named_parameters():
        assert_equal(p.grad, expected[name], 0.0, name)


def test_without_split_nothing_is_patched() -> None:
    module, x = mlp(), torch.randn(4, WIDTH, requires_grad=True)
    splitter = BackwardSplitter(module, split=False)
    assert type(module[0]) is nn.Linear and splitter.choice.method is FULL
    assert "one piece" in splitter.choice.reason
    run_input(splitter, module, x)
    assert module[0].weight.grad is not None


# --- under a schedule ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("frozen", [0, 1])
def test_q1_frozen_stage_under_zero_bubble(frozen: int) -> None:
    """No parameter of a stage requires grad, so stages behind the first get inputs without gradients."""

    def provider(info: PipelineStageInfo) -> nn.Module:
        torch.manual_seed(info.current_stage)
        return mlp().requires_grad_(info.current_stage != frozen)

    config = {"schedule": "1f1b", "num_stages_per_rank": 4, "zero_bubble": True}
    info, modules = build_schedule(None, 4, config, provider, nn.functional.mse_loss)
    x, y = torch.randn(8, WIDTH), torch.randn(8, WIDTH)
    info.schedule.step(x, targets=y)
    whole = nn.Sequential(*(provider(PipelineStageInfo(index, 4)) for index in range(4)))
    nn.functional.mse_loss(whole(x), y).backward()
    for p, q in zip(nn.Sequential(*modules).parameters(), whole.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None) == (not p.requires_grad)
        if q.grad is not None:
            assert_equal(p.grad, q.grad, 1e-5, "weight")
    assert "2 Linear with 100%" in info.schedule.describe() and "no parameter requires grad" in info.schedule.describe()
