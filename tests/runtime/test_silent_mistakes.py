"""Mistakes that would train nothing, or something else, without a word: they are refused, or warned of, by name."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from distributed import run_distributed
from hocket.errors import ConfigError, HocketError
from hocket.runtime import build_schedule, clip_grad_norm_

X = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
mse = nn.functional.mse_loss


class Scaled(nn.Module):
    """Takes a keyword argument, on the last stage only."""

    def __init__(self, info: Any):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        if info.is_last:
            self.forward = self.scaled  # type: ignore[method-assign]

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return self.layer(h)

    def scaled(self, h: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
        return self.layer(h) * factor


def build(loss_fn: Any = mse, **options: Any) -> Any:
    return build_schedule(None, 2, "1f1b", Scaled, loss_fn, **options)[0].schedule


def messages(rank: int, call: str) -> str:
    schedule = build()
    scope: Any = torch.no_grad() if call == "no_grad" and rank == 1 else contextlib.nullcontext()
    options: dict[str, Any] = {
        "scale": {"loss_scale": torch.ones(3)},
    }.get(call, {})
    try:
        with scope:
            schedule.step(X, targets=X, **options)
    except HocketError as error:
        found = str(error)
    else:
        found = "no error"
    # All ranks refuse before anything is sent, so the pipeline goes on.
    schedule.step(X, targets=X, factor=0.5)
    return found


@pytest.mark.parametrize(
    "call, message",
    [
        ("scale", "loss_scale is a tensor of shape [3]"),
        ("no_grad", "gradients are switched off here"),
    ],
)
def test_refused_on_all_ranks(call: str, message: str) -> None:
    assert all(message in found for found in run_distributed(messages, 2, call))


def keyword_warnings(rank: int) -> list[str]:
    schedule = build()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            schedule.step(X, targets=X, factor=0.5)
            schedule.step(X, targets=X, faktor=0.5)
    return [str(warning.message) for warning in caught]


def test_a_keyword_that_no_stage_of_any_rank_takes_is_warned_of_once() -> None:
    for found in run_distributed(keyword_warnings, 2):
        (message,) = found
        assert "no stage takes the keyword argument 'faktor'" in message


@pytest.mark.parametrize("scope", [torch.no_grad, torch.inference_mode])
def test_step_without_gradients_is_refused_and_evaluate_is_not(scope: Callable[[], Any]) -> None:
    schedule = build()
    with scope():
        with pytest.raises(ConfigError, match="or evaluate for the forward alone"):
            schedule.step(X, targets=X)
        assert schedule.evaluate(X, targets=X).loss > 0


def test_a_loss_without_gradients_is_warned_of() -> None:
    schedule = build(lambda outputs, targets: mse(outputs, targets).detach())
    with pytest.warns(UserWarning, match="this step trains nothing"):
        schedule.step(X, targets=X)
    # Only some microbatches without: those with nothing to learn from.
    some = build(lambda outputs, targets: mse(outputs, targets) if targets[0, 0] > 0 else torch.zeros(()))
    some.step(X, targets=torch.cat([-torch.ones(4, 4), torch.ones(4, 4)]))
    frozen = build_schedule(None, 2, "1f1b", lambda info: Scaled(info).requires_grad_(False), mse)[0].schedule
    frozen.step(X, targets=X)


def test_targets_left_out_are_named_where_loss_fn_fails() -> None:
    with pytest.raises(HocketError, match=r"microbatch 0, .*no targets on the rank of the last stage.*pass targets="):
        build().step(X)


def test_a_metric_that_has_no_mean() -> None:
    schedule = build(lambda outputs, targets: (mse(outputs, targets), {"name": "seven"}))
    with pytest.raises(ConfigError, match="'seven' for the metric 'name'"):
        schedule.step(X, targets=X)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"loss_fn": "mse"}, "loss_fn is 'mse'"),
        ({"seed": 1.5}, "seed is 1.5"),
        ({"tied": ["a"]}, r"tied is \['a'\]"),
    ],
)
def test_arguments_of_a_wrong_type(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(**options)


def test_clipping_of_what_are_no_modules() -> None:
    module = nn.Linear(2, 2)
    with pytest.raises(ConfigError, match="a Parameter among its modules"):
        clip_grad_norm_(module.parameters(), 1.0)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="norm_type is 0"):
        clip_grad_norm_(module, 1.0, norm_type=0)
    with pytest.raises(ConfigError, match="max_norm is '1'"):
        clip_grad_norm_(module, "1")  # type: ignore[arg-type]
