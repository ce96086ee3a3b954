"""Batches of any shape: how arguments reach the stages, sizes that change, losses and outputs, on 2 and 3 ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from distributed import run_distributed
from hocket.runtime import PipelineStageInfo, build_schedule
from runtime.stage_cases import (
    CONFIGS,
    WIDTH,
    Call,
    Case,
    Ran,
    assert_same,
    merge_ranks,
    mse,
    once,
    reference,
    run_case,
    run_cases,
)

CONFIG_NAMES = ("gpipe", "zb", "zbv", "dual_pipe_v")
torch.manual_seed(0)
X, Y = torch.randn(8, 3, WIDTH), torch.randn(8, 3, WIDTH)


def noise(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, WIDTH)


class Plain(nn.Module):
    def __init__(self, info: PipelineStageInfo):
        super().__init__()
        torch.manual_seed(100 + info.current_stage)
        self.info = info
        self.layer = nn.Linear(WIDTH, WIDTH)

    def run(self, h: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.layer(h))

    def forward(self, h: torch.Tensor) -> Any:
        return self.run(h)


class Everywhere(Plain):
    """Every stage needs a position, and a mask that may be an object."""

    def forward(self, h: torch.Tensor, *, pos: torch.Tensor, mask: Any = None) -> Any:
        return self.run(h * (mask.scale if isinstance(mask, Scale) else 1) + pos)


class _Last(Plain):
    def forward(self, h: torch.Tensor, late: torch.Tensor) -> Any:
        return self.run(h + late)


class _Any(Plain):
    def forward(self, h: torch.Tensor, **kwargs: Any) -> Any:
        return self.run(h - kwargs["late"] * kwargs["factor"])


def only_last(info: PipelineStageInfo) -> nn.Module:
    return (_Last if info.is_last else Plain)(info)


def last_two(info: PipelineStageInfo) -> nn.Module:
    return (_Last if info.is_last else _Any if info.current_stage == info.num_stages - 2 else Plain)(info)


class KeywordsOnly(Plain):
    def forward(self, input_ids: Any = None, attention_mask: Any = None, h: Any = None) -> Any:
        h = self.run(input_ids if h is None else h) * attention_mask[..., None]
        return h if self.info.is_last else {"h": h}


class Scale:
    """An object with a tensor of the batch's length inside that is nobody's business."""

    def __init__(self) -> None:
        self.scale = 0.5
        self.table = torch.ones(8)


class Nested(Plain):
    def forward(self, h: Any, pair: Any = None) -> Any:
        if self.info.is_first:
            assert pair[1]["table"].shape == (3, 3)
            h = h["x"] + pair[0] + pair[1]["table"].sum()
        return self.run(h)


class Norm(Plain):
    def __init__(self, info: PipelineStageInfo):
        super().__init__(info)
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, h: torch.Tensor) -> Any:
        return self.norm(self.run(h).flatten(0, 1)).view_as(h)


class TrainOnly(Plain):
    """Returns more in training than in evaluation mode."""

    def forward(self, h: torch.Tensor, aux: Any = None) -> Any:
        assert (aux is not None) == (self.training and not self.info.is_first)
        h = self.run(h if aux is None else h + aux)
        return h if self.info.is_last or not self.training else (h, h * 2)


class AddsInPlace(Plain):
    """Stage 0 too changes what it gets, with a parameter."""

    def forward(self, h: torch.Tensor) -> Any:
        h += self.layer.bias
        return self.layer(h)


LENGTHS = (3, 7, 5, 4)
SEQUENCES = [noise(2, length) for length in LENGTHS]


def length_matches(output: torch.Tensor, index: int) -> torch.Tensor:
    assert output.shape[1] == LENGTHS[index]
    return output.pow(2).mean() * (index + 1)


def norm_state(modules: Any) -> Any:
    return [
        (m.norm.running_mean.tolist(), m.norm.running_var.tolist(), int(m.norm.num_batches_tracked)) for m in modules
    ]


def steps(*shapes: tuple[int, ...], **more: Any) -> list[Call]:
    return [Call((noise(*shape),), targets=noise(*shape), **more) for shape in shapes]


CASES: dict[str, Case] = {
    "P35 a target for each item": Case(Plain, [Call((X,), targets=Y)]),
    "P36 targets go with their microbatch": Case(Plain, [Call((SEQUENCES,), targets=[0, 1, 2, 3])] * 2, length_matches),
    "P36 without targets the loss gets the index": Case(Plain, [Call((SEQUENCES,))] * 2, length_matches),
    "P38 every stage takes a keyword": Case(Everywhere, [Call((X,), {"pos": noise(8, 3)}, Y)]),
    "P38 a keyword goes to those that take it": Case(last_two, [Call((X,), {"late": noise(8, 3), "factor": 2}, Y)]),
    "objects go whole": Case(Everywhere, [Call((X,), {"pos": noise(8, 3), "mask": Scale()}, Y)]),
    "keywords only": Case(KeywordsOnly, [Call((), {"input_ids": X, "attention_mask": X[..., 0] > 0}, Y)]),
    "nested arguments and targets": Case(
        Nested,
        [Call(({"x": X}, (Y, {"table": torch.ones(3, 3)})), targets={"y": Y, "weights": torch.rand(3, 1)})],
        lambda out, t: ((out - t["y"]).pow(2) * t["weights"]).mean(),
    ),
    "P39 Q3 seven items in four microbatches": Case(Plain, steps((7, 3))),
    "a sum over seven items": Case(
        Plain, steps((7, 3)), lambda o, t: (o - t).pow(2).sum(), options={"loss_reduction": "sum"}
    ),
    "P42 dimensions for a keyword, an argument and targets": Case(
        Everywhere,
        [Call((noise(3, 8),), {"pos": noise(3, 8)}, noise(3, 8))],
        options={"split": {0: 1, "pos": 1, "targets": 1}},
    ),
    "P42 a table as long as the batch, kept whole": Case(
        Everywhere, [Call((noise(4, 4),), {"pos": noise(4)}, noise(4, 4))], options={"split": {"pos": "whole"}}
    ),
    "P45 Q4 sequences of other lengths": Case(Plain, steps((8, 4), (8, 6), (8, 5), (8, 4), (4, 14), (8, 1), (12, 14))),
    "P46 sequences of other lengths within a step": Case(
        Plain,
        [
            Call((SEQUENCES,), targets=[noise(2, length) for length in LENGTHS]),
            Call((SEQUENCES[::-1],), targets=[noise(2, length) for length in LENGTHS[::-1]]),
            Call(([s[:, :2] for s in SEQUENCES],), targets=[noise(2, 2)] * 4),
            Call((SEQUENCES,), targets=[noise(2, length) for length in LENGTHS]),
        ],
    ),
    "microbatches of other sizes, already divided": Case(
        Everywhere,
        [Call(([X[:3], X[3:4], X[4:6], X[6:]],), {"pos": Y}, Y), Call((X,), {"pos": Y}, Y)],
    ),
    "P47 train, evaluate more and less, train": Case(
        Plain, [c for size in (16, 3, 7, 1) for c in (*steps((8, 3)), *steps((size, 3), evaluate=True))] + steps((8, 3))
    ),
    "P48 evaluate first": Case(Plain, [*steps((8, 3), evaluate=True), *steps((8, 3)), *steps((8, 3), evaluate=True)]),
    "P51 batch norm sees microbatches": Case(Norm, steps((8, 3), (8, 3)), observe=norm_state),
    "P54 weights per token reach the loss": Case(
        Plain,
        [Call((X,), targets=(Y, torch.rand(8, 3, 1) > 0.4))],
        lambda out, t: ((out - t[0]).pow(2) * t[1]).sum() / 20,
        options={"loss_reduction": "sum"},
    ),
    "a loss with metrics": Case(Plain, steps((8, 3)), lambda o, t: (mse(o, t), {"top": o.amax(), "n": len(o)})),
    "dtypes that change between steps": Case(
        Plain,
        [Call((X,), targets=Y), Call((X.half(),), targets=Y), Call((X.bfloat16(),), targets=Y)],
        around=lambda: torch.autocast("cpu", torch.bfloat16),
    ),
}
COUNTS = {
    "other numbers of microbatches": Case(
        Plain, [c for n in (4, 2, 8, 1, 3, 4) for c in steps((8, 3), options={"n_microbatches": n})]
    ),
    "a step with fewer microbatches than the schedule was built for": Case(
        Plain, [Call((SEQUENCES[:2],), targets=[0, 1], options={"n_microbatches": 2})], length_matches
    ),
}


@once
def on_two_ranks() -> list[dict[tuple[str, str], Ran]]:
    def run(rank: int) -> dict[tuple[str, str], Ran]:
        return {**run_cases(rank, CASES, CONFIG_NAMES), **run_cases(rank, COUNTS, ("1f1b", "interleaved", "zbv"))}

    return run_distributed(run, 2, timeout=100)


@pytest.mark.parametrize("name", [*CASES, *COUNTS])
def test_equals_one_process(name: str) -> None:
    case = CASES.get(name) or COUNTS[name]
    compared = 0
    for config in CONFIGS:
        rows = [row[name, config] for row in on_two_ranks() if (name, config) in row]
        if rows:
            got = merge_ranks(rows)
            assert_same(got, reference(case, got.num_stages), 3e-2 if "dtypes" in name else 1e-5)
            compared += 1
    assert compared >= 3


@pytest.mark.parametrize("name", ["P35 a target for each item", "P39 Q3 seven items in four microbatches"])
def test_equals_the_full_batch(name: str) -> None:
    case = CASES[name]
    got = merge_ranks([row[name, "zb"] for row in on_two_ranks()])
    assert_same(got, reference(Case(case.provider, case.calls, case.loss_fn, count=1), got.num_stages))


def test_p37_three_ranks_all_take_the_mask() -> None:
    cases = {"P37": CASES["P38 every stage takes a keyword"], "P38": CASES["P38 a keyword goes to those that take it"]}
    rows = run_distributed(run_cases, 3, cases, ("1f1b", "zbv"), timeout=60)
    for name, case in cases.items():
        for config in ("1f1b", "zbv"):
            got = merge_ranks([row[name, config] for row in rows])
            assert_same(got, reference(case, got.num_stages))


def test_ranks_need_only_pass_what_their_stages_need() -> None:
    def run(rank: int) -> Any:
        info, modules = build_schedule(None, 4, "1f1b", only_last, mse)
        if info.has_first_stage:
            info.schedule.step(X)
        else:
            info.schedule.step(targets=Y, late=Y)
        return [p.grad for p in modules[0].parameters()]

    case = Case(only_last, [Call((X,), {"late": Y}, Y)])

    def whole(info: PipelineStageInfo) -> nn.Module:
        return _Last(info) if info.is_last else Plain(info)

    expected = reference(Case(whole, case.calls), 2)
    rows = run_distributed(run, 2, timeout=30)
    for got, theirs in zip([g for row in rows for g in row], expected.gradients.values(), strict=True):
        torch.testing.assert_close(got, theirs)


def test_p32_stage_0_may_change_its_input_in_place() -> None:
    def run(rank: int) -> list[Ran]:
        return [run_case(Case(AddsInPlace, [Call((X.clone(),), targets=Y)]), CONFIGS[name]) for name in CONFIG_NAMES]

    for rows in zip(*run_distributed(run, 2, timeout=30), strict=True):
        got = merge_ranks(rows)
        assert_same(got, reference(Case(AddsInPlace, [Call((X.clone(),), targets=Y)]), got.num_stages))


def test_modes_that_change_what_stages_return() -> None:
    def run(rank: int) -> list[float]:
        info, modules = build_schedule(None, 4, CONFIGS["zbv"], TrainOnly, mse)
        losses = []
        for training in (True, False, True, False):
            for module in modules:
                module.train(training)
            for call in (info.schedule.evaluate, info.schedule.step):
                losses.append(float(info.schedule.share_loss(call(X, targets=Y))))
        return losses

    first, second = run_distributed(run, 2, timeout=30)
    assert first == second == pytest.approx([first[0]] * 2 + [first[2]] * 2 + [first[0]] * 2 + [first[2]] * 2)
    assert first[0] != first[2]
