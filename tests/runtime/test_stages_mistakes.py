"""A mistake of the user's raises on all ranks an error that names the stage, the microbatch and the argument."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from distributed import run_distributed
from hocket.errors import HocketError
from hocket.runtime import PipelineStageInfo, build_schedule
from runtime.stage_cases import CONFIGS, WIDTH, mse, once

torch.manual_seed(0)
X, Y = torch.randn(8, 3, WIDTH), torch.randn(8, 3, WIDTH)


class Stage(nn.Module):
    def __init__(self, info: PipelineStageInfo):
        super().__init__()
        self.info = info
        self.calls = 0
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, h: torch.Tensor) -> Any:
        self.calls += 1
        return self.layer(h)


class Missing(Stage):
    """Stage 1 wants more than stage 0 gives."""

    def forward(self, h: torch.Tensor, *, position: Any = None) -> Any:
        return self.layer(h)


class NeedsTwo(Stage):
    def forward(self, h: torch.Tensor, position: torch.Tensor) -> Any:
        return self.layer(h)


def needs_two(info: PipelineStageInfo) -> nn.Module:
    return Stage(info) if info.is_first else NeedsTwo(info)


class GivesTwo(Stage):
    def forward(self, h: torch.Tensor) -> Any:
        return (self.layer(h), h) if self.info.is_first else self.layer(h)


class GivesNames(Stage):
    def forward(self, h: torch.Tensor) -> Any:
        return {"hidden": self.layer(h)} if self.info.is_first else self.layer(h)


class GivesWidth(Stage):
    def forward(self, h: torch.Tensor) -> Any:
        return self.layer(h)[..., :4] if self.info.is_first else self.layer(h)


class GivesSet(Stage):
    def forward(self, h: torch.Tensor, *more: Any) -> Any:
        self.calls += 1
        h = self.layer(h)
        return h if self.info.is_last else (h, {"k": {1, 2}} if self.calls == 2 else None)


class GivesSparse(Stage):
    def forward(self, h: torch.Tensor) -> Any:
        return {"graph": [self.layer(h).to_sparse()]}


class Varies(Stage):
    """What it returns depends on the data: a length, or a number."""

    def forward(self, h: torch.Tensor, extra: Any = None) -> Any:
        self.calls += 1
        extra = h[:, : int(h.detach()[0, 0, 0] > 50) + 1]
        return (self.layer(h), extra) if self.info.is_first else self.layer(h)


class VariesNumber(Stage):
    def forward(self, h: torch.Tensor, number: Any = None) -> Any:
        return (self.layer(h), float(h.detach()[0, 0, 0])) if self.info.is_first else self.layer(h) * number


Make = Callable[[], Any]


def step(provider: Any, loss_fn: Any = mse, args: tuple[Any, ...] = (X,), targets: Any = Y, **more: Any) -> Make:
    """Builds and steps once."""

    def run() -> Any:
        info, _ = build_schedule(None, 4, CONFIGS["1f1b"], provider, loss_fn, **more)
        return info.schedule.step(*args, targets=targets)

    return run


def twice(provider: Any, **more: Any) -> Make:
    def run() -> Any:
        info, _ = build_schedule(None, 4, CONFIGS["1f1b"], provider, mse, **more)
        info.schedule.step(X, targets=Y)
        return info.schedule.step(X + 100, targets=Y)

    return run


def with_keywords(provider: Any, **kwargs: Any) -> Make:
    def run() -> Any:
        info, _ = build_schedule(None, 4, CONFIGS["1f1b"], provider, mse)
        return info.schedule.step(X, targets=Y, **kwargs)

    return run


def count_of(count: Any) -> Make:
    def run() -> Any:
        info, _ = build_schedule(None, 4, CONFIGS["1f1b"], Stage, mse)
        return info.schedule.step(X, targets=Y, n_microbatches=count)

    return run


def unsteady_metrics(output: torch.Tensor, target: torch.Tensor) -> Any:
    return mse(output, target), {f"m{float(output.detach().sum()):.6f}": 1.0}


MISTAKES: dict[str, tuple[Make, list[str]]] = {
    "P101 an argument that nobody gives": (step(needs_two), ["stage 1", "microbatch 0", "'position'"]),
    "P101 an argument missing at stage 0": (step(NeedsTwo), ["stage 0", "NeedsTwo", "'position'"]),
    "one argument too many at stage 0": (step(Stage, args=(X, X)), ["stage 0", "too many positional arguments"]),
    "an argument twice at stage 0": (with_keywords(Stage, h=X), ["stage 0", "multiple values for argument 'h'"]),
    "a tuple where the next stage takes one": (step(GivesTwo), ["stage 1", "microbatch 0", "takes 2 positional"]),
    "names that the next stage does not know": (step(GivesNames), ["stage 1", "microbatch 0", "'hidden'"]),
    "a shape that the next stage refuses": (step(GivesWidth), ["stage 1", "microbatch 0", "6x4 and 6x6"]),
    "a type that cannot travel": (step(GivesSet), ["stage 0", "microbatch 1", "value[1]['k'] is a set"]),
    "a tensor that cannot travel": (step(GivesSparse), ["stage 0", "value['graph'][0]", "sparse_coo", "to_dense"]),
    "P28 a loss for each item": (
        step(Stage, lambda out, y: (out - y).pow(2).mean((1, 2))),
        ["rank 1", "stage 1", "microbatch 0", "shape (2,)", ".mean() or .sum()"],
    ),
    "a loss that is no tensor": (step(Stage, lambda out, y: 1.0), ["microbatch 0", "loss_fn returned float"]),
    "a loss that raises": (step(Stage, lambda out, y: out["logits"]), ["stage 1", "microbatch 0"]),
    "metrics of other names": (step(Stage, unsteady_metrics), ["stage 1", "microbatch 1", "metrics", "same names"]),
    "shapes that depend on the data": (twice(Varies), ["stage 0", "microbatch 0", "[2, 1, 6]", "dynamic_shapes=True"]),
    "numbers that depend on the data": (twice(VariesNumber), ["stage 0", "dynamic_shapes=True"]),
    "P40 a batch smaller than the microbatches": (
        step(Stage, args=(X[:2],), targets=Y[:2]),
        ["2 items", "4 microbatches", "at most 2"],
    ),
    "targets of another length": (step(Stage, targets=Y[:6]), ["8 items", "6 items"]),
    "nested targets of another length": (
        step(Stage, lambda out, t: mse(out, t["y"]), targets={"y": Y[:6]}),
        ["targets", "6 items", "batch has 8"],
    ),
    "a list of too few microbatches": (step(Stage, args=([X, X],)), ["argument 0", "list of 2", "step has 4"]),
    "a keyword's list of too few": (with_keywords(Missing, position=[X]), ["'position'", "list of 1", "step has 4"]),
    "a dimension that does not fit": (
        step(Stage, targets=Y, split={"targets": 1}),
        ["rank 0 has 8 items, rank 1 has 3 items"],
    ),
    "no microbatches": (count_of(0), ["n_microbatches is 0"]),
    "half a microbatch": (count_of(2.5), ["n_microbatches is 2.5"]),
}


@once
def told() -> list[dict[str, str]]:
    def run(rank: int) -> dict[str, str]:
        found = {}
        for name, (make, _) in MISTAKES.items():
            try:
                make()
            except HocketError as error:
                found[name] = f"{type(error).__name__}: {error}"
            else:
                found[name] = "nothing was raised"
        return found

    return run_distributed(run, 2, timeout=100)


@pytest.mark.parametrize("name", MISTAKES)
def test_all_ranks_are_told(name: str) -> None:
    for rank, row in enumerate(told()):
        for word in MISTAKES[name][1]:
            assert word in row[name], f"rank {rank}: {row[name]}"


def test_what_depends_on_the_data_works_when_told_so() -> None:
    def run(rank: int) -> list[float]:
        found = []
        for provider in (Varies, VariesNumber):
            info, _ = build_schedule(None, 4, CONFIGS["1f1b"], provider, mse, dynamic_shapes=True)
            for x in (X, X + 100, X):
                found.append(float(info.schedule.share_loss(info.schedule.step(x, targets=Y))))
        return found

    first, second = run_distributed(run, 2, timeout=30)
    assert first == second and first[0] == first[2] != first[1]


def test_a_mistake_of_one_process_names_the_place_too() -> None:
    info, _ = build_schedule(None, 4, CONFIGS["interleaved"], needs_two, mse)
    with pytest.raises(HocketError, match=r"stage 1, microbatch 0, action 1F0: TypeError.*'position'"):
        info.schedule.step(X, targets=Y)
