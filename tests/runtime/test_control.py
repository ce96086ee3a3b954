"""The control exchange of a step: what every rank said, on any number of ranks, in whatever order they come."""

from __future__ import annotations

import random
import time

import pytest
import torch
import torch.distributed as dist

from distributed import run_distributed
from hocket.runtime.p2p import Transport


def _gather(rank: int) -> list[list[list[int]]]:
    group = dist.group.WORLD
    assert group is not None
    transport = Transport(group, torch.device("cpu"), 20)
    late, found = random.Random(rank), []
    with transport.watch.call("test"):
        transport.connect()
        for index in range(12):
            time.sleep(late.choice([0, 0, 0.01]))
            # As many numbers as the call demands: two calls may differ.
            found.append(transport.gather([100 * rank + index, -rank, 1 << 62][: 1 + index % 3]))
    return found


@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 7])
def test_every_rank_hears_every_rank(ranks: int) -> None:
    expected = [[[100 * r + i, -r, 1 << 62][: 1 + i % 3] for r in range(ranks)] for i in range(12)]
    assert run_distributed(_gather, ranks) == [expected] * ranks
