"""Views, aliases and in-place ops between stages, and who needs gradients: as in one process, on 2 ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from distributed import run_distributed
from hocket.runtime import PipelineStageInfo
from runtime.stage_cases import (
    TRAINING,
    WIDTH,
    Call,
    Case,
    Linear,
    Ran,
    X,
    Y,
    assert_same,
    logged,
    merge_ranks,
    once,
    reference,
    registrar,
    run_cases,
)

CASES: dict[str, Case] = {}
case = registrar(CASES)


# --- views, aliases, in-place -----------------------------------------------------------------------------------------


@case("P30 a view of the input, a module with a backward pre-hook", observe=logged)
class Viewed(Linear):
    def __init__(self, info: PipelineStageInfo):
        super().__init__(info)
        self.log: list[Any] = []
        self.register_full_backward_pre_hook(lambda module, grad: self.log.append("pre"))
        self.register_full_backward_hook(lambda module, inp, out: self.log.append("post"))

    def forward(self, h: torch.Tensor) -> Any:
        return self.run(h) if self.is_last else (h + self.layer(h)).view(-1, WIDTH)[:].view_as(h)


@case("P30 the input itself and a view of it")
class Returned(Linear):
    def forward(self, h: torch.Tensor, same: Any = None) -> Any:
        h = h if same is None else same + h
        return self.run(h) if self.is_last else (h[:, :, :], h)


@case("P30 a buffer that changes with every forward", observe=lambda modules: [m.count.tolist() for m in modules])
class ChangingBuffer(Linear):
    def __init__(self, info: PipelineStageInfo):
        super().__init__(info)
        self.register_buffer("count", torch.zeros(2))

    def forward(self, h: torch.Tensor, count: Any = None) -> Any:
        self.count += 1
        h = self.run(h) * (1 if count is None else count.sum())
        return h if self.is_last else (h, self.count.view(2, 1))


@case("P31 transposed, expanded, strided", observe=lambda modules: [m.strides for m in modules])
class Strided(Linear):
    def __init__(self, info: PipelineStageInfo):
        super().__init__(info)
        self.strides = 0

    def forward(self, h: torch.Tensor, wide: Any = None, odd: Any = None) -> Any:
        if not self.is_first:
            h = h.transpose(0, 1) + wide.mean(0) + odd.repeat_interleave(2, -1)
        h = self.run(h)
        return h if self.is_last else (h.transpose(0, 1), h.expand(2, *h.shape), h[..., ::2])


@case("P32 in-place on what arrives")
class InPlace(Linear):
    def forward(self, h: torch.Tensor, mask: Any = None) -> Any:
        if not self.is_first:
            assert not h.is_leaf
            h.add_(1)
            h[:, 0].mul_(2)
            mask.logical_not_()
        h = self.layer(h)
        return h if self.is_last else (h, h > 0)


@case("P32 in-place on what leaves, before it does")
class InPlaceOutput(Linear):
    def forward(self, h: torch.Tensor) -> Any:
        return self.layer(h).mul_(2).add_(1)


# --- who needs gradients ----------------------------------------------------------------------------------------------


@case("P29 a skip connection rides along")
class Skip(Linear):
    def forward(self, h: torch.Tensor, skip: Any = None) -> Any:
        if self.is_first:
            return (self.run(h), h := self.run(h * 2))
        return self.run(h) + skip if self.is_last else (self.run(h), skip)


@case("an output that nobody uses gets zeros")
class Unused(Linear):
    def __init__(self, info: PipelineStageInfo):
        super().__init__(info)
        self.other = nn.Linear(WIDTH, WIDTH)

    def forward(self, h: torch.Tensor, unused: Any = None) -> Any:
        return self.run(h) if self.is_last else (self.run(h), self.other(h))


@case("a stage that ignores its input")
class Ignores(Linear):
    def forward(self, h: torch.Tensor) -> Any:
        own = self.layer.weight.sum(0).expand_as(h)
        return own.tanh() if self.info.current_stage == 1 else self.run(h)


@case("one tensor twice")
class Twice(Linear):
    def forward(self, h: torch.Tensor, again: Any = None) -> Any:
        h = self.run(h if again is None else h + 2 * again)
        return h if self.is_last else (h, h)


@case("a parameter as output")
class ReturnsParameter(Linear):
    def forward(self, h: torch.Tensor, weight: Any = None) -> Any:
        h = self.run(h if weight is None else h @ weight)
        return h if self.is_last else (h, self.layer.weight)


@case("Q1 nothing in the first stage requires grad")
class FrozenFirst(Linear):
    def __init__(self, info: PipelineStageInfo):
        super().__init__(info)
        self.requires_grad_(not info.is_first)

    def forward(self, h: torch.Tensor) -> Any:
        return self.run(h)


@case("nothing in the middle requires grad")
class FrozenMiddle(Linear):
    def __init__(self, info: PipelineStageInfo):
        super().__init__(info)
        self.requires_grad_(info.is_first)

    def forward(self, h: torch.Tensor) -> Any:
        return self.run(h)


@case("Q2 reentrant checkpoints in every stage")
class Reentrant(Linear):
    def forward(self, h: torch.Tensor) -> Any:
        return checkpoint(self.run, h, use_reentrant=True) if not self.is_first else self.run(h)


@case("checkpoints without reentry")
class Checkpointed(Linear):
    def forward(self, h: torch.Tensor) -> Any:
        return checkpoint(self.run, h, use_reentrant=False)


@case(
    "hooks on the input fire once for each microbatch, in every step",
    calls=[Call((X,), targets=Y)] * 3,
    observe=lambda modules: [sorted(m.log) for m in modules],
)
class TensorHooks(Linear):
    def __init__(self, info: PipelineStageInfo):
        super().__init__(info)
        self.log: list[str] = []
        self.layer.register_forward_hook(lambda *_: self.log.append("forward"))
        self.layer.weight.register_hook(lambda grad: self.log.append("weight"))

    def forward(self, h: torch.Tensor) -> Any:
        if h.requires_grad:
            h.register_hook(lambda grad: self.log.append("input"))
        return self.run(h)


@case("autocast changes dtypes", around=lambda: torch.autocast("cpu", torch.bfloat16), observe=logged)
class Autocast(Linear):
    def __init__(self, info: PipelineStageInfo):
        super().__init__(info)
        self.log: list[torch.dtype] = []

    def forward(self, h: torch.Tensor) -> Any:
        out = self.layer(h)
        self.log += [h.dtype, out.dtype]
        return torch.tanh(out).float() if self.is_last else torch.tanh(out)


# --- the tests --------------------------------------------------------------------------------------------------------


@once
def on_two_ranks() -> list[dict[tuple[str, str], Ran]]:
    return run_distributed(run_cases, 2, CASES, TRAINING, timeout=100)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CASES)
def test_equals_one_process(name: str) -> None:
    expected: dict[int, Ran] = {}
    for config in TRAINING:
        got = merge_ranks([row[name, config] for row in on_two_ranks()])
        if got.num_stages not in expected:
            expected[got.num_stages] = reference(CASES[name], got.num_stages)
        # bf16 adds up in another order than in one process.
        assert_same(got, expected[got.num_stages], 2e-2 if "autocast" in name or "bf16" in name else 1e-5)


def test_the_inputs_of_a_step_are_unchanged() -> None:
    before = X.clone(), Y.clone()
    for name in ("P30 the input itself and a view of it", "P32 in-place on what arrives"):
        run_cases(0, {name: CASES[name]}, ("interleaved",))
    assert torch.equal(X, before[0])
    assert torch.equal(Y, before[1])
