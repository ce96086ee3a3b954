"""Ranks that build different pipelines, or make different calls, all stop with the difference, by rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from distributed import run_distributed
from hocket.errors import ConfigError, PipelineError
from hocket.runtime import build_schedule
from runtime.parity import WIDTH, make_stage, mse

ALIKE: dict[str, Any] = {"schedule_config": "1f1b", "n_microbatches": 4, "loss_reduction": "mean"}


def _build(rank: int, differs: dict[str, Any]) -> str:
    arguments = ALIKE | (differs if rank else {})
    version = arguments.pop("version", None)
    if version:
        from hocket.runtime import build

        build.VERSION = version
    with pytest.raises(ConfigError) as caught:
        build_schedule(None, model_provider=make_stage, loss_fn=mse, timeout=20, **arguments)
    return str(caught.value)


@pytest.mark.parametrize(
    "differs,lines",
    [
        ({"n_microbatches": 8}, ["rank 0: n_microbatches 4", "rank 1: n_microbatches 8", "rank 1: program "]),
        ({"loss_reduction": "sum"}, ["rank 0: loss_reduction mean", "rank 1: loss_reduction sum"]),
        (
            {"schedule_config": {"schedule": "1f1b", "num_stages_per_rank": 2}},
            ["rank 0: stages 2", "rank 1: stages 4", "rank 1: program "],
        ),
        ({"schedule_config": "gpipe"}, ['rank 0: schedule {"schedule":"1f1b"', 'rank 1: schedule {"schedule":"gpipe"']),
        ({"version": "9.9"}, ["rank 1: hocket 9.9"]),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_the_difference_is_shown_by_rank(differs: dict[str, Any], lines: list[str]) -> None:
    first, second = run_distributed(_build, 2, differs, timeout=30)
    assert first == second
    for line in lines:
        assert f"  {line}" in first


def _repeat(call: Callable[[Any], Any], argument: Any) -> None:
    for _ in range(1000):
        call(argument)


def _other_call(rank: int) -> str:
    schedule = build_schedule(None, 4, "1f1b", make_stage, mse, timeout=3)[0].schedule
    x = torch.zeros(8, WIDTH)
    result = schedule.step(x, targets=x)
    with pytest.raises(PipelineError) as caught:
        schedule.step(x, targets=x) if rank == 0 else _repeat(schedule.share_loss, result)
    return str(caught.value)


def test_step_here_and_share_loss_there() -> None:
    """No hang: who waits too long says for what, and what the others were doing."""
    for text in run_distributed(_other_call, 2, timeout=40):
        assert "step 1" in text or "share_loss" in text
