"""Every schedule on 1, 2 and 4 ranks trains like one process."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist

from distributed import run_distributed
from hocket import ScheduleError, parse_schedule
from runtime.parity import Trained, batches, train_pipeline, train_reference

MICROBATCHES = (1, 2, 3, 4, 7, 8)
BATCH = 16
STEPS = 3


def _configs() -> list[dict[str, Any]]:
    deep = [
        {"schedule": name, "num_stages_per_rank": v, **more}
        for name, v, more in product(("looped_bfs", "1f1b"), (1, 2, 3), ({}, {"zero_bubble": True}))
        if name == "1f1b" or not more
    ]
    return [{"schedule": "gpipe"}, *deep, {"schedule": "zero_bubble_v"}, {"schedule": "dual_pipe_v"}]


def _train_all(rank: int, config: dict[str, Any]) -> dict[int, tuple[int, Trained] | None]:
    found: dict[int, tuple[int, Trained] | None] = {}
    for count in MICROBATCHES:
        try:
            losses, parameters = train_pipeline(None, config, count, batches(STEPS, BATCH))
        except ScheduleError:
            found[count] = None
            continue
        stages = torch.tensor([len(parameters) // 6])
        if dist.is_initialized():
            dist.all_reduce(stages)
        found[count] = (int(stages), (losses, parameters))
    return found


def _compare(rows: list[dict[int, tuple[int, Trained] | None]], config: dict[str, Any], ranks: int) -> None:
    bound = 5e-6 if config["schedule"] == "looped_bfs" else 0.0
    compared = []
    for count in MICROBATCHES:
        ran = [row[count] for row in rows if row[count] is not None]
        if not ran:
            continue
        num_stages = ran[0][0]
        losses, parameters = train_reference(num_stages, count, batches(STEPS, BATCH))
        mine: dict[str, torch.Tensor] = {}
        for _, (their_losses, theirs) in ran:
            torch.testing.assert_close(their_losses, losses, rtol=0, atol=bound)
            mine.update(theirs)
        assert mine.keys() == parameters.keys()
        torch.testing.assert_close(mine, parameters, rtol=0, atol=bound)
        compared.append(count)
    least = 2 * ranks if config["schedule"] == "dual_pipe_v" else 1
    assert compared == [count for count in MICROBATCHES if count >= least]


@pytest.mark.parametrize("config", _configs(), ids=lambda c: " ".join(map(str, c.values())))
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_equals_one_process(config: dict[str, Any], ranks: int) -> None:
    parse_schedule(config)
    if ranks == 1:
        rows = [_train_all(0, config)]
    else:
        rows = run_distributed(_train_all, ranks, config, timeout=90)
    _compare(rows, config, ranks)
