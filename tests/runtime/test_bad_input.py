"""Input that cannot work is refused with the value and the remedy, on every rank, before anything is sent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

from distributed import run_distributed
from hocket import ConfigError, HocketError
from hocket.runtime import build_schedule
from runtime.parity import batches, make_stage, mse

X, Y = batches(1, 8)[0]


def _build(config: Any = "1f1b", count: int = 4, provider: Any = make_stage, loss_fn: Any = mse, **more: Any) -> Any:
    return build_schedule(None, count, config, provider, loss_fn, **more)[0].schedule


def _told(rank: int, call: Callable[[int], Any]) -> str:
    with pytest.raises(HocketError) as caught:
        call(rank)
    return str(caught.value)


def on_two_ranks(call: Callable[[int], Any]) -> list[str]:
    return run_distributed(_told, 2, call, timeout=20)


ALONE: list[tuple[Callable[[], Any], str]] = [
    (lambda: _build("1f2b"), "unknown schedule '1f2b'; did you mean '1f1b'"),
    (lambda: _build({"schedule": "gpipe", "zero": True}), "zero"),
    (lambda: _build(count=0), "n_microbatches is 0; give a whole number of at least 1"),
    (lambda: _build(loss_fn=None), "schedule '1f1b' trains, but loss_fn is None"),
    (lambda: _build(loss_reduction="max"), "loss_reduction is 'max'; choose 'mean' or 'sum'"),
    (lambda: build_schedule(3, 4, "gpipe", make_stage, mse), "mesh is int; pass a DeviceMesh, a ProcessGroup, or None"),
    (lambda: _build(provider=lambda info: None), "model_provider returned NoneType for stage 0; return an nn.Module"),
    (lambda: _build().step(targets=Y), "got no positional argument; pass the inputs"),
    (lambda: _build().step(X[:3], targets=Y[:3]), "3"),
    (lambda: _build(loss_fn=lambda o, t: (o - t).sum(1)).step(X, targets=Y), "reduce it with .mean() or .sum()"),
    (lambda: _build(loss_fn=lambda o, t: 1.0).step(X, targets=Y), "loss_fn returned float; return a scalar tensor"),
]


@pytest.mark.parametrize("call,text", ALONE, ids=[text[:40] for _, text in ALONE])
def test_one_process(call: Callable[[], Any], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        call()
    assert text in str(caught.value)


def _small_batch(rank: int) -> None:
    _build().step(X[:3], targets=Y[:3])


def test_batch_smaller_than_microbatches() -> None:
    for text in on_two_ranks(_small_batch):
        assert "3" in text
        assert "4" in text


def _no_inputs(rank: int) -> None:
    schedule = _build()
    schedule.step(*([] if rank == 0 else [X]), targets=Y)


def test_no_inputs_on_the_first_rank() -> None:
    texts = on_two_ranks(_no_inputs)
    assert all("rank 0 holds stage 0 but got no positional argument" in text for text in texts)


def _different_batches(rank: int) -> None:
    _build().step(X, targets=Y[:6])


def test_targets_of_another_batch() -> None:
    for text in on_two_ranks(_different_batches):
        assert "rank 0 has 8 items, rank 1 has 6 items" in text


def _different_schedules(rank: int) -> None:
    _build("1f1b" if rank == 0 else "gpipe", count=4 + rank)


def test_ranks_that_build_different_pipelines() -> None:
    for text in on_two_ranks(_different_schedules):
        assert 'rank 0: schedule {"schedule":"1f1b"' in text
        assert "rank 1: n_microbatches 5" in text


def _provider_fails(rank: int) -> None:
    def provider(info: Any) -> nn.Module:
        if info.is_last:
            raise RuntimeError("no such layer")
        return make_stage(info)

    _build(provider=provider)


def test_a_provider_that_fails() -> None:
    for text in on_two_ranks(_provider_fails):
        assert "rank 1: model_provider failed for stage 1: RuntimeError: no such layer" in text


def _step_and_evaluate(rank: int) -> None:
    schedule = _build()
    (schedule.step if rank == 0 else schedule.evaluate)(X, targets=Y)


def test_ranks_that_make_different_calls() -> None:
    for text in on_two_ranks(_step_and_evaluate):
        assert "kind of call" in text
        assert "rank 0 has 1, rank 1 has 0" in text


def test_more_microbatches_than_the_definition_allows() -> None:
    with pytest.raises(ConfigError, match="needs at least 2 microbatches per rank, here 2 for 1 ranks, got 1"):
        _build("dual_pipe_v", count=1)
