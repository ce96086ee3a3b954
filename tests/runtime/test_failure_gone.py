"""Ranks that are killed, stopped, busy for ever, or never come: the others say so in time, by name."""

from __future__ import annotations

import time

import pytest
import torch

from distributed import Outcome, run_distributed
from hocket.errors import PipelineTimeoutError
from hocket.runtime import build_schedule
from runtime.failing import Fault, Told, fates, last_line
from runtime.parity import WIDTH, make_stage, mse

LIMIT = 2.0
"""The `timeout` of build_schedule in these tests."""


@pytest.mark.parametrize("what,code", [("kill", -9), ("exit", 3)])
@pytest.mark.parametrize("ranks", [2, 3])
def test_killed(what: str, code: int, ranks: int) -> None:
    told = fates(ranks, Fault(what=what))
    assert told[1] == code
    for rank in {*range(ranks)} - {1}:
        words = told[rank]
        assert isinstance(words, Told) and words.kind == "PeerError"
        assert last_line(words) == "rank 1 is gone: the connection closed without a word (killed, or out of memory)"
        assert "what each rank was doing" in words.text
        assert words.seconds < 10


def test_killed_says_what_was_waited_for() -> None:
    words = fates(2, Fault(what="kill"))[0]
    assert isinstance(words, Told)
    assert "this rank was waiting for 0RECV_B" in words.text


def test_killed_between_steps() -> None:
    words = fates(3, Fault(what="kill", where="between"))[0]
    assert isinstance(words, Told)
    assert "waiting for all ranks to come to this call" in words.text
    assert "rank 1 is gone" in last_line(words)
    assert words.seconds < 10


def test_stopped() -> None:
    told = fates(2, Fault(what="stop"), timeout=LIMIT)
    assert told[1] == -9  # by the test, in the end
    words = told[0]
    assert isinstance(words, Told) and words.kind == "PipelineTimeoutError"
    assert last_line(words) == "no answer within 2 s: rank 1 gives no sign of life (stopped, swapping, or cut off)"
    assert "  rank 1: " in words.text
    assert "this rank was waiting for 0RECV_B2 from rank 1" in words.text
    assert LIMIT <= words.seconds < LIMIT + 8


def test_stopped_with_neighbours_that_wait_for_one_another() -> None:
    told = fates(4, Fault(what="stop", rank=3), timeout=LIMIT)
    for words in told[:3]:
        assert isinstance(words, Told)
        assert "rank 3 gives no sign of life" in last_line(words)


def test_busy_for_ever() -> None:
    """The busy rank is ended too, with the place where it stood."""
    began = time.monotonic()
    told = fates(2, Fault(what="loop"), timeout=LIMIT)
    words = told[0]
    assert isinstance(words, Told) and words.kind == "PipelineTimeoutError"
    assert "no answer within 2 s: rank 1 is still in step 1, stage 1, microbatch 2, 1F2, for " in last_line(words)
    assert told[1] == 1
    assert time.monotonic() - began < 30


def test_busy_outside() -> None:
    told = fates(2, Fault(what="sleep", where="between", seconds=6), timeout=LIMIT)
    for words in told:
        assert isinstance(words, Told)
        assert "rank 1 is outside of hocket, after step 0, for " in last_line(words)


def test_slow_but_alive() -> None:
    assert fates(2, Fault(what="sleep", seconds=1.5), timeout=5) == [None, None]


def _never_builds(rank: int) -> str:
    if rank == 1:
        time.sleep(LIMIT + 2)
        return ""
    with pytest.raises(PipelineTimeoutError) as caught:
        build_schedule(None, 4, "1f1b", make_stage, mse, timeout=LIMIT)
    return str(caught.value)


def test_never_builds() -> None:
    words = run_distributed(_never_builds, 3, timeout=30)
    assert words[0] == words[2]
    assert words[0].splitlines()[-1] == (
        "no answer within 2 s: rank 1 has not called build_schedule (not started, or still busy before it)"
    )


def _leaves_early(rank: int) -> str:
    schedule = build_schedule(None, 4, "1f1b", make_stage, mse, timeout=20)[0].schedule
    x = torch.randn(8, WIDTH)
    for _ in range(5 if rank else 3):
        schedule.step(x, targets=x)
    return "done"


def test_data_runs_out_on_one_rank() -> None:
    """P14, without `batches`: the rank that has left is named, and how far it came."""
    outcomes: list[Outcome] = run_distributed(_leaves_and_ends, 3, timeout=30, check=False)
    for outcome in outcomes[1:]:
        assert outcome.traceback is not None
        assert "rank 0 is gone: it has left, after step 2" in outcome.traceback.splitlines()[-1]


def _leaves_and_ends(rank: int) -> str:
    done = _leaves_early(rank)
    if rank == 0:
        import gc
        import os

        gc.collect()
        os._exit(0)
    return done


def _batches(rank: int) -> list[float | None]:
    schedule = build_schedule(None, 4, "1f1b", make_stage, mse, timeout=20)[0].schedule
    torch.manual_seed(3)
    data = [torch.randn(8, WIDTH) for _ in range(8)]
    mine = {0: data[:5], 1: None, 2: data}[rank]
    seen = []
    for x in schedule.batches(mine):
        result = schedule.step(*([] if x is None else [x]), targets=x)
        seen.append(None if result.loss is None else float(result.loss))
    return seen


def test_batches_end_on_all_ranks_at_once() -> None:
    """P14: only the first and the last rank have data, and not the same amount."""
    rows = run_distributed(_batches, 3, timeout=30)
    assert [len(row) for row in rows] == [5, 5, 5]
    assert rows[0] == rows[1] == [None] * 5
    assert all(isinstance(loss, float) for loss in rows[2])


def _bad_batches(rank: int) -> None:
    def data() -> object:
        yield torch.zeros(8, WIDTH)
        if rank == 1:
            raise OSError("disk gone")
        yield torch.zeros(8, WIDTH)

    schedule = build_schedule(None, 4, "1f1b", make_stage, mse, timeout=20)[0].schedule
    for x in schedule.batches(data()):  # type: ignore[arg-type]
        schedule.step(x, targets=x)


def test_an_error_in_the_data_stops_all_ranks() -> None:
    outcomes = run_distributed(_bad_batches, 2, timeout=30, check=False)
    assert outcomes[0].traceback and outcomes[1].traceback
    assert outcomes[0].traceback.splitlines()[-1] == "rank 1, batches: OSError: disk gone"
    assert outcomes[1].traceback.splitlines()[-1] == "OSError: disk gone"
