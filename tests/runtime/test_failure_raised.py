"""A rank that raises stops all ranks within seconds, and all name the first failure."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from distributed import run_distributed
from hocket.errors import ConfigError, PeerError, PipelineError, StageError
from hocket.runtime import PipelineStageInfo, build_schedule
from runtime.failing import Fault, Told, fates, last_line, train
from runtime.parity import batches, make_stage, mse

BOOM = "ValueError: boom: 17 is no token"


@pytest.mark.parametrize(
    "fault,place",
    [
        (Fault(), "rank 1, stage 1, microbatch 2, action 1F2"),
        (Fault(op="B", rank=0), "rank 0, stage 0, microbatch 2, action 0B2"),
        (Fault(where="loss"), "rank 1, stage 1, microbatch 0, action 1F0"),
        (Fault(where="hook"), "rank 1, stage 1, microbatch 0, action 1RECV_F0"),
    ],
    ids=["forward", "backward", "loss", "hook"],
)
def test_every_rank_names_the_first_failure(fault: Fault, place: str) -> None:
    told = fates(2, fault)
    for rank, words in enumerate(told):
        assert isinstance(words, Told)
        assert last_line(words) == f"{place}: {BOOM}"
        assert words.kind == ("StageError" if rank == fault.rank else "PeerError")
        assert words.seconds < 10


def test_peers_show_where_the_code_raised_and_what_they_waited_for() -> None:
    told = fates(3, Fault(rank=2))
    for words in told[:2]:
        assert isinstance(words, Told)
        assert "the first failure was on rank 2:" in words.text
        assert 'failing.py", line ' in words.text
        assert "in strike" in words.text
        assert "this rank was waiting for" in words.text
        assert "site-packages" not in words.text
        assert "gloo" not in words.text


def test_provider() -> None:
    for words in fates(2, Fault(where="provider")):
        assert f"rank 1: model_provider failed for stage 1: {BOOM}" in last_line(words)


def _refuses(rank: int) -> list[str]:
    strikes = True

    def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if strikes:
            raise ValueError("once")
        return mse(output, target)

    (x, y), *_ = batches(1, 8)
    schedule = build_schedule(None, 4, "1f1b", make_stage, loss_fn, timeout=20)[0].schedule
    texts = []
    for _ in range(2):
        with pytest.raises(PipelineError) as caught:
            schedule.step(x, targets=y)
        texts.append(str(caught.value))
    strikes = False
    schedule.reset()
    texts.append(f"{schedule.share_loss(schedule.step(x, targets=y)).item():.6f}")
    return texts


@pytest.mark.parametrize("ranks", [1, 2])
def test_refuses_further_steps_until_reset(ranks: int) -> None:
    rows = [_refuses(0)] if ranks == 1 else run_distributed(_refuses, ranks, timeout=40)
    last = ranks - 1
    for first, second, loss in rows:
        cause = f"rank {last}, stage {last}, microbatch 0, action {last}F0: ValueError: once"
        assert first.splitlines()[-1] == cause
        assert second.startswith("this pipeline has failed and takes no call until `reset`; the cause was: ")
        assert second.splitlines()[-1].endswith(cause)
        assert loss == rows[0][2]


def _reset_trains_as_before(rank: int) -> dict[str, torch.Tensor]:
    calls = 0

    class Once(nn.Module):
        def __init__(self, info: Any):
            super().__init__()
            self.inner, self.strikes = make_stage(info), info.is_last

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            nonlocal calls
            calls += 1
            if self.strikes and calls == 7:
                raise ValueError("once")
            return self.inner(x)

    schedule_info, modules = build_schedule(None, 4, "1f1b", Once, mse, timeout=20)
    schedule = schedule_info.schedule
    for x, y in batches(3, 8):
        try:
            schedule.step(x, targets=y)
        except (StageError, PeerError):
            for module in modules:
                module.zero_grad()
            schedule.reset()
    return {f"{rank}.{name}": p.grad for m in modules for name, p in m.named_parameters() if p.grad is not None}


def test_gradients_after_reset_are_right() -> None:
    rows = run_distributed(_reset_trains_as_before, 2, timeout=40)
    x, y = batches(3, 8)[2]
    stages = [make_stage(PipelineStageInfo(s, 2)) for s in range(2)]
    for start in range(0, 8, 2):
        mse(stages[1](stages[0](x[start : start + 2])), y[start : start + 2]).mul(0.25).backward()
    for rank, grads in enumerate(rows):
        for name, parameter in stages[rank].named_parameters():
            torch.testing.assert_close(grads[f"{rank}.inner.{name}"], parameter.grad)


def _agreed_errors_do_not_end_it(rank: int) -> float:
    (x, y), *_ = batches(1, 8)
    schedule = build_schedule(None, 4, "1f1b", make_stage, mse, timeout=20)[0].schedule
    with pytest.raises(ConfigError):
        schedule.step(x[:3], targets=y[:3])
    with pytest.raises(ConfigError):
        schedule.step(x, targets=y[:6])
    return float(schedule.share_loss(schedule.step(x, targets=y)))


def test_input_refused_by_all_does_not_end_the_pipeline() -> None:
    assert len(set(run_distributed(_agreed_errors_do_not_end_it, 2, timeout=30))) == 1


def _other_groups_still_work(rank: int, fault: Fault) -> Told:
    told = train(rank, fault)
    assert told is not None
    total = torch.tensor([rank + 1])
    dist.all_reduce(total)
    told.text = str(int(total))
    return told


def test_a_failure_leaves_the_users_groups_alone() -> None:
    """So that ranks which catch the error can still save what they have."""
    assert [told.text for told in fates(2, Fault(), run=_other_groups_still_work)] == ["3", "3"]  # type: ignore[union-attr]


def _custom_engine(rank: int, fault: Fault) -> Told | None:
    backward = torch.Tensor.backward

    def wrapped(self: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        raise AssertionError("hocket called Tensor.backward")

    torch.Tensor.backward = wrapped  # type: ignore[method-assign]
    try:
        return train(rank, fault)
    finally:
        torch.Tensor.backward = backward  # type: ignore[method-assign]


def test_an_engine_that_wraps_backward() -> None:
    """P19: the executor does not rely on being the outermost caller of Tensor.backward, or on calling it at all."""
    assert fates(2, Fault(step=99), run=_custom_engine) == [None, None]


def test_one_failure_in_code_between_steps() -> None:
    told = fates(2, Fault(where="between", what="exit"))
    assert told[1] == 3
    words = told[0]
    assert isinstance(words, Told) and words.kind == "PeerError"
    assert "rank 1 is gone" in last_line(words)
    assert words.seconds < 10
